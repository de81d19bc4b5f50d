#include "host/machine.h"

#ifdef MK_CUDA

#include "host/log.h"
#include "host/pack.h"
#include "host/synth.h"
#include "megakernel/ceiling.h"
#include "megakernel/gpu.h"

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

#define LOOK_MS     100  /* how often a step that does not end is looked at */
#define DEADLINE_MS 1000 /* the same step for so long: it hangs. Below the kernel's own limit of a wait, after which its workers run on with
                            what they have and no longer show who waited for whom */
#define LEAVE_MS    1000 /* for an aborted kernel to leave */
#define MAX_HANGS   5    /* survived within HANGS_MS; at the next, launching again does not help (rebuilding a stream may be what hangs) */
#define HANGS_MS    60000

/* WATCHING -> HANGS or LEFT (the polling thread saw it) -> ABORTED (the server's thread has dealt with it; events may still lie in the ring)
 * -> WATCHING again, with the kernel launched anew and MK_EV_RESTARTED reported. */
enum watch_state { WATCHING = 0, HANGS, LEFT, ABORTED };

typedef struct gpu_machine {
    mk_machine m;
    mk_gpu *gpu;
    mk_gpu_rings rings;
    uint32_t event_next, epoch0;
    pthread_t poller;
    int polling, stop; /* stop: atomic */
    int watch;         /* enum watch_state, atomic */
    uint32_t hangs;
    uint64_t hang_ms[MAX_HANGS]; /* when the last ones were */
    char flight_dir[PATH_MAX];
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

static uint64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* What the polling thread knows of the step under way. */
typedef struct watch {
    uint32_t steps, step; /* finished at the last look; under way since `since` */
    uint64_t looked, since;
} watch;

/* Kept cheap: two words of pinned memory, and every LOOK_MS without progress 16 bytes by copy engine. */
static enum watch_state look(mk_gpu *gpu, watch *w)
{
    uint32_t steps = mk_gpu_steps(gpu), step = 0;
    uint64_t t = now_ms();
    if (mk_gpu_left(gpu)) return LEFT;
    if (steps != w->steps) {
        *w = (watch){.steps = steps, .looked = t};
        return WATCHING;
    }
    if (t - w->looked < LOOK_MS) return WATCHING;
    w->looked = t;
    int busy = mk_gpu_busy(gpu, &step);
    if (busy < 0) return LEFT; /* CUDA says why when it is asked again */
    if (!busy || !w->since || step != w->step) {
        w->since = busy ? t : 0;
        w->step = step;
        return WATCHING;
    }
    return t - w->since >= DEADLINE_MS ? HANGS : WATCHING;
}

/* Watches the token ring and wakes the server. Spins where there are cores to spare: a token should not wait for a timer. */
static void *poll_main(void *arg)
{
    gpu_machine *g = arg;
    uint32_t seen = 0, idle = 0, often = 4096;
    watch w = {0};
    int spin = sysconf(_SC_NPROCESSORS_ONLN) > 2;
    if (!spin) often = 256;
    while (!__atomic_load_n(&g->stop, __ATOMIC_ACQUIRE)) {
        if (__atomic_load_n(&g->watch, __ATOMIC_ACQUIRE) != WATCHING) { /* the rings are the server thread's until it has launched again */
            usleep(500);
            seen = 0;
            w = (watch){0};
            continue;
        }
        uint32_t before = seen;
        while (__atomic_load_n(&g->rings.event[seen % MK_EVENT_RING].seq, __ATOMIC_ACQUIRE) == seen + 1) seen++;
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

/* Writes the flight file, says what happened, makes the kernel leave. Where it cannot or should not be launched again the process ends: its
 * supervisor starts a new one. _exit, because a broken CUDA context does not always let go. */
static void deal_with(gpu_machine *g)
{
    mk_snapshot s;
    mk_err err = {0}, gone = {0};
    char path[PATH_MAX + 64], text[512];
    int hangs = __atomic_load_n(&g->watch, __ATOMIC_ACQUIRE) == HANGS;
    mk_gpu_snapshot(g->gpu, &s, &err);
    if (!hangs && s.device_read) s.live = 0;
    /* Not before the snapshot: aborted workers run on with what they have. */
    int lost = mk_gpu_abort(g->gpu, LEAVE_MS, &gone);
    if (lost)
        snprintf(text, sizeof text, "%.400s", gone.msg);
    else if (s.live || s.kernel[0])
        mk_snapshot_text(&s, text, sizeof text);
    else
        snprintf(text, sizeof text, "the kernel left without a word");
    if (mk_flight_write(&s, g->flight_dir, g->m.name, text, path, sizeof path, &err)) snprintf(path, sizeof path, "(none: %.300s)", err.msg);
    mk_snapshot_free(&s);
    uint64_t *oldest = &g->hang_ms[g->hangs++ % MAX_HANGS], t = now_ms();
    int again = *oldest && t - *oldest < HANGS_MS; /* it is MAX_HANGS hangs ago */
    *oldest = t;
    if (lost || again) {
        mk_log(MK_LOG_ERROR, "GPU lost: %s%s; flight record %s", again ? "it hangs again and again: " : "", text, path);
        _exit(MK_E_DEVICE);
    }
    mk_log(MK_LOG_ERROR, "GPU: %s; flight record %s", text, path);
    __atomic_store_n(&g->watch, ABORTED, __ATOMIC_RELEASE);
}

static void relaunch(gpu_machine *g)
{
    mk_err err = {0};
    uint64_t t = now_ms();
    g->event_next = 0;
    if (mk_gpu_start(g->gpu, mk_gpu_next_epoch(g->gpu), &err)) {
        mk_log(MK_LOG_ERROR, "GPU lost: %s", err.msg);
        _exit(MK_E_DEVICE);
    }
    g->m.launches++;
    mk_log(MK_LOG_WARN, "GPU: the kernel was launched again in %llu ms: running requests failed, streams are rebuilt from their tokens",
           (unsigned long long)(now_ms() - t));
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
    return MK_OK;
}

static int gpu_submit(mk_machine *m, const mk_submit *s, mk_err *err)
{
#ifdef MK_DEBUG
    /* MKD_INJECT_ERROR=SLOT: the slot's cache pages lie where no memory is, so that its first row breaks the CUDA context. */
    const char *broken = getenv("MKD_INJECT_ERROR");
    if (broken && s->op == MK_SUB_OPEN && s->slot == atoi(broken))
        for (uint32_t i = 0; i < m->max_pages; i++) m->page[(size_t)s->slot * m->max_pages + i] = 0x7fffffffu;
#endif
    return mk_gpu_submit(of(m)->gpu, s, err);
}

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

/* Debug builds (make DEBUG=1) only: MKD_INJECT_HANG=WORKER:INSTRUCTION:STEP in the environment makes that worker's controller stop for ever before that
 * instruction (an index into its queue) of that step, counted from the launch. Once: the kernel that is launched after it runs undisturbed. */
static void inject(mk_gpu_config *gc)
{
#ifdef MK_DEBUG
    const char *at = getenv("MKD_INJECT_HANG");
    if (!at) return;
    if (sscanf(at, "%u:%u:%u", &gc->hang_worker, &gc->hang_seq, &gc->hang_step) != 3) {
        mk_log(MK_LOG_WARN, "MKD_INJECT_HANG: expected WORKER:INSTRUCTION:STEP, found \"%.80s\"", at);
        return;
    }
    mk_log(MK_LOG_WARN, "MKD_INJECT_HANG: worker %u will hang before instruction %u of step %u", gc->hang_worker, gc->hang_seq, gc->hang_step);
    gc->hang_worker++;
#else
    (void)gc;
#endif
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
    snprintf(g->flight_dir, sizeof g->flight_dir, "%s", cfg->flight_dir && cfg->flight_dir[0] ? cfg->flight_dir : ".");
    m->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int rc = m->event_fd < 0 ? mk_fail(err, MK_E_SYSTEM, "eventfd: %s", strerror(errno)) : mk_gpu_probe(0, &info, err);
    mk_gpu_config gc = {.slots = cfg->slots, .context = cfg->context};
    inject(&gc);
    if (!rc) rc = mk_ceiling_measure(0, &m->ceiling_gb_s, err);
    if (!rc) rc = mk_gpu_new(plan->prog, &gc, &g->gpu, err);
    if (!rc) rc = ck ? upload(plan, ck, g->gpu, err) : mk_synthesize(plan, g->gpu, err);
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
