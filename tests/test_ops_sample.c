/* SAMPLE against distributions computed in double from design.md 6, and Philox against the published vectors. */
#include "instructions/mk_math.h"
#include "instructions/philox.h"
#include "tests/support/onestep.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Philox4x32-10: known answers of Random123 (kat_vectors) ---------------------------------------------------------- */

static void test_philox(void **state)
{
    (void)state;
    static const uint32_t known[3][10] = {
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1},
    };
    for (int i = 0; i < 3; i++) {
        uint32_t c[4];
        memcpy(c, known[i], sizeof c);
        mk_philox(known[i][4], known[i][5], c);
        for (int k = 0; k < 4; k++) assert_int_equal(c[k], known[i][6 + k]);
    }
    uint32_t c[4] = {7, 3, 0, 0};
    mk_philox(0x89abcdefu, 0x01234567u, c);
    assert_true(mk_draw(0x0123456789abcdefull, 7, 3) == ((uint64_t)c[1] << 32 | c[0]));
}

/* ---- rig ------------------------------------------------------------------------------------------------------------- */

typedef struct rig {
    onestep *o;
    uint32_t vocab, slices, stats, logits, out;
} rig;

static rig rig_new(uint32_t vocab, uint32_t slices)
{
    rig g = {.o = one_new(1, 0), .vocab = vocab, .slices = slices};
    g.stats = one_even(g.o, MK_F32, 0, 4 * slices, slices);
    g.logits = one_bulk(g.o, (uint64_t)MK_MAX_ROWS * vocab * 4, slices);
    g.out = one_local(g.o, sizeof(mk_sampled));
    one_alloc(g.o, 1, 64, MK_MAX_ROWS, 64, 64);
    return g;
}

/* What LM_HEAD leaves for row r. */
static void put_logits(rig *g, uint32_t r, const float *l)
{
    float *stats = calloc(g->slices * 4, sizeof *stats);
    assert_non_null(stats);
    for (uint32_t s = 0; s < g->slices; s++) {
        uint32_t a = mk_start(s, g->vocab, g->slices), b = mk_start(s + 1, g->vocab, g->slices), best = a;
        double sum = 0;
        for (uint32_t i = a; i < b; i++)
            if (l[i] > l[best]) best = i;
        for (uint32_t i = a; i < b; i++) sum += l[i] == l[best] ? 1 : exp((double)l[i] - (double)l[best]);
        stats[4 * s] = l[best];
        memcpy(&stats[4 * s + 1], &best, 4);
        stats[4 * s + 2] = (float)sum;
    }
    one_put(g->o, g->stats, r, stats, NULL);
    memcpy((float *)one_bulk_at(g->o, g->logits) + (size_t)r * g->vocab, l, g->vocab * sizeof *l);
    free(stats);
}

static void no_logits(rig *g, uint32_t r)
{
    float stats[4 * 64];
    for (uint32_t i = 0; i < 4 * g->slices; i++) stats[i] = i % 4 ? NAN : -INFINITY;
    one_put(g->o, g->stats, r, stats, NULL);
    memset((float *)one_bulk_at(g->o, g->logits) + (size_t)r * g->vocab, 0xff, g->vocab * 4);
}

/* A row that samples at position `pos` with parameters p (in slot r). */
static void ask(rig *g, uint32_t pos, const mk_sampling *p, const float *l)
{
    uint32_t r = g->o->step.nrows;
    mk_row *row = one_row(g->o, r, pos);
    row->flags |= MK_ROW_LOGITS | MK_ROW_SAMPLE;
    g->o->mem.slot[r].sampling = *p;
    put_logits(g, r, l);
}

static const mk_sampled *run(rig *g)
{
    one_signal(g->o, g->logits);
    one_insn(g->o, MK_OP_SAMPLE);
    one_wait(g->o, g->stats);
    one_wait(g->o, g->logits);
    one_to(g->o, g->out, 0);
    g->o->in.sample = (mk_sample){.vocab = g->vocab, .slices = g->slices};
    one_run(g->o, 0);
    return one_local_at(g->o, 0, g->out);
}

static uint32_t one_token(rig *g, uint32_t pos, const mk_sampling *p, const float *l)
{
    one_begin(g->o);
    ask(g, pos, p, l);
    return run(g)->token[0];
}

#define OFF .top_p = 1.0f

/* ---- reference ------------------------------------------------------------------------------------------------------- */

static const float *sort_logit;
static int by_logit(const void *a, const void *b)
{
    uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b;
    if (sort_logit[i] != sort_logit[j]) return sort_logit[i] > sort_logit[j] ? -1 : 1;
    return i < j ? -1 : 1;
}

/* prob[vocab] after temperature, top-k, top-p, min-p, each renormalising. */
static void distribution(const mk_sampling *s, const float *l, uint32_t vocab, double *prob)
{
    uint32_t *order = malloc(vocab * sizeof *order), left = vocab, n;
    double *p = malloc(vocab * sizeof *p), sum = 0, max;
    assert_non_null(order);
    assert_non_null(p);
    for (uint32_t i = 0; i < vocab; i++) order[i] = i;
    sort_logit = l;
    qsort(order, vocab, sizeof *order, by_logit);
    max = (double)l[order[0]];
    for (uint32_t i = 0; i < vocab; i++) p[i] = exp(((double)l[order[i]] - max) / (double)s->temperature);
    if (s->top_k && s->top_k < left) left = s->top_k;
    for (uint32_t i = 0; i < left; i++) sum += p[i];
    for (uint32_t i = 0; i < left; i++) p[i] /= sum;
    if (s->top_p < 1) {
        for (n = 0, sum = 0; n < left;) {
            sum += p[n++];
            if (sum >= (double)s->top_p * (1 - 1e-12)) break;
        }
        left = n;
        for (uint32_t i = 0; i < left; i++) p[i] /= sum;
    }
    if (s->min_p > 0) {
        double least = p[0] * (double)s->min_p;
        for (n = 0, sum = 0; n < left && p[n] >= least * (1 - 1e-7); n++) sum += p[n];
        left = n;
        for (uint32_t i = 0; i < left; i++) p[i] /= sum;
    }
    for (uint32_t i = 0; i < vocab; i++) prob[i] = 0;
    for (uint32_t i = 0; i < left; i++) prob[order[i]] = p[i];
    free(order);
    free(p);
}

/* ---- greedy, logprobs ------------------------------------------------------------------------------------------------ */

static void test_greedy(void **state)
{
    (void)state;
    rig g = rig_new(100, 7);
    float l[MK_MAX_ROWS][100];
    mk_sampling p = {.temperature = 0, .top_p = 0.3f, .top_k = 5, .min_p = 0.4f}; /* ignored */
    for (int trial = 0; trial < 50; trial++) {
        one_begin(g.o);
        for (uint32_t r = 0; r < MK_MAX_ROWS; r++) {
            one_fill(1000 + 8 * (uint64_t)trial + r, l[r], 100, trial % 2 ? 3.0 : 30.0);
            if (trial % 3 == 0)
                for (int i = 0; i < 100; i++) l[r][i] = roundf(l[r][i] / 2); /* many ties, also between slices */
            ask(&g, 10 + r, &p, l[r]);
        }
        const mk_sampled *m = run(&g);
        for (uint32_t r = 0; r < MK_MAX_ROWS; r++) {
            uint32_t best = 0;
            double sum = 0;
            for (uint32_t i = 1; i < 100; i++)
                if (l[r][i] > l[r][best]) best = i;
            for (int i = 0; i < 100; i++) sum += exp((double)l[r][i] - (double)l[r][best]);
            assert_int_equal(m->token[r], best);
            double want = -log(sum);
            one_close("logprob", &m->logprob[r], &want, 1, 1.0, 1e-6);
        }
    }
    one_free(g.o);
}

static void test_score(void **state)
{
    (void)state;
    rig g = rig_new(1000, 13);
    float l[1000];
    one_fill(5, l, 1000, 4.0);
    l[17] = -INFINITY;
    double max = -1e300, sum = 0;
    for (int i = 0; i < 1000; i++) max = fmax(max, (double)l[i]);
    for (int i = 0; i < 1000; i++) sum += exp((double)l[i] - max);
    one_begin(g.o);
    const uint32_t target[4] = {3, 999, 500, 17};
    one_row(g.o, 0, 4); /* asks for nothing */
    no_logits(&g, 0);
    for (uint32_t r = 1; r <= 4; r++) {
        mk_row *row = one_row(g.o, r, 4 + r);
        row->flags |= MK_ROW_LOGITS | MK_ROW_SCORE;
        row->target = target[r - 1];
        put_logits(&g, r, l);
    }
    mk_sampling p = {.temperature = 0.5f, .top_k = 2, OFF, .seed = 3};
    ask(&g, 9, &p, l);
    const mk_sampled *m = run(&g);
    assert_int_equal(m->token[0], 0);
    assert_true(m->logprob[0] == 0.0f);
    for (uint32_t r = 1; r <= 3; r++) {
        double want = (double)l[target[r - 1]] - max - log(sum);
        assert_int_equal(m->token[r], target[r - 1]);
        one_close("logprob of the target", &m->logprob[r], &want, 1, 1.0, 2e-6);
    }
    assert_true(m->logprob[4] == -INFINITY);
    double want = (double)l[m->token[5]] - max - log(sum); /* of the unmodified distribution, whatever temperature and filters are */
    one_close("logprob of the token", &m->logprob[5], &want, 1, 1.0, 2e-6);
    one_free(g.o);
}

/* ---- every draw is the inverse of a distribution at u ----------------------------------------------------------------------- */

#define NEAR 1e-6 /* of u: weights are rounded to 2^-40 */

/* Does u fall on `token` of a distribution? */
static int falls_on(const double *prob, uint32_t token, double u)
{
    double below = 0;
    for (uint32_t i = 0; i < token; i++) below += prob[i];
    return prob[token] > 0 && u >= below - NEAR && u <= below + prob[token] + NEAR;
}

/* The token chosen at a position must be that of the first draw which the filters leave, or of the draw behind those. all: the distribution without filters, prob: with. Returns the draw. */
static uint32_t check_draw(const char *name, const mk_sampling *s, const double *all, const double *prob, uint32_t vocab, uint32_t position, uint32_t token)
{
    uint32_t n = 0;
    assert_in_range(token, 0, vocab - 1);
    if (prob[token] == 0) fail_msg("%s: token %u was drawn, its probability is 0", name, token);
    if (s->top_p < 1.0f && (s->top_k == 0 || s->top_k >= vocab))
        for (; n < MK_TRIES; n++) {
            double u = ldexp((double)mk_draw(s->seed, position, n), -64), below = 0;
            uint32_t other = 0;
            if (falls_on(all, token, u)) return n;
            for (; other < vocab && !(prob[other] == 0 && u >= below - NEAR && u <= below + all[other] + NEAR); other++) below += all[other];
            if (other == vocab) fail_msg("%s: draw %u, u = %.9f, gave token %u, but falls on one that the filters leave", name, n, u, token);
        }
    double u = ldexp((double)mk_draw(s->seed, position, n), -64);
    if (!falls_on(prob, token, u)) fail_msg("%s: draw %u, u = %.9f, gave token %u", name, n, u, token);
    return n;
}

static void check_draws(const char *name, uint32_t vocab, uint32_t slices, const mk_sampling *s, const float *l, uint32_t draws)
{
    rig g = rig_new(vocab, slices);
    double *prob = malloc(vocab * sizeof *prob), *all = malloc(vocab * sizeof *all), chi = 0, rest_e = 0, rest_n = 0;
    uint32_t *seen = calloc(vocab, sizeof *seen), bins = 0;
    assert_non_null(prob);
    assert_non_null(all);
    assert_non_null(seen);
    distribution(s, l, vocab, prob);
    distribution(&(mk_sampling){.temperature = s->temperature, OFF}, l, vocab, all);
    for (uint32_t done = 0; done < draws; done += MK_MAX_ROWS) {
        one_begin(g.o);
        for (uint32_t r = 0; r < MK_MAX_ROWS; r++) ask(&g, 3 + done + r, s, l);
        mk_sampled m = *run(&g);
        for (uint32_t r = 0; r < MK_MAX_ROWS; r++) {
            check_draw(name, s, all, prob, vocab, 4 + done + r, m.token[r]);
            seen[m.token[r]]++;
        }
    }
    for (uint32_t i = 0; i < vocab; i++) {
        double e = prob[i] * draws;
        if (e < 8) {
            rest_e += e;
            rest_n += seen[i];
            continue;
        }
        chi += (seen[i] - e) * (seen[i] - e) / e;
        bins++;
    }
    if (rest_e >= 1) {
        chi += (rest_n - rest_e) * (rest_n - rest_e) / rest_e;
        bins++;
    }
    double df = bins - 1.0;
    if (df > 0 && chi > df + 4.5 * sqrt(2 * df) + 6) fail_msg("%s: chi square %.1f with %.0f degrees of freedom", name, chi, df);
    print_message("%-34s chi square %7.1f, %3.0f degrees of freedom\n", name, chi, df);
    free(prob);
    free(all);
    free(seen);
    one_free(g.o);
}

static void test_distributions(void **state)
{
    (void)state;
    float l[3000];
    one_fill(8, l, 3000, 2.0);
    static const struct {
        const char *name;
        uint32_t vocab, slices;
        mk_sampling s;
    } c[] = {
        {"temperature 1", 50, 3, {.temperature = 1.0f, OFF, .seed = 1}},
        {"temperature 0.6", 50, 3, {.temperature = 0.6f, OFF, .seed = 2}},
        {"temperature 3, 700 tokens", 700, 5, {.temperature = 3.0f, OFF, .seed = 0xfedcba9876543210ull}},
        {"top-k 7", 50, 1, {.temperature = 1.0f, OFF, .top_k = 7, .seed = 3}},
        {"top-k above the vocabulary", 50, 1, {.temperature = 1.0f, OFF, .top_k = 51, .seed = 3}},
        {"top-p 0.8", 300, 4, {.temperature = 1.0f, .top_p = 0.8f, .seed = 4}},
        {"top-p 0.3", 300, 4, {.temperature = 1.0f, .top_p = 0.3f, .seed = 10}},
        {"min-p 0.1", 300, 4, {.temperature = 1.3f, OFF, .min_p = 0.1f, .seed = 5}},
        {"top-k 20, top-p 0.7", 300, 4, {.temperature = 0.9f, .top_p = 0.7f, .top_k = 20, .seed = 6}},
        {"top-k 40, min-p 0.05", 300, 4, {.temperature = 1.1f, OFF, .top_k = 40, .min_p = 0.05f, .seed = 7}},
        {"top-p 0.9, min-p 0.08", 300, 4, {.temperature = 1.1f, .top_p = 0.9f, .min_p = 0.08f, .seed = 8}},
        {"all four", 3000, 9, {.temperature = 1.4f, .top_p = 0.85f, .top_k = 100, .min_p = 0.12f, .seed = 9}},
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) check_draws(c[i].name, c[i].vocab, c[i].slices, &c[i].s, l, 8000);
    /* logits with many ties: filters cut through them */
    for (int i = 0; i < 300; i++) l[i] = roundf(l[i]);
    for (size_t i = 3; i < sizeof c / sizeof *c; i++) check_draws("with ties", 300, 4, &c[i].s, l, 2400);
}

/* Many small distributions, few draws each: cuts at every place. */
static void test_many(void **state)
{
    (void)state;
    uint64_t seed = 77;
    rig g = rig_new(40, 3);
    double prob[40], all[40];
    float l[40];
    uint32_t by_draw[MK_TRIES + 1] = {0};
    for (int trial = 0; trial < 3000; trial++) {
        one_fill(9000 + (uint64_t)trial, l, 40, 1.0 + trial % 4);
        if (trial % 5 == 0)
            for (int i = 0; i < 40; i++) l[i] = roundf(l[i]);
        if (trial % 7 == 0) l[trial % 40] = -INFINITY;
        mk_sampling s = {.temperature = (float)(0.2 + 2 * one_uniform(&seed)), OFF, .seed = one_random(&seed)};
        if (one_random(&seed) % 2) s.top_k = 1 + (uint32_t)(one_random(&seed) % 45);
        if (one_random(&seed) % 2) s.top_p = (float)one_uniform(&seed);
        if (one_random(&seed) % 2) s.min_p = (float)one_uniform(&seed);
        distribution(&s, l, 40, prob);
        distribution(&(mk_sampling){.temperature = s.temperature, OFF}, l, 40, all);
        uint32_t pos = (uint32_t)one_random(&seed) >> 1;
        char name[32];
        snprintf(name, sizeof name, "trial %d", trial);
        by_draw[check_draw(name, &s, all, prob, 40, pos + 1, one_token(&g, pos, &s, l))]++;
    }
    for (uint32_t n = 0; n <= MK_TRIES; n++)
        if (!by_draw[n]) fail_msg("no token was chosen by draw %u", n);
    one_free(g.o);
}

/* Rows alone, in company, in another order: the same tokens and logprobs. */
static void test_invariance(void **state)
{
    (void)state;
    rig g = rig_new(500, 6);
    static float l[MK_MAX_ROWS][500];
    mk_sampling s[MK_MAX_ROWS];
    for (uint32_t r = 0; r < MK_MAX_ROWS; r++) {
        one_fill(600 + r, l[r], 500, 2.0);
        s[r] = (mk_sampling){.temperature = 0.3f * (float)r, .top_p = r % 2 ? 0.9f : 1.0f, .top_k = r % 3 ? 30 : 0, .min_p = r % 4 ? 0 : 0.02f, .seed = r};
    }
    for (uint32_t pos = 0; pos < 40; pos++) {
        one_begin(g.o);
        for (uint32_t r = 0; r < MK_MAX_ROWS; r++) ask(&g, pos + r, &s[r], l[r]);
        mk_sampled a = *run(&g);
        one_begin(g.o);
        for (uint32_t r = 0; r < MK_MAX_ROWS; r++) ask(&g, pos + 7 - r, &s[7 - r], l[7 - r]);
        mk_sampled b = *run(&g);
        for (uint32_t r = 0; r < MK_MAX_ROWS; r++) {
            assert_int_equal(a.token[r], b.token[7 - r]);
            one_same("logprob", &a.logprob[r], &b.logprob[7 - r], 1);
            one_begin(g.o);
            ask(&g, pos + r, &s[r], l[r]);
            const mk_sampled *c = run(&g);
            assert_int_equal(a.token[r], c->token[0]);
            one_same("logprob alone", &a.logprob[r], &c->logprob[0], 1);
        }
    }
    one_free(g.o);
}

/* ---- edges ----------------------------------------------------------------------------------------------------------- */

/* Ids seen in 400 draws, as a set of at most 16. */
static uint32_t support(rig *g, const mk_sampling *p, const float *l)
{
    uint32_t set = 0;
    for (uint32_t pos = 0; pos < 400; pos++) {
        uint32_t t = one_token(g, pos, p, l);
        assert_in_range(t, 0, g->vocab - 1);
        set |= 1u << t;
    }
    return set;
}

static void test_edges(void **state)
{
    (void)state;
    rig g = rig_new(10, 3);
    float equal[10], l[10];
    for (int i = 0; i < 10; i++) equal[i] = -3.25f;
    mk_sampling p = {.temperature = 1.0f, OFF, .seed = 12};

    /* all equal: every id; filters keep the lowest ids; shares that fall on a boundary are exact */
    assert_int_equal(support(&g, &p, equal), 0x3ff);
    p.top_k = 3;
    assert_int_equal(support(&g, &p, equal), 0x007);
    p.top_k = 0, p.top_p = 0.5f;
    assert_int_equal(support(&g, &p, equal), 0x01f);
    p.top_p = nextafterf(0.5f, 1);
    assert_int_equal(support(&g, &p, equal), 0x03f);
    p.top_k = 4, p.top_p = 0.5f; /* half of the four that are left */
    assert_int_equal(support(&g, &p, equal), 0x003);
    p.top_k = 0, p.top_p = 1, p.min_p = 1;
    assert_int_equal(support(&g, &p, equal), 0x3ff);

    /* single survivors */
    const float peak[10] = {0, 1, 2, 5, 5, 3, 2, 1, 0, -1};
    p = (mk_sampling){.temperature = 100.0f, OFF, .top_k = 1, .seed = 5};
    assert_int_equal(support(&g, &p, peak), 1 << 3);
    p = (mk_sampling){.temperature = 5.0f, .top_p = 1e-30f, .seed = 5};
    assert_int_equal(support(&g, &p, peak), 1 << 3);
    p.top_p = 0.0f;
    assert_int_equal(support(&g, &p, peak), 1 << 3);
    p = (mk_sampling){.temperature = 5.0f, OFF, .min_p = 1.0f, .seed = 5};
    assert_int_equal(support(&g, &p, peak), 3 << 3);
    p = (mk_sampling){.temperature = 1e-3f, OFF, .seed = 5}; /* two equal maxima, all else has no weight */
    assert_int_equal(support(&g, &p, peak), 3 << 3);
    p = (mk_sampling){.temperature = 1e-38f, OFF, .seed = 5};
    assert_int_equal(support(&g, &p, peak), 3 << 3);
    p = (mk_sampling){.temperature = 1e38f, OFF, .seed = 5};
    assert_int_equal(support(&g, &p, peak), 0x3ff);

    /* the order is that of the logits even where their weights round alike: neighbours, hot */
    for (int i = 0; i < 10; i++) l[i] = 1.0f;
    l[6] = nextafterf(1.0f, 2);
    p = (mk_sampling){.temperature = 1000.0f, OFF, .top_k = 1, .seed = 5};
    assert_int_equal(support(&g, &p, l), 1 << 6);

    /* -0 equals 0: the lower id */
    for (int i = 0; i < 10; i++) l[i] = i == 2 ? -0.0f : i == 5 ? 0.0f : -9.0f;
    assert_int_equal(support(&g, &p, l), 1 << 2);

    /* huge logits, -inf */
    p = (mk_sampling){.temperature = 1.0f, OFF, .seed = 6};
    for (int i = 0; i < 10; i++) l[i] = i % 2 ? 3.4e38f : -3.4e38f;
    assert_int_equal(support(&g, &p, l), 0x2aa);
    for (int i = 0; i < 10; i++) l[i] = i % 3 ? 1e6f : -INFINITY;
    assert_int_equal(support(&g, &p, l), 0x1b6);
    p.top_k = 8;
    assert_int_equal(support(&g, &p, l), 0x1b6);
    p.top_p = 0.99f;
    assert_int_equal(support(&g, &p, l), 0x1b6);
    for (int i = 0; i < 10; i++) l[i] = i == 9 ? -2.0f : -INFINITY;
    assert_int_equal(support(&g, &p, l), 1 << 9);

    /* nothing to choose from, not a number: some token of the vocabulary, never a crash */
    for (int i = 0; i < 10; i++) l[i] = -INFINITY;
    support(&g, &p, l);
    for (int i = 0; i < 10; i++) l[i] = NAN;
    support(&g, &p, l);
    for (int i = 0; i < 10; i++) l[i] = i == 4 ? NAN : 1.0f;
    p = (mk_sampling){.temperature = 1.0f, .top_p = 0.999f, .top_k = 9, .seed = 6};
    assert_int_equal(support(&g, &p, l), 0x3ef);
    l[4] = INFINITY;
    assert_int_equal(support(&g, &p, l), 1 << 4);
    one_free(g.o);
}

/* A draw depends on seed and position only, and on both. */
static void test_seed(void **state)
{
    (void)state;
    rig g = rig_new(1000, 2);
    float l[1000];
    one_fill(2, l, 1000, 0.1);
    mk_sampling p = {.temperature = 1, OFF, .seed = 40}, q = {.temperature = 1, OFF, .seed = 40ull << 32};
    uint32_t same_seed = 0, next = 0;
    for (uint32_t pos = 0; pos < 200; pos++) {
        uint32_t t = one_token(&g, pos, &p, l);
        assert_int_equal(t, one_token(&g, pos, &p, l));
        same_seed += t == one_token(&g, pos, &q, l);
        next += t == one_token(&g, pos + 1, &p, l);
    }
    assert_true(same_seed < 5 && next < 5);
    one_free(g.o);
}

static void test_large_vocabulary(void **state)
{
    (void)state;
    uint32_t vocab = 163840;
    float *l = malloc(vocab * sizeof *l);
    assert_non_null(l);
    one_fill(3, l, vocab, 2.5);
    check_draws("163,840 tokens, top-k 50, top-p 0.9", vocab, 16, &(mk_sampling){.temperature = 0.8f, .top_p = 0.9f, .top_k = 50, .seed = 1}, l, 64);
    check_draws("163,840 tokens, top-p 0.9", vocab, 16, &(mk_sampling){.temperature = 0.8f, .top_p = 0.9f, .seed = 1}, l, 64);
    check_draws("163,840 tokens", vocab, 16, &(mk_sampling){.temperature = 0.8f, OFF, .seed = 1}, l, 64);
    free(l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_philox), cmocka_unit_test(test_greedy),     cmocka_unit_test(test_score),
        cmocka_unit_test(test_many),   cmocka_unit_test(test_invariance), cmocka_unit_test(test_edges),
        cmocka_unit_test(test_seed),   cmocka_unit_test(test_distributions), cmocka_unit_test(test_large_vocabulary),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
