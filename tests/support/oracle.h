/* mkd against a golden of Hugging Face transformers (tests/oracle/README.md): the gates of design.md section 11, row invariance, the same
 * weights in other dtypes, negative controls. A family's test is a list of controls and a call of mk_oracle_main. */
#ifndef MK_TEST_ORACLE_H
#define MK_TEST_ORACLE_H

#include "host/checkpoint.h"
#include "tests/support/edit.h"
#include "tests/support/rig.h"

typedef struct mk_oracle {
    const char *dir;
    mk_checkpoint *file;
    uint32_t prompt_n, greedy_n, vocab, moe_layers, topk; /* moe_layers 0: a dense model */
    const int32_t *prompt, *greedy, *router, *greedy_router;
    const float *logits, *margin, *greedy_margin, *greedy_router_margin;
} mk_oracle;

/* A kernel that makes a mistake computes what the right one computes from a checkpoint edited like this. */
typedef struct mk_oracle_control {
    const char *name;
    int right;                  /* 1: nothing is wrong, every gate must hold; 0: both must fail */
    const char *field[4][2];    /* fields of config.json and their JSON values (NULL: removed) */
    mk_edit_fn edit;            /* NULL: no edit */
    enum mk_st_dtype as;        /* how the copy is stored: MK_ST_BF16, or MK_ST_F8_E4M3 to keep what is there */
} mk_oracle_control;

/* What a run is compared by. */
typedef struct mk_oracle_result {
    const mk_oracle *g;
    float *logits; /* [prompt][vocab] as seen, or NULL */
    uint32_t positions, router_wrong;
    uint32_t moe_index[1024]; /* of a layer */
    double max_err, rms, max_kl, mean_kl; /* max_err over rms is the strict gate */
} mk_oracle_result;

/* Teacher-forced over the whole prompt, `chunk` tokens appended at a time; every position has logits. keep: [prompt][vocab] or NULL. */
mk_oracle_result mk_oracle_forced(const mk_oracle *g, const mk_session_config *c, uint32_t chunk, float *keep);

/* Runs all tests on tests/oracle/<family>, then `extra` (may be NULL), and returns cmocka's status. */
int mk_oracle_main(const char *family, const mk_oracle_control *control, size_t n_control, void (*extra)(void **state));

/* For edits. */
int mk_edit_has(const mk_edit_tensor *t, const char *part);
void mk_edit_fill(mk_edit_tensor *t, uint64_t first, uint64_t n, float v);
void mk_edit_scale(mk_edit_tensor *t, uint64_t first, uint64_t n, float factor);
uint64_t mk_edit_size(const mk_edit_tensor *t);
/* Mistakes that several families can make. */
void mk_drop_router_bias(void *arg, mk_edit_tensor *t);
void mk_drop_shared_experts(void *arg, mk_edit_tensor *t);

#endif
