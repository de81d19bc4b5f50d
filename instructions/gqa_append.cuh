/* GQA_APPEND on the device: the warps share the rows; of a row's warps, one half reads the key, the other the value; a single one both. Semantics: gqa_append.c. */
#ifndef MK_GQA_APPEND_CUH
#define MK_GQA_APPEND_CUH

#include "instructions/kv_append.cuh"

#define MK_GQA_DIM 256u /* values of a head at most */
/* Parameters of heads: gamma where there is a norm, then the frequencies of the pairs. */
MK_DEV uint32_t mk_gqa_params(const mk_gqa *g)
{
    return (g->norm ? g->dim : 0) + g->rope / 2;
}
/* One head's key or query in shared memory, by one warp: its norm, then its rotation on halves (rotary.h). The parameters stand in shared memory, too. */
MK_DEV void mk_gqa_turn(const mk_dev *d, const mk_gqa *g, const float *param, uint32_t pos, float *x)
{
    const uint32_t half = g->rope / 2, dim = g->dim;
    if (g->norm) {
        float sum = 0;
#pragma unroll
        for (uint32_t k = 0; k < MK_GQA_DIM / 32; k++) {
            const float v = d->lane + 32 * k < dim ? x[d->lane + 32 * k] : 0.0f;
            sum = __fmaf_rn(v, v, sum);
        }
        const float rstd = mk_rsqrtf(mk_div(mk_warp_sum(sum), (float)dim) + g->eps);
#pragma unroll 2
        for (uint32_t i = d->lane; i < dim; i += 32) x[i] = __fmul_rn(__fmul_rn(x[i], rstd), param[i]);
        __syncwarp();
        param += dim;
    }
#pragma unroll 1
    for (uint32_t i = d->lane; i < half; i += 32) mk_rotate_pair(x + i, x + i + half, param[i], pos);
    __syncwarp();
}

MK_CALL void mk_gqa_append_run(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_gqa *g = &d->in->gqa;
    const uint32_t dim = g->dim, all = mk_warps_a_row(d->step->nrows), both = all == 1, warps = both ? 1 : all / 2; /* warps of a key */
    const uint32_t r = d->warp / all, k = d->warp % all, value = k >= warps;
    float *x = (float *)d->sh->staging + (2 * r + value) * dim;
    const mk_row *row = &d->step->row[r];
    float *param = (float *)d->sh->staging + 2 * MK_MAX_ROWS * dim;
    uint32_t *to = 0;
    mk_staged_drop(d);
    mk_param_ask(param, d->a->param + g->param_off, mk_gqa_params(g));
    if (r < d->step->nrows) {
        if (k % warps == 0) {
            uint16_t *page = (uint16_t *)mk_kv_at(d, g->kv_off, row->slot, row->pos, 0);
            to = (uint32_t *)(page + mk_gqa_at(dim, g->head, value, row->pos % MK_PAGE));
        }
#pragma unroll 1
        for (uint32_t v = value; v <= (value | both); v++)
            mk_read_together(d, 0, r, (v ? g->v_off : g->k_off) + g->head * dim, dim, x + (v - value) * dim, k % warps * 32 + d->lane, warps * 32);
    }
    mk_param_there();
    mk_sync();
    mk_trace_input(d);
    if (to) {
        if (!value) mk_gqa_turn(d, g, param, row->pos, x);
#pragma unroll 2
        for (uint32_t i = d->lane; i < dim / 2; i += 32) {
            const float2 y = ((const float2 *)x)[i];
            to[i] = mk_bf16_pair(y.x, y.y);
        }
        if (both) {
            to = (uint32_t *)((uint16_t *)mk_kv_at(d, g->kv_off, row->slot, row->pos, 0) + mk_gqa_at(dim, g->head, 1, row->pos % MK_PAGE));
#pragma unroll 2
            for (uint32_t i = d->lane; i < dim / 2; i += 32) {
                const float2 y = ((const float2 *)(x + dim))[i];
                to[i] = mk_bf16_pair(y.x, y.y);
            }
        }
    }
    mk_bulk_signal(d, d->in->signal_vec);
}

#endif
