/* GEMV of one row whose packets are dealt: what most of a step is made of. Two functions, one that gathers and one from the staged input to the publication, because every instruction
 * of a warp here is on the way of the token, and every line of code comes from behind what others run: nothing is worked out that mk_plan (by the host) or mk_places (by the controller)
 * can say, and of either there is one copy a form, whatever goes before or after it. The bits are those of gemv.cuh. */
#ifndef MK_GEMV_ONE_CUH
#define MK_GEMV_ONE_CUH

#include "instructions/matvec.cuh"

template <uint32_t FORM> MK_CALL void mk_gemv_one(uint32_t insn)
{
    const mk_insn *in = mk_insn_at(insn);
    const mk_dev here = mk_here(in), *d = &here;
    mk_shared *sh = d->sh;
    const mk_fed *f = mk_fed_of(in);
    const mk_plan *p = &f->plan;
    mk_memo *memo = d->memo;
    const uint32_t n = in->gemv.n, group = d->warp, i = min(group * MK_UNIT + d->lane, n - 1); /* who has no value does as the last one */
    /* what is asked of a warp as a whole */
    const uint32_t control = mk_uniform(p->end | (group * MK_UNIT < n) << 16 | (p->x.prologue == MK_PRO_RMS) << 17 | mk_tiles_of(p->tile.rows) << 18);
    const uint32_t end = control & 0xffffu, tiles = control >> 18;
    const bool unit = control >> 16 & 1, rms = control >> 17 & 1;
    mk_next slot = memo->next;
    const uint32_t at = slot.at, turn = memo->turn, beside = p->beside;
    const bool mine = group * MK_UNIT + d->lane < n && d->lane < MK_UNIT, residual = unit && (end & (MK_END_ADDS | MK_END_FROM_LOCAL)) == MK_END_ADDS;
    uint4 look = make_uint4(0, 0, 0, 0), gate = make_uint4(0, 0, 0, 0);
    if (residual) look = mk_packet_load(f->place.in[1] + i / 3);
    if (end & MK_END_GATED && unit) gate = mk_packet_load(f->place.in[2] + p->gate_at);
    const float gain = end & MK_END_NEAR && unit ? __ldg(d->a->param + p->near_gain + i) : 0;

    const mk_tile t = p->tile;
    const mk_lap lap = sh->lap;
    float scale = in->gemv.scale;
    mk_keep(&scale);
    const mk_way way = mk_way_of<FORM == MK_X_F16>(&t, at);
    const uint32_t red = mk_smem(sh->red) + (turn & 1) * (MK_RED_FLOATS * 2), rows = t.rows;
    uint32_t part = mk_part_at(red, rows, at), sums = red + 4 * i;
    mk_keep(&part), mk_keep(&sums);
    uint8_t *to = end & MK_END_TO_LOCAL ? mk_local_memory(d->a) + p->out_at + 4 * i : (uint8_t *)mk_publish_where(f->place.out, end & MK_END_F32, group, d->lane);
    if (!mine || (!(end & MK_END_TO_LOCAL) && !mk_publishes(end & MK_END_F32, d->lane))) to = NULL; /* who stores nothing */
    to = mk_keep_at(to);
    mk_sync(); /* the input is staged */
    mk_trace_input(d);
    float norm = mk_row_rms(d, p, 0, rms) * scale; /* now: a warp waits for a stage rather than all for a warp */
    mk_keep(&norm);
    mk_stagger(&way);
    mk_product_one<FORM>(MK_FAULT_TAPE, &slot, &t, tiles, &way, &lap, mk_smem(sh->staging) + beside, mk_row_stride(p->x.k), p->head_shift, part, d->lane);
    mk_sync();
    mk_trace_publish(d);
    if (unit) {
        float y = mk_part_get(sums, rows) * norm, res = -0.0f, open = 1; /* what is added, times what: y as it is */
        if (end & MK_END_SILU) y = mk_silu(y) * (mk_part_get(sums + 4 * n, rows) * norm);
        if (end & MK_END_FROM_LOCAL) res = ((const float *)(mk_local_memory(d->a) + p->res_at))[i];
        if (residual) {
            look = mk_packet_get(f->place.in[1] + i / 3, look, f->place.epoch[1], 1, 0, i / 3);
            res = __uint_as_float(i % 3 == 0 ? look.x : i % 3 == 1 ? look.y : look.z);
        }
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
        if (end & MK_END_NEAR && mine) sh->near[i] = __fmul_rn(y, gain);
    }
    __syncwarp();
    if (d->lane == 0) {
        memo->next = slot;
        memo->turn = turn ^ 1;
    }
    __syncwarp(); /* or lane 0 would come back alone */
}

/* By mk_plan.one: the commonest first, one comparison behind the other. */
MK_DEV void mk_gemv_one_run(uint32_t insn, uint32_t one)
{
#define X(f32, form, pro)                                                                                              \
    mk_keep(&one);                                                                                                     \
    if (one == MK_ONE(f32, form, pro)) return mk_gemv_one<form>(mk_gather_one<f32, form, pro>(insn));
    MK_ONES_OFTEN(X)
#undef X
    switch (one) {
#define X(f32, form, pro) case MK_ONE(f32, form, pro): mk_gemv_one<form>(mk_gather_one<f32, form, pro>(insn)); break;
        MK_ONES_SELDOM(X)
#undef X
    }
}

#endif
