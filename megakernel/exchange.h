/* The twin's side of the exchange: packets with their epoch, counters, local memory. instructions/op.h has what opcodes call. */
#ifndef MK_EXCHANGE_H
#define MK_EXCHANGE_H

#include "instructions/op.h"

/* 1 when wait `w` of c->in is satisfied for all rows of the step; else 0, and *slice (may be NULL) is the first slice missing. */
int mk_wait_ready(const mk_ctx *c, int w, uint32_t *slice);

/* Fills all packets with an epoch that nobody waits for first; counters start at 0. */
void mk_exchange_reset(const mk_program *p, mk_memory *mem, uint32_t epoch0);

/* Epochs repeat after 2^32 / MK_EPOCH_STRIDE steps, and a row that few steps have keeps its packets as long: between two steps, when
 * nobody waits for anything, every MK_SWEEP_STEPS steps (rings.h), all packets get the base epoch of step `step`, which no publication carries. */
void mk_exchange_sweep(const mk_program *p, mk_memory *mem, uint32_t epoch0, uint32_t step);

#endif
