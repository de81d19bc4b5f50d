#!/bin/bash
# tests/run.sh BUILD...: runs every test of each build: the binaries BUILD/tests/test_* (cmocka) and the scripts tests/test_*.sh, which
# find the build in $BUILD and print lines "ok - ..." ("# SKIP why" behind it: left out) and "not ok - ...". Prints what they print; the
# last line sums up. Python parts are run by the tests that need them, with a python3 that has pyzmq in front of PATH. TEST=name runs
# one of them: TEST=test_daemon.sh.
cd "$(dirname "$0")/.." || exit 2
jobs=$(nproc)
limit=${TEST_SECONDS:-300} # of one test
export ASAN_OPTIONS=${ASAN_OPTIONS:-abort_on_error=0} UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
for p in python3 /usr/bin/python3; do
    if "$p" -c 'import zmq' 2>/dev/null; then
        bin=$(mktemp -d)
        trap 'rm -rf "$bin"' EXIT
        ln -s "$(command -v "$p")" "$bin/python3"
        PATH=$bin:$PATH
        break
    fi
done

run() { # build name command...
    local log=$1/tests/$2.log
    local begin=$SECONDS
    BUILD=$1 timeout -k 10 "$limit" "${@:3}" >"$log" 2>&1 </dev/null
    echo "$? $((SECONDS - begin))" >"$log.rc"
}

# The long ones first, so that they do not end up alone.
names() {
    for t in "$1"/tests/test_* tests/test_*.sh; do
        case $t in *.sh) ;; *) [ -x "$t" ] && [ -f "$t" ] || continue ;; esac
        case $t in *oracle* | *daemon*) echo "0 ${t##*/}" ;; *) echo "1 ${t##*/}" ;; esac
    done | sort | cut -d' ' -f2
}
wanted() { [ -z "${TEST:-}" ] || [ "$1" = "$TEST" ]; }

all=()
for build in "$@"; do
    rm -f "$build"/tests/*.log "$build"/tests/*.rc
    for name in $(names "$build"); do
        wanted "$name" || continue
        all+=("$build $name")
        while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
        case $name in
        *.sh) run "$build" "$name" bash "tests/$name" & ;;
        *) run "$build" "$name" "$build/tests/$name" & ;;
        esac
    done
done
wait

passed=0 failed=0 skipped=0 bad=()
sum() { local n s=0; while read -r n; do s=$((s + n)); done; echo "$s"; }
for t in "${all[@]}"; do
    build=${t% *} name=${t#* } log=${t% *}/tests/${t#* }.log
    read -r rc seconds <"$log.rc"
    p=$(($(grep -ao '\[  PASSED  \] [0-9]* test' "$log" | grep -ao '[0-9]*' | sum) + $(grep -a '^ok ' "$log" | grep -vac '# SKIP')))
    f=$(($(grep -ao '\[  FAILED  \] [0-9]* test' "$log" | grep -ao '[0-9]*' | sum) + $(grep -ac '^not ok ' "$log")))
    s=$(($(grep -ao '\[  SKIPPED \] [0-9]* test' "$log" | grep -ao '[0-9]*' | sum) + $(grep -ac '^ok .*# SKIP' "$log")))
    echo "=== $build/$name (${seconds} s)"
    cat "$log"
    [ -z "$(tail -c 1 "$log")" ] || echo
    if [ "$rc" != 0 ] && [ "$f" = 0 ]; then
        f=1
        [ "$rc" = 124 ] && echo "$name: still running after $limit s" || echo "$name: exit code $rc"
    elif [ $((p + f + s)) = 0 ]; then
        f=1
        echo "$name: ran no test"
    fi
    [ "$f" = 0 ] || bad+=("$build/$name")
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
done
for t in "${bad[@]}"; do echo "failed: $t"; done
[ ${#all[@]} != 0 ] || echo "no test${TEST:+ named $TEST} in $*: make tests builds them"
[ "$skipped" = 0 ] || echo "skipped: $skipped"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ ${#all[@]} != 0 ]
