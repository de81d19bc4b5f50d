/* A changed copy of a checkpoint: every dtype variant and every negative control of the oracle tests is the committed checkpoint plus
 * an edit. */
#ifndef MK_TEST_EDIT_H
#define MK_TEST_EDIT_H

#include "tests/support/stwrite.h"

/* One tensor on its way into the copy. The callback may change name, shape (ndim) and v: v is f32[product of shape], dequantised when
 * the source is FP8. The product may shrink (v's first values are kept) but not grow. */
typedef struct mk_edit_tensor {
    char name[MK_NAME];
    enum mk_st_dtype dtype; /* of the copy; may be changed (not to or from F8_E4M3) */
    uint32_t ndim;
    uint64_t shape[6];
    float *v;
    int changed; /* set it after writing to v: otherwise a tensor that keeps its dtype is copied byte by byte */
    int drop;    /* leave it out */
} mk_edit_tensor;

typedef void (*mk_edit_fn)(void *arg, mk_edit_tensor *t);

/* Copies checkpoint directory src (config.json, generation_config.json if there, tensors) into directory dst, which exists, as one
 * model.safetensors.
 *   as    MK_ST_BF16, MK_ST_F16 or MK_ST_F32: FP8 tensors become that, their scales and quantization_config are dropped, and tensors
 *         that are BF16, F16 or F32 matrices (two dimensions) become that too. MK_ST_F8_E4M3: dtypes stay. A changed FP8 tensor is
 *         encoded again under its old scales; scale tensors are tensors of their own, in the callback as well.
 *   f     NULL: no edits. Integer tensors are copied without a call.
 * Returns MK_OK or what opening src said. */
int mk_edit_checkpoint(const char *src, const char *dst, enum mk_st_dtype as, mk_edit_fn f, void *arg, mk_err *err);

/* Sets a field of dir/config.json (or another JSON file there) to a JSON value given as text; NULL removes the field. "a.b" reaches
 * into an object. */
void mk_edit_json(const char *dir, const char *file, const char *field, const char *value);

#endif
