/* DELTA_STEP on the device: the state slice stays in registers while the rows of a stream pass. A warp holds columns warp, warp + 16, ... of the
 * state, its lanes four key channels each. Semantics: delta_step.c; in memory the state is [dv][dk] here. */
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
    const float *a = x->a;
#pragma unroll 1
    for (uint32_t k = 0; k < 3; k++)
        mk_warp_read(&d->in->wait[k == 2 ? 2 : 1], r, k == 0 ? e->f_off : k == 1 ? e->z_off : e->b_off, k == 1 ? dv : k == 0 && !head ? dk : 1,
                     k == 0 ? x->a : k == 1 ? x->z : &x->beta);
    const float4 q = *(const float4 *)(in + 4 * lane), k = *(const float4 *)(in + dk + 4 * lane), f = *(const float4 *)(a + (head ? 0 : 4 * lane));
    __syncwarp();
    float qi[4] = {q.x, q.y, q.z, q.w}, ki[4] = {k.x, k.y, k.z, k.w}, fi[4] = {f.x, f.y, f.z, f.w}, sq = 0, sk = 0, qk = 0;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        sq = __fmaf_rn(qi[c], qi[c], sq);
        sk = __fmaf_rn(ki[c], ki[c], sk);
    }
    float rq = mk_rsqrtf(mk_warp_sum(sq) + 1e-6f) * mk_rsqrtf((float)dk), rk = mk_rsqrtf(mk_warp_sum(sk) + 1e-6f);
    float rate = -mk_expf(__ldg(param));
#pragma unroll
    for (int c = 0; c < 4; c++) {
        uint32_t i = 4 * lane + c;
        float g = mk_expf(rate * mk_softplusf((head ? fi[0] : fi[c]) + __ldg(param + 1 + (head ? 0 : i))));
        float kn = ki[c] * rk, qn = qi[c] * rq;
        x->a[i] = g;
        x->k[i] = kn;
        x->ka[i] = kn * g;
        x->qa[i] = qn * g;
        qk = __fmaf_rn(qn, kn, qk);
    }
    qk = mk_warp_sum(qk);
    if (lane == 0) {
        x->qk = qk;
        x->beta = mk_sigmoidf(x->beta);
    }
    for (uint32_t i = lane; i < dv; i += 32) x->v[i] = in[2 * dk + i];
}

MK_DEV void mk_delta_step_run(mk_dev *d)
{
    constexpr int COLS = MK_DELTA_DV / MK_WARPS;
    const mk_delta *e = &d->in->delta;
    const uint32_t nrows = d->step->nrows, dv = e->dv, head = e->decay == MK_DECAY_HEAD;
    const mk_vec *out = &d->sh->vec[d->in->signal_vec];
    mk_delta_row *rows = (mk_delta_row *)d->sh->staging;
    float4 s[COLS];
    d->m.staged.valid = 0;

    if (d->warp < nrows) mk_delta_gates(d, e, d->warp, rows + d->warp);
    for (uint32_t r = 0; r < nrows; r++) {
        const mk_row *row = &d->step->row[r];
        const mk_row *before = row - 1, *after = row + 1;
        float4 *to = (float4 *)(d->a->state + row->state_write * d->a->state_slot_bytes + e->state_off);
        bool follows = r > 0 && before->slot == row->slot && before->state_write == row->state_read && before->pos + 1 == row->pos;
        bool leads = r + 1 < nrows && after->slot == row->slot && after->state_write == row->state_write && after->state_read == row->state_write &&
                     after->pos == row->pos + 1;
        if (!follows) {
            const float4 *from = (const float4 *)(d->a->state + row->state_read * d->a->state_slot_bytes + e->state_off);
#pragma unroll
            for (int c = 0; c < COLS; c++) {
                uint32_t v = d->warp + c * MK_WARPS;
                s[c] = make_float4(0, 0, 0, 0);
                if (v < dv && !(row->flags & MK_ROW_FIRST)) s[c] = from[v * (MK_DELTA_DK / 4) + d->lane];
            }
        }
        if (r == 0) mk_sync(); /* the rows' inputs are there */
        mk_delta_row *x = rows + r;
        const float4 a = *(const float4 *)(x->a + 4 * d->lane), k = *(const float4 *)(x->k + 4 * d->lane);
        const float4 ka = *(const float4 *)(x->ka + 4 * d->lane), qa = *(const float4 *)(x->qa + 4 * d->lane);
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            uint32_t v = d->warp + c * MK_WARPS;
            if (v >= dv) continue;
            float m = __fmaf_rn(ka.w, s[c].w, __fmaf_rn(ka.z, s[c].z, __fmaf_rn(ka.y, s[c].y, __fmul_rn(ka.x, s[c].x))));
            float p = __fmaf_rn(qa.w, s[c].w, __fmaf_rn(qa.z, s[c].z, __fmaf_rn(qa.y, s[c].y, __fmul_rn(qa.x, s[c].x))));
            m = mk_warp_sum(m);
            p = mk_warp_sum(p);
            float delta = __fmul_rn(x->beta, __fadd_rn(x->v[v], -m));
            s[c].x = __fmaf_rn(k.x, delta, __fmul_rn(a.x, s[c].x));
            s[c].y = __fmaf_rn(k.y, delta, __fmul_rn(a.y, s[c].y));
            s[c].z = __fmaf_rn(k.z, delta, __fmul_rn(a.z, s[c].z));
            s[c].w = __fmaf_rn(k.w, delta, __fmul_rn(a.w, s[c].w));
            if (d->lane == 0) x->o[v] = __fmaf_rn(x->qk, delta, p);
            if (!leads) to[v * (MK_DELTA_DK / 4) + d->lane] = s[c];
        }
    }
    mk_sync();

    /* one warp a row: the slice's values, then the trailer */
    if (d->warp < nrows) {
        const uint32_t r = d->warp, words = (dv + 1) / 2;
        const mk_delta_row *x = rows + r;
        const float *norm = d->a->param + e->param_off + 1 + (head ? 1 : MK_DELTA_DK);
        uint4 *p = mk_signal_packets(d, out, r, d->in->signal_slice);
        uint32_t epoch = mk_signal_epoch(d);
        float sum = 0;
        for (uint32_t i = d->lane; i < dv; i += 32) sum = __fmaf_rn(x->o[i], x->o[i], sum);
        sum = mk_warp_sum(sum);
        for (uint32_t i = d->lane; i < (words + 1 + 2) / 3; i += 32) {
            uint32_t word[3] = {0, 0, 0};
#pragma unroll
            for (uint32_t k = 0; k < 3; k++) {
                uint32_t w = 3 * i + k;
                if (w == words) word[k] = __float_as_uint(sum);
#pragma unroll
                for (uint32_t h = 0; h < 2; h++) {
                    uint32_t v = 2 * w + h;
                    if (w < words && v < dv) word[k] |= mk_bf16_bits(x->o[v] * __ldg(norm + v) * mk_sigmoidf(x->z[v])) << (16 * h);
                }
            }
            mk_packet_store(p + i, word[0], word[1], word[2], epoch);
        }
    }
    mk_sync();
}

#endif
