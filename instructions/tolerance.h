/* How far two machines (twin, resident kernel, plain reference) may differ in what an instruction leaves behind when its inputs are the same.
 * The one place for these numbers: mkctl diff, tests/gpu/test_opcodes and the daemon's self-test read them here.
 *
 * A value passes when  |got - want| <= tol * (rms + |want|), rms = root mean square of what `want` has of the same kind (the vector's row, the head's
 * state ...). Values that were rounded to bf16 on their way out may be one bf16 step further apart, those
 * of an FP8 cache one e4m3 step. Integers (ids, tokens, counters) must be equal.
 * All machines round to bf16 at the same places (the staged vector is bf16(x * gamma), its 1/rms multiplies the product in f32), so what is left is the order of f32
 * sums: measured on an H200 it is at most 2.4e-6 (profiles/NOTES.md). */
#ifndef MK_TOLERANCE_H
#define MK_TOLERANCE_H

#include "instructions/isa.h"

/* X(opcode, tolerance, what differs) */
#define MK_TOLERANCES(X)                                                                                               \
    X(EMBED, 0, "nothing: a copy")                                                                                     \
    X(GEMV, 2e-5, "the order of sums over k; tensor cores truncate while they add")                                    \
    X(DELTA_STEP, 2e-5, "the order of sums over key channels; exp, log and rsqrt of the hardware")            \
    X(KV_APPEND, 1e-5, "the order of the RMS")                                                                         \
    X(MLA_PARTIAL, 1e-2, "p = exp(s - max) rounded to bf16 for tensor cores: 2^-9 a token, in sum p as well")         \
    X(COMBINE, 1e-5, "fused multiply-adds")                                                                            \
    X(ROUTER, 1e-5, "fused multiply-adds; 2^-24 a slice of h")                                                          \
    X(ROUTE, 1e-5, "the order of the softmax' sum")                                                                    \
    X(EXPERT_UP, 2e-5, "as GEMV, then silu(gate) * up")                                                                \
    X(EXPERT_DOWN, 2e-5, "as GEMV")                                                                                    \
    X(LM_HEAD, 2e-5, "as GEMV")                                                                                        \
    X(SAMPLE, 1e-5, "weights are integers; the logprob's sum is f32")                                                  \
    X(SCHEDULE, 0, "nothing: integers")                                                                                \
    X(GQA_APPEND, 1e-5, "the order of the RMS")                                                                        \
    X(GQA_PARTIAL, 1e-2, "as MLA_PARTIAL")

/* Of what an instruction publishes or stores. */
static inline double mk_tolerance(const mk_insn *in)
{
    switch (in->opcode) {
#define X(OP, t, why) case MK_OP_##OP: return t;
        MK_TOLERANCES(X)
#undef X
    default: return 0;
    }
}

#endif
