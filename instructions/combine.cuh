/* COMBINE on the device: every warp weighs all splits, a lane a split, and adds every eighth split's values; then a thread two output values the eight warps' sums, ascending.
 * Semantics: combine.c. */
#ifndef MK_COMBINE_CUH
#define MK_COMBINE_CUH

#include "instructions/attention.cuh"
#include "instructions/mk_math.h"

#define MK_COMBINE_MOST ((MK_STAGING / (4 * (MK_WARPS + 1))) & ~3u) /* channels */

/* The largest of the warp's values, none of them NaN, in few instructions: as integers that are ordered alike. */
MK_DEV float mk_warp_top(float x)
{
    const uint32_t b = __float_as_uint(x), u = __reduce_max_sync(0xffffffffu, b ^ ((uint32_t)((int32_t)b >> 31) | 0x80000000u));
    return __uint_as_float(u ^ ((uint32_t)((int32_t)~u >> 31) | 0x80000000u));
}

/* A load that bypasses L1, or nothing, without a branch. */
MK_DEV void mk_load_if(float4 *x, const float *from, bool has)
{
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t@p ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n\t}"
                 : "+f"(x->x), "+f"(x->y), "+f"(x->z), "+f"(x->w)
                 : "l"(from), "r"((uint32_t)has));
}
MK_DEV void mk_load_if(float2 *x, const float *from, bool has)
{
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %3, 0;\n\t@p ld.global.cg.v2.f32 {%0, %1}, [%2];\n\t}" : "+f"(x->x), "+f"(x->y) : "l"(from), "r"((uint32_t)has));
}

MK_CALL void mk_combine_run(const mk_insn *in)
{
    constexpr uint32_t MINE = (MK_MAX_SPLITS + MK_WARPS - 1) / MK_WARPS, LOOKS = (MK_MAX_SPLITS + 31) / 32; /* splits of a warp, all in flight; of a lane to be weighed */
    constexpr uint32_t FEW = 5; /* of those of a warp: rows of 2,048 tokens have no more */
    static_assert(MK_WARPS == 8, "a warp's split k is lane's k / 4");
    const mk_dev here = mk_here(in), *d = &here;
    const mk_fed *f = mk_fed_of(in);
    const mk_mla *m = &in->mla;
    const mk_vec *out = &d->sh->vec[in->signal_vec];
    const uint32_t latent = m->latent, floats = mk_partial_floats(latent), n = m->n, lane = d->lane, stride = m->all_heads * floats, rows = d->step->nrows;
    float *merged = (float *)d->sh->staging, *gate = merged + MK_WARPS * n; /* [warp][n], [n] */
    mk_staged_drop(d);
#pragma unroll 1
    for (uint32_t r = 0; r < rows; r++) {
        const float *part = (const float *)mk_bulk_at(d, in->wait[0].vec) + ((size_t)r * MK_MAX_SPLITS * m->all_heads + m->head0) * floats;
        const uint32_t splits = mk_splits(d->step->row[r].pos, m->grain, m->most);
        uint4 *const to = f->place.out + (r * out->nslice * out->slice_packets + lane / 3);
        if (r) mk_sync(); /* the row before is read */
        if (m->gate && d->warp == MK_WARPS - 1) { /* published before the partials were begun */
            const mk_wait *wait = &in->wait[1];
            const uint4 *packets = f->place.in[1] + r * d->sh->vec[wait->vec].nslice * d->sh->vec[wait->vec].slice_packets;
            const uint32_t first = m->in_off + m->head0 * m->qk_stride + m->first;
            mk_asked look;
            mk_asked_for(&look, d, wait, packets, f->place.epoch[1], first, n);
            mk_asked_take(&look, d, wait, 1, r, packets, f->place.epoch[1], first, n, gate);
        }
        if (r == 0) mk_counter_wait(d, 0);
        float sum = 0;
#pragma unroll 1
        for (uint32_t i = 4 * lane; i < n || i == 4 * lane; i += 128) {
            float2 look[LOOKS];
            float4 v[MINE], y = make_float4(0, 0, 0, 0);
            const float *p = part + d->warp * stride + m->first + i;
#pragma unroll
            for (uint32_t k = 0; k < LOOKS; k++) {
                look[k] = make_float2(-INFINITY, 0);
                mk_load_if(&look[k], part + (32 * k + lane) * stride + latent, 32 * k + lane < splits);
            }
#pragma unroll
            for (uint32_t k = 0; k < MINE; k++) v[k] = make_float4(0, 0, 0, 0);
#pragma unroll
            for (uint32_t k = 0; k < FEW; k++, p += MK_WARPS * stride) mk_load_if(&v[k], p, i < n && d->warp + k * MK_WARPS < splits);
            if (splits > FEW * MK_WARPS)
#pragma unroll
                for (uint32_t k = FEW; k < MINE; k++, p += MK_WARPS * stride) mk_load_if(&v[k], p, i < n && d->warp + k * MK_WARPS < splits);
            float top = look[0].x, w[LOOKS];
            sum = 0;
#pragma unroll
            for (uint32_t k = 1; k < LOOKS; k++) top = fmaxf(top, look[k].x);
            top = mk_warp_top(top);
#pragma unroll
            for (uint32_t k = 0; k < LOOKS; k++) {
                w[k] = mk_exp2(__fmul_rn(look[k].x - top, 1.44269504f)); /* 0 beyond the splits */
                sum = __fmaf_rn(w[k], look[k].y, sum);
            }
#pragma unroll
            for (uint32_t k = 0; k < MINE; k++) {
                if (k == FEW && splits <= FEW * MK_WARPS) break;
                const float u = __shfl_sync(0xffffffffu, w[k / 4], (d->warp + k * MK_WARPS) & 31);
                y.x = __fmaf_rn(u, v[k].x, y.x), y.y = __fmaf_rn(u, v[k].y, y.y), y.z = __fmaf_rn(u, v[k].z, y.z), y.w = __fmaf_rn(u, v[k].w, y.w);
            }
            if (i < n) *(float4 *)(merged + d->warp * n + i) = y;
        }
        sum = mk_reciprocal(mk_warp_sum(sum));
        mk_sync();
        if (r == 0) mk_trace_input(d);
#pragma unroll 1
        for (uint32_t u = d->warp; u * 2 * MK_UNIT < n; u += MK_WARPS) { /* a lane two values, three of them a packet */
            const uint32_t i = (u * MK_UNIT + lane) * 2;
            const bool has = lane < MK_UNIT && i < n;
            const float *p = merged + (has ? i : 0);
            float2 y = make_float2(0, 0);
#pragma unroll
            for (uint32_t k = 0; k < MK_WARPS; k++, p += n) {
                const float2 z = *(const float2 *)p;
                y.x = __fadd_rn(y.x, z.x), y.y = __fadd_rn(y.y, z.y);
            }
            y.x = __fmul_rn(y.x, sum), y.y = __fmul_rn(y.y, sum);
            if (m->gate) {
                const float2 g = *(const float2 *)(gate + (has ? i : 0));
                y.x = __fmul_rn(y.x, mk_sigmoid(g.x)), y.y = __fmul_rn(y.y, mk_sigmoid(g.y));
            }
            const uint32_t word = has ? mk_pack_bf16(y.x, y.y) : 0, then = __shfl_down_sync(0xffffffffu, word, 1), last = __shfl_down_sync(0xffffffffu, word, 2);
            if (has && lane % 3 == 0) mk_packet_store(to + u * (MK_UNIT / 3), word, then, last, f->place.out_epoch);
        }
    }
    mk_sync();
}

#endif
