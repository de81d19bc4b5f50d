/* DELTA_STEP on the device. Semantics: delta_step.c; in memory the delta rule's state is [dv][dk] here.
 * First a thread has a channel: a warp 32 of q or k, then 32 of whatever else the item takes. What comes from memory is asked for before anything is waited for: packets,
 * the convolution's inputs and weights, and the four columns of the state that a warp has in registers from then on, its lanes four key channels each. The norms
 * of q and k are sums beside those of the columns, so that one barrier is enough before them.
 * f and z of a low rank are products on tensor cores, 16 rows of weights a warp, all rows of the step as columns; the weights come from the tape by plain loads: the
 * controller has had them brought to L2. */
#ifndef MK_DELTA_STEP_CUH
#define MK_DELTA_STEP_CUH

#include "instructions/delta_places.cuh"
#include "instructions/matvec.cuh"
#include "instructions/value.cuh"

#define MK_DELTA_DV   128u /* at most */
#define MK_DELTA_TAPS 4u
#define MK_DELTA_COLS 4    /* columns of the state that a warp has in registers */
#define MK_SECTOR_BYTES 32u /* what a load brings into L1 */
#define MK_NEAR_MOST  (24u << 10) /* bytes of weights at most that mk_delta_near is worth it for: L1 has 28 KB beside what the kernel takes for shared memory */

/* One row, in the staging area. */
typedef struct mk_delta_row {
    alignas(16) float qk[2 * MK_DELTA_DK]; /* after the convolution, not normalised */
    float v[MK_DELTA_DV];
    float a[MK_DELTA_DK]; /* decay factors; MK_DECAY_HEAD: a[0] */
    float z[MK_DELTA_DV]; /* o_norm * gate */
    float o[MK_DELTA_DV];
    float beta, pad[3];
    /* low rank: the inputs of f and those of z as 16-bit floats in eight blocks of 32, and what a block is to be multiplied by */
    uint16_t low[2 * MK_DELTA_RANK];
    alignas(16) float unscale[8];
} mk_delta_row;
static_assert(sizeof(mk_delta_row) * MK_MAX_ROWS <= MK_STAGING && sizeof(mk_delta_row) % 16 == 0, "eight rows fit");
static_assert(2 * MK_DELTA_DK == MK_COMPUTE && MK_DELTA_WARPS == MK_WARPS, "a thread has a channel of q or k");

/* The row reads what the row before it wrote: its state is at hand. */
MK_DEV bool mk_row_follows(const mk_step *step, uint32_t r)
{
    const mk_row *row = &step->row[r], *before = row - 1;
    return r > 0 && before->slot == row->slot && before->state_write == row->state_read && before->pos + 1 == row->pos;
}

/* By the controller, when it feeds the instruction: where its values are in a step of one row, and the item's state, parameters and weights are on their way to L2 before the instruction begins. */
MK_DEV void mk_delta_ahead(const mk_gpu_args *a, const mk_step *step, mk_fed *f, uint32_t lane)
{
    const mk_delta *e = &f->in.delta;
    const bool places = step->nrows == 1 && f->plan.map && lane < sizeof f->delta / 16;
    const uint4 found = places ? __ldg((const uint4 *)(a->map + f->plan.map) + lane) : make_uint4(0, 0, 0, 0);
    const uint32_t params = mk_delta_params(e) * 4, state = (uint32_t)mk_delta_state_bytes(e);
#pragma unroll 1
    for (uint32_t r = 0; r < step->nrows + 2; r++) { /* one loop for all: parameters, weights, then the rows' states */
        const uint8_t *from = (const uint8_t *)(a->param + e->param_off);
        uint32_t bytes = params;
        if (r == 1) from = a->tape + f->plan.tape, bytes = f->in.tape_bytes;
        if (r > 1) {
            const mk_row *row = &step->row[r - 2];
            if (mk_row_follows(step, r - 2) || (row->flags & MK_ROW_FIRST)) continue;
            from = a->state + row->state_read * a->state_slot_bytes + e->state_off, bytes = state;
        }
#pragma unroll 1
        for (uint32_t i = lane * 128; i < bytes; i += 32 * 128) mk_prefetch(from + i);
    }
    if (places) ((uint4 *)&f->delta)[lane] = found;
    __syncwarp(); /* one lane says that the instruction is fed */
}

/* By the controller, while the compute warps are at the instruction before: the low rank's weights and the parameters, which nobody writes, come into L1. From L2 they would come when the instruction
 * has begun, beside the weights that the loader asks for. Its last lines are gone if in between others ask for more than an SM's L1 has beside shared memory. */
MK_DEV void mk_delta_near(const mk_gpu_args *a, mk_fed *f, uint32_t lane)
{
    constexpr uint32_t TURN = 32 * MK_SECTOR_BYTES, AT_ONCE = 4;
    const mk_delta *e = &f->in.delta;
    const uint8_t *from = a->tape + f->plan.tape;
    uint32_t bytes = f->in.tape_bytes, all = 0;
#pragma unroll 1
    for (uint32_t r = 0; r < 2; r++) {
#pragma unroll 1
        for (uint32_t i = lane * MK_SECTOR_BYTES; i < bytes; i += AT_ONCE * TURN) {
            uint32_t x[AT_ONCE];
#pragma unroll
            for (uint32_t k = 0; k < AT_ONCE; k++) x[k] = __ldg((const uint32_t *)(from + min(i + k * TURN, bytes - 4)));
#pragma unroll
            for (uint32_t k = 0; k < AT_ONCE; k++) all |= x[k];
        }
        from = (const uint8_t *)(a->param + e->param_off);
        bytes = mk_delta_params(e) * 4;
    }
    if (lane == 0) f->note.pad[0] = all; /* loads of what nobody wants ptxas leaves out */
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

/* x * sigmoid(y). */
MK_DEV float mk_delta_gate(float x, float y)
{
    return __fmul_rn(x, mk_sigmoid(y));
}
/* e^(rate * softplus(x)). The hardware's functions are good to 1e-7 of 1; near a factor of 1, which is applied for thousands of tokens, what is taken away from it has
 * to be as good as that. */
MK_DEV float mk_delta_decay(float x, float rate)
{
    const float t = mk_exp_fast(x);
    float lg;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(lg) : "f"(__fadd_rn(1.0f, t)));
    const float small = __fmul_rn(t, __fmaf_rn(t, __fmaf_rn(t, __fmaf_rn(t, -0.25f, 0.333333333f), -0.5f), 1.0f)); /* log(1 + t) */
    const float soft = x > 20.0f ? x : t < 0.03125f ? small : __fmul_rn(lg, 0.693147181f), g = __fmul_rn(rate, soft);
    const float near1 = __fmaf_rn(g, __fmaf_rn(g, __fmaf_rn(g, __fmaf_rn(g, 0.0416666667f, 0.166666667f), 0.5f), 1.0f), 1.0f);
    return g > -0.0625f ? near1 : mk_exp_fast(g);
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
        uint4 q = look;
        const bool more = r + 1 < nrows, loads = more && !mk_row_follows(d->step, r + 1);
        float4 next = make_float4(0, 0, 0, 0);
        if (more) look = mk_spot_look(spot, r + 1);
        if (loads) next = mk_delta_past(d, e, r + 1, channel);
        mk_spot_wait(spot, r, &q);
        const float x = mk_spot_bf16(spot, q);
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

/* ---- f and z of a low rank ------------------------------------------------------------------------------------------- */

/* LOW: the weights' type, 0: no low rank. Block w of 32 inputs goes with half a K block of FP8, or a whole one of BF16: lane 4 g + t of a warp multiplies what quarter t
 * of the K block has of it, 8 values, with those of rows g and g + 8 of its tile. */
#define MK_DELTA_LOADS(LOW) ((LOW) == MK_W_FP8 ? 4 : 8) /* 16 bytes each: rows g and g + 8 of every K block */

/* Takes one input of a row: the warps' first half those of f. By all lanes. */
template <uint32_t LOW> MK_DEV void mk_delta_take_input(const mk_dev *d, float x, mk_delta_row *row)
{
    __syncwarp();
    if (LOW == MK_W_FP8) { /* a power of two brings the block into f16's range, exactly but for what is below 2^-29 of its largest value */
        const uint32_t bits = __float_as_uint(x) >> 16;
        const mk_f16_shift shift = mk_f16_shift_of(__reduce_max_sync(0xffffffffu, bits & 0x7fffu));
        row->low[d->tid] = (uint16_t)mk_f16_pair_shifted(bits, shift.less);
        if (d->lane == 0) row->unscale[d->warp] = shift.inverse;
    } else {
        row->low[d->tid] = (uint16_t)mk_bf16_bits(x);
    }
}
template <uint32_t LOW> MK_DEV void mk_delta_inputs(const mk_dev *d, const mk_spot *spot, uint4 look, mk_delta_row *rows, uint32_t nrows)
{
#pragma unroll 1
    for (uint32_t r = 0;;) {
        uint4 q = look;
        if (r + 1 < nrows) look = mk_spot_look(spot, r + 1);
        mk_spot_wait(spot, r, &q);
        mk_delta_take_input<LOW>(d, mk_spot_bf16(spot, q), rows + r);
        if (++r == nrows) break;
    }
}
/* A lane's weights of the tile of 16 rows that begins at row0 of a segment of `rows` rows. */
template <uint32_t LOW> MK_DEV void mk_delta_weights(const uint8_t *weights, uint32_t rows, uint32_t row0, uint32_t lane, uint4 *a)
{
    const uint32_t g = row0 + lane / 4, last = rows - 1, quarter = (lane & 3) * rows, low = quarter + min(g, last), high = quarter + min(g + 8, last); /* mk_quarter_at */
#pragma unroll
    for (int i = 0; i < MK_DELTA_LOADS(LOW); i++) a[i] = __ldg((const uint4 *)weights + (i & 1 ? high : low) + i / 2 * 4 * rows);
}
static_assert(MK_QUARTER_BYTES == sizeof(uint4), "a load a quarter");
/* As tensor cores take them: of block w the first 16 inputs' registers, then the others'. */
typedef struct mk_delta_open {
    uint32_t a[4][8];
} mk_delta_open;
template <uint32_t LOW> MK_DEV mk_delta_open mk_delta_opened(const uint4 *a)
{
    mk_delta_open o;
#pragma unroll
    for (uint32_t w = 0; w < 4; w++) {
        uint32_t *m = o.a[w], *n = m + 4;
        if (LOW == MK_W_FP8) {
            const uint4 p = a[w & 2], q = a[(w & 2) + 1];
            mk_fp8_open(w & 1 ? p.z : p.x, &m[0], &m[2]);
            mk_fp8_open(w & 1 ? q.z : q.x, &m[1], &m[3]);
            mk_fp8_open(w & 1 ? p.w : p.y, &n[0], &n[2]);
            mk_fp8_open(w & 1 ? q.w : q.y, &n[1], &n[3]);
        } else {
            const uint4 p = a[2 * w], q = a[2 * w + 1];
            m[0] = p.x, m[1] = q.x, m[2] = p.y, m[3] = q.y;
            n[0] = p.z, n[1] = q.z, n[2] = p.w, n[3] = q.w;
        }
    }
    return o;
}
/* The tile's products with the inputs of all rows (which 0: of f), m16n8's fragment. Columns that no row has are like row 0's. */
template <uint32_t LOW>
MK_DEV void mk_delta_product(const mk_delta_row *rows, uint32_t nrows, uint32_t which, uint32_t lane, const mk_delta_open *open, const float *scale, float *sum)
{
    const uint32_t g = lane / 4, t = lane & 3;
    const bool one = nrows == 1; /* or its places are worked out even where that is known */
    const mk_delta_row *x = rows + (!one && g < nrows ? g : 0), *even = rows + (!one && 2 * t < nrows ? 2 * t : 0), *odd = rows + (!one && 2 * t + 1 < nrows ? 2 * t + 1 : 0);
    float4 even_unscale, odd_unscale;
    if (LOW == MK_W_FP8) even_unscale = ((const float4 *)even->unscale)[which], odd_unscale = ((const float4 *)odd->unscale)[which];
#pragma unroll
    for (uint32_t w = 0; w < 4; w++) {
        const uint4 b = *(const uint4 *)(x->low + (which * 4 + w) * 32 + t * 8);
        const uint32_t *m = open->a[w], *n = m + 4;
        float c[4];
        if (LOW == MK_W_FP8) {
            mk_mma_f16_first(c, m, b.x, b.y);
            mk_mma_f16(c, n, b.z, b.w);
            const float u = (&even_unscale.x)[w] * scale[w >> 1], v = (&odd_unscale.x)[w] * scale[w >> 1];
            sum[0] = w ? __fmaf_rn(c[0], u, sum[0]) : __fmul_rn(c[0], u);
            sum[1] = w ? __fmaf_rn(c[1], v, sum[1]) : __fmul_rn(c[1], v);
            sum[2] = w ? __fmaf_rn(c[2], u, sum[2]) : __fmul_rn(c[2], u);
            sum[3] = w ? __fmaf_rn(c[3], v, sum[3]) : __fmul_rn(c[3], v);
        } else {
            if (w)
                mk_mma_bf16(sum, m, b.x, b.y);
            else
                mk_mma_bf16_first(sum, m, b.x, b.y);
            mk_mma_bf16(sum, n, b.z, b.w);
        }
    }
}
/* Where a segment's weights are, and its scales by K block (1 in BF16). */
template <uint32_t LOW> MK_DEV const uint8_t *mk_delta_segment(const uint8_t *segment, const mk_low_rank *l, float *scale)
{
    if (LOW != MK_W_FP8) return segment;
    scale[0] = __ldg((const float *)segment);
    scale[1] = __ldg((const float *)segment + (l->scale_k == 64));
    return segment + MK_LINE_BYTES; /* behind at most two scales */
}
/* Decays and gates of all rows; begun by the loads of the warp's first tile, of f. */
template <uint32_t LOW> MK_DEV void mk_delta_low(const mk_dev *d, const mk_delta *e, const uint8_t *tape, const float *param, mk_delta_row *rows, uint4 *a, float *scale)
{
    const uint32_t nrows = d->step->nrows, lane = d->lane, tiles = (e->dv + 15) / 16, i = lane & 15;
    const float rate = -mk_exp_fast(__ldg(param));
#pragma unroll 1
    for (uint32_t which = 0;; which++) {
        const uint32_t n = which ? e->dv : MK_DELTA_DK, channel = 16 * d->warp + i;
        const float p = channel < n ? __ldg(param + 1 + (which ? MK_DELTA_DK : 0) + channel) : 0;
        float sum[4];
        const mk_delta_open open = mk_delta_opened<LOW>(a);
        mk_delta_product<LOW>(rows, nrows, which, lane, &open, scale, sum);
        const bool more = !which && d->warp < tiles;
        if (more) mk_delta_weights<LOW>(mk_delta_segment<LOW>(tape + mk_delta_segment_bytes(e, 0), &e->low[1], scale), e->dv, 16 * d->warp, lane, a);
        float *to = (which ? rows->z : rows->a) + 16 * d->warp;
        const uint32_t c = lane / 4, r0 = 2 * (lane & 3), stride = sizeof(mk_delta_row) / 4;
        if (r0 < nrows) to[r0 * stride + c] = sum[0], to[r0 * stride + c + 8] = sum[2];
        if (r0 + 1 < nrows) to[(r0 + 1) * stride + c] = sum[1], to[(r0 + 1) * stride + c + 8] = sum[3];
        __syncwarp();
#pragma unroll 1
        for (uint32_t r = lane / 16; r < nrows; r += 2) {
            float *at = to + r * stride + i;
            const float x = *at;
            *at = which ? __fmul_rn(p, mk_delta_gate(e->gate == MK_GATE_SIGMOID ? 1.0f : x, x)) : mk_delta_decay(x + p, rate);
        }
        __syncwarp();
        if (!more) break;
    }
}

/* ---- the instruction ------------------------------------------------------------------------------------------------- */

/* All that the item takes, of all rows, into the staging area; and the state of row 0's first columns into s. By units of 32 values: 8 of q and k, one a warp, then
 * those of f, b, v and z; with a low rank 8 of its inputs, then b and v. */
template <uint32_t LOW> MK_DEV void mk_delta_take(const mk_dev *d, const mk_delta *e, uint64_t matrix, mk_delta_row *rows, float4 *s)
{
    const uint32_t nrows = d->step->nrows, lane = d->lane, head = e->decay == MK_DECAY_HEAD, nf = LOW ? 0 : head ? 1 : MK_DELTA_DK / 32, nv = (e->dv + 31) / 32;
    const uint32_t nz = LOW ? 0 : nv, units = MK_WARPS + nf + 1 + nv + nz, key = d->tid >= MK_DELTA_DK;
    mk_spot input = {}; /* ptxas keeps alive, across all opcodes, what is not set on every path */
    uint4 input_look = make_uint4(0, 0, 0, 0);
    if (LOW) {
        input = mk_spot_of(d, 1, (key ? e->z_off : e->f_off) + mk_delta_input(LOW == MK_W_FP8, d->warp & 3, lane), false);
        input_look = mk_spot_look(&input, 0);
    }
    const float *const weight = d->a->param + e->param_off, *const param = weight + mk_delta_rate_at(e);
    const mk_spot spot = mk_spot_of(d, 0, mk_delta_channel(e, d->tid), false);
    const uint4 look = mk_spot_look(&spot, 0);
    const float4 w = __ldg((const float4 *)weight + d->tid), past = mk_delta_past(d, e, 0, d->tid);
#pragma unroll 1
    for (uint32_t u = d->warp + MK_WARPS;; u += MK_WARPS) {
        const bool is_f = u < MK_WARPS + nf, is_b = u == MK_WARPS + nf, is_v = !is_f && !is_b && u < units - nz;
        const uint32_t i = (is_f ? u - MK_WARPS : is_b ? 0 : is_v ? u - (units - nz - nv) : u - (units - nz)) * 32 + lane;
        const bool has = u < units && i < (is_f ? head ? 1 : MK_DELTA_DK : is_b ? 1 : e->dv);
        mk_spot other = {};
        uint4 first = make_uint4(0, 0, 0, 0);
        float4 taps = make_float4(0, 0, 0, 0), before = taps;
        float p = 0, rate = 0;
        if (has) {
            other = mk_spot_of(d, is_v ? 0 : is_b ? 2 : 1, (is_f ? e->f_off : is_b ? e->b_off : is_v ? e->v_off : e->z_off) + i, false);
            first = mk_spot_look(&other, 0);
            if (is_v) {
                taps = __ldg((const float4 *)weight + 2 * MK_DELTA_DK + i);
                before = mk_delta_past(d, e, 0, 2 * MK_DELTA_DK + i);
            } else if (!is_b) {
                p = __ldg(param + 1 + i + (is_f ? 0 : head ? 1 : MK_DELTA_DK));
            }
            if (is_f) rate = -mk_exp_fast(__ldg(param));
        }
        if (u < 2 * MK_WARPS) {
#pragma unroll
            for (int c = 0; c < MK_DELTA_COLS; c++) s[c] = mk_delta_load(d, e, matrix, 0, d->warp + c * MK_WARPS);
            if (LOW) mk_delta_inputs<LOW>(d, &input, input_look, rows, nrows);
            mk_delta_convolve(d, e, &spot, look, w, past, d->tid, rows->qk + d->tid);
            __syncwarp();
        }
        if (has && is_v) mk_delta_convolve(d, e, &other, first, taps, before, 2 * MK_DELTA_DK + i, rows->v + i);
        if (has && !is_v) {
            float *to = is_f ? rows->a + i : is_b ? &rows->beta : rows->z + i;
#pragma unroll 1
            for (uint32_t r = 0;; to += sizeof(mk_delta_row) / 4) {
                uint4 q = first;
                if (r + 1 < nrows) first = mk_spot_look(&other, r + 1);
                mk_spot_wait(&other, r, &q);
                const float x = mk_spot_bf16(&other, q);
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
    static_assert((MK_DELTA_DV / 2 + 1 + 2) / 3 <= 32, "a packet a lane");
    const uint32_t words = dv / 2;
    uint32_t word[3];
#pragma unroll
    for (uint32_t k = 0; k < 3; k++) { /* beyond the last value: something of this row */
        const float2 o = ((const float2 *)x->o)[3 * lane + k], z = ((const float2 *)x->z)[3 * lane + k];
        word[k] = mk_bf16_bits(__fmul_rn(o.x, z.x)) | mk_bf16_bits(__fmul_rn(o.y, z.y)) << 16;
    }
    float sum = 0;
#pragma unroll 1
    for (uint32_t i = lane; i < dv; i += 32) sum = __fmaf_rn(x->o[i], x->o[i], sum);
    sum = mk_warp_sum(sum);
#pragma unroll
    for (uint32_t k = 0; k < 3; k++) word[k] = 3 * lane + k < words ? word[k] : 3 * lane + k == words ? __float_as_uint(sum) : 0;
    if (3 * lane <= words) mk_packet_store(p + lane, word[0], word[1], word[2], epoch);
}

/* 1 / |k|, 128^-1/2 / |q|, q'k. By all lanes. */
typedef struct mk_delta_norms {
    float rk, rq, qk;
} mk_delta_norms;
MK_DEV mk_delta_norms mk_delta_norms_of(float4 q, float4 k, uint32_t lane)
{
    const float norm = mk_warp_four(make_float4(mk_dot4(q, q), mk_dot4(k, k), mk_dot4(q, k), 0), lane), over = mk_rsqrt(norm + 1e-6f);
    const mk_delta_norms n = {__shfl_sync(0xffffffffu, over, 8), __fmul_rn(__shfl_sync(0xffffffffu, over, 0), 0x1.6a09e6p-4f), __shfl_sync(0xffffffffu, norm, 16)};
    return n;
}

/* A row and the columns that a warp has in registers: what the state is multiplied by and takes up. Lanes 4 c to 4 c + 3 have column c's delta, those 16 further its o. */
typedef struct mk_delta_turn {
    float4 k, a;
    float rk, delta, o;
} mk_delta_turn;
/* v: the value channel of the lane's column, or another that there is. */
MK_DEV mk_delta_turn mk_delta_columns(const mk_delta_row *x, bool head, uint32_t v, uint32_t lane, const float4 *s)
{
    const float a0 = x->a[0];
    const float4 q = ((const float4 *)x->qk)[lane], k = ((const float4 *)x->qk)[MK_DELTA_DK / 4 + lane];
    const float4 a = head ? make_float4(a0, a0, a0, a0) : ((const float4 *)x->a)[lane], ka = mk_mul4(k, a), qa = mk_mul4(q, a);
    float dot[2 * MK_DELTA_COLS];
#pragma unroll
    for (int c = 0; c < MK_DELTA_COLS; c++) {
        dot[c] = mk_dot4(ka, s[c]);
        dot[MK_DELTA_COLS + c] = mk_dot4(qa, s[c]);
    }
    /* lanes 4 c to 4 c + 3 have k'S of column c, 16 lanes on q'S; then that column's delta, and its o */
    const float sum = mk_warp_eight(dot, lane);
    const mk_delta_norms n = mk_delta_norms_of(q, k, lane);
    const float delta = __fmul_rn(x->beta, __fmaf_rn(-n.rk, sum, x->v[v]));
    const float own = __shfl_sync(0xffffffffu, delta, lane & 15), o = __fmaf_rn(__fmul_rn(__fmul_rn(n.qk, n.rq), n.rk), own, __fmul_rn(n.rq, sum));
    const mk_delta_turn t = {k, a, n.rk, delta, o};
    return t;
}
MK_DEV void mk_delta_update(const mk_delta_turn *t, float4 *s)
{
#pragma unroll
    for (int c = 0; c < MK_DELTA_COLS; c++) {
        const float step = __fmul_rn(t->rk, __shfl_sync(0xffffffffu, t->delta, 4 * c));
        s[c].x = __fmaf_rn(t->k.x, step, __fmul_rn(t->a.x, s[c].x));
        s[c].y = __fmaf_rn(t->k.y, step, __fmul_rn(t->a.y, s[c].y));
        s[c].z = __fmaf_rn(t->k.z, step, __fmul_rn(t->a.z, s[c].z));
        s[c].w = __fmaf_rn(t->k.w, step, __fmul_rn(t->a.w, s[c].w));
    }
}

template <uint32_t LOW> MK_CALL void mk_delta_step_of(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_delta *e = &in->delta;
    const mk_places *place = &mk_fed_of(in)->place;
    const mk_vec *out = &d->sh->vec[in->signal_vec];
    const uint32_t dv = e->dv, nrows = d->step->nrows, lane = d->lane, head = e->decay == MK_DECAY_HEAD;
    const uint64_t matrix = e->state_off + mk_delta_matrix_at(e);
    mk_delta_row *rows = (mk_delta_row *)d->sh->staging;
    float4 s[MK_DELTA_COLS] = {};
    uint4 *const to = place->out + d->warp * out->nslice * out->slice_packets; /* of row `warp` */
    const uint32_t epoch = place->out_epoch;
    mk_staged_drop(d);
    if (LOW) {
        const uint8_t *tape = d->a->tape + mk_fed_of(in)->plan.tape;
        uint4 a[MK_DELTA_LOADS(LOW)] = {};
        float scale[2] = {1, 1};
        mk_delta_take<LOW>(d, e, matrix, rows, s);
        mk_delta_weights<LOW>(mk_delta_segment<LOW>(tape, &e->low[0], scale), MK_DELTA_DK, 16 * d->warp, lane, a);
        mk_sync();
        mk_delta_low<LOW>(d, e, tape, d->a->param + e->param_off + mk_delta_rate_at(e), rows, a, scale);
    } else {
        mk_delta_take<LOW>(d, e, matrix, rows, s);
    }
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
            const uint32_t v = v0 + (lane / 4 & 3) * MK_WARPS;
            const mk_delta_turn t = mk_delta_columns(x, head, v < dv ? v : 0, lane, s);
            if ((lane & 19) == 16 && v < dv) x->o[v] = t.o;
            if (r + 1 == nrows && v0 + MK_DELTA_COLS * MK_WARPS >= dv + d->warp) {
                mk_sync();
                mk_trace_publish(d);
                if (d->warp < nrows) mk_delta_publish(lane, dv, rows + d->warp, to, epoch);
            }
            const mk_row *after = row + 1;
            const bool leads = r + 1 < nrows && after->slot == row->slot && after->state_write == row->state_write && after->state_read == row->state_write &&
                               after->pos == row->pos + 1;
            float4 *keep = (float4 *)(d->a->state + row->state_write * d->a->state_slot_bytes + matrix) + v0 * (MK_DELTA_DK / 4) + lane;
            mk_delta_update(&t, s);
#pragma unroll
            for (int c = 0; c < MK_DELTA_COLS; c++)
                if (!leads && v0 + c * MK_WARPS < dv) keep[c * MK_WARPS * (MK_DELTA_DK / 4)] = s[c];
        }
    mk_sync();
}

/* ---- one row --------------------------------------------------------------------------------------------------------- */

/* The same sums in the same order, in half the instructions, and all that comes from memory is asked for before anything is waited for, the weights of f and z and what
 * their results meet included. The inputs of a low rank are there long before q, k and v: f and z are made meanwhile. */

#define MK_DELTA_SEGMENT(LOW) ((LOW) == MK_W_FP8 ? MK_LINE_BYTES + MK_DELTA_DK * MK_DELTA_RANK : 2 * MK_DELTA_DK * MK_DELTA_RANK) /* bytes, f's: mk_delta_segment_bytes */

/* What a warp's tile of f or z takes from memory. */
template <uint32_t LOW> struct mk_delta_tile {
    uint4 a[MK_DELTA_LOADS(LOW)];
    float scale[2], p; /* p: of channel lane % 16 of the tile: dt_bias, o_norm */
};
template <uint32_t LOW> MK_DEV void mk_delta_ask(const mk_delta *e, uint32_t which, const uint8_t *tape, const float *param, uint32_t warp, uint32_t lane, mk_delta_tile<LOW> *t)
{
    const uint32_t n = which ? e->dv : MK_DELTA_DK, channel = 16 * warp + (lane & 15);
    mk_delta_weights<LOW>(mk_delta_segment<LOW>(tape + which * MK_DELTA_SEGMENT(LOW), &e->low[which], t->scale), n, 16 * warp, lane, t->a);
    t->p = !which || channel < n ? __ldg(param + 1 + which * MK_DELTA_DK + channel) : 0;
}

/* Of the tile's row lane % 16. */
MK_DEV float mk_delta_result(uint32_t lane, const float *sum)
{
    const float low = __shfl_sync(0xffffffffu, sum[0], 4 * (lane & 7)), high = __shfl_sync(0xffffffffu, sum[2], 4 * (lane & 7));
    return lane & 8 ? high : low;
}

MK_DEV void mk_delta_convolve_one(float x, float4 w, float4 past, float4 *keep, float *to)
{
    past = make_float4(past.y, past.z, past.w, x);
    *to = mk_silu(mk_dot4(w, past));
    *keep = past;
}

/* What a unit takes from memory beside its packet. In front of the loop over units: what the compiler makes there of q's and k's state would be waited for before they are asked for. */
typedef struct mk_delta_of_unit {
    float4 taps, before;
    float p; /* dt_bias, o_norm */
} mk_delta_of_unit;
template <uint32_t LOW>
MK_DEV mk_delta_of_unit mk_delta_ask_unit(const mk_delta_unit *t, bool head, bool begins, const float *weight, const float *param, const uint8_t *from)
{
    mk_delta_of_unit of = {};
    const bool v = t->has && t->is_v;
    mk_ask_four(&of.taps, (const float4 *)weight + 2 * MK_DELTA_DK + t->i, v);
    mk_ask_four(&of.before, (const float4 *)from + 2 * MK_DELTA_DK + t->i, v && !begins);
    if (!LOW) of.p = __ldg(param + 1 + (!t->has || t->is_v || t->is_b ? 0 : t->i + (t->is_f ? 0 : head ? 1 : MK_DELTA_DK)));
    return of;
}

template <uint32_t LOW> MK_CALL void mk_delta_one(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_delta *e = &in->delta;
    const mk_places *place = &mk_fed_of(in)->place;
    const mk_row *row = &d->step->row[0];
    const uint32_t dv = e->dv, lane = d->lane, warp = d->warp, channels = 2 * MK_DELTA_DK + dv, matrix = (channels * MK_DELTA_TAPS * 4 + 127) & ~127u;
    const bool head = !LOW && e->decay == MK_DECAY_HEAD, begins = row->flags & MK_ROW_FIRST, has_z = LOW && 16 * warp < dv;
    const float *const weight = d->a->param + e->param_off, *const param = weight + channels * MK_DELTA_TAPS;
    const uint8_t *const from = d->a->state + row->state_read * d->a->state_slot_bytes + e->state_off;
    uint8_t *const to = d->a->state + row->state_write * d->a->state_slot_bytes + e->state_off;
    mk_delta_row *const x = (mk_delta_row *)d->sh->staging;
    mk_staged_drop(d);

    /* packets first, then what is needed first: what is asked for comes from L2 one after the other */
    const mk_delta_places *const where = &mk_fed_of(in)->delta;
    const uint32_t units = mk_delta_units(e, LOW != 0, head), mine = mk_delta_channel(e, d->tid);
    const auto found = [&](uint32_t what, uint32_t wait, uint32_t i) { return mk_delta_found(where->word[what][warp], i, d->sh->vec[in->wait[wait].vec].slice_packets); };
    mk_delta_unit unit = mk_delta_unit_of(e, LOW != 0, head, warp, units, lane, mine);
    const uint32_t own = found(MK_DELTA_OWN, 0, lane), input = LOW ? found(MK_DELTA_LOW, 1, mk_delta_input(LOW == MK_W_FP8, 0, lane)) : 0;
    uint32_t other = found(MK_DELTA_UNIT, unit.k, lane);
    const uint4 *const at = place->in[0] + own / 8, *other_at = place->in[unit.k] + other / 8, *const input_at = place->in[LOW ? 1 : 0] + input / 8;
    uint4 low = make_uint4(0, 0, 0, 0), look, first = low;
    if (LOW) low = mk_packet_load(input_at);
    look = mk_packet_load(at);
    mk_packet_again(&first, other_at, unit.has);
    mk_delta_tile<LOW> tile, z = {}; /* ptxas keeps alive, across all opcodes, what is not set on every path */
    float rate = 0;
    if (LOW) {
        const uint8_t *tape = d->a->tape + mk_fed_of(in)->plan.tape;
        rate = __ldg(param);
        mk_delta_ask<LOW>(e, 0, tape, param, warp, lane, &tile);
        if (has_z) mk_delta_ask<LOW>(e, 1, tape, param, warp, lane, &z);
    }
    float4 s[MK_DELTA_COLS], past = make_float4(0, 0, 0, 0);
    mk_ask_four(&past, (const float4 *)from + d->tid, !begins);
    const float4 w = __ldg((const float4 *)weight + d->tid), *columns = (const float4 *)(from + matrix) + d->tid;
    asm("" : "+l"(columns)); /* or it is worked out for each */
    mk_delta_of_unit of = mk_delta_ask_unit<LOW>(&unit, head, begins, weight, param, from);
#pragma unroll
    for (uint32_t c = 0; c < MK_DELTA_COLS; c++) {
        s[c] = make_float4(0, 0, 0, 0);
        mk_ask_four(&s[c], columns + c * MK_WARPS * (MK_DELTA_DK / 4), !begins && warp + c * MK_WARPS < dv);
    }
    if (!LOW) rate = __ldg(param);

#pragma unroll 1
    for (uint32_t u = warp;;) {
        if constexpr (LOW != 0) {
            low = mk_packet_get(input_at, low, place->epoch[1], 1, 0, input / 8);
            mk_delta_take_input<LOW>(d, mk_found_bf16(input, low), x);
            mk_packet_again(&look, at, look.w != place->epoch[0]); /* mostly it is there only now */
            mk_packet_again(&first, other_at, unit.has && first.w != place->epoch[unit.k]);
            mk_sync();
            uint32_t which = 0;
#pragma unroll 1
            do {
                mk_keep(&which); /* or the two turns become two copies */
                const mk_delta_open open = mk_delta_opened<LOW>(tile.a);
                float sum[4];
                mk_delta_product<LOW>(x, 1, which, lane, &open, tile.scale, sum);
                float y = mk_delta_result(lane, sum);
                if (which)
                    y = __fmul_rn(tile.p, mk_delta_gate(e->gate == MK_GATE_SIGMOID ? 1.0f : y, y));
                else
                    y = mk_delta_decay(y + tile.p, -mk_exp_fast(rate));
                if (lane < 16) (which ? x->z : x->a)[16 * warp + lane] = y;
                tile = z;
            } while (which++ < has_z);
        }

        /* the thread's packets together: those that come late come from the same workers */
        const uint32_t epoch = place->epoch[0], other_epoch = place->epoch[unit.k];
        uint32_t looks = 0;
        for (;;) {
            const bool late = look.w != epoch, other_late = unit.has && first.w != other_epoch;
            if (!late && !other_late) break;
            mk_packet_again(&look, at, late);
            mk_packet_again(&first, other_at, other_late);
            if (!mk_still_waiting(++looks, late ? 0 : unit.k, 0, (late ? own : other) / 8, late ? look.w : first.w)) break;
        }
        mk_waited(looks);
        if (LOW || u < MK_WARPS) mk_delta_convolve_one(mk_found_bf16(own, look), w, past, (float4 *)to + d->tid, x->qk + d->tid);
        if (unit.has) {
            const float y = mk_found_bf16(other, first);
            if (unit.is_v)
                mk_delta_convolve_one(y, of.taps, of.before, (float4 *)to + 2 * MK_DELTA_DK + unit.i, x->v + unit.i);
            else if (LOW || unit.is_b)
                x->beta = mk_delta_gate(1.0f, y);
            else if (unit.is_f)
                x->a[unit.i] = mk_delta_decay(y + of.p, -mk_exp_fast(rate));
            else
                x->z[unit.i] = of.p * mk_delta_gate(e->gate == MK_GATE_SIGMOID ? 1.0f : y, y);
        }
        u += MK_WARPS;
        if (LOW || u >= units) break;
        __syncwarp();
        unit = mk_delta_unit_of(e, LOW != 0, head, u, units, lane, mine);
        other = mk_spot_find(d, unit.k, unit.index);
        other_at = place->in[unit.k] + other / 8;
        first = make_uint4(0, 0, 0, 0);
        mk_packet_again(&first, other_at, unit.has);
        of = mk_delta_ask_unit<LOW>(&unit, head, begins, weight, param, from);
    }
    mk_sync();
    mk_trace_input(d);
    mk_trace_bytes(d, MK_DELTA_DK * dv * 4);

#pragma unroll 1
    for (uint32_t v0 = warp;; v0 += MK_DELTA_COLS * MK_WARPS) {
        const uint32_t v = v0 + (lane / 4 & 3) * MK_WARPS;
        const bool last = v0 + MK_DELTA_COLS * MK_WARPS >= dv + warp;
        const mk_delta_turn t = mk_delta_columns(x, head, v < dv ? v : 0, lane, s);
        if ((lane & 19) == 16 && v < dv) x->o[v] = t.o;
        if (last) {
            mk_sync();
            mk_trace_publish(d);
            if (warp == 0) mk_delta_publish(lane, dv, x, place->out, place->out_epoch);
        }
        mk_delta_update(&t, s);
        float4 *const keep = (float4 *)(to + matrix) + v0 * (MK_DELTA_DK / 4) + lane;
#pragma unroll
        for (uint32_t c = 0; c < MK_DELTA_COLS; c++)
            if (v0 + c * MK_WARPS < dv) keep[c * MK_WARPS * (MK_DELTA_DK / 4)] = s[c];
        if (last) break;
#pragma unroll
        for (uint32_t c = 0; c < MK_DELTA_COLS; c++) s[c] = mk_delta_load(d, e, e->state_off + matrix, 0, v0 + (MK_DELTA_COLS + c) * MK_WARPS);
    }
    mk_sync();
}

MK_DEV void mk_delta_step_run(const mk_insn *in)
{
    const uint32_t low = in->delta.rank ? in->delta.low[0].wtype : 0;
    low == MK_W_FP8 ? mk_delta_step_of<MK_W_FP8>(in) : low ? mk_delta_step_of<MK_W_BF16>(in) : mk_delta_step_of<0>(in);
}

#endif
