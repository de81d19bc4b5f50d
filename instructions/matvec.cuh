/* What the matrix opcodes (GEMV, LM_HEAD, EXPERT_UP, EXPERT_DOWN) share on the device.
 *
 * A vector is staged in the form that its matrix' weights are multiplied in, up to eight rows of it:
 *   BF16 weights   bf16
 *   FP8 weights    f16, because e4m3 becomes f16 in one instruction a pair. What a warp gathers of a row is multiplied by the power of two that brings its largest value
 *                  below 2^15; a bf16 value has eight significant bits and f16 eleven, so that this is the bf16 value exactly down to 2^-29 of that largest one.
 * RMS norm commutes with the product: the staged values carry gamma, the sum of squares is taken while gathering, and the results are multiplied by 1/rms.
 * A head's norm (HEADNORM) multiplies the partial sums of the K blocks that lie in the head; so does the inverse of the power of two.
 *
 * A stage of a tape is consumed by a group of four warps: the group of its slot in the ring, so that a slot never changes hands (but for what all warps take of: pages of a latent cache, attention.cuh, and values of heads of 256 channels, gqa_partial.cuh). Stage s of a segment belongs to group
 * partial sum s mod 2, whichever group that is this time; within it the warps take K blocks in turn (and, of more than 64 rows, half the tiles each).
 * Partial sums are added in ascending order. So the order of every sum is a function of (tile, k) alone: rows come and go as columns of mma.sync without
 * touching each other's bits. Weights lie as ldmatrix wants them, [16-byte chunk of k][row][16 bytes] (instructions/isa.h); a tile of 16 rows may reach past the
 * segment's last row, and those results are not looked at. */
#ifndef MK_MATVEC_CUH
#define MK_MATVEC_CUH

#include "instructions/gather.cuh"
#include "instructions/mk_math.h"
#include "instructions/product.cuh"

/* ---- adding the partial sums ---------------------------------------------------------------------------------------- */

/* A product takes [partial][column][padded rows] floats of the reduction area: a partial sum a group and K way. */
MK_DEV uint32_t mk_red_rows(uint32_t rows)
{
    return (rows + 7) & ~7u;
}
/* This warp's part of the product at float `base`; at: of its segment. */
MK_DEV void mk_red_put(const mk_dev *d, uint32_t base, const mk_tile *t, uint32_t at, uint32_t cols, const mk_accs *acc)
{
    const uint32_t c = 2 * (d->lane & 3), stride = mk_red_rows(t->rows), partial = mk_group_first(d->warp, at), ways = mk_ways(t->rows), member = d->warp % MK_GROUP_WARPS;
    if (partial >= t->nst || c >= cols) return;
    const uint32_t row0 = (ways < MK_GROUP_WARPS ? (member >> 1) * MK_SIDE_ROWS : 0) + (d->lane >> 2);
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
#define MK_PARTS(cols) ((cols) * MK_WARPS * MK_SIDE_ROWS)
MK_DEV uint32_t mk_parts_log(uint32_t n)
{
    return n > MK_SIDE_ROWS ? 7 : 6;
}
/* This warp's part; at: of the first stage. mask: the columns that somebody asks for, which lie there one after the other. */
MK_DEV void mk_parts_put(const mk_dev *d, float *red, uint32_t n, uint32_t at, uint32_t mask, const mk_accs *acc)
{
    const uint32_t c = 2 * (d->lane & 3), log = mk_parts_log(n), group = mk_group_first(d->warp, at), member = d->warp % MK_GROUP_WARPS;
    const uint32_t partial = log == 7 ? group * 2 + (member & 1) : group * 4 + member, row0 = log == 7 ? (member >> 1) * MK_SIDE_ROWS : 0;
    const bool first = mask >> c & 1, second = mask >> c & 2;
    float *r = red + ((partial * __popc(mask) + __popc(mask & (1u << c) - 1)) << log) + row0 + (d->lane >> 2), *s = r + (first ? 1u << log : 0);
#pragma unroll
    for (uint32_t j = 0; j < MK_TILES; j++, r += 16, s += 16) {
        if (row0 + 16 * j >= n) break;
        if (first) r[0] = acc->tile[j].x, r[8] = acc->tile[j].z;
        if (second) s[0] = acc->tile[j].y, s[8] = acc->tile[j].w;
    }
}
/* Where this warp's part of one column begins, and where row i's sums do, as shared addresses: `red` is that of the area. */
MK_DEV uint32_t mk_part_at(uint32_t red, uint32_t n, uint32_t at)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = mk_group_first(warp, at), member = warp % MK_GROUP_WARPS;
    return red + (n > MK_SIDE_ROWS ? (group * 2 + (member & 1)) * 512 + (member >> 1) * 256 : (group * 4 + member) * 256) + lane; /* lanes 0, 4, 8 ...: rows 0, 1, 2 ... */
}
template <uint32_t NT> MK_DEV void mk_part_put(uint32_t at, uint32_t lane, const mk_accs *acc)
{
    if (lane & 3) return;
#pragma unroll
    for (uint32_t j = 0; j < NT; j++) {
        mk_sts32(at + 64 * j, __float_as_uint(acc->tile[j].x));
        mk_sts32(at + 64 * j + 32, __float_as_uint(acc->tile[j].z));
    }
}
/* A segment of one row times what is staged, from the ring's next stage on; the warp's part is put at `part`. tiles: mk_tiles_of its rows, as the whole warp knows it. */
template <uint32_t FORM, uint32_t NT>
MK_DEV void mk_product_put(uint32_t kind, mk_next *slot, const mk_tile *t, const mk_way *y, const mk_lap *lap, uint32_t x, uint32_t stride, uint32_t head_shift, uint32_t part, uint32_t lane)
{
    const mk_accs acc = mk_product_as<FORM, NT, true, false>(kind, slot, t, y, lap, 0, t->nst, x, stride, 1, head_shift, mk_no_sum());
    mk_part_put<NT>(part, lane, &acc);
}
template <uint32_t FORM>
MK_DEV void mk_product_one(uint32_t kind, mk_next *slot, const mk_tile *t, uint32_t tiles, const mk_way *y, const mk_lap *lap, uint32_t x, uint32_t stride, uint32_t head_shift, uint32_t part, uint32_t lane)
{
    if (tiles == 1)
        mk_product_put<FORM, 1>(kind, slot, t, y, lap, x, stride, head_shift, part, lane);
    else if (tiles == 2)
        mk_product_put<FORM, 2>(kind, slot, t, y, lap, x, stride, head_shift, part, lane);
    else if (tiles == 3)
        mk_product_put<FORM, 3>(kind, slot, t, y, lap, x, stride, head_shift, part, lane);
    else
        mk_product_put<FORM, 4>(kind, slot, t, y, lap, x, stride, head_shift, part, lane);
}
/* In the order of mk_red_get. at: of row i. */
MK_DEV float mk_part_get(uint32_t at, uint32_t n)
{
    const bool wide = n > MK_SIDE_ROWS;
    const uint32_t step = wide ? 512 : 256;
    float x[MK_WARPS], sum = 0;
#pragma unroll
    for (uint32_t p = 0; p < MK_WARPS; p++) x[p] = p < MK_WARPS / 2 ? __uint_as_float(mk_lds32(at + step * p)) : wide ? 0 : __uint_as_float(mk_lds32(at + 256 * p));
#pragma unroll
    for (uint32_t p = 0; p < MK_WARPS; p++) sum = __fadd_rn(sum, x[p]); /* never -0: 0 more changes nothing */
    return sum;
}
/* The same in the order of mk_parts_sum. WAYS: MK_WARPS, or half as many where there are two sides. */
template <uint32_t WAYS> MK_DEV float mk_part_tree(uint32_t at)
{
    float r[MK_WARPS];
#pragma unroll
    for (uint32_t p = 0; p < WAYS; p++) r[p] = __uint_as_float(mk_lds32(at + (256 * MK_WARPS / WAYS) * p));
    const float sum = __fadd_rn(__fadd_rn(r[0], r[1]), __fadd_rn(r[2], r[3]));
    return WAYS == 4 ? sum : __fadd_rn(sum, __fadd_rn(__fadd_rn(r[4], r[5]), __fadd_rn(r[6], r[7])));
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
    const uint32_t stages = mk_small_quot(mk_chunk_kblocks(p->tile.wtype), p->tile.per);
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
    mk_stage_input(mk_smem(in), c.whole, c.s0 * p->tile.per << (p->tile.wtype == MK_W_FP8 ? 6 : 5), mk_chunk_values(p, &c));
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
    mk_next slot = d->memo->next;
    const uint32_t at = slot.at;
    const mk_tile t = p->tile;
    const mk_chunk c = mk_chunk_of(p, nrows, d->memo->chunk);
    mk_accs acc = mk_no_sum();
    if (c.s0) {
#pragma unroll
        for (uint32_t k = 0; k < MK_TILES; k++) acc.tile[k] = mk_sums_at(d)[k];
        mk_sync(); /* a warp without work would put its part there at once */
    }
    acc = mk_product<FORM, true>(MK_FAULT_TAPE, &slot, &t, c.s0, c.s1, mk_smem(d->sh->staging), mk_row_stride(mk_chunk_values(p, &c)), nrows, p->head_shift, acc);
    mk_ring_pass(d, &slot);
    if (c.last) {
        mk_red_put(d, mk_red_base(d), &t, at - c.s0, nrows, &acc);
    } else {
#pragma unroll
        for (uint32_t k = 0; k < MK_TILES; k++) mk_sums_at(d)[k] = acc.tile[k];
    }
}
MK_DEV void mk_products(const mk_insn *in)
{
    mk_fed_of(in)->plan.x.form == MK_X_F16 ? mk_static_product<MK_X_F16>(in) : mk_static_product<MK_X_BF16>(in);
}

#endif
