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

/* A negative control: the twin runs the case's opcode with instructions made wrong; NULL: the GPU's result gets a stray write. */
typedef struct case_wrong {
    const char *name;
    const case_spec *of;
    void (*make_wrong)(mk_insn *in);
} case_wrong;
extern const case_wrong case_wrongs[];
extern const uint32_t n_case_wrongs;

/* Specs by file; each ends with op NULL. */
extern const case_spec matrix_cases[], expert_cases[], state_cases[], attention_cases[], sample_cases[];

#endif
