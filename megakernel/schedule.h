/* SCHEDULE: who decides what a step contains (design.md section 3). One source for the twin and the device.
 *
 * One fixed rule: one row for every stream that is generating, those first that the step before had none for, but for one row where a prompt waits; then prompt tokens of the
 * oldest stream that has any, until MK_MAX_ROWS rows are used. Two streams that generate, of a model with experts, have a step each: two rows need twice the experts, and the
 * instructions of several rows besides (H200: 5 to 14 % longer than two steps of one; four rows are faster than four such steps). A stream's last known token is held back ("pending") until more
 * tokens or a GENERATE arrive, because the step that processes it is the one that yields the logits of the next.
 *
 * The state here belongs to the worker that runs SCHEDULE; rings and slots are shared with the host (megakernel/rings.h). What the host may change at any time
 * (entries of the submit ring, events taken, cancels, credits) is decided upon as of the last look: the twin looks when it composes; on a GPU, where a look
 * across the bus takes longer than deciding, a warp of its own looks all the time (instructions/schedule.cuh). Everything else that the host says comes with
 * the entries; only tokens of long appends are looked up in the log, all of a step's at once.
 *
 * On a GPU the step behind one of one row may be sure but for its token (mk_sched_sure), and is then begun when that is chosen; mk_sched_follow catches up. What the host has said since the last look before waits for
 * the step behind it.
 *
 * The host clears a slot's cancel word before it submits the slot's next entry, so a taken entry clears the word here: what an earlier look has seen is older than
 * the entry. Later looks bring what the host has said since. */
#ifndef MK_SCHEDULE_H
#define MK_SCHEDULE_H

#include "megakernel/rings.h"

#include <string.h>

#ifdef __CUDACC__
#define MK_SCHED_FN __device__ static inline
#define MK_SCHED_CALL __device__ static __noinline__ /* rare or used in several places: instruction caches are small */
#define MK_SCHED_LOOP _Pragma("unroll 1") /* for the same reason */
#else
#define MK_SCHED_FN static inline
#define MK_SCHED_CALL static inline
#define MK_SCHED_LOOP
#endif

/* Accesses to memory that the host, or the warp that looks, shares. */
#ifdef __CUDA_ARCH__
MK_SCHED_FN uint32_t mk_look_load(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.relaxed.cta.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
MK_SCHED_FN uint64_t mk_look_load64(const uint64_t *p)
{
    uint64_t v;
    asm volatile("ld.relaxed.cta.u64 %0, [%1];" : "=l"(v) : "l"(p));
    return v;
}
MK_SCHED_FN uint32_t mk_log_load(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
/* The host wrote the log before the entry, of which the warp that looks has seen every packet. */
MK_SCHED_FN void mk_sched_acquire(void)
{
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}
/* For other workers, before the step that needs it is published. */
MK_SCHED_FN void mk_sched_release(void)
{
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}
/* From here on the entry before `next` may be overwritten. */
MK_SCHED_FN void mk_sched_taken(uint32_t *submit_next, uint32_t next)
{
    asm volatile("" ::: "memory");
    *submit_next = next;
}
/* On the twin another thread looks at it. */
MK_SCHED_FN void mk_sched_stall(uint32_t *stalled, uint32_t is)
{
    *stalled = is;
}
/* Packets on their way to the host: nobody waits for them. */
MK_SCHED_FN void mk_event_store(mk_event *to, const mk_event *e)
{
    const uint64_t *q = (const uint64_t *)e;
#pragma unroll
    for (uint32_t k = 0; k < sizeof *e / 16; k++)
        asm volatile("{\n\t.reg .b128 v;\n\tmov.b128 v, {%1, %2};\n\tst.relaxed.sys.global.b128 [%0], v;\n\t}" ::"l"((uint64_t *)to + 2 * k), "l"(q[2 * k]), "l"(q[2 * k + 1])
                     : "memory");
}
#else
MK_SCHED_FN uint32_t mk_look_load(const uint32_t *p)
{
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
MK_SCHED_FN uint64_t mk_look_load64(const uint64_t *p)
{
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}
MK_SCHED_FN uint32_t mk_log_load(const uint32_t *p)
{
    return *p;
}
MK_SCHED_FN void mk_sched_acquire(void) {}
MK_SCHED_FN void mk_sched_release(void) {}
MK_SCHED_FN void mk_sched_taken(uint32_t *submit_next, uint32_t next)
{
    __atomic_store_n(submit_next, next, __ATOMIC_RELEASE);
}
MK_SCHED_FN void mk_sched_stall(uint32_t *stalled, uint32_t is)
{
    __atomic_store_n(stalled, is, __ATOMIC_RELAXED);
}
MK_SCHED_FN void mk_event_store(mk_event *to, const mk_event *e)
{
    uint32_t *q = (uint32_t *)to;
    for (uint32_t k = 0; k < sizeof *e / 16; k++) {
        memcpy(q + 4 * k, (const uint8_t *)e + 16 * k, 12);
        __atomic_store_n(q + 4 * k + 3, e->seq0, __ATOMIC_RELEASE);
    }
}
#endif

/* Of a slot, what is looked at in few steps. */
typedef struct mk_append_mark {
    uint32_t end; /* stream length once it is through */
    uint32_t begin;
    uint32_t tag, flags;
} mk_append_mark;

typedef struct mk_sched_rest {
    mk_append_mark append[MK_MAX_APPENDS];
    uint32_t stop[MK_MAX_STOP];
    uint32_t first[MK_SUBMIT_TOKENS];
} mk_sched_rest;

/* What SCHEDULE knows of a slot. What a generation's step needs lies together: it is read in few pieces. */
typedef struct mk_sched_slot {
    alignas(16) uint32_t generation;
    uint32_t open;
    uint32_t pos;  /* tokens processed: the next row is for position pos */
    uint32_t len;  /* tokens known; pos <= len - 1 unless both are 0 */
    /* tokens that need not be looked up in the log, by position */
    uint32_t last, last_pos;           /* the newest one that was generated here, or the one that was pending when an append came */
    uint32_t end, end_pos;             /* the newest append's last one */
    uint32_t gen, gen_tag, left, produced; /* the running generation */
    uint32_t cancel, n_append;             /* cancel: mk_slot's, as of the last look */
    uint32_t pin, state_slot;              /* mk_slot's, as of OPEN; also context, pin_rows, pin_vocab */
    uint64_t credits;
    uint64_t published;                    /* tokens of all generations, against slot.credits */
    uint32_t greedy, n_stop, context;      /* greedy (temperature 0), n_stop: mk_slot's, as of GENERATE */
    uint32_t first_at, n_first;            /* an append's first tokens: mk_sched_rest.first */
    uint32_t pin_rows, pin_vocab, pin_count; /* pin_count: rows with random ids so far */
    uint64_t pin_seed;
    uint32_t scores, pad;                  /* scores: some append wants logprobs */
} mk_sched_slot;

typedef struct mk_sched {
    /* shared with the host */
    mk_submit *submit;    /* [MK_SUBMIT_RING]; GPU: in device memory, where the looks put what they bring */
    const mk_submit *near; /* GPU: an entry once more, in shared memory */
    mk_event *event;      /* [MK_EVENT_RING] */
    uint32_t *event_read;       /* events the host has taken */
    uint32_t submitted, taken;  /* entries of the submit ring, events taken, as of the last look */
    const mk_slot *slot;
    mk_sampling *sampling; /* [n_slots] GPU: of those that do not choose greedily, as of GENERATE, for SAMPLE; NULL: it reads the slots */
    const uint32_t *token;
    uint32_t max_context, n_slots;
    /* own */
    mk_sched_slot *st;  /* [n_slots] */
    mk_sched_rest *rest; /* [n_slots] */
    uint32_t *active;   /* [n_slots] open slots, oldest first */
    uint32_t n_active;
    uint32_t submit_next, event_next; /* sequence numbers, wrap */
    uint32_t rr;                      /* round-robin start among generating streams: its place in active[] */
    uint32_t stop, step;
    uint32_t trace_tag, trace_steps, trace_at; /* the trace under way: its number, steps in all and so far */
    uint32_t in_log;  /* of the next step's rows: bit r: its token, bit MK_MAX_ROWS + r: its target is still to be looked up */
    uint32_t hang, hang_step; /* fault injection: mk_step.hang of that step */
    uint32_t stalled; /* compose could not go on for want of event-ring space */
    uint32_t sure;    /* GPU: the next step is told already, but for its token */
    uint32_t apart;   /* the model has experts: two streams that generate have a step each */
    mk_step next;
} mk_sched;

MK_SCHED_FN uint32_t mk_sched_event_room(const mk_sched *s)
{
    return MK_EVENT_RING - (s->event_next - s->taken);
}

/* The twin's look, in two parts: the words come after the entries, so that they are as new as whatever has been taken. */
MK_SCHED_FN void mk_sched_look(mk_sched *s)
{
    s->taken = mk_look_load(s->event_read);
    while (s->submitted - s->submit_next < MK_SUBMIT_RING && mk_look_load(&s->submit[s->submitted % MK_SUBMIT_RING].seq) == s->submitted + 1) s->submitted++;
}
MK_SCHED_FN void mk_sched_look_words(mk_sched *s)
{
    for (uint32_t k = 0; k < s->n_active; k++) {
        mk_sched_slot *t = &s->st[s->active[k]];
        t->cancel = mk_look_load(&s->slot[s->active[k]].cancel);
        t->credits = mk_look_load64(&s->slot[s->active[k]].credits);
    }
}

MK_SCHED_CALL void mk_sched_emit(mk_sched *s, uint32_t slot, uint32_t kind, uint32_t position, uint32_t token, float logprob, uint32_t reason,
                         uint32_t arg, uint32_t tag, uint64_t now)
{
    const uint32_t seq = s->event_next + 1;
    mk_event e;
    e.kind = (uint16_t)kind;
    e.slot = (uint16_t)slot;
    e.generation = s->st[slot].generation;
    e.position = position;
    e.token = token;
    e.logprob = logprob;
    e.reason = reason;
    e.arg = arg;
    e.tag = tag;
    e.step = s->step;
    e.device_ns = now;
    e.pad = 0;
    e.seq0 = e.seq1 = e.seq2 = e.seq3 = seq;
    mk_event_store(&s->event[s->event_next % MK_EVENT_RING], &e);
    s->event_next = seq;
}

/* The trace under way is through. */
MK_SCHED_FN void mk_sched_traced(mk_sched *s, uint64_t now)
{
    mk_sched_emit(s, 0, MK_EV_TRACED, 0, 0, 0.0f, 0, s->trace_steps, s->trace_tag, now);
    s->trace_steps = s->trace_at = 0;
}

/* Reports the appends that are through: all their tokens but the stream's last are processed. */
MK_SCHED_CALL void mk_sched_appended(mk_sched *s, uint32_t slot, uint32_t reason, uint64_t now)
{
    mk_sched_slot *t = &s->st[slot];
    uint32_t k = 0;
    mk_append_mark *append = s->rest[slot].append;
    MK_SCHED_LOOP
    while (k < t->n_append && (t->pos + 1 >= append[k].end || reason == MK_DONE_CANCELLED)) {
        uint32_t end = append[k].end < t->len ? append[k].end : t->len;
        mk_sched_emit(s, slot, MK_EV_APPENDED, end, 0, 0.0f, reason, 0, append[k].tag, now);
        k++;
    }
    MK_SCHED_LOOP
    for (uint32_t i = k; i < t->n_append; i++) append[i - k] = append[i];
    t->n_append -= k;
    if (!t->n_append) t->scores = 0;
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
        t->n_first = 0;
        t->end_pos = 0xffffffffu;
        mk_sched_appended(s, slot, MK_DONE_CANCELLED, now);
    }
    if (t->gen) mk_sched_done(s, slot, MK_DONE_CANCELLED, now);
}

/* After a step: publishes what its rows yielded. token/logprob are SAMPLE's results by row. */
MK_SCHED_FN void mk_sched_finish(mk_sched *s, const mk_step *step, const uint32_t *token, const float *logprob, uint64_t now)
{
    MK_SCHED_LOOP
    for (uint32_t r = 0; r < step->nrows; r++) {
        const mk_row *row = &step->row[r];
        mk_sched_slot *t = &s->st[row->slot];
        if (row->flags & MK_ROW_EXTRA) continue;
        t->pos++; /* = row->pos + 1, if the stream is not pinned */
        if (row->flags & MK_ROW_SCORE)
            mk_sched_emit(s, row->slot, MK_EV_LOGPROB, row->pos + 1, row->target, logprob[r], 0, 0, s->rest[row->slot].append[0].tag, now);
        if (t->n_append) mk_sched_appended(s, row->slot, 0, now);
        if (row->flags & MK_ROW_SAMPLE) {
            t->last = token[r];
            t->last_pos = t->len++;
            t->produced++;
            t->published++;
            t->left--;
            mk_sched_emit(s, row->slot, MK_EV_TOKEN, t->last_pos, token[r], logprob[r], 0, t->produced, t->gen_tag, now);
            uint32_t stop = 0;
            MK_SCHED_LOOP
            for (uint32_t i = 0; i < t->n_stop; i++) stop |= s->rest[row->slot].stop[i] == token[r];
            if (stop)
                mk_sched_done(s, row->slot, MK_DONE_STOP, now);
            else if (t->left == 0)
                mk_sched_done(s, row->slot, MK_DONE_LENGTH, now);
            else if (t->len >= t->context)
                mk_sched_done(s, row->slot, MK_DONE_CONTEXT, now);
        }
    }
}

MK_SCHED_FN void mk_sched_open(mk_sched *s, const mk_submit *e)
{
    mk_sched_slot *t = &s->st[e->slot];
    if (!t->open) s->active[s->n_active++] = e->slot;
    t->open = 1;
    t->generation = e->generation;
    t->pos = t->len = t->last = t->n_append = t->gen = t->produced = t->left = 0;
    t->last_pos = t->end_pos = 0xffffffffu;
    t->published = 0;
    t->n_first = t->cancel = t->scores = 0;
    t->credits = e->open.credits;
    t->context = e->open.context;
    t->state_slot = e->open.state_slot;
    t->pin = e->open.pin;
    t->pin_rows = e->open.pin_rows;
    t->pin_vocab = e->open.pin_vocab;
    t->pin_seed = e->open.seed;
    t->pin_count = 0;
}

/* 0: it has to wait. */
MK_SCHED_FN uint32_t mk_sched_append(mk_sched *s, const mk_submit *e, uint64_t now)
{
    mk_sched_slot *t = &s->st[e->slot];
    mk_sched_rest *rest = &s->rest[e->slot];
    if (t->n_append == MK_MAX_APPENDS) return 0;
    mk_append_mark *m = &rest->append[t->n_append++];
    t->cancel = 0;
    if (t->end_pos == t->pos) { /* pending */
        t->last = t->end;
        t->last_pos = t->end_pos;
    }
    if (t->n_append == 1) { /* of others, rows are to come first */
        t->first_at = t->len;
        t->n_first = e->append.n;
        for (uint32_t k = 0; k < MK_SUBMIT_TOKENS; k++) rest->first[k] = e->append.token[k];
    }
    m->begin = t->len;
    t->len += e->arg0;
    m->end = t->len;
    m->tag = e->tag;
    m->flags = e->arg1;
    t->end = e->append.last;
    t->end_pos = e->append.n ? t->len - 1 : 0xffffffffu;
    t->scores |= e->arg1 & MK_APPEND_LOGPROBS;
    if (t->pos + 1 >= t->len) mk_sched_appended(s, e->slot, 0, now);
    return 1;
}

/* Sampling parameters go where SAMPLE looks, before a step of their generation is published. */
MK_SCHED_FN void mk_sched_sampling(mk_sched *s, const mk_submit *e)
{
    if (!s->sampling || !(e->generate.sampling.temperature > 0.0f)) return;
    s->sampling[e->slot] = e->generate.sampling;
    mk_sched_release();
}

/* told: mk_sched_sampling has been called. */
MK_SCHED_FN void mk_sched_generate(mk_sched *s, const mk_submit *e, uint32_t told, uint64_t now)
{
    const uint32_t i = e->slot, left = e->arg0, tag = e->tag, n_stop = e->generate.n_stop, greedy = !(e->generate.sampling.temperature > 0.0f);
    const uint64_t credits = e->generate.credits;
    mk_sched_slot *t = &s->st[i];
    const uint32_t len = t->len, reason = left == 0 ? MK_DONE_LENGTH : len == 0 ? MK_DONE_ERROR : len >= t->context ? MK_DONE_CONTEXT : 0;
    t->gen = 1;
    t->gen_tag = tag;
    t->left = left;
    t->produced = 0;
    t->cancel = 0;
    t->credits = credits;
    t->greedy = greedy;
    t->n_stop = n_stop;
    MK_SCHED_LOOP
    for (uint32_t k = 0; k < n_stop; k++) s->rest[i].stop[k] = e->generate.stop[k];
    if (!told) mk_sched_sampling(s, e);
    if (reason) mk_sched_done(s, i, reason, now);
}

MK_SCHED_FN void mk_sched_close(mk_sched *s, const mk_submit *e, uint64_t now)
{
    uint32_t i = e->slot, k = 0;
    mk_sched_cancel(s, i, now);
    mk_sched_emit(s, i, MK_EV_CLOSED, s->st[i].len, 0, 0.0f, 0, 0, e->tag, now);
    s->st[i].open = 0;
    MK_SCHED_LOOP
    while (s->active[k] != i) k++;
    if (k < s->rr) s->rr--; /* whose turn it is */
    MK_SCHED_LOOP
    for (s->n_active--; k < s->n_active; k++) s->active[k] = s->active[k + 1];
}

/* All entries but GENERATE, whose way is to be short. `there`: the stream is open, in the entry's generation. 0: it has to wait. */
MK_SCHED_CALL uint32_t mk_sched_take_other(mk_sched *s, const mk_submit *e, uint32_t there, uint64_t now)
{
    switch (e->op) {
    case MK_SUB_STOP: s->stop = 1; break;
    case MK_SUB_HANG:
        s->hang = e->arg0;
        s->hang_step = s->step + e->arg1;
        break;
    case MK_SUB_TRACE:
        s->trace_tag = e->arg1;
        s->trace_steps = e->arg0;
        s->trace_at = 0;
        break;
    case MK_SUB_OPEN:
        if (e->slot < s->n_slots) mk_sched_open(s, e);
        break;
    case MK_SUB_APPEND:
        return there ? mk_sched_append(s, e, now) : 1;
    case MK_SUB_CLOSE:
        if (there) mk_sched_close(s, e, now);
        break;
    default: break;
    }
    return 1;
}

/* Takes the next entry of the submit ring; returns 0 when it has to wait. One for a stream that is gone is taken and forgotten. told: mk_sched_generate. */
MK_SCHED_CALL uint32_t mk_sched_take(mk_sched *s, uint32_t told, uint64_t now)
{
    const uint32_t next = s->submit_next;
    const mk_submit *e = &s->submit[next % MK_SUBMIT_RING];
#ifdef __CUDA_ARCH__
    if (s->near && s->near->seq == next + 1) e = s->near;
#endif
    const uint32_t i = e->slot, there = i < s->n_slots && s->st[i].open && s->st[i].generation == e->generation;
    if (e->op == MK_SUB_GENERATE) {
        if (there) mk_sched_generate(s, e, told, now);
    } else if (!mk_sched_take_other(s, e, there, now)) {
        return 0;
    }
    mk_sched_taken(&s->submit_next, next + 1);
    return 1;
}

/* Turns the row that was just added for a pinned stream's newest token into rows at its position, with random ids. */
MK_SCHED_CALL void mk_sched_pinned(mk_sched *s, mk_step *d)
{
    mk_row first = d->row[d->nrows - 1];
    mk_sched_slot *t = &s->st[first.slot];
    d->nrows--;
    s->in_log &= ~(1u << d->nrows);
    MK_SCHED_LOOP
    for (uint32_t k = 0; k < t->pin_rows; k++) {
        mk_row *row = &d->row[d->nrows++];
        const uint64_t x = mk_pinned_random(t->pin_seed, ++t->pin_count);
        *row = first;
        row->pos = t->pin - 1 + k;
        row->token = mk_pinned_id(x, t->pin_vocab);
        if (k + 1 < t->pin_rows) row->flags |= MK_ROW_EXTRA;
    }
}

/* Adds the row for position `pos` of slot i. */
MK_SCHED_FN void mk_sched_row(mk_sched *s, mk_step *d, uint32_t i, uint32_t pos)
{
    const mk_sched_slot t = s->st[i];
    const uint32_t at = d->nrows;
    uint32_t in_log = 0;
    mk_row row;
    row.slot = i;
    row.pos = t.pin ? t.pin - 1 + (pos - t.pos) : pos;
    row.flags = pos == 0 ? MK_ROW_FIRST : 0;
    row.state_read = row.state_write = t.state_slot;
    row.target = row.pad = 0;
    if (pos == t.last_pos) {
        row.token = t.last;
    } else if (pos == t.end_pos) {
        row.token = t.end;
    } else if (pos - t.first_at < t.n_first) {
        row.token = s->rest[i].first[pos - t.first_at];
    } else {
        row.token = pos;
        in_log = 1u << at;
    }
    if (pos + 1 == t.len) {
        row.flags |= MK_ROW_LOGITS | MK_ROW_SAMPLE | (t.greedy ? MK_ROW_GREEDY : 0);
    } else {
        const mk_append_mark *append = s->rest[i].append;
        MK_SCHED_LOOP
        for (uint32_t k = 0; t.scores && k < t.n_append; k++)
            if (pos + 1 >= append[k].begin && pos + 1 < append[k].end && (append[k].flags & MK_APPEND_LOGPROBS)) {
                row.flags |= MK_ROW_LOGITS | MK_ROW_SCORE;
                row.target = pos + 1;
                in_log |= 1u << (MK_MAX_ROWS + at);
            }
    }
    d->row[at] = row;
    if (row.flags & MK_ROW_LOGITS) d->any_logits = 1;
    d->nrows = at + 1;
    if (in_log) s->in_log |= in_log;
}

/* Looks up the next step's tokens that are in the log only: rows have their positions in the stream instead. By `lanes` at once, of which this is one. */
MK_SCHED_FN void mk_sched_look_up(mk_sched *s, uint32_t lane, uint32_t lanes)
{
    if (!s->in_log) return;
    mk_sched_acquire();
    MK_SCHED_LOOP
    for (uint32_t k = lane; k < 2 * MK_MAX_ROWS; k += lanes) {
        mk_row *row = &s->next.row[k % MK_MAX_ROWS];
        uint32_t *word = k < MK_MAX_ROWS ? &row->token : &row->target;
        if (s->in_log >> k & 1) *word = mk_log_load(&s->token[(uint64_t)row->slot * s->max_context + *word]);
    }
}

/* Events that a row or an entry may yield. */
#define MK_SCHED_EVENTS (2 + MK_MAX_APPENDS)

/* The short way: from an idle machine to a step in few instructions. A step costs the device nothing until it is published, and then everybody waits for it. The
 * last compose has left nothing to do for want of anything but entries, so no stream has a row to come: the next entry, by itself, decides what the step is. */
MK_SCHED_FN uint32_t mk_sched_idle(const mk_sched *s)
{
    return !s->next.nrows && !s->stop && !s->stalled && !s->hang && s->submitted == s->submit_next && (!s->trace_steps || s->trace_at < s->trace_steps) &&
           mk_sched_event_room(s) >= MK_MAX_ROWS * MK_SCHED_EVENTS;
}

/* How many rows the step has that comes of an idle machine and entry e, and row k of it: the same as mk_sched_compose() would give. 0: that one has to be asked. The
 * easy entries are a generation and an append of a stream that has neither, when all tokens are at hand. Nothing is changed: mk_sched_short_step() completes the step
 * with these rows, and the entry is still to be taken (told). */
MK_SCHED_FN uint32_t mk_sched_short(const mk_sched_slot *st, uint32_t n_slots, const mk_submit *e, uint32_t k, mk_row *row)
{
    const uint32_t i = e->slot, op = e->op, n = e->arg0, there = i < n_slots;
    const mk_sched_slot *t = &st[there ? i : 0];
    const uint32_t pos = t->pos, len = t->len, held = len != 0; /* held: its last token is pending, row 0 */
    const uint32_t known = pos == t->last_pos ? 1 : pos == t->end_pos, along = n < MK_SUBMIT_TOKENS ? n : MK_SUBMIT_TOKENS;
    const uint32_t makes = there & (t->open != 0) & (t->generation == e->generation) & !t->pin & !t->gen & !t->n_append & (len == pos + held) & (known | !held) & (n != 0);
    uint32_t flags = pos + k == 0 ? MK_ROW_FIRST : 0, rows = 0;
    if (op == MK_SUB_GENERATE) {
        rows = makes & held & (len < t->context) & (t->published < e->generate.credits);
        flags |= MK_ROW_LOGITS | MK_ROW_SAMPLE | (e->generate.sampling.temperature > 0.0f ? 0 : MK_ROW_GREEDY);
    } else if (op == MK_SUB_APPEND) {
        rows = makes && e->append.n == along && !(e->arg1 & MK_APPEND_LOGPROBS) ? n - 1 + held : 0;
        rows = rows < MK_MAX_ROWS ? rows : MK_MAX_ROWS;
    }
    row->slot = i;
    row->token = k || !held ? e->append.token[(k - held) % MK_SUBMIT_TOKENS] : pos == t->last_pos ? t->last : t->end;
    row->pos = pos + k;
    row->flags = flags;
    row->state_read = row->state_write = t->state_slot;
    row->target = row->pad = 0;
    return rows;
}
MK_SCHED_FN void mk_sched_short_step(mk_sched *s, const mk_submit *e, uint32_t rows)
{
    const uint32_t generates = e->op == MK_SUB_GENERATE;
    mk_step *d = &s->next;
    d->seq = s->step;
    d->nrows = rows;
    d->any_logits = generates;
    d->trace = s->trace_at < s->trace_steps ? s->trace_tag << 16 | ++s->trace_at : 0;
    d->hang = 0;
    if (generates) mk_sched_sampling(s, e);
}

/* While one stream generates and nothing else is to do, what comes behind a step is known before its token is, unless that ends the generation: a row like this one. The step under way is s->next.
 * Whether stream k of the list leaves it so, as far as is known: the row's own has another one to come, any other has none; nothing has been submitted since, no hang is to be injected, and there is
 * room for the events of both steps. */
MK_SCHED_FN uint32_t mk_sched_sure(const mk_sched *s, uint32_t submitted, uint32_t k)
{
    const mk_row *row = &s->next.row[0];
    if (s->next.nrows != 1 || !(row->flags & MK_ROW_SAMPLE) || s->hang || s->stop || submitted != s->submit_next) return 0;
    if (mk_sched_event_room(s) < 2 * MK_MAX_ROWS * MK_SCHED_EVENTS) return 0;
    if (k >= s->n_active) return 1;
    const mk_sched_slot *t = &s->st[s->active[k]];
    if (t->n_append) return 0;
    if (s->active[k] != row->slot) return !t->gen && t->pos + 1 >= t->len;
    return t->gen && !mk_look_load(&t->cancel) && t->pos + 1 == t->len && t->left > 1 && t->len + 1 < t->context && t->published + 1 < mk_look_load64(&t->credits);
}
/* Then it is. token: what this one's logits have chosen; of a pinned stream no matter. */
MK_SCHED_FN void mk_sched_next_row(const mk_sched_slot *t, const mk_row *row, uint32_t token, mk_row *next)
{
    *next = *row;
    next->token = token;
    if (t->pin)
        next->token = mk_pinned_id(mk_pinned_random(t->pin_seed, t->pin_count + 1), t->pin_vocab);
    else
        next->pos++;
    next->flags &= MK_ROW_LOGITS | MK_ROW_SAMPLE | MK_ROW_GREEDY;
}
/* And its step, number seq. d may be s->next. */
MK_SCHED_FN void mk_sched_next_step(const mk_sched *s, uint32_t seq, uint32_t token, mk_step *d)
{
    const mk_row *row = &s->next.row[0];
    mk_sched_next_row(&s->st[row->slot], row, token, &d->row[0]);
    d->seq = seq;
    d->nrows = d->any_logits = 1;
    d->trace = s->trace_at < s->trace_steps ? s->trace_tag << 16 | (s->trace_at + 1) : 0;
    d->hang = 0;
}
/* What mk_sched_finish and mk_sched_compose would do, if the token does not end the generation. What the host has said since waits for the step behind it. */
MK_SCHED_FN void mk_sched_follow(mk_sched *s, uint32_t token, float logprob, uint64_t now)
{
    const uint32_t slot = s->next.row[0].slot;
    mk_sched_slot *t = &s->st[slot];
    t->pos++;
    t->last = token;
    t->last_pos = t->len++;
    t->produced++;
    t->published++;
    t->left--;
    mk_sched_emit(s, slot, MK_EV_TOKEN, t->last_pos, token, logprob, 0, t->produced, t->gen_tag, now);
    s->step++;
    s->in_log = 0;
    mk_sched_stall(&s->stalled, 0);
    if (s->trace_steps && s->trace_at == s->trace_steps) mk_sched_traced(s, now);
    mk_sched_next_step(s, s->step, token, &s->next);
    t->pin_count += t->pin != 0;
    s->trace_at += s->next.trace != 0;
}

/* The stream's newest token is to be processed for its generation; in so many rows. */
MK_SCHED_FN uint32_t mk_sched_generates(const mk_sched_slot *t)
{
    return t->gen && t->pos + 1 == t->len && t->published < mk_look_load64(&t->credits);
}
MK_SCHED_FN uint32_t mk_sched_rows(const mk_sched_slot *t)
{
    return t->pin ? t->pin_rows : 1;
}

/* Composes the next step into s->next; nrows = 0 when there is nothing to do (s->stop: leave). Room for events is reserved before anything is published. */
MK_SCHED_FN void mk_sched_compose(mk_sched *s, uint64_t now)
{
    const uint32_t per = MK_SCHED_EVENTS;
    mk_step *d = &s->next;
    d->nrows = 0;
    d->any_logits = 0;
    d->trace = 0;
    s->in_log = 0;
    mk_sched_stall(&s->stalled, 0);
#ifndef __CUDA_ARCH__
    mk_sched_look(s);
#endif
    if (s->trace_steps && s->trace_at == s->trace_steps && mk_sched_event_room(s)) mk_sched_traced(s, now);
    MK_SCHED_LOOP
    while (s->submitted != s->submit_next) {
        if (mk_sched_event_room(s) < per) {
            mk_sched_stall(&s->stalled, 1);
            return;
        }
        if (!mk_sched_take(s, 0, now)) break;
    }
#ifndef __CUDA_ARCH__
    mk_sched_look_words(s);
#endif
    const uint32_t n_active = s->n_active;
    MK_SCHED_LOOP
    for (uint32_t k = 0; k < n_active; k++) {
        uint32_t i = s->active[k];
        if (!mk_look_load(&s->st[i].cancel) || !(s->st[i].gen || s->st[i].n_append)) continue;
        if (mk_sched_event_room(s) < per) {
            mk_sched_stall(&s->stalled, 1);
            return;
        }
        mk_sched_cancel(s, i, now);
    }
    const uint32_t room = mk_sched_event_room(s), rows = room >= MK_MAX_ROWS * per ? MK_MAX_ROWS : room / per;
    if (rows < MK_MAX_ROWS) mk_sched_stall(&s->stalled, 1);
    uint32_t streams = 0, wanted = 0, prompts = 0; /* that have a row to come, and these; tokens of prompts */
    MK_SCHED_LOOP
    for (uint32_t k = 0; k < n_active; k++) {
        const mk_sched_slot *t = &s->st[s->active[k]];
        prompts |= t->pos + 1 < t->len;
        if (!mk_sched_generates(t)) continue;
        streams++;
        wanted += mk_sched_rows(t);
    }
    const uint32_t two = s->apart && streams == 2 && wanted == 2, most = rows < 2 ? rows : prompts ? rows - 1 : two ? 1 : rows;
    /* generating streams, from the one on that was left out before */
    uint32_t a = s->rr < n_active ? s->rr : 0, left_out = n_active;
    MK_SCHED_LOOP
    for (uint32_t k = 0; k < n_active; k++) {
        const uint32_t at = a, i = s->active[at];
        const mk_sched_slot *t = &s->st[i];
        const uint32_t pos = t->pos, pin = t->pin;
        a = a + 1 < n_active ? a + 1 : 0;
        if (!mk_sched_generates(t)) continue;
        /* a pinned stream that needs all rows has a prompt's as well, every second step */
        if (d->nrows + mk_sched_rows(t) > (d->nrows || !(s->step & 1) ? most : rows)) {
            if (left_out == n_active && mk_sched_rows(t) <= rows) left_out = at; /* whom the event ring has no room for keeps nobody's turn */
            continue;
        }
        mk_sched_row(s, d, i, pos);
        if (pin) mk_sched_pinned(s, d);
    }
    if (left_out < n_active) s->rr = left_out;
    /* prompt tokens, oldest stream first; the row of the last one samples when the generation is already waiting */
    MK_SCHED_LOOP
    for (uint32_t k = 0; k < n_active && d->nrows < rows; k++) {
        const uint32_t i = s->active[k], pos = s->st[i].pos, len = s->st[i].len;
        const mk_sched_slot *t = &s->st[i];
        if (pos + 1 >= len) continue;
        const uint32_t end = t->gen && t->published < mk_look_load64(&t->credits) ? len : len - 1;
        MK_SCHED_LOOP
        for (uint32_t p = pos; p < end && d->nrows < rows; p++) mk_sched_row(s, d, i, p);
    }
    if (d->nrows && s->trace_at < s->trace_steps) d->trace = s->trace_tag << 16 | ++s->trace_at;
    d->hang = s->hang && s->step == s->hang_step ? s->hang : 0;
    d->seq = s->step;
#ifndef __CUDA_ARCH__
    mk_sched_look_up(s, 0, 1);
#endif
}

#endif
