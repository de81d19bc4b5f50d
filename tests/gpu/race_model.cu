/* What compute-sanitizer's racecheck makes of mbarriers: a ring of shared-memory slots between one producer warp and eight consumer warps, in the forms that a kernel may write it
 * in, each correct by the memory model (mbarrier.arrive is a release, a wait that succeeds an acquire, __syncwarp orders memory among the lanes), and one that is not.
 *   race_model FORM     one of the names below; run it under `compute-sanitizer --tool racecheck` (tests/gpu/run.sh, part racecheck)
 * The numbers that the consumers add up are checked as well: exit code 1 when one is wrong. */
extern "C" { /* C headers */
#include "instructions/op.h"
}
#include "megakernel/device.cuh"

#include <cuda_runtime.h>
#include <stdio.h>
#include <string.h>

#define SLOTS  3u
#define WORDS  256u /* a slot */
#define TURNS  40u
#define WARPS  8u

enum form {
    STORES_LANE,  /* the producer's lanes store, __syncwarp, lane 0 arrives; consumers: every lane waits; __syncwarp, lane 0 arrives */
    STORES_LANES, /* every lane arrives for itself, both ways */
    BULK_LANE,    /* a bulk copy fills the slot; consumers: every lane waits; __syncwarp, lane 0 arrives */
    BULK_LANES,   /* the same, every lane of a consumer arrives */
    LATE,         /* STORES_LANE, but consumers hand the slot back before they have read it: a race */
    FORMS
};
static const char *const names[FORMS] = {"stores_lane", "stores_lanes", "bulk_lane", "bulk_lanes", "late"};

template <int FORM> __global__ void ring(const uint32_t *from, uint32_t *sums, uint32_t words)
{
    __shared__ alignas(128) uint32_t slot[SLOTS][WORDS];
    __shared__ uint64_t full[SLOTS], empty[SLOTS];
    const bool lanes = FORM == STORES_LANES || FORM == BULK_LANES, bulk = FORM == BULK_LANE || FORM == BULK_LANES;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < SLOTS; i++) {
            mk_mbar_init(&full[i], FORM == STORES_LANES ? 32 : 1);
            mk_mbar_init(&empty[i], lanes ? 32 * WARPS : WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp == WARPS) {
        const uint64_t policy = mk_evict_first();
        for (uint32_t t = 0; t < TURNS; t++) {
            const uint32_t s = t % SLOTS, lap = t / SLOTS;
            while (!mk_mbar_try(mk_smem(&empty[s]), (lap & 1) ^ 1)) {}
            if (bulk) {
                if (lane == 0) {
                    mk_mbar_expect(mk_smem(&full[s]), WORDS * 4);
                    mk_bulk_copy(mk_smem(slot[s]), from + t * WORDS, WORDS * 4, mk_smem(&full[s]), policy);
                }
                __syncwarp();
            } else {
                for (uint32_t i = lane; i < WORDS; i += 32) slot[s][i] = from[t * WORDS + i];
                if (!lanes) __syncwarp();
                if (lanes || lane == 0) mk_mbar_arrive(mk_smem(&full[s]));
            }
        }
        if (bulk && lane == 0) /* nothing in flight at the end */
            for (uint32_t t = TURNS - SLOTS; t < TURNS; t++)
                while (!mk_mbar_try(mk_smem(&full[t % SLOTS]), t / SLOTS & 1)) {}
        return;
    }
    uint32_t sum = 0;
    for (uint32_t t = 0; t < TURNS; t++) {
        const uint32_t s = t % SLOTS;
        while (!mk_mbar_try(mk_smem(&full[s]), t / SLOTS & 1)) {}
        if (FORM == LATE && lane == 0) mk_mbar_arrive(mk_smem(&empty[s]));
        for (uint32_t i = lane; i < WORDS; i += 32) sum += slot[s][(i + warp) % WORDS] * (t + 1);
        if (!lanes) __syncwarp();
        if (FORM != LATE && (lanes || lane == 0)) mk_mbar_arrive(mk_smem(&empty[s]));
    }
    atomicAdd(&sums[warp], sum);
}

int main(int argc, char **argv)
{
    int form = 0;
    while (form < FORMS && (argc != 2 || strcmp(argv[1], names[form]))) form++;
    if (form == FORMS) return 2;
    static uint32_t host[TURNS * WORDS];
    uint32_t *from, *sums, got[WARPS], expected = 0;
    for (uint32_t i = 0; i < TURNS * WORDS; i++) expected += (host[i] = i * 2654435761u) * (i / WORDS + 1);
    cudaMalloc(&from, sizeof host);
    cudaMalloc(&sums, sizeof got);
    cudaMemcpy(from, host, sizeof host, cudaMemcpyHostToDevice);
    cudaMemset(sums, 0, sizeof got);
    void (*const kernel[FORMS])(const uint32_t *, uint32_t *, uint32_t) = {ring<0>, ring<1>, ring<2>, ring<3>, ring<4>};
    kernel[form]<<<1, 32 * (WARPS + 1)>>>(from, sums, WORDS);
    cudaError_t e = cudaDeviceSynchronize();
    if (!e) e = cudaMemcpy(got, sums, sizeof got, cudaMemcpyDeviceToHost);
    if (e) {
        fprintf(stderr, "race_model: %s\n", cudaGetErrorString(e));
        return 9;
    }
    int wrong = 0;
    for (uint32_t w = 0; w < WARPS; w++) wrong += got[w] != expected;
    printf("%s: %d of %u warps added up wrong\n", names[form], wrong, WARPS);
    return wrong != 0;
}
