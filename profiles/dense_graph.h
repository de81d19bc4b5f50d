/* The step of a dense model as a CUDA graph of kernels written for that model and for nothing else, with programmatic dependent launch: what the resident kernel has to be faster than, where the
 * graph of its own functions (megakernel/baseline.h) says only what residency itself is worth. llama-3.2-1b in BF16, one row. */
#ifndef MK_DENSE_GRAPH_H
#define MK_DENSE_GRAPH_H

#include "megakernel/baseline.h"

#ifdef __cplusplus
extern "C" {
#endif
#include "host/planner.h"

/* Whether there are kernels for this model, resolved, and steps of so many rows. */
int mk_dense_graph_fits(const mk_model *m, uint32_t rows);
/* The weights of the plan, which are on the GPU, are copied there as these kernels want them; the cache is the one that they are in. Ids and positions are mk_baseline_run's, so that tokens can be
 * compared; but sums are added in another order, and vectors between kernels are f32 where the program's are bf16. cfg: kind, prefetch and no_overlap do not matter. m: of plan, and it fits. g: not running. */
int mk_dense_graph_run(const mk_model *m, const mk_plan *plan, mk_gpu *g, const mk_baseline_config *cfg, mk_baseline_result *r, mk_err *err);

#ifdef __cplusplus
}
#endif

#endif
