/* A preset with synthetic weights on this machine's GPU, without a daemon: what profiles/baseline and profiles/onestep run. */
#ifndef MK_PROFILES_SYNTHETIC_H
#define MK_PROFILES_SYNTHETIC_H

#include "host/planner.h"
#include "host/preset.h"
#include "megakernel/gpu.h"

typedef struct mk_synthetic {
    mk_model *model;
    mk_plan *plan;
    mk_gpu *gpu;
    uint32_t pages; /* of the stream's, which has MK_MAX_ROWS rows behind the context */
} mk_synthetic;

/* Plans the preset for one stream with `context` tokens, and proves it. *s: zero; mk_synthetic_close also after a failure. */
int mk_synthetic_plan(mk_synthetic *s, const mk_preset *p, enum mk_lm_head_mode lm_head, uint32_t context, mk_err *err);
/* Then: memory of the GPU, weights made there. */
int mk_synthetic_make(mk_synthetic *s, mk_err *err);
void mk_synthetic_close(mk_synthetic *s);

#endif
