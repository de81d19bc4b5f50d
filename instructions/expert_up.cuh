/* EXPERT_UP on the device. Semantics: expert_up.c. As many slices as there is room for partial sums of are multiplied before they are reduced together. */
#ifndef MK_EXPERT_UP_CUH
#define MK_EXPERT_UP_CUH

#include "instructions/matvec.cuh"

/* mk_start (t, n, T) for T of `by`; t * n * T is below 2^32 here. */
MK_DEV uint32_t mk_cut(uint32_t t, uint32_t n, mk_divisor by)
{
    return mk_quot(t * n, by);
}

/* A slice of an expert. */
typedef struct mk_up_slice {
    uint32_t j, t, row0, rows; /* of the union; slice; its first row, rows of gate or up */
} mk_up_slice;
MK_DEV mk_up_slice mk_up_at(uint32_t slice, uint32_t inter, mk_divisor by_T)
{
    const uint32_t log = mk_expert_log(inter, by_T.n);
    mk_up_slice s;
    s.j = mk_quot(slice, by_T);
    s.t = slice - s.j * by_T.n;
    s.row0 = mk_cut(s.t, inter >> log, by_T) << log; /* mk_expert_start */
    s.rows = (mk_cut(s.t + 1, inter >> log, by_T) << log) - s.row0;
    return s;
}

/* A slice's product: its tile of the plan's. */
MK_DEV mk_tile mk_up_tile(const mk_plan *p, const mk_up_slice *s)
{
    mk_tile t = p->tile;
    t.phase = s->row0 % MK_SCALE_ROWS;
    if (2 * s->rows < t.rows) {
        t.per = p->less & 0xffffu;
        t.nst = p->less >> 16;
    }
    t.rows = 2 * s->rows;
    return t;
}

/* Slices are dealt round: the worker's k-th is slice number worker + k * workers of the union's n_union * T. Partial sums are kept of the rows that have chosen the expert. */
template <uint32_t FORM> MK_CALL void mk_up_of(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_fed *f = mk_fed_of(in);
    const mk_routes *routes = (const mk_routes *)mk_local_at(d, in->wait[1].vec);
    const mk_pairs *pairs = &d->sh->pairs;
    const mk_vec *out = &d->sh->vec[in->signal_vec];
    const uint32_t nrows = d->step->nrows, inter = in->expert.inter, workers = d->a->workers;
    const mk_divisor by_T = {f->plan.magic, in->expert.T};
    const uint32_t all = routes->n_union * by_T.n, units = mk_units(f->plan.tile.rows / 2), x = mk_smem(d->sh->staging);
    mk_stage_input(mk_smem(in), true, 0, f->plan.x.k);
    mk_sync(); /* nobody reads the reduction area any more */
    mk_trace_input(d);

    mk_next ring = d->memo->next;
#pragma unroll 1
    for (uint32_t next = d->worker; next < all;) {
        const uint32_t first = next;
        uint32_t cols = 0;
#pragma unroll 1
        for (; next < all; next += workers) {
            const mk_up_slice s = mk_up_at(next, inter, by_T);
            const uint32_t p0 = pairs->first[s.j], p1 = pairs->first[s.j + 1];
            if ((cols + p1 - p0) * MK_PARTS(1) > MK_RED_FLOATS) break;
            uint32_t mask = 0;
            for (uint32_t p = p0; p < p1; p++) mask |= 1u << pairs->row[p];
            const mk_tile t = mk_up_tile(&f->plan, &s);
            const uint32_t at = ring.at;
            const mk_accs acc = mk_product<FORM, false>(MK_FAULT_EXPERT, &ring, &t, 0, t.nst, x, mk_row_stride(f->plan.x.k), nrows, MK_NO_NORM, mk_no_sum());
            mk_parts_put(d, d->sh->red + cols * MK_PARTS(1), t.rows, at, mask, &acc);
            mk_trace_bytes(d, t.rows * t.nkb * MK_KBLOCK_BYTES);
            cols += p1 - p0;
        }
        mk_sync();
        mk_trace_publish(d);
        /* a warp a unit of a slice and row */
        uint32_t u = d->warp;
#pragma unroll 1
        for (uint32_t slice = first, before = 0; before < cols; slice += workers) {
            const mk_up_slice s = mk_up_at(slice, inter, by_T);
            const uint32_t p0 = pairs->first[s.j], n = pairs->first[s.j + 1] - p0;
            const float *red = d->sh->red + before * MK_PARTS(1);
#pragma unroll 1
            for (; u < n * units; u += MK_WARPS) {
                const uint32_t c = mk_small_quot(u, units), group = u - c * units, r = pairs->row[p0 + c], i = group * MK_UNIT + d->lane;
                if (group * MK_UNIT >= s.rows) continue;
                const float norm = mk_row_factor(d, &f->plan, r);
                float y = 0;
                if (i < s.rows && d->lane < MK_UNIT) y = mk_silu(mk_parts_sum(red, 2 * s.rows, i, c, n) * norm) * (mk_parts_sum(red, 2 * s.rows, s.rows + i, c, n) * norm);
                mk_publish_unit(out, f->place.out + (r * out->nslice + pairs->rank[p0 + c] * by_T.n + s.t) * out->slice_packets, s.rows, group, y, f->place.out_epoch, d->lane);
            }
            u -= n * units;
            before += n;
        }
        mk_sync();
    }
    mk_ring_pass(d, &ring);
}
/* gate and up of a slice's row, whose sums lie `to_up` bytes apart: silu (gate * norm) * (up * norm). WAYS: partial sums of each. */
template <uint32_t WAYS> MK_DEV float mk_up_value(uint32_t at, uint32_t to_up, float norm)
{
    const float gate = mk_part_tree<WAYS>(at), up = mk_part_tree<WAYS>(at + to_up);
    return mk_silu(gate * norm) * (up * norm);
}
/* One row. Sums lie in the half of the reduction area whose turn it is, as those of GEMVs do, so that no barrier guards them; where a unit goes is known to its warp before
 * the products are there: a row's choices are the union's experts in that order, so a slice has the number of its packets. */
template <uint32_t FORM> MK_CALL void mk_up_one(uint32_t insn)
{
    const mk_fed *given = mk_fed_of(mk_insn_at(insn));
    if (!mk_is_staged(given)) insn = mk_stage_input(insn, true, 0, given->plan.x.k); /* by ROUTE, mostly */
    const mk_insn *in = mk_insn_at(insn);
    const mk_dev here = mk_here(in), *d = &here;
    const mk_fed *f = mk_fed_of(in);
    const mk_routes *routes = (const mk_routes *)mk_local_at(d, in->wait[1].vec);
    const uint32_t inter = in->expert.inter, workers = d->a->workers, x = mk_smem(d->sh->staging), slice_bytes = d->sh->vec[in->signal_vec].slice_packets * 16;
    const mk_divisor by_T = {f->plan.magic, in->expert.T};
    const uint32_t all = routes->n_union * by_T.n, units = mk_units(f->plan.tile.rows / 2), turn = d->memo->turn;
    const uint32_t slot = units == 1 ? d->warp : units == 2 ? d->warp / 2 : mk_small_quot(d->warp, units), group = d->warp - slot * units; /* of the warp's first unit */
    const uint32_t red = mk_smem(d->sh->red) + (turn & 1) * (MK_RED_FLOATS * 2);
    mk_trace_input(d);

    mk_next ring = d->memo->next;
    if (f->place.run & MK_AWAITS) mk_next_skip(&ring, &d->sh->lap, f->plan.pass);
    const float norm = mk_row_factor(d, &f->plan, 0);
    uint32_t first = d->worker;
#pragma unroll 1
    do {
        uint32_t n = 0, next = first, u = slot, g = group, i = group * MK_UNIT + d->lane;
        mk_up_slice s = mk_up_at(min(first + u * workers, all - 1), inter, by_T);
        uint8_t *to = (uint8_t *)f->place.out + (first + u * workers) * slice_bytes;
        mk_keep(&s.rows);
        to = mk_keep_at(to);
#pragma unroll 1
        for (; n < MK_RED_FLOATS / 2 / MK_PARTS(1) && next < all; n++, next += workers) {
            const mk_up_slice slice = mk_up_at(next, inter, by_T);
            const mk_tile t = mk_up_tile(&f->plan, &slice);
            uint32_t part = mk_part_at(red + n * (4 * MK_PARTS(1)), t.rows, ring.at);
            mk_keep(&part);
            const mk_lap lap = d->sh->lap;
            const mk_way way = mk_way_of<FORM == MK_X_F16>(&t, ring.at);
            if (n == 0) mk_stagger(&way);
            mk_product_one<FORM>(MK_FAULT_EXPERT, &ring, &t, mk_uniform(mk_tiles_of(t.rows)), &way, &lap, x, mk_row_stride(f->plan.x.k), MK_NO_NORM, part, d->lane);
            mk_trace_bytes(d, t.rows * t.nkb * MK_KBLOCK_BYTES);
        }
        mk_sync();
        if (first == d->worker) mk_trace_publish(d);
#pragma unroll 1
        while (u < n) {
            const uint32_t at = red + u * (4 * MK_PARTS(1)) + 4 * i;
            float y = 0;
            if (i < s.rows && d->lane < MK_UNIT) y = 2 * s.rows > MK_SIDE_ROWS ? mk_up_value<MK_WARPS / 2>(at, 4 * s.rows, norm) : mk_up_value<MK_WARPS>(at, 4 * s.rows, norm);
            __syncwarp();
            if (g * MK_UNIT < s.rows) mk_publish_at((uint4 *)to, false, s.rows, g, y, f->place.out_epoch, d->lane);
            for (g += MK_WARPS; g >= units; g -= units) u++;
            if (u >= n) break;
            i = g * MK_UNIT + d->lane;
            s = mk_up_at(first + u * workers, inter, by_T);
            to = (uint8_t *)f->place.out + (first + u * workers) * slice_bytes;
        }
        first = next;
        if (first < all) mk_sync(); /* the sums are read */
    } while (first < all);
    if (f->place.run & MK_AWAITS) mk_aside_await(d->sh, f);
    __syncwarp();
    if (d->lane == 0) {
        d->memo->next = ring;
        d->memo->turn = turn ^ 1;
    }
    __syncwarp();
}
MK_DEV void mk_expert_up_run(const mk_insn *in)
{
    in->expert.wtype == MK_W_FP8 ? mk_up_of<MK_X_F16>(in) : mk_up_of<MK_X_BF16>(in);
}

#endif
