/* Three streams of a daemon whose kernel is going to hang at step 300 (tests/gpu/test_daemon_gpu.sh): one that is idle then, and two that generate.
 * Whatever happens in between, their greedy tokens must be those of an undisturbed stream, over one connection. Prints one JSON line.
 *   hang_client SOCKET_DIR */
#include "ipc/client.h"

#include <stdio.h>
#include <stdlib.h>

#define ALONE 200u /* tokens of the undisturbed stream: with its prompt about as many steps */
#define MORE  60u  /* what it goes on with after the hang */

static mk_err err;

static void die(const char *what)
{
    fprintf(stderr, "hang_client: %s: %s\n", what, err.msg);
    exit(1);
}

typedef struct text {
    mk_client_stream *s;
    uint32_t n, id[1024];
    double last, done; /* when its last token and its last DONE came */
    uint32_t reason;   /* of that DONE */
} text;

static text *begin(mk_client *c)
{
    static const uint32_t prompt[] = {512, 1, 2, 3};
    text *t = calloc(1, sizeof *t);
    t->s = mk_client_open(c, &(mk_client_options){.sampling = 1, .own_stop = 1, .context = 1024}, 5000, &err);
    if (!t->s || mk_client_append(t->s, prompt, 4, NULL, 10000, &err)) die("opening a stream");
    return t;
}

static void ask(text *t, uint32_t n)
{
    if (mk_client_generate(t->s, &(mk_client_generation){.max_new = n}, &err)) die("asking");
}

/* To its DONE. */
static void hear(text *t)
{
    mk_client_event ev;
    for (;;) {
        if (mk_client_next(t->s, &ev, 20000, &err)) die("waiting for a token");
        if (ev.kind == MK_CLIENT_DONE) break;
        if (ev.position != 4 + t->n) {
            fprintf(stderr, "hang_client: a token for position %u, expected %u\n", ev.position, 4 + t->n);
            exit(1);
        }
        t->id[t->n++] = ev.token.id;
        t->last = 1e-9 * (double)ev.received_ns;
    }
    t->done = 1e-9 * (double)ev.received_ns;
    t->reason = ev.done.reason;
    if (ev.position != 4 + t->n) {
        fprintf(stderr, "hang_client: DONE says %u tokens, %u came\n", ev.position, 4 + t->n);
        exit(1);
    }
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
    mk_client *c = argc == 2 ? mk_client_new(argv[1], "hang_client", 5000, &err) : NULL;
    if (!c) die("connecting");
    text *idle = begin(c), *a = begin(c), *b = begin(c);
    ask(idle, ALONE);
    hear(idle);
    ask(a, 20);
    hear(a);
    ask(a, 400);
    ask(b, 400);
    hear(a);
    hear(b);
    if (a->reason != MK_WIRE_ERROR || b->reason != MK_WIRE_ERROR) {
        fprintf(stderr, "hang_client: the kernel did not hang: reasons %u and %u\n", a->reason, b->reason);
        return 1;
    }
    uint32_t had_a = a->n, had_b = b->n;
    double hang = a->last > b->last ? a->last : b->last, told = a->done > b->done ? a->done : b->done;
    ask(a, 1);
    hear(a);
    double served = a->last;
    ask(a, ALONE + MORE - a->n);
    ask(b, ALONE + MORE - b->n);
    hear(a);
    hear(b);
    ask(idle, MORE);
    hear(idle);
    text *fresh = begin(c); /* on the relaunched kernel from its first token on */
    ask(fresh, ALONE + MORE);
    hear(fresh);
    same(fresh, idle, "the idle stream");
    same(fresh, a, "the first generating stream");
    same(fresh, b, "the second generating stream");
    if (a->n != ALONE + MORE || b->n != ALONE + MORE || idle->n != ALONE + MORE) die("too few tokens");
    printf("{\"tokens_before\": [%u, %u], \"compared\": %u, \"last_token_to_done_s\": %.3f, \"last_token_to_next_served_s\": %.3f}\n", had_a, had_b,
           3 * (ALONE + MORE), told - hang, served - hang);
    mk_client_destroy(&c);
    return served - hang > 5;
}
