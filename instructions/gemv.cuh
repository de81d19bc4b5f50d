/* GEMV on the device. Semantics: gemv.c. */
#ifndef MK_GEMV_CUH
#define MK_GEMV_CUH

#include "instructions/matvec.cuh"

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
    *t = mk_tile_make(g->wtype, g->n * halves, g->k, halves, g->nseg, g->phase, g->scale_k, x->planes);
}

/* One f32 value of a wait's first slice. */
MK_DEV float mk_gemv_value(const mk_dev *d, const mk_wait *w, uint32_t row, uint32_t i)
{
    const uint4 q = mk_packet_wait(mk_wait_packets(d, w, &d->sh->vec[w->vec], row) + i / 3, w, row, i / 3, mk_wait_epoch(d, w));
    return __uint_as_float(i % 3 == 0 ? q.x : i % 3 == 1 ? q.y : q.z);
}

/* Epilogue: units of 30 values, a warp each. */
MK_DEV void mk_gemv_finish(const mk_dev *d, const mk_tile *t)
{
    const mk_insn *in = d->in;
    const mk_gemv *g = &in->gemv;
    const mk_vec *out = &d->sh->vec[in->signal_vec];
    const uint32_t nrows = d->step->nrows, n = g->n, units = mk_units(n), epilogue = g->epilogue;
    for (mk_unit_at u = mk_unit_first(d->warp, units); u.row < nrows; mk_unit_next(&u, units)) {
        const uint32_t r = u.row, group = u.group, i = group * MK_UNIT + d->lane;
        const bool has = i < n && d->lane < MK_UNIT;
        const float norm = (g->prologue == MK_PRO_RMS ? d->sh->rstd[d->memo->parity][r] : 1.0f) * g->scale;
        float y = 0, gate = 1;
        if (epilogue == MK_EPI_GATED) { /* one f32 value of wait 2; every lane looks it up */
            const mk_wait *w = &in->wait[2];
            const mk_vec *gv = &d->sh->vec[w->vec];
            const uint16_t *start = d->sh->start + gv->start_index + w->slice0;
            const uint32_t s = mk_find_slice(start, w->nslice, g->gate_off, d->lane), at = g->gate_off - start[s], p = s * gv->slice_packets + at / 3;
            const uint4 q = mk_packet_wait(mk_wait_packets(d, w, gv, r) + p, w, r, p, mk_wait_epoch(d, w));
            gate = mk_sigmoidf(__uint_as_float(at % 3 == 0 ? q.x : at % 3 == 1 ? q.y : q.z));
        }
        if (has) {
            y = mk_red_get(d, 0, t, i, r) * norm;
            if (epilogue == MK_EPI_SILU) y = mk_siluf(y) * (mk_red_get(d, 0, t, n + i, r) * norm);
            if (epilogue == MK_EPI_ADD || epilogue == MK_EPI_GATED) {
                const mk_wait *w = &in->wait[1];
                const float res = d->sh->vec[w->vec].scope == MK_LOCAL ? ((const float *)mk_local_at(d, w->vec))[r * n + i] : mk_gemv_value(d, w, r, i);
                y = __fadd_rn(res, __fmul_rn(gate, y));
            }
        }
        __syncwarp();
        if (out->scope == MK_LOCAL) {
            if (has) ((float *)mk_local_at(d, in->signal_vec))[r * n + i] = y;
        } else {
            mk_publish_unit(out, mk_signal_packets(d, out, r, in->signal_slice), n, group, y, mk_signal_epoch(d), d->lane);
        }
    }
}

#endif
