/* GEMV of few rows of BF16 with a f32 vector and its RMS norm: the router's. Its values are multiplied as they are, in f32, by threads that have their weights in registers by
 * then: no bf16 planes, no tiles of 16 rows. Row by row of the batch, so that a row's bits do not depend on the others. */
#ifndef MK_ROUTER_CUH
#define MK_ROUTER_CUH

#include "instructions/matvec.cuh"

static_assert(MK_ROUTER_ROWS == 8, "mk_warp_eight; a chunk is 8 values of a row");
/* A thread's weights: a chunk of every row, `chunk` bytes from chunk to chunk. */
MK_DEV void mk_router_load(uint4 (&w)[MK_ROUTER_ROWS], uint32_t at, uint32_t n)
{
#pragma unroll
    for (uint32_t r = 0; r < MK_ROUTER_ROWS; r++)
        if (r < n) w[r] = mk_lds128(at + 16 * r);
}

/* Row `row` of the batch. Packets are dealt as mk_take has it, and lie as f32 times gamma behind the bf16 values that are left for mk_stage_again. Sums: a thread's chunks, then
 * lanes (mk_warp_eight), then warps. */
MK_CALL void mk_router(const mk_insn *in, uint32_t row)
{
    constexpr uint32_t LOADS = MK_LOADS_OF(MK_ONE_RMS);
    const mk_dev here = mk_here(in), *d = &here;
    mk_shared *sh = d->sh;
    const mk_fed *f = mk_fed_of(in);
    const mk_plan *p = &f->plan;
    mk_memo *memo = d->memo;
    const mk_hands g = p->hands;
    const uint32_t k = p->x.k, n = in->gemv.n, parity = memo->parity ^ 1, turn = memo->turn, nrows = sh->step.nrows;
    const mk_hand h = mk_hand_of<true>(p, g, d->lane);
    const mk_turns turns = mk_turns_of<true>(g);
    const uint32_t value0 = d->warp * g.values + h.value, packet0 = p->skip + d->warp * g.packets + d->lane;
    const mk_vec *from_vec = &sh->vec[in->wait[0].vec], *to_vec = &sh->vec[in->signal_vec];
    const uint4 *const from = f->place.in[0] + row * from_vec->nslice * from_vec->slice_packets + packet0;
    const float *const gamma = sh->args.param + p->x.param_off + value0;
    uint4 q[LOADS];
    float gain[LOADS][3];
    uint32_t at[LOADS], value[LOADS];
    const uint32_t wanted = mk_ask(q, at, value, from, turns, h.any, value0, k);
#pragma unroll
    for (uint32_t j = 0; j < LOADS; j++)
#pragma unroll
        for (uint32_t i = 0; i < 3; i++) gain[j][i] = wanted & 1u << j && i < h.count ? __ldg(gamma + value[j] + i) : 0;

    /* its stages: half of them are those of the other group of warps, and all of them are in the ring at once */
    const mk_tile t = p->tile;
    const mk_lap lap = sh->lap[MK_TAPE];
    mk_next own = memo->next[MK_TAPE];
    const uint32_t first = (d->warp / MK_GROUP_WARPS - own.at) & (MK_GROUPS - 1), stride = lap.step / MK_GROUPS, chunk = t.rows * 16, per = 4 * t.per; /* chunks of a stage */
    mk_next next = own;
    if (first) mk_next_beside(&next, &lap, true);
    const uint32_t begin = next.stage, over = begin + (lap.end - next.bar) / 8 * stride; /* of the ring */
#pragma unroll 1
    for (uint32_t i = 0; i < t.nst; i++) {
        mk_stage_wait(next.bar, next.phase, MK_FAULT_TAPE);
        mk_next_beside(&next, &lap, false);
    }
    uint4 w[MK_ROUTER_ROWS] = {};
    const auto weights = [&](uint32_t c) {
        const uint32_t s = mk_small_quot(c, per), stage = begin + s * stride;
        return (stage < over ? stage : stage - lap.bytes) + (c - s * per) * chunk;
    };
    const uint32_t chunks = k / 8, staged = mk_smem(sh->staging), wide = staged + mk_row_stride(k);
    if (d->tid < chunks) mk_router_load(w, weights(d->tid), n);
    uint32_t to0 = wide + 4 * value0, red = mk_smem(sh->red) + (turn & 1) * (MK_RED_FLOATS * 2);
    mk_keep(&to0), mk_keep(&red);

    float squares = 0, sums[MK_ROUTER_ROWS] = {};
    mk_packets_wait<LOADS, true>(from, at, wanted, f->place.epoch[0], 0, row, packet0, q);
#pragma unroll
    for (uint32_t j = 0; j < LOADS; j++) {
        const float y[3] = {__uint_as_float(q[j].x), __uint_as_float(q[j].y), __uint_as_float(q[j].z)};
        const bool has = wanted & 1u << j;
#pragma unroll
        for (uint32_t i = 0; i < 3; i++) {
            if (!has || i >= h.count) continue; /* a slice's last packet may have words that carry nothing */
            squares = __fmaf_rn(y[i], y[i], squares);
            mk_sts32(to0 + 4 * (value[j] + i), __float_as_uint(__fmul_rn(y[i], gain[j][i])));
        }
    }
    __syncwarp();
    mk_row_squares(d, parity, row, squares);
    if (d->lane == 0) {
        memo->parity = parity;
        memo->turn = turn ^ 1;
        memo->staged = nrows == 1 ? p->key : 0;
        memo->step = sh->step.seq;
    }
    mk_sync();
    if (!row) mk_trace_input(d);
#pragma unroll 1
    for (uint32_t c = d->tid; c < chunks;) {
        const uint4 lo = mk_lds128(wide + 32 * c), hi = mk_lds128(wide + 32 * c + 16);
        const uint32_t x[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
        for (uint32_t r = 0; r < MK_ROUTER_ROWS; r++) {
            const uint32_t v[4] = {w[r].x, w[r].y, w[r].z, w[r].w};
            if (r >= n) break;
#pragma unroll
            for (uint32_t i = 0; i < 8; i++) sums[r] = __fmaf_rn(__uint_as_float(x[i]), __uint_as_float(i & 1 ? v[i / 2] & 0xffff0000u : v[i / 2] << 16), sums[r]);
        }
        if (nrows == 1) {
            mk_sts64(staged + 16 * c, mk_bf16_pair(__uint_as_float(x[0]), __uint_as_float(x[1])), mk_bf16_pair(__uint_as_float(x[2]), __uint_as_float(x[3])));
            mk_sts64(staged + 16 * c + 8, mk_bf16_pair(__uint_as_float(x[4]), __uint_as_float(x[5])), mk_bf16_pair(__uint_as_float(x[6]), __uint_as_float(x[7])));
        }
        c += MK_COMPUTE;
        if (c < chunks) mk_router_load(w, weights(c), n);
    }
    __syncwarp();
    const float sum = mk_warp_eight(sums, d->lane);
    if (!(d->lane & 3)) mk_sts32(red + 8 * d->lane + 4 * d->warp, __float_as_uint(sum));
    mk_sync();
    if (!row) mk_trace_publish(d);
    if (d->warp == 0) {
        const uint32_t i = min(d->lane, n - 1);
        const uint4 lo = mk_lds128(red + 32 * i), hi = mk_lds128(red + 32 * i + 16);
        const uint32_t part[MK_WARPS] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
        float y = 0;
#pragma unroll
        for (uint32_t k = 0; k < MK_WARPS; k++) y = __fadd_rn(y, __uint_as_float(part[k]));
        y *= mk_row_factor(d, p, row) * in->gemv.scale;
        mk_publish_at(f->place.out + row * to_vec->nslice * to_vec->slice_packets, true, n, 0, y, f->place.out_epoch, d->lane);
    }
    if (row + 1 < nrows) return;
#pragma unroll 1
    for (uint32_t i = first; i < t.nst; i += MK_GROUPS) {
        mk_stage_leave(own.bar + MK_EMPTY, d->lane);
        mk_next_move(&own, &lap);
    }
    own.at += t.nst;
    __syncwarp();
    if (d->lane == 0) memo->next[MK_TAPE] = own;
    __syncwarp();
}

#endif
