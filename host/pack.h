/* Fills a machine's weight regions from a checkpoint, as a plan says. The twin's way; a GPU packs with kernels from the raw tensors. */
#ifndef MK_PACK_H
#define MK_PACK_H

#include "host/checkpoint.h"
#include "host/planner.h"
#include "instructions/op.h"

int mk_pack(const mk_plan *plan, const mk_checkpoint *ck, mk_memory *mem, mk_err *err);

#endif
