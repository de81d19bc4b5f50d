/* mkctl bench: the same generation again and again, alone on the daemon; figures as JSON. */
#include "ipc/client.h"
#include "ipc/mkctl.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

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
    int rc = mk_client_append(s, prompt, n, NULL, -1, err);
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
    time_t t = time(NULL);
    struct tm tm;
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&t, &tm));
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

int mkctl_bench(int argc, char **argv)
{
    const char *dir = mkctl_default_dir(), *out = NULL;
    uint32_t tokens = 256, n = 32, repeat = 5, warmup = 1;
    const mkctl_flag flag[] = {{"--socket-dir", MKCTL_TEXT, &dir, "the daemon's sockets"},
                               {"--tokens", MKCTL_U32, &tokens, "tokens to generate"},
                               {"--prompt", MKCTL_U32, &n, "tokens of the prompt"},
                               {"--repeat", MKCTL_U32, &repeat, "repetitions"},
                               {"--warmup", MKCTL_U32, &warmup, "repetitions before them that do not count"},
                               {"--out", MKCTL_TEXT, &out, "write the JSON to this file too"}};
    int rc = mkctl_flags(argc, argv, flag, sizeof flag / sizeof flag[0], NULL, 0, NULL);
    if (rc) return rc < 0 ? MK_OK : rc;
    if (tokens < 2 || tokens > 10000000) return mkctl_usage("bench: --tokens: expected 2 to 10000000, found %u", tokens);
    if (!n || n > 10000000) return mkctl_usage("bench: --prompt: expected 1 to 10000000, found %u", n);
    if (!repeat || repeat > 100000 || (uint64_t)repeat * tokens > 100000000)
        return mkctl_usage("bench: --repeat: expected 1 to 100000 and at most 100000000 tokens in all, found %u", repeat);

    mk_err err = {0};
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
