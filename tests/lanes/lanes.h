/* A worker's compute threads on the CPU, for device code that is C++ but for megakernel/ptx.cuh: a lane is a coroutine; who waits, for its warp, for all warps or for memory, gives way to the others, in an
 * order that is drawn. A warp that is not together where all of its lanes must be, lanes that never meet and stores out of bounds are errors; who would race for shared memory
 * on a GPU meets other values here in some order, but not in all. */
#ifndef MK_LANES_H
#define MK_LANES_H

#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#ifndef LANES
#define LANES 256u /* more, if a test says so: of warps that are beside the compute threads */
#endif
#define LANES_COMPUTE 256u
#define LANES_ROUNDS  20000u /* of all lanes, at most */

/* Where many threads meet. */
typedef struct lanes_place {
    uint32_t waiting, round;
} lanes_place;

typedef struct lanes_warp {
    const char *what; /* they meet for, and where */
    int line;
    uint32_t n, round, in[32], out[32];
} lanes_warp;
static struct {
    ucontext_t lane[LANES]; /* to begin with; from then on jumps, which ask the system for nothing */
    jmp_buf back, at[LANES];
    char *stack[LANES];
    bool begun[LANES], done[LANES];
    lanes_warp warp[LANES / 32];
    const uint32_t *until[LANES]; /* NULL, or the round that a lane waits to see the end of: */
    uint32_t since[LANES];        /* this one */
    uint32_t me;
    lanes_place block, beside; /* of the compute threads, of the others */
    uint64_t moved;
    char error[200]; /* the first; "": none */
    void (*body)(void);
} lanes;
static uint64_t lanes_state = 1; /* of what is drawn */

static inline uint32_t lanes_random(uint32_t n)
{
    lanes_state ^= lanes_state << 13, lanes_state ^= lanes_state >> 7, lanes_state ^= lanes_state << 17;
    return (uint32_t)(lanes_state >> 16) % n;
}
static inline void lanes_wrong(const char *what, uint32_t a, uint32_t b)
{
    if (!*lanes.error) snprintf(lanes.error, sizeof lanes.error, "thread %u: %s (%u, %u)", lanes.me, what, a, b);
}
static inline void lanes_yield(void)
{
    if (!_setjmp(lanes.at[lanes.me])) _longjmp(lanes.back, 1);
}
/* Until it yields. */
static __attribute__((noinline)) void lanes_resume(void)
{
    if (_setjmp(lanes.back)) return;
    if (lanes.begun[lanes.me]) _longjmp(lanes.at[lanes.me], 1);
    lanes.begun[lanes.me] = true;
    setcontext(&lanes.lane[lanes.me]);
}
static inline void lanes_wait(const uint32_t *round)
{
    lanes.until[lanes.me] = round, lanes.since[lanes.me] = *round;
    lanes_yield();
}
/* All lanes of the warp meet, each with a value; returns what all have brought. It may be read until the next meeting. */
static inline const uint32_t *lanes_meet(const char *what, int line, uint32_t value)
{
    lanes_warp *w = &lanes.warp[lanes.me / 32];
    if (!w->n) w->what = what, w->line = line;
    if (w->line != line || strcmp(w->what, what)) lanes_wrong("a warp meets in two places", (uint32_t)w->line, (uint32_t)line);
    w->in[lanes.me % 32] = value;
    lanes.moved++;
    if (++w->n == 32) {
        memcpy(w->out, w->in, sizeof w->out);
        w->n = 0, w->round++;
        return w->out;
    }
    lanes_wait(&w->round);
    return w->out;
}
/* All `n` threads whose place it is. */
static inline void lanes_barrier(lanes_place *p, uint32_t n)
{
    lanes.moved++;
    if (++p->waiting == n)
        p->waiting = 0, p->round++;
    else
        lanes_wait(&p->round);
}
static void lanes_begin(void)
{
    lanes.body();
    lanes.done[lanes.me] = true;
    for (;;) lanes_yield();
}
/* Runs body in all lanes, to its end or to an error. */
static inline bool lanes_run(void (*body)(void))
{
    lanes.body = body;
    lanes.block.waiting = lanes.beside.waiting = 0;
    uint32_t turns = LANES_COMPUTE; /* a power of two, so that an odd step comes by all */
    while (turns < LANES) turns *= 2;
    *lanes.error = 0;
    for (uint32_t i = 0; i < LANES; i++) {
        lanes.begun[i] = lanes.done[i] = false, lanes.until[i] = NULL;
        getcontext(&lanes.lane[i]);
        if (!lanes.stack[i]) lanes.stack[i] = (char *)malloc(65536);
        lanes.lane[i].uc_stack.ss_sp = lanes.stack[i], lanes.lane[i].uc_stack.ss_size = 65536, lanes.lane[i].uc_link = NULL;
        makecontext(&lanes.lane[i], lanes_begin, 0);
        lanes.warp[i / 32].n = 0;
    }
    uint32_t idle = 0, rounds = 0;
    for (uint64_t left = LANES; left && !*lanes.error;) {
        const uint64_t moved = lanes.moved;
        const uint32_t first = lanes_random(turns), step = 1 + 2 * lanes_random(turns / 2);
        left = 0;
        for (uint32_t i = 0; i < turns; i++) {
            const uint32_t me = (first + i * step) % turns;
            if (me >= LANES || lanes.done[me]) continue;
            left++;
            if (lanes.until[me] && *lanes.until[me] == lanes.since[me]) continue; /* there is nothing to go on with */
            lanes.until[me] = NULL, lanes.me = me;
            lanes_resume();
        }
        idle = lanes.moved == moved ? idle + 1 : 0;
        if (++rounds > LANES_ROUNDS) lanes_wrong("it goes on for ever", (uint32_t)left, lanes.block.waiting);
        if (left && idle > 10000) lanes_wrong("nobody goes on", (uint32_t)left, lanes.block.waiting);
    }
    return !*lanes.error;
}

#endif
