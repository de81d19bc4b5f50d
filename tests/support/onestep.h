/* One opcode without a planner: a program of a few vectors, its memory, and calls of mk_<op>_twin on hand-made instructions. Inputs are
 * published as another instruction would publish them; waits are checked before the call; scratch memory holds NaN, so that an opcode
 * which reads what it did not write is seen. Any misuse fails the test. */
#ifndef MK_ONESTEP_H
#define MK_ONESTEP_H

#include "instructions/op.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

typedef struct onestep {
    mk_program prog;
    mk_memory mem;
    mk_step step;
    mk_insn in; /* the instruction under test */
    float *scratch;
    size_t scratch_floats; /* 64 K unless set before one_alloc */
    mk_route_hook route_hook;
    void *route_arg;
} onestep;

onestep *one_new(uint32_t workers, int act_f32);
void one_free(onestep *o);

/* Vectors; the id is returned. A PACKET vector is cut at the nslice + 1 starts given, or evenly. */
uint32_t one_packet(onestep *o, uint32_t dtype, int trailer, const uint32_t *start, uint32_t nslice);
uint32_t one_even(onestep *o, uint32_t dtype, int trailer, uint32_t width, uint32_t nslice);
uint32_t one_bulk(onestep *o, uint64_t bytes, uint32_t signals);
uint32_t one_local(onestep *o, uint64_t bytes);
uint32_t one_param(onestep *o, const float *v, uint32_t n); /* offset in floats */
uint8_t *one_tape(onestep *o, uint64_t bytes);              /* one tape, worker 0's; zeroed */
uint8_t *one_expert(onestep *o, uint64_t bytes);

/* After all vectors and parameters: allocates. Streams have page tables of `context` tokens over a pool of one layer whose pages are dealt
 * in a scrambled order. */
void one_alloc(onestep *o, uint32_t state_slots, uint64_t slot_bytes, uint32_t streams, uint32_t context, uint32_t kv_row_bytes);

/* Starts a step: nothing of it is published yet. */
void one_begin(onestep *o);
mk_row *one_row(onestep *o, uint32_t slot, uint32_t pos); /* appends a row; FIRST when pos is 0 */

/* Publishes row `row` of a PACKET vector (all slices; trailers NULL: 0). */
void one_put(onestep *o, uint32_t vec, uint32_t row, const float *values, const float *trailers);
void one_signal(onestep *o, uint32_t vec); /* completes a BULK publication */
void *one_local_at(onestep *o, uint32_t worker, uint32_t vec);
void *one_bulk_at(onestep *o, uint32_t vec);
void *one_state(onestep *o, uint32_t slot);

/* o->in's waits and signal: publication 0 of the step. */
void one_insn(onestep *o, uint32_t opcode);
void one_wait(onestep *o, uint32_t vec); /* the whole vector */
void one_wait_slices(onestep *o, uint32_t vec, uint32_t slice0, uint32_t nslice);
void one_to(onestep *o, uint32_t vec, uint32_t slice);
void one_run(onestep *o, uint32_t worker); /* waits must be satisfied */
int one_ready(onestep *o, uint32_t vec, uint32_t slice0, uint32_t nslice);

/* Reads back a publication of this step. */
void one_get(onestep *o, uint32_t vec, uint32_t row, uint32_t first, uint32_t n, float *dst);
void one_words(onestep *o, uint32_t vec, uint32_t row, uint32_t slice, uint32_t n, uint32_t *dst);
float one_trailer(onestep *o, uint32_t vec, uint32_t row, uint32_t slice);

/* Deterministic numbers. */
uint64_t one_random(uint64_t *seed);
double one_uniform(uint64_t *seed);           /* [0, 1) */
float one_normal(uint64_t *seed, double dev); /* mean 0 */
void one_fill(uint64_t seed, float *v, size_t n, double dev);

double one_e4m3(uint32_t code); /* what it stands for, NaNs apart */

/* Fails unless |got - want| <= limit * scale for every value. Returns the worst |got - want| / scale. */
double one_close(const char *what, const float *got, const double *want, size_t n, double scale, double limit);
/* Likewise for values that were rounded to bf16 on their way: half a unit of the last place more. */
double one_close_bf16(const char *what, const float *got, const double *want, size_t n, double scale, double limit);
double one_rms(const double *v, size_t n);
void one_same(const char *what, const float *a, const float *b, size_t n); /* bit for bit */

#endif
