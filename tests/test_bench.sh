#!/bin/bash
# mkctl bench --ctx and mkctl synth against the twin, presets: everything of the benchmarks that needs no GPU. One "ok - " or "not ok - " line a check.
BUILD=${BUILD:-build}
cd "$(dirname "$0")/.." || exit 2
MKD=$PWD/$BUILD/mkd MKCTL=$PWD/$BUILD/mkctl
T=$(mktemp -d "/tmp/mkd bench test XXXXXX")
unset NOTIFY_SOCKET XDG_RUNTIME_DIR
PID='' bad=0
case $BUILD in *asan) STEPS=6 ;; *) STEPS=40 ;; esac # sanitizers: ten times slower
export STEPS
trap '[ -z "$PID" ] || kill -9 "$PID" 2>/dev/null; rm -rf "$T"' EXIT
check() { # name command...
    if "${@:2}" >"$T/log" 2>&1; then echo "ok - $1"; else echo "not ok - $1"; sed 's/^/#   /' "$T/log"; bad=1; fi
}
refused() { # CODE TEXT command...
    timeout 60 "${@:3}" >"$T/out" 2>"$T/err" </dev/null
    local rc=$?
    [ $rc = "$1" ] && grep -qF -- "$2" "$T/err" && return 0
    echo "exit code $rc, expected $1 and \"$2\""
    cat "$T/err"
    return 1
}
start() {
    rm -f "$T/ready" && : >"$T/ready"
    "$MKD" --model tests/oracle/kimi_linear --socket-dir "$T/run" --context 4096 --streams 2 --device cpu "$@" >"$T/ready" 2>"$T/mkd.err" </dev/null &
    PID=$!
    for ((i = 0; i < 1200; i++)); do
        grep -q '^mkd ready' "$T/ready" && return 0
        kill -0 "$PID" 2>/dev/null || break
        sleep 0.05
    done
    cat "$T/mkd.err"
    return 1
}
stop() { kill -TERM "$PID" && wait "$PID" && PID=''; }

check "a daemon without --bench starts" start
check "it refuses pinned streams" refused 2 "start it with --bench yes" "$MKCTL" bench --socket-dir "$T/run" --ctx 64 --steps 4
check "it stops" stop
check "a daemon with --bench starts" start --bench yes
check "bench at pinned positions" "$MKCTL" bench --socket-dir "$T/run" --ctx 64,2048 --rows 1,4 --steps "$STEPS" --seed 7 --out-dir "$T"
fields() {
    python3 - "$T" <<'PY'
import json, math, os, sys
kv = {}
for ctx in 64, 2048:
    for rows in 1, 4:
        j = json.load(open(f"{sys.argv[1]}/kimi_linear-ctx{ctx}-rows{rows}.json"))
        need = ("preset device ctx rows dtype tokens ms_per_token tok_s bytes_per_token achieved_gb_s ceiling_gb_s fraction launches baseline_graph_ms "
                "prompt_tok_s clocks routing_seed commit date").split()
        assert all(k in j for k in need), [k for k in need if k not in j]
        assert (j["ctx"], j["rows"], j["tokens"], j["routing_seed"], j["preset"]) == (ctx, rows, int(os.environ["STEPS"]) * rows, 7, "kimi_linear")
        t = j["ms_per_token"]
        assert 0 < t["p50"] <= t["p99"] <= t["p999"]
        assert math.isclose(j["achieved_gb_s"], j["bytes_per_token"] / t["p50"] * 1e-6, rel_tol=1e-6)
        assert (j["prompt_tok_s"] is not None) == (rows == 1)
        kv[ctx, rows] = j["bytes_per_token"] * rows
# one MLA layer of 512 + 64 bf16 values a token; four rows choose more experts than one
assert kv[2048, 1] - kv[64, 1] == 1984 * 576 * 2, kv
assert kv[64, 4] > kv[64, 1] * 1.01
PY
}
check "its reports" fields
check "plots of them" eval 'python3 profiles/plot.py "$T" && python3 -c "import sys, xml.dom.minidom as x; x.parse(sys.argv[1])" "$T/plots/rows.svg"'
check "one report on stdout" eval '"$MKCTL" bench --socket-dir "$T/run" --ctx 8 --steps 4 | python3 -c "import json, sys; assert json.load(sys.stdin)[\"ctx\"] == 8"'
echo '{"graph_ms": 2.5, "ctx": 8, "rows": 1}' >"$T/base"
check "the baseline's time is noted" eval '"$MKCTL" bench --socket-dir "$T/run" --ctx 8 --steps 4 --baseline "$T/base" | grep -q "baseline_graph_ms.: 2.5"'
check "no baseline" refused 2 "--baseline: $T/log: expected the JSON of profiles/baseline" "$MKCTL" bench --socket-dir "$T/run" --ctx 8 --baseline "$T/log"
check "nowhere to put the reports, said before it measures" refused 6 "--out-dir: $T/none: No such file or directory" "$MKCTL" bench --socket-dir "$T/none" --ctx 8 --out-dir "$T/none"
check "a file to put them in" refused 2 "--out-dir: $T/log: expected a directory" "$MKCTL" bench --socket-dir "$T/none" --ctx 8 --out-dir "$T/log"
check "rows out of range" refused 2 "--rows: expected 1 to 8, found 9" "$MKCTL" bench --socket-dir "$T/run" --ctx 8 --rows 9
check "context over the daemon's" refused 8 "the limit of a stream is 4096" "$MKCTL" bench --socket-dir "$T/run" --ctx 8000 --steps 4
check "one of several contexts over it is left out" eval '"$MKCTL" bench --socket-dir "$T/run" --ctx 16,8000 --steps 4 --out-dir "$T" && [ -s "$T/kimi_linear-ctx16-rows1.json" ] && [ ! -e "$T/kimi_linear-ctx8000-rows1.json" ]'
check "synth on a running daemon" eval '"$MKCTL" synth --socket-dir "$T/run" --tokens 30 --ctx 300 | grep -q "^30 tokens at context 300: .* ms a token"'
check "ordinary streams beside it" eval '"$MKCTL" generate --socket-dir "$T/run" --ids 512,1,2,3 --temperature 0 --stop "" --max-new 8 >"$T/gen" 2>&1'
check "it stops" stop
check "synth names the presets" refused 2 "there are kimi-linear-48b, qwen3-coder-next-80b" "$MKCTL" synth nonsense
check "an unknown preset of mkd" refused 2 'no preset "nonsense", there are kimi-linear-48b' "$MKD" --preset nonsense
check "a preset beside a model" refused 2 "exclude each other" "$MKD" --preset moonlight-16b --model x
check "a preset needs a GPU" refused 2 "synthetic weights are made on a GPU" "$MKD" --preset moonlight-16b --device cpu --check
if [ ! -e /dev/nvidiactl ]; then check "synth says why it cannot" refused 9 "mkd did not start" "$MKCTL" synth moonlight-16b; fi
exit $bad
