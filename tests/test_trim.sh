#!/bin/bash
# megakernel/trim.py: what it finds in code of a few instructions, that it is what was built, and that its proof can fail. No GPU: tests/gpu runs what comes out.
PYTHONPATH=megakernel python3 - "$BUILD" <<'PY'
import os
import sys
from types import SimpleNamespace

import layout
import sass
import trim
from sass import BRA, LEFT_OUT, Refused, field, opcode, placed, stall, stalled, waits

failed = []


def check(name, right):
    print(("ok - trim: " if right else "not ok - trim: ") + name)
    failed.extend([] if right else [name])


# Instructions as nvcc makes them.
def clocks(w, n, wait=0):
    return w[0], stalled(w[1], n) | wait << 52


def when(p, w):
    return w[0] & ~0xF000 | p << 12, w[1]


def uldc(u):
    return 0x0000820000007AB9 | u << 16, 0x000FE20000000A00


def at_32(w, place):
    """The same of 32 bits, of c[0x0][place]."""
    return w[0] & 0xFFFFFFFF | place << 38, w[1] & ~0xE00 | 0x800


def ldc(r, at=0x8200):
    return at << 32 | 0xFF007B82 | r << 16, 0x000EA20000000A00  # it announces by scoreboard 2


def r2ur(u, r, n=2):
    return clocks((0x72CA | u << 16 | r << 24, 0x000FE400000E0000), n)


def ldg(r, u, address):
    return 0x7981 | r << 16 | address << 24 | u << 32, 0x000F62000C1EFD00


def mov(r, n=1):
    return clocks((0x000000FF00007224 | 0xFF000000 | r << 16, 0x000FE400078E00FF), n)


def copy(r, of):
    return 0x000000FFFF007224 | r << 16, 0x000FE200078E0000 | of


def wide(r, n):
    """IMAD.WIDE.U32 r, R4, 16, r."""
    return clocks((0x0000001004007825 | r << 16, 0x000FE200078E0000 | r), n)


def isetp(p, n):
    """ISETP.NE.AND p, PT, R44, RZ, PT."""
    return clocks((0x000000FF2C00720C, 0x000FE20003F05070 & ~(7 << 17) | p << 17), n)


def sts(u):
    return 0x012820FF00007988, 0x000FE80008000800 | u


def redux(u, r, what=0, n=4):
    """REDUX u, r, which announces by scoreboard 1."""
    return clocks((0x73C4 | u << 16 | r << 24, 0x000E620000000000 | what), n)


def unit(u, r, n=5):
    """IMAD.U32 r, RZ, RZ, u."""
    return clocks((0x00000000FF007E24 | r << 16 | u << 32, 0x000FE4000F8E00FF), n)


idle = (0x0000000000007946, 0x000FEA0003800000)  # YIELD, five clocks
ret, end, nop = (0x0000000010007950, 0x000FEA0003C3FFFF), (0x000000000000794D, 0x000FEA0003800000), (0x0000000000007918, 0x000FC00000000000)


def kernel(*function, entry=(uldc(26),), to={}):
    """One whose entry is `entry` and whose only function is `function`; to: where its branches lead, in instructions of it."""
    n = len(entry) + 1
    word = [*entry, end, *function, ret, nop]
    c = SimpleNamespace(word=word, op=[opcode(w) for w in word], n=len(word), table=[], to={n + i: n + t for i, t in to.items()})
    return SimpleNamespace(code=c, functions=[(0, n, "entry"), (n, len(word), "function")], elf=None, name="kernel")


def edited(*function, **how):
    e = trim.Edit(kernel(*function, **how))
    n = e.k.functions[1][0]
    return e, {i - n for i in e.gone}, lambda i: e.now(n + i)


far = [mov(9, 11)] * 6  # what is before a function may need as long
first = [ldc(6), *far]
look = [*first, r2ur(4, 6), r2ur(5, 7, 13), ldg(8, 4, 18)]
e, gone, now = edited(*look)
check("a load names the entry's pair, its own is not made any more", e.named == 1 and gone == {7, 8} and field(now(9), 32, 6) == 26 and field(now(9), 0, 32) == field(look[9], 0, 32))
e, gone, now = edited(*first, clocks(r2ur(4, 6), 2, 4), *look[8:])
check("which waits for what that would have waited for", gone == {7, 8} and waits(now(9)) == 4)
e, gone, now = edited(*first, *(when(0, w) for w in look[7:]))
check("under a predicate as well", e.named == 1 and gone == {7, 8})
e, gone, now = edited(look[0], *look[7:])
check("what is before a function may need longer: nothing comes sooner", e.named == 1 and gone and sum(stall(now(i)[1]) for i in range(3) if i not in gone) == 16)

check("another constant is none", edited(ldc(6, 0x8400), *look[1:])[0].named == 0)
check("nor a register that was written meanwhile", edited(*first, mov(7), *look[7:])[0].named == 0)
check("nor one that has it on one of two ways", edited(isetp(0, 13), when(0, (BRA | 7 << 12, 0x000FEA0003800000)), *look, to={1: 3})[0].named == 0)
check("a copy is", edited(*first, copy(20, 6), r2ur(4, 20), *look[8:])[0].named == 1)
e, gone, now = edited(*look, sts(4))
check("a register that somebody else reads is still made", e.named == 1 and gone == {8})
e, gone, now = edited(*look, at_32(uldc(4), 0x20), sts(5))
check("and that of a constant of 32 bits is one register", e.named == 1 and gone == {7})
e, gone, now = edited(*far, ldc(6), r2ur(4, 6, 11), clocks(r2ur(5, 7), 13, 4), ldg(8, 4, 18))
check("what is waited for instead of an R2UR comes no sooner behind what it waits for", e.named == 1 and waits(now(9)) == 4 and sum(stall(now(i)[1]) for i in (6, 7, 8) if i not in gone) >= 13)
check("where the entry has half of it nothing changes", not trim.Edit(kernel(*look, entry=(at_32(uldc(26), 0x208),))).word)
check("where a kernel's entry has no descriptor nothing changes", not trim.Edit(kernel(*look, entry=(mov(9),))).word)
check("nor where it is behind a branch", not trim.Edit(kernel(*look, entry=((BRA, 0x000FEA0003800000 ^ 0), uldc(26)), to={-3: -1})).word)
check("nor where somebody writes its pair", not trim.Edit(kernel(*look, r2ur(27, 9))).word)
check("nor where there is an instruction that nobody knows", not trim.Edit(kernel(*look, (0x7ABC, 0x000FE20000000000))).word)

# clocks
e, gone, now = edited(*first, isetp(5, 13), when(5, r2ur(4, 6)), when(5, r2ur(5, 7, 13)), when(5, ldg(8, 4, 18)), isetp(5, 13))
check("a load comes 13 clocks behind its predicate, not 28", gone == {8, 9} and stall(now(7)[1]) == 13)
e, gone, now = edited(*first, wide(18, 2), r2ur(4, 6), mov(10), r2ur(5, 7, 1), mov(11, 12), ldg(8, 4, 18))
own = stall(now(7)[1]) + stall(now(9)[1]) + stall(now(11)[1])
check("and its address at least as long before it as arithmetic takes: %d" % own, gone == {8, 10} and 5 <= own < 13)

fields = [ldc(6), r2ur(4, 6), ldg(8, 4, 18), sts(4), isetp(5, 13), wide(18, 2)]
check("registers are read where they stand", [sass.writes_uniform(w) for w in fields] == [set(), {4}, set(), set(), set(), set()] and [sass.reads_uniform(w) for w in fields] == [set(), set(), {4, 5}, {4}, set(), set()]
      and [set(sass.writes(w)) for w in fields] == [{6, 7}, set(), {8, 9, 10, 11}, set(), set(), {18, 19}] and sass.writes_predicates(isetp(5, 13)) == {5} and 5 in sass.reads_predicates(when(5, look[3])))

# YIELD, and what says to all lanes what all have
e, gone, now = edited(*far, mov(10, 2), idle, copy(11, 12), mov(13))
check("a YIELD is left out", gone == {7} and not e.named and stall(now(6)[1]) == 2)
e, gone, now = edited(*far, mov(10, 2), idle, copy(11, 10), mov(13))
check("and who needs what stands before it comes no sooner than it may", gone == {7} and stall(now(6)[1]) >= 5)
e, gone, now = edited(*far, mov(10, 2), clocks(idle, 5, 4), copy(11, 12), mov(13))
check("nor before what that waited for", gone == {7} and waits(now(8)) == 4)
e, gone, now = edited(*far, isetp(0, 13), when(0, (BRA | 7 << 12, 0x000FEA0003800000)), idle, mov(10, 2), to={7: 8})
check("where nothing may come sooner it is a NOP of its clocks", not gone and opcode(now(8)) == sass.NOP and stall(now(8)[1]) == 5)
e, gone, now = edited(*far, when(0, idle), mov(10))
check("under a predicate it stays", not gone and opcode(now(6)) == sass.YIELD)
e, gone, now = edited(*far, clocks(redux(4, 10), 4, 2), clocks(unit(4, 11), 5, 2), mov(13))
check("a REDUX of the bits that all lanes have is a move of one lane's, 13 clocks before who needs it, and waits for what it did",
      now(6)[0] == r2ur(4, 10)[0] and now(6)[1] & (1 << 41) - 1 == 0x0E0000 and stall(now(6)[1]) == 13 and waits(now(6)) == 2 and sass.barriers(now(6)) == (7, 7) and now(7)[0] == unit(4, 11)[0])
check("of the greatest it is none", opcode(edited(*far, redux(4, 10, 0x14000), unit(4, 11))[2](6)) == sass.REDUX)

# the kernel that was built
nvcc, plain = (os.path.join(sys.argv[1], d, "megakernel/kernel.cu.o") for d in ("nvcc", "plain"))
if not os.path.exists(nvcc):
    print("ok - trim: the kernel that was built # SKIP built without nvcc")
    sys.exit(bool(failed))
k, built = layout.resident(nvcc), layout.resident(plain)
e = trim.Edit(k)
out = [LEFT_OUT if i in e.gone else e.now(i) for i in range(k.code.n)]
moved_out = e.gone - e.idle
check("of the kernel that was built %d loads and stores name another pair, %d R2UR are left out, %d stay" % (e.named, len(moved_out), e.kept), e.named > 1000 and len(moved_out) > 5 * e.kept)
check("no YIELD stays, most are left out, and no REDUX of what all lanes have", sass.YIELD not in built.code.op and len(e.gone & e.idle) > len(e.idle - e.gone)
      and not any(opcode(w) == sass.REDUX and field(w, 64, 41) == sass.REDUX_AND for w in built.code.word) and built.code.op.count(sass.REDUX) < k.code.op.count(sass.REDUX))
check("and it is what was built", out == built.code.word)
check("nothing else is left out, and nothing was there that looks like it", all(k.code.op[i] in (sass.R2UR, sass.YIELD) for i in e.gone) and LEFT_OUT not in k.code.word)
# a helper that calls what needs more registers than helpers keep makes ptxas ignore setmaxnreg, in a line of information; then compute warps have 128 and spill
check("warps take and leave registers: three setmaxnreg", built.code.op.count(sass.USETMAXREG) == 3)
check("layout.py leaves all of them out", not set(layout.moved(built, [0] * k.code.n).word) & {LEFT_OUT})


# a proof that cannot fail proves nothing
def refuses(prove, *args):
    try:
        prove(*args)
    except Refused as why:
        print("# " + str(why))
        return True
    return False


def spoiled(name, spoil, of):
    """Spoils an instruction of that kind, in a block out of which something was left."""
    called = trim.entries(k.code)
    for first, last, _ in k.functions[1:]:
        parts = trim.blocks(k.code, called, first, last)
        for b in parts:
            gone = {i for i in e.gone if b.first <= i < b.end}
            one = next((i for i in range(b.first, b.end) if gone and i not in gone and of(i)), None)
            if one is not None:
                bad = SimpleNamespace(c=k.code, pair=e.pair, now=lambda j: spoil(e.now(j)) if j == one else e.now(j))
                tail = trim.waited_for(k.code, parts)[b]
                return check("found: " + name, not refuses(trim.prove_block, e, b, gone, tail) and refuses(trim.prove_block, bad, b, gone, tail))
    check("found: " + name, False)


moved_up = {i for i in e.word if waits(e.now(i)) != waits(k.code.word[i])}
spoiled("an instruction that has become another", lambda w: placed(w, 16, 1, 1 - field(w, 16, 1)), lambda i: i in e.word)
spoiled("an instruction that waits for less", lambda w: placed(w, 116, 6, 0), lambda i: waits(k.code.word[i]))
spoiled("one that does not wait for what it has taken over", lambda w: placed(w, 116, 6, 0), lambda i: i in moved_up)
spoiled("a load that names a third pair", lambda w: placed(w, 32, 6, 40), lambda i: k.code.op[i] == 0x981 and i in e.word)
spoiled("clocks that are missing", lambda w: placed(w, 105, 4, 4), lambda i: stall(e.now(i)[1]) > 8 and k.code.op[i] in (0x20C, 0x80C))
spoiled("a long stall without its bit", lambda w: placed(w, 109, 1, 1), lambda i: stall(e.now(i)[1]) > 11 and k.code.op[i] in (0x20C, 0x80C))
e, gone, now = edited(*look, sts(4))
e.gone.add(e.k.functions[1][0] + 7)
parts = trim.blocks(e.c, trim.entries(e.c), *e.k.functions[1][:2])
check("found: an R2UR left out whose register is read", refuses(trim.prove, e, parts, trim.waited_for(e.c, parts)))
sys.exit(bool(failed))
PY
