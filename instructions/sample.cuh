/* SAMPLE on the device: rows one after the other, all threads of one worker on each. Semantics: sample.c; weights are integers, so the order in
 * which they are added does not matter and the tokens are the twin's. */
#ifndef MK_SAMPLE_CUH
#define MK_SAMPLE_CUH

#include "instructions/mk_math.h"
#include "instructions/philox.h"
#include "instructions/route.cuh"

#define MK_DIGITS 2048u

typedef struct mk_dist {
    const float *logit;
    uint32_t vocab;
    float max, temperature;
} mk_dist;

/* What is left of a distribution: sample.c. */
typedef struct mk_left {
    uint32_t key, ties;
    uint64_t least, weight;
} mk_left;

typedef struct mk_sample_scratch {
    unsigned long long weight[MK_DIGITS];
    uint32_t count[MK_DIGITS];
    uint64_t part[MK_WARPS];
    uint32_t tie[MK_WARPS];
    mk_left left;
    uint64_t above, weight_above, total;
    uint32_t key, token;
    float max, sum;
    uint32_t best;
    float warp_max[MK_WARPS], warp_sum[MK_WARPS];
    uint32_t warp_best[MK_WARPS];
} mk_sample_scratch;
static_assert(sizeof(mk_sample_scratch) <= MK_STAGING, "scratch fits the staging area");

MK_DEV uint64_t mk_weigh(const mk_dist *q, float l)
{
    float e = mk_expf(mk_div((l - q->max), q->temperature));
    double x = e <= 1.0f ? (double)e : 0.0;
    return (uint64_t)(int64_t)__dadd_rn(__dmul_rn(x, 0x1p40), 0.5);
}
MK_DEV uint64_t mk_warp_sum64(uint64_t v)
{
#pragma unroll
    for (int m = 16; m; m >>= 1) v += __shfl_xor_sync(0xffffffffu, (unsigned long long)v, m);
    return v;
}

/* The shortest prefix of the order with at least `target` tokens, or at least that weight. All compute threads; the result in x->left. */
MK_CALL void mk_prefix(const mk_dist q0, bool by_weight, uint64_t target)
{
    mk_sample_scratch *x = (mk_sample_scratch *)mk_sh()->staging;
    const mk_dist *q = &q0;
    const uint32_t tid = threadIdx.x;
    uint32_t key = 0, mask = 0;
    uint64_t above = 0, weight_above = 0;
    for (int pass = 0; pass < 3; pass++) {
        const uint32_t shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, digits = pass == 2 ? 1024 : 2048;
        for (uint32_t i = tid; i < digits; i += MK_COMPUTE) {
            x->count[i] = 0;
            x->weight[i] = 0;
        }
        mk_sync();
        for (uint32_t i = tid; i < q->vocab; i += MK_COMPUTE) {
            float l = __ldcg(q->logit + i);
            uint32_t k = mk_order_key(l);
            if ((k & mask) != key) continue;
            uint32_t digit = k >> shift & (digits - 1);
            atomicAdd(&x->count[digit], 1u);
            atomicAdd(&x->weight[digit], (unsigned long long)mk_weigh(q, l));
        }
        mk_sync();
        if (tid == 0) {
            uint32_t digit = digits - 1;
            for (; digit > 0; digit--) {
                uint64_t here = by_weight ? (uint64_t)x->weight[digit] : x->count[digit];
                if (above + here >= target) break;
                above += here;
                weight_above += x->weight[digit];
            }
            x->key = key | digit << shift;
            x->above = above;
            x->weight_above = weight_above;
            if (pass == 2) {
                uint64_t each = x->count[digit] ? x->weight[digit] / x->count[digit] : 0, need = target - above; /* equal logits weigh the same */
                x->left.key = x->key;
                x->left.ties = !by_weight ? (uint32_t)need : each ? (uint32_t)((need + each - 1) / each) : 1;
                x->left.weight = weight_above + x->left.ties * each;
            }
        }
        mk_sync();
        key = x->key;
        above = x->above;
        weight_above = x->weight_above;
        mask |= (digits - 1) << shift;
    }
}

/* ceil(p * total) for p in [0, 1], as the twin has it. */
MK_DEV uint64_t mk_share(float p, uint64_t total)
{
    uint64_t f = (uint64_t)((double)p * 0x1p62), lo = f * total, hi = __umul64hi(f, total), sum = lo + ((1ull << 62) - 1);
    hi += sum < lo;
    return hi << 2 | sum >> 62;
}

/* Walks what is left in ascending id: x->total = its weight; x->token = the lowest id at which the running weight exceeds `at` (vocab: none). A warp
 * has a contiguous range of ids. */
MK_CALL void mk_walk(const mk_dist q0, bool find, uint64_t at)
{
    mk_sample_scratch *x = (mk_sample_scratch *)mk_sh()->staging;
    const mk_dist *q = &q0;
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const mk_left left = x->left;
    const uint32_t per = (q->vocab + MK_WARPS * 32 - 1) / (MK_WARPS * 32) * 32, lo = warp * per;
    const uint32_t hi = lo + per < q->vocab ? lo + per : q->vocab, lower = (1u << lane) - 1;
    uint32_t ties = 0;
    for (uint32_t b = lo; b < hi; b += 32) {
        uint32_t i = b + lane;
        bool tie = i < hi && mk_order_key(__ldcg(q->logit + i)) == left.key && mk_weigh(q, __ldcg(q->logit + i)) >= left.least;
        ties += __popc(__ballot_sync(0xffffffffu, tie));
    }
    if (lane == 0) x->tie[warp] = ties;
    if (tid == 0) x->token = q->vocab;
    mk_sync();
    uint32_t before = 0;
    for (uint32_t w = 0; w < warp; w++) before += x->tie[w];
    for (int round = 0; round < (find ? 2 : 1); round++) { /* 0: the warp's weight; 1: where it passes `at` */
        uint32_t seen = before;
        uint64_t sum = 0;
        if (round) {
            for (uint32_t w = 0; w < warp; w++) sum += x->part[w];
            if (sum > at || sum + x->part[warp] <= at) break;
        }
        for (uint32_t b = lo; b < hi; b += 32) {
            uint32_t i = b + lane;
            float l = i < hi ? __ldcg(q->logit + i) : -INFINITY;
            uint32_t k = i < hi ? mk_order_key(l) : 0;
            uint64_t w = i < hi ? mk_weigh(q, l) : 0;
            bool tie = i < hi && k == left.key && w >= left.least;
            uint32_t bits = __ballot_sync(0xffffffffu, tie);
            bool in = i < hi && w >= left.least && (k > left.key || (tie && seen + __popc(bits & lower) < left.ties));
            seen += __popc(bits);
            if (!in) w = 0;
            if (!round) {
                sum += w;
                continue;
            }
            uint64_t upto = w;
#pragma unroll
            for (int m = 1; m < 32; m <<= 1) {
                uint64_t o = __shfl_up_sync(0xffffffffu, (unsigned long long)upto, m);
                if (lane >= m) upto += o;
            }
            uint32_t hit = __ballot_sync(0xffffffffu, sum + upto > at && in);
            if (hit) {
                if (lane == 0) x->token = b + __ffs((int)hit) - 1;
                break;
            }
            sum += __shfl_sync(0xffffffffu, (unsigned long long)upto, 31);
        }
        if (!round) {
            sum = mk_warp_sum64(sum);
            if (lane == 0) x->part[warp] = sum;
            mk_sync();
        }
    }
    mk_sync();
    if (tid == 0) {
        uint64_t total = 0;
        for (uint32_t w = 0; w < MK_WARPS; w++) total += x->part[w];
        x->total = total;
    }
    mk_sync();
}

MK_DEV uint32_t mk_draw_token(const mk_dev *d, mk_sample_scratch *x, const mk_dist *q, const mk_sampling *s, uint32_t position)
{
    if (d->tid == 0) {
        x->left.key = 0;
        x->left.ties = q->vocab;
        x->left.least = x->left.weight = 0;
    }
    mk_sync();
    if (s->top_k > 0 && s->top_k < q->vocab) mk_prefix(*q, false, s->top_k);
    if (s->top_p < 1.0f) {
        if (x->left.weight == 0) {
            mk_walk(*q, false, 0);
            if (d->tid == 0) x->left.weight = x->total;
            mk_sync();
        }
        uint64_t need = mk_share(s->top_p > 0.0f ? s->top_p : 0.0f, x->left.weight);
        mk_prefix(*q, true, need ? need : 1);
    }
    if (s->min_p > 0.0f) {
        if (d->tid == 0) x->left.least = mk_share(s->min_p < 1.0f ? s->min_p : 1.0f, 1ull << 40);
        mk_sync();
    }
    mk_walk(*q, false, 0);
    uint64_t at = __umul64hi(mk_draw(s->seed, position), x->total);
    mk_sync();
    mk_walk(*q, true, at);
    return x->token;
}

/* Maximum, its lowest id and the normaliser of one row, by all threads: slices tid, tid + 512, ... a thread, then by warp, then by block. */
MK_DEV void mk_stats_merge(const mk_dev *d, uint32_t row, uint32_t slices, mk_sample_scratch *x)
{
    constexpr uint32_t PER = 4; /* slices of a thread at most: gpu.cu sees to it */
    const mk_wait *w = &d->in->wait[0];
    const mk_vec *v = &d->sh->vec[w->vec];
    const uint4 *base = mk_wait_packets(d, w, v, row);
    const uint32_t epoch = mk_wait_epoch(d, w), sp = v->slice_packets;
    float m[PER], z[PER], max = -INFINITY, sum = 0;
    uint32_t best = 0xffffffffu;
#pragma unroll
    for (uint32_t k = 0; k < PER; k++) {
        const uint32_t s = d->tid + k * MK_COMPUTE;
        m[k] = -INFINITY;
        z[k] = 0;
        if (s >= slices) continue;
        const uint4 q = mk_packet_wait(base + s * sp, w, row, s * sp, epoch);
        m[k] = __uint_as_float(q.x);
        z[k] = __uint_as_float(q.z);
        if (m[k] > max) {
            max = m[k];
            best = q.y;
        }
    }
#pragma unroll
    for (int k = 16; k; k >>= 1) { /* ties to the lower id */
        const float om = __shfl_xor_sync(0xffffffffu, max, k);
        const uint32_t ob = __shfl_xor_sync(0xffffffffu, best, k);
        if (om > max || (om == max && ob < best)) {
            max = om;
            best = ob;
        }
    }
    if (d->lane == 0) {
        x->warp_max[d->warp] = max;
        x->warp_best[d->warp] = best;
    }
    mk_sync();
    max = x->warp_max[0];
    best = x->warp_best[0];
    for (uint32_t k = 1; k < MK_WARPS; k++)
        if (x->warp_max[k] > max || (x->warp_max[k] == max && x->warp_best[k] < best)) {
            max = x->warp_max[k];
            best = x->warp_best[k];
        }
#pragma unroll
    for (uint32_t k = 0; k < PER; k++)
        if (m[k] > -INFINITY) sum = __fmaf_rn(z[k], mk_expf(m[k] - max), sum);
    sum = mk_warp_sum(sum);
    if (d->lane == 0) x->warp_sum[d->warp] = sum;
    mk_sync();
    if (d->tid == 0) {
        sum = 0;
        for (uint32_t k = 0; k < MK_WARPS; k++) sum += x->warp_sum[k];
        x->max = max;
        x->best = best == 0xffffffffu ? 0 : best;
        x->sum = sum;
    }
    mk_sync();
}

MK_DEV void mk_sample_run(const mk_dev *d)
{
    const mk_sample *s = &d->in->sample;
    mk_sampled *out = (mk_sampled *)mk_local_at(d, d->in->signal_vec);
    mk_sample_scratch *x = (mk_sample_scratch *)d->sh->staging;
    mk_staged_drop(d);
    mk_bulk_wait(d, &d->in->wait[1]);
    const float *logits = (const float *)mk_bulk_at(d, d->in->wait[1].vec);
    if (d->tid < MK_MAX_ROWS) {
        out->token[d->tid] = 0;
        out->logprob[d->tid] = 0;
    }
    for (uint32_t r = 0; r < d->step->nrows; r++) {
        const mk_row *row = &d->step->row[r];
        if (!(row->flags & (MK_ROW_SAMPLE | MK_ROW_SCORE))) continue;
        const float *l = logits + (size_t)r * s->vocab;
        mk_stats_merge(d, r, s->slices, x);
        if (!r) mk_trace_input(d);
        const float max = x->max, sum = x->sum;
        const uint32_t best = x->best;
        uint32_t token = row->target;
        if (row->flags & MK_ROW_SAMPLE) {
            const mk_sampling p = d->a->slot[row->slot].sampling;
            token = best;
            if (p.temperature > 0.0f) {
                const mk_dist q = {l, s->vocab, max, p.temperature};
                token = mk_draw_token(d, x, &q, &p, row->pos + 1);
                if (token >= s->vocab) token = best;
            }
        }
        token = token < s->vocab ? token : 0;
        if (d->tid == 0) {
            out->token[r] = token;
            out->logprob[r] = (__ldcg(l + token) - max) - mk_logf(sum);
        }
        mk_sync();
    }
    mk_sync();
}

#endif
