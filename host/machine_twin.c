#include "host/machine.h"

#include "host/log.h"
#include "host/pack.h"
#include "host/recover.h"
#include "megakernel/submit.h"
#include "megakernel/twin.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

typedef struct twin_machine {
    mk_machine m;
    mk_twin *twin;
    uint32_t submit_next, event_next; /* the host's side of the rings */
    int doorbell_fd;
    pthread_t thread;
    int running, hangs; /* hangs: atomic; the thread has ended because of it */
    uint32_t instructions;
    uint64_t steps;     /* written by the thread */
    mk_recovery recovery;
} twin_machine;

static twin_machine *of(mk_machine *m) { return (twin_machine *)m; }

void mk_ring_fd(int fd)
{
    uint64_t one = 1;
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR) {}
}

uint32_t mk_take_events(const mk_event *ring, uint32_t *next, uint32_t *read, mk_event *ev, uint32_t n)
{
    uint32_t got = 0;
    for (; got < n; (*next)++) {
        const mk_event *e = &ring[*next % MK_EVENT_RING];
        if (!mk_event_there(e, *next + 1)) break;
        ev[got++] = *e;
    }
    if (got) __atomic_store_n(read, *next, __ATOMIC_RELEASE);
    return got;
}

static void *thread_main(void *arg)
{
    twin_machine *t = arg;
    mk_sched *s = mk_twin_sched(t->twin);
    for (;;) {
        uint32_t ran, before = s->event_next;
        mk_err err;
        int rc = mk_twin_step(t->twin, &ran, &err);
        if (rc == MK_E_DEVICE) {
            __atomic_store_n(&t->hangs, 1, __ATOMIC_RELEASE);
            mk_ring_fd(t->m.event_fd);
            return NULL;
        }
        if (rc) {
            /* a validated program cannot get here */
            fprintf(stderr, "mkd: internal error: %s\n", err.msg);
            _exit(MK_E_BUG);
        }
        if (ran) __atomic_fetch_add(&t->steps, 1, __ATOMIC_RELAXED);
        if (s->event_next != before) mk_ring_fd(t->m.event_fd);
        if (s->stop) return NULL;
        if (!ran) { /* nothing to do: sleep until the host has something; never spin */
            uint64_t n;
            while (read(t->doorbell_fd, &n, sizeof n) < 0 && errno == EINTR) {}
        }
    }
}

static int twin_start(mk_machine *m, mk_err *err)
{
    int rc = pthread_create(&of(m)->thread, NULL, thread_main, m);
    if (rc) return mk_fail(err, MK_E_SYSTEM, "cannot start the twin's thread: %s", strerror(rc));
    of(m)->running = 1;
    return MK_OK;
}

static int twin_submit(mk_machine *m, const mk_submit *s, mk_err *err)
{
    twin_machine *t = of(m);
    mk_sched *sc = mk_twin_sched(t->twin);
    if (s->op == MK_SUB_HANG && s->arg0 == MK_HANG_ERROR) return mk_fail(err, MK_E_WIRE, "the CPU twin has no GPU to lose");
    uint32_t taken = __atomic_load_n(&sc->submit_next, __ATOMIC_ACQUIRE);
    if (t->submit_next - taken >= MK_SUBMIT_RING) return mk_fail(err, MK_E_CAPACITY, "the submit ring is full (%u entries)", MK_SUBMIT_RING);
    mk_submit e = *s;
    mk_submit_complete(&e, m->slot, sc->n_slots);
    mk_submit_put(sc->submit, &e, ++t->submit_next);
    mk_ring_fd(t->doorbell_fd);
    return MK_OK;
}

/* As host/machine_gpu.c does it; the hang needs no watch here. The thread has ended. */
static void relaunch(twin_machine *t)
{
    mk_snapshot s;
    mk_err err = {0};
    uint64_t since = mk_now_ms();
    pthread_join(t->thread, NULL);
    t->running = 0;
    mk_twin_snapshot(t->twin, &s, &err);
    mk_recovery_note(&t->recovery, &s, "twin", NULL);
    mk_snapshot_free(&s);
    mk_twin_restart(t->twin);
    t->submit_next = t->event_next = 0;
    __atomic_store_n(&t->hangs, 0, __ATOMIC_RELEASE);
    if (twin_start(&t->m, &err)) {
        mk_log(MK_LOG_ERROR, "twin lost: %s", err.msg);
        _exit(err.code);
    }
    mk_recovery_done("twin", since);
}

static uint32_t twin_events(mk_machine *m, mk_event *ev, uint32_t n)
{
    twin_machine *t = of(m);
    mk_sched *s = mk_twin_sched(t->twin);
    int hangs = __atomic_load_n(&t->hangs, __ATOMIC_ACQUIRE); /* before the ring is looked at: it is complete then */
    uint32_t got = mk_take_events(s->event, &t->event_next, s->event_read, ev, n);
    if (got < n && hangs) {
        relaunch(t);
        ev[got++] = (mk_event){.kind = MK_EV_RESTARTED};
        return got;
    }
    if (got && __atomic_load_n(&s->stalled, __ATOMIC_RELAXED)) mk_ring_fd(t->doorbell_fd);
    return got;
}

static void twin_doorbell(mk_machine *m) { mk_ring_fd(of(m)->doorbell_fd); }
static uint64_t twin_steps(const mk_machine *m) { return __atomic_load_n(&((const twin_machine *)m)->steps, __ATOMIC_RELAXED); }

static int twin_trace(mk_machine *m, uint32_t k, mk_trace_record *r, mk_err *err)
{
    const mk_trace_record *from = mk_twin_trace(of(m)->twin, k);
    (void)err;
    for (uint32_t i = 0; i < of(m)->instructions; i++) {
        uint32_t mark = __atomic_load_n(&from[i].mark, __ATOMIC_ACQUIRE); /* written last */
        r[i] = from[i];
        r[i].mark = mark;
    }
    return MK_OK;
}

static void twin_destroy(mk_machine *m)
{
    twin_machine *t = of(m);
    if (t->running) {
        mk_event ev[64];
        struct timespec ts;
        uint32_t hangs = ~t->recovery.hangs;
        do { /* the thread may be held up by a full token ring */
            while (twin_events(m, ev, 64)) {}
            if (hangs != t->recovery.hangs && !twin_submit(m, &(mk_submit){.op = MK_SUB_STOP}, NULL)) hangs = t->recovery.hangs; /* launched again: again */
            twin_doorbell(m);
            clock_gettime(CLOCK_REALTIME, &ts);
            ts.tv_nsec += 20 * 1000 * 1000;
            if (ts.tv_nsec >= 1000000000) ts.tv_sec++, ts.tv_nsec -= 1000000000;
        } while (pthread_timedjoin_np(t->thread, NULL, &ts) == ETIMEDOUT);
    }
    mk_twin_destroy(&t->twin);
    if (t->doorbell_fd >= 0) close(t->doorbell_fd);
    if (m->event_fd >= 0) close(m->event_fd);
    free(t);
}

int mk_machine_twin(const mk_plan *plan, const mk_checkpoint *ck, const mk_machine_config *cfg, mk_machine **out, mk_err *err)
{
    static const mk_machine_ops ops = {twin_start, twin_submit, twin_events, twin_doorbell, twin_steps, twin_trace, twin_destroy};
    twin_machine *t = calloc(1, sizeof *t);
    *out = NULL;
    if (!t) return mk_fail(err, MK_E_CAPACITY, "out of memory");
    mk_machine *m = &t->m;
    m->ops = &ops;
    t->instructions = plan->prog->info.n_insn;
    mk_recovery_init(&t->recovery, cfg->flight_dir);
    t->doorbell_fd = eventfd(0, EFD_CLOEXEC);
    m->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int rc = t->doorbell_fd < 0 || m->event_fd < 0 ? mk_fail(err, MK_E_SYSTEM, "eventfd: %s", strerror(errno)) : MK_OK;
    mk_twin_config tc = {.slots = cfg->slots, .context = cfg->context, .epoch0 = cfg->epoch0};
    if (!rc) rc = mk_twin_new(plan->prog, &tc, &t->twin, err);
    if (!rc) rc = mk_pack(plan, ck, mk_twin_memory(t->twin), err);
    if (rc) {
        twin_destroy(m);
        return rc;
    }
    mk_memory *mem = mk_twin_memory(t->twin);
    m->slot = mem->slot;
    m->page = mem->page;
    m->token = mem->token;
    m->max_pages = mem->max_pages;
    m->context = mem->max_context;
    snprintf(m->name, sizeof m->name, "CPU twin, %u workers, act %s", plan->prog->info.workers,
             plan->prog->info.flags & MK_PROG_ACT_F32 ? "f32" : "bf16");
    *out = m;
    return MK_OK;
}
