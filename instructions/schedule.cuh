/* SCHEDULE on the device: one thread of one worker, and a courier. The rules are megakernel/schedule.h, the same source as the twin's.
 *
 * From an idle machine to the first instruction there is one way across the bus, the courier's look that finds the entry. Whatever else SCHEDULE needs comes with the
 * entry, the looks or the step before. Between courier and SCHEDULE, which share an SM, there are words of shared memory and fences of the block: a fence of the
 * whole GPU would empty their L1 as well. */
#ifndef MK_SCHEDULE_CUH
#define MK_SCHEDULE_CUH

#include "megakernel/device.cuh"

/* Writes the step descriptor, by one warp: a packet a lane, whose epoch is the step number + 1. */
MK_DEV void mk_step_publish(const mk_gpu_args *a, uint32_t lane)
{
    const mk_step *step = &a->sched->next;
    const uint32_t *word = (const uint32_t *)step, words = sizeof *step / 4, seq = step->seq;
    uint32_t w[3] = {0, 0, 0};
#pragma unroll
    for (uint32_t k = 0; k < 3; k++)
        if (3 * lane + k < words) w[k] = word[3 * lane + k];
    if (lane < MK_STEP_PACKETS)
        mk_packet_store(a->step_ring + (seq % MK_STEP_RING) * MK_STEP_PACKETS + lane, w[0], w[1], w[2], seq + 1);
}

/* ---- looks ---------------------------------------------------------------------------------------------------------- */

/* What a warp that looks across the bus knows. */
typedef struct mk_looker {
    const uint4 *submit, *event_read; /* pinned */
    const mk_slot *slot;              /* pinned */
    mk_submit *entry;                 /* where entries go, as SCHEDULE takes them */
    mk_sched_slot *st;
    const uint32_t *n_active, *active;
    uint32_t seen, taken; /* entries, events, so far */
    uint32_t from;        /* in the list of active streams */
} mk_looker;

MK_DEV mk_looker mk_looker_new(const mk_gpu_args *a)
{
    const mk_sched *s = a->sched;
    mk_looker l = {(const uint4 *)a->submit, (const uint4 *)s->event_read, s->slot, s->submit, s->st, &s->n_active, s->active, s->submitted, s->taken, 0};
    return l;
}

MK_DEV uint4 mk_bus_load(const uint4 *p)
{
    uint64_t lo, hi;
    asm volatile("{\n\t.reg .b128 v;\n\tld.relaxed.sys.global.b128 v, [%2];\n\tmov.b128 {%0, %1}, v;\n\t}" : "=l"(lo), "=l"(hi) : "l"(p) : "memory");
    return make_uint4((uint32_t)lo, (uint32_t)(lo >> 32), (uint32_t)hi, (uint32_t)(hi >> 32));
}
MK_DEV void mk_cta_store(uint32_t *p, uint32_t v)
{
    asm volatile("st.relaxed.cta.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
MK_DEV void mk_cta_store64(uint64_t *p, uint64_t v)
{
    asm volatile("st.relaxed.cta.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

/* One look across the bus, by a warp, all of it in one load: the first lanes look at the packets of the next entry, one at the events taken, the others at a stream
 * each; where there are more streams, the next look goes on with them. True: there is news, and it lies where SCHEDULE reads it. */
MK_DEV bool mk_look(mk_looker *l, uint32_t lane)
{
    const uint32_t packets = MK_SUBMIT_PACKETS, streams = 31 - packets, n = mk_look_load(l->n_active), own = l->from + lane - packets - 1;
    const bool mine = lane > packets && own < n;
    const uint32_t slot = mine ? mk_look_load(&l->active[own]) : 0;
    const uint4 *p = lane < packets ? l->submit + (l->seen % MK_SUBMIT_RING) * (sizeof(mk_submit_packets) / 16) + lane : mine ? (const uint4 *)&l->slot[slot] : l->event_read;
    const uint4 q = mk_bus_load(p);
    /* meanwhile */
    mk_sched_slot *t = &l->st[slot];
    uint32_t cancel = 0;
    uint64_t credits = 0;
    if (mine) {
        cancel = mk_look_load(&t->cancel);
        credits = mk_look_load64(&t->credits);
    }
    l->from = l->from + streams < n ? l->from + streams : 0;

    const bool entry = __all_sync(0xffffffffu, lane >= packets || q.w == l->seen + 1);
    const uint32_t taken = __shfl_sync(0xffffffffu, q.x, packets);
    const uint64_t now = (uint64_t)q.w << 32 | q.z;
    bool news = taken != l->taken || entry;
    if (entry && lane < packets) {
        uint32_t *word = (uint32_t *)&l->entry[l->seen % MK_SUBMIT_RING] + 1 + 3 * lane;
        word[0] = q.x;
        word[1] = q.y;
        word[2] = q.z;
    }
    if (mine && mk_look_load(&t->generation) == q.x && (q.y != cancel || now != credits)) { /* another generation: the list has changed meanwhile */
        mk_cta_store(&t->cancel, q.y);
        mk_cta_store64(&t->credits, now);
        news = true;
    }
    l->seen += entry;
    l->taken = taken;
    return __any_sync(0xffffffffu, news);
}
static_assert(offsetof(mk_slot, generation) == 0 && offsetof(mk_slot, cancel) == 4 && offsetof(mk_slot, credits) == 8, "a slot's first packet");

/* A warp of SCHEDULE's worker that does nothing but look: an answer takes longer than all that SCHEDULE decides. */
MK_DEV void mk_courier(const mk_gpu_args *a, mk_shared *sh, uint32_t lane)
{
    mk_looker l = mk_looker_new(a);
    uint32_t news = 0;
    for (uint32_t round = 0; !mk_flag_get(&sh->leave); round++) {
        /* SCHEDULE counts, the courier tells: the pulse stops when either does */
        if (lane == 0 && !(round & 255u)) ((volatile uint32_t *)a->heartbeat)[MK_BEAT_IDLE] = mk_flag_get(&sh->idle);
        if (!mk_look(&l, lane)) continue;
        __threadfence_block();
        __syncwarp();
        if (lane == 0) {
            mk_flag_set(&sh->submitted, l.seen);
            mk_flag_set(&sh->taken, l.taken);
            __threadfence_block();
            mk_flag_set(&sh->news, ++news);
        }
    }
}

/* ---- deciding ------------------------------------------------------------------------------------------------------- */

/* Composes the next step, waiting for the host as long as there is nothing to do. By a warp; false: aborted. */
MK_CALL bool mk_schedule_compose(uint32_t lane)
{
    mk_shared *sh = mk_sh();
    const mk_gpu_args *a = &sh->args;
    mk_sched *s = a->sched;
    const uint32_t submit_next = s->submit_next;
    bool on = true;
    __syncwarp();
#ifdef MK_PHASED /* there is no courier */
    for (bool more = true; more;) {
        mk_looker l = mk_looker_new(a);
        mk_look(&l, lane);
        __threadfence_block();
        __syncwarp();
        if (lane == 0) {
            s->submitted = l.seen;
            s->taken = l.taken;
            mk_sched_compose(s, mk_now());
            more = !s->stop && !s->next.nrows;
            if (more) ((volatile uint32_t *)a->heartbeat)[MK_BEAT_IDLE]++;
            if (more && mk_load_relaxed(a->abort)) more = on = false;
        }
        more = __shfl_sync(0xffffffffu, more, 0);
    }
#else
    while (lane == 0) {
        const uint32_t news = mk_flag_get(&sh->news);
        __threadfence_block();
        s->submitted = mk_flag_get(&sh->submitted);
        s->taken = mk_flag_get(&sh->taken);
        mk_sched_compose(s, mk_now());
        if (s->hang == MK_HANG_ERROR) asm volatile("st.global.u32 [%0], 0;" ::"l"(16ull) : "memory");
        while (s->hang == MK_HANG_IDLE && !mk_load_relaxed(a->abort)) {}
        if (s->stop || s->next.nrows) break;
        if (s->submitted != s->submit_next && !s->stalled) continue; /* there was more than one look's worth */
        for (uint32_t n = 1; on && mk_flag_get(&sh->news) == news; n++) {
            if (n & 63u) continue;
            mk_flag_set(&sh->idle, sh->idle + 1);
            on = !mk_load_relaxed(a->abort);
        }
        if (!on) break;
    }
#endif
    if (lane == 0 && s->submit_next != submit_next) ((volatile uint32_t *)a->heartbeat)[MK_BEAT_TAKEN] = s->submit_next;
    if (lane == 0 && s->stop) {
        s->next.nrows = 0;
        s->next.seq = s->step;
    }
    on = __shfl_sync(0xffffffffu, on, 0);
    __syncwarp();
    return on;
}

/* By one warp; go (lane 0): not aborted. */
MK_DEV void mk_schedule_next(const mk_gpu_args *a, uint32_t lane, bool go)
{
    go = __shfl_sync(0xffffffffu, go, 0) && mk_schedule_compose(lane);
    if (!go) return;
    mk_sched_look_up(a->sched, lane, 32);
    __syncwarp();
    mk_step_publish(a, lane);
}

/* Epochs repeat after 2^32 / MK_EPOCH_STRIDE steps, and a row that few steps have keeps its packets as long (megakernel/exchange.h,
 * mk_exchange_sweep). Now nobody reads or writes packets: SAMPLE has seen every worker's last publication, and the next step begins with the
 * descriptor, which is stored after the fence. */
MK_DEV void mk_schedule_sweep(const mk_dev *d)
{
    const mk_gpu_args *a = d->a;
    const uint32_t next = d->step->seq + 1, base = a->epoch0 + next * MK_EPOCH_STRIDE;
    if (next % a->sweep) return;
    for (uint32_t i = d->tid; i < a->packets; i += MK_COMPUTE) mk_packet_store((uint4 *)a->exchange + i, 0, 0, 0, base);
    __threadfence();
    mk_sync();
}

MK_DEV void mk_schedule_run(const mk_dev *d)
{
    mk_schedule_sweep(d);
    if (d->warp != 0) return;
    const bool go = d->lane == 0 && !mk_load_relaxed(d->a->abort);
    if (go) {
        const mk_sampled *m = (const mk_sampled *)mk_local_at(d, d->in->wait[0].vec);
        mk_sched *s = d->a->sched;
        mk_sched_finish(s, d->step, m->token, m->logprob, mk_now());
        s->step++;
        ((volatile uint32_t *)d->a->heartbeat)[MK_BEAT_STEPS] = s->step;
    }
    __syncwarp();
    mk_trace_publish(d);
    mk_trace_end(d);
    mk_schedule_next(d->a, d->lane, go);
}

#endif
