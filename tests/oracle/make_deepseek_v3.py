"""Tiny random deepseek_v3 checkpoints and their goldens, made with Hugging Face transformers in float32.

    make_deepseek_v3.py              write deepseek_v3/ and moonlight/ (checkpoint and golden.safetensors), then check them
    make_deepseek_v3.py --check      recompute everything from the committed checkpoints and compare, writing nothing
    make_deepseek_v3.py --mistakes   how much typical mistakes change the logits (README.md, "Negative controls")

deepseek_v3 has what DeepSeek-V3 has: q_lora, YaRN, groups, a drafting layer's tensors. moonlight has what Moonlight-16B-A3B has: neither
of them, and no groups; it does not renormalise (Moonlight does), so that this path is seen too. Field and tensor names are the published
ones; head sizes (128 / 64 / 128 / 512) are real.
"""

import mla_moe

DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 384,
    "eos_token_id": 385,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 144,
    "initializer_range": 0.02,
    "intermediate_size": 208,
    "kv_lora_rank": 512,
    "max_position_embeddings": 10240,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 48,
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 2,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 386,
    "q_lora_rank": 144,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": mla_moe.QUANTIZATION,
    "rms_norm_eps": 1e-3,  # published: 1e-6; larger, so that a wrong eps shows
    "rope_scaling": {  # mscale_all_dim is published as 1.0: the attention factor would then be 1
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.8,
        "original_max_position_embeddings": 256, "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 387,
}
MOONLIGHT = dict(DEEPSEEK, intermediate_size=176, n_group=1, topk_group=1, n_routed_experts=8,
                 norm_topk_prob=False, num_nextn_predict_layers=0, q_lora_rank=None, rope_theta=50000.0,
                 routed_scaling_factor=2.446, vocab_size=259, bos_token_id=256, eos_token_id=257, pad_token_id=258)
del MOONLIGHT["rope_scaling"]

if __name__ == "__main__":
    mla_moe.main(__doc__, [mla_moe.Family(__file__, "deepseek_v3", DEEPSEEK, 20276, 200, query=0.6, head=1.8),
                           mla_moe.Family(__file__, "moonlight", MOONLIGHT, 20267, 150)])
