/* EXPERT_DOWN on the device. Semantics: expert_down.c. One product over all chosen experts: a (expert, row) pair's input is staged like a row of a vector, the columns of
 * mma.sync are the batch rows, and a K block's partial product is added with its pair's routing weight, experts in ascending id. A row that did not choose the expert
 * keeps its sum as it was. If not all pairs fit the staging area the experts come in batches; sums stay in registers.
 * A warp gathers a pair alone, so that no barrier is needed before its power of two (matvec.cuh) is known: every pair has its own.
 * An expert's segment has an even number of stages (the last one may be empty: gpu.cu, expert_seg), so that each of its stages has one group of warps whatever lies before
 * it in the ring: the order of a row's sum depends on nothing but the row's own choice. */
#ifndef MK_EXPERT_DOWN_CUH
#define MK_EXPERT_DOWN_CUH

#include "instructions/matvec.cuh"

/* Of a batch, by (expert, row): the weight times the inverse of the pair's power of two, MK_NOT_CHOSEN: none; and behind them where the pair is staged. At the end of the
 * reduction area. */
#define MK_DOWN_MOST  48u /* pairs of a batch */
#define MK_DOWN_PAIRS (MK_DOWN_MOST * MK_MAX_ROWS)
#define MK_DOWN_TABLE (MK_RED_FLOATS - 2 * MK_DOWN_PAIRS)
#define MK_NOT_CHOSEN 0xffffffffu /* bits that no product has */
static_assert(MK_DOWN_TABLE >= MK_PARTS(MK_MAX_ROWS) && MK_DOWN_TABLE * 4 >= MK_COMPUTE * 16, "partial sums before the table; room for what mk_pair_gather throws away");

static_assert(MK_MAX_ROWS == MK_WARPS && MK_STAGING / (MK_STAGED_VALUES * 2 + 32) >= MK_WARPS, "an expert of all rows is staged at once, a pair a warp");

#define MK_PAIR_PACKETS 7u /* of a lane, under way at once */

/* A row's experts publish `per` packets each. */
typedef struct mk_pairs_walk {
    const uint16_t *start;
    const uint4 *base;
    uint32_t per, row_packets, epoch;
    mk_divisor by_slice;
} mk_pairs_walk;
MK_DEV mk_pairs_walk mk_pairs_walk_of(const mk_dev *d)
{
    const mk_wait *w = &d->in->wait[0];
    const mk_vec *v = &d->sh->vec[w->vec];
    mk_pairs_walk k;
    k.start = d->sh->start + v->start_index;
    k.base = mk_fed_of(d->in)->place.in[0];
    k.per = mk_small_quot(v->nslice, d->in->expert.topk) * v->slice_packets;
    k.row_packets = v->nslice * v->slice_packets;
    k.epoch = mk_fed_of(d->in)->place.epoch[0];
    k.by_slice = mk_div_by_slice(v);
    return k;
}

/* A warp brings the values of row r's choice `rank` to shared address `to`, in order, as they are. A slice's last packet may write beyond its values: they come backwards, so
 * that what belongs there is written later. Packets are asked for beyond the pair's as well: memory goes on (gpu.cu). */
MK_DEV void mk_pair_gather(const mk_dev *d, const mk_pairs_walk *w, uint32_t r, uint32_t rank, uint32_t to)
{
    const uint32_t first = rank * w->per, none = mk_smem(d->sh->red) + d->tid * 16;
    const uint4 *from = w->base + r * w->row_packets + first;
#pragma unroll 1
    for (uint32_t i = d->lane; i - d->lane < w->per; i += 32 * MK_PAIR_PACKETS) {
        uint4 q[MK_PAIR_PACKETS];
        uint32_t at[MK_PAIR_PACKETS], wanted = 0;
        const uint4 *p = from + i;
#pragma unroll
        for (uint32_t j = 0; j < MK_PAIR_PACKETS; j++) q[j] = mk_packet_load(p + 32 * j);
        __syncwarp(); /* all asked for before anything else is done */
#pragma unroll
        for (uint32_t j = 0; j < MK_PAIR_PACKETS; j++) {
            const uint32_t p = min(i + 32 * j, w->per - 1), s = mk_quot(p, w->by_slice), v = w->start[s] + (p - s * w->by_slice.n) * 6, end = w->start[s + 1];
            at[j] = i + 32 * j < w->per && v < end ? to + 2 * v : none;
            wanted |= at[j] != none ? 1u << j : 0;
        }
        mk_packets_wait_every(p, 32, wanted, w->epoch, 0, r, first + i, q);
#pragma unroll
        for (int k = 5; k >= 0; k--) {
            __syncwarp();
#pragma unroll
            for (uint32_t j = 0; j < MK_PAIR_PACKETS; j++) {
                const uint32_t word = k < 2 ? q[j].x : k < 4 ? q[j].y : q[j].z;
                mk_sts16(at[j] + 2 * k, k & 1 ? word >> 16 : word);
            }
        }
    }
}

/* From there it becomes a staged row, in place: k values, zeros up to the end of the K block. Returns the inverse of the power of two that they were multiplied by. */
template <uint32_t FORM> MK_DEV float mk_pair_open(uint32_t lane, uint32_t row, uint32_t k)
{
    const uint32_t bytes = ((k + 63) & ~63u) * 2;
    __syncwarp();
#pragma unroll 1
    for (uint32_t i = 2 * k + 2 * lane; i < bytes; i += 64) mk_sts16(row + i, 0);
    if (FORM != MK_X_F16) return 1;
    __syncwarp();
    uint32_t top = 0;
#pragma unroll 1
    for (uint32_t i = lane * 16; i < bytes; i += 512) {
        const uint4 q = mk_lds128(row + i);
        top = __vmaxu2(top, __vmaxu2(__vmaxu2(mk_magnitudes(q.x), mk_magnitudes(q.y)), __vmaxu2(mk_magnitudes(q.z), mk_magnitudes(q.w))));
    }
    const mk_f16_shift shift = mk_f16_shift_of(__reduce_max_sync(0xffffffffu, mk_top_of(top)));
#pragma unroll 1
    for (uint32_t i = lane * 16; i < bytes; i += 512) {
        const uint4 q = mk_lds128(row + i);
        mk_sts64(row + i, mk_f16_pair_shifted(q.x, shift.less), mk_f16_pair_shifted(q.y, shift.less));
        mk_sts64(row + i + 8, mk_f16_pair_shifted(q.z, shift.less), mk_f16_pair_shifted(q.w, shift.less));
    }
    return shift.inverse;
}

/* Stages the pairs [p0, p1), whose experts begin with j0 and end before j1, and makes their table. */
template <uint32_t FORM> MK_DEV void mk_pairs_stage(const mk_dev *d, const mk_routes *routes, uint32_t p0, uint32_t p1, uint32_t j0, uint32_t j1)
{
    const mk_pairs *pairs = &d->sh->pairs;
    const mk_pairs_walk w = mk_pairs_walk_of(d);
    const uint32_t staging = mk_smem(d->sh->staging), k = d->in->expert.k, stride = mk_row_stride(k), nrows = d->step->nrows;
    uint32_t *table = (uint32_t *)d->sh->red + MK_DOWN_TABLE;
#pragma unroll 1
    for (uint32_t i = d->tid; nrows > 1 && i < (j1 - j0) * MK_MAX_ROWS; i += MK_COMPUTE) {
        const uint32_t r = i % MK_MAX_ROWS;
        if (r < nrows && routes->rank[r][j0 + i / MK_MAX_ROWS] != 255) continue;
        table[i] = MK_NOT_CHOSEN;
        table[MK_DOWN_PAIRS + i] = staging; /* not looked at, but loaded */
    }
#pragma unroll 1
    for (uint32_t p = p0 + d->warp; p < p1; p += MK_WARPS) {
        const uint32_t r = pairs->row[p], rank = pairs->rank[p], to = staging + (p - p0) * stride, at = (pairs->expert[p] - j0) * MK_MAX_ROWS + r;
        mk_pair_gather(d, &w, r, rank, to);
        const float inverse = mk_pair_open<FORM>(d->lane, to, k);
        if (d->lane == 0) {
            table[at] = __float_as_uint(__fmul_rn(routes->weight[r][rank], inverse));
            table[MK_DOWN_PAIRS + at] = to;
        }
    }
}

/* As mk_tile_add, of the columns that have chosen the expert. */
MK_DEV void mk_tile_add_chosen(float4 *sum, const float *part, float f0, float f1, float n0, float n1, bool chosen0, bool chosen1)
{
    sum->x = chosen0 ? __fmaf_rn(part[0], f0 * n0, sum->x) : sum->x;
    sum->y = chosen1 ? __fmaf_rn(part[1], f0 * n1, sum->y) : sum->y;
    sum->z = chosen0 ? __fmaf_rn(part[2], f1 * n0, sum->z) : sum->z;
    sum->w = chosen1 ? __fmaf_rn(part[3], f1 * n1, sum->w) : sum->w;
}

/* acc + this warp's NT tiles of a batch of experts, whose stages are the ring's next. */
template <uint32_t FORM, uint32_t NT> MK_DEV mk_accs mk_down_product_as(const mk_tile *t, mk_next *slot, uint32_t experts, uint32_t cols, mk_accs acc)
{
    constexpr bool FP8 = FORM == MK_X_F16;
    mk_shared *sh = mk_sh();
    const mk_lap lap = sh->lap[MK_EXPERT];
    const uint32_t rows = t->rows, nkb = t->nkb, per = t->per, nst = t->nst, kb_bytes = rows * MK_KBLOCK_BYTES, scale_row = 4 * t->nseg;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, l = lane & 3, member = warp % MK_GROUP_WARPS, first = (warp / MK_GROUP_WARPS - slot->at) & (MK_GROUPS - 1);
    const bool sides = rows > 16 * MK_TILES;
    const uint32_t ways = sides ? MK_GROUP_WARPS / 2 : MK_GROUP_WARPS, way = member & (ways - 1), row0 = sides ? (member >> 1) * 16 * MK_TILES : 0;
    const uint32_t row_at = (lane >> 4) * rows * 16 + (row0 + (lane & 15)) * 16; /* of ldmatrix: chunk lane / 16, row lane % 16 */
    uint32_t c[2 * NT], pair = mk_smem(sh->red + MK_DOWN_TABLE);
#pragma unroll
    for (uint32_t i = 0; i < 2 * NT; i++) c[i] = FP8 ? mk_scale_of(row0 + 8 * i + g, rows, rows, t->nseg, t->phase) - lap.scales : 0;

#pragma unroll 1
    for (uint32_t j = 0; j < experts; j++, pair += 4 * MK_MAX_ROWS) {
        const uint32_t table = mk_after(pair);
        const float n0 = mk_lds(table + 8 * l), n1 = mk_lds(table + 8 * l + 4);
        const uint32_t column = __float_as_uint(mk_lds(table + 4 * MK_DOWN_PAIRS + 4 * mk_ldx_column<FP8>(lane, cols))) + mk_ldx_at<FP8>(lane);
        const bool chosen0 = __float_as_uint(n0) != MK_NOT_CHOSEN, chosen1 = __float_as_uint(n1) != MK_NOT_CHOSEN;
        uint32_t turn = first ? per : 0; /* K blocks of the partial sum before: a function of k alone */
#pragma unroll 1
        for (uint32_t s = first; s < nst; s += MK_GROUPS, turn += per) {
            const uint32_t kb = s * per, end = min(kb + per, nkb);
            mk_stage_wait(slot->bar, slot->phase, MK_FAULT_EXPERT);
            const uint32_t b0 = (way - turn) & (ways - 1);
            uint32_t w = mk_after(slot->stage + row_at) + b0 * kb_bytes, xk = mk_after(column) + (kb + b0) * (FP8 ? 128 : 64);
            const uint32_t scales = mk_after(slot->stage);
#pragma unroll 1
            for (uint32_t k = kb + b0; k < end; k += ways, w += ways * kb_bytes, xk += ways * (FP8 ? 128 : 64)) {
                float part[NT][4];
                const uint4 v0 = FP8 ? mk_ldx_f16(xk) : mk_ldx_bf16(xk), v1 = FP8 ? mk_ldx_f16(xk + 64) : v0;
                if (FP8) {
                    mk_fp8_tiles<NT> b;
                    mk_fp8_load<NT>(&b, w, rows, scales + (k >> 1) * scale_row, c);
                    if (k + ways >= end) mk_stage_leave(slot->bar + MK_EMPTY, lane);
#pragma unroll
                    for (uint32_t i = 0; i < NT; i++) mk_tile_product_fp8(part[i], b.w[i], v0, v1);
#pragma unroll
                    for (uint32_t i = 0; i < NT; i++) mk_tile_add_chosen(&acc.tile[i], part[i], b.f[2 * i], b.f[2 * i + 1], n0, n1, chosen0, chosen1);
                } else {
#pragma unroll
                    for (uint32_t i = 0; i < NT; i++) {
                        uint32_t a[4], b[4];
                        mk_tile_product(part[i], w + 256 * i, rows, v0, a, b);
                    }
#pragma unroll
                    for (uint32_t i = 0; i < NT; i++) mk_tile_add_chosen(&acc.tile[i], part[i], 1, 1, n0, n1, chosen0, chosen1);
                }
            }
            if (!FP8 || kb + b0 >= end) mk_stage_leave(slot->bar + MK_EMPTY, lane);
            mk_next_move(slot, &lap);
        }
    }
    slot->at += experts * nst;
    return acc;
}
template <uint32_t FORM> MK_DEV mk_accs mk_down_product(const mk_tile *t, mk_next *slot, uint32_t experts, uint32_t cols, mk_accs acc)
{
    const uint32_t tiles = (t->rows + 15) / 16; /* with two sides: all four, of which the second's last may be none */
    if (tiles == 1) return mk_down_product_as<FORM, 1>(t, slot, experts, cols, acc);
    if (tiles == 2) return mk_down_product_as<FORM, 2>(t, slot, experts, cols, acc);
    if (tiles == 3) return mk_down_product_as<FORM, 3>(t, slot, experts, cols, acc);
    return mk_down_product_as<FORM, 4>(t, slot, experts, cols, acc);
}

template <uint32_t FORM> MK_CALL void mk_down_of(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_fed *f = mk_fed_of(in);
    const mk_tile t = f->plan.tile;
    const mk_routes *routes = (const mk_routes *)mk_local_at(d, in->wait[1].vec);
    const mk_vec *from = &d->sh->vec[in->wait[2].vec], *out = &d->sh->vec[in->signal_vec];
    const uint32_t nrows = d->step->nrows, n = t.rows, n_union = routes->n_union, units = mk_units(n), epoch = f->place.epoch[2], from_row = from->nslice * from->slice_packets;
    const uint32_t fit = mk_small_quot(MK_STAGING, mk_row_stride(in->expert.k)), most = min(fit & ~(MK_WARPS - 1), MK_DOWN_MOST); /* at least one expert with all rows */
    const bool local = from->scope == MK_LOCAL;
    const mk_unit_at u0 = mk_unit_first(d->warp, units);
    const uint32_t i0 = u0.group * MK_UNIT + d->lane;
    uint4 look = make_uint4(0, 0, 0, epoch + 1); /* what the products are added to, asked for long before it is needed */
    if (!local && u0.row < nrows && i0 < n && d->lane < MK_UNIT) look = mk_packet_load(f->place.in[2] + u0.row * from_row + i0 / 3);
    mk_staged_drop(d);
    mk_sync(); /* nobody reads the reduction area any more */

    mk_accs acc = mk_no_sum();
    mk_next slot = d->memo->next[MK_EXPERT];
    const uint32_t at0 = slot.at;
#pragma unroll 1
    for (uint32_t j = 0; j < n_union;) {
        const uint32_t p0 = d->sh->pairs.first[j];
        uint32_t next = min(j + most, n_union);
#pragma unroll 1
        while (d->sh->pairs.first[next] - p0 > most) next--;
        if (j) mk_sync(); /* the batch before is multiplied */
        mk_pairs_stage<FORM>(d, routes, p0, d->sh->pairs.first[next], j, next);
        mk_sync();
        if (!j) mk_trace_input(d);
        mk_trace_bytes(d, (next - j) * n * t.nkb * MK_KBLOCK_BYTES);
        acc = mk_down_product<FORM>(&t, &slot, next - j, nrows, acc);
        j = next;
    }
    mk_ring_pass(d, MK_EXPERT, &slot);
    mk_parts_put(d, d->sh->red, n, at0, nrows, &acc);
    mk_sync();
    mk_trace_publish(d);
#pragma unroll 1
    for (mk_unit_at u = u0; u.row < nrows; mk_unit_next(&u, units)) {
        const uint32_t r = u.row, i = u.group * MK_UNIT + d->lane;
        float y = 0;
        if (i < n && d->lane < MK_UNIT) {
            if (local) {
                y = ((const float *)mk_local_at(d, in->wait[2].vec))[r * n + i];
            } else {
                look = mk_packet_get(f->place.in[2] + r * from_row + i / 3, look, epoch, 2, r, i / 3);
                y = __uint_as_float(i % 3 == 0 ? look.x : i % 3 == 1 ? look.y : look.z);
                look.w = epoch + 1;
            }
            y = __fadd_rn(y, mk_parts_sum(d->sh->red, n, i, r, nrows));
        }
        __syncwarp();
        mk_publish_unit(out, f->place.out + r * out->nslice * out->slice_packets, n, u.group, y, f->place.out_epoch, d->lane);
    }
}
MK_DEV void mk_expert_down_run(const mk_insn *in)
{
    if (in->expert.wtype == MK_W_FP8)
        mk_down_of<MK_X_F16>(in);
    else
        mk_down_of<MK_X_BF16>(in);
}

#endif
