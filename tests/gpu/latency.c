/* How long the daemon's machine takes to begin and to tell: the machine of host/machine_gpu.c with its polling thread, no sockets, a stream that is asked for one
 * token at a time while the device is idle. Reports, in microseconds:
 *   begin   host writes the submit entry -> the first instruction of its step starts on some worker (the trace's record of it)
 *   token   SCHEDULE takes the time of a token and publishes it -> the polling thread has seen it
 *   whole   host writes the submit entry -> the polling thread has seen the token
 * The first two compare clocks: device time is mapped to CLOCK_MONOTONIC by the shortest of many round trips (clock.cu) before the launch and after the end, with a
 * straight line in between; "clock_error_us" is half that round trip.
 *   latency [-n REQUESTS (2000)] [-m MODEL]     prints one JSON object */
#include "host/machine.h"
#include "host/pack.h"
#include "instructions/validate.h"
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
#define MAX_N   8000u

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

static void submit(mk_submit s)
{
    if (m->ops->submit(m, &s, &err)) die("submitting");
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print(const char *name, double *v, uint32_t n)
{
    qsort(v, n, sizeof *v, by_value);
    printf("  \"%s_us\": {\"n\": %u, \"min\": %.2f, \"p50\": %.2f, \"p90\": %.2f, \"p99\": %.2f, \"max\": %.2f},\n", name, n, n ? v[0] : 0.0, n ? v[n / 2] : 0.0,
           n ? v[n - 1 - n / 10] : 0.0, n ? v[n - 1 - n / 100] : 0.0, n ? v[n - 1] : 0.0);
}

int main(int argc, char **argv)
{
    uint32_t n = 2000;
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
    await(MK_EV_APPENDED, NULL);

    static uint64_t written[MAX_N], seen[MAX_N], device[MAX_N], began[MAX_N];
    static double begin[MAX_N], token[MAX_N], whole[MAX_N];
    uint32_t limit = mk_trace_limit(p->info.n_insn), traces = 0, first = 0, have = 0;
    mk_trace_record *r = calloc(p->info.n_insn, sizeof *r);
    srand(1);
    while (have < n) {
        uint32_t steps = n - have < limit ? n - have : limit;
        submit((mk_submit){.op = MK_SUB_TRACE, .arg0 = steps, .arg1 = ++traces});
        first = have;
        for (; have < first + steps; have++) {
            uint32_t place;
            usleep(100 + (unsigned)rand() % 900); /* idle, and in no step with anything */
            mk_submit s = {.op = MK_SUB_GENERATE, .generation = 1, .arg0 = 1};
            __atomic_store_n(&m->seen_ns[events % MK_EVENT_RING], 0, __ATOMIC_RELAXED);
            written[have] = now_ns();
            submit(s);
            mk_event ev = await(MK_EV_TOKEN, &place);
            device[have] = ev.device_ns;
            while (!(seen[have] = __atomic_load_n(&m->seen_ns[place], __ATOMIC_RELAXED))) {} /* this thread may have been faster */
            await(MK_EV_DONE, NULL);
        }
        await(MK_EV_TRACED, NULL);
        usleep(1000);
        for (uint32_t k = 0; k < steps; k++) {
            if (m->ops->trace(m, k, r, &err)) die("reading the trace");
            uint64_t least = ~0ull;
            for (uint32_t w = 0; w < p->info.workers; w++) {
                const mk_trace_record *q = &r[p->queue[w]];
                if (mk_trace_is(q, traces, k) && mk_trace_start(q) < least) least = mk_trace_start(q);
            }
            /* 48 bits of it are in the record */
            if (least != ~0ull) began[first + k] = (device[first + k] & ~0xffffffffffffull) | least;
        }
    }
    m->ops->destroy(m);
    if (mk_clock_measure(5000, &b)) die("measuring the clock");
    uint32_t n_begin = 0;
    for (uint32_t i = 0; i < n; i++) {
        double at = b.at > a.at ? ((double)seen[i] - (double)a.at) / ((double)b.at - (double)a.at) : 0;
        double offset = (double)a.offset + at * (double)(b.offset - a.offset);
        token[i] = ((double)(int64_t)(seen[i] - device[i]) - offset) * 1e-3;
        whole[i] = (double)(seen[i] - written[i]) * 1e-3;
        if (began[i]) begin[n_begin++] = ((double)(int64_t)(began[i] - written[i]) + offset) * 1e-3;
    }
    printf("{\"test\": \"latency\", \"model\": \"%s\", \"device\": \"%u workers\", \"requests\": %u,\n", dir, p->info.workers, n);
    print("begin", begin, n_begin);
    print("token", token, n);
    print("whole", whole, n);
    int ok = n_begin == n && begin[n / 2] <= 5 && begin[n - 1 - n / 100] <= 20 && token[n / 2] <= 5;
    printf("  \"limits_us\": {\"begin_p50\": 5, \"begin_p99\": 20, \"token_p50\": 5}, \"clock_error_us\": %.2f, \"clock_trip_us\": [%.2f, %.2f], \"clock_tick_ns\": %llu, "
           "\"clock_drift_ppm\": %.3f, \"seconds\": %.1f, \"ok\": %s}\n",
           5e-4 * (double)(a.trip_ns > b.trip_ns ? a.trip_ns : b.trip_ns), 1e-3 * (double)a.trip_ns, 1e-3 * (double)b.trip_ns, (unsigned long long)b.tick_ns,
           1e6 * (double)(b.offset - a.offset) / (double)(b.at - a.at), 1e-9 * (double)(b.at - a.at), ok ? "true" : "false");
    return !ok;
}
