/* The server over a test double of the engine: what a session looks like, what bad input gets, who is dropped and who is not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/fake/server.h"

#include <math.h>
#include <sys/stat.h>
#include <sys/socket.h>
#include <sys/un.h>

static void test_session(void **state)
{
    (void)state;
    rig *r = rig_start(0);
    raw *c = raw_new(r);
    raw_hello(c);
    const mk_wire_welcome *w = &c->m.welcome;
    assert_true(w->vocab == FAKE_VOCAB && w->context == FAKE_CONTEXT && w->streams == FAKE_SLOTS && w->layers == 3 && w->mixer[1] == 2 &&
                w->mixer[2] == 1 && w->ffn[1] == 1 && w->ffn[2] == 2 && w->n_stop == 1 && w->stop[0] == 999 && w->beat_ms == 1000 &&
                w->beats == 5 && w->features == (MK_FEATURE_APPEND_LOGPROBS | MK_FEATURE_TRACE) && w->pool_tokens == FAKE_SLOTS * FAKE_CONTEXT &&
                w->max_ids == MK_WIRE_MAX_IDS && w->max_frame == MK_WIRE_MAX_FRAME);
    const char *strings[] = {"fake", "FakeForCausalLM", "test?1", "no device: a test's double"};
    for (int i = 0; i < 4; i++) {
        mk_wire_welcome_string(&c->m, i, c->text, sizeof c->text);
        assert_string_equal(c->text, strings[i]);
    }
    uint64_t s = raw_open(c, MK_WIRE_NO_WINDOW);
    assert_true(c->m.opened.context == FAKE_CONTEXT && c->m.opened.window == MK_WIRE_NO_WINDOW);
    raw_append(c, s); /* GENERATE does not wait for APPENDED */
    raw_generate(c, s, 100, 77);
    raw_expect(c, MK_WIRE_APPENDED);
    assert_true(c->m.h.request == 13 && c->m.h.stream == s && c->m.appended.position == 3 && c->m.appended.appended == 3 &&
                c->m.appended.reason == 0 && c->m.n == 0);
    uint32_t n;
    assert_int_equal(raw_tokens(c, s, 3, 5000, &n), MK_WIRE_DONE);
    assert_int_equal(n, 100);
    const mk_wire_done *d = &c->m.done;
    assert_true(c->m.h.request == 77 && d->reason == MK_WIRE_LENGTH && d->position == 103 && d->prompt_tokens == 3 && d->generated == 100);
    assert_true(d->first_ns > 0 && d->total_ns > d->first_ns && d->prompt_ns > 0);
    assert_int_equal(raw_recv(c, 50), 0); /* one DONE */

    raw_generate(c, s, 1000, 78); /* the model's stop id, delivered, at position 428 */
    assert_int_equal(raw_tokens(c, s, 103, 5000, &n), MK_WIRE_DONE);
    assert_true(c->m.done.reason == MK_WIRE_STOP && c->m.done.position == 429 && n == 326);

    uint32_t stop = fake_token(440); /* the request's own */
    raw_send(c, MK_WIRE_GENERATE, MK_GENERATE_STOP, s, 79, &(mk_wire_generate){.max_new = 1000, .n = 1}, &stop);
    assert_int_equal(raw_tokens(c, s, 429, 5000, &n), MK_WIRE_DONE);
    assert_true(c->m.done.reason == MK_WIRE_STOP && c->m.done.position == 441);

    raw_send(c, MK_WIRE_CANCEL, 0, s, 80, NULL, NULL); /* nothing runs: no answer */
    assert_int_equal(raw_recv(c, 50), 0);
    raw_generate(c, s, 1000000, 81);
    raw_expect(c, MK_WIRE_TOKENS);
    raw_send(c, MK_WIRE_CANCEL, 0, s, 82, NULL, NULL);
    int type;
    while ((type = raw_recv(c, 5000)) == MK_WIRE_TOKENS) {}
    assert_true(type == MK_WIRE_DONE && c->m.h.request == 81 && c->m.done.reason == MK_WIRE_CANCELLED);

    raw_generate(c, s, 1000000, 83); /* CLOSE in the middle: DONE, then CLOSED */
    raw_expect(c, MK_WIRE_TOKENS);
    raw_send(c, MK_WIRE_CLOSE, 0, s, 84, NULL, NULL);
    while ((type = raw_recv(c, 5000)) == MK_WIRE_TOKENS) {}
    assert_true(type == MK_WIRE_DONE && c->m.h.request == 83 && c->m.done.reason == MK_WIRE_CANCELLED);
    raw_expect(c, MK_WIRE_CLOSED);
    assert_true(c->m.h.request == 84 && c->m.h.stream == s);
    raw_alive(c);
    assert_int_equal(raw_stat(c, "streams", "used"), 0);
    assert_int_equal(raw_stat(c, "wire", "bad_frames"), 0);
    raw_free(c);
    rig_stop(r);
}

static void test_open_options(void **state)
{
    (void)state;
    rig *r = rig_start(0);
    raw *c = raw_new(r);
    raw_hello(c);
    mk_wire_open o = {
        .context = 10, .window = 5, .seed = 9, .temperature = 0.5f, .top_p = 0.75f, .min_p = 0.125f, .top_k = 4, .n = 2};
    raw_send(c, MK_WIRE_OPEN, MK_OPEN_SAMPLING | MK_OPEN_STOP, 0, 1, &o, (uint32_t[]){7, 8});
    raw_expect(c, MK_WIRE_OPENED);
    const mk_open *got = &r->s->s[0].open; /* not touched any more */
    assert_true(got->context == 10 && got->credits == 5 && got->sampling.seed == 9 && got->sampling.temperature == 0.5f &&
                got->sampling.top_p == 0.75f && got->sampling.min_p == 0.125f && got->sampling.top_k == 4 && got->n_stop == 2 &&
                got->stop[1] == 8);
    assert_true(c->m.opened.context == 10 && c->m.opened.window == 5);
    raw_open(c, MK_WIRE_NO_WINDOW); /* defaults: the model's */
    got = &r->s->s[1].open;
    assert_true(got->credits == ~0ull && got->sampling.temperature == 0 && got->sampling.top_p == 1 && got->n_stop == 1 &&
                got->stop[0] == 999);
    raw_send(c, MK_WIRE_OPEN, MK_OPEN_STOP, 0, 1, &(mk_wire_open){0}, NULL); /* no stop ids at all */
    raw_expect(c, MK_WIRE_OPENED);
    assert_int_equal(r->s->s[2].open.n_stop, 0);
    raw_free(c);
    rig_stop(r);
}

/* PIN is served by daemons that were started for it, and by no other. */
static void test_open_pinned(void **state)
{
    (void)state;
    for (int pin = 0; pin < 2; pin++) {
        fake_pin = pin;
        rig *r = rig_start(0);
        raw *c = raw_new(r);
        raw_hello(c);
        assert_int_equal(c->m.welcome.features & MK_FEATURE_PIN, pin ? MK_FEATURE_PIN : 0);
        raw_send(c, MK_WIRE_OPEN, 0, 0, 1, &(mk_wire_open){.pin = MK_WIRE_PIN(100, 2)}, NULL);
        raw_expect(c, MK_WIRE_ERR);
        assert_int_equal(c->m.err.code, MK_WIRE_E_REFUSED);
        raw_send(c, MK_WIRE_OPEN, MK_OPEN_PIN, 0, 2, &(mk_wire_open){.pin = MK_WIRE_PIN(100, 2), .seed = 3}, NULL);
        raw_expect(c, pin ? MK_WIRE_OPENED : MK_WIRE_ERR);
        if (pin)
            assert_true(r->s->s[0].open.pin == 100 && r->s->s[0].open.pin_rows == 2 && r->s->s[0].open.sampling.seed == 3);
        else
            assert_int_equal(c->m.err.code, MK_WIRE_E_UNSUPPORTED);
        raw_free(c);
        rig_stop(r);
    }
    fake_pin = 0;
}

static void test_append_logprobs(void **state)
{
    (void)state;
    rig *r = rig_start(0);
    raw *c = raw_new(r);
    raw_hello(c);
    uint64_t s = raw_open(c, 0);
    uint32_t ids[500];
    for (uint32_t i = 0; i < 500; i++) ids[i] = (i * 37 + 5) % FAKE_VOCAB;
    atomic_store(&fake_us, 20000); /* all three are outstanding together */
    raw_send(c, MK_WIRE_APPEND, MK_APPEND_WITH_LOGPROBS, s, 1, &(mk_wire_append){.n = 200}, ids);
    raw_send(c, MK_WIRE_APPEND, 0, s, 2, &(mk_wire_append){.n = 100}, ids + 200);
    raw_send(c, MK_WIRE_APPEND, MK_APPEND_WITH_LOGPROBS, s, 3, &(mk_wire_append){.n = 200}, ids + 300);
    const uint32_t end[] = {200, 300, 500}, n[] = {200, 0, 200}, base[] = {0, 200, 300};
    for (int k = 0; k < 3; k++) {
        raw_expect(c, MK_WIRE_APPENDED);
        assert_true(c->m.h.request == (uint64_t)k + 1 && c->m.appended.position == end[k] && c->m.n == n[k]);
        float lp[200];
        mk_wire_items(&c->m, lp, 200);
        for (uint32_t i = 0; i < n[k]; i++) {
            if (base[k] + i == 0)
                assert_true(isnan(lp[i]));
            else
                assert_true(lp[i] == -(float)ids[base[k] + i] / 1000);
        }
    }
    raw_free(c);
    rig_stop(r);
}

/* ---- bad input ------------------------------------------------------------------------------------------------------ */

static size_t frame_of(unsigned char *f, uint16_t type, uint64_t stream, const void *fixed, const void *items)
{
    size_t n = mk_wire_encode(f, 4096, type, 0, stream, 21, fixed, items);
    assert_true(n > 0);
    return n;
}

static void test_bad_frames(void **state)
{
    (void)state;
    rig *r = rig_start(0);
    uint64_t s;
    raw *c = raw_ready(r, MK_WIRE_NO_WINDOW, &s);
    raw_generate(c, s, 30, 500); /* runs through all of it */
    unsigned char f[4096] = {0};
    size_t n = frame_of(f, MK_WIRE_APPEND, s, &(mk_wire_append){.n = 2}, (uint32_t[]){1, 2});
    raw *b = raw_new(r); /* says all the nonsense */
    raw_hello(b);
    long bad = 0;
#define PUT(at, type, value) memcpy(f + (at), &(type){value}, sizeof(type))
#define REFUSED(size, code, about, text) (raw_bytes(b, f, size), raw_expect_err(b, code, about, text), bad++)
    REFUSED(0, MK_WIRE_E_FRAME, 0, "frame too short: bytes 0, expected 32");
    REFUSED(5, MK_WIRE_E_FRAME, 0, "frame too short: bytes 5, expected 32");
    REFUSED(31, MK_WIRE_E_FRAME, 0, "frame too short: bytes 31, expected 32");
    REFUSED(32, MK_WIRE_E_FRAME, MK_WIRE_APPEND, "APPEND: length in the header 16, expected 0");
    REFUSED(n - 1, MK_WIRE_E_FRAME, MK_WIRE_APPEND, "APPEND: length in the header 16, expected 15");
    REFUSED(n + 1, MK_WIRE_E_FRAME, MK_WIRE_APPEND, "APPEND: length in the header 16, expected 17");
    assert_true(b->m.h.request == 21 && b->m.h.stream == s); /* the header is echoed */
    PUT(0, uint32_t, 0x0badf00d);
    REFUSED(n, MK_WIRE_E_FRAME, 0, "wrong magic 0x0badf00d, expected 0x57444b4d");
    PUT(0, uint32_t, MK_WIRE_MAGIC);
    PUT(4, uint16_t, 9);
    REFUSED(n, MK_WIRE_E_VERSION, MK_WIRE_APPEND, "protocol version 9, expected 1");
    PUT(4, uint16_t, 1);
    PUT(6, uint16_t, 300);
    REFUSED(n, MK_WIRE_E_TYPE, 300, "unknown message type 300");
    PUT(6, uint16_t, MK_WIRE_TOKENS);
    REFUSED(n, MK_WIRE_E_TYPE, MK_WIRE_TOKENS, "TOKENS is sent by the daemon only");
    PUT(6, uint16_t, MK_WIRE_APPEND);
    PUT(8, uint32_t, 6);
    REFUSED(n, MK_WIRE_E_UNSUPPORTED, MK_WIRE_APPEND, "APPEND: unsupported flags 0x6 (supported: 0x1)");
    PUT(8, uint32_t, 0);
    PUT(32, uint32_t, 1);
    REFUSED(n, MK_WIRE_E_UNSUPPORTED, MK_WIRE_APPEND, "APPEND: field reserved (payload offset 0) is not zero");
    PUT(32, uint32_t, 0);
    PUT(36, uint32_t, 0x40000002); /* times 4 it is 8 in 32 bits */
    REFUSED(n, MK_WIRE_E_FRAME, MK_WIRE_APPEND, "APPEND: 1073741826 items, the limit is 65536");
    PUT(36, uint32_t, 3);
    REFUSED(n, MK_WIRE_E_FRAME, MK_WIRE_APPEND, "APPEND: bytes after the fixed part 8, expected 12");
    PUT(36, uint32_t, 2);
    PUT(16, uint64_t, 0);
    REFUSED(n, MK_WIRE_E_REFUSED, MK_WIRE_APPEND, "APPEND: header field stream is 0, expected a stream's number");
    n = frame_of(f, MK_WIRE_OPEN, 0, &(mk_wire_open){0}, NULL);
    PUT(16, uint64_t, 4);
    REFUSED(n, MK_WIRE_E_UNSUPPORTED, MK_WIRE_OPEN, "OPEN: header field stream is 4, expected 0");

    n = frame_of(f, MK_WIRE_PING, 0, &(mk_wire_ping){1}, NULL); /* two ZeroMQ frames; a REQ socket's empty one */
    assert_int_equal(zmq_send(b->sock, "", 0, ZMQ_SNDMORE), 0);
    REFUSED(n, MK_WIRE_E_FRAME, 0, "a message of 2 frames, expected 1");
    for (int i = 0; i < 200; i++) zmq_send(b->sock, f, n, ZMQ_SNDMORE);
    REFUSED(n, MK_WIRE_E_FRAME, 0, "a message of 201 frames, expected 1");

    unsigned char *big = calloc(1, MK_WIRE_CUT + 1);
    memcpy(big, f, n);
    raw_bytes(b, big, MK_WIRE_MAX_FRAME + 1);
    raw_expect_err(b, MK_WIRE_E_FRAME, MK_WIRE_PING, "PING: frame too long: 524289 bytes, the limit is 524288");
    bad++;
    assert_int_equal(raw_stat(b, "wire", "bad_frames"), bad);
    raw_bytes(b, big, MK_WIRE_CUT + 1); /* ZeroMQ hangs up; the client comes back as a stranger */
    free(big);
    usleep(300000);
    raw_send(b, MK_WIRE_STATS, 0, 0, 1, NULL, NULL);
    raw_expect_err(b, MK_WIRE_E_HELLO, MK_WIRE_STATS, "say HELLO first");

    uint32_t got; /* and the other client has seen nothing of it */
    assert_int_equal(raw_tokens(c, s, 3, 5000, &got), MK_WIRE_DONE);
    assert_int_equal(got, 30);
    raw_alive(c);
    raw_free(b);
    raw_free(c);
    rig_stop(r);
}

static void test_refused_requests(void **state)
{
    (void)state;
    rig *r = rig_start(0);
    raw *c = raw_new(r);
    raw_send(c, MK_WIRE_OPEN, 0, 0, 31, &(mk_wire_open){0}, NULL);
    raw_expect_err(c, MK_WIRE_E_HELLO, MK_WIRE_OPEN, "OPEN: say HELLO first");
    assert_int_equal(c->m.h.request, 31);
    raw_hello(c);
    raw_hello(c); /* again, harmless */
    uint64_t s = raw_open(c, MK_WIRE_NO_WINDOW);

#define OPEN_REFUSED(flags, text, ...)                                                                                                     \
    (raw_send(c, MK_WIRE_OPEN, flags, 0, 32, &(mk_wire_open){__VA_ARGS__}, (uint32_t[]){5, FAKE_VOCAB}),                                   \
     raw_expect_err(c, MK_WIRE_E_REFUSED, MK_WIRE_OPEN, text))
    OPEN_REFUSED(0, "OPEN: temperature, top_p, min_p or top_k set without the flag SAMPLING", .top_k = 3);
    OPEN_REFUSED(0, "OPEN: temperature, top_p, min_p or top_k set without the flag SAMPLING", .temperature = NAN);
    OPEN_REFUSED(MK_OPEN_SAMPLING, "OPEN: temperature -1 is outside [0, 100]", .temperature = -1, .top_p = 1);
    OPEN_REFUSED(MK_OPEN_SAMPLING, "OPEN: temperature nan is outside", .temperature = NAN, .top_p = 1);
    OPEN_REFUSED(MK_OPEN_SAMPLING, "OPEN: temperature inf is outside", .temperature = INFINITY, .top_p = 1);
    OPEN_REFUSED(MK_OPEN_SAMPLING, "OPEN: top_p 0 is outside (0, 1]", .temperature = 1);
    OPEN_REFUSED(MK_OPEN_SAMPLING, "OPEN: min_p 2 is outside [0, 1]", .top_p = 1, .min_p = 2);
    OPEN_REFUSED(0, "OPEN: 2 stop ids without the flag STOP", .n = 2);
    OPEN_REFUSED(MK_OPEN_STOP, "OPEN: stop id 1000 is outside the vocabulary of 1000", .n = 2);
    OPEN_REFUSED(0, "OPEN: context of 5000 tokens, the limit is 4096", .context = 5000);

#define STREAM_REFUSED(type, code, number, text, body, items)                                                                              \
    (raw_send(c, type, 0, number, 33, body, items), raw_expect_err(c, code, type, text))
    STREAM_REFUSED(MK_WIRE_APPEND, MK_WIRE_E_REFUSED, s, "APPEND: token id 1000 (the 1-th) is outside the vocabulary of 1000",
                   (&(mk_wire_append){.n = 2}), ((uint32_t[]){5, FAKE_VOCAB}));
    STREAM_REFUSED(MK_WIRE_APPEND, MK_WIRE_E_REFUSED, s, "APPEND: no token ids, expected at least 1", &(mk_wire_append){0}, NULL);
    uint32_t *many = calloc(FAKE_CONTEXT + 1, 4);
    STREAM_REFUSED(MK_WIRE_APPEND, MK_WIRE_E_REFUSED, s, "over the stream's context of 4096", (&(mk_wire_append){.n = FAKE_CONTEXT + 1}), many);
    free(many);
    STREAM_REFUSED(MK_WIRE_GENERATE, MK_WIRE_E_REFUSED, s, "is empty", &(mk_wire_generate){.max_new = 1}, NULL);
    raw_append(c, s);
    raw_expect(c, MK_WIRE_APPENDED);
    STREAM_REFUSED(MK_WIRE_GENERATE, MK_WIRE_E_REFUSED, s, "max_new is 0", &(mk_wire_generate){0}, NULL);
    STREAM_REFUSED(MK_WIRE_GENERATE, MK_WIRE_E_REFUSED, s, "1 stop ids without the flag STOP", (&(mk_wire_generate){.max_new = 1, .n = 1}),
                   &(uint32_t){1});
    raw_send(c, MK_WIRE_GENERATE, MK_GENERATE_STOP, s, 34, &(mk_wire_generate){.max_new = 1, .n = 1}, &(uint32_t){0xffffffff});
    raw_expect_err(c, MK_WIRE_E_REFUSED, MK_WIRE_GENERATE, "stop id 4294967295 is outside the vocabulary");

    /* laid out, not served */
    STREAM_REFUSED(MK_WIRE_FORK, MK_WIRE_E_UNSUPPORTED, s, "FORK: this daemon does not serve it", &(mk_wire_fork){0}, NULL);
    STREAM_REFUSED(MK_WIRE_ROLLBACK, MK_WIRE_E_UNSUPPORTED, s, "ROLLBACK: this daemon", &(mk_wire_rollback){0}, NULL);
    STREAM_REFUSED(MK_WIRE_CHECKPOINT, MK_WIRE_E_UNSUPPORTED, s, "CHECKPOINT: this daemon", NULL, NULL);
    STREAM_REFUSED(MK_WIRE_VERIFY, MK_WIRE_E_UNSUPPORTED, s, "VERIFY: this daemon", &(mk_wire_verify){0}, NULL);

    raw_send(c, MK_WIRE_INJECT, 0, 0, 35, &(mk_wire_inject){.what = MK_WIRE_INJECT_HANG}, NULL);
    raw_expect_err(c, MK_WIRE_E_UNSUPPORTED, MK_WIRE_INJECT, "INJECT: this daemon was built without fault injection");

    /* another client's stream, and one that nobody has: the same answer */
    raw *d = raw_new(r);
    raw_hello(d);
    for (int k = 0; k < 2; k++) {
        uint64_t id = k ? s + 1000000 : s;
        raw_send(d, MK_WIRE_APPEND, 0, id, 1, &(mk_wire_append){.n = 1}, &(uint32_t){1});
        raw_expect_err(d, MK_WIRE_E_REFUSED, MK_WIRE_APPEND, "is not one of yours");
        raw_generate(d, id, 5, 2);
        raw_expect_err(d, MK_WIRE_E_REFUSED, MK_WIRE_GENERATE, "is not one of yours");
        raw_send(d, MK_WIRE_CANCEL, 0, id, 3, NULL, NULL);
        raw_expect_err(d, MK_WIRE_E_REFUSED, MK_WIRE_CANCEL, "is not one of yours");
        raw_send(d, MK_WIRE_CLOSE, 0, id, 4, NULL, NULL);
        raw_expect_err(d, MK_WIRE_E_REFUSED, MK_WIRE_CLOSE, "is not one of yours");
        raw_send(d, MK_WIRE_CREDIT, 0, id, 5, &(mk_wire_credit){.tokens = 1}, NULL);
        raw_expect_err(d, MK_WIRE_E_REFUSED, MK_WIRE_CREDIT, "is not one of yours");
    }
    /* busy */
    atomic_store(&fake_us, 3000);
    raw_generate(c, s, 1000000, 35);
    raw_generate(c, s, 5, 36);
    int type;
    while ((type = raw_recv(c, 5000)) == MK_WIRE_TOKENS) {}
    assert_true(type == MK_WIRE_ERR && c->m.h.request == 36 && c->m.err.code == MK_WIRE_E_REFUSED && strstr(c->text, "is busy"));
    /* full */
    for (uint32_t i = 1; i < FAKE_SLOTS; i++) raw_open(d, 0);
    raw_send(d, MK_WIRE_OPEN, 0, 0, 6, &(mk_wire_open){0}, NULL);
    raw_expect_err(d, MK_WIRE_E_CAPACITY, MK_WIRE_OPEN, "OPEN: all 8 stream slots are in use");
    raw_alive(d);
    raw_free(d);
    raw_free(c);
    rig_stop(r);
}

static uint64_t seed = 5;
static uint32_t rnd(void)
{
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(seed >> 33);
}

/* Half-valid noise from one client, while another generates. */
static void test_fuzz(void **state)
{
    (void)state;
    rig *r = rig_start(0);
    uint64_t s;
    raw *c = raw_ready(r, MK_WIRE_NO_WINDOW, &s), *b = raw_new(r);
    raw_hello(b);
    uint64_t own = raw_open(b, 1000);
    raw_generate(c, s, 400, 1);
    for (int i = 0; i < 20000; i++) {
        unsigned char f[256];
        uint32_t n = rnd() % sizeof f;
        for (uint32_t k = 0; k < n; k++) f[k] = (unsigned char)rnd();
        if (n >= 32 && i % 8) {
            mk_wire_header h = {MK_WIRE_MAGIC, 1, (uint16_t)(rnd() % 28), i % 16 ? 0 : rnd() % 4, n - 32, rnd() % 2 ? own : rnd() % 9, rnd()};
            const mk_wire_type *t = mk_wire_type_of(h.type);
            if (t && t->stream == 0 && rnd() % 4) h.stream = 0;
            if (t && !t->item && n >= 32u + t->fixed) n = 32u + t->fixed;
            h.length = n - 32;
            memcpy(f, &h, sizeof h);
            if (t && t->reserved_size && n > 32u + t->fixed) memset(f + 32 + t->reserved_at, 0, t->reserved_size);
            if (t && t->item && n >= 32u + t->fixed) {
                uint32_t items = (n - 32 - t->fixed) / t->item;
                memcpy(f + 32 + t->fixed - 4, &items, 4);
                n = 32 + t->fixed + items * t->item;
                memcpy(f + 12, &(uint32_t){n - 32}, 4);
            }
        }
        zmq_send(b->sock, f, n, 0);
        while (zmq_recv(b->sock, b->frame, sizeof b->frame, ZMQ_DONTWAIT) >= 0) {}
    }
    uint32_t n;
    assert_int_equal(raw_tokens(c, s, 3, 5000, &n), MK_WIRE_DONE);
    assert_int_equal(n, 400);
    assert_true(raw_stat(c, "wire", "bad_frames") > 1000);
    raw_alive(c);
    raw_free(b);
    raw_free(c);
    rig_stop(r);
}

/* ---- who is dropped ------------------------------------------------------------------------------------------------- */

static void test_liveness(void **state)
{
    (void)state;
    rig *r = rig_start(100);
    uint64_t s1, s2;
    raw *dead = raw_ready(r, MK_WIRE_NO_WINDOW, &s1), *alive = raw_ready(r, MK_WIRE_NO_WINDOW, &s2), *idle = raw_new(r);
    raw_hello(idle);
    assert_int_equal(idle->m.welcome.beat_ms, 100);
    dead->mute = 1; /* reads, never answers */
    raw_generate(dead, s1, 1000000, 1);
    uint64_t start = fake_now();
    for (;;) { /* the other one only answers PINGs meanwhile */
        assert_int_equal(raw_recv(alive, 5), 0);
        int type;
        while ((type = raw_recv(dead, 5)) == MK_WIRE_TOKENS) {}
        if (type == MK_WIRE_ERR) break;
        assert_true(type == 0 || type == MK_WIRE_DONE);
        assert_true(fake_now() - start < 20000000000u);
    }
    uint64_t took = (fake_now() - start) / 1000000;
    assert_int_equal(dead->m.err.code, MK_WIRE_E_DROPPED);
    assert_non_null(strstr(dead->text, "nothing came from it for"));
    assert_in_range(took, 450, 15000); /* five intervals, and the machine's mood */
    assert_true(dead->pings >= 2 && alive->pings >= 2);
    raw_until(alive, "streams", "used", 1);
    assert_int_equal(raw_stat(alive, "wire", "clients_dropped"), 1);
    raw_generate(dead, s1, 5, 2); /* it comes back as a stranger */
    raw_expect_err(dead, MK_WIRE_E_HELLO, MK_WIRE_GENERATE, "say HELLO first");
    raw_hello(dead);
    raw_generate(dead, s1, 5, 3);
    raw_expect_err(dead, MK_WIRE_E_REFUSED, MK_WIRE_GENERATE, "is not one of yours");
    raw_alive(idle); /* no streams: silence is fine, and nobody asks */
    assert_int_equal(idle->pings, 0);
    uint32_t n;
    raw_generate(alive, s2, 10, 4);
    assert_int_equal(raw_tokens(alive, s2, 3, 5000, &n), MK_WIRE_DONE);
    raw_free(dead);
    raw_free(alive);
    raw_free(idle);
    rig_stop(r);
}

static void test_client_vanishes(void **state)
{
    (void)state;
    rig *r = rig_start(0);
    uint64_t s, s2;
    raw *other = raw_ready(r, MK_WIRE_NO_WINDOW, &s2);
    raw *c = raw_ready(r, MK_WIRE_NO_WINDOW, &s);
    raw_open(c, 0);
    atomic_store(&fake_us, 3000);
    raw_generate(c, s, 1000000, 1);
    raw_expect(c, MK_WIRE_TOKENS);
    assert_int_equal(raw_stat(other, "streams", "used"), 3);
    uint64_t start = fake_now();
    raw_free(c); /* what a kill does: the socket is gone, nothing was said */
    raw_until(other, "streams", "used", 1);
    assert_true(fake_now() - start < 2000000000u); /* found by the next token, not by five seconds of silence */
    assert_int_equal(raw_stat(other, "requests", "running"), 0);
    assert_int_equal(raw_stat(other, "wire", "clients_dropped"), 1);
    uint32_t n;
    raw_generate(other, s2, 10, 4);
    assert_int_equal(raw_tokens(other, s2, 3, 5000, &n), MK_WIRE_DONE);
    raw_free(other);
    rig_stop(r);
}

static void test_credits(void **state)
{
    (void)state;
    rig *r = rig_start(0);
    uint64_t slow, fast, n2;
    raw *a = raw_ready(r, 4, &slow), *b = raw_ready(r, MK_WIRE_NO_WINDOW, &fast);
    uint32_t n;
    raw_generate(a, slow, 50, 1);
    raw_generate(b, fast, 200, 2);
    assert_int_equal(raw_tokens(a, slow, 3, 200, &n), 0);
    assert_int_equal(n, 4); /* the window, and it waits */
    assert_int_equal(raw_tokens(b, fast, 3, 5000, &n), MK_WIRE_DONE);
    assert_int_equal(n, 200); /* nobody else does */
    raw_send(a, MK_WIRE_CREDIT, 0, slow, 3, &(mk_wire_credit){.tokens = 3}, NULL);
    assert_int_equal(raw_tokens(a, slow, 7, 200, &n), 0);
    assert_int_equal(n, 3);
    raw_send(a, MK_WIRE_CREDIT, 0, slow, 4, &(mk_wire_credit){.tokens = 1000}, NULL);
    assert_int_equal(raw_tokens(a, slow, 10, 5000, &n), MK_WIRE_DONE);
    assert_int_equal(n, 43);
    n2 = raw_open(b, 0); /* starts paused, and can be cancelled so */
    raw_append(b, n2);
    raw_expect(b, MK_WIRE_APPENDED);
    raw_generate(b, n2, 5, 5);
    assert_int_equal(raw_recv(b, 100), 0);
    raw_send(b, MK_WIRE_CANCEL, 0, n2, 6, NULL, NULL);
    raw_expect(b, MK_WIRE_DONE);
    assert_true(b->m.done.reason == MK_WIRE_CANCELLED && b->m.done.generated == 0 && b->m.done.first_ns == 0);
    raw_free(a);
    raw_free(b);
    rig_stop(r);
}

/* A client that asks and never reads: what waits for it is bounded, then it is dropped, and nobody else notices. */
static void test_never_reads(void **state)
{
    (void)state;
    rig *r = rig_start(0);
    uint64_t s, s2;
    raw *c = raw_ready(r, MK_WIRE_NO_WINDOW, &s), *other = raw_ready(r, MK_WIRE_NO_WINDOW, &s2);
    unsigned char f[64];
    size_t size = frame_of(f, MK_WIRE_PING, 0, &(mk_wire_ping){1}, NULL);
    for (int i = 0; i < 100000; i++) raw_bytes(c, f, size);
    raw_until(other, "wire", "overruns", 1);
    assert_int_equal(raw_stat(other, "wire", "clients_dropped"), 1);
    raw_until(other, "streams", "used", 1);
    uint32_t n;
    raw_generate(other, s2, 10, 4);
    assert_int_equal(raw_tokens(other, s2, 3, 5000, &n), MK_WIRE_DONE);
    raw_free(c);
    raw_free(other);
    rig_stop(r);
}

/* Tokens that are there together travel together. */
static void test_batches(void **state)
{
    (void)state;
    rig *r = rig_start(0);
    uint64_t s;
    raw *c = raw_ready(r, MK_WIRE_NO_WINDOW, &s);
    atomic_store(&fake_frozen, 1);
    raw_generate(c, s, 200, 1);
    raw_until(c, "requests", "running", 1);
    pthread_mutex_lock(&r->s->lock); /* the server waits here; the machine has run ahead when it goes on */
    while (r->s->s[0].running) fake_step(r->s, &r->s->s[0]);
    pthread_mutex_unlock(&r->s->lock);
    unsigned messages = 0, tokens = 0;
    while (raw_recv(c, 5000) == MK_WIRE_TOKENS) {
        messages++;
        tokens += c->m.n;
    }
    assert_int_equal(c->m.h.type, MK_WIRE_DONE);
    assert_int_equal(tokens, 200);
    assert_in_range(messages, 4, 150);
    raw_free(c);
    rig_stop(r);
}

/* ---- stopping ------------------------------------------------------------------------------------------------------- */

static void test_drain(void **state)
{
    (void)state;
    rig *r = rig_start(0);
    uint64_t s;
    raw *c = raw_ready(r, MK_WIRE_NO_WINDOW, &s);
    atomic_store(&fake_us, 3000);
    raw_generate(c, s, 100, 1);
    raw_expect(c, MK_WIRE_TOKENS);
    uint32_t first = c->m.n, n;
    mk_server_drain(r->v, 30);
    usleep(20000);
    raw_send(c, MK_WIRE_OPEN, 0, 0, 2, &(mk_wire_open){0}, NULL);
    raw_send(c, MK_WIRE_APPEND, 0, s, 3, &(mk_wire_append){.n = 1}, &(uint32_t){1});
    raw_generate(c, s, 1, 4);
    unsigned refused = 0;
    int type;
    for (n = first; (type = raw_recv(c, 5000)) != MK_WIRE_DONE;) {
        assert_true(type == MK_WIRE_TOKENS || type == MK_WIRE_ERR);
        if (type == MK_WIRE_ERR) {
            assert_int_equal(c->m.err.code, MK_WIRE_E_DRAINING);
            assert_non_null(strstr(c->text, "the daemon is about to stop"));
            refused++;
        } else {
            n += c->m.n;
        }
    }
    assert_int_equal(refused, 3);
    assert_int_equal(n, 100); /* what ran is finished */
    assert_int_equal(c->m.done.reason, MK_WIRE_LENGTH);
    assert_int_equal(rig_join(r), MK_OK);
    raw_free(c);
    rig_stop(r);
}

static void test_drain_limit_and_abort(void **state)
{
    (void)state;
    for (int abort_it = 0; abort_it < 2; abort_it++) {
        rig *r = rig_start(0);
        uint64_t s;
        raw *c = raw_ready(r, MK_WIRE_NO_WINDOW, &s);
        atomic_store(&fake_us, 3000);
        raw_generate(c, s, 1000000, 1);
        raw_expect(c, MK_WIRE_TOKENS);
        uint64_t start = fake_now();
        mk_server_drain(r->v, abort_it ? 60 : 0.2);
        if (abort_it) {
            usleep(50000);
            mk_server_abort(r->v);
        }
        assert_int_equal(rig_join(r), MK_E_TIMEOUT);
        assert_string_equal(r->err.msg, abort_it ? "aborted with 1 requests running" : "drain limit reached with 1 requests running");
        assert_true(fake_now() - start < 3000000000u);
        int type;
        while ((type = raw_recv(c, 5000)) == MK_WIRE_TOKENS) {}
        assert_int_equal(type, MK_WIRE_DONE); /* it has its DONE all the same */
        assert_int_equal(c->m.done.reason, MK_WIRE_CANCELLED);
        raw_free(c);
        rig_stop(r);
    }
    rig *r = rig_start(0); /* nothing runs: at once, also when the engine hangs */
    atomic_store(&fake_frozen, 1);
    mk_server_drain(r->v, 60);
    assert_int_equal(rig_join(r), MK_OK);
    rig_stop(r);
    r = rig_start(0);
    uint64_t s;
    raw *c = raw_ready(r, MK_WIRE_NO_WINDOW, &s);
    raw_generate(c, s, 1000000, 1);
    raw_expect(c, MK_WIRE_TOKENS);
    atomic_store(&fake_frozen, 1); /* a hanging engine holds it up for a second only */
    uint64_t start = fake_now();
    mk_server_abort(r->v);
    assert_int_equal(rig_join(r), MK_E_TIMEOUT);
    assert_true(fake_now() - start < 3000000000u);
    raw_free(c);
    rig_stop(r);
}

/* ---- sockets -------------------------------------------------------------------------------------------------------- */

static void test_sockets(void **state)
{
    (void)state;
    rig *r = rig_start(0);
    mk_err err = {0};
    /* in use */
    assert_null(mk_server_new(&(mk_server_config){.dir = r->dir}, r->e, r->s, &err));
    assert_int_equal(err.code, MK_E_RUNNING);
    assert_non_null(strstr(err.msg, "/req.sock: another process listens there"));
    char path[256];
    struct stat st;
    snprintf(path, sizeof path, "%s/req.sock", r->dir); /* and it still belongs to the first */
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0660);
    raw *c = raw_new(r);
    raw_hello(c);
    /* too long, missing */
    memset(path, 'x', 120);
    path[0] = '/';
    path[120] = 0;
    assert_null(mk_server_new(&(mk_server_config){.dir = path}, r->e, r->s, &err));
    assert_int_equal(err.code, MK_E_USAGE);
    assert_non_null(strstr(err.msg, "a socket's path has at most 107"));
    assert_null(mk_server_new(&(mk_server_config){.dir = "/nonexistent dir"}, r->e, r->s, &err));
    assert_int_equal(err.code, MK_E_SYSTEM);
    /* statistics are published */
    void *sub = zmq_socket(r->zmq, ZMQ_SUB);
    char url[256], text[2048] = {0};
    snprintf(url, sizeof url, "ipc://%s/stats.sock", r->dir);
    zmq_setsockopt(sub, ZMQ_SUBSCRIBE, "", 0);
    zmq_setsockopt(sub, ZMQ_RCVTIMEO, &(int){5000}, sizeof(int));
    assert_int_equal(zmq_connect(sub, url), 0);
    for (int i = 0; i < 3; i++) {
        int n = zmq_recv(sub, text, sizeof text - 1, 0);
        assert_in_range(n, 100, sizeof text - 1);
        const char *head = "{\"version\":1,\"build\":\"test?1\",\"model\":\"fake\",";
        assert_memory_equal(text, head, strlen(head));
        assert_int_equal(text[n - 1], '}');
    }
    zmq_close(sub);
    raw_free(c);
    rig_stop(r);
}

/* A path that a daemon which was killed has left behind is no obstacle. */
static void test_stale_socket(void **state)
{
    (void)state;
    char dir[] = "/tmp/mkd_stale_XXXXXX", path[128];
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/req.sock", dir);
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    strcpy(a.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    close(fd); /* the path stays, as after a kill -9 */
    mk_engine *e = fake_engine_new();
    mk_streams *s = mk_streams_new(e);
    mk_err err = {0};
    mk_server *v = mk_server_new(&(mk_server_config){.dir = dir}, e, s, &err);
    if (!v) fail_msg("%s", err.msg);
    mk_server_destroy(&v);
    mk_streams_destroy(&s);
    mk_engine_close(&e);
    assert_int_equal(rmdir(dir), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_session),       cmocka_unit_test(test_open_options),    cmocka_unit_test(test_open_pinned), cmocka_unit_test(test_append_logprobs),
        cmocka_unit_test(test_bad_frames),    cmocka_unit_test(test_refused_requests), cmocka_unit_test(test_fuzz),
        cmocka_unit_test(test_liveness),      cmocka_unit_test(test_client_vanishes), cmocka_unit_test(test_credits),
        cmocka_unit_test(test_never_reads),   cmocka_unit_test(test_batches),       cmocka_unit_test(test_drain),           cmocka_unit_test(test_drain_limit_and_abort),
        cmocka_unit_test(test_sockets),       cmocka_unit_test(test_stale_socket),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
