/* What the matrix opcodes (GEMV, LM_HEAD, EXPERT_UP, EXPERT_DOWN) share on the device.
 *
 * A vector is staged in the form that its matrix' weights are multiplied in, up to eight rows of it:
 *   BF16 weights   bf16
 *   the router     three planes of bf16, whose sum is the f32 value exactly
 *   FP8 weights    f16, because e4m3 becomes f16 in one instruction a pair. A row is multiplied by the power of two that brings its largest value below 2^15; a
 *                  bf16 value has eight significant bits and f16 eleven, so that this is the bf16 value exactly down to 2^-29 of the row's largest.
 * RMS norm commutes with the product: the staged values carry gamma, the sum of squares is taken while gathering, and the results are multiplied by 1/rms
 * (and by the inverse of the row's power of two). A head's norm (HEADNORM) multiplies the partial sums of the K blocks that lie in the head.
 *
 * A stage of a tape is consumed by a group of four warps: the group of its slot in the ring, so that a slot never changes hands. Stage s of a segment belongs to group
 * partial sum s mod 2, whichever group that is this time; within it the warps take K blocks in turn (and, of more than 64 rows, half the tiles each).
 * Partial sums are added in ascending order. So the order of every sum is a function of (tile, k) alone: rows come and go as columns of mma.sync without
 * touching each other's bits. Weights lie as ldmatrix wants them, [16-byte chunk of k][row][16 bytes] (instructions/isa.h); a tile of 16 rows may reach past the
 * segment's last row, and those results are not looked at. */
#ifndef MK_MATVEC_CUH
#define MK_MATVEC_CUH

#include "instructions/mk_math.h"
#include "instructions/product.cuh"
#include "megakernel/device.cuh"

/* ---- gathering ------------------------------------------------------------------------------------------------------ */

/* Where value k of a staged row lies: 32 values in 64 bytes, those of one lane of mma.sync side by side. */
MK_DEV uint32_t mk_staged_at(uint32_t k, bool f16)
{
    return (k >> 5) * 64 + (f16 ? (k & 12) * 4 + (k & 16) / 2 + (k & 3) * 2 : (k & 6) * 8 + (k & 24) / 2 + (k & 1) * 2);
}

/* What multiplies a row's values before they become f16: a power of two that brings values up to top * gain, given by their bits, below 2^15. NaN if top is not
 * finite. */
MK_DEV float mk_f16_scale(uint32_t top, uint32_t gain)
{
    const uint32_t e = top >> 23, g = gain ? (gain >> 23) + 1 : 127; /* the product's exponent: one more than the sum of both */
    const int s = 127 + 14 + 127 + 127 - (int)(e + g);
    return __uint_as_float(e >= 255 ? 0x7fffffffu : (uint32_t)(e == 0 ? 127 : s < 1 ? 1 : s > 250 ? 250 : s) << 23);
}
MK_DEV uint32_t mk_f16_pair(float x0, float x1)
{
    uint32_t v;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(x1), "f"(x0));
    return v;
}
/* Two bf16, times a power of two. */
MK_DEV uint32_t mk_f16_scaled(uint32_t v, float scale)
{
    return mk_f16_pair(__uint_as_float(v << 16) * scale, __uint_as_float(v & 0xffff0000u) * scale);
}
MK_DEV void mk_sts16(uint32_t at, uint32_t v)
{
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"((uint16_t)v) : "memory");
}
MK_DEV void mk_sts64(uint32_t at, uint32_t x, uint32_t y)
{
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(x), "r"(y) : "memory");
}
/* Values from k on of the row at shared address `row` are 0 up to the end of their K block: weights there are zero, the values must be finite. */
MK_DEV void mk_stage_pad(uint32_t row, uint32_t k, bool f16)
{
    for (; k & 63; k++) mk_sts16(row + mk_staged_at(k, f16), 0);
}

/* Whether it matters who stores to `at` last: where nobody looks it does not, but racecheck cannot know. */
MK_DEV bool mk_minds(uint32_t at, uint32_t nowhere)
{
    return MK_ARRIVALS == 1 || at != nowhere;
}
MK_DEV const mk_fed *mk_fed_of(const mk_insn *in)
{
    return (const mk_fed *)in;
}

/* A row's largest magnitude, its sum of squares: by warp. */
MK_DEV void mk_row_top(const mk_dev *d, uint32_t r, uint32_t top)
{
    top = __reduce_max_sync(0xffffffffu, top);
    if (d->lane == 0) d->sh->top[d->memo->parity][r][d->warp] = top;
}
MK_DEV void mk_row_squares(const mk_dev *d, uint32_t r, float sum)
{
    sum = mk_warp_sum(sum);
    if (d->lane == 0) d->sh->sumsq[d->memo->parity][r][d->warp] = sum;
}
MK_DEV void mk_gain(const mk_dev *d, uint32_t gain)
{
    gain = __reduce_max_sync(0xffffffffu, gain);
    if (d->lane == 0) d->sh->gain[d->memo->parity][d->warp] = gain;
}
MK_DEV uint32_t mk_max8(const uint32_t *p)
{
    const uint4 a = *(const uint4 *)p, b = *(const uint4 *)(p + 4);
    return max(max(max(a.x, a.y), max(a.z, a.w)), max(max(b.x, b.y), max(b.z, b.w)));
}
static_assert(MK_WARPS == 8, "mk_max8, mk_row_factor");
/* What row r is multiplied by, after the barrier that follows mk_row_top and mk_gain. */
MK_DEV float mk_row_scale(const mk_dev *d, uint32_t r)
{
    return mk_f16_scale(mk_max8(d->sh->top[d->memo->parity][r]), mk_max8(d->sh->gain[d->memo->parity]));
}
/* The inverse of a power of two of mk_f16_scale; NaN has made NaN of the values already. */
MK_DEV float mk_unscale(float scale)
{
    return __uint_as_float((254u << 23) - __float_as_uint(scale));
}
/* 1 / sqrt(x) and x sigmoid(x) to some 1e-7 in few instructions: they stand between the last product and the next exchange. */
MK_DEV float mk_rsqrt(float x)
{
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return __fmul_rn(r, __fmaf_rn(__fmul_rn(-0.5f, x), __fmul_rn(r, r), 1.5f));
}
MK_DEV float mk_silu(float x)
{
    float e, r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(x, -1.44269504f)));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(__fadd_rn(e, 1.0f)));
    return __fmul_rn(x, r);
}
/* What row r's results are to be multiplied by: 1/rms with RMS, and the inverse of the power of two. After the barrier that follows the gathering. */
MK_DEV float mk_row_factor(const mk_dev *d, const mk_plan *p, uint32_t r)
{
    const uint32_t parity = d->memo->parity;
    float f = 1;
    if (p->x.prologue == MK_PRO_RMS) {
        const float4 a = *(const float4 *)d->sh->sumsq[parity][r], b = *(const float4 *)(d->sh->sumsq[parity][r] + 4);
        f = mk_rsqrt(((a.x + a.y) + (a.z + a.w) + ((b.x + b.y) + (b.z + b.w))) * p->inv_k + p->x.eps);
    }
    return p->x.form == MK_X_F16 ? f * mk_unscale(d->sh->scale[parity][r]) : f;
}

MK_DEV uint4 mk_lds128(uint32_t at)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
MK_DEV uint2 mk_lds64(uint32_t at)
{
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    return v;
}
MK_DEV void mk_sts32(uint32_t at, uint32_t v)
{
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}
MK_DEV uint32_t mk_bf16_pair(float x0, float x1)
{
    uint32_t v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(x1), "f"(x0));
    return v;
}

/* Gathering one row has two passes, a barrier between them: its packets go to shared memory in order, and then a thread opens four values at a time: few instructions,
 * because all that a thread does is on the way of the token. Of several rows a thread takes the same packet, whose values' places and gammas it works out once, and
 * stages its values as bf16 at once; where the form is f16 the second pass multiplies them by the row's power of two, which comes from the largest value and the
 * largest gamma: they bound the largest product.
 * Packet i belongs to thread i modulo all, however many rows there are and whatever the chunks: so does the order in which squares are added. */

/* A packet's values, as far as [off, off + len) of the vector holds them, to their places; m: its word of the map. Their squares are added to *sum. Returns the bits of
 * the largest magnitude. */
template <bool F32> MK_DEV uint32_t mk_packet_order(uint4 q, uint32_t m, uint32_t off, uint32_t len, uint32_t ordered, float *sum)
{
    const uint32_t word[3] = {q.x, q.y, q.z}, at = MK_MAP_FIRST(m) - off, n = MK_MAP_VALUES(m), size = F32 ? 4 : 2;
    const uint32_t to = ordered + at * size;
    uint32_t top = 0;
#pragma unroll
    for (uint32_t k = 0; k < (F32 ? 3 : 6); k++) {
        if (k >= n || at + k >= len) continue;
        if (F32) {
            const float x = __uint_as_float(word[k % 3]);
            *sum = __fmaf_rn(x, x, *sum);
            top = max(top, word[k % 3] & 0x7fffffffu);
            mk_sts32(to + 4 * k, word[k % 3]);
        } else {
            const uint32_t bits = k & 1 ? word[k / 2] >> 16 : word[k / 2];
            const float x = mk_bf16_value(bits);
            *sum = __fmaf_rn(x, x, *sum);
            top = max(top, bits & 0x7fffu);
            mk_sts16(to + 2 * k, bits);
        }
    }
    return F32 ? top : top << 16;
}
/* Whether anybody publishes that packet. */
MK_DEV bool mk_map_used(uint32_t m)
{
    return MK_MAP_VALUES(m) || MK_MAP_TRAILER(m) < 3;
}
/* The word of a packet that is its slice's trailer, if it has one, to trailer[slice]. */
MK_DEV void mk_packet_trailer(uint4 q, uint32_t m, float *trailer)
{
    const uint32_t w = MK_MAP_TRAILER(m);
    if (w < 3) trailer[MK_MAP_SLICE(m)] = __uint_as_float(w == 0 ? q.x : w == 1 ? q.y : q.z);
}
/* 1/rms of head h of a row, out of its slices' trailers. */
MK_DEV void mk_head_norm(const mk_dev *d, const mk_plan *p, uint32_t r, const float *trailer)
{
    const uint32_t heads = mk_small_quot(p->x.k, p->x.norm_group), slices = d->in->wait[0].nslice, h = d->tid;
    if (h >= heads) return;
    const uint32_t per = mk_small_quot(slices, heads);
    float sum = 0;
#pragma unroll 1
    for (uint32_t k = h * per; k < (h + 1) * per; k++) sum += trailer[k];
    d->sh->head_rstd[r][h] = mk_rsqrtf(mk_div(sum, (float)p->x.norm_group) + p->x.eps);
}

/* Four values from k on, at `ordered`, of which those below `end` exist: they are staged at `to`. RMS: they meet gamma g. plane: bytes between planes. */
template <bool F32, uint32_t FORM, bool RMS> MK_DEV void mk_stage_four(uint32_t ordered, uint32_t k, uint32_t end, const float *g, float scale, uint32_t to, uint32_t plane)
{
    float y[4];
    if (F32) {
        const uint4 u = mk_lds128(ordered);
        y[0] = __uint_as_float(u.x), y[1] = __uint_as_float(u.y), y[2] = __uint_as_float(u.z), y[3] = __uint_as_float(u.w);
    } else {
        const uint2 u = mk_lds64(ordered);
        y[0] = __uint_as_float(u.x << 16), y[1] = __uint_as_float(u.x & 0xffff0000u), y[2] = __uint_as_float(u.y << 16), y[3] = __uint_as_float(u.y & 0xffff0000u);
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) y[i] = k + i < end ? y[i] : 0;
    if (RMS)
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) y[i] = __fmul_rn(y[i], g[i]);
    const uint32_t at = to + mk_staged_at(k, FORM == MK_X_F16);
#pragma unroll
    for (uint32_t p = 0; p < (FORM == MK_X_F32 ? MK_PLANES_F32 : 1); p++) {
        uint32_t u[2];
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            float *z = y + 2 * i;
            u[i] = mk_bf16_pair(z[0], z[1]);
            const float y0 = __uint_as_float(u[i] << 16), y1 = __uint_as_float(u[i] & 0xffff0000u);
            if (FORM == MK_X_F16) u[i] = mk_f16_pair(y0 * scale, y1 * scale);
            z[0] -= y0;
            z[1] -= y1;
        }
        if (FORM == MK_X_F16) {
            mk_sts64(at, u[0], u[1]); /* four values of one chunk of 16 */
        } else {
            mk_sts32(at + p * plane, u[0]);
            mk_sts32(at + p * plane + 16, u[1]);
        }
    }
}

/* A row's packets, N of a thread, as they were found. */
template <uint32_t N> MK_DEV void mk_row_ask(const uint4 *from, uint32_t tid, uint32_t packets, uint4 (&q)[N])
{
#pragma unroll
    for (uint32_t j = 0; j < N; j++) {
        q[j] = make_uint4(0, 0, 0, 0);
        if (tid + j * MK_COMPUTE < packets) q[j] = mk_packet_load(from + tid + j * MK_COMPUTE);
    }
}
/* What they carry. */
template <uint32_t N> MK_DEV void mk_row_map(const uint32_t *map, uint32_t tid, uint32_t packets, uint32_t (&m)[N])
{
#pragma unroll
    for (uint32_t j = 0; j < N; j++) m[j] = __ldg(map + min(tid + j * MK_COMPUTE, packets - 1));
}
template <uint32_t N> MK_DEV void mk_row_unmap(uint32_t tid, uint32_t packets, uint32_t (&m)[N])
{
#pragma unroll
    for (uint32_t j = 0; j < N; j++)
        if (tid + j * MK_COMPUTE >= packets) m[j] = MK_MAP_NONE;
}
/* The gammas of a thread's values. */
MK_DEV void mk_row_gammas(const float *gamma, uint32_t tid, uint32_t k, float (*g)[4])
{
#pragma unroll
    for (uint32_t c = 0; c < MK_FOURS; c++) {
        const float4 v = __ldg((const float4 *)gamma + min(tid + c * MK_COMPUTE, k / 4 - 1));
        g[c][0] = v.x, g[c][1] = v.y, g[c][2] = v.z, g[c][3] = v.w;
    }
}
MK_DEV uint32_t mk_row_gain(const float (*g)[4])
{
    uint32_t gain = 0;
#pragma unroll
    for (uint32_t c = 0; c < MK_FOURS; c++)
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) gain = max(gain, __float_as_uint(g[c][i]) & 0x7fffffffu);
    return gain;
}
/* Waits for them. */
template <uint32_t N> MK_DEV void mk_row_wait(const uint4 *from, uint32_t tid, uint32_t r, uint32_t epoch, const uint32_t (&m)[N], uint4 (&q)[N])
{
    uint32_t used = 0;
#pragma unroll
    for (uint32_t j = 0; j < N; j++) used |= mk_map_used(m[j]) ? 1u << j : 0;
    mk_packets_wait_every(from + tid, MK_COMPUTE, used, epoch, 0, r, tid, q);
}

/* The second pass of one row: its `fours` groups of four values, in order at `ordered`, to `staged`. RMS: they meet the thread's gammas. */
template <bool F32, uint32_t FORM, bool RMS>
MK_DEV void mk_stage_row(uint32_t ordered, uint32_t staged, uint32_t tid, uint32_t k, uint32_t fours, const float (*g)[4], float scale)
{
    if (RMS) {
#pragma unroll
        for (uint32_t c = 0; c < MK_FOURS; c++) {
            const uint32_t four = tid + c * MK_COMPUTE;
            if (four < fours) mk_stage_four<F32, FORM, true>(ordered + four * (F32 ? 16 : 8), 4 * four, k, g[c], scale, staged, mk_row_stride(k));
        }
    } else {
#pragma unroll 1
        for (uint32_t four = tid; four < fours; four += MK_COMPUTE)
            mk_stage_four<F32, FORM, false>(ordered + four * (F32 ? 16 : 8), 4 * four, k, g[0], scale, staged, mk_row_stride(k));
    }
}

/* One row that fits the staging area, and in order behind itself. */
template <bool F32, uint32_t FORM, bool RMS> MK_CALL void mk_gather_one(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    mk_shared *sh = d->sh;
    const mk_fed *f = mk_fed_of(in);
    const mk_plan *plan = &f->plan;
    const uint32_t k = plan->x.k, packets = plan->packets, fours = (k + 63) / 64 * 16, staged = mk_smem(sh->staging), ordered = staged + mk_staged_bytes(k, FORM);
    const bool heads = !RMS && plan->x.prologue == MK_PRO_HEADNORM;
    float *const trailer = (float *)(sh->staging + mk_staged_bytes(k, FORM) + ((k + 63) & ~63u) * (F32 ? 4 : 2));
    const uint4 *from = f->place.in[0];
    constexpr uint32_t N = MK_PACKETS_OF(F32, RMS);
    uint32_t m[N], top = 0;
    uint4 q[N];
    float g[MK_FOURS][4], sum = 0;
    mk_row_ask(from, d->tid, packets, q); /* everything is asked for before anything is looked at */
    mk_row_map(sh->args.map + plan->map, d->tid, packets, m);
    if (RMS) mk_row_gammas(sh->args.param + plan->x.param_off, d->tid, k, g);
    mk_row_unmap(d->tid, packets, m);
    mk_row_wait(from, d->tid, 0, f->place.epoch[0], m, q);
#pragma unroll
    for (uint32_t j = 0; j < N; j++) {
        top = max(top, mk_packet_order<F32>(q[j], m[j], plan->x.in_off, k, ordered, &sum));
        if (heads) mk_packet_trailer(q[j], m[j], trailer - in->wait[0].slice0);
    }
    if (FORM == MK_X_F16) {
        mk_row_top(d, 0, top);
        mk_gain(d, RMS ? mk_row_gain(g) : 0);
    }
    mk_sync();
    const float scale = FORM == MK_X_F16 ? mk_row_scale(d, 0) : 1;
    if (FORM == MK_X_F16 && d->tid == 0) sh->scale[d->memo->parity][0] = scale;
    if (heads) mk_head_norm(d, plan, 0, trailer);
    mk_stage_row<F32, FORM, RMS>(ordered, staged, d->tid, k, fours, g, scale);
    if (RMS) mk_row_squares(d, 0, sum);
}
MK_DEV bool mk_is_whole(const mk_plan *p, uint32_t nrows)
{
    return mk_staged_bytes(p->x.k, p->x.form) * nrows <= MK_STAGING;
}
MK_DEV bool mk_is_short(const mk_plan *p, uint32_t nrows)
{
    return nrows == 1 && p->scratch && mk_staged_bytes(p->x.k, p->x.form) + p->scratch <= MK_STAGING;
}

/* Waits for packet p of all rows, of which q are earlier looks. While they are late one of them alone is looked at again and again: 132 workers would ask for
 * 32 KB each. */
MK_DEV void mk_rows_wait(const uint4 *from, uint32_t row_packets, uint32_t nrows, uint32_t p, uint32_t epoch, uint4 *q)
{
    uint32_t looks = 0;
    for (bool more = true; more;) {
        uint32_t late = MK_MAX_ROWS;
#pragma unroll
        for (uint32_t r = 0; r < MK_MAX_ROWS; r++)
            if (r < nrows && q[r].w != epoch) late = r;
        if (late == MK_MAX_ROWS) break;
        uint32_t found;
        do
            found = mk_packet_load(from + late * row_packets).w;
        while ((more = mk_still_waiting(++looks, 0, late, p, found)) && found != epoch);
#pragma unroll
        for (uint32_t r = 0; r < MK_MAX_ROWS; r++)
            mk_packet_again(&q[r], from + r * row_packets, r < nrows && q[r].w != epoch);
    }
    mk_waited(looks);
}

/* Any number of rows, any chunk [c0, c0 + n) of any vector. again: another chunk of a vector that has been looked at as a whole. */
template <bool F32, uint32_t FORM, bool RMS> MK_CALL void mk_gather_rows(const mk_insn *in, uint32_t c0, uint32_t n, bool again)
{
    constexpr uint32_t VALUES = F32 ? 3 : 6;
    constexpr bool PAIRS = !F32 && !RMS; /* bf16 values are staged as they come, two at a time where both fall into one word */
    const mk_dev here = mk_here(in), *d = &here;
    mk_shared *sh = d->sh;
    const mk_fed *f = mk_fed_of(in);
    const mk_plan *plan = &f->plan;
    const mk_wait *wait = &in->wait[0];
    const mk_vec *v = &sh->vec[wait->vec];
    const uint32_t row_packets = v->nslice * v->slice_packets, epoch = f->place.epoch[0], nrows = d->step->nrows, k = plan->x.k, off = plan->x.in_off;
    const uint32_t staged = mk_smem(sh->staging), stride = mk_row_stride(n), plane = nrows * stride, *map = sh->args.map + plan->map;
    const float *gamma = sh->args.param + plan->x.param_off;
    const uint4 *base = f->place.in[0];
    const bool heads = !RMS && plan->x.prologue == MK_PRO_HEADNORM;
    float *const trailer = sh->red; /* [row][slice] */
    if (heads && !again) mk_sync(); /* nobody reads the reduction area any more */

    /* A chunk's first pass looks at the whole vector, if that is of any use, and stages nothing. */
#pragma unroll 1
    for (bool look = !again, stage = again || n == k || (FORM != MK_X_F16 && !RMS && !heads);; stage = true) {
        const uint32_t c = stage ? c0 : 0, end = stage ? n : k; /* this pass is about values [c, c + end) */
        uint32_t lo = 0, hi = plan->packets;
        if (end < k) {
            const uint16_t *start = sh->start + v->start_index + wait->slice0;
            lo = mk_find_slice(start, wait->nslice, off + c, d->lane) * v->slice_packets;
            hi = (mk_find_slice(start, wait->nslice, off + c + end - 1, d->lane) + 1) * v->slice_packets;
        }
        uint32_t p = (lo & ~(MK_COMPUTE - 1)) + d->tid, top[MK_MAX_ROWS] = {}, gain = 0;
        float sum[MK_MAX_ROWS] = {};
        uint4 q[MK_MAX_ROWS] = {};
        if (p < lo) p += MK_COMPUTE;
        if (p < hi)
#pragma unroll
            for (uint32_t r = 0; r < MK_MAX_ROWS; r++)
                if (r < nrows) q[r] = mk_packet_load(base + p + r * row_packets);
        uint32_t next = p < hi ? __ldg(map + p) : 0;
#pragma unroll 1
        for (; p < hi; p += MK_COMPUTE) {
            const uint32_t m = next;
            const int at = (int)(MK_MAP_FIRST(m) - off - c), count = min((int)MK_MAP_VALUES(m), (int)end - at); /* values [max(0, -at), count) are ours */
            const bool ahead = p + MK_COMPUTE < hi;
            float g[VALUES] = {};
            uint32_t to[VALUES], mask[VALUES], turn = 0x3210;
            const uint32_t nowhere = staged + stride - 64; /* between two rows nobody looks */
            if (ahead) next = __ldg(map + p + MK_COMPUTE);
#pragma unroll
            for (int e = 0; e < (int)VALUES; e++) {
                const bool ours = at + e >= 0 && e < count;
                to[e] = staged + (ours ? mk_staged_at(at + e, FORM == MK_X_F16) : stride - 64);
                mask[e] = ours ? 0xffffffffu : 0;
                if (RMS && ours) g[e] = __ldg(gamma + c + at + e);
                if (RMS) gain = max(gain, __float_as_uint(g[e]) & 0x7fffffffu);
            }
            uint32_t single = 0, last = 0;
            if constexpr (PAIRS) { /* to[0..2]: three words; to[3], to[4]: value 0 and the last one, where they are alone in their words */
                const bool odd = at & 1;
                const int l = count - 1;
#pragma unroll
                for (int e = 0; e < 3; e++) mask[e] = (mask[2 * e] & 0xffffu) | (mask[2 * e + 1] & 0xffff0000u);
                const bool first_ours = at >= 0 && count > 0, last_ours = at + l >= 0 && l >= 0;
                turn = odd ? 0x5432 : 0x3210;
#pragma unroll
                for (int e = 0; e < 3; e++) {
                    const int i = 2 * e + (odd ? 1 : 0);
                    to[e] = at + i >= 0 && i + 1 < count ? staged + mk_staged_at(at + i, FORM == MK_X_F16) : nowhere;
                }
                to[3] = odd && first_ours ? staged + mk_staged_at(at, FORM == MK_X_F16) : nowhere;
                to[4] = !((at + l) & 1) && last_ours ? staged + mk_staged_at(at + l, FORM == MK_X_F16) : nowhere;
                single = (uint32_t)l >> 1;
                last = l & 1 ? 16 : 0;
            }
            if (mk_map_used(m)) mk_rows_wait(base + p, row_packets, nrows, p, epoch, q);
#pragma unroll
            for (uint32_t r = 0; r < MK_MAX_ROWS; r++) {
                if (r >= nrows) break;
                const uint32_t word[3] = {q[r].x, q[r].y, q[r].z}, row = r * stride;
                if (ahead) q[r] = mk_packet_load(base + p + MK_COMPUTE + r * row_packets); /* on its way while the others are staged */
                if (heads && look && MK_MAP_TRAILER(m) < 3)
                    trailer[r * wait->nslice + MK_MAP_SLICE(m) - wait->slice0] = __uint_as_float(MK_MAP_TRAILER(m) == 0 ? word[0] : MK_MAP_TRAILER(m) == 1 ? word[1] : word[2]);
                if constexpr (PAIRS) {
                    if (FORM == MK_X_F16)
#pragma unroll
                        for (int e = 0; e < 3; e++) top[r] = __vmaxu2(top[r], word[e] & mask[e] & 0x7fff7fffu);
                    if (!stage) continue;
                    if (mk_minds(to[0], nowhere)) mk_sts32(to[0] + row, __byte_perm(word[0], word[1], turn));
                    if (mk_minds(to[1], nowhere)) mk_sts32(to[1] + row, __byte_perm(word[1], word[2], turn));
                    if (mk_minds(to[2], nowhere)) mk_sts32(to[2] + row, __byte_perm(word[2], 0, turn));
                    if (mk_minds(to[3], nowhere)) mk_sts16(to[3] + row, word[0]);
                    if (mk_minds(to[4], nowhere)) mk_sts16(to[4] + row, (single == 0 ? word[0] : single == 1 ? word[1] : word[2]) >> last);
                } else {
#pragma unroll
                    for (uint32_t e = 0; e < VALUES; e++) {
                        const uint32_t bits = (F32 ? word[e % 3] : e & 1 ? word[e / 2] & 0xffff0000u : word[e / 2] << 16) & mask[e];
                        float y = __uint_as_float(bits);
                        if (FORM == MK_X_F16) top[r] = max(top[r], bits & 0x7fffffffu);
                        if (RMS) {
                            sum[r] = __fmaf_rn(y, y, sum[r]);
                            y = __fmul_rn(y, g[e]);
                        }
                        if (!stage) continue;
#pragma unroll
                        for (uint32_t i = 0; i < (FORM == MK_X_F32 ? MK_PLANES_F32 : 1); i++) {
                            const uint32_t b = mk_bf16_bits(y);
                            if (mk_minds(to[e], nowhere)) mk_sts16(to[e] + row + i * plane, b);
                            y -= mk_bf16_value(b);
                        }
                    }
                }
            }
        }
        __syncwarp();
        if (look) {
            if (FORM == MK_X_F16) {
#pragma unroll
                for (uint32_t r = 0; r < MK_MAX_ROWS; r++) {
                    const uint32_t high = top[r] & 0xffff0000u, low = top[r] << 16;
                    if (r < nrows) mk_row_top(d, r, PAIRS ? max(high, low) : top[r]);
                }
                mk_gain(d, gain);
            }
            if (RMS) { /* each as mk_warp_sum would have it */
                const float s = mk_warp_eight(sum, d->lane);
                if ((d->lane & 3) == 0) sh->sumsq[d->memo->parity][d->lane / 4][d->warp] = s;
            }
        }
        if (stage) break;
        look = false;
    }

    if (d->tid < nrows * (FORM == MK_X_F32 ? MK_PLANES_F32 : 1)) mk_stage_pad(staged + d->tid * stride, n, FORM == MK_X_F16);
    if (FORM != MK_X_F16 && !heads) return;
    mk_sync();
    if (heads && !again) {
        const uint32_t n_heads = mk_small_quot(k, plan->x.norm_group), per = mk_small_quot(wait->nslice, n_heads);
#pragma unroll 1
        for (uint32_t i = d->tid; i < nrows * n_heads; i += MK_COMPUTE) {
            const uint32_t r = mk_small_quot(i, n_heads), h = i - r * n_heads;
            float s = 0;
#pragma unroll 1
            for (uint32_t t = 0; t < per; t++) s += trailer[r * wait->nslice + h * per + t];
            sh->head_rstd[r][h] = mk_rsqrtf(mk_div(s, (float)plan->x.norm_group) + plan->x.eps);
        }
    }
    if (FORM == MK_X_F16) {
        const uint32_t ways = nrows > 4 ? 1 : nrows > 2 ? 2 : nrows > 1 ? 4 : 8, r = d->warp / ways, part = d->warp & (ways - 1); /* warps of a row */
        if (r >= nrows) return;
        const float scale = mk_row_scale(d, r);
        if (part == 0 && d->lane == 0) sh->scale[d->memo->parity][r] = scale;
#pragma unroll 2
        for (uint32_t i = part * 32 + d->lane; i < (n + 63) / 64 * 8; i += ways * 32) {
            const uint32_t at = staged + r * stride + i * 16;
            const uint4 b = mk_lds128(at);
            mk_sts64(at, mk_f16_scaled(b.x, scale), mk_f16_scaled(b.y, scale));
            mk_sts64(at + 8, mk_f16_scaled(b.z, scale), mk_f16_scaled(b.w, scale));
        }
    }
}

template <bool F32, uint32_t FORM> MK_DEV void mk_gather_of(const mk_insn *in, bool brief, uint32_t c0, uint32_t n, bool again)
{
    const bool rms = mk_fed_of(in)->plan.x.prologue == MK_PRO_RMS;
    if (brief)
        rms ? mk_gather_one<F32, FORM, true>(in) : mk_gather_one<F32, FORM, false>(in);
    else
        rms ? mk_gather_rows<F32, FORM, true>(in, c0, n, again) : mk_gather_rows<F32, FORM, false>(in, c0, n, again);
}
MK_DEV void mk_gather(const mk_insn *in, bool brief, uint32_t c0, uint32_t n, bool again)
{
    const mk_plan *p = &mk_fed_of(in)->plan;
    if (p->x.form == MK_X_F16)
        p->f32 ? mk_gather_of<true, MK_X_F16>(in, brief, c0, n, again) : mk_gather_of<false, MK_X_F16>(in, brief, c0, n, again);
    else if (p->x.form == MK_X_F32)
        mk_gather_of<true, MK_X_F32>(in, brief, c0, n, again);
    else
        p->f32 ? mk_gather_of<true, MK_X_BF16>(in, brief, c0, n, again) : mk_gather_of<false, MK_X_BF16>(in, brief, c0, n, again);
}

/* Stages values [c0, c0 + n) of wait 0's vector; whole: that is all of it, which stays for instructions that read the same vector in the same way. All compute
 * threads call it, and may read the staging area then. */
MK_DEV void mk_stage_input(const mk_insn *in, bool whole, uint32_t c0, uint32_t n)
{
    mk_shared *sh = mk_sh();
    const mk_plan *p = &mk_fed_of(in)->plan;
    mk_memo *memo = &sh->memo[threadIdx.x / 32];
    const uint32_t step = sh->step.seq;
    if (whole && memo->staged == p->key && memo->step == step) {
        if (sh->step.nrows > MK_MAX_ROWS / 2) mk_sync(); /* the product before is read: mk_red_base has but one place for so many rows */
        return;
    }
    if (c0) mk_sync(); /* the chunk before is consumed */
    __syncwarp();
    if (threadIdx.x % 32 == 0 && !c0) {
        memo->staged = whole ? p->key : 0;
        memo->step = step;
        memo->parity ^= 1; /* sums and scales of the vector before may still be read */
    }
    __syncwarp();
    mk_gather(in, whole && mk_is_short(p, sh->step.nrows), c0, n, c0 != 0);
    mk_sync();
}

/* The vector of an instruction before, which gemv_one.cuh has left in order behind its three planes, staged as f16 with the same norm: what is known of it holds. */
MK_CALL void mk_stage_again(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_plan *p = &mk_fed_of(in)->plan;
    const uint32_t k = p->x.k, fours = (k + 63) / 64 * 16, staged = mk_smem(d->sh->staging), ordered = staged + mk_staged_bytes(k, MK_X_F32);
    float g[MK_FOURS][4];
    mk_row_gammas(d->sh->args.param + p->x.param_off, d->tid, k, g);
    const float scale = mk_row_scale(d, 0);
    if (d->tid == 0) d->sh->scale[d->memo->parity][0] = scale;
    mk_stage_row<true, MK_X_F16, true>(ordered, staged, d->tid, k, fours, g, scale);
    __syncwarp();
    if (d->lane == 0) d->memo->staged = p->key;
    mk_sync();
}

/* ---- adding the partial sums ---------------------------------------------------------------------------------------- */

/* A product takes [partial][column][padded rows] floats of the reduction area: a partial sum a group and K way. */
MK_DEV uint32_t mk_red_rows(uint32_t rows)
{
    return (rows + 7) & ~7u;
}
MK_DEV uint32_t mk_ways(uint32_t rows)
{
    return rows > 16 * MK_TILES ? MK_GROUP_WARPS / 2 : MK_GROUP_WARPS;
}
/* This warp's part of the product at float `base`; at: of its segment. */
MK_DEV void mk_red_put(const mk_dev *d, uint32_t base, const mk_tile *t, uint32_t at, uint32_t cols, const mk_accs *acc)
{
    const uint32_t c = 2 * (d->lane & 3), stride = mk_red_rows(t->rows), partial = (d->warp / MK_GROUP_WARPS - at) & (MK_GROUPS - 1), ways = mk_ways(t->rows), member = d->warp % MK_GROUP_WARPS;
    if (partial >= t->nst || c >= cols) return;
    const uint32_t row0 = (ways < MK_GROUP_WARPS ? (member >> 1) * 16 * MK_TILES : 0) + (d->lane >> 2);
    float *r = d->sh->red + base + ((partial * ways + (member & (ways - 1))) * cols + c) * stride;
#pragma unroll
    for (uint32_t j = 0; j < MK_TILES; j++) {
        const uint32_t i = row0 + 16 * j;
        const bool upper = i < t->rows, lower = i + 8 < t->rows;
        if (upper) r[i] = acc->tile[j].x;
        if (lower) r[i + 8] = acc->tile[j].z;
        if (c + 1 == cols) continue;
        if (upper) r[stride + i] = acc->tile[j].y;
        if (lower) r[stride + i + 8] = acc->tile[j].w;
    }
}
/* Where a static segment's product lies: with up to half the rows the area's halves take turns, so that the next product may be put while this one is read. */
MK_DEV uint32_t mk_red_base(const mk_dev *d)
{
    return d->step->nrows > MK_MAX_ROWS / 2 ? 0 : (d->memo->turn & 1) * (MK_RED_FLOATS / 2);
}
/* How a product lies there: columns, K ways, partial sums, floats from column to column. */
MK_DEV uint32_t mk_red_form_of(uint32_t rows, uint32_t stages, uint32_t cols)
{
    return cols | (stages < MK_GROUPS ? stages : MK_GROUPS) * mk_ways(rows) << 4 | mk_red_rows(rows) << 8;
}
MK_DEV uint32_t mk_red_form(const mk_tile *t, uint32_t cols)
{
    return mk_red_form_of(t->rows, t->nst, cols);
}
/* Matrix row i of the product at `base`, column c; form: mk_red_form. */
MK_DEV float mk_red_get(uint32_t base, uint32_t form, uint32_t i, uint32_t c)
{
    const uint32_t stride = form >> 8, step = (form & 15) * stride, partials = form >> 4 & 15;
    const float *r = mk_sh()->red + base + c * stride + i;
    float x[MK_WARPS], sum = 0;
#pragma unroll
    for (uint32_t p = 0; p < MK_WARPS; p++) x[p] = p < partials ? r[p * step] : 0;
#pragma unroll
    for (uint32_t p = 0; p < MK_WARPS; p++) sum = __fadd_rn(sum, x[p]);
    return sum;
}

/* Of an expert's slice: [partial][column][64 or 128 rows], a partial sum a group and K way, however many there are in it. */
#define MK_PARTS(cols) ((cols) * MK_WARPS * 16 * MK_TILES)
MK_DEV uint32_t mk_parts_log(uint32_t n)
{
    return n > 16 * MK_TILES ? 7 : 6;
}
/* This warp's part; at: of the first stage. */
MK_DEV void mk_parts_put(const mk_dev *d, float *red, uint32_t n, uint32_t at, uint32_t cols, const mk_accs *acc)
{
    const uint32_t c = 2 * (d->lane & 3), log = mk_parts_log(n), group = (d->warp / MK_GROUP_WARPS - at) & (MK_GROUPS - 1), member = d->warp % MK_GROUP_WARPS;
    const uint32_t partial = log == 7 ? group * 2 + (member & 1) : group * 4 + member, row0 = log == 7 ? (member >> 1) * 16 * MK_TILES : 0;
    if (c >= cols) return;
    float *r = red + ((partial * cols + c) << log) + row0 + (d->lane >> 2);
    const bool both = c + 1 < cols;
#pragma unroll
    for (uint32_t j = 0; j < MK_TILES; j++, r += 16) {
        if (row0 + 16 * j >= n) break;
        r[0] = acc->tile[j].x;
        r[8] = acc->tile[j].z;
        if (both) r[1u << log] = acc->tile[j].y;
        if (both) r[(1u << log) + 8] = acc->tile[j].w;
    }
}
/* Matrix row i, column c. */
MK_DEV float mk_parts_sum(const float *red, uint32_t n, uint32_t i, uint32_t c, uint32_t cols)
{
    const uint32_t log = mk_parts_log(n), step = cols << log;
    const float *r = red + (c << log) + i;
    float sum = __fadd_rn(__fadd_rn(r[0], r[step]), __fadd_rn(r[2 * step], r[3 * step]));
    if (log == 6) sum = __fadd_rn(sum, __fadd_rn(__fadd_rn(r[4 * step], r[5 * step]), __fadd_rn(r[6 * step], r[7 * step])));
    return sum;
}

/* ---- an instruction of products --------------------------------------------------------------------------------------- */

/* What comes before and after the products are functions of the opcodes:
 *   begin   stages the input, or the first chunk of it if the vector does not fit the staging area
 *   end     reduces and publishes, or stages the next chunk; returns whether there is one
 * All compute threads call them. */

/* The chunk of a static segment's vector that is staged: its stages. Whole if it fits, which is up to how many rows there are. */
typedef struct mk_chunk {
    uint32_t s0, s1;
    bool whole, last;
} mk_chunk;
MK_DEV mk_chunk mk_chunk_of(const mk_plan *p, uint32_t nrows, uint32_t chunk)
{
    mk_chunk c = {0, p->tile.nst, mk_is_whole(p, nrows), true};
    if (c.whole) return c;
    const uint32_t stages = mk_small_quot(mk_chunk_kblocks(p->tile.wtype, p->x.form), p->tile.per);
    c.s0 = chunk * stages;
    c.s1 = min(c.s0 + stages, p->tile.nst);
    c.last = c.s1 == p->tile.nst;
    return c;
}
/* Its values. */
MK_DEV uint32_t mk_chunk_values(const mk_plan *p, const mk_chunk *c)
{
    const uint32_t log_values = p->tile.wtype == MK_W_FP8 ? 6 : 5;
    return min(c->s1 * p->tile.per << log_values, p->x.k) - (c->s0 * p->tile.per << log_values);
}
MK_DEV uint32_t mk_static_next(const mk_insn *in, uint32_t chunk)
{
    mk_shared *sh = mk_sh();
    const mk_plan *p = &mk_fed_of(in)->plan;
    const mk_chunk c = mk_chunk_of(p, sh->step.nrows, chunk);
    __syncwarp();
    if (threadIdx.x % 32 == 0) sh->memo[threadIdx.x / 32].chunk = chunk;
    __syncwarp();
    mk_stage_input(in, c.whole, c.s0 * p->tile.per << (p->tile.wtype == MK_W_FP8 ? 6 : 5), mk_chunk_values(p, &c));
    if (!chunk) {
        const mk_dev d = mk_here(in);
        mk_trace_input(&d);
    }
    return 1;
}
/* Where a thread's sums wait between two chunks. */
MK_DEV float4 *mk_sums_at(const mk_dev *d)
{
    return (float4 *)d->sh->red + MK_TILES * d->tid;
}
static_assert(MK_COMPUTE * MK_TILES * 16 <= MK_RED_FLOATS * 4, "the sums of a product fit");

/* Whether that was a static segment's last chunk; if so, how and where its result lies (after the next barrier), and the halves change. */
MK_DEV bool mk_static_done(const mk_dev *d, uint32_t *form, uint32_t *base)
{
    const mk_plan *p = &mk_fed_of(d->in)->plan;
    const uint32_t nrows = d->step->nrows;
    if (!mk_chunk_of(p, nrows, d->memo->chunk).last) return false;
    *form = mk_red_form(&p->tile, nrows);
    *base = mk_red_base(d);
    __syncwarp();
    if (d->lane == 0) d->memo->turn ^= 1;
    __syncwarp();
    return true;
}

/* A static segment times what is staged of its vector. */
template <uint32_t FORM> MK_CALL void mk_static_product(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_plan *p = &mk_fed_of(in)->plan;
    const uint32_t nrows = d->step->nrows;
    mk_next slot = d->memo->next[MK_TAPE];
    const uint32_t at = slot.at;
    const mk_tile t = p->tile;
    const mk_chunk c = mk_chunk_of(p, nrows, d->memo->chunk);
    mk_accs acc = mk_no_sum();
    if (c.s0) {
#pragma unroll
        for (uint32_t k = 0; k < MK_TILES; k++) acc.tile[k] = mk_sums_at(d)[k];
        mk_sync(); /* a warp without work would put its part there at once */
    }
    acc = mk_product<FORM>(MK_TAPE, &slot, &t, c.s0, c.s1, mk_smem(d->sh->staging), mk_row_stride(mk_chunk_values(p, &c)), nrows, p->head_shift, acc);
    mk_ring_pass(d, MK_TAPE, &slot);
    if (c.last) {
        mk_red_put(d, mk_red_base(d), &t, at - c.s0, nrows, &acc);
    } else {
#pragma unroll
        for (uint32_t k = 0; k < MK_TILES; k++) mk_sums_at(d)[k] = acc.tile[k];
    }
}
MK_DEV void mk_products(const mk_insn *in)
{
    const uint32_t form = mk_fed_of(in)->plan.x.form;
    if (form == MK_X_F16)
        mk_static_product<MK_X_F16>(in);
    else if (form == MK_X_BF16)
        mk_static_product<MK_X_BF16>(in);
    else
        mk_static_product<MK_X_F32>(in);
}

#endif
