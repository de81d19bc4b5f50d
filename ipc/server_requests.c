#include "ipc/server_internal.h"
#ifdef MK_DEBUG
#include "instructions/program.h"
#endif

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static_assert(MK_MAX_STOP == MK_WIRE_MAX_STOP, "stop ids of the wire are those of the device");

static void answer_err(mk_server *v, mk_server_client *c, const mk_wire_msg *m, int code, const char *text)
{
    mk_server_send_err(v, c->id, c->id_size, &m->h, (uint16_t)code, "%s: %s", m->type->name, text);
}

static void answer_mk(mk_server *v, mk_server_client *c, const mk_wire_msg *m, const mk_err *err)
{
    int code = err->code == MK_E_WIRE ? MK_WIRE_E_REFUSED : err->code == MK_E_CAPACITY ? MK_WIRE_E_CAPACITY : MK_WIRE_E_INTERNAL;
    answer_err(v, c, m, code, err->msg);
}

static void add_string(char *text, uint32_t *n, size_t most, const char *s)
{
    size_t k = strlen(s);
    if (k > most) k = most;
    memcpy(text + *n, s, k);
    text[*n + k] = 0;
    *n += (uint32_t)k + 1;
}

static void on_hello(mk_server *v, mk_server_client *c, const mk_wire_msg *m)
{
    mk_wire_text(m, c->name, sizeof c->name);
    const mk_model *md = mk_engine_model(v->e);
    mk_wire_welcome w = {.vocab = md->vocab,
                         .context = mk_engine_context(v->e),
                         .streams = mk_engine_slots(v->e),
                         .max_ids = MK_WIRE_MAX_IDS,
                         .beat_ms = (uint32_t)(v->beat_ns / 1000000),
                         .beats = MK_WIRE_BEATS,
                         .max_frame = MK_WIRE_MAX_FRAME,
                         .features = MK_FEATURE_APPEND_LOGPROBS | MK_FEATURE_TRACE | (v->pin ? MK_FEATURE_PIN : 0u),
                         .layers = md->layers,
                         .bos = md->bos,
                         .pool_tokens = mk_engine_pages(v->e) * MK_PAGE,
                         .n_stop = md->n_stop < 16 ? md->n_stop : 16,
                         .temperature = md->temperature,
                         .top_p = md->top_p,
                         .min_p = md->min_p,
                         .top_k = md->top_k};
    for (uint32_t i = 0; i < md->layers; i++) {
        w.mixer[md->layer[i].mixer & 7]++;
        w.ffn[md->layer[i].ffn & 3]++;
    }
    memcpy(w.stop, md->stop, w.n_stop * sizeof w.stop[0]);
    char text[MK_WIRE_MAX_TEXT];
    uint32_t n = 0;
    add_string(text, &n, 250, v->model);
    add_string(text, &n, 250, md->arch);
    add_string(text, &n, 250, v->build);
    add_string(text, &n, 250, mk_engine_device(v->e));
    w.n = n;
    mk_server_send(v, c, MK_WIRE_WELCOME, 0, m->h.request, &w, text);
    mk_server_say(v, MK_SERVER_DEBUG, "client \"%s\" says hello", c->name);
}

/* Copies n stop ids; refuses those outside the vocabulary. */
static int stop_ids(mk_server *v, const mk_wire_msg *m, uint32_t flag, uint32_t *n, uint32_t *stop, mk_err *err)
{
    if (m->n && !(m->h.flags & flag)) return mk_fail(err, MK_E_WIRE, "%u stop ids without the flag STOP", m->n);
    *n = mk_wire_items(m, stop, MK_MAX_STOP);
    uint32_t vocab = mk_engine_model(v->e)->vocab;
    for (uint32_t i = 0; i < *n; i++)
        if (stop[i] >= vocab) return mk_fail(err, MK_E_WIRE, "stop id %u is outside the vocabulary of %u", stop[i], vocab);
    return MK_OK;
}

static int sampling(mk_server *v, const mk_wire_msg *m, mk_sampling *s, mk_err *err)
{
    const mk_wire_open *o = &m->open;
    if (!(m->h.flags & MK_OPEN_SAMPLING)) {
        if (o->temperature != 0 || o->top_p != 0 || o->min_p != 0 || o->top_k)
            return mk_fail(err, MK_E_WIRE, "temperature, top_p, min_p or top_k set without the flag SAMPLING");
        const mk_model *md = mk_engine_model(v->e);
        *s = (mk_sampling){
            .temperature = md->temperature, .top_p = md->top_p, .min_p = md->min_p, .top_k = md->top_k, .seed = o->seed};
        return MK_OK;
    }
    if (!(o->temperature >= 0 && o->temperature <= 100))
        return mk_fail(err, MK_E_WIRE, "temperature %g is outside [0, 100]", (double)o->temperature);
    if (!(o->top_p > 0 && o->top_p <= 1)) return mk_fail(err, MK_E_WIRE, "top_p %g is outside (0, 1]", (double)o->top_p);
    if (!(o->min_p >= 0 && o->min_p <= 1)) return mk_fail(err, MK_E_WIRE, "min_p %g is outside [0, 1]", (double)o->min_p);
    *s = (mk_sampling){.temperature = o->temperature, .top_p = o->top_p, .min_p = o->min_p, .top_k = o->top_k, .seed = o->seed};
    return MK_OK;
}

static void on_open(mk_server *v, mk_server_client *c, const mk_wire_msg *m)
{
    mk_err err = {0};
    mk_open o = {.context = m->open.context, .credits = m->open.window == MK_WIRE_NO_WINDOW ? ~0ull : m->open.window};
    if (sampling(v, m, &o.sampling, &err) || stop_ids(v, m, MK_OPEN_STOP, &o.n_stop, o.stop, &err)) {
        answer_mk(v, c, m, &err);
        return;
    }
    if (!(m->h.flags & MK_OPEN_STOP)) {
        const mk_model *md = mk_engine_model(v->e);
        o.n_stop = md->n_stop < MK_MAX_STOP ? md->n_stop : MK_MAX_STOP;
        memcpy(o.stop, md->stop, o.n_stop * sizeof o.stop[0]);
    }
    if (m->h.flags & MK_OPEN_PIN) {
        if (!v->pin) {
            answer_err(v, c, m, MK_WIRE_E_UNSUPPORTED, "flag PIN: this daemon was not started with --bench yes");
            return;
        }
        o.pin = MK_WIRE_PIN_POSITION(m->open.pin);
        o.pin_rows = MK_WIRE_PIN_ROWS(m->open.pin);
    } else if (m->open.pin) {
        answer_err(v, c, m, MK_WIRE_E_REFUSED, "pin is not 0 without the flag PIN");
        return;
    }
    mk_server_stream *t = calloc(1, sizeof *t);
    if (!t) {
        answer_err(v, c, m, MK_WIRE_E_CAPACITY, "out of memory");
        return;
    }
    if (mk_streams_open(v->s, c->owner, &o, &t->id, &err)) {
        free(t);
        answer_mk(v, c, m, &err);
        return;
    }
    mk_server_stream_add(v, c, t);
    mk_wire_opened body = {.context = o.context ? o.context : mk_engine_context(v->e), .window = m->open.window};
    mk_server_send(v, c, MK_WIRE_OPENED, t->id, m->h.request, &body, NULL);
}

static void on_append(mk_server *v, mk_server_client *c, const mk_wire_msg *m)
{
    if (!m->n) {
        answer_err(v, c, m, MK_WIRE_E_REFUSED, "no token ids, expected at least 1");
        return;
    }
    int logprobs = (m->h.flags & MK_APPEND_WITH_LOGPROBS) != 0;
    mk_server_append *a = calloc(1, sizeof *a + (logprobs ? m->n * sizeof a->logprob[0] : 0));
    if (!a) {
        answer_err(v, c, m, MK_WIRE_E_CAPACITY, "out of memory");
        return;
    }
    mk_err err = {0};
    mk_wire_items(m, v->ids, MK_WIRE_MAX_IDS);
    if (mk_streams_append(v->s, c->owner, m->h.stream, v->ids, m->n, logprobs, m->h.request, &err)) {
        free(a);
        answer_mk(v, c, m, &err);
        return;
    }
    mk_server_stream *t = mk_server_stream_by_id(v, m->h.stream);
    if (!t) { /* the table accepted a stream that was never opened here */
        free(a);
        answer_err(v, c, m, MK_WIRE_E_INTERNAL, "stream is not in the server's table");
        return;
    }
    a->request = m->h.request;
    a->since_ns = mk_server_now();
    a->base = t->length;
    a->n = logprobs ? m->n : 0;
    for (uint32_t i = 0; i < a->n; i++) a->logprob[i] = NAN;
    t->length += m->n;
    *t->last = a;
    t->last = &a->next;
}

static void on_generate(mk_server *v, mk_server_client *c, const mk_wire_msg *m)
{
    mk_err err = {0};
    mk_generate g = {.max_new = m->generate.max_new, .own_stop = (m->h.flags & MK_GENERATE_STOP) != 0};
    if (!g.max_new) {
        answer_err(v, c, m, MK_WIRE_E_REFUSED, "max_new is 0, expected at least 1");
        return;
    }
    if (stop_ids(v, m, MK_GENERATE_STOP, &g.n_stop, g.stop, &err) ||
        mk_streams_generate(v->s, c->owner, m->h.stream, &g, m->h.request, &err))
        answer_mk(v, c, m, &err);
}

static void on_close(mk_server *v, mk_server_client *c, const mk_wire_msg *m)
{
    mk_err err = {0};
    if (mk_streams_close(v->s, c->owner, m->h.stream, m->h.request, &err)) {
        answer_mk(v, c, m, &err);
        return;
    }
    mk_server_stream *t = mk_server_stream_by_id(v, m->h.stream);
    if (t) t->closing = 1;
}

static void on_stats(mk_server *v, mk_server_client *c, const mk_wire_msg *m)
{
    char *text = mk_server_statistics(v);
    if (text) {
        mk_wire_statistics body = {.n = (uint32_t)strlen(text)};
        mk_server_send(v, c, MK_WIRE_STATISTICS, 0, m->h.request, &body, text);
    } else {
        answer_err(v, c, m, MK_WIRE_E_INTERNAL, "out of memory");
    }
    free(text);
}

static void on_trace(mk_server *v, mk_server_client *c, const mk_wire_msg *m)
{
    mk_err err = {0};
    if (mk_server_trace_start(&v->trace, v->e, c->owner, m->h.request, &m->trace, mk_server_now(), &err)) answer_mk(v, c, m, &err);
}

int mk_server_send_trace(mk_server *v)
{
    mk_server_trace *t = &v->trace;
    for (int k = 0; k < 8 && t->owner; k++) {
        const void *fixed, *items;
        mk_err err = {0};
        mk_server_client *c = mk_server_client_by_owner(v, t->owner);
        uint64_t request = t->request;
        if (!c) {
            mk_server_trace_end(t, v->e);
            return 0;
        }
        int type = mk_server_trace_next(t, v->e, mk_server_now(), &fixed, &items, &err);
        if (!type) return t->state == MK_SERVER_TRACE_SENDS;
        if (type == MK_WIRE_ERR)
            answer_mk(v, c, &(mk_wire_msg){.h = {.type = MK_WIRE_TRACE, .request = request}, .type = mk_wire_type_of(MK_WIRE_TRACE)}, &err);
        else
            mk_server_send(v, c, (uint16_t)type, 0, request, fixed, items);
    }
    return t->owner != 0;
}

static void on_inject(mk_server *v, mk_server_client *c, const mk_wire_msg *m)
{
#ifdef MK_DEBUG
    const mk_wire_inject *i = &m->inject;
    const mk_program *p = mk_engine_program(v->e);
    mk_err err = {0};
    mk_submit s = {.op = MK_SUB_HANG, .arg0 = MK_HANG_IDLE, .arg1 = i->after};
    if (i->what == MK_WIRE_INJECT_HANG) {
        if (i->worker >= p->info.workers)
            mk_fail(&err, MK_E_WIRE, "worker %u, there are %u", i->worker, p->info.workers);
        else if (i->instruction >= p->queue[i->worker + 1] - p->queue[i->worker])
            mk_fail(&err, MK_E_WIRE, "instruction %u, worker %u has %u", i->instruction, i->worker, p->queue[i->worker + 1] - p->queue[i->worker]);
        s.arg0 = MK_HANG_AT(i->worker, i->instruction);
    } else if ((i->what != MK_WIRE_INJECT_IDLE && i->what != MK_WIRE_INJECT_ERROR) || i->worker || i->instruction || i->after) {
        mk_fail(&err, MK_E_WIRE, "what is %u, expected 1, or 2 or 3 with nothing else", i->what);
    } else if (i->what == MK_WIRE_INJECT_ERROR) {
        s.arg0 = MK_HANG_ERROR;
    }
    mk_wire_injected body = {.steps = (uint32_t)mk_engine_steps(v->e)};
    if (err.code || mk_engine_submit(v->e, &s, &err)) {
        answer_mk(v, c, m, &err);
        return;
    }
    mk_server_say(v, MK_SERVER_WARN, "client \"%s\" has a %s injected", c->name, i->what == MK_WIRE_INJECT_ERROR ? "device error" : "hang");
    mk_server_send(v, c, MK_WIRE_INJECTED, 0, m->h.request, &body, NULL);
#else
    answer_err(v, c, m, MK_WIRE_E_UNSUPPORTED, "this daemon was built without fault injection (make DEBUG=1)");
#endif
}

static void on_message(mk_server *v, mk_server_client *c, const mk_wire_msg *m)
{
    mk_err err = {0};
    uint16_t type = m->h.type;
    if (atomic_load(&v->draining) && (type == MK_WIRE_OPEN || type == MK_WIRE_APPEND || type == MK_WIRE_GENERATE)) {
        answer_err(v, c, m, MK_WIRE_E_DRAINING, "the daemon is about to stop and takes no new work");
        return;
    }
    switch (type) {
    case MK_WIRE_HELLO: on_hello(v, c, m); break;
    case MK_WIRE_OPEN: on_open(v, c, m); break;
    case MK_WIRE_APPEND: on_append(v, c, m); break;
    case MK_WIRE_GENERATE: on_generate(v, c, m); break;
    case MK_WIRE_CANCEL:
        if (mk_streams_cancel(v->s, c->owner, m->h.stream, &err)) answer_mk(v, c, m, &err);
        break;
    case MK_WIRE_CLOSE: on_close(v, c, m); break;
    case MK_WIRE_CREDIT:
        if (mk_streams_credit(v->s, c->owner, m->h.stream, m->credit.tokens, &err)) answer_mk(v, c, m, &err);
        break;
    case MK_WIRE_STATS: on_stats(v, c, m); break;
    case MK_WIRE_TRACE: on_trace(v, c, m); break;
    case MK_WIRE_PING: mk_server_send(v, c, MK_WIRE_PONG, 0, m->h.request, &m->ping, NULL); break;
    case MK_WIRE_PONG: break;
    case MK_WIRE_INJECT: on_inject(v, c, m); break;
    default: answer_err(v, c, m, MK_WIRE_E_UNSUPPORTED, "this daemon does not serve it (WELCOME.features)"); break;
    }
}

void mk_server_on_frame(mk_server *v, const uint8_t *id, size_t id_size, const void *frame, size_t size, int frames)
{
    mk_err err = {0};
    mk_wire_msg m;
    int code = mk_wire_decode(frame, size, MK_WIRE_CLIENT, &m, &err);
    if (frames != 1) {
        memset(&m, 0, sizeof m);
        mk_fail(&err, MK_E_WIRE, "a message of %d frames, expected 1 (a DEALER socket sends it so)", frames);
        code = MK_WIRE_E_FRAME;
    }
    v->frames++;
    mk_server_client *c = mk_server_client_by_id(v, id, id_size);
    if (c) c->heard_ns = mk_server_now(); /* anything counts as a sign of life */
    if (code) {
        v->bad_frames++;
        snprintf(v->last_bad, sizeof v->last_bad, "%.190s", err.msg);
        mk_server_send_err(v, id, id_size, &m.h, (uint16_t)code, "%s", err.msg);
        return;
    }
    if (!c && m.h.type == MK_WIRE_HELLO) {
        c = mk_server_client_new(v, id, id_size);
        if (!c) {
            mk_server_send_err(v, id, id_size, &m.h, MK_WIRE_E_CAPACITY, "HELLO: %u clients with streams are the limit", v->max_clients);
            return;
        }
        c->heard_ns = mk_server_now();
    }
    if (!c) {
        mk_server_send_err(v, id, id_size, &m.h, MK_WIRE_E_HELLO, "%s: say HELLO first (a client that was dropped has to do so again)",
                 m.type->name);
        return;
    }
    if (!c->gone) on_message(v, c, &m);
}
