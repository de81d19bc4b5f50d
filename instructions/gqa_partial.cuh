/* GQA_PARTIAL on the device: an item is a KV head over one split (attention.cuh). Semantics: gqa_partial.c. */
#ifndef MK_GQA_PARTIAL_CUH
#define MK_GQA_PARTIAL_CUH

#include "instructions/attention.cuh"
#include "instructions/gqa_append.cuh"

template <uint32_t NH> MK_CALL void mk_gqa_items(const mk_insn *in) /* NH: heads on a KV head, by eight */
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_gqa *g = &d->in->gqa;
    const uint32_t dim = g->dim, floats = mk_partial_floats(dim);
    const mk_divisor kv_heads = mk_div_by(g->kv_heads);
    const uint32_t heads = g->heads / kv_heads.n, blocks = (dim + 31) / 32;
    float *rows = (float *)(d->sh->staging + mk_att_query_bytes(dim, 0)); /* queries as they come: of every head, all values of its blocks */
    const mk_att_share w = mk_att_deal(false, dim);
    float *param = (float *)((uint8_t *)mk_att_sh(d->sh) - MK_ATT_PARAM); /* of all items */
    const mk_att_queries of = {dim, 0, NH > 1};
    const mk_wait *cache = &d->in->wait[1];
#pragma unroll 1
    for (uint32_t r = 0; r < d->step->nrows; r++) {
        const mk_row *row = &d->step->row[r];
        const uint32_t per = mk_split_pages(row->pos), splits = row->pos / (MK_PAGE * per) + 1;
#pragma unroll 1
        for (uint32_t i = mk_att_first(g->part, g->parts, r); i < splits * kv_heads.n; i += g->parts) {
            const uint32_t split = mk_quot(i, kv_heads), kv = i - split * kv_heads.n;
            mk_att_regs regs;
            mk_att x;
            x.pages = d->a->page + (size_t)row->slot * d->a->max_pages;
            x.key_off = g->kv_off + 2 * mk_gqa_at(dim, kv, 0, 0);
            x.value_off = 2u * MK_PAGE * dim;
            x.bytes = 2u * dim;
            x.span = 4u * MK_PAGE * dim;
            x.nk = x.nv = dim;
            x.fine = 0;
            x.heads = heads;
            x.first = split * per * MK_PAGE;
            x.end = row->pos < x.first + per * MK_PAGE ? row->pos + 1 : x.first + per * MK_PAGE;
            x.scale = g->scale;
            x.dst = (float *)mk_bulk_at(d, d->in->signal_vec) + (((size_t)r * MK_MAX_SPLITS + split) * g->heads + kv * heads) * floats;
            mk_att_begin<false, NH>(d, &x, &w, cache, &regs);
            if (cache) mk_param_ask(param, d->a->param + g->param_off, mk_gqa_params(g));
            mk_param_there();
            if (cache) mk_sync();
            cache = 0;
#pragma unroll 1
            for (uint32_t h = d->warp; h < heads; h += MK_WARPS) {
                float *q = rows + h * 32 * blocks;
                if (dim + d->lane < 32 * blocks) q[dim + d->lane] = 0;
                mk_read_together(d, 0, r, g->q_off + (kv * heads + h) * g->q_stride, dim, q, d->lane, 32);
                mk_gqa_turn(d, g, param, row->pos, q);
#pragma unroll 2
                for (uint32_t c = 2 * d->lane; c < 32 * blocks; c += 64) {
                    const float2 y = *(const float2 *)(q + c);
                    mk_att_put(d->sh->staging, &of, h, c, y.x, y.y);
                }
            }
            mk_sync();
            mk_trace_input(d);
            mk_attend<false, NH>(d->sh, &regs);
        }
    }
}

MK_DEV void mk_gqa_partial_run(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    mk_staged_drop(d);
    if (in->gqa.heads <= 8 * in->gqa.kv_heads)
        mk_gqa_items<1>(in);
    else
        mk_gqa_items<2>(in);
    mk_bulk_signal(d, in->signal_vec);
}

#endif
