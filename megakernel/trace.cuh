/* The device's side of the trace (trace.h). Part of device.cuh. A step is traced when its descriptor says so; otherwise a hook is a branch that thread 0
 * takes on a word of shared memory and the others on their number: no register is held for it, and a stage of weights that is there is not looked at twice.
 * Thread 0 notes for its worker: the warps share every instruction, so what warp 0 sees is what the worker does. */
#ifndef MK_TRACE_CUH
#define MK_TRACE_CUH

MK_DEV bool mk_traced(const mk_dev *d)
{
    return d->tid == 0 && d->sh->trace.on;
}
MK_DEV void mk_trace_begin(const mk_dev *d)
{
    if (d->tid) return;
    mk_trace_now *t = &d->sh->trace;
    t->on = d->step->trace;
    if (!t->on) return;
    t->input = t->weights = t->publish = t->bytes = 0;
    t->start = mk_now();
}
/* The input is complete: after the barrier that says so to all. */
MK_DEV void mk_trace_input(const mk_dev *d)
{
    if (mk_traced(d)) d->sh->trace.input = (uint32_t)(mk_now() - d->sh->trace.start);
}
/* The result is there, its publication begins. */
MK_DEV void mk_trace_publish(const mk_dev *d)
{
    if (mk_traced(d)) d->sh->trace.publish = (uint32_t)(mk_now() - d->sh->trace.start);
}
/* Around a wait for a stage of weights that is not there yet. */
MK_DEV void mk_trace_wait(const mk_dev *d)
{
    if (mk_traced(d)) d->sh->trace.since = mk_now();
}
MK_DEV void mk_trace_waited(const mk_dev *d)
{
    if (mk_traced(d)) d->sh->trace.weights += (uint32_t)(mk_now() - d->sh->trace.since);
}
MK_DEV void mk_trace_bytes(const mk_dev *d, uint32_t n)
{
    if (mk_traced(d)) d->sh->trace.bytes += n;
}
/* Writes the record. SCHEDULE does it before it may idle, and again at its end. */
MK_DEV void mk_trace_end(const mk_dev *d)
{
    if (!mk_traced(d)) return;
    const mk_trace_now *t = &d->sh->trace;
    const uint32_t tag = t->on >> 16, k = t->on & 0xffffu, end = (uint32_t)(mk_now() - t->start); /* k from 1 */
    uint4 *r = d->a->trace + 2 * ((size_t)(k - 1) * d->a->n_insn + t->first + d->in->seq);
    mk_packet_store(r, (uint32_t)t->start, (uint32_t)(t->start >> 32 & 0xffffu) | tag << 16, t->input, t->weights);
    mk_packet_store(r + 1, t->publish, end, t->bytes, tag << 16 | (k - 1) << 8 | d->step->nrows);
}

#endif
