/* What the resident kernel is measured against, in the same process, on the same memory, with the same device functions:
 *   graph    one kernel for every phase of the program (megakernel/phases.h) in a CUDA graph with programmatic dependent launch: a kernel's prologue and weight
 *            loads begin before the kernel before it is through; when it has issued its own loads it fetches the next kernel's first weights into L2
 *   launch   the whole step as one kernel, launched anew for every step, from a graph as well
 * Both feed themselves: the step's last kernel samples and writes the next step's descriptor, so several steps are chained in one graph launch and the host is
 * not waited for. */
#ifndef MK_BASELINE_H
#define MK_BASELINE_H

#include "megakernel/gpu.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MK_BASELINE_WARM 24u /* steps before those that are measured; tokens are compared from there on */

enum mk_baseline_kind { MK_BASELINE_GRAPH = 0, MK_BASELINE_LAUNCH, MK_BASELINE_RESIDENT };

typedef struct mk_baseline_config {
    enum mk_baseline_kind kind;
    uint32_t context, rows, steps; /* a pinned stream (rings.h, mk_slot.pin): tokens held, rows of a step, steps measured */
    uint32_t vocab;
    uint64_t seed;                 /* of its random ids */
    uint32_t chain;                /* steps of one graph launch */
    uint32_t prefetch;             /* bytes of the next kernel's weights that a worker fetches into L2; GRAPH */
    int no_overlap;                /* 1: plain edges between the graph's kernels, no programmatic launch */
} mk_baseline_config;

typedef struct mk_baseline_result {
    double *step_ms;               /* [steps], device clock; free() it */
    uint32_t *token;               /* [steps] what was chosen; free() it */
    uint32_t kernels;              /* of a step */
} mk_baseline_result;

/* g: weights are there, one slot at least, not running; may be used again afterwards. MK_E_DEVICE when a wait ran out or CUDA complains. */
int mk_baseline_run(mk_gpu *g, const mk_program *p, const mk_baseline_config *cfg, mk_baseline_result *r, mk_err *err);

#ifdef __cplusplus
}
#endif

#endif
