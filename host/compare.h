/* What instructions leave behind, typed, so that two machines' memories can be compared value by value: mkctl diff, tests/gpu/test_opcodes, the
 * self-test. Tolerances: instructions/tolerance.h. */
#ifndef MK_COMPARE_H
#define MK_COMPARE_H

#include "instructions/op.h"

/* Region i of a machine's memory is bit i of megakernel/gpu.h's MK_REGION_*: exchange, bulk, counters, local, state, KV. */
#define MK_REGIONS 6u
#define MK_REGIONS_ALL ((1u << MK_REGIONS) - 1)
uint8_t *mk_region_at(const mk_memory *m, uint32_t i);
uint64_t mk_region_bytes(const mk_program *p, uint32_t i); /* in all */
const char *mk_region_name(uint32_t i);

enum mk_piece_kind {
    MK_PC_PACKETS,  /* n values of a slice of a PACKET vector, and its trailer when the vector has one */
    MK_PC_STATS,    /* LM_HEAD's four words */
    MK_PC_F32,
    MK_PC_BF16,
    MK_PC_LATENT,   /* n values of an FP8 cache row (instructions/latent.h): codes times scales, then the rotated key */
    MK_PC_PARTIAL,  /* attention partial: n f32, maximum, sum; compared as n quotients and the log-sum-exp */
    MK_PC_ROUTES,   /* a row of mk_routes */
    MK_PC_SAMPLED,  /* a row of mk_sampled */
    MK_PC_SUMS,     /* n sums (isa.h), all of whose addends are there */
    MK_PC_CLEARED,  /* n halves of such words: zero, until the next publication but one is added there */
};

/* One contiguous piece of what an instruction writes for one row. */
typedef struct mk_piece {
    uint32_t kind, region; /* region: index of it (0 exchange .. 5 kv) */
    uint64_t off, bytes;   /* bytes it may write there */
    uint32_t n;            /* values */
    uint32_t slice;        /* PACKETS, STATS */
    uint32_t first;        /* number of its first value in the vector or array that it is a part of */
    const char *what;      /* "published", "state" ... */
} mk_piece;

/* Calls f for every piece that instruction `in` of `worker` writes for row `row` of the step. m: memory after the step (EXPERT_UP's slices depend on the
 * route). */
typedef void (*mk_piece_fn)(void *arg, const mk_piece *p);
void mk_pieces(const mk_program *p, const mk_memory *m, const mk_step *step, const mk_insn *in, uint32_t worker, uint32_t row, mk_piece_fn f, void *arg);

/* Values of a piece as numbers (bf16 widened, latents with their scales; partials divided by their sum, then the log-sum-exp; STATS: maximum, sum of exponentials, id; ROUTES: expert ids by
 * rank, then weights; SAMPLED: token, logprob) and, for bit comparisons, as words. v and bits: room for mk_piece_values. */
uint32_t mk_piece_values(const mk_program *p, const mk_piece *pc, const mk_insn *in);
void mk_piece_read(const mk_program *p, const mk_piece *pc, const mk_memory *m, const mk_insn *in, uint32_t row, double *v, uint32_t *bits);

/* The first value over its tolerance. */
typedef struct mk_divergence {
    int found;
    uint32_t worker, row, slice, element;
    mk_insn in;
    const char *what;
    double want, got, rms, error, tolerance;
    char text[400]; /* the whole of it in a line */
} mk_divergence;

typedef struct mk_comparison {
    /* asked for */
    double floor; /* no tolerance is below this one: for runs whose inputs have drifted apart */
    int last;     /* packets that `want` has overwritten since are passed over */
    /* found */
    double worst[MK_OP_COUNT];     /* error / (rms + |want|) */
    double tolerance[MK_OP_COUNT]; /* the greatest that was applied */
    uint64_t values[MK_OP_COUNT];
    uint64_t failed;
    mk_divergence first;
} mk_comparison;

/* Compares what the instructions of p's queues (all of them, or of `list`: n indices of instructions, in the order in which the first divergence is to be
 * looked for) wrote in `got` against `want`; then, with `before` not NULL, that every other byte of the regions (mask of MK_REGION_*) of `got` is as before, and
 * the counters those of `want`. Adds to *c, which starts zeroed. MK_E_CAPACITY when out of memory. */
int mk_compare(const mk_program *p, const uint32_t *list, uint32_t n, const mk_step *step, uint32_t epoch0, const mk_memory *before, const mk_memory *want,
               const mk_memory *got, uint32_t regions, mk_comparison *c, mk_err *err);

/* The kernel keeps DELTA_STEP's states [dv][dk], the twin [dk][dv]: turns those of all slots of `m` from the twin's order into the kernel's (to_kernel 1) or
 * back. */
void mk_state_turn(const mk_program *p, mk_memory *m, int to_kernel);

/* Runs p's queues on `m` with the twin's opcodes: round robin, until all are through. MK_E_BUG names who waits for what. Scratch holds NaN before every
 * instruction. */
int mk_play_twin(const mk_program *p, mk_memory *m, const mk_step *step, uint32_t epoch0, mk_err *err);

#endif
