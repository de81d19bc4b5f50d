/* SCHEDULE: who decides what a step contains (design.md section 3). One source for the twin and the device.
 *
 * One fixed rule: one row for every stream that is generating (round-robin when there are more than eight), then prompt tokens of the
 * oldest stream that has any, until MK_MAX_ROWS rows are used. A stream's last known token is held back ("pending") until more
 * tokens or a GENERATE arrive, because the step that processes it is the one that yields the logits of the next.
 *
 * The state here belongs to the worker that runs SCHEDULE; rings and slots are shared with the host (megakernel/rings.h). What the host may change at any time
 * (entries of the submit ring, events taken, cancels, credits) is decided upon as of the last look: the twin looks when it composes; on a GPU, where a look
 * across the bus takes longer than deciding, a warp of its own looks all the time (instructions/schedule.cuh). What the host fixes with a submit entry
 * is copied when the entry is taken. */
#ifndef MK_SCHEDULE_H
#define MK_SCHEDULE_H

#include "megakernel/rings.h"

#ifdef __CUDACC__
#define MK_SCHED_FN __device__ static inline
#define MK_SCHED_CALL __device__ static __noinline__ /* rare or used in several places: instruction caches are small */
#else
#define MK_SCHED_FN static inline
#define MK_SCHED_CALL static inline
#endif

/* Accesses to memory that the host shares. */
#ifdef __CUDA_ARCH__
MK_SCHED_FN uint32_t mk_sys_load(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
MK_SCHED_FN uint64_t mk_sys_load64(const uint64_t *p)
{
    uint64_t v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
MK_SCHED_FN void mk_sys_store(uint32_t *p, uint32_t v)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
/* The warp that looked has acquired what it saw; so has now this thread. Events go to a ring in device memory, which that warp passes on. */
MK_SCHED_FN void mk_sched_acquire(void)
{
    __threadfence_system();
}
MK_SCHED_FN void mk_event_store(uint32_t *p, uint32_t v)
{
    *p = v;
}
#else
MK_SCHED_FN uint32_t mk_sys_load(const uint32_t *p)
{
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
MK_SCHED_FN uint64_t mk_sys_load64(const uint64_t *p)
{
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}
MK_SCHED_FN void mk_sys_store(uint32_t *p, uint32_t v)
{
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
MK_SCHED_FN void mk_sched_acquire(void) {}
MK_SCHED_FN void mk_event_store(uint32_t *p, uint32_t v)
{
    mk_sys_store(p, v);
}
#endif

typedef struct mk_append_mark {
    uint32_t end; /* stream length once it is through */
    uint32_t begin;
    uint32_t tag, flags;
} mk_append_mark;

/* What SCHEDULE knows of a slot. */
typedef struct mk_sched_slot {
    uint32_t generation, open;
    uint32_t pos;  /* tokens processed: the next row is for position pos */
    uint32_t len;  /* tokens known; pos <= len - 1 unless both are 0 */
    uint32_t last; /* id of the token at len - 1, when it was generated here */
    uint32_t last_pos;
    uint32_t n_append;
    mk_append_mark append[MK_MAX_APPENDS];
    uint32_t gen, gen_tag, left, produced; /* the running generation */
    uint32_t context, state_slot;          /* mk_slot's, as of OPEN */
    uint32_t greedy, n_stop, stop[MK_MAX_STOP]; /* mk_slot's, as of GENERATE; greedy: temperature 0 */
    volatile uint32_t cancel;              /* mk_slot's, as of the last look */
    volatile uint64_t credits;
    uint64_t published;                    /* tokens of all generations, against slot.credits */
    uint32_t pin, pin_rows, pin_vocab, pin_count; /* mk_slot's, as of OPEN; rows with random ids so far */
    uint64_t pin_seed;
} mk_sched_slot;

typedef struct mk_sched {
    /* shared with the host */
    mk_submit *submit;    /* [MK_SUBMIT_RING] */
    mk_event *event;      /* [MK_EVENT_RING] */
    uint32_t *event_read; /* events the host has taken */
    volatile uint32_t submitted, taken; /* entries of the submit ring, events taken, as of the last look */
    mk_slot *slot;
    mk_sampling *sampling; /* [n_slots] GPU: a copy of the slots', as of GENERATE, for SAMPLE; NULL: it reads the slots */
    const uint32_t *token;
    uint32_t max_context, n_slots;
    /* own */
    mk_sched_slot *st;  /* [n_slots] */
    uint32_t *active;   /* [n_slots] open slots, oldest first */
    uint32_t n_active;
    uint32_t submit_next, event_next; /* sequence numbers, wrap */
    uint32_t rr;                      /* round-robin start among generating streams */
    uint32_t stop, step;
    uint32_t trace_tag, trace_steps, trace_at; /* the trace under way: its number, steps in all and so far */
    uint32_t idle;    /* GPU: looks for work that found none */
    uint32_t posted;  /* GPU: events that the courier may pass on */
    uint32_t hang, hang_step; /* fault injection: mk_step.hang of that step */
    uint32_t stalled; /* compose could not go on for want of event-ring space */
    mk_step next;
} mk_sched;

MK_SCHED_FN uint32_t mk_sched_event_room(const mk_sched *s)
{
    return MK_EVENT_RING - (s->event_next - s->taken);
}

/* The twin's look. The order matters: whoever takes an entry takes what the slot says then, and an older word must not overwrite that. */
MK_SCHED_FN void mk_sched_look(mk_sched *s)
{
    for (uint32_t k = 0; k < s->n_active; k++) {
        mk_sched_slot *t = &s->st[s->active[k]];
        t->cancel = mk_sys_load(&s->slot[s->active[k]].cancel);
        t->credits = mk_sys_load64(&s->slot[s->active[k]].credits);
    }
    s->taken = mk_sys_load(s->event_read);
    while (s->submitted - s->submit_next < MK_SUBMIT_RING && mk_sys_load(&s->submit[s->submitted % MK_SUBMIT_RING].seq) == s->submitted + 1) s->submitted++;
}

MK_SCHED_CALL void mk_sched_emit(mk_sched *s, uint32_t slot, uint32_t kind, uint32_t position, uint32_t token, float logprob, uint32_t reason,
                         uint32_t arg, uint32_t tag, uint64_t now)
{
    mk_event *e = &s->event[s->event_next % MK_EVENT_RING];
    e->kind = (uint16_t)kind;
    e->slot = (uint16_t)slot;
    e->generation = s->st[slot].generation;
    e->position = position;
    e->token = token;
    e->logprob = logprob;
    e->reason = reason;
    e->arg = arg;
    e->tag = tag;
    e->step = s->step;
    e->device_ns = now;
    s->event_next++;
    mk_event_store(&e->seq, s->event_next);
}

/* Reports the appends that are through: all their tokens but the stream's last are processed. */
MK_SCHED_CALL void mk_sched_appended(mk_sched *s, uint32_t slot, uint32_t reason, uint64_t now)
{
    mk_sched_slot *t = &s->st[slot];
    uint32_t k = 0;
    while (k < t->n_append && (t->pos + 1 >= t->append[k].end || reason == MK_DONE_CANCELLED)) {
        uint32_t end = t->append[k].end < t->len ? t->append[k].end : t->len;
        mk_sched_emit(s, slot, MK_EV_APPENDED, end, 0, 0.0f, reason, 0, t->append[k].tag, now);
        k++;
    }
    for (uint32_t i = k; i < t->n_append; i++) t->append[i - k] = t->append[i];
    t->n_append -= k;
}

MK_SCHED_CALL void mk_sched_done(mk_sched *s, uint32_t slot, uint32_t reason, uint64_t now)
{
    mk_sched_slot *t = &s->st[slot];
    t->gen = 0;
    mk_sched_emit(s, slot, MK_EV_DONE, t->len, 0, 0.0f, reason, t->produced, t->gen_tag, now);
}

MK_SCHED_CALL void mk_sched_cancel(mk_sched *s, uint32_t slot, uint64_t now)
{
    mk_sched_slot *t = &s->st[slot];
    if (t->n_append) { /* tokens not yet processed are dropped; one stays pending */
        t->len = t->pos + 1;
        mk_sched_appended(s, slot, MK_DONE_CANCELLED, now);
    }
    if (t->gen) mk_sched_done(s, slot, MK_DONE_CANCELLED, now);
}

/* After a step: publishes what its rows yielded. token/logprob are SAMPLE's results by row. */
MK_SCHED_FN void mk_sched_finish(mk_sched *s, const mk_step *step, const uint32_t *token, const float *logprob, uint64_t now)
{
    for (uint32_t r = 0; r < step->nrows; r++) {
        const mk_row *row = &step->row[r];
        mk_sched_slot *t = &s->st[row->slot];
        if (row->flags & MK_ROW_EXTRA) continue;
        t->pos++; /* = row->pos + 1, if the stream is not pinned */
        if (row->flags & MK_ROW_SCORE)
            mk_sched_emit(s, row->slot, MK_EV_LOGPROB, row->pos + 1, row->target, logprob[r], 0, 0, t->append[0].tag, now);
        if (t->n_append) mk_sched_appended(s, row->slot, 0, now);
        if (row->flags & MK_ROW_SAMPLE) {
            t->last = token[r];
            t->last_pos = t->len++;
            t->produced++;
            t->published++;
            t->left--;
            mk_sched_emit(s, row->slot, MK_EV_TOKEN, t->last_pos, token[r], logprob[r], 0, t->produced, t->gen_tag, now);
            uint32_t stop = 0;
            for (uint32_t i = 0; i < t->n_stop; i++) stop |= t->stop[i] == token[r];
            if (stop)
                mk_sched_done(s, row->slot, MK_DONE_STOP, now);
            else if (t->left == 0)
                mk_sched_done(s, row->slot, MK_DONE_LENGTH, now);
            else if (t->len >= t->context)
                mk_sched_done(s, row->slot, MK_DONE_CONTEXT, now);
        }
    }
}

/* Takes one entry of the submit ring; returns 0 when there is none or it has to wait. */
MK_SCHED_CALL uint32_t mk_sched_take(mk_sched *s, uint64_t now)
{
    if (s->submitted == s->submit_next) return 0;
    mk_sched_acquire();
    const mk_submit entry = s->submit[s->submit_next % MK_SUBMIT_RING], *e = &entry; /* copies: one way across the bus, not one a field */
    uint32_t i = e->slot, op = e->op;
    mk_sched_slot *t = &s->st[i < s->n_slots ? i : 0];
    const mk_slot slot = s->slot[i < s->n_slots ? i : 0];
    if (i < s->n_slots) {
        t->cancel = slot.cancel;
        t->credits = slot.credits;
    }
    if (op == MK_SUB_STOP) {
        s->stop = 1;
    } else if (op == MK_SUB_HANG) {
        s->hang = e->arg0;
        s->hang_step = s->step + e->arg1;
    } else if (op == MK_SUB_TRACE) {
        s->trace_tag = e->arg1;
        s->trace_steps = e->arg0;
        s->trace_at = 0;
    } else if (i >= s->n_slots || (op != MK_SUB_OPEN && (!t->open || t->generation != e->generation))) {
        /* for a stream that is gone */
    } else if (op == MK_SUB_OPEN) {
        if (!t->open) s->active[s->n_active++] = i;
        t->open = 1;
        t->generation = e->generation;
        t->pos = t->len = t->last = t->n_append = t->gen = t->produced = t->left = 0;
        t->last_pos = 0xffffffffu;
        t->published = 0;
        t->context = slot.context;
        t->state_slot = slot.state_slot;
        t->pin = slot.pin;
        t->pin_rows = slot.pin_rows;
        t->pin_vocab = slot.pin_vocab;
        t->pin_seed = slot.sampling.seed;
        t->pin_count = 0;
    } else if (op == MK_SUB_APPEND) {
        if (t->n_append == MK_MAX_APPENDS) return 0;
        mk_append_mark *m = &t->append[t->n_append++];
        m->begin = t->len;
        t->len += e->arg0;
        m->end = t->len;
        m->tag = e->tag;
        m->flags = e->arg1;
        mk_sched_appended(s, i, 0, now);
    } else if (op == MK_SUB_GENERATE) {
        t->gen = 1;
        t->gen_tag = e->tag;
        t->left = e->arg0;
        t->produced = 0;
        t->greedy = !(slot.sampling.temperature > 0.0f);
        if (s->sampling) {
            s->sampling[i] = slot.sampling;
            mk_sched_acquire(); /* and release: before the step that needs it is published */
        }
        t->n_stop = slot.n_stop < MK_MAX_STOP ? slot.n_stop : MK_MAX_STOP;
        for (uint32_t k = 0; k < MK_MAX_STOP; k++) t->stop[k] = slot.stop[k];
        if (t->left == 0)
            mk_sched_done(s, i, MK_DONE_LENGTH, now);
        else if (t->len == 0)
            mk_sched_done(s, i, MK_DONE_ERROR, now);
        else if (t->len >= t->context)
            mk_sched_done(s, i, MK_DONE_CONTEXT, now);
    } else if (op == MK_SUB_CLOSE) {
        mk_sched_cancel(s, i, now);
        mk_sched_emit(s, i, MK_EV_CLOSED, t->len, 0, 0.0f, 0, 0, e->tag, now);
        t->open = 0;
        uint32_t k = 0;
        while (s->active[k] != i) k++;
        for (s->n_active--; k < s->n_active; k++) s->active[k] = s->active[k + 1];
    }
    s->submit_next++;
    return 1;
}

/* Turns the row that was just added for a pinned stream's newest token into rows at its position, with random ids. */
MK_SCHED_CALL void mk_sched_pinned(mk_sched *s, mk_step *d)
{
    mk_row first = d->row[d->nrows - 1];
    mk_sched_slot *t = &s->st[first.slot];
    d->nrows--;
    for (uint32_t k = 0; k < t->pin_rows; k++) {
        mk_row *row = &d->row[d->nrows++];
        uint64_t x = t->pin_seed + ++t->pin_count * 0x9e3779b97f4a7c15ull; /* splitmix64 */
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
        x ^= x >> 31;
        *row = first;
        row->pos = t->pin - 1 + k;
        row->token = (uint32_t)(((x >> 32) * t->pin_vocab) >> 32);
        if (k + 1 < t->pin_rows) row->flags |= MK_ROW_EXTRA;
    }
}

/* Adds the row for position `pos` of slot i. */
MK_SCHED_CALL void mk_sched_row(mk_sched *s, mk_step *d, uint32_t i)
{
    mk_sched_slot *t = &s->st[i];
    mk_row *row = &d->row[d->nrows];
    uint32_t pos = t->pos, ahead = 0;
    for (uint32_t k = 0; k < d->nrows; k++) ahead += d->row[k].slot == i;
    pos += ahead;
    row->slot = i;
    row->pos = t->pin ? t->pin - 1 + ahead : pos;
    row->token = pos == t->last_pos ? t->last : s->token[(uint64_t)i * s->max_context + pos];
    row->flags = pos == 0 ? MK_ROW_FIRST : 0;
    row->state_read = row->state_write = t->state_slot;
    row->target = 0;
    row->pad = 0;
    if (pos + 1 == t->len) {
        row->flags |= MK_ROW_LOGITS | MK_ROW_SAMPLE | (t->greedy ? MK_ROW_GREEDY : 0);
    } else {
        for (uint32_t k = 0; k < t->n_append; k++)
            if (pos + 1 >= t->append[k].begin && pos + 1 < t->append[k].end && (t->append[k].flags & MK_APPEND_LOGPROBS)) {
                row->flags |= MK_ROW_LOGITS | MK_ROW_SCORE;
                row->target = s->token[(uint64_t)i * s->max_context + pos + 1];
            }
    }
    if (row->flags & MK_ROW_LOGITS) d->any_logits = 1;
    d->nrows++;
}

/* Composes the next step into s->next; nrows = 0 when there is nothing to do (s->stop: leave). Every row may yield up to
 * 2 + MK_MAX_APPENDS events, every control entry as many: room is reserved before anything is published. */
MK_SCHED_FN void mk_sched_compose(mk_sched *s, uint64_t now)
{
    const uint32_t per = 2 + MK_MAX_APPENDS;
    mk_step *d = &s->next;
    d->nrows = 0;
    d->any_logits = 0;
    d->trace = 0;
    s->stalled = 0;
#ifndef __CUDA_ARCH__
    mk_sched_look(s);
#endif
    if (s->trace_steps && s->trace_at == s->trace_steps && mk_sched_event_room(s)) {
        mk_sched_emit(s, 0, MK_EV_TRACED, 0, 0, 0.0f, 0, s->trace_steps, s->trace_tag, now);
        s->trace_steps = s->trace_at = 0;
    }
    for (uint32_t n = 0; n < 64; n++) { /* bounded entries a step */
        if (mk_sched_event_room(s) < per) {
            s->stalled = 1;
            return;
        }
        if (!mk_sched_take(s, now)) break;
    }
    for (uint32_t k = 0; k < s->n_active; k++) {
        uint32_t i = s->active[k];
        if ((s->st[i].gen || s->st[i].n_append) && s->st[i].cancel) {
            if (mk_sched_event_room(s) < per) {
                s->stalled = 1;
                return;
            }
            mk_sched_cancel(s, i, now);
        }
    }
    uint32_t room = mk_sched_event_room(s) / per;
    uint32_t rows = room < MK_MAX_ROWS ? room : MK_MAX_ROWS;
    if (rows < MK_MAX_ROWS) s->stalled = 1;
    /* generating streams */
    uint32_t first = s->n_active ? s->rr % s->n_active : 0, last = first;
    for (uint32_t k = 0; k < s->n_active && d->nrows < rows; k++) {
        uint32_t a = (first + k) % s->n_active, i = s->active[a];
        mk_sched_slot *t = &s->st[i];
        if (!t->gen || t->pos + 1 != t->len || t->published >= t->credits) continue;
        if (t->pin && d->nrows + t->pin_rows > rows) continue;
        mk_sched_row(s, d, i);
        if (t->pin) mk_sched_pinned(s, d);
        last = a + 1;
    }
    if (d->nrows == MK_MAX_ROWS) s->rr = last;
    /* prompt tokens, oldest stream first; the row of the last one samples when the generation is already waiting */
    for (uint32_t k = 0; k < s->n_active && d->nrows < rows; k++) {
        uint32_t i = s->active[k];
        mk_sched_slot *t = &s->st[i];
        if (t->pos + 1 >= t->len) continue;
        uint32_t end = t->len - 1;
        if (t->gen && t->published < t->credits) end = t->len;
        for (uint32_t p = t->pos; p < end && d->nrows < rows; p++) mk_sched_row(s, d, i);
    }
    if (d->nrows && s->trace_at < s->trace_steps) d->trace = s->trace_tag << 16 | ++s->trace_at;
    d->hang = s->hang && s->step == s->hang_step ? s->hang : 0;
    d->seq = s->step;
}

#endif
