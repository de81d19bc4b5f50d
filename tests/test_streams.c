/* The stream table against the real scheduler and a model that answers by position. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

#include <cmocka.h>

#include "host/streams.h"
#include "tests/fake/mkengine.c"

#define VOCAB 1000u

typedef struct rig {
    mk_engine *e;
    mk_streams *s;
    mk_err err;
} rig;

static rig rig_new(uint32_t slots, uint32_t context, uint32_t pages)
{
    rig g = {.e = fake_engine_new(slots, context, pages, VOCAB)};
    g.s = mk_streams_new(g.e);
    assert_non_null(g.s);
    return g;
}

static void rig_free(rig *g)
{
    mk_streams_destroy(&g->s);
    assert_null(g->s);
    mk_engine_close(&g->e);
}

static mk_open plain(uint32_t context)
{
    return (mk_open){.context = context, .sampling = {.top_p = 1}, .credits = UINT64_MAX};
}

static uint64_t open_ok(rig *g, uint64_t owner, uint32_t context)
{
    mk_open o = plain(context);
    uint64_t id = 0;
    assert_int_equal(mk_streams_open(g->s, owner, &o, &id, &g->err), MK_OK);
    return id;
}

static int append(rig *g, uint64_t owner, uint64_t id, uint32_t n, uint64_t tag)
{
    uint32_t t[512];
    for (uint32_t i = 0; i < n; i++) t[i] = i % VOCAB;
    return mk_streams_append(g->s, owner, id, t, n, 0, tag, &g->err);
}

static int generate(rig *g, uint64_t owner, uint64_t id, uint32_t max_new, uint64_t tag)
{
    mk_generate r = {.max_new = max_new};
    return mk_streams_generate(g->s, owner, id, &r, tag, &g->err);
}

static mk_streams_stats stats(const rig *g)
{
    mk_streams_stats st;
    mk_streams_get_stats(g->s, &st);
    return st;
}

/* Runs to the end of everything; the reports in order. */
static uint32_t settle(rig *g, mk_report *r, uint32_t n)
{
    uint32_t k = 0, got;
    int idle = 0;
    while (idle < 3) {
        uint32_t ran = fake_run(g->e);
        while ((got = mk_streams_poll(g->s, r + k, n - k)) > 0) k += got, ran = 1;
        assert_true(k < n);
        idle = ran ? 0 : idle + 1;
    }
    return k;
}

static void assert_msg(const rig *g, const char *part)
{
    if (!strstr(g->err.msg, part)) fail_msg("message is \"%s\", expected \"%s\" in it", g->err.msg, part);
}

static void test_append_generate_close(void **state)
{
    (void)state;
    rig g = rig_new(2, 256, 8);
    mk_report r[64];
    uint64_t id = open_ok(&g, 7, 0);
    assert_int_equal(stats(&g).pages_used, 4);
    assert_int_equal(append(&g, 7, id, 10, 100), MK_OK);
    assert_int_equal(generate(&g, 7, id, 5, 101), MK_OK); /* queued behind the append */
    assert_int_equal(stats(&g).requests_running, 2);
    uint32_t n = settle(&g, r, 64);
    assert_int_equal(n, 7);
    assert_int_equal(r[0].ev.kind, MK_EV_APPENDED);
    assert_int_equal(r[0].tag, 100);
    assert_int_equal(r[0].ev.position, 10);
    for (uint32_t i = 1; i < 6; i++) {
        assert_int_equal(r[i].ev.kind, MK_EV_TOKEN);
        assert_int_equal(r[i].owner, 7);
        assert_int_equal(r[i].stream, id);
        assert_int_equal(r[i].tag, 101);
        assert_int_equal(r[i].ev.position, 9 + i);
        assert_int_equal(mk_engine_tokens(g.e, 0)[9 + i], fake_token(9 + i, VOCAB)); /* the host's log */
    }
    assert_int_equal(r[6].ev.kind, MK_EV_DONE);
    assert_int_equal(r[6].ev.reason, MK_DONE_LENGTH);
    assert_int_equal(r[6].prompt_tokens, 10);
    assert_true(r[6].t_submit_ns && r[6].t_submit_ns <= r[6].t_first_ns && r[6].t_first_ns <= r[6].t_done_ns);
    assert_int_equal(mk_streams_close(g.s, 7, id, 102, &g.err), MK_OK);
    assert_int_equal(mk_streams_close(g.s, 7, id, 103, &g.err), MK_E_WIRE); /* once */
    assert_int_equal(stats(&g).slots_used, 1);                             /* until the device agrees */
    assert_int_equal(settle(&g, r, 64), 1);
    assert_int_equal(r[0].ev.kind, MK_EV_CLOSED);
    assert_int_equal(r[0].tag, 102);
    assert_int_equal(stats(&g).slots_used, 0);
    assert_int_equal(stats(&g).pages_used, 0);
    assert_int_equal(append(&g, 7, id, 1, 0), MK_E_WIRE);
    assert_msg(&g, "not open");
    assert_true(open_ok(&g, 7, 0) != id);
    rig_free(&g);
}

static void test_pools_refuse(void **state)
{
    (void)state;
    rig g = rig_new(3, 4096, 80);
    mk_open o = plain(4096);
    uint64_t id;
    open_ok(&g, 1, 4096); /* 64 pages */
    assert_int_equal(mk_streams_open(g.s, 1, &o, &id, &g.err), MK_E_CAPACITY);
    assert_string_equal(g.err.msg, "no room for a stream of 4096 tokens: needs 64 pages, 16 of 80 free");
    open_ok(&g, 1, 65); /* 2 */
    open_ok(&g, 1, 1);  /* 1 */
    assert_int_equal(stats(&g).pages_used, 67);
    o.context = 64;
    assert_int_equal(mk_streams_open(g.s, 1, &o, &id, &g.err), MK_E_CAPACITY);
    assert_msg(&g, "all 3 slots are in use");
    o.context = 4097;
    assert_int_equal(mk_streams_open(g.s, 1, &o, &id, &g.err), MK_E_WIRE);
    assert_msg(&g, "limit of a stream is 4096");
    assert_int_equal(stats(&g).refused, 3);
    rig_free(&g);
}

static void test_open_checks(void **state)
{
    (void)state;
    rig g = rig_new(2, 256, 8);
    uint64_t id;
    static const mk_sampling bad[] = {{.temperature = -1, .top_p = 1}, {.temperature = 1.0f / 0.0f, .top_p = 1}, {.top_p = 0},
                                      {.top_p = 1.5f}, {.top_p = 1, .min_p = -0.1f}, {.top_p = 1, .min_p = 2}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        mk_open o = plain(0);
        o.sampling = bad[i];
        assert_int_equal(mk_streams_open(g.s, 1, &o, &id, &g.err), MK_E_WIRE);
    }
    mk_open o = plain(0);
    o.n_stop = 1;
    o.stop[0] = VOCAB;
    assert_int_equal(mk_streams_open(g.s, 1, &o, &id, &g.err), MK_E_WIRE);
    assert_msg(&g, "stop id 1000 is outside the vocabulary of 1000");
    o.n_stop = MK_MAX_STOP + 1;
    assert_int_equal(mk_streams_open(g.s, 1, &o, &id, &g.err), MK_E_WIRE);
    assert_int_equal(stats(&g).slots_used, 0);
    assert_int_equal(stats(&g).pages_used, 0);
    rig_free(&g);
}

static void test_append_checks(void **state)
{
    (void)state;
    rig g = rig_new(2, 64, 8);
    mk_report r[64];
    uint64_t id = open_ok(&g, 1, 0);
    uint32_t bad[3] = {1, 2, VOCAB};
    assert_int_equal(mk_streams_append(g.s, 1, id, bad, 3, 0, 0, &g.err), MK_E_WIRE);
    assert_msg(&g, "token 2 of the append is 1000");
    g.e->model.n_media = 2, g.e->model.media[0] = 1, g.e->model.media[1] = 2; /* image_token_id, video_token_id */
    assert_int_equal(mk_streams_append(g.s, 1, id, (uint32_t[]){3, 2}, 2, 0, 0, &g.err), MK_E_WIRE);
    assert_msg(&g, "token 1 of the append is 2, which stands for an image or a video: only text is supported");
    g.e->model.n_media = 0;
    assert_int_equal(append(&g, 1, id, 0, 0), MK_E_WIRE);
    assert_int_equal(append(&g, 2, id, 1, 0), MK_E_WIRE);
    assert_msg(&g, "belongs to another client");
    assert_int_equal(append(&g, 1, id + 1, 1, 0), MK_E_WIRE);
    assert_int_equal(append(&g, 1, id + 65536, 1, 0), MK_E_WIRE);
    assert_int_equal(append(&g, 1, 0xffffffffffffffffull, 1, 0), MK_E_WIRE);
    assert_int_equal(append(&g, 1, id, 65, 0), MK_E_WIRE);
    assert_msg(&g, "context budget of 64");
    assert_int_equal(append(&g, 1, id, 60, 0), MK_OK);
    assert_int_equal(append(&g, 1, id, 5, 0), MK_E_WIRE); /* running appends count */
    assert_int_equal(append(&g, 1, id, 4, 0), MK_OK);
    settle(&g, r, 64);
    rig_free(&g);
}

static void test_busy_rules(void **state)
{
    (void)state;
    rig g = rig_new(2, 256, 8);
    mk_report r[128];
    uint64_t id = open_ok(&g, 1, 0);
    assert_int_equal(generate(&g, 1, id, 3, 0), MK_E_WIRE);
    assert_msg(&g, "is empty");
    for (uint64_t i = 0; i < MK_MAX_APPENDS; i++) assert_int_equal(append(&g, 1, id, 2, i), MK_OK);
    assert_int_equal(append(&g, 1, id, 2, 99), MK_E_WIRE);
    assert_msg(&g, "8 appends are under way");
    assert_int_equal(generate(&g, 1, id, 3, 50), MK_OK);
    assert_int_equal(generate(&g, 1, id, 3, 51), MK_E_WIRE);
    assert_msg(&g, "generates already");
    uint32_t n = settle(&g, r, 128);
    assert_int_equal(n, MK_MAX_APPENDS + 3 + 1);
    for (uint32_t i = 0; i < MK_MAX_APPENDS; i++) {
        assert_int_equal(r[i].tag, i);
        assert_int_equal(r[i].ev.position, 2 * (i + 1));
    }
    assert_int_equal(generate(&g, 1, id, 30, 52), MK_OK);
    fake_run(g.e);
    assert_int_equal(append(&g, 1, id, 1, 0), MK_E_WIRE);
    assert_msg(&g, "append while it generates");
    settle(&g, r, 128);
    rig_free(&g);
}

static void test_stops_and_context(void **state)
{
    (void)state;
    rig g = rig_new(2, 32, 8);
    mk_report r[64];
    mk_open o = plain(0);
    o.n_stop = 1;
    o.stop[0] = fake_token(12, VOCAB);
    uint64_t id;
    assert_int_equal(mk_streams_open(g.s, 1, &o, &id, &g.err), MK_OK);
    append(&g, 1, id, 10, 0);
    generate(&g, 1, id, 100, 1);
    uint32_t n = settle(&g, r, 64);
    assert_int_equal(r[n - 1].ev.reason, MK_DONE_STOP);
    assert_int_equal(r[n - 1].ev.arg, 3);
    mk_generate own = {.max_new = 100, .own_stop = 1, .n_stop = 2, .stop = {fake_token(20, VOCAB), fake_token(15, VOCAB)}};
    assert_int_equal(mk_streams_generate(g.s, 1, id, &own, 2, &g.err), MK_OK);
    n = settle(&g, r, 64);
    assert_int_equal(r[n - 1].ev.reason, MK_DONE_STOP);
    assert_int_equal(r[n - 1].ev.position, 16);
    own.n_stop = 0;
    assert_int_equal(mk_streams_generate(g.s, 1, id, &own, 3, &g.err), MK_OK);
    n = settle(&g, r, 64);
    assert_int_equal(r[n - 1].ev.reason, MK_DONE_CONTEXT);
    assert_int_equal(r[n - 1].ev.position, 32);
    assert_int_equal(r[n - 1].prompt_tokens, 16);
    generate(&g, 1, id, 1, 4); /* full already: one DONE, no token */
    assert_int_equal(settle(&g, r, 64), 1);
    assert_int_equal(r[0].ev.reason, MK_DONE_CONTEXT);
    assert_int_equal(r[0].t_first_ns, 0);
    own.n_stop = 1;
    own.stop[0] = VOCAB;
    assert_int_equal(mk_streams_generate(g.s, 1, id, &own, 5, &g.err), MK_E_WIRE);
    rig_free(&g);
}

static void test_cancel(void **state)
{
    (void)state;
    rig g = rig_new(2, 256, 8);
    mk_report r[64];
    uint64_t id = open_ok(&g, 1, 0);
    assert_int_equal(mk_streams_cancel(g.s, 1, id, &g.err), MK_OK); /* nothing runs: nothing happens */
    append(&g, 1, id, 4, 0);
    generate(&g, 1, id, 100, 1);
    for (int i = 0; i < 5; i++) fake_run(g.e);
    assert_int_equal(mk_streams_cancel(g.s, 2, id, &g.err), MK_E_WIRE);
    assert_int_equal(mk_streams_cancel(g.s, 1, id, &g.err), MK_OK);
    assert_int_equal(mk_streams_cancel(g.s, 1, id, &g.err), MK_OK);
    assert_int_equal(append(&g, 1, id, 1, 0), MK_E_WIRE);
    assert_msg(&g, "a cancel is under way");
    uint32_t n = settle(&g, r, 64);
    assert_int_equal(r[n - 1].ev.kind, MK_EV_DONE);
    assert_int_equal(r[n - 1].ev.reason, MK_DONE_CANCELLED);
    assert_int_equal(stats(&g).cancelled, 1);
    /* the flag is gone: the next request runs to its end */
    assert_int_equal(generate(&g, 1, id, 4, 2), MK_OK);
    n = settle(&g, r, 64);
    assert_int_equal(n, 5);
    assert_int_equal(r[4].ev.reason, MK_DONE_LENGTH);
    rig_free(&g);
}

/* Tokens of an append that were not processed are forgotten; what comes next stands where they stood. */
static void test_cancel_append(void **state)
{
    (void)state;
    rig g = rig_new(2, 512, 16);
    mk_report r[64];
    uint64_t id = open_ok(&g, 1, 0);
    append(&g, 1, id, 100, 0);
    append(&g, 1, id, 100, 1);
    fake_run(g.e); /* 8 rows */
    mk_streams_cancel(g.s, 1, id, &g.err);
    assert_int_equal(settle(&g, r, 64), 2);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(r[i].ev.kind, MK_EV_APPENDED);
        assert_int_equal(r[i].ev.reason, MK_DONE_CANCELLED);
        assert_int_equal(r[i].ev.position, 9);
    }
    assert_int_equal(append(&g, 1, id, 503, 2), MK_OK);
    mk_report many[64];
    uint32_t n = settle(&g, many, 64);
    assert_int_equal(n, 1);
    assert_int_equal(many[0].ev.position, 512);
    assert_int_equal(mk_engine_tokens(g.e, 0)[9], 0);
    rig_free(&g);
}

static void test_credits(void **state)
{
    (void)state;
    rig g = rig_new(2, 256, 8);
    mk_report r[64];
    mk_open o = plain(0);
    o.credits = 3;
    uint64_t id;
    assert_int_equal(mk_streams_open(g.s, 1, &o, &id, &g.err), MK_OK);
    append(&g, 1, id, 4, 0);
    generate(&g, 1, id, 10, 1);
    assert_int_equal(settle(&g, r, 64), 1 + 3);
    uint64_t bells = g.e->doorbells;
    assert_int_equal(mk_streams_credit(g.s, 1, id, 2, &g.err), MK_OK);
    assert_true(g.e->doorbells > bells);
    assert_int_equal(settle(&g, r, 64), 2);
    assert_int_equal(mk_streams_credit(g.s, 1, id, UINT64_MAX, &g.err), MK_OK); /* saturates */
    uint32_t n = settle(&g, r, 64);
    assert_int_equal(n, 6);
    assert_int_equal(r[5].ev.kind, MK_EV_DONE);
    assert_int_equal(mk_streams_credit(g.s, 2, id, 1, &g.err), MK_E_WIRE);
    rig_free(&g);
}

static void test_close_while_running(void **state)
{
    (void)state;
    rig g = rig_new(2, 256, 8);
    mk_report r[64];
    uint64_t id = open_ok(&g, 1, 0);
    append(&g, 1, id, 40, 5);
    generate(&g, 1, id, 100, 6);
    fake_run(g.e);
    assert_int_equal(mk_streams_close(g.s, 1, id, 7, &g.err), MK_OK);
    uint32_t n = settle(&g, r, 64);
    assert_int_equal(n, 3);
    assert_int_equal(r[0].ev.kind, MK_EV_APPENDED);
    assert_int_equal(r[0].tag, 5);
    assert_int_equal(r[1].ev.kind, MK_EV_DONE);
    assert_int_equal(r[1].ev.reason, MK_DONE_CANCELLED);
    assert_int_equal(r[1].tag, 6);
    assert_int_equal(r[2].ev.kind, MK_EV_CLOSED);
    assert_int_equal(r[2].tag, 7);
    rig_free(&g);
}

static void test_drop_owner(void **state)
{
    (void)state;
    rig g = rig_new(4, 128, 8);
    mk_report r[256];
    uint64_t a = open_ok(&g, 1, 0), b = open_ok(&g, 2, 0), c = open_ok(&g, 1, 0);
    append(&g, 1, a, 4, 0);
    generate(&g, 1, a, 100, 1);
    append(&g, 2, b, 4, 2);
    generate(&g, 2, b, 20, 3);
    for (int i = 0; i < 4; i++) fake_run(g.e);
    assert_int_equal(mk_streams_drop_owner(g.s, 1), 2);
    assert_int_equal(mk_streams_drop_owner(g.s, 1), 0);
    assert_int_equal(mk_streams_drop_owner(g.s, 9), 0);
    assert_int_equal(mk_streams_cancel(g.s, 1, c, &g.err), MK_E_WIRE);
    uint32_t n = settle(&g, r, 256), done = 0;
    for (uint32_t i = 0; i < n; i++) {
        assert_int_equal(r[i].owner, 2);
        done += r[i].ev.kind == MK_EV_DONE;
    }
    assert_int_equal(done, 1);
    assert_int_equal(stats(&g).slots_used, 1);
    assert_int_equal(stats(&g).pages_used, 2);
    assert_int_equal(stats(&g).requests_running, 0);
    rig_free(&g);
}

/* A closed stream's late event, a second DONE, events of nobody: dropped. */
static void test_late_events(void **state)
{
    (void)state;
    rig g = rig_new(2, 256, 8);
    mk_report r[64];
    uint64_t id = open_ok(&g, 1, 0);
    append(&g, 1, id, 4, 0);
    generate(&g, 1, id, 2, 1);
    uint32_t n = settle(&g, r, 64);
    mk_event done = r[n - 1].ev, token = r[n - 2].ev;
    assert_int_equal(done.kind, MK_EV_DONE);
    g.e->extra = done;
    assert_int_equal(settle(&g, r, 64), 0);
    generate(&g, 1, id, 2, 2);
    g.e->extra = done; /* answers the older request */
    assert_int_equal(settle(&g, r, 64), 3);
    mk_streams_close(g.s, 1, id, 3, &g.err);
    assert_int_equal(settle(&g, r, 64), 1);
    mk_event closed = r[0].ev;
    uint64_t again[2] = {open_ok(&g, 1, 0), open_ok(&g, 1, 0)}; /* both slots, so the old one too */
    assert_true(again[0] != id && again[1] != id);
    mk_event late[] = {done, token, closed, {.kind = 77}, {.kind = MK_EV_DONE, .slot = 500}, {.kind = MK_EV_APPENDED, .slot = 1, .generation = 1}};
    for (size_t i = 0; i < sizeof late / sizeof late[0]; i++) {
        g.e->extra = late[i];
        assert_int_equal(settle(&g, r, 64), 0);
    }
    assert_int_equal(stats(&g).slots_used, 2);
    rig_free(&g);
}

static void test_ring_full(void **state)
{
    (void)state;
    rig g = rig_new(2, 256, 8);
    mk_report r[64];
    uint64_t id = open_ok(&g, 1, 0);
    append(&g, 1, id, 4, 0);
    settle(&g, r, 64);
    generate(&g, 1, id, 100, 1);
    fake_run(g.e);
    g.e->submit_limit = 0;
    mk_open o = plain(0);
    uint64_t other;
    assert_int_equal(mk_streams_open(g.s, 1, &o, &other, &g.err), MK_E_CAPACITY);
    assert_int_equal(stats(&g).pages_used, 4);
    assert_int_equal(mk_streams_close(g.s, 1, id, 2, &g.err), MK_OK); /* cannot fail: submitted later */
    uint32_t n = settle(&g, r, 64);
    assert_int_equal(r[n - 1].ev.kind, MK_EV_DONE);
    assert_int_equal(stats(&g).slots_used, 1);
    g.e->submit_limit = MK_SUBMIT_RING;
    assert_int_equal(settle(&g, r, 64), 1);
    assert_int_equal(r[0].ev.kind, MK_EV_CLOSED);
    assert_int_equal(stats(&g).pages_used, 0);
    rig_free(&g);
}

static void test_logprobs(void **state)
{
    (void)state;
    rig g = rig_new(2, 256, 8);
    mk_report r[64];
    uint64_t id = open_ok(&g, 1, 0);
    uint32_t t[10] = {0};
    assert_int_equal(mk_streams_append(g.s, 1, id, t, 10, 1, 42, &g.err), MK_OK);
    uint32_t n = settle(&g, r, 64);
    assert_int_equal(n, 10); /* 9 logprobs: the first token has none */
    for (uint32_t i = 0; i < 9; i++) {
        assert_int_equal(r[i].ev.kind, MK_EV_LOGPROB);
        assert_int_equal(r[i].ev.position, i + 1);
        assert_int_equal(r[i].tag, 42);
    }
    assert_int_equal(r[9].ev.kind, MK_EV_APPENDED);
    rig_free(&g);
}

static void test_cancel_all(void **state)
{
    (void)state;
    rig g = rig_new(4, 128, 8);
    mk_report r[256];
    for (uint64_t i = 0; i < 4; i++) {
        uint64_t id = open_ok(&g, i, 0);
        append(&g, i, id, 30, 0);
        generate(&g, i, id, 50, 1);
    }
    fake_run(g.e);
    mk_streams_cancel_all(g.s);
    uint32_t n = settle(&g, r, 256), done = 0;
    for (uint32_t i = 0; i < n; i++) done += r[i].ev.kind == MK_EV_DONE && r[i].ev.reason == MK_DONE_CANCELLED;
    assert_int_equal(done, 4);
    assert_int_equal(stats(&g).requests_running, 0);
    rig_free(&g);
}

/* ---- a relaunch ------------------------------------------------------------------------------------------------------ */

/* Everything that runs gets one answer with reason ERROR; the stream goes on where its delivered tokens end. */
static void test_restart_generation(void **state)
{
    (void)state;
    rig g = rig_new(2, 256, 8);
    mk_report r[128];
    uint64_t id = open_ok(&g, 1, 0);
    append(&g, 1, id, 10, 1);
    generate(&g, 1, id, 50, 2);
    for (int i = 0; i < 12; i++) fake_run(g.e);
    g.e->hung = 1;
    uint32_t n = settle(&g, r, 128);
    assert_int_equal(r[0].ev.kind, MK_EV_APPENDED);
    assert_int_equal(r[0].ev.reason, 0);
    uint32_t tokens = n - 2; /* what the device had published before is delivered */
    assert_true(tokens > 5 && tokens < 50);
    assert_int_equal(r[n - 1].ev.kind, MK_EV_DONE);
    assert_int_equal(r[n - 1].ev.reason, MK_DONE_ERROR);
    assert_int_equal(r[n - 1].tag, 2);
    assert_int_equal(r[n - 1].ev.arg, tokens);
    assert_int_equal(r[n - 1].ev.position, 10 + tokens);
    assert_int_equal(r[n - 1].prompt_tokens, 10);
    assert_int_equal(stats(&g).requests_running, 0);
    assert_int_equal(g.e->sched.st[0].pos, 10 + tokens - 1); /* the whole log was processed again; its last token is pending */
    assert_int_equal(generate(&g, 1, id, 5, 3), MK_OK);
    n = settle(&g, r, 128);
    assert_int_equal(n, 6);
    for (uint32_t i = 0; i < 5; i++) {
        assert_int_equal(r[i].ev.position, 10 + tokens + i);
        assert_int_equal(r[i].ev.token, fake_token(10 + tokens + i, VOCAB));
    }
    assert_int_equal(r[5].ev.reason, MK_DONE_LENGTH);
    rig_free(&g);
}

/* Of failed appends nothing stays; a generation queued behind them fails, too. */
static void test_restart_appends(void **state)
{
    (void)state;
    rig g = rig_new(2, 512, 16);
    mk_report r[64];
    uint64_t id = open_ok(&g, 1, 0);
    append(&g, 1, id, 5, 1);
    settle(&g, r, 64);
    append(&g, 1, id, 100, 2);
    append(&g, 1, id, 20, 3);
    generate(&g, 1, id, 4, 4);
    fake_run(g.e);
    g.e->hung = 1;
    mk_streams_cancel(g.s, 1, id, &g.err); /* too late to matter */
    assert_int_equal(settle(&g, r, 64), 3);
    static const uint64_t tag[] = {2, 3, 4};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(r[i].ev.kind, i < 2 ? MK_EV_APPENDED : MK_EV_DONE);
        assert_int_equal(r[i].tag, tag[i]);
        assert_int_equal(r[i].ev.reason, MK_DONE_ERROR);
        assert_int_equal(r[i].ev.position, 5);
    }
    assert_int_equal(append(&g, 1, id, 507, 5), MK_OK); /* the room is there again, and no cancel is under way */
    assert_int_equal(settle(&g, r, 64), 1);
    assert_int_equal(r[0].ev.reason, 0);
    assert_int_equal(r[0].ev.position, 512);
    rig_free(&g);
}

/* Idle streams are rebuilt as well; an entry that the old kernel never took is made good; closing streams close; dropped ones vanish. */
static void test_restart_others(void **state)
{
    (void)state;
    rig g = rig_new(5, 128, 10);
    mk_report r[64];
    uint64_t idle = open_ok(&g, 1, 0), closing = open_ok(&g, 1, 0), dropped = open_ok(&g, 2, 0), busy = open_ok(&g, 1, 0);
    append(&g, 1, idle, 30, 1);
    append(&g, 1, closing, 30, 2);
    append(&g, 2, dropped, 30, 3);
    append(&g, 1, busy, 8, 4);
    settle(&g, r, 64);
    generate(&g, 1, closing, 50, 5);
    generate(&g, 2, dropped, 50, 6);
    fake_run(g.e);
    mk_report before[8];
    mk_streams_poll(g.s, before, 8);
    g.e->hung = 1;
    assert_int_equal(mk_streams_close(g.s, 1, closing, 7, &g.err), MK_OK);
    mk_streams_drop_owner(g.s, 2);
    uint64_t late = open_ok(&g, 1, 0);
    assert_int_equal(append(&g, 1, late, 3, 8), MK_OK);
    uint32_t n = settle(&g, r, 64);
    assert_int_equal(n, 3);
    assert_int_equal(r[0].ev.kind, MK_EV_DONE);
    assert_int_equal(r[0].tag, 5);
    assert_int_equal(r[0].ev.reason, MK_DONE_ERROR);
    assert_int_equal(r[1].ev.kind, MK_EV_CLOSED);
    assert_int_equal(r[1].tag, 7);
    assert_int_equal(r[2].ev.kind, MK_EV_APPENDED);
    assert_int_equal(r[2].tag, 8);
    assert_int_equal(r[2].ev.position, 0);
    assert_int_equal(stats(&g).slots_used, 3);
    assert_int_equal(stats(&g).pages_used, 6);
    assert_int_equal(generate(&g, 1, idle, 2, 9), MK_OK);
    assert_int_equal(generate(&g, 1, busy, 2, 10), MK_OK);
    assert_int_equal(generate(&g, 1, late, 2, 11), MK_E_WIRE); /* empty */
    n = settle(&g, r, 64);
    assert_int_equal(n, 6);
    for (uint32_t i = 0; i < n; i++)
        if (r[i].ev.kind == MK_EV_TOKEN) assert_int_equal(r[i].ev.token, fake_token(r[i].ev.position, VOCAB));
    rig_free(&g);
}

/* A relaunch, behind which 8 tokens of a longer log are back. */
static void begin_rebuild(rig *g)
{
    mk_report r[64];
    g->e->hung = 1;
    assert_int_equal(mk_streams_poll(g->s, r, 64), 0);
    fake_run(g->e);
}

/* A cancel while a stream is rebuilt must not cut its log; credits go on where they were. */
static void test_restart_cancel_credits(void **state)
{
    (void)state;
    rig g = rig_new(2, 512, 16);
    mk_report r[64];
    mk_open o = plain(0);
    o.credits = 10;
    uint64_t id;
    assert_int_equal(mk_streams_open(g.s, 1, &o, &id, &g.err), MK_OK);
    append(&g, 1, id, 200, 1);
    generate(&g, 1, id, 7, 2);
    assert_int_equal(settle(&g, r, 64), 1 + 7 + 1);
    begin_rebuild(&g);
    assert_int_equal(generate(&g, 1, id, 7, 3), MK_OK);
    assert_int_equal(mk_streams_cancel(g.s, 1, id, &g.err), MK_OK);
    uint32_t n = settle(&g, r, 64);
    assert_int_equal(r[n - 1].ev.kind, MK_EV_DONE);
    assert_int_equal(r[n - 1].ev.reason, MK_DONE_CANCELLED);
    assert_int_equal(r[n - 1].ev.position, 207 + n - 1);
    uint32_t used = 7 + n - 1;
    assert_int_equal(generate(&g, 1, id, 7, 4), MK_OK);
    n = settle(&g, r, 64);
    assert_int_equal(n, 10 - used); /* and then it waits for credits */
    assert_int_equal(mk_streams_credit(g.s, 1, id, 7, &g.err), MK_OK);
    n = settle(&g, r, 64);
    assert_int_equal(r[n - 1].ev.reason, MK_DONE_LENGTH);
    rig_free(&g);
}

/* Nor must a close: what runs ends behind the whole log, and then the stream. */
static void test_restart_close(void **state)
{
    (void)state;
    rig g = rig_new(2, 512, 16);
    mk_report r[64];
    uint64_t id = open_ok(&g, 1, 0);
    append(&g, 1, id, 200, 1);
    assert_int_equal(settle(&g, r, 64), 1);
    begin_rebuild(&g);
    assert_int_equal(generate(&g, 1, id, 7, 2), MK_OK);
    assert_int_equal(mk_streams_close(g.s, 1, id, 3, &g.err), MK_OK);
    uint32_t n = settle(&g, r, 64);
    assert_true(n >= 2);
    assert_int_equal(r[n - 2].ev.kind, MK_EV_DONE);
    assert_int_equal(r[n - 2].tag, 2);
    assert_int_equal(r[n - 2].ev.reason, MK_DONE_CANCELLED);
    assert_int_equal(r[n - 2].ev.position, 200 + n - 2);
    assert_int_equal(r[n - 2].prompt_tokens, 200);
    assert_int_equal(r[n - 1].ev.kind, MK_EV_CLOSED);
    assert_int_equal(r[n - 1].tag, 3);
    assert_int_equal(stats(&g).slots_used, 0);
    rig_free(&g);
}

/* Little room for reports, little room in the submit ring, a second hang before the first is dealt with. */
static void test_restart_tight(void **state)
{
    (void)state;
    rig g = rig_new(8, 128, 16);
    mk_report r[64];
    uint64_t id[8];
    for (uint64_t i = 0; i < 8; i++) {
        id[i] = open_ok(&g, i, 0);
        append(&g, i, id[i], 9, 1);
        generate(&g, i, id[i], 50, 2);
    }
    uint32_t answers[8] = {0}, left = 200;
    while (left--) {
        if (left == 195 || left == 190) g.e->hung = 1;
        g.e->submit_limit = left > 100 ? 3 : MK_SUBMIT_RING;
        uint32_t n = mk_streams_poll(g.s, r, 1);
        if (n && r[0].ev.reason) {
            assert_int_equal(r[0].ev.reason, MK_DONE_ERROR);
            answers[r[0].owner]++;
        }
        if (n && r[0].ev.kind == MK_EV_DONE && append(&g, r[0].owner, r[0].stream, 1, 3) != MK_OK) assert_int_equal(g.err.code, MK_E_CAPACITY);
        if (left < 190) fake_run(g.e);
    }
    settle(&g, r, 64);
    for (uint64_t i = 0; i < 8; i++) {
        assert_true(answers[i] >= 2);
        uint32_t at = g.e->sched.st[id[i] & 0xffff].len + 1;
        assert_int_equal(append(&g, i, id[i], 1, 3), MK_OK);
        assert_int_equal(generate(&g, i, id[i], 3, 4), MK_OK);
        uint32_t n = settle(&g, r, 64);
        assert_int_equal(n, 5);
        for (uint32_t k = 1; k < 4; k++) assert_int_equal(r[k].ev.token, fake_token(at + k - 1, VOCAB));
    }
    rig_free(&g);
}

/* ---- random operations ---------------------------------------------------------------------------------------------- */

#define FUZZ_IDS 4096

typedef struct shadow {
    uint64_t id, owner;
    uint32_t appends, generates, closes; /* accepted and unanswered */
    uint64_t gen_tag;
    int dropped, closed;
} shadow;

static uint64_t rng = 0x9e3779b97f4a7c15ull;
static uint32_t rnd(uint32_t n)
{
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return (uint32_t)(rng >> 33) % n;
}

static void check_reports(rig *g, shadow *sh, uint32_t n_sh, uint32_t max)
{
    mk_report r[32];
    uint32_t n = mk_streams_poll(g->s, r, max);
    assert_true(n <= max);
    for (uint32_t i = 0; i < n; i++) {
        shadow *t = NULL;
        for (uint32_t k = 0; k < n_sh; k++)
            if (sh[k].id == r[i].stream) t = &sh[k];
        assert_non_null(t);
        assert_int_equal(t->owner, r[i].owner);
        assert_false(t->dropped);
        assert_false(t->closed);
        switch (r[i].ev.kind) {
        case MK_EV_APPENDED: assert_true(t->appends-- > 0); break;
        case MK_EV_DONE:
            assert_true(t->generates-- > 0);
            assert_int_equal(r[i].tag, t->gen_tag);
            break;
        case MK_EV_TOKEN: assert_true(t->generates > 0); break;
        case MK_EV_CLOSED:
            assert_true(t->closes-- > 0);
            assert_int_equal(t->appends + t->generates, 0);
            t->closed = 1;
            break;
        default: break;
        }
    }
}

static void test_fuzz(void **state)
{
    (void)state;
    rig g = rig_new(6, 200, 12);
    shadow *sh = calloc(FUZZ_IDS, sizeof *sh);
    uint32_t n = 0;
    uint64_t tag = 1;
    for (uint32_t step = 0; step < 60000; step++) {
        uint64_t owner = rnd(3);
        shadow *t = n ? &sh[n - 1 - rnd(n < 8 ? n : 8)] : NULL;
        uint64_t id = t ? t->id : 0;
        g.e->submit_limit = rnd(20) ? MK_SUBMIT_RING : rnd(3);
        switch (rnd(12)) {
        case 0: {
            mk_open o = plain(1 + rnd(220));
            o.credits = rnd(3) ? UINT64_MAX : rnd(10);
            if (n < FUZZ_IDS && mk_streams_open(g.s, owner, &o, &id, &g.err) == MK_OK) {
                for (uint32_t k = 0; k < n; k++) assert_true(sh[k].id != id);
                sh[n++] = (shadow){.id = id, .owner = owner};
            }
            break;
        }
        case 1:
        case 2:
            if (append(&g, owner, id, rnd(40), tag++) == MK_OK) {
                assert_int_equal(t->owner, owner);
                t->appends++;
            }
            break;
        case 3:
        case 4:
            if (generate(&g, owner, id, rnd(30), tag) == MK_OK) {
                assert_int_equal(t->owner, owner);
                assert_int_equal(t->generates, 0);
                t->generates++;
                t->gen_tag = tag;
            }
            tag++;
            break;
        case 5: mk_streams_cancel(g.s, owner, id, &g.err); break;
        case 6:
            if (rnd(4) == 0 && mk_streams_close(g.s, owner, id, tag++, &g.err) == MK_OK) t->closes++;
            break;
        case 7: mk_streams_credit(g.s, owner, id, rnd(8), &g.err); break;
        case 8:
            if (rnd(30) == 0) {
                mk_streams_drop_owner(g.s, owner);
                for (uint32_t k = 0; k < n; k++)
                    if (sh[k].owner == owner && !sh[k].closed) sh[k].dropped = sh[k].closed = 1;
            }
            if (rnd(200) == 0) mk_streams_cancel_all(g.s);
            break;
        case 9: /* a device that repeats itself */
            if (rnd(10) == 0) {
                g.e->extra = g.e->event[rnd(MK_EVENT_RING)];
                g.e->extra.tag += rnd(2);
                if (g.e->extra.kind == MK_EV_TOKEN || g.e->extra.kind == MK_EV_LOGPROB) g.e->extra.kind = 0;
                /* only what is stale: a live answer would be a true one */
                if (g.e->extra.kind && g.e->event[(g.e->event_read + MK_EVENT_RING - 1) % MK_EVENT_RING].tag <= g.e->extra.tag)
                    g.e->extra.kind = 0;
            }
            break;
        default: fake_run(g.e);
        }
        if (rnd(300) == 0) g.e->hung = 1;
        check_reports(&g, sh, n, 1 + rnd(32));
        mk_streams_stats st = stats(&g);
        assert_true(st.slots_used <= st.slots && st.pages_used <= st.pages);
    }
    g.e->submit_limit = MK_SUBMIT_RING;
    for (uint32_t k = 0; k < n; k++)
        if (!sh[k].closed && mk_streams_close(g.s, sh[k].owner, sh[k].id, 0, &g.err) == MK_OK) sh[k].closes++;
    for (int i = 0; i < 1000; i++) {
        fake_run(g.e);
        check_reports(&g, sh, n, 32);
    }
    for (uint32_t k = 0; k < n; k++)
        if (!sh[k].dropped) {
            assert_int_equal(sh[k].appends + sh[k].generates + sh[k].closes, 0);
            assert_true(sh[k].closed);
        }
    mk_streams_stats st = stats(&g);
    assert_int_equal(st.slots_used, 0);
    assert_int_equal(st.pages_used, 0);
    assert_int_equal(st.requests_running, 0);
    assert_true(st.opened > 200 && st.requests_done > 500);
    /* no page was lost or doubled: the pool can be handed out in full once more */
    uint32_t seen[12] = {0};
    for (int i = 0; i < 3; i++) {
        uint64_t id = open_ok(&g, 1, 200);
        for (uint32_t k = 0; k < 4; k++) seen[mk_engine_page_table(g.e, (uint32_t)(id & 0xffff))[k]]++;
    }
    for (int i = 0; i < 12; i++) assert_int_equal(seen[i], 1);
    free(sh);
    rig_free(&g);
}

/* A pinned stream: every step the same positions, fresh ids, one token published; beside it an ordinary stream goes on as ever. */
static void test_pinned(void **state)
{
    (void)state;
    rig g = rig_new(2, 256, 8);
    static mk_report r[512];
    mk_open o = plain(256);
    o.pin = 249, o.pin_rows = 3;
    uint64_t id = 0, other = 0;
    assert_int_equal(mk_streams_open(g.s, 1, &o, &id, &g.err), MK_E_WIRE); /* up to eight prompt rows stand there */
    assert_msg(&g, "pinned at position 249");
    o.pin = 248, o.pin_rows = 9;
    assert_int_equal(mk_streams_open(g.s, 1, &o, &id, &g.err), MK_E_WIRE);
    o.pin_rows = 3, o.sampling.seed = 5;
    assert_int_equal(mk_streams_open(g.s, 1, &o, &id, &g.err), MK_OK);
    const mk_step *d = &g.e->sched.next;
    assert_int_equal(append(&g, 1, id, 11, 1), MK_OK);
    for (uint32_t k = 0; k < 2; k++) { /* the last token waits for GENERATE */
        assert_int_equal(fake_run(g.e), k ? 2 : 8);
        for (uint32_t i = 0; i < d->nrows; i++) {
            assert_true(d->row[i].pos == 248 + i && d->row[i].token == 8 * k + i && !(d->row[i].flags & MK_ROW_LOGITS));
            assert_int_equal(d->row[i].flags & MK_ROW_FIRST, k + i ? 0 : MK_ROW_FIRST);
        }
    }
    assert_int_equal(fake_run(g.e), 0);
    assert_int_equal(mk_streams_poll(g.s, r, 64), 1);
    assert_true(r[0].ev.kind == MK_EV_APPENDED && r[0].ev.position == 11);
    assert_int_equal(generate(&g, 1, id, 20, 2), MK_OK);
    uint32_t seen[60], n = 0;
    for (uint32_t k = 0; k < 20; k++) {
        assert_int_equal(fake_run(g.e), 3);
        for (uint32_t i = 0; i < 3; i++) {
            assert_int_equal(d->row[i].pos, 248 + i);
            assert_int_equal(d->row[i].flags, MK_ROW_LOGITS | MK_ROW_SAMPLE | MK_ROW_GREEDY | (i < 2 ? MK_ROW_EXTRA : 0));
            seen[n++] = d->row[i].token;
        }
    }
    uint32_t same = 0;
    for (uint32_t i = 0; i < 60; i++)
        for (uint32_t k = 0; k < i; k++) same += seen[i] == seen[k];
    assert_true(same < 10); /* 1,770 pairs of 1,000 ids: two expected */
    assert_int_equal(fake_run(g.e), 0);
    assert_int_equal(mk_streams_poll(g.s, r, 64), 21);
    for (uint32_t i = 0; i < 20; i++) assert_true(r[i].ev.kind == MK_EV_TOKEN && r[i].ev.position == 11 + i);
    assert_true(r[20].ev.kind == MK_EV_DONE && r[20].ev.reason == MK_DONE_LENGTH && r[20].ev.position == 31);

    other = open_ok(&g, 2, 64);
    assert_int_equal(append(&g, 2, other, 4, 3), MK_OK);
    assert_int_equal(generate(&g, 2, other, 10, 4), MK_OK);
    assert_int_equal(generate(&g, 1, id, 1000, 5), MK_OK);
    n = settle(&g, r, 512);
    uint32_t tokens = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (r[i].owner == 2 && r[i].ev.kind == MK_EV_TOKEN) {
            assert_true(r[i].ev.position == 4 + tokens && r[i].ev.token == fake_token(4 + tokens, VOCAB));
            tokens++;
        }
        if (r[i].owner == 1 && r[i].ev.kind == MK_EV_DONE) assert_true(r[i].ev.reason == MK_DONE_CONTEXT && r[i].ev.position == 256);
    }
    assert_int_equal(tokens, 10);
    rig_free(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_append_generate_close), cmocka_unit_test(test_pools_refuse),
        cmocka_unit_test(test_open_checks),           cmocka_unit_test(test_append_checks),
        cmocka_unit_test(test_busy_rules),            cmocka_unit_test(test_stops_and_context),
        cmocka_unit_test(test_cancel),                cmocka_unit_test(test_cancel_append),
        cmocka_unit_test(test_credits),               cmocka_unit_test(test_close_while_running),
        cmocka_unit_test(test_drop_owner),            cmocka_unit_test(test_late_events),
        cmocka_unit_test(test_ring_full),             cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_cancel_all),            cmocka_unit_test(test_restart_generation),
        cmocka_unit_test(test_restart_appends),       cmocka_unit_test(test_restart_others),
        cmocka_unit_test(test_restart_cancel_credits), cmocka_unit_test(test_restart_close), cmocka_unit_test(test_restart_tight),
        cmocka_unit_test(test_pinned),                cmocka_unit_test(test_fuzz),
    };
    return cmocka_run_group_tests_name("streams", tests, NULL, NULL);
}
