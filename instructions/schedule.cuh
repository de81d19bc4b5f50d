/* SCHEDULE on the device: one thread of one worker, and a courier. The rules are megakernel/schedule.h, the same source as the twin's. */
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

MK_DEV uint32_t mk_sys_look(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

/* A warp of SCHEDULE's worker that does nothing but go to the host and back: a look across the bus takes longer than all that SCHEDULE decides. It keeps
 * what SCHEDULE knows of the host's words (megakernel/schedule.h), and passes on the events that SCHEDULE has put into device memory. */
MK_DEV void mk_courier(const mk_gpu_args *a, mk_shared *sh, uint32_t lane)
{
    mk_sched *s = a->sched;
    uint32_t sent = 0, seen = 0; /* events, submit entries */
    bool last = false;
    for (uint32_t round = 0; !last; round++) {
        last = mk_flag_get(&sh->leave);
        /* SCHEDULE counts, the courier tells: the pulse stops when either does */
        if (lane == 0 && !(round & 255u)) ((volatile uint32_t *)a->heartbeat)[MK_BEAT_IDLE] = *(volatile uint32_t *)&s->idle;
        /* one round trip: lane 0 looks for an entry, lane 1 at the events taken, the others at a stream each */
        const uint32_t n = *(volatile uint32_t *)&s->n_active, own = lane - 2;
        const uint32_t *word = lane == 0 ? &s->submit[seen % MK_SUBMIT_RING].seq : s->event_read;
        const uint64_t *credits = 0;
        uint32_t slot = 0;
        if (lane >= 2 && own < n) {
            slot = ((volatile uint32_t *)s->active)[own];
            word = &s->slot[slot].cancel;
            credits = &s->slot[slot].credits;
        }
        uint32_t v = 0;
        uint64_t c = 0;
        if (lane < 2 || credits) v = mk_sys_look(word);
        if (credits) {
            c = mk_sys_load64(credits);
            s->st[slot].cancel = v;
            s->st[slot].credits = c;
        }
        for (uint32_t k = lane + 30; k < n; k += 32) { /* more streams than lanes */
            slot = ((volatile uint32_t *)s->active)[k];
            s->st[slot].cancel = mk_sys_load(&s->slot[slot].cancel);
            s->st[slot].credits = mk_sys_load64(&s->slot[slot].credits);
        }
        if (lane == 1) s->taken = v;
        __threadfence();
        __syncwarp(); /* the streams' words are older than the entry: whoever takes it may overwrite them */
        if (__shfl_sync(0xffffffffu, v, 0) == seen + 1) {
            seen++;
            __threadfence_system(); /* what the host wrote before the entry's number */
            if (lane == 0) s->submitted = seen;
        }
        for (uint32_t have = *(volatile uint32_t *)&s->posted; sent != have;) { /* two events a turn, half a warp each */
            const uint32_t at = (sent + lane / 16) % MK_EVENT_RING, k = lane % 16, more = have - sent < 2 ? have - sent : 2;
            __threadfence();
            const uint32_t x = __ldcg((const uint32_t *)&s->event[at] + k);
            if (lane / 16 < more && k) ((volatile uint32_t *)&a->event[at])[k] = x;
            __syncwarp();
            if (lane / 16 < more && !k) mk_sys_store(&a->event[at].seq, x);
            sent += more;
        }
    }
}
static_assert(sizeof(mk_event) == 64 && offsetof(mk_event, seq) == 0, "half a warp, its first lane the sequence number");

/* To the courier: what has been emitted up to now. */
MK_DEV void mk_schedule_post(mk_sched *s)
{
    if (s->posted == s->event_next) return;
#ifdef MK_PHASED /* there is none */
    for (; s->posted != s->event_next; s->posted++) {
        const mk_event *from = &s->event[s->posted % MK_EVENT_RING];
        mk_event *to = &mk_sh()->args.event[s->posted % MK_EVENT_RING];
        for (uint32_t k = 1; k < sizeof *to / 4; k++) ((volatile uint32_t *)to)[k] = ((const uint32_t *)from)[k];
        mk_sys_store(&to->seq, from->seq);
    }
#else
    __threadfence();
    *(volatile uint32_t *)&s->posted = s->event_next;
#endif
}

/* Composes the next step, waiting for the host as long as there is nothing to do. False: aborted. */
MK_CALL bool mk_schedule_compose(void)
{
    const mk_gpu_args *a = &mk_sh()->args;
    mk_sched *s = a->sched;
    const uint32_t taken = s->submit_next;
    for (;;) {
#ifdef MK_PHASED
        mk_sched_look(s);
#endif
        mk_sched_compose(s, mk_now());
        while (s->hang == MK_HANG_IDLE && !mk_load_relaxed(a->abort)) {}
        if (s->stop || s->next.nrows) break;
        mk_schedule_post(s);
        *(volatile uint32_t *)&s->idle = s->idle + 1;
#ifdef MK_PHASED
        ((volatile uint32_t *)a->heartbeat)[MK_BEAT_IDLE] = s->idle;
#endif
        if (mk_load_relaxed(a->abort)) return false;
    }
    if (taken != s->submit_next) ((volatile uint32_t *)a->heartbeat)[MK_BEAT_TAKEN] = s->submit_next;
    if (s->stop) {
        s->next.nrows = 0;
        mk_schedule_post(s);
    }
    s->next.seq = s->step;
    return true;
}
/* By one warp; go (lane 0): not aborted. The next step comes first, the host's events after it. */
MK_DEV void mk_schedule_next(const mk_gpu_args *a, uint32_t lane, bool go)
{
    go = lane == 0 && go && mk_schedule_compose();
    if (__any_sync(0xffffffffu, go)) mk_step_publish(a, lane);
    if (go) mk_schedule_post(a->sched);
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
