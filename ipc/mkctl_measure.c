#include "ipc/mkctl_measure.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { WARM = 16 }; /* steps before those that count */

uint32_t mk_pinned_context(const mk_pinned *q)
{
    uint32_t position = q->context + 7, tokens = 1 + q->prompt + WARM + q->steps; /* the stream counts its tokens although none moves it */
    return position > tokens ? position : tokens;
}

static uint64_t now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static int prompt_speed(mk_client_stream *s, const mk_pinned *q, uint32_t vocab, double *tok_s, mk_err *err)
{
    uint32_t *ids = malloc(q->prompt * sizeof *ids);
    if (!ids) return mk_fail(err, MK_E_SYSTEM, "out of memory");
    for (uint32_t i = 0; i < q->prompt; i++) ids[i] = (uint32_t)((i * 2654435761ull + q->seed * 12345 + 1) % (vocab ? vocab : 1));
    uint64_t begin = now_ns();
    int rc = mk_client_append(s, ids, q->prompt, NULL, 600000, err);
    if (!rc) *tok_s = q->prompt / ((double)(now_ns() - begin) * 1e-9);
    free(ids);
    return rc;
}

int mk_measure_pinned(mk_client *c, const mk_pinned *q, mk_pinned_result *r, mk_err *err)
{
    mk_client_options o = {.context = mk_pinned_context(q), .window = MK_WIRE_NO_WINDOW, .sampling = 1, .seed = q->seed, .temperature = q->temperature, .top_p = q->top_p, .top_k = q->top_k, .own_stop = 1,
                           .pin = q->context - 1, .pin_rows = q->rows};
    *r = (mk_pinned_result){.step_ms = malloc(q->steps * sizeof *r->step_ms)};
    if (!r->step_ms) return mk_fail(err, MK_E_SYSTEM, "out of memory");
    if (!(mk_client_about(c)->welcome.features & MK_FEATURE_PIN))
        return mk_fail(err, MK_E_USAGE, "this daemon does not serve pinned streams: start it with --bench yes");
    mk_client_stream *s = mk_client_open(c, &o, 5000, err);
    if (!s) return err->code;
    int rc = mk_client_append(s, &(uint32_t){1}, 1, NULL, 60000, err);
    if (!rc && q->prompt) rc = prompt_speed(s, q, mk_client_about(c)->welcome.vocab, &r->prompt_tok_s, err);
    if (!rc) rc = mk_client_generate(s, &(mk_client_generation){.max_new = WARM + q->steps}, err);
    uint64_t last = 0;
    for (uint32_t got = 0; !rc; got++) {
        mk_client_event ev;
        rc = mk_client_next(s, &ev, 60000, err);
        if (rc) break;
        if (ev.kind == MK_CLIENT_DONE) {
            if (got != WARM + q->steps)
                rc = mk_fail(err, MK_E_WIRE, "the generation ended after %u of %u steps (%s)", got, WARM + q->steps, mk_wire_reason_name(ev.done.reason));
            break;
        }
        if (got && ev.token.device_ns <= last) {
            rc = mk_fail(err, MK_E_WIRE, "the device's clock: two steps' tokens at one time, or the later one first");
            break;
        }
        if (got >= WARM) r->step_ms[got - WARM] = (double)(ev.token.device_ns - last) * 1e-6;
        last = ev.token.device_ns;
    }
    mk_err ignored;
    mk_client_close(&s, 5000, rc ? &ignored : err);
    return rc;
}

static uint64_t number(const json_t *j, const char *key)
{
    return (uint64_t)json_integer_value(json_object_get(j, key));
}

int mk_measure_about(mk_client *c, mk_measured *m, mk_err *err)
{
    char *text = NULL;
    memset(m, 0, sizeof *m);
    int rc = mk_client_stats(c, &text, 5000, err);
    if (rc) return rc;
    json_t *j = json_loads(text, 0, NULL);
    const json_t *b = json_object_get(j, "bytes");
    const char *dtype = json_string_value(json_object_get(j, "dtype"));
    free(text);
    if (!b || !dtype) {
        json_decref(j);
        return mk_fail(err, MK_E_WIRE, "the daemon's statistics do not say what its model reads: is it older than this mkctl?");
    }
    m->bytes = (mk_bytes){.weights = number(b, "weights"), .experts = number(b, "experts"), .topk = (uint32_t)number(b, "topk"),
                          .n_experts = (uint32_t)number(b, "n_experts"), .state = number(b, "state"), .kv = number(b, "kv")};
    m->program_bytes = number(b, "program");
    m->launches = number(j, "launches");
    m->ceiling_gb_s = json_number_value(json_object_get(j, "ceiling_gb_s"));
    snprintf(m->dtype, sizeof m->dtype, "%s", dtype);
    json_decref(j);
    return MK_OK;
}

json_t *mk_measure_clocks(void)
{
    FILE *f = popen("nvidia-smi -i 0 --query-gpu=clocks.sm,clocks.mem --format=csv,noheader,nounits 2>/dev/null", "r");
    int sm, mem, n = f ? fscanf(f, "%d, %d", &sm, &mem) : 0;
    if (f) pclose(f);
    return n == 2 ? json_pack("{s:i,s:i}", "sm_mhz", sm, "mem_mhz", mem) : json_null();
}

void mk_measure_date(char date[32])
{
    time_t t = time(NULL);
    struct tm tm;
    strftime(date, 32, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&t, &tm));
}
