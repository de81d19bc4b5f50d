/* COMBINE on the device: a thread an output value. Semantics: combine.c. */
#ifndef MK_COMBINE_CUH
#define MK_COMBINE_CUH

#include "instructions/mk_math.h"
#include "megakernel/device.cuh"

MK_DEV void mk_combine_run(const mk_dev *d)
{
    const mk_mla *m = &d->in->mla;
    const mk_vec *out = &d->sh->vec[d->in->signal_vec];
    const uint32_t latent = m->latent, floats = mk_partial_floats(latent), n = m->n, units = mk_units(n);
    const size_t stride = (size_t)m->all_heads * floats;
    mk_staged_drop(d);
    mk_bulk_wait(d, &d->in->wait[0]);
    const float *bulk = (const float *)mk_bulk_at(d, d->in->wait[0].vec);
    for (mk_unit_at u = mk_unit_first(d->warp, units); u.row < d->step->nrows; mk_unit_next(&u, units)) {
        const uint32_t r = u.row, group = u.group, i = group * MK_UNIT + d->lane;
        const float *part = bulk + ((size_t)r * MK_MAX_SPLITS * m->all_heads + m->head0) * floats;
        uint32_t splits = mk_splits(d->step->row[r].pos);
        float max = -INFINITY, sum = 0, y = 0;
        for (uint32_t s = d->lane; s < splits; s += 32) max = fmaxf(max, __ldcg(part + s * stride + latent));
#pragma unroll
        for (int k = 16; k; k >>= 1) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, k));
        for (uint32_t s = 0; s < splits; s++) {
            const float *p = part + s * stride;
            float w = mk_expf(__ldcg(p + latent) - max);
            sum = __fmaf_rn(w, __ldcg(p + latent + 1), sum);
            if (i < n && d->lane < MK_UNIT) y = __fmaf_rn(w, __ldcg(p + m->first + i), y);
        }
        y /= sum;
        if (m->gate) {
            const uint32_t left = n - group * MK_UNIT;
            float *g = (float *)d->sh->staging + d->warp * 32;
            mk_warp_read(&d->in->wait[1], r, m->in_off + m->head0 * m->qk_stride + m->first + group * MK_UNIT, left < MK_UNIT ? left : MK_UNIT, g);
            if (i < n && d->lane < MK_UNIT) y *= mk_sigmoidf(g[d->lane]);
            __syncwarp();
        }
        mk_publish_unit(out, mk_signal_packets(d, out, r, d->in->signal_slice), n, group, y, mk_signal_epoch(d), d->lane);
    }
    mk_sync();
}

#endif
