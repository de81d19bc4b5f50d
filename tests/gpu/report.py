"""One report out of what the parts of tests/gpu/run.sh left.

    report.py DIRECTORY VERSION     prints JSON: "rows", one of issue 3's table each, in its order, with figure, limit and ok, whatever was run; "parts", all that was
                                    measured. Exit code 1 when a part failed or a measured row is not ok. A row that no part measured has "measured": false and is not ok.
    report.py --print REPORT        the rows as a table

A part `soak` (tests/gpu/test_residency.sh on its own, for ten minutes) counts before `residency`: both have soak.json and residency.json."""
import csv
import datetime
import json
import os
import re
import socket
import sys

GOLDEN_KL = 1e-3  # tests/support/oracle.c: the twin's gate with bf16 vectors
FAMILIES = {"kimi_linear", "deepseek_v3", "moonlight", "glm4_moe_lite", "llama", "qwen3_next", "qwen3_5_moe", "qwen3_5"}
OPCODES = {"EMBED", "GEMV", "DELTA_STEP", "KV_APPEND", "MLA_PARTIAL", "GQA_APPEND", "GQA_PARTIAL", "COMBINE", "ROUTE", "EXPERT_UP", "EXPERT_DOWN", "LM_HEAD", "SAMPLE"}


class Missing(Exception):
    """A part was not run, or left no report."""


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


class Parts:
    def __init__(self, parts):
        self.parts = parts

    def report(self, file, *names):
        for name in names:
            if self.parts.get(name, {}).get(file):
                return self.parts[name][file]
        if any(n in self.parts for n in names):
            raise Missing("part %s left no readable %s" % (" or ".join(n for n in names if n in self.parts), file))
        raise Missing("part %s was not run" % " or ".join(names))


# Each returns (figure, ok).

def launches(p):
    r = p.report("residency.json", "soak", "residency")
    figure = {"resident kernels": len(r["resident_launches"]), "other launches": r["launches_ready_to_stop"], "tokens": r["tokens"], "model": r.get("model")}
    return figure, figure["resident kernels"] == 1 and figure["other launches"] == 0 and figure["tokens"] >= 20000


def calls(p):
    r = p.report("residency.json", "soak", "residency")
    return {"calls": sum(r["calls_not_allowed"].values()), "by name": r["calls_not_allowed"], "copies and events": r["calls_ready_to_stop"]}, not r["calls_not_allowed"] and bool(r["calls_ready_to_stop"])


def opcodes(p):
    r, d = p.report("opcodes.json", "opcodes"), p.report("diff.json", "diff")
    control = d["negative_control"]
    figure = {"opcodes": len({x["opcode"] for x in r["results"]}), "missing": sorted(OPCODES - {x["opcode"] for x in r["results"] if x["result"] == "ok"}), "cases": r["cases"], "failed": r["failed"],
              "skipped": r["skipped"], "worst error / tolerance": round(max(x["max_error"] / x["tolerance"] for x in r["results"] if x["tolerance"]), 4), "negative controls found": [r["negative_controls"] - r["missed"],
              r["negative_controls"]], "seed": r["seed"], "mkctl diff": {f["family"]: {k: f.get(k) for k in ("values", "failed_values", "free_failed_values", "worst_error_over_tolerance")} for f in d["families"]},
              "mkctl diff, spoiled GEMV named": control["named"]}
    return figure, not figure["missing"] and r["failed"] == r["skipped"] == r["missed"] == 0 and r["cases"] > 0 and r["negative_controls"] > 0 and d["ok"] and control["named"] and \
        FAMILIES <= {f["family"] for f in d["families"]}


def passed(r, test):
    return all(x["result"] == "passed" for x in r["results"] if x.get("test") == test)


def goldens(p):
    r = p.report("gpu.json", "gpu")
    kl = [x for x in r["results"] if x.get("compare") == "GPU against golden"]
    greedy = [x for x in r["results"] if "greedy_tokens" in x]
    figure = {"families": len({x["family"] for x in kl}), "runs": len(kl), "workers": sorted({x["workers"] for x in kl}), "worst KL": max(x["max_kl"] for x in kl),
              "greedy tokens equal": [sum(x["equal"] for x in greedy), sum(x["greedy_tokens"] for x in greedy)]}
    return figure, {x["family"] for x in kl} >= FAMILIES and {x["family"] for x in greedy} >= FAMILIES and figure["worst KL"] < GOLDEN_KL and passed(r, "oracle") and passed(r, "greedy") and \
        all(x["equal"] == x["greedy_tokens"] > 0 for x in greedy)


def tear(p):
    r = p.report("tear.json", "tear")
    x, halves = r["packet"], r["control_halves"]
    bus = p.report("bus.json", "tear")
    whole = bus["whole"]
    figure = {"packets": x["packets"], "torn of packets on the bus": [whole["torn_to_device"] + whole["torn_to_host"], whole["packets_to_device"] + whole["packets_to_host"]],
              "loads checked": x["loads_checked"], "torn": x["torn"], "TB/s meanwhile": x["stream_tb_s"], "TB/s alone": r["stream_alone_tb_s"], "torn in the negative control": halves["torn"]}
    return figure, x["packets"] >= 10 ** 9 and x["torn"] == 0 and x["of_another_epoch"] == 0 and x["stream_tb_s"] >= 0.9 * r["stream_alone_tb_s"] and halves["torn"] > 0 and r["ok"] and bus["ok"]


def invariance(p, wrap):
    r = p.report("gpu.json", "gpu")
    rows = [x for x in r["results"] if "row_invariance" in x and x["row_invariance"].startswith("epochs from") == wrap]
    figure = {"comparisons": len(rows), "families": len({x["family"] for x in rows}), "differing bits": sum(x["differing_bits"] for x in rows), "compared": sorted({x["row_invariance"] for x in rows})}
    return figure, {x["family"] for x in rows} >= FAMILIES and figure["differing bits"] == 0 and passed(r, "invariance")


def soak(p):
    s = p.report("soak.json", "soak", "residency")
    figure = {"seconds": s["seconds"], "clients": s["clients"], "requests": s["requests"], "exactly one DONE": s["exactly_one_done"], "cancels": s["cancels"], "clients killed": s["clients_killed"],
              "pools after": s["pools_after"], "longest gap, ms": s["longest_gap_ms"]}
    return figure, s["seconds"] >= 600 and s["clients"] >= 8 and s["requests"] == s["exactly_one_done"] > 0 and s["cancels"] > 0 and s["clients_killed"] > 0 and \
        s["pools_after"]["streams"] == s["pools_before"]["streams"] and s["pools_after"]["pages"] == s["pools_before"]["pages"] and max(s["longest_gap_ms"].values()) <= 50 and s["ok"]


def hangs(p):
    i = p.report("inject.jsonl", "inject")
    i = i if isinstance(i, list) else [i]  # one line is one object
    served = [x["client"]["hang_to_next_served_s"] for x in i if "client" in x]
    figure = {"named and survived": [sum(x["ok"] for x in i), len(i)], "slowest: next served after, s": max(served, default=None)}
    return figure, bool(served) and all(x["ok"] for x in i) and max(served) <= 5


def idle(p):
    q = p.report("latency.json", "latency")
    kinds = {k: q[k + "_begin_us"] for k in ("greedy", "sampled", "append")}
    figures = {"us p50, p99, " + k: [v["p50"], v["p99"]] for k, v in kinds.items()}
    return {**figures, "requests of each": q["requests"], "clock error, us": q["clock_error_us"]}, all(v["p50"] <= 5 and v["p99"] <= 20 for v in kinds.values())


def token(p):
    q = p.report("latency.json", "latency")
    q = {"clock error, us": q["clock_error_us"], **q["greedy_token_us"]}
    return {"us p50": q["p50"], "us p99": q["p99"], "clock error, us": q["clock error, us"]}, q["p50"] <= 5


def trace(p):
    e = p.report("trace.json", "trace")
    return {"ratio": e["ratio"], "every instruction once a step": e["every_instruction_once"], "model": e["model"]}, e["ratio"] <= 1.02 and e["ok"]


def sanitizer(p):
    m, r = p.report("memcheck.json", "memcheck"), p.report("racecheck.json", "racecheck")
    figure = {"memcheck": {x["family"]: x["errors"] for x in m["kernel"]}, "racecheck": {x["family"]: [x["errors"], x["warnings"]] for x in r["kernel"]},
              "racecheck on the model kernel": {k: v["errors"] for k, v in r["models"].items()}}
    return figure, bool(m["kernel"]) and bool(r["kernel"]) and all(x["errors"] == 0 and x["exit_code"] == 0 and x["tests_passed"] > 0 for x in m["kernel"] + r["kernel"]) and \
        all(x["warnings"] == 0 for x in r["kernel"]) and (r["models"]["late"]["errors"] or 0) > 0


def synth(p):
    d = p.report("synth.json", "synth")
    figure = {"preset": d["preset"], "context": d["ctx"], "tokens": d["tokens"], "dtype": d["dtype"], "ms a token p50": d["ms_per_token"]["p50"], "MB a token": round(d["bytes_per_token"] / 1e6, 1), "seconds to READY": d["seconds_to_ready"]}
    return figure, d["preset"] == "kimi-linear-48b" and d["ctx"] == 2048 and d["tokens"] >= 1000 and d["ms_per_token"]["p50"] > 0


ROWS = (
    ("kernel launches between READY and shutdown, over >= 20,000 tokens", "1 (the resident kernel)", launches),
    ("CUDA driver calls in that time but copies and event record/query", "0", calls),
    ("GPU against twin, every opcode at tiny and real shapes", "within each opcode's tolerance; every negative control found", opcodes),
    ("oracle goldens on the GPU", "KL < 1e-3, all greedy tokens, 8 families", goldens),
    ("packets under full streaming load", ">= 10^9, 0 torn", tear),
    ("epochs from 0xFFFFFFF0", "0 differing bits, 8 families", lambda p: invariance(p, True)),
    ("row invariance: alone, with 7 others, chunks of 1, 3, 8, three runs", "0 differing bits, 8 families", lambda p: invariance(p, False)),
    ("soak: 8 clients, random lengths, cancels, clients killed", ">= 600 s; one DONE a request; pools back; no gap > 50 ms", soak),
    ("injected hang", "named; next request served within 5 s", hangs),
    ("idle: submit entry to first instruction", "p50 <= 5 us, p99 <= 20 us", idle),
    ("token on the device to polling thread", "p50 <= 5 us", token),
    ("trace on / off, step time", "<= 1.02 (what the off state costs: by disassembly, not here)", trace),
    ("compute-sanitizer memcheck and racecheck, tiny models", "0 errors", sanitizer),
    ("synthetic kimi-linear-48b at full size, context 2,048", ">= 1,000 tokens; time and bytes reported", synth),
)


def rows(parts):
    out = []
    for what, limit, f in ROWS:
        row = {"row": what, "figure": None, "limit": limit, "ok": False, "measured": False}
        try:
            row["figure"], ok = f(Parts(parts))
            row["ok"], row["measured"] = bool(ok), True
        except Missing as e:
            row["why"] = str(e)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError) as e:
            row["why"] = "unreadable report: %s %s" % (type(e).__name__, e)
            row["measured"] = True
        out.append(row)
    return out


def collect(top):
    parts = {}
    for name in sorted(os.listdir(top)):
        where = os.path.join(top, name)
        if not os.path.exists(os.path.join(where, "rc")):
            continue
        rc, seconds = (open(os.path.join(where, "rc")).read().split() + ["0"])[:2]
        part = {"exit_code": int(rc), "seconds": int(seconds), "ok": rc == "0"}
        for file in sorted(os.listdir(where)):
            if file.endswith((".json", ".jsonl")) and not file.startswith("mkd-flight"):
                part[file] = load(os.path.join(where, file))
        if rc != "0" and os.path.exists(os.path.join(where, "log")):
            part["log_tail"] = open(os.path.join(where, "log"), errors="replace").read().splitlines()[-20:]
        parts[name] = part
    return parts


def table(path):
    report = json.load(open(path))
    for r in report["rows"]:
        print("%-6s %-68s limit: %s" % ("ok" if r["ok"] else "NOT OK" if r["measured"] else "-", r["row"], r["limit"]))
        print("       %s" % (r["why"] if "why" in r else json.dumps(r["figure"])[:300]))
    print("%d of %d rows ok, %d not measured" % (sum(r["ok"] for r in report["rows"]), len(report["rows"]), sum(not r["measured"] for r in report["rows"])))


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    if sys.argv[1] == "--print":
        return table(sys.argv[2])
    top, version = sys.argv[1], sys.argv[2]
    parts = collect(top)
    try:
        gpu = next(csv.reader(open(os.path.join(top, "gpu.csv")), skipinitialspace=True))
    except (OSError, StopIteration):
        gpu = []
    names = ("name", "driver", "sm_clock", "memory_clock", "max_sm_clock", "pstate", "temperature_c")
    commit = re.search(r"\(([^)]*)\)", version)  # of what was built: what lies around it may be another tree
    lines = rows(parts)
    json.dump({"test": "check-gpu", "build": version, "commit": commit and commit.group(1), "gpu": dict(zip(names, gpu)), "host": {"name": socket.gethostname(), "cpus": os.cpu_count()},
               "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), "ok": bool(parts) and all(p["ok"] for p in parts.values()) and all(r["ok"] for r in lines),
               "rows": lines, "parts": parts}, sys.stdout, indent=1)
    print()
    return 0 if parts and all(p["ok"] for p in parts.values()) and all(r["ok"] or not r["measured"] for r in lines) else 1


sys.exit(main())
