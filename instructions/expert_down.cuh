/* EXPERT_DOWN on the device. Semantics: expert_down.c. One product over all chosen experts: a (expert, row) pair's input is staged like a row of a vector, the columns of
 * mma.sync are the batch rows, and a K block's partial product is added with its pair's routing weight, experts in ascending id. A row that did not choose the expert
 * keeps its sum as it was. If not all pairs fit the staging area the experts come in batches, of which the warps aside stage all but the first; sums stay in registers.
 * A warp gathers a pair alone, so that no barrier is needed before its power of two (matvec.cuh) is known: every pair has its own.
 * An expert's segment has an even number of stages (the last one may be empty: megakernel/segments.cuh, expert_seg), so that each of its stages has one group of warps whatever lies before
 * it in the ring: the order of a row's sum depends on nothing but the row's own choice. Where a stage has room for more, neighbours in the union share stages: the first halves of some experts
 * lie in one, the second halves in the next (mk_down_shared, segments.cuh). */
#ifndef MK_EXPERT_DOWN_CUH
#define MK_EXPERT_DOWN_CUH

#include "instructions/matvec.cuh"
#include "megakernel/phased.cuh"

/* Of a batch, by (expert, row): the weight times the inverse of the pair's power of two, MK_NOT_CHOSEN: none; and behind them where the pair is staged. At the end of the
 * reduction area. */
#define MK_DOWN_MOST  48u /* pairs of a batch */
#define MK_DOWN_PAIRS (MK_DOWN_MOST * MK_MAX_ROWS)
#define MK_DOWN_TABLE (MK_RED_FLOATS - 2 * MK_DOWN_PAIRS)
#define MK_DOWN_HALF  (MK_DOWN_PAIRS / 2) /* where batches take turns, the second one's begins so far behind: of half as many pairs */
#define MK_NOT_CHOSEN 0xffffffffu /* bits that no product has */
static_assert(MK_DOWN_TABLE >= MK_PARTS(MK_MAX_ROWS) && MK_DOWN_TABLE * 4 >= MK_COMPUTE * 16, "partial sums before the table; room for what mk_pair_gather throws away");

static_assert(MK_MAX_ROWS == MK_WARPS && MK_STAGING / (MK_STAGED_VALUES * 2 + 32) >= MK_WARPS, "an expert of all rows is staged at once, a pair a warp");

#define MK_PAIR_TURNS 7u /* packets of a lane, under way at once */

/* Experts come in batches. Where the warps aside stage their pairs (mk_aside_pairs), batches take turns at halves of the table; pair p is staged in place p modulo `fit`. */
typedef struct mk_batches {
    uint32_t fit, most; /* pairs: that there is room for, that a batch has, unless one expert has more, or experts that share stages */
    uint32_t share;
    bool turns;
} mk_batches;
/* They do if several rows have more pairs than fit, by the host's table of packets. A kernel that ends with its step has nobody aside. */
MK_DEV mk_batches mk_batches_of(const mk_fed *f, uint32_t nrows)
{
    const uint32_t fit = mk_small_quot(MK_STAGING, mk_row_stride(f->in.expert.k)), most = min(fit, MK_DOWN_MOST);
    const bool turns = !MK_ONE_STEP && nrows > 1 && nrows * f->in.expert.topk > most && f->plan.map;
    const mk_batches b = {fit, turns ? min(fit / 2, MK_DOWN_MOST / 2) : most, 1u << f->plan.shared.log, turns};
    return b;
}
/* Where the batch that begins with expert j ends: with whole stages. */
MK_DEV uint32_t mk_batch_end(const mk_batches *b, const mk_pairs *pairs, uint32_t j, uint32_t n_union)
{
    const uint32_t first = pairs->first[j], all = ~(b->share - 1), least = min(j + b->share, n_union);
    uint32_t end = max(min(j + (b->most & all), n_union), least);
#pragma unroll 1
    while (end > least && pairs->first[end] - first > b->most) end = j + (end - j - 1 & all);
    return end;
}

/* Until a batch, counted since the launch, is staged, or multiplied; by a warp: it is. What is asked of the batch before the first is true. last: as in mk_stage_leave. */
MK_DEV void mk_batch_await(const uint64_t *bar, uint32_t batch)
{
    while (!mk_mbar_try(mk_smem(&bar[batch & 1]), batch >> 1 & 1))
        if (mk_flag_get(&mk_sh()->aborted)) return; /* whatever is missing: nobody is to be held up who leaves */
}
MK_DEV void mk_batch_staged(mk_shared *sh, uint32_t batch, uint32_t lane)
{
    mk_warp_arrive(mk_smem(&sh->pairs_full[batch & 1]), lane);
}
MK_DEV void mk_batch_leave(mk_shared *sh, uint32_t batch, uint32_t lane, uint32_t last)
{
    mk_stage_leave(mk_smem(&sh->pairs_empty[batch & 1]), lane, last, sh->lap.none);
}
/* A batch's table. */
MK_DEV uint32_t *mk_batch_table(mk_shared *sh, uint32_t batch)
{
    return (uint32_t *)sh->red + MK_DOWN_TABLE + (batch & 1) * MK_DOWN_HALF;
}

/* Pair p of the table of a batch whose first expert is j0: staged at shared address `row`; inverse: of its power of two. A lane. */
MK_DEV void mk_pair_enter(uint32_t *table, const mk_routes *routes, const mk_pairs *pairs, uint32_t p, uint32_t j0, float inverse, uint32_t row)
{
    const uint32_t r = pairs->row[p];
    uint32_t *const entry = table + (pairs->expert[p] - j0) * MK_MAX_ROWS + r;
    entry[0] = __float_as_uint(__fmul_rn(routes->weight[r][pairs->rank[p]], inverse));
    entry[MK_DOWN_PAIRS] = row;
}

/* A row's experts publish `per` packets each. */
typedef struct mk_pairs_walk {
    const uint16_t *start;
    const uint4 *base;
    uint32_t per, row_packets, epoch;
    mk_divisor by_slice;
} mk_pairs_walk;
MK_DEV mk_pairs_walk mk_pairs_walk_of(const mk_dev *d)
{
    const mk_wait *w = &d->in->wait[0];
    const mk_vec *v = &d->sh->vec[w->vec];
    mk_pairs_walk k;
    k.start = d->sh->start + v->start_index;
    k.base = mk_fed_of(d->in)->place.in[0];
    k.per = mk_small_quot(v->nslice, d->in->expert.topk) * v->slice_packets;
    k.row_packets = v->nslice * v->slice_packets;
    k.epoch = mk_fed_of(d->in)->place.epoch[0];
    k.by_slice = mk_div_by_slice(v);
    return k;
}

/* A warp brings the values of row r's choice `rank` to shared address `to`, in order, as they are. A slice's last packet may write beyond its values: they come backwards, so
 * that what belongs there is written later. Packets are asked for beyond the pair's as well: memory goes on (gpu.cu). */
MK_DEV void mk_pair_gather(const mk_dev *d, const mk_pairs_walk *w, uint32_t r, uint32_t rank, uint32_t to)
{
    const uint32_t first = rank * w->per, none = mk_smem(d->sh->red) + d->tid * 16;
    const uint4 *from = w->base + r * w->row_packets + first;
#pragma unroll 1
    for (uint32_t i = d->lane; i - d->lane < w->per; i += 32 * MK_PAIR_TURNS) {
        uint4 q[MK_PAIR_TURNS];
        uint32_t at[MK_PAIR_TURNS], wanted = 0;
        const uint4 *p = from + i;
#pragma unroll
        for (uint32_t j = 0; j < MK_PAIR_TURNS; j++) q[j] = mk_packet_load(p + 32 * j);
        __syncwarp(); /* all asked for before anything else is done */
#pragma unroll
        for (uint32_t j = 0; j < MK_PAIR_TURNS; j++) {
            const uint32_t p = min(i + 32 * j, w->per - 1), s = mk_quot(p, w->by_slice), v = w->start[s] + (p - s * w->by_slice.n) * 6, end = w->start[s + 1];
            at[j] = i + 32 * j < w->per && v < end ? to + 2 * v : none;
            wanted |= at[j] != none ? 1u << j : 0;
        }
        mk_packets_wait_every(p, 32, wanted, w->epoch, 0, r, first + i, q);
#pragma unroll
        for (int k = 5; k >= 0; k--) {
            __syncwarp();
#pragma unroll
            for (uint32_t j = 0; j < MK_PAIR_TURNS; j++) {
                const uint32_t word = k < 2 ? q[j].x : k < 4 ? q[j].y : q[j].z;
                mk_sts16(at[j] + 2 * k, k & 1 ? word >> 16 : word);
            }
        }
    }
}

/* From there it becomes a staged row, in place: k values, zeros up to the end of the K block. Returns the inverse of the power of two that they were multiplied by. */
template <uint32_t FORM> MK_DEV float mk_pair_open(uint32_t lane, uint32_t row, uint32_t k)
{
    const uint32_t bytes = ((k + 63) & ~63u) * 2;
    __syncwarp();
#pragma unroll 1
    for (uint32_t i = 2 * k + 2 * lane; i < bytes; i += 64) mk_sts16(row + i, 0);
    if (FORM != MK_X_F16) return 1;
    __syncwarp();
    return mk_f16_in_place(row + lane * 16, row + bytes, 512);
}

/* What a lane's packets of a pair are: its words of the pair's table (mk_pair_table), 0 where the pair has no packet. */
template <uint32_t WORDS> MK_DEV void mk_pair_map(uint32_t (&m)[WORDS], const uint4 *from)
{
#pragma unroll
    for (uint32_t j = 0; j < WORDS; j += 4) {
        const uint4 v = __ldg(from + j / 4);
        m[j] = v.x, m[j + 1] = v.y, m[j + 2] = v.z, m[j + 3] = v.w;
    }
#pragma unroll
    for (uint32_t j = 0; j < WORDS; j++) mk_keep(&m[j]); /* not later */
}
/* Stores what they bring at shared addresses `to`, as bf16; *top: largest magnitudes so far, pairwise. */
template <bool FP8, uint32_t N> MK_DEV void mk_pair_put(const uint32_t (&to)[N], const uint32_t (&values)[N], const uint4 (&q)[N], uint32_t *top)
{
#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        if (FP8 && values[i])
            *top = __vmaxu2(__vmaxu2(*top, mk_magnitudes(q[i].x)), __vmaxu2(mk_magnitudes(q[i].y), mk_magnitudes(q[i].z))); /* behind the values are zeros */
        if (values[i]) mk_sts32(to[i], q[i].x);
        if (values[i] > 2) mk_sts32(to[i] + 4, q[i].y);
        if (values[i] > 4) mk_sts32(to[i] + 8, q[i].z);
    }
}
/* The same without conditions, so that no predicate stands between the last packet and the barrier, where pairs have heads (MK_PAIR_HEAD). Words behind a slice's end, which are zeros, lie where
 * later packets begin: so the last words of all packets come first, and what belongs there comes later. Behind the pair's end they are its padding, or the head of the next pair. A packet that is none
 * goes to `nowhere`, of which magnitudes are not looked at: mask is 0. */
template <bool FP8, uint32_t N> MK_DEV void mk_pair_put_whole(const uint32_t (&to)[N], const uint32_t (&mask)[N], uint32_t nowhere, const uint4 (&q)[N], uint32_t *top)
{
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        if (mk_minds(to[i], nowhere)) mk_sts32(to[i] + 8, q[i].z);
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        if (mk_minds(to[i], nowhere)) mk_sts32(to[i] + 4, q[i].y);
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        if (mk_minds(to[i], nowhere)) mk_sts32(to[i], q[i].x);
        if (FP8) *top = __vmaxu2(__vmaxu2(*top, q[i].x & mask[i]), __vmaxu2(q[i].y & mask[i], q[i].z & mask[i]));
    }
}
/* Zeros behind a pair's k values, up to the end of the K block. */
MK_DEV void mk_pair_pad(uint32_t row, uint32_t k, uint32_t lane)
{
#pragma unroll 1
    for (uint32_t i = k + 2 * lane; i < (k + 63 & ~63u); i += 64) mk_sts32(row + 2 * i, 0);
}
/* By a warp: a pair's k bf16 values, and the zeros behind them, become f16 where they lie. Two eights of a lane at a time, the second of which is the first once more where there is none. */
MK_DEV void mk_pair_f16(uint32_t row, uint32_t k, uint32_t lane, uint32_t less)
{
    const uint32_t end = row + (k + 63 & ~63u) * 2;
#pragma unroll 1
    for (uint32_t i = row + 16 * lane; i < end; i += 1024) {
        const uint32_t at[2] = {i, i + 512 < end ? i + 512 : i};
        const uint4 v[2] = {mk_lds128(at[0]), mk_lds128(at[1])};
#pragma unroll
        for (uint32_t e = 0; e < 2; e++)
            mk_sts128(at[e], mk_f16_pair_shifted(v[e].x, less), mk_f16_pair_shifted(v[e].y, less), mk_f16_pair_shifted(v[e].z, less), mk_f16_pair_shifted(v[e].w, less));
    }
}
#define MK_PAIR_ASKS 6u /* packets of a lane at a time, by mk_pairs_take */
static_assert(MK_PAIR_WORDS == 2 * MK_PAIR_ASKS, "two turns at most");
/* Asks for those of `left` packets more that the pair has. */
MK_DEV void mk_pair_asks(uint4 (&q)[MK_PAIR_ASKS], const uint4 *from, uint32_t left)
{
#pragma unroll
    for (uint32_t i = 0; i < MK_PAIR_ASKS; i++) {
        q[i] = make_uint4(0, 0, 0, 0);
        mk_packet_again(&q[i], from + 32 * i, 32 * i < left);
    }
}
/* Stages the warp's pairs of [p0, p1), whose packets the host has a table of, and says in the table of the batch where they are: bits as those of mk_pair_gather and mk_pair_open. The next packets,
 * of the next pair as well, are on their way while these are stored. j0: the first expert. */
template <uint32_t FORM> MK_DEV void mk_pairs_take(const mk_dev *d, const mk_routes *routes, uint32_t *table, uint32_t p0, uint32_t p1, uint32_t j0)
{
    constexpr bool FP8 = FORM == MK_X_F16;
    constexpr uint32_t TURN = 32 * MK_PAIR_ASKS;
    const mk_pairs *pairs = &d->sh->pairs;
    const mk_fed *f = mk_fed_of(d->in);
    const mk_vec *v = &d->sh->vec[d->in->wait[0].vec];
    const uint32_t per = f->plan.packets, k = d->in->expert.k, stride = mk_row_stride(k), row_packets = v->nslice * v->slice_packets, epoch = f->place.epoch[0];
    const bool twice = per > TURN;
    const auto packet_of = [&](uint32_t p) { return pairs->row[p] * row_packets + pairs->rank[p] * per + d->lane; };
    uint32_t m[MK_PAIR_WORDS], p = p0 + d->warp;
    if (p >= p1) return;
    uint32_t packet = packet_of(p);
    uint4 next[MK_PAIR_ASKS];
    mk_pair_asks(next, f->place.in[0] + packet, per);
    mk_pair_map(m, (const uint4 *)(d->sh->args.map + f->plan.map) + d->lane * (MK_PAIR_WORDS / 4));
#pragma unroll 1
    for (; p < p1; p += MK_WARPS) {
        const uint32_t r = pairs->row[p], rank = pairs->rank[p], row = mk_smem(d->sh->staging) + (p - p0) * stride;
        const bool others = p + MK_WARPS < p1;
        const uint32_t then = others ? packet_of(p + MK_WARPS) : packet;
        uint32_t top = 0;
        mk_pair_pad(row, k, d->lane);
#pragma unroll 1
        for (uint32_t n = 0; n < per; n += TURN) { /* once or twice; twice, the table's halves change places, and are back for the next pair */
            uint32_t to[MK_PAIR_ASKS], values[MK_PAIR_ASKS], wanted = 0;
            uint4 q[MK_PAIR_ASKS];
#pragma unroll
            for (uint32_t i = 0; i < MK_PAIR_ASKS; i++) {
                const uint32_t word = m[i];
                to[i] = row + MK_PAIR_TO(word);
                values[i] = MK_PAIR_VALUES(word);
                wanted |= values[i] ? 1u << i : 0;
                q[i] = next[i];
                m[i] = twice ? m[i + MK_PAIR_ASKS] : word, m[i + MK_PAIR_ASKS] = word;
            }
            const bool goes_on = n + TURN < per;
            mk_pair_asks(next, f->place.in[0] + (goes_on ? packet + TURN : then), goes_on ? per - TURN : others ? per : 0);
            mk_packets_wait_every<MK_PAIR_ASKS, true>(f->place.in[0] + packet + n, 32, wanted, epoch, 0, r, rank * per + d->lane + n, q);
            mk_pair_put<FP8>(to, values, q, &top);
        }
        packet = then;
        __syncwarp();
        const mk_f16_shift shift = mk_f16_shift_of(FP8 ? __reduce_max_sync(0xffffffffu, mk_top_of(top)) : 0);
        if (FP8) mk_pair_f16(row, k, d->lane, shift.less);
        if (d->lane == 0) mk_pair_enter(table, routes, pairs, p, j0, FP8 ? shift.inverse : 1, row);
    }
}

/* The table of a batch, as far as nobody has chosen the experts of [j0, j1): by `threads`, of which this is number i. row: where the batch's first pair is staged. */
MK_DEV void mk_pairs_none(const mk_routes *routes, uint32_t *table, uint32_t row, uint32_t j0, uint32_t j1, uint32_t nrows, uint32_t i, uint32_t threads)
{
#pragma unroll 1
    for (; i < (j1 - j0) * MK_MAX_ROWS; i += threads) {
        const uint32_t r = i % MK_MAX_ROWS;
        if (r < nrows && routes->rank[r][j0 + i / MK_MAX_ROWS] != 255) continue;
        table[i] = MK_NOT_CHOSEN;
        table[MK_DOWN_PAIRS + i] = row; /* not looked at, but loaded */
    }
}
/* What the warps aside do of EXPERT_DOWN of several rows: they stage the pairs of all batches but the first, a warp each fourth pair, as mk_pairs_take has them, while the compute warps multiply the
 * batch before. They begin when these are at EXPERT_DOWN, whose reduction area has the pairs' table in its beginning until all is staged. They have few registers: what is looked up in shared memory is
 * looked up again, and the next packets are asked for in the place of those that have just been stored. */
static_assert(32 * MK_PAIR_WORDS <= MK_DOWN_TABLE, "a table there");
/* The lane's first packet of pair p. */
MK_DEV const uint4 *mk_pair_packets(const mk_shared *sh, const mk_fed *f, uint32_t p, uint32_t lane)
{
    const mk_vec *v = &sh->vec[f->in.wait[0].vec];
    return f->place.in[0] + (sh->pairs.row[p] * (v->nslice * v->slice_packets) + sh->pairs.rank[p] * f->plan.packets + lane);
}
/* Waits for those of a turn that have values, from packet n of pair p on. word: what they are (MK_PAIR_WORD); q: a look at them. */
MK_DEV void mk_pair_wait(uint4 (&q)[MK_PAIR_ASKS], const uint32_t (&word)[MK_PAIR_ASKS], const mk_shared *sh, const mk_fed *f, uint32_t p, uint32_t n, uint32_t lane)
{
    uint32_t looks = 0;
    for (;;) {
        const uint32_t epoch = f->place.epoch[0];
        uint32_t late = 0;
#pragma unroll
        for (uint32_t i = 0; i < MK_PAIR_ASKS; i++) late |= MK_PAIR_VALUES(word[i]) && q[i].w != epoch ? 1u << i : 0;
        if (!__any_sync(0xffffffffu, late)) break;
        const uint4 *const from = mk_pair_packets(sh, f, p, lane) + n;
#pragma unroll
        for (uint32_t i = 0; i < MK_PAIR_ASKS; i++) mk_packet_again(&q[i], from + 32 * i, late & 1u << i);
        if (++looks & 255u) continue;
        uint32_t packet = 0, found = 0;
#pragma unroll
        for (uint32_t i = 0; i < MK_PAIR_ASKS; i++)
            if (late & 1u << i) packet = sh->pairs.rank[p] * f->plan.packets + n + 32 * i + lane, found = q[i].w;
        if (__any_sync(0xffffffffu, late && !mk_still_waiting(looks, 0, sh->pairs.row[p], packet, found))) break;
    }
    mk_waited(looks);
}
/* Where pair p is staged. */
MK_DEV uint32_t mk_pair_place(const mk_shared *sh, const mk_fed *f, uint32_t fit, uint32_t p)
{
    return mk_smem(sh->staging) + (p - mk_small_quot(p, fit) * fit) * mk_row_stride(f->in.expert.k);
}
/* batch: since the launch; returns the next one. */
MK_DEV uint32_t mk_aside_pairs(mk_shared *sh, const mk_fed *f, uint32_t batch, uint32_t warp, uint32_t lane)
{
    mk_aside_after(sh, f->place.after);
    const mk_pairs *pairs = &sh->pairs;
    const mk_routes *routes = (const mk_routes *)(mk_local_memory(&sh->args) + sh->vec[f->in.wait[1].vec].offset);
    const uint32_t n_union = routes->n_union;
    const mk_batches first = mk_batches_of(f, sh->step.nrows);
    uint32_t j = mk_batch_end(&first, pairs, 0, n_union), p = pairs->first[j] + (warp - pairs->first[j] & MK_ASIDES - 1), before = 0; /* before: first pair of the batch before */
    uint4 q[MK_PAIR_ASKS];
    mk_pair_asks(q, mk_pair_packets(sh, f, p < pairs->first[n_union] ? p : 0, lane), p < pairs->first[n_union] ? f->plan.packets : 0);
#pragma unroll 1
    for (uint32_t i = warp; i < MK_PAIR_WORDS; i += MK_ASIDES) sh->red[32 * i + lane] = __uint_as_float(__ldg(sh->args.map + f->plan.map + lane * MK_PAIR_WORDS + i)); /* [word][lane] */
    mk_aside_sync();
    mk_batch_staged(sh, batch++, lane); /* the first one is the compute warps' own */
#pragma unroll 1
    for (; j < n_union; batch++) {
        const mk_batches batches = mk_batches_of(f, sh->step.nrows); /* anew: registers */
        const uint32_t next = mk_batch_end(&batches, pairs, j, n_union), begin = pairs->first[j];
        uint32_t *const table = mk_batch_table(sh, batch);
        mk_batch_await(sh->pairs_empty, batch - 2);
        if (pairs->first[next] - before > batches.fit) mk_batch_await(sh->pairs_empty, batch - 1);
        mk_pairs_none(routes, table, mk_pair_place(sh, f, batches.fit, begin), j, next, sh->step.nrows, warp * 32 + lane, MK_ASIDES * 32);
#pragma unroll 1
        for (; p < pairs->first[next]; p += MK_ASIDES) {
            const uint32_t row = mk_pair_place(sh, f, batches.fit, p);
            uint32_t top = 0;
            mk_pair_pad(row, f->in.expert.k, lane);
#pragma unroll 1
            for (uint32_t n = 0; n < f->plan.packets;) {
                uint32_t to[MK_PAIR_ASKS], word[MK_PAIR_ASKS];
#pragma unroll
                for (uint32_t i = 0; i < MK_PAIR_ASKS; i++) word[i] = __float_as_uint(sh->red[n + 32 * i + lane]);
                mk_pair_wait(q, word, sh, f, p, n, lane);
#pragma unroll
                for (uint32_t i = 0; i < MK_PAIR_ASKS; i++) to[i] = row + MK_PAIR_TO(word[i]), word[i] = MK_PAIR_VALUES(word[i]);
                mk_pair_put<true>(to, word, q, &top);
                n += 32 * MK_PAIR_ASKS;
                const bool goes_on = n < f->plan.packets, others = p + MK_ASIDES < pairs->first[n_union];
                const uint4 *const from = mk_pair_packets(sh, f, goes_on || !others ? p : p + MK_ASIDES, lane);
                mk_pair_asks(q, goes_on ? from + n : from, goes_on ? f->plan.packets - n : others ? f->plan.packets : 0);
            }
            __syncwarp();
            const bool fp8 = f->in.expert.wtype == MK_W_FP8;
            const mk_f16_shift shift = mk_f16_shift_of(fp8 ? __reduce_max_sync(0xffffffffu, mk_top_of(top)) : 0);
            if (fp8) mk_pair_f16(row, f->in.expert.k, lane, shift.less);
            if (lane == 0) mk_pair_enter(table, routes, pairs, p, j, fp8 ? shift.inverse : 1, row);
        }
        j = next, before = begin;
        mk_batch_staged(sh, batch, lane); /* behind the last one the next ROUTE may come: nothing is read of this one's */
    }
    return batch;
}

/* Stages the pairs [p0, p1), whose experts begin with j0 and end before j1, and makes their table. */
template <uint32_t FORM> MK_DEV void mk_pairs_stage(const mk_dev *d, const mk_routes *routes, uint32_t *table, uint32_t p0, uint32_t p1, uint32_t j0, uint32_t j1)
{
    const uint32_t staging = mk_smem(d->sh->staging), k = d->in->expert.k, stride = mk_row_stride(k), nrows = d->step->nrows;
    if (nrows > 1) mk_pairs_none(routes, table, staging, j0, j1, nrows, d->tid, MK_COMPUTE);
    if (mk_fed_of(d->in)->plan.map) {
        mk_pairs_take<FORM>(d, routes, table, p0, p1, j0);
        return;
    }
    const mk_pairs *pairs = &d->sh->pairs;
    const mk_pairs_walk w = mk_pairs_walk_of(d);
#pragma unroll 1
    for (uint32_t p = p0 + d->warp; p < p1; p += MK_WARPS) {
        const uint32_t to = staging + (p - p0) * stride;
        mk_pair_gather(d, &w, pairs->row[p], pairs->rank[p], to);
        const float inverse = mk_pair_open<FORM>(d->lane, to, k);
        if (d->lane == 0) mk_pair_enter(table, routes, pairs, p, j0, inverse, to);
    }
}

/* As mk_tile_add, of the columns that have chosen the expert. */
MK_DEV void mk_tile_add_chosen(float4 *sum, const float *part, float f0, float f1, float n0, float n1, bool chosen0, bool chosen1)
{
    sum->x = chosen0 ? __fmaf_rn(part[0], f0 * n0, sum->x) : sum->x;
    sum->y = chosen1 ? __fmaf_rn(part[1], f0 * n1, sum->y) : sum->y;
    sum->z = chosen0 ? __fmaf_rn(part[2], f1 * n0, sum->z) : sum->z;
    sum->w = chosen1 ? __fmaf_rn(part[3], f1 * n1, sum->w) : sum->w;
}

/* acc + this warp's NT tiles of a batch of experts, whose stages are the ring's next and whose table begins at shared address `pair`. */
template <uint32_t FORM, uint32_t NT> MK_DEV mk_accs mk_down_product_as(const mk_tile *t, mk_down_shared shared, mk_next *slot, uint32_t pair, uint32_t experts, uint32_t cols, mk_accs acc)
{
    constexpr bool FP8 = FORM == MK_X_F16;
    constexpr uint32_t U = FP8 && NT == 2 ? 2 : 1; /* K blocks at once: kimi's 18 rows gain; models of one tile did not, by a change that did other things as well (profiles/NOTES.md, thirty-fourth section) */
    mk_shared *sh = mk_sh();
    const mk_lap lap = sh->lap;
    const uint32_t rows = t->rows, nkb = t->nkb, per = t->per, nst = t->nst, kb_bytes = rows * MK_KBLOCK_BYTES, scale_row = 4 * t->nseg, share = 1 << shared.log;
    const uint32_t next_half = share > 1 ? shared.scales + per * kb_bytes : 0, first_half = share > 1 ? shared.scales - lap.scales : 0; /* of an expert, in a stage */
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, l = lane & 3, member = warp % MK_GROUP_WARPS, first = mk_group_first(warp, slot->at);
    const uint32_t ways = mk_ways(rows), way = member & (ways - 1), row0 = rows > MK_SIDE_ROWS ? (member >> 1) * MK_SIDE_ROWS : 0;
    const uint32_t row_at = (lane >> 4) * rows * 16 + (row0 + (lane & 15)) * 16; /* of ldmatrix: chunk lane / 16, row lane % 16 */
    uint32_t c[2 * NT];
#pragma unroll
    for (uint32_t i = 0; i < 2 * NT; i++) c[i] = FP8 ? mk_scale_of(row0 + 8 * i + g, rows, rows, t->nseg, t->phase) - lap.scales : 0;

#pragma unroll 1
    for (uint32_t j = 0; j < experts; j += share) {
        const uint32_t end_pair = pair + 4 * MK_MAX_ROWS * min(share, experts - j);
        uint32_t turn = first ? per : 0; /* K blocks of the partial sum before: a function of k alone */
#pragma unroll 1
        for (uint32_t s = first; s < nst; s += MK_GROUPS, turn += per) {
            const uint32_t kb = s * per, end = min(kb + per, nkb), b0 = (way - turn) & (ways - 1);
            mk_stage_wait(slot->bar, slot->phase, MK_FAULT_EXPERT);
            uint32_t stage = slot->stage;
#pragma unroll 1
            for (uint32_t at = pair; at != end_pair; at += 4 * MK_MAX_ROWS, stage += next_half) {
                const uint32_t table = mk_after(at);
                const float n0 = mk_lds(table + 8 * l), n1 = mk_lds(table + 8 * l + 4);
                const uint32_t column = __float_as_uint(mk_lds(table + 4 * MK_DOWN_PAIRS + 4 * mk_ldx_column<FP8>(lane, cols))) + mk_ldx_at<FP8>(lane);
                const bool chosen0 = __float_as_uint(n0) != MK_NOT_CHOSEN, chosen1 = __float_as_uint(n1) != MK_NOT_CHOSEN, last = at + 4 * MK_MAX_ROWS == end_pair;
                uint32_t w = mk_after(stage + first_half + row_at) + b0 * kb_bytes, xk = mk_after(column) + (kb + b0) * (FP8 ? 128 : 64);
                const uint32_t scales = mk_after(stage);
#pragma unroll 1
                for (uint32_t k = kb + b0; k < end; k += U * ways, w += U * ways * kb_bytes, xk += U * ways * (FP8 ? 128 : 64)) {
                    float part[U][NT][4];
                    if (FP8) {
                        mk_fp8_tiles<NT> b[U];
                        uint4 v[U][2];
                        bool has[U];
#pragma unroll
                        for (uint32_t u = 0; u < U; u++) { /* whoever is not there has the first one's place and does not count */
                            has[u] = !u || k + u * ways < end;
                            const uint32_t to = has[u] ? u * ways : 0, x = xk + to * 128;
                            v[u][0] = mk_ldx_f16(x), v[u][1] = mk_ldx_f16(x + 64);
                            mk_fp8_load<NT>(&b[u], w + to * kb_bytes, rows, scales + (k + to >> 1) * scale_row, c);
                        }
                        if (last && k + U * ways >= end) mk_stage_leave(slot->bar + MK_EMPTY, lane, mk_words_of(b[U - 1].w) | mk_words_of(b[U - 1].f), lap.none);
#pragma unroll
                        for (uint32_t u = 0; u < U; u++)
#pragma unroll
                            for (uint32_t i = 0; i < NT; i++) mk_tile_product_fp8(part[u][i], b[u].w[i], v[u][0], v[u][1]);
#pragma unroll
                        for (uint32_t u = 0; u < U; u++)
#pragma unroll
                            for (uint32_t i = 0; i < NT; i++) mk_tile_add_chosen(&acc.tile[i], part[u][i], b[u].f[2 * i], b[u].f[2 * i + 1], n0, n1, chosen0 && has[u], chosen1 && has[u]);
                    } else {
                        const uint4 v = mk_ldx_bf16(xk);
#pragma unroll
                        for (uint32_t i = 0; i < NT; i++) {
                            uint32_t a[8];
                            mk_tile_load(a, w + 256 * i, rows);
                            mk_tile_product(part[0][i], a, v);
                        }
#pragma unroll
                        for (uint32_t i = 0; i < NT; i++) mk_tile_add_chosen(&acc.tile[i], part[0][i], 1, 1, n0, n1, chosen0, chosen1);
                    }
                }
            }
            if (!FP8 || kb + b0 >= end) mk_stage_leave(slot->bar + MK_EMPTY, lane, __float_as_uint(acc.tile[NT - 1].x), lap.none);
            mk_next_move(slot, &lap);
            slot->at += MK_GROUPS;
        }
        pair = end_pair;
    }
    return acc;
}
template <uint32_t FORM> MK_DEV mk_accs mk_down_product(const mk_tile *t, mk_down_shared shared, mk_next *slot, uint32_t pair, uint32_t experts, uint32_t cols, mk_accs acc)
{
    const uint32_t tiles = (t->rows + 15) / 16; /* with two sides: all four, of which the second's last may be none */
    if (tiles == 1) return mk_down_product_as<FORM, 1>(t, shared, slot, pair, experts, cols, acc);
    if (tiles == 2) return mk_down_product_as<FORM, 2>(t, shared, slot, pair, experts, cols, acc);
    if (tiles == 3) return mk_down_product_as<FORM, 3>(t, shared, slot, pair, experts, cols, acc);
    return mk_down_product_as<FORM, 4>(t, shared, slot, pair, experts, cols, acc);
}

template <uint32_t FORM> MK_CALL void mk_down_of(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_fed *f = mk_fed_of(in);
    const mk_tile t = f->plan.tile;
    const mk_routes *routes = (const mk_routes *)mk_local_at(d, in->wait[1].vec);
    const mk_vec *from = &d->sh->vec[in->wait[2].vec], *out = &d->sh->vec[in->signal_vec];
    const uint32_t nrows = d->step->nrows, n = t.rows, n_union = routes->n_union, units = mk_units(n), epoch = f->place.epoch[2], from_row = from->nslice * from->slice_packets;
    const mk_batches batches = mk_batches_of(f, nrows);
    const mk_pairs *pairs = &d->sh->pairs;
    const bool local = from->scope == MK_LOCAL;
    const mk_unit_at u0 = mk_unit_first(d->warp, units);
    const uint32_t i0 = u0.group * MK_UNIT + d->lane;
    uint4 look = make_uint4(0, 0, 0, epoch + 1); /* what the products are added to, asked for long before it is needed */
    if (!local && u0.row < nrows && i0 < n && d->lane < MK_UNIT) look = mk_packet_load(f->place.in[2] + u0.row * from_row + i0 / 3);
    mk_staged_drop(d);
    mk_sync(); /* nobody reads the reduction area any more */

    mk_accs acc = mk_no_sum();
    mk_next slot = d->memo->next;
    const uint32_t at0 = slot.at;
    uint32_t batch = d->memo->batch;
#pragma unroll 1
    for (uint32_t j = 0, next; j < n_union; j = next) {
        uint32_t *const table = mk_batch_table(d->sh, batches.turns ? batch : 0);
        next = mk_batch_end(&batches, pairs, j, n_union);
        if (!batches.turns || !j) {
            if (j) mk_sync(); /* the batch before is multiplied */
            mk_pairs_stage<FORM>(d, routes, table, pairs->first[j], pairs->first[next], j, next);
            mk_sync();
        }
        if (batches.turns) mk_batch_await(d->sh->pairs_full, batch);
        if (!j) mk_trace_input(d);
        mk_trace_bytes(d, (next - j) * n * t.nkb * MK_KBLOCK_BYTES);
        acc = mk_down_product<FORM>(&t, f->plan.shared, &slot, mk_smem(table), next - j, nrows, acc);
        if (!batches.turns) continue;
        mk_batch_leave(d->sh, batch++, d->lane, __float_as_uint(acc.tile[0].x));
    }
    __syncwarp();
    if (d->lane == 0) d->memo->batch = batch;
    mk_ring_pass(d, &slot);
    mk_parts_put(d, d->sh->red, n, at0, (1u << nrows) - 1, &acc);
    mk_sync();
    mk_trace_publish(d);
#pragma unroll 1
    for (mk_unit_at u = u0; u.row < nrows; mk_unit_next(&u, units)) {
        const uint32_t r = u.row, i = u.group * MK_UNIT + d->lane;
        float y = 0;
        if (i < n && d->lane < MK_UNIT) {
            if (local) {
                y = ((const float *)mk_local_at(d, in->wait[2].vec))[r * n + i];
            } else {
                look = mk_packet_get(f->place.in[2] + r * from_row + i / 3, look, epoch, 2, r, i / 3);
                y = __uint_as_float(i % 3 == 0 ? look.x : i % 3 == 1 ? look.y : look.z);
                look.w = epoch + 1;
            }
            y = __fadd_rn(y, mk_parts_sum(d->sh->red, n, i, r, nrows));
        }
        __syncwarp();
        mk_publish_unit(out, f->place.out + r * out->nslice * out->slice_packets, n, u.group, y, f->place.out_epoch, d->lane);
    }
}
/* ---- one row -------------------------------------------------------------------------------------------------------- */

/* A warp takes two K blocks of a stage at once, A and B: the even columns of mma.sync have A's values, the odd ones B's, so that both come with one load, and where
 * a warp's rows are an odd number of eights the last eight of both share a tile. They are in registers before the input is there, and the next two while these are
 * multiplied: a stage may be filled anew as soon as it is loaded. A row's products and the order of its sums are those of mk_down_product_as. */

/* What a segment is to this warp. */
typedef struct mk_claim {
    uint32_t blocks, last; /* K blocks of a stage that are its own; of the group's last stage */
    uint32_t w0, f0, x0;   /* the first one's weights and scales, from a stage's weights on; its values, from a staged pair on */
    mk_down_steps to;
    uint32_t half, tile_at, eight_at, eight_b; /* of ldmatrix: to the second half of a K block, to the first tile, to the last eight rows of A; and of a lane that takes B's */
    uint32_t second;       /* from a row's first scale to its second */
    int edge;              /* rows from here on, counted from the lane's first, have the second scale */
    bool several;          /* an expert has more than one stage each group: what is its own is worked out for each */
} mk_claim;
/* How far it has come. */
typedef struct mk_walk {
    mk_next slot;
    uint32_t stages;        /* of the group, yet to be opened */
    uint32_t s;             /* of several: stage of its expert */
    uint32_t row;           /* A's expert's staged pair */
    uint32_t left, w, f, x; /* of the stage that is open: the warp's K blocks yet to come; the next one's weights, scales, values */
} mk_walk;
/* Two K blocks, or A alone, or none. w: A's tiles, B's, the one they share; f: A's scales, B's. */
template <uint32_t EIGHTS> struct mk_both {
    uint32_t w[EIGHTS][8];
    float f[2][2];
    uint32_t x, factor; /* where A's values are, and what its products are multiplied by */
    uint32_t n;         /* how many of them */
};

#define MK_DOWN_WAYS 4u /* a stage's K blocks are taken in turn by the warps of its group: there is one side */
static_assert(MK_GROUP_WARPS == MK_DOWN_WAYS && MK_SEGMENT_ROWS <= MK_SCALE_ROWS, "two scales a row of them at most");
static_assert(MK_SHARED_BLOCKS == MK_DOWN_WAYS, "a warp has one K block of a shared stage's expert, or two");

/* Stage s of an expert. */
template <uint32_t FORM> MK_DEV void mk_claim_stage(mk_claim *h, const mk_tile *t, const mk_lap *lap, uint32_t s)
{
    const uint32_t turn = (s + 1) / MK_GROUPS * t->per; /* K blocks of the partial sum before */
    const uint32_t kb = s * t->per, nk = t->nkb > kb ? min(t->nkb - kb, t->per) : 0, b0 = (threadIdx.x / 32 % MK_GROUP_WARPS - turn) & (MK_DOWN_WAYS - 1);
    h->blocks = h->last = (nk + MK_DOWN_WAYS - 1 - b0) / MK_DOWN_WAYS;
    h->w0 = h->blocks ? b0 * t->rows * MK_KBLOCK_BYTES : 0;
    h->f0 = (kb + b0 >> 1) * 4 * t->nseg - lap->scales;
    h->x0 = (kb + b0) * (FORM == MK_X_F16 ? 128 : 64);
}
/* stages: of the group. */
template <uint32_t FORM, uint32_t EIGHTS> MK_DEV mk_claim mk_claim_of(const mk_plan *p, const mk_tile *t, const mk_lap *lap, uint32_t first, uint32_t experts, uint32_t stages)
{
    const uint32_t lane = threadIdx.x % 32, chunk = (lane >> 4) * t->rows * 16;
    const mk_down_shared shared = p->shared;
    mk_claim h;
    mk_claim_stage<FORM>(&h, t, lap, first);
    if (shared.log) {
        h.w0 += shared.scales - lap->scales;
        h.last *= experts - (stages - 1 << shared.log);
        h.blocks <<= shared.log;
    }
    h.to = p->steps;
    h.half = t->rows * 32;
    h.tile_at = chunk + (lane & 15) * 16;
    h.eight_at = chunk + (8 * (EIGHTS - 1) + (lane & 7)) * 16;
    h.eight_b = lane & 8 ? 0xffffffffu : 0;
    h.second = t->nseg > 1 ? 4 : 0;
    h.edge = (int)(MK_SCALE_ROWS - t->phase - (lane >> 2));
    h.several = t->nst > MK_GROUPS;
    mk_keep(&h.blocks), mk_keep(&h.last), mk_keep(&h.w0), mk_keep(&h.f0), mk_keep(&h.x0);
    mk_keep(&h.half), mk_keep(&h.tile_at), mk_keep(&h.second), mk_keep((uint32_t *)&h.edge);
    if (EIGHTS & 1) mk_keep(&h.eight_at), mk_keep(&h.eight_b);
    return h;
}

/* Loads the next K blocks, if need be of the next stage, which there is. A stage may have none for this warp: it goes no further, because before the pairs are staged the
 * others cannot leave theirs. */
template <uint32_t FORM, uint32_t EIGHTS> MK_DEV void mk_both_load(mk_both<EIGHTS> *b, mk_walk *y, mk_claim *h, const mk_fed *fed, const mk_lap *lap)
{
    constexpr bool FP8 = FORM == MK_X_F16;
    constexpr uint32_t FULL = EIGHTS / 2;
    if (!y->left) {
        y->stages--;
        mk_stage_wait(y->slot.bar, y->slot.phase, MK_FAULT_EXPERT);
        y->left = y->stages ? h->blocks : h->last;
        y->w = y->slot.stage + h->w0;
        y->f = y->slot.stage + h->f0;
        y->x = y->row + h->x0;
    }
    const uint32_t left = y->left, to_b = left > 1 ? h->to.w_b : 0, w = mk_after(y->w), a = w + h->tile_at, e = w + h->eight_at + (to_b & h->eight_b);
#pragma unroll
    for (uint32_t j = 0; j < FULL; j++) {
        mk_ldmatrix(b->w[j], a + 256 * j);
        mk_ldmatrix(b->w[j] + 4, a + h->half + 256 * j);
        mk_ldmatrix(b->w[FULL + j], a + to_b + 256 * j);
        mk_ldmatrix(b->w[FULL + j] + 4, a + to_b + h->half + 256 * j);
    }
    if (EIGHTS & 1) {
        mk_ldmatrix(b->w[EIGHTS - 1], e);
        mk_ldmatrix(b->w[EIGHTS - 1] + 4, e + h->half);
    }
    if (FP8) {
        const uint32_t f = mk_after(y->f), fb = f + (to_b ? h->to.f_b : 0);
        b->f[0][0] = mk_lds(f), b->f[0][1] = mk_lds(f + h->second);
        b->f[1][0] = mk_lds(fb), b->f[1][1] = mk_lds(fb + h->second);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) mk_keep(&b->f[i / 2][i % 2]); /* not later */
    }
#pragma unroll
    for (uint32_t j = 0; j < EIGHTS; j++)
#pragma unroll
        for (uint32_t i = 0; i < 8; i++) mk_keep(&b->w[j][i]);
    b->x = y->x;
    b->factor = y->row;
    b->n = left;
    y->left = left > 1 ? left - 2 : 0;
    y->w += h->to.next_w;
    y->f += h->to.next_f;
    y->x += h->to.next_x;
    y->row += h->to.next_row;
    if (!y->left) {
        uint32_t empty = y->slot.bar + MK_EMPTY; /* left when what was loaded is there: what comes next is worked out meanwhile */
        mk_keep(&empty);
        mk_next_move(&y->slot, lap);
        if (__builtin_expect(h->several, 0)) {
            const mk_tile *t = &fed->plan.tile;
            const uint32_t first = y->s & (MK_GROUPS - 1);
            y->s += MK_GROUPS;
            if (y->s >= t->nst) {
                y->s = first;
                y->row += h->to.stage_row;
            }
            mk_claim_stage<FORM>(h, t, lap, y->s);
        } else {
            y->row += h->to.stage_row;
        }
        mk_keep(&y->slot.bar), mk_keep(&y->slot.stage), mk_keep(&y->slot.phase), mk_keep(&y->row);
        mk_stage_leave(empty, threadIdx.x % 32, mk_words_of(b->w) | (FP8 ? mk_words_of(b->f[0]) | mk_words_of(b->f[1]) : 0), lap->none);
    }
}

/* sum[i]: of the lane's row in the warp's i-th eight. b: the first K blocks. x_b, factor_b: from A's values and factor to B's. */
template <uint32_t FORM, uint32_t EIGHTS> MK_DEV void mk_down_one_product(float *sum, mk_both<EIGHTS> *b, mk_walk *y, mk_claim *h, uint32_t x_b, uint32_t factor_b, const mk_fed *fed, const mk_lap *lap)
{
    constexpr bool FP8 = FORM == MK_X_F16;
    constexpr uint32_t FULL = EIGHTS / 2;
    const uint32_t lane = threadIdx.x % 32, l = FP8 ? lane >> 2 : lane; /* its column, which is B's if odd */
    uint32_t x_at = mk_ldx_at<FP8>(lane) + (l & 1) * x_b;
    mk_keep(&x_at);
    bool more;
#pragma unroll 1
    do {
        float part[EIGHTS][4], f[2][2];
        const uint32_t x = mk_after(b->x + x_at);
        const float n[2] = {mk_lds(b->factor - MK_PAIR_FACTOR), mk_lds(b->factor + factor_b - MK_PAIR_FACTOR)};
        const uint4 v0 = FP8 ? mk_ldx_f16(x) : mk_ldx_bf16(x), v1 = FP8 ? mk_ldx_f16(x + 64) : v0;
        const uint32_t n_kb = b->n;
#pragma unroll
        for (uint32_t j = 0; j < EIGHTS; j++) {
            if (FP8) {
                mk_tile_product_fp8(part[j], b->w[j], v0, v1);
            } else {
                mk_mma_bf16_first(part[j], b->w[j], v0.x, v0.y);
                mk_mma_bf16(part[j], b->w[j] + 4, v0.z, v0.w);
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) f[i / 2][i % 2] = FP8 ? b->f[i / 2][i % 2] * n[i / 2] : n[i / 2];
        more = y->left || y->stages;
        if (more) mk_both_load<FORM, EIGHTS>(b, y, h, fed, lap);
#pragma unroll
        for (uint32_t i = 0; i < EIGHTS; i++) {
            const bool shared = i / 2 == FULL, second = FP8 && (int)(8 * i) >= h->edge;
            const float with_a = __fmaf_rn(shared ? part[EIGHTS - 1][0] : part[i / 2][i % 2 * 2], second ? f[0][1] : f[0][0], sum[i]);
            const float with_b = __fmaf_rn(shared ? part[EIGHTS - 1][3] : part[FULL + (shared ? 0 : i / 2)][i % 2 * 2 + 1], second ? f[1][1] : f[1][0], with_a);
            sum[i] = n_kb > 1 ? with_b : n_kb ? with_a : sum[i];
        }
    } while (more);
}

/* A lane's packets of a pair come in two parts, a part's being looked at at once: there are not enough predicates for all. A pair of no more packets than the second part has room for
 * is one part; the other is then of the warp's second pair. */
MK_DEV constexpr uint32_t mk_pair_part(uint32_t loads)
{
    return (loads + 1) / 2;
}
static_assert(MK_PAIR_PACKETS(16) % 32 == 0 && MK_PAIR_PACKETS(32) % 32 == 0 && MK_PAIR_PACKETS(16) <= MK_PAIR_MOST && MK_PAIR_PACKETS(32) <= MK_PAIR_MOST, "mk_pair_ask");

/* Asks for the lane's packets of both parts, from its first ones on. Without conditions, each of which would be four instructions more: memory goes on behind a pair's (gpu.cu). */
template <uint32_t LOADS> MK_DEV void mk_pair_ask(uint4 (&q)[LOADS], const uint4 *a, const uint4 *b)
{
    constexpr uint32_t PART = mk_pair_part(LOADS);
    asm volatile("" : "+l"(a), "+l"(b));
#pragma unroll
    for (uint32_t j = 0; j < LOADS; j++) q[j] = mk_packet_load(j < PART ? a + 32 * j : b + 32 * (j - PART));
}
/* Words of a pair's table that say what a lane's packets of both parts are, by whole loads (mk_pair_map). */
MK_DEV constexpr uint32_t mk_pair_words(uint32_t loads)
{
    return (2 * mk_pair_part(loads) + 3) & ~3u;
}
static_assert(mk_pair_words(MK_PAIR_MOST / 32) == MK_PAIR_WORDS, "the longest pair's are the whole table");
/* Stages the pair whose packets are `from` (the lane's first) at shared address `row`: its values in order, in the form that they are multiplied in, and zeros to the end
 * of the K block. What its products are multiplied by stands before them. first: the lane's first packet's number; both: the other part is another pair's, whose packets are the same;
 * m: what they are; q: a look at them. Part by part, as bf16, in a loop in which the second part moves up to the first one's place; where the form is f16 the warp goes over them once
 * more: code that runs once is waited for. */
template <uint32_t FORM, uint32_t LOADS, uint32_t WORDS>
MK_DEV void mk_pair_take(const mk_dev *d, const mk_fed *f, const uint4 *from, uint32_t first, float weight, uint32_t row, bool both, uint32_t (&m)[WORDS], uint4 (&q)[LOADS])
{
    constexpr bool FP8 = FORM == MK_X_F16;
    constexpr uint32_t PART = mk_pair_part(LOADS);
    const uint32_t per = f->plan.packets, k = f->in.expert.k, epoch = f->place.epoch[0], nowhere = row - MK_PAIR_NOWHERE;
    uint32_t top = 0;
    mk_pair_pad(row, k, d->lane);
#pragma unroll 1
    for (uint32_t n = 0; n < per; n += 32 * PART, from += 32 * PART, first += 32 * PART) {
        uint32_t to[PART], mask[PART], wanted = 0;
#pragma unroll
        for (uint32_t i = 0; i < PART; i++) {
            const bool is = MK_PAIR_VALUES(m[i]);
            to[i] = is ? row + MK_PAIR_TO(m[i]) : nowhere;
            mask[i] = is ? mk_magnitudes(0xffffffffu) : 0;
            wanted |= is ? 1u << i : 0;
            mk_keep(&to[i]), mk_keep(&mask[i]);
        }
        mk_keep(&wanted);
        __syncwarp(); /* zeros and the part before, whose last packet may end here, are stored */
        mk_packets_wait_every<PART, true>(from, 32, wanted, epoch, 0, 0, first, *(uint4(*)[PART])q);
        mk_pair_put_whole<FP8>(to, mask, nowhere, *(uint4(*)[PART])q, &top);
#pragma unroll
        for (uint32_t i = 0; i < PART; i++) {
            if (i + PART < LOADS) q[i] = q[i + PART];
            m[i] = both ? m[i] : m[i + PART];
        }
    }
    __syncwarp();
    const mk_f16_shift shift = mk_f16_shift_of(FP8 ? __reduce_max_sync(0xffffffffu, mk_top_of(top)) : 0);
    if (d->lane == 0) mk_sts32(row - MK_PAIR_FACTOR, __float_as_uint(FP8 ? __fmul_rn(weight, shift.inverse) : weight));
    if (FP8) mk_pair_f16(row, k, d->lane, shift.less);
}

/* One row that mk_plan.dealt says fits, with up to 8 * EIGHTS rows of weights. Its choices are the union's experts, in that order. */
template <uint32_t FORM, uint32_t EIGHTS> MK_CALL void mk_down_one(uint32_t insn)
{
    const mk_insn *in = mk_insn_at(insn);
    constexpr uint32_t LOADS = MK_PAIR_PACKETS(8 * EIGHTS) / 32, PART = mk_pair_part(LOADS);
    const mk_dev here = mk_here(in), *d = &here;
    mk_shared *sh = d->sh;
    const mk_fed *f = mk_fed_of(in);
    const mk_plan *p = &f->plan;
    mk_memo *memo = d->memo;
    const mk_routes *routes = (const mk_routes *)mk_local_at(d, in->wait[1].vec);
    const mk_vec *base = &sh->vec[in->wait[2].vec];
    const mk_tile t = p->tile;
    const mk_lap lap = sh->lap;
    const uint32_t experts = routes->n_union, n = t.rows, per = p->packets, stride = mk_row_stride(in->expert.k), staged = mk_smem(sh->staging) + MK_PAIR_HEAD;
    __builtin_assume(n <= MK_DOWN_ONE_ROWS); /* mk_part_at */
    const uint32_t turn = memo->turn, i = d->warp * MK_UNIT + d->lane;
    const bool local = base->scope == MK_LOCAL, f32 = sh->vec[in->signal_vec].dtype == MK_F32, has = i < n && d->lane < MK_UNIT;
    const float *const sum_of_others = (const float *)(mk_local_memory(d->a) + base->offset);
    const uint4 *const residual = f->place.in[2] + i / 3;
    uint4 q[LOADS], look = make_uint4(0, 0, 0, 0);
    uint32_t map[mk_pair_words(LOADS)], first = d->warp * per + d->lane;
    const bool mine = d->warp < experts, both = per <= 32 * (LOADS - PART), other = mine && (both ? d->warp + MK_WARPS < experts : per > 32 * PART);
    const uint4 *from = mine ? f->place.in[0] + first : f->place.out; /* who has none looks where nobody else does */
    const uint4 *const words = mine ? (const uint4 *)(sh->args.map + p->map) + d->lane * (MK_PAIR_WORDS / 4) : f->place.out;
    mk_pair_ask(q, from, other ? from + (both ? MK_WARPS * per : 32 * PART) : f->place.out);
    mk_pair_map(map, words);
    if (!local && has) look = mk_packet_load(residual);

    mk_walk walk;
    walk.slot = memo->next;
    if (f->place.run & MK_AWAITS) mk_next_skip(&walk.slot, &lap, p->pass); /* stages of what is done aside lie before these */
    const uint32_t at = walk.slot.at;
    const uint32_t begin = mk_group_first(d->warp, at), stages = (experts + (1 << p->shared.log) - 1 >> p->shared.log) * (t.nst / MK_GROUPS);
    mk_claim claim = mk_claim_of<FORM, EIGHTS>(p, &t, &lap, begin, experts, stages);
    const uint32_t to_next = p->shared.log && t.per == MK_SHARED_BLOCKS ? stride : 0; /* B is the next expert's */
    walk.stages = stages;
    walk.s = begin;
    walk.row = staged;
    walk.left = 0;
    mk_both<EIGHTS> blocks;
    mk_both_load<FORM, EIGHTS>(&blocks, &walk, &claim, f, &lap);
    const uint32_t red = mk_smem(sh->red) + (turn & 1) * (MK_RED_FLOATS * 2);
    uint32_t part = mk_part_at(red, n, at), sums = red + 4 * i;
    mk_keep(&part), mk_keep(&sums);

#pragma unroll 1
    for (uint32_t j = d->warp, row = staged + j * stride; j < experts;) {
        mk_pair_take<FORM>(d, f, from, first, routes->weight[0][j], row, both, map, q);
        if ((j += MK_WARPS) >= experts) break;
        row += MK_WARPS * stride, first += MK_WARPS * per, from += MK_WARPS * per;
        if (both) continue;
        mk_pair_ask(q, from, from + 32 * PART);
        mk_pair_map(map, words);
    }
    claim.to = p->steps; /* once more: there are not enough registers to keep it while pairs are staged */
    mk_sync();
    mk_trace_input(d);
    mk_trace_bytes(d, experts * n * t.nkb * MK_KBLOCK_BYTES);

    float sum[EIGHTS] = {};
    mk_down_one_product<FORM, EIGHTS>(sum, &blocks, &walk, &claim, to_next ? to_next : MK_DOWN_WAYS * (FORM == MK_X_F16 ? 128 : 64), to_next, f, &lap);
    if (!(d->lane & 3))
#pragma unroll
        for (uint32_t e = 0; e < EIGHTS; e++) mk_sts32(part + 32 * e, __float_as_uint(sum[e]));
    walk.slot.at = at + MK_GROUPS * stages;
    if (f->place.run & MK_AWAITS) mk_aside_await(sh, f); /* it has read where its stages begin, and the sum of others is in LOCAL memory */
    __syncwarp();
    if (d->lane == 0) {
        memo->next = walk.slot;
        memo->turn = turn ^ 1;
        memo->staged = 0;
    }
    mk_sync();
    mk_trace_publish(d);
    if (d->warp * MK_UNIT >= n) return;
    float y = 0;
    if (has) {
        y = mk_part_tree<MK_WARPS>(sums);
        if (local) {
            y = __fadd_rn(sum_of_others[i], y);
        } else {
            look = mk_packet_get(residual, look, f->place.epoch[2], 2, 0, i / 3);
            y = __fadd_rn(__uint_as_float(i % 3 == 0 ? look.x : i % 3 == 1 ? look.y : look.z), y);
        }
    }
    __syncwarp();
    mk_publish_at(f->place.out, f32, n, d->warp, y, f->place.out_epoch, d->lane);
}
static_assert(MK_WARPS * MK_UNIT >= MK_SEGMENT_ROWS && MK_DOWN_ONE_ROWS == 32, "a warp a unit; one_row in plans.cuh");
static_assert(2 * MK_WARPS >= MK_MAX_TOPK, "a warp has no third pair");
MK_DEV void mk_expert_down_run(const mk_insn *in)
{
    in->expert.wtype == MK_W_FP8 ? mk_down_of<MK_X_F16>(in) : mk_down_of<MK_X_BF16>(in);
}

#endif
