#!/bin/bash
# profiles/layout.sh: what a step of one row executes of the kernel, and what one of eight rows, at context 32,768 or with a token drawn executes beside, for megakernel/layout.py, on the machine with the GPU (ncu,
# 90 GB of device memory; some 20 seconds a step, three of them beside each other). Builds nothing; BUILD holds what `make tests` made, LINEINFO=1 or not: it goes by instructions. Writes $OUT/layout.txt (default:
# megakernel/layout.txt), which keeps its orders of functions.
#   PRESETS="..."   of which the profile is to know (default: all)
#   SEVERAL="..."   of which it is to know steps of eight rows (default: one of each kind of attention and of experts)
#   FAR="..."       of which it is to know steps at context 32,768 (default: one of each kind of attention)
#   DRAWN="..."     of which it is to know steps whose token is drawn by top-p (default: one)
#   AT_ONCE=3       steps that are counted beside each other: as many as device memory holds; one that was refused is counted once more, alone
#   BITS="..."      only these steps, by their bits in layout.txt (of one row from 0 on, the others from 16 on, as they stand above); what the profile has of others stays. It has to be one of this kernel's
cd "$(dirname "$0")/.." || exit 2
. profiles/presets.sh
SEVERAL=${SEVERAL-kimi-linear-48b glm-4.7-flash qwen3.6-35b-a3b llama-3.2-1b}
FAR=${FAR-glm-4.7-flash qwen3.6-35b-a3b llama-3.2-1b}
DRAWN=${DRAWN-kimi-linear-48b}
AT_ONCE=${AT_ONCE:-3}
BUILD=${BUILD:-build}
OUT=${OUT:-megakernel}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
count() { # csv preset rows context [flags of onestep]: of one step, by instructions of the kernel. Several ncu take turns by a lock in TMPDIR, of which each has its own here
    local tmp=${1%.csv}
    mkdir -p "$tmp"
    TMPDIR=$tmp ncu --clock-control none --replay-mode application --launch-skip 2 --launch-count 1 -k regex:mk_resident --metrics inst_executed -f -o "$tmp/report" \
        "$BUILD/profiles/onestep" --preset "$2" --rows "$3" --ctx "$4" "${@:5}" >"$tmp/log" 2>&1 && TMPDIR=$tmp ncu -i "$tmp/report.ncu-rep" --page source --csv >"$tmp/page" && mv "$tmp/page" "$1"
}
page() { # preset rows context [flags of onestep]: the next bit of the profile
    local csv=$dir/$#-$2-$3/$1.csv at=$((bit++))
    [ -n "${BITS-}" ] && [[ " $BITS " != *" $at "* ]] && return
    while [ "$(jobs -rp | wc -l)" -ge "$AT_ONCE" ]; do wait -n; done
    count "$csv" "$@" &
    pages+=("${BITS:+$at=}$csv") of+=("$csv $*")
}
pages=() of=() bit=0
for p in $PRESETS; do page "$p" 1 2048; done
[ -n "${BITS-}" ] || pages+=(--)
bit=16
for p in $SEVERAL; do page "$p" 8 2048; done
for p in $FAR; do page "$p" 1 32768; done
for p in $DRAWN; do page "$p" 1 2048 --temperature 1 --top-p 0.9; done
wait
for one in "${of[@]}"; do # what was refused, for want of memory mostly, alone
    read -ra args <<<"$one"
    [ -s "${args[0]}" ] || count "${args[@]}" || { cat "${args[0]%.csv}/log" >&2; exit 1; }
done
what=learn
[ -n "${BITS-}" ] && what=renew
python3 megakernel/layout.py $what "$BUILD/profiles/onestep" "$OUT/layout.txt" "${pages[@]}"
