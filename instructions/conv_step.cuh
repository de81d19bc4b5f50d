/* CONV_STEP on the device: one thread a channel, rows in order. Semantics: conv_step.c. The state is laid out as there. Weights and state are asked for before
 * the input is waited for. */
#ifndef MK_CONV_STEP_CUH
#define MK_CONV_STEP_CUH

#include "instructions/mk_math.h"
#include "instructions/value.cuh"

#define MK_CONV_TAPS 4u

/* The row reads what the row before it wrote: its state is at hand. */
MK_DEV bool mk_row_follows(const mk_step *step, uint32_t r)
{
    const mk_row *row = &step->row[r], *before = row - 1;
    return r > 0 && before->slot == row->slot && before->state_write == row->state_read && before->pos + 1 == row->pos;
}

/* The planner puts the DELTA_STEP that reads our result right behind: its parameters and its state follow ours. By the
 * threads that have no channel. A prefetch of something else does no harm. */
MK_DEV void mk_conv_prefetch(const mk_dev *d, const mk_conv *v, uint32_t n)
{
    const uint32_t state = ((MK_CONV_TAPS - 1) * n * 4 + 127) & ~127u, lines = v->dk * v->dv / 32, t = MK_COMPUTE - 1 - d->tid;
    if (t < 8) mk_prefetch(d->a->param + v->param_off + n * MK_CONV_TAPS + t * 32);
#pragma unroll 1
    for (uint32_t r = 0; r < d->step->nrows; r++) {
        const mk_row *row = &d->step->row[r];
        if (mk_row_follows(d->step, r) || (row->flags & MK_ROW_FIRST)) continue;
        const uint8_t *from = d->a->state + row->state_read * d->a->state_slot_bytes + v->state_off + state;
#pragma unroll 1
        for (uint32_t i = t; i < lines; i += MK_COMPUTE - n) mk_prefetch(from + i * 128);
    }
}

MK_DEV void mk_conv_step_run(const mk_dev *d)
{
    constexpr uint32_t RING = MK_CONV_TAPS - 1;
    const mk_conv *v = &d->in->conv;
    const uint32_t dk = v->dk, n = 2 * dk + v->dv, nrows = d->step->nrows, c = d->tid, part = c < dk ? 0 : c < 2 * dk ? 1 : 2;
    const uint32_t first = part == 0 ? v->q_off : part == 1 ? v->k_off : v->v_off;
    const mk_wait *wait = &d->in->wait[part];
    float *out = (float *)mk_local_at(d, d->in->signal_vec) + c;
    const float *weight = d->a->param + v->param_off + c * MK_CONV_TAPS;
    float w[MK_CONV_TAPS], past[RING];
    if (c < n) {
#pragma unroll
        for (uint32_t j = 0; j < MK_CONV_TAPS; j++) w[j] = __ldg(weight + j);
        const mk_spot spot = mk_spot_of(d->sh, wait, first + c - part * dk);
        uint4 next = mk_spot_look(d, wait, 0, spot);
#pragma unroll 1
        for (uint32_t r = 0; r < nrows; r++) {
            const mk_row *row = &d->step->row[r];
            const float *from = (const float *)(d->a->state + row->state_read * d->a->state_slot_bytes + v->state_off) + c;
            float *to = (float *)(d->a->state + row->state_write * d->a->state_slot_bytes + v->state_off) + c;
            const bool empty = row->flags & MK_ROW_FIRST, whole = empty || row->state_read != row->state_write; /* `to` has not got the older inputs yet */
            const uint32_t oldest = row->pos % RING;
            uint32_t at[RING]; /* where the oldest input stands, and its followers */
#pragma unroll
            for (uint32_t j = 0; j < RING; j++) {
                at[j] = (oldest + j < RING ? oldest + j : oldest + j - RING) * n;
                if (empty)
                    past[j] = 0;
                else if (!mk_row_follows(d->step, r))
                    past[j] = __ldcg(from + at[j]);
            }
            const uint4 q = next;
            if (r + 1 < nrows) next = mk_spot_look(d, wait, r + 1, spot);
            const float x = mk_spot_value(d, wait, r, spot, q);
            if (r == 0) mk_trace_input(d);
            float y = __fmul_rn(w[0], past[0]);
#pragma unroll
            for (uint32_t j = 1; j < RING; j++) y = __fmaf_rn(w[j], past[j], y);
            y = __fmaf_rn(w[RING], x, y);
            out[r * n] = mk_siluf(y);
#pragma unroll
            for (uint32_t j = 0; j + 1 < RING; j++) {
                past[j] = past[j + 1];
                if (whole) to[at[j + 1]] = past[j];
            }
            past[RING - 1] = x;
            to[at[0]] = x;
        }
    } else {
        mk_conv_prefetch(d, v, n);
    }
    mk_sync();
}

#endif
