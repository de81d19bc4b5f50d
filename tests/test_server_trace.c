/* TRACE on the wire, against a double of the engine: the messages and their order, records that come in late, a device that is lost, clients that go. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/fake/server.h"

static void ask(raw *c, uint32_t steps, uint32_t timeout_ms, uint64_t request)
{
    raw_send(c, MK_WIRE_TRACE, 0, 0, request, &(mk_wire_trace){.steps = steps, .timeout_ms = timeout_ms}, NULL);
}

static raw *hello(rig *r)
{
    raw *c = raw_new(r);
    raw_hello(c);
    return c;
}

static void take_trace(raw *c, uint32_t steps, uint64_t request)
{
    raw_expect(c, MK_WIRE_TRACED);
    assert_int_equal(c->m.h.request, request);
    const mk_wire_traced *t = &c->m.traced;
    assert_true(t->first_step == 40 && t->steps == steps && t->workers == 2 && t->instructions == 5 && t->vectors == 2);
    assert_memory_equal(c->m.items, "h\0sampled\0EMBED\0GEMV", 20);
    raw_expect(c, MK_WIRE_TRACE_MAP);
    assert_true(c->m.h.request == request && c->m.trace_map.first == 0 && c->m.n == 5);
    mk_wire_trace_insn in[5];
    mk_wire_items(&c->m, in, 5);
    const uint16_t worker[5] = {0, 0, 0, 1, 1}, vector[5] = {0, 1, 0xffff, 0, 0xffff}, waits[5] = {0, 1, 0, 0, 1};
    for (int i = 0; i < 5; i++) {
        assert_true(in[i].worker == worker[i] && in[i].vector == vector[i] && in[i].n_wait == waits[i]);
        if (waits[i]) assert_true(in[i].wait[0].vector == 0 && in[i].wait[0].slice == 0 && in[i].wait[0].slices == 2);
    }
    assert_int_equal(in[4].tape_bytes, 640);
    for (uint32_t k = 0; k < steps; k++) {
        raw_expect(c, MK_WIRE_TRACE_RECORDS);
        assert_true(c->m.h.request == request && c->m.trace_records.step == k && c->m.trace_records.first == 0 && c->m.n == 5);
        mk_wire_trace_record rec[5];
        mk_wire_items(&c->m, rec, 5);
        for (uint32_t i = 0; i < 5; i++) {
            assert_true(rec[i].start == (7ull << 32) + 1000 * k + 100 * i && rec[i].input == 10 && rec[i].weights == 5 && rec[i].end == 80);
            assert_true(rec[i].publish == (i == 2 ? 60 : 0) && rec[i].bytes == 64 * i && rec[i].rows == 1);
        }
    }
}

static void test_messages(void **state)
{
    (void)state;
    rig *r = rig_start(0);
    raw *c = hello(r);
    ask(c, 3, 1000, 50);
    take_trace(c, 3, 50);
    assert_int_equal(raw_recv(c, 50), 0);
    assert_int_equal(atomic_load(&fake_traces), 0);
    ask(c, 1, 1000, 51);
    take_trace(c, 1, 51);
    raw_alive(c);
    raw_free(c);
    rig_stop(r);
}

static void test_refused(void **state)
{
    (void)state;
    rig *r = rig_start(0);
    raw *c = hello(r), *d = hello(r), *stranger = raw_new(r);
    ask(stranger, 1, 1000, 1);
    raw_expect_err(stranger, MK_WIRE_E_HELLO, MK_WIRE_TRACE, "HELLO");
    ask(c, 0, 1000, 60);
    raw_expect_err(c, MK_WIRE_E_REFUSED, MK_WIRE_TRACE, "steps: expected 1 to 255");
    assert_int_equal(c->m.h.request, 60);
    ask(c, 1, 0, 61);
    raw_expect_err(c, MK_WIRE_E_REFUSED, MK_WIRE_TRACE, "timeout_ms: expected 1 to 60000, found 0");
    ask(c, 1, 60001, 62);
    raw_expect_err(c, MK_WIRE_E_REFUSED, MK_WIRE_TRACE, "found 60001");
    atomic_store(&fake_trace_ms, -1);
    ask(c, 1, 60000, 63);
    raw_alive(c);
    ask(c, 1, 1000, 64);
    raw_expect_err(c, MK_WIRE_E_CAPACITY, MK_WIRE_TRACE, "under way");
    ask(d, 1, 1000, 65);
    raw_expect_err(d, MK_WIRE_E_CAPACITY, MK_WIRE_TRACE, "one at a time");
    /* lost with the device, and free again */
    atomic_store(&fake_trace_lost, 1);
    raw_expect_err(c, MK_WIRE_E_REFUSED, MK_WIRE_TRACE, "the device hung");
    assert_int_equal(c->m.h.request, 63);
    atomic_store(&fake_trace_lost, 0);
    ask(d, 2, 30, 66);
    raw_expect_err(d, MK_WIRE_E_REFUSED, MK_WIRE_TRACE, "fewer than 2 steps were run in time");
    assert_int_equal(atomic_load(&fake_traces), 0);
    atomic_store(&fake_trace_ms, 5);
    ask(d, 2, 1000, 67);
    take_trace(d, 2, 67);
    /* records that never come */
    atomic_store(&fake_trace_holes, 1 << 30);
    ask(d, 1, 1000, 68);
    raw_expect(d, MK_WIRE_TRACED);
    raw_expect(d, MK_WIRE_TRACE_MAP);
    raw_expect_err(d, MK_WIRE_E_INTERNAL, MK_WIRE_TRACE, "1 of 5 records of step 40 are missing");
    atomic_store(&fake_trace_holes, 2);
    assert_int_equal(atomic_load(&fake_traces), 0);
    raw_free(c);
    raw_free(d);
    raw_free(stranger);
    rig_stop(r);
}

/* An answer comes when the time is up, not when the server next has something to do. */
static void test_in_time(void **state)
{
    (void)state;
    atomic_store(&fake_trace_ms, -1);
    fake_stats_ms = 5000;
    rig *r = rig_start(5000);
    raw *c = hello(r);
    uint64_t begin = fake_now();
    ask(c, 1, 20, 70);
    raw_expect_err(c, MK_WIRE_E_REFUSED, MK_WIRE_TRACE, "fewer than 1 steps were run in time");
    double ms = 1e-6 * (double)(fake_now() - begin);
    if (ms < 20 || ms > 1000) fail_msg("20 ms asked for, the answer came after %.0f", ms);
    fake_stats_ms = 50;
    raw_free(c);
    rig_stop(r);
}

/* The server stops, or the client's place goes to another, while its trace waits. */
static void test_left_behind(void **state)
{
    (void)state;
    atomic_store(&fake_trace_ms, -1);
    rig *r = rig_start(0);
    raw *c = hello(r);
    ask(c, 1, 60000, 70);
    raw_alive(c);
    assert_int_equal(atomic_load(&fake_traces), 1);
    raw_free(c);
    rig_stop(r);
    assert_int_equal(atomic_load(&fake_traces), 0);
    atomic_store(&fake_trace_ms, 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_messages), cmocka_unit_test(test_refused), cmocka_unit_test(test_in_time), cmocka_unit_test(test_left_behind)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
