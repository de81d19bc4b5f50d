#!/bin/bash
# compute-sanitizer's racecheck on the tiny models: the kernel built so that racecheck can follow its barriers (MK_RACECHECK: every lane arrives for itself; nothing else
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
    for f in ${FAMILIES:-kimi_linear qwen3_next llama}; do
        OUT=$OUT timeout "${LIMIT:-180}" compute-sanitizer --tool racecheck --print-limit 20 "$BUILD/tests/gpu/race_gpu" -q -w "${WORKERS:-8}" -f "$f" -t 60000 >"$OUT/race-$f.log" 2>&1
        rc=$?
        read -r _ errors warnings <<<"$(summary "$OUT/race-$f.log")"
        [ $rc = 0 ] && [ "$errors" = 0 ] && [ "$warnings" = 0 ] || bad=1
        echo "$comma  {\"family\": \"$f\", \"workers\": ${WORKERS:-8}, \"exit_code\": $rc, \"tests_passed\": $(grep -c '\[       OK' "$OUT/race-$f.log"), \"errors\": ${errors:-null}, \"warnings\": ${warnings:-null}}"
        comma=,
    done
    echo ']}'
} >"$OUT/racecheck.json"
cat "$OUT/racecheck.json"
grep -h -A3 'hazard detected' "$OUT"/race-*.log | grep -v 'Host Frame' | cut -c1-200 | head -60
exit $bad
