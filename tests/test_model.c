/* config.json and generation_config.json: what is supported is understood, everything else is refused by name; and the model against
 * the tensors of a checkpoint. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "host/checkpoint.h"
#include "host/planner.h"
#include "tests/support/edit.h"
#include "tests/support/tmp.h"

#define PUBLISHED "tests/fixtures/configs/kimi-linear-48b-a3b"
#define TINY      "tests/oracle/kimi_linear"

static mk_model *read_ok(const char *path)
{
    mk_model *m;
    mk_err e = {0};
    if (mk_model_read(path, &m, &e)) fail_msg("%s", e.msg);
    return m;
}

/* ---- config.json ---------------------------------------------------------------------------------------------------- */

static void count_mat(void *arg, mk_mat *mat)
{
    size_t *n = arg;
    (void)mat;
    ++*n;
}

static void published(void **s)
{
    (void)s;
    mk_model *m = read_ok(PUBLISHED "/config.json");
    assert_string_equal(m->arch, "KimiLinearForCausalLM");
    assert_true(m->hidden == 2304 && m->layers == 27 && m->vocab == 163840 && m->max_context == 1048576 && !m->tied);
    assert_true(m->bos == 163584 && m->pad == 163839 && m->n_stop == 1 && m->stop[0] == 163586);
    assert_true(m->temperature == 0 && m->top_p == 1 && m->top_k == 0 && m->min_p == 0 && !m->fp8_source && m->n_skipped == 0);
    assert_string_equal(m->lm_head.tensor, "lm_head.weight");
    assert_true(m->lm_head.keep_bf16 && m->embed.keep_bf16 && m->final_norm.eps == 1e-5f && m->embed_scale == 1);
    unsigned mla = 0;
    for (uint32_t l = 0; l < 27; l++) {
        const mk_layer *y = &m->layer[l];
        int full = l % 4 == 3 || l == 26;
        assert_int_equal(y->mixer, full ? MK_MIX_MLA : MK_MIX_DELTA);
        assert_int_equal(y->ffn, l ? MK_FFN_MOE : MK_FFN_DENSE);
        assert_true(y->in_norm.eps == 1e-5f && y->post_norm.eps == 1e-5f);
        mla += full;
    }
    assert_int_equal(mla, 7);
    const mk_delta_mixer *d = &m->layer[0].delta;
    assert_true(d->heads == 32 && d->k_heads == 32 && d->dk == 128 && d->dv == 128 && d->taps == 4 && d->decay == MK_DECAY_CHANNEL);
    assert_true(d->o_eps == 1e-5f && d->conv_q.n == 4096 * 4 && d->a_log.n == 32 && d->dt_bias.n == 4096 && d->o_norm.n == 128);
    assert_true(d->b.n == 32 && d->b.keep_bf16 && !d->f_a.keep_bf16 && d->f_a.n == 128 && d->f_b.n == 4096 && d->f_b.k == 128);
    assert_true(m->layer[0].dense.inter == 9216);
    const mk_mla_mixer *a = &m->layer[3].mla;
    assert_true(a->heads == 32 && a->nope == 128 && a->rope == 64 && a->v == 128 && a->latent == 512 && a->rotary == 0 && !a->inv_freq);
    assert_true(a->kv_norm.eps == 1e-6f); /* not rms_norm_eps: see LATENT_EPS */
    assert_true(fabs((double)a->scale - 1 / sqrt(192)) < 1e-8);
    assert_true(a->q.n == 32 * 192 && a->q.k == 2304 && a->q_a.source == MK_SRC_NONE && a->kv_a.n == 576);
    assert_true(a->uk.source == MK_SRC_HEAD_T && a->uk.n == 32 * 512 && a->uk.k == 128 && a->uk.head_stride == 256 && a->uk.head_off == 0);
    assert_true(a->uv.source == MK_SRC_HEAD_ROWS && a->uv.n == 32 * 128 && a->uv.k == 512 && a->uv.head_off == 128);
    const mk_moe *e = &m->layer[3].moe;
    assert_true(e->experts == 256 && e->topk == 8 && e->groups == 1 && e->topk_groups == 1 && e->inter == 1024 && e->renorm);
    assert_true(e->score == MK_SCORE_SIGMOID && fabsf(e->scale - 2.446f) < 1e-6f && e->shared.inter == 1024 && e->router.keep_bf16);
    assert_string_equal(e->gate.tensor, "model.layers.3.block_sparse_moe.experts.%u.w1.weight");
    assert_string_equal(e->up.tensor, "model.layers.3.block_sparse_moe.experts.%u.w3.weight");
    assert_string_equal(e->down.tensor, "model.layers.3.block_sparse_moe.experts.%u.w2.weight");
    assert_string_equal(e->bias.tensor, "model.layers.3.block_sparse_moe.gate.e_score_correction_bias");
    size_t n = 0;
    mk_model_mats(m, count_mat, &n);
    assert_int_equal(n, 2 + 20 * 9 + 7 * 5 + 3 + 26 * 7);
    mk_err err = {0};
    assert_int_equal(mk_model_resolve(m, NULL, MK_WEIGHTS_AUTO, &err), MK_OK);
    assert_true(m->layer[3].mla.uk.wtype == MK_W_BF16 && d->q.wtype == MK_W_BF16);
    assert_int_equal(mk_model_resolve(m, NULL, MK_WEIGHTS_FP8, &err), MK_OK);
    assert_true(m->layer[3].mla.uk.wtype == MK_W_FP8 && e->gate.wtype == MK_W_FP8 && d->q.wtype == MK_W_FP8);
    assert_true(m->embed.wtype == MK_W_BF16 && m->lm_head.wtype == MK_W_BF16 && d->b.wtype == MK_W_BF16 && e->router.wtype == MK_W_BF16);
    mk_model_destroy(&m);
    assert_null(m);
    mk_model_destroy(&m);
}

static char *dir;
static void restore(void)
{
    size_t n;
    char *text = mk_tmp_read(PUBLISHED "/config.json", &n), *path = mk_tmp_path(dir, "config.json");
    mk_tmp_write(path, text, n);
    free(text);
    free(path);
}
static int setup(void **s)
{
    (void)s;
    dir = mk_tmp_dir();
    restore();
    return 0;
}
static int teardown(void **s)
{
    (void)s;
    mk_tmp_remove(&dir);
    return 0;
}
static void set(const char *field, const char *value)
{
    mk_edit_json(dir, "config.json", field, value);
}

/* What transformers 5.17 writes: other spellings, lists instead of rules, and fields of its base class. */
static void transformers_spelling(void **s)
{
    (void)s;
    static const char *const renamed[][3] = {
        {"model_max_length", "max_position_embeddings", "1048576"}, {"moe_renormalize", "norm_topk_prob", "true"},
        {"num_expert_group", "n_group", "1"},                       {"num_experts", "num_local_experts", "256"},
        {"num_experts_per_token", "num_experts_per_tok", "8"},      {"num_shared_experts", "n_shared_experts", "1"},
        {"dtype", "torch_dtype", "\"bfloat16\""},
    };
    for (size_t i = 0; i < sizeof renamed / sizeof *renamed; i++) {
        set(renamed[i][0], NULL);
        set(renamed[i][1], renamed[i][2]);
    }
    char types[1024] = "[", ffns[1024] = "[";
    for (int l = 0; l < 27; l++) {
        strcat(types, l % 4 == 3 || l == 26 ? "\"full_attention\"" : "\"linear_attention\"");
        strcat(ffns, l ? "\"sparse\"" : "\"dense\"");
        strcat(types, l < 26 ? "," : "]");
        strcat(ffns, l < 26 ? "," : "]");
    }
    static const char *const fields[][2] = {
        {"linear_attn_config", NULL},   {"first_k_dense_replace", NULL},   {"moe_layer_freq", NULL}, {"mla_use_nope", NULL},
        {"use_grouped_topk", NULL},     {"moe_router_activation_func", NULL}, {"rope_theta", NULL},  {"rope_scaling", NULL},
        {"num_nextn_predict_layers", NULL}, {"linear_head_dim", "128"},    {"linear_num_heads", "32"}, {"linear_conv_kernel_dim", "4"},
        {"head_dim", "64"},             {"qk_head_dim", "192"},            {"pretraining_tp", "1"},  {"attention_bias", "false"},
        {"attention_dropout", "0.0"},   {"_name_or_path", "\"\""},         {"output_attentions", "false"}, {"return_dict", "true"},
        {"chunk_size_feed_forward", "0"}, {"problem_type", "null"},        {"is_encoder_decoder", "false"}, {"id2label", "{\"0\":\"LABEL_0\"}"},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) set(fields[i][0], fields[i][1]);
    set("layer_types", types);
    set("mlp_layer_types", ffns);
    mk_model *a = read_ok(PUBLISHED), *b = read_ok(dir);
    assert_true(a->max_context == b->max_context && a->layers == b->layers);
    for (uint32_t l = 0; l < a->layers; l++) assert_memory_equal(&a->layer[l], &b->layer[l], sizeof a->layer[l]);
    mk_model_destroy(&b);
    /* Both ways of saying it are fine as long as they agree. */
    restore();
    set("layer_types", types);
    set("mlp_layer_types", ffns);
    set("num_local_experts", "256");
    set("linear_num_heads", "32");
    b = read_ok(dir);
    for (uint32_t l = 0; l < a->layers; l++) assert_memory_equal(&a->layer[l], &b->layer[l], sizeof a->layer[l]);
    mk_model_destroy(&a);
    mk_model_destroy(&b);
}

static void expect_refusal(const char *what)
{
    mk_err e = {0};
    mk_model *m = (void *)1;
    int rc = mk_model_read(dir, &m, &e);
    if (rc == MK_OK || !strstr(e.msg, what)) fail_msg("expected \"%s\", got %d \"%s\"", what, rc, e.msg);
    assert_int_equal(rc, MK_E_MODEL);
    assert_null(m);
    assert_null(strchr(e.msg, '\n'));
    assert_non_null(strstr(e.msg, dir));
    assert_int_equal(mk_model_read(dir, &m, NULL), rc);
}

static void refused_by_name(void **s)
{
    (void)s;
    static const char *const bad[][3] = {
        {"architectures", "[\"MistralForCausalLM\"]", "architectures is [\"MistralForCausalLM\"], supported: KimiLinearForCausalLM"},
        {"architectures", NULL, "architectures is missing, supported: Kimi"},
        {"architectures", "[]", "architectures is [], supported"},
        {"architectures", "\"KimiLinearForCausalLM\"", "architectures is \"Kimi"},
        {"model_type", "\"llama\"", "model_type is \"llama\", supported: \"kimi_linear\""},
        {"wonder", "3", "config.json: \"wonder\": unknown field (value 3)"},
        {"won\\nder", "[1,2]", "unknown field (value [1,2])"},
        {"sliding_window", "4096", "\"sliding_window\": unknown field"},
        {"linear_attn_config.gate_lower_bound", "-5.0", "linear_attn_config.\"gate_lower_bound\": unknown field (value -5.0)"},
        {"hidden_size", NULL, "hidden_size is missing"},
        {"hidden_size", "null", "hidden_size is missing"},
        {"hidden_size", "-2304", "hidden_size is -2304, expected an integer in 16..65536"},
        {"hidden_size", "0", "hidden_size is 0, expected an integer"},
        {"hidden_size", "2304.0", "hidden_size is 2304.0, expected an integer"},
        {"hidden_size", "\"2304\"", "hidden_size is \"2304\", expected an integer"},
        {"hidden_size", "99999999999", "hidden_size is 99999999999"},
        {"hidden_size", "2305", "hidden_size is 2305, expected a multiple of 16"},
        {"num_hidden_layers", "100000", "num_hidden_layers is 100000"},
        {"num_hidden_layers", "28", "layer 28 (from 1) is in neither"},
        {"num_hidden_layers", "26", "is 27, expected an integer in 1..26"},
        {"vocab_size", "0", "vocab_size is 0"},
        {"vocab_size", "163584", "bos_token_id is 163584"},
        {"intermediate_size", "9217", "intermediate_size is 9217, expected a multiple of 16"},
        {"rms_norm_eps", "0", "rms_norm_eps is 0, expected a number"},
        {"rms_norm_eps", "\"1e-5\"", "rms_norm_eps is \"1e-5\", expected a number"},
        {"hidden_act", "\"gelu\"", "hidden_act is \"gelu\", supported: \"silu\""},
        {"tie_word_embeddings", "1", "tie_word_embeddings is 1, expected true or false"},
        {"dtype", "\"int8\"", "dtype is \"int8\""},
        {"mla_use_nope", "false", "mla_use_nope is false, supported: true"},
        {"attention_bias", "true", "attention_bias is true, supported: false"},
        {"rope_scaling", "{\"type\":\"yarn\",\"factor\":4}", "rope_scaling is {\"factor\":4,\"type\":\"yarn\"}, supported: null"},
        {"num_key_value_heads", "8", "num_key_value_heads is 8, expected num_attention_heads (32)"},
        {"num_attention_heads", "5000", "num_attention_heads is 5000"},
        {"kv_lora_rank", "500", "kv_lora_rank is 500, expected a multiple of 16"},
        {"qk_nope_head_dim", "null", "qk_nope_head_dim is missing"},
        {"qk_head_dim", "128", "qk_head_dim is 128, expected qk_nope_head_dim + qk_rope_head_dim = 192"},
        {"v_head_dim", "1024", "v_head_dim is 1024"},
        {"num_experts", "2048", "num_experts is 2048, expected an integer in 1..1024"},
        {"num_experts", "4", "num_experts_per_token is 8, expected at most 4"},
        {"num_local_experts", "128", "num_local_experts"},
        {"num_experts_per_token", "17", "num_experts_per_token is 17, expected an integer in 1..16"},
        {"num_expert_group", "3", "num_expert_group 3 with topk_group 1 does not fit 256 experts"},
        {"num_expert_group", "256", "expected at least 2 experts a group"},
        {"num_expert_group", "64", "num_experts_per_token is 8, expected at most 4"},
        {"topk_group", "2", "num_expert_group 1 with topk_group 2 does not fit"},
        {"moe_router_activation_func", "\"softmax\"", "moe_router_activation_func is \"softmax\", supported: \"sigmoid\""},
        {"moe_layer_freq", "2", "moe_layer_freq is 2, supported: 1"},
        {"moe_intermediate_size", "1000", "moe_intermediate_size is 1000, expected a multiple of 16"},
        {"first_k_dense_replace", NULL, "first_k_dense_replace is missing"},
        {"routed_scaling_factor", "null", "routed_scaling_factor is missing"},
        {"num_nextn_predict_layers", "9", "num_nextn_predict_layers is 9"},
        {"linear_attn_config", NULL, "linear_attn_config is missing"},
        {"linear_attn_config", "[]", "linear_attn_config is [], expected an object"},
        {"linear_attn_config.head_dim", "512", "linear_attn_config.head_dim is 512, expected an integer in 16..128"},
        {"linear_attn_config.head_dim", "72", "linear_head_dim is 72, expected a multiple of 16"},
        {"linear_attn_config.short_conv_kernel_size", "1", "linear_attn_config.short_conv_kernel_size is 1, expected an integer in 2..8"},
        {"linear_attn_config.kda_layers", "[0]", "linear_attn_config.kda_layers is 0"},
        {"linear_attn_config.kda_layers", "[1,1]", "linear_attn_config.kda_layers names layer 1 (from 1) a second time"},
        {"linear_attn_config.full_attn_layers", "[1]", "linear_attn_config.full_attn_layers names layer 1 (from 1) a second time"},
        {"linear_attn_config.full_attn_layers", "[\"a\"]", "linear_attn_config.full_attn_layers is \"a\""},
        {"linear_num_heads", "16", "disagrees with linear_num_heads 16"},
        {"layer_types", "[\"full_attention\"]", "layer_types is [\"full_attention\"], expected a list of 27 strings"},
        {"eos_token_id", "[1,163840]", "eos_token_id is 163840"},
        {"eos_token_id", "[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]", "eos_token_id is "},
        {"eos_token_id", "\"</s>\"", "eos_token_id is \"</s>\""},
        {"quantization_config", "{\"quant_method\":\"awq\",\"bits\":4}", "quantization_config.quant_method is \"awq\", supported: \"fp8\""},
        {"quantization_config", "{\"quant_method\":\"fp8\"}", "quantization_config.weight_block_size is not [128, 128]"},
        {"quantization_config", "{\"quant_method\":\"fp8\",\"weight_block_size\":[64,128]}", "weight_block_size is [64, 128], supported: [128, 128]"},
        {"quantization_config", "{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128],\"activation_scheme\":\"static\"}",
         "quantization_config.activation_scheme is \"static\""},
        {"quantization_config", "{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128],\"fmt\":\"e5m2\"}", "quantization_config.fmt is \"e5m2\""},
        {"quantization_config", "{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128],\"weight_per_tensor\":true}", "quantization_config.weight_per_tensor is true"},
        {"quantization_config", "{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128],\"act_per_tensor\":true}", "quantization_config.act_per_tensor is true"},
        {"quantization_config", "{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128],\"x\":1}", "quantization_config.\"x\": unknown field"},
        {"quantization_config", "{}", "quantization_config.quant_method is missing"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        set(bad[i][0], bad[i][1]);
        expect_refusal(bad[i][2]);
        restore();
    }
    char *path = mk_tmp_path(dir, "config.json");
    mk_tmp_write(path, "{\"a\": 1, \"a\": 2}", 16);
    expect_refusal("not valid JSON at line 1");
    mk_tmp_write(path, "[1]", 3);
    expect_refusal("expected a JSON object");
    mk_tmp_write(path, "", 0);
    expect_refusal("not valid JSON");
    unlink(path);
    expect_refusal("config.json: cannot open: No such file");
    free(path);
}

static void supported_variants(void **s)
{
    (void)s;
    set("q_lora_rank", "768");
    set("tie_word_embeddings", "true");
    set("num_nextn_predict_layers", "2");
    set("num_expert_group", "8");
    set("topk_group", "4");
    set("num_shared_experts", "2");
    set("rms_norm_eps", "0.001");
    set("eos_token_id", "[5, 6, 7]");
    set("pad_token_id", "null");
    set("hidden_act", "\"swish\"");
    set("quantization_config", "{\"quant_method\":\"fp8\",\"fmt\":\"e4m3\",\"activation_scheme\":\"dynamic\",\"weight_block_size\":[128,128],"
                               "\"modules_to_not_convert\":[\"lm_head\"],\"scale_fmt\":\"ue8m0\"}");
    mk_model *m = read_ok(dir);
    const mk_mla_mixer *a = &m->layer[3].mla;
    assert_true(a->q_a.source == MK_SRC_PLAIN && a->q_a.n == 768 && a->q.k == 768 && a->q_a_norm.eps == 1e-6f && a->q_a_norm.gamma.n == 768);
    assert_string_equal(a->q.tensor, "model.layers.3.self_attn.q_b_proj.weight");
    assert_true(a->kv_norm.eps == 1e-6f && m->layer[3].in_norm.eps == 0.001f && m->layer[0].delta.o_eps == 0.001f);
    assert_true(m->tied && !strcmp(m->lm_head.tensor, m->embed.tensor));
    assert_true(m->n_skipped == 2);
    assert_string_equal(m->skipped[1], "model.layers.28.");
    assert_true(m->layer[1].moe.groups == 8 && m->layer[1].moe.topk_groups == 4 && m->layer[1].moe.shared.inter == 2048);
    assert_true(m->n_stop == 3 && m->stop[2] == 7 && m->pad == UINT32_MAX && m->fp8_source);
    mk_err e = {0};
    assert_int_equal(mk_model_resolve(m, NULL, MK_WEIGHTS_AUTO, &e), MK_OK);
    assert_true(a->uk.wtype == MK_W_FP8 && a->uk.scale_k == 128 && m->embed.wtype == MK_W_BF16 && m->layer[0].delta.b.wtype == MK_W_BF16);
    assert_int_equal(mk_model_resolve(m, NULL, MK_WEIGHTS_BF16, &e), MK_OK);
    assert_true(a->uk.wtype == MK_W_BF16);
    mk_model_destroy(&m);
    set("v_head_dim", "192"); /* heads of 320 rows start inside a block: scales of 64 columns for uk, blocks of the tensor for uv */
    m = read_ok(dir);
    a = &m->layer[3].mla;
    assert_int_equal(mk_model_resolve(m, NULL, MK_WEIGHTS_AUTO, &e), MK_OK);
    assert_true(a->uk.scale_k == 64 && !a->uk.tensor_rows && a->uv.scale_k == 128 && a->uv.tensor_rows);
    assert_true(mk_mat_scale_row(&a->uk, 200) == 200 && mk_mat_scale_row(&a->uv, 3) == 131 && mk_mat_scale_row(&a->uv, 200) == 320 + 128 + 8);
    mk_model_destroy(&m);
    set("qk_nope_head_dim", "144"); /* no multiple of 64 */
    m = read_ok(dir);
    assert_int_equal(mk_model_resolve(m, NULL, MK_WEIGHTS_AUTO, &e), MK_E_MODEL);
    assert_non_null(strstr(e.msg, "tensor model.layers.3.self_attn.kv_b_proj.weight: its 128x128 FP8 blocks straddle the heads"));
    assert_int_equal(mk_model_resolve(m, NULL, MK_WEIGHTS_BF16, &e), MK_OK);
    mk_model_destroy(&m);
}

static void generation(void **s)
{
    (void)s;
    char *path = mk_tmp_path(dir, "generation_config.json");
    static const struct {
        const char *text, *what; /* what: the refusal, NULL when fine */
        float temperature, top_p, min_p;
        uint32_t top_k, n_stop, stop0;
    } cases[] = {
        {"{}", NULL, 0, 1, 0, 0, 1, 163586},
        {"{\"eos_token_id\":[7,8],\"do_sample\":true,\"temperature\":0.5,\"top_p\":0.75,\"top_k\":20,\"min_p\":0.125}", NULL, 0.5f, 0.75f, 0.125f, 20, 2, 7},
        {"{\"eos_token_id\":9,\"do_sample\":false,\"temperature\":0.5,\"top_k\":20}", NULL, 0, 1, 0, 0, 1, 9},
        {"{\"temperature\":0.5}", NULL, 0, 1, 0, 0, 1, 163586},
        {"{\"do_sample\":true}", NULL, 1, 1, 0, 0, 1, 163586},
        {"{\"do_sample\":null,\"num_beams\":1,\"repetition_penalty\":1.0,\"max_length\":100,\"_from_model_config\":true,\"suppress_tokens\":[],"
         "\"transformers_version\":\"5.17.0\",\"min_p\":null}", NULL, 0, 1, 0, 0, 1, 163586},
        {"{\"repetition_penalty\":1.1}", "generation_config.json: repetition_penalty is 1.1", 0, 0, 0, 0, 0, 0},
        {"{\"num_beams\":4}", "num_beams is 4, supported: 1", 0, 0, 0, 0, 0, 0},
        {"{\"suppress_tokens\":[1]}", "suppress_tokens is [1]", 0, 0, 0, 0, 0, 0},
        {"{\"stop_strings\":[\"x\"]}", "stop_strings is [\"x\"]", 0, 0, 0, 0, 0, 0},
        {"{\"frequency\":1}", "\"frequency\": unknown field", 0, 0, 0, 0, 0, 0},
        {"{\"temperature\":-1}", "temperature is -1, expected a number in 0..100", 0, 0, 0, 0, 0, 0},
        {"{\"top_p\":1.5}", "top_p is 1.5", 0, 0, 0, 0, 0, 0},
        {"{\"top_p\":0.0}", "top_p is 0, expected more than 0", 0, 0, 0, 0, 0, 0},
        {"{\"top_p\":1e-60}", "top_p is 1e-60, expected more than 0", 0, 0, 0, 0, 0, 0},
        {"{\"top_k\":-1}", "top_k is -1", 0, 0, 0, 0, 0, 0},
        {"{\"eos_token_id\":[163840]}", "eos_token_id is 163840", 0, 0, 0, 0, 0, 0},
        {"{\"do_sample\":1}", "do_sample is 1, expected true or false", 0, 0, 0, 0, 0, 0},
        {"{", "generation_config.json: not valid JSON", 0, 0, 0, 0, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mk_tmp_write(path, cases[i].text, strlen(cases[i].text));
        if (cases[i].what) {
            expect_refusal(cases[i].what);
            continue;
        }
        mk_model *m = read_ok(dir);
        assert_true(m->temperature == cases[i].temperature && m->top_p == cases[i].top_p && m->min_p == cases[i].min_p);
        assert_true(m->top_k == cases[i].top_k && m->n_stop == cases[i].n_stop && m->stop[0] == cases[i].stop0);
        mk_model_destroy(&m);
    }
    free(path);
}

/* ---- the model against a checkpoint --------------------------------------------------------------------------------- */

static mk_err err;

static int resolve(const char *path, enum mk_weights_mode mode, mk_model **m, mk_checkpoint **ck)
{
    memset(&err, 0, sizeof err);
    *m = NULL;
    *ck = NULL;
    int rc = mk_model_read(path, m, &err);
    if (!rc) rc = mk_checkpoint_open(path, ck, &err);
    return rc ? rc : mk_model_resolve(*m, *ck, mode, &err);
}

typedef struct fetcher {
    const mk_model *m;
    const mk_checkpoint *ck;
    int rc;
} fetcher;
static void fetch_all(void *arg, mk_mat *mat)
{
    fetcher *f = arg;
    uint8_t *dst = malloc((size_t)mat->n * mat->k * 2);
    float *scales = malloc(((size_t)mat->n / 128 + 1) * (mat->k / mat->scale_k + 1u) * 4);
    uint32_t experts = strstr(mat->tensor, "%u") ? 8 : 1;
    for (uint32_t e = 0; !f->rc && e < experts; e++) f->rc = mk_mat_fetch(f->ck, mat, e, 0, mat->n, dst, scales, &err);
    free(dst);
    free(scales);
}

/* Resolves and reads every matrix. */
static int load(const char *path, enum mk_weights_mode mode)
{
    mk_model *m;
    mk_checkpoint *ck;
    int rc = resolve(path, mode, &m, &ck);
    if (!rc) {
        fetcher f = {m, ck, MK_OK};
        mk_model_mats(m, fetch_all, &f);
        rc = f.rc;
    }
    mk_checkpoint_close(&ck);
    mk_model_destroy(&m);
    return rc;
}

static void every_variant(void **s)
{
    (void)s;
    if (load(TINY, MK_WEIGHTS_AUTO) || load(TINY, MK_WEIGHTS_FP8) || load(TINY, MK_WEIGHTS_BF16)) fail_msg("%s", err.msg);
    /* FP8 with power-of-two scales is exact in every dtype: the same bits come out, whatever the source. */
    static const enum mk_st_dtype as[] = {MK_ST_BF16, MK_ST_F32, MK_ST_F16};
    for (int i = 0; i < 3; i++) {
        char *d = mk_tmp_dir();
        assert_int_equal(mk_edit_checkpoint(TINY, d, as[i], NULL, NULL, &err), MK_OK);
        for (int mode = 0; mode < 3; mode++)
            if (load(d, (enum mk_weights_mode)mode)) fail_msg("dtype %d, mode %d: %s", i, mode, err.msg);
        mk_model *m, *m8;
        mk_checkpoint *ck, *ck8;
        assert_int_equal(resolve(d, MK_WEIGHTS_AUTO, &m, &ck), MK_OK);
        assert_int_equal(resolve(TINY, MK_WEIGHTS_BF16, &m8, &ck8), MK_OK);
        const mk_mat *q = &m->layer[0].delta.q;
        assert_true(q->wtype == MK_W_BF16 && q->exact == (as[i] != MK_ST_BF16));
        uint16_t *a = malloc((size_t)q->n * q->k * 2), *b = malloc((size_t)q->n * q->k * 2);
        if (mk_mat_fetch(ck, q, 0, 0, q->n, a, NULL, &err)) fail_msg("%s", err.msg);
        if (mk_mat_fetch(ck8, &m8->layer[0].delta.q, 0, 0, q->n, b, NULL, &err)) fail_msg("%s", err.msg);
        assert_memory_equal(a, b, (size_t)q->n * q->k * 2);
        free(a);
        free(b);
        mk_checkpoint_close(&ck);
        mk_checkpoint_close(&ck8);
        mk_model_destroy(&m);
        mk_model_destroy(&m8);
        mk_tmp_remove(&d);
    }
}

/* One tensor of the checkpoint changed as `how` says. */
typedef struct change {
    const char *name, *how, *to;
    int hits;
} change;
static void apply(void *arg, mk_edit_tensor *t)
{
    change *c = arg;
    if (!strcmp(c->how, "bare")) {
        if (!strncmp(t->name, "model.", 6)) memmove(t->name, t->name + 6, strlen(t->name + 6) + 1);
        c->hits++;
        return;
    }
    char *at = strstr(t->name, c->name);
    int scale = strstr(t->name, "_scale_inv") && !strstr(c->name, "_scale_inv"); /* only renamed along with its tensor, or dropped where that is in BF16 */
    if (!at || (scale && strcmp(c->how, "replace") && strcmp(c->how, "bf16"))) return;
    c->hits++;
    if (!strcmp(c->how, "drop")) t->drop = 1;
    if (!strcmp(c->how, "replace")) {
        char rest[MK_NAME];
        snprintf(rest, sizeof rest, "%s", at + strlen(c->name));
        snprintf(at, MK_NAME - (size_t)(at - t->name), "%s%s", c->to, rest);
    }
    if (!strcmp(c->how, "row")) t->shape[0]--, t->changed = 1;
    if (!strcmp(c->how, "flat")) t->shape[0] *= t->shape[t->ndim - 1], t->ndim = 1, t->changed = 1;
    if (!strcmp(c->how, "swap")) {
        uint64_t x = t->shape[0];
        t->shape[0] = t->shape[t->ndim - 1];
        t->shape[t->ndim - 1] = x;
        t->changed = 1;
    }
    if (!strcmp(c->how, "f32")) t->dtype = MK_ST_F32;
    if (!strcmp(c->how, "bf16")) scale ? (void)(t->drop = 1) : (void)(t->dtype = MK_ST_BF16);
    if (!strcmp(c->how, "third")) t->dtype = MK_ST_F32, t->v[5] = 1.0f / 3, t->changed = 1;
    if (!strcmp(c->how, "nan")) t->v[5] = NAN, t->changed = 1;
}

static void tensors(void **s)
{
    (void)s;
    static const struct {
        change c;
        enum mk_st_dtype as;
        const char *config, *value; /* a field to change as well */
        const char *what;           /* NULL: loads */
    } cases[] = {
        {{"layers.1.self_attn.q_proj.weight", "drop", "", 0}, MK_ST_BF16, NULL, NULL, "tensor model.layers.1.self_attn.q_proj.weight is missing, expected [256, 144]"},
        {{"layers.0.self_attn.q_proj.weight_scale_inv", "drop", "", 0}, MK_ST_F8_E4M3, NULL, NULL,
         "its scales model.layers.0.self_attn.q_proj.weight_scale_inv are missing"},
        {{"experts.7.w2.weight", "drop", "", 0}, MK_ST_BF16, NULL, NULL, "tensor model.layers.1.block_sparse_moe.experts.7.w2.weight is missing"},
        {{"experts.3.w1.weight", "f32", "", 0}, MK_ST_BF16, NULL, NULL, "tensor model.layers.1.block_sparse_moe.experts.3.w1.weight has another dtype"},
        {{".w2.weight", "bf16", "", 0}, MK_ST_F8_E4M3, NULL, NULL, "experts.%u.w2.weight: one is FP8, the other is not; pass --weights fp8 or bf16"},
        {{"layers.1.self_attn.g_a_proj", "bf16", "", 0}, MK_ST_F8_E4M3, NULL, NULL, NULL},
        {{"layers.1.input_layernorm", "drop", "", 0}, MK_ST_BF16, NULL, NULL, "tensor model.layers.1.input_layernorm.weight is missing, expected 144 values"},
        {{"lm_head", "drop", "", 0}, MK_ST_BF16, NULL, NULL, "tensor lm_head.weight is missing"},
        {{"lm_head", "drop", "", 0}, MK_ST_BF16, "tie_word_embeddings", "true", NULL},
        {{"nothing", "keep", "", 0}, MK_ST_BF16, "tie_word_embeddings", "true", "tensor lm_head.weight is not part of"},
        {{"layers.0.self_attn.o_proj.weight", "row", "", 0}, MK_ST_BF16, NULL, NULL, "self_attn.o_proj.weight has shape [143, 256], config.json makes it [144, 256]"},
        {{"kv_b_proj.weight", "row", "", 0}, MK_ST_BF16, NULL, NULL, "kv_b_proj.weight has shape [511, 512]"},
        {{"kv_b_proj.weight", "flat", "", 0}, MK_ST_BF16, NULL, NULL, "kv_b_proj.weight has shape [262144], config.json makes it [512, 512]"},
        {{"layers.0.self_attn.q_conv1d", "swap", "", 0}, MK_ST_BF16, NULL, NULL, "q_conv1d.weight has shape [4, 1, 256], config.json makes it [256, 1, 4]"},
        {{"layers.0.self_attn.q_conv1d", "row", "", 0}, MK_ST_BF16, NULL, NULL, "q_conv1d.weight has shape [255, 1, 4], config.json makes it [256, 1, 4]"},
        {{"layers.0.self_attn.q_conv1d", "flat", "", 0}, MK_ST_BF16, NULL, NULL, "q_conv1d.weight has shape [1024]"},
        {{"layers.1.self_attn.o_norm", "nan", "", 0}, MK_ST_BF16, NULL, NULL, NULL}, /* parameters: mk_par_fetch, not read here */
        {{"layers.1.self_attn.o_proj", "nan", "", 0}, MK_ST_BF16, NULL, NULL, "o_proj.weight, row 0, column 5: the weight is not finite"},
        {{"experts.6.w3.weight", "nan", "", 0}, MK_ST_F8_E4M3, NULL, NULL, "experts.6.w3.weight, row 0, column 5: the weight is not finite"},
        {{"layers.1.self_attn.o_proj", "third", "", 0}, MK_ST_BF16, NULL, NULL, "0.333333343 is not exact in BF16"},
        {{"layers.0.self_attn.dt_bias", "replace", "layers.0.self_attn.dt_bios", 0}, MK_ST_BF16, NULL, NULL, "dt_bias is missing"},
        {{"model.norm.weight", "replace", "model.norm.wait", 0}, MK_ST_BF16, NULL, NULL, "model.norm.weight is missing"},
        {{"nothing", "keep", "", 0}, MK_ST_BF16, "num_hidden_layers", "3", "is 4, expected"},
        {{"nothing", "keep", "", 0}, MK_ST_BF16, "num_experts", "7", "block_sparse_moe.gate.weight has shape [8, 144], config.json makes it [7, 144]"},
        {{"nothing", "keep", "", 0}, MK_ST_BF16, "num_shared_experts", "0", "more are not part of KimiLinearForCausalLM"},
        /* the other spellings */
        {{"x", "bare", "", 0}, MK_ST_F8_E4M3, NULL, NULL, NULL},
        {{".block_sparse_moe.", "replace", ".mlp.", 0}, MK_ST_F8_E4M3, NULL, NULL, NULL},
        {{".self_attn.f_a_proj.", "replace", ".self_attn.forget_gate.f_a_proj.", 0}, MK_ST_F8_E4M3, NULL, NULL, NULL},
        {{".self_attn.A_log", "replace", ".self_attn.forget_gate.A_log", 0}, MK_ST_F8_E4M3, NULL, NULL, NULL},
        {{".self_attn.dt_bias", "replace", ".self_attn.forget_gate.dt_bias", 0}, MK_ST_F8_E4M3, NULL, NULL, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *d = mk_tmp_dir();
        change c = cases[i].c;
        assert_int_equal(mk_edit_checkpoint(TINY, d, cases[i].as, apply, &c, &err), MK_OK);
        if (!c.hits && strcmp(c.name, "nothing")) fail_msg("%s hit nothing", c.name);
        if (cases[i].config) mk_edit_json(d, "config.json", cases[i].config, cases[i].value);
        int rc = load(d, MK_WEIGHTS_AUTO);
        if (cases[i].what ? !rc || !strstr(err.msg, cases[i].what) : rc) fail_msg("case %zu: expected \"%s\", got %d \"%s\"", i, cases[i].what ? cases[i].what : "OK", rc, err.msg);
        if (rc) assert_int_equal(rc, MK_E_MODEL);
        mk_tmp_remove(&d);
    }
}

/* Layers whose weights are of different types share vectors; where that would cut them differently it is said. */
static void types_by_layer(void **s)
{
    (void)s;
    char *d = mk_tmp_dir();
    change c = {"layers.1.self_attn.g_a_proj", "bf16", "", 0};
    assert_int_equal(mk_edit_checkpoint(TINY, d, MK_ST_F8_E4M3, apply, &c, &err), MK_OK);
    for (int bf16 = 0; bf16 < 2; bf16++) {
        mk_model *m;
        mk_checkpoint *ck;
        mk_plan *plan = NULL;
        assert_int_equal(resolve(d, bf16 ? MK_WEIGHTS_BF16 : MK_WEIGHTS_AUTO, &m, &ck), MK_OK);
        int rc = mk_plan_make(m, &(mk_plan_config){.workers = 3, .max_context = 64, .kv_pages = 1, .state_slots = 1}, &plan, &err);
        if (bf16 ? rc : rc != MK_E_MODEL || !strstr(err.msg, ".weight: its layer's rows are cut otherwise than those of layers before"))
            fail_msg("%s: %d \"%s\"", bf16 ? "bf16" : "as stored", rc, err.msg);
        mk_plan_destroy(&plan);
        mk_checkpoint_close(&ck);
        mk_model_destroy(&m);
    }
    mk_tmp_remove(&d);
}

/* Layers that only draft are skipped when config.json announces them, and refused otherwise. */
static void draft_layers(void **s)
{
    (void)s;
    for (int announced = 0; announced < 2; announced++) {
        mk_checkpoint *ck;
        char *d = mk_tmp_dir();
        assert_int_equal(mk_edit_checkpoint(TINY, d, MK_ST_F8_E4M3, NULL, NULL, &err), MK_OK);
        assert_int_equal(mk_checkpoint_open(d, &ck, &err), MK_OK);
        mk_stw *w = mk_stw_new();
        for (size_t i = 0; i < mk_checkpoint_count(ck); i++) {
            const mk_tensor *t = mk_checkpoint_at(ck, i);
            mk_stw_raw(w, t->name, t->dtype, t->ndim, t->shape, t->data);
        }
        mk_stw_random(w, "model.layers.4.eh_proj.weight", MK_ST_BF16, 2, (uint64_t[]){144, 288}, 1, MK_ST_F32);
        mk_stw_random(w, "model.layers.0.self_attn.rotary_emb.inv_freq", MK_ST_F32, 1, (uint64_t[]){32}, 1, MK_ST_F32);
        mk_checkpoint_close(&ck);
        mk_stw_save_dir(w, d, 1);
        mk_stw_destroy(&w);
        if (announced) mk_edit_json(d, "config.json", "num_nextn_predict_layers", "1");
        int rc = load(d, MK_WEIGHTS_AUTO);
        if (announced ? rc : !strstr(err.msg, "tensor model.layers.4.eh_proj.weight is not part of KimiLinearForCausalLM")) fail_msg("%d %s", rc, err.msg);
        mk_tmp_remove(&d);
    }
}

/* ---- mutations ------------------------------------------------------------------------------------------------------ */

static void mutations(void **s)
{
    (void)s;
    size_t n;
    char *path = mk_tmp_path(dir, "config.json"), *text = mk_tmp_read(path, &n), *copy = malloc(n + 1);
    static const char alphabet[] = "{}[]\",:0123456789-.eE_n \n\x01\xff";
    uint64_t seed = 7, good = 0;
    for (int round = 0; round < 4000; round++) {
        size_t len = n;
        memcpy(copy, text, n);
        for (uint64_t k = mk_test_random(&seed) % 3 + 1; k; k--) {
            size_t at = mk_test_random(&seed) % len;
            uint64_t what = mk_test_random(&seed) % 6;
            if (what == 0) {
                memmove(copy + at, copy + at + 1, len - at - 1);
                len--;
            } else if (what < 4) { /* digits: dimensions that no longer fit */
                while (at < len && (copy[at] < '0' || copy[at] > '9')) at++;
                if (at < len) copy[at] = (char)('0' + mk_test_random(&seed) % 10);
            } else {
                copy[at] = alphabet[mk_test_random(&seed) % (sizeof alphabet - 1)];
            }
        }
        mk_tmp_write(path, copy, len);
        mk_err e = {0};
        mk_model *m;
        if (mk_model_read(dir, &m, &e)) {
            assert_true(e.code == MK_E_MODEL && e.msg[0] && !strchr(e.msg, '\n'));
            continue;
        }
        good++;
        mk_model_resolve(m, NULL, (enum mk_weights_mode)(round % 3), &e);
        mk_model_destroy(&m);
    }
    assert_true(good > 100);
    free(copy);
    free(text);
    free(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published),
        cmocka_unit_test_setup_teardown(transformers_spelling, setup, teardown),
        cmocka_unit_test_setup_teardown(refused_by_name, setup, teardown),
        cmocka_unit_test_setup_teardown(supported_variants, setup, teardown),
        cmocka_unit_test_setup_teardown(generation, setup, teardown),
        cmocka_unit_test(every_variant),
        cmocka_unit_test(tensors),
        cmocka_unit_test(types_by_layer),
        cmocka_unit_test(draft_layers),
        cmocka_unit_test_setup_teardown(mutations, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
