"""Tiny random Llama checkpoints and their goldens, made with Hugging Face transformers in float32.

    make_llama.py [FAMILY]              write FAMILY/ (checkpoint and golden.safetensors), then check it
    make_llama.py [FAMILY] --check      recompute everything from the committed checkpoint and compare, writing nothing
    make_llama.py [FAMILY] --mistakes   how much typical mistakes change the logits (README.md, "Negative controls")

FAMILY: llama (default) with the head size (64), tied embeddings and rotation of meta-llama/Llama-3.2-1B; llama_128 with those of
Llama-3.1-8B: heads of 128, a head of its own, another factor. Names and BF16 storage are real, the rest is cut down: the hidden size is
3.5 K blocks of 32, the vocabulary is odd. The rotation's original context is 64 tokens so that the prompt meets all three kinds of wavelength.
"""

import copy
import json
import pathlib

import common
import torch

HERE = pathlib.Path(__file__).resolve().parent
SEEDS = {"llama": 20270, "llama_128": 20271}
DIMS = {"llama": 64, "llama_128": 128}
FFNS = {"llama": 160, "llama_128": 96}
PROMPTS = {"llama": 256, "llama_128": 150}
FACTORS = {"llama": 32.0, "llama_128": 8.0}
TIED = {"llama": True, "llama_128": False}

HIDDEN, LAYERS, VOCAB = 112, 2, 259
HEADS, KV = 4, 2
BOS, EOS, EOT = 256, 257, 258
GREEDY = 64
GREEDY_MARGIN, GREEDY_DISTINCT = 0.021, 12

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BOS,
    "eos_token_id": [EOS, EOT],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": 160,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-3,  # published: 1e-5; larger, so that a wrong eps shows
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": VOCAB,
}


def config(family):
    return dict(CONFIG, head_dim=DIMS[family], intermediate_size=FFNS[family], tie_word_embeddings=TIED[family],
                rope_scaling=dict(CONFIG["rope_scaling"], factor=FACTORS[family]))


GENERATION_CONFIG = {"bos_token_id": BOS, "do_sample": True, "eos_token_id": [EOS, EOT], "temperature": 0.6, "top_p": 0.9}


def make_checkpoint(family):
    dim, ffn = DIMS[family], FFNS[family]
    ck = common.Checkpoint(SEEDS[family])

    def norm(name, n):
        ck.bf16(name + ".weight", ck.uniform(0.6, 1.4, n))

    # Tied: logits of standard deviation 2. A token's own logit must not always win: the final norm has weights of both signs.
    ck.bf16("model.embed_tokens.weight", 2.0 / HIDDEN ** 0.5 * ck.normal(VOCAB, HIDDEN))
    for i in range(LAYERS):
        p = f"model.layers.{i}"
        norm(f"{p}.input_layernorm", HIDDEN)
        ck.bf16(f"{p}.self_attn.q_proj.weight", ck.matrix(HEADS * dim, HIDDEN, 1.2))
        ck.bf16(f"{p}.self_attn.k_proj.weight", ck.matrix(KV * dim, HIDDEN, 1.2))
        ck.bf16(f"{p}.self_attn.v_proj.weight", ck.matrix(KV * dim, HIDDEN, 1.0))
        ck.bf16(f"{p}.self_attn.o_proj.weight", ck.matrix(HIDDEN, HEADS * dim, 0.12))
        norm(f"{p}.post_attention_layernorm", HIDDEN)
        ck.bf16(f"{p}.mlp.gate_proj.weight", ck.matrix(ffn, HIDDEN, 1.5))
        ck.bf16(f"{p}.mlp.up_proj.weight", ck.matrix(ffn, HIDDEN, 1.0))
        ck.bf16(f"{p}.mlp.down_proj.weight", ck.matrix(HIDDEN, ffn, 0.1))
    sign = 2.0 * torch.randint(0, 2, (HIDDEN,), generator=ck.random) - 1
    ck.bf16("model.norm.weight", sign * ck.uniform(0.6, 1.4, HIDDEN))
    if not TIED[family]:
        ck.bf16("lm_head.weight", ck.matrix(VOCAB, HIDDEN, 2.0))
    return ck


def load(family):
    model = common.load_reference(HERE / family)
    return model, common.Oracle(model, [], None)


def make(family):
    make_checkpoint(family).save(HERE / family, config(family), GENERATION_CONFIG)
    _, oracle = load(family)
    for again in range(8):  # a prompt whose greedy continuation keeps its margins
        prompt = oracle.prompt(BOS, PROMPTS[family], BOS, 0, SEEDS[family] + again)
        try:
            prompt = oracle.ending(prompt, GREEDY, BOS, GREEDY_MARGIN, 0, GREEDY_DISTINCT, {BOS, EOS, EOT}, SEEDS[family])
            break
        except SystemExit as error:
            print(error)
    common.write_golden(HERE / family / "golden.safetensors", common.golden(oracle, prompt, GREEDY), pathlib.Path(__file__).name, SEEDS[family])


def check(family):
    out = HERE / family
    assert json.loads((out / "config.json").read_text()) == config(family)
    made, stored = make_checkpoint(family).tensors, common.read_checkpoint(out)
    assert made.keys() == stored.keys()
    redrawn = all(torch.equal(made[k], stored[k]) for k in made)
    print(f"weights: {len(stored)} tensors, the seed draws them again bit for bit: {redrawn}")
    model, oracle = load(family)
    print("inv_freq", model.model.rotary_emb.inv_freq.tolist()[:12])
    prompt = common.load_file(out / "golden.safetensors")["prompt"].tolist()
    common.verify(oracle, out, common.golden(oracle, prompt, GREEDY), 0)


def mistakes(family):
    dim = DIMS[family]
    reference, _ = load(family)
    ids = common.load_file(HERE / family / "golden.safetensors")["prompt"].tolist()
    run = lambda model: model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    right = run(reference)
    each = lambda change: lambda m: [change(layer.self_attn) for layer in m.model.layers]
    plain = 1.0 / 500000.0 ** (torch.arange(0, dim, 2).float() / dim)
    pairs = torch.arange(dim).view(2, dim // 2).T.reshape(-1)  # 0 32 1 33 ... of 64: half-split weights read as interleaved

    def interleave(a):
        for name, heads in ("q_proj", HEADS), ("k_proj", KV):
            w = getattr(a, name).weight
            w.copy_(w.view(heads, dim, -1)[:, pairs.argsort()].reshape_as(w))

    def swap_kv(a):
        for name in "k_proj", "v_proj":
            w = getattr(a, name).weight
            w.copy_(w.roll(dim, 0))

    edits = {
        "llama3 scaling missing": lambda m: m.model.rotary_emb.inv_freq.copy_(plain),
        "rope interleaved instead of half-split": each(interleave),
        "KV heads swapped": each(swap_kv),
        "no rotation": lambda m: m.model.rotary_emb.inv_freq.zero_(),
        "norms with eps 1e-5 instead of 1e-3": lambda m: [setattr(x, "variance_epsilon", 1e-5) for x in m.modules()
                                                          if hasattr(x, "variance_epsilon")],
        "softmax scale of twice the head": each(lambda a: setattr(a, "scaling", (2 * dim) ** -0.5)),
    }
    for name, edit in edits.items():
        model = copy.deepcopy(reference)
        edit(model)
        print(f"| {name} | {common.relative(run(model), right):.1e} |")


if __name__ == "__main__":
    common.main(__doc__, make, check, mistakes, SEEDS, default="llama")
