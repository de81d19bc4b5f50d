/* How long the daemon's machine takes to begin and to tell: the machine of host/machine_gpu.c with its polling thread, no sockets, a stream that is asked for one
 * token at a time while the device is idle. Three kinds of requests: "greedy" and "sampled" generate from what is there, "append" brings four tokens first
 * (the entry of the append counts, the generation's follows it). Reports for each, in microseconds:
 *   begin   host writes the submit entry -> the first instruction of its step starts on some worker (the trace's record of it)
 *   all     host writes the submit entry -> every worker has started its first instruction
 *   token   SCHEDULE takes the time of a token and publishes it -> the polling thread has seen it
 *   whole   host writes the submit entry -> the polling thread has seen the token
 * All but the last compare clocks: device time is mapped to CLOCK_MONOTONIC by the shortest of many round trips (clock.cu) before the launch and after the end, with a
 * straight line in between; "clock_error_us" is half that round trip.
 *   latency [-n REQUESTS of each kind (1000)] [-m MODEL]     prints one JSON object */
#include "host/machine.h"
#include "host/pack.h"
#include "instructions/validate.h"
#include "megakernel/submit.h"
#include "ipc/mkctl.h"
#include "megakernel/trace.h"
#include "tests/gpu/clock.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CONTEXT 16384u
#define MAX_N   2000u

static mk_err err;
static mk_machine *m;
static uint32_t events; /* taken so far: the next one's place in the ring */

static void die(const char *what)
{
    fprintf(stderr, "latency: %s: %s\n", what, err.msg);
    exit(err.code ? err.code : 1);
}

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* The next event of that kind; *place: where it lay in the ring. */
static mk_event await(uint32_t kind, uint32_t *place)
{
    uint64_t since = now_ns();
    for (;;) {
        mk_event ev;
        if (m->ops->events(m, &ev, 1)) {
            if (place) *place = events % MK_EVENT_RING;
            events++;
            if (ev.kind == MK_EV_RESTARTED) die("the kernel hung");
            if (ev.kind == kind) return ev;
        } else { /* asleep like the server's thread, so that the polling thread has the ring for itself */
            struct pollfd f = {.fd = m->event_fd, .events = POLLIN};
            uint64_t count;
            if (now_ns() - since > 5000000000ull) die("no answer within 5 s");
            if (poll(&f, 1, 1000) > 0 && read(m->event_fd, &count, sizeof count) < 0) {}
        }
    }
}

enum { GREEDY, SAMPLED, APPEND, KINDS };
static const char *const kind_name[] = {"greedy", "sampled", "append"};

static void submit(mk_submit s)
{
    if (m->ops->submit(m, &s, &err)) die("submitting");
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print(const char *kind, const char *name, double *v, uint32_t n)
{
    qsort(v, n, sizeof *v, by_value);
    printf("  \"%s_%s_us\": {\"n\": %u, \"min\": %.2f, \"p50\": %.2f, \"p90\": %.2f, \"p99\": %.2f, \"max\": %.2f},\n", kind, name, n, n ? v[0] : 0.0, n ? v[n / 2] : 0.0,
           n ? v[n - 1 - n / 10] : 0.0, n ? v[n - 1 - n / 100] : 0.0, n ? v[n - 1] : 0.0);
}

static uint64_t written[KINDS * MAX_N], seen[KINDS * MAX_N], device[KINDS * MAX_N], began[KINDS * MAX_N], all[KINDS * MAX_N];
static double begin[MAX_N], everywhere[MAX_N], token[MAX_N], whole[MAX_N];

typedef struct run {
    uint32_t traces, known, step; /* traces so far; tokens of the stream; number of the device's next step */
    mk_trace_record *record;      /* [instructions] */
    const mk_program *prog;
} run;

/* When the first worker and when the last one has started its first instruction of step k of the trace; 48 bits of the clock are in a record. 0: a record is missing. */
static void first_start(run *r, uint32_t k, uint64_t near, uint64_t *first, uint64_t *last)
{
    uint64_t least = ~0ull, most = 0;
    uint32_t missing = 0;
    if (m->ops->trace(m, k, r->record, &err)) die("reading the trace");
    for (uint32_t w = 0; w < r->prog->info.workers; w++) {
        const mk_trace_record *q = &r->record[r->prog->queue[w]];
        if (!mk_trace_is(q, r->traces, k)) {
            missing++;
            continue;
        }
        if (mk_trace_start(q) < least) least = mk_trace_start(q);
        if (mk_trace_start(q) > most) most = mk_trace_start(q);
    }
    *first = least == ~0ull ? 0 : (near & ~0xffffffffffffull) | least;
    *last = missing ? 0 : (near & ~0xffffffffffffull) | most;
}

/* Requests at..at + n - 1, traced: `steps` steps at most. */
static void batch(run *r, uint32_t kind, uint32_t at, uint32_t n, uint32_t steps)
{
    static uint32_t first[MAX_N];
    const uint32_t from = r->step;
    submit((mk_submit){.op = MK_SUB_TRACE, .arg0 = steps, .arg1 = ++r->traces});
    for (uint32_t i = at; i < at + n; i++) {
        uint32_t place;
        mk_submit s = {.op = MK_SUB_GENERATE, .generation = 1, .arg0 = 1}, more = {.op = MK_SUB_APPEND, .generation = 1, .arg0 = 4};
        for (uint32_t k = 0; k < more.arg0 && kind == APPEND; k++) m->token[r->known + k] = k + 1;
        mk_submit_tokens(&more, m->token + r->known);
        usleep(100 + (unsigned)rand() % 900); /* idle, and in no step with anything */
        for (uint32_t k = 0; k < 3; k++) __atomic_store_n(&m->seen_ns[(events + k) % MK_EVENT_RING], 0, __ATOMIC_RELAXED);
        written[i] = now_ns();
        if (kind == APPEND) submit(more);
        submit(s);
        mk_event ev = await(MK_EV_TOKEN, &place);
        device[i] = ev.device_ns;
        while (!(seen[i] = __atomic_load_n(&m->seen_ns[place], __ATOMIC_RELAXED))) {} /* this thread may have been faster */
        await(MK_EV_DONE, NULL);
        m->token[ev.position] = ev.token;
        r->known = ev.position + 1;
        first[i - at] = r->step;
        r->step = ev.step + 1;
    }
    submit((mk_submit){.op = MK_SUB_TRACE}); /* what is left of it: not needed */
    usleep(1000);
    for (uint32_t i = at; i < at + n; i++) first_start(r, first[i - at] - from, device[i], &began[i], &all[i]);
}

int main(int argc, char **argv)
{
    uint32_t n = 1000;
    const char *dir = "tests/oracle/kimi_linear";
    int c;
    while ((c = getopt(argc, argv, "n:m:")) != -1)
        if (c == 'n')
            n = (uint32_t)atoi(optarg);
        else if (c == 'm')
            dir = optarg;
        else
            return 2;
    if (!n || n > MAX_N) return 2;
    mk_machine_limits lim;
    mk_model *model;
    mk_checkpoint *ck;
    mk_plan *plan;
    mk_clock_pair a, b;
    if (mk_machine_gpu_limits(&lim, &err) || mk_model_read(dir, &model, &err) || mk_checkpoint_open(dir, &ck, &err) ||
        mk_model_resolve(model, ck, MK_WEIGHTS_AUTO, &err))
        die("loading");
    mk_plan_config pc = {.workers = lim.workers, .max_context = CONTEXT, .kv_pages = CONTEXT / MK_PAGE, .state_slots = 1, .smem_limit = lim.smem};
    if (mk_plan_make(model, &pc, &plan, &err) || mk_validate(plan->prog, NULL, &err)) die("planning");
    if (mk_machine_gpu(plan, ck, &(mk_machine_config){.slots = 1, .context = CONTEXT, .flight_dir = "/tmp"}, &m, &err)) die("the machine");
    const mk_program *p = plan->prog;
    if (mk_clock_measure(5000, &a)) die("measuring the clock");
    if (m->ops->start(m, &err)) die("starting");

    *m->slot = (mk_slot){.generation = 1, .credits = ~0ull, .context = CONTEXT};
    for (uint32_t i = 0; i < m->max_pages; i++) m->page[i] = i;
    for (uint32_t i = 0; i < 4; i++) m->token[i] = i + 1;
    submit((mk_submit){.op = MK_SUB_OPEN, .generation = 1});
    submit((mk_submit){.op = MK_SUB_APPEND, .generation = 1, .arg0 = 4});
    const mk_event appended = await(MK_EV_APPENDED, NULL);

    const uint32_t limit = mk_trace_limit(p->info.n_insn);
    run r = {.known = 4, .step = appended.step + 1, .record = calloc(p->info.n_insn, sizeof(mk_trace_record)), .prog = p};
    srand(1);
    for (uint32_t kind = 0; kind < KINDS; kind++) {
        const uint32_t most = kind == APPEND ? limit / 2 : limit; /* requests a trace: the append and the generation may have a step each */
        m->slot->sampling = (mk_sampling){.temperature = kind == SAMPLED ? 0.8f : 0, .top_p = 0.95f, .seed = 1};
        for (uint32_t have = 0, some; have < n; have += some) {
            some = n - have < most ? n - have : most;
            batch(&r, kind, kind * MAX_N + have, some, limit);
        }
    }
    m->ops->destroy(m);
    if (mk_clock_measure(5000, &b)) die("measuring the clock");
    printf("{\"test\": \"latency\", \"model\": \"%s\", \"device\": \"%u workers\", \"requests\": %u,\n", dir, p->info.workers, n);
    int ok = 1;
    for (uint32_t kind = 0; kind < KINDS; kind++) {
        uint32_t n_begin = 0, n_all = 0;
        for (uint32_t k = 0; k < n; k++) {
            uint32_t i = kind * MAX_N + k;
            double at = b.at > a.at ? ((double)seen[i] - (double)a.at) / ((double)b.at - (double)a.at) : 0;
            int64_t offset = a.offset + (int64_t)(at * (double)(b.offset - a.offset));
            token[k] = (double)((int64_t)(seen[i] - device[i]) - offset) * 1e-3;
            whole[k] = (double)(seen[i] - written[i]) * 1e-3;
            if (began[i]) begin[n_begin++] = (double)((int64_t)(began[i] - written[i]) + offset) * 1e-3;
            if (all[i]) everywhere[n_all++] = (double)((int64_t)(all[i] - written[i]) + offset) * 1e-3;
        }
        print(kind_name[kind], "begin", begin, n_begin);
        print(kind_name[kind], "all", everywhere, n_all);
        print(kind_name[kind], "token", token, n);
        print(kind_name[kind], "whole", whole, n);
        ok &= n_begin == n && begin[n / 2] <= 5 && begin[n - 1 - n / 100] <= 20 && token[n / 2] <= 5;
    }
    printf("  \"limits_us\": {\"begin_p50\": 5, \"begin_p99\": 20, \"token_p50\": 5}, \"clock_error_us\": %.2f, \"clock_trip_us\": [%.2f, %.2f], \"clock_tick_ns\": %llu, "
           "\"clock_drift_ppm\": %.3f, \"seconds\": %.1f, \"ok\": %s}\n",
           5e-4 * (double)(a.trip_ns > b.trip_ns ? a.trip_ns : b.trip_ns), 1e-3 * (double)a.trip_ns, 1e-3 * (double)b.trip_ns, (unsigned long long)b.tick_ns,
           1e6 * (double)(b.offset - a.offset) / (double)(b.at - a.at), 1e-9 * (double)(b.at - a.at), ok ? "true" : "false");
    return !ok;
}
