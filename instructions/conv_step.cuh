/* CONV_STEP on the device: a thread has a channel, or two, rows in order. Semantics: conv_step.c. The state is laid out as there. Weights and state are asked for before
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

/* The planner puts the DELTA_STEP that reads our result right behind: its parameters and its state follow ours. A prefetch of something else does no
 * harm. The last threads begin: they have a channel less. */
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
        for (uint32_t i = t; i < lines; i += MK_COMPUTE) mk_prefetch(from + i * 128);
    }
}

MK_DEV void mk_conv_step_run(const mk_dev *d)
{
    constexpr uint32_t RING = MK_CONV_TAPS - 1, PER = MK_CONV_CHANNELS / MK_COMPUTE;
    const mk_conv *v = &d->in->conv;
    const uint32_t dk = v->dk, n = 2 * dk + v->dv, nrows = d->step->nrows;
    const float *weight = d->a->param + v->param_off;
    const uint64_t slot_bytes = d->a->state_slot_bytes;
    uint8_t *state = d->a->state + v->state_off;
    float *out = (float *)mk_local_at(d, d->in->signal_vec);
    mk_spot spot[PER] = {}; /* ptxas keeps alive, across all opcodes, what is not set on every path */
    uint4 next[PER] = {};
    float w[PER][MK_CONV_TAPS] = {}, past[PER][RING] = {};
#pragma unroll
    for (uint32_t i = 0; i < PER; i++) {
        const uint32_t c = d->tid + i * MK_COMPUTE, part = c < dk ? 0 : c < 2 * dk ? 1 : 2;
        if (c >= n) continue;
        spot[i] = mk_spot_of(d, part, (part == 0 ? v->q_off : part == 1 ? v->k_off : v->v_off) + c - part * dk);
        next[i] = mk_spot_look(&spot[i], 0);
#pragma unroll
        for (uint32_t j = 0; j < MK_CONV_TAPS; j++) w[i][j] = __ldg(weight + c * MK_CONV_TAPS + j);
    }
#pragma unroll 1
    for (uint32_t r = 0; r < nrows; r++) {
        const mk_row *row = &d->step->row[r];
        const float *from = (const float *)(state + row->state_read * slot_bytes);
        float *to = (float *)(state + row->state_write * slot_bytes);
        const bool empty = row->flags & MK_ROW_FIRST, whole = empty || row->state_read != row->state_write; /* `to` has not got the older inputs yet */
        const bool load = !empty && !mk_row_follows(d->step, r);
        const uint32_t oldest = row->pos % RING;
        uint32_t at[RING]; /* where the oldest input stands, and its followers */
#pragma unroll
        for (uint32_t j = 0; j < RING; j++) at[j] = (oldest + j < RING ? oldest + j : oldest + j - RING) * n;
#pragma unroll
        for (uint32_t i = 0; i < PER; i++) {
            const uint32_t c = d->tid + i * MK_COMPUTE;
#pragma unroll
            for (uint32_t j = 0; j < RING; j++) {
                if (empty) past[i][j] = 0;
                if (load && c < n) past[i][j] = __ldcg(from + at[j] + c);
            }
        }
        if (r == 0) mk_conv_prefetch(d, v, n);
#pragma unroll
        for (uint32_t i = 0; i < PER; i++) {
            const uint32_t c = d->tid + i * MK_COMPUTE;
            if (c >= n) continue;
            const uint4 q = next[i];
            if (r + 1 < nrows) next[i] = mk_spot_look(&spot[i], r + 1);
            const float x = mk_spot_value(&spot[i], r, q);
            if (r == 0 && i == 0) mk_trace_input(d);
            float y = __fmul_rn(w[i][0], past[i][0]);
#pragma unroll
            for (uint32_t j = 1; j < RING; j++) y = __fmaf_rn(w[i][j], past[i][j], y);
            y = __fmaf_rn(w[i][RING], x, y);
            out[r * n + c] = mk_siluf(y);
#pragma unroll
            for (uint32_t j = 0; j + 1 < RING; j++) {
                past[i][j] = past[i][j + 1];
                if (whole) to[at[j + 1] + c] = past[i][j];
            }
            past[i][RING - 1] = x;
            to[at[0] + c] = x;
        }
    }
    mk_sync();
}

#endif
