/* How far two machines (twin, resident kernel, plain reference) may differ in what an instruction leaves behind when its inputs are the same.
 * The one place for these numbers: mkctl diff, tests/gpu/test_opcodes and the daemon's self-test read them here.
 *
 * A value passes when  |got - want| <= tol * (rms + |want|), rms = root mean square of what `want` has of the same kind (the vector's row, the head's
 * state ...). Values that were rounded to bf16 on their way out may be one bf16 step further apart. Integers (ids, tokens, counters) must be equal.
 * Where a prologue's result is rounded to bf16 the machines round at different places (the twin x * rstd * gamma, the kernel x * gamma with the product
 * divided by rms later): 2^-9 a term, which averages to 2e-3 of the RMS of a long sum and reaches 4 sigma of that in a thousand values. */
#ifndef MK_TOLERANCE_H
#define MK_TOLERANCE_H

#include "instructions/isa.h"

/* X(opcode, inputs used as they are, inputs rounded to bf16 inside, why) */
#define MK_TOLERANCES(X)                                                                                               \
    X(EMBED, 0, 0, "a copy")                                                                                           \
    X(GEMV, 1e-4, 2e-2, "tensor cores truncate while they add: 2^-23 for each of up to 400 steps")                     \
    X(CONV_STEP, 1e-5, 1e-5, "four products")                                                                          \
    X(DELTA_STEP, 1e-4, 1e-4, "sums over 128 key channels in another order; the L2 norms' rsqrt")                      \
    X(KV_APPEND, 1e-5, 1e-5, "an RMS and a rotation in f32")                                                           \
    X(MLA_PARTIAL, 1e-4, 1e-2, "f32 sums over a page in another order")                                                \
    X(COMBINE, 1e-5, 1e-5, "f32, splits in the same order")                                                            \
    X(ROUTE, 1e-5, 1e-5, "softmax sums in another order")                                                              \
    X(EXPERT_UP, 6e-2, 6e-2, "rounded RMS prologue, then silu(gate) * up: two factors")                                \
    X(EXPERT_DOWN, 1e-4, 1e-4, "as GEMV without a prologue")                                                           \
    X(LM_HEAD, 1e-2, 1e-2, "rounded RMS prologue")                                                                     \
    X(SAMPLE, 1e-5, 1e-5, "weights are integers; the logprob's sum is f32")                                            \
    X(SCHEDULE, 0, 0, "integers")                                                                                      \
    X(GQA_APPEND, 1e-5, 1e-5, "an RMS and a rotation in f32")                                                          \
    X(GQA_PARTIAL, 1e-4, 1e-2, "f32 sums over a page in another order")

/* Of what an instruction publishes or stores. */
static inline double mk_tolerance(const mk_insn *in)
{
    static const double exact[MK_OP_COUNT] = {
#define X(OP, a, b, why) [MK_OP_##OP] = a,
        MK_TOLERANCES(X)
#undef X
    };
    static const double rounded[MK_OP_COUNT] = {
#define X(OP, a, b, why) [MK_OP_##OP] = b,
        MK_TOLERANCES(X)
#undef X
    };
    if (in->opcode >= MK_OP_COUNT) return 0;
    int round = 1;
    if (in->opcode == MK_OP_GEMV) round = in->gemv.prologue != MK_PRO_NONE && !(in->gemv.flags & MK_GEMV_X_F32);
    if (in->opcode == MK_OP_MLA_PARTIAL || in->opcode == MK_OP_GQA_PARTIAL) round = 0;
    if (in->opcode == MK_OP_GEMV && in->gemv.epilogue == MK_EPI_SILU && round) return rounded[MK_OP_EXPERT_UP];
    return round ? rounded[in->opcode] : exact[in->opcode];
}

#endif
