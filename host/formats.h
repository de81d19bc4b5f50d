/* Number formats of checkpoints, and how a matrix lies in its tensor: the words that the packer of the CPU (host/quant.c) and the kernels that
 * pack on a GPU (megakernel/pack.cu) must agree on to the last bit. No floating-point contraction may touch them: there is no sum of products. */
#ifndef MK_FORMATS_H
#define MK_FORMATS_H

#include <string.h>

#include "instructions/isa.h"

MK_BOTH float mk_bits_f32(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}
MK_BOTH uint32_t mk_f32_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
/* cond ? a : b. Written with masks because a compiler moves the floating-point sums behind a and b into branches otherwise (they might
 * trap), and the loop stays scalar. */
MK_BOTH uint32_t mk_select(int cond, uint32_t a, uint32_t b)
{
    uint32_t m = (uint32_t)-cond;
    return (a & m) | (b & ~m);
}
MK_BOTH float mk_widen_bf16(uint16_t v)
{
    return mk_bits_f32((uint32_t)v << 16);
}
/* Nearest even; what is too large becomes infinite (callers refuse it). NaN is not kept quiet: callers have refused it before. */
MK_BOTH uint16_t mk_narrow_bf16(float f)
{
    uint32_t u = mk_f32_bits(f);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
/* IEEE binary16: exact. Without branches, so that loops over it vectorise. */
MK_BOTH float mk_f16_to_f32(uint16_t h)
{
    uint32_t em = (uint32_t)(h & 0x7fffu) << 13;
    uint32_t sub = mk_f32_bits(mk_bits_f32(em + (113u << 23)) - mk_bits_f32(113u << 23)); /* exponent 0: zero or subnormal */
    uint32_t norm = em + ((int32_t)em >= (0x1f << 23) ? 224u << 23 : 112u << 23);                 /* exponent 31: infinite or NaN */
    return mk_bits_f32(mk_select((int32_t)em < (1 << 23), sub, norm) | (uint32_t)(h & 0x8000u) << 16);
}
/* UE8M0: 2^(b-127); 255 is NaN. */
MK_BOTH float mk_e8m0_to_f32(uint8_t b)
{
    return mk_bits_f32(b == 0 ? 0x00400000u : b == 255 ? 0x7fc00000u : (uint32_t)b << 23);
}
/* e4m3fn without its NaN: no branches, so that loops vectorise. */
MK_BOTH float mk_fp8_finite(uint8_t b)
{
    uint32_t em = (uint32_t)(b & 0x7fu) << 20;
    uint32_t sub = mk_f32_bits(mk_bits_f32(em + (121u << 23)) - mk_bits_f32(121u << 23)); /* exponent 0: m/8 * 2^-6 */
    uint32_t norm = em + (120u << 23);
    return mk_bits_f32(mk_select((int32_t)em < (1 << 23), sub, norm) | (uint32_t)(b & 0x80u) << 24);
}
/* |v| <= 448 after saturation; v is no NaN. */
MK_BOTH uint8_t mk_to_fp8_finite(float v)
{
    uint32_t u = mk_f32_bits(v);
    int32_t a = (int32_t)(u & 0x7fffffffu); /* signed: SSE2 has no unsigned comparison */
    a = a > 0x43e00000 ? 0x43e00000 : a;    /* 448 */
    int32_t norm = ((a + 0x7ffff + ((a >> 20) & 1)) >> 20) - (120 << 3);
    /* 2^14 + |v|: the last bit of the sum is worth 2^-9, as that of a subnormal. */
    int32_t sub = (int32_t)mk_f32_bits(mk_bits_f32((uint32_t)a) + 16384.0f) - 0x46800000;
    return (uint8_t)(mk_select(a < 0x3c800000, (uint32_t)sub, (uint32_t)norm) | (u >> 24 & 0x80u)); /* below 2^-6 */
}
/* The scale of an FP8 block whose largest magnitude is amax: 1 for a block of zeros, at least the smallest normal number. */
MK_BOTH float mk_fp8_block_scale(float amax)
{
    float scale = amax > 0 ? amax / 448.0f : 1.0f;
    return scale < 1.17549435e-38f ? 1.17549435e-38f : scale;
}
/* A stored scale that can be used: positive, and scale * 448 is finite. */
MK_BOTH int mk_fp8_scale_good(float scale)
{
    return scale > 0 && scale <= 3.4028235e38f / 448;
}

/* How rows of a matrix map to rows of its tensor. */
enum mk_source {
    MK_SRC_NONE = 0,  /* the matrix does not exist in this model */
    MK_SRC_PLAIN,     /* row i = tensor row i */
    MK_SRC_HEAD_ROWS, /* row h*head_n + i = tensor row h*head_stride + head_off + i */
    MK_SRC_HEAD_T,    /* transposed per head: row h*cols + i, column j = tensor row h*head_stride + head_off + j, column i, where
                         cols = the tensor's columns and head_n = this matrix's k */
    MK_SRC_FOLDED,    /* a product of two tensors: row h*latent + i, column j = sum over n < head_n of W_UK's row h*latent + i, column n (mk_mat.by) and the tensor's row h*head_stride + n,
                         column j, in f32, n ascending, no multiply-add. To whoever packs it, rows of a tensor in f32 (mk_mat_source) */
    MK_SRC_STACKED,   /* tensor [experts, head_stride, k]: row i of expert e = its row head_off + i. mk_model_resolve turns a PLAIN matrix
                         into this where the checkpoint has one tensor for all experts */
};

/* The same as numbers, for whoever has no mk_mat. */
typedef struct mk_rows {
    uint32_t source, scale_k; /* scale_k: mk_mat's */
    uint32_t k, cols; /* columns of the matrix, of the tensor */
    uint32_t head_n, head_off, head_stride;
} mk_rows;

/* Row i of the matrix: row *r of the tensor (STACKED: of the expert) from its first column on; MK_SRC_HEAD_T: column *c from row *r on. */
MK_BOTH void mk_rows_at(const mk_rows *m, uint64_t i, uint64_t *r, uint64_t *c)
{
    *c = 0;
    if (m->source == MK_SRC_STACKED) {
        *r = m->head_off + i;
    } else if (m->source == MK_SRC_HEAD_ROWS) {
        *r = i / m->head_n * m->head_stride + m->head_off + i % m->head_n;
    } else if (m->source == MK_SRC_HEAD_T) {
        *r = i / m->cols * m->head_stride + m->head_off;
        *c = i % m->cols;
    } else {
        *r = i;
    }
}

/* Where rows [row0, row0 + rows) and columns [cb * scale_k, (cb + 1) * scale_k) of a matrix lie in the 128 x 128 blocks of its tensor. Returns 0
 * when they lie in several of them. */
MK_BOTH int mk_rows_block(const mk_rows *m, uint64_t row0, uint64_t rows, uint32_t cb, uint32_t *trb, uint32_t *tcb)
{
    uint64_t k0 = (uint64_t)cb * m->scale_k, k1 = k0 + m->scale_k < m->k ? k0 + m->scale_k : m->k;
    for (uint64_t i = row0; i < row0 + rows; i++) {
        uint64_t r, c, r1, c1;
        mk_rows_at(m, i, &r, &c);
        if (m->source == MK_SRC_HEAD_T) {
            r1 = r + k1 - 1;
            r += k0;
            c1 = c;
        } else {
            r1 = r;
            c = k0;
            c1 = k1 - 1;
        }
        if (i == row0) {
            *trb = (uint32_t)(r / MK_SCALE_ROWS);
            *tcb = (uint32_t)(c / MK_SCALE_ROWS);
        }
        if (r / MK_SCALE_ROWS != *trb || r1 / MK_SCALE_ROWS != *trb || c / MK_SCALE_ROWS != *tcb || c1 / MK_SCALE_ROWS != *tcb) return 0;
    }
    return 1;
}

#endif
