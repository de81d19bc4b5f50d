/* GQA_PARTIAL on the device: an item is a KV head over one split (attention.cuh). Semantics: gqa_partial.c. */
#ifndef MK_GQA_PARTIAL_CUH
#define MK_GQA_PARTIAL_CUH

#include "instructions/attention.cuh"
#include "instructions/gqa_append.cuh"

/* Queries of the heads of KV head `kv`, a warp a head: norm, rotation, both planes. */
MK_DEV void mk_gqa_queries(const mk_dev *d, const mk_gqa *g, uint32_t r, uint32_t kv, uint32_t heads)
{
    float *x = (float *)(d->sh->staging + mk_att_query_bytes(g->dim, 0, heads)) + d->warp * g->dim;
#pragma unroll 1
    for (uint32_t h = d->warp; h < heads; h += MK_WARPS) {
        mk_warp_read(&d->in->wait[0], r, g->q_off + (kv * heads + h) * g->q_stride, g->dim, x);
        mk_gqa_turn(d, g, d->step->row[r].pos, x);
#pragma unroll 1
        for (uint32_t c = d->lane; c < ((g->dim + 31u) & ~31u); c += 32) mk_att_put(d, g->dim, 0, heads, h, c, c < g->dim ? x[c] : 0.0f);
        __syncwarp();
    }
}

MK_CALL void mk_gqa_partial_run(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_gqa *g = &d->in->gqa;
    const uint32_t kv_heads = g->kv_heads, heads = g->heads / kv_heads, floats = mk_partial_floats(g->dim);
    float *bulk = (float *)mk_bulk_at(d, d->in->signal_vec);
    bool waited = false;
    mk_staged_drop(d);
#pragma unroll 1
    for (uint32_t r = 0; r < d->step->nrows; r++) {
        const mk_row *row = &d->step->row[r];
        const uint32_t items = mk_splits(row->pos) * kv_heads, per = mk_split_pages(row->pos) * MK_PAGE;
#pragma unroll 1
        for (uint32_t i = mk_att_first(g->part, g->parts, r); i < items; i += g->parts) {
            const uint32_t split = i / kv_heads, kv = i - split * kv_heads;
            mk_att x;
            x.pages = d->a->page + (size_t)row->slot * d->a->max_pages;
            x.key_off = g->kv_off + 2 * mk_gqa_at(g->dim, kv, 0, 0);
            x.value_off = g->kv_off + 2 * mk_gqa_at(g->dim, kv, 1, 0);
            x.key_bytes = x.value_bytes = 2u * g->dim;
            x.span = 4u * MK_PAGE * g->dim;
            x.nk = x.nv = g->dim;
            x.fine = 0;
            x.heads = heads;
            x.first = split * per;
            x.end = row->pos + 1 < x.first + per ? row->pos + 1 : x.first + per;
            x.scale = g->scale;
            x.dst = bulk + (((size_t)r * MK_MAX_SPLITS + split) * g->heads + kv * heads) * floats;
            mk_att_begin(d, &x);
            mk_gqa_queries(d, g, r, kv, heads);
            if (!waited)
                mk_bulk_wait(d, &d->in->wait[1]);
            else
                mk_sync();
            waited = true;
            mk_attend();
        }
    }
    mk_bulk_signal(d, d->in->signal_vec);
}

#endif
