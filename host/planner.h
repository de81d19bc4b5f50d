/* The planner: a model and a number of workers -> a program, and the list of what has to be packed into which region. Needs no weights.
 *
 * Every matrix is sliced by rows over the workers as floor or ceil, matrices of one phase (between two exchanges) together, so that
 * the bytes of a phase are even; where GEMVs gather the vector that it makes, in slices that are alike (mk_vec_deal). A phase may leave
 * out the worker who has something else to do (split_but_last).
 * Phases and the vectors between them are in planner_layers.c. */
#ifndef MK_PLANNER_H
#define MK_PLANNER_H

#include "host/bytes.h"
#include "instructions/program.h"

typedef struct mk_plan_config {
    uint32_t workers;     /* 1..1024 */
    int act_f32;          /* vectors in f32: twin only */
    int apart;            /* matrices that mk_model_resolve would have as one (mk_mla_mixer.qt) stay two, as they do with act_f32 */
    uint32_t max_context; /* tokens a stream may hold */
    uint32_t kv_pages;    /* pool, pages */
    uint32_t state_slots; /* pool, slots */
    uint32_t smem_limit;  /* bytes a worker has; 0: twin only */
} mk_plan_config;

/* One thing to pack. Pointers point into the model, which must outlive the plan. */
enum mk_pack_kind { MK_PACK_TAPE = 1, MK_PACK_EXPERT, MK_PACK_PARAM, MK_PACK_VALUES, MK_PACK_EMBED };
typedef struct mk_pack_item {
    uint8_t kind;
    uint8_t wtype;
    uint8_t halves;       /* 2: rows of mat[0], then the same rows of mat[1] */
    const mk_mat *mat[2]; /* TAPE, EXPERT, EMBED */
    const mk_par *par;    /* PARAM: values [src, src + n) of it */
    const float *values;  /* VALUES: n floats (rotation tables) */
    uint32_t worker;      /* TAPE */
    uint32_t row0, rows;  /* of each half */
    uint32_t phase, nseg;
    uint32_t experts;     /* EXPERT: of this many, expert_stride apart */
    uint64_t expert_stride;
    uint64_t dst;         /* TAPE: bytes in the worker's tape. EXPERT: in the expert region (expert 0). PARAM, VALUES: floats */
    uint32_t src, n;
} mk_pack_item;

/* What the slowest worker reads in one phase against the mean. */
typedef struct mk_phase {
    char name[16];
    uint32_t layer;       /* MK_NONE outside */
    uint64_t total, max;  /* bytes, all workers; of the worker with the most */
    const char *reason;   /* why it may exceed 3 %, or NULL */
} mk_phase;

typedef struct mk_plan {
    mk_program *prog;
    mk_pack_item *item;
    size_t n_item;
    mk_phase *phase;
    size_t n_phase;
    mk_bytes bytes; /* what the model needs; the phases say what the program reads */
} mk_plan;

int mk_plan_make(const mk_model *m, const mk_plan_config *cfg, mk_plan **plan, mk_err *err);
void mk_plan_destroy(mk_plan **plan);

static inline double mk_phase_excess(const mk_phase *p, uint32_t workers)
{
    return p->total ? (double)p->max * workers / (double)p->total - 1.0 : 0.0;
}

#endif
