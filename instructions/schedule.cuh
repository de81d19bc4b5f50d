/* SCHEDULE on the device: one thread of one worker. The rules are megakernel/schedule.h, the same source as the twin's. */
#ifndef MK_SCHEDULE_CUH
#define MK_SCHEDULE_CUH

#include "megakernel/device.cuh"

/* Writes the step descriptor: packets whose epoch is the step number + 1. */
MK_DEV void mk_step_publish(const mk_gpu_args *a, const mk_step *step)
{
    const uint32_t *word = (const uint32_t *)step;
    constexpr uint32_t words = sizeof *step / 4;
    uint4 *p = a->step_ring + (step->seq % MK_STEP_RING) * MK_STEP_PACKETS;
    for (uint32_t i = 0; i < MK_STEP_PACKETS; i++) {
        uint32_t w[3];
#pragma unroll
        for (uint32_t k = 0; k < 3; k++) w[k] = 3 * i + k < words ? word[3 * i + k] : 0;
        mk_packet_store(p + i, w[0], w[1], w[2], step->seq + 1);
    }
}

/* Composes the next step, waiting for the host as long as there is nothing to do. */
MK_CALL void mk_schedule_next(void)
{
    const mk_gpu_args *a = &mk_sh()->args;
    mk_sched *s = a->sched;
    for (;;) {
        mk_sched_compose(s, mk_now());
        ((volatile uint32_t *)a->heartbeat)[1] = s->submit_next;
        if (s->stop) s->next.nrows = 0;
        if (s->stop || s->next.nrows) break;
        if (mk_load_relaxed(a->abort)) return;
    }
    s->next.seq = s->step;
    mk_step_publish(a, &s->next);
}

MK_DEV void mk_schedule_run(const mk_dev *d)
{
    mk_sync();
    if (d->tid != 0 || mk_load_relaxed(d->a->abort)) return;
    const mk_sampled *m = (const mk_sampled *)mk_local_at(d, d->in->wait[0].vec);
    mk_sched *s = d->a->sched;
    mk_sched_finish(s, d->step, m->token, m->logprob, mk_now());
    s->step++;
    ((volatile uint32_t *)d->a->heartbeat)[0] = s->step;
    mk_schedule_next();
}

#endif
