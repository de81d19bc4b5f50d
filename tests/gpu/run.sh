#!/bin/bash
# make check-gpu: every GPU test, on the machine that has the GPU. Builds nothing: BUILD holds what `make all tests` made (with nvcc). Every part writes its own JSON to
# $OUT/<part>/ (default: a new directory), and all of them become one: $OUT/check-gpu.json (tests/gpu/report.py), row by row.
#   PARTS="gpu opcodes ..."   only these; the parts are listed below. What other parts left in $OUT stays in the report
#   SOAK=60                   seconds of soak; the row of the report wants 600 (a part `soak` in $OUT, run on its own, counts for it: test_residency.sh)
cd "$(dirname "$0")/../.." || exit 2
export BUILD=${BUILD:-build}
PROGRAMS=$(echo mkd mkctl tests/mkd-debug tests/gpu/{test_gpu,test_opcodes,test_setup,bus,tear,latency,hang_client,soak,libcount_api.so,race_gpu,race_opcodes,race_model})
[ "${1:-}" = --programs ] && { echo "$PROGRAMS"; exit; } # what has to be in BUILD
[ -e /dev/nvidiactl ] || { echo 'check-gpu: no NVIDIA driver on this machine' >&2; exit 9; }
for f in $PROGRAMS; do
    [ -x "$BUILD/$f" ] || { echo "check-gpu: $BUILD/$f is not there: make all tests (with nvcc) makes it" >&2; exit 2; }
done
TOP=${OUT:-$(mktemp -d)}
mkdir -p "$TOP"
T=$BUILD/tests/gpu

# part NAME SECONDS COMMAND...: its stdout and stderr go to $TOP/NAME/log, its reports where $OUT points
part() {
    local name=$1 limit=$2 begin=$SECONDS rc
    shift 2
    case " ${PARTS:-$ALL} " in *" $name "*) ;; *) return ;; esac
    rm -rf "${TOP:?}/$name"
    mkdir -p "$TOP/$name"
    OUT=$TOP/$name timeout -k 5 "$limit" "$@" >"$TOP/$name/log" 2>&1 </dev/null
    rc=$?
    echo "$rc $((SECONDS - begin))" >"$TOP/$name/rc"
    [ $rc = 0 ] && echo "ok - $name ($((SECONDS - begin)) s)" || { echo "not ok - $name: exit code $rc"; tail -15 "$TOP/$name/log" | cut -c1-400 | sed 's/^/#   /'; }
}
to() { "${@:2}" >"$OUT/$1"; } # a command that prints its report
export -f to
export T

ALL='gpu opcodes diff rows setup tear latency trace residency inject synth memcheck racecheck'
for p in ${PARTS:-}; do case " $ALL " in *" $p "*) ;; *) echo "check-gpu: no part \"$p\", there are: $ALL" >&2; exit 2 ;; esac; done
part gpu 240 "$T/test_gpu"                                       # goldens, row invariance, epochs that wrap, one entry for many tokens, hang
part opcodes 120 "$T/test_opcodes"                               # every opcode at tiny and real shapes
part diff 240 bash tests/gpu/test_diff.sh                        # every family, instruction by instruction and in free runs
part rows 240 bash tests/gpu/test_rows.sh                        # one row a step and eight, at published sizes: the same bits
part setup 120 "$T/test_setup"                                   # packing and derived weights on the GPU
part tear 60 bash -c 'to bus.json "$T/bus"; to tear.json "$T/tear"' # packets across the bus; 10^9 packets under a full stream
part latency 60 bash -c 'to latency.json "$T/latency"'           # idle to first instruction, token to polling thread
part trace 120 bash tests/gpu/test_trace.sh                      # every instruction in it; what tracing costs
SECONDS_SOAK=${SOAK:-60} part residency $((${SOAK:-60} + 90)) bash tests/gpu/test_residency.sh # launches and driver calls between READY and shutdown, over a soak
part inject 180 bash tests/gpu/test_daemon_gpu.sh                # hangs: named, survived
part synth 180 bash tests/gpu/test_synth.sh                      # a full-size model with synthetic weights
part memcheck 300 bash tests/gpu/test_memcheck.sh                # compute-sanitizer, tiny models
part racecheck 600 bash tests/gpu/test_racecheck.sh              # shared memory: of the build that racecheck can follow

nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,pstate,temperature.gpu --format=csv,noheader >"$TOP/gpu.csv" 2>/dev/null
python3 tests/gpu/report.py "$TOP" "$("$BUILD/mkd" --version)" >"$TOP/check-gpu.json"
bad=$?
python3 tests/gpu/report.py --print "$TOP/check-gpu.json"
echo "report: $TOP/check-gpu.json"
exit $bad
