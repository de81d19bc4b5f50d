/* What the matrix opcodes (GEMV, EXPERT_UP, EXPERT_DOWN, LM_HEAD) share on the device.
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
#include "megakernel/device.cuh"

/* ---- gathering ------------------------------------------------------------------------------------------------------ */

#define MK_TILES 4u /* of 16 rows: of a warp */

/* Forms of a staged vector. */
enum { MK_X_BF16 = 1, MK_X_F16 = 2, MK_X_F32 = 3 };

MK_DEV uint32_t mk_form(uint32_t wtype, bool f32)
{
    return wtype == MK_W_FP8 ? MK_X_F16 : f32 ? MK_X_F32 : MK_X_BF16;
}
/* Bytes from row to row (planes follow each other like rows): values come in K blocks, and rows fall into different banks. */
MK_DEV uint32_t mk_row_stride(uint32_t k)
{
    return ((k + 63) & ~63u) * 2 + 64;
}
/* Bytes of a staged row, all planes. */
MK_DEV uint32_t mk_staged_bytes(uint32_t k, uint32_t form)
{
    return mk_row_stride(k) * (form == MK_X_F32 ? MK_PLANES_F32 : 1);
}
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

enum { MK_GATHER_TRAILERS = 1, MK_GATHER_AGAIN = 2 };

/* Where a thread's packet lies: its first value, counted from the first one that is asked for (may be before it), and the end of its slice's values. No values:
 * end 0. */
typedef struct mk_packet_at {
    int at;
    uint32_t end;
} mk_packet_at;

MK_DEV mk_packet_at mk_packet_where(const mk_vec *v, const uint16_t *start, uint32_t packet, uint32_t packets, uint32_t lo, uint32_t len, bool f32)
{
    mk_packet_at w = {0, 0};
    if (packet >= packets) return w;
    const uint32_t s = mk_quot(packet, mk_div_by_slice(v)), p = packet - s * v->slice_packets, s0 = start[s], s1 = start[s + 1];
    const int to = (int)(s1 - lo < len ? s1 - lo : len);
    w.at = (int)(s0 + p * (f32 ? 3 : 6) - lo);
    if (w.at < to && w.at + (f32 ? 3 : 6) > 0) w.end = (uint32_t)to;
    return w;
}
/* The word of a packet that is its slice's trailer, and the slice; 3: none. */
MK_DEV uint32_t mk_packet_trailer(const mk_vec *v, const uint16_t *start, uint32_t packet, uint32_t packets, bool f32, uint32_t *slice)
{
    if (packet >= packets) return 3;
    const uint32_t s = mk_quot(packet, mk_div_by_slice(v)), n = start[s + 1] - start[s], word = (f32 ? n : (n + 1) / 2) - (packet - s * v->slice_packets) * 3;
    *slice = s;
    return word < 3 ? word : 3;
}

/* HEADNORM: 1/rms of every head of every row, out of the trailers of its slices (ascending). A lane a slice; a head's slices, a power of two, lie
 * side by side in a warp. */
MK_CALL void mk_head_norms(const mk_insn *in, uint32_t heads, uint32_t group, float eps)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_wait *w = &d->in->wait[0];
    const mk_vec *v = &d->sh->vec[w->vec];
    const uint4 *base = mk_wait_packets(d, w, v, 0);
    const uint32_t n = w->nslice, total = n * d->step->nrows, shift = 31 - __clz((int)(n / heads)), per = 1u << shift, values = group >> shift;
    const uint32_t epoch = mk_wait_epoch(d, w), sp = v->slice_packets, word = v->dtype == MK_F32 ? values : (values + 1) / 2;
    for (uint32_t i0 = d->warp * 32; i0 < total; i0 += MK_COMPUTE) {
        uint32_t s = i0 + d->lane, r = 0;
        const bool has = s < total;
        for (; s >= n; s -= n) r++;
        float x = 0, sum = 0;
        if (has) {
            const uint32_t packet = s * sp + word / 3;
            const uint4 q = mk_packet_wait(base + (size_t)r * v->nslice * sp + packet, w, r, packet, epoch);
            x = __uint_as_float(word % 3 == 0 ? q.x : word % 3 == 1 ? q.y : q.z);
        }
        for (uint32_t k = 0; k < per; k++) sum += __shfl_sync(0xffffffffu, x, (d->lane & ~(per - 1)) + k);
        if (has && (d->lane & (per - 1)) == 0) d->sh->head_rstd[r][s >> shift] = mk_rsqrtf(mk_div(sum, (float)group) + eps);
    }
}

/* The same from the trailers that mk_gather left behind the staged rows, [row][n slices]. */
MK_DEV void mk_head_norms_staged(const mk_dev *d, const float *trailer, uint32_t n, uint32_t heads, uint32_t group, float eps)
{
    const uint32_t shift = 31 - __clz((int)(n / heads));
    if (d->warp >= d->step->nrows) return;
    const float *t = trailer + d->warp * n;
    for (uint32_t h = d->lane; h < heads; h += 32) {
        float sum = 0;
#pragma unroll 1
        for (uint32_t k = h << shift; k < (h + 1) << shift; k++) sum += t[k];
        d->sh->head_rstd[d->warp][h] = mk_rsqrtf(mk_div(sum, (float)group) + eps);
    }
}


/* The vector of wait 0 as an instruction wants it. */
typedef struct mk_input {
    uint32_t in_off, k; /* values [in_off, in_off + k) */
    uint32_t prologue, param_off, norm_group;
    uint32_t form;
    float eps;
} mk_input;

typedef struct mk_tile {
    uint32_t wtype, rows, nkb, per, nst; /* K blocks, K blocks a stage, stages */
    uint32_t halves, nseg, phase;        /* scale segments: isa.h */
    uint32_t shift;                      /* K blocks a scale row: 1 << shift */
} mk_tile;

/* stages: MK_STAGES_WORD of a static segment; 0: an expert's. */
MK_DEV mk_tile mk_tile_make(uint32_t wtype, uint32_t rows, uint32_t k, uint32_t halves, uint32_t nseg, uint32_t phase, uint32_t scale_k, uint32_t stages)
{
    mk_tile t;
    t.wtype = wtype;
    t.rows = rows;
    t.nkb = wtype == MK_W_FP8 ? (k + 63) / 64 : (k + 31) / 32;
    if (stages) {
        t.per = stages & 0xffffu;
        t.nst = stages >> 16;
    } else {
        t.per = mk_stage_kblocks(wtype, rows, t.nkb, 1, 0);
        t.nst = mk_small_quot(t.nkb + t.per - 1, t.per);
    }
    t.halves = halves;
    t.nseg = nseg;
    t.phase = phase;
    t.shift = scale_k == 128 ? 1 : 0;
    return t;
}

MK_DEV void mk_gemv_describe(const mk_insn *in, mk_tile *t, mk_input *x)
{
    const mk_gemv *g = &in->gemv;
    const uint32_t halves = g->epilogue == MK_EPI_SILU ? 2 : 1;
    x->in_off = g->in_off;
    x->k = g->k;
    x->prologue = g->prologue;
    x->param_off = g->param_off;
    x->norm_group = g->norm_group;
    x->form = mk_form(g->wtype, g->flags & MK_GEMV_X_F32);
    x->eps = g->eps;
    *t = mk_tile_make(g->wtype, g->n * halves, g->k, halves, g->nseg, g->phase, g->scale_k, in->pad);
}
MK_DEV void mk_lm_head_describe(const mk_insn *in, mk_tile *t, mk_input *x)
{
    const mk_lm_head *l = &in->lm_head;
    x->in_off = x->norm_group = 0;
    x->k = l->k;
    x->prologue = MK_PRO_RMS;
    x->param_off = l->param_off;
    x->form = mk_form(l->wtype, false);
    x->eps = l->eps;
    *t = mk_tile_make(l->wtype, l->n, l->k, 1, l->nseg, l->phase, MK_SCALE_ROWS, in->pad);
}
/* Functions of their own describe the instruction again, out of shared memory: what they would take along lives in registers that their callers have to save. */
MK_DEV void mk_describe(const mk_insn *in, mk_tile *t, mk_input *x)
{
    if (in->opcode == MK_OP_LM_HEAD)
        mk_lm_head_describe(in, t, x);
    else
        mk_gemv_describe(in, t, x);
}
/* Input of EXPERT_UP. */
MK_DEV mk_input mk_up_input(const mk_insn *in)
{
    const mk_expert *e = &in->expert;
    const mk_input x = {0, e->k, MK_PRO_RMS, e->param_off, 0, mk_form(e->wtype, false), e->eps};
    return x;
}

/* After the barrier that follows mk_row_reduce. */
MK_DEV float mk_row_scale(const mk_dev *d, uint32_t r)
{
    return mk_f16_scale(d->sh->top[d->memo->parity][r], d->sh->gain[d->memo->parity]);
}
/* What a row's results are to be multiplied by: 1/rms with RMS, and the inverse of the power of two. By the warp of that number, after the barrier; to be read after the
 * next one. */
MK_DEV void mk_factor_share(const mk_dev *d, const mk_input *x)
{
    if (d->tid < MK_MAX_ROWS) d->sh->top[d->memo->parity ^ 1][d->tid] = 0; /* the next vector's */
    if (d->tid == 0) d->sh->gain[d->memo->parity ^ 1] = 0;
    if (d->warp >= d->step->nrows) return;
    float f = 1;
    if (x->prologue == MK_PRO_RMS) {
        const float s = mk_warp_sum(d->lane < MK_WARPS ? d->sh->sumsq[d->memo->parity][d->lane][d->warp] : 0.0f);
        f = mk_rsqrtf(mk_div(s, (float)x->k) + x->eps);
    }
    if (x->form == MK_X_F16) f = mk_div(f, mk_row_scale(d, d->warp)); /* exact: a power of two */
    if (d->lane == 0) d->sh->factor[d->memo->parity][d->warp] = f;
}

#define MK_PACKETS 4u /* of a thread, under way at once */
/* A row's largest magnitude, a row's sum of squares, of all warps. */
MK_DEV void mk_row_top(const mk_dev *d, uint32_t r, uint32_t top)
{
    top = __reduce_max_sync(0xffffffffu, top);
    if (d->lane == 0 && top) atomicMax(&d->sh->top[d->memo->parity][r], top);
}
MK_DEV void mk_row_squares(const mk_dev *d, uint32_t r, float sum)
{
    sum = mk_warp_sum(sum);
    if (d->lane == 0) d->sh->sumsq[d->memo->parity][d->warp][r] = sum;
}

MK_DEV uint4 mk_lds128(uint32_t at)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
MK_DEV uint32_t mk_bf16_pair(float x0, float x1)
{
    uint32_t v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(x1), "f"(x0));
    return v;
}

/* Gathering has two passes, a barrier between them: a row's packets go to shared memory in order, and then a thread opens 16 values of them: few instructions,
 * because all that a thread does is on the way of the token. The power of two comes from the largest value and the largest gamma, which bound the largest product.
 * Value k belongs to thread k / 16 modulo all, however many rows there are and whatever the chunks: so does the order in which squares are added. */
#define MK_ORDERED 16u                        /* values of a thread at a time; 16 bytes are left out after each, against bank conflicts */
#define MK_ROUND   (MK_ORDERED * MK_COMPUTE)  /* values at a time */
template <bool F32> MK_DEV uint32_t mk_ordered_at(uint32_t k)
{
    return F32 ? k * 4 + (k >> 4) * 16 : k * 2 + (k >> 4) * 16;
}

/* A packet's values, as far as [0, len) holds them (at counts from there), to their places. Returns the bits of the largest magnitude. */
template <bool F32> MK_DEV uint32_t mk_packet_order(uint4 q, mk_packet_at at, uint32_t ordered)
{
    const uint32_t word[3] = {q.x, q.y, q.z};
    uint32_t top = 0;
#pragma unroll
    for (uint32_t k = 0; k < (F32 ? 3 : 6); k++) {
        const uint32_t i = (uint32_t)at.at + k, bits = F32 ? word[k % 3] : k & 1 ? word[k / 2] & 0xffff0000u : word[k / 2] << 16;
        if (i >= at.end) continue;
        top = max(top, bits & 0x7fffffffu);
        if (F32)
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(ordered + mk_ordered_at<F32>(i)), "r"(bits) : "memory");
        else
            mk_sts16(ordered + mk_ordered_at<F32>(i), bits >> 16);
    }
    return top;
}
/* 16 values at `ordered`, of which those below n exist: their squares are added to *sum, and they are staged at `to` (0: not); plane: bytes between planes. */
template <bool F32, uint32_t FORM> MK_DEV void mk_stage_16(uint32_t ordered, uint32_t n, bool rms, const float *g, float scale, uint32_t to, uint32_t plane, float *sum)
{
    float y[MK_ORDERED];
#pragma unroll
    for (uint32_t k = 0; k < MK_ORDERED; k += F32 ? 4 : 8) {
        const uint4 u = mk_lds128(ordered + (F32 ? 4 : 2) * k);
        const uint32_t word[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
        for (uint32_t i = 0; i < (F32 ? 4 : 8); i++) y[k + i] = __uint_as_float(F32 ? word[i % 4] : i & 1 ? word[i / 2] & 0xffff0000u : word[i / 2] << 16);
    }
    if (n < MK_ORDERED)
#pragma unroll
        for (uint32_t k = 0; k < MK_ORDERED; k++) y[k] = k < n ? y[k] : 0;
    if (rms)
#pragma unroll
        for (uint32_t k = 0; k < MK_ORDERED; k++) {
            *sum = __fmaf_rn(y[k], y[k], *sum);
            y[k] = __fmul_rn(y[k], g[k]);
        }
    if (!to) return;
#pragma unroll
    for (uint32_t p = 0; p < (FORM == MK_X_F32 ? MK_PLANES_F32 : 1); p++) {
        uint32_t u[MK_ORDERED / 2]; /* pairs */
#pragma unroll
        for (uint32_t k = 0; k < MK_ORDERED / 2; k++) {
            float *z = y + 2 * k;
            u[k] = mk_bf16_pair(z[0], z[1]);
            const float y0 = __uint_as_float(u[k] << 16), y1 = __uint_as_float(u[k] & 0xffff0000u);
            if (FORM == MK_X_F16) u[k] = mk_f16_pair(y0 * scale, y1 * scale);
            z[0] -= y0;
            z[1] -= y1;
        }
#pragma unroll
        for (uint32_t l = 0; l < 4; l++)
            if (FORM == MK_X_F16)
                mk_sts64(to + p * plane + 16 * l, u[2 * l], u[2 * l + 1]); /* four values of one chunk */
            else
                mk_sts64(to + p * plane + 16 * l, u[l], u[l + 4]); /* two values of each of two */
    }
}
/* Offset of 16 values from k on in a staged row: they fill half of 64 bytes, eight of every 16. */
MK_DEV uint32_t mk_staged_16(uint32_t k)
{
    return (k >> 5) * 64 + (k & 16) / 2;
}
/* This thread's 16 gammas from value k on; returns the bits of the largest magnitude. Without RMS they mean nothing, but they are loaded as well: what is loaded on a
 * condition the compiler keeps in local memory. */
MK_DEV uint32_t mk_gammas(const mk_dev *d, const mk_input *x, uint32_t k, float *g)
{
    const bool rms = x->prologue == MK_PRO_RMS;
    const float *gamma = d->sh->args.param + (rms ? x->param_off : 0);
    const uint32_t last = rms ? x->k - 1 : 0;
    uint32_t gain = 0;
#pragma unroll
    for (uint32_t i = 0; i < MK_ORDERED; i++) {
        g[i] = __ldg(gamma + min(k + i, last));
        gain = max(gain, __float_as_uint(g[i]) & 0x7fffffffu);
    }
    return gain;
}
MK_DEV void mk_gain_share(const mk_dev *d, uint32_t gain)
{
    gain = __reduce_max_sync(0xffffffffu, gain);
    if (d->lane == 0) atomicMax(&d->sh->gain[d->memo->parity], gain);
}

/* The common case: one row, all of the vector at once, in order behind where it is staged. */
template <bool F32, uint32_t FORM> MK_DEV void mk_gather_row(const mk_dev *d, const mk_input *x, bool trailers)
{
    mk_shared *sh = d->sh;
    const mk_wait *w = &d->in->wait[0];
    const mk_vec *v = &sh->vec[w->vec];
    const uint16_t *start = sh->start + v->start_index + w->slice0;
    const uint32_t packets = w->nslice * v->slice_packets, epoch = mk_wait_epoch(d, w), staged = mk_smem(sh->staging), bytes = mk_staged_bytes(x->k, FORM), ordered = staged + bytes;
    const uint4 *base = mk_wait_packets(d, w, v, 0);
    const bool rms = x->prologue == MK_PRO_RMS;
    float *trailer = (float *)(sh->staging + bytes + mk_ordered_at<F32>((x->k + 63) & ~63u));
    mk_packet_at at[MK_PACKETS];
    uint4 q[MK_PACKETS];
    float g[MK_ORDERED];
    uint32_t top = 0;

#pragma unroll
    for (uint32_t j = 0; j < MK_PACKETS; j++) {
        const uint32_t p = d->tid + j * MK_COMPUTE;
        at[j] = mk_packet_where(v, start, p, packets, x->in_off, x->k, F32);
        q[j] = make_uint4(0, 0, 0, epoch);
        if (trailers ? p < packets : at[j].end) q[j] = mk_packet_load(base + p);
    }
    const uint32_t gain = mk_gammas(d, x, d->tid * MK_ORDERED, g);
    uint32_t looks = 0;
    for (bool again = true; again;) {
        again = false;
        uint32_t late = 0, found = 0;
#pragma unroll
        for (uint32_t j = 0; j < MK_PACKETS; j++)
            if (q[j].w != epoch) {
                again = true;
                late = d->tid + j * MK_COMPUTE;
                found = q[j].w;
                q[j] = mk_packet_load(base + late);
            }
        if (again) again = mk_still_waiting(++looks, 0, 0, late, found);
    }
    mk_waited(looks);
#pragma unroll
    for (uint32_t j = 0; j < MK_PACKETS; j++) {
        if (trailers) {
            uint32_t slice;
            const uint32_t k = mk_packet_trailer(v, start, d->tid + j * MK_COMPUTE, packets, F32, &slice);
            if (k < 3) trailer[slice] = __uint_as_float(k == 0 ? q[j].x : k == 1 ? q[j].y : q[j].z);
        }
        top = max(top, mk_packet_order<F32>(q[j], at[j], ordered));
    }
    mk_row_top(d, 0, top);
    if (rms) mk_gain_share(d, gain);
    mk_sync();
    if (trailers) mk_head_norms_staged(d, trailer, w->nslice, x->k / x->norm_group, x->norm_group, x->eps);
    const float scale = FORM == MK_X_F16 ? mk_row_scale(d, 0) : 1;
    float sum = 0;
#pragma unroll 1
    for (uint32_t i = d->tid * MK_ORDERED, end = (x->k + 63) & ~63u; i < end; i += MK_ROUND) /* with RMS there is one round: its gammas are here */
        mk_stage_16<F32, FORM>(ordered + mk_ordered_at<F32>(i), i < x->k ? x->k - i : 0, rms, g, scale, staged + mk_staged_16(i), mk_row_stride(x->k), &sum);
    if (rms) mk_row_squares(d, 0, sum);
}
/* Whether that is what there is. */
template <bool F32, uint32_t FORM> MK_DEV bool mk_one_row(const mk_dev *d, const mk_input *x, uint32_t n, uint32_t flags)
{
    const mk_wait *w = &d->in->wait[0];
    return d->step->nrows == 1 && n == x->k && w->nslice * d->sh->vec[w->vec].slice_packets <= MK_PACKETS * MK_COMPUTE && (x->prologue != MK_PRO_RMS || x->k <= MK_ROUND) &&
           mk_staged_bytes(x->k, FORM) + mk_ordered_at<F32>((x->k + 63) & ~63u) + (flags & MK_GATHER_TRAILERS ? 4 * w->nslice : 0) <= MK_STAGING;
}

/* Any number of rows, any chunk [c0, c0 + n) of the vector: a row and a quarter round of values at a time, in order in the reduction area (whose
 * rest holds sums between chunks). */
#define MK_SHORT_ROUND (MK_ROUND / 4)
static_assert(MK_SHORT_ROUND * 5 + MK_COMPUTE * MK_TILES * 16 <= MK_RED_FLOATS * 4, "a short round of f32 and the sums of a product fit");
template <bool F32, uint32_t FORM> MK_DEV void mk_gather_rows(const mk_dev *d, const mk_input *x, uint32_t c0, uint32_t n, uint32_t flags)
{
    mk_shared *sh = d->sh;
    const mk_wait *w = &d->in->wait[0];
    const mk_vec *v = &sh->vec[w->vec];
    const uint16_t *start = sh->start + v->start_index + w->slice0;
    const uint32_t packets = w->nslice * v->slice_packets, row_packets = v->nslice * v->slice_packets, epoch = mk_wait_epoch(d, w), nrows = d->step->nrows;
    const uint32_t staged = mk_smem(sh->staging), ordered = mk_smem(sh->red), stride = mk_row_stride(n);
    const uint4 *base = mk_wait_packets(d, w, v, 0);
    const bool rms = x->prologue == MK_PRO_RMS, again = (flags & MK_GATHER_AGAIN) != 0;
    float *trailer = flags & MK_GATHER_TRAILERS ? (float *)(sh->staging + nrows * mk_staged_bytes(n, FORM)) : (float *)0, g[MK_ORDERED];

    if (!again) { /* all of every row is looked at: its largest magnitude */
#pragma unroll 1
        for (uint32_t r = 0; r < nrows; r++) {
            uint32_t top = 0;
#pragma unroll 1
            for (uint32_t i = d->tid; i < packets; i += MK_COMPUTE) {
                const mk_packet_at at = mk_packet_where(v, start, i, packets, x->in_off, x->k, F32);
                if (!at.end && !trailer) continue;
                const uint4 *p = base + (size_t)r * row_packets + i;
                const uint4 q = mk_packet_get(p, mk_packet_load(p), epoch, 0, r, i);
                const uint32_t word[3] = {q.x, q.y, q.z};
#pragma unroll
                for (uint32_t k = 0; k < (F32 ? 3 : 6); k++)
                    if ((uint32_t)at.at + k < at.end) top = max(top, (F32 ? word[k % 3] : k & 1 ? word[k / 2] & 0xffff0000u : word[k / 2] << 16) & 0x7fffffffu);
                if (trailer) {
                    uint32_t slice;
                    const uint32_t k = mk_packet_trailer(v, start, i, packets, F32, &slice);
                    if (k < 3) trailer[r * w->nslice + slice] = __uint_as_float(k == 0 ? q.x : k == 1 ? q.y : q.z);
                }
            }
            mk_row_top(d, r, top);
        }
        uint32_t gain = 0;
        for (uint32_t i = d->tid * MK_ORDERED; rms && i < x->k; i += MK_ROUND) gain = max(gain, mk_gammas(d, x, i, g));
        if (rms) mk_gain_share(d, gain);
    }
    mk_sync(); /* nobody reads the reduction area any more */
    if (trailer) mk_head_norms_staged(d, trailer, w->nslice, x->k / x->norm_group, x->norm_group, x->eps);
    const uint32_t from = again ? c0 - c0 % MK_SHORT_ROUND : 0, to = again || !rms ? c0 + n : x->k;
#pragma unroll 1
    for (uint32_t r = 0; r < nrows; r++) {
        const float scale = FORM == MK_X_F16 ? mk_row_scale(d, r) : 1;
        float sum = 0;
#pragma unroll 1
        for (uint32_t k0 = from; k0 < to; k0 += MK_SHORT_ROUND) {
            const uint32_t len = min(MK_SHORT_ROUND, x->k - k0), i = k0 - k0 % MK_ROUND + d->tid * MK_ORDERED;
#pragma unroll 1
            for (uint32_t p = d->tid; p < packets; p += MK_COMPUTE) {
                const mk_packet_at at = mk_packet_where(v, start, p, packets, x->in_off + k0, len, F32);
                if (at.end) mk_packet_order<F32>(mk_packet_load(base + (size_t)r * row_packets + p), at, ordered);
            }
            mk_sync();
            if (i - k0 < MK_SHORT_ROUND && i < ((x->k + 63) & ~63u)) {
                const bool wanted = i >= c0 && i < c0 + ((n + 63) & ~63u);
                mk_gammas(d, x, i, g);
                mk_stage_16<F32, FORM>(ordered + mk_ordered_at<F32>(i - k0), i < x->k ? x->k - i : 0, rms, g, scale,
                                        wanted ? staged + r * stride + mk_staged_16(i - c0) : 0, nrows * stride, &sum);
            }
            mk_sync();
        }
        if (rms && !again) mk_row_squares(d, r, sum);
    }
}
template <bool F32, uint32_t FORM> MK_CALL void mk_gather_rows_of(const mk_insn *in, uint32_t c0, uint32_t n, uint32_t flags)
{
    const mk_dev d = mk_here(in);
    mk_tile t;
    mk_input x;
    if (in->opcode == MK_OP_EXPERT_UP)
        x = mk_up_input(in);
    else
        mk_describe(in, &t, &x);
    mk_gather_rows<F32, FORM>(&d, &x, c0, n, flags);
}
template <bool F32, uint32_t FORM> MK_CALL void mk_gather_row_of(const mk_insn *in, uint32_t flags)
{
    const mk_dev d = mk_here(in);
    mk_tile t;
    mk_input x;
    if (in->opcode == MK_OP_EXPERT_UP)
        x = mk_up_input(in);
    else
        mk_describe(in, &t, &x);
    mk_gather_row<F32, FORM>(&d, &x, (flags & MK_GATHER_TRAILERS) != 0);
}
/* Stages values [c0, c0 + n) of wait 0's vector for all rows; all compute threads call it, and a barrier must follow. AGAIN: another chunk of a vector that has been
 * looked at. TRAILERS: the slices' trailers become the heads' norms. */
template <bool F32, uint32_t FORM> MK_DEV void mk_gather_of(const mk_dev *d, const mk_input *x, uint32_t c0, uint32_t n, uint32_t flags)
{
    if (mk_one_row<F32, FORM>(d, x, n, flags))
        mk_gather_row_of<F32, FORM>(d->in, flags);
    else
        mk_gather_rows_of<F32, FORM>(d->in, c0, n, flags);
}
template <uint32_t FORM> MK_DEV void mk_gather(const mk_dev *d, const mk_input *x, uint32_t c0, uint32_t n, uint32_t flags)
{
    if (FORM == MK_X_F32 || d->sh->vec[d->in->wait[0].vec].dtype == MK_F32)
        mk_gather_of<true, FORM>(d, x, c0, n, flags);
    else
        mk_gather_of<false, FORM>(d, x, c0, n, flags);
}

/* Instructions that read the same vector with the same prologue gather it once. Returns whether it is staged; if not, the caller stages it now (keep: as a
 * whole). */
MK_DEV bool mk_staged(const mk_dev *d, const mk_input *x, bool keep)
{
    const mk_wait *w = &d->in->wait[0];
    const uint32_t step = d->step->seq, vector = w->vec | (uint32_t)w->pub << 16, norm = x->prologue | x->form << 2 | x->param_off << 4;
    mk_memo *m = d->memo;
    const bool have = keep && m->staged.valid && m->staged.step == step && m->staged.vector == vector && m->staged.first == x->in_off && m->staged.k == x->k &&
                      m->staged.norm == norm;
    __syncwarp();
    if (d->lane == 0 && !have) {
        m->staged.valid = keep;
        m->staged.step = step;
        m->staged.vector = vector;
        m->staged.first = x->in_off;
        m->staged.k = x->k;
        m->staged.norm = norm;
        m->parity ^= 1; /* sums and factors of the vector before may still be read */
    }
    __syncwarp();
    return have;
}

/* ---- the product ---------------------------------------------------------------------------------------------------- */

#define MK_GROUP_WARPS 4u /* a warpgroup */
static_assert(MK_GROUPS * MK_GROUP_WARPS == MK_WARPS && MK_GROUPS == 2 && MK_STATIC_STAGES % MK_GROUPS == 0 && MK_EXPERT_STAGES % MK_GROUPS == 0, "a slot has one group");

#define MK_NO_NORM 15u

/* Results of a warp's tiles, m16n8's fragment: rows lane / 4 (x, y) and that + 8 (z, w), batch rows 2 * (lane % 4) (x, z) and the next (y, w). */
typedef struct mk_accs {
    float4 tile[MK_TILES];
} mk_accs;

MK_DEV void mk_mma_bf16(float *c, const uint32_t *a, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
MK_DEV void mk_mma_f16(float *c, const uint32_t *a, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
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
MK_DEV uint4 mk_ldx(uint32_t at)
{
    uint4 v;
    asm("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
MK_DEV float mk_lds(uint32_t at)
{
    float v;
    asm("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at));
    return v;
}
/* The same address, but not before what is waited for here. */
MK_DEV uint32_t mk_after(uint32_t at)
{
    asm volatile("" : "+r"(at)::"memory");
    return at;
}

/* Where a segment row's scale lies, from the scales of its K block on. */
MK_DEV uint32_t mk_scale_of(uint32_t i, uint32_t rows, uint32_t half, uint32_t nseg, uint32_t phase)
{
    i = min(i, rows - 1);
    return 4 * (i >= half ? nseg + (phase + i - half) / MK_SCALE_ROWS : (phase + i) / MK_SCALE_ROWS);
}

/* acc + this warp's NT tiles of the segment times the staged vector, over stages [s0, s1) of the segment, whose first lies in slot `at` of the ring and whose stage s0
 * stands at shared address x. cols: staged rows, `stride` bytes apart; planes follow at cols * stride. */
template <uint32_t FORM, uint32_t NT>
MK_DEV mk_accs mk_product_as(uint32_t ring, uint32_t at, const mk_tile *t, uint32_t s0, uint32_t s1, uint32_t x, uint32_t stride, uint32_t cols, uint32_t head_shift, mk_accs acc)
{
    constexpr bool FP8 = FORM == MK_X_F16;
    mk_shared *sh = mk_sh();
    const uint32_t log_stages = ring == MK_TAPE ? MK_LOG_STATIC : MK_LOG_EXPERT, rows = t->rows, nkb = t->nkb, per = t->per, shift = t->shift, kb_bytes = rows * MK_KBLOCK_BYTES;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, l = lane & 3, member = warp % MK_GROUP_WARPS;
    const uint32_t first = s0 + ((warp / MK_GROUP_WARPS - at - s0) & (MK_GROUPS - 1));
    const bool sides = rows > 16 * MK_TILES;
    const uint32_t ways = sides ? MK_GROUP_WARPS / 2 : MK_GROUP_WARPS, way = member & (ways - 1), row0 = sides ? (member >> 1) * 16 * MK_TILES : 0;
    const uint32_t half = t->halves == 2 ? rows / 2 : rows, scale_row = (t->halves == 2 ? 8 : 4) * t->nseg;
    const uint32_t row_at = (lane >> 4) * rows * 16 + (row0 + (lane & 15)) * 16; /* of ldmatrix: chunk lane / 16, row lane % 16 */
    const uint32_t column = x + (g < cols ? g : 0) * stride + l * 16, plane = cols * stride, norm = mk_smem(sh->head_rstd[2 * l]);
    const uint32_t ring0 = mk_smem(mk_stages(ring)), full = mk_smem(sh->full[ring]), empty = mk_smem(sh->empty[ring]);
    uint32_t c[2 * NT], turn = first / MK_GROUPS * per; /* K blocks of the partial sum before */
#pragma unroll
    for (uint32_t i = 0; i < 2 * NT; i++) c[i] = FP8 ? mk_scale_of(row0 + 8 * i + g, rows, half, t->nseg, t->phase) : 0;

#pragma unroll 1
    for (uint32_t s = first; s < s1; s += MK_GROUPS, turn += per) {
        const uint32_t n = at + s, slot = n & ((1u << log_stages) - 1), kb = s * per, nk = nkb - kb < per ? nkb - kb : per, stage = ring0 + slot * MK_STAGE_STRIDE;
        mk_stage_wait(full + 8 * slot, n >> log_stages & 1, ring == MK_TAPE ? MK_FAULT_TAPE : MK_FAULT_EXPERT);
        const uint32_t b0 = (way - turn) & (ways - 1);
        uint32_t w = mk_after(stage + row_at) + b0 * kb_bytes, xk = mk_after(column) + (kb + b0 - s0 * per) * (FP8 ? 128 : 64);
        const uint32_t scales = mk_after(stage + MK_STAGE_BYTES) + (((kb >> shift) * scale_row) & 15) - (kb >> shift) * scale_row;
#pragma unroll 1
        for (uint32_t k = kb + b0; k < kb + nk; k += ways, w += ways * kb_bytes, xk += ways * (FP8 ? 128 : 64)) {
            float part[NT][4], n0 = 1, n1 = 1;
            const uint4 v0 = mk_ldx(xk), v1 = FP8 ? mk_ldx(xk + 64) : v0;
            if (head_shift != MK_NO_NORM) {
                n0 = mk_lds(norm + 4 * (k >> head_shift));
                n1 = mk_lds(norm + 4 * MK_MAX_NORM_HEADS + 4 * (k >> head_shift));
            }
#pragma unroll
            for (uint32_t j = 0; j < NT; j++) {
                uint32_t a[4], b[4];
                mk_ldmatrix(a, w + 256 * j);
                mk_ldmatrix(b, w + 256 * j + 2 * rows * 16);
                part[j][0] = part[j][1] = part[j][2] = part[j][3] = 0;
                if (FP8) {
                    uint32_t lo[4], hi[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) mk_fp8_open(a[i], &lo[i], &hi[i]);
                    mk_mma_f16(part[j], lo, v0.x, v0.z);
                    mk_mma_f16(part[j], hi, v0.y, v0.w);
#pragma unroll
                    for (int i = 0; i < 4; i++) mk_fp8_open(b[i], &lo[i], &hi[i]);
                    mk_mma_f16(part[j], lo, v1.x, v1.z);
                    mk_mma_f16(part[j], hi, v1.y, v1.w);
                } else {
                    mk_mma_bf16(part[j], a, v0.x, v0.y);
                    mk_mma_bf16(part[j], b, v0.z, v0.w);
                    if (FORM == MK_X_F32)
#pragma unroll
                        for (uint32_t p = 1; p < MK_PLANES_F32; p++) {
                            const uint4 v = mk_ldx(xk + p * plane);
                            mk_mma_bf16(part[j], a, v.x, v.y);
                            mk_mma_bf16(part[j], b, v.z, v.w);
                        }
                }
            }
#pragma unroll
            for (uint32_t j = 0; j < NT; j++) {
                const uint32_t at_row = scales + (k >> shift) * scale_row;
                const float f0 = FP8 ? mk_lds(at_row + c[2 * j]) : 1, f1 = FP8 ? mk_lds(at_row + c[2 * j + 1]) : 1;
                acc.tile[j].x = __fmaf_rn(part[j][0], f0 * n0, acc.tile[j].x);
                acc.tile[j].y = __fmaf_rn(part[j][1], f0 * n1, acc.tile[j].y);
                acc.tile[j].z = __fmaf_rn(part[j][2], f1 * n0, acc.tile[j].z);
                acc.tile[j].w = __fmaf_rn(part[j][3], f1 * n1, acc.tile[j].w);
            }
        }
        __syncwarp();
        if (mk_arrives(lane)) mk_mbar_arrive(empty + 8 * slot);
    }
    return acc;
}
template <uint32_t FORM>
MK_DEV mk_accs mk_product(uint32_t ring, uint32_t at, const mk_tile *t, uint32_t s0, uint32_t s1, uint32_t x, uint32_t stride, uint32_t cols, uint32_t head_shift, mk_accs acc)
{
    const uint32_t tiles = (t->rows + 15) / 16; /* with two sides: all four, of which the second's last may be none */
    if (tiles == 1) return mk_product_as<FORM, 1>(ring, at, t, s0, s1, x, stride, cols, head_shift, acc);
    if (tiles == 2) return mk_product_as<FORM, 2>(ring, at, t, s0, s1, x, stride, cols, head_shift, acc);
    if (tiles == 3) return mk_product_as<FORM, 3>(ring, at, t, s0, s1, x, stride, cols, head_shift, acc);
    return mk_product_as<FORM, 4>(ring, at, t, s0, s1, x, stride, cols, head_shift, acc);
}
MK_DEV mk_accs mk_no_sum(void)
{
    const float4 z = make_float4(0, 0, 0, 0);
    const mk_accs a = {z, z, z, z};
    return a;
}
/* The segment's stages lie behind us. */
MK_DEV uint32_t mk_ring_at(const mk_dev *d, uint32_t ring)
{
    return d->memo->at[ring];
}
MK_DEV void mk_ring_pass(const mk_dev *d, uint32_t ring, uint32_t at)
{
    __syncwarp();
    if (d->lane == 0) d->memo->at[ring] = at;
    __syncwarp();
}

/* How a vector is staged: whole if it fits, which is up to how many rows there are; else in chunks of whole stages. */
MK_DEV bool mk_staged_whole(const mk_input *x, uint32_t nrows)
{
    return mk_staged_bytes(x->k, x->form) * nrows <= MK_STAGING;
}
/* Stages of a chunk. */
MK_DEV uint32_t mk_staged_chunk(const mk_input *x, const mk_tile *t, uint32_t nrows)
{
    return mk_staged_whole(x, nrows) ? t->nst : mk_small_quot(mk_chunk_kblocks(t->wtype, x->form), t->per);
}

/* Stages values [c0, c0 + n) of x unless the staging area holds it; all compute threads may read it then, and the factors with it. */
template <uint32_t FORM> MK_DEV void mk_stage_input(const mk_dev *d, const mk_input *x, bool whole, uint32_t c0, uint32_t n)
{
    if (c0) mk_sync(); /* the chunk before is consumed */
    if (c0 || !mk_staged(d, x, whole)) {
        const mk_wait *w = &d->in->wait[0];
        const uint32_t nrows = d->step->nrows;
        const bool heads = x->prologue == MK_PRO_HEADNORM && !c0, trailers = heads && whole && nrows * (mk_staged_bytes(n, FORM) + 4 * w->nslice) <= MK_STAGING;
        if (heads && !trailers) mk_head_norms(d->in, x->k / x->norm_group, x->norm_group, x->eps);
        mk_gather<FORM>(d, x, c0, n, c0 ? MK_GATHER_AGAIN : trailers ? MK_GATHER_TRAILERS : 0);
        mk_sync();
        if (!c0) mk_factor_share(d, x);
    }
    if (!c0) mk_trace_input(d);
}

MK_DEV uint32_t mk_head_shift(const mk_input *x, const mk_tile *t)
{
    return x->prologue == MK_PRO_HEADNORM ? 31 - __clz((int)x->norm_group) - (t->wtype == MK_W_FP8 ? 6 : 5) : MK_NO_NORM;
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
MK_DEV uint32_t mk_red_size(uint32_t rows, uint32_t cols)
{
    return MK_GROUPS * mk_ways(rows) * cols * mk_red_rows(rows);
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

/* ---- an instruction of products --------------------------------------------------------------------------------------- */

/* What comes before and after the products are functions of the opcodes:
 *   begin   stages the input of the first batch of products and lists them; returns their number
 *   end     reduces and publishes; stages and lists the next batch; returns its number, 0: the instruction is done
 * All compute threads call them. Static segments have one product, or one a chunk if the vector does not fit the staging area. */

/* The chunk of a static segment's vector that is staged: its stages. */
typedef struct mk_chunk {
    uint32_t s0, s1;
    bool whole, last;
} mk_chunk;
MK_DEV mk_chunk mk_chunk_of(const mk_input *x, const mk_tile *t, uint32_t nrows, uint32_t chunk)
{
    mk_chunk c;
    const uint32_t stages = mk_staged_chunk(x, t, nrows);
    c.whole = mk_staged_whole(x, nrows);
    c.s0 = chunk * stages;
    c.s1 = min(c.s0 + stages, t->nst);
    c.last = c.s1 == t->nst;
    return c;
}
/* Its values. */
MK_DEV uint32_t mk_chunk_values(const mk_input *x, const mk_tile *t, const mk_chunk *c)
{
    const uint32_t log_values = t->wtype == MK_W_FP8 ? 6 : 5;
    return min(c->s1 * t->per << log_values, x->k) - (c->s0 * t->per << log_values);
}
template <uint32_t FORM> MK_CALL uint32_t mk_static_stage(const mk_insn *in, uint32_t chunk)
{
    const mk_dev here = mk_here(in), *d = &here;
    mk_tile t;
    mk_input x;
    mk_describe(in, &t, &x);
    const mk_chunk c = mk_chunk_of(&x, &t, d->step->nrows, chunk);
    __syncwarp();
    if (d->lane == 0) d->memo->chunk = chunk;
    __syncwarp();
    mk_stage_input<FORM>(d, &x, c.whole, c.s0 * t.per << (t.wtype == MK_W_FP8 ? 6 : 5), mk_chunk_values(&x, &t, &c));
    return 1;
}
MK_DEV uint32_t mk_static_form(const mk_insn *in)
{
    return in->opcode == MK_OP_LM_HEAD ? mk_form(in->lm_head.wtype, false) : mk_form(in->gemv.wtype, in->gemv.flags & MK_GEMV_X_F32);
}
MK_DEV uint32_t mk_static_next(const mk_insn *in, uint32_t chunk)
{
    const uint32_t form = mk_static_form(in);
    return form == MK_X_F16 ? mk_static_stage<MK_X_F16>(in, chunk) : form == MK_X_F32 ? mk_static_stage<MK_X_F32>(in, chunk) : mk_static_stage<MK_X_BF16>(in, chunk);
}
/* Where a thread's sums wait between two chunks. */
MK_DEV float4 *mk_sums_at(const mk_dev *d)
{
    return (float4 *)((uint8_t *)d->sh->red + MK_SHORT_ROUND * 5) + MK_TILES * d->tid;
}

/* Whether that was a static segment's last chunk; if so, how and where its result lies (after the next barrier), and the halves change. */
MK_DEV bool mk_static_done(const mk_dev *d, uint32_t *form, uint32_t *base)
{
    mk_tile t;
    mk_input x;
    mk_describe(d->in, &t, &x);
    const uint32_t nrows = d->step->nrows;
    if (!mk_chunk_of(&x, &t, nrows, d->memo->chunk).last) return false;
    *form = mk_red_form(&t, nrows);
    *base = mk_red_base(d);
    __syncwarp();
    if (d->lane == 0) d->memo->turn ^= 1;
    __syncwarp();
    return true;
}

/* The products of a batch: what begin or end has listed. */
template <uint32_t FORM> MK_CALL void mk_products_of(const mk_insn *in, uint32_t jobs)
{
    const mk_dev here = mk_here(in), *d = &here;
    const bool expert = FORM != MK_X_F32 && (in->opcode == MK_OP_EXPERT_UP || in->opcode == MK_OP_EXPERT_DOWN);
    const uint32_t ring = expert ? MK_EXPERT : MK_TAPE, nrows = d->step->nrows;
    uint32_t at = mk_ring_at(d, ring);
#pragma unroll 1
    for (uint32_t i = 0; i < jobs; i++) {
        mk_tile t;
        mk_accs acc = mk_no_sum();
        uint32_t staged = mk_smem(d->sh->staging), stride, cols = nrows, base = 0, head_shift = MK_NO_NORM, s0 = 0;
        bool last = true;
        if (expert) {
            const mk_expert *e = &in->expert;
            const mk_job j = d->sh->job[i];
            t = mk_tile_make(e->wtype, j.rows, e->k, in->opcode == MK_OP_EXPERT_UP ? 2 : 1, e->nseg, j.phase, MK_SCALE_ROWS, j.stages);
            staged = j.x;
            stride = mk_row_stride(e->k);
            cols = j.cols;
            base = j.base;
            mk_trace_bytes(d, t.rows * t.nkb * MK_KBLOCK_BYTES);
        } else {
            mk_input x;
            mk_describe(in, &t, &x);
            const mk_chunk c = mk_chunk_of(&x, &t, nrows, d->memo->chunk);
            s0 = c.s0;
            t.nst = c.s1;
            last = c.last;
            head_shift = mk_head_shift(&x, &t);
            stride = mk_row_stride(mk_chunk_values(&x, &t, &c));
            if (s0)
#pragma unroll
                for (uint32_t k = 0; k < MK_TILES; k++) acc.tile[k] = mk_sums_at(d)[k];
            base = mk_red_base(d);
        }
        acc = mk_product<FORM>(ring, at, &t, s0, t.nst, staged, stride, cols, head_shift, acc);
        if (last) {
            mk_red_put(d, base, &t, at, cols, &acc);
            at += t.nst;
        } else {
#pragma unroll
            for (uint32_t k = 0; k < MK_TILES; k++) mk_sums_at(d)[k] = acc.tile[k];
        }
    }
    mk_ring_pass(d, ring, at);
}
MK_DEV void mk_products(const mk_insn *in, uint32_t jobs)
{
    const bool expert = in->opcode == MK_OP_EXPERT_UP || in->opcode == MK_OP_EXPERT_DOWN;
    const uint32_t form = expert ? mk_form(in->expert.wtype, false) : mk_static_form(in);
    if (form == MK_X_F16)
        mk_products_of<MK_X_F16>(in, jobs);
    else if (form == MK_X_BF16)
        mk_products_of<MK_X_BF16>(in, jobs);
    else
        mk_products_of<MK_X_F32>(in, jobs);
}

#endif
