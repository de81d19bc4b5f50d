/* GEMV of few rows of BF16 with a f32 vector and its RMS norm: the router's. Its values are multiplied as they are, in f32, by threads that have their weights in registers by
 * then: no bf16 planes, no tiles of 16 rows. Every row of the batch has sums of its own, so that its bits do not depend on the others. */
#ifndef MK_ROUTER_CUH
#define MK_ROUTER_CUH

#include "instructions/matvec.cuh"

static_assert(MK_ROUTER_ROWS == 8, "mk_warp_eight; a chunk is 8 values of a row");
#define MK_ROUTER_AT_ONCE 4u /* rows of the batch */
/* A thread's weights: a chunk of every row, `chunk` bytes from chunk to chunk. */
MK_DEV void mk_router_load(uint4 (&w)[MK_ROUTER_ROWS], uint32_t at, uint32_t n)
{
#pragma unroll
    for (uint32_t r = 0; r < MK_ROUTER_ROWS; r++)
        if (r < n) w[r] = mk_lds128(at + 16 * r);
}

/* ROWS: of the batch that are multiplied between two barriers, at most; 1: the step has one. Packets are dealt as mk_take has it, and lie as f32 times gamma; of one row behind the bf16
 * values that are left for mk_stage_again. Sums: a thread's chunks, then lanes (mk_warp_eight), then warps. */
template <uint32_t ROWS> MK_CALL void mk_router(const mk_insn *in)
{
    constexpr uint32_t LOADS = MK_LOADS_OF(true, MK_ONE_RMS);
    const mk_dev here = mk_here(in), *d = &here;
    mk_shared *sh = d->sh;
    const mk_fed *f = mk_fed_of(in);
    const mk_plan *p = &f->plan;
    mk_memo *memo = d->memo;
    const mk_hands g = p->hands;
    const uint32_t k = p->x.k, n = in->gemv.n, parity = memo->parity ^ 1, turn = memo->turn, nrows = ROWS == 1 ? 1 : sh->step.nrows;
    const mk_hand h = mk_hand_of<true>(p, g, d->lane);
    const mk_turns turns = mk_turns_of<true>(g);
    const uint32_t value0 = d->warp * g.values + h.value, packet0 = p->skip + d->warp * g.packets + d->lane;
    const mk_vec *from_vec = &sh->vec[in->wait[0].vec], *to_vec = &sh->vec[in->signal_vec];
    const uint32_t row_packets = from_vec->nslice * from_vec->slice_packets, out_packets = to_vec->nslice * to_vec->slice_packets;
    const uint4 *from = f->place.in[0] + packet0;
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
    const uint32_t chunks = k / 8, staged = mk_smem(sh->staging), wide = staged + (ROWS == 1 ? mk_row_stride(k) : 0), most = ROWS == 1 ? 1 : min(ROWS, mk_small_quot(MK_STAGING, 4 * k));
    uint32_t to0 = wide + 4 * value0, red = mk_smem(sh->red) + (turn & 1) * (MK_RED_FLOATS * 2);
    mk_keep(&to0), mk_keep(&red);
#pragma unroll 1
    for (uint32_t row0 = 0; row0 < nrows; row0 += most) {
        const uint32_t rows = ROWS == 1 ? 1 : min(most, nrows - row0);
        if (d->tid < chunks) mk_router_load(w, weights(d->tid), n);
#pragma unroll 1
        for (uint32_t r = 0; r < rows; r++) {
            uint4 coming[LOADS];
#pragma unroll
            for (uint32_t j = 0; ROWS > 1 && j < LOADS; j++) coming[j] = wanted & 1u << j && row0 + r + 1 < nrows ? mk_packet_load(from + row_packets + at[j]) : make_uint4(0, 0, 0, 0);
            float squares = 0;
            mk_packets_wait<LOADS, true>(from, at, wanted, f->place.epoch[0], 0, row0 + r, packet0, q);
#pragma unroll
            for (uint32_t j = 0; j < LOADS; j++) {
                const float y[3] = {__uint_as_float(q[j].x), __uint_as_float(q[j].y), __uint_as_float(q[j].z)};
                const bool has = wanted & 1u << j;
#pragma unroll
                for (uint32_t i = 0; i < 3; i++) {
                    if (!has || i >= h.count) continue; /* a slice's last packet may have words that carry nothing */
                    squares = __fmaf_rn(y[i], y[i], squares);
                    mk_sts32(to0 + 4 * (r * k + value[j] + i), __float_as_uint(__fmul_rn(y[i], gain[j][i])));
                }
            }
            __syncwarp();
            mk_row_squares(d, parity, row0 + r, mk_warp_sum(squares));
            from += row_packets;
#pragma unroll
            for (uint32_t j = 0; ROWS > 1 && j < LOADS; j++) q[j] = coming[j];
        }
        if (d->lane == 0) {
            memo->parity = parity;
            memo->turn = turn ^ 1;
            memo->staged = ROWS == 1 ? p->key : 0;
            memo->step = sh->step.seq;
        }
        mk_sync();
        if (!row0) mk_trace_input(d);
        float sums[ROWS][MK_ROUTER_ROWS] = {};
#pragma unroll 1
        for (uint32_t c = d->tid; c < chunks;) {
            uint32_t x[ROWS][8];
#pragma unroll
            for (uint32_t r = 0; r < ROWS; r++) {
                const uint32_t values = wide + 4 * (min(r, rows - 1) * k + 8 * c);
                const uint4 lo = mk_lds128(values), hi = mk_lds128(values + 16);
                x[r][0] = lo.x, x[r][1] = lo.y, x[r][2] = lo.z, x[r][3] = lo.w, x[r][4] = hi.x, x[r][5] = hi.y, x[r][6] = hi.z, x[r][7] = hi.w;
            }
#pragma unroll
            for (uint32_t o = 0; o < MK_ROUTER_ROWS; o++) {
                const uint32_t v[4] = {w[o].x, w[o].y, w[o].z, w[o].w};
                if (o >= n) break;
#pragma unroll
                for (uint32_t i = 0; i < 8; i++)
#pragma unroll
                    for (uint32_t r = 0; r < ROWS; r++)
                        sums[r][o] = __fmaf_rn(__uint_as_float(x[r][i]), __uint_as_float(i & 1 ? v[i / 2] & 0xffff0000u : v[i / 2] << 16), sums[r][o]);
            }
            if (ROWS == 1) {
                mk_sts64(staged + 16 * c, mk_bf16_pair(__uint_as_float(x[0][0]), __uint_as_float(x[0][1])), mk_bf16_pair(__uint_as_float(x[0][2]), __uint_as_float(x[0][3])));
                mk_sts64(staged + 16 * c + 8, mk_bf16_pair(__uint_as_float(x[0][4]), __uint_as_float(x[0][5])), mk_bf16_pair(__uint_as_float(x[0][6]), __uint_as_float(x[0][7])));
            }
            c += MK_COMPUTE;
            if (c < chunks) mk_router_load(w, weights(c), n);
        }
        __syncwarp();
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            const float sum = mk_warp_eight(sums[r], d->lane);
            if (!(d->lane & 3)) mk_sts32(red + MK_ROUTER_ROWS * 32 * r + 8 * d->lane + 4 * d->warp, __float_as_uint(sum));
        }
        mk_sync();
        if (row0 + rows == nrows) mk_trace_publish(d);
        if (d->warp >= rows) continue;
        const uint32_t i = min(d->lane, n - 1), row = row0 + d->warp, part_at = red + MK_ROUTER_ROWS * 32 * d->warp + 32 * i;
        const uint4 lo = mk_lds128(part_at), hi = mk_lds128(part_at + 16);
        const uint32_t part[MK_WARPS] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
        float y = 0;
#pragma unroll
        for (uint32_t k = 0; k < MK_WARPS; k++) y = __fadd_rn(y, __uint_as_float(part[k]));
        y *= mk_row_factor(d, p, row) * in->gemv.scale;
        mk_publish_at(f->place.out + row * out_packets, true, n, 0, y, f->place.out_epoch, d->lane);
    }
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
static_assert(MK_MAX_ROWS * MK_ROUTER_ROWS * MK_WARPS * 2 <= MK_RED_FLOATS && MK_ROUTER_AT_ONCE <= MK_WARPS, "sums of as many rows fit half the reduction area; a warp a row publishes");

#endif
