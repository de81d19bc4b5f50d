/* Between planner.c (building blocks) and planner_layers.c (what a layer is made of). */
#ifndef MK_PLANNER_INTERNAL_H
#define MK_PLANNER_INTERNAL_H

#include "host/planner.h"
#include "instructions/latent.h"

#include <string.h>

typedef struct mk_queue {
    mk_insn *insn;
    uint32_t n, cap;
    uint64_t tape; /* bytes so far */
} mk_queue;

typedef struct mk_builder {
    const mk_model *m;
    const mk_plan_config *cfg;
    mk_plan *plan;
    mk_queue *queue;      /* [workers] */
    mk_vec *vec;
    uint32_t n_vec, cap_vec;
    uint32_t *start;
    uint32_t n_start, cap_start;
    uint32_t n_counter;
    uint64_t exchange, bulk, local, state, expert, param, tape_ignored;
    uint64_t *load;       /* [workers] bytes of the current phase */
    const char *why;      /* the last split's reason for not being even, or NULL */
    mk_err *err;
    int failed;
} mk_builder;

/* Memory ran out; an error before it stands. */
void mk_fail_memory(mk_builder *b);

/* Part of a matrix (or of a gate/up pair) that a phase computes: rows [row0, row0 + rows) with input [in_off, in_off + k). */
typedef struct mk_part {
    const mk_mat *mat, *up; /* up: the second half of a SILU pair, or NULL */
    uint32_t row0, rows, in_off;
    float scale; /* of the output; 0: 1 */
    /* GEMV, LM_HEAD or EXPERT_UP gathers the vector of these rows, read_k values of read_dtype each, the next reader's first read_every values on (0: all the same);
     * read_k 0: none does. Slices are alike then, if that costs little (mk_split). */
    uint32_t read_k, read_every;
    uint8_t read_dtype;
} mk_part;

/* How a group of parts becomes GEMV instructions. */
typedef struct mk_gemv_spec {
    uint32_t in_vec, in_pub;
    uint8_t prologue, epilogue, flags;
    uint16_t norm_group;
    uint32_t param_off;
    float eps;
    uint32_t res_vec, res_pub; /* ADD, GATED: residual (sliced like the output) */
    uint32_t gate_vec, gate_pub; /* GATED: its first value is the gate */
    uint32_t out_vec, out_pub; /* LOCAL: every worker's rows are the slices of `like` */
} mk_gemv_spec;

/* cut[g * (workers + 1) + w]: first row of worker w in group g (rows of the group's parts, concatenated). Whole workers for each part, or all rows evenly,
 * whichever leaves the busiest worker less to do: an instruction of its own for a few rows costs more than they do.
 * A vector that a GEMV gathers (a group of one part with read_k) gets slices that can be dealt (mk_vec_deal), the last workers perhaps none, unless the busiest worker
 * has much more to do then. */
void mk_split(mk_builder *b, const mk_part *const *parts, const uint32_t *n_parts, uint32_t groups, uint32_t *cut);

/* Calls f for every non-empty piece of every worker, in worker order; a piece is of one part and at most MK_SEGMENT_ROWS matrix rows.
 * Returns the number of pieces. */
typedef void (*mk_piece_fn)(mk_builder *b, uint32_t w, const mk_part *part, uint32_t first, uint32_t rows, uint32_t slice, void *arg);
uint32_t mk_each_piece(mk_builder *b, const mk_part *parts, uint32_t n_parts, const uint32_t *cut, mk_piece_fn f, void *arg);

/* A PACKET vector whose slices are the pieces of a split. */
uint32_t mk_vec_split(mk_builder *b, const char *name, uint32_t dtype, const mk_part *parts, uint32_t n_parts, const uint32_t *cut);
/* A PACKET vector of given slice starts. */
uint32_t mk_vec_packet(mk_builder *b, const char *name, uint32_t dtype, uint32_t trailer, uint32_t flags, const uint32_t *starts,
                       uint32_t nslice);
uint32_t mk_vec_local(mk_builder *b, const char *name, uint32_t bytes);
uint32_t mk_vec_bulk(mk_builder *b, const char *name, uint64_t bytes, uint32_t signals);
/* The next publication of a vector. */
uint32_t mk_pub(mk_builder *b, uint32_t vec);

/* Emits one GEMV per piece; mk_emit_gemv_piece is the piece function behind it (arg: mk_gemv_arg). */
typedef struct mk_gemv_arg {
    const mk_gemv_spec *spec;
    uint32_t layer;
} mk_gemv_arg;
void mk_emit_gemv_piece(mk_builder *b, uint32_t w, const mk_part *part, uint32_t first, uint32_t rows, uint32_t slice, void *arg);
void mk_emit_gemv(mk_builder *b, uint32_t layer, const mk_part *parts, uint32_t n_parts, const uint32_t *cut, const mk_gemv_spec *s);
mk_insn *mk_emit(mk_builder *b, uint32_t worker, uint32_t op, uint32_t layer);
/* Rows [row0, row0 + rows) of a matrix as one more segment of the tape of DELTA_STEP `in`, the newest instruction of worker w. */
void mk_emit_low_rank(mk_builder *b, uint32_t w, mk_insn *in, uint32_t which, const mk_mat *mat, uint32_t row0, uint32_t rows);
void mk_wait_all(mk_builder *b, mk_insn *in, uint32_t vec, uint32_t pub);
void mk_wait_values(mk_builder *b, mk_insn *in, uint32_t vec, uint32_t pub, uint32_t first, uint32_t n);
void mk_wait_slice(mk_builder *b, mk_insn *in, uint32_t vec, uint32_t pub, uint32_t slice);
void mk_signal(mk_insn *in, uint32_t vec, uint32_t pub, uint32_t slice);

/* Parameters: offset in floats; the same parameter is packed once. */
uint32_t mk_param(mk_builder *b, const mk_par *par, uint32_t src, uint32_t n);
void mk_param_align(mk_builder *b, uint32_t floats); /* the next parameters begin at a multiple of so many */
uint32_t mk_param_values(mk_builder *b, const float *values, uint32_t n);
void mk_pack_push(mk_builder *b, const mk_pack_item *it);

/* Phases: bytes are added to b->load by the emitters between begin and end. */
void mk_phase_begin(mk_builder *b);
void mk_phase_end(mk_builder *b, const char *name, uint32_t layer, const char *reason);

/* Smallest power of two `s` that divides `width` into pieces of >= 16 with items * s >= 0.9 workers (1 if items already suffice). */
uint32_t mk_item_slices(uint32_t items, uint32_t width, uint32_t workers);
/* COMBINE's slices of a head's channels: no worker has two items, if there are so many. */
uint32_t mk_combine_slices(uint32_t heads, uint32_t width, uint32_t workers);

/* ---- layers ---------------------------------------------------------------------------------------------------------- */

/* Vectors by role; created by the first layer that needs them, shared by all layers of that shape. */
typedef struct mk_roles {
    uint32_t h, h_pub; /* the residual stream and its newest publication */
    uint32_t *h_cut;   /* [workers + 1] */
    uint32_t part_id, lat, v, qt, q, qa, kv, kvc;
    uint32_t low, qkv, fz, o;
    uint32_t gqa_qkv, gqa_part, gqa_cache, gqa_o;
    uint32_t ffn, router, route, shared, shared_gate, acc, u;
    uint32_t *cut[3];   /* scratch: [0] three groups, [2] one */
    int have_mla, have_delta, have_gqa, have_dense, have_moe, have_shared;
    /* the shapes behind them */
    const mk_mla_mixer *mla;
    const mk_delta_mixer *delta;
    const mk_gqa_mixer *gqa;
    const mk_ffn_dense *dense;
    const mk_moe *moe;
    uint32_t T; /* slices of an expert */
} mk_roles;

static inline uint32_t mk_act(const mk_builder *b)
{
    return b->cfg->act_f32 ? MK_F32 : MK_BF16;
}
static inline uint32_t mk_act_bytes(const mk_builder *b)
{
    return b->cfg->act_f32 ? 4 : 2;
}
static inline uint32_t mk_norm_param(mk_builder *b, const mk_norm *n)
{
    mk_param_align(b, 4); /* the kernel loads four at a time */
    return mk_param(b, &n->gamma, 0, n->gamma.n);
}
static inline mk_part mk_whole(const mk_mat *m)
{
    return (mk_part){.mat = m, .rows = m->n};
}
/* The same, of which GEMVs read k values each, every so many values (0: all the same). */
static inline mk_part mk_read(const mk_builder *b, mk_part p, uint32_t k, uint32_t every)
{
    p.read_dtype = (uint8_t)mk_act(b);
    p.read_k = k;
    p.read_every = every;
    return p;
}
/* Rows of the busiest of so many workers if they share a part in slices that can be dealt: the fewest, ceil(rows / workers) or more; 0: there are no such slices. */
uint32_t mk_even_rows(const mk_part *p, uint32_t workers);
/* Whether the busiest worker may have `even` bytes to do instead of `best` for the sake of slices that can be dealt. */
int mk_even_pays(double even, double best);
double mk_row_cost(const mk_part *p); /* bytes of a row (pair), scales included on average */
extern const char mk_why_even[];      /* the reason of such a split */
extern const char mk_why_h[];         /* of phases whose rows are those of h */
/* One shape of each kind a model: what differs would need vectors of its own. Returns `same`. */
int mk_same_shape(mk_builder *b, const char *what, uint32_t layer, int same);

void mk_plan_delta(mk_builder *b, mk_roles *R, uint32_t layer);
void mk_plan_gqa(mk_builder *b, mk_roles *R, uint32_t layer, uint32_t kv_index);
void mk_plan_layers(mk_builder *b);

#endif
