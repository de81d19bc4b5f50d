/* Do packets tear on the bus? The submit ring and the token ring rest on it (megakernel/rings.h). Some warps poll an entry of the submit ring each, with the kernel's own
 * mk_bus_load, while the host writes it with mk_submit_pack; each answers with an event, written by mk_event_store, which the host polls with mk_event_there. What is
 * in either follows from its number, so that every word can be checked. The next entry goes to the same place as soon as the answer is there: nearly every
 * write meets a read.
 *
 * Controls, which must be found torn: the host writes the numbers first, the device writes an event's numbers first.
 *   bus [-n ENTRIES (2e6)]     prints one JSON object */
extern "C" { /* C headers */
#include "instructions/op.h"
#include "megakernel/submit.h"
}
#include "instructions/schedule.cuh"

#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define WARPS    8u
#define PLACE    (MK_SUBMIT_RING / WARPS) /* entries and events between two warps' places */
#define LIMIT_NS 2000000000ull            /* of a wait */

enum { WHOLE, HOST_EARLY, DEVICE_EARLY };

typedef struct result {
    unsigned long long looks, torn;
    uint32_t stuck;
} result;

__host__ __device__ static uint32_t value(uint32_t seq, uint32_t word)
{
    uint32_t x = seq * 2654435761u ^ (word + 1u) * 2246822519u;
    x ^= x >> 15;
    x *= 2654435769u;
    return x ^ x >> 13;
}

/* A warp's numbers: its place, then always MK_SUBMIT_RING more, so that all of them lie in the same place of both rings. */
__host__ __device__ static uint32_t number(uint32_t warp, uint32_t i)
{
    return warp * PLACE + 1 + i * MK_SUBMIT_RING;
}

__global__ void device(const mk_submit_packets *submit, mk_event *event, uint32_t n, int how, result *res)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned long long looks = 0, torn = 0;
    mk_event *to = &event[warp * PLACE];
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t seq = number(warp, i);
        const uint4 *p = (const uint4 *)submit[warp * PLACE].packet + lane;
        const uint64_t since = mk_now();
        uint4 q = make_uint4(0, 0, 0, seq);
        do {
            if (lane < MK_SUBMIT_PACKETS) q = mk_bus_load(p);
            looks++;
            if (!__any_sync(0xffffffffu, mk_now() - since > LIMIT_NS)) continue;
            res->stuck = 1;
            return;
        } while (!__all_sync(0xffffffffu, q.w == seq));
        if (lane < MK_SUBMIT_PACKETS) torn += q.x != value(seq, 3 * lane) || q.y != value(seq, 3 * lane + 1) || q.z != value(seq, 3 * lane + 2);
        if (lane) continue;
        uint32_t w[16];
        for (uint32_t k = 0; k < 16; k++) w[k] = k % 4 == 3 ? seq : value(seq, 100 + k);
        if (how == DEVICE_EARLY) {
            for (uint32_t k = 3; k < 16; k += 4) ((volatile uint32_t *)to)[k] = seq;
            __threadfence_system();
            for (uint32_t k = 0; k < 16; k++) ((volatile uint32_t *)to)[k] = w[k];
        } else {
            mk_event e;
            memcpy(&e, w, sizeof e);
            mk_event_store(to, &e);
        }
    }
    if (lane == 0) atomicAdd(&res->looks, looks);
    if (torn) atomicAdd(&res->torn, torn);
}

#define CUDA(call)                                                                                                     \
    do {                                                                                                               \
        cudaError_t e_ = (call);                                                                                       \
        if (e_) {                                                                                                      \
            fprintf(stderr, "bus: line %d: %s\n", __LINE__, cudaGetErrorString(e_));                                   \
            exit(9);                                                                                                   \
        }                                                                                                              \
    } while (0)

static mk_submit_packets *submit;
static mk_event *event;
static result *res;

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void write_entry(uint32_t seq, int how)
{
    mk_submit e;
    uint32_t w[sizeof e / 4];
    for (uint32_t k = 0; k < sizeof e / 4; k++) w[k] = value(seq, k - 1);
    memcpy(&e, w, sizeof e);
    if (how == HOST_EARLY) {
        volatile uint32_t(*to)[4] = submit[(seq - 1) % MK_SUBMIT_RING].packet;
        for (uint32_t p = 0; p < MK_SUBMIT_PACKETS; p++) to[p][3] = seq;
        for (uint32_t p = 0; p < MK_SUBMIT_PACKETS; p++)
            for (uint32_t k = 0; k < 3; k++) to[p][k] = w[1 + 3 * p + k];
    } else {
        mk_submit_pack(submit, &e, seq);
    }
}

/* Torn entries and events. */
static unsigned long long run(int how, uint32_t entries, int *stuck)
{
    const uint32_t n = entries / WARPS + 1;
    uint32_t done[WARPS] = {0}, left = WARPS;
    unsigned long long torn = 0;
    memset(submit, 0, sizeof *submit * MK_SUBMIT_RING);
    memset(event, 0, sizeof *event * MK_EVENT_RING);
    CUDA(cudaMemset(res, 0, sizeof *res));
    CUDA(cudaDeviceSynchronize());
    double since = seconds(), moved = since;
    device<<<1, 32 * WARPS>>>(submit, event, n, how, res);
    CUDA(cudaGetLastError());
    for (uint32_t w = 0; w < WARPS; w++) write_entry(number(w, 0), how);
    while (left && seconds() - moved < 3) {
        for (uint32_t w = 0; w < WARPS; w++) {
            const mk_event *e = &event[w * PLACE];
            const uint32_t seq = number(w, done[w]);
            if (done[w] == n || !mk_event_there(e, seq)) continue;
            for (uint32_t k = 0; k < 16; k++) {
                uint32_t x;
                memcpy(&x, (const uint8_t *)e + 4 * k, 4);
                torn += x != (k % 4 == 3 ? seq : value(seq, 100 + k));
            }
            moved = seconds();
            if (++done[w] == n)
                left--;
            else
                write_entry(number(w, done[w]), how);
        }
    }
    result r;
    double took = seconds() - since;
    CUDA(cudaDeviceSynchronize()); /* its waits are bounded */
    CUDA(cudaMemcpy(&r, res, sizeof r, cudaMemcpyDeviceToHost));
    *stuck = left || r.stuck;
    printf("\"entries\": %u, \"packets_to_device\": %llu, \"packets_to_host\": %llu, \"looks\": %llu, \"torn_to_device\": %llu, \"torn_to_host\": %llu, \"us_a_round\": %.2f%s",
           n * WARPS, (unsigned long long)n * WARPS * MK_SUBMIT_PACKETS, (unsigned long long)n * WARPS * 4, r.looks, r.torn, torn, took * 1e6 / n, *stuck ? ", \"stuck\": true" : "");
    return how == HOST_EARLY ? r.torn : how == DEVICE_EARLY ? torn : r.torn + torn;
}

int main(int argc, char **argv)
{
    double n = 2e6;
    int c, stuck[3];
    while ((c = getopt(argc, argv, "n:")) != -1)
        if (c == 'n')
            n = atof(optarg);
        else
            return 2;
    if (!(n >= 1000 && n <= 1e9)) return 2;
    CUDA(cudaHostAlloc((void **)&submit, sizeof *submit * MK_SUBMIT_RING, cudaHostAllocMapped));
    CUDA(cudaHostAlloc((void **)&event, sizeof *event * MK_EVENT_RING, cudaHostAllocMapped));
    CUDA(cudaMalloc((void **)&res, sizeof *res));
    printf("{\"test\": \"bus\",\n \"whole\": {");
    const unsigned long long whole = run(WHOLE, (uint32_t)n, &stuck[0]);
    printf("},\n \"control_host_early\": {");
    const unsigned long long host = run(HOST_EARLY, (uint32_t)(n / 10), &stuck[1]);
    printf("},\n \"control_device_early\": {");
    const unsigned long long dev = run(DEVICE_EARLY, (uint32_t)(n / 10), &stuck[2]);
    const int ok = !whole && host && dev && !stuck[0] && !stuck[1] && !stuck[2];
    printf("},\n \"ok\": %s}\n", ok ? "true" : "false");
    return !ok;
}
