/* The self-test: before clients can connect, every opcode of the loaded program, at its real shapes, with the real weights where they lie, is run once by
 * the resident kernel's own code and compared with a plain kernel (megakernel/selftest_ref.cuh). Inputs are random, outputs are poisoned before.
 * Of every kind of instruction (opcode, vector, weight type, columns, prologue, epilogue) one publication is tested, of a layer that the seed chooses, with
 * all its slices on all workers. SCHEDULE is not: it computes nothing and the twin runs the same source. */
#ifndef MK_SELFTEST_H
#define MK_SELFTEST_H

#include "megakernel/derive.h"
#include "megakernel/gpu.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mk_selftest_report {
    uint32_t kinds;      /* instruction kinds that were run */
    uint32_t opcodes;    /* bit mask of their opcodes */
    uint64_t values;     /* compared */
    uint32_t absorbed;   /* products over heads compared with the checkpoint's own matrices */
    double seconds;
    double worst;        /* error over tolerance, at most 1 */
    char worst_at[160];  /* of which kind */
} mk_selftest_report;

/* The absorbed products of latent attention once more, straight from the checkpoint (host/absorb.c): for an instruction of worker `worker`, fills what
 * h says of A (m, k, a, a_row, a_head, a_transposed, a_bf16; heads) when the instruction multiplies by a matrix that is stored head by head, and returns
 * 1; 0: it does not; negative: *err says why not. What h->a points to belongs to `arg` and lives until the next call. */
typedef int (*mk_selftest_heads)(void *arg, const mk_insn *in, uint32_t worker, mk_heads *h, mk_err *err);

typedef struct mk_selftest_config {
    uint64_t seed;
    void (*log)(const char *line); /* a line a kind; may be NULL */
    mk_selftest_heads heads;       /* may be NULL */
    void *arg;
    mk_blas *blas;                 /* with heads */
} mk_selftest_config;

/* Between upload and start. MK_E_DEVICE: something differs by more than the opcode's tolerance (instructions/tolerance.h); the message names opcode, shape,
 * the worst element, what was expected and found. Cache and state are afterwards as they were. */
int mk_selftest(mk_gpu *g, const mk_program *p, const mk_selftest_config *c, mk_selftest_report *report, mk_err *err);

#ifdef __cplusplus
}
#endif

#endif
