#!/usr/bin/env python3
"""The shipped checkpoint in Hugging Face transformers, float32, FP8 multiplied out.

    python3 tests/english/check.py                 recompute the figures of reference.json and compare
    python3 tests/english/check.py --write         write reference.json
    python3 tests/english/check.py --sample "..."  a continuation (temperature 0.7, top-p 0.95)

Windows: heldout.txt is cut into pieces of 1,023 bytes (the last one shorter), no overlap. A window is the tokens 256, b0, b1, ...:
1,024 tokens. Position i predicts byte i of the piece; every byte of the file is predicted exactly once, the first of each piece from
the begin token alone. Bits per byte = sum of -log2 p over all bytes / number of bytes, p over all 259 tokens. Each window starts
from an empty state.
"""
import argparse
import json
import math
import os
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
sys.modules["fla"] = None              # fused kernels would replace the plain mixers
sys.modules["causal_conv1d"] = None

HERE = os.path.dirname(os.path.abspath(__file__))
CHECKPOINT = os.path.join(HERE, "checkpoint")
BEGIN, PAD, WINDOW = 256, 258, 1024
PROMPT = '"My dear Tom," said'


def load_hf(directory):
    """The model in float32 through from_pretrained; a missing or unexpected tensor is an error."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    raw, plain = load_file(os.path.join(directory, "model.safetensors")), {}
    for name, w in raw.items():
        if name.endswith("_scale_inv"):
            continue
        if name + "_scale_inv" in raw:
            s = raw[name + "_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            w = w.float() * s[:w.shape[0], :w.shape[1]]
        plain[name] = w.float()
    with tempfile.TemporaryDirectory() as tmp:
        config = json.load(open(os.path.join(directory, "config.json")))
        config.pop("quantization_config")
        json.dump(config, open(os.path.join(tmp, "config.json"), "w"))
        save_file(plain, os.path.join(tmp, "model.safetensors"), metadata={"format": "pt"})
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager", output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def score(model, raw, window=WINDOW, batch=1):
    """[(bytes, bits)] per window."""
    import torch
    import torch.nn.functional as F
    pieces, out = [raw[i:i + window - 1] for i in range(0, len(raw), window - 1)], []
    for i in range(0, len(pieces), batch):
        group = pieces[i:i + batch]
        longest = max(map(len, group))
        ids = torch.tensor([[BEGIN] + list(p[:-1]) + [PAD] * (longest - len(p)) for p in group])
        with torch.no_grad():
            logp = F.log_softmax(model(input_ids=ids, use_cache=False).logits.double(), -1)
        for p, lp in zip(group, logp):
            out.append((len(p), -lp[torch.arange(len(p)), torch.tensor(list(p))].sum().item() / math.log(2)))
    return out


def greedy(model, prompt, n):
    """n greedy tokens after bos + prompt, each from a full pass, with the distance between the two largest logits."""
    import torch
    ids, out, margins = [BEGIN] + list(prompt), [], []
    for _ in range(n):
        with torch.no_grad():
            top = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
        out.append(int(top.indices[0]))
        margins.append(round((top.values[0] - top.values[1]).item(), 5))
        ids.append(out[-1])
    return out, margins


def sample(model, prompt, n=400, temperature=0.7, top_p=0.95, seed=1):
    import torch
    torch.manual_seed(seed)
    ids = model.generate(torch.tensor([[BEGIN] + list(prompt)]), max_new_tokens=n, do_sample=True, temperature=temperature, top_p=top_p,
                         top_k=0, pad_token_id=PAD, eos_token_id=257)[0].tolist()
    return bytes(t for t in ids if t < 256).decode("utf-8", "replace")


def figures(model):
    raw = open(os.path.join(HERE, "heldout.txt"), "rb").read()
    per = score(model, raw)
    ids, margins = greedy(model, PROMPT.encode(), 64)
    import torch
    import transformers
    return {
        "reference": f"transformers {transformers.__version__}, torch {torch.__version__}, float32, eager, FP8 weights multiplied out",
        "text": "heldout.txt", "bytes": len(raw), "windows": len(per), "window_tokens": WINDOW,
        "window_rule": "pieces of 1023 bytes, each preceded by token 256, no overlap, empty state; every byte is scored once",
        "bits_per_byte": round(sum(b for _, b in per) / len(raw), 6),
        "bits_per_window": [round(b, 3) for _, b in per],
        "golden": {"prompt": PROMPT, "prompt_tokens": [BEGIN] + list(PROMPT.encode()), "greedy": ids,
                   "greedy_text": bytes(t for t in ids if t < 256).decode(), "margin": margins, "smallest_margin": min(margins)},
    }


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--checkpoint", default=CHECKPOINT)
    a.add_argument("--write", action="store_true")
    a.add_argument("--sample")
    a.add_argument("--seed", type=int, default=1)
    args = a.parse_args()
    model = load_hf(args.checkpoint)
    if args.sample is not None:
        return print(sample(model, args.sample.encode(), seed=args.seed))
    now, path = figures(model), os.path.join(HERE, "reference.json")
    if args.write:
        open(path, "w").write(json.dumps(now, indent=1) + "\n")
    kept = json.load(open(path))
    worst = max(abs(x - y) for x, y in zip(now["bits_per_window"], kept["bits_per_window"]))
    print(f"bits per byte {now['bits_per_byte']} (kept {kept['bits_per_byte']}), largest difference in a window {worst:.4f} bits; "
          f"greedy {'equal' if now['golden']['greedy'] == kept['golden']['greedy'] else 'DIFFERENT'}: {now['golden']['greedy_text']!r}")
    assert worst < 0.05 and now["golden"]["greedy"] == kept["golden"]["greedy"]


if __name__ == "__main__":
    main()
