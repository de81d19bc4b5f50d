/* The twin itself: epochs over their whole range, and its own proof that a program which cannot go on is named. */
#include "instructions/op.h"
#include "tests/support/rig.h"

#include <stdlib.h>
#include <string.h>

#define DIR "tests/oracle/kimi_linear"

static void generate(const mk_session_config *c, uint32_t *token, uint32_t n)
{
    mk_session *s = rig_open(c);
    mk_session_stream(s, 0, NULL, 0);
    mk_session_append(s, 0, (const uint32_t[]){512, 3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5}, 12, 0);
    mk_session_generate(s, 0, n);
    rig_run(s);
    for (uint32_t i = 0; i < n; i++) {
        const mk_event *e = mk_session_event(s, 0, MK_EV_TOKEN, i);
        assert_non_null(e);
        token[i] = e->token;
    }
    mk_session_close(&s);
}

/* Epochs wrap within the run, at every phase of the stride. */
static void epochs_wrap(void **state)
{
    (void)state;
    enum { N = 12 };
    uint32_t a[N], b[N];
    generate(&(mk_session_config){.dir = DIR}, a, N);
    for (uint32_t back = 1; back <= 8 * MK_EPOCH_STRIDE; back += 2 * MK_EPOCH_STRIDE - 3) {
        generate(&(mk_session_config){.dir = DIR, .epoch0 = 0u - back}, b, N);
        assert_memory_equal(a, b, sizeof a);
    }
}

static uint32_t epochs_of_row(const mk_session *s, uint32_t row, uint32_t epoch)
{
    const mk_program *p = s->plan->prog;
    uint32_t n = 0;
    for (uint32_t v = 0; v < p->info.n_vec; v++) {
        if (p->vec[v].scope != MK_PACKET) continue;
        for (uint32_t half = 0; half < 2; half++) {
            const uint32_t *q = (const uint32_t *)(mk_twin_memory(s->twin)->exchange + mk_packet_offset(&p->vec[v], half, row, 0));
            for (uint32_t i = 0; i < p->vec[v].nslice * p->vec[v].slice_packets; i++) n += q[4 * i + 3] == epoch;
        }
    }
    return n;
}

/* A row that no later step has must not keep packets that look fresh once the epochs have gone round. */
static void stale_rows_are_swept(void **state)
{
    (void)state;
    for (uint32_t sweep = 4; sweep <= 1024; sweep += 1020) {
        mk_session *s = rig_open(&(mk_session_config){.dir = DIR, .sweep = sweep});
        mk_session_stream(s, 0, NULL, 0);
        mk_session_append(s, 0, (const uint32_t[]){512, 3, 1, 4, 1, 5, 9, 2, 6}, 9, 0); /* one step of eight rows: step 0 */
        rig_run(s);
        assert_int_equal(s->max_rows, 8);
        uint32_t first = mk_epoch(0, 0, 0);
        assert_true(epochs_of_row(s, 7, first) > 0);
        mk_session_generate(s, 0, 6); /* steps of one row: 1..6 */
        rig_run(s);
        /* what step 2^32 / MK_EPOCH_STRIDE would take for its own */
        assert_int_equal(mk_epoch(0, (uint32_t)((1ull << 32) / MK_EPOCH_STRIDE), 0), first);
        if (sweep == 4)
            assert_int_equal(epochs_of_row(s, 7, first), 0);
        else
            assert_true(epochs_of_row(s, 7, first) > 0); /* the danger is real: without a sweep they stay */
        mk_session_close(&s);
    }
    enum { N = 12 };
    uint32_t a[N], b[N];
    generate(&(mk_session_config){.dir = DIR}, a, N);
    generate(&(mk_session_config){.dir = DIR, .sweep = 2}, b, N);
    assert_memory_equal(a, b, sizeof a);
}

/* The validator refuses such a program; if one came through all the same, the twin says who waits for what instead of spinning. */
static void deadlock_is_named(void **state)
{
    (void)state;
    mk_session *s = rig_open(&(mk_session_config){.dir = DIR});
    mk_program *p = s->plan->prog;
    mk_insn *in = p->insn;
    while (in->opcode != MK_OP_ROUTE) in++;
    in->wait[1].pub = 2; /* a publication that comes after us */
    mk_session_stream(s, 0, NULL, 0);
    mk_session_append(s, 0, (const uint32_t[]){512, 3, 1}, 3, 0);
    mk_err err = {0};
    assert_int_equal(mk_session_run(s, &err), MK_E_BUG);
    assert_non_null(strstr(err.msg, "ROUTE"));
    assert_non_null(strstr(err.msg, "vector router"));
    assert_non_null(strstr(err.msg, "worker 0"));
    mk_session_close(&s);
}

/* Two streams that generate have steps of their own in a model with experts, and one between them in another (megakernel/schedule.h), after a restart as well. */
static void two_streams(void **state)
{
    (void)state;
    enum { N = 5 };
    const char *dir[] = {"tests/oracle/llama", DIR};
    for (uint32_t experts = 0; experts < 2; experts++) {
        mk_session *s = rig_open(&(mk_session_config){.dir = dir[experts], .slots = 2});
        for (uint32_t again = 0; again < 2; again++) {
            for (uint32_t i = 0; i < 2; i++) {
                mk_session_stream(s, i, NULL, 0);
                mk_session_append(s, i, (const uint32_t[]){3 + i}, 1, 0);
            }
            for (uint32_t i = 0; i < 2; i++) mk_session_generate(s, i, N);
            rig_run(s);
            for (uint32_t i = 0; i < N; i++) {
                const mk_event *a = mk_session_event(s, 0, MK_EV_TOKEN, i), *b = mk_session_event(s, 1, MK_EV_TOKEN, i);
                assert_true(a && b);
                assert_int_equal(b->step - a->step, experts);
            }
            mk_session_clear(s);
            mk_twin_restart(s->twin);
            s->submit_next = s->event_next = 0;
        }
        mk_session_close(&s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(epochs_wrap),
        cmocka_unit_test(stale_rows_are_swept),
        cmocka_unit_test(deadlock_is_named),
        cmocka_unit_test(two_streams),
    };
    return cmocka_run_group_tests_name("twin", tests, NULL, NULL);
}
