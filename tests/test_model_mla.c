/* config.json of the DeepSeek-V3 family and of GLM-4.7-Flash: what is published is understood, what is not supported is refused by name. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "host/model.h"
#include "tests/support/edit.h"
#include "tests/support/tmp.h"

#define CONFIGS "tests/fixtures/configs/"

static mk_model *read_ok(const char *path)
{
    mk_model *m;
    mk_err e = {0};
    if (mk_model_read(path, &m, &e)) fail_msg("%s", e.msg);
    return m;
}

static void deepseek_v3(void **s)
{
    (void)s;
    mk_model *m = read_ok(CONFIGS "deepseek-v3");
    assert_string_equal(m->arch, "DeepseekV3ForCausalLM");
    assert_true(m->hidden == 7168 && m->layers == 61 && m->vocab == 129280 && m->max_context == 163840 && !m->tied && m->fp8_source);
    assert_true(m->bos == 0 && m->n_stop == 1 && m->stop[0] == 1 && m->final_norm.eps == 1e-6f && m->n_skipped == 1);
    assert_string_equal(m->skipped[0], "model.layers.61.");
    for (uint32_t l = 0; l < m->layers; l++) assert_true(m->layer[l].mixer == MK_MIX_MLA && m->layer[l].ffn == (l < 3 ? MK_FFN_DENSE : MK_FFN_MOE));
    assert_int_equal(m->layer[2].dense.inter, 18432);
    const mk_mla_mixer *a = &m->layer[60].mla;
    assert_true(a->heads == 128 && a->nope == 128 && a->rope == 64 && a->v == 128 && a->latent == 512 && a->rotary == 1);
    assert_true(a->q_a.n == 1536 && a->q.n == 128 * 192 && a->q.k == 1536 && a->q_a_norm.eps == 1e-6f && a->kv_norm.eps == 1e-6f);
    double msq = 0.1 * log(40) + 1;
    assert_true(fabs((double)a->scale - msq * msq / sqrt(192)) < 1e-8 && a->rope_scale == 1.0f); /* mscale = mscale_all_dim */
    /* 32 turns over 4096 positions happen in dimension 10.5 of 64, one in 22.5: before 10 plain, from 23 on 40 times slower */
    for (int i = 0; i < 32; i++) {
        double plain = pow(10000, -i / 32.0), f = i <= 10 ? 1 : i >= 23 ? 1 / 40.0 : 1 - (i - 10) / 13.0 * (1 - 1 / 40.0);
        assert_true(fabs((double)a->inv_freq[i] / (plain * f) - 1) < 1e-6);
    }
    const mk_moe *e = &m->layer[3].moe;
    assert_true(e->experts == 256 && e->topk == 8 && e->groups == 8 && e->topk_groups == 4 && e->inter == 2048 && e->renorm && e->scale == 2.5f);
    assert_true(e->score == MK_SCORE_SIGMOID && e->shared.inter == 2048 && e->router.keep_bf16);
    assert_string_equal(e->gate.tensor, "model.layers.3.mlp.experts.%u.gate_proj.weight");
    assert_string_equal(e->bias.tensor, "model.layers.3.mlp.gate.e_score_correction_bias");
    assert_string_equal(e->shared.down.tensor, "model.layers.3.mlp.shared_experts.down_proj.weight");
    mk_err err = {0};
    assert_int_equal(mk_model_resolve(m, NULL, MK_WEIGHTS_AUTO, &err), MK_OK);
    assert_true(a->uk.wtype == MK_W_FP8 && a->uk.scale_k == 128 && !a->uv.tensor_rows); /* 256 rows a head */
    assert_int_equal(mk_model_resolve(m, NULL, MK_WEIGHTS_BF16, &err), MK_OK);
    assert_int_equal(a->qt.source, MK_SRC_NONE); /* three times the bytes of the two */
    mk_model_destroy(&m);
    m = read_ok(CONFIGS "kimi-k2-instruct");
    assert_true(m->layer[1].moe.experts == 384 && m->layer[1].moe.groups == 1 && m->layer[0].mla.heads == 64 && m->n_skipped == 0);
    mk_model_destroy(&m);
}

static void moonlight(void **s)
{
    (void)s;
    mk_model *m = read_ok(CONFIGS "moonlight-16b-a3b");
    const mk_mla_mixer *a = &m->layer[26].mla;
    const mk_moe *e = &m->layer[26].moe;
    assert_true(m->hidden == 2048 && m->layers == 27 && m->vocab == 163840 && m->final_norm.eps == 1e-5f && !m->fp8_source && m->n_skipped == 0);
    assert_true(a->q_a.source == MK_SRC_NONE && a->q.k == 2048 && a->kv_norm.eps == 1e-6f && fabs((double)a->scale - 1 / sqrt(192)) < 1e-8);
    assert_true(fabs((double)a->inv_freq[1] / pow(50000, -1 / 32.0) - 1) < 1e-6);
    assert_true(e->experts == 64 && e->topk == 6 && e->inter == 1408 && e->shared.inter == 2816 && e->groups == 1);
    mk_model_destroy(&m);
}

static void glm(void **s)
{
    (void)s;
    mk_model *m = read_ok(CONFIGS "glm-4.7-flash");
    const mk_mla_mixer *a = &m->layer[46].mla;
    const mk_moe *e = &m->layer[46].moe;
    assert_string_equal(m->arch, "Glm4MoeLiteForCausalLM");
    assert_true(m->hidden == 2048 && m->layers == 47 && m->vocab == 154880 && m->n_stop == 3 && m->stop[2] == 154829 && m->pad == 154820);
    assert_true(a->heads == 20 && a->nope == 192 && a->v == 256 && a->q_a.n == 768 && a->q.n == 20 * 256 && a->scale == 0.0625f);
    assert_true(a->uk.head_stride == 448 && a->uv.head_off == 192 && a->q_a_norm.eps == 1e-6f && m->layer[46].in_norm.eps == 1e-5f);
    assert_true(e->experts == 64 && e->topk == 4 && e->inter == 1536 && fabsf(e->scale - 1.8f) < 1e-6f && m->layer[0].ffn == MK_FFN_DENSE);
    assert_string_equal(m->skipped[0], "model.layers.47.");
    mk_err err = {0};
    for (int mode = MK_WEIGHTS_AUTO; mode <= MK_WEIGHTS_BF16; mode++) { /* W_UK by q_b_proj is one matrix, in whatever type the two have */
        assert_int_equal(mk_model_resolve(m, NULL, (enum mk_weights_mode)mode, &err), MK_OK);
        assert_true(a->qt.source == MK_SRC_FOLDED && a->qt.by == &a->uk && a->qt.n == 20 * 512 && a->qt.k == 768 && a->qt.wtype == (mode == MK_WEIGHTS_FP8 ? MK_W_FP8 : MK_W_BF16));
        assert_true(a->q_pe.source == MK_SRC_HEAD_ROWS && a->q_pe.n == 20 * 64 && a->q_pe.head_off == 192 && a->q_pe.head_stride == 256 && a->q_pe.wtype == a->qt.wtype);
    }
    m->fp8_source = 1;
    assert_int_equal(mk_model_resolve(m, NULL, MK_WEIGHTS_BF16, &err), MK_OK);
    assert_int_equal(a->qt.source, MK_SRC_FOLDED);
    assert_int_equal(mk_model_resolve(m, NULL, MK_WEIGHTS_AUTO, &err), MK_OK);
    assert_true(a->qt.source == MK_SRC_NONE && a->q_pe.source == MK_SRC_NONE); /* quantised already */
    assert_true(a->uk.scale_k == 64 && a->uv.tensor_rows && mk_mat_scale_row(&a->uv, 256) == 448 + 192);
    mk_model_destroy(&m);
}

static void refusals(const char *config, const char *const (*bad)[3], size_t n)
{
    char *dir = mk_tmp_dir(), *from = mk_tmp_path(config, "config.json"), *to = mk_tmp_path(dir, "config.json");
    size_t size;
    char *text = mk_tmp_read(from, &size);
    for (size_t i = 0; i < n; i++) {
        mk_err e = {0};
        mk_model *m = NULL;
        mk_tmp_write(to, text, size);
        mk_edit_json(dir, "config.json", bad[i][0], bad[i][1]);
        int rc = mk_model_read(dir, &m, &e);
        if (rc != MK_E_MODEL || !strstr(e.msg, bad[i][2])) fail_msg("%s = %s: expected \"%s\", got %d \"%s\"", bad[i][0], bad[i][1], bad[i][2], rc, e.msg);
        assert_null(m);
    }
    free(text), free(from), free(to);
    mk_tmp_remove(&dir);
}

static void refused_by_name(void **s)
{
    (void)s;
    static const char *const deepseek[][3] = {
        {"model_type", "\"deepseek_v2\"", "model_type is \"deepseek_v2\", supported: \"deepseek_v3\"|\"kimi_k2\""},
        {"scoring_func", "\"softmax\"", "scoring_func is \"softmax\", supported: \"sigmoid\""},
        {"topk_method", "\"group_limited_greedy\"", "topk_method is \"group_limited_greedy\", supported: \"noaux_tc\""},
        {"attention_bias", "true", "attention_bias is true, supported: false"},
        {"rope_interleave", "false", "rope_interleave is false, supported: true"},
        {"sliding_window", "4096", "\"sliding_window\": unknown field"},
        {"index_topk", "2048", "\"index_topk\": unknown field"},
        {"moe_layer_freq", "2", "moe_layer_freq is 2, supported: 1"},
        {"hidden_act", "\"gelu\"", "hidden_act is \"gelu\""},
        {"n_group", NULL, "n_group is missing"},
        {"topk_group", "null", "topk_group is missing"},
        {"n_shared_experts", NULL, "n_shared_experts is missing"},
        {"norm_topk_prob", NULL, "norm_topk_prob is missing"},
        {"n_group", "7", "n_group 7 with topk_group 4 does not fit 256 experts"},
        {"topk_group", "9", "n_group 8 with topk_group 9 does not fit 256 experts"},
        {"n_group", "256", "n_group is 256: a group's score is the sum of its two best, expected at least 2 experts a group"},
        {"n_routed_experts", "2048", "n_routed_experts is 2048, expected an integer in 1..1024"},
        {"num_experts_per_tok", "17", "num_experts_per_tok is 17"},
        {"first_k_dense_replace", NULL, "first_k_dense_replace is missing"},
        {"first_k_dense_replace", "62", "first_k_dense_replace is 62"},
        {"num_key_value_heads", "64", "num_key_value_heads is 64, expected num_attention_heads (128)"},
        {"head_dim", "128", "head_dim is 128, expected qk_rope_head_dim = 64"},
        {"qk_head_dim", "128", "qk_head_dim is 128, expected qk_nope_head_dim + qk_rope_head_dim = 192"},
        {"partial_rotary_factor", "0.5", "partial_rotary_factor is 0.5, supported: 1.0"},
        {"rope_theta", NULL, "rope_theta is missing"},
        {"rope_theta", "\"10000\"", "rope_theta is \"10000\", expected a number"},
        {"rope_scaling.type", "\"longrope\"", "rope_scaling.type is \"longrope\", supported: \"default\"|\"yarn\""},
        {"rope_scaling.type", "\"linear\"", "rope_scaling.type is \"linear\""},
        {"rope_scaling.rope_type", "\"default\"", "rope_scaling.rope_type and type disagree"},
        {"rope_scaling.rope_theta", "50000", "rope_scaling.rope_theta is 50000, outside it is 10000"},
        {"rope_scaling.factor", NULL, "rope_scaling.factor is missing"},
        {"rope_scaling.original_max_position_embeddings", NULL, "rope_scaling.original_max_position_embeddings is missing"},
        {"rope_scaling.short_factor", "[1]", "rope_scaling.\"short_factor\": unknown field"},
        {"rope_scaling", "{\"factor\": 40}", "rope_scaling.\"factor\": unknown field"},
        {"rope_parameters", "{\"rope_theta\": 10000}", "rope_parameters and rope_scaling: expected one of them"},
        {"quantization_config.weight_block_size", "[1, 128]", "weight_block_size is [1, 128], supported: [128, 128]"},
    };
    static const char *const flash[][3] = {
        {"model_type", "\"deepseek_v3\"", "model_type is \"deepseek_v3\", supported: \"glm4_moe_lite\""},
        {"topk_method", "\"greedy\"", "topk_method is \"greedy\""},
        {"rope_parameters", "{\"rope_type\":\"dynamic\",\"factor\":2.0,\"rope_theta\":1000000}", "rope_parameters.rope_type is \"dynamic\""},
        {"rope_parameters", "{\"rope_type\":\"default\",\"rope_theta\":1e4}", "rope_parameters.rope_theta is 10000, outside it is 1e+06"},
        {"mlp_layer_types", "[\"dense\"]", "mlp_layer_types is [\"dense\"], expected a list of 47 strings"},
        {"num_nextn_predict_layers", "9", "num_nextn_predict_layers is 9"},
    };
    refusals(CONFIGS "deepseek-v3", deepseek, sizeof deepseek / sizeof *deepseek);
    refusals(CONFIGS "glm-4.7-flash", flash, sizeof flash / sizeof *flash);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(deepseek_v3), cmocka_unit_test(moonlight), cmocka_unit_test(glm), cmocka_unit_test(refused_by_name)};
    return cmocka_run_group_tests_name("model: MLA families", tests, NULL, NULL);
}
