/* mkd against Hugging Face transformers: deepseek_v3 with q_lora, YaRN and groups (tests/oracle, tests/support/oracle.h). */
#include <stdlib.h>
#include <string.h>

#include "tests/support/mla_edits.h"
#include "tests/support/tmp.h"

/* The drafting layer's tensors are skipped because config.json announces it, and refused otherwise. */
static void drafting_layer(void **state)
{
    (void)state;
    mk_session *s = rig_open(&(mk_session_config){.dir = "tests/oracle/deepseek_v3"});
    assert_int_equal(s->model->n_skipped, 1);
    assert_int_equal(s->model->skipped_tensors[0], 4); /* enorm, hnorm, eh_proj, shared_head.norm */
    assert_string_equal(s->model->skipped[0], "model.layers.2.");
    mk_session_close(&s);
    char *dir = mk_tmp_dir();
    mk_err err = {0};
    assert_int_equal(mk_edit_checkpoint("tests/oracle/deepseek_v3", dir, MK_ST_F8_E4M3, NULL, NULL, &err), MK_OK);
    mk_edit_json(dir, "config.json", "num_nextn_predict_layers", "0");
    assert_int_equal(mk_session_open(&(mk_session_config){.dir = dir}, &s, &err), MK_E_MODEL);
    assert_non_null(strstr(err.msg, "tensor model.layers.2."));
    assert_non_null(strstr(err.msg, "not part of DeepseekV3ForCausalLM"));
    mk_tmp_remove(&dir);
}

/* rope_parameters and rope_scaling say the same. */
static void other_spelling(void **state)
{
    drafting_layer(state);
    mk_oracle_other_rope("tests/oracle/deepseek_v3",
                         "{\"rope_type\":\"yarn\",\"rope_theta\":10000.0,\"factor\":40.0,\"beta_fast\":32.0,\"beta_slow\":1.0,\"mscale\":1.0,"
                         "\"mscale_all_dim\":0.8,\"original_max_position_embeddings\":256}");
}

int main(void)
{
    static const mk_oracle_control controls[] = {
        {.name = "nothing wrong", .right = 1, .as = MK_ST_BF16},
        {.name = "rope on halves", .edit = mk_rope_on_halves, .as = MK_ST_BF16},
        {.name = "rotated part dropped", .edit = mk_drop_rope, .as = MK_ST_BF16},
        {.name = "group limit ignored", .field = {{"topk_group", "4"}}, .as = MK_ST_BF16},
        {.name = "YaRN: no m^2 on the softmax scale",
         .field = {{"rope_scaling.mscale_all_dim", NULL}, {"rope_scaling.attention_factor", "1.0569656448"}}, .as = MK_ST_BF16},
        {.name = "YaRN: attention factor missing", .field = {{"rope_scaling.attention_factor", "1.0"}}, .as = MK_ST_BF16},
        {.name = "YaRN: frequencies of another length", .field = {{"rope_scaling.original_max_position_embeddings", "4096"}}, .as = MK_ST_BF16},
        {.name = "q_a norm with eps 1e-3", .edit = mk_q_norm_eps, .as = MK_ST_BF16},
        {.name = "kv_a norm with eps 1e-3", .edit = mk_kv_norm_eps, .as = MK_ST_BF16},
        {.name = "layer norms with eps 1e-6", .field = {{"rms_norm_eps", "1e-6"}}, .as = MK_ST_BF16},
        {.name = "router bias dropped", .edit = mk_drop_router_bias, .as = MK_ST_BF16},
        {.name = "shared experts dropped", .edit = mk_drop_shared_experts, .as = MK_ST_BF16},
        {.name = "no renormalisation", .field = {{"norm_topk_prob", "false"}}, .as = MK_ST_BF16},
    };
    return mk_oracle_main("deepseek_v3", controls, sizeof controls / sizeof *controls, other_spelling);
}
