#include "ipc/trace_report.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#define NONE 0xffffu

/* Beside its worker's queue. */
static int is_aside(const mk_wire_trace_record *x)
{
    return (x->rows & MK_WIRE_TRACE_ASIDE) != 0;
}
void mk_trace_add(mk_trace_share *s, const mk_wire_trace_record *r)
{
    uint64_t input = r->input < r->end ? r->input : r->end, left = r->end - input;
    uint64_t publish = r->publish && r->publish < r->end && r->publish >= input ? r->end - r->publish : 0;
    uint64_t weights = r->weights < left - publish ? r->weights : left - publish;
    s->count++;
    s->input += input;
    s->weights += weights;
    s->publish += publish;
    s->compute += left - publish - weights;
    s->bytes += r->bytes;
    s->aside += is_aside(r);
}

static const mk_wire_trace_record *record(const mk_client_trace *t, uint32_t k, uint32_t i)
{
    return &t->record[(size_t)k * t->about.instructions + i];
}

/* SCHEDULE composes the next step in its last part, and may idle there. */
static uint32_t end_of(const mk_trace_report *r, uint32_t i, const mk_wire_trace_record *x)
{
    return i == r->schedule && x->publish ? x->publish : x->end;
}

/* ---- classes -------------------------------------------------------------------------------------------------------- */

static const char *vector_name(const mk_client_trace *t, uint32_t v)
{
    return v < t->about.vectors ? t->vector[v] : "";
}

static int classify(mk_trace_report *r, mk_err *err)
{
    const mk_client_trace *t = r->t;
    const uint32_t n = t->about.instructions, vectors = t->about.vectors;
    uint32_t *of = calloc((size_t)t->n_opcode * (vectors + 1) + 1, sizeof *of), last = NONE;
    if (!of) return mk_fail(err, MK_E_SYSTEM, "out of memory");
    r->schedule = n;
    for (uint32_t i = 0; i < n; i++) {
        const mk_wire_trace_insn *in = &t->insn[i];
        if (in->opcode >= t->n_opcode || in->worker >= t->about.workers || (in->worker < last && last != NONE)) {
            free(of);
            return mk_fail(err, MK_E_WIRE, "instruction %u: opcode %u, worker %u are not in the trace's tables", i, in->opcode, in->worker);
        }
        last = in->worker;
        uint32_t v = in->vector < vectors ? in->vector : vectors, *c = &of[(size_t)in->opcode * (vectors + 1) + v];
        if (!*c) {
            snprintf(r->name[r->n_class], sizeof r->name[0], "%.20s %.18s", t->opcode[in->opcode], vector_name(t, v));
            *c = ++r->n_class;
        }
        r->key[i] = *c - 1;
        if (!strcmp(t->opcode[in->opcode], "SCHEDULE")) r->schedule = i;
    }
    free(of);
    return r->schedule < n ? MK_OK : mk_fail(err, MK_E_WIRE, "the program has no SCHEDULE");
}

/* ---- the critical path ---------------------------------------------------------------------------------------------- */

/* Instructions by what they publish. */
typedef struct publisher {
    uint32_t vector, publication, slice, i;
} publisher;

static int by_slice(const void *a, const void *b)
{
    const publisher *x = a, *y = b;
    if (x->vector != y->vector) return x->vector < y->vector ? -1 : 1;
    if (x->publication != y->publication) return x->publication < y->publication ? -1 : 1;
    if (x->slice != y->slice) return x->slice < y->slice ? -1 : 1;
    return x->i < y->i ? -1 : x->i > y->i;
}

static uint32_t publishers(const mk_client_trace *t, publisher *p)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < t->about.instructions; i++) {
        const mk_wire_trace_insn *in = &t->insn[i];
        /* the slices of an expert's activations depend on the route: whoever publishes any counts as the publisher of all */
        int dynamic = !strcmp(t->opcode[in->opcode], "EXPERT_UP");
        if (in->vector != NONE) p[n++] = (publisher){in->vector, in->publication, dynamic ? NONE : in->slice, i};
    }
    qsort(p, n, sizeof *p, by_slice);
    return n;
}

/* Whoever was last to publish something that instruction i waits for, the worker's own parts aside; if nobody, the number of instructions. */
static uint32_t last_publisher(const mk_trace_report *r, const publisher *p, uint32_t n, uint32_t k, uint32_t i, uint64_t *when)
{
    const mk_client_trace *t = r->t;
    const mk_wire_trace_insn *in = &t->insn[i];
    uint32_t best = t->about.instructions;
    *when = 0;
    for (uint32_t w = 0; w < in->n_wait && w < 3; w++) {
        if (in->wait[w].slices == NONE) continue;
        uint32_t lo = 0, hi = n;
        while (lo < hi) {
            uint32_t mid = (lo + hi) / 2;
            publisher key = {in->wait[w].vector, in->wait[w].publication, in->wait[w].slice, 0};
            if (by_slice(&p[mid], &key) < 0)
                lo = mid + 1;
            else
                hi = mid;
        }
        for (; lo < n && p[lo].vector == in->wait[w].vector && p[lo].publication == in->wait[w].publication; lo++) {
            if (in->wait[w].slices && p[lo].slice != NONE && p[lo].slice >= (uint32_t)in->wait[w].slice + in->wait[w].slices) continue;
            const mk_wire_trace_record *x = record(t, k, p[lo].i);
            uint64_t end = x->start + x->end;
            if (p[lo].i == i || end <= *when) continue;
            *when = end;
            best = p[lo].i;
        }
    }
    return best;
}

/* Backwards from SCHEDULE: from an instruction that waited for its input to whoever published last, otherwise to the one before it in its queue. */
static int critical_path(mk_trace_report *r, uint32_t k, const publisher *p, uint32_t n, mk_err *err)
{
    const mk_client_trace *t = r->t;
    mk_trace_step *s = &r->step[k];
    uint32_t total = t->about.instructions, i = r->schedule, cap = 0;
    uint64_t to = s->end;
    while (s->n_path < total) {
        const mk_wire_trace_record *x = record(t, k, i);
        uint64_t ready = x->start + x->input, when, from = x->start;
        uint32_t j = last_publisher(r, p, n, k, i, &when), before = i;
        do
            before = before && t->insn[before - 1].worker == t->insn[i].worker ? before - 1 : total;
        while (before < total && is_aside(record(t, k, before)));
        if (j < total && when > x->start)
            from = when < ready ? when : ready;
        else
            j = before;
        if (to < ready) to = ready;
        mk_trace_share *part[2] = {&s->chain, &r->chain[r->key[i]]};
        for (int q = 0; q < 2; q++) {
            mk_wire_trace_record on = {.input = (uint32_t)(ready - from), .weights = x->weights, .end = (uint32_t)(to - from), .bytes = x->bytes};
            if (x->publish > x->input) on.publish = (uint32_t)(x->start + x->publish - from);
            mk_trace_add(part[q], &on);
        }
        if (s->n_path == cap) {
            cap = cap ? 2 * cap : 256;
            uint32_t *more = realloc(s->path, cap * sizeof *more);
            if (!more) return mk_fail(err, MK_E_SYSTEM, "out of memory");
            s->path = more;
        }
        s->path[s->n_path++] = i;
        to = from;
        if (j >= total) break;
        i = j;
    }
    for (uint32_t a = 0, b = s->n_path; a + 1 < b; a++) {
        uint32_t x = s->path[a];
        s->path[a] = s->path[--b];
        s->path[b] = x;
    }
    return MK_OK;
}

/* ---- the report ----------------------------------------------------------------------------------------------------- */

static void sum_step(mk_trace_report *r, uint32_t k)
{
    mk_trace_step *s = &r->step[k];
    const uint32_t n = r->t->about.instructions;
    s->begin = UINT64_MAX;
    for (uint32_t i = 0; i < n; i++) {
        mk_wire_trace_record x = *record(r->t, k, i);
        x.end = end_of(r, i, &x);
        if (i == r->schedule) {
            x.publish = 0;
            s->end = x.start + x.end;
            s->rows = x.rows & ~MK_WIRE_TRACE_ASIDE;
        }
        if (x.start < s->begin) s->begin = x.start;
        if (is_aside(&x))
            s->all.bytes += x.bytes;
        else
            mk_trace_add(&s->all, &x);
        mk_trace_add(&r->share[r->key[i]], &x);
    }
}

/* What a controller passes over, because nobody has anything to do for it, is noted when it is passed: while the instructions before are still under way. Its place is
 * behind them. */
static void settle(const mk_client_trace *t)
{
    const uint32_t n = t->about.instructions;
    for (uint32_t k = 0; k < t->about.steps; k++) {
        mk_wire_trace_record *r = &t->record[(size_t)k * n];
        for (uint32_t i = 1; i < n; i++) {
            const uint64_t before = r[i - 1].start + r[i - 1].end;
            if (!r[i].end && t->insn[i].worker == t->insn[i - 1].worker && r[i].start < before) r[i].start = before;
        }
    }
}

int mk_trace_report_new(const mk_client_trace *t, mk_trace_report **out, mk_err *err)
{
    const uint32_t n = t->about.instructions;
    mk_trace_report *r = calloc(1, sizeof *r);
    publisher *p = calloc(n, sizeof *p);
    int rc = MK_OK;
    *out = NULL;
    if (r) {
        r->t = t;
        r->key = calloc(n, sizeof *r->key);
        r->name = calloc(n, sizeof *r->name);
        r->share = calloc(n, sizeof *r->share);
        r->chain = calloc(n, sizeof *r->chain);
        r->step = calloc(t->about.steps, sizeof *r->step);
    }
    if (!r || !p || !r->key || !r->name || !r->share || !r->chain || !r->step) rc = mk_fail(err, MK_E_SYSTEM, "out of memory");
    if (!rc) rc = classify(r, err);
    if (!rc) settle(t);
    uint32_t n_publisher = rc ? 0 : publishers(t, p);
    for (uint32_t k = 0; k < t->about.steps && !rc; k++) {
        sum_step(r, k);
        rc = critical_path(r, k, p, n_publisher, err);
    }
    free(p);
    if (rc)
        mk_trace_report_free(&r);
    else
        *out = r;
    return rc;
}

void mk_trace_report_free(mk_trace_report **p)
{
    mk_trace_report *r = *p;
    if (!r) return;
    for (uint32_t k = 0; r->step && k < r->t->about.steps; k++) free(r->step[k].path);
    free(r->key);
    free(r->name);
    free(r->share);
    free(r->chain);
    free(r->step);
    free(r);
    *p = NULL;
}

static double gb_s(uint64_t bytes, double ns)
{
    return ns > 0 ? (double)bytes / ns : 0;
}

static uint64_t time_of(const mk_trace_share *s)
{
    return s->input + s->weights + s->compute + s->publish;
}

static const mk_trace_share *sort_by;
static int by_time(const void *a, const void *b)
{
    uint64_t x = time_of(&sort_by[*(const uint32_t *)a]), y = time_of(&sort_by[*(const uint32_t *)b]);
    return x > y ? -1 : x < y;
}

void mk_trace_print(const mk_trace_report *r, FILE *f)
{
    const mk_client_trace *t = r->t;
    const double steps = t->about.steps, workers = t->about.workers;
    uint32_t *order = calloc(r->n_class + 1, sizeof *order);
    if (!order) return;
    for (uint32_t c = 0; c < r->n_class; c++) order[c] = c;
    fprintf(f,
            "a mean worker's step in us, by what is published; mean: of one instruction; GB/s: all workers, while not waiting for input; *: beside the queue\n"
            "%-26s %6s %9s %9s %9s %9s %9s %8s %9s %8s\n",
            "", "count", "total", "input", "weights", "compute", "publish", "mean us", "MB", "GB/s");
    sort_by = r->share;
    qsort(order, r->n_class, sizeof *order, by_time);
    const double per = 1e3 * steps * workers;
    for (uint32_t q = 0; q < r->n_class; q++) {
        const mk_trace_share *s = &r->share[order[q]];
        const double total = (double)time_of(s);
        char name[48];
        snprintf(name, sizeof name, "%s%s", r->name[order[q]], s->aside ? " *" : "");
        fprintf(f, "%-26s %6.0f %9.1f %9.1f %9.1f %9.1f %9.1f %8.2f %9.2f %8.0f\n", name, (double)s->count / steps, total / per,
                (double)s->input / per, (double)s->weights / per, (double)s->compute / per, (double)s->publish / per,
                total / 1e3 / (double)s->count, (double)s->bytes / 1e6 / steps, gb_s(s->bytes, (total - (double)s->input) / workers));
    }
    fprintf(f, "\nsteps: shares of all workers' time; bubble = input + idle (neither working nor waiting for memory)\n"
               "%8s %5s %9s %9s %7s %7s %7s %7s %7s %7s %9s %7s\n",
            "step", "rows", "us", "to next", "input", "weights", "compute", "publish", "idle", "bubble", "MB", "GB/s");
    for (uint32_t k = 0; k < t->about.steps; k++) {
        const mk_trace_step *s = &r->step[k];
        const double ns = (double)(s->end - s->begin), all = ns * workers / 100, idle = 100 - (double)time_of(&s->all) / all;
        fprintf(f, "%8u %5u %9.1f ", t->about.first_step + k, s->rows, ns / 1e3);
        if (k + 1 < t->about.steps)
            fprintf(f, "%9.1f", ((double)r->step[k + 1].begin - (double)s->end) / 1e3); /* below 0: workers are at it when SCHEDULE is passed over */
        else
            fprintf(f, "%9s", "-");
        fprintf(f, " %6.1f%% %6.1f%% %6.1f%% %6.1f%% %6.1f%% %6.1f%% %9.2f %7.0f\n", (double)s->all.input / all, (double)s->all.weights / all,
                (double)s->all.compute / all, (double)s->all.publish / all, idle, idle + (double)s->all.input / all, (double)s->all.bytes / 1e6,
                gb_s(s->all.bytes, ns));
    }
    fprintf(f, "\ncritical path, us a step: from what SCHEDULE waited for back to the step's beginning; input: exchange and gathering on the way\n"
               "%-26s %6s %9s %9s %9s %9s %9s\n",
            "", "count", "total", "input", "weights", "compute", "publish");
    sort_by = r->chain;
    qsort(order, r->n_class, sizeof *order, by_time);
    mk_trace_share sum = {0};
    for (uint32_t q = 0; q <= r->n_class; q++) {
        const mk_trace_share *s = q < r->n_class ? &r->chain[order[q]] : &sum;
        if (!s->count) continue;
        fprintf(f, "%-26s %6.1f %9.1f %9.1f %9.1f %9.1f %9.1f\n", q < r->n_class ? r->name[order[q]] : "all", (double)s->count / steps,
                (double)time_of(s) / 1e3 / steps, (double)s->input / 1e3 / steps, (double)s->weights / 1e3 / steps, (double)s->compute / 1e3 / steps,
                (double)s->publish / 1e3 / steps);
        if (q == r->n_class) break;
        sum.count += s->count;
        sum.input += s->input;
        sum.weights += s->weights;
        sum.compute += s->compute;
        sum.publish += s->publish;
    }
    free(order);
}

/* ---- the file ------------------------------------------------------------------------------------------------------- */

static void span(FILE *f, const char *name, uint32_t track, uint64_t from, uint64_t to)
{
    if (to > from)
        fprintf(f, ",\n{\"name\":\"%s\",\"ph\":\"X\",\"pid\":1,\"tid\":%u,\"ts\":%.3f,\"dur\":%.3f}", name, track, (double)from / 1e3,
                (double)(to - from) / 1e3);
}

static void write_instruction(const mk_trace_report *r, uint32_t k, uint32_t i, uint32_t track, uint64_t zero, FILE *f)
{
    const mk_client_trace *t = r->t;
    const mk_wire_trace_insn *in = &t->insn[i];
    mk_wire_trace_record x = *record(t, k, i);
    uint64_t start = x.start - zero;
    x.end = end_of(r, i, &x);
    fprintf(f,
            ",\n{\"name\":\"%s\",\"ph\":\"X\",\"pid\":1,\"tid\":%u,\"ts\":%.3f,\"dur\":%.3f,\"args\":{\"opcode\":\"%s\",\"layer\":%d,\"vector\":\"%s\","
            "\"publication\":%u,\"slice\":%u,\"bytes\":%u,\"step\":%u,\"worker\":%u,\"instruction\":%u}}",
            r->name[r->key[i]], track, (double)start / 1e3, (double)x.end / 1e3, t->opcode[in->opcode], in->layer == NONE ? -1 : (int)in->layer,
            vector_name(t, in->vector), in->publication, in->slice, x.bytes, t->about.first_step + k, in->worker, i);
    mk_trace_share s = {0};
    mk_trace_add(&s, &x);
    uint64_t ready = start + s.input, loaded = ready + s.weights, done = loaded + s.compute;
    span(f, "input", track, start, ready);
    span(f, "weights", track, ready, loaded);
    span(f, "compute", track, loaded, done);
    span(f, "publish", track, done, done + s.publish);
}

static uint32_t aside_track(const mk_client_trace *t, uint32_t worker)
{
    return t->about.workers + 1 + worker; /* behind the critical path's */
}
int mk_trace_write(const mk_trace_report *r, const mk_client_info *what, FILE *f)
{
    const mk_client_trace *t = r->t;
    const uint64_t zero = r->step[0].begin;
    json_t *about = json_pack("{s:s,s:s,s:s,s:i,s:i,s:i,s:i}", "model", what->model, "device", what->device, "build", what->build, "workers",
                              (int)t->about.workers, "instructions", (int)t->about.instructions, "steps", (int)t->about.steps, "first_step",
                              (int)t->about.first_step);
    char *text = about ? json_dumps(about, 0) : NULL;
    json_decref(about);
    fprintf(f, "{\"displayTimeUnit\":\"ns\",\"otherData\":%s,\"traceEvents\":[\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":1,\"args\":{\"name\":\"mkd\"}}",
            text ? text : "{}");
    free(text);
    for (uint32_t w = 0; w <= t->about.workers; w++) {
        fprintf(f, ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":1,\"tid\":%u,\"args\":{\"name\":\"", w);
        if (w < t->about.workers)
            fprintf(f, "worker %u\"}}", w);
        else
            fprintf(f, "critical path\"}}");
    }
    for (uint32_t i = 0, last = NONE; i < t->about.instructions; i++) {
        const uint32_t w = t->insn[i].worker;
        for (uint32_t k = 0; k < t->about.steps && w != last; k++) {
            if (!is_aside(record(t, k, i))) continue;
            fprintf(f, ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":1,\"tid\":%u,\"args\":{\"name\":\"beside worker %u\"}}", aside_track(t, w), w);
            last = w;
        }
    }
    for (uint32_t k = 0; k < t->about.steps; k++) {
        for (uint32_t i = 0; i < t->about.instructions; i++)
            write_instruction(r, k, i, is_aside(record(t, k, i)) ? aside_track(t, t->insn[i].worker) : t->insn[i].worker, zero, f);
        for (uint32_t q = 0; q < r->step[k].n_path; q++) { /* from its input on; before that the path is elsewhere */
            uint32_t i = r->step[k].path[q];
            const mk_wire_trace_record *x = record(t, k, i);
            span(f, r->name[r->key[i]], t->about.workers, x->start + x->input - zero, x->start + end_of(r, i, x) - zero);
        }
    }
    fputs("\n]}\n", f);
    return ferror(f) ? MK_E_SYSTEM : MK_OK;
}
