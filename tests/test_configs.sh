#!/bin/bash
# The published configurations under tests/fixtures/configs are what their publishers have, byte for byte (README.md there); the oracle's
# checkpoints and goldens are small.
cd "$(dirname "$0")/fixtures/configs" || exit 2
BUILD=${BUILD:-build}
if [[ $BUILD == */asan ]]; then
    echo "ok - published configurations # SKIP the plain build's test"
    exit 0
fi
bad=0
check() { # NAME WANTED FOUND
    if [ "$2" = "$3" ]; then echo "ok - $1"; else echo "not ok - $1: SHA-256 is $3, published is $2"; bad=1; fi
}
while read -r sum file; do check "$file" "$sum" "$(sha256sum "$file" | cut -d' ' -f1)"; done < <(grep -v '^#' SHA256SUMS)
# Four spaces and no newline at the end, as Qwen writes.
plain='import json,sys; c = json.load(open(sys.argv[1])); del c["quantization_config"]; sys.stdout.write(json.dumps(c, indent=4))'
while read -r sum file; do check "$file without quantization_config" "$sum" "$(python3 -c "$plain" "$file" | sha256sum | cut -d' ' -f1)"; done < <(grep -v '^#' SHA256SUMS.bf16)
# At most 3 MB a family and 16 MB together.
all=0
for d in ../../oracle/*/; do
    [ -e "$d/golden.safetensors" ] || continue
    n=$(cat "$d"/* | wc -c)
    all=$((all + n))
    if [ "$n" -gt 3000000 ]; then echo "not ok - $d has $n bytes, at most 3,000,000"; bad=1; fi
done
if [ "$all" -gt 0 ] && [ "$all" -le 16000000 ]; then echo "ok - the oracle's files have $all bytes"; else echo "not ok - the oracle's files have $all bytes, at most 16,000,000"; bad=1; fi
exit $bad
