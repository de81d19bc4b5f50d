/* Synthetic weights for a plan, made on the device where they stay (builds with a GPU kernel only). */
#ifndef MK_HOST_SYNTH_H
#define MK_HOST_SYNTH_H

#include "host/planner.h"
#include "megakernel/gpu.h"

/* Random matrices and embedding (megakernel/synth.h), norms 1, biases 0; the cache is filled with random values too, so that attention over tokens that never
 * were has something to read. Between mk_gpu_new and mk_gpu_start. */
int mk_synthesize(const mk_plan *plan, mk_gpu *gpu, mk_err *err);

#endif
