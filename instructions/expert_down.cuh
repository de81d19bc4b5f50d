/* EXPERT_DOWN on the device. Semantics: expert_down.c. The inputs of as many (expert, row) pairs as fit are staged together; several
 * experts are multiplied before they are reduced and added, in ascending id. */
#ifndef MK_EXPERT_DOWN_CUH
#define MK_EXPERT_DOWN_CUH

#include "instructions/matvec.cuh"

#define MK_DOWN_STAGING (MK_STAGING - 4 * MK_MAX_ROWS * MK_SEGMENT_ROWS) /* for inputs; sums of rows behind them */

/* What the walk over the inputs' packets needs. A row's topk experts publish `per` packets each. */
typedef struct mk_pairs_walk {
    const mk_vec *v;
    const uint16_t *start;
    const uint4 *base;
    uint32_t per, row_packets, epoch;
    mk_divisor by_per;
} mk_pairs_walk;
MK_DEV mk_pairs_walk mk_pairs_walk_of(const mk_dev *d, uint32_t T)
{
    const mk_wait *w = &d->in->wait[0];
    mk_pairs_walk k;
    k.v = &d->sh->vec[w->vec];
    k.start = d->sh->start + k.v->start_index;
    k.base = mk_wait_packets(d, w, k.v, 0);
    k.per = T * k.v->slice_packets;
    k.row_packets = k.v->nslice * k.v->slice_packets;
    k.epoch = mk_wait_epoch(d, w);
    k.by_per = mk_div_by(k.per);
    return k;
}
/* Values of packet i of a pair: [*at, *at + result) of its expert. */
MK_DEV uint32_t mk_pair_packet(const mk_pairs_walk *k, uint32_t i, uint32_t *at)
{
    const uint32_t sp = k->v->slice_packets, s = mk_quot(i, mk_div_by_slice(k->v)), p = (i - s * sp) * 6, st = k->start[s], len = k->start[s + 1] - st;
    *at = st + p;
    return p >= len ? 0 : len - p < 6 ? len - p : 6;
}
/* A packet's values; those beyond count are 0. */
MK_DEV void mk_pair_open(uint4 q, uint32_t count, float *y)
{
    const uint32_t word[3] = {q.x, q.y, q.z};
#pragma unroll
    for (uint32_t k = 0; k < 6; k++) y[k] = k < count ? __uint_as_float(k & 1 ? word[k / 2] & 0xffff0000u : word[k / 2] << 16) : 0;
}
/* Values of pair `pair` (of those staged from p0 on): a row of the staging area, columns of its expert beside each other. */
template <uint32_t FORM> MK_DEV void mk_pair_stage(const mk_dev *d, uint32_t p0, uint32_t pair, uint32_t k, uint32_t at, uint32_t count, const float *y, float scale)
{
    const uint32_t row = mk_smem(d->sh->staging) + (pair - p0) * mk_row_stride(k);
#pragma unroll
    for (uint32_t i = 0; i < 6; i += 2) {
        const uint32_t v = FORM == MK_X_F16 ? mk_f16_pair(y[i] * scale, y[i + 1] * scale) : mk_bf16_pair(y[i], y[i + 1]);
        if (i < count) mk_sts16(row + mk_staged_at(at + i, FORM == MK_X_F16), v);
        if (i + 1 < count) mk_sts16(row + mk_staged_at(at + i + 1, FORM == MK_X_F16), v >> 16);
    }
}

/* Waits for all inputs and takes every row's largest magnitude; stages the pairs [0, n) if one row's packets stay in registers. Returns whether it did. */
#define MK_PAIR_PACKETS 7 /* of a thread, in registers */
template <uint32_t FORM> MK_DEV bool mk_pairs_look(const mk_dev *d, uint32_t T, uint32_t n)
{
    const mk_insn *in = d->in;
    const mk_expert *e = &in->expert;
    const mk_pairs_walk w = mk_pairs_walk_of(d, T);
    const uint32_t nrows = d->step->nrows, all = e->topk * w.per;
    const bool kept = nrows == 1 && n == e->topk && all <= MK_PAIR_PACKETS * MK_COMPUTE;
    uint32_t at[MK_PAIR_PACKETS], count[MK_PAIR_PACKETS] = {0};
    uint4 q[MK_PAIR_PACKETS];
#pragma unroll 1
    for (uint32_t r = 0; r < nrows; r++) {
        uint32_t top = 0;
#pragma unroll 1
        for (uint32_t i = d->tid; i < all; i += MK_PAIR_PACKETS * MK_COMPUTE) {
            const uint4 *row = w.base + r * w.row_packets + i;
#pragma unroll
            for (uint32_t j = 0; j < MK_PAIR_PACKETS; j++) {
                const uint32_t p = i + j * MK_COMPUTE;
                count[j] = p < all ? mk_pair_packet(&w, p - mk_quot(p, w.by_per) * w.per, &at[j]) : 0;
                q[j] = count[j] ? mk_packet_load(row + j * MK_COMPUTE) : make_uint4(0, 0, 0, w.epoch);
            }
            uint32_t looks = 0;
            for (bool again = true; again;) {
                again = false;
                uint32_t late = 0, found = 0;
#pragma unroll
                for (uint32_t j = 0; j < MK_PAIR_PACKETS; j++)
                    if (q[j].w != w.epoch) {
                        again = true;
                        late = i + j * MK_COMPUTE;
                        found = q[j].w;
                        q[j] = mk_packet_load(row + j * MK_COMPUTE);
                    }
                if (again) again = mk_still_waiting(++looks, 0, r, late, found);
            }
            mk_waited(looks);
#pragma unroll
            for (uint32_t j = 0; j < MK_PAIR_PACKETS; j++) {
                float y[6];
                mk_pair_open(q[j], count[j], y);
#pragma unroll
                for (uint32_t k = 0; k < 6; k++) top = max(top, __float_as_uint(y[k]) & 0x7fffffffu);
            }
        }
        mk_row_top(d, r, top);
    }
    if (d->lane == 0) d->sh->gain[d->memo->parity][d->warp] = 0;
    mk_sync();
    if (d->tid < nrows) d->sh->scale[d->memo->parity][d->tid] = mk_row_scale(d, d->tid);
    if (!kept) return false;
    const float scale = mk_row_scale(d, 0);
#pragma unroll
    for (uint32_t j = 0; j < MK_PAIR_PACKETS; j++) {
        float y[6];
        mk_pair_open(q[j], count[j], y);
        if (count[j]) mk_pair_stage<FORM>(d, 0, mk_quot(d->tid + j * MK_COMPUTE, w.by_per), e->k, at[j], count[j], y, scale);
    }
    return true;
}

/* Inputs of pairs [p0, p0 + n), which have been looked at, to the staging area. */
template <uint32_t FORM> MK_DEV void mk_pairs_stage(const mk_dev *d, uint32_t T, uint32_t p0, uint32_t n)
{
    const mk_insn *in = d->in;
    const mk_expert *e = &in->expert;
    const mk_pairs *pairs = &d->sh->pairs;
    const mk_pairs_walk w = mk_pairs_walk_of(d, T);
#pragma unroll 1
    for (uint32_t i = d->tid; i < n * w.per; i += MK_COMPUTE) {
        const uint32_t pair = p0 + mk_quot(i, w.by_per), p = i - (pair - p0) * w.per, row = pairs->row[pair];
        uint32_t at, count = mk_pair_packet(&w, p, &at);
        float y[6];
        if (!count) continue;
        mk_pair_open(mk_packet_load(w.base + row * w.row_packets + pairs->rank[pair] * w.per + p), count, y);
        mk_pair_stage<FORM>(d, p0, pair, e->k, at, count, y, mk_row_scale(d, row));
    }
}

/* The next batch of experts, from j0 of the union on: those whose inputs fit the staging area, and whose products the reduction area. Stages them and lists their
 * products. All compute threads; the staging area and the reduction area are not in use. */
template <uint32_t FORM> MK_DEV uint32_t mk_down_batch(const mk_dev *d, uint32_t j0)
{
    const mk_insn *in = d->in;
    const mk_expert *e = &in->expert;
    const mk_routes *routes = (const mk_routes *)mk_local_at(d, in->wait[1].vec);
    const mk_pairs *pairs = &d->sh->pairs;
    const uint32_t nrows = d->step->nrows, n = e->n, n_union = routes->n_union, bytes = mk_staged_bytes(e->k, FORM), T = mk_small_quot(d->sh->vec[in->wait[0].vec].nslice, e->topk);
    const uint32_t fit = mk_small_quot(MK_DOWN_STAGING, bytes), size = mk_red_size(n, nrows), slots = min(mk_small_quot(MK_RED_FLOATS, size), MK_MAX_JOBS);
    const uint32_t p0 = pairs->first[j0];
    uint32_t j1 = j0 + 1;
    while (j1 < n_union && j1 - j0 < slots && pairs->first[j1 + 1] - p0 <= fit) j1++;
    const uint32_t batch = j1 - j0, there = pairs->first[j1] - p0;
    if (d->tid < batch) {
        mk_job *job = &d->sh->job[d->tid];
        const uint32_t j = j0 + d->tid, first = pairs->first[j];
        job->rows = n;
        job->phase = e->phase;
        job->stages = mk_slice_stages(e->wtype, n, e->k);
        job->x = mk_smem(d->sh->staging) + (first - p0) * bytes;
        job->cols = pairs->first[j + 1] - first;
        job->base = d->tid * size;
        job->j = j;
        job->t = first;
    }
    if (d->tid == 0) d->sh->next_job = j1;
    if (j0 || !mk_pairs_look<FORM>(d, T, there)) mk_pairs_stage<FORM>(d, T, p0, there);
    if (d->tid < there) mk_stage_pad(mk_smem(d->sh->staging) + d->tid * bytes, e->k, FORM == MK_X_F16); /* the last K block is padded */
    mk_sync();
    if (!j0) mk_trace_input(d);
    return batch;
}
template <uint32_t FORM> MK_CALL uint32_t mk_down_stage(const mk_insn *in, uint32_t j0)
{
    const mk_dev here = mk_here(in);
    return mk_down_batch<FORM>(&here, j0);
}
MK_DEV uint32_t mk_down_next(const mk_insn *in, uint32_t j0)
{
    return in->expert.wtype == MK_W_FP8 ? mk_down_stage<MK_X_F16>(in, j0) : mk_down_stage<MK_X_BF16>(in, j0);
}

MK_CALL uint32_t mk_expert_down_begin(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    __syncwarp();
    if (d->lane == 0) {
        d->memo->staged = 0;
        d->memo->parity ^= 1;
    }
    __syncwarp();
    return mk_down_next(in, 0);
}

/* Adds the batch's products to the rows' sums, in ascending id of the expert: a lane a value, in units of 30. The sums of a batch that is not the last wait behind the
 * staged inputs. */
MK_CALL uint32_t mk_expert_down_end(const mk_insn *in, uint32_t batch)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_expert *e = &in->expert;
    const mk_routes *routes = (const mk_routes *)mk_local_at(d, in->wait[1].vec);
    const mk_wait *w = &in->wait[2];
    const mk_vec *out = &d->sh->vec[in->signal_vec], *from = &d->sh->vec[w->vec];
    const mk_job *jobs = d->sh->job;
    const uint32_t nrows = d->step->nrows, n = e->n, units = mk_units(n), next = d->sh->next_job, epoch = mk_wait_epoch(d, w);
    const bool first = jobs->j == 0, last = next == routes->n_union, local = from->scope == MK_LOCAL;
    float *sums = (float *)(d->sh->staging + MK_DOWN_STAGING);
    const mk_unit_at u0 = mk_unit_first(d->warp, units);
    uint4 look = make_uint4(0, 0, 0, epoch + 1); /* what the products are added to, asked for before the barrier */
    const uint32_t i0 = u0.group * MK_UNIT + d->lane;
    if (first && !local && u0.row < nrows && i0 < n && d->lane < MK_UNIT) look = mk_packet_load(mk_wait_packets(d, w, from, u0.row) + i0 / 3);
    mk_sync();
    if (last) mk_trace_publish(d);
    for (mk_unit_at u = u0; u.row < nrows; mk_unit_next(&u, units)) {
        const uint32_t r = u.row, i = u.group * MK_UNIT + d->lane;
        const bool has = i < n && d->lane < MK_UNIT;
        float y = 0;
        if (has) {
            if (!first) {
                y = sums[r * n + i];
            } else if (local) {
                y = ((const float *)mk_local_at(d, w->vec))[r * n + i];
            } else {
                look = mk_packet_get(mk_wait_packets(d, w, from, r) + i / 3, look, epoch, 2, r, i / 3);
                y = __uint_as_float(i % 3 == 0 ? look.x : i % 3 == 1 ? look.y : look.z);
                look.w = epoch + 1;
            }
            const float factor = e->wtype == MK_W_FP8 ? mk_unscale(d->sh->scale[d->memo->parity][r]) : 1;
#pragma unroll 4
            for (uint32_t b = 0; b < batch; b++) {
                const mk_job *job = jobs + b;
                const uint32_t rank = routes->rank[r][job->j];
                uint32_t c = 0;
                if (nrows > 1)
                    while (c < job->cols && d->sh->pairs.row[job->t + c] != r) c++;
                const float x = mk_red_get(job->base, mk_red_form_of(n, job->stages >> 16, job->cols), i, c < job->cols ? c : 0) * factor;
                if (rank != 255) y = __fadd_rn(y, __fmul_rn(routes->weight[r][rank], x));
            }
            if (!last) sums[r * n + i] = y;
        }
        __syncwarp();
        if (last) mk_publish_unit(out, mk_signal_packets(d, out, r, in->signal_slice), n, u.group, y, mk_signal_epoch(d), d->lane);
    }
    if (last) return 0;
    mk_sync();
    return mk_down_next(in, next);
}

#endif
