/* The device's side of the trace (trace.h). Part of device.cuh. A step is traced when its descriptor says so; otherwise mk_dev.trace is 0 and a hook is a
 * predicated branch. Only thread 0 of a worker has it set: the warps share every instruction, so what warp 0 sees is what the worker does. */
#ifndef MK_TRACE_CUH
#define MK_TRACE_CUH

MK_DEV void mk_trace_begin(mk_dev *d)
{
    d->trace = d->tid == 0 ? d->step->trace : 0;
    if (!d->trace) return;
    mk_trace_now *t = &d->sh->trace;
    t->input = t->weights = t->publish = t->bytes = 0;
    t->start = mk_now();
}
/* The input is complete: after the barrier that says so to all. */
MK_DEV void mk_trace_input(const mk_dev *d)
{
    if (d->trace) d->sh->trace.input = (uint32_t)(mk_now() - d->sh->trace.start);
}
/* The result is there, its publication begins. */
MK_DEV void mk_trace_publish(const mk_dev *d)
{
    if (d->trace) d->sh->trace.publish = (uint32_t)(mk_now() - d->sh->trace.start);
}
/* Around a wait for a stage of weights: when it began, 0 if there is nothing to wait for. */
MK_DEV uint64_t mk_trace_wait(const mk_dev *d, uint32_t bar, uint32_t parity)
{
    return d->trace && !mk_mbar_test(bar, parity) ? mk_now() : 0;
}
MK_DEV void mk_trace_waited(const mk_dev *d, uint64_t since)
{
    if (since) d->sh->trace.weights += (uint32_t)(mk_now() - since);
}
MK_DEV void mk_trace_bytes(const mk_dev *d, uint32_t n)
{
    if (d->trace) d->sh->trace.bytes += n;
}
/* Writes the record. SCHEDULE does it before it may idle, and again at its end. */
MK_DEV void mk_trace_end(const mk_dev *d)
{
    if (!d->trace) return;
    const mk_trace_now *t = &d->sh->trace;
    const uint32_t tag = d->trace >> 16, k = d->trace & 0xffffu, end = (uint32_t)(mk_now() - t->start); /* k from 1 */
    uint4 *r = d->a->trace + 2 * ((size_t)(k - 1) * d->a->n_insn + t->first + d->in->seq);
    mk_packet_store(r, (uint32_t)t->start, (uint32_t)(t->start >> 32 & 0xffffu) | tag << 16, t->input, t->weights);
    mk_packet_store(r + 1, t->publish, end, t->bytes, tag << 16 | (k - 1) << 8 | d->step->nrows);
}

#endif
