#!/usr/bin/env python3
"""Where the kernel's code lies. What a step executes is put side by side, in front of what it does not, in an object file or a program that nvcc has made.

    layout.py apply FILE PROFILE [MODEL]    moves the code of FILE's kernels, in place; proves first that nothing but places changes. For all models of the profile, or for MODEL alone
    layout.py learn FILE PROFILE CSV... [-- CSV...]
                                            makes PROFILE: FILE has the kernel in nvcc's order, CSV is a step of the model that it is named after, as ncu has executed it
                                            (profiles/layout.sh); behind --: a step of several rows, at a long context, or with a token drawn
    layout.py renew FILE PROFILE BIT=CSV... of PROFILE, which is one of FILE's kernel, what these steps execute, by their bits; the rest stays
    layout.py carry FILE PROFILE NEW        PROFILE, made of FILE's kernel, becomes one of NEW's, whose code is a little other: by the instructions that both have, in order. For a change of some
                                            lines, without a GPU
    layout.py show FILE PROFILE [MODEL]     what apply would do

Why: the SMs of a GPC share a cache of 128 KB of instructions, a layer executes more than that, and a jump to where nobody has been lately takes 300 clocks. ptxas leaves what
hardly ever runs where the source has it: between two things that always run. (profiles/NOTES.md, twenty-ninth session, has what moving it is worth.)

How: a kernel is one run of 16-byte instructions, behind its entry the functions that it calls. It is cut at the places where control may turn, into segments of what the same models
execute; first come those that all execute, so that a model finds its code in a few long runs, and last what other steps (of several rows, at a long context, with a token drawn) execute beside.
For one model alone what its step executes comes first, then what lies beside, then what only steps of other models execute. Segments are put in that order, and what relates to places is mended:
relative targets, return addresses (a call's is moved into a register before it), tables of branches, symbols, the lists of places in .nv.info. Where a segment went on into the next one and does
no longer, a branch is added; where a branch led to what is now behind it, it is turned round or left out. Line numbers (make LINEINFO=1) are those of the code before: profile a build without this
step (profiles/onestep).

The profile names functions by what they are and by a digest of their code, so it can be of an older build: a function that has changed since is moved as a whole, if it was executed at all.
A comment line "# Order of MODEL: FUNCTION..." in it says in what order that model's functions are to lie in a kernel for it alone; the others come behind, in the profile's order."""
import bisect
import collections
import csv
import difflib
import functools
import hashlib
import itertools
import operator
import os
import re
import struct
import sys

from sass import BRA, BRX, BSSY, CALL, COLLECTIVE, COPIES, EXIT, LEFT_OUT, MOST_STALL, NOP, RET, SPLIT, STALL, Refused, aimed, ends, field, idle, stall, stalled, target, turns_round

MOVES = (0x802, 0x424)  # MOV, IMAD.MOV of 32 bits
BRANCH = (0x0000000000007947, 0x000FEA0003800000)  # an unconditional one, five clocks, that waits for nothing
TURNED_STALL = MOST_STALL  # clocks, at least, that a branch which was turned round leaves to what now follows it, and used to follow a jump
EXECUTED = 256  # warps of all workers in a step: what fewer execute is not moved to the front
BESIDE = 16  # models from this bit on: their steps of several rows, or at a long context; only of what no other step executes, whose order they leave as it is
OTHERS = 31  # in a kernel for one model: steps of one row of the others, whose code lies behind all that
GAPS = (4, 8, 16, 32, 64, 128)  # so many instructions of another kind stay between two segments of one, a branch around them being one, too; more if there is no room for the branches
WIDER = 64  # times as many between two segments of what lies beside: who comes there has time, and branches saved there are room for those of one row


class Code:
    """A kernel's instructions; places are counted in instructions from here on."""

    def __init__(self, text, table, functions):
        self.n = len(text) // 16
        self.word = [struct.unpack_from("<QQ", text, 16 * i) for i in range(self.n)]
        self.op = [lo & 0xFFF for lo, _ in self.word]
        self.table = [a // 16 for (a,) in struct.iter_unpack("<I", table)]  # of BRX
        self.to = {i: target(*self.word[i], 16 * i) // 16 for i, op in enumerate(self.op) if op in SPLIT or op == BSSY}
        for i, to in self.to.items():
            if not 0 <= to < self.n or self.op[i] in (RET, BRX) and to:
                raise Refused("instruction %#x leads to %#x, outside of the kernel or not to its beginning" % (16 * i, 16 * to))
        moved = {}
        for i, op in enumerate(self.op):
            if op in MOVES:
                moved.setdefault(self.word[i][0] >> 32, []).append(i)
        self.back = {}  # a MOV: where the call that it is for returns to
        bounds = functions + [self.n]
        callers = collections.Counter(self.to[i] for i, op in enumerate(self.op) if op == CALL)
        for i in (i for i, op in enumerate(self.op) if op == CALL):
            if self.word[i][0] >> 12 & 15 != 7:
                raise Refused("call at %#x is conditional, which nothing here expects" % (16 * i))
            by = moved.get(16 * (i + 1), [])
            own, callee = bisect.bisect_right(bounds, i) - 1, bisect.bisect_right(bounds, self.to[i]) - 1
            # of several, some are numbers that happen to be the same: it is right before the call, or, where nobody else calls, in what is called
            within = [j for j in by if bounds[callee] <= j < bounds[callee + 1]] if callers[self.to[i]] == 1 else []
            if len(by) != 1 or not any(bounds[f] <= by[0] < bounds[f + 1] for f in (own, callee)):
                by = sorted({j for j in by if i - 8 <= j < i} | set(within))
            if len(by) > 1:  # and in a register that what is called returns by
                registers = self.returns_by(bounds[callee], bounds[callee + 1])
                by = [j for j in by if self.word[j][0] >> 16 & 255 in registers]
            if len(by) != 1 or by[0] in self.back:
                raise Refused("call at %#x: expected one instruction that says where to return to, found %d" % (16 * i, len(by)))
            self.back[by[0]] = i + 1
        if self.op[-1] != NOP:
            raise Refused("expected a NOP at the kernel's end")

    def returns_by(self, first, end):
        """The registers that a function's RETs go by, and what these were copied from shortly before."""
        by = set()
        for i in (i for i in range(first, end) if self.op[i] == RET):
            register = self.word[i][0] >> 24 & 255
            by.add(register)
            for j in range(max(first, i - 8), i):
                if self.op[j] in COPIES and field(self.word[j], 16, 8) == register:
                    by.add(field(self.word[j], COPIES[self.op[j]], 8))
        return by

    def digest(self, first, end):
        """Of a function's code, wherever it lies and whatever it calls lies."""
        h = hashlib.sha1()
        for i in range(first, end):
            lo, hi = self.word[i]
            if self.op[i] == CALL or self.op[i] in (RET, BRX):
                lo, hi = aimed(lo, hi, 0, 16)
            elif i in self.back:
                lo &= 0xFFFFFFFF
            h.update(struct.pack("<QQ", lo, hi))
        return h.hexdigest()[:16]


# ---- files ----------------------------------------------------------------------------------------------------------


class Elf:
    def __init__(self, data, base):
        self.data, self.base = data, base
        (at,), (size, n, names) = struct.unpack_from("<Q", data, base + 40), struct.unpack_from("<HHH", data, base + 58)
        self.section = {}
        raw = [struct.unpack_from("<IIQQQQ", data, base + at + i * size) for i in range(n)]
        for name, _, _, _, offset, length in raw:
            begin = base + raw[names][4] + name
            self.section[bytes(data[begin : data.index(b"\0", begin)]).decode()] = (base + offset, length)

    def bytes(self, name):
        offset, length = self.section[name]
        return bytes(self.data[offset : offset + length])

    def put(self, name, content):
        offset, length = self.section[name]
        assert len(content) == length
        self.data[offset : offset + length] = content


def cubins(data):
    """The sm_90a programs in a file, as places where they begin."""
    at = data.find(b"\x7fELF")
    while at >= 0:
        if struct.unpack_from("<H", data, at + 18)[0] == 190:
            yield at
        at = data.find(b"\x7fELF", at + 4)


class Kernel:
    """One that calls functions, in a cubin: whatever is smaller has no use for this."""

    def __init__(self, elf, name):
        self.elf, self.name = elf, name
        self.symbols, found, index = [], [], list(elf.section).index(".text." + name)  # symbols: of functions, (where in the file, value)
        names, (begin, length) = elf.section[".strtab"][0], elf.section[".symtab"]
        for at in range(begin, begin + length, 24):
            string, info, _, section, value, _ = struct.unpack_from("<IBBHQQ", elf.data, at)
            if info & 15 == 2 and section == index:
                text = bytes(elf.data[names + string : elf.data.index(b"\0", names + string)]).decode()
                text = re.sub(r"_ZN\d+_INTERNAL_[0-9a-f]+_\d+_\w+?_cu_[0-9a-f]{8}", "_Z", text.replace("$" + name + "$", ""))
                self.symbols.append((at, value))
                found.append((value // 16, text))
        found.sort()
        table = ".nv.constant2." + name
        self.code = Code(elf.bytes(".text." + name), elf.bytes(table) if table in elf.section else b"", [first for first, _ in found])
        ends_at = [first for first, _ in found[1:]] + [self.code.n]
        self.functions = [(first, end, text) for (first, text), end in zip(found, ends_at)]  # name without what the build puts into it


def kernels(data):
    for at in cubins(data):
        elf = Elf(data, at)
        for name in [s[6:] for s in elf.section if s.startswith(".text.")]:
            k = Kernel(elf, name)
            if len(k.functions) > 1:
                yield k


def resident(path):
    """The resident kernel of an object file or a program: the longest."""
    with open(path, "rb") as f:
        return max(kernels(bytearray(f.read())), key=lambda k: k.code.n)


# ---- the new order --------------------------------------------------------------------------------------------------


def of_one(who):
    """Of those who execute something, steps of one row."""
    return who & (1 << BESIDE) - 1


def owners(who):
    """Of those who execute something, by whom its place goes: steps of one row, if there are any."""
    return of_one(who) or who


def join(blocks, gap, kind_of, may_be_of):
    """Blocks between two of one kind become of that kind, if they are short and may."""
    j = 1
    while j < len(blocks):
        kind, following = kind_of(blocks[j - 1][2]), j
        while following < len(blocks) and kind_of(blocks[following][2]) != kind and blocks[following][1] - blocks[j][0] <= gap and may_be_of(blocks[following][2]):
            following += 1
        if kind and following < len(blocks) and kind_of(blocks[following][2]) == kind:
            for b in blocks[j:following]:
                b[2] = kind
        j = max(j + 1, following)


def segments(k, models, gap):
    """[first, end, models, function]: what lies together, in the order of now. models: of each instruction those that execute it, a bit each."""
    c, leads = k.code, [False] * (k.code.n + 1)
    for i, to in c.to.items():
        leads[to] = True
    for i in c.table:
        leads[i] = True
    whole = [False] * (c.n + 1)  # what a COLLECTIVE brackets is not cut
    for i, op in enumerate(c.op):
        if op == CALL:
            leads[i + 1] = True
        if op == COLLECTIVE:
            for j in range(i + 1, c.to[i] + 1):
                whole[j] = True
    result = []
    for f, (first, end, _) in enumerate(k.functions):
        blocks, begin = [], first
        for i in range(first + 1, end + 1):
            if i == end or (leads[i] or c.op[i - 1] in SPLIT or c.op[i - 1] == EXIT) and not whole[i]:
                blocks.append([begin, i, owners(functools.reduce(operator.or_, models[begin:i])), f])
                begin = i
        join(blocks, gap, of_one, lambda who: True)
        join(blocks, WIDER * gap, lambda who: 0 if of_one(who) else who, lambda who: not of_one(who))
        for b in blocks:
            if result and result[-1][2:] == b[2:]:
                result[-1][1] = b[1]
            else:
                result.append(b)
    return result


class Moved:
    """The kernel in another order: .word; .gap; .at, the new place of each instruction, or of what follows it if it is left out; .origin, the instruction of each new place, None: added;
    .later, the instructions that wait longer, since a branch or a NOP behind them is left out: what comes then may need their results, or the barriers that they set."""

    def __init__(self, k, models, rank=None, gap=GAPS[0]):
        c, rank = k.code, rank or [0] * len(k.functions)
        entry, *others = segments(k, models, gap)
        self.order = [entry] + sorted(others, key=lambda s: (not s[2], not of_one(s[2]), -bin(s[2]).count("1"), s[2], rank[s[3]]))
        self.gap, self.added, self.turned, self.dropped, self.later = gap, 0, 0, 0, set()
        out, at = [], [None] * c.n  # out: (word, the old place that it leads to or None, the old place that it comes from or None)
        for s, after in zip(self.order, self.order[1:] + [None]):
            follows = after[0] if after else None
            for i in range(s[0], s[1]):
                lo, hi = c.word[i]
                last, at[i] = i == s[1] - 1, len(out)
                around = last and turns_round(lo, hi) and c.to[i] == follows and s[1] not in (follows, c.n)
                parted = idle(lo, hi) and i > s[0] and c.op[i - 1] == BRA and c.word[i - 1][1] >> 27 & 1  # holds the place of what is done together by a warp that has parted: BRA.DIV leads there
                needless = last and c.op[i] == BRA and ends(lo, hi) and c.to[i] == follows and not hi >> 52 & 0x3F
                if (lo, hi) == LEFT_OUT:
                    self.dropped += 1
                elif (parted or needless) and out and out[-1][2] is not None and stall(out[-1][0][1]) + stall(hi) <= STALL >> 41:
                    self.dropped += 1
                    (low, high), to, origin = out[-1]
                    out[-1] = ((low, stalled(high, stall(high) + stall(hi))), to, origin)
                    self.later.add(origin)
                elif around:
                    self.turned += 1
                    out.append(((lo ^ 1 << 15, stalled(hi, max(TURNED_STALL, stall(hi)))), s[1], i))
                else:
                    out.append(((lo, hi), c.to.get(i), i))
            if s[1] not in (follows, c.n) and not ends(lo, hi) and c.op[i] != CALL and not around:
                self.added += 1
                out.append((BRANCH, s[1], None))
        if len(out) > c.n:
            raise Refused("%s: %d instructions more than there is room for" % (k.name, len(out) - c.n))
        self.at, self.word, self.origin = at, [], [i for _, _, i in out]
        for p, ((lo, hi), to, i) in enumerate(out):
            if to is not None:
                lo, hi = aimed(lo, hi, 16 * p, 0 if lo & 0xFFF in (RET, BRX) else 16 * at[to])
            elif i in c.back:
                lo = lo & 0xFFFFFFFF | 16 * at[c.back[i]] << 32
            self.word.append((lo, hi))
        self.word += [c.word[c.n - 1]] * (c.n - len(out))  # a NOP: nobody comes there
        self.table = [at[i] for i in c.table]


def moved(k, models, rank=None):
    """rank: of each function its place in the order, among those that the same models execute; None: by address."""
    for gap in GAPS:
        try:
            return Moved(k, models, rank, gap)
        except Refused as e:
            if gap == GAPS[-1]:
                raise e


def prove(k, m):
    """That the moved code does what the code did: every instruction stands somewhere, is the same but for its target, and leads to what it led to and is followed by what it was followed by,
    over added branches and past those that were left out at most, and no sooner: what ptxas leaves between a result and who needs it are clocks that it has counted."""
    c = k.code

    def comes_to(p, i):
        """Whether control at new place p comes to old instruction i, or to what that went on to if it was left out."""
        for _ in range(64):
            if m.origin[p] is None:
                p = target(*m.word[p], 16 * p) // 16
            elif m.origin[p] == i:
                return True
            elif m.origin[m.at[i]] == i:
                return False
            else:
                i = c.to[i] if c.op[i] == BRA else i + 1
        return False

    def clocks(i, j):
        """From instruction i on, over j, until what comes next that still stands, as it was. What trim.py has taken away takes none."""
        n = stall(c.word[i][1])
        while j < c.n and m.origin[m.at[j]] != j:
            n += stall(c.word[j][1]) if c.word[j] != LEFT_OUT else 0
            j = c.to[j] if c.op[j] == BRA else j + 1
        return n

    for p, i in enumerate(m.origin):
        if i is None and (m.word[p][0] & 0xFFF, ends(*m.word[p])) != (BRA, True):
            raise Refused("an instruction at %#x that nobody knows" % (16 * p))
    for i in range(c.n):
        p, (was, had) = m.at[i], c.word[i]
        if m.origin[p] != i:
            if not (idle(was, had) or c.op[i] == BRA and ends(was, had)):
                raise Refused("instruction %#x is missing" % (16 * i))
            continue
        lo, hi = m.word[p]
        turned = turns_round(was, had) and (lo ^ was) >> 15 & 1
        if not same(c, m, i):
            raise Refused("instruction %#x has changed" % (16 * i))
        to = target(lo, hi, 16 * p) // 16
        if c.op[i] in (RET, BRX) and to or i in c.to and c.op[i] not in (RET, BRX) and not comes_to(to, i + 1 if turned else c.to[i]):
            raise Refused("instruction %#x leads elsewhere" % (16 * i))
        if i in c.back and not comes_to((lo >> 32) // 16, c.back[i]):
            raise Refused("instruction %#x: a call returns elsewhere" % (16 * i))
        if ends(was, had) or c.op[i] == CALL or i + 1 == c.n:
            continue
        following = c.to[i] if turned else i + 1
        if not comes_to(p + 1, following):
            raise Refused("instruction %#x is followed by something else" % (16 * i))
        added = stall(BRANCH[1]) if m.origin[p + 1] is None else 0
        if stall(hi) < max(clocks(i, following) - added, TURNED_STALL if turned else 0):
            raise Refused("instruction %#x is followed too soon" % (16 * i))
    if not all(comes_to(p, i) for p, i in zip(m.table, c.table)):
        raise Refused("a table of branches leads elsewhere")
    if m.origin[0] != 0:
        raise Refused("the kernel begins elsewhere")


def same(c, m, i):
    """Whether old instruction i stands at its new place, but for its target, its sense and stall if it was turned round, a longer stall, and a return address."""
    (lo, hi), (was, had) = m.word[m.at[i]], c.word[i]
    if i in m.later and stall(hi) > stall(had):
        had = stalled(had, stall(hi))
    if turns_round(was, had) and (lo ^ was) >> 15 & 1:
        lo, hi, had = lo ^ 1 << 15, stalled(hi, 0), stalled(had, 0)
    if i in c.to:
        return aimed(lo, hi, 0, 16) == aimed(was, had, 0, 16)
    if i in c.back:
        lo, was = lo & 0xFFFFFFFF, was & 0xFFFFFFFF
    return (lo, hi) == (was, had)


# ---- what else knows of places ----------------------------------------------------------------------------------------

INFO_LISTS = {0x1C, 0x28}  # EXIT, COOP_GROUP: offsets
INFO_BRANCHES = 0x34  # INDIRECT_BRANCH: of each its offset, two halfwords, a count and so many targets


def mended_info(raw, at, code_bytes):
    """.nv.info of a kernel: tools and debuggers go by its lists."""
    out, p = bytearray(raw), 0

    def mend(offset):
        value = struct.unpack_from("<I", out, offset)[0]
        if value % 16 == 0 and value < code_bytes:
            struct.pack_into("<I", out, offset, 16 * at[value // 16])

    while p + 4 <= len(raw):
        form, attribute, size = struct.unpack_from("<BBH", raw, p)
        p += 4
        if form != 4:
            continue
        if attribute in INFO_LISTS:
            for q in range(p, p + size, 4):
                mend(q)
        if attribute == INFO_BRANCHES:
            q = p
            while q + 12 <= p + size:
                n = struct.unpack_from("<I", raw, q + 8)[0]
                for place in [q] + list(range(q + 12, q + 12 + 4 * n, 4)):
                    mend(place)
                q += 12 + 4 * n
        p += size
    return bytes(out)


def write(k, m):
    e = k.elf
    e.put(".text." + k.name, b"".join(struct.pack("<QQ", *w) for w in m.word))
    if m.table:
        e.put(".nv.constant2." + k.name, b"".join(struct.pack("<I", 16 * p) for p in m.table))
    info = ".nv.info." + k.name
    if info in e.section:
        e.put(info, mended_info(e.bytes(info), m.at, 16 * k.code.n))
    for at, value in k.symbols:
        struct.pack_into("<Q", e.data, at + 8, 16 * m.at[value // 16])


# ---- the profile ----------------------------------------------------------------------------------------------------

MODELS, ORDER = "# Models, from bit 0 on: ", "# Order of "
STEPS = "# And what other steps (of several rows, at a long context, with a token drawn) execute beside, from bit %d on: " % BESIDE


def comments(path, begin):
    """What is behind `begin` in the lines that begin so."""
    with open(path) as f:
        return [line[len(begin) :] for line in f if line.startswith(begin)]


def alone(who, bit):
    """Of those who execute something, who counts in a kernel for the model of this bit."""
    return who & 1 << bit or who >> BESIDE << BESIDE or (1 << OTHERS if who else 0)


def read_profile(path, model=None, order=None):
    """Of each function its digest and (first, end, models) of what is executed, in the order in which functions are to lie. model: as for a kernel that is for it alone; order: instead of the one
    that the profile has for it."""
    functions = {}
    with open(path) as f:
        for number, line in enumerate(f, 1):
            if line.startswith("#") or not line.strip():
                continue
            m = re.fullmatch(r"(\S+) ([0-9a-f]{16})((?: \d+-\d+:[0-9a-f]+)+)\s*", line)
            if not m:
                raise Refused("%s, line %d: expected a function, a digest and ranges FIRST-END:MODELS" % (path, number))
            functions[m[1]] = (m[2], [(int(a), int(b), int(c, 16)) for a, b, c in re.findall(r"(\d+)-(\d+):([0-9a-f]+)", m[3])])
    if model is None:
        return functions
    models = " ".join(comments(path, MODELS)).split()
    if model not in models:
        raise Refused("%s: no model %s, there are: %s" % (path, model, " ".join(models)))
    order = order or " ".join(comments(path, ORDER + model + ":")).split()
    for name in order:
        if name not in functions:
            raise Refused("%s: the order of %s has %s, which is none of the functions" % (path, model, name))
    bit, places = models.index(model), {name: functions[name] for name in [*order, *functions]}
    return {name: (digest, [(a, b, alone(who, bit)) for a, b, who in ranges]) for name, (digest, ranges) in places.items()}


def models_of(k, profile):
    """Who executes each instruction, each function's place in the profile, and how many functions are not those of the profile."""
    models, strange, order = [0] * k.code.n, 0, list(profile)
    rank = [order.index(name) if name in profile else len(order) for _, _, name in k.functions]
    for first, end, name in k.functions:
        digest, ranges = profile.get(name, (None, []))
        if digest == k.code.digest(first, end):
            for a, b, who in ranges:
                models[first + a : first + b] = [who] * (b - a)
        elif ranges:
            strange += 1
            models[first:end] = [functools.reduce(operator.or_, (who for _, _, who in ranges))] * (end - first)
    return models, rank, strange


def source_page(path, column):
    """A page of ncu --page source --csv that has this column: the names of its columns, and a row for each of a kernel's instructions, in order."""
    with open(path, newline="") as f:
        page = csv.reader(f)
        head = next((row for row in page if column in row), [])
        rows = [row for row in page if head and len(row) == len(head)]
    if not rows:
        raise Refused("%s: expected a source page of ncu with %s" % (path, column))
    return head, rows


def counts_of(path):
    """A kernel's instructions in order, each with how many warps executed it."""
    head, rows = source_page(path, "inst_executed")
    return [int(row[head.index("inst_executed")] or 0) for row in rows]


def carried(old, new, who):
    """Who executes a function's new instructions, by what they do alone, of who executed its old ones: what is new goes with what stands before it. And how much is new."""
    if old == new:
        return list(who), 0
    result = [None] * len(new)
    for i, j, n in difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
        result[j : j + n] = who[i : i + n]
    strange = result.count(None)
    for i, w in enumerate(result):
        if w is None:
            result[i] = result[i - 1] if i else 0
    return result, strange


def renamed(was, now):
    """Functions whose parameters are others than they were: the only one of its identifier, and of its template's arguments, before and after."""

    def sole(names):
        of = collections.defaultdict(list)
        for name in names:
            length = re.match(r"_Z(\d+)", name)
            end = length.end() + int(length[1]) if length else len(name)
            of[name[:end] + re.match(r"(?:I(?:L[a-z]\d+E)+E)?", name[end:])[0]].append(name)
        return {identifier: same[0] for identifier, same in of.items() if len(same) == 1}

    before, after = sole(was), sole(now)
    return {name: after[key] for key, name in before.items() if key in after and name != after[key]}


def carry(file, path, newer):
    old, new, profile = resident(file), resident(newer), read_profile(path)
    models, _, strange = models_of(old, profile)
    if strange:
        raise Refused("%s: expected a profile of %s, %d functions are not" % (path, file, strange))
    was, now = ({name: (first, end) for first, end, name in k.functions} for k in (old, new))
    lines, added, other = [], 0, renamed(was, now)
    for name in profile:
        newer_name = other.get(name, name)
        if name not in was or newer_name not in now:
            continue
        (a, b), (c, d) = was[name], now[newer_name]
        who, n = carried(old.code.op[a:b], new.code.op[c:d], models[a:b])
        added += n
        lines.append(line_of(newer_name, new.code.digest(c, d), who))
    head = ["#" + re.sub(r"\S+", lambda word: other.get(word[0], word[0]), line) for line in comments(path, "#")]
    with open(path, "w") as f:
        f.writelines(head + lines)
    print("  layout %s: %d of %d functions carried over, %d instructions of them new" % (path, len(lines), len(profile), added))


def line_of(name, digest, who):
    runs = [(len(list(g)), w) for w, g in itertools.groupby(who)]
    at = itertools.accumulate([n for n, _ in runs], initial=0)
    ranges = ["%d-%d:%x" % (a, a + n, w) for a, (n, w) in zip(at, runs) if w]
    return " ".join([name, digest] + ranges) + "\n" if ranges else ""


def lines_of(k, models, known):
    """A profile's lines: functions in the order of `known`, others behind."""
    for first, end, name in sorted(k.functions, key=lambda f: known.index(f[2]) if f[2] in known else len(known)):
        yield line_of(name, k.code.digest(first, end), models[first:end])


def marked(file, models, pages):
    """Who executes each instruction, now that the steps of some bits have these pages."""
    for bit, page in pages:
        counts = counts_of(page)
        if len(counts) != len(models):
            raise Refused("%s: expected %d instructions, the kernel of %s, found %d" % (page, len(models), file, len(counts)))
        models = [m & ~(1 << bit) | (n >= EXECUTED) << bit for m, n in zip(models, counts)]
    return [owners(m) for m in models]


def renew(file, path, pages):
    k, profile, head = resident(file), read_profile(path), comments(path, "#")
    models, _, strange = models_of(k, profile)
    steps = [len(" ".join(comments(path, line)).split()) for line in (MODELS, STEPS)]
    bits = {*range(steps[0]), *range(BESIDE, BESIDE + steps[1])}
    if strange:
        raise Refused("%s: expected a profile of %s, %d functions are not: carry it over first" % (path, file, strange))
    if not {bit for bit, _ in pages} <= bits:
        raise Refused("%s: expected bits of %s, found %s" % (path, sorted(bits), sorted(bit for bit, _ in pages)))
    models = marked(file, models, pages)
    with open(path, "w") as f:
        f.writelines("#" + line for line in head)
        f.writelines(lines_of(k, models, list(profile)))


def learn(file, path, pages, beside):
    """Functions that PROFILE has already keep their order there, as do those of one model: that in which a layer calls them is worth 1 % of a step in some models."""
    known, orders = (list(read_profile(path)), comments(path, ORDER)) if os.path.exists(path) else ([], [])
    k = resident(file)
    if len(pages) > BESIDE:
        raise Refused("expected at most %d steps of one row, found %d" % (BESIDE, len(pages)))
    if len(beside) > OTHERS - BESIDE:
        raise Refused("expected at most %d other steps, found %d" % (OTHERS - BESIDE, len(beside)))
    models = marked(file, [0] * k.code.n, [*enumerate(pages), *enumerate(beside, BESIDE)])

    def names(paths):
        return " ".join(os.path.basename(p).rsplit(".", 1)[0] for p in paths)

    with open(path, "w") as f:
        f.write("# What a step of one row executes of the kernel, by profiles/layout.sh: function, digest of its code, ranges of its instructions and by which models. megakernel/layout.py reads it.\n")
        f.write("%s%s\n" % (MODELS, names(pages)))
        if beside:
            f.write("%s%s\n" % (STEPS, names(beside)))
        f.writelines(ORDER + line for line in orders)
        f.writelines(lines_of(k, models, known))


def main(argv):
    if len(argv) < 4 or argv[1] not in ("apply", "carry", "learn", "renew", "show") or (len(argv) < 5 if argv[1] in ("carry", "learn", "renew") else len(argv) > 5):
        sys.stderr.write(__doc__.split("\n\n")[1] + "\n")
        return 2
    what, file, path = argv[1:4]
    try:
        if what == "learn":
            rows = argv.index("--") if "--" in argv else len(argv)
            learn(file, path, argv[4:rows], argv[rows + 1 :])
            return 0
        if what == "renew":
            found = [re.fullmatch(r"(\d+)=(.+)", arg) for arg in argv[4:]]
            if None in found:
                raise Refused("%s: expected BIT=CSV" % argv[4 + found.index(None)])
            renew(file, path, [(int(m[1]), m[2]) for m in found])
            return 0
        if what == "carry":
            carry(file, path, argv[4])
            return 0
        model = argv[4] if len(argv) > 4 else None
        profile = read_profile(path, model)
        data = bytearray(open(file, "rb").read())
        found = False
        for k in kernels(data):
            if not any(name in profile for _, _, name in k.functions):
                continue
            found = True
            models, rank, strange = models_of(k, profile)
            m = moved(k, models, rank)
            prove(k, m)
            hot = sum(s[1] - s[0] for s in m.order if s[2])
            print("  layout %s%s: %d of %d KB to the front, %d branches added, %d turned round, %d instructions left out%s" % (
                k.name, " for " + model if model else "", hot // 64, k.code.n // 64, m.added, m.turned, m.dropped, ", %d functions are not those of the profile" % strange if strange else ""))
            write(k, m)
        if not found:
            raise Refused("%s: no kernel that %s knows (nvcc must not have compressed it)" % (file, path))
        if what == "apply":
            with open(file, "r+b") as f:
                f.write(data)
    except (Refused, OSError) as e:
        sys.stderr.write("layout: %s\n" % e)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
