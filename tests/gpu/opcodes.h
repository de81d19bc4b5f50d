/* The cases of test_opcodes. */
#ifndef MK_TEST_OPCODES_H
#define MK_TEST_OPCODES_H

#include "tests/support/opcase.h"

typedef struct case_spec {
    const char *op, *name;
    /* make: vectors, instructions, weights, up to case_seal; feed: inputs for the rows of c->step */
    void (*make)(mk_case *c, const void *arg);
    void (*feed)(mk_case *c, const void *arg);
    const void *arg;
    uint32_t workers; /* 0: 3 */
} case_spec;

/* The spec after s; NULL: the first; NULL after the last. */
const case_spec *case_next(const case_spec *s);
/* The spec of that name; NULL: there is none. */
const case_spec *case_named(const char *op, const char *name);

/* A negative control: the twin runs the case's opcode with instructions made wrong, or the GPU's result is spoiled. */
typedef struct case_wrong {
    const char *name;
    const char *op, *of; /* the case */
    void (*make_wrong)(mk_insn *in); /* NULL: spoil */
    void (*spoil)(mk_case *c);
} case_wrong;
extern const case_wrong case_wrongs[];
extern const uint32_t n_case_wrongs;

typedef struct case_result {
    mk_comparison cmp;
    uint64_t bits;   /* words of rows that differ between 8, 3 and 1 rows */
    uint32_t shared; /* pieces compared so */
    double ms;
    char text[512];  /* what is wrong */
    int skip, bad;   /* skip: the opcode runs on the twin only */
} case_result;
/* dry: the twin against itself, no GPU. w: NULL, or a negative control: then *r says what was found, in one pass. */
void case_run(const case_spec *s, uint64_t seed, int dry, const case_wrong *w, case_result *r);
uint32_t case_opcode(const case_spec *s);

/* Specs by file; each ends with op NULL. */
extern const case_spec matrix_cases[], expert_cases[], state_cases[], attention_cases[], sample_cases[];

#endif
