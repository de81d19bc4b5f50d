/* What MLA_PARTIAL and GQA_PARTIAL share on the device: up to 32 query heads over one split of a row's cache, on tensor cores.
 *
 * Queries lie in the staging area as bf16, a second plane (x - bf16(x)) beside those blocks of 32 values that bf16 does not hold exactly. Keys and values go
 * from L2 straight into mma fragments; a split's next pages are prefetched into L2 meanwhile. 128 tokens at a time:
 *   scores   a warp has eight tokens and all heads
 *   softmax  a running maximum a head (shared by atomic max: exact, so no order), p = exp(s - max) rounded to bf16, what was summed shrinks
 *   sums     a warp has 32 channels and all tokens; with fewer than 512 channels, several warps share a block of channels, 16 tokens in turn
 * sum p adds the same rounded p. The order of every sum is a function of the split alone. */
#ifndef MK_ATTENTION_CUH
#define MK_ATTENTION_CUH

#include "instructions/matvec.cuh"

#define MK_ATT_HEADS  32u
#define MK_ATT_TOKENS (8u * MK_WARPS) /* at a time */

/* One work item. */
typedef struct mk_att {
    const uint32_t *pages;          /* the row's page table */
    uint64_t key_off, value_off;    /* of the first key and value of a page: in the KV region, page 0 */
    uint32_t key_bytes, value_bytes; /* from token to token */
    uint32_t span;                  /* bytes of a page that are read, from key_off on */
    uint32_t nk, nv;                /* values of a key, of a value: multiples of 8 */
    uint32_t fine;                  /* first block of 32 values of a query with a second plane */
    uint32_t heads, first, end;     /* tokens [first, end) */
    float scale;
    float *dst;                     /* partial of the first head; the others follow */
} mk_att;

/* Shared memory: queries and their second plane in the staging area, the rest in the reduction tiles. */
typedef struct mk_att_shared {
    alignas(16) uint8_t p[2 * MK_ATT_HEADS * MK_ATT_TOKENS]; /* bf16, as mma fragments: mk_att_fragment */
    uint32_t max[MK_ATT_HEADS];                              /* as an ordered integer */
    mk_att item;
} mk_att_shared;
static_assert(sizeof(mk_att_shared) <= MK_RED_FLOATS * 4, "scratch fits the reduction tiles");

/* Bytes of the queries of `heads` heads in the staging area, both planes. */
MK_BOTH uint32_t mk_att_plane_bytes(uint32_t blocks, uint32_t heads)
{
    return (heads + 15) / 16 * blocks * 1024;
}
MK_BOTH uint32_t mk_att_query_bytes(uint32_t nk, uint32_t fine, uint32_t heads)
{
    const uint32_t blocks = (nk + 31) / 32;
    return mk_att_plane_bytes(blocks, heads) + mk_att_plane_bytes(blocks - fine, heads);
}

/* A matrix of heads as the left operand of mma m16n8k16: 512 bytes are 16 heads and 16 columns, a lane's four registers side by side. Lane (g, l) has heads g and
 * g + 8 and four columns that follow each other, column c + 4 l; so the right operand's lane needs four consecutive columns, too. Byte of head h of 16, column 4 l + j
 * of 16: */
MK_DEV uint32_t mk_att_fragment(uint32_t h, uint32_t l, uint32_t j)
{
    return (((h & 7) << 2 | l) << 4) + ((j & 2) << 2) + ((h & 8) >> 1) + ((j & 1) << 1);
}
/* Where value c of head h of a plane of `blocks` blocks of 32 values lies: of lane l's eight values of a block, a k16 step has four. */
MK_DEV uint16_t *mk_att_at(uint8_t *plane, uint32_t blocks, uint32_t h, uint32_t c)
{
    return (uint16_t *)(plane + ((((h >> 4) * blocks + (c >> 5)) << 1) + ((c >> 2) & 1)) * 512 + mk_att_fragment(h & 15, (c >> 3) & 3, c & 3));
}
/* Value c of head h, both planes. */
MK_DEV void mk_att_put(const mk_dev *d, uint32_t nk, uint32_t fine, uint32_t heads, uint32_t h, uint32_t c, float x)
{
    const uint32_t blocks = (nk + 31) / 32, hi = mk_bf16_bits(x);
    *mk_att_at(d->sh->staging, blocks, h, c) = (uint16_t)hi;
    if (c >= 32 * fine)
        *mk_att_at(d->sh->staging + mk_att_plane_bytes(blocks, heads), blocks - fine, h, c - 32 * fine) = (uint16_t)mk_bf16_bits(__fadd_rn(x, -mk_bf16_value(hi)));
}

MK_DEV const uint8_t *mk_att_page(const mk_gpu_args *a, const mk_att *x, uint32_t page)
{
    return a->kv + __ldcg(x->pages + page) * a->kv_page_bytes;
}
/* Pages [t / MK_PAGE, + 2) on their way to L2, as far as there are tokens. */
MK_DEV void mk_att_prefetch(const mk_gpu_args *a, const mk_att *x, uint32_t t)
{
#pragma unroll 1
    for (uint32_t k = 0; k < 2 && t < x->end; k++, t += MK_PAGE) {
        const uint8_t *page = mk_att_page(a, x, t / MK_PAGE) + x->key_off;
#pragma unroll 1
        for (uint32_t i = threadIdx.x * 128; i < x->span; i += MK_COMPUTE * 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(page + i));
    }
}

MK_DEV void mk_mma4(float *c, uint4 a, uint32_t b0, uint32_t b1)
{
    mk_mma(c, a.x, a.y, a.z, a.w, b0, b1);
}
MK_DEV float mk_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
MK_DEV uint32_t mk_pack_bf16(float lo, float hi)
{
    uint32_t v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
    return v;
}
/* Floats in the order of unsigned integers; 0 is below all of them. */
MK_DEV uint32_t mk_ordered(float x)
{
    const uint32_t u = __float_as_uint(x);
    return u ^ (u & 0x80000000u ? 0xffffffffu : 0x80000000u);
}
MK_DEV float mk_unordered(uint32_t k)
{
    return __uint_as_float(k ^ (k & 0x80000000u ? 0x80000000u : 0xffffffffu));
}

/* Scores of this warp's eight tokens: c[m] is the mma tile of heads [16 m, + 16). A lane's 16 bytes of a key are its fragments of two k16 steps. */
MK_DEV void mk_att_scores(const uint8_t *q, const mk_att *x, const uint8_t *key, uint32_t lane, float (*c)[4])
{
    constexpr int BATCH = 6; /* blocks of 32 values in flight */
    const uint32_t l = lane & 3, blocks = (x->nk + 31) / 32, nk = x->nk, fine = x->fine, two = x->heads > 16;
    const uint8_t *qf = q + mk_att_plane_bytes(blocks, x->heads) + lane * 16;
    const uint32_t next = blocks * 1024, next_fine = (blocks - fine) * 1024; /* 16 heads further */
    q += lane * 16;
    key += l * 16;
#pragma unroll 1
    for (uint32_t b0 = 0; b0 < blocks; b0 += BATCH) {
        uint4 k[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            k[i] = make_uint4(0, 0, 0, 0);
            if ((b0 + i) * 32 + l * 8 < nk) k[i] = __ldcg((const uint4 *)(key + (b0 + i) * 64));
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (b0 + i >= blocks) break;
            const bool rest = b0 + i >= fine;
#pragma unroll
            for (int m = 0; m < 2; m++) {
                if (m && !two) break;
                const uint8_t *from = q + m * next + (b0 + i) * 1024;
                mk_mma4(c[m], *(const uint4 *)from, k[i].x, k[i].y);
                mk_mma4(c[m], *(const uint4 *)(from + 512), k[i].z, k[i].w);
                if (!rest) continue;
                from = qf + m * next_fine + (b0 + i - fine) * 1024;
                mk_mma4(c[m], *(const uint4 *)from, k[i].x, k[i].y);
                mk_mma4(c[m], *(const uint4 *)(from + 512), k[i].z, k[i].w);
            }
        }
    }
}

/* Item, queries and a maximum of 0 stand in shared memory; all compute threads call it. */
MK_CALL void mk_attend(void)
{
    mk_shared *sh = mk_sh();
    const mk_gpu_args *a = &sh->args;
    mk_att_shared *s = (mk_att_shared *)sh->red;
    const mk_att *x = &s->item;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t g = lane >> 2, l = lane & 3, heads = x->heads, two = heads > 16;
    /* blocks of 32 channels, and warps that share one: a power of two up to 4 */
    const uint32_t blocks = (x->nv + 31) / 32, floats = x->nv + 4;
    uint32_t share = blocks > 8 ? 1 : blocks > 4 ? 2 : 4;
    while (share > 1 && share * heads * floats * 4 > MK_STAGING) share >>= 1;
    const uint32_t block = warp / share, turn = warp % share, ch = block * 32 + 4 * g;
    const bool sums = block < blocks;
    float acc[2][4][4], sum[2][2], max[2][2];
#pragma unroll
    for (int m = 0; m < 2; m++) {
        max[m][0] = max[m][1] = -INFINITY;
        sum[m][0] = sum[m][1] = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) acc[m][0][i] = acc[m][1][i] = acc[m][2][i] = acc[m][3][i] = 0;
    }

#pragma unroll 1
    for (uint32_t t0 = x->first; t0 < x->end; t0 += MK_ATT_TOKENS) {
        const uint32_t tokens = x->end - t0 < MK_ATT_TOKENS ? x->end - t0 : MK_ATT_TOKENS, p0 = t0 / MK_PAGE;
        const uint8_t *page0 = mk_att_page(a, x, p0), *page1 = tokens > MK_PAGE ? mk_att_page(a, x, p0 + 1) : page0;
        float c[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
        mk_att_prefetch(a, x, t0 + MK_ATT_TOKENS);
        if (warp * 8 < tokens) {
            const uint32_t t = warp * 8 + g < tokens ? warp * 8 + g : tokens - 1;
            mk_att_scores(sh->staging, x, (t < MK_PAGE ? page0 : page1) + x->key_off + (size_t)(t % MK_PAGE) * x->key_bytes, lane, c);
        }
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t t = warp * 8 + 2 * l, h = 16 * m + 8 * i + g;
                float *v = &c[m][2 * i];
                v[0] = t < tokens ? __fmul_rn(v[0], x->scale) : -INFINITY;
                v[1] = t + 1 < tokens ? __fmul_rn(v[1], x->scale) : -INFINITY;
                float most = fmaxf(v[0], v[1]);
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
                if (l == 0 && h < heads && warp * 8 < tokens) atomicMax(&s->max[h], mk_ordered(most));
            }
        mk_sync();
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t h = 16 * m + 8 * i + g;
                const float top = mk_unordered(s->max[h]), shrink = mk_exp2(__fmul_rn(max[m][i] - top, 1.44269504f));
                *(uint32_t *)(s->p + (m * MK_ATT_TOKENS / 16 + warp / 2) * 512 + mk_att_fragment(8 * i + g, (warp & 1) * 2 + l / 2, 2 * (l & 1))) =
                    mk_pack_bf16(mk_exp2(__fmul_rn(c[m][2 * i] - top, 1.44269504f)), mk_exp2(__fmul_rn(c[m][2 * i + 1] - top, 1.44269504f)));
                max[m][i] = top;
                sum[m][i] = __fmul_rn(sum[m][i], shrink);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    acc[m][j][2 * i] = __fmul_rn(acc[m][j][2 * i], shrink);
                    acc[m][j][2 * i + 1] = __fmul_rn(acc[m][j][2 * i + 1], shrink);
                }
            }
        mk_sync();
        if (!sums) continue;
        /* a lane has four channels of four tokens: tokens 4 l .. 4 l + 3 of 16 are its k values, channel 4 n + j is column n of tile j */
#pragma unroll 2
        for (uint32_t k = turn; k * 16 < tokens; k += share) {
            const uint8_t *v = (k < MK_PAGE / 16 ? page0 : page1) + x->value_off + ch * 2;
            uint2 w[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t t = k * 16 + 4 * l + i < tokens ? k * 16 + 4 * l + i : tokens - 1; /* p is zero there, the value finite */
                w[i] = make_uint2(0, 0);
                if (ch < x->nv) w[i] = __ldcg((const uint2 *)(v + (size_t)(t % MK_PAGE) * x->value_bytes));
            }
#pragma unroll
            for (int m = 0; m < 2; m++) {
                if (m && !two) break;
                const uint4 p = *(const uint4 *)(s->p + (m * MK_ATT_TOKENS / 16 + k) * 512 + lane * 16);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const uint32_t pick = j & 1 ? 0x7632 : 0x5410;
                    mk_mma4(acc[m][j], p, __byte_perm(j < 2 ? w[0].x : w[0].y, j < 2 ? w[1].x : w[1].y, pick),
                            __byte_perm(j < 2 ? w[2].x : w[2].y, j < 2 ? w[3].x : w[3].y, pick));
                }
                if (block == 0) {
                    float t[4] = {sum[m][0], 0, sum[m][1], 0};
                    mk_mma4(t, p, 0x3f803f80u, 0x3f803f80u);
                    sum[m][0] = t[0];
                    sum[m][1] = t[2];
                }
            }
        }
    }

    /* a lane has channels 8 l .. 8 l + 7 of the block for four heads */
    const uint32_t at = block * 32 + 8 * l;
    float *buffer = (float *)sh->staging, *to = share > 1 ? buffer + turn * heads * floats : x->dst; /* every warp is past its scores */
    if (sums && at < x->nv)
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t h = 16 * m + 8 * i + g;
                if (h >= heads) continue;
                float4 *y = (float4 *)(to + h * floats + at);
                y[0] = make_float4(acc[m][0][2 * i], acc[m][1][2 * i], acc[m][2][2 * i], acc[m][3][2 * i]);
                y[1] = make_float4(acc[m][0][2 * i + 1], acc[m][1][2 * i + 1], acc[m][2][2 * i + 1], acc[m][3][2 * i + 1]);
                if (block == 0 && l == 0) *(float2 *)(to + h * floats + x->nv) = make_float2(max[m][i], sum[m][i]);
            }
    if (share == 1) return;
    mk_sync();
#pragma unroll 1
    for (uint32_t h = warp; h < heads; h += MK_WARPS)
#pragma unroll 1
        for (uint32_t i = lane; i < x->nv + 2; i += 32) {
            float y = buffer[h * floats + i];
#pragma unroll 1
            for (uint32_t k = 1; k < share && i != x->nv; k++) y = __fadd_rn(y, buffer[(k * heads + h) * floats + i]);
            x->dst[(size_t)h * floats + i] = y;
        }
}

/* Before an item's queries: the scratch is free again, its maximum starts from nothing, its pages are on their way. */
MK_DEV void mk_att_begin(const mk_dev *d, const mk_att *x)
{
    mk_att_shared *s = (mk_att_shared *)d->sh->red;
    mk_sync();
    if (d->tid < MK_ATT_HEADS) s->max[d->tid] = 0;
    if (d->tid == 0) s->item = *x;
    mk_att_prefetch(d->a, x, x->first);
    mk_trace_bytes(d, (x->end - x->first) * (x->span / MK_PAGE));
}

/* What this worker's items of the step's rows are: it takes those with (i + row) mod parts == part. */
MK_DEV uint32_t mk_att_first(uint32_t part, uint32_t parts, uint32_t row)
{
    const uint32_t skip = row % parts;
    return part >= skip ? part - skip : part + parts - skip;
}

#endif
