/* Small programs that hold the instruction under test, on memory made by hand: random weights and inputs, everything else poisoned with NaN. Run on the
 * twin and on a GPU, then compared (host/compare.h). No planner, no checkpoint. Misuse and lack of memory end the program with a line.
 *
 *   case_new -> vectors, parameters -> case_add ... -> case_seal -> [case_rows -> case_input ... -> run] as often as wanted -> case_free */
#ifndef MK_OPCASE_H
#define MK_OPCASE_H

#include "host/compare.h"

#define CASE_STREAMS 9u /* slots: logical row i of a case is stream i; one more state slot */
#define CASE_INSNS   320u

typedef struct mk_case {
    mk_program prog;
    mk_memory mem;  /* inputs: what both machines start from */
    mk_memory twin, gpu; /* what they made of it; weights are mem's */
    mk_step step;
    uint32_t epoch0;
    uint64_t seed;
    uint32_t row_id[MK_MAX_ROWS]; /* logical rows of the step */
    uint32_t n, worker[CASE_INSNS];
    mk_insn *in[CASE_INSNS]; /* in the order of case_add; after case_seal inside prog.insn */
    uint16_t pub[64];        /* the publication that the case uses of a vector */
    uint32_t pos[CASE_STREAMS];
} mk_case;

mk_case *case_new(uint32_t workers, uint64_t seed);
void case_free(mk_case *c);

/* Vectors; the number is returned. Cut at the nslice + 1 starts given, or evenly. */
uint32_t case_packet(mk_case *c, const char *name, uint32_t dtype, int trailer, const uint32_t *start, uint32_t nslice);
uint32_t case_even(mk_case *c, const char *name, uint32_t dtype, int trailer, uint32_t width, uint32_t nslice);
uint32_t case_bulk(mk_case *c, const char *name, uint64_t bytes, uint32_t signals);
uint32_t case_local(mk_case *c, const char *name, uint64_t bytes);
/* n random floats: mean + dev * normal. Offset in floats. */
uint32_t case_param(mk_case *c, uint32_t n, double mean, double dev);

mk_insn *case_add(mk_case *c, uint32_t worker, uint32_t opcode); /* stays valid until case_seal; then case_seal moves it: c->in */
void case_wait(mk_case *c, mk_insn *in, uint32_t vec);          /* the whole vector */
void case_wait_slices(mk_case *c, mk_insn *in, uint32_t vec, uint32_t slice0, uint32_t nslice);
void case_to(mk_case *c, mk_insn *in, uint32_t vec, uint32_t slice);

typedef struct case_sizes {
    uint64_t state_slot, expert, embed, kv_page;
    uint32_t context; /* tokens a stream may hold; 0: 64 */
} case_sizes;
/* Lays out queues and tapes (tape_bytes of every instruction set) and allocates. Tapes, expert and embedding regions hold NaN until filled. */
void case_seal(mk_case *c, const case_sizes *s);

/* Random weights: a segment as in isa.h with products of about `gain` for inputs of about 1. Bytes beyond the weights stay NaN. */
void case_segment(mk_case *c, uint8_t *dst, uint32_t wtype, uint32_t rows, uint32_t k, uint32_t nsegs, uint32_t scale_k, double gain);
uint8_t *case_tape(mk_case *c, uint32_t i); /* of instruction i */

/* Starts over with these logical rows: memory is poisoned, nothing is published. Row i is at position pos[i]; flags: MK_ROW_*. */
void case_rows(mk_case *c, const uint32_t *ids, uint32_t n, uint32_t flags);
/* Inputs; values depend on (seed, vector, logical row) alone. */
void case_input(mk_case *c, uint32_t vec, double dev);                  /* PACKET: publishes every slice; trailers in 1 .. 40 */
void case_fill(mk_case *c, uint32_t what, uint32_t row, float *to, size_t n, double dev);
void case_signalled(mk_case *c, uint32_t vec);                         /* BULK: the publication is complete */
uint64_t case_random(uint64_t *s);
double case_uniform(uint64_t *s); /* [0, 1) */
float case_normal(uint64_t *s);
uint64_t case_rng(const mk_case *c, uint32_t what, uint32_t row);

/* Both take mem as it is and leave their result in c->twin, c->gpu. */
int case_run_twin(mk_case *c, mk_err *err);
struct mk_gpu;
int case_gpu_open(mk_case *c, struct mk_gpu **g, mk_err *err); /* allocates on the device and uploads the weights */
int case_run_gpu(mk_case *c, struct mk_gpu *g, mk_err *err);
extern uint32_t case_patience; /* what the GPU may take is so many times as long: 1, or more under a sanitizer */
void case_gpu_close(struct mk_gpu **g); /* may be NULL */

#endif
