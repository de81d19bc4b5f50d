#!/usr/bin/env python3
"""Trains the small English checkpoint (kimi_linear: KDA + MLA + MoE, byte-level) and writes it in FP8 blocks.

    python3 tests/english/corpus.py CORPUS_DIR
    python3 tests/english/train.py --data CORPUS_DIR --out OUT_DIR --minutes 13        # one H200
    python3 tests/english/train.py --self-test                                         # CPU: this forward == Hugging Face's

The forward is written out here for training speed: KDA in chunks (kda_chunk below in plain torch, or the same kernel from the
package fla-core with --kda fla), the experts as one wide masked FFN. --self-test proves in float32 that it computes what
transformers' kimi_linear computes from the exported file. Matrices are trained with Muon, everything else with AdamW. From 55 % to 65 %
of the time the weights that a forward sees move to their FP8 values (straight-through), and stay there: what is exported is
what was trained. Routers are balanced by moving e_score_correction_bias, without an auxiliary loss.
"""
import argparse
import json
import lzma
import math
import os
import sys
import time

import torch
import torch.nn.functional as F

BEGIN, END, PAD, VOCAB = 256, 257, 258, 259
BLOCK = 128
CONFIG = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "bfloat16",
    "bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD, "vocab_size": VOCAB,
    "hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 512, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3, 5, 6], "num_heads": 2, "head_dim": 128,
                           "short_conv_kernel_size": 4},
    "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 72, "mla_use_nope": True, "rope_theta": 10000.0, "rope_scaling": None,
    "num_experts": 16, "num_experts_per_token": 2, "num_shared_experts": 1, "moe_intermediate_size": 128,
    "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "routed_scaling_factor": 2.0, "num_expert_group": 1,
    "topk_group": 1, "use_grouped_topk": True, "hidden_act": "silu", "rms_norm_eps": 1e-5, "initializer_range": 0.02,
    "model_max_length": 4096, "num_nextn_predict_layers": 0, "tie_word_embeddings": False, "use_cache": True,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    "transformers_version": "5.17.0",
}
GENERATION_CONFIG = {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD, "do_sample": True, "temperature": 0.7, "top_p": 0.95}
# How often a training window comes from each source.
MIX = {"kjv": .17, "austen": .20, "melville": .07, "twain": .03, "milton": .04, "shakespeare": .21, "spurgeon": .28}


# --- FP8 blocks ------------------------------------------------------------------------------------------------------

def fp8_blocks(w):
    """[..., N, K] -> (e4m3 [..., N, K], f32 scales [..., ceil(N/128), ceil(K/128)]); scales are powers of two, so that q * scale is
    exact in bf16."""
    n, k = w.shape[-2:]
    p = F.pad(w, (0, -k % BLOCK, 0, -n % BLOCK))
    p = p.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))                    # [..., nb, 128, kb, 128]
    amax = p.abs().amax(dim=(-3, -1), keepdim=True).clamp_min(1e-12)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448.0)))
    q = (p / scale).to(torch.float8_e4m3fn)
    return q, scale


def fp8_values(w):
    q, scale = fp8_blocks(w)
    n, k = w.shape[-2:]
    return (q.to(torch.float32) * scale).flatten(-4, -3).flatten(-2, -1)[..., :n, :k]


# --- parameters, under the published names; the experts of a layer are stacked [E, ., .] and split on export -----------

def is_full(i):
    return i + 1 in CONFIG["linear_attn_config"]["full_attn_layers"]


def is_dense(i):
    return i < CONFIG["first_k_dense_replace"]


def make_parameters(seed):
    c, la = CONFIG, CONFIG["linear_attn_config"]
    h, d, n = c["hidden_size"], la["head_dim"], la["num_heads"]
    D, heads = n * d, c["num_attention_heads"]
    gen = torch.Generator().manual_seed(seed)
    p = {}

    def mat(name, *shape, gain=1.0):
        p[name] = torch.randn(*shape, generator=gen) * (0.7 * gain / math.sqrt(shape[-1]))

    def ones(name, size):
        p[name] = torch.ones(size)

    p["model.embed_tokens.weight"] = torch.randn(VOCAB, h, generator=gen) * 0.1
    for i in range(c["num_hidden_layers"]):
        b = f"model.layers.{i}."
        ones(b + "input_layernorm.weight", h)
        a = b + "self_attn."
        if is_full(i):
            mat(a + "q_proj.weight", heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"]), h)
            mat(a + "kv_a_proj_with_mqa.weight", c["kv_lora_rank"] + c["qk_rope_head_dim"], h)
            ones(a + "kv_a_layernorm.weight", c["kv_lora_rank"])
            mat(a + "kv_b_proj.weight", heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), c["kv_lora_rank"])
            mat(a + "o_proj.weight", h, heads * c["v_head_dim"], gain=0.3)
        else:
            for x in "qkv":
                mat(a + f"{x}_proj.weight", D, h)
                p[a + f"{x}_conv1d.weight"] = (torch.rand(D, 1, la["short_conv_kernel_size"], generator=gen) - 0.5)
                p[a + f"{x}_conv1d.weight"][:, :, -1] += 0.5
            p[a + "A_log"] = torch.empty(1, 1, n, 1).uniform_(1.0, 16.0, generator=gen).log()
            dt = torch.empty(D).uniform_(math.log(1e-3), math.log(1e-1), generator=gen).exp()
            p[a + "dt_bias"] = dt + torch.log(-torch.expm1(-dt))
            mat(a + "f_a_proj.weight", d, h)
            mat(a + "f_b_proj.weight", D, d)
            mat(a + "b_proj.weight", n, h)
            mat(a + "g_a_proj.weight", d, h)
            mat(a + "g_b_proj.weight", D, d)
            ones(a + "o_norm.weight", d)
            mat(a + "o_proj.weight", h, D, gain=0.3)
        ones(b + "post_attention_layernorm.weight", h)
        if is_dense(i):
            mat(b + "mlp.gate_proj.weight", c["intermediate_size"], h)
            mat(b + "mlp.up_proj.weight", c["intermediate_size"], h)
            mat(b + "mlp.down_proj.weight", h, c["intermediate_size"], gain=0.3)
        else:
            m, e, inner = b + "block_sparse_moe.", c["num_experts"], c["moe_intermediate_size"]
            mat(m + "gate.weight", e, h)
            p[m + "gate.e_score_correction_bias"] = torch.zeros(e)
            mat(m + "experts.w1.weight", e, inner, h)
            mat(m + "experts.w3.weight", e, inner, h)
            mat(m + "experts.w2.weight", e, h, inner, gain=0.3)
            mat(m + "shared_experts.gate_proj.weight", inner, h)
            mat(m + "shared_experts.up_proj.weight", inner, h)
            mat(m + "shared_experts.down_proj.weight", h, inner, gain=0.3)
    ones("model.norm.weight", h)
    mat("lm_head.weight", VOCAB, h, gain=0.3)
    return p


def is_fp8(name):
    return name.endswith("_proj.weight") and ".b_proj." not in name or ".experts." in name or "kv_a_proj_with_mqa" in name


def is_bf16(name):
    return not is_fp8(name) and not name.endswith(("A_log", "dt_bias", "e_score_correction_bias"))


def export(p, directory):
    """Writes the checkpoint as it is shipped."""
    from safetensors.torch import save_file
    out = {}

    def put(name, w):
        if is_fp8(name):
            q, scale = fp8_blocks(w)
            n, k = w.shape
            out[name] = q.view(torch.uint8).flatten(-4, -3).flatten(-2, -1)[:n, :k].contiguous().view(torch.float8_e4m3fn)
            out[name + "_scale_inv"] = scale[:, 0, :, 0].contiguous()
        else:
            out[name] = w.to(torch.bfloat16).contiguous() if is_bf16(name) else w.contiguous()

    for name, w in p.items():
        w = w.detach().float().cpu()
        if ".experts." in name:
            for e in range(w.shape[0]):
                put(name.replace("experts.", f"experts.{e}.", 1), w[e])
        else:
            put(name, w)
    os.makedirs(directory, exist_ok=True)
    save_file(out, os.path.join(directory, "model.safetensors"), metadata={"format": "pt"})
    os.chmod(os.path.join(directory, "model.safetensors"), 0o644)
    for file, value in ("config.json", CONFIG), ("generation_config.json", GENERATION_CONFIG):
        with open(os.path.join(directory, file), "w") as f:
                f.write(json.dumps(value, indent=2) + "\n")


def import_checkpoint(directory):
    """The inverse of export: parameters in float32, FP8 multiplied out, experts stacked."""
    from safetensors.torch import load_file
    raw, p, names = load_file(os.path.join(directory, "model.safetensors")), {}, list(make_parameters(0))

    def get(name):
        w = raw[name].float()
        if name + "_scale_inv" in raw:
            s = raw[name + "_scale_inv"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            w = w * s[:w.shape[0], :w.shape[1]]
        return w

    for name in names:
        if ".experts." in name:
            p[name] = torch.stack([get(name.replace("experts.", f"experts.{e}.", 1)) for e in range(CONFIG["num_experts"])])
        else:
            p[name] = get(name)
    return p


# --- forward ---------------------------------------------------------------------------------------------------------

def l2norm(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def kda_chunk(q, k, v, g, beta, C=64, S=16):
    """The gated delta rule of models.md 3.2 for whole sequences, in chunks of C. q, k, v, g: [B, T, n, d] (g: log decay per
    channel), beta: [B, T, n]. Every exponent is <= 0: rows of a sub-block of S are taken relative to the sub-block's start, and the
    diagonal sub-blocks are written out."""
    B, T0, n, d = q.shape
    T = -(-T0 // C) * C

    def chunks(x):
        x = x.float().transpose(1, 2)
        x = F.pad(x, (0, 0, 0, T - T0))
        return x.reshape(B, n, T // C, C, x.shape[-1])

    q, k, v, g, beta = (chunks(x) for x in (l2norm(q.float()) * d ** -0.5, l2norm(k.float()), v, g, beta[..., None]))
    G = g.cumsum(-2)
    sub = lambda x: x.unflatten(-2, (C // S, S))
    kb, qb, Gb = sub(k), sub(q), sub(G)
    start = torch.cat([torch.zeros_like(Gb[..., :1, -1, :]), Gb[..., :-1, -1, :]], -2)
    left = torch.exp(Gb - start[..., None, :])
    kl, ql = kb * left, qb * left
    tri = torch.tril(torch.ones(S, S, dtype=torch.bool, device=q.device))
    decay = torch.exp((Gb[..., :, None, :] - Gb[..., None, :, :]).masked_fill(~tri[..., None], -float("inf")))
    right = kb[..., None, :, :] * decay
    diag_k, diag_q = (kb[..., :, None, :] * right).sum(-1), (qb[..., :, None, :] * right).sum(-1)
    rows_k, rows_q = [], []
    for s in range(C // S):
        a, b = [], []
        if s:
            r = (k[..., :s * S, :] * torch.exp(start[..., s, None, :] - G[..., :s * S, :])).transpose(-1, -2)
            a, b = [kl[..., s, :, :] @ r], [ql[..., s, :, :] @ r]
        rest = torch.zeros_like(diag_k[..., 0, :, :1]).expand(*diag_k.shape[:-3], S, C - (s + 1) * S)
        rows_k.append(torch.cat(a + [diag_k[..., s, :, :], rest], -1))
        rows_q.append(torch.cat(b + [diag_q[..., s, :, :], rest], -1))
    A, P = torch.cat(rows_k, -2), torch.cat(rows_q, -2)
    eye = torch.eye(C, device=q.device)
    inv = torch.linalg.solve_triangular(eye + torch.tril(A, -1) * beta, eye.expand_as(A), upper=False, unitriangular=True)
    u, w = inv @ (v * beta), inv @ (k * beta * torch.exp(G))
    q_in, last = q * torch.exp(G), G[..., -1:, :]
    k_out, keep = (k * torch.exp(last - G)).transpose(-1, -2), torch.exp(last).transpose(-1, -2)
    state, out = torch.zeros(B, n, d, d, device=q.device), []
    for i in range(T // C):
        new = u[:, :, i] - w[:, :, i] @ state
        out.append(q_in[:, :, i] @ state + P[:, :, i] @ new)
        state = state * keep[:, :, i] + k_out[:, :, i] @ new
    return torch.cat(out, 2).transpose(1, 2)[:, :T0]


def kda_fla(q, k, v, g, beta):
    from fla.ops.kda import chunk_kda
    return chunk_kda(q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous(), beta.contiguous(), use_qk_l2norm_in_kernel=True)[0]


def rms(x, w, eps):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


class Model:
    def __init__(self, device, dtype, kda, dropout=0.0):
        self.device, self.dtype, self.kda, self.dropout = device, dtype, kda, dropout

    def weights(self, p, alpha):
        """What the forward multiplies with: alpha of the way from the master weights to their FP8 values."""
        w = {}
        for name, x in p.items():
            if is_fp8(name):
                x = x + alpha * (fp8_values(x.detach()) - x.detach())
                x = x.to(self.dtype)
            elif is_bf16(name):
                x = x + alpha * (x.detach().to(torch.bfloat16).float() - x.detach())
            w[name] = x
        return w

    def lin(self, x, w):
        return F.linear(x.to(self.dtype), w.to(self.dtype))

    def delta(self, x, w, a):
        B, T, _ = x.shape
        d = CONFIG["linear_attn_config"]["head_dim"]
        taps = CONFIG["linear_attn_config"]["short_conv_kernel_size"]
        qkv = self.lin(x, torch.cat([w[a + f"{y}_proj.weight"] for y in "qkv"]))
        conv = torch.cat([w[a + f"{y}_conv1d.weight"] for y in "qkv"])[:, 0]
        u = F.pad(qkv.float(), (0, 0, taps - 1, 0))
        qkv = F.silu(sum(u[:, j:j + T] * conv[:, j] for j in range(taps))).to(self.dtype)
        q, k, v = (y.reshape(B, T, -1, d) for y in qkv.chunk(3, -1))
        fg = self.lin(x, torch.cat([w[a + "f_a_proj.weight"], w[a + "g_a_proj.weight"]]))
        f = self.lin(fg[..., :d], w[a + "f_b_proj.weight"]).float() + w[a + "dt_bias"]
        g = -torch.exp(w[a + "A_log"].view(-1, 1)) * F.softplus(f).reshape(B, T, -1, d)
        beta = torch.sigmoid(self.lin(x, w[a + "b_proj.weight"]).float())
        o = self.kda(q, k, v, g, beta)
        z = self.lin(fg[..., d:], w[a + "g_b_proj.weight"]).float().reshape(B, T, -1, d)
        o = rms(o, w[a + "o_norm.weight"], CONFIG["rms_norm_eps"]) * torch.sigmoid(z)
        return self.lin(o.reshape(B, T, -1), w[a + "o_proj.weight"])

    def attention(self, x, w, a):
        B, T, _ = x.shape
        n, nope, rope, vd = (CONFIG[y] for y in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        q = self.lin(x, w[a + "q_proj.weight"]).reshape(B, T, n, nope + rope)
        c, pe = self.lin(x, w[a + "kv_a_proj_with_mqa.weight"]).split([CONFIG["kv_lora_rank"], rope], -1)
        kv = self.lin(rms(c, w[a + "kv_a_layernorm.weight"], 1e-6), w[a + "kv_b_proj.weight"]).reshape(B, T, n, nope + vd)
        k = torch.cat([kv[..., :nope], pe[:, :, None].expand(B, T, n, rope)], -1)
        v = F.pad(kv[..., nope:], (0, nope + rope - vd))
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.lin(o.transpose(1, 2)[..., :vd].reshape(B, T, -1), w[a + "o_proj.weight"])

    def experts(self, x, w, m):
        """All experts as one FFN whose hidden units are multiplied by their expert's weight (0: not chosen); the shared expert is the
        last one, with weight 1. Returns (output, tokens per expert)."""
        E, inner = CONFIG["num_experts"], CONFIG["moe_intermediate_size"]
        score = torch.sigmoid(F.linear(x.float(), w[m + "gate.weight"].float()))
        idx = (score.detach() + w[m + "gate.e_score_correction_bias"]).topk(CONFIG["num_experts_per_token"], -1).indices
        chosen = torch.zeros_like(score).scatter(-1, idx, 1.0)
        weight = score * chosen
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * CONFIG["routed_scaling_factor"]
        weight = torch.cat([weight, torch.ones_like(weight[..., :1])], -1)
        up1 = torch.cat([w[m + "experts.w1.weight"].flatten(0, 1), w[m + "shared_experts.gate_proj.weight"]])
        up3 = torch.cat([w[m + "experts.w3.weight"].flatten(0, 1), w[m + "shared_experts.up_proj.weight"]])
        down = torch.cat([w[m + "experts.w2.weight"].transpose(0, 1).flatten(1, 2), w[m + "shared_experts.down_proj.weight"]], 1)
        y = F.silu(self.lin(x, up1).float()) * self.lin(x, up3).float()
        y = y.unflatten(-1, (E + 1, inner)) * weight[..., None]
        return self.lin(y.flatten(-2), down), chosen.sum(dim=(0, 1))

    def logits(self, p, alpha, tokens, drop=False):
        w, eps, loads = self.weights(p, alpha), CONFIG["rms_norm_eps"], []
        x = F.embedding(tokens, w["model.embed_tokens.weight"]).float()
        add = lambda y: F.dropout(y, self.dropout) if drop and self.dropout else y
        for i in range(CONFIG["num_hidden_layers"]):
            b = f"model.layers.{i}."
            y = rms(x, w[b + "input_layernorm.weight"], eps)
            x = x + add((self.attention if is_full(i) else self.delta)(y, w, b + "self_attn."))
            y = rms(x, w[b + "post_attention_layernorm.weight"], eps)
            if is_dense(i):
                z = F.silu(self.lin(y, w[b + "mlp.gate_proj.weight"]).float()) * self.lin(y, w[b + "mlp.up_proj.weight"]).float()
                x = x + add(self.lin(z, w[b + "mlp.down_proj.weight"]))
            else:
                z, load = self.experts(y, w, b + "block_sparse_moe.")
                x = x + add(z)
                loads.append(load)
        return self.lin(rms(x, w["model.norm.weight"], eps), w["lm_head.weight"]).float(), torch.stack(loads)

    def loss(self, p, alpha, tokens, targets, drop):
        logits, loads = self.logits(p, alpha, tokens, drop)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD), loads


# --- training --------------------------------------------------------------------------------------------------------

def newton_schulz(g):
    """Muon's orthogonalisation of a stack of matrices [m, n, k]."""
    x = g.to(torch.bfloat16)
    if g.shape[-2] > g.shape[-1]:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if g.shape[-2] > g.shape[-1] else x).float()


class Muon:
    """Momentum, orthogonalised, scaled to the update size of Adam (0.2 sqrt(max(n, k)))."""

    def __init__(self, params, decay):
        self.params, self.decay = params, decay
        self.momentum = [torch.zeros_like(x) for x in params]
        self.groups = {}
        for i, x in enumerate(params):
            self.groups.setdefault(tuple(x.shape[-2:]), []).append(i)

    def stacked(self, ids, grads):
        return torch.cat([grads[i].reshape(-1, *grads[i].shape[-2:]) for i in ids])

    @torch.no_grad()
    def step(self, lr, ns):
        grads = [x.grad for x in self.params]
        torch._foreach_mul_(self.momentum, 0.95)
        torch._foreach_add_(self.momentum, grads)
        nesterov = torch._foreach_add(grads, self.momentum, alpha=0.95)
        torch._foreach_mul_(self.params, 1 - lr * self.decay)
        for (n, k), ids in self.groups.items():
            o = ns(self.stacked(ids, nesterov)) * (-lr * 0.2 * math.sqrt(max(n, k)))
            at = 0
            for i in ids:
                m = self.params[i].numel() // (n * k)
                self.params[i].add_(o[at:at + m].reshape(self.params[i].shape))
                at += m


class Data:
    def __init__(self, directory, device, seed):
        import numpy as np
        path = os.path.join(directory, "train.bin.xz")
        blob = lzma.open(path).read()
        self.tokens = torch.from_numpy(np.frombuffer(blob, dtype="<u2").astype("int16")).to(device)
        index = json.load(open(os.path.join(directory, "train.json")))
        spans = {s: (min(e["start"] for e in index if e["source"] == s), max(e["end"] for e in index if e["source"] == s)) for s in MIX}
        self.low = torch.tensor([spans[s][0] for s in MIX], device=device)
        self.size = torch.tensor([spans[s][1] - spans[s][0] for s in MIX], device=device)
        self.mix = torch.tensor([MIX[s] for s in MIX], device=device)
        self.device, self.random = device, torch.Generator(device).manual_seed(seed)
        self.valid = windows(open(os.path.join(directory, "valid.txt"), "rb").read(), device)

    def batch(self, B, T):
        """bos + T-1 tokens, and the T tokens that follow."""
        source = torch.multinomial(self.mix, B, True, generator=self.random)
        at = torch.rand(B, device=self.device, generator=self.random, dtype=torch.float64)
        at = self.low[source] + (at * (self.size[source] - T)).long()
        target = self.tokens[at[:, None] + torch.arange(T, device=self.device)].long()
        return torch.cat([torch.full((B, 1), BEGIN, device=self.device), target[:, :-1]], 1), target


def windows(raw, device, size=1024):
    """Text cut into pieces of size - 1 bytes: inputs are bos + the piece without its last byte (padded), targets the piece.
    bos + piece is `size` tokens; every byte of the text is predicted exactly once."""
    pieces = [raw[i:i + size - 1] for i in range(0, len(raw), size - 1)]
    x, y = (torch.full((len(pieces), size - 1), PAD) for _ in range(2))
    for i, piece in enumerate(pieces):
        b = torch.tensor(list(piece))
        x[i, 0], x[i, 1:len(piece)], y[i, :len(piece)] = BEGIN, b[:-1], b
    return x.to(device), y.to(device)


def schedule(t):
    """Learning rate factor at fraction t: short warm-up, constant, linear to 2 % from 40 % on."""
    return min(1.0, t / 0.01 + 0.02) if t < 0.4 else 0.02 + 0.98 * (1 - t) / 0.6


def train(args):
    torch.set_float32_matmul_precision("high")
    device, dtype = args.device, torch.float32 if args.device == "cpu" else torch.bfloat16
    torch.manual_seed(args.seed)
    data = Data(args.data, device, args.seed)
    p = {k: v.to(device).requires_grad_("e_score" not in k) for k, v in make_parameters(args.seed).items()}
    if args.init:
        for k, v in import_checkpoint(args.init).items():
            p[k].data.copy_(v)
    model = Model(device, dtype, kda_fla if args.kda == "fla" else kda_chunk, args.dropout)
    muon = Muon([x for k, x in p.items() if is_fp8(k)], args.decay)
    rest = [(k, x) for k, x in p.items() if not is_fp8(k) and x.requires_grad]
    matrix = lambda k: k.endswith(("lm_head.weight", "gate.weight", "b_proj.weight"))
    adam = torch.optim.AdamW([{"params": [x for k, x in rest if matrix(k)], "weight_decay": args.decay},
                              {"params": [x for k, x in rest if not matrix(k)], "weight_decay": 0.0}],
                             lr=args.lr, betas=(0.9, 0.95), fused=device != "cpu")
    wrap = torch.compile if args.compile else lambda f: f
    forward, ns = wrap(model.loss), wrap(newton_schulz)
    alpha = torch.zeros((), device=device)
    bias = [p[k] for k in p if "e_score" in k]
    trained = [x for x in p.values() if x.requires_grad]
    log, step, spent, began, last_save, last_eval = [], 0, 0.0, None, 0.0, 0
    total, B = args.minutes * 60, args.batch
    loads_sum, loss_sum, count = 0, 0, 0

    def evaluate():
        with torch.no_grad():
            x, y = data.valid
            nll = sum(F.cross_entropy(model.logits(p, alpha, x[i:i + 16])[0].flatten(0, 1), y[i:i + 16].flatten(), ignore_index=PAD,
                                      reduction="sum") for i in range(0, len(x), 16))
        return float(nll) / int((y != PAD).sum()) / math.log(2)

    def save(name):
        export(p, os.path.join(args.out, name))
        json.dump({"config": vars(args), "log": log}, open(os.path.join(args.out, "log.json"), "w"))

    os.makedirs(args.out, exist_ok=True)
    while True:
        if step == args.warm:                       # the clock starts when everything is compiled
            if device != "cpu":
                torch.cuda.synchronize()
            began = time.time()
        spent = time.time() - began if began else 0.0
        t = spent / total
        if t >= 1 or args.steps and step >= args.steps:
            break
        lr = schedule(t)
        alpha.fill_(min(1.0, max(0.0, (t - 0.55) / 0.10)) if not args.fp8_always else 1.0)
        x, y = data.batch(B, args.length)
        loss, loads = forward(p, alpha, x, y, True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        for group in adam.param_groups:
            group["lr"] = args.lr * lr
        muon.step(args.muon_lr * lr, ns)
        adam.step()
        for x in trained:
            x.grad = None
        with torch.no_grad():                       # experts with too few tokens become easier to choose
            for b, load in zip(bias, loads):
                b.add_(torch.sign(load.mean() - load) * (args.bias_rate * lr))
        loads_sum, loss_sum, count = loads_sum + loads.detach(), loss_sum + loss.detach(), count + 1
        step += 1
        if step % args.every == 0:
            share = loads_sum / loads_sum.sum(-1, keepdim=True)
            entry = {"step": step, "seconds": round(time.time() - began, 1) if began else 0, "tokens": step * B * args.length,
                     "train": round(float(loss_sum / count) / math.log(2), 4), "lr": round(lr, 4), "alpha": round(float(alpha), 3),
                     "expert_share_min": round(float(share.min()), 4), "expert_share_max": round(float(share.max()), 4)}
            if step % (args.every * args.eval_every) == 0:
                entry["valid"] = round(evaluate(), 4)
            log.append(entry)
            print(json.dumps(entry), flush=True)
            loads_sum, loss_sum, count = 0, 0, 0
        if spent - last_save > 180:
            last_save = spent
            save("checkpoint")
    alpha.fill_(1.0)
    log.append({"step": step, "seconds": round(spent, 1), "tokens": step * B * args.length, "valid": round(evaluate(), 4), "final": True,
                "peak_gb": round(torch.cuda.max_memory_allocated() / 2 ** 30, 1) if device != "cpu" else 0})
    print(json.dumps(log[-1]), flush=True)
    save("checkpoint")


# --- proof that this forward is the model --------------------------------------------------------------------------------

def self_test(directory=None):
    """Random (or trained) weights: export, load into transformers, compare logits in float32."""
    import tempfile
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import check
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as tmp:
        if directory is None:
            p = make_parameters(7)
            for k in p:
                if k.endswith(("norm.weight", "layernorm.weight")):
                    p[k].uniform_(0.6, 1.4)
                if "e_score" in k:
                    p[k].normal_(0, 0.05)
                if k.endswith(("o_proj.weight", "down_proj.weight", "w2.weight", "lm_head.weight")):
                    p[k].mul_(3)
                if k.endswith("f_b_proj.weight"):
                    p[k].mul_(4)                    # decays from 1 to almost 0 within a few tokens
            export(p, tmp)
            directory = tmp
        p = import_checkpoint(directory)
        hf = check.load_hf(directory)
        ids = torch.cat([torch.full((2, 1), BEGIN), torch.randint(0, 256, (2, 500))], 1)
        with torch.no_grad():
            ours, loads = Model("cpu", torch.float32, kda_chunk).logits(p, torch.tensor(1.0), ids)
            theirs = hf(input_ids=ids).logits
    err = (ours - theirs).abs().max().item()
    print(f"logits: max |difference| {err:.2e}, max |logit| {theirs.abs().max():.3f}, rms {theirs.square().mean().sqrt():.3f}, "
          f"relative {err / theirs.abs().max().item():.2e}; expert loads {loads.min():.0f}..{loads.max():.0f}")
    assert err / theirs.abs().max().item() < 1e-3
    assert err < 1e-3 * theirs.square().mean().sqrt().item() * 10


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--self-test", action="store_true")
    a.add_argument("--data"), a.add_argument("--out"), a.add_argument("--init")
    a.add_argument("--minutes", type=float, default=13.0)
    a.add_argument("--steps", type=int, default=0, help="stop after so many steps (0: only by the clock)")
    a.add_argument("--warm", type=int, default=5), a.add_argument("--batch", type=int, default=64), a.add_argument("--length", type=int, default=1024)
    a.add_argument("--lr", type=float, default=3e-3), a.add_argument("--muon-lr", type=float, default=4e-3)
    a.add_argument("--decay", type=float, default=0.1), a.add_argument("--dropout", type=float, default=0.1)
    a.add_argument("--bias-rate", type=float, default=3e-3), a.add_argument("--seed", type=int, default=1)
    a.add_argument("--every", type=int, default=50), a.add_argument("--eval-every", type=int, default=10)
    a.add_argument("--kda", choices=("torch", "fla"), default="torch"), a.add_argument("--fp8-always", action="store_true")
    a.add_argument("--compile", type=int, default=1), a.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = a.parse_args()
    if args.self_test:
        return self_test(args.init)
    train(args)


if __name__ == "__main__":
    main()
