/* GQA_PARTIAL on the CPU (instructions/gqa_partial.cuh): the kernel's own text, 256 lanes as coroutines (tests/lanes), of all workers that share a row's items. Rows of a stream, each in a step of its
 * own, its newest key and value out of packets and pages out of the ring, whose stages are filled when they like and are no numbers when they have been left; then all of them in one step, over the
 * cache that these have written: the same bits, and attention in double; of a row of one split what COMBINE would publish. Packets come late, and nothing that is no number comes from behind a row's
 * last token. */
#include "tests/lanes/cuda.h"

extern "C" {
#include "instructions/program.h"
}
#include "instructions/gqa_partial.cuh"
#include "tests/lanes/ring.h"

#include <setjmp.h>
#include <stdarg.h>
extern "C" {
#include <cmocka.h>
}

#define PAGES  12u /* of the pool, and of the stream */
#define STAGE  32768u /* bytes at most */
#define EPOCH0 77u
#define SEQ    4u
typedef struct shape {
    uint32_t heads, kv_heads, dim, rope, norm, slice, first, rows, parts, grain, most; /* slice: values of a slice of the packets; first: the first row's position */
} shape;
static shape of;
static mk_vec vec; /* queries, keys, values of a row */
static uint32_t page[PAGES], at0;
static uint16_t *pool; /* [PAGES][mk_gqa_page_values] */
static float *value;   /* [row][width]: queries, keys, values as packets carry them */
static float *param;   /* gamma and frequencies of queries, then of keys */
static float *bulk;    /* [MK_MAX_ROWS][MK_MAX_SPLITS][heads][dim + 4] */
static uint4 *exchange, *out; /* out: packets that the items publish of a row of one split, in slices of `whole` values, if it is not 0 */
static uint32_t whole;
static uint32_t counter = 0x7fffffffu;

static uint32_t params(void)
{
    return (of.norm ? of.dim : 0) + of.rope / 2;
}
static uint32_t partial_floats(void)
{
    return MK_MAX_SPLITS * of.heads * mk_partial_floats(of.dim); /* of a row */
}
static uint16_t *cached(uint32_t kv, uint32_t which, uint32_t t)
{
    return pool + page[t / MK_PAGE] * mk_gqa_page_values(of.kv_heads, of.dim) + mk_gqa_at(of.dim, kv, which, t % MK_PAGE);
}

/* ---- the loader, as feed_heads has it ----------------------------------------------------------------------------------- */

static const uint16_t **stage_from; /* of each stage, NULL: nothing is copied */
static uint32_t n_stages, stage_bytes;

static void stages_of(const mk_gqa *g, uint32_t pos)
{
    const uint32_t last = pos / MK_PAGE, per = mk_split_pages(pos, g->grain, g->most), splits = mk_splits(pos, g->grain, g->most), blocks = mk_gqa_blocks(g->dim), turn = MK_GQA_TURN(blocks), stages = MK_GQA_STAGES(blocks);
    const bool halves = mk_gqa_halves(g, splits);
    const uint32_t times = halves ? 1 : (of.heads / of.kv_heads + MK_GQA_HEADS - 1) / MK_GQA_HEADS;
    stage_bytes = mk_gqa_stage_bytes(g->dim);
    for (uint32_t i = g->part; i < (splits + halves) * of.kv_heads; i += g->parts) {
        const uint32_t nth = i / of.kv_heads, kv = i - nth * of.kv_heads, first = min(nth, splits - 1) * per, n = min(per, last + 1 - first);
        for (uint32_t t = 0; t < times; t++)
            for (uint32_t k = 0; k < n; k += turn)
                for (uint32_t j = 0; j < turn * stages; j++) {
                    const uint32_t whose = (at0 + n_stages) % MK_GROUPS, other = turn > 1 ? whose : 0, part = turn > 1 ? j / 2 : j < 2 ? whose : j;
                    stage_from[n_stages++] = k + other < n ? cached(kv, 0, (first + k + other) * MK_PAGE) + part * stage_bytes / 2 : NULL;
                }
    }
}
static void fill(uint32_t stage, uint8_t *to)
{
    if (stage_from[stage]) memcpy(to, stage_from[stage], stage_bytes);
}

/* ---- steps --------------------------------------------------------------------------------------------------------------- */

/* Packets of row r from slice s on, in that half of the exchange which the step reads. */
static uint4 *packets_of(uint32_t r, uint32_t s)
{
    return exchange + mk_packet_offset(&vec, mk_half(&vec, SEQ, 0), r, s) / 16;
}
static void publish(void)
{
    for (uint32_t r = 0; r < of.rows; r++)
        for (uint32_t i = 0; i < vec.width; i++) {
            uint4 *q = packets_of(r, i / of.slice) + i % of.slice / 6;
            const uint32_t k = i % of.slice % 6, word = mk_bf16_bits(value[r * vec.width + i]) << 16 * (k & 1);
            uint32_t *w = &q->x + k / 2;
            *w = k & 1 ? *w | word : word;
            q->w = mk_epoch(EPOCH0, SEQ, 0);
            lanes_late[q - exchange] = lanes_random(3) ? 0 : lanes_random(30);
        }
}
/* A step of rows [row, row + n), for worker `part` of those that share the items. */
static void prepare(uint32_t row, uint32_t n, uint32_t part)
{
    mk_shared *sh = lanes_shared;
    const uint32_t pos = of.first + row;
    mk_gqa g = {};
    g.q_stride = of.dim, g.heads = (uint16_t)of.heads, g.kv_heads = (uint16_t)of.kv_heads, g.dim = (uint16_t)of.dim, g.rope = (uint16_t)of.rope, g.norm = (uint8_t)of.norm;
    g.scale = 0.11f, g.eps = 1e-6f, g.part = part, g.parts = of.parts, g.grain = (uint8_t)of.grain, g.most = (uint8_t)of.most;
    n_stages = 0; /* in a step of several rows the loader has none of it */
    if (n == 1) stages_of(&g, pos);
    lanes_ring_begin(at0, n_stages, fill);
    sh->args.exchange = (uint8_t *)exchange, sh->args.bulk = (uint8_t *)bulk, sh->args.counter = &counter, sh->args.param = param, sh->args.page = page, sh->args.max_pages = PAGES, sh->args.kv = (uint8_t *)pool;
    sh->args.kv_page_bytes = 2 * mk_gqa_page_values(of.kv_heads, of.dim), sh->args.epoch0 = EPOCH0;
    mk_vec *v = sh->vec;
    memset(v, 0, 4 * sizeof *v);
    v[0] = vec;
    v[1].scope = MK_BULK, v[1].pubs = 1, v[1].signals = of.kv_heads;
    v[2].scope = MK_BULK, v[2].pubs = 1, v[2].signals = of.parts;
    for (uint32_t s = 0; s <= vec.nslice; s++) sh->start[s] = (uint16_t)min(s * of.slice, vec.width);
    sh->step.seq = SEQ, sh->step.nrows = n;
    for (uint32_t r = 0; r < n; r++) sh->step.row[r].pos = pos + r;
    mk_fed *f = &sh->fed[0];
    f->in.gqa = g;
    f->in.wait[0] = {0, 0, 0, (uint16_t)vec.nslice}, f->in.wait[1] = {1, 0, 0, 0}, f->in.signal_vec = 2;
    f->plan.newest = {of.heads * of.dim, (of.heads + of.kv_heads) * of.dim, params(), 1e-6f};
    f->plan.whole = {(uint16_t)(whole ? 3 : MK_NONE), 0, (uint16_t)whole, (uint16_t)(whole ? of.dim / whole : 0)};
    v[3].dtype = MK_BF16, v[3].slice_packets = (uint32_t)mk_slice_packets(&v[3], whole);
    if (n > 1) return;
    const uint32_t splits = mk_splits(pos, g.grain, g.most);
    const bool halves = mk_gqa_halves(&g, splits);
    f->place.in[0] = packets_of(row, 0), f->place.epoch[0] = mk_epoch(EPOCH0, SEQ, 0);
    f->place.per = mk_split_pages(pos, g.grain, g.most), f->place.items = (splits + halves) * of.kv_heads, f->place.ahead = MK_AHEAD_ALIKE | (halves ? MK_AHEAD_HALVES : 0) | (whole ? MK_AHEAD_WHOLE : 0);
    f->place.out = out, f->place.out_epoch = EPOCH0;
    for (uint32_t i = 0; i < of.rope / 2; i++) mk_sincosf(mk_mul((float)pos, param[params() - of.rope / 2 + i]), &sh->angle[i].x, &sh->angle[i].y);
}
template <uint32_t NB> static void of_one(void)
{
    mk_gqa_one<NB>(mk_smem(&lanes_shared->fed[0].in));
}
template <uint32_t NB> static void of_several(void)
{
    mk_gqa_rows<NB>(&lanes_shared->fed[0].in);
}
static void run(void (*body)(void), uint32_t row, uint32_t n)
{
    for (uint32_t part = 0; part < of.parts; part++) {
        prepare(row, n, part);
        publish();
        const bool went = lanes_run(body);
        if (!went) fail_msg("%u heads, %u KV heads of %u, position %u, %u rows, worker %u: %s", of.heads, of.kv_heads, of.dim, of.first + row, n, part, lanes.error);
        for (uint32_t w = 0; w < MK_WARPS; w++) assert_int_equal(lanes_shared->memo[w].next.at, at0 + n_stages); /* where the next instruction's stages begin */
    }
}

/* ---- attention in double ------------------------------------------------------------------------------------------------- */

/* A head of row r as it is attended with, or cached: normalised with gamma, and rotated. */
static void turned(double *y, const float *x, const float *p, uint32_t pos)
{
    double square = 0;
    for (uint32_t c = 0; c < of.dim; c++) square += (double)x[c] * x[c];
    for (uint32_t c = 0; c < of.dim; c++) y[c] = of.norm ? x[c] / sqrt(square / of.dim + 1e-6) * p[c] : x[c];
    const float *frequency = p + (of.norm ? of.dim : 0);
    for (uint32_t c = 0; c < of.rope / 2; c++) {
        const double angle = (double)((float)pos * frequency[c]), a = y[c], b = y[c + of.rope / 2];
        y[c] = a * cos(angle) - b * sin(angle), y[c + of.rope / 2] = a * sin(angle) + b * cos(angle);
    }
}
/* The greatest difference of an output of row r, by the RMS of its head's; and of what the row has put into the cache, by the values there. */
static double error(const float *partial, uint32_t r)
{
    const uint32_t pos = of.first + r, splits = mk_splits(pos, of.grain, of.most), floats = mk_partial_floats(of.dim), group = of.heads / of.kv_heads;
    double worst = 0, y[MK_GQA_DIM], q[MK_GQA_DIM], want[MK_GQA_DIM], *const p = (double *)malloc((pos + 1) * sizeof *p);
    for (uint32_t h = 0; h < of.heads; h++) {
        double top = -INFINITY, most = -INFINITY, sum = 0, all = 0, square = 0, off = 0;
        turned(q, value + r * vec.width + h * of.dim, param, pos);
        for (uint32_t t = 0; t <= pos; t++) {
            const uint16_t *k = cached(h / group, 0, t);
            p[t] = 0;
            for (uint32_t c = 0; c < of.dim; c++) p[t] += q[c] * mk_widen_bf16(k[c]);
            p[t] *= 0.11f, top = fmax(top, p[t]);
        }
        for (uint32_t c = 0; c < of.dim; c++) want[c] = y[c] = 0;
        for (uint32_t t = 0; t <= pos; t++) {
            const uint16_t *v = cached(h / group, 1, t);
            p[t] = exp(p[t] - top), sum += p[t];
            for (uint32_t c = 0; c < of.dim; c++) want[c] += p[t] * mk_widen_bf16(v[c]);
        }
        for (uint32_t s = 0; s < splits; s++) most = fmax(most, partial[(s * of.heads + h) * floats + of.dim]);
        for (uint32_t s = 0; s < splits; s++) {
            const float *x = partial + (s * of.heads + h) * floats;
            const double by = exp(x[of.dim] - most);
            all += by * x[of.dim + 1];
            for (uint32_t c = 0; c < of.dim; c++) y[c] += by * x[c];
        }
        for (uint32_t c = 0; c < of.dim; c++) {
            const double e = fabs(y[c] / all - want[c] / sum);
            square += want[c] * want[c] / sum / sum, off = e > off || e != e ? e : off;
        }
        worst = fmax(worst, off == off ? off / sqrt(square / of.dim) : 1e9);
    }
    for (uint32_t kv = 0; kv < of.kv_heads; kv++) {
        const float *const k = value + r * vec.width + (of.heads + kv) * of.dim, *const v = k + of.kv_heads * of.dim;
        turned(q, k, param + params(), pos);
        for (uint32_t c = 0; c < of.dim; c++) {
            const double e = fabs(q[c] - mk_widen_bf16(cached(kv, 0, pos)[c])) / (fabs(q[c]) + 1e-3);
            worst = fmax(worst, e == e ? e : 1e9);
            if (mk_widen_bf16(cached(kv, 1, pos)[c]) != v[c]) worst = 1e9;
        }
    }
    free(p);
    return worst;
}

/* What a row of one split has published, by its partials. */
static uint32_t published_otherwise(const float *partial)
{
    const uint32_t sp = (whole + 5) / 6;
    uint32_t other = 0;
    for (uint32_t i = 0; i < of.heads * of.dim; i++) {
        const float *x = partial + i / of.dim * mk_partial_floats(of.dim);
        const uint4 q = out[i / whole * sp + i % whole / 6];
        const uint32_t k = i % whole % 6, word = k < 2 ? q.x : k < 4 ? q.y : q.z;
        other += q.w != EPOCH0 || (word >> 16 * (k & 1) & 0xffffu) != mk_bf16_bits(x[i % of.dim] * mk_reciprocal(x[of.dim + 1]));
    }
    return other;
}

template <uint32_t NB> static void check(const shape *s, uint32_t values = 0)
{
    of = *s;
    at0 = 2 * lanes_random(20);
    vec = {};
    vec.scope = MK_PACKET, vec.dtype = MK_BF16, vec.pubs = 1, vec.width = (of.heads + 2 * of.kv_heads) * of.dim, vec.nslice = (vec.width + of.slice - 1) / of.slice;
    vec.slice_packets = (uint32_t)mk_slice_packets(&vec, of.slice), vec.reserved = mk_div_by(vec.slice_packets).magic;
    const uint32_t floats = mk_partial_floats(of.dim);
    for (uint32_t i = 0; i < PAGES; i++) page[i] = (i * 5 + 2) % PAGES;
    pool = (uint16_t *)malloc(2 * PAGES * mk_gqa_page_values(of.kv_heads, of.dim));
    memset(pool, 0xff, 2 * PAGES * mk_gqa_page_values(of.kv_heads, of.dim));
    for (uint32_t t = 0; t < of.first; t++)
        for (uint32_t kv = 0; kv < of.kv_heads; kv++)
            for (uint32_t c = 0; c < 2 * of.dim; c++) cached(kv, c / of.dim, t)[c % of.dim] = (uint16_t)mk_bf16_bits(lanes_bf16_random(120));
    value = (float *)malloc(of.rows * vec.width * sizeof *value);
    for (uint32_t i = 0; i < of.rows * vec.width; i++) value[i] = lanes_bf16_random(120);
    param = (float *)malloc(2 * params() * sizeof *param + 4);
    for (uint32_t k = 0; k < 2; k++)
        for (uint32_t i = 0; i < params(); i++) param[k * params() + i] = i < params() - of.rope / 2 ? 0.5f + 0.01f * (float)lanes_random(100) : powf(10000.0f, -2.0f * (float)(i - (params() - of.rope / 2)) / (float)of.rope);
    exchange = lanes_exchange_open((uint32_t)mk_packet_offset(&vec, 2, 0, 0) / 16);
    stage_from = (const uint16_t **)malloc(4096 * sizeof *stage_from);
    const size_t room = (size_t)MK_MAX_ROWS * partial_floats() * sizeof *bulk;
    float *const one = (float *)malloc(room), *const several = (float *)malloc(room);
    memset(one, 0xff, room), memset(several, 0xff, room);
    for (uint32_t r = 0; r < of.rows; r++) {
        bulk = one + r * partial_floats();
        run(of_one<NB>, r, 1);
    }
    for (uint32_t r = 0; r < of.rows && values; r++) {
        whole = values, bulk = several;
        out = (uint4 *)calloc(of.heads * of.dim / whole * ((whole + 5) / 6), sizeof *out);
        run(of_one<NB>, r, 1);
        const uint32_t other = published_otherwise(one + r * partial_floats());
        if (other) fail_msg("%u heads of %u, position %u: of the published values %u are others", of.heads, of.dim, of.first + r, other);
        free(out);
    }
    whole = 0, bulk = several;
    if (of.rows > 1) run(of_several<NB>, 0, of.rows);
    for (uint32_t r = 0; r < of.rows; r++) {
        const double off = error(one + r * partial_floats(), r);
        uint32_t differ = 0;
        for (uint32_t i = 0; of.rows > 1 && i < mk_splits(of.first + r, of.grain, of.most) * of.heads; i++)
            differ += memcmp(one + r * partial_floats() + i * floats, several + r * partial_floats() + i * floats, (of.dim + 2) * sizeof *one) != 0;
        if (differ || !(off < 2e-2)) fail_msg("%u heads, %u KV heads of %u, position %u: an error of %g; bits of %u partials are not those of several rows", of.heads, of.kv_heads, of.dim, of.first + r, off, differ);
    }
    free(one), free(several), free(pool), free(value), free(param), lanes_exchange_close(), free(stage_from);
}

/* Eight rows that share their items, whose last split ends behind some of them; rows over an edge of splits, which are two groups; splits of one page and of several turns. */
static void test_64(void **)
{
    const shape shapes[] = {{8, 2, 64, 64, 0, 26, 2 * MK_PAGE - 4, 8, 3, 0, 2}, {8, 2, 64, 32, 1, 64, 4 * MK_PAGE - 5, 8, 4, 0, 2}, {4, 4, 64, 64, 0, 30, 9 * MK_PAGE + 3, 2, 5, 0, 2}, {10, 1, 32, 16, 1, 22, MK_PAGE + 60, 3, 2, 0, 66}};
    for (const shape &s : shapes) check<2>(&s);
}
static void test_128(void **)
{
    const shape shapes[] = {{12, 2, 128, 128, 1, 128, 3 * MK_PAGE - 2, 3, 3, 0, 2}, {4, 1, 80, 0, 0, 26, 5 * MK_PAGE, 5, 2, 1, 2}};
    for (const shape &s : shapes) check<4>(&s);
}
/* Of eight heads the last split's items are two, if there are workers; of ten they are taken in two turns. */
static void test_256(void **)
{
    const shape shapes[] = {{8, 1, 256, 64, 1, 62, 3 * MK_PAGE - 1, 3, 8, 0, 66}, {10, 1, 160, 32, 0, 40, 2 * MK_PAGE + 9, 2, 1, 0, 2}};
    for (const shape &s : shapes) check<8>(&s);
}
/* Rows of one split, a stream's first ones among them. */
static void test_whole(void **)
{
    const shape shapes[] = {{8, 2, 64, 64, 0, 26, 0, 3, 2, 2, 66}, {12, 2, 96, 32, 0, 40, 100, 2, 2, 1, 66}, {4, 1, 256, 64, 1, 62, 40, 2, 1, 0, 66}, {4, 2, 24, 8, 0, 22, 130, 2, 2, 2, 66}};
    check<2>(&shapes[0], 16);
    check<4>(&shapes[1], 32);
    check<8>(&shapes[2], 64);
    check<2>(&shapes[3], 24);
}

int main(void)
{
    lanes_ring_open(STAGE);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_64), cmocka_unit_test(test_128), cmocka_unit_test(test_256), cmocka_unit_test(test_whole)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
