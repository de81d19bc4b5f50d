/* ROUTE: router logits -> experts and weights of every row, into the worker's own memory. Every worker computes the same.
 *   s = sigmoid(l) or softmax(l);  choice = s + bias (bias for choosing only), or l where softmax's weights are normalised and nothing is added
 *   groups > 1: a group's score is the sum of its two best choices; the topk_groups best groups stay
 *   the topk best choices; weight = s, divided by (their sum + 1e-20) when renorm, times scale. Ties go to the lower id.
 *   wait[0]  h f32[k], of whose norm the logits lack 1/rms
 *   wait[1]  BULK sums (isa.h): router logits but for that
 *   signal   LOCAL mk_routes: union of the rows' experts ascending, each row's rank among them, weights by rank
 *   params   f32 bias[experts] at param_off when has_bias
 * Sums run in ascending id (softmax's in eight lanes). Source of the mathematics: models.md 3.6. */
#include "instructions/matvec.h"
#include "instructions/mk_math.h"
#include "instructions/vec8.h"

#include <string.h>

MK_CLONES static void score(float *restrict s, uint32_t n, int kind)
{
    if (kind == MK_SCORE_SIGMOID) {
        for (uint32_t i = 0; i < n; i++) s[i] = mk_sigmoidf(s[i]);
        return;
    }
    float max = s[0];
    for (uint32_t i = 1; i < n; i++) max = s[i] > max ? s[i] : max;
    for (uint32_t i = 0; i < n; i++) s[i] = mk_expf(s[i] - max);
    float sum = mk_sum8(s, n);
    for (uint32_t i = 0; i < n; i++) s[i] /= sum;
}

/* The k greatest of v[0..n) that `keep` allows (NULL: all): ids in descending value, ties to the lower id. */
static void top(const float *v, uint32_t n, const uint8_t *keep, uint32_t group, uint32_t k, uint16_t *ids)
{
    uint32_t have = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (keep && !keep[i / group]) continue;
        uint32_t at = have;
        while (at > 0 && v[i] > v[ids[at - 1]]) at--;
        if (at >= k) continue;
        if (have < k) have++;
        memmove(&ids[at + 1], &ids[at], (have - 1 - at) * sizeof *ids);
        ids[at] = (uint16_t)i;
    }
}

static void choose(const mk_route *t, const float *choice, uint16_t *ids)
{
    if (t->groups <= 1) {
        top(choice, t->experts, NULL, 1, t->topk, ids);
        return;
    }
    uint32_t size = t->experts / t->groups;
    float best[MK_MAX_EXPERT];
    uint16_t kept[MK_MAX_EXPERT];
    uint8_t keep[MK_MAX_EXPERT] = {0};
    for (uint32_t g = 0; g < t->groups; g++) {
        uint16_t two[2];
        top(choice + g * size, size, NULL, 1, size < 2 ? 1 : 2, two);
        best[g] = choice[g * size + two[0]] + (size < 2 ? 0.0f : choice[g * size + two[1]]);
    }
    top(best, t->groups, NULL, 1, t->topk_groups, kept);
    for (uint32_t g = 0; g < t->topk_groups; g++) keep[kept[g]] = 1;
    top(choice, t->experts, keep, size, t->topk, ids);
}

static void sort_ids(uint16_t *ids, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++) {
        uint16_t v = ids[i];
        uint32_t j = i;
        for (; j > 0 && ids[j - 1] > v; j--) ids[j] = ids[j - 1];
        ids[j] = v;
    }
}

void mk_route_logits(const mk_ctx *c, uint32_t r, float *logits, float *h)
{
    const mk_route *t = &c->in->route;
    const mk_vec *v = &c->prog->vec[c->in->wait[1].vec];
    const uint64_t *word = mk_bulk(c, c->in->wait[1].vec);
    const uint32_t half = mk_half(v, c->step->seq, c->in->wait[1].pub);
    mk_read(c, 0, r, 0, t->k, h);
    const float rstd = 1.0f / sqrtf(mk_sum_squares(h, t->k) / (float)t->k + t->eps);
    for (uint32_t e = 0; e < t->experts; e++) logits[e] = mk_sum_value(word[mk_sum_at(t->experts, half, r, e)], v->signals) * rstd;
}
/* What was read before is zero again for the publication after this one: the worker's share. */
static void clear(const mk_ctx *c)
{
    const mk_vec *v = &c->prog->vec[c->in->wait[1].vec];
    const uint32_t n = mk_sums_words(c->in->route.experts), W = c->prog->info.workers, first = mk_start(c->worker, n, W), half = mk_half(v, c->step->seq, c->in->wait[1].pub) ^ 1;
    memset((uint64_t *)mk_bulk(c, c->in->wait[1].vec) + half * n + first, 0, (mk_start(c->worker + 1, n, W) - first) * sizeof(uint64_t));
}

void mk_route_twin(mk_ctx *c)
{
    const mk_route *t = &c->in->route;
    uint32_t nrows = c->step->nrows, n = t->experts;
    mk_routes *out = mk_local(c, c->in->signal_vec);
    float *s = c->scratch, *choice = s + n;
    uint16_t ids[MK_MAX_ROWS][MK_MAX_TOPK];
    uint16_t place[MK_MAX_EXPERT] = {0};

    for (uint32_t r = 0; r < nrows; r++) {
        const mk_row *row = &c->step->row[r];
        mk_route_logits(c, r, s, choice + n);
        const float *bias = c->mem->param + t->param_off;
        int logits = t->score == MK_SCORE_SOFTMAX && t->renorm && !t->has_bias && t->groups <= 1;
        if (logits) memcpy(choice, s, n * sizeof *s); /* two of them may have one probability */
        score(s, n, t->score);
        for (uint32_t i = 0; i < n && !logits; i++) choice[i] = t->has_bias ? s[i] + bias[i] : s[i];
        choose(t, choice, ids[r]);
        sort_ids(ids[r], t->topk);
        if (c->route_hook) c->route_hook(c->route_arg, c->in->layer, row->slot, row->pos, t->topk, ids[r]);
        float sum = 0;
        for (uint32_t k = 0; k < t->topk; k++) sum += s[ids[r][k]];
        for (uint32_t k = 0; k < t->topk; k++) {
            float w = s[ids[r][k]];
            if (t->renorm) w /= sum + 1e-20f;
            out->weight[r][k] = w * t->scale;
            place[ids[r][k]] = 1;
        }
    }
    clear(c);
    out->n_union = 0;
    for (uint32_t e = 0; e < n; e++)
        if (place[e]) {
            place[e] = (uint16_t)out->n_union;
            out->expert[out->n_union++] = (uint16_t)e;
        }
    memset(out->rank, 255, sizeof out->rank);
    for (uint32_t r = 0; r < nrows; r++)
        for (uint32_t k = 0; k < t->topk; k++) out->rank[r][place[ids[r][k]]] = (uint8_t)k;
}
