/* What is PTX and used in many places, one function an instruction or two: shared memory, barriers, bulk copies, packets, numbers. Part of device.cuh, whose structures it knows. tests/lanes has
 * another of these for the CPU (tests/test_gather.cc). */
#ifndef MK_PTX_CUH
#define MK_PTX_CUH

#define MK_DEV  static __device__ __forceinline__
#define MK_CALL static __device__ __noinline__ /* rare or used in many places: instruction caches are small */

extern __shared__ __align__(128) uint8_t mk_dynamic[];
/* Where it begins in a block that has no shared variables of its own, behind the system's first kilobyte; the kernel makes sure. A number rather than the symbol, whose
 * address has the block's place in a cluster in it: every function would read that register before its first access, and keep a register for the sum. */
#define MK_DYNAMIC_AT 1024u
MK_DEV mk_shared *mk_sh(void)
{
    return (mk_shared *)__cvta_shared_to_generic(MK_DYNAMIC_AT);
}

/* ---- shared memory, barriers, bulk copies --------------------------------------------------------------------------- */

MK_DEV uint32_t mk_smem(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}
MK_DEV void mk_mbar_init(uint64_t *b, uint32_t count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mk_smem(b)), "r"(count) : "memory");
}
MK_DEV void mk_mbar_arrive(uint32_t b)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory");
}
/* One lane of a warp arrives, after __syncwarp, for all of them. racecheck does not follow that (tests/gpu/race_model.cu shows it); in the build that it is run on
 * every lane arrives for itself, and the barriers expect as many. */
#ifdef MK_RACECHECK
#define MK_ARRIVALS 32u
#else
#define MK_ARRIVALS 1u
#endif
MK_DEV bool mk_arrives(uint32_t lane)
{
    return MK_ARRIVALS > 1 || lane == 0;
}
/* The SM's clock; nvcc takes two readings of clock() for one. */
MK_DEV uint32_t mk_clock(void)
{
    uint32_t t;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(t)::"memory");
    return t;
}
/* So many clocks go by, at least. */
MK_DEV void mk_clocks_pass(uint32_t n)
{
    uint32_t since, now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(since));
    do
        asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
    while (now - since < n);
}
/* A word of shared memory that is looked at without any barrier. racecheck takes atomics only for meant. */
MK_DEV void mk_flag_set(volatile uint32_t *p, uint32_t v)
{
#ifdef MK_RACECHECK
    atomicExch((uint32_t *)p, v);
#else
    *p = v;
#endif
}
MK_DEV uint32_t mk_flag_get(const volatile uint32_t *p)
{
#ifdef MK_RACECHECK
    return atomicOr((uint32_t *)p, 0u);
#else
    return *p;
#endif
}
MK_DEV void mk_mbar_expect(uint32_t b, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
MK_DEV bool mk_mbar_try(uint32_t b, uint32_t parity)
{
    uint32_t ok;
    asm volatile("{\n\t.reg .pred p;\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(ok)
                 : "r"(b), "r"(parity)
                 : "memory");
    return ok != 0;
}
MK_DEV bool mk_mbar_test(uint32_t b, uint32_t parity) /* does not wait */
{
    uint32_t ok;
    asm volatile("{\n\t.reg .pred p;\n\t"
                 "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(ok)
                 : "r"(b), "r"(parity)
                 : "memory");
    return ok != 0;
}
/* What is read once a token leaves L2 first: weights, and pages of a cache, of which a long context has more than L2 holds. (What several items read they ask for at nearly the same time.) */
MK_DEV uint64_t mk_evict_first(void)
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
MK_DEV void mk_bulk_copy(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar, uint64_t policy)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar), "l"(policy)
                 : "memory");
}
/* On its way to L2. Multiples of 16. */
MK_DEV void mk_bulk_prefetch(const uint8_t *src, uint32_t bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes));
}
/* True in one lane of the warp, and the compiler knows that it is one: a bulk copy is an instruction of the uniform datapath, for which it otherwise makes a loop over
 * lanes. All lanes call it. */
MK_DEV bool mk_elect(void)
{
    uint32_t one;
    asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(one));
    return one != 0;
}
/* All compute warps. (ptxas brings a warp together in front of it.) */
MK_DEV void mk_sync(void)
{
    asm volatile("bar.sync 1, %0;" ::"n"(MK_COMPUTE) : "memory");
}
/* The same; whether one of them says so. */
MK_DEV bool mk_sync_any(bool own)
{
    uint32_t any;
    asm volatile("{\n\t.reg .pred p, q;\n\tsetp.ne.u32 p, %1, 0;\n\tbar.red.or.pred q, 1, %2, p;\n\tselp.u32 %0, 1, 0, q;\n\t}" : "=r"(any) : "r"((uint32_t)own), "n"(MK_COMPUTE) : "memory");
    return any != 0;
}
/* All warps aside. */
MK_DEV void mk_aside_sync(void)
{
    __syncwarp();
    asm volatile("bar.sync 2, %0;" ::"n"(MK_ASIDES * 32) : "memory");
}

MK_DEV void mk_sts16(uint32_t at, uint32_t v)
{
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"((uint16_t)v) : "memory");
}
MK_DEV void mk_sts64(uint32_t at, uint32_t x, uint32_t y)
{
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(x), "r"(y) : "memory");
}
MK_DEV void mk_sts128(uint32_t at, uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
MK_DEV uint4 mk_lds128(uint32_t at)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
/* The same of what no other thread writes meanwhile: it may be asked for before or after other accesses. */
MK_DEV uint4 mk_lds128_still(uint32_t at)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
/* If there are 16 bytes; else *x stays. */
MK_DEV void mk_lds128(uint4 *x, uint32_t at, uint32_t has)
{
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t@p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}" : "+r"(x->x), "+r"(x->y), "+r"(x->z), "+r"(x->w) : "r"(at), "r"(has) : "memory");
}
MK_DEV float2 mk_lds64(uint32_t at)
{
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
    return v;
}
MK_DEV void mk_lds64(uint32_t *x, uint32_t *y, uint32_t at)
{
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(*x), "=r"(*y) : "r"(at) : "memory");
}
MK_DEV uint32_t mk_lds32(uint32_t at)
{
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
/* As f32, and not volatile: addresses of what others write must come out of mk_after (product.cuh). */
MK_DEV float mk_lds(uint32_t at)
{
    float v;
    asm("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at));
    return v;
}
/* Right operands of mma.sync of 32 f16 values, of which a lane takes four at `at` and four 16 further. */
MK_DEV uint4 mk_ldx_f16(uint32_t at)
{
    uint4 v;
    asm("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    asm("ld.shared.v2.u32 {%0, %1}, [%2 + 32];" : "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
MK_DEV void mk_sts32(uint32_t at, uint32_t v)
{
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}

/* 16 bytes past L1 into shared memory, or zeros; the thread has them behind mk_fetched. */
MK_DEV void mk_fetch_16(uint4 *to, const uint8_t *from, bool has)
{
    asm volatile("{\n\t.reg .pred p;\n\tsetp.eq.u32 p, %2, 0;\n\tcp.async.cg.shared.global [%0], [%1], 16, p;\n\t}" ::"r"(mk_smem(to)), "l"(from), "r"((uint32_t)has) : "memory"); /* else zeros */
}
MK_DEV void mk_fetched(void)
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}
/* 16 bytes from L2; if there are none, *x stays. */
MK_DEV void mk_ask_16(uint4 *x, const uint8_t *at, bool has)
{
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t@p ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
                 : "+r"(x->x), "+r"(x->y), "+r"(x->z), "+r"(x->w)
                 : "l"(at), "r"((uint32_t)has));
}
MK_DEV void mk_ask_8(uint4 *x, const uint8_t *at, bool has)
{
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %3, 0;\n\t@p ld.global.cg.v2.u32 {%0, %1}, [%2];\n\t}" : "+r"(x->x), "+r"(x->y) : "l"(at), "r"((uint32_t)has));
}
MK_DEV void mk_ask_4(uint32_t *x, const uint8_t *at, bool has)
{
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %2, 0;\n\t@p ld.global.cg.u32 %0, [%1];\n\t}" : "+r"(*x) : "l"(at), "r"((uint32_t)has));
}

/* ---- packets, counters ---------------------------------------------------------------------------------------------- */

MK_DEV uint4 mk_packet_load(const uint4 *p)
{
    uint64_t lo, hi;
    asm volatile("{\n\t.reg .b128 v;\n\tld.relaxed.gpu.global.b128 v, [%2];\n\tmov.b128 {%0, %1}, v;\n\t}" : "=l"(lo), "=l"(hi) : "l"(p) : "memory");
    return make_uint4((uint32_t)lo, (uint32_t)(lo >> 32), (uint32_t)hi, (uint32_t)(hi >> 32));
}
/* Another look at a packet, if it is late (not 0: a mask's bit as it is, so that one instruction makes the predicate of it). In place, so that the looks at several packets are under way together: a copy would wait for each before the next is asked for. */
MK_DEV void mk_packet_again(uint4 *q, const uint4 *p, uint32_t late)
{
    uint64_t lo = (uint64_t)q->y << 32 | q->x, hi = (uint64_t)q->w << 32 | q->z;
    asm volatile("{\n\t.reg .pred p;\n\t.reg .b128 v;\n\tsetp.ne.u32 p, %3, 0;\n\tmov.b128 v, {%0, %1};\n\t@p ld.relaxed.gpu.global.b128 v, [%2];\n\tmov.b128 {%0, %1}, v;\n\t}"
                 : "+l"(lo), "+l"(hi)
                 : "l"(p), "r"(late)
                 : "memory");
    *q = make_uint4((uint32_t)lo, (uint32_t)(lo >> 32), (uint32_t)hi, (uint32_t)(hi >> 32));
}
/* Asks for 16 bytes past L1, if they are wanted; else *q stays. In place: what is set on one path and loaded on another is set behind the load, and waits for it. */
MK_DEV void mk_ask_four(float4 *q, const float4 *p, bool wanted)
{
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t@p ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n\t}"
                 : "+f"(q->x), "+f"(q->y), "+f"(q->z), "+f"(q->w)
                 : "l"(p), "r"((uint32_t)wanted)
                 : "memory");
}
MK_DEV void mk_packet_store(uint4 *p, uint32_t x, uint32_t y, uint32_t z, uint32_t epoch)
{
    uint64_t lo = (uint64_t)y << 32 | x, hi = (uint64_t)epoch << 32 | z;
    asm volatile("{\n\t.reg .b128 v;\n\tmov.b128 v, {%1, %2};\n\tst.relaxed.gpu.global.b128 [%0], v;\n\t}" ::"l"(p), "l"(lo), "l"(hi) : "memory");
}
MK_DEV uint32_t mk_load_acquire(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
MK_DEV uint32_t mk_load_relaxed(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
MK_DEV void mk_store_relaxed(uint32_t *p, uint32_t v)
{
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
MK_DEV void mk_red_release(uint32_t *p)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory");
}
MK_DEV uint64_t mk_now(void)
{
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

MK_DEV uint32_t mk_now_low(void)
{
    uint32_t t;
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(t));
    return t;
}

/* ---- numbers -------------------------------------------------------------------------------------------------------- */

/* The thread, read now: in the compute warps' loop it would else be kept, in local memory. */
MK_DEV uint32_t mk_tid_now(void)
{
    uint32_t tid;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
    return tid;
}

/* Round to nearest even; NaN stays NaN. */
MK_DEV uint32_t mk_bf16_bits(float v)
{
    uint16_t h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(v));
    return h;
}
MK_DEV uint32_t mk_bf16_pair(float x0, float x1)
{
    uint32_t v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(x1), "f"(x0));
    return v;
}

/* Bytes of x, each copied, or (8 | byte) its sign to all of a byte. */
MK_DEV uint32_t mk_bytes(uint32_t x, uint32_t which)
{
    uint32_t y;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(y) : "r"(x), "r"(which));
    return y;
}
/* Two bf16 products. */
MK_DEV uint32_t mk_mul_bf16(uint32_t x, uint32_t y)
{
    uint32_t z;
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}
/* Row-major 16 x 16 times column-major 16 x 8 of bf16, on top of c. */
MK_DEV void mk_mma(float *c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
MK_DEV void mk_mma_bf16(float *c, const uint32_t *a, uint32_t b0, uint32_t b1)
{
    mk_mma(c, a[0], a[1], a[2], a[3], b0, b1);
}
MK_DEV void mk_mma_f16(float *c, const uint32_t *a, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/* The same from 0. */
MK_DEV void mk_mma_bf16_first(float *c, const uint32_t *a, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}
MK_DEV void mk_mma_f16_first(float *c, const uint32_t *a, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}
/* Four e4m3 codes as f16, exactly: the first two and the others. */
MK_DEV void mk_fp8_open(uint32_t v, uint32_t *first, uint32_t *second)
{
    asm("{\n\t.reg .b16 a, b;\n\tmov.b32 {a, b}, %2;\n\tcvt.rn.f16x2.e4m3x2 %0, a;\n\tcvt.rn.f16x2.e4m3x2 %1, b;\n\t}" : "=r"(*first), "=r"(*second) : "r"(v));
}
/* Four 8 x 16-byte matrices, the address of whose rows this lane knows one of. Not volatile, so that loads of the next K block may pass this one's arithmetic: addresses
 * must come out of mk_after. */
MK_DEV void mk_ldmatrix(uint32_t *a, uint32_t at)
{
    asm("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at));
}
/* An 8 x 8 matrix of bf16 of the warp, transposed: lane (g, l) has row g, columns 2 l and 2 l + 1. */
MK_DEV uint32_t mk_turn(uint32_t x)
{
    uint32_t y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
/* 1 / x of a sum of p, which is neither tiny nor huge. */
MK_DEV float mk_reciprocal(float x)
{
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return __fmaf_rn(r, __fmaf_rn(-x, r, 1.0f), r);
}

/* As it is, in a register: not worked out once more where it is used, which is on the way of the token. */
MK_DEV void mk_keep(uint32_t *x)
{
    asm volatile("" : "+r"(*x));
}
MK_DEV void mk_keep(float *x)
{
    asm volatile("" : "+f"(*x));
}
/* An address that is made here: else every one from it on is made of what it is made of. */
template <typename T> MK_DEV T *mk_keep_at(T *x)
{
    asm volatile("" : "+l"(x));
    return x;
}

/* e^x. */
MK_DEV float mk_exp_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(__fmul_rn(x, 1.44269504f)));
    return y;
}
/* 1 / sqrt(x), sigmoid(x) and x sigmoid(x) to some 1e-7 in few instructions: they stand between the last product and the next exchange. */
MK_DEV float mk_rsqrt(float x)
{
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return __fmul_rn(r, __fmaf_rn(__fmul_rn(-0.5f, x), __fmul_rn(r, r), 1.5f));
}
MK_DEV float mk_sigmoid(float x)
{
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(__fadd_rn(mk_exp_fast(-x), 1.0f)));
    return r;
}

#endif
