"""What tests/gpu/count_api.c counted: count_api.py BEFORE AFTER [KEY=VALUE ...]

BEFORE and AFTER are copies of its file, taken at READY and before the daemon was told to stop. Prints one JSON object: calls by name in between, those that are
not allowed there, the launches. Exit code 1 when one was not allowed, when a kernel was launched in between. KEY=VALUE go into the object (numbers as numbers); min_tokens=N and tokens=M are compared."""
import json
import struct
import sys

NAMES, LAUNCHES = 1024, 1024
# Copy engines, and events made before the launch. The names are the driver's; _v2 and _ptsz are versions of the same call.
ALLOWED = {"cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyAsync", "cuEventRecord", "cuEventQuery"}


def base(name):
    for tail in ("_ptsz", "_v2"):
        name = name.removesuffix(tail)
    return name


def read(path):
    with open(path, "rb") as f:
        data = f.read()
    magic, n, launches = struct.unpack_from("<8sII", data)
    assert magic == b"mkcount1", path
    calls = {}
    for i in range(n):
        name, count = struct.unpack_from("<56sQ", data, 16 + 64 * i)
        name = name.rstrip(b"\0").decode()
        calls[name] = calls.get(name, 0) + count
    at = 16 + 64 * NAMES
    last = {i: struct.unpack_from("<QIII", data, at + 24 * (i % LAUNCHES))[1:] for i in range(max(0, launches - LAUNCHES), launches)}
    return calls, launches, last


def main():
    try:
        before, launches0, _ = read(sys.argv[1])
        after, launches1, last = read(sys.argv[2])
    except OSError as e:  # no driver was loaded
        print(json.dumps({"ok": False, "why": "nothing was counted: %s" % e.strerror}))
        return 1
    extra = {}
    for a in sys.argv[3:]:
        k, v = a.split("=", 1)
        try:
            extra[k] = json.loads(v)
        except ValueError:
            extra[k] = v
    calls = {k: v - before.get(k, 0) for k, v in sorted(after.items()) if v != before.get(k, 0)}
    wrong = {k: v for k, v in calls.items() if base(k) not in ALLOWED}
    # The resident kernel is what was launched last before READY. Others of its shape are the self-test's, a step each, and over by then.
    resident = last.get(launches0 - 1)
    tests = sum(s == resident for i, s in last.items() if i < launches0 - 1)
    out = dict(extra)
    out["calls_before_ready"] = sum(before.values())
    out["calls_ready_to_stop"] = calls
    out["calls_not_allowed"] = wrong
    out["launches_for_setup"] = launches0 - 1
    out["of_them_self_test"] = tests
    out["launches_ready_to_stop"] = launches1 - launches0
    out["resident_launches"] = [{"blocks": g, "threads": b, "shared_bytes": s} for g, b, s in ([resident] if resident else [])]
    ok = not wrong and launches1 == launches0 and resident and before
    if extra.get("min_tokens", 0) > extra.get("tokens", 0):
        ok = False
    out["ok"] = bool(ok)
    print(json.dumps(out))
    return 0 if ok else 1


sys.exit(main())
