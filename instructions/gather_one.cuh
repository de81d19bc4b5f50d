/* How a vector of one row gets out of its packets into the staging area; and what gatherings of several rows have in common with that. */
#ifndef MK_GATHER_ONE_CUH
#define MK_GATHER_ONE_CUH

#include "instructions/mk_math.h"
#include "megakernel/device.cuh"

/* How values become f16: their exponents are lowered by so much that the largest, given by its bits as bf16, comes to lie in [2^14, 2^15), which is a multiplication by a
 * power of two: exact but for values below 2^-29 of the largest, which keep an error of 2^-30 of it. */
typedef struct mk_f16_shift {
    uint32_t less;   /* of both halves of a pair of bf16 */
    float inverse;   /* of the power of two; NaN if a value is not finite */
} mk_f16_shift;
MK_DEV mk_f16_shift mk_f16_shift_of(uint32_t top)
{
    const uint32_t e = top >> 7, less = max(e, 29u) - 29;
    const mk_f16_shift s = {less * 0x00800080u, __uint_as_float(e < 255 ? less + 15 << 23 : 0x7fffffffu)};
    return s;
}
/* A pair of bf16, of which m are the magnitudes. */
MK_DEV uint32_t mk_f16_shifted(uint32_t pair, uint32_t m, uint32_t less)
{
    uint32_t by = 0u - 8 * less;
    asm("" : "+r"(by)); /* one addition with a shift, and not both */
    return __vmaxu2(m, less) * 8 + by | (pair & 0x80008000u);
}
MK_DEV uint32_t mk_magnitudes(uint32_t pair)
{
    return pair & 0x7fff7fffu;
}
MK_DEV uint32_t mk_f16_pair_shifted(uint32_t pair, uint32_t less)
{
    return mk_f16_shifted(pair, mk_magnitudes(pair), less);
}
/* The larger of a pair's magnitudes. */
MK_DEV uint32_t mk_top_of(uint32_t m)
{
    return max(m >> 16, m & 0xffffu);
}
/* Values from k on of the row at shared address `row` are 0 up to the end of their K block: weights there are zero, the values must be finite. */
MK_DEV void mk_stage_pad(uint32_t row, uint32_t k)
{
    for (; k & 63; k++) mk_sts16(row + 2 * k, 0);
}

/* Whether it matters who stores to `at` last: where nobody looks it does not, but racecheck cannot know. */
MK_DEV bool mk_minds(uint32_t at, uint32_t nowhere)
{
    return MK_ARRIVALS == 1 || at != nowhere;
}
MK_DEV const mk_fed *mk_fed_of(const mk_insn *in)
{
    return (const mk_fed *)in;
}

/* A row's largest magnitude, as bf16, of which `top` is a lane's, and its sum of squares, of which `sum` is the warp's: by warp. */
MK_DEV void mk_row_top(const mk_dev *d, uint32_t r, uint32_t top)
{
    top = __reduce_max_sync(0xffffffffu, top);
    if (d->lane == 0) d->sh->top[r][d->warp] = top;
}
MK_DEV void mk_row_squares(const mk_dev *d, uint32_t parity, uint32_t r, float sum)
{
    if (d->lane == 0) d->sh->sumsq[parity][r][d->warp] = sum;
}
static_assert(MK_WARPS == 8, "mk_row_shift, mk_row_factor");
/* How value k of row r becomes f16, after the barrier that follows mk_row_top: a group's values by what its warp has found, or all alike. */
MK_DEV mk_f16_shift mk_row_shift(const mk_dev *d, const mk_plan *p, uint32_t r, uint32_t k)
{
    const uint32_t *t = d->sh->top[r];
    if (p->hands.packets) return mk_f16_shift_of(t[mk_small_quot(k, p->hands.values) & (MK_WARPS - 1)]);
    const uint4 a = *(const uint4 *)t, b = *(const uint4 *)(t + 4);
    return mk_f16_shift_of(max(max(max(a.x, a.y), max(a.z, a.w)), max(max(b.x, b.y), max(b.z, b.w))));
}
MK_DEV float mk_silu(float x)
{
    return __fmul_rn(x, mk_sigmoid(x));
}
/* What the warps have of a sum. */
MK_DEV float mk_warps_sum(const float *of)
{
    const float4 a = *(const float4 *)of, b = *(const float4 *)(of + 4);
    return (a.x + a.y) + (a.z + a.w) + ((b.x + b.y) + (b.z + b.w));
}
/* 1/rms of a row whose sums of squares, by warp, are these. */
MK_DEV float mk_rms_factor(const mk_plan *p, const float *sum)
{
    return mk_rsqrt(mk_warps_sum(sum) * p->inv_k + p->x.eps);
}
/* 1/rms of row r; rms: there is such a norm, else 1. After the barrier that follows the gathering. */
MK_DEV float mk_row_rms(const mk_dev *d, const mk_plan *p, uint32_t r, bool rms)
{
    return rms ? mk_rms_factor(p, d->sh->sumsq[d->memo->parity][r]) : 1;
}
/* What row r's results are to be multiplied by. */
MK_DEV float mk_row_factor(const mk_dev *d, const mk_plan *p, uint32_t r)
{
    return mk_row_rms(d, p, r, p->x.prologue == MK_PRO_RMS);
}

/* Eight bf16 values at `at` become f16 where they lie. */
MK_DEV void mk_f16_eight(uint32_t at, uint32_t less)
{
    const uint4 v = mk_lds128(at);
    mk_sts64(at, mk_f16_pair_shifted(v.x, less), mk_f16_pair_shifted(v.y, less));
    mk_sts64(at + 8, mk_f16_pair_shifted(v.z, less), mk_f16_pair_shifted(v.w, less));
}

/* Slices that are alike are dealt: a warp takes a group of packets, which holds whole K blocks (mk_deal, program.h), so that a lane knows by arithmetic what its packets
 * carry. One row is gathered in one pass then: its values stay in registers until the warp knows their largest, and are stored as they are staged, in order; those of a
 * longer vector are stored as they come, and the warp goes over its own once more. Several rows are gathered likewise, some rows at a time (mk_gather_some), or a part of all rows where they
 * do not fit whole (mk_gather_part). Where slices are not alike (and of an RMS norm that does not fit whole) a thread takes the same packet of every row, whose
 * values' places it looks up once in the host's map, and stages them as bf16; where the form is f16 a second pass multiplies them by the powers of two, after a barrier.
 * A packet has the same warp, and where squares are added the same thread and turn, however many rows there are and whatever the chunks: so they are added in one order, and a value meets one
 * power of two.
 * Words of a packet behind its last value are 0 (mk_publish_unit): they are squared and looked at as well. */

/* A lane's packet of a group. */
typedef struct mk_hand {
    uint32_t value, count; /* its first value, from the group's on; how many */
    uint32_t slice;        /* of the group */
    bool any, trailer;     /* it is of the group; it has its slice's trailer */
} mk_hand;
template <bool F32> MK_DEV mk_hand mk_hand_of(const mk_plan *p, mk_hands g, uint32_t lane)
{
    const uint32_t s = lane * p->by_per >> 10, j = lane - s * g.per, first = j * (F32 ? 3 : 6);
    mk_hand h;
    h.any = lane < g.packets;
    h.slice = s;
    h.count = h.any && first < g.slice ? min(F32 ? 3u : 6u, g.slice - first) : 0;
    h.value = s * g.slice + first;
    h.trailer = h.any && j + 1 == g.per;
    return h;
}

/* Which values of a lane's packet are its own, by words of what is staged. */
template <bool F32> MK_DEV uint32_t mk_hand_mine(mk_hand h, uint32_t i)
{
    return 2 * i >= h.count ? 0 : F32 && 2 * i + 1 >= h.count ? 0xffff : 0xffffffffu;
}
/* A lane's packet goes to shared address `at`: x has its values as they are staged, `mine` says which are the lane's. */
template <bool F32> MK_DEV void mk_hand_put(uint32_t at, bool has, const uint32_t (&mine)[F32 ? 2 : 3], uint4 x)
{
    if (F32) {
        if (has && mine[0]) mk_sts16(at, x.x);
        if (has && mine[0] >> 16) mk_sts16(at + 2, x.x >> 16);
        if (has && mine[1]) mk_sts16(at + 4, x.y);
    } else {
        if (has && mine[0]) mk_sts32(at, x.x);
        if (has && mine[1]) mk_sts32(at + 4, x.y);
        if (has && mine[F32 ? 1 : 2]) mk_sts32(at + 8, x.z);
    }
}
/* What is staged of a packet in bf16, as f16. */
template <bool F32> MK_DEV uint4 mk_packet_shifted(uint4 x, uint32_t less)
{
    return make_uint4(mk_f16_pair_shifted(x.x, less), mk_f16_pair_shifted(x.y, less), F32 ? 0 : mk_f16_pair_shifted(x.z, less), 0);
}
/* Two bf16 values times their gammas; their squares are added to *sum. */
MK_DEV uint32_t mk_word_scaled(uint32_t w, float by0, float by1, float *sum)
{
    const float x0 = __uint_as_float(w << 16), x1 = __uint_as_float(w & 0xffff0000u);
    *sum = __fmaf_rn(x0, x0, *sum);
    *sum = __fmaf_rn(x1, x1, *sum);
    return mk_bf16_pair(__fmul_rn(x0, by0), __fmul_rn(x1, by1));
}
/* The last packet goes on with values that nobody asked for: of w, a packet of bf16 whose first value is number `value`, those from `left` on become 0. */
MK_DEV void mk_packet_clip(uint32_t (&w)[3], uint32_t value, uint32_t left)
{
#pragma unroll
    for (uint32_t i = 0; i < 3; i++) w[i] = value + 2 * i < left ? w[i] : 0;
}
/* Which word of its packet a head's trailer is, and that word. */
MK_DEV uint32_t mk_trailer_word(mk_hands g)
{
    return g.slice / 2 % 3u;
}
MK_DEV uint32_t mk_packet_word(uint4 x, uint32_t word)
{
    return word == 0 ? x.x : word == 1 ? x.y : x.z;
}

/* From one of a lane's turns at a row's packets to the next, and to the next but one: packets, values. An f32 group of 64 packets takes two turns. */
typedef struct mk_turns {
    uint32_t packets[2], values[2];
} mk_turns;
template <bool F32> MK_DEV mk_turns mk_turns_of(mk_hands g)
{
    const bool two = F32 && g.packets > 32;
    const uint32_t packets = MK_WARPS * g.packets, values = MK_WARPS * g.values;
    const mk_turns t = {{two ? 32u : packets, two ? packets : 2 * packets}, {two ? g.values / 2u : values, two ? values : 2 * values}};
    return t;
}
MK_DEV uint32_t mk_turn_at(const uint32_t (&step)[2], uint32_t j)
{
    return (j & 1 ? step[0] : 0) + (j >> 1) * step[1];
}
/* First looks at a lane's packets of a row, the first of which is at `from` and has value `first`; any: it has some. at, value: packets and values from that on. Returns which of
 * them carry values below k (bit j); the others are zero. */
template <uint32_t LOADS>
MK_DEV uint32_t mk_ask(uint4 (&q)[LOADS], uint32_t (&at)[LOADS], uint32_t (&value)[LOADS], const uint4 *from, const mk_turns &turns, bool any, uint32_t first, uint32_t k)
{
    uint32_t wanted = 0;
#pragma unroll
    for (uint32_t j = 0; j < LOADS; j++) {
        at[j] = mk_turn_at(turns.packets, j);
        value[j] = mk_turn_at(turns.values, j);
        q[j] = make_uint4(0, 0, 0, 0);
        if (any && first + value[j] < k) {
            wanted |= 1u << j;
            q[j] = mk_packet_load(from + at[j]);
        }
    }
    return wanted;
}
/* A lane writes what K blocks of the warp's `group`, which has up to three, are multiplied by. beside: mk_plan.beside. */
MK_DEV void mk_factor_put(uint32_t k, uint32_t values, uint32_t group, uint32_t beside, float factor)
{
    const uint32_t v = group * values, n = min(values, k - v);
    float *to = mk_sh()->factor + beside / 128 + v / 64;
    to[0] = factor;
    if (n > 64) to[1] = factor;
    if (n > 128) to[2] = factor;
}
static_assert(sizeof(((mk_hands *)0)->values) == 1, "a group has fewer than 256 values, whole K blocks: three at most");

/* Stages a vector of one row without a prologue whose slices are not alike, where there is a thread a packet: the host's map says what it carries. No barrier behind it yet. */
template <uint32_t FORM> MK_DEV void mk_take_each(const mk_dev *d, const mk_insn *in)
{
    constexpr bool FP8 = FORM == MK_X_F16;
    const mk_fed *f = mk_fed_of(in);
    const mk_plan *p = &f->plan;
    const uint32_t k = p->x.k, at[1] = {min(d->tid, p->packets - 1)}, map = __ldg(d->a->map + p->map + at[0]), first = MK_MAP_FIRST(map) - p->x.in_off; /* wraps */
    const uint32_t count = d->tid < p->packets ? MK_MAP_VALUES(map) : 0, to = mk_smem(d->sh->staging) + p->beside + 2 * first;
    bool has[6], any = false;
#pragma unroll
    for (uint32_t e = 0; e < 6; e++) any |= has[e] = e < count && first + e < k;
    uint4 x[1] = {};
    mk_packets_wait<1, true>(f->place.in[0], at, any, f->place.epoch[0], 0, 0, 0, x);
    uint32_t w[3] = {x[0].x, x[0].y, x[0].z};
    if (FP8) {
        uint32_t top = 0;
#pragma unroll
        for (uint32_t e = 0; e < 6; e++)
            if (has[e]) top = max(top, w[e / 2] >> (16 * (e & 1)) & 0x7fffu);
        mk_row_top(d, 0, top);
        mk_sync();
        const mk_f16_shift shift = mk_row_shift(d, p, 0, 0);
#pragma unroll
        for (uint32_t i = 0; i < 3; i++) w[i] = mk_f16_pair_shifted(w[i], shift.less);
        if (d->tid < k / 64) d->sh->factor[p->beside / 128 + d->tid] = shift.inverse;
    }
#pragma unroll
    for (uint32_t e = 0; e < 6; e++)
        if (has[e]) mk_sts16(to + 2 * e, w[e / 2] >> (16 * (e & 1)));
}

/* Stages the instruction's vector, of one row, out of its packets. What does not depend on them is worked out before they are waited for. No barrier behind it yet. parity: of
 * its sums of squares. */
template <bool F32, uint32_t FORM, uint32_t PRO> MK_DEV void mk_take(const mk_dev *d, const mk_insn *in, uint32_t parity)
{
    constexpr uint32_t LOADS = MK_LOADS_OF(F32, PRO), WORDS = F32 ? 2 : 3;
    constexpr bool FP8 = FORM == MK_X_F16, RMS = PRO == MK_ONE_RMS, HEADS = PRO == MK_ONE_HEADS;
    static_assert(LOADS <= 4 && (!RMS || LOADS == 4), "the steps of a sum over the warp");
    mk_shared *sh = d->sh;
    const mk_fed *f = mk_fed_of(in);
    const mk_plan *p = &f->plan;
    const mk_hands g = p->hands;
    const uint32_t k = p->x.k, staged = mk_smem(sh->staging) + p->beside, behind = staged + mk_row_stride(k);
    const mk_hand h = mk_hand_of<F32>(p, g, d->lane);
    const mk_turns turns = mk_turns_of<F32>(g);
    const uint32_t group0 = d->warp * g.values, value0 = group0 + h.value, packet0 = p->skip + d->warp * g.packets + d->lane, first0 = HEADS ? group0 : value0; /* trailers have no value */
    const uint4 *const from = mk_keep_at(f->place.in[0] + packet0);
    const float4 *const gamma = RMS ? mk_keep_at((const float4 *)(sh->args.map + p->gain) + (F32 ? 1 : 2) * packet0) : 0;
    uint4 q[LOADS];
    float4 gain[RMS ? LOADS : 1][F32 ? 1 : 2]; /* of a packet's values; what is no value's is 0 */
    uint32_t at[LOADS], value[LOADS], mine[WORDS]; /* mine: which of a packet's values are the lane's */
    const uint32_t wanted = mk_ask(q, at, value, from, turns, h.any, first0, k);
    if (RMS)
#pragma unroll
        for (uint32_t j = 0; j < LOADS; j++)
#pragma unroll
            for (uint32_t i = 0; i < (F32 ? 1 : 2); i++) gain[j][i] = wanted & 1u << j ? __ldg(gamma + (F32 ? 1 : 2) * at[j] + i) : make_float4(0, 0, 0, 0);
#pragma unroll
    for (uint32_t i = 0; i < WORDS; i++) {
        mine[i] = mk_hand_mine<F32>(h, i);
        mk_keep(&mine[i]);
    }
    uint32_t left = k - value0, to0 = staged + 2 * value0, trailers = behind + 128 * d->warp + 4 * h.slice; /* a warp's turns are groups, each with 32 places */
    const uint32_t word = HEADS ? mk_trailer_word(g) : 0;
    mk_keep(&left), mk_keep(&to0);
    if (HEADS) mk_keep(&trailers);
#pragma unroll
    for (uint32_t j = 0; j < LOADS; j++) mk_keep(&value[j]);

    uint32_t top = 0;
    float sum = 0;
    mk_packets_wait<LOADS, true>(from, at, wanted, f->place.epoch[0], 0, 0, packet0, q);
#pragma unroll
    for (uint32_t j = 0; j < LOADS; j++) { /* what was not asked for is zero */
        const uint32_t to = to0 + 2 * value[j];
        const bool has = wanted & 1u << j;
        if (F32) {
            float y[3] = {__uint_as_float(q[j].x), __uint_as_float(q[j].y), __uint_as_float(q[j].z)};
            const float by[3] = {gain[RMS ? j : 0][0].x, gain[RMS ? j : 0][0].y, gain[RMS ? j : 0][0].z};
#pragma unroll
            for (uint32_t i = 0; i < 3; i++) {
                sum = __fmaf_rn(y[i], y[i], sum);
                y[i] = __fmul_rn(y[i], by[i]);
            }
            const uint32_t a = mk_bf16_pair(y[0], y[1]), b = mk_bf16_pair(y[2], 0);
            if (FP8) {
                q[j].x = a, q[j].y = b;
            } else {
                if (has && mine[0]) mk_sts16(to, a);
                if (has && mine[0] >> 16) mk_sts16(to + 2, a >> 16);
                if (has && mine[1]) mk_sts16(to + 4, b);
            }
        } else {
            uint32_t w[3] = {q[j].x, q[j].y, q[j].z};
            if (HEADS && has && h.trailer) mk_sts32(trailers + 128 * MK_WARPS * j, mk_packet_word(q[j], word));
            if (!HEADS && left - value[j] < 6) mk_packet_clip(w, value[j], left);
#pragma unroll
            for (uint32_t i = 0; i < 3; i++) {
                if (HEADS) w[i] &= mine[i];
                const float4 a = gain[RMS ? j : 0][0], b = gain[RMS ? j : 0][F32 ? 0 : 1];
                if (RMS) w[i] = mk_word_scaled(w[i], i == 0 ? a.x : i == 1 ? a.z : b.x, i == 0 ? a.y : i == 1 ? a.w : b.y, &sum);
                if (!FP8 && has && mine[i]) mk_sts32(to + 4 * i, w[i]);
            }
            q[j].x = w[0], q[j].y = w[1], q[j].z = w[2];
        }
        if (FP8) {
            top = __vmaxu2(__vmaxu2(top, mk_magnitudes(q[j].x)), mk_magnitudes(q[j].y));
            if (!F32) top = __vmaxu2(top, mk_magnitudes(q[j].z));
        }
    }
    __syncwarp();
    if (RMS) sum = FP8 ? mk_warp_add(sum, 16) : mk_warp_sum(sum); /* step by step, for each takes long, between what follows */
    float factor = 1;
    if (FP8) {
        const mk_f16_shift shift = mk_f16_shift_of(__reduce_max_sync(0xffffffffu, mk_top_of(top)));
        factor = shift.inverse;
#pragma unroll
        for (uint32_t j = 0; j < LOADS; j++) {
            if (RMS) sum = mk_warp_add(sum, 8 >> j);
            mk_hand_put<F32>(to0 + 2 * value[j], wanted & 1u << j, mine, mk_packet_shifted<F32>(q[j], shift.less));
        }
    }
    /* a lane a group, for its K blocks */
    const uint32_t group = d->warp + d->lane * MK_WARPS;
    if (HEADS && group * g.values < k) {
        float squares = 0;
#pragma unroll 1
        for (uint32_t s = 0; s * g.slice < g.values; s += 4) { /* four with one load, for each is waited for; what is behind the last is no number that was stored: 0, which changes no sum */
            const uint4 w = mk_lds128(behind + 128 * group + 4 * s);
            squares += __uint_as_float(w.x);
            squares += (s + 1) * g.slice < g.values ? __uint_as_float(w.y) : 0;
            squares += (s + 2) * g.slice < g.values ? __uint_as_float(w.z) : 0;
            squares += (s + 3) * g.slice < g.values ? __uint_as_float(w.w) : 0;
        }
        const float r = mk_rsqrt(__fmaf_rn(squares, p->inv_k, p->x.eps));
        factor = __fmul_rn(factor, r);
        if (!FP8) sh->head_rstd[0][group] = r;
    }
    if (FP8 && group * g.values < k) mk_factor_put(k, g.values, group, p->beside, factor);
    if (RMS) mk_row_squares(d, parity, 0, sum);
}

/* A warp's packets of a longer vector, with an RMS norm if it is f32 and without a prologue if not, turn by turn: what a lane asked for moves up in its registers, and values are staged as bf16.
 * Returns their largest magnitudes, pairwise; adds the lane's squares to *sum. */
template <bool F32, uint32_t LOADS> MK_DEV uint32_t mk_take_turns(const mk_dev *d, const mk_plan *p, const mk_places *place_of, uint32_t staged, float *sum)
{
    constexpr uint32_t PART = F32 ? 2 : 4; /* of a lane's packets at a time */
    static_assert(LOADS % PART == 0 && PART % 2 == 0, "parts are whole, and whole pairs of turns");
    const mk_hands g = p->hands;
    const uint32_t k = p->x.k, epoch = place_of->epoch[0];
    const mk_hand h = mk_hand_of<F32>(p, g, d->lane);
    const mk_turns turns = mk_turns_of<F32>(g);
    const uint32_t group0 = d->warp * g.values, value0 = group0 + h.value, packet0 = p->skip + d->warp * g.packets + d->lane;
    const uint32_t packets = PART / 2 * turns.packets[1], values = PART / 2 * turns.values[1]; /* from part to part */
    const float4 *const gamma = F32 ? mk_keep_at((const float4 *)(d->sh->args.map + p->gain) + packet0) : 0;
    const uint4 *from = mk_keep_at(place_of->in[0] + packet0);
    uint4 q[LOADS];
    float4 gain[F32 ? LOADS : 1];
    uint32_t at[LOADS], value[LOADS], wanted = mk_ask(q, at, value, from, turns, h.any, value0, k);
    if (F32)
#pragma unroll
        for (uint32_t j = 0; j < LOADS; j++)
            gain[j] = wanted & 1u << j ? __ldg(gamma + at[j]) : make_float4(0, 0, 0, 0);
    uint32_t left = k - value0, to = staged + 2 * value0, first = packet0, top = 0;
#pragma unroll 1
    for (uint32_t turn = 0, v = group0; turn < LOADS && v < k; turn += PART, v += values) {
        uint32_t here[PART];
#pragma unroll
        for (uint32_t j = 0; j < PART; j++) here[j] = at[j];
        mk_packets_wait<PART, true>(from, here, wanted & (1u << PART) - 1, epoch, 0, 0, first, *(uint4(*)[PART])q);
#pragma unroll
        for (uint32_t j = 0; j < PART; j++) { /* what was not asked for is zero */
            const uint32_t place = to + 2 * value[j], count = wanted & 1u << j ? h.count : 0;
            if (F32) {
                const float y[3] = {__uint_as_float(q[j].x), __uint_as_float(q[j].y), __uint_as_float(q[j].z)};
#pragma unroll
                for (uint32_t i = 0; i < 3; i++) *sum = __fmaf_rn(y[i], y[i], *sum);
                const uint32_t a = mk_bf16_pair(__fmul_rn(y[0], gain[j].x), __fmul_rn(y[1], gain[j].y)), b = mk_bf16_pair(__fmul_rn(y[2], gain[j].z), 0);
                top = __vmaxu2(__vmaxu2(top, mk_magnitudes(a)), mk_magnitudes(b));
                if (count > 0) mk_sts16(place, a);
                if (count > 1) mk_sts16(place + 2, a >> 16);
                if (count > 2) mk_sts16(place + 4, b);
            } else {
                uint32_t w[3] = {q[j].x, q[j].y, q[j].z};
                if (__builtin_expect(left - value[j] < 6, 0)) mk_packet_clip(w, value[j], left);
                top = __vmaxu2(__vmaxu2(__vmaxu2(top, mk_magnitudes(w[0])), mk_magnitudes(w[1])), mk_magnitudes(w[2]));
#pragma unroll
                for (uint32_t i = 0; i < 3; i++)
                    if (count > 2 * i) mk_sts32(place + 4 * i, w[i]);
            }
        }
#pragma unroll
        for (uint32_t j = 0; j + PART < LOADS; j++) {
            q[j] = q[j + PART];
            if (F32) gain[j] = gain[j + PART];
        }
        wanted >>= PART, from += packets, first += packets, to += 2 * values, left -= values;
    }
    return top;
}

/* A warp's packets of a vector of bf16 without a prologue whose groups are a slice each, of more than 16 packets: one after the other, lanes go on in the next slice where one ends. Staged as
 * bf16, parts of PART turns moving up in registers as in mk_take_turns; returns their largest magnitudes, pairwise. */
typedef struct mk_along {
    uint32_t packet, slice; /* of its slice; of the warp's */
} mk_along;
MK_DEV void mk_along_on(mk_along *a, uint32_t packets, uint32_t by)
{
    a->packet += by;
    if (a->packet >= packets) a->packet -= packets, a->slice++;
}
MK_DEV void mk_along_next(mk_along *a, uint32_t packets) /* 32 packets on */
{
    a->slice++;
    mk_along_on(a, packets, 32 - packets);
}
MK_DEV bool mk_takes_along(mk_hands g, uint32_t k, uint32_t loads)
{
    const uint32_t slices = mk_small_quot(k, g.values);
    return g.per == g.packets && g.packets > 16 && slices * g.values == k && (slices + MK_WARPS - 1) / MK_WARPS * g.packets <= 32 * loads;
}
template <uint32_t LOADS> MK_DEV uint32_t mk_take_along(const mk_dev *d, const mk_plan *p, const mk_places *place_of, uint32_t staged)
{
    constexpr uint32_t PART = 4;
    static_assert(LOADS % PART == 0, "parts are whole");
    const mk_hands g = p->hands;
    const uint32_t packets = g.packets, further = MK_WARPS * packets, slices = mk_small_quot(p->x.k, g.values) + MK_WARPS - 1 - d->warp;
    const uint32_t packet0 = p->skip + d->warp * packets, epoch = place_of->epoch[0], to = staged + 2 * d->warp * g.values;
    const uint4 *const from = mk_keep_at(place_of->in[0] + packet0);
    uint32_t left = slices / MK_WARPS * packets, top = 0; /* from the turn on */
    uint4 q[LOADS];
    mk_along first = {0, 0}, a;
    mk_along_on(&first, packets, d->lane);
    a = first;
#pragma unroll
    for (uint32_t j = 0; j < LOADS; j++) {
        q[j] = make_uint4(0, 0, 0, epoch);
        if (d->lane + 32 * j < left) q[j] = mk_packet_load(from + a.slice * further + a.packet);
        mk_along_next(&a, packets);
    }
    a = first;
#pragma unroll 1
    for (uint32_t turn = 0; turn < LOADS && left; turn += PART) {
        uint32_t here[PART], wanted = 0;
        mk_along b = a;
#pragma unroll
        for (uint32_t j = 0; j < PART; j++) {
            here[j] = b.slice * further + b.packet;
            wanted |= d->lane + 32 * j < left ? 1u << j : 0;
            mk_along_next(&b, packets);
        }
        mk_packets_wait<PART, true>(from, here, wanted, epoch, 0, 0, packet0, *(uint4(*)[PART])q);
#pragma unroll
        for (uint32_t j = 0; j < PART; j++) {
            const uint32_t at = 6 * a.packet, place = to + 2 * (a.slice * MK_WARPS * g.values + at), count = wanted & 1u << j ? g.values - at : 0;
            top = __vmaxu2(__vmaxu2(__vmaxu2(top, mk_magnitudes(q[j].x)), mk_magnitudes(q[j].y)), mk_magnitudes(q[j].z));
            if (count > 0) mk_sts32(place, q[j].x);
            if (count > 2) mk_sts32(place + 4, q[j].y);
            if (count > 4) mk_sts32(place + 8, q[j].z);
            mk_along_next(&a, packets);
        }
#pragma unroll
        for (uint32_t j = 0; j + PART < LOADS; j++) q[j] = q[j + PART];
        left -= min(left, 32 * PART);
    }
    return top;
}

/* A longer vector, in loops, because what a layer runs of code is what it waits for; where the form is f16 the warp multiplies its own values by the power of two in a second pass. (A function
 * for both passes is slower: profiles/NOTES.md, twenty-fourth session.) */
template <bool F32, uint32_t FORM, uint32_t LOADS> MK_DEV void mk_take_long(const mk_dev *d, const mk_insn *in, uint32_t parity)
{
    constexpr uint32_t ALONG = !F32 && LOADS > 8 ? LOADS / 4 * 3 : 0; /* turns, where slices leave lanes free in every one of LOADS */
    mk_shared *sh = d->sh;
    const mk_fed *f = mk_fed_of(in);
    const mk_plan *p = &f->plan;
    const mk_hands g = p->hands;
    const uint32_t k = p->x.k, staged = mk_smem(sh->staging) + p->beside, group0 = d->warp * g.values;
    uint32_t top;
    float sum = 0;
    if constexpr (ALONG != 0)
        top = mk_takes_along(g, k, ALONG) ? mk_take_along<ALONG>(d, p, &f->place, staged) : mk_take_turns<F32, LOADS>(d, p, &f->place, staged, &sum);
    else
        top = mk_take_turns<F32, LOADS>(d, p, &f->place, staged, &sum);
    __syncwarp();
    if (FORM == MK_X_F16) {
        const mk_f16_shift shift = mk_f16_shift_of(__reduce_max_sync(0xffffffffu, mk_top_of(top)));
        const uint32_t eights = g.values / 8, both = eights <= 16, e = both ? d->lane & 15 : d->lane, group = d->warp + d->lane * MK_WARPS; /* both: two groups at a time */
        const uint32_t begin = staged + 2 * (group0 + (both && d->lane > 15 ? MK_WARPS * g.values : 0)) + 16 * e, end = e < eights ? staged + 2 * k : 0;
#pragma unroll 2
        for (uint32_t i = begin; i < end; i += 2 * MK_WARPS * g.values << both) mk_f16_eight(i, shift.less);
        if (group * g.values < k) mk_factor_put(k, g.values, group, p->beside, shift.inverse);
    }
    if (F32) mk_row_squares(d, parity, 0, mk_warp_sum(sum));
}

/* Whether anybody publishes that packet. */
MK_DEV bool mk_map_used(uint32_t m)
{
    return MK_MAP_VALUES(m) || MK_MAP_TRAILER(m) < 3;
}
/* Whether the vector of wait 0 is staged as the instruction wants it. */
MK_DEV bool mk_is_staged(const mk_fed *f)
{
    const mk_shared *sh = mk_sh();
    const mk_memo *memo = &sh->memo[threadIdx.x / 32];
    return mk_uniform(memo->staged == f->plan.key && memo->step == sh->step.seq);
}
/* Stages wait 0's vector, of one row whose packets are dealt, unless it is staged. All compute threads call it; no barrier behind it yet. A function a form and prologue, and not part of
 * who multiplies: GEMVs, ROUTE and LM_HEAD gather alike, and code is larger than the caches. Takes the instruction's shared address and returns it, so that nobody has to keep it over the call. */
template <bool F32, uint32_t FORM, uint32_t PRO> MK_CALL uint32_t mk_gather_one(uint32_t insn)
{
    const mk_insn *in = mk_insn_at(insn);
    const mk_dev here = mk_here(in), *d = &here;
    const mk_plan *p = &mk_fed_of(in)->plan;
    mk_memo *memo = d->memo;
    const uint32_t step = d->sh->step.seq, parity = memo->parity ^ 1; /* sums and scales of the vector before may still be read */
    if (mk_is_staged(mk_fed_of(in))) return insn;
    __syncwarp();
    if (d->lane == 0) {
        memo->staged = p->key;
        memo->step = step;
        memo->parity = parity;
    }
    if constexpr (MK_LOADS_OF(F32, PRO) <= 4)
        mk_take<F32, FORM, PRO>(d, in, parity);
    else if (PRO == MK_ONE_FAR && !F32 && !p->hands.packets)
        mk_take_each<FORM>(d, in);
    else
        mk_take_long<F32, FORM, MK_LOADS_OF(F32, PRO)>(d, in, parity);
    return insn;
}
/* Such a vector with an RMS norm: h. */
MK_DEV uint32_t mk_gather_rms(uint32_t insn)
{
    return mk_fed_of(mk_insn_at(insn))->plan.x.form == MK_X_F16 ? mk_gather_one<true, MK_X_F16, MK_ONE_RMS>(insn) : mk_gather_one<true, MK_X_BF16, MK_ONE_RMS>(insn);
}
MK_DEV bool mk_is_whole(const mk_plan *p, uint32_t nrows)
{
    return mk_row_stride(p->x.k) * nrows <= MK_STAGING;
}

#endif
