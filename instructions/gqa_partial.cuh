/* GQA_PARTIAL on the device: an item is a KV head over one split (attention.cuh). Semantics: gqa_partial.c. */
#ifndef MK_GQA_PARTIAL_CUH
#define MK_GQA_PARTIAL_CUH

#include "instructions/attention.cuh"
#include "instructions/gqa_append.cuh"

MK_CALL void mk_gqa_partial_run(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_gqa *g = &d->in->gqa;
    const uint32_t dim = g->dim, floats = mk_partial_floats(dim);
    const mk_divisor kv_heads = mk_div_by(g->kv_heads);
    const uint32_t heads = g->heads / kv_heads.n, blocks = (dim + 31) / 32;
    /* queries as they come: of every head, all values of its blocks; several warps read a head, all but the waiter */
    float *rows = (float *)(d->sh->staging + mk_att_query_bytes(dim, 0));
    const uint32_t warps = heads <= 3 ? 4 : heads <= 7 ? 2 : 1, mine = d->warp / warps;
    const mk_wait *cache = &d->in->wait[1];
    mk_staged_drop(d);
    mk_gqa_param p;
    if (d->warp < heads) p = mk_gqa_ask(d, g);
#pragma unroll 1
    for (uint32_t r = 0; r < d->step->nrows; r++) {
        const mk_row *row = &d->step->row[r];
        const uint32_t per = mk_split_pages(row->pos), splits = row->pos / (MK_PAGE * per) + 1;
#pragma unroll 1
        for (uint32_t i = mk_att_first(g->part, g->parts, r); i < splits * kv_heads.n; i += g->parts) {
            const uint32_t split = mk_quot(i, kv_heads), kv = i - split * kv_heads.n;
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
            mk_att_begin(d, &x, cache);
            cache = 0;
            if (mine < heads)
                mk_read_together(&d->in->wait[0], r, g->q_off + (kv * heads + mine) * g->q_stride, dim, rows + mine * 32 * blocks, d->warp % warps * 32 + d->lane,
                                 warps * 32);
            mk_sync();
            mk_trace_input(d);
            if (d->warp < heads) {
                float *q = rows + d->warp * 32 * blocks;
                if (dim + d->lane < 32 * blocks) q[dim + d->lane] = 0;
                mk_gqa_turn(d, g, &p, row->pos, q);
#pragma unroll 2
                for (uint32_t c = 2 * d->lane; c < 32 * blocks; c += 64) {
                    const float2 y = *(const float2 *)(q + c);
                    mk_att_put(d->sh->staging, dim, 0, d->warp, c, y.x, y.y);
                }
            }
            mk_sync();
            mk_attend();
        }
    }
    mk_bulk_signal(d, d->in->signal_vec);
}

#endif
