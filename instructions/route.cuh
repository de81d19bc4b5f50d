/* ROUTE on the device: a thread an expert waits for its logit and scores it, a warp a row chooses. Semantics: route.c. Also lists the (expert, row) pairs for
 * EXPERT_DOWN and wakes the expert loader, whose weights everybody waits for: what happens between the last logit and the first expert counts for all. */
#ifndef MK_ROUTE_CUH
#define MK_ROUTE_CUH

#include "instructions/mk_math.h"
#include "instructions/value.cuh"

#define MK_EXPERT_LANES (MK_MAX_EXPERT / 32)

/* Order-preserving, greatest first to be found by max; -0 equals +0; NaN is least. Never 0. */
MK_DEV uint32_t mk_order_key(float v)
{
    uint32_t u = __float_as_uint(v + 0.0f);
    if ((u & 0x7fffffffu) > 0x7f800000u) u = 0xff800000u;
    return u ^ ((uint32_t)((int32_t)u >> 31) | 0x80000000u);
}

/* In the reduction area; then, for as many rows as fit, order keys of the choices and scores: uint32_t key[n], float score[n] a row. A key of 0 is out of the
 * race. */
typedef struct mk_route_scratch {
    uint16_t id[MK_MAX_ROWS][MK_MAX_TOPK]; /* ascending */
    uint32_t chosen[MK_EXPERT_LANES];      /* bit set of all rows' experts */
    uint32_t before[MK_EXPERT_LANES];      /* experts of the union in the words before */
} mk_route_scratch;
static_assert(sizeof(mk_route_scratch) + MK_MAX_EXPERT * 8 <= MK_RED_FLOATS * 4, "a row fits");

/* score[0..n) from logits to probabilities, by one warp; expert i belongs to lane i mod 32. */
MK_DEV void mk_route_softmax(uint32_t n, const float *bias, uint32_t *key, float *score)
{
    const uint32_t lane = threadIdx.x % 32;
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
    if (t->score == MK_SCORE_SOFTMAX) mk_route_softmax(t->experts, bias, key, score);
    if (t->groups > 1) mk_route_groups(t, bias, key, score);
}

/* One warp chooses a row's experts: lane k < topk gets the k-th best; ties go to the lower id. Expert i belongs to lane i mod 32, and a lane knows its best
 * three, so that the keys are hardly ever looked through again. The keys of the chosen become 0. Nothing here makes lanes part. */
MK_DEV uint32_t mk_route_choose(uint32_t n, uint32_t topk, uint32_t *key, uint32_t lane)
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
            k1 = won ? k2 : k1;
            at1 = won ? at2 : at1;
            k2 = won ? k3 : k2;
            at2 = won ? at3 : at2;
            k3 = won ? 0 : k3;
            gone = __any_sync(0xffffffffu, won && k1 == 0);
        } while (++k < topk && !gone);
    } while (k < topk);
    return mine;
}

/* More than one row: the union of their choices and the pairs. All compute threads. */
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
        x->before[lane] = sum - count;
        if (lane == 31) {
            out->n_union = sum;
            pairs->first[sum] = (uint8_t)(nrows * topk);
        }
    }
    mk_sync();
    if (tid >= nrows * topk) return;
    uint32_t r = mk_small_quot(tid, topk), k = tid - r * topk, e = x->id[r][k], p = 0, same = 0;
    uint32_t j = x->before[e / 32] + __popc(x->chosen[e / 32] & ((1u << (e % 32)) - 1));
#pragma unroll 1
    for (uint32_t i = 0; i < nrows; i++)
#pragma unroll 1
        for (uint32_t q = 0; q < topk; q++) {
            uint32_t o = x->id[i][q];
            p += o < e || (o == e && i < r);
            same += o == e && i < r;
        }
    pairs->row[p] = (uint8_t)r;
    pairs->rank[p] = (uint8_t)k;
    if (!same) {
        pairs->first[j] = (uint8_t)p;
        out->expert[j] = (uint16_t)e;
    }
    out->rank[r][j] = (uint8_t)k;
}

/* One warp, one row: choice and weights; alone in its step it is the union as well. */
MK_DEV void mk_route_row(const mk_dev *d, const mk_route *t, uint32_t r, const float *bias, uint32_t *key, float *score, mk_routes *out, mk_route_scratch *x)
{
    const uint32_t lane = d->lane, topk = t->topk;
    if (t->score == MK_SCORE_SOFTMAX || t->groups > 1) mk_route_prepare(t, bias, key, score);
    const uint32_t e = mk_route_choose(t->experts, topk, key, lane);
    float w = lane < topk ? score[e] : 0.0f, sum = w;
    uint32_t rank = 0; /* chosen experts of lower id; lanes without one have the greatest number */
#pragma unroll 1
    for (uint32_t k0 = 0; k0 < topk; k0 += 8)
#pragma unroll
        for (uint32_t k = 0; k < 8; k++) rank += __shfl_sync(0xffffffffu, e, k0 + k) < e;
#pragma unroll
    for (int m = MK_MAX_TOPK / 2; m; m >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, m);
    if (lane >= topk) return;
    if (t->renorm) w = mk_div(w, sum + 1e-20f);
    out->weight[r][rank] = w * t->scale;
    if (d->step->nrows > 1) {
        x->id[r][rank] = (uint16_t)e;
        atomicOr(x->chosen + e / 32, 1u << e % 32);
        return;
    }
    mk_pairs *pairs = &d->sh->pairs;
    out->expert[rank] = (uint16_t)e;
    out->rank[0][rank] = pairs->rank[rank] = pairs->first[rank] = (uint8_t)rank;
    pairs->row[rank] = 0;
    if (lane == 0) {
        out->n_union = topk;
        pairs->first[topk] = (uint8_t)topk;
    }
}

MK_DEV void mk_route_run(const mk_dev *d)
{
    const mk_route *t = &d->in->route;
    const uint32_t nrows = d->step->nrows, n = t->experts;
    mk_routes *out = (mk_routes *)mk_local_at(d, d->in->signal_vec);
    mk_route_scratch *x = (mk_route_scratch *)d->sh->red;
    uint32_t *key = (uint32_t *)(x + 1); /* a row: n keys, n scores */
    const uint32_t fit = mk_small_quot(MK_RED_FLOATS * 4 - sizeof *x, 8 * n), batch = fit < nrows ? fit : nrows;
    const float *bias = t->has_bias ? d->a->param + t->param_off : (const float *)0;

    /* `groups` rows side by side, `per` threads each; of more experts than threads a thread has several */
    const uint32_t per = n < MK_COMPUTE ? (n + 31) & ~31u : MK_COMPUTE, groups = mk_small_quot(MK_COMPUTE, per), group = mk_small_quot(d->tid, per), e0 = d->tid - group * per;
    const mk_wait *wait = &d->in->wait[0];
    mk_spot at = {0, 0, 0};
    uint4 q = make_uint4(0, 0, 0, 0);
    float b = 0;
    if (e0 < n) {
        at = mk_spot_of(d->sh, wait, e0);
        if (group < nrows) q = mk_spot_look(d, wait, group, at);
        if (bias) b = __ldg(bias + e0);
    }
    if (d->tid == 0) mk_stage_wait(mk_smem(&d->sh->route_empty), d->memo->route_parity ^ 1, MK_FAULT_ROUTE);
    mk_sync(); /* the reduction area and what the last layer's route left are free */
    if (d->tid < MK_EXPERT_LANES) x->chosen[d->tid] = 0;
    for (uint32_t i = d->tid; i < sizeof out->rank / 4; i += MK_COMPUTE) ((uint32_t *)out->rank)[i] = 0xffffffffu;
#pragma unroll 1
    for (uint32_t r0 = 0; r0 < nrows; r0 += batch) {
        const uint32_t end = nrows - r0 < batch ? nrows : r0 + batch;
        if (r0) mk_sync(); /* the rows before are read */
#pragma unroll 1
        for (uint32_t r = r0 + group; r < end && group < groups; r += groups)
#pragma unroll 1
            for (uint32_t e = e0; e < n; e += per) {
                uint32_t *k = key + (r - r0) * 2 * n;
                if (per < n) at = mk_spot_of(d->sh, wait, e);
                if (e != e0 || r != group) q = mk_spot_look(d, wait, r, at);
                float s = mk_spot_value(d, wait, r, at, q);
                if (t->score == MK_SCORE_SIGMOID) {
                    s = mk_sigmoidf(s);
                    k[e] = mk_order_key(bias ? s + (e == e0 ? b : __ldg(bias + e)) : s);
                }
                ((float *)k)[n + e] = s;
            }
        mk_sync();
        if (!r0) mk_trace_input(d);
        const uint32_t r = r0 + d->warp;
        if (r < end) mk_route_row(d, t, r, bias, key + (r - r0) * 2 * n, (float *)key + ((r - r0) * 2 + 1) * n, out, x);
    }
    if (nrows > 1) {
        mk_sync();
        mk_route_union(out, nrows, t->topk);
        mk_sync();
    }
    __syncwarp();
    if (d->warp == 0 && mk_arrives(d->lane)) mk_mbar_arrive(mk_smem(&d->sh->route_full));
    if (d->tid == 0) d->memo->route_parity ^= 1;
    if (nrows == 1) mk_sync();
}

#endif
