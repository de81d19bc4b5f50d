/* What several architecture files read and fill alike: see host/arch.h. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "host/arch.h"

/* transformers and the published code build the two latent norms with the default of their RMSNorm class, whatever rms_norm_eps says. */
#define LATENT_EPS 1e-6f

uint32_t mk_cfg_16(mk_cfg *c, const char *names, uint32_t v)
{
    if (!c->rc && v % 16) mk_cfg_fail(c, names, "is %u, expected a multiple of 16", v);
    return v;
}

void mk_cfg_require(mk_cfg *c, const char *names)
{
    char name[64];
    for (const char *p = names; *p;) {
        size_t n = strcspn(p, "|");
        snprintf(name, sizeof name, "%.*s", (int)n, p);
        p += n + (p[n] == '|');
        const json_t *v = json_object_get(c->obj, name);
        if (!v || json_is_null(v)) mk_cfg_fail(c, name, "is missing");
    }
}

/* ---- config --------------------------------------------------------------------------------------------------------- */

void mk_cfg_ffns(mk_cfg *c, uint32_t layers, uint32_t absent, uint8_t *sparse)
{
    int have = mk_cfg_choices(c, "mlp_layer_types", "sparse", "dense", sparse, layers);
    uint32_t first = mk_cfg_int_or(c, "first_k_dense_replace", 0, layers, UINT32_MAX);
    if (!have && first == UINT32_MAX) first = absent;
    if (!c->rc && !have && first == UINT32_MAX) mk_cfg_fail(c, "first_k_dense_replace", "is missing (or mlp_layer_types)");
    for (uint32_t i = 0; !c->rc && first != UINT32_MAX && i < layers; i++) {
        if (have && sparse[i] != (i >= first)) mk_cfg_fail(c, "mlp_layer_types", "disagrees with first_k_dense_replace on layer %u (from 0)", i);
        sparse[i] = i >= first;
    }
    mk_cfg_expect(c, "moe_layer_freq", "1");
}

void mk_cfg_sigmoid_moe(mk_cfg *c, const mk_moe_names *n, mk_moe *e, uint32_t *shared)
{
    e->experts = mk_cfg_int(c, n->experts, 1, MK_MAX_EXPERT);
    e->topk = mk_cfg_int(c, n->topk, 1, MK_MAX_TOPK);
    e->inter = mk_cfg_16(c, "moe_intermediate_size", mk_cfg_int(c, "moe_intermediate_size", 16, MK_MAX_WIDTH));
    *shared = mk_cfg_int_or(c, n->shared, 0, 64, 0);
    if (!c->rc && *shared * e->inter > MK_MAX_WIDTH) mk_cfg_fail(c, n->shared, "times moe_intermediate_size is %u, expected at most %u", *shared * e->inter, MK_MAX_WIDTH);
    e->groups = mk_cfg_int_or(c, n->groups, 1, MK_MAX_EXPERT, 1);
    e->topk_groups = mk_cfg_int_or(c, "topk_group", 1, MK_MAX_EXPERT, 1);
    e->renorm = (uint8_t)mk_cfg_bool_or(c, n->renorm, 1);
    e->scale = (float)mk_cfg_num(c, "routed_scaling_factor", 1e-6, 1e6);
    e->score = MK_SCORE_SIGMOID;
    char groups[64], topk[64]; /* the published spellings */
    snprintf(groups, sizeof groups, "%.*s", (int)strcspn(n->groups, "|"), n->groups);
    snprintf(topk, sizeof topk, "%.*s", (int)strcspn(n->topk, "|"), n->topk);
    if (c->rc) return;
    if (e->experts % e->groups || e->topk_groups > e->groups)
        mk_cfg_fail(c, groups, "%u with topk_group %u does not fit %u experts", e->groups, e->topk_groups, e->experts);
    else if (e->groups > 1 && e->experts / e->groups < 2)
        mk_cfg_fail(c, groups, "is %u: a group's score is the sum of its two best, expected at least 2 experts a group", e->groups);
    else if (e->topk > e->experts / e->groups * e->topk_groups)
        mk_cfg_fail(c, topk, "is %u, expected at most %u (the experts of topk_group groups)", e->topk, e->experts / e->groups * e->topk_groups);
}

void mk_cfg_mla(mk_cfg *c, mk_mla_shape *k)
{
    k->heads = mk_cfg_int(c, "num_attention_heads", 1, 1024);
    uint32_t kv = mk_cfg_int_or(c, "num_key_value_heads", 1, 1024, k->heads);
    if (!c->rc && kv != k->heads) mk_cfg_fail(c, "num_key_value_heads", "is %u, expected num_attention_heads (%u): latent attention has no groups", kv, k->heads);
    k->q_rank = mk_cfg_16(c, "q_lora_rank", mk_cfg_int_or(c, "q_lora_rank", 16, MK_MAX_WIDTH, 0));
    k->latent = mk_cfg_16(c, "kv_lora_rank", mk_cfg_int(c, "kv_lora_rank", 16, 4096));
    k->nope = mk_cfg_16(c, "qk_nope_head_dim", mk_cfg_int(c, "qk_nope_head_dim", 16, 512));
    k->rope = mk_cfg_16(c, "qk_rope_head_dim", mk_cfg_int(c, "qk_rope_head_dim", 0, 256));
    k->v = mk_cfg_16(c, "v_head_dim", mk_cfg_int(c, "v_head_dim", 16, 512));
    uint32_t qk = mk_cfg_int_or(c, "qk_head_dim", 16, 1024, k->nope + k->rope);
    if (!c->rc && qk != k->nope + k->rope) mk_cfg_fail(c, "qk_head_dim", "is %u, expected qk_nope_head_dim + qk_rope_head_dim = %u", qk, k->nope + k->rope);
    mk_cfg_expect(c, "attention_bias", "false");
    mk_cfg_expect(c, "pretraining_tp", "1");
    mk_cfg_ignore(c, "attention_dropout");
}

/* ---- tensors -------------------------------------------------------------------------------------------------------- */

void mk_norm_set(mk_norm *n, uint32_t width, float eps, uint32_t layer, const char *name)
{
    mk_par_set(&n->gamma, width, "model.layers.%u.%s.weight", layer, name);
    n->eps = eps;
}

int mk_fill_mla(const mk_mla_shape *k, const mk_rope *rope, uint32_t l, uint32_t hidden, mk_mla_mixer *a)
{
#define AT "model.layers.%u.self_attn."
    uint32_t h = hidden, q = k->heads * (k->nope + k->rope);
    a->heads = k->heads;
    a->nope = k->nope;
    a->rope = k->rope;
    a->v = k->v;
    a->latent = k->latent;
    a->scale = (float)(1.0 / sqrt((double)(k->nope + k->rope)));
    a->rope_scale = 1;
    if (k->q_rank) {
        mk_mat_plain(&a->q_a, k->q_rank, h, 0, AT "q_a_proj", l);
        mk_norm_set(&a->q_a_norm, k->q_rank, LATENT_EPS, l, "self_attn.q_a_layernorm");
        mk_mat_plain(&a->q, q, k->q_rank, 0, AT "q_b_proj", l);
    } else {
        mk_mat_plain(&a->q, q, h, 0, AT "q_proj", l);
    }
    mk_mat_plain(&a->kv_a, k->latent + k->rope, h, 0, AT "kv_a_proj_with_mqa", l);
    mk_norm_set(&a->kv_norm, k->latent, LATENT_EPS, l, "self_attn.kv_a_layernorm");
    mk_mat_plain(&a->uk, k->heads * k->latent, k->nope, 0, AT "kv_b_proj", l);
    a->uk.source = MK_SRC_HEAD_T;
    a->uk.head_n = k->nope;
    mk_mat_plain(&a->uv, k->heads * k->v, k->latent, 0, AT "kv_b_proj", l);
    a->uv.source = MK_SRC_HEAD_ROWS;
    a->uv.head_n = k->v;
    a->uv.head_off = k->nope;
    a->uk.head_stride = a->uv.head_stride = k->nope + k->v;
    mk_mat_plain(&a->o, h, k->heads * k->v, 0, AT "o_proj", l);
#undef AT
    if (!rope || !k->rope) return MK_OK;
    a->scale = (float)(1.0 / sqrt((double)(k->nope + k->rope)) * rope->mscale * rope->mscale);
    a->rope_scale = (float)(rope->attention * rope->attention);
    a->rotary = 1;
    if (!(a->inv_freq = malloc(k->rope / 2 * sizeof *a->inv_freq))) return MK_E_SYSTEM;
    memcpy(a->inv_freq, rope->inv_freq, k->rope / 2 * sizeof *a->inv_freq);
    return MK_OK;
}

void mk_fill_dense(mk_ffn_dense *f, uint32_t hidden, uint32_t inter, uint32_t l, const char *at)
{
    f->inter = inter;
    mk_mat_plain(&f->gate, inter, hidden, 0, "model.layers.%u.%s.gate_proj", l, at);
    mk_mat_plain(&f->up, inter, hidden, 0, "model.layers.%u.%s.up_proj", l, at);
    mk_mat_plain(&f->down, hidden, inter, 0, "model.layers.%u.%s.down_proj", l, at);
}

void mk_fill_moe(mk_moe *e, uint32_t hidden, uint32_t shared, uint32_t l, const char *at, const char *const names[3])
{
    char name[64];
    mk_mat_plain(&e->router, hidden, e->experts, 1, "model.layers.%u.%s.gate", l, at); /* transposed: ROUTER has columns */
    e->router.source = MK_SRC_HEAD_T;
    e->router.keep_bf16 = 2;
    e->router.head_n = e->router.head_stride = e->experts;
    mk_par_set(&e->bias, e->experts, "model.layers.%u.%s.gate.e_score_correction_bias", l, at);
    mk_mat_plain(&e->gate, e->inter, hidden, 0, "model.layers.%u.%s.experts.%%u.%s", l, at, names[0]);
    mk_mat_plain(&e->up, e->inter, hidden, 0, "model.layers.%u.%s.experts.%%u.%s", l, at, names[1]);
    mk_mat_plain(&e->down, hidden, e->inter, 0, "model.layers.%u.%s.experts.%%u.%s", l, at, names[2]);
    snprintf(name, sizeof name, "%s.shared_experts", at);
    if (shared) mk_fill_dense(&e->shared, hidden, e->inter * shared, l, name);
}

void mk_fill_ends(mk_model *m, float eps)
{
    mk_mat_plain(&m->embed, m->vocab, m->hidden, 2, "model.embed_tokens");
    mk_mat_plain(&m->lm_head, m->vocab, m->hidden, 1, m->tied ? "model.embed_tokens" : "lm_head");
    mk_par_set(&m->final_norm.gamma, m->hidden, "model.norm.weight");
    m->final_norm.eps = eps;
    m->embed_scale = 1;
}
