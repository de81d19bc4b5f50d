/* What the matrix opcodes (GEMV, EXPERT_UP, EXPERT_DOWN, LM_HEAD) share on the device.
 *
 * A vector is gathered into the staging area as bf16, up to eight rows of it; f32 vectors (the router's) as three bf16 planes whose sum is
 * the f32 value exactly. RMS norm commutes with the product: the staged values carry gamma, the sum of squares is taken while gathering, and
 * the results are multiplied by 1/rms. A head's norm (HEADNORM) multiplies the partial sums of the K blocks that lie in the head.
 *
 * Staged values are multiplied by 2^60, and every four of them lie in the order 0, 2, 1, 3: with that an e4m3 code becomes a bf16 operand (its value
 * times 2^-120) by shifts and masks alone. Powers of two cost no bits; mk_product takes them back.
 *
 * A stage of a tape is consumed by a group of four warps: the group of its slot in the ring, so that a slot never changes hands. Stage s of a segment
 * belongs to partial sum s mod 4, whichever group that is this time. Within a group the warps share the stage's K blocks (Ws = 4, 2 or 1 ways) and the 16-row
 * tiles (1, 2 or 4; of eight tiles a warp takes two). Partial tiles are added in ascending (s mod 4, K block mod Ws). So the order of every sum is a
 * function of (tile, k) alone: rows come and go as columns of mma.sync without touching each other's bits. Few instructions count: four
 * warps share a scheduler, and what every warp does is issued four times. */
#ifndef MK_MATVEC_CUH
#define MK_MATVEC_CUH

#include "instructions/mk_math.h"
#include "megakernel/device.cuh"

/* ---- gathering ------------------------------------------------------------------------------------------------------ */

typedef struct mk_stage_shape {
    uint32_t stride; /* bytes from row to row */
    uint32_t plane;  /* bytes from plane to plane; 0: there is one */
} mk_stage_shape;

MK_DEV mk_stage_shape mk_shape(uint32_t values, uint32_t planes, uint32_t nrows)
{
    mk_stage_shape s;
    s.stride = ((values + 63) & ~63u) * 2 + 16;
    s.plane = planes > 1 ? nrows * s.stride : 0;
    return s;
}

/* Where value k of a staged row lies. */
MK_DEV uint32_t mk_staged_at(uint32_t k)
{
    return 2 * ((k & ~3u) | (k & 1) << 1 | (k >> 1 & 1));
}
#define MK_STAGED_SCALE 0x1p60f

/* Two more planes of x, whose first is `hi`. */
MK_DEV void mk_stage_rest(uint8_t *at, uint32_t plane, float x, uint32_t hi)
{
    float rest = x - mk_bf16_value(hi);
    uint32_t mid = mk_bf16_bits(rest);
    *(uint16_t *)(at + plane) = (uint16_t)mid;
    *(uint16_t *)(at + 2 * plane) = (uint16_t)mk_bf16_bits(rest - mk_bf16_value(mid));
}

#define MK_NO_PARAM 0xffffffffu
enum { MK_GATHER_SUM = 1, MK_GATHER_TRAILERS = 2 };

/* Where a thread's packet lies: its first value, counted from the first one that is asked for (may be before it), the end of its slice's values, and the
 * word that is the slice's trailer (3: none) with the slice. No values: end 0. */
typedef struct mk_packet_at {
    int at;
    uint32_t end, word, slice;
} mk_packet_at;

MK_DEV mk_packet_at mk_packet_where(const mk_vec *v, const uint16_t *start, uint32_t packet, uint32_t packets, uint32_t lo, uint32_t len, uint32_t flags)
{
    mk_packet_at w = {0, 0, 3, 0};
    if (packet >= packets) return w;
    const uint32_t f32 = v->dtype == MK_F32, s = mk_quot(packet, mk_div_by_slice(v)), p = packet - s * v->slice_packets, s0 = start[s], s1 = start[s + 1];
    const int to = (int)(s1 - lo < len ? s1 - lo : len);
    w.at = (int)(s0 + p * (f32 ? 3 : 6) - lo);
    if (w.at < to && w.at + (f32 ? 3 : 6) > 0) w.end = (uint32_t)to;
    if (flags & MK_GATHER_TRAILERS) {
        const uint32_t word = (f32 ? s1 - s0 : (s1 - s0 + 1) / 2) - p * 3;
        if (word < 3) w.word = word;
        w.slice = s;
    }
    return w;
}

/* Of wait 0's values [lo, lo + len), stages [c0, c0 + n) for all rows, c0 counted from lo. gamma_off: of value lo, in the parameters; or MK_NO_PARAM.
 * SUM: the squares of all len values go into sumsq[parity]: all at once, so that their order does not depend on the chunks, which depend on the number of rows.
 * TRAILERS: the slices' trailers go behind the staged rows. A thread's share of a row and the order of its sum are the same whatever the other rows are.
 * A thread has two packets of a row under way; the next row's are asked for before this one's are staged. */
MK_CALL void mk_gather(const mk_insn *in, uint32_t lo, uint32_t len, uint32_t c0, uint32_t n, uint32_t gamma_off, mk_stage_shape shape, uint32_t flags)
{
    mk_shared *sh = mk_sh();
    const mk_wait *w = &in->wait[0];
    const mk_vec *v = &sh->vec[w->vec];
    const uint16_t *start = sh->start + v->start_index + w->slice0;
    const uint32_t sp = v->slice_packets, packets = w->nslice * sp, row_packets = v->nslice * sp, seq = sh->step.seq, epoch = mk_epoch(sh->args.epoch0, seq, w->pub);
    const uint4 *base = (const uint4 *)(sh->args.exchange + mk_packet_offset(v, mk_half(v, seq, w->pub), 0, w->slice0));
    const uint32_t nrows = sh->step.nrows, f32 = v->dtype == MK_F32, tid = threadIdx.x;
    const bool rms = gamma_off != MK_NO_PARAM, all = packets <= 2 * MK_COMPUTE;
    const float *gamma = sh->args.param + gamma_off;
    const uint4 none = make_uint4(0, 0, 0, epoch);
    mk_packet_at at0 = {0, 0, 3, 0}, at1 = at0;
    float3 g0 = make_float3(1, 1, 1), g1 = g0;
    uint4 n0 = none, n1 = none; /* the next row's */

#pragma unroll 1
    for (uint32_t r = 0; r < nrows; r++) {
        float sum = 0;
#pragma unroll 1
        for (uint32_t i = tid; i < packets; i += 2 * MK_COMPUTE) {
            const uint4 *row = base + (size_t)r * row_packets + i;
            uint4 q0 = n0, q1 = n1;
            if (!all || !r) {
                at0 = mk_packet_where(v, start, i, packets, lo, len, flags);
                at1 = mk_packet_where(v, start, i + MK_COMPUTE, packets, lo, len, flags);
                q0 = q1 = none;
                if (at0.end || at0.word < 3) q0 = mk_packet_load(row);
                if (at1.end || at1.word < 3) q1 = mk_packet_load(row + MK_COMPUTE);
                if (rms && f32) {
                    const uint32_t k0 = (uint32_t)at0.at, k1 = (uint32_t)at1.at; /* before lo: huge */
                    if (k0 < at0.end) g0.x = __ldg(gamma + k0);
                    if (k0 + 1 < at0.end) g0.y = __ldg(gamma + k0 + 1);
                    if (k0 + 2 < at0.end) g0.z = __ldg(gamma + k0 + 2);
                    if (k1 < at1.end) g1.x = __ldg(gamma + k1);
                    if (k1 + 1 < at1.end) g1.y = __ldg(gamma + k1 + 1);
                    if (k1 + 2 < at1.end) g1.z = __ldg(gamma + k1 + 2);
                }
            }
            uint32_t looks = 0;
            while (q0.w != epoch || q1.w != epoch) {
                const uint32_t late = q0.w != epoch ? 0 : MK_COMPUTE, found = late ? q1.w : q0.w;
                if (q0.w != epoch) q0 = mk_packet_load(row);
                if (q1.w != epoch) q1 = mk_packet_load(row + MK_COMPUTE);
                if (!mk_still_waiting(++looks, 0, r, i + late, found)) break;
            }
            mk_waited(looks);
            if (all && r + 1 < nrows) {
                n0 = n1 = none;
                if (at0.end || at0.word < 3) n0 = mk_packet_load(row + row_packets);
                if (at1.end || at1.word < 3) n1 = mk_packet_load(row + row_packets + MK_COMPUTE);
            }
            /* one body for both, which change places: few instructions to fetch */
            uint8_t *to = sh->staging + r * shape.stride;
#pragma unroll 1
            for (uint32_t j = 0; j < 2; j++) {
                const uint32_t end = at0.end, k0 = (uint32_t)at0.at;
                if (end && f32) {
                    const uint32_t word[3] = {q0.x, q0.y, q0.z};
                    const float gam[3] = {g0.x, g0.y, g0.z};
#pragma unroll
                    for (uint32_t k = 0; k < 3; k++) {
                        if (k0 + k >= end) continue;
                        const float x = __uint_as_float(word[k]);
                        sum = __fmaf_rn(x, x, sum);
                        if (k0 + k - c0 >= n) continue;
                        const float y = __fmul_rn(__fmul_rn(x, gam[k]), MK_STAGED_SCALE);
                        const uint32_t bits = mk_bf16_bits(y);
                        uint8_t *o = to + mk_staged_at(k0 + k - c0);
                        *(uint16_t *)o = (uint16_t)bits;
                        if (shape.plane) mk_stage_rest(o, shape.plane, y, bits);
                    }
                } else if (end) {
                    const uint32_t word[3] = {q0.x, q0.y, q0.z};
#pragma unroll
                    for (uint32_t k = 0; k < 6; k++) {
                        if (k0 + k >= end) continue;
                        const float x = __uint_as_float(k & 1 ? word[k / 2] & 0xffff0000u : word[k / 2] << 16);
                        float y = x;
                        if (rms) {
                            sum = __fmaf_rn(x, x, sum);
                            y = __fmul_rn(x, __ldg(gamma + k0 + k));
                        }
                        if (k0 + k - c0 < n) *(uint16_t *)(to + mk_staged_at(k0 + k - c0)) = (uint16_t)mk_bf16_bits(__fmul_rn(y, MK_STAGED_SCALE));
                    }
                }
                if (at0.word < 3)
                    *(uint32_t *)(sh->staging + nrows * shape.stride + 4 * (r * w->nslice + at0.slice)) = at0.word == 0 ? q0.x : at0.word == 1 ? q0.y : q0.z;
                const mk_packet_at at = at0;
                const float3 g = g0;
                q0 = q1;
                at0 = at1;
                at1 = at;
                g0 = g1;
                g1 = g;
            }
        }
        if (flags & MK_GATHER_SUM) {
            sum = mk_warp_sum(sum);
            if (tid % 32 == 0) sh->sumsq[sh->memo[tid / 32].parity][tid / 32][r] = sum;
        }
    }
    /* the last K block is padded: its weights are zero, the values must be finite */
    const uint32_t pad = ((n + 63) & ~63u) - n, planes = shape.plane ? MK_PLANES_F32 : 1;
    if (pad)
        for (uint32_t i = tid; i < pad * nrows * planes; i += MK_COMPUTE) {
            uint32_t r = i / pad; /* planes follow each other like rows */
            *(uint16_t *)(sh->staging + r * shape.stride + mk_staged_at(n + i - r * pad)) = 0;
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
        if (has && (d->lane & (per - 1)) == 0) d->sh->head_rstd[r][s >> shift] = 1.0f / sqrtf(sum / (float)group + eps);
    }
}

/* The same from the trailers that mk_gather left at `off` of the staging area. Visible to all after the next barrier. */
MK_DEV void mk_head_norms_staged(const mk_dev *d, uint32_t off, uint32_t n, uint32_t heads, uint32_t group, float eps)
{
    const uint32_t shift = 31 - __clz((int)(n / heads));
    if (d->warp >= d->step->nrows) return;
    const float *t = (const float *)(d->sh->staging + off) + d->warp * n;
    for (uint32_t h = d->lane; h < heads; h += 32) {
        float sum = 0;
#pragma unroll 1
        for (uint32_t k = h << shift; k < (h + 1) << shift; k++) sum += t[k];
        d->sh->head_rstd[d->warp][h] = 1.0f / sqrtf(sum / (float)group + eps);
    }
}

/* Instructions that read the same vector with the same prologue gather it once. Returns whether it is staged; if not, the caller stages it now (keep: as a
 * whole). */
MK_DEV bool mk_staged(const mk_dev *d, const mk_wait *w, uint32_t in_off, uint32_t k, uint32_t prologue, uint32_t param_off, uint32_t planes, bool keep)
{
    const uint32_t step = d->step->seq, vector = w->vec | (uint32_t)w->pub << 16, norm = prologue | param_off << 2;
    mk_memo *m = d->memo;
    bool have = keep && m->staged.valid && m->staged.step == step && m->staged.vector == vector && m->staged.first == in_off && m->staged.k == k &&
                m->staged.norm == norm && m->staged.planes >= planes;
    __syncwarp();
    if (d->lane == 0 && !have) {
        m->staged.valid = keep;
        m->staged.step = step;
        m->staged.vector = vector;
        m->staged.first = in_off;
        m->staged.k = k;
        m->staged.norm = norm;
        m->staged.planes = planes; /* the first of three is what one would be */
        if (prologue == MK_PRO_RMS) m->parity ^= 1; /* sums of the vector before may still be read */
    }
    __syncwarp();
    return have;
}

/* ---- the product ---------------------------------------------------------------------------------------------------- */

#define MK_GROUPS      4u
#define MK_GROUP_WARPS (MK_WARPS / MK_GROUPS)
static_assert(MK_GROUP_WARPS == 4 && MK_STATIC_STAGES % MK_GROUPS == 0 && MK_EXPERT_STAGES % MK_GROUPS == 0, "a slot has one group");

typedef struct mk_tile {
    uint32_t wtype, rows, nkb, per, nst; /* K blocks, K blocks a stage, stages */
    uint32_t halves, nseg, phase;        /* scale segments: isa.h */
    uint32_t shift;                      /* K blocks a scale row: 1 << shift */
    uint32_t log_tiles;
} mk_tile;

/* stages: MK_STAGES_WORD of a static segment; 0: an expert's. */
MK_DEV mk_tile mk_tile_make(uint32_t wtype, uint32_t rows, uint32_t k, uint32_t halves, uint32_t nseg, uint32_t phase, uint32_t scale_k, uint32_t stages)
{
    mk_tile t;
    const uint32_t tiles = (rows + 15) / 16;
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
    t.log_tiles = tiles <= 1 ? 0 : tiles <= 2 ? 1 : tiles <= 4 ? 2 : 3;
    return t;
}

MK_DEV void mk_mma(float *c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* Four e4m3 codes as two bf16x2, each value times 2^-120: exponent and mantissa moved into place (subnormals become bf16 subnormals). `even` holds
 * codes 0 and 2, `odd` 1 and 3. */
MK_DEV void mk_fp8_open(uint32_t v, uint32_t *even, uint32_t *odd)
{
    *even = ((v << 4) & 0x07f007f0u) | ((v << 8) & 0x80008000u);
    *odd = ((v >> 4) & 0x07f007f0u) | (v & 0x80008000u);
}

#define MK_NO_NORM   15u
#define MK_NO_COLUMN 0xffffffffu

typedef struct mk_accs {
    float4 a, b; /* of the warp's first tile, of its second if there are more than four */
} mk_accs;

/* Not volatile, so that loads of the next K block may pass this one's arithmetic: addresses must come out of mk_after. */
MK_DEV uint4 mk_lds128(uint32_t at)
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

/* What a lane needs to walk a tile's K blocks: shared addresses. */
typedef struct mk_tile_walk {
    uint32_t w, skip;  /* matrix row i0 and, `skip` further, i0 + 8 */
    uint32_t c0, c1;   /* their scales */
    uint32_t x;        /* this lane's column */
} mk_tile_walk;

/* acc += the tile over K blocks way, way + ways, ... below nk of a stage. kb: the stage's first K block; kb_step, x_step: bytes to the next one of this
 * warp; scale_row: bytes. */
MK_DEV void mk_walk_tile(mk_tile_walk k, uint32_t form, uint32_t kb, uint32_t way, uint32_t ways, uint32_t nk, uint32_t kb_step, uint32_t x_step, uint32_t scale_row,
                         uint32_t plane, float4 *acc)
{
    const uint32_t shift = form >> 2 & 1, head_shift = form >> 12 & 15;
#pragma unroll 1
    for (uint32_t b = way; b < nk; b += ways, k.w += kb_step, k.x += x_step) {
        const uint4 w0 = mk_lds128(k.w), w1 = mk_lds128(k.w + k.skip);
        const uint32_t p[4] = {w0.x, w0.y, w0.z, w0.w}, q[4] = {w1.x, w1.y, w1.z, w1.w};
        float part[4] = {0, 0, 0, 0}, f0 = 1, f1 = 1, f2 = 1, f3 = 1;
        uint4 xa = mk_lds128(k.x);
        if (form & 1) {
            const uint4 xb = mk_lds128(k.x + 16);
            const uint32_t y[8] = {xa.x, xa.y, xa.z, xa.w, xb.x, xb.y, xb.z, xb.w};
            const uint32_t row = (((kb + b) >> shift) - (kb >> shift)) * scale_row;
            f0 = f1 = mk_lds(k.c0 + row);
            f2 = f3 = mk_lds(k.c1 + row);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t a0, a1, a2, a3;
                mk_fp8_open(p[i], &a0, &a2);
                mk_fp8_open(q[i], &a1, &a3);
                mk_mma(part, a0, a1, a2, a3, y[2 * i], y[2 * i + 1]);
            }
            if (plane) { /* rare: an f32 vector and FP8 weights */
#pragma unroll 1
                for (uint32_t pl = 1; pl < MK_PLANES_F32; pl++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        uint32_t a0, a1, a2, a3;
                        mk_fp8_open(p[i], &a0, &a2);
                        mk_fp8_open(q[i], &a1, &a3);
                        xa = mk_lds128(k.x + pl * plane + 16 * (i / 2));
                        mk_mma(part, a0, a1, a2, a3, i & 1 ? xa.z : xa.x, i & 1 ? xa.w : xa.y);
                    }
            }
        } else {
#pragma unroll 1
            for (uint32_t pl = 0;;) {
                mk_mma(part, __byte_perm(p[0], p[1], 0x5410), __byte_perm(q[0], q[1], 0x5410), __byte_perm(p[0], p[1], 0x7632),
                       __byte_perm(q[0], q[1], 0x7632), xa.x, xa.y);
                mk_mma(part, __byte_perm(p[2], p[3], 0x5410), __byte_perm(q[2], q[3], 0x5410), __byte_perm(p[2], p[3], 0x7632),
                       __byte_perm(q[2], q[3], 0x7632), xa.z, xa.w);
                if (!plane || ++pl == MK_PLANES_F32) break;
                xa = mk_lds128(k.x + pl * plane);
            }
        }
        if (head_shift != MK_NO_NORM) {
            const uint32_t norm = mk_smem(mk_sh()->head_rstd[2 * (threadIdx.x & 3)]) + 4 * ((kb + b) >> head_shift);
            const float n0 = mk_lds(norm), n1 = mk_lds(norm + 4 * MK_MAX_NORM_HEADS);
            f0 *= n0;
            f1 *= n1;
            f2 *= n0;
            f3 *= n1;
        }
        acc->x = __fmaf_rn(part[0], f0, acc->x);
        acc->y = __fmaf_rn(part[1], f1, acc->y);
        acc->z = __fmaf_rn(part[2], f2, acc->z);
        acc->w = __fmaf_rn(part[3], f3, acc->w);
    }
}

/* acc + this warp's tiles times the staged vector (times 2^60 with BF16 weights and 2^-60 with FP8: mk_red_put takes it back), over stages [s0, s1) of the
 * segment, whose first lies in slot `at` of the ring and whose stage s0 stands at the front of the staging area. form: mk_tile_form. x: this lane's column, an
 * offset in the staging area (lanes of columns without a row: MK_NO_COLUMN); planes follow each other at `plane` bytes (0: there is one). A leaf: it
 * calls nobody and spills nothing. */
MK_CALL mk_accs mk_product_of(uint32_t ring, uint32_t at, uint32_t form, uint32_t rows, uint32_t nkb, uint32_t per, uint32_t s0, uint32_t s1, uint32_t x, uint32_t plane,
                              mk_accs acc)
{
    mk_shared *sh = mk_sh();
    const uint32_t log_stages = ring == MK_TAPE ? MK_LOG_STATIC : MK_LOG_EXPERT, log_tiles = form >> 4 & 3, nseg = form >> 8 & 15, phase = form >> 16;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, l = lane & 3, member = warp % MK_GROUP_WARPS, group = warp / MK_GROUP_WARPS;
    const uint32_t first = s0 + ((group - at - s0) & (MK_GROUPS - 1)); /* this group's */
    if (first >= s1) return acc;
    const uint32_t log_side = log_tiles < 2 ? log_tiles : 2, ways = MK_GROUP_WARPS >> log_side, way = member >> log_side; /* along K */
    const uint32_t tile0 = member & ((1u << log_side) - 1), last = rows - 1, kb_bytes = rows * MK_KBLOCK_BYTES;
    const uint32_t log_x = form & 1 ? 7 : 6, half = form & 2 ? rows / 2 : rows, scale_row = (form & 2 ? 8 : 4) * nseg;
    const bool column = x != MK_NO_COLUMN;
    const uint32_t x0 = column ? mk_smem(sh->staging) + x + (l << (log_x - 2)) : mk_smem(sh->zero), x_kb = column ? 1u << log_x : 0;
    mk_tile_walk k[2]; /* against the first byte of a stage */
#pragma unroll
    for (uint32_t j = 0; j < 2; j++) {
        uint32_t i0 = (tile0 + 4 * j) * 16 + g, i1 = i0 + 8;
        i0 = i0 < last ? i0 : last;
        i1 = i1 < last ? i1 : last;
        k[j].w = way * kb_bytes + (l * rows + i0) * MK_QUARTER_BYTES;
        k[j].skip = (i1 - i0) * MK_QUARTER_BYTES;
        k[j].c0 = MK_STAGE_BYTES + 4 * (i0 >= half ? nseg + (phase + i0 - half) / MK_SCALE_ROWS : (phase + i0) / MK_SCALE_ROWS);
        k[j].c1 = MK_STAGE_BYTES + 4 * (i1 >= half ? nseg + (phase + i1 - half) / MK_SCALE_ROWS : (phase + i1) / MK_SCALE_ROWS);
    }
    const bool one = tile0 * 16 <= last, two = log_tiles == 3 && (tile0 + 4) * 16 <= last;
    const uint32_t ring0 = mk_smem(mk_stages(ring)), full = mk_smem(sh->full[ring]), empty = mk_smem(sh->empty[ring]);

#pragma unroll 1
    for (uint32_t s = first; s < s1; s += MK_GROUPS) {
        const uint32_t n = at + s, slot = n & ((1u << log_stages) - 1), kb = s * per, nk = nkb - kb < per ? nkb - kb : per;
        const uint32_t stage = ring0 + slot * MK_STAGE_STRIDE, ahead = x0 + (kb - s0 * per + way) * x_kb;
        mk_stage_wait(full + 8 * slot, n >> log_stages & 1, ring == MK_TAPE ? MK_FAULT_TAPE : MK_FAULT_EXPERT);
        const uint32_t there = mk_after(stage), x_at = mk_after(ahead), scales = there + (((kb >> (form >> 2 & 1)) * scale_row) & 15);
        if (one) {
            const mk_tile_walk w = {there + k[0].w, k[0].skip, scales + k[0].c0, scales + k[0].c1, x_at};
            mk_walk_tile(w, form, kb, way, ways, nk, ways * kb_bytes, ways * x_kb, scale_row, plane, &acc.a);
        }
        if (two) {
            const mk_tile_walk w = {there + k[1].w, k[1].skip, scales + k[1].c0, scales + k[1].c1, x_at};
            mk_walk_tile(w, form, kb, way, ways, nk, ways * kb_bytes, ways * x_kb, scale_row, plane, &acc.b);
        }
        __syncwarp();
        if (mk_arrives(lane)) mk_mbar_arrive(empty + 8 * slot);
    }
    return acc;
}
/* What mk_product_of needs to know of a tile, in a word. */
MK_DEV uint32_t mk_tile_form(const mk_tile *t, uint32_t head_shift)
{
    return (t->wtype == MK_W_FP8) | (t->halves == 2) << 1 | t->shift << 2 | t->log_tiles << 4 | t->nseg << 8 | head_shift << 12 | t->phase << 16;
}
MK_DEV mk_accs mk_product(uint32_t ring, uint32_t at, const mk_tile *t, uint32_t s0, uint32_t s1, uint32_t x, uint32_t plane, uint32_t head_shift, mk_accs acc)
{
    return mk_product_of(ring, at, mk_tile_form(t, head_shift), t->rows, t->nkb, t->per, s0, s1, x, plane, acc);
}
MK_DEV mk_accs mk_no_sum(void)
{
    mk_accs a = {make_float4(0, 0, 0, 0), make_float4(0, 0, 0, 0)};
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

/* Column of the staged vector that this lane feeds to the tensor core. */
MK_DEV uint32_t mk_column(const mk_dev *d, mk_stage_shape shape)
{
    uint32_t g = d->lane >> 2;
    return g < d->step->nrows ? g * shape.stride : MK_NO_COLUMN;
}

/* The vector of wait 0 as the instruction wants it, and how it is staged: whole if it fits, which is up to how many rows there are; else in chunks of
 * whole stages. */
typedef struct mk_input {
    uint32_t in_off, k, prologue, param_off, norm_group, planes;
    float eps;
} mk_input;

MK_DEV bool mk_staged_whole(const mk_input *x, uint32_t nrows)
{
    return (((x->k + 63) & ~63u) * 2 + 16) * nrows * x->planes <= MK_STAGING;
}
/* Stages of a chunk. */
MK_DEV uint32_t mk_staged_chunk(const mk_input *x, const mk_tile *t, uint32_t nrows)
{
    return mk_staged_whole(x, nrows) ? t->nst : mk_small_quot(mk_chunk_kblocks(t->wtype, x->planes), t->per);
}
MK_DEV mk_stage_shape mk_staged_shape(const mk_input *x, uint32_t values, uint32_t nrows)
{
    return mk_shape(mk_staged_whole(x, nrows) ? x->k : values, x->planes, nrows);
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
    x->planes = g->flags & MK_GEMV_X_F32 ? MK_PLANES_F32 : 1;
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
    x->planes = 1;
    x->eps = l->eps;
    *t = mk_tile_make(l->wtype, l->n, l->k, 1, l->nseg, l->phase, MK_SCALE_ROWS, in->pad);
}
/* Of GEMV and LM_HEAD. */
MK_DEV void mk_describe(const mk_insn *in, mk_tile *t, mk_input *x)
{
    if (in->opcode == MK_OP_LM_HEAD)
        mk_lm_head_describe(in, t, x);
    else
        mk_gemv_describe(in, t, x);
}

/* Stages the input of a GEMV or LM_HEAD, or its first chunk, unless the staging area holds it. All compute threads may read it then. Leaves 1/rms in
 * rstd[parity], visible after the next barrier. A function of its own: what it needs many registers for is over when the
 * product begins. */
MK_CALL void mk_stage_input(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_wait *w = &d->in->wait[0];
    const uint32_t nrows = d->step->nrows;
    mk_tile t;
    mk_input x;
    mk_describe(d->in, &t, &x);
    const bool rms = x.prologue == MK_PRO_RMS, heads = x.prologue == MK_PRO_HEADNORM, whole = mk_staged_whole(&x, nrows);
    const uint32_t n = mk_staged_chunk(&x, &t, nrows) * t.per << (t.wtype == MK_W_FP8 ? 6 : 5);
    const mk_stage_shape shape = mk_staged_shape(&x, n, nrows);
    if (mk_staged(d, w, x.in_off, x.k, x.prologue, x.param_off, x.planes, whole)) {
        mk_trace_input(d);
        return;
    }
    const bool trailers = heads && whole && nrows * (shape.stride + 4 * w->nslice) <= MK_STAGING;
    if (heads && !trailers) mk_head_norms(in, x.k / x.norm_group, x.norm_group, x.eps);
    mk_gather(in, x.in_off, x.k, 0, n < x.k ? n : x.k, rms ? x.param_off : MK_NO_PARAM, shape, (rms ? MK_GATHER_SUM : 0) | (trailers ? MK_GATHER_TRAILERS : 0));
    mk_sync();
    if (trailers) {
        mk_head_norms_staged(d, nrows * shape.stride, w->nslice, x.k / x.norm_group, x.norm_group, x.eps);
        mk_sync();
    }
    if (rms) mk_rstd_share(d, x.k, x.eps);
    mk_trace_input(d);
}

MK_DEV uint32_t mk_head_shift(const mk_input *x, const mk_tile *t)
{
    return x->prologue == MK_PRO_HEADNORM ? 31 - __clz((int)x->norm_group) - (t->wtype == MK_W_FP8 ? 6 : 5) : MK_NO_NORM;
}
/* A vector that does not fit: its first chunk is staged, the others are on the way. */
MK_CALL mk_accs mk_chunked_product(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    const uint32_t nrows = d->step->nrows, at = mk_ring_at(d, MK_TAPE);
    mk_tile t;
    mk_input x;
    mk_describe(in, &t, &x);
    const uint32_t log_values = t.wtype == MK_W_FP8 ? 6 : 5, chunk = mk_staged_chunk(&x, &t, nrows);
    const mk_stage_shape shape = mk_staged_shape(&x, chunk * t.per << log_values, nrows);
    mk_accs acc = mk_no_sum();
#pragma unroll 1
    for (uint32_t s = 0; s < t.nst; s += chunk) {
        const uint32_t end = t.nst - s < chunk ? t.nst : s + chunk, first = s * t.per << log_values, stop = end * t.per << log_values;
        if (s) {
            mk_sync(); /* the chunk before is consumed */
            mk_gather(in, x.in_off, x.k, first, (stop < x.k ? stop : x.k) - first, x.prologue == MK_PRO_RMS ? x.param_off : MK_NO_PARAM, shape, 0);
            mk_sync();
        }
        acc = mk_product(MK_TAPE, at, &t, s, end, mk_column(d, shape), shape.plane, mk_head_shift(&x, &t), acc);
    }
    return acc;
}

/* ---- adding the partial tiles --------------------------------------------------------------------------------------- */

/* A product takes [partial][warp or tile][row][MK_RED_STRIDE] floats of the reduction area: so many. */
MK_DEV uint32_t mk_red_size(const mk_dev *d, uint32_t log_tiles)
{
    return (log_tiles == 3 ? 8 : 4) * MK_GROUPS * d->step->nrows * MK_RED_STRIDE;
}
/* This warp's part of the product at float `base`; at: of its segment. */
MK_DEV void mk_red_put(const mk_dev *d, uint32_t base, const mk_tile *t, uint32_t at, mk_accs acc)
{
    const uint32_t g = d->lane >> 2, c = 2 * (d->lane & 3), nrows = d->step->nrows, size = t->log_tiles == 3 ? 8 : 4;
    const uint32_t partial = (d->warp / MK_GROUP_WARPS - at) & (MK_GROUPS - 1);
    if (partial >= t->nst) return;
    const float back = t->wtype == MK_W_FP8 ? 0x1p60f : 0x1p-60f;
    float *r = d->sh->red + base + ((partial * size + d->warp % MK_GROUP_WARPS) * nrows + c) * MK_RED_STRIDE + g;
#pragma unroll 1
    for (uint32_t k = 0; k < size; k += 4, acc.a = acc.b, r += 4 * nrows * MK_RED_STRIDE) {
        if (c < nrows) {
            r[0] = acc.a.x * back;
            r[8] = acc.a.z * back;
        }
        if (c + 1 < nrows) {
            r[MK_RED_STRIDE] = acc.a.y * back;
            r[MK_RED_STRIDE + 8] = acc.a.w * back;
        }
    }
}
/* Where an instruction of one product puts it: with up to half the rows the area's halves take turns, so that the next product may be put while this one is
 * read; with more, after a barrier. */
MK_DEV uint32_t mk_red_turn(const mk_dev *d)
{
    if (d->step->nrows > MK_MAX_ROWS / 2) {
        mk_sync();
        return 0;
    }
    const uint32_t turn = d->memo->turn ^ 1;
    __syncwarp();
    if (d->lane == 0) d->memo->turn = turn;
    return turn * (MK_RED_FLOATS / 2);
}
MK_DEV uint32_t mk_red_form(const mk_tile *t)
{
    return t->log_tiles | (t->nst < MK_GROUPS ? t->nst : MK_GROUPS) << 4;
}
/* Matrix row i of the product at `base`, column `row`; form: mk_red_form. */
MK_CALL float mk_red_get(uint32_t base, uint32_t form, uint32_t i, uint32_t row)
{
    const mk_shared *sh = mk_sh();
    const uint32_t nrows = sh->step.nrows, log_tiles = form & 3, step = (nrows * MK_RED_STRIDE) << log_tiles; /* from K way to K way, then from partial to partial */
    const float *r = sh->red + base + (i / 16 * nrows + row) * MK_RED_STRIDE + i % 16;
    float sum = 0;
#pragma unroll 4
    for (uint32_t k = (form >> 4) * (log_tiles < 2 ? MK_GROUP_WARPS >> log_tiles : 1); k; k--, r += step) sum = __fadd_rn(sum, *r);
    return sum;
}

#endif
