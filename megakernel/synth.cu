#include "megakernel/synth.h"

#include "instructions/latent.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

/* Four words that depend on the counter and the seed alone (splitmix64's finaliser, twice). */
static __device__ uint4 random4(uint64_t counter, uint64_t seed)
{
    uint64_t z[2];
    for (int i = 0; i < 2; i++) {
        uint64_t x = seed + (2 * counter + i + 1) * 0x9e3779b97f4a7c15ull;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
        z[i] = x ^ (x >> 31);
    }
    return make_uint4((uint32_t)z[0], (uint32_t)(z[0] >> 32), (uint32_t)z[1], (uint32_t)(z[1] >> 32));
}

/* Four e4m3 values of magnitude 1/4 .. 1.875/2: exponents 5 and 6, any sign and mantissa. RMS 0.57. */
#define FP8_RMS 0.57f
static __device__ uint32_t fp8x4(uint32_t r)
{
    return (r & 0x8f8f8f8fu) + 0x28282828u; /* bit 3 of the mantissa field is the exponent's lowest */
}

/* Two bf16 values, uniform in +-sqrt(3) gain: RMS gain. */
static __device__ uint32_t bf16x2(uint32_t r, float gain)
{
    float a = ((float)(r & 0xffff) - 32767.5f) * (1.7320508f / 32768.0f) * gain;
    float b = ((float)(r >> 16) - 32767.5f) * (1.7320508f / 32768.0f) * gain;
    __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    return *(uint32_t *)&v;
}

/* 16 bytes a thread and turn: scales first, then [K block][quarter][row][16 bytes]. */
static __global__ void segments(uint8_t *dst, uint64_t stride, uint32_t fp8, uint32_t rows, uint32_t k, uint32_t scales, uint32_t groups,
                                float gain, uint64_t seed)
{
    uint8_t *segment = dst + blockIdx.y * stride;
    for (uint32_t g = blockIdx.x * blockDim.x + threadIdx.x; g < groups; g += gridDim.x * blockDim.x) {
        uint4 v;
        if (g < scales) {
            v.x = v.y = v.z = v.w = __float_as_uint(gain / FP8_RMS);
        } else {
            uint32_t at = g - scales, column = at / rows * (fp8 ? 16 : 8);
            v = random4((uint64_t)blockIdx.y * groups + g, seed);
            if (fp8)
                v = make_uint4(fp8x4(v.x), fp8x4(v.y), fp8x4(v.z), fp8x4(v.w));
            else
                v = make_uint4(bf16x2(v.x, gain), bf16x2(v.y, gain), bf16x2(v.z, gain), bf16x2(v.w, gain));
            if (column >= k) v = make_uint4(0, 0, 0, 0);
        }
        ((uint4 *)segment)[g] = v;
    }
}

static __global__ void values(uint4 *dst, uint64_t groups, float gain, uint64_t seed)
{
    for (uint64_t g = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; g < groups; g += gridDim.x * (uint64_t)blockDim.x) {
        uint4 r = random4(g, seed);
        dst[g] = make_uint4(bf16x2(r.x, gain), bf16x2(r.y, gain), bf16x2(r.z, gain), bf16x2(r.w, gain));
    }
}

/* A thread a row of the cache. */
static __global__ void latents(uint8_t *dst, uint64_t n, uint32_t latent, uint32_t rope, uint64_t seed)
{
    const uint32_t bytes = mk_latent_row_bytes(latent, rope, MK_CACHE_FP8, 2), key = mk_latent_key_at(latent, MK_CACHE_FP8, 2);
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (uint64_t)blockDim.x) {
        uint4 *row = (uint4 *)(dst + i * bytes);
        for (uint32_t k = 0; k < bytes / 16; k++) {
            uint4 r = random4(i * (bytes / 16) + k, seed);
            const float two = 2;
            const uint32_t s = __float_as_uint(two);
            if (16 * k < latent)
                r = make_uint4(fp8x4(r.x), fp8x4(r.y), fp8x4(r.z), fp8x4(r.w));
            else if (16 * k < key)
                r = make_uint4(s, s, s, s);
            else
                r = make_uint4(bf16x2(r.x, 1), bf16x2(r.y, 1), bf16x2(r.z, 1), bf16x2(r.w, 1));
            row[k] = r;
        }
    }
}

static int launched(mk_err *err)
{
    cudaError_t e = cudaGetLastError();
    return e ? mk_fail(err, MK_E_DEVICE, "making weights: %s", cudaGetErrorString(e)) : MK_OK;
}

extern "C" int mk_synth_segments(void *dst, uint32_t count, uint64_t stride, uint32_t wtype, uint32_t rows, uint32_t k, uint32_t scale_rows,
                                 uint32_t scale_k, float gain, uint64_t seed, mk_err *err)
{
    uint64_t scales = mk_segment_scale_bytes(wtype, k, scale_rows, scale_k);
    uint32_t v = mk_kblock_values(wtype), groups = (uint32_t)((scales + (uint64_t)((k + v - 1) / v) * rows * MK_KBLOCK_BYTES) / 16);
    uint32_t blocks = (groups + 255) / 256;
    if (k % (v / 4)) return mk_fail(err, MK_E_MODEL, "synthetic weights: %u columns: expected a multiple of %u", k, v / 4);
    segments<<<dim3(blocks < 64 ? blocks : 64, count), 256>>>((uint8_t *)dst, stride, wtype == MK_W_FP8, rows, k, (uint32_t)(scales / 16), groups,
                                                             gain / sqrtf((float)k), seed);
    return launched(err);
}

extern "C" int mk_synth_bf16(void *dst, uint64_t n, float gain, uint64_t seed, mk_err *err)
{
    if (n % 8) return mk_fail(err, MK_E_MODEL, "synthetic weights: %llu values: expected a multiple of 8", (unsigned long long)n);
    values<<<1024, 256>>>((uint4 *)dst, n / 8, gain, seed);
    return launched(err);
}

extern "C" int mk_synth_latents(void *dst, uint64_t n, uint32_t latent, uint32_t rope, uint64_t seed, mk_err *err)
{
    latents<<<1024, 256>>>((uint8_t *)dst, n, latent, rope, seed);
    return launched(err);
}

extern "C" int mk_synth_finish(mk_err *err)
{
    cudaError_t e = cudaDeviceSynchronize();
    return e ? mk_fail(err, MK_E_DEVICE, "making weights: %s", cudaGetErrorString(e)) : MK_OK;
}
