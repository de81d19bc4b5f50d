/* Number formats, and rows of a matrix in the dtype that the tapes hold. */
#include "host/quant.h"

#include <stdio.h>
#include <stdlib.h>

#include "host/checkpoint.h"
#include "host/fold.h"

#define BLOCK 128u

/* ---- formats -------------------------------------------------------------------------------------------------------- */

float mk_fp8_to_f32(uint8_t b)
{
    return (b & 0x7f) == 0x7f ? mk_bits_f32(0x7fc00000u) : mk_fp8_finite(b);
}

uint8_t mk_f32_to_fp8(float v)
{
    return v != v ? 0x7f : mk_to_fp8_finite(v);
}

size_t mk_dtype_bytes(enum mk_st_dtype d)
{
    switch (d) {
    case MK_ST_F32: return 4;
    case MK_ST_F16:
    case MK_ST_BF16: return 2;
    case MK_ST_F8_E4M3:
    case MK_ST_F8_E8M0: return 1;
    default: return 0;
    }
}

/* restrict: bytes may alias anything, and the loops would not vectorise. */
static void encode_fp8(const float *restrict x, float scale, size_t n, uint8_t *restrict q)
{
    for (size_t i = 0; i < n; i++) q[i] = mk_to_fp8_finite(x[i] / scale);
}

static void max_abs(const float *restrict x, size_t n, float *restrict top)
{
    for (size_t i = 0; i < n; i++) {
        float a = mk_bits_f32(mk_f32_bits(x[i]) & 0x7fffffffu);
        top[i] = a > top[i] ? a : top[i];
    }
}

/* n values at any alignment. FP8 NaN comes out finite: callers look for it in the bytes. */
static void to_f32(enum mk_st_dtype d, const unsigned char *restrict p, size_t n, float *restrict x)
{
    uint16_t h;
    switch (d) {
    case MK_ST_F32: memcpy(x, p, n * 4); break;
    case MK_ST_BF16:
        for (size_t i = 0; i < n; i++) {
            memcpy(&h, p + 2 * i, 2);
            x[i] = mk_widen_bf16(h);
        }
        break;
    case MK_ST_F16:
        for (size_t i = 0; i < n; i++) {
            memcpy(&h, p + 2 * i, 2);
            x[i] = mk_f16_to_f32(h);
        }
        break;
    case MK_ST_F8_E4M3:
        for (size_t i = 0; i < n; i++) x[i] = mk_fp8_finite(p[i]);
        break;
    case MK_ST_F8_E8M0:
        for (size_t i = 0; i < n; i++) x[i] = mk_e8m0_to_f32(p[i]);
        break;
    default: break;
    }
}

/* Index of the first infinity or NaN among n values as stored, n if there is none. */
static size_t first_bad(enum mk_st_dtype d, const unsigned char *p, size_t n)
{
    uint32_t any = 0, u32, mask = d == MK_ST_F32 ? 0x7f800000u : d == MK_ST_BF16 ? 0x7f80u : 0x7c00u;
    uint16_t u16;
    if (d == MK_ST_F8_E4M3) {
        for (size_t i = 0; i < n; i++) any |= (p[i] & 0x7f) == 0x7f;
        for (size_t i = 0; any && i < n; i++)
            if ((p[i] & 0x7f) == 0x7f) return i;
    } else if (d == MK_ST_F32) {
        for (size_t i = 0; i < n; i++) {
            memcpy(&u32, p + 4 * i, 4);
            any |= (u32 & mask) == mask;
        }
        for (size_t i = 0; any && i < n; i++) {
            memcpy(&u32, p + 4 * i, 4);
            if ((u32 & mask) == mask) return i;
        }
    } else {
        for (size_t i = 0; i < n; i++) {
            memcpy(&u16, p + 2 * i, 2);
            any |= (u16 & mask) == mask;
        }
        for (size_t i = 0; any && i < n; i++) {
            memcpy(&u16, p + 2 * i, 2);
            if ((u16 & mask) == mask) return i;
        }
    }
    return n;
}

/* ---- names and blocks ----------------------------------------------------------------------------------------------- */

void mk_expert_name(char out[MK_NAME + 16], const char *name, uint32_t expert)
{
    const char *at = strstr(name, "%u");
    if (at)
        snprintf(out, MK_NAME + 16, "%.*s%u%s", (int)(at - name), name, expert, at + 2);
    else
        snprintf(out, MK_NAME + 16, "%s", name);
}

const mk_tensor *mk_scale_tensor(const mk_checkpoint *ck, const mk_tensor *t, mk_err *err)
{
    char name[MK_NAME + 16];
    snprintf(name, sizeof name, "%s_scale_inv", t->name);
    const mk_tensor *s = mk_checkpoint_find(ck, name);
    uint64_t r = (t->shape[0] + BLOCK - 1) / BLOCK, c = (t->shape[1] + BLOCK - 1) / BLOCK;
    if (!s) {
        mk_fail(err, MK_E_MODEL, "%s: tensor %s is F8_E4M3 and its scales %s are missing", t->file, t->name, name);
    } else if (s->ndim != 2 || s->shape[0] != r || s->shape[1] != c) {
        mk_fail(err, MK_E_MODEL, "%s: tensor %s: expected shape [%llu, %llu] (one scale a 128x128 block of [%llu, %llu])", s->file, name,
                (unsigned long long)r, (unsigned long long)c, (unsigned long long)t->shape[0], (unsigned long long)t->shape[1]);
        s = NULL;
    } else if (s->dtype != MK_ST_F32 && s->dtype != MK_ST_BF16 && s->dtype != MK_ST_F8_E8M0) {
        mk_fail(err, MK_E_MODEL, "%s: tensor %s: unsupported dtype of scales, expected F32, BF16 or F8_E8M0", s->file, name);
        s = NULL;
    }
    return s;
}

mk_rows mk_mat_rows(const mk_mat *mat, uint64_t cols)
{
    return (mk_rows){.source = mat->source, .scale_k = mat->scale_k, .k = mat->k, .cols = (uint32_t)cols, .head_n = mat->head_n,
                     .head_off = mat->head_off, .head_stride = mat->head_stride};
}

static void source_row(const mk_mat *mat, uint64_t cols, uint64_t i, uint64_t *r, uint64_t *c)
{
    mk_rows m = mk_mat_rows(mat, cols);
    mk_rows_at(&m, i, r, c);
}

uint32_t mk_mat_scale_row(const mk_mat *mat, uint32_t row)
{
    uint64_t r = row, c;
    if (mat->tensor_rows) source_row(mat, 0, row, &r, &c);
    return (uint32_t)r;
}

int mk_mat_block(const mk_mat *mat, uint64_t cols, uint64_t row0, uint64_t rows, uint32_t cb, uint32_t *trb, uint32_t *tcb)
{
    mk_rows m = mk_mat_rows(mat, cols);
    return mk_rows_block(&m, row0, rows, cb, trb, tcb);
}

/* ---- rows ----------------------------------------------------------------------------------------------------------- */

typedef struct view {
    const mk_mat *mat;
    const mk_tensor *t, *s; /* s: scales of an FP8 tensor */
    const unsigned char *base; /* first value; MK_SRC_STACKED: of the expert */
    uint32_t expert;        /* MK_SRC_STACKED, else 0 */
    uint64_t cols;          /* of the tensor */
    size_t size;            /* bytes a value */
    unsigned char *raw;     /* [k * 4] */
    float *x;               /* [k] */
    mk_err *err;
} view;

static int fail_at(const view *v, uint64_t i, uint64_t j, const char *what)
{
    uint64_t r, c;
    source_row(v->mat, v->cols, i, &r, &c);
    if (v->mat->source == MK_SRC_HEAD_T)
        r += j;
    else
        c = j;
    return mk_fail(v->err, MK_E_MODEL, "%s: tensor %s, row %llu, column %llu: %s", v->t->file, v->t->name, (unsigned long long)r,
                   (unsigned long long)c, what);
}

/* Row i as stored: a pointer into the mapping, or v->raw for a transposed matrix. NULL: a value is not finite. */
static const unsigned char *row_raw(const view *v, uint64_t i)
{
    const unsigned char *p;
    uint64_t r, c;
    size_t k = v->mat->k, size = v->size;
    source_row(v->mat, v->cols, i, &r, &c);
    p = v->base + (r * v->cols + c) * size;
    if (v->mat->source == MK_SRC_HEAD_T) {
        size_t stride = (size_t)v->cols * size;
        if (size == 1)
            for (size_t j = 0; j < k; j++) v->raw[j] = p[j * stride];
        else
            for (size_t j = 0; j < k; j++) memcpy(v->raw + j * size, p + j * stride, size);
        p = v->raw;
    }
    size_t bad = first_bad(v->t->dtype, p, k);
    if (bad == k) return p;
    fail_at(v, i, bad, "the weight is not finite");
    return NULL;
}

static int scale_at(const view *v, uint64_t rb, uint64_t cb, float *scale)
{
    uint64_t i = rb * v->s->shape[1] + cb;
    to_f32(v->s->dtype, (const unsigned char *)v->s->data + i * mk_dtype_bytes(v->s->dtype), 1, scale);
    if (mk_fp8_scale_good(*scale)) return MK_OK;
    return mk_fail(v->err, MK_E_MODEL, "%s: tensor %s, row %llu, column %llu: scale %g, expected a finite positive number", v->s->file, v->s->name,
                   (unsigned long long)rb, (unsigned long long)cb, (double)*scale);
}

/* Row i as f32 in v->x. */
static int row_f32(const view *v, uint64_t i)
{
    const unsigned char *p = row_raw(v, i);
    if (!p) return MK_E_MODEL;
    size_t k = v->mat->k;
    to_f32(v->t->dtype, p, k, v->x);
    if (!v->s) return MK_OK;
    uint64_t r, c;
    source_row(v->mat, v->cols, i, &r, &c);
    for (size_t j = 0; j < k;) { /* up to the next block of the tensor */
        float scale;
        int t = v->mat->source == MK_SRC_HEAD_T;
        uint64_t at = (t ? r : c) + j;
        size_t end = j + (size_t)(BLOCK - at % BLOCK);
        if (end > k) end = k;
        int rc = scale_at(v, (t ? at : r) / BLOCK, (t ? c : at) / BLOCK, &scale);
        if (rc) return rc;
        float *x = v->x;
        for (; j < end; j++) x[j] *= scale;
    }
    return MK_OK;
}

/* ---- the three ways ------------------------------------------------------------------------------------------------- */

static int fetch_bf16(const view *v, uint64_t row0, uint64_t rows, uint16_t *dst)
{
    size_t k = v->mat->k;
    for (uint64_t i = 0; i < rows; i++, dst += k) {
        if (v->t->dtype == MK_ST_BF16) {
            const unsigned char *p = row_raw(v, row0 + i);
            if (!p) return MK_E_MODEL;
            memcpy(dst, p, k * 2);
            continue;
        }
        int rc = row_f32(v, row0 + i);
        if (rc) return rc;
        uint32_t lost = 0, over = 0;
        for (size_t j = 0; j < k; j++) {
            lost |= mk_f32_bits(v->x[j]) & 0xffffu;
            dst[j] = mk_narrow_bf16(v->x[j]);
            over |= (dst[j] & 0x7f80u) == 0x7f80u;
        }
        for (size_t j = 0; v->mat->exact && lost && j < k; j++)
            if (mk_f32_bits(v->x[j]) & 0xffffu) {
                char what[128];
                snprintf(what, sizeof what, "%.9g is not exact in BF16: pass --weights bf16 (rounds) or --weights fp8", (double)v->x[j]);
                return fail_at(v, row0 + i, j, what);
            }
        for (size_t j = 0; over && j < k; j++)
            if ((dst[j] & 0x7f80u) == 0x7f80u) return fail_at(v, row0 + i, j, "the weight is too large for BF16");
    }
    return MK_OK;
}

/* FP8 stays FP8: bytes and scales move, nothing is computed. */
static int fetch_fp8(const view *v, uint64_t row0, uint64_t rows, uint8_t *dst, float *scales)
{
    const mk_mat *mat = v->mat;
    size_t k = mat->k;
    uint32_t phase = mk_mat_scale_row(mat, (uint32_t)row0) % BLOCK, nseg = (uint32_t)((phase + rows - 1) / BLOCK) + 1;
    uint32_t nkb = (mat->k + mat->scale_k - 1) / mat->scale_k;
    for (uint32_t cb = 0; cb < nkb; cb++)
        for (uint32_t seg = 0; seg < nseg; seg++) {
            uint32_t trb, tcb;
            uint64_t first = seg ? (uint64_t)seg * BLOCK - phase : 0, end = (uint64_t)(seg + 1) * BLOCK - phase;
            if (!mk_mat_block(mat, v->cols, row0 + first, (end < rows ? end : rows) - first, cb, &trb, &tcb))
                return mk_fail(v->err, MK_E_MODEL, "%s: tensor %s: its FP8 blocks straddle the heads, pass --weights bf16", v->t->file, v->t->name);
            int rc = scale_at(v, trb, tcb, &scales[(size_t)cb * nseg + seg]);
            if (rc) return rc;
        }
    for (uint64_t i = 0; i < rows; i++) {
        const unsigned char *p = row_raw(v, row0 + i);
        if (!p) return MK_E_MODEL;
        memcpy(dst + i * k, p, k);
    }
    return MK_OK;
}

/* Scales of block row rb, all nkb of them: amax / 448 over the block of the whole matrix, 1 for a block of zeros. Kept in `known`. */
static int block_row_scales(const view *v, uint32_t rb, uint32_t nkb, _Atomic uint32_t *known)
{
    const mk_mat *mat = v->mat;
    size_t k = mat->k, columns = mk_scale_columns(mat->k, mat->scale_k);
    uint64_t rows = mk_scale_rows(mat->scale_k), i0 = rb * rows, i1 = i0 + rows < mat->n ? i0 + rows : mat->n;
    if (atomic_load_explicit(&known[nkb - 1], memory_order_acquire)) return MK_OK; /* stored last */
    float *top = calloc(k, sizeof *top);
    if (!top) return mk_fail(v->err, MK_E_SYSTEM, "out of memory");
    int rc = MK_OK;
    for (uint64_t i = i0; !rc && i < i1; i++)
        if (!(rc = row_f32(v, i))) max_abs(v->x, k, top);
    for (uint32_t cb = 0; !rc && cb < nkb; cb++) {
        size_t j = cb * columns, end = j + columns < k ? j + columns : k;
        float amax = 0;
        for (; j < end; j++) amax = top[j] > amax ? top[j] : amax;
        atomic_store_explicit(&known[cb], mk_f32_bits(mk_fp8_block_scale(amax)), cb + 1 == nkb ? memory_order_release : memory_order_relaxed);
    }
    free(top);
    return rc;
}

static int quantise(const view *v, const mk_checkpoint *ck, uint64_t row0, uint64_t rows, uint8_t *dst, float *scales)
{
    const mk_mat *mat = v->mat;
    size_t k = mat->k, columns = mk_scale_columns(mat->k, mat->scale_k);
    uint32_t in_block = mk_scale_rows(mat->scale_k), nrb = mk_segments(0, mat->n, mat->scale_k), nkb = mk_scale_blocks(mat->k, mat->scale_k);
    uint32_t rb0 = (uint32_t)(row0 / in_block), nseg = (uint32_t)((row0 + rows - 1) / in_block) - rb0 + 1;
    uint64_t key = mat->source | (uint64_t)mat->scale_k << 8 | (uint64_t)v->expert << 16 | (uint64_t)mat->head_off << 32;
    _Atomic uint32_t *known = mk_checkpoint_scratch(ck, v->t, key, (size_t)nrb * nkb);
    if (!known) return mk_fail(v->err, MK_E_SYSTEM, "out of memory");
    for (uint32_t seg = 0; seg < nseg; seg++) {
        _Atomic uint32_t *of_row = known + (size_t)(rb0 + seg) * nkb;
        int rc = block_row_scales(v, rb0 + seg, nkb, of_row);
        if (rc) return rc;
        for (uint32_t cb = 0; cb < nkb; cb++)
            scales[(size_t)cb * nseg + seg] = mk_bits_f32(atomic_load_explicit(&of_row[cb], memory_order_relaxed));
    }
    for (uint64_t i = 0; i < rows; i++, dst += k) {
        int rc = row_f32(v, row0 + i);
        if (rc) return rc;
        uint32_t seg = (uint32_t)((row0 + i) / in_block) - rb0;
        for (uint32_t cb = 0; cb < nkb; cb++) {
            size_t j = cb * columns, end = j + columns < k ? j + columns : k;
            encode_fp8(v->x + j, scales[(size_t)cb * nseg + seg], end - j, dst + j);
        }
    }
    return MK_OK;
}

/* ---- public --------------------------------------------------------------------------------------------------------- */

/* Everything that mk_mat_fetch reads lies inside the tensor. */
static int check_source(const mk_mat *mat, const mk_tensor *t, uint32_t expert, mk_err *err)
{
    uint32_t stacked = mat->source == MK_SRC_STACKED;
    int ok = t->ndim == 2 + stacked && mat->n && mat->k && (mat->scale_k == 128 || mat->scale_k == 64 || (!mat->scale_k && t->dtype != MK_ST_F8_E4M3)), known = mk_dtype_bytes(t->dtype) != 0;
    if (ok && mat->source == MK_SRC_PLAIN) {
        ok = t->shape[0] == mat->n && t->shape[1] == mat->k;
    } else if (ok && stacked) {
        ok = expert < t->shape[0] && t->shape[1] == mat->head_stride && t->shape[2] == mat->k && mat->head_off <= mat->head_stride &&
             mat->n <= mat->head_stride - mat->head_off && t->dtype != MK_ST_F8_E4M3;
    } else if (ok && mat->source == MK_SRC_HEAD_ROWS) {
        ok = t->shape[1] == mat->k && mat->head_n && mat->n % mat->head_n == 0 && mat->head_off <= mat->head_stride &&
             mat->head_n <= mat->head_stride - mat->head_off && t->shape[0] == (uint64_t)mat->n / mat->head_n * mat->head_stride;
    } else if (ok && mat->source == MK_SRC_FOLDED) { /* and W_UK as many heads: mk_fold_make */
        ok = t->shape[1] == mat->k && mat->k % 8 == 0 && mat->by && mat->by->source == MK_SRC_HEAD_T && mat->by->k == mat->head_n && mat->by->n == mat->n && mat->head_n &&
             mat->head_n <= mat->head_stride && t->shape[0] && t->shape[0] % mat->head_stride == 0;
    } else if (ok) {
        ok = mat->source == MK_SRC_HEAD_T && t->shape[1] && mat->n % t->shape[1] == 0 && mat->head_off <= mat->head_stride &&
             mat->k <= mat->head_stride - mat->head_off && t->shape[0] == mat->n / t->shape[1] * mat->head_stride;
    }
    if (ok && known && t->dtype != MK_ST_F8_E8M0) return MK_OK;
    return mk_fail(err, MK_E_MODEL, "%s: tensor %s: %s", t->file, t->name,
                   ok ? "unsupported dtype, expected BF16, F16, F32 or F8_E4M3" : "its shape does not fit the matrix");
}

int mk_mat_source(const mk_checkpoint *ck, const mk_mat *mat, uint32_t expert, const mk_tensor **t, const mk_tensor **scales, mk_err *err)
{
    char name[MK_NAME + 16];
    mk_expert_name(name, mat->tensor, expert);
    *scales = NULL;
    if (!(*t = mk_checkpoint_find(ck, name))) return mk_fail(err, MK_E_MODEL, "tensor %s is missing", name);
    int rc = check_source(mat, *t, expert, err);
    if (!rc && (*t)->dtype == MK_ST_F8_E4M3 && !(*scales = mk_scale_tensor(ck, *t, err))) rc = err ? err->code : MK_E_MODEL;
    if (rc || mat->source != MK_SRC_FOLDED) return rc;
    const mk_fold f = {ck, mat, *t, *scales};
    *scales = NULL;
    *t = mk_checkpoint_made(ck, *t, mat->n, mat->k, mk_fold_make, &f, err);
    return *t ? MK_OK : err ? err->code : MK_E_MODEL;
}

int mk_tensor_rows_f32(const mk_tensor *t, const mk_tensor *scales, uint64_t row0, uint32_t rows, float *dst, mk_err *err)
{
    const mk_mat whole = {.source = MK_SRC_PLAIN, .n = (uint32_t)t->shape[0], .k = (uint32_t)t->shape[1], .scale_k = BLOCK};
    view v = {.mat = &whole, .t = t, .s = scales, .base = t->data, .cols = whole.k, .size = mk_dtype_bytes(t->dtype), .err = err};
    int rc = MK_OK;
    for (uint32_t i = 0; !rc && i < rows; i++) {
        v.x = dst + (size_t)i * whole.k;
        rc = row_f32(&v, row0 + i);
    }
    return rc;
}

int mk_mat_fetch(const mk_checkpoint *ck, const mk_mat *mat, uint32_t expert, uint32_t row0, uint32_t rows, void *dst, float *scales,
                 mk_err *err)
{
    const mk_tensor *t, *s;
    int rc = mk_mat_source(ck, mat, expert, &t, &s, err);
    if (rc) return rc;
    if (row0 > mat->n || rows > mat->n - row0)
        return mk_fail(err, MK_E_BUG, "tensor %s: rows [%u, %u + %u) of %u asked for", t->name, row0, row0, rows, mat->n);
    if (!rows) return MK_OK;
    view v = {.mat = mat, .t = t, .s = s, .base = t->data, .cols = t->shape[t->ndim - 1], .size = mk_dtype_bytes(t->dtype), .err = err};
    if (mat->source == MK_SRC_STACKED) {
        v.expert = expert;
        v.base += (uint64_t)expert * t->shape[1] * v.cols * v.size;
    }
    if (!(v.raw = malloc((size_t)mat->k * 8))) return mk_fail(err, MK_E_SYSTEM, "out of memory");
    v.x = (float *)(void *)(v.raw + (size_t)mat->k * 4);
    if (mat->wtype == MK_W_BF16)
        rc = fetch_bf16(&v, row0, rows, dst);
    else if (mat->wtype != MK_W_FP8)
        rc = mk_fail(err, MK_E_BUG, "tensor %s: weight type %u", t->name, mat->wtype);
    else if (v.s)
        rc = fetch_fp8(&v, row0, rows, dst, scales);
    else
        rc = quantise(&v, ck, row0, rows, dst, scales);
    free(v.raw);
    return rc;
}

int mk_par_fetch(const mk_checkpoint *ck, const mk_par *par, float *dst, mk_err *err)
{
    const mk_tensor *t = mk_checkpoint_find(ck, par->tensor);
    if (!t) return mk_fail(err, MK_E_MODEL, "tensor %s is missing", par->tensor);
    if (t->dtype != MK_ST_F32 && t->dtype != MK_ST_F16 && t->dtype != MK_ST_BF16)
        return mk_fail(err, MK_E_MODEL, "%s: tensor %s: unsupported dtype, expected BF16, F16 or F32", t->file, t->name);
    size_t size = mk_dtype_bytes(t->dtype);
    if (t->bytes != (uint64_t)par->n * size)
        return mk_fail(err, MK_E_MODEL, "%s: tensor %s has %llu values, expected %u", t->file, t->name, (unsigned long long)(t->bytes / size),
                       par->n);
    size_t bad = first_bad(t->dtype, t->data, par->n);
    if (bad < par->n) return mk_fail(err, MK_E_MODEL, "%s: tensor %s: value %zu is not finite", t->file, t->name, bad);
    to_f32(t->dtype, t->data, par->n, dst);
    for (uint32_t i = 0; i < par->n; i++) dst[i] += par->add;
    return MK_OK;
}
