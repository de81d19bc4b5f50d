/* Who hangs, told from a copy of the exchange: the twin is brought to a stand at one instruction of one worker, as a resident kernel would be. */
#include "host/recover.h"
#include "instructions/op.h"
#include "megakernel/snapshot.h"
#include "tests/support/rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define DIR     "tests/oracle/kimi_linear"
#define WORKERS 24
#define AHEAD   4 /* instructions that a controller hands out before they are run */

static uint32_t ran[WORKERS]; /* instructions of this step */

static void count(void *arg, const mk_ctx *c)
{
    (void)arg;
    ran[c->worker] = c->in->seq + 1;
}

/* Whether the exchange shows that an instruction was run. What ROUTE, EXPERT_UP and LOCAL results lack is only missed by the instructions behind them. */
static int shows(const mk_program *p, const mk_insn *in)
{
    const mk_vec *v = in->signal_vec == MK_NONE ? NULL : &p->vec[in->signal_vec];
    return in->opcode == MK_OP_SCHEDULE || (v && v->scope == MK_PACKET && !(v->flags & MK_VEC_DYNAMIC));
}

/* The session stands in its second step, worker w before its instruction *pk: `fed` or not. One that was fed is the next that shows. */
static mk_snapshot stand(mk_session **ps, uint32_t w, uint32_t *pk, int fed)
{
    mk_err err;
    uint32_t rows;
    mk_session *s = *ps = rig_open(&(mk_session_config){.dir = DIR, .workers = WORKERS, .epoch0 = 0xfffffff0u});
    mk_program *p = s->plan->prog;
    while (fed && !shows(p, &p->insn[p->queue[w] + *pk])) ++*pk;
    const uint32_t k = *pk;
    assert_true(k < p->queue[w + 1] - p->queue[w]);
    mk_session_stream(s, 0, NULL, 0);
    mk_session_append(s, 0, (const uint32_t[]){512, 3, 1, 4}, 4, 0);
    rig_run(s);
    mk_session_generate(s, 0, 9);
    assert_int_equal(mk_twin_step(s->twin, &rows, &err), MK_OK);
    mk_insn *in = &p->insn[p->queue[w] + k], was = *in;
    uint32_t h = 0;
    while (strcmp(p->vec[h].name, "h")) h++;
    in->nwait = 1;
    in->wait[0] = (mk_wait){(uint16_t)h, 1000, 0, 1}; /* nobody publishes that */
    memset(ran, 0, sizeof ran);
    mk_twin_set_hook(s->twin, count, NULL);
    assert_int_equal(mk_twin_step(s->twin, &rows, &err), MK_E_BUG);
    *in = was;
    assert_int_equal(ran[w], k);

    mk_memory *m = mk_twin_memory(s->twin);
    mk_snapshot n = {.prog = p, .live = 1, .device_read = 1, .epoch0 = 0xfffffff0u, .steps = mk_twin_sched(s->twin)->next.seq};
    n.step = mk_twin_sched(s->twin)->next;
    n.position = calloc(WORKERS, 4);
    n.counter = calloc(p->info.n_counter + 1, 4);
    n.exchange = malloc(p->info.exchange_bytes);
    memcpy(n.counter, m->counter, p->info.n_counter * 4);
    memcpy(n.exchange, m->exchange, p->info.exchange_bytes);
    for (uint32_t i = 0; i < WORKERS; i++) {
        uint32_t last = p->queue[i + 1] - p->queue[i] - 1, at = ran[i] + AHEAD - 1;
        n.position[i] = at < last ? at : last;
    }
    if (!fed) n.position[w] = k ? k - 1 : p->queue[w + 1] - p->queue[w] - 1; /* the step before's */
    return n;
}

static void every_instruction(void **state)
{
    (void)state;
    mk_session *s;
    uint32_t seen = 0;
    for (uint32_t i = 0; i < 60; i++) {
        uint32_t w = i * 7 % WORKERS, k = i * 5 % 30, fed = i & 1;
        mk_snapshot n = stand(&s, w, &k, (int)fed);
        mk_worker_view v;
        char text[512], want[64];
        if (mk_snapshot_culprit(&n) != (int)w) fail_msg("worker %u before instruction %u: named %d", w, k, mk_snapshot_culprit(&n));
        mk_snapshot_worker(&n, w, &v);
        if (!fed) {
            assert_int_equal(v.insn->seq, k);
            assert_int_equal(v.state, k ? MK_WORKER_UNFED : MK_WORKER_STUCK); /* nothing fed looks like everything fed */
            mk_snapshot_text(&n, text, sizeof text);
            snprintf(want, sizeof want, "worker %u hangs at instruction %u (%s", w, k, mk_opcode_name(v.insn->opcode));
            if (!strstr(text, want)) fail_msg("\"%s\" does not say \"%s\"", text, want);
        }
        for (uint32_t o = 0; o < WORKERS; o++) {
            if (o == w) continue;
            mk_snapshot_worker(&n, o, &v);
            assert_true(v.state == MK_WORKER_WAITING || v.state == MK_WORKER_THROUGH);
            if (v.state == MK_WORKER_WAITING) assert_int_equal(v.insn->seq, ran[o]);
            seen += v.state == MK_WORKER_WAITING;
        }
        mk_snapshot_free(&n);
        mk_session_close(&s);
    }
    assert_true(seen > 1000);
}

/* The same through the submit ring, as mkctl inject does it: named, and restarted the machine decodes as if nothing had been. */
static void injected(void **state)
{
    (void)state;
    const uint32_t at[][2] = {{3, 12}, {7, 0}, {23, 5}, {WORKERS - 1, MK_NONE}};
    for (size_t i = 0; i < sizeof at / sizeof *at; i++) {
        mk_session *s = rig_open(&(mk_session_config){.dir = DIR, .workers = WORKERS, .epoch0 = 0xfffff000u});
        mk_program *p = s->plan->prog;
        mk_err err = {0};
        mk_sched *sc = mk_twin_sched(s->twin);
        uint32_t rows, w = at[i][0], k = at[i][1], ran_steps = 0, schedule = p->queue[WORKERS] - p->queue[WORKERS - 1] - 1;
        mk_session_stream(s, 0, NULL, 0);
        mk_session_append(s, 0, (const uint32_t[]){512, 3, 1, 4, 1, 5}, 6, 0);
        mk_session_generate(s, 0, 9);
        if (k == MK_NONE) rig_run(s);
        mk_submit *e = &sc->submit[s->submit_next++ % MK_SUBMIT_RING];
        *e = (mk_submit){.seq = s->submit_next, .op = MK_SUB_HANG, .arg0 = k == MK_NONE ? MK_HANG_IDLE : MK_HANG_AT(w, k), .arg1 = 4};
        mk_sched_compose(sc, 0);
        int rc;
        while (!(rc = mk_twin_step(s->twin, &rows, &err)) && rows) ran_steps++;
        assert_int_equal(rc, MK_E_DEVICE);
        if (k != MK_NONE) assert_int_equal(ran_steps, 4);
        mk_snapshot n;
        char text[512], want[80];
        assert_int_equal(mk_twin_snapshot(s->twin, &n, &err), MK_OK);
        mk_snapshot_text(&n, text, sizeof text);
        snprintf(want, sizeof want, "step %u: worker %u hangs at instruction %u (", sc->step, w, k == MK_NONE ? schedule : k);
        if (!strstr(text, want)) fail_msg("\"%s\" does not say \"%s\"", text, want);
        mk_snapshot_free(&n);
        mk_twin_restart(s->twin);
        s->submit_next = s->event_next = 0;
        mk_session_stream(s, 0, NULL, 0);
        mk_session_append(s, 0, (const uint32_t[]){512, 3, 1, 4, 1, 5}, 6, 0);
        mk_session_generate(s, 0, 9);
        rig_run(s);
        mk_session_close(&s);
    }
}

static void files(void **state)
{
    (void)state;
    mk_session *s;
    uint32_t k = 12;
    mk_snapshot n = stand(&s, 3, &k, 0);
    mk_err err = {0};
    char path[256], line[1024], dir[] = "/tmp/mk_flight_XXXXXX";
    assert_non_null(mkdtemp(dir));
    assert_int_equal(mk_flight_write(&n, dir, "a \"device\"", "what\nhappened", path, sizeof path, &err), MK_OK);
    FILE *f = fopen(path, "r");
    int culprit = 0, quoted = 0, workers = 0;
    while (fgets(line, sizeof line, f)) {
        culprit += strstr(line, "\"culprit\": {\"worker\": 3, \"fed\": 11, \"state\": \"unfed\", \"instruction\": 12") != NULL;
        quoted += strstr(line, "a \\\"device\\\"") != NULL;
        workers += strstr(line, "    {\"worker\"") == line;
    }
    fclose(f);
    unlink(path);
    rmdir(dir);
    assert_int_equal(culprit, 1);
    assert_int_equal(quoted, 1);
    assert_int_equal(workers, WORKERS);
    assert_int_equal(mk_flight_write(&n, "/no/such/dir", "d", "e", path, sizeof path, &err), MK_E_SYSTEM);
    /* after the fact only the kernel's own word counts */
    n.live = 0;
    snprintf(n.kernel, sizeof n.kernel, "step 1: somebody waited");
    assert_int_equal(mk_snapshot_culprit(&n), -1);
    mk_snapshot_text(&n, line, sizeof line);
    assert_string_equal(line, n.kernel);
    mk_snapshot_free(&n);
    mk_session_close(&s);
}

/* What the log says of a hang, and how the process that says it ended (0: it goes on). */
static int said(const mk_snapshot *n, const char *gone, char *line, size_t size)
{
    int ends[2], status;
    assert_int_equal(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) {
        mk_recovery r;
        dup2(ends[1], 2);
        mk_recovery_init(&r, "/no/such/dir");
        mk_recovery_note(&r, n, "GPU", gone);
        _exit(0);
    }
    close(ends[1]);
    size_t have = 0;
    for (ssize_t got; (got = read(ends[0], line + have, size - 1 - have)) > 0;) have += (size_t)got;
    line[have] = 0;
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    return WEXITSTATUS(status);
}
/* A kernel that does not leave has been lost, and who waited for what in it is said all the same. */
static void recovery(void **state)
{
    (void)state;
    mk_snapshot n = {0};
    char line[2048];
    assert_int_equal(said(&n, NULL, line, sizeof line), 0);
    assert_non_null(strstr(line, "GPU: the kernel left without a word; flight record (none: "));
    assert_int_equal(said(&n, "it stays", line, sizeof line), MK_E_DEVICE);
    assert_non_null(strstr(line, "GPU lost: it stays; flight record"));
    snprintf(n.kernel, sizeof n.kernel, "step 1: somebody waited");
    assert_int_equal(said(&n, NULL, line, sizeof line), 0);
    assert_non_null(strstr(line, "GPU: step 1: somebody waited; flight record"));
    assert_int_equal(said(&n, "it stays", line, sizeof line), MK_E_DEVICE);
    assert_non_null(strstr(line, "GPU lost: it stays; before that: step 1: somebody waited; flight record"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_instruction), cmocka_unit_test(injected), cmocka_unit_test(files), cmocka_unit_test(recovery)};
    return cmocka_run_group_tests_name("snapshot", tests, NULL, NULL);
}
