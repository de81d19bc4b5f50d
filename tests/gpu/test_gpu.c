/* The resident kernel, its copies (megakernel/laid.h) in turn, against golden and twin, on the tiny checkpoint of every family. Ends with one line where there is no GPU. A JSON report goes to
 * $OUT/gpu.json ($OUT unset: the working directory): every figure, and by name what failed.
 *   test_gpu [-w WORKERS] [-f FAMILY] [-t TIMEOUT_MS] [-q]
 *     default: all families, with as many workers as the GPU has SMs and with 8; -q: a short run of kimi_linear (under compute-sanitizer) */
#include "host/pack.h"
#include "host/planner.h"
#include "host/version.h"
#include "instructions/validate.h"
#include "megakernel/gpu.h"
#include "megakernel/laid.h"
#include "megakernel/submit.h"
#include "tests/support/rig.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SLOTS  8
#define LONG   2000
#define NOISE  0.1f /* logits this close may change places: bf16 activations move a logit by up to 5e-2 of the RMS, which is 2.0 here */

static uint32_t workers, timeout_ms = 2000, sweep; /* sweep: of the next machine_open; 0: the default */
static char dir[128]; /* the family's checkpoint */
static int quick; /* for sanitizers: a step of eight rows, one of one, a few of generation */
#define QUICK 9u /* tokens of a prompt then */
static FILE *report;

/* One finding in the report: a JSON object's fields after the test's family and workers. */
#define REPORT(...)                                                                                                                                  \
    do {                                                                                                                                             \
        fprintf(report, "  {\"family\": \"%s\", \"workers\": %u, ", strrchr(dir, '/') + 1, workers);                                                      \
        fprintf(report, __VA_ARGS__);                                                                                                                \
        fprintf(report, "},\n");                                                                                                                     \
    } while (0)

/* A checkpoint on the GPU, driven through the rings. */
typedef struct machine {
    mk_model *model;
    mk_plan *plan;
    mk_gpu *gpu;
    mk_gpu_rings ring;
    uint32_t context, event_next, len[SLOTS], appended[SLOTS], done[SLOTS], submitted;
    mk_event *ev;
    uint32_t n_ev, cap_ev;
} machine;

typedef struct machine_config {
    uint32_t workers, context, epoch0, timeout_ms;
} machine_config;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static machine *current; /* for the clean-up after a failure: a resident kernel would block the next test */

static void *zeroed(uint64_t bytes)
{
    void *p = calloc(1, bytes ? bytes : 64);
    if (!p) fail_msg("out of memory");
    return p;
}

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        if (call) fail_msg("%s", err.msg);                                                                             \
    } while (0)

static machine *machine_open(const machine_config *c)
{
    machine *m = zeroed(sizeof *m);
    current = m;
    mk_err err = {0};
    mk_checkpoint *ck;
    mk_validation val;
    m->context = c->context ? c->context : 1024;
    mk_plan_config pc = {.workers = c->workers ? c->workers : workers, .max_context = m->context,
                         .kv_pages = (m->context + MK_PAGE - 1) / MK_PAGE * SLOTS, .state_slots = SLOTS};
    TRY(mk_model_read(dir, &m->model, &err));
    TRY(mk_checkpoint_open(dir, &ck, &err));
    TRY(mk_model_resolve(m->model, ck, MK_WEIGHTS_AUTO, &err));
    TRY(mk_plan_make(m->model, &pc, &m->plan, &err));
    TRY(mk_validate(m->plan->prog, &val, &err));
    const mk_program_info *i = &m->plan->prog->info;
    mk_memory host = {.tape = zeroed(i->tape_bytes), .expert = zeroed(i->expert_bytes), .embed = zeroed(i->embed_bytes),
                      .param = zeroed(i->param_floats * 4)};
    TRY(mk_pack(m->plan, ck, &host, &err));
    mk_checkpoint_close(&ck);
    static uint32_t copies; /* of the kernel: each machine has the next one, and what two of them do is compared to the bit */
    mk_gpu_config gc = {.slots = SLOTS, .sweep = sweep, .context = m->context, .timeout_ms = c->timeout_ms ? c->timeout_ms : timeout_ms, .laid = 1 + copies++ % MK_LAID_KERNELS};
    TRY(mk_gpu_new(m->plan->prog, &gc, &m->gpu, &err));
    TRY(mk_gpu_upload(m->gpu, &host, &err));
    TRY(mk_gpu_start(m->gpu, c->epoch0, &err));
    free(host.tape), free(host.expert), free(host.embed), free(host.param);
    m->ring = mk_gpu_sched_rings(m->gpu);
    return m;
}

/* Stops and frees; fails the test when the kernel did not leave in peace. */
static void machine_close(machine **pm)
{
    machine *m = *pm;
    mk_err err = {0};
    TRY(mk_gpu_stop(m->gpu, 5000, &err));
    mk_gpu_destroy(&m->gpu);
    mk_plan_destroy(&m->plan);
    mk_model_destroy(&m->model);
    free(m->ev);
    free(m);
    *pm = current = NULL;
}

static int clean(void **state)
{
    (void)state;
    if (current) mk_gpu_destroy(&current->gpu);
    current = NULL;
    return 0;
}

static void put(machine *m, mk_submit s)
{
    mk_err err = {0};
    TRY(mk_gpu_submit(m->gpu, &s, &err));
    m->submitted++;
}

static void stream(machine *m, uint32_t slot, const mk_sampling *s)
{
    mk_slot *sl = &m->ring.slot[slot];
    uint32_t gen = sl->generation + 1;
    memset(sl, 0, sizeof *sl);
    sl->generation = gen;
    sl->credits = ~0ull;
    sl->context = m->context;
    sl->state_slot = slot;
    if (s) sl->sampling = *s;
    for (uint32_t i = 0; i < m->ring.max_pages; i++) m->ring.page[slot * m->ring.max_pages + i] = (m->ring.max_pages - 1 - i) * SLOTS + slot;
    m->len[slot] = 0;
    put(m, (mk_submit){.op = MK_SUB_OPEN, .slot = (uint16_t)slot, .generation = gen});
}

static void append(machine *m, uint32_t slot, const uint32_t *tokens, uint32_t n, uint32_t flags)
{
    memcpy(m->ring.token + (size_t)slot * m->context + m->len[slot], tokens, n * sizeof *tokens);
    m->len[slot] += n;
    m->appended[slot]++;
    put(m, (mk_submit){.op = MK_SUB_APPEND, .slot = (uint16_t)slot, .generation = m->ring.slot[slot].generation, .arg0 = n, .arg1 = flags});
}

static void generate(machine *m, uint32_t slot, uint32_t n)
{
    m->done[slot]++;
    put(m, (mk_submit){.op = MK_SUB_GENERATE, .slot = (uint16_t)slot, .generation = m->ring.slot[slot].generation, .arg0 = n});
}

static void drain(machine *m)
{
    for (;; m->event_next++) {
        mk_event *e = &m->ring.event[m->event_next % MK_EVENT_RING];
        if (!mk_event_there(e, m->event_next + 1)) break;
        if (m->n_ev == m->cap_ev) {
            m->cap_ev = m->cap_ev ? 2 * m->cap_ev : 256;
            m->ev = realloc(m->ev, m->cap_ev * sizeof *m->ev);
        }
        m->ev[m->n_ev++] = *e;
        if (e->kind == MK_EV_TOKEN) m->len[e->slot]++;
        if (e->kind == MK_EV_APPENDED) m->appended[e->slot]--;
        if (e->kind == MK_EV_DONE) m->done[e->slot]--;
    }
    __atomic_store_n(m->ring.event_read, m->event_next, __ATOMIC_RELEASE);
}

/* Until every append and generation is answered. 0: the kernel left before. */
static int settle(machine *m)
{
    double end = now() + (quick ? 500 : 20);
    for (;;) {
        drain(m);
        uint32_t open = 0;
        for (uint32_t i = 0; i < SLOTS; i++) open += m->appended[i] + m->done[i];
        if (!open) return 1;
        if (mk_gpu_left(m->gpu)) return 0;
        if (now() > end) fail_msg("no answer: %u requests open after %u steps", open, mk_gpu_steps(m->gpu));
    }
}

static void run(machine *m)
{
    char text[512] = "it left";
    if (settle(m)) return;
    mk_gpu_fault(m->gpu, text, sizeof text);
    mk_err err = {0};
    mk_gpu_stop(m->gpu, 1000, &err);
    fail_msg("the kernel left: %s (%s)", text, err.msg);
}

static const mk_event *event(const machine *m, uint32_t slot, uint32_t kind, uint32_t i)
{
    for (uint32_t k = 0; k < m->n_ev; k++)
        if (m->ev[k].slot == slot && m->ev[k].kind == kind && i-- == 0) return &m->ev[k];
    return NULL;
}

/* ---- golden --------------------------------------------------------------------------------------------------------- */

typedef struct golden {
    mk_checkpoint *file;
    uint32_t prompt_n, greedy_n, vocab;
    const int32_t *prompt, *greedy;
    const float *logits, *greedy_margin;
} golden;

static const mk_tensor *tensor(golden *g, const char *name, uint32_t ndim)
{
    const mk_tensor *t = mk_checkpoint_find(g->file, name);
    if (!t || t->ndim != ndim) fail_msg("golden: tensor %s is missing or has not %u dimensions", name, ndim);
    return t;
}

static golden load(void)
{
    golden g = {0};
    mk_err err = {0};
    char path[160];
    snprintf(path, sizeof path, "%s/golden.safetensors", dir);
    TRY(mk_checkpoint_open_file(path, &g.file, &err));
    const mk_tensor *logits = tensor(&g, "logits", 2), *greedy = tensor(&g, "greedy", 1), *prompt = tensor(&g, "prompt", 1), *margin = tensor(&g, "greedy_margin", 1);
    g.prompt_n = (uint32_t)logits->shape[0];
    g.vocab = (uint32_t)logits->shape[1];
    g.greedy_n = (uint32_t)greedy->shape[0];
    assert_int_equal(prompt->shape[0], g.prompt_n);
    assert_int_equal(margin->shape[0], g.greedy_n);
    g.prompt = prompt->data, g.logits = logits->data, g.greedy = greedy->data, g.greedy_margin = margin->data;
    return g;
}

static double kl(const golden *g, const float *ref, const float *l)
{
    double ma = -1e30, mb = -1e30, sa = 0, sb = 0, sum = 0;
    for (uint32_t i = 0; i < g->vocab; i++) ma = fmax(ma, ref[i]), mb = fmax(mb, l[i]);
    for (uint32_t i = 0; i < g->vocab; i++) sa += exp(ref[i] - ma), sb += exp(l[i] - mb);
    for (uint32_t i = 0; i < g->vocab; i++) {
        double p = (ref[i] - ma) - log(sa), q = (l[i] - mb) - log(sb);
        sum += exp(p) * (p - q);
    }
    return sum;
}

/* The prompt one token at a time; after each step the copy engine fetches row 0 of the logits. */
static void forced(const golden *g, uint32_t w, uint32_t epoch0, uint32_t n, float *logits)
{
    machine *m = machine_open(&(machine_config){.workers = w, .epoch0 = epoch0});
    const mk_program *p = m->plan->prog;
    uint64_t at = 0;
    mk_err err = {0};
    for (uint32_t i = 0; i < p->info.n_vec; i++)
        if (!strcmp(p->vec[i].name, "logits")) at = p->vec[i].offset;
    stream(m, 0, NULL);
    for (uint32_t i = 0; i < n; i++) {
        append(m, 0, (const uint32_t *)g->prompt + i, 1, MK_APPEND_LOGPROBS);
        run(m);
        if (i) TRY(mk_gpu_read_bulk(m->gpu, at, logits + (size_t)(i - 1) * g->vocab, g->vocab * sizeof *logits, &err));
    }
    generate(m, 0, 1);
    run(m);
    TRY(mk_gpu_read_bulk(m->gpu, at, logits + (size_t)(n - 1) * g->vocab, g->vocab * sizeof *logits, &err));
    machine_close(&m);
}

typedef struct twin_run {
    const golden *g;
    float *logits;
} twin_run;

static void on_logits(void *arg, const mk_row *row, const float *l)
{
    twin_run *t = arg;
    if (row->pos < t->g->prompt_n) memcpy(t->logits + (size_t)row->pos * t->g->vocab, l, t->g->vocab * sizeof *l);
}

static void compare(const golden *g, const char *what, const float *ref, const float *l, uint32_t n)
{
    double worst = 0, err = 0, rms = 0;
    for (uint32_t p = 0; p < n; p++) {
        double k = kl(g, ref + (size_t)p * g->vocab, l + (size_t)p * g->vocab);
        if (!(k <= worst)) worst = k;
        for (uint32_t i = 0; i < g->vocab; i++) {
            double a = ref[p * g->vocab + i], d = fabs(a - l[p * g->vocab + i]);
            if (!(d <= err)) err = d;
            rms += a * a;
        }
    }
    rms = sqrt(rms / ((double)n * g->vocab));
    print_message("%s, %u workers, %s: max KL %.2e, max error / RMS %.2e over %u positions\n", dir, workers, what, worst, err / rms, n);
    REPORT("\"compare\": \"%s\", \"positions\": %u, \"max_kl\": %.3e, \"max_err_over_rms\": %.3e", what, n, worst, err / rms);
    assert_true(worst <= 1e-3);
}

static void oracle(void **state)
{
    (void)state;
    golden g = load();
    uint32_t n = quick ? QUICK : g.prompt_n;
    size_t bytes = (size_t)g.prompt_n * g.vocab * 4;
    float *a = malloc(bytes), *b = malloc(bytes), *t = malloc(bytes);
    memset(a, 0xff, bytes), memset(b, 0xff, bytes), memset(t, 0xff, bytes);
    forced(&g, workers, 0, n, a);
    compare(&g, "GPU against golden", g.logits, a, n);
    twin_run tr = {&g, t};
    mk_session *s = rig_open(&(mk_session_config){.dir = dir, .workers = workers});
    s->on_logits = on_logits;
    s->arg = &tr;
    mk_session_stream(s, 0, NULL, 0);
    mk_session_append(s, 0, (const uint32_t *)g.prompt, n, MK_APPEND_LOGPROBS);
    mk_session_generate(s, 0, 1);
    rig_run(s);
    mk_session_close(&s);
    compare(&g, "twin against golden", g.logits, t, n);
    compare(&g, "GPU against twin", t, a, n);
    if (!quick) {
        forced(&g, workers, 0xfffffff0u, n, b); /* epochs wrap */
        assert_memory_equal(a, b, bytes);
    }
    free(a), free(b), free(t);
    mk_checkpoint_close(&g.file);
}

static void greedy(void **state)
{
    (void)state;
    golden g = load();
    machine *m = machine_open(&(machine_config){0});
    /* quick: under a sanitizer a whole prompt takes minutes. After a part of it the golden says nothing of the tokens; that they come is what counts there. */
    uint32_t same = 0, n = quick ? 4 : g.greedy_n, prompt_n = quick && g.prompt_n > QUICK ? QUICK : g.prompt_n;
    stream(m, 0, NULL);
    append(m, 0, (const uint32_t *)g.prompt, prompt_n, 0);
    generate(m, 0, n);
    run(m);
    const mk_event *done = event(m, 0, MK_EV_DONE, 0);
    assert_non_null(done);
    assert_int_equal(done->reason, MK_DONE_LENGTH);
    for (; same < n; same++) {
        const mk_event *t = event(m, 0, MK_EV_TOKEN, same);
        assert_non_null(t);
        assert_int_equal(t->position, prompt_n + same);
        if (prompt_n < g.prompt_n || t->token == (uint32_t)g.greedy[same]) continue;
        print_message("token %u differs; the golden's margin there is %.3f\n", same, g.greedy_margin[same]);
        assert_true(g.greedy_margin[same] < NOISE); /* from here on another text */
        break;
    }
    if (prompt_n == g.prompt_n) {
        print_message("%s, %u workers: %u of %u greedy tokens are the golden's\n", dir, workers, same, n);
        REPORT("\"greedy_tokens\": %u, \"equal\": %u", n, same);
    }
    machine_close(&m);
    mk_checkpoint_close(&g.file);
}

/* ---- row invariance ------------------------------------------------------------------------------------------------- */

enum { NEW = 24, N = 120 };

/* Logprobs of a prompt's tokens, then a sampled continuation, as bits. */
typedef struct life {
    uint32_t lp[N], token[NEW], token_lp[NEW];
} life;

static life live(const golden *g, uint32_t chunk, int company, uint32_t epoch0)
{
    life l;
    memset(&l, 0xff, sizeof l);
    mk_sampling s = {.temperature = 0.8f, .top_p = 0.95f, .top_k = 50, .seed = 7};
    machine *m = machine_open(&(machine_config){.epoch0 = epoch0});
    for (uint32_t k = 1; company && k < SLOTS; k++) { /* others of other lengths and lives */
        mk_sampling o = {.temperature = k & 1 ? 1.0f : 0.0f, .top_p = 1.0f, .min_p = k == 3 ? 0.05f : 0.0f, .seed = k};
        stream(m, k, &o);
        append(m, k, (const uint32_t *)g->prompt + 11 * k, 5 + 9 * k, 0);
        generate(m, k, 60 + 3 * k);
    }
    stream(m, 0, &s);
    for (uint32_t i = 0; i < N; i += chunk) {
        append(m, 0, (const uint32_t *)g->prompt + i, chunk < N - i ? chunk : N - i, MK_APPEND_LOGPROBS);
        if (chunk <= 8)
            while (m->appended[0]) {
                drain(m);
                if (mk_gpu_left(m->gpu)) run(m);
            }
    }
    generate(m, 0, NEW);
    run(m);
    for (uint32_t i = 0; i + 1 < N; i++) {
        const mk_event *e = event(m, 0, MK_EV_LOGPROB, i);
        assert_non_null(e);
        assert_int_equal(e->position, i + 1);
        memcpy(&l.lp[i], &e->logprob, 4);
    }
    for (uint32_t i = 0; i < NEW; i++) {
        const mk_event *e = event(m, 0, MK_EV_TOKEN, i);
        assert_non_null(e);
        l.token[i] = e->token;
        memcpy(&l.token_lp[i], &e->logprob, 4);
    }
    for (uint32_t k = 0; k < (company ? SLOTS : 1u); k++) {
        assert_non_null(event(m, k, MK_EV_DONE, 0));
        assert_null(event(m, k, MK_EV_DONE, 1));
    }
    machine_close(&m);
    return l;
}

static uint32_t differing(const life *a, const life *b)
{
    const uint8_t *x = (const uint8_t *)a, *y = (const uint8_t *)b;
    uint32_t n = 0;
    for (size_t i = 0; i < sizeof *a; i++) n += (uint32_t)__builtin_popcount(x[i] ^ y[i]);
    return n;
}

static void invariance(void **state)
{
    (void)state;
    golden g = load();
    life ref = live(&g, N, 0, 0);
    static const struct {
        const char *name;
        uint32_t chunk;
        int company;
        uint32_t epoch0, sweep;
    } c[] = {{"second run", N, 0, 0, 0}, {"third run", N, 0, 0, 0}, {"chunks of 1", 1, 0, 0, 0}, {"chunks of 3", 3, 0, 0, 0},
             {"chunks of 8", 8, 0, 0, 0}, {"with 7 others", N, 1, 0, 0}, {"chunks of 3, 7 others", 3, 1, 0, 0}, {"epochs from 0xfffffff0", N, 0, 0xfffffff0u, 0},
             {"exchange swept every 2 steps, 7 others", 3, 1, 0xfffff000u, 2}};
    uint32_t worst = 0;
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        sweep = c[i].sweep;
        life l = live(&g, c[i].chunk, c[i].company, c[i].epoch0);
        sweep = 0;
        uint32_t bits = differing(&ref, &l);
        print_message("%s, %u workers, row invariance, %s: %u differing bits\n", dir, workers, c[i].name, bits);
        REPORT("\"row_invariance\": \"%s\", \"differing_bits\": %u", c[i].name, bits);
        if (bits > worst) worst = bits;
    }
    assert_int_equal(worst, 0);
    mk_checkpoint_close(&g.file);
}

/* ---- one entry, many tokens ----------------------------------------------------------------------------------------- */

static void long_generation(void **state)
{
    (void)state;
    golden g = load();
    uint32_t n = quick ? 2 : LONG; /* a draw takes two seconds under racecheck */
    machine *m = machine_open(&(machine_config){.context = 4096});
    mk_sampling s = {.temperature = 1.0f, .top_p = 1.0f, .seed = 3};
    stream(m, 0, &s);
    append(m, 0, (const uint32_t *)g.prompt, quick ? QUICK : 20, 0);
    run(m);
    uint32_t before = m->submitted;
    generate(m, 0, n);
    run(m);
    assert_int_equal(m->submitted - before, 1);
    const mk_event *first = event(m, 0, MK_EV_TOKEN, 0), *last = event(m, 0, MK_EV_TOKEN, n - 1), *done = event(m, 0, MK_EV_DONE, 0);
    assert_non_null(last);
    assert_non_null(done);
    assert_int_equal(done->arg, n);
    double us = (double)(last->device_ns - first->device_ns) / 1e3 / (n - 1);
    print_message("%u sampled tokens from one submit entry: %.1f us a token (%u workers)\n", n, us, workers);
    REPORT("\"one_entry_tokens\": %u, \"us_per_token\": %.2f, \"sampling\": \"temperature 1\"", n, us);
    if (!quick) { /* greedy, for the time */
        stream(m, 1, NULL);
        append(m, 1, (const uint32_t *)g.prompt, 20, 0);
        generate(m, 1, 512);
        run(m);
        first = event(m, 1, MK_EV_TOKEN, 0), last = event(m, 1, MK_EV_TOKEN, 511);
        us = (double)(last->device_ns - first->device_ns) / 1e3 / 511;
        print_message("greedy: %.1f us a token\n", us);
        REPORT("\"greedy_us_per_token\": %.2f", us);
    }
    machine_close(&m);
    mk_checkpoint_close(&g.file);
}

/* ---- a hang is found, named and survived ------------------------------------------------------------------------------ */

static void hang(void **state)
{
    (void)state;
    golden g = load();
    mk_err err = {0};
    machine *m = machine_open(&(machine_config){.timeout_ms = 300});
    /* One that everybody waits for: behind another, those who wait for it and those who wait for them begin to wait within a microsecond, and any may say so first. */
    const mk_program *p = m->plan->prog;
    const mk_insn *in = &p->insn[p->queue[3] + 6];
    while (in->seq + 1 < p->queue[4] - p->queue[3] && (in->signal_vec == MK_NONE || strcmp(p->vec[in->signal_vec].name, "h"))) in++;
    put(m, (mk_submit){.op = MK_SUB_HANG, .arg0 = MK_HANG_AT(3, in->seq), .arg1 = 12});
    stream(m, 0, NULL);
    append(m, 0, (const uint32_t *)g.prompt, 20, 0);
    generate(m, 0, 100);
    double t = now();
    assert_int_equal(settle(m), 0);
    t = now() - t;
    char text[512], want[64];
    assert_int_equal(mk_gpu_fault(m->gpu, text, sizeof text), 1);
    print_message("after %.0f ms: %s\n", 1e3 * t, text);
    REPORT("\"hang_injected\": \"worker 3, instruction %u (%s), step 12\", \"found_after_ms\": %.0f, \"report\": \"%s\"", in->seq, mk_opcode_name(in->opcode),
           1e3 * t, text);
    snprintf(want, sizeof want, "worker 3, instruction %u (%s", in->seq, mk_opcode_name(in->opcode));
    assert_non_null(strstr(text, "step 12:"));
    assert_non_null(strstr(text, want));
    assert_int_not_equal(mk_gpu_stop(m->gpu, 1000, &err), 0);
    /* the same machine again, without the fault (step 12 is not reached) */
    memset(m->appended, 0, sizeof m->appended), memset(m->done, 0, sizeof m->done);
    m->event_next = m->n_ev = 0;
    TRY(mk_gpu_start(m->gpu, 4096 * 1024, &err));
    stream(m, 0, NULL);
    append(m, 0, (const uint32_t *)g.prompt, 20, 0);
    generate(m, 0, 4);
    run(m);
    assert_non_null(event(m, 0, MK_EV_DONE, 0));
    machine_close(&m);
    mk_checkpoint_close(&g.file);
}

/* ---- all of it ------------------------------------------------------------------------------------------------------ */

typedef struct test {
    const char *name;
    void (*run)(void **state);
    int all;   /* with every family; else with the first alone */
    int quick; /* part of a quick run */
} test;
static const test tests[] = {{"oracle", oracle, 1, 1}, {"greedy", greedy, 1, 1}, {"invariance", invariance, 1, 0}, {"long_generation", long_generation, 0, 1}, {"hang", hang, 0, 0}};

typedef struct job {
    const test *test;
    const char *family;
    uint32_t workers;
    int passed;
} job;

static void one(void **state)
{
    job *j = *state;
    workers = j->workers;
    snprintf(dir, sizeof dir, "tests/oracle/%s", j->family);
    void *none = NULL;
    j->test->run(&none);
    j->passed = 1;
}

/* Experts that small may not reach every worker: then half as many, and so on. */
static uint32_t most_workers(const char *family, uint32_t n)
{
    char path[128];
    mk_err err = {0};
    mk_model *m = NULL;
    mk_checkpoint *ck = NULL;
    snprintf(path, sizeof path, "tests/oracle/%s", family);
    if (mk_model_read(path, &m, &err) || mk_checkpoint_open(path, &ck, &err) || mk_model_resolve(m, ck, MK_WEIGHTS_AUTO, &err)) {
        fprintf(stderr, "test_gpu: %s\n", err.msg);
        exit(3);
    }
    for (;; n /= 2) {
        mk_plan *plan = NULL;
        mk_plan_config pc = {.workers = n, .max_context = 1024, .kv_pages = 16, .state_slots = 1};
        int rc = mk_plan_make(m, &pc, &plan, &err);
        mk_plan_destroy(&plan);
        if (rc != MK_E_CAPACITY || n < 2) break;
        printf("%s: %s\n", family, err.msg);
    }
    mk_checkpoint_close(&ck);
    mk_model_destroy(&m);
    return n;
}

int main(int argc, char **argv)
{
    static const char *const families[] = {"kimi_linear", "deepseek_v3", "moonlight", "glm4_moe_lite", "llama",
                                           "qwen3_next", "qwen3_5_moe", "qwen3_5", "llama_128"};
    enum { FAMILIES = sizeof families / sizeof *families, TESTS = sizeof tests / sizeof *tests };
    const char *only = NULL;
    int c;
    mk_gpu_info info;
    mk_err err = {0};
    if (mk_gpu_probe(0, &info, &err)) {
        fprintf(stderr, "test_gpu: %s\n", err.msg);
        return 1;
    }
    uint32_t counts[2] = {info.sms, 8}, n_counts = 2, n = 0, failed = 0;
    while ((c = getopt(argc, argv, "w:f:t:q")) != -1)
        if (c == 'w')
            counts[0] = (uint32_t)strtoul(optarg, NULL, 10), n_counts = 1;
        else if (c == 'f')
            only = optarg;
        else if (c == 't')
            timeout_ms = (uint32_t)strtoul(optarg, NULL, 10);
        else if (c == 'q')
            quick = 1, only = "kimi_linear", n_counts = 1;
        else
            return 2;
    char path[512];
    snprintf(path, sizeof path, "%s/gpu.json", getenv("OUT") ? getenv("OUT") : ".");
    if (!(report = fopen(path, "w"))) return 6;
    fprintf(report, "{\"build\": \"%s\", \"device\": \"%s\", \"sms\": %u, \"results\": [\n", mk_build(), info.name, info.sms);

    static job jobs[2 * FAMILIES * TESTS];
    static char names[2 * FAMILIES * TESTS][80];
    static struct CMUnitTest units[2 * FAMILIES * TESTS];
    for (uint32_t k = 0; k < n_counts; k++)
        for (uint32_t f = 0; f < FAMILIES; f++)
            for (uint32_t t = 0; t < TESTS; t++) {
                if ((only && strcmp(only, families[f])) || (f && !tests[t].all) || (quick && !tests[t].quick)) continue;
                jobs[n] = (job){&tests[t], families[f], most_workers(families[f], counts[k]), 0};
                snprintf(names[n], sizeof names[n], "%s %s, %u workers", tests[t].name, families[f], jobs[n].workers);
                units[n] = (struct CMUnitTest){names[n], one, NULL, clean, &jobs[n]};
                n++;
            }
    if (!n) {
        fprintf(stderr, "test_gpu: there is no family %s\n", only);
        return 2;
    }
    _cmocka_run_group_tests("gpu", units, n, NULL, NULL);
    for (uint32_t i = 0; i < n; i++) {
        const job *j = &jobs[i];
        fprintf(report, "  {\"family\": \"%s\", \"workers\": %u, \"test\": \"%s\", \"result\": \"%s\"}%s\n", j->family, j->workers, j->test->name,
                j->passed ? "passed" : "FAILED", i + 1 < n ? "," : "");
        failed += !j->passed;
    }
    fprintf(report, "], \"tests\": %u, \"failed\": %u}\n", n, failed);
    fclose(report);
    return failed != 0;
}
