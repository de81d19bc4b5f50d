#include "ipc/client.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#include <zmq.h>

#define WINDOW 4096u
#define MOST_BEAT_MS 60000u /* of a daemon: five of them is how long its end goes unnoticed */
#define MOST_PONGS   256u   /* frames that wait to be sent before PINGs are not answered any more */
#define QUIT_NS      1000000000u /* for what is still to be sent at the end */

/* A frame to be sent. */
typedef struct frame {
    struct frame *next;
    size_t size;
    unsigned char data[];
} frame;

/* A request whose caller waits; lives on the caller's stack and in the client's list. */
typedef struct call {
    struct call *next;
    uint64_t request;
    uint16_t answer; /* type expected */
    int done;
    mk_err err; /* code MK_OK: answered */
    mk_wire_msg msg; /* without items */
    char *text;      /* items of an answer of bytes, own zero byte at the end; the caller frees it */
    mk_client_trace *trace; /* not NULL: takes the answer's messages until it is whole */
} call;

typedef struct pending_append {
    struct pending_append *next;
    uint64_t request;
    float *logprobs; /* NULL: not wanted (any more) */
    uint32_t n;
    int scored; /* log probabilities were asked for */
} pending_append;

typedef struct token_event {
    mk_wire_token token;
    uint32_t position;
    uint64_t received_ns;
} token_event;

struct mk_client_stream {
    mk_client *c;
    mk_client_stream *next;
    uint64_t id;
    uint32_t context, window, position;
    uint32_t consumed; /* tokens taken since the last CREDIT */
    pending_append *appends, **appends_last;
    uint32_t n_appends;
    mk_err append_err; /* first refusal of an append that nobody has been told of */
    uint64_t generation; /* request number of the generation that next() speaks of; 0: none */
    int over;            /* its DONE or its refusal has come */
    int revoked;         /* cancelled, because an append before it was refused */
    uint32_t max_new, came, expected; /* of it: asked for, received; position of the next token, once the first has come */
    mk_wire_done done;
    uint64_t done_ns;
    mk_err err; /* its refusal */
    token_event *queue; /* ring */
    uint32_t cap, head, count;
};

struct mk_client {
    void *zmq, *sock; /* sock: the thread's */
    int wake;
    pthread_t thread;
    int started;
    mk_client_info info;

    pthread_mutex_t lock; /* everything below */
    pthread_cond_t changed;
    frame *out, **out_last;
    uint32_t n_out; /* frames there */
    int quit;
    uint64_t quit_ns;
    mk_err lost; /* code != MK_OK: the session is over */
    call *calls;
    mk_client_stream *streams;
    uint64_t next_request;
    uint64_t heard_ns, asked_ns, beat_ns;
};

static uint64_t now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* ---- sending (lock held) -------------------------------------------------------------------------------------------- */

/* Queues a frame for the thread. MK_E_CLOSED, MK_E_SYSTEM. */
static int post(mk_client *c, uint16_t type, uint32_t flags, uint64_t stream, uint64_t request, const void *fixed, const void *items,
                uint32_t n, mk_err *err)
{
    if (c->lost.code) return mk_fail(err, c->lost.code, "%s", c->lost.msg);
    size_t size = mk_wire_size(type, n);
    frame *f = malloc(sizeof *f + size);
    if (!f) return mk_fail(err, MK_E_SYSTEM, "%s: out of memory", mk_wire_type_name(type));
    f->next = NULL;
    f->size = mk_wire_encode(f->data, size, type, flags, stream, request, fixed, items);
    if (f->size != size) {
        free(f);
        return mk_fail(err, MK_E_USAGE, "%s: %u items are too many", mk_wire_type_name(type), n);
    }
    *c->out_last = f;
    c->out_last = &f->next;
    c->n_out++;
    uint64_t one = 1;
    if (write(c->wake, &one, sizeof one) < 0) {} /* full: the thread is awake already */
    return MK_OK;
}

/* Tells the daemon that tokens have been taken, in portions of half a window. */
static void grant(mk_client_stream *s, uint32_t taken)
{
    if (s->window == MK_WIRE_NO_WINDOW) return;
    s->consumed += taken;
    if (!s->consumed || s->consumed < s->window / 2) return;
    mk_wire_credit body = {.tokens = s->consumed};
    if (!post(s->c, MK_WIRE_CREDIT, 0, s->id, 0, &body, NULL, 0, NULL)) s->consumed = 0;
}

/* ---- the thread: receiving (lock held) ------------------------------------------------------------------------------ */

static void lose(mk_client *c, int code, const char *why)
{
    if (!c->lost.code) mk_fail(&c->lost, code, "%s", why);
    pthread_cond_broadcast(&c->changed);
}

static call *find_call(mk_client *c, uint64_t request)
{
    call *k = c->calls;
    while (k && k->request != request) k = k->next;
    return request ? k : NULL;
}

static mk_client_stream *find_stream(mk_client *c, uint64_t id)
{
    mk_client_stream *s = c->streams;
    while (s && s->id != id) s = s->next;
    return s;
}

static int code_of(uint16_t wire)
{
    switch (wire) {
    case MK_WIRE_E_CAPACITY: return MK_E_CAPACITY;
    case MK_WIRE_E_HELLO:
    case MK_WIRE_E_DROPPED:
    case MK_WIRE_E_DRAINING: return MK_E_CLOSED;
    default: return MK_E_WIRE;
    }
}

/* The daemon does not keep to the protocol, as s->err says: the generation ends here, whatever else comes of it. */
static void generation_broken(mk_client_stream *s)
{
    s->over = 1;
    post(s->c, MK_WIRE_CANCEL, 0, s->id, 0, NULL, NULL, 0, NULL);
}

static void on_tokens(mk_client_stream *s, const mk_wire_msg *m, uint64_t now)
{
    if (m->h.request != s->generation || s->over) { /* of a generation that nobody reads any more */
        grant(s, m->n);
        return;
    }
    if (s->came && m->tokens.position != s->expected) {
        mk_fail(&s->err, MK_E_WIRE, "TOKENS: expected position %u, found %u", s->expected, m->tokens.position);
        generation_broken(s);
        return;
    }
    if (m->n > s->max_new - s->came) {
        mk_fail(&s->err, MK_E_WIRE, "TOKENS: more than the %u tokens that were asked for", s->max_new);
        generation_broken(s);
        return;
    }
    s->came += m->n;
    s->expected = m->tokens.position + m->n;
    if (s->count + m->n > s->cap) {
        uint32_t cap = s->cap ? s->cap : 64;
        while (cap < s->count + m->n) cap *= 2;
        token_event *q = malloc(cap * sizeof *q);
        if (!q) {
            lose(s->c, MK_E_SYSTEM, "out of memory for tokens");
            return;
        }
        for (uint32_t i = 0; i < s->count; i++) q[i] = s->queue[(s->head + i) % s->cap];
        free(s->queue);
        s->queue = q;
        s->cap = cap;
        s->head = 0;
    }
    for (uint32_t i = 0; i < m->n; i++) {
        token_event *e = &s->queue[(s->head + s->count++) % s->cap];
        memcpy(&e->token, m->items + i * sizeof e->token, sizeof e->token);
        e->position = m->tokens.position + i;
        e->received_ns = now;
    }
}

/* The append that `request` names is answered: takes it off the list. NULL-safe. */
static void append_over(mk_client_stream *s, uint64_t request, const mk_wire_msg *appended, const mk_err *err)
{
    pending_append **p = &s->appends;
    while (*p && (*p)->request != request) p = &(*p)->next;
    pending_append *a = *p;
    if (!a) return;
    if (appended) {
        s->position = appended->appended.position;
        if (a->logprobs) {
            for (uint32_t i = 0; i < a->n; i++) a->logprobs[i] = NAN;
            mk_wire_items(appended, a->logprobs, a->n);
        }
        const uint32_t in = appended->appended.appended;
        if (appended->appended.reason && !s->append_err.code)
            mk_fail(&s->append_err, MK_E_WIRE, "append ended early (%s): %u of %u tokens are in", mk_wire_reason_name(appended->appended.reason), in, a->n);
        else if ((in != a->n || appended->n != (a->scored ? a->n : 0)) && !s->append_err.code)
            mk_fail(&s->append_err, MK_E_WIRE, "APPENDED: expected %u tokens and %u log probabilities, found %u and %u", a->n, a->scored ? a->n : 0, in, appended->n);
    } else if (!s->append_err.code) {
        s->append_err = *err;
    }
    *p = a->next;
    if (!*p) s->appends_last = p;
    s->n_appends--;
    free(a);
}

static void on_err(mk_client *c, const mk_wire_msg *m)
{
    char text[MK_WIRE_MAX_TEXT + 1];
    mk_wire_text(m, text, sizeof text);
    mk_err err = {0};
    mk_fail(&err, code_of(m->err.code), "%.500s", text[0] ? text : mk_wire_error_name(m->err.code));
    if (m->err.code == MK_WIRE_E_DROPPED || (m->err.code == MK_WIRE_E_HELLO && m->err.about != MK_WIRE_HELLO)) {
        lose(c, MK_E_CLOSED,
             m->err.code == MK_WIRE_E_DROPPED ? text : "mkd does not know this client any more (it has restarted or dropped it)");
        return;
    }
    call *k = find_call(c, m->h.request);
    if (k) {
        k->err = err;
        k->done = 1;
        return;
    }
    for (mk_client_stream *s = c->streams; s && m->h.request; s = s->next) {
        if (m->h.request == s->generation && !s->over) {
            s->err = err;
            s->over = 1;
        }
        append_over(s, m->h.request, NULL, &err);
    }
}

/* The next message of a trace, all in order. 1: it is whole. MK_E_WIRE is in *err when something is not as it should be. */
static int on_trace(mk_client_trace *t, const mk_wire_msg *m, mk_err *err)
{
    const uint64_t n = t->about.instructions, at = t->got;
    if (m->h.type == MK_WIRE_TRACED && !t->insn) {
        const uint64_t insns = m->traced.instructions, steps = m->traced.steps;
        uint32_t names = 0, k = 0;
        if (!insns || !steps || insns > 1u << 24 || steps > 1u << 10 || m->traced.vectors > MK_WIRE_MAX_NAMES || !m->traced.workers || m->traced.workers > insns)
            return mk_fail(err, MK_E_WIRE, "TRACED: %llu instructions of %u workers, %llu steps", (unsigned long long)insns, m->traced.workers, (unsigned long long)steps);
        t->about = m->traced;
        t->names = calloc(m->n + 1, 1);
        t->insn = calloc(insns, sizeof *t->insn);
        t->record = calloc(insns * steps, sizeof *t->record);
        if (!t->names || !t->insn || !t->record) return mk_fail(err, MK_E_SYSTEM, "out of memory");
        memcpy(t->names, m->items, m->n);
        mk_wire_plain(t->names, m->n, "\"\\");
        for (uint32_t i = 0; i < m->n; i++) names += !t->names[i];
        if (names < m->traced.vectors) return mk_fail(err, MK_E_WIRE, "TRACED: %u names for %u vectors", names, m->traced.vectors);
        if (!(t->vector = calloc(names + 1, sizeof *t->vector))) return mk_fail(err, MK_E_SYSTEM, "out of memory");
        for (const char *p = t->names; k < names; p += strlen(p) + 1) t->vector[k++] = p;
        t->opcode = t->vector + m->traced.vectors;
        t->n_opcode = names - m->traced.vectors;
        return 0;
    }
    const int map = m->h.type == MK_WIRE_TRACE_MAP;
    const uint64_t first = map ? m->trace_map.first : n * (m->trace_records.step + 1ull) + m->trace_records.first;
    if (m->h.type == MK_WIRE_TRACED || !n || first != at || !m->n || m->n > n - at % n || map != (at < n))
        return mk_fail(err, MK_E_WIRE, "a trace's messages are out of order");
    mk_wire_items(m, map ? (void *)(t->insn + at) : (void *)(t->record + (at - n)), m->n);
    t->got += m->n;
    return t->got == n * (t->about.steps + 1ull);
}

static void dispatch(mk_client *c, const void *data, size_t size)
{
    mk_wire_msg m;
    mk_err err;
    uint64_t now = now_ns();
    c->heard_ns = now;
    if (mk_wire_decode(data, size, MK_WIRE_DAEMON, &m, &err)) {
        mk_err_prefix(&err, "mkd sent a bad frame");
        lose(c, MK_E_WIRE, err.msg);
        return;
    }
    mk_client_stream *s = m.h.stream ? find_stream(c, m.h.stream) : NULL;
    switch (m.h.type) {
    case MK_WIRE_PING:
        if (c->n_out < MOST_PONGS) post(c, MK_WIRE_PONG, 0, 0, m.h.request, &m.ping, NULL, 0, NULL);
        return;
    case MK_WIRE_TOKENS:
        if (s) on_tokens(s, &m, now);
        break;
    case MK_WIRE_DONE:
        if (s) s->position = m.done.position;
        if (s && m.h.request == s->generation && !s->over) {
            s->done = m.done;
            s->done_ns = now;
            s->over = 1;
            if (m.done.generated != s->came) mk_fail(&s->err, MK_E_WIRE, "DONE: of %u tokens, %u have come", m.done.generated, s->came);
        }
        break;
    case MK_WIRE_APPENDED:
        if (s) append_over(s, m.h.request, &m, NULL);
        break;
    case MK_WIRE_ERR: on_err(c, &m); break;
    default: {
        call *k = find_call(c, m.h.request);
        if (k && k->done) break; /* its caller has the answer, and has not come to take it yet */
        if (k && k->trace && m.h.type >= MK_WIRE_TRACED && m.h.type <= MK_WIRE_TRACE_RECORDS) {
            k->done |= on_trace(k->trace, &m, &k->err) != 0;
        } else if (k && k->answer == m.h.type) {
            if (m.type->item == 1 && (k->text = malloc((size_t)m.n + 1))) {
                memcpy(k->text, m.items, m.n);
                k->text[m.n] = 0;
            }
            k->msg = m;
            k->msg.items = (unsigned char *)k->text;
            k->done = 1;
        } else if (m.h.type == MK_WIRE_OPENED && !s) { /* its caller has given up waiting */
            post(c, MK_WIRE_CLOSE, 0, m.h.stream, 0, NULL, NULL, 0, NULL);
        }
    }
    }
    pthread_cond_broadcast(&c->changed);
}

/* Sends what is queued; returns whether some of it has to wait for room. */
static int send_queued(mk_client *c)
{
    while (c->out) {
        frame *f = c->out;
        if (zmq_send(c->sock, f->data, f->size, ZMQ_DONTWAIT) < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN) return 1;
            lose(c, MK_E_SYSTEM, zmq_strerror(errno));
        }
        c->out = f->next;
        if (!c->out) c->out_last = &c->out;
        c->n_out--;
        free(f);
    }
    return 0;
}

static void keep_alive(mk_client *c, uint64_t now, uint64_t late)
{
    if (late > c->beat_ns) c->heard_ns = now; /* this process slept; the daemon did not */
    uint64_t silent = now > c->heard_ns ? now - c->heard_ns : 0;
    if (silent >= MK_WIRE_BEATS * c->beat_ns) {
        char why[80];
        snprintf(why, sizeof why, "mkd has not answered for %.1f s", (double)silent * 1e-9);
        lose(c, MK_E_CLOSED, why);
    } else if (silent >= c->beat_ns && now - c->asked_ns >= c->beat_ns) {
        mk_wire_ping body = {.cookie = now};
        c->asked_ns = now;
        post(c, MK_WIRE_PING, 0, 0, 0, &body, NULL, 0, NULL);
    }
}

static void *run(void *arg)
{
    mk_client *c = arg;
    zmq_pollitem_t item[2] = {{.socket = c->sock}, {.fd = c->wake, .events = ZMQ_POLLIN}};
    uint64_t count, due = now_ns() + c->beat_ns / 2;
    pthread_mutex_lock(&c->lock);
    for (;;) {
        int full = send_queued(c);
        if (c->quit && (!full || c->lost.code || now_ns() - c->quit_ns >= QUIT_NS)) break;
        item[0].events = (short)(ZMQ_POLLIN | (full ? ZMQ_POLLOUT : 0));
        uint64_t now = now_ns();
        if (now >= due) {
            keep_alive(c, now, now - due);
            due = now + c->beat_ns / 2;
            continue;
        }
        pthread_mutex_unlock(&c->lock);
        int rc = zmq_poll(item, 2, (long)((due - now + 999999) / 1000000));
        int why = errno;
        if (rc > 0 && (item[1].revents & ZMQ_POLLIN) && read(c->wake, &count, sizeof count) < 0) {} /* nothing to do about it */
        pthread_mutex_lock(&c->lock);
        if (rc < 0 && why != EINTR) {
            lose(c, MK_E_SYSTEM, zmq_strerror(why));
            if (c->quit) break;
        }
        for (int k = 0; k < 64 && rc > 0; k++) {
            zmq_msg_t msg;
            zmq_msg_init(&msg);
            int got = zmq_msg_recv(&msg, c->sock, ZMQ_DONTWAIT);
            if (got >= 0) dispatch(c, zmq_msg_data(&msg), zmq_msg_size(&msg));
            zmq_msg_close(&msg);
            if (got < 0 && errno != EINTR) break;
        }
    }
    pthread_mutex_unlock(&c->lock);
    zmq_close(c->sock); /* its linger lets the last frames out */
    return NULL;
}

/* ---- waiting (lock held) -------------------------------------------------------------------------------------------- */

static struct timespec deadline_of(int timeout_ms)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    ts.tv_sec += timeout_ms / 1000;
    ts.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
    if (ts.tv_nsec >= 1000000000) {
        ts.tv_sec++;
        ts.tv_nsec -= 1000000000;
    }
    return ts;
}

/* Waits for a change; 0, or MK_E_TIMEOUT. */
static int wait_change(mk_client *c, int timeout_ms, const struct timespec *deadline)
{
    if (timeout_ms < 0) return pthread_cond_wait(&c->changed, &c->lock) ? MK_E_SYSTEM : MK_OK;
    return pthread_cond_timedwait(&c->changed, &c->lock, deadline) ? MK_E_TIMEOUT : MK_OK;
}

/* Sends a request and waits for its one answer, which is in *k then (k->text is the caller's). Takes the lock. */
static int ask_for(mk_client *c, call *k, mk_client_trace *trace, uint16_t type, uint16_t answer, uint32_t flags, uint64_t stream, const void *fixed,
                   const void *items, uint32_t n, int timeout_ms, mk_err *err)
{
    struct timespec deadline = deadline_of(timeout_ms < 0 ? 0 : timeout_ms);
    memset(k, 0, sizeof *k);
    k->answer = answer;
    k->trace = trace;
    pthread_mutex_lock(&c->lock);
    k->request = c->next_request++;
    k->next = c->calls;
    c->calls = k;
    int rc = post(c, type, flags, stream, k->request, fixed, items, n, err);
    while (!rc && !k->done) {
        if (c->lost.code)
            rc = mk_fail(err, c->lost.code, "%s", c->lost.msg);
        else if (wait_change(c, timeout_ms, &deadline) && !k->done && !c->lost.code)
            rc = mk_fail(err, MK_E_TIMEOUT, "%s: no answer within %d ms", mk_wire_type_name(type), timeout_ms);
    }
    if (!rc && k->err.code) rc = mk_fail(err, k->err.code, "%s", k->err.msg);
    call **p = &c->calls;
    while (*p != k) p = &(*p)->next;
    *p = k->next;
    pthread_mutex_unlock(&c->lock);
    if (rc) {
        free(k->text);
        k->text = NULL;
    }
    return rc;
}

static int ask(mk_client *c, call *k, uint16_t type, uint16_t answer, uint32_t flags, uint64_t stream, const void *fixed, const void *items,
               uint32_t n, int timeout_ms, mk_err *err)
{
    return ask_for(c, k, NULL, type, answer, flags, stream, fixed, items, n, timeout_ms, err);
}

/* ---- the client ----------------------------------------------------------------------------------------------------- */

static int set(void *sock, int option, int value)
{
    return zmq_setsockopt(sock, option, &value, sizeof value);
}

/* ZeroMQ connects to nothing without a word; this says at once when nobody is there. */
static int somebody_listens(const struct sockaddr_un *a, mk_err *err)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return mk_fail(err, MK_E_SYSTEM, "socket: %s", strerror(errno));
    int rc = connect(fd, (const struct sockaddr *)a, sizeof *a), why = errno;
    close(fd);
    if (!rc || why == EAGAIN) return MK_OK;
    return mk_fail(err, why == EACCES ? MK_E_SYSTEM : MK_E_CLOSED, "%s: no mkd listens there: %s", a->sun_path, strerror(why));
}

static int connect_to(mk_client *c, const char *dir, mk_err *err)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    char url[sizeof a.sun_path + 8];
    int n = snprintf(a.sun_path, sizeof a.sun_path, "%s/req.sock", dir);
    if (n < 0 || (size_t)n >= sizeof a.sun_path)
        return mk_fail(err, MK_E_USAGE, "%s/req.sock: %d bytes, a socket's path has at most %zu", dir, n, sizeof a.sun_path - 1);
    if (somebody_listens(&a, err)) return err ? err->code : MK_E_CLOSED;
    snprintf(url, sizeof url, "ipc://%s", a.sun_path);
    int64_t cut = MK_WIRE_CUT;
    c->sock = zmq_socket(c->zmq, ZMQ_DEALER);
    if (!c->sock || set(c->sock, ZMQ_LINGER, 200) || set(c->sock, ZMQ_RCVHWM, 0) ||
        zmq_setsockopt(c->sock, ZMQ_MAXMSGSIZE, &cut, sizeof cut) || zmq_connect(c->sock, url))
        return mk_fail(err, MK_E_SYSTEM, "%s: %s", url, zmq_strerror(errno));
    return MK_OK;
}

static int start_thread(mk_client *c, mk_err *err)
{
    sigset_t all, old; /* signals are the program's own threads' business */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = pthread_create(&c->thread, NULL, run, c);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc) return mk_fail(err, MK_E_SYSTEM, "client thread: %s", strerror(rc));
    c->started = 1;
    return MK_OK;
}

static int say_hello(mk_client *c, const char *name, int timeout_ms, mk_err *err)
{
    call k;
    if (!name) name = "mkd-client";
    mk_wire_hello body = {.newest = MK_WIRE_VERSION, .n = (uint32_t)strnlen(name, MK_WIRE_MAX_NAME)};
    int rc = ask(c, &k, MK_WIRE_HELLO, MK_WIRE_WELCOME, 0, 0, &body, name, body.n, timeout_ms, err);
    if (rc) return rc;
    if (!k.text) return mk_fail(err, MK_E_SYSTEM, "out of memory");
    mk_client_info *i = &c->info;
    i->welcome = k.msg.welcome;
    if (!i->welcome.vocab || i->welcome.beat_ms > MOST_BEAT_MS) {
        free(k.text);
        return mk_fail(err, MK_E_WIRE, "WELCOME: expected a vocabulary and a beat of at most %u ms, found %u and %u", MOST_BEAT_MS, i->welcome.vocab, i->welcome.beat_ms);
    }
    mk_wire_welcome_string(&k.msg, 0, i->model, sizeof i->model);
    mk_wire_welcome_string(&k.msg, 1, i->arch, sizeof i->arch);
    mk_wire_welcome_string(&k.msg, 2, i->build, sizeof i->build);
    mk_wire_welcome_string(&k.msg, 3, i->device, sizeof i->device);
    free(k.text);
    pthread_mutex_lock(&c->lock);
    if (i->welcome.beat_ms) c->beat_ns = (uint64_t)i->welcome.beat_ms * 1000000;
    pthread_mutex_unlock(&c->lock);
    return MK_OK;
}

mk_client *mk_client_new(const char *dir, const char *name, int timeout_ms, mk_err *err)
{
    mk_client *c = calloc(1, sizeof *c);
    if (!c) {
        mk_fail(err, MK_E_SYSTEM, "client: out of memory");
        return NULL;
    }
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&c->changed, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_init(&c->lock, NULL);
    c->out_last = &c->out;
    c->next_request = 1;
    c->beat_ns = (uint64_t)MK_WIRE_BEAT_MS * 1000000;
    c->heard_ns = now_ns();
    c->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    c->zmq = zmq_ctx_new();
    if (c->wake < 0 || !c->zmq) {
        mk_fail(err, MK_E_SYSTEM, "client: %s", strerror(errno));
        mk_client_destroy(&c);
    } else if (connect_to(c, dir, err) || start_thread(c, err) || say_hello(c, name, timeout_ms, err)) {
        mk_client_destroy(&c);
    }
    return c;
}

static void stream_free(mk_client_stream *s)
{
    while (s->appends) {
        pending_append *a = s->appends;
        s->appends = a->next;
        free(a);
    }
    free(s->queue);
    free(s);
}

void mk_client_destroy(mk_client **p)
{
    mk_client *c = *p;
    if (!c) return;
    pthread_mutex_lock(&c->lock);
    for (mk_client_stream *s = c->streams; s; s = s->next) post(c, MK_WIRE_CLOSE, 0, s->id, 0, NULL, NULL, 0, NULL);
    c->quit = 1;
    c->quit_ns = now_ns();
    pthread_mutex_unlock(&c->lock);
    if (c->started) {
        uint64_t one = 1;
        if (write(c->wake, &one, sizeof one) < 0) {}
        pthread_join(c->thread, NULL);
    } else if (c->sock) {
        zmq_close(c->sock);
    }
    if (c->zmq)
        while (zmq_ctx_term(c->zmq) < 0 && errno == EINTR) {}
    if (c->wake >= 0) close(c->wake);
    while (c->streams) {
        mk_client_stream *s = c->streams;
        c->streams = s->next;
        stream_free(s);
    }
    while (c->out) {
        frame *f = c->out;
        c->out = f->next;
        free(f);
    }
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    free(c);
    *p = NULL;
}

const mk_client_info *mk_client_about(const mk_client *c)
{
    return &c->info;
}

int mk_client_stats(mk_client *c, char **json, int timeout_ms, mk_err *err)
{
    call k;
    int rc = ask(c, &k, MK_WIRE_STATS, MK_WIRE_STATISTICS, 0, 0, NULL, NULL, 0, timeout_ms, err);
    if (!rc && !k.text) rc = mk_fail(err, MK_E_SYSTEM, "out of memory");
    if (!rc) *json = k.text;
    return rc;
}

int mk_client_ping(mk_client *c, uint64_t *rtt_ns, int timeout_ms, mk_err *err)
{
    call k;
    uint64_t since = now_ns();
    mk_wire_ping body = {.cookie = since};
    int rc = ask(c, &k, MK_WIRE_PING, MK_WIRE_PONG, 0, 0, &body, NULL, 0, timeout_ms, err);
    if (rc) return rc;
    *rtt_ns = now_ns() - since;
    if (k.msg.ping.cookie != since) return mk_fail(err, MK_E_WIRE, "PONG: the cookie came back changed");
    return MK_OK;
}

int mk_client_traced(mk_client *c, uint32_t steps, int timeout_ms, mk_client_trace **out, mk_err *err)
{
    call k;
    mk_wire_trace body = {.steps = steps, .timeout_ms = (uint32_t)timeout_ms};
    *out = NULL;
    if (timeout_ms < 1 || timeout_ms > (int)MK_WIRE_TRACE_MS)
        return mk_fail(err, MK_E_USAGE, "a trace's timeout: expected 1 to %u ms, found %d", MK_WIRE_TRACE_MS, timeout_ms);
    mk_client_trace *t = calloc(1, sizeof *t);
    if (!t) return mk_fail(err, MK_E_SYSTEM, "out of memory");
    /* the daemon minds the time; it answers in any case, and then the records have to travel */
    int rc = ask_for(c, &k, t, MK_WIRE_TRACE, MK_WIRE_TRACED, 0, 0, &body, NULL, 0, timeout_ms + 30000, err);
    if (!rc && t->about.steps != steps) rc = mk_fail(err, MK_E_WIRE, "TRACED: expected %u steps, found %u", steps, t->about.steps);
    if (rc)
        mk_client_trace_free(&t);
    else
        *out = t;
    return rc;
}

void mk_client_trace_free(mk_client_trace **p)
{
    mk_client_trace *t = *p;
    if (!t) return;
    free(t->names);
    free(t->vector);
    free(t->insn);
    free(t->record);
    free(t);
    *p = NULL;
}

int mk_client_inject(mk_client *c, const mk_wire_inject *what, uint32_t *steps, int timeout_ms, mk_err *err)
{
    call k;
    int rc = ask(c, &k, MK_WIRE_INJECT, MK_WIRE_INJECTED, 0, 0, what, NULL, 0, timeout_ms, err);
    if (!rc && steps) *steps = k.msg.injected.steps;
    return rc;
}

/* ---- streams -------------------------------------------------------------------------------------------------------- */

mk_client_stream *mk_client_open(mk_client *c, const mk_client_options *o, int timeout_ms, mk_err *err)
{
    static const mk_client_options defaults;
    if (!o) o = &defaults;
    if (o->n_stop > MK_WIRE_MAX_STOP) {
        mk_fail(err, MK_E_USAGE, "%u stop ids, the limit is %u", o->n_stop, MK_WIRE_MAX_STOP);
        return NULL;
    }
    mk_client_stream *s = calloc(1, sizeof *s);
    if (!s) {
        mk_fail(err, MK_E_SYSTEM, "OPEN: out of memory");
        return NULL;
    }
    s->c = c;
    s->appends_last = &s->appends;
    s->window = o->window ? o->window : WINDOW;
    mk_wire_open body = {.context = o->context, .window = s->window, .seed = o->seed, .n = o->own_stop ? o->n_stop : 0};
    uint32_t flags = o->own_stop ? MK_OPEN_STOP : 0;
    if (o->sampling) {
        flags |= MK_OPEN_SAMPLING;
        body.temperature = o->temperature;
        body.top_p = o->top_p != 0 ? o->top_p : 1;
        body.min_p = o->min_p;
        body.top_k = o->top_k;
    }
    if (o->pin_rows) {
        flags |= MK_OPEN_PIN;
        body.pin = MK_WIRE_PIN(o->pin, o->pin_rows);
    }
    call k;
    if (ask(c, &k, MK_WIRE_OPEN, MK_WIRE_OPENED, flags, 0, &body, o->stop, body.n, timeout_ms, err)) {
        free(s);
        return NULL;
    }
    s->id = k.msg.h.stream;
    s->context = k.msg.opened.context;
    pthread_mutex_lock(&c->lock);
    s->next = c->streams;
    c->streams = s;
    pthread_mutex_unlock(&c->lock);
    return s;
}

uint64_t mk_client_stream_id(const mk_client_stream *s)
{
    return s->id;
}

uint32_t mk_client_stream_context(const mk_client_stream *s)
{
    return s->context;
}

uint32_t mk_client_stream_position(const mk_client_stream *s)
{
    pthread_mutex_lock(&s->c->lock);
    uint32_t n = s->position;
    pthread_mutex_unlock(&s->c->lock);
    return n;
}

static int append_post(mk_client_stream *s, const uint32_t *ids, uint32_t n, float *logprobs, mk_err *err)
{
    pending_append *a = calloc(1, sizeof *a);
    if (!a) return mk_fail(err, MK_E_SYSTEM, "APPEND: out of memory");
    mk_wire_append body = {.n = n};
    a->request = s->c->next_request++;
    a->logprobs = logprobs;
    a->scored = logprobs != NULL;
    a->n = n;
    int rc = post(s->c, MK_WIRE_APPEND, logprobs ? MK_APPEND_WITH_LOGPROBS : 0, s->id, a->request, &body, ids, n, err);
    if (rc) {
        free(a);
        return rc;
    }
    *s->appends_last = a;
    s->appends_last = &a->next;
    s->n_appends++;
    return MK_OK;
}

/* The refusal of an append that was not reported yet. */
static int append_error(mk_client_stream *s, mk_err *err)
{
    int code = s->append_err.code;
    if (code) mk_fail(err, code, "%s", s->append_err.msg);
    s->append_err.code = 0;
    return code;
}

int mk_client_append_async(mk_client_stream *s, const uint32_t *ids, uint32_t n, mk_err *err)
{
    if (!n || n > MK_WIRE_MAX_IDS) return mk_fail(err, MK_E_USAGE, "append of %u tokens, expected 1 to %u", n, MK_WIRE_MAX_IDS);
    pthread_mutex_lock(&s->c->lock);
    int rc = append_post(s, ids, n, NULL, err);
    pthread_mutex_unlock(&s->c->lock);
    return rc;
}

int mk_client_append(mk_client_stream *s, const uint32_t *ids, uint32_t n, float *logprobs, int timeout_ms, mk_err *err)
{
    mk_client *c = s->c;
    struct timespec deadline = deadline_of(timeout_ms < 0 ? 0 : timeout_ms);
    if (!n) return mk_fail(err, MK_E_USAGE, "append of 0 tokens");
    pthread_mutex_lock(&c->lock);
    uint32_t sent = 0;
    int rc = MK_OK;
    /* A message at a time: behind one that was refused the next would land in the wrong place. */
    while (!rc && (s->n_appends || (sent < n && !s->append_err.code))) {
        if (!s->n_appends) {
            uint32_t k = n - sent < MK_WIRE_MAX_IDS ? n - sent : MK_WIRE_MAX_IDS;
            rc = append_post(s, ids + sent, k, logprobs ? logprobs + sent : NULL, err);
            sent += k;
        } else if (c->lost.code) {
            rc = mk_fail(err, c->lost.code, "%s", c->lost.msg);
        } else if (wait_change(c, timeout_ms, &deadline) && s->n_appends && !c->lost.code) {
            rc = mk_fail(err, MK_E_TIMEOUT, "APPEND: not through within %d ms", timeout_ms);
        }
    }
    for (pending_append *a = s->appends; a; a = a->next) a->logprobs = NULL; /* the caller's memory is his again */
    if (!rc) rc = append_error(s, err);
    pthread_mutex_unlock(&c->lock);
    return rc;
}

int mk_client_generate(mk_client_stream *s, const mk_client_generation *g, mk_err *err)
{
    if (g->n_stop > MK_WIRE_MAX_STOP) return mk_fail(err, MK_E_USAGE, "%u stop ids, the limit is %u", g->n_stop, MK_WIRE_MAX_STOP);
    mk_wire_generate body = {.max_new = g->max_new, .n = g->own_stop ? g->n_stop : 0};
    pthread_mutex_lock(&s->c->lock);
    uint64_t request = s->c->next_request++;
    int rc = post(s->c, MK_WIRE_GENERATE, g->own_stop ? MK_GENERATE_STOP : 0, s->id, request, &body, g->stop, body.n, err);
    if (!rc) {
        grant(s, s->count);
        s->count = s->head = 0;
        s->generation = request;
        s->over = s->revoked = 0;
        s->max_new = g->max_new;
        s->came = 0;
        s->err.code = 0;
    }
    pthread_mutex_unlock(&s->c->lock);
    return rc;
}

int mk_client_next(mk_client_stream *s, mk_client_event *ev, int timeout_ms, mk_err *err)
{
    mk_client *c = s->c;
    struct timespec deadline = deadline_of(timeout_ms < 0 ? 0 : timeout_ms);
    pthread_mutex_lock(&c->lock);
    int rc = MK_OK;
    memset(ev, 0, sizeof *ev);
    if (!s->generation) rc = mk_fail(err, MK_E_BUG, "no generation was asked for in this stream");
    while (!rc && s->generation && (s->append_err.code || (!s->count && !s->over))) {
        if (s->append_err.code && !s->revoked) { /* its prompt is not what was meant */
            if (!s->over) rc = post(c, MK_WIRE_CANCEL, 0, s->id, 0, NULL, NULL, 0, err);
            s->revoked = 1;
        } else if (s->append_err.code && s->over) {
            grant(s, s->count);
            s->count = s->head = 0;
            s->generation = 0;
            rc = append_error(s, err);
        } else if (c->lost.code) {
            rc = mk_fail(err, c->lost.code, "%s", c->lost.msg);
        } else if (wait_change(c, timeout_ms, &deadline) && !s->count && !s->over && !c->lost.code) {
            rc = mk_fail(err, MK_E_TIMEOUT, "no token within %d ms", timeout_ms);
        }
    }
    if (!rc && s->count) {
        const token_event *e = &s->queue[s->head];
        *ev = (mk_client_event){.kind = MK_CLIENT_TOKEN, .position = e->position, .token = e->token, .received_ns = e->received_ns};
        s->head = (s->head + 1) % s->cap;
        s->count--;
        grant(s, 1);
    } else if (!rc && s->err.code) {
        rc = mk_fail(err, s->err.code, "%s", s->err.msg);
        s->generation = 0;
    } else if (!rc) {
        *ev = (mk_client_event){
            .kind = MK_CLIENT_DONE, .position = s->done.position, .done = s->done, .received_ns = s->done_ns};
        s->generation = 0;
    }
    pthread_mutex_unlock(&c->lock);
    return rc;
}

int mk_client_cancel(mk_client_stream *s, mk_err *err)
{
    pthread_mutex_lock(&s->c->lock);
    int rc = post(s->c, MK_WIRE_CANCEL, 0, s->id, 0, NULL, NULL, 0, err);
    pthread_mutex_unlock(&s->c->lock);
    return rc;
}

int mk_client_close(mk_client_stream **p, int timeout_ms, mk_err *err)
{
    mk_client_stream *s = *p;
    if (!s) return MK_OK;
    mk_client *c = s->c;
    *p = NULL;
    int rc;
    if (timeout_ms == 0) {
        pthread_mutex_lock(&c->lock);
        rc = post(c, MK_WIRE_CLOSE, 0, s->id, 0, NULL, NULL, 0, err);
        pthread_mutex_unlock(&c->lock);
    } else {
        call k;
        rc = ask(c, &k, MK_WIRE_CLOSE, MK_WIRE_CLOSED, 0, s->id, NULL, NULL, 0, timeout_ms, err);
    }
    pthread_mutex_lock(&c->lock);
    mk_client_stream **q = &c->streams;
    while (*q != s) q = &(*q)->next;
    *q = s->next;
    pthread_mutex_unlock(&c->lock);
    stream_free(s);
    return rc;
}
