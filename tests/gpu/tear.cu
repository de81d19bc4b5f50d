/* Do 16-byte packets tear? Every block publishes packets with the kernel's own mk_packet_store and reads everybody's with mk_packet_load, round after round, while
 * a loader warp of each block streams memory with bulk copies as fast as it gets them. A packet's three values follow from its index and its epoch, so
 * that every load can be checked, those that come too early included: they must be the packet of two rounds before, whole.
 *
 * Two controls. `halves`: the half with the epoch is stored first; a check that does not find those torn is worth nothing. `v4`: four scalars in one
 * vector access, which the memory model does not promise to keep together; reported, not judged.
 *   tear [-n PACKETS (1e9)] [-p PACKETS a block and round (32)]     prints one JSON object */
extern "C" { /* C headers */
#include "instructions/op.h"
}
#include "megakernel/device.cuh"

#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { PACKET, HALVES, V4, ALONE /* no packets: the stream's own rate */ };
#define STAGE  16384u
#define STAGES 12u
#define LIMIT_NS 4000000000ull /* of a wait */

typedef struct result {
    unsigned long long checked, torn, early, wrong, bytes;
    uint32_t stuck;            /* a wait ran out */
    uint32_t first[8];         /* a torn packet: index, expected epoch, what was loaded, what that epoch's packet is */
} result;

__device__ __forceinline__ uint32_t value(uint32_t i, uint32_t epoch, uint32_t k)
{
    uint32_t x = (i * 3u + k) * 2654435761u ^ epoch * 2246822519u;
    x ^= x >> 15;
    x *= 2654435769u;
    return x ^ x >> 13;
}

template <int HOW> __device__ __forceinline__ void put(uint4 *p, uint32_t i, uint32_t epoch)
{
    const uint32_t x = value(i, epoch, 0), y = value(i, epoch, 1), z = value(i, epoch, 2);
    if (HOW == HALVES) {
        const uint64_t lo = (uint64_t)y << 32 | x, hi = (uint64_t)epoch << 32 | z;
        asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"((uint64_t *)p + 1), "l"(hi) : "memory");
        asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"((uint64_t *)p), "l"(lo) : "memory");
    } else if (HOW == V4) {
        asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x), "r"(y), "r"(z), "r"(epoch) : "memory");
    } else {
        mk_packet_store(p, x, y, z, epoch);
    }
}

template <int HOW> __device__ __forceinline__ uint4 get(const uint4 *p)
{
    if (HOW != V4) return mk_packet_load(p);
    uint4 q;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w) : "l"(p) : "memory");
    return q;
}

/* Rounds have epochs epoch0 + 1 ...; the halves hold the packets of the two epochs before. */
__global__ void prepare(uint4 *buf, uint32_t n, uint32_t epoch0)
{
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < 2 * n; i += gridDim.x * blockDim.x) {
        const uint32_t half = i / n, k = i % n, e = epoch0 - 1 + half;
        buf[i] = make_uint4(value(k, e, 0), value(k, e, 1), value(k, e, 2), e);
    }
}

/* Shared memory: STAGES stages, their barriers, a word "stop". The stream: each block walks its own piece of memory, round and round. */
__device__ void load(const uint8_t *piece, uint64_t bytes, volatile uint32_t *stop, uint64_t *bar, result *res)
{
    const uint64_t policy = mk_evict_first();
    const uint32_t base = mk_smem(mk_dynamic), chunks = (uint32_t)(bytes / STAGE);
    unsigned long long n = 0;
    uint32_t at = 0, parity = 0, chunk = 0;
    for (uint32_t i = 0; i < STAGES; i++) {
        mk_mbar_expect(mk_smem(&bar[i]), STAGE);
        mk_bulk_copy(base + i * STAGE, piece + (uint64_t)(chunk++ % chunks) * STAGE, STAGE, mk_smem(&bar[i]), policy);
    }
    for (uint32_t last = 0; last < STAGES;) { /* after `stop` what is in flight is waited for */
        while (!mk_mbar_try(mk_smem(&bar[at]), parity)) {}
        n += STAGE;
        if (*stop)
            last++;
        else {
            mk_mbar_expect(mk_smem(&bar[at]), STAGE);
            mk_bulk_copy(base + at * STAGE, piece + (uint64_t)chunk * STAGE, STAGE, mk_smem(&bar[at]), policy);
            if (++chunk >= chunks) chunk = 0;
        }
        if (++at == STAGES) at = 0, parity ^= 1;
    }
    atomicAdd(&res->bytes, n);
}

template <int HOW>
__global__ void __launch_bounds__(MK_COMPUTE + 32, 1) exchange(uint4 *buf, uint32_t per, uint64_t rounds, uint32_t epoch0, const uint8_t *memory, uint64_t piece, uint32_t *abort, result *res)
{
    uint64_t *bar = (uint64_t *)(mk_dynamic + STAGES * STAGE);
    volatile uint32_t *stop = (volatile uint32_t *)(bar + STAGES);
    const uint32_t n = gridDim.x * per;
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < STAGES; i++) mk_mbar_init(&bar[i], 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        *stop = 0;
    }
    __syncthreads();
    if (threadIdx.x >= MK_COMPUTE) {
        if (threadIdx.x == MK_COMPUTE) load(memory + blockIdx.x * piece, piece, stop, bar, res);
        return;
    }
    unsigned long long checked = 0, torn = 0, early = 0, wrong = 0;
    bool give_up = false;
    if (HOW == ALONE) {
        const uint64_t since = mk_now();
        while (mk_now() - since < rounds * 1000000ull) __nanosleep(1000);
    }
    for (uint64_t r = 0; r < rounds && HOW != ALONE; r++) {
        const uint32_t epoch = epoch0 + 1 + (uint32_t)r;
        uint4 *half = buf + (r & 1) * n;
        for (uint32_t i = threadIdx.x; i < per; i += MK_COMPUTE) put<HOW>(half + blockIdx.x * per + i, blockIdx.x * per + i, epoch);
        for (uint32_t i = threadIdx.x; i < n && !give_up; i += MK_COMPUTE) {
            uint32_t spins = 0;
            uint64_t since = 0;
            for (;;) {
                const uint4 q = get<HOW>(half + i);
                checked++;
                if (q.w != epoch && q.w != epoch - 2) wrong++;
                if (q.x != value(i, q.w, 0) || q.y != value(i, q.w, 1) || q.z != value(i, q.w, 2)) {
                    if (!torn && atomicAdd((unsigned *)&res->first[7], 1u) == 0) {
                        const uint32_t f[7] = {i, epoch, q.x, q.y, q.z, q.w, value(i, q.w, 0)};
                        for (int k = 0; k < 7; k++) res->first[k] = f[k];
                    }
                    torn++;
                }
                if (q.w == epoch) break;
                early++;
                if (++spins & 255u) continue;
                const uint64_t now = mk_now();
                if (!since) since = now;
                if (now - since > LIMIT_NS) {
                    res->stuck = 1;
                    atomicExch(abort, 1u);
                }
                if (mk_load_relaxed(abort)) {
                    give_up = true;
                    break;
                }
            }
        }
        /* Publishing round r + 1 says: this block has read round r. So a round's packets are stored over those of two rounds before only when everybody has them. */
        asm volatile("bar.sync 1, %0;" ::"n"(MK_COMPUTE) : "memory");
        if (mk_load_relaxed(abort)) break;
    }
    atomicAdd(&res->checked, checked);
    atomicAdd(&res->torn, torn);
    atomicAdd(&res->early, early);
    atomicAdd(&res->wrong, wrong);
    asm volatile("bar.sync 1, %0;" ::"n"(MK_COMPUTE) : "memory");
    if (threadIdx.x == 0) *stop = 1;
}

#define CUDA(call)                                                                                                     \
    do {                                                                                                               \
        cudaError_t e_ = (call);                                                                                       \
        if (e_) {                                                                                                      \
            fprintf(stderr, "tear: line %d: %s\n", __LINE__, cudaGetErrorString(e_));                                  \
            exit(9);                                                                                                   \
        }                                                                                                              \
    } while (0)

static uint4 *buf;
static uint8_t *memory;
static uint32_t *abort_word, sms, per = 32;
static result *res;
static const uint64_t piece = 64ull << 20; /* a block's: beyond L2 */

static double run(int how, double packets, uint32_t epoch0, result *r)
{
    const uint64_t rounds = how == ALONE ? (uint64_t)packets : (uint64_t)(packets / ((double)sms * per)) + 1;
    const uint32_t smem = STAGES * STAGE + STAGES * 8 + 16;
    void (*k)(uint4 *, uint32_t, uint64_t, uint32_t, const uint8_t *, uint64_t, uint32_t *, result *) =
        how == PACKET ? exchange<PACKET> : how == HALVES ? exchange<HALVES> : how == V4 ? exchange<V4> : exchange<ALONE>;
    float ms;
    cudaEvent_t a, b;
    CUDA(cudaEventCreate(&a));
    CUDA(cudaEventCreate(&b));
    CUDA(cudaFuncSetAttribute((const void *)k, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem));
    CUDA(cudaMemset(res, 0, sizeof *res));
    CUDA(cudaMemset(abort_word, 0, 4));
    prepare<<<sms, 256>>>(buf, sms * per, epoch0);
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaEventRecord(a));
    k<<<sms, MK_COMPUTE + 32, smem>>>(buf, per, rounds, epoch0, memory, piece, abort_word, res);
    CUDA(cudaGetLastError());
    CUDA(cudaEventRecord(b));
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaEventElapsedTime(&ms, a, b));
    CUDA(cudaMemcpy(r, res, sizeof *r, cudaMemcpyDeviceToHost));
    if (how != ALONE) {
        printf("  \"packets\": %.0f, \"rounds\": %llu, \"us_a_round\": %.3f, \"loads_checked\": %llu, \"loads_too_early\": %llu, \"torn\": %llu, \"of_another_epoch\": %llu,"
               " \"stream_tb_s\": %.3f, \"seconds\": %.3f",
               (double)rounds * sms * per, (unsigned long long)rounds, 1e3 * ms / (double)rounds, r->checked, r->early, r->torn, r->wrong, (double)r->bytes / ms * 1e-9, ms * 1e-3);
        if (r->torn) printf(", \"first_torn\": [%u, %u, %u, %u, %u, %u, %u]", r->first[0], r->first[1], r->first[2], r->first[3], r->first[4], r->first[5], r->first[6]);
        if (r->stuck) printf(", \"stuck\": true");
    }
    return (double)r->bytes / ms * 1e-9;
}

int main(int argc, char **argv)
{
    double n = 1e9;
    int c;
    while ((c = getopt(argc, argv, "n:p:")) != -1)
        if (c == 'n')
            n = atof(optarg);
        else if (c == 'p')
            per = (uint32_t)atoi(optarg);
        else
            return 2;
    if (!(n >= 1e6 && n <= 1e12) || !per || per > 4096) return 2;
    cudaDeviceProp p;
    CUDA(cudaGetDeviceProperties(&p, 0));
    sms = (uint32_t)p.multiProcessorCount;
    CUDA(cudaMalloc(&buf, 2ull * sms * per * sizeof *buf));
    CUDA(cudaMalloc(&memory, sms * piece));
    CUDA(cudaMemset(memory, 1, sms * piece));
    CUDA(cudaMalloc(&abort_word, 4));
    CUDA(cudaMalloc(&res, sizeof *res));
    result all, halves, v4, alone;
    double rate = run(ALONE, 20, 0, &alone);
    printf("{\"test\": \"tear\", \"device\": \"%s\", \"blocks\": %u, \"packets_a_block_and_round\": %u, \"stream_alone_tb_s\": %.3f,\n \"packet\": {\n", p.name, sms, per, rate);
    run(PACKET, n, 0xfffffff0u, &all);
    printf("},\n \"control_halves\": {\n");
    run(HALVES, n / 100, 0, &halves);
    printf("},\n \"control_v4\": {\n");
    run(V4, n / 10, 0, &v4);
    int ok = !all.torn && !all.wrong && !all.stuck && (double)all.checked >= n * sms && halves.torn && !halves.stuck;
    printf("},\n \"ok\": %s}\n", ok ? "true" : "false");
    return !ok;
}
