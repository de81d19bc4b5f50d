"""ipc/mkd_client.py against frames that the C side made (tests/test_wire.c writes the file and runs this): every field has the value
that C gave it, and encoding what was decoded gives the same bytes."""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "ipc"))
import mkd_client as m  # noqa: E402


def number(text, like):
    return float(text) if isinstance(like, float) else int(text)


def check(line):
    left, frame = line.split(" : ")
    name, flags, stream, request, *fields = left.split()
    frame = bytes.fromhex(frame)
    got = m.decode(frame)
    assert (got.name, got.flags, got.stream, got.request) == (name, int(flags), int(stream), int(request)), (line, got)
    assert len(got.fields) == len(fields), (line, got)
    for f in fields:
        key, value = f.split("=")
        have = got.fields[key]
        if isinstance(have, tuple):
            assert have == tuple(number(v, h) for v, h in zip(value.split(","), have)), (f, have)
        else:
            assert have == number(value, have), (f, have)
    fields = dict(got.fields)
    fields.pop("n", None)
    t = m.TYPES[name]
    items = got.items
    again = m.encode(name, got.flags, got.stream, got.request, items, **fields)
    start = m.HEADER.size + t.fixed.size
    assert again[:start] == frame[:start], (again.hex(), frame.hex())
    assert len(again) == len(frame)
    if t.text or (t.item and "f" not in t.item.format):  # NaN payloads may change on their way through a double
        assert again == frame, (again.hex(), frame.hex())
    for n in range(len(frame)):
        try:
            m.decode(frame[:n])
        except ValueError:
            continue
        raise AssertionError("%s cut to %d bytes was taken" % (name, n))
    return name


def main():
    with open(sys.argv[1]) as f:
        seen = {check(line) for line in f}
    assert seen == set(m.TYPES), set(m.TYPES) ^ seen
    for bad in (b"", b"x" * 32, b"MKDW\x02\x00" + b"\0" * 26, b"MKDW\x01\x00\x63\x00" + b"\0" * 24):
        try:
            m.decode(bad)
        except ValueError:
            continue
        raise AssertionError("%r was taken" % bad)


main()
