/* EXPERT_UP on the device. Semantics: expert_up.c. Several slices are multiplied before they are reduced together. */
#ifndef MK_EXPERT_UP_CUH
#define MK_EXPERT_UP_CUH

#include "instructions/matvec.cuh"

/* mk_start (t, n, T) for T of `by`; t * n * T is below 2^32 here. */
MK_DEV uint32_t mk_cut(uint32_t t, uint32_t n, mk_divisor by)
{
    return mk_quot(t * n, by);
}

/* Slices are dealt round: the worker's k-th is slice number worker + k * workers of the union's n_union * T. Lists those from `first` on; returns how many. The
 * list is there for all after the next barrier. */
MK_DEV uint32_t mk_up_list(const mk_dev *d, uint32_t first)
{
    const mk_expert *e = &d->in->expert;
    const mk_routes *routes = (const mk_routes *)mk_local_at(d, d->in->wait[1].vec);
    const uint32_t nrows = d->step->nrows, T = e->T, workers = d->a->workers, all = routes->n_union * T, begin = d->worker + first * workers;
    const mk_divisor by_T = mk_div_by(T);
    const uint32_t size = mk_red_size(2 * (mk_quot(e->inter - 1, by_T) + 1), nrows), slots = min(mk_small_quot(MK_RED_FLOATS, size), MK_MAX_JOBS);
    const uint32_t left = begin < all ? mk_small_quot(all - begin + workers - 1, workers) : 0, n = min(left, slots), i = d->tid;
    if (i < n) {
        const uint32_t slice = begin + i * workers, j = mk_quot(slice, by_T), t = slice - j * T, row0 = mk_cut(t, e->inter, by_T);
        mk_job *job = &d->sh->job[i];
        job->rows = 2 * (mk_cut(t + 1, e->inter, by_T) - row0);
        job->phase = row0 % MK_SCALE_ROWS;
        job->stages = mk_slice_stages(e->wtype, job->rows, e->k);
        job->x = mk_smem(d->sh->staging);
        job->cols = nrows;
        job->base = i * size;
        job->j = j;
        job->t = t;
    }
    if (i == 0) d->sh->next_job = first + n;
    return n;
}

MK_CALL uint32_t mk_expert_up_begin(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    const uint32_t n = mk_up_list(d, 0);
    mk_stage_input(in, true, 0, in->expert.k);
    mk_sync(); /* it may have been staged before */
    mk_trace_input(d);
    return n;
}
MK_CALL uint32_t mk_expert_up_end(const mk_insn *in, uint32_t n)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_expert *e = &in->expert;
    const mk_routes *routes = (const mk_routes *)mk_local_at(d, in->wait[1].vec);
    const mk_vec *out = &d->sh->vec[in->signal_vec];
    const uint32_t nrows = d->step->nrows, epoch = mk_signal_epoch(d);
    if (!n) return 0;
    mk_sync();
    mk_trace_publish(d);
    /* a warp a unit of a slice and row */
    const uint32_t units = mk_units(mk_small_quot(e->inter + e->T - 1, e->T)), every = nrows * units;
    for (uint32_t u = d->warp; u < n * every; u += MK_WARPS) {
        const uint32_t slot = u / every, left = u - slot * every, r = left / units, group = left - r * units;
        const mk_job *job = &d->sh->job[slot];
        const uint32_t rows = job->rows / 2, i = group * MK_UNIT + d->lane, rank = routes->rank[r][job->j], form = mk_red_form_of(job->rows, job->stages >> 16, nrows);
        if (rank == 255 || group * MK_UNIT >= rows) continue;
        const float norm = mk_row_factor(d, &mk_fed_of(in)->plan, r);
        float y = 0;
        if (i < rows && d->lane < MK_UNIT) y = mk_silu(mk_red_get(job->base, form, i, r) * norm) * (mk_red_get(job->base, form, rows + i, r) * norm);
        mk_publish_unit(out, mk_signal_packets(d, out, r, rank * e->T + job->t), rows, group, y, epoch, d->lane);
    }
    const uint32_t next = d->sh->next_job;
    mk_sync();
    n = mk_up_list(d, next);
    if (n) mk_sync();
    return n;
}

#endif
