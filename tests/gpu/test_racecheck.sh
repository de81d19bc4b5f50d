#!/bin/bash
# compute-sanitizer's racecheck on the tiny models and two opcode cases: the kernel built so that racecheck can follow its barriers (MK_RACECHECK: every lane arrives for itself; nothing else
# differs), which must show no hazard. That one arrival for a warp is sound and reported all the same is shown next to it by a kernel of a few lines
# (race_model.cu): both correct forms where a lane arrives for its warp, both where every lane does, and one that is wrong and must be found.
# $OUT/racecheck.json; FAMILIES, WORKERS (8), LIMIT (seconds a family). A build with LINEINFO=1 has it name source lines.
BUILD=${BUILD:-build}
cd "$(dirname "$0")/../.." || exit 2
OUT=${OUT:-$(mktemp -d)}
bad=0
summary() { # log: "hazards errors warnings" of it
    sed -n 's/.*RACECHECK SUMMARY: \([0-9]*\) hazards* displayed (\([0-9]*\) errors*, \([0-9]*\) warnings*).*/\1 \2 \3/p' "$1" | tail -1
}
{
    echo '{"models": {'
    for form in stores_lane stores_lanes bulk_lane bulk_lanes late; do
        timeout 60 compute-sanitizer --tool racecheck --print-limit 3 "$BUILD/tests/gpu/race_model" $form >"$OUT/$form.log" 2>&1
        read -r _ errors warnings <<<"$(summary "$OUT/$form.log")"
        case $form in
        *_lanes) [ "$errors" = 0 ] && [ "$warnings" = 0 ] || bad=1 ;;
        late) [ "${errors:-0}" -gt 0 ] || bad=1 ;;
        esac
        echo "  \"$form\": {\"errors\": ${errors:-null}, \"warnings\": ${warnings:-null}}$([ $form = late ] || echo ,)"
    done
    echo '}, "kernel": ['
    comma=''
    racecheck() { # what the report says of it, log, what the program says of a test that passed, program and arguments
        OUT=$OUT timeout "${LIMIT:-180}" compute-sanitizer --tool racecheck --print-limit 20 "${@:4}" >"$2" 2>&1
        rc=$?
        read -r _ errors warnings <<<"$(summary "$2")"
        [ $rc = 0 ] && [ "$errors" = 0 ] && [ "$warnings" = 0 ] || bad=1
        echo "$comma  {$1, \"exit_code\": $rc, \"tests_passed\": $(grep -c "$3" "$2"), \"errors\": ${errors:-null}, \"warnings\": ${warnings:-null}}"
        comma=,
    }
    for f in ${FAMILIES:-kimi_linear qwen3_next llama}; do
        racecheck "\"family\": \"$f\", \"workers\": ${WORKERS:-8}" "$OUT/race-$f.log" '\[       OK' "$BUILD/tests/gpu/race_gpu" -q -w "${WORKERS:-8}" -f "$f" -t 60000
    done
    # what none of them has: more pairs of EXPERT_DOWN than are staged at once, so that the warps aside stage the others
    for k in 'bf16 16 experts, inter 640' 'fp8 64 experts, inter 1408, 25'; do
        racecheck "\"family\": \"EXPERT_DOWN $k\"" "$OUT/race-${k%% *}.log" ' ok$' "$BUILD/tests/gpu/race_opcodes" -s 2 -t 300 "EXPERT_DOWN $k"
    done
    echo ']}'
} >"$OUT/racecheck.json"
cat "$OUT/racecheck.json"
grep -h -A3 'hazard detected' "$OUT"/race-*.log | grep -v 'Host Frame' | cut -c1-200 | head -60
exit $bad
