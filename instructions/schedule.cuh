/* SCHEDULE on the device: one thread of one worker, or of its scout. The rules are megakernel/schedule.h, the same source as the twin's.
 *
 * A look across the bus takes longer than deciding. While a step runs, a warp of its own, the courier, looks; what it brings SCHEDULE finds in shared memory. When there is
 * nothing to do SCHEDULE takes the bus over and looks itself: from an idle machine to the first instruction there is one way across the bus, and nobody to hand over
 * to. Whatever else SCHEDULE needs comes with the entry, the looks or the step before.
 *
 * While one stream generates, nobody waits for SCHEDULE: the next step is told before its token is chosen (mk_schedule_dress), SAMPLE tells that one (mk_schedule_sure), the controller passes SCHEDULE
 * over, and the scout does what it would have done (mk_schedule_conclude) while all workers are at the next step. */
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

/* Writes a step descriptor to `to`, by one warp: a packet a lane, whose epoch is the step number + 1. A step that is sure but for its token comes in two parts: EARLY all packets but the one with the
 * token, which mk_schedule_sure sends when it is chosen. If that ends the generation, another step is written over those packets (INSTEAD), and the token's, which comes behind them, says so: who has
 * seen it reads all once more. */
enum mk_telling { MK_TELL_WHOLE, MK_TELL_EARLY, MK_TELL_INSTEAD };
MK_DEV void mk_step_publish(const mk_step *step, uint4 *to, mk_telling how, uint32_t lane)
{
    const uint32_t *word = (const uint32_t *)step, words = sizeof *step / 4;
    uint32_t w[3] = {0, 0, 0};
#pragma unroll
    for (uint32_t k = 0; k < 3; k++)
        if (3 * lane + k < words) w[k] = word[3 * lane + k];
    const bool mine = lane < mk_step_packets(step->nrows), token = lane == MK_TOKEN_PACKET;
    if (mine && (!token || how == MK_TELL_WHOLE)) mk_packet_store(to + lane, w[0], w[1], w[2], step->seq + 1);
    if (how != MK_TELL_INSTEAD) return;
    __threadfence();
    __syncwarp();
    __threadfence();
    if (token) mk_packet_store(to + lane, w[0], w[1], w[2] | MK_ROW_INSTEAD, step->seq + 1);
}

/* ---- looks ---------------------------------------------------------------------------------------------------------- */

/* What a warp that looks across the bus knows. */
typedef struct mk_looker {
    const uint4 *submit, *event_read; /* pinned */
    const mk_slot *slot;              /* pinned */
    const uint4 *abort;
    mk_submit *entry;                 /* where entries go, as SCHEDULE takes them */
    mk_sched_slot *st;
    const uint32_t *n_active, *active;
    uint32_t seen, taken; /* entries, events, so far */
    uint32_t from;        /* in the list of active streams */
    bool aborted;
} mk_looker;

MK_DEV mk_looker mk_looker_new(const mk_gpu_args *a, const mk_sched *s)
{
    mk_looker l = {(const uint4 *)a->submit, (const uint4 *)s->event_read, s->slot, (const uint4 *)a->abort, s->submit, s->st, &s->n_active, s->active, s->submitted, s->taken, 0, false};
    return l;
}

/* Orders accesses for the block's other threads; not more, as __threadfence_block() does. */
MK_DEV void mk_fence_cta(void)
{
    asm volatile("fence.acq_rel.cta;" ::: "memory");
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

/* One look across the bus, by a warp, all of it in one load: the first lanes look at the packets of the next entry, one at the events taken, one at the abort word, the others
 * at a stream each; where there are more streams, the next look goes on with them. True: there is news, and it lies where SCHEDULE reads it (after a fence of the
 * block). near: where an entry goes as well, if not NULL. What is said of the streams by a look that finds an entry may be older than the entry, and is not taken. */
MK_DEV bool mk_look(mk_looker *l, mk_submit *near, uint32_t lane)
{
    const uint32_t packets = MK_SUBMIT_PACKETS, others = packets + 2, n = mk_look_load(l->n_active), own = l->from + lane - others;
    const bool mine = lane >= others && own < n;
    const uint4 *p = lane < packets ? l->submit + (l->seen % MK_SUBMIT_RING) * (sizeof(mk_submit_packets) / 16) + lane : lane == packets ? l->event_read : l->abort;
    uint32_t slot = 0;
    if (mine) {
        slot = mk_look_load(&l->active[own]);
        p = (const uint4 *)&l->slot[slot];
    }
    const uint4 q = mk_bus_load(p);
    if (__all_sync(0xffffffffu, lane >= packets || q.w == l->seen + 1)) {
        uint32_t *word = (uint32_t *)&l->entry[l->seen % MK_SUBMIT_RING] + 1 + 3 * lane, *here = (uint32_t *)near + 1 + 3 * lane;
        l->seen++;
        if (lane >= packets) return true;
        if (near) {
            here[0] = q.x;
            here[1] = q.y;
            here[2] = q.z;
            if (lane == 0) near->seq = l->seen;
        }
        word[0] = q.x;
        word[1] = q.y;
        word[2] = q.z;
        return true;
    }
    const uint32_t taken = __shfl_sync(0xffffffffu, q.x, packets);
    bool news = taken != l->taken;
    l->taken = taken;
    l->aborted = __shfl_sync(0xffffffffu, q.x, packets + 1) != 0;
    l->from = l->from + 32 - others < n ? l->from + 32 - others : 0;
    if (mine) {
        mk_sched_slot *t = &l->st[slot];
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

/* Whose the bus is. */
enum mk_bus { MK_BUS_COURIER, MK_BUS_ASKED, MK_BUS_SCHEDULE, MK_BUS_NOBODY };

/* A warp of SCHEDULE's worker that does nothing but look, while a step runs. */
MK_DEV void mk_courier(const mk_gpu_args *a, mk_shared *sh, uint32_t lane)
{
    mk_looker l = mk_looker_new(a, mk_schedule_state(sh));
    bool away = false;
    for (;;) {
        const uint32_t bus = __shfl_sync(0xffffffffu, mk_flag_get(&sh->leave) ? MK_BUS_NOBODY : mk_flag_get(&sh->bus), 0);
        if (bus == MK_BUS_NOBODY) return;
        if (bus == MK_BUS_COURIER) {
            if (away) { /* what SCHEDULE has seen meanwhile */
                mk_fence_cta();
                l.seen = mk_flag_get(&sh->submitted);
                l.taken = mk_flag_get(&sh->taken);
                away = false;
            }
            if (!mk_look(&l, 0, lane)) continue;
            mk_fence_cta();
            __syncwarp();
            if (lane) continue;
            mk_flag_set(&sh->submitted, l.seen);
            mk_flag_set(&sh->taken, l.taken);
        } else if (bus == MK_BUS_ASKED) {
            mk_fence_cta();
            __syncwarp();
            away = true;
            if (lane == 0) mk_flag_set(&sh->bus, MK_BUS_SCHEDULE);
        }
    }
}

/* SCHEDULE takes the bus over: when the courier's look is through and what it brought has been told. False: aborted. */
MK_DEV bool mk_bus_take(mk_shared *sh, uint32_t lane)
{
    bool on = true;
    if (lane == 0) {
        mk_flag_set(&sh->bus, MK_BUS_ASKED);
        for (uint32_t n = 1; on && mk_flag_get(&sh->bus) != MK_BUS_SCHEDULE; n++)
            if (!(n & 63u)) on = !mk_load_relaxed(sh->args.abort);
        mk_fence_cta();
    }
    return __shfl_sync(0xffffffffu, on, 0);
}
/* And gives it back. */
MK_DEV void mk_bus_give(mk_shared *sh, const mk_looker *l)
{
    mk_flag_set(&sh->submitted, l->seen);
    mk_flag_set(&sh->taken, l->taken);
    mk_fence_cta();
    mk_flag_set(&sh->bus, MK_BUS_COURIER);
}

/* ---- deciding ------------------------------------------------------------------------------------------------------- */

/* Code that has not run for a step's time comes from L2, line after line. So, before it waits, SCHEDULE decides for two streams that nobody has: one generates, one gets
 * tokens. */
typedef struct mk_rehearsal {
    mk_sched s;
    mk_submit entry[2]; /* the beginning of a ring */
    mk_sched_slot st[2];
    mk_sched_rest rest[2];
    uint32_t active[2];
} mk_rehearsal;
static_assert(sizeof(mk_rehearsal) <= MK_STAGING, "while SCHEDULE runs the staging area is nobody's");

MK_DEV mk_sched *mk_schedule_rehearsal(mk_rehearsal *r, uint32_t lane)
{
    for (uint32_t k = lane; k < sizeof *r / 4; k += 32) ((uint32_t *)r)[k] = 0;
    __syncwarp();
    if (lane == 0) {
        r->s.near = r->s.submit = r->entry;
        r->s.st = r->st;
        r->s.rest = r->rest;
        r->s.active = r->active;
        r->s.n_slots = r->s.n_active = r->s.submitted = 2;
        r->active[1] = 1;
        r->st[0].open = r->st[1].open = r->st[0].len = 1;
        r->st[0].context = 2;
        r->entry[0].seq = 1;
        r->entry[0].op = MK_SUB_GENERATE;
        r->entry[0].arg0 = 1;
        r->entry[0].generate.credits = 1;
        r->entry[1].op = MK_SUB_APPEND;
        r->entry[1].slot = 1;
        r->entry[1].arg0 = r->entry[1].append.n = 4;
    }
    __syncwarp();
    return &r->s;
}

/* What the rows have yielded, told and kept. */
MK_CALL void mk_schedule_finish(mk_sched *s, const mk_step *step, const mk_sampled *m)
{
    mk_sched_finish(s, step, m->token, m->logprob, mk_now());
    s->step++;
}

/* The short way (megakernel/schedule.h), by one warp, a lane a row: publishes the step that entry e makes of an idle machine. False: it is none of the easy ones. The
 * entry is still to be taken; the step's descriptor is whole, here as well. */
MK_DEV bool mk_schedule_short(mk_sched *s, const mk_submit *e, uint4 *ring, mk_telling how, uint32_t lane)
{
    mk_row row;
    const uint32_t n = mk_sched_short(s->st, s->n_slots, e, lane, &row);
    if (!n) return false;
    if (lane < n) s->next.row[lane] = row;
    if (lane == MK_MAX_ROWS) mk_sched_short_step(s, e, n);
    __syncwarp();
    mk_step_publish(&s->next, ring, how, lane);
    return true;
}

/* Composes and publishes the next step, waiting for the host as long as there is nothing to do. By one warp; go (lane 0): not aborted. dress: a rehearsal with this, and no more. */
MK_CALL void mk_schedule_next(uint32_t lane, bool go, mk_sched *dress)
{
    mk_shared *sh = mk_sh();
    const mk_gpu_args *a = &sh->args;
    mk_sched *own = mk_schedule_state(sh);
    volatile uint32_t *beat = (volatile uint32_t *)a->heartbeat;
    const uint32_t submit_next = own->submit_next;
    if (!__shfl_sync(0xffffffffu, go, 0)) return;
    enum { AT_ONCE, REHEARSE, TAKE_OVER, WAIT };
    mk_looker l = mk_looker_new(a, own);
    bool idle = false;
    for (uint32_t pass = dress ? REHEARSE : AT_ONCE;; pass += pass < WAIT) {
        mk_sched *s = own;
        const mk_submit *e = MK_NEAR ? &sh->near_entry : 0;
#ifdef MK_PHASED /* there is no courier, and no rehearsal */
        if (pass == AT_ONCE) mk_look(&l, 0, lane);
        if (pass == REHEARSE) pass = WAIT;
#else
        if (pass == REHEARSE && dress) {
            s = dress;
        } else if (pass == REHEARSE) {
            s = mk_schedule_rehearsal((mk_rehearsal *)sh->staging, lane);
            e = ((mk_rehearsal *)sh->staging)->entry;
            idle = true;
        }
        if (pass == TAKE_OVER && !mk_bus_take(sh, lane)) return;
        if (pass == AT_ONCE || pass == TAKE_OVER) {
            l.seen = mk_flag_get(&sh->submitted);
            l.taken = mk_flag_get(&sh->taken);
            mk_fence_cta();
        }
#endif
        const uint32_t seen = l.seen;
        while (pass == WAIT && !mk_look(&l, MK_NEAR ? &sh->near_entry : 0, lane)) {
            if (l.aborted) return;
            if (lane == 0 && !(++sh->idle & 255u)) beat[MK_BEAT_IDLE] = sh->idle;
        }
        __syncwarp();
        uint4 *ring = a->step_ring + (pass == REHEARSE ? MK_STEP_RING : s->step % MK_STEP_RING) * MK_STEP_PACKETS;
        const mk_telling how = pass != REHEARSE && s->sure ? MK_TELL_INSTEAD : MK_TELL_WHOLE;
        const bool easy = MK_NEAR && idle && (pass == REHEARSE || l.seen != seen) && mk_schedule_short(s, e, ring, how, lane);
        idle = false;
        if (lane == 0) {
            if (pass != REHEARSE) {
                s->submitted = l.seen;
                s->taken = l.taken;
            }
            if (easy) mk_sched_take(s, 1, mk_now());
            if (!easy || pass == REHEARSE) mk_sched_compose(s, mk_now());
            if (s->hang == MK_HANG_ERROR) asm volatile("st.global.u32 [%0], 0;" ::"l"(16ull) : "memory");
            while (s->hang == MK_HANG_IDLE && !mk_load_relaxed(a->abort)) {}
        }
        __syncwarp();
        if (!s->next.nrows && !s->stop) {
            if (dress) return;
            idle = mk_sched_idle(s);
            continue;
        }
        if (!easy || pass == REHEARSE) {
            if (s->stop && lane == 0) {
                s->next.nrows = 0;
                s->next.seq = s->step;
            }
            mk_sched_look_up(s, lane, 32);
            __syncwarp();
            mk_step_publish(&s->next, ring, how, lane);
        }
        if (dress) return;
        if (pass == REHEARSE) continue;
        if (lane) return;
        s->sure = 0;
        mk_flag_set(&sh->published, s->next.seq + 1);
        mk_flag_set(&sh->told, s->next.seq - 1); /* so that it is never one of long ago; nor, in whatever order the two are read, what is published */
        if (pass >= TAKE_OVER) mk_bus_give(sh, &l);
        break;
    }
    if (own->submit_next != submit_next) beat[MK_BEAT_TAKEN] = own->submit_next;
    beat[MK_BEAT_EVENTS] = own->event_next;
    beat[MK_BEAT_STREAMS] = own->n_active;
}

/* Whether a sweep of the exchange (below) is due before step `next`. */
MK_DEV bool mk_schedule_sweeps(const mk_shared *sh, uint32_t next)
{
    return !(next % sh->args.sweep) || sh->sweep_due;
}
/* Whether a step is still to be concluded. */
MK_DEV bool mk_schedule_pending(const mk_shared *sh)
{
    return MK_NEAR && mk_flag_get(&sh->told) == mk_flag_get(&sh->published);
}
/* Until none is. By one warp; false: aborted. */
MK_DEV bool mk_schedule_concluded(const mk_shared *sh)
{
    bool on = true;
    for (uint32_t n = 1; on && mk_schedule_pending(sh); n++)
        if (!(n & 63u)) on = !mk_load_relaxed(sh->args.abort);
    mk_fence_cta();
    return __all_sync(0xffffffffu, on);
}
/* While SAMPLE waits, by one warp: where it is sure what comes behind the step, that is told, but for the token. Else everybody will wait for SCHEDULE, and what runs once a step comes from L2, line after
 * line: so it is rehearsed, in the staging area, with what SCHEDULE knows and a token that nobody has. That is where all rows are of streams that generate (a test's are of none), and no append is under
 * way: what SCHEDULE does then moves its marks, which are not copied. */
typedef struct mk_dress {
    mk_sched s;
    mk_sched_slot st[MK_NEAR_SLOTS];
    uint32_t active[MK_NEAR_SLOTS];
    mk_sampled sampled;
} mk_dress;
MK_CALL void mk_schedule_dress(mk_shared *sh, uint32_t lane)
{
#if MK_NEAR
    if (!mk_schedule_concluded(sh)) return;
    mk_sched *own = &sh->sched;
    mk_dress *r = (mk_dress *)sh->staging;
    const uint32_t slots = own->n_slots;
    const mk_sched_slot *t = sh->st + lane % MK_NEAR_SLOTS;
    const uint32_t slot = sh->step.row[lane % MK_MAX_ROWS].slot;
    const bool strange = lane < sh->step.nrows && (slot >= min(slots, MK_NEAR_SLOTS) || !sh->st[slot].open || !sh->st[slot].gen);
    if (slots > MK_NEAR_SLOTS || __any_sync(0xffffffffu, strange || (lane < slots && t->n_append))) return;
    const uint32_t seq = own->step + 1;
    if (__all_sync(0xffffffffu, mk_sched_sure(own, mk_flag_get(&sh->submitted), lane) && !mk_schedule_sweeps(sh, seq))) {
        if (lane == 0) {
            mk_sched_next_step(own, seq, 0, &r->s.next);
            own->sure = 1;
        }
        __syncwarp();
        mk_step_publish(&r->s.next, mk_step_at(sh->args.step_ring, seq), MK_TELL_EARLY, lane);
        return;
    }
    for (uint32_t k = lane; k < sizeof r->s / 4; k += 32) ((uint32_t *)&r->s)[k] = ((const uint32_t *)own)[k];
    for (uint32_t k = lane; k < slots * sizeof *r->st / 4; k += 32) ((uint32_t *)r->st)[k] = ((const uint32_t *)sh->st)[k];
    if (lane < slots) r->active[lane] = sh->active[lane];
    if (lane < MK_MAX_ROWS) r->sampled.token[lane] = 0xffffffffu, r->sampled.logprob[lane] = 0;
    __syncwarp();
    if (lane == 0) {
        r->s.st = r->st;
        r->s.active = r->active;
        r->s.event = (mk_event *)(sh->args.step_ring + (MK_STEP_RING + 1) * MK_STEP_PACKETS);
        r->s.event_next = r->s.taken = 0;
        r->s.submitted = r->s.submit_next;
        r->s.trace_steps = r->s.trace_at = r->s.hang = r->s.stop = 0;
        mk_schedule_finish(&r->s, &sh->step, &r->sampled);
    }
    __syncwarp();
    mk_schedule_next(lane, true, &r->s);
    __syncwarp();
#endif
}
/* By the same warp, when the token is chosen: true: the next step begins. */
MK_DEV bool mk_schedule_sure(mk_shared *sh, uint32_t token, uint32_t lane)
{
#if MK_NEAR
    mk_sched *s = &sh->sched;
    const mk_row *row = &sh->step.row[0];
    if (!s->sure) return false;
    const mk_sched_slot *t = &sh->st[row->slot];
    if (__any_sync(0xffffffffu, lane < t->n_stop && s->rest[row->slot].stop[lane % MK_MAX_STOP] == token)) return false;
    __syncwarp();
    if (lane) return true;
    mk_row next;
    mk_sched_next_row(t, row, token, &next);
    const uint32_t seq = sh->step.seq + 1;
    mk_packet_store(mk_step_at(sh->args.step_ring, seq) + MK_TOKEN_PACKET, next.token, next.pos, next.flags, seq + 1);
    s->sure = 0;
    return true;
#else
    return false;
#endif
}
/* Then, by one lane: for what else is to be told and to be remembered nobody waits. The scout sees to it, while the compute warps are at the next step as all others' are. */
MK_DEV void mk_schedule_tell(mk_shared *sh, uint32_t token, float logprob)
{
    sh->chosen.token = token;
    sh->chosen.logprob = logprob;
    mk_fence_cta();
    mk_flag_set(&sh->told, sh->step.seq + 1);
}
/* By one lane of the scout, if a step is pending: what SCHEDULE would have done. Tokens of an aborted step are void: whoever has fallen through a wait has seen the word before SAMPLE told. */
MK_CALL void mk_schedule_conclude(mk_shared *sh)
{
    mk_sched *s = &sh->sched;
    volatile uint32_t *beat = (volatile uint32_t *)sh->args.heartbeat;
    mk_fence_cta();
    if (mk_load_relaxed(sh->args.abort)) return;
    s->taken = mk_flag_get(&sh->taken);
    mk_sched_follow(s, sh->chosen.token, sh->chosen.logprob, mk_now());
    beat[MK_BEAT_STEPS] = s->step;
    beat[MK_BEAT_EVENTS] = s->event_next;
    mk_fence_cta();
    mk_flag_set(&sh->published, s->next.seq + 1);
}
static_assert(MK_MAX_STOP <= 32, "a stop id a lane");

/* Epochs repeat after 2^32 / MK_EPOCH_STRIDE steps, and a row that few steps have keeps its packets as long (megakernel/exchange.h,
 * mk_exchange_sweep). Now nobody reads or writes packets: SAMPLE has seen every worker's last publication, and the next step begins with the
 * descriptor, which is stored after the fence. In a step without logits SAMPLE waits for nobody: a sweep that is due there is put off to the next that has some. */
MK_DEV void mk_schedule_sweep(const mk_dev *d)
{
    const mk_gpu_args *a = d->a;
    const uint32_t next = d->step->seq + 1, base = a->epoch0 + next * MK_EPOCH_STRIDE;
    if (!mk_schedule_sweeps(d->sh, next)) return;
    mk_sync(); /* everybody has looked */
    if (d->tid == 0) d->sh->sweep_due = !d->step->any_logits;
    if (!d->step->any_logits) return;
    for (uint32_t i = d->tid; i < a->packets; i += MK_COMPUTE) mk_packet_store((uint4 *)a->exchange + i, 0, 0, 0, base);
    __threadfence();
    mk_sync();
}

/* The staging area goes from the rehearsal to the next step's instructions by way of sh->published and the controller, which racecheck does not follow. */
MK_DEV void mk_schedule_handed_over(void)
{
#ifdef MK_RACECHECK
    mk_sync();
#endif
}

MK_DEV void mk_schedule_run(const mk_dev *d)
{
    mk_shared *sh = d->sh;
    mk_schedule_sweep(d);
    mk_sync(); /* the staging area is free */
    if (d->warp != 0) {
        mk_schedule_handed_over();
        return;
    }
    const bool on = mk_schedule_concluded(sh), go = d->lane == 0 && on && !mk_load_relaxed(d->a->abort);
    if (go) {
        const mk_sampled *m = (const mk_sampled *)mk_local_at(d, d->in->wait[0].vec);
        mk_sched *s = mk_schedule_state(sh);
        mk_schedule_finish(s, d->step, m);
        ((volatile uint32_t *)d->a->heartbeat)[MK_BEAT_STEPS] = s->step;
    }
    __syncwarp();
    mk_trace_publish(d);
    mk_trace_end(d);
    mk_schedule_next(d->lane, go, 0);
    mk_schedule_handed_over();
}

#endif
