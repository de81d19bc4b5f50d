#!/bin/bash
# compute-sanitizer's memcheck over a short run of the tiny models that have all opcodes between them. $OUT/memcheck.json; FAMILIES, LIMIT (seconds a family).
# A build with LINEINFO=1 has it name source lines, but those of kernels that are laid (megakernel/layout.py) are wrong.
BUILD=${BUILD:-build}
cd "$(dirname "$0")/../.." || exit 2
OUT=${OUT:-$(mktemp -d)}
bad=0
{
    echo '{"kernel": ['
    comma=''
    for f in ${FAMILIES:-kimi_linear qwen3_next}; do
        mkdir -p "$OUT/$f" # test_gpu's own report: not this part's
        OUT=$OUT/$f timeout -k 5 "${LIMIT:-140}" compute-sanitizer --tool memcheck --error-exitcode 3 --print-limit 20 "$BUILD/tests/gpu/test_gpu" -q -f "$f" -t 60000 >"$OUT/memcheck-$f.log" 2>&1
        rc=$?
        errors=$(sed -n 's/.*ERROR SUMMARY: \([0-9]*\) error.*/\1/p' "$OUT/memcheck-$f.log" | tail -1)
        [ $rc = 0 ] && [ "$errors" = 0 ] || bad=1
        echo "$comma  {\"family\": \"$f\", \"exit_code\": $rc, \"tests_passed\": $(grep -c '\[       OK' "$OUT/memcheck-$f.log"), \"errors\": ${errors:-null}}"
        comma=,
    done
    echo ']}'
} >"$OUT/memcheck.json"
cat "$OUT/memcheck.json"
grep -hE -A4 'Invalid|Misaligned|Out-of-range|out of bounds' "$OUT"/memcheck-*.log | grep -v 'Host Frame' | cut -c1-200 | head -60
exit $bad
