#!/usr/bin/env python3
"""A picture of one step out of the file that `mkctl trace -o t.json` writes. Python's standard library only.

    python3 profiles/trace_picture.py t.json step.svg [--step 0] [--layer L]

Above: every worker's time over the whole step, a row a worker: waiting for input light grey, waiting for weights orange, publishing dark grey,
computing in the colour of what is computed; below it the critical path, and what share of the workers does what. Then the same for one layer (default: the middle one)."""
import argparse
import base64
import html
import json
import struct
import sys
import zlib

WIDTH, LEFT, RIGHT = 1400, 60, 20
IDLE, INPUT, WEIGHTS, PUBLISH, OTHER, FIRST = 0, 1, 2, 3, 4, 5
FIXED = ["#ffffff", "#e4e4e4", "#ff9a1f", "#555555", "#b9a98f"]
COLOURS = ["#2f6db3", "#d1495b", "#3a9c5b", "#8e5cc0", "#17a2a2", "#c2b01d", "#e377c2", "#6b4c35", "#7fb0e8", "#9acd6a", "#f2a7a7", "#104e7a"]
SHARES = [("compute", "#2f6db3"), ("publish", FIXED[PUBLISH]), ("weights", FIXED[WEIGHTS]), ("input", FIXED[INPUT]), ("idle", FIXED[IDLE])]


def read(path, step):
    """Spans of a step: (worker, kind, class, layer, begin, end) with times in us; the critical path's (class, begin, end)."""
    with open(path, encoding="utf-8") as f:
        trace = json.load(f)
    about = trace["otherData"]
    if not 0 <= step < about["steps"]:
        sys.exit("trace_picture: --step: the file has steps 0 to %d" % (about["steps"] - 1))
    wanted = about["first_step"] + step
    spans, chain, now = [], [], None
    begin, end = float("inf"), 0.0
    for e in trace["traceEvents"]:
        if e["ph"] != "X":
            continue
        a, b = e["ts"], e["ts"] + e["dur"]
        args = e.get("args")
        if args:
            now = (e["name"], args["layer"]) if args["step"] == wanted else None
            if now:
                begin, end = min(begin, a), max(end, b)
        elif e["tid"] == about["workers"]:
            chain.append((e["name"], a, b))
        elif now and e["tid"] < about["workers"]:  # not what is done beside the queues
            spans.append((e["tid"], e["name"], now[0], now[1], a, b))
    chain = [c for c in chain if c[1] >= begin and c[2] <= end + 1e-3]
    return about, spans, chain, begin, end


def png(pixels, width, height, palette):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes(pixels[y * width:(y + 1) * width]) for y in range(height))
    colours = b"".join(bytes.fromhex(c[1:]) for c in palette)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0))
    data += chunk(b"PLTE", colours) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return base64.b64encode(data).decode()


def kind_of(name, cls, colour):
    return {"input": INPUT, "weights": WEIGHTS, "publish": PUBLISH}.get(name, colour.get(cls, OTHER))


def ticks(a, b):
    step = 10 ** len(str(int(max(b - a, 10)) // 10)) / 10
    while (b - a) / step > 16:
        step *= 2 if str(step)[0] in "15" else 2.5
    n = 0
    while n * step <= b - a:
        yield a + n * step
        n += 1


class Picture:
    def __init__(self):
        self.parts, self.y = [], 0

    def text(self, x, y, text, size=11, anchor="start", bold=False):
        self.parts.append('<text x="%.1f" y="%.1f" font-size="%d" text-anchor="%s"%s>%s</text>'
                          % (x, y, size, anchor, ' font-weight="bold"' if bold else "", html.escape(text)))

    def rect(self, x, y, w, h, colour, stroke=""):
        self.parts.append('<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s"%s/>' % (x, y, w, h, colour, stroke))


def panel(p, title, about, spans, chain, colour, palette, a, b):
    """Times a to b."""
    workers = about["workers"]
    row = max(2, min(24, 440 // workers))
    inner, scale = WIDTH - LEFT - RIGHT, (WIDTH - LEFT - RIGHT) / (b - a)
    p.y += 24
    p.text(LEFT, p.y - 6, title, 13, bold=True)
    pixels = bytearray(inner * workers)
    bins = [[0.0] * len(SHARES) for _ in range(inner // 2)]
    per = (b - a) / len(bins)
    order = {"compute": 0, "publish": 1, "weights": 2, "input": 3}
    for pass_ in ("input", "weights", "publish", "compute"):  # what is narrower than a pixel: computing wins
        for worker, name, cls, _, s, e in spans:
            if name != pass_ or e <= a or s >= b:
                continue
            s, e = max(s, a), min(e, b)
            x0, x1 = int((s - a) * scale), max(int((s - a) * scale) + 1, round((e - a) * scale))
            x1 = min(x1, inner)
            pixels[worker * inner + x0:worker * inner + x1] = bytes([kind_of(name, cls, colour)]) * (x1 - x0)
            i = int((s - a) / per)
            while s < e and i < len(bins):
                cut = min(e, a + (i + 1) * per)
                bins[i][order[name]] += cut - s
                s, i = cut, i + 1
    image = png(pixels, inner, workers, palette)
    p.parts.append('<image x="%d" y="%d" width="%d" height="%d" preserveAspectRatio="none" style="image-rendering:pixelated" '
                   'href="data:image/png;base64,%s"/>' % (LEFT, p.y, inner, row * workers, image))
    p.rect(LEFT, p.y, inner, row * workers, "none", ' stroke="#888"')
    p.text(LEFT - 6, p.y + 10, "worker 0", 10, "end")
    p.text(LEFT - 6, p.y + row * workers, str(workers - 1), 10, "end")
    p.y += row * workers + 6
    p.text(LEFT - 6, p.y + 11, "critical", 10, "end")
    for cls, s, e in chain:
        if e > a and s < b:
            p.rect(LEFT + (max(s, a) - a) * scale, p.y, max((min(e, b) - max(s, a)) * scale, 0.5), 14, palette[colour.get(cls, OTHER)])
    p.rect(LEFT, p.y, inner, 14, "none", ' stroke="#888"')
    p.y += 20
    height, total = 70, per * workers
    edge = [[0.0] * (len(SHARES) + 1) for _ in bins]
    for i, share in enumerate(bins):
        share[-1] = max(0.0, total - sum(share))
        for k in range(len(SHARES)):
            edge[i][k + 1] = edge[i][k] + share[k] / total
    for k in range(len(SHARES) - 1, -1, -1):  # each to the bottom, those below painted over it
        up = ["%d %.1f" % (LEFT + 2 * i, p.y + height * (1 - min(e[k + 1], 1))) for i, e in enumerate(edge)]
        p.parts.append('<path d="M%s V%d H%d Z" fill="%s"/>' % (" ".join(up), p.y + height, LEFT, SHARES[k][1]))
    p.rect(LEFT, p.y, inner, height, "none", ' stroke="#888"')
    p.text(LEFT - 6, p.y + 10, "100 %", 10, "end")
    p.text(LEFT - 6, p.y + height, "0", 10, "end")
    p.y += height
    for t in ticks(a, b):
        x = LEFT + (t - a) * scale
        p.rect(x, p.y, 0.5, 5, "#444")
        p.text(x, p.y + 15, "%g us" % round(t - a, 3), 10, "middle")
    p.y += 26
    mean = [sum(s[k] for s in bins) / (total * len(bins)) for k in range(len(SHARES))]
    x = LEFT
    for (name, c), m in zip(SHARES, mean):
        p.rect(x, p.y - 9, 10, 10, c, ' stroke="#888"')
        p.text(x + 14, p.y, "%s %.1f %%" % (name, 100 * m))
        x += 130
    p.y += 14


def main():
    parser = argparse.ArgumentParser(description="One step of a trace as SVG.")
    parser.add_argument("trace")
    parser.add_argument("svg")
    parser.add_argument("--step", type=int, default=0, help="of the file, from 0")
    parser.add_argument("--layer", type=int, help="the layer below; default: the middle one")
    o = parser.parse_args()
    about, spans, chain, begin, end = read(o.trace, o.step)
    if not spans:
        sys.exit("trace_picture: %s has no instructions of step %d" % (o.trace, o.step))
    busy = {}
    for _, name, cls, _, a, b in spans:
        busy[cls] = busy.get(cls, 0.0) + (b - a if name == "compute" else 0.0)
    top = sorted(busy, key=lambda c: -busy[c])[:len(COLOURS)]
    colour = {c: FIRST + i for i, c in enumerate(top)}
    palette = FIXED + COLOURS[:len(top)]
    layers = sorted({s[3] for s in spans if s[3] >= 0})
    layer = o.layer if o.layer is not None else layers[len(layers) // 2]
    part = [s for s in spans if s[3] == layer and s[1] != "input"]
    if not part:
        sys.exit("trace_picture: --layer %d: the step has %s" % (layer, "layers %d to %d" % (layers[0], layers[-1])))

    p = Picture()
    p.y = 22
    p.text(LEFT, p.y, "%s, %s: step %d, %.1f us" % (about["model"], about["device"], about["first_step"] + o.step, end - begin), 15, bold=True)
    p.y += 18
    p.text(LEFT, p.y, about["build"], 11)
    p.y += 22
    x = LEFT
    for name, c in [("wait for input", FIXED[INPUT]), ("wait for weights", FIXED[WEIGHTS]), ("publish", FIXED[PUBLISH])] + \
            [(c, palette[colour[c]]) for c in top] + ([("other", FIXED[OTHER])] if len(busy) > len(top) else []):
        if x > WIDTH - 170:
            x, p.y = LEFT, p.y + 16
        p.rect(x, p.y - 9, 10, 10, c, ' stroke="#888"')
        p.text(x + 14, p.y, name)
        x += 40 + 7 * len(name)
    panel(p, "the whole step", about, spans, chain, colour, palette, begin, end)
    a, b = min(s[4] for s in part), max(s[5] for s in part)
    margin = (b - a) * 0.05
    panel(p, "layer %d" % layer, about, spans, chain, colour, palette, max(begin, a - margin), min(end, b + margin))
    with open(o.svg, "w", encoding="utf-8") as f:
        f.write('<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif">\n' % (WIDTH, p.y + 10))
        f.write('<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(p.parts) + "\n</svg>\n")


if __name__ == "__main__":
    main()
