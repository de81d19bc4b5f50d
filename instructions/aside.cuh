/* What four warps of their own do beside the queue. In a step of one row:
 *
 * MLA_PARTIAL's queries, of a worker's first item: mk_mla_aside (mla_partial.cuh). They begin when what comes before the GEMVs that make q~ has ended; these leave the queries' place alone.
 *
 * ROUTER, behind the GEMV that leaves h's slice near: what it adds is on its way to all workers while compute warps gather h for ROUTE. The bits are those of router.cuh.
 *
 * GEMVs: those of the shared expert are not instructions of the compute warps. One warp aside does what two compute warps would, one in each group, one after the other, in the order of
 * product.cuh and matvec.cuh: the bits are the same. Their code is loops, because what a layer runs of code is what it waits for, and they have time.
 *   gate|up  begins as soon as ROUTE has staged h, which is its input, too, while compute warps wait for logits and choose; behind a ROUTER that is done aside, and so sooner, when they have chosen, if
 *            it has one tile (MK_END_LATE: else both fetch their code at once); EXPERT_UP, at whose end everybody waits for u, waits for it.
 *   down     is staged in the upper part of the staging area while compute warps are at EXPERT_UP, and multiplied while they gather EXPERT_DOWN's pairs; EXPERT_DOWN, which adds its
 *            result, waits for it.
 *
 * Which ones: router_aside, shared_aside and aside_of in plans.cuh. Until those who wait have seen that they are done nobody else is in the upper part of the staging area. In the ring their stages
 * lie before those of the instruction that waits for them, ROUTER's before gate|up's, and it goes past all of them. The packets that `down` reads are there until EXPERT_DOWN publishes.
 *
 * And in a step of several EXPERT_DOWN's pairs, if not all of them fit: mk_aside_pairs (expert_down.cuh). */
#ifndef MK_ASIDE_CUH
#define MK_ASIDE_CUH

#include "instructions/expert_down.cuh"
#include "instructions/mla_partial.cuh"
#include "instructions/router.cuh"

#define MK_ASIDE_LATER 1500u /* ns: what the compute warps run first behind ROUTE, whose weights are not there yet, is not to wait for code of these (a measurement: profiles/NOTES.md) */
static_assert(MK_ASIDES == MK_GROUP_WARPS && MK_GROUPS == 2, "a warp for one of each group");

/* What the trace wants of a GEMV is noted whether it is traced or not: that is shorter. */
MK_DEV void mk_aside_note(uint32_t *what, uint32_t warp, uint32_t lane)
{
    if (!(warp | lane)) *what = mk_now_low();
}
/* A packet of wait k, however late. */
MK_DEV uint4 mk_aside_packet(const mk_fed *f, uint32_t k, uint32_t packet)
{
    const uint4 *from = f->place.in[k] + packet;
    const uint32_t epoch = f->place.epoch[k];
    uint32_t looks = 0;
    uint4 q;
    do {
        q = mk_packet_load(from);
    } while (q.w != epoch && mk_still_waiting(++looks, k, 0, packet, q.w));
    mk_waited(looks);
    return q;
}
/* Waits for a phase of a stage's barrier; on abort it returns anyway. As mk_stage_await, but nobody's wait is noted. */
MK_DEV void mk_aside_stage_wait(mk_shared *sh, uint32_t bar, uint32_t parity)
{
    while (!mk_mbar_try(bar, parity)) {
        mk_flag_set(&sh->stage_kind, MK_FAULT_TAPE);
        if (mk_flag_get(&sh->aborted)) return;
    }
}

/* Stages what compute warp `as` would gather, as mk_take has it. */
template <uint32_t FORM> MK_DEV void mk_aside_stage(mk_shared *sh, const mk_fed *f, uint32_t as, uint32_t lane)
{
    const mk_plan *p = &f->plan;
    const mk_hands g = p->hands;
    const mk_hand h = mk_hand_of<false>(p, g, lane);
    const uint32_t k = p->x.k, staged = mk_smem(sh->staging) + MK_UPPER;
#pragma unroll 1
    for (uint32_t group = as; group * g.values < k; group += MK_WARPS) {
        const uint32_t v = group * g.values + h.value, packet = p->skip + group * g.packets + lane;
        if (!h.count || v >= k) continue;
        const uint4 q = mk_aside_packet(f, 0, packet);
        const uint32_t w[3] = {q.x, q.y, q.z};
#pragma unroll
        for (uint32_t i = 0; i < 3; i++) {
            if (2 * i >= h.count || v + 2 * i >= k) break; /* the last packet goes on with values that nobody asked for */
            mk_sts32(staged + 2 * v + 4 * i, w[i]);
        }
    }
    __syncwarp();
    if (FORM == MK_X_F16) mk_stage_f16(sh, k, g.values, MK_UPPER, as, lane);
}

/* The product of one tile of 16 rows with the stages of a group, of which `slot` is the next and number s the first: sums of rows lane / 4 and 8 more. base: where
 * the input is in the staging area; leave: this is the last tile. */
template <uint32_t FORM> MK_DEV float2 mk_aside_tile(mk_next *slot, const mk_tile *t, const mk_lap *lap, uint32_t s, uint32_t row0, uint32_t base, uint32_t warp, uint32_t lane, bool leave)
{
    constexpr bool FP8 = FORM == MK_X_F16;
    constexpr uint32_t VALUES = FP8 ? 128 : 64; /* bytes of a staged K block */
    const uint32_t rows = t->rows, column = mk_smem(mk_sh()->staging) + base + mk_ldx_at<FP8>(lane), norm = mk_smem(mk_sh()->factor) + base / 32;
    const uint32_t half = t->halves == 2 ? rows / 2 : rows, scale_row = 4 * t->nseg * t->halves;
    const uint32_t row_at = (lane >> 4) * rows * 16 + (row0 + (lane & 15)) * 16;
    const bool several = t->nseg > 1 || t->halves == 2;
    const uint32_t c0 = several ? mk_scale_of(row0 + (lane >> 2), rows, half, t->nseg, t->phase) : 0, c1 = several ? mk_scale_of(row0 + 8 + (lane >> 2), rows, half, t->nseg, t->phase) : 0;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (uint32_t turn = 0; s < t->nst; s += MK_GROUPS, turn += t->per) {
        const uint32_t kb = s * t->per, end = min(kb + t->per, t->nkb);
        mk_aside_stage_wait(mk_sh(), slot->bar, slot->phase);
#pragma unroll 1
        for (uint32_t k = kb + ((warp - turn) & (MK_GROUP_WARPS - 1)); k < end; k += MK_GROUP_WARPS) {
            const uint32_t stage = mk_after(slot->stage), xk = mk_after(column) + k * VALUES, scale = stage - lap->scales + (k >> t->shift) * scale_row;
            uint32_t w[8];
            float part[4];
            mk_tile_load(w, stage + row_at + (k - kb) * rows * MK_KBLOCK_BYTES, rows);
            if constexpr (FP8)
                mk_tile_product_fp8(part, w, mk_ldx_f16(xk), mk_ldx_f16(xk + 64));
            else
                mk_tile_product(part, w, mk_ldx_bf16(xk));
            mk_tile_add<true>(&sum, part, FP8 ? mk_lds(scale + c0) : 1, FP8 ? mk_lds(scale + c1) : 1, FP8 ? mk_lds(mk_after(norm) + 4 * k) : 1, 1);
        }
        if (leave) mk_stage_leave(slot->bar + MK_EMPTY, lane, __float_as_uint(sum.x), lap->none);
        mk_next_move(slot, lap);
    }
    return make_float2(sum.x, sum.z);
}

/* mk_publish_at of a slice's first unit: lane i stores packet i, whose words it asks the lanes for that have them. */
MK_DEV void mk_aside_publish(uint4 *slice, bool f32, uint32_t n, float value, uint32_t epoch, uint32_t lane)
{
    n = min(n, MK_UNIT);
    if (lane >= n) value = 0;
    const uint32_t other = __shfl_down_sync(0xffffffffu, mk_bf16_bits(value), 1) << 16, per = f32 ? 1 : 2, first = 3 * per * lane;
    const uint32_t word = f32 ? __float_as_uint(value) : mk_bf16_bits(value) | other;
    const uint32_t x = __shfl_sync(0xffffffffu, word, first), y = __shfl_sync(0xffffffffu, word, first + per), z = __shfl_sync(0xffffffffu, word, first + 2 * per);
    if (first < n) mk_packet_store(slice + lane, x, y, z, epoch);
}

template <uint32_t FORM> MK_DEV void mk_aside_gemv(mk_shared *sh, const mk_fed *f, uint32_t warp, uint32_t lane)
{
    const mk_insn *in = &f->in;
    const mk_plan *p = &f->plan;
    const mk_tile *t = &p->tile;
    const mk_lap lap = sh->lap;
    const uint32_t n = in->gemv.n, end = p->end;
    const bool up = end & MK_END_SILU; /* gate|up */
    const uint32_t parts = mk_smem(sh->staging) + MK_UPPER + (up ? 0 : (mk_row_stride(p->x.k) + 127) & ~127u); /* [MK_WARPS][MK_ASIDE_ROWS] */
    if (up) {
        while (!mk_mbar_try(mk_smem(&sh->route_staged), f->place.after)) {}
        while (end & MK_END_LATE && !mk_mbar_try(mk_smem(&sh->route_full), f->place.after)) {}
    } else {
        mk_aside_after(sh, f->place.after);
        const uint32_t since = mk_now_low();
        do {
            __nanosleep(300);
        } while (mk_now_low() - since < MK_ASIDE_LATER);
#pragma unroll 1
        for (uint32_t as = warp; as < MK_WARPS; as += MK_ASIDES) mk_aside_stage<FORM>(sh, f, as, lane);
    }
    mk_aside_sync();
    mk_aside_note(&sh->aside.note.input, warp, lane);

    if (!up) mk_aside_after(sh, f->place.after + 1); /* EXPERT_UP, whose stages come before these */
    const uint32_t at = sh->memo[warp].next.at;
#pragma unroll 1
    for (uint32_t s = 0; s < MK_GROUPS; s++) { /* the group that has the segment's stage s: partial sums s of each way */
        mk_next begin = sh->memo[((s + at) & (MK_GROUPS - 1)) * MK_GROUP_WARPS + warp].next;
        if (up) mk_next_skip(&begin, &lap, p->behind);
#pragma unroll 1
        for (uint32_t row0 = 0; row0 < t->rows; row0 += 16) {
            mk_next slot = begin;
            const float2 sum = mk_aside_tile<FORM>(&slot, t, &lap, s, row0, up ? 0 : MK_UPPER, warp, lane, row0 + 16 >= t->rows);
            const uint32_t to = parts + 4 * (MK_ASIDE_ROWS * (MK_GROUP_WARPS * s + warp) + row0 + (lane >> 2));
            if (!(lane & 3)) mk_sts32(to, __float_as_uint(sum.x)), mk_sts32(to + 32, __float_as_uint(sum.y));
        }
    }
    mk_aside_sync();
    mk_aside_note(&sh->aside.note.publish, warp, lane);
    if (warp) return;
    if (up) { /* a lane a row of u */
        float x = 0, y = 0;
        const uint32_t i = min(lane, n - 1);
#pragma unroll 1
        for (uint32_t q = 0; q < MK_WARPS; q++) {
            x = __fadd_rn(x, __uint_as_float(mk_lds32(parts + 4 * (MK_ASIDE_ROWS * q + i))));
            y = __fadd_rn(y, __uint_as_float(mk_lds32(parts + 4 * (MK_ASIDE_ROWS * q + n + i))));
        }
        const float norm = mk_rms_factor(p, sh->sumsq[sh->memo[0].parity][0]) * in->gemv.scale;
        mk_aside_publish(f->place.out, end & MK_END_F32, n, mk_silu(x * norm) * (y * norm), f->place.out_epoch, lane);
        return;
    }
    if (lane >= n) return;
    float y = 0, res = -0.0f, open = 1;
#pragma unroll 1
    for (uint32_t q = 0; q < MK_WARPS; q++) y = __fadd_rn(y, __uint_as_float(mk_lds32(parts + 4 * (MK_ASIDE_ROWS * q + lane))));
    y *= in->gemv.scale;
#pragma unroll 1
    for (uint32_t k = 1; k < 3; k++) { /* residual, gate */
        if (!(end & (k == 1 ? MK_END_ADDS : MK_END_GATED))) continue;
        const uint32_t packet = k == 1 ? lane / 3 : p->gate_at, word = k == 1 ? lane % 3 : end >> 8 & 3;
        const uint4 q = mk_aside_packet(f, k, packet);
        const float x = __uint_as_float(word == 0 ? q.x : word == 1 ? q.y : q.z);
        if (k == 1)
            res = x;
        else
            open = mk_sigmoid(x);
    }
    ((float *)(mk_local_memory(&sh->args) + p->out_at))[lane] = __fadd_rn(res, __fmul_rn(open, y));
}

/* ROUTER, whose stages are one of each group: a thread two experts side by side. Where the compute warps are in the ring stands still until EXPERT_UP ends, which waits for what is done aside. All of
 * it is done once before, while the GEMV is multiplied, with whatever lies there and nothing added, so that its code is there. */
MK_DEV void mk_aside_router(mk_shared *sh, const mk_fed *f, uint32_t warp, uint32_t lane)
{
#ifdef MK_RACECHECK
    constexpr uint32_t REHEARSALS = 0; /* stages are being filled */
#else
    constexpr uint32_t REHEARSALS = 1;
#endif
    const mk_insn *in = &f->in;
    const mk_vec *v = &sh->vec[in->signal_vec];
    const uint32_t n = f->plan.tile.rows, per = f->plan.tile.per, all = 32 * f->plan.tile.nkb, experts = in->router.experts, none = sh->lap.none;
    uint64_t *out = mk_sum_of(sh, v, in->signal_pub, experts, 0, 0);
#pragma unroll 1
    for (uint32_t turn = 0;; turn++) {
        const bool now = turn == REHEARSALS;
        mk_aside_after(sh, f->place.after - !now);
        const uint32_t at = sh->memo[warp].next.at & (MK_GROUPS - 1);
        const mk_next first = sh->memo[at * MK_GROUP_WARPS + warp].next, second = sh->memo[(at ^ 1) * MK_GROUP_WARPS + warp].next;
        if (now) {
            mk_aside_note(&sh->aside.note.input, warp, lane);
            mk_aside_stage_wait(sh, first.bar, first.phase);
            mk_aside_stage_wait(sh, second.bar, second.phase);
        }
        uint32_t last = 0;
#pragma unroll 1
        for (uint32_t e0 = 64 * warp; e0 < all; e0 += 64 * MK_ASIDES) {
            const uint32_t e = min(e0 + 2 * lane, all - 2), kb = e / 32, stage = kb < per ? first.stage : second.stage, eighth = 4 * (kb < per ? kb : kb - per) + e / 8 % 4;
            uint32_t from = mk_after(stage) + eighth * n * MK_QUARTER_BYTES + e % 8 * 2, x = mk_after(mk_smem(sh->near));
            float even = 0, odd = 0;
#pragma unroll 4
            for (uint32_t i = 0; i < n; i++, from += MK_QUARTER_BYTES, x += 4) {
                const uint32_t w = __float_as_uint(mk_lds(from));
                const float y = mk_lds(x);
                even = __fmaf_rn(y, __uint_as_float(w << 16), even);
                odd = __fmaf_rn(y, __uint_as_float(w & 0xffff0000u), odd);
            }
            last |= __float_as_uint(even) | __float_as_uint(odd);
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) { /* side by side by the lanes */
                const uint32_t expert = e0 + 32 * half + lane;
                const float a = __shfl_sync(0xffffffffu, even, 16 * half + lane / 2), b = __shfl_sync(0xffffffffu, odd, 16 * half + lane / 2);
                if (now && expert < experts) mk_sum_add(out + mk_sum_at(experts, 0, 0, expert), lane & 1 ? b : a);
            }
        }
        mk_aside_note(&sh->aside.note.publish, warp, lane);
        if (!now) continue;
        mk_stage_leave(first.bar + MK_EMPTY, lane, last, none);
        mk_stage_leave(second.bar + MK_EMPTY, lane, last, none);
        if (!(warp | lane)) atomicAdd(sh->args.counter + v->counter, 1u); /* as router.cuh */
        return;
    }
}

/* One after the other, as the controller hands them over, until it says MK_OP_LEAVE. Warp and lane are found anew every turn: what is made of them would be made before the first and kept
 * in local memory. */
MK_DEV void mk_aside(mk_shared *sh)
{
#pragma unroll 1
    for (uint32_t parity = 0, batch = 0;; parity ^= 1) {
        const uint32_t tid = mk_tid_now() - MK_WARP_ASIDE * 32, warp = tid / 32, lane = tid % 32;
        while (!mk_mbar_try(mk_smem(&sh->aside_full), parity)) {}
        const mk_fed *f = &sh->aside;
        if (f->place.run == MK_OP_LEAVE) return;
        const bool queries = f->in.opcode == MK_OP_MLA_PARTIAL, pairs = f->in.opcode == MK_OP_EXPERT_DOWN;
        mk_aside_note(&sh->aside.note.start, warp, lane);
        if (pairs)
            batch = mk_aside_pairs(sh, f, batch, warp, lane);
        else if (f->in.opcode == MK_OP_ROUTER)
            mk_aside_router(sh, f, warp, lane);
        else if (queries)
            mk_mla_aside(sh, f, warp, lane);
        else if (f->plan.x.form == MK_X_F16)
            mk_aside_gemv<MK_X_F16>(sh, f, warp, lane);
        else
            mk_aside_gemv<MK_X_BF16>(sh, f, warp, lane);
        if (__builtin_expect(!queries && !pairs && !tid && sh->trace.on, 0)) mk_trace_write(&f->in, mk_now_low(), 0);
        mk_warp_arrive(mk_smem(&sh->aside_done), lane);
    }
}

#endif
