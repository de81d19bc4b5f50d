extern "C" { /* C headers */
#include "instructions/op.h"
}
#include "megakernel/gpu.h"

#include "instructions/combine.cuh"
#include "instructions/gqa_append.cuh"

#include "megakernel/device.cuh"
#include "megakernel/kernel.h"
#include "megakernel/submit.h"
#include "megakernel/tables.cuh"

#include <cuda_runtime.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct mk_alloc {
    void *p;
    int pinned;
} mk_alloc;

/* The gammas of a gathered vector in the order of its packets: gains.cuh. */
typedef struct mk_gain {
    uint32_t vec, slice0, packets, per; /* what is gathered; values a packet */
    uint32_t in_off, k, param_off;      /* its values, their gammas */
    uint32_t map, at;                   /* in args.map: what its packets carry, and the table */
} mk_gain;

struct mk_gpu {
    const mk_program *prog;
    mk_gpu_config cfg;
    int device;
    const void *entry; /* of the kernel as it is laid for this program */
    mk_gpu_args args;
    mk_alloc alloc[96];
    int n_alloc;
    cudaStream_t run, copy;
    cudaEvent_t left, copied; /* made before the launch: recording and asking is all that happens to them afterwards */
    int running;
    uint32_t submit_next;
    uint32_t smem;
    uint32_t map_at[MK_MAX_VEC]; /* by vector: its first word in args.map */
    uint32_t pair_at[MK_MAX_VEC]; /* of those that EXPERT_DOWN reads: [32 lanes][MK_PAIR_WORDS] */
    mk_table queries[4];          /* of MLA_PARTIALs that differ */
    mk_table *delta;              /* of DELTA_STEPs that differ */
    uint32_t n_queries, n_delta;
    mk_gain *gain, *gain_there; /* here; in device memory */
    uint32_t n_gain;
    /* pinned */
    mk_submit_packets *submit;
    mk_event *event;
    uint32_t *event_read, *page, *token, *heartbeat;
    mk_slot *slot;
    mk_fault *fault;
    uint8_t *bounce; /* for small transfers */
    /* device */
    mk_sched *sched;
    mk_submit *inbox; /* entries as the kernel has fetched them */
    mk_sampling *sampling;
    mk_sched_slot *st;
    mk_sched_rest *rest;
    uint32_t *active, *pages;
    uint8_t *local; /* image of the LOCAL vectors: mk_gpu_once, else NULL */
    uint32_t max_pages;
};

#define MK_BOUNCE 65536u
#define MK_COPY_MS 2000u /* for a copy engine to answer */

static int cuda_fail(mk_err *err, cudaError_t e, const char *what)
{
    return mk_fail(err, MK_E_DEVICE, "%s: %s", what, cudaGetErrorString(e));
}

int mk_gpu_probe(int device, mk_gpu_info *info, mk_err *err)
{
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    memset(info, 0, sizeof *info);
    if (e == cudaErrorInsufficientDriver || e == cudaErrorNoDevice || e == cudaErrorStubLibrary)
        return mk_fail(err, MK_E_DEVICE, "no NVIDIA driver or no GPU here: %s", cudaGetErrorString(e));
    if (e) return cuda_fail(err, e, "cudaGetDeviceCount");
    if (device < 0 || device >= n) return mk_fail(err, MK_E_DEVICE, "GPU %d: this machine has %d", device, n);
    cudaDeviceProp p;
    if ((e = cudaGetDeviceProperties(&p, device))) return cuda_fail(err, e, "cudaGetDeviceProperties");
    if (p.major != 9 || p.minor != 0)
        return mk_fail(err, MK_E_DEVICE, "GPU %d (%s): expected compute capability 9.0, found %d.%d", device, p.name, p.major, p.minor);
    snprintf(info->name, sizeof info->name, "%s", p.name);
    info->sms = (uint32_t)p.multiProcessorCount;
    info->smem = (uint32_t)p.sharedMemPerBlockOptin;
    info->memory = p.totalGlobalMem;
    snprintf(info->pci, sizeof info->pci, "%04x:%02x:%02x.0", (unsigned)p.pciDomainID, (unsigned)p.pciBusID, (unsigned)p.pciDeviceID);
    return MK_OK;
}

#include "megakernel/segments.cuh"
#include "megakernel/refuse.cuh"

/* ---- memory --------------------------------------------------------------------------------------------------------- */

static void *device_memory(mk_gpu *g, const char *what, uint64_t bytes, mk_err *err)
{
    void *p = NULL;
    cudaError_t e = cudaMalloc(&p, bytes ? bytes : 256);
    if (!e) e = cudaMemset(p, 0, bytes ? bytes : 256);
    if (e) {
        mk_fail(err, MK_E_CAPACITY, "%s: %llu bytes of GPU memory: %s", what, (unsigned long long)bytes, cudaGetErrorString(e));
        if (p) cudaFree(p);
        return NULL;
    }
    g->alloc[g->n_alloc].p = p;
    g->alloc[g->n_alloc++].pinned = 0;
    return p;
}

static void *pinned_memory(mk_gpu *g, const char *what, uint64_t bytes, mk_err *err)
{
    void *p = NULL;
    cudaError_t e = cudaHostAlloc(&p, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
    if (e) {
        mk_fail(err, MK_E_CAPACITY, "%s: %llu bytes of pinned memory: %s", what, (unsigned long long)bytes, cudaGetErrorString(e));
        return NULL;
    }
    memset(p, 0, bytes);
    g->alloc[g->n_alloc].p = p;
    g->alloc[g->n_alloc++].pinned = 1;
    return p;
}

static void *uploaded(mk_gpu *g, const char *what, const void *src, uint64_t bytes, mk_err *err)
{
    void *p = device_memory(g, what, bytes, err);
    cudaError_t e = p && bytes ? cudaMemcpy(p, src, bytes, cudaMemcpyHostToDevice) : cudaSuccess;
    if (!e) return p;
    cuda_fail(err, e, what);
    return NULL;
}

#include "megakernel/gains.cuh"
#include "megakernel/plans.cuh"

/* Nothing further goes by a ROUTE: `last`, which was the last to do so, releases it. One that nothing went by (route) somebody has to wait for all the same. */
static void release(const mk_gpu *g, const mk_insn *route, mk_seg *last, mk_seg *seg, uint32_t *n_seg)
{
    if (route) {
        last = &seg[(*n_seg)++];
        *last = routed_seg(g, route);
    }
    if (last) last->flags |= MK_SEG_RELEASES;
}

/* Type of the weights that the next EXPERT_UP before `end` has; any will do where there is none. */
static uint32_t experts_of(const mk_insn *insn, uint32_t k, uint32_t end)
{
    while (++k < end)
        if (insn[k].opcode == MK_OP_EXPERT_UP) return insn[k].expert.wtype;
    return MK_W_BF16;
}

/* Instructions and queues, and what they stream as the loader sees it. */
static int upload_queues(mk_gpu *g, const mk_insn *insn, const uint32_t *queue, uint32_t sets, mk_gpu_args *a, mk_err *err)
{
    const mk_program *p = g->prog;
    uint32_t workers = p->info.workers, W = sets * workers, n_insn = queue[W], n_seg = 0;
    mk_seg *seg = (mk_seg *)calloc(n_insn + 1, sizeof *seg);
    mk_plan *plan = (mk_plan *)calloc(n_insn + 1, sizeof *plan);
    input_keys keys = {NULL, 0, 0, 0};
    int rc = MK_OK;
    uint32_t *first = (uint32_t *)calloc(W + 1, 4);
    if (!seg || !plan || !first) {
        free(seg), free(plan), free(first);
        return mk_fail(err, MK_E_CAPACITY, "out of memory");
    }
    for (uint32_t w = 0; w < W; w++) {
        const mk_insn *route = NULL; /* that no segment has yet been told to wait for */
        mk_seg *last = NULL;         /* that goes by the ROUTE before */
        for (uint32_t k = queue[w]; k < queue[w + 1] && !rc; k++) {
            const mk_insn *in = &insn[k];
            const uint64_t tape = p->tape_base[w % workers];
            switch (in->opcode) {
            case MK_OP_ROUTE:
                release(g, route, last, seg, &n_seg);
                last = NULL;
                route = in;
                rc = plan_of(g, in, NULL, experts_of(insn, k, queue[w + 1]), &keys, &plan[k], err);
                break;
            case MK_OP_DELTA_STEP: {
                const mk_table *table = table_of(p, g->delta, g->n_delta, deltas_alike, in);
                plan[k].tape = tape + in->tape_off; /* it reads its segments itself */
                plan[k].map = table ? table->at : 0;
                break;
            }
            case MK_OP_GEMV:
            case MK_OP_LM_HEAD:
                seg[n_seg] = tape_seg(g, in, tape);
                rc = plan_of(g, in, &seg[n_seg++], 0, &keys, &plan[k], err);
                break;
            case MK_OP_ROUTER:
                seg[n_seg] = tape_seg(g, in, tape);
                router_plan(in, &seg[n_seg++], &plan[k], k - queue[w]);
                break;
            case MK_OP_EXPERT_UP:
                seg[n_seg] = expert_seg(g, in, route);
                rc = plan_of(g, in, &seg[n_seg++], 0, &keys, &plan[k], err);
                break;
            case MK_OP_EXPERT_DOWN:
                seg[n_seg] = expert_seg(g, in, route);
                down_plan(in, &seg[n_seg++], &plan[k]);
                pairs_plan(g, in, &plan[k]);
                break;
            case MK_OP_MLA_PARTIAL:
            case MK_OP_GQA_PARTIAL:
                seg[n_seg++] = cache_seg(in, k);
                break;
            default: break;
            }
            if (in->opcode == MK_OP_EXPERT_UP || in->opcode == MK_OP_EXPERT_DOWN) {
                if (route || last) last = &seg[n_seg - 1];
                route = NULL;
            }
        }
        release(g, route, last, seg, &n_seg);
        if (!rc) asides(insn, plan, queue[w], queue[w + 1]);
        first[w + 1] = n_seg;
    }
    if (!rc) rc = attention_plans(g, insn, queue, W, plan, err);
    for (uint32_t k = 0; k < n_insn; k++) plan[k].one = one_row(&insn[k], &plan[k]);
    for (uint32_t s = 0; s < n_seg; s++) /* others read the cache themselves */
        if (seg[s].flags & MK_SEG_CACHE && plan[seg[s].base].one != MK_ONE_MLA && plan[seg[s].base].one != MK_ONE_GQA) memset(&seg[s], 0, sizeof seg[s]);
    int ok = !rc && (a->insn = (mk_insn *)uploaded(g, "program", insn, (uint64_t)n_insn * sizeof *insn, err)) &&
             (a->plan = (mk_plan *)uploaded(g, "plans", plan, (uint64_t)n_insn * sizeof *plan, err)) &&
             (a->queue = (uint32_t *)uploaded(g, "queues", queue, 4ull * (W + 1), err)) &&
             (a->seg = (mk_seg *)uploaded(g, "segments", seg, n_seg * sizeof *seg, err)) &&
             (a->seg_first = (uint32_t *)uploaded(g, "index of segments", first, 4ull * (W + 1), err));
    free(seg), free(plan), free(first), free(keys.key);
    return rc ? rc : ok ? MK_OK : MK_E_CAPACITY;
}

/* What packet q of slice s carries, which begins with value `first` and has n. */
static uint32_t map_word(const mk_vec *v, uint32_t s, uint32_t first, uint32_t n, uint32_t q)
{
    const uint32_t per = v->dtype == MK_F32 ? 3 : 6, at = q * per, values = at >= n ? 0 : n - at < per ? n - at : per;
    const uint32_t trailer = (uint32_t)mk_slice_words(v, n) - 1 - 3 * q; /* the last word of the slice, if it has one */
    return MK_MAP_WORD(values ? first + at : 0, values, v->trailer && trailer < 3 ? trailer : 3u, s & 1023);
}

/* The vectors as the kernel has them: their slice starts packed into one table for shared memory, without those of SAMPLE's statistics, which
 * are many and all alike. */
static int upload_vectors(mk_gpu *g, mk_err *err)
{
    const mk_program *p = g->prog;
    const mk_program_info *i = &p->info;
    mk_vec *vec = (mk_vec *)malloc(i->n_vec * sizeof *vec);
    uint32_t gains = 0; /* words */
    int rc = gains_wanted(g, &gains, err);
    if (!rc) rc = deltas_wanted(p, &g->delta, &g->n_delta, err);
    const uint32_t deltas = g->n_delta * MK_DELTA_TABLE_WORDS + 3;
    const uint32_t room = (uint32_t)(i->exchange_bytes / 16 + 1) + MK_MAX_VEC * (32 * MK_PAIR_WORDS + 3) + deltas; /* words: a packet has 16 places or more, and a word here; pairs have a table a vector, DELTA_STEPs that differ one each */
    uint32_t *map = (uint32_t *)calloc(room + gains + 3, sizeof *map), n_map = 0;
    uint16_t *start = (uint16_t *)calloc(MK_MAX_START, sizeof *start);
    uint32_t n = 0, stats = MK_NONE;
    if (!rc && (!vec || !start || !map)) rc = mk_fail(err, MK_E_CAPACITY, "out of memory");
    for (uint32_t k = 0; k < i->n_insn; k++)
        if (p->insn[k].opcode == MK_OP_SAMPLE) stats = p->insn[k].wait[0].vec;
    for (uint32_t k = 0; k < i->n_vec && !rc; k++) {
        vec[k] = p->vec[k];
        if (vec[k].scope != MK_PACKET || k == stats) continue;
        const uint32_t *from = mk_vec_starts(p, &p->vec[k]);
        vec[k].start_index = n;
        if (n + vec[k].nslice + 1 > MK_MAX_START)
            rc = mk_fail(err, MK_E_PROGRAM, "the kernel's limit is %u slices in all, vector %s is over it", MK_MAX_START, vec[k].name);
        else if (vec[k].width > 0xffff)
            rc = mk_fail(err, MK_E_PROGRAM, "vector %s: the kernel's limit is 65,535 values, found %u", vec[k].name, vec[k].width);
        else if (vec[k].trailer && vec[k].nslice > 1023)
            rc = mk_fail(err, MK_E_PROGRAM, "vector %s: the kernel's limit is 1,023 slices with trailers, found %u", vec[k].name, vec[k].nslice);
        for (uint32_t s = 0; s <= vec[k].nslice && !rc; s++) start[n++] = (uint16_t)from[s];
        g->map_at[k] = n_map;
        for (uint32_t s = 0; s < vec[k].nslice && !rc; s++)
            for (uint32_t q = 0; q < vec[k].slice_packets; q++) map[n_map++] = map_word(&vec[k], s, from[s], from[s + 1] - from[s], q);
        uint32_t pair = 0; /* its packets */
        for (uint32_t q = 0; q < i->n_insn && !pair && vec[k].flags & MK_VEC_DYNAMIC; q++)
            if (p->insn[q].opcode == MK_OP_EXPERT_DOWN && p->insn[q].wait[0].vec == k) pair = pair_packets(g, &p->insn[q]);
        for (uint32_t s = 0; s <= vec[k].nslice && pair; s++) pair = from[s] % 2 ? 0 : pair;
        if (!pair || pair > MK_PAIR_MOST || rc) continue;
        g->pair_at[k] = n_map = n_map + 3 & ~3u; /* 16-byte loads */
        mk_pair_table(map + n_map, from, pair, vec[k].slice_packets);
        n_map += 32 * MK_PAIR_WORDS;
    }
    for (uint32_t k = 0; k < i->n_insn && !rc && g->n_queries < sizeof g->queries / sizeof *g->queries; k++) {
        if (p->insn[k].opcode != MK_OP_MLA_PARTIAL || queries_of(g, &p->insn[k])) continue;
        n_map += n_map & 1; /* pairs of words */
        const uint32_t all = queries_table(p, &p->insn[k], map + n_map, room > n_map + deltas ? room - n_map - deltas : 0);
        g->queries[g->n_queries++] = (mk_table){k, all ? n_map : 0};
        n_map += all;
    }
    n_map = n_map + 3 & ~3u;
    for (uint32_t k = 0; k < g->n_delta && !rc; k++) {
        if (!delta_table(p, &p->insn[g->delta[k].insn], (mk_delta_places *)(map + n_map))) continue;
        g->delta[k].at = n_map;
        n_map += MK_DELTA_TABLE_WORDS; /* whole sixteens of bytes, as gammas want them */
    }
    for (uint32_t k = 0; k < g->n_gain; k++) {
        mk_gain *t = &g->gain[k];
        t->map = g->map_at[t->vec] + t->slice0 * p->vec[t->vec].slice_packets;
        t->at = n_map;
        n_map += t->packets * MK_GAIN_WORDS(t->per);
    }
    if (!rc && (!(g->gain_there = (mk_gain *)uploaded(g, "places of gammas", g->gain, g->n_gain * sizeof *g->gain, err)) ||
                !(g->args.vec = (mk_vec *)uploaded(g, "vectors", vec, i->n_vec * sizeof *vec, err)) ||
                !(g->args.start = (uint16_t *)uploaded(g, "slice starts", start, (n + 7u & ~7u) * sizeof *start, err)) ||
                !(g->args.map = (uint32_t *)uploaded(g, "packet map", map, n_map * sizeof *map, err))))
        rc = MK_E_CAPACITY;
    g->args.n_start = n;
    free(vec), free(start), free(map);
    return rc;
}

static int allocate(mk_gpu *g, mk_err *err)
{
    const mk_program *p = g->prog;
    const mk_program_info *i = &p->info;
    mk_gpu_args *a = &g->args;
    uint32_t slots = g->cfg.slots, context = g->cfg.context;
    uint64_t steps = (uint64_t)MK_STEP_RING * MK_STEP_PACKETS * 16;
    g->max_pages = (context + MK_PAGE - 1) / MK_PAGE;
    a->n_vec = i->n_vec;
    a->workers = i->workers;
    a->packets = (uint32_t)(i->exchange_bytes / 16);
    a->n_insn = i->n_insn;
    a->unloaded = (uint32_t)(g->cfg.unloaded != 0);
    a->ahead = i->expert_bytes || a->unloaded ? 0 : MK_SCOUT_BYTES;
    a->sweep = g->cfg.sweep ? g->cfg.sweep : MK_SWEEP_STEPS;
    a->max_pages = g->max_pages;
    a->local_bytes = (uint32_t)i->local_bytes;
    a->state_slot_bytes = i->state_slot_bytes;
    a->kv_page_bytes = i->kv_page_bytes;
    /* The scout looks beyond the worker's tape; EXPERT_DOWN may ask for MK_PAIR_MOST packets from any on, though it looks at its own alone */
    int ok = (a->tape = (uint8_t *)device_memory(g, "tapes", i->tape_bytes + a->ring.stages * a->ring.stride + a->ahead, err)) &&
             (a->expert = (uint8_t *)device_memory(g, "experts", i->expert_bytes, err)) &&
             (a->embed = (uint8_t *)device_memory(g, "embedding", i->embed_bytes, err)) &&
             (a->param = (float *)device_memory(g, "parameters", i->param_floats * 4, err)) &&
             (a->exchange = (uint8_t *)device_memory(g, "exchange", i->exchange_bytes + 8192, err)) &&
             (a->bulk = (uint8_t *)device_memory(g, "bulk vectors", i->bulk_bytes, err)) &&
             (a->counter = (uint32_t *)device_memory(g, "counters", 4ull * i->n_counter, err)) &&
             (g->sampling = (mk_sampling *)device_memory(g, "sampling parameters", slots * sizeof(mk_sampling), err)) &&
             (a->draw = (mk_draws *)device_memory(g, "draws", sizeof(mk_draws), err)) &&
             (a->state = (uint8_t *)device_memory(g, "recurrent state", i->state_slots * i->state_slot_bytes, err)) &&
             (a->kv = (uint8_t *)device_memory(g, "KV cache", (uint64_t)i->kv_layers * i->kv_pages * i->kv_page_bytes, err)) &&
             (g->pages = (uint32_t *)device_memory(g, "page tables", 4ull * slots * g->max_pages, err)) &&
             (g->sched = (mk_sched *)device_memory(g, "schedule", sizeof(mk_sched), err)) &&
             (g->st = (mk_sched_slot *)device_memory(g, "schedule", slots * (sizeof(mk_sched_slot) + sizeof(mk_sched_rest) + 4), err)) &&
             (a->step_ring = (uint4 *)device_memory(g, "step ring", steps + MK_STEP_PACKETS * 16 + MK_MAX_ROWS * MK_SCHED_EVENTS * sizeof(mk_event), err)) &&
             (a->trace = (uint4 *)device_memory(g, "trace", (uint64_t)mk_trace_limit(i->n_insn) * i->n_insn * sizeof(mk_trace_record), err)) &&
             (a->abort = (uint32_t *)device_memory(g, "abort word", 16, err)) &&
             (a->position = (uint32_t *)device_memory(g, "positions", 4ull * i->workers, err)) &&
             (g->submit = (mk_submit_packets *)pinned_memory(g, "submit ring", sizeof(mk_submit_packets) * MK_SUBMIT_RING, err)) &&
             (g->event = (mk_event *)pinned_memory(g, "token ring", sizeof(mk_event) * MK_EVENT_RING, err)) &&
             (g->event_read = (uint32_t *)pinned_memory(g, "token ring", 64, err)) &&
             (g->inbox = (mk_submit *)device_memory(g, "submit ring", sizeof(mk_submit) * MK_SUBMIT_RING, err)) &&
             (g->slot = (mk_slot *)pinned_memory(g, "slots", slots * sizeof(mk_slot), err)) &&
             (g->page = (uint32_t *)pinned_memory(g, "page tables", 4ull * slots * g->max_pages, err)) &&
             (g->token = (uint32_t *)pinned_memory(g, "token logs", 4ull * slots * context, err)) &&
             (g->fault = (mk_fault *)pinned_memory(g, "fault record", sizeof(mk_fault), err)) &&
             (g->heartbeat = (uint32_t *)pinned_memory(g, "heartbeat", MK_HEARTBEAT_BYTES, err)) &&
             (g->bounce = (uint8_t *)pinned_memory(g, "transfers", MK_BOUNCE, err));
    if (!ok) return err ? err->code : MK_E_CAPACITY;
    g->rest = (mk_sched_rest *)(g->st + slots);
    g->active = (uint32_t *)(g->rest + slots);
    a->page = g->pages;
    a->sched = g->sched;
    a->submit = g->submit;
    a->sampling = g->sampling;
    a->fault = g->fault;
    a->heartbeat = g->heartbeat;
    a->timeout_ns = (uint64_t)(g->cfg.timeout_ms ? g->cfg.timeout_ms : 2000) * 1000000u;
    int rc = upload_vectors(g, err);
    return rc ? rc : upload_queues(g, p->insn, p->queue, 1, a, err);
}

/* What neither the kernel nor the LOCAL vectors need of a worker's shared memory is the ring's. */
static int ring_of(const mk_program *p, uint32_t smem, mk_ring *ring, mk_err *err)
{
    const uint64_t local = (p->info.local_bytes + 127) & ~127ull, fixed = sizeof(mk_shared) + local + MK_TILE_BYTES; /* a tile may reach past the last stage */
    uint32_t scales = 0, least = MK_STAGE_LEAST;
    for (uint32_t k = 0; k < p->queue[p->info.workers]; k++) {
        const mk_insn *in = &p->insn[k];
        const uint32_t b = scales_of(in); /* whole lines */
        if (b > scales) scales = b;
        if (in->opcode == MK_OP_GEMV && in->gemv.flags & MK_GEMV_X_F32 && 2 * in->gemv.k > least) least = (2 * in->gemv.k + 127) & ~127u; /* gate.cuh: all of its row */
    }
    const uint32_t need = MK_STAGES * (least + scales);
    if (fixed + need > smem)
        return mk_fail(err, MK_E_PROGRAM, "%llu bytes of local vectors: with the kernel's own %u that is over a worker's %u bytes of shared memory",
                       (unsigned long long)p->info.local_bytes, (uint32_t)(fixed - local) + need, smem);
    *ring = (mk_ring){(uint32_t)(sizeof(mk_shared) + local), (smem - (uint32_t)fixed) / MK_STAGES & ~127u, MK_STAGES, scales};
    return MK_OK;
}

int mk_gpu_new(const mk_program *p, const mk_gpu_config *cfg, mk_gpu **out, mk_err *err)
{
    *out = NULL;
    mk_gpu_info info;
    int rc = mk_gpu_probe(cfg->device, &info, err);
    if (rc) return rc;
    if ((rc = check_program(p, info.sms, err))) return rc;
    mk_ring ring;
    if ((rc = ring_of(p, info.smem, &ring, err))) return rc;
    mk_gpu *g = (mk_gpu *)calloc(1, sizeof *g);
    if (!g) return mk_fail(err, MK_E_CAPACITY, "out of memory");
    g->prog = p;
    g->cfg = *cfg;
    g->device = cfg->device;
    g->entry = mk_kernel_entry(cfg->laid ? (enum mk_laid)(cfg->laid - 1) : mk_laid_for(p));
    g->smem = info.smem;
    g->args.ring = ring;
    cudaError_t e;
    int blocks = 0;
    if ((e = cudaSetDevice(g->device)) || (e = cudaStreamCreateWithFlags(&g->run, cudaStreamNonBlocking)) ||
        (e = cudaStreamCreateWithFlags(&g->copy, cudaStreamNonBlocking)) || (e = cudaEventCreateWithFlags(&g->left, cudaEventDisableTiming)) ||
        (e = cudaEventCreateWithFlags(&g->copied, cudaEventDisableTiming)) ||
        (e = cudaFuncSetAttribute(g->entry, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)g->smem)) ||
        (e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, g->entry, MK_THREADS, g->smem))) {
        mk_gpu_destroy(&g);
        return cuda_fail(err, e, "preparing the kernel");
    }
    if (blocks < 1) {
        mk_gpu_destroy(&g);
        return mk_fail(err, MK_E_DEVICE, "the kernel does not fit an SM: %u bytes of shared memory, %d threads", p->info.smem_limit, MK_THREADS);
    }
    if ((rc = allocate(g, err))) {
        mk_gpu_destroy(&g);
        return rc;
    }
    *out = g;
    return MK_OK;
}

int mk_gpu_upload(mk_gpu *g, const mk_memory *host, mk_err *err)
{
    const mk_program_info *i = &g->prog->info;
    cudaError_t e;
    if ((e = cudaMemcpy((void *)g->args.tape, host->tape, i->tape_bytes, cudaMemcpyHostToDevice)) ||
        (e = cudaMemcpy((void *)g->args.expert, host->expert, i->expert_bytes, cudaMemcpyHostToDevice)) ||
        (e = cudaMemcpy((void *)g->args.embed, host->embed, i->embed_bytes, cudaMemcpyHostToDevice)) ||
        (e = cudaMemcpy((void *)g->args.param, host->param, i->param_floats * 4, cudaMemcpyHostToDevice)))
        return cuda_fail(err, e, "uploading weights");
    return MK_OK;
}

int mk_gpu_download(mk_gpu *g, mk_memory *host, mk_err *err)
{
    const mk_program_info *i = &g->prog->info;
    cudaError_t e;
    if ((e = cudaMemcpy(host->tape, g->args.tape, i->tape_bytes, cudaMemcpyDeviceToHost)) ||
        (e = cudaMemcpy(host->expert, g->args.expert, i->expert_bytes, cudaMemcpyDeviceToHost)) ||
        (e = cudaMemcpy(host->embed, g->args.embed, i->embed_bytes, cudaMemcpyDeviceToHost)) ||
        (e = cudaMemcpy(host->param, g->args.param, i->param_floats * 4, cudaMemcpyDeviceToHost)))
        return cuda_fail(err, e, "downloading weights");
    return MK_OK;
}

void mk_gpu_weights(const mk_gpu *g, mk_memory *device)
{
    device->tape = (uint8_t *)g->args.tape;
    device->expert = (uint8_t *)g->args.expert;
    device->embed = (uint8_t *)g->args.embed;
    device->param = (float *)g->args.param;
}

void mk_gpu_memory(const mk_gpu *g, mk_memory *device)
{
    const mk_gpu_args *a = &g->args;
    memset(device, 0, sizeof *device);
    mk_gpu_weights(g, device);
    device->exchange = a->exchange;
    device->bulk = a->bulk;
    device->counter = a->counter;
    device->state = a->state;
    device->kv = a->kv;
    device->local = g->local;
    device->slot = g->slot;
    device->page = g->pages;
    device->token = g->token;
    device->n_slots = g->cfg.slots;
    device->max_pages = g->max_pages;
    device->max_context = g->cfg.context;
}

int mk_gpu_upload_params(mk_gpu *g, const float *values, uint64_t at, uint64_t n, mk_err *err)
{
    cudaError_t e = cudaMemcpy((float *)g->args.param + at, values, n * sizeof *values, cudaMemcpyHostToDevice);
    return e ? cuda_fail(err, e, "uploading parameters") : MK_OK;
}

/* ---- running -------------------------------------------------------------------------------------------------------- */

/* Everything put into the copy stream so far is through. While the kernel is resident no call that synchronises may be made: an event is recorded and
 * asked. A copy engine needs microseconds, so where there are cores to spare nobody sleeps. */
static cudaError_t wait_copied(mk_gpu *g)
{
    struct timespec t;
    uint64_t until = 0;
    cudaError_t e = cudaEventRecord(g->copied, g->copy);
    for (uint32_t n = 1; !e && (e = cudaEventQuery(g->copied)) == cudaErrorNotReady; n++) {
        e = cudaSuccess;
        if (n % 1024) continue;
        clock_gettime(CLOCK_MONOTONIC, &t);
        uint64_t now = (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
        if (!until) until = now + MK_COPY_MS;
        if (now > until) return cudaErrorTimeout;
        sched_yield();
    }
    return e;
}

/* Packets all carry epoch0, which nobody waits for. */
static cudaError_t reset_exchange(mk_gpu *g, uint32_t epoch0)
{
    uint64_t bytes = g->prog->info.exchange_bytes;
    uint32_t *q = (uint32_t *)g->bounce;
    for (uint32_t i = 0; i < MK_BOUNCE / 16; i++) {
        q[4 * i] = q[4 * i + 1] = q[4 * i + 2] = 0;
        q[4 * i + 3] = epoch0;
    }
    for (uint64_t at = 0; at < bytes; at += MK_BOUNCE) {
        cudaError_t e = cudaMemcpyAsync(g->args.exchange + at, q, bytes - at < MK_BOUNCE ? bytes - at : MK_BOUNCE, cudaMemcpyHostToDevice, g->copy);
        if (e) return e;
    }
    return wait_copied(g);
}

/* What is added to begins with zero. */
static cudaError_t reset_sums(mk_gpu *g)
{
    const mk_program *p = g->prog;
    cudaError_t e = cudaSuccess;
    for (uint32_t v = 0; v < p->info.n_vec && !e; v++)
        if (mk_vec_sums(&p->vec[v])) e = cudaMemset(g->args.bulk + p->vec[v].offset, 0, p->vec[v].width);
    return e;
}

static int reset(mk_gpu *g, uint32_t epoch0, mk_err *err)
{
    mk_gpu_args *a = &g->args;
    uint32_t slots = g->cfg.slots;
    mk_sched s;
    memset(&s, 0, sizeof s);
    s.submit = g->inbox;
    s.event = g->event;
    s.event_read = g->event_read;
    s.slot = g->slot;
    s.sampling = g->sampling;
    s.token = g->token;
    s.max_context = g->cfg.context;
    s.n_slots = slots;
    s.apart = g->prog->info.expert_bytes != 0;
    s.st = g->st;
    s.rest = g->rest;
    s.active = g->active;
    a->epoch0 = epoch0;
    g->submit_next = 0;
    memset(g->submit, 0, sizeof(mk_submit_packets) * MK_SUBMIT_RING);
    memset(g->event, 0, sizeof(mk_event) * MK_EVENT_RING);
    memset(g->fault, 0, sizeof *g->fault);
    memset(g->heartbeat, 0, MK_HEARTBEAT_BYTES);
    g->event_read[0] = 0;
    cudaError_t e;
    if ((e = cudaSetDevice(g->device)) || (e = reset_exchange(g, epoch0)) || (e = cudaMemset(a->counter, 0, 4ull * g->prog->info.n_counter)) ||
        (e = cudaMemset(a->draw, 0, sizeof(mk_draws))) || (e = reset_sums(g)) || (e = gains_make(g)) ||
        (e = cudaMemset(a->step_ring, 0, (size_t)MK_STEP_RING * MK_STEP_PACKETS * 16)) || (e = cudaMemset(a->abort, 0, 4)) ||
        (e = cudaMemset(a->position, 0, 4ull * g->prog->info.workers)) ||
        (e = cudaMemset(g->st, 0, slots * (sizeof(mk_sched_slot) + sizeof(mk_sched_rest) + 4))) || (e = cudaMemcpy(g->sched, &s, sizeof s, cudaMemcpyHostToDevice)) ||
        (e = cudaDeviceSynchronize()))
        return cuda_fail(err, e, "starting the kernel");
    return MK_OK;
}

int mk_gpu_start(mk_gpu *g, uint32_t epoch0, mk_err *err)
{
    cudaError_t e;
    void *arg[1] = {&g->args};
    int rc = reset(g, epoch0, err);
    if (rc) return rc;
    if ((e = cudaLaunchKernel(g->entry, dim3(g->prog->info.workers), dim3(MK_THREADS), arg, g->smem, g->run)) || (e = cudaEventRecord(g->left, g->run)))
        return cuda_fail(err, e, "starting the kernel");
    g->running = 1;
    return MK_OK;
}

int mk_gpu_prepare(mk_gpu *g, uint32_t epoch0, const mk_insn *insn, const uint32_t *queue, uint32_t sets, mk_gpu_args *args, uint32_t *smem, mk_err *err)
{
    if (g->running) return mk_fail(err, MK_E_BUG, "preparing: the kernel is resident");
    int rc = reset(g, epoch0, err);
    *args = g->args;
    *smem = g->smem;
    return rc ? rc : upload_queues(g, insn, queue, sets, args, err);
}

/* The kernel has left or the time is over. */
static int wait_left(mk_gpu *g, uint32_t ms)
{
    for (uint32_t i = 0; i < 10 * ms; i++) {
        if (mk_gpu_left(g)) return 1;
        usleep(100);
    }
    return mk_gpu_left(g);
}

static int local_image(mk_gpu *g, mk_err *err)
{
    if (!g->local) g->local = (uint8_t *)device_memory(g, "image of the local vectors", g->prog->info.workers * g->prog->info.local_bytes, err);
    return g->local ? MK_OK : MK_E_CAPACITY;
}

static int transfer(mk_gpu *g, const mk_memory *m, uint32_t regions, enum cudaMemcpyKind to, mk_err *err)
{
    const mk_program_info *i = &g->prog->info;
    const mk_gpu_args *a = &g->args;
    int rc = local_image(g, err);
    if (rc) return rc;
    const struct {
        uint32_t region;
        void *host, *device;
        uint64_t bytes;
    } part[] = {
        {MK_REGION_EXCHANGE, m->exchange, a->exchange, i->exchange_bytes},
        {MK_REGION_BULK, m->bulk, a->bulk, i->bulk_bytes},
        {MK_REGION_COUNTER, m->counter, a->counter, 4ull * i->n_counter},
        {MK_REGION_LOCAL, m->local, g->local, i->workers * i->local_bytes},
        {MK_REGION_STATE, m->state, a->state, i->state_slots * i->state_slot_bytes},
        {MK_REGION_KV, m->kv, a->kv, (uint64_t)i->kv_layers * i->kv_pages * i->kv_page_bytes},
        {MK_REGION_PAGE, m->page, g->pages, 4ull * g->cfg.slots * g->max_pages},
        {MK_REGION_PAGE, m->slot, g->slot, g->cfg.slots * sizeof(mk_slot)},
    };
    for (const auto &p : part) {
        if (!(regions & p.region) || !p.bytes) continue;
        int up = to == cudaMemcpyHostToDevice;
        cudaError_t e = cudaMemcpy(up ? p.device : p.host, up ? p.host : p.device, p.bytes, cudaMemcpyDefault);
        if (e) return cuda_fail(err, e, up ? "loading memory" : "storing memory");
    }
    return MK_OK;
}

int mk_gpu_load(mk_gpu *g, const mk_memory *host, uint32_t regions, mk_err *err)
{
    return transfer(g, host, regions, cudaMemcpyHostToDevice, err);
}

int mk_gpu_store(mk_gpu *g, mk_memory *host, uint32_t regions, mk_err *err)
{
    return transfer(g, host, regions, cudaMemcpyDeviceToHost, err);
}

/* The descriptors of `step` and of the step after it, which says "leave". The ring counts from the launch. */
static cudaError_t write_steps(mk_gpu *g, const mk_step *step)
{
    uint64_t bytes = (uint64_t)MK_STEP_RING * MK_STEP_PACKETS * 16;
    uint32_t *q = (uint32_t *)g->bounce;
    mk_step leave;
    memset(q, 0, bytes);
    memset(&leave, 0, sizeof leave);
    leave.seq = step->seq + 1;
    for (uint32_t seq = 0; seq < 2; seq++) {
        const uint32_t *word = (const uint32_t *)(seq ? &leave : step);
        for (uint32_t k = 0; k < sizeof *step / 4; k++) q[(seq * MK_STEP_PACKETS + k / 3) * 4 + k % 3] = word[k];
        for (uint32_t k = 0; k < MK_STEP_PACKETS; k++) q[(seq * MK_STEP_PACKETS + k) * 4 + 3] = seq + 1;
    }
    return cudaMemcpy(g->args.step_ring, q, bytes, cudaMemcpyHostToDevice);
}
static_assert(2 * MK_STEP_PACKETS * 16 <= MK_BOUNCE && MK_STEP_RING * MK_STEP_PACKETS * 16 <= MK_BOUNCE, "the step ring passes through the bounce buffer");

int mk_gpu_once(mk_gpu *g, const mk_insn *insn, const uint32_t *queue, const mk_step *step, uint32_t epoch0, uint32_t ms, mk_err *err)
{
    if (g->running) return mk_fail(err, MK_E_BUG, "one step: the kernel is resident");
    if (!step->nrows) return mk_fail(err, MK_E_BUG, "one step: no rows");
    int rc = local_image(g, err);
    if (rc) return rc;
    const mk_gpu_args kept = g->args;
    int first = g->n_alloc;
    rc = upload_queues(g, insn, queue, 1, &g->args, err);
    cudaError_t e = cudaSuccess;
    void *arg[1] = {&g->args};
    if (!rc) {
        g->args.epoch0 = epoch0;
        g->args.local_image = g->local;
        memset(g->fault, 0, sizeof *g->fault);
        if ((e = cudaMemcpy2D(g->sampling, sizeof(mk_sampling), &g->slot[0].sampling, sizeof(mk_slot), sizeof(mk_sampling), g->cfg.slots, cudaMemcpyHostToDevice)) ||
            (e = write_steps(g, step)) || (e = gains_make(g)) || (e = cudaMemset(g->args.abort, 0, 4)) || (e = cudaMemset(g->args.draw, 0, sizeof(mk_draws))) || (e = cudaDeviceSynchronize()) ||
            (e = cudaLaunchKernel(g->entry, dim3(g->prog->info.workers), dim3(MK_THREADS), arg, g->smem, g->run)) ||
            (e = cudaEventRecord(g->left, g->run)))
            rc = cuda_fail(err, e, "one step");
    }
    if (!rc) {
        g->running = 1;
        int left = wait_left(g, ms);
        char text[512];
        rc = mk_gpu_abort(g, 1000, err);
        if (!rc && mk_gpu_fault(g, text, sizeof text)) rc = mk_fail(err, MK_E_DEVICE, "%s", text);
        if (!rc && !left) rc = mk_fail(err, MK_E_DEVICE, "the kernel did not finish one step within %u ms", ms);
    }
    if (!g->running) /* else it may still read them */
        while (g->n_alloc > first) cudaFree(g->alloc[--g->n_alloc].p);
    g->args = kept;
    return rc;
}

mk_gpu_rings mk_gpu_sched_rings(mk_gpu *g)
{
    mk_gpu_rings r = {g->event, g->event_read, g->slot, g->page, g->token, g->max_pages};
    return r;
}

int mk_gpu_submit(mk_gpu *g, const mk_submit *s, mk_err *err)
{
    uint32_t taken = __atomic_load_n(&g->heartbeat[MK_BEAT_TAKEN], __ATOMIC_ACQUIRE);
    if (g->submit_next - taken >= MK_SUBMIT_RING) return mk_fail(err, MK_E_CAPACITY, "the submit ring is full (%u entries)", MK_SUBMIT_RING);
    if (s->op == MK_SUB_OPEN && s->slot < g->cfg.slots) {
        size_t at = (size_t)s->slot * g->max_pages;
        cudaError_t e = cudaMemcpyAsync(g->pages + at, g->page + at, 4ull * g->max_pages, cudaMemcpyHostToDevice, g->copy);
        if (!e) e = wait_copied(g);
        if (e) return cuda_fail(err, e, "handing over a page table");
    }
    mk_submit e = *s;
    mk_submit_complete(&e, g->slot, g->cfg.slots);
    mk_submit_pack(g->submit, &e, ++g->submit_next);
    return MK_OK;
}

uint32_t mk_gpu_steps(const mk_gpu *g)
{
    return __atomic_load_n(&g->heartbeat[MK_BEAT_STEPS], __ATOMIC_ACQUIRE);
}

int mk_gpu_left(mk_gpu *g)
{
    return !g->running || cudaEventQuery(g->left) != cudaErrorNotReady;
}

static int read_device(mk_gpu *g, const void *src, void *dst, uint64_t bytes, mk_err *err)
{
    for (uint64_t at = 0; at < bytes; at += MK_BOUNCE) {
        uint64_t n = bytes - at < MK_BOUNCE ? bytes - at : MK_BOUNCE;
        cudaError_t e = cudaMemcpyAsync(g->bounce, (const uint8_t *)src + at, n, cudaMemcpyDeviceToHost, g->copy);
        if (!e) e = wait_copied(g);
        if (e) return cuda_fail(err, e, "reading device memory");
        memcpy((uint8_t *)dst + at, g->bounce, n);
    }
    return MK_OK;
}

int mk_gpu_read_bulk(mk_gpu *g, uint64_t offset, void *dst, uint64_t bytes, mk_err *err)
{
    return read_device(g, g->args.bulk + offset, dst, bytes, err);
}

int mk_gpu_trace(mk_gpu *g, uint32_t k, mk_trace_record *r, mk_err *err)
{
    const uint64_t n = g->prog->info.n_insn;
    return read_device(g, g->args.trace + 2 * n * k, r, n * sizeof *r, err);
}

uint32_t mk_gpu_pulse(const mk_gpu *g)
{
    return mk_gpu_steps(g) + __atomic_load_n(&g->heartbeat[MK_BEAT_IDLE], __ATOMIC_RELAXED);
}

uint32_t mk_gpu_next_epoch(const mk_gpu *g)
{
    return g->args.epoch0 + (mk_gpu_steps(g) + 2) * MK_EPOCH_STRIDE;
}

/* The descriptor of the step under way; of no rows when there is none: SCHEDULE has not published it. */
static int read_step(mk_gpu *g, uint32_t steps, mk_step *step, mk_err *err)
{
    uint32_t q[MK_STEP_PACKETS * 4] = {0}, *word = (uint32_t *)step;
    int rc = read_device(g, mk_step_at(g->args.step_ring, steps), q, sizeof q, err);
    memset(step, 0, sizeof *step);
    const uint32_t n = mk_step_packets(q[1] < MK_MAX_ROWS ? q[1] : MK_MAX_ROWS);
    for (uint32_t k = 0; k < n && !rc; k++)
        if (q[4 * k + 3] != steps + 1) {
            step->seq = steps;
            return rc;
        }
    for (uint32_t k = 0; k < 3 * n && k < sizeof *step / 4 && !rc; k++) word[k] = q[k / 3 * 4 + k % 3];
    step->row[0].flags &= ~MK_ROW_INSTEAD;
    return rc;
}

int mk_gpu_snapshot(mk_gpu *g, mk_snapshot *s, mk_err *err)
{
    const mk_program_info *i = &g->prog->info;
    memset(s, 0, sizeof *s);
    s->prog = g->prog;
    s->epoch0 = g->args.epoch0;
    s->steps = mk_gpu_steps(g);
    s->submitted = g->submit_next;
    s->taken = __atomic_load_n(&g->heartbeat[MK_BEAT_TAKEN], __ATOMIC_ACQUIRE);
    s->events_read = g->event_read[0];
    s->live = !mk_gpu_left(g) && !mk_gpu_fault(g, s->kernel, sizeof s->kernel);
    s->position = (uint32_t *)calloc(i->workers, 4);
    s->counter = (uint32_t *)calloc(i->n_counter + 1, 4);
    s->exchange = (uint8_t *)malloc(i->exchange_bytes + 1);
    if (!s->position || !s->counter || !s->exchange) return mk_fail(err, MK_E_CAPACITY, "out of memory");
    int rc;
    if ((rc = read_device(g, g->args.exchange, s->exchange, i->exchange_bytes, err)) ||
        (rc = read_device(g, g->args.position, s->position, 4ull * i->workers, err)) ||
        (rc = read_device(g, g->args.counter, s->counter, 4ull * i->n_counter, err)) ||
        (rc = read_step(g, s->steps, &s->step, err)))
        return rc;
    s->published = __atomic_load_n(&g->heartbeat[MK_BEAT_EVENTS], __ATOMIC_RELAXED);
    s->streams = __atomic_load_n(&g->heartbeat[MK_BEAT_STREAMS], __ATOMIC_RELAXED);
    s->device_read = 1;
    /* The kernel may have given up meanwhile. */
    if (mk_gpu_fault(g, s->kernel, sizeof s->kernel) || mk_gpu_left(g)) s->live = 0;
    return MK_OK;
}

/* Who publishes slice `slice` of publication `pub` of a vector; NULL: it depends on the route. */
static const mk_insn *publisher(const mk_program *p, uint32_t vec, uint32_t pub, uint32_t slice, uint32_t *worker)
{
    for (uint32_t w = 0; w < p->info.workers; w++)
        for (uint32_t k = p->queue[w]; k < p->queue[w + 1]; k++) {
            const mk_insn *in = &p->insn[k];
            if (in->signal_vec != vec || in->signal_pub != pub || in->signal_slice != slice) continue;
            *worker = w;
            return in;
        }
    return NULL;
}

/* What is waited for that no vector carries. */
static const char *awaited(uint32_t kind)
{
    switch (kind) {
    case MK_FAULT_TAPE: return "weights of the static tape";
    case MK_FAULT_EXPERT: return "weights of an expert";
    case MK_FAULT_DRAW: return "another worker's part of a draw";
    case MK_FAULT_CACHE: return "pages of the cache";
    default: return "the loader";
    }
}

int mk_gpu_fault(const mk_gpu *g, char *text, size_t size)
{
    const mk_fault *f = g->fault;
    const mk_program *p = g->prog;
    if (!__atomic_load_n(&f->kind, __ATOMIC_ACQUIRE)) return 0;
    int n = snprintf(text, size, "step %u: worker %u waited %llu ms at instruction %u (%s, layer %d) for ", f->step, f->worker,
                     (unsigned long long)(g->args.timeout_ns / 1000000), f->seq, mk_opcode_name(f->opcode), f->layer == MK_NONE ? -1 : (int)f->layer);
    if (n < 0 || (size_t)n >= size) return 1;
    text += n;
    size -= (size_t)n;
    if (f->kind == MK_FAULT_PACKET) {
        const mk_vec *v = &p->vec[f->vec];
        uint32_t slice = f->slice0 + f->packet / v->slice_packets, w = 0;
        const mk_insn *in = v->flags & MK_VEC_DYNAMIC ? NULL : publisher(p, f->vec, f->pub, slice, &w);
        n = snprintf(text, size, "vector %s publication %u slice %u row %u: expected epoch %#x, found %#x", v->name, f->pub, slice, f->row, f->expected,
                     f->found);
        if (in && n > 0 && (size_t)n < size)
            snprintf(text + n, size - (size_t)n, "; it comes from worker %u, instruction %u (%s, layer %d)", w, in->seq, mk_opcode_name(in->opcode),
                     in->layer == MK_NONE ? -1 : (int)in->layer);
    } else if (f->kind == MK_FAULT_COUNTER) {
        snprintf(text, size, "counter of %s publication %u: expected %u, found %u", p->vec[f->vec].name, f->pub, f->expected, f->found);
    } else {
        snprintf(text, size, "%s", awaited(f->kind));
    }
    return 1;
}

int mk_gpu_abort(mk_gpu *g, uint32_t ms, mk_err *err)
{
    if (!g->running) return MK_OK;
    if (!mk_gpu_left(g)) {
        *(uint32_t *)g->bounce = 1;
        cudaMemcpyAsync(g->args.abort, g->bounce, 4, cudaMemcpyHostToDevice, g->copy);
        wait_left(g, ms);
    }
    cudaError_t e = cudaEventQuery(g->left);
    if (e == cudaErrorNotReady) return mk_fail(err, MK_E_DEVICE, "the kernel does not leave, not even when aborted");
    g->running = 0;
    return e ? cuda_fail(err, e, "the kernel") : MK_OK;
}

int mk_gpu_stop(mk_gpu *g, uint32_t ms, mk_err *err)
{
    if (!g->running) return MK_OK;
    mk_submit stop;
    memset(&stop, 0, sizeof stop);
    stop.op = MK_SUB_STOP;
    int clean = mk_gpu_submit(g, &stop, err) == MK_OK && wait_left(g, ms);
    int rc = mk_gpu_abort(g, 2 * ms, err);
    char text[512];
    if (rc) return rc;
    if (mk_gpu_fault(g, text, sizeof text)) return mk_fail(err, MK_E_DEVICE, "%s", text);
    return clean ? MK_OK : mk_fail(err, MK_E_DEVICE, "the kernel did not stop within %u ms and was aborted", ms);
}

void mk_gpu_destroy(mk_gpu **pg)
{
    mk_gpu *g = *pg;
    if (!g) return;
    mk_gpu_stop(g, 1000, NULL);
    for (int i = 0; i < g->n_alloc; i++)
        if (g->alloc[i].pinned)
            cudaFreeHost(g->alloc[i].p);
        else
            cudaFree(g->alloc[i].p);
    if (g->left) cudaEventDestroy(g->left);
    if (g->run) cudaStreamDestroy(g->run);
    if (g->copy) cudaStreamDestroy(g->copy);
    if (g->copied) cudaEventDestroy(g->copied);
    free(g->gain);
    free(g->delta);
    free(g);
    *pg = NULL;
}
