#!/bin/bash
# On the machine with the GPU: the kernel hangs under two running generations; the daemon has to name the worker
# and the instruction, write the flight file, relaunch, and give every stream the tokens it would have had. BUILD: where tests/mkd-debug and
# tests/gpu/hang_client are.
# WORKER:INSTRUCTION:AFTER. 7:9 is done aside, between EXPERT_UP and EXPERT_DOWN. 0:42 is SCHEDULE, whose absence no worker notices: all wait for the next step, as when idle. `idle`: SCHEDULE dies while nobody has
# work. `:stopped`: the daemon is stopped (SIGSTOP) for three seconds meanwhile, so that the kernel gives up by itself; it then names the first
# wait that ran out, which need not be the root. One JSON line a case goes to $OUT/inject.jsonl.
BUILD=${BUILD:-build}
cd "$(dirname "$0")/../.." || exit 2
CLIENT=$BUILD/tests/gpu/hang_client
bad=0
start() { # flags...
    rm -f "$S/out"
    "$BUILD/tests/mkd-debug" --device gpu --model tests/oracle/kimi_linear --socket-dir "$S" --context 4096 "$@" >"$S/out" 2>"$S/err" &
    P=$!
    for _ in $(seq 400); do grep -qs ready "$S/out" && break; kill -0 $P 2>/dev/null || break; sleep 0.05; done
}
for at in ${HANGS:-0:0:0 5:12:10 7:9:5 131:3:1 77:9:33 0:26:2 131:3:1200:stopped idle}; do
    S=$(mktemp -d)
    IFS=: read -r worker insn after stopped <<<"$at"
    start
    # shellcheck disable=SC2086
    timeout 60 "$CLIENT" "$S" $worker $insn $after >"$S/client" 2>&1 &
    C=$!
    named="worker $worker hangs at instruction $insn "
    [ "$at" = idle ] && named="worker [0-9]* hangs at instruction [0-9]* (SCHEDULE, layer -1): it has stopped looking for work"
    if [ "$stopped" ]; then
        for _ in $(seq 400); do grep -q injected "$S/err" && break; sleep 0.01; done
        kill -STOP $P
        sleep 5
        kill -CONT $P
        named="worker [0-9]* waited 2000 ms at instruction "
    fi
    wait $C
    rc=$?
    kill -TERM $P
    wait $P
    mkd=$?
    if [ $rc = 0 ] && [ $mkd = 0 ] && grep -q "error: GPU: step [0-9]*: $named" "$S/err" &&
        [ "$(ls "$S"/mkd-flight-*.json | wc -l)" = 1 ] && [ "$(grep -c 'launched again' "$S/err")" = 1 ] &&
        python3 -c 'import json, sys
f = json.load(open(sys.argv[1]))
c, at = f["culprit"], sys.argv[2].split(":")
others = sum(x["state"] in ("waiting", "through") for x in f["workers"])
if len(at) > 3:
    assert not f["live"] and c is None and f["kernel"], f["kernel"]
    sys.exit(0)
assert f["live"] and others == len(f["workers"]) - 1, others
if at == ["idle"]:
    assert c["opcode"] == "SCHEDULE" and not f["step"]["rows"], c
else:
    assert (c["worker"], c["instruction"]) == (int(at[0]), int(at[1])) and len(f["step"]["rows"]) == 1, c # its model has experts: two streams have steps of their own
print("# culprit", c)' "$S"/mkd-flight-*.json "$at"; then
        echo "ok - hang at worker:instruction:after $at: $(cat "$S/client")"
        [ -z "$OUT" ] || echo "{\"at\": \"$at\", \"named\": \"$(grep -m 1 -o "step [0-9]*: worker.*" "$S/err" | sed 's/; flight record.*//; s/"/'"'"'/g')\", \"client\": $(cat "$S/client"), \"ok\": true}" >>"$OUT/inject.jsonl"
    else
        echo "not ok - hang at $at: client $rc, mkd $mkd"
        [ -z "$OUT" ] || echo "{\"at\": \"$at\", \"ok\": false}" >>"$OUT/inject.jsonl"
        bad=1
    fi
    sed 's/^/#   /' "$S/err" "$S/client" | cut -c1-600
    [ -z "$OUT" ] || cp "$S"/mkd-flight-*.json "$OUT/" 2>/dev/null
    rm -rf "$S"
done

# An illegal address: the process has lost its GPU. One line, the flight file, exit code 9; the supervisor starts a new daemon.
S=$(mktemp -d)
start --flight-dir "$S/../"
touch "$S/before"
timeout 20 "$BUILD/mkctl" inject error --socket-dir "$S" >"$S/client" 2>&1
( sleep 20; kill -9 $P ) 2>/dev/null & K=$!
wait $P
mkd=$?
kill $K
F=$(find "$S/.." -maxdepth 1 -name 'mkd-flight-*.json' -newer "$S/before")
if [ $mkd = 9 ] && [ "$(grep -c 'error: GPU lost' "$S/err")" = 1 ] && [ -n "$F" ] && python3 -m json.tool "$F" >"$S/json"; then
    echo "ok - a broken CUDA context: exit code 9"
    [ -z "$OUT" ] || echo '{"at": "illegal address", "exit_code": 9, "ok": true}' >>"$OUT/inject.jsonl"
else
    echo "not ok - a broken CUDA context: exit code $mkd, flight file $F"
    bad=1
fi
sed 's/^/#   /' "$S/err" "$S/client" "$S/json" | cut -c1-600
exit $bad
