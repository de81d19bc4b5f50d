/* What the twin of an opcode sees, and the few helpers it is written with. Each opcode's twin is one function
 *     void mk_<name>_twin(mk_ctx *c);
 * called when all waits of the instruction are satisfied; it reads its inputs, computes rows 0..nrows-1 and publishes.
 * Row invariance is a duty of every opcode: what it computes for a row may depend on that row alone (and, in a stream's own
 * state, on the rows before it), and the order of every sum on (tile, k) only. */
#ifndef MK_OP_H
#define MK_OP_H

#include "instructions/program.h"
#include "megakernel/rings.h"

/* Memory of one machine. Owned by the machine (megakernel/twin.c); the host fills tape, expert, embed and param before start. */
typedef struct mk_memory {
    uint8_t *tape;      /* tape_bytes */
    uint8_t *expert;    /* expert_bytes */
    uint8_t *embed;     /* embed_bytes */
    float *param;       /* param_floats */
    uint8_t *exchange;  /* exchange_bytes */
    uint8_t *bulk;      /* bulk_bytes */
    uint32_t *counter;  /* n_counter */
    uint8_t *local;     /* workers * local_bytes */
    uint8_t *state;     /* state_slots * state_slot_bytes */
    uint8_t *kv;        /* kv_layers * kv_pages * kv_page_bytes */
    /* the host's arena */
    mk_slot *slot;
    uint32_t *page;
    uint32_t *token;
    uint32_t n_slots, max_pages, max_context;
} mk_memory;

/* Test hook: may replace the experts chosen for a row (ids ascending, n = topk); weights are then computed from the same scores. */
typedef void (*mk_route_hook)(void *arg, uint32_t layer, uint32_t slot, uint32_t pos, uint32_t topk, uint16_t *ids);

typedef struct mk_ctx {
    const mk_program *prog;
    const mk_insn *in;
    mk_memory *mem;
    const mk_step *step;
    uint32_t worker;
    uint32_t epoch0;
    float *scratch;          /* of the machine, one for all workers: staged vectors and outputs of one instruction */
    mk_route_hook route_hook;
    void *route_arg;
    uint64_t bytes;          /* of experts' weights, cache and state that the instruction has read: the trace */
    void *machine;           /* SCHEDULE: struct mk_sched of the machine */
} mk_ctx;

static inline int mk_act_f32(const mk_ctx *c)
{
    return (c->prog->info.flags & MK_PROG_ACT_F32) != 0;
}

/* Round to nearest even bf16 and back; identity for values already representable. NaN stays NaN. */
static inline float mk_bf16_to_f32(uint16_t b)
{
    union {
        uint32_t u;
        float f;
    } x = {(uint32_t)b << 16};
    return x.f;
}
static inline uint16_t mk_f32_to_bf16(float v)
{
    union {
        float f;
        uint32_t u;
    } x = {v};
    if ((x.u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((x.u >> 16) | 0x40u);
    return (uint16_t)((x.u + 0x7fffu + ((x.u >> 16) & 1u)) >> 16);
}
static inline float mk_round_bf16(float v)
{
    return mk_bf16_to_f32(mk_f32_to_bf16(v));
}

/* Reads values [first, first + n) of row `row` of the publication that wait `w` names, from PACKET slices (which must lie within the
 * slices the wait covers). */
void mk_read(const mk_ctx *c, int w, uint32_t row, uint32_t first, uint32_t n, float *dst);
/* Trailer of slice `slice`. */
float mk_read_trailer(const mk_ctx *c, int w, uint32_t row, uint32_t slice);
/* Raw 32-bit words of an f32 slice (stats). */
void mk_read_words(const mk_ctx *c, int w, uint32_t row, uint32_t slice, uint32_t n, uint32_t *dst);

/* Publishes slice `slice` of the signal's vector for one row: all its values (rounded to the vector's dtype), then the trailer when
 * the vector has one. */
void mk_publish(const mk_ctx *c, uint32_t row, uint32_t slice, const float *values, float trailer);

/* The memory behind a LOCAL or BULK vector. */
void *mk_local(const mk_ctx *c, uint32_t vec);
void *mk_bulk(const mk_ctx *c, uint32_t vec);
/* One increment of a BULK vector's counter; every instruction that signals one does it exactly once a step, whatever the rows. */
void mk_signal_bulk(const mk_ctx *c, uint32_t vec);

/* ROUTE's logits of a row; h: room for its k values. */
void mk_route_logits(const mk_ctx *c, uint32_t row, float *logits, float *h);

/* Latent cache row of token `pos` of stream slot `slot` in the pool at kv_off; row_bytes each. */
uint8_t *mk_kv_row(const mk_ctx *c, uint64_t kv_off, uint32_t slot, uint32_t pos, uint32_t row_bytes);

#define X(number, NAME, name, text) void mk_##name##_twin(mk_ctx *c);
MK_OPCODES(X)
#undef X

#endif
