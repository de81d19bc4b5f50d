#!/usr/bin/env python3
"""A layer's instructions one behind the other, of a trace that mkctl trace wrote: for each of them the median and the last worker's begin, whole input, end of products and end, in us from the last worker's
end of the layer before; the mean of all traced layers of a kind but the first two and those of the first step.

    profiles/trace_layers.py t.json DELTA_STEP       layers that have such an instruction
"""
import collections
import json
import statistics
import sys

MOST = 32  # workers


def instructions(path):
    """By step and layer: name, begin, input, multiplied, end."""
    with open(path, encoding="utf-8") as f:
        trace = json.load(f)
    layers = collections.defaultdict(list)
    for e in trace["traceEvents"]:  # an instruction, then its parts
        if e["ph"] != "X" or e["tid"] == trace["otherData"]["workers"]:  # the critical path's own track
            continue
        begin, end = e["ts"], e["ts"] + e["dur"]
        if "args" in e:
            last = [e["name"], begin, begin, None, end]
            layers[e["args"]["step"], e["args"]["layer"]].append(last)
        elif e["name"] == "input":
            last[2] = end
        elif e["name"] == "compute":
            last[3] = end
    return layers


def by_name(some):
    found = collections.defaultdict(list)
    for i in some:
        found[i[0]].append(i)
    return found


def ends(some):
    """When the last of what most workers have ends: not of what some of them do alone."""
    return max(max(i[4] for i in of) for of in by_name(some).values() if len(of) >= MOST)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    path, kind = sys.argv[1:]
    layers = instructions(path)
    first = min(step for step, _ in layers)
    took, rows = [], collections.defaultdict(list)
    for (step, layer), all_of in layers.items():
        before = layers.get((step, layer - 1))
        if step == first or layer < 2 or not before or not any(i[0].startswith(kind) for i in all_of):
            continue
        begin = ends(before)
        took.append(ends(all_of) - begin)
        for name, of in by_name(all_of).items():
            if len(of) < MOST:
                continue
            row = []
            for part in range(1, 5):
                times = sorted((i[part] or i[4]) - begin for i in of)
                row += [statistics.median(times), times[-1]]
            rows[name].append(row)
    if not took:
        sys.exit("%s: no layer behind the second has an instruction %s" % (path, kind))
    print("%d layers with %s, %.2f us each            median and last worker" % (len(took), kind, statistics.mean(took)))
    print("%-24s%16s%16s%16s%16s" % ("", "begin", "input", "multiplied", "end"))
    mean = {name: [statistics.mean(column) for column in zip(*of)] for name, of in rows.items()}
    for name, row in sorted(mean.items(), key=lambda item: item[1][6]):
        print("%-24s" % name + "".join("%8.2f%8.2f" % (row[k], row[k + 1]) for k in range(0, 8, 2)))


if __name__ == "__main__":
    main()
