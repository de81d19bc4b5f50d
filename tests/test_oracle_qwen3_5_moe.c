/* mkd against Hugging Face transformers: qwen3_5_moe, the text part of a ForConditionalGeneration checkpoint with separate projections and
 * stacked experts (tests/oracle). */
#include "tests/support/gqa_edits.h"
#include "tests/support/tmp.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#define DIR "tests/oracle/qwen3_5_moe"

/* The same weights as transformers saves the text model alone: no text_config, no "language_model.", no vision tower. */
static void text_alone(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    char *at = strstr(t->name, "language_model.");
    if (at) memmove(at, at + strlen("language_model."), strlen(at + strlen("language_model.")) + 1);
    t->drop = !strncmp(t->name, "model.visual.", 13) || !strncmp(t->name, "mtp.", 4);
}

static void same_memory(const mk_session *a, const mk_session *b)
{
    const mk_program_info *x = &a->plan->prog->info, *y = &b->plan->prog->info;
    assert_memory_equal(x, y, sizeof *x);
    const mk_memory *m = mk_twin_memory(a->twin), *n = mk_twin_memory(b->twin);
    assert_memory_equal(m->tape, n->tape, x->tape_bytes);
    assert_memory_equal(m->expert, n->expert, x->expert_bytes);
    assert_memory_equal(m->embed, n->embed, x->embed_bytes);
    assert_memory_equal(m->param, n->param, x->param_floats * 4);
}

static void language_model(const char *dir)
{
    mk_err err = {0};
    if (mk_edit_checkpoint(DIR, dir, MK_ST_F8_E4M3, text_alone, NULL, &err)) fail_msg("%s", err.msg);
    json_error_t je;
    char *path = mk_tmp_path(dir, "config.json");
    json_t *root = json_load_file(path, 0, &je), *text = json_deep_copy(json_object_get(root, "text_config"));
    json_object_set_new(text, "architectures", json_pack("[s]", "Qwen3_5MoeForCausalLM"));
    json_object_set(text, "quantization_config", json_object_get(root, "quantization_config"));
    assert_int_equal(json_dump_file(text, path, 0), 0);
    json_decref(root);
    json_decref(text);
    free(path);
}

/* One matrix of one expert as the published FP8 checkpoints have it: a tensor of its own, E4M3 with a scale for 128 x 128 values. */
static void write_expert(mk_stw *w, const mk_checkpoint *ck, const mk_mat *stack, const char *prefix, uint32_t expert, const char *part)
{
    mk_mat mat = *stack;
    mat.wtype = MK_W_FP8;
    uint32_t nkb = (mat.k + 127) / 128, nrb = (mat.n + 127) / 128;
    uint8_t *q = malloc((size_t)mat.n * mat.k);
    float *scale = malloc((size_t)nrb * nkb * sizeof *scale);
    mk_err err = {0};
    assert_true(q && scale);
    for (uint32_t r = 0; r < mat.n; r += 128)
        if (mk_mat_fetch(ck, &mat, expert, r, r + 128 < mat.n ? 128 : mat.n - r, q + (size_t)r * mat.k, scale + (size_t)r / 128 * nkb, &err)) fail_msg("%s", err.msg);
    char name[MK_NAME];
    snprintf(name, sizeof name, "%s.%u.%s.weight", prefix, expert, part);
    mk_stw_raw(w, name, MK_ST_F8_E4M3, 2, (uint64_t[]){mat.n, mat.k}, q);
    strcat(name, "_scale_inv");
    mk_stw_raw(w, name, MK_ST_F32, 2, (uint64_t[]){nrb, nkb}, scale);
    free(q);
    free(scale);
}

static void experts_apart(const char *dir)
{
    mk_err err = {0};
    mk_model *m = NULL;
    mk_checkpoint *ck = NULL;
    mk_stw *w = mk_stw_new();
    size_t n;
    char *from = mk_tmp_read(DIR "/config.json", &n), *to = mk_tmp_path(dir, "config.json");
    mk_tmp_write(to, from, n);
    if (mk_model_read(DIR, &m, &err) || mk_checkpoint_open(DIR, &ck, &err) || mk_model_resolve(m, ck, MK_WEIGHTS_AUTO, &err)) fail_msg("%s", err.msg);
    for (size_t i = 0; i < mk_checkpoint_count(ck); i++) {
        const mk_tensor *t = mk_checkpoint_at(ck, i);
        if (!strstr(t->name, "mlp.experts.")) mk_stw_raw(w, t->name, t->dtype, t->ndim, t->shape, t->data);
    }
    for (uint32_t l = 0; l < m->layers; l++) {
        const mk_moe *e = &m->layer[l].moe;
        char prefix[96];
        snprintf(prefix, sizeof prefix, "model.language_model.layers.%u.mlp.experts", l);
        assert_true(e->gate.source == MK_SRC_STACKED && e->down.source == MK_SRC_STACKED);
        for (uint32_t x = 0; x < e->experts; x++) {
            write_expert(w, ck, &e->gate, prefix, x, "gate_proj");
            write_expert(w, ck, &e->up, prefix, x, "up_proj");
            write_expert(w, ck, &e->down, prefix, x, "down_proj");
        }
    }
    mk_stw_save_dir(w, dir, 2);
    mk_stw_destroy(&w);
    mk_checkpoint_close(&ck);
    mk_model_destroy(&m);
    free(from);
    free(to);
}

static void other_forms(void **state)
{
    (void)state;
    char *dir = mk_tmp_dir();
    language_model(dir);
    mk_session *a = rig_open(&(mk_session_config){.dir = DIR}), *b = rig_open(&(mk_session_config){.dir = dir});
    same_memory(a, b);
    mk_session_close(&a);
    mk_session_close(&b);
    mk_tmp_remove(&dir);
    /* What the FP8 repositories hold loads as what mkd makes of the stacked BF16 tensors itself. */
    dir = mk_tmp_dir();
    experts_apart(dir);
    a = rig_open(&(mk_session_config){.dir = DIR, .weights = MK_WEIGHTS_FP8});
    b = rig_open(&(mk_session_config){.dir = dir});
    assert_true(b->model->layer[0].moe.down.source != MK_SRC_STACKED && b->model->layer[0].moe.down.wtype == MK_W_FP8);
    same_memory(a, b);
    mk_session_close(&a);
    mk_session_close(&b);
    mk_tmp_remove(&dir);
}

int main(void)
{
    return mk_oracle_main("qwen3_5_moe", mk_qwen_controls, mk_qwen_controls_n, other_forms);
}
