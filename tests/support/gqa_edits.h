/* Mistakes in grouped-query attention and gated delta nets, as edits of a checkpoint (tests/support/oracle.h). */
#ifndef MK_TEST_GQA_EDITS_H
#define MK_TEST_GQA_EDITS_H

#include "tests/support/oracle.h"

/* Rows of every head (stride rows apart), the first `rope` of them, so that a half-split rotation turns what an interleaved one would:
 * rows 0, rope/2, 1, rope/2 + 1, ... become rows 0, 1, 2, ... Vectors: values likewise. */
void mk_edit_interleave(mk_edit_tensor *t, uint32_t stride, uint32_t rope);
/* Row i becomes row i + n (mod all rows). */
void mk_edit_roll(mk_edit_tensor *t, uint64_t n);
/* Blocks of n rows change places within every group of `stride` rows: [off, off + n) and [off2, off2 + n). */
void mk_edit_swap(mk_edit_tensor *t, uint64_t stride, uint64_t off, uint64_t off2, uint64_t n);

/* The family of Qwen3-Next: sizes of tests/oracle/make_qwen3_next.py. */
extern const mk_oracle_control mk_qwen_controls[];
extern const size_t mk_qwen_controls_n;     /* all */
extern const size_t mk_qwen_controls_dense; /* the first so many need neither experts nor two KV heads */

#endif
