/* EXPERT_UP on the CPU (instructions/expert_up.cuh): the kernel's own text from h's packets to u's, 256 lanes as coroutines (tests/lanes) and a loader that fills stages when it likes. What a worker
 * publishes of several rows' choices against double arithmetic; and each row's bits are those of a step of that row alone, by mk_up_one. */
#include "tests/lanes/cuda.h"

extern "C" {
#include "instructions/program.h"
}
#include "instructions/expert_up.cuh"

#include <setjmp.h>
#include <stdarg.h>
extern "C" {
#include <cmocka.h>
}
#include "tests/lanes/experts.h"
#include "tests/lanes/packets.h"
#include "tests/lanes/ring.h"

#define STAGE   33792u /* bytes; ldmatrix reads on behind the last row of a segment */
#define SCALES  1024u  /* bytes of a stage before its weights */
#define EXPERTS 12u
#define SLICES  40u
#define EPOCH0  0x1200u
typedef struct shape {
    bool fp8;
    uint32_t k, slice, inter, T, topk, experts, rows, workers, per, less; /* slice: of h; per, less: K blocks of a stage of the longest slices and of shorter ones */
} shape;
static shape of;
static mk_plan plan;
static mk_vec vec[3]; /* h, routes, u */
static uint32_t start[256], nkb, scale_bytes, at0;
static float *value, *gain; /* [row][k], [k] */
static uint32_t chosen[MK_MAX_ROWS][MK_MAX_TOPK]; /* ascending */
static uint8_t *segment[EXPERTS][SLICES], *exchange; /* scales, then weights */
static uint32_t words[LANES_WORDS], begun, compared;
static mk_routes *routes; /* LOCAL */
typedef struct piece {
    uint8_t *from; /* a slice's */
    uint32_t rows, per, stage;
} piece;
static piece *stages; /* of the ring, in order */
static uint32_t n_stages;

static uint32_t wtype(void)
{
    return of.fp8 ? MK_W_FP8 : MK_W_BF16;
}
static uint32_t rows_of(uint32_t t)
{
    return mk_expert_start(t + 1, of.inter, of.T) - mk_expert_start(t, of.inter, of.T);
}
static uint8_t *weight_at(uint32_t e, uint32_t t, uint32_t i, uint32_t c)
{
    return lanes_weight_at(segment[e][t] + scale_bytes, wtype(), 2 * rows_of(t), i, c);
}
static double weight(uint32_t e, uint32_t t, uint32_t i, uint32_t c)
{
    const uint32_t rows = rows_of(t), phase = mk_expert_start(t, of.inter, of.T) % MK_SCALE_ROWS, nseg = plan.tile.nseg;
    return lanes_weight(weight_at(e, t, i, c), wtype()) * (of.fp8 ? ((const float *)segment[e][t])[c / 128 * 2 * nseg + (i >= rows ? nseg : 0) + (phase + i % rows) / MK_SCALE_ROWS] : 1);
}
static void fill(uint32_t stage, uint8_t *to)
{
    const piece *p = &stages[stage];
    const uint32_t first = p->stage * p->per, kb_bytes = p->rows * MK_KBLOCK_BYTES;
    memcpy(to, p->from, scale_bytes);
    memcpy(to + SCALES, p->from + scale_bytes + first * kb_bytes, min(p->per, nkb - first) * kb_bytes);
}
static uint4 *packets(uint32_t v, uint32_t row)
{
    return (uint4 *)(exchange + mk_packet_offset(&vec[v], mk_half(&vec[v], lanes_shared->step.seq, 0), row, 0));
}

/* ---- a step -------------------------------------------------------------------------------------------------------------- */

/* Stages of the union's slices that are worker 0's. */
static void deal(void)
{
    n_stages = 0;
    for (uint32_t i = 0; i < routes->n_union * of.T; i += of.workers) {
        const uint32_t t = i % of.T, rows = 2 * rows_of(t), per = rows == plan.tile.rows ? of.per : of.less;
        for (uint32_t s = 0; s * per < nkb; s++) stages[n_stages++] = {segment[routes->expert[i / of.T]][t], rows, per, s};
    }
}
static void several(void)
{
    mk_expert_up_run(&lanes_shared->fed[0].in);
}
static void one(void)
{
    of.fp8 ? mk_up_one<MK_X_F16>(mk_smem(&lanes_shared->fed[0].in)) : mk_up_one<MK_X_BF16>(mk_smem(&lanes_shared->fed[0].in));
}
/* Rows [r0, r0 + n), of which the packets lie as rows 0 ... */
static void run(uint32_t r0, uint32_t n, void (*body)(void), uint4 *result)
{
    mk_shared *sh = lanes_shared;
    const uint32_t turn = lanes_random(2), epoch = mk_epoch(EPOCH0, 7, 0), row = vec[2].nslice * vec[2].slice_packets;
    at0 = lanes_random(1000);
    lanes_ring_begin(at0, 0, fill);
    lanes_route(routes, chosen + r0, n, of.topk, of.experts);
    deal();
    lanes_ring_stages(n_stages);
    sh->step.nrows = n, sh->step.seq = 7;
    sh->args.map = words, sh->args.exchange = exchange, sh->args.epoch0 = EPOCH0, sh->args.workers = of.workers;
    memcpy(sh->vec, vec, sizeof vec);
    for (uint32_t i = 0; i <= vec[0].nslice; i++) sh->start[i] = (uint16_t)start[i];
    lanes_ring_places(at0, SCALES);
    for (uint32_t w = 0; w < MK_WARPS; w++) sh->memo[w].turn = turn;
    mk_fed *f = &sh->fed[0];
    f->in.opcode = MK_OP_EXPERT_UP, f->in.signal_vec = 2;
    f->in.wait[0] = {0, 0, 0, (uint16_t)vec[0].nslice}, f->in.wait[1] = {1, 0, 0, 1};
    f->in.expert.k = of.k, f->in.expert.inter = of.inter, f->in.expert.T = (uint16_t)of.T, f->in.expert.wtype = (uint8_t)wtype(), f->in.expert.topk = (uint8_t)of.topk;
    f->plan = plan;
    memset(exchange, 0xff, lanes_packets * 16);
    for (uint32_t r = 0; r < n; r++) lanes_publish(packets(0, r), &vec[0], start, value + (r0 + r) * of.k, epoch);
    for (uint32_t i = 0; i < lanes_packets; i++) lanes_late[i] = lanes_random(4) ? 0 : lanes_random(40);
    f->place.in[0] = packets(0, 0), f->place.epoch[0] = epoch, f->place.out = packets(2, 0), f->place.out_epoch = epoch;
    if (!lanes_run(body)) fail_msg("%s, %u values, %u of an expert in %u, rows %u to %u: %s", of.fp8 ? "e4m3" : "bf16", of.k, of.inter, of.T, r0, r0 + n, lanes.error);
    for (uint32_t w = 0; w < MK_WARPS; w++) assert_int_equal(sh->memo[w].next.at, at0 + n_stages);
    for (uint32_t r = 0; r < n; r++) memcpy(result + r * row, packets(2, r), row * sizeof *result);
}

/* ---- in double ----------------------------------------------------------------------------------------------------------- */

static bool is_published(const uint4 *slice)
{
    return slice->w == mk_epoch(EPOCH0, 7, 0);
}
/* The greatest difference of a value of slice t of row r's choice, by what is added up for it. */
static double error(const uint4 *found, uint32_t r, uint32_t rank, uint32_t t)
{
    double worst = 0, squares = 0;
    for (uint32_t c = 0; c < of.k; c++) squares += (double)value[r * of.k + c] * value[r * of.k + c];
    const double norm = 1 / sqrt(squares / of.k + plan.x.eps);
    for (uint32_t i = 0; i < rows_of(t); i++) {
        double sum[2] = {}, all = 0;
        for (uint32_t half = 0; half < 2; half++)
            for (uint32_t c = 0; c < of.k; c++) {
                const double x = weight(chosen[r][rank], t, half * rows_of(t) + i, c) * lanes_bf16(value[r * of.k + c] * gain[c]) * norm;
                sum[half] += x, all += fabs(x);
            }
        const double want = sum[0] / (1 + exp(-sum[0])) * sum[1], e = fabs(lanes_get(found, i, false) - want) / (all * (1 + fabs(sum[0]) + fabs(sum[1])) + 2000 * fabs(want)); /* a step of bf16 is 1/256 */
        worst = !is_published(&found[i / 6]) || e != e ? 1e9 : fmax(worst, e);
    }
    return worst;
}
static void check(const shape *s)
{
    of = *s;
    const uint32_t slices = (of.k + of.slice - 1) / of.slice, per = mk_kblock_values(wtype()), most = mk_expert_rows(of.inter, of.T);
    uint64_t end = 0;
    for (uint32_t t = 0; t <= slices; t++) start[t] = min(t * of.slice, of.k);
    vec[0] = lanes_vec(MK_F32, slices, of.slice, of.k, &end), vec[1] = {}, vec[2] = lanes_vec(MK_BF16, of.topk * of.T, most, of.topk * of.inter, &end);
    exchange = (uint8_t *)lanes_exchange_open((uint32_t)(end / 16) + 512);

    nkb = (of.k + per - 1) / per;
    uint32_t nseg = 0;
    for (uint32_t t = 0; of.fp8 && t < of.T; t++) nseg = max(nseg, (mk_expert_start(t, of.inter, of.T) % MK_SCALE_ROWS + rows_of(t) - 1) / MK_SCALE_ROWS + 1);
    memset(&plan, 0, sizeof plan);
    plan.tile = {wtype(), 2 * most, nkb, of.per, (nkb + of.per - 1) / of.per, 2, nseg, 0, 1};
    plan.less = MK_STAGES_WORD(of.less, (nkb + of.less - 1) / of.less), plan.magic = mk_div_by(of.T).magic;
    scale_bytes = (uint32_t)mk_segment_scale_bytes(wtype(), of.k, 2 * nseg, 128);
    assert_true(of.T <= SLICES && of.experts <= EXPERTS && 2 * most <= MK_SEGMENT_ROWS && scale_bytes <= SCALES && SCALES + max(of.per, of.less) * 2 * most * MK_KBLOCK_BYTES + 512 <= STAGE);
    for (uint32_t e = 0; e < of.experts; e++)
        for (uint32_t t = 0; t < of.T; t++) {
            const uint32_t rows = 2 * rows_of(t);
            segment[e][t] = (uint8_t *)calloc(1, scale_bytes + nkb * rows * MK_KBLOCK_BYTES);
            for (uint32_t i = 0; i < scale_bytes / 4; i++) ((float *)segment[e][t])[i] = ldexpf(1 + (float)lanes_random(100) / 100, -3 - (int)lanes_random(4));
            for (uint32_t i = 0; i < rows * of.k; i++) {
                const uint16_t w = of.fp8 ? (uint16_t)(lanes_random(2) << 7 | (32 + lanes_random(48))) : (uint16_t)(lanes_random(2) << 15 | (120 + lanes_random(4)) << 7 | lanes_random(128));
                memcpy(weight_at(e, t, i / of.k, i % of.k), &w, MK_KBLOCK_BYTES / per);
            }
        }
    stages = (piece *)malloc(of.experts * of.T * nkb * sizeof *stages);
    value = (float *)malloc(of.rows * of.k * sizeof *value), gain = (float *)malloc(of.k * sizeof *gain);
    for (uint32_t i = 0; i < of.rows * of.k; i++) value[i] = ((float)lanes_random(2001) - 1000) * ldexpf(1, (int)lanes_random(6) - 14);
    for (uint32_t i = 0; i < of.k; i++) gain[i] = 0.5f + (float)lanes_random(1000) / 1000;
    for (uint32_t r = 0; r < of.rows; r++)
        for (uint32_t e = 0, rank = 0; rank < of.topk; e++)
            if (lanes_random(of.experts - e) < of.topk - rank) chosen[r][rank++] = e;
    const uint8_t deals = lanes_input_plan(&plan, &vec[0], start, of.k, true, of.fp8, gain, words);
    plan.dealt = MK_IS_FAR(deals) ? 2 : 1;

    const uint32_t row = vec[2].nslice * vec[2].slice_packets;
    uint4 *const all = (uint4 *)malloc(of.rows * row * sizeof *all), *const alone = (uint4 *)malloc(row * sizeof *alone);
    run(0, of.rows, several, all);
    for (uint32_t r = 0; r < of.rows; r++) {
        run(r, 1, one, alone);
        for (uint32_t rank = 0; rank < of.topk; rank++)
            for (uint32_t t = 0; t < of.T; t++) {
                const uint32_t at = (rank * of.T + t) * vec[2].slice_packets;
                const uint4 *const a = all + r * row + at, *const b = alone + at; /* of each what its union gives this worker */
                const double off = fmax(is_published(a) ? error(a, r, rank, t) : 0, is_published(b) ? error(b, r, rank, t) : 0);
                const bool both = is_published(a) && is_published(b), differ = both && memcmp(a, b, vec[2].slice_packets * sizeof *a) != 0; /* what nobody publishes of them, too */
                compared += both, begun += is_published(a) || is_published(b);
                if (differ || !(off < 4e-6) || (of.workers == 1 && !both))
                    fail_msg("%s, %u values, %u of an expert in %u, row %u of %u, choice %u, slice %u: an error of %g; bits are%s those of mk_up_one", of.fp8 ? "e4m3" : "bf16", of.k, of.inter, of.T, r, of.rows, rank, t, off,
                             differ ? " not" : "");
            }
    }
    for (uint32_t e = 0; e < of.experts; e++)
        for (uint32_t t = 0; t < of.T; t++) free(segment[e][t]);
    lanes_exchange_close(), free(stages), free(value), free(gain), free(all), free(alone);
}

/* Slices of one tile to four, of one length and of two, some of them over an edge of scales; workers that have all of them, many or one; experts of one value. */
static void test_models(void **)
{
    const shape shapes[] = {
        {true, 512, 16, 128, 4, 3, 8, 8, 1, 3, 3}, {true, 576, 18, 100, 3, 2, 6, 5, 1, 4, 4}, {true, 256, 12, 96, 2, 4, 9, 3, 1, 2, 2}, {true, 320, 30, 120, 7, 3, 12, 7, 2, 5, 3},
        {true, 128, 3, 64, 1, 6, 12, 8, 1, 1, 1}, {true, 256, 6, 33, 4, 2, 5, 4, 1, 3, 2}, {true, 2048, 16, 192, 12, 8, 12, 2, 32, 7, 6}, {false, 512, 16, 128, 4, 3, 8, 8, 1, 3, 3},
        {false, 192, 12, 90, 2, 3, 6, 6, 1, 2, 2}, {false, 256, 18, 50, 4, 5, 11, 8, 3, 4, 3}, {true, 64, 3, 7, 7, 2, 4, 8, 1, 1, 1}, {true, 192, 9, 200, 4, 2, 3, 8, 1, 2, 2},
        {true, 128, 6, 256, 4, 3, 5, 4, 2, 1, 1}, {true, 128, 6, 61, 2, 3, 5, 4, 1, 2, 1},
    };
    for (const shape &s : shapes) check(&s);
    assert_true(compared > 500 && begun > compared);
}

int main(void)
{
    lanes_ring_open(STAGE, sizeof *routes);
    routes = (mk_routes *)(lanes_shared + 1);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_models)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
