"""A tiny random kimi_linear checkpoint and its golden, made with Hugging Face transformers in float32.

    make_kimi_linear.py              write kimi_linear/ (checkpoint and golden.safetensors), then check it
    make_kimi_linear.py --check      recompute everything from the committed checkpoint and compare, writing nothing
    make_kimi_linear.py --mistakes   how much typical mistakes change the logits (README.md, "Negative controls")

Field and tensor names are those of moonshotai/Kimi-Linear-48B-A3B-Instruct; head sizes (128 / 512 / 64) are real, the
rest is cut down and chosen to be awkward: the hidden size is 2.5 FP8 blocks, the vocabulary is odd.
"""

import copy
import json
import pathlib
import sys

import common
import torch

HERE = pathlib.Path(__file__).resolve().parent
OUT = HERE / "kimi_linear"
SEED = 20265

HIDDEN, LAYERS, VOCAB, FFN, MOE_FFN, EXPERTS = 144, 4, 515, 288, 48, 8
KDA_HEADS, MLA_HEADS, HEAD, KV_LORA, ROPE, CONV = 2, 2, 128, 512, 64, 4
KDA_LAYERS, FULL_LAYERS = [1, 2, 4], [3]  # 1-based, as published
BOS, EOS, PAD = 512, 513, 514

PROMPT, GREEDY = 300, 64
ROUTER_MARGIN = 1e-3       # what the golden promises at every position
PROMPT_MARGIN = 3e-2       # what the prompt is drawn for: bf16 activations should choose the same experts too
GREEDY_MARGIN, GREEDY_ROUTER_MARGIN, GREEDY_DISTINCT = 0.021, 2.1e-3, 12

CONFIG = {
    "architectures": ["KimiLinearForCausalLM"],
    "bos_token_id": BOS,
    "dtype": "bfloat16",
    "eos_token_id": EOS,
    "first_k_dense_replace": 1,
    "head_dim": HIDDEN // MLA_HEADS,  # in the published file too, and used by nothing
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": FFN,
    "kv_lora_rank": KV_LORA,
    "linear_attn_config": {
        "full_attn_layers": FULL_LAYERS,
        "head_dim": HEAD,
        "kda_layers": KDA_LAYERS,
        "num_heads": KDA_HEADS,
        "short_conv_kernel_size": CONV,
    },
    "mla_use_nope": True,
    "model_max_length": 4096,
    "model_type": "kimi_linear",
    "moe_intermediate_size": MOE_FFN,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": MLA_HEADS,
    "num_expert_group": 1,
    "num_experts": EXPERTS,
    "num_experts_per_token": 3,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": MLA_HEADS,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": PAD,
    "q_lora_rank": None,
    "qk_nope_head_dim": HEAD,
    "qk_rope_head_dim": ROPE,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [common.BLOCK, common.BLOCK],
    },
    "rms_norm_eps": 1e-3,  # published: 1e-5; larger, so that a wrong eps shows
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": HEAD,
    "vocab_size": VOCAB,
}
GENERATION_CONFIG = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}


# --- weights ---------------------------------------------------------------------------------------------------------
# The gains are set so that the residual stream stays small (0.2 - 0.6: an eps of 1e-3 then matters), every sublayer adds
# its part, and the logits have a standard deviation a little above 2: bf16 noise in them, and so the KL of the default gate, grows with
# it.

def norm(ck, name, n):
    ck.bf16(name + ".weight", ck.uniform(0.6, 1.4, n))


def add_kda(ck, p):
    d = KDA_HEADS * HEAD
    for x, gain in ("q", 1.0), ("k", 1.0), ("v", 4.0):
        ck.fp8(f"{p}.{x}_proj", ck.matrix(d, HIDDEN, gain))
    for x in "qkv":
        ck.bf16(f"{p}.{x}_conv1d.weight", 0.6 * ck.normal(d, 1, CONV))
    # Decay as in a trained model: rates A in 1..16, steps softplus(dt_bias) in 1e-3..1e-1, moved by f.
    ck.f32(f"{p}.A_log", ck.uniform(1.0, 16.0, 1, 1, KDA_HEADS, 1).log())
    step = ck.uniform(-6.9, -2.3, d).exp()
    ck.f32(f"{p}.dt_bias", step + torch.log(-torch.expm1(-step)))
    ck.fp8(f"{p}.f_a_proj", ck.matrix(HEAD, HIDDEN, 1.0))
    ck.fp8(f"{p}.f_b_proj", ck.matrix(d, HEAD, 1.0))
    ck.bf16(f"{p}.b_proj.weight", ck.matrix(KDA_HEADS, HIDDEN, 1.5))
    ck.fp8(f"{p}.g_a_proj", ck.matrix(HEAD, HIDDEN, 1.0))
    ck.fp8(f"{p}.g_b_proj", ck.matrix(d, HEAD, 1.5))
    norm(ck, f"{p}.o_norm", HEAD)
    ck.fp8(f"{p}.o_proj", ck.matrix(HIDDEN, d, 0.18))


def add_mla(ck, p):
    ck.fp8(f"{p}.q_proj", ck.matrix(MLA_HEADS * (HEAD + ROPE), HIDDEN, 1.5))
    kv_a = torch.cat([ck.matrix(KV_LORA, HIDDEN, 0.1),   # small: the norm's eps matters
                      ck.matrix(ROPE, HIDDEN, 1.5)])     # k_pe, not normalised: as large as k_nope
    ck.fp8(f"{p}.kv_a_proj_with_mqa", kv_a)
    norm(ck, f"{p}.kv_a_layernorm", KV_LORA)
    ck.fp8(f"{p}.kv_b_proj", ck.matrix(MLA_HEADS * 2 * HEAD, KV_LORA, 1.2))
    ck.fp8(f"{p}.o_proj", ck.matrix(HIDDEN, MLA_HEADS * HEAD, 0.18))


def add_ffn(ck, p, names, inner, down_gain):
    for x, gain in zip(names, (1.5, 1.0)):
        ck.fp8(f"{p}.{x}", ck.matrix(inner, HIDDEN, gain))
    ck.fp8(f"{p}.{names[2]}", ck.matrix(HIDDEN, inner, down_gain))


def make_checkpoint():
    ck = common.Checkpoint(SEED)
    ck.bf16("model.embed_tokens.weight", 0.35 * ck.normal(VOCAB, HIDDEN))
    for i in range(LAYERS):
        p = f"model.layers.{i}"
        norm(ck, f"{p}.input_layernorm", HIDDEN)
        (add_mla if i + 1 in FULL_LAYERS else add_kda)(ck, f"{p}.self_attn")
        norm(ck, f"{p}.post_attention_layernorm", HIDDEN)
        if i < CONFIG["first_k_dense_replace"]:
            add_ffn(ck, f"{p}.mlp", ("gate_proj", "up_proj", "down_proj"), FFN, 0.15)
            continue
        p += ".block_sparse_moe"
        ck.bf16(f"{p}.gate.weight", ck.matrix(EXPERTS, HIDDEN, 1.5))
        ck.f32(f"{p}.gate.e_score_correction_bias", 0.2 * ck.normal(EXPERTS))
        for e in range(EXPERTS):
            add_ffn(ck, f"{p}.experts.{e}", ("w1", "w3", "w2"), MOE_FFN, 0.15)
        add_ffn(ck, f"{p}.shared_experts", ("gate_proj", "up_proj", "down_proj"), MOE_FFN, 0.18)
    norm(ck, "model.norm", HIDDEN)
    ck.bf16("lm_head.weight", ck.matrix(VOCAB, HIDDEN, 2.1))
    return ck


# --- reference -------------------------------------------------------------------------------------------------------

def choice_scores(router, out):
    return out[0].sigmoid() + router.e_score_correction_bias


def load():
    model = common.load_reference(OUT)
    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    return model, common.Oracle(model, routers, choice_scores)


def make():
    make_checkpoint().save(OUT, CONFIG, GENERATION_CONFIG)
    _, oracle = load()
    prompt = oracle.prompt(BOS, PROMPT, BOS, PROMPT_MARGIN, SEED)
    prompt = oracle.ending(prompt, GREEDY, BOS, GREEDY_MARGIN, GREEDY_ROUTER_MARGIN, GREEDY_DISTINCT,
                           {BOS, EOS, PAD}, SEED)
    common.write_golden(OUT / "golden.safetensors", common.golden(oracle, prompt, GREEDY), pathlib.Path(__file__).name,
                        SEED)


def check():
    assert json.loads((OUT / "config.json").read_text()) == CONFIG
    made, stored = make_checkpoint().tensors, common.read_checkpoint(OUT)
    assert made.keys() == stored.keys()
    redrawn = all(torch.equal(made[k].view(torch.uint8), stored[k].view(torch.uint8)) for k in made)
    print(f"weights: {len(stored)} tensors, the seed draws them again bit for bit: {redrawn}")

    model, oracle = load()
    for name, module in model.named_modules():
        if hasattr(module, "variance_epsilon") and ("layers" not in name or ".0." in name or ".2." in name):
            print(f"eps {module.variance_epsilon:g} {name} ({type(module).__name__})")
    prompt = common.load_file(OUT / "golden.safetensors")["prompt"].tolist()
    common.verify(oracle, OUT, common.golden(oracle, prompt, GREEDY), ROUTER_MARGIN)

    twin = common.load_reference(OUT, torch.bfloat16)  # the same values stored as bf16
    same = all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values()))
    print(f"FP8, BF16 and F32 storage give the same float32 parameters: {same}")
    assert same


# --- negative controls -----------------------------------------------------------------------------------------------

def mistakes():
    """Each mistake is made in a copy of the model by editing weights, constants or a forward; figures are the RMS of the
    logits' change over the RMS of the logits."""
    reference, _ = load()
    ids = common.load_file(OUT / "golden.safetensors")["prompt"].tolist()
    kimi = sys.modules[type(reference).__module__]

    def run(model):
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]

    right = run(reference)
    kda = lambda m: [l.self_attn for l in m.model.layers if l.block_type == "linear_attention"]
    mla = lambda m: [l.self_attn for l in m.model.layers if l.block_type != "linear_attention"]
    moe = lambda m: [l.mlp for l in m.model.layers if hasattr(l.mlp, "gate")]

    def set_eps(eps, *parts):
        def change(m):
            for name, module in m.named_modules():
                if hasattr(module, "variance_epsilon") and any(name.endswith(part) for part in parts):
                    module.variance_epsilon = eps
        return change

    def rotate(m):  # RoPE on the 64 dimensions that are never rotated (rotating q and k_pe as pairs (i, i + 32))
        def turn(x):
            angle = torch.arange(x.shape[-2])[:, None] * 10000.0 ** (-torch.arange(ROPE // 2) / (ROPE // 2))
            a, b = x.chunk(2, -1)
            return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
        eager = kimi.eager_attention_forward

        def attention(module, q, k, *args, **kwargs):
            q, k = (torch.cat([x[..., :HEAD], turn(x[..., HEAD:])], -1) for x in (q, k))
            return eager(module, q, k, *args, **kwargs)
        return attention

    def each(parts, change):
        return lambda m: [change(part) for part in parts(m)]

    def forward(value):
        def change(module):
            module.forward = value
        return change

    def delta_rule(wrong):
        """The recurrence as the engine runs it; with wrong = "" it must agree with the model's chunked form."""
        def attention(q, k, v, g, beta, **kwargs):
            q, k = kimi.l2norm(q) * HEAD ** -0.5, kimi.l2norm(k)
            state, out = torch.zeros(KDA_HEADS, HEAD, HEAD), []  # [head, key channel, value channel]
            for q, k, v, g, beta in zip(q[0], k[0], v[0], g[0], beta[0]):
                decay = g.exp()[:, None, :] if wrong == "value decay" else g.exp()[:, :, None]
                if wrong != "late decay":
                    state = state * decay
                kept = (state * k[:, :, None]).sum(1)
                state = state + k[:, :, None] * (beta[:, None] * (v if wrong == "no delta" else v - kept))[:, None, :]
                if wrong == "late decay":
                    state = state * decay
                out.append((state * q[:, :, None]).sum(1))
            return torch.stack(out)[None], None
        return attention

    norms = ("input_layernorm", "post_attention_layernorm", "model.norm")
    edits = {
        "MLA: q_pe / k_pe (64 dimensions) dropped": each(mla, lambda a: a.kv_a_proj_with_mqa.weight[KV_LORA:].zero_()),
        "MLA: kv_a_layernorm with eps 1e-3 (config) instead of 1e-6": set_eps(1e-3, "kv_a_layernorm"),
        "MLA: softmax scale 128^-1/2 instead of 192^-1/2": each(mla, lambda a: setattr(a, "scaling", HEAD ** -0.5)),
        "MLA: all keys and values of the first head": each(mla, lambda a: a.kv_b_proj.weight[2 * HEAD:].copy_(
            a.kv_b_proj.weight[:2 * HEAD])),
        "KDA: decay skipped (g = 0)": each(kda, lambda a: forward(
            lambda x: torch.zeros(*x.shape[:2], KDA_HEADS, HEAD))(a.forget_gate)),
        "KDA: dt_bias dropped": each(kda, lambda a: a.forget_gate.dt_bias.zero_()),
        "KDA: A_log dropped": each(kda, lambda a: a.forget_gate.A_log.zero_()),
        "KDA: beta = 1/2 (b_proj dropped)": each(kda, lambda a: a.b_proj.weight.zero_()),
        "KDA: output gate = 1/2 (g_b_proj dropped)": each(kda, lambda a: a.g_b_proj.weight.zero_()),
        "KDA: output gate silu instead of sigmoid": each(kda, lambda a: setattr(a.o_norm, "activation", "silu")),
        "KDA: convolution taps reversed": each(kda, lambda a: a.conv1d.weight.copy_(a.conv1d.weight.flip(-1))),
        "KDA: convolution without silu": each(kda, lambda a: setattr(a, "activation", None)),
        "KDA: o_norm with eps 1e-5 instead of 1e-3": set_eps(1e-5, "o_norm"),
        "layer and final norms with eps 1e-5 instead of 1e-3": set_eps(1e-5, *norms),
        "only the final norm with eps 1e-5": set_eps(1e-5, "model.norm"),
        "every norm of the config's eps (the two above) with 1e-5": set_eps(1e-5, "o_norm", *norms),
        "MoE: router bias dropped": each(moe, lambda f: f.gate.e_score_correction_bias.zero_()),
        "MoE: no renormalisation": each(moe, lambda f: setattr(f.gate, "norm_topk_prob", False)),
        "MoE: routed_scaling_factor dropped": each(moe, lambda f: setattr(f.gate, "routed_scaling_factor", 1.0)),
        "MoE: shared expert dropped": each(moe, lambda f: f.shared_experts.down_proj.weight.zero_()),
        "MoE: top-2 instead of top-3": each(moe, lambda f: setattr(f.gate, "top_k", 2)),
    }
    chunk = "chunk_kimi_delta_attention"
    functions = {  # these replace a function of the modeling file instead
        "MLA: RoPE applied": ("eager_attention_forward", rotate(reference)),
        "KDA: q and k not normalised": ("l2norm", lambda x, dim=-1, eps=1e-6: x * x.shape[-1] ** -0.5),
        "KDA: decay along the value channels": (chunk, delta_rule("value decay")),
        "KDA: decay after the update": (chunk, delta_rule("late decay")),
        "KDA: no delta (plain gated linear attention)": (chunk, delta_rule("no delta")),
        "(no mistake: KDA written as the plain recurrence)": (chunk, delta_rule("")),
    }
    results = {}
    for name, edit in edits.items():
        model = copy.deepcopy(reference)
        edit(model)
        results[name] = common.relative(run(model), right)
    for name, (function, value) in functions.items():
        kept = getattr(kimi, function)
        setattr(kimi, function, value)
        results[name] = common.relative(run(reference), right)
        setattr(kimi, function, kept)
    assert torch.equal(run(reference), right)
    spread = common.blocks
    common.blocks = lambda scale, shape: spread(scale.roll(1, 1), shape)
    results["FP8: scales of the neighbouring column block"] = common.relative(run(load()[0]), right)
    common.blocks = spread
    for name, change in results.items():
        print(f"| {name} | {change:.1e} |")


if __name__ == "__main__":
    common.main(__doc__, make, check, mistakes)
