/* The C client library of mkd (libmkd-client.a: this file, wire.c and host/err.c; link with -lzmq -pthread).
 *
 *     mk_err err;
 *     mk_client *c = mk_client_new("/run/mkd", "example", 5000, &err);
 *     mk_client_stream *s = mk_client_open(c, NULL, 5000, &err);
 *     mk_client_append(s, ids, n, NULL, 60000, &err);
 *     mk_client_generate(s, &(mk_client_generation){.max_new = 100}, &err);
 *     mk_client_event ev;
 *     while (!mk_client_next(s, &ev, 60000, &err) && ev.kind == MK_CLIENT_TOKEN) use(ev.token.id);
 *     mk_client_close(&s, 5000, &err);
 *     mk_client_destroy(&c);
 *
 * A client has a thread of its own that owns the socket: it answers the daemon's PINGs and notices when the daemon is gone, whatever
 * the program does meanwhile. Any thread may call any function here; one stream is for one thread at a time, mk_client_cancel excepted.
 * Nothing survives fork().
 *
 * Every call returns MK_OK or fills err: MK_E_WIRE (the daemon refused: its text), MK_E_CAPACITY (it has no room), MK_E_TIMEOUT,
 * MK_E_CLOSED (the daemon is gone, has dropped this client, or has restarted: destroy the client and make a new one), MK_E_SYSTEM. After a
 * timeout the request is still running; a later call of mk_client_next goes on waiting. Timeouts are in milliseconds; -1 waits forever. */
#ifndef MK_CLIENT_H
#define MK_CLIENT_H

#include "ipc/wire.h"

typedef struct mk_client mk_client;
typedef struct mk_client_stream mk_client_stream;

/* What the daemon says of itself. */
typedef struct mk_client_info {
    char model[256], arch[256], build[256], device[256];
    mk_wire_welcome welcome; /* vocabulary, limits, layers by kind, defaults, stop ids */
} mk_client_info;

/* Connects to dir/req.sock and says HELLO. `name` stands in the daemon's log (at most 64 bytes; NULL: "mkd-client"). NULL on failure:
 * MK_E_CLOSED when no daemon listens there, MK_E_TIMEOUT when it does not answer. */
mk_client *mk_client_new(const char *dir, const char *name, int timeout_ms, mk_err *err);
/* Closes the streams that are still open (they need not be closed first; their pointers are dead then). *c becomes NULL. */
void mk_client_destroy(mk_client **c);
const mk_client_info *mk_client_about(const mk_client *c);

typedef struct mk_client_options {
    uint32_t context;     /* most tokens of the stream, prompt included; 0: the daemon's limit */
    uint32_t window;      /* tokens that may be on their way unread; 0: 4096; MK_WIRE_NO_WINDOW: no flow control */
    int sampling;         /* use the five fields below; otherwise the model's defaults (and `seed`) */
    float temperature;    /* 0: greedy */
    float top_p, min_p;   /* 0: off, both */
    uint32_t top_k;       /* 0: off */
    uint64_t seed;
    int own_stop;         /* use these stop ids (possibly none) instead of the model's */
    uint32_t n_stop;
    uint32_t stop[MK_WIRE_MAX_STOP];
    uint32_t pin, pin_rows; /* benchmarks (PROTOCOL.md, OPEN): position, rows of a step (1..8); pin_rows 0: an ordinary stream */
} mk_client_options;

/* Opens a stream; o NULL: all defaults. The stream belongs to c. */
mk_client_stream *mk_client_open(mk_client *c, const mk_client_options *o, int timeout_ms, mk_err *err);
uint64_t mk_client_stream_id(const mk_client_stream *s);
uint32_t mk_client_stream_context(const mk_client_stream *s); /* tokens it may hold */
uint32_t mk_client_stream_position(const mk_client_stream *s); /* tokens in it, as of the last answer */

/* Adds n tokens (any n; long prompts go in several messages) and waits until they are processed. logprobs: NULL, or [n] floats that receive
 * the natural logarithm of each token's probability given what stands before it (NaN for the first token of a stream). */
int mk_client_append(mk_client_stream *s, const uint32_t *ids, uint32_t n, float *logprobs, int timeout_ms, mk_err *err);
/* One message (at most MK_WIRE_MAX_IDS tokens) without waiting, so that GENERATE can follow at once. A refusal is reported by the next call of
 * mk_client_append, or of mk_client_next, which then cancels the generation behind it: its prompt was not what was meant. */
int mk_client_append_async(mk_client_stream *s, const uint32_t *ids, uint32_t n, mk_err *err);

typedef struct mk_client_generation {
    uint32_t max_new;
    int own_stop; /* use these stop ids instead of the stream's */
    uint32_t n_stop;
    uint32_t stop[MK_WIRE_MAX_STOP];
} mk_client_generation;

/* Asks for a generation and returns at once. Events that an earlier generation has left unread are discarded. */
int mk_client_generate(mk_client_stream *s, const mk_client_generation *g, mk_err *err);

enum mk_client_event_kind { MK_CLIENT_TOKEN = 1, MK_CLIENT_DONE = 2 };

typedef struct mk_client_event {
    enum mk_client_event_kind kind;
    uint32_t position;    /* of the token in the stream; DONE: tokens in the stream now */
    mk_wire_token token;  /* TOKEN */
    uint64_t received_ns; /* CLOCK_MONOTONIC of this process when the frame was read */
    mk_wire_done done;    /* DONE */
} mk_client_event;

/* The generation's next event: its tokens in order, never more than were asked for, then one DONE. A refused GENERATE is an error here (and there is no DONE then).
 * MK_E_BUG: nothing was asked for. */
int mk_client_next(mk_client_stream *s, mk_client_event *ev, int timeout_ms, mk_err *err);

/* Ends what runs in the stream; the generation's DONE then says so. Any thread. */
int mk_client_cancel(mk_client_stream *s, mk_err *err);
/* Closes the stream and waits for the answer (timeout_ms 0: does not wait). *s becomes NULL in any case. */
int mk_client_close(mk_client_stream **s, int timeout_ms, mk_err *err);

/* The daemon's statistics as JSON text; free() *json. */
int mk_client_stats(mk_client *c, char **json, int timeout_ms, mk_err *err);
/* One PING; *rtt_ns is the time to its answer. */
int mk_client_ping(mk_client *c, uint64_t *rtt_ns, int timeout_ms, mk_err *err);

/* What every worker did in some steps: record[step * instructions + i] is what instruction i did in it. */
typedef struct mk_client_trace {
    mk_wire_traced about;
    const char **vector, **opcode; /* names; n_opcode of the latter */
    uint32_t n_opcode;
    mk_wire_trace_insn *insn;     /* [instructions] */
    mk_wire_trace_record *record; /* [steps * instructions] */
    char *names;
    uint64_t got; /* items received, of the map and of records */
} mk_client_trace;

/* Has the next `steps` steps traced and waits for them (somebody has to generate meanwhile). *t is the caller's: mk_client_trace_free. MK_E_WIRE: refused, or
 * fewer steps than that were run within timeout_ms. */
int mk_client_traced(mk_client *c, uint32_t steps, int timeout_ms, mk_client_trace **t, mk_err *err);
void mk_client_trace_free(mk_client_trace **t);

/* Fault injection (PROTOCOL.md, INJECT). MK_E_WIRE when the daemon was built without it. */
int mk_client_inject(mk_client *c, const mk_wire_inject *what, uint32_t *steps, int timeout_ms, mk_err *err);

/* host/err.h's mk_fail and mk_err are part of this library. */
#endif
