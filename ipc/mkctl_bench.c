/* mkctl bench: figures as JSON, alone on the daemon. With --ctx: steps at pinned positions, one file for each context and number of rows (design.md section 11).
 * Without: the same generation again and again, as a client sees it. */
#include "ipc/mkctl.h"
#include "ipc/mkctl_measure.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static uint64_t now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

typedef struct sample {
    double *device_ms, *client_ms; /* [n] between tokens, all repetitions together */
    double *first_ms;              /* [repeat] */
    size_t n, n_first;
    double prompt_s, decode_s; /* sums: client clock for the prompt, device clock for decoding */
    uint64_t prompt_tokens, decoded;
} sample;

/* One repetition; q NULL: warm-up. */
static int once(mk_client *c, const uint32_t *prompt, uint32_t n, uint32_t tokens, sample *q, mk_err *err)
{
    mk_client_options o = {.context = n + tokens, .sampling = 1, .own_stop = 1}; /* greedy, never stops early */
    mk_client_stream *s = mk_client_open(c, &o, 5000, err);
    if (!s) return err->code;
    uint64_t start = now_ns(), first = 0, last = 0, device_first = 0, device_last = 0;
    /* The prompt's last token waits for GENERATE, so the prompt proper is n - 1 tokens. */
    int rc = mk_client_append(s, prompt, n, NULL, mkctl_prompt_ms(n), err);
    uint64_t prompt_done = now_ns();
    if (!rc) rc = mk_client_generate(s, &(mk_client_generation){.max_new = tokens}, err);
    uint32_t got = 0;
    while (!rc) {
        mk_client_event ev;
        rc = mk_client_next(s, &ev, 60000, err);
        if (rc) break;
        if (ev.kind == MK_CLIENT_DONE) {
            if (got != tokens)
                rc = mk_fail(err, MK_E_WIRE, "the generation ended after %u of %u tokens (%s)", got, tokens,
                             mk_wire_reason_name(ev.done.reason));
            break;
        }
        if (!got) {
            first = ev.received_ns;
            device_first = ev.token.device_ns;
        } else if (q) {
            q->device_ms[q->n] = (double)(int64_t)(ev.token.device_ns - device_last) * 1e-6;
            q->client_ms[q->n++] = (double)(ev.received_ns - last) * 1e-6;
        }
        last = ev.received_ns;
        device_last = ev.token.device_ns;
        got++;
    }
    if (!rc && q) {
        q->first_ms[q->n_first++] = (double)(first - start) * 1e-6;
        q->prompt_s += (double)(prompt_done - start) * 1e-9;
        q->prompt_tokens += n - 1;
        q->decode_s += (double)(device_last - device_first) * 1e-9;
        q->decoded += tokens - 1;
    }
    mk_err ignored;
    mk_client_close(&s, 5000, rc ? &ignored : err);
    return rc;
}

static json_t *quantiles(double *v, size_t n)
{
    double p50 = mkctl_quantile(v, n, 0.5);
    return json_pack("{s:f,s:f,s:f}", "p50", p50, "p99", mkctl_quantile(v, n, 0.99), "p999", mkctl_quantile(v, n, 0.999));
}

static json_t *report(const mk_client_info *a, sample *q, uint32_t n, uint32_t tokens, uint32_t repeat)
{
    char date[32];
    mk_measure_date(date);
    json_t *j = json_pack("{s:s, s:s, s:i, s:i, s:i, s:i, s:i}", "preset", a->model, "device", a->device, "ctx", (int)(n + tokens), "rows", 1,
                          "tokens", (int)tokens, "prompt_tokens", (int)n, "repeat", (int)repeat);
    if (!j) return NULL;
    json_object_set_new(j, "ms_per_token", quantiles(q->device_ms, q->n)); /* device clock */
    json_object_set_new(j, "client_ms_per_token", quantiles(q->client_ms, q->n));
    json_object_set_new(j, "ttft_ms", quantiles(q->first_ms, q->n_first)); /* client clock, prompt included */
    json_object_set_new(j, "tok_s", q->decode_s > 0 ? json_real((double)q->decoded / q->decode_s) : json_null());
    json_object_set_new(j, "prompt_tok_s",
                        q->prompt_s > 0 && q->prompt_tokens ? json_real((double)q->prompt_tokens / q->prompt_s) : json_null());
    json_object_set_new(j, "commit", json_string(a->build));
    json_object_set_new(j, "date", json_string(date));
    return j;
}

/* ---- pinned positions ------------------------------------------------------------------------------------------------ */

#define PROMPT 512u /* tokens whose processing is timed, at each position */

/* One context and number of rows; the report or NULL. Clocks: of before and after, ownership stays. */
static json_t *pinned_report(const mk_client_info *a, const mk_measured *m, const mk_pinned *q, mk_pinned_result *r, json_t *before, json_t *after,
                             const json_t *baseline)
{
    char date[32];
    double sum = 0;
    const int same = json_integer_value(json_object_get(baseline, "ctx")) == q->context && json_integer_value(json_object_get(baseline, "rows")) == q->rows;
    for (uint32_t i = 0; i < q->steps; i++) sum += r->step_ms[i];
    double p50 = mkctl_quantile(r->step_ms, q->steps, 0.5), p99 = mkctl_quantile(r->step_ms, q->steps, 0.99);
    double p999 = mkctl_quantile(r->step_ms, q->steps, 0.999), bytes = mk_bytes_step(&m->bytes, q->rows, q->context), rate = bytes / p50 * 1e-6;
    mk_measure_date(date);
    json_t *j = json_pack("{s:s, s:s, s:i, s:i, s:s, s:I, s:I}", "preset", a->model, "device", a->device, "ctx", (int)q->context, "rows", (int)q->rows,
                          "dtype", m->dtype, "tokens", (json_int_t)q->steps * q->rows, "steps", (json_int_t)q->steps);
    if (!j) return NULL;
    json_object_set_new(j, "ms_per_token", json_pack("{s:f,s:f,s:f}", "p50", p50 / q->rows, "p99", p99 / q->rows, "p999", p999 / q->rows));
    json_object_set_new(j, "ms_per_step", json_pack("{s:f,s:f,s:f}", "p50", p50, "p99", p99, "p999", p999));
    json_object_set_new(j, "tok_s", json_real(q->steps * q->rows / sum * 1e3));
    json_object_set_new(j, "bytes_per_token", json_real(bytes / q->rows)); /* the model's own */
    json_object_set_new(j, "bytes_per_step", json_real(bytes));
    json_object_set_new(j, "program_bytes_per_token", /* what this program reads at one row */
                        q->rows == 1 ? json_real((double)m->program_bytes + (double)m->bytes.kv * q->context) : json_null());
    json_object_set_new(j, "achieved_gb_s", json_real(rate));
    json_object_set_new(j, "ceiling_gb_s", m->ceiling_gb_s > 0 ? json_real(m->ceiling_gb_s) : json_null());
    json_object_set_new(j, "fraction", m->ceiling_gb_s > 0 ? json_real(rate / m->ceiling_gb_s) : json_null());
    json_object_set_new(j, "launches", json_integer((json_int_t)m->launches));
    json_object_set_new(j, "baseline_graph_ms", same ? json_real(json_number_value(json_object_get(baseline, "graph_ms"))) : json_null());
    json_object_set_new(j, "prompt_tok_s", r->prompt_tok_s > 0 ? json_real(r->prompt_tok_s) : json_null()); /* client clock, 8 rows a step */
    json_object_set_new(j, "clocks", json_pack("{s:O,s:O}", "before", before, "after", after));
    json_object_set_new(j, "routing_seed", json_integer((json_int_t)q->seed));
    json_object_set_new(j, "layers", json_integer((json_int_t)a->welcome.layers)); /* of glm52-mla: bricks of a step */
    json_object_set_new(j, "sampling", q->temperature > 0 ? json_pack("{s:f,s:f,s:i}", "temperature", (double)q->temperature, "top_p", (double)q->top_p, "top_k", (int)q->top_k) : json_string("greedy"));
    json_object_set_new(j, "commit", json_string(a->build));
    json_object_set_new(j, "date", json_string(date));
    return j;
}

/* Measures every context with every number of rows; one line each on stdout, one file each in `out` (NULL: the JSON on stdout instead). */
static int pinned(mk_client *c, const uint32_t *ctx, uint32_t n_ctx, const uint32_t *rows, uint32_t n_rows, const mk_pinned *like, const char *out,
                  const json_t *baseline, mk_err *err)
{
    const mk_client_info *a = mk_client_about(c);
    mk_measured m;
    int rc = mk_measure_about(c, &m, err);
    uint32_t measured = 0;
    if (!rc && out && (strchr(a->model, '/') || a->model[0] == '.')) rc = mk_fail(err, MK_E_WIRE, "the daemon's model has the name \"%s\", of which no file can be made", a->model);
    json_t *before = mk_measure_clocks(), *after;
    for (uint32_t i = 0; i < n_ctx * n_rows && !rc; i++) {
        mk_pinned q = *like;
        q.context = ctx[i / n_rows];
        q.rows = rows[i % n_rows];
        q.prompt = i % n_rows ? 0 : PROMPT;
        mk_pinned_result r;
        if (n_ctx > 1 && mk_pinned_context(&q) > a->welcome.context) {
            fprintf(stderr, "mkctl bench: left out: context %u needs a stream of %u tokens, the limit of a stream is %u\n", q.context, mk_pinned_context(&q),
                    a->welcome.context);
            continue;
        }
        rc = mk_measure_pinned(c, &q, &r, err);
        measured++;
        after = mk_measure_clocks();
        if (!rc) rc = mk_measure_about(c, &m, err); /* launches: as of now */
        json_t *j = rc ? NULL : pinned_report(a, &m, &q, &r, before, after, baseline);
        if (!rc && !j) rc = mk_fail(err, MK_E_SYSTEM, "out of memory");
        if (!rc && out) {
            char path[4096];
            snprintf(path, sizeof path, "%.3000s/%.255s-ctx%u-rows%u.json", out, a->model, q.context, q.rows);
            if (json_dump_file(j, path, JSON_INDENT(2) | JSON_REAL_PRECISION(9))) rc = mk_fail(err, MK_E_SYSTEM, "%s: %s", path, strerror(errno));
            printf("%-22s ctx %-6u rows %u  step p50 %8.4f  p99 %8.4f  p99.9 %8.4f ms  %8.1f tok/s", a->model, q.context, q.rows,
                   json_number_value(json_object_get(json_object_get(j, "ms_per_step"), "p50")),
                   json_number_value(json_object_get(json_object_get(j, "ms_per_step"), "p99")),
                   json_number_value(json_object_get(json_object_get(j, "ms_per_step"), "p999")), json_number_value(json_object_get(j, "tok_s")));
            if (m.ceiling_gb_s > 0) printf("  %5.1f %% of %.0f GB/s", 100 * json_number_value(json_object_get(j, "fraction")), m.ceiling_gb_s);
            if (r.prompt_tok_s > 0) printf("  prompt %.0f tok/s", r.prompt_tok_s);
            putchar('\n');
            fflush(stdout);
        } else if (!rc) {
            json_dumpf(j, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
            putchar('\n');
        }
        json_decref(j);
        json_decref(before);
        before = after;
        free(r.step_ms);
    }
    json_decref(before);
    if (!rc && !measured) rc = mk_fail(err, MK_E_USAGE, "--ctx: no context fits a stream of this daemon");
    return rc;
}

/* Said before anything is measured. */
static int check_out_dir(const char *path, mk_err *err)
{
    struct stat st;
    if (stat(path, &st)) return mk_fail(err, MK_E_SYSTEM, "--out-dir: %s: %s", path, strerror(errno));
    if (!S_ISDIR(st.st_mode)) return mk_fail(err, MK_E_USAGE, "--out-dir: %s: expected a directory", path);
    return access(path, W_OK | X_OK) ? mk_fail(err, MK_E_SYSTEM, "--out-dir: %s: %s", path, strerror(errno)) : MK_OK;
}

static int bench_pinned(const char *dir, const char *ctx_text, const char *rows_text, const mk_pinned *like, const char *out, const char *baseline_file)
{
    mk_err err = {0};
    uint32_t *ctx = NULL, *rows = NULL, n_ctx = 0, n_rows = 0;
    mk_client *c = NULL;
    json_error_t why;
    json_t *baseline = baseline_file ? json_load_file(baseline_file, 0, &why) : NULL;
    if (baseline_file && !json_is_number(json_object_get(baseline, "graph_ms")))
        return mkctl_usage("bench: --baseline: %s: expected the JSON of profiles/baseline (%s)", baseline_file, baseline ? "no graph_ms" : why.text);
    int rc = mkctl_parse_ids(ctx_text, &ctx, &n_ctx, &err);
    if (!rc) rc = mkctl_parse_ids(rows_text, &rows, &n_rows, &err);
    for (uint32_t i = 0; i < n_ctx && !rc; i++)
        if (!ctx[i] || ctx[i] > 1u << 27) rc = mk_fail(&err, MK_E_USAGE, "--ctx: expected contexts of 1 to %u, found %u", 1u << 27, ctx[i]);
    for (uint32_t i = 0; i < n_rows && !rc; i++)
        if (!rows[i] || rows[i] > 8) rc = mk_fail(&err, MK_E_USAGE, "--rows: expected 1 to 8, found %u", rows[i]);
    if (!rc && !n_ctx) rc = mk_fail(&err, MK_E_USAGE, "--ctx: expected a context");
    if (!rc && !n_rows) rc = mk_fail(&err, MK_E_USAGE, "--rows: expected a number of rows");
    if (!rc && (like->steps < 2 || like->steps > 10000000)) rc = mk_fail(&err, MK_E_USAGE, "--steps: expected 2 to 10000000, found %u", like->steps);
    if (!rc && out) rc = check_out_dir(out, &err);
    if (!rc && !(c = mk_client_new(dir, "mkctl bench", 5000, &err))) rc = err.code;
    if (!rc) rc = pinned(c, ctx, n_ctx, rows, n_rows, like, out, baseline, &err);
    mk_client_destroy(&c);
    free(ctx);
    free(rows);
    json_decref(baseline);
    return rc ? mkctl_failed("bench", &err) : MK_OK;
}

int mkctl_bench(int argc, char **argv)
{
    const char *dir = mkctl_default_dir(), *out = NULL, *ctx = NULL, *rows = "1", *out_dir = NULL, *baseline = NULL;
    enum { STEPS = 2000, SEED = 1, TOKENS = 256, PROMPT_TOKENS = 32, REPEAT = 5, WARMUP = 1 }; /* unless a flag says otherwise */
    mk_pinned like = {.steps = STEPS, .seed = SEED};
    double temperature = 0, top_p = 1;
    uint32_t tokens = TOKENS, n = PROMPT_TOKENS, repeat = REPEAT, warmup = WARMUP;
    const mkctl_flag flag[] = {{"--socket-dir", MKCTL_TEXT, &dir, "the daemon's sockets"},
                               {"--ctx", MKCTL_TEXT, &ctx, "pinned positions: contexts, e.g. 512,2048 (needs mkd --bench yes); without it a generation as a client sees it:"},
                               {"--rows", MKCTL_TEXT, &rows, "with --ctx: tokens of one stream in a step, e.g. 1,2,4,8"},
                               {"--steps", MKCTL_U32, &like.steps, "with --ctx: steps to measure"},
                               {"--seed", MKCTL_U64, &like.seed, "with --ctx: of the random token ids, and so of the experts' routes"},
                               {"--temperature", MKCTL_REAL, &temperature, "with --ctx: of the sampling; 0: greedy"},
                               {"--top-p", MKCTL_REAL, &top_p, "with --ctx and --temperature"},
                               {"--top-k", MKCTL_U32, &like.top_k, "with --ctx and --temperature; 0: off"},
                               {"--out-dir", MKCTL_TEXT, &out_dir, "with --ctx: write MODEL-ctxN-rowsR.json there and a line each to stdout"},
                               {"--baseline", MKCTL_TEXT, &baseline, "with --ctx: JSON of profiles/baseline from the same run; its graph's time is noted where context and rows are the same"},
                               {"--tokens", MKCTL_U32, &tokens, "tokens to generate"},
                               {"--prompt", MKCTL_U32, &n, "tokens of the prompt"},
                               {"--repeat", MKCTL_U32, &repeat, "repetitions"},
                               {"--warmup", MKCTL_U32, &warmup, "repetitions before them that do not count"},
                               {"--out", MKCTL_TEXT, &out, "write the JSON to this file too"}};
    int rc = mkctl_flags(argc, argv, flag, sizeof flag / sizeof flag[0], NULL, 0, NULL);
    if (rc) return rc < 0 ? MK_OK : rc;
    const int pinned = strcmp(rows, "1") || like.steps != STEPS || like.seed != SEED || temperature != 0 || top_p != 1 || like.top_k || out_dir || baseline;
    if (!ctx && pinned) return mkctl_usage("bench: --rows, --steps, --seed, --temperature, --top-p, --top-k, --out-dir and --baseline need --ctx");
    if (ctx && (tokens != TOKENS || n != PROMPT_TOKENS || repeat != REPEAT || warmup != WARMUP || out)) return mkctl_usage("bench: --tokens, --prompt, --repeat, --warmup and --out go without --ctx");
    if (temperature == 0 && (top_p != 1 || like.top_k)) return mkctl_usage("bench: --top-p and --top-k need --temperature");
    if (like.top_k > INT32_MAX) return mkctl_usage("bench: --top-k: expected at most %d, found %u", INT32_MAX, like.top_k);
    like.temperature = (float)temperature;
    like.top_p = (float)top_p;
    if (ctx) return bench_pinned(dir, ctx, rows, &like, out_dir, baseline);
    if (tokens < 2 || tokens > 10000000) return mkctl_usage("bench: --tokens: expected 2 to 10000000, found %u", tokens);
    if (!n || n > 10000000) return mkctl_usage("bench: --prompt: expected 1 to 10000000, found %u", n);
    if (!repeat || repeat > 100000 || (uint64_t)repeat * tokens > 100000000)
        return mkctl_usage("bench: --repeat: expected 1 to 100000 and at most 100000000 tokens in all, found %u", repeat);

    mk_err err = {0};
    FILE *f = out ? fopen(out, "a") : NULL; /* before anything is measured */
    if (out && !f) {
        mk_fail(&err, MK_E_SYSTEM, "%s: %s", out, strerror(errno));
        return mkctl_failed("bench", &err);
    }
    if (f) fclose(f);
    size_t total = (size_t)repeat * tokens;
    sample q = {.device_ms = malloc(total * sizeof(double)),
                .client_ms = malloc(total * sizeof(double)),
                .first_ms = malloc(repeat * sizeof(double))};
    uint32_t *prompt = malloc(n * sizeof *prompt);
    mk_client *c = NULL;
    json_t *j = NULL;
    if (!q.device_ms || !q.client_ms || !q.first_ms || !prompt)
        rc = mk_fail(&err, MK_E_SYSTEM, "out of memory");
    else if (!(c = mk_client_new(dir, "mkctl bench", 5000, &err)))
        rc = err.code;
    if (!rc) {
        uint32_t vocab = mk_client_about(c)->welcome.vocab;
        for (uint32_t i = 0; i < n; i++) prompt[i] = (uint32_t)((i * 2654435761ull + 12345) % (vocab ? vocab : 1));
    }
    for (uint32_t i = 0; i < warmup && !rc; i++) rc = once(c, prompt, n, tokens, NULL, &err);
    for (uint32_t i = 0; i < repeat && !rc; i++) rc = once(c, prompt, n, tokens, &q, &err);
    if (!rc && !(j = report(mk_client_about(c), &q, n, tokens, repeat))) rc = mk_fail(&err, MK_E_SYSTEM, "out of memory");
    if (!rc) {
        json_dumpf(j, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
        putchar('\n');
        if (out && json_dump_file(j, out, JSON_INDENT(2) | JSON_REAL_PRECISION(9)))
            rc = mk_fail(&err, MK_E_SYSTEM, "%s: %s", out, strerror(errno));
    }
    json_decref(j);
    mk_client_destroy(&c);
    free(q.device_ms);
    free(q.client_ms);
    free(q.first_ms);
    free(prompt);
    return rc ? mkctl_failed("bench", &err) : MK_OK;
}
