/* Llama 3: grouped-query attention with half-split rotation (default, or stretched as in Llama 3.1), dense SwiGLU. Field names: the
 * published config.json first, then those of transformers 5.17 (models/llama/configuration_llama.py). */
#include <stdlib.h>

#include "host/arch.h"

static int read_llama(mk_cfg *c, mk_model *m, mk_err *err)
{
    mk_gqa_shape a = {0};
    m->hidden = mk_cfg_16(c, "hidden_size", mk_cfg_int(c, "hidden_size", 16, MK_MAX_WIDTH));
    m->layers = mk_cfg_int(c, "num_hidden_layers", 1, MK_MAX_LAYERS);
    m->vocab = mk_cfg_int(c, "vocab_size", 2, 1u << 22);
    m->max_context = mk_cfg_int(c, "max_position_embeddings", 1, 1u << 24);
    m->tied = (uint8_t)mk_cfg_bool_or(c, "tie_word_embeddings", 0);
    uint32_t inter = mk_cfg_16(c, "intermediate_size", mk_cfg_int(c, "intermediate_size", 16, 1u << 20));
    float eps = (float)mk_cfg_num(c, "rms_norm_eps", 1e-12, 1e-1);
    mk_cfg_expect(c, "hidden_act", "\"silu\"|\"swish\"");
    mk_cfg_expect(c, "mlp_bias", "false");
    mk_cfg_gqa(c, m->hidden, 1.0, &a);
    if (c->rc) return c->rc;
    mk_fill_ends(m, eps);
    if (!(m->layer = calloc(m->layers, sizeof *m->layer))) return mk_fail(err, MK_E_SYSTEM, "out of memory");
    for (uint32_t l = 0; l < m->layers; l++) {
        mk_layer *y = &m->layer[l];
        mk_norm_set(&y->in_norm, m->hidden, eps, l, "input_layernorm");
        mk_norm_set(&y->post_norm, m->hidden, eps, l, "post_attention_layernorm");
        y->mixer = MK_MIX_GQA;
        y->ffn = MK_FFN_DENSE;
        if (mk_fill_gqa(&a, l, m->hidden, &y->gqa)) return mk_fail(err, MK_E_SYSTEM, "out of memory");
        mk_fill_dense(&y->dense, m->hidden, inter, l, "mlp");
    }
    return MK_OK;
}

static const mk_alias none[] = {{NULL, NULL}};

const mk_arch mk_arch_llama = {"LlamaForCausalLM", "llama", read_llama, none};
