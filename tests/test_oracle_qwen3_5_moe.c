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

static void other_forms(void **state)
{
    (void)state;
    mk_err err = {0};
    char *dir = mk_tmp_dir();
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
    mk_session *a = rig_open(&(mk_session_config){.dir = DIR}), *b = rig_open(&(mk_session_config){.dir = dir});
    const mk_program_info *x = &a->plan->prog->info, *y = &b->plan->prog->info;
    assert_memory_equal(x, y, sizeof *x);
    const mk_memory *m = mk_twin_memory(a->twin), *n = mk_twin_memory(b->twin);
    assert_memory_equal(m->tape, n->tape, x->tape_bytes);
    assert_memory_equal(m->expert, n->expert, x->expert_bytes);
    assert_memory_equal(m->embed, n->embed, x->embed_bytes);
    assert_memory_equal(m->param, n->param, x->param_floats * 4);
    mk_session_close(&a);
    mk_session_close(&b);
    mk_tmp_remove(&dir);
}

int main(void)
{
    return mk_oracle_main("qwen3_5_moe", mk_qwen_controls, mk_qwen_controls_n, other_forms);
}
