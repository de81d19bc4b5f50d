/* What MLA_PARTIAL and GQA_PARTIAL share on the device: up to 16 query heads over one split of a row's cache, on tensor cores.
 *
 * Queries lie in the staging area as mma fragments in bf16, a second plane (x - bf16(x)) beside those blocks of 32 values that bf16 does not hold exactly. Keys
 * and values go from L2 straight into fragments; a split's next pages are prefetched into L2 meanwhile. 128 tokens at a time:
 *   scores   a warp has eight tokens and all heads; up to 64 tokens: two warps, each with half of the values
 *   softmax  a running maximum a head (shared by atomic max: exact, so no order), p = exp(s - max) rounded to bf16, what was summed shrinks
 *   sums     a warp has 32 channels and all tokens; with fewer than 512 channels, several warps share a block of channels, 16 tokens in turn
 * sum p adds the same rounded p. The order of every sum is a function of the split alone. What the time goes into is waiting: whatever is read from L2 is asked for
 * before the barrier in front of its use, and a thread has few instructions. */
#ifndef MK_ATTENTION_CUH
#define MK_ATTENTION_CUH

#include "instructions/matvec.cuh"

#define MK_ATT_HEADS  16u
#define MK_ATT_TOKENS (8u * MK_WARPS) /* at a time */
#define MK_ATT_PAGES  256u /* of a split */
#define MK_ATT_WAITER (MK_WARPS - 1)  /* the warp that waits for the cache while the others gather queries */

/* One work item. */
typedef struct mk_att {
    const uint32_t *pages;      /* the row's page table */
    uint64_t key_off;           /* of a page's first key: from page 0's place in the KV region */
    uint32_t value_off;         /* from a page's first key to its first value */
    uint32_t bytes;             /* from token to token */
    uint32_t span;              /* bytes of a page that are read, from key_off on */
    uint32_t nk, nv;            /* values of a key, of a value: multiples of 8 */
    uint32_t fine;              /* first block of 32 values of a query with a second plane */
    uint32_t heads, first, end; /* tokens [first, end) */
    float scale;
    float *dst;                 /* partial of the first head; the others follow */
} mk_att;

/* Shared memory: queries and their second plane in the staging area, the rest in the reduction tiles. */
typedef struct mk_att_shared {
    alignas(16) uint8_t p[2 * MK_ATT_HEADS * MK_ATT_TOKENS]; /* bf16, as mma fragments: mk_att_fragment */
    float4 half[MK_WARPS / 2][32];                           /* scores of the second half of the values */
    uint32_t max[MK_ATT_HEADS];                              /* as an ordered integer */
    uint32_t page[MK_ATT_PAGES];                             /* of the split */
    mk_att item;
} mk_att_shared;
static_assert(sizeof(mk_att_shared) <= MK_RED_FLOATS * 4, "scratch fits the reduction tiles");

/* Bytes of a plane of queries in the staging area, and of both planes. */
MK_BOTH uint32_t mk_att_plane_bytes(uint32_t blocks)
{
    return blocks * 1024;
}
MK_BOTH uint32_t mk_att_query_bytes(uint32_t nk, uint32_t fine)
{
    return mk_att_plane_bytes(2 * ((nk + 31) / 32) - fine);
}

/* A matrix of 16 heads as the left operand of mma m16n8k16: 512 bytes are 16 columns, a lane's four registers side by side. Lane (g, l) has heads g and g + 8 and
 * four columns that follow each other, 4 l + j; so the right operand's lane needs four consecutive columns, too. Byte of head h, column 4 l + j: */
MK_DEV uint32_t mk_att_fragment(uint32_t h, uint32_t l, uint32_t j)
{
    return (((h & 7) << 2 | l) << 4) + ((j & 2) << 2) + ((h & 8) >> 1) + ((j & 1) << 1);
}
/* Where value c of head h of a plane lies; an even c's neighbour follows it. Of lane l's eight values of a block, a k16 step has four. */
MK_DEV uint8_t *mk_att_at(uint8_t *plane, uint32_t h, uint32_t c)
{
    return plane + (c >> 5) * 1024 + (c >> 2 & 1) * 512 + mk_att_fragment(h, c >> 3 & 3, c & 3);
}
MK_DEV uint32_t mk_pack_bf16(float lo, float hi)
{
    uint32_t v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
    return v;
}
/* Values c and c + 1 (c even) of head h, both planes. */
MK_DEV void mk_att_put(uint8_t *q, uint32_t nk, uint32_t fine, uint32_t h, uint32_t c, float x, float y)
{
    const uint32_t hi = mk_pack_bf16(x, y);
    *(uint32_t *)mk_att_at(q, h, c) = hi;
    if (c >= 32 * fine)
        *(uint32_t *)mk_att_at(q + mk_att_plane_bytes((nk + 31) / 32), h, c - 32 * fine) =
            mk_pack_bf16(__fadd_rn(x, -mk_bf16_value(hi & 0xffffu)), __fadd_rn(y, -__uint_as_float(hi & 0xffff0000u)));
}

/* Values [first, first + n) of one row of wait `w` as f32 into shared memory, by thread `at` of `threads` (whole warps). */
MK_CALL void mk_read_together(const mk_wait *w, uint32_t row, uint32_t first, uint32_t n, float *dst, uint32_t at, uint32_t threads)
{
    const mk_shared *sh = mk_sh();
    const mk_gpu_args *a = &sh->args;
    const mk_vec *v = &sh->vec[w->vec];
    const uint16_t *start = sh->start + v->start_index + w->slice0;
    const uint32_t seq = sh->step.seq, epoch = mk_epoch(a->epoch0, seq, w->pub), sp = v->slice_packets, f32 = v->dtype == MK_F32, vpp = f32 ? 3 : 6;
    const uint4 *base = (const uint4 *)(a->exchange + mk_packet_offset(v, mk_half(v, seq, w->pub), row, w->slice0));
    const uint32_t s0 = mk_find_slice(start, w->nslice, first, threadIdx.x % 32), end = first + n;
    const mk_divisor by = mk_div_by_slice(v);
#pragma unroll 1
    for (uint32_t i = at;; i += threads) {
        const uint32_t s = s0 + mk_quot(i, by), p = i - (s - s0) * sp;
        if (s >= w->nslice) break;
        const uint32_t st = start[s], from = st + p * vpp, to = start[s + 1] < end ? start[s + 1] : end;
        if (st >= end) break;
        if (from >= to || from + vpp <= first) continue;
        const uint4 x = mk_packet_wait(base + s * sp + p, w, row, s * sp + p, epoch);
        const uint32_t word[3] = {x.x, x.y, x.z};
#pragma unroll
        for (uint32_t k = 0; k < 6; k++) {
            if (k >= vpp || from + k < first || from + k >= to) continue;
            dst[from + k - first] = f32 ? __uint_as_float(word[k % 3]) : mk_bf16_value((word[k / 2] >> (16 * (k & 1))) & 0xffffu);
        }
    }
    __syncwarp();
}

/* Where the keys of a page lie. */
MK_DEV const uint8_t *mk_att_page(const mk_gpu_args *a, const mk_att *x, uint32_t id)
{
    return a->kv + x->key_off + id * a->kv_page_bytes;
}
/* What is read of a page, on its way to L2. */
MK_DEV void mk_att_prefetch(const uint8_t *page, uint32_t span)
{
#pragma unroll 1
    for (uint32_t i = threadIdx.x * 128; i < span; i += MK_COMPUTE * 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(page + i));
}

MK_DEV float mk_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
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
MK_DEV void mk_mma4(float *c, uint4 a, uint32_t b0, uint32_t b1)
{
    mk_mma(c, a.x, a.y, a.z, a.w, b0, b1);
}

/* Scores of eight tokens over blocks [b, end) of 32 values. A lane's 16 bytes of a key are its fragments of two k16 steps. */
MK_DEV void mk_att_scores(const uint8_t *q, const mk_att *x, const uint8_t *key, uint32_t b, uint32_t end, uint32_t lane, float *c)
{
    constexpr int BATCH = 6; /* blocks in flight */
    const uint32_t l = lane & 3, nk = x->nk, fine = x->fine;
    const uint8_t *qf = q + mk_att_plane_bytes((nk + 31) / 32 - fine) + lane * 16; /* of block 0, had it a second plane */
    float e[4] = {0, 0, 0, 0};
    q += lane * 16;
    key += l * 16;
#pragma unroll 1
    for (; b < end; b += BATCH) {
        uint4 k[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            k[i] = make_uint4(0, 0, 0, 0);
            if (b + i < end && (b + i) * 32 + l * 8 < nk) k[i] = __ldcg((const uint4 *)(key + (b + i) * 64));
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (b + i >= end) break;
            const uint8_t *from = q + (b + i) * 1024;
            mk_mma4(c, *(const uint4 *)from, k[i].x, k[i].y);
            mk_mma4(e, *(const uint4 *)(from + 512), k[i].z, k[i].w);
            if (b + i < fine) continue;
            from = qf + (b + i) * 1024;
            mk_mma4(c, *(const uint4 *)from, k[i].x, k[i].y);
            mk_mma4(e, *(const uint4 *)(from + 512), k[i].z, k[i].w);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) c[i] = __fadd_rn(c[i], e[i]);
}

/* Four channels of 16 tokens [16 k, + 16), MK_ATT_DEEP times: a lane's are tokens 4 l .. 4 l + 3 of each 16, every `step` of them. Beyond the last token p is zero and the
 * value that of the last. */
#define MK_ATT_DEEP 2
MK_DEV void mk_att_values(uint2 (*w)[4], const mk_gpu_args *a, const mk_att *x, const uint32_t *page, uint32_t value, uint32_t tokens, uint32_t k, uint32_t step, uint32_t l)
{
#pragma unroll
    for (int n = 0; n < MK_ATT_DEEP; n++, k += step) {
        if (k * 16 >= tokens) break;
        const uint8_t *v = mk_att_page(a, x, page[k * 16 / MK_PAGE]) + value;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t t = min(k * 16 + 4 * l + i, tokens - 1);
            w[n][i] = __ldcg((const uint2 *)(v + t % MK_PAGE * x->bytes));
        }
    }
}

/* Item, queries and a maximum of 0 stand in shared memory; all compute threads call it. */
MK_CALL void mk_attend(void)
{
    mk_shared *sh = mk_sh();
    mk_att_shared *s = (mk_att_shared *)sh->red;
    const mk_att *x = &s->item;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane >> 2, l = lane & 3, heads = x->heads, nv = x->nv, end = x->end;
    /* blocks of 32 channels, and warps that share one: a power of two up to 4 */
    const uint32_t floats = nv + 4, log2_share = nv > 256 ? 0 : nv > 128 ? 1 : 2, share = 1u << log2_share;
    const uint32_t block = warp >> log2_share, turn = warp & (share - 1), ch = block * 32 + 4 * g, blocks = (x->nk + 31) / 32, half = (blocks + 1) / 2;
    const bool sums = block * 32 < nv;
    const uint32_t value = x->value_off + (ch < nv ? ch : 0) * 2; /* channels beyond the last are computed, not stored */
    float acc[4][4], sum[2] = {0, 0}, max[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < 4; j++) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0;

#pragma unroll 1
    for (uint32_t t0 = x->first; t0 < end; t0 += MK_ATT_TOKENS) {
        const uint32_t tokens = end - t0 < MK_ATT_TOKENS ? end - t0 : MK_ATT_TOKENS;
        const bool single = tokens <= MK_ATT_TOKENS / 2;
        const uint32_t tile = single ? warp & 7 : warp;
        const uint32_t *page = s->page + (t0 - x->first) / MK_PAGE;
        float c[4] = {0, 0, 0, 0};
        uint2 w[MK_ATT_DEEP][4];
        if (tile * 8 < tokens) {
            const uint32_t t = tile * 8 + g < tokens ? tile * 8 + g : tokens - 1;
            const bool second = single && warp >= 8;
            mk_att_scores(sh->staging, x, mk_att_page(&sh->args, x, page[t / MK_PAGE]) + t % MK_PAGE * x->bytes, second ? half : 0, single && !second ? half : blocks, lane, c);
            if (second) s->half[tile][lane] = make_float4(c[0], c[1], c[2], c[3]);
        }
        if (sums) mk_att_values(w, &sh->args, x, page, value, tokens, turn, share, l);
#pragma unroll 1
        for (uint32_t k = 2; k < 4 && t0 + k * MK_PAGE < end; k++) mk_att_prefetch(mk_att_page(&sh->args, x, page[k]), x->span);
        if (single) mk_sync();
        const bool mine = tile == warp; /* has scores */
        if (mine) {
            if (single && tile * 8 < tokens) {
                const float4 y = s->half[tile][lane];
                c[0] = __fadd_rn(c[0], y.x), c[1] = __fadd_rn(c[1], y.y), c[2] = __fadd_rn(c[2], y.z), c[3] = __fadd_rn(c[3], y.w);
            }
            const uint32_t t = tile * 8 + 2 * l;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                c[2 * i] = t < tokens ? __fmul_rn(c[2 * i], x->scale) : -INFINITY;
                c[2 * i + 1] = t + 1 < tokens ? __fmul_rn(c[2 * i + 1], x->scale) : -INFINITY;
                float most = fmaxf(c[2 * i], c[2 * i + 1]);
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
                if (l == 0 && 8 * i + g < heads && tile * 8 < tokens) atomicMax(&s->max[8 * i + g], mk_ordered(most));
            }
        }
        mk_sync();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float top = mk_unordered(s->max[8 * i + g]), shrink = mk_exp2(__fmul_rn(max[i] - top, 1.44269504f));
            max[i] = top;
            sum[i] = __fmul_rn(sum[i], shrink);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                acc[j][2 * i] = __fmul_rn(acc[j][2 * i], shrink);
                acc[j][2 * i + 1] = __fmul_rn(acc[j][2 * i + 1], shrink);
            }
            if (mine)
                *(uint32_t *)(s->p + tile / 2 * 512 + mk_att_fragment(8 * i + g, (tile & 1) * 2 + l / 2, 2 * (l & 1))) =
                    mk_pack_bf16(mk_exp2(__fmul_rn(c[2 * i] - top, 1.44269504f)), mk_exp2(__fmul_rn(c[2 * i + 1] - top, 1.44269504f)));
        }
        mk_sync();
        if (sums)
#pragma unroll 1
            for (uint32_t k0 = turn; k0 * 16 < tokens; k0 += MK_ATT_DEEP * share) {
                if (k0 != turn) mk_att_values(w, &sh->args, x, page, value, tokens, k0, share, l);
#pragma unroll
                for (int n = 0; n < MK_ATT_DEEP; n++) {
                    const uint32_t k = k0 + n * share;
                    if (k * 16 >= tokens) break;
                    const uint4 p = *(const uint4 *)(s->p + k * 512 + lane * 16);
                    const uint2 *v = w[n]; /* channel 4 g' + j is column g' of tile j */
                    mk_mma4(acc[0], p, __byte_perm(v[0].x, v[1].x, 0x5410), __byte_perm(v[2].x, v[3].x, 0x5410));
                    mk_mma4(acc[1], p, __byte_perm(v[0].x, v[1].x, 0x7632), __byte_perm(v[2].x, v[3].x, 0x7632));
                    mk_mma4(acc[2], p, __byte_perm(v[0].y, v[1].y, 0x5410), __byte_perm(v[2].y, v[3].y, 0x5410));
                    mk_mma4(acc[3], p, __byte_perm(v[0].y, v[1].y, 0x7632), __byte_perm(v[2].y, v[3].y, 0x7632));
                    if (block == 0) {
                        float t[4] = {sum[0], 0, sum[1], 0};
                        mk_mma4(t, p, 0x3f803f80u, 0x3f803f80u);
                        sum[0] = t[0], sum[1] = t[2];
                    }
                }
            }
    }

    /* a lane has channels 8 l .. 8 l + 7 of the block for two heads */
    const uint32_t at = block * 32 + 8 * l;
    float *buffer = (float *)sh->staging, *to = share > 1 ? buffer + turn * heads * floats : x->dst; /* every warp is past its scores */
    if (sums && at < nv)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t h = 8 * i + g;
            if (h >= heads) continue;
            float4 *y = (float4 *)(to + h * floats + at);
            y[0] = make_float4(acc[0][2 * i], acc[1][2 * i], acc[2][2 * i], acc[3][2 * i]);
            y[1] = make_float4(acc[0][2 * i + 1], acc[1][2 * i + 1], acc[2][2 * i + 1], acc[3][2 * i + 1]);
            if (block == 0 && l == 0) *(float2 *)(to + h * floats + nv) = make_float2(max[i], sum[i]);
        }
    if (share == 1) return;
    mk_sync();
#pragma unroll 1
    for (uint32_t i = 4 * threadIdx.x; i < heads * floats; i += 4 * MK_COMPUTE) {
        float4 y = *(const float4 *)(buffer + i);
        const float max0 = y.x;
#pragma unroll 1
        for (uint32_t k = 1; k < share; k++) {
            const float4 z = *(const float4 *)(buffer + k * heads * floats + i);
            y.x = __fadd_rn(y.x, z.x), y.y = __fadd_rn(y.y, z.y), y.z = __fadd_rn(y.z, z.z), y.w = __fadd_rn(y.w, z.w);
        }
        if ((i + 4) % floats) /* else max | sum p | unused */
            __stcg((float4 *)(x->dst + i), y);
        else
            __stcg((float2 *)(x->dst + i), make_float2(max0, y.y));
    }
}

/* Before an item's queries: the scratch is free again, its maximum starts from nothing, its pages are on their way, the waiter waits. */
MK_DEV void mk_att_begin(const mk_dev *d, const mk_att *x, const mk_wait *cache)
{
    mk_att_shared *s = (mk_att_shared *)d->sh->red;
    const uint32_t *page = x->pages + x->first / MK_PAGE, n = (x->end - x->first + MK_PAGE - 1) / MK_PAGE;
    const uint32_t id0 = __ldcg(page), id1 = __ldcg(page + (n > 1)), id = __ldcg(page + (d->tid < n ? d->tid : 0));
    mk_sync();
    if (d->tid < MK_ATT_HEADS) s->max[d->tid] = 0;
    if (d->tid < n) s->page[d->tid] = id;
    if (d->tid == 0) s->item = *x;
    mk_att_prefetch(mk_att_page(d->a, x, id0), x->span);
    if (n > 1) mk_att_prefetch(mk_att_page(d->a, x, id1), x->span);
    mk_trace_bytes(d, (x->end - x->first) * (x->span / MK_PAGE));
    if (cache && d->warp == MK_ATT_WAITER) {
        const mk_vec *v = &d->sh->vec[cache->vec];
        const uint32_t target = mk_counter_target(v, d->step->seq, cache->pub);
        uint32_t found;
        mk_spin spin = {0, 0};
        if (d->lane == 0)
            while ((int32_t)((found = mk_load_acquire(d->a->counter + v->counter)) - target) < 0)
                if (!(++spin.n & 255u) && !(spin.since = mk_wait_late(d->in, MK_FAULT_COUNTER, cache, target, found, spin.since))) break;
        __syncwarp();
    }
}

/* First of this worker's items of a row: it takes those with (i + row) mod parts == part. */
MK_DEV uint32_t mk_att_first(uint32_t part, uint32_t parts, uint32_t row)
{
    const uint32_t skip = row < parts ? row : row % parts;
    return part >= skip ? part - skip : part + parts - skip;
}

#endif
