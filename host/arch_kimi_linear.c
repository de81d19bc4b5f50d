/* Kimi-Linear: KDA and MLA without positions, sigmoid-routed experts. Mathematics: models.md 3.2, 3.3, 3.6. Field names: the published
 * config.json first, then those of transformers 5.17 (models/kimi_linear/configuration_kimi_linear.py). */
#include <stdlib.h>
#include <string.h>

#include "host/arch.h"

typedef struct kimi {
    uint32_t hidden, layers, inter;
    float eps;
    uint32_t kda_heads, kda_dim, taps;
    mk_mla_shape mla;
    mk_moe moe; /* dimensions; matrices are filled for each layer */
    uint32_t shared;
    uint8_t full[MK_MAX_LAYERS], sparse[MK_MAX_LAYERS];
} kimi;

/* ---- config --------------------------------------------------------------------------------------------------------- */

/* layer_types, or the 1-based lists kda_layers and full_attn_layers, which must name every layer once; or both, if they agree. */
static void read_mixers(mk_cfg *c, kimi *k)
{
    uint8_t types[MK_MAX_LAYERS];
    int have_types = mk_cfg_choices(c, "layer_types", "full_attention", "linear_attention", types, k->layers);
    mk_cfg sub;
    int have_sub = mk_cfg_object(c, "linear_attn_config", &sub), have_lists = 0;
    uint32_t heads = 0, dim = 0, taps = 0;
    if (have_sub) {
        uint32_t list[2][MK_MAX_LAYERS], n[2];
        uint8_t seen[MK_MAX_LAYERS + 1] = {0};
        n[0] = mk_cfg_ints(&sub, "kda_layers", 1, k->layers, list[0], MK_MAX_LAYERS);
        n[1] = mk_cfg_ints(&sub, "full_attn_layers", 1, k->layers, list[1], MK_MAX_LAYERS);
        heads = mk_cfg_int(&sub, "num_heads", 1, 1024);
        dim = mk_cfg_int(&sub, "head_dim", 16, MK_SEGMENT_ROWS); /* a head's gates are a segment each */
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
    k->kda_dim = mk_cfg_16(c, "linear_head_dim", mk_cfg_int_or(c, "linear_head_dim", 16, MK_SEGMENT_ROWS, dim));
    k->taps = mk_cfg_int_or(c, "linear_conv_kernel_dim", 2, 8, taps);
    if (!c->rc && have_sub && (k->kda_heads != heads || k->kda_dim != dim || k->taps != taps))
        mk_cfg_fail(c, "linear_attn_config", "(num_heads %u, head_dim %u, short_conv_kernel_size %u) disagrees with linear_num_heads %u, "
                    "linear_head_dim %u, linear_conv_kernel_dim %u", heads, dim, taps, k->kda_heads, k->kda_dim, k->taps);
    if (!c->rc && (!k->kda_heads || !k->kda_dim || !k->taps))
        mk_cfg_fail(c, "linear_attn_config", "is missing: num_heads, head_dim, short_conv_kernel_size");
}

static void read_moe(mk_cfg *c, kimi *k)
{
    static const mk_moe_names names = {"num_experts|num_local_experts", "num_experts_per_token|num_experts_per_tok",
                                       "num_shared_experts|n_shared_experts", "num_expert_group|n_group", "moe_renormalize|norm_topk_prob"};
    mk_cfg_expect(c, "moe_router_activation_func", "\"sigmoid\"");
    int grouped = mk_cfg_bool_or(c, "use_grouped_topk", 1);
    mk_cfg_sigmoid_moe(c, &names, &k->moe, &k->shared);
    if (!c->rc && !grouped && k->moe.groups > 1)
        mk_cfg_fail(c, "use_grouped_topk", "is false with num_expert_group %u, supported: true, or one group", k->moe.groups);
}

static void read_mla(mk_cfg *c, kimi *k)
{
    mk_cfg_mla(c, &k->mla);
    mk_cfg_expect(c, "mla_use_nope", "true"); /* the "rope" slice of q and k exists and is never rotated */
    mk_cfg_expect(c, "rope_scaling", "null");
    /* Nothing is rotated, and the head sizes are those above. */
    mk_cfg_ignore(c, "rope_theta|rope_parameters|head_dim");
}

/* ---- tensors -------------------------------------------------------------------------------------------------------- */

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
#undef AT
}

static int read_kimi(mk_cfg *c, mk_model *m, mk_err *err)
{
    kimi *k = calloc(1, sizeof *k);
    if (!k) return mk_fail(err, MK_E_SYSTEM, "out of memory");
    m->hidden = k->hidden = mk_cfg_16(c, "hidden_size", mk_cfg_int(c, "hidden_size", 16, MK_MAX_WIDTH));
    m->layers = k->layers = mk_cfg_int(c, "num_hidden_layers", 1, MK_MAX_LAYERS);
    m->vocab = mk_cfg_int(c, "vocab_size", 2, 1u << 22);
    m->max_context = mk_cfg_int(c, "model_max_length|max_position_embeddings", 1, 1u << 24);
    m->tied = (uint8_t)mk_cfg_bool_or(c, "tie_word_embeddings", 0);
    k->inter = mk_cfg_16(c, "intermediate_size", mk_cfg_int(c, "intermediate_size", 16, 1u << 20));
    k->eps = (float)mk_cfg_num(c, "rms_norm_eps", 1e-12, 1e-1);
    mk_cfg_expect(c, "hidden_act", "\"silu\"|\"swish\"");
    uint32_t nextn = mk_cfg_int_or(c, "num_nextn_predict_layers", 0, 4, 0);
    read_mixers(c, k);
    mk_cfg_ffns(c, k->layers, UINT32_MAX, k->sparse);
    read_moe(c, k);
    read_mla(c, k);
    int rc = c->rc;
    if (rc) goto done;

    for (m->n_skipped = 0; m->n_skipped < nextn; m->n_skipped++) /* layers that only draft: not used here */
        snprintf(m->skipped[m->n_skipped], MK_NAME, "model.layers.%u.", m->layers + m->n_skipped);
    mk_fill_ends(m, k->eps);
    if (!(m->layer = calloc(m->layers, sizeof *m->layer))) {
        rc = mk_fail(err, MK_E_SYSTEM, "out of memory");
        goto done;
    }
    for (uint32_t l = 0; l < m->layers; l++) {
        mk_layer *y = &m->layer[l];
        mk_norm_set(&y->in_norm, k->hidden, k->eps, l, "input_layernorm");
        mk_norm_set(&y->post_norm, k->hidden, k->eps, l, "post_attention_layernorm");
        y->mixer = k->full[l] ? MK_MIX_MLA : MK_MIX_DELTA;
        if (k->full[l])
            mk_fill_mla(&k->mla, NULL, l, k->hidden, &y->mla);
        else
            fill_delta(k, l, &y->delta);
        y->ffn = k->sparse[l] ? MK_FFN_MOE : MK_FFN_DENSE;
        if (k->sparse[l]) {
            y->moe = k->moe;
            mk_fill_moe(&y->moe, k->hidden, k->shared, l, "block_sparse_moe", (const char *const[3]){"w1", "w3", "w2"});
        } else {
            mk_fill_dense(&y->dense, k->hidden, k->inter, l, "mlp");
        }
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
