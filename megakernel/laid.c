#include "megakernel/laid.h"

#include <string.h>

/* What a step executes goes by it. */
typedef struct made_of {
    uint16_t mla, gqa, delta, low_rank; /* 1: it has them */
    uint16_t experts, topk;
} made_of;

static const struct {
    const char *name;
    made_of of;
} row[] = {
    {"all models", {0}},
#define X(symbol, name, ...) {name, {__VA_ARGS__}},
    MK_LAID(X)
#undef X
};

enum mk_laid mk_laid_for(const mk_program *p)
{
    made_of of = {0};
    for (uint32_t i = 0; i < p->info.n_insn; i++) {
        const mk_insn *in = &p->insn[i];
        switch (in->opcode) {
        case MK_OP_MLA_PARTIAL: of.mla = 1; break;
        case MK_OP_GQA_PARTIAL: of.gqa = 1; break;
        case MK_OP_DELTA_STEP:
            of.delta = 1;
            of.low_rank = in->delta.rank != 0;
            break;
        case MK_OP_ROUTE:
            of.experts = in->route.experts;
            of.topk = in->route.topk;
            break;
        default: break;
        }
    }
    for (uint32_t i = 1; i < sizeof row / sizeof *row; i++)
        if (memcmp(&row[i].of, &of, sizeof of) == 0) return (enum mk_laid)i;
    return MK_LAID_FOR_ALL;
}

const char *mk_laid_name(enum mk_laid laid) { return row[laid].name; }
