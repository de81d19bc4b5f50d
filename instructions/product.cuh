/* The product of a segment's stages with a staged vector, by mma.sync: who takes which stage and K block, and how weights lie, is said in matvec.cuh. */
#ifndef MK_PRODUCT_CUH
#define MK_PRODUCT_CUH

#include "instructions/mk_math.h"
#include "megakernel/device.cuh"

#define MK_TILES 4u /* of 16 rows: of a warp */
static_assert(MK_GROUPS * MK_GROUP_WARPS == MK_WARPS && MK_GROUPS == 2 && MK_STAGES % MK_GROUPS == 0, "a slot has one group");
/* Who goes past the stages of others (mk_next_skip) has not seen them full, and must not look at a slot whose last use but one that was: what it looks at first was before them all,
 * and when it has had a stage of its own, pacing has seen to it that all but the last few before that are full. */
static_assert(MK_PACE && MK_PACE <= MK_PACE_UP && MK_PACE_UP + MK_GROUPS <= MK_STAGES, "mk_next_skip");
static_assert(16 * MK_TILES == MK_SIDE_ROWS, "a warp's tiles");

/* Results of a warp's tiles, m16n8's fragment: rows lane / 4 (x, y) and that + 8 (z, w), batch rows 2 * (lane % 4) (x, z) and the next (y, w). */
typedef struct mk_accs {
    float4 tile[MK_TILES];
} mk_accs;

/* Right operands: of four chunks of 8 bf16 values, whose first and others the lanes know the addresses of as ldmatrix wants them; of f16: mk_ldx_f16. */
MK_DEV uint4 mk_ldx_bf16(uint32_t at)
{
    uint32_t v[4];
    mk_ldmatrix(v, at);
    return make_uint4(v[0], v[1], v[2], v[3]);
}
/* Where a lane's right operands are in a staged K block, from the row of its column on. */
template <bool FP8> MK_DEV uint32_t mk_ldx_at(uint32_t lane)
{
    return FP8 ? (lane & 3) * 8 : (lane >> 3) * 16;
}
/* The column that it has them of, of which the matrix multiplied has `cols`; for others any will do. */
template <bool FP8> MK_DEV uint32_t mk_ldx_column(uint32_t lane, uint32_t cols)
{
    const uint32_t c = FP8 ? lane >> 2 : lane & 7;
    return c < cols ? c : 0;
}
MK_DEV float mk_lds_bf16(uint32_t at)
{
    uint16_t v;
    asm("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
    return mk_bf16_value(v);
}
/* The same address, but not before what is waited for here. */
MK_DEV uint32_t mk_after(uint32_t at)
{
    asm volatile("" : "+r"(at)::"memory");
    return at;
}

/* The weights of a tile of 16 rows and a K block, whose address for ldmatrix is `at`; rows: of the segment. */
MK_DEV void mk_tile_load(uint32_t *w, uint32_t at, uint32_t rows)
{
    mk_ldmatrix(w, at);
    mk_ldmatrix(w + 4, at + 2 * rows * 16);
}
/* Their product with right operands x: part. bf16. */
MK_DEV void mk_tile_product(float *part, const uint32_t *w, uint4 x)
{
    mk_mma_bf16_first(part, w, x.x, x.y);
    mk_mma_bf16(part, w + 4, x.z, x.w);
}
/* e4m3: w: the weights, 32 bytes of k and then the other 32; x0, x1: right operands of each. An mma.sync takes the four values of a word: which k it takes together is
 * its own affair. */
MK_DEV void mk_tile_product_fp8(float *part, const uint32_t *w, uint4 x0, uint4 x1)
{
#pragma unroll
    for (int i = 0; i < 4; i++) { /* 16 values of k */
        const uint4 x = i < 2 ? x0 : x1;
        uint32_t a[4];
        mk_fp8_open(w[2 * i], &a[0], &a[2]);
        mk_fp8_open(w[2 * i + 1], &a[1], &a[3]);
        if (i == 0)
            mk_mma_f16_first(part, a, x.x, x.y);
        else
            mk_mma_f16(part, a, i & 1 ? x.z : x.x, i & 1 ? x.w : x.y);
    }
}
/* What e4m3 tiles take of a stage, which may be filled anew as soon as it is in registers: weights and the scales of their upper and lower rows. */
template <uint32_t NT> struct mk_fp8_tiles {
    uint32_t w[NT][8];
    float f[2 * NT];
};
template <uint32_t NT> MK_DEV void mk_fp8_load(mk_fp8_tiles<NT> *t, uint32_t w, uint32_t rows, uint32_t scales, const uint32_t *c)
{
#pragma unroll
    for (uint32_t j = 0; j < NT; j++) mk_tile_load(t->w[j], w + 256 * j, rows);
#pragma unroll
    for (uint32_t i = 0; i < 2 * NT; i++) t->f[i] = mk_lds(scales + c[i]);
#pragma unroll
    for (uint32_t j = 0; j < NT; j++) /* not later */
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) mk_keep(&t->w[j][i]);
#pragma unroll
    for (uint32_t i = 0; i < 2 * NT; i++) mk_keep(&t->f[i]);
}
/* A word of each load of some tiles' weights; of scales. */
template <uint32_t N> MK_DEV uint32_t mk_words_of(const uint32_t (&w)[N][8])
{
    uint32_t all = 0;
#pragma unroll
    for (uint32_t j = 0; j < N; j++) all |= w[j][3] | w[j][7];
    return all;
}
template <uint32_t N> MK_DEV uint32_t mk_words_of(const float (&f)[N])
{
    uint32_t all = 0;
#pragma unroll
    for (uint32_t i = 0; i < N; i++) all |= __float_as_uint(f[i]);
    return all;
}
/* The warp has all that it takes of a stage. `last`: a word of what it loaded last, or of several such: loads of a warp arrive in order, but an arrival may overtake them if it does not
 * depend on what they bring; the loader would then write over what is still to be read. none: mk_lap's. */
MK_DEV void mk_stage_leave(uint32_t empty, uint32_t lane, uint32_t last = 0, uint32_t none = 0)
{
    mk_warp_arrive(empty + (last & none), lane);
}

/* Where a segment row's scale lies, from the scales of its K block on. */
MK_DEV uint32_t mk_scale_of(uint32_t i, uint32_t rows, uint32_t half, uint32_t nseg, uint32_t phase)
{
    i = min(i, rows - 1);
    const bool second = i >= half;
    return ((phase + i - (second ? half : 0)) / MK_SCALE_ROWS + (second ? nseg : 0)) * 4;
}

/* The same of the rows that a lane has of its warp's tiles, row, row + 8, row + 16 ...: two bits each, which mk_scale_place reads. A half's rows lie in two scale rows at most, so that
 * three rows are where the next one begins; nothing is asked of those behind the last. */
MK_DEV uint32_t mk_scale_from(uint32_t begin, uint32_t row)
{
    return 0x55555555u << ((min(max(begin, row), row + 8 * 2 * MK_TILES) - row + 7) >> 3) * 2;
}
MK_DEV uint32_t mk_scale_places(const mk_tile *t, uint32_t row)
{
    const uint32_t none = row + 8 * 2 * MK_TILES, half = t->halves == 2 ? t->rows / 2 : none, cut = MK_SCALE_ROWS - t->phase;
    const bool two = t->nseg > 1;
    return mk_scale_from(two ? min(cut, half) : none, row) + mk_scale_from(half, row) + mk_scale_from(two ? half + cut : none, row);
}
/* Row row + 8 i's, as mk_scale_of has it. */
MK_DEV uint32_t mk_scale_place(uint32_t places, uint32_t i)
{
    return (i ? places >> 2 * i - 2 : places << 2) & 12;
}
static_assert(MK_SIDE_ROWS <= MK_SCALE_ROWS && 2 * 2 * MK_TILES <= 16, "mk_scale_places");

/* A tile's sums: part of a K block, whose upper and lower rows have scales f0 and f1 and whose two columns n0 and n1. ONE: there is no second column. */
template <bool ONE> MK_DEV void mk_tile_add(float4 *sum, const float *part, float f0, float f1, float n0, float n1)
{
    sum->x = __fmaf_rn(part[0], f0 * n0, sum->x);
    sum->z = __fmaf_rn(part[2], f1 * n0, sum->z);
    if (ONE) return;
    sum->y = __fmaf_rn(part[1], f0 * n1, sum->y);
    sum->w = __fmaf_rn(part[3], f1 * n1, sum->w);
}

/* A warp's part of a segment's product: what does not depend on what is multiplied, nor on the number of tiles. */
typedef struct mk_way {
    uint32_t first;               /* stage: how many after the ring's next */
    uint32_t way, ways;           /* of the K blocks of a stage */
    uint32_t row0, row_at;        /* the warp's first row, and of ldmatrix, in a K block: chunk lane / 16, row lane % 16 of its first tile */
    uint32_t kb_bytes, scale_row; /* from K block to K block; from scale row to scale row */
    uint32_t places;              /* FP8: mk_scale_places */
} mk_way;
template <bool FP8> MK_DEV mk_way mk_way_of(const mk_tile *t, uint32_t at)
{
    const uint32_t rows = t->rows, warp = threadIdx.x / 32, lane = threadIdx.x % 32, member = warp % MK_GROUP_WARPS;
    mk_way w;
    w.first = (warp / MK_GROUP_WARPS - at) & (MK_GROUPS - 1);
    w.ways = mk_ways(rows);
    w.way = member & (w.ways - 1);
    w.row0 = rows > MK_SIDE_ROWS ? (member >> 1) * MK_SIDE_ROWS : 0;
    w.row_at = (lane >> 4) * rows * 16 + (w.row0 + (lane & 15)) * 16;
    w.kb_bytes = rows * MK_KBLOCK_BYTES;
    w.scale_row = (t->halves == 2 ? 8 : 4) * t->nseg;
    w.places = FP8 ? mk_scale_places(t, w.row0 + (lane >> 2)) : 0;
    return w;
}

/* Warps that begin together ask shared memory together and then multiply together, each waiting for both: the group that has the segment's second stage begins so many clocks later. (Measured
 * alone: 10 % of a product; more clocks give no more.) */
#define MK_STAGGER 128u
MK_DEV void mk_stagger(const mk_way *y)
{
    if (y->first) mk_clocks_pass(MK_STAGGER);
}

/* acc + this warp's NT tiles of the segment times the staged vector, over stages [s0, s1) of the segment, of which s0 is the ring's next and meets what
 * stands at shared address x, which says where in the staging area and so where its factors are. cols: staged rows, `stride` bytes apart.
 * ONE: cols is 1. BY_ROW: there may be a scale a row. kind: MK_FAULT_TAPE, MK_FAULT_EXPERT: whose weights these are.
 * A taken branch costs a warp some 20 clocks, a barrier's answer 50: the next stage is asked for, and where its K block is worked out, before this one's is multiplied. */
template <uint32_t FORM, uint32_t NT, bool ONE, bool BY_ROW>
MK_DEV mk_accs mk_product_as(uint32_t kind, mk_next *slot, const mk_tile *t, const mk_way *y, const mk_lap *lap, uint32_t s0, uint32_t s1, uint32_t x, uint32_t stride, uint32_t cols, uint32_t head_shift,
                             mk_accs acc)
{
    constexpr bool FP8 = FORM == MK_X_F16;
    constexpr uint32_t VALUES = FP8 ? 128 : 64; /* bytes of a staged K block */
    constexpr uint32_t U = mk_blocks_at_once(FORM, NT);
    mk_shared *sh = mk_sh();
    const uint32_t rows = t->rows, nkb = t->nkb, per = t->per, shift = t->shift, kb_bytes = y->kb_bytes, ways = y->ways, lane = threadIdx.x % 32, last_kb = min(s1 * per, nkb);
    const uint32_t column = x - s0 * per * VALUES + (ONE ? 0 : mk_ldx_column<FP8>(lane, cols)) * stride + mk_ldx_at<FP8>(lane);
    /* what a K block's products are multiplied by, in columns 2 l and 2 l + 1: of K block s0, and bytes to that of the second */
    const uint32_t l = lane & 3, norm_row = 4 * (FP8 ? stride >> 7 : MK_MAX_NORM_HEADS), n_row = min(2 * l, cols - 1), next_norm = 2 * l + 1 < cols ? norm_row : 0;
    const uint32_t norm = (FP8 ? mk_smem(sh->factor) + (x - mk_smem(sh->staging) >> 5) - 4 * s0 * per : mk_smem(sh->head_rstd)) + (ONE ? 0 : n_row * norm_row);
    uint32_t kb = (s0 + y->first) * per, turn = (s0 + y->first) / MK_GROUPS * per; /* the stage's first K block; K blocks of the partial sum before */
    uint32_t k = kb + ((y->way - turn) & (ways - 1)), end = min(kb + per, nkb);    /* the warp's, of the stage: it may have none */
    bool there = mk_mbar_test(slot->bar, slot->phase);
    const uint32_t none = lap->none;
    uint32_t c[2 * NT]; /* FP8: where the scales of the tiles' upper and lower rows are, from a scale row on */
#pragma unroll
    for (uint32_t i = 0; FP8 && i < 2 * NT; i++) {
        c[i] = (BY_ROW && t->shift == MK_SHIFT_ALL ? 4 * min(y->row0 + 8 * i + (lane >> 2), rows - 1) : mk_scale_place(y->places, i)) - lap->scales;
        mk_keep(&c[i]);
    }
    const auto next_stage = [&](uint32_t last) { /* what comes next is worked out while what was loaded is on its way */
        uint32_t empty = slot->bar + MK_EMPTY;
        mk_keep(&empty);
        mk_next_move(slot, lap);
        kb += MK_GROUPS * per;
        turn += per;
        k = kb + ((y->way - turn) & (ways - 1));
        end = min(kb + per, nkb);
        mk_keep(&slot->bar), mk_keep(&slot->stage), mk_keep(&slot->phase), mk_keep(&kb), mk_keep(&k), mk_keep(&end);
        mk_stage_leave(empty, lane, last, none);
    };

    /* a turn is gone round again by what is known before its products: whether the next stage has a K block for the warp */
    const auto goes_on = [&] {
        uint32_t on = k < end && kb < last_kb;
        mk_keep(&on);
        return on;
    };
    uint32_t on = goes_on();
#pragma unroll 1
    while (kb < last_kb) {
        if (!on) {
            mk_stage_wait(slot->bar, slot->phase, kind);
            next_stage(0);
            on = goes_on();
            there = mk_mbar_test(slot->bar, slot->phase);
            continue;
        }
#pragma unroll 1
        do {
            if (__builtin_expect(!there, 0)) mk_stage_await(slot->bar, slot->phase, kind);
            const uint32_t stage = mk_after(slot->stage), norms = mk_after(norm), w = stage + y->row_at + (k - kb) * kb_bytes, xk = mk_after(column) + k * VALUES;
            float part[U][NT][4], f[U][FP8 ? 2 * NT : 1], n0[U], n1[U];
            uint32_t a[U][NT][8];
            uint4 v[U][FP8 ? 2 : 1];
            bool has[U];
#pragma unroll
            for (uint32_t u = 0; u < U; u++) { /* whoever is not there has the first one's place and does not count */
                has[u] = !u || k + u * ways < end;
                const uint32_t to = has[u] ? u * ways : 0, wu = w + to * kb_bytes, xu = xk + to * VALUES;
#pragma unroll
                for (uint32_t j = 0; j < NT; j++) mk_tile_load(a[u][j], wu + 256 * j, rows);
                if (FP8) {
                    const uint32_t scale = stage + (k + to >> shift) * y->scale_row;
                    v[u][0] = mk_ldx_f16(xu), v[u][1] = mk_ldx_f16(xu + 64);
#pragma unroll
                    for (uint32_t i = 0; i < 2 * NT; i++) f[u][i] = mk_lds(scale + c[i]);
                } else {
                    v[u][0] = mk_ldx_bf16(xu);
                }
                n0[u] = n1[u] = 1;
                if (FP8 || head_shift != MK_NO_NORM) {
                    const uint32_t by = norms + 4 * (FP8 ? k + to : k + to >> head_shift);
                    n0[u] = mk_lds(by);
                    if (!ONE) n1[u] = mk_lds(by + next_norm);
                }
            }
            /* the stage may be filled anew as soon as all of it is in registers */
#pragma unroll
            for (uint32_t u = 0; u < U; u++) {
#pragma unroll
                for (uint32_t j = 0; j < NT; j++)
#pragma unroll
                    for (uint32_t i = 0; i < 8; i++) mk_keep(&a[u][j][i]);
#pragma unroll
                for (uint32_t i = 0; FP8 && i < 2 * NT; i++) mk_keep(&f[u][i]);
            }
            if ((k += U * ways) >= end) next_stage(a[U - 1][NT - 1][7] | a[U - 1][0][7] | (FP8 ? __float_as_uint(f[U - 1][FP8 ? 2 * NT - 1 : 0]) : 0));
            on = goes_on();
#pragma unroll
            for (uint32_t u = 0; u < U; u++)
#pragma unroll
                for (uint32_t j = 0; j < NT; j++)
                    if constexpr (FP8)
                        mk_tile_product_fp8(part[u][j], a[u][j], v[u][0], v[u][1]);
                    else
                        mk_tile_product(part[u][j], a[u][j], v[u][0]);
            there = mk_mbar_test(slot->bar, slot->phase);
#pragma unroll
            for (uint32_t u = 0; u < U; u++)
#pragma unroll
                for (uint32_t j = 0; j < NT; j++) {
                    float4 sum = acc.tile[j];
                    mk_tile_add<ONE>(&sum, part[u][j], FP8 ? f[u][FP8 ? 2 * j : 0] : 1, FP8 ? f[u][FP8 ? 2 * j + 1 : 0] : 1, n0[u], n1[u]);
                    if (has[u]) acc.tile[j] = sum;
                }
        } while (on);
    }
    slot->at += s1 - s0;
    return acc;
}
/* A warp's tiles of a segment: up to MK_TILES; with two sides all warps have so many, of which the second's last may be none. */
MK_DEV uint32_t mk_tiles_of(uint32_t rows)
{
    return (min(rows, MK_SIDE_ROWS) + 15) / 16;
}
template <uint32_t FORM, bool ONE, bool BY_ROW>
MK_DEV mk_accs mk_product_of(uint32_t kind, mk_next *slot, const mk_tile *t, uint32_t s0, uint32_t s1, uint32_t x, uint32_t stride, uint32_t cols, uint32_t head_shift, mk_accs acc)
{
    const mk_lap lap = mk_sh()->lap;
    const mk_way y = mk_way_of<FORM == MK_X_F16>(t, slot->at);
    const uint32_t tiles = mk_uniform(mk_tiles_of(t->rows));
    if (tiles == 1) return mk_product_as<FORM, 1, ONE, BY_ROW>(kind, slot, t, &y, &lap, s0, s1, x, stride, cols, head_shift, acc);
    if (tiles == 2) return mk_product_as<FORM, 2, ONE, BY_ROW>(kind, slot, t, &y, &lap, s0, s1, x, stride, cols, head_shift, acc);
    if (tiles == 3) return mk_product_as<FORM, 3, ONE, BY_ROW>(kind, slot, t, &y, &lap, s0, s1, x, stride, cols, head_shift, acc);
    return mk_product_as<FORM, 4, ONE, BY_ROW>(kind, slot, t, &y, &lap, s0, s1, x, stride, cols, head_shift, acc);
}
template <uint32_t FORM, bool BY_ROW>
MK_DEV mk_accs mk_product(uint32_t kind, mk_next *slot, const mk_tile *t, uint32_t s0, uint32_t s1, uint32_t x, uint32_t stride, uint32_t cols, uint32_t head_shift, mk_accs acc)
{
    return cols == 1 ? mk_product_of<FORM, true, BY_ROW>(kind, slot, t, s0, s1, x, stride, cols, head_shift, acc)
                     : mk_product_of<FORM, false, BY_ROW>(kind, slot, t, s0, s1, x, stride, cols, head_shift, acc);
}
MK_DEV mk_accs mk_no_sum(void)
{
    const float4 z = make_float4(0, 0, 0, 0);
    const mk_accs a = {z, z, z, z};
    return a;
}
/* The stages before `slot` lie behind us. */
MK_DEV void mk_ring_pass(const mk_dev *d, const mk_next *slot)
{
    __syncwarp();
    if (d->lane == 0) d->memo->next = *slot;
    __syncwarp();
}

#endif
