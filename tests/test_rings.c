/* The rings between host and SCHEDULE, and the rules of megakernel/schedule.h that rest on them. A scheduler without a machine: steps are composed, looked at and
 * finished with made-up tokens. */
#include "megakernel/schedule.h"
#include "megakernel/submit.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdlib.h>

#define SLOTS   3u  /* that streams by chance have */
#define MOST    10u /* that there are */
#define CONTEXT 64u
#define NOWHERE 0xdeadu /* what the log says where nobody may look */

static struct {
    mk_sched s;
    mk_submit submit[MK_SUBMIT_RING];
    mk_event event[MK_EVENT_RING];
    uint32_t read, put, next;
    mk_slot slot[MOST];
    uint32_t token[MOST * CONTEXT];
    mk_sched_slot st[MOST];
    mk_sched_rest rest[MOST];
    uint32_t active[MOST];
} *g;

static int setup(void **state)
{
    (void)state;
    g = calloc(1, sizeof *g);
    g->s = (mk_sched){.submit = g->submit, .event = g->event, .event_read = &g->read, .slot = g->slot, .token = g->token, .max_context = CONTEXT, .n_slots = MOST,
                      .st = g->st, .rest = g->rest, .active = g->active};
    for (uint32_t i = 0; i < MOST * CONTEXT; i++) g->token[i] = NOWHERE;
    return 0;
}
static int teardown(void **state)
{
    (void)state;
    free(g);
    return 0;
}

/* Put and at once forgotten: what the device needs of the slot is in the entry. */
static void put(mk_submit e)
{
    mk_slot *s = &g->slot[e.slot], was = *s;
    mk_submit_complete(&e, g->slot, MOST);
    mk_submit_put(g->submit, &e, ++g->put);
    memset(s, 0xee, sizeof *s);
    s->generation = was.generation;
    s->cancel = was.cancel;
    s->credits = was.credits;
}
static void open_slot(uint32_t slot)
{
    g->slot[slot] = (mk_slot){.generation = 1, .credits = ~0ull, .context = CONTEXT, .state_slot = slot + 10};
    put((mk_submit){.op = MK_SUB_OPEN, .slot = (uint16_t)slot, .generation = 1});
}
static void append(uint32_t slot, const uint32_t *t, uint32_t n, int along)
{
    mk_submit e = {.op = MK_SUB_APPEND, .slot = (uint16_t)slot, .generation = 1, .arg0 = n, .tag = 7};
    if (along) mk_submit_tokens(&e, t);
    put(e);
}
static void generate(uint32_t slot, uint32_t n)
{
    g->slot[slot].n_stop = 0;
    g->slot[slot].sampling = (mk_sampling){.temperature = 0};
    put((mk_submit){.op = MK_SUB_GENERATE, .slot = (uint16_t)slot, .generation = 1, .arg0 = n, .tag = 9});
}
static void compose(void) { mk_sched_compose(&g->s, 0); }

/* The composed step has exactly these tokens. */
static void rows(uint32_t n, const uint32_t *token)
{
    assert_int_equal(g->s.next.nrows, n);
    for (uint32_t i = 0; i < n; i++) assert_int_equal(g->s.next.row[i].token, token[i]);
}
#define ROWS(...) rows(sizeof((uint32_t[]){__VA_ARGS__}) / 4, (uint32_t[]){__VA_ARGS__})

/* The step yields `token` for every row. */
static void finish(uint32_t token)
{
    uint32_t t[MK_MAX_ROWS];
    float p[MK_MAX_ROWS] = {0};
    for (uint32_t i = 0; i < MK_MAX_ROWS; i++) t[i] = token;
    mk_sched_finish(&g->s, &g->s.next, t, p, 0);
    g->s.step++;
}
/* Kind of the next event, 0: there is none. */
static uint32_t event(mk_event *e)
{
    mk_event x;
    if (!mk_event_there(&g->event[g->next % MK_EVENT_RING], g->next + 1)) return 0;
    x = g->event[g->next++ % MK_EVENT_RING];
    if (e) *e = x;
    return x.kind;
}

/* ---- packets -------------------------------------------------------------------------------------------------------- */

static mk_submit_packets packets[MK_SUBMIT_RING];

/* As a warp of the device reads them: a packet a lane (instructions/schedule.cuh, mk_look). */
static int fetch(uint32_t seq, mk_submit *e)
{
    uint32_t word[sizeof *e / 4] = {0};
    for (uint32_t p = 0; p < MK_SUBMIT_PACKETS; p++) {
        const uint32_t *q = packets[(seq - 1) % MK_SUBMIT_RING].packet[p];
        if (q[3] != seq) return 0;
        for (uint32_t k = 0; k < 3; k++) word[1 + 3 * p + k] = q[k];
    }
    memcpy(e, word, sizeof word);
    return 1;
}

static void packed(void **state)
{
    (void)state;
    mk_submit e, f;
    memset(packets, 0, sizeof packets);
    for (uint32_t seq = 1; seq < 3 * MK_SUBMIT_RING; seq++) { /* every word of its own */
        uint32_t word[sizeof e / 4];
        for (uint32_t k = 0; k < sizeof e / 4; k++) word[k] = seq * 100 + k;
        memcpy(&e, word, sizeof e);
        assert_false(fetch(seq, &f));
        mk_submit_pack(packets, &e, seq);
        assert_true(fetch(seq, &f));
        assert_false(fetch(seq + MK_SUBMIT_RING, &f)); /* the same place a lap later */
        assert_memory_equal((uint8_t *)&e + 4, (uint8_t *)&f + 4, sizeof e - 4);
    }
    /* any packet of another lap makes it none */
    mk_submit_pack(packets, &e, 5);
    for (uint32_t p = 0; p < MK_SUBMIT_PACKETS; p++) {
        packets[4].packet[p][3] -= MK_SUBMIT_RING;
        assert_false(fetch(5, &f));
        packets[4].packet[p][3] += MK_SUBMIT_RING;
    }
    assert_true(fetch(5, &f));
}

static void completed(void **state)
{
    (void)state;
    mk_slot slot[2] = {{0}, {.generation = 3, .credits = 77, .context = 40, .state_slot = 6, .pin = 9, .pin_rows = 2, .pin_vocab = 500, .n_stop = 99}};
    slot[1].sampling = (mk_sampling){.temperature = 0.5f, .top_p = 0.9f, .min_p = 0.1f, .top_k = 4, .seed = 1ull << 40};
    for (uint32_t k = 0; k < MK_MAX_STOP; k++) slot[1].stop[k] = 30 + k;
    mk_submit e = {.op = MK_SUB_OPEN, .slot = 1};
    mk_submit_complete(&e, slot, 2);
    assert_true(e.open.credits == 77 && e.open.seed == 1ull << 40 && e.open.context == 40 && e.open.state_slot == 6 && e.open.pin == 9 && e.open.pin_rows == 2 && e.open.pin_vocab == 500);
    e = (mk_submit){.op = MK_SUB_GENERATE, .slot = 1};
    mk_submit_complete(&e, slot, 2);
    assert_int_equal(e.generate.n_stop, MK_MAX_STOP);
    assert_true(e.generate.credits == 77);
    assert_memory_equal(&e.generate.sampling, &slot[1].sampling, sizeof e.generate.sampling);
    assert_memory_equal(e.generate.stop, slot[1].stop, sizeof slot[1].stop);
    e = (mk_submit){.op = MK_SUB_OPEN, .slot = 2}; /* no such slot */
    mk_submit_complete(&e, slot, 2);
    assert_int_equal(e.open.context, 0);
}

/* An event is there when all four packets are, whatever came first. */
static void event_packets(void **state)
{
    (void)state;
    mk_event ring[MK_EVENT_RING] = {0}, e = {.kind = MK_EV_TOKEN, .token = 5, .device_ns = 9, .seq0 = 1, .seq1 = 1, .seq2 = 1, .seq3 = 1};
    for (uint32_t k = 0; k < 16; k++) { /* which of them are there */
        ring[0] = e;
        uint32_t *seq[] = {&ring[0].seq0, &ring[0].seq1, &ring[0].seq2, &ring[0].seq3};
        for (uint32_t i = 0; i < 4; i++)
            if (!(k >> i & 1)) *seq[i] = 1 - MK_EVENT_RING;
        assert_int_equal(mk_event_there(&ring[0], 1), k == 15);
    }
    memset(ring, 0, sizeof ring);
    mk_event_store(&ring[0], &e);
    assert_memory_equal(&ring[0], &e, sizeof e);
}

/* ---- what comes with the entries ------------------------------------------------------------------------------------ */

static void tokens_ride(void **state)
{
    (void)state;
    open_slot(1);
    append(1, (uint32_t[]){1, 2, 3, 4, 5}, 5, 1);
    compose();
    ROWS(1, 2, 3, 4);
    assert_int_equal(g->s.in_log, 0);
    assert_int_equal(g->s.next.row[0].state_read, 11);
    finish(0);
    assert_int_equal(event(NULL), MK_EV_APPENDED);
    generate(1, 3);
    compose();
    ROWS(5); /* the last one was pending */
    finish(50);
    compose();
    ROWS(50);
    finish(51);
    compose();
    finish(52);
    while (event(NULL)) {}
    compose();
    assert_int_equal(g->s.next.nrows, 0);
    append(1, (uint32_t[]){6, 7}, 2, 1); /* behind a token that was generated */
    compose();
    ROWS(52, 6);
    finish(0);
    append(1, (uint32_t[]){8, 9, 10}, 3, 1); /* behind a token that came along */
    compose();
    ROWS(7, 8, 9);
    finish(0);
    append(1, (uint32_t[]){11}, 1, 0); /* in the log */
    g->token[CONTEXT + 13] = 11;
    compose();
    ROWS(10);
    finish(0);
    generate(1, 1);
    compose();
    ROWS(11);
}

/* More tokens than an entry has: the first step needs no log, the others do; the last token never does. */
static void long_append(void **state)
{
    (void)state;
    uint32_t t[20];
    for (uint32_t i = 0; i < 20; i++) t[i] = 100 + i;
    open_slot(0);
    append(0, t, 20, 1);
    generate(0, 1);
    compose();
    ROWS(100, 101, 102, 103, 104, 105, 106, 107);
    finish(0);
    for (uint32_t i = 8; i < 19; i++) g->token[i] = t[i];
    compose();
    assert_int_equal(g->s.in_log, 0xff);
    ROWS(108, 109, 110, 111, 112, 113, 114, 115);
    finish(0);
    compose();
    ROWS(116, 117, 118, 119);
    assert_int_equal(g->s.next.row[3].flags & MK_ROW_SAMPLE, MK_ROW_SAMPLE);
}

/* Several appends at once: the later ones' first tokens are in the log. */
static void appends_queue(void **state)
{
    (void)state;
    open_slot(0);
    append(0, (uint32_t[]){1, 2}, 2, 1);
    append(0, (uint32_t[]){3, 4, 5}, 3, 1);
    append(0, (uint32_t[]){6}, 1, 1);
    g->token[2] = 3, g->token[3] = 4, g->token[4] = 5;
    generate(0, 1);
    compose();
    ROWS(1, 2, 3, 4, 5, 6);
}

/* Scores: targets come from the log. */
static void targets(void **state)
{
    (void)state;
    open_slot(2);
    for (uint32_t i = 0; i < 5; i++) g->token[2 * CONTEXT + i] = 40 + i;
    mk_submit e = {.op = MK_SUB_APPEND, .slot = 2, .generation = 1, .arg0 = 5, .arg1 = MK_APPEND_LOGPROBS};
    mk_submit_tokens(&e, &g->token[2 * CONTEXT]);
    put(e);
    compose();
    ROWS(40, 41, 42, 43);
    for (uint32_t i = 0; i < 4; i++) assert_int_equal(g->s.next.row[i].target, 41 + i);
}

/* A pinned stream's ids are random and never looked up. */
static void pinned(void **state)
{
    (void)state;
    g->slot[0] = (mk_slot){.generation = 1, .credits = ~0ull, .context = CONTEXT, .pin = 30, .pin_rows = 3, .pin_vocab = 1000};
    put((mk_submit){.op = MK_SUB_OPEN, .generation = 1});
    append(0, (uint32_t[]){1}, 1, 0);
    generate(0, 5);
    compose();
    assert_int_equal(g->s.next.nrows, 3);
    assert_int_equal(g->s.in_log, 0);
    for (uint32_t i = 0; i < 3; i++) assert_true(g->s.next.row[i].token < 1000 && g->s.next.row[i].pos == 29 + i);
}

/* ---- who has a row -------------------------------------------------------------------------------------------------- */

/* Opens slot i, which generates `tokens` behind the token 100 + its number. */
static void generates(uint32_t i, uint32_t tokens)
{
    open_slot(i);
    append(i, (uint32_t[]){100 + i}, 1, 1);
    generate(i, tokens);
}
/* Slots 0 to n - 1. */
static void generating(uint32_t n, uint32_t tokens)
{
    for (uint32_t i = 0; i < n; i++) generates(i, tokens);
}
/* Opens slot i with a prompt of n tokens, whatever they are. */
static void prompted(uint32_t i, uint32_t n)
{
    open_slot(i);
    append(i, NULL, n, 0);
}
/* Opens slot i, pinned, which generates `rows` rows a step. */
static void pins(uint32_t i, uint32_t rows)
{
    g->slot[i] = (mk_slot){.generation = 1, .credits = ~0ull, .context = CONTEXT, .pin = 30, .pin_rows = rows, .pin_vocab = 1000};
    put((mk_submit){.op = MK_SUB_OPEN, .slot = (uint16_t)i, .generation = 1});
    append(i, (uint32_t[]){1}, 1, 0);
    generate(i, 40);
}

/* How many rows of the composed step are slot i's. */
static uint32_t rows_of(uint32_t i)
{
    uint32_t n = 0;
    for (uint32_t r = 0; r < g->s.next.nrows; r++) n += g->s.next.row[r].slot == i;
    return n;
}

/* More streams than rows: all have their turns, and who is left out of a step begins the next one. */
static void turns(void **state)
{
    (void)state;
    uint32_t had[10] = {0};
    generating(10, 40);
    compose();
    for (uint32_t step = 0; step < 20; step++, finish(60), compose()) {
        assert_int_equal(g->s.next.nrows, MK_MAX_ROWS);
        for (uint32_t i = 0; i < 10; i++) had[i] += rows_of(i);
    }
    for (uint32_t i = 0; i < 10; i++) assert_int_equal(had[i], 20 * MK_MAX_ROWS / 10);
}

/* A prompt has a row of every step beside as many streams as there are rows, which have the others in turn; when it is through, all of them. */
static void prompt_beside_many(void **state)
{
    (void)state;
    uint32_t had[8] = {0}, steps = 0;
    generating(8, 40);
    prompted(8, 9);
    for (compose(); g->st[8].pos < 8; finish(60), compose(), steps++) {
        assert_int_equal(g->s.next.nrows, MK_MAX_ROWS);
        assert_int_equal(rows_of(8), 1);
        assert_int_equal(g->s.next.row[MK_MAX_ROWS - 1].pos, steps);
        for (uint32_t i = 0; i < 8; i++) had[i] += rows_of(i);
    }
    assert_int_equal(steps, 8);
    for (uint32_t i = 0; i < 8; i++) assert_int_equal(had[i], 7);
    assert_int_equal(rows_of(8), 0);
    assert_int_equal(g->s.next.nrows, MK_MAX_ROWS);
}

/* Fewer of them leave a prompt what they do not need. */
static void prompt_beside_few(void **state)
{
    (void)state;
    generating(3, 40);
    prompted(8, 9);
    compose();
    assert_int_equal(g->s.next.nrows, MK_MAX_ROWS);
    assert_int_equal(rows_of(8), MK_MAX_ROWS - 3);
}

/* A pinned stream's rows are of one step: beside another stream they have every second one. */
static void pinned_beside_another(void **state)
{
    (void)state;
    pins(0, MK_MAX_ROWS);
    generates(1, 20);
    compose();
    for (uint32_t step = 0; step < 6; step++, finish(60), compose()) {
        assert_int_equal(rows_of(0), step % 2 ? 0 : MK_MAX_ROWS);
        assert_int_equal(rows_of(1), step % 2);
    }
}

/* Of two prompts the older has the row, whether its stream generates behind it or not; the places in the list count, not the slots' numbers. */
static void prompts_beside_many(void **state)
{
    (void)state;
    uint32_t prompt[] = {1, 2, 3, 4, 5};
    for (uint32_t i = 10; i-- > 2;) generates(i, 40);
    for (uint32_t i = 2; i-- > 0;) { /* 1 is older than 0 */
        open_slot(i);
        append(i, prompt, 5, 1);
        generate(i, 3);
    }
    const uint32_t begins[] = {9, 2, 3, 4};
    compose();
    for (uint32_t step = 0; step < 4; step++, finish(60), compose()) {
        assert_int_equal(g->s.next.nrows, MK_MAX_ROWS);
        assert_int_equal(rows_of(1), 1);
        assert_int_equal(rows_of(0), 0);
        assert_int_equal(g->s.next.row[0].slot, begins[step]);
    }
}

/* The first one that is left out begins, although an older stream has closed; when it has closed itself and was the last of the list, the list's first one. */
static void who_begins(void **state)
{
    (void)state;
    generating(10, 40);
    compose();
    const uint32_t begins[] = {0, 8, 6, 4, 2, 0, 8};
    for (uint32_t step = 0; step < 7; step++, finish(60), compose()) assert_int_equal(g->s.next.row[0].slot, begins[step]);
    assert_int_equal(g->s.rr, 4); /* that composed the eighth */
    finish(60);
    put((mk_submit){.op = MK_SUB_CLOSE, .slot = 3, .generation = 1});
    compose();
    assert_int_equal(g->s.next.nrows, MK_MAX_ROWS);
    assert_int_equal(g->s.next.row[0].slot, 4);
    finish(60);
    g->s.rr = 8; /* slot 9's place */
    put((mk_submit){.op = MK_SUB_CLOSE, .slot = 9, .generation = 1});
    compose();
    assert_int_equal(g->s.next.nrows, MK_MAX_ROWS);
    assert_int_equal(g->s.next.row[0].slot, 0);
    for (uint32_t i = 0; i < 10; i++) assert_true(rows_of(i) <= 1);
}

/* However much older the stream is that has closed. */
static void oldest_closes(void **state)
{
    (void)state;
    generating(10, 40);
    compose();
    finish(60);
    put((mk_submit){.op = MK_SUB_CLOSE, .slot = 0, .generation = 1});
    compose();
    assert_int_equal(g->s.next.row[0].slot, 8);
}

/* A prompt's row is the prompt's, and a pinned stream that begins the step is the first that generates, although the prompt's stream is older than all of them. */
static void oldest_prompt(void **state)
{
    (void)state;
    prompted(8, 9);
    generating(8, 40);
    compose();
    for (uint32_t step = 0; step < 8; step++, finish(60), compose()) assert_int_equal(rows_of(8), 1);
    for (uint32_t i = 0; i < 9; i++) put((mk_submit){.op = MK_SUB_CLOSE, .slot = (uint16_t)i, .generation = 1});
    prompted(0, 9);
    pins(1, MK_MAX_ROWS);
    g->s.step |= 1;
    compose();
    assert_int_equal(rows_of(1), MK_MAX_ROWS);
}

/* Two have a step each beside a third without credits. */
static void two_of_three(void **state)
{
    (void)state;
    g->s.apart = 1;
    generating(3, 40);
    g->slot[2].credits = 0;
    for (uint32_t step = 0; step < 4; step++, finish(60)) {
        compose();
        assert_true(g->s.next.nrows == 1 && rows_of(step & 1) == 1);
    }
}

/* Room for one row is a generating stream's, in any step, beside a prompt or not; room for none is nobody's. */
static void hardly_any_room(void **state)
{
    (void)state;
    g->s.apart = 1;
    generating(2, 40);
    for (uint32_t step = 0; step < 4; step++) {
        if (step == 2) prompted(2, 12);
        g->read = g->s.event_next;
        compose();
        finish(60);
        for (uint32_t rows = 0; rows < 2; rows++) {
            g->read = g->s.event_next - (MK_EVENT_RING - (rows ? MK_SCHED_EVENTS : MK_SCHED_EVENTS - 1));
            g->s.step = step;
            compose();
            assert_int_equal(g->s.next.nrows, rows);
            assert_int_equal(rows_of(2), 0);
        }
        finish(60);
    }
}

/* Two streams that generate have steps of their own in a model with experts; three have not, nor have two beside a prompt, nor has one beside a stream without credits. */
static void two_in_turn(void **state)
{
    (void)state;
    generating(2, 40);
    compose();
    for (uint32_t step = 0; step < 3; step++, finish(60), compose()) assert_int_equal(g->s.next.nrows, 2);
    g->s.apart = 1;
    finish(60);
    compose();
    const uint32_t begins = g->s.next.row[0].slot;
    for (uint32_t step = 0; step < 6; step++, finish(60), compose()) {
        assert_int_equal(g->s.next.nrows, 1);
        assert_int_equal(g->s.next.row[0].slot, step & 1 ? 1 - begins : begins);
    }
    finish(60);
    g->read = g->s.event_next - (MK_EVENT_RING - MK_SCHED_EVENTS + 1); /* no room for the events of a row */
    compose();
    assert_int_equal(g->s.next.nrows, 0);
    g->read = g->s.event_next;
    g->slot[1].credits = 0;
    for (uint32_t step = 0; step < 3; step++) {
        compose();
        assert_true(g->s.next.nrows == 1 && rows_of(0) == 1);
        finish(60);
    }
    compose();
    g->slot[1].credits = ~0ull;
    generates(2, 3);
    for (uint32_t step = 0; step < 3; step++) {
        finish(60);
        compose();
        assert_true(rows_of(0) == 1 && rows_of(1) == 1 && rows_of(2) == 1);
    }
    prompted(3, 12);
    finish(60);
    compose();
    assert_true(rows_of(0) == 1 && rows_of(1) == 1 && rows_of(3) == MK_MAX_ROWS - 2);
    finish(60);
    compose();
    assert_true(rows_of(0) == 1 && rows_of(1) == 1 && rows_of(3) == 5);
    finish(60);
    compose();
    assert_int_equal(g->s.next.nrows, 1);
}

/* A pinned stream's rows are of one step all the same, and beside another one's, in a model with experts; two of one row are two streams. */
static void pinned_not_apart(void **state)
{
    (void)state;
    g->s.apart = 1;
    pins(0, 2);
    compose();
    for (uint32_t step = 0; step < 3; step++, finish(60), compose()) assert_int_equal(rows_of(0), 2);
    pins(1, 1);
    for (uint32_t step = 0; step < 3; step++) {
        finish(60);
        compose();
        assert_true(rows_of(0) == 2 && rows_of(1) == 1);
    }
    put((mk_submit){.op = MK_SUB_CLOSE, .generation = 1});
    pins(2, 1);
    for (uint32_t step = 0, before = 0; step < 6; step++, before = g->s.next.row[0].slot) {
        finish(60);
        compose();
        assert_true(g->s.next.nrows == 1 && rows_of(before) == 0);
    }
}

/* One that needs all rows has them in every second step, beside a prompt as well. */
static void pinned_beside_a_prompt(void **state)
{
    (void)state;
    pins(0, MK_MAX_ROWS);
    prompted(1, 3 * MK_MAX_ROWS);
    compose();
    for (uint32_t step = 0; step < 6; step++, finish(60), compose()) {
        assert_int_equal(rows_of(0), step & 1 ? MK_MAX_ROWS : 0);
        assert_int_equal(rows_of(1), step & 1 ? 0 : step < 4 ? MK_MAX_ROWS : MK_MAX_ROWS - 1);
    }
    assert_int_equal(rows_of(0), MK_MAX_ROWS);
}

/* Behind a pinned stream that does not fit, others do; it begins the next step. Beside a prompt two of four rows take turns. */
static void pinned_among_others(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        open_slot(i);
        g->slot[i] = (mk_slot){.generation = 2, .credits = ~0ull, .context = CONTEXT, .pin = i == 1 || i == 2 ? 30 : 0, .pin_rows = 4, .pin_vocab = 1000};
        put((mk_submit){.op = MK_SUB_OPEN, .slot = (uint16_t)i, .generation = 2});
        put((mk_submit){.op = MK_SUB_APPEND, .slot = (uint16_t)i, .generation = 2, .arg0 = i == 3 ? 40 : 1});
        if (i == 3) continue;
        g->slot[i].n_stop = 0;
        g->slot[i].sampling = (mk_sampling){.temperature = 0};
        put((mk_submit){.op = MK_SUB_GENERATE, .slot = (uint16_t)i, .generation = 2, .arg0 = 20});
    }
    compose();
    for (uint32_t step = 0; step < 4; step++, finish(60), compose()) {
        assert_int_equal(rows_of(0), 1);
        assert_int_equal(rows_of(1), step % 2 ? 0 : 4);
        assert_int_equal(rows_of(2), step % 2 ? 4 : 0);
        assert_int_equal(rows_of(3), 3);
    }
}

/* Where the event ring has room for fewer rows, a prompt has the last of them; not of a single one. */
static void prompt_with_little_room(void **state)
{
    (void)state;
    generating(8, 40);
    prompted(8, 9);
    for (uint32_t rows = MK_MAX_ROWS; rows > 0; rows--) {
        g->read = g->s.event_next - (MK_EVENT_RING - rows * MK_SCHED_EVENTS - 8 * (g->s.step == 0)); /* some are told at once: appends of one token */
        compose();
        assert_int_equal(g->s.next.nrows, rows);
        assert_int_equal(rows_of(8), rows > 1);
        finish(60);
    }
}

/* A pinned stream that needs more rows than the event ring has room for keeps nobody's turn; when there is room it has its own. */
static void pinned_without_room(void **state)
{
    (void)state;
    enum { STREAMS = 8, ROOM = 5 };
    uint32_t had[STREAMS + 1] = {0};
    pins(0, MK_MAX_ROWS);
    for (uint32_t i = 1; i <= STREAMS; i++) pins(i, 1);
    for (uint32_t step = 0; step < STREAMS; step++) {
        g->read = g->s.event_next - (MK_EVENT_RING - ROOM * MK_SCHED_EVENTS);
        compose();
        for (uint32_t i = 0; i <= STREAMS; i++) had[i] += rows_of(i);
        finish(60);
    }
    for (uint32_t i = 1; i <= STREAMS; i++) assert_in_range(had[i], ROOM - 1, ROOM); /* the first step has a row less */
    assert_int_equal(had[0], 0);
    for (uint32_t step = 0; step < 3; step++, finish(60)) {
        g->read = g->s.event_next;
        compose();
        had[0] += rows_of(0);
    }
    assert_true(had[0] >= MK_MAX_ROWS);
}

/* ---- words that the host changes at any time ------------------------------------------------------------------------ */

/* After a cancel the stream ends at its pending token; what had come along is forgotten, for other tokens stand there now. */
static void cancelled_append(void **state)
{
    (void)state;
    uint32_t t[12];
    mk_event e;
    for (uint32_t i = 0; i < 12; i++) t[i] = 100 + i;
    open_slot(0);
    append(0, t, 12, 1);
    compose();
    finish(0);
    g->slot[0].cancel = 1;
    for (uint32_t i = 0; i < 12; i++) g->token[i] = t[i]; /* the log has them all the time */
    compose();
    assert_int_equal(g->s.next.nrows, 0);
    assert_int_equal(event(&e), MK_EV_APPENDED);
    assert_true(e.reason == MK_DONE_CANCELLED && e.position == 9 && e.tag == 7);
    g->slot[0].cancel = 0;
    append(0, (uint32_t[]){200, 201, 202}, 3, 0);
    g->token[9] = 200, g->token[10] = 201, g->token[11] = 202;
    generate(0, 1);
    compose();
    ROWS(108, 200, 201, 202);
}

/* The same, and the stream goes on to where the forgotten last token stood. */
static void cancelled_then_generated(void **state)
{
    (void)state;
    uint32_t t[12];
    for (uint32_t i = 0; i < 12; i++) t[i] = 100 + i;
    open_slot(0);
    append(0, t, 12, 1);
    compose();
    finish(0);
    g->slot[0].cancel = 1;
    compose();
    g->slot[0].cancel = 0;
    for (uint32_t i = 0; i < 9; i++) g->token[i] = t[i];
    generate(0, 3);
    compose();
    ROWS(108);
    for (uint32_t i = 0; i < 3; i++, compose()) finish(60 + i);
    append(0, (uint32_t[]){7, 8}, 2, 1); /* behind position 11, where 62 is now */
    compose();
    ROWS(62, 7);
}

/* A word that an entry is newer than does not count: the courier's look may have brought both. */
static void entry_clears_cancel(void **state)
{
    (void)state;
    open_slot(0);
    append(0, (uint32_t[]){1, 2}, 2, 1);
    compose();
    finish(0);
    while (event(NULL)) {}
    g->st[0].cancel = 1; /* as of before */
    generate(0, 4);
    mk_sched_look(&g->s);
    assert_true(mk_sched_take(&g->s, 0, 0));
    assert_int_equal(g->st[0].cancel, 0);
    g->st[0].cancel = 1;
    append(0, (uint32_t[]){1}, 1, 1); /* nobody appends now; the rule is the same */
    mk_sched_look(&g->s);
    assert_true(mk_sched_take(&g->s, 0, 0));
    assert_int_equal(g->st[0].cancel, 0);
    g->st[0].cancel = 1;
    open_slot(0);
    mk_sched_look(&g->s);
    assert_true(mk_sched_take(&g->s, 0, 0));
    assert_int_equal(g->st[0].cancel, 0);
    append(0, (uint32_t[]){1, 2}, 2, 1);
    generate(0, 4);
    compose();
    while (event(NULL)) {}
    ROWS(1, 2);
    finish(60);
    assert_int_equal(event(NULL), MK_EV_APPENDED);
    assert_int_equal(event(NULL), MK_EV_TOKEN);
    g->slot[0].cancel = 1; /* and one that is newer does */
    compose();
    assert_int_equal(event(NULL), MK_EV_DONE);
    assert_int_equal(g->s.next.nrows, 0);
}

static void credits(void **state)
{
    (void)state;
    open_slot(0);
    append(0, (uint32_t[]){1}, 1, 1);
    g->slot[0].credits = 1;
    generate(0, 4);
    compose();
    ROWS(1);
    finish(60);
    compose();
    assert_int_equal(g->s.next.nrows, 0);
    g->slot[0].credits = 2;
    compose();
    ROWS(60);
}

/* Nothing is published that the host has no room for. */
static void full_event_ring(void **state)
{
    (void)state;
    open_slot(0);
    append(0, (uint32_t[]){1}, 1, 1);
    generate(0, 2 * MK_EVENT_RING);
    g->slot[0].context = 0;
    g->st[0].context = 1u << 30;
    uint32_t steps = 0;
    for (compose(); g->s.next.nrows; compose(), steps++) {
        g->st[0].context = 1u << 30; /* the stream's budget is not what is tried */
        finish(5);
    }
    assert_true(g->s.stalled && steps > MK_EVENT_RING - 16 && g->s.event_next <= MK_EVENT_RING);
    while (event(NULL)) {}
    g->read = g->next;
    compose();
    ROWS(5);
}

/* ---- the short way -------------------------------------------------------------------------------------------------- */

static uint32_t rnd(uint32_t n) { return (uint32_t)rand() % n; }

/* What a host may say of slot i, likely and unlikely. */
static void put_any(uint32_t i)
{
    mk_submit e = {.slot = (uint16_t)i, .generation = rnd(12) ? 1 : 2, .tag = rnd(1000)};
    mk_slot *s = &g->slot[i];
    const uint64_t credits = s->credits;
    uint32_t t[20];
    *s = (mk_slot){.generation = 1, .credits = rnd(4) ? ~0ull : rnd(6), .context = rnd(3) ? CONTEXT : 1 + rnd(12), .state_slot = i + 10, .n_stop = rnd(3),
                   .sampling = {.temperature = rnd(2) ? 0.7f : 0, .seed = rnd(100)}, .stop = {rnd(100), rnd(100)}};
    if (!rnd(6)) s->pin = 1 + rnd(9), s->pin_rows = 1 + rnd(3), s->pin_vocab = 100;
    const uint32_t what = g->st[i].open ? rnd(16) : 0;
    if (what == 0) {
        e.op = MK_SUB_OPEN;
        e.generation = 1;
    } else if (what < 8) {
        e.op = MK_SUB_APPEND;
        e.arg0 = rnd(13);
        e.arg1 = rnd(6) ? 0 : MK_APPEND_LOGPROBS;
        for (uint32_t k = 0; k < e.arg0; k++) t[k] = 1000 + rnd(1000);
        if (rnd(6)) mk_submit_tokens(&e, t);
    } else if (what < 14) {
        e.op = MK_SUB_GENERATE;
        e.arg0 = rnd(5);
    } else if (what == 14) {
        e.op = MK_SUB_CLOSE;
    } else {
        e.op = MK_SUB_TRACE;
        e.arg0 = rnd(4);
        e.arg1 = 1 + rnd(9);
    }
    if (e.op != MK_SUB_OPEN && e.op != MK_SUB_GENERATE) s->credits = credits; /* a look that finds an entry takes nothing else: new ones are seen later */
    mk_submit_complete(&e, g->slot, MOST);
    mk_submit_put(g->submit, &e, ++g->put);
}

/* What the rules know of everything. */
typedef struct known {
    mk_sched s;
    mk_sched_slot st[MOST];
    mk_sched_rest rest[MOST];
    uint32_t active[MOST];
} known;
#define COPY(to, from) (memcpy(&(to)->s, &(from)->s, sizeof (to)->s), memcpy((to)->st, (from)->st, sizeof (to)->st), memcpy((to)->rest, (from)->rest, sizeof (to)->rest), memcpy((to)->active, (from)->active, sizeof (to)->active))

/* The step behind one of one row, where it is sure but for its token: as it is told before the token is known, and as it follows, with all that is known and told afterwards, it is what finishing
 * and composing give. */
static void follows(void **state)
{
    (void)state;
    static known was, is;
    static mk_event told[4];
    uint32_t sure = 0, others = 0, pinned_ones = 0, traced = 0, over = 0, not_sure = 0;
    srand(6);
    compose();
    for (uint32_t round = 0; round < 60000; round++) {
        if (rnd(3)) g->read = g->s.event_next;
        for (uint32_t i = 0; i < SLOTS; i++) {
            g->slot[i].credits = rnd(8) ? ~0ull : 0;
            g->slot[i].cancel = !rnd(30);
        }
        const mk_row row = g->s.next.row[0];
        const uint32_t one = g->s.next.nrows == 1 && row.flags & MK_ROW_SAMPLE, token = rnd(100);
        if (!g->s.next.nrows || !rnd(4)) put_any(rnd(SLOTS));
        mk_sched_look(&g->s);
        mk_sched_look_words(&g->s);
        g->s.rr = rnd(SLOTS); /* neither way looks at it, nor at this */
        g->s.apart = rnd(2);
        uint32_t follow = one;
        for (uint32_t k = 0; k <= g->s.n_active; k++) follow &= mk_sched_sure(&g->s, g->s.submitted, k);
        const uint32_t *stop = g->rest[row.slot].stop;
        for (uint32_t k = 0; follow && k < g->st[row.slot].n_stop; k++) follow &= stop[k] != token;
        if (!follow) {
            not_sure += one;
            if (g->s.next.nrows) finish(token);
            compose();
            continue;
        }
        const uint32_t first = g->s.event_next, trace = g->s.trace_steps;
        mk_step early = g->s.next;
        mk_sched_next_step(&g->s, g->s.step + 1, 0, &early);
        if (!g->st[row.slot].pin) early.row[0].token = token;
        COPY(&was, g);
        mk_sched_follow(&g->s, token, 0, 0);
        COPY(&is, g);
        for (uint32_t k = 0; k < 4; k++) told[k] = g->event[(first + k) % MK_EVENT_RING];
        COPY(g, &was);
        finish(token);
        compose();
        assert_memory_equal(&is.s, &g->s, sizeof is.s);
        assert_memory_equal(is.st, g->st, sizeof is.st);
        assert_memory_equal(is.rest, g->rest, sizeof is.rest);
        assert_memory_equal(&early, &g->s.next, offsetof(mk_step, row[1]));
        for (uint32_t k = 0; k < g->s.event_next - first; k++) assert_memory_equal(&told[k], &g->event[(first + k) % MK_EVENT_RING], sizeof *told);
        sure++;
        others += g->s.n_active > 1;
        pinned_ones += g->st[row.slot].pin != 0;
        traced += g->s.next.trace != 0;
        over += trace != 0 && !g->s.trace_steps;
    }
    assert_true(sure > 1000 && others > 100 && pinned_ones > 100 && traced > 100 && over > 10 && not_sure > 1000);
}

/* An entry that an idle machine finds: what the device makes of it in few instructions is what composing makes of it, step and all that is known afterwards. */
static void short_way(void **state)
{
    (void)state;
    static mk_sampling sampling[MOST], told[MOST];
    known was, is;
    uint32_t easy[2] = {0, 0}, many = 0, first = 0, traced = 0;
    memset(&was, 0, sizeof was);
    memset(&is, 0, sizeof is);
    g->s.sampling = sampling;
    srand(5);
    compose();
    for (uint32_t round = 0; round < 40000; round++) {
        if (rnd(3)) g->read = g->s.event_next;
        if (!mk_sched_idle(&g->s)) {
            for (uint32_t i = 0; i < SLOTS; i++) g->slot[i].credits = rnd(2) ? ~0ull : 0;
            if (g->s.next.nrows) finish(rnd(100));
            compose();
            continue;
        }
        g->s.rr = rnd(SLOTS);
        g->s.apart = rnd(2);
        put_any(rnd(SLOTS));
        mk_sched_look(&g->s);
        const mk_submit *e = &g->submit[(g->put - 1) % MK_SUBMIT_RING];
        mk_row row[MK_MAX_ROWS];
        uint32_t rows = 0;
        for (uint32_t k = 0; k < MK_MAX_ROWS; k++) rows = mk_sched_short(g->st, MOST, e, k, &row[k]);
        if (!rows) {
            compose();
            continue;
        }
        COPY(&was, g);
        mk_sched_short_step(&g->s, e, rows);
        memcpy(g->s.next.row, row, rows * sizeof *row);
        memcpy(told, sampling, sizeof told);
        assert_true(mk_sched_take(&g->s, 1, 0));
        COPY(&is, g);
        COPY(g, &was);
        memset(&sampling[e->slot], 0, sizeof *sampling);
        compose();
        if (e->op == MK_SUB_GENERATE && e->generate.sampling.temperature > 0) assert_memory_equal(&told[e->slot], &sampling[e->slot], sizeof *told);
        assert_int_equal(g->s.next.nrows, rows);
        assert_memory_equal(&is.s, &g->s, sizeof is.s);
        assert_memory_equal(is.st, g->st, sizeof is.st);
        assert_memory_equal(is.rest, g->rest, sizeof is.rest);
        easy[e->op == MK_SUB_GENERATE]++;
        many += rows == MK_MAX_ROWS;
        first += (row[0].flags & MK_ROW_FIRST) != 0;
        traced += g->s.next.trace != 0;
    }
    assert_true(easy[0] > 1000 && easy[1] > 500 && many > 100 && first > 100 && traced > 100);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {T(packed), T(completed), T(event_packets), T(tokens_ride), T(long_append), T(appends_queue), T(targets), T(pinned), T(turns), T(prompt_beside_many),
                                       T(prompt_beside_few), T(pinned_beside_another), T(prompts_beside_many), T(who_begins), T(oldest_closes), T(oldest_prompt), T(two_of_three), T(hardly_any_room), T(two_in_turn), T(pinned_not_apart), T(pinned_beside_a_prompt), T(pinned_among_others), T(prompt_with_little_room), T(pinned_without_room),
                                       T(cancelled_append), T(cancelled_then_generated), T(entry_clears_cancel), T(credits), T(full_event_ring), T(follows), T(short_way)};
    return cmocka_run_group_tests_name("rings", tests, NULL, NULL);
}
