/* MLA on the device: up to 16 query heads over one split of a row's cache, on tensor cores; and what GQA_PARTIAL shares with it.
 *
 * A page of 64 tokens at a time. A warp reads, once, straight from L2 into registers, two blocks of 32 channels of all its tokens, which are keys and values. All these
 * loads are under way before the queries are there. In a step of one row pages come by bulk copies into stages of the ring of weights, where the loader puts them beside everything else
 * (mk_attend_one; kernel.cu, feed_cache), and out of these as soon as a register is free: loads that are asked for when the queries are waited for would stand in front of them. Only the page with the newest token,
 * which is written in this step, comes straight from L2 if it is an item's first. In other steps all do, the page after the next being prefetched into it by those together who read it.
 *   scores   a warp's: of its channels alone, heads by eight (the right operand; tokens are the left one's rows), into shared memory
 *   softmax  warp w has heads w and w + 8: adds the warps' scores, p = exp(s - max) rounded to bf16, a running maximum; sum p adds the same rounded p, by lanes until the end
 *   sums     the registers, transposed, times p: a warp has its own channels
 * Of a cache in FP8 (instructions/latent.h) the registers take codes and scales, and are opened to the bf16 values that these stand for, exactly, when the page's turn comes.
 * Queries lie in the staging area in bf16, a second plane (x - bf16(x)) beside those blocks that bf16 does not hold exactly. Two barriers a page.
 * Of 16 tokens a lane's row of the first tile of eight is one of the first eight, or, in every other lane, of the last eight, and then four further (mk_att_row): so stages are read.
 * The order of every sum is a function of the split alone. */
#ifndef MK_ATTENTION_CUH
#define MK_ATTENTION_CUH

#include "instructions/latent.h"
#include "instructions/matvec.cuh"

#define MK_ATT_HEADS  16u
#define MK_ATT_PAGES  256u             /* of a split */
#define MK_ATT_RING_ROPE 64u           /* rotary channels at most of a cache that comes through the ring: a warp has one block of their scores */
#define MK_ATT_LATENT (64u * MK_WARPS) /* channels of a latent at most: a warp has 64 */
#define MK_ATT_ABREAST 4u              /* tiles whose scores are worked out side by side: the products of one wait for each other */
#define MK_ATT_P_WORDS 36u             /* of a head's probabilities: 32, and rows fall into different banks */
static_assert(MK_PAGE == 64 && MK_WARPS == 8, "registers and lanes are dealt out for these");

/* One work item. */
typedef struct mk_att {
    uint32_t nk, nv;        /* values of a key: a multiple of 8; of a latent: of 32 */
    uint32_t fine;          /* first block of 32 values of a query with a second plane */
    uint32_t bytes;         /* from token to token */
    uint32_t n, heads;      /* tokens */
    float scale;
    uint32_t rest_at;       /* FP8: bytes from a token's first code to its rotated key, less 2 nv */
    uint32_t ask_at, ask;   /* what it brings of every page to L2, in bytes: items of one split share that */
    const uint8_t *base;    /* page 0's first key */
    float *dst;             /* partial of the first head; the others follow */
    uint32_t first;         /* token */
    const uint32_t *pages;  /* the split's page table */
} mk_att;

/* Shared memory: queries and their second plane in the staging area, scores behind them, this at the end of the reduction area. */
#define MK_ATT_SCORES (MK_WARPS * MK_ATT_HEADS * MK_PAGE * 4) /* bytes: a warp's channels, head, token */
typedef struct mk_att_shared {
    alignas(16) uint32_t p[MK_ATT_HEADS][MK_ATT_P_WORDS]; /* bf16, two tokens a word */
    float shrink[MK_ATT_HEADS];                           /* what earlier pages' sums are multiplied with */
    uint32_t page[MK_ATT_PAGES];                          /* of the split; in a step of one row the first, if it does not come through the ring */
    alignas(16) uint4 item[3];                            /* of mk_att: up to rest_at, base, dst */
    uint2 ask;                                            /* ask_at, ask */
    uint32_t before;                                      /* in a step of one row: pages that are not in the ring: 1 if the first is not, else 0 */
} mk_att_shared;
#define MK_ATT_ROOM (MK_STAGING + MK_RED_FLOATS * 4 - (sizeof(mk_att_shared) + 15) / 16 * 16) /* before it */
static_assert(offsetof(mk_shared, red) == offsetof(mk_shared, staging) + MK_STAGING, "one area");

/* Bytes of a plane of queries in the staging area, and of both planes. */
MK_BOTH uint32_t mk_att_plane_bytes(uint32_t blocks)
{
    return blocks * 1024;
}
MK_BOTH uint32_t mk_att_query_bytes(uint32_t nk, uint32_t fine)
{
    return mk_att_plane_bytes(2 * ((nk + 31) / 32) - fine);
}

/* Of an item: what its queries are. */
typedef struct mk_att_queries {
    uint32_t nk, fine, two; /* more than eight heads: mk_mla_eights of its row, for its last item may have fewer */
} mk_att_queries;

MK_DEV mk_att_shared *mk_att_sh(mk_shared *sh)
{
    return (mk_att_shared *)((uint8_t *)sh + offsetof(mk_shared, staging) + MK_ATT_ROOM);
}
/* The item: what it says is read where it is needed, for what does not fit the registers would come from L2; 16 bytes at a time, for each load has an address of its own. */
MK_DEV uint4 mk_att_word(mk_shared *sh, uint32_t i)
{
    return mk_lds128_still(mk_smem(&mk_att_sh(sh)->item[i]));
}
MK_DEV mk_att mk_att_numbers(mk_shared *sh)
{
    const uint4 a = mk_att_word(sh, 0), b = mk_att_word(sh, 1);
    mk_att x = {a.x, a.y, a.z, a.w, b.x, b.y, __uint_as_float(b.z), b.w, 0, 0, 0, 0, 0, 0};
    return x;
}
MK_DEV const uint8_t *mk_att_base(mk_shared *sh)
{
    const uint4 v = mk_att_word(sh, 2);
    return (const uint8_t *)((uint64_t)v.y << 32 | v.x);
}
MK_DEV float *mk_att_dst(mk_shared *sh)
{
    const uint4 v = mk_att_word(sh, 2);
    return (float *)((uint64_t)v.w << 32 | v.z);
}
/* By one thread. */
MK_DEV void mk_att_keep(mk_shared *sh, const mk_att *x)
{
    const uint64_t base = (uint64_t)x->base, dst = (uint64_t)x->dst;
    uint4 *to = mk_att_sh(sh)->item;
    to[0] = make_uint4(x->nk, x->nv, x->fine, x->bytes);
    to[1] = make_uint4(x->n, x->heads, __float_as_uint(x->scale), x->rest_at);
    to[2] = make_uint4((uint32_t)base, (uint32_t)(base >> 32), (uint32_t)dst, (uint32_t)(dst >> 32));
    mk_att_sh(sh)->ask = make_uint2(x->ask_at, x->ask);
}
/* A block of 32 values of 16 rows (heads) as two left operands of mma m16n8k16: 512 bytes each, a lane's four registers side by side. Lane (g, l) has values
 * 8 l .. 8 l + 7 of rows g and g + 8, four of them in each operand. Where value c of row h of a plane lies; an even c's neighbour follows it. */
MK_BOTH uint32_t mk_att_byte(uint32_t h, uint32_t c)
{
    return (c >> 5) * 1024 + (c & 4) * 128 + ((h & 7) * 4 + (c >> 3 & 3)) * 16 + (c & 2) * 4 + (h & 8) / 2 + (c & 1) * 2;
}
MK_DEV uint8_t *mk_att_at(uint8_t *plane, uint32_t h, uint32_t c)
{
    return plane + mk_att_byte(h, c);
}
/* Values c and c + 1 (c even) of head h, both planes. The second of up to eight heads is rows 8 to 15 of the first. */
MK_DEV void mk_att_put(uint8_t *q, const mk_att_queries *x, uint32_t h, uint32_t c, float a, float b)
{
    const uint32_t hi = mk_bf16_pair(a, b), lo = mk_bf16_pair(__fadd_rn(a, -mk_bf16_value(hi & 0xffffu)), __fadd_rn(b, -__uint_as_float(hi & 0xffff0000u)));
    uint8_t *at = mk_att_at(q, h, c);
    *(uint32_t *)at = hi;
    if (c >= 32 * x->fine) *(uint32_t *)(at + (x->two ? mk_att_plane_bytes((x->nk + 31) / 32) - 1024 * x->fine : 4)) = lo; /* mk_att_byte of c - 32 fine; of h + 8 */
}

/* Values [first, first + n) of one row of wait w (k to those who ask what is waited for) as f32 into shared memory, by thread `at` of `threads` (whole warps). It waits
 * without a call: the registers hold a page. */
MK_DEV void mk_read_of(const mk_dev *d, const mk_wait *w, uint32_t k, uint32_t row, uint32_t first, uint32_t n, float *dst, uint32_t at, uint32_t threads)
{
    const mk_vec *v = &d->sh->vec[w->vec];
    const uint16_t *start = d->sh->start + v->start_index + w->slice0;
    const uint32_t epoch = mk_wait_epoch(d, w), sp = v->slice_packets, f32 = v->dtype == MK_F32, vpp = f32 ? 3 : 6;
    const uint4 *base = mk_wait_packets(d, w, v, row);
    const uint32_t s0 = mk_find_slice(start, w->nslice, first, d->lane), end = first + n;
    const mk_divisor by = mk_div_by_slice(v);
#pragma unroll 1
    for (uint32_t i0 = at;; i0 += 2 * threads) {
        uint4 x[2];
        uint32_t from[2], to[2], index[2], more = 0;
#pragma unroll
        for (uint32_t j = 0; j < 2; j++) {
            const uint32_t i = i0 + j * threads, s = s0 + mk_quot(i, by), p = i - (s - s0) * sp;
            from[j] = to[j] = 0;
            index[j] = s * sp + p;
            x[j] = make_uint4(0, 0, 0, epoch); /* a variable that is not set on every path costs registers throughout the kernel */
            if (s >= w->nslice || start[s] >= end) continue;
            more = 1;
            from[j] = start[s] + p * vpp;
            to[j] = start[s + 1] < end ? start[s + 1] : end;
            if (from[j] >= to[j] || from[j] + vpp <= first)
                from[j] = to[j] = 0;
            else
                x[j] = mk_packet_load(base + index[j]);
        }
        if (!more) break;
        mk_packets_wait(base, index, 3u, epoch, k, row, 0, x);
#pragma unroll
        for (uint32_t j = 0; j < 2; j++) {
            const uint32_t word[3] = {x[j].x, x[j].y, x[j].z};
#pragma unroll
            for (uint32_t e = 0; e < 6; e++) {
                if (e >= vpp || from[j] + e < first || from[j] + e >= to[j]) continue;
                dst[from[j] + e - first] = f32 ? __uint_as_float(word[e % 3]) : mk_bf16_value((word[e / 2] >> (16 * (e & 1))) & 0xffffu);
            }
        }
    }
    __syncwarp();
}
MK_DEV void mk_read_together(const mk_dev *d, uint32_t k, uint32_t row, uint32_t first, uint32_t n, float *dst, uint32_t at, uint32_t threads)
{
    mk_read_of(d, &d->in->wait[k], k, row, first, n, dst, at, threads);
}

/* Values [first, first + n) of a row of a bf16 wait, by one warp: asked for, 32 packets at a time, before anything is waited for, and taken as f32 into shared memory. */
typedef struct mk_asked {
    uint4 x;
    const uint4 *at;
    uint32_t from, to, s, p; /* values that the lane's packet carries of those, none: from = to; its slice and place in it */
    bool more;               /* its slice does not begin behind them */
} mk_asked;
MK_DEV void mk_asked_at(mk_asked *k, const mk_dev *d, const mk_wait *w, const uint4 *row, uint32_t epoch, uint32_t first, uint32_t n)
{
    const mk_vec *v = &d->sh->vec[w->vec];
    const uint16_t *start = d->sh->start + v->start_index + w->slice0;
    const uint32_t sp = v->slice_packets, up = mk_quot(k->p, mk_div_by_slice(v));
    k->s += up;
    k->p -= up * sp;
    k->at = row + k->s * sp + k->p;
    k->from = k->to = first + n;
    k->x = make_uint4(0, 0, 0, epoch);
    k->more = k->s < w->nslice && start[k->s] < first + n;
    if (!k->more) return;
    k->from = start[k->s] + 6 * k->p;
    k->to = min((uint32_t)start[k->s + 1], first + n);
    if (k->from < k->to && k->from + 6 > first)
        k->x = mk_packet_load(k->at);
    else
        k->to = k->from;
}
MK_DEV void mk_asked_for(mk_asked *k, const mk_dev *d, const mk_wait *w, const uint4 *row, uint32_t epoch, uint32_t first, uint32_t n)
{
    const mk_vec *v = &d->sh->vec[w->vec];
    k->s = mk_find_slice(d->sh->start + v->start_index + w->slice0, w->nslice, first, d->lane);
    k->p = d->lane;
    mk_asked_at(k, d, w, row, epoch, first, n);
}
/* number: of the wait, for those who ask what is waited for; r: the row. */
MK_DEV void mk_asked_take(mk_asked *k, const mk_dev *d, const mk_wait *w, uint32_t number, uint32_t r, const uint4 *row, uint32_t epoch, uint32_t first, uint32_t n, float *dst)
{
#pragma unroll 1
    for (;;) {
        uint32_t looks = 0;
        while (k->x.w != epoch) {
            if (!mk_still_waiting(++looks, number, r, (uint32_t)(k->at - row), k->x.w)) break;
            k->x = mk_packet_load(k->at);
        }
        mk_waited(looks);
        const uint32_t word[3] = {k->x.x, k->x.y, k->x.z}, at = k->from - first, end = k->to - first;
#pragma unroll
        for (uint32_t e = 0; e < 6; e++)
            if (at + e < end) dst[at + e] = __uint_as_float(e & 1 ? word[e / 2] & 0xffff0000u : word[e / 2] << 16);
        if (!__shfl_sync(0xffffffffu, k->more, 31)) break;
        k->p += 32;
        mk_asked_at(k, d, w, row, epoch, first, n);
    }
    __syncwarp();
}

/* Where the keys of a page lie. */
MK_DEV const uint8_t *mk_att_page(const mk_gpu_args *a, const uint8_t *base, uint32_t id)
{
    return base + id * a->kv_page_bytes;
}

/* The largest of the warp's values, none of them NaN, in few instructions: as integers that are ordered alike. */
MK_DEV float mk_warp_top(float x)
{
    const uint32_t b = __float_as_uint(x), u = __reduce_max_sync(0xffffffffu, b ^ ((uint32_t)((int32_t)b >> 31) | 0x80000000u));
    return __uint_as_float(u ^ ((uint32_t)((int32_t)~u >> 31) | 0x80000000u));
}
/* Scores of 16 rows of queries and a tile of eight tokens over a block of 32 channels. A lane's 16 bytes of a key are channels 8 l .. 8 l + 7 of token g. */
typedef struct mk_att_left {
    uint4 x, y;
} mk_att_left;
MK_DEV mk_att_left mk_att_query(const uint8_t *q, uint32_t block)
{
    const mk_att_left u = {*(const uint4 *)(q + block * 1024), *(const uint4 *)(q + block * 1024 + 512)};
    return u;
}
MK_DEV void mk_att_half(float *c, const mk_att_left *q, uint4 k, uint32_t second)
{
    if (second)
        mk_mma(c, q->y.x, q->y.y, q->y.z, q->y.w, k.z, k.w);
    else
        mk_mma(c, q->x.x, q->x.y, q->x.z, q->x.w, k.x, k.y);
}
MK_DEV void mk_att_dot(float *c, const mk_att_left *q, uint4 k)
{
    mk_att_half(c, q, k, 0);
    mk_att_half(c, q, k, 1);
}
/* Of sums of a block of 32 channels by heads: a lane (g, l) has channels 8 (g / 2) + (g mod 2) + 0, 2 (in a) and 4, 6 (in b) of heads 2 l and 2 l + 1. Of head 2 l + j two neighbours make four
 * consecutive ones, from 4 g on. */
MK_DEV float4 mk_att_four(const float *a, const float *b, uint32_t j, uint32_t g)
{
    const float y0 = a[j], y1 = a[2 + j], y2 = b[j], y3 = b[2 + j];
    const float z0 = __shfl_xor_sync(0xffffffffu, g & 1 ? y0 : y2, 4), z1 = __shfl_xor_sync(0xffffffffu, g & 1 ? y1 : y3, 4);
    return g & 1 ? make_float4(z0, y2, z1, y3) : make_float4(y0, z0, y1, z1);
}

/* Row g of tile j is this token of the page: a lane's row of tile 0, and from there on. */
MK_DEV uint32_t mk_att_row(uint32_t g)
{
    return (g & 1) * 8 + (g >> 1);
}
MK_DEV uint32_t mk_att_further(uint32_t j)
{
    return j / 2 * 16 + (j & 1) * 4;
}
/* What a warp does of a page. Lane (g, l) has channels 8 l .. 8 l + 7 of a block of row g of each of the eight tiles of eight tokens. */
typedef struct mk_att_share {
    uint32_t warp, lane;
    uint32_t block;      /* first block of the warp */
    uint32_t pair, rest; /* the two tiles of which the warp adds the scores of every other block from `rest` on, behind the values' */
} mk_att_share;
MK_DEV mk_att_share mk_att_deal(uint32_t nv)
{
    mk_att_share w;
    const uint32_t tid = mk_tid_now(); /* worked out where it is asked for, else it would take registers throughout */
    w.lane = tid % 32;
    w.warp = tid / 32;
    w.block = w.warp * (nv > 32 * MK_WARPS ? 2 : 1);
    w.pair = w.warp & 3;
    w.rest = w.warp / 4;
    return w;
}

/* One page's registers: of blocks `block` and block + 1, by tile. */
typedef struct mk_att_regs {
    uint4 r[2][8];
} mk_att_regs;

/* Of the first block of the rest, the lane's 2 x 16 bytes wait in shared memory, where no other lane looks at them. */
#define MK_ATT_REST  (MK_COMPUTE * 32)
MK_DEV uint4 *mk_att_rest_at(mk_shared *sh)
{
    return (uint4 *)((uint8_t *)mk_att_sh(sh) - MK_ATT_REST) + threadIdx.x;
}
/* From the lane's codes of a block to their scale: 64 channels of a warp have one. */
MK_DEV uint32_t mk_att_scale(const mk_att *x, const mk_att_share *w, uint32_t l)
{
    return x->nv + w->block * 32 / MK_LATENT_GROUP * 4 - w->block * 32 - 8 * l;
}
/* Two codes, which the halves of t are with their signs before them, as bf16 times `by`, two of the same. Their four bits of exponent are bf16's, but for 120 of bias, which is in `by`; its
 * subnormals are bf16's. */
MK_DEV uint32_t mk_att_widen(uint32_t t, uint32_t by)
{
    return mk_mul_bf16(t << 4 & 0x87f087f0u, by);
}
/* Codes to the values that they stand for. scale: f32 bits of a power of two up to 2^7, or of a NaN: 0x7fc0 is the least of what is no power. */
MK_DEV uint32_t mk_att_by(uint32_t scale)
{
    return __viaddmin_u16x2(mk_bytes(scale, 0x3232), 120u << 7 | 120u << 23, 0x7fc07fc0u);
}
MK_DEV void mk_att_open(uint4 *x, uint32_t by)
{
    const uint32_t a = x->x, b = x->y;
    x->x = mk_att_widen(mk_bytes(a, 0x9180), by);
    x->y = mk_att_widen(mk_bytes(a, 0xb3a2), by);
    x->z = mk_att_widen(mk_bytes(b, 0x9180), by);
    x->w = mk_att_widen(mk_bytes(b, 0xb3a2), by);
}
/* The lane's bytes of a page's first token, of the warp's first block; the second one's follow it. The address is made here and kept. */
template <bool FP8> MK_DEV const uint8_t *mk_att_block(const uint8_t *page, const mk_att_share *w, uint32_t l)
{
    return mk_keep_at(page + (FP8 ? 1 : 2) * (w->block * 32 + 8 * l));
}
/* Whether the warp has block i. */
MK_DEV uint32_t mk_att_has(const mk_att *x, const mk_att_share *w, uint32_t i)
{
    return (w->block + i) * 32 < x->nv && !(i && x->nv <= 32 * MK_WARPS); /* a single block */
}
template <bool FP8> MK_DEV uint32_t mk_att_rest(const mk_att *x, uint32_t block, uint32_t l, bool *has)
{
    const uint32_t c = block * 32 + 8 * l;
    *has = c < x->nk;
    return FP8 ? c * 2 + x->rest_at : c * 2; /* the sum wraps: rest_at may stand for less than nothing */
}
/* Row g of tile j. Beyond the last token: the last one's, p is zero there. */
MK_DEV const uint8_t *mk_att_token(const uint8_t *at, uint32_t j, uint32_t g, uint32_t tokens, uint32_t bytes)
{
    return at + (uint64_t)min(mk_att_row(g) + mk_att_further(j), tokens - 1) * bytes; /* one instruction */
}
/* Tile j of the blocks that the warp has; of others the registers stay. FP8: 8 codes in x and y, and in z of the first block the scale of both, `scale` bytes on. */
template <bool FP8> MK_DEV void mk_att_tile(mk_att_regs *m, uint32_t j, const uint8_t *at, uint32_t g, uint32_t tokens, uint32_t bytes, uint32_t scale, uint32_t has0, uint32_t has1)
{
    at = mk_att_token(at, j, g, tokens, bytes);
    if (FP8) {
        mk_ask_8(&m->r[0][j], at, has0);
        mk_ask_4(&m->r[0][j].z, at + scale, has0);
        mk_ask_8(&m->r[1][j], at + 32, has1);
    } else {
        mk_ask_16(&m->r[0][j], at, has0);
        mk_ask_16(&m->r[1][j], at + 64, has1);
    }
}
template <bool FP8> MK_DEV void mk_att_load(mk_att_regs *m, const uint8_t *page, const mk_att *x, const mk_att_share *w, uint32_t tokens, uint32_t lane)
{
    const uint32_t g = lane >> 2, l = lane & 3, scale = FP8 ? mk_att_scale(x, w, l) : 0, has0 = mk_att_has(x, w, 0), has1 = mk_att_has(x, w, 1);
    const uint8_t *at = mk_att_block<FP8>(page, w, l);
#pragma unroll
    for (uint32_t j = 0; j < 8; j++) m->r[0][j] = m->r[1][j] = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (uint32_t j = 0; j < 8; j++) mk_att_tile<FP8>(m, j, at, g, tokens, x->bytes, scale, has0, has1);
}
/* The rest, block `block`: into registers, or the first one ahead of time into shared memory. */
template <bool FP8> MK_DEV void mk_att_load_rest(uint4 *to, const uint8_t *page, const mk_att *x, const mk_att_share *w, uint32_t block, uint32_t tokens)
{
    bool has;
    const uint8_t *at = page + mk_att_rest<FP8>(x, block, w->lane & 3, &has);
#pragma unroll
    for (uint32_t j = 0; j < 2; j++) {
        to[j] = make_uint4(0, 0, 0, 0);
        mk_ask_16(&to[j], mk_att_token(at, 2 * w->pair + j, w->lane >> 2, tokens, x->bytes), has);
    }
}
template <bool FP8> MK_DEV void mk_att_fetch_rest(mk_shared *sh, const uint8_t *page, const mk_att *x, const mk_att_share *w, uint32_t tokens)
{
    bool has;
    const uint8_t *at = page + mk_att_rest<FP8>(x, x->nv / 32 + w->rest, w->lane & 3, &has);
#pragma unroll
    for (uint32_t j = 0; j < 2; j++)
        mk_fetch_16(mk_att_rest_at(sh) + j * MK_COMPUTE, mk_att_token(at, 2 * w->pair + j, w->lane >> 2, tokens, x->bytes), has);
}

/* What mk_att_fetch_rest has asked for; a warp without a block, too: its zeros were asked for. */
MK_DEV void mk_att_fetched_rest(uint4 *rest, mk_shared *sh)
{
    mk_fetched();
    rest[0] = mk_att_rest_at(sh)[0], rest[1] = mk_att_rest_at(sh)[MK_COMPUTE];
}
/* Where the lane's scores of tile 0 go, of an item's `heads`: 8 or 16. Tokens of a head in another order, so that banks differ: tile ^ (head mod 8). A head's scores begin at a multiple of their
 * size: tile k's place is tile 0's ^ 32 k. */
MK_DEV uint32_t mk_att_scores_at(const mk_shared *sh, const mk_att *x, const mk_att_share *w, uint32_t heads)
{
    static_assert((MK_DYNAMIC_AT + offsetof(mk_shared, staging)) % (4 * MK_PAGE) == 0 && MK_PAGE == 64, "256 bytes");
    const uint32_t g = w->lane >> 2, l = w->lane & 3;
    return mk_smem(sh->staging) + mk_att_query_bytes(x->nk, x->fine) + (w->warp * heads + g) * MK_PAGE * 4 + 32 * g + 8 * l;
}

/* ---- pages out of the ring ------------------------------------------------------------------------------------------ */

static_assert(MK_PAGE / MK_CACHE_STAGES == 16, "two tiles a stage, a turn of the sums' loop");
/* The lane's row of a stage's first tile, in bytes; the second's is four tokens further. */
MK_DEV uint32_t mk_att_stage_row(uint32_t g, uint32_t bytes)
{
    return mk_att_row(g) * bytes + (g & 1) * MK_CACHE_SKEW;
}
/* And the lane's bytes there, of the warp's first block. */
template <bool FP8> MK_DEV uint32_t mk_att_stage_own(const mk_att *x, const mk_att_share *w)
{
    return mk_att_stage_row(w->lane >> 2, x->bytes) + (FP8 ? 1 : 2) * (w->block * 32 + 8 * (w->lane & 3));
}
/* A slot's other stages belong to one group of warps, and these are everybody's. A phase of such a barrier that a warp has not seen might be taken for one two before: but behind a barrier of all
 * compute warps every earlier stage is known to have been full, by those whose it was, and there is one between a product and this. */
MK_DEV void mk_att_stages_await(const mk_shared *sh, uint32_t stage)
{
    uint32_t there = 1;
#pragma unroll
    for (uint32_t k = 0; k < MK_CACHE_STAGES; k++) there &= mk_mbar_test(mk_stage_bar(sh, stage + k), mk_stage_parity(stage + k));
    if (there) return;
#pragma unroll 1
    for (uint32_t k = 0; k < MK_CACHE_STAGES; k++) mk_stage_wait(mk_stage_bar(sh, stage + k), mk_stage_parity(stage + k), MK_FAULT_CACHE);
}
/* All warps have all that they take of them: each leaves those of its group. */
MK_DEV void mk_att_stages_leave(const mk_shared *sh, uint32_t stage, uint32_t warp, uint32_t lane)
{
    stage += mk_group_first(warp, stage);
#pragma unroll
    for (uint32_t k = 0; k < MK_CACHE_STAGES; k += MK_GROUPS)
        if (mk_arrives(lane)) mk_mbar_arrive(mk_stage_bar(sh, stage + k) + MK_EMPTY);
}
/* mk_att_tile's, always of two blocks: those that the warp does not have are cleared when the page's turn comes (mk_att_clear), for a load with a condition keeps the registers from others until then.
 * at: the lane's bytes of its token, of the block that mk_att_own says. */
template <bool FP8> MK_DEV void mk_att_ring_tile(mk_att_regs *m, uint32_t j, uint32_t at, uint32_t scale)
{
    if (FP8) {
        mk_lds64(&m->r[0][j].x, &m->r[0][j].y, at);
        m->r[0][j].z = mk_lds32(at + scale);
        mk_lds64(&m->r[1][j].x, &m->r[1][j].y, at + 32);
    } else {
        m->r[0][j] = mk_lds128(at);
        m->r[1][j] = mk_lds128(at + 64);
    }
}
/* A warp without a block reads the first, so that everybody reads within the stage. */
MK_DEV mk_att_share mk_att_own(const mk_att *x, mk_att_share w)
{
    if (!mk_att_has(x, &w, 0)) w.block = 0;
    return w;
}
/* Blocks that the warp does not have are zeros. A latent of MK_ATT_LATENT channels has them all. */
MK_DEV void mk_att_clear(mk_att_regs *m, const mk_att *x, const mk_att_share *w)
{
    if (x->nv == MK_ATT_LATENT) return;
    const uint32_t has0 = mk_att_has(x, w, 0), has1 = mk_att_has(x, w, 1);
#pragma unroll
    for (uint32_t j = 0; j < 8; j++) {
        if (!has0) m->r[0][j] = make_uint4(0, 0, 0, 0);
        if (!has1) m->r[1][j] = make_uint4(0, 0, 0, 0);
    }
}
/* mk_att_load_rest's of a page whose first stage is `stage`: the tokens of the warp's pair of tiles are one. */
template <bool FP8> MK_DEV void mk_att_ring_rest(uint4 *to, const mk_shared *sh, const mk_att *x, const mk_att_share *w, uint32_t stage)
{
    bool has;
    const uint32_t at = mk_stage_at(sh, stage + w->pair) + mk_att_stage_row(w->lane >> 2, x->bytes) + mk_att_rest<FP8>(x, x->nv / 32 + w->rest, w->lane & 3, &has);
#pragma unroll
    for (uint32_t j = 0; j < 2; j++) {
        to[j] = make_uint4(0, 0, 0, 0);
        mk_lds128(&to[j], at + j * 4 * x->bytes, has);
    }
}

/* ---- an item -------------------------------------------------------------------------------------------------------- */

/* What it comes to. NH: heads by eight. */
template <uint32_t NH> struct mk_att_sums {
    float acc[2][2][NH][4]; /* the warp's blocks, halves of their channels (mk_att_four), heads */
    float top[NH], sum[NH]; /* of the warp's heads: the largest score so far, the lane's part of sum p */
};
template <uint32_t NH> MK_DEV void mk_att_none(mk_att_sums<NH> *y)
{
#pragma unroll
    for (uint32_t n = 0; n < NH; n++) y->top[n] = -INFINITY, y->sum[n] = 0;
#pragma unroll
    for (uint32_t n = 0; n < NH; n++)
#pragma unroll
        for (uint32_t i = 0; i < 2; i++)
#pragma unroll
            for (uint32_t k = 0; k < 8; k++) y->acc[i][k / 4][n][k % 4] = 0;
}
MK_DEV void mk_att_open_page(mk_att_regs *m)
{
#pragma unroll
    for (uint32_t j = 0; j < 8; j++) {
        const uint32_t by = mk_att_by(m->r[0][j].z);
        mk_att_open(&m->r[0][j], by);
        mk_att_open(&m->r[1][j], by);
    }
}
/* Of the warp's blocks: scores of MK_ATT_ABREAST tiles from k0 on. */
MK_DEV void mk_att_products(float (*c)[4], const mk_att_left *u0, const mk_att_left *u1, const mk_att_regs *m, uint32_t k0)
{
#pragma unroll
    for (uint32_t k = 0; k < MK_ATT_ABREAST; k++) c[k][0] = c[k][1] = c[k][2] = c[k][3] = 0;
#pragma unroll
    for (uint32_t part = 0; part < 4; part++)
#pragma unroll
        for (uint32_t k = 0; k < MK_ATT_ABREAST; k++) mk_att_half(c[k], part < 2 ? u0 : u1, m->r[part / 2][k0 + k], part & 1);
}
/* And of the rest: block by block, of two tiles. */
template <uint32_t NH> MK_DEV void mk_att_rest_products(float (*e)[4], const mk_att_left *u, const uint4 *rest)
{
#pragma unroll
    for (uint32_t part = 0; part < 2 * NH; part++)
#pragma unroll
        for (uint32_t j = 0; j < 2; j++) mk_att_half(e[j], &u[part / 2], rest[j], part & 1);
}
/* A tile's, at shared address `to`. */
template <uint32_t NH> MK_DEV void mk_att_put_scores(uint32_t to, const float *c)
{
    mk_sts64(to, __float_as_uint(c[0]), __float_as_uint(c[1]));
    if (NH > 1) mk_sts64(to + 8 * MK_PAGE * 4, __float_as_uint(c[2]), __float_as_uint(c[3]));
}
/* All warps' scores of a lane's two tokens, added up: in c[0]. */
MK_DEV void mk_att_add(float2 *c)
{
#pragma unroll
    for (uint32_t k = MK_WARPS / 2; k; k >>= 1)
#pragma unroll
        for (uint32_t j = 0; j < k; j++) c[j].x = __fadd_rn(c[j].x, c[j + k].x), c[j].y = __fadd_rn(c[j].y, c[j + k].y);
}
/* From there to p. left: tokens from the page's first on. */
MK_DEV void mk_att_weigh(mk_att_shared *s, float *top, float *sum, float2 c, float scale, uint32_t h, uint32_t lane, uint32_t left)
{
    const uint32_t t = lane / 8 * 16 + lane % 8; /* a lane has rows 2 lane and 2 lane + 1, counted through the tiles: tokens t and t + 8 */
    const float a = t < left ? __fmul_rn(c.x, scale) : -INFINITY, b = t + 8 < left ? __fmul_rn(c.y, scale) : -INFINITY, before = *top;
    *top = fmaxf(mk_warp_top(fmaxf(a, b)), before);
    const uint32_t p = mk_bf16_pair(mk_exp_fast(a - *top), mk_exp_fast(b - *top));
    const float shrink = mk_exp_fast(before - *top);
    s->p[h][lane] = p;
    if (lane == 0) s->shrink[h] = shrink;
    *sum = __fmaf_rn(*sum, shrink, __fadd_rn(mk_bf16_value(p & 0xffffu), __uint_as_float(p & 0xffff0000u)));
}
template <uint32_t NH> MK_DEV void mk_att_shrink(const mk_att_shared *s, mk_att_sums<NH> *y, uint32_t l)
{
#pragma unroll
    for (uint32_t n = 0; n < NH; n++) {
        const float2 shrink = *(const float2 *)&s->shrink[n * 8 + 2 * l];
#pragma unroll
        for (uint32_t i = 0; i < 2; i++)
#pragma unroll
            for (uint32_t k = 0; k < 8; k++) y->acc[i][k / 4][n][k % 4] = __fmul_rn(y->acc[i][k / 4][n][k % 4], k & 1 ? shrink.y : shrink.x);
    }
}
/* Two tiles of a block as left operands, one's tokens behind the other's: of a lane's first two words, and of its last two. */
MK_DEV void mk_att_turn(uint4 *f, uint4 a, uint4 b)
{
    f[0] = make_uint4(mk_turn(a.x), mk_turn(a.y), mk_turn(b.x), mk_turn(b.y));
    f[1] = make_uint4(mk_turn(a.z), mk_turn(a.w), mk_turn(b.z), mk_turn(b.w));
}
/* These, of block i, times p of tiles 2 k and 2 k + 1. */
template <uint32_t NH> MK_DEV void mk_att_sum(const mk_att_shared *s, mk_att_sums<NH> *y, uint32_t i, const uint4 *f, uint32_t k, uint32_t lane)
{
    const uint32_t *p = &s->p[lane >> 2][(lane & 3) + 8 * k];
#pragma unroll
    for (uint32_t n = 0; n < NH; n++) {
        const uint32_t p0 = p[n * 8 * MK_ATT_P_WORDS], p1 = p[n * 8 * MK_ATT_P_WORDS + 4];
#pragma unroll
        for (uint32_t j = 0; j < 2; j++) mk_mma(y->acc[i][j][n], f[j].x, f[j].y, f[j].z, f[j].w, p0, p1);
    }
}
/* An item's partials. */
template <uint32_t NH> MK_DEV void mk_att_store(mk_shared *sh, const mk_att_sums<NH> *y)
{
    const mk_att x = mk_att_numbers(sh);
    const mk_att_share w = mk_att_deal(x.nv);
    const uint32_t group = w.lane >> 2, l = w.lane & 3, floats = x.nv + 4, c = w.block * 32 + 4 * group;
    float *dst = mk_att_dst(sh);
#pragma unroll
    for (uint32_t n = 0; n < NH; n++) {
        const uint32_t h = n * 8 + w.warp;
        const float all = mk_warp_sum(y->sum[n]);
        if (w.lane == n && h < x.heads) __stcg((float2 *)(dst + (h * floats + x.nv)), make_float2(y->top[n], all));
    }
    dst += 2 * l * floats + c;
#pragma unroll
    for (uint32_t n = 0; n < NH; n++)
#pragma unroll
        for (uint32_t j = 0; j < 2; j++) {
            float *const to = dst + (n * 8 + j) * floats;
#pragma unroll
            for (uint32_t i = 0; i < 2; i++) {
                const float4 z = mk_att_four(y->acc[i][0][n], y->acc[i][1][n], j, group);
                if (n * 8 + 2 * l + j < x.heads && c + 32 * i < x.nv && (!i || x.nv > 32 * MK_WARPS)) __stcg((float4 *)(to + 32 * i), z);
            }
        }
}

/* A row's item in a step of several: it and its queries stand in shared memory, its first page in registers, opened: already out of FP8. */
template <uint32_t NH, bool FP8> MK_DEV void mk_attend(mk_shared *sh, mk_att_regs *m, bool opened)
{
    constexpr uint32_t H = 8 * NH;
    mk_att_shared *s = mk_att_sh(sh);
    mk_att_sums<NH> y;
    mk_att_none<NH>(&y);
    uint32_t number = 0;
#pragma unroll 1
    for (;; number++) {
        { /* scores */
            const mk_att x = mk_att_numbers(sh);
            const uint32_t nk = x.nk, fine = x.fine, blocks = (nk + 31) / 32, left = x.n - number * MK_PAGE;
            const mk_att_share w = mk_att_deal(x.nv);
            const uint32_t tokens = min(left, (uint32_t)MK_PAGE), b0 = x.nv / 32 + w.rest;
            const uint8_t *q = sh->staging + w.lane * 16, *qf = q + mk_att_plane_bytes(blocks) - mk_att_plane_bytes(fine); /* the second plane, had block 0 one */
            if (left > 2 * MK_PAGE && threadIdx.x == 0) mk_bulk_prefetch(mk_att_page(&sh->args, mk_att_base(sh), s->page[number + 2]) + s->ask.x, s->ask.y);
            uint4 rest[2] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
            if (NH > 1) mk_att_load_rest<FP8>(rest, mk_att_page(&sh->args, mk_att_base(sh), s->page[number]), &x, &w, b0, tokens); /* no room in shared memory */
            const mk_att_left u0 = mk_att_query(q, w.block < blocks ? w.block : 0);
            const mk_att_left u1 = mk_att_query(q, w.block + 1 < blocks ? w.block + 1 : 0);
            if (FP8 && !(opened && !number)) mk_att_open_page(m);
            const uint32_t to = mk_att_scores_at(sh, &x, &w, H);
#pragma unroll
            for (uint32_t k0 = 0; k0 < 8; k0 += MK_ATT_ABREAST) {
                float c[MK_ATT_ABREAST][4];
                mk_att_products(c, &u0, &u1, m, k0);
#pragma unroll
                for (uint32_t k = 0; k < MK_ATT_ABREAST; k++) mk_att_put_scores<NH>(to ^ 32 * (k0 + k), c[k]);
            }
            { /* the rest, on top of what the lane wrote: registers are for what goes from row to row */
                float e[2][4] = {};
                float2 z[2], z8[2];
#pragma unroll
                for (uint32_t j = 0; j < 2; j++) {
                    z[j] = mk_lds64(to ^ 32 * (2 * w.pair + j));
                    if (NH > 1) z8[j] = mk_lds64((to ^ 32 * (2 * w.pair + j)) + 8 * MK_PAGE * 4);
                }
                if (NH == 1) mk_att_fetched_rest(rest, sh);
#pragma unroll 1
                for (uint32_t b = b0; b < blocks; b += 2) {
                    if (b != b0) mk_att_load_rest<FP8>(rest, mk_att_page(&sh->args, mk_att_base(sh), s->page[number]), &x, &w, b, tokens); /* more than 64 rotary channels */
                    mk_att_left u[NH];
#pragma unroll
                    for (uint32_t n = 0; n < NH; n++) u[n] = mk_att_query(n ? qf : q, b);
                    mk_att_rest_products<NH>(e, u, rest);
                }
#pragma unroll
                for (uint32_t j = 0; j < 2; j++) {
                    const uint32_t t = to ^ 32 * (2 * w.pair + j), t8 = t + 8 * MK_PAGE * 4;
                    if (NH == 1) e[j][0] = __fadd_rn(e[j][0], e[j][2]), e[j][1] = __fadd_rn(e[j][1], e[j][3]);
                    mk_sts64(t, __float_as_uint(__fadd_rn(z[j].x, e[j][0])), __float_as_uint(__fadd_rn(z[j].y, e[j][1])));
                    if (NH > 1) mk_sts64(t8, __float_as_uint(__fadd_rn(z8[j].x, e[j][2])), __float_as_uint(__fadd_rn(z8[j].y, e[j][3])));
                }
            }
        }
        const mk_att x = mk_att_numbers(sh); /* before the barrier, behind which everybody would wait for it */
        { /* softmax */
            const mk_att_share w = mk_att_deal(0);
            mk_sync();
            const float *score = (const float *)(sh->staging + mk_att_query_bytes(x.nk, x.fine));
#pragma unroll
            for (uint32_t n = 0; n < NH; n++) {
                const uint32_t h = n * 8 + w.warp;
                if (h >= x.heads) continue;
                const float *from = score + h * MK_PAGE + (2 * w.lane ^ (h & 7) * 8);
                float2 c[MK_WARPS];
#pragma unroll
                for (uint32_t k = 0; k < MK_WARPS; k++) c[k] = *(const float2 *)(from + k * H * MK_PAGE);
                mk_att_add(c);
                mk_att_weigh(s, &y.top[n], &y.sum[n], c[0], x.scale, h, w.lane, x.n - number * MK_PAGE);
            }
        }
        const uint32_t left = x.n - number * MK_PAGE, next_tokens = min(left - min(left, (uint32_t)MK_PAGE), (uint32_t)MK_PAGE);
        { /* sums */
            const mk_att_share w = mk_att_deal(x.nv);
            mk_sync();
            const uint32_t g = w.lane >> 2, l = w.lane & 3, scale = FP8 ? mk_att_scale(&x, &w, l) : 0, has0 = mk_att_has(&x, &w, 0), has1 = mk_att_has(&x, &w, 1);
            const uint8_t *next = 0, *at = 0;
            if (next_tokens) {
                next = mk_att_page(&sh->args, mk_att_base(sh), s->page[number + 1]);
                at = mk_att_block<FP8>(next, &w, l);
            }
            if (number) mk_att_shrink<NH>(s, &y, l);
#pragma unroll
            for (uint32_t k = 0; k < 4; k++) {
#pragma unroll
                for (uint32_t i = 0; i < 2; i++) {
                    uint4 f[2];
                    mk_att_turn(f, m->r[i][2 * k], m->r[i][2 * k + 1]);
                    mk_att_sum<NH>(s, &y, i, f, k, w.lane);
                }
                if (next_tokens)
#pragma unroll
                    for (uint32_t j = 2 * k; j < 2 * k + 2; j++) mk_att_tile<FP8>(m, j, at, g, next_tokens, x.bytes, scale, has0, has1);
            }
            if (NH == 1 && next_tokens) mk_att_fetch_rest<FP8>(sh, next, &x, &w, next_tokens);
        }
        if (!next_tokens) break;
    }
    mk_att_store<NH>(sh, &y);
}

/* The item of a step's only row: the same bits, with its pages out of the ring but for the first, if mk_att_shared.before says so. What is the same for every page is worked out once, the rest's
 * scores are added in registers, and the warp's heads are weighed side by side, be they the item's or not. */
template <uint32_t NH, bool FP8> MK_DEV void mk_attend_one(mk_shared *sh, mk_att_regs *m)
{
    constexpr uint32_t H = 8 * NH;
    mk_att_shared *s = mk_att_sh(sh);
    mk_att_sums<NH> y;
    mk_att_none<NH>(&y);
    const uint32_t before = s->before, first = sh->memo[threadIdx.x / 32].next.at - before * MK_CACHE_STAGES; /* page `number` begins with stage first + number * MK_CACHE_STAGES */
    uint32_t q[2], qr[NH], to, from, left, number = 0; /* in the staging area: queries of the warp's blocks, of the rest's by planes. Shared addresses: of scores to be stored and to be added */
    {
        const mk_att x = mk_att_numbers(sh);
        const mk_att_share w = mk_att_deal(x.nv);
        const uint32_t blocks = (x.nk + 31) / 32, b0 = x.nv / 32 + w.rest, own = w.lane * 16; /* who has no block has zeros, which are multiplied with numbers */
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) q[i] = own + (w.block + i < blocks ? w.block + i : 0) * 1024;
#pragma unroll
        for (uint32_t n = 0; n < NH; n++) qr[n] = own + (b0 < blocks ? b0 * 1024 + (n ? mk_att_plane_bytes(blocks - x.fine) : 0) : 0);
        to = mk_att_scores_at(sh, &x, &w, H);
        from = mk_smem(sh->staging) + mk_att_query_bytes(x.nk, x.fine) + (w.warp * MK_PAGE + (2 * w.lane ^ w.warp * 8)) * 4;
        left = x.n;
    }
#pragma unroll 1
    for (;; number++, left -= MK_PAGE) {
        const bool ringed = number >= before;
        { /* scores */
            const mk_att x = mk_att_numbers(sh);
            const mk_att_share w = mk_att_deal(x.nv);
            uint4 rest[2];
            if (ringed)
                mk_att_ring_rest<FP8>(rest, sh, &x, &w, first + number * MK_CACHE_STAGES);
            else if (NH > 1)
                mk_att_load_rest<FP8>(rest, mk_att_page(&sh->args, mk_att_base(sh), s->page[0]), &x, &w, x.nv / 32 + w.rest, min(left, (uint32_t)MK_PAGE));
            else
                mk_att_fetched_rest(rest, sh);
            mk_att_clear(m, &x, &w);
            if (FP8) mk_att_open_page(m);
            mk_att_left u[NH];
            float e[2][4] = {};
#pragma unroll
            for (uint32_t n = 0; n < NH; n++) u[n] = mk_att_query(sh->staging + qr[n], 0);
            mk_att_rest_products<NH>(e, u, rest);
#pragma unroll
            for (uint32_t j = 0; j < 2; j++)
                if (NH == 1) e[j][0] = __fadd_rn(e[j][0], e[j][2]), e[j][1] = __fadd_rn(e[j][1], e[j][3]);
            const mk_att_left u0 = mk_att_query(sh->staging + q[0], 0), u1 = mk_att_query(sh->staging + q[1], 0);
#pragma unroll
            for (uint32_t k0 = 0; k0 < 8; k0 += MK_ATT_ABREAST) {
                float c[MK_ATT_ABREAST][4];
                mk_att_products(c, &u0, &u1, m, k0);
#pragma unroll
                for (uint32_t k = 0; k < MK_ATT_ABREAST; k++) {
                    const bool own = w.pair == (k0 + k) / 2;
#pragma unroll
                    for (uint32_t i = 0; i < 2 * NH; i++) c[k][i] = own ? __fadd_rn(c[k][i], e[k & 1][i]) : c[k][i];
                    mk_att_put_scores<NH>(to ^ 32 * (k0 + k), c[k]);
                }
            }
        }
        const mk_att x = mk_att_numbers(sh); /* before the barrier, behind which everybody would wait for it */
        const mk_att_share w = mk_att_deal(x.nv), block = mk_att_own(&x, w);
        const uint32_t scale = FP8 ? mk_att_scale(&x, &block, w.lane & 3) : 0;
        const bool more = left > MK_PAGE;
        uint32_t stage[MK_CACHE_STAGES] = {}, there = 1; /* of the next page: the lane's bytes there */
        uint4 f[2][4][2];                           /* this one's values */
        { /* softmax */
            mk_sync();
            if (ringed) mk_att_stages_leave(sh, first + number * MK_CACHE_STAGES, w.warp, w.lane);
            float2 c[NH][MK_WARPS];
#pragma unroll
            for (uint32_t n = 0; n < NH; n++)
#pragma unroll
                for (uint32_t k = 0; k < MK_WARPS; k++) c[n][k] = mk_lds64(from + (n * 8 + k * H) * MK_PAGE * 4);
            if (more) {
                const uint32_t next = first + (number + 1) * MK_CACHE_STAGES, own = mk_att_stage_own<FP8>(&x, &block);
#pragma unroll
                for (uint32_t k = 0; k < MK_CACHE_STAGES; k++) {
                    stage[k] = mk_stage_at(sh, next + k) + own;
                    there &= mk_mbar_test(mk_stage_bar(sh, next + k), mk_stage_parity(next + k));
                }
            }
#pragma unroll
            for (uint32_t k = 0; k < 4; k++)
#pragma unroll
                for (uint32_t i = 0; i < 2; i++) mk_att_turn(f[i][k], m->r[i][2 * k], m->r[i][2 * k + 1]);
#pragma unroll
            for (uint32_t n = 0; n < NH; n++) mk_att_add(c[n]);
#pragma unroll
            for (uint32_t n = 0; n < NH; n++) mk_att_weigh(s, &y.top[n], &y.sum[n], c[n][0], x.scale, n * 8 + w.warp, w.lane, left);
        }
        /* sums */
        mk_sync();
        if (!there) mk_att_stages_await(sh, first + (number + 1) * MK_CACHE_STAGES);
        mk_att_shrink<NH>(s, &y, w.lane & 3); /* of the first page: zeros */
        if (!more) {
#pragma unroll
            for (uint32_t k = 0; k < 4; k++)
#pragma unroll
                for (uint32_t i = 0; i < 2; i++) mk_att_sum<NH>(s, &y, i, f[i][k], k, w.lane);
            break;
        }
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
#pragma unroll
            for (uint32_t i = 0; i < 2; i++) mk_att_sum<NH>(s, &y, i, f[i][k], k, w.lane);
            mk_att_ring_tile<FP8>(m, 2 * k, stage[k], scale);
            mk_att_ring_tile<FP8>(m, 2 * k + 1, stage[k] + 4 * x.bytes, scale);
        }
    }
    const mk_att_share w = mk_att_deal(0);
    if (number >= before) mk_stages_pass(sh, w.warp, w.lane, (number + 1 - before) * MK_CACHE_STAGES);
    mk_att_store<NH>(sh, &y);
}

/* The first of a part's items of some rows, before whose items `base` others went to the parts in turn, counted modulo these. */
MK_DEV uint32_t mk_first_item(uint32_t part, uint32_t parts, uint32_t base)
{
    return part >= base ? part - base : part + parts - base;
}
/* Whether any of a stream's tokens before `end` is of this step, of which `row` is row r: those before it are the tokens before, or another stream's. */
MK_DEV bool mk_has_fresh(const mk_row *row, uint32_t r, uint32_t end)
{
    return end + r > row->pos;
}

/* A BULK vector, wait k: every warp waits for itself, without a barrier and without a call. Then loads that bypass L1 may read the vector. */
MK_DEV void mk_counter_wait(const mk_dev *d, uint32_t k)
{
    const mk_wait *w = &d->in->wait[k];
    const mk_vec *v = &d->sh->vec[w->vec];
    const uint32_t target = mk_counter_target(v, d->step->seq, w->pub), *counter = d->a->counter + v->counter;
    uint32_t found = 0, looks = 0;
    if (d->lane == 0) {
        while ((int32_t)((found = mk_load_acquire(counter)) - target) < 0)
            if (!mk_still_waiting(++looks, k, 0, 0, found)) break;
        mk_waited(looks);
    }
    __syncwarp();
}

/* Before an item's queries: the cache is waited for, if it is given, the scratch is free again, its first page is on its way into registers, its second into L2. */
template <uint32_t NH, bool FP8> MK_DEV void mk_att_begin(const mk_dev *d, const mk_att *x, const mk_att_share *w, const mk_wait *cache, mk_att_regs *m)
{
    mk_att_shared *s = mk_att_sh(d->sh);
    const uint32_t *page = x->pages, n = (x->n + MK_PAGE - 1) / MK_PAGE;
    const uint32_t id0 = __ldcg(page), id1 = __ldcg(page + (n > 1)), id = __ldcg(page + (d->tid < n ? d->tid : 0));
    if (cache) mk_counter_wait(d, (uint32_t)(cache - d->in->wait));
    mk_att_load<FP8>(m, mk_att_page(d->a, x->base, id0), x, w, min(x->n, (uint32_t)MK_PAGE), d->lane);
    mk_sync();
    if (NH == 1) mk_att_fetch_rest<FP8>(d->sh, mk_att_page(d->a, x->base, id0), x, w, min(x->n, (uint32_t)MK_PAGE));
    if (d->tid < n) s->page[d->tid] = id;
    if (d->tid == 0) mk_att_keep(d->sh, x);
    if (n > 1 && d->tid == 0) mk_bulk_prefetch(mk_att_page(d->a, x->base, id1) + x->ask_at, x->ask);
    mk_trace_bytes(d, x->n * x->bytes);
}

/* The same in a step of one row: the cache is not waited for (mla_partial.cuh); loads bypass L1. ringed: the first page comes through the ring, as all others do; else its id is id0. */
template <uint32_t NH, bool FP8> MK_DEV void mk_att_begin_one(const mk_dev *d, const mk_att *x, const mk_att_share *w, uint32_t id0, bool ringed, mk_att_regs *m)
{
    const uint32_t g = w->lane >> 2, l = w->lane & 3, scale = FP8 ? mk_att_scale(x, w, l) : 0, has0 = mk_att_has(x, w, 0), has1 = mk_att_has(x, w, 1);
#pragma unroll
    for (uint32_t j = 0; j < 8; j++) m->r[0][j] = m->r[1][j] = make_uint4(0, 0, 0, 0); /* here: registers that only one of the ways below sets are kept twice */
    if (!ringed) {
        const uint8_t *at = mk_att_block<FP8>(mk_att_page(d->a, x->base, id0), w, l);
#pragma unroll
        for (uint32_t j = 0; j < 8; j++) mk_att_tile<FP8>(m, j, at, g, min(x->n, (uint32_t)MK_PAGE), x->bytes, scale, has0, has1);
    }
    mk_sync();
    if (ringed) {
        const mk_att_share block = mk_att_own(x, *w);
        const uint32_t stage = d->memo->next.at, own = mk_att_stage_own<FP8>(x, &block), from = FP8 ? mk_att_scale(x, &block, l) : 0;
        mk_att_stages_await(d->sh, stage);
#pragma unroll
        for (uint32_t j = 0; j < 8; j++) mk_att_ring_tile<FP8>(m, j, mk_stage_at(d->sh, stage + j / 2) + own + j % 2 * 4 * x->bytes, from);
    } else if (NH == 1) {
        mk_att_fetch_rest<FP8>(d->sh, mk_att_page(d->a, x->base, id0), x, w, min(x->n, (uint32_t)MK_PAGE));
    }
    if (d->tid == 0) mk_att_keep(d->sh, x), mk_att_sh(d->sh)->page[0] = id0, mk_att_sh(d->sh)->before = !ringed;
    mk_trace_bytes(d, x->n * x->bytes);
}

#endif
