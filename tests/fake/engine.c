/* A test double of host/engine.h and host/streams.h: fixed rules instead of a model, a thread instead of a machine. Included by the one
 * source file of a test, so that its definitions, all of both headers', keep the real ones out of the link.
 *
 * Rules: vocabulary 1000, 8 slots, context limit 4096. The token at position p is (7 p + 3) mod 1000 with logprob -(p mod 16) / 16; a
 * prompt token's logprob is -(its id) / 1000. Every `fake_us` microseconds each running stream that has credit yields one token. */
#include "host/streams.h"
#include "instructions/program.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define FAKE_VOCAB   1000u
#define FAKE_SLOTS   8u
#define FAKE_CONTEXT 4096u
#define FAKE_REPORTS 65536u

struct mk_engine {
    mk_model model;
    mk_layer layer[3];
    int fd;
};

typedef struct fake_stream {
    uint64_t id, owner; /* id 0: free */
    uint32_t length, context;
    uint64_t credits, published;
    struct {
        uint64_t tag;
        uint32_t end, begin, logprobs;
    } append[MK_MAX_APPENDS];
    uint32_t ids[FAKE_CONTEXT];
    uint32_t n_append, running, left, produced, prompt, cancel, close, silent;
    uint64_t tag, close_tag, t_submit, t_first;
    mk_open open;
    uint32_t n_stop, stop[MK_MAX_STOP];
} fake_stream;

struct mk_streams {
    mk_engine *e;
    pthread_t thread;
    pthread_mutex_t lock;
    int quit;
    uint64_t next_id;
    fake_stream s[FAKE_SLOTS];
    mk_report report[FAKE_REPORTS];
    uint32_t head, count;
    mk_streams_stats st;
};

static atomic_uint fake_us = 200; /* between tokens */
static atomic_int fake_frozen;    /* nothing happens: a device that hangs */

static uint64_t fake_now(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static uint32_t fake_token(uint32_t position)
{
    return (7 * position + 3) % FAKE_VOCAB;
}

static float fake_logprob(uint32_t position)
{
    return -(float)(position % 16) / 16;
}

/* ---- the machine (lock held) ---------------------------------------------------------------------------------------- */

static void fake_emit(mk_streams *s, fake_stream *t, uint16_t kind, uint32_t position, uint32_t token, float logprob, uint32_t reason,
                      uint32_t arg, uint64_t tag)
{
    uint64_t now = fake_now(), one = 1;
    if (t->silent || s->count == FAKE_REPORTS) return;
    s->report[(s->head + s->count++) % FAKE_REPORTS] = (mk_report){
        .owner = t->owner,
        .stream = t->id,
        .tag = tag,
        .ev = {.kind = kind, .position = position, .token = token, .logprob = logprob, .reason = reason, .arg = arg, .device_ns = now},
        .prompt_tokens = t->prompt,
        .t_submit_ns = t->t_submit,
        .t_first_ns = t->t_first,
        .t_done_ns = now};
    if (write(s->e->fd, &one, sizeof one) < 0) abort();
}

static void fake_done(mk_streams *s, fake_stream *t, uint32_t reason)
{
    t->running = 0;
    s->st.requests_done++;
    s->st.cancelled += reason == MK_DONE_CANCELLED;
    fake_emit(s, t, MK_EV_DONE, t->length, 0, 0, reason, t->produced, t->tag);
}

static void fake_step(mk_streams *s, fake_stream *t)
{
    for (uint32_t k = 0; k < t->n_append; k++) {
        for (uint32_t p = t->append[k].begin; t->append[k].logprobs && p < t->append[k].end; p++)
            if (p) fake_emit(s, t, MK_EV_LOGPROB, p, t->ids[p], -(float)t->ids[p] / 1000, 0, 0, t->append[k].tag);
        fake_emit(s, t, MK_EV_APPENDED, t->append[k].end, 0, 0, 0, 0, t->append[k].tag);
    }
    t->n_append = 0;
    if (t->running && t->cancel) fake_done(s, t, MK_DONE_CANCELLED);
    t->cancel = 0;
    if (t->close) {
        fake_emit(s, t, MK_EV_CLOSED, t->length, 0, 0, 0, 0, t->close_tag);
        t->id = 0;
        s->st.slots_used--;
        return;
    }
    if (!t->running || t->published >= t->credits) return;
    uint32_t p = t->length++, id = fake_token(p);
    t->ids[p] = id;
    if (!t->produced++) t->t_first = fake_now();
    t->published++;
    t->left--;
    s->st.generated_tokens++;
    fake_emit(s, t, MK_EV_TOKEN, p, id, fake_logprob(p), 0, t->produced, t->tag);
    uint32_t stop = 0;
    for (uint32_t i = 0; i < t->n_stop; i++) stop |= t->stop[i] == id;
    if (stop)
        fake_done(s, t, MK_DONE_STOP);
    else if (!t->left)
        fake_done(s, t, MK_DONE_LENGTH);
    else if (t->length >= t->context)
        fake_done(s, t, MK_DONE_CONTEXT);
}

static void *fake_run(void *arg)
{
    mk_streams *s = arg;
    for (;;) {
        usleep(atomic_load(&fake_us));
        pthread_mutex_lock(&s->lock);
        if (s->quit) break;
        for (uint32_t i = 0; i < FAKE_SLOTS && !atomic_load(&fake_frozen); i++)
            if (s->s[i].id) fake_step(s, &s->s[i]);
        pthread_mutex_unlock(&s->lock);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* ---- host/streams.h ------------------------------------------------------------------------------------------------- */

mk_streams *mk_streams_new(mk_engine *e)
{
    mk_streams *s = calloc(1, sizeof *s);
    s->e = e;
    s->next_id = 1;
    s->st.slots = FAKE_SLOTS;
    s->st.pages = FAKE_SLOTS * FAKE_CONTEXT / MK_PAGE;
    pthread_mutex_init(&s->lock, NULL);
    if (pthread_create(&s->thread, NULL, fake_run, s)) abort();
    return s;
}

void mk_streams_destroy(mk_streams **p)
{
    mk_streams *s = *p;
    if (!s) return;
    pthread_mutex_lock(&s->lock);
    s->quit = 1;
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    pthread_mutex_destroy(&s->lock);
    free(s);
    *p = NULL;
}

static int fake_open(mk_streams *s, uint64_t owner, const mk_open *o, uint64_t *stream, mk_err *err)
{
    if (o->context > FAKE_CONTEXT) return mk_fail(err, MK_E_WIRE, "context of %u tokens, the limit is %u", o->context, FAKE_CONTEXT);
    for (uint32_t i = 0; i < FAKE_SLOTS; i++) {
        fake_stream *t = &s->s[i];
        if (t->id) continue;
        memset(t, 0, sizeof *t);
        t->id = s->next_id++;
        t->owner = owner;
        t->context = o->context ? o->context : FAKE_CONTEXT;
        t->credits = o->credits;
        t->open = *o;
        s->st.opened++;
        s->st.slots_used++;
        *stream = t->id;
        return MK_OK;
    }
    return mk_fail(err, MK_E_CAPACITY, "all %u stream slots are in use", FAKE_SLOTS);
}

static fake_stream *fake_find(mk_streams *s, uint64_t owner, uint64_t id, mk_err *err)
{
    for (uint32_t i = 0; i < FAKE_SLOTS; i++)
        if (s->s[i].id == id && s->s[i].owner == owner && !s->s[i].close) return &s->s[i];
    mk_fail(err, MK_E_WIRE, "stream %llu is not one of yours", (unsigned long long)id);
    return NULL;
}

static int fake_append(mk_streams *s, fake_stream *t, const uint32_t *tokens, uint32_t n, int logprobs, uint64_t tag, mk_err *err)
{
    if (t->running) return mk_fail(err, MK_E_WIRE, "stream %llu is busy with a generation", (unsigned long long)t->id);
    if (t->n_append == MK_MAX_APPENDS) return mk_fail(err, MK_E_WIRE, "%u appends are outstanding", t->n_append);
    if (n > t->context - t->length)
        return mk_fail(err, MK_E_WIRE, "%u tokens after %u are over the stream's context of %u", n, t->length, t->context);
    for (uint32_t i = 0; i < n; i++)
        if (tokens[i] >= FAKE_VOCAB)
            return mk_fail(err, MK_E_WIRE, "token id %u (the %u-th) is outside the vocabulary of %u", tokens[i], i, FAKE_VOCAB);
    memcpy(t->ids + t->length, tokens, n * sizeof *tokens);
    uint32_t k = t->n_append++;
    t->append[k].tag = tag;
    t->append[k].begin = t->length;
    t->append[k].end = t->length += n;
    t->append[k].logprobs = (uint32_t)logprobs;
    s->st.appended_tokens += n;
    return MK_OK;
}

static int fake_generate(fake_stream *t, const mk_generate *g, uint64_t tag, mk_err *err)
{
    if (t->running) return mk_fail(err, MK_E_WIRE, "stream %llu is busy with a generation", (unsigned long long)t->id);
    if (!t->length) return mk_fail(err, MK_E_WIRE, "stream %llu is empty", (unsigned long long)t->id);
    if (t->length >= t->context) return mk_fail(err, MK_E_WIRE, "the stream's context of %u is full", t->context);
    t->running = 1;
    t->tag = tag;
    t->left = g->max_new;
    t->produced = 0;
    t->prompt = t->length;
    t->t_submit = fake_now();
    t->t_first = 0;
    t->n_stop = g->own_stop ? g->n_stop : t->open.n_stop;
    memcpy(t->stop, g->own_stop ? g->stop : t->open.stop, sizeof t->stop);
    return MK_OK;
}

int mk_streams_open(mk_streams *s, uint64_t owner, const mk_open *o, uint64_t *stream, mk_err *err)
{
    pthread_mutex_lock(&s->lock);
    int rc = fake_open(s, owner, o, stream, err);
    s->st.refused += rc != 0;
    pthread_mutex_unlock(&s->lock);
    return rc;
}

#define FAKE_ON_STREAM(action)                                                                                                             \
    pthread_mutex_lock(&s->lock);                                                                                                          \
    fake_stream *t = fake_find(s, owner, stream, err);                                                                                     \
    int rc = MK_E_WIRE;                                                                                                                    \
    if (t) rc = (action);                                                                                                                  \
    s->st.refused += rc != 0;                                                                                                              \
    pthread_mutex_unlock(&s->lock);                                                                                                        \
    return rc

int mk_streams_append(mk_streams *s, uint64_t owner, uint64_t stream, const uint32_t *tokens, uint32_t n, int logprobs, uint64_t tag,
                      mk_err *err)
{
    FAKE_ON_STREAM(fake_append(s, t, tokens, n, logprobs, tag, err));
}

int mk_streams_generate(mk_streams *s, uint64_t owner, uint64_t stream, const mk_generate *g, uint64_t tag, mk_err *err)
{
    FAKE_ON_STREAM(fake_generate(t, g, tag, err));
}

int mk_streams_credit(mk_streams *s, uint64_t owner, uint64_t stream, uint64_t more, mk_err *err)
{
    FAKE_ON_STREAM((t->credits += t->credits == ~0ull ? 0 : more, MK_OK));
}

int mk_streams_cancel(mk_streams *s, uint64_t owner, uint64_t stream, mk_err *err)
{
    FAKE_ON_STREAM((t->cancel = 1, MK_OK));
}

int mk_streams_close(mk_streams *s, uint64_t owner, uint64_t stream, uint64_t tag, mk_err *err)
{
    FAKE_ON_STREAM((t->close = t->cancel = 1, t->close_tag = tag, MK_OK));
}

uint32_t mk_streams_drop_owner(mk_streams *s, uint64_t owner)
{
    uint32_t n = 0;
    pthread_mutex_lock(&s->lock);
    for (uint32_t i = 0; i < FAKE_SLOTS; i++)
        if (s->s[i].id && s->s[i].owner == owner) {
            s->s[i].close = s->s[i].cancel = s->s[i].silent = 1;
            n++;
        }
    pthread_mutex_unlock(&s->lock);
    return n;
}

void mk_streams_cancel_all(mk_streams *s)
{
    pthread_mutex_lock(&s->lock);
    for (uint32_t i = 0; i < FAKE_SLOTS; i++) s->s[i].cancel = 1;
    pthread_mutex_unlock(&s->lock);
}

uint32_t mk_streams_poll(mk_streams *s, mk_report *r, uint32_t n)
{
    pthread_mutex_lock(&s->lock);
    uint32_t k = 0;
    for (; k < n && s->count; k++, s->count--) {
        r[k] = s->report[s->head];
        s->head = (s->head + 1) % FAKE_REPORTS;
    }
    pthread_mutex_unlock(&s->lock);
    return k;
}

/* A report that was not taken yet still runs, as far as a client can tell: where no request does, those left count as one. */
void mk_streams_get_stats(const mk_streams *cs, mk_streams_stats *st)
{
    mk_streams *s = (mk_streams *)(uintptr_t)cs;
    pthread_mutex_lock(&s->lock);
    *st = s->st;
    for (uint32_t i = 0; i < FAKE_SLOTS; i++) st->requests_running += s->s[i].id && (s->s[i].running || s->s[i].n_append);
    if (!st->requests_running) st->requests_running = s->count != 0;
    pthread_mutex_unlock(&s->lock);
}

/* ---- host/engine.h -------------------------------------------------------------------------------------------------- */

static mk_engine *fake_engine_new(void)
{
    mk_engine *e = calloc(1, sizeof *e);
    snprintf(e->model.arch, sizeof e->model.arch, "FakeForCausalLM");
    e->model.layers = 3;
    e->model.layer = e->layer;
    for (int i = 0; i < 3; i++) {
        e->layer[i].mixer = i < 2 ? MK_MIX_DELTA : MK_MIX_MLA;
        e->layer[i].ffn = i < 1 ? MK_FFN_DENSE : MK_FFN_MOE;
    }
    e->model.vocab = FAKE_VOCAB;
    e->model.bos = 1;
    e->model.n_stop = 1;
    e->model.stop[0] = 999; /* no position up to 427 yields it, and 428 does */
    e->model.top_p = 1;
    e->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    return e;
}

void mk_engine_close(mk_engine **e)
{
    if (*e) close((*e)->fd);
    free(*e);
    *e = NULL;
}

const mk_model *mk_engine_model(const mk_engine *e)
{
    return &e->model;
}

const char *mk_engine_device(const mk_engine *e)
{
    (void)e;
    return "no device: a test's double";
}

uint32_t mk_engine_slots(const mk_engine *e)
{
    (void)e;
    return FAKE_SLOTS;
}

uint32_t mk_engine_context(const mk_engine *e)
{
    (void)e;
    return FAKE_CONTEXT;
}

uint32_t mk_engine_pages(const mk_engine *e)
{
    (void)e;
    return FAKE_SLOTS * FAKE_CONTEXT / MK_PAGE;
}

uint64_t mk_engine_steps(const mk_engine *e)
{
    (void)e;
    return 0;
}

void mk_engine_get_figures(const mk_engine *e, mk_engine_figures *f)
{
    (void)e;
    *f = (mk_engine_figures){.bytes = {.weights = 1000, .experts = 300, .topk = 2, .n_experts = 8, .state = 10, .kv = 4}, .program_bytes = 1400,
                             .dtype = "fake", .ceiling_gb_s = 1e-3, .launches = 1};
}

int mk_engine_event_fd(const mk_engine *e)
{
    return e->fd;
}

/* ---- trace: two workers, five instructions, two vectors; recorded after fake_trace_ms, the last record at the third look ------ */

static atomic_int fake_trace_ms = 5;    /* until the steps have been run; < 0: never */
static atomic_int fake_trace_holes = 2; /* looks at a step that find a record missing */
static atomic_int fake_trace_lost;      /* the device was started again */
static atomic_int fake_traces;          /* under way */
static uint64_t fake_trace_due;
static uint32_t fake_trace_steps;

const struct mk_program *mk_engine_program(const mk_engine *e)
{
    static mk_vec vec[2] = {{.name = "h"}, {.name = "sampled"}};
    static uint32_t queue[3] = {0, 3, 5};
#define WAIT_H {0, 0, 0, 2}
    static mk_insn insn[5] = {
        {.opcode = MK_OP_EMBED, .layer = MK_NONE, .signal_vec = 0, .signal_slice = 0},
        {.opcode = MK_OP_SAMPLE, .nwait = 1, .layer = MK_NONE, .signal_vec = 1, .seq = 1, .wait = {WAIT_H}},
        {.opcode = MK_OP_SCHEDULE, .layer = MK_NONE, .signal_vec = MK_NONE, .seq = 2},
        {.opcode = MK_OP_EMBED, .layer = MK_NONE, .signal_vec = 0, .signal_slice = 1},
        {.opcode = MK_OP_GEMV, .nwait = 1, .layer = 0, .signal_vec = MK_NONE, .seq = 1, .wait = {WAIT_H}, .tape_bytes = 640},
    };
    static const mk_program p = {.info = {.workers = 2, .n_vec = 2, .n_insn = 5}, .vec = vec, .queue = queue, .insn = insn};
    (void)e;
    return &p;
}

int mk_engine_trace(mk_engine *e, uint32_t steps, mk_err *err)
{
    (void)e;
    if (steps < 1 || steps > 255) return mk_fail(err, MK_E_USAGE, "steps: expected 1 to 255 for this model, found %u", steps);
    if (atomic_fetch_add(&fake_traces, 1)) abort(); /* the server sees to it */
    fake_trace_due = fake_now() + (uint64_t)atomic_load(&fake_trace_ms) * 1000000;
    fake_trace_steps = steps;
    return MK_OK;
}

void mk_engine_trace_end(mk_engine *e)
{
    (void)e;
    atomic_fetch_sub(&fake_traces, 1);
}

enum mk_trace_state mk_engine_trace_state(const mk_engine *e, uint32_t *first_step)
{
    (void)e;
    *first_step = 40;
    if (!atomic_load(&fake_traces)) return MK_TRACE_NONE;
    if (atomic_load(&fake_trace_lost)) return MK_TRACE_LOST;
    return atomic_load(&fake_trace_ms) >= 0 && fake_now() >= fake_trace_due ? MK_TRACE_RECORDED : MK_TRACE_WAITING;
}

int mk_engine_trace_read(mk_engine *e, uint32_t k, mk_trace_record *r, uint32_t *missing, mk_err *err)
{
    static int looks;
    (void)e;
    if (k >= fake_trace_steps) return mk_fail(err, MK_E_BUG, "step %u of %u", k, fake_trace_steps);
    for (uint32_t i = 0; i < 5; i++)
        r[i] = (mk_trace_record){.start_lo = 1000 * k + 100 * i, .start_hi = 7, .tag = 1, .input = 10, .weights = 5, .publish = i == 2 ? 60 : 0,
                                 .end = 80, .bytes = 64 * i, .mark = 1 << 16 | k << 8 | 1};
    *missing = looks++ < atomic_load(&fake_trace_holes);
    if (!*missing) looks = 0;
    return MK_OK;
}

/* for fault injection, which is tested with the real one */
int mk_engine_submit(mk_engine *e, const mk_submit *s, mk_err *err)
{
    (void)e, (void)s;
    return mk_fail(err, MK_E_CAPACITY, "no submit ring here");
}
