/* SAMPLE on the device. Semantics: sample.c; weights are integers, so the order in which they are added does not matter and the tokens are the twin's.
 *
 * The greedy choice and every logprob come out of the LM head's statistics; the logits are not touched. A row that draws is the work of all workers: each has
 * an even share of the ids. Top-p alone mostly takes three exchanges of packets (mk_draw_try): the parts' weights, the tokens tried, the weight before each. A small top-k mostly takes one (mk_draw_few): the
 * tokens that it may leave, of which the sampler chooses by itself. Else they meet (mk_draw_meet) as often as a
 * distribution has to be narrowed down: three times a prefix (a radix selection over the order keys, 11 bits at a time, its histograms added up in device memory), once to find whose id the random
 * number falls on. Neither is in the program: they cannot deadlock, because nothing but SAMPLEs, the last thing all workers do in a step, takes part, and SCHEDULE waits for the result.
 *
 * All of it runs once a step, so that its code comes from L2, line after line: loops are not unrolled but where loads are asked for together. */
#ifndef MK_SAMPLE_CUH
#define MK_SAMPLE_CUH

#include "instructions/mk_math.h"
#include "instructions/philox.h"
#include "instructions/route.cuh"
#include "instructions/schedule.cuh"

typedef struct mk_dist {
    const float *logit;
    uint32_t lo, hi; /* this worker's ids */
    float max, temperature;
} mk_dist;

#define MK_OWN_DIGITS (MK_DIGITS / MK_COMPUTE) /* of a thread */
/* Where a digit is counted: a warp's threads, which have neighbouring digits each, find theirs side by side. */
#define MK_DIGIT_AT(digit) ((digit) % MK_OWN_DIGITS * MK_COMPUTE + (digit) / MK_OWN_DIGITS)
#define MK_AHEAD      5u /* logits of a thread that are asked for together: what a worker of 132 has of 163,840 */
#define MK_OWN        8u /* that stay in shared memory with their weights (mk_draw_try): of 248,320 */

/* What is left of a distribution: sample.c. */
typedef struct mk_left {
    uint32_t key, ties;
    uint64_t least, weight;
} mk_left;

typedef struct mk_stats {
    float max, sum; /* sum of exp(l - max) */
    uint32_t best;  /* lowest id that has the maximum; ~0: there is no maximum */
    uint32_t told;  /* it is the step's token, and the next step has begun: warp 0's */
} mk_stats;
MK_DEV uint32_t mk_stats_token(const mk_stats *s, uint32_t vocab)
{
    return s->best < vocab ? s->best : 0;
}

/* In the staging area. */
typedef struct mk_sample_scratch {
    union {
        struct {
            alignas(16) uint32_t weight[3][MK_DIGITS]; /* 14 bits each, the highest part last: additions of 32 bits are the machine's own, and 2^18 ids cannot overflow one */
            uint32_t count[MK_DIGITS];
        };
        struct { /* mk_draw_weigh: a column a thread */
            uint64_t own_weight[MK_OWN][MK_COMPUTE];
            float own_logit[MK_OWN][MK_COMPUTE];
        };
        struct { /* mk_draw_few */
            alignas(16) uint32_t few_key[MK_COMPUTE];
            uint32_t few_id[MK_COMPUTE], few_at[MK_COMPUTE];
            uint64_t few_weight[MK_COMPUTE];
        };
    };
    alignas(16) uint64_t part[2][MK_WARPS];
    mk_left left;
    uint64_t above, weight_above; /* of the digits that are chosen so far: what comes before them in the order */
    uint32_t key, told; /* what one thread has found out for all: a key; whether the id is this worker's, how many tokens it lists, which try or whether too many */
    uint4 tried[MK_TRIES]; /* as in mk_tried.token */
    uint64_t sums[2][MK_WARPS][MK_TRIES];
    uint32_t best; /* the chosen token, and its logit: thread 0's */
    float logit;
    mk_stats warps[2][MK_WARPS]; /* of rows in turn: the one before may still be read */
    mk_sampling sampling[MK_MAX_ROWS];
    uint64_t random[MK_MAX_ROWS][MK_TRIES + 1]; /* of a row that may draw: its draws */
} mk_sample_scratch;
static_assert(sizeof(mk_sample_scratch) <= MK_STAGING, "scratch fits the staging area");
static_assert(sizeof(mk_dress) <= offsetof(mk_sample_scratch, part), "the rehearsal leaves what the statistics are merged in alone");

MK_DEV mk_sample_scratch *mk_scratch(void)
{
    return (mk_sample_scratch *)mk_sh()->staging;
}

MK_CALL uint64_t mk_weigh(float l, float max, float temperature)
{
    float e = mk_expf(mk_div(l - max, temperature));
    double x = e <= 1.0f ? (double)e : 0.0;
    return (uint64_t)(int64_t)__dadd_rn(__dmul_rn(x, 0x1p40), 0.5);
}

/* Logits of a thread, `stride` apart, asked for together: the first n, the others 0; and taken one after the other, round and round. */
MK_DEV void mk_logits_ask(float (&l)[MK_AHEAD], const float *from, uint32_t stride, uint32_t n)
{
#pragma unroll
    for (uint32_t j = 0; j < MK_AHEAD; j++) l[j] = j * stride < n ? __ldcg(from + j * stride) : 0.0f;
}
MK_DEV float mk_logits_next(float (&l)[MK_AHEAD])
{
    const float first = l[0];
#pragma unroll
    for (uint32_t j = 0; j + 1 < MK_AHEAD; j++) l[j] = l[j + 1];
    l[MK_AHEAD - 1] = first;
    return first;
}

/* A logit whose key this is. */
MK_DEV float mk_key_value(uint32_t key)
{
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

/* Sum of the threads before this one; *total: of all. All compute threads. half: in turn, where two calls follow each other without a barrier between them. */
MK_CALL uint64_t mk_block_before(uint64_t v, uint64_t *total, uint32_t half)
{
    uint64_t *part = mk_scratch()->part[half];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint64_t upto = v, before = 0, all = 0;
#pragma unroll
    for (int m = 1; m < 32; m <<= 1) {
        const uint64_t o = __shfl_up_sync(0xffffffffu, (unsigned long long)upto, m);
        upto += lane >= m ? o : 0;
    }
    if (lane == 31) part[warp] = upto;
    mk_sync();
#pragma unroll
    for (uint32_t w = 0; w < MK_WARPS; w++) {
        before += w < warp ? part[w] : 0;
        all += part[w];
    }
    *total = all;
    return before + upto - v;
}

/* ceil(p * total) for p in [0, 1], as the twin has it. */
MK_CALL uint64_t mk_share(float p, uint64_t total)
{
    uint64_t f = (uint64_t)((double)p * 0x1p62), lo = f * total, hi = __umul64hi(f, total), sum = lo + ((1ull << 62) - 1);
    hi += sum < lo;
    return hi << 2 | sum >> 62;
}

/* What weight top-p asks for of this one: some at least. */
MK_DEV uint64_t mk_share_least(float p, uint64_t total)
{
    const uint64_t share = mk_share(p, total);
    return share ? share : 1;
}

/* Everybody's words of this meeting are visible to everybody after it. Clears the histogram of the next meeting, which was last read before the last one.
 * All compute threads of all parts. */
MK_CALL void mk_draw_meet(const mk_insn *in)
{
    mk_shared *sh = mk_sh();
    mk_draws *w = sh->args.draw;
    const uint32_t parts = in->sample.helpers + 1u, next = (sh->draw_met + 1) % MK_DRAW_SETS;
    for (uint32_t i = in->sample.helper * MK_COMPUTE + threadIdx.x; i < MK_DIGITS; i += parts * MK_COMPUTE) {
        __stcg(&w->weight[next][i], 0ull);
        __stcg(&w->count[next][i], 0u);
    }
    mk_sync();
    if (threadIdx.x == 0) {
        const uint32_t target = (sh->draw_met + 1) * parts;
        mk_spin s = {0, 0};
        uint32_t found;
        mk_red_release(&w->arrived); /* releases what the barrier made visible to this thread as well */
        while ((int32_t)((found = mk_load_acquire(&w->arrived)) - target) < 0)
            if (!(++s.n & 255u) && !(s.since = mk_wait_late(in, MK_FAULT_DRAW, &in->wait[1], target, found, s.since))) break;
        sh->draw_met++;
    }
    mk_sync();
}

/* The shortest prefix of the order with at least `target` tokens, or at least that weight, or (target 0) at least `share` of the whole weight: x->left. */
MK_CALL void mk_draw_prefix(const mk_insn *in, const mk_dist *q, bool by_weight, uint64_t target, float share)
{
    mk_sample_scratch *x = mk_scratch();
    const uint32_t tid = threadIdx.x, ids = q->hi - q->lo;
    const bool all = ids <= MK_AHEAD * MK_COMPUTE; /* of a thread's logits are in l */
    uint32_t key = 0, mask = 0;
    uint64_t above = 0, weight_above = 0;
    float l[MK_AHEAD];
#pragma unroll 1
    for (uint32_t pass = 0; pass < 3; pass++) {
        const uint32_t shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, last = pass == 2 ? 1023 : 2047, set = mk_sh()->draw_met % MK_DRAW_SETS;
        mk_draws *w = mk_sh()->args.draw;
        /* Where many ids have the digits so far, they are added up in shared memory first: 132 workers' ids of one digit would queue for its word in L2. Where few are left, that takes longer. */
        bool many = true;
        if (pass && all) {
            uint32_t n = 0;
#pragma unroll
            for (uint32_t j = 0; j < MK_AHEAD; j++) n += tid + j * MK_COMPUTE < ids && (mk_order_key(l[j]) & mask) == key;
            many = mk_sync_any(__reduce_add_sync(0xffffffffu, n) > 32);
        }
        if (many) {
            for (uint32_t i = tid; i < MK_DIGITS; i += MK_COMPUTE) ((uint4 *)x->weight)[i] = make_uint4(0, 0, 0, 0); /* and of x->count */
            mk_sync();
        }
#pragma unroll 1
        for (uint32_t i0 = tid; i0 < ids; i0 += MK_AHEAD * MK_COMPUTE) {
            if (!pass || !all) mk_logits_ask(l, q->logit + q->lo + i0, MK_COMPUTE, ids - i0);
#pragma unroll 1
            for (uint32_t n = MK_AHEAD, i = i0; n--; i += MK_COMPUTE) {
                const float logit = mk_logits_next(l);
                const uint32_t k = mk_order_key(logit), digit = MK_DIGIT_AT(k >> shift & last);
                if (i >= ids || (k & mask) != key) continue;
                const uint64_t v = mk_weigh(logit, q->max, q->temperature);
                if (!many) {
                    atomicAdd(&w->weight[set][digit], (unsigned long long)v);
                    if (!by_weight) atomicAdd(&w->count[set][digit], 1u);
                    continue;
                }
                if (!by_weight) atomicAdd(&x->count[digit], 1u);
                atomicAdd(&x->weight[0][digit], (uint32_t)v & 0x3fffu);
                atomicAdd(&x->weight[1][digit], (uint32_t)(v >> 14) & 0x3fffu);
                atomicAdd(&x->weight[2][digit], (uint32_t)(v >> 28));
            }
        }
        if (many) {
            mk_sync();
#pragma unroll 2
            for (uint32_t i = tid; i < MK_DIGITS; i += MK_COMPUTE) { /* counts are nobody's business where weights decide */
                const uint64_t v = x->weight[0][i] + ((uint64_t)x->weight[1][i] << 14) + ((uint64_t)x->weight[2][i] << 28);
                if (v) atomicAdd(&w->weight[set][i], (unsigned long long)v);
                if (!by_weight && x->count[i]) atomicAdd(&w->count[set][i], x->count[i]);
            }
        }
        mk_draw_meet(in);
        /* from the greatest digit down */
        const uint32_t first = MK_DIGITS - 1 - MK_OWN_DIGITS * tid;
        uint64_t weight[MK_OWN_DIGITS], had[MK_OWN_DIGITS], sum = 0, counts = 0, total, counted; /* had: of what decides */
#pragma unroll
        for (uint32_t i = 0; i < MK_OWN_DIGITS; i++) {
            weight[i] = __ldcg(&w->weight[set][MK_DIGIT_AT(first - i)]);
            had[i] = by_weight ? weight[i] : __ldcg(&w->count[set][MK_DIGIT_AT(first - i)]);
            sum += weight[i];
            counts += had[i];
        }
        sum = weight_above + mk_block_before(sum, &total, 0);
        if (!by_weight) counts = above + mk_block_before(counts, &counted, 1);
        if (target == 0) target = mk_share_least(share, total);
        uint64_t before = by_weight ? sum : counts, of = 0;
        if (before < target) { /* the digit is mine or a later thread's */
            uint32_t digit = 0;
            bool found = false;
#pragma unroll
            for (uint32_t i = 0; i < MK_OWN_DIGITS; i++) {
                if (found) continue;
                digit = first - i;
                of = had[i];
                found = before + of >= target || digit == 0;
                if (found) continue;
                before += of;
                sum += weight[i];
            }
            if (found) {
                x->key = key | digit << shift;
                x->above = before;
                x->weight_above = sum;
                if (pass == 2) {
                    const uint64_t each = of ? mk_weigh(mk_key_value(x->key), q->max, q->temperature) : 0, need = target - before;
                    x->left.key = x->key;
                    x->left.ties = !by_weight ? (uint32_t)need : each ? (uint32_t)((need + each - 1) / each) : 1;
                    x->left.weight = sum + x->left.ties * each;
                }
            }
        }
        mk_sync();
        key = x->key;
        above = x->above;
        weight_above = x->weight_above;
        mask |= last << shift;
    }
}

/* Whose id does the random number fall on? That worker publishes the token and its logit in draw->token[row]. Returns whether there is any. A thread has
 * consecutive ids, like a worker, so that counting goes on in ascending id. */
MK_CALL bool mk_draw_find(const mk_insn *in, const mk_dist *q, uint64_t random, uint32_t row, uint32_t epoch)
{
    mk_sample_scratch *x = mk_scratch();
    const mk_left left = x->left;
    const uint32_t tid = threadIdx.x, parts = in->sample.helpers + 1u, per = (q->hi - q->lo + MK_COMPUTE - 1) / MK_COMPUTE;
    const uint32_t lo = q->lo + tid * per, hi = lo + per < q->hi ? lo + per : q->hi;
    float l[MK_AHEAD];
    mk_logits_ask(l, q->logit + lo, 1, lo < hi ? hi - lo : 0); /* the last threads may have none */
    const uint64_t tie_weight = left.key ? mk_weigh(mk_key_value(left.key), q->max, q->temperature) : 0;
    const bool tie_in = tie_weight >= left.least;
    uint64_t sum = 0, ties = 0, all_sum, all_ties;
#pragma unroll 1
    for (uint32_t i = lo; i < hi; i += MK_AHEAD) {
        if (i > lo) mk_logits_ask(l, q->logit + i, 1, hi - i);
#pragma unroll 1
        for (uint32_t n = min(hi - i, MK_AHEAD); n--;) {
            const float logit = mk_logits_next(l);
            const uint32_t k = mk_order_key(logit);
            if (k < left.key) continue;
            const uint64_t w = mk_weigh(logit, q->max, q->temperature);
            if (k == left.key)
                ties += tie_in;
            else if (w >= left.least)
                sum += w;
        }
    }
    const uint64_t own = sum, own_ties = ties;
    sum = mk_block_before(sum, &all_sum, 0);
    ties = mk_block_before(ties, &all_ties, 1);
    mk_draw_part *part = mk_sh()->args.draw->part[mk_sh()->draw_met & 1];
    if (tid == 0) {
        __stcg(&part[in->sample.helper].sum, (unsigned long long)all_sum);
        __stcg(&part[in->sample.helper].ties, (unsigned long long)all_ties);
    }
    mk_draw_meet(in);
    /* a thread a part */
    uint64_t part_sum = 0, part_ties = 0, total, start, before;
    if (tid < parts) {
        part_sum = __ldcg(&part[tid].sum);
        part_ties = __ldcg(&part[tid].ties);
    }
    before = mk_block_before(part_ties, &total, 0);
    uint64_t kept = left.ties > before ? left.ties - before : 0;
    if (kept > part_ties) kept = part_ties;
    part_sum += kept * tie_weight;
    start = mk_block_before(part_sum, &total, 1);
    uint64_t at = __umul64hi(random, total);
    if (tid == in->sample.helper) {
        x->told = start <= at && at < start + part_sum;
        x->above = start;
        x->weight_above = left.ties > before ? left.ties - before : 0; /* of the ties, for me and who comes after me */
    }
    mk_sync();
    if (x->told) {
        uint64_t room = x->weight_above;
        at -= x->above;
        const uint64_t first = sum + (ties < room ? ties : room) * tie_weight, left_ties = room > ties ? room - ties : 0;
        uint64_t upto = first;
        room = left_ties;
        if (first <= at && at < first + own + (own_ties < room ? own_ties : room) * tie_weight) {
            bool found = false;
#pragma unroll 1
            for (uint32_t i = lo; i < hi && !found; i += MK_AHEAD) {
                mk_logits_ask(l, q->logit + i, 1, hi - i);
#pragma unroll 1
                for (uint32_t j = i; j < min(hi, i + MK_AHEAD) && !found; j++) {
                    const float logit = mk_logits_next(l);
                    const uint32_t k = mk_order_key(logit);
                    const uint64_t w = k < left.key ? 0 : mk_weigh(logit, q->max, q->temperature);
                    if (w < left.least || (k == left.key && room == 0)) continue;
                    if (k == left.key) room--;
                    upto += w;
                    found = k >= left.key && upto > at;
                    if (found) mk_packet_store(&mk_sh()->args.draw->token[row], j, __float_as_uint(logit), 0, epoch);
                }
            }
        }
    }
    mk_sync();
    return total > 0;
}

/* A packet of this step's, when it is there. */
MK_CALL uint4 mk_draw_packet(const mk_insn *in, const uint4 *p, uint32_t epoch)
{
    mk_spin s = {0, 0};
    uint4 q;
    while ((q = mk_packet_load(p)).w != epoch)
        if (!(++s.n & 255u) && !(s.since = mk_wait_late(in, MK_FAULT_DRAW, &in->wait[1], epoch, q.w, s.since))) break;
    return q;
}

/* A warp's sum of what the whole block has at most 2^58 of. */
MK_DEV uint64_t mk_draw_warp_sum(uint64_t v)
{
    const uint32_t lo = __reduce_add_sync(0xffffffffu, (uint32_t)v & 0x7ffffffu), hi = __reduce_add_sync(0xffffffffu, (uint32_t)(v >> 27));
    return ((uint64_t)hi << 27) + lo;
}
/* Of lane n's sum over its warp: thread n's sum over the block, n < MK_TRIES. One barrier; half: in turn. */
MK_CALL uint64_t mk_draw_sums(uint64_t v, uint32_t half)
{
    uint64_t (*sums)[MK_TRIES] = mk_scratch()->sums[half];
    const uint32_t lane = threadIdx.x % 32;
    if (lane < MK_TRIES) sums[threadIdx.x / 32][lane] = v;
    mk_sync();
    v = 0;
#pragma unroll
    for (uint32_t w = 0; w < MK_WARPS; w++) v += sums[w][lane % MK_TRIES];
    return v;
}

/* A thread's ids from i on, MK_OWN of them and none from `hi` on: their logits and what they weigh into its column of x->own_*. In shared memory, for registers would be spilled, which takes a way to L2
 * each. Returns what all of them weigh. */
MK_DEV uint64_t mk_draw_weigh(const mk_dist *q, uint32_t i, uint32_t hi)
{
    mk_sample_scratch *x = mk_scratch();
    const uint32_t tid = threadIdx.x, ids = i < hi ? hi - i : 0;
    float l[MK_OWN];
    uint64_t all = 0;
#pragma unroll
    for (uint32_t j = 0; j < MK_OWN; j++) l[j] = j < ids ? __ldcg(q->logit + i + j) : 0.0f;
#pragma unroll
    for (uint32_t j = 0; j < MK_OWN; j++) x->own_logit[j][tid] = l[j];
#pragma unroll 1
    for (uint32_t j = 0; j < MK_OWN; j++) {
        const uint64_t w = j < ids ? mk_weigh(x->own_logit[j][tid], q->max, q->temperature) : 0;
        x->own_weight[j][tid] = w;
        all += w;
    }
    return all;
}

/* Draws of the whole distribution, of which the first that top-p (and min-p) would have left is the choice: true, and the sampler has it in x->best and x->logit. The weight before a token in the order says
 * whether it is left, so that nothing is selected and nobody meets: weights, tokens and the weights before them are exchanged by packets. False: none of them. */
MK_CALL bool mk_draw_try(const mk_insn *in, const mk_dist *q, float top_p, uint32_t row, uint32_t epoch)
{
    mk_sample_scratch *x = mk_scratch();
    mk_tried *t = &mk_sh()->args.draw->tried[row];
    const uint32_t tid = threadIdx.x, lane = tid % 32, helper = in->sample.helper, parts = in->sample.helpers + 1u, per = (q->hi - q->lo + MK_COMPUTE - 1) / MK_COMPUTE;
    const uint32_t lo = q->lo + tid * per, hi = lo + per < q->hi ? lo + per : q->hi, turns = (per + MK_OWN - 1) / MK_OWN; /* one: all of them are weighed once */
    const uint64_t least = x->left.least;
    uint64_t own = 0, part_weight, total, part = 0;
#pragma unroll 1
    for (uint32_t n = 0; n < turns; n++) own += mk_draw_weigh(q, lo + n * MK_OWN, hi);
    uint64_t before = mk_block_before(own, &part_weight, 0);
    if (tid == 0) mk_packet_store(&t->part[helper], (uint32_t)part_weight, (uint32_t)(part_weight >> 32), 0, epoch);
    if (tid < parts) { /* a thread a part */
        const uint4 p = mk_draw_packet(in, &t->part[tid], epoch);
        part = (uint64_t)p.y << 32 | p.x;
    }
    const uint64_t start = mk_block_before(part, &total, 1);
    if (!total) return true; /* nothing weighs anything. Nobody says that he has seen it, but the next step's packets stand behind every worker's rows of its LM head */
    if (tid == helper) x->above = start;
    mk_sync();
    before += x->above;
#pragma unroll 1
    for (uint32_t n = 0; n < MK_TRIES; n++) {
        const uint64_t at = __umul64hi(x->random[row][n], total) - before;
        if (at >= own) continue; /* below `before` as well */
        uint64_t upto = 0;
        bool found = false;
#pragma unroll 1
        for (uint32_t i = lo; i < hi && !found; i += MK_OWN) {
            if (turns > 1) mk_draw_weigh(q, i, hi);
#pragma unroll 1
            for (uint32_t j = 0; j < MK_OWN && !found; j++) {
                const uint64_t weight = x->own_weight[j][tid];
                upto += weight;
                found = upto > at;
                if (found) mk_packet_store(&t->token[n], i + j, __float_as_uint(x->own_logit[j][tid]), weight >= least, epoch);
            }
        }
    }
    if (tid < MK_TRIES) x->tried[tid] = mk_draw_packet(in, &t->token[tid], epoch);
    mk_sync();
    uint64_t mine = 0; /* lane n's: the warp's weight before token n */
#pragma unroll 1
    for (uint32_t n = 0; n < MK_TRIES; n++) {
        const uint32_t id = x->tried[n].x;
        const float logit = __uint_as_float(x->tried[n].y);
        uint64_t sum = 0;
#pragma unroll 1
        for (uint32_t k = 0, i = lo; k < turns; k++, i += MK_OWN) {
            if (turns > 1) mk_draw_weigh(q, i, hi);
#pragma unroll
            for (uint32_t j = 0; j < MK_OWN; j++) {
                const float l = x->own_logit[j][tid];
                sum += l > logit || (l == logit && i + j < id) ? x->own_weight[j][tid] : 0;
            }
        }
        sum = mk_draw_warp_sum(sum);
        mine = lane == n ? sum : mine;
    }
    mine = mk_draw_sums(mine, 0);
    if (tid < MK_TRIES) mk_packet_store(&t->before[helper][tid], (uint32_t)mine, (uint32_t)(mine >> 32), 0, epoch);
    if (helper == 0) {
        uint4 p[MK_TRIES];
#pragma unroll
        for (uint32_t n = 0; n < MK_TRIES; n++) p[n] = tid < parts ? mk_packet_load(&t->before[tid][n]) : make_uint4(0, 0, 0, epoch);
        mine = 0;
#pragma unroll
        for (uint32_t n = 0; n < MK_TRIES; n++) {
            if (p[n].w != epoch) p[n] = mk_draw_packet(in, &t->before[tid][n], epoch);
            const uint64_t sum = mk_draw_warp_sum((uint64_t)p[n].y << 32 | p[n].x);
            mine = lane == n ? sum : mine;
        }
        mine = mk_draw_sums(mine, 1);
        if (tid < 32) {
            const uint64_t need = mk_share_least(top_p, total);
            const uint32_t left = __ballot_sync(0xffffffffu, lane < MK_TRIES && mine < need && x->tried[lane % MK_TRIES].z), n = left ? __ffs(left) - 1 : MK_TRIES;
            if (tid == 0) {
                mk_packet_store(&t->choice, n, 0, 0, epoch);
                if (left) {
                    x->best = x->tried[n].x;
                    x->logit = __uint_as_float(x->tried[n].y);
                }
                x->told = n;
            }
        }
    } else if (tid == 0)
        x->told = mk_draw_packet(in, &t->choice, epoch).x;
    mk_sync();
    return x->told < MK_TRIES;
}

/* A row whose top-k is small. The greatest logits of the LM head's pieces, a thread some of them, are those of so many tokens: the k-th greatest of the threads' is one that k tokens reach, and few others. All
 * parts list theirs; the sampler sorts them by counting, applies the filters and draws (sample.c), into x->best and x->logit; those stay when nothing weighs anything. False: they are too many, nothing is chosen. */
MK_CALL bool mk_draw_few(const mk_insn *in, const mk_dist *q, const mk_sampling *s, uint64_t random, uint32_t row, uint32_t epoch)
{
    constexpr uint32_t PER = MK_MAX_PIECES / MK_COMPUTE;
    const mk_dev here = mk_here(in), *d = &here;
    mk_sample_scratch *x = mk_scratch();
    mk_few *t = &mk_sh()->args.draw->few[row];
    const mk_vec *v = &d->sh->vec[in->wait[0].vec];
    const uint4 *stats = mk_wait_packets(d, &in->wait[0], v, row);
    const uint32_t tid = threadIdx.x, helper = in->sample.helper, parts = in->sample.helpers + 1u, slices = in->sample.slices;
    float l[PER];
    uint32_t key = 0, rank = 0;
#pragma unroll
    for (uint32_t k = 0; k < PER; k++) l[k] = tid + k * MK_COMPUTE < slices ? __ldcg((const float *)(stats + (tid + k * MK_COMPUTE) * v->slice_packets)) : -INFINITY;
#pragma unroll
    for (uint32_t k = 0; k < PER; k++) key = max(key, mk_order_key(l[k]));
    x->few_key[tid] = key;
    mk_sync();
#pragma unroll 2
    for (uint32_t i = 0; i < MK_COMPUTE; i += 4) {
        const uint4 o = *(const uint4 *)&x->few_key[i];
        rank += (o.x > key || (o.x == key && i < tid)) + (o.y > key || (o.y == key && i + 1 < tid)) + (o.z > key || (o.z == key && i + 2 < tid)) + (o.w > key || (o.w == key && i + 3 < tid));
    }
    if (rank == s->top_k - 1) x->key = key;
    if (tid == 0) x->told = 0;
    mk_sync();
    const uint32_t reach = x->key;
#pragma unroll 1
    for (uint32_t i0 = q->lo + tid; i0 < q->hi; i0 += MK_AHEAD * MK_COMPUTE) {
        float own[MK_AHEAD];
        mk_logits_ask(own, q->logit + i0, MK_COMPUTE, q->hi - i0);
#pragma unroll 1
        for (uint32_t n = MK_AHEAD, i = i0; n--; i += MK_COMPUTE) {
            const float logit = mk_logits_next(own);
            if (i >= q->hi || mk_order_key(logit) < reach) continue;
            const uint32_t at = atomicAdd(&x->told, 1u);
            if (at < MK_FEW_PART) mk_packet_store(&t->token[helper][at], i, __float_as_uint(logit), 0, epoch);
        }
    }
    mk_sync();
    if (tid == 0) mk_packet_store(&t->count[helper], x->told, 0, 0, epoch);
    if (helper) {
        if (tid == 0) x->told = mk_draw_packet(in, &t->over, epoch).x;
        mk_sync();
        return !x->told;
    }
    const uint32_t own = tid < parts ? mk_draw_packet(in, &t->count[tid], epoch).x : 0; /* a thread a part */
    uint64_t n, total;
    const uint32_t first = (uint32_t)mk_block_before(own, &n, 0);
    const bool over = mk_sync_any(own > MK_FEW_PART) || n > MK_COMPUTE;
    if (tid == 0) mk_packet_store(&t->over, over, 0, 0, epoch);
    if (over) return false;
#pragma unroll 1
    for (uint32_t k = 0; k < own; k++) x->few_at[first + k] = tid * MK_FEW_PART + k;
    mk_sync();
    const bool has = tid < n; /* a thread a token */
    uint4 p = make_uint4(0xffffffffu, 0xff800000u, 0, 0);
    if (has) p = mk_draw_packet(in, &t->token[0][0] + x->few_at[tid], epoch);
    const float logit = __uint_as_float(p.y);
    const uint64_t weight = has ? mk_weigh(logit, q->max, q->temperature) : 0;
    key = mk_order_key(logit);
    x->few_key[tid] = key;
    x->few_id[tid] = p.x;
    x->few_weight[tid] = weight;
    mk_sync();
    uint64_t before = 0, upto = 0;
    rank = 0;
#pragma unroll 2
    for (uint32_t i = 0; i < n; i++) {
        const bool ahead = x->few_key[i] > key || (x->few_key[i] == key && x->few_id[i] < p.x);
        rank += ahead;
        before += ahead ? x->few_weight[i] : 0;
    }
    const bool kept = has && rank < s->top_k;
    mk_block_before(kept ? weight : 0, &total, 1);
    const uint64_t share = s->top_p < 1.0f ? mk_share(s->top_p > 0.0f ? s->top_p : 0.0f, total) : ~0ull;
    const uint64_t left = kept && before < (share ? share : 1) && weight >= x->left.least ? weight : 0;
    x->few_weight[tid] = left;
    mk_block_before(left, &total, 0);
    const uint64_t at = __umul64hi(random, total);
#pragma unroll 2
    for (uint32_t i = 0; i < n; i++) upto += x->few_id[i] < p.x ? x->few_weight[i] : 0;
    if (at - upto < left) {
        x->best = p.x;
        x->logit = logit;
    }
    mk_sync();
    return true;
}

/* All parts together: the row's token and its logit into x->best and x->logit of the sampler; the greedy choice stays there when nothing weighs anything. */
MK_CALL void mk_draw_row(const mk_insn *in, const float *logits, uint32_t row, float max)
{
    mk_sample_scratch *x = mk_scratch();
    const mk_shared *sh = mk_sh();
    const mk_sampling s = x->sampling[row];
    const uint32_t parts = in->sample.helpers + 1u, vocab = in->sample.vocab, epoch = sh->step.seq + 1;
    const mk_dist q = {logits, mk_start(in->sample.helper, vocab, parts), mk_start(in->sample.helper + 1u, vocab, parts), max, s.temperature};
    const bool top_k = s.top_k > 0 && s.top_k < vocab, top_p = s.top_p < 1.0f;
    const float p = s.top_p > 0.0f ? s.top_p : 0.0f;
    if (threadIdx.x == 0) {
        x->left.key = 0;
        x->left.ties = vocab;
        x->left.weight = 0;
        x->left.least = s.min_p > 0.0f ? mk_share(s.min_p < 1.0f ? s.min_p : 1.0f, 1ull << 40) : 0;
    }
    mk_sync();
    if (top_p && !top_k && mk_draw_try(in, &q, p, row, epoch)) return;
    if (top_k && s.top_k <= MK_FEW && mk_draw_few(in, &q, &x->sampling[row], x->random[row][0], row, epoch)) return;
    if (top_k) mk_draw_prefix(in, &q, false, s.top_k, 0);
    if (top_p) {
        uint64_t target = x->left.weight;
        if (target) target = mk_share_least(p, target);
        mk_draw_prefix(in, &q, true, target, p);
    }
    const bool any = mk_draw_find(in, &q, x->random[row][top_p && !top_k ? MK_TRIES : 0], row, epoch);
    if (in->sample.helper || !any) return;
    if (threadIdx.x == 0) {
        const uint4 t = mk_draw_packet(in, &sh->args.draw->token[row], epoch);
        x->best = t.x;
        x->logit = __uint_as_float(t.y);
    }
    mk_sync();
}

/* Greatest maximum of 2 * `half` neighbouring lanes, ties to the lower id. */
template <int HALF> MK_DEV void mk_stats_greatest(mk_stats *s)
{
#pragma unroll
    for (int k = HALF; k; k >>= 1) {
        const float om = __shfl_xor_sync(0xffffffffu, s->max, k);
        const uint32_t ob = __shfl_xor_sync(0xffffffffu, s->best, k);
        const bool other = om > s->max || (om == s->max && ob < s->best);
        s->max = other ? om : s->max;
        s->best = other ? ob : s->best;
    }
}
/* What a sum taken against maximum `from` is against `to`. */
MK_CALL float mk_stats_rebase(float sum, float from, float to)
{
    const float e = mk_expf(from - to);
    return from > -INFINITY ? __fmul_rn(sum, e) : 0.0f;
}

/* The statistics of one row: slices tid, tid + MK_COMPUTE, ... a thread, then the warps', in x->warps[half], then every warp merges what the warps have: first the greatest, for if that CHOOSES
 * the next step waits for it, then the sums. wait: false: of whatever is there. */
MK_CALL mk_stats mk_stats_merge(const mk_insn *in, uint32_t row, uint32_t half, bool wait, bool chooses)
{
    constexpr uint32_t PER = MK_MAX_PIECES / MK_COMPUTE; /* slices of a thread at most */
    const mk_dev here = mk_here(in), *d = &here;
    const mk_wait *w = &in->wait[0];
    const mk_vec *v = &d->sh->vec[w->vec];
    mk_stats *warps = mk_scratch()->warps[half];
    const uint4 *base = mk_wait_packets(d, w, v, row);
    const uint32_t epoch = mk_wait_epoch(d, w), sp = v->slice_packets, slices = in->sample.slices;
    uint4 q[PER];
    mk_stats s = {-INFINITY, 0, 0xffffffffu, 0};
    uint32_t wanted = 0;
#pragma unroll
    for (uint32_t k = 0; k < PER; k++) {
        const uint32_t i = d->tid + k * MK_COMPUTE;
        q[k] = make_uint4(0xff800000u, 0xffffffffu, 0, epoch);
        if (i >= slices) continue;
        q[k] = mk_packet_load(base + i * sp);
        wanted |= 1u << k;
    }
    mk_packets_wait_every<PER, true>(base + d->tid * sp, MK_COMPUTE * sp, wait ? wanted : 0, epoch, 0, row, d->tid * sp, q);
#pragma unroll
    for (uint32_t k = 0; k < PER; k++) {
        const bool more = __uint_as_float(q[k].x) > s.max;
        s.max = more ? __uint_as_float(q[k].x) : s.max;
        s.best = more ? q[k].y : s.best;
    }
    mk_stats_greatest<16>(&s);
    if (d->lane == 0) {
        warps[d->warp].max = s.max;
        warps[d->warp].best = s.best;
    }
    mk_sync();
    s.max = warps[d->lane % MK_WARPS].max;
    s.best = warps[d->lane % MK_WARPS].best;
    mk_stats_greatest<MK_WARPS / 2>(&s);
    if (chooses && d->warp == 0) s.told = mk_schedule_sure(d->sh, mk_stats_token(&s, in->sample.vocab), d->lane);
#pragma unroll 1
    for (uint32_t n = 0; n < slices; n += MK_COMPUTE) {
        s.sum = __fadd_rn(s.sum, mk_stats_rebase(__uint_as_float(q[0].z), __uint_as_float(q[0].x), s.max));
#pragma unroll
        for (uint32_t k = 0; k + 1 < PER; k++) q[k].x = q[k + 1].x, q[k].z = q[k + 1].z;
    }
    s.sum = mk_warp_sum(s.sum);
    if (d->lane == 0) warps[d->warp].sum = s.sum;
    mk_sync();
    s.sum = warps[d->lane % MK_WARPS].sum;
#pragma unroll
    for (int k = MK_WARPS / 2; k; k >>= 1) s.sum += __shfl_xor_sync(0xffffffffu, s.sum, k);
    return s;
}

/* The device's copy of a slot's parameters: 132 workers would queue for the host's. */
MK_DEV mk_sampling mk_sampling_of(const mk_gpu_args *a, uint32_t slot)
{
    const uint4 *p = (const uint4 *)(a->sampling + slot);
    uint4 q[sizeof(mk_sampling) / 16];
    mk_sampling s;
#pragma unroll
    for (uint32_t k = 0; k < sizeof q / 16; k++) q[k] = __ldcg(p + k);
    memcpy(&s, q, sizeof s);
    return s;
}
static_assert(sizeof(mk_sampling) == 32, "two loads");

/* The worker that schedules has time until the statistics are there (planner_layers.c, spare_scheduler): turn 0 of its SAMPLE is for the code's sake, with the first row as it is, and behind it the next step is
 * told or SCHEDULE rehearsed (mk_schedule_dress). Between kernels there is nothing to wait for. */
#ifdef MK_PHASED
#define MK_FIRST_TURN 1u
#else
#define MK_FIRST_TURN 0u
#endif

/* Nobody draws and nobody wants to know what another token would have got: the statistics are enough. */
MK_DEV bool mk_sample_is_greedy(void)
{
    const mk_step *step = &mk_sh()->step;
    bool greedy = true;
    for (uint32_t r = 0; r < step->nrows; r++) {
        const uint32_t f = step->row[r].flags;
        greedy &= (f & (MK_ROW_SAMPLE | MK_ROW_GREEDY)) != MK_ROW_SAMPLE && !(f & MK_ROW_SCORE);
    }
    return greedy;
}
MK_DEV float mk_sample_logprob(float logit, const mk_stats *t)
{
    return (logit - t->max) - mk_logf(t->sum);
}

MK_DEV void mk_sample_greedy_run(const mk_dev *d)
{
    const mk_sample *s = &d->in->sample;
    const uint32_t nrows = d->step->nrows;
    if (s->helper) return;
    mk_staged_drop(d);
    mk_sampled *out = (mk_sampled *)mk_local_at(d, d->in->signal_vec); /* thread 0's; it is SCHEDULE as well */
    if (d->tid < MK_MAX_ROWS) {
        out->token[d->tid] = 0;
        out->logprob[d->tid] = 0;
    }
    __syncwarp();
    uint32_t merged = 0;
#pragma unroll 1
    for (uint32_t i = MK_FIRST_TURN; i <= nrows; i++) {
        const uint32_t r = i ? i - 1 : 0;
        if (!(d->step->row[r].flags & MK_ROW_SAMPLE)) continue;
        const mk_stats t = mk_stats_merge(d->in, r, merged++ & 1, i != 0, true);
        if (i == 1) mk_trace_input(d);
        if (i == 0 && d->warp == 0) mk_schedule_dress(d->sh, d->lane);
        if (d->tid == 0) {
            out->token[r] = mk_stats_token(&t, s->vocab);
            out->logprob[r] = mk_sample_logprob(t.max, &t);
            if (t.told) mk_schedule_tell(d->sh, out->token[r], out->logprob[r]);
        }
    }
}

/* Some row draws or scores. */
MK_DEV void mk_sample_run(const mk_dev *d)
{
    const mk_sample *s = &d->in->sample;
    const uint32_t nrows = d->step->nrows;
    mk_sample_scratch *x = mk_scratch();
    bool look = false, score = false; /* somebody may draw; somebody wants to know what a token of his would have got */
    for (uint32_t r = 0; r < nrows; r++) {
        const uint32_t f = d->step->row[r].flags;
        look |= (f & (MK_ROW_SAMPLE | MK_ROW_GREEDY)) == MK_ROW_SAMPLE;
        score |= (f & MK_ROW_SCORE) != 0;
    }
    if (s->helper && !look) return;
    mk_staged_drop(d);
#ifdef MK_PHASED /* nobody remembers; all meetings so far were complete, and none is before this worker comes */
    if (look && d->tid == 0) d->sh->draw_met = mk_load_relaxed(&d->a->draw->arrived) / (s->helpers + 1u);
#endif
    if (look && d->tid < nrows * (MK_TRIES + 1)) {
        const uint32_t r = d->tid / (MK_TRIES + 1), n = d->tid % (MK_TRIES + 1);
        const mk_sampling own = mk_sampling_of(d->a, d->step->row[r].slot);
        if (n == 0) x->sampling[r] = own;
        x->random[r][n] = mk_draw(own.seed, d->step->row[r].pos + 1, n);
    }
    mk_sampled *out = s->helper ? (mk_sampled *)0 : (mk_sampled *)mk_local_at(d, d->in->signal_vec); /* thread 0's; it is SCHEDULE as well */
    if (out && d->tid < MK_MAX_ROWS) {
        out->token[d->tid] = 0;
        out->logprob[d->tid] = 0;
    }
    __syncwarp();
    uint32_t merged = 0;
#pragma unroll 1
    for (uint32_t i = MK_FIRST_TURN; i <= nrows; i++) {
        const uint32_t r = i ? i - 1 : 0;
        const mk_row *row = &d->step->row[r];
        if (i == 1 && (look || score)) mk_bulk_wait(d, &d->in->wait[1]);
        const bool draws = i && (row->flags & (MK_ROW_SAMPLE | MK_ROW_GREEDY)) == MK_ROW_SAMPLE && x->sampling[r].temperature > 0.0f;
        if (!(row->flags & (MK_ROW_SAMPLE | MK_ROW_SCORE)) || (s->helper && !draws)) continue;
        const mk_stats t = mk_stats_merge(d->in, r, merged++ & 1, i != 0, false);
        if (!i) {
            if (d->warp == 0) mk_schedule_dress(d->sh, d->lane);
            continue;
        }
        if (i == 1) mk_trace_input(d);
        const float *logits = (const float *)mk_bulk_at(d, d->in->wait[1].vec) + (size_t)r * s->vocab;
        if (d->tid == 0) {
            x->best = t.best == 0xffffffffu ? 0 : t.best;
            x->logit = t.max;
        }
        if (draws) mk_draw_row(d->in, logits, r, t.max);
        if (out && d->tid == 0) {
            uint32_t token = row->flags & MK_ROW_SAMPLE ? x->best : row->target;
            token = token < s->vocab ? token : 0;
            out->token[r] = token;
            out->logprob[r] = mk_sample_logprob(row->flags & MK_ROW_SAMPLE ? x->logit : __ldcg(logits + token), &t);
        }
        __syncwarp();
        if (out && d->warp == 0 && mk_schedule_sure(d->sh, out->token[r], d->lane) && d->lane == 0) mk_schedule_tell(d->sh, out->token[r], out->logprob[r]);
    }
}

#endif
