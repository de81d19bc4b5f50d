#!/bin/bash
# A hang of the twin, injected through the wire: named, written down, survived. Daemons built with MK_DEBUG have it, tests/mkd-debug here; all others refuse it
# by name. On the GPU: tests/gpu/test_daemon_gpu.sh.
BUILD=${BUILD:-build}
cd "$(dirname "$0")/.." || exit 2
S=$(mktemp -d)
trap 'kill -9 $P 2>/dev/null; rm -rf "$S"' EXIT
start() { # mkd flags...
    rm -f "$S/out"
    "$BUILD/$1" --device cpu --model tests/oracle/kimi_linear --socket-dir "$S" --context 4096 >"$S/out" 2>"$S/err" &
    P=$!
    for _ in $(seq 1200); do [ -s "$S/out" ] && return; kill -0 $P 2>/dev/null || break; sleep 0.05; done
    echo "not ok - the daemon starts"
    sed 's/^/#   /' "$S/err"
    exit 1
}
bad=0
refused() { # mkd text what...: mkctl inject is refused with it
    start "$1"
    "$BUILD/mkctl" inject "${@:3}" --socket-dir "$S" >"$S/said" 2>&1
    rc=$?
    if [ $rc = 8 ] && grep -q "$2" "$S/said"; then
        echo "ok - $1 refuses: $2"
    else
        echo "not ok - $1 refuses by name: $rc $(cat "$S/said")"
        bad=1
    fi
    kill -TERM $P
    wait $P
}
refused mkd 'INJECT: this daemon was built without fault injection' hang
refused tests/mkd-debug 'worker 99, there are 8' hang --worker 99
refused tests/mkd-debug 'the CPU twin has no GPU to lose' error

# worker instruction after, or idle
for at in '3 12 5' '7 0 0' idle; do
    rm -f "$S"/mkd-flight-*
    start tests/mkd-debug
    # shellcheck disable=SC2086
    timeout 200 "$BUILD/tests/gpu/hang_client" "$S" $at >"$S/client" 2>&1
    rc=$?
    kill -TERM $P
    wait $P
    mkd=$?
    read -r worker insn _ <<<"$at"
    named="error: twin: step [0-9]*: worker $worker hangs at instruction $insn "
    [ "$at" = idle ] && named='error: twin: step [0-9]*: worker [0-9]* hangs at instruction [0-9]* (SCHEDULE, layer -1): it has stopped looking for work'
    if [ $rc = 0 ] && [ $mkd = 0 ] && grep -q "$named" "$S/err" && [ "$(ls "$S"/mkd-flight-*.json | wc -l)" = 1 ] &&
        python3 -m json.tool "$(ls "$S"/mkd-flight-*.json)" >/dev/null && [ "$(grep -c 'launched again' "$S/err")" = 1 ]; then
        echo "ok - hang at $at: $(cat "$S/client")"
    else
        echo "not ok - hang at $at: client $rc, mkd $mkd"
        sed 's/^/#   /' "$S/err" "$S/client" | cut -c1-400
        bad=1
    fi
done

# a trace that waits for steps is lost with the device, and the next one works
start tests/mkd-debug
long_trace() {
    timeout 100 "$BUILD/mkctl" trace --socket-dir "$S" --steps 2 --timeout 60 >"$S/said" 2>&1 &
    T=$!
}
long_trace
for _ in $(seq 200); do # until the daemon has it: then another is refused. Where the other came first, the long one was
    kill -0 $T 2>/dev/null || long_trace
    timeout 20 "$BUILD/mkctl" trace --socket-dir "$S" --steps 1 --timeout 0.001 2>&1 | grep -q 'under way' && kill -0 $T 2>/dev/null && break
    sleep 0.05
done
timeout 20 "$BUILD/mkctl" inject idle --socket-dir "$S" >/dev/null
wait $T
rc=$?
if [ $rc = 8 ] && grep -q 'the device hung and was started again: the trace is lost' "$S/said" &&
    timeout 60 "$BUILD/mkctl" trace --socket-dir "$S" --steps 2 --ctx 10 >"$S/again" 2>&1 && grep -q 'critical path' "$S/again"; then
    echo 'ok - a trace is lost with the device'
else
    echo "not ok - a trace is lost with the device: $rc"
    sed 's/^/#   /' "$S/said" "$S/again" "$S/err" 2>/dev/null
    bad=1
fi
kill -TERM $P
wait $P
exit $bad
