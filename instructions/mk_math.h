/* The elementary functions of every opcode, the same bits on every machine: only IEEE additions, multiplications, divisions and square
 * roots, each rounded once (the host compiles with -ffp-contract=off, the device uses the _rn intrinsics, which are never fused), and
 * no table. Selections are masks of bit patterns, not comparisons of floats: without -ffast-math gcc vectorises a loop only then.
 * Errors against the true value, measured by tests/test_math.c: mk_expf, mk_logf 1.0 ulp, mk_log1pf 1.2, mk_softplusf 1.9,
 * mk_sigmoidf, mk_siluf 2.4, mk_sincosf 0.51.
 * exp, log and log1p follow the reductions and minimax polynomials of Moshier's Cephes (expf.c, logf.c); sine and cosine are their
 * Taylor series in double. */
#ifndef MK_MATH_H
#define MK_MATH_H

#include <math.h>
#include <stdint.h>

#ifdef __CUDACC__
#define MK_FN static __host__ __device__ __forceinline__
#else
#define MK_FN static inline __attribute__((always_inline, unused))
#endif

/* One rounding each. */
#ifdef __CUDA_ARCH__
MK_FN float mk_mul(float a, float b) { return __fmul_rn(a, b); }
MK_FN float mk_add(float a, float b) { return __fadd_rn(a, b); }
/* Division and square root as the hardware's own sequences have them, but without the functions that those call in rare cases: what lives across a call, ptxas
 * keeps alive in every function from which the callee can be reached. The same bits as IEEE's for results that are not subnormal and |a| >= 2^-100. */
MK_FN float mk_div(float a, float b)
{
    const float k = fabsf(b) > 0x1p64f ? 0x1p-64f : fabsf(b) < 0x1p-64f ? 0x1p64f : 1.0f, c = __fmul_rn(b, k);
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(c));
    const float rough = __fmul_rn(a, r);
    r = __fmaf_rn(r, __fmaf_rn(-c, r, 1.0f), r);
    float q = __fmul_rn(a, r);
    q = __fmaf_rn(r, __fmaf_rn(-c, q, a), q);
    q = __fmaf_rn(r, __fmaf_rn(-c, q, a), q);
    return __fmul_rn(q == q ? q : rough, k); /* an infinity or a zero among them makes NaN of q */
}
MK_FN float mk_sqrt(float a)
{
    const bool small = a < 0x1p-64f;
    const float x = small ? __fmul_rn(a, 0x1p64f) : a;
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    float g = __fmul_rn(x, r);
    g = __fmaf_rn(__fmaf_rn(-g, g, x), __fmul_rn(0.5f, r), g);
    return a == 0.0f || a == INFINITY ? a : small ? __fmul_rn(g, 0x1p-32f) : g;
}
MK_FN double mk_dmul(double a, double b) { return __dmul_rn(a, b); }
MK_FN double mk_dadd(double a, double b) { return __dadd_rn(a, b); }
MK_FN float mk_float_of(uint32_t u) { return __uint_as_float(u); }
MK_FN uint32_t mk_bits_of(float f) { return __float_as_uint(f); }
MK_FN uint64_t mk_dbits_of(double d) { return (uint64_t)__double_as_longlong(d); }
#else
MK_FN float mk_mul(float a, float b) { return a * b; }
MK_FN float mk_add(float a, float b) { return a + b; }
MK_FN float mk_div(float a, float b) { return a / b; }
MK_FN float mk_sqrt(float a) { return sqrtf(a); }
MK_FN double mk_dmul(double a, double b) { return a * b; }
MK_FN double mk_dadd(double a, double b) { return a + b; }
MK_FN float mk_float_of(uint32_t u)
{
    union {
        uint32_t u;
        float f;
    } x = {u};
    return x.f;
}
MK_FN uint32_t mk_bits_of(float f)
{
    union {
        float f;
        uint32_t u;
    } x = {f};
    return x.u;
}
MK_FN uint64_t mk_dbits_of(double d)
{
    union {
        double d;
        uint64_t u;
    } x = {d};
    return x.u;
}
#endif

/* All ones where a > b, for a, b < 2^31; and the choice by such a mask. */
MK_FN uint32_t mk_above(uint32_t a, uint32_t b)
{
    return (uint32_t)((int32_t)(b - a) >> 31);
}
MK_FN float mk_pick(uint32_t mask, float yes, float no)
{
    return mk_float_of((mk_bits_of(yes) & mask) | (mk_bits_of(no) & ~mask));
}

/* a * b + c with two roundings. */
MK_FN float mk_mad(float a, float b, float c)
{
    return mk_add(mk_mul(a, b), c);
}
MK_FN double mk_dmad(double a, double b, double c)
{
    return mk_dadd(mk_dmul(a, b), c);
}
MK_FN float mk_rsqrtf(float x)
{
    return mk_div(1.0f, mk_sqrt(x));
}

/* e^x for every x: 0 below -104, +inf above 88.73, subnormal results included, NaN stays NaN. */
MK_FN float mk_expf(float x)
{
    uint32_t u = mk_bits_of(x);
    uint32_t nan = mk_above(u & 0x7fffffffu, 0x7f800000u);
    u = (int32_t)u > 0x42b20000 ? 0x42b20000u : u; /* at most 89 */
    u = u > 0xc2d00000u ? 0xc2d00000u : u;         /* at least -104 */
    const float y = mk_float_of(u);
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer and leaves it in the low bits */
    float t = mk_mad(y, 1.44269504088896341f, magic);
    int32_t n = (int32_t)(mk_bits_of(t) - 0x4b400000u);
    float k = mk_add(t, -magic);
    float r = mk_mad(k, -0.693359375f, y); /* exact: 9 bits times 8 bits, then Sterbenz */
    r = mk_mad(k, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = mk_mad(p, r, 1.3981999507e-3f);
    p = mk_mad(p, r, 8.3334519073e-3f);
    p = mk_mad(p, r, 4.1665795894e-2f);
    p = mk_mad(p, r, 1.6666665459e-1f);
    p = mk_mad(p, r, 5.0000001201e-1f);
    p = mk_add(mk_mad(p, mk_mul(r, r), r), 1.0f);
    int32_t a = n >> 1, b = n - a; /* 2^n in two factors: 2^128 and subnormal results need them */
    float fa = mk_float_of((uint32_t)(a + 127) << 23), fb = mk_float_of((uint32_t)(b + 127) << 23);
    return mk_pick(nan, x, mk_mul(mk_mul(p, fa), fb));
}

/* Natural logarithm: -inf at 0, NaN below, +inf at +inf. */
MK_FN float mk_logf(float x)
{
    uint32_t u = mk_bits_of(x);
    uint32_t mag = u & 0x7fffffffu, small = mk_above(0x00800000u, mag); /* subnormal: times 2^24 */
    uint32_t ix = mk_bits_of(mk_pick(small, mk_mul(x, 16777216.0f), x)) - 0x3f3504f3u; /* mantissa into [sqrt(1/2), sqrt(2)) */
    float e = (float)(((int32_t)ix >> 23) - (int32_t)(small & 24u));
    float f = mk_add(mk_float_of((ix & 0x007fffffu) + 0x3f3504f3u), -1.0f);
    float z = mk_mul(f, f);
    float p = 7.0376836292e-2f;
    p = mk_mad(p, f, -1.1514610310e-1f);
    p = mk_mad(p, f, 1.1676998740e-1f);
    p = mk_mad(p, f, -1.2420140846e-1f);
    p = mk_mad(p, f, 1.4249322787e-1f);
    p = mk_mad(p, f, -1.6668057665e-1f);
    p = mk_mad(p, f, 2.0000714765e-1f);
    p = mk_mad(p, f, -2.4999993993e-1f);
    p = mk_mad(p, f, 3.3333331174e-1f);
    p = mk_mul(mk_mul(p, f), z);
    p = mk_mad(e, -2.12194440e-4f, p);
    p = mk_mad(z, -0.5f, p);
    float r = mk_mad(e, 0.693359375f, mk_add(f, p));
    r = mk_pick((uint32_t)((int32_t)u >> 31), mk_float_of(0x7fc00000u), r);  /* negative */
    r = mk_pick(mk_above(1u, mag), mk_float_of(0xff800000u), r);             /* zero */
    r = mk_pick(mk_above(mag, 0x7f7fffffu)& ~(uint32_t)((int32_t)u >> 31), x, r); /* +inf */
    return mk_pick(mk_above(mag, 0x7f800000u), x, r);
}

/* log(1 + x) for x >= 0. */
MK_FN float mk_log1pf(float x)
{
    float u = mk_add(1.0f, x);
    float c = mk_div(mk_add(x, -mk_add(u, -1.0f)), u); /* what the addition lost */
    c = mk_pick(mk_above(0x4e000000u, mk_bits_of(x) & 0x7fffffffu), c, 0.0f); /* above 2^29: nothing, and no inf - inf */
    return mk_add(mk_logf(u), c);
}

/* log(1 + e^x), linear above 20 as in the reference. */
MK_FN float mk_softplusf(float x)
{
    uint32_t u = mk_bits_of(x), high = mk_above(u & 0x7fffffffu, 0x41a00000u) & ~(uint32_t)((int32_t)u >> 31);
    return mk_pick(high, x, mk_log1pf(mk_expf(x)));
}

MK_FN float mk_sigmoidf(float x)
{
    return mk_div(1.0f, mk_add(1.0f, mk_expf(-x)));
}

/* x * sigmoid(x). */
MK_FN float mk_siluf(float x)
{
    return mk_div(x, mk_add(1.0f, mk_expf(-x)));
}

/* Sine and cosine of |x| <= 2^20 (rotary angles in radians). */
MK_FN void mk_sincosf(float x, float *sine, float *cosine)
{
    const double magic = 6755399441055744.0; /* 1.5 * 2^52 */
    double d = (double)x;
    double t = mk_dmad(d, 0.63661977236758134308, magic);
    uint32_t q = (uint32_t)mk_dbits_of(t) & 3u;
    double k = mk_dadd(t, -magic);
    double r = mk_dmad(k, -1.57079632673412561417, d); /* pi/2: 33 bits, so the product is exact; then the rest */
    r = mk_dmad(k, -6.07710050650619224932e-11, r);
    double z = mk_dmul(r, r);
    double s = -7.6471637318198164759e-13;
    s = mk_dmad(s, z, 1.6059043836821614599e-10);
    s = mk_dmad(s, z, -2.5052108385441718775e-08);
    s = mk_dmad(s, z, 2.7557319223985890653e-06);
    s = mk_dmad(s, z, -1.9841269841269841270e-04);
    s = mk_dmad(s, z, 8.3333333333333333333e-03);
    s = mk_dmad(s, z, -1.6666666666666666667e-01);
    s = mk_dmad(mk_dmul(s, z), r, r);
    double c = 4.7794773323873852974e-14;
    c = mk_dmad(c, z, -1.1470745597729724714e-11);
    c = mk_dmad(c, z, 2.0876756987868098979e-09);
    c = mk_dmad(c, z, -2.7557319223985890653e-07);
    c = mk_dmad(c, z, 2.4801587301587301587e-05);
    c = mk_dmad(c, z, -1.3888888888888888889e-03);
    c = mk_dmad(c, z, 4.1666666666666666667e-02);
    c = mk_dmad(c, z, -0.5);
    c = mk_dmad(c, z, 1.0);
    double a = (q & 1u) ? c : s, b = (q & 1u) ? s : c;
    *sine = (float)((q & 2u) ? -a : a);
    *cosine = (float)(((q + 1u) & 2u) ? -b : b);
}

#endif
