/* Clients that come, ask, change their minds and die, against a running daemon, and the books kept about it. Each client is a process with a DEALER socket of
 * its own, so that every message of the wire is seen. Held to:
 *   every GENERATE that was not refused gets exactly one DONE, as the last thing said about it; its tokens come in order, as many as DONE says;
 *   when all are gone, killed ones included, the daemon's pools are as they were before;
 *   no generating stream waits longer than --stall-ms for its next token (device clock, and clock of the client; 0: not held to).
 * Prints one JSON object; exit code 0 when all held.
 *   soak --socket-dir DIR [--seconds 60] [--clients 8] [--kills-ms 1500] [--stall-ms 50] [--max-new 400] [--context 1024] [--seed 1] */
#include "ipc/mkctl.h"
#include "ipc/wire.h"

#include <errno.h>
#include <jansson.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <zmq.h>

#define MAX_CLIENTS 64
#define PATIENCE_MS 15000 /* for any answer */

/* What a client writes down, in memory shared with the parent: it outlives a kill. */
typedef struct book {
    uint64_t asked, done, cancels, closes, refused, opens, tokens, appended;
    uint64_t errors;  /* broken promises; what[] says which was the first */
    uint64_t stalls_device, stalls_client;
    uint64_t gap_device_ns, gap_client_ns; /* longest */
    char what[200];
} book;
typedef struct shared {
    volatile int stop;
    book client[MAX_CLIENTS];
    struct {
        int ok;
        long long streams, pages, running, total, generated;
    } pools;
} shared;

static const char *dir;
static uint32_t seconds = 60, clients = 8, kills_ms = 1500, stall_ms = 50, max_new = 400, context = 1024, seed = 1;
static shared *sh;
static uint64_t state;

static uint32_t rnd(uint32_t n)
{
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(state >> 33) % n;
}
static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- one client ----------------------------------------------------------------------------------------------------- */

typedef struct link {
    void *zmq, *sock;
    book *b;
    uint64_t next_request, stream;
    uint32_t vocab, position;
    unsigned char in[MK_WIRE_CUT], out[MK_WIRE_MAX_FRAME];
    mk_wire_msg m;
    uint64_t over[64]; /* requests that had their DONE, the last ones */
    uint32_t n_over;
} link_t;

__attribute__((format(printf, 2, 3), noreturn)) static void broken(link_t *l, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    if (!l->b->errors) vsnprintf(l->b->what, sizeof l->b->what, fmt, ap);
    va_end(ap);
    l->b->errors++;
    _exit(1);
}

static void send_it(link_t *l, uint16_t type, uint32_t flags, uint64_t request, const void *fixed, const void *items)
{
    uint64_t stream = type == MK_WIRE_HELLO || type == MK_WIRE_OPEN || type == MK_WIRE_STATS || type == MK_WIRE_PONG ? 0 : l->stream;
    size_t n = mk_wire_encode(l->out, sizeof l->out, type, flags, stream, request, fixed, items);
    if (!n) broken(l, "%s cannot be encoded", mk_wire_type_name(type));
    while (zmq_send(l->sock, l->out, n, 0) < 0)
        if (errno != EINTR) broken(l, "sending: %s", zmq_strerror(errno));
}

/* The next message that is not a PING. */
static const mk_wire_msg *hear(link_t *l)
{
    for (;;) {
        int n = zmq_recv(l->sock, l->in, sizeof l->in, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) broken(l, "nothing came for %d ms (%s)", PATIENCE_MS, zmq_strerror(errno));
        mk_err err = {0};
        if (mk_wire_decode(l->in, (size_t)n, MK_WIRE_DAEMON, &l->m, &err)) broken(l, "%s", err.msg);
        if (l->m.h.type == MK_WIRE_PING) {
            send_it(l, MK_WIRE_PONG, 0, l->m.h.request, &l->m.ping, NULL);
            continue;
        }
        if (l->m.h.type == MK_WIRE_TOKENS || l->m.h.type == MK_WIRE_DONE)
            for (uint32_t i = 0; i < 64 && i < l->n_over; i++)
                if (l->over[i] == l->m.h.request) broken(l, "%s after its DONE", l->m.type->name);
        return &l->m;
    }
}

static const mk_wire_msg *expect(link_t *l, uint16_t type)
{
    const mk_wire_msg *m = hear(l);
    char text[160] = "";
    if (m->h.type == MK_WIRE_ERR) mk_wire_text(m, text, sizeof text);
    if (m->h.type != type) broken(l, "%s instead of %s: %.120s", m->type->name, mk_wire_type_name(type), text);
    return m;
}

static void connect_to(link_t *l, book *b)
{
    char url[256];
    int patience = PATIENCE_MS, linger = 100;
    memset(l, 0, sizeof *l);
    l->b = b;
    l->next_request = 1;
    l->zmq = zmq_ctx_new();
    l->sock = zmq_socket(l->zmq, ZMQ_DEALER);
    snprintf(url, sizeof url, "ipc://%s/req.sock", dir);
    if (zmq_setsockopt(l->sock, ZMQ_RCVTIMEO, &patience, sizeof patience) || zmq_setsockopt(l->sock, ZMQ_LINGER, &linger, sizeof linger) ||
        zmq_connect(l->sock, url))
        broken(l, "%s: %s", url, zmq_strerror(errno));
    send_it(l, MK_WIRE_HELLO, 0, 0, &(mk_wire_hello){.newest = MK_WIRE_VERSION, .n = 4}, "soak");
    l->vocab = expect(l, MK_WIRE_WELCOME)->welcome.vocab;
}

/* One generation to its end. 0: the stream was closed under it. */
static int generation(link_t *l, uint32_t ctx, int window)
{
    uint32_t ids[256], n = 1 + rnd(rnd(4) ? 24 : 256), most = 1 + rnd(rnd(8) ? max_new : 4), got = 0, cut = 0, taken = 0;
    int by_close = 0;
    if (l->position + n > ctx) n = ctx - l->position;
    if (!n) return 1;
    for (uint32_t i = 0; i < n; i++) ids[i] = rnd(l->vocab);
    uint64_t append = l->next_request++, r = l->next_request++, last_device = 0, last = 0;
    send_it(l, MK_WIRE_APPEND, 0, append, &(mk_wire_append){.n = n}, ids);
    send_it(l, MK_WIRE_GENERATE, MK_GENERATE_STOP, r, &(mk_wire_generate){.max_new = most, .n = 0}, NULL);
    l->b->asked++;
    l->b->appended += n;
    uint32_t how = rnd(10);
    if (how < 3) cut = rnd(most + 1); /* after so many tokens it is cancelled, or its stream closed */
    if (how < 3 && !cut) {
        by_close = how == 2;
        send_it(l, by_close ? MK_WIRE_CLOSE : MK_WIRE_CANCEL, 0, by_close ? l->next_request++ : 0, NULL, NULL);
        by_close ? l->b->closes++ : l->b->cancels++;
        cut = ~0u;
    }
    uint32_t expected = l->position + n, appended = 0;
    for (;;) {
        const mk_wire_msg *m = hear(l);
        uint64_t t = now_ns();
        if (m->h.type == MK_WIRE_APPENDED && !appended) {
            appended = 1;
            if (m->appended.reason) expected = m->appended.position; /* cancelled before it was through */
            continue;
        }
        if (m->h.type == MK_WIRE_TOKENS) {
            mk_wire_token k[MK_WIRE_MAX_BATCH];
            if (m->h.request != r || m->h.stream != l->stream) broken(l, "TOKENS of another request");
            if (m->tokens.position != expected + got) broken(l, "token at %u, expected %u", m->tokens.position, expected + got);
            uint32_t c = mk_wire_items(m, k, MK_WIRE_MAX_BATCH);
            for (uint32_t i = 0; i < c; i++) {
                uint64_t gap = last_device ? k[i].device_ns - last_device : 0;
                if (k[i].id >= l->vocab) broken(l, "token %u", k[i].id);
                if (!window && gap > l->b->gap_device_ns) l->b->gap_device_ns = gap;
                if (!window && stall_ms && gap > stall_ms * 1000000ull) l->b->stalls_device++;
                last_device = k[i].device_ns;
            }
            uint64_t gap = last ? t - last : 0;
            if (!window && gap > l->b->gap_client_ns) l->b->gap_client_ns = gap;
            if (!window && stall_ms && gap > stall_ms * 1000000ull) l->b->stalls_client++;
            last = t;
            got += c;
            l->b->tokens += c;
            taken += c;
            if (window && !by_close && taken >= (uint32_t)window / 2) {
                send_it(l, MK_WIRE_CREDIT, 0, 0, &(mk_wire_credit){.tokens = taken}, NULL);
                taken = 0;
            }
            if (cut && cut != ~0u && got >= cut) {
                by_close = how == 2;
                send_it(l, by_close ? MK_WIRE_CLOSE : MK_WIRE_CANCEL, 0, by_close ? l->next_request++ : 0, NULL, NULL);
                by_close ? l->b->closes++ : l->b->cancels++;
                cut = ~0u;
            }
            continue;
        }
        if (m->h.type == MK_WIRE_DONE) {
            if (m->h.request != r) broken(l, "DONE of another request");
            if (m->done.generated != got || m->done.position != expected + got)
                broken(l, "DONE says %u tokens to %u, %u came to %u", m->done.generated, m->done.position, got, expected + got);
            uint32_t reason = m->done.reason;
            if (!(reason == MK_WIRE_LENGTH && got == most) && !(reason == MK_WIRE_CONTEXT && m->done.position >= ctx) &&
                !(reason == MK_WIRE_CANCELLED && cut == ~0u))
                broken(l, "DONE for reason %s after %u of %u tokens", mk_wire_reason_name(reason), got, most);
            l->b->done++;
            l->position = m->done.position;
            l->over[l->n_over++ % 64] = r;
            if (window && !by_close && taken) send_it(l, MK_WIRE_CREDIT, 0, 0, &(mk_wire_credit){.tokens = taken}, NULL);
            if (!appended) { /* the prompt alone fills the context: the generation is over before the append is through */
                if (reason != MK_WIRE_CONTEXT) broken(l, "DONE for reason %s before APPENDED", mk_wire_reason_name(reason));
                m = expect(l, MK_WIRE_APPENDED);
                if (m->appended.position > l->position || (m->appended.position < l->position && !m->appended.reason)) broken(l, "APPENDED to %u", m->appended.position);
                l->position = m->appended.position;
            }
            if (by_close) expect(l, MK_WIRE_CLOSED);
            return !by_close;
        }
        char text[160] = "";
        if (m->h.type == MK_WIRE_ERR) mk_wire_text(m, text, sizeof text);
        /* the cancel crossed the DONE of the generation before, or the like: refusals end the request without a DONE */
        broken(l, "%s in a generation: %.120s", m->type->name, text);
    }
}

static void client(uint32_t me)
{
    static link_t l;
    connect_to(&l, &sh->client[me]);
    while (!sh->stop) {
        int window = rnd(4) ? 0 : 32 + (int)rnd(64), greedy = rnd(2) != 0;
        uint32_t ctx = 64 + rnd(context - 63);
        send_it(&l, MK_WIRE_OPEN, MK_OPEN_SAMPLING | MK_OPEN_STOP, l.next_request++,
                &(mk_wire_open){.context = ctx, .window = window ? (uint32_t)window : MK_WIRE_NO_WINDOW, .seed = rnd(1000), .temperature = greedy ? 0.0f : 0.9f,
                                .top_p = greedy ? 1.0f : 0.95f, .top_k = greedy ? 0 : 40},
                NULL);
        const mk_wire_msg *m = hear(&l);
        if (m->h.type == MK_WIRE_ERR && m->err.code == MK_WIRE_E_CAPACITY) { /* killed clients hold their streams for five seconds */
            l.b->refused++;
            usleep(50000);
            continue;
        }
        char text[160] = "";
        if (m->h.type == MK_WIRE_ERR) mk_wire_text(m, text, sizeof text);
        if (m->h.type != MK_WIRE_OPENED) broken(&l, "%s instead of OPENED: %.120s", m->type->name, text);
        l.b->opens++;
        l.stream = m->h.stream;
        l.position = 0;
        int open = 1;
        for (uint32_t k = 1 + rnd(6); k && open && !sh->stop; k--) open = generation(&l, ctx, window);
        if (open) {
            send_it(&l, MK_WIRE_CLOSE, 0, l.next_request++, NULL, NULL);
            expect(&l, MK_WIRE_CLOSED);
        }
        if (!rnd(8)) usleep(rnd(200) * 1000); /* so that the daemon is idle at times */
    }
    zmq_close(l.sock);
    zmq_ctx_term(l.zmq);
}

/* ---- the parent ------------------------------------------------------------------------------------------------------ */

static pid_t start(uint32_t me)
{
    static uint64_t lives;
    lives++;
    fflush(stdout);
    pid_t pid = fork();
    if (pid) return pid;
    state = (uint64_t)seed * 1000003u + lives * 7919u + me;
    client(me);
    _exit(0);
}

static void statistics(void)
{
    static link_t l;
    static book b;
    connect_to(&l, &b);
    send_it(&l, MK_WIRE_STATS, 0, 1, NULL, NULL);
    const mk_wire_msg *m = expect(&l, MK_WIRE_STATISTICS);
    json_t *j = json_loadb((const char *)m->items, m->n, 0, NULL);
    json_int_t used, pages, total, running, generated;
    if (j && !json_unpack(j, "{s:{s:I}, s:{s:I, s:I}, s:{s:I}, s:{s:I}}", "streams", "used", &used, "pages", "used", &pages, "total", &total, "requests",
                          "running", &running, "tokens", "generated", &generated)) {
        sh->pools.streams = used, sh->pools.pages = pages, sh->pools.running = running, sh->pools.total = total, sh->pools.generated = generated;
        sh->pools.ok = 1;
    }
    json_decref(j);
    zmq_close(l.sock);
    zmq_ctx_term(l.zmq);
}

/* The daemon's pools, asked by a process of its own: this one forks, and keeps away from threads. */
static int ask_pools(void)
{
    sh->pools.ok = 0;
    pid_t pid = fork();
    if (!pid) {
        statistics();
        _exit(0);
    }
    waitpid(pid, NULL, 0);
    return sh->pools.ok;
}

int main(int argc, char **argv)
{
    const mkctl_flag flag[] = {{"--socket-dir", MKCTL_TEXT, &dir, "the daemon's sockets"},
                               {"--seconds", MKCTL_U32, &seconds, "how long"},
                               {"--clients", MKCTL_U32, &clients, "processes"},
                               {"--kills-ms", MKCTL_U32, &kills_ms, "one of them is killed about this often; 0: none"},
                               {"--stall-ms", MKCTL_U32, &stall_ms, "longest wait for a token; 0: not held to"},
                               {"--max-new", MKCTL_U32, &max_new, "longest generation"},
                               {"--context", MKCTL_U32, &context, "longest stream"},
                               {"--seed", MKCTL_U32, &seed, "of everything that is random"}};
    int rc = mkctl_flags(argc, argv, flag, sizeof flag / sizeof *flag, NULL, 0, NULL);
    if (rc) return rc < 0 ? 0 : rc;
    if (!dir || !clients || clients > MAX_CLIENTS || context < 64 || !max_new) return mkctl_usage("soak: --socket-dir, at most %d clients, context of 64 or more", MAX_CLIENTS);
    sh = mmap(NULL, sizeof *sh, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (sh == MAP_FAILED) return 6;
    state = seed;
    if (!ask_pools()) {
        fprintf(stderr, "soak: no daemon answers in %s\n", dir);
        return 11;
    }
    const long long streams0 = sh->pools.streams, pages0 = sh->pools.pages, generated0 = sh->pools.generated;
    pid_t pid[MAX_CLIENTS];
    uint64_t killed = 0, lost_asked = 0, begin = now_ns(), end = begin + seconds * 1000000000ull, next = begin + kills_ms * 1000000ull;
    for (uint32_t i = 0; i < clients; i++) pid[i] = start(i);
    while (now_ns() < end) {
        usleep(20000);
        uint32_t i = rnd(clients);
        if (kills_ms && now_ns() >= next) {
            kill(pid[i], SIGKILL);
            waitpid(pid[i], NULL, 0);
            killed++;
            lost_asked += sh->client[i].asked - sh->client[i].done; /* nobody is there to hear the DONE of what was running */
            sh->client[i].asked = sh->client[i].done;
            pid[i] = start(i);
            next = now_ns() + (kills_ms / 2 + rnd(kills_ms)) * 1000000ull;
        }
        for (uint32_t k = 0; k < clients; k++)
            if (sh->client[k].errors) end = 0; /* it is over */
    }
    sh->stop = 1;
    for (uint32_t i = 0; i < clients; i++) waitpid(pid[i], NULL, 0);
    double ran = (double)(now_ns() - begin) * 1e-9;
    uint64_t since = now_ns();
    while (ask_pools() && (sh->pools.streams != streams0 || sh->pools.pages != pages0 || sh->pools.running) && now_ns() - since < 20 * 1000000000ull) usleep(100000);
    double drained = (double)(now_ns() - since) * 1e-9;
    int clean = sh->pools.ok && sh->pools.streams == streams0 && sh->pools.pages == pages0 && !sh->pools.running;

    book all = {0};
    for (uint32_t i = 0; i < clients; i++) {
        const book *b = &sh->client[i];
        all.asked += b->asked, all.done += b->done, all.cancels += b->cancels, all.closes += b->closes, all.refused += b->refused, all.opens += b->opens;
        all.tokens += b->tokens, all.appended += b->appended, all.errors += b->errors, all.stalls_device += b->stalls_device, all.stalls_client += b->stalls_client;
        if (b->gap_device_ns > all.gap_device_ns) all.gap_device_ns = b->gap_device_ns;
        if (b->gap_client_ns > all.gap_client_ns) all.gap_client_ns = b->gap_client_ns;
        if (b->errors && !all.what[0]) snprintf(all.what, sizeof all.what, "client %u: %.180s", i, b->what);
    }
    for (char *p = all.what; *p; p++)
        if (*p == '"' || *p == '\\') *p = '\'';
    int ok = !all.errors && all.asked == all.done && all.done && clean && !all.stalls_device && !all.stalls_client;
    printf("{\"seconds\": %.1f, \"clients\": %u, \"streams_opened\": %llu, \"requests\": %llu, \"exactly_one_done\": %llu, \"cut_short_by_kill\": %llu, "
           "\"cancels\": %llu, \"closed_while_generating\": %llu, \"clients_killed\": %llu, \"opens_refused\": %llu, \"prompt_tokens\": %llu, \"tokens_received\": %llu, "
           "\"tokens_generated\": %lld, \"broken_promises\": %llu, \"first\": \"%s\", \"stall_limit_ms\": %u, \"stalls\": {\"device_clock\": %llu, \"client_clock\": %llu}, "
           "\"longest_gap_ms\": {\"device_clock\": %.3f, \"client_clock\": %.3f}, \"pools_before\": {\"streams\": %lld, \"pages\": %lld}, "
           "\"pools_after\": {\"streams\": %lld, \"pages\": %lld, \"of\": %lld, \"running\": %lld}, \"pools_back_after_s\": %.1f, \"ok\": %s}\n",
           ran, clients, (unsigned long long)all.opens, (unsigned long long)all.asked, (unsigned long long)all.done, (unsigned long long)lost_asked,
           (unsigned long long)all.cancels, (unsigned long long)all.closes, (unsigned long long)killed, (unsigned long long)all.refused,
           (unsigned long long)all.appended, (unsigned long long)all.tokens, sh->pools.generated - generated0, (unsigned long long)all.errors, all.what, stall_ms,
           (unsigned long long)all.stalls_device, (unsigned long long)all.stalls_client, (double)all.gap_device_ns * 1e-6, (double)all.gap_client_ns * 1e-6,
           streams0, pages0, sh->pools.streams, sh->pools.pages, sh->pools.total, sh->pools.running, drained, ok ? "true" : "false");
    return !ok;
}
