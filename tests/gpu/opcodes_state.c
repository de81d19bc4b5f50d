/* DELTA_STEP. Logical rows 0, 1, 2 are three tokens of one stream; row 3 is a first token; row 7 reads one slot and writes another. */
#include "tests/gpu/opcodes.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct state_arg {
    uint32_t dk, dv, decay, gate, rank, wtype, scale_k, wide;
} state_arg;

static void rows_of_streams(mk_case *c)
{
    for (uint32_t r = 0; r < c->step.nrows; r++) {
        mk_row *row = &c->step.row[r];
        uint32_t id = c->row_id[r];
        if (id < 3) {
            row->slot = row->state_read = row->state_write = 0;
            row->pos = c->pos[0] + id;
        }
        if (id == 7) row->state_write = 8;
        if (id == 3) row->pos = 0, row->flags |= MK_ROW_FIRST;
        if (id == 3 || id == 1 || id == 2) continue;
        case_fill(c, 7000, id, (float *)(c->mem.state + row->state_read * c->prog.info.state_slot_bytes), c->prog.info.state_slot_bytes / 4, 0.5);
    }
}

static void delta_make(mk_case *c, const void *arg)
{
    const state_arg *a = arg;
    uint32_t W = c->prog.info.workers, n = 2 * a->dk + a->dv, f = a->decay == MK_DECAY_HEAD ? 1 : a->dk, start[64];
    uint64_t state = 512;
    for (uint32_t w = 0; w <= W; w++) start[w] = w * a->dv;
    const uint32_t fz = W * (f + a->dv) + 2 * a->rank; /* slices as models have them, or longer than one row's places can say (mk_delta_places) */
    case_even(c, "qkv", MK_BF16, 0, W * n, a->wide ? 5 : (W * n + 96) / 97);
    case_even(c, "fz", MK_BF16, 0, fz, a->wide ? 2 : (fz + 58) / 59);
    case_even(c, "low", MK_BF16, 0, W + 3, 2);
    case_packet(c, "o", MK_BF16, 1, start, W);
    for (uint32_t w = 0; w < W; w++) {
        mk_insn *in = case_add(c, w, MK_OP_DELTA_STEP);
        uint32_t param = case_param(c, 4 * n, 0, 0.5);
        case_param(c, 1, 0.5, 0.3);
        case_param(c, f, -2, 1);
        case_param(c, a->dv, 1, 0.1);
        while (c->prog.info.param_floats % 4) case_param(c, 1, 0, 0);
        in->delta = (mk_delta){.dk = (uint16_t)a->dk, .dv = (uint16_t)a->dv, .taps = 4, .decay = (uint8_t)a->decay, .gate = (uint8_t)a->gate, .q_off = w * a->dk,
                               .k_off = W * a->dk + w * a->dk, .v_off = 2 * W * a->dk + w * a->dv, .f_off = w * f, .z_off = W * f + w * a->dv, .b_off = w + 2,
                               .param_off = param, .state_off = state};
        state += mk_delta_state_bytes(&in->delta) + 128;
        if (a->rank) {
            in->delta.rank = (uint16_t)a->rank;
            in->delta.f_off = w + 3;
            in->delta.z_off = a->rank + w + 10;
            for (uint32_t k = 0; k < 2; k++) {
                in->delta.low[k] = (mk_low_rank){.wtype = (uint8_t)a->wtype, .scale_k = (uint16_t)a->scale_k};
                if (a->wtype == MK_W_FP8) in->delta.low[k].nseg = 1, in->delta.low[k].phase = (uint16_t)(k && a->dv < 128 ? 16 * w : 0);
                in->tape_bytes += (uint32_t)mk_delta_segment_bytes(&in->delta, k);
            }
        }
        for (uint32_t k = 0; k < 3; k++) case_wait(c, in, k);
        case_to(c, in, 3, w);
    }
    case_seal(c, &(case_sizes){.state_slot = state + 512});
    for (uint32_t w = 0; w < W && a->rank; w++) {
        const mk_delta *d = &c->in[w]->delta;
        case_segment(c, case_tape(c, w), a->wtype, d->dk, a->rank, d->low[0].nseg, a->scale_k, 1);
        case_segment(c, case_tape(c, w) + mk_delta_segment_bytes(d, 0), a->wtype, d->dv, a->rank, d->low[1].nseg, a->scale_k, 1);
    }
    c->pos[0] = 62;
}

static void delta_feed(mk_case *c, const void *arg)
{
    (void)arg;
    for (uint32_t k = 0; k < 3; k++) case_input(c, k, 1);
    rows_of_streams(c);
}

#define S(...) delta_make, delta_feed, &(const state_arg){__VA_ARGS__}, 0

const case_spec state_cases[] = {
    {"DELTA_STEP", "decay by channel, dv 128, sigmoid", S(.dk = 128, .dv = 128, .decay = MK_DECAY_CHANNEL, .gate = MK_GATE_SIGMOID)},
    {"DELTA_STEP", "decay by channel, dv 32, sigmoid", S(.dk = 128, .dv = 32, .decay = MK_DECAY_CHANNEL, .gate = MK_GATE_SIGMOID)},
    {"DELTA_STEP", "decay by head, dv 64, silu", S(.dk = 128, .dv = 64, .decay = MK_DECAY_HEAD, .gate = MK_GATE_SILU)},
    {"DELTA_STEP", "decay by head, dv 16, silu", S(.dk = 128, .dv = 16, .decay = MK_DECAY_HEAD, .gate = MK_GATE_SILU)},
    {"DELTA_STEP", "rank 128 FP8, dv 32, sigmoid", S(.dk = 128, .dv = 32, .decay = MK_DECAY_CHANNEL, .gate = MK_GATE_SIGMOID, .rank = 128, .wtype = MK_W_FP8, .scale_k = 128)},
    {"DELTA_STEP", "rank 128 FP8 by 64, dv 36, silu", S(.dk = 128, .dv = 36, .decay = MK_DECAY_CHANNEL, .gate = MK_GATE_SILU, .rank = 128, .wtype = MK_W_FP8, .scale_k = 64)},
    {"DELTA_STEP", "rank 128 BF16, dv 128, sigmoid", S(.dk = 128, .dv = 128, .decay = MK_DECAY_CHANNEL, .gate = MK_GATE_SIGMOID, .rank = 128, .wtype = MK_W_BF16, .scale_k = 128)},
    {"DELTA_STEP", "decay by head, dv 36, sigmoid", S(.dk = 128, .dv = 36, .decay = MK_DECAY_HEAD, .gate = MK_GATE_SIGMOID)},
    {"DELTA_STEP", "decay by channel, dv 64, wide slices", S(.dk = 128, .dv = 64, .decay = MK_DECAY_CHANNEL, .gate = MK_GATE_SIGMOID, .wide = 1)},
    {"DELTA_STEP", "rank 128 FP8, dv 32, wide slices", S(.dk = 128, .dv = 32, .decay = MK_DECAY_CHANNEL, .gate = MK_GATE_SIGMOID, .rank = 128, .wtype = MK_W_FP8, .scale_k = 128, .wide = 1)},
    {0},
};
