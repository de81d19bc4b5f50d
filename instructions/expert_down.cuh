/* EXPERT_DOWN on the device. Semantics: expert_down.c. The inputs of as many (expert, row) pairs as fit are staged together; several
 * experts are multiplied before they are reduced and added, in ascending id. */
#ifndef MK_EXPERT_DOWN_CUH
#define MK_EXPERT_DOWN_CUH

#include "instructions/matvec.cuh"

#define MK_SUMS (MK_MAX_ROWS * MK_SEGMENT_ROWS)

/* Inputs of pairs [p0, p0 + n) into staging slots 0 .. n-1. */
MK_CALL void mk_pairs_gather(const mk_insn *in, uint32_t T, uint32_t p0, uint32_t n, uint32_t stride)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_expert *e = &in->expert;
    const mk_wait *w = &d->in->wait[0];
    const mk_vec *v = &d->sh->vec[w->vec];
    const uint16_t *start = d->sh->start + v->start_index;
    const uint4 *base = mk_wait_packets(d, w, v, 0);
    const uint32_t sp = v->slice_packets, per = T * sp, epoch = mk_wait_epoch(d, w), row_packets = v->nslice * sp;
    const mk_divisor by_sp = mk_div_by_slice(v), by_per = mk_div_by(per);
    constexpr int NP = 2;
    for (uint32_t i0 = d->tid; i0 < n * per; i0 += NP * MK_COMPUTE) {
        uint4 q[NP];
        uint32_t off[NP], to[NP], at[NP], count[NP], row[NP];
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
            to[j] = pair * stride;
            at[j] = st + p * 6;
            q[j] = mk_packet_load(base + off[j]);
        }
        uint32_t looks = 0;
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
            if (again) again = mk_still_waiting(++looks, 0, late_row, late_packet, found);
        }
        mk_waited(looks);
#pragma unroll
        for (int j = 0; j < NP; j++) {
            const uint32_t word[3] = {q[j].x, q[j].y, q[j].z};
#pragma unroll
            for (uint32_t k = 0; k < 6; k++)
                if (k < count[j])
                    *(uint16_t *)(d->sh->staging + to[j] + mk_staged_at(at[j] + k)) =
                        (uint16_t)mk_bf16_bits(__fmul_rn(__uint_as_float(k & 1 ? word[k / 2] & 0xffff0000u : word[k / 2] << 16), MK_STAGED_SCALE));
        }
    }
    uint32_t pad = ((e->k + 63) & ~63u) - e->k;
    for (uint32_t i = d->tid; i < pad * n; i += MK_COMPUTE) {
        uint32_t p = i / pad;
        *(uint16_t *)(d->sh->staging + p * stride + mk_staged_at(e->k + i - p * pad)) = 0;
    }
}

/* The products of experts [j0, j0 + batch) of the union, side by side in the reduction area; their pairs are staged from p0 on. */
MK_CALL void mk_down_products(const mk_insn *in, uint32_t j0, uint32_t batch, uint32_t p0, uint32_t size)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_expert *e = &in->expert;
    const mk_pairs *pairs = &d->sh->pairs;
    const mk_tile t = mk_tile_make(e->wtype, e->n, e->k, 1, e->nseg, e->phase, MK_SCALE_ROWS, 0);
    const uint32_t g = d->lane >> 2, stride = mk_shape(e->k, 1, d->step->nrows).stride;
    uint32_t ring = mk_ring_at(d, MK_EXPERT);
    for (uint32_t b = 0; b < batch; b++) {
        uint32_t x = MK_NO_COLUMN; /* column g: row g, if it chose this expert */
        for (uint32_t k = pairs->first[j0 + b]; k < pairs->first[j0 + b + 1]; k++)
            if (pairs->row[k] == g) x = (k - p0) * stride;
        mk_red_put(d, b * size, &t, ring, mk_product(MK_EXPERT, ring, &t, 0, t.nst, x, 0, MK_NO_NORM, mk_no_sum()));
        ring += t.nst;
        mk_trace_bytes(d, t.rows * t.nkb * MK_KBLOCK_BYTES);
    }
    mk_ring_pass(d, MK_EXPERT, ring);
}

MK_DEV void mk_expert_down_run(const mk_dev *d)
{
    const mk_insn *in = d->in;
    const mk_expert *e = &in->expert;
    const mk_routes *routes = (const mk_routes *)mk_local_at(d, in->wait[1].vec);
    const mk_vec *out = &d->sh->vec[in->signal_vec], *base = &d->sh->vec[in->wait[2].vec], *u = &d->sh->vec[in->wait[0].vec];
    const mk_pairs *pairs = &d->sh->pairs;
    const uint32_t nrows = d->step->nrows, n = e->n, n_union = routes->n_union;
    const mk_stage_shape shape = mk_shape(e->k, 1, nrows);
    const mk_tile t = mk_tile_make(e->wtype, n, e->k, 1, e->nseg, e->phase, MK_SCALE_ROWS, 0);
    const uint32_t fit = (MK_STAGING - MK_SUMS * 4) / shape.stride, T = u->nslice / e->topk, packets = (n + 2) / 3;
    const uint32_t size = mk_red_size(d, t.log_tiles), slots = mk_small_quot(MK_RED_FLOATS, size), most = mk_small_quot(MK_SUMS, nrows * n);
    /* this thread's packet of the result: row r, values i, i + 1, i + 2 */
    const uint32_t r = d->tid / packets, p = d->tid - r * packets, i = 3 * p;
    const bool has = r < nrows;
    float *sums = (float *)(d->sh->staging + MK_STAGING) - MK_SUMS; /* products of some experts, reduced */
    float sum[3] = {0, 0, 0};
    mk_staged_drop(d);

    if (has && base->scope != MK_LOCAL) {
        const mk_wait *w = &in->wait[2];
        const uint4 q = mk_packet_wait(mk_wait_packets(d, w, base, r) + p, w, r, p, mk_wait_epoch(d, w));
        sum[0] = __uint_as_float(q.x);
        sum[1] = __uint_as_float(q.y);
        sum[2] = __uint_as_float(q.z);
    }
    for (uint32_t j0 = 0; j0 < n_union;) {
        uint32_t j1 = j0 + 1, p0 = pairs->first[j0];
        while (j1 < n_union && pairs->first[j1 + 1] - p0 <= fit) j1++;
        mk_pairs_gather(in, T, p0, pairs->first[j1] - p0, shape.stride);
        mk_sync();
        if (!j0) mk_trace_input(d);
        if (j0 == 0 && base->scope == MK_LOCAL && has) /* written by other threads: after a barrier */
            for (uint32_t k = 0; k < 3 && i + k < n; k++) sum[k] = ((const float *)mk_local_at(d, in->wait[2].vec))[r * n + i + k];
        while (j0 < j1) {
            uint32_t batch = j1 - j0 < slots ? j1 - j0 : slots;
            batch = batch < most ? batch : most;
            mk_down_products(in, j0, batch, p0, size);
            mk_sync();
            /* each product is reduced whole, then the experts are added in ascending id */
            for (uint32_t k = d->tid; k < batch * nrows * n; k += MK_COMPUTE) {
                const uint32_t row = k / n, b = row / nrows;
                sums[k] = mk_red_get(b * size, mk_red_form(&t), k - row * n, row - b * nrows);
            }
            mk_sync();
            for (uint32_t b = 0; has && b < batch; b++) {
                const uint32_t rank = routes->rank[r][j0 + b];
                if (rank == 255) continue;
                const float weight = routes->weight[r][rank], *y = sums + (b * nrows + r) * n + i;
#pragma unroll
                for (uint32_t k = 0; k < 3; k++)
                    if (i + k < n) sum[k] = __fadd_rn(sum[k], __fmul_rn(weight, y[k]));
            }
            j0 += batch;
        }
    }
    mk_trace_publish(d);
    if (has)
        mk_packet_store(mk_signal_packets(d, out, r, in->signal_slice) + p, __float_as_uint(sum[0]), i + 1 < n ? __float_as_uint(sum[1]) : 0,
                        i + 2 < n ? __float_as_uint(sum[2]) : 0, mk_signal_epoch(d));
}

#endif
