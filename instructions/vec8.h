/* Eight f32 lanes in GCC's vector extension, for the twin's hot loops. A sum "in eight lanes" adds value i to lane i mod 8, in ascending
 * order, and ends with mk_lanes: the same bits whatever the machine's vectors are. */
#ifndef MK_VEC8_H
#define MK_VEC8_H

#include <stdint.h>
#include <string.h>

#include "instructions/mk_math.h"

typedef float mk_f8 __attribute__((vector_size(32)));
typedef uint32_t mk_u8x __attribute__((vector_size(32)));
typedef uint16_t mk_h8 __attribute__((vector_size(16)));

#define MK_INLINE static inline __attribute__((always_inline, unused))
/* Bits do not depend on the clone: every lane does the same roundings in the same order (-ffp-contract=off). */
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__)
#define MK_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define MK_CLONES
#endif

MK_INLINE mk_f8 mk_load8(const float *p)
{
    mk_f8 v;
    memcpy(&v, p, sizeof v);
    return v;
}
MK_INLINE void mk_store8(float *p, mk_f8 v)
{
    memcpy(p, &v, sizeof v);
}
MK_INLINE mk_f8 mk_load8_bf16(const uint16_t *p)
{
    mk_h8 h;
    memcpy(&h, p, sizeof h);
    return (mk_f8)(__builtin_convertvector(h, mk_u8x) << 16);
}
MK_INLINE float mk_lanes(mk_f8 a)
{
    return ((a[0] + a[4]) + (a[1] + a[5])) + ((a[2] + a[6]) + (a[3] + a[7]));
}
/* Sum of n values in eight lanes; what is left over is added to the lanes it falls to. */
MK_INLINE float mk_sum8(const float *x, uint32_t n)
{
    mk_f8 a = {0}, tail = {0};
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8) a += mk_load8(x + i);
    for (uint32_t k = 0; i < n; i++, k++) tail[k] = x[i];
    return mk_lanes(a + tail);
}
/* Sum of squares, likewise. */
MK_INLINE float mk_sumsq8(const float *x, uint32_t n)
{
    mk_f8 a = {0}, tail = {0};
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        mk_f8 v = mk_load8(x + i);
        a += v * v;
    }
    for (uint32_t k = 0; i < n; i++, k++) tail[k] = x[i];
    return mk_lanes(a + tail * tail);
}

/* x <- x * gamma / sqrt(mean(x^2) + eps). */
MK_INLINE void mk_head_norm(float *x, const float *gamma, uint32_t n, float eps)
{
    float rstd = mk_rsqrtf(mk_sumsq8(x, n) / (float)n + eps);
    for (uint32_t i = 0; i < n; i++) x[i] = x[i] * rstd * gamma[i];
}

#endif
