/* The twin: executes a program's bytes on the CPU, cooperatively and deterministically, for any number of workers. The daemon's device
 * where there is no GPU, the oracle of every opcode, and what CI runs. */
#ifndef MK_TWIN_H
#define MK_TWIN_H

#include "instructions/op.h"
#include "megakernel/schedule.h"
#include "megakernel/snapshot.h"
#include "megakernel/trace.h"

typedef struct mk_twin mk_twin;

typedef struct mk_twin_config {
    uint32_t slots;   /* stream slots */
    uint32_t context; /* tokens of a slot's log */
    uint32_t epoch0;
    uint32_t sweep;   /* steps between two sweeps of the exchange, a power of two; 0: MK_SWEEP_STEPS */
} mk_twin_config;

/* Allocates all memory of the program (weights zeroed, to be filled through mk_twin_memory before the first step). The program must
 * outlive the twin and must have passed the validator. NULL program memory is refused with the region that did not fit. */
int mk_twin_new(const mk_program *p, const mk_twin_config *cfg, mk_twin **t, mk_err *err);
void mk_twin_destroy(mk_twin **t);

mk_memory *mk_twin_memory(mk_twin *t);
mk_sched *mk_twin_sched(mk_twin *t);

/* Polls the submit ring and, when there is something to do, runs one step. *ran = rows of the step (0: idle; mk_twin_sched()->stop says
 * whether to leave). MK_E_BUG when the program deadlocks: names worker, instruction and what it waits for. MK_E_DEVICE when it hangs because it
 * was asked to (MK_SUB_HANG): mk_twin_snapshot, mk_twin_restart. */
int mk_twin_step(mk_twin *t, uint32_t *ran, mk_err *err);

/* Records of traced step k (MK_SUB_TRACE): [instructions]. Written by whoever calls mk_twin_step, at most mk_trace_limit() steps. */
const mk_trace_record *mk_twin_trace(const mk_twin *t, uint32_t k);

/* As of a kernel that hangs; mk_snapshot_free it. */
int mk_twin_snapshot(const mk_twin *t, mk_snapshot *s, mk_err *err);
/* What a relaunch is to a GPU: rings, exchange and schedule are empty again, epochs go on above those used. Weights, cache, state and arena stay. */
void mk_twin_restart(mk_twin *t);

/* Called after every instruction (mkctl diff, tests). */
typedef void (*mk_twin_hook)(void *arg, const mk_ctx *c);
void mk_twin_set_hook(mk_twin *t, mk_twin_hook f, void *arg);
void mk_twin_set_route_hook(mk_twin *t, mk_route_hook f, void *arg);

#endif
