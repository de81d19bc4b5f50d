/* What a step is made of: the phases of each kind of layer and the vectors between them.
 *
 *   delta     planner_delta.c
 *   GQA       planner_gqa.c
 *   MLA       [kv_a | q] -> (q_a: q_b) -> uk per head, KV_APPEND -> MLA_PARTIAL -> COMBINE -> uv per head -> o (+ h)
 *             [kv_a | q_a] -> [q_b uk | q_b's other rows], KV_APPEND -> MLA_PARTIAL ... where the model has the two as one matrix (mk_mla_mixer.qt)
 *   dense     gate|up -> down (+ h)
 *   MoE       router, each worker of its slice of h -> ROUTE, shared gate|up, EXPERT_UP -> shared down, EXPERT_DOWN (+ h)
 */
#include "host/planner_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int mk_same_shape(mk_builder *b, const char *what, uint32_t layer, int same)
{
    if (!same && !b->failed) {
        mk_fail(b->err, MK_E_MODEL, "layer %u: expected every %s layer of the model to have the same dimensions", layer, what);
        b->failed = 1;
    }
    return same;
}

struct piece {
    uint32_t w, first, rows;
};
struct pieces {
    struct piece *v;
    uint32_t n;
};
static void add_piece(mk_builder *b, uint32_t w, const mk_part *part, uint32_t first, uint32_t rows, uint32_t slice, void *arg)
{
    struct pieces *p = arg;
    (void)b, (void)part;
    p->v[slice] = (struct piece){w, first, rows};
    p->n = slice + 1;
}
/* The pieces of one part; v is NULL when memory ran out. */
static struct pieces pieces_of(mk_builder *b, const mk_part *part, const uint32_t *cut)
{
    struct pieces p = {calloc(b->cfg->workers + 2 + part->rows / (MK_SEGMENT_ROWS / 4), sizeof *p.v), 0};
    if (p.v)
        mk_each_piece(b, part, 1, cut, add_piece, &p);
    else
        mk_fail_memory(b);
    return p;
}

/* ---- latent attention ----------------------------------------------------------------------------------------------- */

static const char by_heads[] = "each worker has rows of one head: ceil(rows / floor(workers / heads)) over the mean";

/* Rows of matrices of equal height, a head each, whose inputs differ: a worker has rows of one head, because a second instruction, with an input of its own, costs more
 * than the evenest cut saves. More heads than workers: as evenly as it goes. All heads are cut alike, for the busiest worker would have no less to do if some had more workers than
 * others; the last workers have none. Slices that can be dealt are alike. */
static void split_heads(mk_builder *b, const mk_part *part, uint32_t heads, uint32_t *cut)
{
    if (heads > b->cfg->workers) {
        const mk_part *g[1] = {part};
        mk_split(b, g, &heads, 1, cut);
        return;
    }
    uint32_t rows = part->rows, each = b->cfg->workers / heads, most = rows % 2 ? (rows + each - 1) / each : 2 * ((rows / 2 + each - 1) / each), alike = 0;
    b->why = by_heads;
    for (uint32_t n = each; n && !alike; n--) {
        alike = mk_even_rows(part, n);
        if (alike && rows % alike) alike = 0;
    }
    if (alike && !mk_even_pays(alike * mk_row_cost(part), most * mk_row_cost(part))) alike = 0;
    if (alike > most) b->why = mk_why_even;
    for (uint32_t h = 0; h < heads; h++)
        for (uint32_t k = 0; k < each; k++) {
            uint32_t at = rows % 2 ? mk_start(k, rows, each) : 2 * mk_start(k, rows / 2, each); /* pairs of values stay together */
            if (alike) at = k * alike < rows ? k * alike : rows;
            cut[h * each + k] = h * rows + at;
        }
    for (uint32_t w = heads * each; w <= b->cfg->workers; w++) cut[w] = heads * rows;
}

/* As mk_split, but the last worker has no rows. */
static void split_but_last(mk_builder *b, const mk_part *const *parts, const uint32_t *n_parts, uint32_t groups, uint32_t *cut)
{
    const mk_plan_config *all = b->cfg;
    mk_plan_config others = *all;
    uint32_t W = all->workers;
    others.workers = W - 1;
    b->cfg = &others;
    mk_split(b, parts, n_parts, groups, cut);
    b->cfg = all;
    for (uint32_t g = groups; g--;) {
        memmove(cut + g * (W + 1), cut + g * W, W * sizeof *cut);
        cut[g * (W + 1) + W] = cut[g * (W + 1) + W - 1];
    }
    if (!b->why) b->why = "the last worker appends to the cache";
}

/* q~ and q_pe of one input: a worker has rows of one head's q~ or of q_pe, in pairs, which is how MLA_PARTIAL's queries are known by a table (queries_table, gpu.cu); so many workers a head that
 * the busiest has least to do. The last one has none: it appends to the cache, and the partials wait for that as well. Where the busiest would have half as much again as the mean, evenly. cut: of both groups. */
static void split_folded(mk_builder *b, const mk_part *qt, const mk_part *pe, uint32_t heads, uint32_t *cut)
{
    const mk_part *g[2] = {qt, pe};
    uint32_t W = b->cfg->workers, one[2] = {1, 1}, latent = qt->rows / heads, each = 0, least = UINT32_MAX, *cut_pe = cut + W + 1;
    for (uint32_t n = (W - 1) / heads; n; n--) {
        uint32_t others = W - 1 - n * heads, rows = (latent + n - 1) / n;
        if (!others) continue;
        if (rows < (pe->rows + others - 1) / others) rows = (pe->rows + others - 1) / others;
        if (rows < least) least = rows, each = n;
    }
    if (!each || latent % 2 || pe->rows % 2 || 2 * least * W > 3 * (qt->rows + pe->rows)) {
        mk_split(b, g, one, 2, cut);
        return;
    }
    b->why = "each worker has rows of one head, or of q_pe, or appends to the cache";
    for (uint32_t w = 0, first = heads * each; w <= W; w++) {
        cut[w] = w < first ? w / each * latent + 2 * mk_start(w % each, latent / 2, each) : qt->rows;
        cut_pe[w] = w <= first ? 0 : w + 1 < W ? 2 * mk_start(w - first, pe->rows / 2, W - 1 - first) : pe->rows;
    }
}

static void mla_layer(mk_builder *b, mk_roles *R, uint32_t layer, uint32_t kv_index)
{
    const mk_layer *L = &b->m->layer[layer];
    const mk_mla_mixer *a = &L->mla;
    uint32_t W = b->cfg->workers, heads = a->heads, two_step = a->q_a.source != MK_SRC_NONE, folded = a->qt.source != MK_SRC_NONE && !b->cfg->apart && !b->cfg->act_f32;
    uint32_t cs = mk_combine_slices(heads, a->latent, W), items = heads * cs, cw = a->latent / cs;
    if (R->have_mla && !mk_same_shape(b, "MLA", layer,
                                   R->mla->heads == heads && R->mla->latent == a->latent && R->mla->rope == a->rope &&
                                       R->mla->nope == a->nope && R->mla->v == a->v && R->mla->q_a.n == a->q_a.n))
        return;
    /* A factor on the rotated part of a score is one on k_pe. */
    mk_part kv[2] = {mk_whole(&a->kv_a), mk_whole(&a->kv_a)}, qt = mk_whole(&a->qt);
    mk_part q = folded ? mk_whole(&a->q_pe) : mk_read(b, mk_whole(&a->q), a->nope, a->nope + a->rope);
    mk_part qa = two_step ? mk_read(b, mk_whole(&a->q_a), a->q_a.n, 0) : q;
    mk_part *uk = calloc(heads, sizeof *uk), *uv = calloc(heads, sizeof *uv);
    uint32_t *st = calloc(items + 1, sizeof *st);
    uint32_t *cut = R->cut[0], *cut_q = R->cut[2], *cut_k = calloc(2 * (W + 1), sizeof *cut_k), *cut_v = calloc(W + 1, sizeof *cut_v);
    if (!uk || !uv || !st || !cut_k || !cut_v) {
        mk_fail_memory(b);
        goto done;
    }
    for (uint32_t h = 0; h < heads; h++) {
        uk[h] = (mk_part){.mat = &a->uk, .row0 = h * a->latent, .rows = a->latent, .in_off = h * (a->nope + a->rope)};
        uv[h] = mk_read(b, (mk_part){.mat = &a->uv, .row0 = h * a->v, .rows = a->v, .in_off = h * a->latent}, heads * a->v, 0);
    }
    uint32_t n_kv = a->rope && a->rope_scale != 1 ? 2 : 1;
    if (n_kv == 2) {
        kv[0].rows = kv[1].row0 = a->latent;
        kv[1].rows = a->rope;
        kv[1].scale = a->rope_scale;
    }
    const mk_part *g1[2] = {kv, &qa}, *gq[1] = {&q};
    uint32_t n1[2] = {n_kv, 1}, one[1] = {1};
    const char *why[4] = {NULL}; /* of the splits, until their phases are there */
    /* The last worker appends to the cache. Where kv and the queries come of one exchange, or q~ of the next, the partials would wait for it: so it has no rows of these, if others' share grows by less
     * than the 3 % that a phase may be uneven, and waits for kv from the layer's beginning on. Where the queries come two exchanges later it has time. */
    if ((two_step && !folded) || W < 33)
        mk_split(b, g1, n1, 2, cut);
    else
        split_but_last(b, g1, n1, 2, cut);
    why[0] = b->why;
    if (folded) {
        cut_q = cut_k + W + 1;
        split_folded(b, &qt, &q, heads, cut_k);
        why[1] = b->why;
    } else {
        mk_split(b, gq, one, 1, cut_q);
        why[1] = b->why;
        split_heads(b, uk, heads, cut_k); /* few models have a head for the last worker */
        why[2] = b->why;
    }
    split_heads(b, uv, heads, cut_v);
    why[3] = b->why;
    if (!R->have_mla) {
        R->have_mla = 1;
        R->mla = a;
        R->kv = mk_vec_split(b, "kv", mk_act(b), kv, n_kv, cut);
        if (two_step) R->qa = mk_vec_split(b, "qa", mk_act(b), &qa, 1, cut + W + 1);
        R->q = mk_vec_split(b, "q", mk_act(b), &q, 1, two_step ? cut_q : cut + W + 1);
        R->qt = mk_vec_split(b, "qt", mk_act(b), folded ? &qt : uk, folded ? 1 : heads, cut_k);
        R->kvc = mk_vec_bulk(b, "kvcache", 0, 1);
        R->part_id = mk_vec_bulk(b, "partial", (uint64_t)MK_MAX_ROWS * MK_MAX_SPLITS * heads * mk_partial_floats(a->latent) * 4, W);
        for (uint32_t i = 0; i <= items; i++) st[i] = i * cw;
        R->lat = mk_vec_packet(b, "lat", mk_act(b), 0, 0, st, items);
        R->v = mk_vec_split(b, "v", mk_act(b), uv, heads, cut_v);
    }
    uint32_t in_param = mk_norm_param(b, &L->in_norm), qa_pub = 0;
    uint32_t kv_pub = mk_pub(b, R->kv), q_pub = mk_pub(b, R->q), qt_pub = mk_pub(b, R->qt), kvc_pub = mk_pub(b, R->kvc);
    uint32_t part_pub = mk_pub(b, R->part_id), lat_pub = mk_pub(b, R->lat), v_pub = mk_pub(b, R->v);

    mk_gemv_spec s = {.in_vec = R->h, .in_pub = R->h_pub, .prologue = MK_PRO_RMS, .param_off = in_param, .eps = L->in_norm.eps};
    mk_phase_begin(b);
    s.out_vec = R->kv, s.out_pub = kv_pub;
    mk_emit_gemv(b, layer, kv, n_kv, cut, &s);
    if (two_step) {
        qa_pub = mk_pub(b, R->qa);
        s.out_vec = R->qa, s.out_pub = qa_pub;
    } else {
        s.out_vec = R->q, s.out_pub = q_pub;
    }
    mk_emit_gemv(b, layer, &qa, 1, cut + W + 1, &s);
    b->why = why[0];
    mk_phase_end(b, two_step ? "kv_a q_a" : "kv_a q", layer,
                 a->kv_a.n + qa.rows < 33 * W ? "few rows: one row is more than 3 % of a worker's share" : NULL);
    if (two_step) {
        mk_gemv_spec t = {.in_vec = R->qa, .in_pub = qa_pub, .prologue = MK_PRO_RMS, .param_off = mk_norm_param(b, &a->q_a_norm),
                          .eps = a->q_a_norm.eps, .out_vec = R->q, .out_pub = q_pub};
        mk_phase_begin(b);
        mk_emit_gemv(b, layer, &q, 1, cut_q, &t);
        if (folded) {
            t.out_vec = R->qt, t.out_pub = qt_pub;
            mk_emit_gemv(b, layer, &qt, 1, cut_k, &t);
        }
        b->why = why[1];
        mk_phase_end(b, folded ? "q_b uk" : "q_b", layer, q.rows + (folded ? qt.rows : 0) < 33 * W ? "few rows: one row is more than 3 % of a worker's share" : NULL);
    }

    mk_mla g = {.latent = (uint16_t)a->latent, .rope = (uint16_t)a->rope, .qk_stride = (uint16_t)((folded ? 0 : a->nope) + a->rope), .heads = (uint16_t)heads,
                .all_heads = heads, .scale = a->scale, .eps = a->kv_norm.eps, .rotary = a->rotary, .parts = W};
    g.cache = b->m->kv_cache;
    g.kv_off = (uint64_t)kv_index * b->cfg->kv_pages * mk_latent_row_bytes(a->latent, a->rope, g.cache, mk_act_bytes(b)) * MK_PAGE;
    g.param_off = mk_norm_param(b, &a->kv_norm);
    if (a->rotary) mk_param_values(b, a->inv_freq, a->rope / 2);

    mk_insn *in = mk_emit(b, W - 1, MK_OP_KV_APPEND, layer);
    in->mla = g;
    mk_wait_all(b, in, R->kv, kv_pub);
    mk_signal(in, R->kvc, kvc_pub, 0);
    if (!folded) {
        mk_gemv_spec k = {.in_vec = R->q, .in_pub = q_pub, .out_vec = R->qt, .out_pub = qt_pub};
        mk_phase_begin(b);
        mk_emit_gemv(b, layer, uk, heads, cut_k, &k);
        b->why = why[2];
        mk_phase_end(b, "uk", layer, heads <= W ? NULL : heads * a->latent < 33 * W ? "few rows: one row is more than 3 % of a worker's share" : NULL);
    }

    for (uint32_t w = 0; w < W; w++) {
        in = mk_emit(b, w, MK_OP_MLA_PARTIAL, layer);
        in->mla = g;
        in->mla.in_off = folded ? 0 : a->nope;
        in->mla.part = w;
        mk_wait_all(b, in, R->qt, qt_pub);
        mk_wait_all(b, in, R->q, q_pub);
        mk_wait_all(b, in, R->kvc, kvc_pub);
        mk_signal(in, R->part_id, part_pub, 0);
    }
    for (uint32_t i = 0; i < items; i++) {
        in = mk_emit(b, mk_start(i, W, items), MK_OP_COMBINE, layer);
        in->mla = g;
        in->mla.head0 = i / cs;
        in->mla.heads = 1;
        in->mla.first = i % cs * cw;
        in->mla.n = cw;
        mk_wait_all(b, in, R->part_id, part_pub);
        mk_signal(in, R->lat, lat_pub, i);
    }
    mk_phase_begin(b);
    mk_gemv_spec v = {.in_vec = R->lat, .in_pub = lat_pub, .out_vec = R->v, .out_pub = v_pub};
    mk_emit_gemv(b, layer, uv, heads, cut_v, &v);
    b->why = why[3];
    mk_phase_end(b, "uv", layer, heads <= W ? NULL : heads * a->v < 33 * W ? "few rows: one row is more than 3 % of a worker's share" : NULL);

    mk_part o = mk_whole(&a->o);
    uint32_t pub = mk_pub(b, R->h);
    mk_gemv_spec u = {.in_vec = R->v, .in_pub = v_pub, .epilogue = MK_EPI_ADD, .res_vec = R->h, .res_pub = R->h_pub, .out_vec = R->h, .out_pub = pub};
    mk_phase_begin(b);
    mk_emit_gemv(b, layer, &o, 1, R->h_cut, &u);
    mk_phase_end(b, "o", layer, mk_why_h);
    R->h_pub = pub;
done:
    free(uk), free(uv), free(st), free(cut_k), free(cut_v);
}

/* ---- feed-forward --------------------------------------------------------------------------------------------------- */

static void dense_layer(mk_builder *b, mk_roles *R, uint32_t layer)
{
    const mk_layer *L = &b->m->layer[layer];
    const mk_ffn_dense *d = &L->dense;
    if (R->have_dense && !mk_same_shape(b, "dense", layer, R->dense->inter == d->inter)) return;
    mk_part up = mk_read(b, (mk_part){.mat = &d->gate, .up = &d->up, .rows = d->inter}, d->inter, 0), down = mk_whole(&d->down);
    const mk_part *g[1] = {&up};
    uint32_t one[1] = {1};
    mk_split(b, g, one, 1, R->cut[0]);
    if (!R->have_dense) {
        R->have_dense = 1;
        R->dense = d;
        R->ffn = mk_vec_split(b, "ffn", mk_act(b), &up, 1, R->cut[0]);
    }
    uint32_t u_pub = mk_pub(b, R->ffn), pub = mk_pub(b, R->h);
    mk_gemv_spec s = {.in_vec = R->h, .in_pub = R->h_pub, .prologue = MK_PRO_RMS, .epilogue = MK_EPI_SILU,
                      .param_off = mk_norm_param(b, &L->post_norm), .eps = L->post_norm.eps, .out_vec = R->ffn, .out_pub = u_pub};
    mk_phase_begin(b);
    mk_emit_gemv(b, layer, &up, 1, R->cut[0], &s);
    mk_phase_end(b, "ffn up", layer, d->inter < 33 * b->cfg->workers ? "few rows: one row is more than 3 % of a worker's share" : NULL);
    mk_gemv_spec t = {.in_vec = R->ffn, .in_pub = u_pub, .epilogue = MK_EPI_ADD, .res_vec = R->h, .res_pub = R->h_pub, .out_vec = R->h, .out_pub = pub};
    mk_phase_begin(b);
    mk_emit_gemv(b, layer, &down, 1, R->h_cut, &t);
    mk_phase_end(b, "ffn down", layer, mk_why_h);
    R->h_pub = pub;
}

/* What a slice takes a worker beside its rows of gate or up, in such rows (measured: kimi-linear-48b's step takes 0.8 % more with a slice more a worker); and with more matrix rows than a warp has tiles
 * for, which are two sides, each with half the warps. */
#define SLICE_ROWS 3u
#define SIDES_ROWS 5u
/* Of the busiest worker, when k experts of `inter` rows are cut into T slices each and dealt round-robin. */
static uint32_t busiest(uint32_t k, uint32_t T, uint32_t inter, uint32_t W, uint32_t *load)
{
    uint32_t most = 0;
    memset(load, 0, W * sizeof *load);
    for (uint32_t i = 0; i < k * T; i++) {
        uint32_t t = i % T, rows = mk_expert_start(t + 1, inter, T) - mk_expert_start(t, inter, T), *l = &load[i % W];
        *l += rows + SLICE_ROWS + (2 * rows > MK_SIDE_ROWS ? SIDES_ROWS : 0);
        if (*l > most) most = *l;
    }
    return most;
}

/* Slices an expert: enough that one token's experts reach every worker (k T >= W: the validator's proof of buffer reuse needs it), then what the busiest worker is done with first; among cuts
 * within 0.5 % the coarsest. */
static uint32_t expert_slices(mk_builder *b, uint32_t k, uint32_t inter)
{
    uint32_t W = b->cfg->workers, lo = (W + k - 1) / k, best = 0, hi = 4 * W / k + 1, half = MK_SEGMENT_ROWS / 2;
    double best_load = INFINITY;
    uint32_t *load = calloc(W, sizeof *load);
    if (!load) {
        mk_fail_memory(b);
        return 1;
    }
    if (lo < (inter + half - 1) / half) lo = (inter + half - 1) / half;
    if (hi < lo) hi = lo;
    if (hi > inter) hi = inter;
    for (uint32_t T = lo; T <= hi; T++) {
        double l = busiest(k, T, inter, W, load);
        if (l < best_load * 0.995) {
            best_load = l;
            best = T;
        }
    }
    free(load);
    if (!best) {
        mk_fail(b->err, MK_E_CAPACITY, "%u workers are too many for %u experts a token of %u rows: at most %u", W, k, inter, k * inter);
        b->failed = 1;
        best = 1;
    }
    return best;
}

static uint32_t expert_segments(uint32_t T, uint32_t inter)
{
    uint32_t most = 1;
    for (uint32_t t = 0; t < T; t++) {
        uint32_t a = mk_expert_start(t, inter, T), n = mk_expert_start(t + 1, inter, T) - a, s = mk_segments(a % MK_SCALE_ROWS, n, MK_SCALE_ROWS);
        if (s > most) most = s;
    }
    return most;
}

/* ROUTER of one slice of h. mat: the router's matrix, transposed; gamma: of the norm, in floats. */
static void router_piece(mk_builder *b, const mk_roles *R, const struct piece *h, uint32_t slice, uint32_t layer, const mk_mat *mat, uint32_t gamma, uint32_t pub)
{
    mk_queue *q = &b->queue[h->w];
    mk_insn *in = mk_emit(b, h->w, MK_OP_ROUTER, layer);
    in->router = (mk_router){.first = h->first, .n = h->rows, .experts = mat->k, .param_off = gamma + h->first};
    mk_wait_slice(b, in, R->h, R->h_pub, slice);
    mk_signal(in, R->router, pub, 0);
    in->tape_bytes = (uint32_t)mk_segment_bytes(MK_W_BF16, h->rows, mat->k, 0, 0);
    mk_pack_push(b, &(mk_pack_item){.kind = MK_PACK_TAPE, .wtype = MK_W_BF16, .halves = 1, .mat = {mat, NULL}, .worker = h->w, .row0 = h->first, .rows = h->rows, .dst = in->tape_off});
    q->tape += in->tape_bytes;
    b->load[h->w] += in->tape_bytes;
}

static void moe_layer(mk_builder *b, mk_roles *R, uint32_t layer)
{
    const mk_layer *L = &b->m->layer[layer];
    const mk_moe *m = &L->moe;
    const mk_ffn_dense *sh = &m->shared;
    uint32_t W = b->cfg->workers, hidden = b->m->hidden, wt = m->gate.wtype, n_groups = sh->inter != 0;
    if (R->have_moe && !mk_same_shape(b, "MoE", layer,
                                   R->moe->experts == m->experts && R->moe->topk == m->topk && R->moe->inter == m->inter &&
                                       R->moe->shared.inter == sh->inter && R->moe->shared_gate.source == m->shared_gate.source))
        return;
    mk_part up = mk_read(b, (mk_part){.mat = &sh->gate, .up = &sh->up, .rows = sh->inter}, sh->inter, 0);
    mk_part gate = mk_whole(&m->shared_gate), down = mk_whole(&sh->down);
    int gated = sh->inter && m->shared_gate.source != MK_SRC_NONE;
    const mk_part *g[2] = {gated ? &gate : &up, &up};
    uint32_t n[2] = {1, 1}, *cut = R->cut[0], *up_cut = cut + gated * (W + 1);
    if (n_groups) mk_split(b, g, n, n_groups + gated, cut);
    const char *why = n_groups ? b->why : NULL;
    uint32_t h_slices = b->vec[R->h].nslice;
    if (!R->have_moe) {
        R->have_moe = 1;
        R->moe = m;
        R->T = expert_slices(b, m->topk, m->inter);
        if (b->failed) return;
        R->router = mk_vec_bulk(b, "router", mk_sums_bytes(m->experts), h_slices);
        b->vec[R->router].flags = MK_VEC_SUMS;
        R->route = mk_vec_local(b, "route", sizeof(mk_routes));
        if (sh->inter) {
            R->shared = mk_vec_split(b, "shared", mk_act(b), &up, 1, up_cut);
            if (gated) R->shared_gate = mk_vec_split(b, "shgate", MK_F32, &gate, 1, cut);
            R->acc = mk_vec_local(b, "acc", MK_MAX_ROWS * 4 * MK_SEGMENT_ROWS);
        }
        uint32_t *st = calloc((size_t)m->topk * R->T + 1, sizeof *st);
        if (!st) {
            mk_fail_memory(b);
            return;
        }
        for (uint32_t j = 0; j < m->topk; j++)
            for (uint32_t t = 0; t <= R->T; t++) st[j * R->T + t] = j * m->inter + mk_expert_start(t, m->inter, R->T);
        R->u = mk_vec_packet(b, "u", mk_act(b), 0, MK_VEC_DYNAMIC, st, m->topk * R->T);
        free(st);
    }
    uint32_t T = R->T, norm = mk_norm_param(b, &L->post_norm), bias = m->bias.tensor[0] ? mk_param(b, &m->bias, 0, m->experts) : 0;
    uint32_t r_pub = mk_pub(b, R->router), route_pub = mk_pub(b, R->route), u_pub = mk_pub(b, R->u), pub = mk_pub(b, R->h);
    uint32_t gate_pub = gated ? mk_pub(b, R->shared_gate) : 0, sh_pub = sh->inter ? mk_pub(b, R->shared) : 0, acc_pub = sh->inter ? mk_pub(b, R->acc) : 0;

    mk_part rows_of_h = {.mat = &m->down, .rows = hidden};
    struct pieces h = pieces_of(b, &rows_of_h, R->h_cut);
    mk_phase_begin(b);
    for (uint32_t i = 0; i < h.n; i++) router_piece(b, R, &h.v[i], i, layer, &m->router, norm, r_pub);
    mk_phase_end(b, "router", layer, mk_why_h);
    for (uint32_t w = 0; w < W; w++) {
        mk_insn *in = mk_emit(b, w, MK_OP_ROUTE, layer);
        in->route = (mk_route){.experts = (uint16_t)m->experts, .topk = (uint16_t)m->topk, .groups = (uint16_t)m->groups,
                               .topk_groups = (uint16_t)m->topk_groups, .score = m->score, .renorm = m->renorm,
                               .has_bias = m->bias.tensor[0] != 0, .scale = m->scale, .param_off = bias, .k = hidden, .norm_off = norm, .eps = L->post_norm.eps};
        mk_wait_all(b, in, R->h, R->h_pub);
        mk_wait_all(b, in, R->router, r_pub);
        mk_signal(in, R->route, route_pub, 0);
    }

    mk_gemv_spec s = {.in_vec = R->h, .in_pub = R->h_pub, .prologue = MK_PRO_RMS, .epilogue = MK_EPI_SILU, .param_off = norm,
                      .eps = L->post_norm.eps, .out_vec = R->shared, .out_pub = sh_pub};
    if (sh->inter) {
        mk_phase_begin(b);
        mk_emit_gemv(b, layer, &up, 1, up_cut, &s);
        mk_phase_end(b, "shared", layer, why ? why : "few rows: one row is more than 3 % of a worker's share");
    }

    /* expert region: up slices of all experts, then down slices */
    uint32_t up_seg = wt == MK_W_FP8 ? expert_segments(T, m->inter) : 0, up_rows = mk_expert_rows(m->inter, T);
    uint64_t up_slice = mk_segment_bytes(wt, 2 * up_rows, hidden, 2 * up_seg, 128), up_base = b->expert;
    b->expert += up_slice * T * m->experts;
    uint32_t dn_seg = 0, dn_rows = 0;
    for (uint32_t i = 0; i < h.n; i++) {
        uint32_t seg = mk_segments(h.v[i].first % MK_SCALE_ROWS, h.v[i].rows, MK_SCALE_ROWS);
        if (wt == MK_W_FP8 && seg > dn_seg) dn_seg = seg;
        if (h.v[i].rows > dn_rows) dn_rows = h.v[i].rows;
    }
    uint64_t dn_slice = mk_segment_bytes(wt, dn_rows, m->inter, dn_seg, 128), dn_base = b->expert;
    b->expert += dn_slice * h_slices * m->experts;
    for (uint32_t t = 0; t < T; t++) {
        uint32_t a = mk_expert_start(t, m->inter, T);
        mk_pack_push(b, &(mk_pack_item){.kind = MK_PACK_EXPERT, .wtype = (uint8_t)wt, .halves = 2, .mat = {&m->gate, &m->up}, .row0 = a,
                                        .rows = mk_expert_start(t + 1, m->inter, T) - a, .phase = a % MK_SCALE_ROWS, .nseg = up_seg,
                                        .experts = m->experts, .expert_stride = up_slice * T, .dst = up_base + t * up_slice});
    }

    mk_gemv_spec down_spec = {.in_vec = R->shared, .in_pub = sh_pub, .epilogue = MK_EPI_ADD, .res_vec = R->h, .res_pub = R->h_pub,
                              .out_vec = R->acc, .out_pub = acc_pub};
    if (gated) down_spec.epilogue = MK_EPI_GATED, down_spec.gate_vec = R->shared_gate, down_spec.gate_pub = gate_pub;
    mk_gemv_arg down_arg = {&down_spec, layer};
    for (uint32_t w = 0; w < W; w++) {
        mk_insn *in = mk_emit(b, w, MK_OP_EXPERT_UP, layer);
        in->expert = (mk_expert){.base = up_base, .expert_stride = up_slice * T, .slice_stride = (uint32_t)up_slice, .T = (uint16_t)T,
                                 .k = hidden, .inter = m->inter, .wtype = (uint8_t)wt, .nseg = (uint8_t)up_seg, .topk = (uint8_t)m->topk,
                                 .param_off = norm, .eps = L->post_norm.eps};
        mk_wait_all(b, in, R->h, R->h_pub);
        mk_wait_all(b, in, R->route, route_pub);
        mk_signal(in, R->u, u_pub, 0);
    }
    mk_phase_begin(b);
    for (uint32_t i = 0; i < m->topk * T; i++) {
        uint32_t t = i % T, rows = mk_expert_start(t + 1, m->inter, T) - mk_expert_start(t, m->inter, T);
        b->load[i % W] += 2ull * rows * hidden * (wt == MK_W_FP8 ? 1 : 2);
    }
    mk_phase_end(b, "expert up", layer, "slices of an expert are whole pairs of rows, if there are as many");

    mk_phase_begin(b);
    if (gated) { /* one row, wanted last of all: whose it is does not keep the others waiting for its share of u */
        s.flags = MK_GEMV_X_F32, s.epilogue = MK_EPI_STORE;
        s.out_vec = R->shared_gate, s.out_pub = gate_pub;
        mk_emit_gemv(b, layer, &gate, 1, cut, &s);
    }
    for (uint32_t slice = 0; slice < h.n; slice++) {
        uint32_t w = h.v[slice].w, row0 = h.v[slice].first, rows = h.v[slice].rows, phase = wt == MK_W_FP8 ? row0 % MK_SCALE_ROWS : 0;
        if (sh->inter) mk_emit_gemv_piece(b, w, &down, row0, rows, slice, &down_arg);
        mk_insn *in = mk_emit(b, w, MK_OP_EXPERT_DOWN, layer);
        in->expert = (mk_expert){.base = dn_base, .expert_stride = dn_slice * h_slices, .slice_stride = (uint32_t)dn_slice,
                                 .T = (uint16_t)h_slices, .t = (uint16_t)slice, .k = m->inter, .inter = m->inter, .n = (uint16_t)rows,
                                 .phase = (uint16_t)phase, .wtype = (uint8_t)wt, .nseg = (uint8_t)dn_seg, .topk = (uint8_t)m->topk};
        mk_wait_all(b, in, R->u, u_pub);
        mk_wait_all(b, in, R->route, route_pub);
        if (sh->inter)
            mk_wait_all(b, in, R->acc, acc_pub);
        else
            mk_wait_slice(b, in, R->h, R->h_pub, slice);
        mk_signal(in, R->h, pub, slice);
        mk_pack_push(b, &(mk_pack_item){.kind = MK_PACK_EXPERT, .wtype = (uint8_t)wt, .halves = 1, .mat = {&m->down, NULL}, .row0 = row0,
                                        .rows = rows, .phase = phase, .nseg = dn_seg, .experts = m->experts,
                                        .expert_stride = dn_slice * h_slices, .dst = dn_base + slice * dn_slice});
        b->load[w] += (uint64_t)rows * m->inter * m->topk * (wt == MK_W_FP8 ? 1 : 2);
    }
    free(h.v);
    mk_phase_end(b, "expert down", layer, mk_why_h);
    R->h_pub = pub;
}

/* ---- the step ------------------------------------------------------------------------------------------------------- */

static void embed_and_h(mk_builder *b, mk_roles *R)
{
    uint32_t hidden = b->m->hidden;
    mk_part p = {.mat = &b->m->embed, .rows = hidden, .read_dtype = MK_F32, .read_k = hidden};
    const mk_part *g[1] = {&p};
    uint32_t one[1] = {1};
    mk_split(b, g, one, 1, R->h_cut);
    R->h = mk_vec_split(b, "h", MK_F32, &p, 1, R->h_cut);
    R->h_pub = mk_pub(b, R->h);
    struct pieces h = pieces_of(b, &p, R->h_cut);
    for (uint32_t s = 0; s < h.n; s++) {
        mk_insn *in = mk_emit(b, h.v[s].w, MK_OP_EMBED, MK_NONE);
        in->embed = (mk_embed){.first = h.v[s].first, .n = h.v[s].rows, .hidden = hidden, .wtype = MK_BF16, .scale = b->m->embed_scale};
        mk_signal(in, R->h, R->h_pub, s);
    }
    mk_pack_push(b, &(mk_pack_item){.kind = MK_PACK_EMBED, .wtype = MK_W_BF16, .halves = 1, .mat = {&b->m->embed, NULL}, .rows = b->m->vocab});
    free(h.v);
}

/* The LM head's rows: the worker that schedules, the last one, has up to three pieces fewer than others, as long as that gives nobody another piece. When all have theirs, they wait for what it does alone,
 * which it rehearses while they are at it (schedule.cuh). Where workers are few or rows are, that would cost the others more than it saves them: 1 %. */
static void spare_scheduler(uint32_t *cut, uint32_t workers)
{
    const uint32_t rows = cut[workers], own_even = rows - cut[workers - 1], spared = 3 * MK_SEGMENT_ROWS, full = (own_even + MK_SEGMENT_ROWS - 1) / MK_SEGMENT_ROWS * MK_SEGMENT_ROWS;
    if (own_even < spared + MK_SEGMENT_ROWS || 100ull * spared > (uint64_t)rows * (workers - 1) / workers) return;
    const uint64_t most = (uint64_t)full * (workers - 1); /* that the others can have */
    uint32_t own = own_even - spared;
    if (rows > most + own) own = rows - (uint32_t)most;
    for (uint32_t w = 0; w < workers; w++) cut[w] = mk_start(w, rows - own, workers - 1);
}

static void head_and_sample(mk_builder *b, mk_roles *R)
{
    uint32_t W = b->cfg->workers, vocab = b->m->vocab, *cut = R->cut[0];
    mk_part p = mk_whole(&b->m->lm_head);
    const mk_part *g[1] = {&p};
    uint32_t one[1] = {1};
    mk_split(b, g, one, 1, cut);
    spare_scheduler(cut, W);
    struct pieces pc = pieces_of(b, &p, cut);
    uint32_t *st = calloc(pc.n + 1, sizeof *st);
    if (!st || b->failed) {
        mk_fail_memory(b);
        free(pc.v);
        free(st);
        return;
    }
    for (uint32_t i = 0; i <= pc.n; i++) st[i] = 4 * i;
    uint32_t stats = mk_vec_packet(b, "stats", MK_F32, 0, 0, st, pc.n);
    uint32_t logits = mk_vec_bulk(b, "logits", (uint64_t)MK_MAX_ROWS * vocab * 4, pc.n);
    uint32_t sampled = mk_vec_local(b, "sampled", sizeof(mk_sampled));
    uint32_t s_pub = mk_pub(b, stats), l_pub = mk_pub(b, logits), m_pub = mk_pub(b, sampled);
    uint32_t param = mk_norm_param(b, &b->m->final_norm), wt = b->m->lm_head.wtype;
    mk_phase_begin(b);
    for (uint32_t s = 0; s < pc.n; s++) {
        uint32_t w = pc.v[s].w, rows = pc.v[s].rows, row0 = pc.v[s].first;
        mk_queue *q = &b->queue[w];
        mk_insn *in = mk_emit(b, w, MK_OP_LM_HEAD, MK_NONE);
        mk_lm_head *l = &in->lm_head;
        *l = (mk_lm_head){.n = rows, .k = b->m->hidden, .row0 = row0, .vocab = vocab, .wtype = (uint8_t)wt, .scale_k = b->m->lm_head.scale_k, .param_off = param,
                          .eps = b->m->final_norm.eps, .logits_vec = (uint16_t)logits, .logits_pub = (uint16_t)l_pub};
        if (wt == MK_W_FP8) {
            l->phase = (uint16_t)(row0 % mk_scale_rows(l->scale_k));
            l->nseg = (uint16_t)mk_segments(l->phase, rows, l->scale_k);
        }
        mk_wait_all(b, in, R->h, R->h_pub);
        mk_signal(in, stats, s_pub, s);
        if (q->n > 1 && in[-1].opcode == MK_OP_LM_HEAD) in->flags |= MK_F_STAGED;
        in->tape_bytes = (uint32_t)mk_segment_bytes(wt, rows, l->k, l->nseg, l->scale_k);
        mk_pack_push(b, &(mk_pack_item){.kind = MK_PACK_TAPE, .wtype = (uint8_t)wt, .halves = 1, .mat = {&b->m->lm_head, NULL}, .worker = w,
                                        .row0 = row0, .rows = rows, .phase = l->phase, .nseg = l->nseg, .dst = in->tape_off});
        q->tape += in->tape_bytes;
        b->load[w] += (uint64_t)rows * l->k * (wt == MK_W_FP8 ? 1 : 2);
    }
    mk_phase_end(b, "lm_head", MK_NONE, vocab < 33 * W ? "few rows: one row is more than 3 % of a worker's share" : NULL);
    /* The last worker chooses and schedules: it is the one that has least to do when the next step begins, which it does a little later than the others (schedule.cuh). */
    mk_insn *in;
    for (uint32_t w = 0; w < W; w++) {
        in = mk_emit(b, w, MK_OP_SAMPLE, MK_NONE);
        in->sample = (mk_sample){.vocab = vocab, .slices = pc.n, .helper = (uint16_t)((w + 1) % W), .helpers = (uint16_t)(W - 1)};
        mk_wait_all(b, in, stats, s_pub);
        mk_wait_all(b, in, logits, l_pub);
        if (w == W - 1) mk_signal(in, sampled, m_pub, 0);
    }
    in = mk_emit(b, W - 1, MK_OP_SCHEDULE, MK_NONE);
    mk_wait_all(b, in, sampled, m_pub);
    free(pc.v);
    free(st);
}

void mk_plan_layers(mk_builder *b)
{
    mk_roles R;
    memset(&R, 0, sizeof R);
    uint32_t W = b->cfg->workers, kv_index = 0;
    uint32_t *mem = calloc((size_t)6 * (W + 1), sizeof *mem);
    if (!mem) {
        mk_fail_memory(b);
        return;
    }
    R.h_cut = mem;
    R.cut[0] = mem + (W + 1); /* three groups */
    R.cut[2] = mem + 4 * (W + 1);
    embed_and_h(b, &R);
    for (uint32_t l = 0; l < b->m->layers && !b->failed; l++) {
        const mk_layer *L = &b->m->layer[l];
        if (L->mixer == MK_MIX_DELTA)
            mk_plan_delta(b, &R, l);
        else if (L->mixer == MK_MIX_GQA)
            mk_plan_gqa(b, &R, l, kv_index++);
        else
            mla_layer(b, &R, l, kv_index++);
        if (b->failed) break;
        if (L->ffn == MK_FFN_DENSE)
            dense_layer(b, &R, l);
        else if (L->ffn == MK_FFN_MOE)
            moe_layer(b, &R, l);
    }
    if (!b->failed) head_and_sample(b, &R);
    mk_bytes_of(b->m, &b->plan->bytes);
    free(mem);
}
