#!/usr/bin/env python3
"""What ptxas puts into the kernel that need not be executed, or has something cheaper in its place.

    trim.py FILE    changes the kernels in FILE, an object of nvcc's, in place

The memory descriptor. sm_90's global loads and stores name a pair of uniform registers with a descriptor, which is the same for all of them and a constant of the launch. ptxas loads it into such a
pair at the kernel's entry and keeps it there over all calls, for the entry has loads of its own. A function that is called is compiled without knowing that: it loads the constant into ordinary
registers, and moves it from there in front of nearly every load (R2UR, twice, under the load's own predicate), which the load then waits for, 13 clocks: 3 to 4 % of all instructions that a step
executes, and in a look at packets, for which everybody waits, half of it (profiles/NOTES.md, forty-ninth session). The functions' loads and stores name the entry's pair instead, and those R2UR whose
registers nobody reads any more are left out.

YIELD. ptxas puts it into loops and functions: lanes of a warp that have parted take turns there, so that one that waits lets go on what it waits for. No lane here waits for what another of its
warp has yet to do, on a way of its own (whoever writes a wait sees to that), and a warp that is together takes 45 clocks for each: 5 % of a compute warp's time, of a loop of products a sixteenth
(sixty-seventh session).

REDUX of the bits that all lanes have: mk_uniform's, whose lanes all have the same word, so that a move of any lane's is the same (R2UR), and is there after 13 clocks instead of 45.

How: what is left out becomes a NOP of one clock, which layout.py leaves out, and what stood there for its sake alone stands closer to what is before it. For that
    what a load or store has named holds the descriptor on every way to it, out of that constant, by copies at most;
    an R2UR goes if no way from it leads to what may read its register;
    two instructions come no closer than they were, unless they are farther apart than the second may have to wait for the first one's results (sass.py's needs): within a block of instructions and
    over its borders. Results that are announced by a barrier are waited for there; what is left out announces nothing, and what it waited for is waited for by what follows it. A YIELD that
    cannot go so is a NOP of as many clocks.
In a kernel with an opcode that sass.py does not know YIELD and REDUX alone are replaced, in their places. prove() goes over what came out once more."""
import collections
import copy
import itertools
import struct
import sys

import layout
from sass import (
    BRA, BRX, BSSY, BSYNC, CALL, COLLECTIVE, CONSTANT, COPIES, EXIT, LDC, LEFT_OUT, LONG, MIXED, MOST_STALL, NAMES, NOP, PLAIN, PT, R2UR, REDUX, REDUX_AND, RZ, SLOW, SOON, SPLIT, ULDC, UNIFORM, URZ, WRITES_UNIFORM, YIELD, Refused, always,
    barriers, ends, field, known, latency, moves_up, needs, opcode, placed, reads_uniform, stall, stalled, waits, writes, writes_uniform)


def home(k):
    """The pair of uniform registers that a kernel's entry puts the descriptor into before anything else can be executed, and that nobody writes again; or None."""
    c, end = k.code, k.functions[0][1]
    first = next((i for i in range(end) if c.op[i] == ULDC and c.word[i][0] >> 32 == CONSTANT and always(c.word[i])), None)
    if first is None or any(c.op[i] in SPLIT and not (c.op[i] == BRA and i < c.to[i] <= first) for i in range(first)):
        return None
    pair = writes_uniform(c.word[first])
    return min(pair) if len(pair) == 2 and not any(writes_uniform(w) & pair for i, w in enumerate(c.word) if i != first and c.op[i] in WRITES_UNIFORM) else None


class Block:
    """.entered: from elsewhere, by a call."""

    def __init__(self, first, end, entered):
        self.first, self.end, self.entered, self.to, self.by = first, end, entered, [], []


def cheaper(w):
    """What stands in an instruction's place: for a YIELD a NOP of its clocks, which waits for what that does; for what says to all lanes what all have (mk_uniform) a move of any lane's."""
    if opcode(w) == YIELD and always(w) and barriers(w) == (7, 7):
        return NOP | PT << 12, w[1] >> 41 << 41
    if opcode(w) == REDUX and always(w) and field(w, 64, 41) == REDUX_AND:
        return R2UR | PT << 12 | field(w, 16, 6) << 16 | field(w, 24, 8) << 24, stalled(0x0E0000 | 63 << 46 | waits(w) << 52, max(SOON, stall(w[1])))
    return w


def cheapened(c):
    """The same code with all of them replaced."""
    new = copy.copy(c)
    new.word = [cheaper(w) for w in c.word]
    new.op = [opcode(w) for w in new.word]
    return new


def entries(c):
    """Where calls lead."""
    return {t for i, t in c.to.items() if c.op[i] == CALL}


def blocks(c, called, first, end):
    """A function's instructions in blocks that are entered at their first one only, who follows whom. called: entries(c)."""
    leads = {first, *called, *c.table, *(c.to[i] for i in range(first, end) if i in c.to)}
    leads |= {i + 1 for i in range(first, end) if c.op[i] in SPLIT or c.op[i] in (EXIT, BSYNC)}
    at = sorted(i for i in leads if first <= i < end)
    found = {a: Block(a, b, a == first or a in called) for a, b in zip(at, at[1:] + [end])}
    behind = {c.to[i] for i in range(first, end) if c.op[i] == BSSY}
    for b in found.values():
        last = b.end - 1
        if c.op[last] == BSYNC and b.end not in behind:
            raise Refused("instruction %#x: a BSYNC that does not go on behind it" % (16 * last))
        if c.op[last] in (BRA, COLLECTIVE) and c.to[last] not in found:
            raise Refused("instruction %#x leads out of its function" % (16 * last))
        if not ends(*c.word[last]) and b.end < end:
            b.to.append(found[b.end])
        if c.op[last] in (BRA, COLLECTIVE):
            b.to.append(found[c.to[last]])
        if c.op[last] == BRX:
            b.to += [found[t] for t in c.table if t in found]
        for f in b.to:
            f.by.append(b)
    return list(found.values())


def settle(todo, of, next_of):
    """Calls of(block) until it changes nothing any more; where it does, next_of(block) are to be looked at again."""
    todo = collections.deque(todo)
    while todo:
        b = todo.popleft()
        if of(b):
            todo.extend(f for f in next_of(b) if f not in todo)


LOW, HIGH, UNIFORM_LOW, UNIFORM_HIGH = 0, 256, 512, 576  # what holds the descriptor's halves, as one number


def holders(c, parts):
    """Of each instruction that may use the descriptor: what holds it there. Ordinary registers and uniform ones."""
    sources = {field(c.word[i], 24, 8) for b in parts for i in range(b.first, b.end) if c.op[i] == R2UR}

    def after(i, held):
        w, op = c.word[i], c.op[i]
        if op == CALL:
            return {h for h in held if h < UNIFORM_LOW}
        if op == R2UR:  # whatever its predicate: whoever uses the register has it from here or from one before
            u, r = field(w, 16, 6), field(w, 24, 8)
            held = held - {UNIFORM_LOW + u, UNIFORM_HIGH + u}
            return held | {u + half for half, of in ((UNIFORM_LOW, LOW), (UNIFORM_HIGH, HIGH)) if r + of in held and moves_up(w)}
        gone = {r + half for r in writes(w) for half in (LOW, HIGH)} | {u + half for u in writes_uniform(w) for half in (UNIFORM_LOW, UNIFORM_HIGH)}
        d = field(w, 16, 8)
        if op == LDC and w[0] >> 32 == CONSTANT and field(w, 24, 8) == RZ and field(w, 73, 3) == 5 and always(w):
            return held - gone | {d + LOW, d + 1 + HIGH}
        if op in COPIES and always(w) and (op == 0x202 or field(w, 24, 8) == field(w, 32, 8) == RZ):
            return held - gone | {d + half for half in (LOW, HIGH) if field(w, COPIES[op], 8) + half in held}
        return held - gone

    def matters(i):
        op, w = c.op[i], c.word[i]
        return op in (R2UR, LDC, CALL) or op in COPIES or op in WRITES_UNIFORM or any(r in sources for r in writes(w))

    changing = {b: [i for i in range(b.first, b.end) if matters(i)] for b in parts}
    held = {b: set() if b.entered else None for b in parts}

    def pass_on(b):
        out, changed = held[b], False
        for i in changing[b]:
            out = after(i, out)
        for f in b.to:
            new = set(out) if held[f] is None else held[f] & out
            changed |= new != held[f]
            held[f] = new
        return changed

    settle([b for b in parts if b.entered], pass_on, lambda b: b.to)
    at = {}
    for b in parts:
        now = held[b]
        if now is None:
            continue  # nobody comes there
        marks = set(changing[b])
        for i in range(b.first, b.end):
            if c.op[i] in NAMES:
                at[i] = now
            if i in marks:
                now = after(i, now)
    return at


def alive(c, parts, word):
    """Of each R2UR the uniform registers that may be read behind it."""
    marks = {b: [(i, reads_uniform(word(i)), writes_uniform(word(i)) if always(word(i)) else set()) for i in range(b.first, b.end)
                 if c.op[i] in UNIFORM or c.op[i] in MIXED] for b in parts}
    begin = {b: set() for b in parts}

    def before(b, note):
        now = set().union(*(begin[f] for f in b.to))
        for i, r, w in reversed(marks[b]):
            if c.op[i] == R2UR:
                note[i] = now
            now = now - w | r
        return now

    def pass_on(b):
        was, begin[b] = begin[b], before(b, {})
        return begin[b] != was

    settle(reversed(parts), pass_on, lambda b: b.by)
    note = {}
    for b in parts:
        before(b, note)
    return note


def waited_for(c, parts):
    """Of each block how long what stands before it may still take, in clocks from its beginning."""
    tail = {b: SLOW if b.entered else SOON for b in parts}
    length = {b: sum(stall(c.word[i][1]) for i in range(b.first, b.end)) for b in parts}

    def pass_on(b):
        out, t, changed = max(SOON, tail[b] - length[b]), 0, False
        for i in range(b.end - 1, b.first - 1, -1):
            t += stall(c.word[i][1])
            if t >= SLOW - SOON:
                break
            out = max(out, latency(c.word[i]) - t)
        if c.op[b.end - 1] == CALL:
            out = SLOW
        for f in b.to:
            changed |= out > tail[f]
            tail[f] = max(tail[f], out)
        return changed

    settle(parts, pass_on, lambda b: b.to)
    return tail


class Edit:
    """What becomes of a kernel's instructions: .word, those that are others; .gone, those that are left out; .idle, those that were a YIELD; .named, how many name another pair; .kept, how many R2UR stay in called
    functions; .strange, opcodes that are not in sass.py's tables: where there are any, nothing is left out. .c is the code with what is cheaper in its place."""

    def __init__(self, k):
        self.k, self.c, self.word, self.gone, self.named, self.kept = k, cheapened(k.code), {}, set(), 0, 0
        self.idle = {i for i, op in enumerate(k.code.op) if op == YIELD != self.c.op[i]}
        self.pair, self.strange = home(k), sorted({opcode(w) for w in k.code.word if not known(w)})
        if self.strange:
            return
        called = entries(self.c)
        for n, (first, end, _) in enumerate(k.functions):
            if any(self.c.op[i] == R2UR or i in self.idle for i in range(first, end)):
                self.function(blocks(self.c, called, first, end), n > 0 and self.pair is not None)
        self.kept = sum(op == R2UR and i not in self.gone for i, op in enumerate(k.code.op) if i >= k.functions[0][1])

    def write(self):
        words = {**self.word, **dict.fromkeys(self.gone, LEFT_OUT)}
        self.k.elf.put(".text." + self.k.name, b"".join(struct.pack("<QQ", *words.get(i, w)) for i, w in enumerate(self.c.word)))

    def now(self, i):
        return self.word.get(i, self.c.word[i])

    def function(self, parts, renames):
        """renames: its loads and stores are to name the entry's pair."""
        c, closer, dead = self.c, set(), self.idle & {i for b in parts for i in range(b.first, b.end)}
        if renames:
            for i, held in holders(c, parts).items():
                u = field(c.word[i], NAMES[c.op[i]], 6)
                if {UNIFORM_LOW + u, UNIFORM_HIGH + u + 1} <= held:
                    self.word[i] = placed(c.word[i], NAMES[c.op[i]], 6, self.pair)
                    closer.add(i)
            self.named += len(closer)
            dead |= {i for i, live in alive(c, parts, self.now).items() if moves_up(c.word[i]) and barriers(c.word[i]) == (7, 7) and field(c.word[i], 16, 6) not in live}
        tail = waited_for(c, parts)
        for b in parts:
            out = {i for i in dead if b.first <= i < b.end}
            while out:
                clocks = self.clocks(b, out, closer, tail[b])
                if clocks is not None:
                    self.take(b, out, clocks)
                    self.gone |= out
                    break
        prove(self, parts, tail)

    def clocks(self, b, out, closer, tail):
        """When the block's other instructions are issued, the earliest that is allowed, and its end; or None: they would have to wait longer than an instruction can say, or for what nobody behind them waits for, so that one less is in `out`."""
        c, old, new, before = self.c, issued(self.c.word, b), {}, None
        handed = handed_on(c, b, out)
        if b.end in handed:
            out.discard(max(j for j in out if waits(c.word[j])))
            return None
        for i in itertools.chain(range(b.first, b.end), [b.end]):
            if i in out:
                continue
            w = (self.now(i)[0], self.now(i)[1] | handed.get(i, 0) << 52) if i < b.end else None
            at = min(old[i], tail)
            if before is not None:
                own = stall(c.word[before][1])
                at = max(at, new[before] + (min(own, 2) if i in closer and c.op[before] in PLAIN else own))
            for x in reversed(new):
                if at - new[x] >= SLOW:
                    break
                if at - new[x] >= latency(c.word[x]):
                    continue
                at = max(at, new[x] + min(old[i] - old[x], needs(c.word[x], w) if w else latency(c.word[x])))
            if at - new[before] > 15 if before is not None else at > 0 or i == b.end:
                here = [j for j in out if j < i and (before is None or j > before)] or [j for j in out if j < i]
                out.discard(b.first if before is None else max(here, key=lambda j: (stall(c.word[j][1]), j)))
                return None
            new[i], before = at, i
        return new

    def take(self, b, out, new):
        """The block with these instructions left out and the others issued at these clocks."""
        kept, handed = [i for i in new if i != b.end], handed_on(self.c, b, out)
        for i, after in zip(kept, kept[1:] + [b.end]):
            (lo, hi), n = self.now(i), new[after] - new[i]
            self.word[i] = (lo, (stalled(hi, n) if n != stall(hi) else hi) | handed.get(i, 0) << 52)


def handed_on(c, b, out):
    """What each instruction behind some that are left out waits for in their place; b.end: what nobody would wait for."""
    wait, handed = 0, {}
    for i in range(b.first, b.end + 1):
        if i in out:
            wait |= waits(c.word[i])
        elif wait:
            handed[i], wait = wait, 0
    return handed


def issued(word, b, out=()):
    """When a block's instructions are issued, and its end, in clocks from its beginning, if none of them waits."""
    clocks = [0 if i in out else stall(word[i][1]) for i in range(b.first, b.end)]
    return dict(zip(range(b.first, b.end + 1), itertools.accumulate(clocks, initial=0)))


def prove(e, parts, tail):
    """That in a function nobody reads what is made no more, that no two instructions have come too close, of a block or over its borders, and that nothing else has changed."""
    c, read = e.c, alive(e.c, parts, lambda i: LEFT_OUT if i in e.gone else e.now(i))
    for b in parts:
        out = {i for i in range(b.first, b.end) if i in e.gone}
        for i in out:
            if i not in e.idle and (not moves_up(c.word[i]) or barriers(c.word[i]) != (7, 7) or field(c.word[i], 16, 6) in read[i]):
                raise Refused("instruction %#x is needed" % (16 * i))
        if out or any(i in e.word for i in range(b.first, b.end)):
            prove_block(e, b, out, tail[b])


def prove_block(e, b, out, tail):
    c = e.c
    old, new = issued(c.word, b), issued({i: e.now(i) for i in range(b.first, b.end)}, b, out)
    kept = [i for i in range(b.first, b.end) if i not in out]
    wait = 0
    for i in range(b.first, b.end):
        wait |= waits(c.word[i])
        if i not in out:
            if waits(e.now(i)) != wait:
                raise Refused("instruction %#x waits for something else" % (16 * i))
            wait = 0
    for n, x in enumerate(kept):
        w, was = e.now(x), c.word[x]
        both, had = w[0] | w[1] << 64, was[0] | was[1] << 64
        at = NAMES.get(c.op[x])
        may = 31 << 105 | 63 << 116 | (URZ << at if at and field(w, at, 6) == e.pair else 0)
        if (both ^ had) & ~may:
            raise Refused("instruction %#x has become another" % (16 * x))
        if stall(w[1]) > MOST_STALL and w[1] & LONG and not (stall(was[1]) > MOST_STALL and was[1] & LONG):
            raise Refused("instruction %#x: a stall that is none" % (16 * x))
        if new[x] < min(old[x], tail) or new[b.end] - new[x] < min(old[b.end] - old[x], latency(was)):
            raise Refused("instruction %#x has come too close to its block's borders" % (16 * x))
        for y in itertools.takewhile(lambda y: new[y] - new[x] < latency(was), kept[n + 1 :]):
            if new[y] - new[x] < min(old[y] - old[x], needs(w, e.now(y))):
                raise Refused("instruction %#x has come too close to %#x" % (16 * y, 16 * x))
    if wait:
        raise Refused("instruction %#x: what it waits for nobody behind it in its block would" % (16 * b.end - 16))


def main(argv):
    if len(argv) != 2:
        sys.stderr.write(__doc__.split("\n\n")[1] + "\n")
        return 2
    try:
        with open(argv[1], "r+b") as f:
            data = bytearray(f.read())
            for k in layout.kernels(data):
                e = Edit(k)
                e.write()
                why = ", sass.py does not know opcode " + ", ".join("%#x" % op for op in e.strange) if e.strange else ""
                count = {op: k.code.op.count(op) for op in (YIELD, REDUX)}
                print("  trim %s: %d loads and stores name the entry's pair, %d R2UR left out, %d stay; of %d YIELD %d left out, %d NOPs; %d of %d REDUX are moves%s" % (
                    k.name, e.named, len(e.gone - e.idle), e.kept, count[YIELD], len(e.gone & e.idle), len(e.idle - e.gone), count[REDUX] - e.c.op.count(REDUX), count[REDUX], why))
            f.seek(0)
            f.write(data)
    except (Refused, OSError) as e:
        sys.stderr.write("trim: %s\n" % e)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
