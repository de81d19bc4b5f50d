/* SCHEDULE on the device: one thread of one worker. The rules are megakernel/schedule.h, the same source as the twin's. */
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

/* Composes the next step, waiting for the host as long as there is nothing to do. False: aborted. */
MK_CALL bool mk_schedule_compose(void)
{
    const mk_gpu_args *a = &mk_sh()->args;
    mk_sched *s = a->sched;
    do {
        mk_sched_compose(s, mk_now());
        while (s->hang == MK_HANG_IDLE && !mk_load_relaxed(a->abort)) {}
        ((volatile uint32_t *)a->heartbeat)[MK_BEAT_TAKEN] = s->submit_next;
        if (!s->next.nrows) ((volatile uint32_t *)a->heartbeat)[MK_BEAT_IDLE] = ++s->idle;
        if (mk_load_relaxed(a->abort)) return false;
    } while (!s->stop && !s->next.nrows);
    if (s->stop) s->next.nrows = 0;
    s->next.seq = s->step;
    return true;
}
/* By one warp. */
MK_DEV void mk_schedule_next(const mk_gpu_args *a, uint32_t lane)
{
    bool go = lane == 0 && mk_schedule_compose();
    if (__any_sync(0xffffffffu, go)) mk_step_publish(a, lane);
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
}

MK_DEV void mk_schedule_run(const mk_dev *d)
{
    mk_schedule_sweep(d);
    mk_sync();
    if (d->warp != 0) return;
    if (d->lane == 0 && !mk_load_relaxed(d->a->abort)) {
        const mk_sampled *m = (const mk_sampled *)mk_local_at(d, d->in->wait[0].vec);
        mk_sched *s = d->a->sched;
        mk_sched_finish(s, d->step, m->token, m->logprob, mk_now());
        s->step++;
        ((volatile uint32_t *)d->a->heartbeat)[MK_BEAT_STEPS] = s->step;
    }
    __syncwarp();
    mk_trace_publish(d);
    mk_trace_end(d);
    mk_schedule_next(d->a, d->lane);
}

#endif
