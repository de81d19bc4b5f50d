#!/usr/bin/env python3
"""In what order a model's functions lie in the kernel that is for it alone (megakernel/layout.txt, "# Order of MODEL"), searched for on the machine with the GPU.

    [BUILD=build] [OUT=DIR] profiles/orders.py [--seconds 105] [--rows 1] [--steps 200] [--seed 1] [--begin DIR] [--mkd "--kv-cache fp8"] MODEL...

Builds nothing: BUILD has mkctl and profiles/mkd-plain, a daemon with the kernel in nvcc's order, of which each order makes a copy. An order is worth the median step at 2,048 over that of layout.txt's
order, the mean of that if there are several --rows (1,8); a try takes a second and a half. First the order that layout.txt has and fifteen by chance, then the best ones with a function or two
elsewhere. At the end the best four and that of layout.txt are measured three times more. Writes $OUT/layout.txt (default: BUILD's) with the best one's line for each MODEL of this call, and $OUT/orders-MODEL.json with all that was
tried.

What one GPU likes best is some 0.5 % less on the next (profiles/NOTES.md, thirty-ninth section): measure again on another before it is kept. --begin: with the best that DIR/orders-MODEL.json has
instead of some by chance; --seconds 0: no others."""
import argparse
import concurrent.futures
import glob
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
sys.path.insert(0, "megakernel")
import layout

PROFILE = "megakernel/layout.txt"
FIRST, ROUND, BEST = 16, 8, 4  # orders tried before any is changed, in each round after that, and measured again at the end
BUILD = os.environ.get("BUILD", "build")


def functions(program, model):
    """Those that the model's step executes, but for the kernel's entry, which stays in front: in the profile's order."""
    k, profile = layout.resident(program), layout.read_profile(PROFILE, model)
    models, _, strange = layout.models_of(k, profile)
    if strange:
        raise layout.Refused("%s: %d functions of %s are others: profiles/layout.sh first" % (PROFILE, strange, program))
    executed = {name for first, end, name in k.functions[1:] if any(layout.of_one(w) for w in models[first:end])}
    return [name for name in profile if name in executed]


def lay(program, model, order, path):
    """A copy of the program whose kernel has the model's functions in this order."""
    k = layout.resident(program)
    models, rank, _ = layout.models_of(k, layout.read_profile(PROFILE, model, order))
    m = layout.moved(k, models, rank)
    layout.prove(k, m)
    layout.write(k, m)
    with open(path, "wb") as f:
        f.write(k.elf.data)
    os.chmod(path, 0o755)


def measured(mkd, model, args):
    """Milliseconds of a step, by rows."""
    with tempfile.TemporaryDirectory() as d, open(d + "/err", "w+") as err:
        flags = ["--socket-dir", d, "--streams", "1", "--log-level", "warn", "--self-test", "no", "--kv-tokens", "4096", "--device", "gpu", "--preset", model, *args.mkd.split()]
        daemon = subprocess.Popen([mkd, *flags], stdout=subprocess.PIPE, stderr=err, text=True)
        try:
            ready = daemon.stdout.readline()
            run = subprocess.run([BUILD + "/mkctl", "bench", "--socket-dir", d, "--ctx", "2048", "--rows", args.rows, "--steps", str(args.steps), "--out-dir", d], capture_output=True, text=True, timeout=60) if ready else None
        finally:
            daemon.terminate()
            daemon.wait()
        found = [json.load(open(path)) for path in sorted(glob.glob(d + "/*.json"))]
        if len(found) != len(args.rows.split(",")):
            err.seek(0)
            raise layout.Refused("%s: no step of %s was measured: %s" % (mkd, model, (err.read() + (run.stderr if run else "")).strip().replace("\n", "; ")))
        return [one["ms_per_step"]["p50"] for one in found]


def changed(order, chance):
    """An order with a few functions elsewhere."""
    order = list(order)
    for _ in range(chance.choice((1, 1, 2, 3))):
        i = chance.randrange(len(order))
        if chance.random() < 0.5:
            some = order[i : i + chance.choice((1, 1, 2, 3))]
            del order[i : i + len(some)]
            j = chance.randrange(len(order) + 1)
            order[j:j] = some
        else:
            j = chance.randrange(len(order))
            order[i], order[j] = order[j], order[i]
    return order


def search(program, model, args, workers, directory):
    """(worth, milliseconds, order) of all that was tried, the best first; and of the best few, and what layout.txt has, each measured again."""
    chance, begun, tried = random.Random(args.seed), time.monotonic(), []
    known = functions(program, model)

    def times(orders):
        paths = ["%s/%d" % (directory, i) for i in range(len(orders))]
        for done in [workers.submit(lay, program, model, o, p) for o, p in zip(orders, paths)]:
            done.result()
        return [measured(p, model, args) for p in paths]

    def worth(ms, of):
        return statistics.mean(a / b for a, b in zip(ms, of))

    if args.begin:
        with open("%s/orders-%s.json" % (args.begin, model)) as f:
            orders = [known] + [o for _, _, o in json.load(f)["tried"][:ROUND] if o != known]
    else:
        orders = [known] + [chance.sample(known, len(known)) for _ in range(FIRST - 1)]
    base = None
    while True:
        found = times(orders)
        base = base or found[0]
        tried += [(worth(ms, base), ms, o) for ms, o in zip(found, orders)]
        tried.sort()
        if time.monotonic() - begun > args.seconds:
            break
        orders = []
        while len(orders) < ROUND:
            o = changed(tried[min(int(chance.expovariate(1)), BEST, len(tried) - 1)][2], chance)
            if o not in orders and all(o != t for _, _, t in tried):
                orders.append(o)
    last = [known] + [o for _, _, o in tried if o != known][:BEST]
    turns = [times(last) for _ in range(3)]
    base = [statistics.median(ms) for ms in zip(*(turn[0] for turn in turns))]
    again = [(statistics.median(worth(turn[i], base) for turn in turns), [turn[i] for turn in turns], o) for i, o in enumerate(last)]
    return tried, sorted(again), base


def main():
    parser = argparse.ArgumentParser(description="An order of functions for the kernel of each model, searched for.")
    parser.add_argument("--seconds", type=float, default=105, help="of search for each model")
    parser.add_argument("--rows", default="1", help="of the steps that are measured: 1,8")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--begin", metavar="DIR", help="with what an earlier search wrote there")
    parser.add_argument("--mkd", default="", help="further flags of mkd")
    parser.add_argument("model", nargs="+")
    args = parser.parse_args()
    out, program = os.environ.get("OUT", BUILD), BUILD + "/profiles/mkd-plain"
    with open(PROFILE) as f:
        lines = f.readlines()
    try:
        with concurrent.futures.ProcessPoolExecutor() as workers, tempfile.TemporaryDirectory() as directory:
            for model in args.model:
                tried, again, base = search(program, model, args, workers, directory)
                best, _, order = again[0]
                print("%-22s %d orders, %.4f to %.4f of layout.txt's %s ms; the best, measured again: %.4f" % (model, len(tried), tried[0][0], tried[-1][0], ", ".join("%.4f" % ms for ms in base), best), flush=True)
                with open("%s/orders-%s.json" % (out, model), "w") as f:
                    json.dump({"tried": tried, "again": again}, f)
                begin = "%s%s: " % (layout.ORDER, model)
                lines = [line for line in lines if not line.startswith(begin)]
                lines.insert(sum(line.startswith("#") for line in lines), begin + " ".join(order) + "\n")
                with open(out + "/layout.txt", "w") as f:
                    f.writelines(lines)
    except (layout.Refused, OSError, subprocess.TimeoutExpired) as e:
        print("orders.py: %s" % e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
