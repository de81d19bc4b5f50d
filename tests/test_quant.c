/* Number formats, and matrices fetched in every dtype, cut anywhere: against a second, slow way in double. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "host/quant.h"
#include "tests/support/sanitized.h"
#include "tests/support/stwrite.h"
#include "tests/support/tmp.h"

/* ---- formats -------------------------------------------------------------------------------------------------------- */

static double fp8_value(unsigned b)
{
    int e = (int)(b >> 3 & 15), m = (int)(b & 7);
    double v = e ? ldexp(8 + m, e - 10) : ldexp(m, -9);
    return b & 0x80 ? -v : v;
}

static void fp8_every_code(void **s)
{
    (void)s;
    for (unsigned b = 0; b < 256; b++) {
        float f = mk_fp8_to_f32((uint8_t)b);
        if ((b & 0x7f) == 0x7f) {
            assert_true(isnan(f));
            continue;
        }
        assert_true((double)f == fp8_value(b));
        assert_int_equal(mk_f32_to_fp8(f), b);
    }
    assert_true(fp8_value(0x7e) == 448);
    assert_int_equal(mk_f32_to_fp8(NAN), 0x7f);
    assert_int_equal(mk_f32_to_fp8(INFINITY), 0x7e);
    assert_int_equal(mk_f32_to_fp8(-1e30f), 0xfe);
    assert_int_equal(mk_f32_to_fp8(460), 0x7e);
    assert_int_equal(mk_f32_to_fp8(-0.0f), 0x80);
}

/* Between two neighbours: the nearer; half way: the even one. */
static void fp8_rounding(void **s)
{
    (void)s;
    for (unsigned b = 0; b < 0x7e; b++) {
        float lo = (float)fp8_value(b), hi = (float)fp8_value(b + 1), mid = (lo + hi) / 2;
        unsigned even = b & 1 ? b + 1 : b;
        assert_int_equal(mk_f32_to_fp8(mid), even);
        assert_int_equal(mk_f32_to_fp8(-mid), even | 0x80);
        assert_int_equal(mk_f32_to_fp8(nextafterf(mid, lo)), b);
        assert_int_equal(mk_f32_to_fp8(nextafterf(mid, hi)), b + 1);
    }
}

static void other_formats(void **s)
{
    (void)s;
    for (unsigned h = 0; h < 65536; h++) {
        float f = mk_f16_to_f32((uint16_t)h);
        int e = (int)(h >> 10 & 31), m = (int)(h & 1023);
        if (e == 31) {
            assert_true(m ? isnan(f) : isinf(f));
            continue;
        }
        double v = e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
        assert_true((double)f == (h & 0x8000u ? -v : v));
        assert_int_equal(mk_test_f32_to_f16(f), h);
        float b = mk_widen_bf16((uint16_t)h);
        if (isfinite(b)) assert_int_equal(mk_narrow_bf16(b), h);
    }
    assert_int_equal(mk_narrow_bf16(1 + 0x1p-8f), 0x3f80);
    assert_int_equal(mk_narrow_bf16(1 + 0x3p-8f), 0x3f82);
    assert_true(mk_e8m0_to_f32(127) == 1);
    assert_true(mk_e8m0_to_f32(0) == 0x1p-127f);
    assert_true(mk_e8m0_to_f32(254) == 0x1p127f);
    assert_true(isnan(mk_e8m0_to_f32(255)));
}

/* ---- fetch ---------------------------------------------------------------------------------------------------------- */

typedef struct ckpt {
    char *dir, *path;
    mk_checkpoint *ck;
} ckpt;

static ckpt open_written(mk_stw *w)
{
    ckpt c = {.dir = mk_tmp_dir()};
    mk_err e = {0};
    c.path = mk_tmp_path(c.dir, "model.safetensors");
    mk_stw_save(w, c.path);
    mk_stw_destroy(&w);
    if (mk_checkpoint_open(c.dir, &c.ck, &e)) fail_msg("%s", e.msg);
    return c;
}
static void drop(ckpt *c)
{
    mk_checkpoint_close(&c->ck);
    free(c->path);
    mk_tmp_remove(&c->dir);
}

/* Element (r, c) of a tensor as the checkpoint means it. */
static double element(const mk_checkpoint *ck, const char *name, uint64_t r, uint64_t c)
{
    const mk_tensor *t = mk_checkpoint_find(ck, name);
    const unsigned char *p = t->data;
    uint64_t i = r * t->shape[1] + c;
    uint16_t h;
    float f;
    if (t->dtype == MK_ST_F32) {
        memcpy(&f, p + 4 * i, 4);
        return f;
    }
    if (t->dtype == MK_ST_F8_E8M0) return ldexp(1, p[i] - 127);
    if (t->dtype == MK_ST_F8_E4M3) {
        char scale[256];
        snprintf(scale, sizeof scale, "%s_scale_inv", name);
        return fp8_value(p[i]) * element(ck, scale, r / 128, c / 128);
    }
    memcpy(&h, p + 2 * i, 2);
    return t->dtype == MK_ST_F16 ? mk_f16_to_f32(h) : mk_widen_bf16(h);
}

/* Element (i, j) of the matrix. */
static double of_matrix(const mk_checkpoint *ck, const mk_mat *m, uint64_t i, uint64_t j)
{
    uint64_t cols = mk_checkpoint_find(ck, m->tensor)->shape[1];
    if (m->source == MK_SRC_FOLDED) {
        const uint64_t latent = mk_checkpoint_find(ck, m->by->tensor)->shape[1], row = i / latent * m->head_stride + m->head_off;
        float sum = 0;
        for (uint64_t n = 0; n < m->head_n; n++) sum += (float)of_matrix(ck, m->by, i, n) * (float)element(ck, m->tensor, row + n, j);
        return (double)sum;
    }
    if (m->source == MK_SRC_HEAD_ROWS) return element(ck, m->tensor, i / m->head_n * m->head_stride + m->head_off + i % m->head_n, j);
    if (m->source == MK_SRC_HEAD_T) return element(ck, m->tensor, i / cols * m->head_stride + m->head_off + j, i % cols);
    return element(ck, m->tensor, i, j);
}

/* Scales of rows [row0, row0 + rows) in a column block, and how many of those there are: of 128 rows and scale_k columns, or (0) of a row. */
static uint32_t segments_of(const mk_mat *m, uint32_t row0, uint32_t rows)
{
    return m->scale_k ? (row0 % 128 + rows + 127) / 128 : rows;
}
static uint32_t column_blocks(const mk_mat *m)
{
    return m->scale_k ? (m->k + m->scale_k - 1) / m->scale_k : 1;
}

static int fetch(const mk_checkpoint *ck, const mk_mat *m, uint32_t row0, uint32_t rows, void *dst, float *scales, mk_err *e)
{
    uint32_t nseg = segments_of(m, row0, rows), nkb = column_blocks(m);
    uint8_t *d = malloc((size_t)rows * m->k * 2); /* exact sizes, so that the sanitizer sees a value too many */
    float *sc = malloc((size_t)nseg * nkb * 4);
    int rc = mk_mat_fetch(ck, m, 0, row0, rows, d, m->wtype == MK_W_FP8 ? sc : NULL, e);
    if (!rc) memcpy(dst, d, (size_t)rows * m->k * (m->wtype == MK_W_FP8 ? 1 : 2));
    if (!rc && m->wtype == MK_W_FP8) memcpy(scales, sc, (size_t)nseg * nkb * 4);
    free(d);
    free(sc);
    return rc;
}

/* BF16: every value is the source's, rounded once. FP8: the value is code * scale with the scale of its block; with `exact` it is the
 * source's, else the scale is amax / 448 of the whole block and the code is the nearest. Slices of 17 and 61 rows have the same bits. */
static void check_matrix(const mk_checkpoint *ck, const mk_mat *m, int exact)
{
    mk_err e = {0};
    size_t nv = (size_t)m->n * m->k;
    uint32_t nseg = segments_of(m, 0, m->n), nkb = column_blocks(m), height = m->scale_k ? 128 : 1, width = m->scale_k ? m->scale_k : m->k;
    uint16_t *all = malloc(nv * 2), *cut = malloc(nv * 2);
    float *scales = malloc((size_t)nseg * nkb * 4), *cut_scales = malloc((size_t)nseg * nkb * 4);
    const uint8_t *all8 = (const uint8_t *)all, *cut8 = (const uint8_t *)cut;
    /* Slices first: the scales kept between calls must not depend on who came first. */
    if (fetch(ck, m, m->n / 2, 1, cut, cut_scales, &e)) fail_msg("%s", e.msg);
    if (fetch(ck, m, 0, m->n, all, scales, &e)) fail_msg("%s", e.msg);
    for (uint32_t i = 0; i < m->n; i++)
        for (uint32_t j = 0; j < m->k; j++) {
            double v = of_matrix(ck, m, i, j);
            size_t at = (size_t)i * m->k + j;
            if (m->wtype == MK_W_BF16) {
                assert_int_equal(all[at], mk_test_f32_to_bf16((float)v));
                continue;
            }
            float scale = scales[(size_t)(j / width) * nseg + i / height];
            if (exact)
                assert_true(fp8_value(all8[at]) * (double)scale == v);
            else
                assert_int_equal(all8[at], mk_f32_to_fp8((float)v / scale));
        }
    for (uint32_t b = 0; !exact && m->wtype == MK_W_FP8 && b < nseg * nkb; b++) {
        double amax = 0;
        uint32_t seg = b % nseg, kb = b / nseg;
        for (uint32_t i = seg * height; i < m->n && i < (seg + 1) * height; i++)
            for (uint32_t j = kb * width; j < m->k && j < (kb + 1) * width; j++) amax = fmax(amax, fabs(of_matrix(ck, m, i, j)));
        assert_true(scales[b] == (amax > 0 ? (float)amax / 448.0f : 1.0f));
    }
    for (uint32_t step = 17; step <= 61; step += 44)
        for (uint32_t r = 0; r < m->n; r += step) {
            uint32_t rows = m->n - r < step ? m->n - r : step, ns = segments_of(m, r, rows);
            if (fetch(ck, m, r, rows, cut, cut_scales, &e)) fail_msg("%s", e.msg);
            if (m->wtype == MK_W_BF16) {
                assert_memory_equal(cut, all + (size_t)r * m->k, (size_t)rows * m->k * 2);
                continue;
            }
            assert_memory_equal(cut8, all8 + (size_t)r * m->k, (size_t)rows * m->k);
            for (uint32_t kb = 0; kb < nkb; kb++)
                for (uint32_t seg = 0; seg < ns; seg++)
                    assert_true(cut_scales[(size_t)kb * ns + seg] == scales[(size_t)kb * nseg + r / height + seg]);
        }
    free(all);
    free(cut);
    free(scales);
    free(cut_scales);
}

static void refuses_rows(const mk_checkpoint *ck, const mk_mat *m)
{
    mk_err e = {0};
    uint8_t row[256];
    float scale;
    assert_int_equal(mk_mat_fetch(ck, m, 0, 0, 1, row, &scale, &e), MK_E_MODEL);
    assert_non_null(strstr(e.msg, "tensor w.weight: its shape does not fit the matrix"));
}

static mk_mat plain(const char *name, uint32_t n, uint32_t k, uint8_t wtype)
{
    mk_mat m = {.source = MK_SRC_PLAIN, .wtype = wtype, .n = n, .k = k, .scale_k = 128};
    snprintf(m.tensor, sizeof m.tensor, "%s", name);
    return m;
}
/* kv_b_proj of `heads` heads: the two matrices that the MLA takes out of it. */
static mk_mat uk(const char *name, uint32_t heads, uint32_t nope, uint32_t v, uint32_t latent, uint8_t wtype)
{
    mk_mat m = plain(name, heads * latent, nope, wtype);
    m.source = MK_SRC_HEAD_T;
    m.head_n = nope;
    m.head_stride = nope + v;
    return m;
}
static mk_mat uv(const char *name, uint32_t heads, uint32_t nope, uint32_t v, uint32_t latent, uint8_t wtype)
{
    mk_mat m = plain(name, heads * v, latent, wtype);
    m.source = MK_SRC_HEAD_ROWS;
    m.head_n = v;
    m.head_off = nope;
    m.head_stride = nope + v;
    return m;
}

/* q_b_proj of heads of nope + rope rows, their first `nope` by W_UK: one matrix. */
static mk_mat folded(const char *name, uint32_t rope, uint32_t k, const mk_mat *by, uint8_t wtype)
{
    mk_mat m = plain(name, by->n, k, wtype);
    m.source = MK_SRC_FOLDED;
    m.by = by;
    m.head_n = by->k;
    m.head_stride = by->k + rope;
    return m;
}

static void every_dtype(void **s)
{
    (void)s;
    static const enum mk_st_dtype dtypes[] = {MK_ST_F32, MK_ST_F16, MK_ST_BF16, MK_ST_F8_E4M3};
    static const enum mk_st_dtype scales[] = {MK_ST_F32, MK_ST_BF16, MK_ST_F8_E8M0};
    for (int d = 0; d < 6; d++) {
        enum mk_st_dtype dtype = dtypes[d < 3 ? d : 3], scale = scales[d < 3 ? 0 : d - 3];
        int fp8 = dtype == MK_ST_F8_E4M3;
        mk_stw *w = mk_stw_new();
        mk_stw_raw(w, "pad", MK_ST_U8, 1, (uint64_t[]){d % 2 ? 3 : 1}, NULL); /* nothing is aligned */
        mk_stw_random(w, "w.weight", dtype, 2, (uint64_t[]){300, 200}, 0.25f, scale);
        mk_stw_random(w, "kv_b.weight", dtype, 2, (uint64_t[]){2 * 256, 256}, 0.25f, scale);
        mk_stw_random(w, "q_b.weight", dtype, 2, (uint64_t[]){2 * 160, 48}, 0.25f, scale);
        ckpt c = open_written(w);
        for (int t = 0; t < 2; t++) {
            uint8_t wtype = t ? MK_W_FP8 : MK_W_BF16;
            mk_mat m = plain("w.weight", 300, 200, wtype), k = uk("kv_b.weight", 2, 128, 128, 256, wtype),
                   v = uv("kv_b.weight", 2, 128, 128, 256, wtype);
            check_matrix(c.ck, &m, fp8);
            if (!ONE_OF_EACH || d % 3 == 0) { /* what comes out of products */
                check_matrix(c.ck, &k, fp8);
                check_matrix(c.ck, &v, fp8);
                mk_mat f = folded("q_b.weight", 32, 48, &k, wtype); /* made of FP8 it is quantised anew */
                check_matrix(c.ck, &f, 0);
                v.head_off = 0; /* another matrix out of the same tensor: scales of its own */
                check_matrix(c.ck, &v, fp8);
            }
            if (!t) continue;
            m.scale_k = 0; /* a scale a row, which a tensor of blocks has not */
            if (fp8)
                refuses_rows(c.ck, &m);
            else
                check_matrix(c.ck, &m, 0);
        }
        drop(&c);
    }
}

/* Heads that are no multiples of 128 (GLM: nope 192, v 256): blocks of 64 columns map for uk; uv's rows map by the tensor's blocks only. */
static void straddling_heads(void **s)
{
    (void)s;
    for (int fp8 = 0; fp8 < 2; fp8++) {
        mk_stw *w = mk_stw_new();
        mk_stw_random(w, "kv_b.weight", fp8 ? MK_ST_F8_E4M3 : MK_ST_BF16, 2, (uint64_t[]){2 * 448, 128}, 1, MK_ST_F32);
        ckpt c = open_written(w);
        mk_err e = {0};
        mk_mat k = uk("kv_b.weight", 2, 192, 256, 128, MK_W_FP8), v = uv("kv_b.weight", 2, 192, 256, 128, MK_W_FP8);
        uint8_t *dst = malloc((size_t)k.n * k.k * 2);
        float scales[64];
        if (fp8) {
            assert_int_equal(fetch(c.ck, &k, 0, k.n, dst, scales, &e), MK_E_MODEL);
            assert_non_null(strstr(e.msg, "tensor kv_b.weight: its FP8 blocks straddle the heads, pass --weights bf16"));
            assert_int_equal(fetch(c.ck, &v, 0, v.n, dst, scales, &e), MK_E_MODEL);
            k.scale_k = 64;
            check_matrix(c.ck, &k, 1);
            /* uv by the tensor's own blocks, head by head: 61 rows at a time */
            v.tensor_rows = 1;
            assert_int_equal(fetch(c.ck, &v, 0, v.n, dst, scales, &e), MK_E_MODEL);
            for (uint32_t r = 0, rows; r < v.n; r += rows) {
                rows = 256 - r % 256 < 61 ? 256 - r % 256 : 61;
                uint32_t row = r / 256 * 448 + 192 + r % 256, nseg = (row % 128 + rows + 127) / 128;
                assert_int_equal(mk_mat_scale_row(&v, r), row);
                assert_int_equal(mk_mat_fetch(c.ck, &v, 0, r, rows, dst, scales, &e), MK_OK);
                for (uint32_t i = 0; i < rows; i++)
                    for (uint32_t j = 0; j < v.k; j++)
                        assert_true(fp8_value(dst[i * v.k + j]) * (double)scales[j / 128 * nseg + (row % 128 + i) / 128] == of_matrix(c.ck, &v, r + i, j));
            }
            v.tensor_rows = 0;
            k.wtype = v.wtype = MK_W_BF16;
        }
        check_matrix(c.ck, &k, 0);
        check_matrix(c.ck, &v, 0);
        free(dst);
        drop(&c);
    }
}

static void blocks_of_zeros_and_extremes(void **s)
{
    (void)s;
    float *v = calloc(256 * 256, sizeof *v);
    for (int i = 0; i < 128; i++) {
        v[i * 256 + 200] = 0x1p-133f * (float)i; /* subnormal: amax / 448 would vanish */
        v[(i + 128) * 256 + 5] = 3e38f;
    }
    mk_stw *w = mk_stw_new();
    mk_stw_f32(w, "w.weight", MK_ST_F32, 2, (uint64_t[]){256, 256}, v);
    ckpt c = open_written(w);
    mk_err e = {0};
    mk_mat m = plain("w.weight", 256, 256, MK_W_FP8);
    uint8_t *dst = malloc(256 * 256);
    float scales[4];
    assert_int_equal(fetch(c.ck, &m, 0, 256, dst, scales, &e), MK_OK);
    assert_true(scales[0] == 1 && scales[2] > 0 && scales[1] > 0);
    assert_int_equal(dst[130 * 256 + 5], 0x7e);
    for (size_t i = 0; i < 256 * 256; i++) assert_true((dst[i] & 0x7f) != 0x7f);
    free(dst);
    free(v);
    drop(&c);
}

/* ---- refusals ------------------------------------------------------------------------------------------------------- */

static void expect_refusal(const mk_checkpoint *ck, const mk_mat *m, const char *what)
{
    mk_err e = {0};
    uint16_t *dst = malloc((size_t)m->n * m->k * 2);
    float scales[256];
    int rc = fetch(ck, m, 0, m->n, dst, scales, &e);
    if (rc != MK_E_MODEL || !strstr(e.msg, what)) fail_msg("expected \"%s\", got %d \"%s\"", what, rc, e.msg);
    free(dst);
}

static void not_finite(void **s)
{
    (void)s;
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int d = 0; d < 4; d++)
        for (int b = 0; b < 3; b++) {
            enum mk_st_dtype dtype = (enum mk_st_dtype)d;
            float *v = malloc(512 * 128 * sizeof *v), one[4] = {1, 1, 1, 1};
            for (int i = 0; i < 512 * 128; i++) v[i] = 0.5f;
            v[(256 + 130) * 128 + 77] = bad[b]; /* head 1: row 130 of its 256 is v's row 2 */
            v[(256 + 9) * 128 + 78] = bad[b];   /* k's column 9 of latent row 78 */
            mk_stw *w = mk_stw_new();
            if (dtype == MK_ST_F8_E4M3) {
                uint8_t *q = malloc(512 * 128);
                for (int i = 0; i < 512 * 128; i++) q[i] = v[i] > 0 && v[i] < 1 ? 0x30 : b ? 0xff : 0x7f;
                mk_stw_raw(w, "kv_b.weight", dtype, 2, (uint64_t[]){512, 128}, q);
                mk_stw_f32(w, "kv_b.weight_scale_inv", MK_ST_F32, 2, (uint64_t[]){4, 1}, one);
                free(q);
            } else {
                mk_stw_f32(w, "kv_b.weight", dtype, 2, (uint64_t[]){512, 128}, v);
            }
            ckpt c = open_written(w);
            for (int t = 0; t < 2; t++) {
                uint8_t wtype = t ? MK_W_FP8 : MK_W_BF16;
                mk_mat m = plain("kv_b.weight", 512, 128, wtype), uk_ = uk("kv_b.weight", 2, 128, 128, 128, wtype),
                       uv_ = uv("kv_b.weight", 2, 128, 128, 128, wtype), f = folded("kv_b.weight", 128, 128, &uk_, wtype);
                expect_refusal(c.ck, &f, "tensor kv_b.weight, row 265, column 78: the weight is not finite");
                expect_refusal(c.ck, &m, "tensor kv_b.weight, row 265, column 78: the weight is not finite");
                expect_refusal(c.ck, &uk_, "tensor kv_b.weight, row 265, column 78: the weight is not finite");
                expect_refusal(c.ck, &uv_, "tensor kv_b.weight, row 386, column 77: the weight is not finite");
            }
            drop(&c);
            free(v);
        }
}

static void bad_scales(void **s)
{
    (void)s;
    static const float bad[] = {0, -1, NAN, INFINITY, 3e38f};
    for (int i = 0; i < 6; i++) {
        uint8_t e8[4] = {127, 127, 255, 127};
        float v[4] = {1, 1, i < 5 ? bad[i] : 1, 1};
        mk_stw *w = mk_stw_new();
        mk_stw_raw(w, "w.weight", MK_ST_F8_E4M3, 2, (uint64_t[]){200, 200}, NULL);
        if (i < 5)
            mk_stw_f32(w, "w.weight_scale_inv", MK_ST_F32, 2, (uint64_t[]){2, 2}, v);
        else
            mk_stw_raw(w, "w.weight_scale_inv", MK_ST_F8_E8M0, 2, (uint64_t[]){2, 2}, e8);
        ckpt c = open_written(w);
        mk_mat m = plain("w.weight", 200, 200, MK_W_FP8);
        expect_refusal(c.ck, &m, "tensor w.weight_scale_inv, row 1, column 0: scale ");
        m.wtype = MK_W_BF16;
        expect_refusal(c.ck, &m, "tensor w.weight_scale_inv, row 1, column 0: scale ");
        drop(&c);
    }
    static const struct {
        enum mk_st_dtype dtype;
        uint64_t shape[2];
        const char *what;
    } shapes[] = {
        {MK_ST_F32, {1, 2}, "expected shape [2, 2]"},
        {MK_ST_F32, {0, 0}, "expected shape [2, 2]"},
        {MK_ST_F16, {2, 2}, "unsupported dtype of scales"},
        {MK_ST_I32, {2, 2}, "unsupported dtype of scales"},
        {MK_ST_U8, {2, 2}, "unsupported dtype of scales"},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        mk_stw *w = mk_stw_new();
        mk_stw_raw(w, "w.weight", MK_ST_F8_E4M3, 2, (uint64_t[]){200, 200}, NULL);
        mk_stw_raw(w, "w.weight_scale_inv", shapes[i].dtype, 2, shapes[i].shape, NULL);
        ckpt c = open_written(w);
        mk_mat m = plain("w.weight", 200, 200, MK_W_FP8);
        expect_refusal(c.ck, &m, shapes[i].what);
        drop(&c);
    }
    mk_stw *w = mk_stw_new();
    mk_stw_raw(w, "w.weight", MK_ST_F8_E4M3, 2, (uint64_t[]){200, 200}, NULL);
    ckpt c = open_written(w);
    mk_mat m = plain("w.weight", 200, 200, MK_W_FP8);
    expect_refusal(c.ck, &m, "its scales w.weight_scale_inv are missing");
    drop(&c);
}

static void exactness(void **s)
{
    (void)s;
    for (int d = 0; d < 2; d++) {
        float v[32];
        for (int i = 0; i < 32; i++) v[i] = (float)i * 0.125f - 2;
        mk_stw *w = mk_stw_new();
        mk_stw_f32(w, "good.weight", d ? MK_ST_F16 : MK_ST_F32, 2, (uint64_t[]){2, 16}, v);
        v[21] = 1 + 0x1p-9f;
        mk_stw_f32(w, "bad.weight", d ? MK_ST_F16 : MK_ST_F32, 2, (uint64_t[]){2, 16}, v);
        ckpt c = open_written(w);
        mk_mat good = plain("good.weight", 2, 16, MK_W_BF16), bad = plain("bad.weight", 2, 16, MK_W_BF16);
        good.exact = bad.exact = 1;
        check_matrix(c.ck, &good, 0);
        expect_refusal(c.ck, &bad, "tensor bad.weight, row 1, column 5: 1.00195312 is not exact in BF16: pass --weights bf16");
        bad.exact = 0;
        check_matrix(c.ck, &bad, 0);
        bad.wtype = MK_W_FP8;
        check_matrix(c.ck, &bad, 0);
        drop(&c);
    }
    float big = 3.4e38f;
    mk_stw *w = mk_stw_new();
    mk_stw_f32(w, "big.weight", MK_ST_F32, 2, (uint64_t[]){1, 1}, &big);
    ckpt c = open_written(w);
    mk_mat m = plain("big.weight", 1, 1, MK_W_BF16);
    expect_refusal(c.ck, &m, "row 0, column 0: the weight is too large for BF16");
    drop(&c);
}

static void wrong_matrix(void **s)
{
    (void)s;
    mk_stw *w = mk_stw_new();
    mk_stw_random(w, "w.weight", MK_ST_BF16, 2, (uint64_t[]){64, 32}, 1, MK_ST_F32);
    mk_stw_raw(w, "i.weight", MK_ST_I32, 2, (uint64_t[]){64, 32}, NULL);
    mk_stw_raw(w, "v.weight", MK_ST_BF16, 1, (uint64_t[]){64}, NULL);
    ckpt c = open_written(w);
    mk_mat m = plain("w.weight", 64, 33, MK_W_BF16);
    expect_refusal(c.ck, &m, "its shape does not fit the matrix");
    m = plain("i.weight", 64, 32, MK_W_BF16);
    expect_refusal(c.ck, &m, "unsupported dtype");
    m = plain("v.weight", 64, 1, MK_W_BF16);
    expect_refusal(c.ck, &m, "its shape does not fit the matrix");
    m = plain("x.%u.weight", 64, 32, MK_W_BF16);
    expect_refusal(c.ck, &m, "tensor x.0.weight is missing");
    m = uk("w.weight", 2, 16, 16, 33, MK_W_BF16);
    expect_refusal(c.ck, &m, "its shape does not fit the matrix");
    m = uv("w.weight", 3, 16, 16, 32, MK_W_BF16);
    expect_refusal(c.ck, &m, "its shape does not fit the matrix");
    m = plain("w.weight", 64, 32, MK_W_BF16);
    uint16_t dst[64];
    mk_err e = {0};
    assert_int_equal(mk_mat_fetch(c.ck, &m, 0, 63, 2, dst, NULL, &e), MK_E_BUG);
    assert_int_equal(mk_mat_fetch(c.ck, &m, 0, 4000000000u, 2, dst, NULL, &e), MK_E_BUG);
    assert_int_equal(mk_mat_fetch(c.ck, &m, 0, 64, 0, dst, NULL, &e), MK_OK);
    drop(&c);
}

static void parameters(void **s)
{
    (void)s;
    float v[4] = {1, 2, 3, -4}, out[4], bad[4] = {1, 2, NAN, 4};
    mk_stw *w = mk_stw_new();
    mk_stw_f32(w, "f32", MK_ST_F32, 1, (uint64_t[]){4}, v);
    mk_stw_f32(w, "f16", MK_ST_F16, 4, (uint64_t[]){1, 1, 4, 1}, v);
    mk_stw_f32(w, "bf16", MK_ST_BF16, 1, (uint64_t[]){4}, v);
    mk_stw_f32(w, "nan", MK_ST_BF16, 1, (uint64_t[]){4}, bad);
    mk_stw_raw(w, "u8", MK_ST_U8, 1, (uint64_t[]){4}, NULL);
    ckpt c = open_written(w);
    mk_err e = {0};
    static const char *const names[] = {"f32", "f16", "bf16"};
    for (int i = 0; i < 3; i++) {
        mk_par p = {.n = 4, .add = 1};
        strcpy(p.tensor, names[i]);
        assert_int_equal(mk_par_fetch(c.ck, &p, out, &e), MK_OK);
        for (int j = 0; j < 4; j++) assert_true(out[j] == v[j] + 1);
    }
    assert_int_equal(mk_par_fetch(c.ck, &(mk_par){.tensor = "nan", .n = 4}, out, &e), MK_E_MODEL);
    assert_non_null(strstr(e.msg, "tensor nan: value 2 is not finite"));
    assert_int_equal(mk_par_fetch(c.ck, &(mk_par){.tensor = "f32", .n = 3}, out, &e), MK_E_MODEL);
    assert_non_null(strstr(e.msg, "tensor f32 has 4 values, expected 3"));
    assert_int_equal(mk_par_fetch(c.ck, &(mk_par){.tensor = "u8", .n = 4}, out, &e), MK_E_MODEL);
    assert_int_equal(mk_par_fetch(c.ck, &(mk_par){.tensor = "none", .n = 4}, out, &e), MK_E_MODEL);
    drop(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fp8_every_code), cmocka_unit_test(fp8_rounding),     cmocka_unit_test(other_formats),
        cmocka_unit_test(every_dtype),    cmocka_unit_test(straddling_heads), cmocka_unit_test(blocks_of_zeros_and_extremes),
        cmocka_unit_test(not_finite),     cmocka_unit_test(bad_scales),       cmocka_unit_test(exactness),
        cmocka_unit_test(wrong_matrix),   cmocka_unit_test(parameters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
