/* The cut of a program into phases (megakernel/phases.h): nothing is lost, and a phase needs only what earlier ones published. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "host/planner.h"
#include "host/preset.h"
#include "megakernel/phases.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct missing { /* who has still to publish it, by vector and publication */
    uint32_t of[64][1024];
} missing;

/* What `in` publishes is so many parts more. */
static void count(missing *m, const mk_insn *in, uint32_t parts)
{
    if (in->signal_vec != MK_NONE) m->of[in->signal_vec][in->signal_pub] += parts;
    if (in->opcode == MK_OP_LM_HEAD) m->of[in->lm_head.logits_vec][in->lm_head.logits_pub] += parts;
}

static void has_all(const char *preset, const mk_program *p, const missing *m, const mk_insn *in, uint32_t w, uint32_t k)
{
    for (int i = 0; i < in->nwait; i++)
        if (p->vec[in->wait[i].vec].scope != MK_LOCAL && m->of[in->wait[i].vec][in->wait[i].pub])
            fail_msg("%s: worker %u, phase %u: a %s waits for %s publication %u, of which %u parts are not published", preset, w, k, mk_opcode_name(in->opcode),
                     p->vec[in->wait[i].vec].name, in->wait[i].pub, m->of[in->wait[i].vec][in->wait[i].pub]);
}

/* The number of phases. idle: opcodes, by bits, that may stand in the phase of what they wait for. */
static uint32_t check(const char *preset, uint32_t workers, uint32_t rows, uint32_t pos, uint32_t idle)
{
    mk_model *m = NULL;
    mk_plan *plan = NULL;
    mk_phases ph;
    mk_err err = {0};
    mk_plan_config c = {.workers = workers, .max_context = 2048, .kv_pages = 32, .state_slots = 1, .smem_limit = workers == 132 ? 227 * 1024 : 0};
    const mk_preset *pr = mk_preset_find(preset);
    if (mk_preset_model(pr, &m, &err) || mk_model_resolve(m, NULL, pr->weights, &err) || mk_plan_make(m, &c, &plan, &err) ||
        mk_phases_of(plan->prog, rows, pos, &ph, &err))
        fail_msg("%s: %s", preset, err.msg);
    const mk_program *p = plan->prog;
    uint32_t W = workers, *done = calloc(W, sizeof *done), carried = 0;
    missing *left = calloc(1, sizeof *left);
    for (uint32_t x = 0; x < p->info.n_insn; x++) count(left, &p->insn[x], 1);
    for (uint32_t k = 0; k < ph.n; k++) {
        uint32_t any = 0;
        for (uint32_t w = 0; w < W; w++)
            for (uint32_t x = ph.queue[k * W + w]; x < ph.queue[k * W + w + 1]; x++, any++) {
                const mk_insn *in = &ph.insn[x];
                assert_memory_equal(in, &p->insn[p->queue[w] + done[w]], sizeof *in); /* every queue, whole and in order */
                done[w]++;
                if (!(idle >> in->opcode & 1)) has_all(preset, p, left, in, w, k);
            }
        assert_true(any > 0);
        for (uint32_t x = ph.queue[k * W]; x < ph.queue[(k + 1) * W]; x++) count(left, &ph.insn[x], -1u); /* seen by later phases only */
        for (uint32_t w = 0; w < W; w++)
            for (uint32_t x = ph.queue[k * W + w]; x < ph.queue[k * W + w + 1]; x++) has_all(preset, p, left, &ph.insn[x], w, k);
        if (k == 0) assert_int_equal(ph.load[0], 0);
        if (k + 1 == ph.n) assert_int_equal(ph.save[k], 0);
        for (uint32_t v = 0; v < p->info.n_vec; v++) {
            if ((ph.load[k] | ph.save[k]) >> v & 1) assert_int_equal(p->vec[v].scope, MK_LOCAL);
            carried += (uint32_t)(ph.load[k] >> v & 1);
        }
    }
    for (uint32_t w = 0; w < W; w++) assert_int_equal(done[w], p->queue[w + 1] - p->queue[w]);
    print_message("%-22s %4u workers, %u rows, position %u: %u phases, %u loads of LOCAL vectors\n", preset, workers, rows, pos, ph.n, carried);
    const uint32_t n = ph.n;
    free(done), free(left);
    mk_phases_free(&ph);
    mk_plan_destroy(&plan);
    mk_model_destroy(&m);
    return n;
}

static void every_preset(void **state)
{
    (void)state;
    char names[512], *save = NULL;
    snprintf(names, sizeof names, "%s", mk_preset_names());
    for (char *n = strtok_r(names, ", ", &save); n; n = strtok_r(NULL, ", ", &save)) check(n, 132, 8, 2047, 0);
    check("kimi-linear-48b", 33, 8, 2047, 0);
}

/* llama-3.2-1b has sixteen layers of grouped queries. */
static void what_one_row_leaves_out(void **state)
{
    (void)state;
    const uint32_t append = 1u << MK_OP_GQA_APPEND, all = check("llama-3.2-1b", 132, 8, 2047, 0);
    assert_int_equal(check("llama-3.2-1b", 132, 1, 2047, append), all - 16);                          /* several splits: COMBINE has to add them */
    assert_int_equal(check("llama-3.2-1b", 132, 1, 20, append | 1u << MK_OP_COMBINE), all - 2 * 16); /* one split */
    assert_int_equal(check("glm-4.7-flash", 132, 1, 20, 0), check("glm-4.7-flash", 132, 8, 20, 0));  /* latent attention leaves out none */
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_preset), cmocka_unit_test(what_one_row_leaves_out)};
    return cmocka_run_group_tests_name("phases", tests, NULL, NULL);
}
