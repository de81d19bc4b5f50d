/* mkd against Hugging Face transformers: llama (tests/oracle). */
#include "tests/support/gqa_edits.h"
#include "tests/support/tmp.h"

#include <stdlib.h>

enum { DIM = 64 };

static void interleave(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    if (mk_edit_has(t, ".q_proj.weight") || mk_edit_has(t, ".k_proj.weight")) mk_edit_interleave(t, DIM, DIM);
}
static void swap_kv(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    if (mk_edit_has(t, ".k_proj.weight") || mk_edit_has(t, ".v_proj.weight")) mk_edit_roll(t, DIM);
}
static void drop_residual_norm(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    if (mk_edit_has(t, "post_attention_layernorm")) mk_edit_fill(t, 0, mk_edit_size(t), 1);
}

/* The other spelling of the rope fields, and an untied head with the same values, are the same model. */
static void other_spelling(void **state)
{
    (void)state;
    mk_err err = {0};
    mk_model *a = NULL, *b = NULL;
    char *dir = mk_tmp_dir();
    if (mk_edit_checkpoint("tests/oracle/llama", dir, MK_ST_F8_E4M3, NULL, NULL, &err)) fail_msg("%s", err.msg);
    mk_edit_json(dir, "config.json", "rope_theta", NULL);
    mk_edit_json(dir, "config.json", "rope_scaling", NULL);
    mk_edit_json(dir, "config.json", "rope_parameters",
                 "{\"rope_type\":\"llama3\",\"rope_theta\":500000,\"factor\":32,\"high_freq_factor\":4,\"low_freq_factor\":1,"
                 "\"original_max_position_embeddings\":64}");
    if (mk_model_read("tests/oracle/llama", &a, &err) || mk_model_read(dir, &b, &err)) fail_msg("%s", err.msg);
    for (uint32_t l = 0; l < a->layers; l++)
        assert_memory_equal(a->layer[l].gqa.inv_freq, b->layer[l].gqa.inv_freq, DIM / 2 * sizeof(float));
    mk_model_destroy(&a);
    mk_model_destroy(&b);
    mk_tmp_remove(&dir);
}

int main(void)
{
    static const mk_oracle_control controls[] = {
        {.name = "nothing wrong", .right = 1, .as = MK_ST_BF16},
        {.name = "llama3 scaling missing", .field = {{"rope_scaling", NULL}}, .as = MK_ST_BF16},
        {.name = "another scaling factor", .field = {{"rope_scaling.factor", "8"}}, .as = MK_ST_BF16},
        {.name = "rope interleaved", .edit = interleave, .as = MK_ST_BF16},
        {.name = "KV heads swapped", .edit = swap_kv, .as = MK_ST_BF16},
        {.name = "norm weights dropped", .edit = drop_residual_norm, .as = MK_ST_BF16},
        {.name = "norms with eps 1e-5", .field = {{"rms_norm_eps", "1e-5"}}, .as = MK_ST_BF16},
    };
    return mk_oracle_main("llama", controls, sizeof controls / sizeof *controls, other_spelling);
}
