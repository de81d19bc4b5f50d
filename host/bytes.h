/* What a step has to read, by models.md section 2: every matrix once in its stored type, the chosen experts once, the recurrent state read and written, the cache
 * read. A property of the model and of the types of its weights; what a program really reads (scales, padding, what two workers both need) is more and is the
 * program's own figure. */
#ifndef MK_BYTES_H
#define MK_BYTES_H

#include "host/model.h"

typedef struct mk_bytes {
    uint64_t weights; /* every step reads these: all matrices but the experts, LM head and an embedding row included */
    uint64_t experts; /* the experts that one token chooses, all layers */
    uint32_t topk, n_experts; /* chosen of how many, in a layer; 0: no experts */
    uint64_t state;   /* recurrent state of a stream, read and written */
    uint64_t kv;      /* of the cache, for each token that the stream holds */
} mk_bytes;

/* After mk_model_resolve, which decides the types. */
void mk_bytes_of(const mk_model *m, mk_bytes *b);
/* Bytes of a step with `rows` tokens of one stream that holds `context` tokens. Several rows choose more experts: their expected number when every row chooses
 * topk of n_experts at random. */
double mk_bytes_step(const mk_bytes *b, uint32_t rows, uint32_t context);

#endif
