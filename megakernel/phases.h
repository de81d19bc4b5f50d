/* A program cut into phases: what could be one kernel each. Every exchange separates phases: an instruction stands in the first one that comes after everything it
 * waits for, except what its own worker computed into LOCAL memory, and not before its predecessor in the queue. Instructions that have nothing to do in a step of one
 * row (GQA_APPEND, whose row the partials write; COMBINE of one split, which a GQA_PARTIAL publishes) are no phase of their own. For the baselines
 * (megakernel/baseline.cu). */
#ifndef MK_PHASES_H
#define MK_PHASES_H

#ifdef __cplusplus
extern "C" {
#endif
#include "instructions/program.h"

typedef struct mk_phases {
    uint32_t n;         /* phases */
    mk_insn *insn;      /* [n_insn] by phase, then by worker, in the queue's order. Flags, tape offsets and seq are the program's */
    uint32_t *queue;    /* [n * workers + 1] phase p, worker w: insn[queue[p * workers + w] .. queue[p * workers + w + 1]) */
    uint64_t *load;     /* [n] LOCAL vectors (bit = number; at most 64 vectors) that some worker reads in it and an earlier phase wrote */
    uint64_t *save;     /* [n] and that it writes and a later phase reads */
    uint32_t routes;    /* number of ROUTE's LOCAL vector; MK_NONE: there is none */
} mk_phases;

/* For steps of `rows` rows, the last one at position pos. MK_E_BUG: more than 64 vectors, or waits that no publication answers (a program that the validator refuses). */
int mk_phases_of(const mk_program *p, uint32_t rows, uint32_t pos, mk_phases *ph, mk_err *err);
void mk_phases_free(mk_phases *ph);

#ifdef __cplusplus
}
#endif

#endif
