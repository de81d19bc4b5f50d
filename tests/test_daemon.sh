#!/bin/bash
# The daemon from outside: build/mkd and build/mkctl on the tiny oracle checkpoint. One "ok - " or "not ok - " line a check.
# Needs a python3 with pyzmq (tests/run.sh finds one) for the parts that play supervisor, squatter and Python client.
BUILD=${BUILD:-build}
cd "$(dirname "$0")/.." || exit 2
MKD=$PWD/$BUILD/mkd MKCTL=$PWD/$BUILD/mkctl CLIENT=$PWD/ipc/mkd_client.py
T=$(mktemp -d "/tmp/mkd test XXXXXX") # every path has spaces
MODEL="$T/a tiny model"
S="$T/run dir"
ln -s "$PWD/tests/oracle/kimi_linear" "$MODEL"
unset NOTIFY_SOCKET XDG_RUNTIME_DIR
PID='' bad=0 others=()
cleanup() {
    for p in $PID "${others[@]}"; do kill -9 "$p" 2>/dev/null; done
    rm -rf "$T"
}
trap cleanup EXIT

check() { # name command...
    if "${@:2}"; then
        echo "ok - $1"
    else
        echo "not ok - $1"
        bad=1
        for f in out err gen gen.err; do [ -s "$T/$f" ] && sed "s/^/#   $f: /" "$T/$f" | tail -5; done
    fi
}
has() { grep -qF -- "$2" "$T/$1"; }
until_true() { # seconds command...
    local end=$((SECONDS + $1))
    until "${@:2}"; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.05
    done
}

# refused CODE TEXT flags...: mkd ends with CODE and exactly one error line, which holds TEXT.
refused() {
    timeout 60 "$MKD" --log-level error "${@:3}" >"$T/out" 2>"$T/err" </dev/null
    local rc=$?
    [ $rc = "$1" ] && [ "$(wc -l <"$T/err")" = 1 ] && [ ! -s "$T/out" ] && has err "$2" && return 0
    echo "#   exit code $rc, expected $1 and \"$2\""
    return 1
}

start() { # flags...
    rm -f "$T/out"
    "$MKD" --model "$MODEL" --socket-dir "$S" --context 4096 --streams 2 "$@" >"$T/out" 2>"$T/err" </dev/null &
    PID=$!
    until_true 90 ready_or_dead && has out "mkd ready: $S/req.sock model a tiny model device CPU twin"
}
ready_or_dead() { [ -s "$T/out" ] || ! kill -0 "$PID" 2>/dev/null; }
ended() { # CODE: the daemon ends by itself with it
    wait "$PID"
    local rc=$?
    PID=''
    [ $rc = "$1" ] || echo "#   exit code $rc, expected $1"
    [ $rc = "$1" ]
}
stop() {
    kill -TERM "$PID"
    ended 0
}
gen() { # tokens flags...: a greedy generation, tokens into the file gen
    ${gen_exec:-} "$MKCTL" generate --socket-dir "$S" --ids 512,1,2,3 --temperature 0 --stop "" --max-new "$@" >"$T/gen" 2>"$T/gen.err"
}
gen_bg() {
    rm -f "$T/gen"
    (gen_exec=exec; gen "$@") & # $! is mkctl itself
    GEN=$!
    others+=("$GEN")
    until_true 20 test -s "$T/gen"
}
tokens_are() { [ "$(wc -w <"$T/gen")" = "$1" ] || { echo "#   $(wc -w <"$T/gen") tokens, expected $1"; false; }; }
used_is() {
    "$MKCTL" stats --socket-dir "$S" >"$T/stats" 2>/dev/null &&
        python3 -c 'import json, sys; s = json.load(open(sys.argv[1])); sys.exit(s["streams"]["used"] != int(sys.argv[2]) or (s["pages"]["used"] == 0) != (int(sys.argv[2]) == 0))' "$T/stats" "$1"
}

# ---- flags -------------------------------------------------------------------------------------------------------------
version() { [[ $("$MKD" --version) =~ ^mkd\ [0-9.]+\ \(([0-9a-f]+(-dirty)?|unknown)\)$ ]]; }
check "--version says version and commit" version
check "--help names every flag" eval '"$MKD" --help | grep -q -- "--drain-seconds S"'
round_trip() {
    "$MKD" --model "$MODEL" --streams 3 --memory 2G --print-config >"$T/out" || return 1
    grep -v '^#' "$T/out" >"$T/mkd.conf"
    "$MKD" --config "$T/mkd.conf" --print-config | grep -v '^#' | cmp - "$T/mkd.conf"
}
check "--print-config reads back" round_trip
check "unknown flag" refused 2 'unknown flag "--stream"' --stream 4
check "no model" refused 2 'no model'
printf 'model = m\nstream = 4\n' >"$T/bad.conf"
check "bad key in the file names file and line" refused 2 "bad.conf:2: unknown key" --config "$T/bad.conf"

# ---- refused before the ready line ---------------------------------------------------------------------------------------
check "--check loads and says so" eval '"$MKD" --check --device cpu --model "$MODEL" >"$T/out" 2>"$T/err" && has out "mkd check: ok: model a tiny model" && [ ! -s "$T/err" ]'
check "missing model directory" refused 3 "no such model" --check --model "$T/no such model"
mkdir "$T/empty"
check "directory without config.json" refused 3 "config.json" --check --model "$T/empty"
cp -r "$MODEL/." "$T/cut" && truncate -s 100000 "$T/cut/model-00002-of-00002.safetensors"
check "truncated shard" refused 3 "model-00002-of-00002.safetensors" --check --model "$T/cut"
rm "$T/cut/model-00002-of-00002.safetensors"
check "missing shard" refused 3 "model-00002-of-00002.safetensors" --check --model "$T/cut"
sed -i 's/KimiLinearForCausalLM/NoSuchForCausalLM/; s/kimi_linear/no_such/' "$T/cut/config.json"
check "unknown architecture" refused 3 "NoSuchForCausalLM" --check --model "$T/cut"
check "context over the model's limit" refused 5 "4096" --check --model "$MODEL" --context 5000
check "an FP8 cache for grouped queries" refused 2 "kv-cache fp8: expected latent attention" --check --model tests/oracle/llama --kv-cache fp8
check "an FP8 cache with activations in f32" refused 2 "kv-cache: expected bf16 with act f32, found fp8" --check --model "$MODEL" --kv-cache fp8 --act f32 --device cpu
check "does not fit in the memory allowed" refused 5 "" --check --model "$MODEL" --memory 1M
check "a pool smaller than a stream" refused 5 "kv-tokens 100: expected at least the context's 4096" --check --device cpu --model "$MODEL" --context 4096 --kv-tokens 100
check "a pool that does not fit" refused 5 "a pool of 1000000000000 tokens (kv-tokens) needs" --check --device cpu --model "$MODEL" --kv-tokens 1000000000000
if [ ! -e /dev/nvidiactl ]; then check "--device gpu without a driver" refused 9 "no NVIDIA driver" --check --model "$MODEL" --device gpu; fi
check "socket directory without a parent" refused 6 "cannot make the socket directory" --model "$MODEL" --socket-dir "$T/no/dir"
check "flight directory that does not exist" refused 6 "--flight-dir: cannot write to $T/no/dir" --model "$MODEL" --socket-dir "$S" --flight-dir "$T/no/dir"
long=$T/$(printf 'd%.0s' {1..100})
check "socket directory with a name too long for a socket" refused 2 "the socket directory's path has" --model "$MODEL" --socket-dir "$long"

# ---- ready, serve, second daemon, stop -----------------------------------------------------------------------------------
python3 - "$T/notify" >"$T/notified" <<'PY' &
import os, socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.bind(sys.argv[1] + ".new")
os.rename(sys.argv[1] + ".new", sys.argv[1])
s.settimeout(100)
for _ in range(2):
    print(s.recv(100).decode(), flush=True)
PY
others+=($!)
until_true 10 test -e "$T/notify"
export NOTIFY_SOCKET=$T/notify
check "ready line" start
unset NOTIFY_SOCKET
check "READY=1" until_true 5 has notified READY=1
check "socket directory has mode 0750" test "$(stat -c %a "$S")" = 750
check "ping" eval '"$MKCTL" ping --socket-dir "$S" >"$T/gen" 2>&1'
check "generate" eval 'gen 40 && tokens_are 40 && cp "$T/gen" "$T/first"'
check "generate again: the same tokens" eval 'gen 40 && cmp "$T/gen" "$T/first"'
check "the stream is closed" used_is 0
check "second daemon is refused and names the first" refused 7 "pid $PID" --model "$MODEL" --socket-dir "$S"
check "the first one still serves" eval 'gen 40 && cmp "$T/gen" "$T/first"'
check "token id out of range is refused" eval '! "$MKCTL" generate --socket-dir "$S" --ids 1,99999 --max-new 4 >"$T/gen" 2>"$T/gen.err" && has gen.err "vocabulary of 515"'
check "context over the limit is refused" eval '! "$MKCTL" generate --socket-dir "$S" --ids 1 --context 5000 --max-new 4 >"$T/gen" 2>"$T/gen.err" && has gen.err "4096"'
python_client() {
    python3 - "$CLIENT" "$S" "$T/first" <<'PY'
import importlib.util, sys
spec = importlib.util.spec_from_file_location("mkd_client", sys.argv[1])
m = importlib.util.module_from_spec(spec)
spec.loader.exec_module(m)
want = [int(x) for x in open(sys.argv[3]).read().split()]
with m.Client(sys.argv[2]) as c:
    s = c.open(temperature=0.0, stop=[])
    s.append([512, 1, 2, 3])
    got = [t.id for t in s.generate(max_new=40)]
    s.close()
assert got == want, (got, want)
PY
}
check "the Python client gets the same tokens" python_client
check "SIGTERM with nothing running: exit code 0" stop
check "STOPPING=1" until_true 5 has notified STOPPING=1
check "the sockets are gone" eval '[ ! -e "$S/req.sock" ] && [ ! -e "$S/stats.sock" ]'
check "no client without a daemon" eval '"$MKCTL" ping --socket-dir "$S" >"$T/gen" 2>"$T/gen.err"; [ $? = 11 ]'

# ---- killed clients --------------------------------------------------------------------------------------------------------
check "ready with one stream" start --streams 1
gen_bg 4000
check "its stream is taken" eval '! "$MKCTL" generate --socket-dir "$S" --ids 1 --max-new 4 >"$T/other" 2>&1'
kill -9 "$GEN"
wait "$GEN" 2>/dev/null
check "a client killed in the middle of a generation frees its stream" until_true 15 used_is 0
check "and the next one is served" eval 'gen 40 && cmp "$T/gen" "$T/first"'

# ---- drain, abort ------------------------------------------------------------------------------------------------------------
gen_bg 600
kill -TERM "$PID"
check "SIGTERM: the daemon takes nothing new" eval 'sleep 0.3; ! "$MKCTL" generate --socket-dir "$S" --ids 1 --max-new 4 >"$T/other" 2>&1'
check "SIGTERM: what runs is finished" eval 'wait $GEN && tokens_are 600'
check "SIGTERM: exit code 0" ended 0

check "ready after a drain" start
gen_bg 4000
kill -TERM "$PID"
sleep 0.3
kill -TERM "$PID"
check "second SIGTERM: the client gets its DONE" eval 'wait $GEN; has gen.err cancelled'
check "second SIGTERM: exit code 10" ended 10
check "one error line says so" eval '[ "$(grep -c "mkd: error:" "$T/err")" = 1 ] && has err "requests running"'

check "ready after an abort" start --drain-seconds 0.5
gen_bg 4000
kill -INT "$PID"
check "SIGINT drains too; past the limit the client gets its DONE" eval 'wait $GEN; has gen.err cancelled'
check "past the drain limit: exit code 10" ended 10

# ---- sockets that exist ----------------------------------------------------------------------------------------------------
check "ready again" start
kill -9 "$PID"
wait "$PID" 2>/dev/null
check "kill -9 leaves the sockets" test -e "$S/req.sock"
check "stale sockets and lock are taken over" start
check "and it serves" eval 'gen 40 && cmp "$T/gen" "$T/first"'
stop
python3 - "$S/req.sock" "$T/squat" <<'PY' &
import socket, sys, time
s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
s.bind(sys.argv[1])
s.listen(8)
open(sys.argv[2], "w").close()
time.sleep(60)
PY
SQUAT=$!
others+=("$SQUAT")
until_true 10 test -e "$T/squat"
check "a socket in use by something else" refused 7 "$S/req.sock" --model "$MODEL" --socket-dir "$S"
check "which is left alone" test -S "$S/req.sock"
kill "$SQUAT"
wait "$SQUAT" 2>/dev/null
rm -f "$S/req.sock"
echo precious >"$S/req.sock"
check "a file in the socket's place" refused 6 "$S/req.sock" --model "$MODEL" --socket-dir "$S"
check "which is left alone, too" grep -q precious "$S/req.sock"
rm -f "$S/req.sock"

# ---- a closed stdout and stderr ----------------------------------------------------------------------------------------------
"$MKD" --model "$MODEL" --socket-dir "$S" --streams 2 > >(exec true) 2> >(exec true) </dev/null &
PID=$!
alive() { "$MKCTL" ping --socket-dir "$S" >/dev/null 2>&1; }
check "lives with nobody reading its output" until_true 60 alive
check "and stops in order" stop
exit $bad
