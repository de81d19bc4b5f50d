#!/bin/bash
# On the machine with the GPU, with a debug build (make DEBUG=1 BUILD=...): the kernel hangs under two running generations; the daemon has to name the worker
# and the instruction, write the flight file, relaunch, and give every stream the tokens it would have had. BIN: where mkd and hang_client are.
# WORKER:INSTRUCTION:STEP. 0:42 is SCHEDULE, whose absence no worker notices: all wait for the next step, as when idle. `:stopped`: the daemon is stopped
# (SIGSTOP) for three seconds meanwhile, so that the kernel gives up by itself; it then names the first wait that ran out, which need not be the root.
BIN=${BIN:-build}
cd "$(dirname "$0")/../.." || exit 2
CLIENT=$BIN/hang_client
[ -x "$CLIENT" ] || CLIENT=$BIN/tests/gpu/hang_client
bad=0
for at in ${HANGS:-0:0:300 5:12:300 131:3:301 77:30:303 0:42:302 131:3:300:stopped}; do
    S=$(mktemp -d)
    IFS=: read -r worker insn step stopped <<<"$at"
    MKD_INJECT_HANG=$worker:$insn:$step "$BIN/mkd" --device gpu --model tests/oracle/kimi_linear --socket-dir "$S" --context 4096 >"$S/out" 2>"$S/err" &
    P=$!
    for _ in $(seq 400); do grep -q ready "$S/out" && break; kill -0 $P 2>/dev/null || break; sleep 0.05; done
    timeout 60 "$CLIENT" "$S" >"$S/client" 2>&1 &
    C=$!
    named="step $step: worker $worker hangs at instruction $insn "
    if [ "$stopped" ]; then
        sleep 0.5
        kill -STOP $P
        sleep 3
        kill -CONT $P
        named="step $step: worker [0-9]* waited 2000 ms at instruction "
    fi
    wait $C
    rc=$?
    kill -TERM $P
    wait $P
    mkd=$?
    if [ $rc = 0 ] && [ $mkd = 0 ] && grep -q "$named" "$S/err" &&
        [ "$(ls "$S"/mkd-flight-*.json | wc -l)" = 1 ] && [ "$(grep -c launched "$S/err")" = 1 ] &&
        python3 -c 'import json, sys
f = json.load(open(sys.argv[1]))
c, at = f["culprit"], sys.argv[2].split(":")
if len(at) > 3:
    assert not f["live"] and c is None and f["kernel"], f["kernel"]
    sys.exit(0)
w, i, s = map(int, at)
assert (c["worker"], c["instruction"], f["step"]["number"]) == (w, i, s), c
assert f["live"] and len(f["step"]["rows"]) == 2 and sum(x["state"] in ("waiting", "through") for x in f["workers"]) == len(f["workers"]) - 1
print("# culprit", c)' "$S"/mkd-flight-*.json "$at"; then
        echo "ok - hang at worker:instruction:step $at: $(cat "$S/client")"
    else
        echo "not ok - hang at $at: client $rc, mkd $mkd"
        bad=1
    fi
    sed 's/^/#   /' "$S/err" "$S/client" | cut -c1-600
    [ -z "$OUT" ] || cp "$S"/mkd-flight-*.json "$OUT/" 2>/dev/null
    rm -rf "$S"
done

# An illegal address: the process has lost its GPU. One line, the flight file, exit code 9; the supervisor starts a new daemon.
S=$(mktemp -d)
MKD_INJECT_ERROR=0 "$BIN/mkd" --device gpu --model tests/oracle/kimi_linear --socket-dir "$S" --flight-dir "$S/../" --context 4096 >"$S/out" 2>"$S/err" &
P=$!
for _ in $(seq 400); do grep -q ready "$S/out" && break; kill -0 $P 2>/dev/null || break; sleep 0.05; done
touch "$S/before"
timeout 20 "$CLIENT" "$S" >"$S/client" 2>&1
( sleep 20; kill -9 $P ) 2>/dev/null & K=$!
wait $P
mkd=$?
kill $K
F=$(find "$S/.." -maxdepth 1 -name 'mkd-flight-*.json' -newer "$S/before")
if [ $mkd = 9 ] && [ "$(grep -c 'error: GPU lost' "$S/err")" = 1 ] && [ -n "$F" ] && python3 -m json.tool "$F" >"$S/json"; then
    echo "ok - a broken CUDA context: exit code 9"
else
    echo "not ok - a broken CUDA context: exit code $mkd, flight file $F"
    bad=1
fi
sed 's/^/#   /' "$S/err" "$S/client" "$S/json" | cut -c1-600
exit $bad
