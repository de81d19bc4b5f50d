/* COMBINE on the device. One row: every warp weighs all splits, a lane a split, and adds every eighth split's values; then a thread two output values the eight warps' sums,
 * ascending. Several rows: a warp each, which adds in the same order. Semantics: combine.c. */
#ifndef MK_COMBINE_CUH
#define MK_COMBINE_CUH

#include "instructions/attention.cuh"
#include "instructions/mk_math.h"

#define MK_COMBINE_MOST  ((MK_STAGING / (4 * 2 * MK_WARPS)) & ~3u) /* channels: eight rows' and their gates fit the staging area */
#define MK_COMBINE_LOOKS ((MK_MAX_SPLITS + 31) / 32)               /* splits that a lane weighs */
static_assert(MK_WARPS == 8 && MK_MAX_ROWS <= MK_WARPS, "a warp's split k is lane's k / 4; a warp a row");

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

/* Maxima and sums of a lane's splits, of all heads' partials `stride` floats apart. */
MK_DEV void mk_combine_look(float2 *look, const float *from, uint32_t stride, uint32_t splits, uint32_t lane)
{
    from += lane * stride;
#pragma unroll
    for (uint32_t k = 0; k < MK_COMBINE_LOOKS; k++, from += 32 * stride) {
        look[k] = make_float2(-INFINITY, 0);
        mk_load_if(&look[k], from, 32 * k + lane < splits);
    }
}
/* What they weigh, 0 beyond the splits; returns the lane's part of their sum. */
MK_DEV float mk_combine_weights(float *w, const float2 *look)
{
    float top = look[0].x, sum = 0;
#pragma unroll
    for (uint32_t k = 1; k < MK_COMBINE_LOOKS; k++) top = fmaxf(top, look[k].x);
    top = mk_warp_top(top);
#pragma unroll
    for (uint32_t k = 0; k < MK_COMBINE_LOOKS; k++) {
        w[k] = mk_exp_fast(look[k].x - top);
        sum = __fmaf_rn(w[k], look[k].y, sum);
    }
    return sum;
}
MK_DEV void mk_combine_add(float4 *y, float w, float4 v)
{
    y->x = __fmaf_rn(w, v.x, y->x), y->y = __fmaf_rn(w, v.y, y->y), y->z = __fmaf_rn(w, v.z, y->z), y->w = __fmaf_rn(w, v.w, y->w);
}
/* By a warp: the gate's n values of row r, to be asked for and taken. */
MK_DEV void mk_combine_gate(const mk_dev *d, const uint4 *row, uint32_t r, uint32_t epoch, float *gate)
{
    const mk_mla *m = &d->in->mla;
    const uint32_t first = m->in_off + m->head0 * m->qk_stride + m->first;
    mk_asked look;
    mk_asked_for(&look, d, &d->in->wait[1], row, epoch, first, m->n);
    mk_asked_take(&look, d, &d->in->wait[1], 1, r, row, epoch, first, m->n, gate);
}
/* By a warp: a lane's two values, three lanes' a packet; gate: of the first, if they are gated. */
MK_DEV void mk_combine_publish(uint4 *to, float2 y, bool has, float sum, bool gated, const float *gate, uint32_t epoch, uint32_t lane)
{
    y.x = __fmul_rn(y.x, sum), y.y = __fmul_rn(y.y, sum);
    if (gated) {
        const float2 g = *(const float2 *)gate;
        y.x = __fmul_rn(y.x, mk_sigmoid(g.x)), y.y = __fmul_rn(y.y, mk_sigmoid(g.y));
    }
    const uint32_t word = has ? mk_bf16_pair(y.x, y.y) : 0, then = __shfl_down_sync(0xffffffffu, word, 1), last = __shfl_down_sync(0xffffffffu, word, 2);
    if (has && lane % 3 == 0) mk_packet_store(to, word, then, last, epoch);
}

/* Several rows. Alone in its row a warp waits for memory once in eight splits, and for no other warp. */
MK_CALL void mk_combine_rows(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_fed *f = mk_fed_of(in);
    const mk_mla *m = &in->mla;
    const mk_vec *out = &d->sh->vec[in->signal_vec];
    const uint32_t latent = m->latent, floats = mk_partial_floats(latent), n = m->n, lane = d->lane, stride = m->all_heads * floats, r = d->warp;
    float *merged = (float *)d->sh->staging + 2 * r * n, *gate = merged + n;
    mk_staged_drop(d);
    if (r < d->step->nrows) {
        const float *part = (const float *)mk_bulk_at(d, in->wait[0].vec) + ((size_t)r * MK_MAX_SPLITS * m->all_heads + m->head0) * floats;
        const uint32_t splits = mk_splits(d->step->row[r].pos, m->grain, m->most);
        uint4 *const to = f->place.out + (r * out->nslice * out->slice_packets + lane / 3);
        if (m->gate) {
            const mk_vec *v = &d->sh->vec[in->wait[1].vec];
            mk_combine_gate(d, f->place.in[1] + r * v->nslice * v->slice_packets, r, f->place.epoch[1], gate);
        }
        mk_counter_wait(d, 0);
        mk_trace_input(d);
        float2 look[MK_COMBINE_LOOKS];
        float w[MK_COMBINE_LOOKS];
        mk_combine_look(look, part + latent, stride, splits, lane);
        const float sum = mk_reciprocal(mk_warp_sum(mk_combine_weights(w, look)));
#pragma unroll 1
        for (uint32_t c = 0; c < n; c += 128) { /* by all lanes: there are shuffles inside */
            const uint32_t i = c + 4 * lane;
            float4 y[MK_WARPS] = {}, all = make_float4(0, 0, 0, 0);
            const float *p = part + m->first + i;
#pragma unroll 1
            for (uint32_t s = 0; s < splits; s += MK_WARPS, p += MK_WARPS * stride) {
                const float mine = s < 32 ? w[0] : s < 64 ? w[1] : w[2];
                float4 v[MK_WARPS] = {};
#pragma unroll
                for (uint32_t k = 0; k < MK_WARPS; k++) mk_load_if(&v[k], p + k * stride, i < n && s + k < splits);
#pragma unroll
                for (uint32_t k = 0; k < MK_WARPS; k++) mk_combine_add(&y[k], __shfl_sync(0xffffffffu, mine, (s + k) & 31), v[k]);
            }
#pragma unroll
            for (uint32_t k = 0; k < MK_WARPS; k++)
                all.x = __fadd_rn(all.x, y[k].x), all.y = __fadd_rn(all.y, y[k].y), all.z = __fadd_rn(all.z, y[k].z), all.w = __fadd_rn(all.w, y[k].w);
            if (i < n) *(float4 *)(merged + i) = all;
        }
        __syncwarp();
#pragma unroll 1
        for (uint32_t u = 0; u * 2 * MK_UNIT < n; u++) {
            const uint32_t i = (u * MK_UNIT + lane) * 2;
            const bool has = lane < MK_UNIT && i < n;
            mk_combine_publish(to + u * (MK_UNIT / 3), *(const float2 *)(merged + (has ? i : 0)), has, sum, m->gate, gate + (has ? i : 0), f->place.out_epoch, lane);
        }
    }
    mk_sync();
}
static_assert(MK_COMBINE_LOOKS == 3, "mk_combine_rows");

MK_CALL void mk_combine_one(uint32_t insn)
{
    const mk_insn *in = mk_insn_at(insn);
    constexpr uint32_t MINE = (MK_MAX_SPLITS + MK_WARPS - 1) / MK_WARPS; /* splits of a warp, all in flight */
    constexpr uint32_t FEW = 5; /* of those of a warp: rows of 2,048 tokens have no more */
    const mk_dev here = mk_here(in), *d = &here;
    const mk_fed *f = mk_fed_of(in);
    const mk_mla *m = &in->mla;
    const uint32_t latent = m->latent, floats = mk_partial_floats(latent), n = m->n, lane = d->lane, stride = m->all_heads * floats, splits = mk_splits(d->step->row[0].pos, m->grain, m->most);
    const float *part = (const float *)mk_bulk_at(d, in->wait[0].vec) + m->head0 * floats;
    uint4 *const to = f->place.out + lane / 3;
    float *merged = (float *)d->sh->staging, *gate = merged + MK_WARPS * n, sum = 0; /* [warp][n], [n] */
    mk_staged_drop(d);
    if (m->gate && d->warp == MK_WARPS - 1) mk_combine_gate(d, f->place.in[1], 0, f->place.epoch[1], gate); /* published before the partials were begun */
    mk_counter_wait(d, 0);
#pragma unroll 1
    for (uint32_t c = 0; c < n; c += 128) { /* by all lanes: there are shuffles inside */
        const uint32_t i = c + 4 * lane;
        float2 look[MK_COMBINE_LOOKS];
        float w[MK_COMBINE_LOOKS];
        float4 v[MINE], y = make_float4(0, 0, 0, 0);
        const float *p = part + (d->warp * stride + m->first + i);
        mk_combine_look(look, part + latent, stride, splits, lane);
#pragma unroll
        for (uint32_t k = 0; k < MINE; k++) v[k] = make_float4(0, 0, 0, 0);
#pragma unroll
        for (uint32_t k = 0; k < FEW; k++, p += MK_WARPS * stride) mk_load_if(&v[k], p, i < n && d->warp + k * MK_WARPS < splits);
        if (splits > FEW * MK_WARPS)
#pragma unroll
            for (uint32_t k = FEW; k < MINE; k++, p += MK_WARPS * stride) mk_load_if(&v[k], p, i < n && d->warp + k * MK_WARPS < splits);
        sum = mk_combine_weights(w, look);
#pragma unroll
        for (uint32_t k = 0; k < MINE; k++) {
            if (k == FEW && splits <= FEW * MK_WARPS) break;
            mk_combine_add(&y, __shfl_sync(0xffffffffu, w[k / 4], d->warp + k * MK_WARPS), v[k]); /* of lane ... mod 32 */
        }
        if (i < n) *(float4 *)(merged + d->warp * n + i) = y;
    }
    sum = mk_reciprocal(mk_warp_sum(sum));
    mk_sync();
    mk_trace_input(d);
#pragma unroll 1
    for (uint32_t u = d->warp; u * 2 * MK_UNIT < n; u += MK_WARPS) {
        const uint32_t i = (u * MK_UNIT + lane) * 2;
        const bool has = lane < MK_UNIT && i < n;
        const float *p = merged + (has ? i : 0);
        float2 y = make_float2(0, 0);
#pragma unroll
        for (uint32_t k = 0; k < MK_WARPS; k++, p += n) {
            const float2 z = *(const float2 *)p;
            y.x = __fadd_rn(y.x, z.x), y.y = __fadd_rn(y.y, z.y);
        }
        mk_combine_publish(to + u * (MK_UNIT / 3), y, has, sum, m->gate, gate + (has ? i : 0), f->place.out_epoch, lane);
    }
    mk_sync();
}
MK_DEV void mk_combine_run(uint32_t insn)
{
    mk_sh()->step.nrows == 1 ? mk_combine_one(insn) : mk_combine_rows(mk_insn_at(insn));
}

#endif
