/* mkctl generate: one stream, tokens as they come. */
#include "ipc/client.h"
#include "ipc/mkctl.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static volatile sig_atomic_t interrupted;

static void on_sigint(int sig)
{
    (void)sig;
    interrupted = 1;
}

static uint64_t now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

typedef struct run {
    uint64_t asked_ns, first_ns, last_ns; /* this process */
    uint64_t device_ns;                   /* of the last token */
    double *gap_us;                       /* [max_new] between tokens, device clock */
    uint32_t tokens, gaps;
} run;

static void print_token(const mk_client_event *ev, int bytes, int logprobs, int first)
{
    uint32_t id = ev->token.id;
    if (bytes && id < 256 && !logprobs)
        putchar((int)id);
    else if (bytes)
        printf("<%u>", id);
    else
        printf("%s%u", first ? "" : " ", id);
    if (logprobs) printf(":%.4f", (double)ev->token.logprob);
    fflush(stdout);
}

static void count(run *r, const mk_client_event *ev, uint32_t max_new)
{
    if (!r->tokens)
        r->first_ns = ev->received_ns;
    else if (r->gaps < max_new)
        r->gap_us[r->gaps++] = (double)(int64_t)(ev->token.device_ns - r->device_ns) * 1e-3;
    r->device_ns = ev->token.device_ns;
    r->last_ns = ev->received_ns;
    r->tokens++;
}

/* To stderr, so that stdout holds the tokens alone. */
static void print_figures(run *r, const mk_wire_done *d, uint32_t prompt)
{
    fprintf(stderr, "%s: %u prompt + %u tokens", mk_wire_reason_name(d->reason), prompt, r->tokens);
    if (r->tokens > 1 && r->last_ns > r->first_ns)
        fprintf(stderr, ", %.1f tok/s", (double)(r->tokens - 1) * 1e9 / (double)(r->last_ns - r->first_ns));
    if (r->tokens) fprintf(stderr, ", first token %.2f ms", (double)(r->first_ns - r->asked_ns) * 1e-6);
    fputs(" (client clock)", stderr);
    if (r->gaps) {
        double p50 = mkctl_quantile(r->gap_us, r->gaps, 0.5);
        fprintf(stderr, "; between tokens p50 %.1f us, p99 %.1f us (device clock)", p50, mkctl_quantile(r->gap_us, r->gaps, 0.99));
    }
    fprintf(stderr, "; prompt %.2f ms, total %.2f ms (daemon clock)\n", (double)d->prompt_ns * 1e-6, (double)d->total_ns * 1e-6);
}

static int drive(mk_client_stream *s, const uint32_t *ids, uint32_t n, const mk_client_generation *g, int bytes, int logprobs, run *r,
                 mk_err *err)
{
    int rc, cancelled = 0;
    r->asked_ns = now_ns();
    if (n <= MK_WIRE_MAX_IDS)
        rc = mk_client_append_async(s, ids, n, err); /* GENERATE follows on its heels: no round trip between them */
    else
        rc = mk_client_append(s, ids, n, NULL, -1, err);
    if (rc || (rc = mk_client_generate(s, g, err))) return rc;
    for (;;) {
        mk_client_event ev;
        rc = mk_client_next(s, &ev, 100, err);
        if (interrupted && !cancelled && !mk_client_cancel(s, err)) cancelled = 1;
        if (rc == MK_E_TIMEOUT) continue;
        if (rc) return rc;
        if (ev.kind == MK_CLIENT_DONE) {
            if (r->tokens) putchar('\n');
            print_figures(r, &ev.done, n);
            return ev.done.reason == MK_WIRE_ERROR ? mk_fail(err, MK_E_DEVICE, "the daemon gave the generation up") : MK_OK;
        }
        print_token(&ev, bytes, logprobs, !r->tokens);
        count(r, &ev, g->max_new);
    }
}

/* The prompt: --ids, or --bytes' UTF-8 bytes as ids, behind --bos. */
static int prompt_of(const char *ids, const char *bytes, const char *bos, uint32_t **out, uint32_t *n, mk_err *err)
{
    uint32_t *a = NULL, na = 0, *b = NULL, nb = 0;
    int rc = bos ? mkctl_parse_ids(bos, &a, &na, err) : MK_OK;
    if (!rc && bos && na != 1) rc = mk_fail(err, MK_E_USAGE, "--bos: expected one id, found %u", na);
    if (!rc && ids) rc = mkctl_parse_ids(ids, &b, &nb, err);
    if (!rc && bytes) nb = (uint32_t)strlen(bytes);
    uint32_t *p = rc ? NULL : malloc((na + (size_t)nb + 1) * sizeof *p);
    if (!rc && !p) rc = mk_fail(err, MK_E_SYSTEM, "out of memory");
    if (!rc) {
        for (uint32_t i = 0; i < na; i++) p[i] = a[i];
        for (uint32_t i = 0; i < nb; i++) p[na + i] = bytes ? (unsigned char)bytes[i] : b[i];
        *out = p;
        *n = na + nb;
    }
    free(a);
    free(b);
    return rc;
}

int mkctl_generate(int argc, char **argv)
{
    const char *dir = mkctl_default_dir(), *ids = NULL, *bytes = NULL, *bos = NULL, *stop = NULL;
    uint32_t max_new = 64, top_k = 0, context = 0;
    uint64_t seed = 0;
    double temperature = -1, top_p = 1, min_p = 0;
    int logprobs = 0;
    const mkctl_flag flag[] = {
        {"--socket-dir", MKCTL_TEXT, &dir, "the daemon's sockets"},
        {"--ids", MKCTL_TEXT, &ids, "the prompt: token ids, 1,2,3"},
        {"--bytes", MKCTL_TEXT, &bytes, "the prompt: text whose UTF-8 bytes are the ids; tokens are printed as bytes"},
        {"--bos", MKCTL_TEXT, &bos, "an id in front of the prompt"},
        {"--max-new", MKCTL_U32, &max_new, "most tokens to generate"},
        {"--context", MKCTL_U32, &context, "tokens to reserve; 0: what is needed"},
        {"--temperature", MKCTL_REAL, &temperature, "0: greedy; below 0: the model's sampling"},
        {"--top-k", MKCTL_U32, &top_k, "0: off (with --temperature)"},
        {"--top-p", MKCTL_REAL, &top_p, "1: off (with --temperature)"},
        {"--min-p", MKCTL_REAL, &min_p, "0: off (with --temperature)"},
        {"--seed", MKCTL_U64, &seed, "of the sampling"},
        {"--stop", MKCTL_TEXT, &stop, "stop ids instead of the model's: 1,2 (\"\": none)"},
        {"--logprobs", MKCTL_SET, &logprobs, "print id:logprob"},
    };
    int rc = mkctl_flags(argc, argv, flag, sizeof flag / sizeof flag[0], NULL, 0, NULL);
    if (rc) return rc < 0 ? MK_OK : rc;
    if (!ids == !bytes) return mkctl_usage("generate: give the prompt with either --ids or --bytes");
    if (!max_new || max_new > 100000000) return mkctl_usage("generate: --max-new: expected 1 to 100000000, found %u", max_new);
    if (temperature < 0 && (top_k || top_p != 1 || min_p != 0))
        return mkctl_usage("generate: --top-k, --top-p and --min-p need --temperature");

    mk_err err = {0};
    uint32_t *prompt = NULL, n = 0, *stops = NULL;
    run r = {0};
    mk_client *c = NULL;
    mk_client_options o = {.sampling = temperature >= 0,
                           .temperature = (float)temperature,
                           .top_p = (float)top_p,
                           .min_p = (float)min_p,
                           .top_k = top_k,
                           .seed = seed,
                           .own_stop = stop != NULL};
    if ((rc = prompt_of(ids, bytes, bos, &prompt, &n, &err)) || (stop && (rc = mkctl_parse_ids(stop, &stops, &o.n_stop, &err)))) goto out;
    if (!n) rc = mk_fail(&err, MK_E_USAGE, "the prompt is empty");
    if (o.n_stop > MK_WIRE_MAX_STOP) rc = mk_fail(&err, MK_E_USAGE, "--stop: %u ids, the limit is %u", o.n_stop, MK_WIRE_MAX_STOP);
    if (rc) goto out;
    for (uint32_t i = 0; i < o.n_stop; i++) o.stop[i] = stops[i];
    r.gap_us = malloc(max_new * sizeof *r.gap_us);
    if (!r.gap_us) {
        rc = mk_fail(&err, MK_E_SYSTEM, "out of memory");
        goto out;
    }
    c = mk_client_new(dir, "mkctl generate", 5000, &err);
    if (!c) {
        rc = err.code;
        goto out;
    }
    uint32_t limit = mk_client_about(c)->welcome.context;
    uint64_t need = (uint64_t)n + max_new;
    o.context = context ? context : need < limit ? (uint32_t)need : 0;
    struct sigaction sa = {.sa_handler = on_sigint, .sa_flags = (int)SA_RESETHAND}; /* a second one ends the program */
    sigaction(SIGINT, &sa, NULL);
    mk_client_stream *s = mk_client_open(c, &o, 5000, &err);
    rc = s ? drive(s, prompt, n, &(mk_client_generation){.max_new = max_new}, bytes != NULL, logprobs, &r, &err) : err.code;
    mk_err ignored;
    mk_client_close(&s, 5000, &ignored);
out:
    mk_client_destroy(&c);
    free(r.gap_us);
    free(prompt);
    free(stops);
    return rc ? mkctl_failed("generate", &err) : MK_OK;
}
