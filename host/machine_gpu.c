#include "host/machine.h"

#ifdef MK_CUDA

#include "host/log.h"
#include "host/numa.h"
#include "host/pack.h"
#include "host/recover.h"
#include "host/synth.h"
#include "megakernel/ceiling.h"
#include "megakernel/gpu.h"
#include "megakernel/laid.h"
#include "megakernel/submit.h"
#include "host/absorb.h"
#include "megakernel/selftest.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define RESERVE (2ull << 30) /* device memory left to the driver, its contexts and page tables */

#define LOOK_MS     50   /* how often a kernel that shows no sign of life is looked at */
#define DEADLINE_MS 1000 /* no sign of life for so long: it hangs. Below the kernel's own limit of a wait, after which its workers run on with
                            what they have and no longer show who waited for whom */
#define LEAVE_MS    1000 /* for an aborted kernel to leave */

/* WATCHING -> HANGS or LEFT (the polling thread saw it) -> ABORTED (the server's thread has dealt with it; events may still lie in the ring)
 * -> WATCHING again, with the kernel launched anew and MK_EV_RESTARTED reported. */
enum watch_state { WATCHING = 0, HANGS, LEFT, ABORTED };

typedef struct gpu_machine {
    mk_machine m;
    mk_gpu *gpu;
    mk_gpu_rings rings;
    uint32_t event_next, epoch0;
    pthread_t poller;
    int polling, polls, stop; /* polls, stop: atomic */
    int watch;         /* enum watch_state, atomic */
    mk_recovery recovery;
} gpu_machine;

static gpu_machine *of(mk_machine *m) { return (gpu_machine *)m; }

int mk_machine_gpu_limits(mk_machine_limits *l, mk_err *err)
{
    mk_gpu_info info;
    int rc = mk_gpu_probe(0, &info, err);
    if (rc) return rc;
    *l = (mk_machine_limits){.workers = info.sms, .smem = info.smem, .memory = info.memory > RESERVE ? info.memory - RESERVE : 0};
    return MK_OK;
}

/* What the polling thread knows of the kernel's pulse. */
typedef struct watch {
    uint32_t pulse;         /* at the last look */
    uint64_t looked, since; /* when that was; when the pulse was first seen to stand still, 0: it moves */
} watch;

/* SCHEDULE finishes a step or finds nothing to do; both show in pinned memory. CUDA is asked only when neither happens: has the kernel left? */
static enum watch_state look(mk_gpu *gpu, watch *w)
{
    uint64_t t = mk_now_ms();
    if (t - w->looked < LOOK_MS) return WATCHING;
    w->looked = t;
    uint32_t pulse = mk_gpu_pulse(gpu);
    if (pulse != w->pulse) {
        w->pulse = pulse;
        w->since = 0;
        return WATCHING;
    }
    if (mk_gpu_left(gpu)) return LEFT;
    if (!w->since) w->since = t; /* not since the look before: this process may have been stopped in between */
    return t - w->since >= DEADLINE_MS ? HANGS : WATCHING;
}

/* Watches the token ring and wakes the server. Spins where there are cores to spare: a token should not wait for a timer. */
static void *poll_main(void *arg)
{
    gpu_machine *g = arg;
    uint32_t seen = 0, idle = 0, spin = mk_numa_cpus() > 2, often = spin ? 4096 : 256;
    watch w = {0};
    mk_gpu_left(g->gpu); /* what CUDA sets up for a thread it does now */
    __atomic_store_n(&g->polls, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&g->stop, __ATOMIC_ACQUIRE)) {
        if (__atomic_load_n(&g->watch, __ATOMIC_ACQUIRE) != WATCHING) { /* the rings are the server thread's until it has launched again */
            usleep(500);
            seen = 0;
            w = (watch){0};
            continue;
        }
        uint32_t before = seen;
        while (mk_event_there(&g->rings.event[seen % MK_EVENT_RING], seen + 1)) {
            struct timespec t;
            clock_gettime(CLOCK_MONOTONIC, &t);
            __atomic_store_n(&g->m.seen_ns[seen++ % MK_EVENT_RING], (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec, __ATOMIC_RELAXED);
        }
        if (seen != before) {
            mk_ring_fd(g->m.event_fd);
            idle = 0;
            continue;
        }
        if (!spin) usleep(20);
        if (++idle % often) continue;
        enum watch_state state = look(g->gpu, &w);
        if (state == WATCHING) continue;
        __atomic_store_n(&g->watch, (int)state, __ATOMIC_RELEASE);
        mk_ring_fd(g->m.event_fd);
    }
    return NULL;
}

/* Writes the flight file, says what happened, makes the kernel leave. */
static void deal_with(gpu_machine *g)
{
    mk_snapshot s;
    mk_err err = {0}, gone = {0};
    int hangs = __atomic_load_n(&g->watch, __ATOMIC_ACQUIRE) == HANGS;
    mk_gpu_snapshot(g->gpu, &s, &err);
    if (!hangs && s.device_read) s.live = 0;
    /* Not before the snapshot: aborted workers run on with what they have. */
    int lost = mk_gpu_abort(g->gpu, LEAVE_MS, &gone);
    mk_recovery_note(&g->recovery, &s, "GPU", lost ? gone.msg : NULL);
    mk_snapshot_free(&s);
    __atomic_store_n(&g->watch, ABORTED, __ATOMIC_RELEASE);
}

static void relaunch(gpu_machine *g)
{
    mk_err err = {0};
    uint64_t t = mk_now_ms();
    g->event_next = 0;
    if (mk_gpu_start(g->gpu, mk_gpu_next_epoch(g->gpu), &err)) {
        mk_log(MK_LOG_ERROR, "GPU lost: %s", err.msg);
        _exit(MK_E_DEVICE);
    }
    g->m.launches++;
    mk_recovery_done("GPU", t);
    __atomic_store_n(&g->watch, WATCHING, __ATOMIC_RELEASE);
}

static int gpu_start(mk_machine *m, mk_err *err)
{
    gpu_machine *g = of(m);
    int rc = mk_gpu_start(g->gpu, g->epoch0, err);
    if (rc) return rc;
    m->launches++;
    rc = pthread_create(&g->poller, NULL, poll_main, g);
    if (rc) return mk_fail(err, MK_E_SYSTEM, "cannot start the polling thread: %s", strerror(rc));
    g->polling = 1;
    while (!__atomic_load_n(&g->polls, __ATOMIC_ACQUIRE)) usleep(100);
    return MK_OK;
}

static int gpu_submit(mk_machine *m, const mk_submit *s, mk_err *err) { return mk_gpu_submit(of(m)->gpu, s, err); }

static uint32_t gpu_events(mk_machine *m, mk_event *ev, uint32_t n)
{
    gpu_machine *g = of(m);
    int state = __atomic_load_n(&g->watch, __ATOMIC_ACQUIRE);
    if (state == HANGS || state == LEFT) deal_with(g);
    uint32_t got = mk_take_events(g->rings.event, &g->event_next, g->rings.event_read, ev, n);
    if (got < n && state != WATCHING) { /* the old kernel's last event is taken */
        relaunch(g);
        ev[got++] = (mk_event){.kind = MK_EV_RESTARTED};
    }
    return got;
}

static void gpu_doorbell(mk_machine *m) { (void)m; } /* the device polls */
static uint64_t gpu_steps(const mk_machine *m) { return mk_gpu_steps(((const gpu_machine *)m)->gpu); }

static int gpu_trace(mk_machine *m, uint32_t k, mk_trace_record *r, mk_err *err) { return mk_gpu_trace(of(m)->gpu, k, r, err); }

static void gpu_destroy(mk_machine *m)
{
    gpu_machine *g = of(m);
    mk_err err;
    if (g->polling) {
        mk_event ev[64];
        __atomic_store_n(&g->stop, 1, __ATOMIC_RELEASE);
        pthread_join(g->poller, NULL);
        while (gpu_events(m, ev, 64)) {}
        if (mk_gpu_stop(g->gpu, 5000, &err)) fprintf(stderr, "mkd: GPU: %s\n", err.msg);
    }
    mk_gpu_destroy(&g->gpu);
    if (m->event_fd >= 0) close(m->event_fd);
    free(m->seen_ns);
    free(g);
}

/* Raw tensors to the device, packed there; the parameters by the CPU. */
static int upload(const mk_plan *plan, const mk_checkpoint *ck, mk_gpu *gpu, mk_err *err)
{
    uint64_t n = plan->prog->info.param_floats, bytes = 0;
    double seconds = 0;
    mk_memory d = {0};
    mk_gpu_weights(gpu, &d);
    float *param = calloc(n + 1, sizeof *param);
    int rc = param ? mk_pack_params(plan, ck, param, err) : mk_fail(err, MK_E_CAPACITY, "out of memory");
    if (!rc) rc = mk_gpu_upload_params(gpu, param, 0, n, err);
    if (!rc) rc = mk_pack_gpu(plan, ck, &d, &seconds, &bytes, err);
    if (!rc) mk_log(MK_LOG_INFO, "weights: %.2f GB of tensors packed on the GPU in %.2f s", (double)bytes * 1e-9, seconds);
    free(param);
    return rc;
}

static void log_line(const char *line) { mk_log(MK_LOG_DEBUG, "%s", line); }

/* cuBLAS, if it is there, lives no longer than this. */
static int self_test(const mk_plan *plan, const mk_checkpoint *ck, mk_gpu *gpu, mk_err *err)
{
    mk_selftest_report r;
    mk_absorb *absorb = NULL;
    mk_selftest_config c = {.seed = (uint64_t)time(NULL), .log = log_line};
    int rc = MK_OK;
    if (ck) {
        rc = mk_blas_open(NULL, &c.blas, err);
        if (!rc) rc = mk_absorb_new(plan, ck, &absorb, err);
        c.heads = mk_absorb_heads;
        c.arg = absorb;
        if (!rc) mk_log(MK_LOG_INFO, "products over heads: %s", mk_blas_name(c.blas));
    }
    if (!rc) rc = mk_selftest(gpu, plan->prog, &c, &r, err);
    mk_absorb_destroy(&absorb);
    mk_blas_close(&c.blas);
    if (rc)
        mk_log(MK_LOG_ERROR, "self-test: seed %llu failed", (unsigned long long)c.seed);
    else
        mk_log(MK_LOG_INFO, "self-test: %u kinds of instructions in %.2f s, %u of them against the checkpoint's heads, seed %llu; largest error %.2g of its tolerance (%s)",
               r.kinds, r.seconds, r.absorbed, (unsigned long long)c.seed, r.worst, r.worst_at);
    return rc;
}

int mk_machine_gpu(const mk_plan *plan, const mk_checkpoint *ck, const mk_machine_config *cfg, mk_machine **out, mk_err *err)
{
    static const mk_machine_ops ops = {gpu_start, gpu_submit, gpu_events, gpu_doorbell, gpu_steps, gpu_trace, gpu_destroy};
    gpu_machine *g = calloc(1, sizeof *g);
    *out = NULL;
    if (!g) return mk_fail(err, MK_E_CAPACITY, "out of memory");
    mk_machine *m = &g->m;
    mk_gpu_info info;
    m->ops = &ops;
    g->epoch0 = cfg->epoch0;
    mk_recovery_init(&g->recovery, cfg->flight_dir);
    m->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    m->seen_ns = calloc(MK_EVENT_RING, sizeof *m->seen_ns);
    int rc = m->event_fd < 0 || !m->seen_ns ? mk_fail(err, MK_E_SYSTEM, "eventfd: %s", strerror(errno)) : mk_gpu_probe(0, &info, err);
    if (!rc) {
        char placed[256];
        mk_numa_place(info.pci, placed, sizeof placed);
        mk_log(MK_LOG_INFO, "%s", placed);
    }
    mk_gpu_config gc = {.slots = cfg->slots, .context = cfg->context, .unloaded = cfg->unloaded};
    if (!rc) rc = mk_ceiling_measure(0, &m->ceiling_gb_s, err);
    if (!rc) rc = mk_gpu_new(plan->prog, &gc, &g->gpu, err);
    if (!rc) mk_log(MK_LOG_INFO, "kernel laid for %s", mk_laid_name(mk_laid_for(plan->prog)));
    if (!rc) rc = ck ? upload(plan, ck, g->gpu, err) : mk_synthesize(plan, g->gpu, err);
    if (!rc && cfg->self_test) rc = self_test(plan, ck, g->gpu, err);
    if (rc) {
        gpu_destroy(m);
        return rc;
    }
    g->rings = mk_gpu_sched_rings(g->gpu);
    m->slot = g->rings.slot;
    m->page = g->rings.page;
    m->token = g->rings.token;
    m->max_pages = g->rings.max_pages;
    m->context = cfg->context;
    snprintf(m->name, sizeof m->name, "%.100s, %u workers", info.name, plan->prog->info.workers);
    *out = m;
    return MK_OK;
}

#else /* built without nvcc */

#include <dlfcn.h>

int mk_machine_gpu_limits(mk_machine_limits *l, mk_err *err)
{
    (void)l;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!driver) return mk_fail(err, MK_E_DEVICE, "no NVIDIA driver on this machine");
    dlclose(driver);
    return mk_fail(err, MK_E_DEVICE, "this build has no GPU kernel: nvcc was not found when it was made");
}

int mk_machine_gpu(const mk_plan *plan, const mk_checkpoint *ck, const mk_machine_config *cfg, mk_machine **m, mk_err *err)
{
    mk_machine_limits l;
    (void)plan, (void)ck, (void)cfg;
    *m = NULL;
    return mk_machine_gpu_limits(&l, err);
}

#endif
