/* SCHEDULE on the device: one thread of one worker, and a courier. The rules are megakernel/schedule.h, the same source as the twin's.
 *
 * From an idle machine to the first instruction there is one way across the bus, the courier's look that finds the entry. Whatever else SCHEDULE needs comes with the
 * entry, the looks or the step before. Between courier and SCHEDULE, which share an SM, there are words of shared memory and fences of the block: a fence of the
 * whole GPU would empty their L1 as well. */
#ifndef MK_SCHEDULE_CUH
#define MK_SCHEDULE_CUH

#include "megakernel/device.cuh"

/* SCHEDULE's worker, before anything else: what SCHEDULE knows moves into shared memory, where it takes 30 clocks to read a word; device memory takes 300 whenever
 * the word has been stored to. In the phases' kernels (MK_PHASED) it has to outlive the kernel; racecheck would take what the courier
 * does there for races. */
#if defined(MK_PHASED) || defined(MK_RACECHECK)
#define MK_NEAR 0
#else
#define MK_NEAR 1
#endif
MK_DEV void mk_schedule_begin(const mk_gpu_args *a, mk_shared *sh)
{
#if MK_NEAR
    mk_sched *s = &sh->sched;
    *s = *a->sched;
    memset(&sh->near_entry, 0, sizeof sh->near_entry);
    s->near = &sh->near_entry;
    if (s->n_slots > MK_NEAR_SLOTS) return;
    memset(sh->st, 0, sizeof sh->st);
    s->st = sh->st;
    s->active = sh->active;
#endif
}
MK_DEV mk_sched *mk_schedule_state(mk_shared *sh)
{
    return MK_NEAR ? &sh->sched : sh->args.sched;
}

/* Writes a step descriptor to `to`, by one warp: a packet a lane, whose epoch is the step number + 1. */
MK_DEV void mk_step_publish(const mk_step *step, uint4 *to, uint32_t lane)
{
    const uint32_t *word = (const uint32_t *)step, words = sizeof *step / 4;
    uint32_t w[3] = {0, 0, 0};
#pragma unroll
    for (uint32_t k = 0; k < 3; k++)
        if (3 * lane + k < words) w[k] = word[3 * lane + k];
    if (lane < mk_step_packets(step->nrows)) mk_packet_store(to + lane, w[0], w[1], w[2], step->seq + 1);
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

MK_DEV mk_looker mk_looker_new(const mk_gpu_args *a, const mk_sched *s)
{
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
    asm volatile("st.relaxed.cta.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
MK_DEV void mk_cta_store64(uint64_t *p, uint64_t v)
{
    asm volatile("st.relaxed.cta.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

/* One look across the bus, by a warp, all of it in one load: the first lanes look at the packets of the next entry, one at the events taken, the others at a stream
 * each; where there are more streams, the next look goes on with them. */
typedef struct mk_look {
    uint4 q;       /* what this lane's packet says */
    uint32_t seen; /* entries when the look began */
    uint32_t slot; /* this lane's stream, MK_NONE */
} mk_look;

MK_DEV mk_look mk_look_begin(mk_looker *l, uint32_t lane)
{
    const uint32_t packets = MK_SUBMIT_PACKETS, streams = 31 - packets, n = mk_look_load(l->n_active), own = l->from + lane - packets - 1;
    mk_look k;
    const uint4 *p = lane < packets ? l->submit + (l->seen % MK_SUBMIT_RING) * (sizeof(mk_submit_packets) / 16) + lane : l->event_read;
    k.slot = MK_NONE;
    if (lane > packets && own < n) {
        k.slot = mk_look_load(&l->active[own]);
        p = (const uint4 *)&l->slot[k.slot];
    }
    k.q = mk_bus_load(p);
    k.seen = l->seen;
    l->from = l->from + streams < n ? l->from + streams : 0;
    return k;
}

/* Waits for the answer. True: there is news, and it lies where SCHEDULE reads it (after a fence of the block). near: where the entry goes as well, if not NULL. What a
 * look that began before the last entry was found says of the streams is not taken: it may be older than that entry. */
MK_DEV bool mk_look_end(mk_looker *l, const mk_look *k, mk_submit *near, uint32_t lane)
{
    const uint32_t packets = MK_SUBMIT_PACKETS;
    const uint4 q = k->q;
    const bool late = k->seen != l->seen, entry = __all_sync(0xffffffffu, lane >= packets || q.w == l->seen + 1) && !late;
    const uint32_t taken = __shfl_sync(0xffffffffu, q.x, packets);
    bool news = taken != l->taken || entry;
    l->taken = taken;
    if (entry) {
        if (lane < packets) {
            uint32_t *word = (uint32_t *)&l->entry[l->seen % MK_SUBMIT_RING] + 1 + 3 * lane;
            word[0] = q.x;
            word[1] = q.y;
            word[2] = q.z;
            if (near) {
                word = (uint32_t *)near + 1 + 3 * lane;
                word[0] = q.x;
                word[1] = q.y;
                word[2] = q.z;
                if (lane == 0) near->seq = l->seen + 1;
            }
        }
        l->seen++;
    }
    if (k->slot != MK_NONE && !late) {
        mk_sched_slot *t = &l->st[k->slot];
        const uint64_t credits = (uint64_t)q.w << 32 | q.z;
        if (mk_look_load(&t->generation) == q.x && (q.y != mk_look_load(&t->cancel) || credits != mk_look_load64(&t->credits))) { /* another generation: the list has changed */
            mk_cta_store(&t->cancel, q.y);
            mk_cta_store64(&t->credits, credits);
            news = true;
        }
    }
    return __any_sync(0xffffffffu, news);
}
static_assert(offsetof(mk_slot, generation) == 0 && offsetof(mk_slot, cancel) == 4 && offsetof(mk_slot, credits) == 8, "a slot's first packet");

#define MK_LOOK_CLOCKS 1100 /* at least, between the beginnings of two looks: somewhat less than half of what an answer takes */

/* Begins a look and ends the one before. They are two objects, never copied: that would wait for the answer. */
MK_DEV void mk_courier_turn(mk_shared *sh, mk_looker *l, mk_look *next, const mk_look *last, long long *began, uint32_t *news, uint32_t lane)
{
    const volatile uint32_t *taken = &mk_schedule_state(sh)->submit_next;
    while (__shfl_sync(0xffffffffu, clock64() - *began < MK_LOOK_CLOCKS, 0)) {}
    *began = clock64();
    *next = mk_look_begin(l, lane);
    /* when SCHEDULE has taken all there is, it does not read the near entry */
    const bool nearby = MK_NEAR && __shfl_sync(0xffffffffu, *taken == l->seen, 0);
    if (!mk_look_end(l, last, nearby ? &sh->near_entry : 0, lane)) return;
    __threadfence_block();
    __syncwarp();
    if (lane) return;
    mk_flag_set(&sh->submitted, l->seen);
    mk_flag_set(&sh->taken, l->taken);
    __threadfence_block();
    mk_flag_set(&sh->news, ++*news);
}

/* A warp of SCHEDULE's worker that does nothing but look: an answer takes longer than all that SCHEDULE decides. Two looks are under way at any time. */
MK_DEV void mk_courier(const mk_gpu_args *a, mk_shared *sh, uint32_t lane)
{
    mk_looker l = mk_looker_new(a, mk_schedule_state(sh));
    uint32_t news = 0;
    long long began = clock64();
    mk_look one = mk_look_begin(&l, lane), other;
    for (uint32_t round = 0; !mk_flag_get(&sh->leave); round++) {
        /* SCHEDULE counts, the courier tells: the pulse stops when either does */
        if (lane == 0 && !(round & 255u)) ((volatile uint32_t *)a->heartbeat)[MK_BEAT_IDLE] = mk_flag_get(&sh->idle);
        mk_courier_turn(sh, &l, &other, &one, &began, &news, lane);
        mk_courier_turn(sh, &l, &one, &other, &began, &news, lane);
    }
}

/* ---- deciding ------------------------------------------------------------------------------------------------------- */

/* Code that has not run for a step's time comes from L2, line after line. So, before it waits, SCHEDULE decides for a stream that nobody has: a generation begins. */
typedef struct mk_rehearsal {
    mk_sched s;
    mk_sched_slot st;
    mk_submit entry;
    uint32_t active;
} mk_rehearsal;
static_assert(sizeof(mk_rehearsal) <= MK_STAGING, "while SCHEDULE runs the staging area is nobody's");

MK_DEV mk_sched *mk_schedule_rehearsal(mk_rehearsal *r, uint32_t lane)
{
    for (uint32_t k = lane; k < sizeof *r / 4; k += 32) ((uint32_t *)r)[k] = 0;
    __syncwarp();
    if (lane == 0) {
        r->s.submit = &r->entry;
        r->s.near = &r->entry;
        r->s.st = &r->st;
        r->s.active = &r->active;
        r->s.n_slots = r->s.n_active = r->s.submitted = 1;
        r->st.open = r->st.len = 1;
        r->st.context = 2;
        r->entry.seq = 1;
        r->entry.op = MK_SUB_GENERATE;
        r->entry.arg0 = 1;
        r->entry.generate.credits = 1;
    }
    return &r->s;
}

/* Composes and publishes the next step, waiting for the host as long as there is nothing to do. By one warp; go (lane 0): not aborted. */
MK_CALL void mk_schedule_next(uint32_t lane, bool go)
{
    mk_shared *sh = mk_sh();
    const mk_gpu_args *a = &sh->args;
    mk_sched *own = mk_schedule_state(sh);
    const uint32_t submit_next = own->submit_next;
    if (!__shfl_sync(0xffffffffu, go, 0)) return;
    enum { AT_ONCE, REHEARSE, WAIT };
    for (uint32_t pass = AT_ONCE;; pass++) {
        mk_sched *s = own;
        bool on = true;
#ifdef MK_PHASED /* there is no courier, and no rehearsal */
        mk_looker l = mk_looker_new(a, s);
        const mk_look look = mk_look_begin(&l, lane);
        mk_look_end(&l, &look, 0, lane);
        __threadfence_block();
        __syncwarp();
        if (lane == 0) {
            s->submitted = l.seen;
            s->taken = l.taken;
            mk_sched_compose(s, mk_now());
            ((volatile uint32_t *)a->heartbeat)[MK_BEAT_IDLE]++;
            on = !mk_load_relaxed(a->abort);
        }
        pass = AT_ONCE;
#else
        if (pass == REHEARSE) s = mk_schedule_rehearsal((mk_rehearsal *)sh->staging, lane);
        while (lane == 0) {
            const uint32_t news = mk_flag_get(&sh->news);
            __threadfence_block();
            if (pass != REHEARSE) {
                s->submitted = mk_flag_get(&sh->submitted);
                s->taken = mk_flag_get(&sh->taken);
            }
            mk_sched_compose(s, mk_now());
            if (s->hang == MK_HANG_ERROR) asm volatile("st.global.u32 [%0], 0;" ::"l"(16ull) : "memory");
            while (s->hang == MK_HANG_IDLE && !mk_load_relaxed(a->abort)) {}
            if (pass != WAIT || s->stop || s->next.nrows) break;
            if (s->submitted != s->submit_next && !s->stalled) continue; /* there was more than one look's worth */
            for (uint32_t n = 1; on && mk_flag_get(&sh->news) == news; n++) {
                if (n & 63u) continue;
                mk_flag_set(&sh->idle, sh->idle + 1);
                on = !mk_load_relaxed(a->abort);
            }
            if (!on) break;
        }
#endif
        __syncwarp();
        if (!__shfl_sync(0xffffffffu, on, 0)) return;
        if (!s->next.nrows && !s->stop) continue;
        if (s->stop && lane == 0) {
            s->next.nrows = 0;
            s->next.seq = s->step;
        }
        mk_sched_look_up(s, lane, 32);
        __syncwarp();
        mk_step_publish(&s->next, a->step_ring + (pass == REHEARSE ? MK_STEP_RING : s->next.seq % MK_STEP_RING) * MK_STEP_PACKETS, lane);
        if (pass != REHEARSE) break;
    }
    if (lane == 0) {
        volatile uint32_t *beat = (volatile uint32_t *)a->heartbeat;
        if (own->submit_next != submit_next) beat[MK_BEAT_TAKEN] = own->submit_next;
        beat[MK_BEAT_EVENTS] = own->event_next;
        beat[MK_BEAT_STREAMS] = own->n_active;
    }
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
    mk_sync(); /* the staging area is free */
    if (d->warp != 0) return;
    const bool go = d->lane == 0 && !mk_load_relaxed(d->a->abort);
    if (go) {
        const mk_sampled *m = (const mk_sampled *)mk_local_at(d, d->in->wait[0].vec);
        mk_sched *s = mk_schedule_state(d->sh);
        mk_sched_finish(s, d->step, m->token, m->logprob, mk_now());
        s->step++;
        ((volatile uint32_t *)d->a->heartbeat)[MK_BEAT_STEPS] = s->step;
    }
    __syncwarp();
    mk_trace_publish(d);
    mk_trace_end(d);
    mk_schedule_next(d->lane, go);
}

#endif
