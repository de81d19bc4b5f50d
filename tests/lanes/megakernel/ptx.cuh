/* What device code finds in place of megakernel/ptx.cuh, and of CUDA, where it runs on a CPU (tests/lanes/lanes.h): as much as gathering, attention and EXPERT_DOWN want. */
#ifndef MK_PTX_CUH
#define MK_PTX_CUH

#include "host/formats.h"
#include "tests/lanes/lanes.h"
#include <type_traits>

#define MK_DEV      static inline __attribute__((unused))
#define MK_CALL     static __attribute__((unused, noinline))
#define MK_ARRIVALS 1u

/* ---- CUDA ----------------------------------------------------------------------------------------------------------- */

MK_DEV float __uint_as_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
MK_DEV uint32_t __float_as_uint(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
MK_DEV float __fmul_rn(float a, float b) { return a * b; }
MK_DEV float __fadd_rn(float a, float b) { return a + b; }
MK_DEV float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
MK_DEV int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
MK_DEV int __popc(uint32_t x) { return __builtin_popcount(x); }
MK_DEV uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint32_t)((uint64_t)a * b >> 32); }
template <typename T> MK_DEV T __ldg(const T *p) { return *p; }
MK_DEV uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }
MK_DEV uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
MK_DEV uint32_t min(uint32_t a, uint16_t b) { return a < b ? a : b; }
MK_DEV int min(int a, int b) { return a < b ? a : b; }
MK_DEV uint32_t __vmaxu2(uint32_t a, uint32_t b) { return max(a & 0xffffu, b & 0xffffu) | max(a >> 16, b >> 16) << 16; }
MK_DEV uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t s)
{
    uint32_t r = 0;
    for (uint32_t i = 0; i < 4; i++) r |= (uint32_t)(((uint64_t)b << 32 | a) >> 8 * (s >> 4 * i & 7) & 255u) << 8 * i;
    return r;
}
MK_DEV uint32_t lanes_any(const uint32_t *v) { uint32_t x = 0; for (int i = 0; i < 32; i++) x |= (uint32_t)(v[i] != 0) << i; return x; }
MK_DEV uint32_t lanes_top(const uint32_t *v) { uint32_t x = 0; for (int i = 0; i < 32; i++) x = max(x, v[i]); return x; }
#define __syncwarp()              ((void)lanes_meet("__syncwarp", __LINE__, 0))
#define __any_sync(m, p)          (lanes_any(lanes_meet("__any_sync", __LINE__, (p) ? 1 : 0)) != 0)
#define __all_sync(m, p)          (lanes_any(lanes_meet("__all_sync", __LINE__, (p) ? 1 : 0)) == 0xffffffffu)
#define __ballot_sync(m, p)       lanes_any(lanes_meet("__ballot_sync", __LINE__, (p) ? 1 : 0))
MK_DEV uint32_t lanes_same(const uint32_t *v)
{
    for (int i = 1; i < 32; i++)
        if (v[i] != v[0]) lanes_wrong("lanes of a warp have different words", v[0], v[i]);
    return v[0];
}
#define __reduce_and_sync(m, v)   lanes_same(lanes_meet("__reduce_and_sync", __LINE__, v)) /* mk_uniform's, of what all have */
#define __reduce_max_sync(m, v)   lanes_top(lanes_meet("__reduce_max_sync", __LINE__, v))
template <typename T> MK_DEV uint32_t lanes_word(T v)
{
    if constexpr (std::is_same_v<T, float>) return __float_as_uint(v);
    else return (uint32_t)v;
}
template <typename T> MK_DEV T lanes_value(uint32_t word)
{
    if constexpr (std::is_same_v<T, float>) return __uint_as_float(word);
    else return (T)word;
}
#define LANES_SHUFFLE(what, v, from) lanes_value<std::decay_t<decltype(v)>>(lanes_meet(what, __LINE__, lanes_word(v))[from])
#define __shfl_xor_sync(m, v, to)  LANES_SHUFFLE("__shfl_xor_sync", v, lanes.me % 32 ^ (uint32_t)(to))
#define __shfl_sync(m, v, from)    LANES_SHUFFLE("__shfl_sync", v, (uint32_t)(from) % 32)
#define __shfl_down_sync(m, v, by) LANES_SHUFFLE("__shfl_down_sync", v, lanes.me % 32 + (by) < 32 ? lanes.me % 32 + (by) : lanes.me % 32)
#define threadIdx (lanes_thread())
#define blockIdx  (lanes_block())
typedef struct lanes_index {
    uint32_t x;
} lanes_index;
MK_DEV lanes_index lanes_thread(void) { return {lanes.me}; }
MK_DEV lanes_index lanes_block(void) { return {0}; }

/* ---- the worker's shared memory --------------------------------------------------------------------------------------- */

#define MK_DYNAMIC_AT 0u
static mk_shared *lanes_shared;
static uint32_t lanes_ring[2]; /* where the ring begins and ends, if a test has one */
static uint8_t *lanes_stored; /* NULL, or how often each byte of the staging area was */
/* Shared memory without a ring (ring.h opens one with it): once. */
MK_DEV void lanes_shared_open(void)
{
    lanes_shared = (mk_shared *)aligned_alloc(128, (sizeof(mk_shared) + 127) / 128 * 128);
    memset(lanes_shared, 0, sizeof *lanes_shared);
}
/* It holds anything but that somebody has given up. */
MK_DEV void lanes_shared_draw(void)
{
    for (uint32_t i = 0; i < sizeof *lanes_shared; i++) ((uint8_t *)lanes_shared)[i] = (uint8_t)lanes_random(256);
    lanes_shared->aborted = 0;
}
MK_DEV mk_shared *mk_sh(void) { return lanes_shared; }
MK_DEV uint32_t mk_smem(const void *p) { return (uint32_t)((const uint8_t *)p - (const uint8_t *)lanes_shared); }
MK_DEV void *lanes_at(uint32_t at, uint32_t bytes)
{
    const bool factors = at >= offsetof(mk_shared, head_rstd) && at + bytes <= offsetof(mk_shared, vec); /* of what is staged */
    if (at % bytes || (at + bytes > offsetof(mk_shared, near) && !factors && (at < lanes_ring[0] || at + bytes > lanes_ring[1])))
        lanes_wrong("an access beyond the staging and the reduction area, factors and the ring, or not aligned", at, bytes);
    return (uint8_t *)lanes_shared + (*lanes.error ? 0 : at);
}
MK_DEV void lanes_store(uint32_t at, const void *v, uint32_t bytes)
{
    void *to = lanes_at(at, bytes);
    if (lanes_stored && at + bytes <= MK_STAGING)
        for (uint32_t i = 0; i < bytes; i++) lanes_stored[at + i]++;
    memcpy(to, v, bytes);
}
MK_DEV void mk_sts16(uint32_t at, uint32_t v) { const uint16_t h = (uint16_t)v; lanes_store(at, &h, 2); }
MK_DEV void mk_sts32(uint32_t at, uint32_t v) { lanes_store(at, &v, 4); }
MK_DEV void mk_sts64(uint32_t at, uint32_t x, uint32_t y) { const uint32_t v[2] = {x, y}; lanes_store(at, v, 8); }
MK_DEV void mk_sts128(uint32_t at, uint32_t x, uint32_t y, uint32_t z, uint32_t w) { const uint32_t v[4] = {x, y, z, w}; lanes_store(at, v, 16); }
MK_DEV uint32_t mk_lds32(uint32_t at) { uint32_t v; memcpy(&v, lanes_at(at, 4), 4); return v; }
MK_DEV uint4 mk_lds128(uint32_t at) { uint4 v; memcpy(&v, lanes_at(at, 16), 16); return v; }
MK_DEV uint4 mk_lds128_still(uint32_t at) { return mk_lds128(at); }
MK_DEV void mk_lds128(uint4 *x, uint32_t at, uint32_t has)
{
    if (has) *x = mk_lds128(at);
}
MK_DEV float mk_lds(uint32_t at) { return __uint_as_float(mk_lds32(at)); }
MK_DEV uint4 mk_ldx_f16(uint32_t at)
{
    uint2 v[2];
    memcpy(&v[0], lanes_at(at, 8), 8), memcpy(&v[1], lanes_at(at + 32, 8), 8);
    return make_uint4(v[0].x, v[0].y, v[1].x, v[1].y);
}
MK_DEV void mk_ldmatrix(uint32_t *a, uint32_t at)
{
    const uint32_t *const row = lanes_meet("ldmatrix", __LINE__, at), lane = lanes.me % 32;
    for (uint32_t i = 0; i < 4; i++) memcpy(&a[i], (uint8_t *)lanes_at(row[8 * i + lane / 4], 16) + lane % 4 * 4, 4);
}
MK_DEV float2 mk_lds64(uint32_t at) { float2 v; memcpy(&v, lanes_at(at, 8), 8); return v; }
MK_DEV void mk_lds64(uint32_t *x, uint32_t *y, uint32_t at)
{
    const float2 v = mk_lds64(at);
    *x = __float_as_uint(v.x), *y = __float_as_uint(v.y);
}
MK_DEV void mk_ask_16(uint4 *x, const uint8_t *at, bool has)
{
    if (has) memcpy(x, at, 16);
}
MK_DEV void mk_ask_8(uint4 *x, const uint8_t *at, bool has)
{
    if (has) memcpy(x, at, 8);
}
MK_DEV void mk_ask_4(uint32_t *x, const uint8_t *at, bool has)
{
    if (has) memcpy(x, at, 4);
}
MK_DEV void mk_fetch_16(uint4 *to, const uint8_t *from, bool has)
{
    uint4 v = {};
    mk_ask_16(&v, from, has);
    lanes_store(mk_smem(to), &v, 16);
}
MK_DEV void mk_fetched(void) {}
MK_DEV void mk_bulk_prefetch(const uint8_t *, uint32_t) {}
template <typename T> MK_DEV void __stcg(T *p, T v) { *p = v; }
MK_DEV void mk_sync(void) { lanes_barrier(&lanes.block, LANES_COMPUTE); }
MK_DEV void mk_aside_sync(void) { lanes_barrier(&lanes.beside, LANES - LANES_COMPUTE); }
MK_DEV bool mk_arrives(uint32_t lane) { return lane == 0; }
static void (*lanes_flag_read)(void); /* NULL, or what happens meanwhile */
MK_DEV uint32_t mk_flag_get(const volatile uint32_t *p)
{
    if (lanes_flag_read) lanes_flag_read();
    lanes_yield();
    return *p;
}
MK_DEV void mk_flag_set(volatile uint32_t *p, uint32_t v) { *p = v; }

/* ---- packets ----------------------------------------------------------------------------------------------------------- */

static const uint4 *lanes_exchange;
static uint32_t lanes_packets;
static uint32_t *lanes_late; /* of each packet: how many looks find nothing; 0xffffffff: it is never published */
static uint8_t *lanes_asked; /* whether somebody has looked */
/* An exchange of n packets, zeros, of which none is ever published unless lanes_late is told. */
MK_DEV uint4 *lanes_exchange_open(uint32_t n)
{
    uint4 *exchange = (uint4 *)calloc(n, sizeof *exchange);
    lanes_packets = n, lanes_exchange = exchange;
    lanes_late = (uint32_t *)malloc(n * sizeof *lanes_late);
    memset(lanes_late, 0xff, n * sizeof *lanes_late);
    lanes_asked = (uint8_t *)calloc(n, 1);
    return exchange;
}
MK_DEV void lanes_exchange_close(void)
{
    free((void *)lanes_exchange), free(lanes_late), free(lanes_asked);
}
MK_DEV uint4 mk_packet_load(const uint4 *p)
{
    const size_t i = (size_t)(p - lanes_exchange);
    if (!lanes_random(4)) lanes_yield();
    if (i >= lanes_packets) {
        lanes_wrong("a packet beyond the exchange", (uint32_t)i, lanes_packets);
        return make_uint4(0, 0, 0, 0);
    }
    lanes_asked[i] = 1;
    if (lanes_late[i]) {
        lanes_late[i] -= lanes_late[i] != 0xffffffffu;
        lanes.moved += lanes_late[i] != 0xffffffffu;
        return make_uint4(p->x ^ 0x5a5a5a5au, p->y + 77, ~p->z, p->w - 1);
    }
    return *p;
}
MK_DEV void mk_packet_again(uint4 *q, const uint4 *p, uint32_t late)
{
    if (late) *q = mk_packet_load(p);
}

/* ---- numbers ----------------------------------------------------------------------------------------------------------- */

MK_DEV uint32_t mk_bf16_bits(float f)
{
    const uint32_t u = __float_as_uint(f);
    return (u & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : (u + 0x7fffu + (u >> 16 & 1)) >> 16;
}
/* Drawn: of either sign, below 2, of exponents from `lowest` on. */
MK_DEV float lanes_bf16_random(uint32_t lowest)
{
    return __uint_as_float(lanes_random(2) << 31 | (lowest + lanes_random(128 - lowest)) << 23 | lanes_random(128) << 16);
}
MK_DEV uint32_t mk_bf16_pair(float a, float b) { return mk_bf16_bits(a) | mk_bf16_bits(b) << 16; }
MK_DEV float mk_rsqrt(float x) { return 1.0f / sqrtf(x); }
MK_DEV float mk_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
MK_DEV float mk_reciprocal(float x) { return 1.0f / x; }
MK_DEV float mk_exp_fast(float x) { return exp2f(x * 1.44269504f); }
MK_DEV uint32_t mk_mul_bf16(uint32_t x, uint32_t y)
{
    const float a = __uint_as_float(x << 16) * __uint_as_float(y << 16), b = __uint_as_float(x & 0xffff0000u) * __uint_as_float(y & 0xffff0000u);
    return mk_bf16_pair(a, b);
}
MK_DEV uint32_t mk_bytes(uint32_t x, uint32_t which)
{
    uint32_t r = 0;
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t sel = which >> 4 * i & 15, b = (sel & 4 ? 0 : x >> 8 * (sel & 3)) & 255u;
        r |= (sel & 8 ? b & 128 ? 255u : 0u : b) << 8 * i;
    }
    return r;
}
MK_DEV uint32_t __viaddmin_u16x2(uint32_t a, uint32_t b, uint32_t c) { return min((a + b) & 0xffffu, c & 0xffffu) | min((a >> 16) + (b >> 16) & 0xffffu, c >> 16) << 16; }
/* A warp's values of a product, by round: who is through with it may bring the next one's. */
static float lanes_product[LANES / 32][2][6][32][2];
template <bool F16> MK_DEV void lanes_mma(float *c, const uint32_t *a, uint32_t b0, uint32_t b1)
{
    const uint32_t warp = lanes.me / 32, lane = lanes.me % 32, word[6] = {a[0], a[1], a[2], a[3], b0, b1};
    float (*const w)[32][2] = lanes_product[warp][lanes.warp[warp].round & 1];
    for (uint32_t i = 0; i < 6; i++)
        for (uint32_t e = 0; e < 2; e++) w[i][lane][e] = F16 ? mk_f16_to_f32((uint16_t)(word[i] >> 16 * e)) : __uint_as_float(word[i] >> 16 * e << 16);
    lanes_meet("mma", __LINE__, 0);
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t row = lane / 4, column = lane % 4 * 2 + (i & 1);
        for (uint32_t k = 0; k < 16; k++) c[i] += w[i / 2 + k / 8 * 2][row * 4 + k % 8 / 2][k & 1] * w[4 + k / 8][column * 4 + k % 8 / 2][k & 1];
    }
}
MK_DEV void mk_mma_bf16(float *c, const uint32_t *a, uint32_t b0, uint32_t b1) { lanes_mma<false>(c, a, b0, b1); }
MK_DEV void mk_mma_f16(float *c, const uint32_t *a, uint32_t b0, uint32_t b1) { lanes_mma<true>(c, a, b0, b1); }
MK_DEV void mk_mma_bf16_first(float *c, const uint32_t *a, uint32_t b0, uint32_t b1)
{
    c[0] = c[1] = c[2] = c[3] = 0;
    mk_mma_bf16(c, a, b0, b1);
}
MK_DEV void mk_mma_f16_first(float *c, const uint32_t *a, uint32_t b0, uint32_t b1)
{
    c[0] = c[1] = c[2] = c[3] = 0;
    mk_mma_f16(c, a, b0, b1);
}
MK_DEV void mk_mma(float *c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
    const uint32_t a[4] = {a0, a1, a2, a3};
    mk_mma_bf16(c, a, b0, b1);
}
MK_DEV void mk_fp8_open(uint32_t v, uint32_t *first, uint32_t *second)
{
    uint32_t h[4];
    for (uint32_t i = 0; i < 4; i++) {
        const uint8_t b = (uint8_t)(v >> 8 * i);
        const uint32_t u = __float_as_uint(mk_fp8_finite(b)), m = u & 0x7fffffffu; /* 0, or a normal number of f16 */
        h[i] = (b & 127) == 127 ? 0x7e00 : (m ? (m >> 13) - (112u << 10) : 0) | u >> 31 << 15;
    }
    *first = h[0] | h[1] << 16, *second = h[2] | h[3] << 16;
}
MK_DEV uint32_t mk_turn(uint32_t x)
{
    const uint32_t *const v = lanes_meet("movmatrix", __LINE__, x), row = lanes.me % 32 / 4, i = lanes.me % 4 * 2; /* rows i and i + 1 of column `row` */
    const uint32_t a = v[i * 4 + row / 2], b = v[(i + 1) * 4 + row / 2];
    return row & 1 ? a >> 16 | (b & 0xffff0000u) : (a & 0xffffu) | b << 16;
}
MK_DEV uint32_t mk_tid_now(void) { return lanes.me; }
MK_DEV void mk_keep(uint32_t *x) { (void)x; }
MK_DEV void mk_keep(float *x) { (void)x; }
template <typename T> MK_DEV T *mk_keep_at(T *x) { return x; }

/* ---- what no test here runs, but its neighbours in a file mention ------------------------------------------------------- */

MK_DEV void __threadfence_system(void) {}
MK_DEV uint32_t atomicCAS(uint32_t *p, uint32_t, uint32_t v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); }
MK_DEV void *__cvta_shared_to_generic(uint32_t at) { return (uint8_t *)lanes_shared + at; }
static bool (*lanes_mbar_test)(uint32_t bar, uint32_t parity); /* NULL: yes */
static void (*lanes_mbar_arrive)(uint32_t bar);                /* NULL, or what comes of it */
MK_DEV void mk_mbar_arrive(uint32_t bar)
{
    if (lanes_mbar_arrive) lanes_mbar_arrive(bar);
}
MK_DEV bool mk_mbar_test(uint32_t bar, uint32_t parity) { return !lanes_mbar_test || lanes_mbar_test(bar, parity); }
MK_DEV bool mk_mbar_try(uint32_t bar, uint32_t parity)
{
    if (mk_mbar_test(bar, parity)) return true;
    lanes_yield();
    return false;
}
MK_DEV void mk_clocks_pass(uint32_t) { lanes_yield(); }
MK_DEV uint64_t mk_now(void) { return 0; }
MK_DEV uint32_t mk_now_low(void) { return 0; }
MK_DEV uint32_t mk_load_acquire(const uint32_t *p) { return *p; }
MK_DEV uint32_t mk_load_relaxed(const uint32_t *p) { return *p; }
MK_DEV void mk_red_release(uint32_t *p) { ++*p; }
MK_DEV void mk_packet_store(uint4 *p, uint32_t x, uint32_t y, uint32_t z, uint32_t w) { *p = make_uint4(x, y, z, w); }
template <typename T> MK_DEV T __ldcg(const T *p) { return *p; }
#define __builtin_assume(is) ((void)(is))

#endif
