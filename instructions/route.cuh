/* ROUTE on the device: one warp a row chooses, all of them make the union. Semantics: route.c. Also lists the (expert, row) pairs for
 * EXPERT_DOWN and wakes the expert loader. */
#ifndef MK_ROUTE_CUH
#define MK_ROUTE_CUH

#include "instructions/mk_math.h"
#include "megakernel/device.cuh"

#define MK_EXPERT_LANES (MK_MAX_EXPERT / 32)

/* Order-preserving, greatest first to be found by max; -0 equals +0; NaN is least. */
MK_DEV uint32_t mk_order_key(float v)
{
    uint32_t u = __float_as_uint(v + 0.0f);
    if ((u & 0x7fffffffu) > 0x7f800000u) u = 0xff800000u;
    return u ^ ((uint32_t)((int32_t)u >> 31) | 0x80000000u);
}

/* Scratch: the rows' scores, then their choices. */
typedef struct mk_route_scratch {
    uint16_t id[MK_MAX_ROWS][MK_MAX_TOPK]; /* ascending */
    uint32_t chosen[MK_EXPERT_LANES];      /* bit set of all rows' experts */
    uint32_t before[MK_EXPERT_LANES];      /* experts of the union in the words before */
} mk_route_scratch;

/* Turns one row's logits s[0..n) into scores, by one warp; expert i belongs to lane i mod 32. */
MK_DEV void mk_route_scores(const mk_route *t, float *s, uint32_t lane)
{
    const uint32_t n = t->experts;
    if (t->score == MK_SCORE_SIGMOID) {
        for (uint32_t i = lane; i < n; i += 32) s[i] = mk_sigmoidf(s[i]);
        return;
    }
    float max = -INFINITY, sum = 0;
    for (uint32_t i = lane; i < n; i += 32) max = fmaxf(max, s[i]);
#pragma unroll
    for (int m = 16; m; m >>= 1) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, m));
    for (uint32_t i = lane; i < n; i += 32) {
        s[i] = mk_expf(s[i] - max);
        sum += s[i];
    }
    sum = mk_warp_sum(sum);
    for (uint32_t i = lane; i < n; i += 32) s[i] /= sum;
}

/* Bit i of the result: this lane's expert lane + 32 i stays, by the choice among groups. */
MK_DEV uint32_t mk_route_groups(const mk_dev *d, const mk_route *t, const float *s)
{
    const uint32_t n = t->experts, size = n / t->groups, lane = d->lane;
    if (t->groups <= 1) return 0xffffffffu;
    const float *bias = d->a->param + t->param_off;
    float best = -INFINITY; /* lane g: score of group g (at most 32 groups) */
    if (lane < t->groups) {
        float one = -INFINITY, two = -INFINITY;
        for (uint32_t i = lane * size; i < (lane + 1) * size; i++) {
            float c = t->has_bias ? s[i] + __ldg(bias + i) : s[i];
            if (c > one) {
                two = one;
                one = c;
            } else if (c > two) {
                two = c;
            }
        }
        best = one + (size < 2 ? 0.0f : two);
    }
    uint32_t key = lane < t->groups ? mk_order_key(best) : 0, kept = 0, keep = 0;
    for (uint32_t k = 0; k < t->topk_groups; k++) {
        uint32_t most = __reduce_max_sync(0xffffffffu, kept >> lane & 1 ? 0 : key);
        uint32_t win = __ballot_sync(0xffffffffu, !(kept >> lane & 1) && key == most && lane < t->groups);
        kept |= win & (0u - win);
    }
    for (uint32_t i = 0; lane + 32 * i < n; i++) keep |= (kept >> ((lane + 32 * i) / size) & 1) << i;
    return keep;
}

/* The row's experts, ascending, and their weights. */
MK_DEV void mk_route_row(const mk_dev *d, const mk_route *t, float *s, uint16_t *id, uint32_t *chosen, float *weight)
{
    const uint32_t n = t->experts, lane = d->lane, topk = t->topk;
    const float *bias = d->a->param + t->param_off;
    mk_route_scores(t, s, lane);
    __syncwarp();
    uint32_t left = mk_route_groups(d, t, s), mine = 0; /* bits: still to be had; chosen */
    uint32_t key = 0, at = 0;
    bool stale = true;
    for (uint32_t k = 0; k < topk; k++) {
        if (stale) { /* this lane's best of what is left; ties to the lower id */
            key = 0;
            at = 0xffffffffu;
            for (uint32_t i = 0; lane + 32 * i < n; i++) {
                uint32_t e = lane + 32 * i;
                if (!(left >> i & 1)) continue;
                uint32_t c = mk_order_key(t->has_bias ? s[e] + __ldg(bias + e) : s[e]);
                if (at == 0xffffffffu || c > key) {
                    key = c;
                    at = e;
                }
            }
        }
        uint32_t most = __reduce_max_sync(0xffffffffu, at == 0xffffffffu ? 0 : key);
        uint32_t win = __reduce_min_sync(0xffffffffu, at != 0xffffffffu && key == most ? at : 0xffffffffu);
        stale = at == win;
        if (stale) {
            left &= ~(1u << (at / 32));
            mine |= 1u << (at / 32);
        }
    }
    /* rank = chosen experts of lower id: earlier words, then earlier lanes */
    uint32_t rank = 0;
    for (uint32_t i = 0; 32 * i < n; i++) {
        uint32_t word = __ballot_sync(0xffffffffu, mine >> i & 1);
        if (mine >> i & 1) id[rank + __popc(word & ((1u << lane) - 1))] = (uint16_t)(lane + 32 * i);
        if (lane == 0 && word) atomicOr(chosen + i, word);
        rank += __popc(word);
    }
    __syncwarp();
    if (lane < topk) {
        float sum = 0, w = s[id[lane]];
        for (uint32_t k = 0; k < topk; k++) sum += s[id[k]];
        if (t->renorm) w /= sum + 1e-20f;
        weight[lane] = w * t->scale;
    }
}

MK_DEV void mk_route_run(const mk_dev *d)
{
    const mk_route *t = &d->in->route;
    const uint32_t nrows = d->step->nrows, n = t->experts, topk = t->topk;
    mk_routes *out = (mk_routes *)mk_local_at(d, d->in->signal_vec);
    mk_pairs *pairs = &d->sh->pairs;
    mk_route_scratch *x = (mk_route_scratch *)d->sh->red;
    float *s = (float *)(x + 1);
    if (sizeof *x + nrows * n * 4 > sizeof d->sh->red) { /* the staging area would do as well, but its vector may be wanted again */
        s = (float *)d->sh->staging;
        mk_staged_drop(d);
    }
    if (d->tid == 0) mk_stage_wait(d, mk_smem(&d->sh->route_empty), d->memo->route_parity ^ 1, MK_FAULT_ROUTE);
    mk_sync(); /* the reduction area and what the last layer's route left are free */
    if (d->tid < MK_EXPERT_LANES) x->chosen[d->tid] = 0;
    for (uint32_t i = d->tid; i < sizeof out->rank / 4; i += MK_COMPUTE) ((uint32_t *)out->rank)[i] = 0xffffffffu;
    if (d->warp < nrows) mk_warp_read(&d->in->wait[0], d->warp, 0, n, s + d->warp * n);
    mk_sync();
    mk_trace_input(d);
    if (d->warp < nrows) mk_route_row(d, t, s + d->warp * n, x->id[d->warp], x->chosen, out->weight[d->warp]);
    mk_sync();
    if (d->warp == 0) {
        uint32_t word = x->chosen[d->lane], count = __popc(word), sum = count;
#pragma unroll
        for (int m = 1; m < 32; m <<= 1) {
            uint32_t o = __shfl_up_sync(0xffffffffu, sum, m);
            if (d->lane >= m) sum += o;
        }
        x->before[d->lane] = sum - count;
        if (d->lane == 31) {
            out->n_union = sum;
            pairs->first[sum] = (uint8_t)(nrows * topk);
        }
    }
    mk_sync();
    if (d->tid < nrows * topk) {
        uint32_t r = d->tid / topk, k = d->tid - r * topk, e = x->id[r][k], p = 0, same = 0;
        uint32_t j = x->before[e / 32] + __popc(x->chosen[e / 32] & ((1u << (e % 32)) - 1));
        for (uint32_t i = 0; i < nrows; i++)
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
    mk_sync();
    if (d->tid == 0) {
        mk_mbar_arrive(mk_smem(&d->sh->route_full));
        d->memo->route_parity ^= 1;
    }
}

#endif
