extern "C" { /* C headers */
#include "megakernel/derive.h"
}

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The few words of cuBLAS that are needed: its header need not be there. */
enum { OP_N = 0, OP_T = 1, COMPUTE_32F_PEDANTIC = 69, GEMM_DEFAULT = -1 };
typedef struct cublas {
    int (*create)(void **handle);
    int (*destroy)(void *handle);
    int (*version)(void *handle, int *v);
    int (*stream)(void *handle, cudaStream_t s);
    int (*workspace)(void *handle, void *p, size_t bytes);
    int (*gemm)(void *handle, int transa, int transb, int m, int n, int k, const void *alpha, const void *const a[], cudaDataType ta, int lda,
                const void *const b[], cudaDataType tb, int ldb, const void *beta, void *const c[], cudaDataType tc, int ldc, int batch, int compute, int algo);
} cublas;

#define WORKSPACE (32u << 20)

struct mk_blas {
    void *library, *handle, *workspace;
    cublas f;
    cudaStream_t stream;
    char name[400];
};

static int failed(mk_err *err, const char *what, cudaError_t e)
{
    return mk_fail(err, MK_E_DEVICE, "products over heads: %s: %s", what, cudaGetErrorString(e));
}

/* ---- kernels -------------------------------------------------------------------------------------------------------- */

static __global__ void pointers(mk_heads h, const void **p)
{
    for (uint32_t i = threadIdx.x; i < h.heads; i += blockDim.x) {
        p[i] = (const uint8_t *)h.a + (i / h.group) * h.a_head * (h.a_bf16 ? 2 : 4);
        p[h.heads + i] = (const uint8_t *)h.b + i * h.b_head * (h.b_bf16 ? 2 : 4);
        p[2 * h.heads + i] = h.c + i * h.c_head;
    }
}

static __device__ float value(const void *p, int bf16, uint64_t i)
{
    return bf16 ? __bfloat162float(((const __nv_bfloat16 *)p)[i]) : ((const float *)p)[i];
}

/* One value of C a thread. */
static __global__ void products(mk_heads h, const void *const *p)
{
    const uint32_t at = blockIdx.x * blockDim.x + threadIdx.x, i = at / h.n, j = at % h.n, head = blockIdx.y;
    if (i >= h.m) return;
    float sum = 0;
    for (uint32_t k = 0; k < h.k; k++)
        sum = fmaf(value(p[head], h.a_bf16, h.a_transposed ? k * h.a_row + i : i * h.a_row + k), value(p[h.heads + head], h.b_bf16, k * h.b_row + j), sum);
    ((float *)p[2 * h.heads + head])[i * h.c_row + j] = sum;
}

/* ---- the library ---------------------------------------------------------------------------------------------------- */

static int load(mk_blas *b, const char *file)
{
    b->library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!b->library) return 0;
    struct {
        const char *name;
        void **f;
    } need[] = {{"cublasCreate_v2", (void **)&b->f.create},           {"cublasDestroy_v2", (void **)&b->f.destroy},
                {"cublasGetVersion_v2", (void **)&b->f.version},      {"cublasSetStream_v2", (void **)&b->f.stream},
                {"cublasSetWorkspace_v2", (void **)&b->f.workspace},  {"cublasGemmBatchedEx", (void **)&b->f.gemm}};
    for (auto &n : need)
        if (!(*n.f = dlsym(b->library, n.name))) return 0;
    return 1;
}

extern "C" int mk_blas_open(const char *library, mk_blas **out, mk_err *err)
{
    static const char *const files[] = {"libcublas.so.13", "libcublas.so.12", "/usr/local/cuda/lib64/libcublas.so.13", "/usr/local/cuda/lib64/libcublas.so"};
    const char *found = NULL;
    int v = 0;
    mk_blas *b = (mk_blas *)calloc(1, sizeof *b);
    *out = b;
    if (!b) return mk_fail(err, MK_E_CAPACITY, "out of memory");
    cudaError_t e = cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking);
    if (e) return failed(err, "stream", e);
    if (library) {
        if (!load(b, library)) return mk_fail(err, MK_E_DEVICE, "%.200s: no usable cuBLAS: %.200s", library, b->library ? "a function is missing" : dlerror());
        found = library;
    }
    for (size_t i = 0; i < sizeof files / sizeof *files && !found; i++)
        if (load(b, files[i])) found = files[i];
    if (!found) {
        snprintf(b->name, sizeof b->name, "plain kernels: no %s, %s (LD_LIBRARY_PATH), %s or %s", files[0], files[1], files[2], files[3]);
        return MK_OK;
    }
    if ((e = cudaMalloc(&b->workspace, WORKSPACE))) return failed(err, "workspace", e);
    int rc = b->f.create(&b->handle);
    if (!rc) rc = b->f.version(b->handle, &v);
    if (!rc) rc = b->f.stream(b->handle, b->stream);
    if (!rc) rc = b->f.workspace(b->handle, b->workspace, WORKSPACE);
    if (rc) return mk_fail(err, MK_E_DEVICE, "%.200s: cuBLAS says %d", found, rc);
    snprintf(b->name, sizeof b->name, "cuBLAS %d.%d.%d (%.300s)", v / 10000, v / 100 % 100, v % 100, found);
    return MK_OK;
}

extern "C" const char *mk_blas_name(const mk_blas *b)
{
    return b->name;
}

extern "C" void mk_blas_close(mk_blas **p)
{
    mk_blas *b = *p;
    if (!b) return;
    if (b->handle) b->f.destroy(b->handle);
    if (b->workspace) cudaFree(b->workspace);
    if (b->stream) cudaStreamDestroy(b->stream);
    free(b); /* the library stays mapped: unloading one that has used the GPU is not safe */
    *p = NULL;
}

extern "C" int mk_device_copy(const void *host, uint64_t bytes, void **device, mk_err *err)
{
    cudaError_t e = cudaMalloc(device, bytes);
    if (!e && (e = cudaMemcpy(*device, host, bytes, cudaMemcpyHostToDevice))) cudaFree(*device);
    if (e) *device = NULL;
    return e ? failed(err, "operand", e) : MK_OK;
}

extern "C" void mk_device_free(void *device)
{
    if (device) cudaFree(device);
}

extern "C" int mk_blas_pointers(const mk_heads *h, void **device_ptr, mk_err *err)
{
    pointers<<<1, 256>>>(*h, (const void **)device_ptr);
    cudaError_t e = cudaDeviceSynchronize();
    return e ? failed(err, "pointers", e) : MK_OK;
}

extern "C" int mk_blas_heads(mk_blas *b, const mk_heads *h, mk_err *err)
{
    const void **p = NULL;
    if (!h->group || h->heads % h->group) return mk_fail(err, MK_E_BUG, "products over heads: %u heads in groups of %u", h->heads, h->group);
    cudaError_t e = cudaMalloc((void **)&p, 3ull * h->heads * sizeof *p);
    if (e) return failed(err, "pointers", e);
    int rc = MK_OK;
    pointers<<<1, 256, 0, b->stream>>>(*h, p);
    if (b->handle && h->a_bf16 == h->b_bf16) {
        /* cuBLAS counts columns first: C^T = B^T A^T. */
        const float one = 1, zero = 0;
        const cudaDataType type = h->a_bf16 ? CUDA_R_16BF : CUDA_R_32F;
        int s = b->f.gemm(b->handle, OP_N, h->a_transposed ? OP_T : OP_N, (int)h->n, (int)h->m, (int)h->k, &one, p + h->heads, type, (int)h->b_row, p, type,
                          (int)h->a_row, &zero, (void *const *)(p + 2 * h->heads), CUDA_R_32F, (int)h->c_row, (int)h->heads, COMPUTE_32F_PEDANTIC, GEMM_DEFAULT);
        if (s) rc = mk_fail(err, MK_E_DEVICE, "cuBLAS, %u x (%u x %u x %u): status %d", h->heads, h->m, h->n, h->k, s);
    } else {
        products<<<dim3((h->m * h->n + 127) / 128, h->heads), 128, 0, b->stream>>>(*h, p);
    }
    if (!rc && ((e = cudaGetLastError()) || (e = cudaStreamSynchronize(b->stream)))) rc = failed(err, "product", e);
    cudaFree(p);
    return rc;
}
