/* Layers of grouped-query attention.
 *
 *   [q (gate) | k | v] -> GQA_APPEND per KV head -> GQA_PARTIAL -> COMBINE per head and slice of it (gate) -> o (+ h)
 */
#include "host/planner_internal.h"

#include <stdlib.h>
#include <string.h>

uint32_t mk_combine_slices(uint32_t heads, uint32_t width, uint32_t workers)
{
    uint32_t s = 1; /* the kernel adds four channels at a time */
    while (heads * 2 * s <= workers && width % (8 * s) == 0 && width / (2 * s) >= 16) s *= 2;
    return s;
}

/* How a row is cut: not at all while a KV head has 64 KB of keys and values (or a page), then into about as many items as an H200 has SMs. Of the model alone: a row's bits do not depend on the number of
 * workers. */
static void gqa_splits(uint32_t kv_heads, uint32_t dim, uint8_t *grain, uint8_t *most)
{
    uint32_t n = 2 * MK_MAX_SPLITS / kv_heads;
    *grain = dim <= 64 ? 2 : dim <= 128 ? 1 : 0;
    *most = (uint8_t)(n > MK_MAX_SPLITS ? MK_MAX_SPLITS : n < 2 ? 2 : n);
}

/* Workers that share the items: those with rows of h, if no row has more items, because others have little to do between one attention and the next, and a controller that is
 * that near cannot prepare it (plans.cuh, `spaced`). */
static uint32_t gqa_parts(const mk_builder *b, const mk_roles *R, uint32_t kv_heads, uint32_t most)
{
    uint32_t W = b->cfg->workers, n = W;
    while (n > 1 && R->h_cut[n] == R->h_cut[n - 1]) n--;
    return most * kv_heads <= n ? n : W;
}

/* While a row has one split, worker i attends to KV head i and all others wait for it. It has no rows of q, k and v, then, if that leaves the others few more each:
 * it waits for theirs with everything else asked for and done. Nor has the last worker, which chooses the token and begins a step a little later. */
static void split_qkv(mk_builder *b, const mk_part *const *parts, const uint32_t *n_parts, const mk_gqa_mixer *a, uint32_t *cut)
{
    const mk_plan_config *cfg = b->cfg;
    mk_plan_config fewer = *cfg;
    uint32_t W = cfg->workers, rows = a->q.n + a->k.n + a->v.n;
    if (a->gated || 16 * a->kv_heads > W || rows >= 33 * W) {
        mk_split(b, parts, n_parts, 1, cut);
        return;
    }
    fewer.workers = W - a->kv_heads - 1;
    b->cfg = &fewer;
    mk_split(b, parts, n_parts, 1, cut + a->kv_heads);
    cut[W] = cut[W - 1];
    b->cfg = cfg;
    memset(cut, 0, a->kv_heads * sizeof *cut);
}

void mk_plan_gqa(mk_builder *b, mk_roles *R, uint32_t layer, uint32_t kv_index)
{
    const mk_layer *L = &b->m->layer[layer];
    const mk_gqa_mixer *a = &L->gqa;
    uint32_t W = b->cfg->workers, heads = a->heads, dim = a->dim, *cut = R->cut[0];
    uint32_t cs = mk_combine_slices(heads, dim, W), items = heads * cs, cw = dim / cs;
    if (R->have_gqa && !mk_same_shape(b, "attention", layer,
                                      R->gqa->heads == heads && R->gqa->kv_heads == a->kv_heads && R->gqa->dim == dim &&
                                          R->gqa->rope == a->rope && R->gqa->gated == a->gated))
        return;
    mk_part qkv[3] = {mk_whole(&a->q), mk_whole(&a->k), mk_whole(&a->v)}, o = mk_whole(&a->o);
    const mk_part *g1[1] = {qkv};
    uint32_t n1[1] = {3};
    split_qkv(b, g1, n1, a, cut);
    uint8_t grain, most;
    gqa_splits(a->kv_heads, dim, &grain, &most);
    const uint32_t parts = gqa_parts(b, R, a->kv_heads, most);
    if (!R->have_gqa) {
        R->have_gqa = 1;
        R->gqa = a;
        uint32_t *st = calloc(items + 1, sizeof *st);
        if (!st) {
            mk_fail_memory(b);
            return;
        }
        for (uint32_t i = 0; i <= items; i++) st[i] = i * cw;
        R->gqa_qkv = mk_vec_split(b, "attn qkv", mk_act(b), qkv, 3, cut);
        R->gqa_cache = mk_vec_bulk(b, "kvcache", 0, a->kv_heads);
        R->gqa_part = mk_vec_bulk(b, "partial", (uint64_t)MK_MAX_ROWS * MK_MAX_SPLITS * heads * mk_partial_floats(dim) * 4, parts);
        R->gqa_o = mk_vec_packet(b, "attn o", mk_act(b), 0, 0, st, items);
        free(st);
    }
    uint32_t qkv_pub = mk_pub(b, R->gqa_qkv), cache_pub = mk_pub(b, R->gqa_cache), part_pub = mk_pub(b, R->gqa_part);
    uint32_t o_pub = mk_pub(b, R->gqa_o), pub = mk_pub(b, R->h), in_param = mk_norm_param(b, &L->in_norm);

    mk_gemv_spec s = {.in_vec = R->h, .in_pub = R->h_pub, .prologue = MK_PRO_RMS, .param_off = in_param, .eps = L->in_norm.eps,
                      .out_vec = R->gqa_qkv, .out_pub = qkv_pub};
    mk_phase_begin(b);
    mk_emit_gemv(b, layer, qkv, 3, cut, &s);
    mk_phase_end(b, "attn qkv", layer,
                 a->q.n + a->k.n + a->v.n < 33 * W ? "few rows: one row is more than 3 % of a worker's share" : NULL);

    mk_gqa g = {.heads = (uint16_t)heads, .kv_heads = (uint16_t)a->kv_heads, .dim = (uint16_t)dim, .rope = (uint16_t)a->rope};
    g.kv_off = (uint64_t)kv_index * b->cfg->kv_pages * mk_gqa_page_values(a->kv_heads, dim) * mk_act_bytes(b);
    mk_gqa kg = g, qg = g;
    kg.k_off = a->q.n;
    kg.v_off = a->q.n + a->k.n;
    kg.norm = a->k_norm.gamma.tensor[0] != 0;
    kg.eps = a->k_norm.eps;
    kg.param_off = kg.norm ? mk_norm_param(b, &a->k_norm) : (uint32_t)b->param;
    mk_param_values(b, a->inv_freq, a->rope / 2);
    qg.q_stride = a->q.n / heads;
    qg.norm = a->q_norm.gamma.tensor[0] != 0;
    qg.eps = a->q_norm.eps;
    qg.param_off = qg.norm ? mk_norm_param(b, &a->q_norm) : (uint32_t)b->param;
    mk_param_values(b, a->inv_freq, a->rope / 2);
    qg.scale = a->scale;
    qg.parts = parts;
    qg.grain = grain;
    qg.most = most;

    for (uint32_t i = 0; i < a->kv_heads; i++) { /* the last workers: no others have fewer items of the partials, which wait for them in a step of several rows */
        mk_insn *in = mk_emit(b, a->kv_heads <= W ? W - a->kv_heads + i : mk_start(i, W, a->kv_heads), MK_OP_GQA_APPEND, layer);
        in->gqa = kg;
        in->gqa.head = (uint16_t)i;
        mk_wait_values(b, in, R->gqa_qkv, qkv_pub, kg.k_off + i * dim, kg.v_off - kg.k_off + dim);
        mk_signal(in, R->gqa_cache, cache_pub, 0);
    }
    for (uint32_t w = 0; w < parts; w++) {
        mk_insn *in = mk_emit(b, w, MK_OP_GQA_PARTIAL, layer);
        in->gqa = qg;
        in->gqa.part = w;
        mk_wait_all(b, in, R->gqa_qkv, qkv_pub); /* the newest key and value, too: attention.cuh takes them from here in a step of one row */
        mk_wait_all(b, in, R->gqa_cache, cache_pub);
        mk_signal(in, R->gqa_part, part_pub, 0);
    }
    for (uint32_t i = 0; i < items; i++) {
        mk_insn *in = mk_emit(b, mk_start(i, W, items), MK_OP_COMBINE, layer);
        in->mla = (mk_mla){.kv_off = g.kv_off, .head0 = i / cs, .heads = 1, .latent = (uint16_t)dim, .all_heads = heads, .parts = parts,
                           .grain = qg.grain, .most = qg.most, .first = i % cs * cw, .n = cw};
        mk_wait_all(b, in, R->gqa_part, part_pub);
        if (a->gated) {
            in->mla.gate = 1;
            in->mla.in_off = dim;
            in->mla.qk_stride = (uint16_t)qg.q_stride;
            mk_wait_values(b, in, R->gqa_qkv, qkv_pub, in->mla.in_off + in->mla.head0 * qg.q_stride + in->mla.first, cw);
        }
        mk_signal(in, R->gqa_o, o_pub, i);
    }

    mk_gemv_spec u = {.in_vec = R->gqa_o, .in_pub = o_pub, .epilogue = MK_EPI_ADD, .res_vec = R->h, .res_pub = R->h_pub, .out_vec = R->h, .out_pub = pub};
    mk_phase_begin(b);
    mk_emit_gemv(b, layer, &o, 1, R->h_cut, &u);
    mk_phase_end(b, "attn o", layer, mk_why_h);
    R->h_pub = pub;
}
