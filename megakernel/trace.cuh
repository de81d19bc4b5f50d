/* The device's side of the trace (trace.h). Part of device.cuh. A step is traced when its descriptor says so; otherwise a hook is a branch on mk_dev.trace,
 * which is 0. Thread 0 notes for its worker: the warps share every instruction, so what warp 0 sees is what the worker does. It notes in the instruction's slot, where the
 * controller finds it when the compute warps are done, and makes a record of it: they have no time for that. Inside a product the word in shared memory is asked
 * instead, where it costs nothing (a stage is not there) or is rare: a register that lives across the product spills others. */
#ifndef MK_TRACE_CUH
#define MK_TRACE_CUH

MK_DEV mk_trace_note *mk_trace_of(const mk_insn *in)
{
    return &((mk_fed *)in)->note;
}
/* The input is complete: after the barrier that says so to all. */
MK_DEV void mk_trace_input(const mk_dev *d)
{
    if (d->trace) mk_trace_of(d->in)->input = mk_now_low();
}
/* The result is there, its publication begins. */
MK_DEV void mk_trace_publish(const mk_dev *d)
{
    if (d->trace) mk_trace_of(d->in)->publish = mk_now_low();
}
MK_DEV void mk_trace_bytes(const mk_dev *d, uint32_t n)
{
    if (d->trace) mk_trace_of(d->in)->bytes += n;
}
/* Writes the record of an instruction in its slot that ended at `end` and has waited for weights that long, by one thread. A function of its own: the code around its call
 * is run when nothing is traced. */
MK_CALL void mk_trace_write(const mk_insn *in, uint32_t end, uint32_t weights)
{
    const mk_shared *sh = mk_sh();
    const mk_trace_note t = *mk_trace_of(in);
    const uint32_t trace = sh->step.trace, tag = trace >> 16, k = (trace & 0xffffu) - 1, aside = in == &sh->aside.in ? MK_TRACE_ASIDE : 0, tape = in->opcode == MK_OP_LM_HEAD && !sh->step.any_logits ? 0 : in->tape_bytes;
    const uint32_t high = sh->trace.high + (t.start < sh->trace.base);
    uint4 *r = sh->args.trace + 2 * ((size_t)k * sh->args.n_insn + sh->trace.first + in->seq);
    mk_packet_store(r, t.start, (high & 0xffffu) | tag << 16, t.input ? t.input - t.start : 0, weights);
    mk_packet_store(r + 1, t.publish ? t.publish - t.start : 0, end - t.start, t.bytes + tape, tag << 16 | k << 8 | aside | sh->step.nrows);
}
/* SCHEDULE's, before it may idle; the controller does it again at its end. */
MK_DEV void mk_trace_end(const mk_dev *d)
{
    if (d->trace) mk_trace_write(d->in, mk_now_low(), 0);
}

#endif
