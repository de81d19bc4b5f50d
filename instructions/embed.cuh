/* EMBED on the device. Semantics: embed.c. */
#ifndef MK_EMBED_CUH
#define MK_EMBED_CUH

#include "megakernel/device.cuh"

MK_DEV void mk_embed_run(const mk_dev *d)
{
    const mk_embed *e = &d->in->embed;
    const mk_vec *out = &d->sh->vec[d->in->signal_vec];
    uint32_t units = mk_units(e->n);
    for (mk_unit_at u = mk_unit_first(d->warp, units); u.row < d->step->nrows; mk_unit_next(&u, units)) {
        const uint32_t r = u.row, group = u.group, i = group * MK_UNIT + d->lane;
        uint64_t at = (uint64_t)d->step->row[r].token * e->hidden + e->first + i;
        float y = 0;
        if (i < e->n && d->lane < MK_UNIT) {
            if (e->wtype == MK_F32)
                y = __ldg((const float *)(d->a->embed + e->embed_off) + at);
            else
                y = mk_bf16_value(__ldg((const uint16_t *)(d->a->embed + e->embed_off) + at));
            y *= e->scale;
        }
        mk_publish_unit(out, mk_signal_packets(d, out, r, d->in->signal_slice), e->n, group, y, mk_signal_epoch(d), d->lane);
    }
}

#endif
