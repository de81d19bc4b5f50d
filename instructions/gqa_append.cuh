/* GQA_APPEND on the device: one warp a row. Semantics: gqa_append.c. */
#ifndef MK_GQA_APPEND_CUH
#define MK_GQA_APPEND_CUH

#include "instructions/mk_math.h"
#include "megakernel/device.cuh"

/* One head's key or query in shared memory, by one warp: its norm, then its rotation on halves (rotary.h). */
MK_DEV void mk_gqa_turn(const mk_dev *d, const mk_gqa *g, uint32_t pos, float *x)
{
    const uint32_t dim = g->dim, half = g->rope / 2;
    const float *param = d->a->param + g->param_off;
    if (g->norm) {
        float sum = 0;
#pragma unroll 1
        for (uint32_t i = d->lane; i < dim; i += 32) sum = __fmaf_rn(x[i], x[i], sum);
        const float rstd = mk_rsqrtf(mk_warp_sum(sum) / (float)dim + g->eps);
#pragma unroll 1
        for (uint32_t i = d->lane; i < dim; i += 32) x[i] = __fmul_rn(__fmul_rn(x[i], rstd), __ldg(param + i));
        param += dim;
        __syncwarp();
    }
#pragma unroll 1
    for (uint32_t i = d->lane; i < half; i += 32) {
        float s, c, a = x[i], b = x[i + half];
        mk_sincosf(mk_mul((float)pos, __ldg(param + i)), &s, &c);
        x[i] = mk_add(mk_mul(a, c), -mk_mul(b, s));
        x[i + half] = mk_add(mk_mul(b, c), mk_mul(a, s));
    }
    __syncwarp();
}

MK_CALL void mk_gqa_append_run(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_gqa *g = &d->in->gqa;
    const uint32_t dim = g->dim, r = d->warp;
    mk_staged_drop(d);
    if (r < d->step->nrows) {
        const mk_row *row = &d->step->row[r];
        float *x = (float *)d->sh->staging + r * 2 * dim;
        mk_warp_read(&d->in->wait[0], r, g->k_off + g->head * dim, dim, x);
        mk_warp_read(&d->in->wait[0], r, g->v_off + g->head * dim, dim, x + dim);
        mk_trace_input(d);
        mk_gqa_turn(d, g, row->pos, x);
        uint16_t *page = (uint16_t *)mk_kv_at(d, g->kv_off, row->slot, row->pos, 0);
#pragma unroll 1
        for (uint32_t v = 0; v < 2; v++) {
            uint32_t *to = (uint32_t *)(page + mk_gqa_at(dim, g->head, v, row->pos % MK_PAGE));
            const float2 *from = (const float2 *)(x + v * dim);
#pragma unroll 1
            for (uint32_t i = d->lane; i < dim / 2; i += 32) to[i] = mk_bf16_bits(from[i].x) | mk_bf16_bits(from[i].y) << 16;
        }
    }
    mk_bulk_signal(d, d->in->signal_vec);
}

#endif
