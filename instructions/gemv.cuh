/* GEMV on the device. Semantics: gemv.c. */
#ifndef MK_GEMV_CUH
#define MK_GEMV_CUH

#include "instructions/matvec.cuh"

MK_DEV void mk_gemv_run(mk_dev *d)
{
    const mk_insn *in = d->in;
    const mk_gemv *g = &in->gemv;
    const uint32_t nrows = d->step->nrows, n = g->n, silu = g->epilogue == MK_EPI_SILU, halves = silu ? 2 : 1, units = mk_units(n);
    const mk_vec *out = &d->sh->vec[in->signal_vec];
    const uint32_t planes = g->flags & MK_GEMV_X_F32 ? MK_PLANES_F32 : 1;
    const mk_tile t = mk_tile_make(g->wtype, n * halves, g->k, halves, g->nseg, g->phase, g->scale_k, planes);
    float acc[4] = {0, 0, 0, 0};
    const mk_input x = {g->in_off, g->k, g->prologue, g->param_off, g->norm_group, g->eps};

    if (planes == 1)
        mk_gathered_product<1>(d, &x, &t, acc);
    else
        mk_gathered_product<MK_PLANES_F32>(d, &x, &t, acc);
    mk_red_put(d, 0, acc);
    mk_sync();

    for (uint32_t u = d->warp; u < units * nrows; u += MK_WARPS) {
        uint32_t r = u / units, group = u - r * units, i = group * MK_UNIT + d->lane;
        bool has = i < n && d->lane < MK_UNIT;
        float norm = g->prologue == MK_PRO_RMS ? d->sh->rstd[d->parity][r] : 1.0f, y = 0;
        if (has) {
            y = mk_red_get(d, 0, &t, i, r) * norm * g->scale;
            if (silu) y = mk_siluf(y) * (mk_red_get(d, 0, &t, n + i, r) * norm * g->scale);
        }
        if (g->epilogue == MK_EPI_ADD) {
            const mk_wait *w = &in->wait[1];
            const mk_vec *rv = &d->sh->vec[w->vec];
            if (rv->scope == MK_LOCAL) {
                if (has) y += ((const float *)mk_local_at(d, w->vec))[r * n + i];
            } else if (has) {
                const uint4 *p = mk_wait_packets(d, w, rv, r) + i / 3;
                uint32_t epoch = mk_wait_epoch(d, w);
                mk_spin spin = {0, 0};
                uint4 q = mk_packet_load(p);
                while (q.w != epoch && mk_packet_spin(d, &spin, w, r, i / 3, epoch, q.w)) q = mk_packet_load(p);
                y += __uint_as_float(i % 3 == 0 ? q.x : i % 3 == 1 ? q.y : q.z);
            }
            __syncwarp();
        }
        if (out->scope == MK_LOCAL) {
            if (has) ((float *)mk_local_at(d, in->signal_vec))[r * n + i] = y;
        } else {
            mk_publish_unit(out, mk_signal_packets(d, out, r, in->signal_slice), n, group, y, mk_signal_epoch(d), d->lane);
        }
    }
}

#endif
