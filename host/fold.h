/* W_UK times the rows of q_b that make q_nope, head by head: MK_SRC_FOLDED (host/formats.h). */
#ifndef MK_FOLD_H
#define MK_FOLD_H

#include "host/checkpoint.h"

typedef struct mk_fold {
    const mk_checkpoint *ck;
    const mk_mat *mat;            /* MK_SRC_FOLDED */
    const mk_tensor *q, *q_scale; /* its tensor; q_scale: of an FP8 one, else NULL */
} mk_fold;

/* The product, to[mat->n][mat->k], a thread a processor that it may run on; the bits do not depend on how many. arg: a mk_fold. Refuses values that are not finite. */
int mk_fold_make(const void *arg, float *to, mk_err *err);

#endif
