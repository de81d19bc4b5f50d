/* Grouped-query attention, as Llama and Qwen3-Next read and fill it: see host/arch.h. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "host/arch.h"

void mk_cfg_gqa(mk_cfg *c, uint32_t hidden, double part, mk_gqa_shape *k)
{
    k->heads = mk_cfg_int(c, "num_attention_heads", 1, 1024);
    k->kv_heads = mk_cfg_int_or(c, "num_key_value_heads", 1, 1024, k->heads);
    if (!c->rc && k->heads % k->kv_heads)
        mk_cfg_fail(c, "num_key_value_heads", "is %u, expected a divisor of num_attention_heads (%u)", k->kv_heads, k->heads);
    k->dim = mk_cfg_16(c, "head_dim", mk_cfg_int_or(c, "head_dim", 16, 512, hidden / k->heads));
    if (!c->rc && (k->dim < 16 || k->dim > 512)) mk_cfg_fail(c, "head_dim", "is %u, expected 16 to 512", k->dim);
    mk_cfg_expect(c, "attention_bias", "false");
    mk_cfg_expect(c, "sliding_window", "null");
    mk_cfg_expect(c, "use_sliding_window", "false");
    mk_cfg_expect(c, "pretraining_tp", "1");
    mk_cfg_ignore(c, "attention_dropout|max_window_layers");
    mk_cfg_rope_head(c, k->dim, part, &k->rope);
}

int mk_fill_gqa(const mk_gqa_shape *k, uint32_t l, uint32_t hidden, mk_gqa_mixer *a)
{
#define AT "model.layers.%u.self_attn."
    a->heads = k->heads;
    a->kv_heads = k->kv_heads;
    a->dim = k->dim;
    a->rope = k->rope.dim;
    a->gated = (uint8_t)k->gated;
    a->scale = (float)(1.0 / sqrt((double)k->dim));
    mk_mat_plain(&a->q, k->heads * k->dim * (k->gated ? 2 : 1), hidden, 0, AT "q_proj", l);
    mk_mat_plain(&a->k, k->kv_heads * k->dim, hidden, 0, AT "k_proj", l);
    mk_mat_plain(&a->v, k->kv_heads * k->dim, hidden, 0, AT "v_proj", l);
    mk_mat_plain(&a->o, hidden, k->heads * k->dim, 0, AT "o_proj", l);
#undef AT
    if (k->normed) {
        mk_norm_set(&a->q_norm, k->dim, k->eps, l, "self_attn.q_norm");
        mk_norm_set(&a->k_norm, k->dim, k->eps, l, "self_attn.k_norm");
        a->q_norm.gamma.add = a->k_norm.gamma.add = 1;
    }
    if (!(a->inv_freq = malloc((k->rope.dim / 2 + 1) * sizeof *a->inv_freq))) return MK_E_SYSTEM;
    memcpy(a->inv_freq, k->rope.inv_freq, k->rope.dim / 2 * sizeof *a->inv_freq);
    return MK_OK;
}
