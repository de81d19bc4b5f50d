/* EXPERT_DOWN on the CPU (instructions/expert_down.cuh), of several rows and of one: the kernel's own text, 256 lanes as coroutines (tests/lanes), and beside them 128 of the warps aside, which stage the pairs of
 * all batches but the first. Packets come late, stages of experts' weights when they like, and are no numbers when they have been left; nor is anything in shared memory before. What is published against
 * double arithmetic; and each row's bits are those of a kernel that has no table of packets, and so nobody aside, of a step of that row alone, and of mk_down_one, which is what such a step runs. */
#define LANES 384u
#include "tests/lanes/cuda.h"

extern "C" {
#include "instructions/program.h"
}
#include "instructions/expert_down.cuh"
#include "tests/lanes/experts.h"
#include "tests/lanes/ring.h"

#include <setjmp.h>
#include <stdarg.h>
extern "C" {
#include <cmocka.h>
}

#define STAGE   33280u /* bytes; ldmatrix reads on behind the last row of a slice */
#define SCALES  256u   /* bytes of a stage before its weights */
#define EXPERTS 60u
#define EPOCH   0x1234u
#define MAP     16u /* where the table is in mk_gpu_args.map */
typedef struct shape {
    bool fp8;
    uint32_t k, n, slices, uneven, topk, rows, experts, per, log; /* slices: of a pair; uneven: 1: of any even lengths, 2: of any, and so without a table; experts: of which rows choose; per: K blocks of a stage */
    uint32_t by[6];                                            /* if not 0: so many rows choose experts 0, 1 ..., and so on */
} shape;
static shape of;
static uint32_t nkb, nst, nseg, phase, scale_bytes, stages, at0, batch; /* batch: since the launch */
static mk_vec u, from, out; /* as in the instruction's waits 0 and 2, and its signal */
static uint32_t start[MK_PAIR_WORDS * 32 + 1];
static uint16_t *value;                               /* [row][rank][k], bf16 */
static float weight[MK_MAX_ROWS][MK_MAX_TOPK], *base; /* base: [row][n] */
static uint32_t chosen[MK_MAX_ROWS][MK_MAX_TOPK];     /* ascending */
static uint8_t *matrix[EXPERTS];                      /* scales, then weights */
static uint4 *exchange, *published, *alone; /* alone: in the exchange, for lanes without a pair look there */
static mk_routes *routes; /* in LOCAL memory, before the sums of others */
alignas(16) static uint32_t words[MAP + 32 * MK_PAIR_WORDS];
static bool hurried;         /* packets are there, and stages late: those aside go as far ahead as they may */
static uint32_t went[LANES]; /* batches so far, as those aside count them */
static uint32_t ones[2][3];       /* steps of one row by form and eights */
static uint32_t turned, crowded; /* steps whose batches take turns; batches that have no room beside the one before */

static uint16_t bf16_random(uint32_t exponent)
{
    return (uint16_t)(lanes_random(2) << 15 | (exponent + lanes_random(4)) << 7 | lanes_random(128));
}
static uint32_t wtype(void)
{
    return of.fp8 ? MK_W_FP8 : MK_W_BF16;
}
/* Where expert e's weight of row i and column c lies. */
static uint8_t *weight_at(uint32_t e, uint32_t i, uint32_t c)
{
    return lanes_weight_at(matrix[e] + scale_bytes, wtype(), of.n, i, c);
}

/* ---- the loader, as feed_segment, feed_blank and feed_shared have it ------------------------------------------------------ */

static void fill(uint32_t stage, uint8_t *to)
{
    const uint32_t j = (stage / nst) << of.log, first = stage % nst * of.per, kb_bytes = of.n * MK_KBLOCK_BYTES, bytes = first < nkb ? min(of.per, nkb - first) * kb_bytes : 0;
    for (uint32_t i = 0; i < 1u << of.log && j + i < routes->n_union && bytes; i++) {
        const uint8_t *m = matrix[routes->expert[j + i]];
        uint8_t *at = to + (of.log ? i * (scale_bytes + of.per * kb_bytes) : 0);
        memcpy(at, m, scale_bytes);
        memcpy(at + (of.log ? scale_bytes : SCALES), m + scale_bytes + first * kb_bytes, bytes);
    }
}

/* ---- a step -------------------------------------------------------------------------------------------------------------- */

/* Of a row's choice in u, of a row. */
static uint32_t pair_packets(void)
{
    return of.slices * u.slice_packets;
}
static uint32_t row_packets(void)
{
    return of.topk * pair_packets();
}
static void prepare(uint32_t r0, uint32_t n, bool map)
{
    mk_shared *sh = lanes_shared;
    lanes_loader.late = hurried ? 60000 : 6000;
    uint64_t some = 0; /* the union, by bits */
    for (uint32_t i = 0; i < n * of.topk; i++) some |= 1ull << chosen[r0 + i / of.topk][i % of.topk];
    at0 = lanes_random(1000), stages = ((uint32_t)__builtin_popcountll(some) + (1 << of.log) - 1 >> of.log) * nst;
    lanes_ring_begin(at0, stages, fill);
    lanes_ring_places(at0, SCALES);
    sh->args.map = words;
    for (uint32_t w = 0; w < MK_WARPS; w++) sh->memo[w].batch = batch;
    lanes_route(routes, chosen + r0, n, of.topk, EXPERTS);
    memcpy(routes->weight, weight[r0], n * sizeof weight[r0]);
    sh->step.nrows = n;
    sh->vec[0] = u, sh->vec[1] = {}, sh->vec[2] = from, sh->vec[3] = out;
    for (uint32_t s = 0; s <= u.nslice; s++) sh->start[s] = (uint16_t)(s / of.slices * of.k + start[s % of.slices]);
    if (from.scope == MK_LOCAL) memcpy((uint8_t *)routes + from.offset, base + r0 * of.n, n * of.n * sizeof *base);
    mk_fed *f = &sh->fed[0];
    f->in.opcode = MK_OP_EXPERT_DOWN;
    f->in.wait[1].vec = 1, f->in.wait[2].vec = 2, f->in.signal_vec = 3;
    f->in.expert.k = of.k, f->in.expert.n = (uint16_t)of.n, f->in.expert.wtype = (uint8_t)wtype(), f->in.expert.topk = (uint8_t)of.topk;
    f->plan.tile = {f->in.expert.wtype, of.n, nkb, of.per, nst, 1, nseg, phase, 1};
    f->plan.shared = {(uint16_t)of.log, (uint16_t)scale_bytes};
    f->plan.steps = mk_down_steps_of(&f->plan.tile, f->plan.shared, of.k);
    f->plan.packets = pair_packets(), f->plan.map = map ? MAP : 0;
    f->place.in[0] = exchange + r0 * row_packets(), f->place.in[2] = exchange + of.rows * row_packets() + r0 * from.slice_packets;
    f->place.epoch[0] = EPOCH, f->place.epoch[2] = EPOCH + 1;
    f->place.out = published, f->place.out_epoch = EPOCH + 2;
    f->place.after = lanes_random(1000);
    sh->aside = *f;
    lanes_bars[4] = {&sh->insn_empty[f->place.after % MK_INSN_RING], MK_WARPS, 0, f->place.after / MK_INSN_RING};
    for (uint32_t i = 0; i < lanes_packets; i++) lanes_late[i] = hurried || lanes_random(4) ? 0 : lanes_random(40);
}
template <uint32_t FORM> static void body(void)
{
    mk_shared *sh = lanes_shared;
    const uint32_t warp = lanes.me / 32, lane = lanes.me % 32;
    if (warp < MK_WARPS) {
        constexpr uint32_t PART = MK_RED_FLOATS / MK_WARPS;
        for (uint32_t n = lanes_random(30); n && lane == 0; n--) lanes_yield();
        if (lane == 0) memset(sh->red + warp * PART, 0xff, PART * sizeof *sh->red); /* sums of the instruction before, with which it is done */
        if (mk_arrives(lane)) mk_mbar_arrive(mk_smem(lanes_bars[4].at));
        mk_down_of<FORM>(&sh->fed[0].in);
    } else {
        went[lanes.me] = mk_batches_of(&sh->aside, sh->step.nrows).turns ? mk_aside_pairs(sh, &sh->aside, batch, warp - MK_WARPS, lane) : batch;
    }
}
/* The kernel's step of one row (plans.cuh: pairs_plan, one_row). False: such pairs go the way of several. */
template <uint32_t FORM> static void body_one(void)
{
    mk_shared *sh = lanes_shared;
    if (lanes.me >= LANES_COMPUTE) return;
    for (uint32_t n = lanes_random(30); n && lanes.me % 32 == 0; n--) lanes_yield();
    if (of.n <= 16)
        mk_down_one<FORM, 2>(mk_smem(&sh->fed[0].in));
    else if (of.n <= 24)
        mk_down_one<FORM, 3>(mk_smem(&sh->fed[0].in));
    else
        mk_down_one<FORM, 4>(mk_smem(&sh->fed[0].in));
}
static bool run_one(uint32_t r)
{
    mk_shared *sh = lanes_shared;
    if (of.n > MK_DOWN_ONE_ROWS || of.topk > 2 * MK_WARPS || pair_packets() > MK_PAIR_PACKETS(of.n) || of.topk * mk_row_stride(of.k) + MK_PAIR_HEAD > MK_STAGING) return false;
    published = alone;
    memset(alone, 0xff, out.slice_packets * sizeof *alone);
    prepare(r, 1, true);
    const uint32_t turn = lanes_random(2);
    for (uint32_t w = 0; w < MK_WARPS; w++) sh->memo[w].turn = turn;
    if (!lanes_run(of.fp8 ? body_one<MK_X_F16> : body_one<MK_X_BF16>))
        fail_msg("one row: %s, %u values, %u of the result, %u slices, row %u, %u of %u experts: %s", of.fp8 ? "e4m3" : "bf16", of.k, of.n, of.slices, r, of.topk, of.experts, lanes.error);
    for (uint32_t w = 0; w < MK_WARPS; w++) {
        assert_int_equal(sh->memo[w].next.at, at0 + stages);
        assert_int_equal(sh->memo[w].turn, turn ^ 1);
    }
    ones[of.fp8][of.n <= 16 ? 0 : of.n <= 24 ? 1 : 2]++;
    return true;
}
static void run(uint32_t r0, uint32_t n, bool map, uint4 *to)
{
    mk_shared *sh = lanes_shared;
    published = to;
    memset(to, 0xff, n * out.slice_packets * sizeof *to);
    prepare(r0, n, map);
    const mk_batches b = mk_batches_of(&sh->fed[0], n);
    uint32_t batches = 0; /* of turns */
    for (uint32_t j = 0, before = 0, next; b.turns && j < routes->n_union; before = sh->pairs.first[j], j = next, batches++) {
        next = mk_batch_end(&b, &sh->pairs, j, routes->n_union);
        const uint32_t first = sh->pairs.first[j], end = sh->pairs.first[next];
        crowded += end - before > b.fit;
        if (end - first > b.fit || next - j > MK_DOWN_HALF / MK_MAX_ROWS || next <= j) fail_msg("experts %u to %u are a batch", j, next);
    }
    turned += b.turns;
    if (!lanes_run(of.fp8 ? body<MK_X_F16> : body<MK_X_BF16>))
        fail_msg("%s, %u values, %u of the result, %u slices, %u rows from %u on, %u of %u experts, table %u: %s", of.fp8 ? "e4m3" : "bf16", of.k, of.n, of.slices, n, r0, of.topk, of.experts, map, lanes.error);
    for (uint32_t w = 0; w < MK_WARPS; w++) {
        assert_int_equal(sh->memo[w].next.at, at0 + stages); /* where the next instruction's stages begin */
        assert_int_equal(sh->memo[w].batch, batch + batches);
    }
    for (uint32_t i = LANES_COMPUTE; i < LANES; i++) assert_int_equal(went[i], batch + batches);
    for (uint32_t i = 0; i < 4; i++) assert_int_equal(lanes_bars[i].arrived, 0);
    batch += batches;
}

/* ---- in double ----------------------------------------------------------------------------------------------------------- */

static double entry(uint32_t e, uint32_t i, uint32_t c)
{
    return lanes_weight(weight_at(e, i, c), wtype()) * (of.fp8 ? ((const float *)matrix[e])[c / 128 * nseg + (phase + i) / MK_SCALE_ROWS] : 1);
}
/* The greatest difference of a value of row r, by the sum of the magnitudes that are added there. */
static double error(const uint4 *found, uint32_t r)
{
    double worst = 0;
    for (uint32_t i = 0; i < of.n; i++) {
        double want = base[r * of.n + i], all = fabs(want);
        for (uint32_t rank = 0; rank < of.topk; rank++)
            for (uint32_t c = 0; c < of.k; c++) {
                const double x = weight[r][rank] * entry(chosen[r][rank], i, c) * mk_widen_bf16(value[(r * of.topk + rank) * of.k + c]);
                want += x, all += fabs(x);
            }
        const uint4 q = found[i / 3];
        const double e = fabs(__uint_as_float(i % 3 == 0 ? q.x : i % 3 == 1 ? q.y : q.z) - want) / all;
        worst = q.w != EPOCH + 2 || e != e ? 1e9 : fmax(worst, e);
    }
    return worst;
}

/* Words of a packet behind its slice's end are 0 (mk_publish_unit); packets that nobody publishes hold anything, and the epoch perhaps. */
static void publish(void)
{
    u = {}, from = {}, out = {};
    for (uint32_t s = 0; s <= of.slices; s++) start[s] = s / of.slices * of.k + mk_expert_start(s % of.slices, of.k, of.slices) - (!(s % of.slices) ? 0 : of.uneven == 1 ? 2 * lanes_random(2) : of.uneven && of.k > 4 * of.slices ? lanes_random(3) : 0);
    for (uint32_t s = 0; s < of.slices; s++) u.slice_packets = max(u.slice_packets, (start[s + 1] - start[s] + 5) / 6);
    u.scope = MK_PACKET, u.dtype = MK_BF16, u.nslice = of.topk * of.slices, u.reserved = mk_div_by(u.slice_packets).magic;
    from.scope = lanes_random(2) ? MK_LOCAL : MK_PACKET, from.nslice = 1, from.slice_packets = (of.n + 2) / 3, from.offset = (sizeof *routes + 15) & ~15u;
    out.scope = MK_PACKET, out.dtype = MK_F32, out.nslice = 1, out.slice_packets = (of.n + 2) / 3;
    assert_true(pair_packets() <= 32 * MK_PAIR_WORDS);
    memset(words, 0, sizeof words);
    mk_pair_table(words + MAP, start, pair_packets(), u.slice_packets);
    const uint32_t all = of.rows * row_packets();
    exchange = lanes_exchange_open(all + of.rows * from.slice_packets + out.slice_packets + 512); /* memory goes on */
    alone = exchange + all + of.rows * from.slice_packets;
    for (uint32_t i = 0; i < lanes_packets; i++) {
        const uint32_t q = i % pair_packets(), pair = i / pair_packets(), s = q / u.slice_packets, first = start[s] + q % u.slice_packets * 6;
        exchange[i] = make_uint4(lanes_random(~0u), lanes_random(~0u), lanes_random(~0u), EPOCH - lanes_random(2));
        if (i < all && first < start[s + 1]) {
            uint16_t v[6] = {};
            memcpy(v, value + pair * of.k + first, min(start[s + 1] - first, 6u) * sizeof *v);
            memcpy(&exchange[i], v, sizeof v);
            exchange[i].w = EPOCH;
        }
    }
    for (uint32_t i = 0; i < of.rows * of.n; i++) {
        uint4 *q = exchange + all + i / of.n * from.slice_packets + i % of.n / 3;
        (&q->x)[i % of.n % 3] = __float_as_uint(base[i]), q->w = EPOCH + 1;
    }
}
static void check(const shape *s)
{
    of = *s;
    const uint32_t per = mk_kblock_values(wtype());
    nkb = (of.k + per - 1) / per, nst = ((nkb + of.per - 1) / of.per + 1) & ~1u;
    phase = lanes_random(2) ? lanes_random(MK_SCALE_ROWS) : MK_SCALE_ROWS - 1 - lanes_random(of.n), nseg = of.fp8 ? (phase + of.n - 1) / MK_SCALE_ROWS + 1 : 1, scale_bytes = of.fp8 ? ((nkb + 1) / 2 * nseg * 4 + 127) & ~127u : 0;
    assert_true(scale_bytes <= SCALES && (of.log ? (scale_bytes + of.per * of.n * MK_KBLOCK_BYTES) << of.log : SCALES + of.per * of.n * MK_KBLOCK_BYTES) + 256 <= STAGE && of.experts <= EXPERTS);
    assert_true(!of.log || (nkb == 2 * of.per && (uint32_t)MK_MAX_ROWS << of.log <= MK_STAGING / mk_row_stride(of.k))); /* shared_by */
    for (uint32_t e = 0; e < of.experts; e++) {
        matrix[e] = (uint8_t *)calloc(1, scale_bytes + nkb * of.n * MK_KBLOCK_BYTES);
        for (uint32_t i = 0; i < scale_bytes / 4; i++) ((float *)matrix[e])[i] = ldexpf(1 + (float)lanes_random(100) / 100, -(int)lanes_random(4));
        for (uint32_t i = 0; i < of.n * of.k; i++) { /* zeros up to the end of the K block */
            const uint16_t w = of.fp8 ? (uint16_t)(lanes_random(2) << 7 | (32 + lanes_random(48))) : bf16_random(122);
            memcpy(weight_at(e, i / of.k, i % of.k), &w, MK_KBLOCK_BYTES / per);
        }
    }
    value = (uint16_t *)malloc(of.rows * of.topk * of.k * sizeof *value);
    base = (float *)malloc(of.rows * of.n * sizeof *base);
    for (uint32_t i = 0; i < of.rows * of.n; i++) base[i] = ((float)lanes_random(2001) - 1000) / 256;
    uint32_t ranks[MK_MAX_ROWS] = {};
    for (uint32_t e = 0, pair = 0; of.by[0] && e < of.experts; e++)
        for (uint32_t i = 0; i < of.by[e % 6]; i++, pair++) chosen[pair % of.rows][ranks[pair % of.rows]++] = e;
    for (uint32_t r = 0; r < of.rows; r++) {
        for (uint32_t e = 0; ranks[r] < of.topk; e++)
            if (lanes_random(of.experts - e) < of.topk - ranks[r]) chosen[r][ranks[r]++] = e;
        for (uint32_t rank = 0; rank < of.topk; rank++) {
            const uint32_t exponent = 115 + lanes_random(12); /* each pair has a power of two of its own */
            for (uint32_t c = 0; c < of.k; c++) value[(r * of.topk + rank) * of.k + c] = bf16_random(exponent);
            weight[r][rank] = (float)(1 + lanes_random(1000)) / 1024;
        }
    }
    publish();
    batch = lanes_random(1000);
    for (uint32_t i = 0; i < 4; i++) lanes_bars[i] = {i < 2 ? &lanes_shared->pairs_full[i] : &lanes_shared->pairs_empty[i & 1], i < 2 ? MK_ASIDES : MK_WARPS, 0, (batch + 1 - (i & 1)) / 2};
    const uint32_t n = out.slice_packets;
    uint4 *const several = (uint4 *)malloc(of.rows * n * sizeof *several), *const other = (uint4 *)malloc(of.rows * n * sizeof *other);
    const bool table = of.uneven < 2;
    run(0, of.rows, table, several);
    run(0, of.rows, false, other);
    bool differ = memcmp(several, other, of.rows * n * sizeof *several) != 0;
    if (of.by[0]) {
        hurried = true;
        run(0, of.rows, true, other);
        hurried = false, differ |= memcmp(several, other, of.rows * n * sizeof *several) != 0;
    }
    for (uint32_t r = 0; r < of.rows; r++) {
        run(r, 1, table && lanes_random(2), other);
        const bool single = memcmp(several + r * n, other, n * sizeof *several) != 0, one = table && run_one(r) && memcmp(several + r * n, alone, n * sizeof *several) != 0;
        const double off = error(several + r * n, r);
        if (differ || single || one || !(off < 1e-6))
            fail_msg("%s, %u values, %u of the result, %u slices, row %u of %u, %u of %u experts: an error of %g; bits are%s those without a table,%s the row's alone, and%s mk_down_one's", of.fp8 ? "e4m3" : "bf16", of.k, of.n,
                     of.slices, r, of.rows, of.topk, of.experts, off, differ ? " not" : "", single ? " not" : "", one ? " not" : "");
    }
    for (uint32_t e = 0; e < of.experts; e++) free(matrix[e]);
    free(value), free(base), lanes_exchange_close(), free(several), free(other);
}

/* All at once. */
static void test_one_batch(void **)
{
    const shape shapes[] = {{true, 64, 14, 4, 0, 2, 2, 5, 1, 0, {}}, {false, 128, 40, 16, 0, 5, 4, 8, 2, 0, {}}, {true, 194, 33, 11, 1, 4, 8, 7, 3, 0, {}}, {true, 193, 33, 11, 2, 4, 8, 7, 3, 0, {}}, {false, 96, 17, 66, 2, 3, 5, 6, 2, 0, {}}, {false, 512, 16, 32, 0, 3, 7, 5, 8, 1, {}}};
    for (const shape &s : shapes) check(&s);
    assert_int_equal(turned, 0);
}
/* In turns, of many pairs and of few; of more experts than half a table has; of experts that so many rows choose that they have no room beside the batch before, or just have. Two rows of ten long pairs
 * each: a row alone has its batches, too. */
static void test_turns(void **)
{
    const shape shapes[] = {{true, 320, 24, 10, 0, 8, 8, 14, 3, 0, {}}, {true, 1536, 40, 64, 0, 2, 8, 2, 12, 0, {}}, {true, 1400, 14, 70, 0, 5, 8, 6, 11, 0, {7, 7, 6, 5, 8, 7}}, {true, 64, 16, 3, 0, 10, 6, 60, 1, 0, {1, 1, 1, 1, 1, 1}},
                            {false, 1024, 18, 48, 0, 3, 8, 5, 8, 0, {}}, {true, 1398, 17, 90, 1, 10, 2, 14, 11, 0, {}}, {false, 206, 33, 9, 1, 10, 6, 12, 4, 0, {}}};
    for (const shape &s : shapes) check(&s);
    assert_true(turned >= sizeof shapes / sizeof *shapes && crowded > 2);
}
/* Experts that share stages. */
static void test_shared(void **)
{
    const shape shapes[] = {{true, 512, 16, 16, 0, 6, 8, 10, 4, 2, {}}, {true, 1024, 15, 32, 0, 3, 8, 5, 8, 1, {}}, {false, 512, 16, 24, 1, 7, 6, 9, 8, 1, {}}, {true, 500, 24, 20, 1, 6, 7, 6, 4, 1, {}}, {false, 256, 16, 16, 0, 9, 8, 9, 4, 2, {}}};
    for (const shape &s : shapes) check(&s);
}
/* What mk_down_one is there for: published models' pairs (kimi-linear-48b, glm-4.7-flash, moonlight-16b, the qwens, deepseek), experts of many stages and of odd K blocks, one pair a warp and two,
 * in all its forms. */
static void test_one_row(void **)
{
    const shape shapes[] = {{true, 1024, 18, 32, 0, 8, 2, 11, 8, 0, {}},  {true, 1536, 16, 64, 0, 4, 2, 6, 12, 0, {}},  {true, 1408, 16, 44, 0, 6, 2, 9, 11, 0, {}}, {true, 512, 16, 16, 0, 8, 2, 13, 4, 2, {}},
                            {true, 512, 16, 16, 1, 10, 2, 17, 4, 2, {}},  {true, 1024, 17, 32, 1, 8, 2, 9, 8, 1, {}},    {true, 64, 31, 4, 0, 3, 2, 5, 1, 0, {}},     {true, 320, 24, 10, 1, 9, 2, 12, 1, 0, {}},
                            {true, 1000, 32, 20, 1, 7, 2, 8, 3, 0, {}},   {false, 512, 16, 32, 0, 8, 2, 12, 8, 1, {}},   {false, 704, 18, 22, 1, 6, 2, 7, 5, 0, {}},  {false, 256, 32, 16, 1, 10, 2, 15, 4, 1, {}},
                            {false, 96, 30, 6, 0, 1, 2, 3, 2, 0, {}},     {false, 64, 14, 4, 1, 12, 2, 16, 1, 0, {}},  {true, 1024, 16, 32, 0, 10, 2, 14, 8, 0, {}}, {true, 900, 18, 18, 1, 12, 2, 16, 5, 0, {}}};
    for (const shape &s : shapes) check(&s);
    for (uint32_t i = 0; i < 6; i++) assert_in_range(ones[i / 3][i % 3], 4, 1000);
}

int main(void)
{
    lanes_ring_open(STAGE, sizeof *routes + MK_MAX_ROWS * MK_SEGMENT_ROWS * 4);
    routes = (mk_routes *)(lanes_shared + 1);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_one_batch), cmocka_unit_test(test_turns), cmocka_unit_test(test_shared), cmocka_unit_test(test_one_row)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
