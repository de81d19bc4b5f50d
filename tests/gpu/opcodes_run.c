/* One case of test_opcodes: 8, 3 and 1 rows on both machines, compared. */
#include "tests/gpu/opcodes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- a row in other company ----------------------------------------------------------------------------------------- */

typedef struct shot {
    mk_piece pc;
    const mk_insn *in;
    uint32_t worker, n;
    uint32_t *bits;
} shot;

typedef struct album {
    mk_case *c;
    const mk_memory *m;
    uint32_t row, n, cap, worker;
    const mk_insn *in;
    shot *s;
} album;

static void take_shot(void *arg, const mk_piece *pc)
{
    album *a = arg;
    uint32_t n = mk_piece_values(&a->c->prog, pc, a->in);
    if (a->n == a->cap) {
        a->cap = 2 * a->cap + 64;
        a->s = realloc(a->s, a->cap * sizeof *a->s);
    }
    double *v = malloc((n + 1) * sizeof *v);
    shot *s = &a->s[a->n++];
    *s = (shot){.pc = *pc, .in = a->in, .worker = a->worker, .n = pc->kind == MK_PC_ROUTES ? n - 1 : pc->kind == MK_PC_PARTIAL ? n + 1 : n, .bits = malloc((n + 2) * 4)};
    mk_piece_read(&a->c->prog, pc, a->m, a->in, a->row, v, s->bits);
    if (pc->kind == MK_PC_PARTIAL) memcpy(s->bits, mk_region_at(a->m, pc->region) + pc->off, s->n * 4ull);
    free(v);
}

static album row_album(mk_case *c, const mk_memory *m, uint32_t row)
{
    album a = {.c = c, .m = m, .row = row};
    for (uint32_t w = 0; w < c->prog.info.workers; w++)
        for (uint32_t k = c->prog.queue[w]; k < c->prog.queue[w + 1]; k++) {
            a.in = &c->prog.insn[k];
            a.worker = w;
            mk_pieces(&c->prog, m, &c->step, a.in, w, row, take_shot, &a);
        }
    return a;
}

static void album_free(album *a)
{
    for (uint32_t i = 0; i < a->n; i++) free(a->s[i].bits);
    free(a->s);
    *a = (album){0};
}

static int same_shot(const shot *a, const shot *b)
{
    return a->in->opcode == b->in->opcode && a->in->signal_vec == b->in->signal_vec && a->pc.kind == b->pc.kind && a->pc.region == b->pc.region &&
           a->pc.slice == b->pc.slice && a->pc.first == b->pc.first && a->n == b->n && a->pc.what == b->pc.what &&
           (a->in->opcode != MK_OP_GQA_APPEND || a->in->gqa.head == b->in->gqa.head) && /* its pieces do not say which */
           ((a->pc.region != 3 && a->pc.region != 4) || a->worker == b->worker);
}

/* Words that differ, and in *found how many pieces were compared. */
static uint64_t differing(const album *a, const album *b, uint32_t *found)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < b->n; i++)
        for (uint32_t k = 0, at = i; k < a->n; k++, at++) {
            const shot *x = &a->s[at % a->n];
            if (!same_shot(x, &b->s[i])) continue;
            ++*found;
            for (uint32_t j = 0; j < x->n; j++) n += x->bits[j] != b->s[i].bits[j];
            break;
        }
    return n;
}

/* ---- a case --------------------------------------------------------------------------------------------------------- */

static const struct {
    uint32_t n, id[MK_MAX_ROWS];
} passes[] = {{8, {0, 1, 2, 3, 4, 5, 6, 7}}, {3, {7, 5, 3}}, {1, {5}}, {1, {6}}, {1, {7}}}; /* one row has code of its own, and more of it where attention has far to look */

uint32_t case_opcode(const case_spec *s)
{
    for (uint32_t op = 0; op < MK_OP_COUNT; op++)
        if (!strcmp(s->op, mk_opcode_name(op))) return op;
    fprintf(stderr, "test_opcodes: %s is no opcode\n", s->op);
    exit(3);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

void case_run(const case_spec *s, uint64_t seed, int dry, const case_wrong *w, case_result *r)
{
    mk_err err = {0};
    struct mk_gpu *g = NULL;
    void (*wrong)(mk_insn *in) = w ? w->make_wrong : NULL;
    mk_case *c = case_new(s->workers ? s->workers : 3, seed);
    album rows[MK_MAX_ROWS] = {{0}};
    double t0 = now();
    memset(r, 0, sizeof *r);
    for (uint32_t i = 0; i < CASE_STREAMS; i++) c->pos[i] = i * 11 + 3;
    s->make(c, s->arg);
    if (!dry && case_gpu_open(c, &g, &err)) {
        r->skip = strstr(err.msg, "twin only") != NULL;
        r->bad = !r->skip;
        snprintf(r->text, sizeof r->text, "%s", err.msg);
    }
    for (uint32_t p = 0; p < (w ? 1u : sizeof passes / sizeof passes[0]) && !r->bad && !r->skip; p++) {
        case_rows(c, passes[p].id, passes[p].n, 0);
        s->feed(c, s->arg);
        int rc = 0;
        rc = dry ? case_run_twin(c, &err) : case_run_gpu(c, g, &err);
        for (uint32_t i = 0; dry && i < MK_REGIONS; i++) memcpy(mk_region_at(&c->gpu, i), mk_region_at(&c->twin, i), mk_region_bytes(&c->prog, i));
        mk_insn *kept = NULL;
        if (!rc && wrong) {
            kept = malloc(c->prog.info.n_insn * sizeof *kept);
            memcpy(kept, c->prog.insn, c->prog.info.n_insn * sizeof *kept);
            for (uint32_t k = 0; k < c->prog.info.n_insn; k++)
                if (c->prog.insn[k].opcode == case_opcode(s)) wrong(&c->prog.insn[k]);
        }
        if (!rc) rc = case_run_twin(c, &err);
        if (kept) memcpy(c->prog.insn, kept, c->prog.info.n_insn * sizeof *kept), free(kept);
        if (w && !wrong && !rc) w->spoil(c);
        if (!rc) rc = mk_compare(&c->prog, NULL, 0, &c->step, c->epoch0, &c->mem, &c->twin, &c->gpu, MK_REGIONS_ALL, &r->cmp, &err);
        if (rc) {
            r->bad = 1;
            snprintf(r->text, sizeof r->text, "%s", err.msg);
        } else if (r->cmp.failed) {
            r->bad = 1;
            snprintf(r->text, sizeof r->text, "%u rows, %llu values wrong; first: %s", passes[p].n, (unsigned long long)r->cmp.failed, r->cmp.first.text);
        }
        for (uint32_t i = 0; i < passes[p].n && !rc; i++) {
            album a = row_album(c, &c->gpu, i);
            if (p == 0) {
                rows[i] = a;
                continue;
            }
            r->bits += differing(&rows[passes[p].id[i]], &a, &r->shared);
            album_free(&a);
        }
    }
    if (r->bits && !r->bad) {
        r->bad = 1;
        snprintf(r->text, sizeof r->text, "a row's bits depend on the other rows: %llu words differ", (unsigned long long)r->bits);
    }
    if (!r->bad && !r->skip && !w && !r->shared) {
        r->bad = 1;
        snprintf(r->text, sizeof r->text, "nothing was compared bit for bit");
    }
    for (uint32_t i = 0; i < MK_MAX_ROWS; i++) album_free(&rows[i]);
    case_gpu_close(&g);
    case_free(c);
    r->ms = now() - t0;
}
