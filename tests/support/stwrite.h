/* Writes safetensors files and checkpoint directories for tests. */
#ifndef MK_TEST_STWRITE_H
#define MK_TEST_STWRITE_H

#include <stdint.h>

#include "host/checkpoint.h"

typedef struct mk_stw mk_stw;

mk_stw *mk_stw_new(void);
void mk_stw_destroy(mk_stw **w);
void mk_stw_meta(mk_stw *w, const char *key, const char *value);
/* Bytes as they are; data NULL: zeros. */
void mk_stw_raw(mk_stw *w, const char *name, enum mk_st_dtype dtype, uint32_t ndim, const uint64_t *shape, const void *data);
/* f32 values, converted to dtype (F32, F16, BF16, F8_E4M3, F8_E8M0; nearest even). */
void mk_stw_f32(mk_stw *w, const char *name, enum mk_st_dtype dtype, uint32_t ndim, const uint64_t *shape, const float *v);
/* Pseudo-random values in (-amp, amp), different for every name, never 0. F8_E4M3: with <name>_scale_inv of power-of-two scales and
 * dtype `scales`, so that the values are exact in BF16. */
void mk_stw_random(mk_stw *w, const char *name, enum mk_st_dtype dtype, uint32_t ndim, const uint64_t *shape, float amp, enum mk_st_dtype scales);

/* One file. */
void mk_stw_save(const mk_stw *w, const char *path);
/* model.safetensors (shards == 1), or shards in round robin with their index. */
void mk_stw_save_dir(const mk_stw *w, const char *dir, unsigned shards);
/* A file with this header text and n bytes of data behind it: for headers that lie. */
void mk_stw_save_text(const char *path, const char *header, const void *data, size_t n);

uint16_t mk_test_f32_to_f16(float v);
uint16_t mk_test_f32_to_bf16(float v);
uint64_t mk_test_random(uint64_t *state); /* splitmix64 */
size_t mk_test_dtype_bytes(enum mk_st_dtype d);

#endif
