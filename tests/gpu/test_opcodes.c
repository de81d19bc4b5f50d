/* Every opcode, alone: the resident kernel against the twin on fresh random inputs with everything else poisoned. What an instruction writes must be within its
 * tolerance (instructions/tolerance.h), everything else as it was, and a row's bits the same with 8, 3 and 1 rows in the step. Then the negative controls: wrong
 * instructions on the twin's side and a stray write, each of which must be found.
 *   test_opcodes [-s SEED] [-v] [FILTER ...]      FILTER: runs cases whose "OPCODE name" contains one of them (GEMV, fp8, 2304 ...); -v: every first
 *                                                 divergence in full also for negative controls; -x: no GPU, the twin against itself (tests the test)
 * The cases are in tests/gpu/opcodes_*.c. A JSON report goes to $OUT/opcodes.json ($OUT unset: the working directory). */
#include "tests/gpu/opcodes.h"

#include "host/version.h"
#include "megakernel/gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int verbose, dry;
static FILE *report;
static uint32_t ran, failed, skipped;

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
} passes[] = {{8, {0, 1, 2, 3, 4, 5, 6, 7}}, {3, {7, 5, 3}}, {1, {5}}};

static uint32_t opcode_of(const case_spec *s)
{
    for (uint32_t op = 0; op < MK_OP_COUNT; op++)
        if (!strcmp(s->op, mk_opcode_name(op))) return op;
    fprintf(stderr, "test_opcodes: %s is no opcode\n", s->op);
    exit(3);
}

typedef struct result {
    mk_comparison cmp;
    uint64_t bits;
    uint32_t shared; /* pieces compared bit for bit */
    double ms;
    char text[512];
    int skip, bad;
} result;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

/* wrong: NULL, or what to do to the twin's instructions; then one pass, and *r says what was found. stray: a byte of the GPU's result is flipped. */
static void run_case(const case_spec *s, uint64_t seed, void (*wrong)(mk_insn *in), int stray, result *r)
{
    mk_err err = {0};
    mk_gpu *g = NULL;
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
    for (uint32_t p = 0; p < (wrong || stray ? 1u : 3u) && !r->bad && !r->skip; p++) {
        case_rows(c, passes[p].id, passes[p].n, 0);
        s->feed(c, s->arg);
        int rc = 0;
        if (dry)
            rc = case_run_twin(c, &err), memcpy(c->gpu.exchange, c->twin.exchange, c->prog.info.exchange_bytes), memcpy(c->gpu.bulk, c->twin.bulk, c->prog.info.bulk_bytes),
            memcpy(c->gpu.counter, c->twin.counter, c->prog.info.n_counter * 4ull), memcpy(c->gpu.local, c->twin.local, mk_region_bytes(&c->prog, 3)),
            memcpy(c->gpu.state, c->twin.state, mk_region_bytes(&c->prog, 4)), memcpy(c->gpu.kv, c->twin.kv, mk_region_bytes(&c->prog, 5));
        else
            rc = case_run_gpu(c, g, &err);
        mk_insn *kept = NULL;
        if (!rc && wrong) {
            kept = malloc(c->prog.info.n_insn * sizeof *kept);
            memcpy(kept, c->prog.insn, c->prog.info.n_insn * sizeof *kept);
            for (uint32_t k = 0; k < c->prog.info.n_insn; k++)
                if (c->prog.insn[k].opcode == opcode_of(s)) wrong(&c->prog.insn[k]);
        }
        if (!rc) rc = case_run_twin(c, &err);
        if (kept) memcpy(c->prog.insn, kept, c->prog.info.n_insn * sizeof *kept), free(kept);
        if (stray && !rc) /* the half of the first vector that the case does not use */
            c->gpu.exchange[mk_packet_offset(&c->prog.vec[0], !mk_half(&c->prog.vec[0], c->step.seq, c->pub[0]), 0, 0)] ^= 1;
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
    if (!r->bad && !r->skip && !wrong && !stray && !r->shared) {
        r->bad = 1;
        snprintf(r->text, sizeof r->text, "nothing was compared bit for bit");
    }
    for (uint32_t i = 0; i < MK_MAX_ROWS; i++) album_free(&rows[i]);
    if (g) mk_gpu_destroy(&g);
    case_free(c);
    r->ms = now() - t0;
}

static int wanted(const char *name, char **filter, int n)
{
    if (!n) return 1;
    for (int i = 0; i < n; i++)
        if (strstr(name, filter[i])) return 1;
    return 0;
}

static void json(const char *op, const char *name, const result *r, uint32_t code, const char *verdict)
{
    fprintf(report, "%s  {\"opcode\": \"%s\", \"case\": \"%s\", \"rows\": [8, 3, 1], \"values\": %llu, \"max_error\": %.3e, \"tolerance\": %.1e, "
            "\"differing_words_between_row_counts\": %llu, \"result\": \"%s\"}", ran + skipped > 1 ? ",\n" : "", op, name,
            (unsigned long long)r->cmp.values[code], r->cmp.worst[code], r->cmp.tolerance[code], (unsigned long long)r->bits, verdict);
}

int main(int argc, char **argv)
{
    mk_gpu_info info = {.name = "none: the twin against itself"};
    mk_err err = {0};
    uint64_t seed = (uint64_t)time(NULL) & 0xffffff;
    int o;
    while ((o = getopt(argc, argv, "s:vx")) != -1)
        if (o == 's')
            seed = strtoull(optarg, NULL, 0);
        else if (o == 'v')
            verbose = 1;
        else if (o == 'x')
            dry = 1;
        else
            return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (!dry && mk_gpu_probe(0, &info, &err)) {
        fprintf(stderr, "test_opcodes: %s\n", err.msg);
        return 1;
    }
    char path[512], label[160];
    snprintf(path, sizeof path, "%s/opcodes.json", getenv("OUT") ? getenv("OUT") : ".");
    if (!(report = fopen(path, "w"))) {
        fprintf(stderr, "test_opcodes: cannot write %s\n", path);
        return 6;
    }
    printf("test_opcodes: %s, seed %llu\n", info.name, (unsigned long long)seed);
    fprintf(report, "{\"device\": \"%s\", \"build\": \"%s\", \"seed\": %llu, \"results\": [\n", info.name, mk_build(), (unsigned long long)seed);
    char **filter = argv + optind;
    int n_filter = argc - optind;
    double t0 = now();
    result *r = malloc(sizeof *r);
    for (const case_spec *s = case_next(NULL); s && r; s = case_next(s)) {
        snprintf(label, sizeof label, "%s %s", s->op, s->name);
        if (!wanted(label, filter, n_filter)) continue;
        uint32_t op = opcode_of(s);
        run_case(s, seed + (uint64_t)ran, NULL, 0, r);
        if (r->skip)
            skipped++;
        else
            ran++;
        if (r->bad) failed++;
        printf("%-58s rows 8/3/1  error %.1e of %.1e  %7llu values  row bits %s  %4.0f ms  %s\n", label, r->cmp.worst[op], r->cmp.tolerance[op],
               (unsigned long long)r->cmp.values[op], r->skip ? "-" : r->bits ? "DIFFER" : "same", r->ms, r->skip ? "skipped" : r->bad ? "FAIL" : "ok");
        if (r->text[0] && r->bad) printf("    %s\n", r->text);
        json(s->op, s->name, r, op, r->skip ? "twin only" : r->bad ? "failed" : "ok");
    }
    /* each must be found */
    uint32_t controls = 0, missed = 0;
    for (uint32_t i = 0; i < n_case_wrongs; i++) {
        const case_wrong *w = &case_wrongs[i];
        snprintf(label, sizeof label, "%s %s", w->of->op, w->name);
        if (!wanted(label, filter, n_filter)) continue;
        run_case(w->of, seed + i, w->make_wrong, w->make_wrong == NULL, r);
        if (r->skip) continue;
        controls++;
        if (!r->cmp.failed) missed++;
        printf("negative control: %-40s %s\n", label, r->cmp.failed ? "found" : "NOT FOUND");
        if (verbose || (!r->cmp.failed && r->text[0])) printf("    %s\n", r->text);
    }
    printf("%u cases, %u failed, %u skipped (opcode not on the GPU yet); %u negative controls, %u missed; %.1f s\n", ran, failed, skipped, controls, missed, (now() - t0) / 1e3);
    fprintf(report, "\n], \"cases\": %u, \"failed\": %u, \"skipped\": %u, \"negative_controls\": %u, \"missed\": %u}\n", ran, failed, skipped, controls, missed);
    fclose(report);
    free(r);
    return failed || missed || !ran;
}
