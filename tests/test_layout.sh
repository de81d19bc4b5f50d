#!/bin/bash
# megakernel/layout.py on the kernel that was built: what it moves it proves to be the same, and its proof can fail. No GPU: tests/gpu runs what was moved.
plain=$BUILD/plain/megakernel/kernel.cu.o
if [ ! -e "$plain" ]; then
    echo 'ok - layout: proof and its negative controls # SKIP built without nvcc'
    exit 0
fi
python3 - "$plain" "$BUILD" <<'PY'
import copy
import os
import random
import subprocess
import sys
import tempfile

sys.path.insert(0, "megakernel")
import layout

plain, build = sys.argv[1:]
failed = []


def check(name, right):
    print(("ok - layout: " if right else "not ok - layout: ") + name)
    failed.extend([] if right else [name])


def proves(k, m):
    try:
        layout.prove(k, m)
    except layout.Refused as e:
        print("# " + str(e))
        return False
    return True


def refused(what, *args):
    """By layout.py, in one line that has these words."""
    run = subprocess.run([sys.executable, "megakernel/layout.py", *args], capture_output=True, text=True)
    return run.returncode == 1 and run.stderr.count("\n") == 1 and all(word in run.stderr for word in what)


def texts(path):
    """The resident kernels in a file, as bytes."""
    with open(path, "rb") as f:
        data = bytearray(f.read())
    return [e.bytes(".text." + k.name) for e in (layout.Elf(data, at) for at in layout.cubins(data)) if ".text." + k.name in e.section]


def code_of(m):
    return b"".join(layout.struct.pack("<QQ", *w) for w in m.word)


k = layout.resident(plain)
c = k.code
for i, to in c.to.items():
    assert layout.aimed(*c.word[i], 16 * i, 16 * to) == c.word[i]
check("every one of %d control instructions is read and written alike" % len(c.to), len(c.to) > 1000)

m = layout.Moved(k, [0] * c.n)
check("nothing known, nothing moved", proves(k, m) and [s[0] for s in m.order] == sorted(s[0] for s in m.order))
models, rank, strange = layout.models_of(k, layout.read_profile("megakernel/layout.txt"))
check("layout.txt is of this kernel: %d functions are not" % strange, any(models))
random.seed(1)
for turn in range(3):
    odd = [0] * c.n
    for _ in range(60):
        first, who = random.randrange(c.n), random.randrange(1, 8)
        for i in range(first, min(first + random.randrange(20, 2000), c.n)):
            odd[i] |= who
    m = layout.moved(k, odd, rank)
    check("code in a random order, %d: %d branches added, %d turned round" % (turn, m.added, m.turned), m.added + m.turned > 20 and proves(k, m))
m = layout.moved(k, models, rank)
check("code in the order of layout.txt", proves(k, m))
linked = [code_of(m)]
check("which is what was built", texts(build + "/megakernel/kernel.cu.o") == linked)

# what other steps execute beside comes behind what those of one row do, whose order it does not touch
one = [s for s in layout.Moved(k, [layout.of_one(who) for who in models], rank, m.gap).order[1:] if s[2]]
placed = [s for s in m.order[1:] if s[2]]
check("code of other steps: behind that of one row, which stays as it is", placed[: len(one)] == one != placed and not any(layout.of_one(s[2]) for s in placed[len(one) :]))

# a kernel for each model alone
text = open("megakernel/layout.txt").read()
names = " ".join(layout.comments("megakernel/layout.txt", layout.MODELS)).split()
check("the orders in layout.txt are of its models", all(line.split(":")[0] in names for line in layout.comments("megakernel/layout.txt", layout.ORDER)))
for bit, name in enumerate(names):
    own, places, _ = layout.models_of(k, layout.read_profile("megakernel/layout.txt", name))
    a = layout.moved(k, own, places)
    kinds = [0 if layout.of_one(s[2]) else 2 if s[2] == 1 << layout.OTHERS else 1 if s[2] else 3 for s in a.order[1:]]
    counts = all(layout.of_one(o) == w & 1 << bit for w, o in zip(models, own))
    check("for %s: its own step, what lies beside, other models, the rest" % name, proves(k, a) and counts and kinds == sorted(kinds) and {*kinds} == {0, 1, 2, 3})
    linked.append(code_of(a))
    check("for %s: it is what was built" % name, texts("%s/megakernel/kernel-%s.o" % (build, name)) == linked[-1:])
check("all of these are in mkd, and differ", sorted(texts(build + "/mkd")) == sorted(set(linked)) and len(set(linked)) == 1 + len(names))
check("onestep has the kernel in nvcc's order, and no other", texts(build + "/profiles/onestep") == texts(plain))
for race in ("race_gpu", "race_opcodes"):
    if os.path.exists(build + "/tests/gpu/" + race):
        check(race + " has its own kernel, and no other", texts(build + "/tests/gpu/" + race) == texts(build + "/race/megakernel/kernel.cu.o"))
    else:
        print("ok - layout: %s has its own kernel, and no other # SKIP make tests builds it" % race)
check("a model that is none is refused in a line", refused(["nobody", *names], "show", plain, "megakernel/layout.txt", "nobody"))


def with_order(path, *functions):
    """layout.txt with this order of the first model's functions."""
    begin = "%s%s: " % (layout.ORDER, names[0])
    with open(path, "w") as f:
        f.write(begin + " ".join(functions) + "\n" + "".join(line for line in text.splitlines(True) if not line.startswith(begin)))
    return path


with tempfile.TemporaryDirectory() as d:
    both = [f for f in k.functions[1:] if any(w & 1 for w in models[f[0] : f[1]])][-2:]

    def hot(order):
        """Where the code of both lies that the first model executes: (first, last) of each."""
        own, places, _ = layout.models_of(k, layout.read_profile(with_order(d + "/layout.txt", *order), names[0]))
        a = layout.moved(k, own, places)
        at = [[a.at[i] for i in range(f[0], f[1]) if own[i] == 1] for f in both]
        return proves(k, a) and [(min(p), max(p)) for p in at]

    (one, two), (three, four) = hot([both[0][2], both[1][2]]), hot([both[1][2], both[0][2]])
    check("two functions lie in the order of the profile's line", one[1] < two[0] and four[1] < three[0])
    check("which is of that model alone", layout.read_profile(d + "/layout.txt") == layout.read_profile("megakernel/layout.txt") and refused(["nobody"], "show", plain, d + "/layout.txt", "nobody"))
    check("a function in it that is none is refused in a line", refused(["_Z3foo", names[0]], "show", plain, with_order(d + "/layout.txt", both[0][2], "_Z3foo"), names[0]))

with tempfile.TemporaryDirectory() as d:
    def page(name, counts):
        with open(d + "/" + name, "w") as f:
            f.write("#,inst_executed\n" + "".join("%d,%d\n" % (i, n) for i, n in enumerate(counts)))
        return d + "/" + name

    pages = [page("one.csv", [400 * (who & 1) for who in models]), page("two.csv", [400 * (who >> 1 & 1) + 255 for who in models])]
    with_order(d + "/layout.txt", k.functions[2][2], k.functions[1][2])
    order = open(d + "/layout.txt").readline()
    layout.learn(plain, d + "/layout.txt", pages, [page("eight.csv", [i % 5 // 2 * 200 for i in range(c.n)])])
    learnt = layout.models_of(k, layout.read_profile(d + "/layout.txt"))
    check("what is learnt of such pages is read again", learnt[2] == 0 and learnt[0] == [who & 3 or (i % 5 == 4) << layout.BESIDE for i, who in enumerate(models)])
    check("what is learnt anew keeps the order of a model's functions", order in open(d + "/layout.txt").readlines())
    check("a bit that the profile has not, and none at all, are refused in a line", refused(["2, 3"], "renew", plain, d + "/layout.txt", "2=" + pages[0], "3=" + pages[0]) and refused(["BIT=CSV"], "renew", plain, d + "/layout.txt", pages[0]))
    was = open(d + "/layout.txt").read()
    layout.renew(plain, d + "/layout.txt", [(0, pages[0])])
    check("renewed by the page that it was learnt of, layout.txt is what it was", open(d + "/layout.txt").read() == was)
    layout.renew(plain, d + "/layout.txt", [(1, page("none.csv", [0] * c.n)), (16, page("all.csv", [256] * c.n))])
    renewed = layout.models_of(k, layout.read_profile(d + "/layout.txt"))
    check("of renewed steps the new page counts, of others what was", renewed[2] == 0 and renewed[0] == [who & 1 or 1 << layout.BESIDE for who in models] and order in open(d + "/layout.txt").readlines())

# carried over to code that is a little other
who = [1, 1, 1, 0, 0, 2, 2, 2]
check("carried over: the same code, the same ranges", layout.carried(list("abcdefgh"), list("abcdefgh"), who) == (who, 0))
check("carried over: what is new goes with what stands before it, what is gone is gone", layout.carried(list("abcdefgh"), list("abXcdegYh"), who) == ([1, 1, 1, 1, 0, 0, 2, 2, 2], 2))
was, now = ["_Z3runi", "_Z4stayv", "_Z2ofILi1ELb0EEvv", "_Z2ofILi2ELb0EEvv", "_Z4bothi", "_Z4bothj", "_Z4gonev"], ["_Z3runij", "_Z4stayv", "_Z2ofILi1ELb0EEvi", "_Z2ofILi3ELb0EEvi", "_Z4bothv", "_Z5othery"]
check("carried over: a function with other parameters is the same one, if there is one such of its name and its template's arguments",
      layout.renamed(was, now) == {"_Z3runi": "_Z3runij", "_Z2ofILi1ELb0EEvv": "_Z2ofILi1ELb0EEvi"})
with tempfile.TemporaryDirectory() as d:
    before = open(with_order(d + "/layout.txt", k.functions[1][2])).read()
    run = subprocess.run([sys.executable, "megakernel/layout.py", "carry", plain, d + "/layout.txt", plain], capture_output=True, text=True)
    check("carried over to itself, layout.txt is what it was", run.returncode == 0 and open(d + "/layout.txt").read() == before)

# a proof that cannot fail proves nothing
def spoiled(name, spoil):
    bad = copy.copy(m)
    bad.word, bad.table = list(m.word), list(m.table)
    spoil(bad)
    check("found: " + name, not proves(k, bad))


def at_old(kind):
    return [i for i in kind if m.origin[m.at[i]] == i]


def aim(bad, i, by):
    p = bad.at[i]
    bad.word[p] = layout.aimed(*bad.word[p], 16 * p, layout.target(*bad.word[p], 16 * p) + 16 * by)


branch = at_old(i for i in c.to if c.op[i] == layout.BRA)
spoiled("a branch that leads one instruction further", lambda bad: aim(bad, branch[len(branch) // 2], 1))
spoiled("a call of something else", lambda bad: aim(bad, at_old(i for i in c.to if c.op[i] == layout.CALL)[7], 1))
spoiled("a barrier's end elsewhere", lambda bad: aim(bad, at_old(i for i in c.to if c.op[i] == layout.BSSY)[99], -1))


def back(bad):
    p = bad.at[at_old(c.back)[3]]
    bad.word[p] = (bad.word[p][0] + (16 << 32), bad.word[p][1])


spoiled("a call that returns one instruction later", back)


def swap(bad):
    p = next(p for p in range(5000, c.n) if None not in bad.origin[p : p + 2] and bad.word[p] != bad.word[p + 1] and not {bad.origin[p], bad.origin[p + 1]} & set(c.to))
    bad.word[p], bad.word[p + 1] = bad.word[p + 1], bad.word[p]


spoiled("two instructions that changed places", swap)
turned = next(i for i in branch if layout.turns_round(*c.word[i]) and (m.word[m.at[i]][0] ^ c.word[i][0]) >> 15 & 1)


def sense(bad):
    p = bad.at[turned]
    bad.word[p] = (bad.word[p][0] ^ 1 << 15, bad.word[p][1])


spoiled("a branch turned round that is taken when it was", sense)


def sooner(i):
    def spoil(bad):
        (lo, hi), p = bad.word[bad.at[i]], bad.at[i]
        bad.word[p] = (lo, layout.stalled(hi, layout.stall(hi) - 1))

    return spoil


parted = at_old(i for i in branch if c.word[i][1] >> 27 & 1 and m.origin[m.at[i + 1]] != i + 1 and c.word[i + 1] != layout.LEFT_OUT)
left = [i for i in sorted(m.later) if i not in parted]
spoiled("an instruction behind which a branch was left out, without one of the branch's clocks, of %d" % len(left), sooner(left[0]))
spoiled("a branch of a parted warp without the clock of the NOP behind it, one of %d" % len(parted), sooner(parted[len(parted) // 2]))
spoiled("a branch turned round that leaves fewer clocks than a jump takes", sooner(turned))

# branches that ptxas gives more clocks than that, each in a layout in which what stands before it is executed, and where it leads, but not what lies between
long = [i for i in branch if layout.turns_round(*c.word[i]) and layout.stall(c.word[i][1]) > layout.TURNED_STALL and c.to[i] > i + 8]
round_about, kept, found = 0, 0, 0
for i in long[:6]:
    f = next(f for f in k.functions if f[0] <= i < f[1])
    own = [0] * c.n
    for first, end in ((f[0], i + 1), (c.to[i], min(c.to[i] + 64, f[1]))):
        own[first:end] = [1] * (end - first)
    a = layout.Moved(k, own, None, 0)
    p = a.at[i]
    if not (a.word[p][0] ^ c.word[i][0]) >> 15 & 1:
        continue
    round_about += 1
    kept += layout.stall(a.word[p][1]) == layout.stall(c.word[i][1]) and proves(k, a)
    a.word[p] = (a.word[p][0], layout.stalled(a.word[p][1], layout.TURNED_STALL))
    found += not proves(k, a)
check("%d of %d long waits before a branch that is turned round stay as long" % (kept, round_about), kept == round_about > 0)
check("found: %d of them that do not" % found, found == round_about)


def table(bad):
    bad.table[2] += 1


spoiled("a table of branches", table)

with tempfile.NamedTemporaryFile("w", suffix=".txt") as f:
    f.write("# a profile\n_Z3foo 0123 1-2:3\n")
    f.flush()
    check("a profile that is none is refused in a line", refused(["line 2"], "show", plain, f.name))
sys.exit(bool(failed))
PY
