/* The resident kernel: one block a worker, launched once, leaves when SCHEDULE is told to stop or somebody aborts.
 *
 *   warps 0-7    compute: the instructions of the queue, one after the other, all warps on each
 *   controller   waits for the next step descriptor, then feeds the queue's instructions, a few ahead
 *   loader       streams weights into the ring in the queue's order, over instruction, layer and step boundaries: the worker's tape, and, when a layer's route is known, the chosen
 *                experts' slices; and among them, in a step of one row, pages of a cache
 *   courier      on SCHEDULE's worker: looks for what the host says (instructions/schedule.cuh)
 *   scout        brings weights into L2 for which the ring has no room yet, behind attention; on SCHEDULE's worker it concludes steps behind which another one is under way
 *   aside        four warps for what is done beside the queue (instructions/aside.cuh)
 *
 * On abort every wait falls through; the compute warps finish what they were fed (with what is there: rows of an aborted step are void)
 * and leave together, because it is the controller who tells them to. */
#include "megakernel/kernel.h"
#include "megakernel/phased.cuh"

#include "instructions/aside.cuh"
#include "instructions/combine.cuh"
#include "instructions/delta_step.cuh"
#include "instructions/embed.cuh"
#include "instructions/expert_down.cuh"
#include "instructions/expert_up.cuh"
#include "instructions/gate.cuh"
#include "instructions/gemv.cuh"
#include "instructions/gemv_one.cuh"
#include "instructions/gqa_append.cuh"
#include "instructions/gqa_partial.cuh"
#include "instructions/kv_append.cuh"
#include "instructions/lm_head.cuh"
#include "instructions/mla_partial.cuh"
#include "instructions/route.cuh"
#include "instructions/router.cuh"
#include "instructions/sample.cuh"
#include "instructions/schedule.cuh"

/* ---- compute -------------------------------------------------------------------------------------------------------- */

/* The instruction under way, found again: what lives across a call is spilled to local memory, for which shared memory has left no cache. */
MK_DEV const mk_insn *under_way(void)
{
    mk_shared *sh = mk_sh();
    return &sh->fed[sh->memo[mk_tid_now() / 32].n % MK_INSN_RING].in;
}

/* Products of static segments (matvec.cuh). */
MK_CALL void matrix_run(bool gemv)
{
    uint32_t jobs = gemv || mk_sh()->step.any_logits ? mk_static_next(under_way(), 0) : 0;
    do {
        if (jobs) mk_products(under_way());
        jobs = gemv ? mk_gemv_end(under_way()) : mk_lm_head_end(under_way());
    } while (jobs);
}

/* A function an opcode: each has all the registers to itself. What spills goes to local memory, for which shared memory has left no cache. */
#define X(run, ...)                                                                                                    \
    MK_CALL void call_##run(uint32_t insn)                                                                             \
    {                                                                                                                  \
        __VA_ARGS__                                                                                                    \
        const mk_dev d = mk_here(mk_insn_at(insn));                                                                    \
        run(&d);                                                                                                       \
    }
/* h, for its norm, for who comes next and for what is done aside meanwhile. If one row is dealt there is no barrier behind it: ROUTE has another before it looks. */
MK_DEV uint32_t staged(uint32_t insn)
{
    const mk_plan *p = &mk_fed_of(mk_insn_at(insn))->plan;
    const bool one = mk_sh()->step.nrows == 1 && p->dealt == 1;
    insn = one ? mk_gather_rms(insn) : mk_stage_input(insn, true, 0, p->x.k);
    __syncwarp();
    if (mk_arrives(mk_tid_now() % 32)) mk_mbar_arrive(mk_smem(&mk_sh()->route_staged));
    return insn;
}
#define STAGED insn = staged(insn);
X(mk_embed_run)
X(mk_route_one_run, STAGED)
X(mk_route_pair_run, STAGED)
X(mk_route_run, STAGED)
X(mk_sample_greedy_run)
X(mk_sample_run)
X(mk_schedule_run)
#undef X
#undef STAGED

/* The instruction under way, if there is one, is done; the next one's shared address, and what it is. Nothing of it is kept over the instruction: it would be spilled. The next one's barrier is
 * asked for first, for its answer takes as long as the rest. (An address, and not a pointer, of which half would be asked of the SM anew for every instruction.) */
MK_DEV uint32_t instruction(uint32_t *what)
{
    mk_shared *sh = mk_sh();
    const uint32_t tid = mk_tid_now(), lane = tid % 32;
    mk_memo *memo = &sh->memo[tid / 32];
    const uint32_t last = memo->n, n = (last + 1) & ~MK_N_TRACED, slot = n % MK_INSN_RING; /* never MK_NO_INSN again; a whole number of laps */
    const uint32_t full = mk_smem(sh->insn_full) + 8 * slot, parity = n / MK_INSN_RING & 1;
    bool fed = mk_mbar_test(full, parity);
    __syncwarp();
    if (__builtin_expect(tid == 0 && last & MK_N_TRACED && last != MK_NO_INSN, 0)) {
        mk_trace_note *t = &sh->fed[last % MK_INSN_RING].note;
        do { /* once: ptxas makes a branch of a loop, and of what is none predicates, with whose loads every instruction would wait */
            t->end = mk_now_low();
            t->weights = sh->trace.weights;
        } while (mk_flag_get(&memo->n) == MK_NO_INSN);
    }
    if (mk_arrives(lane) && last != MK_NO_INSN) mk_mbar_arrive(mk_smem(sh->insn_empty) + 8 * (last % MK_INSN_RING));
    if (__builtin_expect(!fed, 0)) {
        if (tid == 0) mk_flag_set(&sh->current, 2 * last + 2);
        while (!fed) fed = mk_mbar_try(full, parity);
    }
    mk_fed *f = &sh->fed[slot];
    const uint32_t run = mk_uniform(f->place.run);
    if (lane == 0) memo->n = n | (run & MK_TRACED) * (MK_N_TRACED / MK_TRACED);
    if (tid == 0) mk_flag_set(&sh->current, 2 * n + 1);
    if (tid == 0 && run & MK_TRACED) f->note.start = mk_now_low();
    __syncwarp();
    *what = run & 0xff;
    return mk_smem(&f->in);
}

/* This worker's queue ends with SCHEDULE. */
MK_DEV bool schedules(const mk_gpu_args *a)
{
    const uint32_t first = a->queue[blockIdx.x], end = a->queue[blockIdx.x + 1];
    return end > first && a->insn[end - 1].opcode == MK_OP_SCHEDULE;
}

/* What is not of a row's layer. */
MK_CALL void other(uint32_t insn, uint32_t what)
{
    const mk_insn *in = mk_insn_at(insn);
    switch (what) {
    case MK_OP_EMBED: call_mk_embed_run(insn); break;
    case MK_OP_GEMV: mk_fed_of(in)->plan.x.form == MK_X_F32 ? mk_gate_run(in) : matrix_run(true); break;
    case MK_OP_EXPERT_UP: mk_expert_up_run(in); break;
    case MK_OP_EXPERT_DOWN: mk_expert_down_run(in); break;
    case MK_OP_DELTA_STEP: mk_delta_step_run(in); break;
    case MK_OP_KV_APPEND: mk_kv_append_run(in); break;
    case MK_OP_MLA_PARTIAL: mk_mla_partial_run(in); break;
    case MK_OP_GQA_APPEND: mk_gqa_append_run(in); break;
    case MK_OP_GQA_PARTIAL: mk_gqa_run<false>(insn); break;
    case MK_OP_ROUTE: call_mk_route_run(insn); break;
    case MK_OP_SAMPLE: mk_sample_is_greedy() ? call_mk_sample_greedy_run(insn) : call_mk_sample_run(insn); break;
    case MK_OP_SCHEDULE: call_mk_schedule_run(insn); break;
    default: break;
    }
}

MK_DEV void compute(const mk_gpu_args *a)
{
    /* The worker that schedules also opens: its queue ends with SCHEDULE. */
    if (!MK_ONE_STEP && schedules(a)) {
        if (threadIdx.x < 32) mk_schedule_next(threadIdx.x, true, 0);
        mk_schedule_handed_over();
    }

    mk_phase_wait();
    mk_phase_carry(a, false);
#pragma unroll 1
    for (;;) {
        uint32_t what;
        const uint32_t insn = instruction(&what);
        if (MK_IS_ONE(what)) { /* most are */
            mk_gemv_one_run(insn, what);
            continue;
        }
        /* what every layer has of FP8, first: one comparison behind the other, for a switch is a tree of as many for each */
#define X(code, run)                                                                                                   \
    mk_keep(&what);                                                                                                    \
    if (what == (code)) {                                                                                              \
        run;                                                                                                           \
        continue;                                                                                                      \
    }
        X(MK_ONE_UP + 1, mk_up_one<MK_X_F16>(insn))
        X(MK_ONE_ROUTE, call_mk_route_one_run(insn))
        X(MK_ONE_DOWN + 3, (mk_down_one<MK_X_F16, 2>(insn)))
        X(MK_ONE_DOWN + 4, (mk_down_one<MK_X_F16, 3>(insn)))
        X(MK_ONE_DELTA, mk_delta_one<0>(insn))
        X(MK_ONE_DELTA + 2, mk_delta_one<MK_W_FP8>(insn))
#undef X
        switch (what) {
        case MK_ONE_UP: mk_up_one<MK_X_BF16>(insn); break;
        case MK_ONE_DOWN: mk_down_one<MK_X_BF16, 2>(insn); break;
        case MK_ONE_DOWN + 1: mk_down_one<MK_X_BF16, 3>(insn); break;
        case MK_ONE_DOWN + 2: mk_down_one<MK_X_BF16, 4>(insn); break;
        case MK_ONE_DOWN + 5: mk_down_one<MK_X_F16, 4>(insn); break;
        case MK_ONE_DELTA + 1: mk_delta_one<MK_W_BF16>(insn); break;
        case MK_OP_ROUTER: mk_router_run(mk_insn_at(insn)); break;
        case MK_ONE_ROUTE + 1: call_mk_route_pair_run(insn); break;
        case MK_ONE_GQA: mk_gqa_run<true>(insn); break;
        case MK_ONE_MLA: mk_mla_one_run(insn); break;
        case MK_OP_COMBINE: mk_combine_run(insn); break;
        case MK_OP_LM_HEAD: matrix_run(false); break;
        case MK_OP_LEAVE: mk_phase_carry(a, true); return;
        default: other(insn, what);
        }
    }
}

/* ---- controller ----------------------------------------------------------------------------------------------------- */

/* Waits for the descriptor of step `seq` (as long as it takes) and copies it to shared memory. False: leave. own: this worker's SCHEDULE makes them, and what it
 * has published before it ended lies next door. */
MK_DEV bool step_receive(const mk_gpu_args *a, mk_shared *sh, uint32_t seq, uint32_t lane, bool own)
{
#if MK_NEAR
    if (own && __shfl_sync(0xffffffffu, mk_flag_get(&sh->published), 0) == seq + 1) {
        mk_fence_cta();
#pragma unroll
        for (uint32_t k = lane; k < sizeof(mk_step) / 4; k += 32) ((uint32_t *)&sh->step)[k] = ((const uint32_t *)&sh->sched.next)[k];
        __syncwarp();
        return sh->step.nrows != 0;
    }
#endif
    const uint4 *p = mk_step_at(a->step_ring, seq) + lane;
    uint32_t *word = (uint32_t *)&sh->step, packets = mk_step_packets(1);
    bool leave = false, again = false;
    uint4 q = make_uint4(0, 0, 0, 0);
    for (uint32_t n = 0;; n++) {
        if (lane < packets) q = mk_packet_load(p);
        if (__all_sync(0xffffffffu, lane >= packets || q.w == seq + 1)) {
            const uint32_t all = mk_step_packets(__shfl_sync(0xffffffffu, q.y, 0));
            const bool instead = __any_sync(0xffffffffu, lane == MK_TOKEN_PACKET && q.z & MK_ROW_INSTEAD);
            if (all <= packets && (again || !instead)) break;
            packets = max(packets, all);
            if (instead) __threadfence(); /* the token's packet came behind the others */
            __syncwarp();
            again = instead;
            continue;
        }
        if ((n & 63) == 63) leave = mk_load_relaxed(a->abort) != 0;
        if (__any_sync(0xffffffffu, leave)) return false;
    }
    const uint32_t w[3] = {q.x, q.y, lane == MK_TOKEN_PACKET ? q.z & ~MK_ROW_INSTEAD : q.z};
#pragma unroll
    for (uint32_t k = 0; k < 3; k++)
        if (lane < packets && 3 * lane + k < sizeof(mk_step) / 4) word[3 * lane + k] = w[k];
    __syncwarp();
    return sh->step.nrows != 0;
}
static_assert(MK_STEP_PACKETS <= 32 && MK_STEP_PACKETS == MK_ROW_PACKETS(MK_MAX_ROWS) && offsetof(mk_step, nrows) == 4, "one packet a lane, the rows' number in the first");

/* What the controller remembers of the instruction under way. */
typedef struct mk_watch {
    uint32_t current;
    uint64_t since;
} mk_watch;

/* While the controller waits for the compute warps: passes the abort word on to them, and reports what they wait for when they have been at an instruction for too
 * long. SCHEDULE waits for the host as long as it takes; waits that report themselves (device.cuh) do so first. True: aborted. By all lanes. */
MK_DEV bool look_after(const mk_gpu_args *a, mk_shared *sh, mk_watch *w, uint32_t lane)
{
    const bool aborted = mk_load_relaxed(a->abort) != 0;
    const uint32_t n = mk_flag_get(&sh->current);
    const uint64_t t = mk_now();
    if (aborted && lane == 0) mk_flag_set(&sh->aborted, 1);
    if (n != w->current || !(n & 1)) {
        w->current = n;
        w->since = t;
    } else if (__builtin_expect(lane == 0 && t - w->since >= a->timeout_ns && !aborted, 0)) {
        const mk_insn *in = &sh->fed[n / 2 % MK_INSN_RING].in;
#pragma unroll 1
        for (uint32_t i = 0; i < MK_THREADS / 32 && in->opcode != MK_OP_SCHEDULE; i++) {
            const uint4 q = sh->waiting[i];
            if (!q.x) continue;
            if (i >= MK_WARP_ASIDE) in = &sh->aside.in; /* somebody waits for it */
            const mk_wait *wait = &in->wait[q.x - 1];
            const mk_vec *v = &sh->vec[wait->vec];
            if (v->scope == MK_BULK)
                mk_fault_report(in, MK_FAULT_COUNTER, wait, 0, 0, v->flags & MK_VEC_SUMS ? v->signals : mk_counter_target(v, sh->step.seq, wait->pub), q.w);
            else
                mk_fault_report(in, MK_FAULT_PACKET, wait, q.y, q.z, mk_epoch(a->epoch0, sh->step.seq, wait->pub), q.w);
        }
        if (in->opcode != MK_OP_SCHEDULE && t - w->since > a->timeout_ns + a->timeout_ns / 4) mk_fault_report(in, sh->stage_kind, (const mk_wait *)0, 0, 0, 0, 0);
    }
    return __any_sync(0xffffffffu, aborted);
}

/* The controller waits for a phase of a barrier and looks after the others meanwhile. True: aborted; then it has not waited to the end, unless it STAYS. HANGS: until then. */
enum { STAYS, HEEDS, HANGS };
MK_DEV bool await(const mk_gpu_args *a, mk_shared *sh, mk_watch *w, const uint64_t *bar, uint32_t parity, uint32_t how, uint32_t lane)
{
#pragma unroll 1
    for (uint32_t n = 1; !__all_sync(0xffffffffu, mk_mbar_try(mk_smem(bar), parity) && how != HANGS); n++)
        if (!(n & 15) && look_after(a, sh, w, lane) && how != STAYS) return true;
    return false;
}
/* Until the compute warps are done with the instruction that was fed as number i; lap 1: with the one before it in its slot. In the first lap that is nobody, and the barrier's phase the other. */
MK_DEV bool await_slot(const mk_gpu_args *a, mk_shared *sh, mk_watch *w, uint32_t i, uint32_t lap, uint32_t how, uint32_t lane)
{
    return await(a, sh, w, &sh->insn_empty[i % MK_INSN_RING], (i / MK_INSN_RING ^ lap) & 1, how, lane);
}

/* An instruction and its plan, 16 bytes a lane: where a lane's of instruction 0 are. */
#define FETCHED ((sizeof(mk_insn) + sizeof(mk_plan)) / 16)
MK_DEV const uint4 *fetches(const mk_gpu_args *a, uint32_t lane)
{
    const uint32_t insn = sizeof(mk_insn) / 16;
    return lane < insn ? (const uint4 *)a->insn + lane : (const uint4 *)a->plan + (lane < FETCHED ? lane - insn : 0);
}
MK_DEV uint4 fetch(const uint4 *part, uint32_t i)
{
    return __ldg(part + (size_t)i * (sizeof(mk_insn) / 16));
}
static_assert(sizeof(mk_insn) == sizeof(mk_plan), "the next one of either is as far");
static_assert(MK_ONE_GQA - MK_ONE_COUNT == 1 && MK_ONE_MLA - MK_ONE_COUNT == 2 && MK_ONE_NONE - MK_ONE_COUNT == 3, "attention between those that are nothing");
static_assert(offsetof(mk_fed, plan) == sizeof(mk_insn) && offsetof(mk_fed, place) == FETCHED * 16, "an instruction is followed by its plan");

/* Row 0 of a slice in this step; packets of the exchange are counted in 32 bits. */
MK_DEV const uint4 *row_packets(const mk_gpu_args *a, const mk_shared *sh, const mk_vec *v, uint32_t pub, uint32_t slice)
{
    return (const uint4 *)(a->exchange + v->offset) + (mk_half(v, sh->step.seq, pub) * MK_MAX_ROWS * v->nslice + slice) * v->slice_packets;
}
/* mk_splits(pos, grain, most) > 1 without its divisions: more pages than one split has; with one split at most it has them all. */
MK_DEV bool is_split(uint32_t pos, uint32_t grain, uint32_t most)
{
    return pos / MK_PAGE >> grain && most != 1;
}

/* Where its packets are in this step: waits by lanes 0-2, the signal by lane 3. */
MK_DEV void address(const mk_gpu_args *a, const mk_shared *sh, mk_fed *f, uint32_t lane)
{
    if (lane == 4) {
        uint32_t run = sh->step.nrows == 1 && f->plan.one ? f->plan.one : f->in.opcode;
        if (run == MK_ONE_NONE && is_split(sh->step.row[0].pos, f->in.mla.grain, f->in.mla.most)) run = MK_OP_COMBINE;
        f->place.run = sh->step.trace ? run | MK_TRACED : run;
    }
    if (lane > 3) return;
    const uint16_t *w = lane < 3 ? &f->in.wait[lane].vec : &f->in.signal_vec; /* vector, publication, slice */
    const uint32_t vec = w[0], pub = w[1];
    const mk_vec *v = &sh->vec[vec];
    if (vec == MK_NONE || v->scope != MK_PACKET) return;
    ((const uint4 **)&f->place)[lane] = row_packets(a, sh, v, pub, w[2]);
    f->place.epoch[lane] = mk_epoch(a->epoch0, sh->step.seq, pub);
}
static_assert(offsetof(mk_wait, vec) == 0 && offsetof(mk_wait, pub) == 2 && offsetof(mk_wait, slice0) == 4, "as the signal's");
static_assert(offsetof(mk_insn, signal_pub) == offsetof(mk_insn, signal_vec) + 2 && offsetof(mk_insn, signal_slice) == offsetof(mk_insn, signal_vec) + 4, "as a wait's");
static_assert(offsetof(mk_places, in) == 0 && offsetof(mk_places, out) == 24 && offsetof(mk_places, out_epoch) == offsetof(mk_places, epoch) + 12, "the signal's place and epoch follow the waits'");

/* By what the queries turn. The attention before is done with its own: `spaced` in plans.cuh sees to that. MK_AHEAD_ALIKE: the newest key, too. A function, or its constants
 * would live across all that a controller does; by its slot, for of a pointer it would not know that it is one into shared memory. */
MK_CALL uint32_t angles_ahead(uint32_t slot, uint32_t lane)
{
    mk_shared *sh = mk_sh();
    const mk_fed *f = &sh->fed[slot];
    const bool mla = f->in.opcode == MK_OP_MLA_PARTIAL;
    const mk_mla *m = &f->in.mla;
    const mk_gqa *g = &f->in.gqa;
    const uint32_t pairs = min(mla ? m->rotary ? m->rope / 2 : 0 : g->rope / 2, MK_ANGLES), skip = mla ? m->latent : g->norm ? g->dim : 0;
    bool alike = true;
#pragma unroll 1
    for (uint32_t i = lane; i < pairs; i += 32) {
        const float freq = __ldg(sh->args.param + (mla ? m->param_off : g->param_off) + skip + i);
        alike = alike && (mla || freq == __ldg(sh->args.param + f->plan.newest.param_off + skip + i));
        float2 a;
        mk_sincosf(mk_mul((float)sh->step.row[0].pos, freq), &a.x, &a.y);
        sh->angle[i] = a;
    }
    return __all_sync(0xffffffffu, alike) ? MK_AHEAD_ALIKE : 0;
}

/* Attention in a step of one row: its items; of MLA_PARTIAL the first pages of the worker's first two, of which one that does not come through the ring is on its way to L2 before the queries are made.
 * False: it has no item. All lanes. */
MK_DEV bool attention_ahead(const mk_gpu_args *a, mk_shared *sh, uint32_t slot, uint32_t lane)
{
    mk_fed *f = &sh->fed[slot];
    const mk_row *row = &sh->step.row[0];
    const bool mla = f->in.opcode == MK_OP_MLA_PARTIAL;
    const mk_mla *m = &f->in.mla;
    const mk_gqa *g = &f->in.gqa;
    const uint32_t grain = mla ? m->grain : g->grain, most = mla ? m->most : g->most;
    const uint32_t per = mk_split_pages(row->pos, grain, most), group = mk_head_group(row->pos, m->heads), n = mla ? (m->heads + group - 1) / group : g->kv_heads;
    const uint32_t last = row->pos / MK_PAGE, splits = mk_page_quot(last, per) + 1, part = mla ? m->part : g->part, i = part + (mla ? (lane & 1) * m->parts : 0);
    const bool halves = !mla && mk_gqa_halves(g, splits);
    const uint32_t items = (splits + halves) * n, nth = mk_page_quot(i, n), rest = i - nth * n, split = min(nth, splits - 1); /* rest: which heads */
    const uint32_t page = split * per;
    const bool has = mla && i < items && lane < MK_AHEAD_PAGES;
    const uint32_t id = has ? __ldcg(a->page + (row->slot * a->max_pages + page)) : 0;
    if (part >= items) return false;
    const uint32_t alike = angles_ahead(slot, lane);
    if (lane == 0) {
        f->place.per = per;
        f->place.items = items;
        f->place.ahead = alike | (halves ? MK_AHEAD_HALVES : 0);
        if (!mla && splits == 1 && f->plan.whole.vec != MK_NONE) {
            f->place.ahead |= MK_AHEAD_WHOLE;
            f->place.out = (uint4 *)row_packets(a, sh, &sh->vec[f->plan.whole.vec], f->plan.whole.pub, 0);
            f->place.out_epoch = mk_epoch(a->epoch0, sh->step.seq, f->plan.whole.pub);
        }
    }
    if (lane < MK_AHEAD_PAGES) f->place.page[lane] = id;
    const uint32_t pages = __ballot_sync(0xffffffffu, has && page == last), bytes = mk_latent_row_bytes(m->latent, m->rope, m->cache, 2) * MK_PAGE;
#pragma unroll 1
    for (uint32_t k = 0; pages >> k; k++) { /* groups of heads share a page: each asks for a part of it */
        if (!(pages >> k & 1)) continue;
        const uint32_t heads = __shfl_sync(0xffffffffu, rest, k);
        const uint8_t *page = a->kv + m->kv_off + __shfl_sync(0xffffffffu, id, k) * a->kv_page_bytes;
#pragma unroll 1
        for (uint32_t b = (lane * n + heads) * 128; b < bytes; b += 32 * n * 128) mk_prefetch(page + b);
    }
    return true;
}

/* An instruction that nobody is fed: its increment, if it has one, and, when the step is traced, a record of no length. Lane 0.
 * What the validator proves of the reuse of buffers holds all the same. A partial without an item has read nothing; what its worker did before, somebody with an item waits
 * for, because every row of a layer's queries, keys and values is some item's. A COMBINE without work has read nothing, and who waits for its output waits for all items.
 * SCHEDULE, when its step is told: what it would read of SAMPLE's the scout has in words of its own. */
MK_DEV void pass_over(const mk_gpu_args *a, mk_shared *sh, const mk_fed *f)
{
    if (f->in.signal_vec != MK_NONE && (f->place.run & ~MK_TRACED) != MK_ONE_NONE) atomicAdd(a->counter + sh->vec[f->in.signal_vec].counter, 1u);
    const uint32_t trace = sh->step.trace;
    if (__builtin_expect(!trace, 1)) return;
    const uint64_t now = mk_now();
    const uint32_t tag = trace >> 16, k = (trace & 0xffffu) - 1;
    uint4 *r = a->trace + 2 * ((size_t)k * a->n_insn + sh->trace.first + f->in.seq);
    mk_packet_store(r, (uint32_t)now, ((uint32_t)(now >> 32) & 0xffffu) | tag << 16, 0, 0);
    mk_packet_store(r + 1, 0, 0, 0, tag << 16 | k << 8 | 1);
}

/* The instruction in a slot is done: its record, if its step is traced. All lanes. noted: slots that have one, by bits; waited: for weights, up to the record before. */
MK_DEV void trace_done(mk_shared *sh, uint32_t slot, uint32_t *noted, uint32_t *waited, uint32_t lane)
{
    if (__builtin_expect(!(*noted >> slot & 1), 1)) return;
    *noted &= ~(1u << slot);
    const mk_trace_note *t = &sh->fed[slot].note;
    const uint32_t weights = t->weights;
    if (lane == 0) mk_trace_write(&sh->fed[slot].in, t->end, weights - *waited);
    *waited = weights;
    __syncwarp();
}

/* What is done aside, what was before it being done. All lanes. after: behind which instruction, counted as they are fed; of the shared
 * expert's gate|up: which phase of route_staged. */
MK_DEV void hand_over(mk_shared *sh, const mk_fed *f, uint32_t after, uint32_t lane)
{
    constexpr uint32_t AT = (offsetof(mk_fed, place) + offsetof(mk_places, after)) / 16, NOTE = offsetof(mk_fed, note) / 16;
    __syncwarp(); /* its places are there */
    static_assert(sizeof(mk_fed) <= 32 * 16 && (offsetof(mk_fed, place) + offsetof(mk_places, after)) % 16 == 0 && sizeof(mk_fed) == offsetof(mk_fed, note) + sizeof(mk_trace_note), "16 bytes a lane");
    if (lane < sizeof(mk_fed) / 16) {
        uint4 q = ((const uint4 *)f)[lane];
        if (lane == AT) q.x = after;
        if (lane >= NOTE) q = make_uint4(0, 0, 0, 0);
        ((uint4 *)&sh->aside)[lane] = q;
    }
    mk_warp_arrive(mk_smem(&sh->aside_full), lane);
}

MK_DEV void control(const mk_gpu_args *a, mk_shared *sh)
{
    const uint32_t worker = blockIdx.x, lane = threadIdx.x % 32, first = a->queue[worker], end = a->queue[worker + 1];
    uint32_t fed = 0; /* instructions so far */
    uint32_t noted = 0, waited = 0; /* trace_done */
    uint32_t asides = 0, routes = 0; /* handed over so far; fed */
    mk_watch watch = {0, 0};
    const bool own = schedules(a);
    bool leave = first == end;
    const uint4 *const part = fetches(a, lane);
    uint4 next = leave ? make_uint4(0, 0, 0, 0) : fetch(part, first); /* the next instruction, while this one or a step is waited for */
    for (uint32_t seq = MK_ONE_STEP ? sh->step.seq : 0; !leave; seq++) {
        /* the compute warps may still read the last descriptor */
        for (uint32_t i = fed < MK_INSN_RING ? 0 : fed - MK_INSN_RING; i < fed; i++) {
            await_slot(a, sh, &watch, i, 0, STAYS, lane);
            trace_done(sh, i % MK_INSN_RING, &noted, &waited, lane);
        }
        if (MK_ONE_STEP ? !sh->step.nrows : !step_receive(a, sh, seq, lane, own)) break;
        if (lane == 0) {
            mk_flag_set(&sh->cached[seq & 3][0], sh->step.nrows == 1 ? sh->step.row[0].pos : MK_NO_CACHE);
            mk_flag_set(&sh->cached[seq & 3][1], sh->step.row[0].slot);
            mk_flag_set(&sh->cached[seq & 3][2], sh->step.seq);
            mk_flag_set(&sh->logits[seq & 3], (seq + 1) * 2 + (sh->step.any_logits != 0));
            sh->trace.on = sh->step.trace;
            if (sh->step.trace) {
                const uint64_t now = mk_now();
                sh->trace.base = (uint32_t)now, sh->trace.high = (uint32_t)(now >> 32);
            }
        }
        for (uint32_t i = first; i < end; i++, fed++) {
            const uint32_t slot = fed % MK_INSN_RING;
            mk_fed *f = &sh->fed[slot];
            leave = await_slot(a, sh, &watch, fed, 1, sh->step.hang == MK_HANG_AT(worker, i - first) ? HANGS : HEEDS, lane);
            if (leave) break;
            trace_done(sh, slot, &noted, &waited, lane);
            if (lane < FETCHED) ((uint4 *)f)[lane] = next;
            next = fetch(part, i + 1 < end ? i + 1 : first);
            __syncwarp();
            address(a, sh, f, lane);
            __syncwarp();
            const uint32_t run = f->place.run & ~MK_TRACED;
            if (MK_NEAR && own && run == MK_OP_SCHEDULE && sh->step.nrows == 1 && sh->step.row[0].flags & MK_ROW_SAMPLE) {
                leave = await_slot(a, sh, &watch, fed - 1, 0, HEEDS, lane);
                if (leave) break;
                if (mk_flag_get(&sh->told) == sh->step.seq + 1) { /* by SAMPLE; the scout does the rest */
                    if (lane == 0) pass_over(a, sh, f);
                    fed--;
                    __syncwarp();
                    continue;
                }
            }
            uint32_t rest = run - MK_ONE_COUNT;
            mk_keep(&rest); /* else a table of jumps */
            if (rest <= MK_ONE_NONE - MK_ONE_COUNT && (rest - 1 > 1 || !attention_ahead(a, sh, slot, lane))) { /* nothing to do */
                if (lane == 0) pass_over(a, sh, f);
                fed--; /* the slot is free still */
                __syncwarp();
                continue;
            }
            const bool aside = !MK_ONE_STEP && sh->step.nrows == 1 && f->plan.end & MK_END_ASIDE, router = run == MK_OP_ROUTER, whole = router || MK_IS_ONE(run);
            const bool pairs = run == MK_OP_EXPERT_DOWN && mk_batches_of(f, sh->step.nrows).turns;
            if (pairs || (aside && (whole || run == MK_ONE_MLA))) {
                leave = asides && await(a, sh, &watch, &sh->aside_done, asides - 1 & 1, HEEDS, lane);
                if (leave) break;
                /* pairs: behind the instruction before EXPERT_DOWN; queries: behind what comes before the GEMVs that leave their place alone; ROUTER: behind the GEMV before it; down: behind what
                 * stands before EXPERT_UP; gate|up: with ROUTE's input */
                const uint32_t after = pairs ? fed - 1 : !whole ? fed - 1 - f->plan.beside : router ? fed - 1 : f->plan.end & MK_END_SILU ? routes - 1 & 1 : fed - 2;
                hand_over(sh, f, after, lane);
                asides++;
            }
            if (lane == 0) {
                mk_store_relaxed(a->position + worker, i - first);
                if (aside && !whole && asides) f->place.run |= MK_AWAITS | (asides - 1 & 1 ? MK_LAP : 0);
            }
            __syncwarp();
            if (aside && whole) {
                fed--;
                continue;
            }
            const uint32_t opcode = f->in.opcode;
            routes += opcode == MK_OP_ROUTE;
            if (opcode == MK_OP_DELTA_STEP) mk_delta_ahead(a, &sh->step, f, lane);
            mk_fed *const soon = &sh->fed[(fed - 2) % MK_INSN_RING]; /* this slot was free: the compute warps are at the instruction before that, or further */
            if (fed >= 2 && sh->step.nrows == 1 && soon->in.opcode == MK_OP_DELTA_STEP && soon->in.tape_bytes && soon->in.tape_bytes <= MK_NEAR_MOST) mk_delta_near(a, soon, lane);
            if (__builtin_expect(sh->step.trace, 0)) {
                if (lane < sizeof(mk_trace_note) / 4) ((uint32_t *)&f->note)[lane] = 0;
                noted |= 1u << slot;
                __syncwarp();
            }
            if (mk_arrives(lane)) mk_mbar_arrive(mk_smem(&sh->insn_full[slot]));
        }
        if (MK_ONE_STEP) break;
    }
    uint32_t slot = fed % MK_INSN_RING;
    await_slot(a, sh, &watch, fed, 1, STAYS, lane);
    if (lane == 0) {
        if (!MK_ONE_STEP || leave || !sh->step.nrows) mk_flag_set(&sh->leave, 1); /* else the loader leaves by itself */
        sh->fed[slot].place.run = MK_OP_LEAVE;
    }
    mk_warp_arrive(mk_smem(&sh->insn_full[slot]), lane);
    while (asides && !mk_mbar_try(mk_smem(&sh->aside_done), asides - 1 & 1)) {}
    if (lane == 0) sh->aside.place.run = MK_OP_LEAVE;
    mk_warp_arrive(mk_smem(&sh->aside_full), lane);
    for (uint32_t i = fed < MK_INSN_RING ? 0 : fed - MK_INSN_RING + 1; MK_ONE_STEP && i < fed; i++) /* somebody has to watch over the last ones */
        await_slot(a, sh, &watch, i, 0, STAYS, lane);
}

/* ---- loader --------------------------------------------------------------------------------------------------------- */

/* The ring as its loader walks it: one lane of a warp. Few instructions a stage, because one warp alone takes some five clocks for each. */
typedef struct mk_feed {
    uint32_t bar, to, phase;           /* the next stage's, as in mk_next */
    uint32_t full, stage, end, stride; /* the first one's; full barriers end there */
    uint32_t scales, stages;           /* as in mk_ring */
    uint32_t leave;                    /* shared address of mk_shared.leave */
    uint32_t used;                     /* full barriers up to here have had a stage */
    uint32_t calm, behind;             /* stages yet to be paced; full barriers from the one that such a stage waits for to its own, in bytes */
    uint32_t unloaded;                 /* as in mk_gpu_args */
    uint64_t policy;
} mk_feed;

MK_DEV mk_feed feed_ring(mk_shared *sh)
{
    const uint32_t leave = (uint32_t)__cvta_generic_to_shared((const void *)&sh->leave);
    const mk_ring *r = &sh->args.ring;
    const mk_next s = mk_next_of(0);
    mk_feed f = {s.bar, s.stage, 0, s.bar, s.stage, s.bar + 8 * r->stages, r->stride, r->scales, r->stages, leave, s.bar, 0, 0, sh->args.unloaded, mk_evict_first()};
    asm volatile("" : "+r"(f.full), "+r"(f.stage), "+r"(f.leave)); /* in registers: else the loop finds out again where shared memory begins */
    return f;
}
MK_DEV void feed_next(mk_feed *f)
{
    f->bar += 8;
    f->to += f->stride;
    if (f->bar != f->end) return;
    asm volatile("");
    f->bar = f->full;
    f->to = f->stage;
    f->phase ^= 1;
    f->used = f->end;
}
MK_DEV bool feed_leaves(const mk_feed *f)
{
    uint32_t leave;
    asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(leave) : "r"(f->leave) : "memory");
    return leave != 0;
}
/* Waits for a phase of a barrier as long as it takes; the compute warps bound the wait. False: leave. */
MK_DEV bool feed_await(const mk_feed *f, uint32_t bar, uint32_t parity)
{
    while (!mk_mbar_try(bar, parity))
        if (feed_leaves(f)) return false;
    return true;
}
/* What an instruction streams begins: not more than `pace` stages of it are under way before its product has begun, which is known when a stage of it takes the place of another.
 * Until then somebody waits for an exchange, or for instructions that no cache has, and what brings them stands behind what the loader has asked for. 0: any number. (Blank stages are
 * not paced.) */
MK_DEV void feed_begin(mk_feed *f, uint32_t pace)
{
    f->calm = pace ? f->stages : 0;
    f->behind = 8 * pace;
}

/* Waits until the next stage may be filled. False: leave. */
MK_DEV bool feed_room(mk_feed *f)
{
    if (!feed_await(f, f->bar + MK_EMPTY, f->phase ^ 1)) return false;
    if (f->calm) {
        const bool before = f->bar - f->full < f->behind; /* its lap was the one before */
        const uint32_t lag = f->bar - f->behind + (before ? f->end - f->full : 0), parity = f->phase ^ before;
        f->calm--;
        while (!mk_mbar_try(lag, parity)) {}
    }
    return true;
}
/* Streams one segment of scales and weights; its scales go with every stage. False: leave. */
MK_DEV bool feed_segment(mk_feed *f, const uint8_t *segment, uint32_t scales, uint32_t bytes, uint32_t stage)
{
    const uint8_t *weights = segment + scales;
#pragma unroll 1
    for (uint32_t left = bytes; left;) {
        const uint32_t n = min(left, stage);
        mk_flag_set(&mk_sh()->streamed, (uint32_t)((weights - mk_sh()->args.tape) >> 8));
        if (!feed_room(f)) return false;
        if (f->unloaded) {
            mk_mbar_arrive(f->bar);
        } else {
            mk_mbar_expect(f->bar, n + scales);
            mk_bulk_copy(f->to, weights, n, f->bar, f->policy);
            if (scales) mk_bulk_copy(f->to - f->scales, segment, scales, f->bar, f->policy);
        }
        weights += n;
        left -= n;
        feed_next(f);
    }
    return true;
}

/* A stage of nothing. */
MK_DEV bool feed_blank(mk_feed *f)
{
    if (!feed_await(f, f->bar + MK_EMPTY, f->phase ^ 1)) return false;
    mk_mbar_arrive(f->bar);
    feed_next(f);
    return true;
}

/* Keys and values of this worker's items of a GQA_PARTIAL, in the stages that gqa_partial.cuh says. The newest token's are not waited for,
 * for nobody looks at them there. False: leave. */
MK_DEV bool feed_heads(mk_feed *f, const mk_gpu_args *a, const mk_gqa *g, uint32_t pos, uint32_t slot, uint32_t per)
{
    const uint32_t last = pos / MK_PAGE, dim = g->dim, blocks = mk_gqa_blocks(dim), turn = MK_GQA_TURN(blocks), stages = MK_GQA_STAGES(blocks), bytes = mk_gqa_stage_bytes(dim);
    const uint32_t kv_heads = g->kv_heads, group = mk_page_quot(g->heads, kv_heads), splits = mk_page_quot(last, per) + 1;
    const bool halves = mk_gqa_halves(g, splits);
    const uint32_t items = (splits + halves) * kv_heads, times = halves ? 1 : (group + MK_GQA_HEADS - 1) / MK_GQA_HEADS; /* that an item's heads read them */
#pragma unroll 1
    for (uint32_t i = g->part; i < items; i += g->parts) {
        const uint32_t nth = mk_page_quot(i, kv_heads), first = min(nth, splits - 1) * per, n = min(per, last + 1 - first);
        const uint32_t *page = a->page + ((size_t)slot * a->max_pages + first);
        const uint8_t *const base = a->kv + g->kv_off + 2 * mk_gqa_at(dim, i - nth * kv_heads, 0, 0);
#pragma unroll 1
        for (uint32_t t = 0; t < times; t++) {
            uint32_t id = __ldcg(page), second = __ldcg(page + min(1u, n - 1));
#pragma unroll 1
            for (uint32_t k = 0; k < n; k += turn) {
                const uint8_t *const at = base + (uint64_t)id * a->kv_page_bytes, *const beside = base + (uint64_t)second * a->kv_page_bytes;
                id = __ldcg(page + min(k + turn, n - 1)), second = __ldcg(page + min(k + turn + 1, n - 1));
#pragma unroll 1
                for (uint32_t j = 0; j < turn * stages; j++) {
                    if (!feed_room(f)) return false;
                    const uint32_t whose = (f->bar - f->full) / 8 % MK_GROUPS, other = turn > 1 ? whose : 0, part = turn > 1 ? j / 2 : j < 2 ? whose : j;
                    if (k + other < n && !f->unloaded) {
                        mk_mbar_expect(f->bar, bytes);
                        mk_bulk_copy(f->to - f->scales, (other ? beside : at) + part * bytes, bytes, f->bar, f->policy);
                    } else {
                        mk_mbar_arrive(f->bar);
                    }
                    feed_next(f);
                }
            }
        }
    }
    return true;
}

/* Pages of the cache of this worker's items of a partial, in a step of one row; of an MLA_PARTIAL but for the newest if it is an item's first, which compute warps read themselves (attention.cuh).
 * Behind the row's last token stand tokens of the page before, for their values are multiplied with zeros. seq: steps since the launch. False: leave. */
MK_DEV bool feed_cache(mk_feed *f, const mk_gpu_args *a, const mk_shared *sh, const mk_seg *s, uint32_t seq)
{
    const uint32_t pos = MK_ONE_STEP ? sh->step.nrows == 1 ? sh->step.row[0].pos : MK_NO_CACHE : mk_flag_get(&sh->cached[seq & 3][0]);
    const uint32_t slot = MK_ONE_STEP ? sh->step.row[0].slot : mk_flag_get(&sh->cached[seq & 3][1]), step = MK_ONE_STEP ? sh->step.seq : mk_flag_get(&sh->cached[seq & 3][2]);
    const uint32_t last = pos / MK_PAGE, per = mk_split_pages(pos, s->per_most, s->per_less);
    if (pos == MK_NO_CACHE) return true;
    if (MK_ONE_STEP) mk_phase_wait();
    asm volatile("fence.proxy.async.global;" ::: "memory"); /* others wrote it, with stores */
    const mk_insn *in = a->insn + s->base;
    if (in->opcode == MK_OP_GQA_PARTIAL) return feed_heads(f, a, &in->gqa, pos, slot, per);
    const mk_mla *m = &in->mla;
    const uint32_t group = mk_head_group(pos, m->heads), groups = mk_page_quot(m->heads + group - 1, group);
    const uint32_t bytes = mk_latent_row_bytes(m->latent, m->rope, m->cache, 2), tokens = MK_PAGE / MK_CACHE_STAGES / 2, items = (mk_page_quot(last, per) + 1) * groups, parts = m->parts;
    const uint8_t *const base = a->kv + m->kv_off;
#pragma unroll 1
    for (uint32_t i = m->part; i < items; i += parts) {
        const uint32_t first = mk_page_quot(i, groups) * per, n = min(per, last + 1 - first);
        const uint32_t *page = a->page + ((size_t)slot * a->max_pages + first);
        const uint8_t *before = base;
        uint32_t id = __ldcg(page);
#pragma unroll 1
        for (uint32_t k = first == last; k < n; k++) {
            const uint8_t *at = base + (uint64_t)id * a->kv_page_bytes, *from = at;
            uint32_t here = MK_PAGE;
            if (k + 1 < n) id = __ldcg(page + k + 1);
            if (first + k == last) { /* the newest token is written in this step */
                const mk_wait *w = &in->wait[2];
                const mk_vec *v = &sh->vec[w->vec];
                const uint32_t target = mk_counter_target(v, step, w->pub);
                while ((int32_t)(mk_load_acquire(a->counter + v->counter) - target) < 0)
                    if (feed_leaves(f) || mk_load_relaxed(a->abort)) return false; /* in a phase nobody says that it is time to leave */
                asm volatile("fence.proxy.async.global;" ::: "memory");
                here = pos % MK_PAGE + 1;
            }
#pragma unroll 1
            for (uint32_t half = 0; half < 2 * MK_CACHE_STAGES; half++) {
                const uint32_t own = min(here, tokens), to = f->to - f->scales + (half & 1 ? tokens * bytes + MK_CACHE_SKEW : 0);
                if (!(half & 1)) {
                    if (!feed_room(f)) return false;
                    f->unloaded ? mk_mbar_arrive(f->bar) : mk_mbar_expect(f->bar, 2 * tokens * bytes);
                }
                if (own && !f->unloaded) mk_bulk_copy(to, from, own * bytes, f->bar, f->policy);
                if (own < tokens && !f->unloaded) mk_bulk_copy(to + own * bytes, before + (from - at) + own * bytes, (tokens - own) * bytes, f->bar, f->policy);
                here -= own;
                from += tokens * bytes;
                if (half & 1) feed_next(f);
            }
            before = at;
        }
    }
    return true;
}

/* Nothing may be in flight when the block leaves: of every slot the last use, if it had one. */
MK_DEV void feed_drain(const mk_feed *f)
{
    for (uint32_t bar = f->full; bar < max(f->used, f->bar); bar += 8)
        while (!mk_mbar_try(bar, bar < f->bar ? f->phase : f->phase ^ 1)) {}
}

MK_DEV mk_seg seg_at(const mk_seg *s)
{
    union {
        uint4 q[3];
        mk_seg s;
    } u;
    for (int i = 0; i < 3; i++) u.q[i] = __ldg((const uint4 *)s + i);
    return u.s;
}
/* A description in registers, unpacked: what lies between ROUTE's word and the first copy is on the way of the token. Names as in mk_seg. */
typedef struct mk_slices {
    uint64_t base, stride;
    union {
        uint32_t slice_stride, bytes;
    };
    union {
        uint32_t magic, stage;
    };
    uint32_t scales, T, parts, nkb, rows, t, per_most, per_less, most, blank, share;
} mk_slices;
MK_DEV mk_slices slices_of(const uint8_t *region, mk_seg s)
{
    mk_slices w = {(uint64_t)region + s.base, s.stride, {s.slice_stride}, {s.magic}, s.scales, s.T, s.parts, s.nkb, s.rows, s.t, s.per_most, s.per_less, s.most, s.blank, s.share};
    asm volatile("" : "+l"(w.base), "+l"(w.stride)); /* now: later every instruction counts */
    mk_keep(&w.slice_stride), mk_keep(&w.scales), mk_keep(&w.magic), mk_keep(&w.T), mk_keep(&w.parts), mk_keep(&w.nkb);
    mk_keep(&w.rows), mk_keep(&w.t), mk_keep(&w.per_most), mk_keep(&w.per_less), mk_keep(&w.most), mk_keep(&w.blank);
    return w;
}

/* Streams the halves of some experts that share two stages (mk_down_shared), each behind its scales: n of them, whose numbers are `expert`. False: leave. */
MK_DEV bool feed_shared(mk_feed *f, const mk_slices *w, const uint16_t *expert, uint32_t n)
{
    const uint8_t *slice = (const uint8_t *)w->base + (uint64_t)w->t * w->slice_stride;
    const uint32_t half = w->per_most * w->rows * MK_KBLOCK_BYTES, each = w->scales + half;
#pragma unroll 1
    for (uint32_t done = 0; done < 2 * half; done += half) {
        if (!feed_room(f)) return false;
        if (f->unloaded) {
            mk_mbar_arrive(f->bar);
        } else {
            mk_mbar_expect(f->bar, n * each);
            uint32_t to = f->to - f->scales;
#pragma unroll 1
            for (uint32_t i = 0; i < n; i++, to += each) {
                const uint8_t *segment = slice + expert[i] * w->stride;
                mk_bulk_copy(to + w->scales, segment + w->scales + done, half, f->bar, f->policy);
                if (w->scales) mk_bulk_copy(to, segment, w->scales, f->bar, f->policy);
            }
        }
        feed_next(f);
    }
    return true;
}

/* All that the worker's queue multiplies, in its order, over instruction, layer and step boundaries, as far as the ring has room. A description comes from device memory: it is asked for
 * before the one before it is streamed. */
MK_DEV void stream(const mk_gpu_args *a, mk_shared *sh)
{
    const uint32_t worker = blockIdx.x, first = a->seg_first[worker], end = a->seg_first[worker + 1];
    mk_feed f = feed_ring(sh);
    bool on = first < end, waited = false; /* for the kernels before */
    uint32_t parity = 0, n_union = 0;
    const mk_routes *routes = 0;
    mk_seg next;
    if (on) next = seg_at(a->seg + first);
    for (uint32_t seq = 0; on && !(MK_ONE_STEP && seq); seq++) {
        for (uint32_t i = first; i < end && on; i++) {
            const mk_seg s = next;
            next = seg_at(a->seg + (i + 1 < end ? i + 1 : first));
            feed_begin(&f, MK_ONE_STEP ? 0 : s.T && !s.rows ? MK_PACE_UP : MK_PACE); /* in a phase nobody waits for an exchange */
            if (s.flags & (MK_SEG_LOGITS | MK_SEG_CACHE) && !MK_ONE_STEP) { /* only now does it matter what the step is */
                uint32_t seen;
                while ((int32_t)((seen = mk_flag_get(&sh->logits[seq & 3])) - (seq + 1) * 2) < 0 && on) on = !feed_leaves(&f);
                if (!on || seen - (seq + 1) * 2 > 1 || s.flags & MK_SEG_LOGITS && !(seen & 1)) continue; /* beyond: the step is over, nothing was wanted of the loader */
            }
            if (s.flags & MK_SEG_CACHE) {
                on = feed_cache(&f, a, sh, &s, seq);
                continue;
            }
            const bool chosen = s.T || s.flags & MK_SEG_ROUTED; /* experts' slices, if there are any; else one segment of the tape */
            const mk_slices w = slices_of(chosen ? a->expert : a->tape, s);
            if (MK_ONE_STEP && chosen && !waited) {
                mk_phase_wait();
                routes = mk_phase_routes(a);
                n_union = routes ? routes->n_union : 0;
                waited = true;
            }
            if (s.flags & MK_SEG_ROUTED) {
                routes = (const mk_routes *)(mk_local_memory(a) + s.route);
                on = feed_await(&f, mk_smem(&sh->route_full), parity);
                parity ^= 1;
                n_union = on ? routes->n_union : 0;
            }
            const mk_divisor by_T = {w.magic, w.T};
            for (uint32_t j = 0; w.share && j < n_union && on; j += 1 << w.share)
                on = feed_shared(&f, &w, routes->expert + j, min(1u << w.share, n_union - j));
            const uint32_t all = !chosen ? 1 : w.share ? 0 : n_union * w.T, step = w.rows ? w.T : a->workers; /* EXPERT_DOWN: the same slice of every expert; EXPERT_UP: slices of all experts are dealt round */
            for (uint32_t k = !chosen ? 0 : w.rows ? w.t : worker; k < all && on; k += step) {
                const uint8_t *segment = (const uint8_t *)w.base;
                uint32_t bytes = w.bytes, stage = w.stage;
                if (chosen) {
                    const uint32_t j = mk_quot(k, by_T), t = k - j * w.T;
                    const uint32_t rows = w.rows ? w.rows : mk_cut(t + 1, w.parts, by_T) - mk_cut(t, w.parts, by_T) << w.t, kb_bytes = rows * MK_KBLOCK_BYTES;
                    segment += routes->expert[j] * w.stride + (uint64_t)t * w.slice_stride;
                    bytes = w.nkb * kb_bytes;
                    stage = (rows == w.most ? w.per_most : w.per_less) * kb_bytes;
                }
                on = feed_segment(&f, segment, w.scales, bytes, stage) && !(chosen && w.blank && !feed_blank(&f));
            }
            if (s.flags & MK_SEG_RELEASES) mk_mbar_arrive(mk_smem(&sh->route_empty)); /* the routes are read: all is issued */
        }
        if (!MK_ONE_STEP) on = on && !feed_leaves(&f); /* should nothing before have waited */
    }
    mk_phase_prefetch(a);
    feed_drain(&f);
}

/* ---- scout ---------------------------------------------------------------------------------------------------------- */

/* A word of each 256 bytes from `at` on, a lane each: what one load of L2 asks memory for. Prefetch instructions bring a third of it (profiles/NOTES.md, fifty-second section). */
MK_DEV uint32_t scout_line(const uint8_t *at, uint32_t lane)
{
    uint32_t word;
    asm volatile("ld.global.cg.L2::256B.b32 %0, [%1];" : "=r"(word) : "l"(at + 256 * lane));
    return word;
}
/* Behind attention a COMBINE, a small product and three exchanges stand before the longest segment of a dense layer: the ring is full, and memory idles. So when this worker has signalled its
 * partials, what the loader will ask for when it has emptied the ring once is brought into L2, from where it comes three times as fast. Not sooner: what is signalled while it is on its way
 * comes later by 0.8 us; and as fast as an SM gets from memory, no faster, for others' packets stand behind it. SCHEDULE's worker has a scout in any program, for what it has been told to conclude
 * (instructions/schedule.cuh). All lanes. */
MK_DEV void scout(const mk_gpu_args *a, mk_shared *sh, uint32_t lane)
{
    constexpr uint32_t PIECE = 32 * 256, CLOCKS = 880; /* of two pieces: 33 bytes a nanosecond and more */
    static_assert(MK_SCOUT_BYTES % (2 * PIECE) == 0, "nothing beyond what the host has put behind the tapes");
    uint32_t attended = 0, words = 0;
    if (!a->ahead && !schedules(a)) return;
    while (!__shfl_sync(0xffffffffu, mk_flag_get(&sh->leave), 0)) {
        if (__shfl_sync(0xffffffffu, mk_schedule_pending(sh), 0)) {
            if (lane == 0) mk_schedule_conclude(sh);
            __syncwarp();
        }
        const uint32_t now = __shfl_sync(0xffffffffu, mk_flag_get(&sh->attended), 0);
        if (now == attended) {
            __nanosleep(40);
            continue;
        }
        attended = now;
        const uint8_t *at = a->tape + ((uint64_t)mk_flag_get(&sh->streamed) << 8) + a->ring.stages * a->ring.stride;
#pragma unroll 1
        for (const uint8_t *end = at + a->ahead; at < end; at += 2 * PIECE) {
            const uint32_t begun = mk_clock(), x = scout_line(at, lane), y = scout_line(at + PIECE, lane);
            while (mk_clock() - begun < CLOCKS) {}
            words |= x | y;
        }
    }
    mk_waiting_set(0, 0, 0, words); /* for nobody: ptxas leaves out loads whose words are not used */
}

/* ---- the kernel ----------------------------------------------------------------------------------------------------- */

/* What a ring holds that is never filled: small numbers of either sign as bf16, as e4m3 and, for scales, as f32. */
MK_DEV uint32_t unloaded_word(uint32_t i)
{
    const uint32_t x = (i ^ i >> 15) * 0x9e3779b1u;
    return ((x ^ x >> 13) & 0x80bf80bfu) | 0x3c003c00u;
}

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
    if (mk_smem(mk_dynamic) != MK_DYNAMIC_AT) __trap();

#ifdef MK_PHASED
    if (warp == MK_WARP_CONTROL && !step_receive(&a, sh, mk_first_step(&a), threadIdx.x % 32, false)) sh->step.nrows = 0;
#endif
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < MK_INSN_RING; i++) {
            mk_mbar_init(&sh->insn_full[i], MK_ARRIVALS);
            mk_mbar_init(&sh->insn_empty[i], MK_WARPS * MK_ARRIVALS);
        }
        for (uint32_t i = 0; i < MK_STAGES; i++) {
            mk_mbar_init(&sh->full[i], 1);
            mk_mbar_init(&sh->empty[i], 4 * MK_ARRIVALS); /* a slot has its warpgroup: matvec.cuh */
        }
        mk_mbar_init(&sh->route_full, MK_ARRIVALS);
        mk_mbar_init(&sh->route_staged, MK_WARPS * MK_ARRIVALS);
        mk_mbar_init(&sh->route_empty, 1);
        mk_mbar_init(&sh->aside_full, MK_ARRIVALS);
        mk_mbar_init(&sh->aside_done, MK_ASIDES * MK_ARRIVALS);
        for (uint32_t i = 0; i < 2; i++) {
            mk_mbar_init(&sh->pairs_full[i], MK_ASIDES * MK_ARRIVALS);
            mk_mbar_init(&sh->pairs_empty[i], MK_WARPS * MK_ARRIVALS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        for (uint32_t i = 0; i < 4; i++) sh->logits[i] = 0;
        sh->leave = sh->submitted = sh->taken = sh->bus = sh->published = sh->idle = sh->sweep_due = sh->draw_met = sh->current = sh->aborted = sh->streamed = sh->attended = 0;
        sh->told = 0xffffffffu; /* no step */
        sh->stage_kind = MK_FAULT_TAPE;
        memset(sh->waiting, 0, sizeof sh->waiting);
        sh->trace.on = sh->trace.weights = 0;
        sh->trace.first = a.queue[blockIdx.x];
        memset(sh->memo, 0, sizeof sh->memo);
        for (uint32_t i = 0; i < MK_WARPS; i++) sh->memo[i].n = MK_NO_INSN;
        sh->args = a;
        mk_schedule_begin(&a, sh);
    }
    for (uint32_t i = threadIdx.x; i < a.n_vec * sizeof(mk_vec) / 16; i += MK_THREADS) ((uint4 *)sh->vec)[i] = ((const uint4 *)a.vec)[i];
    for (uint32_t i = threadIdx.x; i < (a.n_start + 7) / 8; i += MK_THREADS) ((uint4 *)sh->start)[i] = ((const uint4 *)a.start)[i];
    for (uint32_t i = threadIdx.x; a.unloaded && i < a.ring.stages * a.ring.stride / 4; i += MK_THREADS) ((uint32_t *)((uint8_t *)sh + a.ring.at))[i] = unloaded_word(i);
    if (a.local_image) local_copy(mk_local_memory(&a), a.local_image + (size_t)blockIdx.x * a.local_bytes, a.local_bytes);
    __syncthreads();
    if (threadIdx.x < MK_WARPS) mk_next_begin(sh, threadIdx.x);
    if (threadIdx.x < a.n_vec && sh->vec[threadIdx.x].slice_packets) sh->vec[threadIdx.x].reserved = mk_div_by(sh->vec[threadIdx.x].slice_packets).magic;
    __syncthreads();

    if (warp < MK_WARPS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MK_REGS_COMPUTE));
        compute(&a);
        if (a.local_image) {
            mk_sync();
            local_copy(a.local_image + (size_t)blockIdx.x * a.local_bytes, mk_local_memory(&a), a.local_bytes);
        }
    } else if (warp >= MK_WARP_ASIDE) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(MK_REGS_ASIDE));
        if (!MK_ONE_STEP) mk_aside(sh);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(MK_REGS_HELPER));
        if (warp == MK_WARP_CONTROL) {
            control(&a, sh);
        } else if (warp == MK_WARP_COURIER) {
            if (!MK_ONE_STEP && schedules(&a)) mk_courier(&a, sh, threadIdx.x % 32);
        } else if (warp == MK_WARP_LOADER) {
            if (mk_elect()) stream(&a, sh);
        } else if (!MK_ONE_STEP) {
            scout(&a, sh, threadIdx.x % 32);
        }
    }
}

#ifndef MK_PHASED
const void *mk_kernel_all(void)
{
    return (const void *)mk_resident;
}
#endif
