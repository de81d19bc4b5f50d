extern "C" { /* C headers */
#include "megakernel/pack.h"
}

#include <cuda_runtime.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

/* ---- kernels -------------------------------------------------------------------------------------------------------- */

#define THREADS 256u

/* One block a (column block, 128-row block) of the piece. */
static __global__ void block_scales(const __grid_constant__ mk_pack_piece p)
{
    __shared__ uint32_t most;
    const uint32_t cb = blockIdx.x, nkb = gridDim.x, sk = p.rows.scale_k, j = cb * sk + threadIdx.x % sk;
    uint32_t top = 0;
    if (threadIdx.x == 0) most = 0;
    __syncthreads();
    for (uint32_t i = p.p0 + blockIdx.y * MK_SCALE_ROWS + threadIdx.x / sk, end = p.p0 + (blockIdx.y + 1) * MK_SCALE_ROWS; i < end && i < p.p1; i += THREADS / sk)
        if (j < p.rows.k) top = max(top, mk_pack_magnitude(&p, i, j));
    atomicMax(&most, top);
    __syncthreads();
    if (threadIdx.x == 0) p.block[blockIdx.y * nkb + cb] = mk_fp8_block_scale(__uint_as_float(most));
}

/* A warp a row of the piece, whose scale that is. */
static __global__ void row_scales(const __grid_constant__ mk_pack_piece p)
{
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t i = p.p0 + blockIdx.x * (THREADS / 32) + threadIdx.x / 32; i < p.p1; i += gridDim.x * (THREADS / 32)) {
        uint32_t top = 0;
        for (uint32_t j = lane; j < p.rows.k; j += 32) top = max(top, mk_pack_magnitude(&p, i, j));
        top = __reduce_max_sync(0xffffffffu, top);
        if (lane == 0) p.block[i - p.p0] = mk_fp8_block_scale(__uint_as_float(top));
    }
}

/* Segment `first` + blockIdx.y; refused: the lowest (put, segment) with a weight that cannot be packed. */
static __global__ void __launch_bounds__(THREADS) segments(const __grid_constant__ mk_pack_piece p, const mk_pack_seg *seg, uint32_t first, uint32_t n, uint32_t put,
                                                           unsigned long long *refused)
{
    for (uint32_t k = first + blockIdx.y; k < first + n; k += gridDim.y) {
        const mk_pack_seg s = seg[k];
        const mk_pack_range x = mk_pack_range_of(&p, &s);
        const uint32_t thread = blockIdx.x * THREADS + threadIdx.x, threads = gridDim.x * THREADS;
        int good = 1;
        for (uint32_t g = thread; g < x.groups; g += threads) good &= mk_pack_put(&p, &s, x, g);
        const uint32_t used = p.wtype == MK_W_FP8 && !s.table ? mk_segments(s.phase, s.rows, p.rows.scale_k) : 0, scales = used * mk_pack_column_blocks(&p);
        for (uint32_t i = thread; i < scales; i += threads) {
            uint32_t at;
            float scale;
            int is = mk_pack_scale(&p, &s, i / used, i % used, &at, &scale);
            if (is > 0) ((float *)(p.dst + s.dst))[at] = scale;
            good &= is >= 0;
        }
        if (!good) atomicMin(refused, (unsigned long long)put << 32 | k);
    }
}

/* ---- bringing tensors over ------------------------------------------------------------------------------------------ */

#define STAGE     (16u << 20) /* bytes of pinned memory a transfer */
#define STAGES    4u
#define COPIERS   12          /* threads that copy from the mapping beside the caller: reading a file's pages is slower than the bus */
#define SMALL     (512u << 10) /* not worth waking them */

typedef struct copier {
    pthread_t thread;
    struct mk_packer *p;
    uint32_t index;
} copier;

struct mk_packer {
    cudaStream_t copy, pack;
    cudaEvent_t staged[STAGES], brought[2], packed[2];
    uint8_t *stage[STAGES], *raw[2];
    float *block[2];
    mk_pack_seg *seg;
    unsigned long long *refused, *seen; /* on the device; pinned, as it was after a call */
    uint64_t raw_bytes, blocks;
    uint32_t puts, stages; /* so far */
    /* the work of the copiers: a round each */
    pthread_mutex_t lock;
    pthread_cond_t start, done;
    copier helper[COPIERS];
    uint32_t helpers, round, busy;
    int stop;
    uint8_t *to;
    const uint8_t *from;
    uint64_t bytes;
};

static void share(const mk_packer *p, uint32_t index)
{
    uint64_t part = (p->bytes / (p->helpers + 1) + 4095) & ~4095ull, at = index * part, n = at < p->bytes ? p->bytes - at : 0;
    if (n > part) n = part;
    memcpy(p->to + at, p->from + at, n);
}

static void *copier_main(void *arg)
{
    copier *c = (copier *)arg;
    mk_packer *p = c->p;
    uint32_t seen = 0;
    for (;;) {
        pthread_mutex_lock(&p->lock);
        while (p->round == seen && !p->stop) pthread_cond_wait(&p->start, &p->lock);
        seen = p->round;
        int stop = p->stop;
        pthread_mutex_unlock(&p->lock);
        if (stop) return NULL;
        share(p, c->index);
        pthread_mutex_lock(&p->lock);
        if (--p->busy == 0) pthread_cond_signal(&p->done);
        pthread_mutex_unlock(&p->lock);
    }
}

static void copy_together(mk_packer *p, uint8_t *to, const uint8_t *from, uint64_t bytes)
{
    if (bytes < SMALL || !p->helpers) {
        memcpy(to, from, bytes);
        return;
    }
    pthread_mutex_lock(&p->lock);
    p->to = to;
    p->from = from;
    p->bytes = bytes;
    p->busy = p->helpers;
    p->round++;
    pthread_cond_broadcast(&p->start);
    pthread_mutex_unlock(&p->lock);
    share(p, p->helpers);
    pthread_mutex_lock(&p->lock);
    while (p->busy) pthread_cond_wait(&p->done, &p->lock);
    pthread_mutex_unlock(&p->lock);
}

static int failed(mk_err *err, cudaError_t e)
{
    return mk_fail(err, MK_E_DEVICE, "packing weights on the GPU: %s", cudaGetErrorString(e));
}

extern "C" int mk_packer_new(const mk_pack_seg *seg, uint32_t n_seg, uint64_t raw_bytes, uint32_t blocks, mk_packer **out, mk_err *err)
{
    mk_packer *p = (mk_packer *)calloc(1, sizeof *p);
    *out = p;
    if (!p) return mk_fail(err, MK_E_CAPACITY, "packing weights: out of memory");
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->start, NULL);
    pthread_cond_init(&p->done, NULL);
    p->raw_bytes = raw_bytes;
    p->blocks = blocks;
    cudaError_t e;
    if ((e = cudaStreamCreateWithFlags(&p->copy, cudaStreamNonBlocking)) || (e = cudaStreamCreateWithFlags(&p->pack, cudaStreamNonBlocking)) ||
        (e = cudaHostAlloc((void **)&p->seen, sizeof *p->seen, cudaHostAllocDefault)) ||
        (e = cudaMalloc((void **)&p->refused, sizeof *p->refused)) || (e = cudaMemset(p->refused, 0xff, sizeof *p->refused)) ||
        (e = cudaMalloc((void **)&p->seg, (n_seg + 1ull) * sizeof *seg)) || (e = cudaMemcpy(p->seg, seg, n_seg * sizeof *seg, cudaMemcpyHostToDevice)) ||
        (e = cudaDeviceSynchronize())) /* whoever zeroed the regions did so on another stream */
        return failed(err, e);
    *p->seen = ~0ull;
    for (uint32_t i = 0; i < STAGES; i++)
        if ((e = cudaHostAlloc((void **)&p->stage[i], STAGE, cudaHostAllocDefault)) || (e = cudaEventCreateWithFlags(&p->staged[i], cudaEventDisableTiming)))
            return failed(err, e);
    for (uint32_t i = 0; i < 2; i++)
        if ((e = cudaMalloc((void **)&p->raw[i], raw_bytes + 256)) || (e = cudaMalloc((void **)&p->block[i], (blocks + 1ull) * sizeof(float))) ||
            (e = cudaEventCreateWithFlags(&p->brought[i], cudaEventDisableTiming)) || (e = cudaEventCreateWithFlags(&p->packed[i], cudaEventDisableTiming)))
            return failed(err, e);
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    for (uint32_t i = 0; i < COPIERS && (long)i + 1 < cores; i++) {
        p->helper[i].p = p;
        p->helper[i].index = i;
        if (pthread_create(&p->helper[i].thread, NULL, copier_main, &p->helper[i])) break; /* the others do it */
        p->helpers++;
    }
    return MK_OK;
}

/* To the device, through pinned stages. */
static cudaError_t bring(mk_packer *p, uint8_t *to, const unsigned char *from, uint64_t bytes)
{
    for (uint64_t at = 0; at < bytes; at += STAGE) {
        uint64_t n = bytes - at < STAGE ? bytes - at : STAGE;
        uint32_t s = p->stages++ % STAGES;
        cudaError_t e = cudaEventSynchronize(p->staged[s]);
        if (e) return e;
        copy_together(p, p->stage[s], from + at, n);
        if ((e = cudaMemcpyAsync(to + at, p->stage[s], n, cudaMemcpyHostToDevice, p->copy)) || (e = cudaEventRecord(p->staged[s], p->copy))) return e;
    }
    return cudaSuccess;
}

extern "C" int mk_packer_put(mk_packer *p, const mk_pack_piece *piece, uint64_t data_bytes, uint64_t scale_bytes, uint32_t first, uint32_t n, mk_err *err)
{
    uint32_t b = p->puts % 2, rows = piece->p1 - piece->p0, nkb = mk_pack_column_blocks(piece), nrb = mk_segments(0, rows, piece->rows.scale_k);
    uint64_t scales = (data_bytes + 255) & ~255ull;
    mk_pack_piece q = *piece;
    if (scales + scale_bytes > p->raw_bytes + 256 || (mk_pack_quantises(piece) && (uint64_t)nrb * nkb > p->blocks))
        return mk_fail(err, MK_E_BUG, "packing: a piece of %llu + %llu bytes", (unsigned long long)data_bytes, (unsigned long long)scale_bytes);
    q.data = p->raw[b];
    if (piece->scales) q.scales = p->raw[b] + scales;
    q.block = p->block[b];
    cudaError_t e;
    if ((e = cudaStreamWaitEvent(p->copy, p->packed[b], 0)) || (e = bring(p, p->raw[b], piece->data, data_bytes)) ||
        (e = bring(p, p->raw[b] + scales, piece->scales, scale_bytes)) || (e = cudaEventRecord(p->brought[b], p->copy)) ||
        (e = cudaStreamWaitEvent(p->pack, p->brought[b], 0)))
        return failed(err, e);
    if (mk_pack_quantises(&q) && !q.rows.scale_k)
        row_scales<<<1024, THREADS, 0, p->pack>>>(q);
    else if (mk_pack_quantises(&q))
        block_scales<<<dim3(nkb, nrb), THREADS, 0, p->pack>>>(q);
    if (n) segments<<<dim3(n > 64 ? 4 : 64, n < 32768 ? n : 32768), THREADS, 0, p->pack>>>(q, p->seg, first, n, p->puts, p->refused);
    if ((e = cudaGetLastError()) || (e = cudaMemcpyAsync(p->seen, p->refused, sizeof *p->seen, cudaMemcpyDeviceToHost, p->pack)) ||
        (e = cudaEventRecord(p->packed[b], p->pack)))
        return failed(err, e);
    p->puts++;
    return MK_OK;
}

extern "C" int mk_packer_refused(const mk_packer *p, uint32_t *put, uint32_t *seg)
{
    unsigned long long r = *(volatile unsigned long long *)p->seen;
    *put = (uint32_t)(r >> 32);
    *seg = (uint32_t)r;
    return r != ~0ull;
}

extern "C" int mk_packer_finish(mk_packer *p, mk_err *err)
{
    cudaError_t e = cudaStreamSynchronize(p->copy);
    if (!e) e = cudaStreamSynchronize(p->pack);
    return e ? failed(err, e) : MK_OK;
}

extern "C" void mk_packer_destroy(mk_packer **pp)
{
    mk_packer *p = *pp;
    if (!p) return;
    pthread_mutex_lock(&p->lock);
    p->stop = 1;
    pthread_cond_broadcast(&p->start);
    pthread_mutex_unlock(&p->lock);
    for (uint32_t i = 0; i < p->helpers; i++) pthread_join(p->helper[i].thread, NULL);
    if (p->copy) cudaStreamSynchronize(p->copy);
    if (p->pack) cudaStreamSynchronize(p->pack);
    for (uint32_t i = 0; i < STAGES; i++) {
        cudaFreeHost(p->stage[i]);
        if (p->staged[i]) cudaEventDestroy(p->staged[i]);
    }
    for (uint32_t i = 0; i < 2; i++) {
        cudaFree(p->raw[i]);
        cudaFree(p->block[i]);
        if (p->brought[i]) cudaEventDestroy(p->brought[i]);
        if (p->packed[i]) cudaEventDestroy(p->packed[i]);
    }
    cudaFree(p->seg);
    cudaFree(p->refused);
    cudaFreeHost(p->seen);
    if (p->copy) cudaStreamDestroy(p->copy);
    if (p->pack) cudaStreamDestroy(p->pack);
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->start);
    pthread_cond_destroy(&p->done);
    free(p);
    *pp = NULL;
}
