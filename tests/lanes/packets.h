/* Vectors in packets, as an instruction on the CPU finds and leaves them. Behind the device code that gathers. */
#ifndef MK_LANES_PACKETS_H
#define MK_LANES_PACKETS_H

#include "megakernel/deal.h"

static inline float lanes_bf16(float x)
{
    return __uint_as_float(mk_bf16_bits(x) << 16);
}
/* `slices` of up to `slice` values, behind *end. */
static inline mk_vec lanes_vec(uint32_t dtype, uint32_t slices, uint32_t slice, uint32_t width, uint64_t *end)
{
    mk_vec v = {};
    v.scope = MK_PACKET, v.dtype = (uint8_t)dtype, v.nslice = (uint16_t)slices, v.pubs = 1, v.width = width, v.offset = *end;
    v.slice_packets = (uint16_t)mk_slice_packets(&v, slice), v.reserved = mk_div_by(v.slice_packets).magic;
    *end += 2ull * MK_MAX_ROWS * slices * v.slice_packets * 16;
    return v;
}
/* Value i of a slice that begins at packet `to`; likewise. */
static inline void lanes_put(uint4 *to, uint32_t i, float x, bool f32)
{
    uint32_t *w = &to[i / (f32 ? 3 : 6)].x + (f32 ? i % 3 : i % 6 / 2);
    *w = f32 ? __float_as_uint(x) : (*w & ~(0xffffu << 16 * (i & 1))) | mk_bf16_bits(x) << 16 * (i & 1);
}
static inline float lanes_get(const uint4 *from, uint32_t i, bool f32)
{
    const uint32_t w = (&from[i / (f32 ? 3 : 6)].x)[f32 ? i % 3 : i % 6 / 2];
    return __uint_as_float(f32 ? w : w >> 16 * (i & 1) << 16);
}
/* A row of v, whose slices begin with values `start`: what is no value's is 0. */
static inline void lanes_publish(uint4 *to, const mk_vec *v, const uint32_t *start, const float *value, uint32_t epoch)
{
    memset(to, 0, (size_t)v->nslice * v->slice_packets * sizeof *to);
    for (uint32_t s = 0; s < v->nslice; s++, to += v->slice_packets) {
        for (uint32_t i = start[s]; i < start[s + 1]; i++) lanes_put(to, i - start[s], value[i], v->dtype == MK_F32);
        for (uint32_t p = 0; p < v->slice_packets; p++) to[p].w = epoch;
    }
}

#define LANES_WORDS 65536u /* of mk_gpu_args.map */
/* What the host plans of an input (plans.cuh: plan_of): f32 with an RMS norm, whose gammas `gain` go into `words`, or bf16 as it is; as products of e4m3 (fp8) or bf16 want it. Returns mk_plan.one. */
static inline uint8_t lanes_input_plan(mk_plan *p, const mk_vec *v, const uint32_t *start, uint32_t k, bool f32, bool fp8, const float *gain, uint32_t *words)
{
    const mk_wait w = {0, 0, 0, (uint16_t)v->nslice};
    p->x.k = k, p->x.prologue = f32 ? MK_PRO_RMS : MK_PRO_NONE, p->x.eps = 1e-5f, p->x.form = fp8 ? MK_X_F16 : MK_X_BF16;
    p->f32 = f32, p->packets = v->nslice * v->slice_packets, p->inv_k = 1.0f / (float)k, p->key = 1, p->head_shift = MK_NO_NORM, p->gain = 16;
    const uint8_t one = (uint8_t)mk_deal_plan(v, start, &w, p);
    assert_true(one && p->hands.packets);
    const uint32_t per = f32 ? 3 : 6, lies = f32 ? 4 : 8;
    memset(words, 0, LANES_WORDS * sizeof *words);
    for (uint32_t t = 0; t < v->nslice; t++)
        for (uint32_t i = start[t]; i < start[t + 1]; i++) words[p->gain + (t * v->slice_packets + (i - start[t]) / per) * lies + (i - start[t]) % per] = __float_as_uint(gain[i]);
    return one;
}

#endif
