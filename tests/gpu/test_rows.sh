#!/bin/bash
# Rows at published sizes: a generation, one row a step, and the same begun again behind eleven of its own tokens, which steps of eight rows then append: ids and log probabilities of the
# rest are the same, although what runs of one row is other code. Presets with synthetic weights, prompts of LENGTHS tokens; of these some are where attention goes over to larger groups of
# heads or more splits (mk_head_group, mk_split_pages), in the midst of the tokens generated. Negative control: behind another token they differ.
# BUILD: where mkd and mkctl are; PRESETS. $OUT/rows.json.
BUILD=${BUILD:-build}
cd "$(dirname "$0")/../.." || exit 2
OUT=${OUT:-$(mktemp -d)}
S=$(mktemp -d)
bad=0
declare -A EDGES=([moonlight-16b]=4213 [glm-4.7-flash]=2805 [glm52-mla]=1013 [kimi-linear-48b]=2101 [llama-3.2-1b]="245 1013")
for p in ${PRESETS:-moonlight-16b glm-4.7-flash glm52-mla kimi-linear-48b qwen3.6-35b-a3b llama-3.2-1b}; do
    rm -f "$S/out"
    "$BUILD/mkd" --device gpu --preset "$p" --socket-dir "$S" --streams 1 --kv-tokens 8192 --self-test no >"$S/out" 2>"$S/err" &
    P=$!
    for _ in $(seq 1200); do grep -qs ready "$S/out" && break; kill -0 $P 2>/dev/null || break; sleep 0.05; done
    python3 - "$BUILD/mkctl" "$S" "$p" ${LENGTHS:-5 61 ${EDGES[$p]:-700} 4300} >>"$S/rows" <<'END' && echo "ok - rows of $p" || { echo "not ok - rows of $p"; sed 's/^/#   /' "$S/err" | tail -5; bad=1; }
import json, random, subprocess, sys
mkctl, sockets, preset, lengths = sys.argv[1], sys.argv[2], sys.argv[3], [int(x) for x in sys.argv[4:]]
def generate(ids, n):
    out = subprocess.run([mkctl, "generate", "--socket-dir", sockets, "--ids", ",".join(map(str, ids)), "--max-new", str(n), "--temperature", "0", "--stop", "", "--logprobs"],
                         capture_output=True, text=True, timeout=60, check=True).stdout
    return [t for t in out.replace(",", " ").split() if ":" in t]
random.seed(len(preset))
report = []
for length in lengths:
    prompt = [random.randrange(1, 1000) for _ in range(length)]
    whole = generate(prompt, 24)
    ids = [int(t.split(":")[0]) for t in whole]
    rest, other = generate(prompt + ids[:11], 13), generate(prompt + ids[:10] + [ids[10] ^ 1], 13)
    report.append({"preset": preset, "prompt": length, "tokens": len(rest), "same": len(whole) == 24 and whole[11:] == rest, "another token is told apart": other != rest})
    print(json.dumps(report[-1]))
sys.exit(not all(r["same"] and r["another token is told apart"] for r in report))
END
    kill -TERM $P
    wait $P || bad=1
done
python3 -c 'import json, sys; print(json.dumps([json.loads(x) for x in open(sys.argv[1])], indent=1))' "$S/rows" >"$OUT/rows.json" || bad=1
rm -rf "$S"
exit $bad
