/* How a vector of several rows gets out of its packets into the staging area, whole or in parts. */
#ifndef MK_GATHER_ROWS_CUH
#define MK_GATHER_ROWS_CUH

#include "instructions/gather_one.cuh"

/* Waits for packet p of all rows, of which q are earlier looks. While they are late one of them alone is looked at again and again: 132 workers would ask for
 * 32 KB each. */
MK_DEV void mk_rows_wait(const uint4 *from, uint32_t row_packets, uint32_t nrows, uint32_t p, uint32_t epoch, uint4 *q)
{
    uint32_t looks = 0;
    for (bool more = true; more;) {
        uint32_t late = MK_MAX_ROWS;
#pragma unroll
        for (uint32_t r = 0; r < MK_MAX_ROWS; r++)
            if (r < nrows && q[r].w != epoch) late = r;
        if (late == MK_MAX_ROWS) break;
        uint32_t found;
        do
            found = mk_packet_load(from + late * row_packets).w;
        while ((more = mk_still_waiting(++looks, 0, late, p, found)) && found != epoch);
#pragma unroll
        for (uint32_t r = 0; r < MK_MAX_ROWS; r++)
            mk_packet_again(&q[r], from + r * row_packets, r < nrows && q[r].w != epoch);
    }
    mk_waited(looks);
}

/* From a thread's packet p of a row, its turn *n, to its next one. */
MK_DEV uint32_t mk_turn_next(uint32_t *n, mk_turns t, uint32_t p)
{
    return p + ((*n)++ & 1 ? t.packets[1] - t.packets[0] : t.packets[0]);
}

/* Any number of rows, any chunk [c0, c0 + n) of any vector. again: another chunk of a vector that has been looked at as a whole. */
template <bool F32, uint32_t FORM, bool RMS> MK_CALL void mk_gather_rows(const mk_insn *in, uint32_t c0, uint32_t n, bool again)
{
    constexpr uint32_t VALUES = F32 ? 3 : 6;
    constexpr bool PAIRS = !F32 && !RMS; /* bf16 values are staged as they come, two at a time where both fall into one word */
    const mk_dev here = mk_here(in), *d = &here;
    mk_shared *sh = d->sh;
    const mk_fed *f = mk_fed_of(in);
    const mk_plan *plan = &f->plan;
    const mk_wait *wait = &in->wait[0];
    const mk_vec *v = &sh->vec[wait->vec];
    const uint32_t row_packets = v->nslice * v->slice_packets, epoch = f->place.epoch[0], nrows = d->step->nrows, k = plan->x.k, off = plan->x.in_off;
    const uint32_t staged = mk_smem(sh->staging), stride = mk_row_stride(n), *map = sh->args.map + plan->map;
    const float *gamma = sh->args.param + plan->x.param_off;
    const uint4 *base = f->place.in[0];
    const bool heads = !RMS && plan->x.prologue == MK_PRO_HEADNORM;
    float *const trailer = sh->red; /* [row][slice] */
    mk_hands g = plan->hands;
    if (!g.packets) g.packets = 32;
    const mk_turns turns = mk_turns_of<F32>(g);
    if (heads && !again) mk_sync(); /* nobody reads the reduction area any more */

    /* A chunk's first pass looks at the whole vector, if that is of any use, and stages nothing. */
#pragma unroll 1
    for (bool look = !again, stage = again || n == k || (FORM != MK_X_F16 && !RMS && !heads);; stage = true) {
        const uint32_t c = stage ? c0 : 0, end = stage ? n : k; /* this pass is about values [c, c + end) */
        uint32_t lo = 0, hi = plan->packets;
        if (end < k) {
            const uint16_t *start = sh->start + v->start_index + wait->slice0;
            lo = mk_find_slice(start, wait->nslice, off + c, d->lane) * v->slice_packets;
            hi = (mk_find_slice(start, wait->nslice, off + c + end - 1, d->lane) + 1) * v->slice_packets;
        }
        uint32_t top[MK_MAX_ROWS] = {}, turn_n = 0;
        float sum[MK_MAX_ROWS] = {};
        uint4 q[MK_MAX_ROWS] = {};
        uint32_t p = d->lane < g.packets ? plan->skip + d->warp * g.packets + d->lane : hi;
        while (p < lo) p = mk_turn_next(&turn_n, turns, p);
        if (p < hi)
#pragma unroll
            for (uint32_t r = 0; r < MK_MAX_ROWS; r++)
                if (r < nrows) q[r] = mk_packet_load(base + p + r * row_packets);
        uint32_t next = p < hi ? __ldg(map + p) : 0;
#pragma unroll 1
        while (p < hi) {
            const uint32_t m = next, here_p = p;
            p = mk_turn_next(&turn_n, turns, p);
            const int at = (int)(MK_MAP_FIRST(m) - off - c), count = min((int)MK_MAP_VALUES(m), (int)end - at); /* values [max(0, -at), count) are ours */
            const bool ahead = p < hi;
            float gain[VALUES] = {};
            uint32_t to[VALUES], mask[VALUES], turn = 0x3210;
            const uint32_t nowhere = staged + stride - 32; /* between two rows nobody looks */
            if (ahead) next = __ldg(map + p);
#pragma unroll
            for (int e = 0; e < (int)VALUES; e++) {
                const bool ours = at + e >= 0 && e < count;
                to[e] = ours ? staged + 2 * (at + e) : nowhere;
                mask[e] = ours ? 0xffffffffu : 0;
                if (RMS && ours) gain[e] = __ldg(gamma + c + at + e);
            }
            uint32_t single = 0, last = 0;
            if constexpr (PAIRS) { /* to[0..2]: three words; to[3], to[4]: value 0 and the last one, where they are alone in their words */
                const bool odd = at & 1;
                const int l = count - 1;
#pragma unroll
                for (int e = 0; e < 3; e++) mask[e] = (mask[2 * e] & 0xffffu) | (mask[2 * e + 1] & 0xffff0000u);
                const bool first_ours = at >= 0 && count > 0, last_ours = at + l >= 0 && l >= 0;
                turn = odd ? 0x5432 : 0x3210;
#pragma unroll
                for (int e = 0; e < 3; e++) {
                    const int i = 2 * e + (odd ? 1 : 0);
                    to[e] = at + i >= 0 && i + 1 < count ? staged + 2 * (at + i) : nowhere;
                }
                to[3] = odd && first_ours ? staged + 2 * at : nowhere;
                to[4] = !((at + l) & 1) && last_ours ? staged + 2 * (at + l) : nowhere;
                single = (uint32_t)l >> 1;
                last = l & 1 ? 16 : 0;
            }
            if (mk_map_used(m)) mk_rows_wait(base + here_p, row_packets, nrows, here_p, epoch, q);
            uint4 after[MK_MAX_ROWS] = {}; /* the next packet of all rows, on its way while these are staged: one asked for in the midst of them would be waited for at once */
#pragma unroll
            for (uint32_t r = 0; r < MK_MAX_ROWS; r++) mk_packet_again(&after[r], base + p + r * row_packets, ahead && r < nrows);
#pragma unroll
            for (uint32_t r = 0; r < MK_MAX_ROWS; r++) {
                if (r >= nrows) break;
                const uint32_t word[3] = {q[r].x, q[r].y, q[r].z}, row = r * stride;
                if (heads && look && MK_MAP_TRAILER(m) < 3)
                    trailer[r * wait->nslice + MK_MAP_SLICE(m) - wait->slice0] = __uint_as_float(MK_MAP_TRAILER(m) == 0 ? word[0] : MK_MAP_TRAILER(m) == 1 ? word[1] : word[2]);
                if constexpr (PAIRS) {
                    if (FORM == MK_X_F16)
#pragma unroll
                        for (int e = 0; e < 3; e++) top[r] = __vmaxu2(top[r], mk_magnitudes(word[e] & mask[e]));
                    if (!stage) continue;
                    if (mk_minds(to[0], nowhere)) mk_sts32(to[0] + row, __byte_perm(word[0], word[1], turn));
                    if (mk_minds(to[1], nowhere)) mk_sts32(to[1] + row, __byte_perm(word[1], word[2], turn));
                    if (mk_minds(to[2], nowhere)) mk_sts32(to[2] + row, __byte_perm(word[2], 0, turn));
                    if (mk_minds(to[3], nowhere)) mk_sts16(to[3] + row, word[0]);
                    if (mk_minds(to[4], nowhere)) mk_sts16(to[4] + row, (single == 0 ? word[0] : single == 1 ? word[1] : word[2]) >> last);
                } else {
#pragma unroll
                    for (uint32_t e = 0; e < VALUES; e++) {
                        const uint32_t bits = (F32 ? word[e % 3] : e & 1 ? word[e / 2] & 0xffff0000u : word[e / 2] << 16) & mask[e];
                        float y = __uint_as_float(bits);
                        if (RMS) {
                            sum[r] = __fmaf_rn(y, y, sum[r]);
                            y = __fmul_rn(y, gain[e]);
                        }
                        if (FORM == MK_X_F16) top[r] = max(top[r], mk_bf16_bits(y) & 0x7fffu);
                        if (!stage) continue;
                        if (mk_minds(to[e], nowhere)) mk_sts16(to[e] + row, mk_bf16_bits(y));
                    }
                }
            }
#pragma unroll
            for (uint32_t r = 0; r < MK_MAX_ROWS; r++) q[r] = after[r];
        }
        __syncwarp();
        if (look) {
            if (FORM == MK_X_F16)
#pragma unroll
                for (uint32_t r = 0; r < MK_MAX_ROWS; r++)
                    if (r < nrows) mk_row_top(d, r, mk_top_of(top[r]));
            if (RMS) { /* each as mk_warp_sum would have it */
                const float s = mk_warp_eight(sum, d->lane);
                if ((d->lane & 3) == 0) sh->sumsq[d->memo->parity][d->lane / 4][d->warp] = s;
            }
        }
        if (stage) break;
        look = false;
    }

    if (d->tid < nrows) mk_stage_pad(staged + d->tid * stride, n);
    if (FORM != MK_X_F16 && !heads) return;
    mk_sync();
    if (heads && !again) {
        const uint32_t n_heads = mk_small_quot(k, plan->x.norm_group), per = mk_small_quot(wait->nslice, n_heads);
#pragma unroll 1
        for (uint32_t i = d->tid; i < nrows * n_heads; i += MK_COMPUTE) {
            const uint32_t r = mk_small_quot(i, n_heads), h = i - r * n_heads;
            float s = 0;
#pragma unroll 1
            for (uint32_t t = 0; t < per; t++) s += trailer[r * wait->nslice + h * per + t];
            sh->head_rstd[r][h] = mk_rsqrt(__fmaf_rn(s, plan->inv_k, plan->x.eps));
        }
    }
    if (FORM == MK_X_F16) {
        if (heads) mk_sync();
        const uint32_t blocks = (n + 63) / 64, eights = blocks * 8;
#pragma unroll 1
        for (uint32_t i = d->tid; i < nrows * blocks; i += MK_COMPUTE) {
            const uint32_t r = mk_small_quot(i, blocks), v = c0 + (i - r * blocks) * 64;
            const float x = mk_row_shift(d, plan, r, v).inverse;
            sh->factor[i] = heads ? __fmul_rn(x, sh->head_rstd[r][v / 64 >> plan->head_shift]) : x;
        }
        const uint32_t ways = nrows > 4 ? 1 : nrows > 2 ? 2 : nrows > 1 ? 4 : 8, r = d->warp / ways, part = d->warp & (ways - 1); /* warps of a row */
        if (r >= nrows) return;
#pragma unroll 2
        for (uint32_t i = part * 32 + d->lane; i < eights; i += ways * 32) {
            const uint32_t less = mk_row_shift(d, plan, r, c0 + i * 8).less;
            mk_f16_eight(staged + r * stride + i * 16, less);
        }
    }
}

/* Waits for packets of some rows, of which q are earlier looks: the lane's packet of row r in its turn j is q[r * T + j]; what it does not want has the epoch already. While some are late a lane
 * looks at the last of its own alone, again and again: 132 workers would ask for 32 KB each. from: packet packet0 of row row0. */
template <uint32_t T, uint32_t N>
MK_DEV void mk_some_wait(const uint4 *from, uint32_t row_packets, const mk_turns &turns, uint32_t epoch, uint32_t row0, uint32_t packet0, uint4 (&q)[N])
{
    uint32_t looks = 0, any = 0;
    bool more = true;
#pragma unroll
    for (uint32_t i = 0; i < N; i++) any |= q[i].w ^ epoch;
    if (!__any_sync(0xffffffffu, any)) return; /* mostly, but for the first turn */
    do {
        uint32_t late = 0;
#pragma unroll
        for (uint32_t i = 0; i < N; i++) late |= q[i].w != epoch ? 1u << i : 0;
        if (!__any_sync(0xffffffffu, late)) break;
        if (late) {
            const uint32_t last = 31 - __clz(late), r = last / T, at = mk_turn_at(turns.packets, last % T);
            uint32_t found;
            do
                found = mk_packet_load(from + r * row_packets + at).w;
            while ((more = mk_still_waiting(++looks, 0, row0 + r, packet0 + at, found)) && found != epoch);
        }
#pragma unroll
        for (uint32_t i = 0; i < N; i++) mk_packet_again(&q[i], from + i / T * row_packets + mk_turn_at(turns.packets, i % T), late & 1u << i);
    } while (__all_sync(0xffffffffu, more));
    mk_waited(looks);
}
/* Stages a vector of several rows whose packets are dealt and which fits whole: each row as mk_take has it, so many rows at a time that a lane has eight packets of them on their way. Two rows at a
 * time become what is staged; then the packets of the rows that come R later are asked for in their place, and what takes long (a sum and a maximum over the warp) lies beside each other's. What a
 * lane has no packet of keeps its first look, zeros with the epoch, and goes where nobody looks. No barrier behind it yet. */
template <bool F32, uint32_t FORM, uint32_t PRO> MK_CALL void mk_gather_some(const mk_insn *in)
{
    constexpr uint32_t T = MK_LOADS_OF(F32, PRO), N = 8, R = N / T, TWO = R < 2 ? 1 : 2, WORDS = F32 ? 2 : 3;
    constexpr bool FP8 = FORM == MK_X_F16, RMS = PRO == MK_ONE_RMS, HEADS = PRO == MK_ONE_HEADS;
    static_assert(T * R == N, "whole rows");
    const mk_dev here = mk_here(in), *d = &here;
    mk_shared *sh = d->sh;
    const mk_fed *f = mk_fed_of(in);
    const mk_plan *p = &f->plan;
    const mk_vec *v = &sh->vec[in->wait[0].vec];
    const mk_hands g = p->hands;
    const uint32_t k = p->x.k, nrows = d->step->nrows, stride = mk_row_stride(k), row_packets = v->nslice * v->slice_packets, epoch = f->place.epoch[0], parity = d->memo->parity;
    const mk_hand h = mk_hand_of<F32>(p, g, d->lane);
    const mk_turns turns = mk_turns_of<F32>(g);
    const uint32_t group0 = d->warp * g.values, value0 = group0 + h.value, packet0 = p->skip + d->warp * g.packets + d->lane, first0 = HEADS ? group0 : value0; /* trailers have no value */
    const uint32_t staged = mk_smem(sh->staging), nowhere = staged + stride - 32, left = k - value0; /* nowhere: between two rows */
    const float4 *const gamma = RMS ? mk_keep_at((const float4 *)(sh->args.map + p->gain) + (F32 ? 1 : 2) * packet0) : 0;
    const uint4 *from = f->place.in[0] + packet0;
    uint4 q[N];
    float4 gain[RMS ? T : 1][F32 ? 1 : 2]; /* of a packet's values; what is no value's is 0 */
    uint32_t to[T], mine[WORDS], turn = 0, clip = 0; /* to: of the first row; mine: which of a packet's values are the lane's; turn, clip: which of its turns it has a packet in, one that goes on behind k */
#pragma unroll
    for (uint32_t j = 0; j < T; j++) {
        const uint32_t value = mk_turn_at(turns.values, j);
        const bool has = h.any && first0 + value < k;
        if (has) turn |= 1u << j;
        if (!F32 && !HEADS && has && left - value < 6) clip |= 1u << j;
        to[j] = has ? staged + 2 * (value0 + value) : nowhere;
        mk_keep(&to[j]);
        if (RMS)
#pragma unroll
            for (uint32_t i = 0; i < (F32 ? 1 : 2); i++) gain[j][i] = has ? __ldg(gamma + (F32 ? 1 : 2) * mk_turn_at(turns.packets, j) + i) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (uint32_t i = 0; i < WORDS; i++) {
        mine[i] = mk_hand_mine<F32>(h, i);
        mk_keep(&mine[i]);
    }
    mk_keep(&turn);
    const auto ask = [&](uint32_t row0, uint32_t r) { /* row r of the batch from row0 on, which `from` is */
        const uint32_t some = row0 + r < nrows ? turn : 0;
#pragma unroll
        for (uint32_t j = 0; j < T; j++) mk_packet_again(&q[r * T + j], from + r * row_packets + mk_turn_at(turns.packets, j), some & 1u << j);
    };
    const uint32_t trailers = mk_smem(sh->red) + 128 * N * d->warp, group = d->warp + d->lane * MK_WARPS; /* of trailers: 32 places a turn and row */
    const uint32_t word = HEADS ? mk_trailer_word(g) : 0;
    static_assert(128 * N * MK_WARPS <= MK_RED_FLOATS * 4, "trailers");
#pragma unroll
    for (uint32_t i = 0; i < N; i++) q[i] = make_uint4(0, 0, 0, epoch);
#pragma unroll
    for (uint32_t r = 0; r < R; r++) ask(0, r);
    if (HEADS) mk_sync(); /* nobody reads the reduction area any more */
#pragma unroll 1
    for (uint32_t row0 = 0, at = 0; row0 < nrows; row0 += R, at += R * stride) { /* at: from the first row on */
        mk_some_wait<T>(from, row_packets, turns, epoch, row0, packet0, q);
        from += R * row_packets;
#pragma unroll
        for (uint32_t r0 = 0; r0 < R; r0 += TWO) {
            if (row0 + r0 >= nrows) break;
            uint32_t top[TWO] = {}, x[TWO * T][3];
            float sum[TWO] = {};
#pragma unroll
            for (uint32_t i = 0; i < TWO * T; i++) { /* what was not asked for is zero; a row behind the last one, anything */
                const uint32_t which = i / T, j = i % T, r = r0 + which;
                const uint4 y = q[r * T + j];
                uint32_t(&w)[3] = x[i];
                if (F32) {
                    float z[3] = {__uint_as_float(y.x), __uint_as_float(y.y), __uint_as_float(y.z)};
                    const float by[3] = {gain[RMS ? j : 0][0].x, gain[RMS ? j : 0][0].y, gain[RMS ? j : 0][0].z};
#pragma unroll
                    for (uint32_t e = 0; e < 3; e++) {
                        sum[which] = __fmaf_rn(z[e], z[e], sum[which]);
                        z[e] = __fmul_rn(z[e], by[e]);
                    }
                    w[0] = mk_bf16_pair(z[0], z[1]), w[1] = mk_bf16_pair(z[2], 0), w[2] = 0;
                } else {
                    w[0] = y.x, w[1] = y.y, w[2] = y.z;
                    if (HEADS && (!which || row0 + r < nrows) && turn & 1u << j && h.trailer) mk_sts32(trailers + 128 * (r * T + j) + 4 * h.slice, mk_packet_word(y, word));
                    if (!HEADS && clip & 1u << j) mk_packet_clip(w, mk_turn_at(turns.values, j), left);
#pragma unroll
                    for (uint32_t e = 0; e < 3; e++) {
                        if (HEADS) w[e] &= mine[e];
                        const float4 a = gain[RMS ? j : 0][0], b = gain[RMS ? j : 0][F32 ? 0 : 1];
                        if (RMS) w[e] = mk_word_scaled(w[e], e == 0 ? a.x : e == 1 ? a.z : b.x, e == 0 ? a.y : e == 1 ? a.w : b.y, &sum[which]);
                    }
                }
                if (FP8) {
                    top[which] = __vmaxu2(__vmaxu2(top[which], mk_magnitudes(w[0])), mk_magnitudes(w[1]));
                    if (!F32) top[which] = __vmaxu2(top[which], mk_magnitudes(w[2]));
                }
            }
            if (FP8 || RMS) {
#pragma unroll
                for (uint32_t i = 0; i < TWO; i++) ask(row0 + R, r0 + i);
                __syncwarp();
            } else { /* made before others take their place: else ptxas asks first and keeps both, which above costs less than this would */
#pragma unroll
                for (uint32_t i = 0; i < TWO * T; i++)
#pragma unroll
                    for (uint32_t e = 0; e < WORDS; e++) mk_keep(&x[i][e]);
                __syncwarp();
#pragma unroll
                for (uint32_t i = 0; i < TWO; i++) ask(row0 + R, r0 + i);
            }
            if (RMS) {
#pragma unroll
                for (uint32_t step = 16; step; step /= 2)
#pragma unroll
                    for (uint32_t i = 0; i < TWO; i++) sum[i] = mk_warp_add(sum[i], step);
            }
            if (FP8)
#pragma unroll
                for (uint32_t i = 0; i < TWO; i++) top[i] = __reduce_max_sync(0xffffffffu, mk_top_of(top[i]));
#pragma unroll
            for (uint32_t i = 0; i < TWO; i++) {
                const uint32_t r = r0 + i, row = row0 + r;
                if (i && row >= nrows) break;
                if (RMS) mk_row_squares(d, parity, row, sum[i]);
                const mk_f16_shift shift = mk_f16_shift_of(FP8 ? top[i] : 0);
#pragma unroll
                for (uint32_t j = 0; j < T; j++) {
                    const uint4 y = make_uint4(x[i * T + j][0], x[i * T + j][1], x[i * T + j][2], 0);
                    mk_hand_put<F32>(to[j] + at + r * stride, mk_minds(to[j], nowhere), mine, FP8 ? mk_packet_shifted<F32>(y, shift.less) : y);
                }
                float factor = FP8 ? shift.inverse : 1;
                /* a lane a group, for its K blocks */
                if (HEADS && group * g.values < k) {
                    float squares = 0;
#pragma unroll 1
                    for (uint32_t s = 0; s * g.slice < g.values; s++) squares += __uint_as_float(mk_lds32(trailers + 128 * (r * T + d->lane) + 4 * s));
                    const float rstd = mk_rsqrt(__fmaf_rn(squares, p->inv_k, p->x.eps));
                    factor = __fmul_rn(factor, rstd);
                    if (!FP8) sh->head_rstd[row][group] = rstd;
                }
                if (FP8 && group * g.values < k) mk_factor_put(k, g.values, group, row * (stride & ~127u), factor);
            }
        }
        if (HEADS) __syncwarp(); /* the trailers are read */
    }
}
/* Stages values [c0, c0 + n) of such a vector of bf16 without an RMS norm, a lane's packet of all rows at a time. LOOK: it is the vector's first part, with which all of it is looked at for
 * what no part can say: largest values and norms of heads; the first part is staged as it comes then, and its values become f16 where they lie. No barrier behind it yet. */
template <uint32_t FORM, bool HEADS, bool LOOK> MK_CALL void mk_gather_part(const mk_insn *in, uint32_t c0, uint32_t n)
{
    constexpr bool FP8 = FORM == MK_X_F16;
    constexpr uint32_t N = MK_MAX_ROWS;
    static_assert(!LOOK || FP8 || HEADS, "there is something to look for");
    const mk_dev here = mk_here(in), *d = &here;
    mk_shared *sh = d->sh;
    const mk_fed *f = mk_fed_of(in);
    const mk_plan *p = &f->plan;
    const mk_vec *v = &sh->vec[in->wait[0].vec];
    const mk_hands g = p->hands;
    const uint32_t nrows = d->step->nrows, stride = mk_row_stride(n), row_packets = v->nslice * v->slice_packets, epoch = f->place.epoch[0], staged = mk_smem(sh->staging);
    const mk_hand h = mk_hand_of<false>(p, g, d->lane);
    const mk_turns turns = mk_turns_of<false>(g);
    const uint32_t group0 = d->warp * g.values, per_head = mk_small_quot(g.values, g.slice), heads = mk_small_quot(p->x.k, g.values), rows = (1u << nrows) - 1, word = HEADS && LOOK ? mk_trailer_word(g) : 0;
    float *const trailer = sh->red; /* [row][slice of its head][head] */
    const uint32_t begin = LOOK ? 0 : c0, end = LOOK ? p->x.k : c0 + n;
    uint32_t at = group0, packet = p->skip + d->warp * g.packets + d->lane, of_row[N] = {}; /* at: the group's first value; of_row: largest magnitudes so far where it looks, else mk_f16_shift.less */
    for (; at + g.values <= begin; at += turns.values[0]) packet += turns.packets[0];
    if (FP8 && !LOOK)
#pragma unroll
        for (uint32_t r = 0; r < N; r++) of_row[r] = mk_f16_shift_of(sh->top[r][d->warp]).less;
    const auto wanted_of = [&](uint32_t first) { /* rows of the lane's packet of the group that begins there */
        const uint32_t x = first + h.value;
        return first < end && h.any && ((LOOK && HEADS) || (h.count && x < end && x + h.count > begin)) ? rows : 0;
    };
    uint4 q[N];
    uint32_t wanted = wanted_of(at);
    const uint4 *from = mk_keep_at(f->place.in[0] + packet);
#pragma unroll
    for (uint32_t r = 0; r < N; r++) {
        q[r] = make_uint4(0, 0, 0, epoch);
        mk_packet_again(&q[r], from + r * row_packets, wanted & 1u << r);
    }
    if (HEADS && LOOK) mk_sync(); /* nobody reads the reduction area any more */
#pragma unroll 1
    while (at < end) {
        const uint32_t here_p = packet, x = at + h.value, to = staged + 2 * (x - c0); /* wraps */
        const bool has = wanted;
        mk_some_wait<1>(from, row_packets, turns, epoch, 0, here_p, q);
        at += turns.values[0], packet += turns.packets[0];
        wanted = wanted_of(at);
        from = mk_keep_at(f->place.in[0] + packet);
        uint4 next[N];
#pragma unroll
        for (uint32_t r = 0; r < N; r++) {
            next[r] = make_uint4(0, 0, 0, epoch);
            mk_packet_again(&next[r], from + r * row_packets, wanted & 1u << r);
        }
        bool any[3], mine[3]; /* words of the packet: of all, of the part */
#pragma unroll
        for (uint32_t i = 0; i < 3; i++) {
            any[i] = has && 2 * i < h.count && x + 2 * i < end;
            mine[i] = any[i] && x + 2 * i >= c0 && x + 2 * i < c0 + n;
        }
        float *const to_trailer = trailer + h.slice * heads + mk_small_quot(x - h.value, g.values);
#pragma unroll
        for (uint32_t r = 0; r < N; r++) {
            if (r >= nrows) break;
            const uint32_t w[3] = {q[r].x, q[r].y, q[r].z};
            if (HEADS && LOOK && has && h.trailer) to_trailer[r * per_head * heads] = __uint_as_float(mk_packet_word(q[r], word));
            if (FP8 && LOOK)
#pragma unroll
                for (uint32_t i = 0; i < 3; i++) of_row[r] = __vmaxu2(of_row[r], any[i] ? mk_magnitudes(w[i]) : 0);
#pragma unroll
            for (uint32_t i = 0; i < 3; i++)
                if (mine[i]) mk_sts32(to + r * stride + 4 * i, FP8 && !LOOK ? mk_f16_pair_shifted(w[i], of_row[r]) : w[i]);
        }
#pragma unroll
        for (uint32_t r = 0; r < N; r++) q[r] = next[r];
    }
    __syncwarp();
    if (FP8 && LOOK) {
#pragma unroll
        for (uint32_t r = 0; r < N; r++)
            if (r < nrows) mk_row_top(d, r, mk_top_of(of_row[r]));
        __syncwarp();
    }
    /* a lane a row and one of the warp's heads */
    const uint32_t r = d->lane % N;
#pragma unroll 1
    for (uint32_t head = d->warp + d->lane / N * MK_WARPS; HEADS && LOOK && r < nrows && head < heads; head += 32 / N * MK_WARPS) {
        float squares = 0;
#pragma unroll 1
        for (uint32_t s = 0; s < per_head; s++) squares += trailer[(r * per_head + s) * heads + head];
        sh->head_rstd[r][head] = mk_rsqrt(__fmaf_rn(squares, p->inv_k, p->x.eps));
    }
    if (HEADS && LOOK) __syncwarp();
    if (FP8) {
        const uint32_t eights = g.values / 8;
#pragma unroll 1
        for (uint32_t first = group0; LOOK && first < c0 + n; first += turns.values[0]) /* all of it is whole K blocks */
#pragma unroll 2
            for (uint32_t i = d->lane; i < nrows * eights; i += 32) {
                const uint32_t row = mk_small_quot(i, eights), x = first + (i - row * eights) * 8;
                if (x >= c0 && x < c0 + n) mk_f16_eight(staged + row * stride + 2 * (x - c0), mk_f16_shift_of(sh->top[row][d->warp]).less);
            }
        /* a lane a row and one of the warp's groups, for its K blocks of the part */
        const float inverse = mk_f16_shift_of(sh->top[r][d->warp]).inverse;
#pragma unroll 1
        for (uint32_t group = d->warp + d->lane / N * MK_WARPS; r < nrows && group * g.values < p->x.k; group += 32 / N * MK_WARPS) {
            const float factor = HEADS ? __fmul_rn(inverse, sh->head_rstd[r][group]) : inverse;
#pragma unroll 1
            for (uint32_t b = group * g.values; b < (group + 1) * g.values; b += 64)
                if (b >= c0 && b < c0 + n) sh->factor[r * (stride >> 7) + (b - c0) / 64] = factor;
        }
    }
    if (d->tid < nrows) mk_stage_pad(staged + d->tid * stride, n);
}

#endif
