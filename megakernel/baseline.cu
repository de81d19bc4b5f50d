/* The resident kernel's roles as the kernels of a CUDA graph: megakernel/phased.cuh says what differs. */
extern "C" { /* C headers */
#include "instructions/op.h"
}
#define MK_PHASED
#include "megakernel/kernel.cu"

#include "megakernel/baseline.h"
#include "megakernel/phases.h"
#include "megakernel/submit.h"

#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* The descriptor of the first step; afterwards SCHEDULE writes them. */
static __global__ void first_step(const __grid_constant__ mk_gpu_args a)
{
    if (threadIdx.x == 0) mk_sh()->args = a;
    __syncwarp();
    mk_schedule_next(threadIdx.x, true, 0);
}

static int fail(mk_err *err, cudaError_t e, const char *what)
{
    return mk_fail(err, MK_E_DEVICE, "baseline: %s: %s", what, cudaGetErrorString(e));
}

/* One kernel of the step. `overlap`: its beginning may run beside the end of the kernel before it. */
static cudaError_t put(const mk_phased_args *args, uint32_t workers, uint32_t smem, int overlap, cudaStream_t s)
{
    cudaLaunchConfig_t c;
    cudaLaunchAttribute at;
    void *arg[1] = {(void *)args};
    memset(&c, 0, sizeof c);
    c.gridDim = dim3(workers);
    c.blockDim = dim3(MK_THREADS);
    c.dynamicSmemBytes = smem;
    c.stream = s;
    at.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    at.val.programmaticStreamSerializationAllowed = 1;
    c.attrs = &at;
    c.numAttrs = overlap ? 1 : 0;
    return cudaLaunchKernelExC(&c, (const void *)mk_phased, arg);
}

/* `chain` steps as one graph. phase[n]: the step's kernels. */
static int capture(const mk_phased_args *phase, uint32_t n, uint32_t workers, uint32_t smem, uint32_t chain, int overlap, cudaStream_t s, cudaGraphExec_t *exec,
                   mk_err *err)
{
    cudaGraph_t graph = 0;
    cudaError_t e = cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal);
    if (e) return fail(err, e, "capturing the graph");
    for (uint32_t k = 0; k < chain * n && !e; k++) e = put(&phase[k % n], workers, smem, overlap && k, s);
    cudaError_t end = cudaStreamEndCapture(s, &graph);
    if (!e) e = end;
    if (!e) e = cudaGraphInstantiate(exec, graph, 0);
    if (graph) cudaGraphDestroy(graph);
    return e ? fail(err, e, "building the graph") : MK_OK;
}

/* Slot 0 as a pinned stream whose generation goes on for longer than anybody looks. */
static int open_stream(mk_gpu *g, const mk_baseline_config *cfg, uint32_t tokens, mk_err *err)
{
    mk_gpu_rings r = mk_gpu_sched_rings(g);
    static uint32_t generation;
    mk_submit s;
    memset(&r.slot[0], 0, sizeof r.slot[0]);
    r.slot[0].generation = ++generation;
    r.slot[0].credits = ~0ull;
    r.slot[0].sampling.top_p = 1;
    r.slot[0].sampling.seed = cfg->seed;
    r.slot[0].context = 1u << 30;
    r.slot[0].pin = cfg->context;
    r.slot[0].pin_rows = cfg->rows;
    r.slot[0].pin_vocab = cfg->vocab;
    for (uint32_t i = 0; i < r.max_pages; i++) r.page[i] = i;
    r.token[0] = 1;
    memset(&s, 0, sizeof s);
    s.generation = generation;
    s.op = MK_SUB_OPEN;
    int rc = mk_gpu_submit(g, &s, err);
    s.op = MK_SUB_APPEND;
    s.arg0 = 1;
    if (!rc) rc = mk_gpu_submit(g, &s, err);
    s.op = MK_SUB_GENERATE;
    s.arg0 = tokens;
    return rc ? rc : mk_gpu_submit(g, &s, err);
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

typedef struct taker {
    mk_gpu *g;
    mk_gpu_rings r;
    uint32_t next, got, want, warm; /* events taken, tokens seen, tokens wanted, of which warm do not count */
    uint64_t last;
    mk_baseline_result *res;
} taker;

static void take(taker *t)
{
    for (;; t->next++) {
        const mk_event *e = &t->r.event[t->next % MK_EVENT_RING];
        if (!mk_event_there(e, t->next + 1)) break;
        if (e->kind != MK_EV_TOKEN || t->got >= t->want) continue;
        if (t->got >= t->warm) {
            t->res->step_ms[t->got - t->warm] = (double)(e->device_ns - t->last) * 1e-6;
            t->res->token[t->got - t->warm] = e->token;
        }
        t->last = e->device_ns;
        t->got++;
    }
    __atomic_store_n(t->r.event_read, t->next, __ATOMIC_RELEASE);
}

/* Launches the graph until enough tokens were seen: a few launches ahead, so that the device never waits for the host. */
static int drive(taker *t, cudaGraphExec_t exec, uint32_t chain, cudaStream_t s, mk_err *err)
{
    char text[512];
    const uint32_t launches = (t->want + chain - 1) / chain, ahead = 4;
    cudaEvent_t done[8];
    cudaError_t e = cudaSuccess;
    uint32_t made = 0;
    for (; made < ahead && !e; made++) e = cudaEventCreateWithFlags(&done[made], cudaEventDisableTiming);
    double end = seconds() + 60;
    int rc = MK_OK;
    for (uint32_t k = 0; k < launches && !e && !rc; k++) {
        while (k >= ahead && (e = cudaEventQuery(done[k % ahead])) == cudaErrorNotReady) {
            e = cudaSuccess;
            take(t);
        }
        if (!e) e = cudaGraphLaunch(exec, s);
        if (!e) e = cudaEventRecord(done[k % ahead], s);
        take(t);
        if (mk_gpu_fault(t->g, text, sizeof text)) rc = mk_fail(err, MK_E_DEVICE, "baseline: %s", text);
        if (!rc && seconds() > end) rc = mk_fail(err, MK_E_TIMEOUT, "baseline: %u of %u steps in a minute", t->got, t->want);
    }
    cudaError_t last = cudaStreamSynchronize(s); /* aborted kernels leave by themselves */
    if (!e) e = last;
    take(t);
    if (!rc && !e && mk_gpu_fault(t->g, text, sizeof text)) rc = mk_fail(err, MK_E_DEVICE, "baseline: %s", text);
    if (!rc && e) rc = fail(err, e, "running the graph");
    for (uint32_t i = 0; i < made; i++) cudaEventDestroy(done[i]);
    return rc;
}

static int run_graph(mk_gpu *g, const mk_program *p, const mk_baseline_config *cfg, taker *t, mk_err *err)
{
    const mk_program_info *i = &p->info;
    const uint32_t W = i->workers, stride = ((uint32_t)i->local_bytes + (uint32_t)sizeof(mk_pairs) + 15) & ~15u;
    const int whole = cfg->kind == MK_BASELINE_LAUNCH;
    mk_phases ph;
    mk_gpu_args base;
    mk_phased_args *phase = 0;
    uint8_t *image = 0;
    uint32_t smem = 0, n = 1;
    cudaStream_t s = 0;
    cudaGraphExec_t exec = 0;
    memset(&ph, 0, sizeof ph);
    int rc = whole ? MK_OK : mk_phases_of(p, cfg->rows, cfg->context, &ph, err);
    if (rc) return rc;
    if (!whole) n = ph.n;
    rc = mk_gpu_prepare(g, mk_gpu_next_epoch(g), whole ? p->insn : ph.insn, whole ? p->queue : ph.queue, n, &base, &smem, err);
    cudaError_t e = cudaSuccess;
    if (!rc && !(phase = (mk_phased_args *)calloc(n, sizeof *phase))) rc = mk_fail(err, MK_E_CAPACITY, "out of memory");
    if (!rc && ((e = cudaMalloc((void **)&image, (size_t)W * stride)) || (e = cudaMemset(image, 0, (size_t)W * stride)) ||
                (e = cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking)) ||
                (e = cudaFuncSetAttribute((const void *)mk_phased, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem)) ||
                (e = cudaFuncSetAttribute((const void *)first_step, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(mk_shared)))))
        rc = fail(err, e, "setting up");
    for (uint32_t k = 0; k < n && !rc; k++) {
        phase[k].args = base;
        phase[k].args.queue = base.queue + (size_t)k * W;
        phase[k].args.seg_first = base.seg_first + (size_t)k * W;
        mk_phase_args *a = &phase[k].phase;
        a->load = whole ? 0 : ph.load[k];
        a->save = whole ? 0 : ph.save[k];
        a->routes = whole ? MK_NONE : ph.routes;
        a->image = image;
        a->stride = stride;
        a->rows = cfg->rows;
        a->next_first = base.seg_first + (size_t)((k + 1) % n) * W;
        a->prefetch = cfg->prefetch;
        a->first = k == 0;
    }
    t->r = mk_gpu_sched_rings(g);
    if (!rc) rc = capture(phase, n, W, smem, cfg->chain, !cfg->no_overlap, s, &exec, err);
    if (!rc) rc = open_stream(g, cfg, 1u << 30, err);
    if (!rc) {
        first_step<<<1, 32, sizeof(mk_shared), s>>>(base);
        if ((e = cudaGetLastError())) rc = fail(err, e, "the first step");
    }
    if (!rc) rc = drive(t, exec, cfg->chain, s, err);
    t->res->kernels = n;
    if (exec) cudaGraphExecDestroy(exec);
    if (s) cudaStreamDestroy(s);
    cudaFree(image);
    free(phase);
    mk_phases_free(&ph);
    return rc;
}

static int run_resident(mk_gpu *g, const mk_baseline_config *cfg, taker *t, mk_err *err)
{
    int rc = mk_gpu_start(g, mk_gpu_next_epoch(g), err);
    if (rc) return rc;
    t->r = mk_gpu_sched_rings(g);
    rc = open_stream(g, cfg, t->want, err);
    double end = seconds() + 60;
    while (!rc && t->got < t->want) {
        take(t);
        if (mk_gpu_left(g)) rc = mk_fail(err, MK_E_DEVICE, "the resident kernel left");
        if (!rc && seconds() > end) rc = mk_fail(err, MK_E_TIMEOUT, "the resident kernel made %u of %u steps in a minute", t->got, t->want);
    }
    mk_err ignored;
    int stopped = mk_gpu_stop(g, 2000, rc ? &ignored : err);
    t->res->kernels = 0;
    return rc ? rc : stopped;
}

int mk_baseline_run(mk_gpu *g, const mk_program *p, const mk_baseline_config *cfg, mk_baseline_result *r, mk_err *err)
{
    taker t;
    memset(&t, 0, sizeof t);
    memset(r, 0, sizeof *r);
    t.g = g;
    t.res = r;
    t.warm = MK_BASELINE_WARM;
    t.want = MK_BASELINE_WARM + cfg->steps;
    r->step_ms = (double *)malloc(cfg->steps * sizeof *r->step_ms);
    r->token = (uint32_t *)malloc(cfg->steps * sizeof *r->token);
    if (!r->step_ms || !r->token) return mk_fail(err, MK_E_CAPACITY, "out of memory");
    int rc = cfg->kind == MK_BASELINE_RESIDENT ? run_resident(g, cfg, &t, err) : run_graph(g, p, cfg, &t, err);
    if (!rc && t.got < t.want) rc = mk_fail(err, MK_E_DEVICE, "baseline: %u of %u steps", t.got, t.want);
    return rc;
}
