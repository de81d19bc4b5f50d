/* Number formats of checkpoints, and what host/quant.c needs from host/checkpoint.c. Internal to the loader. */
#ifndef MK_QUANT_H
#define MK_QUANT_H

#include <stdatomic.h>
#include <string.h>

#include "host/checkpoint.h"

static inline float mk_bits_f32(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline uint32_t mk_f32_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
/* cond ? a : b. Written with masks because a compiler moves the floating-point sums behind a and b into branches otherwise (they might
 * trap), and the loop stays scalar. */
static inline uint32_t mk_select(int cond, uint32_t a, uint32_t b)
{
    uint32_t m = (uint32_t)-cond;
    return (a & m) | (b & ~m);
}
static inline float mk_bf16_to_f32(uint16_t v)
{
    return mk_bits_f32((uint32_t)v << 16);
}
/* Nearest even; what is too large becomes infinite (callers refuse it). NaN is not kept quiet: callers have refused it before. */
static inline uint16_t mk_f32_to_bf16(float f)
{
    uint32_t u = mk_f32_bits(f);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
/* IEEE binary16: exact. Without branches, so that loops over it vectorise. */
static inline float mk_f16_to_f32(uint16_t h)
{
    uint32_t em = (uint32_t)(h & 0x7fffu) << 13;
    uint32_t sub = mk_f32_bits(mk_bits_f32(em + (113u << 23)) - mk_bits_f32(113u << 23)); /* exponent 0: zero or subnormal */
    uint32_t norm = em + ((int32_t)em >= (0x1f << 23) ? 224u << 23 : 112u << 23);                 /* exponent 31: infinite or NaN */
    return mk_bits_f32(mk_select((int32_t)em < (1 << 23), sub, norm) | (uint32_t)(h & 0x8000u) << 16);
}
/* UE8M0: 2^(b-127); 255 is NaN. */
static inline float mk_e8m0_to_f32(uint8_t b)
{
    return mk_bits_f32(b == 0 ? 0x00400000u : b == 255 ? 0x7fc00000u : (uint32_t)b << 23);
}

/* The name with its %u, if it holds one, replaced by the expert. */
void mk_expert_name(char out[MK_NAME + 16], const char *name, uint32_t expert);

/* The block scales of FP8 tensor t, after checking their presence, shape and dtype; NULL: err says what is wrong. */
const mk_tensor *mk_scale_tensor(const mk_checkpoint *ck, const mk_tensor *t, mk_err *err);

/* Where rows [row0, row0 + rows) and columns [cb * scale_k, (cb + 1) * scale_k) of a matrix lie in the 128 x 128 blocks of its tensor of
 * `cols` columns. Returns 0 when they lie in several of them. */
int mk_mat_block(const mk_mat *mat, uint64_t cols, uint64_t row0, uint64_t rows, uint32_t cb, uint32_t *trb, uint32_t *tcb);

/* A table of n words that belongs to tensor t and purpose `key`, zero at first, kept until the checkpoint is closed: quant.c
 * keeps the scales there that it computed, since slices of a few rows would otherwise read each 128-row block many times. Threads may
 * fill it at the same time (every one of them writes the same values). NULL: out of memory. */
_Atomic uint32_t *mk_checkpoint_scratch(const mk_checkpoint *ck, const mk_tensor *t, uint64_t key, size_t n);

#endif
