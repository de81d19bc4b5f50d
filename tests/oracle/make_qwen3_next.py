"""Tiny random checkpoints of Qwen3-Next's family and their goldens, made with Hugging Face transformers in float32.

    make_qwen3_next.py [FAMILY]              write FAMILY/ (checkpoint and golden.safetensors), then check it
    make_qwen3_next.py [FAMILY] --check      recompute everything from the committed checkpoint and compare, writing nothing
    make_qwen3_next.py [FAMILY] --mistakes   how much typical mistakes change the logits (README.md, "Negative controls")

FAMILY: qwen3_next (default), qwen3_5_moe, qwen3_5. Field and tensor names are those of Qwen3-Next-80B-A3B, Qwen3.5-35B-A3B and
Qwen3.5-27B; head sizes (GDN 128, attention 256, of which 64 turn) are real, the rest is cut down. qwen3_next has grouped projections
and a tensor an expert; qwen3_5_moe is a ForConditionalGeneration file with nested fields, separate projections, stacked experts and a few tensors
that are skipped; qwen3_5 is dense and tied.
"""

import copy
import json
import pathlib
import sys

import common
import torch

HERE = pathlib.Path(__file__).resolve().parent
PROMPT, GREEDY = 256, 64
ROUTER_MARGIN, PROMPT_MARGIN, GREEDY_MARGIN, GREEDY_ROUTER_MARGIN, GREEDY_DISTINCT = 2.1e-3, 1e-2, 0.021, 2.1e-3, 12
HIDDEN, VOCAB, FFN, MOE_FFN, SHARED, EXPERTS, TOPK = 144, 259, 160, 32, 48, 6, 2
K_HEADS, V_HEADS, D, CONV = 2, 4, 128, 4
DIM, ROPE = 256, 64
BOS, EOS, PAD = 256, 257, 258
SEEDS = {"qwen3_next": 20267, "qwen3_5_moe": 20268, "qwen3_5": 20269}
LAYERS = {"qwen3_next": 2, "qwen3_5_moe": 2, "qwen3_5": 3}  # the last one is attention
HEADS = {"qwen3_next": (4, 2), "qwen3_5_moe": (4, 2), "qwen3_5": (2, 1)}  # and its KV heads

GDN = {
    "linear_conv_kernel_dim": CONV,
    "linear_key_head_dim": D,
    "linear_num_key_heads": K_HEADS,
    "linear_num_value_heads": V_HEADS,
    "linear_value_head_dim": D,
}
MOE = {
    "moe_intermediate_size": MOE_FFN,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOPK,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": SHARED,
}
QUANT = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [common.BLOCK, common.BLOCK],
}


def text(family):
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "full_attention_interval": LAYERS[family],
        "head_dim": DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        **GDN,
        "max_position_embeddings": 4096,
        "num_attention_heads": HEADS[family][0],
        "num_hidden_layers": LAYERS[family],
        "num_key_value_heads": HEADS[family][1],
        "rms_norm_eps": 1e-3,  # published: 1e-6; larger, so that a wrong eps shows
        "use_cache": True,
        "vocab_size": VOCAB,
    }


def config(family):
    if family == "qwen3_next":
        return {
            "architectures": ["Qwen3NextForCausalLM"],
            "bos_token_id": BOS,
            "decoder_sparse_step": 1,
            "eos_token_id": EOS,
            **text(family),
            "intermediate_size": 5120,  # in the published file too, and used by nothing
            "mlp_only_layers": [],
            "model_type": "qwen3_next",
            **MOE,
            "norm_topk_prob": True,
            "partial_rotary_factor": ROPE / DIM,
            "quantization_config": QUANT,
            "rope_scaling": None,
            "rope_theta": 10000,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.57.0.dev0",
            "use_sliding_window": False,
        }
    rope = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": ROPE / DIM, "rope_theta": 10000,
            "rope_type": "default"}
    types = ["linear_attention"] * (LAYERS[family] - 1) + ["full_attention"]
    extra = {"attn_output_gate": True, "dtype": "bfloat16", "eos_token_id": EOS, "layer_types": types, "mamba_ssm_dtype": "float32",
             "mlp_only_layers": [], "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "rope_parameters": rope}
    if family == "qwen3_5_moe":
        return {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "image_token_id": 10,
            "model_type": "qwen3_5_moe",
            "quantization_config": QUANT,
            "text_config": {**text(family), **MOE, **extra, "model_type": "qwen3_5_moe_text"},
            "tie_word_embeddings": False,
            "transformers_version": "4.57.0.dev0",
            "video_token_id": 11,
            "vision_config": {"depth": 1, "hidden_size": 32, "model_type": "qwen3_5_moe"},
            "vision_end_token_id": 12,
            "vision_start_token_id": 13,
        }
    return {"architectures": ["Qwen3_5ForCausalLM"], **text(family), **extra, "intermediate_size": FFN, "model_type": "qwen3_5_text",
            "quantization_config": QUANT, "tie_word_embeddings": True, "transformers_version": "4.57.0.dev0"}


GENERATION_CONFIG = {"bos_token_id": BOS, "do_sample": True, "eos_token_id": [EOS, PAD], "pad_token_id": PAD, "temperature": 0.7, "top_k": 20,
                     "top_p": 0.8}


# --- weights ---------------------------------------------------------------------------------------------------------

def norm(ck, name, n, low=-0.4, high=0.4):
    """The weight is 1 less than the factor (except GDN's own norm)."""
    ck.bf16(name + ".weight", ck.uniform(low, high, n))


def add_gdn(ck, p, grouped):
    r = V_HEADS // K_HEADS
    q, k, v, z = ([ck.matrix(n, HIDDEN, gain) for _ in range(K_HEADS)]
                  for n, gain in ((D, 1.0), (D, 1.0), (r * D, 4.0), (r * D, 1.5)))
    b, a = ck.matrix(V_HEADS, HIDDEN, 1.5), ck.matrix(V_HEADS, HIDDEN, 1.0)
    if grouped:
        ck.fp8(f"{p}.in_proj_qkvz", torch.cat([x[g] for g in range(K_HEADS) for x in (q, k, v, z)]))
        ck.bf16(f"{p}.in_proj_ba.weight", torch.cat([x[g * r:(g + 1) * r] for g in range(K_HEADS) for x in (b, a)]))
    else:
        ck.fp8(f"{p}.in_proj_qkv", torch.cat(q + k + v))
        ck.fp8(f"{p}.in_proj_z", torch.cat(z))
        ck.bf16(f"{p}.in_proj_b.weight", b)
        ck.bf16(f"{p}.in_proj_a.weight", a)
    ck.bf16(f"{p}.conv1d.weight", 0.6 * ck.normal((2 * K_HEADS + V_HEADS) * D, 1, CONV))
    ck.f32(f"{p}.A_log", ck.uniform(1.0, 16.0, V_HEADS).log())
    step = ck.uniform(-6.9, -2.3, V_HEADS).exp()
    ck.bf16(f"{p}.dt_bias", step + torch.log(-torch.expm1(-step)))
    norm(ck, f"{p}.norm", D, 0.6, 1.4)
    ck.fp8(f"{p}.out_proj", ck.matrix(HIDDEN, V_HEADS * D, 0.08))


def add_attention(ck, p, heads, kv):
    ck.fp8(f"{p}.q_proj", torch.cat([ck.matrix(DIM, HIDDEN, gain) for _ in range(heads) for gain in (0.3, 1.5)]))  # q: the norm's eps matters
    ck.fp8(f"{p}.k_proj", ck.matrix(kv * DIM, HIDDEN, 0.3))
    ck.fp8(f"{p}.v_proj", ck.matrix(kv * DIM, HIDDEN, 1.5))
    norm(ck, f"{p}.q_norm", DIM, 0.0, 0.8)
    norm(ck, f"{p}.k_norm", DIM, 0.0, 0.8)
    ck.fp8(f"{p}.o_proj", ck.matrix(HIDDEN, heads * DIM, 0.2))


def add_ffn(ck, p, inner, down_gain):
    for x, gain in ("gate_proj", 1.5), ("up_proj", 1.0):
        ck.fp8(f"{p}.{x}", ck.matrix(inner, HIDDEN, gain))
    ck.fp8(f"{p}.down_proj", ck.matrix(HIDDEN, inner, down_gain))


def add_moe(ck, p, stacked):
    ck.bf16(f"{p}.gate.weight", ck.matrix(EXPERTS, HIDDEN, 2.0))
    if stacked:
        up = torch.stack([torch.cat([ck.matrix(MOE_FFN, HIDDEN, gain) for gain in (1.5, 1.0)]) for _ in range(EXPERTS)])
        ck.bf16(f"{p}.experts.gate_up_proj", up)
        ck.bf16(f"{p}.experts.down_proj", torch.stack([ck.matrix(HIDDEN, MOE_FFN, 0.2) for _ in range(EXPERTS)]))
    for e in range(0 if stacked else EXPERTS):
        add_ffn(ck, f"{p}.experts.{e}", MOE_FFN, 0.2)
    add_ffn(ck, f"{p}.shared_expert", SHARED, 0.25)
    ck.bf16(f"{p}.shared_expert_gate.weight", ck.matrix(1, HIDDEN, 1.5))


def make_checkpoint(family):
    ck = common.Checkpoint(SEEDS[family])
    tied, top = family == "qwen3_5", "model.language_model" if family == "qwen3_5_moe" else "model"
    ck.bf16(f"{top}.embed_tokens.weight", (2.0 / HIDDEN ** 0.5 if tied else 0.2) * ck.normal(VOCAB, HIDDEN))
    for i in range(LAYERS[family]):
        p = f"{top}.layers.{i}"
        norm(ck, f"{p}.input_layernorm", HIDDEN)
        if i + 1 == LAYERS[family]:
            add_attention(ck, f"{p}.self_attn", *HEADS[family])
        else:
            add_gdn(ck, f"{p}.linear_attn", family == "qwen3_next")
        norm(ck, f"{p}.post_attention_layernorm", HIDDEN)
        if family == "qwen3_5":
            add_ffn(ck, f"{p}.mlp", FFN, 0.1)
        else:
            add_moe(ck, f"{p}.mlp", family == "qwen3_5_moe")
    if tied:  # a token's own logit must not always win: factors of both signs
        sign = 2.0 * torch.randint(0, 2, (HIDDEN,), generator=ck.random) - 1
        ck.bf16(f"{top}.norm.weight", sign * ck.uniform(0.6, 1.4, HIDDEN) - 1)
    else:
        norm(ck, f"{top}.norm", HIDDEN)
        ck.bf16("lm_head.weight", ck.matrix(VOCAB, HIDDEN, 2.1))
    if family != "qwen3_next":
        ck.bf16("mtp.fc.weight", ck.normal(16, 32))
        ck.bf16("model.visual.patch_embed.proj.weight", ck.normal(32, 3, 2, 4, 4))
    return ck


# --- reference -------------------------------------------------------------------------------------------------------

def choice_scores(router, out):
    return out[0].softmax(-1)


def load(family):
    model = common.load_reference(HERE / family, skip=("mtp.", "model.visual."))
    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    return model, common.Oracle(model, routers, choice_scores)


def make(family):
    seed = SEEDS[family]
    make_checkpoint(family).save(HERE / family, config(family), GENERATION_CONFIG)
    _, oracle = load(family)
    for again in range(8):  # a prompt whose greedy continuation keeps its margins
        prompt = oracle.prompt(BOS, PROMPT, BOS, PROMPT_MARGIN, seed + again)
        try:
            prompt = oracle.ending(prompt, GREEDY, BOS, GREEDY_MARGIN, GREEDY_ROUTER_MARGIN, GREEDY_DISTINCT, {BOS, EOS, PAD}, seed)
            break
        except SystemExit as error:
            print(error)
    common.write_golden(HERE / family / "golden.safetensors", common.golden(oracle, prompt, GREEDY), pathlib.Path(__file__).name, seed)


def check(family):
    out = HERE / family
    assert json.loads((out / "config.json").read_text()) == config(family)
    made, stored = make_checkpoint(family).tensors, common.read_checkpoint(out)
    assert made.keys() == stored.keys()
    redrawn = all(torch.equal(made[k].view(torch.uint8), stored[k].view(torch.uint8)) for k in made)
    print(f"weights: {len(stored)} tensors, the seed draws them again bit for bit: {redrawn}")
    _, oracle = load(family)
    prompt = common.load_file(out / "golden.safetensors")["prompt"].tolist()
    common.verify(oracle, out, common.golden(oracle, prompt, GREEDY), ROUTER_MARGIN)


# --- negative controls -----------------------------------------------------------------------------------------------

def mistakes(family):
    reference, _ = load(family)
    ids = common.load_file(HERE / family / "golden.safetensors")["prompt"].tolist()
    code = sys.modules[type(reference).__module__]
    run = lambda model: model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    right = run(reference)
    gdn = lambda m: [l.linear_attn for l in m.model.layers if hasattr(l, "linear_attn")]
    att = lambda m: [l.self_attn for l in m.model.layers if hasattr(l, "self_attn")]
    moe = lambda m: [l.mlp for l in m.model.layers if hasattr(l.mlp, "gate")]
    each = lambda parts, change: lambda m: [change(part) for part in parts(m)]
    pairs = torch.arange(ROPE).view(2, ROPE // 2).T.reshape(-1)

    def interleave(a):
        for name, stride in ("q_proj", 2 * DIM), ("k_proj", DIM):
            w = getattr(a, name).weight.view(-1, stride, HIDDEN)
            w[:, :ROPE] = w[:, pairs.argsort()]
        for n in a.q_norm, a.k_norm:
            n.weight[:ROPE] = n.weight[pairs.argsort()]

    def swap_halves(a):  # [gate | q] instead of [q | gate]
        w = a.q_proj.weight.view(-1, 2, DIM, HIDDEN)
        w.copy_(w.flip(1))

    def plain_norm(m):  # w instead of 1 + w
        for x in m.modules():
            if type(x).__name__.endswith("RMSNorm"):
                x.weight.sub_(1)

    edits = {
        "norms with w instead of 1 + w": plain_norm,
        "attention: rope interleaved instead of half-split": each(att, interleave),
        "attention: q and gate swapped": each(att, swap_halves),
        "attention: KV heads swapped": each(att, lambda a: [getattr(a, n).weight.copy_(getattr(a, n).weight.roll(DIM, 0)) for n in ("k_proj", "v_proj")]),
        "attention: output gate = 1/2": each(att, lambda a: a.q_proj.weight.view(-1, 2, DIM, HIDDEN)[:, 1].zero_()),
        "GDN: decay skipped": each(gdn, lambda a: a.A_log.fill_(-60)),
        "GDN: dt_bias dropped": each(gdn, lambda a: a.dt_bias.zero_()),
        "GDN: convolution taps reversed": each(gdn, lambda a: a.conv1d.weight.copy_(a.conv1d.weight.flip(-1))),
        "GDN: key heads swapped": each(gdn, lambda a: a.conv1d.weight.copy_(torch.cat([
            a.conv1d.weight[:2 * K_HEADS * D].roll(D, 0), a.conv1d.weight[2 * K_HEADS * D:]]))),
        "GDN: gate sigmoid instead of silu": each(gdn, lambda a: setattr(a.norm, "activation", "sigmoid")),
        "MoE: no renormalisation": each(moe, lambda f: setattr(f.gate, "norm_topk_prob", False)),
        "MoE: shared expert's gate = 1/2": each(moe, lambda f: f.shared_expert_gate.weight.zero_()),
        "MoE: shared expert dropped": each(moe, lambda f: f.shared_expert.down_proj.weight.zero_()),
    }
    for name, edit in edits.items():
        model = copy.deepcopy(reference)
        edit(model)
        print(f"| {name} | {common.relative(run(model), right):.1e} |")
    assert code.l2norm and torch.equal(run(reference), right)


if __name__ == "__main__":
    common.main(__doc__, make, check, mistakes, SEEDS, default="qwen3_next")
