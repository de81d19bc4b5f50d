/* The validator against a machine that plays programs in bad orders, against random mutations, and on planned programs.
 *
 * The machine here knows nothing of vector clocks: it keeps, for every slice and half, the epoch that lies there, lets workers take
 * turns at random (or holds one instruction back as long as anybody else can go on), and looks, when an instruction ends, whether what it
 * began to read is still there. A program that the validator accepts must never fail; where it refuses for reuse of a buffer, holding
 * back the instruction that it names must fail. */
#include "host/planner.h"
#include "instructions/validate.h"
#include "tests/support/progbuild.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

static uint64_t rng_state;
static uint32_t rnd(uint32_t n)
{
    rng_state = rng_state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)((rng_state >> 33) % n);
}

/* ---- the machine ---------------------------------------------------------------------------------------------------- */

enum outcome { PLAYED, OVERWRITTEN, STUCK };

typedef struct machine {
    const mk_program *p;
    uint32_t *base;    /* [n_vec] first cell of a vector: PACKET [half][slice]; BULK one counter */
    uint32_t *cell;
    uint32_t *step, *pc, *begun; /* [workers] */
    uint32_t steps_open;         /* descriptors published */
} machine;

static uint32_t *packet_cell(const machine *m, uint32_t vec, uint32_t step, uint32_t pub, uint32_t slice)
{
    const mk_vec *v = &m->p->vec[vec];
    return &m->cell[m->base[vec] + mk_half(v, step, pub) * v->nslice + slice];
}

static int ready(const machine *m, const mk_insn *in, uint32_t step)
{
    for (uint32_t k = 0; k < in->nwait; k++) {
        const mk_wait *wt = &in->wait[k];
        const mk_vec *v = &m->p->vec[wt->vec];
        if (v->scope == MK_BULK && m->cell[m->base[wt->vec]] != mk_counter_target(v, step, wt->pub)) return 0;
        if (v->scope != MK_PACKET) continue;
        for (uint32_t s = wt->slice0; s < (uint32_t)wt->slice0 + wt->nslice; s++)
            if (*packet_cell(m, wt->vec, step, wt->pub, s) != mk_epoch(0, step, wt->pub)) return 0;
    }
    return 1;
}

static void end(machine *m, uint32_t w, const mk_insn *in, uint32_t step)
{
    if (in->opcode == MK_OP_SCHEDULE) m->steps_open++;
    if (in->opcode == MK_OP_LM_HEAD) m->cell[m->base[in->lm_head.logits_vec]]++;
    if (in->signal_vec == MK_NONE) return;
    const mk_vec *v = &m->p->vec[in->signal_vec];
    uint32_t epoch = mk_epoch(0, step, in->signal_pub);
    if (v->scope == MK_BULK) m->cell[m->base[in->signal_vec]]++;
    if (v->scope != MK_PACKET) return;
    if (!(v->flags & MK_VEC_DYNAMIC)) {
        *packet_cell(m, in->signal_vec, step, in->signal_pub, in->signal_slice) = epoch;
        return;
    }
    for (uint32_t s = 0; s < v->nslice; s++)
        if (s % m->p->info.workers == w) *packet_cell(m, in->signal_vec, step, in->signal_pub, s) = epoch;
}

/* Plays `steps` steps. hold_w >= 0: instruction hold_i of that worker ends only when nothing else can move. */
static enum outcome play(const mk_program *p, uint32_t steps, int hold_w, uint32_t hold_i)
{
    uint32_t W = p->info.workers, cells = 0;
    machine m = {.p = p, .steps_open = 1};
    m.base = calloc(p->info.n_vec, sizeof *m.base);
    for (uint32_t v = 0; v < p->info.n_vec; v++) {
        m.base[v] = cells;
        cells += p->vec[v].scope == MK_PACKET ? 2 * p->vec[v].nslice : 1;
    }
    m.cell = calloc(cells, sizeof *m.cell);
    m.step = calloc(3 * W, sizeof *m.step);
    m.pc = m.step + W;
    m.begun = m.pc + W;
    uint32_t *can = calloc(W, sizeof *can), lazy = rnd(W); /* one worker is slow throughout */
    enum outcome o = PLAYED;
    for (;;) {
        uint32_t n = 0, held = 0;
        for (uint32_t w = 0; w < W; w++) {
            uint32_t len = p->queue[w + 1] - p->queue[w];
            while (len && m.pc[w] == len && m.step[w] + 1 < steps) {
                m.pc[w] = 0;
                m.step[w]++;
            }
            if (!len || m.pc[w] == len || m.step[w] >= m.steps_open) continue;
            if (m.begun[w] && (int)w == hold_w && m.pc[w] == hold_i) {
                held = 1;
                continue;
            }
            if (m.begun[w] || ready(&m, &p->insn[p->queue[w] + m.pc[w]], m.step[w])) can[n++] = w;
        }
        if (!n && !held) break;
        uint32_t w = n ? can[rnd(n)] : (uint32_t)hold_w;
        if (n && w == lazy && rnd(8)) w = can[rnd(n)];
        const mk_insn *in = &p->insn[p->queue[w] + m.pc[w]];
        if (!m.begun[w]) {
            m.begun[w] = 1;
            continue;
        }
        if (!ready(&m, in, m.step[w])) {
            o = OVERWRITTEN;
            break;
        }
        end(&m, w, in, m.step[w]);
        m.begun[w] = 0;
        m.pc[w]++;
    }
    for (uint32_t w = 0; w < W && o == PLAYED; w++)
        if (p->queue[w + 1] > p->queue[w] && (m.step[w] != steps - 1 || m.pc[w] != p->queue[w + 1] - p->queue[w])) o = STUCK;
    free(m.base);
    free(m.cell);
    free(m.step);
    free(can);
    return o;
}

static void accepted_programs_play(void **state)
{
    (void)state;
    static const char *const layers[] = {NULL, "De", "Ds", "DfMf", "MsMe"};
    rng_state = 1;
    for (size_t l = 0; l < sizeof layers / sizeof layers[0]; l++)
        for (uint32_t w = 1; w <= 9; w += 2) {
            mk_program *p = pb_make(&(pb_config){.workers = w, .layers = layers[l]});
            assert_int_equal(mk_validate(p, NULL, NULL), MK_OK);
            for (int i = 0; i < 6; i++) assert_int_equal(play(p, 4, -1, 0), PLAYED);
            for (uint32_t v = 0; v < w; v++)
                for (uint32_t i = 0; i < p->queue[v + 1] - p->queue[v]; i++) assert_int_equal(play(p, 3, (int)v, i), PLAYED);
            mk_program_destroy(&p);
        }
}

/* ---- changes to the order of a program ------------------------------------------------------------------------------ */

/* Structural changes that keep every instruction legal on its own: waits for other publications, other places in the queue, readers
 * added anywhere. What they break is order only. */
static void reorder(mk_program *p)
{
    uint32_t w = rnd(p->info.workers), len = p->queue[w + 1] - p->queue[w], a = rnd(len), x = p->queue[w] + a;
    switch (rnd(3)) {
    case 0: { /* wait for another publication of the same vector */
        mk_insn *in = &p->insn[x];
        if (!in->nwait) return;
        mk_wait *wt = &in->wait[rnd(in->nwait)];
        wt->pub = (uint16_t)rnd(p->vec[wt->vec].pubs);
        return;
    }
    case 1: /* neighbours change places */
        if (a + 1 < len) pb_swap(p, w, a, a + 1);
        return;
    default: { /* one more reader */
        mk_insn in = *pb_publisher(p, "low", 0, 0);
        uint32_t h = pb_vec(p, "h"), n = in.gemv.n;
        for (uint32_t v = 0; v < p->info.n_vec; v++)
            if (!strcmp(p->vec[v].name, "dump")) return;
        in.wait[0].vec = (uint16_t)h;
        in.wait[0].pub = (uint16_t)rnd(p->vec[h].pubs);
        in.signal_vec = (uint16_t)pb_add_dump(p, n);
        in.signal_pub = in.signal_slice = 0;
        pb_insert(p, w, a, &in);
    }
    }
}

/* The validator and the machine agree: accepted programs play in every order tried, refusals for order have an order that fails. */
static void refusals_have_a_reason(void **state)
{
    (void)state;
    rng_state = 2;
    mk_program *base[2] = {pb_make(&(pb_config){.workers = 4, .layers = "DeMf"}), pb_make(&(pb_config){.workers = 3, .layers = "DfMsMf"})};
    uint32_t accepted = 0, reuse = 0, cycle = 0, other = 0, unconfirmed = 0;
    for (int i = 0; i < 4000; i++) {
        mk_program *p = pb_copy(base[i & 1]);
        mk_err err = {0};
        for (uint32_t k = 1 + rnd(3); k; k--) reorder(p);
        if (mk_validate(p, NULL, &err) == MK_OK) {
            accepted++;
            for (int k = 0; k < 2; k++)
                if (play(p, 4, -1, 0) != PLAYED) fail_msg("case %d was accepted, but does not play", i);
            for (int k = 0; k < 8; k++) {
                uint32_t w = rnd(p->info.workers), j = rnd(p->queue[w + 1] - p->queue[w]);
                if (play(p, 4, (int)w, j) != PLAYED) fail_msg("case %d was accepted, but holding worker %u #%u back breaks it", i, w, j);
            }
        } else if (strstr(err.msg, "cycle: ")) {
            cycle++;
            if (play(p, 2, -1, 0) == PLAYED) fail_msg("case %d plays, but: %s", i, err.msg);
        } else if (strstr(err.msg, "reuse of ") && strstr(err.msg, "which reads that")) {
            unsigned w, j;
            reuse++;
            assert_int_equal(sscanf(strstr(err.msg, "wait for worker "), "wait for worker %u #%u", &w, &j), 2);
            int broke = 0;
            for (int k = 0; k < 20 && !broke; k++) broke = play(p, 5, (int)w, j) != PLAYED;
            unconfirmed += !broke;
            if (!broke && getenv("MK_TEST_SHOW")) print_message("    case %d: not confirmed: %s\n", i, err.msg);
        } else {
            other++;
        }
        mk_program_destroy(&p);
    }
    print_message("    accepted %u (all played), cycles %u (all stuck), reuse %u (%u not confirmed), other reasons %u\n", accepted, cycle, reuse,
                  unconfirmed, other);
    assert_true(accepted > 100 && cycle > 100 && reuse > 100);
    assert_int_equal(unconfirmed, 0);
    mk_program_destroy(&base[0]);
    mk_program_destroy(&base[1]);
}

/* ---- random mutations ----------------------------------------------------------------------------------------------- */

/* Changes one value of 1, 2, 4 or 8 bytes somewhere in `bytes` of memory. */
static void mutate(void *memory, size_t bytes)
{
    uint8_t *b = memory;
    size_t size = (size_t)1 << rnd(4), at = rnd((uint32_t)(bytes / size)) * size;
    uint64_t v = 0;
    memcpy(&v, b + at, size);
    switch (rnd(6)) {
    case 0: v ^= 1ull << rnd((uint32_t)size * 8); break;
    case 1: v++; break;
    case 2: v--; break;
    case 3: v = 0; break;
    case 4: v = ~0ull; break;
    default: v = rnd(1u << 16); break;
    }
    memcpy(b + at, &v, size);
}

static void mutations_never_crash(void **state)
{
    (void)state;
    rng_state = 3;
    mk_program *base[3] = {pb_small(), pb_make(&(pb_config){.workers = 3, .layers = "DsMf", .smem_limit = 100000}), pb_make(&(pb_config){.workers = 1, .layers = "Me", .act_f32 = 1})};
    uint32_t tried[6] = {0}, caught[6] = {0};
    static const char *const what[6] = {"header", "vectors", "starts", "queues", "tapes", "instructions"};
    for (int i = 0; i < 12000; i++) {
        mk_program *p = pb_copy(base[i % 3]);
        mk_program_info sizes = p->info;
        uint32_t kind = rnd(8);
        if (kind > 5) kind = 5;
        switch (kind) {
        case 0:
            mutate(&p->info, sizeof p->info);
            /* the arrays' sizes belong to who made them: load checks these four against the file */
            p->info.workers = sizes.workers, p->info.n_vec = sizes.n_vec, p->info.n_start = sizes.n_start, p->info.n_insn = sizes.n_insn;
            break;
        case 1: mutate(&p->vec[rnd(sizes.n_vec)], sizeof *p->vec); break;
        case 2: mutate(p->start, sizes.n_start * sizeof *p->start); break;
        case 3: mutate(p->queue, (sizes.workers + 1) * sizeof *p->queue); break;
        case 4: mutate(p->tape_base, (sizes.workers + 1) * sizeof *p->tape_base); break;
        default: mutate(&p->insn[rnd(sizes.n_insn)], sizeof *p->insn); break;
        }
        const mk_program *o = base[i % 3];
        int same = !memcmp(&p->info, &o->info, sizeof p->info) && !memcmp(p->vec, o->vec, sizes.n_vec * sizeof *p->vec) &&
                   !memcmp(p->start, o->start, sizes.n_start * sizeof *p->start) && !memcmp(p->queue, o->queue, (sizes.workers + 1) * sizeof *p->queue) &&
                   !memcmp(p->tape_base, o->tape_base, (sizes.workers + 1) * sizeof *p->tape_base) &&
                   !memcmp(p->insn, o->insn, sizes.n_insn * sizeof *p->insn);
        mk_err err = {0};
        int rc = mk_validate(p, NULL, &err);
        if (same) {
            assert_int_equal(rc, MK_OK);
        } else {
            tried[kind]++;
            caught[kind] += rc != MK_OK;
        }
        if (rc) {
            assert_int_equal(rc, MK_E_PROGRAM);
            assert_true(err.msg[0] && !strchr(err.msg, '\n'));
        } else if (i % 4 == 0) {
            assert_int_equal(play(p, 3, -1, 0), PLAYED); /* what is let through may compute nonsense, but runs */
        }
        mk_program_destroy(&p);
    }
    for (int k = 0; k < 6; k++) print_message("    %-12s %5u mutations, %5u refused (%.1f %%)\n", what[k], tried[k], caught[k], 100.0 * caught[k] / tried[k]);
    for (int k = 2; k < 5; k++) assert_true(caught[k] * 100 >= tried[k] * 95);
    assert_true(caught[1] * 100 >= tried[1] * 70); /* a quarter of a vector is its name */
    assert_true(caught[5] * 100 >= tried[5] * 80);
    for (int k = 0; k < 3; k++) mk_program_destroy(&base[k]);
}

/* The counts that give the arrays their sizes, through a file with a right checksum. */
static void counts_are_checked_by_load(void **state)
{
    (void)state;
    char path[] = "/tmp/mk-count-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    rng_state = 4;
    for (int i = 0; i < 200; i++) {
        mk_program *p = pb_small(), *q = NULL;
        mk_err err = {0};
        assert_int_equal(mk_program_save(p, path, &err), MK_OK);
        FILE *f = fopen(path, "r+b");
        mk_program_info info = p->info;
        uint32_t *field[4] = {&info.workers, &info.n_vec, &info.n_start, &info.n_insn}, k = rnd(4), old = *field[k];
        *field[k] = i % 2 ? old + rnd(5) - 2 : rnd(0x7fffffff);
        assert_int_equal(fwrite(&info, sizeof info, 1, f), 1);
        fclose(f);
        int rc = mk_program_load(path, &q, &err);
        if (*field[k] == old)
            assert_int_equal(rc, MK_OK);
        else
            assert_int_equal(rc, MK_E_PROGRAM);
        mk_program_destroy(&p);
        mk_program_destroy(&q);
    }
    unlink(path);
}

/* ---- planned programs ----------------------------------------------------------------------------------------------- */

static void check_plan(const char *config, const mk_plan_config *pc, enum mk_weights_mode mode, mk_validation *v)
{
    mk_model *m = NULL;
    mk_plan *plan = NULL;
    mk_err err = {0};
    if (mk_model_read(config, &m, &err) || mk_model_resolve(m, NULL, mode, &err) || mk_plan_make(m, pc, &plan, &err) ||
        mk_validate(plan->prog, v, &err))
        fail_msg("%s at %u workers: %s", config, pc->workers, err.msg);
    if (plan->prog->info.n_insn < 2000)
        for (int i = 0; i < 3; i++) assert_int_equal(play(plan->prog, 3, -1, 0), PLAYED);
    mk_plan_destroy(&plan);
    mk_model_destroy(&m);
}

static void planned_programs(void **state)
{
    (void)state;
    static const uint32_t workers[] = {1, 2, 3, 8, 13, 132};
    mk_validation v;
    rng_state = 5;
    for (size_t i = 0; i < sizeof workers / sizeof workers[0]; i++)
        for (int mode = MK_WEIGHTS_FP8; mode <= MK_WEIGHTS_BF16; mode++)
            for (int f32 = 0; f32 < 2; f32++) {
                mk_plan_config pc = {.workers = workers[i], .act_f32 = f32, .max_context = 2048, .kv_pages = 64, .state_slots = 4,
                                     .smem_limit = f32 ? 0 : 232448};
                check_plan("tests/oracle/kimi_linear/config.json", &pc, mode, &v);
                check_plan("tests/fixtures/configs/kimi-linear-48b-a3b/config.json", &pc, mode, &v);
                if (workers[i] == 132) {
                    print_message("    48B at 132 workers: %u exchanges on the critical path, %u bytes of shared memory, proved in %.3f s\n", v.exchanges,
                                  v.smem_max, v.seconds);
#ifndef __SANITIZE_ADDRESS__
                    assert_true(v.seconds < 1.5);
#endif
                }
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(accepted_programs_play),     cmocka_unit_test(refusals_have_a_reason), cmocka_unit_test(mutations_never_crash),
        cmocka_unit_test(counts_are_checked_by_load), cmocka_unit_test(planned_programs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
