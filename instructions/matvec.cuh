/* What the matrix opcodes (GEMV, EXPERT_UP, EXPERT_DOWN, LM_HEAD) share on the device.
 *
 * A vector is gathered into the staging area as bf16, up to eight rows of it; f32 vectors (the router's) as three bf16 planes whose sum is
 * the f32 value exactly. RMS norm commutes with the product: the staged values carry gamma, the sum of squares is taken while gathering, and
 * the results are multiplied by 1/rms. A head's norm (HEADNORM) multiplies the partial sums of the K blocks that lie in the head.
 *
 * Every stage of a tape is consumed by all 16 compute warps together. A warp has one tile of 16 matrix rows: Wt = 1, 2, 4 or 8 warps side
 * by side, Wk = 16 / Wt along K, K block b belongs to warp group b mod Wk. Partial tiles are added in ascending group. So the order of every sum is a
 * function of (tile, k) alone: rows come and go as columns of mma.sync without touching each other's bits. */
#ifndef MK_MATVEC_CUH
#define MK_MATVEC_CUH

#include "instructions/mk_math.h"
#include "megakernel/device.cuh"

/* ---- gathering ------------------------------------------------------------------------------------------------------ */

typedef struct mk_stage_shape {
    uint32_t stride; /* bytes from row to row */
    uint32_t plane;  /* bytes from plane to plane */
} mk_stage_shape;

MK_DEV mk_stage_shape mk_shape(uint32_t values, uint32_t planes)
{
    mk_stage_shape s;
    s.stride = ((values + 63) & ~63u) * 2 + 16;
    s.plane = planes > 1 ? MK_MAX_ROWS * s.stride : 0;
    return s;
}

/* Two more planes of x, whose first is `hi`. */
MK_DEV void mk_stage_rest(uint8_t *at, uint32_t plane, float x, uint32_t hi)
{
    float rest = x - mk_bf16_value(hi);
    uint32_t mid = mk_bf16_bits(rest);
    *(uint16_t *)(at + plane) = (uint16_t)mid;
    *(uint16_t *)(at + 2 * plane) = (uint16_t)mk_bf16_bits(rest - mk_bf16_value(mid));
}

/* Values [first, first + n) of wait `w` (of the vector) for all rows; gamma (may be NULL) is that of value `first`; with gamma, the squares are
 * summed into sumsq[parity] (`more`: added to what an earlier chunk left there). A thread's share of a row and the order of its sum are the same whatever the
 * other rows are. */
MK_DEV void mk_gather(const mk_dev *d, const mk_wait *w, uint32_t first, uint32_t n, const float *gamma, mk_stage_shape shape, bool more)
{
    constexpr int NP = 2, NR = 2; /* packets of a row, rows at a time */
    const mk_vec *v = &d->sh->vec[w->vec];
    const uint16_t *start = d->sh->start + v->start_index + w->slice0;
    const uint4 *base = mk_wait_packets(d, w, v, 0);
    const uint32_t sp = v->slice_packets, packets = w->nslice * sp, row_packets = v->nslice * sp, epoch = mk_wait_epoch(d, w);
    const uint32_t nrows = d->step->nrows, f32 = v->dtype == MK_F32, vpp = f32 ? 3 : 6;
    const mk_divisor by = mk_div_by_slice(v);

    for (uint32_t r0 = 0; r0 < nrows; r0 += NR) {
        const bool two = r0 + 1 < nrows;
        float sumsq[NR] = {0, 0};
        for (uint32_t i0 = d->tid; i0 < packets; i0 += NP * MK_COMPUTE) {
            int at[NP], hi[NP]; /* first value of the packet and end of its values, counted from `first` */
            float3 g[NP]; /* gamma of an f32 packet */
            uint4 q[NP][NR];
#pragma unroll
            for (int j = 0; j < NP; j++) {
                uint32_t i = i0 + j * MK_COMPUTE, s = mk_quot(i, by), p = i - s * sp;
                at[j] = hi[j] = 0;
                g[j] = make_float3(0, 0, 0);
                if (i >= packets) continue;
                uint32_t st = start[s], end = start[s + 1];
                end = end < first + n ? end : first + n;
                int from = (int)(st + p * vpp) - (int)first, to = (int)end - (int)first;
                if (from >= to || from + (int)vpp <= 0) continue;
                at[j] = from;
                hi[j] = to;
                q[j][0] = mk_packet_load(base + i + (size_t)r0 * row_packets);
                if (two) q[j][1] = mk_packet_load(base + i + (size_t)(r0 + 1) * row_packets);
                if (gamma && f32) {
                    if (from >= 0) g[j].x = __ldg(gamma + from);
                    if (from + 1 >= 0 && from + 1 < to) g[j].y = __ldg(gamma + from + 1);
                    if (from + 2 < to) g[j].z = __ldg(gamma + from + 2);
                }
            }
            mk_spin spin = {0, 0};
            for (bool again = true; again;) {
                uint32_t row = 0, packet = 0, found = 0;
                again = false;
#pragma unroll
                for (int j = 0; j < NP; j++)
#pragma unroll
                    for (int r = 0; r < NR; r++)
                        if (hi[j] && (r == 0 || two) && q[j][r].w != epoch) {
                            again = true;
                            row = r0 + r;
                            packet = i0 + j * MK_COMPUTE;
                            found = q[j][r].w;
                            q[j][r] = mk_packet_load(base + packet + (size_t)row * row_packets);
                        }
                if (again) again = mk_packet_spin(&spin, w, row, packet, epoch, found);
            }
#pragma unroll
            for (int j = 0; j < NP; j++)
#pragma unroll
                for (int r = 0; r < NR; r++) {
                    if (!hi[j] || (r && !two)) continue;
                    const uint32_t word[3] = {q[j][r].x, q[j][r].y, q[j][r].z};
                    uint8_t *to = d->sh->staging + (r0 + r) * shape.stride + 2 * at[j];
#pragma unroll
                    for (int k = 0; k < 6; k++) {
                        if (k >= vpp || at[j] + k < 0 || at[j] + k >= hi[j]) continue;
                        uint32_t bits = (word[k / 2] >> (16 * (k & 1))) & 0xffffu;
                        if (f32 || gamma) {
                            float y = f32 ? __uint_as_float(word[k % 3]) : mk_bf16_value(bits);
                            if (gamma) {
                                sumsq[r] = __fmaf_rn(y, y, sumsq[r]);
                                float scale = k % 3 == 0 ? g[j].x : k % 3 == 1 ? g[j].y : g[j].z;
                                if (!f32) scale = __ldg(gamma + at[j] + k);
                                y = __fmul_rn(y, scale);
                            }
                            bits = mk_bf16_bits(y);
                            if (shape.plane) mk_stage_rest(to + 2 * k, shape.plane, y, bits);
                        }
                        *(uint16_t *)(to + 2 * k) = (uint16_t)bits;
                    }
                }
        }
        if (gamma)
#pragma unroll
            for (int r = 0; r < NR; r++) {
                if (r && !two) continue;
                float s = mk_warp_sum(sumsq[r]), *to = &d->sh->sumsq[d->memo->parity][d->warp][r0 + r];
                if (d->lane == 0) *to = more ? __fadd_rn(*to, s) : s;
            }
    }
    /* the last K block is padded: its weights are zero, the values must be finite */
    const uint32_t pad = ((n + 63) & ~63u) - n, planes = shape.plane ? MK_PLANES_F32 : 1;
    for (uint32_t i = d->tid; i < pad * nrows * planes; i += MK_COMPUTE) {
        uint32_t r = i / pad, p = r / nrows;
        *(uint16_t *)(d->sh->staging + (r - p * nrows) * shape.stride + p * shape.plane + 2 * (n + i - r * pad)) = 0;
    }
}

/* After the barrier that follows the last chunk: 1/rms of every row; visible to all after the next one. */
MK_DEV void mk_rstd_share(const mk_dev *d, uint32_t k, float eps)
{
    if (d->warp >= d->step->nrows) return;
    float s = d->lane < MK_WARPS ? d->sh->sumsq[d->memo->parity][d->lane][d->warp] : 0.0f;
    s = mk_warp_sum(s);
    if (d->lane == 0) d->sh->rstd[d->memo->parity][d->warp] = 1.0f / sqrtf(s / (float)k + eps);
}

/* HEADNORM: 1/rms of every head of every row, out of the trailers of its slices (ascending). A lane a slice; a head's slices, a power of two, lie
 * side by side in a warp. */
MK_DEV void mk_head_norms(const mk_dev *d, const mk_wait *w, uint32_t heads, uint32_t group, float eps)
{
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
        if (has && (d->lane & (per - 1)) == 0) d->sh->head_rstd[r][s >> shift] = 1.0f / sqrtf(sum / (float)group + eps);
    }
}

/* Instructions that read the same vector with the same prologue gather it once. Returns whether it is staged; if not, the caller stages it now (keep: as a
 * whole). */
MK_DEV bool mk_staged(const mk_dev *d, const mk_wait *w, uint32_t in_off, uint32_t k, uint32_t prologue, uint32_t param_off, bool keep)
{
    const uint32_t step = d->step->seq, vector = w->vec | (uint32_t)w->pub << 16, norm = prologue | param_off << 2;
    mk_memo *m = d->memo;
    bool have = keep && m->staged.valid && m->staged.step == step && m->staged.vector == vector && m->staged.first == in_off && m->staged.k == k &&
                m->staged.norm == norm;
    __syncwarp();
    if (d->lane == 0 && !have) {
        m->staged.valid = keep;
        m->staged.step = step;
        m->staged.vector = vector;
        m->staged.first = in_off;
        m->staged.k = k;
        m->staged.norm = norm;
        if (prologue == MK_PRO_RMS) m->parity ^= 1; /* sums of the vector before may still be read */
    }
    __syncwarp();
    return have;
}

/* ---- the product ---------------------------------------------------------------------------------------------------- */

typedef struct mk_tile {
    uint32_t wtype, rows, nkb, per;
    uint32_t halves, nseg, phase; /* scale segments: isa.h */
    uint32_t shift;               /* K blocks a scale row: 1 << shift */
    uint32_t wt_bits;             /* warps side by side: 1 << wt_bits */
} mk_tile;

MK_DEV mk_tile mk_tile_make(uint32_t wtype, uint32_t rows, uint32_t k, uint32_t halves, uint32_t nseg, uint32_t phase, uint32_t scale_k,
                            uint32_t planes)
{
    mk_tile t;
    uint32_t tiles = (rows + 15) / 16;
    t.wtype = wtype;
    t.rows = rows;
    t.nkb = wtype == MK_W_FP8 ? (k + 63) / 64 : (k + 31) / 32;
    t.per = mk_stage_kblocks(wtype, rows, planes);
    t.halves = halves;
    t.nseg = nseg;
    t.phase = phase;
    t.shift = scale_k == 128 ? 1 : 0;
    t.wt_bits = tiles <= 1 ? 0 : tiles <= 2 ? 1 : tiles <= 4 ? 2 : 3;
    return t;
}

MK_DEV void mk_mma(float *c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* Two e4m3 codes, in bytes 1 and 3 of v, as bf16x2, exactly: exponent and mantissa moved into place are the value times 2^-120 (subnormals
 * become bf16 subnormals), and the product with 2^120 is exact. */
MK_DEV uint32_t mk_fp8_pair(uint32_t v)
{
    uint32_t u = ((v >> 4) & 0x07f007f0u) | (v & 0x80008000u), w;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(w) : "r"(u), "r"(0x7b807b80u));
    return w;
}

/* acc += rows of this warp's tile times the staged vector, over K blocks [kb0, kb1); kb0 is a multiple of t->per and stands at the front of
 * the staging area. x: this lane's column of the staged vector (lanes of columns without a row: NULL); planes follow each other at `plane` bytes (0:
 * there is one). head_rstd: the columns' norms by head, or NULL; K blocks a head: 1 << head_shift. */
template <uint32_t RING>
MK_DEV void mk_product(const mk_dev *d, const mk_tile *t, uint32_t kb0, uint32_t kb1, const uint8_t *x, uint32_t plane,
                       const float *head_rstd, uint32_t head_shift, float *acc)
{
    const uint32_t stages = RING == MK_TAPE ? d->a->static_stages : MK_EXPERT_STAGES;
    uint32_t at = d->memo->at[RING], lap = d->memo->lap[RING];
    const uint32_t g = d->lane >> 2, l = d->lane & 3, fp8 = t->wtype == MK_W_FP8;
    const uint32_t tile = d->warp & ((1u << t->wt_bits) - 1), wk = d->warp >> t->wt_bits, wks = MK_WARPS >> t->wt_bits;
    const bool mine = tile * 16 < t->rows;
    uint32_t i0 = tile * 16 + g, i1 = i0 + 8, half = t->halves == 2 ? t->rows / 2 : t->rows;
    i0 = i0 < t->rows ? i0 : t->rows - 1;
    i1 = i1 < t->rows ? i1 : t->rows - 1;
    const uint32_t total = t->halves * t->nseg;
    const uint32_t h0 = t->halves == 2 && i0 >= half, h1 = t->halves == 2 && i1 >= half;
    const uint32_t s0 = h0 * t->nseg + (t->phase + i0 - h0 * half) / MK_SCALE_ROWS, s1 = h1 * t->nseg + (t->phase + i1 - h1 * half) / MK_SCALE_ROWS;
    const uint32_t kb_bytes = t->rows * MK_KBLOCK_BYTES, x_bytes = fp8 ? 128 : 64, planes = plane ? MK_PLANES_F32 : 1;

    for (uint32_t kb = kb0; kb < kb1; kb += t->per) {
        uint32_t nk = kb1 - kb < t->per ? kb1 - kb : t->per;
        mk_stage_wait(d, mk_smem(&d->sh->full[RING][at]), lap, RING == MK_TAPE ? MK_FAULT_TAPE : MK_FAULT_EXPERT);
        __syncwarp();
        const uint8_t *stage = mk_stages(RING) + at * MK_STAGE_STRIDE;
        const float *scale = (const float *)(stage + MK_STAGE_BYTES + (((kb >> t->shift) * total * 4) & 15));
#pragma unroll 1
        for (uint32_t b = mine ? (wk - kb) & (wks - 1) : nk; b < nk; b += wks) {
            const uint4 w0 = *(const uint4 *)(stage + b * kb_bytes + i0 * MK_KBLOCK_BYTES + l * 16);
            const uint4 w1 = *(const uint4 *)(stage + b * kb_bytes + i1 * MK_KBLOCK_BYTES + l * 16);
            const uint32_t p[4] = {w0.x, w0.y, w0.z, w0.w}, q[4] = {w1.x, w1.y, w1.z, w1.w};
            const uint8_t *xp = x + (kb - kb0 + b) * x_bytes + l * (x_bytes / 4);
            float part[4] = {0, 0, 0, 0};
#pragma unroll 1
            for (uint32_t pl = 0; pl < planes; pl++, xp += plane) {
                uint4 xa = make_uint4(0, 0, 0, 0), xb = xa;
                if (x) xa = *(const uint4 *)xp;
                if (fp8) {
                    if (x) xb = *(const uint4 *)(xp + 16);
                    const uint32_t y[8] = {xa.x, xa.y, xa.z, xa.w, xb.x, xb.y, xb.z, xb.w};
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        mk_mma(part, mk_fp8_pair(__byte_perm(p[i], 0, 0x1404)), mk_fp8_pair(__byte_perm(q[i], 0, 0x1404)),
                               mk_fp8_pair(__byte_perm(p[i], 0, 0x3424)), mk_fp8_pair(__byte_perm(q[i], 0, 0x3424)), y[2 * i], y[2 * i + 1]);
                } else {
                    mk_mma(part, p[0], q[0], p[1], q[1], xa.x, xa.y);
                    mk_mma(part, p[2], q[2], p[3], q[3], xa.z, xa.w);
                }
            }
            if (fp8) {
                const uint32_t row = (((kb + b) >> t->shift) - (kb >> t->shift)) * total;
                const float f0 = scale[row + s0], f1 = scale[row + s1];
                part[0] = __fmul_rn(part[0], f0);
                part[1] = __fmul_rn(part[1], f0);
                part[2] = __fmul_rn(part[2], f1);
                part[3] = __fmul_rn(part[3], f1);
            }
            if (head_rstd) {
                const float *n = head_rstd + 2 * l * MK_MAX_NORM_HEADS + ((kb + b) >> head_shift);
                part[0] = __fmul_rn(part[0], n[0]);
                part[1] = __fmul_rn(part[1], n[MK_MAX_NORM_HEADS]);
                part[2] = __fmul_rn(part[2], n[0]);
                part[3] = __fmul_rn(part[3], n[MK_MAX_NORM_HEADS]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) acc[i] = __fadd_rn(acc[i], part[i]);
        }
        __syncwarp();
        if (mk_arrives(d->lane)) mk_mbar_arrive(mk_smem(&d->sh->empty[RING][at]));
        if (++at == stages) {
            at = 0;
            lap ^= 1;
        }
    }
    if (d->lane == 0) {
        if (RING == MK_EXPERT) mk_trace_bytes_here(d, (kb1 - kb0) * kb_bytes);
        d->memo->at[RING] = at;
        d->memo->lap[RING] = lap;
    }
    __syncwarp();
}

/* Column of the staged vector that this lane feeds to the tensor core, or NULL. */
MK_DEV const uint8_t *mk_column(const mk_dev *d, mk_stage_shape shape)
{
    uint32_t g = d->lane >> 2;
    return g < d->step->nrows ? d->sh->staging + g * shape.stride : (const uint8_t *)0;
}

/* The vector of wait 0 as the instruction wants it. */
typedef struct mk_input {
    uint32_t in_off, k, prologue, param_off, norm_group, planes;
    float eps;
} mk_input;

/* Gathers chunk by chunk (not at all when the staging area holds the vector) and multiplies each chunk with the next stages of the static ring;
 * acc is this thread's part of its warp's tile. Leaves 1/rms in rstd[parity], visible after the next barrier. The reduction area is free. */
MK_DEV void mk_gathered_product(const mk_dev *d, const mk_input *x, const mk_tile *t, float *acc)
{
    const mk_wait *w = &d->in->wait[0];
    const uint32_t log_values = t->wtype == MK_W_FP8 ? 6 : 5;
    const bool rms = x->prologue == MK_PRO_RMS, heads = x->prologue == MK_PRO_HEADNORM, whole = x->planes == 1 && x->k <= MK_STAGED_VALUES;
    const uint32_t head_shift = heads ? 31 - __clz((int)x->norm_group) - log_values : 0;
    const uint32_t chunk = whole ? t->nkb : mk_chunk_kblocks(t->wtype, x->planes) / t->per * t->per; /* K blocks */
    const mk_stage_shape shape = mk_shape(whole ? x->k : chunk << log_values, x->planes);
    const float *gamma = rms ? d->a->param + x->param_off : (const float *)0;
    const float *norms = heads ? d->sh->head_rstd[0] : (const float *)0;
    const bool have = mk_staged(d, w, x->in_off, x->k, x->prologue, x->param_off, whole);

    if (heads && !have) mk_head_norms(d, w, x->k / x->norm_group, x->norm_group, x->eps);
    for (uint32_t kb = 0; kb < t->nkb;) {
        uint32_t end = t->nkb - kb < chunk ? t->nkb : kb + chunk, first = kb << log_values;
        uint32_t n = (end << log_values < x->k ? end << log_values : x->k) - first;
        if (kb) mk_sync(); /* the chunk before is consumed */
        if (!have) mk_gather(d, w, x->in_off + first, n, gamma ? gamma + first : gamma, shape, kb > 0);
        mk_sync(); /* staged; and the reduction area is read */
        if (!kb) mk_trace_input(d);
        if (rms && !have && end == t->nkb) mk_rstd_share(d, x->k, x->eps);
        mk_product<MK_TAPE>(d, t, kb, end, mk_column(d, shape), shape.plane, norms, head_shift, acc);
        kb = end;
    }
}

/* The reduction area holds mk_red_slots() products at a time. */
MK_DEV uint32_t mk_red_slots(const mk_dev *d)
{
    return MK_MAX_ROWS / d->step->nrows;
}
MK_DEV void mk_red_put(const mk_dev *d, uint32_t slot, const float *acc)
{
    uint32_t g = d->lane >> 2, c = 2 * (d->lane & 3), nrows = d->step->nrows;
    float *r = d->sh->red + ((slot * MK_WARPS + d->warp) * nrows + c) * MK_RED_STRIDE + g;
    if (c < nrows) {
        r[0] = acc[0];
        r[8] = acc[2];
    }
    if (c + 1 < nrows) {
        r[MK_RED_STRIDE] = acc[1];
        r[MK_RED_STRIDE + 8] = acc[3];
    }
}
/* Matrix row i of product `slot`, column `row`: the partial tiles in ascending K group. */
MK_DEV float mk_red_get(const mk_dev *d, uint32_t slot, const mk_tile *t, uint32_t i, uint32_t row)
{
    uint32_t nrows = d->step->nrows, tile = i / 16, step = (nrows * MK_RED_STRIDE) << t->wt_bits;
    const float *r = d->sh->red + ((slot * MK_WARPS + tile) * nrows + row) * MK_RED_STRIDE + i % 16;
    float sum = 0;
#pragma unroll 4
    for (uint32_t wk = MK_WARPS >> t->wt_bits; wk; wk--, r += step) sum = __fadd_rn(sum, *r);
    return sum;
}

#endif
