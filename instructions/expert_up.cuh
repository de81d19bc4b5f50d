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
    mk_up_slice s;
    s.j = mk_quot(slice, by_T);
    s.t = slice - s.j * by_T.n;
    s.row0 = mk_cut(s.t, inter, by_T);
    s.rows = mk_cut(s.t + 1, inter, by_T) - s.row0;
    return s;
}

/* Slices are dealt round: the worker's k-th is slice number worker + k * workers of the union's n_union * T. */
template <uint32_t FORM> MK_CALL void mk_up_of(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_fed *f = mk_fed_of(in);
    const mk_routes *routes = (const mk_routes *)mk_local_at(d, in->wait[1].vec);
    const mk_vec *out = &d->sh->vec[in->signal_vec];
    const uint32_t nrows = d->step->nrows, inter = in->expert.inter, workers = d->a->workers, size = MK_PARTS(nrows), slots = mk_small_quot(MK_RED_FLOATS, size);
    const mk_divisor by_T = {f->plan.magic, in->expert.T};
    const uint32_t all = routes->n_union * by_T.n, most = f->plan.tile.rows / 2, units = mk_units(most), every = nrows * units, x = mk_smem(d->sh->staging);
    mk_stage_input(in, true, 0, f->plan.x.k);
    mk_sync(); /* nobody reads the reduction area any more */
    mk_trace_input(d);

    mk_next ring = d->memo->next[MK_EXPERT];
#pragma unroll 1
    for (uint32_t next = d->worker; next < all;) {
        const uint32_t first = next;
        uint32_t n = 0;
#pragma unroll 1
        for (; n < slots && next < all; n++, next += workers) {
            const mk_up_slice s = mk_up_at(next, inter, by_T);
            mk_tile t = f->plan.tile;
            t.rows = 2 * s.rows;
            t.phase = s.row0 % MK_SCALE_ROWS;
            if (s.rows < most) {
                t.per = f->plan.less & 0xffffu;
                t.nst = f->plan.less >> 16;
            }
            const uint32_t at = ring.at;
            const mk_accs acc = mk_product<FORM>(MK_EXPERT, &ring, &t, 0, t.nst, x, mk_row_stride(f->plan.x.k), nrows, MK_NO_NORM, mk_no_sum());
            mk_parts_put(d, d->sh->red + n * size, t.rows, at, nrows, &acc);
            mk_trace_bytes(d, t.rows * t.nkb * MK_KBLOCK_BYTES);
        }
        mk_sync();
        mk_trace_publish(d);
        /* a warp a unit of a slice and row */
#pragma unroll 1
        for (uint32_t u = d->warp; u < n * every; u += MK_WARPS) {
            uint32_t slot = 0, r = 0, group = u;
            for (; group >= every; group -= every) slot++;
            for (; group >= units; group -= units) r++;
            const mk_up_slice s = mk_up_at(first + slot * workers, inter, by_T);
            const uint32_t i = group * MK_UNIT + d->lane, rank = routes->rank[r][s.j];
            if (rank == 255 || group * MK_UNIT >= s.rows) continue;
            const float norm = mk_row_factor(d, &f->plan, r), *red = d->sh->red + slot * size;
            float y = 0;
            if (i < s.rows && d->lane < MK_UNIT) y = mk_silu(mk_parts_sum(red, 2 * s.rows, i, r, nrows) * norm) * (mk_parts_sum(red, 2 * s.rows, s.rows + i, r, nrows) * norm);
            mk_publish_unit(out, f->place.out + (r * out->nslice + rank * by_T.n + s.t) * out->slice_packets, s.rows, group, y, f->place.out_epoch, d->lane);
        }
        mk_sync();
    }
    mk_ring_pass(d, MK_EXPERT, &ring);
}
MK_DEV void mk_expert_up_run(const mk_insn *in)
{
    if (in->expert.wtype == MK_W_FP8)
        mk_up_of<MK_X_F16>(in);
    else
        mk_up_of<MK_X_BF16>(in);
}

#endif
