/* Layers of the gated delta rule.
 *
 *   KDA   [low: f_a g_a b | q k v] -> DELTA per head and value slice, f_b and g_b in it -> o (+ h)
 *   GDN   [low: b | fz: a z | q k v] -> DELTA per head and value slice -> o (+ h)
 */
#include "host/planner_internal.h"

#include <stdlib.h>

/* Where the inputs of the items lie: set by the projections. */
typedef struct inputs {
    uint32_t low_pub, qkv_pub, fz_pub;
    uint32_t f0, z0, b0; /* f of head 0, z of head 0 in "fz" (low rank: first inputs in "low"); b of head 0 in "low" */
} inputs;

/* One exchange: what follows the low-rank vector is left to DELTA_STEP. */
static inputs project_kda(mk_builder *b, mk_roles *R, uint32_t layer, const mk_delta_mixer *d, mk_gemv_spec s)
{
    uint32_t W = b->cfg->workers, *cut = R->cut[0];
    mk_part low[3] = {mk_whole(&d->f_a), mk_whole(&d->g_a), mk_whole(&d->b)};
    mk_part qkv[3] = {mk_whole(&d->q), mk_whole(&d->k), mk_whole(&d->v)};
    const mk_part *g[2] = {low, qkv};
    uint32_t n[2] = {3, 3};
    mk_split(b, g, n, 2, cut);
    if (!R->have_delta) {
        R->low = mk_vec_split(b, "low", mk_act(b), low, 3, cut);
        R->qkv = mk_vec_split(b, "qkv", mk_act(b), qkv, 3, cut + W + 1);
    }
    inputs in = {.low_pub = mk_pub(b, R->low), .qkv_pub = mk_pub(b, R->qkv), .f0 = 0, .z0 = d->f_a.n, .b0 = d->f_a.n + d->g_a.n};
    mk_phase_begin(b);
    s.out_vec = R->low, s.out_pub = in.low_pub;
    mk_emit_gemv(b, layer, low, 3, cut, &s);
    s.out_vec = R->qkv, s.out_pub = in.qkv_pub;
    mk_emit_gemv(b, layer, qkv, 3, cut + W + 1, &s);
    mk_phase_end(b, "qkv", layer, NULL);
    return in;
}

/* Everything straight from h: one exchange. */
static inputs project_gdn(mk_builder *b, mk_roles *R, uint32_t layer, const mk_delta_mixer *d, mk_gemv_spec s)
{
    uint32_t W = b->cfg->workers, *cut = R->cut[0];
    mk_part low[1] = {mk_whole(&d->b)}, fz[2] = {mk_whole(&d->a), mk_whole(&d->z)};
    mk_part qkv[3] = {mk_whole(&d->q), mk_whole(&d->k), mk_whole(&d->v)};
    const mk_part *g[3] = {low, fz, qkv};
    uint32_t n[3] = {1, 2, 3};
    mk_split(b, g, n, 3, cut);
    if (!R->have_delta) {
        R->low = mk_vec_split(b, "b", mk_act(b), low, 1, cut);
        R->fz = mk_vec_split(b, "az", mk_act(b), fz, 2, cut + W + 1);
        R->qkv = mk_vec_split(b, "qkv", mk_act(b), qkv, 3, cut + 2 * (W + 1));
    }
    inputs in = {mk_pub(b, R->low), mk_pub(b, R->qkv), mk_pub(b, R->fz), 0, d->a.n, 0};
    mk_phase_begin(b);
    s.out_vec = R->low, s.out_pub = in.low_pub;
    mk_emit_gemv(b, layer, low, 1, cut, &s);
    s.out_vec = R->fz, s.out_pub = in.fz_pub;
    mk_emit_gemv(b, layer, fz, 2, cut + W + 1, &s);
    s.out_vec = R->qkv, s.out_pub = in.qkv_pub;
    mk_emit_gemv(b, layer, qkv, 3, cut + 2 * (W + 1), &s);
    mk_phase_end(b, "qkvz", layer, d->q.n + d->k.n + d->v.n + d->z.n < 33 * W ? "few rows: one row is more than 3 % of a worker's share" : NULL);
    return in;
}

void mk_plan_delta(mk_builder *b, mk_roles *R, uint32_t layer)
{
    const mk_layer *L = &b->m->layer[layer];
    const mk_delta_mixer *d = &L->delta;
    uint32_t W = b->cfg->workers, vs = mk_item_slices(d->heads, d->dv, W), items = d->heads * vs, dv = d->dv / vs;
    int low_rank = d->f_a.source != MK_SRC_NONE;
    if (R->have_delta && !mk_same_shape(b, "delta", layer,
                                     R->delta->heads == d->heads && R->delta->dk == d->dk && R->delta->dv == d->dv &&
                                         R->delta->k_heads == d->k_heads && R->delta->f_a.n == d->f_a.n &&
                                         R->delta->g_a.n == d->g_a.n && R->delta->taps == d->taps && R->delta->decay == d->decay))
        return;

    mk_gemv_spec s = {.in_vec = R->h, .in_pub = R->h_pub, .prologue = MK_PRO_RMS, .param_off = mk_norm_param(b, &L->in_norm), .eps = L->in_norm.eps};
    inputs p = low_rank ? project_kda(b, R, layer, d, s) : project_gdn(b, R, layer, d, s);
    if (!R->have_delta) {
        R->have_delta = 1;
        R->delta = d;
        uint32_t *st = calloc(items + 1, sizeof *st);
        for (uint32_t i = 0; st && i <= items; i++) st[i] = i * dv;
        if (st) R->o = mk_vec_packet(b, "o", mk_act(b), 1, 0, st, items);
        else mk_fail_memory(b);
        free(st);
    }

    /* One item = one head and dv of its value channels: convolution and state of it live on one worker. */
    mk_phase_begin(b);
    uint32_t decays = d->decay == MK_DECAY_HEAD ? 1 : d->dk, o_pub = mk_pub(b, R->o);
    for (uint32_t i = 0; i < items; i++) {
        uint32_t w = mk_start(i, W, items), head = i / vs, v0 = i % vs * dv;
        uint32_t kh = head / (d->heads / d->k_heads), D = d->q.n;
        mk_insn *in = mk_emit(b, w, MK_OP_DELTA_STEP, layer);
        mk_delta *e = &in->delta;
        e->dk = (uint16_t)d->dk;
        e->dv = (uint16_t)dv;
        e->taps = (uint16_t)d->taps;
        e->decay = d->decay;
        e->gate = d->gate;
        e->q_off = kh * d->dk;
        e->k_off = D + kh * d->dk;
        e->v_off = 2 * D + head * d->dv + v0;
        e->f_off = p.f0 + (low_rank ? 0 : head * decays);
        e->z_off = p.z0 + (low_rank ? 0 : head * d->dv + v0);
        e->rank = (uint16_t)(low_rank ? d->f_a.n : 0);
        e->b_off = p.b0 + head;
        mk_param_align(b, 4); /* a channel's taps are one load */
        e->param_off = mk_param(b, &d->conv_q, (d->conv_at[0] + kh * d->dk) * d->taps, d->dk * d->taps);
        mk_param(b, &d->conv_k, (d->conv_at[1] + kh * d->dk) * d->taps, d->dk * d->taps);
        mk_param(b, &d->conv_v, (d->conv_at[2] + head * d->dv + v0) * d->taps, dv * d->taps);
        mk_param(b, &d->a_log, head, 1);
        mk_param(b, &d->dt_bias, head * decays, decays);
        mk_param(b, &d->o_norm, v0, dv);
        e->state_off = b->state;
        b->state += (mk_delta_state_bytes(e) + 127) & ~127ull;
        mk_wait_values(b, in, R->qkv, p.qkv_pub, e->q_off, e->v_off + dv - e->q_off);
        if (low_rank) {
            mk_emit_low_rank(b, w, in, 0, &d->f_b, head * d->dk, d->dk);
            mk_emit_low_rank(b, w, in, 1, &d->g_b, head * d->dv + v0, dv);
            mk_wait_values(b, in, R->low, p.low_pub, e->f_off, e->z_off + e->rank - e->f_off);
        } else {
            mk_wait_values(b, in, R->fz, p.fz_pub, e->f_off, e->z_off + dv - e->f_off);
        }
        mk_wait_values(b, in, R->low, p.low_pub, e->b_off, 1);
        mk_signal(in, R->o, o_pub, i);
        b->load[w] += mk_delta_state_bytes(e) + (uint64_t)d->dk * dv * 4;
    }
    mk_phase_end(b, "delta", layer,
                 items % W ? "heads x value slices do not divide by the workers; a finer cut repeats q, k and decay of the head" : NULL);

    mk_part o = mk_whole(&d->o);
    uint32_t pub = mk_pub(b, R->h);
    mk_gemv_spec u = {.in_vec = R->o, .in_pub = o_pub, .prologue = MK_PRO_HEADNORM, .epilogue = MK_EPI_ADD, .norm_group = (uint16_t)d->dv,
                      .eps = d->o_eps, .res_vec = R->h, .res_pub = R->h_pub, .out_vec = R->h, .out_pub = pub};
    mk_phase_begin(b);
    mk_emit_gemv(b, layer, &o, 1, R->h_cut, &u);
    mk_phase_end(b, "o", layer, mk_why_h);
    R->h_pub = pub;
}
