#!/bin/bash
# What the daemon asks of the CUDA driver between READY and shutdown: copies by copy engine and events made before the launch, nothing else, and no launch, while
# tests/gpu/soak.c opens, cancels, closes and kills. BUILD: where things are. SECONDS_SOAK (10), TOKENS (20000: at least), MODEL, DEVICE (cpu: to
# try the script; then nothing is launched, and it says so). Results: $OUT/residency.json, $OUT/soak.json.
BUILD=${BUILD:-build}
cd "$(dirname "$0")/../.." || exit 2
OUT=${OUT:-$(mktemp -d)}
MODEL=${MODEL:-tests/oracle/kimi_linear}
S=$(mktemp -d)
LD_PRELOAD=$(realpath "$BUILD")/tests/gpu/libcount_api.so COUNT_API=$S/count "$BUILD/mkd" --device "${DEVICE:-gpu}" --model "$MODEL" --socket-dir "$S" --context 2048 --streams 16 >"$S/out" 2>"$S/err" &
P=$!
for _ in $(seq 600); do grep -qs ready "$S/out" && break; kill -0 $P 2>/dev/null || break; sleep 0.05; done
cp "$S/count" "$S/before" 2>/dev/null
timeout $((${SECONDS_SOAK:-10} + 60)) "$BUILD/tests/gpu/soak" --socket-dir "$S" --seconds "${SECONDS_SOAK:-10}" --kills-ms 1500 >"$OUT/soak.json" 2>"$S/soak.err"
soak=$?
sleep 0.5 # idle, too
cp "$S/count" "$S/after" 2>/dev/null
kill -TERM $P
wait $P
mkd=$?
tokens=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["tokens_generated"])' "$OUT/soak.json" 2>/dev/null || echo 0)
python3 tests/gpu/count_api.py "$S/before" "$S/after" model="$MODEL" build="$("$BUILD/mkd" --version)" tokens="$tokens" min_tokens="${TOKENS:-20000}" >"$OUT/residency.json"
count=$?
cat "$OUT/soak.json" "$OUT/residency.json"
sed 's/^/#   /' "$S/soak.err" "$S/err" | grep -v 'client "soak" dropped' | tail -10
[ $soak = 0 ] && echo 'ok - soak' || echo "not ok - soak: exit code $soak"
[ $count = 0 ] && [ $mkd = 0 ] && echo 'ok - calls between READY and shutdown' || echo "not ok - calls between READY and shutdown: $count, mkd $mkd"
rm -rf "$S"
[ $soak = 0 ] && [ $count = 0 ] && [ $mkd = 0 ]
