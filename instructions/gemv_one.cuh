/* GEMV of one row whose vector fits: what most of a step is made of. One function from the wait to the publication, because every instruction of a warp here is on
 * the way of the token: nothing is worked out that mk_plan (by the host) or mk_places (by the controller) can say, all that comes from memory is asked for before
 * anything is waited for, and there is no call. The bits are those of gemv.cuh. */
#ifndef MK_GEMV_ONE_CUH
#define MK_GEMV_ONE_CUH

#include "instructions/matvec.cuh"

template <bool F32, uint32_t FORM, bool RMS> MK_CALL void mk_gemv_one(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    mk_shared *sh = d->sh;
    const mk_fed *f = mk_fed_of(in);
    const mk_plan *p = &f->plan;
    mk_memo *memo = d->memo;
    const uint32_t n = in->gemv.n, end = p->end, group = d->warp, i = group * MK_UNIT + d->lane, step = sh->step.seq;
    const bool has = i < n && d->lane < MK_UNIT, staged_before = memo->staged == p->key && memo->step == step;
    mk_next slot = memo->next[MK_TAPE];
    const uint32_t at = slot.at, turn = memo->turn, parity = memo->parity ^ !staged_before, staged = mk_smem(sh->staging);
    uint4 look = make_uint4(0, 0, 0, 0), gate = make_uint4(0, 0, 0, 0);
    const uint4 *const residual = f->place.in[1] + i / 3;
    if ((end & (MK_END_ADDS | MK_END_FROM_LOCAL)) == MK_END_ADDS && has) look = mk_packet_load(residual);
    if (end & MK_END_GATED && group * MK_UNIT < n) gate = mk_packet_load(f->place.in[2] + p->gate_at);

    if (!staged_before) {
        const uint32_t k = p->x.k, packets = p->packets, epoch = f->place.epoch[0], fours = (k + 63) / 64 * 16, ordered = staged + mk_staged_bytes(k, FORM);
        const bool heads = !RMS && p->x.prologue == MK_PRO_HEADNORM;
        float *const trailer = (float *)(sh->staging + mk_staged_bytes(k, FORM) + ((k + 63) & ~63u) * (F32 ? 4 : 2));
        const uint4 *from = f->place.in[0];
        constexpr uint32_t N = MK_PACKETS_OF(F32, RMS);
        uint32_t m[N], top = 0;
        uint4 q[N];
        float g[MK_FOURS][4], sum = 0, scale = 1;
        mk_row_ask(from, d->tid, packets, q);
        mk_row_map(sh->args.map + p->map, d->tid, packets, m);
        if (RMS) mk_row_gammas(sh->args.param + p->x.param_off, d->tid, k, g);
        __syncwarp();
        if (d->lane == 0) {
            memo->staged = p->key;
            memo->step = step;
            memo->parity = parity;
        }
        mk_row_unmap(d->tid, packets, m);
        mk_row_wait(from, d->tid, 0, epoch, m, q);
        __syncwarp();
#pragma unroll
        for (uint32_t j = 0; j < N; j++) {
            if (j && j * MK_COMPUTE >= packets) break;
            top = max(top, mk_packet_order<F32>(q[j], m[j], p->x.in_off, k, ordered, &sum));
            if (heads) mk_packet_trailer(q[j], m[j], trailer - in->wait[0].slice0);
        }
        if (FORM != MK_X_BF16) { /* of an f32 vector for mk_stage_again */
            mk_row_top(d, 0, top);
            mk_gain(d, RMS ? mk_row_gain(g) : 0);
        }
        mk_sync();
        if (FORM == MK_X_F16) {
            scale = mk_row_scale(d, 0);
            if (d->tid == 0) sh->scale[parity][0] = scale;
        }
        if (heads) mk_head_norm(d, p, 0, trailer);
        mk_stage_row<F32, FORM, RMS>(ordered, staged, d->tid, k, fours, g, scale);
        if (RMS) mk_row_squares(d, 0, sum);
        mk_sync();
    }
    mk_trace_input(d);

    const mk_tile t = p->tile;
    const uint32_t base = (turn & 1) * (MK_RED_FLOATS / 2), form = mk_red_form(&t, 1);
    const mk_accs acc = mk_product_of<FORM, true>(MK_TAPE, &slot, &t, 0, t.nst, staged, mk_row_stride(p->x.k), 1, p->head_shift, mk_no_sum());
    mk_red_put(d, base, &t, at, 1, &acc);
    const float norm = mk_row_factor(d, p, 0) * in->gemv.scale;
    __syncwarp();
    if (d->lane == 0) {
        memo->next[MK_TAPE] = slot;
        memo->turn = turn ^ 1;
    }
    mk_sync();
    mk_trace_publish(d);
    if (group * MK_UNIT >= n) return;
    float y = 0;
    if (has) {
        y = mk_red_get(base, form, i, 0) * norm;
        if (end & MK_END_SILU) y = mk_silu(y) * (mk_red_get(base, form, n + i, 0) * norm);
        if (end & MK_END_ADDS) {
            float res, open = 1;
            if (end & MK_END_GATED) {
                gate = mk_packet_get(f->place.in[2] + p->gate_at, gate, f->place.epoch[2], 2, 0, p->gate_at);
                open = mk_sigmoidf(__uint_as_float((end >> 8 & 3) == 0 ? gate.x : (end >> 8 & 3) == 1 ? gate.y : gate.z));
            }
            if (end & MK_END_FROM_LOCAL) {
                res = ((const float *)(mk_local_memory(d->a) + p->res_at))[i];
            } else {
                look = mk_packet_get(residual, look, f->place.epoch[1], 1, 0, i / 3);
                res = __uint_as_float(i % 3 == 0 ? look.x : i % 3 == 1 ? look.y : look.z);
            }
            y = __fadd_rn(res, __fmul_rn(open, y));
        }
    }
    __syncwarp();
    if (end & MK_END_TO_LOCAL) {
        if (has) ((float *)(mk_local_memory(d->a) + p->out_at))[i] = y;
    } else {
        mk_publish_at(f->place.out, end & MK_END_F32, n, group, y, f->place.out_epoch, d->lane);
    }
}

/* By mk_plan.one. */
MK_DEV void mk_gemv_one_run(const mk_insn *in, uint32_t one)
{
    switch (one) {
    case MK_ONE(true, MK_X_F16, true): mk_gemv_one<true, MK_X_F16, true>(in); break;
    case MK_ONE(true, MK_X_F16, false): mk_gemv_one<true, MK_X_F16, false>(in); break;
    case MK_ONE(false, MK_X_F16, true): mk_gemv_one<false, MK_X_F16, true>(in); break;
    case MK_ONE(false, MK_X_F16, false): mk_gemv_one<false, MK_X_F16, false>(in); break;
    case MK_ONE(true, MK_X_F32, true): mk_gemv_one<true, MK_X_F32, true>(in); break;
    case MK_ONE(true, MK_X_BF16, true): mk_gemv_one<true, MK_X_BF16, true>(in); break;
    case MK_ONE(true, MK_X_BF16, false): mk_gemv_one<true, MK_X_BF16, false>(in); break;
    case MK_ONE(false, MK_X_BF16, true): mk_gemv_one<false, MK_X_BF16, true>(in); break;
    default: mk_gemv_one<false, MK_X_BF16, false>(in); break;
    }
}

#endif
