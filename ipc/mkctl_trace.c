/* mkctl trace: what every worker did with its time in the next steps. Prints tables; --out writes a file for ui.perfetto.dev or chrome://tracing.
 * Somebody has to generate meanwhile: another client, or with --ctx this command itself, which then also says what tracing costs. */
#include "ipc/client.h"
#include "ipc/mkctl.h"
#include "ipc/trace_report.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int write_file(const char *path, const mk_trace_report *r, const mk_client_info *what, mk_err *err)
{
    FILE *f = fopen(path, "w");
    if (!f) return mk_fail(err, MK_E_SYSTEM, "%s: %s", path, strerror(errno));
    int bad = mk_trace_write(r, what, f);
    bad |= fclose(f);
    return bad ? mk_fail(err, MK_E_SYSTEM, "%s: cannot be written: %s", path, strerror(errno)) : MK_OK;
}

#define WARM 16u  /* tokens that do not count */
#define ROOM 512u /* tokens that may pass until the trace begins */

typedef struct load {
    mk_client_stream *s;
    uint64_t *ns; /* [most] device clock of every token */
    uint32_t n, most;
} load;

static int take(load *l, uint32_t n, mk_err *err)
{
    int rc = MK_OK;
    for (uint32_t i = 0; i < n && !rc; i++) {
        mk_client_event ev;
        rc = mk_client_next(l->s, &ev, 60000, err);
        if (!rc && ev.kind == MK_CLIENT_DONE)
            rc = mk_fail(err, MK_E_WIRE, "the generation ended after %u of %u tokens (%s)", l->n, l->most, mk_wire_reason_name(ev.done.reason));
        if (!rc) l->ns[l->n++] = ev.token.device_ns;
    }
    return rc;
}

/* Never stops early, not paused. At a pinned position where the daemon serves that, otherwise after a prompt. As many tokens as are to be traced pass before it is asked for. */
static int start_load(mk_client *c, uint32_t ctx, uint32_t rows, float temperature, float top_p, uint32_t steps, load *l, mk_err *err)
{
    const int pin = (mk_client_about(c)->welcome.features & MK_FEATURE_PIN) != 0;
    const uint32_t prompt = pin ? 1 : ctx;
    if (!pin && rows > 1) return mk_fail(err, MK_E_USAGE, "--rows: several rows of one stream need pinned positions: start mkd with --bench yes");
    l->most = WARM + ROOM + 3 * steps;
    l->ns = calloc(l->most, sizeof *l->ns);
    uint32_t *ids = calloc(prompt, sizeof *ids), x = 12345;
    int rc = l->ns && ids ? MK_OK : mk_fail(err, MK_E_SYSTEM, "out of memory");
    for (uint32_t i = 0; i < prompt && !rc; i++) ids[i] = ((x = x * 1664525u + 1013904223u) >> 8) % mk_client_about(c)->welcome.vocab;
    mk_client_options o = {.context = prompt + l->most, .window = MK_WIRE_NO_WINDOW, .sampling = 1, .seed = 1, .temperature = temperature, .top_p = top_p, .own_stop = 1};
    if (pin) {
        o.pin = ctx - 1;
        o.pin_rows = rows;
        if (o.context < ctx + 7) o.context = ctx + 7;
    }
    if (!rc && !(l->s = mk_client_open(c, &o, 5000, err))) rc = err->code;
    if (!rc) rc = mk_client_append(l->s, ids, prompt, NULL, mkctl_prompt_ms(prompt), err);
    if (!rc) rc = mk_client_generate(l->s, &(mk_client_generation){.max_new = l->most}, err);
    if (!rc) rc = take(l, WARM + steps, err);
    free(ids);
    return rc;
}

/* Steps with and without trace, from one token to the next. */
static int print_cost(const mk_trace_report *r, load *l, mk_err *err)
{
    const uint64_t mask = (1ull << 48) - 1, begin = r->step[0].begin, length = r->step[r->t->about.steps - 1].end - begin;
    double *on = calloc(l->most, sizeof *on), *off = calloc(l->most, sizeof *off);
    uint32_t n_on = 0, n_off = 0, after = r->t->about.steps;
    int rc = on && off ? MK_OK : mk_fail(err, MK_E_SYSTEM, "out of memory");
    for (uint32_t last = 0, i = WARM; !rc && l->n < l->most; i++) { /* as many tokens after the trace as are in it */
        if (i == l->n && (rc = take(l, 1, err))) break;
        uint64_t from = (l->ns[i - 1] - begin) & mask, to = (l->ns[i] - begin) & mask;
        double us = (double)(l->ns[i] - l->ns[i - 1]) / 1e3;
        int in = to <= length;
        if (in && from <= length) on[n_on++] = us;
        if (!in && from > length && !(last && i == last + 1)) off[n_off++] = us;
        if (in) last = i;
        if (last && i > last + 1 && !--after) break;
    }
    if (!rc && n_on && n_off) {
        double a = mkctl_quantile(on, n_on, 0.5), b = mkctl_quantile(off, n_off, 0.5);
        printf("\ncost of tracing: token to token p50 %.2f us traced (%u), %.2f us not (%u): ratio %.4f\n", a, n_on, b, n_off, a / b);
    }
    free(on);
    free(off);
    return rc;
}

int mkctl_trace(int argc, char **argv)
{
    const char *dir = mkctl_default_dir(), *out = NULL;
    uint32_t steps = 3, ctx = 0, rows = 1;
    double seconds = 10, temperature = 0, top_p = 1;
    const mkctl_flag flag[] = {{"--socket-dir", MKCTL_TEXT, &dir, "the daemon's sockets"},
                               {"--steps", MKCTL_U32, &steps, "how many; something has to be generating meanwhile"},
                               {"--ctx", MKCTL_U32, &ctx, "generate here, at that context (pinned, if mkd runs with --bench yes); 0: somebody else does"},
                               {"--rows", MKCTL_U32, &rows, "with --ctx and --bench yes: tokens of one stream in a step"},
                               {"--temperature", MKCTL_REAL, &temperature, "with --ctx: of the sampling; 0: greedy"},
                               {"--top-p", MKCTL_REAL, &top_p, "with --ctx and --temperature"},
                               {"--timeout", MKCTL_REAL, &seconds, "seconds within which they have to be run, at most 60"},
                               {"--out", MKCTL_TEXT, &out, "write the trace event file"},
                               {"-o", MKCTL_TEXT, &out, "the same"}};
    int rc = mkctl_flags(argc, argv, flag, sizeof flag / sizeof flag[0], NULL, 0, NULL);
    if (rc) return rc < 0 ? MK_OK : rc;
    if (!steps || steps > 1024) return mkctl_usage("trace: --steps: expected 1 to 1024, found %u", steps);
    if (!rows || rows > 8) return mkctl_usage("trace: --rows: expected 1 to 8, found %u", rows);
    if (!ctx && (rows != 1 || temperature != 0 || top_p != 1)) return mkctl_usage("trace: --rows, --temperature and --top-p need --ctx: without it somebody else generates");
    if (temperature == 0 && top_p != 1) return mkctl_usage("trace: --top-p needs --temperature");
    if (ctx > 100000000) return mkctl_usage("trace: --ctx: expected at most 100000000, found %u", ctx);
    if (!(seconds >= 0.001 && seconds <= MK_WIRE_TRACE_MS / 1000))
        return mkctl_usage("trace: --timeout: expected 0.001 to %u, found %g", MK_WIRE_TRACE_MS / 1000, seconds);
    mk_err err = {0};
    mk_client_trace *t = NULL;
    mk_trace_report *r = NULL;
    mk_client *c = mk_client_new(dir, "mkctl trace", 5000, &err);
    load l = {0};
    rc = c ? MK_OK : err.code;
    if (!rc && ctx) rc = start_load(c, ctx, rows, (float)temperature, (float)top_p, steps, &l, &err);
    if (!rc) rc = mk_client_traced(c, steps, (int)(seconds * 1000), &t, &err);
    if (!rc) rc = mk_trace_report_new(t, &r, &err);
    if (!rc) {
        const mk_client_info *a = mk_client_about(c);
        printf("%s, %s on %s: steps %u to %u, %u instructions each, %u workers\n\n", a->build, a->model, a->device, t->about.first_step,
               t->about.first_step + t->about.steps - 1, t->about.instructions, t->about.workers);
        mk_trace_print(r, stdout);
        if (ctx) rc = print_cost(r, &l, &err);
        if (!rc && out && !(rc = write_file(out, r, a, &err))) printf("\nwritten to %s: open it in ui.perfetto.dev\n", out);
    }
    mk_trace_report_free(&r);
    mk_client_trace_free(&t);
    if (l.s) mk_client_close(&l.s, 0, NULL);
    free(l.ns);
    mk_client_destroy(&c);
    return rc ? mkctl_failed("trace", &err) : MK_OK;
}
