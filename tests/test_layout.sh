#!/bin/bash
# megakernel/layout.py on the kernel that was built: what it moves it proves to be the same, and its proof can fail. No GPU: tests/gpu runs what was moved.
plain=$BUILD/plain/megakernel/kernel.cu.o
if [ ! -e "$plain" ]; then
    echo 'ok - layout: proof and its negative controls # SKIP built without nvcc'
    exit 0
fi
python3 - "$plain" "$BUILD/megakernel/kernel.cu.o" <<'PY'
import random
import subprocess
import sys
import tempfile

sys.path.insert(0, "megakernel")
import layout

plain, laid = sys.argv[1:]
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
data = bytearray(open(laid, "rb").read())
check("which is what was linked", any(b"".join(layout.struct.pack("<QQ", *w) for w in m.word) == e.bytes(".text." + k.name) for e in (layout.Elf(data, at) for at in layout.cubins(data))))

# what other steps execute beside comes behind what those of one row do, whose order it does not touch
one = [s for s in layout.Moved(k, [layout.of_one(who) for who in models], rank, m.gap).order[1:] if s[2]]
placed = [s for s in m.order[1:] if s[2]]
check("code of other steps: behind that of one row, which stays as it is", placed[: len(one)] == one != placed and not any(layout.of_one(s[2]) for s in placed[len(one) :]))
with tempfile.TemporaryDirectory() as d:
    def page(name, counts):
        with open(d + "/" + name, "w") as f:
            f.write("#,inst_executed\n" + "".join("%d,%d\n" % (i, n) for i, n in enumerate(counts)))
        return d + "/" + name

    pages = [page("one.csv", [400 * (who & 1) for who in models]), page("two.csv", [400 * (who >> 1 & 1) + 255 for who in models])]
    layout.learn(plain, d + "/layout.txt", pages, [page("eight.csv", [i % 5 // 2 * 200 for i in range(c.n)])])
    learnt = layout.models_of(k, layout.read_profile(d + "/layout.txt"))
    check("what is learnt of such pages is read again", learnt[2] == 0 and learnt[0] == [who & 3 or (i % 5 == 4) << layout.BESIDE for i, who in enumerate(models)])

# carried over to code that is a little other
who = [1, 1, 1, 0, 0, 2, 2, 2]
check("carried over: the same code, the same ranges", layout.carried(list("abcdefgh"), list("abcdefgh"), who) == (who, 0))
check("carried over: what is new goes with what stands before it, what is gone is gone", layout.carried(list("abcdefgh"), list("abXcdegYh"), who) == ([1, 1, 1, 1, 0, 0, 2, 2, 2], 2))
with tempfile.TemporaryDirectory() as d:
    text = open("megakernel/layout.txt").read()
    with open(d + "/layout.txt", "w") as f:
        f.write(text)
    run = subprocess.run([sys.executable, "megakernel/layout.py", "carry", plain, d + "/layout.txt", plain], capture_output=True, text=True)
    check("carried over to itself, layout.txt is what it was", run.returncode == 0 and open(d + "/layout.txt").read() == text)

# a proof that cannot fail proves nothing
def spoiled(name, spoil):
    bad = layout.moved(k, models, rank)
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


def hurry(bad):
    p = next(bad.at[i] for i in sorted(bad.later))
    bad.word[p] = (bad.word[p][0], layout.stalled(bad.word[p][1], 1))


spoiled("an instruction behind which a branch was left out, without the branch's clocks", hurry)


def table(bad):
    bad.table[2] += 1


spoiled("a table of branches", table)

with tempfile.NamedTemporaryFile("w", suffix=".txt") as f:
    f.write("# a profile\n_Z3foo 0123 1-2:3\n")
    f.flush()
    run = subprocess.run([sys.executable, "megakernel/layout.py", "show", plain, f.name], capture_output=True, text=True)
    check("a profile that is none is refused in a line", run.returncode == 1 and run.stderr.count("\n") == 1 and "line 2" in run.stderr)
sys.exit(bool(failed))
PY
