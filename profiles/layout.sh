#!/bin/bash
# profiles/layout.sh: what a step of one row executes of the kernel, and what one of eight rows, at context 32,768 or with a token drawn executes beside, for megakernel/layout.py, on the machine with the GPU (ncu,
# 90 GB of device memory; some 20 seconds a step). Builds nothing; BUILD holds what `make tests` made, LINEINFO=1 or not: it goes by instructions. Writes $OUT/layout.txt (default:
# megakernel/layout.txt), which keeps its orders of functions.
#   PRESETS="..."   of which the profile is to know (default: all)
#   SEVERAL="..."   of which it is to know steps of eight rows (default: one of each kind of attention and of experts)
#   FAR="..."       of which it is to know steps at context 32,768 (default: one of each kind of attention)
#   DRAWN="..."     of which it is to know steps whose token is drawn by top-p (default: one)
#   BITS="..."      only these steps, by their bits in layout.txt (of one row from 0 on, the others from 16 on, as they stand above); what the profile has of others stays. It has to be one of this kernel's
cd "$(dirname "$0")/.." || exit 2
. profiles/presets.sh
SEVERAL=${SEVERAL-kimi-linear-48b glm-4.7-flash qwen3.6-35b-a3b llama-3.2-1b}
FAR=${FAR-glm-4.7-flash qwen3.6-35b-a3b llama-3.2-1b}
DRAWN=${DRAWN-kimi-linear-48b}
BUILD=${BUILD:-build}
OUT=${OUT:-megakernel}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
page() { # preset rows context [flags of onestep]: of one step, by instructions of the kernel
    local csv=$dir/$#-$2-$3/$1.csv at=$((bit++))
    [ -n "${BITS-}" ] && [[ " $BITS " != *" $at "* ]] && return
    mkdir -p "${csv%/*}"
    ncu --clock-control none --replay-mode application --launch-skip 2 --launch-count 1 -k regex:mk_resident --metrics inst_executed -f -o "$dir/report" \
        "$BUILD/profiles/onestep" --preset "$1" --rows "$2" --ctx "$3" "${@:4}" >"$dir/log" 2>&1 && ncu -i "$dir/report.ncu-rep" --page source --csv >"$csv" || { cat "$dir/log" >&2; exit 1; }
    pages+=("${BITS:+$at=}$csv")
}
pages=() bit=0
for p in $PRESETS; do page "$p" 1 2048; done
[ -n "${BITS-}" ] || pages+=(--)
bit=16
for p in $SEVERAL; do page "$p" 8 2048; done
for p in $FAR; do page "$p" 1 32768; done
for p in $DRAWN; do page "$p" 1 2048 --temperature 1 --top-p 0.9; done
what=learn
[ -n "${BITS-}" ] && what=renew
python3 megakernel/layout.py $what "$BUILD/profiles/onestep" "$OUT/layout.txt" "${pages[@]}"
