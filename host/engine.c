#include "host/engine.h"

#include "host/checkpoint.h"
#include "host/pack.h"
#include "host/planner.h"
#include "instructions/validate.h"
#include "megakernel/twin.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct mk_engine {
    mk_model *model;
    mk_checkpoint *ck;
    mk_plan *plan;
    mk_twin *twin;
    uint32_t slots, context, pages;
    uint32_t submit_next; /* host's side of the submit ring */
    uint32_t event_next;  /* and of the token ring */
    int doorbell_fd, event_fd;
    pthread_t thread;
    int running;
    uint64_t steps; /* written by the twin's thread */
    char device[96];
};

/* Bytes the machine has free, with a tenth left for everybody else. */
static uint64_t free_memory(void)
{
    FILE *f = fopen("/proc/meminfo", "r");
    char line[128];
    unsigned long long kb = 0;
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %llu kB", &kb) == 1) break;
    if (f) fclose(f);
    return kb * 1024 / 10 * 9;
}

static uint64_t program_bytes(const mk_program_info *i)
{
    return i->tape_bytes + i->expert_bytes + i->embed_bytes + i->param_floats * 4 + i->exchange_bytes + i->bulk_bytes +
           i->workers * i->local_bytes;
}

/* Plans with a pool of one page to learn the sizes, then with the pool that the configuration asks for or memory allows. */
static int plan_to_fit(mk_engine *e, const mk_engine_config *cfg, mk_err *err)
{
    mk_plan_config pc = {.workers = cfg->workers ? cfg->workers : 8, .act_f32 = cfg->act_f32, .max_context = MK_PAGE, .kv_pages = 1,
                         .state_slots = e->slots};
    int rc = mk_plan_make(e->model, &pc, &e->plan, err);
    if (rc) return rc;
    mk_program_info i = e->plan->prog->info;
    uint64_t memory = cfg->memory ? cfg->memory : free_memory(), fixed = program_bytes(&i);
    uint64_t state = i.state_slot_bytes * e->slots, page = i.kv_page_bytes * i.kv_layers;
    if (fixed + state > memory)
        return mk_fail(err, MK_E_CAPACITY,
                       "does not fit: weights and buffers need %.2f GB, state of %u streams %.2f GB, %.2f GB of memory may be used",
                       (double)fixed / 1e9, e->slots, (double)state / 1e9, (double)memory / 1e9);
    uint64_t fit = page ? (memory - fixed - state) / page : UINT32_MAX / MK_PAGE;
    uint32_t limit = e->model->max_context;
    uint64_t context = cfg->context ? cfg->context : limit;
    if (cfg->context > limit)
        return mk_fail(err, MK_E_CAPACITY, "context %u is over the model's limit of %u tokens", cfg->context, limit);
    if (!cfg->context && !cfg->kv_tokens && page) {
        uint64_t most = fit / e->slots * MK_PAGE;
        if (most < context) context = most;
    }
    uint64_t pages = cfg->kv_tokens ? (cfg->kv_tokens + MK_PAGE - 1) / MK_PAGE : (context + MK_PAGE - 1) / MK_PAGE * e->slots;
    if (!cfg->context && cfg->kv_tokens && pages * MK_PAGE < context) context = pages * MK_PAGE;
    if (page && (pages > fit || context < MK_PAGE || pages * MK_PAGE < context))
        return mk_fail(err, MK_E_CAPACITY,
                       "does not fit: a pool of %llu tokens (%u streams x %llu context) needs %.2f GB beside %.2f GB of weights and state; "
                       "%.2f GB may be used: at most %llu tokens",
                       (unsigned long long)(pages * MK_PAGE), e->slots, (unsigned long long)context, (double)(pages * page) / 1e9,
                       (double)(fixed + state) / 1e9, (double)memory / 1e9, (unsigned long long)(fit * MK_PAGE));
    if (pages > UINT32_MAX / MK_PAGE) return mk_fail(err, MK_E_CAPACITY, "kv pool: %llu pages are too many", (unsigned long long)pages);
    e->context = (uint32_t)context;
    e->pages = (uint32_t)pages;
    mk_plan_destroy(&e->plan);
    pc.max_context = e->context;
    pc.kv_pages = e->pages;
    return mk_plan_make(e->model, &pc, &e->plan, err);
}

int mk_engine_open(const mk_engine_config *cfg, mk_engine **out, mk_err *err)
{
    *out = NULL;
    if (cfg->streams < 1 || cfg->streams > 1024)
        return mk_fail(err, MK_E_USAGE, "streams: expected 1 to 1024, found %u", cfg->streams);
    mk_engine *e = calloc(1, sizeof *e);
    if (!e) return mk_fail(err, MK_E_CAPACITY, "out of memory");
    e->slots = cfg->streams;
    e->doorbell_fd = e->event_fd = -1;
    mk_validation val;
    int rc;
    if ((rc = mk_model_read(cfg->dir, &e->model, err))) goto fail;
    if ((rc = mk_checkpoint_open(cfg->dir, &e->ck, err))) goto fail;
    if ((rc = mk_model_resolve(e->model, e->ck, cfg->weights, err))) goto fail;
    if ((rc = plan_to_fit(e, cfg, err))) goto fail;
    if ((rc = mk_validate(e->plan->prog, &val, err))) goto fail;
    mk_twin_config tc = {.slots = e->slots, .context = e->context, .epoch0 = cfg->epoch0};
    if ((rc = mk_twin_new(e->plan->prog, &tc, &e->twin, err))) goto fail;
    if ((rc = mk_pack(e->plan, e->ck, mk_twin_memory(e->twin), err))) goto fail;
    mk_checkpoint_close(&e->ck);
    e->doorbell_fd = eventfd(0, EFD_CLOEXEC);
    e->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (e->doorbell_fd < 0 || e->event_fd < 0) {
        rc = mk_fail(err, MK_E_SYSTEM, "eventfd: %s", strerror(errno));
        goto fail;
    }
    snprintf(e->device, sizeof e->device, "CPU twin, %u workers, act %s", e->plan->prog->info.workers, cfg->act_f32 ? "f32" : "bf16");
    *out = e;
    return MK_OK;
fail:
    mk_engine_close(&e);
    return rc;
}

static void ring(int fd)
{
    uint64_t one = 1;
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR) {}
}

static void *twin_main(void *arg)
{
    mk_engine *e = arg;
    mk_sched *s = mk_twin_sched(e->twin);
    for (;;) {
        uint32_t ran, before = s->event_next;
        mk_err err;
        if (mk_twin_step(e->twin, &ran, &err)) {
            /* a validated program cannot get here */
            fprintf(stderr, "mkd: internal error: %s\n", err.msg);
            _exit(MK_E_BUG);
        }
        if (ran) __atomic_fetch_add(&e->steps, 1, __ATOMIC_RELAXED);
        if (s->event_next != before) ring(e->event_fd);
        if (s->stop) return NULL;
        if (!ran) { /* nothing to do: sleep until the host has something; never spin */
            uint64_t n;
            while (read(e->doorbell_fd, &n, sizeof n) < 0 && errno == EINTR) {}
        }
    }
}

int mk_engine_start(mk_engine *e, mk_err *err)
{
    int rc = pthread_create(&e->thread, NULL, twin_main, e);
    if (rc) return mk_fail(err, MK_E_SYSTEM, "cannot start the twin's thread: %s", strerror(rc));
    e->running = 1;
    return MK_OK;
}

void mk_engine_close(mk_engine **pe)
{
    mk_engine *e = *pe;
    if (!e) return;
    if (e->running) {
        mk_submit stop = {.op = MK_SUB_STOP};
        while (mk_engine_submit(e, &stop, NULL)) usleep(1000);
        /* the thread may be held up by a full token ring */
        mk_event ev[64];
        struct timespec ts;
        do {
            while (mk_engine_events(e, ev, 64)) {}
            mk_engine_doorbell(e);
            clock_gettime(CLOCK_REALTIME, &ts);
            ts.tv_nsec += 20 * 1000 * 1000;
            if (ts.tv_nsec >= 1000000000) ts.tv_sec++, ts.tv_nsec -= 1000000000;
        } while (pthread_timedjoin_np(e->thread, NULL, &ts) == ETIMEDOUT);
    }
    mk_twin_destroy(&e->twin);
    mk_plan_destroy(&e->plan);
    mk_checkpoint_close(&e->ck);
    mk_model_destroy(&e->model);
    if (e->doorbell_fd >= 0) close(e->doorbell_fd);
    if (e->event_fd >= 0) close(e->event_fd);
    free(e);
    *pe = NULL;
}

const mk_model *mk_engine_model(const mk_engine *e) { return e->model; }
const struct mk_program *mk_engine_program(const mk_engine *e) { return e->plan->prog; }
const char *mk_engine_device(const mk_engine *e) { return e->device; }
uint32_t mk_engine_slots(const mk_engine *e) { return e->slots; }
uint32_t mk_engine_context(const mk_engine *e) { return e->context; }
uint32_t mk_engine_pages(const mk_engine *e) { return e->pages; }
uint64_t mk_engine_steps(const mk_engine *e) { return __atomic_load_n(&e->steps, __ATOMIC_RELAXED); }
int mk_engine_event_fd(const mk_engine *e) { return e->event_fd; }

mk_slot *mk_engine_slot(mk_engine *e, uint32_t slot) { return mk_twin_memory(e->twin)->slot + slot; }

uint32_t *mk_engine_page_table(mk_engine *e, uint32_t slot)
{
    mk_memory *m = mk_twin_memory(e->twin);
    return m->page + (size_t)slot * m->max_pages;
}

uint32_t *mk_engine_tokens(mk_engine *e, uint32_t slot)
{
    mk_memory *m = mk_twin_memory(e->twin);
    return m->token + (size_t)slot * m->max_context;
}

int mk_engine_submit(mk_engine *e, const mk_submit *s, mk_err *err)
{
    mk_sched *sc = mk_twin_sched(e->twin);
    uint32_t taken = __atomic_load_n(&sc->submit_next, __ATOMIC_ACQUIRE);
    if (e->submit_next - taken >= MK_SUBMIT_RING) return mk_fail(err, MK_E_CAPACITY, "the submit ring is full (%u entries)", MK_SUBMIT_RING);
    mk_submit *slot = &sc->submit[e->submit_next % MK_SUBMIT_RING];
    slot->op = s->op;
    slot->slot = s->slot;
    slot->generation = s->generation;
    slot->arg0 = s->arg0;
    slot->arg1 = s->arg1;
    slot->tag = s->tag;
    __atomic_store_n(&slot->seq, ++e->submit_next, __ATOMIC_RELEASE);
    ring(e->doorbell_fd);
    return MK_OK;
}

void mk_engine_doorbell(mk_engine *e) { ring(e->doorbell_fd); }

uint32_t mk_engine_events(mk_engine *e, mk_event *ev, uint32_t n)
{
    mk_sched *s = mk_twin_sched(e->twin);
    uint32_t got = 0;
    while (got < n) {
        mk_event *slot = &s->event[e->event_next % MK_EVENT_RING];
        if (__atomic_load_n(&slot->seq, __ATOMIC_ACQUIRE) != e->event_next + 1) break;
        ev[got++] = *slot;
        e->event_next++;
    }
    if (got) {
        __atomic_store_n(s->event_read, e->event_next, __ATOMIC_RELEASE);
        if (__atomic_load_n(&s->stalled, __ATOMIC_RELAXED)) ring(e->doorbell_fd);
    }
    return got;
}
