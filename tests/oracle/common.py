"""Shared by the make_<family>.py scripts: fixed environment, FP8 blocks, checkpoint files, prompt search, goldens.

A family script supplies the configuration, the random tensors and one function that says which scores its router
chooses by. Everything that ends up in a file goes through here, so that all families have the same format (README.md).
"""

import argparse
import copy
import json
import os
import pathlib
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
# Fused kernels would replace the plain torch mixers whose mathematics we want: make their import fail.
sys.modules["fla"] = None
sys.modules["causal_conv1d"] = None

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

torch.set_num_threads(1)  # one thread: the order of every sum is fixed
torch.set_grad_enabled(False)

BLOCK = 128
FP8_MAX = 448.0  # largest finite e4m3fn
HIDDEN_POSITIONS = list(range(15)) + [-1]


# --- FP8 blocks ------------------------------------------------------------------------------------------------------

def blocks(scale, shape):
    """Spread scale [ceil(N/128), ceil(K/128)] over a matrix of shape [N, K]."""
    return scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: shape[0], : shape[1]]


def quantise(w):
    """[N, K] f32 -> (e4m3 [N, K], f32 scales [ceil(N/128), ceil(K/128)]), every scale a power of two.

    e4m3 has 4 significant bits and bf16 has 8, so q * 2^e is exact in bf16 and f32: one set of weights and one golden
    serve FP8, BF16 and F32 loading.
    """
    n, k = w.shape
    padded = torch.zeros(-(-n // BLOCK) * BLOCK, -(-k // BLOCK) * BLOCK)
    padded[:n, :k] = w
    amax = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK).abs().amax(dim=(1, 3))
    scale = torch.exp2(torch.ceil(torch.log2(amax / FP8_MAX)))
    return (w / blocks(scale, w.shape)).to(torch.float8_e4m3fn), scale


def dequantise(q, scale):
    return q.float() * blocks(scale, q.shape)


# --- checkpoints -----------------------------------------------------------------------------------------------------

class Checkpoint:
    """The tensors of a checkpoint in file order, with the random generator that draws them."""

    def __init__(self, seed):
        self.tensors = {}
        self.random = torch.Generator().manual_seed(seed)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.random)

    def uniform(self, low, high, *shape):
        return low + (high - low) * torch.rand(*shape, generator=self.random)

    def matrix(self, n, k, gain):
        """Random [n, k] whose product with a unit-variance vector has a standard deviation near `gain`. Each 128x128
        block has its own factor (1/2, 1 or 2), so that a scale taken from the wrong block shows."""
        factor = torch.exp2(torch.randint(-1, 2, (-(-n // BLOCK), -(-k // BLOCK)), generator=self.random).float())
        w = self.normal(n, k) * blocks(factor, (n, k))
        return w * (gain / (k ** 0.5 * w.square().mean().sqrt()))

    def fp8(self, name, w):
        self.tensors[name + ".weight"], self.tensors[name + ".weight_scale_inv"] = quantise(w)

    def bf16(self, name, w):
        self.tensors[name] = w.to(torch.bfloat16)

    def f32(self, name, w):
        """Stored as F32, but with a value that bf16 holds exactly."""
        self.tensors[name] = w.to(torch.bfloat16).float()

    def save(self, directory, config, generation_config):
        """Two shards, cut at half the bytes and on purpose between a weight and its scale."""
        sizes = {name: t.numel() * t.element_size() for name, t in self.tensors.items()}
        total, done, shards = sum(sizes.values()), 0, [{}, {}]
        fp8 = any(name.endswith("_scale_inv") for name in self.tensors)
        for name, t in self.tensors.items():
            if not shards[1] and done >= total / 2 and (name.endswith("_scale_inv") or not fp8):
                shards[1][name] = t
            else:
                shards[1 if shards[1] else 0][name] = t
            done += sizes[name]
        directory.mkdir(parents=True, exist_ok=True)
        weight_map = {}
        for i, shard in enumerate(shards):
            file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            save_tensors(directory / file, {name: t.contiguous() for name, t in shard.items()}, {"format": "pt"})
            weight_map.update(dict.fromkeys(shard, file))
        write_json(directory / "model.safetensors.index.json",
                   {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
        write_json(directory / "config.json", config)
        write_json(directory / "generation_config.json", generation_config)


def save_tensors(path, tensors, metadata):
    """save_file, with the metadata in sorted order: the library's own order changes from run to run."""
    save_file(tensors, path, metadata=metadata)
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode().ljust(end - 8)
    assert len(text) == end - 8
    path.write_bytes(data[:8] + text + data[end:])


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def read_checkpoint(directory):
    """Every tensor of the directory as stored, through the index."""
    weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    files = {file: load_file(directory / file) for file in sorted(set(weight_map.values()))}
    assert sum(map(len, files.values())) == len(weight_map), "index and shards name different tensors"
    return {name: files[file][name] for name, file in weight_map.items()}


def plain_tensors(stored):
    """Stored tensors -> the same names in F32, FP8 pairs multiplied out. Fails if bf16 would lose a bit of any."""
    plain = {}
    for name, t in stored.items():
        if name.endswith("_scale_inv"):
            assert (torch.exp2(torch.log2(t).round()) == t).all(), f"{name}: scale is not a power of two"
            continue
        plain[name] = dequantise(t, stored[name + "_scale_inv"]) if t.dtype == torch.float8_e4m3fn else t.float()
        assert torch.equal(plain[name], plain[name].bfloat16().float()), f"{name}: not exact in bf16"
        assert plain[name].isfinite().all(), name
    return plain


def load_reference(directory, dtype=torch.float32, skip=None):
    """The Hugging Face model in float32, from the dequantised tensors under their checkpoint names, stored as `dtype`.

    It goes through from_pretrained and its renames; a missing, unexpected or mismatched key is an error. Tensors whose name
    starts with `skip` are left out: layers that only draft, which the model does not have.
    """
    config = json.loads((directory / "config.json").read_text())
    config.pop("quantization_config", None)
    config = config.get("text_config", config)
    plain = plain_tensors(read_checkpoint(directory))
    plain = {k: v for k, v in plain.items() if not (skip and k.startswith(skip))}
    with tempfile.TemporaryDirectory() as tmp:
        tmp = pathlib.Path(tmp)
        write_json(tmp / "config.json", config)
        save_file({k: v.to(dtype) for k, v in plain.items()}, tmp / "model.safetensors", metadata={"format": "pt"})
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager",
            output_loading_info=True)
    bad = {k: v for k, v in info.items() if v}
    assert not bad, f"load: {bad}"
    count = sum({t.data_ptr(): t.numel() for t in model.state_dict().values()}.values())  # tied ones once
    assert count == sum(t.numel() for t in plain.values()), "the model has other elements than the checkpoint"
    return model.eval()


# --- running the reference -------------------------------------------------------------------------------------------

class Recorder:
    """Hooks that keep what a pass did: the residual stream (before layer 0, after each layer), every router's choice.

    choice_scores(router_module, router_output) -> [tokens, experts], what the top-k is taken of (bias included), or a pair of
    that and [tokens], the margin of what was chosen before (groups): a router's margin is the smaller of both.
    """

    def __init__(self, model, routers, choice_scores):
        self.hidden, self.scores, self.before, self.chosen = [], [], [], []
        layers = model.model.layers
        layers[0].register_forward_pre_hook(lambda m, args: self.hidden.append(args[0][0].clone()))
        for layer in layers:
            layer.register_forward_hook(lambda m, args, out: self.hidden.append(out[0].clone()))
        for router in routers:
            router.register_forward_hook(self.route(choice_scores))

    def route(self, choice_scores):
        def hook(module, args, out):
            scores = choice_scores(module, out)
            scores, before = scores if isinstance(scores, tuple) else (scores, torch.full(scores.shape[:1], torch.inf))
            self.scores.append(scores)
            self.before.append(before)
            self.chosen.append(out[-1])
        return hook

    def clear(self):
        self.hidden.clear(), self.scores.clear(), self.before.clear(), self.chosen.clear()

    def routes(self):
        """(ids [moe layers, n, k] ascending, margin [moe layers, n]: k-th minus (k+1)-th best choice score)."""
        ids = torch.stack(self.chosen).sort(-1).values
        k = ids.shape[-1]
        best = torch.stack(self.scores).topk(k + 1)
        margin = torch.minimum(best.values[..., k - 1] - best.values[..., k], torch.stack(self.before))
        same = (best.indices[..., :k].sort(-1).values == ids).all(-1)
        assert (same | (margin < 1e-6)).all(), "our idea of the router's scores is not the model's"
        return ids.to(torch.int32), margin


class Oracle:
    def __init__(self, model, routers, choice_scores):
        self.model, self.recorder = model, Recorder(model, routers, choice_scores)

    def full(self, ids):
        """One pass over all ids without a cache -> logits [n, V]. The recorder holds the rest."""
        self.recorder.clear()
        return self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]

    def step(self, token, cache):
        """One token with the cache, which is updated -> (logits [V], smallest router margin)."""
        self.recorder.clear()
        logits = self.model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1]
        return logits, self.recorder.routes()[1].min().item() if self.recorder.chosen else float("inf")

    def new_cache(self):
        return transformers.DynamicCache(config=self.model.config)

    def recurrent(self, ids):
        """All ids one at a time through the cache -> (logits [n, V], cache)."""
        cache = self.new_cache()
        return torch.stack([self.step(t, cache)[0] for t in ids]), cache

    def prompt(self, first, n, vocab, margin, seed):
        """n tokens, each drawn until every router's margin at its position is at least `margin`."""
        random = torch.Generator().manual_seed(seed)
        ids, cache, drawn = [], self.new_cache(), 0
        while len(ids) < n:
            token = first if not ids and not drawn else int(torch.randint(vocab, (1,), generator=random))
            attempt, drawn = copy.deepcopy(cache), drawn + 1
            if self.step(token, attempt)[1] >= margin:
                ids.append(token)
                cache = attempt
        print(f"prompt: {n} tokens out of {drawn} drawn")
        return ids

    def greedy(self, cache, logits, n):
        """Yield (token, top-1 minus top-2, smallest router margin when it is fed) for n greedy tokens."""
        for _ in range(n):
            top = logits.topk(2)
            token = int(top.indices[0])
            logits, route = self.step(token, cache)
            yield token, (top.values[0] - top.values[1]).item(), route

    def ending(self, prompt, n, vocab, margin, route_margin, distinct, stop, seed):
        """Replace the last prompt token by one after which n greedy tokens keep the logit and router margins, repeat
        little and never hit a stop id: then a greedy test fails for reasons, not for rounding."""
        _, before = self.recurrent(prompt[:-1])
        order = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed)).tolist()
        for tried, last in enumerate(order):
            cache, out = copy.deepcopy(before), []
            logits, route = self.step(last, cache)
            if route < route_margin:
                continue
            for token, gap, route in self.greedy(cache, logits, n):
                if gap < margin or route < route_margin or token in stop:
                    break
                out.append(token)
            if len(out) == n and len(set(out)) >= distinct:
                print(f"ending: candidate {tried + 1}, {len(set(out))} distinct greedy tokens")
                return prompt[:-1] + [last]
        raise SystemExit("no ending found: lower the margins or change the seed")


def golden(oracle, prompt, n_greedy):
    """All tensors of golden.safetensors (README.md), from full passes; the greedy ids by feeding back, with the cache."""
    n = len(prompt)
    logits, cache = oracle.recurrent(prompt)
    steps = list(oracle.greedy(cache, logits[-1], n_greedy))
    greedy = [s[0] for s in steps]
    full = oracle.full(prompt + greedy)
    routes = oracle.recorder.routes() if oracle.recorder.chosen else None
    assert full[n - 1:-1].argmax(-1).tolist() == greedy, "cached and full passes choose other tokens"
    top = full[n - 1:-1].topk(2).values
    out = {
        "prompt": torch.tensor(prompt, dtype=torch.int32),
        "greedy": torch.tensor(greedy, dtype=torch.int32),
        "greedy_margin": top[:, 0] - top[:, 1],
    }
    if routes:
        out["greedy_router_idx"], out["greedy_router_margin"] = (t[:, n:] for t in routes)
    out["logits"] = oracle.full(prompt)
    if routes:
        out["router_idx"], out["router_margin"] = oracle.recorder.routes()
    where = [p % n for p in HIDDEN_POSITIONS]
    out["hidden"] = torch.stack(oracle.recorder.hidden)[:, where]
    out["hidden_pos"] = torch.tensor(where, dtype=torch.int32)
    return {name: t.contiguous() for name, t in out.items()}


def write_golden(path, tensors, script, seed):
    save_tensors(path, tensors, {"script": script, "seed": str(seed), "torch": torch.__version__, "dtype": "float32",
                                 "transformers": transformers.__version__, "attn_implementation": "eager"})


def relative(a, b):
    """RMS of the difference over the RMS of the reference b."""
    return ((a - b).square().mean().sqrt() / b.square().mean().sqrt()).item()


def verify(oracle, directory, golden_now, router_margin):
    """Compare a fresh golden with the committed one and print the figures that README.md quotes."""
    path = directory / "golden.safetensors"
    kept = load_file(path)
    with safe_open(path, "pt") as f:
        print("made with", f.metadata())
    assert kept.keys() == golden_now.keys(), kept.keys() ^ golden_now.keys()
    for name, t in golden_now.items():
        assert t.shape == kept[name].shape and t.dtype == kept[name].dtype, name
        if t.dtype == torch.int32:
            assert torch.equal(t, kept[name]), f"{name} differs"
        else:
            assert relative(t, kept[name]) < 1e-5, f"{name} differs by {relative(t, kept[name]):.2e}"
    prompt, logits = kept["prompt"].tolist(), kept["logits"]
    cached, _ = oracle.recurrent(prompt)
    print(f"logits: std {logits.std():.3f}, largest {logits.abs().max():.2f}; "
          f"cached against full pass: {relative(cached, logits):.2e} of the RMS, "
          f"largest {(cached - logits).abs().max():.2e}")
    print(f"greedy: smallest margin {kept['greedy_margin'].min():.4f}, {len(set(kept['greedy'].tolist()))} distinct")
    if "router_margin" in kept:
        low, low_greedy = kept["router_margin"].min(), kept["greedy_router_margin"].min()
        print(f"router: smallest margin {low:.2e} in the prompt, {low_greedy:.2e} in the greedy part; "
              f"experts used per layer {[len(set(l.flatten().tolist())) for l in kept['router_idx']]}")
        assert min(low, low_greedy) >= router_margin
    for i, h in enumerate(kept["hidden"]):
        print(f"residual stream {'embedding' if i == 0 else f'after layer {i - 1}'}: RMS {h.square().mean().sqrt():.3f}")
    size = sum(f.stat().st_size for f in directory.iterdir())
    print(f"files: {size} bytes")
    for f in sorted(directory.iterdir()):
        print(f"  {f.stat().st_size:9d} {f.name}")


# --- the command line ------------------------------------------------------------------------------------------------

def main(doc, make, check, mistakes, families=None, default=None):
    """What every script ends with: make and check, or --check alone, or --mistakes. With `families` each function takes one of them: all
    in turn, or, where there is a default, the one that the command line names."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if default:
        parser.add_argument("family", nargs="?", default=default, choices=families)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--check", action="store_true")
    group.add_argument("--mistakes", action="store_true")
    args = parser.parse_args()
    for family in [()] if families is None else [(args.family,)] if default else [(f,) for f in families]:
        for function in [mistakes] if args.mistakes else [check] if args.check else [make, check]:
            function(*family)
