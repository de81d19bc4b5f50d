/* CUDA's words and types for device code that a C++ compiler reads; before everything else. */
#ifndef MK_LANES_CUDA_H
#define MK_LANES_CUDA_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define __CUDACC__ 1
#define __host__
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __noinline__

typedef struct uint4 {
    uint32_t x, y, z, w;
} uint4;
typedef struct uint2 {
    uint32_t x, y;
} uint2;
typedef struct float2 {
    float x, y;
} float2;
typedef struct float4 {
    float x, y, z, w;
} float4;
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return {x, y, z, w};
}
static inline uint2 make_uint2(uint32_t x, uint32_t y)
{
    return {x, y};
}
static inline float2 make_float2(float x, float y)
{
    return {x, y};
}
static inline float4 make_float4(float x, float y, float z, float w)
{
    return {x, y, z, w};
}

#endif
