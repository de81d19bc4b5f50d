/* Fills a machine's weight regions from a checkpoint, as a plan says: mk_pack on the CPU, into the twin's memory; mk_pack_gpu (host/pack_gpu.c) with
 * kernels that write the same bytes in place. */
#ifndef MK_PACK_H
#define MK_PACK_H

#include "host/checkpoint.h"
#include "host/planner.h"
#include "instructions/op.h"
#include "megakernel/pack_core.h"

int mk_pack(const mk_plan *plan, const mk_checkpoint *ck, mk_memory *mem, mk_err *err);

/* The parameter region alone, param[param_floats]: small, and converted by the CPU on either way. */
int mk_pack_params(const mk_plan *plan, const mk_checkpoint *ck, float *param, mk_err *err);

/* Everything else, tensor by tensor: the order of a machine that brings each tensor over once, in bounded pieces, and packs all the segments that
 * have rows of it. */
typedef struct mk_pack_matrix {
    const mk_mat *mat;
    uint8_t kind, wtype;    /* enum mk_pack_kind: the region */
    uint32_t first, n;      /* its segments */
    uint32_t experts;       /* 1: no expert's */
    uint64_t expert_stride;
} mk_pack_matrix;
typedef struct mk_pack_list {
    mk_pack_seg *seg;       /* [n_seg], a matrix's together, by row */
    mk_pack_matrix *matrix; /* [n_matrix] */
    uint32_t n_seg, n_matrix;
} mk_pack_list;
int mk_pack_list_make(const mk_plan *plan, mk_pack_list *l, mk_err *err); /* mk_pack_list_free it in any case */
void mk_pack_list_free(mk_pack_list *l);

typedef struct mk_pack_unit {
    mk_pack_piece piece; /* data and scales lie in the checkpoint's mapping; block and dst are NULL */
    uint64_t data_bytes, scale_bytes;
    const mk_pack_matrix *matrix;
    uint32_t expert;
    uint64_t dst;        /* of this expert in the region: expert * expert_stride */
    uint32_t first, n;   /* segments that may have rows of the piece: seg[first .. first + n) of the list */
    uint32_t blocks;     /* floats of piece.block */
} mk_pack_unit;
/* Calls f for every unit, of `limit` bytes of data at most where the matrix can be cut (128 whole rows of it, or all heads, are not). Stops when f
 * returns an error, and returns it. */
typedef int (*mk_pack_unit_fn)(void *arg, const mk_pack_unit *u, mk_err *err);
int mk_pack_units(const mk_pack_list *l, const mk_checkpoint *ck, uint64_t limit, mk_pack_unit_fn f, void *arg, mk_err *err);

/* Only in a build with nvcc. Fills the regions of `device` (zeros before: padding is not written) on the current GPU. seconds, bytes: how long it took, and what was read of the
 * checkpoint. The message about a weight that cannot be packed is mk_pack's. */
int mk_pack_gpu(const mk_plan *plan, const mk_checkpoint *ck, const mk_memory *device, double *seconds, uint64_t *bytes, mk_err *err);

#endif
