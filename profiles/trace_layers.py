#!/usr/bin/env python3
"""A layer's instructions one behind the other, of a trace that mkctl trace wrote: for each of them how many workers have it, and the median and the last worker's begin, whole input, end of products and
end, in us from the last worker's end of the layer before; the mean of all traced layers of a kind but the first two and those of the first step. A worker's second publication of a vector in a layer has a
row of its own ("GEMV h 2").

    profiles/trace_layers.py t.json DELTA_STEP              layers that have such an instruction
    profiles/trace_layers.py t.json MLA_PARTIAL --last 12   and whom everybody waits for: of that instruction the twelve workers that end last, means of those layers
"""
import argparse
import collections
import json
import statistics
import sys

MOST = 32  # workers
Instruction = collections.namedtuple("Instruction", "name worker begin input multiplied end")


def instructions(path):
    """By step and layer."""
    with open(path, encoding="utf-8") as f:
        trace = json.load(f)
    layers, times = collections.defaultdict(list), collections.Counter()
    for e in trace["traceEvents"]:  # an instruction, then its parts
        if e["ph"] != "X" or e["tid"] == trace["otherData"]["workers"]:  # the critical path's own track
            continue
        begin, end = e["ts"], e["ts"] + e["dur"]
        if "args" in e:
            a, name = e["args"], e["name"]
            of = layers[a["step"], a["layer"]]
            key = a["step"], a["layer"], a["worker"], name
            times[key] += 1
            of.append(Instruction(name if times[key] == 1 else "%s %d" % (name, times[key]), a["worker"], begin, begin, None, end))
        elif e["name"] == "input":
            of[-1] = of[-1]._replace(input=end)
        elif e["name"] == "compute":
            of[-1] = of[-1]._replace(multiplied=end)
    return layers


def by_name(some):
    found = collections.defaultdict(list)
    for i in some:
        found[i.name].append(i)
    return found


def ends(some):
    """When the last of what most workers have ends: not of what some of them do alone."""
    named = by_name(some).values()
    return max(max(i.end for i in of) for of in named if len(of) >= min(MOST, max(map(len, named))))


def table(took, kind, rows):
    print("%d layers with %s, %.2f us each                   median and last worker" % (len(took), kind, statistics.mean(took)))
    print("%-24s%8s%16s%16s%16s%16s" % ("", "workers", "begin", "input", "multiplied", "end"))
    mean = {name: [statistics.mean(column) for column in zip(*of)] for name, of in rows.items()}
    for name, row in sorted(mean.items(), key=lambda item: item[1][7]):
        print("%-24s%8.0f" % (name, row[0]) + "".join("%8.2f%8.2f" % (row[k], row[k + 1]) for k in range(1, 9, 2)))


def last_ones(kind, workers, n):
    print("%s, means of a worker%s%8s%8s%8s" % (kind, " " * max(0, 12 - len(kind)), "begin", "input", "end"))
    mean = {w: [statistics.mean(column) for column in zip(*of)] for w, of in workers.items()}
    for w, row in sorted(mean.items(), key=lambda item: -item[1][2])[:n]:
        print("%32d%8.2f%8.2f%8.2f" % (w, *row))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("kind")
    parser.add_argument("--last", type=int, default=0, metavar="N")
    args = parser.parse_args()
    layers = instructions(args.trace)
    first = min(step for step, _ in layers)
    took, rows, workers = [], collections.defaultdict(list), collections.defaultdict(list)
    for (step, layer), all_of in layers.items():
        before = layers.get((step, layer - 1))
        if step == first or layer < 2 or not before or not any(i.name.startswith(args.kind) for i in all_of):
            continue
        begin = ends(before)
        took.append(ends(all_of) - begin)
        for name, of in by_name(all_of).items():
            row = [len(of)]
            for part in ("begin", "input", "multiplied", "end"):
                times = [(getattr(i, part) or i.end) - begin for i in of]
                row += [statistics.median(times), max(times)]
            rows[name].append(row)
            for i in of if name.startswith(args.kind) else []:
                workers[i.worker].append((i.begin - begin, i.input - begin, i.end - begin))
    if not took:
        sys.exit("%s: no layer behind the second has an instruction %s" % (args.trace, args.kind))
    table(took, args.kind, rows)
    if args.last:
        last_ones(args.kind, workers, args.last)


if __name__ == "__main__":
    main()
