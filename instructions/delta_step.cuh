/* DELTA_STEP on the device: a warp has two columns of the state at a time in registers while all rows pass, its lanes four key channels
 * each. Semantics: delta_step.c; in memory the state is [dv][dk] here. */
#ifndef MK_DELTA_STEP_CUH
#define MK_DELTA_STEP_CUH

#include "instructions/mk_math.h"
#include "megakernel/device.cuh"

#define MK_DELTA_DK 128u
#define MK_DELTA_DV 128u /* at most */

/* One row's inputs to the recurrence, in the staging area. */
typedef struct mk_delta_row {
    float a[MK_DELTA_DK], k[MK_DELTA_DK], ka[MK_DELTA_DK], qa[MK_DELTA_DK];
    float v[MK_DELTA_DV], z[MK_DELTA_DV], o[MK_DELTA_DV];
    float qk, beta, pad[2];
} mk_delta_row;
static_assert(sizeof(mk_delta_row) * MK_MAX_ROWS <= MK_STAGING, "eight rows fit");

/* Decay, normalised q and k, beta, gate input of one row, by one warp. */
MK_DEV void mk_delta_gates(const mk_dev *d, const mk_delta *e, uint32_t r, mk_delta_row *x)
{
    const uint32_t lane = d->lane, dk = MK_DELTA_DK, dv = e->dv, head = e->decay == MK_DECAY_HEAD;
    const float *param = d->a->param + e->param_off, *in = (const float *)mk_local_at(d, d->in->wait[0].vec) + r * (2 * dk + dv);
#pragma unroll 1
    for (uint32_t k = 0; k < 3; k++)
        mk_warp_read(&d->in->wait[k == 2 ? 2 : 1], r, k == 0 ? e->f_off : k == 1 ? e->z_off : e->b_off, k == 1 ? dv : k == 0 && !head ? dk : 1,
                     k == 0 ? x->a : k == 1 ? x->z : &x->beta);
    const float f0 = x->a[0];
    __syncwarp();
    float sq = 0, sk = 0, qk = 0;
#pragma unroll
    for (uint32_t i = lane; i < MK_DELTA_DK; i += 32) {
        sq = __fmaf_rn(in[i], in[i], sq);
        sk = __fmaf_rn(in[dk + i], in[dk + i], sk);
    }
    const float rq = mk_rsqrtf(mk_warp_sum(sq) + 1e-6f) * mk_rsqrtf((float)dk), rk = mk_rsqrtf(mk_warp_sum(sk) + 1e-6f);
    const float rate = -mk_expf(__ldg(param));
#pragma unroll 1
    for (uint32_t i = lane; i < MK_DELTA_DK; i += 32) {
        const float f = head ? f0 : x->a[i], g = mk_expf(rate * mk_softplusf(f + __ldg(param + 1 + (head ? 0 : i)))), k = in[dk + i] * rk, q = in[i] * rq;
        x->a[i] = g;
        x->k[i] = k;
        x->ka[i] = k * g;
        x->qa[i] = q * g;
        qk = __fmaf_rn(q, k, qk);
    }
    qk = mk_warp_sum(qk);
    if (lane == 0) {
        x->qk = qk;
        x->beta = mk_sigmoidf(x->beta);
    }
    for (uint32_t i = lane; i < dv; i += 32) x->v[i] = in[2 * dk + i];
}

/* The state before row r where the row does not follow the one before it. */
MK_DEV float4 mk_delta_load(const mk_dev *d, const mk_delta *e, const mk_row *row, uint32_t v)
{
    const float4 *from = (const float4 *)(d->a->state + row->state_read * d->a->state_slot_bytes + e->state_off);
    if (v >= e->dv || (row->flags & MK_ROW_FIRST)) return make_float4(0, 0, 0, 0);
    return from[v * (MK_DELTA_DK / 4) + d->lane];
}

MK_DEV float mk_dot4(float4 a, float4 b)
{
    return __fmaf_rn(a.w, b.w, __fmaf_rn(a.z, b.z, __fmaf_rn(a.y, b.y, __fmul_rn(a.x, b.x))));
}

MK_DEV void mk_delta_step_run(const mk_dev *d)
{
    constexpr int COLS = 2; /* columns of the state that a warp has in registers */
    const mk_delta *e = &d->in->delta;
    const uint32_t nrows = d->step->nrows, dv = e->dv, head = e->decay == MK_DECAY_HEAD, lane = d->lane;
    const mk_vec *out = &d->sh->vec[d->in->signal_vec];
    mk_delta_row *rows = (mk_delta_row *)d->sh->staging;
    float4 s[COLS];
    mk_staged_drop(d);

#pragma unroll
    for (int c = 0; c < COLS; c++) s[c] = mk_delta_load(d, e, d->step->row, d->warp + c * MK_WARPS);
    if (d->warp < nrows) mk_delta_gates(d, e, d->warp, rows + d->warp);
    mk_sync();
    mk_trace_input(d);
    mk_trace_bytes(d, nrows * MK_DELTA_DK * dv * 4);
#pragma unroll 1
    for (uint32_t v0 = d->warp; v0 < dv; v0 += COLS * MK_WARPS)
#pragma unroll 1
        for (uint32_t r = 0; r < nrows; r++) {
            const mk_row *row = &d->step->row[r], *before = row - 1, *after = row + 1;
            float4 *to = (float4 *)(d->a->state + row->state_write * d->a->state_slot_bytes + e->state_off) + lane;
            bool follows = r > 0 && before->slot == row->slot && before->state_write == row->state_read && before->pos + 1 == row->pos;
            bool leads = r + 1 < nrows && after->slot == row->slot && after->state_write == row->state_write &&
                         after->state_read == row->state_write && after->pos == row->pos + 1;
            if (!follows && (r > 0 || v0 != d->warp))
#pragma unroll
                for (int c = 0; c < COLS; c++) s[c] = mk_delta_load(d, e, row, v0 + c * MK_WARPS);
            mk_delta_row *x = rows + r;
            const float4 a = ((const float4 *)x->a)[lane], k = ((const float4 *)x->k)[lane], ka = ((const float4 *)x->ka)[lane],
                         qa = ((const float4 *)x->qa)[lane];
            float m[COLS], p[COLS];
#pragma unroll
            for (int c = 0; c < COLS; c++) {
                m[c] = mk_dot4(ka, s[c]);
                p[c] = mk_dot4(qa, s[c]);
            }
#pragma unroll
            for (int w = 16; w; w >>= 1)
#pragma unroll
                for (int c = 0; c < COLS; c++) {
                    m[c] += __shfl_xor_sync(0xffffffffu, m[c], w);
                    p[c] += __shfl_xor_sync(0xffffffffu, p[c], w);
                }
#pragma unroll
            for (int c = 0; c < COLS; c++) {
                const uint32_t v = v0 + c * MK_WARPS;
                if (v >= dv) continue;
                const float delta = __fmul_rn(x->beta, __fadd_rn(x->v[v], -m[c]));
                s[c].x = __fmaf_rn(k.x, delta, __fmul_rn(a.x, s[c].x));
                s[c].y = __fmaf_rn(k.y, delta, __fmul_rn(a.y, s[c].y));
                s[c].z = __fmaf_rn(k.z, delta, __fmul_rn(a.z, s[c].z));
                s[c].w = __fmaf_rn(k.w, delta, __fmul_rn(a.w, s[c].w));
                if (lane == 0) x->o[v] = __fmaf_rn(x->qk, delta, p[c]);
                if (!leads) to[v * (MK_DELTA_DK / 4)] = s[c];
            }
        }
    mk_sync();

    mk_trace_publish(d);
    /* one warp a row: the slice's values, then the trailer */
    if (d->warp < nrows) {
        const uint32_t r = d->warp, words = (dv + 1) / 2;
        mk_delta_row *x = rows + r;
        const float *norm = d->a->param + e->param_off + 1 + (head ? 1 : MK_DELTA_DK);
        uint4 *p = mk_signal_packets(d, out, r, d->in->signal_slice);
        const uint32_t epoch = mk_signal_epoch(d);
        float sum = 0;
#pragma unroll 1
        for (uint32_t i = lane; i < dv; i += 32) {
            const float o = x->o[i], z = x->z[i];
            sum = __fmaf_rn(o, o, sum);
            x->z[i] = o * __ldg(norm + i) * (e->gate == MK_GATE_SILU ? mk_siluf(z) : mk_sigmoidf(z));
        }
        sum = mk_warp_sum(sum);
        __syncwarp();
#pragma unroll 1
        for (uint32_t i = lane; i < (words + 1 + 2) / 3; i += 32) {
            uint32_t word[3];
#pragma unroll
            for (uint32_t k = 0; k < 3; k++) {
                const uint32_t w = 3 * i + k, v = 2 * w;
                word[k] = w == words ? __float_as_uint(sum) : 0;
                if (w < words) word[k] = mk_bf16_bits(x->z[v]) | (v + 1 < dv ? mk_bf16_bits(x->z[v + 1]) << 16 : 0);
            }
            mk_packet_store(p + i, word[0], word[1], word[2], epoch);
        }
    }
    mk_sync();
}

#endif
