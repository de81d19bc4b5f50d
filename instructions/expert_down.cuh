/* EXPERT_DOWN on the device. Semantics: expert_down.c. The inputs of as many (expert, row) pairs as fit are staged together; several
 * experts are multiplied before they are reduced and added, in ascending id. */
#ifndef MK_EXPERT_DOWN_CUH
#define MK_EXPERT_DOWN_CUH

#include "instructions/matvec.cuh"

/* Inputs of pairs [p0, p0 + n) into staging slots 0 .. n-1. */
MK_DEV void mk_pairs_gather(const mk_dev *d, const mk_expert *e, uint32_t T, uint32_t p0, uint32_t n, uint32_t stride)
{
    const mk_wait *w = &d->in->wait[0];
    const mk_vec *v = &d->sh->vec[w->vec];
    const uint16_t *start = d->sh->start + v->start_index;
    const uint4 *base = mk_wait_packets(d, w, v, 0);
    const uint32_t sp = v->slice_packets, per = T * sp, epoch = mk_wait_epoch(d, w), row_packets = v->nslice * sp;
    const mk_divisor by_sp = mk_div_by_slice(v), by_per = mk_div_by(per);
    constexpr int NP = 2;
    for (uint32_t i0 = d->tid; i0 < n * per; i0 += NP * MK_COMPUTE) {
        uint4 q[NP];
        uint32_t off[NP], to[NP], count[NP], row[NP];
#pragma unroll
        for (int j = 0; j < NP; j++) {
            uint32_t i = i0 + j * MK_COMPUTE;
            count[j] = 0;
            if (i >= n * per) continue;
            uint32_t pair = mk_quot(i, by_per), k = i - pair * per, s = mk_quot(k, by_sp), p = k - s * sp;
            uint32_t st = start[s], len = start[s + 1] - st, rank = d->sh->pairs.rank[p0 + pair];
            row[j] = d->sh->pairs.row[p0 + pair];
            if (p * 6 >= len) continue;
            count[j] = len - p * 6 < 6 ? len - p * 6 : 6;
            off[j] = row[j] * row_packets + rank * per + k;
            to[j] = pair * stride + 2 * (st + p * 6);
            q[j] = mk_packet_load(base + off[j]);
        }
        mk_spin spin = {0, 0};
        for (bool again = true; again;) {
            again = false;
            uint32_t late_row = 0, late_packet = 0, found = 0;
#pragma unroll
            for (int j = 0; j < NP; j++)
                if (count[j] && q[j].w != epoch) {
                    again = true;
                    late_row = row[j];
                    late_packet = off[j] - row[j] * row_packets;
                    found = q[j].w;
                    q[j] = mk_packet_load(base + off[j]);
                }
            if (again) again = mk_packet_spin(&spin, w, late_row, late_packet, epoch, found);
        }
#pragma unroll
        for (int j = 0; j < NP; j++) {
            const uint32_t word[3] = {q[j].x, q[j].y, q[j].z};
#pragma unroll
            for (uint32_t k = 0; k < 6; k++)
                if (k < count[j]) *(uint16_t *)(d->sh->staging + to[j] + 2 * k) = (uint16_t)(word[k / 2] >> (16 * (k & 1)));
        }
    }
    uint32_t pad = ((e->k + 63) & ~63u) - e->k;
    for (uint32_t i = d->tid; i < pad * n; i += MK_COMPUTE) {
        uint32_t p = i / pad;
        *(uint16_t *)(d->sh->staging + p * stride + 2 * (e->k + i - p * pad)) = 0;
    }
}

MK_DEV void mk_expert_down_run(const mk_dev *d)
{
    constexpr uint32_t UNITS = (MK_SEGMENT_ROWS / MK_UNIT + 1) * MK_MAX_ROWS / MK_WARPS + 1; /* of a warp, at most */
    const mk_insn *in = d->in;
    const mk_expert *e = &in->expert;
    const mk_routes *routes = (const mk_routes *)mk_local_at(d, in->wait[1].vec);
    const mk_vec *out = &d->sh->vec[in->signal_vec], *base = &d->sh->vec[in->wait[2].vec], *u = &d->sh->vec[in->wait[0].vec];
    const mk_pairs *pairs = &d->sh->pairs;
    const uint32_t nrows = d->step->nrows, n = e->n, units = mk_units(n), slots = mk_red_slots(d), n_union = routes->n_union;
    const mk_stage_shape shape = mk_shape(e->k, 1);
    const mk_tile t = mk_tile_make(e->wtype, n, e->k, 1, e->nseg, e->phase, MK_SCALE_ROWS, 1);
    const uint32_t fit = MK_STAGING / shape.stride, T = u->nslice / e->topk;
    float sum[UNITS];
    mk_unit_at at[UNITS];
#pragma unroll
    for (uint32_t k = 0; k < UNITS; k++) at[k] = mk_unit_first(d->warp + k * MK_WARPS, units);
    mk_staged_drop(d);

    /* what is added to: this lane's values of its warp's units */
#pragma unroll
    for (uint32_t k = 0; k < UNITS; k++) {
        const uint32_t r = at[k].row, i = at[k].group * MK_UNIT + d->lane;
        sum[k] = 0;
        if (r >= nrows || i >= n || d->lane >= MK_UNIT) continue;
        if (base->scope == MK_LOCAL) continue; /* written by other threads: after the first barrier */
        const mk_wait *w = &in->wait[2];
        const uint4 q = mk_packet_wait(mk_wait_packets(d, w, base, r) + i / 3, w, r, i / 3, mk_wait_epoch(d, w));
        sum[k] = __uint_as_float(i % 3 == 0 ? q.x : i % 3 == 1 ? q.y : q.z);
    }
    for (uint32_t j0 = 0; j0 < n_union;) {
        uint32_t j1 = j0 + 1, p0 = pairs->first[j0];
        while (j1 < n_union && pairs->first[j1 + 1] - p0 <= fit) j1++;
        mk_pairs_gather(d, e, T, p0, pairs->first[j1] - p0, shape.stride);
        mk_sync();
        if (!j0) mk_trace_input(d);
        if (j0 == 0 && base->scope == MK_LOCAL)
#pragma unroll
            for (uint32_t k = 0; k < UNITS; k++) {
                const uint32_t r = at[k].row, i = at[k].group * MK_UNIT + d->lane;
                if (r < nrows && i < n && d->lane < MK_UNIT) sum[k] = ((const float *)mk_local_at(d, in->wait[2].vec))[r * n + i];
            }
        while (j0 < j1) {
            uint32_t batch = j1 - j0 < slots ? j1 - j0 : slots;
            for (uint32_t b = 0; b < batch; b++) {
                uint32_t j = j0 + b, g = d->lane >> 2;
                const uint8_t *x = 0; /* column g: row g, if it chose this expert */
                for (uint32_t p = pairs->first[j]; p < pairs->first[j + 1]; p++)
                    if (pairs->row[p] == g) x = d->sh->staging + (p - p0) * shape.stride;
                float acc[4] = {0, 0, 0, 0};
                mk_product<MK_EXPERT>(d, &t, 0, t.nkb, x, 0, (const float *)0, 0, acc);
                mk_red_put(d, b, acc);
            }
            mk_sync();
#pragma unroll
            for (uint32_t k = 0; k < UNITS; k++) {
                const uint32_t r = at[k].row, i = at[k].group * MK_UNIT + d->lane;
                if (r >= nrows || i >= n || d->lane >= MK_UNIT) continue;
                for (uint32_t b = 0; b < batch; b++) {
                    uint32_t rank = routes->rank[r][j0 + b];
                    if (rank != 255) sum[k] = __fadd_rn(sum[k], __fmul_rn(routes->weight[r][rank], mk_red_get(d, b, &t, i, r)));
                }
            }
            mk_sync();
            j0 += batch;
        }
    }
    mk_trace_publish(d);
#pragma unroll
    for (uint32_t k = 0; k < UNITS; k++) {
        const uint32_t r = at[k].row;
        if (r < nrows) mk_publish_unit(out, mk_signal_packets(d, out, r, in->signal_slice), n, at[k].group, sum[k], mk_signal_epoch(d), d->lane);
    }
}

#endif
