#!/usr/bin/env python3
"""Where the warps of one step are, by ncu's samples: by function of the resident kernel, or by instruction of those whose name has FUNCTION in it.

    ncu --clock-control none --replay-mode application --launch-skip 2 --launch-count 1 -k regex:mk_resident --section SourceCounters -f -o r build/profiles/onestep --preset llama-3.2-1b --rows 8 --ctx 2048
    ncu -i r.ncu-rep --page source --csv >r.csv
    profiles/samples.py build/profiles/onestep r.csv [FUNCTION]

By function: samples, their share, instructions that a step executes and that there are, samples by the three commonest reasons. mk_resident has the warps that load, poll and wait as well. By instruction: its
number, samples, warps that executed it, its text, reasons. The program is the one that was sampled: its kernel, in nvcc's order, says which instruction is whose."""
import collections
import os
import re
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "megakernel"))
import layout

SAMPLES, WARPS, REASON = "Warp Stall Sampling (All Samples)", "Instructions Executed", re.compile(r"stall_(\w+)$")


def page(path):
    """By instruction: samples, warps, text, samples by reason."""
    head, rows = layout.source_page(path, SAMPLES)
    samples, warps, text = head.index(SAMPLES), head.index(WARPS), head.index("Source")
    reasons = [(i, REASON.match(name)[1]) for i, name in enumerate(head) if REASON.match(name)]
    return [(int(row[samples]), int(row[warps]), row[text].strip(), collections.Counter({name: int(row[i]) for i, name in reasons})) for row in rows]


def main_reasons(reasons):
    return ", ".join("%s %d" % (name, n) for name, n in reasons.most_common(3) if n)


def main(argv):
    if len(argv) not in (3, 4):
        sys.exit(__doc__)
    k, of = layout.resident(argv[1]), page(argv[2])
    if len(of) != k.code.n:
        raise layout.Refused("%s: expected %d instructions, the kernel of %s, found %d" % (argv[2], k.code.n, argv[1], len(of)))
    if len(argv) == 4:
        for first, end, name in k.functions:
            if argv[3] in name:
                print(name)
                for i, (samples, warps, text, reasons) in enumerate(of[first:end]):
                    if warps:
                        print("%6d%7d%9d  %-72s %s" % (i, samples, warps, text[:72], main_reasons(reasons)))
        return
    every = sum(samples for samples, _, _, _ in of)
    found = []
    for first, end, name in k.functions:
        some = of[first:end]
        found.append((sum(s for s, _, _, _ in some), sum(w >= layout.EXECUTED for _, w, _, _ in some), end - first, name, sum((r for _, _, _, r in some), collections.Counter())))
    for samples, executed, n, name, reasons in sorted(found, key=lambda f: -f[0]):
        if samples:
            print("%8d%6.1f %%%6d of%6d  %-56s %s" % (samples, 100 * samples / every, executed, n, name[:56], main_reasons(reasons)))


if __name__ == "__main__":
    try:
        main(sys.argv)
    except layout.Refused as e:
        sys.exit("samples.py: %s" % e)
