#!/bin/bash
# make install: everything arrives, the unit names the prefix, a client program builds from what was installed and nothing else.
BUILD=${BUILD:-build}
cd "$(dirname "$0")/.." || exit 2
if [[ $BUILD == */asan ]]; then
    echo "ok - make install # SKIP the plain build's test"
    exit 0
fi
T=$(mktemp -d "/tmp/mkd install XXXXXX")
trap 'rm -rf "$T"' EXIT
bad=0
check() {
    if "${@:2}"; then
        echo "ok - $1"
    else
        echo "not ok - $1"
        sed 's/^/#   /' "$T/log" | tail -20
        bad=1
    fi
}
P=/opt/mkd
D=$T/root
mkdir "$D"
ln -s "$D" "/tmp/mkd-install-$$" # DESTDIR without spaces, as make wants it
trap 'rm -rf "$T" "/tmp/mkd-install-$$"' EXIT
check "make install with PREFIX and DESTDIR" eval 'env -u MAKEFLAGS -u MAKELEVEL make BUILD="$BUILD" PREFIX=$P DESTDIR=/tmp/mkd-install-$$ install >"$T/log" 2>&1'
arrived() {
    local f
    for f in bin/mkd bin/mkctl lib/libmkd-client.a include/mkd/ipc/client.h include/mkd/ipc/wire.h include/mkd/host/err.h \
        share/mkd/mkd_client.py share/doc/mkd/PROTOCOL.md share/doc/mkd/LICENSE lib/systemd/system/mkd.service; do
        [ -s "$D$P/$f" ] || { echo "#   no $f"; return 1; }
    done
}
check "everything arrives" arrived
check "the unit names the prefix" eval 'grep -q "^ExecStart=$P/bin/mkd " "$D$P/lib/systemd/system/mkd.service" && ! grep -q @PREFIX@ "$D$P/lib/systemd/system/mkd.service"'
check "installed mkd runs" eval '"$D$P/bin/mkd" --version >"$T/log" 2>&1'
cat >"$T/client.c" <<'C'
#include <ipc/client.h>
#include <stdio.h>
int main(void)
{
    mk_err err;
    mk_client *c = mk_client_new("/nowhere", "test", 1000, &err);
    printf("%d %s\n", err.code, err.msg);
    mk_client_destroy(&c);
    return err.code == MK_E_CLOSED ? 0 : 1;
}
C
check "a client builds from the installed files" eval '${CC:-gcc} -std=c11 -Wall -Wextra -Werror -I"$D$P/include/mkd" -o "$T/client" "$T/client.c" "$D$P/lib/libmkd-client.a" -lzmq -pthread >"$T/log" 2>&1'
check "and finds no daemon" eval '"$T/client" >"$T/log" 2>&1'
exit $bad
