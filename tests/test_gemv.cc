/* GEMV on the CPU (instructions/gemv.cuh, gemv_one.cuh, matvec.cuh, product.cuh): the kernel's own text from an input's packets to the result's, 256 lanes as coroutines (tests/lanes) and a loader that
 * fills stages when it likes. Several rows, whole or in parts, against double arithmetic; and each row's bits are those of a step of that row alone, by mk_gemv_one. */
#include "tests/lanes/cuda.h"

extern "C" {
#include "instructions/program.h"
}
#include "instructions/gemv.cuh"
#include "instructions/gemv_one.cuh"

#include <setjmp.h>
#include <stdarg.h>
extern "C" {
#include <cmocka.h>
}
#include "tests/lanes/experts.h"
#include "tests/lanes/packets.h"
#include "tests/lanes/ring.h"

#define STAGE  33792u /* bytes; ldmatrix reads on behind the last row of a segment */
#define SCALES 1024u  /* bytes of a stage before its weights */
#define EPOCH0 0x1200u
typedef struct shape {
    bool f32, fp8; /* the input: f32 with an RMS norm, else bf16 as it is */
    uint32_t k, slice, n, epilogue, per, rows, scale_k; /* slice: of the input; n: results; per: K blocks of a stage */
    bool out_f32;
} shape;
static shape of;
static mk_plan plan;
static mk_vec vec[3]; /* input, residual, result */
static uint32_t start[1024], total, nkb, nst, scale_bytes, at0; /* total: rows of weights */
static float *value, *gain, *residual; /* [row][k], [k], [row][n] */
static uint8_t *segment;              /* scales, then weights */
static uint8_t *exchange;
static uint32_t words[LANES_WORDS], ones, in_parts;

static uint32_t wtype(void)
{
    return of.fp8 ? MK_W_FP8 : MK_W_BF16;
}
static uint8_t *weight_at(uint32_t i, uint32_t c)
{
    return lanes_weight_at(segment + scale_bytes, wtype(), total, i, c);
}
static double weight(uint32_t i, uint32_t c)
{
    const mk_tile *t = &plan.tile;
    const uint32_t scale = t->shift == MK_SHIFT_ALL ? 4 * i : (c / 64 >> t->shift) * 4 * t->nseg * t->halves + mk_scale_of(i, total, total / t->halves, t->nseg, t->phase);
    return lanes_weight(weight_at(i, c), wtype()) * (of.fp8 ? *(const float *)(segment + scale) : 1);
}
static void fill(uint32_t stage, uint8_t *to)
{
    const uint32_t first = stage * of.per, kb_bytes = total * MK_KBLOCK_BYTES;
    memcpy(to, segment, scale_bytes);
    memcpy(to + SCALES, segment + scale_bytes + first * kb_bytes, min(of.per, nkb - first) * kb_bytes);
}
static uint4 *packets(uint32_t v, uint32_t row)
{
    return (uint4 *)(exchange + mk_packet_offset(&vec[v], mk_half(&vec[v], lanes_shared->step.seq, 0), row, 0));
}
/* ---- a step -------------------------------------------------------------------------------------------------------------- */

static void several(void)
{
    const mk_insn *in = &lanes_shared->fed[0].in; /* kernel.cu: matrix_run */
    uint32_t jobs = mk_static_next(in, 0);
    do {
        if (jobs) mk_products(in);
        jobs = mk_gemv_end(in);
    } while (jobs);
}
static void one(void)
{
    mk_gemv_one_run(mk_smem(&lanes_shared->fed[0].in), plan.one);
}
/* Rows [r0, r0 + n), of which the packets lie as rows 0 ... */
static void run(uint32_t r0, uint32_t n, void (*body)(void), uint4 *result)
{
    mk_shared *sh = lanes_shared;
    at0 = lanes_random(1000);
    const uint32_t turn = lanes_random(2);
    lanes_ring_begin(at0, nst, fill);
    sh->step.nrows = n, sh->step.seq = 7;
    sh->args.map = words, sh->args.exchange = exchange, sh->args.epoch0 = EPOCH0;
    memcpy(sh->vec, vec, sizeof vec);
    for (uint32_t i = 0; i <= vec[0].nslice; i++) sh->start[i] = (uint16_t)start[i];
    lanes_ring_places(at0, SCALES);
    for (uint32_t w = 0; w < MK_WARPS; w++) sh->memo[w].turn = turn;
    mk_fed *f = &sh->fed[0];
    f->in.opcode = MK_OP_GEMV, f->in.signal_vec = 2;
    f->in.wait[0] = {0, 0, 0, (uint16_t)vec[0].nslice}, f->in.wait[1] = {1, 0, 0, 1};
    f->in.gemv.n = of.n, f->in.gemv.k = of.k, f->in.gemv.wtype = (uint8_t)wtype(), f->in.gemv.epilogue = (uint8_t)of.epilogue, f->in.gemv.scale = 0.5f;
    f->plan = plan;
    memset(exchange, 0xff, lanes_packets * 16);
    const uint32_t epoch = mk_epoch(EPOCH0, 7, 0), whole[2] = {0, of.n};
    for (uint32_t r = 0; r < n; r++) {
        lanes_publish(packets(0, r), &vec[0], start, value + (r0 + r) * of.k, epoch);
        lanes_publish(packets(1, r), &vec[1], whole, residual + (r0 + r) * of.n, epoch);
    }
    for (uint32_t i = 0; i < lanes_packets; i++) lanes_late[i] = lanes_random(4) ? 0 : lanes_random(40);
    for (uint32_t v = 0; v < 2; v++) f->place.in[v] = packets(v, 0), f->place.epoch[v] = epoch;
    f->place.out = packets(2, 0), f->place.out_epoch = epoch;
    if (!lanes_run(body))
        fail_msg("%s, %s, %u values, %u results, epilogue %u, rows %u to %u: %s", of.f32 ? "f32" : "bf16", of.fp8 ? "e4m3" : "bf16", of.k, of.n, of.epilogue, r0, r0 + n, lanes.error);
    for (uint32_t w = 0; w < MK_WARPS; w++) {
        assert_int_equal(sh->memo[w].next.at, at0 + nst);
        assert_int_equal(sh->memo[w].turn, turn ^ 1);
    }
    for (uint32_t r = 0; r < n; r++) memcpy(result + r * vec[2].slice_packets, packets(2, r), vec[2].slice_packets * sizeof *result);
}

/* ---- in double ----------------------------------------------------------------------------------------------------------- */

/* The greatest difference of a result of row r, by what is added up for it. */
static double error(const uint4 *found, uint32_t r)
{
    double worst = 0, squares = 0;
    for (uint32_t c = 0; c < of.k; c++) squares += (double)value[r * of.k + c] * value[r * of.k + c];
    const double norm = 0.5 * (of.f32 ? 1 / sqrt(squares / of.k + plan.x.eps) : 1);
    for (uint32_t i = 0; i < of.n; i++) {
        double sum[2] = {}, all = 0, want;
        for (uint32_t half = 0; half < plan.tile.halves; half++)
            for (uint32_t c = 0; c < of.k; c++) {
                const double x = weight(half * of.n + i, c) * (of.f32 ? lanes_bf16(value[r * of.k + c] * gain[c]) : value[r * of.k + c]) * norm;
                sum[half] += x, all += fabs(x);
            }
        want = sum[0];
        if (of.epilogue == MK_EPI_SILU) want = sum[0] / (1 + exp(-sum[0])) * sum[1], all *= 1 + fabs(sum[0]) + fabs(sum[1]);
        if (of.epilogue == MK_EPI_ADD) want += residual[r * of.n + i], all += fabs(residual[r * of.n + i]);
        const double e = fabs(lanes_get(found, i, of.out_f32) - want) / (all + (of.out_f32 ? 0 : 2000 * fabs(want))); /* a step of bf16 is 1/256 */
        worst = found[i / (of.out_f32 ? 3 : 6)].w != mk_epoch(EPOCH0, 7, 0) || e != e ? 1e9 : fmax(worst, e);
    }
    return worst;
}

static void check(const shape *s)
{
    of = *s;
    const uint32_t slices = (of.k + of.slice - 1) / of.slice, halves = of.epilogue == MK_EPI_SILU ? 2 : 1, per = mk_kblock_values(wtype());
    uint64_t end = 0;
    for (uint32_t t = 0; t <= slices; t++) start[t] = min(t * of.slice, of.k);
    vec[0] = lanes_vec(of.f32 ? MK_F32 : MK_BF16, slices, of.slice, of.k, &end);
    vec[1] = lanes_vec(MK_F32, 1, of.n, of.n, &end), vec[2] = lanes_vec(of.out_f32 ? MK_F32 : MK_BF16, 1, of.n, of.n, &end);
    exchange = (uint8_t *)lanes_exchange_open((uint32_t)(end / 16) + 512);

    total = of.n * halves, nkb = (of.k + per - 1) / per, nst = (nkb + of.per - 1) / of.per;
    const uint32_t phase = lanes_random(2) ? lanes_random(MK_SCALE_ROWS) : MK_SCALE_ROWS - 1 - lanes_random(of.n), nseg = !of.fp8 ? 0 : of.scale_k ? (phase + of.n - 1) / MK_SCALE_ROWS + 1 : total;
    memset(&plan, 0, sizeof plan);
    plan.tile = {wtype(), total, nkb, of.per, nst, halves, nseg, of.scale_k ? phase : 0, of.fp8 ? mk_scale_shift(of.scale_k) : 0};
    scale_bytes = (uint32_t)mk_segment_scale_bytes(wtype(), of.k, of.scale_k ? nseg * halves : total, of.scale_k);
    assert_true(scale_bytes <= SCALES && SCALES + of.per * total * MK_KBLOCK_BYTES + 512 <= STAGE);
    segment = (uint8_t *)calloc(1, scale_bytes + nkb * total * MK_KBLOCK_BYTES);
    for (uint32_t i = 0; i < scale_bytes / 4; i++) ((float *)segment)[i] = ldexpf(1 + (float)lanes_random(100) / 100, -(int)lanes_random(4));
    for (uint32_t i = 0; i < total * of.k; i++) {
        const uint16_t w = of.fp8 ? (uint16_t)(lanes_random(2) << 7 | (32 + lanes_random(48))) : (uint16_t)(lanes_random(2) << 15 | (122 + lanes_random(4)) << 7 | lanes_random(128));
        memcpy(weight_at(i / of.k, i % of.k), &w, MK_KBLOCK_BYTES / per);
    }
    value = (float *)malloc(of.rows * of.k * sizeof *value), gain = (float *)malloc(of.k * sizeof *gain), residual = (float *)malloc(of.rows * of.n * sizeof *residual);
    for (uint32_t i = 0; i < of.rows * of.k; i++) {
        const float x = ((float)lanes_random(2001) - 1000) * ldexpf(1, (int)lanes_random(6) - 14);
        value[i] = of.f32 ? x : lanes_bf16(x);
    }
    for (uint32_t i = 0; i < of.k; i++) gain[i] = 0.5f + (float)lanes_random(1000) / 1000;
    for (uint32_t i = 0; i < of.rows * of.n; i++) residual[i] = ((float)lanes_random(2001) - 1000) / 64;

    plan.end = (of.epilogue == MK_EPI_SILU ? MK_END_SILU : 0) | (of.epilogue == MK_EPI_ADD ? MK_END_ADDS : 0) | (of.out_f32 ? MK_END_F32 : 0);
    plan.one = lanes_input_plan(&plan, &vec[0], start, of.k, of.f32, of.fp8, gain, words);

    const uint32_t n = vec[2].slice_packets;
    uint4 *const all = (uint4 *)malloc(of.rows * n * sizeof *all), *const alone = (uint4 *)malloc(n * sizeof *alone);
    run(0, of.rows, several, all);
    in_parts += mk_row_stride(of.k) * of.rows > MK_STAGING;
    for (uint32_t r = 0; r < of.rows; r++) {
        run(r, 1, of.scale_k ? one : several, alone); /* a scale a row is the LM head's, which goes the way of several */
        ones += of.scale_k != 0;
        const bool differ = memcmp(all + r * n, alone, n * sizeof *all) != 0;
        const double off = error(all + r * n, r);
        if (differ || !(off < 4e-6))
            fail_msg("%s, %s, %u values, %u results, epilogue %u, row %u of %u: an error of %g; bits are%s those of mk_gemv_one", of.f32 ? "f32" : "bf16", of.fp8 ? "e4m3" : "bf16", of.k, of.n, of.epilogue, r, of.rows, off,
                     differ ? " not" : "");
    }
    lanes_exchange_close(), free(segment), free(value), free(gain), free(residual), free(all), free(alone);
}

/* Inputs and results as models have them, of one to four tiles, of one side and of two, scales of blocks and of rows, whole and in parts. */
static void test_models(void **)
{
    const shape shapes[] = {
        {true, true, 2304, 18, 95, MK_EPI_STORE, 4, 3, 128, false},   {true, true, 2048, 16, 64, MK_EPI_STORE, 5, 2, 128, true},  {false, true, 4096, 30, 18, MK_EPI_ADD, 12, 4, 128, true},
        {false, true, 512, 12, 16, MK_EPI_ADD, 3, 8, 128, true},      {true, true, 2048, 16, 16, MK_EPI_SILU, 6, 2, 128, false},  {true, true, 1536, 12, 40, MK_EPI_SILU, 5, 3, 128, false},
        {true, false, 2048, 16, 24, MK_EPI_STORE, 8, 8, 128, false},  {false, false, 2048, 16, 16, MK_EPI_ADD, 16, 5, 128, true}, {true, false, 2048, 18, 62, MK_EPI_SILU, 3, 2, 128, false},
        {false, false, 8192, 64, 16, MK_EPI_ADD, 16, 4, 128, true},   {false, true, 8192, 64, 33, MK_EPI_STORE, 8, 7, 128, true}, {true, true, 768, 12, 128, MK_EPI_STORE, 3, 6, 128, true},
        {true, true, 2304, 18, 128, MK_EPI_STORE, 2, 2, 0, true},     {false, true, 1024, 16, 17, MK_EPI_STORE, 7, 2, 64, true},
    };
    for (const shape &s : shapes) check(&s);
    assert_true(in_parts >= 2 && ones > 40);
}
/* Of any shape. */
static void test_random(void **)
{
    for (uint32_t i = 0; i < 25; i++) {
        shape s = {};
        s.f32 = lanes_random(2), s.fp8 = lanes_random(2);
        s.epilogue = lanes_random(3) == 0 ? MK_EPI_SILU : lanes_random(2) ? MK_EPI_ADD : MK_EPI_STORE;
        s.k = 64 * (1 + lanes_random(s.f32 ? 12 : 24));
        s.slice = s.f32 ? 3 * (1 + lanes_random(10)) : 6 * (1 + lanes_random(8));
        s.n = 1 + lanes_random(s.epilogue == MK_EPI_SILU ? 64 : 128);
        s.rows = 1 + lanes_random(MK_MAX_ROWS);
        const uint32_t total = s.n * (s.epilogue == MK_EPI_SILU ? 2 : 1), most = (STAGE - SCALES - 512) / (total * MK_KBLOCK_BYTES), blocks = s.k / (s.fp8 ? 64 : 32);
        s.per = 1 + lanes_random(min(min(most, blocks), 16u));
        s.scale_k = 128, s.out_f32 = s.epilogue == MK_EPI_ADD || lanes_random(2);
        check(&s);
    }
}

int main(void)
{
    lanes_ring_open(STAGE);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_models), cmocka_unit_test(test_random)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
