/* GQA_APPEND on the device: the warps share the rows; of a row's warps, one half reads the key, the other the value. Semantics: gqa_append.c. */
#ifndef MK_GQA_APPEND_CUH
#define MK_GQA_APPEND_CUH

#include "instructions/kv_append.cuh"

/* What one warp needs of the parameters to turn a head's key or query: asked for before the values are there. */
#define MK_GQA_DIM 256u /* at most */
typedef struct mk_gqa_param {
    float gamma[MK_GQA_DIM / 32]; /* of values lane + 32 k */
    float freq;                   /* of pair `lane` */
} mk_gqa_param;
MK_DEV mk_gqa_param mk_gqa_ask(const mk_dev *d, const mk_gqa *g)
{
    const float *param = d->a->param + g->param_off;
    mk_gqa_param p;
    p.freq = 0;
#pragma unroll
    for (uint32_t k = 0; k < MK_GQA_DIM / 32; k++) {
        p.gamma[k] = 0;
        if (g->norm && d->lane + 32 * k < g->dim) p.gamma[k] = __ldg(param + d->lane + 32 * k);
    }
    if (d->lane < g->rope / 2) p.freq = __ldg(param + (g->norm ? g->dim : 0) + d->lane);
    return p;
}

/* One head's key or query in shared memory, by one warp: its norm, then its rotation on halves (rotary.h). */
MK_DEV void mk_gqa_turn(const mk_dev *d, const mk_gqa *g, const mk_gqa_param *p, uint32_t pos, float *x)
{
    const uint32_t half = g->rope / 2;
    if (g->norm) {
        float v[MK_GQA_DIM / 32], sum = 0;
#pragma unroll
        for (uint32_t k = 0; k < MK_GQA_DIM / 32; k++) {
            v[k] = d->lane + 32 * k < g->dim ? x[d->lane + 32 * k] : 0.0f;
            sum = __fmaf_rn(v[k], v[k], sum);
        }
        const float rstd = mk_rsqrtf(mk_warp_sum(sum) / (float)g->dim + g->eps);
#pragma unroll
        for (uint32_t k = 0; k < MK_GQA_DIM / 32; k++)
            if (d->lane + 32 * k < g->dim) x[d->lane + 32 * k] = __fmul_rn(__fmul_rn(v[k], rstd), p->gamma[k]);
        __syncwarp();
    }
    float freq = p->freq;
#pragma unroll 1
    for (uint32_t i = d->lane; i < half; i += 32) {
        float s, c, a = x[i], b = x[i + half], next = 0;
        if (i + 32 < half) next = __ldg(d->a->param + g->param_off + (g->norm ? g->dim : 0) + i + 32);
        mk_sincosf(mk_mul((float)pos, freq), &s, &c);
        x[i] = mk_add(mk_mul(a, c), -mk_mul(b, s));
        x[i + half] = mk_add(mk_mul(b, c), mk_mul(a, s));
        freq = next;
    }
    __syncwarp();
}

MK_CALL void mk_gqa_append_run(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_gqa *g = &d->in->gqa;
    const uint32_t dim = g->dim, warps = mk_warps_a_row(d->step->nrows) / 2, r = d->warp / (2 * warps), k = d->warp % (2 * warps), value = k >= warps;
    float *x = (float *)d->sh->staging + (2 * r + value) * dim;
    const mk_row *row = &d->step->row[r];
    mk_gqa_param p;
    uint32_t *to = 0;
    mk_staged_drop(d);
    if (r < d->step->nrows) {
        if (k % warps == 0) {
            uint16_t *page = (uint16_t *)mk_kv_at(d, g->kv_off, row->slot, row->pos, 0);
            to = (uint32_t *)(page + mk_gqa_at(dim, g->head, value, row->pos % MK_PAGE));
            if (!value) p = mk_gqa_ask(d, g);
        }
        mk_read_together(&d->in->wait[0], r, (value ? g->v_off : g->k_off) + g->head * dim, dim, x, k % warps * 32 + d->lane, warps * 32);
    }
    mk_sync();
    mk_trace_input(d);
    if (to) {
        if (!value) mk_gqa_turn(d, g, &p, row->pos, x);
#pragma unroll 2
        for (uint32_t i = d->lane; i < dim / 2; i += 32) {
            const float2 y = ((const float2 *)x)[i];
            to[i] = mk_pack_bf16(y.x, y.y);
        }
    }
    mk_bulk_signal(d, d->in->signal_vec);
}

#endif
