"""One report out of what the parts of tests/gpu/run.sh left: report.py DIRECTORY VERSION. Prints JSON; exit code 1 when a part failed."""
import csv
import datetime
import json
import os
import re
import socket
import sys


def load(path):
    """A JSON file, or one object a line; None when it is neither."""
    try:
        text = open(path).read()
    except OSError:
        return None
    try:
        return json.loads(text)
    except ValueError:
        try:
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError:
            return None


def sanitizer(log):
    found = {}
    m = re.findall(r"ERROR SUMMARY: (\d+) error", log)
    if m:
        found["runs"], found["errors"] = len(m), sum(map(int, m))
    found["reports"] = [line.lstrip("= ")[:300] for line in log.splitlines() if re.search(r"Invalid|Misaligned|Out-of-range", line)][:20]
    return found


def figures(parts):
    """The lines of issue 3 that these parts measure."""
    out = []

    def line(what, value, ok):
        out.append({"what": what, "value": value, "ok": bool(ok)})

    r = parts.get("residency", {}).get("residency.json")
    if r:
        line("kernel launches of the resident kernel, and others between READY and shutdown", [len(r["resident_launches"]), r["launches_ready_to_stop"]],
             len(r["resident_launches"]) == 1 and not r["launches_ready_to_stop"])
        line("tokens generated meanwhile", r["tokens"], r["tokens"] >= 20000)
        line("CUDA driver calls between READY and shutdown, copies and events apart", sum(r["calls_not_allowed"].values()), not r["calls_not_allowed"])
        line("those copies and events", r["calls_ready_to_stop"], True)
    s = parts.get("residency", {}).get("soak.json")
    if s:
        line("soak: seconds, requests, requests with exactly one DONE", [s["seconds"], s["requests"], s["exactly_one_done"]], s["requests"] == s["exactly_one_done"] and s["ok"])
        line("soak: streams and pages in use after it, before it", [s["pools_after"], s["pools_before"]], s["ok"])
        line("soak: longest wait of a generating stream for a token, ms", s["longest_gap_ms"], max(s["longest_gap_ms"].values()) <= 50)
    t = parts.get("tear", {}).get("tear.json")
    if t:
        p = t["packet"]
        line("tear: packets, loads checked, torn, TB/s streamed meanwhile", [p["packets"], p["loads_checked"], p["torn"], p["stream_tb_s"]], t["ok"])
    i = parts.get("inject", {}).get("inject.jsonl")
    if i:
        line("injected hangs: named and survived, of", [sum(x["ok"] for x in i), len(i)], all(x["ok"] for x in i))
        line("slowest: hang to next served, s", max(x["client"]["hang_to_next_served_s"] for x in i if "client" in x), True)
    q = parts.get("latency", {}).get("latency.json")
    if q:
        line("idle: submit entry to first instruction, us p50 / p99", [q["begin_us"]["p50"], q["begin_us"]["p99"]], q["begin_us"]["p50"] <= 5 and q["begin_us"]["p99"] <= 20)
        line("token to polling thread, us p50", q["token_us"]["p50"], q["token_us"]["p50"] <= 5)
    e = parts.get("trace", {}).get("trace.json")
    if e:
        line("trace: every instruction once a step, traced / untraced step time", [e["every_instruction_once"], e["ratio"]], e["ok"])
    if "memcheck" in parts:
        f = parts["memcheck"].get("sanitizer", {})
        line("memcheck: runs, errors", [f.get("runs"), f.get("errors")], f.get("errors") == 0)
    h = parts.get("racecheck", {}).get("racecheck.json")
    if h:
        line("racecheck: errors and warnings by model", {x["family"]: [x["errors"], x["warnings"]] for x in h["kernel"]},
             h["kernel"] and all(x["errors"] == 0 and x["warnings"] == 0 and x["exit_code"] == 0 for x in h["kernel"]))
        line("racecheck on the model kernel: errors by form (the last one is wrong)", {k: v["errors"] for k, v in h["models"].items()}, True)
    return out


def main():
    top, version = sys.argv[1], sys.argv[2]
    parts = {}
    for name in sorted(os.listdir(top)):
        where = os.path.join(top, name)
        if not os.path.exists(os.path.join(where, "rc")):
            continue
        rc, seconds = map(int, open(os.path.join(where, "rc")).read().split())
        part = {"exit_code": rc, "seconds": seconds, "ok": rc == 0}
        for file in sorted(os.listdir(where)):
            if file.endswith((".json", ".jsonl")) and not file.startswith("mkd-flight"):
                part[file] = load(os.path.join(where, file))
        log = open(os.path.join(where, "log"), errors="replace").read()
        if name == "memcheck":
            part["sanitizer"] = sanitizer(log)
        if rc:
            part["log_tail"] = log.splitlines()[-20:]
        parts[name] = part
    try:
        gpu = next(csv.reader(open(os.path.join(top, "gpu.csv")), skipinitialspace=True))
    except (OSError, StopIteration):
        gpu = []
    names = ("name", "driver", "sm_clock", "memory_clock", "max_sm_clock", "pstate", "temperature_c")
    commit = re.search(r"\(([^)]*)\)", version)  # of what was built: what lies around it may be another tree
    lines = figures(parts)
    ok = bool(parts) and all(p["ok"] for p in parts.values()) and all(x["ok"] for x in lines)
    json.dump({"test": "check-gpu", "build": version, "commit": commit and commit.group(1), "gpu": dict(zip(names, gpu)), "host": {"name": socket.gethostname(), "cpus": os.cpu_count()},
               "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), "ok": ok, "figures": lines, "parts": parts}, sys.stdout, indent=1)
    print()
    return 0 if ok else 1


sys.exit(main())
