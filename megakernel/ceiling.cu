#include "megakernel/ceiling.h"

#include "megakernel/device.cuh"
#include "megakernel/synth.h"

#include <cuda_runtime.h>

#define CHUNK  32768u
#define STAGES 6u
#define PASSES 4u /* over the buffer, in one launch */
#define BUFFER (2ull << 30)

/* One thread a block: a stage that has arrived is asked for anew with the next chunk. */
static __global__ void __launch_bounds__(32, 1) stream(const uint8_t *from, uint32_t chunks)
{
    __shared__ uint64_t full[STAGES];
    const uint32_t n = (chunks - blockIdx.x + gridDim.x - 1) / gridDim.x * PASSES, each = n / PASSES;
    if (threadIdx.x) return;
    for (uint32_t s = 0; s < STAGES; s++) mk_mbar_init(&full[s], 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    const uint64_t policy = mk_evict_first();
    const uint32_t bar = mk_smem(full), to = mk_smem(mk_dynamic);
    uint32_t stage = 0, parity = 1, at = 0;
    for (uint32_t i = 0; i < n + STAGES; i++) {
        if (i >= STAGES)
            while (!mk_mbar_try(bar + 8 * stage, parity)) {}
        if (i < n) {
            mk_mbar_expect(bar + 8 * stage, CHUNK);
            mk_bulk_copy(to + stage * CHUNK, from + ((uint64_t)at * gridDim.x + blockIdx.x) * CHUNK, CHUNK, bar + 8 * stage, policy);
            if (++at == each) at = 0;
        }
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
}

extern "C" int mk_ceiling_measure(int device, double *gb_s, mk_err *err)
{
    void *buffer = 0;
    cudaEvent_t begin = 0, end = 0;
    int sms = 0;
    *gb_s = 0;
    cudaError_t e = cudaSetDevice(device);
    if (!e && cudaMalloc(&buffer, BUFFER)) { /* that full: nothing to measure with */
        cudaGetLastError();
        return MK_OK;
    }
    int rc = e ? MK_OK : mk_synth_bf16(buffer, BUFFER / 2, 1.0f, 1, err);
    if (!e && !rc) e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    if (!e && !rc) e = cudaFuncSetAttribute((const void *)stream, cudaFuncAttributeMaxDynamicSharedMemorySize, STAGES * CHUNK);
    if (!e && !rc) e = cudaEventCreate(&begin);
    if (!e && !rc) e = cudaEventCreate(&end);
    for (int i = 0; i < 8 && !e && !rc; i++) {
        float ms = 0;
        uint32_t chunks = (uint32_t)(BUFFER / CHUNK) / (uint32_t)sms * (uint32_t)sms; /* as many for each */
        cudaEventRecord(begin);
        stream<<<sms, 32, STAGES * CHUNK>>>((const uint8_t *)buffer, chunks);
        cudaEventRecord(end);
        if ((e = cudaGetLastError()) || (e = cudaEventSynchronize(end)) || (e = cudaEventElapsedTime(&ms, begin, end))) break;
        double rate = (double)chunks * CHUNK * PASSES / ms * 1e-6;
        if (rate > *gb_s) *gb_s = rate;
    }
    if (begin) cudaEventDestroy(begin);
    if (end) cudaEventDestroy(end);
    cudaFree(buffer);
    if (!rc && e) rc = mk_fail(err, MK_E_DEVICE, "measuring the memory: %s", cudaGetErrorString(e));
    return rc;
}
