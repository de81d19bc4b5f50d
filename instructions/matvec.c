#include "instructions/matvec.h"
#include "instructions/vec8.h"

#include <math.h>
#include <string.h>

typedef uint8_t b8 __attribute__((vector_size(8)));

/* e4m3 -> f32, exact. Normal numbers: exponent rebased. Subnormals: 2^-6 (1 + m/8) - 2^-6. NaN codes never reach a tape. */
MK_INLINE mk_f8 decode_fp8(const uint8_t *p)
{
    b8 b;
    memcpy(&b, p, 8);
    mk_u8x v = __builtin_convertvector(b, mk_u8x);
    mk_u8x mag = v & 0x7f, sign = (v & 0x80) << 24;
    mk_u8x normal = (mag << 20) + 0x3c000000u;
    mk_f8 sub = (mk_f8)(normal + 0x00800000u) - 0x1p-6f;
    mk_u8x small = (mk_u8x)(mag < 8);
    return (mk_f8)((((mk_u8x)sub & small) | (normal & ~small)) | sign);
}

/* Index of a row's scale within a column block's scales. */
MK_INLINE uint32_t scale_index(const mk_segment *s, uint32_t row)
{
    uint32_t part = s->rows / s->halves, h = row / part, i = row - h * part;
    return h * s->nseg + (s->phase + i) / mk_scale_rows(s->scale_k);
}

#define TILE 4

/* One tile of up to TILE weight rows against n staged rows. */
MK_INLINE void tile_fp8(const mk_segment *s, const uint8_t *w, const float *scales, uint32_t row, uint32_t tile, const float *const *x,
                     uint32_t n, float *const *y)
{
    uint32_t total = s->nseg * s->halves, shift = mk_scale_shift(s->scale_k), index[TILE];
    size_t stride = (size_t)s->rows * MK_KBLOCK_BYTES, quarter = stride / 4;
    mk_f8 acc[MK_MAX_ROWS][TILE];
    memset(acc, 0, n * sizeof acc[0]);
    for (uint32_t i = 0; i < tile; i++) index[i] = scale_index(s, row + i);
    for (uint32_t kb = s->kb0; kb < s->kb1; kb++) {
        const uint8_t *p = w + kb * stride + (size_t)row * MK_QUARTER_BYTES;
        for (uint32_t i = 0; i < tile; i++, p += MK_QUARTER_BYTES) {
            mk_f8 v[8];
            for (int j = 0; j < 8; j++) v[j] = decode_fp8(p + j / 2 * quarter + j % 2 * 8);
            float sc = scales[(kb >> shift) * total + index[i]];
            for (uint32_t r = 0; r < n; r++) {
                const float *xr = x[r] + kb * 64;
                mk_f8 t = v[0] * mk_load8(xr);
                for (int j = 1; j < 8; j++) t += v[j] * mk_load8(xr + 8 * j);
                acc[r][i] += t * sc;
            }
        }
    }
    for (uint32_t r = 0; r < n; r++)
        for (uint32_t i = 0; i < tile; i++) y[r][row + i] = mk_lanes(acc[r][i]);
}

MK_INLINE void tile_bf16(const mk_segment *s, const uint8_t *w, uint32_t row, uint32_t tile, const float *const *x, uint32_t n,
                      float *const *y)
{
    size_t stride = (size_t)s->rows * MK_KBLOCK_BYTES, quarter = stride / 4;
    mk_f8 acc[MK_MAX_ROWS][TILE];
    memset(acc, 0, n * sizeof acc[0]);
    for (uint32_t kb = s->kb0; kb < s->kb1; kb++) {
        const uint8_t *p = w + kb * stride + (size_t)row * MK_QUARTER_BYTES;
        for (uint32_t i = 0; i < tile; i++, p += MK_QUARTER_BYTES) {
            mk_f8 v[4];
            for (int j = 0; j < 4; j++) v[j] = mk_load8_bf16((const uint16_t *)(p + j * quarter));
            for (uint32_t r = 0; r < n; r++) {
                const float *xr = x[r] + kb * 32;
                mk_f8 t = v[0] * mk_load8(xr);
                for (int j = 1; j < 4; j++) t += v[j] * mk_load8(xr + 8 * j);
                acc[r][i] += t;
            }
        }
    }
    for (uint32_t r = 0; r < n; r++)
        for (uint32_t i = 0; i < tile; i++) y[r][row + i] = mk_lanes(acc[r][i]);
}

MK_CLONES static void matvec1(const mk_segment *s, const uint8_t *w, const float *scales, const float *const *x, float *const *y)
{
    uint32_t row = 0;
    if (s->wtype == MK_W_FP8) {
        for (; row + TILE <= s->rows; row += TILE) tile_fp8(s, w, scales, row, TILE, x, 1, y);
        if (row < s->rows) tile_fp8(s, w, scales, row, s->rows - row, x, 1, y);
    } else {
        for (; row + TILE <= s->rows; row += TILE) tile_bf16(s, w, row, TILE, x, 1, y);
        if (row < s->rows) tile_bf16(s, w, row, s->rows - row, x, 1, y);
    }
}

MK_CLONES static void matvec_n(const mk_segment *s, const uint8_t *w, const float *scales, const float *const *x, uint32_t n,
                            float *const *y)
{
    for (uint32_t row = 0; row < s->rows; row += TILE) {
        uint32_t tile = s->rows - row < TILE ? s->rows - row : TILE;
        if (s->wtype == MK_W_FP8)
            tile_fp8(s, w, scales, row, tile, x, n, y);
        else
            tile_bf16(s, w, row, tile, x, n, y);
    }
}

void mk_matvec(const mk_segment *segment, const float *const *x, uint32_t n, float *const *y)
{
    mk_segment all = *segment, *s = &all;
    if (!s->kb1) s->kb1 = (s->k + mk_kblock_values(s->wtype) - 1) / mk_kblock_values(s->wtype);
    const float *scales = (const float *)s->data;
    const uint8_t *w = s->data + mk_segment_scale_bytes(s->wtype, s->k, s->nseg * s->halves, s->scale_k);
    if (n == 1)
        matvec1(s, w, scales, x, y);
    else if (n)
        matvec_n(s, w, scales, x, n, y);
}

MK_CLONES float mk_sum_squares(const float *x, uint32_t n)
{
    return mk_sumsq8(x, n);
}

MK_CLONES static void round_bf16(float *x, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, &x[i], 4);
        uint32_t nan = (u & 0x7fffffffu) > 0x7f800000u;
        u = (nan ? u | 0x400000u : u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
        memcpy(&x[i], &u, 4);
    }
}

/* Sum of the trailers of the slices that hold head [first, first + group). */
static float head_trailers(const mk_ctx *c, uint32_t row, uint32_t first, uint32_t group)
{
    const mk_wait *wt = &c->in->wait[0];
    const mk_vec *v = &c->prog->vec[wt->vec];
    const uint32_t *start = mk_vec_starts(c->prog, v);
    float sum = 0;
    for (uint32_t s = wt->slice0; s < (uint32_t)wt->slice0 + wt->nslice; s++)
        if (start[s] >= first && start[s] < first + group) sum += mk_read_trailer(c, 0, row, s);
    return sum;
}

uint32_t mk_stage_norms(const mk_ctx *c, uint32_t k, uint32_t prologue, uint32_t norm_group)
{
    return prologue == MK_PRO_HEADNORM && !mk_act_f32(c) && norm_group % 64 == 0 ? k / norm_group : 1;
}

void mk_stage(const mk_ctx *c, uint32_t in_off, uint32_t k, uint32_t prologue, uint32_t param_off, float eps, uint32_t norm_group,
              int keep_f32, float *x, float *norm)
{
    uint32_t stride = mk_staged_stride(k), norms = mk_stage_norms(c, k, prologue, norm_group);
    int rounded = !keep_f32 && !mk_act_f32(c);
    for (uint32_t r = 0; r < c->step->nrows; r++, x += stride, norm += norms) {
        mk_read(c, 0, r, in_off, k, x);
        memset(x + k, 0, (stride - k) * sizeof *x);
        for (uint32_t h = 0; h < norms; h++) norm[h] = 1.0f;
        if (prologue == MK_PRO_RMS) {
            const float *gamma = c->mem->param + param_off;
            float rstd = 1.0f / sqrtf(mk_sum_squares(x, k) / (float)k + eps);
            for (uint32_t i = 0; i < k; i++) x[i] = rounded ? x[i] * gamma[i] : x[i] * rstd * gamma[i];
            if (rounded) norm[0] = rstd;
        } else if (prologue == MK_PRO_HEADNORM) {
            for (uint32_t h = 0; h < k; h += norm_group) {
                float rstd = 1.0f / sqrtf(head_trailers(c, r, in_off + h, norm_group) / (float)norm_group + eps);
                if (rounded && norm_group % 64 == 0)
                    norm[h / norm_group] = rstd;
                else
                    for (uint32_t i = h; i < h + norm_group; i++) x[i] *= rstd;
            }
        }
        if (rounded) round_bf16(x, k);
    }
}
