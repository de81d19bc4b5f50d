/* The trace: what every worker did with its time in some steps, an instruction a record. Shared by the resident kernel, the twin and the tools.
 *
 * Record i of traced step k (from 0) lies at k * instructions + i, where i is the instruction's place in mk_program.insn. Records carry their trace's
 * number, so that nothing needs to be cleared and whoever reads sees which are there. */
#ifndef MK_TRACE_H
#define MK_TRACE_H

#include <assert.h>
#include <stdint.h>

#define MK_TRACE_STEPS 255u        /* most steps of a trace */
#define MK_TRACE_BYTES (64u << 20) /* most memory for its records */

/* Times in nanoseconds of the device's clock; all but the start count from the start. On the GPU thread 0 of a worker takes them: its view is the
 * worker's, because all compute warps share every instruction. Written as two packets, each with the trace's number. */
typedef struct mk_trace_record {
    uint32_t start_lo;
    uint16_t start_hi; /* 48 bits: they wrap after 78 hours */
    uint16_t tag;      /* number of the trace, 1..65535 */
    uint32_t input;    /* the input was complete (of an input that comes in pieces: the first one) */
    uint32_t weights;  /* how long it waited for weights, in all */
    uint32_t publish;  /* the last product or sum was done, its publication began; 0: the instruction does not tell them apart */
    uint32_t end;
    uint32_t bytes;    /* of weights (experts': without scales), cache and state that it read */
    uint32_t mark;     /* tag << 16 | step of the trace, from 0 << 8 | rows of the step, with MK_TRACE_ASIDE */
} mk_trace_record;
#define MK_TRACE_ASIDE 0x80u /* beside the worker's queue, by warps of their own: no part of its time */
static_assert(sizeof(mk_trace_record) == 32, "two packets");

static inline uint64_t mk_trace_start(const mk_trace_record *r)
{
    return (uint64_t)r->start_hi << 32 | r->start_lo;
}
/* Whether record r of traced step k is there. */
static inline int mk_trace_is(const mk_trace_record *r, uint32_t tag, uint32_t k)
{
    return r->tag == tag && r->mark >> 8 == (tag << 8 | k);
}
/* Steps that a trace of a program with n instructions may have. */
static inline uint32_t mk_trace_limit(uint32_t n)
{
    uint32_t fit = (uint32_t)(MK_TRACE_BYTES / sizeof(mk_trace_record) / (n ? n : 1));
    return fit > MK_TRACE_STEPS ? MK_TRACE_STEPS : fit ? fit : 1;
}

#endif
