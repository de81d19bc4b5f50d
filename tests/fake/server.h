/* A server over the test double (engine.c), on a thread, in a directory of its own; and a client that says exactly what it is told. */
#include "ipc/server.h"
#include "ipc/wire.h"
#include "tests/fake/engine.c"

#include <errno.h>
#include <zmq.h>

static int fake_pin __attribute__((unused)); /* the next rig serves PIN */
static uint32_t fake_stats_ms __attribute__((unused)) = 50; /* how often the next rig publishes statistics */

typedef struct rig {
    char dir[128];
    mk_engine *e;
    mk_streams *s;
    mk_server *v;
    pthread_t thread;
    int stopped, rc;
    mk_err err;
    void *zmq;
} rig;

static inline void *rig_run(void *arg)
{
    rig *r = arg;
    r->rc = mk_server_run(r->v, &r->err);
    return NULL;
}

static inline rig *rig_start(uint32_t beat_ms)
{
    rig *r = calloc(1, sizeof *r);
    atomic_store(&fake_us, 200);
    atomic_store(&fake_frozen, 0);
    snprintf(r->dir, sizeof r->dir, "/tmp/mkd test XXXXXX"); /* a path with spaces */
    assert_non_null(mkdtemp(r->dir));
    r->e = fake_engine_new();
    r->s = mk_streams_new(r->e);
    r->v = mk_server_new(&(mk_server_config){.dir = r->dir, .build = "test\n1", .model = "fake", .beat_ms = beat_ms, .stats_ms = fake_stats_ms, .pin = fake_pin}, r->e,
                         r->s, &r->err);
    if (!r->v) fail_msg("%s", r->err.msg);
    assert_int_equal(pthread_create(&r->thread, NULL, rig_run, r), 0);
    r->zmq = zmq_ctx_new();
    return r;
}

/* Waits for mk_server_run to return; its code. */
static inline int rig_join(rig *r)
{
    if (!r->stopped) pthread_join(r->thread, NULL);
    r->stopped = 1;
    return r->rc;
}

static inline void rig_stop(rig *r)
{
    char path[256];
    if (!r->stopped) mk_server_abort(r->v);
    rig_join(r);
    mk_server_destroy(&r->v);
    assert_null(r->v);
    mk_streams_destroy(&r->s);
    mk_engine_close(&r->e);
    zmq_ctx_term(r->zmq);
    snprintf(path, sizeof path, "%s/req.sock", r->dir);
    assert_int_equal(access(path, F_OK), -1); /* the sockets are gone with it */
    assert_int_equal(rmdir(r->dir), 0);
    free(r);
}

/* ---- raw client ----------------------------------------------------------------------------------------------------- */

typedef struct raw {
    void *sock;
    int mute; /* does not answer PING */
    unsigned pings;
    unsigned char frame[1 << 17];
    mk_wire_msg m;
    char text[1100];
} raw;

static inline raw *raw_new(rig *r)
{
    raw *c = calloc(1, sizeof *c);
    char url[256];
    snprintf(url, sizeof url, "ipc://%s/req.sock", r->dir);
    c->sock = zmq_socket(r->zmq, ZMQ_DEALER);
    zmq_setsockopt(c->sock, ZMQ_LINGER, &(int){0}, sizeof(int));
    assert_int_equal(zmq_connect(c->sock, url), 0);
    return c;
}

static inline void raw_free(raw *c)
{
    zmq_close(c->sock);
    free(c);
}

static inline void raw_bytes(raw *c, const void *p, size_t n)
{
    assert_int_equal(zmq_send(c->sock, p, n, 0), n);
}

static inline void raw_send(raw *c, uint16_t type, uint32_t flags, uint64_t stream, uint64_t request, const void *fixed, const void *items)
{
    unsigned char *f = malloc(MK_WIRE_MAX_FRAME);
    size_t n = mk_wire_encode(f, MK_WIRE_MAX_FRAME, type, flags, stream, request, fixed, items);
    assert_true(n > 0);
    raw_bytes(c, f, n);
    free(f);
}

/* The next message that is no PING, into c->m; its type, 0 when none comes in time. PINGs are answered. */
static inline int raw_recv(raw *c, int timeout_ms)
{
    uint64_t end = fake_now() + (uint64_t)timeout_ms * 1000000;
    for (;;) {
        uint64_t now = fake_now();
        zmq_pollitem_t item = {.socket = c->sock, .events = ZMQ_POLLIN};
        if (zmq_poll(&item, 1, end > now ? (long)((end - now) / 1000000) : 0) <= 0) {
            if (fake_now() >= end || end - fake_now() < 1000000) return 0;
            continue;
        }
        int n = zmq_recv(c->sock, c->frame, sizeof c->frame, 0);
        assert_in_range(n, 32, sizeof c->frame);
        mk_err err = {0};
        if (mk_wire_decode(c->frame, (size_t)n, MK_WIRE_DAEMON, &c->m, &err)) fail_msg("bad frame from the server: %s", err.msg);
        if (c->m.type->item == 1) mk_wire_text(&c->m, c->text, sizeof c->text);
        if (c->m.h.type != MK_WIRE_PING) return c->m.h.type;
        c->pings++;
        if (!c->mute) raw_send(c, MK_WIRE_PONG, 0, 0, c->m.h.request, &c->m.ping, NULL);
    }
}

static inline void raw_expect(raw *c, int type)
{
    int got = raw_recv(c, 5000);
    if (got != type)
        fail_msg("expected %s, got %s%s%s", mk_wire_type_name((uint16_t)type), got ? mk_wire_type_name((uint16_t)got) : "nothing",
                 got == MK_WIRE_ERR ? ": " : "", got == MK_WIRE_ERR ? c->text : "");
}

/* The next message is an ERR with this code, about this type, with this in its text. */
static inline void raw_expect_err(raw *c, int code, int about, const char *text)
{
    raw_expect(c, MK_WIRE_ERR);
    if (c->m.err.code != code || c->m.err.about != about || !strstr(c->text, text))
        fail_msg("expected ERR %s about %s with \"%s\", got %s about %s: %s", mk_wire_error_name((uint16_t)code),
                 mk_wire_type_name((uint16_t)about), text, mk_wire_error_name(c->m.err.code), mk_wire_type_name(c->m.err.about), c->text);
}

static inline void raw_hello(raw *c)
{
    raw_send(c, MK_WIRE_HELLO, 0, 0, 11, &(mk_wire_hello){.newest = 1, .n = 3}, "raw");
    raw_expect(c, MK_WIRE_WELCOME);
    assert_int_equal(c->m.h.request, 11);
}

static inline uint64_t raw_open(raw *c, uint32_t window)
{
    raw_send(c, MK_WIRE_OPEN, 0, 0, 12, &(mk_wire_open){.window = window}, NULL);
    raw_expect(c, MK_WIRE_OPENED);
    assert_int_equal(c->m.h.request, 12);
    return c->m.h.stream;
}

static inline void raw_append(raw *c, uint64_t stream)
{
    raw_send(c, MK_WIRE_APPEND, 0, stream, 13, &(mk_wire_append){.n = 3}, (uint32_t[]){1, 2, 3});
}

static inline void raw_generate(raw *c, uint64_t stream, uint32_t n, uint64_t request)
{
    raw_send(c, MK_WIRE_GENERATE, 0, stream, request, &(mk_wire_generate){.max_new = n}, NULL);
}

/* A client with one stream that holds three tokens. */
static inline raw *raw_ready(rig *r, uint32_t window, uint64_t *stream)
{
    raw *c = raw_new(r);
    raw_hello(c);
    *stream = raw_open(c, window);
    raw_append(c, *stream);
    raw_expect(c, MK_WIRE_APPENDED);
    return c;
}

/* Takes tokens of `stream` from position `from` on, in order and with the double's values, until DONE (returned type) or until nothing
 * comes for `timeout_ms` (0). *n counts them. */
static inline int raw_tokens(raw *c, uint64_t stream, uint32_t from, int timeout_ms, uint32_t *n)
{
    *n = 0;
    for (;;) {
        int type = raw_recv(c, timeout_ms);
        if (type != MK_WIRE_TOKENS) return type;
        assert_int_equal(c->m.h.stream, stream);
        assert_int_equal(c->m.tokens.position, from + *n);
        assert_true(c->m.n > 0);
        for (uint32_t i = 0; i < c->m.n; i++, ++*n) {
            mk_wire_token t;
            memcpy(&t, c->m.items + i * sizeof t, sizeof t);
            assert_int_equal(t.id, fake_token(from + *n));
            assert_true(t.logprob == fake_logprob(from + *n));
            assert_true(t.device_ns > 0);
        }
    }
}

static inline void raw_alive(raw *c)
{
    raw_send(c, MK_WIRE_PING, 0, 0, 99, &(mk_wire_ping){.cookie = 0x1122334455667788}, NULL);
    raw_expect(c, MK_WIRE_PONG);
    assert_int_equal(c->m.h.request, 99);
    assert_true(c->m.ping.cookie == 0x1122334455667788);
}

/* A number out of the statistics: the first `"key":` behind `"group":`. */
static inline long raw_stat(raw *c, const char *group, const char *key)
{
    char name[64];
    raw_send(c, MK_WIRE_STATS, 0, 0, 14, NULL, NULL);
    raw_expect(c, MK_WIRE_STATISTICS);
    snprintf(name, sizeof name, "\"%s\":", group);
    const char *p = strstr(c->text, name);
    assert_non_null(p);
    snprintf(name, sizeof name, "\"%s\":", key);
    p = strstr(p, name);
    assert_non_null(p);
    return strtol(p + strlen(name), NULL, 10);
}

/* Waits until the statistic has that value. */
static inline void raw_until(raw *c, const char *group, const char *key, long value)
{
    for (int i = 0; i < 250; i++) {
        if (raw_stat(c, group, key) == value) return;
        usleep(20000);
    }
    fail_msg("%s.%s is %ld after 5 s, expected %ld", group, key, raw_stat(c, group, key), value);
}
