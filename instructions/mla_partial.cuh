/* MLA_PARTIAL on the device: an item is a group of heads over one split (attention.cuh). Semantics: mla_partial.c. */
#ifndef MK_MLA_PARTIAL_CUH
#define MK_MLA_PARTIAL_CUH

#include "instructions/attention.cuh"
#include "instructions/kv_append.cuh"

/* q~ of heads [h0, h0 + heads), whose values follow each other in wait 0, by all warps but the waiter. */
MK_DEV void mk_mla_latents(const mk_dev *d, const mk_mla *m, uint32_t r, uint32_t h0, uint32_t heads)
{
    constexpr uint32_t NP = 2, THREADS = 32 * MK_ATT_WAITER;
    const mk_wait *w = &d->in->wait[0];
    const mk_vec *v = &d->sh->vec[w->vec];
    const uint16_t *start = d->sh->start + v->start_index + w->slice0;
    const uint4 *base = mk_wait_packets(d, w, v, r);
    const uint32_t latent = m->latent, first = h0 * latent, end = first + heads * latent, sp = v->slice_packets, epoch = mk_wait_epoch(d, w);
    const uint32_t s0 = mk_find_slice(start, w->nslice, first, d->lane);
    const mk_divisor by = mk_div_by_slice(v), by_head = mk_div_by(latent);
    uint8_t *q = d->sh->staging;
#pragma unroll 1
    for (uint32_t i0 = d->tid;; i0 += NP * THREADS) {
        uint4 x[NP];
        int at[NP], to[NP]; /* the packet's first value and the end of its values, from head h0's first on */
        uint32_t from[NP], more = 0;
#pragma unroll
        for (uint32_t k = 0; k < NP; k++) {
            const uint32_t i = i0 + k * THREADS, s = s0 + mk_quot(i, by), p = i - (s - s0) * sp;
            at[k] = to[k] = 0;
            from[k] = s * sp + p;
            if (s >= w->nslice || start[s] >= end) continue;
            more = 1;
            at[k] = (int)(start[s] + 6 * p) - (int)first;
            to[k] = (int)(start[s + 1] < end ? start[s + 1] : end) - (int)first;
            if (at[k] < to[k]) x[k] = mk_packet_load(base + from[k]);
        }
        if (!more) break;
#pragma unroll
        for (uint32_t k = 0; k < NP; k++) {
            if (at[k] >= to[k]) continue;
            if (x[k].w != epoch) x[k] = mk_packet_wait(base + from[k], w, r, from[k], epoch);
            const uint32_t word[3] = {x[k].x, x[k].y, x[k].z};
#pragma unroll
            for (int j = 0; j < 3; j++) {
                const int c = at[k] + 2 * j; /* two values: together where they are neighbours in a fragment */
                if (!(c & 1) && c >= 0 && c + 1 < to[k]) {
                    const uint32_t h = mk_quot((uint32_t)c, by_head);
                    *(uint32_t *)mk_att_at(q, h, (uint32_t)c - h * latent) = word[j];
                } else {
#pragma unroll 1
                    for (int e = c; e < c + 2; e++) {
                        const uint32_t h = mk_quot((uint32_t)e, by_head);
                        if (e >= 0 && e < to[k]) *(uint16_t *)mk_att_at(q, h, (uint32_t)e - h * latent) = (uint16_t)(word[j] >> (16 * (e - c)));
                    }
                }
            }
        }
    }
}

/* q_pe of head h0 + h, by one warp; with it whatever of the last blocks neither part covers, as zeros. */
MK_DEV void mk_mla_positional(const mk_dev *d, const mk_mla *m, uint32_t r, uint32_t h0, uint32_t h)
{
    const uint32_t latent = m->latent, nk = latent + m->rope, fine = latent / 32, pad = (nk + 31) & ~31u;
    uint8_t *q = d->sh->staging;
    float *x = (float *)(q + mk_att_query_bytes(nk, fine)) + d->warp * (pad - 32 * fine); /* from value 32 fine on */
    float freq = 0;
    if (m->rotary && d->lane < m->rope / 2) freq = __ldg(d->a->param + m->param_off + latent + d->lane);
    for (uint32_t c = 32 * fine + d->lane; c < pad; c += 32)
        if (c < latent || c >= nk) x[c - 32 * fine] = 0;
    float *pe = x + latent - 32 * fine;
    if (m->rope) mk_read_together(&d->in->wait[1], r, m->in_off + (h0 + h) * m->qk_stride, m->rope, pe, d->lane, 32);
    __syncwarp();
    if (m->rotary) {
#pragma unroll 1
        for (uint32_t i = d->lane; i < m->rope / 2; i += 32) {
            if (i >= 32) freq = __ldg(d->a->param + m->param_off + latent + i);
            mk_rotate_pair(pe + 2 * i, pe + 2 * i + 1, freq, d->step->row[r].pos);
        }
        __syncwarp();
    }
#pragma unroll 1
    for (uint32_t c = 32 * fine + 2 * d->lane; c < pad; c += 64) {
        const float2 y = *(const float2 *)(x + c - 32 * fine);
        if (c >= latent)
            mk_att_put(q, nk, fine, h, c, y.x, y.y);
        else /* latents have no second plane */
            *(uint32_t *)mk_att_at(q + mk_att_plane_bytes((nk + 31) / 32), h, c - 32 * fine) = 0;
    }
}

MK_CALL void mk_mla_partial_run(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_mla *m = &d->in->mla;
    const uint32_t n = m->latent + m->rope, floats = mk_partial_floats(m->latent);
    const mk_wait *cache = &d->in->wait[2];
    mk_staged_drop(d);
#pragma unroll 1
    for (uint32_t r = 0; r < d->step->nrows; r++) {
        const mk_row *row = &d->step->row[r];
        const uint32_t per = mk_split_pages(row->pos), splits = row->pos / (MK_PAGE * per) + 1, group = mk_head_group(row->pos);
        const mk_divisor groups = mk_div_by((m->heads + group - 1) / group);
#pragma unroll 1
        for (uint32_t i = mk_att_first(m->part, m->parts, r); i < splits * groups.n; i += m->parts) {
            const uint32_t split = mk_quot(i, groups), h0 = (i - split * groups.n) * group, left = m->heads - h0;
            mk_att x;
            x.pages = d->a->page + (size_t)row->slot * d->a->max_pages;
            x.key_off = m->kv_off;
            x.value_off = 0;
            x.bytes = n * 2;
            x.span = n * 2 * MK_PAGE;
            x.nk = n;
            x.nv = m->latent;
            x.fine = m->latent / 32;
            x.heads = left < group ? left : group;
            x.first = split * per * MK_PAGE;
            x.end = row->pos < x.first + per * MK_PAGE ? row->pos + 1 : x.first + per * MK_PAGE;
            x.scale = m->scale;
            x.dst = (float *)mk_bulk_at(d, d->in->signal_vec) + (((size_t)r * MK_MAX_SPLITS + split) * m->all_heads + h0) * floats;
            mk_att_begin(d, &x, cache);
            cache = 0;
            if (d->warp != MK_ATT_WAITER) mk_mla_latents(d, m, r, h0, x.heads);
            if (d->warp < x.heads) mk_mla_positional(d, m, r, h0, d->warp);
            mk_sync();
            mk_trace_input(d);
            mk_attend();
        }
    }
    mk_bulk_signal(d, d->in->signal_vec);
}

#endif
