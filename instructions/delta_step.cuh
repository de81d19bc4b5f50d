/* DELTA_STEP on the device. Semantics: delta_step.c; in memory the delta rule's state is [dv][dk] here.
 * First a thread has a channel: a warp 32 of q or k, then 32 of whatever else the item takes. What comes from memory is asked for before anything is waited for: packets,
 * the convolution's inputs and weights, and the four columns of the state that a warp has in registers from then on, its lanes four key channels each. The norms
 * of q and k of one row are sums beside those of the columns, so that one barrier is enough before them.
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
    alignas(16) float beta;
    float rk, rq, both; /* several rows: 1 / |k|, 128^-1/2 / |q|, q'k times these */
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

/* By the controller, when it feeds the instruction: where its values are, and the item's state, parameters and weights are on their way to L2 before the instruction begins. */
MK_DEV void mk_delta_ahead(const mk_gpu_args *a, const mk_step *step, mk_fed *f, uint32_t lane)
{
    const mk_delta *e = &f->in.delta;
    const bool places = f->plan.map && lane < sizeof f->delta / 16;
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
/* What o is multiplied by, out of a value of z and its o_norm. */
MK_DEV float mk_delta_z(const mk_delta *e, float norm, float z)
{
    return __fmul_rn(norm, mk_delta_gate(e->gate == MK_GATE_SIGMOID ? 1.0f : z, z));
}
/* e^(rate * softplus(x)). The hardware's functions are good to 1e-7 of 1; near a factor of 1, which is applied for thousands of tokens, what is taken away from it has
 * to be as good as that. t: e^x; lg: log2(1 + t). */
MK_DEV float mk_delta_log(float t)
{
    float lg;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(lg) : "f"(__fadd_rn(1.0f, t)));
    return lg;
}
MK_DEV float mk_delta_decay_of(float x, float t, float lg, float rate)
{
    const float small = __fmul_rn(t, __fmaf_rn(t, __fmaf_rn(t, __fmaf_rn(t, -0.25f, 0.333333333f), -0.5f), 1.0f)); /* log(1 + t) */
    const float soft = x > 20.0f ? x : t < 0.03125f ? small : __fmul_rn(lg, 0.693147181f), g = __fmul_rn(rate, soft);
    const float near1 = __fmaf_rn(g, __fmaf_rn(g, __fmaf_rn(g, __fmaf_rn(g, 0.0416666667f, 0.166666667f), 0.5f), 1.0f), 1.0f);
    return g > -0.0625f ? near1 : mk_exp_fast(g);
}
MK_DEV float mk_delta_decay(float x, float rate)
{
    const float t = mk_exp_fast(x);
    return mk_delta_decay_of(x, t, mk_delta_log(t), rate);
}

/* The last inputs of a channel before row r, where the row does not follow the one before it. */
MK_DEV float4 mk_delta_past(const mk_dev *d, const mk_delta *e, uint32_t r, uint32_t channel)
{
    const mk_row *row = &d->step->row[r];
    if (row->flags & MK_ROW_FIRST) return make_float4(0, 0, 0, 0);
    return __ldcg((const float4 *)(d->a->state + row->state_read * d->a->state_slot_bytes + e->state_off) + channel);
}
/* Rows of a step, a bit each. */
typedef struct mk_delta_chains {
    uint32_t nrows;
    uint32_t follows; /* the state before it is at hand: mk_row_follows */
    uint32_t leads;   /* its state is overwritten by the next one's */
} mk_delta_chains;
MK_DEV mk_delta_chains mk_delta_chains_of(const mk_step *step, uint32_t nrows, uint32_t lane)
{
    const uint32_t r = min(lane, MK_MAX_ROWS - 1u);
    const mk_row *row = &step->row[r], *before = row - (r > 0);
    const bool follows = lane - 1 < nrows - 1 & before->slot == row->slot & before->state_write == row->state_read & before->pos + 1 == row->pos;
    const mk_delta_chains c = {nrows, __ballot_sync(0xffffffffu, follows), __ballot_sync(0xffffffffu, follows & before->state_write == row->state_write) >> 1};
    return c;
}
/* One stream's, and only the last leaves a state. */
MK_DEV bool mk_delta_chains_one(const mk_delta_chains *c)
{
    return c->leads == (1u << (c->nrows - 1)) - 1;
}
/* The first row of the chain that row r is in. */
MK_DEV uint32_t mk_delta_chain_begin(const mk_delta_chains *c, uint32_t r)
{
    return 31 - __clz((int)(~c->follows & ((2u << r) - 1)));
}

/* Convolves the thread's channel of q or k of all rows, whose inputs are x; past: before row 0. Rows of one stream, of which the last leaves the state, are worked out beside each other. */
MK_DEV void mk_delta_convolve(const mk_dev *d, const mk_delta *e, const mk_delta_chains *c, const float (&x)[MK_MAX_ROWS], float4 w, float4 past, mk_delta_row *rows)
{
    constexpr uint32_t HALF = MK_MAX_ROWS / 2;
    const uint32_t nrows = c->nrows;
    const mk_row *const row = d->step->row;
    uint8_t *const state = d->a->state + e->state_off;
    if (__builtin_expect(mk_delta_chains_one(c), 1)) {
#pragma unroll
        for (uint32_t h = 0; h < MK_MAX_ROWS; h += HALF) {
            if (h >= nrows) break;
#pragma unroll
            for (uint32_t r = h; r < h + HALF; r++) {
                const bool has = r < nrows;
                past = make_float4(has ? past.y : past.x, has ? past.z : past.y, has ? past.w : past.z, has ? x[r] : past.w);
                const float y = mk_silu(mk_dot4(w, past));
                if (has) rows[r].qk[d->tid] = y;
            }
        }
        ((float4 *)(state + row[nrows - 1].state_write * d->a->state_slot_bytes))[d->tid] = past;
        return;
    }
#pragma unroll
    for (uint32_t r = 0; r < MK_MAX_ROWS; r++)
        if (r < nrows) rows[r].qk[d->tid] = x[r];
#pragma unroll 1
    for (uint32_t r = 0;;) {
        const bool loads = r + 1 < nrows && !(c->follows >> (r + 1) & 1);
        float4 next = make_float4(0, 0, 0, 0);
        if (loads) next = mk_delta_past(d, e, r + 1, d->tid);
        past = make_float4(past.y, past.z, past.w, rows[r].qk[d->tid]);
        rows[r].qk[d->tid] = mk_silu(mk_dot4(w, past));
        if (!(c->leads >> r & 1)) ((float4 *)(state + row[r].state_write * d->a->state_slot_bytes))[d->tid] = past;
        if (++r == nrows) break;
        if (loads) past = next;
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
/* Of all rows: what is behind the last one is not taken. */
template <uint32_t LOW> MK_DEV void mk_delta_take_inputs(const mk_dev *d, const float (&x)[MK_MAX_ROWS], mk_delta_row *rows, uint32_t nrows)
{
    uint32_t top[MK_MAX_ROWS];
#pragma unroll
    for (uint32_t r = 0; r < MK_MAX_ROWS; r++) top[r] = LOW == MK_W_FP8 ? __reduce_max_sync(0xffffffffu, __float_as_uint(x[r]) >> 16 & 0x7fffu) : 0;
#pragma unroll
    for (uint32_t r = 0; r < MK_MAX_ROWS; r++) {
        if (r == MK_MAX_ROWS / 2 && r >= nrows) break;
        const mk_f16_shift shift = mk_f16_shift_of(top[r]);
        const uint32_t bits = __float_as_uint(x[r]) >> 16;
        if (r < nrows) rows[r].low[d->tid] = (uint16_t)(LOW == MK_W_FP8 ? mk_f16_pair_shifted(bits, shift.less) : bits);
        if (LOW == MK_W_FP8 && r < nrows && d->lane == 0) rows[r].unscale[d->warp] = shift.inverse;
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
/* ---- the instruction ------------------------------------------------------------------------------------------------- */

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

template <uint32_t LOW> MK_CALL void mk_delta_one(uint32_t insn)
{
    const mk_insn *in = mk_insn_at(insn);
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
                    y = mk_delta_z(e, tile.p, y);
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
                x->z[unit.i] = mk_delta_z(e, of.p, y);
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

/* ---- several rows ---------------------------------------------------------------------------------------------------- */

/* A thread has its channel of q or k of all rows, whose packets it asks for together; of b, v and, without a low rank, f and z, which are few, warp r has row r's. v is convolved behind the barrier, by a
 * warp's lanes for its four columns of all rows. Norms are made once a row, by a warp: only what the state takes part in is done row by row. */

/* By all lanes: waits for the packets of `wanted`: a lane's of all rows, from `from` on, `step` apart; then others, at other(i). epoch(i), say(i, k, row, packet): of any, which row and packet of which wait it is. */
template <uint32_t N, typename OTHER, typename EPOCH, typename SAY>
MK_DEV void mk_delta_wait(uint4 (&q)[N], uint32_t wanted, const uint4 *from, uint32_t step, const OTHER &other, const EPOCH &epoch, const SAY &say)
{
    uint32_t looks = 0;
    for (;;) {
        uint32_t late = 0;
#pragma unroll
        for (uint32_t i = 0; i < N; i++) late |= q[i].w != epoch(i) ? wanted & 1u << i : 0;
        if (!__any_sync(0xffffffffu, late)) break;
        from = mk_keep_at(from); /* or every row's address is kept */
#pragma unroll
        for (uint32_t i = 0; i < N; i++) mk_packet_again(&q[i], i < MK_MAX_ROWS ? from + i * step : other(i), late & 1u << i);
        if (++looks & 255u) continue;
        uint32_t k = 0, row = 0, packet = 0, found = 0;
#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            if (late & 1u << i) say(i, &k, &row, &packet), found = q[i].w;
        if (__any_sync(0xffffffffu, late && !mk_still_waiting(looks, k, row, packet, found))) break;
    }
    mk_waited(looks);
}

/* Decays and gates of all rows out of the low rank's inputs. */
template <uint32_t LOW>
MK_DEV void mk_delta_gates(const mk_delta *e, mk_delta_row *rows, uint32_t nrows, uint32_t warp, uint32_t lane, mk_delta_tile<LOW> *tile, const mk_delta_tile<LOW> &z, bool has_z, float rate)
{
    const uint32_t c = lane / 4, r0 = 2 * (lane & 3);
    uint32_t which = 0;
#pragma unroll 1
    do {
        mk_keep(&which); /* or the two turns become two copies */
        const mk_delta_open open = mk_delta_opened<LOW>(tile->a);
        float sum[4];
        mk_delta_product<LOW>(rows, nrows, which, lane, &open, tile->scale, sum);
        const float p[2] = {__shfl_sync(0xffffffffu, tile->p, c), __shfl_sync(0xffffffffu, tile->p, c + 8)};
        if (which) {
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) sum[i] = mk_delta_z(e, p[i / 2], sum[i]);
        } else {
            float t[4], lg[4];
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                sum[i] += p[i / 2];
                t[i] = mk_exp_fast(sum[i]);
                lg[i] = mk_delta_log(t[i]);
                asm volatile("" : "+f"(t[i]), "+f"(lg[i])); /* else they are worked out where they are needed: four branches, one after the other */
            }
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) sum[i] = mk_delta_decay_of(sum[i], t[i], lg[i], rate);
        }
        float *const to = (which ? rows[r0].z : rows[r0].a) + 16 * warp + c;
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            if (r0 + (i & 1) < nrows) to[(i & 1) * (sizeof(mk_delta_row) / 4) + i / 2 * 8] = sum[i];
        *tile = z;
    } while (which++ < has_z);
}

/* The state that a row begins with. Of its stream's first token, which begins with zeros, what it is going to write: it is loaded all the same, because loads under a predicate wait for each other. */
MK_DEV const uint8_t *mk_delta_from(const mk_dev *d, const mk_delta *e, const mk_row *row)
{
    return d->a->state + (row->flags & MK_ROW_FIRST ? row->state_write : row->state_read) * d->a->state_slot_bytes + e->state_off;
}
/* Asks for a warp's columns, from v0 on, of a row's state: of what is behind the last one, that one. */
MK_DEV void mk_delta_ask_columns(const mk_dev *d, const mk_delta *e, const mk_row *row, uint32_t v0, float4 *s)
{
    const float4 *from = (const float4 *)(mk_delta_from(d, e, row) + mk_delta_matrix_at(e)) + d->lane;
#pragma unroll
    for (uint32_t c = 0; c < MK_DELTA_COLS; c++) s[c] = __ldcg(from + min(v0 + c * MK_WARPS, e->dv - 1u) * (MK_DELTA_DK / 4));
}
MK_DEV void mk_delta_begin(const mk_row *row, float4 *s, uint32_t n)
{
    if (row->flags & MK_ROW_FIRST)
#pragma unroll
        for (uint32_t i = 0; i < n; i++) s[i] = make_float4(0, 0, 0, 0);
}

/* What a lane convolves of v: row lane / 4, the warp's column lane % 4. */
typedef struct mk_delta_value {
    float4 taps, before; /* before: the row's chain */
} mk_delta_value;
MK_DEV void mk_delta_ask_value(const mk_dev *d, const mk_delta *e, const mk_delta_chains *c, uint32_t v0, mk_delta_value *t)
{
    const uint32_t i = 2 * MK_DELTA_DK + min(v0 + (d->lane & 3) * MK_WARPS, e->dv - 1u);
    t->taps = __ldg((const float4 *)(d->a->param + e->param_off) + i);
    t->before = __ldcg((const float4 *)mk_delta_from(d, e, &d->step->row[mk_delta_chain_begin(c, min(d->lane / 4, c->nrows - 1))]) + i);
}
MK_DEV float mk_delta_convolve_value(const mk_dev *d, const mk_delta *e, const mk_delta_chains *c, uint32_t v0, const mk_delta_value *t, const mk_delta_row *rows)
{
    const uint32_t r = d->lane / 4, v = v0 + (d->lane & 3) * MK_WARPS, back = r - mk_delta_chain_begin(c, r);
    const float *x = rows[r].v + min(v, MK_DELTA_DV - 1u);
    float4 b = t->before;
    mk_delta_begin(&d->step->row[min(r - back, c->nrows - 1)], &b, 1);
    float4 past;
    past.w = *x;
    past.z = back > 0 ? *(x - sizeof(mk_delta_row) / 4) : b.w;
    past.y = back > 1 ? *(x - sizeof(mk_delta_row) / 4 * 2) : back > 0 ? b.w : b.z;
    past.x = back > 2 ? *(x - sizeof(mk_delta_row) / 4 * 3) : back > 1 ? b.w : back > 0 ? b.z : b.y;
    float4 *const keep = (float4 *)(d->a->state + d->step->row[min(r, c->nrows - 1)].state_write * d->a->state_slot_bytes + e->state_off) + 2 * MK_DELTA_DK + v;
#pragma unroll 1
    for (uint32_t i = mk_delta_chains_one(c) ? c->nrows - 1 : 0; i < c->nrows; i++) { /* in order: two rows may leave theirs in one place */
        __syncwarp(); /* what was before is loaded, all of it */
        if (r == i && v < e->dv && !(c->leads >> i & 1)) *keep = past;
    }
    return mk_silu(mk_dot4(t->taps, past)); /* of what there is not: something */
}

/* What a step of several rows takes by units that the packets asked for together leave out: of more than 32 value channels, and decays by channel. p: of f and z: dt_bias, o_norm. */
template <uint32_t LOW> MK_DEV void mk_delta_take_rest(const mk_dev *d, const mk_delta *e, uint32_t r, float rate, bool head, mk_delta_row *x)
{
    const mk_places *place = &mk_fed_of(d->in)->place;
    const uint32_t units = mk_delta_units(e, LOW != 0, head), nf = LOW ? 0 : head ? 1 : MK_DELTA_DK / 32, nv = (e->dv + 31u) / 32;
#pragma unroll 1
    for (uint32_t u = 0; u < units; u++) {
        if ((head && u == 0) || u - nf < 2 || u == nf + 1 + nv) continue;
        const mk_delta_unit t = mk_delta_unit_of(e, LOW != 0, head, u, units, d->lane, 0);
        if (!t.has) continue;
        const mk_vec *v = &d->sh->vec[d->in->wait[t.k].vec];
        const uint32_t found = mk_spot_find(d, t.k, t.index);
        const uint4 *from = place->in[t.k] + r * v->nslice * v->slice_packets + found / 8;
        const float y = mk_found_bf16(found, mk_packet_get(from, mk_packet_load(from), place->epoch[t.k], t.k, r, found / 8));
        const float p = t.is_v ? 0 : __ldg(d->a->param + e->param_off + mk_delta_rate_at(e) + 1 + (t.is_f ? t.i : t.i + mk_delta_decays(e)));
        if (t.is_v)
            x->v[t.i] = y;
        else if (t.is_f)
            x->a[t.i] = mk_delta_decay(y + p, rate);
        else
            x->z[t.i] = mk_delta_z(e, p, y);
    }
    __syncwarp();
}

/* Packets of a row that its warp takes beside those of all rows: one of b, by lane 1, and of the head's f, by lane 0; of the first 32 values of v, of z. */
enum { MK_DELTA_FB, MK_DELTA_V, MK_DELTA_Z, MK_DELTA_OTHERS };

template <uint32_t LOW> MK_CALL void mk_delta_step_of(const mk_insn *in)
{
    constexpr uint32_t ROWS = MK_MAX_ROWS, OTHERS = LOW ? MK_DELTA_Z : MK_DELTA_OTHERS;
    const mk_dev here = mk_here(in), *d = &here;
    const mk_delta *e = &in->delta;
    const mk_fed *f = mk_fed_of(in);
    const mk_places *place = &f->place;
    const uint32_t nrows = mk_uniform(d->step->nrows), warp = mk_uniform(d->warp), lane = d->lane, dv = mk_uniform(e->dv), nv = (dv + 31) / 32, all = (1u << nrows) - 1;
    const bool head = !LOW && e->decay == MK_DECAY_HEAD, has_row = warp < nrows;
    mk_delta_row *const rows = (mk_delta_row *)d->sh->staging;
    mk_staged_drop(d);

    /* where the thread's packets are; what words cannot say is searched for in one place, by way of what the rows leave of the staging area */
    const auto packets = [&](uint32_t k) { return (uint32_t)d->sh->vec[in->wait[k].vec].slice_packets; };
    const auto row_packets = [&](uint32_t k) { return d->sh->vec[in->wait[k].vec].nslice * packets(k); };
    const bool is_f = head && lane == 0;
    const uint32_t fb_k = is_f ? 1 : 2, b_unit = LOW ? 0 : head ? 1 : MK_DELTA_DK / 32;
    const bool words = f->plan.map && b_unit + 1 + nv < MK_WARPS;
    uint32_t *const searched = (uint32_t *)(rows + nrows) + d->tid;
    static_assert(sizeof(mk_delta_row) * ROWS + 4 * MK_COMPUTE * (OTHERS + 2) <= MK_STAGING, "places beside the rows");
    if (__builtin_expect(!words, 0)) {
        const uint32_t i = min(lane, dv - 1);
#pragma unroll 1
        for (uint32_t j = 0; j < OTHERS + (LOW ? 2 : 1); j++) {
            const bool fb = j == MK_DELTA_FB, v = j == MK_DELTA_V, z = j < OTHERS && !fb && !v, low = j > OTHERS;
            const uint32_t index = fb ? is_f ? e->f_off : e->b_off : v ? e->v_off + i : z ? e->z_off + i : low ? mk_delta_input(LOW == MK_W_FP8, warp & 3, lane) + (warp < MK_WARPS / 2 ? e->f_off : e->z_off) : mk_delta_channel(e, d->tid);
            searched[j * MK_COMPUTE] = mk_spot_find(d, fb ? fb_k : z || low ? 1 : 0, index);
        }
    }
    const auto find = [&](uint32_t j, uint32_t what, uint32_t at, uint32_t i, uint32_t k) { return words ? mk_delta_found(f->delta.word[what][at], i, packets(k)) : searched[j * MK_COMPUTE]; };

    /* everything is asked for before anything is waited for, but what there are no registers for while a low rank's inputs are under way, which come before the others */
    const float *const weight = d->a->param + e->param_off, *const param = weight + mk_delta_rate_at(e);
    mk_delta_tile<LOW> tile = {}, z = {}; /* ptxas keeps alive, across all opcodes, what is not set on every path */
    const bool has_z = LOW && 16 * warp < dv;
    float4 w, past, s[MK_DELTA_COLS];
    mk_delta_value value;
    mk_delta_chains chains, *const c = &chains;
    float rate;
    const mk_row *const first = &d->step->row[0];
    const auto ask_states = [&]() {
        w = __ldg((const float4 *)weight + d->tid);
        past = __ldcg((const float4 *)mk_delta_from(d, e, first) + d->tid);
        mk_delta_ask_value(d, e, c, warp, &value);
        mk_delta_ask_columns(d, e, first, warp, s);
    };
    if constexpr (LOW != 0) {
        const uint32_t input = find(OTHERS + 1, MK_DELTA_LOW, warp, mk_delta_input(LOW == MK_W_FP8, 0, lane), 1), step = row_packets(1);
        const uint4 *const from = place->in[1] + input / 8;
        uint4 q[ROWS];
        float x[ROWS];
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            q[r] = make_uint4(0, 0, 0, 0);
            mk_packet_again(&q[r], from + r * step, all & 1u << r);
        }
        const uint8_t *tape = d->a->tape + f->plan.tape;
        mk_delta_ask<LOW>(e, 0, tape, param, warp, lane, &tile);
        if (has_z) mk_delta_ask<LOW>(e, 1, tape, param, warp, lane, &z);
        rate = __ldg(param);
        chains = mk_delta_chains_of(d->step, nrows, lane);
        mk_delta_wait(q, all, from, step, [&](uint32_t) { return from; }, [&](uint32_t) { return place->epoch[1]; },
                      [&](uint32_t i, uint32_t *k, uint32_t *r, uint32_t *packet) { *k = 1, *r = i, *packet = input / 8; });
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) x[r] = mk_found_bf16(input, q[r]);
        ask_states();
        mk_delta_take_inputs<LOW>(d, x, rows, nrows);
        mk_sync();
        mk_delta_gates<LOW>(e, rows, nrows, warp, lane, &tile, z, has_z, -mk_exp_fast(rate));
    }
    const uint32_t own = find(OTHERS, MK_DELTA_OWN, warp, lane, 0), own_step = row_packets(0);
    const uint4 *const own_at = place->in[0] + own / 8, *other_at[OTHERS];
    const auto wait_of = [&](uint32_t j) { return j == MK_DELTA_FB ? fb_k : j == MK_DELTA_V ? 0u : 1u; };
    uint4 q[ROWS + OTHERS];
    uint32_t other[OTHERS], wanted = all;
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++) {
        q[r] = make_uint4(0, 0, 0, 0);
        mk_packet_again(&q[r], own_at + r * own_step, all & 1u << r);
    }
#pragma unroll
    for (uint32_t j = 0; j < OTHERS; j++) {
        const bool fb = j == MK_DELTA_FB;
        const uint32_t k = wait_of(j);
        const bool has = has_row && (fb ? is_f || lane == 1 : lane < dv);
        other[j] = find(j, MK_DELTA_UNIT, fb ? is_f ? 0 : b_unit : j == MK_DELTA_V ? b_unit + 1 : b_unit + 1 + nv, fb ? 0 : lane, k);
        other_at[j] = place->in[k] + warp * row_packets(k) + other[j] / 8;
        q[ROWS + j] = make_uint4(0, 0, 0, 0);
        mk_packet_again(&q[ROWS + j], other_at[j], has);
        wanted |= (has ? 1u : 0) << (ROWS + j);
    }
    float bias = 0, norm = 0;
    if (!LOW) {
        rate = __ldg(param), bias = __ldg(param + 1), norm = __ldg(param + 1 + mk_delta_decays(e) + min(lane, dv - 1));
        chains = mk_delta_chains_of(d->step, nrows, lane);
        ask_states();
    }

    mk_delta_wait(q, wanted, own_at, own_step, [&](uint32_t i) { return other_at[i - ROWS]; },
                  [&](uint32_t i) { return place->epoch[i < ROWS ? 0 : wait_of(i - ROWS)]; },
                  [&](uint32_t i, uint32_t *k, uint32_t *r, uint32_t *packet) {
                      *k = i < ROWS ? 0 : wait_of(i - ROWS), *r = i < ROWS ? i : warp, *packet = (i < ROWS ? own : other[i - ROWS]) / 8;
                  });
    if (has_row) {
        mk_delta_row *const x = rows + warp;
        const float y = mk_found_bf16(other[MK_DELTA_FB], q[ROWS + MK_DELTA_FB]);
        if (lane == 1) x->beta = mk_delta_gate(1.0f, y);
        if (lane < dv) x->v[lane] = mk_found_bf16(other[MK_DELTA_V], q[ROWS + MK_DELTA_V]); /* not convolved yet */
        rate = -mk_exp_fast(rate);
        if (!LOW) {
            const float t = mk_found_bf16(other[OTHERS - 1], q[ROWS + OTHERS - 1]);
            if (lane < dv) x->z[lane] = mk_delta_z(e, norm, t);
            const float a = mk_delta_decay(__shfl_sync(0xffffffffu, y, 0) + bias, rate);
            if (head) ((float4 *)x->a)[lane] = make_float4(a, a, a, a);
        }
        if (nv > 1 || (!LOW && !head)) mk_delta_take_rest<LOW>(d, e, warp, rate, head, x);
    }
    float x[ROWS];
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++) x[r] = mk_found_bf16(own, q[r]);
    mk_delta_begin(first, &past, 1);
    mk_delta_convolve(d, e, c, x, w, past, rows);
    mk_sync();
    mk_trace_input(d);
    mk_trace_bytes(d, nrows * MK_DELTA_DK * dv * 4);

    if (has_row) {
        mk_delta_row *const own_row = rows + warp;
        const mk_delta_norms n = mk_delta_norms_of(((const float4 *)own_row->qk)[lane], ((const float4 *)own_row->qk)[MK_DELTA_DK / 4 + lane], lane);
        if (lane == 0) own_row->rk = n.rk, own_row->rq = n.rq, own_row->both = __fmul_rn(__fmul_rn(n.qk, n.rq), n.rk);
    }
    float y = mk_delta_convolve_value(d, e, c, warp, &value, rows);
    mk_delta_begin(first, s, MK_DELTA_COLS);
    mk_sync();

    const mk_vec *out = &d->sh->vec[in->signal_vec];
    uint4 *const to = place->out + warp * out->nslice * out->slice_packets; /* of row `warp` */
    const uint32_t epoch = place->out_epoch, passes = mk_uniform((dv + MK_DELTA_COLS * MK_WARPS - 1) / (MK_DELTA_COLS * MK_WARPS));
#pragma unroll 1
    for (uint32_t pass = 0;;) {
        const uint32_t v0 = warp + pass * MK_DELTA_COLS * MK_WARPS, v = v0 + (lane / 4 & 3) * MK_WARPS;
        const float4 *next = (const float4 *)rows->qk + lane;
        float4 q = next[0], k = next[MK_DELTA_DK / 4], a = *(const float4 *)(rows->a + 4 * lane), ka = mk_mul4(k, a), qa = mk_mul4(q, a);
#pragma unroll 1
        for (uint32_t r = 0;;) {
            mk_delta_row *const x = rows + r, *const after = rows + min(r + 1, nrows - 1);
            if ((r | pass) && !(c->follows >> r & 1)) {
                mk_delta_ask_columns(d, e, &d->step->row[r], v0, s);
                mk_delta_begin(&d->step->row[r], s, MK_DELTA_COLS);
            }
            const float4 by = *(const float4 *)&x->beta, next_q = ((const float4 *)after->qk)[lane], next_k = ((const float4 *)after->qk)[MK_DELTA_DK / 4 + lane], next_a = ((const float4 *)after->a)[lane];
            const float own_y = __shfl_sync(0xffffffffu, y, 4 * r + (lane / 4 & 3));
            float dot[2 * MK_DELTA_COLS];
#pragma unroll
            for (int i = 0; i < MK_DELTA_COLS; i++) {
                dot[i] = mk_dot4(ka, s[i]);
                dot[MK_DELTA_COLS + i] = mk_dot4(qa, s[i]);
            }
            const float sum = mk_warp_eight(dot, lane); /* as in mk_delta_columns */
            mk_delta_turn t = {k, a, by.y, __fmul_rn(by.x, __fmaf_rn(-by.y, sum, own_y)), 0};
            t.o = __fmaf_rn(by.w, __shfl_sync(0xffffffffu, t.delta, lane & 15), __fmul_rn(by.z, sum));
            if ((lane & 19) == 16 && v < dv) x->o[v] = t.o;
            const bool last = r + 1 == nrows;
            if (last && pass + 1 == passes) {
                mk_sync();
                mk_trace_publish(d);
                if (has_row) mk_delta_publish(lane, dv, rows + warp, to, epoch);
            }
            mk_delta_update(&t, s);
            if (!(c->leads >> r & 1)) {
                float4 *const keep = (float4 *)(d->a->state + d->step->row[r].state_write * d->a->state_slot_bytes + e->state_off + mk_delta_matrix_at(e)) + v0 * (MK_DELTA_DK / 4) + lane;
#pragma unroll
                for (uint32_t i = 0; i < MK_DELTA_COLS; i++)
                    if (v0 + i * MK_WARPS < dv) keep[i * MK_WARPS * (MK_DELTA_DK / 4)] = s[i];
            }
            if (last) break;
            k = next_k, a = next_a, ka = mk_mul4(k, a), qa = mk_mul4(next_q, a);
            r++;
        }
        if (++pass == passes) break;
        mk_delta_ask_value(d, e, c, warp + pass * MK_DELTA_COLS * MK_WARPS, &value);
        y = mk_delta_convolve_value(d, e, c, warp + pass * MK_DELTA_COLS * MK_WARPS, &value, rows);
    }
    mk_sync();
}

MK_DEV void mk_delta_step_run(const mk_insn *in)
{
    const uint32_t low = in->delta.rank ? in->delta.low[0].wtype : 0;
    low == MK_W_FP8 ? mk_delta_step_of<MK_W_FP8>(in) : low ? mk_delta_step_of<MK_W_BF16>(in) : mk_delta_step_of<0>(in);
}

#endif
