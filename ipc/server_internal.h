/* Between server.c (sockets, reports, the loop), server_clients.c (who is there, sending to them) and server_requests.c (what clients ask). */
#ifndef MK_SERVER_INTERNAL_H
#define MK_SERVER_INTERNAL_H

#include "ipc/server.h"
#include "ipc/server_trace.h"
#include "ipc/wire.h"

#include <stdatomic.h>
#include <sys/un.h>

#define MK_SERVER_BUCKETS 1024u /* of both hash tables */
#define MK_SERVER_BATCH   64u   /* tokens of one TOKENS, at most */

/* An APPEND that the device has not reported yet; oldest first. */
typedef struct mk_server_append {
    struct mk_server_append *next;
    uint64_t request, since_ns;
    uint32_t base, n; /* its tokens stand at positions base .. base + n - 1 */
    float logprob[];  /* [n] when asked for, NaN until reported */
} mk_server_append;

typedef struct mk_server_stream {
    struct mk_server_stream *hash_next;
    struct mk_server_stream *next; /* of the same mk_server_client */
    uint64_t id, owner;
    uint32_t length;     /* tokens in it, outstanding appends included */
    mk_server_append *first, **last;
    uint64_t prompt_ns, prompt_end_ns; /* appends since the last generation: how long they took, when the last one was through */
    int closing;                       /* CLOSE was accepted */
    uint64_t request;                  /* of the tokens below */
    uint32_t position, n;
    mk_wire_token token[MK_SERVER_BATCH];
    struct mk_server_stream *dirty_next;
    int dirty;
} mk_server_stream;

typedef struct mk_server_client {
    uint64_t owner; /* 0: free entry; otherwise serial << 16 | index */
    struct mk_server_client *hash_next;
    mk_server_stream *streams;
    uint32_t n_streams;
    uint64_t heard_ns;
    int gone; /* a send failed: dropped at the end of this pass */
    uint8_t id_size, id[255];
    char name[MK_WIRE_MAX_NAME + 1];
} mk_server_client;

struct mk_server {
    mk_engine *e;
    mk_streams *s;
    void *zmq, *router, *pub;
    char *build, *model;
    char path[2][sizeof((struct sockaddr_un *)0)->sun_path]; /* of the bound sockets; "" : not bound */
    uint32_t max_clients;
    uint64_t beat_ns, stats_ns;
    int pin;
    void (*log)(void *arg, enum mk_server_level level, const char *line);
    void *log_arg;

    mk_server_client *clients; /* [max_clients] */
    uint64_t serial;
    uint32_t n_clients, n_gone;
    mk_server_client *client_head[MK_SERVER_BUCKETS];
    mk_server_stream *stream_head[MK_SERVER_BUCKETS];
    mk_server_stream *dirty;

    int wake; /* eventfd */
    atomic_int draining, aborting;
    atomic_uint_least64_t deadline_ns;

    uint64_t started_ns, beat_due, stats_due;
    uint64_t frames, bad_frames, errors, dropped, overruns;
    uint64_t seen_bad, seen_appended, seen_generated, seen_steps, seen_ns;
    double rate_appended, rate_generated, rate_steps;
    char last_bad[200];
    mk_server_trace trace;

    uint32_t ids[MK_WIRE_MAX_IDS];
    unsigned char out[MK_WIRE_MAX_FRAME];
};

/* server.c */
uint64_t mk_server_now(void); /* ns, monotonic */
__attribute__((format(printf, 3, 4))) void mk_server_say(mk_server *v, enum mk_server_level level, const char *fmt, ...);
/* JSON of the daemon's state (PROTOCOL.md, "Statistics"); free() it. NULL: out of memory. */
char *mk_server_statistics(mk_server *v);

/* server_clients.c. NULL: there is none. */
mk_server_client *mk_server_client_by_id(mk_server *v, const uint8_t *id, size_t n);
mk_server_client *mk_server_client_by_owner(mk_server *v, uint64_t owner);
mk_server_stream *mk_server_stream_by_id(mk_server *v, uint64_t id);
/* A free entry for a new client; when there is none, the one without streams that was silent longest makes room. NULL: all have
 * streams. */
mk_server_client *mk_server_client_new(mk_server *v, const uint8_t *id, size_t n);
void mk_server_client_forget(mk_server *v, mk_server_client *c); /* and its streams */
/* A zeroed stream from calloc, its id set, becomes the table's. */
void mk_server_stream_add(mk_server *v, mk_server_client *c, mk_server_stream *t);
/* Takes a stream out of every list and frees it. */
void mk_server_stream_forget(mk_server *v, mk_server_client *c, mk_server_stream *t);
void mk_server_append_pop(mk_server_stream *t); /* frees the oldest append; there is one */
/* Both never block. A client whose message cannot be sent is marked gone, and dropped at the end of the loop's pass. */
void mk_server_send(mk_server *v, mk_server_client *c, uint16_t type, uint64_t stream_id, uint64_t request, const void *fixed, const void *items);
/* ERR to whoever sent the frame, known or not. */
__attribute__((format(printf, 6, 7))) void mk_server_send_err(mk_server *v, const uint8_t *id, size_t id_size, const mk_wire_header *h,
                                                              uint16_t code, const char *fmt, ...);

/* server_requests.c */
/* One message of the ROUTER: routing id, then exactly one frame (`frames`: how many came). Answers it, or counts and refuses it. */
void mk_server_on_frame(mk_server *v, const uint8_t *id, size_t id_size, const void *frame, size_t size, int frames);
/* Sends what there is of a trace, a few messages at a time; returns whether there is more now. */
int mk_server_send_trace(mk_server *v);

#endif
