/* The daemon's side of the wire (PROTOCOL.md): one ROUTER for requests, one PUB for statistics, one thread that turns messages into
 * calls of host/streams.h and the stream table's reports into messages. Bad input is answered and counted; it never ends the server. */
#ifndef MK_SERVER_H
#define MK_SERVER_H

#include "host/streams.h"

typedef struct mk_server mk_server;

enum mk_server_level { MK_SERVER_WARN = 1, MK_SERVER_INFO = 2, MK_SERVER_DEBUG = 3 };

typedef struct mk_server_config {
    const char *dir;      /* existing directory for req.sock and stats.sock; the caller holds its lock */
    const char *build;    /* "mkd 0.1.0 (0123abcd)": for WELCOME and the statistics */
    const char *model;    /* what clients are told is loaded, e.g. the checkpoint directory's name; NULL: the architecture's name */
    uint32_t max_clients; /* 0: 1024; at most 65,535 */
    uint32_t beat_ms;     /* liveness interval; 0: 1000. A client with streams that is silent for five of them is dropped */
    uint32_t stats_ms;    /* statistics are published this often; 0: 1000 */
    int pin;              /* serve OPEN's PIN (benchmarks) */
    void (*log)(void *arg, enum mk_server_level level, const char *line); /* NULL: silent. Called on the server's thread */
    void *log_arg;
} mk_server_config;

/* Binds both sockets (mode 0660). Strings are copied; e and s stay the caller's and must outlive the server. NULL and err on failure:
 * MK_E_USAGE (directory name too long for a socket), MK_E_RUNNING (somebody listens there), MK_E_SYSTEM. When this has returned,
 * clients can connect; they are answered once mk_server_run runs. */
mk_server *mk_server_new(const mk_server_config *cfg, mk_engine *e, mk_streams *s, mk_err *err);

/* Serves on the calling thread until drained or aborted; all calls of s happen here. MK_OK: drained, every request had its DONE.
 * MK_E_TIMEOUT: the drain limit passed, or mk_server_abort was called, with requests running; they were cancelled and, where the
 * engine still answered within a second, got their DONE. MK_E_SYSTEM: polling failed. Call once. */
int mk_server_run(mk_server *v, mk_err *err);

/* From now on OPEN, APPEND and GENERATE are refused; mk_server_run returns when nothing runs any more, or after `seconds`.
 * Async-signal-safe; any thread. */
void mk_server_drain(mk_server *v, double seconds);
/* Cancel everything and return from mk_server_run at once (it waits at most a second for the last DONEs). Async-signal-safe. */
void mk_server_abort(mk_server *v);

/* Unbinds, sends what is queued (at most half a second) and frees. *v becomes NULL; NULL is fine. Not while mk_server_run runs. */
void mk_server_destroy(mk_server **v);

#endif
