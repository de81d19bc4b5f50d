/* What the self-test's kinds are made with: memory, inputs, comparison; routing and sampling, whose references run on the host. Part of selftest.cu. */
#ifndef MK_SELFTEST_CUH
#define MK_SELFTEST_CUH

extern "C" { /* C headers */
#include "megakernel/selftest.h"
#include "instructions/tolerance.h"
}

#include "megakernel/selftest_ref.cuh"

#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_KINDS  128
#define MAX_MEMORY 64
#define EPOCH0     0x5e1f7e57u
#define FAR        4200u /* a position whose cache has splits of several pages */
#define THREADS    128u
#define PATIENCE   3.0 /* seconds */

typedef struct kind {
    mk_insn like;          /* the first of them */
    uint32_t pubs, chosen; /* publications seen; the one that is tested */
} kind;

typedef struct kept {
    void *at, *copy;
    uint64_t bytes;
} kept;

typedef struct test {
    mk_gpu *g;
    const mk_program *p;
    mk_memory mem; /* device */
    mk_step step;
    const mk_selftest_config *cfg;
    uint64_t seed;
    mk_selftest_report *report;
    mk_err *err;
    int rc;
    /* of the kind under test */
    const kind *kind;
    mk_insn *insn;    /* under test, by worker */
    uint32_t *worker; /* of each */
    uint32_t n;
    mk_insn *all;     /* with the ROUTE that goes before */
    uint32_t *queue;
    ref ref;
    ref_route route;
    uint8_t *local;   /* image, before and after */
    void *device[MAX_MEMORY];
    uint32_t n_device;
    float *value[3];  /* inputs on the host */
    char name[160];
    double worst;
    void *host_mem[MAX_MEMORY]; /* freed after the kind, as device[] */
    uint32_t n_host;
    kept kept[MAX_MEMORY];
    uint32_t n_kept;
} test;

/* ---- memory --------------------------------------------------------------------------------------------------------- */

static void fail_cuda(test *t, cudaError_t e, const char *what)
{
    if (!t->rc) t->rc = mk_fail(t->err, MK_E_DEVICE, "self-test: %s: %s", what, cudaGetErrorString(e));
}
static void *on_device(test *t, uint64_t bytes, const void *from)
{
    void *p = NULL;
    cudaError_t e = t->n_device == MAX_MEMORY ? cudaErrorMemoryAllocation : cudaMalloc(&p, bytes + 64);
    if (!e) e = from ? cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice) : cudaMemset(p, 0xff, bytes);
    if (p) t->device[t->n_device++] = p;
    if (e) fail_cuda(t, e, "device memory");
    return e ? NULL : p;
}
static void *on_host(test *t, uint64_t bytes)
{
    void *p = t->n_host == MAX_MEMORY ? NULL : calloc(1, bytes + 64);
    if (p)
        t->host_mem[t->n_host++] = p;
    else if (!t->rc)
        t->rc = mk_fail(t->err, MK_E_CAPACITY, "self-test: out of memory");
    return p;
}
static bool get(test *t, void *host, const void *device, uint64_t bytes)
{
    cudaError_t e = t->rc ? cudaSuccess : cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost);
    if (e) fail_cuda(t, e, "reading back");
    return !e;
}
/* A copy on the host. */
static void *fetched(test *t, const void *device, uint64_t bytes)
{
    void *p = on_host(t, bytes);
    return p && get(t, p, device, bytes) ? p : NULL;
}
static void put(test *t, void *device, const void *host, uint64_t bytes)
{
    cudaError_t e = t->rc ? cudaSuccess : cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice);
    if (e) fail_cuda(t, e, "copying inputs");
}
/* Device memory that is not ours: put back by release. */
static void keep(test *t, void *at, uint64_t bytes)
{
    void *copy = on_device(t, bytes, NULL);
    cudaError_t e = copy && t->n_kept < MAX_MEMORY ? cudaMemcpy(copy, at, bytes, cudaMemcpyDeviceToDevice) : cudaErrorMemoryAllocation;
    if (e)
        fail_cuda(t, e, "keeping cache and state");
    else
        t->kept[t->n_kept++] = {at, copy, bytes};
}
static void release(test *t)
{
    while (t->n_kept) {
        const kept *k = &t->kept[--t->n_kept];
        cudaError_t e = cudaMemcpy(k->at, k->copy, k->bytes, cudaMemcpyDeviceToDevice);
        if (e) fail_cuda(t, e, "putting back cache and state");
    }
    while (t->n_device) cudaFree(t->device[--t->n_device]);
    while (t->n_host) free(t->host_mem[--t->n_host]);
}

static double uniform(test *t)
{
    t->seed = t->seed * 6364136223846793005ull + 1442695040888963407ull;
    return (double)(t->seed >> 11) * 0x1p-53;
}
static float spread(test *t, float scale)
{
    return (float)(2 * uniform(t) - 1) * scale;
}

static float widen(uint16_t h)
{
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static uint16_t narrow(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

/* ---- inputs --------------------------------------------------------------------------------------------------------- */

static uint64_t half_bytes(const mk_vec *v)
{
    return (uint64_t)MK_MAX_ROWS * v->nslice * v->slice_packets * 16;
}
static uint8_t *half_at(test *t, const mk_vec *v, uint32_t pub)
{
    return t->mem.exchange + mk_packet_offset(v, mk_half(v, t->step.seq, pub), 0, 0);
}

/* Publishes values[row][width] (rounded to what the vector can hold, in place) and trailers[row][nslice] in a publication. */
static void publish(test *t, const mk_vec *v, uint32_t pub, float *value, const float *trailer)
{
    const uint32_t *start = mk_vec_starts(t->p, v);
    uint32_t *half = (uint32_t *)on_host(t, half_bytes(v));
    if (!half) return;
    memset(half, 0xff, half_bytes(v));
    for (uint32_t r = 0; r < t->step.nrows; r++)
        for (uint32_t s = 0; s < v->nslice; s++) {
            uint32_t *q = half + ((uint64_t)r * v->nslice + s) * v->slice_packets * 4, n = start[s + 1] - start[s], w = 0;
            float *x = value + (uint64_t)r * v->width + start[s];
            uint32_t words = v->dtype == MK_F32 ? n : (n + 1) / 2;
            for (; w < words; w++) {
                uint32_t u;
                if (v->dtype == MK_F32) {
                    memcpy(&u, &x[w], 4);
                } else {
                    u = narrow(x[2 * w]);
                    x[2 * w] = widen((uint16_t)u);
                    if (2 * w + 1 < n) {
                        uint32_t h = narrow(x[2 * w + 1]);
                        x[2 * w + 1] = widen((uint16_t)h);
                        u |= h << 16;
                    }
                }
                q[w / 3 * 4 + w % 3] = u;
            }
            if (v->trailer) {
                memcpy(&q[w / 3 * 4 + w % 3], &trailer[r * v->nslice + s], 4);
                w++;
            }
            for (; w % 3; w++) q[w / 3 * 4 + w % 3] = 0; /* as who publishes leaves it: sums and largest values may take it in */
            for (uint32_t k = 0; k < w / 3; k++) q[4 * k + 3] = mk_epoch(EPOCH0, t->step.seq, pub);
        }
    put(t, half_at(t, v, pub), half, half_bytes(v));
}

/* Router logits: every row a permutation of evenly spaced values, so that no choice is near a tie by chance of rounding. */
static void spaced(test *t, float *x, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t j = (uint32_t)(uniform(t) * (i + 1));
        x[i] = x[j];
        x[j] = -3.0f + 6.0f * (float)i / (float)n;
    }
}

static void make_input(test *t, const mk_insn *in, uint32_t w)
{
    const mk_wait *wait = &in->wait[w];
    const mk_vec *v = &t->p->vec[wait->vec];
    ref_in *x = &t->ref.in[w];
    for (uint32_t k = 0; k < w; k++)
        if (in->wait[k].vec == wait->vec && in->wait[k].pub == wait->pub) {
            *x = t->ref.in[k];
            t->value[w] = t->value[k];
            return;
        }
    if (v->scope == MK_BULK) {
        uint32_t n = mk_counter_target(v, t->step.seq, wait->pub);
        put(t, t->mem.counter + v->counter, &n, 4);
        return;
    }
    if (v->scope == MK_LOCAL) return; /* the image */
    const uint32_t *start = mk_vec_starts(t->p, v);
    float *value = (float *)on_host(t, (uint64_t)MK_MAX_ROWS * v->width * 4), *trailer = (float *)on_host(t, (uint64_t)MK_MAX_ROWS * v->nslice * 4);
    if (!value || !trailer) return;
    for (uint32_t r = 0; r < t->step.nrows; r++) {
        for (uint32_t i = 0; i < v->width; i++) value[(uint64_t)r * v->width + i] = spread(t, 1.7f);
        for (uint32_t s = 0; s < v->nslice; s++) trailer[r * v->nslice + s] = (float)((start[s + 1] - start[s]) * (0.5 + uniform(t)));
    }
    publish(t, v, wait->pub, value, trailer);
    t->value[w] = value;
    *x = (ref_in){(float *)on_device(t, (uint64_t)MK_MAX_ROWS * v->width * 4, value), (float *)on_device(t, (uint64_t)MK_MAX_ROWS * v->nslice * 4, trailer),
                  (uint32_t *)on_device(t, (v->nslice + 1) * 4ull, start), v->width, v->nslice};
}

/* ---- comparison ----------------------------------------------------------------------------------------------------- */

static double rms_of(const float *x, uint64_t n)
{
    double square = 0;
    for (uint64_t i = 0; i < n; i++) square += (double)x[i] * x[i];
    return sqrt(square / (double)(n ? n : 1));
}
/* n values that belong together, of row r, from element `first` on, whose RMS counts as `least` at least. step: what rounding on their way may have moved a value by, as a part of it. */
#define BF16_STEP (1.0 / 128)
static void compare_beside(test *t, const char *what, uint32_t r, uint64_t first, const float *got, const float *want, uint64_t n, double least, double step, double tol)
{
    const double rms = fmax(rms_of(want, n), least) + 1e-30;
    t->report->values += n;
    double worst = 0;
    uint64_t at = 0;
    for (uint64_t i = 0; i < n; i++) {
        double e = fabs((double)got[i] - want[i]) - step * fabs((double)want[i]), x = e <= 0 ? 0 : e / (rms + fabs((double)want[i]));
        if (!(fabs((double)want[i]) <= 3e38) || !(fabs((double)got[i]) <= 3e38)) x = INFINITY;
        if (x > worst) worst = x, at = i;
    }
    double part = tol > 0 ? worst / tol : worst > 0 ? INFINITY : 0;
    if (part > t->worst) t->worst = part;
    if (part > 1 && !t->rc)
        t->rc = mk_fail(t->err, MK_E_DEVICE, "self-test: %s: %s, row %u, value %llu: expected %.7g, found %.7g (error %.2g, tolerance %.2g)", t->name, what, r,
                        (unsigned long long)(first + at), (double)want[at], (double)got[at], worst, tol);
}

static void compare(test *t, const char *what, uint32_t r, uint64_t first, const float *got, const float *want, uint64_t n, double step, double tol)
{
    compare_beside(t, what, r, first, got, want, n, 0, step, tol);
}

/* So few values of a row say too little of what they are sums of: a shared expert's gate may be anything near 0. All rows' do. */
#define FEW 16u
/* A published vector against want[row][width], slice by slice of those that the instructions own; trailers likewise. */
static void compare_published(test *t, const float *want, const float *trailer, const char *what, double tol)
{
    const mk_insn *in = t->insn;
    const mk_vec *v = &t->p->vec[in->signal_vec];
    const uint32_t *start = mk_vec_starts(t->p, v), dynamic = v->flags & MK_VEC_DYNAMIC, epoch = mk_epoch(EPOCH0, t->step.seq, in->signal_pub);
    const uint32_t *half = (const uint32_t *)fetched(t, half_at(t, v, in->signal_pub), half_bytes(v));
    float *got = (float *)on_host(t, v->width * 4ull), *got_trailer = (float *)on_host(t, v->nslice * 4ull);
    uint8_t *mine = (uint8_t *)on_host(t, v->nslice);
    float *expected = (float *)on_host(t, v->width * 4ull);
    if (!half || !got || !got_trailer || !mine || !expected) return;
    for (uint32_t i = 0; i < t->n; i++) mine[t->insn[i].signal_slice] = 1;
    const double least = v->width < FEW ? rms_of(want, (uint64_t)t->step.nrows * v->width) : 0;
    for (uint32_t r = 0; r < t->step.nrows; r++) {
        memcpy(expected, want + (uint64_t)r * v->width, v->width * 4);
        for (uint32_t s = 0; s < v->nslice; s++) {
            const uint32_t *q = half + ((uint64_t)r * v->nslice + s) * v->slice_packets * 4;
            uint32_t n = start[s + 1] - start[s], words = v->dtype == MK_F32 ? n : (n + 1) / 2, all = words + v->trailer;
            if (!dynamic && !mine[s]) { /* another kind's: matrices of two weight types publish one vector */
                memset(got + start[s], 0, n * 4);
                memset(expected + start[s], 0, n * 4);
                continue;
            }
            for (uint32_t k = 0; k < (all + 2) / 3; k++)
                if (q[4 * k + 3] != epoch && !t->rc)
                    t->rc = mk_fail(t->err, MK_E_DEVICE, "self-test: %s: row %u, slice %u, packet %u was not published: epoch %#x, expected %#x", t->name, r, s, k,
                                    q[4 * k + 3], epoch);
            for (uint32_t i = 0; i < n; i++) {
                uint32_t w = v->dtype == MK_F32 ? i : i / 2, u = q[w / 3 * 4 + w % 3];
                if (v->dtype != MK_F32) u = i & 1 ? u & 0xffff0000u : u << 16;
                memcpy(&got[start[s] + i], &u, 4);
            }
            if (v->trailer) memcpy(&got_trailer[s], &q[words / 3 * 4 + words % 3], 4);
        }
        compare_beside(t, what, r, 0, got, expected, v->width, least, v->dtype == MK_BF16 ? BF16_STEP : 0, tol);
        if (v->trailer && trailer) compare(t, "trailer", r, 0, got_trailer, trailer + r * v->nslice, v->nslice, 0, 10 * tol);
    }
}

/* What instruction i left in its worker's LOCAL vector, where no later one has written it over. */
static const float *local_after(test *t, uint32_t i)
{
    if (i + 1 < t->n && t->worker[i + 1] == t->worker[i]) return NULL;
    return (const float *)(t->local + t->worker[i] * t->p->info.local_bytes + t->p->vec[t->insn[i].signal_vec].offset);
}

static void compare_state(test *t, const float *want)
{
    uint64_t words = t->ref.state_words, lo = t->ref.state_lo;
    for (uint32_t r = 0; r < t->step.nrows && !t->rc; r++) {
        uint32_t slot = t->step.row[r].state_write;
        if (r + 1 < t->step.nrows && t->step.row[r + 1].state_write == slot) continue; /* the last row of a stream leaves it */
        const float *got = (const float *)fetched(t, t->mem.state + slot * t->p->info.state_slot_bytes + lo, words * 4);
        for (uint32_t i = 0; got && i < t->n; i++) {
            const mk_insn *in = &t->insn[i];
            const mk_delta *d = &in->delta;
            const uint64_t conv = (d->state_off - lo) / 4, at = conv + mk_delta_matrix_at(d) / 4;
            compare(t, "convolution state", r, conv, got + conv, want + slot * words + conv, (uint64_t)mk_delta_channels(d) * d->taps, 0, mk_tolerance(in));
            compare(t, "state", r, at, got + at, want + slot * words + at, (uint64_t)d->dk * d->dv, 0, mk_tolerance(in));
        }
    }
}

/* ---- routing and sampling: on the host ------------------------------------------------------------------------------- */

static double score_of(const mk_route *x, const float *l, uint32_t i)
{
    if (x->score == MK_SCORE_SIGMOID) return 1 / (1 + exp(-(double)l[i]));
    double max = l[0], sum = 0;
    for (uint32_t k = 1; k < x->experts; k++) max = l[k] > max ? l[k] : max;
    for (uint32_t k = 0; k < x->experts; k++) sum += exp(l[k] - max);
    return exp(l[i] - max) / sum;
}

/* models.md 3.6 by repeated search for the greatest. Returns the smallest gap between what was chosen and what was not. */
static double route_row(const mk_route *x, const float *l, const float *bias, uint16_t *id, float *weight)
{
    double s[MK_MAX_EXPERT], choice[MK_MAX_EXPERT], gap = INFINITY, group[MK_MAX_EXPERT], sum = 0;
    char open[MK_MAX_EXPERT], taken[MK_MAX_EXPERT] = {0};
    uint32_t size = x->experts / (x->groups ? x->groups : 1);
    for (uint32_t i = 0; i < x->experts; i++) {
        s[i] = i && x->score == MK_SCORE_SOFTMAX ? 0 : score_of(x, l, i);
        open[i] = x->groups <= 1;
    }
    if (x->score == MK_SCORE_SOFTMAX) /* one division apart from the first */
        for (uint32_t i = 1; i < x->experts; i++) s[i] = s[0] * exp((double)l[i] - l[0]);
    for (uint32_t i = 0; i < x->experts; i++) choice[i] = s[i] + (x->has_bias ? bias[i] : 0);
    if (x->groups > 1) {
        for (uint32_t g = 0; g < x->groups; g++) {
            double one = -INFINITY, two = -INFINITY;
            for (uint32_t i = g * size; i < (g + 1) * size; i++)
                if (choice[i] > one)
                    two = one, one = choice[i];
                else if (choice[i] > two)
                    two = choice[i];
            group[g] = size > 1 ? one + two : one;
        }
        for (uint32_t k = 0; k <= x->topk_groups && k < x->groups; k++) {
            uint32_t best = MK_NONE;
            for (uint32_t g = 0; g < x->groups; g++)
                if (!open[g * size] && (best == MK_NONE || group[g] > group[best])) best = g;
            if (k == x->topk_groups) { /* the best of those that stay closed, against the worst that was opened */
                for (uint32_t g = 0; g < x->groups; g++)
                    if (open[g * size]) gap = fmin(gap, group[g] - group[best]);
                break;
            }
            for (uint32_t i = best * size; i < (best + 1) * size; i++) open[i] = 1;
        }
    }
    double last = 0;
    for (uint32_t k = 0; k <= x->topk; k++) {
        uint32_t best = MK_NONE;
        for (uint32_t i = 0; i < x->experts; i++)
            if (open[i] && !taken[i] && (best == MK_NONE || choice[i] > choice[best])) best = i;
        if (best == MK_NONE) break;
        if (k == x->topk) gap = fmin(gap, last - choice[best]);
        else taken[best] = 1;
        last = choice[best];
    }
    uint32_t n = 0;
    for (uint32_t i = 0; i < x->experts; i++)
        if (taken[i]) id[n++] = (uint16_t)i, sum += s[i];
    for (uint32_t k = 0; k < n; k++) weight[k] = (float)((x->renorm ? s[id[k]] / (sum + 1e-20) : s[id[k]]) * x->scale);
    return gap;
}

/* The half that a publication of sums is added to. */
static uint64_t *sums_at(const test *t, const mk_vec *v, uint32_t pub, uint32_t experts)
{
    return (uint64_t *)(t->mem.bulk + v->offset) + mk_sum_at(experts, mk_half(v, t->step.seq, pub), 0, 0);
}

/* Publishes h, unless the inputs of the instruction `of` have it already, and router logits for the ROUTE `in`, and computes what it has to find. */
static void make_routes(test *t, const mk_insn *in, const mk_insn *of)
{
    const mk_wait *w = &in->wait[0], *s = &in->wait[1];
    const mk_vec *h = &t->p->vec[w->vec], *v = &t->p->vec[s->vec];
    const mk_route *x = &in->route;
    const float *value = NULL, *bias = x->has_bias ? (const float *)fetched(t, t->mem.param + x->param_off, x->experts * 4ull) : NULL;
    float *own = (float *)on_host(t, (uint64_t)MK_MAX_ROWS * h->width * 4), *logit = (float *)on_host(t, x->experts * 4ull);
    uint64_t *word = (uint64_t *)on_host(t, mk_sums_words(x->experts) * 8ull);
    const uint32_t count = mk_counter_target(v, t->step.seq, s->pub);
    if (t->rc) return;
    for (uint32_t k = 0; k < of->nwait; k++)
        if (of != in && of->wait[k].vec == w->vec && of->wait[k].pub == w->pub) value = t->value[k];
    if (!value) {
        for (uint64_t i = 0; i < (uint64_t)t->step.nrows * h->width; i++) own[i] = spread(t, 1.7f);
        publish(t, h, w->pub, own, NULL);
        value = own;
    }
    for (uint32_t r = 0; r < t->step.nrows; r++) {
        double squares = 0;
        for (uint32_t i = 0; i < x->k; i++) squares += (double)value[(uint64_t)r * h->width + i] * value[(uint64_t)r * h->width + i];
        const double rms = sqrt(squares / x->k + x->eps);
        for (int tries = 0;; tries++) {
            spaced(t, logit, x->experts);
            for (uint32_t e = 0; e < x->experts; e++) { /* one addend has it all */
                const uint64_t sum = mk_sum_word((float)(logit[e] * rms)) + (v->signals - 1) * mk_sum_word(0);
                word[mk_sum_at(x->experts, 0, r, e)] = sum;
                logit[e] = (float)(mk_sum_value(sum, v->signals) / rms);
            }
            if (route_row(x, logit, bias, t->route.id[r], t->route.weight[r]) > 1e-5 || tries == 100) break;
        }
    }
    put(t, sums_at(t, v, s->pub, x->experts), word, mk_sums_words(x->experts) * 8ull);
    put(t, t->mem.counter + v->counter, &count, 4);
    t->ref.route = (ref_route *)on_device(t, sizeof t->route, &t->route);
}

/* ROUTER: what all of them have added, against the products in double. */
static void compare_sums(test *t)
{
    const mk_insn *in = t->insn;
    const mk_vec *v = &t->p->vec[in->signal_vec], *h = &t->p->vec[in->wait[0].vec];
    const uint32_t experts = in->router.experts;
    uint32_t bytes = 0;
    for (uint32_t i = 0; i < t->n; i++) bytes = t->insn[i].tape_bytes > bytes ? t->insn[i].tape_bytes : bytes;
    float *got = (float *)on_host(t, experts * 4ull), *expected = (float *)on_host(t, experts * 4ull), *gamma = (float *)on_host(t, MK_SEGMENT_ROWS * 4ull);
    double *want = (double *)on_host(t, MK_MAX_ROWS * experts * sizeof *want); /* zeroed */
    uint8_t *weights = (uint8_t *)on_host(t, bytes);
    if (t->rc) return;
    for (uint32_t i = 0; i < t->n; i++) {
        const mk_router *x = &t->insn[i].router;
        get(t, weights, t->mem.tape + t->p->tape_base[t->worker[i]] + t->insn[i].tape_off, t->insn[i].tape_bytes);
        get(t, gamma, t->mem.param + x->param_off, x->n * 4ull);
        for (uint32_t e = 0; e < experts; e++)
            for (uint32_t j = 0; j < x->n; j++) {
                uint16_t b;
                memcpy(&b, weights + mk_quarter_at(x->n, e / 32, e % 32 / 8, j) + e % 8 * 2, 2);
                for (uint32_t r = 0; r < t->step.nrows; r++) want[r * experts + e] += (double)mk_bf16_to_f32(b) * gamma[j] * t->value[0][(uint64_t)r * h->width + x->first + j];
            }
    }
    const uint64_t *word = (const uint64_t *)fetched(t, sums_at(t, v, in->signal_pub, experts), mk_sums_words(experts) * 8ull);
    for (uint32_t r = 0; r < t->step.nrows && !t->rc; r++) {
        for (uint32_t e = 0; e < experts; e++) {
            const uint64_t sum = word[mk_sum_at(experts, 0, r, e)];
            expected[e] = (float)want[r * experts + e];
            got[e] = mk_sum_value(sum, v->signals);
            if (mk_sums_count(sum) != (v->signals & 255) && !t->rc)
                t->rc = mk_fail(t->err, MK_E_DEVICE, "self-test: %s: row %u, expert %u: expected %u addends, found %u", t->name, r, e, v->signals & 255, mk_sums_count(sum));
        }
        if (!t->rc) compare(t, "logits", r, 0, got, expected, experts, 0, mk_tolerance(in));
    }
}

static void compare_routes(test *t)
{
    const mk_route *x = &t->insn[0].route;
    for (uint32_t i = 0; i < t->n && !t->rc; i++) {
        const mk_routes *got = (const mk_routes *)local_after(t, i);
        if (!got) continue;
        for (uint32_t r = 0; r < t->step.nrows; r++) {
            uint32_t seen = 0;
            float weight[MK_MAX_TOPK];
            for (uint32_t j = 0; j < got->n_union && j < MK_MAX_UNION; j++) {
                uint32_t k = got->rank[r][j];
                if (k == 255) continue;
                if ((k >= x->topk || got->expert[j] != t->route.id[r][k] || (j && got->expert[j] <= got->expert[j - 1])) && !t->rc)
                    t->rc = mk_fail(t->err, MK_E_DEVICE, "self-test: %s: worker %u, row %u, choice %u: expected expert %u, found %u", t->name, t->worker[i], r, k,
                                    k < x->topk ? t->route.id[r][k] : MK_NONE, got->expert[j]);
                seen++;
            }
            if (seen != x->topk && !t->rc)
                t->rc = mk_fail(t->err, MK_E_DEVICE, "self-test: %s: worker %u, row %u: expected %u experts, found %u", t->name, t->worker[i], r, x->topk, seen);
            memcpy(weight, got->weight[r], sizeof weight);
            compare(t, "weights", r, 0, weight, t->route.weight[r], x->topk, 0, mk_tolerance(t->insn));
        }
    }
}

/* Logits and the statistics that LM_HEAD would have made of them; every second row is sampled at temperature 1, the others are greedy. */
static float *make_logits(test *t)
{
    const mk_insn *in = t->insn;
    const mk_vec *sv = &t->p->vec[in->wait[0].vec], *lv = &t->p->vec[in->wait[1].vec];
    const uint32_t vocab = in->sample.vocab, slices = in->sample.slices;
    float *l = (float *)on_host(t, (uint64_t)MK_MAX_ROWS * vocab * 4), *stats = (float *)on_host(t, (uint64_t)MK_MAX_ROWS * sv->width * 4);
    if (!l || !stats) return NULL;
    for (uint32_t r = 0; r < t->step.nrows; r++) {
        float *x = l + (uint64_t)r * vocab;
        for (uint32_t i = 0; i < vocab; i++) x[i] = spread(t, 6.0f);
        for (uint32_t s = 0; s < slices; s++) {
            uint32_t a = mk_start(s, vocab, slices), b = mk_start(s + 1, vocab, slices), id = a;
            double sum = 0;
            for (uint32_t i = a; i < b; i++)
                if (x[i] > x[id]) id = i;
            for (uint32_t i = a; i < b; i++) sum += exp((double)x[i] - x[id]);
            float *q = stats + (uint64_t)r * sv->width + 4 * s;
            q[0] = x[id];
            memcpy(&q[1], &id, 4);
            q[2] = (float)sum;
        }
        mk_slot *slot = &t->mem.slot[t->step.row[r].slot];
        memset(&slot->sampling, 0, sizeof slot->sampling);
        slot->sampling.temperature = t->step.row[r].slot & 1 ? 1.0f : 0.0f;
        slot->sampling.top_p = 1;
        slot->sampling.seed = t->seed;
    }
    publish(t, sv, in->wait[0].pub, stats, NULL);
    put(t, t->mem.bulk + lv->offset, l, (uint64_t)MK_MAX_ROWS * vocab * 4);
    return l;
}

static void compare_samples(test *t, const float *l)
{
    const mk_sampled *got = (const mk_sampled *)local_after(t, 0);
    const uint32_t vocab = t->insn[0].sample.vocab;
    for (uint32_t r = 0; l && got && r < t->step.nrows && !t->rc; r++) {
        const float *x = l + (uint64_t)r * vocab;
        uint32_t best = 0, token = got->token[r];
        double sum = 0;
        for (uint32_t i = 1; i < vocab; i++)
            if (x[i] > x[best]) best = i;
        for (uint32_t i = 0; i < vocab; i++) sum += exp((double)x[i] - x[best]);
        int greedy = !(t->step.row[r].slot & 1);
        if (token >= vocab || (greedy && token != best)) {
            t->rc = mk_fail(t->err, MK_E_DEVICE, "self-test: %s: row %u: expected token %u, found %u", t->name, r, best, token);
            return;
        }
        float want = (float)(x[token] - x[best] - log(sum));
        compare(t, "logprob", r, token, &got->logprob[r], &want, 1, 0, 1e-5);
    }
}

#endif
