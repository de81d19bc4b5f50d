/* The validator: proves a program, or refuses it with one line that names the worker, its instruction, the vector, what was expected and
 * what was found. Nothing may run a program that has not passed. No weights are needed; it looks at the program alone.
 *
 * Proved, for any routing and any 1..MK_MAX_ROWS rows a step:
 *   structure     counts, table of vectors, opcodes, reserved bytes; regions of vectors inside their memory and disjoint
 *   addresses     tape, experts, embedding, parameters, recurrent state (disjoint), cache pools, partials, logits
 *   shapes        what an instruction reads lies inside the slices it waits for, what it publishes fills its slice
 *   publications  every slice of every publication exactly once a step, bulk counters exactly `signals` times
 *   progress      a step reaches its end, whatever the timing (no cycle of waits)
 *   reuse         no buffer is overwritten, and no counter moves on, before everybody who needs it has read it, over the whole
 *                 cycle of steps: happens-before by vector clocks (validate_order.c)
 *   shared memory at MK_MAX_ROWS rows, when the program has a limit
 * Not proved: that the numbers mean the right thing (which matrix, which parameter, which constant), and what lies outside the
 * program: weights, page tables, state slots of a step, the rings. */
#ifndef MK_VALIDATE_H
#define MK_VALIDATE_H

#include "instructions/program.h"

#define MK_MAX_WORKERS 4096u

typedef struct mk_validation {
    uint32_t insns[MK_OP_COUNT]; /* instructions per opcode */
    uint32_t publications;       /* (vector, publication) pairs a step, local ones not counted */
    uint32_t waits;              /* waits a step, local ones not counted */
    uint32_t exchanges;          /* longest chain of publications that one worker makes and another waits for, in a step */
    uint32_t smem_max;           /* most shared memory an instruction needs at MK_MAX_ROWS rows, bytes ... */
    uint32_t smem_worker, smem_seq; /* ... and which */
    uint32_t staging_max;        /* most of MK_STAGING_BYTES that a gathered vector takes */
    double seconds;              /* it took */
} mk_validation;

/* *out (may be NULL) is filled as far as the check came. MK_E_PROGRAM: refused. MK_E_SYSTEM: out of memory.
 * The arrays of *p must have the sizes that p->info says (mk_program_load and the planner see to that). */
int mk_validate(const mk_program *p, mk_validation *out, mk_err *err);

/* ---- shared memory (smem.c) ----------------------------------------------------------------------------------------- */

#define MK_STAGING_BYTES    40960u  /* gathered vectors, at MK_MAX_ROWS rows */
#define MK_RING_MIN_BYTES   65536u  /* weight ring: four stages of 16 KB, the least that hides a copy's latency */
#define MK_SMEM_FIXED_BYTES 12288u  /* two instructions, barriers, step descriptor, 16 warps' 16 x 8 f32 partial tiles, slack */

/* Bytes of gathered vectors that an instruction stages at a time (limit MK_STAGING_BYTES). */
uint32_t mk_insn_staging(const mk_program *p, const mk_insn *in);
/* Bytes of shared memory an instruction needs at MK_MAX_ROWS rows, weight ring at its least and the worker's LOCAL vectors included:
 *     MK_SMEM_FIXED_BYTES + MK_RING_MIN_BYTES + local_bytes + staging + the opcode's own working memory.
 * Saturates at UINT32_MAX. */
uint32_t mk_insn_smem(const mk_program *p, const mk_insn *in);

#endif
