#!/bin/bash
# make demo: starts the daemon on the small checkpoint, streams one generation to the terminal, prints its figures, stops the daemon.
# PROMPT= and SEED= choose the generation. Anything that goes wrong ends with a non-zero exit code.
set -u
cd "$(dirname "$0")/.." || exit 2
build=${BUILD:-build}
prompt=${PROMPT:-The whale was seen at dawn, and the captain}
seed=${SEED:-11}
dir=$(mktemp -d)
pid=
cleanup() {
    [ -z "$pid" ] || kill -9 "$pid" 2>/dev/null
    rm -rf "$dir"
}
trap cleanup EXIT
fail() {
    echo "demo: $*" >&2
    [ ! -s "$dir/err" ] || cat "$dir/err" >&2
    exit 1
}

if [ -e tests/english/checkpoint/config.json ]; then
    model=tests/english/checkpoint # bytes in, bytes out; 256 begins a text
    input=(--bos 256 --bytes "$prompt")
else
    model=tests/oracle/kimi_linear # random weights, tokens are numbers
    input=(--ids 512,1,2,3)
fi

"$build/mkd" --model "$model" --socket-dir "$dir" --log-level warn >"$dir/out" 2>"$dir/err" </dev/null &
pid=$!
for ((i = 0; i < 600; i++)); do
    grep -q '^mkd ready' "$dir/out" && break
    kill -0 "$pid" 2>/dev/null || { pid=; fail "the daemon did not start"; }
    sleep 0.1
done
grep '^mkd ready' "$dir/out" || fail "the daemon was not ready within 60 s"

[ "$model" != tests/english/checkpoint ] || printf '\n%s' "$prompt"
"$build/mkctl" generate --socket-dir "$dir" "${input[@]}" --max-new 400 --temperature 0.7 --top-p 0.95 --seed "$seed" 2>"$dir/figures" ||
    fail "the generation failed: $(cat "$dir/figures")"
echo
cat "$dir/figures"
"$build/mkctl" plan "$model" --context 1024 | sed -n 's/^a token */a token needs /p'

kill -TERM "$pid"
wait "$pid" || { rc=$?; pid=; fail "the daemon ended with exit code $rc"; }
pid=
