/* DELTA_STEP on the device. Semantics: delta_step.c; in memory the delta rule's state is [dv][dk] here.
 * First a thread has a channel: a warp 32 of q or k, then 32 of whatever else the item takes. What comes from memory is asked for before anything is waited for: packets,
 * the convolution's inputs and weights, and the four columns of the state that a warp has in registers from then on, its lanes four key channels each. The norms
 * of q and k are sums beside those of the columns, so that one barrier is enough before them. */
#ifndef MK_DELTA_STEP_CUH
#define MK_DELTA_STEP_CUH

#include "instructions/matvec.cuh"
#include "instructions/value.cuh"

#define MK_DELTA_DK   128u
#define MK_DELTA_DV   128u /* at most */
#define MK_DELTA_TAPS 4u
#define MK_DELTA_COLS 4    /* columns of the state that a warp has in registers */

/* One row, in the staging area. */
typedef struct mk_delta_row {
    alignas(16) float qk[2 * MK_DELTA_DK]; /* after the convolution, not normalised */
    float v[MK_DELTA_DV];
    float a[MK_DELTA_DK]; /* decay factors; MK_DECAY_HEAD: a[0] */
    float z[MK_DELTA_DV]; /* o_norm * gate */
    float o[MK_DELTA_DV];
    float beta, pad[3];
} mk_delta_row;
static_assert(sizeof(mk_delta_row) * MK_MAX_ROWS <= MK_STAGING && sizeof(mk_delta_row) % 16 == 0, "eight rows fit");
static_assert(2 * MK_DELTA_DK == MK_COMPUTE, "a thread has a channel of q or k");

/* The row reads what the row before it wrote: its state is at hand. */
MK_DEV bool mk_row_follows(const mk_step *step, uint32_t r)
{
    const mk_row *row = &step->row[r], *before = row - 1;
    return r > 0 && before->slot == row->slot && before->state_write == row->state_read && before->pos + 1 == row->pos;
}

/* By the controller, when it feeds the instruction: the item's state and parameters are on their way to L2 before the instruction begins. */
MK_DEV void mk_delta_ahead(const mk_gpu_args *a, const mk_step *step, const mk_delta *e, uint32_t lane)
{
    const uint32_t params = (mk_delta_rate_at(e) + 1 + mk_delta_decays(e) + e->dv) * 4, state = (uint32_t)mk_delta_state_bytes(e);
#pragma unroll 1
    for (uint32_t i = lane * 128; i < params; i += 32 * 128) mk_prefetch((const uint8_t *)(a->param + e->param_off) + i);
#pragma unroll 1
    for (uint32_t r = 0; r < step->nrows; r++) {
        const mk_row *row = &step->row[r];
        if (mk_row_follows(step, r) || (row->flags & MK_ROW_FIRST)) continue;
        const uint8_t *from = a->state + row->state_read * a->state_slot_bytes + e->state_off;
#pragma unroll 1
        for (uint32_t i = lane * 128; i < state; i += 32 * 128) mk_prefetch(from + i);
    }
}

MK_DEV float mk_dot4(float4 a, float4 b)
{
    return __fmaf_rn(a.w, b.w, __fmaf_rn(a.z, b.z, __fmaf_rn(a.y, b.y, __fmul_rn(a.x, b.x))));
}
MK_DEV float4 mk_mul4(float4 a, float4 b)
{
    return make_float4(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y), __fmul_rn(a.z, b.z), __fmul_rn(a.w, b.w));
}
/* Four sums over the warp in six exchanges: lanes 8 i to 8 i + 7 have sum i at the end. */
MK_DEV float mk_warp_four(float4 v, uint32_t lane)
{
    const bool b16 = lane & 16, b8 = lane & 8;
    const float a = (b16 ? v.z : v.x) + __shfl_xor_sync(0xffffffffu, b16 ? v.x : v.z, 16);
    const float b = (b16 ? v.w : v.y) + __shfl_xor_sync(0xffffffffu, b16 ? v.y : v.w, 16);
    float s = (b8 ? b : a) + __shfl_xor_sync(0xffffffffu, b8 ? a : b, 8);
#pragma unroll
    for (int w = 4; w; w >>= 1) s += __shfl_xor_sync(0xffffffffu, s, w);
    return s;
}

MK_DEV float mk_delta_exp(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(__fmul_rn(x, 1.44269504f)));
    return y;
}
/* x * sigmoid(y). */
MK_DEV float mk_delta_gate(float x, float y)
{
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(__fadd_rn(mk_delta_exp(-y), 1.0f)));
    return __fmul_rn(x, r);
}
/* e^(rate * softplus(x)). The hardware's functions are good to 1e-7 of 1; near a factor of 1, which is applied for thousands of tokens, what is taken away from it has
 * to be as good as that. */
MK_DEV float mk_delta_decay(float x, float rate)
{
    const float t = mk_delta_exp(x);
    float lg;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(lg) : "f"(__fadd_rn(1.0f, t)));
    const float small = __fmul_rn(t, __fmaf_rn(t, __fmaf_rn(t, __fmaf_rn(t, -0.25f, 0.333333333f), -0.5f), 1.0f)); /* log(1 + t) */
    const float soft = x > 20.0f ? x : t < 0.03125f ? small : __fmul_rn(lg, 0.693147181f), g = __fmul_rn(rate, soft);
    const float near1 = __fmaf_rn(g, __fmaf_rn(g, __fmaf_rn(g, __fmaf_rn(g, 0.0416666667f, 0.166666667f), 0.5f), 1.0f), 1.0f);
    return g > -0.0625f ? near1 : mk_delta_exp(g);
}

/* The last inputs of a channel before row r, where the row does not follow the one before it. */
MK_DEV float4 mk_delta_past(const mk_dev *d, const mk_delta *e, uint32_t r, uint32_t channel)
{
    const mk_row *row = &d->step->row[r];
    if (row->flags & MK_ROW_FIRST) return make_float4(0, 0, 0, 0);
    return __ldcg((const float4 *)(d->a->state + row->state_read * d->a->state_slot_bytes + e->state_off) + channel);
}
/* Convolves a channel of all rows; `look` and `past` are of row 0, `to` is where its result goes. */
MK_DEV void mk_delta_convolve(const mk_dev *d, const mk_delta *e, const mk_spot *spot, uint4 look, float4 w, float4 past, uint32_t channel, float *to)
{
    const uint32_t nrows = d->step->nrows;
#pragma unroll 1
    for (uint32_t r = 0;;) {
        const mk_row *row = &d->step->row[r];
        const uint4 q = look;
        const bool more = r + 1 < nrows, loads = more && !mk_row_follows(d->step, r + 1);
        float4 next = make_float4(0, 0, 0, 0);
        if (more) look = mk_spot_look(spot, r + 1);
        if (loads) next = mk_delta_past(d, e, r + 1, channel);
        const float x = mk_spot_value(spot, r, q);
        past = make_float4(past.y, past.z, past.w, x);
        const float y = mk_dot4(w, past);
        *to = mk_silu(y);
        ((float4 *)(d->a->state + row->state_write * d->a->state_slot_bytes + e->state_off))[channel] = past;
        if (!more) break;
        if (loads) past = next;
        to += sizeof(mk_delta_row) / 4;
        r++;
    }
}

/* The state before row r where the row does not follow the one before it. */
MK_DEV float4 mk_delta_load(const mk_dev *d, const mk_delta *e, uint64_t matrix, uint32_t r, uint32_t v)
{
    const mk_row *row = &d->step->row[r];
    if (v >= e->dv || (row->flags & MK_ROW_FIRST)) return make_float4(0, 0, 0, 0);
    return __ldcg((const float4 *)(d->a->state + row->state_read * d->a->state_slot_bytes + matrix) + v * (MK_DELTA_DK / 4) + d->lane);
}

/* All that the item takes, of all rows, into the staging area; and the state of row 0's first columns into s. By units of 32 values: 8 of q and k, one a warp, then
 * those of f, b, v and z. */
MK_DEV void mk_delta_take(const mk_dev *d, const mk_delta *e, uint64_t matrix, mk_delta_row *rows, float4 *s)
{
    const uint32_t nrows = d->step->nrows, lane = d->lane, head = e->decay == MK_DECAY_HEAD, nf = head ? 1 : MK_DELTA_DK / 32, nv = (e->dv + 31) / 32;
    const uint32_t units = MK_WARPS + nf + 1 + 2 * nv, key = d->tid >= MK_DELTA_DK;
    const float *const weight = d->a->param + e->param_off, *const param = weight + mk_delta_rate_at(e);
    const mk_spot spot = mk_spot_of(d, 0, key ? e->k_off + d->tid - MK_DELTA_DK : e->q_off + d->tid);
    const uint4 look = mk_spot_look(&spot, 0);
    const float4 w = __ldg((const float4 *)weight + d->tid), past = mk_delta_past(d, e, 0, d->tid);
#pragma unroll 1
    for (uint32_t u = d->warp + MK_WARPS;; u += MK_WARPS) {
        const bool is_f = u < MK_WARPS + nf, is_b = u == MK_WARPS + nf, is_v = !is_f && !is_b && u < units - nv;
        const uint32_t i = (is_f ? u - MK_WARPS : is_b ? 0 : is_v ? u - (units - 2 * nv) : u - (units - nv)) * 32 + lane;
        const bool has = u < units && i < (is_f ? head ? 1 : MK_DELTA_DK : is_b ? 1 : e->dv);
        mk_spot other = {}; /* ptxas keeps alive, across all opcodes, what is not set on every path */
        uint4 first = make_uint4(0, 0, 0, 0);
        float4 taps = make_float4(0, 0, 0, 0), before = taps;
        float p = 0, rate = 0;
        if (has) {
            other = mk_spot_of(d, is_v ? 0 : is_b ? 2 : 1, (is_f ? e->f_off : is_b ? e->b_off : is_v ? e->v_off : e->z_off) + i);
            first = mk_spot_look(&other, 0);
            if (is_v) {
                taps = __ldg((const float4 *)weight + 2 * MK_DELTA_DK + i);
                before = mk_delta_past(d, e, 0, 2 * MK_DELTA_DK + i);
            } else if (!is_b) {
                p = __ldg(param + 1 + i + (is_f ? 0 : head ? 1 : MK_DELTA_DK));
            }
            if (is_f) rate = -mk_delta_exp(__ldg(param));
        }
        if (u < 2 * MK_WARPS) {
#pragma unroll
            for (int c = 0; c < MK_DELTA_COLS; c++) s[c] = mk_delta_load(d, e, matrix, 0, d->warp + c * MK_WARPS);
            mk_delta_convolve(d, e, &spot, look, w, past, d->tid, rows->qk + d->tid);
            __syncwarp();
        }
        if (has && is_v) mk_delta_convolve(d, e, &other, first, taps, before, 2 * MK_DELTA_DK + i, rows->v + i);
        if (has && !is_v) {
            float *to = is_f ? rows->a + i : is_b ? &rows->beta : rows->z + i;
#pragma unroll 1
            for (uint32_t r = 0;; to += sizeof(mk_delta_row) / 4) {
                const uint4 q = first;
                if (r + 1 < nrows) first = mk_spot_look(&other, r + 1);
                const float x = mk_spot_value(&other, r, q);
                if (is_f) {
                    *to = mk_delta_decay(x + p, rate);
                } else {
                    const float y = mk_delta_gate(is_b || e->gate == MK_GATE_SIGMOID ? 1.0f : x, x);
                    *to = is_b ? y : p * y;
                }
                if (++r == nrows) break;
            }
        }
        __syncwarp();
        if (u + MK_WARPS >= units) break;
    }
}

/* One warp publishes a row: the slice's values, then the trailer. */
MK_DEV void mk_delta_publish(uint32_t lane, uint32_t dv, const mk_delta_row *x, uint4 *p, uint32_t epoch)
{
    const uint32_t words = dv / 2;
    float sum = 0;
#pragma unroll 1
    for (uint32_t i = lane; i < dv; i += 32) sum = __fmaf_rn(x->o[i], x->o[i], sum);
    sum = mk_warp_sum(sum);
#pragma unroll 1
    for (uint32_t i = lane; i < (words + 1 + 2) / 3; i += 32) {
        uint32_t word[3];
#pragma unroll
        for (uint32_t k = 0; k < 3; k++) {
            const uint32_t w = 3 * i + k;
            const float2 o = ((const float2 *)x->o)[w], z = ((const float2 *)x->z)[w]; /* beyond the last value: something of this row */
            word[k] = mk_bf16_bits(__fmul_rn(o.x, z.x)) | mk_bf16_bits(__fmul_rn(o.y, z.y)) << 16;
            word[k] = w < words ? word[k] : w == words ? __float_as_uint(sum) : 0;
        }
        mk_packet_store(p + i, word[0], word[1], word[2], epoch);
    }
}

MK_DEV void mk_delta_step_run(const mk_dev *d)
{
    const mk_delta *e = &d->in->delta;
    const mk_places *place = &mk_fed_of(d->in)->place;
    const mk_vec *out = &d->sh->vec[d->in->signal_vec];
    const uint32_t dv = e->dv, nrows = d->step->nrows, lane = d->lane, head = e->decay == MK_DECAY_HEAD;
    const uint64_t matrix = e->state_off + mk_delta_matrix_at(e);
    mk_delta_row *rows = (mk_delta_row *)d->sh->staging;
    float4 s[MK_DELTA_COLS] = {};
    uint4 *const to = place->out + d->warp * out->nslice * out->slice_packets; /* of row `warp` */
    const uint32_t epoch = place->out_epoch;
    mk_staged_drop(d);
    mk_delta_take(d, e, matrix, rows, s);
    mk_sync();
    mk_trace_input(d);
    mk_trace_bytes(d, nrows * MK_DELTA_DK * dv * 4);

#pragma unroll 1
    for (uint32_t v0 = d->warp; v0 < dv + d->warp; v0 += MK_DELTA_COLS * MK_WARPS)
#pragma unroll 1
        for (uint32_t r = 0; r < nrows; r++) {
            const mk_row *row = &d->step->row[r];
            mk_delta_row *x = rows + r;
            if (r + v0 != d->warp && !mk_row_follows(d->step, r))
#pragma unroll
                for (int c = 0; c < MK_DELTA_COLS; c++) s[c] = mk_delta_load(d, e, matrix, r, v0 + c * MK_WARPS);
            const float a0 = x->a[0];
            const float4 q = ((const float4 *)x->qk)[lane], k = ((const float4 *)x->qk)[MK_DELTA_DK / 4 + lane];
            const float4 a = head ? make_float4(a0, a0, a0, a0) : ((const float4 *)x->a)[lane], ka = mk_mul4(k, a), qa = mk_mul4(q, a);
            const float beta = x->beta;
            float dot[2 * MK_DELTA_COLS];
#pragma unroll
            for (int c = 0; c < MK_DELTA_COLS; c++) {
                dot[c] = mk_dot4(ka, s[c]);
                dot[MK_DELTA_COLS + c] = mk_dot4(qa, s[c]);
            }
            /* lanes 4 c to 4 c + 3 have k'S of column c, 16 lanes on q'S; then that column's delta, and its o */
            const float sum = mk_warp_eight(dot, lane), norm = mk_warp_four(make_float4(mk_dot4(q, q), mk_dot4(k, k), mk_dot4(q, k), 0), lane);
            const float over = mk_rsqrt(norm + 1e-6f), rk = __shfl_sync(0xffffffffu, over, 8);
            const float rq = __fmul_rn(__shfl_sync(0xffffffffu, over, 0), 0x1.6a09e6p-4f), qk = __shfl_sync(0xffffffffu, norm, 16); /* 128^-1/2 */
            const uint32_t v = v0 + (lane / 4 & 3) * MK_WARPS;
            const float delta = __fmul_rn(beta, __fmaf_rn(-rk, sum, x->v[v < dv ? v : 0]));
            const float own = __shfl_sync(0xffffffffu, delta, lane & 15), o = __fmaf_rn(__fmul_rn(__fmul_rn(qk, rq), rk), own, __fmul_rn(rq, sum));
            if ((lane & 19) == 16 && v < dv) x->o[v] = o;
            if (r + 1 == nrows && v0 + MK_DELTA_COLS * MK_WARPS >= dv + d->warp) {
                mk_sync();
                mk_trace_publish(d);
                if (d->warp < nrows) mk_delta_publish(lane, dv, rows + d->warp, to, epoch);
            }
            const mk_row *after = row + 1;
            const bool leads = r + 1 < nrows && after->slot == row->slot && after->state_write == row->state_write && after->state_read == row->state_write &&
                               after->pos == row->pos + 1;
            float4 *keep = (float4 *)(d->a->state + row->state_write * d->a->state_slot_bytes + matrix) + v0 * (MK_DELTA_DK / 4) + lane;
#pragma unroll
            for (int c = 0; c < MK_DELTA_COLS; c++) {
                const float step = __fmul_rn(rk, __shfl_sync(0xffffffffu, delta, 4 * c));
                s[c].x = __fmaf_rn(k.x, step, __fmul_rn(a.x, s[c].x));
                s[c].y = __fmaf_rn(k.y, step, __fmul_rn(a.y, s[c].y));
                s[c].z = __fmaf_rn(k.z, step, __fmul_rn(a.z, s[c].z));
                s[c].w = __fmaf_rn(k.w, step, __fmul_rn(a.w, s[c].w));
                if (!leads && v0 + c * MK_WARPS < dv) keep[c * MK_WARPS * (MK_DELTA_DK / 4)] = s[c];
            }
        }
    mk_sync();
}

#endif
