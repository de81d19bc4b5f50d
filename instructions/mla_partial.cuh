/* MLA_PARTIAL on the device: an item is a group of heads over one split (attention.cuh). Semantics: mla_partial.c. */
#ifndef MK_MLA_PARTIAL_CUH
#define MK_MLA_PARTIAL_CUH

#include "instructions/attention.cuh"
#include "instructions/kv_append.cuh"

/* q~ of heads [h0, h0 + heads), whose values follow each other in wait 0, by all threads. */
MK_DEV void mk_mla_latents(const mk_dev *d, const mk_mla *m, uint32_t r, uint32_t h0, uint32_t heads)
{
    constexpr int NP = 2;
    const mk_wait *w = &d->in->wait[0];
    const mk_vec *v = &d->sh->vec[w->vec];
    const uint16_t *start = d->sh->start + v->start_index + w->slice0;
    const uint4 *base = mk_wait_packets(d, w, v, r);
    const uint32_t first = h0 * m->latent, end = first + heads * m->latent, sp = v->slice_packets, epoch = mk_wait_epoch(d, w);
    const uint32_t s0 = mk_find_slice(start, w->nslice, first, d->lane);
    const uint32_t blocks = (m->latent + m->rope + 31) / 32;
    const mk_divisor by = mk_div_by_slice(v), by_head = mk_div_by(m->latent);
#pragma unroll 1
    for (uint32_t i0 = d->tid;; i0 += NP * MK_COMPUTE) {
        uint4 q[NP];
        uint32_t at[NP], hi[NP], more = 0; /* the packet's first value and the end of its values */
        const uint4 *from[NP];
#pragma unroll
        for (int k = 0; k < NP; k++) {
            const uint32_t i = i0 + k * MK_COMPUTE, s = s0 + mk_quot(i, by), p = i - (s - s0) * sp;
            at[k] = hi[k] = 0;
            from[k] = base + s * sp + p;
            if (s >= w->nslice || start[s] >= end) continue;
            more = 1;
            const uint32_t a = start[s] + 6 * p, e = start[s + 1] < end ? start[s + 1] : end;
            if (a >= e || a + 6 <= first) continue;
            at[k] = a;
            hi[k] = e;
            q[k] = mk_packet_load(from[k]);
        }
        if (!more) break;
#pragma unroll
        for (int k = 0; k < NP; k++) {
            if (!hi[k]) continue;
            if (q[k].w != epoch) q[k] = mk_packet_wait(from[k], w, r, (uint32_t)(from[k] - base), epoch);
            const uint32_t word[3] = {q[k].x, q[k].y, q[k].z};
#pragma unroll
            for (int j = 0; j < 6; j++) {
                const uint32_t c = at[k] + j, h = mk_quot(c - first, by_head);
                if (c >= first && c < hi[k])
                    *mk_att_at(d->sh->staging, blocks, h, c - first - h * m->latent) = (uint16_t)(word[j / 2] >> (16 * (j & 1)));
            }
        }
    }
}

/* q_pe, a warp a head; with it whatever of the last blocks neither part covers, as zeros. */
MK_DEV void mk_mla_positional(const mk_dev *d, const mk_mla *m, uint32_t r, uint32_t h0, uint32_t heads)
{
    const uint32_t latent = m->latent, nk = latent + m->rope, fine = latent / 32;
    float *x = d->sh->red + d->warp * m->rope;
#pragma unroll 1
    for (uint32_t h = d->warp; h < heads; h += MK_WARPS) {
        if (m->rope) mk_warp_read(&d->in->wait[1], r, m->in_off + (h0 + h) * m->qk_stride, m->rope, x);
        if (m->rotary) {
#pragma unroll 1
            for (uint32_t i = d->lane; i < m->rope / 2; i += 32)
                mk_rotate_pair(x + 2 * i, x + 2 * i + 1, __ldg(d->a->param + m->param_off + latent + i), d->step->row[r].pos);
            __syncwarp();
        }
#pragma unroll 1
        for (uint32_t c = latent + d->lane; c < ((nk + 31) & ~31u); c += 32) mk_att_put(d, nk, fine, heads, h, c, c < nk ? x[c - latent] : 0.0f);
        if (fine * 32 + d->lane < latent) /* latents have no second plane */
            *mk_att_at(d->sh->staging + mk_att_plane_bytes((nk + 31) / 32, heads), (nk + 31) / 32 - fine, h, d->lane) = 0;
        __syncwarp();
    }
}

MK_CALL void mk_mla_partial_run(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_mla *m = &d->in->mla;
    const uint32_t groups = (m->heads + MK_HEAD_GROUP - 1) / MK_HEAD_GROUP, n = m->latent + m->rope, floats = mk_partial_floats(m->latent);
    float *bulk = (float *)mk_bulk_at(d, d->in->signal_vec);
    bool waited = false;
    mk_staged_drop(d);
#pragma unroll 1
    for (uint32_t r = 0; r < d->step->nrows; r++) {
        const mk_row *row = &d->step->row[r];
        const uint32_t items = mk_splits(row->pos) * groups, per = mk_split_pages(row->pos) * MK_PAGE;
#pragma unroll 1
        for (uint32_t i = mk_att_first(m->part, m->parts, r); i < items; i += m->parts) {
            const uint32_t split = i / groups, h0 = (i - split * groups) * MK_HEAD_GROUP, left = m->heads - h0;
            mk_att x;
            x.pages = d->a->page + (size_t)row->slot * d->a->max_pages;
            x.key_off = x.value_off = m->kv_off;
            x.key_bytes = x.value_bytes = n * 2;
            x.span = n * 2 * MK_PAGE;
            x.nk = n;
            x.nv = m->latent;
            x.fine = m->latent / 32;
            x.heads = left < MK_HEAD_GROUP ? left : MK_HEAD_GROUP;
            x.first = split * per;
            x.end = row->pos + 1 < x.first + per ? row->pos + 1 : x.first + per;
            x.scale = m->scale;
            x.dst = bulk + (((size_t)r * MK_MAX_SPLITS + split) * m->all_heads + h0) * floats;
            mk_att_begin(d, &x);
            mk_mla_latents(d, m, r, h0, x.heads);
            mk_mla_positional(d, m, r, h0, x.heads);
            if (!waited)
                mk_bulk_wait(d, &d->in->wait[2]);
            else
                mk_sync();
            waited = true;
            mk_attend();
        }
    }
    mk_bulk_signal(d, d->in->signal_vec);
}

#endif
