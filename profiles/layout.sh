#!/bin/bash
# profiles/layout.sh: what a step of one row executes of the kernel, for megakernel/layout.py, on the machine with the GPU (ncu, 90 GB of device memory; about two minutes). Builds nothing; BUILD
# holds what `make tests` made. Writes $OUT/layout.txt (default: megakernel/layout.txt).
#   PRESETS="..."   of which the profile is to know (default: all)
cd "$(dirname "$0")/.." || exit 2
. profiles/presets.sh
BUILD=${BUILD:-build}
OUT=${OUT:-megakernel}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
pages=()
for p in $PRESETS; do
    ncu --clock-control none --replay-mode application --launch-skip 2 --launch-count 1 -k regex:mk_resident --metrics inst_executed -f -o "$dir/$p" \
        "$BUILD/profiles/onestep" --preset "$p" >"$dir/log" 2>&1 && ncu -i "$dir/$p.ncu-rep" --page source --csv >"$dir/$p.csv" || { cat "$dir/log" >&2; exit 1; }
    pages+=("$dir/$p.csv")
done
python3 megakernel/layout.py learn "$BUILD/profiles/onestep" "$OUT/layout.txt" "${pages[@]}"
