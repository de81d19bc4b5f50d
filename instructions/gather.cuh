/* How a vector gets out of its packets into the staging area, in the form that it is multiplied in (matvec.cuh): of one row, of several, whole or in parts. */
#ifndef MK_GATHER_CUH
#define MK_GATHER_CUH

#include "instructions/gather_rows.cuh"

/* Whether values [c0, c0 + n) of a vector that is dealt can be staged so, which is done then; whole: that is all of it. */
template <uint32_t FORM> MK_DEV bool mk_gather_dealt(const mk_insn *in, bool whole, uint32_t c0, uint32_t n)
{
    const mk_plan *p = &mk_fed_of(in)->plan;
    const mk_hands g = p->hands;
    const uint32_t all = MK_WARPS * g.values, turns = mk_small_quot(p->x.k + all - 1, all) << (p->f32 && g.packets > 32);
    const bool rms = p->x.prologue == MK_PRO_RMS, heads = p->x.prologue == MK_PRO_HEADNORM;
    if (p->f32 || rms) {
        if (!whole || turns > MK_LOADS_OF(true, MK_ONE_RMS)) return false;
        p->f32 ? mk_gather_some<true, FORM, MK_ONE_RMS>(in) : mk_gather_some<false, FORM, MK_ONE_RMS>(in);
    } else if (!whole || turns > MK_LOADS_OF(false, MK_ONE_LONG)) {
        constexpr bool F16 = FORM == MK_X_F16; /* in bf16 there is nothing of heads to say of a part, and nothing to look for of others */
        if (heads)
            c0 ? mk_gather_part<FORM, F16, false>(in, c0, n) : mk_gather_part<FORM, true, true>(in, c0, n);
        else
            c0 || !F16 ? mk_gather_part<FORM, false, false>(in, c0, n) : mk_gather_part<FORM, false, F16>(in, c0, n);
    } else if (heads) {
        mk_gather_some<false, FORM, MK_ONE_HEADS>(in);
    } else {
        turns == 1 ? mk_gather_some<false, FORM, MK_ONE_SHORT>(in) : turns <= MK_LOADS_OF(false, MK_ONE_PLAIN) ? mk_gather_some<false, FORM, MK_ONE_PLAIN>(in) : mk_gather_some<false, FORM, MK_ONE_LONG>(in);
    }
    return true;
}

template <bool F32, uint32_t FORM> MK_DEV void mk_gather_of(const mk_insn *in, uint32_t c0, uint32_t n, bool again)
{
    mk_fed_of(in)->plan.x.prologue == MK_PRO_RMS ? mk_gather_rows<F32, FORM, true>(in, c0, n, again) : mk_gather_rows<F32, FORM, false>(in, c0, n, again);
}
MK_DEV void mk_gather(const mk_insn *in, uint32_t c0, uint32_t n, bool again)
{
    const mk_plan *p = &mk_fed_of(in)->plan;
    if (p->x.form == MK_X_F16)
        p->f32 ? mk_gather_of<true, MK_X_F16>(in, c0, n, again) : mk_gather_of<false, MK_X_F16>(in, c0, n, again);
    else
        p->f32 ? mk_gather_of<true, MK_X_BF16>(in, c0, n, again) : mk_gather_of<false, MK_X_BF16>(in, c0, n, again);
}

/* Stages values [c0, c0 + n) of wait 0's vector; whole: that is all of it, which stays for instructions that read the same vector in the same way. All compute
 * threads call it, and may read the staging area then. Takes the instruction's shared address and returns it, as mk_gather_one does. */
MK_CALL uint32_t mk_stage_input(uint32_t insn, bool whole, uint32_t c0, uint32_t n)
{
    const mk_insn *in = mk_insn_at(insn);
    mk_shared *sh = mk_sh();
    const mk_plan *p = &mk_fed_of(in)->plan;
    mk_memo *memo = &sh->memo[threadIdx.x / 32];
    const uint32_t step = sh->step.seq;
    if (whole && memo->staged == p->key && memo->step == step) {
        if (sh->step.nrows > MK_MAX_ROWS / 2) mk_sync(); /* the product before is read: mk_red_base has but one place for so many rows */
        return insn;
    }
    if (sh->step.nrows == 1 && p->dealt) {
        uint32_t at;
        if (p->dealt == 1)
            at = mk_gather_rms(insn);
        else
            at = p->x.form == MK_X_F16 ? mk_gather_one<true, MK_X_F16, MK_ONE_FAR>(insn) : mk_gather_one<true, MK_X_BF16, MK_ONE_FAR>(insn);
        mk_sync();
        return at;
    }
    if (c0) mk_sync(); /* the chunk before is consumed */
    __syncwarp();
    if (threadIdx.x % 32 == 0 && !c0) {
        memo->staged = whole ? p->key : 0;
        memo->step = step;
        memo->parity ^= 1;
    }
    __syncwarp();
    if (!(p->hands.packets &&
          (p->x.form == MK_X_F16 ? mk_gather_dealt<MK_X_F16>(in, whole, c0, n) : p->x.form == MK_X_BF16 && mk_gather_dealt<MK_X_BF16>(in, whole, c0, n))))
        mk_gather(in, c0, n, c0 != 0);
    mk_sync();
    return insn;
}

/* By a warp: the bf16 values at [at, end), a lane's eight every `step` bytes, become f16 where they lie. Returns the inverse of the power of two that they were multiplied by. */
MK_DEV float mk_f16_in_place(uint32_t at, uint32_t end, uint32_t step)
{
    uint32_t top = 0;
#pragma unroll 1
    for (uint32_t i = at; i < end; i += step) {
        const uint4 q = mk_lds128(i);
        top = __vmaxu2(top, __vmaxu2(__vmaxu2(mk_magnitudes(q.x), mk_magnitudes(q.y)), __vmaxu2(mk_magnitudes(q.z), mk_magnitudes(q.w))));
    }
    __syncwarp();
    const mk_f16_shift shift = mk_f16_shift_of(__reduce_max_sync(0xffffffffu, mk_top_of(top)));
#pragma unroll 1
    for (uint32_t i = at; i < end; i += step) mk_f16_eight(i, shift.less);
    return shift.inverse;
}
/* By a warp: the bf16 values of the groups of warp `as`, of a vector that lies `at` bytes from the staging area's beginning, become f16, and it says what their K blocks are to be
 * multiplied by. values: of a group. */
MK_DEV void mk_stage_f16(const mk_shared *sh, uint32_t k, uint32_t values, uint32_t at, uint32_t as, uint32_t lane)
{
    const uint32_t staged = mk_smem(sh->staging) + at, end = staged + 2 * (8 * lane < values ? k : 0), group = as + lane * MK_WARPS;
    const float factor = mk_f16_in_place(staged + 2 * as * values + 16 * lane, end, 2 * MK_WARPS * values);
    if (group * values < k) mk_factor_put(k, values, group, at, factor);
}

#endif
