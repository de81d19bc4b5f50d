/* A Hugging Face checkpoint directory: model.safetensors, or shards named by model.safetensors.index.json. Files are mapped read-only
 * and everything in their headers is checked against the file before use. */
#ifndef MK_CHECKPOINT_H
#define MK_CHECKPOINT_H

#include "host/err.h"
#include "host/model.h"

enum mk_st_dtype { MK_ST_F32, MK_ST_F16, MK_ST_BF16, MK_ST_F8_E4M3, MK_ST_F8_E8M0, MK_ST_I32, MK_ST_I64, MK_ST_U8, MK_ST_OTHER };

typedef struct mk_tensor {
    const char *name;
    enum mk_st_dtype dtype;
    uint32_t ndim;
    uint64_t shape[6];
    const void *data; /* in the mapping; valid until the checkpoint is closed; only naturally aligned if the file is */
    uint64_t bytes;
    const char *file; /* for messages */
} mk_tensor;

typedef struct mk_checkpoint mk_checkpoint;

/* Refuses: missing or truncated shard, header that is no JSON or lies about offsets (outside the file, overlapping, holes in the
 * wrong place, size != shape x dtype), a tensor twice, an index that names a file or tensor that is not there. */
int mk_checkpoint_open(const char *dir, mk_checkpoint **ck, mk_err *err);
/* One .safetensors file on its own (goldens of the tests). */
int mk_checkpoint_open_file(const char *path, mk_checkpoint **ck, mk_err *err);
void mk_checkpoint_close(mk_checkpoint **ck);

const mk_tensor *mk_checkpoint_find(const mk_checkpoint *ck, const char *name); /* NULL: not there */
size_t mk_checkpoint_count(const mk_checkpoint *ck);
const mk_tensor *mk_checkpoint_at(const mk_checkpoint *ck, size_t i); /* in name order */
const char *mk_checkpoint_metadata(const mk_checkpoint *ck, const char *key); /* __metadata__ of a single file; NULL */

/* Values of a small parameter as f32, `par->add` added. Refuses a wrong element count and non-finite values. */
int mk_par_fetch(const mk_checkpoint *ck, const mk_par *par, float *dst, mk_err *err);

/* Rows [row0, row0 + rows) of a matrix (expert: for %u names), in the matrix's wtype, row-major [rows][k].
 *  MK_W_BF16: uint16_t dst[rows*k].   MK_W_FP8: uint8_t dst[rows*k] and scales[kb * nseg + seg] as in the segment layout
 *  (seg = (row0 mod 128 + i) / 128; with a scale a row, i).
 * FP8 tensors go through unchanged where blocks allow it; BF16 -> FP8: scale = amax/448 of the row, or of the 128 x scale_k block of the
 * WHOLE matrix (so that a slice's bits do not depend on the slicing), round to nearest even, saturating. Non-finite weights are refused
 * with tensor, row and column. */
int mk_mat_fetch(const mk_checkpoint *ck, const mk_mat *mat, uint32_t expert, uint32_t row0, uint32_t rows, void *dst, float *scales,
                 mk_err *err);

float mk_fp8_to_f32(uint8_t b);     /* e4m3fn */
uint8_t mk_f32_to_fp8(float v);     /* nearest even, saturating at 448; NaN -> 0x7f */

#endif
