/* The resident kernel: one block a worker, launched once, leaves when SCHEDULE is told to stop or somebody aborts.
 *
 *   warps 0-15   compute: the instructions of the queue, one after the other, all warps on each
 *   controller   waits for the next step descriptor, then feeds the queue's instructions, a few ahead
 *   static       streams the worker's tape into its ring, over instruction, layer and step boundaries
 *   expert       waits for the route of a layer, then streams the slices that fall to this worker
 *   courier      on SCHEDULE's worker: fetches the host's words, takes events to the host (instructions/schedule.cuh)
 *
 * On abort every wait falls through; the compute warps finish what they were fed (with what is there: rows of an aborted step are void)
 * and leave together, because it is the controller who tells them to. */
#include "megakernel/kernel.h"
#include "megakernel/phased.cuh"

#include "instructions/combine.cuh"
#include "instructions/conv_step.cuh"
#include "instructions/delta_step.cuh"
#include "instructions/embed.cuh"
#include "instructions/expert_down.cuh"
#include "instructions/expert_up.cuh"
#include "instructions/gemv.cuh"
#include "instructions/gqa_append.cuh"
#include "instructions/gqa_partial.cuh"
#include "instructions/kv_append.cuh"
#include "instructions/lm_head.cuh"
#include "instructions/mla_partial.cuh"
#include "instructions/route.cuh"
#include "instructions/sample.cuh"
#include "instructions/schedule.cuh"

/* ---- compute -------------------------------------------------------------------------------------------------------- */

/* The two opcodes of the static tape share their loop. */
MK_DEV void mk_matrix_run(const mk_dev *d)
{
    const bool head = d->in->opcode == MK_OP_LM_HEAD;
    mk_tile t;
    mk_input x;
    if (head)
        mk_lm_head_describe(d->in, &t, &x);
    else
        mk_gemv_describe(d->in, &t, &x);
    if (!head || d->step->any_logits) {
        float acc[4] = {0, 0, 0, 0};
        mk_gathered_product(d, &x, &t, acc);
        mk_red_put(d, 0, acc);
        mk_sync();
        mk_trace_publish(d);
    }
    if (head)
        mk_lm_head_finish(d, &t);
    else
        mk_gemv_finish(d, &t);
}

/* This worker's queue ends with SCHEDULE. */
MK_DEV bool schedules(const mk_gpu_args *a)
{
    const uint32_t first = a->queue[blockIdx.x], end = a->queue[blockIdx.x + 1];
    return end > first && a->insn[end - 1].opcode == MK_OP_SCHEDULE;
}

MK_DEV void compute(const mk_gpu_args *a)
{
    mk_shared *sh = mk_sh();
    mk_dev d;
    d.a = a;
    d.sh = sh;
    d.step = &sh->step;
    d.worker = blockIdx.x;
    d.tid = threadIdx.x;
    d.warp = threadIdx.x / 32;
    d.lane = threadIdx.x % 32;
    d.memo = &sh->memo[d.warp];

    /* The worker that schedules also opens: its queue ends with SCHEDULE. */
    if (!MK_ONE_STEP && d.warp == 0 && schedules(a)) mk_schedule_next(a, d.lane, true);

    mk_phase_wait();
    mk_phase_carry(a, false);
    for (uint32_t n = 0;; n++) {
        uint32_t slot = n % MK_INSN_RING, parity = n / MK_INSN_RING & 1;
        while (!mk_mbar_try(mk_smem(&sh->insn_full[slot]), parity)) {}
        d.in = &sh->insn[slot];
        const uint32_t opcode = d.in->opcode;
        mk_trace_begin(&d);
        switch (opcode) {
        case MK_OP_EMBED: mk_embed_run(&d); break;
        case MK_OP_GEMV:
        case MK_OP_LM_HEAD: mk_matrix_run(&d); break;
        case MK_OP_CONV_STEP: mk_conv_step_run(&d); break;
        case MK_OP_DELTA_STEP: mk_delta_step_run(&d); break;
        case MK_OP_KV_APPEND: mk_kv_append_run(d.in); break;
        case MK_OP_MLA_PARTIAL: mk_mla_partial_run(d.in); break;
        case MK_OP_COMBINE: mk_combine_run(d.in); break;
        case MK_OP_GQA_APPEND: mk_gqa_append_run(d.in); break;
        case MK_OP_GQA_PARTIAL: mk_gqa_partial_run(d.in); break;
        case MK_OP_ROUTE: mk_route_run(&d); break;
        case MK_OP_EXPERT_UP: mk_expert_up_run(&d); break;
        case MK_OP_EXPERT_DOWN: mk_expert_down_run(&d); break;
        case MK_OP_SAMPLE: mk_sample_run(&d); break;
        case MK_OP_SCHEDULE: mk_schedule_run(&d); break;
        default: mk_phase_carry(a, true); return;
        }
        mk_trace_end(&d);
        __syncwarp();
        if (mk_arrives(d.lane)) mk_mbar_arrive(mk_smem(&sh->insn_empty[slot]));
    }
}

/* ---- controller ----------------------------------------------------------------------------------------------------- */

/* Waits for the descriptor of step `seq` (as long as it takes) and copies it to shared memory. False: leave. */
MK_DEV bool step_receive(const mk_gpu_args *a, mk_shared *sh, uint32_t seq, uint32_t lane)
{
    const uint4 *p = a->step_ring + (seq % MK_STEP_RING) * MK_STEP_PACKETS + lane;
    uint32_t *word = (uint32_t *)&sh->step;
    bool mine = lane < MK_STEP_PACKETS, leave = false;
    uint4 q = make_uint4(0, 0, 0, seq + 1);
    for (uint32_t n = 0;; n++) {
        if (mine) q = mk_packet_load(p);
        if (__all_sync(0xffffffffu, q.w == seq + 1)) break;
        if ((n & 63) == 63) leave = mk_load_relaxed(a->abort) != 0;
        if (__any_sync(0xffffffffu, leave)) return false;
    }
    const uint32_t w[3] = {q.x, q.y, q.z};
#pragma unroll
    for (uint32_t k = 0; k < 3; k++)
        if (mine && 3 * lane + k < sizeof(mk_step) / 4) word[3 * lane + k] = w[k];
    __syncwarp();
    return sh->step.nrows != 0;
}
static_assert(MK_STEP_PACKETS <= 32, "one packet a lane");

MK_DEV void control(const mk_gpu_args *a, mk_shared *sh)
{
    const uint32_t worker = blockIdx.x, lane = threadIdx.x % 32, first = a->queue[worker], end = a->queue[worker + 1];
    uint32_t fed = 0; /* instructions so far */
    bool leave = first == end;
    for (uint32_t seq = MK_ONE_STEP ? sh->step.seq : 0; !leave; seq++) {
        /* the compute warps may still read the last descriptor */
        for (uint32_t i = fed < MK_INSN_RING ? 0 : fed - MK_INSN_RING; i < fed; i++)
            while (!mk_mbar_try(mk_smem(&sh->insn_empty[i % MK_INSN_RING]), i / MK_INSN_RING & 1)) {}
        if (MK_ONE_STEP ? !sh->step.nrows : !step_receive(a, sh, seq, lane)) break;
        if (lane == 0) mk_flag_set(&sh->logits[seq & 3], (seq + 1) * 2 + (sh->step.any_logits != 0));
        for (uint32_t i = first; i < end; i++, fed++) {
            uint32_t slot = fed % MK_INSN_RING;
            uint4 part = make_uint4(0, 0, 0, 0);
            if (lane < sizeof(mk_insn) / 16) part = __ldg((const uint4 *)(a->insn + i) + lane);
            bool hang = sh->step.hang == MK_HANG_AT(worker, i - first);
            for (uint32_t n = 0; !leave; n++) {
                bool free = fed < MK_INSN_RING || mk_mbar_try(mk_smem(&sh->insn_empty[slot]), (fed / MK_INSN_RING & 1) ^ 1);
                if (__all_sync(0xffffffffu, free && !hang)) break;
                if ((n & 15) == 15) leave = __any_sync(0xffffffffu, mk_load_relaxed(a->abort));
            }
            if (leave) break;
            if (lane < sizeof(mk_insn) / 16) ((uint4 *)&sh->insn[slot])[lane] = part;
            __syncwarp();
            if (lane == 0) mk_store_relaxed(a->position + worker, i - first);
            if (mk_arrives(lane)) mk_mbar_arrive(mk_smem(&sh->insn_full[slot]));
        }
        if (MK_ONE_STEP) break;
    }
    uint32_t slot = fed % MK_INSN_RING;
    if (fed >= MK_INSN_RING)
        while (!mk_mbar_try(mk_smem(&sh->insn_empty[slot]), (fed / MK_INSN_RING & 1) ^ 1)) {}
    if (lane == 0) {
        if (!MK_ONE_STEP || leave || !sh->step.nrows) mk_flag_set(&sh->leave, 1); /* else the loaders leave by themselves */
        sh->insn[slot].opcode = MK_OP_LEAVE;
    }
    __syncwarp();
    if (mk_arrives(lane)) mk_mbar_arrive(mk_smem(&sh->insn_full[slot]));
}

/* ---- loaders -------------------------------------------------------------------------------------------------------- */

/* A ring of stages as its loader (one thread) walks it. */
typedef struct mk_feed {
    uint32_t full, empty, stage, n, at, parity;
    uint64_t policy;
    mk_shared *sh;
} mk_feed;

/* False: leave. A loader waits as long as it takes; the compute warps bound the wait. */
MK_DEV bool feed_wait(const mk_feed *f)
{
    while (!mk_mbar_try(f->empty + 8 * f->at, f->parity ^ 1))
        if (mk_flag_get(&f->sh->leave)) return false;
    return true;
}

/* Streams one segment: whole K blocks a stage, each stage with the scales of its blocks. */
MK_DEV bool feed_segment(mk_feed *f, const uint8_t *segment, uint32_t scale_bytes, uint32_t kb_bytes, uint32_t nkb, uint32_t per, uint32_t nsegs,
                         uint32_t shift)
{
    const uint8_t *weights = segment + scale_bytes;
    for (uint32_t kb = 0; kb < nkb; kb += per) {
        uint32_t nk = nkb - kb < per ? nkb - kb : per, bytes = nk * kb_bytes, lo = 0, scales = 0;
        if (nsegs) {
            lo = ((kb >> shift) * nsegs * 4) & ~15u;
            scales = ((((kb + nk - 1) >> shift) + 1) * nsegs * 4 + 15 & ~15u) - lo;
        }
        if (!feed_wait(f)) return false;
        uint32_t bar = f->full + 8 * f->at, to = f->stage + f->at * MK_STAGE_STRIDE;
        mk_mbar_expect(bar, bytes + scales);
        mk_bulk_copy(to, weights + (size_t)kb * kb_bytes, bytes, bar, f->policy);
        if (scales) mk_bulk_copy(to + MK_STAGE_BYTES, segment + lo, scales, bar, f->policy);
        if (++f->at == f->n) {
            f->at = 0;
            f->parity ^= 1;
        }
    }
    return true;
}

/* Nothing may be in flight when the block leaves. A stage at or after f->at was last filled a lap ago or never; both are waited for by the
 * other parity, which an untouched barrier passes at once. */
MK_DEV void feed_drain(const mk_feed *f)
{
    for (uint32_t i = 0; i < f->n; i++)
        while (!mk_mbar_try(f->full + 8 * i, i < f->at ? f->parity : f->parity ^ 1)) {}
}

MK_DEV void stream_static(const mk_gpu_args *a, mk_shared *sh)
{
    const uint32_t worker = blockIdx.x, first = a->seg_first[worker], end = a->seg_first[worker + 1];
    mk_feed f = {mk_smem(sh->full[MK_TAPE]), mk_smem(sh->empty[MK_TAPE]), mk_smem(mk_stages(MK_TAPE)), a->static_stages, 0, 0, mk_evict_first(), sh};
    bool on = first < end;
    for (uint32_t seq = 0; on && !(MK_ONE_STEP && seq); seq++)
        for (uint32_t i = first; i < end && on; i++) {
            const mk_tape_seg s = a->seg[i];
            if (s.lm_head && !MK_ONE_STEP) { /* only now does it matter what the step is */
                uint32_t seen;
                while ((seen = mk_flag_get(&sh->logits[seq & 3])) >> 1 != ((seq + 1) & 0x7fffffffu) && on) on = !mk_flag_get(&sh->leave);
                if (!on || !(seen & 1)) continue;
            }
            on = feed_segment(&f, a->tape + s.off, s.scales, s.kb_bytes, s.nkb, s.per, s.nsegs, s.shift);
        }
    mk_phase_prefetch(a);
    feed_drain(&f);
}

MK_DEV void stream_experts(const mk_gpu_args *a, mk_shared *sh)
{
    const uint32_t worker = blockIdx.x, first = a->expert_first[worker], end = a->expert_first[worker + 1];
    mk_feed f = {mk_smem(sh->full[MK_EXPERT]), mk_smem(sh->empty[MK_EXPERT]), mk_smem(mk_stages(MK_EXPERT)), MK_EXPERT_STAGES, 0, 0, mk_evict_first(), sh};
    uint32_t parity = 0;
    bool on = first < end;
    mk_phase_wait();
    for (uint32_t step = 0; on && !(MK_ONE_STEP && step); step++) {
        const mk_routes *routes = mk_phase_routes(a);
        uint32_t n_union = routes ? routes->n_union : 0, any = 0;
        for (uint32_t i = first; i < end && on; i++) {
            const mk_insn *in = a->insn + a->expert_insn[i];
            if (in->opcode == MK_OP_ROUTE) {
                if (any) mk_mbar_arrive(mk_smem(&sh->route_empty)); /* the layer before is issued */
                any = 1;
                while (!mk_mbar_try(mk_smem(&sh->route_full), parity) && on) on = !mk_flag_get(&sh->leave);
                parity ^= 1;
                routes = (const mk_routes *)(mk_local_memory(a) + sh->vec[in->signal_vec].offset);
                n_union = on ? routes->n_union : 0;
            } else {
                const mk_expert e = in->expert;
                const uint32_t up = in->opcode == MK_OP_EXPERT_UP, T = e.T, values = mk_kblock_values(e.wtype), nkb = (e.k + values - 1) / values;
                const uint32_t nsegs = e.nseg * (up ? 2 : 1);
                const mk_divisor by_T = mk_div_by(T);
                const uint32_t scales = (uint32_t)mk_segment_scale_bytes(e.wtype, e.k, nsegs, MK_SCALE_ROWS);
                for (uint32_t j = 0; j < n_union && on; j++) {
                    const uint8_t *base = a->expert + e.base + routes->expert[j] * e.expert_stride;
                    for (uint32_t t = up ? mk_deal_first(j, T, worker, a->workers) : e.t; t < T && on; t += up ? a->workers : T) {
                        uint32_t rows = up ? 2 * (mk_cut(t + 1, e.inter, by_T) - mk_cut(t, e.inter, by_T)) : e.n;
                        on = feed_segment(&f, base + (uint64_t)t * e.slice_stride, scales, rows * MK_KBLOCK_BYTES, nkb,
                                          mk_stage_kblocks(e.wtype, rows, 1), nsegs, 1);
                    }
                }
            }
        }
        mk_mbar_arrive(mk_smem(&sh->route_empty));
    }
    feed_drain(&f);
}

/* ---- the kernel ----------------------------------------------------------------------------------------------------- */

/* By the compute warps. */
MK_DEV void local_copy(uint8_t *dst, const uint8_t *src, uint32_t bytes)
{
    for (uint32_t i = threadIdx.x; i < bytes / 4; i += MK_COMPUTE)
        if (threadIdx.x < MK_COMPUTE) ((uint32_t *)dst)[i] = ((const uint32_t *)src)[i];
}

#ifdef MK_PHASED
__global__ void __launch_bounds__(MK_THREADS, 1) mk_phased(const __grid_constant__ mk_phased_args param)
{
    const mk_gpu_args &a = param.args;
    mk_phase_begin(&a);
#else
__global__ void __launch_bounds__(MK_THREADS, 1) mk_resident(const __grid_constant__ mk_gpu_args a)
{
#endif
    mk_shared *sh = mk_sh();
    const uint32_t warp = threadIdx.x / 32;

#ifdef MK_PHASED
    if (warp == MK_WARP_CONTROL && !step_receive(&a, sh, mk_first_step(&a), threadIdx.x % 32)) sh->step.nrows = 0;
#endif
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < MK_INSN_RING; i++) {
            mk_mbar_init(&sh->insn_full[i], MK_ARRIVALS);
            mk_mbar_init(&sh->insn_empty[i], MK_WARPS * MK_ARRIVALS);
        }
        for (uint32_t i = 0; i < 2 * MK_STATIC_MAX; i++) {
            mk_mbar_init(&sh->full[0][i], 1);
            mk_mbar_init(&sh->empty[0][i], MK_WARPS * MK_ARRIVALS);
        }
        mk_mbar_init(&sh->route_full, MK_ARRIVALS);
        mk_mbar_init(&sh->route_empty, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        for (uint32_t i = 0; i < 4; i++) sh->logits[i] = 0;
        sh->leave = sh->draw_met = 0;
        sh->trace.first = a.queue[blockIdx.x];
        memset(sh->memo, 0, sizeof sh->memo);
        sh->args = a;
    }
    for (uint32_t i = threadIdx.x; i < a.n_vec * sizeof(mk_vec) / 16; i += MK_THREADS) ((uint4 *)sh->vec)[i] = ((const uint4 *)a.vec)[i];
    for (uint32_t i = threadIdx.x; i < (a.n_start + 7) / 8; i += MK_THREADS) ((uint4 *)sh->start)[i] = ((const uint4 *)a.start)[i]; /* memory comes in pieces of 256 bytes */
    if (a.local_image) local_copy(mk_local_memory(&a), a.local_image + (size_t)blockIdx.x * a.local_bytes, a.local_bytes);
    __syncthreads();
    if (threadIdx.x < a.n_vec && sh->vec[threadIdx.x].slice_packets) sh->vec[threadIdx.x].reserved = mk_div_by(sh->vec[threadIdx.x].slice_packets).magic;
    __syncthreads();

    if (warp < MK_WARPS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 112;"); /* 512 x 112 + 128 x 32 = 640 x 96, what the launch gave */
        compute(&a);
        if (a.local_image) {
            mk_sync();
            local_copy(a.local_image + (size_t)blockIdx.x * a.local_bytes, mk_local_memory(&a), a.local_bytes);
        }
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (warp == MK_WARP_CONTROL) {
            control(&a, sh);
        } else if (warp == MK_WARP_COURIER) {
            if (!MK_ONE_STEP && schedules(&a)) mk_courier(&a, sh, threadIdx.x % 32);
        } else if (threadIdx.x % 32 == 0) {
            if (warp == MK_WARP_STATIC)
                stream_static(&a, sh);
            else if (warp == MK_WARP_EXPERT)
                stream_experts(&a, sh);
        }
    }
}

#ifndef MK_PHASED
const void *mk_kernel_entry(void)
{
    return (const void *)mk_resident;
}
#endif
