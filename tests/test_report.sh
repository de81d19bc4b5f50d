#!/bin/bash
# tests/gpu/report.py: every row of issue 3's table is there whatever was run; each is ok only with figures within its limits.
cd "$(dirname "$0")/.." || exit 2
BUILD=${BUILD:-build}
if [[ $BUILD == */asan ]]; then
    echo "ok - report # SKIP the plain build's test"
    exit 0
fi
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT
python3 - "$T" <<'EOF'
import copy, json, os, shutil, subprocess, sys

families = ["kimi_linear", "deepseek_v3", "moonlight", "glm4_moe_lite", "llama", "qwen3_next", "qwen3_5_moe", "qwen3_5"]
ops = "EMBED GEMV DELTA_STEP KV_APPEND MLA_PARTIAL GQA_APPEND GQA_PARTIAL COMBINE ROUTE EXPERT_UP EXPERT_DOWN LM_HEAD SAMPLE".split()
gpu = [{"family": f, "workers": 132, "compare": "GPU against golden", "positions": 300, "max_kl": 3e-4} for f in families]
gpu += [{"family": f, "workers": 132, "greedy_tokens": 64, "equal": 64} for f in families]
gpu += [{"family": f, "workers": 132, "row_invariance": w, "differing_bits": 0} for f in families for w in ("second run", "with 7 others", "epochs from 0xfffffff0")]
gpu += [{"family": f, "workers": 132, "test": t, "result": "passed"} for f in families for t in ("oracle", "greedy", "invariance")]
dist = {"p50": 4.0, "p99": 9.0}
run = {"family": "kimi_linear", "exit_code": 0, "tests_passed": 4, "errors": 0, "warnings": 0}
parts = {
    "gpu": {"gpu.json": {"results": gpu}},
    "opcodes": {"opcodes.json": {"results": [{"opcode": o, "max_error": 1e-6, "tolerance": 2e-5, "result": "ok"} for o in ops], "cases": 97, "failed": 0, "skipped": 0, "negative_controls": 13, "missed": 0, "seed": 1}},
    "diff": {"diff.json": {"families": [{"family": f, "values": 9, "failed_values": 0, "free_failed_values": 0, "worst_error_over_tolerance": 0.1} for f in families], "negative_control": {"named": True}, "ok": True}},
    "tear": {"tear.json": {"packet": {"packets": 10 ** 9, "loads_checked": 5, "torn": 0, "of_another_epoch": 0, "stream_tb_s": 4.5}, "control_halves": {"torn": 3}, "stream_alone_tb_s": 4.6, "ok": True},
             "bus.json": {"whole": {"packets_to_device": 10 ** 6, "packets_to_host": 10 ** 6, "torn_to_device": 0, "torn_to_host": 0}, "ok": True}},
    "latency": {"latency.json": {"greedy_begin_us": dict(dist), "sampled_begin_us": dict(dist), "append_begin_us": dict(dist), "greedy_token_us": dict(dist), "requests": 2000, "clock_error_us": 0.9}},
    "trace": {"trace.json": {"ratio": 1.01, "every_instruction_once": True, "model": "m", "ok": True}},
    "residency": {"residency.json": {"resident_launches": [{}], "launches_ready_to_stop": 0, "tokens": 20000, "calls_not_allowed": {}, "calls_ready_to_stop": {"cuEventQuery": 1}},
                  "soak.json": {"seconds": 600.2, "clients": 8, "requests": 9, "exactly_one_done": 9, "cancels": 1, "clients_killed": 1, "pools_before": {"streams": 0, "pages": 0},
                                "pools_after": {"streams": 0, "pages": 0}, "longest_gap_ms": {"device_clock": 1, "client_clock": 2}, "ok": True}},
    "inject": {"inject.jsonl": [{"ok": True, "client": {"hang_to_next_served_s": 1.1}}, {"ok": True}]},
    "synth": {"synth.json": {"preset": "kimi-linear-48b", "ctx": 2048, "tokens": 1000, "dtype": "fp8", "ms_per_token": {"p50": 4.2}, "bytes_per_token": 3.6e9, "seconds_to_ready": 9}},
    "memcheck": {"memcheck.json": {"kernel": [run]}},
    "racecheck": {"racecheck.json": {"kernel": [run], "models": {"late": {"errors": 2}}}},
}
top, bad = sys.argv[1] + "/top", 0


def report(parts, rc="0"):
    shutil.rmtree(top, ignore_errors=True)
    for name, files in parts.items():
        os.makedirs(top + "/" + name)
        open(top + "/" + name + "/rc", "w").write(rc + " 3")
        open(top + "/" + name + "/log", "w").write("said\n")
        for file, what in files.items():
            open("%s/%s/%s" % (top, name, file), "w").write("\n".join(map(json.dumps, what)) if file.endswith("l") else what if isinstance(what, str) else json.dumps(what))
    r = subprocess.run([sys.executable, "tests/gpu/report.py", top, "mkd 0.1.0 (abc)"], capture_output=True, text=True)
    return r.returncode, json.loads(r.stdout)


def check(name, good):
    global bad
    print("%s - %s" % ("ok" if good else "not ok", name))
    bad |= not good


rc, r = report(parts)
names = [x["row"] for x in r["rows"]]
check("all rows within their limits", rc == 0 and r["ok"] and len(names) == 14 and all(x["ok"] and x["measured"] and x["figure"] and x["limit"] for x in r["rows"]))
rc, none = report({"tear": parts["tear"]})
check("rows of parts that were not run are there, not ok, and say so", rc == 0 and not none["ok"] and [x["row"] for x in none["rows"]] == names and
      all(x["measured"] == x["ok"] == ("packets" in x["row"]) and (x["ok"] or "not run" in x["why"]) for x in none["rows"]))
rc, r = report({"tear": parts["tear"]}, rc="1")
check("a part that failed fails the report", rc == 1 and r["parts"]["tear"]["log_tail"] == ["said"])
rc, r = report({"tear": {"tear.json": "{"}, "opcodes": {"opcodes.json": {"results": []}}, "diff": parts["diff"]})
check("a report that cannot be read is not ok", rc == 1 and not any(x["ok"] for x in r["rows"]))
# part, file, path, value: makes exactly these rows (numbers from 0) miss
for part, file, path, value, rows in (
        ("residency", "residency.json", "launches_ready_to_stop", 1, [0]), ("residency", "residency.json", "resident_launches", [{}, {}], [0]), ("residency", "residency.json", "tokens", 19999, [0]),
        ("residency", "residency.json", "calls_not_allowed", {"cuLaunchKernel": 1}, [1]), ("opcodes", "opcodes.json", "failed", 1, [2]), ("opcodes", "opcodes.json", "missed", 1, [2]),
        ("opcodes", "opcodes.json", "results.3.result", "twin only", [2]), ("diff", "diff.json", "negative_control.named", False, [2]), ("diff", "diff.json", "ok", False, [2]),
        ("diff", "diff.json", "families", [], [2]), ("gpu", "gpu.json", "results.2.max_kl", 2e-3, [3]), ("gpu", "gpu.json", "results.9.equal", 63, [3]), ("gpu", "gpu.json", "results.40.result", "FAILED", [3]),
        ("gpu", "gpu.json", "results.1.family", "kimi_linear", [3]), ("tear", "tear.json", "packet.torn", 1, [4]), ("tear", "tear.json", "packet.packets", 10 ** 8, [4]), ("tear", "tear.json", "packet.stream_tb_s", 1.0, [4]),
        ("tear", "tear.json", "control_halves.torn", 0, [4]), ("gpu", "gpu.json", "results.18.differing_bits", 5, [5]), ("gpu", "gpu.json", "results.17.differing_bits", 5, [6]),
        ("residency", "soak.json", "seconds", 60, [7]), ("residency", "soak.json", "exactly_one_done", 8, [7]), ("residency", "soak.json", "pools_after.pages", 1, [7]), ("residency", "soak.json", "longest_gap_ms.client_clock", 51, [7]),
        ("inject", "inject.jsonl", "1.ok", False, [8]), ("inject", "inject.jsonl", "0.client.hang_to_next_served_s", 5.1, [8]), ("latency", "latency.json", "greedy_begin_us.p50", 5.1, [9]),
        ("latency", "latency.json", "append_begin_us.p99", 20.1, [9]), ("latency", "latency.json", "greedy_token_us.p50", 5.1, [10]), ("tear", "bus.json", "ok", False, [4]), ("trace", "trace.json", "ratio", 1.03, [11]), ("trace", "trace.json", "ok", False, [11]),
        ("memcheck", "memcheck.json", "kernel.0.errors", None, [12]), ("racecheck", "racecheck.json", "kernel.0.warnings", 1, [12]), ("racecheck", "racecheck.json", "models.late.errors", 0, [12]),
        ("memcheck", "memcheck.json", "kernel", [], [12]), ("synth", "synth.json", "tokens", 999, [13])):
    p = copy.deepcopy(parts)
    at = p[part][file]
    *way, last = [int(k) if k.isdigit() else k for k in path.split(".")]
    for k in way:
        at = at[k]
    at[last] = value
    rc, r = report(p)
    wrong = [i for i, x in enumerate(r["rows"]) if not x["ok"]]
    check("%s %s = %s" % (part, path, json.dumps(value)), rc == 1 and wrong == rows and not r["ok"])
soak = dict(parts, soak=parts["residency"], residency={"residency.json": parts["residency"]["residency.json"], "soak.json": dict(parts["residency"]["soak.json"], seconds=60)})
check("a soak of its own counts before the short one", report(soak)[1]["rows"][7]["figure"]["seconds"] == 600.2)
table = subprocess.run([sys.executable, "tests/gpu/report.py", "--print", "/dev/stdin"], input=json.dumps(none), capture_output=True, text=True).stdout
check("the table", table.count("\n") == 29 and table.endswith("1 of 14 rows ok, 13 not measured\n"))
sys.exit(bad)
EOF
