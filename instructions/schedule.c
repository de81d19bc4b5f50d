/* SCHEDULE: the last instruction of a step, on one worker. wait[0] = LOCAL mk_sampled of SAMPLE on the same worker.
 * Publishes the rows' tokens and composes the next step descriptor; the rules are megakernel/schedule.h, one source for twin and
 * device. */
#include "instructions/op.h"
#include "megakernel/schedule.h"

#include <time.h>

void mk_schedule_twin(mk_ctx *c)
{
    mk_sched *s = c->machine;
    const mk_sampled *m = mk_local(c, c->in->wait[0].vec);
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    uint64_t now = (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
    mk_sched_finish(s, c->step, m->token, m->logprob, now);
    s->step++;
    mk_sched_compose(s, now);
}
