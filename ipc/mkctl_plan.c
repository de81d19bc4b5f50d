/* mkctl plan MODEL: what a model costs on N workers. Needs a config.json (or a preset's name) and no weights. */
#include "ipc/mkctl.h"

#include "host/planner.h"
#include "host/preset.h"
#include "instructions/validate.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void print_layers(const mk_model *m)
{
    uint32_t delta = 0, mla = 0, gqa = 0, dense = 0, moe = 0;
    for (uint32_t l = 0; l < m->layers; l++) {
        delta += m->layer[l].mixer == MK_MIX_DELTA;
        mla += m->layer[l].mixer == MK_MIX_MLA;
        gqa += m->layer[l].mixer == MK_MIX_GQA;
        dense += m->layer[l].ffn == MK_FFN_DENSE;
        moe += m->layer[l].ffn == MK_FFN_MOE;
    }
    printf("model      %s, hidden %u, vocabulary %u, context limit %u\n", m->arch, m->hidden, m->vocab, m->max_context);
    printf("layers     %u: %u delta rule, %u MLA, %u GQA; %u dense, %u MoE\n", m->layers, delta, mla, gqa, dense, moe);
}

static void print_opcodes(const mk_program *p)
{
    uint32_t n[MK_OP_COUNT] = {0};
    for (uint32_t i = 0; i < p->info.n_insn; i++) n[p->insn[i].opcode]++;
    printf("instructions %u (%.1f KB a worker)\n", p->info.n_insn, (double)p->info.n_insn * sizeof(mk_insn) / 1024 / p->info.workers);
    for (unsigned op = 0; op < MK_OP_COUNT; op++)
        if (n[op]) printf("    %-12s %8u\n", mk_opcode_name(op), n[op]);
}

/* One line per kind of phase: the worst layer. */
static uint32_t print_phases(const mk_plan *plan)
{
    uint32_t workers = plan->prog->info.workers, over = 0;
    printf("phases     bytes a step (one row), busiest worker over the mean\n");
    for (size_t i = 0; i < plan->n_phase; i++) {
        const mk_phase *ph = &plan->phase[i];
        size_t first = 0;
        while (strcmp(plan->phase[first].name, ph->name)) first++;
        if (first != i) continue;
        uint64_t bytes = 0;
        uint32_t layers = 0;
        const mk_phase *worst = ph;
        for (size_t k = i; k < plan->n_phase; k++) {
            const mk_phase *q = &plan->phase[k];
            if (strcmp(q->name, ph->name)) continue;
            bytes += q->total;
            layers++;
            if (mk_phase_excess(q, workers) > mk_phase_excess(worst, workers)) worst = q;
        }
        double excess = 100 * mk_phase_excess(worst, workers);
        printf("    %-14s x %-3u %12.3f MB  +%.2f %%", ph->name, layers, (double)bytes / 1e6, excess);
        if (excess > 3.0) {
            printf("   %s", worst->reason ? worst->reason : "UNEXPLAINED");
            over += worst->reason == NULL;
        }
        printf("\n");
    }
    return over;
}

static void print_memory(const mk_plan *plan, uint64_t memory)
{
    const mk_program_info *i = &plan->prog->info;
    double fixed = (double)(i->tape_bytes + i->expert_bytes + i->embed_bytes + i->param_floats * 4 + i->exchange_bytes + i->bulk_bytes);
    double page = (double)i->kv_page_bytes * i->kv_layers, slot = (double)i->state_slot_bytes;
    printf("memory     %.3f GB: tapes %.3f, experts %.3f, embedding %.3f, parameters %.4f, exchange %.4f, bulk %.4f\n", fixed / 1e9,
           (double)i->tape_bytes / 1e9, (double)i->expert_bytes / 1e9, (double)i->embed_bytes / 1e9, (double)i->param_floats * 4 / 1e9,
           (double)i->exchange_bytes / 1e9, (double)i->bulk_bytes / 1e9);
    printf("a stream   %.3f MB of state, %.1f KB of cache a token\n", slot / 1e6, page / MK_PAGE / 1e3);
    printf("fits       in %.1f GB:", (double)memory / 1e9);
    if ((double)memory <= fixed) {
        printf(" not even the weights\n");
        return;
    }
    for (uint32_t context = 2048; context <= 1048576; context *= 8) {
        double each = slot + page * (context / MK_PAGE), streams = each > 0 ? ((double)memory - fixed) / each : 1024;
        printf(" %u x %u", streams > 1024 ? 1024u : (uint32_t)streams, context);
    }
    printf(" (streams x context)\n");
}

int mkctl_plan(int argc, char **argv)
{
    uint32_t workers = 8, context = 2048, smem_kb = 0;
    double gb = 130;
    const char *path = NULL, *out = NULL;
    mkctl_choice weights = MKCTL_WEIGHTS, head = MKCTL_LM_HEAD, cache = MKCTL_KV_CACHE;
    const mkctl_flag flags[] = {
        {"--workers", MKCTL_U32, &workers, "workers (SMs) to plan for"},
        {"--context", MKCTL_U32, &context, "tokens a stream holds, for the bytes of a token"},
        {"--weights", MKCTL_CHOICE, &weights, "auto, fp8 or bf16"},
        {"--lm-head", MKCTL_CHOICE, &head, "auto, fp8 or bf16"},
        {"--kv-cache", MKCTL_CHOICE, &cache, "of latent attention: bf16 or fp8"},
        {"--memory-gb", MKCTL_REAL, &gb, "memory to fill with streams"},
        {"--smem-kb", MKCTL_U32, &smem_kb, "shared memory of a worker (227 on Hopper); 0: no limit, twin only"},
        {"--out", MKCTL_TEXT, &out, "write the program to this file"},
    };
    size_t n = 0;
    int rc = mkctl_flags(argc, argv, flags, sizeof flags / sizeof flags[0], &path, 1, &n);
    if (rc) return rc < 0 ? MK_OK : rc;
    if (!n) return mkctl_usage("plan: name a checkpoint directory, a config.json or a preset");
    if (!context) return mkctl_usage("plan: --context: expected at least 1");
    if (gb < 0 || gb > 1e9) return mkctl_usage("plan: --memory-gb: expected 0 to 10^9, found %g", gb);
    if (smem_kb > UINT32_MAX / 1024) return mkctl_usage("plan: --smem-kb: expected at most %u, found %u", UINT32_MAX / 1024, smem_kb);
    enum mk_weights_mode mode = (enum mk_weights_mode)weights.value;

    mk_err err = {0};
    mk_model *m = NULL;
    mk_plan *plan = NULL;
    mk_validation val;
    mk_plan_config pc = {.workers = workers, .max_context = context, .kv_pages = (context + MK_PAGE - 1) / MK_PAGE, .state_slots = 1,
                         .smem_limit = smem_kb * 1024};
    const mk_preset *preset = access(path, F_OK) ? mk_preset_find(path) : NULL;
    if (preset && mode == MK_WEIGHTS_AUTO) mode = preset->weights;
    if ((rc = preset ? mk_preset_model(preset, &m, &err) : mk_model_read(path, &m, &err)) || (m->lm_head_mode = (uint8_t)head.value, m->kv_cache = (uint8_t)cache.value, rc = mk_model_resolve(m, NULL, mode, &err)) || (rc = mk_plan_make(m, &pc, &plan, &err)) ||
        (rc = mk_validate(plan->prog, &val, &err)) || (out && (rc = mk_program_save(plan->prog, out, &err)))) {
        rc = mkctl_failed("plan", &err);
    } else {
        print_layers(m);
        printf("workers    %u\n", workers);
        print_opcodes(plan->prog);
        double all = mk_bytes_step(&plan->bytes, 1, context), kv = (double)plan->bytes.kv * context, s = (double)plan->bytes.state, w = all - kv - s;
        printf("a token    %.1f MB at context %u: weights %.1f, state %.1f (read and written), cache %.1f\n", all / 1e6, context,
               w / 1e6, s / 1e6, kv / 1e6);
        uint32_t unexplained = print_phases(plan);
        mkctl_print_validation(plan->prog, &val);
        print_memory(plan, (uint64_t)(gb * 1e9));
        if (out) printf("written    %s\n", out);
        if (unexplained) {
            mk_fail(&err, MK_E_BUG, "%u kinds of phase are over 3 %% without a reason", unexplained);
            rc = mkctl_failed("plan", &err);
        }
    }
    mk_plan_destroy(&plan);
    mk_model_destroy(&m);
    return rc;
}
