/* The device's side of the trace (trace.h). Part of device.cuh. A step is traced when its descriptor says so; otherwise a hook is a branch on mk_dev.trace,
 * which is 0. Thread 0 notes for its worker: the warps share every instruction, so what warp 0 sees is what the worker does. Inside a product the word in
 * shared memory is asked instead, where it costs nothing (a stage is not there) or is rare: a register that lives across the product spills others. */
#ifndef MK_TRACE_CUH
#define MK_TRACE_CUH

MK_DEV void mk_trace_begin(mk_dev *d)
{
    mk_trace_now *t = &d->sh->trace;
    d->trace = d->tid == 0 ? d->step->trace : 0;
    if (d->tid == 0) t->on = d->trace;
    if (!d->trace) return;
    *(uint4 *)&t->input = make_uint4(0, 0, 0, 0);
    if (d->in->seq) { /* the low half alone is one read */
        t->start = mk_now_low();
    } else {
        const uint64_t now = mk_now();
        t->start = t->base = (uint32_t)now;
        t->high = (uint32_t)(now >> 32);
    }
}
/* The input is complete: after the barrier that says so to all. */
MK_DEV void mk_trace_input(const mk_dev *d)
{
    if (d->trace) d->sh->trace.input = mk_now_low();
}
/* The result is there, its publication begins. */
MK_DEV void mk_trace_publish(const mk_dev *d)
{
    if (d->trace) d->sh->trace.publish = mk_now_low();
}
MK_DEV void mk_trace_bytes(const mk_dev *d, uint32_t n)
{
    if (d->trace) d->sh->trace.bytes += n;
}
/* Writes the record, by thread 0. A function of its own: the code around its call is run when nothing is traced. */
MK_CALL void mk_trace_write(const mk_insn *in, uint32_t trace)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_trace_now *t = &d->sh->trace;
    const uint4 x = *(const uint4 *)&t->input; /* input, weights, publish, bytes */
    const uint32_t low = t->start, high = t->high + (low < t->base), end = mk_now_low() - low, tag = trace >> 16, k = (trace & 0xffffu) - 1;
    const uint32_t tape = d->in->opcode == MK_OP_LM_HEAD && !d->step->any_logits ? 0 : d->in->tape_bytes;
    uint4 *r = d->a->trace + 2 * ((size_t)k * d->a->n_insn + t->first + d->in->seq);
    mk_packet_store(r, low, (high & 0xffffu) | tag << 16, x.x ? x.x - low : 0, x.y);
    mk_packet_store(r + 1, x.z ? x.z - low : 0, end, x.w + tape, tag << 16 | k << 8 | d->step->nrows);
}
/* SCHEDULE does it before it may idle, and again at its end. */
MK_DEV void mk_trace_end(const mk_dev *d)
{
    if (d->trace) mk_trace_write(d->in, d->trace);
}

#endif
