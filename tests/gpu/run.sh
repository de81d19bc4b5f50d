#!/bin/bash
# make check-gpu: every GPU test, on the machine that has the GPU. Builds nothing: BUILD holds what `make all tests` made. Reports go to
# $OUT (default: a new directory). With a debug build in BUILD_DEBUG (make DEBUG=1 BUILD=...) the injected hangs run as well.
cd "$(dirname "$0")/../.." || exit 2
BUILD=${BUILD:-build}
[ -e /dev/nvidiactl ] || { echo 'check-gpu: no NVIDIA driver on this machine' >&2; exit 9; }
[ -x "$BUILD/tests/gpu/test_gpu" ] || { echo "check-gpu: $BUILD/tests/gpu/test_gpu is not there: make all tests (with nvcc) makes it" >&2; exit 2; }
export OUT=${OUT:-$(mktemp -d)}
bad=0
timeout 240 "$BUILD/tests/gpu/test_gpu" || bad=1
if [ -n "${BUILD_DEBUG:-}" ]; then
    BIN=$BUILD_DEBUG timeout 300 tests/gpu/test_daemon_gpu.sh || bad=1
else
    echo 'check-gpu: BUILD_DEBUG is not set: no injected hangs'
fi
ls -l "$OUT"
exit $bad
