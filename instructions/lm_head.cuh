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

/* A row's statistics are a warp's; the others are needed for them no more once the sums are there. With one row they go on with the next piece, whose sums come to lie in the other half of the
 * reduction area: those behind it are put in this half, and before that is the next piece's barrier, which this warp comes to as well. Whose turn it is goes round, and from group to group, so
 * that nobody lags behind. (A traced step's piece ends when thread 0 is done with it.) */
MK_DEV uint32_t mk_lm_head_turn(uint32_t n)
{
    return (n & 1) * MK_GROUP_WARPS + (n >> 1) % MK_GROUP_WARPS;
}

/* Also for a step without rows that need logits, which has no product. */
MK_CALL uint32_t mk_lm_head_end(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    uint32_t form = 0, base = 0;
    if (d->step->any_logits) {
        if (!mk_static_done(d, &form, &base)) return mk_static_next(in, d->memo->chunk + 1);
        mk_sync();
        mk_trace_publish(d);
    }
    constexpr uint32_t PER = MK_SEGMENT_ROWS / 32;
    const mk_lm_head *l = &d->in->lm_head;
    const bool one = d->step->nrows == 1;
    const uint32_t n = l->n, r = one ? 0 : d->warp;
    float *logits = (float *)mk_bulk_at(d, l->logits_vec) + (size_t)r * l->vocab + l->row0;
    if (one && d->warp != mk_lm_head_turn(d->memo->n)) return 0;
    if (r < d->step->nrows) {
        float y[PER], max = -INFINITY, sum = 0;
        uint32_t id = 0xffffffffu;
        if (d->step->row[r].flags & MK_ROW_LOGITS) {
            const float norm = mk_row_factor(d, &mk_fed_of(in)->plan, r);
#pragma unroll
            for (uint32_t k = 0; k < PER; k++) {
                uint32_t i = d->lane + 32 * k;
                if (i >= n) continue;
                y[k] = mk_red_get(base, form, i, r) * norm;
                __stcg(logits + i, y[k]);
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
        }
        if (d->lane == 0) mk_stats_publish(d, r, max, id, sum);
    }
    one ? mk_bulk_signal_own(d, l->logits_vec) : mk_bulk_signal(d, l->logits_vec);
    return 0;
}

#endif
