"""What an sm_90 instruction's 16 bytes say, as far as megakernel/layout.py and megakernel/trim.py have to know; seen in what nvcc makes of the kernel (ncu prints its code with names)."""
import functools

M64 = (1 << 64) - 1
BRA, CALL, RET, EXIT, BRX, COLLECTIVE, BSSY, NOP, YIELD = 0x947, 0x944, 0x950, 0x94D, 0x949, 0x348, 0x945, 0x918, 0x946
SPLIT = (BRA, CALL, RET, BRX, COLLECTIVE)  # their targets' lowest eight bits stand apart; those of RET and BRX, to which a register is added, are the kernel's beginning
STALL = 15 << 41  # of an instruction's upper word: clocks until the next one
MOST_STALL = 11  # ptxas has longer ones with another bit beside them only: LONG, which is cleared then
LONG = 1 << 45
LEFT_OUT = (NOP, 0x000FC20000000000)  # a NOP of one clock, where trim.py has taken an instruction away: ptxas makes none


class Refused(Exception):
    pass


def target(lo, hi, pc):
    """Of a control instruction at byte pc: the byte it leads to."""
    v = lo >> 34 | (hi & 0x3FFFF) << 30
    if lo & 0xFFF != BSSY:
        v = v << 8 | lo >> 16 & 0xFF
        v -= (v >> 55) << 56
    else:
        v -= (v >> 47) << 48
    return pc + 16 + 4 * v


def aimed(lo, hi, pc, to):
    """The same instruction at pc, leading to `to`."""
    v = (to - pc - 16) // 4
    if lo & 0xFFF != BSSY:
        lo = lo & ~(0xFF << 16) | (v & 0xFF) << 16
        v >>= 8
    v &= (1 << 48) - 1
    return lo & (1 << 34) - 1 | v << 34 & M64, hi & ~0x3FFFF | v >> 30


def plain(lo, hi):
    """A branch by one predicate or none: no second one, not .DIV or .U."""
    return hi >> 23 & 15 == 7 and not hi >> 27 & 1 and not lo >> 24 & 0xFF and not lo >> 32 & 3


def turns_round(lo, hi):
    return lo & 0xFFF == BRA and plain(lo, hi) and lo >> 12 & 7 != 7


def ends(lo, hi):
    """Nothing follows it."""
    op, always = lo & 0xFFF, lo >> 12 & 15 == 7
    return op == BRX or always and (op == RET or op == EXIT and hi >> 23 & 15 == 7 or op == BRA and plain(lo, hi))


def idle(lo, hi):
    """A NOP of one clock that waits for no scoreboard and sets none."""
    return lo & 0xFFF == NOP and hi >> 41 & 15 <= 1 and hi >> 46 & 0xFFF == 0x3F


def stall(hi):
    return (hi & STALL) >> 41


def stalled(hi, clocks):
    return hi & ~(STALL | LONG if clocks > MOST_STALL else STALL) | clocks << 41


# ---- what it reads and writes ---------------------------------------------------------------------------------------

R2UR, LDC, ULDC, BSYNC, VOTE, P2R, R2P, REDUX, USETMAXREG = 0x2CA, 0xB82, 0xAB9, 0x941, 0x806, 0x803, 0x804, 0x3C4, 0x9C8
CONSTANT = 0x8200  # the descriptor's place in an LDC's or a ULDC's upper half: c[0x0][0x208]
URZ, RZ, PT = 63, 255, 7

NAMES = {0x980: 32, 0x981: 32, **dict.fromkeys((0x985, 0x986, 0x98A, 0x98E, 0x9A8, 0xFAE), 64)}  # LD, LDG; ST, STG, ATOM, REDG, ATOMG, LDGSTS: where the descriptor's register stands
MEMORY = {*NAMES, 0x984, 0x388, 0x988}  # and LDS, STS: what takes an address from a register as soon as arithmetic would take it

# Arithmetic of ordinary registers and predicates: 4 to 5 clocks to a register that arithmetic or an address reads, 7 to others, 13 to a predicate.
PLAIN = {0x202, 0x802, 0xC02, P2R, R2P, 0x805, 0x207, 0x807, 0xC07, 0x208, 0x808, 0x209, 0x809, 0x20B, 0x80B, 0x20C, 0x80C, 0xC0C, 0x20F, 0x210, 0x810, 0xC10, 0x211, 0x811, 0xC11,
         0x212, 0x812, 0xC12, 0x216, 0x816, 0x219, 0x419, 0x819, 0xC19, 0x81A, 0x81C, 0x220, 0x820, 0x221, 0x421, 0x223, 0x423, 0x823, 0x224, 0x424, 0x824, 0xC24, 0xE24, 0x225, 0x825,
         0xC25, 0xE25, 0xC26, 0x227, 0x827, 0x232, 0x836, 0xC36, 0x23E, 0x245, 0xC45, 0x246, 0x446, 0x846, 0xC46, 0x248, 0x848, 0xC48}
CONTROL = {0x918, 0x91A, 0x91B, 0xB1D, BSYNC, 0x942, CALL, BSSY, YIELD, BRA, COLLECTIVE, 0x948, BRX, EXIT, RET, 0x356, 0x95C, 0x95D}  # NOP, DEPBAR, BAR, BREAK, WARPSYNC, BMOV, BPT, NANOSLEEP too
OTHER = {VOTE, 0x228, 0x828, 0xC28, 0x229, 0x429, 0xE29, 0x23A, 0x83B, 0x23C, 0x300, 0xD00, 0x301, 0x304, 0x305, 0x306, 0x308, 0x309, 0xD09, 0x310, 0x311, 0x312, 0x919, 0x31C, 0x355, LDC,
         0x983, 0x387, 0x388, 0x389, 0x589, 0x989, 0xF89, 0x38B, 0x38D, 0x98F, 0x992, 0x3A1, 0x3AA, 0x5AB, 0x9AB, 0x9AF, 0x3C6}
# Uniform registers: (written at, read at). Elsewhere bit 91 says that one is read, which nobody has done so far. 0x984 and 0x38C, LDS and ATOMS, read one if bit 91 says so; BRA (.DIV, .U) if one of three bits does.
UNIFORM = {0x287: (16, (24, 32)), 0x28C: (None, (24, 32)), 0x290: (16, (24, 32, 64)), 0x291: (16, (24, 32, 64)), 0x292: (16, (24, 32, 64)), 0x297: (16, (24, 32, 64)), 0x299: (16, (24, 32, 64)),
           0x2A4: (16, (24, 32, 64)), 0x8A4: (16, (24, 64)), 0x2A5: (16, (24, 32, 64)), 0x2BD: (16, (32,)), R2UR: (16, ()), 0x3BA: (None, (24, 32, 40, 64)), 0x3BC: (None, (24, 64)), REDUX: (16, ()), 0x5A7: (None, (64,)),
           0x5B2: (None, (24, 32, 64)), 0x882: (16, ()), 0x886: (16, ()), 0x887: (16, (24,)), 0x88C: (None, (24,)), 0x890: (16, (24, 64)), 0x891: (16, (24, 64)), 0x892: (16, (24, 64)),
           0x896: (16, (24, 64)), 0x899: (16, (24, 64)), 0x8A5: (16, (24, 64)), 0x980: (None, (32,)), 0x981: (None, (32,)), 0x984: (None, (32,)), 0x985: (None, (64,)), 0x986: (None, (64,)),
           0x988: (None, (64,)), 0x98A: (None, (64,)), 0x38C: (None, (64,)), 0x98C: (None, (64,)), 0x98E: (None, (64,)), 0x9A7: (None, (64,)), 0x9A8: (None, (64,)), 0x9C3: (16, ()),
           0x9C8: (None, (24, 32, 64)), ULDC: (16, ()), 0xABB: (16, (24,)), 0xC82: (16, (32,)), 0xF8C: (None, (64,)), 0xFAE: (None, (64,)), 0x82F: (16, ()), BRA: (None, (24,))}
WRITES_UNIFORM = {op for op, (at, _) in UNIFORM.items() if at is not None}
MIXED = {0xC02, 0xC07, 0xC0C, 0xC10, 0xC11, 0xC12, 0xC19, 0xC24, 0xC25, 0xC26, 0xC28, 0xC36, 0xC45, 0xC46, 0xC48, 0xD00, 0xD09, 0xE24, 0xE25, 0xE29}  # ordinary ones with a uniform operand at bit 32
PAIRS = {0x3BA, 0x3BC, 0x5B2, 0x297, 0x299, 0x899, 0x2A5, 0x8A5, 0xC28, 0xE25, 0xE29, *NAMES}  # what may read two uniform registers from a field on
KNOWN = PLAIN | CONTROL | OTHER | MIXED | set(UNIFORM)
NO_REGISTER = CONTROL | {R2P, 0x81C, 0x20B, 0x80B, 0x20C, 0x80C, 0xC0C, 0x985, 0x986, 0x387, 0x388, 0x988, 0x98E, 0x98F, 0x992, 0x5A7, 0x5AB, 0x9AB, 0xFAE, 0x9AF, 0x5B2, 0x3BA, 0x3BC, 0x3C6, 0x9C8,
                         0x82F, 0x28C, 0x88C}  # what writes no ordinary register, besides what writes a uniform one
SIZED = {0x980, 0x981, 0x983, 0x984, LDC, 0x98A, 0x9A8, 0x38C, 0x98C, 0x38B, 0x38D}  # bits 73 to 75 say how much
COPIES = {0x202: 32, 0x224: 64}  # MOV, IMAD.MOV: where the register that is copied stands
COMPARE, ADD = (0x20B, 0x80B, 0x20C, 0x80C, 0xC0C), (0x210, 0x810, 0xC10)
SETS = {  # where the predicates stand that it writes
    **dict.fromkeys((VOTE, R2UR, 0x211, 0x811, 0xC11, 0x212, 0x812, 0xC12, 0x225, 0x825, 0xC25, 0xE25, 0x227, 0x827, 0x82F, 0x31C, 0x389, 0x589, 0x989, 0xF89, 0x38B, 0x3A1, 0x3AA, 0x5A7, 0x98A, 0x9A8), (81,)),
    **dict.fromkeys(COMPARE + ADD + (0x81C,), (81, 84))}
ASKS = {  # that it reads, besides the one that it is executed under
    **dict.fromkeys((VOTE, 0x207, 0x807, 0xC07, 0x208, 0x808, 0x209, 0x809, 0x211, 0x811, 0xC11, 0x224, 0x424, 0x824, 0xC24, 0xE24, 0x225, 0x825, 0xC25, 0xE25, 0x227, 0x827, 0x20F, 0x246, 0x446, 0x846,
                     0xC46, 0x248, 0x848, 0xC48, 0x886, 0xB1D, BSYNC, 0x942, BRA, BRX, EXIT, 0x948, 0xFAE), (87,)),
    **dict.fromkeys(COMPARE, (87, 68)), **dict.fromkeys(ADD, (87, 77)), 0x81C: (87, 77, 68)}
REDUX_AND = 0  # bits 64 on of a REDUX that has the bits which all lanes have
SLOW, SOON, NEXT = 64, 13, 6  # clocks: no result that is not announced takes longer; one of PLAIN; one of PLAIN to an ordinary register that PLAIN or MEMORY reads


def field(w, at, n):
    return (w[0] | w[1] << 64) >> at & (1 << n) - 1


def placed(w, at, n, value):
    """With this in that field."""
    both = (w[0] | w[1] << 64) & ~((1 << n) - 1 << at) | value << at
    return both & M64, both >> 64


def opcode(w):
    return w[0] & 0xFFF


def known(w):
    op = opcode(w)
    return op in KNOWN and (op in UNIFORM or op in MIXED or not field(w, 91, 1)) and (op != 0x5B2 or field(w, 16, 6) == URZ)


def always(w):
    return field(w, 12, 4) == PT


def barriers(w):
    """The scoreboards that it announces by: its results, that it has read."""
    return field(w, 110, 3), field(w, 113, 3)


def waits(w):
    return field(w, 116, 6)


def moves_up(w):
    """An R2UR without a predicate of its own making."""
    return opcode(w) == R2UR and w[1] & (1 << 41) - 1 == 0x0E0000


def writes_uniform(w):
    op = opcode(w)
    if op not in WRITES_UNIFORM:
        return set()
    u = field(w, UNIFORM[op][0], 6)
    return {u, u + 1} - {URZ} if op in (0x297, 0x2A5, 0x8A5) or op in (ULDC, 0xABB) and field(w, 73, 3) == 5 else {u} - {URZ}


def reads_uniform(w):
    op = opcode(w)
    if not known(w):
        return set(range(URZ))
    places = (32,) if op in MIXED else UNIFORM.get(op, (None, ()))[1]
    if op in (0x984, 0x38C) and not field(w, 91, 1) or op == BRA and not field(w, 91, 1) and not field(w, 32, 2):
        return set()
    first = {field(w, at, 6) for at in places} - {URZ}
    return first | {u + 1 for u in first} - {URZ} if op in PAIRS else first


def writes(w):
    """The ordinary registers that it may write."""
    op = opcode(w)
    if not known(w):
        return range(RZ)
    d = field(w, 16, 8)
    if d == RZ or op in NO_REGISTER or op in WRITES_UNIFORM:
        return ()
    if op in SIZED:
        n = {5: 2, 6: 4}.get(field(w, 73, 3), 1)
    else:
        n = 4 if op in (0x23C, 0x83B) else 2 if op & 0x1FF in (0x25, 0x28, 0x29) or op in (0x805, 0x310, 0x311, 0x312) else 1
    return range(d, d + n)


def reads(w):
    """The ordinary registers that it may read, and some more: a field that is no register looks like one."""
    op = opcode(w)
    if op in WRITES_UNIFORM and op not in (R2UR, REDUX):
        return set()
    n = 1 if op in PLAIN and op & 0x1FF != 0x25 else 4
    places = [field(w, at, 8) for at in ((16, 24, 32, 64) if op == 0xFAE else (24, 32, 64))]
    return {r for v in places if v != RZ for r in range(v, v + n)}


def predicates(w, places):
    """Those of an instruction whose opcode has one at each of these places."""
    return {field(w, at, 3) for at in places} - {PT} if known(w) else set(range(PT))


def writes_predicates(w):
    return set(range(PT)) if opcode(w) == R2P else predicates(w, SETS.get(opcode(w), ()))


def reads_predicates(w):
    return set(range(PT)) if opcode(w) in (P2R, CALL, RET) else predicates(w, (12, *ASKS.get(opcode(w), ())))


@functools.lru_cache(maxsize=None)
def facts(w):
    """What needs() asks for."""
    op = opcode(w)
    moving = op in (0x28C, 0x88C, 0x9C8) or op in WRITES_UNIFORM and op not in (R2UR, 0x882, 0xC82, ULDC, REDUX)  # what may write uniform predicates
    return op, op in PLAIN and op not in MIXED, moving, barriers(w), waits(w), set(writes(w)), reads(w) | set(writes(w)), writes_predicates(w), reads_predicates(w) | writes_predicates(w), \
        writes_uniform(w), reads_uniform(w) | writes_uniform(w)


def needs(x, y):
    """Clocks that y has to come behind x, if it did not come sooner."""
    op, plain, moving, announces, _, wrote, _, set_predicates, _, moved, _ = facts(x)
    after, _, _, _, awaits, _, touches, _, asks, _, takes = facts(y)
    n = SOON if any(awaits >> b & 1 for b in announces if b < 6) else 0
    if announces[0] < 6:
        return n
    if moved & takes or moving and (after in UNIFORM or after == 0x81C):
        return SLOW
    if set_predicates & asks:
        n = SOON if plain or op == VOTE else SLOW
    if wrote & touches:
        n = max(n, SLOW if not plain else NEXT if op not in (P2R, R2P) and (after in PLAIN or after in MEMORY) else SOON)
    return n


@functools.lru_cache(maxsize=None)
def latency(x):
    """Clocks behind which all may be read that it writes without saying so by a barrier."""
    return SOON if opcode(x) in PLAIN | CONTROL | {VOTE} and opcode(x) not in MIXED or barriers(x)[0] < 6 else SLOW
