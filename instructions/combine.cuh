/* COMBINE on the device: a warp merges every eighth split, then a thread an output value the eight warps, ascending. Semantics: combine.c. */
#ifndef MK_COMBINE_CUH
#define MK_COMBINE_CUH

#include "instructions/attention.cuh"
#include "instructions/mk_math.h"

/* e^x for weights: 2^x of the hardware. */
MK_DEV float mk_exp_fast(float x)
{
    return mk_exp2(__fmul_rn(x, 1.44269504f));
}

/* What a warp merged: sum w acc, then max and sum w sum. */
typedef struct mk_merged {
    float max[MK_WARPS], sum[MK_WARPS];
} mk_merged;
#define MK_COMBINE_MOST ((MK_STAGING - (uint32_t)sizeof(mk_merged)) / (4 * (MK_WARPS + 1)) & ~3u) /* channels */

MK_CALL void mk_combine_run(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    constexpr int BATCH = (MK_MAX_SPLITS + MK_WARPS - 1) / MK_WARPS; /* splits of a warp, all in flight */
    const mk_mla *m = &d->in->mla;
    const mk_vec *out = &d->sh->vec[d->in->signal_vec];
    const uint32_t latent = m->latent, floats = mk_partial_floats(latent), n = m->n, lane = d->lane;
    const size_t stride = (size_t)m->all_heads * floats;
    mk_merged *x = (mk_merged *)d->sh->staging;
    float *merged = (float *)(x + 1), *gate = merged + MK_WARPS * n; /* [warp][n], [n] */
    mk_staged_drop(d);
#pragma unroll 1
    for (uint32_t r = 0; r < d->step->nrows; r++) {
        const float *part = (const float *)mk_bulk_at(d, d->in->wait[0].vec) + ((size_t)r * MK_MAX_SPLITS * m->all_heads + m->head0) * floats;
        const uint32_t splits = mk_splits(d->step->row[r].pos, m->grain, m->most);
        if (r) mk_sync(); /* the row before is read */
        if (m->gate) mk_read_together(d, 1, r, m->in_off + m->head0 * m->qk_stride + m->first, n, gate, d->tid, MK_COMPUTE);
        if (r == 0) mk_counter_wait(d, 0);
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
        if (r == 0) mk_trace_input(d);
        float max = x->max[lane % MK_WARPS]; /* -inf of warps without a split */
#pragma unroll
        for (int k = MK_WARPS / 2; k; k >>= 1) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, k));
        const float w = mk_exp_fast(x->max[lane % MK_WARPS] - max), sum = mk_warp_sum(lane < MK_WARPS ? w * x->sum[lane] : 0.0f);
#pragma unroll 1
        for (uint32_t group = d->warp; group < mk_units(n); group += MK_WARPS) {
            const uint32_t i = group * MK_UNIT + lane;
            const bool has = i < n && lane < MK_UNIT;
            float y = 0;
#pragma unroll
            for (uint32_t k = 0; k < MK_WARPS; k++) y = __fmaf_rn(__shfl_sync(0xffffffffu, w, k), has ? merged[k * n + i] : 0.0f, y);
            y = mk_div(y, sum);
            if (m->gate && has) y *= mk_sigmoidf(gate[i]);
            mk_publish_unit(out, mk_signal_packets(d, out, r, d->in->signal_slice), n, group, y, mk_signal_epoch(d), lane);
        }
    }
    mk_sync();
}

#endif
