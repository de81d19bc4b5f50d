/* Qwen3-Next, Qwen3.5 and Qwen3.6: gated delta nets (GDN) and gated attention, softmax-routed experts with a gated shared one, or dense.
 * Mathematics: models.md 3.1, 3.5, 3.6. Field names: the published config.json first, then those of transformers 5.17
 * (models/qwen3_next, qwen3_5, qwen3_5_moe). The ForConditionalGeneration checkpoints are read for their text part: the vision tower's
 * tensors and the layers that only draft (mtp) are skipped. */
#include <stdlib.h>
#include <string.h>

#include "host/arch.h"

typedef struct qwen {
    uint32_t hidden, layers, inter;
    float eps;
    uint32_t k_heads, v_heads, dk, dv, taps;
    mk_gqa_shape attention;
    mk_moe moe; /* dimensions; matrices are filled for each layer */
    uint32_t shared;
    int separate; /* in_proj_qkv, _z, _b, _a; else in_proj_qkvz and _ba, grouped by key head */
    uint8_t full[MK_MAX_LAYERS], sparse[MK_MAX_LAYERS];
} qwen;

/* ---- config --------------------------------------------------------------------------------------------------------- */

/* layer_types, or every full_attention_interval-th layer; or both, if they agree. */
static void read_mixers(mk_cfg *c, qwen *k)
{
    int have = mk_cfg_choices(c, "layer_types", "full_attention", "linear_attention", k->full, k->layers);
    uint32_t every = mk_cfg_int_or(c, "full_attention_interval", 1, MK_MAX_LAYERS, have ? 0 : 4);
    for (uint32_t i = 0; !c->rc && every && i < k->layers; i++) {
        uint8_t full = (i + 1) % every == 0;
        if (have && k->full[i] != full) mk_cfg_fail(c, "layer_types", "disagrees with full_attention_interval %u on layer %u (from 0)", every, i);
        k->full[i] = full;
    }
    k->k_heads = mk_cfg_int(c, "linear_num_key_heads", 1, 1024);
    k->v_heads = mk_cfg_int(c, "linear_num_value_heads", 1, 1024);
    k->dk = mk_cfg_16(c, "linear_key_head_dim", mk_cfg_int(c, "linear_key_head_dim", 16, 256));
    k->dv = mk_cfg_16(c, "linear_value_head_dim", mk_cfg_int(c, "linear_value_head_dim", 16, 256));
    k->taps = mk_cfg_int(c, "linear_conv_kernel_dim", 2, 8);
    if (!c->rc && k->v_heads % k->k_heads)
        mk_cfg_fail(c, "linear_num_value_heads", "is %u, expected a multiple of linear_num_key_heads (%u)", k->v_heads, k->k_heads);
    mk_cfg_expect(c, "attn_output_gate", "true");
    mk_cfg_expect(c, "output_gate_type", "\"silu\"|\"swish\"");
    mk_cfg_expect(c, "mamba_ssm_dtype", "\"float32\""); /* of the recurrent state: what we hold it in */
}

static void read_moe(mk_cfg *c, qwen *k, int moe)
{
    mk_moe *e = &k->moe;
    uint32_t dense[MK_MAX_LAYERS], n = mk_cfg_ints(c, "mlp_only_layers", 0, k->layers - 1, dense, MK_MAX_LAYERS);
    uint32_t step = mk_cfg_int_or(c, "decoder_sparse_step", 1, MK_MAX_LAYERS, 1);
    for (uint32_t i = 0; i < k->layers; i++) k->sparse[i] = moe && (i + 1) % step == 0;
    for (uint32_t i = 0; i < n; i++) k->sparse[dense[i]] = 0;
    int any_dense = 0;
    for (uint32_t i = 0; i < k->layers; i++) any_dense |= !k->sparse[i];
    k->inter = mk_cfg_int_or(c, "intermediate_size", 16, 1u << 20, 0);
    if (any_dense && !k->inter) mk_cfg_fail(c, "intermediate_size", "is missing");
    if (any_dense) mk_cfg_16(c, "intermediate_size", k->inter);
    if (!moe) return;
    e->experts = mk_cfg_int(c, "num_experts|num_local_experts", 1, MK_MAX_EXPERT);
    e->topk = mk_cfg_int(c, "num_experts_per_tok", 1, MK_MAX_TOPK);
    e->inter = mk_cfg_16(c, "moe_intermediate_size", mk_cfg_int(c, "moe_intermediate_size", 16, MK_MAX_WIDTH));
    k->shared = mk_cfg_16(c, "shared_expert_intermediate_size", mk_cfg_int(c, "shared_expert_intermediate_size", 16, MK_MAX_WIDTH));
    e->renorm = (uint8_t)mk_cfg_bool_or(c, "norm_topk_prob", 1);
    if (k->separate && !c->rc && !e->renorm) mk_cfg_fail(c, "norm_topk_prob", "is false, supported: true (weights are always renormalised)");
    e->groups = e->topk_groups = 1;
    e->score = MK_SCORE_SOFTMAX;
    e->scale = 1;
    if (!c->rc && e->topk > e->experts) mk_cfg_fail(c, "num_experts_per_tok", "is %u of %u experts", e->topk, e->experts);
}

static void read_text(mk_cfg *c, mk_model *m, qwen *k, int moe)
{
    m->hidden = k->hidden = mk_cfg_16(c, "hidden_size", mk_cfg_int(c, "hidden_size", 16, MK_MAX_WIDTH));
    m->layers = k->layers = mk_cfg_int(c, "num_hidden_layers", 1, MK_MAX_LAYERS);
    m->vocab = mk_cfg_int(c, "vocab_size", 2, 1u << 22);
    m->max_context = mk_cfg_int(c, "max_position_embeddings", 1, 1u << 24);
    k->eps = k->attention.eps = (float)mk_cfg_num(c, "rms_norm_eps", 1e-12, 1e-1);
    mk_cfg_expect(c, "hidden_act", "\"silu\"|\"swish\"");
    k->attention.gated = k->attention.normed = 1;
    mk_cfg_gqa(c, k->hidden, 0.25, &k->attention);
    read_mixers(c, k);
    read_moe(c, k, moe);
    mk_cfg_ignore(c, "mtp_num_hidden_layers|mtp_use_dedicated_embeddings|num_nextn_predict_layers"); /* drafting: not used here */
}

/* ---- tensors -------------------------------------------------------------------------------------------------------- */

static void rows_of(mk_mat *m, uint32_t n, uint32_t head_n, uint32_t off, uint32_t stride, uint32_t hidden, int keep, uint32_t l, const char *name)
{
    mk_mat_plain(m, n, hidden, keep, "model.layers.%u.linear_attn.%s", l, name);
    m->source = MK_SRC_HEAD_ROWS;
    m->head_n = head_n;
    m->head_off = off;
    m->head_stride = stride;
}

static void fill_delta(const qwen *k, uint32_t l, mk_delta_mixer *d)
{
    uint32_t h = k->hidden, K = k->k_heads * k->dk, V = k->v_heads * k->dv, r = k->v_heads / k->k_heads, C = 2 * K + V;
    d->heads = k->v_heads;
    d->k_heads = k->k_heads;
    d->dk = k->dk;
    d->dv = k->dv;
    d->taps = k->taps;
    d->decay = MK_DECAY_HEAD;
    d->gate = MK_GATE_SILU;
    d->o_eps = k->eps;
#define AT "model.layers.%u.linear_attn."
    if (k->separate) {
        rows_of(&d->q, K, K, 0, C, h, 0, l, "in_proj_qkv");
        rows_of(&d->k, K, K, K, C, h, 0, l, "in_proj_qkv");
        rows_of(&d->v, V, V, 2 * K, C, h, 0, l, "in_proj_qkv");
        mk_mat_plain(&d->z, V, h, 0, AT "in_proj_z", l);
        mk_mat_plain(&d->b, k->v_heads, h, 1, AT "in_proj_b", l);
        mk_mat_plain(&d->a, k->v_heads, h, 1, AT "in_proj_a", l);
    } else { /* grouped: [q k v v.. z z..] and [b.. a..] of a key head and its r value heads */
        uint32_t rv = r * k->dv, stride = 2 * k->dk + 2 * rv;
        rows_of(&d->q, K, k->dk, 0, stride, h, 0, l, "in_proj_qkvz");
        rows_of(&d->k, K, k->dk, k->dk, stride, h, 0, l, "in_proj_qkvz");
        rows_of(&d->v, V, rv, 2 * k->dk, stride, h, 0, l, "in_proj_qkvz");
        rows_of(&d->z, V, rv, 2 * k->dk + rv, stride, h, 0, l, "in_proj_qkvz");
        rows_of(&d->b, k->v_heads, r, 0, 2 * r, h, 1, l, "in_proj_ba");
        rows_of(&d->a, k->v_heads, r, r, 2 * r, h, 1, l, "in_proj_ba");
    }
    mk_mat_plain(&d->o, h, V, 0, AT "out_proj", l);
    mk_par_set(&d->conv_q, C * k->taps, AT "conv1d.weight", l);
    d->conv_k = d->conv_v = d->conv_q;
    d->conv_at[1] = K;
    d->conv_at[2] = 2 * K;
    mk_par_set(&d->a_log, k->v_heads, AT "A_log", l);
    mk_par_set(&d->dt_bias, k->v_heads, AT "dt_bias", l);
    mk_par_set(&d->o_norm, k->dv, AT "norm.weight", l);
#undef AT
}

/* One expert a tensor; the head fields say what a tensor of all experts would hold (MK_SRC_STACKED). */
static void fill_moe(const qwen *k, uint32_t l, mk_moe *e)
{
    static const char *const names[3] = {"gate_proj", "up_proj", "down_proj"};
    *e = k->moe;
    mk_fill_moe(e, k->hidden, 0, l, "mlp", names);
    e->bias.tensor[0] = 0;
    e->gate.head_stride = e->up.head_stride = 2 * e->inter;
    e->up.head_off = e->inter;
    e->down.head_stride = k->hidden;
    mk_fill_dense(&e->shared, k->hidden, k->shared, l, "mlp.shared_expert");
    mk_mat_plain(&e->shared_gate, 1, k->hidden, 1, "model.layers.%u.mlp.shared_expert_gate", l);
}

static int fill(mk_model *m, const qwen *k, mk_err *err)
{
    mk_fill_ends(m, k->eps);
    m->final_norm.gamma.add = 1;
    if (!(m->layer = calloc(m->layers, sizeof *m->layer))) return mk_fail(err, MK_E_SYSTEM, "out of memory");
    for (uint32_t l = 0; l < m->layers; l++) {
        mk_layer *y = &m->layer[l];
        mk_norm_set(&y->in_norm, k->hidden, k->eps, l, "input_layernorm");
        mk_norm_set(&y->post_norm, k->hidden, k->eps, l, "post_attention_layernorm");
        y->in_norm.gamma.add = y->post_norm.gamma.add = 1;
        y->mixer = k->full[l] ? MK_MIX_GQA : MK_MIX_DELTA;
        if (!k->full[l])
            fill_delta(k, l, &y->delta);
        else if (mk_fill_gqa(&k->attention, l, k->hidden, &y->gqa))
            return mk_fail(err, MK_E_SYSTEM, "out of memory");
        y->ffn = k->sparse[l] ? MK_FFN_MOE : MK_FFN_DENSE;
        if (k->sparse[l])
            fill_moe(k, l, &y->moe);
        else
            mk_fill_dense(&y->dense, k->hidden, k->inter, l, "mlp");
    }
    return MK_OK;
}

static void skip(mk_model *m, const char *prefix)
{
    snprintf(m->skipped[m->n_skipped++], MK_NAME, "%s", prefix);
}

/* The language model's fields are under text_config when there is one; ids of the whole may be there, too. */
static int read_any(mk_cfg *c, mk_model *m, mk_err *err, int moe, int separate)
{
    static const char *const ids[] = {"bos_token_id", "eos_token_id", "pad_token_id"};
    qwen *k = calloc(1, sizeof *k);
    mk_cfg t;
    if (!k) return mk_fail(err, MK_E_SYSTEM, "out of memory");
    k->separate = separate;
    if (separate && mk_cfg_object(c, "text_config", &t)) {
        json_t *tied = json_object_get(t.obj, "tie_word_embeddings");
        if (!json_object_get(c->obj, "tie_word_embeddings") && tied) json_object_set(c->obj, "tie_word_embeddings", tied);
        m->tied = (uint8_t)mk_cfg_bool_or(c, "tie_word_embeddings", 0);
        mk_cfg_expect(&t, "tie_word_embeddings", m->tied ? "true" : "false");
        mk_cfg_expect(&t, "model_type", moe ? "\"qwen3_5_moe_text\"" : "\"qwen3_5_text\"");
        mk_cfg_expect(&t, "dtype|torch_dtype", "\"bfloat16\"|\"float16\"|\"float32\"");
        for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
            json_t *v = json_object_get(t.obj, ids[i]), *outer = json_object_get(c->obj, ids[i]);
            const int inside = v && !json_is_null(v), outside = outer && !json_is_null(outer);
            if (inside && outside && !json_equal(v, outer)) mk_cfg_fail(&t, ids[i], "differs from the one outside of text_config");
            if (inside && !outside) json_object_set(c->obj, ids[i], v);
            mk_cfg_ignore(&t, ids[i]);
        }
        mk_cfg_ignore(&t, "initializer_range|use_cache|output_router_logits|router_aux_loss_coef|_name_or_path|transformers_version|"
                          "architectures|output_attentions|output_hidden_states|return_dict|attn_implementation");
        read_text(&t, m, k, moe);
        mk_cfg_done(&t, c);
        static const char *const media[] = {"image_token_id", "video_token_id"};
        for (size_t i = 0; i < sizeof media / sizeof *media; i++) {
            uint32_t v = mk_cfg_int_or(c, media[i], 0, UINT32_MAX - 1, UINT32_MAX);
            if (v != UINT32_MAX) m->media[m->n_media++] = v;
        }
        mk_cfg_ignore(c, "vision_config|vision_start_token_id|vision_end_token_id|language_model_only");
    } else {
        m->tied = (uint8_t)mk_cfg_bool_or(c, "tie_word_embeddings", 0);
        read_text(c, m, k, moe);
    }
    int rc = c->rc;
    if (!rc) {
        skip(m, "mtp.");
        if (separate) skip(m, "model.visual.");
        rc = fill(m, k, err);
    }
    free(k);
    return rc;
}

static int read_next(mk_cfg *c, mk_model *m, mk_err *err)
{
    return read_any(c, m, err, 1, 0);
}
static int read_5_moe(mk_cfg *c, mk_model *m, mk_err *err)
{
    return read_any(c, m, err, 1, 1);
}
static int read_5(mk_cfg *c, mk_model *m, mk_err *err)
{
    return read_any(c, m, err, 0, 1);
}

static const mk_alias aliases[] = {
    {".experts.%u.gate_proj.weight", ".experts.gate_up_proj"},
    {".experts.%u.up_proj.weight", ".experts.gate_up_proj"},
    {".experts.%u.down_proj.weight", ".experts.down_proj"},
    {NULL, NULL},
};

const mk_arch mk_arch_qwen3_next = {"Qwen3NextForCausalLM", "qwen3_next", read_next, aliases};
const mk_arch mk_arch_qwen3_5_moe = {"Qwen3_5MoeForCausalLM", "qwen3_5_moe_text|qwen3_5_moe", read_5_moe, aliases};
const mk_arch mk_arch_qwen3_5_moe_vl = {"Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", read_5_moe, aliases};
const mk_arch mk_arch_qwen3_5 = {"Qwen3_5ForCausalLM", "qwen3_5_text|qwen3_5", read_5, aliases};
const mk_arch mk_arch_qwen3_5_vl = {"Qwen3_5ForConditionalGeneration", "qwen3_5", read_5, aliases};
