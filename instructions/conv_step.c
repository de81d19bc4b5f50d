/* CONV_STEP: short causal depthwise convolution, then silu, on the q, k and v channels of one item (a head and dv of its value
 * channels).
 *   y_c(t) = silu(sum over j of w[c][j] * u_c(t - (taps-1) + j)),  j ascending; tap taps-1 is the current token
 *   wait[0..2]  "qkv": the slices that hold values [q_off, q_off+dk), [k_off, k_off+dk), [v_off, v_off+dv)
 *   signal      LOCAL f32[MK_MAX_ROWS][2*dk + dv]: q | k | v of every row
 *   params      f32[2*dk + dv][taps] at param_off
 *   state       f32[taps-1][2*dk + dv] at state_off of the row's slot: raw inputs u; entry (pos mod (taps-1)) is that of position pos.
 *               Before the first token all inputs are zero.
 * Rows in order: a row reads its state_read slot, which may be what the row before it wrote, and leaves the whole ring in state_write.
 * Source of the mathematics: models.md 3.1 step 1, 3.2. */
#include "instructions/mk_math.h"
#include "instructions/op.h"
#include "instructions/vec8.h"

#include <string.h>

/* y += w[c][tap] * u[c]: one tap of all channels. */
MK_CLONES static void tap_add(float *restrict y, const float *restrict w, uint32_t taps, const float *restrict u, uint32_t n)
{
    if (taps == 4) {
        for (uint32_t i = 0; i < n; i++) y[i] += w[(size_t)4 * i] * u[i];
    } else {
        for (uint32_t i = 0; i < n; i++) y[i] += w[(size_t)taps * i] * u[i];
    }
}

MK_CLONES static void silu(float *restrict y, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) y[i] = mk_siluf(y[i]);
}

void mk_conv_step_twin(mk_ctx *c)
{
    const mk_conv *v = &c->in->conv;
    uint32_t dk = v->dk, n = 2 * dk + v->dv, taps = v->taps, ring = taps - 1;
    const float *w = c->mem->param + v->param_off;
    float *out = mk_local(c, c->in->signal_vec), *u = c->scratch;
    uint64_t slot_bytes = c->prog->info.state_slot_bytes;

    for (uint32_t r = 0; r < c->step->nrows; r++) {
        const mk_row *row = &c->step->row[r];
        float *y = out + (size_t)r * n;
        float *state = (float *)(c->mem->state + row->state_write * slot_bytes + v->state_off);
        if (row->flags & MK_ROW_FIRST)
            memset(state, 0, (size_t)ring * n * sizeof *state);
        else if (row->state_read != row->state_write)
            memcpy(state, c->mem->state + row->state_read * slot_bytes + v->state_off, (size_t)ring * n * sizeof *state);
        mk_read(c, 0, r, v->q_off, dk, u);
        mk_read(c, 1, r, v->k_off, dk, u + dk);
        mk_read(c, 2, r, v->v_off, v->dv, u + 2 * dk);
        memset(y, 0, n * sizeof *y);
        /* The oldest input stands where this one will: positions pos - ring .. pos - 1, then pos. */
        for (uint32_t j = 0; j < ring; j++) tap_add(y, w + j, taps, state + (size_t)((row->pos + j) % ring) * n, n);
        tap_add(y, w + ring, taps, u, n);
        silu(y, n);
        memcpy(state + (size_t)(row->pos % ring) * n, u, n * sizeof *u);
    }
}
