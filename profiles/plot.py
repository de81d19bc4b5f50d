#!/usr/bin/env python3
"""Plots of the JSON that make bench writes, as SVG (standard library only).

    profiles/plot.py DIR        reads DIR/PRESET-ctxN-rowsR.json, DIR/PRESET-unloaded-ctx2048-rows1.json and DIR/PRESET-baseline.json, writes DIR/plots/*.svg

time.svg      time per token at context 2,048, one row: the memory's floor, the resident kernel, one launch a step, the graph baseline
context.svg   fraction of the run's own stream ceiling by context
rows.svg      time of a step by the number of rows, over that of one row
"""
import glob
import json
import os
import re
import sys
from xml.sax.saxutils import escape

INK, GRID = "#333", "#ddd"
COLORS = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb"]


def text(x, y, s, anchor="start", size=12, color=INK, turn=0):
    t = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}"{t}>{escape(s)}</text>'


def ticks(top):
    """Round steps up to `top`."""
    for base in (1e-3, 1e-2, 0.1, 1, 10, 100):
        for k in (1, 2, 5):
            if top / (base * k) <= 6:
                n = int(top / (base * k)) + 1
                return [base * k * i for i in range(n + 1)]
    return [0, top]


class Picture:
    def __init__(self, title, ylabel, top, width=860, height=420):
        self.w, self.h, self.left, self.right, self.up, self.down = width, height, 64, 16, 64, 70
        self.out = [text(self.left, 22, title, size=15), text(16, (self.up + height - self.down) / 2, ylabel, "middle", turn=-90)]
        t = ticks(top)
        self.top = t[-1]
        for v in t:
            y = self.y(v)
            self.out.append(f'<line x1="{self.left}" y1="{y:.1f}" x2="{width - self.right}" y2="{y:.1f}" stroke="{GRID}"/>')
            self.out.append(text(self.left - 6, y + 4, f"{v:g}", "end"))

    def y(self, v):
        return self.h - self.down - (self.h - self.down - self.up) * v / self.top

    def x(self, share):
        return self.left + (self.w - self.left - self.right) * share

    def legend(self, names):
        x = self.left
        for i, n in enumerate(names):
            self.out.append(f'<rect x="{x}" y="34" width="12" height="12" fill="{COLORS[i % len(COLORS)]}"/>')
            self.out.append(text(x + 17, 44, n))
            x += 34 + 7 * len(n)

    def save(self, path):
        with open(path, "w") as f:
            f.write(f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.w}" height="{self.h}" font-family="sans-serif">\n'
                    f'<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(self.out) + "\n</svg>\n")
        print(path)


def bars(runs, baselines, unloaded, path):
    names = sorted(p for p, c, r in runs if c == 2048 and r == 1)
    if not names:
        return
    kinds = ["floor (bytes / ceiling)", "resident, weights not read", "resident", "one launch a step", "graph baseline"]
    groups = []
    for p in names:
        j, b = runs[p, 2048, 1], baselines.get(p, {})
        floor = j["bytes_per_token"] / j["ceiling_gb_s"] * 1e-6 if j["ceiling_gb_s"] else None
        graph = b.get("graph_ms") or j["baseline_graph_ms"]
        groups.append((p, [floor, unloaded.get(p), j["ms_per_token"]["p50"], b.get("launch_ms"), graph]))
    pic = Picture("Time per token, batch one, context 2,048 (median of pinned steps)", "ms", max(v for _, g in groups for v in g if v))
    pic.legend(kinds)
    step = 1 / len(groups)
    for i, (p, g) in enumerate(groups):
        for k, v in enumerate(g):
            if v is None:
                continue
            x, w = pic.x(step * (i + 0.08 + 0.17 * k)), (pic.x(step * 0.155) - pic.x(0))
            pic.out.append(f'<rect x="{x:.1f}" y="{pic.y(v):.1f}" width="{w:.1f}" height="{pic.y(0) - pic.y(v):.1f}" fill="{COLORS[k]}"/>')
            pic.out.append(text(x + w / 2, pic.y(v) - 4, f"{v:.2f}", "middle", 10))
        pic.out.append(text(pic.x(step * (i + 0.5)), pic.h - 48, p, "middle"))
        if g[0]:
            pic.out.append(text(pic.x(step * (i + 0.5)), pic.h - 32, f"{100 * g[0] / g[2]:.0f} % of the ceiling", "middle", 11))
    pic.save(path)


def lines(series, xs, title, ylabel, path):
    """series: name -> {x: y}; the x values stand at equal distances."""
    series = {n: s for n, s in series.items() if len(s) > 1}
    if not series:
        return
    pic = Picture(title, ylabel, max(v for s in series.values() for v in s.values()))
    pic.legend(sorted(series))
    at = {x: pic.x((i + 0.5) / len(xs)) for i, x in enumerate(xs)}
    for x in xs:
        pic.out.append(text(at[x], pic.h - 48, f"{x:,}", "middle"))
    for i, n in enumerate(sorted(series)):
        points = [(at[x], pic.y(series[n][x])) for x in xs if x in series[n]]
        pic.out.append(f'<polyline fill="none" stroke="{COLORS[i % len(COLORS)]}" stroke-width="2" points="' + " ".join(f"{a:.1f},{b:.1f}" for a, b in points) + '"/>')
        pic.out += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{COLORS[i % len(COLORS)]}"/>' for a, b in points]
    pic.save(path)


def main(where):
    runs, baselines, unloaded = {}, {}, {}
    for f in sorted(glob.glob(os.path.join(where, "*.json"))):
        m = re.fullmatch(r"(.*)-ctx(\d+)-rows(\d+)\.json", os.path.basename(f))
        if m:
            with open(f) as h:
                j = json.load(h)
            if m[1].endswith("-unloaded"):
                unloaded[m[1][: -len("-unloaded")]] = j["ms_per_token"]["p50"]
            else:
                runs[m[1], int(m[2]), int(m[3])] = j
        elif f.endswith("-baseline.json"):
            with open(f) as h:
                baselines[os.path.basename(f)[: -len("-baseline.json")]] = json.load(h)
    if not runs:
        print(f"{where}: no PRESET-ctxN-rowsR.json, nothing to plot")
        return
    plots = os.path.join(where, "plots")
    os.makedirs(plots, exist_ok=True)
    bars(runs, baselines, unloaded, os.path.join(plots, "time.svg"))
    presets = sorted({p for p, _, _ in runs})
    contexts = sorted({c for _, c, _ in runs})
    lines({p: {c: 100 * runs[p, c, 1]["fraction"] for c in contexts if runs.get((p, c, 1), {}).get("fraction")} for p in presets}, contexts,
          "Fraction of the stream ceiling, one row, by context", "%", os.path.join(plots, "context.svg"))
    rows = sorted({r for _, _, r in runs})
    lines({p: {r: runs[p, 2048, r]["ms_per_step"]["p50"] / runs[p, 2048, 1]["ms_per_step"]["p50"] for r in rows if (p, 2048, r) in runs and (p, 2048, 1) in runs}
           for p in presets}, rows, "Time of a step by rows of one stream, over one row (context 2,048)", "x", os.path.join(plots, "rows.svg"))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: profiles/plot.py DIR")
    main(sys.argv[1])
