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

static void check(const char *preset, uint32_t workers)
{
    mk_model *m = NULL;
    mk_plan *plan = NULL;
    mk_phases ph;
    mk_err err = {0};
    mk_plan_config c = {.workers = workers, .max_context = 2048, .kv_pages = 32, .state_slots = 1, .smem_limit = workers == 132 ? 227 * 1024 : 0};
    const mk_preset *pr = mk_preset_find(preset);
    if (mk_preset_model(pr, &m, &err) || mk_model_resolve(m, NULL, pr->weights, &err) || mk_plan_make(m, &c, &plan, &err) ||
        mk_phases_of(plan->prog, &ph, &err))
        fail_msg("%s: %s", preset, err.msg);
    const mk_program *p = plan->prog;
    uint32_t W = workers, *done = calloc(W, sizeof *done), carried = 0;
    uint32_t (*missing)[1024] = calloc(p->info.n_vec, sizeof *missing); /* who has still to publish it */
    for (uint32_t x = 0; x < p->info.n_insn; x++) {
        const mk_insn *in = &p->insn[x];
        if (in->signal_vec != MK_NONE) missing[in->signal_vec][in->signal_pub]++;
        if (in->opcode == MK_OP_LM_HEAD) missing[in->lm_head.logits_vec][in->lm_head.logits_pub]++;
    }
    for (uint32_t k = 0; k < ph.n; k++) {
        uint32_t any = 0;
        for (uint32_t w = 0; w < W; w++)
            for (uint32_t x = ph.queue[k * W + w]; x < ph.queue[k * W + w + 1]; x++, any++) {
                const mk_insn *in = &ph.insn[x];
                assert_memory_equal(in, &p->insn[p->queue[w] + done[w]], sizeof *in); /* every queue, whole and in order */
                done[w]++;
                for (int i = 0; i < in->nwait; i++)
                    if (p->vec[in->wait[i].vec].scope != MK_LOCAL && missing[in->wait[i].vec][in->wait[i].pub])
                        fail_msg("%s: phase %u, worker %u waits for %s publication %u, of which %u parts are not published", preset, k, w,
                                 p->vec[in->wait[i].vec].name, in->wait[i].pub, missing[in->wait[i].vec][in->wait[i].pub]);
            }
        assert_true(any > 0);
        for (uint32_t x = ph.queue[k * W]; x < ph.queue[(k + 1) * W]; x++) { /* seen by later phases only */
            const mk_insn *in = &ph.insn[x];
            if (in->signal_vec != MK_NONE) missing[in->signal_vec][in->signal_pub]--;
            if (in->opcode == MK_OP_LM_HEAD) missing[in->lm_head.logits_vec][in->lm_head.logits_pub]--;
        }
        if (k == 0) assert_int_equal(ph.load[0], 0);
        if (k + 1 == ph.n) assert_int_equal(ph.save[k], 0);
        for (uint32_t v = 0; v < p->info.n_vec; v++) {
            if ((ph.load[k] | ph.save[k]) >> v & 1) assert_int_equal(p->vec[v].scope, MK_LOCAL);
            carried += ph.load[k] >> v & 1;
        }
    }
    for (uint32_t w = 0; w < W; w++) assert_int_equal(done[w], p->queue[w + 1] - p->queue[w]);
    print_message("%-22s %4u workers: %u phases, %u loads of LOCAL vectors\n", preset, workers, ph.n, carried);
    free(done), free(missing);
    mk_phases_free(&ph);
    mk_plan_destroy(&plan);
    mk_model_destroy(&m);
}

static void every_preset(void **state)
{
    (void)state;
    char names[512], *save = NULL;
    snprintf(names, sizeof names, "%s", mk_preset_names());
    for (char *n = strtok_r(names, ", ", &save); n; n = strtok_r(NULL, ", ", &save)) check(n, 132);
    check("kimi-linear-48b", 33);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_preset)};
    return cmocka_run_group_tests_name("phases", tests, NULL, NULL);
}
