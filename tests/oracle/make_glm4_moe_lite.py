"""A tiny random glm4_moe_lite checkpoint and its golden, made with Hugging Face transformers in float32.

    make_glm4_moe_lite.py              write glm4_moe_lite/ (checkpoint and golden.safetensors), then check it
    make_glm4_moe_lite.py --check      recompute everything from the committed checkpoint and compare, writing nothing
    make_glm4_moe_lite.py --mistakes   how much typical mistakes change the logits (README.md, "Negative controls")

Field and tensor names are those of zai-org/GLM-4.7-Flash; head sizes (192 / 64 / 256 / 512) are real: a head has 448 rows of kv_b_proj,
so that the 128-row FP8 blocks straddle keys and values and, from head to head, start at row 0 or 64.
"""

import mla_moe

CONFIG = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 320,
    "dtype": "bfloat16",
    "eos_token_id": [321, 322],
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 144,
    "intermediate_size": 208,
    "kv_lora_rank": 512,
    "max_position_embeddings": 8192,
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 48,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 2,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 323,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "quantization_config": mla_moe.QUANTIZATION,
    "rms_norm_eps": 2e-3,  # published: 1e-5; larger, so that a wrong eps shows
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "5.0.0rc0",
    "use_cache": True,
    "v_head_dim": 256,
    "vocab_size": 324,
}

if __name__ == "__main__":
    mla_moe.main(__doc__, [mla_moe.Family(__file__, "glm4_moe_lite", CONFIG, 20278, 200)])
