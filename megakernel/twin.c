#include "megakernel/twin.h"

#include "megakernel/exchange.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

struct mk_twin {
    const mk_program *prog;
    mk_memory mem;
    mk_sched sched;
    uint32_t epoch0, sweep;
    uint32_t *pc; /* [workers] next instruction */
    float *scratch;
    mk_trace_record *trace;
    uint64_t *since; /* [workers] end of the last instruction of a traced step */
    mk_twin_hook hook;
    void *hook_arg;
    mk_route_hook route_hook;
    void *route_arg;
    struct {
        void *p;
        size_t bytes;
    } map[20];
    int n_map;
};

static void (*const dispatch[MK_OP_COUNT])(mk_ctx *) = {
#define X(number, NAME, name, text) [MK_OP_##NAME] = mk_##name##_twin,
    MK_OPCODES(X)
#undef X
};

/* Zeroed memory, touched only when used. */
static void *region(mk_twin *t, const char *name, uint64_t bytes, mk_err *err)
{
    if (bytes == 0) bytes = 64;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        mk_fail(err, MK_E_CAPACITY, "no memory for the %s region: %llu bytes", name, (unsigned long long)bytes);
        return NULL;
    }
    t->map[t->n_map].p = p;
    t->map[t->n_map++].bytes = bytes;
    return p;
}

int mk_twin_new(const mk_program *p, const mk_twin_config *cfg, mk_twin **out, mk_err *err)
{
    *out = NULL;
    mk_twin *t = calloc(1, sizeof *t);
    if (!t) return mk_fail(err, MK_E_CAPACITY, "out of memory");
    const mk_program_info *i = &p->info;
    t->prog = p;
    t->epoch0 = cfg->epoch0;
    t->sweep = cfg->sweep ? cfg->sweep : MK_SWEEP_STEPS;
    mk_memory *m = &t->mem;
    m->n_slots = cfg->slots;
    m->max_context = cfg->context;
    m->max_pages = (cfg->context + MK_PAGE - 1) / MK_PAGE;
    mk_sched *s = &t->sched;
    /* per row: the widest gathered vector and an output of the same order; see mk_ctx.scratch */
    size_t scratch_floats = (size_t)64 * 1024 + (size_t)MK_MAX_ROWS * 4 * (i->hidden + 65536);
    if (!(m->tape = region(t, "tape", i->tape_bytes, err)) || !(m->expert = region(t, "expert", i->expert_bytes, err)) ||
        !(m->embed = region(t, "embedding", i->embed_bytes, err)) ||
        !(m->param = region(t, "parameter", i->param_floats * 4, err)) ||
        !(m->exchange = region(t, "exchange", i->exchange_bytes, err)) || !(m->bulk = region(t, "bulk", i->bulk_bytes, err)) ||
        !(m->counter = region(t, "counter", (uint64_t)i->n_counter * 4, err)) ||
        !(m->local = region(t, "local", (uint64_t)i->workers * i->local_bytes, err)) ||
        !(m->state = region(t, "state", (uint64_t)i->state_slots * i->state_slot_bytes, err)) ||
        !(m->kv = region(t, "KV cache", (uint64_t)i->kv_layers * i->kv_pages * i->kv_page_bytes, err)) ||
        !(m->slot = region(t, "slot", (uint64_t)cfg->slots * (sizeof(mk_slot) + sizeof(mk_sched_slot) + sizeof(mk_sched_rest) + 4), err)) ||
        !(m->page = region(t, "page table", (uint64_t)cfg->slots * m->max_pages * 4, err)) ||
        !(m->token = region(t, "token log", (uint64_t)cfg->slots * cfg->context * 4, err)) ||
        !(s->submit = region(t, "ring", sizeof(mk_submit) * MK_SUBMIT_RING + sizeof(mk_event) * MK_EVENT_RING + 64, err)) ||
        !(t->scratch = region(t, "scratch", scratch_floats * 4 + (uint64_t)i->workers * 4, err)) ||
        !(t->trace = region(t, "trace", (uint64_t)mk_trace_limit(i->n_insn) * i->n_insn * sizeof *t->trace + i->workers * sizeof *t->since, err))) {
        mk_twin_destroy(&t);
        return err ? err->code : MK_E_CAPACITY;
    }
    s->st = (mk_sched_slot *)(m->slot + cfg->slots);
    s->rest = (mk_sched_rest *)(s->st + cfg->slots);
    s->active = (uint32_t *)(s->rest + cfg->slots);
    s->event = (mk_event *)(s->submit + MK_SUBMIT_RING);
    s->event_read = (uint32_t *)(s->event + MK_EVENT_RING);
    s->slot = m->slot;
    s->token = m->token;
    s->max_context = cfg->context;
    s->n_slots = cfg->slots;
    s->apart = i->expert_bytes != 0;
    t->pc = (uint32_t *)(t->scratch + scratch_floats);
    t->since = (uint64_t *)(t->trace + (size_t)mk_trace_limit(i->n_insn) * i->n_insn);
    mk_exchange_reset(p, m, t->epoch0);
    *out = t;
    return MK_OK;
}

void mk_twin_destroy(mk_twin **pt)
{
    mk_twin *t = *pt;
    if (!t) return;
    for (int i = 0; i < t->n_map; i++) munmap(t->map[i].p, t->map[i].bytes);
    free(t);
    *pt = NULL;
}

mk_memory *mk_twin_memory(mk_twin *t) { return &t->mem; }
mk_sched *mk_twin_sched(mk_twin *t) { return &t->sched; }
const mk_trace_record *mk_twin_trace(const mk_twin *t, uint32_t k) { return t->trace + (size_t)k * t->prog->info.n_insn; }

static uint64_t now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* Virtual workers take turns: what a worker's instruction waits for is the others' work since its last one ended. */
static void note(mk_twin *t, const mk_ctx *c, uint64_t began)
{
    const uint32_t tag = c->step->trace >> 16, k = (c->step->trace & 0xffffu) - 1;
    const uint64_t now = now_ns(), start = t->since[c->worker];
    const uint32_t tape = c->in->opcode == MK_OP_LM_HEAD && !c->step->any_logits ? 0 : c->in->tape_bytes;
    mk_trace_record *r = t->trace + (size_t)k * t->prog->info.n_insn + t->pc[c->worker];
    mk_trace_record x = {.start_lo = (uint32_t)start, .start_hi = (uint16_t)(start >> 32), .tag = (uint16_t)tag,
                         .input = (uint32_t)(began - start), .end = (uint32_t)(now - start), .bytes = (uint32_t)c->bytes + tape};
    *r = x;
    __atomic_store_n(&r->mark, tag << 16 | k << 8 | c->step->nrows, __ATOMIC_RELEASE);
    t->since[c->worker] = now;
}

void mk_twin_set_hook(mk_twin *t, mk_twin_hook f, void *arg)
{
    t->hook = f;
    t->hook_arg = arg;
}

void mk_twin_set_route_hook(mk_twin *t, mk_route_hook f, void *arg)
{
    t->route_hook = f;
    t->route_arg = arg;
}

static int deadlock(const mk_twin *t, mk_ctx *c, mk_err *err)
{
    const mk_program *p = t->prog;
    for (uint32_t w = 0; w < p->info.workers; w++) {
        if (t->pc[w] == p->queue[w + 1]) continue;
        c->in = &p->insn[t->pc[w]];
        c->worker = w;
        for (int k = 0; k < c->in->nwait; k++) {
            uint32_t slice;
            if (mk_wait_ready(c, k, &slice)) continue;
            return mk_fail(err, MK_E_BUG, "step %u: worker %u waits for ever at #%u %s layer %d: vector %s publication %u slice %u",
                           c->step->seq, w, c->in->seq, mk_opcode_name(c->in->opcode), c->in->layer == MK_NONE ? -1 : c->in->layer,
                           p->vec[c->in->wait[k].vec].name, c->in->wait[k].pub, slice);
        }
    }
    return mk_fail(err, MK_E_BUG, "step %u stopped without a blocked instruction", c->step->seq);
}

/* Runs every queue to its end: round robin, each worker as far as it gets. */
static int run(mk_twin *t, const mk_step *step, mk_err *err)
{
    const mk_program *p = t->prog;
    uint32_t workers = p->info.workers, left = workers;
    mk_ctx c = {.prog = p,
                .mem = &t->mem,
                .step = step,
                .epoch0 = t->epoch0,
                .scratch = t->scratch,
                .route_hook = t->route_hook,
                .route_arg = t->route_arg,
                .machine = &t->sched};
    uint64_t began = step->trace ? now_ns() : 0;
    for (uint32_t w = 0; w < workers; w++) {
        t->pc[w] = p->queue[w];
        t->since[w] = began;
        if (t->pc[w] == p->queue[w + 1]) left--;
    }
    while (left) {
        int progress = 0;
        for (uint32_t w = 0; w < workers; w++) {
            c.worker = w;
            while (t->pc[w] < p->queue[w + 1]) {
                if (step->hang && step->hang == MK_HANG_AT(w, t->pc[w] - p->queue[w])) break;
                c.in = &p->insn[t->pc[w]];
                int k = 0;
                while (k < c.in->nwait && mk_wait_ready(&c, k, NULL)) k++;
                if (k < c.in->nwait) break;
                c.bytes = 0;
                if (step->trace) began = now_ns();
                dispatch[c.in->opcode](&c);
                if (step->trace) note(t, &c, began);
                if (t->hook) t->hook(t->hook_arg, &c);
                progress = 1;
                if (++t->pc[w] == p->queue[w + 1]) left--;
            }
        }
        if (!progress && step->hang) return mk_fail(err, MK_E_DEVICE, "hangs as it was asked to");
        if (!progress) return deadlock(t, &c, err);
    }
    return MK_OK;
}

int mk_twin_step(mk_twin *t, uint32_t *ran, mk_err *err)
{
    mk_sched *s = &t->sched;
    *ran = 0;
    if (s->next.nrows == 0) mk_sched_compose(s, now_ns());
    if (s->hang == MK_HANG_IDLE) return mk_fail(err, MK_E_DEVICE, "hangs as it was asked to");
    if (s->next.nrows == 0 || s->stop) return MK_OK;
    mk_step step = s->next; /* SCHEDULE composes the next one into s->next */
    *ran = step.nrows;
    if (step.seq % t->sweep == 0) mk_exchange_sweep(t->prog, &t->mem, t->epoch0, step.seq);
    return run(t, &step, err);
}

int mk_twin_snapshot(const mk_twin *t, mk_snapshot *s, mk_err *err)
{
    const mk_program *p = t->prog;
    const mk_program_info *i = &p->info;
    const mk_sched *sc = &t->sched;
    *s = (mk_snapshot){.prog = p, .live = 1, .epoch0 = t->epoch0, .steps = sc->step, .submitted = sc->submit_next, .taken = sc->submit_next,
                       .published = sc->event_next, .events_read = *sc->event_read, .streams = sc->n_active, .device_read = 1, .step = sc->next};
    if (sc->hang == MK_HANG_IDLE) s->step.nrows = 0; /* composed, perhaps, and not begun */
    s->position = calloc(i->workers, 4);
    s->counter = calloc(i->n_counter + 1, 4);
    s->exchange = malloc(i->exchange_bytes + 1);
    if (!s->position || !s->counter || !s->exchange) {
        s->device_read = s->live = 0;
        return mk_fail(err, MK_E_CAPACITY, "out of memory");
    }
    memcpy(s->counter, t->mem.counter, i->n_counter * 4);
    memcpy(s->exchange, t->mem.exchange, i->exchange_bytes);
    for (uint32_t w = 0; w < i->workers; w++) { /* the one that hangs was not handed its next instruction; the others wait for a publication, or are through */
        uint32_t n = p->queue[w + 1] - p->queue[w], at = t->pc[w] - p->queue[w];
        if (at == n || sc->next.hang == MK_HANG_AT(w, at)) at = at ? at - 1 : n ? n - 1 : 0;
        s->position[w] = at;
    }
    return MK_OK;
}

void mk_twin_restart(mk_twin *t)
{
    mk_sched *s = &t->sched, was = *s;
    t->epoch0 += (was.step + 2) * MK_EPOCH_STRIDE;
    memset(was.submit, 0, sizeof(mk_submit) * MK_SUBMIT_RING);
    memset(was.event, 0, sizeof(mk_event) * MK_EVENT_RING);
    memset(was.st, 0, was.n_slots * (sizeof *was.st + sizeof *was.rest + 4));
    *was.event_read = 0;
    *s = (mk_sched){.submit = was.submit, .event = was.event, .event_read = was.event_read, .slot = was.slot, .token = was.token,
                    .max_context = was.max_context, .n_slots = was.n_slots, .apart = was.apart, .st = was.st, .rest = was.rest, .active = was.active};
    mk_exchange_reset(t->prog, &t->mem, t->epoch0);
}
