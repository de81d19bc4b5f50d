/* What the resident kernel's roles (kernel.cu) do differently when they are one of the many kernels of a step: megakernel/baseline.cu compiles kernel.cu a second time
 * with MK_PHASED. Everything here is empty or constant without it.
 *
 * Such a kernel has a part of every worker's queue. It runs one step's part and leaves. Its prologue and its loader begin before the kernel before it is
 * through (programmatic dependent launch); whoever reads what other kernels wrote waits for that first. LOCAL vectors that a later kernel needs go through
 * device memory. */
#ifndef MK_PHASED_CUH
#define MK_PHASED_CUH

#include "megakernel/device.cuh"

#ifdef MK_PHASED

#define MK_ONE_STEP 1

typedef struct mk_phase_args {
    uint64_t load, save;        /* LOCAL vectors by number: megakernel/phases.h */
    uint8_t *image;             /* [workers][stride]: LOCAL memory, then mk_pairs */
    uint32_t stride, routes;    /* routes: number of ROUTE's vector, or MK_NONE */
    uint32_t rows;              /* of every step */
    const uint32_t *next_first; /* [workers + 1] of the kernel after this one, as mk_gpu_args.seg_first */
    uint32_t prefetch;          /* bytes of its first segments that a worker fetches into L2 when its own are issued */
    uint32_t first;             /* 1: first kernel of a step */
} mk_phase_args;

/* The kernel's parameter; roles get &args and find the rest behind it. */
typedef struct mk_phased_args {
    mk_gpu_args args;
    mk_phase_args phase;
} mk_phased_args;

MK_DEV const mk_phase_args *mk_phase(const mk_gpu_args *a)
{
    return &((const mk_phased_args *)a)->phase;
}
/* What the kernels before this one wrote may be read from here on. */
MK_DEV void mk_phase_wait(void)
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
/* The kernel's first act, by all threads: the next one may be put onto SMs that are free. The first instructions are asked for. */
MK_DEV void mk_phase_begin(const mk_gpu_args *a)
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (threadIdx.x < 4 && a->queue[blockIdx.x] + threadIdx.x < a->queue[blockIdx.x + 1])
        asm volatile("prefetch.global.L1 [%0];" ::"l"(a->insn + a->queue[blockIdx.x] + threadIdx.x));
}
/* By the controller. Its number and the descriptor of the step are old news in every kernel but a step's first: an SM has room for one block, so this one began
 * when one of the kernel before had left, which had waited for the kernel before it to be through. */
MK_DEV uint32_t mk_first_step(const mk_gpu_args *a)
{
    if (mk_phase(a)->first) mk_phase_wait();
    return *(volatile uint32_t *)&a->sched->step; /* SCHEDULE counts it up in a step's last kernel */
}
MK_DEV uint8_t *mk_phase_image(const mk_gpu_args *a)
{
    const mk_phase_args *p = mk_phase(a);
    return p->image + (size_t)blockIdx.x * p->stride;
}
/* Routes of the kernel before, where this kernel's queue does not make its own. */
MK_DEV const mk_routes *mk_phase_routes(const mk_gpu_args *a)
{
    const mk_phase_args *p = mk_phase(a);
    if (p->routes == MK_NONE || !(p->load >> p->routes & 1)) return 0;
    return (const mk_routes *)(mk_phase_image(a) + mk_sh()->vec[p->routes].offset);
}
/* All compute threads; nothing else touches LOCAL memory meanwhile. */
MK_DEV void mk_phase_carry(const mk_gpu_args *a, bool out)
{
    const mk_phase_args *p = mk_phase(a);
    const mk_shared *sh = mk_sh();
    uint8_t *image = mk_phase_image(a);
    uint64_t mask = out ? p->save : p->load;
    if (!mask) return;
    if (out) mk_sync();
    for (; mask; mask &= mask - 1) {
        const uint32_t v = (uint32_t)__ffsll((long long)mask) - 1, routes = v == p->routes;
        const uint32_t bytes = routes ? sh->vec[v].width : sh->vec[v].width / MK_MAX_ROWS * p->rows;
        uint8_t *here = mk_local_memory(a) + sh->vec[v].offset, *there = image + sh->vec[v].offset;
        uint32_t *dst = (uint32_t *)(out ? there : here), *src = (uint32_t *)(out ? here : there);
        for (uint32_t i = threadIdx.x; i < (bytes + 3) / 4; i += MK_COMPUTE) dst[i] = src[i];
        if (routes) {
            uint32_t *pairs = (uint32_t *)&sh->pairs, *kept = (uint32_t *)(image + a->local_bytes);
            for (uint32_t i = threadIdx.x; i < sizeof sh->pairs / 4; i += MK_COMPUTE) *(out ? kept + i : pairs + i) = *(out ? pairs + i : kept + i);
        }
    }
    if (!out) mk_sync();
}
static_assert(sizeof(mk_pairs) % 4 == 0, "carried by words");
/* By the loader, which is one lane, when it has nothing more to issue: what the next kernel's loader will ask for first. */
MK_DEV void mk_phase_prefetch(const mk_gpu_args *a)
{
    const mk_phase_args *p = mk_phase(a);
    uint32_t left = p->prefetch;
    if (!left || !p->next_first) return;
    for (uint32_t i = p->next_first[blockIdx.x]; i < p->next_first[blockIdx.x + 1] && left; i++) {
        const mk_seg s = a->seg[i];
        if (s.T || s.flags & MK_SEG_CACHE) continue; /* who knows which experts, which pages */
        uint32_t bytes = s.scales + s.bytes;
        if (!bytes) continue; /* taken out: gpu.cu */
        bytes = (bytes < left ? bytes : left) & ~127u;
        for (uint32_t at = 0; at < bytes; at += 16384) {
            uint32_t n = bytes - at < 16384 ? bytes - at : 16384;
            mk_bulk_prefetch(a->tape + s.base + at, n);
        }
        left -= bytes;
        if (bytes < 128) break;
    }
}

#else

#define MK_ONE_STEP 0

MK_DEV void mk_phase_wait(void) {}
MK_DEV const mk_routes *mk_phase_routes(const mk_gpu_args *) { return 0; }
MK_DEV void mk_phase_carry(const mk_gpu_args *, bool) {}
MK_DEV void mk_phase_prefetch(const mk_gpu_args *) {}

#endif
#endif
