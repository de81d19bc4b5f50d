/* EXPERT_UP on the device. Semantics: expert_up.c. Several slices are multiplied before they are reduced together. */
#ifndef MK_EXPERT_UP_CUH
#define MK_EXPERT_UP_CUH

#include "instructions/matvec.cuh"

/* mk_start (t, n, T) for T of `by`; t * n * T is below 2^32 here. */
MK_DEV uint32_t mk_cut(uint32_t t, uint32_t n, mk_divisor by)
{
    return mk_quot(t * n, by);
}

/* The worker's slices, in order: expert j of the union, slice t = first, first + workers, ... of it; shift: j * T modulo the workers. */
typedef struct mk_deal {
    uint32_t j, t, shift;
} mk_deal;
/* The first of expert p->j at least. */
MK_DEV uint32_t mk_deal_first(uint32_t shift, uint32_t worker, uint32_t workers)
{
    return worker >= shift ? worker - shift : worker + workers - shift;
}
/* The next slice at or after *p; false when there is none left. */
MK_DEV bool mk_deal_settle(mk_deal *p, uint32_t n_union, uint32_t T, uint32_t worker, uint32_t workers)
{
    while (p->t >= T) {
        if (++p->j >= n_union) return false;
        for (p->shift += T; p->shift >= workers; p->shift -= workers) {}
        p->t = mk_deal_first(p->shift, worker, workers);
    }
    return p->j < n_union;
}

MK_DEV void mk_expert_up_run(const mk_dev *d)
{
    const mk_expert *e = &d->in->expert;
    const mk_routes *routes = (const mk_routes *)mk_local_at(d, d->in->wait[1].vec);
    const mk_vec *out = &d->sh->vec[d->in->signal_vec];
    const uint32_t nrows = d->step->nrows, T = e->T, workers = d->a->workers, n_union = routes->n_union;
    const mk_stage_shape shape = mk_shape(e->k, 1, nrows);
    const mk_divisor by_T = mk_div_by(T);
    const mk_tile widest = mk_tile_make(e->wtype, 2 * mk_small_quot(e->inter + T - 1, T), e->k, 2, e->nseg, 0, MK_SCALE_ROWS, 0);
    const uint32_t size = mk_red_size(d, widest.log_tiles), slots = mk_small_quot(MK_RED_FLOATS, size);

    if (!mk_staged(d, &d->in->wait[0], 0, e->k, MK_PRO_RMS, e->param_off, 1, true)) {
        mk_gather(d->in, 0, e->k, 0, e->k, e->param_off, shape, MK_GATHER_SUM);
        mk_sync();
        mk_rstd_share(d, e->k, e->eps);
    }
    mk_sync();
    mk_trace_input(d);

    mk_deal at = {0, d->worker, 0};
    bool more = mk_deal_settle(&at, n_union, T, d->worker, workers);
    mk_tile t = widest;
    while (more) {
        mk_deal from = at;
        uint32_t ring = mk_ring_at(d, MK_EXPERT);
        uint32_t n = 0;
        for (; more && n < slots; n++) {
            uint32_t row0 = mk_cut(at.t, e->inter, by_T), rows = mk_cut(at.t + 1, e->inter, by_T) - row0;
            if (t.rows != 2 * rows) t = mk_tile_make(e->wtype, 2 * rows, e->k, 2, e->nseg, 0, MK_SCALE_ROWS, 0);
            t.phase = row0 % MK_SCALE_ROWS;
            mk_red_put(d, n * size, &t, ring, mk_product(MK_EXPERT, ring, &t, 0, t.nst, mk_column(d, shape), 0, MK_NO_NORM, mk_no_sum()));
            ring += t.nst;
            mk_trace_bytes(d, t.rows * t.nkb * MK_KBLOCK_BYTES);
            at.t += workers;
            more = mk_deal_settle(&at, n_union, T, d->worker, workers);
        }
        mk_ring_pass(d, MK_EXPERT, ring);
        mk_sync();
        mk_trace_publish(d);
        for (uint32_t slot = 0; slot < n; slot++) {
            uint32_t row0 = mk_cut(from.t, e->inter, by_T), rows = mk_cut(from.t + 1, e->inter, by_T) - row0, units = mk_units(rows);
            if (t.rows != 2 * rows) t = mk_tile_make(e->wtype, 2 * rows, e->k, 2, e->nseg, 0, MK_SCALE_ROWS, 0);
            for (mk_unit_at u = mk_unit_first((d->warp - 2 * slot) % MK_WARPS, units); u.row < nrows; mk_unit_next(&u, units)) {
                const uint32_t r = u.row, group = u.group, i = group * MK_UNIT + d->lane, rank = routes->rank[r][from.j];
                if (rank == 255) continue;
                float y = 0, norm = d->sh->rstd[d->memo->parity][r];
                if (i < rows && d->lane < MK_UNIT) y = mk_siluf(mk_red_get(slot * size, mk_red_form(&t), i, r) * norm) * (mk_red_get(slot * size, mk_red_form(&t), rows + i, r) * norm);
                mk_publish_unit(out, mk_signal_packets(d, out, r, rank * T + from.t), rows, group, y, mk_signal_epoch(d), d->lane);
            }
            from.t += workers;
            mk_deal_settle(&from, n_union, T, d->worker, workers);
        }
        mk_sync();
    }
}

#endif
