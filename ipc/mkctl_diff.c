/* mkctl diff: the GPU's own program, tape and steps on the resident kernel and on the twin.
 *
 * Every step is run twice on the GPU, from the twin's memory as it was before the step:
 *  1. in waves. A wave is all instructions whose inputs come from earlier waves. Before each, the GPU gets the twin's memory (packets, counters, LOCAL and
 *     BULK vectors, recurrent state, KV cache); both run the wave; everything that its instructions write is compared with the opcode's own tolerance
 *     (instructions/tolerance.h), and that they wrote nothing else. Errors cannot pile up: the first divergence names the instruction that makes it.
 *  2. freely: all of the step's instructions as the resident kernel runs them, on the GPU's own intermediate values. What is left of it (the last publications,
 *     states, cache rows, tokens) is compared with --tolerance. When that fails, the step is cut after a wave (bisection) and the first publication that is off
 *     is named, unless it comes of a route that went the other way at a near tie, which is reported and ends that step's comparison.
 * Then the twin's memory goes on to the next step: a divergence is reported once, not in everything after it. SCHEDULE is one source for both machines and runs on
 * the twin. */
#include "ipc/mkctl_diff.h"

#include <stdio.h>
#include <stdlib.h>

#ifdef MK_CUDA
#include "host/compare.h"
#include "host/synth.h"
#include "host/version.h"
#include "megakernel/gpu.h"

#include <math.h>
#include <string.h>

typedef struct diff {
    const mkctl_diff_config *cfg;
    mk_session *s;
    mk_gpu *gpu;
    const mk_program *p;
    mk_memory *twin;       /* the session's */
    mk_memory before, got; /* as before the wave; what the GPU made */
    mk_memory start;       /* as before the step */
    uint32_t *level, levels; /* [n_insn] wave of every instruction; MK_NONE: SCHEDULE */
    uint32_t *route;         /* [n_insn] index of the ROUTE that an EXPERT instruction needs in its launch, ~0: none */
    mk_insn *insn;           /* a part of the program: instructions and queues */
    uint32_t *queue, *origin;
    mk_comparison wave, free;
    uint64_t steps, rows, tokens, same_tokens, flips; /* flips: free runs in which a near tie of experts went the other way */
    uint32_t spoil;          /* index of the instruction, ~0: none */
} diff;

/* ---- waves ---------------------------------------------------------------------------------------------------------- */

/* Instruction that publishes slice `slice` of (vec, pub); slices of DYNAMIC vectors and increments of BULK ones: any of the publishers may be the last. */
static uint32_t raise(uint32_t have, uint32_t level)
{
    return level + 1 > have ? level + 1 : have;
}

/* Level of an instruction: at least that of the one before it in its queue, and one more than those of all that publish what it waits for. */
static int make_levels(diff *d, mk_err *err)
{
    const mk_program *p = d->p;
    uint32_t n = p->info.n_insn, W = p->info.workers, pubs = 0, *first = calloc(p->info.n_vec + 1, 4);
    d->level = calloc(n + 1, 4);
    d->route = malloc((n + 1) * 4ull);
    for (uint32_t v = 0; first && v < p->info.n_vec; v++) first[v] = pubs, pubs += p->vec[v].pubs;
    /* greatest level of the publishers of (vec, pub); an order in which they all are known first: repeat until nothing rises */
    uint32_t *of = calloc(pubs + 1, 4);
    if (!first || !d->level || !d->route || !of) return free(first), free(of), mk_fail(err, MK_E_CAPACITY, "out of memory");
    for (int again = 1; again;) {
        again = 0;
        for (uint32_t w = 0; w < W; w++) {
            uint32_t last = 0, route = ~0u;
            for (uint32_t x = p->queue[w]; x < p->queue[w + 1]; x++) {
                const mk_insn *in = &p->insn[x];
                uint32_t l = last;
                for (int k = 0; k < in->nwait; k++) {
                    const mk_vec *v = &p->vec[in->wait[k].vec];
                    if (v->scope == MK_LOCAL) { /* of this queue */
                        for (uint32_t y = x; y-- > p->queue[w];)
                            if (p->insn[y].signal_vec == in->wait[k].vec) {
                                l = raise(l, d->level[y]);
                                break;
                            }
                    } else if (of[first[in->wait[k].vec] + in->wait[k].pub]) {
                        l = raise(l, of[first[in->wait[k].vec] + in->wait[k].pub] - 1);
                    }
                }
                if (in->opcode == MK_OP_ROUTE) route = x;
                d->route[x] = in->opcode == MK_OP_EXPERT_UP || in->opcode == MK_OP_EXPERT_DOWN ? route : ~0u;
                if (l != d->level[x]) d->level[x] = l, again = 1;
                last = l;
                if (in->opcode == MK_OP_SCHEDULE) continue;
                if (in->signal_vec != MK_NONE && p->vec[in->signal_vec].scope != MK_LOCAL) {
                    uint32_t *o = &of[first[in->signal_vec] + in->signal_pub];
                    if (l + 1 > *o) *o = l + 1, again = 1;
                }
                if (in->opcode == MK_OP_LM_HEAD) {
                    uint32_t *o = &of[first[in->lm_head.logits_vec] + in->lm_head.logits_pub];
                    if (l + 1 > *o) *o = l + 1, again = 1;
                }
                if (l + 1 > d->levels) d->levels = l + 1;
            }
        }
    }
    free(first);
    free(of);
    return MK_OK;
}

typedef int (*chooser)(const diff *d, uint32_t insn, uint32_t arg);

static int in_wave(const diff *d, uint32_t x, uint32_t wave)
{
    return d->level[x] == wave;
}
static int up_to_wave(const diff *d, uint32_t x, uint32_t wave)
{
    return d->level[x] <= wave;
}

/* The program with the chosen instructions alone, never SCHEDULE. routes: with the ROUTE that the chosen experts need before them. The regions it touches go to
 * *regions. */
static mk_program part(diff *d, chooser f, uint32_t arg, int routes, uint32_t *regions)
{
    mk_program q = *d->p;
    uint32_t n = 0;
    *regions = MK_REGION_EXCHANGE | MK_REGION_COUNTER | MK_REGION_LOCAL;
    for (uint32_t w = 0; w < q.info.workers; w++) {
        d->queue[w] = n;
        uint32_t have = ~0u;
        for (uint32_t x = d->p->queue[w]; x < d->p->queue[w + 1]; x++) {
            const mk_insn *in = &d->p->insn[x];
            if (in->opcode == MK_OP_SCHEDULE || !f(d, x, arg)) continue;
            if (in->opcode == MK_OP_ROUTE) have = x;
            if (routes && d->route[x] != ~0u && d->route[x] != have) {
                have = d->route[x];
                d->origin[n] = have;
                d->insn[n++] = d->p->insn[have];
            }
            d->origin[n] = x;
            d->insn[n++] = *in;
            switch (in->opcode) {
            case MK_OP_DELTA_STEP:
                *regions |= MK_REGION_STATE;
                break;
            case MK_OP_KV_APPEND:
            case MK_OP_GQA_APPEND:
                *regions |= MK_REGION_KV;
                break;
            case MK_OP_MLA_PARTIAL:
            case MK_OP_GQA_PARTIAL:
                *regions |= MK_REGION_KV | MK_REGION_BULK;
                break;
            case MK_OP_COMBINE:
            case MK_OP_LM_HEAD:
            case MK_OP_SAMPLE:
            case MK_OP_ROUTER:
            case MK_OP_ROUTE:
            case MK_OP_EXPERT_UP: /* with a ROUTE before it */
            case MK_OP_EXPERT_DOWN:
                *regions |= MK_REGION_BULK;
                break;
            default:
                break;
            }
        }
    }
    d->queue[q.info.workers] = n;
    q.info.n_insn = n;
    q.insn = d->insn;
    q.queue = d->queue;
    return q;
}

static void copy_regions(const diff *d, mk_memory *to, const mk_memory *from, uint32_t regions)
{
    for (uint32_t i = 0; i < MK_REGIONS; i++)
        if (regions >> i & 1) memcpy(mk_region_at(to, i), mk_region_at(from, i), mk_region_bytes(d->p, i));
}

/* The kernel on a part of the program, from `from`; the result is in d->got. */
static int on_gpu(diff *d, const mk_program *q, const mk_memory *from, const mk_step *step, uint32_t regions, mk_err *err)
{
    const mk_memory *src = from;
    if (regions & MK_REGION_STATE) { /* d->got is free */
        copy_regions(d, &d->got, from, regions);
        mk_state_turn(q, &d->got, 1);
        src = &d->got;
    }
    int rc = mk_gpu_load(d->gpu, src, regions | MK_REGION_PAGE, err);
    if (!rc) rc = mk_gpu_once(d->gpu, q->insn, q->queue, step, 0, 4000, err);
    if (!rc) rc = mk_gpu_store(d->gpu, &d->got, regions, err);
    if (regions & MK_REGION_STATE) mk_state_turn(q, &d->got, 0);
    return rc;
}

static int run_wave(diff *d, const mk_step *step, uint32_t wave, mk_err *err)
{
    uint32_t regions;
    mk_program q = part(d, in_wave, wave, 1, &regions);
    if (!q.info.n_insn) return MK_OK;
    copy_regions(d, &d->before, d->twin, regions);
    int rc = on_gpu(d, &q, d->twin, step, regions, err), found = d->wave.first.found;
    if (rc) return rc;
    mk_program t = part(d, in_wave, wave, 0, &regions);
    for (uint32_t i = 0; i < t.info.n_insn; i++)
        if (d->origin[i] == d->spoil && t.insn[i].opcode == MK_OP_GEMV) t.insn[i].gemv.scale *= 1.05f;
    if ((rc = mk_play_twin(&t, d->twin, step, 0, err))) return rc;
    q = part(d, in_wave, wave, 1, &regions);
    rc = mk_compare(&q, NULL, 0, step, 0, &d->before, d->twin, &d->got, regions, &d->wave, err);
    if (!found && d->wave.first.found) printf("step %u, wave %u of %u: first divergence: %s\n", step->seq, wave, d->levels, d->wave.first.text);
    return rc;
}

/* ---- the free run --------------------------------------------------------------------------------------------------- */

/* Compares what a part of the program left in d->got with `want`: of LOCAL and BULK vectors the last publication. */
static int compare_last(diff *d, const mk_program *q, const mk_step *step, const mk_memory *want, mk_comparison *c, mk_err *err)
{
    uint32_t n = 0, *list = malloc((q->info.n_insn + 1) * 4ull);
    if (!list) return mk_fail(err, MK_E_CAPACITY, "out of memory");
    for (uint32_t w = 0; w < q->info.workers; w++)
        for (uint32_t x = q->queue[w]; x < q->queue[w + 1]; x++) {
            const mk_insn *in = &q->insn[x];
            int last = in->opcode != MK_OP_SAMPLE && in->opcode != MK_OP_ROUTE; /* ties and near ties: tokens below; a route shows in what follows */
            uint32_t scope = in->signal_vec == MK_NONE ? MK_PACKET : q->vec[in->signal_vec].scope;
            if (scope == MK_LOCAL)
                for (uint32_t y = x + 1; y < q->queue[w + 1]; y++)
                    if (q->insn[y].signal_vec == in->signal_vec) last = 0;
            if (in->opcode == MK_OP_MLA_PARTIAL || in->opcode == MK_OP_GQA_PARTIAL || in->opcode == MK_OP_ROUTER) /* of two slices of one h both are */
                for (uint32_t y = x + 1; y < q->queue[w + 1]; y++)
                    if (q->insn[y].opcode == in->opcode && q->insn[y].signal_pub != in->signal_pub) last = 0;
            if (last) list[n++] = x;
        }
    c->last = 1;
    c->floor = d->cfg->tolerance;
    int rc = mk_compare(q, list, n, step, 0, NULL, want, &d->got, 0, c, err);
    free(list);
    return rc;
}

/* What the experts are chosen by, as the twin sees it. */
static void choice(const diff *d, const mk_memory *m, const mk_step *step, uint32_t worker, const mk_insn *in, uint32_t row, float *v)
{
    mk_ctx c = {.prog = d->p, .in = in, .mem = (mk_memory *)m, .step = step, .worker = worker};
    static float h[1 << 16];
    mk_route_logits(&c, row, v, h);
    for (uint32_t e = 0; e < in->route.experts; e++) {
        if (in->route.score == MK_SCORE_SIGMOID) v[e] = 1 / (1 + expf(-v[e]));
        if (in->route.has_bias) v[e] += m->param[in->route.param_off + e];
    }
}

static int chosen(const mk_routes *t, uint32_t row, uint32_t expert)
{
    for (uint32_t j = 0; j < t->n_union; j++)
        if (t->expert[j] == expert) return t->rank[row][j] != 255;
    return 0;
}

/* 1: the last route of a part's worker 0 chose other experts for the row than the twin, and the twin finds those all but equal: what follows cannot be compared. */
static int flipped(diff *d, const mk_program *q, const mk_step *step, const mk_memory *want, uint32_t row)
{
    const mk_insn *in = NULL;
    for (uint32_t x = q->queue[0]; x < q->queue[1]; x++)
        if (q->insn[x].opcode == MK_OP_ROUTE) in = &q->insn[x];
    if (!in) return 0;
    const mk_routes *a = (const mk_routes *)(want->local + d->p->vec[in->signal_vec].offset), *b = (const mk_routes *)(d->got.local + d->p->vec[in->signal_vec].offset);
    float v[MK_MAX_EXPERT], lost = -INFINITY, won = INFINITY;
    double sum = 0, squares = 0;
    uint32_t n = in->route.experts, other = 0;
    choice(d, want, step, 0, in, row, v);
    for (uint32_t e = 0; e < n; e++) {
        int x = chosen(a, row, e), y = chosen(b, row, e);
        sum += (double)v[e], squares += (double)v[e] * (double)v[e];
        if (x && !y) lost = fmaxf(lost, v[e]), other++;
        if (y && !x) won = fminf(won, v[e]);
    }
    double dev = sqrt(fmax(0, squares / n - sum / n * (sum / n))), gap = (double)lost - (double)won;
    if (!other || gap > d->cfg->tolerance * dev) return 0;
    printf("step %u, free run, row %u: %u of %u experts of layer %u differ, a near tie (the twin's scores are %.2g apart, their deviation is %.2g): not compared further\n",
           step->seq, row, other, in->route.topk, in->layer, gap, dev);
    return 1;
}

/* The earliest wave after which the free run is off: bisection. *tie: that is a route that went the other way at a near tie; *good: the
 * comparison of what came before. */
static int locate(diff *d, const mk_step *step, mk_divergence *first, int *tie, mk_comparison *good, mk_err *err)
{
    uint32_t lo = 0, hi = d->levels - 1, regions;
    mk_memory want = *d->twin;
    int rc = MK_OK, ok = 1;
    uint8_t **const at[MK_REGIONS] = {&want.exchange, &want.bulk, (uint8_t **)&want.counter, &want.local, &want.state, &want.kv};
    for (uint32_t i = 0; i < MK_REGIONS; i++) ok = (*at[i] = malloc(mk_region_bytes(d->p, i) + 64)) && ok;
    if (!ok) rc = mk_fail(err, MK_E_CAPACITY, "out of memory");
    *tie = 0;
    while (!rc) { /* the last round is wave hi itself */
        uint32_t mid = (lo + hi) / 2;
        mk_comparison c = {0};
        mk_program q = part(d, up_to_wave, mid, 0, &regions);
        copy_regions(d, &want, &d->start, MK_REGIONS_ALL);
        if ((rc = on_gpu(d, &q, &d->start, step, MK_REGIONS_ALL, err)) || (rc = mk_play_twin(&q, &want, step, 0, err)) ||
            (rc = compare_last(d, &q, step, &want, &c, err)))
            break;
        if (c.first.found) *first = c.first;
        if (lo == hi) {
            *tie = flipped(d, &q, step, &want, first->row);
            break;
        }
        if (c.first.found)
            hi = mid;
        else
            lo = mid + 1, *good = c;
    }
    for (uint32_t i = 0; i < MK_REGIONS; i++) free(*at[i]);
    if (!rc && !*tie) printf("step %u, free run, wave %u of %u: first divergence: %s\n", step->seq, hi, d->levels, first->text);
    return rc;
}

/* The one of its opcode; of SAMPLEs the one that chooses. */
static const mk_insn *find(const mk_program *p, uint32_t opcode, uint32_t *worker)
{
    for (uint32_t w = 0; w < p->info.workers; w++)
        for (uint32_t x = p->queue[w]; x < p->queue[w + 1]; x++)
            if (p->insn[x].opcode == opcode && !(opcode == MK_OP_SAMPLE && p->insn[x].sample.helper)) return *worker = w, &p->insn[x];
    return NULL;
}

/* Tokens of the free run. Two that the twin finds all but equally likely may change places when the choice is greedy. */
static void compare_tokens(diff *d, const mk_step *step, const mk_sampled *a, const mk_sampled *b, mk_comparison *c)
{
    uint32_t w;
    const mk_insn *in = find(d->p, MK_OP_SAMPLE, &w);
    for (uint32_t r = 0; r < step->nrows; r++) {
        if (!(step->row[r].flags & MK_ROW_SAMPLE)) continue;
        const float *l = (const float *)(d->twin->bulk + d->p->vec[in->wait[1].vec].offset) + (size_t)r * d->p->info.vocab;
        double squares = 0;
        for (uint32_t i = 0; i < d->p->info.vocab; i++) squares += (double)l[i] * (double)l[i];
        double rms = sqrt(squares / d->p->info.vocab), gap = b->token[r] < d->p->info.vocab ? fabs((double)l[a->token[r]] - (double)l[b->token[r]]) : INFINITY;
        d->tokens++;
        d->same_tokens += a->token[r] == b->token[r];
        if (gap <= d->cfg->tolerance * rms) continue;
        c->failed++;
        printf("step %u, free run, row %u: token %u, the twin chose %u; their logits differ by %.3g (RMS %.3g)\n", step->seq, r, b->token[r], a->token[r], gap, rms);
    }
}

static int run_free(diff *d, const mk_step *step, mk_err *err)
{
    uint32_t regions, w = 0;
    mk_comparison c = {0}, good = {0};
    mk_sampled a, b;
    mk_program q = part(d, up_to_wave, ~0u, 0, &regions);
    int rc = on_gpu(d, &q, &d->start, step, MK_REGIONS_ALL, err), tie = 0;
    const mk_insn *sample = find(d->p, MK_OP_SAMPLE, &w);
    if (!rc) rc = compare_last(d, &q, step, d->twin, &c, err);
    if (rc) return rc;
    if (sample) { /* locating uses the memory */
        uint64_t at = w * d->p->info.local_bytes + d->p->vec[sample->signal_vec].offset;
        memcpy(&a, d->twin->local + at, sizeof a);
        memcpy(&b, d->got.local + at, sizeof b);
    }
    if (c.first.found && !d->free.first.found && (rc = locate(d, step, &c.first, &tie, &good, err))) return rc;
    if (tie) {
        d->flips++;
        c = good; /* up to there */
    } else if (sample) {
        compare_tokens(d, step, &a, &b, &c);
    }
    d->free.failed += c.failed;
    if (!d->free.first.found) d->free.first = c.first;
    for (unsigned op = 0; op < MK_OP_COUNT; op++)
        if (!(c.worst[op] <= d->free.worst[op])) d->free.worst[op] = c.worst[op];
    return MK_OK;
}

/* ---- steps ---------------------------------------------------------------------------------------------------------- */

static int one_step(diff *d, mk_sched *s, mk_err *err)
{
    mk_step step = s->next;
    uint32_t w = 0;
    int rc = MK_OK;
    copy_regions(d, &d->start, d->twin, MK_REGIONS_ALL);
    for (uint32_t l = 0; l < d->levels && !rc; l++) rc = run_wave(d, &step, l, err);
    if (!rc) rc = run_free(d, &step, err);
    const mk_insn *in = find(d->p, MK_OP_SCHEDULE, &w);
    if (rc || !in) return rc;
    mk_ctx c = {.prog = d->p, .in = in, .mem = d->twin, .step = &step, .worker = w, .machine = s};
    mk_schedule_twin(&c);
    d->steps++;
    d->rows += step.nrows;
    return MK_OK;
}

static int all_steps(diff *d, mk_err *err)
{
    mk_sched *s = mk_twin_sched(d->s->twin);
    mk_session_stream(d->s, 0, NULL, 0);
    mk_session_append(d->s, 0, d->cfg->ids, d->cfg->n, MK_APPEND_LOGPROBS);
    mk_session_generate(d->s, 0, d->cfg->max_new ? d->cfg->max_new : 1);
    for (;;) {
        mk_sched_compose(s, 0);
        if (!s->next.nrows) return MK_OK;
        int rc = one_step(d, s, err);
        if (rc) return rc;
        *s->event_read = s->event_next;
    }
}

/* ---- report --------------------------------------------------------------------------------------------------------- */

static int report(const diff *d, const mk_gpu_info *info, const char *dir, mk_err *err)
{
    printf("%s against twin, %u workers, %llu steps, %llu rows, %u waves a step (%s)\n", info->name, d->p->info.workers, (unsigned long long)d->steps,
           (unsigned long long)d->rows, d->levels, mk_build());
    for (unsigned op = 0; op < MK_OP_COUNT; op++)
        if (d->wave.values[op])
            printf("    %-12s %12llu values  worst %.2e of %.0e    free run: worst %.2e\n", mk_opcode_name(op), (unsigned long long)d->wave.values[op],
                   d->wave.worst[op], d->wave.tolerance[op], d->free.worst[op]);
    printf("tokens of the free runs: %llu of %llu the twin's; %llu of %llu steps compared up to a near tie of experts only\n", (unsigned long long)d->same_tokens,
           (unsigned long long)d->tokens, (unsigned long long)d->flips, (unsigned long long)d->steps);
    if (d->cfg->json) {
        FILE *f = fopen(d->cfg->json, "w");
        if (!f) return mk_fail(err, MK_E_SYSTEM, "cannot write %.300s", d->cfg->json);
        fprintf(f, "{\"device\": \"%s\", \"build\": \"%s\", \"checkpoint\": \"%s\", \"workers\": %u, \"steps\": %llu, \"rows\": %llu, \"tokens\": %llu, \"same_tokens\": %llu, "
                "\"near_ties\": %llu, \"free_tolerance\": %.3e, \"opcodes\": [", info->name, mk_build(), dir, d->p->info.workers, (unsigned long long)d->steps,
                (unsigned long long)d->rows, (unsigned long long)d->tokens, (unsigned long long)d->same_tokens, (unsigned long long)d->flips,
                d->cfg->tolerance);
        const char *comma = "";
        for (unsigned op = 0; op < MK_OP_COUNT; op++)
            if (d->wave.values[op]) {
                fprintf(f, "%s\n  {\"opcode\": \"%s\", \"values\": %llu, \"max_error\": %.3e, \"tolerance\": %.1e, \"free_run_max_error\": %.3e}", comma,
                        mk_opcode_name(op), (unsigned long long)d->wave.values[op], d->wave.worst[op], d->wave.tolerance[op], d->free.worst[op]);
                comma = ",";
            }
        fprintf(f, "\n], \"failed_values\": %llu, \"free_failed_values\": %llu, \"first\": \"%s\"}\n", (unsigned long long)d->wave.failed,
                (unsigned long long)d->free.failed, d->wave.first.found ? d->wave.first.text : d->free.first.found ? d->free.first.text : "");
        if (fclose(f)) return mk_fail(err, MK_E_SYSTEM, "cannot write %.300s", d->cfg->json);
    }
    if (d->wave.failed) return mk_fail(err, MK_E_DEVICE, "the machines diverge: %llu values are off", (unsigned long long)d->wave.failed);
    if (d->free.failed)
        return mk_fail(err, MK_E_DEVICE, "every instruction agrees by itself, but the step as a whole diverges: %llu values are off", (unsigned long long)d->free.failed);
    printf("no value is off by more than its tolerance\n");
    return MK_OK;
}

static int allocate(diff *d, mk_err *err)
{
    const mk_program *p = d->p;
    mk_memory *m[3] = {&d->before, &d->got, &d->start};
    int ok = (d->insn = malloc((2ull * p->info.n_insn + 1) * sizeof *d->insn)) && (d->origin = malloc((2ull * p->info.n_insn + 1) * 4)) &&
             (d->queue = malloc((p->info.workers + 1) * 4ull));
    for (int k = 0; k < 3; k++) {
        *m[k] = *d->twin;
        ok = ok && (m[k]->exchange = malloc(mk_region_bytes(p, 0) + 64)) && (m[k]->bulk = malloc(mk_region_bytes(p, 1) + 64)) &&
             (m[k]->counter = malloc(mk_region_bytes(p, 2) + 64)) && (m[k]->local = malloc(mk_region_bytes(p, 3) + 64)) &&
             (m[k]->state = malloc(mk_region_bytes(p, 4) + 64)) && (m[k]->kv = malloc(mk_region_bytes(p, 5) + 64));
    }
    return ok ? MK_OK : mk_fail(err, MK_E_CAPACITY, "out of memory");
}

static int find_spoiled(diff *d, mk_err *err)
{
    uint32_t w, x;
    d->spoil = ~0u;
    if (!d->cfg->spoil) return MK_OK;
    if (sscanf(d->cfg->spoil, "%u:%u", &w, &x) != 2 || w >= d->p->info.workers || x >= d->p->queue[w + 1] - d->p->queue[w])
        return mk_fail(err, MK_E_USAGE, "--spoil %.40s: expected worker:index of an instruction of the program", d->cfg->spoil);
    d->spoil = d->p->queue[w] + x;
    if (d->p->insn[d->spoil].opcode == MK_OP_GEMV) return MK_OK;
    return mk_fail(err, MK_E_USAGE, "--spoil %.40s: that is a %s, only a GEMV can be spoiled", d->cfg->spoil, mk_opcode_name(d->p->insn[d->spoil].opcode));
}

/* The same weights on both: a checkpoint's, or synthetic ones made on the GPU. */
static int weights(diff *d, const mk_session_config *base, mk_err *err)
{
    if (!base->preset) return mk_gpu_upload(d->gpu, d->twin, err);
    int rc = mk_synthesize(d->s->plan, d->gpu, err);
    return rc ? rc : mk_gpu_download(d->gpu, d->twin, err);
}

int mkctl_diff_gpu(const mk_session_config *base, const mkctl_diff_config *cfg, mk_err *err)
{
    diff *d = calloc(1, sizeof *d);
    mk_session_config sc = *base;
    mk_gpu_info info;
    int rc = d ? mk_gpu_probe(0, &info, err) : mk_fail(err, MK_E_CAPACITY, "out of memory");
    if (rc) return free(d), rc;
    if (!sc.workers) sc.workers = info.sms;
    sc.smem_limit = info.smem;
    d->cfg = cfg;
    if ((rc = mk_session_open(&sc, &d->s, err))) return free(d), rc;
    d->p = d->s->plan->prog;
    d->twin = mk_twin_memory(d->s->twin);
    mk_gpu_config gc = {.slots = d->twin->n_slots, .context = d->twin->max_context, .timeout_ms = 1000};
    for (uint32_t i = 0; i < cfg->n && !rc; i++)
        if (cfg->ids[i] >= d->s->model->vocab)
            rc = mk_fail(err, MK_E_USAGE, "token %u: id %u is outside the vocabulary of %u", i, cfg->ids[i], d->s->model->vocab);
    if (!rc && !(rc = find_spoiled(d, err)) && !(rc = make_levels(d, err)) && !(rc = allocate(d, err)) && !(rc = mk_gpu_new(d->p, &gc, &d->gpu, err)) &&
        !(rc = weights(d, base, err)) && !(rc = all_steps(d, err)))
        rc = report(d, &info, base->preset ? base->preset->name : base->dir, err);
    mk_gpu_destroy(&d->gpu);
    mk_memory *m[3] = {&d->before, &d->got, &d->start};
    for (int k = 0; k < 3; k++)
        for (uint32_t i = 0; i < MK_REGIONS; i++) free(mk_region_at(m[k], i));
    free(d->insn), free(d->origin), free(d->queue), free(d->level), free(d->route);
    mk_session_close(&d->s);
    free(d);
    return rc;
}
#else
int mkctl_diff_gpu(const mk_session_config *base, const mkctl_diff_config *cfg, mk_err *err)
{
    (void)base, (void)cfg;
    return mk_fail(err, MK_E_DEVICE, "this build has no GPU kernel; --strict compares the twin with itself");
}
#endif

int mkctl_diff(int argc, char **argv)
{
    mk_session_config c = {0};
    mkctl_diff_config d = {.tolerance = 0.2, .max_new = UINT32_MAX};
    int strict = 0;
    const char *text = NULL, *preset = NULL;
    mkctl_choice weights = MKCTL_WEIGHTS, head = MKCTL_LM_HEAD, cache = MKCTL_KV_CACHE;
    const mkctl_flag flags[] = {
        {"--ids", MKCTL_TEXT, &text, "tokens to run, 1,2,3"},
        {"--max-new", MKCTL_U32, &d.max_new, "tokens to generate after them (GPU; 4)"},
        {"--preset", MKCTL_TEXT, &preset, "instead of a checkpoint: a published configuration with synthetic weights"},
        {"--layers", MKCTL_U32, &c.layers, "of the preset, the first so many; 0: all"},
        {"--workers", MKCTL_U32, &c.workers, "workers; 0: the GPU's SMs, with --strict 8"},
        {"--weights", MKCTL_CHOICE, &weights, "of a checkpoint: auto, fp8 or bf16"},
        {"--lm-head", MKCTL_CHOICE, &head, "auto, fp8 or bf16"},
        {"--kv-cache", MKCTL_CHOICE, &cache, "of latent attention: bf16 or fp8"},
        {"--tolerance", MKCTL_REAL, &d.tolerance, "of a whole step on its own intermediate values, in RMS of a vector"},
        {"--strict", MKCTL_SET, &strict, "no GPU: the twin in default precision against the twin in act=f32"},
        {"--json", MKCTL_TEXT, &d.json, "write the report there as well (GPU)"},
        {"--spoil", MKCTL_TEXT, &d.spoil, "negative control: worker:index of a GEMV that the twin runs 5 % too strong (GPU)"},
    };
    size_t given = 0;
    int rc = mkctl_flags(argc, argv, flags, sizeof flags / sizeof flags[0], &c.dir, 1, &given);
    if (rc) return rc < 0 ? MK_OK : rc;
    if (preset && !(c.preset = mk_preset_find(preset))) return mkctl_usage("diff: --preset %.60s: known are %s", preset, mk_preset_names());
    if (!given == !c.preset) return mkctl_usage("diff: name a checkpoint directory or a --preset, not both");
    if (c.preset && strict) return mkctl_usage("diff: --strict needs a checkpoint: synthetic weights are made on a GPU");
    if (c.preset && weights.value != MK_WEIGHTS_AUTO) return mkctl_usage("diff: --weights: a preset has its own");
    if (!c.preset && c.layers) return mkctl_usage("diff: --layers: a checkpoint is run whole; it goes with --preset");
    if (strict && (d.json || d.spoil || d.max_new != UINT32_MAX)) return mkctl_usage("diff: %s does not go with --strict", d.json ? "--json" : d.spoil ? "--spoil" : "--max-new");
    if (d.max_new == UINT32_MAX) d.max_new = strict ? 0 : 4;
    if (!(d.tolerance > 0)) return mkctl_usage("diff: --tolerance: expected more than 0, found %g", d.tolerance);
    c.weights = (enum mk_weights_mode)weights.value;
    c.lm_head = (enum mk_lm_head_mode)head.value;
    c.kv_cache = (enum mk_cache)cache.value;
    if (!text) return mkctl_usage("diff: --ids: name the tokens to run");
    uint32_t *ids = NULL, n = 0;
    mk_err err = {0};
    if (mkctl_parse_ids(text, &ids, &n, &err)) return mkctl_usage("diff: --ids: %s", err.msg);
    if (!n) return free(ids), mkctl_usage("diff: --ids: expected a token at least");
    if (d.max_new > 1u << 24) return free(ids), mkctl_usage("diff: --max-new: expected at most %u, found %u", 1u << 24, d.max_new);
    d.ids = ids;
    d.n = n;
    c.context = (n + d.max_new + 2 + MK_PAGE) / MK_PAGE * MK_PAGE;
    rc = strict ? mkctl_diff_strict(&c, ids, n, d.tolerance, &err) : mkctl_diff_gpu(&c, &d, &err);
    fflush(stdout);
    if (rc) mkctl_failed("diff", &err);
    free(ids);
    return rc;
}
