/* The C client library, mkctl's commands and the Python client against a server over a test double of the engine. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "ipc/client.h"
#include "ipc/mkctl.h"
#include "tests/fake/server.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zmq.h>

static mk_client *client_of(rig *r)
{
    mk_err err = {0};
    mk_client *c = mk_client_new(r->dir, "test", 5000, &err);
    if (!c) fail_msg("%s", err.msg);
    return c;
}

#define OK(call)                                                                                                                           \
    do {                                                                                                                                   \
        mk_err err_ = {0}, *err = &err_;                                                                                                   \
        if (call) fail_msg("%s: %s", #call, err->msg);                                                                                     \
    } while (0)
#define FAILS(code_, text, call)                                                                                                           \
    do {                                                                                                                                   \
        mk_err err_ = {0}, *err = &err_;                                                                                                   \
        int rc_ = (call);                                                                                                                  \
        if (rc_ != (code_) || err->code != (code_) || !strstr(err->msg, text))                                                             \
            fail_msg("%s: expected %d with \"%s\", got %d, %s", #call, code_, text, rc_, err->msg);                                        \
    } while (0)

/* Takes a generation to its end; the tokens have to be the double's from position `from` on. */
static mk_wire_done take_all(mk_client_stream *s, uint32_t from, uint32_t *n)
{
    for (*n = 0;; ++*n) {
        mk_client_event ev;
        OK(mk_client_next(s, &ev, 5000, err));
        assert_true(ev.received_ns > 0);
        if (ev.kind == MK_CLIENT_DONE) return ev.done;
        assert_int_equal(ev.position, from + *n);
        assert_int_equal(ev.token.id, fake_token(from + *n));
        assert_true(ev.token.logprob == fake_logprob(from + *n));
    }
}

static void test_session(void **state)
{
    (void)state;
    rig *r = rig_start(0);
    mk_client *c = client_of(r);
    const mk_client_info *a = mk_client_about(c);
    assert_string_equal(a->model, "fake");
    assert_string_equal(a->arch, "FakeForCausalLM");
    assert_string_equal(a->build, "test?1");
    assert_string_equal(a->device, "no device: a test's double");
    assert_int_equal(a->welcome.vocab, FAKE_VOCAB);

    mk_err e = {0};
    mk_client_stream *s = mk_client_open(c, NULL, 5000, &e);
    assert_non_null(s);
    assert_int_equal(mk_client_stream_context(s), FAKE_CONTEXT);
    uint32_t ids[100], n;
    float lp[100];
    for (uint32_t i = 0; i < 100; i++) ids[i] = i * 9;
    OK(mk_client_append(s, ids, 100, lp, 5000, err));
    assert_int_equal(mk_client_stream_position(s), 100);
    assert_true(isnan(lp[0]));
    for (uint32_t i = 1; i < 100; i++) assert_true(lp[i] == -(float)ids[i] / 1000);
    OK(mk_client_generate(s, &(mk_client_generation){.max_new = 50}, err));
    mk_wire_done d = take_all(s, 100, &n);
    assert_true(n == 50 && d.reason == MK_WIRE_LENGTH && d.generated == 50 && d.prompt_tokens == 100 && d.position == 150);
    assert_int_equal(mk_client_stream_position(s), 150);
    mk_client_event ev;
    FAILS(MK_E_BUG, "no generation was asked for", mk_client_next(s, &ev, 10, err));
    OK(mk_client_append_async(s, ids, 5, err)); /* and at once: */
    OK(mk_client_generate(s, &(mk_client_generation){.max_new = 100, .own_stop = 1, .n_stop = 1, .stop = {fake_token(160)}}, err));
    d = take_all(s, 155, &n);
    assert_true(n == 6 && d.reason == MK_WIRE_STOP);
    OK(mk_client_close(&s, 5000, err));
    assert_null(s);

    uint64_t ns = 0;
    char *json = NULL;
    OK(mk_client_ping(c, &ns, 5000, err));
    assert_in_range(ns, 1, 5000000000u);
    OK(mk_client_stats(c, &json, 5000, err));
    assert_non_null(strstr(json, "\"generated\":56"));
    free(json);
    mk_client_destroy(&c);
    assert_null(c);
    mk_client_destroy(&c); /* harmless */
    rig_stop(r);
}

static void test_refusals(void **state)
{
    (void)state;
    rig *r = rig_start(0);
    mk_client *c = client_of(r), *d = client_of(r);
    mk_err e = {0};
    mk_client_event ev;
    assert_null(mk_client_open(c, &(mk_client_options){.context = 1000000}, 5000, &e));
    assert_int_equal(e.code, MK_E_WIRE);
    assert_non_null(strstr(e.msg, "OPEN: context of 1000000 tokens, the limit is 4096"));
    assert_null(mk_client_open(c, &(mk_client_options){.n_stop = 17}, 5000, &e));
    assert_int_equal(e.code, MK_E_USAGE);
    mk_client_stream *s = mk_client_open(c, &(mk_client_options){.sampling = 1, .temperature = 1}, 5000, &e); /* top_p 0: off */
    assert_non_null(s);
    assert_true(r->s->s[0].open.sampling.top_p == 1);
    FAILS(MK_E_WIRE, "token id 1000 (the 1-th) is outside", mk_client_append(s, (uint32_t[]){1, 1000}, 2, NULL, 5000, err));
    FAILS(MK_E_USAGE, "append of 0 tokens", mk_client_append(s, NULL, 0, NULL, 5000, err));
    OK(mk_client_generate(s, &(mk_client_generation){.max_new = 5}, err));
    FAILS(MK_E_WIRE, "is empty", mk_client_next(s, &ev, 5000, err));
    /* a refused append is why the generation behind it is refused: that is what is reported, then the stream goes on */
    OK(mk_client_append_async(s, (uint32_t[]){4000}, 1, err));
    OK(mk_client_generate(s, &(mk_client_generation){.max_new = 5}, err));
    FAILS(MK_E_WIRE, "token id 4000 (the 0-th)", mk_client_next(s, &ev, 5000, err));
    OK(mk_client_append(s, (uint32_t[]){1, 2, 3}, 3, NULL, 5000, err));
    /* the same where the generation would have been possible without it: it is cancelled, and the stream is free again */
    atomic_store(&fake_us, 20000);
    OK(mk_client_append_async(s, (uint32_t[]){4000}, 1, err));
    OK(mk_client_generate(s, &(mk_client_generation){.max_new = 400}, err));
    FAILS(MK_E_WIRE, "token id 4000 (the 0-th)", mk_client_next(s, &ev, 5000, err));
    FAILS(MK_E_BUG, "no generation was asked for", mk_client_next(s, &ev, 5000, err));
    atomic_store(&fake_us, 200);
    uint32_t at = mk_client_stream_position(s);
    assert_in_range(at, 3, 20);
    /* 200,000 in one call, several messages: over the context, in one clear line */
    uint32_t *many = calloc(200000, 4), n;
    FAILS(MK_E_WIRE, "over the stream's context of 4096", mk_client_append(s, many, 200000, NULL, 5000, err));
    free(many);
    OK(mk_client_generate(s, &(mk_client_generation){.max_new = 5}, err));
    assert_int_equal(take_all(s, at, &n).reason, MK_WIRE_LENGTH);
    /* all slots in use */
    for (uint32_t i = 1; i < FAKE_SLOTS; i++) assert_non_null(mk_client_open(d, NULL, 5000, &e));
    assert_null(mk_client_open(d, NULL, 5000, &e));
    assert_int_equal(e.code, MK_E_CAPACITY);
    /* destroying a client closes what it had open */
    mk_client_destroy(&d);
    raw *w = raw_new(r);
    raw_hello(w);
    raw_until(w, "streams", "used", 1);
    assert_int_equal(raw_stat(w, "wire", "clients_dropped"), 0);
    raw_free(w);
    mk_client_destroy(&c);
    rig_stop(r);
}

static void test_cancel_and_timeouts(void **state)
{
    (void)state;
    rig *r = rig_start(0);
    mk_client *c = client_of(r);
    mk_err e = {0};
    mk_client_event ev;
    mk_client_stream *s = mk_client_open(c, NULL, 5000, &e);
    OK(mk_client_append(s, (uint32_t[]){1}, 1, NULL, 5000, err));
    atomic_store(&fake_us, 3000);
    OK(mk_client_generate(s, &(mk_client_generation){.max_new = 400}, err));
    OK(mk_client_next(s, &ev, 5000, err));
    OK(mk_client_cancel(s, err));
    do OK(mk_client_next(s, &ev, 5000, err));
    while (ev.kind == MK_CLIENT_TOKEN);
    assert_int_equal(ev.done.reason, MK_WIRE_CANCELLED);

    uint32_t at = ev.done.position, n;
    atomic_store(&fake_us, 200);
    atomic_store(&fake_frozen, 1);
    OK(mk_client_generate(s, &(mk_client_generation){.max_new = 5}, err));
    FAILS(MK_E_TIMEOUT, "no token within 50 ms", mk_client_next(s, &ev, 50, err));
    float lp[4] = {0};
    mk_client_stream *t = mk_client_open(c, NULL, 5000, &e);
    FAILS(MK_E_TIMEOUT, "APPEND: not through within 50 ms", mk_client_append(t, (uint32_t[]){1, 2, 3, 4}, 4, lp, 50, err));
    atomic_store(&fake_frozen, 0); /* it goes on where it was */
    assert_int_equal(take_all(s, at, &n).reason, MK_WIRE_LENGTH);
    assert_int_equal(n, 5);
    OK(mk_client_append(t, (uint32_t[]){5}, 1, NULL, 5000, err)); /* waits for the one that timed out as well */
    assert_int_equal(mk_client_stream_position(t), 5);
    assert_true(lp[1] == 0); /* whose memory is left alone */

    /* a generation is abandoned for another: its tokens are not taken for the new one's */
    OK(mk_client_generate(s, &(mk_client_generation){.max_new = 3}, err));
    usleep(100000);
    OK(mk_client_generate(s, &(mk_client_generation){.max_new = 7}, err));
    assert_int_equal(take_all(s, at + 5 + 3, &n).reason, MK_WIRE_LENGTH);
    assert_int_equal(n, 7);
    mk_client_destroy(&c);
    rig_stop(r);
}

/* The library's thread answers for a program that does something else for many intervals; the window bounds what comes meanwhile. */
static void test_busy_program(void **state)
{
    (void)state;
    rig *r = rig_start(150);
    mk_client *c = client_of(r);
    mk_err e = {0};
    mk_client_stream *s = mk_client_open(c, &(mk_client_options){.window = 16, .own_stop = 1}, 5000, &e);
    OK(mk_client_append(s, (uint32_t[]){1, 2, 3}, 3, NULL, 5000, err));
    OK(mk_client_generate(s, &(mk_client_generation){.max_new = 500}, err));
    usleep(1800000); /* twelve intervals */
    pthread_mutex_lock(&r->s->lock);
    assert_int_equal(r->s->s[0].produced, 16); /* paused */
    pthread_mutex_unlock(&r->s->lock);
    uint32_t n;
    assert_int_equal(take_all(s, 3, &n).reason, MK_WIRE_LENGTH); /* credits flow as tokens are taken */
    assert_int_equal(n, 500);
    OK(mk_client_close(&s, 5000, err));
    s = mk_client_open(c, &(mk_client_options){.window = 1, .own_stop = 1}, 5000, &e); /* the smallest window */
    OK(mk_client_append(s, (uint32_t[]){1}, 1, NULL, 5000, err));
    OK(mk_client_generate(s, &(mk_client_generation){.max_new = 20}, err));
    take_all(s, 1, &n);
    assert_int_equal(n, 20);
    mk_client_destroy(&c);
    rig_stop(r);
}

static void test_daemon_goes(void **state)
{
    (void)state;
    rig *r = rig_start(40);
    mk_client *c = client_of(r);
    mk_err e = {0};
    mk_client_event ev;
    mk_client_stream *s = mk_client_open(c, NULL, 5000, &e);
    OK(mk_client_append(s, (uint32_t[]){1, 2, 3}, 3, NULL, 5000, err));
    mk_server_drain(r->v, 0);
    assert_int_equal(rig_join(r), MK_OK); /* nobody serves any more; the socket is still there */
    OK(mk_client_generate(s, &(mk_client_generation){.max_new = 5}, err));
    FAILS(MK_E_CLOSED, "mkd has not answered for", mk_client_next(s, &ev, 5000, err));
    FAILS(MK_E_CLOSED, "mkd has not answered for", mk_client_append(s, (uint32_t[]){1}, 1, NULL, 5000, err));
    uint64_t ns;
    FAILS(MK_E_CLOSED, "mkd has not answered for", mk_client_ping(c, &ns, 5000, err));
    mk_client_destroy(&c);
    /* nobody says WELCOME */
    assert_null(mk_client_new(r->dir, NULL, 100, &e));
    assert_int_equal(e.code, MK_E_TIMEOUT);
    rig_stop(r);
    /* nobody there */
    assert_null(mk_client_new("/tmp/no such mkd", NULL, 100, &e));
    assert_int_equal(e.code, MK_E_CLOSED);
    assert_string_equal(e.msg, "/tmp/no such mkd/req.sock: no mkd listens there: No such file or directory");
    char path[200];
    memset(path, 'x', 150);
    path[150] = 0;
    assert_null(mk_client_new(path, NULL, 100, &e));
    assert_int_equal(e.code, MK_E_USAGE);
}

/* Restarted behind the client's back: the session is over, and says so. */
static void test_daemon_restarts(void **state)
{
    (void)state;
    rig *r = rig_start(200);
    mk_client *c = client_of(r);
    mk_err e = {0};
    assert_non_null(mk_client_open(c, NULL, 5000, &e));
    mk_server_drain(r->v, 0);
    assert_int_equal(rig_join(r), MK_OK);
    mk_server_destroy(&r->v);
    r->v = mk_server_new(&(mk_server_config){.dir = r->dir, .beat_ms = 200}, r->e, r->s, &e);
    if (!r->v) fail_msg("%s", e.msg);
    r->stopped = 0;
    assert_int_equal(pthread_create(&r->thread, NULL, rig_run, r), 0);
    uint64_t ns;
    int rc = MK_OK;
    for (int i = 0; i < 40 && rc != MK_E_CLOSED; i++) rc = mk_client_ping(c, &ns, 200, &e);
    assert_int_equal(rc, MK_E_CLOSED);
    assert_string_equal(e.msg, "mkd does not know this client any more (it has restarted or dropped it)");
    mk_client_destroy(&c);
    c = client_of(r);
    OK(mk_client_ping(c, &ns, 5000, err));
    mk_client_destroy(&c);
    rig_stop(r);
}

/* A daemon that breaks the protocol in one way. */
enum lie { NO_LIE, NO_VOCABULARY, LONG_BEAT, A_GAP, TOKENS_TWICE, TOO_MANY, DONE_TOO_SOON, TOO_FEW_IN, NO_SCORES, OTHER_STEPS, RECORDS_TO_NOWHERE };
typedef struct liar {
    char dir[64];
    void *zmq, *sock;
    pthread_t thread;
    enum lie lie;
    atomic_int stop;
    char peer[256];
    size_t peer_size;
} liar;

static void say(liar *l, uint16_t type, uint64_t stream, uint64_t request, const void *fixed, const void *items)
{
    unsigned char frame[4096];
    const size_t size = mk_wire_encode(frame, sizeof frame, type, 0, stream, request, fixed, items);
    if (!size || zmq_send(l->sock, l->peer, l->peer_size, ZMQ_SNDMORE) < 0 || zmq_send(l->sock, frame, size, 0) < 0) abort();
}
static void say_tokens(liar *l, const mk_wire_msg *m, uint32_t position, uint32_t n)
{
    const mk_wire_token token[8] = {{.device_ns = 1, .id = 5, .logprob = -1}};
    const mk_wire_tokens body = {.position = position, .n = n};
    say(l, MK_WIRE_TOKENS, m->h.stream, m->h.request, &body, token);
}
static void say_trace(liar *l, const mk_wire_msg *m)
{
    const mk_wire_trace_insn insn[2] = {{.vector = 0}, {.vector = 0}};
    const mk_wire_trace_record record[2] = {{.rows = 1}, {.rows = 1}};
    const mk_wire_traced traced = {.steps = m->trace.steps + (l->lie == OTHER_STEPS), .workers = 1, .instructions = 2, .vectors = 1, .n = 5};
    const mk_wire_trace_map map = {.n = 2};
    say(l, MK_WIRE_TRACED, 0, m->h.request, &traced, "v\0op");
    say(l, MK_WIRE_TRACE_MAP, 0, m->h.request, &map, insn);
    for (uint32_t i = 0; i < (l->lie == RECORDS_TO_NOWHERE ? 40 : traced.steps); i++) {
        const mk_wire_trace_records body = {.step = i, .n = 2};
        say(l, MK_WIRE_TRACE_RECORDS, 0, m->h.request, &body, record);
    }
}
static void answer(liar *l, const mk_wire_msg *m)
{
    const float scores[8] = {-1, -1, -1, -1, -1, -1, -1, -1};
    switch (m->h.type) {
    case MK_WIRE_HELLO: {
        const mk_wire_welcome body = {.vocab = l->lie == NO_VOCABULARY ? 0 : 100, .context = 1000, .streams = 1, .max_ids = 100, .beat_ms = l->lie == LONG_BEAT ? 60001 : 1000, .beats = 5, .n = 8};
        say(l, MK_WIRE_WELCOME, 0, m->h.request, &body, "m\0a\0b\0d");
        break;
    }
    case MK_WIRE_OPEN: say(l, MK_WIRE_OPENED, 7, m->h.request, &(mk_wire_opened){.context = 1000, .window = 4096}, NULL); break;
    case MK_WIRE_APPEND: {
        const uint32_t in = m->n - (l->lie == TOO_FEW_IN);
        const mk_wire_appended body = {.position = in, .appended = in, .n = m->h.flags && l->lie != NO_SCORES ? in : 0};
        say(l, MK_WIRE_APPENDED, m->h.stream, m->h.request, &body, scores);
        break;
    }
    case MK_WIRE_GENERATE: {
        const mk_wire_done done = {.reason = 1, .position = 11, .generated = 8};
        say_tokens(l, m, 3, 4);
        if (l->lie != DONE_TOO_SOON) say_tokens(l, m, l->lie == A_GAP ? 8 : l->lie == TOKENS_TWICE ? 3 : 7, l->lie == TOO_MANY ? 5 : 4);
        say(l, MK_WIRE_DONE, m->h.stream, m->h.request, &done, NULL);
        break;
    }
    case MK_WIRE_TRACE: say_trace(l, m); break;
    case MK_WIRE_CLOSE: say(l, MK_WIRE_CLOSED, m->h.stream, m->h.request, NULL, NULL); break;
    }
}
static void *lie_on(void *arg)
{
    liar *l = arg;
    while (!atomic_load(&l->stop)) {
        unsigned char frame[4096];
        mk_wire_msg m;
        const int peer = zmq_recv(l->sock, l->peer, sizeof l->peer, 0);
        if (peer < 0) continue;
        l->peer_size = (size_t)peer;
        const int size = zmq_recv(l->sock, frame, sizeof frame, 0);
        if (size > 0 && !mk_wire_decode(frame, (size_t)size, MK_WIRE_CLIENT, &m, NULL)) answer(l, &m);
    }
    return NULL;
}
static void liar_start(liar *l, enum lie lie)
{
    char url[100];
    memset(l, 0, sizeof *l);
    l->lie = lie;
    strcpy(l->dir, "/tmp/mkd-liar-XXXXXX");
    assert_non_null(mkdtemp(l->dir));
    snprintf(url, sizeof url, "ipc://%s/req.sock", l->dir);
    l->zmq = zmq_ctx_new();
    l->sock = zmq_socket(l->zmq, ZMQ_ROUTER);
    zmq_setsockopt(l->sock, ZMQ_RCVTIMEO, &(int){20}, sizeof(int));
    zmq_setsockopt(l->sock, ZMQ_LINGER, &(int){0}, sizeof(int));
    assert_int_equal(zmq_bind(l->sock, url), 0);
    assert_int_equal(pthread_create(&l->thread, NULL, lie_on, l), 0);
}
static void liar_stop(liar *l)
{
    char path[100];
    atomic_store(&l->stop, 1);
    pthread_join(l->thread, NULL);
    zmq_close(l->sock);
    zmq_ctx_term(l->zmq);
    snprintf(path, sizeof path, "%s/req.sock", l->dir);
    unlink(path);
    rmdir(l->dir);
}
/* Opens a stream, appends with log probabilities, generates and traces; the first error. */
static int use(mk_client *c, mk_err *err)
{
    float scores[3];
    mk_client_event ev = {0};
    mk_client_trace *t = NULL;
    mk_client_stream *s = mk_client_open(c, NULL, 5000, err);
    if (!s) return err->code;
    int rc = mk_client_append(s, (uint32_t[]){1, 2, 3}, 3, scores, 5000, err);
    if (!rc) rc = mk_client_generate(s, &(mk_client_generation){.max_new = 8}, err);
    while (!rc && ev.kind != MK_CLIENT_DONE) rc = mk_client_next(s, &ev, 5000, err);
    if (!rc) rc = mk_client_traced(c, 1, 5000, &t, err);
    mk_client_trace_free(&t);
    return rc;
}
static void test_daemon_lies(void **state)
{
    (void)state;
    const char *const text[] = {
        [NO_VOCABULARY] = "WELCOME: expected a vocabulary and a beat of at most 60000 ms, found 0 and 1000",
        [LONG_BEAT] = "WELCOME: expected a vocabulary and a beat of at most 60000 ms, found 100 and 60001",
        [A_GAP] = "TOKENS: expected position 7, found 8",
        [TOKENS_TWICE] = "TOKENS: expected position 7, found 3",
        [TOO_MANY] = "TOKENS: more than the 8 tokens that were asked for",
        [DONE_TOO_SOON] = "DONE: of 8 tokens, 4 have come",
        [TOO_FEW_IN] = "APPENDED: expected 3 tokens and 3 log probabilities, found 2 and 2",
        [NO_SCORES] = "APPENDED: expected 3 tokens and 3 log probabilities, found 3 and 0",
        [OTHER_STEPS] = "TRACED: expected 1 steps, found 2",
        [RECORDS_TO_NOWHERE] = NULL, /* behind a trace that is whole: of no use to anybody */
    };
    for (enum lie lie = NO_LIE; lie <= RECORDS_TO_NOWHERE; lie++) {
        liar l;
        mk_err err = {0};
        liar_start(&l, lie);
        mk_client *c = mk_client_new(l.dir, "test", 5000, &err);
        const int rc = c ? use(c, &err) : err.code;
        mk_client_destroy(&c);
        liar_stop(&l);
        if (text[lie] ? rc != MK_E_WIRE || strcmp(err.msg, text[lie]) : rc) fail_msg("lie %d: expected \"%s\", found %d, \"%s\"", lie, text[lie] ? text[lie] : "nothing", rc, err.msg);
    }
}

/* Several threads, a stream each, on one client. */
typedef struct worker {
    mk_client *c;
    uint32_t k, got;
} worker;

static void *work(void *arg)
{
    worker *w = arg;
    mk_err e;
    mk_client_event ev;
    mk_client_stream *s = mk_client_open(w->c, &(mk_client_options){.window = 8 << w->k, .own_stop = 1}, 5000, &e);
    if (!s) return NULL;
    for (int round = 0; round < 3; round++) {
        if (mk_client_append(s, (uint32_t[]){1, 2, 3}, 3, NULL, 5000, &e)) return NULL;
        if (mk_client_generate(s, &(mk_client_generation){.max_new = 100}, &e)) return NULL;
        while (!mk_client_next(s, &ev, 5000, &e) && ev.kind == MK_CLIENT_TOKEN) w->got += ev.token.id == fake_token(ev.position);
    }
    return mk_client_close(&s, 5000, &e) ? NULL : w;
}

static void test_threads(void **state)
{
    (void)state;
    rig *r = rig_start(0);
    mk_client *c = client_of(r);
    pthread_t thread[6];
    worker w[6];
    for (uint32_t k = 0; k < 6; k++) {
        w[k] = (worker){c, k, 0};
        assert_int_equal(pthread_create(&thread[k], NULL, work, &w[k]), 0);
    }
    for (uint32_t k = 0; k < 6; k++) {
        void *ok = NULL;
        pthread_join(thread[k], &ok);
        assert_non_null(ok);
        assert_int_equal(w[k].got, 300);
    }
    mk_client_destroy(&c);
    rig_stop(r);
}

/* ---- mkctl ---------------------------------------------------------------------------------------------------------- */

/* Runs a command with stdout and stderr in files; their text is in out and err. */
static char out[1 << 16], errors[1 << 14];

static void slurp(FILE *f, char *dst, size_t cap)
{
    rewind(f);
    dst[fread(dst, 1, cap - 1, f)] = 0;
    fclose(f);
}

static int run_command(int (*fn)(int, char **), char **argv)
{
    int argc = 0;
    while (argv[argc]) argc++;
    FILE *o = tmpfile(), *e = tmpfile();
    fflush(stdout);
    fflush(stderr);
    int keep1 = dup(1), keep2 = dup(2);
    dup2(fileno(o), 1);
    dup2(fileno(e), 2);
    int rc = fn(argc, argv);
    fflush(stdout);
    fflush(stderr);
    dup2(keep1, 1);
    dup2(keep2, 2);
    close(keep1);
    close(keep2);
    slurp(o, out, sizeof out);
    slurp(e, errors, sizeof errors);
    return rc;
}
#define RUN(fn, ...) run_command(fn, (char *[]){__VA_ARGS__, NULL})

static void test_mkctl(void **state)
{
    (void)state;
    rig *r = rig_start(0);
    atomic_store(&fake_us, 20000); /* tokens that all come at once have no rate */
    assert_int_equal(RUN(mkctl_generate, "generate", "--socket-dir", r->dir, "--ids", "1,2,3", "--max-new=5"), MK_OK);
    atomic_store(&fake_us, 200);
    assert_string_equal(out, "24 31 38 45 52\n");
    const char *parts[] = {"length: 3 prompt + 5 tokens", " tok/s", "first token ", "(client clock)", "between tokens p50 ", "p99 ", "(device clock)"};
    for (size_t i = 0; i < 7; i++)
        if (!strstr(errors, parts[i])) fail_msg("\"%s\" lacks \"%s\"", errors, parts[i]);
    assert_int_equal(RUN(mkctl_generate, "generate", "--socket-dir", r->dir, "--bos", "1", "--bytes", "a\xc3\xa9", "--max-new", "3"), MK_OK);
    assert_string_equal(out, "\x1f&-\n"); /* 31 38 45: the prompt is 4 ids */
    assert_int_equal(RUN(mkctl_generate, "generate", "--socket-dir", r->dir, "--ids", "1", "--max-new", "2", "--logprobs", "--temperature",
                         "0.5", "--top-k", "3", "--top-p", "0.9", "--min-p", "0.1", "--seed", "18446744073709551615", "--stop", ""),
                     MK_OK);
    assert_string_equal(out, "10:-0.0625 17:-0.1250\n");
    assert_int_equal(RUN(mkctl_generate, "generate", "--socket-dir", r->dir, "--ids", "1", "--max-new", "9", "--stop", "24"), MK_OK);
    assert_string_equal(out, "10 17 24\n");
    assert_non_null(strstr(errors, "stop: 1 prompt + 3 tokens"));

    /* what is wrong is said, and the code is host/err.h's */
#define WRONG(code, text, fn, ...)                                                                                                         \
    do {                                                                                                                                   \
        assert_int_equal(RUN(fn, __VA_ARGS__), code);                                                                                      \
        if (!strstr(errors, text)) fail_msg("\"%s\" lacks \"%s\"", errors, text);                                                          \
        assert_string_equal(out, "");                                                                                                      \
    } while (0)
    WRONG(MK_E_USAGE, "mkctl: generate: unknown flag --idz (mkctl generate --help", mkctl_generate, "generate", "--idz", "1");
    WRONG(MK_E_USAGE, "mkctl: generate: --max-new: expected a whole number, at most 4294967295, found \"-3\"", mkctl_generate, "generate", "--max-new", "-3");
    WRONG(MK_E_USAGE, "mkctl: generate: --max-new: expected a whole number, at most 4294967295, found \"4294967296\"", mkctl_generate, "generate", "--max-new",
          "4294967296");
    WRONG(MK_E_USAGE, "mkctl: generate: --temperature: expected a number, found \"warm\"", mkctl_generate, "generate", "--temperature=warm");
    WRONG(MK_E_USAGE, "mkctl: generate: --seed needs a value", mkctl_generate, "generate", "--seed");
    WRONG(MK_E_USAGE, "mkctl: generate: --socket-dir: expected a value, found the flag --ids (--socket-dir=--ids if it is meant)", mkctl_generate, "generate", "--socket-dir", "--ids", "1");
    WRONG(MK_E_USAGE, "mkctl: plan: --memory-gb: expected 0 to 10^9, found -1", mkctl_plan, "plan", "x", "--memory-gb", "-1");
    WRONG(MK_E_USAGE, "mkctl: plan: --smem-kb: expected at most 4194303, found 4194304", mkctl_plan, "plan", "x", "--smem-kb", "4194304");
    WRONG(MK_E_USAGE, "mkctl: diff: --json does not go with --strict", mkctl_diff, "diff", "x", "--strict", "--ids", "1", "--json", "f");
    WRONG(MK_E_USAGE, "mkctl: diff: --max-new does not go with --strict", mkctl_diff, "diff", "x", "--strict", "--ids", "1", "--max-new", "4");
    WRONG(MK_E_USAGE, "mkctl: diff: --layers: a checkpoint is run whole", mkctl_diff, "diff", "x", "--ids", "1", "--layers", "1");
    WRONG(MK_E_USAGE, "mkctl: diff: --tolerance: expected more than 0, found -1", mkctl_diff, "diff", "x", "--strict", "--ids", "1", "--tolerance", "-1");
    WRONG(MK_E_USAGE, "mkctl: diff: --ids: expected a token at least", mkctl_diff, "diff", "x", "--strict", "--ids", "");
    WRONG(MK_E_USAGE, "mkctl: generate: --logprobs takes no value", mkctl_generate, "generate", "--logprobs=1");
    WRONG(MK_E_USAGE, "mkctl: generate: unexpected argument \"prompt\"", mkctl_generate, "generate", "prompt");
    WRONG(MK_E_USAGE, "either --ids or --bytes", mkctl_generate, "generate");
    WRONG(MK_E_USAGE, "expected whole numbers like 1,2,3, found \"x\"", mkctl_generate, "generate", "--ids", "1,x");
    uint32_t *ids = NULL, n = 0;
    OK(mkctl_parse_ids("1 2  3,4 5 6 7 8 9 10 11 12", &ids, &n, err));
    assert_true(n == 12 && ids[11] == 12);
    free(ids);
    WRONG(MK_E_USAGE, "trace: --steps: expected 1 to 1024, found 1431655766", mkctl_trace, "trace", "--ctx", "16", "--steps", "1431655766");
    WRONG(MK_E_USAGE, "diff: --max-new: expected at most 16777216, found 4294907300", mkctl_diff, "diff", "x", "--ids", "1", "--max-new", "4294907300");
    WRONG(MK_E_USAGE, "the prompt is empty", mkctl_generate, "generate", "--ids", "");
    WRONG(MK_E_CLOSED, "no mkd listens there", mkctl_generate, "generate", "--socket-dir", "/nowhere", "--ids", "1");
    WRONG(MK_E_WIRE, "mkctl generate: APPEND: token id 1234 (the 0-th) is outside", mkctl_generate, "generate", "--socket-dir", r->dir,
          "--ids", "1234");
    assert_int_equal(RUN(mkctl_generate, "generate", "--help"), MK_OK);
    assert_non_null(strstr(out, "--max-new N"));

    assert_int_equal(RUN(mkctl_bench, "bench", "--socket-dir", r->dir, "--tokens", "20", "--prompt", "10", "--repeat", "3"), MK_OK);
    const char *keys[] = {"\"preset\": \"fake\"",  "\"ms_per_token\"", "\"p999\"", "\"tok_s\"", "\"prompt_tok_s\"", "\"ttft_ms\"",
                          "\"client_ms_per_token\"", "\"rows\": 1",       "\"tokens\": 20", "\"repeat\": 3"};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        if (!strstr(out, keys[i])) fail_msg("%s lacks %s", out, keys[i]);
    WRONG(MK_E_USAGE, "need --ctx", mkctl_bench, "bench", "--socket-dir", r->dir, "--temperature", "1");
    WRONG(MK_E_USAGE, "go without --ctx", mkctl_bench, "bench", "--socket-dir", r->dir, "--ctx", "64", "--tokens", "20");
    WRONG(MK_E_USAGE, "--top-p and --top-k need --temperature", mkctl_bench, "bench", "--socket-dir", r->dir, "--ctx", "64", "--top-p", "0.9");
    WRONG(MK_E_USAGE, "--top-p and --top-k need --temperature", mkctl_bench, "bench", "--socket-dir", r->dir, "--ctx", "64", "--top-k", "20");
    WRONG(MK_E_WIRE, "mkctl bench: OPEN: context of 9010 tokens", mkctl_bench, "bench", "--socket-dir", r->dir, "--tokens", "9000",
          "--prompt", "10");
    assert_int_equal(RUN(mkctl_stats, "stats", "--socket-dir", r->dir), MK_OK);
    assert_non_null(strstr(out, "\"generated\": "));
    assert_int_equal(RUN(mkctl_stats, "stats", "--socket-dir", r->dir, "--follow", "2"), MK_OK);
    assert_non_null(strstr(out, "}\n{\"version\":1"));
    assert_int_equal(RUN(mkctl_ping, "ping", "--socket-dir", r->dir, "--count", "20"), MK_OK);
    assert_non_null(strstr(out, "test?1, fake on no device: a test's double: 20 round trips, p50 "));
    rig_stop(r);
}

/* ---- Python --------------------------------------------------------------------------------------------------------- */

/* A python3 that has pyzmq: the first in PATH may be another than Debian's. NULL: there is none. */
static const char *python(void)
{
    static const char *const one[] = {"python3", "/usr/bin/python3"};
    for (int i = 0; i < 2; i++) {
        char command[128];
        snprintf(command, sizeof command, "%s -c 'import zmq' 2>/dev/null", one[i]);
        if (!system(command)) return one[i];
    }
    return NULL;
}

static const char *const script = "import sys, time, threading\n"
                                  "sys.path.insert(0, 'ipc')\n"
                                  "import mkd_client as m\n"
                                  "c = m.Client(sys.argv[1])\n"
                                  "assert c.info['vocab'] == 1000 and c.info['model'] == 'fake' and c.info['stop'] == [999], c.info\n"
                                  "s = c.open(context=500, window=16, temperature=0.5, seed=3, stop=[])\n"
                                  "assert s.context == 500\n"
                                  "lp = s.append([1, 20, 30], logprobs=True, timeout=5)\n"
                                  "assert lp[0] != lp[0] and abs(lp[2] + 0.03) < 1e-6, lp\n"
                                  "g = s.generate(100, timeout=5)\n"
                                  "time.sleep(1.8)\n" /* twelve intervals; its thread answers */
                                  "t = list(g)\n"
                                  "assert [x.id for x in t] == [(7 * p + 3) % 1000 for p in range(3, 103)], t\n"
                                  "assert s.done.reason == 'length' and s.done.generated == 100 and s.position == 103, s.done\n"
                                  "n = 0\n"
                                  "for x in s.generate(390, timeout=5):\n"
                                  "    n += 1\n"
                                  "    if n == 5: s.cancel()\n"
                                  "assert s.done.reason == 'cancelled' and n < 390, s.done\n"
                                  "for bad in (lambda: s.append([5000]), lambda: c.open(context=10**6), lambda: list(s.generate(0))):\n"
                                  "    try: bad()\n"
                                  "    except m.Refused as e: assert e.code == 'REFUSED', e\n"
                                  "    else: raise AssertionError('accepted')\n"
                                  "assert 0 < c.ping() < 5 and c.stats()['streams']['used'] == 1\n"
                                  "s.close()\n"
                                  "assert c.stats()['streams']['used'] == 0\n"
                                  "c.open(); c.close()\n"
                                  "try: m.Client('/nowhere')\n"
                                  "except m.Closed as e: assert 'no mkd listens' in str(e)\n"
                                  "print('fine')\n";

static int shell(const char *command, char *dst, size_t cap)
{
    FILE *p = popen(command, "r");
    assert_non_null(p);
    dst[fread(dst, 1, cap - 1, p)] = 0;
    return pclose(p);
}

static void test_python(void **state)
{
    (void)state;
    const char *py = python();
    if (!py) {
        print_message("no python3 with pyzmq here: the live part of the Python client is not tested\n");
        skip();
    }
    rig *r = rig_start(150);
    char command[512], path[] = "/tmp/mkd_script_XXXXXX";
    snprintf(command, sizeof command, "%s -B ipc/mkd_client.py '%s' --prompt-ids 1,2,3 --max-new 64 2>&1", py, r->dir);
    if (shell(command, out, sizeof out)) fail_msg("%s", out);
    char expected[1024] = "";
    for (uint32_t p = 3; p < 67; p++) snprintf(expected + strlen(expected), sizeof expected - strlen(expected), "%u ", fake_token(p));
    assert_memory_equal(out, expected, strlen(expected));
    assert_non_null(strstr(out, "length: 64 tokens, first after "));
    snprintf(command, sizeof command, "%s -B ipc/mkd_client.py '%s' --prompt-ids 1,5000 2>&1", py, r->dir);
    assert_int_not_equal(shell(command, out, sizeof out), 0);
    assert_non_null(strstr(out, "mkd_client.py: APPEND: token id 5000 (the 1-th) is outside"));

    int fd = mkstemp(path);
    assert_int_equal(write(fd, script, strlen(script)), strlen(script));
    close(fd);
    snprintf(command, sizeof command, "PYTHONSAFEPATH=1 %s -B %s '%s' 2>&1", py, path, r->dir); /* not what else lies in /tmp */
    int rc = shell(command, out, sizeof out);
    unlink(path);
    if (rc) fail_msg("%s", out);
    assert_string_equal(out, "fine\n");
    raw *w = raw_new(r);
    raw_hello(w);
    raw_until(w, "streams", "used", 0);
    assert_int_equal(raw_stat(w, "wire", "clients_dropped"), 0);
    raw_free(w);
    rig_stop(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_session),     cmocka_unit_test(test_refusals),        cmocka_unit_test(test_cancel_and_timeouts),
        cmocka_unit_test(test_busy_program), cmocka_unit_test(test_daemon_goes),     cmocka_unit_test(test_daemon_restarts),
        cmocka_unit_test(test_daemon_lies),
        cmocka_unit_test(test_threads),     cmocka_unit_test(test_mkctl),           cmocka_unit_test(test_python),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
