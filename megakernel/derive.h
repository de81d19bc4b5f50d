/* Products over heads, C[h] = A[h / group] B[h], while the daemon sets itself up: cuBLAS, opened with dlopen, or plain kernels where it is not there. The
 * arrays of pointers that a batched product takes are written on the device by a small kernel that is told scalars only: no array of the host's, no copy.
 * group 1: every head has its own A (absorbed W_UK, W_UV); group > 1: heads share one (queries over KV heads). Sums are in FP32, never TF32.
 * Handle and workspace exist from open to close: nothing of it is left when the resident kernel is launched. */
#ifndef MK_DERIVE_H
#define MK_DERIVE_H

#include <stddef.h>
#include <stdint.h>

#include "host/err.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mk_blas mk_blas;

/* `library`: a file to open instead of looking for one; NULL: libcublas.so.13, .12 where the dynamic linker looks (LD_LIBRARY_PATH), then in the
 * toolkit's directory. Not finding any is no error: mk_blas_name says what computes, and what was looked for. An unusable `library` is one. */
int mk_blas_open(const char *library, mk_blas **b, mk_err *err);
const char *mk_blas_name(const mk_blas *b); /* "cuBLAS 13.0.2 (libcublas.so.13)", "plain kernels: no libcublas.so.13, ..." */
void mk_blas_close(mk_blas **b);

/* Row-major matrices in device memory, f32 or bf16 (C: f32). Strides in elements: between rows, and between heads (A: between groups). */
typedef struct mk_heads {
    uint32_t heads, group;       /* group divides heads */
    uint32_t m, n, k;            /* A[m][k], B[k][n], C[m][n] */
    int a_bf16, b_bf16, a_transposed; /* A is stored [k][m]; with cuBLAS both of A and B must be of one type */
    const void *a, *b;
    float *c;
    uint64_t a_row, b_row, c_row, a_head, b_head, c_head;
} mk_heads;
int mk_blas_heads(mk_blas *b, const mk_heads *h, mk_err *err); /* returns when it is done */

/* A copy of host memory on the device, for operands; mk_device_free takes NULL. */
int mk_device_copy(const void *host, uint64_t bytes, void **device, mk_err *err);
void mk_device_free(void *device);

/* What the small kernel writes: ptr[0 .. heads) of A, then of B, then of C. For tests. */
int mk_blas_pointers(const mk_heads *h, void **device_ptr, mk_err *err);

#ifdef __cplusplus
}
#endif

#endif
