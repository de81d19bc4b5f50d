/* The absorbed matrices of latent attention (W_UK, W_UV) as the checkpoint stores them, kv_b_proj: what the self-test holds the tapes against. Builds with a
 * GPU kernel only. */
#ifndef MK_ABSORB_H
#define MK_ABSORB_H

#include "host/checkpoint.h"
#include "host/planner.h"
#include "megakernel/selftest.h"

typedef struct mk_absorb mk_absorb;

/* Plan and checkpoint must outlive it. */
int mk_absorb_new(const mk_plan *plan, const mk_checkpoint *ck, mk_absorb **a, mk_err *err);
void mk_absorb_destroy(mk_absorb **a);

/* A mk_selftest_heads; arg: the mk_absorb. Brings the tensor to the device, as BF16. */
int mk_absorb_heads(void *arg, const mk_insn *in, uint32_t worker, mk_heads *h, mk_err *err);

#endif
