#!/bin/bash
# `mkctl diff` on the machine with the GPU: every family's tiny checkpoint, as stored, two of them with head and cache in FP8, and two in BF16, whose W_UK and q_b_proj are one matrix then, the GPU against the twin instruction by instruction and in free runs, and a negative
# control: a twin that runs one GEMV 5 % too strong must be told apart, by the name of that instruction. BUILD: where mkctl is; FAMILIES, LIMIT (seconds a family).
# $OUT/diff.json.
BUILD=${BUILD:-build}
cd "$(dirname "$0")/../.." || exit 2
OUT=${OUT:-$(mktemp -d)}
IDS=1,4,7,10,13,16,19,22,25,28,31,34
bad=0
for f in ${FAMILIES:-kimi_linear moonlight deepseek_v3 glm4_moe_lite llama qwen3_next qwen3_5_moe qwen3_5 kimi_linear-fp8 glm4_moe_lite-fp8 glm4_moe_lite-bf16 deepseek_v3-bf16}; do
    workers=0
    case $f in qwen3_next | qwen3_5_moe) workers=64 ;; esac # the experts of these checkpoints have 32 rows
    flags=()
    case $f in *-fp8) flags=(--lm-head fp8 --kv-cache fp8) ;; *-bf16) flags=(--weights bf16) ;; esac
    timeout -k 5 "${LIMIT:-60}" "$BUILD/mkctl" diff "tests/oracle/${f%-*}" --ids $IDS --max-new 6 --workers $workers "${flags[@]}" --json "$OUT/diff-$f.json" >"$OUT/$f.log" 2>&1
    rc=$?
    echo "$rc" >"$OUT/$f.rc"
    [ $rc = 0 ] && echo "ok - mkctl diff $f: $(tail -1 "$OUT/$f.log")" || { echo "not ok - mkctl diff $f: exit code $rc"; tail -3 "$OUT/$f.log" | sed 's/^/#   /'; bad=1; }
done
# The first GEMV of worker 5's queue behind the fourth instruction.
for at in 4 5 6 7 8 9 10 11 12; do
    timeout -k 5 "${LIMIT:-60}" "$BUILD/mkctl" diff tests/oracle/kimi_linear --ids 1,2,3 --max-new 1 --spoil 5:$at >"$OUT/spoiled.log" 2>&1
    rc=$?
    [ $rc = 2 ] || break # not a GEMV
done
found=0
[ $rc = 9 ] && grep -q "first divergence: worker 5 #$at GEMV" "$OUT/spoiled.log" && found=1
[ $found = 1 ] && echo "ok - a spoiled GEMV is named: worker 5 #$at" || { echo "not ok - the spoiled worker 5 #$at was not named: exit code $rc"; tail -3 "$OUT/spoiled.log" | sed 's/^/#   /'; bad=1; }
python3 - "$OUT" "5:$at" $rc $found >"$OUT/diff.json" <<'EOF'
import glob, json, os, sys
out, at, rc, found = sys.argv[1:]
families = []
for path in sorted(glob.glob(out + "/*.rc")):
    name = os.path.basename(path)[:-3]
    row = {"family": name, "exit_code": int(open(path).read())}
    try:
        d = json.load(open("%s/diff-%s.json" % (out, name)))
        row.update({k: d[k] for k in ("workers", "steps", "rows", "tokens", "same_tokens", "near_ties", "failed_values", "free_failed_values", "first")})
        row["values"] = sum(o["values"] for o in d["opcodes"])
        row["worst_error_over_tolerance"] = round(max(o["max_error"] / o["tolerance"] for o in d["opcodes"] if o["tolerance"]), 4)
    except (OSError, ValueError, KeyError) as e:
        row["unreadable"] = str(e)
    families.append(row)
    os.remove(path)
    if os.path.exists("%s/diff-%s.json" % (out, name)):
        os.remove("%s/diff-%s.json" % (out, name))
control = {"spoiled": at, "exit_code": int(rc), "named": found == "1"}
ok = bool(families) and control["named"] and all(f["exit_code"] == 0 and f.get("failed_values") == 0 and f.get("free_failed_values") == 0 for f in families)
json.dump({"families": families, "negative_control": control, "ok": ok}, sys.stdout, indent=1)
EOF
exit $bad
