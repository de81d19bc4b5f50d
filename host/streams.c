/* Rules (the wire's page, ipc/PROTOCOL.md, states them for clients):
 *  - APPEND is accepted while earlier APPENDs of the stream run, at most MK_MAX_APPENDS at a time, and refused while a GENERATE runs:
 *    where its tokens would go is not known yet.
 *  - GENERATE is accepted while APPENDs run (the device starts it behind them), one at a time.
 *  - After CANCEL nothing is accepted until everything that ran has been answered: the slot's cancel word is cleared between requests.
 *  - CLOSE is always accepted, once. What runs is cancelled and answered before CLOSED.
 *
 * A slot goes FREE -> OPEN -> CLOSING -> FREE, the last step when the device says CLOSED: until then it may touch pages, state and log.
 * Stream id = slot generation * 65,536 + slot. State slot = slot: every stream has exactly one.
 *
 * After MK_EV_RESTARTED (the kernel hung and was launched anew):
 *  - kept: slots, ids, owners, pages, sampling, stop ids, token logs, the rest of each stream's credits;
 *  - failed: everything that ran gets its one answer with reason ERROR. Tokens that were delivered stay in the stream; those of a failed
 *    append do not, not even where the device had processed some. What was closing is closed;
 *  - rebuilt: cache and recurrent state of every stream that is open, by an OPEN and one internal APPEND of its whole log, whose APPENDED nobody
 *    hears of. A stream without a row in the aborted step has sound memory, but the new SCHEDULE has no entry that would say "this slot
 *    is at position n", and one way is enough for what should never happen. Rows do not depend on their neighbours, so the rebuilt state is the
 *    lost one, bit for bit. New requests queue behind the rebuilding; a cancel waits for it, because it would cut the log. */
#include "host/streams.h"

#include "megakernel/submit.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum slot_state { SLOT_FREE = 0, SLOT_OPEN, SLOT_CLOSING };

typedef struct request {
    uint32_t tag; /* as the engine knows it */
    uint64_t user;
    uint32_t begin; /* appends: tokens in the log before it */
} request;

typedef struct stream {
    enum slot_state state;
    uint32_t generation;
    uint64_t owner;
    uint32_t context, n_pages;
    uint32_t len; /* tokens in the log: processed, and of running appends */
    uint32_t n_stop, stop[MK_MAX_STOP];
    uint32_t n_append; /* running, oldest first */
    request append[MK_MAX_APPENDS];
    int generating, cancelling;
    request gen;
    uint32_t produced; /* tokens of the running generation */
    uint64_t t_submit, t_first;
    int dropped;     /* the owner is gone: no reports */
    int close_later; /* CLOSE is still to be submitted: the ring was full */
    request close;
    uint64_t published; /* tokens that count against the slot's credits */
    int restart;        /* the kernel was launched anew: failures to report, then OPEN and APPEND to submit */
    int rebuilding;     /* that APPEND runs */
    uint32_t rebuild_tag;
} stream;

struct mk_streams {
    mk_engine *e;
    uint32_t slots, pages, vocab, context;
    stream *st;         /* [slots] */
    uint32_t *free_page; /* stack, [pages] */
    uint32_t n_free_page;
    uint32_t n_close_later, n_restart;
    uint32_t next_slot; /* where OPEN looks first: slots are reused as late as possible */
    uint32_t next_tag;
    mk_streams_stats stats;
};

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

mk_streams *mk_streams_new(mk_engine *e)
{
    mk_streams *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->e = e;
    s->slots = mk_engine_slots(e);
    s->pages = mk_engine_pages(e);
    s->vocab = mk_engine_model(e)->vocab;
    s->context = mk_engine_context(e);
    s->st = calloc(s->slots, sizeof *s->st);
    s->free_page = calloc(s->pages, sizeof *s->free_page);
    if (!s->st || !s->free_page) {
        mk_streams_destroy(&s);
        return NULL;
    }
    while (s->n_free_page < s->pages) { /* page 0 on top */
        s->free_page[s->n_free_page] = s->pages - 1 - s->n_free_page;
        s->n_free_page++;
    }
    return s;
}

void mk_streams_destroy(mk_streams **s)
{
    if (!*s) return;
    free((*s)->st);
    free((*s)->free_page);
    free(*s);
    *s = NULL;
}

static uint64_t id_of(const mk_streams *s, const stream *t)
{
    return (uint64_t)t->generation << 16 | (uint64_t)(t - s->st);
}

/* Counts refusals, so that every `return` of a refused request goes through here. */
static int refuse(mk_streams *s, int code)
{
    s->stats.refused++;
    return code;
}

/* NULL and MK_E_WIRE in err: no such stream, or not this client's. */
static stream *find(mk_streams *s, uint64_t owner, uint64_t id, mk_err *err)
{
    uint32_t slot = (uint32_t)(id & 0xffff);
    stream *t = slot < s->slots ? &s->st[slot] : NULL;
    if (!t || t->state != SLOT_OPEN || id_of(s, t) != id) {
        mk_fail(err, MK_E_WIRE, "stream %llu is not open", (unsigned long long)id);
        return NULL;
    }
    if (t->owner != owner) {
        mk_fail(err, MK_E_WIRE, "stream %llu belongs to another client", (unsigned long long)id);
        return NULL;
    }
    return t;
}

static mk_submit entry(mk_streams *s, const stream *t, enum mk_submit_op op, uint32_t arg0, uint32_t arg1, uint32_t tag)
{
    return (mk_submit){.op = (uint16_t)op,
                       .slot = (uint16_t)(t - s->st),
                       .generation = t->generation,
                       .arg0 = arg0,
                       .arg1 = arg1,
                       .tag = tag};
}

static int submit(mk_streams *s, const stream *t, enum mk_submit_op op, uint32_t arg0, uint32_t tag, mk_err *err)
{
    mk_submit e = entry(s, t, op, arg0, 0, tag);
    return mk_engine_submit(s->e, &e, err);
}

/* n tokens of the log from position `at` on. */
static int submit_append(mk_streams *s, const stream *t, uint32_t at, uint32_t n, uint32_t flags, uint32_t tag, mk_err *err)
{
    mk_submit e = entry(s, t, MK_SUB_APPEND, n, flags, tag);
    mk_submit_tokens(&e, mk_engine_tokens(s->e, e.slot) + at);
    return mk_engine_submit(s->e, &e, err);
}

/* A stream that waits to be rebuilt takes nothing: the order of entries matters. The next poll rebuilds it. */
static int check_rebuilt(const stream *t, mk_err *err)
{
    if (!t->restart) return MK_OK;
    return mk_fail(err, MK_E_CAPACITY, "the device has just been restarted and this stream is not back yet");
}

static int running(const stream *t)
{
    return t->generating || t->n_append;
}

static void set_cancel(mk_streams *s, const stream *t, uint32_t v)
{
    __atomic_store_n(&mk_engine_slot(s->e, (uint32_t)(t - s->st))->cancel, v, __ATOMIC_RELEASE);
}

static int check_stops(const mk_streams *s, uint32_t n, const uint32_t *stop, mk_err *err)
{
    if (n > MK_MAX_STOP) return mk_fail(err, MK_E_WIRE, "%u stop ids, at most %d are supported", n, MK_MAX_STOP);
    for (uint32_t i = 0; i < n; i++)
        if (stop[i] >= s->vocab) return mk_fail(err, MK_E_WIRE, "stop id %u is outside the vocabulary of %u", stop[i], s->vocab);
    return MK_OK;
}

static int check_sampling(const mk_sampling *p, mk_err *err)
{
    if (!isfinite(p->temperature) || p->temperature < 0)
        return mk_fail(err, MK_E_WIRE, "temperature is %g, expected a finite number >= 0", (double)p->temperature);
    if (!(p->top_p > 0 && p->top_p <= 1)) return mk_fail(err, MK_E_WIRE, "top_p is %g, expected 0 < top_p <= 1", (double)p->top_p);
    if (!(p->min_p >= 0 && p->min_p <= 1)) return mk_fail(err, MK_E_WIRE, "min_p is %g, expected 0 to 1", (double)p->min_p);
    return MK_OK;
}

int mk_streams_open(mk_streams *s, uint64_t owner, const mk_open *o, uint64_t *stream_id, mk_err *err)
{
    int rc = check_stops(s, o->n_stop, o->stop, err);
    if (rc == MK_OK) rc = check_sampling(&o->sampling, err);
    if (rc) return refuse(s, rc);
    uint32_t context = o->context ? o->context : s->context;
    if (context > s->context)
        return refuse(s, mk_fail(err, MK_E_WIRE, "context of %u tokens asked for, the limit of a stream is %u", context, s->context));
    if (s->stats.slots_used == s->slots)
        return refuse(s, mk_fail(err, MK_E_CAPACITY, "no room for another stream: all %u slots are in use", s->slots));
    if (o->pin_rows > MK_MAX_ROWS || (o->pin_rows && (uint64_t)o->pin + MK_MAX_ROWS > context))
        return refuse(s, mk_fail(err, MK_E_WIRE, "pinned at position %u with %u rows a step: expected at most %d rows, and a context of %u tokens", o->pin,
                                 o->pin_rows, MK_MAX_ROWS, o->pin + MK_MAX_ROWS));
    uint32_t need = (context + MK_PAGE - 1) / MK_PAGE;
    if (need > s->n_free_page)
        return refuse(s, mk_fail(err, MK_E_CAPACITY, "no room for a stream of %u tokens: needs %u pages, %u of %u free", context, need,
                                 s->n_free_page, s->pages));
    uint32_t i = s->next_slot;
    while (s->st[i].state != SLOT_FREE) i = (i + 1) % s->slots;
    stream *t = &s->st[i];
    uint32_t generation = t->generation + 1;
    *t = (stream){.state = SLOT_OPEN, .generation = generation ? generation : 1, .owner = owner, .context = context, .n_pages = need};
    t->n_stop = o->n_stop;
    memcpy(t->stop, o->stop, o->n_stop * sizeof t->stop[0]);

    mk_slot *slot = mk_engine_slot(s->e, i);
    *slot = (mk_slot){.generation = t->generation, .credits = o->credits, .sampling = o->sampling, .context = context, .state_slot = i};
    if (o->pin_rows) slot->pin = o->pin + 1, slot->pin_rows = o->pin_rows, slot->pin_vocab = s->vocab;
    uint32_t *page = mk_engine_page_table(s->e, i);
    for (uint32_t k = 0; k < need; k++) page[k] = s->free_page[s->n_free_page - 1 - k];
    rc = submit(s, t, MK_SUB_OPEN, 0, 0, err);
    if (rc) {
        t->state = SLOT_FREE;
        return refuse(s, rc);
    }
    s->n_free_page -= need;
    s->next_slot = (i + 1) % s->slots;
    s->stats.slots_used++;
    s->stats.opened++;
    *stream_id = id_of(s, t);
    return MK_OK;
}

int mk_streams_append(mk_streams *s, uint64_t owner, uint64_t id, const uint32_t *tokens, uint32_t n, int logprobs, uint64_t tag,
                      mk_err *err)
{
    stream *t = find(s, owner, id, err);
    if (!t) return refuse(s, MK_E_WIRE);
    if (check_rebuilt(t, err)) return refuse(s, MK_E_CAPACITY);
    if (n == 0) return refuse(s, mk_fail(err, MK_E_WIRE, "append of no tokens"));
    if (t->cancelling) return refuse(s, mk_fail(err, MK_E_WIRE, "stream %llu is busy: a cancel is under way", (unsigned long long)id));
    if (t->generating)
        return refuse(s, mk_fail(err, MK_E_WIRE, "stream %llu is busy: append while it generates", (unsigned long long)id));
    if (t->n_append == MK_MAX_APPENDS)
        return refuse(s, mk_fail(err, MK_E_WIRE, "stream %llu is busy: %d appends are under way already", (unsigned long long)id,
                                 MK_MAX_APPENDS));
    if (n > t->context - t->len)
        return refuse(s, mk_fail(err, MK_E_WIRE, "append of %u tokens to a stream of %u goes over its context budget of %u", n, t->len,
                                 t->context));
    const mk_model *m = mk_engine_model(s->e);
    for (uint32_t i = 0; i < n; i++) {
        if (tokens[i] >= s->vocab)
            return refuse(s, mk_fail(err, MK_E_WIRE, "token %u of the append is %u, outside the vocabulary of %u", i, tokens[i], s->vocab));
        for (uint32_t k = 0; k < m->n_media; k++)
            if (tokens[i] == m->media[k])
                return refuse(s, mk_fail(err, MK_E_WIRE, "token %u of the append is %u, which stands for an image or a video: only text is supported", i, tokens[i]));
    }
    if (!running(t)) set_cancel(s, t, 0);
    memcpy(mk_engine_tokens(s->e, (uint32_t)(t - s->st)) + t->len, tokens, (size_t)n * sizeof *tokens);
    request r = {.tag = s->next_tag++, .user = tag, .begin = t->len};
    int rc = submit_append(s, t, t->len, n, logprobs ? MK_APPEND_LOGPROBS : 0, r.tag, err);
    if (rc) return refuse(s, rc);
    t->append[t->n_append++] = r;
    t->len += n;
    s->stats.appended_tokens += n;
    return MK_OK;
}

int mk_streams_generate(mk_streams *s, uint64_t owner, uint64_t id, const mk_generate *g, uint64_t tag, mk_err *err)
{
    stream *t = find(s, owner, id, err);
    if (!t || (g->own_stop && check_stops(s, g->n_stop, g->stop, err))) return refuse(s, MK_E_WIRE);
    if (check_rebuilt(t, err)) return refuse(s, MK_E_CAPACITY);
    if (t->cancelling) return refuse(s, mk_fail(err, MK_E_WIRE, "stream %llu is busy: a cancel is under way", (unsigned long long)id));
    if (t->generating) return refuse(s, mk_fail(err, MK_E_WIRE, "stream %llu is busy: it generates already", (unsigned long long)id));
    if (t->len == 0)
        return refuse(s, mk_fail(err, MK_E_WIRE, "stream %llu is empty: append at least one token first", (unsigned long long)id));
    if (!running(t)) set_cancel(s, t, 0);
    /* Running appends do not look at the stop ids. */
    mk_slot *slot = mk_engine_slot(s->e, (uint32_t)(t - s->st));
    uint32_t n_stop = g->own_stop ? g->n_stop : t->n_stop;
    memcpy(slot->stop, g->own_stop ? g->stop : t->stop, n_stop * sizeof slot->stop[0]);
    slot->n_stop = n_stop;
    request r = {.tag = s->next_tag++, .user = tag};
    uint64_t now = now_ns();
    int rc = submit(s, t, MK_SUB_GENERATE, g->max_new, r.tag, err);
    if (rc) return refuse(s, rc);
    t->generating = 1;
    t->gen = r;
    t->produced = 0;
    t->t_submit = now;
    t->t_first = 0;
    return MK_OK;
}

int mk_streams_credit(mk_streams *s, uint64_t owner, uint64_t id, uint64_t more, mk_err *err)
{
    stream *t = find(s, owner, id, err);
    if (!t) return MK_E_WIRE;
    uint64_t *credits = &mk_engine_slot(s->e, (uint32_t)(t - s->st))->credits; /* only this thread writes it */
    if (*credits == UINT64_MAX) return MK_OK;
    uint64_t limit = UINT64_MAX - 1, sum = more > limit - *credits ? limit : *credits + more;
    __atomic_store_n(credits, sum, __ATOMIC_RELEASE);
    mk_engine_doorbell(s->e);
    return MK_OK;
}

static void cancel(mk_streams *s, stream *t)
{
    if (!running(t) || t->cancelling) return;
    t->cancelling = 1;
    if (t->rebuilding || t->restart) return; /* the flag is set once the log is back */
    set_cancel(s, t, 1);
    mk_engine_doorbell(s->e);
}

int mk_streams_cancel(mk_streams *s, uint64_t owner, uint64_t id, mk_err *err)
{
    stream *t = find(s, owner, id, err);
    if (!t) return MK_E_WIRE;
    cancel(s, t);
    return MK_OK;
}

/* A full ring, or a log that is being rebuilt, which CLOSE would cut, delays the entry to a later poll; closing cannot fail. What runs is cancelled at once, so that nobody waits for it. */
static void begin_close(mk_streams *s, stream *t, uint64_t tag)
{
    t->state = SLOT_CLOSING;
    t->close = (request){.tag = s->next_tag++, .user = tag};
    if (t->restart) return; /* closed when its failures have been reported */
    if (t->rebuilding || submit(s, t, MK_SUB_CLOSE, 0, t->close.tag, NULL) != MK_OK) {
        t->close_later = 1;
        s->n_close_later++;
        cancel(s, t);
    }
}

int mk_streams_close(mk_streams *s, uint64_t owner, uint64_t id, uint64_t tag, mk_err *err)
{
    stream *t = find(s, owner, id, err);
    if (!t) return MK_E_WIRE;
    begin_close(s, t, tag);
    return MK_OK;
}

uint32_t mk_streams_drop_owner(mk_streams *s, uint64_t owner)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->slots; i++) {
        stream *t = &s->st[i];
        if (t->state == SLOT_FREE || t->owner != owner || t->dropped) continue;
        t->dropped = 1;
        n++;
        if (t->state == SLOT_OPEN) begin_close(s, t, 0);
    }
    return n;
}

void mk_streams_cancel_all(mk_streams *s)
{
    for (uint32_t i = 0; i < s->slots; i++)
        if (s->st[i].state == SLOT_OPEN) cancel(s, &s->st[i]);
}

static void retry_closes(mk_streams *s)
{
    for (uint32_t i = 0; i < s->slots && s->n_close_later; i++) {
        stream *t = &s->st[i];
        if (!t->close_later || t->rebuilding) continue;
        if (submit(s, t, MK_SUB_CLOSE, 0, t->close.tag, NULL) != MK_OK) return;
        t->close_later = 0;
        s->n_close_later--;
    }
}

static void release(mk_streams *s, stream *t)
{
    const uint32_t *page = mk_engine_page_table(s->e, (uint32_t)(t - s->st));
    for (uint32_t k = t->n_pages; k-- > 0;) s->free_page[s->n_free_page++] = page[k];
    t->n_pages = 0;
    t->state = SLOT_FREE;
    s->stats.slots_used--;
}

/* Takes one event in; returns 1 when somebody is to hear of it. Events that answer nothing that runs (a closed stream's, or a second
 * answer) are dropped here, so that every request is answered once whatever the device says. */
static int handle(mk_streams *s, const mk_event *ev, mk_report *r)
{
    if (ev->slot >= s->slots) return 0;
    stream *t = &s->st[ev->slot];
    if (t->state == SLOT_FREE || t->generation != ev->generation) return 0;
    *r = (mk_report){.owner = t->owner, .stream = id_of(s, t), .ev = *ev};
    switch (ev->kind) {
    case MK_EV_TOKEN:
        if (!t->generating || ev->tag != t->gen.tag || ev->position >= t->context) return 0;
        mk_engine_tokens(s->e, ev->slot)[ev->position] = ev->token;
        t->len = ev->position + 1;
        t->published++;
        t->produced++;
        if (!t->t_first) t->t_first = now_ns();
        s->stats.generated_tokens++;
        r->tag = t->gen.user;
        break;
    case MK_EV_LOGPROB:
        if (!t->n_append || ev->tag != t->append[0].tag) return 0;
        r->tag = t->append[0].user;
        break;
    case MK_EV_APPENDED:
        if (t->rebuilding && ev->tag == t->rebuild_tag) {
            t->rebuilding = 0;
            if (t->cancelling && running(t)) {
                set_cancel(s, t, 1);
                mk_engine_doorbell(s->e);
            }
            return 0;
        }
        if (!t->n_append || ev->tag != t->append[0].tag) return 0;
        r->tag = t->append[0].user;
        t->n_append--;
        memmove(t->append, t->append + 1, t->n_append * sizeof t->append[0]);
        if (ev->reason) t->len = ev->position; /* cut short: what was not processed is forgotten */
        break;
    case MK_EV_DONE:
        if (!t->generating || ev->tag != t->gen.tag) return 0;
        t->generating = 0;
        r->tag = t->gen.user;
        r->prompt_tokens = ev->position - ev->arg;
        r->t_submit_ns = t->t_submit;
        r->t_first_ns = t->t_first;
        r->t_done_ns = now_ns();
        t->len = ev->position;
        s->stats.requests_done++;
        s->stats.cancelled += ev->reason == MK_DONE_CANCELLED;
        break;
    case MK_EV_CLOSED:
        if (t->state != SLOT_CLOSING || t->close_later || ev->tag != t->close.tag) return 0;
        r->tag = t->close.user;
        release(s, t);
        break;
    default: return 0;
    }
    if (!running(t)) t->cancelling = 0;
    return !t->dropped;
}

/* ---- after a relaunch ----------------------------------------------------------------------------------------------- */

static void restarted(mk_streams *s)
{
    s->n_restart = s->n_close_later = 0;
    for (uint32_t i = 0; i < s->slots; i++) {
        stream *t = &s->st[i];
        t->close_later = t->rebuilding = 0;
        if (t->n_append && !t->restart) t->len = t->append[0].begin;
        t->restart = t->state != SLOT_FREE;
        s->n_restart += (uint32_t)t->restart;
    }
}

/* Ends the stream's oldest request; returns what there is to report (dropped streams: nothing). */
static uint32_t fail_one(mk_streams *s, stream *t, mk_report *r)
{
    mk_event ev = {.slot = (uint16_t)(t - s->st), .generation = t->generation, .position = t->len, .reason = MK_DONE_ERROR};
    if (t->n_append) {
        ev.kind = MK_EV_APPENDED;
        ev.tag = t->append[0].tag;
    } else if (t->generating) {
        ev.kind = MK_EV_DONE;
        ev.tag = t->gen.tag;
        ev.arg = t->produced;
    } else {
        ev.kind = MK_EV_CLOSED;
        ev.tag = t->close.tag;
        ev.reason = 0;
    }
    return (uint32_t)handle(s, &ev, r);
}

static int rebuild(mk_streams *s, stream *t)
{
    mk_slot *slot = mk_engine_slot(s->e, (uint32_t)(t - s->st));
    if (slot->credits != UINT64_MAX) slot->credits -= t->published; /* the device counts from OPEN */
    t->published = 0;
    set_cancel(s, t, 0);
    t->cancelling = 0;
    if (submit(s, t, MK_SUB_OPEN, 0, 0, NULL)) return 0;
    uint32_t tag = s->next_tag++;
    if (t->len && submit_append(s, t, 0, t->len, 0, tag, NULL)) return 0;
    t->rebuilding = t->len != 0;
    t->rebuild_tag = tag;
    return 1;
}

/* Goes on where room for reports or the submit ring's ended the last time. */
static uint32_t restart_streams(mk_streams *s, mk_report *r, uint32_t n)
{
    uint32_t k = 0;
    for (uint32_t i = 0; i < s->slots && s->n_restart; i++) {
        stream *t = &s->st[i];
        if (!t->restart) continue;
        while (k < n && (running(t) || t->state == SLOT_CLOSING)) k += fail_one(s, t, &r[k]);
        if (running(t) || t->state == SLOT_CLOSING) return k;
        if (t->state == SLOT_OPEN && !rebuild(s, t)) return k;
        t->restart = 0;
        s->n_restart--;
    }
    return k;
}

uint32_t mk_streams_poll(mk_streams *s, mk_report *r, uint32_t n)
{
    uint32_t k = s->n_restart ? restart_streams(s, r, n) : 0;
    if (s->n_close_later) retry_closes(s);
    while (k < n) {
        mk_event ev[64];
        uint32_t want = n - k < 64 ? n - k : 64, got = mk_engine_events(s->e, ev, want);
        for (uint32_t i = 0; i < got; i++) {
            if (ev[i].kind != MK_EV_RESTARTED) {
                k += (uint32_t)handle(s, &ev[i], &r[k]);
                continue;
            }
            /* the last event there is: the rings are empty */
            restarted(s);
            k += restart_streams(s, r + k, n - k);
        }
        if (got < want) break;
    }
    return k;
}

void mk_streams_get_stats(const mk_streams *s, mk_streams_stats *st)
{
    *st = s->stats;
    st->slots = s->slots;
    st->pages = s->pages;
    st->pages_used = s->pages - s->n_free_page;
    for (uint32_t i = 0; i < s->slots; i++) {
        const stream *t = &s->st[i];
        if (t->state != SLOT_FREE && !t->dropped) st->requests_running += (uint32_t)t->generating + t->n_append;
    }
}
