/* SAMPLE: the next token and its logprob for every row that asked (MK_ROW_SAMPLE), the logprob of the row's target (MK_ROW_SCORE).
 *   wait[0]  "stats": one slice of 4 words a row from every LM_HEAD: max logit (f32), its lowest id, sum exp(l - max) (f32), 0
 *   wait[1]  BULK logits f32[MK_MAX_ROWS][vocab]
 *   signal   LOCAL mk_sampled; a row that asked for neither gets token 0, logprob 0
 * Greedy (temperature 0): the greatest logit, ties to the lower id. Otherwise, with M the greatest logit, every token's weight is the
 * integer w = floor(exp((l - M) / temperature) * 2^40 + 1/2), so that sums do not depend on their order, and the filters, each on the
 * distribution that the one before left, are
 *   top-k   the first k tokens in the order (descending logit, ascending id)
 *   top-p   the shortest prefix in that order whose weight is at least p of what is left; at least one token
 *   min-p   tokens with w >= min_p * 2^40 (the most likely token, 2^40, always stays)
 * With W the weight of what is left, the token of draw n is the lowest id whose weights up to and including its own exceed floor(u W / 2^64),
 * u = 64 bits of Philox4x32-10 with key seed and counter (position of the token being chosen, n, 0, 0). n is 0, but where top-p filters and top-k
 * does not: there draws 0 to MK_TRIES - 1 are of the unfiltered distribution, and the first token among them that the filters would have left is
 * chosen; if there is none, draw MK_TRIES is of what they leave. That is the filtered distribution as well (rejection: a token that is left has its
 * share of what is left, whichever try it is), and what a token is judged by, the weight before it in the order, is one sum and no selection.
 * Prefixes are found by radix selection over the logits' order-preserving bit patterns: O(vocab). NaN logits count as -inf.
 * The logprob is that of the unmodified distribution: (l - M) - log(sum over slices, ascending, of sum_s exp(M_s - M)).
 * Source of the mathematics: design.md 6. */
#include "instructions/mk_math.h"
#include "instructions/op.h"
#include "instructions/philox.h"
#include "instructions/vec8.h"

#include <string.h>

#define BLOCK  256 /* logits weighed at a time */
#define DIGITS 2048

__extension__ typedef unsigned __int128 mk_u128;

/* One row's logits and how they are weighed. */
typedef struct mk_dist {
    const float *logit;
    uint32_t vocab;
    float max, temperature;
} mk_dist;

/* The prefix of the order (descending logit, ascending id) that is left: logits whose key is above `key`, and the `ties` lowest ids of
 * those that equal it; of these, tokens that weigh at least `least`. */
typedef struct mk_left {
    uint32_t key, ties;
    uint64_t least;
    uint64_t weight; /* of the prefix */
} mk_left;

/* Order-preserving: a < b as floats exactly when key(a) < key(b); -0 equals +0, NaN is -inf. */
MK_INLINE uint32_t key_of(float l)
{
    uint32_t u = mk_bits_of(l + 0.0f);
    if ((u & 0x7fffffffu) > 0x7f800000u) u = 0xff800000u;
    return u ^ ((uint32_t)((int32_t)u >> 31) | 0x80000000u);
}

/* Weights of n <= BLOCK logits. */
MK_CLONES static void weigh(const mk_dist *d, const float *restrict l, uint32_t n, uint64_t *restrict w)
{
    float e[BLOCK];
    for (uint32_t i = 0; i < n; i++) e[i] = mk_expf((l[i] - d->max) / d->temperature);
    for (uint32_t i = 0; i < n; i++) {
        double x = e[i] <= 1.0f ? (double)e[i] : 0.0; /* NaN: 0. The maximum itself: exp(0) = 1 */
        w[i] = (uint64_t)(int64_t)(x * 0x1p40 + 0.5);
    }
}

/* The shortest prefix of the order with at least `target` tokens (by_weight 0) or at least that weight (1); the whole has that much. */
static mk_left prefix(const mk_dist *d, int by_weight, uint64_t target)
{
    static const uint8_t shift[3] = {21, 10, 0}, bits[3] = {11, 11, 10};
    uint64_t w[BLOCK], above = 0, weight_above = 0, weight[DIGITS];
    uint32_t count[DIGITS], key = 0, mask = 0;
    mk_left left = {0};
    for (int pass = 0; pass < 3; pass++) {
        uint32_t digits = 1u << bits[pass];
        memset(count, 0, digits * sizeof *count);
        memset(weight, 0, digits * sizeof *weight);
        for (uint32_t b = 0; b < d->vocab; b += BLOCK) {
            uint32_t n = d->vocab - b < BLOCK ? d->vocab - b : BLOCK;
            weigh(d, d->logit + b, n, w);
            for (uint32_t i = 0; i < n; i++) {
                uint32_t k = key_of(d->logit[b + i]);
                if ((k & mask) != key) continue;
                uint32_t digit = k >> shift[pass] & (digits - 1);
                count[digit]++;
                weight[digit] += w[i];
            }
        }
        uint32_t digit = digits - 1;
        for (; digit > 0; digit--) {
            uint64_t here = by_weight ? weight[digit] : count[digit];
            if (above + here >= target) break;
            above += here;
            weight_above += weight[digit];
        }
        key |= digit << shift[pass];
        mask |= (digits - 1) << shift[pass];
        if (pass < 2) continue;
        uint64_t each = count[digit] ? weight[digit] / count[digit] : 0; /* equal logits weigh the same */
        uint64_t need = target - above;
        left.key = key;
        left.ties = !by_weight ? (uint32_t)need : each ? (uint32_t)((need + each - 1) / each) : 1;
        left.weight = weight_above + left.ties * each;
    }
    return left;
}

/* ceil(p * total) for p in [0, 1], exact but for bits of p below 2^-62. */
static uint64_t share(float p, uint64_t total)
{
    const mk_u128 one = (mk_u128)1 << 62;
    return (uint64_t)(((mk_u128)(uint64_t)((double)p * 0x1p62) * total + (one - 1)) >> 62);
}

/* Walks what is left in ascending id. Returns the lowest id at which the running weight exceeds `at` (vocab: none); *total = the weight
 * seen. */
static uint32_t walk(const mk_dist *d, const mk_left *left, uint64_t at, uint64_t *total)
{
    uint64_t w[BLOCK], sum = 0;
    uint32_t ties = left->ties;
    for (uint32_t b = 0; b < d->vocab; b += BLOCK) {
        uint32_t n = d->vocab - b < BLOCK ? d->vocab - b : BLOCK;
        weigh(d, d->logit + b, n, w);
        for (uint32_t i = 0; i < n; i++) {
            uint32_t k = key_of(d->logit[b + i]);
            if (k < left->key || w[i] < left->least || (k == left->key && ties == 0)) continue;
            if (k == left->key) ties--;
            sum += w[i];
            if (sum > at) return b + i;
        }
    }
    *total = sum;
    return d->vocab;
}

/* Draw n of what is left, whose weight is `total`. */
static uint32_t draw_of(const mk_dist *d, const mk_left *left, uint64_t total, const mk_sampling *s, uint32_t position, uint32_t n)
{
    return walk(d, left, (uint64_t)(((mk_u128)mk_draw(s->seed, position, n) * total) >> 64), &total);
}

/* The weight of what comes before a token in the order; *own: the token's. */
static uint64_t weight_before(const mk_dist *d, uint32_t token, uint64_t *own)
{
    uint64_t w[BLOCK], sum = 0;
    uint32_t key = key_of(d->logit[token]);
    for (uint32_t b = 0; b < d->vocab; b += BLOCK) {
        uint32_t n = d->vocab - b < BLOCK ? d->vocab - b : BLOCK;
        weigh(d, d->logit + b, n, w);
        for (uint32_t i = 0; i < n; i++) {
            uint32_t k = key_of(d->logit[b + i]);
            if (k > key || (k == key && b + i < token)) sum += w[i];
            if (b + i == token) *own = w[i];
        }
    }
    return sum;
}

static uint32_t draw(const mk_dist *d, const mk_sampling *s, uint32_t position)
{
    mk_left left = {.key = 0, .ties = d->vocab}; /* everything */
    uint64_t total = 0, least = s->min_p > 0.0f ? share(s->min_p < 1.0f ? s->min_p : 1.0f, 1ull << 40) : 0;
    uint32_t n = 0;
    int top_k = s->top_k > 0 && s->top_k < d->vocab;
    if (top_k) left = prefix(d, 0, s->top_k);
    if (s->top_p < 1.0f) {
        if (left.weight == 0) walk(d, &left, ~0ull, &left.weight);
        uint64_t need = share(s->top_p > 0.0f ? s->top_p : 0.0f, left.weight), own = 0;
        if (!need) need = 1;
        for (; !top_k && n < MK_TRIES; n++) {
            uint32_t token = draw_of(d, &left, left.weight, s, position, n);
            if (token == d->vocab || (weight_before(d, token, &own) < need && own >= least)) return token;
        }
        left = prefix(d, 1, need);
    }
    left.least = least;
    walk(d, &left, ~0ull, &total);
    return draw_of(d, &left, total, s, position, n);
}

void mk_sample_twin(mk_ctx *c)
{
    const mk_sample *s = &c->in->sample;
    if (s->helper) return;
    mk_sampled *out = mk_local(c, c->in->signal_vec);
    const float *logits = mk_bulk(c, c->in->wait[1].vec);
    memset(out, 0, sizeof *out);
    for (uint32_t r = 0; r < c->step->nrows; r++) {
        const mk_row *row = &c->step->row[r];
        if (!(row->flags & (MK_ROW_SAMPLE | MK_ROW_SCORE))) continue;
        const mk_sampling *p = &c->mem->slot[row->slot].sampling;
        const float *l = logits + (size_t)r * s->vocab;
        float max = -INFINITY, sum = 0;
        uint32_t best = 0;
        for (uint32_t i = 0; i < s->slices; i++) {
            uint32_t w[3];
            mk_read_words(c, 0, r, i, 3, w);
            if (mk_float_of(w[0]) > max) {
                max = mk_float_of(w[0]);
                best = w[1];
            }
        }
        for (uint32_t i = 0; i < s->slices; i++) {
            uint32_t w[3];
            mk_read_words(c, 0, r, i, 3, w);
            if (mk_float_of(w[0]) > -INFINITY) sum += mk_float_of(w[2]) * mk_expf(mk_float_of(w[0]) - max);
        }
        uint32_t token = row->target;
        if (row->flags & MK_ROW_SAMPLE) {
            mk_dist d = {.logit = l, .vocab = s->vocab, .max = max, .temperature = p->temperature};
            token = p->temperature > 0.0f ? draw(&d, p, row->pos + 1) : best;
            if (token >= s->vocab) token = best; /* no token weighs anything: all logits are -inf or NaN */
        }
        out->token[r] = token;
        out->logprob[r] = (l[token] - max) - mk_logf(sum);
    }
}
