#!/bin/bash
# make bench: decoding speed through the daemon. On a GPU: the presets (full-size models, synthetic weights) at pinned positions, and the small checkpoint; without
# one: the small checkpoint on the twin. Builds nothing; JSON goes to $OUT (default: profiles/results), plots of it to $OUT/plots.
#   PRESETS="kimi-linear-48b ..."  which presets (default: all)
#   SHORT=1                        context 2,048 and one row only: two or three presets in three minutes; without it everything in about a quarter of an hour (added up: no job has run it whole)
#   CTX, ROWS, STEPS               what to measure, overriding both; BASELINE_STEPS=0 leaves the baselines out
cd "$(dirname "$0")/.." || exit 2
. profiles/presets.sh
BUILD=${BUILD:-build}
OUT=${OUT:-profiles/results}
CTX=${CTX:-$([ -n "${SHORT:-}" ] && echo 2048 || echo 512,2048,32768)}
ROWS=${ROWS:-$([ -n "${SHORT:-}" ] && echo 1 || echo 1,2,4,8)}
STEPS=${STEPS:-2000}
BASELINE_STEPS=${BASELINE_STEPS:-200}
[ -x "$BUILD/mkd" ] || { echo "bench: $BUILD/mkd is not there: make all" >&2; exit 2; }
dir=$(mktemp -d)
trap 'kill -9 $pid 2>/dev/null; rm -rf "$dir"' EXIT
bad=0

start() { # mkd's flags...
    rm -f "$dir/out" # the daemon's before may still be there when we look first
    "$BUILD/mkd" --socket-dir "$dir" --streams 1 --log-level warn "$@" >"$dir/out" 2>"$dir/err" &
    pid=$!
    for ((i = 0; i < 1200; i++)); do
        grep -qs '^mkd ready' "$dir/out" && return 0
        kill -0 $pid 2>/dev/null || break
        sleep 0.1
    done
    cat "$dir/err" >&2
    return 1
}
stop() { kill -TERM $pid && wait $pid; }

growing() { # name prompt tokens mkd's flags...: a generation as a client sees it
    start "${@:4}" || return 1
    "$BUILD/mkctl" bench --socket-dir "$dir" --prompt "$2" --tokens "$3" --repeat 3 --warmup 1 --out "$OUT/$1.json" >/dev/null || return 1
    stop || return 1
    printf '%-22s %s tok/s\n' "$1" "$(sed -n 's/.*"tok_s": \([0-9.]*\).*/\1/p' "$OUT/$1.json")"
}

baseline() { # preset context name: the other ways to launch the same step
    "$BUILD/profiles/baseline" --preset "$1" --ctx "$2" --steps "$BASELINE_STEPS" --out "$OUT/$3.json" >/dev/null
}

one_row_at_2048() { [[ ,$CTX, == *,2048,* && ,$ROWS, == *,1,* ]]; } # is measured

preset() { # name mkd's flags...
    local base=()
    if [ $# = 1 ] && [ -x "$BUILD/profiles/baseline" ] && [ "$BASELINE_STEPS" != 0 ]; then
        if [ "$1" = llama-3.2-1b ]; then # in the midst of the published lengths, 32 + 128 tokens
            baseline "$1" 96 "$1-32-128-baseline" || return 1
        fi
        baseline "$1" 2048 "$1-baseline" && base=(--baseline "$OUT/$1-baseline.json")
    fi
    start --device gpu --preset "$@" --kv-tokens 32832 || return 1
    "$BUILD/mkctl" bench --socket-dir "$dir" --ctx "$CTX" --rows "$ROWS" --steps "$STEPS" --out-dir "$OUT" "${base[@]}" || return 1
    if [ -z "${SHORT:-}" ] && [ "$1" = kimi-linear-48b ]; then # what sampling costs; how steady a step is
        "$BUILD/mkctl" bench --socket-dir "$dir" --ctx 2048 --steps "$STEPS" --temperature 1 --top-p 0.9 >"$OUT/$1-top-p.json" || return 1
        "$BUILD/mkctl" bench --socket-dir "$dir" --ctx 2048 --steps 20000 >"$OUT/$1-20000-steps.json" || return 1
    fi
    if [ "$1" = llama-3.2-1b ]; then # the lengths of the published figure
        "$BUILD/mkctl" bench --socket-dir "$dir" --prompt 32 --tokens 128 --repeat 20 --out "$OUT/$1-32-128.json" >/dev/null || return 1
    fi
    stop || return 1
    if [ $# = 1 ] && one_row_at_2048; then # the same step without its weights: what its chain takes
        start --device gpu --preset "$1" --unloaded yes --kv-tokens 32832 || return 1
        "$BUILD/mkctl" bench --socket-dir "$dir" --ctx 2048 --steps 500 --out-dir "$OUT" || return 1
        stop
    fi
}

layer() { # suffix of the files' names: what one layer of glm52-mla takes, which is what sixteen take longer than eight, by eight: without LM head, sampling and a step's begin
    python3 - "$OUT" "$1" <<'END'
import json, sys
out, suffix = sys.argv[1:]
files = ["%s%s-ctx2048-rows1.json" % (name, suffix) for name in ("glm52-mla", "glm52-mla-8")]
a, b = (json.load(open(out + "/" + f)) for f in files)
if a["commit"] != b["commit"]:
    sys.exit("bench: a layer of glm52-mla: expected two steps of one build, found %s (%s) and %s (%s) in %s" % (a["commit"], files[0], b["commit"], files[1], out))
us = {p: round(1000 * (a["ms_per_token"][p] - b["ms_per_token"][p]) / (a["layers"] - b["layers"]), 2) for p in ("p50", "p99")}
result = {"what": "a layer: the difference of two steps by that of their layers", "us_per_layer": us, "layers": {"glm52-mla": a["layers"], "glm52-mla-8": b["layers"]}, "commit": a["commit"], "from": files}
json.dump(result, open("%s/glm52-mla%s-layer.json" % (out, suffix), "w"), indent=1)
print("glm52-mla%s: %.2f us a layer" % (suffix, us["p50"]))
END
}

mkdir -p "$OUT"
if [ -e /dev/nvidiactl ]; then
    for p in $PRESETS; do
        preset "$p" || { echo "bench: $p failed" >&2; bad=1; kill -9 $pid 2>/dev/null; }
        if [ "$p" = glm52-mla ]; then # as the published figure has it
            for run in "$p fp8" "$p-8 fp8" "$p-8 bf16"; do
                CTX=2048 ROWS=1 preset ${run% *} --kv-cache ${run#* } || { echo "bench: ${run% *} with a cache of ${run#* } failed" >&2; bad=1; kill -9 $pid 2>/dev/null; }
            done
            layer -cache-fp8 || bad=1
            ! one_row_at_2048 || layer "" || bad=1
        fi
    done
    [ -n "${SHORT:-}" ] || growing gpu-english 256 1000 --device gpu --context 4096 --model tests/english/checkpoint || bad=1
else
    growing twin-english 256 500 --device cpu --model tests/english/checkpoint || bad=1
fi
python3 profiles/plot.py "$OUT" || bad=1
exit $bad
