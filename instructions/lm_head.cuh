/* LM_HEAD on the device: one warp a row writes the logits of the slice and takes their maximum and sum of exponentials. Semantics: lm_head.c. */
#ifndef MK_LM_HEAD_CUH
#define MK_LM_HEAD_CUH

#include "instructions/matvec.cuh"

/* Four words of statistics: two packets. */
MK_DEV void mk_stats_publish(const mk_dev *d, uint32_t row, float max, uint32_t id, float sum)
{
    const mk_vec *v = &d->sh->vec[d->in->signal_vec];
    uint4 *p = mk_signal_packets(d, v, row, d->in->signal_slice);
    uint32_t epoch = mk_signal_epoch(d);
    mk_packet_store(p, __float_as_uint(max), id, __float_as_uint(sum), epoch);
    mk_packet_store(p + 1, 0, 0, 0, epoch);
}

MK_DEV void mk_lm_head_run(mk_dev *d)
{
    constexpr uint32_t PER = MK_SEGMENT_ROWS / 32;
    const mk_lm_head *l = &d->in->lm_head;
    const uint32_t nrows = d->step->nrows, n = l->n, r = d->warp;
    float *logits = (float *)mk_bulk_at(d, l->logits_vec);

    if (d->step->any_logits) {
        const mk_tile t = mk_tile_make(l->wtype, n, l->k, 1, l->nseg, l->phase, MK_SCALE_ROWS, 1);
        const mk_input x = {0, l->k, MK_PRO_RMS, l->param_off, 0, l->eps};
        float acc[4] = {0, 0, 0, 0};
        mk_gathered_product<1>(d, &x, &t, acc);
        mk_red_put(d, 0, acc);
        mk_sync();
        if (r < nrows && (d->step->row[r].flags & MK_ROW_LOGITS)) {
            float y[PER], max = -INFINITY, sum = 0, norm = d->sh->rstd[d->parity][r];
            uint32_t id = 0xffffffffu;
#pragma unroll
            for (uint32_t k = 0; k < PER; k++) {
                uint32_t i = d->lane + 32 * k;
                if (i >= n) continue;
                y[k] = mk_red_get(d, 0, &t, i, r) * norm;
                __stcg(logits + (size_t)r * l->vocab + l->row0 + i, y[k]);
                if (y[k] > max || id == 0xffffffffu) {
                    max = y[k];
                    id = l->row0 + i;
                }
            }
#pragma unroll
            for (int m = 16; m; m >>= 1) { /* ties to the lower id */
                float om = __shfl_xor_sync(0xffffffffu, max, m);
                uint32_t oi = __shfl_xor_sync(0xffffffffu, id, m);
                if (om > max || (om == max && oi < id)) {
                    max = om;
                    id = oi;
                }
            }
#pragma unroll
            for (uint32_t k = 0; k < PER; k++)
                if (d->lane + 32 * k < n) sum += mk_expf(y[k] - max);
            sum = mk_warp_sum(sum);
            if (d->lane == 0) mk_stats_publish(d, r, max, id, sum);
        }
    }
    if (r < nrows && d->lane == 0 && !(d->step->row[r].flags & MK_ROW_LOGITS)) mk_stats_publish(d, r, -INFINITY, 0xffffffffu, 0.0f);
    mk_bulk_signal(d, l->logits_vec);
}

#endif
