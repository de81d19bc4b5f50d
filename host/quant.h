/* What the parts of the loader share: host/quant.c, host/checkpoint.c, host/model.c, host/pack.c. */
#ifndef MK_QUANT_H
#define MK_QUANT_H

#include <stdatomic.h>

#include "host/checkpoint.h"

/* The name with its %u, if it holds one, replaced by the expert. */
void mk_expert_name(char out[MK_NAME + 16], const char *name, uint32_t expert);

/* The block scales of FP8 tensor t, after checking their presence, shape and dtype; NULL: err says what is wrong. */
const mk_tensor *mk_scale_tensor(const mk_checkpoint *ck, const mk_tensor *t, mk_err *err);

/* Where rows [row0, row0 + rows) and columns [cb * scale_k, (cb + 1) * scale_k) of a matrix lie in the 128 x 128 blocks of its tensor of
 * `cols` columns. Returns 0 when they lie in several of them. */
int mk_mat_block(const mk_mat *mat, uint64_t cols, uint64_t row0, uint64_t rows, uint32_t cb, uint32_t *trb, uint32_t *tcb);

size_t mk_dtype_bytes(enum mk_st_dtype d); /* 0: no number of a weight */
mk_rows mk_mat_rows(const mk_mat *mat, uint64_t cols); /* cols: of the tensor */

/* Finds a matrix's tensor (expert: for %u names) and, where it is FP8, its scales (else NULL), and refuses whatever mk_mat_fetch could not read. */
int mk_mat_source(const mk_checkpoint *ck, const mk_mat *mat, uint32_t expert, const mk_tensor **t, const mk_tensor **scales, mk_err *err);

/* Rows [row0, row0 + rows) of a tensor of two dimensions, as dst[rows][columns]; scales: of an FP8 tensor, which its values are multiplied by. Refuses values that are not finite. */
int mk_tensor_rows_f32(const mk_tensor *t, const mk_tensor *scales, uint64_t row0, uint32_t rows, float *dst, mk_err *err);

/* A table of n words that belongs to tensor t and purpose `key`, zero at first, kept until the checkpoint is closed: quant.c
 * keeps the scales there that it computed, since slices of a few rows would otherwise read each 128-row block many times. Threads may
 * fill it at the same time (every one of them writes the same values). NULL: out of memory. */
_Atomic uint32_t *mk_checkpoint_scratch(const mk_checkpoint *ck, const mk_tensor *t, uint64_t key, size_t n);

/* A tensor of rows x cols values in f32 that is made of tensor `of`, once, and kept until the checkpoint is closed. make: fills them; must not ask for scratch nor for another such tensor. NULL:
 * it failed. */
const mk_tensor *mk_checkpoint_made(const mk_checkpoint *ck, const mk_tensor *of, uint32_t rows, uint32_t cols, int (*make)(const void *arg, float *to, mk_err *err), const void *arg,
                                    mk_err *err);

#endif
