/* ROUTER on the device: a thread an expert, whose column has a value in each row of the segment. Semantics: router.c. h's slice, times the norm's gammas, comes from the instruction before, where that
 * one has left it (MK_END_NEAR), else from its packets. In a step of one row it is done aside (aside.cuh), with the same bits, where that may be. */
#ifndef MK_ROUTER_CUH
#define MK_ROUTER_CUH

#include "instructions/matvec.cuh"

MK_DEV void mk_sum_add(uint64_t *word, float x)
{
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(word), "l"(mk_sum_word(x)) : "memory");
}
/* The first row's sum i in the half of vector v that publication pub is added to, or in the other one; of row r: MK_SUM_GROUP * r words further. */
MK_DEV uint64_t *mk_sum_of(const mk_shared *sh, const mk_vec *v, uint32_t pub, uint32_t experts, uint32_t other, uint32_t i)
{
    return (uint64_t *)(sh->args.bulk + v->offset) + mk_sum_at(experts, mk_half(v, sh->step.seq, pub) ^ other, 0, i);
}

/* ROWS: of the batch, at most. */
template <uint32_t ROWS> MK_CALL void mk_router_of(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    mk_shared *sh = d->sh;
    const mk_fed *f = mk_fed_of(in);
    const mk_tile t = f->plan.tile;
    mk_memo *memo = d->memo;
    const mk_lap lap = sh->lap;
    const uint32_t n = t.rows, turn = memo->turn, nrows = ROWS == 1 ? 1 : d->step->nrows, experts = in->router.experts;
    const bool near = ROWS == 1 && f->plan.end & MK_END_NEAR;
    const uint32_t x = near ? mk_smem(sh->near) : mk_smem(sh->red) + (turn & 1) * (MK_RED_FLOATS * 2);
    mk_next slot = memo->next;
    const uint32_t first = mk_group_first(d->warp, slot.at), item = d->tid % (32 * MK_GROUP_WARPS);
    uint64_t *out = mk_sum_of(sh, &sh->vec[in->signal_vec], in->signal_pub, experts, 0, 0);

    if (!near) {
        const float *gamma = d->a->param + in->router.param_off;
        const mk_vec *h = &sh->vec[in->wait[0].vec];
        const uint32_t row_packets = h->nslice * h->slice_packets;
        if (ROWS > 1 && nrows > MK_MAX_ROWS / 2) mk_sync(); /* the product before is read: mk_red_base has but one place for so many rows */
#pragma unroll 1
        for (uint32_t i = d->tid; i < n * nrows; i += MK_COMPUTE) {
            const uint32_t r = mk_small_quot(i, n), v = i - r * n, packet = v / 3;
            const uint4 *from = f->place.in[0] + r * row_packets + packet;
            const uint4 q = mk_packet_get(from, mk_packet_load(from), f->place.epoch[0], 0, r, packet);
            const float y = __uint_as_float(v % 3 == 0 ? q.x : v % 3 == 1 ? q.y : q.z);
            mk_sts32(x + 4 * (v * ROWS + r), __float_as_uint(__fmul_rn(y, __ldg(gamma + v))));
        }
    }
    mk_sync();
    mk_trace_input(d);
#pragma unroll 1
    for (uint32_t s = first; s < t.nst; s += MK_GROUPS) {
        const uint32_t kb0 = s * t.per, all = 32 * min(t.per, t.nkb - kb0);
        uint32_t last = 0;
        mk_stage_wait(slot.bar, slot.phase, MK_FAULT_TAPE);
#pragma unroll 1
        for (uint32_t e = item; e < all; e += 32 * MK_GROUP_WARPS) {
            uint32_t at = mk_after(slot.stage) + (e / 8 * n) * MK_QUARTER_BYTES + e % 8 * 2, y = mk_after(x);
            float sum[ROWS] = {};
#pragma unroll 4
            for (uint32_t i = 0; i < n; i++, at += MK_QUARTER_BYTES, y += 4 * ROWS) {
                const float w = mk_lds_bf16(at);
#pragma unroll
                for (uint32_t r = 0; r < ROWS; r++) sum[r] = __fmaf_rn(mk_lds(y + 4 * r), w, sum[r]);
            }
            const uint32_t expert = 32 * kb0 + e;
#pragma unroll
            for (uint32_t r = 0; r < ROWS; r++) {
                last |= __float_as_uint(sum[r]);
                if (r < nrows && expert < experts) mk_sum_add(out + mk_sum_at(experts, 0, r, expert), sum[r]);
            }
        }
        mk_stage_leave(slot.bar + MK_EMPTY, d->lane, last, lap.none);
        mk_next_move(&slot, &lap);
    }
    mk_trace_publish(d);
    if (d->tid == 0) atomicAdd(d->a->counter + sh->vec[in->signal_vec].counter, 1u); /* nobody waits for it: the words say themselves */
    slot.at += t.nst;
    __syncwarp();
    if (d->lane == 0) {
        memo->next = slot;
        memo->turn = turn ^ 1;
    }
    __syncwarp();
}
MK_DEV void mk_router_run(const mk_insn *in)
{
    mk_sh()->step.nrows == 1 ? mk_router_of<1>(in) : mk_router_of<MK_MAX_ROWS>(in);
}
static_assert(MK_MAX_ROWS * MK_SEGMENT_ROWS <= MK_RED_FLOATS / 2, "h's slice of all rows fits half the reduction area");

#endif
