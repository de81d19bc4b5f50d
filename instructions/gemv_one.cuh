/* GEMV of one row whose packets are dealt: what most of a step is made of. One function from the wait to the publication, because every instruction of a warp here is on
 * the way of the token: nothing is worked out that mk_plan (by the host) or mk_places (by the controller) can say, all that comes from memory is asked for, and all that does
 * not depend on it worked out, before anything is waited for, and there is no call. One copy a form, whatever is gathered: code is larger than the SM's caches. But vectors of so
 * many packets that most models have none (FAR) have one of their own: they take registers, which all others would save on the stack. The bits are those of gemv.cuh. */
#ifndef MK_GEMV_ONE_CUH
#define MK_GEMV_ONE_CUH

#include "instructions/matvec.cuh"

template <uint32_t FORM, bool FAR> MK_CALL void mk_gemv_one(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    mk_shared *sh = d->sh;
    const mk_fed *f = mk_fed_of(in);
    const mk_plan *p = &f->plan;
    mk_memo *memo = d->memo;
    const uint32_t n = in->gemv.n, group = d->warp, i = min(group * MK_UNIT + d->lane, n - 1), step = sh->step.seq; /* who has no value does as the last one */
    /* what is asked of a warp as a whole */
    const uint32_t control = mk_uniform(p->end | p->one << 16 | (memo->staged == p->key && memo->step == step) << 24 | (group * MK_UNIT < n) << 25 | mk_tiles_of(p->tile.rows) << 26);
    const uint32_t end = control & 0xffffu, tiles = control >> 26;
    const bool staged_before = control >> 24 & 1, unit = control >> 25 & 1;
    mk_next slot = memo->next;
    const uint32_t at = slot.at, turn = memo->turn, beside = p->beside, parity = memo->parity ^ !staged_before;
    const bool mine = group * MK_UNIT + d->lane < n && d->lane < MK_UNIT, residual = unit && (end & (MK_END_ADDS | MK_END_FROM_LOCAL)) == MK_END_ADDS;
    uint4 look = make_uint4(0, 0, 0, 0), gate = make_uint4(0, 0, 0, 0);
    if (residual) look = mk_packet_load(f->place.in[1] + i / 3);
    if (end & MK_END_GATED && unit) gate = mk_packet_load(f->place.in[2] + p->gate_at);

    const mk_tile t = p->tile;
    const mk_lap lap = sh->lap;
    mk_way way = mk_way_of<FORM == MK_X_F16>(&t, at, lap.scales);
    const uint32_t red = mk_smem(sh->red) + (turn & 1) * (MK_RED_FLOATS * 2), rows = t.rows;
    uint32_t part = mk_part_at(red, rows, at), sums = red + 4 * i;
    mk_way_keep(&way);
    mk_keep(&part), mk_keep(&sums);
    uint8_t *to = end & MK_END_TO_LOCAL ? mk_local_memory(d->a) + p->out_at + 4 * i : (uint8_t *)mk_publish_where(f->place.out, end & MK_END_F32, group, d->lane);
    if (!mine || (!(end & MK_END_TO_LOCAL) && !mk_publishes(end & MK_END_F32, d->lane))) to = NULL; /* who stores nothing */
    asm volatile("" : "+l"(to));
    if (!staged_before) {
        __syncwarp();
        if (d->lane == 0) {
            memo->staged = p->key;
            memo->step = step;
            memo->parity = parity;
        }
        switch (control >> 16 & 0xff) {
#define X(f32, form, pro) case MK_ONE(f32, form, pro): if (FORM == form && FAR == (pro == MK_ONE_FAR)) mk_take<f32, FORM, pro>(d, in, parity); break;
            MK_ONES(X)
#undef X
        }
        mk_sync();
    }
    mk_trace_input(d);
    float res = -0.0f, open = 1; /* what is added, times what: y as it is */
    if (residual) {
        look = mk_packet_get(f->place.in[1] + i / 3, look, f->place.epoch[1], 1, 0, i / 3);
        res = __uint_as_float(i % 3 == 0 ? look.x : i % 3 == 1 ? look.y : look.z);
    }

    float norm = mk_row_factor(d, p, 0) * in->gemv.scale; /* now: a warp waits for a stage rather than all for a warp */
    asm volatile("" : "+f"(norm));
    mk_product_one<FORM>(MK_FAULT_TAPE, &slot, &t, tiles, &way, &lap, mk_smem(sh->staging) + beside, mk_row_stride(p->x.k), p->head_shift, part, d->lane);
    mk_sync();
    mk_trace_publish(d);
    if (unit) {
        float y = mk_part_get(sums, rows) * norm;
        if (end & MK_END_SILU) y = mk_silu(y) * (mk_part_get(sums + 4 * n, rows) * norm);
        if (end & MK_END_FROM_LOCAL) res = ((const float *)(mk_local_memory(d->a) + p->res_at))[i];
        if (end & MK_END_GATED) {
            gate = mk_packet_get(f->place.in[2] + p->gate_at, gate, f->place.epoch[2], 2, 0, p->gate_at);
            open = mk_sigmoid(__uint_as_float((end >> 8 & 3) == 0 ? gate.x : (end >> 8 & 3) == 1 ? gate.y : gate.z));
        }
        y = mine ? __fadd_rn(res, __fmul_rn(open, y)) : 0;
        __syncwarp();
        if (!(end & MK_END_TO_LOCAL))
            mk_publish_to((uint4 *)to, end & MK_END_F32, y, f->place.out_epoch);
        else if (to)
            *(float *)to = y;
        if (end & MK_END_NEAR && mine) sh->near[i] = y;
    }
    __syncwarp();
    if (d->lane == 0) {
        memo->next = slot;
        memo->turn = turn ^ 1;
    }
    __syncwarp(); /* or lane 0 would come back alone */
}

/* By mk_plan.one. */
MK_DEV void mk_gemv_one_run(const mk_insn *in, uint32_t one)
{
    const uint32_t form = one >> 1 & 3;
    if (MK_IS_FAR(one))
        form == MK_X_F16 ? mk_gemv_one<MK_X_F16, true>(in) : mk_gemv_one<MK_X_BF16, true>(in);
    else if (form == MK_X_F16)
        mk_gemv_one<MK_X_F16, false>(in);
    else if (form == MK_X_BF16)
        mk_gemv_one<MK_X_BF16, false>(in);
    else
        mk_gemv_one<MK_X_F32, false>(in);
}

#endif
