#include "host/machine.h"

#ifdef MK_CUDA

#include "host/pack.h"
#include "megakernel/gpu.h"
#include "megakernel/synth.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#define RESERVE (2ull << 30) /* device memory left to the driver, its contexts and page tables */

typedef struct gpu_machine {
    mk_machine m;
    mk_gpu *gpu;
    mk_gpu_rings rings;
    uint32_t event_next, epoch0;
    pthread_t poller;
    int polling, stop; /* stop: atomic */
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

/* Watches the token ring and wakes the server. Spins where there are cores to spare: a token should not wait for a timer. */
static void *poll_main(void *arg)
{
    gpu_machine *g = arg;
    uint32_t seen = 0, idle = 0;
    int spin = sysconf(_SC_NPROCESSORS_ONLN) > 2;
    while (!__atomic_load_n(&g->stop, __ATOMIC_ACQUIRE)) {
        uint32_t before = seen;
        while (__atomic_load_n(&g->rings.event[seen % MK_EVENT_RING].seq, __ATOMIC_ACQUIRE) == seen + 1) seen++;
        if (seen != before) {
            mk_ring_fd(g->m.event_fd);
            idle = 0;
            continue;
        }
        if (!spin) usleep(20);
        if (++idle % 4096 == 0 && mk_gpu_left(g->gpu) && !__atomic_load_n(&g->stop, __ATOMIC_ACQUIRE)) {
            char text[512];
            if (!mk_gpu_fault(g->gpu, text, sizeof text)) snprintf(text, sizeof text, "the kernel left without a word");
            fprintf(stderr, "mkd: GPU: %s\n", text);
            _exit(MK_E_DEVICE); /* the supervisor starts a new daemon */
        }
    }
    return NULL;
}

static int gpu_start(mk_machine *m, mk_err *err)
{
    gpu_machine *g = of(m);
    int rc = mk_gpu_start(g->gpu, g->epoch0, err);
    if (rc) return rc;
    rc = pthread_create(&g->poller, NULL, poll_main, g);
    if (rc) return mk_fail(err, MK_E_SYSTEM, "cannot start the polling thread: %s", strerror(rc));
    g->polling = 1;
    return MK_OK;
}

static int gpu_submit(mk_machine *m, const mk_submit *s, mk_err *err) { return mk_gpu_submit(of(m)->gpu, s, err); }

static uint32_t gpu_events(mk_machine *m, mk_event *ev, uint32_t n)
{
    gpu_machine *g = of(m);
    uint32_t got = 0;
    while (got < n) {
        mk_event *e = &g->rings.event[g->event_next % MK_EVENT_RING];
        if (__atomic_load_n(&e->seq, __ATOMIC_ACQUIRE) != g->event_next + 1) break;
        ev[got++] = *e;
        g->event_next++;
    }
    if (got) __atomic_store_n(g->rings.event_read, g->event_next, __ATOMIC_RELEASE);
    return got;
}

static void gpu_doorbell(mk_machine *m) { (void)m; } /* the device polls */
static uint64_t gpu_steps(const mk_machine *m) { return mk_gpu_steps(((const gpu_machine *)m)->gpu); }

static void gpu_destroy(mk_machine *m)
{
    gpu_machine *g = of(m);
    mk_err err;
    if (g->polling) {
        mk_event ev[64];
        while (gpu_events(m, ev, 64)) {}
        __atomic_store_n(&g->stop, 1, __ATOMIC_RELEASE);
        pthread_join(g->poller, NULL);
        if (mk_gpu_stop(g->gpu, 5000, &err)) fprintf(stderr, "mkd: GPU: %s\n", err.msg);
    }
    mk_gpu_destroy(&g->gpu);
    if (m->event_fd >= 0) close(m->event_fd);
    free(g);
}

/* A parameter's synthetic values, by what its tensor is: norms 1, decays as at the start of a training, biases 0. */
static void synthetic_param(const mk_pack_item *it, float *v)
{
    const char *name = it->par->tensor;
    float value = strstr(name, "norm") ? 1.0f : strstr(name, "A_log") ? 1.4f : strstr(name, "dt_bias") ? -4.0f : 0.0f;
    int conv = strstr(name, "conv1d") != NULL;
    uint32_t x = it->src * 2654435761u + 12345;
    for (uint32_t i = 0; i < it->n; i++) {
        x = x * 1664525u + 1013904223u;
        v[i] = conv ? (float)(int32_t)x * 0x1p-31f : value;
    }
}

/* Random weights, made where they stay. */
static int synthesize(const mk_plan *plan, mk_gpu *gpu, mk_err *err)
{
    const mk_program *p = plan->prog;
    mk_memory d = {0};
    mk_gpu_weights(gpu, &d);
    float *param = calloc(p->info.param_floats + 1, sizeof *param);
    int rc = param ? MK_OK : mk_fail(err, MK_E_CAPACITY, "out of memory");
    for (size_t i = 0; i < plan->n_item && !rc; i++) {
        const mk_pack_item *it = &plan->item[i];
        uint32_t scale_rows = it->wtype == MK_W_FP8 ? it->nseg * it->halves : 0;
        switch (it->kind) {
        case MK_PACK_TAPE:
            rc = mk_synth_segments(d.tape + p->tape_base[it->worker] + it->dst, 1, 0, it->wtype, it->rows * it->halves, it->mat[0]->k, scale_rows,
                                   it->mat[0]->scale_k, 1.0f, i, err);
            break;
        case MK_PACK_EXPERT:
            rc = mk_synth_segments(d.expert + it->dst, it->experts, it->expert_stride, it->wtype, it->rows * it->halves, it->mat[0]->k, scale_rows,
                                   it->mat[0]->scale_k, 1.0f, i, err);
            break;
        case MK_PACK_EMBED: rc = mk_synth_bf16(d.embed, (uint64_t)it->rows * it->mat[0]->k, 1.0f, i, err); break;
        case MK_PACK_PARAM: synthetic_param(it, param + it->dst); break;
        case MK_PACK_VALUES: memcpy(param + it->dst, it->values, it->n * sizeof *param); break;
        }
    }
    if (!rc) rc = mk_gpu_upload_params(gpu, param, 0, p->info.param_floats, err);
    if (!rc) rc = mk_synth_finish(err);
    free(param);
    return rc;
}

/* Packs into host memory, copies to the device, frees the host's copy. */
static int upload(const mk_plan *plan, const mk_checkpoint *ck, mk_gpu *gpu, mk_err *err)
{
    const mk_program_info *i = &plan->prog->info;
    uint64_t size[4] = {i->tape_bytes, i->expert_bytes, i->embed_bytes, i->param_floats * 4};
    void *p[4];
    int rc = MK_OK;
    for (int k = 0; k < 4; k++) {
        p[k] = mmap(NULL, size[k] + 64, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p[k] == MAP_FAILED && !rc)
            rc = mk_fail(err, MK_E_CAPACITY, "no host memory to pack %llu bytes of weights", (unsigned long long)size[k]);
    }
    mk_memory mem = {.tape = p[0], .expert = p[1], .embed = p[2], .param = p[3]};
    if (!rc) rc = mk_pack(plan, ck, &mem, err);
    if (!rc) rc = mk_gpu_upload(gpu, &mem, err);
    for (int k = 0; k < 4; k++)
        if (p[k] != MAP_FAILED) munmap(p[k], size[k] + 64);
    return rc;
}

int mk_machine_gpu(const mk_plan *plan, const mk_checkpoint *ck, const mk_machine_config *cfg, mk_machine **out, mk_err *err)
{
    static const mk_machine_ops ops = {gpu_start, gpu_submit, gpu_events, gpu_doorbell, gpu_steps, gpu_destroy};
    gpu_machine *g = calloc(1, sizeof *g);
    *out = NULL;
    if (!g) return mk_fail(err, MK_E_CAPACITY, "out of memory");
    mk_machine *m = &g->m;
    mk_gpu_info info;
    m->ops = &ops;
    g->epoch0 = cfg->epoch0;
    m->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int rc = m->event_fd < 0 ? mk_fail(err, MK_E_SYSTEM, "eventfd: %s", strerror(errno)) : mk_gpu_probe(0, &info, err);
    mk_gpu_config gc = {.slots = cfg->slots, .context = cfg->context};
    if (!rc) rc = mk_gpu_new(plan->prog, &gc, &g->gpu, err);
    if (!rc) rc = ck ? upload(plan, ck, g->gpu, err) : synthesize(plan, g->gpu, err);
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
