/* The trace, from the twin's records to the file: engine, server, client and report in one process. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "instructions/program.h"
#include "ipc/client.h"
#include "ipc/mkctl.h"
#include "ipc/server.h"
#include "ipc/trace_report.h"

#include <jansson.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define WORKERS 5u

static struct {
    char dir[64];
    mk_engine *e;
    mk_streams *s;
    mk_server *v;
    pthread_t thread;
    mk_client *c;
} g;

static void *serve(void *arg)
{
    mk_err err;
    (void)arg;
    mk_server_run(g.v, &err);
    return NULL;
}

static int setup(void **state)
{
    (void)state;
    mk_err err = {0};
    mk_engine_config ec = {.dir = "tests/oracle/kimi_linear", .workers = WORKERS, .streams = 2, .context = 1024};
    strcpy(g.dir, "/tmp/mkd_trace_XXXXXX");
    if (!mkdtemp(g.dir) || mk_engine_open(&ec, &g.e, &err) || mk_engine_start(g.e, &err)) fail_msg("%s", err.msg);
    g.s = mk_streams_new(g.e);
    g.v = mk_server_new(&(mk_server_config){.dir = g.dir, .build = "test", .model = "tiny \"model\"", .stats_ms = 50}, g.e, g.s, &err);
    if (!g.v) fail_msg("%s", err.msg);
    if (pthread_create(&g.thread, NULL, serve, NULL)) fail_msg("no thread");
    g.c = mk_client_new(g.dir, "test", 5000, &err);
    if (!g.c) fail_msg("%s", err.msg);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    mk_client_destroy(&g.c);
    mk_server_abort(g.v);
    pthread_join(g.thread, NULL);
    mk_server_destroy(&g.v);
    mk_streams_destroy(&g.s);
    mk_engine_close(&g.e);
    return rmdir(g.dir);
}

#define OK(call)                                                                                                                           \
    do {                                                                                                                                   \
        mk_err ok_err_ = {0}, *err = &ok_err_;                                                                                                   \
        if (call) fail_msg("%s: %s", #call, err->msg);                                                                                     \
    } while (0)

/* A stream that generates n tokens after a prompt of 20. */
static mk_client_stream *generate(mk_client *c, uint32_t n)
{
    uint32_t ids[20];
    for (uint32_t i = 0; i < 20; i++) ids[i] = 3 * i + 1;
    mk_err why = {0};
    mk_client_stream *s = mk_client_open(c, &(mk_client_options){.sampling = 1, .own_stop = 1, .window = MK_WIRE_NO_WINDOW}, 5000, &why);
    if (!s) fail_msg("%s", why.msg);
    OK(mk_client_append(s, ids, 20, NULL, 60000, err));
    OK(mk_client_generate(s, &(mk_client_generation){.max_new = n}, err));
    return s;
}

static uint32_t finish(mk_client_stream *s, uint32_t *ids)
{
    uint32_t n = 0;
    for (;; n++) {
        mk_client_event ev;
        OK(mk_client_next(s, &ev, 60000, err));
        if (ev.kind == MK_CLIENT_DONE) break;
        ids[n] = ev.token.id;
    }
    OK(mk_client_close(&s, 5000, err));
    return n;
}

/* Whoever publishes what wait `w` asks for had ended before the waiting instruction had its input. */
static unsigned check_wait(const mk_program *p, const mk_wire_trace_record *r, const mk_wait *w, uint64_t ready)
{
    unsigned n = 0;
    for (uint32_t j = 0; j < p->info.n_insn; j++) {
        const mk_insn *in = &p->insn[j];
        if (in->signal_vec != w->vec || in->signal_pub != w->pub || p->vec[w->vec].scope == MK_LOCAL) continue;
        int dynamic = (p->vec[w->vec].flags & MK_VEC_DYNAMIC) != 0;
        if (!dynamic && w->nslice && (in->signal_slice < w->slice0 || in->signal_slice >= w->slice0 + w->nslice)) continue;
        assert_true(r[j].start + r[j].end <= ready);
        n++;
    }
    return n;
}

static void test_records(void **state)
{
    (void)state;
    const mk_program *p = mk_engine_program(g.e);
    static uint32_t traced[400], plain[400];
    mk_client_stream *s = generate(g.c, 150);
    mk_client_trace *t;
    OK(mk_client_traced(g.c, 4, 20000, &t, err));
    assert_int_equal(t->about.steps, 4);
    assert_int_equal(t->about.workers, WORKERS);
    assert_int_equal(t->about.instructions, p->info.n_insn);
    assert_int_equal(t->about.vectors, p->info.n_vec);
    assert_int_equal(t->n_opcode, MK_OP_COUNT);
    assert_true(t->about.first_step > 0 && t->about.first_step < 170);
    for (uint32_t v = 0; v < p->info.n_vec; v++) assert_string_equal(t->vector[v], p->vec[v].name);
    for (unsigned o = 0; o < MK_OP_COUNT; o++) assert_string_equal(t->opcode[o], mk_opcode_name(o));
    /* the map is the program */
    for (uint32_t w = 0; w < WORKERS; w++)
        for (uint32_t i = p->queue[w]; i < p->queue[w + 1]; i++) {
            const mk_insn *in = &p->insn[i];
            const mk_wire_trace_insn *x = &t->insn[i];
            assert_int_equal(x->worker, w);
            assert_int_equal(x->opcode, in->opcode);
            assert_int_equal(x->n_wait, in->nwait);
            assert_int_equal(x->layer, in->layer);
            assert_int_equal(x->vector, in->signal_vec);
            assert_int_equal(x->publication, in->signal_pub);
            assert_int_equal(x->slice, in->signal_slice);
            assert_int_equal(x->tape_bytes, in->tape_bytes);
            for (int q = 0; q < 3; q++) {
                const mk_wait *wait = &in->wait[q];
                int local = q < in->nwait && p->vec[wait->vec].scope == MK_LOCAL;
                assert_true(x->wait[q].vector == wait->vec && x->wait[q].publication == wait->pub && x->wait[q].slice == wait->slice0);
                assert_int_equal(x->wait[q].slices, local ? 0xffff : wait->nslice);
            }
        }
    /* every instruction once a step, in order, after what it waits for */
    unsigned waits = 0;
    uint64_t experts = 0, end = 0;
    for (uint32_t k = 0; k < 4; k++) {
        const mk_wire_trace_record *r = t->record + (size_t)k * p->info.n_insn;
        uint64_t begin = UINT64_MAX, last = 0;
        for (uint32_t w = 0; w < WORKERS; w++)
            for (uint32_t i = p->queue[w]; i < p->queue[w + 1]; i++) {
                assert_true(r[i].start > 0 && r[i].input <= r[i].end && r[i].publish == 0 && r[i].weights == 0);
                assert_int_equal(r[i].rows, 1);
                if (i > p->queue[w]) assert_true(r[i].start == r[i - 1].start + r[i - 1].end);
                for (int q = 0; q < p->insn[i].nwait; q++) waits += check_wait(p, r, &p->insn[i].wait[q], r[i].start + r[i].input);
                if (p->insn[i].opcode == MK_OP_GEMV || p->insn[i].opcode == MK_OP_LM_HEAD) {
                    assert_true(r[i].bytes > 0 && r[i].bytes == p->insn[i].tape_bytes);
                }
                if (p->insn[i].opcode == MK_OP_EXPERT_DOWN) experts += r[i].bytes;
                if (p->insn[i].opcode == MK_OP_EMBED || p->insn[i].opcode == MK_OP_ROUTE) assert_int_equal(r[i].bytes, 0);
                if (r[i].start < begin) begin = r[i].start;
                if (r[i].start + r[i].end > last) last = r[i].start + r[i].end;
            }
        assert_true(begin >= end); /* steps do not overlap */
        end = last;
    }
    assert_true(waits > 1000);
    /* the chosen experts' down projections, all their rows: topk x hidden x inter a MoE layer and step */
    uint64_t expected = 0;
    for (uint32_t i = 0; i < p->info.n_insn; i++)
        if (p->insn[i].opcode == MK_OP_EXPERT_DOWN) {
            const mk_expert *e = &p->insn[i].expert;
            expected += 4ull * e->topk * e->n * ((e->k + mk_kblock_values(e->wtype) - 1) / mk_kblock_values(e->wtype)) * MK_KBLOCK_BYTES;
        }
    assert_true(expected > 0);
    assert_int_equal(experts, expected);
    mk_client_trace_free(&t);
    /* tracing changes no token */
    assert_int_equal(finish(s, traced), 150);
    assert_int_equal(finish(generate(g.c, 150), plain), 150);
    assert_memory_equal(traced, plain, 150 * sizeof *plain);
}

static void test_prompt_steps(void **state)
{
    (void)state;
    uint32_t ids[2048];
    mk_err why = {0};
    for (uint32_t i = 0; i < 900; i++) ids[i] = i % 300;
    mk_client_stream *s = mk_client_open(g.c, NULL, 5000, &why);
    if (!s) fail_msg("%s", why.msg);
    OK(mk_client_append_async(s, ids, 900, err));
    mk_client_trace *t;
    OK(mk_client_traced(g.c, 2, 20000, &t, err));
    const mk_program *p = mk_engine_program(g.e);
    for (uint32_t i = 0; i < 2 * p->info.n_insn; i++) {
        assert_int_equal(t->record[i].rows, MK_MAX_ROWS);
        /* a step without logits reads no LM head */
        if (p->insn[i % p->info.n_insn].opcode == MK_OP_LM_HEAD) assert_int_equal(t->record[i].bytes, 0);
    }
    mk_client_trace_free(&t);
    OK(mk_client_close(&s, 20000, err));
}

static json_t *load_file(const char *path)
{
    json_error_t e;
    json_t *j = json_load_file(path, JSON_REJECT_DUPLICATES, &e);
    if (!j) fail_msg("%s:%d: %s", path, e.line, e.text);
    return j;
}

/* Events of the file: every instruction of every step once, on its worker's track; its parts lie in it. */
static void check_file(const char *path, uint32_t steps)
{
    const mk_program *p = mk_engine_program(g.e);
    const uint32_t n = p->info.n_insn;
    json_t *j = load_file(path), *events = json_object_get(j, "traceEvents"), *ev;
    assert_string_equal(json_string_value(json_object_get(json_object_get(j, "otherData"), "model")), "tiny \"model\"");
    uint8_t *seen = calloc((size_t)n * steps, 1);
    size_t i, tracks = 0, path_spans = 0;
    double from = 0, to = 0;
    long tid = -1, first = json_integer_value(json_object_get(json_object_get(j, "otherData"), "first_step"));
    json_array_foreach(events, i, ev)
    {
        const char *name = json_string_value(json_object_get(ev, "name"));
        if (json_string_value(json_object_get(ev, "ph"))[0] == 'M') {
            tracks += !strcmp(name, "thread_name");
            continue;
        }
        json_t *args = json_object_get(ev, "args");
        double ts = json_number_value(json_object_get(ev, "ts")), dur = json_number_value(json_object_get(ev, "dur"));
        long at = (long)json_integer_value(json_object_get(ev, "tid"));
        assert_true(ts >= 0 && dur >= 0);
        if (args) {
            long k = (long)json_integer_value(json_object_get(args, "step")) - first, x = (long)json_integer_value(json_object_get(args, "instruction"));
            assert_true(k >= 0 && k < (long)steps && x >= 0 && x < (long)n && !seen[k * n + x]);
            seen[k * n + x] = 1;
            const mk_insn *in = &p->insn[x];
            assert_string_equal(json_string_value(json_object_get(args, "opcode")), mk_opcode_name(in->opcode));
            assert_int_equal(json_integer_value(json_object_get(args, "layer")), in->layer == MK_NONE ? -1 : in->layer);
            assert_string_equal(json_string_value(json_object_get(args, "vector")), in->signal_vec == MK_NONE ? "" : p->vec[in->signal_vec].name);
            assert_true(x >= (long)p->queue[at] && x < (long)p->queue[at + 1]);
            from = ts;
            to = ts + dur;
            tid = at;
        } else if (at == (long)p->info.workers) {
            path_spans++;
        } else {
            assert_true(!strcmp(name, "input") || !strcmp(name, "compute"));
            assert_int_equal(at, tid);
            assert_true(ts >= from - 0.0015 && ts + dur <= to + 0.0015);
        }
    }
    for (i = 0; i < (size_t)n * steps; i++) assert_true(seen[i]);
    assert_int_equal(tracks, p->info.workers + 1);
    assert_true(path_spans > 20 * steps);
    free(seen);
    json_decref(j);
}

/* The picture of its last step; of a step that it has not: one line. */
static void check_picture(const char *path)
{
    char command[512], line[256];
    if (system("python3 -c pass >/dev/null 2>&1")) return;
    snprintf(command, sizeof command, "make -s trace-picture TRACE=%s OUT=%s/p.svg STEP=2 && grep -c '<image' %s/p.svg && tail -1 %s/p.svg && rm %s/p.svg", path,
             g.dir, g.dir, g.dir, g.dir);
    FILE *f = popen(command, "r");
    assert_non_null(f);
    assert_non_null(fgets(line, sizeof line, f));
    assert_string_equal(line, "2\n");
    assert_non_null(fgets(line, sizeof line, f));
    assert_string_equal(line, "</svg>\n");
    assert_int_equal(pclose(f), 0);
    snprintf(command, sizeof command, "python3 profiles/trace_picture.py %s %s/p.svg --step 3 2>&1", path, g.dir);
    f = popen(command, "r");
    assert_non_null(fgets(line, sizeof line, f));
    assert_string_equal(line, "trace_picture: --step: the file has steps 0 to 2\n");
    assert_int_not_equal(pclose(f), 0);
}

static void test_command(void **state)
{
    (void)state;
    char path[128], table[128], text[65536];
    snprintf(path, sizeof path, "%s/t.json", g.dir);
    snprintf(table, sizeof table, "%s/table", g.dir);
    fflush(stdout);
    int keep = dup(1);
    assert_non_null(freopen(table, "w", stdout));
    int rc = mkctl_trace(9, (char *[]){"trace", "--socket-dir", g.dir, "--steps", "3", "--ctx", "12", "-o", path, NULL});
    fflush(stdout);
    dup2(keep, 1);
    close(keep);
    assert_int_equal(rc, 0);
    check_file(path, 3);
    check_picture(path);
    FILE *f = fopen(table, "r");
    text[fread(text, 1, sizeof text - 1, f)] = 0;
    fclose(f);
    for (const char **want = (const char *[]){"GEMV qkv", "DELTA_STEP o", "EXPERT_UP u", "EXPERT_DOWN h", "LM_HEAD stats", "SCHEDULE", "bubble", "critical path",
                                              "cost of tracing", NULL};
         *want; want++)
        if (!strstr(text, *want)) fail_msg("no \"%s\" in\n%s", *want, text);
    unlink(path);
    unlink(table);
}

/* The chain is connected: each begins after the one before has ended or is the next of its queue, and its parts add up to the step. */
static void test_critical_path(void **state)
{
    (void)state;
    uint32_t ids[200];
    const mk_program *p = mk_engine_program(g.e);
    mk_client_stream *s = generate(g.c, 200);
    mk_client_trace *t;
    mk_trace_report *r;
    OK(mk_client_traced(g.c, 3, 20000, &t, err));
    OK(mk_trace_report_new(t, &r, err));
    for (uint32_t k = 0; k < 3; k++) {
        const mk_trace_step *st = &r->step[k];
        const mk_wire_trace_record *rec = t->record + (size_t)k * p->info.n_insn;
        if (st->n_path <= 20 || st->n_path >= p->info.n_insn) fail_msg("%u instructions on the path", st->n_path);
        assert_int_equal(p->insn[st->path[st->n_path - 1]].opcode, MK_OP_SCHEDULE);
        assert_int_equal(p->insn[st->path[0]].opcode, MK_OP_EMBED);
        for (uint32_t q = 1; q < st->n_path; q++) {
            uint32_t a = st->path[q - 1], b = st->path[q];
            assert_true(rec[a].start + rec[a].end <= rec[b].start + rec[b].input || b == a + 1);
        }
        uint64_t sum = st->chain.input + st->chain.weights + st->chain.compute + st->chain.publish, all = st->all.input + st->all.compute;
        assert_true(sum <= st->end - st->begin && sum >= (st->end - st->begin) / 10 * 9);
        uint64_t last = 0; /* st->end is SCHEDULE's, which others may outlast by what they do behind their last publication */
        for (uint32_t i = 0; i < p->info.n_insn; i++)
            if (rec[i].start + rec[i].end > last) last = rec[i].start + rec[i].end;
        assert_true(all <= WORKERS * (last - st->begin) && all >= WORKERS * (st->end - st->begin) / 10 * 9);
    }
    /* a trace that lies is refused */
    mk_wire_trace_insn keep = t->insn[3];
    mk_trace_report *bad;
    mk_err err = {0};
    t->insn[3].opcode = 200;
    assert_int_equal(mk_trace_report_new(t, &bad, &err), MK_E_WIRE);
    assert_null(bad);
    assert_non_null(strstr(err.msg, "instruction 3: opcode 200"));
    t->insn[3] = keep;
    t->insn[3].worker = WORKERS;
    assert_int_equal(mk_trace_report_new(t, &bad, &err), MK_E_WIRE);
    t->insn[3] = keep;
    mk_trace_report_free(&r);
    mk_client_trace_free(&t);
    finish(s, ids);
}

/* What is done beside the queues is listed as that, has tracks of its own, and is no part of a step's time nor of the path. */
static void test_aside(void **state)
{
    (void)state;
    uint32_t ids[100], asides = 0, tracks = 0;
    const mk_program *p = mk_engine_program(g.e);
    mk_client_stream *s = generate(g.c, 100);
    mk_client_trace *t;
    mk_trace_report *all, *r;
    OK(mk_client_traced(g.c, 1, 20000, &t, err));
    OK(mk_trace_report_new(t, &all, err));
    uint64_t without = all->step[0].all.count, bytes = all->step[0].all.bytes;
    mk_trace_report_free(&all);
    for (uint32_t w = 0; w < WORKERS; w++)
        for (uint32_t i = p->queue[w] + 1; i < p->queue[w + 1]; i++)
            if (p->insn[i].opcode == MK_OP_GEMV && !strcmp(p->vec[p->insn[i].signal_vec].name, "acc")) { /* as if it had taken until its reader's end */
                t->record[i].rows |= MK_WIRE_TRACE_ASIDE;
                t->record[i].end += 1000;
                asides++;
            }
    assert_true(asides > 0);
    OK(mk_trace_report_new(t, &r, err));
    assert_int_equal(r->step[0].all.count, without - asides);
    assert_true(r->step[0].all.bytes == bytes && r->step[0].rows == 1);
    for (uint32_t q = 0; q < r->step[0].n_path; q++) assert_false(t->record[r->step[0].path[q]].rows & MK_WIRE_TRACE_ASIDE);
    char path[128], line[512];
    snprintf(path, sizeof path, "%s/aside", g.dir);
    FILE *f = fopen(path, "w+");
    assert_non_null(f);
    mk_trace_print(r, f);
    OK(mk_trace_write(r, &(mk_client_info){.model = "m", .device = "d", .build = "b"}, f));
    rewind(f);
    int listed = 0;
    while (fgets(line, sizeof line, f)) {
        listed += !strncmp(line, "GEMV acc * ", 11);
        tracks += strstr(line, "beside worker ") != NULL;
    }
    fclose(f);
    unlink(path);
    assert_int_equal(listed, 1);
    assert_true(tracks >= 1 && tracks <= WORKERS);
    mk_trace_report_free(&r);
    mk_client_trace_free(&t);
    finish(s, ids);
}

static void *second(void *arg)
{
    mk_err err = {0};
    mk_client *c = mk_client_new(g.dir, "second", 5000, &err);
    mk_client_trace *t;
    (void)arg;
    int rc; /* nobody generates: once accepted it waits */
    while ((rc = mk_client_traced(c, 1, 60000, &t, &err)) == MK_E_CAPACITY) usleep(1000);
    mk_client_trace_free(&t);
    mk_client_destroy(&c);
    return rc ? strdup(err.msg) : NULL;
}

static void test_refusals(void **state)
{
    (void)state;
    mk_client_trace *t;
    mk_err why = {0};
    char text[128];
    uint32_t limit = mk_trace_limit(mk_engine_program(g.e)->info.n_insn), ids[100];
    snprintf(text, sizeof text, "steps: expected 1 to %u for this model, found %u", limit, limit + 1);
    assert_int_equal(mk_client_traced(g.c, limit + 1, 1000, &t, &why), MK_E_WIRE);
    assert_non_null(strstr(why.msg, text));
    assert_null(t);
    assert_int_equal(mk_client_traced(g.c, 0, 1000, &t, &why), MK_E_WIRE);
    assert_int_equal(mk_client_traced(g.c, 1, 60001, &t, &why), MK_E_USAGE);
    assert_int_equal(mk_client_traced(g.c, 1, 0, &t, &why), MK_E_USAGE);
    /* nobody generates */
    assert_int_equal(mk_client_traced(g.c, 2, 100, &t, &why), MK_E_WIRE);
    assert_non_null(strstr(why.msg, "fewer than 2 steps were run in time"));
    /* one at a time */
    pthread_t other;
    assert_int_equal(pthread_create(&other, NULL, second, NULL), 0);
    int rc = MK_OK;
    for (int i = 0; i < 200 && rc != MK_E_CAPACITY; i++) {
        usleep(20000);
        rc = mk_client_traced(g.c, 1, 1, &t, &why);
    }
    assert_int_equal(rc, MK_E_CAPACITY);
    assert_non_null(strstr(why.msg, "a trace is under way already"));
    mk_client_stream *s = generate(g.c, 50); /* the other one gets its step */
    void *msg;
    pthread_join(other, &msg);
    if (msg) fail_msg("%s", (char *)msg);
    assert_int_equal(finish(s, ids), 50);
    /* all of that left nothing behind */
    s = generate(g.c, 100);
    OK(mk_client_traced(g.c, 1, 20000, &t, err));
    mk_client_trace_free(&t);
    assert_int_equal(finish(s, ids), 100);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_records),       cmocka_unit_test(test_prompt_steps), cmocka_unit_test(test_command),
        cmocka_unit_test(test_critical_path), cmocka_unit_test(test_aside),        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
