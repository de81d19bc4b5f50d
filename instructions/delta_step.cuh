/* DELTA_STEP on the device: a warp has four columns of the state at a time in registers while all rows pass, its lanes four key channels
 * each. Semantics: delta_step.c; in memory the state is [dv][dk] here. Before it waits for gates and decays it has the state, q, k and their norms. */
#ifndef MK_DELTA_STEP_CUH
#define MK_DELTA_STEP_CUH

#include "instructions/mk_math.h"
#include "instructions/value.cuh"
#include "instructions/conv_step.cuh"

#define MK_DELTA_DK 128u
#define MK_DELTA_DV 128u /* at most */

/* One row, in the staging area. */
typedef struct mk_delta_row {
    float a[MK_DELTA_DK]; /* decay factors; MK_DECAY_HEAD: a[0] */
    float z[MK_DELTA_DV]; /* o_norm * gate; then what is published */
    float o[MK_DELTA_DV];
    float beta, rq, rk, qk; /* 1/norm of q (times dk^-1/2) and of k; the normalised q.k */
} mk_delta_row;
static_assert(sizeof(mk_delta_row) * MK_MAX_ROWS <= MK_STAGING, "eight rows fit");

/* Sums over the warp, side by side. */
template <int N> MK_DEV void mk_warp_sums(float *v)
{
#pragma unroll
    for (int w = 16; w; w >>= 1)
#pragma unroll
        for (int c = 0; c < N; c++) v[c] += __shfl_xor_sync(0xffffffffu, v[c], w);
}
MK_DEV float mk_dot4(float4 a, float4 b)
{
    return __fmaf_rn(a.w, b.w, __fmaf_rn(a.z, b.z, __fmaf_rn(a.y, b.y, __fmul_rn(a.x, b.x))));
}
MK_DEV float4 mk_mul4(float4 a, float4 b)
{
    return make_float4(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y), __fmul_rn(a.z, b.z), __fmul_rn(a.w, b.w));
}
MK_DEV float4 mk_times4(float4 a, float b)
{
    return mk_mul4(a, make_float4(b, b, b, b));
}

/* Decays, gates, beta and norms of all rows: 32 values a warp, or a row's norms. */
MK_DEV void mk_delta_gates(const mk_dev *d, const mk_delta *e, mk_delta_row *rows, const float *in)
{
    const uint32_t head = e->decay == MK_DECAY_HEAD, nf = head ? 1 : MK_DELTA_DK / 32, nz = (e->dv + 31) / 32, per = nf + nz + 2;
    const float *param = d->a->param + e->param_off;
    uint32_t u = d->warp, r = 0;
#pragma unroll 1
    for (;; u += MK_WARPS) {
        for (; u >= per; u -= per) r++;
        __syncwarp();
        if (r >= d->step->nrows) return;
        mk_delta_row *row = rows + r;
        if (u == per - 1) { /* what CONV_STEP left on this worker was complete before its last barrier */
            const float4 *qk = (const float4 *)(in + r * (2 * MK_DELTA_DK + e->dv));
            const float4 q = qk[d->lane], k = qk[MK_DELTA_DK / 4 + d->lane];
            float sum[3] = {mk_dot4(q, q), mk_dot4(k, k), mk_dot4(q, k)};
            mk_warp_sums<3>(sum);
            const float x = mk_rsqrtf(d->lane == 0 ? sum[0] + 1e-6f : sum[1] + 1e-6f), rk = __shfl_sync(0xffffffffu, x, 1);
            const float rq = x * 0x1.6a09e6p-4f; /* 128^-1/2 */
            if (d->lane) continue;
            row->rq = rq;
            row->rk = rk;
            row->qk = sum[2] * rq * rk;
            continue;
        }
        const uint32_t z = u >= nf, b = u == per - 2, i = (b ? 0 : z ? u - nf : u) * 32 + d->lane; /* neither: f */
        if (i >= (b ? 1 : z ? e->dv : head ? 1 : MK_DELTA_DK)) continue;
        const mk_spot spot = mk_spot_of(d, b ? 2 : 1, (b ? e->b_off : z ? e->z_off : e->f_off) + i);
        const uint4 q = mk_spot_look(&spot, r);
        const float p = b ? 0.0f : __ldg(param + 1 + i + (z ? (head ? 1 : MK_DELTA_DK) : 0)), rate = z ? 0.0f : -mk_expf(__ldg(param));
        const float x = mk_spot_value(&spot, r, q);
        if (z) {
            const float y = mk_div(!b && e->gate == MK_GATE_SILU ? x : 1.0f, 1.0f + mk_expf(-x));
            *(b ? &row->beta : row->z + i) = b ? y : p * y;
        } else {
            row->a[i] = mk_expf(rate * mk_softplusf(x + p));
        }
    }
}

/* The state before row r where the row does not follow the one before it. */
MK_DEV float4 mk_delta_load(const mk_dev *d, const mk_delta *e, const mk_row *row, uint32_t v)
{
    const float4 *from = (const float4 *)(d->a->state + row->state_read * d->a->state_slot_bytes + e->state_off);
    if (v >= e->dv || (row->flags & MK_ROW_FIRST)) return make_float4(0, 0, 0, 0);
    return __ldcg(from + v * (MK_DELTA_DK / 4) + d->lane);
}

/* One warp publishes a row: the slice's values, then the trailer. */
MK_DEV void mk_delta_publish(uint32_t lane, uint32_t dv, const mk_delta_row *x, uint4 *p, uint32_t epoch)
{
    const uint32_t words = dv / 2;
    float sum = 0;
#pragma unroll 1
    for (uint32_t i = lane; i < dv; i += 32) sum = __fmaf_rn(x->o[i], x->o[i], sum);
    sum = mk_warp_sum(sum);
#pragma unroll 1
    for (uint32_t i = lane; i < (words + 1 + 2) / 3; i += 32) {
        uint32_t word[3];
#pragma unroll
        for (uint32_t k = 0; k < 3; k++) {
            const uint32_t w = 3 * i + k;
            const float2 o = ((const float2 *)x->o)[w], z = ((const float2 *)x->z)[w]; /* beyond the last value: something of this row */
            word[k] = mk_bf16_bits(__fmul_rn(o.x, z.x)) | mk_bf16_bits(__fmul_rn(o.y, z.y)) << 16;
            word[k] = w < words ? word[k] : w == words ? __float_as_uint(sum) : 0;
        }
        mk_packet_store(p + i, word[0], word[1], word[2], epoch);
    }
}

MK_DEV void mk_delta_step_run(const mk_dev *d)
{
    constexpr int COLS = 4; /* columns of the state that a warp has in registers */
    const mk_delta *e = &d->in->delta;
    const uint32_t dv = e->dv, nrows = d->step->nrows, lane = d->lane, n = 2 * MK_DELTA_DK + dv, head = e->decay == MK_DECAY_HEAD;
    const float *in = (const float *)mk_local_at(d, d->in->wait[0].vec);
    mk_delta_row *rows = (mk_delta_row *)d->sh->staging;
    float4 s[COLS] = {}; /* ptxas keeps alive, across all opcodes, what is not set on every path */
    uint4 *const to = mk_signal_packets(d, &d->sh->vec[d->in->signal_vec], d->warp, d->in->signal_slice); /* of row `warp` */
    const uint32_t epoch = mk_signal_epoch(d);
    mk_staged_drop(d);

#pragma unroll 1
    for (uint32_t v0 = d->warp; v0 < dv + d->warp; v0 += COLS * MK_WARPS)
#pragma unroll 1
        for (uint32_t r = 0; r < nrows; r++) {
            const mk_row *row = &d->step->row[r], *after = row + 1;
            const bool leads = r + 1 < nrows && after->slot == row->slot && after->state_write == row->state_write &&
                               after->state_read == row->state_write && after->pos == row->pos + 1;
            float4 *keep = (float4 *)(d->a->state + row->state_write * d->a->state_slot_bytes + e->state_off) + v0 * (MK_DELTA_DK / 4) + lane;
            if (!mk_row_follows(d->step, r))
#pragma unroll
                for (int c = 0; c < COLS; c++) s[c] = mk_delta_load(d, e, row, v0 + c * MK_WARPS);
            if (v0 == d->warp && r == 0) {
                mk_delta_gates(d, e, rows, in);
                mk_sync();
                mk_trace_input(d);
                mk_trace_bytes(d, nrows * MK_DELTA_DK * dv * 4);
            }
            mk_delta_row *x = rows + r;
            const float *qkv = in + r * n;
            const float a0 = x->a[0];
            const float4 a = head ? make_float4(a0, a0, a0, a0) : ((const float4 *)x->a)[lane];
            const float4 k = mk_times4(((const float4 *)qkv)[MK_DELTA_DK / 4 + lane], x->rk), ka = mk_mul4(k, a);
            const float4 qa = mk_mul4(mk_times4(((const float4 *)qkv)[lane], x->rq), a);
            float dot[2 * COLS];
#pragma unroll
            for (int c = 0; c < COLS; c++) {
                dot[c] = mk_dot4(ka, s[c]);
                dot[COLS + c] = mk_dot4(qa, s[c]);
            }
            const float sum = mk_warp_eight(dot, lane);
#pragma unroll
            for (int c = 0; c < COLS; c++) {
                const uint32_t v = v0 + c * MK_WARPS;
                const float m = __shfl_sync(0xffffffffu, sum, 4 * c), o = __shfl_sync(0xffffffffu, sum, 16 + 4 * c);
                if (v >= dv) continue;
                const float delta = __fmul_rn(x->beta, __fadd_rn(qkv[2 * MK_DELTA_DK + v], -m));
                if (lane == 0) x->o[v] = __fmaf_rn(x->qk, delta, o);
                s[c].x = __fmaf_rn(k.x, delta, __fmul_rn(a.x, s[c].x));
                s[c].y = __fmaf_rn(k.y, delta, __fmul_rn(a.y, s[c].y));
                s[c].z = __fmaf_rn(k.z, delta, __fmul_rn(a.z, s[c].z));
                s[c].w = __fmaf_rn(k.w, delta, __fmul_rn(a.w, s[c].w));
                if (!leads) keep[c * MK_WARPS * (MK_DELTA_DK / 4)] = s[c];
            }
        }
    mk_sync();
    mk_trace_publish(d);
    if (d->warp < nrows) mk_delta_publish(lane, dv, rows + d->warp, to, epoch);
    mk_sync();
}

#endif
