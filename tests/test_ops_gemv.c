/* GEMV, EXPERT_UP, EXPERT_DOWN, LM_HEAD and EMBED against products in double. Matrices are packed here from the words of isa.h, from
 * codes and scales that the test draws. */
#include "tests/support/onestep.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void *need(void *p)
{
    assert_non_null(p);
    return p;
}

/* ---- matrices -------------------------------------------------------------------------------------------------------- */

/* A whole matrix as a checkpoint has it: codes, and for FP8 one scale per 128 rows and scale_k columns, or (scale_k 0) per row. */
typedef struct matrix {
    uint32_t rows, k, wtype, scale_k;
    uint16_t *code; /* [rows][k]: e4m3 byte or bf16 bits */
    float *scale;   /* [ceil(rows / 128)][ceil(k / scale_k)], or [rows] */
} matrix;

static uint32_t scale_height(const matrix *w)
{
    return w->scale_k ? 128 : 1;
}
static uint32_t scale_columns(const matrix *w)
{
    return w->scale_k ? (w->k + w->scale_k - 1) / w->scale_k : 1;
}

static matrix matrix_new(uint64_t seed, uint32_t rows, uint32_t k, uint32_t wtype, uint32_t scale_k)
{
    matrix w = {rows, k, wtype, scale_k, need(malloc((size_t)rows * k * 2)), NULL};
    uint32_t blocks = (rows + scale_height(&w) - 1) / scale_height(&w) * scale_columns(&w);
    w.scale = need(malloc(blocks * sizeof *w.scale));
    for (size_t i = 0; i < (size_t)rows * k; i++) {
        if (wtype == MK_W_FP8) {
            do w.code[i] = (uint16_t)(one_random(&seed) & 0xff);
            while ((w.code[i] & 0x7f) == 0x7f);
        } else {
            w.code[i] = mk_f32_to_bf16(one_normal(&seed, 1.0));
        }
    }
    for (uint32_t i = 0; i < blocks; i++) w.scale[i] = (float)(0.002 * (1 + 4 * one_uniform(&seed)));
    return w;
}

static void matrix_free(matrix *w)
{
    free(w->code);
    free(w->scale);
}

static double weight(const matrix *w, uint32_t row, uint32_t col)
{
    uint32_t c = w->code[(size_t)row * w->k + col];
    if (w->wtype == MK_W_BF16) return (double)mk_bf16_to_f32((uint16_t)c);
    return one_e4m3(c) * (double)w->scale[row / scale_height(w) * scale_columns(w) + (w->scale_k ? col / w->scale_k : 0)];
}

/* Segment of rows [row0, row0 + n) of m matrices (1, or gate and up) at dst; nseg scale rows each. Returns its bytes. */
static uint64_t pack(uint8_t *dst, const matrix *const *w, uint32_t m, uint32_t row0, uint32_t n, uint32_t nseg)
{
    const matrix *a = w[0];
    uint32_t v = a->wtype == MK_W_FP8 ? 64 : 32, nkb = (a->k + v - 1) / v, scales = a->wtype == MK_W_FP8 ? scale_columns(a) : 0;
    uint64_t at = 0;
    for (uint32_t kb = 0; kb < scales; kb++)
        for (uint32_t h = 0; h < m; h++)
            for (uint32_t s = 0; s < nseg; s++, at += 4) {
                uint32_t block = row0 / scale_height(a) + s;
                float f = block < (a->rows + scale_height(a) - 1) / scale_height(a) ? w[h]->scale[block * scales + kb] : 0;
                memcpy(dst + at, &f, 4);
            }
    at = (at + 127) & ~127ull;
    for (uint32_t kb = 0; kb < nkb; kb++)
        for (uint32_t h = 0; h < m; h++)
            for (uint32_t i = 0; i < n; i++)
                for (uint32_t j = 0; j < v && kb * v + j < a->k; j++) {
                    uint16_t c = w[h]->code[(size_t)(row0 + i) * a->k + kb * v + j];
                    uint32_t b = j * (64 / v); /* byte of the row's 64 */
                    uint8_t *to = dst + at + (size_t)kb * 64 * m * n + b / 16 * 16 * m * n + 16 * (h * n + i) + b % 16;
                    if (a->wtype == MK_W_FP8)
                        *to = (uint8_t)c;
                    else
                        memcpy(to, &c, 2);
                }
    at += (uint64_t)nkb * 64 * m * n;
    return (at + 127) & ~127ull;
}

/* sum_k W[row][k] x[k]; *scale: the root of the sum of squares of its terms. */
static double dot(const matrix *w, uint32_t row, const double *x, double *scale)
{
    double y = 0, sq = 0;
    for (uint32_t i = 0; i < w->k; i++) {
        double t = weight(w, row, i) * x[i];
        y += t;
        sq += t * t;
    }
    if (scale) *scale = sqrt(sq) + 1e-30;
    return y;
}

static void round_all(double *x, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) x[i] = (double)mk_round_bf16((float)x[i]);
}

/* rounded: x * gamma is rounded to bf16 before the division. */
static void rms(double *x, const float *gamma, uint32_t k, double eps, int rounded)
{
    double sq = 0;
    for (uint32_t i = 0; i < k; i++) sq += x[i] * x[i];
    for (uint32_t i = 0; i < k; i++) x[i] *= (double)gamma[i];
    if (rounded) round_all(x, k);
    for (uint32_t i = 0; i < k; i++) x[i] /= sqrt(sq / k + eps);
}

static double silu(double x)
{
    return x / (1 + exp(-x));
}

/* ---- GEMV ------------------------------------------------------------------------------------------------------------ */

typedef struct gemv_case {
    const char *name;
    uint32_t wtype, prologue, epilogue, flags;
    uint32_t rows, k;   /* of the whole matrix (SILU: of gate and of up) */
    uint32_t row0, n;   /* slice under test */
    uint32_t scale_k;
    uint32_t in_off;
    int act_f32, local_in_residual, local_out;
    float scale;
} gemv_case;

#define HEAD 40 /* values of a head in HEADNORM cases: two slices */

static void gemv_check(const gemv_case *t)
{
    onestep *o = one_new(2, t->act_f32);
    uint32_t act = t->act_f32 ? MK_F32 : MK_BF16, headnorm = t->prologue == MK_PRO_HEADNORM, halves = t->epilogue == MK_EPI_SILU ? 2 : 1;
    uint32_t width = t->in_off + t->k + (headnorm ? 0 : 9), phase = t->wtype == MK_W_FP8 ? t->row0 % 128 : 0;
    uint32_t nseg = t->wtype == MK_W_FP8 ? mk_segments(phase, t->n, t->scale_k) : 0;
    matrix m[2] = {matrix_new(1, t->rows, t->k, t->wtype, t->scale_k), matrix_new(2, t->rows, t->k, t->wtype, t->scale_k)};
    const matrix *mp[2] = {&m[0], &m[1]};
    float *gamma = need(malloc(t->k * sizeof *gamma)), x[MK_MAX_ROWS][2048], res[MK_MAX_ROWS][512], trailer[MK_MAX_ROWS][64];
    float *got = need(malloc(MK_MAX_ROWS * t->n * sizeof *got));
    double *xd = need(malloc(t->k * sizeof *xd));
    assert_in_range(width, 1, 2048);
    assert_in_range(t->n, 1, 512);
    one_fill(3, gamma, t->k, 0.3);
    for (uint32_t i = 0; i < t->k; i++) gamma[i] += 1;

    uint32_t vec = headnorm ? one_even(o, act, 1, width, width / (HEAD / 2)) : one_even(o, act, 0, width, 7);
    uint32_t starts[4] = {0, 5, 5 + t->n, 5 + t->n + 3}, local_n = MK_MAX_ROWS * t->n * 4;
    uint32_t residual = t->local_in_residual ? one_local(o, local_n) : one_packet(o, MK_F32, 0, starts, 3);
    uint32_t out = t->local_out ? one_local(o, local_n) : one_packet(o, t->epilogue == MK_EPI_ADD ? MK_F32 : act, 0, starts, 3);
    one_param(o, gamma, 1);
    uint32_t param = one_param(o, gamma, t->k);
    one_alloc(o, 1, 64, MK_MAX_ROWS, 64, 64);
    uint64_t bytes = mk_segment_bytes(t->wtype, halves * t->n, t->k, nseg * halves, t->scale_k);
    uint8_t *tape = one_tape(o, 128 + bytes);
    memset(tape, 0xff, 128 + bytes); /* not a number around the segment */
    memset(tape + 128, 0, bytes);
    assert_int_equal(pack(tape + 128, mp, halves, t->row0, t->n, nseg), bytes);

    for (uint32_t r = 0; r < MK_MAX_ROWS; r++) {
        one_fill(10 + r, x[r], width, headnorm ? 0.5 : 1.2);
        one_fill(20 + r, res[r], 512, 2.0);
        uint64_t seed = 30 + r;
        for (int i = 0; i < 64; i++) trailer[r][i] = (float)(1 + 40 * one_uniform(&seed));
        for (uint32_t i = 0; i < width && !t->act_f32; i++) x[r][i] = mk_round_bf16(x[r][i]);
    }
    /* rows 1, 8, then each of them alone in another company */
    for (int pass = 0; pass < 3; pass++) {
        uint32_t rows = pass == 0 ? 8 : pass == 1 ? 1 : 3;
        one_begin(o);
        for (uint32_t q = 0; q < rows; q++) {
            uint32_t r = pass == 2 ? 7 - 2 * q : q;
            one_row(o, r, 3);
            one_put(o, vec, q, x[r], headnorm ? trailer[r] : NULL);
            float wide[520];
            memcpy(wide + 5, res[r], t->n * sizeof *wide);
            memset(wide, 0, 5 * sizeof *wide);
            memset(wide + 5 + t->n, 0, 3 * sizeof *wide);
            if (t->local_in_residual)
                memcpy((float *)one_local_at(o, 0, residual) + (size_t)q * t->n, res[r], t->n * sizeof(float));
            else
                one_put(o, residual, q, wide, NULL);
        }
        one_insn(o, MK_OP_GEMV);
        one_wait(o, vec);
        if (t->epilogue == MK_EPI_ADD) {
            if (t->local_in_residual) one_wait(o, residual);
            else one_wait_slices(o, residual, 1, 1);
        }
        one_to(o, out, t->local_out ? 0 : 1);
        o->in.tape_off = 128;
        o->in.gemv = (mk_gemv){.n = t->n, .k = t->k, .in_off = t->in_off, .wtype = (uint8_t)t->wtype, .prologue = (uint8_t)t->prologue,
                               .epilogue = (uint8_t)t->epilogue, .flags = (uint8_t)t->flags, .phase = (uint16_t)phase, .nseg = (uint16_t)nseg,
                               .scale_k = (uint16_t)t->scale_k, .norm_group = headnorm ? HEAD : 0, .k_chunk = t->k, .param_off = param,
                               .eps = 1e-5f, .scale = t->scale, .row0 = t->row0};
        one_run(o, 0);
        for (uint32_t q = 0; q < rows; q++) {
            uint32_t r = pass == 2 ? 7 - 2 * q : q;
            float y[512];
            if (t->local_out)
                memcpy(y, (float *)one_local_at(o, 0, out) + (size_t)q * t->n, t->n * sizeof *y);
            else {
                const mk_vec *v = &o->prog.vec[out];
                mk_insn in = {.nwait = 1, .wait = {{.vec = (uint16_t)out, .slice0 = 1, .nslice = 1}}};
                mk_ctx c = {.prog = &o->prog, .in = &in, .mem = &o->mem, .step = &o->step};
                assert_true(one_ready(o, out, 1, 1));
                assert_false(one_ready(o, out, 0, 1));
                mk_read(&c, 0, q, mk_vec_starts(&o->prog, v)[1], t->n, y);
            }
            if (pass == 0)
                memcpy(got + (size_t)r * t->n, y, t->n * sizeof *y);
            else
                one_same("row in other company", y, got + (size_t)r * t->n, t->n);
        }
    }

    double worst = 0;
    int x_f32 = t->act_f32 || t->flags & MK_GEMV_X_F32;
    for (uint32_t r = 0; r < MK_MAX_ROWS; r++) {
        for (uint32_t i = 0; i < t->k; i++) xd[i] = (double)x[r][t->in_off + i];
        if (t->prologue == MK_PRO_RMS) rms(xd, gamma, t->k, (double)1e-5f, !x_f32);
        if (headnorm)
            for (uint32_t i = 0; i < t->k; i++) {
                uint32_t head = (t->in_off + i) / HEAD;
                xd[i] /= sqrt(((double)trailer[r][2 * head] + (double)trailer[r][2 * head + 1]) / HEAD + (double)1e-5f);
            }
        if (!x_f32 && t->prologue != MK_PRO_RMS) round_all(xd, t->k);
        double limit = !x_f32 && t->prologue != MK_PRO_NONE ? 2e-3 : 4e-6; /* a value near the middle of two bf16 may round either way */
        for (uint32_t i = 0; i < t->n; i++) {
            double sc, sc2, y = dot(&m[0], t->row0 + i, xd, &sc) * (double)t->scale;
            sc *= fabs((double)t->scale);
            if (t->epilogue == MK_EPI_ADD) y += (double)res[r][i], sc += fabs((double)res[r][i]) * 0.1;
            if (t->epilogue == MK_EPI_SILU) {
                double up = dot(&m[1], t->row0 + i, xd, &sc2) * (double)t->scale;
                sc2 *= fabs((double)t->scale);
                sc = 1.1 * sc * fabs(up) + sc2 * fabs(silu(y)) + sc * sc2 * 1e-3 + 1e-4;
                y = silu(y) * up;
            }
            int rounded = !t->act_f32 && t->epilogue != MK_EPI_ADD && !t->local_out;
            double e = (rounded ? one_close_bf16 : one_close)(t->name, &got[(size_t)r * t->n + i], &y, 1, sc, limit);
            if (e > worst) worst = e;
        }
    }
    print_message("%-44s max error %.2g\n", t->name, worst);
    matrix_free(&m[0]);
    matrix_free(&m[1]);
    free(gamma);
    free(got);
    free(xd);
    one_free(o);
}

static void test_gemv(void **state)
{
    (void)state;
    const gemv_case cases[] = {
        {"fp8, 128 x 256", MK_W_FP8, 0, 0, 0, 128, 256, 0, 128, 128, 0, 1, 0, 0, 1},
        {"fp8, rows 100..230 of 300, k 320", MK_W_FP8, 0, 0, 0, 300, 320, 100, 130, 128, 3, 1, 0, 0, 1},
        {"fp8, three segments, k 200", MK_W_FP8, 0, 0, 0, 500, 200, 120, 270, 128, 5, 1, 0, 0, 1},
        {"fp8, scale_k 64, k 200", MK_W_FP8, 0, 0, 0, 300, 200, 127, 2, 64, 0, 1, 0, 0, 1},
        {"fp8, scale_k 64, k 300, bf16 vectors", MK_W_FP8, 0, 0, 0, 300, 300, 60, 133, 64, 1, 0, 0, 0, 1},
        {"fp8, one row, k 1", MK_W_FP8, 0, 0, 0, 3, 1, 2, 1, 128, 0, 1, 0, 0, 1},
        {"fp8, RMS, bf16 vectors", MK_W_FP8, MK_PRO_RMS, 0, 0, 140, 320, 17, 17, 128, 0, 0, 0, 0, 1},
        {"fp8, RMS, k 333", MK_W_FP8, MK_PRO_RMS, 0, 0, 140, 333, 17, 18, 128, 4, 1, 0, 0, 1},
        {"fp8, RMS, X_F32 (router)", MK_W_FP8, MK_PRO_RMS, 0, MK_GEMV_X_F32, 64, 320, 0, 64, 128, 0, 0, 0, 0, 1},
        {"fp8, HEADNORM", MK_W_FP8, MK_PRO_HEADNORM, 0, 0, 140, 240, 5, 60, 128, 0, 1, 0, 0, 1},
        {"fp8, HEADNORM, bf16, ADD", MK_W_FP8, MK_PRO_HEADNORM, MK_EPI_ADD, 0, 140, 240, 5, 60, 128, 0, 0, 0, 0, 1},
        {"fp8, HEADNORM from the second head", MK_W_FP8, MK_PRO_HEADNORM, 0, 0, 140, 160, 5, 60, 128, 40, 1, 0, 0, 1},
        {"fp8, ADD", MK_W_FP8, 0, MK_EPI_ADD, 0, 140, 192, 70, 70, 128, 0, 1, 0, 0, 1},
        {"fp8, ADD of a LOCAL residual", MK_W_FP8, 0, MK_EPI_ADD, 0, 140, 192, 70, 70, 128, 0, 1, 1, 0, 1},
        {"fp8, ADD to a LOCAL sum", MK_W_FP8, 0, MK_EPI_ADD, 0, 140, 192, 70, 70, 128, 0, 0, 0, 1, 1},
        {"fp8, SILU", MK_W_FP8, MK_PRO_RMS, MK_EPI_SILU, 0, 140, 192, 100, 33, 128, 0, 1, 0, 0, 1},
        {"fp8, SILU, bf16, to LOCAL", MK_W_FP8, MK_PRO_RMS, MK_EPI_SILU, 0, 300, 200, 90, 170, 128, 0, 0, 0, 1, 1},
        {"fp8, scaled by 0.25", MK_W_FP8, 0, MK_EPI_ADD, 0, 20, 64, 0, 20, 128, 0, 1, 0, 0, 0.25f},
        {"bf16, 128 x 256", MK_W_BF16, 0, 0, 0, 128, 256, 0, 128, 128, 0, 1, 0, 0, 1},
        {"bf16, k 100, bf16 vectors", MK_W_BF16, 0, 0, 0, 60, 100, 7, 31, 128, 2, 0, 0, 0, 1},
        {"bf16, RMS, k 17", MK_W_BF16, MK_PRO_RMS, 0, 0, 60, 17, 7, 5, 128, 0, 1, 0, 0, 1},
        {"bf16, RMS, X_F32 (router)", MK_W_BF16, MK_PRO_RMS, 0, MK_GEMV_X_F32, 64, 320, 3, 50, 128, 0, 0, 0, 0, 1},
        {"bf16, HEADNORM, ADD", MK_W_BF16, MK_PRO_HEADNORM, MK_EPI_ADD, 0, 60, 200, 7, 31, 128, 0, 1, 0, 0, 1},
        {"bf16, SILU", MK_W_BF16, MK_PRO_RMS, MK_EPI_SILU, 0, 60, 200, 7, 31, 128, 0, 1, 0, 0, 1},
        {"bf16, SILU scaled by 2", MK_W_BF16, 0, MK_EPI_SILU, 0, 60, 100, 7, 31, 128, 0, 1, 0, 0, 2},
        {"bf16, k 1,500", MK_W_BF16, 0, 0, 0, 9, 1500, 0, 9, 128, 300, 1, 0, 0, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) gemv_check(&cases[i]);
}

/* All 254 finite e4m3 codes against x = 1. */
static void test_fp8_codes(void **state)
{
    (void)state;
    onestep *o = one_new(1, 1);
    float x[64] = {1}, y[256];
    uint32_t vec = one_even(o, MK_F32, 0, 64, 1), out = one_even(o, MK_F32, 0, 256, 1);
    one_alloc(o, 1, 64, 1, 64, 64);
    uint8_t *tape = one_tape(o, mk_segment_bytes(MK_W_FP8, 256, 64, 2, 128));
    const float scales[2] = {1.0f, 0.5f};
    memcpy(tape, scales, 8);
    for (uint32_t i = 0; i < 256; i++) tape[MK_LINE_BYTES + 16 * i] = (i & 0x7f) == 0x7f ? 0 : (uint8_t)i;
    one_begin(o);
    one_row(o, 0, 0);
    one_put(o, vec, 0, x, NULL);
    one_insn(o, MK_OP_GEMV);
    one_wait(o, vec);
    one_to(o, out, 0);
    o->in.gemv = (mk_gemv){.n = 256, .k = 64, .wtype = MK_W_FP8, .nseg = 2, .scale_k = 128, .k_chunk = 64, .scale = 1};
    one_run(o, 0);
    one_get(o, out, 0, 0, 256, y);
    for (uint32_t i = 0; i < 256; i++)
        if ((i & 0x7f) != 0x7f) assert_true((double)y[i] == one_e4m3(i) * (i < 128 ? 1 : 0.5));
    one_free(o);
}

/* A row's bits do not depend on how the matrix is cut. */
static void test_gemv_cuts(void **state)
{
    (void)state;
    enum { ROWS = 140, K = 200 };
    matrix m = matrix_new(5, ROWS, K, MK_W_FP8, 128);
    const matrix *mp[1] = {&m};
    float x[K], whole[ROWS], part[ROWS];
    one_fill(6, x, K, 1.0);
    for (uint32_t cuts = 1; cuts <= 9; cuts += 4) {
        onestep *o = one_new(1, 1);
        uint32_t vec = one_even(o, MK_F32, 0, K, 2), out = one_even(o, MK_F32, 0, ROWS, cuts);
        one_alloc(o, 1, 64, 1, 64, 64);
        one_begin(o);
        one_row(o, 0, 0);
        one_put(o, vec, 0, x, NULL);
        for (uint32_t s = 0; s < cuts; s++) {
            uint32_t a = mk_start(s, ROWS, cuts), n = mk_start(s + 1, ROWS, cuts) - a, nseg = mk_segments(a % 128, n, 128);
            pack(one_tape(o, mk_segment_bytes(MK_W_FP8, n, K, nseg, 128)), mp, 1, a, n, nseg);
            one_insn(o, MK_OP_GEMV);
            one_wait(o, vec);
            one_to(o, out, s);
            o->in.gemv = (mk_gemv){.n = n, .k = K, .wtype = MK_W_FP8, .phase = (uint16_t)(a % 128), .nseg = (uint16_t)nseg, .scale_k = 128,
                                   .k_chunk = K, .scale = 1, .row0 = a};
            one_run(o, 0);
        }
        one_get(o, out, 0, 0, ROWS, cuts == 1 ? whole : part);
        if (cuts > 1) one_same("cut", part, whole, ROWS);
        one_free(o);
    }
    matrix_free(&m);
}

/* ---- experts --------------------------------------------------------------------------------------------------------- */

enum { EXPERTS = 7, TOPK = 3 };

typedef struct expert_case {
    const char *name;
    uint32_t wtype, hidden, inter, T, workers, h_slices;
    int act_f32, local_base;
    uint32_t rows;
    uint16_t id[MK_MAX_ROWS][TOPK];
} expert_case;

/* mk_routes from the rows' ids, as isa.h has it. */
static void fill_routes(const expert_case *t, uint32_t rows, const uint32_t *which, float weights[][TOPK], mk_routes *out)
{
    memset(out, 0xee, sizeof *out);
    out->n_union = 0;
    memset(out->rank, 255, sizeof out->rank);
    for (uint16_t e = 0; e < EXPERTS; e++) {
        int any = 0;
        for (uint32_t q = 0; q < rows; q++)
            for (uint32_t k = 0; k < TOPK; k++)
                if (t->id[which[q]][k] == e) {
                    out->rank[q][out->n_union] = (uint8_t)k;
                    any = 1;
                }
        if (any) out->expert[out->n_union++] = e;
    }
    for (uint32_t q = 0; q < rows; q++) memcpy(out->weight[q], weights[which[q]], sizeof weights[0]);
}

static void expert_check(const expert_case *t)
{
    onestep *o = one_new(t->workers, t->act_f32);
    uint32_t H = t->hidden, I = t->inter, fp8 = t->wtype == MK_W_FP8, W = t->workers, T = t->T;
    matrix gate[EXPERTS], up[EXPERTS], down[EXPERTS];
    for (uint32_t e = 0; e < EXPERTS; e++) {
        gate[e] = matrix_new(100 + e, I, H, t->wtype, 128);
        up[e] = matrix_new(200 + e, I, H, t->wtype, 128);
        down[e] = matrix_new(300 + e, H, I, t->wtype, 128);
    }
    uint32_t *ustart = need(malloc((TOPK * T + 1) * sizeof *ustart));
    for (uint32_t k = 0; k < TOPK; k++)
        for (uint32_t s = 0; s < T; s++) ustart[k * T + s] = k * I + mk_expert_start(s, I, T);
    ustart[TOPK * T] = TOPK * I;
    uint32_t h = one_even(o, MK_F32, 0, H, t->h_slices), routes = one_local(o, sizeof(mk_routes));
    uint32_t u = one_packet(o, t->act_f32 ? MK_F32 : MK_BF16, 0, ustart, TOPK * T);
    uint32_t base = t->local_base ? one_local(o, MK_MAX_ROWS * H * 4) : one_even(o, MK_F32, 0, H, t->h_slices);
    uint32_t out = one_even(o, MK_F32, 0, H, t->h_slices);
    float *gamma = need(malloc(H * sizeof *gamma)), *x = need(malloc(MK_MAX_ROWS * H * sizeof *x)), *b = need(malloc(MK_MAX_ROWS * H * sizeof *b));
    float *first = need(malloc(MK_MAX_ROWS * H * sizeof *first)), *y = need(malloc(H * sizeof *y)), *uu = need(malloc(TOPK * I * sizeof *uu));
    float weights[MK_MAX_ROWS][TOPK];
    uint64_t seed = 9;
    one_fill(1, gamma, H, 0.2);
    for (uint32_t i = 0; i < H; i++) gamma[i] = (gamma[i] + 1) * (fp8 ? 1.0f : 0.1f);
    one_fill(2, x, MK_MAX_ROWS * H, 1.0);
    one_fill(3, b, MK_MAX_ROWS * H, 1.0);
    for (uint32_t r = 0; r < MK_MAX_ROWS; r++)
        for (uint32_t k = 0; k < TOPK; k++) weights[r][k] = (float)(0.1 + one_uniform(&seed));
    uint32_t param = one_param(o, gamma, H);
    one_alloc(o, 1, 64, MK_MAX_ROWS, 64, 64);

    uint32_t up_seg = 0, dn_seg = 0, dn_rows = 0, up_rows = 0;
    for (uint32_t s = 0; s < T; s++) {
        uint32_t a = mk_expert_start(s, I, T), n = mk_expert_start(s + 1, I, T) - a;
        if (n > up_rows) up_rows = n;
        if (fp8 && mk_segments(a % 128, n, 128) > up_seg) up_seg = mk_segments(a % 128, n, 128);
    }
    for (uint32_t s = 0; s < t->h_slices; s++) {
        uint32_t a = mk_start(s, H, t->h_slices), n = mk_start(s + 1, H, t->h_slices) - a;
        if (n > dn_rows) dn_rows = n;
        if (fp8 && mk_segments(a % 128, n, 128) > dn_seg) dn_seg = mk_segments(a % 128, n, 128);
    }
    uint64_t up_slice = mk_segment_bytes(t->wtype, 2 * up_rows, H, 2 * up_seg, 128), dn_slice = mk_segment_bytes(t->wtype, dn_rows, I, dn_seg, 128);
    uint64_t up_base = 256, dn_base = up_base + EXPERTS * T * up_slice, all = dn_base + EXPERTS * t->h_slices * dn_slice;
    uint8_t *mem = one_expert(o, all);
    for (uint32_t e = 0; e < EXPERTS; e++) {
        const matrix *gu[2] = {&gate[e], &up[e]}, *dn[1] = {&down[e]};
        for (uint32_t s = 0; s < T; s++) {
            uint32_t a = mk_expert_start(s, I, T);
            assert_true(pack(mem + up_base + (e * T + s) * up_slice, gu, 2, a, mk_expert_start(s + 1, I, T) - a, up_seg) <= up_slice);
        }
        for (uint32_t s = 0; s < t->h_slices; s++) {
            uint32_t a = mk_start(s, H, t->h_slices);
            assert_true(pack(mem + dn_base + (e * t->h_slices + s) * dn_slice, dn, 1, a, mk_start(s + 1, H, t->h_slices) - a, dn_seg) <= dn_slice);
        }
    }

    double worst = 0, *xd = need(malloc(H * sizeof *xd)), *ud = need(malloc(TOPK * I * sizeof *ud));
    for (uint32_t pass = 0; pass <= t->rows; pass++) { /* all rows, then each alone */
        uint32_t rows = pass ? 1 : t->rows, which[MK_MAX_ROWS];
        mk_routes routing;
        one_begin(o);
        for (uint32_t q = 0; q < rows; q++) {
            uint32_t r = which[q] = pass ? pass - 1 : q;
            one_row(o, r, 1);
            one_put(o, h, q, x + (size_t)r * H, NULL);
            if (!t->local_base) one_put(o, base, q, b + (size_t)r * H, NULL);
        }
        fill_routes(t, rows, which, weights, &routing);
        for (uint32_t w = 0; w < W; w++) {
            memcpy(one_local_at(o, w, routes), &routing, sizeof routing);
            one_insn(o, MK_OP_EXPERT_UP);
            one_wait(o, h);
            one_wait(o, routes);
            one_to(o, u, 0);
            o->in.expert = (mk_expert){.base = up_base, .expert_stride = T * up_slice, .slice_stride = (uint32_t)up_slice, .T = (uint16_t)T,
                                       .k = H, .inter = I, .wtype = (uint8_t)t->wtype, .nseg = (uint8_t)up_seg, .topk = TOPK,
                                       .param_off = param, .eps = 1e-5f};
            one_run(o, w);
        }
        assert_true(one_ready(o, u, 0, TOPK * T));
        for (uint32_t q = 0; q < rows; q++) {
            uint32_t r = which[q];
            for (uint32_t i = 0; i < H; i++) xd[i] = (double)x[(size_t)r * H + i];
            rms(xd, gamma, H, (double)1e-5f, !t->act_f32);
            one_get(o, u, q, 0, TOPK * I, uu);
            double peak = 0;
            for (uint32_t k = 0; k < TOPK; k++)
                for (uint32_t i = 0; i < I; i++) {
                    uint32_t e = t->id[r][k];
                    ud[k * I + i] = silu(dot(&gate[e], i, xd, NULL)) * dot(&up[e], i, xd, NULL);
                    peak = fmax(peak, fabs(ud[k * I + i]));
                }
            double e = (t->act_f32 ? one_close : one_close_bf16)("u", uu, ud, TOPK * I, peak, t->act_f32 ? 3e-6 : 3e-3);
            if (e > worst) worst = e;
        }
        for (uint32_t s = 0; s < t->h_slices; s++) {
            uint32_t w = s % W, a = mk_start(s, H, t->h_slices), n = mk_start(s + 1, H, t->h_slices) - a;
            if (t->local_base)
                for (uint32_t q = 0; q < rows; q++)
                    memcpy((float *)one_local_at(o, w, base) + (size_t)q * n, b + (size_t)which[q] * H + a, n * sizeof *b);
            one_insn(o, MK_OP_EXPERT_DOWN);
            one_wait(o, u);
            one_wait(o, routes);
            if (t->local_base) one_wait(o, base);
            else one_wait_slices(o, base, s, 1);
            one_to(o, out, s);
            o->in.expert = (mk_expert){.base = dn_base, .expert_stride = t->h_slices * dn_slice, .slice_stride = (uint32_t)dn_slice,
                                       .T = (uint16_t)t->h_slices, .t = (uint16_t)s, .k = I, .inter = I, .n = (uint16_t)n,
                                       .phase = (uint16_t)(fp8 ? a % 128 : 0), .wtype = (uint8_t)t->wtype, .nseg = (uint8_t)dn_seg, .topk = TOPK};
            one_run(o, w);
        }
        for (uint32_t q = 0; q < rows; q++) {
            uint32_t r = which[q];
            one_get(o, out, q, 0, H, y);
            if (pass) {
                one_same("expert rows alone", y, first + (size_t)r * H, H);
                continue;
            }
            memcpy(first + (size_t)r * H, y, H * sizeof *y);
            one_get(o, u, q, 0, TOPK * I, uu); /* from the published u: EXPERT_DOWN on its own */
            for (uint32_t i = 0; i < H; i++) {
                double want = (double)b[(size_t)r * H + i], scale = 0.1, sc;
                for (uint32_t k = 0; k < TOPK; k++) {
                    for (uint32_t j = 0; j < I; j++) ud[j] = (double)uu[k * I + j];
                    want += (double)weights[r][k] * dot(&down[t->id[r][k]], i, ud, &sc);
                    scale += sc;
                }
                double e = one_close("h", &y[i], &want, 1, scale, 4e-6);
                if (e > worst) worst = e;
            }
        }
    }
    print_message("%-44s max error %.2g\n", t->name, worst);
    for (uint32_t e = 0; e < EXPERTS; e++) {
        matrix_free(&gate[e]);
        matrix_free(&up[e]);
        matrix_free(&down[e]);
    }
    free(ustart), free(gamma), free(x), free(b), free(first), free(y), free(uu), free(xd), free(ud);
    one_free(o);
}

static void test_experts(void **state)
{
    (void)state;
    expert_case c = {"experts fp8, one row", MK_W_FP8, 136, 200, 3, 3, 4, 1, 0, 1, {{0, 3, 6}}};
    expert_check(&c);
    c = (expert_case){"experts fp8, 8 rows, shared and not", MK_W_FP8, 136, 300, 4, 3, 5, 1, 1, 8,
                      {{0, 1, 2}, {0, 1, 2}, {3, 4, 5}, {0, 5, 6}, {2, 4, 6}, {1, 3, 5}, {4, 5, 6}, {0, 1, 6}}};
    expert_check(&c);
    c.name = "experts fp8, 8 rows, bf16 vectors", c.act_f32 = 0, c.local_base = 0, c.hidden = 192, c.inter = 130, c.T = 8, c.workers = 8;
    expert_check(&c);
    c.name = "experts bf16, 8 rows", c.act_f32 = 1, c.wtype = MK_W_BF16, c.hidden = 100, c.inter = 70, c.T = 5, c.workers = 2;
    expert_check(&c);
    c = (expert_case){"experts bf16, 3 rows disjoint but one", MK_W_BF16, 64, 65, 1, 1, 1, 0, 1, 3, {{0, 1, 2}, {3, 4, 5}, {0, 4, 6}}};
    expert_check(&c);
    c = (expert_case){"experts fp8, more slices than rows of one", MK_W_FP8, 64, 17, 16, 5, 7, 1, 0, 2, {{1, 2, 3}, {2, 3, 4}}};
    expert_check(&c);
}

/* ---- LM_HEAD --------------------------------------------------------------------------------------------------------- */

static void lm_case(uint32_t wtype, uint32_t scale_k, uint32_t vocab, uint32_t k, uint32_t slices, int act_f32)
{
    onestep *o = one_new(2, act_f32);
    matrix m = matrix_new(4, vocab, k, wtype, scale_k);
    for (uint32_t i = 0; i + 1 < vocab; i += 2) { /* ties */
        memcpy(m.code + (i + 1) * k, m.code + i * k, k * sizeof *m.code);
        if (!scale_k) m.scale[i + 1] = m.scale[i];
    }
    const matrix *mp[1] = {&m};
    float *gamma = need(malloc(k * sizeof *gamma)), *x = need(malloc(MK_MAX_ROWS * k * sizeof *x));
    float *first = need(malloc(MK_MAX_ROWS * vocab * sizeof *first));
    double *xd = need(malloc(k * sizeof *xd)), worst = 0;
    one_fill(5, gamma, k, 0.3);
    for (uint32_t i = 0; i < k; i++) gamma[i] = (gamma[i] + 1) * (wtype == MK_W_FP8 ? 0.5f : 0.1f);
    one_fill(6, x, MK_MAX_ROWS * k, 1.0);
    uint32_t h = one_even(o, MK_F32, 0, k, 3), stats = one_even(o, MK_F32, 0, 4 * slices, slices);
    uint32_t logits = one_bulk(o, (uint64_t)MK_MAX_ROWS * vocab * 4, slices), param = one_param(o, gamma, k);
    one_alloc(o, 1, 64, MK_MAX_ROWS, 64, 64);
    /* 8 rows of which 5 want logits; rows alone; a step without logits */
    for (uint32_t pass = 0; pass < 4; pass++) {
        uint32_t rows = pass == 0 ? 8 : 1;
        one_begin(o);
        for (uint32_t q = 0; q < rows; q++) {
            mk_row *row = one_row(o, q, 2);
            uint32_t r = pass == 1 ? 0 : pass == 2 ? 7 : q;
            if (pass < 3 && r % 3 != 1) row->flags |= MK_ROW_LOGITS;
            if (row->flags & MK_ROW_LOGITS) o->step.any_logits = 1;
            one_put(o, h, q, x + (size_t)r * k, NULL);
        }
        memset(one_bulk_at(o, logits), 0xff, (size_t)MK_MAX_ROWS * vocab * 4);
        for (uint32_t s = 0; s < slices; s++) {
            uint32_t a = mk_start(s, vocab, slices), n = mk_start(s + 1, vocab, slices) - a, phase = wtype == MK_W_FP8 && scale_k ? a % 128 : 0;
            uint32_t nseg = wtype == MK_W_FP8 ? mk_segments(phase, n, scale_k) : 0;
            pack(one_tape(o, mk_segment_bytes(wtype, n, k, nseg, scale_k)), mp, 1, a, n, nseg);
            assert_false(one_ready(o, logits, 0, 0));
            one_insn(o, MK_OP_LM_HEAD);
            one_wait(o, h);
            one_to(o, stats, s);
            o->in.lm_head = (mk_lm_head){.n = n, .k = k, .row0 = a, .vocab = vocab, .wtype = (uint8_t)wtype, .scale_k = (uint16_t)scale_k, .phase = (uint16_t)phase,
                                         .nseg = (uint16_t)nseg, .param_off = param, .eps = 1e-5f, .logits_vec = (uint16_t)logits};
            one_run(o, 0);
        }
        assert_true(one_ready(o, logits, 0, 0));
        assert_true(one_ready(o, stats, 0, slices));
        for (uint32_t q = 0; q < rows; q++) {
            uint32_t r = pass == 1 ? 0 : pass == 2 ? 7 : q;
            const float *l = (float *)one_bulk_at(o, logits) + (size_t)q * vocab;
            int wants = (o->step.row[q].flags & MK_ROW_LOGITS) != 0;
            if (wants && pass == 0) {
                memcpy(first + (size_t)r * vocab, l, vocab * sizeof *l);
                for (uint32_t i = 0; i < k; i++) xd[i] = (double)x[(size_t)r * k + i];
                rms(xd, gamma, k, (double)1e-5f, !act_f32);
                for (uint32_t i = 0; i < vocab; i++) {
                    double sc, want = dot(&m, i, xd, &sc), e = one_close("logit", &l[i], &want, 1, sc, act_f32 ? 4e-6 : 2e-3);
                    if (e > worst) worst = e;
                }
            } else if (wants) {
                one_same("logits alone", l, first + (size_t)r * vocab, vocab);
            }
            for (uint32_t s = 0; s < slices; s++) {
                uint32_t a = mk_start(s, vocab, slices), b = mk_start(s + 1, vocab, slices), best = a, w[4];
                float max, sum;
                one_words(o, stats, q, s, 4, w);
                memcpy(&max, &w[0], 4);
                memcpy(&sum, &w[2], 4);
                if (!wants) {
                    assert_true(max == -INFINITY && w[1] == 0xffffffffu && sum == 0.0f);
                    continue;
                }
                double want = 0;
                for (uint32_t i = a + 1; i < b; i++)
                    if (l[i] > l[best]) best = i;
                for (uint32_t i = a; i < b; i++) want += exp((double)l[i] - (double)l[best]);
                assert_true(max == l[best]);
                assert_int_equal(w[1], best);
                one_close("sum of exponentials", &sum, &want, 1, want, 2e-6);
            }
        }
    }
    print_message("lm_head wtype %u scale_k %u vocab %u k %u act_f32 %d: max error %.2g\n", wtype, scale_k, vocab, k, act_f32, worst);
    matrix_free(&m);
    free(gamma), free(x), free(first), free(xd);
    one_free(o);
}

static void test_lm_head(void **state)
{
    (void)state;
    lm_case(MK_W_BF16, 128, 100, 96, 1, 1);
    lm_case(MK_W_BF16, 128, 333, 100, 4, 0);
    lm_case(MK_W_FP8, 128, 500, 200, 3, 1);
    lm_case(MK_W_FP8, 128, 500, 192, 5, 0);
    lm_case(MK_W_FP8, 0, 300, 200, 4, 1);
    lm_case(MK_W_FP8, 0, 300, 192, 6, 0);
    lm_case(MK_W_BF16, 128, 9, 32, 9, 1);
}

/* ---- EMBED ----------------------------------------------------------------------------------------------------------- */

static void test_embed(void **state)
{
    (void)state;
    enum { HIDDEN = 50, VOCAB = 20, SLICES = 4, OFF = 96 };
    float table[VOCAB * HIDDEN], h[HIDDEN];
    one_fill(1, table, VOCAB * HIDDEN, 1.0);
    for (uint32_t wtype = MK_F32; wtype <= MK_BF16; wtype++) {
        onestep *o = one_new(1, 0);
        uint32_t vec = one_even(o, MK_F32, 0, HIDDEN, SLICES);
        one_alloc(o, 1, 64, MK_MAX_ROWS, 64, 64);
        o->mem.embed = need(malloc(OFF + sizeof table));
        for (uint32_t i = 0; i < VOCAB * HIDDEN; i++) {
            uint16_t b = mk_f32_to_bf16(table[i]);
            if (wtype == MK_F32) memcpy(o->mem.embed + OFF + 4 * i, &table[i], 4);
            else memcpy(o->mem.embed + OFF + 2 * i, &b, 2);
        }
        for (int scaled = 0; scaled < 2; scaled++) {
            one_begin(o);
            for (uint32_t r = 0; r < MK_MAX_ROWS; r++) one_row(o, r, 0)->token = r * 3 % VOCAB + (r == 7 ? 18 : 0);
            for (uint32_t s = 0; s < SLICES; s++) {
                one_insn(o, MK_OP_EMBED);
                one_to(o, vec, s);
                uint32_t a = mk_start(s, HIDDEN, SLICES);
                o->in.embed = (mk_embed){.embed_off = OFF, .first = a, .n = mk_start(s + 1, HIDDEN, SLICES) - a, .hidden = HIDDEN,
                                         .wtype = (uint8_t)wtype, .scale = scaled ? 7.5f : 1.0f};
                one_run(o, 0);
            }
            for (uint32_t r = 0; r < MK_MAX_ROWS; r++) {
                one_get(o, vec, r, 0, HIDDEN, h);
                for (uint32_t i = 0; i < HIDDEN; i++) {
                    float v = table[o->step.row[r].token * HIDDEN + i];
                    assert_true(h[i] == (wtype == MK_F32 ? v : mk_round_bf16(v)) * (scaled ? 7.5f : 1.0f));
                }
            }
        }
        one_free(o);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fp8_codes), cmocka_unit_test(test_gemv),    cmocka_unit_test(test_gemv_cuts),
        cmocka_unit_test(test_experts),   cmocka_unit_test(test_lm_head), cmocka_unit_test(test_embed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
