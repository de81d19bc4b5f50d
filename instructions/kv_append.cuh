/* KV_APPEND on the device: the warps share the rows while they read; then one of a row's warps has the whole row. Semantics: kv_append.c. */
#ifndef MK_KV_APPEND_CUH
#define MK_KV_APPEND_CUH

#include "instructions/attention.cuh"
#include "instructions/mk_math.h"

/* Pair i of x turned by the angle pos * inv_freq[i] (rotary.h). */
MK_DEV void mk_rotate_pair(float *a, float *b, float inv_freq, uint32_t pos)
{
    float s, c, x = *a, y = *b;
    mk_sincosf(mk_mul((float)pos, inv_freq), &s, &c);
    *a = mk_add(mk_mul(x, c), -mk_mul(y, s));
    *b = mk_add(mk_mul(x, s), mk_mul(y, c));
}

/* Warps for each of up to MK_MAX_ROWS rows: a power of two. */
MK_DEV uint32_t mk_warps_a_row(uint32_t nrows)
{
    return nrows <= 1 ? MK_WARPS : nrows <= 2 ? MK_WARPS / 2 : nrows <= 4 ? MK_WARPS / 4 : MK_WARPS / 8;
}

MK_CALL void mk_kv_append_run(const mk_insn *in)
{
    constexpr uint32_t PAIRS = 10; /* a lane's, of a row of up to 640 values */
    const mk_dev here = mk_here(in), *d = &here;
    const mk_mla *m = &d->in->mla;
    const uint32_t latent = m->latent, n = latent + m->rope, warps = mk_warps_a_row(d->step->nrows), r = d->warp / warps, k0 = d->warp % warps, lane = d->lane;
    const mk_row *row = &d->step->row[r];
    float *x = (float *)d->sh->staging + r * n;
    const bool mine = r < d->step->nrows && k0 == 0;
    float2 gamma[PAIRS];
    float freq = 0;
    uint32_t *dst = 0;
    mk_staged_drop(d);
    if (mine) { /* asked for before the values are there */
        const float2 *param = (const float2 *)(d->a->param + m->param_off);
#pragma unroll
        for (uint32_t k = 0; k < PAIRS; k++)
            if (lane + 32 * k < latent / 2) gamma[k] = make_float2(__ldg((const float *)(param + lane + 32 * k)), __ldg((const float *)(param + lane + 32 * k) + 1));
        if (m->rotary && lane < m->rope / 2) freq = __ldg((const float *)param + latent + lane);
        dst = (uint32_t *)mk_kv_at(d, m->kv_off, row->slot, row->pos, n * 2);
    }
    if (r < d->step->nrows) mk_read_together(&d->in->wait[0], r, m->in_off, n, x, k0 * 32 + lane, warps * 32);
    mk_sync();
    mk_trace_input(d);
    if (mine) {
        float2 v[PAIRS];
        float sum = 0;
#pragma unroll
        for (uint32_t k = 0; k < PAIRS; k++) {
            v[k] = make_float2(0, 0);
            if (lane + 32 * k < latent / 2) v[k] = ((const float2 *)x)[lane + 32 * k];
            sum = __fmaf_rn(v[k].y, v[k].y, __fmaf_rn(v[k].x, v[k].x, sum));
        }
        const float rstd = mk_rsqrtf(mk_warp_sum(sum) / (float)latent + m->eps);
#pragma unroll
        for (uint32_t k = 0; k < PAIRS; k++)
            if (lane + 32 * k < latent / 2)
                dst[lane + 32 * k] = mk_pack_bf16(__fmul_rn(__fmul_rn(v[k].x, rstd), gamma[k].x), __fmul_rn(__fmul_rn(v[k].y, rstd), gamma[k].y));
#pragma unroll 1
        for (uint32_t i = lane; i < m->rope / 2; i += 32) {
            float a = x[latent + 2 * i], b = x[latent + 2 * i + 1];
            if (i >= 32 && m->rotary) freq = __ldg(d->a->param + m->param_off + latent + i);
            if (m->rotary) mk_rotate_pair(&a, &b, freq, row->pos);
            dst[latent / 2 + i] = mk_pack_bf16(a, b);
        }
    }
    mk_bulk_signal(d, d->in->signal_vec);
}

#endif
