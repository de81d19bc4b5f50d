/* DeepSeek-V3, Moonlight, Kimi-K2 (deepseek_v3) and GLM-4.7-Flash (glm4_moe_lite): latent attention with rotation, sigmoid-routed experts.
 * Mathematics: models.md 3.3, 3.6. Field names: the published config.json and those of transformers 5.17 (models/deepseek_v3,
 * models/glm4_moe_lite). The two differ in defaults of fields only. */
#include <stdlib.h>
#include <string.h>

#include "host/arch.h"

static int read_mla_moe(mk_cfg *c, mk_model *m, mk_err *err)
{
    static const mk_moe_names names = {"n_routed_experts|num_local_experts", "num_experts_per_tok", "n_shared_experts", "n_group", "norm_topk_prob"};
    static const char *const ffn[3] = {"gate_proj", "up_proj", "down_proj"};
    int glm = !strcmp(m->arch, "Glm4MoeLiteForCausalLM"), rc;
    uint8_t *sparse = calloc(MK_MAX_LAYERS, 1);
    if (!sparse) return mk_fail(err, MK_E_SYSTEM, "out of memory");

    mk_mla_shape shape = {0};
    mk_moe moe = {0};
    mk_rope rope;
    uint32_t shared;
    mk_cfg_require(c, "n_shared_experts|n_group|topk_group|norm_topk_prob"); /* the classes' defaults are one checkpoint's values */
    m->hidden = mk_cfg_16(c, "hidden_size", mk_cfg_int(c, "hidden_size", 16, MK_MAX_WIDTH));
    m->layers = mk_cfg_int(c, "num_hidden_layers", 1, MK_MAX_LAYERS);
    m->vocab = mk_cfg_int(c, "vocab_size", 2, 1u << 22);
    m->max_context = mk_cfg_int(c, "max_position_embeddings", 1, 1u << 24);
    m->tied = (uint8_t)mk_cfg_bool_or(c, "tie_word_embeddings", 0);
    uint32_t inter = mk_cfg_16(c, "intermediate_size", mk_cfg_int(c, "intermediate_size", 16, 1u << 20));
    float eps = (float)mk_cfg_num(c, "rms_norm_eps", 1e-12, 1e-1);
    uint32_t nextn = mk_cfg_int_or(c, "num_nextn_predict_layers|num_mtp_layers", 0, 4, 0);
    mk_cfg_expect(c, "hidden_act", "\"silu\"|\"swish\"");
    mk_cfg_ffns(c, m->layers, glm ? 1 : UINT32_MAX, sparse);
    mk_cfg_sigmoid_moe(c, &names, &moe, &shared);
    mk_cfg_expect(c, "scoring_func", "\"sigmoid\"");
    mk_cfg_expect(c, "topk_method", "\"noaux_tc\"");
    mk_cfg_mla(c, &shape);
    uint32_t head = mk_cfg_int_or(c, "head_dim", 0, 4096, shape.rope);
    if (!c->rc && head != shape.rope) mk_cfg_fail(c, "head_dim", "is %u, expected qk_rope_head_dim = %u", head, shape.rope);
    mk_cfg_expect(c, "rope_interleave", "true");
    mk_cfg_rope(c, shape.rope, &rope);
    mk_cfg_ignore(c, "aux_loss_alpha|seq_aux|ep_size"); /* training, and how to spread it over machines */
    if ((rc = c->rc)) goto done;

    for (m->n_skipped = 0; m->n_skipped < nextn; m->n_skipped++) /* layers that only draft: not used here */
        snprintf(m->skipped[m->n_skipped], MK_NAME, "model.layers.%u.", m->layers + m->n_skipped);
    mk_fill_ends(m, eps);
    if (!(m->layer = calloc(m->layers, sizeof *m->layer))) rc = mk_fail(err, MK_E_SYSTEM, "out of memory");
    for (uint32_t l = 0; !rc && l < m->layers; l++) {
        mk_layer *y = &m->layer[l];
        mk_norm_set(&y->in_norm, m->hidden, eps, l, "input_layernorm");
        mk_norm_set(&y->post_norm, m->hidden, eps, l, "post_attention_layernorm");
        y->mixer = MK_MIX_MLA;
        if (mk_fill_mla(&shape, &rope, l, m->hidden, &y->mla)) rc = mk_fail(err, MK_E_SYSTEM, "out of memory");
        y->ffn = sparse[l] ? MK_FFN_MOE : MK_FFN_DENSE;
        if (sparse[l]) {
            y->moe = moe;
            mk_fill_moe(&y->moe, m->hidden, shared, l, "mlp", ffn);
        } else {
            mk_fill_dense(&y->dense, m->hidden, inter, l, "mlp");
        }
    }
done:
    free(sparse);
    return rc;
}

static const mk_alias aliases[] = {{NULL, NULL}};

const mk_arch mk_arch_deepseek_v3 = {"DeepseekV3ForCausalLM", "deepseek_v3|kimi_k2", read_mla_moe, aliases};
const mk_arch mk_arch_glm4_moe_lite = {"Glm4MoeLiteForCausalLM", "glm4_moe_lite", read_mla_moe, aliases};
