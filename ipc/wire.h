/* Wire v1: the bytes of every message (PROTOCOL.md is the page for readers; the two agree by tests/test_wire.c).
 *
 * A frame is a 32-byte header, the fixed part of its type's payload, and then n items of one size (ids, logprobs, text bytes), where n
 * stands in the fixed part. That shape is a table here, so one function checks every frame of every type: nothing is read before its
 * length is known to be there. All numbers are little endian; structs are laid out without padding. */
#ifndef MK_WIRE_H
#define MK_WIRE_H

#include "host/err.h"

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little endian, and so is every machine mkd runs on");

#define MK_WIRE_MAGIC    0x57444b4du /* "MKDW" */
#define MK_WIRE_VERSION  1u
#define MK_WIRE_MAX_FRAME (1u << 19) /* bytes, header included: more is refused with ERR */
#define MK_WIRE_CUT       (1u << 20) /* bytes: at more, the connection is cut (ZMQ_MAXMSGSIZE) */
#define MK_WIRE_MAX_IDS   65536u     /* token ids of one APPEND */
#define MK_WIRE_MAX_STOP  16u
#define MK_WIRE_MAX_BATCH 256u       /* tokens of one TOKENS */
#define MK_WIRE_MAX_DRAFT 7u
#define MK_WIRE_MAX_NAME  64u
#define MK_WIRE_MAX_TEXT  1024u      /* WELCOME's strings, ERR's text */
#define MK_WIRE_MAX_JSON  (1u << 18)
#define MK_WIRE_MAX_NAMES 4096u      /* TRACED's */
#define MK_WIRE_MAX_TRACE 8192u      /* items of one TRACE_MAP or TRACE_RECORDS */
#define MK_WIRE_NO_WINDOW 0xffffffffu /* OPEN.window: no flow control */
#define MK_WIRE_BEAT_MS   1000u
#define MK_WIRE_BEATS     5u /* silent intervals after which the other side is gone */

/* X(NAME, number, fixed bytes, item bytes, most items, legal flags, header stream (0: must be zero, 1: names one, 2: either),
 *   senders (1 client, 2 daemon), reserved: offset << 4 | size in bytes of a field that must be zero (0: none)) */
#define MK_WIRE_TYPES(X)                                                                                                                   \
    X(HELLO, 1, 8, 1, MK_WIRE_MAX_NAME, 0, 0, 1, 2 << 4 | 2)                                                                               \
    X(WELCOME, 2, 184, 1, MK_WIRE_MAX_TEXT, 0, 0, 2, 176 << 4 | 4)                                                                         \
    X(OPEN, 3, 40, 4, MK_WIRE_MAX_STOP, MK_OPEN_SAMPLING | MK_OPEN_STOP | MK_OPEN_PIN, 0, 1, 0)                                            \
    X(OPENED, 4, 8, 0, 0, 0, 1, 2, 0)                                                                                                      \
    X(APPEND, 5, 8, 4, MK_WIRE_MAX_IDS, MK_APPEND_WITH_LOGPROBS, 1, 1, 0 << 4 | 4)                                                         \
    X(APPENDED, 6, 16, 4, MK_WIRE_MAX_IDS, 0, 1, 2, 0)                                                                                     \
    X(GENERATE, 7, 8, 4, MK_WIRE_MAX_STOP, MK_GENERATE_STOP, 1, 1, 0)                                                                      \
    X(TOKENS, 8, 8, 16, MK_WIRE_MAX_BATCH, 0, 1, 2, 0)                                                                                     \
    X(DONE, 9, 48, 0, 0, 0, 1, 2, 0)                                                                                                       \
    X(CANCEL, 10, 0, 0, 0, 0, 1, 1, 0)                                                                                                     \
    X(CLOSE, 11, 0, 0, 0, 0, 1, 1, 0)                                                                                                      \
    X(CLOSED, 12, 0, 0, 0, 0, 1, 2, 0)                                                                                                     \
    X(CREDIT, 13, 8, 0, 0, 0, 1, 1, 4 << 4 | 4)                                                                                            \
    X(STATS, 14, 0, 0, 0, 0, 0, 1, 0)                                                                                                      \
    X(STATISTICS, 15, 8, 1, MK_WIRE_MAX_JSON, 0, 0, 2, 0 << 4 | 4)                                                                         \
    X(PING, 16, 8, 0, 0, 0, 0, 3, 0)                                                                                                       \
    X(PONG, 17, 8, 0, 0, 0, 0, 3, 0)                                                                                                       \
    X(ERR, 18, 8, 1, MK_WIRE_MAX_TEXT, 0, 2, 2, 0)                                                                                         \
    X(FORK, 19, 8, 0, 0, 0, 1, 1, 4 << 4 | 4)                                                                                              \
    X(FORKED, 20, 24, 0, 0, 0, 1, 2, 20 << 4 | 4)                                                                                          \
    X(ROLLBACK, 21, 8, 0, 0, 0, 1, 1, 4 << 4 | 4)                                                                                          \
    X(ROLLED_BACK, 22, 16, 0, 0, 0, 1, 2, 12 << 4 | 4)                                                                                     \
    X(CHECKPOINT, 23, 0, 0, 0, 0, 1, 1, 0)                                                                                                 \
    X(CHECKPOINTED, 24, 16, 0, 0, 0, 1, 2, 12 << 4 | 4)                                                                                    \
    X(VERIFY, 25, 8, 4, MK_WIRE_MAX_DRAFT, 0, 1, 1, 0 << 4 | 4)                                                                            \
    X(VERIFIED, 26, 24, 0, 0, 0, 1, 2, 0)                                                                                                  \
    X(TRACE, 27, 8, 0, 0, 0, 0, 1, 0)                                                                                                      \
    X(TRACED, 28, 24, 1, MK_WIRE_MAX_NAMES, 0, 0, 2, 0)                                                                                    \
    X(TRACE_MAP, 29, 8, 40, MK_WIRE_MAX_TRACE, 0, 0, 2, 0)                                                                                 \
    X(TRACE_RECORDS, 30, 12, 32, MK_WIRE_MAX_TRACE, 0, 0, 2, 0)\
    X(INJECT, 31, 16, 0, 0, 0, 0, 1, 0)                                                                                                    \
    X(INJECTED, 32, 8, 0, 0, 0, 0, 2, 4 << 4 | 4)

enum mk_wire_type_number {
#define X(NAME, number, ...) MK_WIRE_##NAME = number,
    MK_WIRE_TYPES(X)
#undef X
};

/* Header flags, by type. */
enum {
    MK_OPEN_SAMPLING = 1,        /* OPEN carries sampling; without it the model's defaults hold and the fields must be zero */
    MK_OPEN_STOP = 2,            /* OPEN's stop ids replace the model's */
    MK_OPEN_PIN = 4,             /* benchmarks: every row stands at one position */
    MK_APPEND_WITH_LOGPROBS = 1, /* APPENDED answers with the tokens' log probabilities */
    MK_GENERATE_STOP = 1,        /* GENERATE's stop ids replace the stream's */
};

/* WELCOME.features */
enum {
    MK_FEATURE_APPEND_LOGPROBS = 1,
    MK_FEATURE_FORK = 2,
    MK_FEATURE_ROLLBACK = 4,
    MK_FEATURE_CHECKPOINT = 8,
    MK_FEATURE_VERIFY = 16,
    MK_FEATURE_PIN = 32, /* mkd --bench yes */
    MK_FEATURE_TRACE = 64,
};

/* ERR.code */
enum mk_wire_error {
    MK_WIRE_E_FRAME = 1,       /* not a frame of this protocol: size, magic, length, count, number of frames */
    MK_WIRE_E_VERSION = 2,     /* another version of it */
    MK_WIRE_E_TYPE = 3,        /* unknown type, or one that the daemon sends */
    MK_WIRE_E_UNSUPPORTED = 4, /* a flag, field or message that this daemon does not serve */
    MK_WIRE_E_HELLO = 5,       /* no HELLO from this client, or it has been dropped since */
    MK_WIRE_E_REFUSED = 6,     /* the stream is unknown, another client's or busy; a value is out of range */
    MK_WIRE_E_CAPACITY = 7,    /* no slot, no pages, no room in a queue */
    MK_WIRE_E_DRAINING = 8,    /* the daemon is about to stop */
    MK_WIRE_E_DROPPED = 9,     /* the daemon has dropped this client and closed its streams */
    MK_WIRE_E_INTERNAL = 10,
};

/* DONE.reason and APPENDED.reason (0: complete). The same numbers as enum mk_reason of megakernel/rings.h. */
enum mk_wire_reason {
    MK_WIRE_COMPLETE = 0,
    MK_WIRE_LENGTH = 1,
    MK_WIRE_STOP = 2,
    MK_WIRE_CONTEXT = 3,
    MK_WIRE_CANCELLED = 4,
    MK_WIRE_ERROR = 5,
};

typedef struct mk_wire_header {
    uint32_t magic;
    uint16_t version, type;
    uint32_t flags, length; /* length: bytes after the header */
    uint64_t stream, request;
} mk_wire_header;

typedef struct mk_wire_hello {
    uint16_t newest, reserved; /* newest: highest version the client speaks */
    uint32_t n;                /* bytes of the client's name, UTF-8, for logs */
} mk_wire_hello;

typedef struct mk_wire_welcome {
    uint32_t vocab, context, streams, max_ids;
    uint32_t beat_ms, beats, max_frame, features;
    uint32_t layers, bos, pool_tokens, n_stop;
    uint32_t mixer[8]; /* layers by mixer: [1] delta rule (KDA, GDN), [2] MLA, [3] grouped-query attention */
    uint32_t ffn[4];   /* layers by FFN: [1] dense, [2] mixture of experts */
    uint32_t stop[16]; /* the model's stop ids, n_stop of them */
    float temperature, top_p, min_p; /* the model's defaults */
    uint32_t top_k;
    uint32_t reserved;
    uint32_t n; /* bytes of four strings, each with its zero byte: model, architecture, build, device */
} mk_wire_welcome;

typedef struct mk_wire_open {
    uint32_t context, window; /* tokens; context 0: the daemon's limit; window MK_WIRE_NO_WINDOW: no flow control */
    uint64_t seed;
    float temperature, top_p, min_p;
    uint32_t top_k;
    uint32_t pin; /* MK_OPEN_PIN: position (bits 0..27), rows of a generating step less one (bits 28..30); else 0 */
    uint32_t n;   /* stop ids, u32 each */
} mk_wire_open;
#define MK_WIRE_PIN(position, rows)  ((uint32_t)(position) | ((uint32_t)(rows)-1) << 28)
#define MK_WIRE_PIN_POSITION(pin)    ((pin) & 0x0fffffffu)
#define MK_WIRE_PIN_ROWS(pin)        (((pin) >> 28) + 1)

typedef struct mk_wire_opened {
    uint32_t context, window; /* granted */
} mk_wire_opened;

typedef struct mk_wire_append {
    uint32_t reserved;
    uint32_t n; /* token ids, u32 each; at least 1 */
} mk_wire_append;

typedef struct mk_wire_appended {
    uint32_t position; /* tokens in the stream now */
    uint32_t appended; /* of this APPEND's; fewer than asked when cancelled */
    uint32_t reason;   /* enum mk_wire_reason */
    uint32_t n;        /* 0, or `appended` log probabilities (natural logarithm), f32 each; NaN for the first token of a stream */
} mk_wire_appended;

typedef struct mk_wire_generate {
    uint32_t max_new; /* at least 1 */
    uint32_t n;       /* stop ids, u32 each */
} mk_wire_generate;

typedef struct mk_wire_tokens {
    uint32_t position; /* of the first one in the stream, from 0 */
    uint32_t n;        /* mk_wire_token each, at least 1, at consecutive positions */
} mk_wire_tokens;

typedef struct mk_wire_token {
    uint64_t device_ns; /* device clock when the token was chosen */
    uint32_t id;
    float logprob; /* natural logarithm, of the unmodified distribution */
} mk_wire_token;

typedef struct mk_wire_done {
    uint32_t reason, position, prompt_tokens, generated; /* position: tokens in the stream now */
    uint64_t queue_ns, prompt_ns, first_ns, total_ns;    /* the daemon's clock */
} mk_wire_done;

typedef struct mk_wire_credit {
    uint32_t tokens, reserved;
} mk_wire_credit;

/* STATISTICS: n bytes of JSON. */
typedef struct mk_wire_statistics {
    uint32_t reserved;
    uint32_t n;
} mk_wire_statistics;

/* PING and PONG. */
typedef struct mk_wire_ping {
    uint64_t cookie;
} mk_wire_ping;

typedef struct mk_wire_err {
    uint16_t code, about; /* enum mk_wire_error; type of the refused message, 0 where it had none */
    uint32_t n;           /* bytes of text */
} mk_wire_err;

typedef struct mk_wire_fork {
    uint32_t at, reserved;
} mk_wire_fork;

typedef struct mk_wire_forked {
    uint64_t fork; /* the new stream */
    uint32_t position, how, replayed, reserved; /* how: 1 in place, 2 replayed */
} mk_wire_forked;

typedef struct mk_wire_rollback {
    uint32_t to, reserved;
} mk_wire_rollback;

/* ROLLED_BACK and CHECKPOINTED. */
typedef struct mk_wire_rolled_back {
    uint32_t position, how, replayed, reserved;
} mk_wire_rolled_back;

typedef struct mk_wire_verify {
    uint32_t reserved;
    uint32_t n; /* draft ids, u32 each */
} mk_wire_verify;

typedef struct mk_wire_verified {
    uint32_t position, accepted, next; /* next: the id after the accepted ones */
    float logprob;                     /* of next */
    uint64_t device_ns;
} mk_wire_verified;

/* The answer to TRACE: TRACED, then the map of the program, then the records of every step, all in order; the last record ends it. */
typedef struct mk_wire_trace {
    uint32_t steps, timeout_ms; /* timeout: for the steps to have been run; at most MK_WIRE_TRACE_MS */
} mk_wire_trace;
#define MK_WIRE_TRACE_MS 60000u

typedef struct mk_wire_traced {
    uint32_t first_step, steps, workers, instructions, vectors;
    uint32_t n; /* bytes of names, each with its zero byte: of the vectors, then of the opcodes */
} mk_wire_traced;

/* One instruction of the program; vector numbers are indices into the names, 65535: none. */
typedef struct mk_wire_trace_insn {
    uint16_t worker;
    uint8_t opcode, n_wait;
    uint16_t layer; /* 65535: outside the layers */
    uint16_t vector, publication, slice; /* what it publishes */
    uint32_t tape_bytes; /* of the worker's own weights */
    struct {
        uint16_t vector, publication, slice, slices; /* slices 0: the whole vector, 65535: the worker's own part of it */
    } wait[3];
} mk_wire_trace_insn;

typedef struct mk_wire_trace_map {
    uint32_t first, n; /* instructions first .. first + n - 1: by worker, each worker's in its order */
} mk_wire_trace_map;

/* Nanoseconds of the device's clock; all but the start count from the start. */
typedef struct mk_wire_trace_record {
    uint64_t start;   /* 48 bits */
    uint32_t input;   /* when its input was complete */
    uint32_t weights; /* how long it waited for weights, in all */
    uint32_t publish; /* when its publication began; 0: not told apart */
    uint32_t end;
    uint32_t bytes;   /* of weights, cache and state that it read */
    uint32_t rows;    /* of the step, with MK_WIRE_TRACE_ASIDE */
} mk_wire_trace_record;
#define MK_WIRE_TRACE_ASIDE 0x80u /* beside the worker's queue, by warps of their own: no part of its time */

typedef struct mk_wire_trace_records {
    uint32_t step, first, n; /* step of the trace, from 0; instructions first .. first + n - 1 */
} mk_wire_trace_records;

/* Fault injection; refused unless the daemon was built for it. */
enum { MK_WIRE_INJECT_HANG = 1, /* a worker stops before an instruction */ MK_WIRE_INJECT_IDLE = 2, /* SCHEDULE stops looking for work */
       MK_WIRE_INJECT_ERROR = 3 /* the GPU is lost */ };
typedef struct mk_wire_inject {
    uint32_t what, worker, instruction, after; /* after: steps from the next one */
} mk_wire_inject;
typedef struct mk_wire_injected {
    uint32_t steps, reserved; /* run when it was handed over */
} mk_wire_injected;

#define MK_AT(type, field, at) static_assert(offsetof(type, field) == (at), #type "." #field " lies at " #at)
#define MK_IS(type, size) static_assert(sizeof(type) == (size), #type " is " #size " bytes")
MK_IS(mk_wire_header, 32);
MK_AT(mk_wire_header, version, 4);
MK_AT(mk_wire_header, type, 6);
MK_AT(mk_wire_header, flags, 8);
MK_AT(mk_wire_header, length, 12);
MK_AT(mk_wire_header, stream, 16);
MK_AT(mk_wire_header, request, 24);
MK_IS(mk_wire_hello, 8);
MK_AT(mk_wire_hello, reserved, 2);
MK_AT(mk_wire_hello, n, 4);
MK_IS(mk_wire_welcome, 184);
MK_AT(mk_wire_welcome, beat_ms, 16);
MK_AT(mk_wire_welcome, layers, 32);
MK_AT(mk_wire_welcome, n_stop, 44);
MK_AT(mk_wire_welcome, mixer, 48);
MK_AT(mk_wire_welcome, ffn, 80);
MK_AT(mk_wire_welcome, stop, 96);
MK_AT(mk_wire_welcome, temperature, 160);
MK_AT(mk_wire_welcome, top_k, 172);
MK_AT(mk_wire_welcome, reserved, 176);
MK_AT(mk_wire_welcome, n, 180);
MK_IS(mk_wire_open, 40);
MK_AT(mk_wire_open, seed, 8);
MK_AT(mk_wire_open, temperature, 16);
MK_AT(mk_wire_open, top_k, 28);
MK_AT(mk_wire_open, pin, 32);
MK_AT(mk_wire_open, n, 36);
MK_IS(mk_wire_opened, 8);
MK_IS(mk_wire_append, 8);
MK_AT(mk_wire_append, n, 4);
MK_IS(mk_wire_appended, 16);
MK_AT(mk_wire_appended, n, 12);
MK_IS(mk_wire_generate, 8);
MK_AT(mk_wire_generate, n, 4);
MK_IS(mk_wire_tokens, 8);
MK_AT(mk_wire_tokens, n, 4);
MK_IS(mk_wire_token, 16);
MK_AT(mk_wire_token, id, 8);
MK_AT(mk_wire_token, logprob, 12);
MK_IS(mk_wire_done, 48);
MK_AT(mk_wire_done, generated, 12);
MK_AT(mk_wire_done, queue_ns, 16);
MK_AT(mk_wire_done, total_ns, 40);
MK_IS(mk_wire_credit, 8);
MK_IS(mk_wire_statistics, 8);
MK_AT(mk_wire_statistics, n, 4);
MK_IS(mk_wire_ping, 8);
MK_IS(mk_wire_err, 8);
MK_AT(mk_wire_err, about, 2);
MK_AT(mk_wire_err, n, 4);
MK_IS(mk_wire_fork, 8);
MK_IS(mk_wire_forked, 24);
MK_AT(mk_wire_forked, position, 8);
MK_AT(mk_wire_forked, reserved, 20);
MK_IS(mk_wire_rollback, 8);
MK_IS(mk_wire_rolled_back, 16);
MK_IS(mk_wire_inject, 16);
MK_IS(mk_wire_injected, 8);
MK_IS(mk_wire_verify, 8);
MK_AT(mk_wire_verify, n, 4);
MK_IS(mk_wire_verified, 24);
MK_AT(mk_wire_verified, logprob, 12);
MK_AT(mk_wire_verified, device_ns, 16);
MK_IS(mk_wire_trace, 8);
MK_IS(mk_wire_traced, 24);
MK_AT(mk_wire_traced, n, 20);
MK_IS(mk_wire_trace_insn, 40);
MK_AT(mk_wire_trace_insn, tape_bytes, 12);
MK_AT(mk_wire_trace_insn, wait, 16);
MK_IS(mk_wire_trace_map, 8);
MK_IS(mk_wire_trace_record, 32);
MK_AT(mk_wire_trace_record, end, 20);
MK_AT(mk_wire_trace_record, rows, 28);
MK_IS(mk_wire_trace_records, 12);
static_assert(MK_WIRE_MAX_FRAME >= 32 + 8 + 40 * MK_WIRE_MAX_TRACE, "a trace's longest message fits a frame");
static_assert(MK_WIRE_MAX_FRAME >= 32 + 16 + 4 * MK_WIRE_MAX_IDS, "the longest message fits a frame");

/* One type of message. */
typedef struct mk_wire_type {
    const char *name;
    uint16_t number, fixed, item;
    uint32_t max_items, flags;
    uint8_t stream, from; /* as in MK_WIRE_TYPES */
    uint16_t reserved_at;
    uint8_t reserved_size;
} mk_wire_type;

/* NULL: no such type. */
const mk_wire_type *mk_wire_type_of(uint16_t number);
const char *mk_wire_type_name(uint16_t number);   /* "unknown type" */
const char *mk_wire_error_name(uint16_t code);    /* "FRAME" */
const char *mk_wire_reason_name(uint32_t reason); /* "length" */

/* A frame, taken apart. `items` points into the frame, at any alignment: use the copying readers below. */
typedef struct mk_wire_msg {
    mk_wire_header h;
    const mk_wire_type *type;
    union {
        unsigned char fixed[184]; /* the longest fixed part */
        mk_wire_hello hello;
        mk_wire_welcome welcome;
        mk_wire_open open;
        mk_wire_opened opened;
        mk_wire_append append;
        mk_wire_appended appended;
        mk_wire_generate generate;
        mk_wire_tokens tokens;
        mk_wire_done done;
        mk_wire_credit credit;
        mk_wire_statistics statistics;
        mk_wire_ping ping;
        mk_wire_err err;
        mk_wire_fork fork;
        mk_wire_forked forked;
        mk_wire_rollback rollback;
        mk_wire_rolled_back rolled_back;
        mk_wire_verify verify;
        mk_wire_verified verified;
        mk_wire_trace trace;
        mk_wire_traced traced;
        mk_wire_trace_map trace_map;
        mk_wire_trace_records trace_records;
        mk_wire_inject inject;
        mk_wire_injected injected;
    };
    uint32_t n;
    const unsigned char *items;
} mk_wire_msg;

enum { MK_WIRE_CLIENT = 1, MK_WIRE_DAEMON = 2 };

/* Takes apart `size` bytes that `from` (MK_WIRE_CLIENT or MK_WIRE_DAEMON) has sent. Returns 0, or an enum mk_wire_error with err
 * (code MK_E_WIRE) saying what was expected and what was found; m->h then holds what of the header was there, zeroes otherwise. Checked:
 * size, magic, version, type, direction, flags, length, count, reserved fields, whether the header may name a stream. */
int mk_wire_decode(const void *frame, size_t size, int from, mk_wire_msg *m, mk_err *err);

/* Writes a frame to dst and returns its size; 0 when it does not fit cap or breaks the type's own table (a bug of the caller).
 * `fixed` is the type's struct with its n set; `items` n items of the type's item size. Both may be NULL where the type has none. */
size_t mk_wire_encode(void *dst, size_t cap, uint16_t type, uint32_t flags, uint64_t stream, uint64_t request, const void *fixed,
                      const void *items);
/* Bytes of a frame of that type with n items. */
size_t mk_wire_size(uint16_t type, uint32_t n);

/* Items out of a decoded frame: the first `most`; returns how many were copied. dst holds items of the type's size. */
uint32_t mk_wire_items(const mk_wire_msg *m, void *dst, uint32_t most);
/* Makes text of another program fit to be printed and written to files: control bytes, bytes that are no UTF-8 and the characters of `other` become
 * '?'. Zero bytes stay: they end the names of a list. */
void mk_wire_plain(char *text, size_t n, const char *other);
/* Text out of a decoded frame, made plain, with '?' for a zero byte in it and a zero byte at the end. */
void mk_wire_text(const mk_wire_msg *m, char *dst, size_t cap);
/* String i (0..3) of WELCOME: "" where there is none. */
void mk_wire_welcome_string(const mk_wire_msg *m, int i, char *dst, size_t cap);

#endif
