/* A layer is five kernels: q|k|v, attention, o, gate|up, down; a step has the LM head and one block that takes the token besides.
 *
 * A product's block has 16 warps, an SM one block. A warp has the same 256 or 512 columns of all its rows: its share of the input lies in registers, read from memory by every lane for itself,
 * without a barrier; its weights come through a ring of its own, in pieces of 512 bytes of a row, of which a lane reads back the 16 bytes that it has asked for. The ring is filled before
 * griddepcontrol.wait, while the kernel before is at work: 112 or 96 KB an SM. A row's sums are added over the lanes when the warp has sixteen of them, and over the warps at the block's end; there the
 * norm, too, which commutes with the product.
 *
 * Two blocks of one kernel on one SM would halve their share of memory, and the hardware puts them wherever there is room. So there are two kinds, which take turns: of one kind two do not fit by shared
 * memory, of the other by registers (there are warps that leave at once), but one of each does. */
extern "C" { /* C headers */
#include "host/planner.h"
#include "instructions/op.h"
}
#include "profiles/dense_graph.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdlib.h>
#include <string.h>

/* llama-3.2-1b */
constexpr uint32_t HIDDEN = 2048, LAYERS = 16, HEADS = 32, KV_HEADS = 8, DIM = 64, INTER = 8192, VOCAB = 128256;
constexpr uint32_t GROUP = HEADS / KV_HEADS, Q = HEADS * DIM, KV = KV_HEADS * DIM, QKV = Q + 2 * KV;

constexpr uint32_t WARPS = 16, PIECE = 512, BATCH = 16; /* bytes of a row; rows whose sums a warp adds at once */
constexpr uint32_t DEPTH[2] = {14, 12}, THREADS[2] = {32 * WARPS, 32 * WARPS + 128}; /* by kind: pieces of a ring; threads, of which WARPS warps work */

typedef __nv_bfloat16 bf16;

/* What a step goes by, beside weights. */
typedef struct state {
    float *h, *qkv, *mixed, *act;  /* the residual stream, and what kernels leave for the next one */
    unsigned long long *best;      /* the greatest logit so far: its order, and ~id */
    uint32_t *steps, *token;       /* begun; [] chosen */
    uint64_t *ns;                  /* [] when */
    const bf16 *embed;
    uint64_t seed;
} state;

/* ---- the device ------------------------------------------------------------------------------------------------------ */

/* The next kernel may begin; the one before is over, and its stores are seen. */
static __device__ __forceinline__ void next_may_begin(void)
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
static __device__ __forceinline__ void await_last(void)
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
static __device__ __forceinline__ float low(uint32_t w)
{
    return __uint_as_float(w << 16);
}
static __device__ __forceinline__ float high(uint32_t w)
{
    return __uint_as_float(w & 0xffff0000u);
}
static __device__ __forceinline__ void open8(float (&x)[8], uint4 w)
{
    x[0] = low(w.x), x[1] = high(w.x), x[2] = low(w.y), x[3] = high(w.y), x[4] = low(w.z), x[5] = high(w.z), x[6] = low(w.w), x[7] = high(w.w);
}
static __device__ __forceinline__ void copy16(uint32_t to, const void *from, uint64_t policy)
{
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy) : "memory");
}
static __device__ __forceinline__ void copies_end(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* Of the sums of 2 N rows a lane keeps N, by its bit 2 N, and has those of the lane that keeps the others added. */
template <uint32_t N> static __device__ __forceinline__ void halve(float (&sum)[BATCH], uint32_t lane)
{
    const bool upper = lane & 2 * N;
#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        const float send = upper ? sum[i] : sum[i + N], keep = upper ? sum[i + N] : sum[i];
        sum[i] = keep + __shfl_xor_sync(~0u, send, 2 * N);
    }
}
/* Sixteen rows' sums over the warp: lane l returns that of row l / 2. */
static __device__ __forceinline__ float warp_sums(float (&sum)[BATCH], uint32_t lane)
{
    halve<8>(sum, lane), halve<4>(sum, lane), halve<2>(sum, lane), halve<1>(sum, lane);
    return sum[0] + __shfl_xor_sync(~0u, sum[0], 1);
}
/* A logit and its id as one word: the greater logit is the greater word, of equal ones that of the lower id. */
static __device__ unsigned long long ranked(float logit, uint32_t id)
{
    const uint32_t u = __float_as_uint(logit);
    return (unsigned long long)(u >> 31 ? ~u : u | 0x80000000u) << 32 | ~id;
}

typedef struct product_args {
    const bf16 *w[2];   /* [n][K]; SWIGLU: gate and up, of which a half of the warps has one each */
    const float *x;     /* [K] */
    const float *gamma; /* [K], NORM */
    float eps;
    float *y;           /* [n] */
    uint32_t n;         /* rows, of each matrix */
    unsigned long long *best;
} product_args;
enum ending { STORE, ADD, SWIGLU, ARGMAX };

/* The columns of a row are dealt over KW warps; a block has WARPS / KW such sets of warps, ROWS rows each. */
template <uint32_t K, uint32_t KW, uint32_t ROWS, enum ending END, bool NORM, uint32_t KIND> static __global__ void __maxnreg__(56) product(const __grid_constant__ product_args a)
{
    constexpr uint32_t D = DEPTH[KIND], SETS = WARPS / KW, EACH = K / KW / 256, BATCHES = (ROWS + BATCH - 1) / BATCH; /* EACH: pieces of a row that a warp has */
    static_assert(K % (KW * 256) == 0 && WARPS % KW == 0 && (!NORM || EACH == 1) && (END != SWIGLU || SETS == 2), "whole pieces, a matrix a set");
    static_assert(END == ARGMAX || END == SWIGLU || ROWS <= BATCH, "a thread a row at the end");
    if (threadIdx.x >= 32 * WARPS) return; /* there for their registers */
    extern __shared__ __align__(128) uint8_t ring[]; /* lines as memory has them, or every copy is two: [WARPS][D][PIECE]; then sums [rows of all batches, ARGMAX: of two][SETS][KW] */
    __shared__ float square[WARPS];
    __shared__ unsigned long long top;
    float *sums = (float *)(ring + WARPS * D * PIECE);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, set = warp / KW, part = warp % KW;
    const uint32_t block0 = blockIdx.x * (END == SWIGLU ? ROWS : SETS * ROWS), row0 = block0 + (END == SWIGLU ? 0 : set * ROWS), rows = min(ROWS, a.n - min(row0, a.n)), pieces = rows * EACH;
    const bf16 *w = a.w[END == SWIGLU ? set : 0] + (size_t)row0 * K + part * (256 * EACH) + lane * 8;
    const uint32_t first = (uint32_t)__cvta_generic_to_shared(ring) + warp * (D * PIECE) + lane * 16, end = first + D * PIECE;
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    uint32_t asked = 0;
    const auto ask = [&](uint32_t to) {
        if (asked++ < pieces) copy16(to, w, policy);
        copies_end();
        w += EACH == 1 ? K : asked % EACH ? 256 : K - 256 * (EACH - 1);
    };
#pragma unroll
    for (uint32_t i = 0; i < D; i++) ask(first + i * PIECE);
    float gain[8];
#pragma unroll
    for (uint32_t i = 0; NORM && i < 8; i++) gain[i] = __ldg(a.gamma + part * 256 + lane * 8 + i);
    next_may_begin();
    await_last();

    float x[EACH][8], norm = 1, before = 0;
#pragma unroll
    for (uint32_t e = 0; e < EACH; e++) {
        const float4 *from = (const float4 *)(a.x + part * (256 * EACH) + e * 256 + lane * 8), p = __ldcg(from), q = __ldcg(from + 1);
        x[e][0] = p.x, x[e][1] = p.y, x[e][2] = p.z, x[e][3] = p.w, x[e][4] = q.x, x[e][5] = q.y, x[e][6] = q.z, x[e][7] = q.w;
    }
    if (END == ADD && threadIdx.x < SETS * ROWS && block0 + threadIdx.x < a.n) before = __ldcg(a.y + block0 + threadIdx.x);
    if (NORM) {
        float s = 0;
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) s = fmaf(x[0][i], x[0][i], s), x[0][i] *= gain[i];
#pragma unroll
        for (uint32_t o = 16; o; o /= 2) s += __shfl_xor_sync(~0u, s, o);
        if (lane == 0) square[warp] = s;
    }
    if (END == ARGMAX) {
        if (threadIdx.x == 0) top = 0;
        __syncthreads();
    }
    unsigned long long mine = 0;
    uint32_t at = first;
#pragma unroll 1
    for (uint32_t b = 0; b < BATCHES; b++) {
        float sum[BATCH] = {};
#pragma unroll
        for (uint32_t i = 0; i < min(BATCH, ROWS); i++)
#pragma unroll
            for (uint32_t e = 0; e < EACH; e++) {
                uint4 v;
                float open[8];
                asm volatile("cp.async.wait_group %0;" ::"n"(D - 1) : "memory");
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
                open8(open, v);
#pragma unroll
                for (uint32_t j = 0; j < 8; j++) sum[i] = fmaf(open[j], x[e][j], sum[i]);
                ask(at); /* in the place that has just been read */
                at += PIECE;
                if (at == end) at = first;
            }
        const float all = warp_sums(sum, lane);
        const uint32_t place = END == ARGMAX ? b % 2 * BATCH : b * BATCH;
        if (lane % 2 == 0) sums[((place + lane / 2) * SETS + set) * KW + part] = all;
        if (END == ARGMAX) { /* a thread a row of the batch, while the others go on */
            asm volatile("bar.sync %0, %1;" ::"r"(1 + set), "n"(32 * KW) : "memory");
            const uint32_t i = threadIdx.x % (32 * KW);
            if (i < BATCH && b * BATCH + i < rows) {
                const float *s = sums + ((place + i) * SETS + set) * KW;
                float logit = 0;
#pragma unroll
                for (uint32_t k = 0; k < KW; k++) logit += s[k];
                mine = max(mine, ranked(logit, row0 + b * BATCH + i)); /* 1/rms > 0 does not change who is greatest */
            }
        }
    }
    if (END == ARGMAX) {
        if (mine) atomicMax(&top, mine);
        __syncthreads();
        if (threadIdx.x == 0) atomicMax(a.best, top);
        return;
    }
    __syncthreads();
    if (NORM) {
        float s = 0;
#pragma unroll
        for (uint32_t k = 0; k < KW; k++) s += square[k];
        norm = rsqrtf(s / K + a.eps);
    }
    const uint32_t i = threadIdx.x;
    const auto row = [&](uint32_t r, uint32_t of) {
        const float *s = sums + (r * SETS + of) * KW;
        float y = 0;
#pragma unroll
        for (uint32_t k = 0; k < KW; k++) y += s[k];
        return y * norm;
    };
    if (END == SWIGLU) {
        if (i < rows) {
            const float gate = row(i, 0);
            a.y[block0 + i] = gate / (1 + __expf(-gate)) * row(i, 1);
        }
    } else if (i < SETS * ROWS && block0 + i < a.n) {
        const float y = row(i % ROWS, i / ROWS);
        a.y[block0 + i] = END == ADD ? before + y : y;
    }
}

typedef struct attention_args {
    const float *qkv, *inv_freq;
    bf16 *cache;          /* pages, as mk_gqa has them */
    float *y;             /* [Q] */
    uint64_t page_values; /* from page to page */
    float scale;
    uint32_t pos;
} attention_args;
constexpr uint32_t ATT_THREADS = 128, ATT_WARPS = ATT_THREADS / 32, TURN = ATT_THREADS / 8, AHEAD = 4; /* eight lanes a token; turns whose keys and values are asked for beforehand */
static_assert(ATT_WARPS == GROUP, "a warp a query's rotation");

/* A cluster of SPLITS blocks a KV head, a run of tokens each: every block has a part of all outputs, and all others' parts of its share are stored into its shared memory. */
template <uint32_t SPLITS> static __global__ void __maxnreg__(128) attention(const __grid_constant__ attention_args a)
{
    constexpr uint32_t SHARE = GROUP * DIM / SPLITS;
    static_assert(DIM % SHARE == 0, "of one head");
    __shared__ float query[GROUP][DIM], key[DIM], value[DIM], sums[ATT_WARPS][GROUP][DIM + 2], got[SPLITS][SHARE + 2]; /* + 2: greatest score, sum of weights */
    const uint32_t head = blockIdx.x / SPLITS, split = blockIdx.x % SPLITS, t = threadIdx.x, warp = t / 32, lane = t % 32, dim0 = lane % 8 * 8, mine = warp * 4 + lane / 8;
    const uint32_t per = (a.pos + SPLITS) / SPLITS, t0 = split * per, t1 = min(a.pos + 1, t0 + per);
    const auto at = [&](uint32_t token, uint32_t which) { return a.cache + token / MK_PAGE * a.page_values + mk_gqa_at(DIM, head, which, token % MK_PAGE); };
    uint4 k[AHEAD], v[AHEAD];
    const auto ask = [&](uint32_t i, uint32_t token) {
        k[i] = v[i] = make_uint4(0, 0, 0, 0);
        if (token < min(t1, a.pos)) k[i] = __ldcg((const uint4 *)(at(token, 0) + dim0)), v[i] = __ldcg((const uint4 *)(at(token, 1) + dim0));
    };
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); /* with the wait below: all have begun */
#pragma unroll
    for (uint32_t i = 0; i < AHEAD; i++) ask(i, t0 + i * TURN + mine);
    float s, c;
    sincosf((float)a.pos * __ldg(a.inv_freq + lane), &s, &c);
    next_may_begin();
    await_last();

    /* everything is asked for before any of it is used */
    const float *const of = a.qkv + (head * GROUP + warp) * DIM + lane, *const other = a.qkv + Q + (warp == 1 ? KV : 0) + head * DIM + lane;
    const float q0 = __ldcg(of), q1 = __ldcg(of + 32), k0 = warp < 2 ? __ldcg(other) : 0, k1 = warp < 2 ? __ldcg(other + 32) : 0;
    query[warp][lane] = (q0 * c - q1 * s) * a.scale, query[warp][lane + 32] = (q1 * c + q0 * s) * a.scale;
    if (warp == 0) key[lane] = k0 * c - k1 * s, key[lane + 32] = k1 * c + k0 * s;
    if (warp == 1) value[lane] = k0, value[lane + 32] = k1;
    __syncthreads();
    if (split == a.pos / per) at(a.pos, t / DIM)[t % DIM] = __float2bfloat16((t < DIM ? key : value)[t % DIM]);
    float q[GROUP][8], acc[GROUP][8] = {}, most[GROUP], sum[GROUP] = {};
#pragma unroll
    for (uint32_t h = 0; h < GROUP; h++) {
        most[h] = -1e30f;
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) q[h][i] = query[h][dim0 + i];
    }
    for (uint32_t from = t0; from < t1; from += TURN * AHEAD) {
#pragma unroll
        for (uint32_t i = 0; i < AHEAD; i++) {
            const uint32_t token = from + i * TURN + mine;
            if (from + i * TURN >= t1) break;
            if (from != t0) ask(i, token);
            float key_of[8], value_of[8];
            open8(key_of, k[i]), open8(value_of, v[i]);
            if (token == a.pos)
#pragma unroll
                for (uint32_t e = 0; e < 8; e++) key_of[e] = __bfloat162float(__float2bfloat16(key[dim0 + e])), value_of[e] = __bfloat162float(__float2bfloat16(value[dim0 + e]));
#pragma unroll
            for (uint32_t h = 0; h < GROUP; h++) {
                float score = 0;
#pragma unroll
                for (uint32_t e = 0; e < 8; e++) score = fmaf(q[h][e], key_of[e], score);
#pragma unroll
                for (uint32_t o = 1; o < 8; o *= 2) score += __shfl_xor_sync(~0u, score, o);
                if (token >= t1) score = -1e30f;
                const float greatest = fmaxf(most[h], score), less = __expf(most[h] - greatest), p = token < t1 ? __expf(score - greatest) : 0;
                most[h] = greatest;
                sum[h] = sum[h] * less + p;
#pragma unroll
                for (uint32_t e = 0; e < 8; e++) acc[h][e] = fmaf(acc[h][e], less, p * value_of[e]);
            }
        }
    }
#pragma unroll
    for (uint32_t h = 0; h < GROUP; h++) { /* over the four tokens of a warp */
        float greatest = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 8));
        greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, 16));
        const float less = __expf(most[h] - greatest);
        float all = sum[h] * less;
        all += __shfl_xor_sync(~0u, all, 8), all += __shfl_xor_sync(~0u, all, 16);
#pragma unroll
        for (uint32_t e = 0; e < 8; e++) {
            float y = acc[h][e] * less;
            y += __shfl_xor_sync(~0u, y, 8), y += __shfl_xor_sync(~0u, y, 16);
            if (lane < 8) sums[warp][h][dim0 + e] = y;
        }
        if (lane == 0) sums[warp][h][DIM] = greatest, sums[warp][h][DIM + 1] = all;
    }
    __syncthreads();
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#pragma unroll
    for (uint32_t j = t; j < GROUP * DIM; j += ATT_THREADS) {
        const uint32_t h = j / DIM, place = (uint32_t)__cvta_generic_to_shared(&got[split][j % SHARE]);
        float greatest = -1e30f, y = 0, all = 0;
#pragma unroll
        for (uint32_t w = 0; w < ATT_WARPS; w++) greatest = fmaxf(greatest, sums[w][h][DIM]);
#pragma unroll
        for (uint32_t w = 0; w < ATT_WARPS; w++) {
            const float less = __expf(sums[w][h][DIM] - greatest);
            y = fmaf(sums[w][h][j % DIM], less, y);
            all = fmaf(sums[w][h][DIM + 1], less, all);
        }
        uint32_t to;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(place), "r"(j / SHARE));
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(y) : "memory");
        if (j % SHARE == 0) asm volatile("st.shared::cluster.f32 [%0], %1;\n\tst.shared::cluster.f32 [%0 + 4], %2;" ::"r"(to + 4 * SHARE), "f"(greatest), "f"(all) : "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (t < SHARE) {
        float greatest = -1e30f, y = 0, all = 0;
#pragma unroll
        for (uint32_t w = 0; w < SPLITS; w++) greatest = fmaxf(greatest, got[w][SHARE]);
#pragma unroll
        for (uint32_t w = 0; w < SPLITS; w++) {
            const float less = __expf(got[w][SHARE] - greatest);
            y = fmaf(got[w][t], less, y);
            all = fmaf(got[w][SHARE + 1], less, all);
        }
        a.y[head * GROUP * DIM + split * SHARE + t] = y / all;
    }
}

/* Takes the last step's token, and begins the next one with the id that SCHEDULE gives a pinned stream's row. */
static __global__ void begin(const __grid_constant__ state s)
{
    __shared__ uint32_t id;
    next_may_begin();
    await_last();
    if (threadIdx.x == 0) {
        const uint32_t n = *s.steps;
        if (n) {
            s.token[n - 1] = ~(uint32_t)*s.best;
            asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(s.ns[n - 1]));
        }
        *s.best = 0;
        *s.steps = n + 1;
        id = mk_pinned_id(mk_pinned_random(s.seed, n + 1), VOCAB);
    }
    __syncthreads();
    const uint32_t w = __ldg((const uint32_t *)(s.embed + (size_t)id * HIDDEN) + threadIdx.x);
    ((float2 *)s.h)[threadIdx.x] = make_float2(low(w), high(w));
}

/* A segment of one or two matrices, quarter by quarter, to their rows, of so many quarters each. */
static __global__ void unpack(uint4 *first, uint4 *second, const uint8_t *segment, uint32_t rows, uint32_t halves, uint32_t quarters)
{
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < rows * halves * quarters; i += gridDim.x * blockDim.x) {
        const uint32_t row = i % (rows * halves), quarter = i / (rows * halves);
        (row < rows ? first : second)[(size_t)(row % rows) * quarters + quarter] = *(const uint4 *)(segment + mk_quarter_at(rows * halves, quarter / 4, quarter % 4, row));
    }
}

/* ---- the host -------------------------------------------------------------------------------------------------------- */

typedef struct layer {
    bf16 *qkv, *o, *gate, *up, *down, *cache;
    const float *gamma[2]; /* before attention, before the FFN */
} layer;
typedef struct graph {
    const mk_model *m;
    layer layer[LAYERS];
    bf16 *lm_head;
    const float *gamma;
    float *inv_freq;
    uint64_t page_values;
    state s;
    void *owned[6 * LAYERS + 16];
    uint32_t n_owned;
    cudaStream_t stream;
} graph;

static int fail(mk_err *err, cudaError_t e, const char *what)
{
    return mk_fail(err, MK_E_DEVICE, "dense graph: %s: %s", what, cudaGetErrorString(e));
}

static bool bf16_of(const mk_mat *w, uint32_t n, uint32_t k)
{
    return w->wtype == MK_W_BF16 && w->n == n && w->k == k;
}

extern "C" int mk_dense_graph_fits(const mk_model *m, uint32_t rows)
{
    if (rows != 1 || m->hidden != HIDDEN || m->layers != LAYERS || m->vocab != VOCAB || m->embed_scale != 1 || !bf16_of(&m->lm_head, VOCAB, HIDDEN)) return 0;
    for (uint32_t i = 0; i < LAYERS; i++) {
        const mk_layer *l = &m->layer[i];
        if (l->mixer != MK_MIX_GQA || l->ffn != MK_FFN_DENSE) return 0;
        const mk_gqa_mixer *g = &l->gqa;
        const mk_ffn_dense *f = &l->dense;
        if (g->heads != HEADS || g->kv_heads != KV_HEADS || g->dim != DIM || g->rope != DIM || g->gated || g->q_norm.gamma.tensor[0] || !bf16_of(&g->q, Q, HIDDEN) || !bf16_of(&g->k, KV, HIDDEN) ||
            !bf16_of(&g->v, KV, HIDDEN) || !bf16_of(&g->o, HIDDEN, Q) || f->inter != INTER || !bf16_of(&f->gate, INTER, HIDDEN) || !bf16_of(&f->up, INTER, HIDDEN) || !bf16_of(&f->down, HIDDEN, INTER))
            return 0;
    }
    return 1;
}

template <typename T> static cudaError_t own(graph *g, T **p, size_t n)
{
    const cudaError_t e = cudaMalloc((void **)p, n * sizeof **p);
    if (!e) g->owned[g->n_owned++] = *p;
    return e;
}

/* Where a matrix' rows begin. */
static bf16 *rows_of(const graph *g, const mk_mat *w)
{
    if (w == &g->m->lm_head) return g->lm_head;
    for (uint32_t i = 0; i < LAYERS; i++) {
        const mk_layer *l = &g->m->layer[i];
        const layer *to = &g->layer[i];
        if (w == &l->gqa.q) return to->qkv;
        if (w == &l->gqa.k) return to->qkv + (size_t)Q * HIDDEN;
        if (w == &l->gqa.v) return to->qkv + (size_t)(Q + KV) * HIDDEN;
        if (w == &l->gqa.o) return to->o;
        if (w == &l->dense.gate) return to->gate;
        if (w == &l->dense.up) return to->up;
        if (w == &l->dense.down) return to->down;
    }
    return NULL;
}
static void param_is(graph *g, const mk_par *par, const float *at)
{
    if (par == &g->m->final_norm.gamma) g->gamma = at;
    for (uint32_t i = 0; i < LAYERS; i++) {
        if (par == &g->m->layer[i].in_norm.gamma) g->layer[i].gamma[0] = at;
        if (par == &g->m->layer[i].post_norm.gamma) g->layer[i].gamma[1] = at;
    }
}

/* Memory, and the weights in it. */
static int make(graph *g, const mk_plan *plan, mk_gpu *gpu, uint32_t tokens, uint64_t seed, mk_err *err)
{
    const mk_program *p = plan->prog;
    mk_memory d;
    memset(&d, 0, sizeof d);
    mk_gpu_memory(gpu, &d);
    cudaError_t e = cudaSuccess;
    for (uint32_t i = 0; i < LAYERS && !e; i++) {
        layer *l = &g->layer[i];
        (e = own(g, &l->qkv, (size_t)QKV * HIDDEN)) || (e = own(g, &l->o, (size_t)HIDDEN * Q)) || (e = own(g, &l->gate, (size_t)INTER * HIDDEN)) ||
            (e = own(g, &l->up, (size_t)INTER * HIDDEN)) || (e = own(g, &l->down, (size_t)HIDDEN * INTER));
    }
    state *s = &g->s;
    if (e || (e = own(g, &g->lm_head, (size_t)VOCAB * HIDDEN)) || (e = own(g, &g->inv_freq, DIM / 2)) || (e = own(g, &s->h, HIDDEN)) || (e = own(g, &s->qkv, QKV)) || (e = own(g, &s->mixed, Q)) ||
        (e = own(g, &s->act, INTER)) || (e = own(g, &s->best, 1)) || (e = own(g, &s->steps, 1)) || (e = own(g, &s->token, tokens)) || (e = own(g, &s->ns, tokens)) ||
        (e = cudaMemcpy(g->inv_freq, g->m->layer[0].gqa.inv_freq, DIM / 2 * sizeof(float), cudaMemcpyHostToDevice)) || (e = cudaMemset(s->best, 0, sizeof *s->best)) ||
        (e = cudaMemset(s->steps, 0, sizeof *s->steps)) || (e = cudaStreamCreateWithFlags(&g->stream, cudaStreamNonBlocking)))
        return fail(err, e, "memory");
    s->embed = (const bf16 *)d.embed;
    s->seed = seed;
    for (size_t i = 0; i < plan->n_item; i++) {
        const mk_pack_item *it = &plan->item[i];
        if (it->kind == MK_PACK_PARAM && !it->src) param_is(g, it->par, d.param + it->dst);
        if (it->kind != MK_PACK_TAPE) continue;
        bf16 *to[2] = {rows_of(g, it->mat[0]), it->halves == 2 ? rows_of(g, it->mat[1]) : NULL};
        if (!to[0] || (it->halves == 2 && !to[1])) return mk_fail(err, MK_E_BUG, "dense graph: %s is no matrix of these kernels", it->mat[0]->tensor);
        const uint32_t k = it->mat[0]->k;
        for (uint32_t j = 0; j < it->halves; j++) to[j] += (size_t)it->row0 * k;
        unpack<<<64, 256>>>((uint4 *)to[0], (uint4 *)to[1], d.tape + p->tape_base[it->worker] + it->dst, it->rows, it->halves, k / 8);
    }
    for (uint32_t i = 0; i < p->info.n_insn; i++)
        if (p->insn[i].opcode == MK_OP_GQA_PARTIAL) g->layer[p->insn[i].layer].cache = (bf16 *)(d.kv + p->insn[i].gqa.kv_off);
    g->page_values = p->info.kv_page_bytes / sizeof(bf16);
    for (uint32_t i = 0; i < LAYERS; i++)
        if (!g->gamma || !g->layer[i].cache || !g->layer[i].gamma[0] || !g->layer[i].gamma[1]) return mk_fail(err, MK_E_BUG, "dense graph: the plan has no cache or no norms of layer %u", i);
    if ((e = cudaGetLastError()) || (e = cudaDeviceSynchronize())) return fail(err, e, "weights");
    return MK_OK;
}

/* One kernel of the step, which may begin beside the end of the one before it. */
static cudaError_t put(graph *g, const void *kernel, uint32_t blocks, uint32_t threads, uint32_t smem, uint32_t cluster, void *args)
{
    cudaLaunchAttribute at[2];
    cudaLaunchConfig_t c;
    memset(at, 0, sizeof at);
    memset(&c, 0, sizeof c);
    at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    at[0].val.programmaticStreamSerializationAllowed = 1;
    at[1].id = cudaLaunchAttributeClusterDimension;
    at[1].val.clusterDim.x = cluster, at[1].val.clusterDim.y = at[1].val.clusterDim.z = 1;
    c.gridDim = dim3(blocks), c.blockDim = dim3(threads), c.dynamicSmemBytes = smem, c.stream = g->stream, c.attrs = at, c.numAttrs = cluster > 1 ? 2 : 1;
    /* all of an SM's memory, or two kernels would ask for different parts of it and not run side by side */
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (!e && cluster > 8) e = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    return e ? e : cudaLaunchKernelExC(&c, kernel, &args);
}
template <uint32_t K, uint32_t KW, uint32_t ROWS, enum ending END, bool NORM, uint32_t KIND> static cudaError_t put_product(graph *g, product_args a)
{
    constexpr uint32_t SETS = WARPS / KW, EACH = END == SWIGLU ? ROWS : SETS * ROWS, BATCHES = END == ARGMAX ? 2 : (ROWS + BATCH - 1) / BATCH;
    constexpr uint32_t smem = WARPS * DEPTH[KIND] * PIECE + BATCHES * BATCH * WARPS * sizeof(float);
    const void *kernel = (const void *)product<K, KW, ROWS, END, NORM, KIND>;
    const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
    return e ? e : put(g, kernel, (a.n + EACH - 1) / EACH, THREADS[KIND], smem, 1, &a);
}

static cudaError_t put_step(graph *g, uint32_t pos, uint32_t *kernels)
{
    const state *s = &g->s;
    cudaError_t e = put(g, (const void *)begin, 1, HIDDEN / 2, 0, 1, &g->s);
    for (uint32_t i = 0; i < LAYERS && !e; i++) {
        const layer *l = &g->layer[i];
        const mk_layer *m = &g->m->layer[i];
        attention_args a = {s->qkv, g->inv_freq, l->cache, s->mixed, g->page_values, m->gqa.scale, pos};
        e = put_product<HIDDEN, 8, 12, STORE, true, 0>(g, {{l->qkv}, s->h, l->gamma[0], m->in_norm.eps, s->qkv, QKV});
        if (!e) e = pos < 512 ? put(g, (const void *)attention<8>, 8 * KV_HEADS, ATT_THREADS, 0, 8, &a) : put(g, (const void *)attention<16>, 16 * KV_HEADS, ATT_THREADS, 0, 16, &a);
        if (!e) e = put_product<Q, 8, 8, ADD, false, 1>(g, {{l->o}, s->mixed, NULL, 0, s->h, HIDDEN});
        if (!e) e = put_product<HIDDEN, 8, 63, SWIGLU, true, 0>(g, {{l->gate, l->up}, s->h, l->gamma[1], m->post_norm.eps, s->act, INTER});
        if (!e) e = put_product<INTER, 16, 16, ADD, false, 1>(g, {{l->down}, s->act, NULL, 0, s->h, HIDDEN});
    }
    *kernels = 2 + 5 * LAYERS;
    return e ? e : put_product<HIDDEN, 8, 486, ARGMAX, true, 0>(g, {{g->lm_head}, s->h, g->gamma, g->m->final_norm.eps, NULL, VOCAB, s->best});
}

static int run(graph *g, const mk_baseline_config *cfg, uint32_t steps, uint32_t *kernels, mk_err *err)
{
    cudaGraph_t made = 0;
    cudaGraphExec_t exec = 0;
    cudaError_t e = cudaStreamBeginCapture(g->stream, cudaStreamCaptureModeThreadLocal);
    if (e) return fail(err, e, "capturing");
    for (uint32_t i = 0; i < cfg->chain && !e; i++) e = put_step(g, cfg->context - 1, kernels);
    const cudaError_t captured = cudaStreamEndCapture(g->stream, &made);
    if (!e) e = captured;
    if (!e) e = cudaGraphInstantiate(&exec, made, 0);
    for (uint32_t i = 0; i < steps && !e; i += cfg->chain) e = cudaGraphLaunch(exec, g->stream);
    const cudaError_t ended = cudaStreamSynchronize(g->stream);
    if (!e) e = ended;
    if (exec) cudaGraphExecDestroy(exec);
    if (made) cudaGraphDestroy(made);
    return e ? fail(err, e, "running") : MK_OK;
}

extern "C" int mk_dense_graph_run(const mk_model *m, const mk_plan *plan, mk_gpu *gpu, const mk_baseline_config *cfg, mk_baseline_result *r, mk_err *err)
{
    const uint32_t warm = MK_BASELINE_WARM, tokens = warm + cfg->steps, steps = (tokens + 1 + cfg->chain - 1) / cfg->chain * cfg->chain; /* a step's token is taken by the next one */
    graph g;
    memset(&g, 0, sizeof g);
    memset(r, 0, sizeof *r);
    g.m = m;
    uint64_t *ns = (uint64_t *)malloc(tokens * sizeof *ns);
    r->step_ms = (double *)malloc(cfg->steps * sizeof *r->step_ms);
    r->token = (uint32_t *)malloc(tokens * sizeof *r->token);
    int rc = !ns || !r->step_ms || !r->token ? mk_fail(err, MK_E_CAPACITY, "out of memory") : MK_OK;
    if (!rc) rc = make(&g, plan, gpu, steps, cfg->seed, err);
    if (!rc) rc = run(&g, cfg, steps, &r->kernels, err);
    cudaError_t e = cudaSuccess;
    if (!rc && ((e = cudaMemcpy(ns, g.s.ns, tokens * sizeof *ns, cudaMemcpyDeviceToHost)) || (e = cudaMemcpy(r->token, g.s.token, tokens * sizeof *r->token, cudaMemcpyDeviceToHost))))
        rc = fail(err, e, "reading results");
    for (uint32_t i = 0; i < cfg->steps && !rc; i++) {
        r->step_ms[i] = (double)(ns[warm + i] - ns[warm + i - 1]) * 1e-6;
        r->token[i] = r->token[warm + i];
    }
    for (uint32_t i = 0; i < g.n_owned; i++) cudaFree(g.owned[i]);
    if (g.stream) cudaStreamDestroy(g.stream);
    free(ns);
    return rc;
}
