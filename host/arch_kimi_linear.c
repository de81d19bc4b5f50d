/* Kimi-Linear: KDA and MLA without positions, sigmoid-routed experts. Mathematics: models.md 3.2, 3.3, 3.6. Field names: the published
 * config.json first, then those of transformers 5.17 (models/kimi_linear/configuration_kimi_linear.py). */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "host/arch.h"

#define MAX_LAYERS 1024u
#define MAX_WIDTH  65536u

/* transformers and the published code build the two latent norms with the default of their RMSNorm class, whatever rms_norm_eps says. */
#define LATENT_EPS 1e-6f

typedef struct kimi {
    uint32_t hidden, layers, inter;
    float eps;
    uint32_t kda_heads, kda_dim, taps;
    uint32_t heads, q_rank, latent, nope, rope, v;
    mk_moe moe; /* dimensions; matrices are filled for each layer */
    uint32_t shared;
    uint8_t full[MAX_LAYERS], sparse[MAX_LAYERS];
} kimi;

static uint32_t multiple_of_16(mk_cfg *c, const char *name, uint32_t v)
{
    if (!c->rc && v % 16) mk_cfg_fail(c, name, "is %u, expected a multiple of 16", v);
    return v;
}

/* ---- config --------------------------------------------------------------------------------------------------------- */

/* layer_types, or the 1-based lists kda_layers and full_attn_layers, which must name every layer once; or both, if they agree. */
static void read_mixers(mk_cfg *c, kimi *k)
{
    uint8_t types[MAX_LAYERS];
    int have_types = mk_cfg_choices(c, "layer_types", "full_attention", "linear_attention", types, k->layers);
    mk_cfg sub;
    int have_sub = mk_cfg_object(c, "linear_attn_config", &sub), have_lists = 0;
    uint32_t heads = 0, dim = 0, taps = 0;
    if (have_sub) {
        uint32_t list[2][MAX_LAYERS], n[2];
        uint8_t seen[MAX_LAYERS + 1] = {0};
        n[0] = mk_cfg_ints(&sub, "kda_layers", 1, k->layers, list[0], MAX_LAYERS);
        n[1] = mk_cfg_ints(&sub, "full_attn_layers", 1, k->layers, list[1], MAX_LAYERS);
        heads = mk_cfg_int(&sub, "num_heads", 1, 1024);
        dim = mk_cfg_int(&sub, "head_dim", 16, 256);
        taps = mk_cfg_int(&sub, "short_conv_kernel_size", 2, 8);
        have_lists = n[0] + n[1] > 0;
        for (int full = 0; !sub.rc && full < 2; full++)
            for (uint32_t i = 0; i < n[full]; i++) {
                uint32_t layer = list[full][i];
                if (seen[layer]++) mk_cfg_fail(&sub, full ? "full_attn_layers" : "kda_layers", "names layer %u (from 1) a second time", layer);
                k->full[layer - 1] = (uint8_t)full;
            }
        for (uint32_t i = 1; have_lists && !sub.rc && i <= k->layers; i++)
            if (!seen[i]) mk_cfg_fail(&sub, "kda_layers", "and full_attn_layers: layer %u (from 1) is in neither", i);
        mk_cfg_done(&sub, c);
    }
    if (!c->rc && !have_types && !have_lists) mk_cfg_fail(c, "linear_attn_config", "is missing: kda_layers and full_attn_layers (or layer_types)");
    for (uint32_t i = 0; have_types && !c->rc && i < k->layers; i++) {
        if (have_lists && types[i] != k->full[i])
            mk_cfg_fail(c, "layer_types", "disagrees with linear_attn_config on layer %u (from 0)", i);
        k->full[i] = types[i];
    }
    k->kda_heads = mk_cfg_int_or(c, "linear_num_heads", 1, 1024, heads);
    k->kda_dim = multiple_of_16(c, "linear_head_dim", mk_cfg_int_or(c, "linear_head_dim", 16, 256, dim));
    k->taps = mk_cfg_int_or(c, "linear_conv_kernel_dim", 2, 8, taps);
    if (!c->rc && have_sub && (k->kda_heads != heads || k->kda_dim != dim || k->taps != taps))
        mk_cfg_fail(c, "linear_attn_config", "(num_heads %u, head_dim %u, short_conv_kernel_size %u) disagrees with linear_num_heads %u, "
                    "linear_head_dim %u, linear_conv_kernel_dim %u", heads, dim, taps, k->kda_heads, k->kda_dim, k->taps);
    if (!c->rc && (!k->kda_heads || !k->kda_dim || !k->taps))
        mk_cfg_fail(c, "linear_attn_config", "is missing: num_heads, head_dim, short_conv_kernel_size");
}

/* mlp_layer_types, or first_k_dense_replace; or both, if they agree. */
static void read_ffns(mk_cfg *c, kimi *k)
{
    int have = mk_cfg_choices(c, "mlp_layer_types", "sparse", "dense", k->sparse, k->layers);
    uint32_t first = mk_cfg_int_or(c, "first_k_dense_replace", 0, k->layers, UINT32_MAX);
    if (!c->rc && !have && first == UINT32_MAX) mk_cfg_fail(c, "first_k_dense_replace", "is missing (or mlp_layer_types)");
    for (uint32_t i = 0; !c->rc && first != UINT32_MAX && i < k->layers; i++) {
        if (have && k->sparse[i] != (i >= first)) mk_cfg_fail(c, "mlp_layer_types", "disagrees with first_k_dense_replace on layer %u (from 0)", i);
        k->sparse[i] = i >= first;
    }
    mk_cfg_expect(c, "moe_layer_freq", "1");
}

static void read_moe(mk_cfg *c, kimi *k)
{
    mk_moe *e = &k->moe;
    e->experts = mk_cfg_int(c, "num_experts|num_local_experts", 1, MK_MAX_EXPERT);
    e->topk = mk_cfg_int(c, "num_experts_per_token|num_experts_per_tok", 1, MK_MAX_TOPK);
    e->inter = multiple_of_16(c, "moe_intermediate_size", mk_cfg_int(c, "moe_intermediate_size", 16, MAX_WIDTH));
    k->shared = mk_cfg_int_or(c, "num_shared_experts|n_shared_experts", 0, 64, 0);
    e->groups = mk_cfg_int_or(c, "num_expert_group|n_group", 1, MK_MAX_EXPERT, 1);
    e->topk_groups = mk_cfg_int_or(c, "topk_group", 1, MK_MAX_EXPERT, 1);
    e->renorm = (uint8_t)mk_cfg_bool_or(c, "moe_renormalize|norm_topk_prob", 1);
    e->scale = (float)mk_cfg_num(c, "routed_scaling_factor", 1e-6, 1e6);
    e->score = MK_SCORE_SIGMOID;
    mk_cfg_expect(c, "moe_router_activation_func", "\"sigmoid\"");
    int grouped = mk_cfg_bool_or(c, "use_grouped_topk", 1);
    if (c->rc) return;
    if (!grouped && e->groups > 1)
        mk_cfg_fail(c, "use_grouped_topk", "is false with num_expert_group %u, supported: true, or one group", e->groups);
    else if (e->experts % e->groups || e->topk_groups > e->groups)
        mk_cfg_fail(c, "num_expert_group", "%u with topk_group %u does not fit %u experts", e->groups, e->topk_groups, e->experts);
    else if (e->groups > 1 && e->experts / e->groups < 2)
        mk_cfg_fail(c, "num_expert_group", "is %u: a group's score is the sum of its two best, expected at least 2 experts a group", e->groups);
    else if (e->topk > e->experts / e->groups * e->topk_groups)
        mk_cfg_fail(c, "num_experts_per_token", "is %u, expected at most %u (the experts of topk_group groups)", e->topk,
                    e->experts / e->groups * e->topk_groups);
}

static void read_mla(mk_cfg *c, kimi *k)
{
    k->heads = mk_cfg_int(c, "num_attention_heads", 1, 1024);
    uint32_t kv = mk_cfg_int_or(c, "num_key_value_heads", 1, 1024, k->heads);
    if (!c->rc && kv != k->heads) mk_cfg_fail(c, "num_key_value_heads", "is %u, expected num_attention_heads (%u): latent attention has no groups", kv, k->heads);
    k->q_rank = multiple_of_16(c, "q_lora_rank", mk_cfg_int_or(c, "q_lora_rank", 16, MAX_WIDTH, 0));
    k->latent = multiple_of_16(c, "kv_lora_rank", mk_cfg_int(c, "kv_lora_rank", 16, 4096));
    k->nope = multiple_of_16(c, "qk_nope_head_dim", mk_cfg_int(c, "qk_nope_head_dim", 16, 512));
    k->rope = multiple_of_16(c, "qk_rope_head_dim", mk_cfg_int(c, "qk_rope_head_dim", 0, 256));
    k->v = multiple_of_16(c, "v_head_dim", mk_cfg_int(c, "v_head_dim", 16, 512));
    mk_cfg_expect(c, "mla_use_nope", "true"); /* the "rope" slice of q and k exists and is never rotated */
    mk_cfg_expect(c, "attention_bias", "false");
    mk_cfg_expect(c, "rope_scaling", "null");
    uint32_t qk = mk_cfg_int_or(c, "qk_head_dim", 16, 1024, k->nope + k->rope);
    if (!c->rc && qk != k->nope + k->rope) mk_cfg_fail(c, "qk_head_dim", "is %u, expected qk_nope_head_dim + qk_rope_head_dim = %u", qk, k->nope + k->rope);
    /* Nothing is rotated, and the head sizes are those above. */
    mk_cfg_ignore(c, "rope_theta|rope_parameters|head_dim|attention_dropout");
    mk_cfg_expect(c, "pretraining_tp", "1");
}

/* ---- tensors -------------------------------------------------------------------------------------------------------- */

static void norm_set(mk_norm *n, uint32_t width, float eps, uint32_t layer, const char *name)
{
    mk_par_set(&n->gamma, width, "model.layers.%u.%s.weight", layer, name);
    n->eps = eps;
}

static void fill_delta(const kimi *k, uint32_t l, mk_delta_mixer *d)
{
    uint32_t dim = k->kda_dim, all = k->kda_heads * dim, h = k->hidden;
    d->heads = d->k_heads = k->kda_heads;
    d->dk = d->dv = dim;
    d->taps = k->taps;
    d->decay = MK_DECAY_CHANNEL;
    d->o_eps = k->eps;
#define AT "model.layers.%u.self_attn."
    mk_mat_plain(&d->q, all, h, 0, AT "q_proj", l);
    mk_mat_plain(&d->k, all, h, 0, AT "k_proj", l);
    mk_mat_plain(&d->v, all, h, 0, AT "v_proj", l);
    mk_mat_plain(&d->o, h, all, 0, AT "o_proj", l);
    mk_mat_plain(&d->f_a, dim, h, 0, AT "f_a_proj", l);
    mk_mat_plain(&d->f_b, all, dim, 0, AT "f_b_proj", l);
    mk_mat_plain(&d->g_a, dim, h, 0, AT "g_a_proj", l);
    mk_mat_plain(&d->g_b, all, dim, 0, AT "g_b_proj", l);
    mk_mat_plain(&d->b, k->kda_heads, h, 1, AT "b_proj", l);
    mk_par_set(&d->conv_q, all * k->taps, AT "q_conv1d.weight", l);
    mk_par_set(&d->conv_k, all * k->taps, AT "k_conv1d.weight", l);
    mk_par_set(&d->conv_v, all * k->taps, AT "v_conv1d.weight", l);
    mk_par_set(&d->a_log, k->kda_heads, AT "A_log", l);
    mk_par_set(&d->dt_bias, all, AT "dt_bias", l);
    mk_par_set(&d->o_norm, dim, AT "o_norm.weight", l);
}

static void fill_mla(const kimi *k, uint32_t l, mk_mla_mixer *a)
{
    uint32_t h = k->hidden, q = k->heads * (k->nope + k->rope);
    a->heads = k->heads;
    a->nope = k->nope;
    a->rope = k->rope;
    a->v = k->v;
    a->latent = k->latent;
    a->scale = (float)(1.0 / sqrt((double)(k->nope + k->rope)));
    if (k->q_rank) {
        mk_mat_plain(&a->q_a, k->q_rank, h, 0, AT "q_a_proj", l);
        norm_set(&a->q_a_norm, k->q_rank, LATENT_EPS, l, "self_attn.q_a_layernorm");
        mk_mat_plain(&a->q, q, k->q_rank, 0, AT "q_b_proj", l);
    } else {
        mk_mat_plain(&a->q, q, h, 0, AT "q_proj", l);
    }
    mk_mat_plain(&a->kv_a, k->latent + k->rope, h, 0, AT "kv_a_proj_with_mqa", l);
    norm_set(&a->kv_norm, k->latent, LATENT_EPS, l, "self_attn.kv_a_layernorm");
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
}

static void fill_dense(mk_ffn_dense *f, uint32_t hidden, uint32_t inter, uint32_t l, const char *at)
{
    f->inter = inter;
    mk_mat_plain(&f->gate, inter, hidden, 0, "model.layers.%u.%s.gate_proj", l, at);
    mk_mat_plain(&f->up, inter, hidden, 0, "model.layers.%u.%s.up_proj", l, at);
    mk_mat_plain(&f->down, hidden, inter, 0, "model.layers.%u.%s.down_proj", l, at);
}

static void fill_moe(const kimi *k, uint32_t l, mk_moe *e)
{
    *e = k->moe;
#define AT "model.layers.%u.block_sparse_moe."
    mk_mat_plain(&e->router, e->experts, k->hidden, 1, AT "gate", l);
    mk_par_set(&e->bias, e->experts, AT "gate.e_score_correction_bias", l);
    mk_mat_plain(&e->gate, e->inter, k->hidden, 0, AT "experts.%%u.w1", l);
    mk_mat_plain(&e->up, e->inter, k->hidden, 0, AT "experts.%%u.w3", l);
    mk_mat_plain(&e->down, k->hidden, e->inter, 0, AT "experts.%%u.w2", l);
#undef AT
    if (k->shared) fill_dense(&e->shared, k->hidden, e->inter * k->shared, l, "block_sparse_moe.shared_experts");
}

static int read_kimi(mk_cfg *c, mk_model *m, mk_err *err)
{
    kimi *k = calloc(1, sizeof *k);
    if (!k) return mk_fail(err, MK_E_SYSTEM, "out of memory");
    m->hidden = k->hidden = multiple_of_16(c, "hidden_size", mk_cfg_int(c, "hidden_size", 16, MAX_WIDTH));
    m->layers = k->layers = mk_cfg_int(c, "num_hidden_layers", 1, MAX_LAYERS);
    m->vocab = mk_cfg_int(c, "vocab_size", 2, 1u << 22);
    m->max_context = mk_cfg_int(c, "model_max_length|max_position_embeddings", 1, 1u << 24);
    m->tied = (uint8_t)mk_cfg_bool_or(c, "tie_word_embeddings", 0);
    k->inter = multiple_of_16(c, "intermediate_size", mk_cfg_int(c, "intermediate_size", 16, 1u << 20));
    k->eps = (float)mk_cfg_num(c, "rms_norm_eps", 1e-12, 1e-1);
    mk_cfg_expect(c, "hidden_act", "\"silu\"|\"swish\"");
    uint32_t nextn = mk_cfg_int_or(c, "num_nextn_predict_layers", 0, 4, 0);
    read_mixers(c, k);
    read_ffns(c, k);
    read_moe(c, k);
    read_mla(c, k);
    int rc = c->rc;
    if (rc) goto done;

    for (m->n_skipped = 0; m->n_skipped < nextn; m->n_skipped++) /* layers that only draft: not used here */
        snprintf(m->skipped[m->n_skipped], MK_NAME, "model.layers.%u.", m->layers + m->n_skipped);
    mk_mat_plain(&m->embed, m->vocab, m->hidden, 1, "model.embed_tokens");
    mk_mat_plain(&m->lm_head, m->vocab, m->hidden, 1, m->tied ? "model.embed_tokens" : "lm_head");
    mk_par_set(&m->final_norm.gamma, m->hidden, "model.norm.weight");
    m->final_norm.eps = k->eps;
    m->embed_scale = 1;
    if (!(m->layer = calloc(m->layers, sizeof *m->layer))) {
        rc = mk_fail(err, MK_E_SYSTEM, "out of memory");
        goto done;
    }
    for (uint32_t l = 0; l < m->layers; l++) {
        mk_layer *y = &m->layer[l];
        norm_set(&y->in_norm, k->hidden, k->eps, l, "input_layernorm");
        norm_set(&y->post_norm, k->hidden, k->eps, l, "post_attention_layernorm");
        y->mixer = k->full[l] ? MK_MIX_MLA : MK_MIX_DELTA;
        if (k->full[l])
            fill_mla(k, l, &y->mla);
        else
            fill_delta(k, l, &y->delta);
        y->ffn = k->sparse[l] ? MK_FFN_MOE : MK_FFN_DENSE;
        if (k->sparse[l])
            fill_moe(k, l, &y->moe);
        else
            fill_dense(&y->dense, k->hidden, k->inter, l, "mlp");
    }
done:
    free(k);
    return rc;
}

/* Published names first; then what transformers calls the modules, in case a checkpoint was saved without its renaming. */
static const mk_alias aliases[] = {
    {".self_attn.f_a_proj.", ".self_attn.forget_gate.f_a_proj."},
    {".self_attn.f_b_proj.", ".self_attn.forget_gate.f_b_proj."},
    {".self_attn.A_log", ".self_attn.forget_gate.A_log"},
    {".self_attn.dt_bias", ".self_attn.forget_gate.dt_bias"},
    {".block_sparse_moe.", ".mlp."},
    {".mlp.", ".block_sparse_moe."},
    {NULL, NULL},
};

const mk_arch mk_arch_kimi_linear = {"KimiLinearForCausalLM", "kimi_linear", read_kimi, aliases};
