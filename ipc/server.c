#include "ipc/server.h"
#include "ipc/server_trace.h"
#include "ipc/wire.h"
#ifdef MK_DEBUG
#include "instructions/program.h"
#endif

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#include <zmq.h>

#define BUCKETS     1024u /* of both hash tables */
#define SEND_QUEUE  65536 /* messages a client may leave unread before it is dropped */
#define BATCH       64u   /* tokens of one TOKENS, at most */
#define BURST       256   /* requests taken before the engine's events are looked at again */
#define GRACE_NS    1000000000ull /* for the last DONEs after everything was cancelled */
#define MAX_CLIENTS 65535u

static_assert(BATCH <= MK_WIRE_MAX_BATCH, "a batch fits its message");
static_assert(MK_MAX_STOP == MK_WIRE_MAX_STOP, "stop ids of the wire are those of the device");
static_assert((int)MK_WIRE_LENGTH == MK_DONE_LENGTH && (int)MK_WIRE_STOP == MK_DONE_STOP && (int)MK_WIRE_CONTEXT == MK_DONE_CONTEXT &&
                  (int)MK_WIRE_CANCELLED == MK_DONE_CANCELLED && (int)MK_WIRE_ERROR == MK_DONE_ERROR,
              "reasons of the wire are those of the device");

/* An APPEND that the device has not reported yet; oldest first. */
typedef struct append {
    struct append *next;
    uint64_t request, since_ns;
    uint32_t base, n; /* its tokens stand at positions base .. base + n - 1 */
    float logprob[];  /* [n] when asked for, NaN until reported */
} append;

typedef struct stream {
    struct stream *hash_next;
    struct stream *next; /* of the same client */
    uint64_t id, owner;
    uint32_t length;     /* tokens in it, outstanding appends included */
    append *first, **last;
    uint64_t prompt_ns, prompt_end_ns; /* appends since the last generation: how long they took, when the last one was through */
    int closing;                       /* CLOSE was accepted */
    uint64_t request;                  /* of the tokens below */
    uint32_t position, n;
    mk_wire_token token[BATCH];
    struct stream *dirty_next;
    int dirty;
} stream;

typedef struct client {
    uint64_t owner; /* 0: free entry; otherwise serial << 16 | index */
    struct client *hash_next;
    stream *streams;
    uint32_t n_streams;
    uint64_t heard_ns;
    int gone; /* a send failed: dropped at the end of this pass */
    uint8_t id_size, id[255];
    char name[MK_WIRE_MAX_NAME + 1];
} client;

struct mk_server {
    mk_engine *e;
    mk_streams *s;
    void *zmq, *router, *pub;
    char *build, *model;
    char path[2][sizeof((struct sockaddr_un *)0)->sun_path]; /* of the bound sockets; "" : not bound */
    uint32_t max_clients;
    uint64_t beat_ns, stats_ns;
    int pin;
    void (*log)(void *arg, enum mk_server_level level, const char *line);
    void *log_arg;

    client *clients; /* [max_clients] */
    uint64_t serial;
    uint32_t n_clients, n_gone;
    client *client_head[BUCKETS];
    stream *stream_head[BUCKETS];
    stream *dirty;

    int wake; /* eventfd */
    atomic_int draining, aborting;
    atomic_uint_least64_t deadline_ns;

    uint64_t started_ns, beat_due, stats_due;
    uint64_t frames, bad_frames, errors, dropped, overruns;
    uint64_t seen_bad, seen_appended, seen_generated, seen_steps, seen_ns;
    double rate_appended, rate_generated, rate_steps;
    char last_bad[200];
    mk_server_trace trace;

    uint32_t ids[MK_WIRE_MAX_IDS];
    unsigned char out[MK_WIRE_MAX_FRAME];
};

static uint64_t now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

__attribute__((format(printf, 3, 4))) static void say(mk_server *v, enum mk_server_level level, const char *fmt, ...)
{
    if (!v->log) return;
    char line[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    v->log(v->log_arg, level, line);
}

/* ---- tables --------------------------------------------------------------------------------------------------------- */

static uint32_t bucket_of_id(const uint8_t *id, size_t n)
{
    uint32_t x = 2166136261u;
    for (size_t i = 0; i < n; i++) x = (x ^ id[i]) * 16777619u;
    return x % BUCKETS;
}

static uint32_t bucket_of_stream(uint64_t id)
{
    return (uint32_t)((id * 0x9e3779b97f4a7c15u) >> 32) % BUCKETS;
}

static client *client_by_id(mk_server *v, const uint8_t *id, size_t n)
{
    client *c = v->client_head[bucket_of_id(id, n)];
    while (c && (c->id_size != n || memcmp(c->id, id, n))) c = c->hash_next;
    return c;
}

static client *client_by_owner(mk_server *v, uint64_t owner)
{
    uint64_t i = owner & 0xffff;
    return owner && i < v->max_clients && v->clients[i].owner == owner ? &v->clients[i] : NULL;
}

static stream *stream_by_id(mk_server *v, uint64_t id)
{
    stream *t = v->stream_head[bucket_of_stream(id)];
    while (t && t->id != id) t = t->hash_next;
    return t;
}

static void append_pop(stream *t)
{
    append *a = t->first;
    t->first = a->next;
    if (!t->first) t->last = &t->first;
    free(a);
}

/* Takes a stream out of every list and frees it. */
static void stream_forget(mk_server *v, client *c, stream *t)
{
    stream **p = &v->stream_head[bucket_of_stream(t->id)];
    while (*p != t) p = &(*p)->hash_next;
    *p = t->hash_next;
    for (p = &c->streams; *p != t; p = &(*p)->next) {}
    *p = t->next;
    for (p = &v->dirty; *p && *p != t; p = &(*p)->dirty_next) {}
    if (*p) *p = t->dirty_next;
    while (t->first) append_pop(t);
    c->n_streams--;
    free(t);
}

static void client_forget(mk_server *v, client *c)
{
    while (c->streams) stream_forget(v, c, c->streams);
    client **p = &v->client_head[bucket_of_id(c->id, c->id_size)];
    while (*p != c) p = &(*p)->hash_next;
    *p = c->hash_next;
    v->n_clients--;
    v->n_gone -= (uint32_t)c->gone;
    memset(c, 0, sizeof *c);
}

/* A free entry for a new client; when there is none, the one without streams that was silent longest makes room. NULL: all have
 * streams. */
static client *client_new(mk_server *v, const uint8_t *id, size_t n)
{
    client *c = NULL, *idle = NULL;
    for (uint32_t i = 0; i < v->max_clients && !c; i++) {
        client *k = &v->clients[i];
        if (!k->owner)
            c = k;
        else if (!k->n_streams && (!idle || k->heard_ns < idle->heard_ns))
            idle = k;
    }
    if (!c) {
        if (!idle) return NULL;
        client_forget(v, idle);
        c = idle;
    }
    c->owner = ++v->serial << 16 | (uint64_t)(c - v->clients);
    c->id_size = (uint8_t)n;
    memcpy(c->id, id, n);
    client **head = &v->client_head[bucket_of_id(id, n)];
    c->hash_next = *head;
    *head = c;
    v->n_clients++;
    return c;
}

/* ---- sending -------------------------------------------------------------------------------------------------------- */

/* Sends the frame of `size` bytes in v->out; never blocks. 0, or the errno: EHOSTUNREACH (nobody there), EAGAIN (it does not read). */
static int put(mk_server *v, const uint8_t *id, size_t id_size, size_t size)
{
    while (zmq_send(v->router, id, id_size, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0)
        if (errno != EINTR) return errno;
    while (zmq_send(v->router, v->out, size, ZMQ_DONTWAIT) < 0)
        if (errno != EINTR) return errno;
    return 0;
}

static void send_msg(mk_server *v, client *c, uint16_t type, uint64_t stream_id, uint64_t request, const void *fixed, const void *items)
{
    if (c->gone) return;
    size_t size = mk_wire_encode(v->out, sizeof v->out, type, 0, stream_id, request, fixed, items);
    if (!size) {
        say(v, MK_SERVER_WARN, "bug: %s could not be encoded", mk_wire_type_name(type));
        return;
    }
    int rc = put(v, c->id, c->id_size, size);
    if (!rc) return;
    c->gone = 1;
    v->n_gone++;
    if (rc == EAGAIN) v->overruns++;
    say(v, MK_SERVER_DEBUG, "client \"%s\" %s", c->name, rc == EAGAIN ? "does not read its messages" : "is gone");
}

/* ERR to whoever sent the frame, known or not. */
__attribute__((format(printf, 6, 7))) static void send_err(mk_server *v, const uint8_t *id, size_t id_size, const mk_wire_header *h,
                                                           uint16_t code, const char *fmt, ...)
{
    char text[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    mk_wire_err body = {.code = code, .about = h->type, .n = (uint32_t)strlen(text)};
    size_t size = mk_wire_encode(v->out, sizeof v->out, MK_WIRE_ERR, 0, h->stream, h->request, &body, text);
    v->errors++;
    if (size) put(v, id, id_size, size); /* a client that is gone is found by its streams' messages or by its silence */
}

static void answer_err(mk_server *v, client *c, const mk_wire_msg *m, int code, const char *text)
{
    send_err(v, c->id, c->id_size, &m->h, (uint16_t)code, "%s: %s", m->type->name, text);
}

static void answer_mk(mk_server *v, client *c, const mk_wire_msg *m, const mk_err *err)
{
    int code = err->code == MK_E_WIRE ? MK_WIRE_E_REFUSED : err->code == MK_E_CAPACITY ? MK_WIRE_E_CAPACITY : MK_WIRE_E_INTERNAL;
    answer_err(v, c, m, code, err->msg);
}

static void flush_stream(mk_server *v, stream *t)
{
    client *c = client_by_owner(v, t->owner);
    if (t->n && c) {
        mk_wire_tokens body = {.position = t->position, .n = t->n};
        send_msg(v, c, MK_WIRE_TOKENS, t->id, t->request, &body, t->token);
    }
    t->n = 0;
}

static void flush_all(mk_server *v)
{
    while (v->dirty) {
        stream *t = v->dirty;
        v->dirty = t->dirty_next;
        t->dirty = 0;
        flush_stream(v, t);
    }
}

/* ---- statistics ----------------------------------------------------------------------------------------------------- */

/* JSON of the daemon's state (PROTOCOL.md, "Statistics"); free() it. NULL: out of memory. */
static char *statistics(mk_server *v)
{
    mk_streams_stats st;
    mk_engine_figures f;
    mk_streams_get_stats(v->s, &st);
    mk_engine_get_figures(v->e, &f);
    json_t *j = json_pack(
        "{s:i, s:s, s:s, s:s, s:f, s:b, s:I, s:{s:I,s:I}, s:{s:I,s:I}, s:{s:I,s:I,s:I,s:I,s:I}, s:{s:I,s:I}, s:I, s:{s:f,s:f,s:f},"
        " s:{s:I,s:I,s:I,s:I,s:I}}",
        "version", (int)MK_WIRE_VERSION, "build", v->build, "model", v->model, "device", mk_engine_device(v->e), "uptime_s",
        (double)(now_ns() - v->started_ns) * 1e-9, "draining", atomic_load(&v->draining), "clients", (json_int_t)v->n_clients, "streams",
        "slots", (json_int_t)st.slots, "used", (json_int_t)st.slots_used, "pages", "total", (json_int_t)st.pages, "used",
        (json_int_t)st.pages_used, "requests", "running", (json_int_t)st.requests_running, "done", (json_int_t)st.requests_done,
        "cancelled", (json_int_t)st.cancelled, "refused", (json_int_t)st.refused, "opened", (json_int_t)st.opened, "tokens", "appended",
        (json_int_t)st.appended_tokens, "generated", (json_int_t)st.generated_tokens, "steps", (json_int_t)mk_engine_steps(v->e),
        "per_second", "appended", v->rate_appended, "generated", v->rate_generated, "steps", v->rate_steps, "wire", "frames",
        (json_int_t)v->frames, "bad_frames", (json_int_t)v->bad_frames, "errors_sent", (json_int_t)v->errors, "clients_dropped",
        (json_int_t)v->dropped, "overruns", (json_int_t)v->overruns);
    json_t *b = json_pack("{s:I,s:I,s:I,s:I,s:I,s:I,s:I}", "weights", (json_int_t)f.bytes.weights, "experts", (json_int_t)f.bytes.experts, "topk",
                          (json_int_t)f.bytes.topk, "n_experts", (json_int_t)f.bytes.n_experts, "state", (json_int_t)f.bytes.state, "kv",
                          (json_int_t)f.bytes.kv, "program", (json_int_t)f.program_bytes);
    if (json_object_set_new(j, "bytes", b) || json_object_set_new(j, "dtype", json_string(f.dtype)) ||
        json_object_set_new(j, "ceiling_gb_s", json_real(f.ceiling_gb_s)) || json_object_set_new(j, "launches", json_integer((json_int_t)f.launches))) {
        json_decref(j);
        j = NULL;
    }
    char *text = j ? json_dumps(j, JSON_COMPACT | JSON_REAL_PRECISION(9)) : NULL;
    json_decref(j);
    return text;
}

static void publish(mk_server *v, uint64_t now)
{
    mk_streams_stats st;
    mk_streams_get_stats(v->s, &st);
    uint64_t steps = mk_engine_steps(v->e);
    double dt = (double)(now - v->seen_ns) * 1e-9;
    if (dt > 0) {
        v->rate_appended = (double)(st.appended_tokens - v->seen_appended) / dt;
        v->rate_generated = (double)(st.generated_tokens - v->seen_generated) / dt;
        v->rate_steps = (double)(steps - v->seen_steps) / dt;
    }
    v->seen_appended = st.appended_tokens;
    v->seen_generated = st.generated_tokens;
    v->seen_steps = steps;
    v->seen_ns = now;
    if (v->bad_frames != v->seen_bad)
        say(v, MK_SERVER_WARN, "%llu malformed frames refused, the last: %s", (unsigned long long)(v->bad_frames - v->seen_bad), v->last_bad);
    v->seen_bad = v->bad_frames;
    char *text = statistics(v);
    if (text) zmq_send(v->pub, text, strlen(text), ZMQ_DONTWAIT);
    free(text);
}

/* ---- requests ------------------------------------------------------------------------------------------------------- */

static void add_string(char *text, uint32_t *n, size_t most, const char *s)
{
    size_t k = strlen(s);
    if (k > most) k = most;
    memcpy(text + *n, s, k);
    text[*n + k] = 0;
    *n += (uint32_t)k + 1;
}

static void on_hello(mk_server *v, client *c, const mk_wire_msg *m)
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
    send_msg(v, c, MK_WIRE_WELCOME, 0, m->h.request, &w, text);
    say(v, MK_SERVER_DEBUG, "client \"%s\" says hello", c->name);
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

static void on_open(mk_server *v, client *c, const mk_wire_msg *m)
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
    stream *t = calloc(1, sizeof *t);
    if (!t) {
        answer_err(v, c, m, MK_WIRE_E_CAPACITY, "out of memory");
        return;
    }
    if (mk_streams_open(v->s, c->owner, &o, &t->id, &err)) {
        free(t);
        answer_mk(v, c, m, &err);
        return;
    }
    t->owner = c->owner;
    t->last = &t->first;
    stream **head = &v->stream_head[bucket_of_stream(t->id)];
    t->hash_next = *head;
    *head = t;
    t->next = c->streams;
    c->streams = t;
    c->n_streams++;
    mk_wire_opened body = {.context = o.context ? o.context : mk_engine_context(v->e), .window = m->open.window};
    send_msg(v, c, MK_WIRE_OPENED, t->id, m->h.request, &body, NULL);
}

static void on_append(mk_server *v, client *c, const mk_wire_msg *m)
{
    if (!m->n) {
        answer_err(v, c, m, MK_WIRE_E_REFUSED, "no token ids, expected at least 1");
        return;
    }
    int logprobs = (m->h.flags & MK_APPEND_WITH_LOGPROBS) != 0;
    append *a = calloc(1, sizeof *a + (logprobs ? m->n * sizeof a->logprob[0] : 0));
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
    stream *t = stream_by_id(v, m->h.stream);
    if (!t) { /* the table accepted a stream that was never opened here */
        free(a);
        answer_err(v, c, m, MK_WIRE_E_INTERNAL, "stream is not in the server's table");
        return;
    }
    a->request = m->h.request;
    a->since_ns = now_ns();
    a->base = t->length;
    a->n = logprobs ? m->n : 0;
    for (uint32_t i = 0; i < a->n; i++) a->logprob[i] = NAN;
    t->length += m->n;
    *t->last = a;
    t->last = &a->next;
}

static void on_generate(mk_server *v, client *c, const mk_wire_msg *m)
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

static void on_close(mk_server *v, client *c, const mk_wire_msg *m)
{
    mk_err err = {0};
    if (mk_streams_close(v->s, c->owner, m->h.stream, m->h.request, &err)) {
        answer_mk(v, c, m, &err);
        return;
    }
    stream *t = stream_by_id(v, m->h.stream);
    if (t) t->closing = 1;
}

static void on_stats(mk_server *v, client *c, const mk_wire_msg *m)
{
    char *text = statistics(v);
    if (text) {
        mk_wire_statistics body = {.n = (uint32_t)strlen(text)};
        send_msg(v, c, MK_WIRE_STATISTICS, 0, m->h.request, &body, text);
    } else {
        answer_err(v, c, m, MK_WIRE_E_INTERNAL, "out of memory");
    }
    free(text);
}

static void on_trace(mk_server *v, client *c, const mk_wire_msg *m)
{
    mk_err err = {0};
    if (mk_server_trace_start(&v->trace, v->e, c->owner, m->h.request, &m->trace, now_ns(), &err)) answer_mk(v, c, m, &err);
}

/* Sends what there is of a trace, a few messages at a time; returns whether there is more now. */
static int send_trace(mk_server *v)
{
    mk_server_trace *t = &v->trace;
    for (int k = 0; k < 8 && t->owner; k++) {
        const void *fixed, *items;
        mk_err err = {0};
        client *c = client_by_owner(v, t->owner);
        uint64_t request = t->request;
        if (!c) {
            mk_server_trace_end(t, v->e);
            return 0;
        }
        int type = mk_server_trace_next(t, v->e, now_ns(), &fixed, &items, &err);
        if (!type) return t->state == MK_SERVER_TRACE_SENDS;
        if (type == MK_WIRE_ERR)
            answer_mk(v, c, &(mk_wire_msg){.h = {.type = MK_WIRE_TRACE, .request = request}, .type = mk_wire_type_of(MK_WIRE_TRACE)}, &err);
        else
            send_msg(v, c, (uint16_t)type, 0, request, fixed, items);
    }
    return t->owner != 0;
}

static void on_inject(mk_server *v, client *c, const mk_wire_msg *m)
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
    } else if (i->what != MK_WIRE_INJECT_IDLE || i->worker || i->instruction || i->after) {
        mk_fail(&err, MK_E_WIRE, "what is %u, expected 1, or 2 with nothing else", i->what);
    }
    mk_wire_injected body = {.steps = (uint32_t)mk_engine_steps(v->e)};
    if (err.code || mk_engine_submit(v->e, &s, &err)) {
        answer_mk(v, c, m, &err);
        return;
    }
    say(v, MK_SERVER_WARN, "client \"%s\" has a hang injected", c->name);
    send_msg(v, c, MK_WIRE_INJECTED, 0, m->h.request, &body, NULL);
#else
    answer_err(v, c, m, MK_WIRE_E_UNSUPPORTED, "this daemon was built without fault injection (make DEBUG=1)");
#endif
}

static void on_message(mk_server *v, client *c, const mk_wire_msg *m)
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
    case MK_WIRE_PING: send_msg(v, c, MK_WIRE_PONG, 0, m->h.request, &m->ping, NULL); break;
    case MK_WIRE_PONG: break;
    case MK_WIRE_INJECT: on_inject(v, c, m); break;
    default: answer_err(v, c, m, MK_WIRE_E_UNSUPPORTED, "this daemon does not serve it (WELCOME.features)"); break;
    }
}

/* One message of the ROUTER: routing id, then exactly one frame. */
static void on_frame(mk_server *v, const uint8_t *id, size_t id_size, const void *frame, size_t size, int frames)
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
    client *c = client_by_id(v, id, id_size);
    if (c) c->heard_ns = now_ns(); /* anything counts as a sign of life */
    if (code) {
        v->bad_frames++;
        snprintf(v->last_bad, sizeof v->last_bad, "%.190s", err.msg);
        send_err(v, id, id_size, &m.h, (uint16_t)code, "%s", err.msg);
        return;
    }
    if (!c && m.h.type == MK_WIRE_HELLO) {
        c = client_new(v, id, id_size);
        if (!c) {
            send_err(v, id, id_size, &m.h, MK_WIRE_E_CAPACITY, "HELLO: %u clients with streams are the limit", v->max_clients);
            return;
        }
        c->heard_ns = now_ns();
    }
    if (!c) {
        send_err(v, id, id_size, &m.h, MK_WIRE_E_HELLO, "%s: say HELLO first (a client that was dropped has to do so again)",
                 m.type->name);
        return;
    }
    if (!c->gone) on_message(v, c, &m);
}

/* Takes what has come, at most BURST messages; returns whether there may be more. */
static int receive(mk_server *v)
{
    for (int k = 0; k < BURST; k++) {
        zmq_msg_t id, frame, more;
        zmq_msg_init(&id);
        if (zmq_msg_recv(&id, v->router, ZMQ_DONTWAIT) < 0) {
            zmq_msg_close(&id);
            if (errno == EINTR) continue;
            return 0;
        }
        zmq_msg_init(&frame);
        int frames = 0;
        int next = zmq_msg_more(&id);
        while (next) { /* the parts of a message arrive together */
            zmq_msg_init(&more);
            zmq_msg_t *to = frames ? &more : &frame;
            while (zmq_msg_recv(to, v->router, 0) < 0 && errno == EINTR) {}
            next = zmq_msg_more(to);
            frames++;
            zmq_msg_close(&more);
        }
        if (zmq_msg_size(&id) && zmq_msg_size(&id) <= 255)
            on_frame(v, zmq_msg_data(&id), zmq_msg_size(&id), zmq_msg_data(&frame), zmq_msg_size(&frame), frames);
        zmq_msg_close(&frame);
        zmq_msg_close(&id);
    }
    return 1;
}

/* ---- reports -------------------------------------------------------------------------------------------------------- */

static void on_token(mk_server *v, stream *t, const mk_report *r)
{
    if (t->n && (t->n == BATCH || t->request != r->tag || t->position + t->n != r->ev.position)) flush_stream(v, t);
    if (!t->n) {
        t->request = r->tag;
        t->position = r->ev.position;
    }
    t->token[t->n++] = (mk_wire_token){.device_ns = r->ev.device_ns, .id = r->ev.token, .logprob = r->ev.logprob};
    t->length = r->ev.position + 1;
    if (!t->dirty) {
        t->dirty = 1;
        t->dirty_next = v->dirty;
        v->dirty = t;
    }
}

static void on_logprob(stream *t, const mk_report *r)
{
    for (append *a = t->first; a; a = a->next)
        if (r->ev.position >= a->base && r->ev.position - a->base < a->n) a->logprob[r->ev.position - a->base] = r->ev.logprob;
}

static void on_appended(mk_server *v, client *c, stream *t, const mk_report *r)
{
    append *a = t->first;
    if (!a) return;
    uint64_t now = now_ns();
    mk_wire_appended body = {.position = r->ev.position, .reason = r->ev.reason};
    body.appended = r->ev.position > a->base ? r->ev.position - a->base : 0;
    body.n = a->n < body.appended ? a->n : body.appended;
    if (r->ev.reason) t->length = r->ev.position;
    uint64_t since = a->since_ns > t->prompt_end_ns ? a->since_ns : t->prompt_end_ns; /* appends in a row do not overlap */
    t->prompt_ns += now - since;
    t->prompt_end_ns = now;
    send_msg(v, c, MK_WIRE_APPENDED, t->id, a->request, &body, a->logprob);
    append_pop(t);
}

static void on_done(mk_server *v, client *c, stream *t, const mk_report *r)
{
    flush_stream(v, t);
    mk_wire_done body = {.reason = r->ev.reason,
                         .position = r->ev.position,
                         .prompt_tokens = r->prompt_tokens,
                         .generated = r->ev.arg,
                         .queue_ns = t->prompt_end_ns > r->t_submit_ns ? t->prompt_end_ns - r->t_submit_ns : 0,
                         .prompt_ns = t->prompt_ns,
                         .first_ns = r->t_first_ns > r->t_submit_ns ? r->t_first_ns - r->t_submit_ns : 0,
                         .total_ns = r->t_done_ns > r->t_submit_ns ? r->t_done_ns - r->t_submit_ns : 0};
    if (!t->first) t->length = r->ev.position;
    t->prompt_ns = 0;
    send_msg(v, c, MK_WIRE_DONE, t->id, r->tag, &body, NULL);
}

static void reports(mk_server *v)
{
    mk_report r[128];
    uint32_t n;
    do {
        n = mk_streams_poll(v->s, r, 128);
        for (uint32_t i = 0; i < n; i++) {
            client *c = client_by_owner(v, r[i].owner);
            stream *t = c ? stream_by_id(v, r[i].stream) : NULL;
            if (!t || t->owner != r[i].owner) continue; /* its client was dropped */
            switch (r[i].ev.kind) {
            case MK_EV_TOKEN: on_token(v, t, &r[i]); break;
            case MK_EV_LOGPROB: on_logprob(t, &r[i]); break;
            case MK_EV_APPENDED: on_appended(v, c, t, &r[i]); break;
            case MK_EV_DONE: on_done(v, c, t, &r[i]); break;
            case MK_EV_CLOSED:
                flush_stream(v, t);
                send_msg(v, c, MK_WIRE_CLOSED, t->id, r[i].tag, NULL, NULL);
                stream_forget(v, c, t);
                break;
            default: break;
            }
        }
        flush_all(v);
    } while (n == 128);
}

/* ---- the loop ------------------------------------------------------------------------------------------------------- */

/* Forgets a client and what it has. One that has closed its streams and left without waiting for the answers was not dropped. */
static void drop(mk_server *v, client *c, const char *why)
{
    uint32_t open = 0;
    for (const stream *t = c->streams; t; t = t->next) open += !t->closing;
    mk_streams_drop_owner(v->s, c->owner);
    v->dropped += open != 0;
    if (open) say(v, MK_SERVER_WARN, "client \"%s\" dropped, %u streams closed: %s", c->name, open, why);
    if (!c->gone) {
        mk_wire_header none = {0};
        send_err(v, c->id, c->id_size, &none, MK_WIRE_E_DROPPED, "client dropped, its streams are closed: %s", why);
    }
    client_forget(v, c);
}

static void sweep(mk_server *v)
{
    for (uint32_t i = 0; v->n_gone && i < v->max_clients; i++)
        if (v->clients[i].gone) drop(v, &v->clients[i], "it is gone or does not read");
}

/* Once an interval: whoever holds streams and was silent for one is asked (PING), for five is dropped. `late`: how much later than
 * planned this runs; time in which this process slept is not held against clients. */
static void beat(mk_server *v, uint64_t now, uint64_t late)
{
    for (uint32_t i = 0; i < v->max_clients; i++) {
        client *c = &v->clients[i];
        if (!c->owner || !c->n_streams) continue;
        if (late > v->beat_ns) c->heard_ns += late;
        uint64_t silent = now > c->heard_ns ? now - c->heard_ns : 0;
        if (silent >= MK_WIRE_BEATS * v->beat_ns) {
            char why[80];
            snprintf(why, sizeof why, "nothing came from it for %.1f s", (double)silent * 1e-9);
            drop(v, c, why);
        } else if (silent >= v->beat_ns / 2) {
            mk_wire_ping body = {.cookie = now};
            send_msg(v, c, MK_WIRE_PING, 0, 0, &body, NULL);
        }
    }
}

static uint32_t running(mk_server *v)
{
    mk_streams_stats st;
    mk_streams_get_stats(v->s, &st);
    return st.requests_running;
}

int mk_server_run(mk_server *v, mk_err *err)
{
    zmq_pollitem_t item[3] = {{.socket = v->router, .events = ZMQ_POLLIN},
                              {.fd = mk_engine_event_fd(v->e), .events = ZMQ_POLLIN},
                              {.fd = v->wake, .events = ZMQ_POLLIN}};
    uint64_t now = now_ns(), grace = 0, count;
    v->started_ns = v->seen_ns = now;
    v->beat_due = now + v->beat_ns;
    v->stats_due = now + v->stats_ns;
    uint32_t cut = 0; /* requests that were running when everything was cancelled */
    int aborted = 0, more = 0;
    for (;;) {
        uint64_t due = v->beat_due < v->stats_due ? v->beat_due : v->stats_due;
        uint64_t deadline = grace ? grace : atomic_load(&v->draining) ? atomic_load(&v->deadline_ns) : ~0ull;
        if (deadline < due) due = deadline;
        now = now_ns();
        if (v->trace.owner && v->trace.state == MK_SERVER_TRACE_READS && due > now + 1000000) due = now + 1000000; /* the last records come in */
        long wait = more || due <= now ? 0 : (long)((due - now + 999999) / 1000000);
        if (zmq_poll(item, 3, wait) < 0 && errno != EINTR)
            return mk_fail(err, MK_E_SYSTEM, "polling the sockets: %s", zmq_strerror(errno));
        /* The event fd is read before the ring is drained, so an event that comes in between makes it readable again. */
        if ((item[1].revents & ZMQ_POLLIN) && read(item[1].fd, &count, sizeof count) < 0 && errno != EAGAIN && errno != EINTR)
            return mk_fail(err, MK_E_SYSTEM, "reading the engine's event fd: %s", strerror(errno));
        if ((item[2].revents & ZMQ_POLLIN) && read(v->wake, &count, sizeof count) < 0) {} /* nothing to do about it */
        more = receive(v);
        reports(v);
        if (v->trace.owner && send_trace(v)) more = 1;
        now = now_ns();
        if (now >= v->beat_due) {
            beat(v, now, now - v->beat_due);
            v->beat_due = now + v->beat_ns;
        }
        if (now >= v->stats_due) {
            publish(v, now);
            v->stats_due = now + v->stats_ns;
        }
        sweep(v);
        if (!atomic_load(&v->draining)) continue;
        if (!running(v)) break;
        if (grace) {
            if (now >= grace) break;
        } else if (atomic_load(&v->aborting) || now >= atomic_load(&v->deadline_ns)) {
            aborted = atomic_load(&v->aborting);
            cut = running(v);
            mk_streams_cancel_all(v->s);
            grace = now + GRACE_NS;
        }
    }
    if (!cut) return MK_OK;
    return mk_fail(err, MK_E_TIMEOUT, "%s with %u requests running", aborted ? "aborted" : "drain limit reached", cut);
}

static void wake(mk_server *v)
{
    int keep = errno;
    uint64_t one = 1;
    if (write(v->wake, &one, sizeof one) < 0) {} /* full: it is awake already */
    errno = keep;
}

void mk_server_drain(mk_server *v, double seconds)
{
    if (!(seconds > 0)) seconds = 0;
    if (seconds > 1e9) seconds = 1e9;
    atomic_store(&v->deadline_ns, now_ns() + (uint64_t)(seconds * 1e9));
    atomic_store(&v->draining, 1);
    wake(v);
}

void mk_server_abort(mk_server *v)
{
    atomic_store(&v->aborting, 1);
    atomic_store(&v->deadline_ns, now_ns());
    atomic_store(&v->draining, 1);
    wake(v);
}

/* ---- setup ---------------------------------------------------------------------------------------------------------- */

/* A copy that JSON can hold: bytes that are no UTF-8 become '?'. */
static char *utf8(const char *text)
{
    char *copy = strdup(text);
    json_t *j = copy ? json_string(copy) : NULL;
    for (char *p = copy; copy && !j && *p; p++)
        if (*p & 0x80) *p = '?';
    json_decref(j);
    return copy;
}

static int set(void *sock, int option, int value)
{
    return zmq_setsockopt(sock, option, &value, sizeof value);
}

/* Whether somebody accepts connections at that path. */
static int listening(const struct sockaddr_un *a)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return 0;
    int rc = connect(fd, (const struct sockaddr *)a, sizeof *a);
    int yes = rc == 0 || errno == EAGAIN || errno == EPROTOTYPE; /* his backlog is full; a socket of another type */
    close(fd);
    return yes;
}

/* Binds dir/name with mode 0660 and notes the path. Somebody who listens there is left alone: libzmq would take the path away from him. */
static int bind_socket(void *sock, const char *dir, const char *name, char *path, mk_err *err)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    char url[sizeof a.sun_path + 8];
    int n = snprintf(a.sun_path, sizeof a.sun_path, "%s/%s", dir, name);
    if (n < 0 || (size_t)n >= sizeof a.sun_path)
        return mk_fail(err, MK_E_USAGE, "%s/%s: %d bytes, a socket's path has at most %zu", dir, name, n, sizeof a.sun_path - 1);
    struct stat st;
    if (lstat(a.sun_path, &st) == 0 && !S_ISSOCK(st.st_mode))
        return mk_fail(err, MK_E_SYSTEM, "%s is in the way: it is not a socket", a.sun_path);
    if (listening(&a)) return mk_fail(err, MK_E_RUNNING, "%s: another process listens there", a.sun_path);
    snprintf(url, sizeof url, "ipc://%s", a.sun_path);
    if (zmq_bind(sock, url)) return mk_fail(err, MK_E_SYSTEM, "%s: %s", a.sun_path, zmq_strerror(errno));
    strcpy(path, a.sun_path);
    if (chmod(a.sun_path, 0660)) return mk_fail(err, MK_E_SYSTEM, "%s: chmod: %s", a.sun_path, strerror(errno));
    return MK_OK;
}

mk_server *mk_server_new(const mk_server_config *cfg, mk_engine *e, mk_streams *s, mk_err *err)
{
    mk_server *v = calloc(1, sizeof *v);
    if (!v) {
        mk_fail(err, MK_E_SYSTEM, "server: out of memory");
        return NULL;
    }
    v->wake = -1;
    v->e = e;
    v->s = s;
    v->max_clients = cfg->max_clients ? cfg->max_clients : 1024;
    if (v->max_clients > MAX_CLIENTS) v->max_clients = MAX_CLIENTS;
    v->beat_ns = (uint64_t)(cfg->beat_ms ? cfg->beat_ms : MK_WIRE_BEAT_MS) * 1000000;
    v->stats_ns = (uint64_t)(cfg->stats_ms ? cfg->stats_ms : 1000) * 1000000;
    v->pin = cfg->pin;
    v->log = cfg->log;
    v->log_arg = cfg->log_arg;
    v->build = utf8(cfg->build ? cfg->build : "mkd");
    v->model = utf8(cfg->model ? cfg->model : mk_engine_model(e)->arch);
    v->clients = calloc(v->max_clients, sizeof *v->clients);
    v->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    v->zmq = zmq_ctx_new();
    if (!v->build || !v->model || !v->clients || v->wake < 0 || !v->zmq) {
        mk_fail(err, MK_E_SYSTEM, "server: %s", strerror(errno));
        goto fail;
    }
    v->router = zmq_socket(v->zmq, ZMQ_ROUTER);
    v->pub = zmq_socket(v->zmq, ZMQ_PUB);
    int64_t cut = MK_WIRE_CUT, small = 4096;
    if (!v->router || !v->pub || set(v->router, ZMQ_LINGER, 500) || set(v->router, ZMQ_ROUTER_MANDATORY, 1) ||
        set(v->router, ZMQ_SNDHWM, SEND_QUEUE) || zmq_setsockopt(v->router, ZMQ_MAXMSGSIZE, &cut, sizeof cut) ||
        set(v->pub, ZMQ_LINGER, 0) || set(v->pub, ZMQ_SNDHWM, 8) || zmq_setsockopt(v->pub, ZMQ_MAXMSGSIZE, &small, sizeof small)) {
        mk_fail(err, MK_E_SYSTEM, "server: ZeroMQ: %s", zmq_strerror(errno));
        goto fail;
    }
    if (bind_socket(v->router, cfg->dir, "req.sock", v->path[0], err) ||
        bind_socket(v->pub, cfg->dir, "stats.sock", v->path[1], err))
        goto fail;
    return v;
fail:
    mk_server_destroy(&v);
    return NULL;
}

void mk_server_destroy(mk_server **p)
{
    mk_server *v = *p;
    if (!v) return;
    if (v->pub) zmq_close(v->pub);
    if (v->router) zmq_close(v->router);
    if (v->zmq)
        while (zmq_ctx_term(v->zmq) < 0 && errno == EINTR) {}
    for (int i = 0; i < 2; i++) /* libzmq leaves them behind */
        if (v->path[i][0]) unlink(v->path[i]);
    if (v->wake >= 0) close(v->wake);
    mk_server_trace_end(&v->trace, v->e);
    for (uint32_t i = 0; v->clients && i < v->max_clients; i++)
        if (v->clients[i].owner) client_forget(v, &v->clients[i]);
    free(v->clients);
    free(v->build);
    free(v->model);
    free(v);
    *p = NULL;
}
