/* Mistakes in latent attention, as edits of a checkpoint (tests/support/oracle.h). */
#ifndef MK_TEST_MLA_EDITS_H
#define MK_TEST_MLA_EDITS_H

#include "tests/support/oracle.h"

/* A kernel that turns (i, i + rope/2) instead of (2i, 2i + 1): rows of q_pe and k_pe in that order. */
void mk_rope_on_halves(void *arg, mk_edit_tensor *t);
/* k_pe out of the scores. */
void mk_drop_rope(void *arg, mk_edit_tensor *t);
/* The latent norms with eps 1e-3 instead of 1e-6: their input 2^-5 times what it is. */
void mk_q_norm_eps(void *arg, mk_edit_tensor *t);
void mk_kv_norm_eps(void *arg, mk_edit_tensor *t);

/* rope_parameters instead of rope_theta and rope_scaling: the same model. */
void mk_oracle_other_rope(const char *dir, const char *rope_parameters);

#endif
