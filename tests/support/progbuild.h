/* Small valid programs made by hand, independent of the planner, and the tools to break them. Shapes are toys; every opcode occurs. */
#ifndef MK_TEST_PROGBUILD_H
#define MK_TEST_PROGBUILD_H

#include "instructions/program.h"

typedef struct pb_config {
    uint32_t workers;
    uint32_t active;    /* workers that get work (0: all); without MoE layers the others' queues are empty */
    const char *layers; /* two letters a layer: D delta or M attention; f dense, e experts, s experts + shared expert. NULL: "DeMsMf" */
    uint32_t smem_limit;
    int act_f32;
} pb_config;

mk_program *pb_make(const pb_config *c);
/* Four workers, "DeMsMf". */
mk_program *pb_small(void);
mk_program *pb_copy(const mk_program *p);

/* Finishes a PACKET vector, type and trailer set, whose nslice + 1 starts stand in the table from start_index on: width, packets a slice, its place. */
void pb_place(mk_program *p, uint32_t vec, uint32_t nslice);

uint32_t pb_vec(const mk_program *p, const char *name);
/* The n-th instruction (from 0) of `op` in a worker's queue; aborts when there is none. */
mk_insn *pb_find(mk_program *p, uint32_t worker, unsigned op, uint32_t n);
/* The instruction that publishes slice `slice` of (name, pub). */
mk_insn *pb_publisher(mk_program *p, const char *name, uint32_t pub, uint32_t slice);
uint32_t pb_worker(const mk_program *p, const mk_insn *in);

/* Edits that keep sequence numbers, queue and tape offsets right. The program's instruction array may move. */
void pb_insert(mk_program *p, uint32_t worker, uint32_t at, const mk_insn *in);
void pb_remove(mk_program *p, uint32_t worker, uint32_t at);
void pb_swap(mk_program *p, uint32_t worker, uint32_t a, uint32_t b);
/* A PACKET vector "dump" that nobody reads, one slice of n values; returns its number. */
uint32_t pb_add_dump(mk_program *p, uint32_t n);

#endif
