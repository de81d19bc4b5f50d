#!/bin/bash
# make bench: decoding speed through the daemon, on the GPU if there is one: the small checkpoint, and on a GPU full-size models with synthetic
# weights. Builds nothing. JSON goes to $OUT (default: profiles/results). BENCH="name ..." chooses from tests/fixtures/configs.
cd "$(dirname "$0")/.." || exit 2
BUILD=${BUILD:-build}
OUT=${OUT:-profiles/results}
[ -x "$BUILD/mkd" ] || { echo "bench: $BUILD/mkd is not there: make all" >&2; exit 2; }
dir=$(mktemp -d)
trap 'kill -9 $pid 2>/dev/null; rm -rf "$dir"' EXIT

run() { # name, mkd's flags...; then: prompt and tokens in $prompt, $tokens
    local name=$1
    "$BUILD/mkd" --socket-dir "$dir" --streams 1 --log-level warn "${@:2}" >"$dir/out" 2>"$dir/err" &
    pid=$!
    for ((i = 0; i < 1200; i++)); do
        grep -q '^mkd ready' "$dir/out" && break
        kill -0 $pid 2>/dev/null || { cat "$dir/err" >&2; return 1; }
        sleep 0.1
    done
    "$BUILD/mkctl" bench --socket-dir "$dir" --prompt "$prompt" --tokens "$tokens" --repeat 3 --warmup 1 --out "$OUT/$name.json" >/dev/null || return 1
    kill -TERM $pid && wait $pid || return 1
    printf '%-32s %s tok/s\n' "$name" "$(sed -n 's/.*"tok_s": \([0-9.]*\).*/\1/p' "$OUT/$name.json")"
}

if [ -e /dev/nvidiactl ]; then
    prompt=256 tokens=1000 run gpu-english --device gpu --context 4096 --model tests/english/checkpoint || exit 1
    for m in ${BENCH:-kimi-linear-48b-a3b moonlight-16b-a3b}; do
        prompt=2048 tokens=1000 run "synth-$m-fp8" --device gpu --synthetic yes --weights fp8 --context 4096 \
            --model "tests/fixtures/configs/$m/config.json" || exit 1
    done
else
    prompt=256 tokens=500 run twin-english --device cpu --model tests/english/checkpoint
fi
