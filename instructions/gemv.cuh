/* GEMV on the device. Semantics: gemv.c. */
#ifndef MK_GEMV_CUH
#define MK_GEMV_CUH

#include "instructions/matvec.cuh"

/* A first look, well before it is needed, at the packet of the residual that this lane adds to in its warp's first unit. */
MK_DEV uint4 mk_gemv_look(const mk_dev *d)
{
    const mk_gemv *g = &d->in->gemv;
    const mk_wait *w = &d->in->wait[1];
    const mk_unit_at u = mk_unit_first(d->warp, mk_units(g->n));
    const uint32_t i = u.group * MK_UNIT + d->lane;
    uint4 q = make_uint4(0, 0, 0, mk_wait_epoch(d, w) + 1); /* nothing yet */
    if ((g->epilogue == MK_EPI_ADD || g->epilogue == MK_EPI_GATED) && d->sh->vec[w->vec].scope != MK_LOCAL && u.row < d->step->nrows && i < g->n &&
        d->lane < MK_UNIT)
        q = mk_packet_load(mk_wait_packets(d, w, &d->sh->vec[w->vec], u.row) + i / 3);
    return q;
}

/* After the product: units of 30 values, a warp each. */
MK_CALL uint32_t mk_gemv_end(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    uint32_t form, base;
    if (!mk_static_done(d, &form, &base)) return mk_static_next(in, d->memo->chunk + 1);
    uint4 look = mk_gemv_look(d);
    mk_sync();
    mk_trace_publish(d);
    const mk_gemv *g = &in->gemv;
    const mk_vec *out = &d->sh->vec[in->signal_vec];
    const uint32_t nrows = d->step->nrows, n = g->n, units = mk_units(n), epilogue = g->epilogue;
    for (mk_unit_at u = mk_unit_first(d->warp, units); u.row < nrows; mk_unit_next(&u, units)) {
        const uint32_t r = u.row, group = u.group, i = group * MK_UNIT + d->lane;
        const bool has = i < n && d->lane < MK_UNIT;
        const float norm = mk_row_factor(d, &mk_fed_of(in)->plan, r) * g->scale;
        float y = 0, gate = 1;
        if (epilogue == MK_EPI_GATED) { /* one f32 value of wait 2; every lane looks it up */
            const mk_wait *w = &in->wait[2];
            const mk_vec *gv = &d->sh->vec[w->vec];
            const uint16_t *start = d->sh->start + gv->start_index + w->slice0;
            const uint32_t s = mk_find_slice(start, w->nslice, g->gate_off, d->lane), at = g->gate_off - start[s], p = s * gv->slice_packets + at / 3;
            const uint4 *from = mk_wait_packets(d, w, gv, r) + p, q = mk_packet_get(from, mk_packet_load(from), mk_wait_epoch(d, w), 2, r, p);
            gate = mk_sigmoid(__uint_as_float(at % 3 == 0 ? q.x : at % 3 == 1 ? q.y : q.z));
        }
        if (has) {
            y = mk_red_get(base, form, i, r) * norm;
            if (epilogue == MK_EPI_SILU) y = mk_silu(y) * (mk_red_get(base, form, n + i, r) * norm);
            if (epilogue == MK_EPI_ADD || epilogue == MK_EPI_GATED) {
                const mk_wait *w = &in->wait[1];
                float res;
                if (d->sh->vec[w->vec].scope == MK_LOCAL) {
                    res = ((const float *)mk_local_at(d, w->vec))[r * n + i];
                } else {
                    look = mk_packet_get(mk_wait_packets(d, w, &d->sh->vec[w->vec], r) + i / 3, look, mk_wait_epoch(d, w), 1, r, i / 3);
                    res = __uint_as_float(i % 3 == 0 ? look.x : i % 3 == 1 ? look.y : look.z);
                }
                y = __fadd_rn(res, __fmul_rn(gate, y));
            }
        }
        look.w = mk_wait_epoch(d, &in->wait[1]) + 1; /* of this unit alone */
        __syncwarp();
        if (out->scope == MK_LOCAL) {
            if (has) ((float *)mk_local_at(d, in->signal_vec))[r * n + i] = y;
        } else {
            mk_publish_unit(out, mk_signal_packets(d, out, r, in->signal_slice), n, group, y, mk_signal_epoch(d), d->lane);
        }
    }
    return 0;
}


#endif
