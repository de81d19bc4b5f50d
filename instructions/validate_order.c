/* Progress and reuse of buffers.
 *
 * Progress: a step is played once: every worker takes its queue in order, an instruction runs when all publications it waits for are there.
 * Publications are monotone within a step, so if one order of events reaches the end, every order does.
 *
 * Reuse: a PACKET vector has two halves, so publication e + 2 overwrites e; a BULK vector has one buffer and its counter is compared
 * by equality, so e + 1 ends e. Sums (MK_VEC_SUMS) have two halves, but who reads a publication clears the half of the one before, so
 * that e + 1 ends e all the same; and a machine may look at the words of a publication alone, which e - 2 has left full until those who
 * read e - 1 have cleared them: whoever reads e must know that these are through before it looks, by what earlier instructions have
 * waited for, since its own other waits may not be over then. The overwriting instruction must happen after every instruction that waits
 * for e, and after those that published it. Happens-before is the transitive closure of: program order of a worker; a publication and
 * those who wait for it; SCHEDULE and every worker's first instruction of the next step (a machine may begin it while SCHEDULE, which stands
 * right behind SAMPLE and touches nobody else's memory, tells of this one). It is computed with vector clocks: for every
 * instruction and every worker, how many instructions of that worker are known to be complete, counted from the first step on. The graph
 * repeats every step, and e reaches back at most two steps (a vector published once a step), so checking the third step proves all.
 * What an instruction knows after a wait is of the slices that it looks at (mk_looks_at); a wait's whole range counts as read. */
#include "instructions/validate_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STEPS 3u

typedef struct mk_pub_clock {
    uint32_t *joined; /* [workers] of all members */
    uint32_t *each;   /* [members][workers]; only where somebody waits for a part */
    uint32_t reads_left;
} mk_pub_clock;

typedef struct mk_order {
    mk_check *c;
    uint32_t *order; /* [n_insn] one order in which a step can run */
    uint32_t n;
    uint32_t *blocked_on; /* [workers] instruction that a worker waits for at its pc */
    uint32_t *pc;
    uint32_t *depth; /* [n_insn] cross-worker publications on the longest chain before the end of it */
} mk_order;

static uint32_t queue_length(const mk_check *c, uint32_t w)
{
    return c->p->queue[w + 1] - c->p->queue[w];
}

/* Wait k of x is for a vector that is waited for as a whole. */
static int whole_only(const mk_check *c, uint32_t x, uint32_t k)
{
    const mk_vec *v = mk_wait_vec(c, &c->p->insn[x], k);
    return v->scope == MK_BULK || v->flags & MK_VEC_DYNAMIC;
}

/* Members of wait k of x: instructions first[0..n). 0 for LOCAL. */
static uint32_t members_of_wait(const mk_check *c, uint32_t x, uint32_t k, const uint32_t **first, uint32_t *pub_id)
{
    const mk_wait *wt = &c->p->insn[x].wait[k];
    if (c->p->vec[wt->vec].scope == MK_LOCAL) return 0;
    *pub_id = mk_pub_id(c, wt->vec, wt->pub);
    int whole = whole_only(c, x, k);
    *first = c->member + c->member_off[*pub_id] + (whole ? 0 : wt->slice0);
    return whole ? mk_members(c, *pub_id) : wt->nslice;
}

/* ---- progress ------------------------------------------------------------------------------------------------------- */

static int report_cycle(mk_order *o)
{
    mk_check *c = o->c;
    uint32_t W = c->i->workers, w = 0;
    while (o->pc[w] == c->p->queue[w + 1]) w++;
    /* after W hops we stand in the cycle */
    for (uint32_t i = 0; i < W; i++) w = c->owner[o->blocked_on[w]];
    uint32_t first = w, hops = 0;
    char text[480];
    size_t at = 0;
    do {
        uint32_t x = o->pc[w], y = o->blocked_on[w], next = c->owner[y];
        const char *name = "?";
        uint32_t pub = 0;
        for (uint32_t k = 0; k < c->p->insn[x].nwait; k++) {
            const uint32_t *m;
            uint32_t id, n = members_of_wait(c, x, k, &m, &id);
            for (uint32_t i = 0; i < n; i++)
                if (m[i] == y) {
                    name = c->p->vec[c->p->insn[x].wait[k].vec].name;
                    pub = c->p->insn[x].wait[k].pub;
                }
        }
        if (hops == 3 && next != first) {
            at += (size_t)snprintf(text + at, sizeof text - at, ", ... and so on back to worker %u", first);
            break;
        }
        int len = hops ? snprintf(text + at, sizeof text - at, ", which waits for %s pub %u", name, pub)
                       : snprintf(text + at, sizeof text - at, "%s waits for %s pub %u", mk_insn_text(c, x).s, name, pub);
        at += (size_t)len;
        at += (size_t)snprintf(text + at, sizeof text - at, ", which %s publishes after #%u", mk_insn_text(c, y).s,
                               o->pc[next] - c->p->queue[next]);
        w = next;
        hops++;
    } while (w != first && at + 160 < sizeof text);
    return mk_fail(c->err, MK_E_PROGRAM, "cycle: %s", text);
}

static int check_progress(mk_order *o)
{
    mk_check *c = o->c;
    uint32_t W = c->i->workers, N = c->i->n_insn, head = 0, count = W;
    int rc = MK_OK;
    uint8_t *done = calloc(N, 1);
    uint32_t *waiter = malloc(N * sizeof *waiter); /* first worker that waits for an instruction */
    uint32_t *next = malloc(W * sizeof *next), *ready = malloc(W * sizeof *ready);
    uint32_t *wait_k = calloc(W, sizeof *wait_k), *wait_m = calloc(W, sizeof *wait_m); /* how far the scan of its waits has come */
    if (!done || !waiter || !next || !ready || !wait_k || !wait_m) {
        rc = mk_fail(c->err, MK_E_SYSTEM, "validator: out of memory");
        goto out;
    }
    memset(waiter, 0xff, N * sizeof *waiter);
    for (uint32_t w = 0; w < W; w++) {
        ready[w] = w;
        o->pc[w] = c->p->queue[w];
    }
    for (; count; head = (head + 1) % W, count--) {
        uint32_t w = ready[head];
        int blocked = 0;
        while (o->pc[w] < c->p->queue[w + 1]) {
            uint32_t x = o->pc[w], nwait = c->p->insn[x].nwait;
            for (; wait_k[w] < nwait; wait_k[w]++, wait_m[w] = 0) {
                const uint32_t *m = NULL;
                uint32_t id, n = members_of_wait(c, x, wait_k[w], &m, &id);
                while (wait_m[w] < n && done[m[wait_m[w]]]) wait_m[w]++;
                if (wait_m[w] < n) {
                    uint32_t y = m[wait_m[w]];
                    o->blocked_on[w] = y;
                    next[w] = waiter[y];
                    waiter[y] = w;
                    blocked = 1;
                    break;
                }
            }
            if (blocked) break;
            wait_k[w] = wait_m[w] = 0;
            done[x] = 1;
            o->order[o->n++] = x;
            o->pc[w]++;
            for (uint32_t v = waiter[x]; v != MK_NOBODY; v = next[v]) ready[(head + count++) % W] = v;
        }
    }
    if (o->n < N) rc = report_cycle(o);
out:
    free(done);
    free(waiter);
    free(next);
    free(ready);
    free(wait_k);
    free(wait_m);
    return rc;
}

static void count_exchanges(mk_order *o)
{
    const mk_check *c = o->c;
    for (uint32_t i = 0; i < o->n; i++) {
        uint32_t x = o->order[i], w = c->owner[x], d = x > c->p->queue[w] ? o->depth[x - 1] : 0;
        for (uint32_t k = 0; k < c->p->insn[x].nwait; k++) {
            const uint32_t *m = NULL;
            uint32_t id, n = members_of_wait(c, x, k, &m, &id);
            for (uint32_t j = 0; j < n; j++) {
                uint32_t e = o->depth[m[j]] + (c->owner[m[j]] != w);
                if (e > d) d = e;
            }
        }
        o->depth[x] = d;
        if (d > c->out->exchanges) c->out->exchanges = d;
    }
}

/* ---- reuse ---------------------------------------------------------------------------------------------------------- */

static void join(uint32_t *restrict a, const uint32_t *restrict b, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
}

/* Who reads publication `id` of step `step`, as far as it concerns slice `slice` (MK_NOBODY: all), and is not known to be through. */
static uint32_t still_reads(const mk_order *o, uint32_t id, uint32_t step, uint32_t slice, const uint32_t *clock)
{
    const mk_check *c = o->c;
    for (uint32_t r = c->read_off[id]; r < c->read_off[id + 1]; r++) {
        const mk_read_of *rd = &c->read[r];
        if (slice != MK_NOBODY && (slice < rd->slice0 || slice - rd->slice0 >= rd->nslice)) continue;
        uint32_t w = c->owner[rd->insn];
        if (clock[w] < step * queue_length(c, w) + (rd->insn - c->p->queue[w]) + 1) return rd->insn;
    }
    return MK_NOBODY;
}

/* x is about to look at publication `pub` of sums in the last step. */
static int check_looks(mk_order *o, uint32_t x, uint32_t vec, uint32_t pub, const uint32_t *clock)
{
    mk_check *c = o->c;
    const mk_vec *v = &c->p->vec[vec];
    uint32_t before = (STEPS - 1) * v->pubs + pub - 1, culprit = still_reads(o, mk_pub_id(c, vec, before % v->pubs), before / v->pubs, MK_NOBODY, clock);
    if (culprit == MK_NOBODY) return MK_OK;
    return mk_refuse(c, x, "looks at %s pub %u, but nothing it has waited for before says that %s is through, which clears what was there before", v->name, pub,
                     mk_insn_text(c, culprit).s);
}

/* x publishes slice `slice` of (vec, pub) in the last step and knows `clock`: is everybody through with what it overwrites? */
static int check_reuse(mk_order *o, uint32_t x, uint32_t vec, uint32_t pub, uint32_t slice, const uint32_t *clock)
{
    mk_check *c = o->c;
    const mk_vec *v = &c->p->vec[vec];
    uint32_t back = v->scope == MK_PACKET ? 2 : 1, before = (STEPS - 1) * v->pubs + pub - back;
    uint32_t step = before / v->pubs, old = before % v->pubs, id = mk_pub_id(c, vec, old), n = mk_members(c, id);
    int sliced = v->scope == MK_PACKET && !(v->flags & MK_VEC_DYNAMIC);
    uint32_t culprit = still_reads(o, id, step, sliced ? slice : MK_NOBODY, clock);
    const char *does = "reads";
    const uint32_t *m = c->member + c->member_off[id];
    for (uint32_t k = sliced ? slice : 0; k < (sliced ? slice + 1 : n) && culprit == MK_NOBODY; k++) {
        uint32_t w = c->owner[m[k]];
        if (clock[w] >= step * queue_length(c, w) + (m[k] - c->p->queue[w]) + 1) continue;
        culprit = m[k];
        does = "publishes";
    }
    if (culprit == MK_NOBODY) return MK_OK;
    static const char *const when[STEPS] = {" of two steps before", " of the step before", ""};
    return mk_refuse(c, x, "reuse of %s: publishing pub %u ends pub %u%s, but nothing makes it wait for %s, which %s that", v->name, pub, old,
                     when[step], mk_insn_text(c, culprit).s, does);
}

/* Every worker has begun this step before the next step's descriptor is written. */
static int check_descriptor(mk_order *o, const uint32_t *clock)
{
    mk_check *c = o->c;
    for (uint32_t w = 0; w < c->i->workers; w++)
        if (queue_length(c, w) && clock[w] < (STEPS - 1) * queue_length(c, w) + 1)
            return mk_refuse(c, c->schedule, "reuse of the step descriptor: nothing makes it wait for worker %u, which may not have begun the step", w);
    return MK_OK;
}

/* Plays STEPS steps in o->order with vector clocks. */
static int play(mk_order *o, uint32_t *cur, uint32_t *end, mk_pub_clock *pc, uint8_t *partial)
{
    mk_check *c = o->c;
    uint32_t W = c->i->workers;
    int rc = MK_OK;
    for (uint32_t step = 0; step < STEPS; step++) {
        for (uint32_t id = 0; id < c->n_pub; id++) pc[id].reads_left = c->read_off[id + 1] - c->read_off[id];
        for (uint32_t w = 0; w < W && step; w++) join(cur + (size_t)w * W, end, W);
        for (uint32_t i = 0; i < o->n; i++) {
            uint32_t x = o->order[i], w = c->owner[x], *clock = cur + (size_t)w * W, vec[2], pub[2];
            const mk_insn *in = &c->p->insn[x];
            for (uint32_t k = 0; k < in->nwait && step == STEPS - 1; k++) { /* before its other waits are over */
                const uint32_t *m = NULL;
                uint32_t id;
                if (members_of_wait(c, x, k, &m, &id) && mk_vec_sums(&c->p->vec[in->wait[k].vec]) && (rc = check_looks(o, x, in->wait[k].vec, in->wait[k].pub, clock))) return rc;
            }
            for (uint32_t k = 0; k < in->nwait; k++) {
                const uint32_t *m = NULL;
                uint32_t id, n = members_of_wait(c, x, k, &m, &id);
                if (!n) continue;
                mk_slices part[3] = {{0, n}};
                uint32_t parts = whole_only(c, x, k) ? 1 : mk_looks_at(c, x, k, part);
                for (const mk_slices *s = part; s < part + parts; s++)
                    if (s->n == mk_members(c, id))
                        join(clock, pc[id].joined, W);
                    else
                        for (uint32_t j = s->first; j < s->first + s->n; j++) join(clock, pc[id].each + (size_t)j * W, W);
                if (--pc[id].reads_left == 0) {
                    free(pc[id].joined);
                    free(pc[id].each);
                    pc[id].joined = pc[id].each = NULL;
                }
            }
            clock[w] = step * queue_length(c, w) + (x - c->p->queue[w]) + 1;
            uint32_t n = mk_signals_of(c, in, vec, pub);
            for (uint32_t k = 0; k < n; k++) {
                const mk_vec *v = &c->p->vec[vec[k]];
                uint32_t id = mk_pub_id(c, vec[k], pub[k]), slice = k ? 0 : in->signal_slice;
                if (step == STEPS - 1 && (rc = check_reuse(o, x, vec[k], pub[k], slice, clock))) return rc;
                if (c->read_off[id] == c->read_off[id + 1]) continue;
                if (!pc[id].joined) pc[id].joined = calloc(W, sizeof *pc[id].joined);
                if (!pc[id].joined) return mk_fail(c->err, MK_E_SYSTEM, "validator: out of memory");
                join(pc[id].joined, clock, W);
                if (!partial[id] || v->scope != MK_PACKET) continue;
                if (!pc[id].each) pc[id].each = malloc((size_t)mk_members(c, id) * W * sizeof *pc[id].each);
                if (!pc[id].each) return mk_fail(c->err, MK_E_SYSTEM, "validator: out of memory");
                memcpy(pc[id].each + (size_t)slice * W, clock, W * sizeof *clock);
            }
            if (x == c->schedule) {
                memcpy(end, clock, W * sizeof *end);
                if (step == STEPS - 1 && (rc = check_descriptor(o, clock))) return rc;
            }
        }
    }
    return MK_OK;
}

static int check_clocks(mk_order *o)
{
    mk_check *c = o->c;
    size_t W = c->i->workers;
    uint32_t *cur = calloc(W * W, sizeof *cur), *end = calloc(W, sizeof *end);
    mk_pub_clock *pc = calloc((size_t)c->n_pub + 1, sizeof *pc);
    uint8_t *partial = calloc((size_t)c->n_pub + 1, 1);
    int rc;
    if (!cur || !end || !pc || !partial) {
        rc = mk_fail(c->err, MK_E_SYSTEM, "validator: out of memory");
        goto out;
    }
    for (uint32_t id = 0; id < c->n_pub; id++)
        for (uint32_t r = c->read_off[id]; r < c->read_off[id + 1]; r++)
            if (c->read[r].nslice != mk_members(c, id) || c->p->insn[c->read[r].insn].opcode == MK_OP_DELTA_STEP) partial[id] = 1;
    rc = play(o, cur, end, pc, partial);
    for (uint32_t id = 0; id < c->n_pub; id++) {
        free(pc[id].joined);
        free(pc[id].each);
    }
out:
    free(cur);
    free(end);
    free(pc);
    free(partial);
    return rc;
}

int mk_check_order(mk_check *c)
{
    mk_order o = {.c = c};
    size_t N = c->i->n_insn, W = c->i->workers;
    o.order = malloc(N * sizeof *o.order);
    o.depth = calloc(N, sizeof *o.depth);
    o.blocked_on = malloc(W * sizeof *o.blocked_on);
    o.pc = malloc(W * sizeof *o.pc);
    int rc;
    if (!o.order || !o.depth || !o.blocked_on || !o.pc)
        rc = mk_fail(c->err, MK_E_SYSTEM, "validator: out of memory");
    else
        rc = check_progress(&o);
    if (!rc) {
        count_exchanges(&o);
        rc = check_clocks(&o);
    }
    free(o.order);
    free(o.depth);
    free(o.blocked_on);
    free(o.pc);
    return rc;
}
