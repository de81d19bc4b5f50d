/* ROUTE on the device: h has been staged (kernel.cu), so that its norm is known behind the first barrier; a thread an expert waits for its logit and scores it, a warp a row chooses.
 * Semantics: route.c. Also lists the (expert, row) pairs for EXPERT_DOWN and tells the loader, whose weights everybody waits for: what happens between the last logit and the first
 * expert counts for all. */
#ifndef MK_ROUTE_CUH
#define MK_ROUTE_CUH

#include "instructions/mk_math.h"
#include "instructions/router.cuh"

#define MK_EXPERT_LANES (MK_MAX_EXPERT / 32)

/* Order-preserving, greatest first to be found by max; -0 equals +0; NaN is least. Never 0. */
MK_DEV uint32_t mk_order_key(float v)
{
    uint32_t u = __float_as_uint(v + 0.0f);
    if ((u & 0x7fffffffu) > 0x7f800000u) u = 0xff800000u;
    return u ^ ((uint32_t)((int32_t)u >> 31) | 0x80000000u);
}

/* What has that key, but for the sign of 0. NaN and -inf have one, which is taken for NaN's: no logit is -inf. */
MK_DEV float mk_order_value(uint32_t key)
{
    const uint32_t u = key ^ ((uint32_t)((int32_t)~key >> 31) | 0x80000000u);
    return __uint_as_float(u == 0xff800000u ? 0x7fffffffu : u);
}

/* The sums of the first row's logits, from one's first on: a neighbour of the same group is a word further, the next row MK_SUM_GROUP words. */
typedef struct mk_logits {
    const uint64_t *word;
    uint32_t addends;
} mk_logits;
MK_DEV mk_logits mk_logits_of(const mk_dev *d, uint32_t first)
{
    const mk_wait *w = &d->in->wait[1];
    const mk_vec *v = &d->sh->vec[w->vec];
    const mk_logits l = {mk_sum_of(d->sh, v, w->pub, d->in->route.experts, 0, first), v->signals};
    return l;
}
MK_DEV uint64_t mk_logit_look(const mk_logits *l, uint32_t i)
{
    uint64_t v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(l->word + i) : "memory");
    return v;
}
/* Waits for logit i, of which q is an earlier look; norm: 1/rms of its row. */
MK_DEV float mk_logit_wait(const mk_logits *l, uint32_t i, uint32_t row, uint64_t q, float norm)
{
    uint32_t looks = 0;
    while (mk_sums_count(q) != l->addends && mk_still_waiting(++looks, 1, row, i, mk_sums_count(q))) q = mk_logit_look(l, i);
    mk_waited(looks);
    return __fmul_rn(mk_sum_value(q, l->addends), norm);
}
/* Of a thread with two experts, neighbours of one group, the first's logit is l's: both are looked at together, for an earlier look at the second is as old as that at the first.
 * both: the second is an expert's. */
MK_DEV void mk_logits_look(const mk_logits *l, uint64_t (&q)[2])
{
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(q[0]), "=l"(q[1]) : "l"(l->word) : "memory");
}
MK_DEV void mk_logits_wait(const mk_logits *l, bool both, uint64_t (&q)[2])
{
    uint32_t looks = 0;
    for (;;) {
        const bool first = mk_sums_count(q[0]) == l->addends;
        const uint32_t found = mk_sums_count(first ? q[1] : q[0]);
        if ((first && !both) || found == l->addends || !mk_still_waiting(++looks, 1, 0, first, found)) break;
        mk_logits_look(l, q);
    }
    mk_waited(looks);
}
/* The worker's share of the other half is zero again for the publication after this one. By the last warp, when the logits are complete. By exchanges, whose answers say that they are
 * done: whatever this worker publishes later comes later, as packets rely on it. (A fence would empty the SM's cache of parameters besides.) Returns what was there. */
MK_DEV uint64_t mk_logits_clear(const mk_dev *d)
{
    uint64_t had = 0;
    if (d->warp != MK_WARPS - 1) return had;
    const mk_wait *w = &d->in->wait[1];
    const uint32_t experts = d->in->route.experts, n = mk_sums_words(experts), W = d->a->workers, end = (d->worker + 1) * n / W; /* mk_start: below 2^32 */
    uint64_t *word = mk_sum_of(d->sh, &d->sh->vec[w->vec], w->pub, experts, 1, 0);
    uint32_t i = d->worker * n / W + d->lane;
    const auto clear = [&](uint64_t *last) { /* in place, so that nothing waits for the answer yet */
        asm volatile("{\n\t.reg .pred p;\n\tsetp.lt.u32 p, %2, %3;\n\t@p atom.relaxed.gpu.global.exch.b64 %0, [%1], 0;\n\t}" : "+l"(*last) : "l"(word + i), "r"(i), "r"(end) : "memory");
    };
    clear(&had);
#pragma unroll 1
    for (i += 32; i < end; i += 32) { /* few workers, many experts */
        uint64_t more = 0;
        clear(&more);
        had |= more;
    }
    return had;
}
/* Behind this the answers are there: something has to depend on them, or ptxas asks for none. mk_lap.none is 0. */
MK_DEV void mk_logits_cleared(const mk_dev *d, uint64_t had)
{
    if ((uint32_t)(had | had >> 32) & d->sh->lap.none) d->memo->staged = 0;
}

/* In the reduction area; then, for as many rows as fit, order keys of the choices and scores: uint32_t key[n], float score[n] a row; keys alone where logits choose
 * (mk_route_plain). A key of 0 is out of the race. */
typedef struct mk_route_scratch {
    alignas(16) uint16_t id[MK_MAX_ROWS][MK_MAX_TOPK]; /* ascending; 0xffff: none */
    uint32_t chosen[MK_EXPERT_LANES];      /* bit set of all rows' experts */
    uint32_t before[MK_EXPERT_LANES];      /* experts of the union in the words before */
} mk_route_scratch;
static_assert(sizeof(mk_route_scratch) + MK_MAX_EXPERT * 8 <= MK_RED_FLOATS * 4, "a row fits");
static_assert(2 * MK_MAX_ROWS * MK_MAX_TOPK <= MK_COMPUTE, "two threads a pair: mk_route_union");

/* Keys and scores[0..n) of a softmax that is not plain, out of the logits, by one warp; expert i belongs to lane i mod 32. */
MK_DEV void mk_route_softmax(const mk_route *t, const float *bias, uint32_t *key, float *score)
{
    const uint32_t lane = threadIdx.x % 32, n = t->experts;
    float max = -INFINITY, sum = 0;
    for (uint32_t i = lane; i < n; i += 32) max = fmaxf(max, score[i]);
#pragma unroll
    for (int m = 16; m; m >>= 1) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, m));
    for (uint32_t i = lane; i < n; i += 32) {
        const float e = mk_expf(score[i] - max);
        score[i] = e;
        sum += e;
    }
    sum = mk_warp_sum(sum);
    for (uint32_t i = lane; i < n; i += 32) {
        const float s = mk_div(score[i], sum);
        score[i] = s;
        key[i] = mk_order_key(bias ? s + __ldg(bias + i) : s);
    }
    __syncwarp();
}

/* Takes the experts of the groups that do not stay out of the race. By one warp. */
MK_DEV void mk_route_groups(const mk_route *t, const float *bias, uint32_t *key, const float *score)
{
    const uint32_t n = t->experts, size = mk_small_quot(n, t->groups), lane = threadIdx.x % 32;
    float best = -INFINITY; /* lane g: score of group g (at most 32 groups) */
    if (lane < t->groups) {
        float one = -INFINITY, two = -INFINITY;
#pragma unroll 1
        for (uint32_t i = lane * size; i < (lane + 1) * size; i++) {
            float c = bias ? score[i] + __ldg(bias + i) : score[i];
            if (c > one) {
                two = one;
                one = c;
            } else if (c > two) {
                two = c;
            }
        }
        best = one + (size < 2 ? 0.0f : two);
    }
    uint32_t order = lane < t->groups ? mk_order_key(best) : 0, kept = 0;
    for (uint32_t k = 0; k < t->topk_groups; k++) {
        uint32_t most = __reduce_max_sync(0xffffffffu, kept >> lane & 1 ? 0 : order);
        uint32_t win = __ballot_sync(0xffffffffu, !(kept >> lane & 1) && order == most && lane < t->groups);
        kept |= win & (0u - win);
    }
    for (uint32_t i = lane; i < n; i += 32)
        if (!(kept >> mk_small_quot(i, size) & 1)) key[i] = 0;
    __syncwarp();
}

/* What only some models need. By one warp. */
MK_CALL void mk_route_prepare(const mk_route *t, const float *bias, uint32_t *key, float *score)
{
    if (t->score == MK_SCORE_SOFTMAX) mk_route_softmax(t, bias, key, score);
    if (t->groups > 1) mk_route_groups(t, bias, key, score);
}

/* One warp chooses a row's experts: lane k < topk gets the k-th best, and its key; ties go to the lower id. Expert i belongs to lane i mod 32, and a lane knows its best
 * three, so that the keys are hardly ever looked through again. The keys of the chosen become 0. Nothing here makes lanes part. */
MK_DEV uint32_t mk_route_choose(uint32_t n, uint32_t topk, uint32_t *key, uint32_t lane, uint32_t *best)
{
    uint32_t mine = 0xffffffffu, k = 0;
#pragma unroll 1
    do {
        uint32_t k1 = 0, k2 = 0, k3 = 0, at1 = lane, at2 = lane, at3 = lane;
#pragma unroll 4
        for (uint32_t i = lane; i < n; i += 32) {
            const uint32_t x = key[i];
            const bool c1 = x > k1, c2 = x > k2, c3 = x > k3;
            k3 = c2 ? k2 : c3 ? x : k3;
            at3 = c2 ? at2 : c3 ? i : at3;
            k2 = c1 ? k1 : c2 ? x : k2;
            at2 = c1 ? at1 : c2 ? i : at2;
            k1 = c1 ? x : k1;
            at1 = c1 ? i : at1;
        }
        bool gone = false; /* a lane has used up what it knew */
#pragma unroll 1
        do {
            const uint32_t most = __reduce_max_sync(0xffffffffu, k1), win = __reduce_min_sync(0xffffffffu, k1 == most ? at1 : 0xffffffffu);
            const bool won = at1 == win;
            if (won) key[win] = 0;
            mine = lane == k ? win : mine;
            *best = lane == k ? most : *best;
            k1 = won ? k2 : k1;
            at1 = won ? at2 : at1;
            k2 = won ? k3 : k2;
            at2 = won ? at3 : at2;
            k3 = won ? 0 : k3;
            gone = __any_sync(0xffffffffu, won && k1 == 0);
        } while (++k < topk && !gone);
    } while (k < topk);
    return mine; /* of lanes without one the greatest number */
}

/* More than one row: the union of their choices, of which warp 0 tells the loader as soon as it has written it down, and the pairs. All compute threads. */
MK_CALL void mk_route_union(mk_routes *out, uint32_t nrows, uint32_t topk)
{
    mk_shared *sh = mk_sh();
    mk_route_scratch *x = (mk_route_scratch *)sh->red;
    mk_pairs *pairs = &sh->pairs;
    const uint32_t tid = threadIdx.x, lane = tid % 32;
    if (tid < 32) {
        uint32_t word = x->chosen[lane], count = __popc(word), sum = count;
#pragma unroll
        for (int m = 1; m < 32; m <<= 1) {
            uint32_t o = __shfl_up_sync(0xffffffffu, sum, m);
            if (lane >= m) sum += o;
        }
        uint32_t at = sum - count;
        x->before[lane] = at;
#pragma unroll 1
        for (; word; word &= word - 1) out->expert[at++] = (uint16_t)(32 * lane + __ffs(word) - 1);
        if (lane == 31) {
            out->n_union = sum;
            pairs->first[sum] = (uint8_t)(nrows * topk);
        }
        mk_warp_arrive(mk_smem(&sh->route_full), lane);
    }
    mk_sync();
    /* two threads a pair or four, each of every second row or fourth */
    const uint32_t n = nrows * topk, log = n <= MK_COMPUTE / 4 ? 2 : 1, part = tid & ((1u << log) - 1), pair = min(tid >> log, n - 1);
    const uint32_t r = mk_small_quot(pair, topk), k = pair - r * topk, e = x->id[r][k];
    const uint32_t j = x->before[e / 32] + __popc(x->chosen[e / 32] & ((1u << (e % 32)) - 1));
    uint32_t p = 0, same = 0;
#pragma unroll 2
    for (uint32_t i = part; i < nrows; i += 1u << log) {
        uint32_t below = 0, upto = 0;
#pragma unroll
        for (uint32_t h = 0; h < MK_MAX_TOPK / 8; h++) {
            const uint4 q = ((const uint4 *)x->id[i])[h];
            const uint32_t word[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
            for (uint32_t w = 0; w < 4; w++) {
                const uint32_t lo = word[w] & 0xffffu, hi = word[w] >> 16;
                below += (uint32_t)(lo < e) + (uint32_t)(hi < e);
                upto += (uint32_t)(lo <= e) + (uint32_t)(hi <= e);
            }
        }
        p += i < r ? upto : below;
        same += i < r ? upto - below : 0;
    }
    __syncwarp();
    for (uint32_t m = 1; m >> log == 0; m <<= 1) {
        p += __shfl_xor_sync(0xffffffffu, p, m);
        same += __shfl_xor_sync(0xffffffffu, same, m);
    }
    if (part || tid >> log >= n) return;
    pairs->row[p] = (uint8_t)r;
    pairs->rank[p] = (uint8_t)k;
    pairs->expert[p] = (uint8_t)j;
    if (!same) pairs->first[j] = (uint8_t)p;
    out->rank[r][j] = (uint8_t)k;
}

/* What a warp makes of a row's choice: lane k < topk has the k-th best expert and its score. Alone in its step the row is the union as well, and the loader
 * need not wait for the weights. */
MK_DEV void mk_route_take(const mk_dev *d, const mk_route *t, uint32_t r, uint32_t e, float w, mk_routes *out, mk_route_scratch *x)
{
    const uint32_t lane = d->lane, topk = t->topk;
    uint32_t rank = 0; /* chosen experts of lower id; lanes without one have the greatest number */
#pragma unroll
    for (uint32_t k = 0; k < 8; k++) rank += __shfl_sync(0xffffffffu, e, k) < e;
    if (topk > 8)
#pragma unroll
        for (uint32_t k = 8; k < MK_MAX_TOPK; k++) rank += __shfl_sync(0xffffffffu, e, k) < e;
    if (d->step->nrows > 1) {
        if (lane < topk) {
            x->id[r][rank] = (uint16_t)e;
            atomicOr(x->chosen + e / 32, 1u << e % 32);
        }
    } else {
        mk_pairs *pairs = &d->sh->pairs;
        if (lane < topk) out->expert[rank] = (uint16_t)e;
        if (lane == 0) out->n_union = topk;
        mk_warp_arrive(mk_smem(&d->sh->route_full), lane);
        if (lane < topk) {
            out->rank[0][rank] = pairs->expert[rank] = pairs->rank[rank] = pairs->first[rank] = (uint8_t)rank;
            pairs->row[rank] = 0;
        }
        if (lane == 0) pairs->first[topk] = (uint8_t)topk;
    }
    float sum = w;
#pragma unroll
    for (int m = MK_MAX_TOPK / 2; m; m >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, m);
    if (t->renorm) w = mk_div(w, sum + 1e-20f);
    if (lane < topk) out->weight[r][rank] = w * t->scale;
}

MK_DEV bool mk_route_by_logits(const mk_route *t)
{
    return t->score == MK_SCORE_SOFTMAX && mk_route_plain(t);
}
/* One warp, one row. */
MK_DEV void mk_route_row(const mk_dev *d, const mk_route *t, uint32_t r, const float *bias, uint32_t *key, mk_routes *out, mk_route_scratch *x)
{
    const bool by_logits = mk_route_by_logits(t);
    float *score = (float *)key + t->experts;
    uint32_t best = 0;
    if (!by_logits && (t->score == MK_SCORE_SOFTMAX || t->groups > 1)) mk_route_prepare(t, bias, key, score);
    const uint32_t e = mk_route_choose(t->experts, t->topk, key, d->lane, &best);
    const float max = mk_order_value(__shfl_sync(0xffffffffu, best, 0));
    float w = 0;
    if (d->lane < t->topk) w = by_logits ? mk_expf(mk_order_value(best) - max) : score[e];
    mk_route_take(d, t, r, e, w, out, x);
}

/* ---- one row, a thread an expert or two ----------------------------------------------------------------------------- */

/* Half warps that have experts say their greatest keys; the topk-th of these is one that at least topk keys reach, and few others. Those are written down by ascending id,
 * and one warp counts who comes before whom. */
#define MK_ROUTE_HALVES (2 * MK_WARPS)
#define MK_ROUTE_SLOTS  32u
typedef struct mk_route_list {
    alignas(16) uint32_t best[MK_ROUTE_HALVES];
    uint32_t key[MK_ROUTE_SLOTS];    /* of the candidates; 0: none */
    uint2 expert[MK_ROUTE_SLOTS];    /* id, score */
    uint8_t count[MK_WARPS];         /* candidates of a warp */
    uint2 choice[MK_MAX_TOPK];       /* in order: score, place by id */
    uint32_t every[2 * MK_COMPUTE];  /* keys and scores of all, should there be too many candidates */
    float score[2 * MK_COMPUTE];
} mk_route_list;
static_assert(sizeof(mk_route_list) <= MK_RED_FLOATS * 4 && MK_ROUTE_HALVES >= MK_MAX_TOPK && MK_WARPS == 8, "lists fit, a choice is no longer than the halves, eight counts");

/* Of four keys. */
MK_DEV uint32_t mk_count_above(uint4 q, uint32_t key)
{
    return (uint32_t)(q.x > key) + (uint32_t)(q.y > key) + (uint32_t)(q.z > key) + (uint32_t)(q.w > key);
}

/* Many ties, or few experts to choose many from: the choice takes the candidates' place. By one warp. */
MK_CALL void mk_route_among_all(const mk_route *t, mk_route_list *x)
{
    const uint32_t lane = threadIdx.x % 32, topk = t->topk;
    uint32_t place = 0, best = 0;
    const uint32_t e = mk_route_choose(t->experts, topk, x->every, lane, &best);
#pragma unroll 1
    for (uint32_t k = 0; k < topk; k++) place += __shfl_sync(0xffffffffu, e, k) < e;
    x->key[lane] = 0;
    __syncwarp();
    if (lane < topk) {
        x->key[place] = 0xffffffffu - lane;
        x->expert[place] = make_uint2(e, __float_as_uint(x->score[e]));
    }
    __syncwarp();
}

/* By all warps: writes the candidates down; returns their number. A thread's experts are neighbours from e on; a key of 0 is none. */
template <uint32_t PER> MK_DEV uint32_t mk_route_candidates(const mk_dev *d, mk_route_list *x, uint32_t e, const uint32_t *key, const float *score)
{
    const uint32_t lane = d->lane, warp = d->warp, topk = d->in->route.topk, below = (1u << lane) - 1;
    const uint32_t top = PER == 1 ? key[0] : max(key[0], key[PER - 1]);
    const uint32_t lo = __reduce_max_sync(0xffffffffu, lane < 16 ? top : 0), hi = __reduce_max_sync(0xffffffffu, lane < 16 ? 0 : top);
    if (lane == 0) *(uint2 *)&x->best[2 * warp] = make_uint2(lo, hi);
    if (warp == 0) x->key[lane] = 0;
    mk_sync();
    mk_trace_input(d);

    const uint4 *const half = (const uint4 *)x->best + lane / 16 * 2;
    const uint32_t own = x->best[lane & 15];
    uint32_t above = mk_count_above(half[0], own) + mk_count_above(half[1], own);
    above += __shfl_xor_sync(0xffffffffu, above, 16);
    const uint32_t least = max(__reduce_min_sync(0xffffffffu, above < topk ? own : 0xffffffffu), 1u);
    uint32_t mine = 0, of_warp = 0, place = 0;
#pragma unroll
    for (uint32_t j = 0; j < PER; j++) {
        const uint32_t b = __ballot_sync(0xffffffffu, key[j] >= least);
        mine |= key[j] >= least ? 1u << j : 0;
        of_warp += __popc(b);
        place += __popc(b & below);
    }
    if (lane == 0) x->count[warp] = (uint8_t)of_warp;
    mk_sync();
    const uint2 count = *(const uint2 *)x->count;
    const uint64_t before = ((uint64_t)count.y << 32 | count.x) & (1ull << 8 * warp) - 1;
    const uint32_t n = __dp4a(count.y, 0x01010101u, __dp4a(count.x, 0x01010101u, 0u));
    place += __dp4a((uint32_t)(before >> 32), 0x01010101u, __dp4a((uint32_t)before, 0x01010101u, 0u));
    if (n > MK_ROUTE_SLOTS) {
#pragma unroll
        for (uint32_t j = 0; j < PER; j++) {
            if (e + j >= d->in->route.experts) continue;
            x->every[e + j] = key[j];
            x->score[e + j] = score[j];
        }
        mk_sync();
        if (warp == 0) mk_route_among_all(&d->in->route, x);
        return topk;
    }
#pragma unroll
    for (uint32_t j = 0; j < PER; j++)
        if (mine >> j & 1) {
            x->key[place] = key[j];
            x->expert[place++] = make_uint2(e + j, __float_as_uint(score[j]));
        }
    mk_sync();
    return n;
}

/* One warp counts, of every candidate, those before it: greater keys, and equal ones of lower ids. It tells the loader as soon as it knows, and then makes weights. */
MK_DEV void mk_route_decide(const mk_dev *d, mk_route_list *x, uint32_t n, mk_routes *out)
{
    const mk_route *t = &d->in->route;
    const uint32_t lane = d->lane, topk = t->topk, key = x->key[lane];
    const uint2 expert = x->expert[lane];
    uint32_t rank = __popc(__match_any_sync(0xffffffffu, key) & (1u << lane) - 1);
#pragma unroll 1
    for (uint32_t j = 0; j < n; j += 8) rank += mk_count_above(*(const uint4 *)&x->key[j], key) + mk_count_above(*(const uint4 *)&x->key[j + 4], key);
    const bool chosen = key && rank < topk;
    const uint32_t place = __popc(__ballot_sync(0xffffffffu, chosen) & (1u << lane) - 1);
    if (chosen) {
        out->expert[place] = (uint16_t)expert.x;
        x->choice[rank] = make_uint2(expert.y, place);
    }
    if (lane == 0) out->n_union = topk;
    mk_warp_arrive(mk_smem(&d->sh->route_full), lane);
    const uint2 choice = x->choice[lane < topk ? lane : 0];
    float w = __uint_as_float(choice.x);
    if (t->score == MK_SCORE_SOFTMAX) w = mk_expf(w - __uint_as_float(x->choice[0].x));
    if (lane >= topk) w = 0;
    float sum = w;
#pragma unroll
    for (int m = MK_MAX_TOPK / 2; m; m >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, m);
    if (t->renorm) w = mk_div(w, sum + 1e-20f);
    if (lane < topk) out->weight[0][choice.y] = w * t->scale;
}

/* What is known of one row's routes before its choice is: its experts are the union. By the other warps while the first decides. */
MK_DEV void mk_route_ranks(const mk_dev *d, mk_routes *out, uint32_t topk)
{
    static_assert(sizeof out->rank % 4 == 0 && MK_MAX_UNION % 4 == 0 && MK_MAX_TOPK < 32, "rank by words, those of row 0 first");
    const uint32_t t = d->tid - 32;
#pragma unroll 1
    for (uint32_t i = t; i < sizeof out->rank / 4; i += MK_COMPUTE - 32) {
        const uint32_t first = 4 * i, none = first >= topk ? 0xffffffffu : topk - first < 4 ? 0xffffffffu << 8 * (topk - first) : 0;
        ((uint32_t *)out->rank)[i] = 0x03020100u + first * 0x01010101u | none;
    }
    mk_pairs *pairs = &d->sh->pairs;
    if (t <= topk) pairs->first[t] = (uint8_t)t;
    if (t >= topk) return;
    pairs->rank[t] = pairs->expert[t] = (uint8_t)t;
    pairs->row[t] = 0;
}

/* Few experts are those of every second thread, or fourth, so that all halves of warps have some: binary logarithm. */
MK_DEV uint32_t mk_route_apart(uint32_t experts)
{
    return experts <= MK_COMPUTE / 4 ? 2 : experts <= MK_COMPUTE / 2 ? 1 : 0;
}

template <uint32_t PER> MK_DEV void mk_route_one_of(const mk_dev *d)
{
    const mk_route *t = &d->in->route;
    const uint32_t n = t->experts, apart = PER == 1 ? mk_route_apart(n) : 0, none = d->tid & (1u << apart) - 1, e = none ? n : d->tid * PER >> apart;
    mk_routes *out = (mk_routes *)mk_local_at(d, d->in->signal_vec);
    mk_route_list *x = (mk_route_list *)d->sh->red;
    const mk_logits logits = mk_logits_of(d, e);
    uint64_t q[PER] = {};
    float bias[PER] = {};
    if constexpr (PER == 2)
        if (e < n) mk_logits_look(&logits, q);
#pragma unroll
    for (uint32_t j = 0; j < PER; j++)
        if (e + j < n) {
            if constexpr (PER == 1) q[j] = mk_logit_look(&logits, j);
            if (t->has_bias) bias[j] = __ldg(d->a->param + t->param_off + e + j);
        }
    if (d->tid == 0) {
        mk_stage_wait(mk_smem(&d->sh->route_empty), d->memo->route_parity ^ 1, MK_FAULT_ROUTE);
        d->memo->route_parity ^= 1;
    }
    mk_sync(); /* h is staged; the reduction area and what the last layer's route left are free */
    const float norm = mk_row_factor(d, &mk_fed_of(d->in)->plan, 0);
    uint32_t key[PER];
    float s[PER];
    if constexpr (PER == 2)
        if (e < n) mk_logits_wait(&logits, e + 1 < n, q);
#pragma unroll
    for (uint32_t j = 0; j < PER; j++) s[j] = e + j >= n ? 0 : PER == 1 ? mk_logit_wait(&logits, 0, 0, q[j], norm) : __fmul_rn(mk_sum_value(q[j], logits.addends), norm);
    if (t->score != MK_SCORE_SOFTMAX)
#pragma unroll
        for (uint32_t j = 0; j < PER; j++) s[j] = mk_sigmoidf(s[j]);
#pragma unroll
    for (uint32_t j = 0; j < PER; j++) key[j] = e + j < n ? mk_order_key(t->has_bias ? s[j] + bias[j] : s[j]) : 0;
    const uint32_t candidates = mk_route_candidates<PER>(d, x, e, key, s);
    mk_trace_publish(d);
    if (d->warp == 0) {
        mk_route_decide(d, x, candidates, out);
    } else {
        const uint64_t had = mk_logits_clear(d);
        mk_route_ranks(d, out, t->topk);
        mk_logits_cleared(d, had);
    }
    mk_sync();
}
MK_DEV void mk_route_one_run(const mk_dev *d)
{
    mk_route_one_of<1>(d);
}
MK_DEV void mk_route_pair_run(const mk_dev *d)
{
    mk_route_one_of<2>(d);
}

/* ---- the general case ----------------------------------------------------------------------------------------------- */

MK_DEV void mk_route_run(const mk_dev *d)
{
    constexpr uint32_t PART = 4; /* of a thread's rows, whose logits are all looked at together */
    const mk_route *t = &d->in->route;
    const bool by_logits = mk_route_by_logits(t);
    const uint32_t nrows = d->step->nrows, n = t->experts, words = by_logits ? n : 2 * n; /* a row's */
    mk_routes *out = (mk_routes *)mk_local_at(d, d->in->signal_vec);
    mk_route_scratch *x = (mk_route_scratch *)d->sh->red;
    uint32_t *key = (uint32_t *)(x + 1);
    const uint32_t fit = mk_small_quot(MK_RED_FLOATS * 4 - sizeof *x, 4 * words), batch = fit < nrows ? fit : nrows;
    const float *bias = t->has_bias ? d->a->param + t->param_off : (const float *)0;

    /* `groups` rows side by side, `per` threads each; of more experts than threads a thread has several */
    const uint32_t per = n < MK_COMPUTE ? (n + 31) & ~31u : MK_COMPUTE, groups = mk_small_quot(MK_COMPUTE, per), group = mk_small_quot(d->tid, per), e0 = d->tid - group * per;
    mk_logits logits = mk_logits_of(d, e0);
    uint64_t q[MK_MAX_ROWS] = {};
    float b = 0;
    const auto look = [&](uint32_t first) { /* from row `first` on */
#pragma unroll
        for (uint32_t i = 0; i < MK_MAX_ROWS; i++)
            if (first + i * groups < nrows) q[i] = mk_logit_look(&logits, (first + i * groups) * MK_SUM_GROUP);
    };
    if (e0 < n && group < groups) {
        look(group);
        if (bias) b = __ldg(bias + e0);
    }
    if (d->tid == 0) mk_stage_wait(mk_smem(&d->sh->route_empty), d->memo->route_parity ^ 1, MK_FAULT_ROUTE);
    mk_sync(); /* the reduction area and what the last layer's route left are free */
    const float of_lane = mk_row_factor(d, &mk_fed_of(d->in)->plan, d->lane % MK_MAX_ROWS); /* of a row that is none it may be anything */
    if (d->tid < MK_EXPERT_LANES) x->chosen[d->tid] = 0;
    if (d->tid < sizeof x->id / 4) ((uint32_t *)x->id)[d->tid] = 0xffffffffu;
    for (uint32_t i = d->tid; i < sizeof out->rank / 4; i += MK_COMPUTE) ((uint32_t *)out->rank)[i] = 0xffffffffu;
    uint64_t had = 0;
#pragma unroll 1
    for (uint32_t r0 = 0; r0 < nrows; r0 += batch) {
        const uint32_t end = nrows - r0 < batch ? nrows : r0 + batch;
        float norm[MK_MAX_ROWS]; /* 1/rms of the rows that are looked at */
#pragma unroll
        for (uint32_t i = 0; i < MK_MAX_ROWS; i++) norm[i] = __shfl_sync(0xffffffffu, of_lane, (r0 + group + i * groups) % MK_MAX_ROWS);
        if (r0) mk_sync(); /* the rows before are read */
#pragma unroll 1
        for (uint32_t e = e0; e < n && group < groups; e += per) {
            if (per < n) {
                logits = mk_logits_of(d, e);
                if (bias) b = __ldg(bias + e);
            }
            if (r0 || e != e0) look(r0 + group);
#pragma unroll 1
            for (uint32_t r = r0 + group; r < end; r += PART * groups) {
#pragma unroll
                for (uint32_t i = 0; i < PART; i++) {
                    const uint32_t row = r + i * groups;
                    if (row >= end) break;
                    uint32_t *k = key + (row - r0) * words;
                    float s = mk_logit_wait(&logits, row * MK_SUM_GROUP, row, q[i], r == r0 + group ? norm[i] : norm[i + PART]);
                    if (t->score == MK_SCORE_SIGMOID) s = mk_sigmoidf(s);
                    if (t->score == MK_SCORE_SIGMOID || by_logits) k[e] = mk_order_key(bias ? s + b : s);
                    if (!by_logits) ((float *)k)[n + e] = s;
                }
#pragma unroll
                for (uint32_t i = 0; i < PART; i++) q[i] = q[i + PART];
            }
        }
        mk_sync();
        if (!r0) mk_trace_input(d);
        const uint32_t r = r0 + d->warp;
        if (end == nrows) had = mk_logits_clear(d); /* complete; before the warp's own row, if it has one: the answer is there behind it */
        if (r < end) mk_route_row(d, t, r, bias, key + (r - r0) * words, out, x);
    }
    if (nrows > 1) {
        mk_sync();
        mk_route_union(out, nrows, t->topk); /* one row: mk_route_take */
    }
    if (d->tid == 0) d->memo->route_parity ^= 1;
    mk_logits_cleared(d, had);
    mk_sync();
}

#endif
