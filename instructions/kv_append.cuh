/* KV_APPEND on the device: the warps share the rows. Semantics: kv_append.c. */
#ifndef MK_KV_APPEND_CUH
#define MK_KV_APPEND_CUH

#include "instructions/attention.cuh"
#include "instructions/mk_math.h"

/* A pair turned by an angle, of which these are sine and cosine (rotary.h). */
MK_DEV float2 mk_rotated(float a, float b, float2 angle)
{
    return make_float2(mk_add(mk_mul(a, angle.y), -mk_mul(b, angle.x)), mk_add(mk_mul(a, angle.x), mk_mul(b, angle.y)));
}
/* By the angle pos * inv_freq. */
MK_DEV void mk_rotate_pair(float *a, float *b, float inv_freq, uint32_t pos)
{
    float2 angle;
    mk_sincosf(mk_mul((float)pos, inv_freq), &angle.x, &angle.y);
    const float2 y = mk_rotated(*a, *b, angle);
    *a = y.x, *b = y.y;
}

/* Warps for each of up to MK_MAX_ROWS rows: a power of two. */
MK_DEV uint32_t mk_warps_a_row(uint32_t nrows)
{
    return nrows <= 1 ? MK_WARPS : nrows <= 2 ? MK_WARPS / 2 : nrows <= 4 ? MK_WARPS / 4 : MK_WARPS / 8;
}

/* Parameters on their way into shared memory while the values are waited for; mk_param_there, then a barrier. They lie at any float. */
MK_DEV void mk_param_ask(float *to, const float *from, uint32_t n)
{
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < n; i += MK_COMPUTE) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(mk_smem(to + i)), "l"(from + i) : "memory");
}
MK_DEV void mk_param_there(void)
{
    mk_fetched();
}

/* Of a latent in shared memory, by every warp that needs it. */
MK_DEV float mk_latent_rstd(const float *x, uint32_t latent, float eps, uint32_t lane)
{
    constexpr uint32_t PAIRS = 10; /* a lane's, of a row of up to 640 values */
    float sum = 0;
#pragma unroll
    for (uint32_t k = 0; k < PAIRS; k++) {
        const float2 v = lane + 32 * k < latent / 2 ? ((const float2 *)x)[lane + 32 * k] : make_float2(0, 0);
        sum = __fmaf_rn(v.y, v.y, __fmaf_rn(v.x, v.x, sum));
    }
    return mk_rsqrtf(mk_div(mk_warp_sum(sum), (float)latent) + eps);
}

/* Values [128 group, + 128) of a latent as codes and their scale, by a warp: four a lane. row: of the cache; store: or not. */
MK_DEV void mk_latent_put(uint8_t *row, const float *x, const float *gamma, uint32_t latent, float rstd, uint32_t group, uint32_t lane, bool store)
{
    const uint32_t c = group * MK_LATENT_GROUP + 4 * lane;
    float y[4];
    uint32_t top = 0, codes = 0;
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) {
        y[k] = c + k < latent ? __fmul_rn(__fmul_rn(x[c + k], rstd), gamma[c + k]) : 0;
        top = max(top, __float_as_uint(y[k]) & 0x7fffffffu);
    }
    const uint32_t scale = mk_latent_scale(__reduce_max_sync(0xffffffffu, top));
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) codes |= (uint32_t)mk_latent_code(y[k], scale) << 8 * k;
    if (store && c < latent) *(uint32_t *)(row + c) = codes;
    if (store && lane == 0) *(uint32_t *)(row + latent + 4 * group) = scale;
}

/* In a step of one row it goes through once with whatever lies in shared memory, and nothing stored, before the values are waited for: one worker in all runs this code, a layer's partials wait for it, and
 * code that nobody has run lately comes slower than the values do. nvcc leaves out of that turn what only stores need (BF16's loop, the rotation): what is there then is the rest. */
MK_CALL void mk_kv_append_run(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_mla *m = &d->in->mla;
    const uint32_t latent = m->latent, n = latent + m->rope, warps = mk_warps_a_row(d->step->nrows), r = d->warp / warps, k0 = d->warp % warps, lane = d->lane;
    const mk_row *row = &d->step->row[r];
    float *x = (float *)d->sh->staging + r * n, *gamma = (float *)d->sh->staging + MK_MAX_ROWS * n;
    uint32_t *dst = 0;
    mk_staged_drop(d);
    mk_param_ask(gamma, d->a->param + m->param_off, latent + (m->rotary ? m->rope / 2 : 0));
    if (r < d->step->nrows) dst = (uint32_t *)mk_kv_at(d, m->kv_off, row->slot, row->pos, mk_latent_row_bytes(latent, m->rope, m->cache, 2));
#pragma unroll 1
    for (bool there = d->step->nrows > 1;; there = true) {
        if (there && dst) mk_read_together(d, 0, r, m->in_off, n, x, k0 * 32 + lane, warps * 32);
        mk_param_there();
        mk_sync();
        if (there) mk_trace_input(d);
        if (dst) { /* every warp of the row has the whole sum */
            const float rstd = mk_latent_rstd(x, latent, m->eps, lane);
            uint32_t *key = dst + mk_latent_key_at(latent, m->cache, 2) / 4;
            if (m->cache == MK_CACHE_FP8) {
#pragma unroll 1
                for (uint32_t g = k0; g * MK_LATENT_GROUP < latent; g += warps) mk_latent_put((uint8_t *)dst, x, gamma, latent, rstd, g, lane, there);
            } else {
#pragma unroll 1
                for (uint32_t i = k0 * 32 + lane; i < latent / 2; i += warps * 32) {
                    const float2 v = ((const float2 *)x)[i];
                    const uint32_t y = mk_bf16_pair(__fmul_rn(__fmul_rn(v.x, rstd), gamma[2 * i]), __fmul_rn(__fmul_rn(v.y, rstd), gamma[2 * i + 1]));
                    if (there) dst[i] = y;
                }
            }
#pragma unroll 1
            for (uint32_t i = k0 == warps - 1 ? lane : m->rope / 2; i < m->rope / 2; i += 32) {
                float a = x[latent + 2 * i], b = x[latent + 2 * i + 1];
                if (m->rotary) mk_rotate_pair(&a, &b, gamma[latent + i], row->pos);
                if (there) key[i] = mk_bf16_pair(a, b);
            }
        }
        if (there) break;
        mk_sync(); /* before the values come */
    }
    mk_bulk_signal(d, d->in->signal_vec);
}

#endif
