/* CONV_STEP on the device: one thread a channel, rows in order. Semantics: conv_step.c. The state is laid out as there. */
#ifndef MK_CONV_STEP_CUH
#define MK_CONV_STEP_CUH

#include "instructions/mk_math.h"
#include "megakernel/device.cuh"

#define MK_CONV_TAPS 4u

MK_DEV void mk_conv_step_run(const mk_dev *d)
{
    constexpr uint32_t RING = MK_CONV_TAPS - 1;
    const mk_conv *v = &d->in->conv;
    const uint32_t dk = v->dk, n = 2 * dk + v->dv, nrows = d->step->nrows;
    float *u = (float *)d->sh->staging, *out = (float *)mk_local_at(d, d->in->signal_vec);
    float w[MK_CONV_TAPS] = {0, 0, 0, 0}, past[RING] = {0, 0, 0};
    const bool mine = d->tid < n;
    mk_staged_drop(d);
    if (mine)
#pragma unroll
        for (uint32_t j = 0; j < MK_CONV_TAPS; j++) w[j] = __ldg(d->a->param + v->param_off + d->tid * MK_CONV_TAPS + j);

    for (uint32_t k = d->warp; k < 3 * nrows; k += MK_WARPS) {
        uint32_t r = k / 3, part = k - 3 * r, len = part == 2 ? v->dv : dk;
        mk_warp_read(&d->in->wait[part], r, part == 0 ? v->q_off : part == 1 ? v->k_off : v->v_off, len, u + r * n + part * dk);
    }
    mk_sync();
    mk_trace_input(d);
    for (uint32_t r = 0; mine && r < nrows; r++) {
        const mk_row *row = &d->step->row[r];
        float *to = (float *)(d->a->state + row->state_write * d->a->state_slot_bytes + v->state_off) + d->tid;
        bool whole = false; /* the slot written to does not hold the older inputs yet */
        if (row->flags & MK_ROW_FIRST) {
#pragma unroll
            for (uint32_t j = 0; j < RING; j++) past[j] = 0;
            whole = true;
        } else {
            const mk_row *before = row - 1;
            bool follows = r > 0 && before->slot == row->slot && before->state_write == row->state_read && before->pos + 1 == row->pos;
            if (!follows) {
                const float *from = (const float *)(d->a->state + row->state_read * d->a->state_slot_bytes + v->state_off) + d->tid;
#pragma unroll
                for (uint32_t j = 0; j < RING; j++) past[j] = from[(row->pos + j) % RING * n];
            }
            whole = row->state_read != row->state_write;
        }
        float x = u[r * n + d->tid], y = __fmul_rn(w[0], past[0]);
#pragma unroll
        for (uint32_t j = 1; j < RING; j++) y = __fmaf_rn(w[j], past[j], y);
        y = __fmaf_rn(w[RING], x, y);
        out[r * n + d->tid] = mk_siluf(y);
#pragma unroll
        for (uint32_t j = 0; j + 1 < RING; j++) {
            past[j] = past[j + 1];
            if (whole) to[(row->pos + 1 + j) % RING * n] = past[j];
        }
        past[RING - 1] = x;
        to[row->pos % RING * n] = x;
    }
    mk_sync();
}

#endif
