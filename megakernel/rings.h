/* What host and device say to each other, and what the device says to itself: submit ring, token ring, stream slots, step
 * descriptor. Shared by host C and device code; every struct is fixed size. On a GPU the rings and the slot arena are pinned host
 * memory; the twin uses ordinary memory.
 *
 * What crosses the bus crosses it as packets of 16 bytes that each carry the sequence number of their entry or event: whoever has seen the number in all of them has
 * all of it, without a fence and without asking again. An entry brings along what SCHEDULE needs to know of the slot, so that it need not fetch that. */
#ifndef MK_RINGS_H
#define MK_RINGS_H

#include "instructions/isa.h"

#include <stdalign.h>

#define MK_SUBMIT_RING 1024u /* entries, power of two */
#define MK_EVENT_RING  4096u /* entries, power of two */
#define MK_SWEEP_STEPS (1u << 20) /* steps between two sweeps of the exchange: megakernel/exchange.h */
#define MK_MAX_STOP    16    /* stop ids of a generation */
#define MK_MAX_APPENDS 8     /* appends of one slot that may be outstanding */
#define MK_SUBMIT_TOKENS 8u  /* of an append, its first ones, that its entry brings along: a step's rows */

enum mk_submit_op {
    MK_SUB_OPEN = 1,     /* slot starts empty: position 0, zero state */
    MK_SUB_APPEND = 2,   /* arg0 = tokens added to the slot's log, arg1 = MK_APPEND_* */
    MK_SUB_GENERATE = 3, /* arg0 = most tokens to generate; with the slot's sampling parameters and stop ids */
    MK_SUB_CLOSE = 4,    /* forget the slot; answered by one CLOSED event, after which pages and state may be reused */
    MK_SUB_STOP = 5,     /* leave after the current step */
    MK_SUB_HANG = 7,     /* fault injection, below; names no slot */
    MK_SUB_TRACE = 6,    /* trace the next arg0 steps (megakernel/trace.h; 0: none) under the number arg1, 1..65535; names no slot */
};
enum { MK_APPEND_LOGPROBS = 1 };

/* MK_SUB_HANG: in the step that is arg1 steps from the next one, the worker's controller stops for ever before that instruction of its queue
 * (arg0 = MK_HANG_AT). MK_HANG_IDLE: SCHEDULE stops looking for work, at once. Relaunching forgets it. MK_HANG_ERROR: SCHEDULE stores where no memory is, which
 * breaks the process's CUDA context; the twin knows no such thing. */
#define MK_HANG_AT(worker, insn) (((uint32_t)(worker) + 1) << 16 | (uint32_t)(insn))
#define MK_HANG_IDLE 0xffffffffu
#define MK_HANG_ERROR 0xfffffffeu

/* Sampling parameters. temperature 0 = greedy. top_k 0, top_p 1, min_p 0: off. Applied in the order temperature, top-k, top-p,
 * min-p, each renormalising; then inverse CDF in ascending id with Philox(seed, position, draw): sample.c. */
typedef struct mk_sampling {
    float temperature, top_p, min_p;
    uint32_t top_k;
    uint64_t seed;
    uint64_t pad;
} mk_sampling;

/* An entry of the submit ring; entry i of lap L has seq = i + 1 counted without wrap to the ring size. Whoever submits says what is up to `append`; what comes of the
 * slot is filled in where the entry is put into a ring (megakernel/submit.h). */
typedef struct mk_submit {
    uint32_t seq;
    uint16_t op, slot;
    uint32_t generation; /* of the slot: an entry for an older generation is dropped */
    uint32_t arg0, arg1;
    uint32_t tag;        /* returned in the events that answer it */
    union {
        struct {
            uint32_t n;                       /* how many of them are here: 0: they are in the token log only */
            uint32_t token[MK_SUBMIT_TOKENS]; /* the first ones */
            uint32_t last;                    /* and the last one */
        } append;
        struct {
            uint64_t credits, seed; /* seed: of mk_slot.sampling */
            uint32_t context, state_slot, pin, pin_rows, pin_vocab;
        } open;
        struct {
            mk_sampling sampling;
            uint64_t credits;
            uint32_t n_stop, stop[MK_MAX_STOP];
        } generate;
    };
} mk_submit;
static_assert(sizeof(mk_submit) == 136 && offsetof(mk_submit, append) == 24, "an entry is its number and 33 words");

/* The same as it crosses the bus: word 1 + 3p + k of an entry is word k of packet p, whose last word is seq. */
#define MK_SUBMIT_PACKETS ((uint32_t)((sizeof(mk_submit) / 4 - 1 + 2) / 3))
typedef struct mk_submit_packets {
    alignas(64) uint32_t packet[11][4];
} mk_submit_packets;
static_assert(MK_SUBMIT_PACKETS == 11 && sizeof(mk_submit_packets) == 192, "a warp's lanes look at a packet each");

enum mk_event_kind {
    MK_EV_TOKEN = 1,    /* token, logprob, position = where the token stands in the stream */
    MK_EV_LOGPROB = 2,  /* APPEND with logprobs: logprob of the token at `position` */
    MK_EV_APPENDED = 3, /* the append is through: position = tokens now in the stream; reason */
    MK_EV_DONE = 4,     /* the generation is over: reason, arg = tokens generated, position = tokens now in the stream */
    MK_EV_CLOSED = 5,
    MK_EV_TRACED = 7,   /* the arg last steps before step number `step` were traced; tag = the trace's number. Names no slot */
    /* From the machine, not from the device; names no slot. The kernel was launched anew and its SCHEDULE knows no stream: whatever was submitted
     * before is gone, and nothing of it is answered any more. Arena (slots, page tables, token logs) and weights are as they were; cache
     * pages and recurrent state must be taken for lost. */
    MK_EV_RESTARTED = 6,
};
enum mk_reason {
    MK_DONE_LENGTH = 1,   /* budget of the request used */
    MK_DONE_STOP = 2,     /* a stop id was generated (it is delivered) */
    MK_DONE_CONTEXT = 3,  /* the stream's context budget is full */
    MK_DONE_CANCELLED = 4,
    MK_DONE_ERROR = 5,    /* the step was aborted (watchdog) */
};

/* 64 bytes, one per token: four packets. Written by the device. */
typedef struct mk_event {
    uint16_t kind; /* enum mk_event_kind */
    uint16_t slot;
    uint32_t generation;
    uint32_t position;
    uint32_t seq0;
    uint32_t token;
    float logprob;
    uint32_t reason;
    uint32_t seq1;
    uint32_t arg;
    uint32_t tag;
    uint32_t step;
    uint32_t seq2;
    uint64_t device_ns; /* device clock when the token was chosen */
    uint32_t pad;
    uint32_t seq3;
} mk_event;
static_assert(sizeof(mk_event) == 64 && offsetof(mk_event, seq1) == 28 && offsetof(mk_event, device_ns) == 48, "an event is four packets");

/* A stream slot in the arena. Written by the host; the device reads the first packet, of which `cancel` and `credits` may change at any time, and of the rest what
 * the slot's entries bring along. Page table and token log are separate arrays of the arena:
 *   page[slot * max_pages + i]: pool page of tokens [i*64, i*64+64);  token[slot * max_context + pos]. */
typedef struct mk_slot {
    alignas(16) uint32_t generation;
    uint32_t cancel;      /* != 0: end what is running. The host clears it before it submits the slot's next entry */
    uint64_t credits;     /* tokens this slot's generations may publish in all, ever growing; ~0: no flow control */
    mk_sampling sampling;
    uint32_t n_stop;
    uint32_t stop[MK_MAX_STOP];
    uint32_t context;     /* tokens this stream may hold (pages are reserved for them) */
    uint32_t state_slot;  /* in the state pool */
    uint32_t pin;         /* benchmarks: the stream's rows stand at position pin - 1 and the ones behind it, whatever their tokens' number; 0: off */
    uint32_t pin_rows;    /* rows of each of its generating steps, 1..8; their ids are random (sampling.seed), the last one's choice is published */
    uint32_t pin_vocab;   /* those ids lie below it */
} mk_slot;
static_assert(sizeof(mk_slot) == 144 && offsetof(mk_slot, credits) == 8, "slot layout: one look brings generation, cancel, credits");

/* What the id of a pinned stream's row number `count`, from 1 on, is made of: splitmix64. */
MK_BOTH uint64_t mk_pinned_random(uint64_t seed, uint32_t count)
{
    uint64_t x = seed + count * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}
MK_BOTH uint32_t mk_pinned_id(uint64_t random, uint32_t vocab)
{
    return (uint32_t)(((random >> 32) * vocab) >> 32);
}

enum {
    MK_ROW_LOGITS = 1,  /* the row needs logits */
    MK_ROW_SAMPLE = 2,  /* choose the next token from them */
    MK_ROW_SCORE = 4,   /* report the logprob of `target` */
    MK_ROW_FIRST = 8,   /* first token of the stream: state reads as zero */
    MK_ROW_EXTRA = 16,  /* of a pinned stream: what it yields is dropped */
    MK_ROW_GREEDY = 32, /* with SAMPLE: the slot's temperature is 0, so nobody needs to look it up. Without it, it may still be */
    MK_ROW_INSTEAD = 64, /* of the first row on its way, on a GPU: the step's other packets are not those that came early (instructions/schedule.cuh) */
};

/* One row of a step. Rows of one stream stand side by side, ascending: DELTA_STEP takes what its convolutions begin with before any row has left its own. */
typedef struct mk_row {
    uint32_t slot;
    uint32_t token;       /* input id */
    uint32_t pos;         /* its position */
    uint32_t flags;       /* MK_ROW_* */
    uint32_t state_read;  /* state pool slot read (ignored with MK_ROW_FIRST) */
    uint32_t state_write; /* and written */
    uint32_t target;      /* MK_ROW_SCORE */
    uint32_t pad;
} mk_row;

/* What every worker's controller reads before a step. */
typedef struct mk_step {
    uint32_t seq;    /* step number since launch, from 0 */
    uint32_t nrows;  /* 1..8; 0: leave */
    uint32_t any_logits;
    uint32_t trace;  /* 0, or number of the trace << 16 | which step of it this is, from 1 */
    uint32_t hang;   /* fault injection: 0, or MK_HANG_AT the place that is not passed */
    mk_row row[MK_MAX_ROWS];
} mk_step;

/* How many of n rows, from the first on, at most `most`, are neighbouring tokens of one stream whose splits begin at the same places. */
MK_BOTH uint32_t mk_rows_together(const mk_row *row, uint32_t n, uint32_t most, uint32_t grain, uint32_t splits)
{
    const uint32_t per = mk_split_pages(row->pos, grain, splits);
    uint32_t k = 1;
    while (k < n && k < most && row[k].slot == row->slot && row[k].pos == row[k - 1].pos + 1) k++;
    while (k > 1 && mk_split_pages(row[k - 1].pos, grain, splits) != per) k--; /* rows cross one page's edge at most */
    return k;
}
#define MK_GQA_HEADS    8u  /* of an item of GQA_PARTIAL at a time */
#define MK_GQA_TOGETHER 32u /* of an item of several rows */
/* Such rows share their items in GQA_PARTIAL, if their heads of a KV head fit one, and in MLA_PARTIAL, if their items have as many heads. The items are the last one's: of its last split the
 * first rows may see nothing. */
MK_BOTH uint32_t mk_gqa_together(const mk_gqa *g, const mk_row *row, uint32_t n)
{
    return mk_rows_together(row, n, mk_page_quot(MK_GQA_TOGETHER, mk_page_quot(g->heads, g->kv_heads)), g->grain, g->most);
}
/* Of the rows from number r on. If there are parts for several times an item, they are shared by fewer; and by fewer yet, if the busiest part has less to do then, an item's beginning being half as much as
 * a row: of eight rows of 99 items on 132 parts two. */
MK_BOTH uint32_t mk_mla_together(const mk_mla *m, const mk_step *step, uint32_t r)
{
    const mk_row *row = step->row + r;
    const uint32_t group = mk_head_group(row->pos, m->heads), items = mk_splits(row->pos, m->grain, m->most) * ((m->heads + group - 1) / group), n = step->nrows;
    uint32_t times = items < m->parts ? mk_page_quot(m->parts, items) : 1, most = 1, least = 0xffffffffu;
    for (uint32_t i = 0; i < 3; i++, times *= 2) {
        const uint32_t rows = mk_page_quot(n + times - 1, times), each = mk_page_quot(mk_page_quot(n + rows - 1, rows) * items + m->parts - 1, m->parts), busy = each * (2 * rows + 1);
        if (busy >= least) continue;
        least = busy;
        most = rows;
    }
    uint32_t k = mk_rows_together(row, n - r, most, m->grain, m->most);
    while (k > 1 && mk_head_group(row[k - 1].pos, m->heads) != group) k--;
    return k;
}

#endif
