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
            mk_attend<false, NH>(d->sh, &regs, MK_PAGE);
        }
    }
}

/* A head in a step of one row, by one warp: its dim values from `first` of wait 0 on, norm and rotation as mk_gqa_turn's where there are parameters. All that does not
 * need them comes before they are waited for. angle: room for a pair of floats for each pair of values. */
MK_DEV void mk_gqa_head_one(const mk_dev *d, const mk_gqa *g, uint32_t first, const float *param, float eps, float *x, float2 *angle)
{
    const uint32_t dim = g->dim, half = param ? g->rope / 2 : 0, norm = param && g->norm;
    float gamma[MK_GQA_DIM / 32];
#pragma unroll
    for (uint32_t k = 0; k < MK_GQA_DIM / 32; k++) gamma[k] = norm && d->lane + 32 * k < dim ? __ldg(param + d->lane + 32 * k) : 0.0f;
    if (norm) param += dim;
#pragma unroll 1
    for (uint32_t i = d->lane; i < half; i += 32) mk_sincosf(mk_mul((float)d->step->row[0].pos, __ldg(param + i)), &angle[i].x, &angle[i].y);
    mk_read_together(d, 0, 0, first, dim, x, d->lane, 32);
    if (norm) {
        float sum = 0, v[MK_GQA_DIM / 32];
#pragma unroll
        for (uint32_t k = 0; k < MK_GQA_DIM / 32; k++) {
            v[k] = d->lane + 32 * k < dim ? x[d->lane + 32 * k] : 0.0f;
            sum = __fmaf_rn(v[k], v[k], sum);
        }
        const float rstd = mk_rsqrtf(mk_div(mk_warp_sum(sum), (float)dim) + eps);
#pragma unroll
        for (uint32_t k = 0; k < MK_GQA_DIM / 32; k++)
            if (d->lane + 32 * k < dim) x[d->lane + 32 * k] = __fmul_rn(__fmul_rn(v[k], rstd), gamma[k]);
        __syncwarp();
    }
#pragma unroll 1
    for (uint32_t i = d->lane; i < half; i += 32) {
        const float a = x[i], b = x[i + half], s = angle[i].x, c = angle[i].y;
        x[i] = mk_add(mk_mul(a, c), -mk_mul(b, s));
        x[i + half] = mk_add(mk_mul(b, c), mk_mul(a, s));
    }
    __syncwarp();
}

/* A step of one row (mk_newest): the newest key and value come from the packets, and who has the item that needs them writes them to the cache. Nothing waits for
 * GQA_APPEND, which has nothing left to do. Bits as above. */
template <uint32_t NH> MK_CALL void mk_gqa_one(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_fed *f = mk_fed_of(in);
    const mk_newest *newest = &f->plan.newest;
    const mk_gqa *g = &d->in->gqa;
    const uint32_t dim = g->dim, floats = mk_partial_floats(dim), per = f->place.per, items = f->place.items, pos = d->step->row[0].pos;
    const mk_divisor kv_heads = mk_div_by(g->kv_heads);
    const uint32_t heads = g->heads / kv_heads.n, blocks = (dim + 31) / 32;
    float *rows = (float *)(d->sh->staging + mk_att_query_bytes(dim, 0)); /* queries, key and value as they come: all values of their blocks */
    float2 *angle = (float2 *)(rows + (MK_ATT_HEADS + 2) * 32 * blocks) + d->warp * (MK_GQA_DIM / 2);
    const mk_att_share w = mk_att_deal(false, dim);
    const mk_att_queries of = {dim, 0, NH > 1};
    uint32_t number = 0;
#pragma unroll 1
    for (uint32_t i = g->part; i < items; i += g->parts, number++) {
        const uint32_t split = mk_quot(i, kv_heads), kv = i - split * kv_heads.n;
        mk_att_regs regs;
        mk_att x;
        x.pages = d->a->page + (size_t)d->step->row[0].slot * d->a->max_pages;
        x.key_off = g->kv_off + 2 * mk_gqa_at(dim, kv, 0, 0);
        x.value_off = 2u * MK_PAGE * dim;
        x.bytes = 2u * dim;
        x.span = 4u * MK_PAGE * dim;
        x.nk = x.nv = dim;
        x.fine = 0;
        x.heads = heads;
        x.first = split * per * MK_PAGE;
        x.end = pos < x.first + per * MK_PAGE ? pos + 1 : x.first + per * MK_PAGE;
        x.scale = g->scale;
        x.dst = (float *)mk_bulk_at(d, d->in->signal_vec) + ((size_t)split * g->heads + kv * heads) * floats;
        mk_att_begin_one<false, NH>(d, &x, &w, number < 2 ? f->place.page[number] : __ldcg(x.pages + x.first / MK_PAGE), &regs);
        const bool last = x.end == pos + 1;
#pragma unroll 1
        for (uint32_t h = d->warp; h < heads + (last ? 2 : 0); h += MK_WARPS) {
            const bool query = h < heads;
            const uint32_t first = query ? g->q_off + (kv * heads + h) * g->q_stride : (h == heads ? newest->k_off : newest->v_off) + kv * dim;
            float *q = rows + h * 32 * blocks;
            uint32_t *to = 0;
            if (!query) to = (uint32_t *)((uint16_t *)mk_kv_at(d, g->kv_off, d->step->row[0].slot, pos, 0) + mk_gqa_at(dim, kv, h - heads, pos % MK_PAGE));
            if (dim + d->lane < 32 * blocks) q[dim + d->lane] = 0;
            mk_gqa_head_one(d, g, first, h > heads ? (const float *)0 : d->a->param + (query ? g->param_off : newest->param_off), query ? g->eps : newest->eps, q, angle);
#pragma unroll 2
            for (uint32_t c = 2 * d->lane; c < 32 * blocks; c += 64) {
                const float2 y = *(const float2 *)(q + c);
                if (query) {
                    mk_att_put(d->sh->staging, &of, h, c, y.x, y.y);
                } else if (c < dim) {
                    const uint32_t bits = mk_pack_bf16(y.x, y.y);
                    *(uint32_t *)(mk_att_fresh(d->sh) + ((h - heads) * dim + c) * 2) = bits;
                    to[c / 2] = bits;
                }
            }
        }
        mk_sync();
        if (!number) mk_trace_input(d);
        mk_attend<false, NH>(d->sh, &regs, last ? pos % MK_PAGE : MK_PAGE);
    }
}
MK_DEV void mk_gqa_one_run(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    mk_staged_drop(d);
    if (in->gqa.heads <= 8 * in->gqa.kv_heads)
        mk_gqa_one<1>(in);
    else
        mk_gqa_one<2>(in);
    mk_bulk_signal(d, in->signal_vec);
}
/* GQA_APPEND and KV_APPEND of one row that a partial writes: later steps count on the increment. */
MK_DEV void mk_count_run(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    if (d->tid == 0) atomicAdd(d->a->counter + d->sh->vec[in->signal_vec].counter, 1u);
    mk_trace_input(d);
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
