#!/bin/bash
# A full-size model with synthetic weights: loads, runs TOKENS (1000) steps pinned at context CTX (2048). PRESET, BUILD. $OUT/synth.json: time and bytes of a token.
BUILD=${BUILD:-build}
cd "$(dirname "$0")/../.." || exit 2
OUT=${OUT:-$(mktemp -d)}
PRESET=${PRESET:-kimi-linear-48b}
CTX=${CTX:-2048}
S=$(mktemp -d)
begin=$SECONDS
"$BUILD/mkd" --device gpu --preset "$PRESET" --socket-dir "$S" --context $((CTX + ${TOKENS:-1000} + 1024)) --streams 1 --log-level warn >"$S/out" 2>"$S/err" &
P=$!
for _ in $(seq 2400); do grep -qs ready "$S/out" && break; kill -0 $P 2>/dev/null || break; sleep 0.05; done
ready=$((SECONDS - begin))
bad=0
timeout 100 "$BUILD/mkctl" bench --socket-dir "$S" --ctx "$CTX" --rows 1 --steps "${TOKENS:-1000}" --out-dir "$S" || bad=1
kill -TERM $P
wait $P || bad=1
sed 's/^/#   /' "$S/err" | tail -5
python3 - "$S/$PRESET-ctx$CTX-rows1.json" $ready >"$OUT/synth.json" <<'EOF' || bad=1
import json, sys
d = json.load(open(sys.argv[1]))
d["seconds_to_ready"] = int(sys.argv[2])
json.dump(d, sys.stdout, indent=1)
EOF
rm -rf "$S"
[ $bad = 0 ] && echo "ok - $PRESET at full size" || echo "not ok - $PRESET at full size"
exit $bad
