/* profiles/onestep: single steps of a preset with synthetic weights, a launch each, for ncu to look into (profiles/layout.sh): rows of one stream at a context that was never written.
 * It is linked with the kernel in nvcc's order (Makefile), so that its code is in the order that megakernel/layout.py and line numbers (make LINEINFO=1) know. */
#include "ipc/mkctl.h"
#include "megakernel/twin.h"
#include "profiles/synthetic.h"

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

/* Slot 0 has all pages, in order, and draws like this. */
static int open_slot(mk_gpu *g, uint32_t pages, const mk_sampling *sampling, mk_err *err)
{
    mk_memory m;
    memset(&m, 0, sizeof m);
    m.slot = calloc(1, sizeof *m.slot);
    m.page = malloc(pages * sizeof *m.page);
    for (uint32_t i = 0; m.page && i < pages; i++) m.page[i] = i;
    if (m.slot) m.slot->sampling = *sampling;
    int rc = m.slot && m.page ? mk_gpu_load(g, &m, MK_REGION_PAGE, err) : mk_fail(err, MK_E_CAPACITY, "out of memory");
    free(m.slot);
    free(m.page);
    return rc;
}

static int run(const mk_preset *p, uint32_t context, uint32_t rows, const mk_sampling *sampling, uint32_t steps, mk_err *err)
{
    mk_synthetic made = {0};
    mk_insn *insn = NULL;
    uint32_t *queue = NULL;
    int rc = mk_synthetic_plan(&made, p, MK_LM_HEAD_AUTO, context, err);
    if (!rc) rc = mk_synthetic_make(&made, err);
    if (!rc) rc = open_slot(made.gpu, made.pages, sampling, err);
    const mk_program *prog = made.plan ? made.plan->prog : NULL;
    if (!rc && (!(insn = malloc(prog->info.n_insn * sizeof *insn)) || !(queue = malloc((prog->info.workers + 1) * sizeof *queue)))) rc = mk_fail(err, MK_E_CAPACITY, "out of memory");
    if (!rc) unscheduled(prog, insn, queue);
    for (uint32_t i = 0; i < steps && !rc; i++) {
        mk_step s;
        memset(&s, 0, sizeof s);
        s.nrows = rows;
        s.any_logits = 1;
        for (uint32_t r = 0; r < rows; r++) {
            s.row[r].token = (1234 + 77 * (i * rows + r)) % made.model->vocab;
            s.row[r].pos = context + r;
            s.row[r].flags = MK_ROW_LOGITS | MK_ROW_SAMPLE | (sampling->temperature > 0 ? 0 : MK_ROW_GREEDY);
        }
        rc = mk_gpu_once(made.gpu, insn, queue, &s, 1000 * (i + 1), 5000, err);
    }
    free(insn);
    free(queue);
    mk_synthetic_close(&made);
    return rc;
}

int main(int argc, char **argv)
{
    const char *preset = "kimi-linear-48b";
    uint32_t context = 2048, rows = 1, steps = 3;
    double temperature = 0, top_p = 1;
    const mkctl_flag flag[] = {{"--preset", MKCTL_TEXT, &preset, "which"},
                               {"--ctx", MKCTL_U32, &context, "position of the first row"},
                               {"--rows", MKCTL_U32, &rows, "rows of a step"},
                               {"--temperature", MKCTL_REAL, &temperature, "0: greedy"},
                               {"--top-p", MKCTL_REAL, &top_p, "with a temperature"},
                               {"--steps", MKCTL_U32, &steps, "launches"}};
    argv[0] = (char *)"onestep";
    int rc = mkctl_flags(argc, argv, flag, sizeof flag / sizeof flag[0], NULL, 0, NULL);
    if (rc) return rc < 0 ? 0 : rc;
    const mk_preset *p = mk_preset_find(preset);
    if (!p) return mkctl_usage("onestep: no preset \"%s\", there are %s", preset, mk_preset_names());
    if (!context || context > 1u << 24 || !rows || rows > MK_MAX_ROWS || !steps || steps > 1000)
        return mkctl_usage("onestep: expected --ctx 1 to 16777216, --rows 1 to %u, --steps 1 to 1000", MK_MAX_ROWS);
    if (!(temperature >= 0 && temperature <= 100) || !(top_p > 0 && top_p <= 1)) return mkctl_usage("onestep: expected --temperature 0 to 100, --top-p above 0, at most 1");
    mk_err err = {0};
    const mk_sampling sampling = {.temperature = (float)temperature, .top_p = (float)top_p};
    rc = run(p, context, rows, &sampling, steps, &err);
    return rc ? mkctl_failed("onestep", &err) : MK_OK;
}
