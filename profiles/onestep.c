/* profiles/onestep: single steps of a preset with synthetic weights, a launch each, for ncu to look into (profiles/layout.sh): one row, greedy, at a context that was never written. It is linked
 * with the kernel as nvcc made it (Makefile), so that its code is in the order that megakernel/layout.py and line numbers know. */
#include "host/machine.h"
#include "host/planner.h"
#include "host/preset.h"
#include "host/synth.h"
#include "ipc/mkctl.h"
#include "megakernel/gpu.h"
#include "megakernel/twin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The program without SCHEDULE, which would go to the host. The arrays are the caller's: as long as the program's. */
static void unscheduled(const mk_program *p, mk_insn *insn, uint32_t *queue)
{
    uint32_t n = 0;
    for (uint32_t w = 0; w < p->info.workers; w++) {
        queue[w] = n;
        for (uint32_t i = p->queue[w]; i < p->queue[w + 1]; i++)
            if (p->insn[i].opcode != MK_OP_SCHEDULE) insn[n++] = p->insn[i];
    }
    queue[p->info.workers] = n;
}

/* Slot 0 has all pages, in order. */
static int open_slot(mk_gpu *g, uint32_t pages, mk_err *err)
{
    mk_memory m;
    memset(&m, 0, sizeof m);
    m.slot = calloc(1, sizeof *m.slot);
    m.page = malloc(pages * sizeof *m.page);
    for (uint32_t i = 0; m.page && i < pages; i++) m.page[i] = i;
    int rc = m.slot && m.page ? mk_gpu_load(g, &m, MK_REGION_PAGE, err) : mk_fail(err, MK_E_CAPACITY, "out of memory");
    free(m.slot);
    free(m.page);
    return rc;
}

static int run(const mk_preset *p, uint32_t context, uint32_t steps, mk_err *err)
{
    const uint32_t pages = (context + MK_PAGE) / MK_PAGE;
    mk_machine_limits limits;
    mk_model *m = NULL;
    mk_plan *plan = NULL;
    mk_gpu *g = NULL;
    mk_insn *insn = NULL;
    uint32_t *queue = NULL;
    int rc = mk_machine_gpu_limits(&limits, err);
    if (!rc) rc = mk_preset_model(p, &m, err);
    if (!rc) rc = mk_model_resolve(m, NULL, p->weights, err);
    mk_plan_config pc = {.workers = limits.workers, .max_context = pages * MK_PAGE, .kv_pages = pages, .state_slots = 1, .smem_limit = limits.smem};
    if (!rc) rc = mk_plan_make(m, &pc, &plan, err);
    mk_gpu_config gc = {.slots = 1, .context = pages * MK_PAGE};
    if (!rc) rc = mk_gpu_new(plan->prog, &gc, &g, err);
    if (!rc) rc = mk_synthesize(plan, g, err);
    if (!rc) rc = open_slot(g, pages, err);
    if (!rc && (!(insn = malloc(plan->prog->info.n_insn * sizeof *insn)) || !(queue = malloc((plan->prog->info.workers + 1) * sizeof *queue)))) rc = mk_fail(err, MK_E_CAPACITY, "out of memory");
    if (!rc) unscheduled(plan->prog, insn, queue);
    for (uint32_t i = 0; i < steps && !rc; i++) {
        mk_step s;
        memset(&s, 0, sizeof s);
        s.nrows = s.any_logits = 1;
        s.row[0].token = (1234 + 77 * i) % m->vocab;
        s.row[0].pos = context;
        s.row[0].flags = MK_ROW_LOGITS | MK_ROW_SAMPLE | MK_ROW_GREEDY;
        rc = mk_gpu_once(g, insn, queue, &s, 1000 * (i + 1), 5000, err);
    }
    free(insn);
    free(queue);
    mk_gpu_destroy(&g);
    mk_plan_destroy(&plan);
    mk_model_destroy(&m);
    return rc;
}

int main(int argc, char **argv)
{
    const char *preset = "kimi-linear-48b";
    uint32_t context = 2048, steps = 3;
    const mkctl_flag flag[] = {{"--preset", MKCTL_TEXT, &preset, "which"},
                               {"--ctx", MKCTL_U32, &context, "position of the row"},
                               {"--steps", MKCTL_U32, &steps, "launches"}};
    argv[0] = (char *)"onestep";
    int rc = mkctl_flags(argc, argv, flag, sizeof flag / sizeof flag[0], NULL, 0, NULL);
    if (rc) return rc < 0 ? 0 : rc;
    const mk_preset *p = mk_preset_find(preset);
    if (!p) return mkctl_usage("onestep: no preset \"%s\", there are %s", preset, mk_preset_names());
    if (!context || context > 1u << 24 || !steps || steps > 1000) return mkctl_usage("onestep: expected --ctx 1 to 16777216, --steps 1 to 1000");
    mk_err err = {0};
    rc = run(p, context, steps, &err);
    return rc ? mkctl_failed("onestep", &err) : MK_OK;
}
