/* COMBINE on the device: a warp merges every 16th split, then a thread an output value the 16 warps, ascending. Semantics: combine.c. */
#ifndef MK_COMBINE_CUH
#define MK_COMBINE_CUH

#include "instructions/mk_math.h"
#include "megakernel/device.cuh"

/* e^x for weights: 2^x of the hardware. */
MK_DEV float mk_exp_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(__fmul_rn(x, 1.44269504f)));
    return y;
}

/* What a warp merged: sum w acc, then max and sum w sum. */
typedef struct mk_merged {
    float max[MK_WARPS], sum[MK_WARPS];
} mk_merged;

MK_CALL void mk_combine_run(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    constexpr int BATCH = 3; /* splits of a warp in flight: all of them up to 48 */
    const mk_mla *m = &d->in->mla;
    const mk_vec *out = &d->sh->vec[d->in->signal_vec];
    const uint32_t latent = m->latent, floats = mk_partial_floats(latent), n = m->n, lane = d->lane;
    const size_t stride = (size_t)m->all_heads * floats;
    float *merged = (float *)d->sh->staging; /* [warp][n] */
    mk_merged *x = (mk_merged *)d->sh->red;
    float *g = d->sh->red + sizeof(mk_merged) / 4 + d->warp * 32;
    mk_staged_drop(d);
    mk_bulk_wait(d, &d->in->wait[0]);
#pragma unroll 1
    for (uint32_t r = 0; r < d->step->nrows; r++) {
        const float *part = (const float *)mk_bulk_at(d, d->in->wait[0].vec) + ((size_t)r * MK_MAX_SPLITS * m->all_heads + m->head0) * floats;
        const uint32_t splits = mk_splits(d->step->row[r].pos);
        if (r) mk_sync(); /* the row before is read */
#pragma unroll 1
        for (uint32_t i = 4 * lane; i < n || i == 4 * lane; i += 128) {
            float max = -INFINITY, sum = 0;
            float4 y = make_float4(0, 0, 0, 0);
#pragma unroll 1
            for (uint32_t s0 = d->warp; s0 < splits; s0 += BATCH * MK_WARPS) {
                float2 ms[BATCH];
                float4 v[BATCH];
                float top = max;
#pragma unroll
                for (int k = 0; k < BATCH; k++) {
                    const uint32_t s = s0 + k * MK_WARPS;
                    const float *p = part + s * stride;
                    ms[k] = make_float2(-INFINITY, 0);
                    v[k] = make_float4(0, 0, 0, 0);
                    if (s >= splits) continue;
                    ms[k] = __ldcg((const float2 *)(p + latent));
                    if (i < n) v[k] = __ldcg((const float4 *)(p + m->first + i));
                    top = fmaxf(top, ms[k].x);
                }
                const float shrink = mk_exp_fast(max - top);
                sum = __fmul_rn(sum, shrink);
                y.x = __fmul_rn(y.x, shrink), y.y = __fmul_rn(y.y, shrink), y.z = __fmul_rn(y.z, shrink), y.w = __fmul_rn(y.w, shrink);
                max = top;
#pragma unroll
                for (int k = 0; k < BATCH; k++) {
                    const float w = mk_exp_fast(ms[k].x - top);
                    sum = __fmaf_rn(w, ms[k].y, sum);
                    y.x = __fmaf_rn(w, v[k].x, y.x), y.y = __fmaf_rn(w, v[k].y, y.y), y.z = __fmaf_rn(w, v[k].z, y.z), y.w = __fmaf_rn(w, v[k].w, y.w);
                }
            }
            if (i < n) *(float4 *)(merged + d->warp * n + i) = y;
            x->max[d->warp] = max; /* the same in all lanes */
            x->sum[d->warp] = sum;
        }
        mk_sync();
        float max = x->max[lane % MK_WARPS]; /* -inf of warps without a split */
#pragma unroll
        for (int k = 8; k; k >>= 1) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, k));
        const float w = mk_exp_fast(x->max[lane % MK_WARPS] - max), sum = mk_warp_sum(lane < MK_WARPS ? w * x->sum[lane] : 0.0f);
#pragma unroll 1
        for (uint32_t group = d->warp; group < mk_units(n); group += MK_WARPS) {
            const uint32_t i = group * MK_UNIT + lane, left = n - group * MK_UNIT;
            const bool has = i < n && lane < MK_UNIT;
            float y = 0;
#pragma unroll
            for (uint32_t k = 0; k < MK_WARPS; k++) y = __fmaf_rn(__shfl_sync(0xffffffffu, w, k), has ? merged[k * n + i] : 0.0f, y);
            y /= sum;
            if (m->gate) {
                mk_warp_read(&d->in->wait[1], r, m->in_off + m->head0 * m->qk_stride + m->first + group * MK_UNIT, left < MK_UNIT ? left : MK_UNIT, g);
                if (has) y *= mk_sigmoidf(g[lane]);
                __syncwarp();
            }
            mk_publish_unit(out, mk_signal_packets(d, out, r, d->in->signal_slice), n, group, y, mk_signal_epoch(d), lane);
        }
    }
    mk_sync();
}

#endif
