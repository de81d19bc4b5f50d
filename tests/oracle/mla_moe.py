"""Shared by make_deepseek_v3.py and make_glm4_moe_lite.py: tiny random checkpoints of MLA + sigmoid-routed MoE, their goldens, and how
much typical mistakes change the logits. A script supplies configurations and gains."""

import copy
import json
import pathlib

import common
import torch

PROMPT_MARGIN, ROUTER_MARGIN = 2e-2, 1e-3
GREEDY, GREEDY_MARGIN, GREEDY_ROUTER_MARGIN, GREEDY_DISTINCT = 64, 0.021, 2.1e-3, 20
QUANTIZATION = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                "weight_block_size": [common.BLOCK, common.BLOCK]}
# The gains are set as in make_kimi_linear.py: a residual stream of 0.2 - 0.4, so that an eps of 1e-3 matters, to which every sublayer
# adds its part, logits with a standard deviation near 2, and attention that is not so sharp that bf16 noise decides where it looks.
EMBED, ATTENTION, DENSE, ROUTED, SHARED = 0.2, 0.12, 0.1, 0.08, 0.12


class Family:
    def __init__(self, script, out, config, seed, prompt, query=1.0, head=2.0):
        self.script, self.config, self.seed, self.prompt = pathlib.Path(script).name, config, seed, prompt
        self.query, self.head = query, head
        self.out = pathlib.Path(script).resolve().parent / out
        self.bos, self.pad = config["bos_token_id"], config["pad_token_id"]
        eos = config["eos_token_id"]
        self.stop = {self.bos, self.pad} | set(eos if isinstance(eos, list) else [eos])
        self.generation = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
        self.skip = f"model.layers.{config['num_hidden_layers']}."

    # --- weights ---

    def norm(self, ck, name, n):
        ck.bf16(name + ".weight", ck.uniform(0.6, 1.4, n))

    def attention(self, ck, p):
        c = self.config
        hidden, heads, latent, rope = (c[k] for k in ("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_rope_head_dim"))
        nope, v, rank = c["qk_nope_head_dim"], c["v_head_dim"], c["q_lora_rank"]
        if rank:
            ck.fp8(f"{p}.q_a_proj", ck.matrix(rank, hidden, 0.05))  # small: the norm's eps matters
            self.norm(ck, f"{p}.q_a_layernorm", rank)
            ck.fp8(f"{p}.q_b_proj", ck.matrix(heads * (nope + rope), rank, self.query))
        else:
            ck.fp8(f"{p}.q_proj", ck.matrix(heads * (nope + rope), hidden, self.query))
        kv_a = torch.cat([ck.matrix(latent, hidden, 0.05), ck.matrix(rope, hidden, 1.5)])
        ck.fp8(f"{p}.kv_a_proj_with_mqa", kv_a)
        self.norm(ck, f"{p}.kv_a_layernorm", latent)
        ck.fp8(f"{p}.kv_b_proj", ck.matrix(heads * (nope + v), latent, 1.2))
        ck.fp8(f"{p}.o_proj", ck.matrix(hidden, heads * v, ATTENTION))

    def ffn(self, ck, p, inner, down):
        hidden = self.config["hidden_size"]
        for x, gain in ("gate_proj", 1.5), ("up_proj", 1.0):
            ck.fp8(f"{p}.{x}", ck.matrix(inner, hidden, gain))
        ck.fp8(f"{p}.down_proj", ck.matrix(hidden, inner, down))

    def checkpoint(self):
        c, ck = self.config, common.Checkpoint(self.seed)
        hidden, vocab, experts = c["hidden_size"], c["vocab_size"], c["n_routed_experts"]
        ck.bf16("model.embed_tokens.weight", EMBED * ck.normal(vocab, hidden))
        for i in range(c["num_hidden_layers"]):
            p = f"model.layers.{i}"
            self.norm(ck, f"{p}.input_layernorm", hidden)
            self.attention(ck, f"{p}.self_attn")
            self.norm(ck, f"{p}.post_attention_layernorm", hidden)
            p += ".mlp"
            if i < c["first_k_dense_replace"]:
                self.ffn(ck, p, c["intermediate_size"], DENSE)
                continue
            ck.bf16(f"{p}.gate.weight", ck.matrix(experts, hidden, 1.5))
            ck.f32(f"{p}.gate.e_score_correction_bias", 0.2 * ck.normal(experts))
            for e in range(experts):
                self.ffn(ck, f"{p}.experts.{e}", c["moe_intermediate_size"], ROUTED)
            self.ffn(ck, f"{p}.shared_experts", c["moe_intermediate_size"] * c["n_shared_experts"], SHARED)
        if c["num_nextn_predict_layers"]:  # a stub of the drafting layer: its tensors are there and not used
            p = f"model.layers.{c['num_hidden_layers']}"
            self.norm(ck, f"{p}.enorm", hidden)
            self.norm(ck, f"{p}.hnorm", hidden)
            ck.bf16(f"{p}.eh_proj.weight", ck.matrix(16, 2 * hidden, 1.0))
            self.norm(ck, f"{p}.shared_head.norm", hidden)
        self.norm(ck, "model.norm", hidden)
        ck.bf16("lm_head.weight", ck.matrix(vocab, hidden, self.head))
        return ck

    # --- reference ---

    def choice_scores(self, router, out):
        scores = out[0].sigmoid() + router.e_score_correction_bias
        groups, keep = self.config["n_group"], self.config["topk_group"]
        if groups == 1:
            return scores
        split = scores.view(len(scores), groups, -1)
        best = split.topk(2).values.sum(-1).topk(keep + 1)
        mask = torch.full(split.shape, -torch.inf)
        mask.scatter_(1, best.indices[:, :keep, None].expand(-1, -1, split.shape[-1]), 0)
        return (split + mask).view(scores.shape), best.values[:, keep - 1] - best.values[:, keep]

    def load(self, dtype=torch.float32):
        model = common.load_reference(self.out, dtype, self.skip)
        routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        return model, common.Oracle(model, routers, self.choice_scores)

    def make(self):
        self.checkpoint().save(self.out, self.config, self.generation)
        _, oracle = self.load()
        first = min(self.stop)
        prompt = oracle.prompt(self.bos, self.prompt, first, PROMPT_MARGIN, self.seed)
        prompt = oracle.ending(prompt, GREEDY, first, GREEDY_MARGIN, GREEDY_ROUTER_MARGIN, GREEDY_DISTINCT, self.stop, self.seed)
        common.write_golden(self.out / "golden.safetensors", common.golden(oracle, prompt, GREEDY), self.script, self.seed)

    def check(self):
        assert json.loads((self.out / "config.json").read_text()) == self.config
        made, stored = self.checkpoint().tensors, common.read_checkpoint(self.out)
        assert made.keys() == stored.keys()
        redrawn = all(torch.equal(made[k].view(torch.uint8), stored[k].view(torch.uint8)) for k in made)
        print(f"{self.out.name}: {len(stored)} tensors, the seed draws them again bit for bit: {redrawn}")
        model, oracle = self.load()
        for name, module in model.named_modules():
            if hasattr(module, "variance_epsilon") and ("layers" not in name or ".0." in name):
                print(f"eps {module.variance_epsilon:g} {name} ({type(module).__name__})")
        rope, attention = model.model.rotary_emb, model.model.layers[0].self_attn
        print(f"rope {rope.rope_type}, attention factor {rope.attention_scaling:.6f}, softmax scale {attention.scaling:.8f}, "
              f"inv_freq {rope.inv_freq[0]:.4g} .. {rope.inv_freq[-1]:.4g}")
        prompt = common.load_file(self.out / "golden.safetensors")["prompt"].tolist()
        common.verify(oracle, self.out, common.golden(oracle, prompt, GREEDY), ROUTER_MARGIN)
        twin, _ = self.load(torch.bfloat16)  # the same values stored as bf16
        same = all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values()))
        print(f"FP8, BF16 and F32 storage give the same float32 parameters: {same}")
        assert same

    def mistakes(self):
        """Each mistake is made in a copy of the model; figures are the RMS of the logits' change over the RMS of the logits."""
        reference, _ = self.load()
        ids = common.load_file(self.out / "golden.safetensors")["prompt"].tolist()

        def run(model):
            return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]

        def every(part, change):
            def edit(m):
                for layer in m.model.layers:
                    if part == "attention":
                        change(layer.self_attn)
                    elif part == "moe" and hasattr(layer.mlp, "gate"):
                        change(layer.mlp)
            return edit

        def eps(name, value):
            def edit(m):
                for n, module in m.named_modules():
                    if n.endswith(name):
                        module.variance_epsilon = value
            return edit

        def plain_frequencies(m):
            rope, n = m.model.rotary_emb, self.config["qk_rope_head_dim"]
            rope.inv_freq = 10000.0 ** (-torch.arange(0, n, 2) / n)

        c, right = self.config, run(reference)
        head = (c["qk_nope_head_dim"] + c["qk_rope_head_dim"]) ** -0.5
        edits = {
            "RoPE left out": lambda m: setattr(m.model.rotary_emb, "inv_freq", m.model.rotary_emb.inv_freq * 0),
            "RoPE on halves instead of interleaved pairs": lambda m: setattr(m.config, "rope_interleave", False),
            "kv_a_layernorm with the config's eps": eps("kv_a_layernorm", c["rms_norm_eps"]),
            "layer and final norms with eps 1e-6": eps("norm", 1e-6),
            "softmax scale: nope^-1/2": every("attention", lambda a: setattr(a, "scaling", a.scaling / head * c["qk_nope_head_dim"] ** -0.5)),
            "router bias dropped": every("moe", lambda f: f.gate.e_score_correction_bias.zero_()),
            "no renormalisation / renormalisation": every("moe", lambda f: setattr(f.gate, "norm_topk_prob", not f.gate.norm_topk_prob)),
            "routed_scaling_factor dropped": every("moe", lambda f: setattr(f.gate, "routed_scaling_factor", 1.0)),
            "shared experts dropped": every("moe", lambda f: f.shared_experts.down_proj.weight.zero_()),
        }
        if c["q_lora_rank"]:
            edits["q_a_layernorm with the config's eps"] = eps("q_a_layernorm", c["rms_norm_eps"])
        if c["n_group"] > 1:
            edits["group limit ignored"] = every("moe", lambda f: setattr(f.gate, "topk_group", f.gate.num_group))
        if reference.model.rotary_emb.rope_type == "yarn":
            edits["YaRN: softmax scale without m^2"] = every("attention", lambda a: setattr(a, "scaling", head))
            edits["YaRN: attention factor left out"] = lambda m: setattr(m.model.rotary_emb, "attention_scaling", 1.0)
            edits["YaRN: frequencies not blended"] = plain_frequencies
        for name, edit in edits.items():
            model = copy.deepcopy(reference)
            edit(model)
            print(f"| {self.out.name}: {name} | {common.relative(run(model), right):.1e} |")
        assert torch.equal(run(reference), right)


def main(doc, families):
    common.main(doc, Family.make, Family.check, Family.mistakes, families)
