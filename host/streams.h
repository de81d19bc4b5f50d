/* The stream table: who owns which slot, which pages and state it holds, what it is doing. One thread (the server's) calls it.
 * Admission is all or nothing: pages for the stream's whole context budget and a state slot are reserved at OPEN, so the device
 * never allocates. */
#ifndef MK_STREAMS_H
#define MK_STREAMS_H

#include "host/engine.h"

typedef struct mk_streams mk_streams;

mk_streams *mk_streams_new(mk_engine *e);
void mk_streams_destroy(mk_streams **s);

typedef struct mk_open {
    uint32_t context;     /* tokens; 0: the engine's limit */
    mk_sampling sampling; /* defaults of its generations */
    uint32_t n_stop, stop[MK_MAX_STOP];
    uint64_t credits;     /* initial window of tokens; ~0: no flow control */
    uint32_t pin, pin_rows; /* benchmarks (ipc/PROTOCOL.md, OPEN): position of every row, rows of a generating step; pin_rows 0: an ordinary stream */
} mk_open;

/* All return MK_OK or fill err: MK_E_CAPACITY (no slot, no pages: says how many there are), MK_E_WIRE (unknown stream, wrong owner,
 * busy, token id out of range, over the context budget). `owner` is the caller's number for a client; a stream id is never reused
 * within 2^32 opens. `tag` comes back in the reports. */
int mk_streams_open(mk_streams *s, uint64_t owner, const mk_open *o, uint64_t *stream, mk_err *err);
int mk_streams_append(mk_streams *s, uint64_t owner, uint64_t stream, const uint32_t *tokens, uint32_t n, int logprobs, uint64_t tag,
                      mk_err *err);
typedef struct mk_generate {
    uint32_t max_new;
    int own_stop; /* replace the stream's stop ids */
    uint32_t n_stop, stop[MK_MAX_STOP];
} mk_generate;
int mk_streams_generate(mk_streams *s, uint64_t owner, uint64_t stream, const mk_generate *g, uint64_t tag, mk_err *err);
int mk_streams_credit(mk_streams *s, uint64_t owner, uint64_t stream, uint64_t more, mk_err *err);
int mk_streams_cancel(mk_streams *s, uint64_t owner, uint64_t stream, mk_err *err);
int mk_streams_close(mk_streams *s, uint64_t owner, uint64_t stream, uint64_t tag, mk_err *err);
/* A client is gone: cancels and closes all its streams (no reports). Returns how many. */
uint32_t mk_streams_drop_owner(mk_streams *s, uint64_t owner);
/* Ends everything that runs (drain limit reached, second SIGTERM): each running request still gets its one DONE. */
void mk_streams_cancel_all(mk_streams *s);

/* What happened: one report per event of the engine, with names resolved. */
typedef struct mk_report {
    uint64_t owner, stream, tag;
    mk_event ev;
    uint32_t prompt_tokens;     /* DONE: tokens in the stream before the generation */
    uint64_t t_submit_ns;       /* DONE: host clock (CLOCK_MONOTONIC) of the request */
    uint64_t t_first_ns;        /* of its first token, as the host saw it; 0: none */
    uint64_t t_done_ns;
} mk_report;
/* Drains the engine's ring; returns the number of reports written (<= n). */
uint32_t mk_streams_poll(mk_streams *s, mk_report *r, uint32_t n);

typedef struct mk_streams_stats {
    uint32_t slots, slots_used, pages, pages_used, requests_running;
    uint64_t opened, appended_tokens, generated_tokens, requests_done, cancelled, refused;
} mk_streams_stats;
void mk_streams_get_stats(const mk_streams *s, mk_streams_stats *st);

#endif
