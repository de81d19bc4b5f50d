/* GEMV of an f32 vector (MK_GEMV_X_F32) on the device: a shared expert's gate, one row of BF16 weights times h under its norm, which one worker makes and all wait for. It stages weights, which
 * are one stage, instead of values, and multiplies in f32: a thread takes every 256th packet of each row, ascending, and the warps' sums are added as those of squares are. So the order of a
 * row's sum does not depend on the others. Semantics: gemv.c; what it may be: check_gemv in megakernel/refuse.cuh. */
#ifndef MK_GATE_CUH
#define MK_GATE_CUH

#include "instructions/matvec.cuh"

/* By the group of the stage: its k weights go to shared address `to`. */
MK_DEV void mk_gate_weights(const mk_dev *d, uint32_t stage, uint32_t k, uint32_t to)
{
    const uint32_t from = mk_stage_at(d->sh, stage) + d->sh->lap.scales, bar = mk_stage_bar(d->sh, stage);
    uint32_t last = 0;
    mk_stage_wait(bar, mk_stage_parity(stage), MK_FAULT_TAPE);
#pragma unroll 2
    for (uint32_t i = d->tid % (MK_COMPUTE / MK_GROUPS) * 16; i < 2 * k; i += 16 * MK_COMPUTE / MK_GROUPS) {
        const uint4 w = mk_lds128(from + i);
        mk_sts128(to + i, w.x, w.y, w.z, w.w);
        last |= w.w;
    }
    mk_stage_leave(bar + MK_EMPTY, d->lane, last, d->sh->lap.none);
}
/* ROWS: of the batch, at most. */
template <uint32_t ROWS> MK_CALL void mk_gate_of(const mk_insn *in)
{
    constexpr uint32_t T = ROWS == 1 ? 4 : 1, N = T * ROWS; /* packets of a row, of all, that a thread has on their way */
    const mk_dev here = mk_here(in), *d = &here;
    mk_shared *sh = d->sh;
    const mk_fed *f = mk_fed_of(in);
    const mk_plan *p = &f->plan;
    const mk_vec *v = &sh->vec[in->wait[0].vec], *out = &sh->vec[in->signal_vec];
    const uint16_t *start = sh->start + v->start_index + in->wait[0].slice0;
    const mk_divisor by_slice = mk_div_by_slice(v);
    const uint32_t nrows = ROWS == 1 ? 1 : d->step->nrows, row_packets = v->nslice * v->slice_packets, epoch = f->place.epoch[0], k = p->x.k;
    const uint32_t stage = d->memo->next.at, turn = d->memo->turn, weights = mk_smem(sh->staging);
    const float *gamma = d->a->param + p->x.param_off;
    const mk_turns turns = {{MK_COMPUTE, 2 * MK_COMPUTE}, {0, 0}};
    float *red = sh->red + (turn & 1) * (MK_RED_FLOATS / 2); /* [row][products, squares][warp] */
    float sum[ROWS] = {}, squares[ROWS] = {};
    mk_staged_drop(d);
#pragma unroll 1
    for (uint32_t base = 0; base < p->packets; base += T * MK_COMPUTE) {
        const uint32_t first = base + d->tid;
        const uint4 *from = f->place.in[0] + first;
        uint4 q[N];
        uint32_t value[T], count[T], wanted = 0;
        float gain[T][3];
#pragma unroll
        for (uint32_t j = 0; j < T; j++) {
            const uint32_t packet = min(first + j * MK_COMPUTE, p->packets - 1), s = mk_quot(packet, by_slice), x = start[s] + (packet - s * by_slice.n) * 3;
            value[j] = x - p->x.in_off;
            count[j] = first + j * MK_COMPUTE < p->packets && x < start[s + 1] ? start[s + 1] - x : 0; /* three or more: all */
#pragma unroll
            for (uint32_t r = 0; r < ROWS; r++) {
                const uint32_t i = r * T + j;
                wanted |= count[j] && r < nrows ? 1u << i : 0;
                q[i] = make_uint4(0, 0, 0, epoch);
                mk_packet_again(&q[i], from + r * row_packets + j * MK_COMPUTE, wanted & 1u << i);
            }
#pragma unroll
            for (uint32_t e = 0; e < 3; e++) gain[j][e] = e < count[j] ? __ldg(gamma + value[j] + e) : 0;
        }
        if (!base) { /* whoever reads a stage leaves it: its group puts the weights where all can read them; behind the barrier the product before is read, too, for many rows have but one place (mk_red_base) */
            if (mk_group_first(d->warp, stage) == 0) mk_gate_weights(d, stage, k, weights);
            mk_sync();
        }
        mk_some_wait<T>(from, row_packets, turns, epoch, 0, first, q);
#pragma unroll
        for (uint32_t j = 0; j < T; j++)
#pragma unroll
            for (uint32_t e = 0; e < 3; e++) {
                const float w = mk_lds_bf16(mk_after(weights) + 2 * min(value[j] + e, k - 1)); /* behind a slice's values are zeros, and no gammas */
#pragma unroll
                for (uint32_t r = 0; r < ROWS; r++) {
                    const uint4 x = q[r * T + j];
                    const float y = __uint_as_float(e == 0 ? x.x : e == 1 ? x.y : x.z);
                    squares[r] = __fmaf_rn(y, y, squares[r]);
                    sum[r] = __fmaf_rn(__fmul_rn(y, gain[j][e]), w, sum[r]);
                }
            }
    }
    __syncwarp();
    mk_trace_input(d);
    mk_trace_bytes(d, p->tile.nkb * MK_KBLOCK_BYTES);
    if constexpr (ROWS == 1) {
        const float a = mk_warp_sum(sum[0]), b = mk_warp_sum(squares[0]);
        if (d->lane == 0) red[d->warp] = a, red[MK_WARPS + d->warp] = b;
    } else {
        const float a = mk_warp_eight(sum, d->lane), b = mk_warp_eight(squares, d->lane);
        float *to = red + d->lane / 4 * 2 * MK_WARPS + d->warp;
        if (d->lane % 4 == 0) to[0] = a, to[MK_WARPS] = b;
    }
    mk_sync();
    mk_stages_pass(sh, d->warp, d->lane, 1);
    mk_trace_publish(d);
    if (d->warp < nrows) {
        const float *of = red + d->warp * 2 * MK_WARPS;
        const float y = mk_warps_sum(of) * mk_rms_factor(p, of + MK_WARPS) * in->gemv.scale;
        mk_publish_unit(out, mk_signal_packets(d, out, d->warp, in->signal_slice), 1, 0, d->lane ? 0 : y, mk_signal_epoch(d), d->lane);
    }
    __syncwarp();
    if (d->lane == 0) d->memo->turn = turn ^ 1;
    __syncwarp();
}
MK_DEV void mk_gate_run(const mk_insn *in)
{
    mk_sh()->step.nrows == 1 ? mk_gate_of<1>(in) : mk_gate_of<MK_MAX_ROWS>(in);
}
static_assert(2 * MK_MOST_GATE <= MK_UPPER, "weights leave the staging area's upper part alone");
static_assert(2 * MK_WARPS * MK_MAX_ROWS <= MK_RED_FLOATS / 2, "the warps' sums fit half the reduction area");

#endif
