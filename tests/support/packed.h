/* Checkpoints packed by the CPU, for whatever packs them in another way. */
#ifndef MK_TEST_PACKED_H
#define MK_TEST_PACKED_H

#include "host/pack.h"

/* How weights are kept. */
typedef struct packed_as {
    enum mk_weights_mode weights;
    enum mk_lm_head_mode head;
} packed_as;

typedef struct packed {
    mk_model *model;
    mk_checkpoint *ck;
    mk_plan *plan;
    mk_memory mem; /* tape, expert, embed, param: by mk_pack */
    mk_err err;
} packed;

/* Fails the test when anything does not work. */
packed *packed_open(const char *dir, packed_as as, uint32_t workers);
void packed_close(packed **p);

/* The weight regions of a program, zeros. */
void packed_memory(const mk_program *p, mk_memory *mem);
void packed_memory_free(mk_memory *mem);

/* Fails at the first byte that differs, naming region and item. */
void packed_same(const char *name, const mk_plan *plan, const mk_memory *want, const mk_memory *got);

/* Every tiny checkpoint, as it is stored and as copies in BF16, F16 and F32, under every way of keeping weights that takes it: some forty calls. */
typedef void (*packed_fn)(const char *name, const char *dir, packed_as as, void *arg);
void packed_each(packed_fn f, void *arg);

#endif
