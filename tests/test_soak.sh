#!/bin/bash
# A few seconds of tests/gpu/soak.c against the twin: clients with random requests, cancels, closes and kills; one DONE a request, pools back to what they were.
# Stalls are for the GPU: here other tests run on the same two cores.
BUILD=${BUILD:-build}
cd "$(dirname "$0")/.." || exit 2
S=$(mktemp -d)
trap 'kill -9 $P 2>/dev/null; rm -rf "$S"' EXIT
"$BUILD/mkd" --device cpu --model tests/oracle/kimi_linear --socket-dir "$S" --context 512 --streams 12 >"$S/out" 2>"$S/err" &
P=$!
for _ in $(seq 1200); do [ -s "$S/out" ] && break; kill -0 $P 2>/dev/null || break; sleep 0.05; done
timeout 120 "$BUILD/tests/gpu/soak" --socket-dir "$S" --seconds 4 --stall-ms 0 --kills-ms 600 --max-new 100 --context 512 --seed $$ >"$S/said" 2>&1
rc=$?
kill -TERM $P
wait $P
mkd=$?
if [ $rc = 0 ] && [ $mkd = 0 ]; then
    echo "ok - soak: $(cat "$S/said")"
else
    echo "not ok - soak: $rc, mkd $mkd: $(cat "$S/said")"
    sed 's/^/#   /' "$S/err" | tail -20
    exit 1
fi
