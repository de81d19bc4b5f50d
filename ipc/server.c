#include "ipc/server_internal.h"

#include <errno.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <zmq.h>

#define SEND_QUEUE  65536 /* messages a client may leave unread before it is dropped */
#define BURST       256   /* requests taken before the engine's events are looked at again */
#define GRACE_NS    1000000000ull /* for the last DONEs after everything was cancelled */
#define MAX_CLIENTS 65535u

static_assert(MK_SERVER_BATCH <= MK_WIRE_MAX_BATCH, "a batch fits its message");
static_assert((int)MK_WIRE_LENGTH == MK_DONE_LENGTH && (int)MK_WIRE_STOP == MK_DONE_STOP && (int)MK_WIRE_CONTEXT == MK_DONE_CONTEXT &&
                  (int)MK_WIRE_CANCELLED == MK_DONE_CANCELLED && (int)MK_WIRE_ERROR == MK_DONE_ERROR,
              "reasons of the wire are those of the device");

uint64_t mk_server_now(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

void mk_server_say(mk_server *v, enum mk_server_level level, const char *fmt, ...)
{
    if (!v->log) return;
    char line[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    v->log(v->log_arg, level, line);
}

/* ---- statistics ----------------------------------------------------------------------------------------------------- */

char *mk_server_statistics(mk_server *v)
{
    mk_streams_stats st;
    mk_engine_figures f;
    mk_streams_get_stats(v->s, &st);
    mk_engine_get_figures(v->e, &f);
    json_t *j = json_pack(
        "{s:i, s:s, s:s, s:s, s:f, s:b, s:I, s:{s:I,s:I}, s:{s:I,s:I}, s:{s:I,s:I,s:I,s:I,s:I}, s:{s:I,s:I}, s:I, s:{s:f,s:f,s:f},"
        " s:{s:I,s:I,s:I,s:I,s:I}}",
        "version", (int)MK_WIRE_VERSION, "build", v->build, "model", v->model, "device", mk_engine_device(v->e), "uptime_s",
        (double)(mk_server_now() - v->started_ns) * 1e-9, "draining", atomic_load(&v->draining), "clients", (json_int_t)v->n_clients, "streams",
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
        mk_server_say(v, MK_SERVER_WARN, "%llu malformed frames refused, the last: %s", (unsigned long long)(v->bad_frames - v->seen_bad), v->last_bad);
    v->seen_bad = v->bad_frames;
    char *text = mk_server_statistics(v);
    if (text) zmq_send(v->pub, text, strlen(text), ZMQ_DONTWAIT);
    free(text);
}

/* ---- reports -------------------------------------------------------------------------------------------------------- */

static void flush_stream(mk_server *v, mk_server_stream *t)
{
    mk_server_client *c = mk_server_client_by_owner(v, t->owner);
    if (t->n && c) {
        mk_wire_tokens body = {.position = t->position, .n = t->n};
        mk_server_send(v, c, MK_WIRE_TOKENS, t->id, t->request, &body, t->token);
    }
    t->n = 0;
}

static void flush_all(mk_server *v)
{
    while (v->dirty) {
        mk_server_stream *t = v->dirty;
        v->dirty = t->dirty_next;
        t->dirty = 0;
        flush_stream(v, t);
    }
}

static void on_token(mk_server *v, mk_server_stream *t, const mk_report *r)
{
    if (t->n && (t->n == MK_SERVER_BATCH || t->request != r->tag || t->position + t->n != r->ev.position)) flush_stream(v, t);
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

static void on_logprob(mk_server_stream *t, const mk_report *r)
{
    for (mk_server_append *a = t->first; a; a = a->next)
        if (r->ev.position >= a->base && r->ev.position - a->base < a->n) a->logprob[r->ev.position - a->base] = r->ev.logprob;
}

static void on_appended(mk_server *v, mk_server_client *c, mk_server_stream *t, const mk_report *r)
{
    mk_server_append *a = t->first;
    if (!a) return;
    uint64_t now = mk_server_now();
    mk_wire_appended body = {.position = r->ev.position, .reason = r->ev.reason};
    body.appended = r->ev.position > a->base ? r->ev.position - a->base : 0;
    body.n = a->n < body.appended ? a->n : body.appended;
    if (r->ev.reason) t->length = r->ev.position;
    uint64_t since = a->since_ns > t->prompt_end_ns ? a->since_ns : t->prompt_end_ns; /* appends in a row do not overlap */
    t->prompt_ns += now - since;
    t->prompt_end_ns = now;
    mk_server_send(v, c, MK_WIRE_APPENDED, t->id, a->request, &body, a->logprob);
    mk_server_append_pop(t);
}

static void on_done(mk_server *v, mk_server_client *c, mk_server_stream *t, const mk_report *r)
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
    mk_server_send(v, c, MK_WIRE_DONE, t->id, r->tag, &body, NULL);
}

static void reports(mk_server *v)
{
    mk_report r[128];
    uint32_t n;
    do {
        n = mk_streams_poll(v->s, r, 128);
        for (uint32_t i = 0; i < n; i++) {
            mk_server_client *c = mk_server_client_by_owner(v, r[i].owner);
            mk_server_stream *t = c ? mk_server_stream_by_id(v, r[i].stream) : NULL;
            if (!t || t->owner != r[i].owner) continue; /* its client was dropped */
            switch (r[i].ev.kind) {
            case MK_EV_TOKEN: on_token(v, t, &r[i]); break;
            case MK_EV_LOGPROB: on_logprob(t, &r[i]); break;
            case MK_EV_APPENDED: on_appended(v, c, t, &r[i]); break;
            case MK_EV_DONE: on_done(v, c, t, &r[i]); break;
            case MK_EV_CLOSED:
                flush_stream(v, t);
                mk_server_send(v, c, MK_WIRE_CLOSED, t->id, r[i].tag, NULL, NULL);
                mk_server_stream_forget(v, c, t);
                break;
            default: break;
            }
        }
        flush_all(v);
    } while (n == 128);
}

/* ---- the loop ------------------------------------------------------------------------------------------------------- */

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
            mk_server_on_frame(v, zmq_msg_data(&id), zmq_msg_size(&id), zmq_msg_data(&frame), zmq_msg_size(&frame), frames);
        zmq_msg_close(&frame);
        zmq_msg_close(&id);
    }
    return 1;
}

/* Forgets a client and what it has. One that has closed its streams and left without waiting for the answers was not dropped. */
static void drop(mk_server *v, mk_server_client *c, const char *why)
{
    uint32_t open = 0;
    for (const mk_server_stream *t = c->streams; t; t = t->next) open += !t->closing;
    mk_streams_drop_owner(v->s, c->owner);
    v->dropped += open != 0;
    if (open) mk_server_say(v, MK_SERVER_WARN, "client \"%s\" dropped, %u streams closed: %s", c->name, open, why);
    if (!c->gone) {
        mk_wire_header none = {0};
        mk_server_send_err(v, c->id, c->id_size, &none, MK_WIRE_E_DROPPED, "client dropped, its streams are closed: %s", why);
    }
    mk_server_client_forget(v, c);
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
        mk_server_client *c = &v->clients[i];
        if (!c->owner || !c->n_streams) continue;
        if (late > v->beat_ns) c->heard_ns += late;
        uint64_t silent = now > c->heard_ns ? now - c->heard_ns : 0;
        if (silent >= MK_WIRE_BEATS * v->beat_ns) {
            char why[80];
            snprintf(why, sizeof why, "nothing came from it for %.1f s", (double)silent * 1e-9);
            drop(v, c, why);
        } else if (silent >= v->beat_ns / 2) {
            mk_wire_ping body = {.cookie = now};
            mk_server_send(v, c, MK_WIRE_PING, 0, 0, &body, NULL);
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
    uint64_t now = mk_server_now(), grace = 0, count;
    v->started_ns = v->seen_ns = now;
    v->beat_due = now + v->beat_ns;
    v->stats_due = now + v->stats_ns;
    uint32_t cut = 0; /* requests that were running when everything was cancelled */
    int aborted = 0, more = 0;
    for (;;) {
        uint64_t due = v->beat_due < v->stats_due ? v->beat_due : v->stats_due;
        uint64_t deadline = grace ? grace : atomic_load(&v->draining) ? atomic_load(&v->deadline_ns) : ~0ull;
        if (deadline < due) due = deadline;
        now = mk_server_now();
        if (v->trace.owner && v->trace.state == MK_SERVER_TRACE_WAITS && v->trace.deadline_ns < due) due = v->trace.deadline_ns;
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
        if (v->trace.owner && mk_server_send_trace(v)) more = 1;
        now = mk_server_now();
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
    atomic_store(&v->deadline_ns, mk_server_now() + (uint64_t)(seconds * 1e9));
    atomic_store(&v->draining, 1);
    wake(v);
}

void mk_server_abort(mk_server *v)
{
    atomic_store(&v->aborting, 1);
    atomic_store(&v->deadline_ns, mk_server_now());
    atomic_store(&v->draining, 1);
    wake(v);
}

/* ---- setup ---------------------------------------------------------------------------------------------------------- */

/* A copy that JSON can hold and a terminal shows (ipc/wire.h). */
static char *plain(const char *text)
{
    char *copy = strdup(text);
    if (copy) mk_wire_plain(copy, strlen(copy), "");
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
    v->build = plain(cfg->build ? cfg->build : "mkd");
    v->model = plain(cfg->model ? cfg->model : mk_engine_model(e)->arch);
    v->clients = calloc(v->max_clients, sizeof *v->clients);
    v->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    v->zmq = zmq_ctx_new();
    if (!v->build || !v->model || !v->clients || v->wake < 0 || !v->zmq) {
        mk_fail(err, MK_E_SYSTEM, "server: %s", strerror(errno));
        goto fail;
    }
    v->router = zmq_socket(v->zmq, ZMQ_ROUTER);
    v->pub = zmq_socket(v->zmq, ZMQ_PUB);
    int64_t cut = MK_WIRE_CUT, small = 512; /* a handshake with the longest identity; subscriptions are empty */
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
        if (v->clients[i].owner) mk_server_client_forget(v, &v->clients[i]);
    free(v->clients);
    free(v->build);
    free(v->model);
    free(v);
    *p = NULL;
}
