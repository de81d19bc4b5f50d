/* GQA_PARTIAL on the device: an item is a KV head over one split, of the last one perhaps half of its heads (mk_gqa_halves). Semantics: gqa_partial.c.
 *
 * Two pages at a time, a warp having 16 tokens of one of them, so that it has keys, scores, probabilities and values of its tokens to itself: p = exp(s - max) rounded to bf16 with the warp's own running maximum,
 * and no barrier but one before the warps' sums are added, ascending. In a step of one row pages come through the ring of weights, where the loader puts them beside everything else; in others the first
 * ones are asked for behind the queries, the next as soon as registers are free. Queries lie in the staging area in bf16, up to
 * eight at a time, with a second plane, x - bf16(x), in the rows of the operand that they leave free.
 *
 * Heads of more than 128 channels are dealt otherwise, for eight warps' sums of eight such heads would be 64 KB to add: a page at a time, a warp has the scores of its eight tokens, and 32 channels
 * of the values of all 64. The scores go through shared memory, one barrier a page, and every warp makes all probabilities of them.
 *
 * In a step of several rows those that see the same splits of one cache share an item: up to 32 queries, staged all at once, then taken by eight over keys and values that stay in
 * registers, values transposed once; the warps' sums of eight heads are added by a warp a head.
 * The order of every sum is a function of the split alone. */
#ifndef MK_GQA_PARTIAL_CUH
#define MK_GQA_PARTIAL_CUH

#include "instructions/attention.cuh"
#include "instructions/gqa_append.cuh"

#define MK_GQA_CHUNK     128u /* channels of a head, at most, whose sums are every warp's */
#define MK_GQA_EIGHTS    (MK_GQA_TOGETHER / MK_GQA_HEADS)
#define MK_GQA_SCORE_ROW 72u  /* floats of a head's scores of a page: heads fall into different banks */

/* The newest token's key and value in bf16. A step of one row takes them from the packets, so that it need not wait for the cache; they stand in for every token from
 * theirs on: what lies in the cache there may be anything, a NaN as well. */
MK_DEV uint8_t *mk_gqa_fresh(mk_shared *sh)
{
    static_assert(sizeof sh->head_rstd >= 4 * MK_GQA_DIM, "a key and a value");
    return (uint8_t *)sh->head_rstd;
}
/* Of the heads, by warp: the largest score, sum p. At the end of the reduction area. */
typedef struct mk_gqa_stats {
    alignas(16) float max[MK_GQA_HEADS][MK_WARPS], sum[MK_GQA_HEADS][MK_WARPS];
} mk_gqa_stats;
/* turn: 0, or 1 for the one before it. */
MK_DEV mk_gqa_stats *mk_gqa_stats_at(mk_shared *sh, uint32_t turn)
{
    static_assert(sizeof sh->red >= 2 * sizeof(mk_gqa_stats), "they fit");
    return (mk_gqa_stats *)(sh->red + MK_RED_FLOATS) - 1 - turn;
}
/* Behind the queries, of which there are so many times eight: first what they are made of, then the warps' sums, or two pages' scores, and the heads' outputs. */
MK_DEV float *mk_gqa_scratch(mk_shared *sh, uint32_t dim, uint32_t eights)
{
    static_assert(4 * MK_GQA_DIM * MK_GQA_HEADS + 4 * MK_WARPS * MK_GQA_HEADS * MK_GQA_CHUNK + 4 * MK_GQA_DIM * MK_GQA_HEADS + sizeof(mk_gqa_stats) <=
                      MK_STAGING + 4 * MK_RED_FLOATS, "queries, sums, outputs");
    static_assert(4 * MK_GQA_CHUNK * MK_GQA_TOGETHER + 4 * MK_WARPS * MK_GQA_HEADS * (MK_GQA_CHUNK + 4) + 2 * sizeof(mk_gqa_stats) <= MK_STAGING + 4 * MK_RED_FLOATS &&
                      4 * MK_GQA_DIM * (MK_GQA_TOGETHER + MK_WARPS) <= MK_STAGING + 4 * MK_RED_FLOATS && 2 * MK_GQA_HEADS * MK_GQA_SCORE_ROW <= MK_WARPS * MK_GQA_DIM,
                  "queries of several rows, and sums, twice of half as many channels, or what the warps make them of, or scores");
    return (float *)(sh->staging + eights * mk_att_plane_bytes((dim + 31) / 32));
}

/* A split's keys and values. */
typedef struct mk_gqa_split {
    const uint32_t *pages; /* its page table */
    const uint8_t *base;   /* the KV head's first key in page 0 */
    uint64_t page_bytes;
    uint32_t n, dim;       /* tokens; channels */
} mk_gqa_split;

template <uint32_t NB> struct mk_gqa_regs { /* a lane (g, l) has channels 8 l .. 8 l + 7 of every block of 32 of token g of its tiles */
    static constexpr uint32_t TILES = MK_GQA_TURN(NB); /* a warp's, of as many pages */
    uint4 k[TILES][NB], v[TILES][NB]; /* NB = 8: v[0] of the warp's block, by tiles */
};

/* Where in a turn the warp's tile k begins: of two pages side by side a group of warps has one, a warp 16 tokens of it. */
template <uint32_t NB> MK_DEV uint32_t mk_gqa_tile(uint32_t warp, uint32_t k)
{
    return NB == 8 ? warp * 8 : warp / MK_GROUP_WARPS * MK_PAGE + warp % MK_GROUP_WARPS * 16 + k * 8;
}
/* The warp's tiles of the pages from number `page` on: keys (which = 0) or values (1). Beyond the last token: the last one's. ids: a lane has the id of page
 * (page & ~31) + lane. */
template <uint32_t NB> MK_DEV void mk_gqa_load(uint4 (*r)[NB], const mk_gqa_split *x, uint32_t ids, uint32_t page, uint32_t which, uint32_t warp, uint32_t lane)
{
    const uint32_t left = x->n - page * MK_PAGE;
#pragma unroll
    for (uint32_t k = 0; k < mk_gqa_regs<NB>::TILES; k++) {
        const uint32_t tile = mk_gqa_tile<NB>(warp, k);
#pragma unroll
        for (uint32_t b = 0; b < NB; b++) r[k][b] = make_uint4(0, 0, 0, 0);
        if (tile >= left) continue;
        const uint32_t id = __shfl_sync(0xffffffffu, ids, (page + tile / MK_PAGE) & 31), t = min(tile + lane / 4, left - 1) % MK_PAGE;
        const uint8_t *at = x->base + id * x->page_bytes + ((which * MK_PAGE + t) * x->dim + lane % 4 * 8) * 2;
#pragma unroll
        for (uint32_t b = 0; b < NB; b++) mk_ask_16(&r[k][b], at + b * 64, b * 32 + lane % 4 * 8 < x->dim);
    }
}
/* Values of the warp's block of 32 channels, all tiles of page number `page`. */
MK_DEV void mk_gqa_load_block(uint4 *v, const mk_gqa_split *x, uint32_t ids, uint32_t page, uint32_t warp, uint32_t lane)
{
    const uint32_t last = x->n - page * MK_PAGE - 1, c = warp * 32 + lane % 4 * 8;
    const uint8_t *at = x->base + __shfl_sync(0xffffffffu, ids, page & 31) * x->page_bytes + (MK_PAGE * x->dim + c) * 2;
#pragma unroll
    for (uint32_t k = 0; k < MK_PAGE / 8; k++) {
        v[k] = make_uint4(0, 0, 0, 0);
        mk_ask_16(&v[k], at + min(k * 8 + lane / 4, last) * x->dim * 2, c < x->dim);
    }
}

/* The warp's tokens' keys and values of a turn from page number `page` on, on their way to L2, by a lane each. Farther ahead than what the registers take next is slower
 * (a measurement: profiles/NOTES.md). */
template <uint32_t NB> MK_DEV void mk_gqa_prefetch(const mk_gqa_split *x, uint32_t ids, uint32_t page, uint32_t warp, uint32_t lane)
{
    const uint32_t t = page * MK_PAGE + mk_gqa_tile<NB>(warp, 0), id = __shfl_sync(0xffffffffu, ids, t / MK_PAGE & 31);
    if (lane < 2 && t < x->n) mk_bulk_prefetch(x->base + id * x->page_bytes + (lane * MK_PAGE + t % MK_PAGE) * x->dim * 2, mk_gqa_regs<NB>::TILES * 16 * x->dim);
}

/* Split `split`, of `per` pages, of a KV head's tokens up to `pos`. */
MK_DEV mk_gqa_split mk_gqa_split_of(const mk_dev *d, const mk_gqa *g, uint32_t slot, uint32_t kv, uint32_t split, uint32_t per, uint32_t pos)
{
    mk_gqa_split x;
    x.pages = d->a->page + (size_t)slot * d->a->max_pages + split * per;
    x.base = d->a->kv + g->kv_off + 2 * mk_gqa_at(g->dim, kv, 0, 0);
    x.page_bytes = d->a->kv_page_bytes;
    x.n = min(pos + 1 - split * per * MK_PAGE, per * MK_PAGE);
    x.dim = g->dim;
    return x;
}
/* Its first pages on their way into registers. */
template <uint32_t NB> MK_DEV void mk_gqa_load_first(mk_gqa_regs<NB> *m, const mk_gqa_split *x, uint32_t ids, uint32_t warp, uint32_t lane)
{
    mk_gqa_load<NB>(m->k, x, ids, 0, 0, warp, lane);
    if constexpr (NB == 8)
        mk_gqa_load_block(m->v[0], x, ids, 0, warp, lane);
    else
        mk_gqa_load<NB>(m->v, x, ids, 0, 1, warp, lane);
}

/* Ids of the pages from number `page` (a multiple of 32) on. */
MK_DEV uint32_t mk_gqa_ids(const mk_gqa_split *x, uint32_t page, uint32_t lane)
{
    return __ldcg(x->pages + min(page + lane, (x->n - 1) / MK_PAGE));
}

/* A tile of values as the left operand has them. */
MK_DEV uint4 mk_gqa_turned(uint4 x)
{
    return make_uint4(mk_turn(x.x), mk_turn(x.y), mk_turn(x.z), mk_turn(x.w));
}
/* Sums of a block, by halves, plus two tiles of values, as they are or turned, times their probabilities. */
template <bool TURNED> MK_DEV void mk_gqa_add(float (*acc)[4], uint4 u, uint4 w, uint32_t pu, uint32_t pw)
{
    if (!TURNED) u = mk_gqa_turned(u), w = mk_gqa_turned(w);
    mk_mma(acc[0], u.x, u.y, w.x, w.y, pu, pw);
    mk_mma(acc[1], u.z, u.w, w.z, w.w, pu, pw);
}

/* In a step of one row the loader streams all pages (kernel.cu, feed_heads). Of two pages side by side each comes in the stages of the group of warps that has it, keys and
 * values in one or in one each. Of heads of more than 128 channels a page is four stages: of the keys each group's half, and of the values, which all warps take of, the first half and the second.
 * Behind the row's last token they hold anything. */
/* Stages of an item of so many tokens. */
template <uint32_t NB> MK_DEV uint32_t mk_gqa_ring_stages(uint32_t tokens)
{
    constexpr uint32_t T = MK_GQA_TURN(NB);
    const uint32_t pages = (tokens + MK_PAGE - 1) / MK_PAGE;
    return (pages + T - 1) / T * T * MK_GQA_STAGES(NB);
}
/* Of a turn from page number `page` on the warp's, of keys (which = 0) or values (1); at: the item's first, of both groups. Of more than 128 channels: the values' that its group leaves. */
template <uint32_t NB> MK_DEV uint32_t mk_gqa_ring_stage(uint32_t at, uint32_t page, uint32_t which, uint32_t warp)
{
    return at + page * MK_GQA_STAGES(NB) + (NB > 2 ? 2 * which : 0) + mk_group_first(warp, at);
}
/* It is there; the warp's lane's bytes of token `t` of it. */
MK_DEV uint32_t mk_gqa_ring_at(mk_shared *sh, uint32_t stage, uint32_t t, uint32_t dim, uint32_t lane)
{
    mk_stage_wait(mk_stage_bar(sh, stage), mk_stage_parity(stage), MK_FAULT_CACHE);
    return mk_stage_at(sh, stage) + ((t + lane / 4) * dim + lane % 4 * 8) * 2;
}
/* As mk_gqa_load. */
template <uint32_t NB> MK_DEV void mk_gqa_take(mk_shared *sh, uint4 (*r)[NB], const mk_gqa_split *x, uint32_t at, uint32_t page, uint32_t which, uint32_t warp, uint32_t lane)
{
    const uint32_t first = NB == 8 ? warp % MK_GROUP_WARPS * 8 : warp % MK_GROUP_WARPS * 16 + (NB == 2 ? which * MK_PAGE : 0);
    const uint32_t from = mk_gqa_ring_at(sh, mk_gqa_ring_stage<NB>(at, page, which, warp), first, x->dim, lane);
#pragma unroll
    for (uint32_t k = 0; k < mk_gqa_regs<NB>::TILES; k++)
#pragma unroll
        for (uint32_t b = 0; b < NB; b++) {
            r[k][b] = make_uint4(0, 0, 0, 0);
            mk_lds128(&r[k][b], from + k * 16 * x->dim + b * 64, b * 32 + lane % 4 * 8 < x->dim);
        }
}
/* As mk_gqa_load_block. */
MK_DEV void mk_gqa_take_block(mk_shared *sh, uint4 *v, const mk_gqa_split *x, uint32_t at, uint32_t page, uint32_t warp, uint32_t lane)
{
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        const uint32_t from = mk_gqa_ring_at(sh, at + page * MK_GQA_STAGES(8) + 2 + half, 0, x->dim, lane) + warp * 64;
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            v[4 * half + k] = make_uint4(0, 0, 0, 0);
            mk_lds128(&v[4 * half + k], from + k * 16 * x->dim, warp * 32 + lane % 4 * 8 < x->dim);
        }
    }
}
/* Its first pages. Of more than 128 channels a warp looks at the other group's stages, behind a barrier of all compute warps: every product but ROUTER's has one behind its last stage, and behind ROUTER
 * stands ROUTE. */
template <uint32_t NB> MK_DEV void mk_gqa_take_first(mk_shared *sh, mk_gqa_regs<NB> *m, const mk_gqa_split *x, uint32_t at, uint32_t warp, uint32_t lane)
{
    mk_gqa_take<NB>(sh, m->k, x, at, 0, 0, warp, lane);
    if constexpr (NB == 8)
        mk_gqa_take_block(sh, m->v[0], x, at, 0, warp, lane);
    else
        mk_gqa_take<NB>(sh, m->v, x, at, 0, 1, warp, lane);
}
/* What the warp took of a turn has come, if `last` has, of what it took last: it leaves the stages that are its group's. */
template <uint32_t NB> MK_DEV void mk_gqa_leave_stages(mk_shared *sh, uint32_t at, uint32_t page, uint32_t warp, uint32_t lane, uint32_t last)
{
    const uint32_t none = sh->lap.none;
#pragma unroll
    for (uint32_t which = 0; which < (NB > 2 ? 2 : 1); which++) mk_stage_leave(mk_stage_bar(sh, mk_gqa_ring_stage<NB>(at, page, which, warp)) + MK_EMPTY, lane, last, none);
}

/* Up to eight queries over a split. ONE: of one row, in whose cache is nothing from token `fresh` of the split on, of which mk_gqa_fresh holds key and value. */
typedef struct mk_gqa_eight {
    uint32_t at, heads;         /* where they lie in the staging area; how many */
    uint32_t fresh, ring;       /* ONE; the item's first stage */
    uint32_t sees, turn;        /* of several rows: tokens that the lane's head sees, perhaps none of a warp's; which place for statistics, first place for scores */
    bool turned;                /* of several rows: the first pages' values are turned already */
    float scale;
} mk_gqa_eight;

/* The first pages stand in registers, the queries in shared memory. Leaves the warps' sums in *acc, and their statistics in shared memory. */
template <uint32_t NB, bool ONE>
MK_DEV void mk_gqa_attend(mk_shared *sh, mk_gqa_regs<NB> *m, const mk_gqa_split *x, uint32_t ids, const mk_gqa_eight *e, uint32_t warp, uint32_t lane, float (*acc)[2][4])
{
    constexpr uint32_t T = MK_GQA_TURN(NB);
    const uint32_t g = lane / 4, l = lane % 4, blocks = (x->dim + 31) / 32;
    float top = -INFINITY, sum = 0;
#pragma unroll
    for (uint32_t b = 0; b < NB; b++)
#pragma unroll
        for (uint32_t k = 0; k < 8; k++) acc[b][k / 4][k % 4] = 0;
#pragma unroll 1
    for (uint32_t page = 0; page * MK_PAGE < x->n; page += T) {
        const uint32_t first = page * MK_PAGE, next = page + T;
        const bool more = next * MK_PAGE < x->n, any = first + mk_gqa_tile<NB>(warp, 0) < x->n; /* any: of the warp */
        if (!ONE && more && next % 32 == 0) ids = mk_gqa_ids(x, next, lane);
        if (!ONE && more) mk_gqa_prefetch<NB>(x, ids, next, warp, lane);
        if (ONE) {
            uint32_t last = 0; /* of the last block that there is */
#pragma unroll
            for (uint32_t b = 0; b < NB; b++) last |= m->v[T - 1][b].w;
            mk_gqa_leave_stages<NB>(sh, e->ring, page, warp, lane, last);
        }
        if (any) {
            if (ONE && e->fresh < next * MK_PAGE) {
#pragma unroll
                for (uint32_t k = 0; k < T; k++)
#pragma unroll
                    for (uint32_t b = 0; b < NB; b++)
                        if (first + mk_gqa_tile<NB>(warp, k) + g >= e->fresh && b * 32 + 8 * l < x->dim) {
                            const uint8_t *y = mk_gqa_fresh(sh) + (b * 32 + 8 * l) * 2;
                            m->k[k][b] = *(const uint4 *)y;
                            m->v[k][b] = *(const uint4 *)(y + 2 * x->dim);
                        }
            }
            float c[T][4];
#pragma unroll
            for (uint32_t k = 0; k < T; k++) c[k][0] = c[k][1] = c[k][2] = c[k][3] = 0;
#pragma unroll
            for (uint32_t b = 0; b < NB; b++) {
                if (b >= blocks) break;
                const mk_att_left q = mk_att_query(sh->staging + e->at + lane * 16, b);
#pragma unroll
                for (uint32_t k = 0; k < T; k++)
                    if (!k || first + mk_gqa_tile<NB>(warp, k) < x->n) mk_att_dot(c[k], &q, m->k[k][b]);
            }
            if (more && ONE)
                mk_gqa_take<NB>(sh, m->k, x, e->ring, next, 0, warp, lane);
            else if (more)
                mk_gqa_load<NB>(m->k, x, ids, next, 0, warp, lane);
            const float before = top;
#pragma unroll
            for (uint32_t k = 0; k < T; k++) {
                const uint32_t t = first + mk_gqa_tile<NB>(warp, k) + 2 * l;
                const uint32_t end = ONE ? x->n : e->sees;
                c[k][0] = t < end ? __fmul_rn(__fadd_rn(c[k][0], c[k][2]), e->scale) : -INFINITY;
                c[k][1] = t + 1 < end ? __fmul_rn(__fadd_rn(c[k][1], c[k][3]), e->scale) : -INFINITY;
                top = fmaxf(top, fmaxf(c[k][0], c[k][1]));
            }
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            const float most = ONE || top > -INFINITY ? top : 0; /* p of a head that has seen nothing yet is 0 */
            const float shrink = mk_exp_fast(before - most);
            uint32_t p[T];
            sum = __fmul_rn(sum, shrink);
#pragma unroll
            for (uint32_t k = 0; k < T; k++) {
                p[k] = mk_bf16_pair(mk_exp_fast(c[k][0] - most), mk_exp_fast(c[k][1] - most));
                sum = __fadd_rn(sum, __fadd_rn(mk_bf16_value(p[k] & 0xffffu), __uint_as_float(p[k] & 0xffff0000u)));
            }
            if (page) {
                const float s0 = __shfl_sync(0xffffffffu, shrink, 8 * l), s1 = __shfl_sync(0xffffffffu, shrink, 8 * l + 4);
#pragma unroll
                for (uint32_t b = 0; b < NB; b++)
#pragma unroll
                    for (uint32_t k = 0; k < 8; k++) acc[b][k / 4][k % 4] = __fmul_rn(acc[b][k / 4][k % 4], k & 1 ? s1 : s0);
            }
            if (!ONE && !(e->turned && !page)) {
#pragma unroll
                for (uint32_t k = 0; k < T; k++)
#pragma unroll
                    for (uint32_t b = 0; b < NB; b++) m->v[k][b] = mk_gqa_turned(m->v[k][b]);
            }
#pragma unroll
            for (uint32_t b = 0; b < NB; b++) mk_gqa_add<!ONE>(acc[b], m->v[0][b], m->v[1][b], p[0], p[1]);
            if (more && ONE)
                mk_gqa_take<NB>(sh, m->v, x, e->ring, next, 1, warp, lane);
            else if (more)
                mk_gqa_load<NB>(m->v, x, ids, next, 1, warp, lane);
        }
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (l == 0 && g < e->heads) {
        mk_gqa_stats *s = mk_gqa_stats_at(sh, e->turn);
        s->max[g][warp] = top;
        s->sum[g][warp] = sum;
    }
}

/* The same of channels of up to 256. The warp's sums of its block of channels are in *acc, the largest score and sum p of the lane's head in *most and *all. */
template <bool ONE>
MK_DEV void mk_gqa_attend_blocks(mk_shared *sh, mk_gqa_regs<8> *m, const mk_gqa_split *x, uint32_t ids, const mk_gqa_eight *e, uint32_t warp, uint32_t lane, float (*acc)[4], float *most, float *all)
{
    const uint32_t g = lane / 4, l = lane % 4, blocks = (x->dim + 31) / 32, block = warp * 32 + 8 * l;
    float top = -INFINITY, sum = 0;
#pragma unroll
    for (uint32_t k = 0; k < 8; k++) acc[k / 4][k % 4] = 0;
#pragma unroll 1
    for (uint32_t page = 0; page * MK_PAGE < x->n; page++) {
        const uint32_t first = page * MK_PAGE, next = page + 1, end = ONE ? x->n : e->sees;
        const bool more = next * MK_PAGE < x->n;
        if (!ONE && more && next % 32 == 0) ids = mk_gqa_ids(x, next, lane);
        if (!ONE && more) mk_gqa_prefetch<8>(x, ids, next, warp, lane);
        if (ONE && e->fresh < first + MK_PAGE) {
            const uint8_t *key = mk_gqa_fresh(sh) + 16 * l, *value = mk_gqa_fresh(sh) + 2 * (x->dim + block);
#pragma unroll
            for (uint32_t b = 0; b < 8; b++) {
                if (first + warp * 8 + g >= e->fresh && b * 32 + 8 * l < x->dim) m->k[0][b] = *(const uint4 *)(key + 64 * b);
                if (first + b * 8 + g >= e->fresh && block < x->dim) m->v[0][b] = *(const uint4 *)value;
            }
        }
        float c[4] = {0, 0, 0, 0};
#pragma unroll
        for (uint32_t b = 0; b < 8; b++) {
            if (b >= blocks) break;
            const mk_att_left q = mk_att_query(sh->staging + e->at + lane * 16, b);
            mk_att_dot(c, &q, m->k[0][b]);
        }
        if (more && ONE)
            mk_gqa_take<8>(sh, m->k, x, e->ring, next, 0, warp, lane);
        else if (more)
            mk_gqa_load<8>(m->k, x, ids, next, 0, warp, lane);
        /* those of the page before are being read */
        float *score = mk_gqa_scratch(sh, x->dim, ONE ? 1 : MK_GQA_EIGHTS) + ((page + e->turn & 1) * MK_GQA_HEADS + g) * MK_GQA_SCORE_ROW + 2 * l;
        if (ONE) score += m->v[0][7].w & sh->lap.none; /* behind the barrier all warps have this page's values (mk_stage_leave) */
        const uint32_t t = first + warp * 8 + 2 * l;
        *(float2 *)(score + warp * 8) = make_float2(t < end ? __fmul_rn(__fadd_rn(c[0], c[2]), e->scale) : -INFINITY, t + 1 < end ? __fmul_rn(__fadd_rn(c[1], c[3]), e->scale) : -INFINITY);
        mk_sync();
        if (ONE) mk_gqa_leave_stages<8>(sh, e->ring, page, warp, lane, 0);
        float2 y[8];
        const float before = top;
#pragma unroll
        for (uint32_t k = 0; k < 8; k++) {
            y[k] = *(const float2 *)(score + k * 8);
            top = fmaxf(top, fmaxf(y[k].x, y[k].y));
        }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        const float base = ONE || top > -INFINITY ? top : 0; /* p of a head that has seen nothing yet is 0 */
        const float shrink = mk_exp_fast(before - base);
        uint32_t p[8];
        sum = __fmul_rn(sum, shrink);
#pragma unroll
        for (uint32_t k = 0; k < 8; k++) {
            p[k] = mk_bf16_pair(mk_exp_fast(y[k].x - base), mk_exp_fast(y[k].y - base));
            sum = __fadd_rn(sum, __fadd_rn(mk_bf16_value(p[k] & 0xffffu), __uint_as_float(p[k] & 0xffff0000u)));
        }
        if (page) {
            const float s0 = __shfl_sync(0xffffffffu, shrink, 8 * l), s1 = __shfl_sync(0xffffffffu, shrink, 8 * l + 4);
#pragma unroll
            for (uint32_t k = 0; k < 8; k++) acc[k / 4][k % 4] = __fmul_rn(acc[k / 4][k % 4], k & 1 ? s1 : s0);
        }
        if (!ONE && !(e->turned && !page)) {
#pragma unroll
            for (uint32_t k = 0; k < 8; k++) m->v[0][k] = mk_gqa_turned(m->v[0][k]);
        }
#pragma unroll
        for (uint32_t k = 0; k < 8; k += 2) mk_gqa_add<!ONE>(acc, m->v[0][k], m->v[0][k + 1], p[k], p[k + 1]);
        if (more && ONE)
            mk_gqa_take_block(sh, m->v[0], x, e->ring, next, warp, lane);
        else if (more)
            mk_gqa_load_block(m->v[0], x, ids, next, warp, lane);
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    *most = top;
    *all = sum;
}

/* A warp's sums into shared memory: [warp][head][n]. */
template <uint32_t NB> MK_DEV void mk_gqa_put(float *to, const float (*acc)[2][4], uint32_t n, uint32_t heads, uint32_t lane)
{
    const uint32_t g = lane / 4, l = lane % 4;
#pragma unroll
    for (uint32_t b = 0; b < NB; b++)
#pragma unroll
        for (uint32_t j = 0; j < 2; j++) {
            const float4 y = mk_att_four(acc[b][0], acc[b][1], j, g);
            const uint32_t h = 2 * l + j, c = b * 32 + 4 * g;
            if (h < heads && c < n) *(float4 *)(to + h * n + c) = y;
        }
}

/* Where an item's outputs go that are a row's. */
typedef struct mk_gqa_out {
    uint4 *to;                           /* the first head's */
    uint32_t values, lanes, sp, epoch; /* of a slice: values, their binary logarithm if slices lie in lanes of a warp, else 0; packets */
} mk_gqa_out;
/* The warps' sums, ascending: into the partials, or, with `out`, divided by sum p, into shared memory and from there on; into packets at once where lanes have all of a slice.
 * dst: of the first head. */
template <uint32_t NB> MK_DEV void mk_gqa_merge(mk_shared *sh, const float (*acc)[2][4], uint32_t dim, uint32_t heads, float *dst, float *out, const mk_gqa_out *o, uint32_t tid)
{
    const mk_gqa_stats *s = mk_gqa_stats_at(sh, 0);
    float *area = mk_gqa_scratch(sh, dim, 1);
    const uint32_t all = heads * dim;
    if (!dim) return; /* never; but behind a branch nvcc takes fewer registers from what comes before (llama-3.2-1b: 2 % of a step) */
    mk_gqa_put<NB>(area + tid / 32 * all, acc, dim, heads, tid % 32);
    mk_sync();
#pragma unroll 1
    for (uint32_t i = tid; i < all; i += MK_COMPUTE) {
        const uint32_t h = mk_small_quot(i, dim), c = i - h * dim;
        float w[MK_WARPS], y = 0, sum = 0, max = s->max[h][0];
#pragma unroll
        for (uint32_t k = 0; k < MK_WARPS; k++) {
            w[k] = s->max[h][k];
            max = fmaxf(max, w[k]);
        }
#pragma unroll
        for (uint32_t k = 0; k < MK_WARPS; k++) {
            w[k] = mk_exp_fast(w[k] - max); /* 0 of a warp without tokens */
            sum = __fmaf_rn(w[k], s->sum[h][k], sum);
            y = __fmaf_rn(w[k], area[k * all + i], y);
        }
        if (out) {
            const float z = __fmul_rn(y, mk_reciprocal(sum)); /* as in COMBINE of one split */
            if (o->lanes) { /* i mod 32 is the lane: slices lie in a warp */
                const uint32_t word = mk_bf16_pair(z, __shfl_down_sync(0xffffffffu, z, 1)), then = __shfl_down_sync(0xffffffffu, word, 2), last = __shfl_down_sync(0xffffffffu, word, 4);
                const uint32_t j = i & (o->values - 1), p = j * 43 >> 8; /* j / 6 */
                if (j == 6 * p) mk_packet_store(o->to + (i >> o->lanes) * o->sp + p, word, j + 2 < o->values ? then : 0, j + 4 < o->values ? last : 0, o->epoch);
            } else {
                out[i] = z;
            }
        }
        float *to = dst + h * mk_partial_floats(dim);
        __stcg(to + c, y);
        if (!c) __stcg((float2 *)(to + dim), make_float2(max, sum));
    }
}

/* Of an item of several rows: so many heads of a KV head of each of its rows, row by row. */
typedef struct mk_gqa_heads {
    uint32_t row, own, n; /* the first row; heads of a row, of all */
    uint32_t first;       /* of the row's heads */
    float *dst;           /* the first one's partial */
    uint32_t floats, row_floats;
} mk_gqa_heads;
MK_DEV float *mk_gqa_partial_at(const mk_gqa_heads *y, uint32_t h)
{
    const uint32_t k = mk_small_quot(h, y->own);
    return y->dst + (h - k * y->own) * y->floats + (size_t)k * y->row_floats;
}
/* The warps' sums of eight heads: [warp][head][channel]. From head to head lanes that store together meet in few banks. */
template <uint32_t NB> struct mk_gqa_sums {
    static constexpr uint32_t HEAD = 32 * NB + 2, WARP = MK_GQA_HEADS * HEAD;
};
/* A warp's, as the operand leaves them: mk_att_four says where. */
template <uint32_t NB> MK_DEV void mk_gqa_leave(float *area, const float (*acc)[2][4], uint32_t warp, uint32_t lane)
{
    const uint32_t g = lane / 4, l = lane % 4;
    float *to = area + warp * mk_gqa_sums<NB>::WARP + 2 * l * mk_gqa_sums<NB>::HEAD + 8 * (g / 2) + g % 2;
#pragma unroll
    for (uint32_t b = 0; b < NB; b++)
#pragma unroll
        for (uint32_t k = 0; k < 8; k++) to[k % 2 * mk_gqa_sums<NB>::HEAD + 32 * b + k / 2 * 2] = acc[b][k / 4][k % 4];
}
/* A head's, as mk_gqa_merge adds them, into its partial, by one warp. */
template <uint32_t NB> MK_DEV void mk_gqa_merge_head(const mk_gqa_stats *s, const float *area, uint32_t dim, uint32_t head, float *to, uint32_t lane)
{
    const float4 a = *(const float4 *)&s->sum[head][0], b = *(const float4 *)&s->sum[head][4];
    const float part[MK_WARPS] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    float w = s->max[head][lane % MK_WARPS], max = w, sum = 0, by[MK_WARPS];
#pragma unroll
    for (uint32_t k = 1; k < MK_WARPS; k *= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, k));
    w = mk_exp_fast(w - max); /* 0 of a warp without tokens */
#pragma unroll
    for (uint32_t k = 0; k < MK_WARPS; k++) {
        by[k] = __shfl_sync(0xffffffffu, w, k);
        sum = __fmaf_rn(by[k], part[k], sum);
    }
#pragma unroll 1
    for (uint32_t c = 2 * lane; c < dim; c += 64) {
        float2 y = make_float2(0, 0), x[MK_WARPS];
#pragma unroll
        for (uint32_t k = 0; k < MK_WARPS; k++) x[k] = *(const float2 *)(area + k * mk_gqa_sums<NB>::WARP + head * mk_gqa_sums<NB>::HEAD + c);
#pragma unroll
        for (uint32_t k = 0; k < MK_WARPS; k++) {
            y.x = __fmaf_rn(by[k], x[k].x, y.x);
            y.y = __fmaf_rn(by[k], x[k].y, y.y);
        }
        __stcg((float2 *)(to + c), y);
    }
    if (lane == 0) __stcg((float2 *)(to + dim), make_float2(max, sum));
}

/* The sums of eight heads of up to 256 channels, of which a warp has its block; partial: of a head where its partial lies. */
template <typename P> MK_DEV void mk_gqa_give(const float (*acc)[4], float most, float all, uint32_t dim, uint32_t heads, P partial, float *out, uint32_t warp, uint32_t lane)
{
    const uint32_t g = lane / 4, l = lane % 4, c = warp * 32 + 4 * g;
    if (warp == 0 && l == 0 && g < heads) __stcg((float2 *)(partial(g) + dim), make_float2(most, all));
#pragma unroll
    for (uint32_t j = 0; j < 2; j++) {
        const uint32_t h = 2 * l + j;
        const float4 y = mk_att_four(acc[0], acc[1], j, g);
        const float z = mk_reciprocal(__shfl_sync(0xffffffffu, all, 4 * h)); /* as in COMBINE of one split */
        if (h >= heads || c >= dim) continue;
        __stcg((float4 *)(partial(h) + c), y);
        if (out) *(float4 *)(out + h * dim + c) = make_float4(__fmul_rn(y.x, z), __fmul_rn(y.y, z), __fmul_rn(y.z, z), __fmul_rn(y.w, z));
    }
}

/* The norm of a head of up to 32 NB values, by one warp. */
template <uint32_t NB> MK_DEV void mk_gqa_norm(const float *param, uint32_t dim, float eps, float *x, uint32_t lane)
{
    float sum = 0, v[NB], gamma[NB];
#pragma unroll
    for (uint32_t k = 0; k < NB; k++) gamma[k] = lane + 32 * k < dim ? __ldg(param + lane + 32 * k) : 0.0f;
#pragma unroll
    for (uint32_t k = 0; k < NB; k++) {
        v[k] = lane + 32 * k < dim ? x[lane + 32 * k] : 0.0f;
        sum = __fmaf_rn(v[k], v[k], sum);
    }
    const float rstd = mk_rsqrtf(mk_div(mk_warp_sum(sum), (float)dim) + eps);
#pragma unroll
    for (uint32_t k = 0; k < NB; k++)
        if (lane + 32 * k < dim) x[lane + 32 * k] = __fmul_rn(__fmul_rn(v[k], rstd), gamma[k]);
    __syncwarp();
}
/* A head of one row: norm and rotation of x as in GQA_APPEND where there are parameters. ahead: sine and cosine of the first pairs, or NULL. */
template <uint32_t NB> MK_DEV void mk_gqa_head(const mk_dev *d, const mk_gqa *g, const float *param, float eps, float *x, const float2 *ahead)
{
    const uint32_t dim = g->dim, half = param ? g->rope / 2 : 0;
    if (param && g->norm) {
        mk_gqa_norm<NB>(param, dim, eps, x, d->lane);
        param += dim;
    }
#pragma unroll 1
    for (uint32_t i = d->lane; i < half; i += 32) {
        float2 turn = make_float2(0, 0);
        if (ahead && i < MK_ANGLES)
            turn = ahead[i];
        else
            mk_sincosf(mk_mul((float)d->step->row[0].pos, __ldg(param + i)), &turn.x, &turn.y);
        const float2 y = mk_rotated(x[i], x[i + half], turn);
        x[i] = y.x, x[i + half] = y.y;
    }
    __syncwarp();
}

/* The outputs of an item's heads, which are a row's first one's, as COMBINE publishes them. */
MK_DEV void mk_gqa_publish(const mk_dev *d, const mk_gqa_out *o, uint32_t slices, const float *out)
{
    const uint32_t n = o->values, packets = (n + 5) / 6, sp = o->sp;
#pragma unroll 1
    for (uint32_t i = d->tid; i < slices * packets; i += MK_COMPUTE) {
        const uint32_t s = mk_small_quot(i, packets), p = i - s * packets, has = n - 6 * p;
        const float *y = out + s * n + 6 * p;
        uint32_t word[3];
#pragma unroll
        for (uint32_t k = 0; k < 3; k++) word[k] = mk_bf16_pair(2 * k < has ? y[2 * k] : 0.0f, 2 * k + 1 < has ? y[2 * k + 1] : 0.0f);
        mk_packet_store(o->to + s * sp + p, word[0], word[1], word[2], o->epoch);
    }
}

/* In a step of one row the last split's items have the newest key and value to make beside their queries, a warp each. Where eight queries leave no warp free, such an item's heads become two items',
 * if there are workers without any; each makes the newest key and value for itself, and writes them: the same bits. */
MK_DEV bool mk_gqa_halves(const mk_gqa *g, uint32_t splits)
{
    const uint32_t group = mk_small_quot(g->heads, g->kv_heads);
    return group + 2 > MK_WARPS && group <= MK_GQA_HEADS && (splits + 1) * g->kv_heads <= g->parts;
}
/* The items of this worker in a step of one row (mk_newest): the newest key and value come from the packets, and whoever has an item that needs them writes them to the cache; nothing waits
 * for GQA_APPEND, which has nothing left to do. Where the row has one split, the items publish what COMBINE would, with the same bits. Returns the vector to be signalled: the caller has no
 * register to keep it in. */
template <uint32_t NB> MK_CALL uint32_t mk_gqa_one(uint32_t insn)
{
    const mk_insn *in = mk_insn_at(insn);
    const mk_dev here = mk_here(in), *d = &here;
    const mk_fed *f = mk_fed_of(in);
    const mk_newest *newest = &f->plan.newest;
    const mk_gqa *g = &d->in->gqa;
    const uint32_t dim = g->dim, floats = mk_partial_floats(dim), blocks = (dim + 31) / 32, group = mk_small_quot(g->heads, g->kv_heads);
    const mk_att_queries of = {dim, 0, 0};
    float *const raw = mk_gqa_scratch(d->sh, dim, 1); /* queries, key and value as they come: all values of their blocks */
    const mk_wait *const wait = &d->in->wait[0];
    const uint32_t epoch = f->place.epoch[0];
    const mk_row *row = &d->step->row[0];
    const uint4 *const packets = f->place.in[0];
    const uint32_t pos = row->pos, per = f->place.per, items = f->place.items;
    bool begun = false;
#pragma unroll 1
    for (uint32_t i = g->part; i < items; i += g->parts) {
        const bool halves = f->place.ahead & MK_AHEAD_HALVES, other = halves && i + g->kv_heads >= items; /* other: half of the last split's */
        const uint32_t nth = mk_small_quot(i, g->kv_heads), kv = i - nth * g->kv_heads, split = nth - other, first = split * per * MK_PAGE;
        const mk_gqa_split x = mk_gqa_split_of(d, g, row->slot, kv, split, per, pos);
        const bool last = first + x.n == pos + 1;
#pragma unroll 1
        for (uint32_t h0 = other ? group / 2 : 0; h0 < group; h0 += MK_GQA_HEADS) { /* once, where there are halves */
            const uint32_t heads = halves && last && !h0 ? group / 2 : min(group - h0, MK_GQA_HEADS), head0 = kv * group + h0;
            const uint32_t all = heads + (last && (halves || !h0) ? 2 : 0); /* the newest key and value follow the queries */
            mk_gqa_regs<NB> regs;
            float acc[NB == 8 ? 1 : NB][2][4];
            uint32_t h = d->warp;
            uint32_t from = h < heads ? g->q_off + (head0 + h) * g->q_stride : (h == heads ? newest->k_off : newest->v_off) + kv * dim;
            mk_asked look;
            mk_asked_for(&look, d, wait, packets, epoch, from, h < all ? dim : 0);
            if (begun) mk_sync(); /* the heads before are through with shared memory */
            mk_gqa_take_first<NB>(d->sh, &regs, &x, d->memo->next.at, d->warp, d->lane);
#pragma unroll 1
            for (; h < all; h += MK_WARPS) {
                const bool query = h < heads;
                float *q = raw + h * 32 * blocks;
                uint32_t *to = 0;
                if (!query) to = (uint32_t *)((uint16_t *)mk_kv_at(d, g->kv_off, row->slot, pos, 0) + mk_gqa_at(dim, kv, h - heads, pos % MK_PAGE));
                if (dim + d->lane < 32 * blocks) q[dim + d->lane] = 0;
                if (h >= MK_WARPS) {
                    from = query ? g->q_off + (head0 + h) * g->q_stride : (h == heads ? newest->k_off : newest->v_off) + kv * dim;
                    mk_asked_for(&look, d, wait, packets, epoch, from, dim);
                }
                mk_asked_take(&look, d, wait, 0, 0, packets, epoch, from, dim, q);
                mk_gqa_head<NB>(d, g, h > heads ? (const float *)0 : d->a->param + (query ? g->param_off : newest->param_off), query ? g->eps : newest->eps, q,
                                query || f->place.ahead & MK_AHEAD_ALIKE ? d->sh->angle : (const float2 *)0);
#pragma unroll 2
                for (uint32_t c = 2 * d->lane; c < 32 * blocks; c += 64) {
                    const float2 y = *(const float2 *)(q + c);
                    if (query) {
                        mk_att_put(d->sh->staging, &of, h, c, y.x, y.y);
                    } else if (c < dim) {
                        const uint32_t bits = mk_bf16_pair(y.x, y.y);
                        *(uint32_t *)(mk_gqa_fresh(d->sh) + ((h - heads) * dim + c) * 2) = bits;
                        to[c / 2] = bits;
                    }
                }
            }
            mk_sync();
            if (!begun) mk_trace_input(d);
            begun = true;
            mk_trace_bytes(d, x.n * dim * 4);
            const mk_gqa_eight e = {0, heads, last ? x.n - 1 : 0xffffffffu, d->memo->next.at, 0, 0, false, g->scale};
            float most, sum;
            if constexpr (NB == 8)
                mk_gqa_attend_blocks<true>(d->sh, &regs, &x, 0, &e, d->warp, d->lane, acc[0], &most, &sum);
            else
                mk_gqa_attend<NB, true>(d->sh, &regs, &x, 0, &e, d->warp, d->lane, acc);
            mk_stages_pass(d->sh, d->warp, d->lane, mk_gqa_ring_stages<NB>(x.n));
            float *out = f->place.ahead & MK_AHEAD_WHOLE ? mk_gqa_scratch(d->sh, dim, 1) + (NB == 8 ? 2 * MK_GQA_SCORE_ROW : MK_WARPS * dim) * MK_GQA_HEADS : (float *)0;
            mk_gqa_out o = {0, 0, 0, 0, 0};
            if (out) {
                const mk_whole *w = &f->plan.whole;
                o.values = w->values;
                o.lanes = NB < 8 && (o.values == 16 || o.values == 32) && dim % 32 == 0 ? o.values == 16 ? 4 : 5 : 0;
                o.sp = d->sh->vec[w->vec].slice_packets;
                o.to = f->place.out + head0 * w->slices * o.sp;
                o.epoch = f->place.out_epoch;
                mk_trace_publish(d);
            }
            float *dst = (float *)mk_bulk_at(d, in->signal_vec) + ((size_t)split * g->heads + head0) * floats;
            if constexpr (NB == 8)
                mk_gqa_give(acc[0], most, sum, dim, heads, [&](uint32_t k) { return dst + k * floats; }, out, d->warp, d->lane);
            else
                mk_gqa_merge<NB>(d->sh, acc, dim, heads, dst, out, &o, d->tid);
            if (out && !o.lanes) {
                mk_sync();
                mk_gqa_publish(d, &o, heads * f->plan.whole.slices, out);
            }
        }
    }
    return in->signal_vec;
}

/* Value c of one of eight heads, both planes. */
MK_DEV void mk_gqa_put_value(uint8_t *plane, uint32_t head, uint32_t c, float x)
{
    const uint32_t hi = mk_bf16_pair(x, 0), lo = mk_bf16_pair(__fadd_rn(x, -mk_bf16_value(hi & 0xffffu)), 0);
    uint16_t *at = (uint16_t *)mk_att_at(plane, head, c);
    at[0] = (uint16_t)hi;
    at[2] = (uint16_t)lo; /* row head + 8 of the operand */
}
/* The queries of an item of several rows, by eight, in the staging area. A warp takes heads that lie side by side in the vector at once. */
template <uint32_t NB> MK_DEV void mk_gqa_stage(const mk_dev *d, const mk_gqa *g, const mk_gqa_heads *y, uint32_t epoch)
{
    const mk_wait *const wait = &d->in->wait[0];
    const mk_vec *const vec = &d->sh->vec[wait->vec];
    const uint32_t dim = g->dim, blocks = (dim + 31) / 32, half = g->rope / 2;
    const uint32_t most = min((y->n + MK_WARPS - 1) / MK_WARPS, mk_small_quot(MK_GQA_DIM, dim));
    const uint32_t side = g->q_stride == dim && mk_small_quot(y->own, most) * most == y->own ? most : 1;
    const float *param = d->a->param + g->param_off, *frequency = param + (g->norm ? dim : 0);
    float *const raw = mk_gqa_scratch(d->sh, dim, MK_GQA_EIGHTS) + d->warp * MK_GQA_DIM;
#pragma unroll 1
    for (uint32_t h = d->warp * side; h < y->n; h += MK_WARPS * side) {
        const uint32_t k = mk_small_quot(h, y->own), r = y->row + k, from = g->q_off + (y->first + h - k * y->own) * g->q_stride;
        const uint4 *const packets = mk_wait_packets(d, wait, vec, r);
        mk_asked look;
        mk_asked_for(&look, d, wait, packets, epoch, from, side * dim);
        mk_asked_take(&look, d, wait, 0, r, packets, epoch, from, side * dim, raw);
        if (g->norm) {
#pragma unroll 1
            for (uint32_t j = 0; j < side; j++) mk_gqa_norm<NB>(param, dim, g->eps, raw + j * dim, d->lane);
        }
#pragma unroll 1
        for (uint32_t c = d->lane; c < 32 * blocks; c += 32) {
            const bool pair = c < half;
            float2 turn = make_float2(0, 1);
            if (c >= half && c < 2 * half) continue; /* with the first half */
            if (pair) mk_sincosf(mk_mul((float)d->step->row[r].pos, __ldg(frequency + c)), &turn.x, &turn.y);
#pragma unroll 1
            for (uint32_t j = 0; j < side; j++) {
                uint8_t *plane = d->sh->staging + (h + j) / MK_GQA_HEADS * mk_att_plane_bytes(blocks);
                const float *x = raw + j * dim + c;
                float a = c < dim ? x[0] : 0;
                if (pair) {
                    const float2 y = mk_rotated(a, x[half], turn);
                    mk_gqa_put_value(plane, (h + j) % MK_GQA_HEADS, c + half, y.y);
                    a = y.x;
                }
                mk_gqa_put_value(plane, (h + j) % MK_GQA_HEADS, c, a);
            }
        }
        __syncwarp(); /* what they were made of is free */
    }
}

/* The items of this worker in a step of several rows: those of rows that share theirs (mk_gqa_together) read keys and values once, and what a later row sees counts nothing for an earlier one.
 * Only a split with tokens of this step waits for GQA_APPEND before it reads. */
template <uint32_t NB> MK_CALL uint32_t mk_gqa_rows(const mk_insn *in)
{
    constexpr uint32_t T = MK_GQA_TURN(NB); /* pages in registers */
    const mk_dev here = mk_here(in), *d = &here;
    const mk_gqa *g = &d->in->gqa;
    const uint32_t dim = g->dim, group = mk_small_quot(g->heads, g->kv_heads), rows = d->step->nrows, plane = mk_att_plane_bytes((dim + 31) / 32), epoch = mk_wait_epoch(d, &d->in->wait[0]);
    bool begun = false, waited = false;
    uint32_t base = 0; /* items of the rows before, modulo the parts */
#pragma unroll 1
    for (uint32_t r = 0, together; r < rows; r += together) {
        const mk_row *row = &d->step->row[r];
        together = mk_gqa_together(g, row, rows - r);
        const uint32_t pos = row[together - 1].pos, per = mk_split_pages(pos, g->grain, g->most), items = (mk_small_quot(pos / MK_PAGE, per) + 1) * g->kv_heads;
#pragma unroll 1
        for (uint32_t i = mk_first_item(g->part, g->parts, base); i < items; i += g->parts) {
            const uint32_t split = mk_small_quot(i, g->kv_heads), kv = i - split * g->kv_heads, first = split * per * MK_PAGE;
            const mk_gqa_split x = mk_gqa_split_of(d, g, row->slot, kv, split, per, pos);
            uint32_t before = 0; /* rows that end before the split */
            while (row[before].pos < first) before++;
#pragma unroll 1
            for (uint32_t h0 = 0; h0 < group; h0 += MK_GQA_TOGETHER) {
                mk_gqa_heads y;
                y.row = r + before;
                y.own = min(group - h0, MK_GQA_TOGETHER);
                y.n = y.own * (together - before);
                y.first = kv * group + h0;
                y.floats = mk_partial_floats(dim);
                y.row_floats = MK_MAX_SPLITS * g->heads * y.floats;
                y.dst = (float *)mk_bulk_at(d, in->signal_vec) + (((size_t)y.row * MK_MAX_SPLITS + split) * g->heads + y.first) * y.floats;
                const uint32_t ids = mk_gqa_ids(&x, 0, d->lane);
                mk_gqa_prefetch<NB>(&x, ids, 0, d->warp, d->lane);
                if (begun || NB == 8) mk_sync(); /* the heads before are through with shared memory; of 256 channels, whoever was before with the reduction area */
                mk_gqa_stage<NB>(d, g, &y, epoch);
                if (!waited && mk_has_fresh(row, r, first + x.n)) {
                    mk_counter_wait(d, 1);
                    waited = true;
                }
                mk_gqa_regs<NB> regs;
                mk_gqa_load_first<NB>(&regs, &x, ids, d->warp, d->lane);
                mk_sync();
                if (!begun) mk_trace_input(d);
                begun = true;
                mk_trace_bytes(d, x.n * dim * 4);
                const bool stay = x.n <= T * MK_PAGE; /* keys and values of all pages */
#pragma unroll 1
                for (uint32_t b = 0; b * MK_GQA_HEADS < y.n; b++) {
                    const uint32_t h = b * MK_GQA_HEADS, heads = min(y.n - h, MK_GQA_HEADS);
                    float acc[NB == 8 ? 1 : NB][2][4];
                    mk_gqa_eight e;
                    e.at = b * plane;
                    e.heads = heads;
                    e.fresh = 0;
                    e.sees = min(row[before + mk_small_quot(min(h + d->lane / 4, y.n - 1), y.own)].pos + 1 - first, x.n);
                    e.turned = b && stay;
                    e.scale = g->scale;
                    if constexpr (NB == 8) {
                        float most, sum;
                        e.turn = b * ((x.n + MK_PAGE - 1) / MK_PAGE);
                        mk_gqa_attend_blocks<false>(d->sh, &regs, &x, ids, &e, d->warp, d->lane, acc[0], &most, &sum);
                        if (!stay && h + MK_GQA_HEADS < y.n) mk_gqa_load_first<NB>(&regs, &x, ids, d->warp, d->lane);
                        mk_gqa_give(acc[0], most, sum, dim, heads, [&](uint32_t k) { return mk_gqa_partial_at(&y, h + k); }, (float *)0, d->warp, d->lane);
                    } else {
                        e.turn = b & 1;
                        mk_gqa_attend<NB, false>(d->sh, &regs, &x, ids, &e, d->warp, d->lane, acc);
                        if (!stay && h + MK_GQA_HEADS < y.n) mk_gqa_load_first<NB>(&regs, &x, ids, d->warp, d->lane);
                        float *area = mk_gqa_scratch(d->sh, dim, MK_GQA_EIGHTS) + (NB == 2 ? e.turn : 0) * MK_WARPS * mk_gqa_sums<NB>::WARP;
                        if (NB == 4 && b) mk_sync(); /* the sums before are read; smaller ones lie in two places by turns */
                        mk_gqa_leave<NB>(area, acc, d->warp, d->lane);
                        mk_sync();
                        if (d->warp < heads) mk_gqa_merge_head<NB>(mk_gqa_stats_at(d->sh, e.turn), area, dim, d->warp, mk_gqa_partial_at(&y, h + d->warp), d->lane);
                    }
                }
            }
        }
        base = (base + items) % g->parts;
    }
    if (begun && !waited) mk_counter_wait(d, 1); /* as the program says */
    return in->signal_vec;
}

template <bool ONE> MK_CALL void mk_gqa_run(uint32_t insn)
{
    const mk_insn *in = mk_insn_at(insn);
    const mk_dev here = mk_here(in), *d = &here;
    mk_staged_drop(d);
    uint32_t vec;
    if (in->gqa.dim <= 64)
        vec = ONE ? mk_gqa_one<2>(insn) : mk_gqa_rows<2>(in);
    else if (in->gqa.dim <= 128)
        vec = ONE ? mk_gqa_one<4>(insn) : mk_gqa_rows<4>(in);
    else
        vec = ONE ? mk_gqa_one<8>(insn) : mk_gqa_rows<8>(in);
    mk_bulk_signal(d, vec);
    if (d->tid == 0) mk_flag_set(&d->sh->attended, d->sh->attended + 1);
}

#endif
