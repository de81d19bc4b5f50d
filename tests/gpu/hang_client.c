/* Three streams of a daemon of a debug build, and the hang that this program injects while two of them generate and one is idle. Whatever happens in
 * between, their greedy tokens must be those of an undisturbed stream, over one connection. Prints one JSON line.
 *   hang_client SOCKET_DIR WORKER INSTRUCTION AFTER    the worker stops before that instruction, AFTER steps later
 *   hang_client SOCKET_DIR idle                        SCHEDULE stops looking for work, while nobody has any */
#include "ipc/client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ALONE 90u  /* tokens of the undisturbed stream */
#define MORE  30u  /* what it goes on with after the hang */

static mk_err err;

static void die(const char *what)
{
    fprintf(stderr, "hang_client: %s: %s\n", what, err.msg);
    exit(1);
}

typedef struct text {
    mk_client_stream *s;
    uint32_t n, id[4096];
    double last, done; /* when its last token and its last DONE came */
    uint32_t reason;   /* of that DONE */
} text;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static text *begin(mk_client *c)
{
    static const uint32_t prompt[] = {512, 1, 2, 3};
    static text all[4];
    static uint32_t n;
    text *t = &all[n++];
    t->s = mk_client_open(c, &(mk_client_options){.sampling = 1, .own_stop = 1, .context = 4096}, 5000, &err);
    if (!t->s || mk_client_append(t->s, prompt, 4, NULL, 10000, &err)) die("opening a stream");
    return t;
}

static void ask(text *t, uint32_t n)
{
    if (mk_client_generate(t->s, &(mk_client_generation){.max_new = n}, &err)) die("asking");
}

/* The next event; 1: it was DONE. */
static int hear_one(text *t)
{
    mk_client_event ev;
    if (mk_client_next(t->s, &ev, 20000, &err)) die("waiting for a token");
    if (ev.kind == MK_CLIENT_TOKEN) {
        if (ev.position != 4 + t->n) {
            fprintf(stderr, "hang_client: a token for position %u, expected %u\n", ev.position, 4 + t->n);
            exit(1);
        }
        t->id[t->n++] = ev.token.id;
        t->last = 1e-9 * (double)ev.received_ns;
        return 0;
    }
    t->done = 1e-9 * (double)ev.received_ns;
    t->reason = ev.done.reason;
    if (ev.position != 4 + t->n) {
        fprintf(stderr, "hang_client: DONE says %u tokens, %u came\n", ev.position, 4 + t->n);
        exit(1);
    }
    return 1;
}

static void hear(text *t)
{
    while (!hear_one(t)) {}
}

static void same(const text *a, const text *b, const char *what)
{
    uint32_t n = a->n < b->n ? a->n : b->n, i = 0;
    while (i < n && a->id[i] == b->id[i]) i++;
    if (i == n) return;
    fprintf(stderr, "hang_client: %s: token %u is %u, undisturbed it is %u\n", what, i, b->id[i], a->id[i]);
    exit(1);
}

int main(int argc, char **argv)
{
    int idle_hang = argc == 3 && !strcmp(argv[2], "idle");
    if (argc != 5 && !idle_hang) return 2;
    mk_client *c = mk_client_new(argv[1], "hang_client", 5000, &err);
    if (!c) die("connecting");
    mk_wire_inject what = {.what = MK_WIRE_INJECT_IDLE};
    if (!idle_hang)
        what = (mk_wire_inject){MK_WIRE_INJECT_HANG, (uint32_t)atoi(argv[2]), (uint32_t)atoi(argv[3]), (uint32_t)atoi(argv[4])};
    text *idle = begin(c), *a = begin(c), *b = begin(c);
    ask(idle, ALONE);
    hear(idle);
    ask(a, 20);
    hear(a);
    double hang, told = 0;
    uint32_t had_a = a->n, had_b = 0;
    if (idle_hang) {
        hang = now();
        if (mk_client_inject(c, &what, NULL, 5000, &err)) die("injecting");
    } else {
        ask(a, 4000);
        ask(b, 4000);
        while (b->n < 30 && !hear_one(b)) {}
        if (mk_client_inject(c, &what, NULL, 5000, &err)) die("injecting");
        hear(a);
        hear(b);
        if (a->reason != MK_WIRE_ERROR || b->reason != MK_WIRE_ERROR) {
            fprintf(stderr, "hang_client: the machine did not hang: reasons %u and %u\n", a->reason, b->reason);
            return 1;
        }
        had_a = a->n, had_b = b->n;
        hang = a->last > b->last ? a->last : b->last, told = (a->done > b->done ? a->done : b->done) - hang;
    }
    uint32_t at = (a->n > ALONE ? a->n : ALONE) + MORE;
    ask(a, 1);
    hear(a);
    if (idle_hang && a->reason == MK_WIRE_ERROR) { /* asked before it was found: this one failed with the hang */
        ask(a, 1);
        hear(a);
    }
    double served = a->last;
    ask(a, at - a->n);
    if (b->n < at) ask(b, at - b->n);
    hear(a);
    if (b->n < at) hear(b);
    ask(idle, MORE);
    hear(idle);
    text *fresh = begin(c); /* on the relaunched machine from its first token on */
    ask(fresh, at);
    hear(fresh);
    same(fresh, idle, "the idle stream");
    same(fresh, a, "the first generating stream");
    same(fresh, b, "the second generating stream");
    if (a->n != at || b->n < at || idle->n != ALONE + MORE) die("too few tokens");
    printf("{\"tokens_before\": [%u, %u], \"compared\": %u, \"last_token_to_done_s\": %.3f, \"hang_to_next_served_s\": %.3f}\n", had_a, had_b,
           idle->n + a->n + b->n, told, served - hang);
    mk_client_destroy(&c);
    return served - hang > 5;
}
