/* Checkpoints of Llama and Qwen3.5 that are not what their config.json says: refused by name. And stacked experts against separate ones. */
#include "host/checkpoint.h"
#include "host/model.h"
#include "tests/support/edit.h"
#include "tests/support/tmp.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

typedef struct change {
    const char *name; /* part of a tensor's name */
    int drop;
    const char *rename; /* replaces the whole name */
    uint64_t shape[3];  /* 0: stays */
} change;

static void apply(void *arg, mk_edit_tensor *t)
{
    const change *c = arg;
    if (!strstr(t->name, c->name)) return;
    t->drop = c->drop;
    if (c->rename) snprintf(t->name, sizeof t->name, "%s", c->rename);
    for (uint32_t i = 0; i < 3 && c->shape[0]; i++)
        if (c->shape[i]) t->shape[i] = c->shape[i];
    t->changed = 1;
}

/* Opens and resolves; NULL or what went wrong. */
static int resolve(const char *dir, mk_model **m, mk_checkpoint **ck, mk_err *err)
{
    int rc = mk_model_read(dir, m, err);
    if (!rc) rc = mk_checkpoint_open(dir, ck, err);
    return rc ? rc : mk_model_resolve(*m, *ck, MK_WEIGHTS_AUTO, err);
}

static void refused(void **state)
{
    (void)state;
    static const struct {
        const char *family;
        change c;
        const char *what;
    } all[] = {
        {"llama", {.name = "layers.1.self_attn.k_proj.weight", .drop = 1}, "model.layers.1.self_attn.k_proj.weight is missing, expected [128, 112]"},
        {"llama", {.name = "layers.1.self_attn.k_proj.weight", .shape = {64}}, "self_attn.k_proj.weight has shape [64, 112], config.json makes it [128, 112]"},
        {"llama", {.name = "layers.0.input_layernorm", .rename = "model.layers.0.self_attn.q_proj.bias"}, "input_layernorm.weight is missing"},
        {"llama", {.name = "layers.0.input_layernorm", .shape = {16}}, "input_layernorm.weight has shape [16], config.json makes it 112 values"},
        {"qwen3_5_moe", {.name = "shared_expert_gate", .drop = 1}, "mlp.shared_expert_gate.weight is missing, expected [1, 144]"},
        {"qwen3_5_moe", {.name = "layers.1.mlp.experts.down_proj", .shape = {5}}, "mlp.experts.down_proj has shape [5, 144, 32], config.json makes it [6, 144, 32]"},
        {"qwen3_5_moe", {.name = "experts.gate_up_proj", .shape = {6, 32}}, "mlp.experts.gate_up_proj has shape [6, 32, 144], config.json makes it [6, 64, 144]"},
        {"qwen3_5_moe", {.name = "experts.gate_up_proj", .drop = 1}, "mlp.experts.0.gate_proj.weight is missing"},
        {"qwen3_5_moe", {.name = "conv1d", .shape = {512}}, "linear_attn.conv1d.weight has shape [512, 1, 4], config.json makes it [1024, 1, 4]"},
        {"qwen3_5_moe", {.name = "in_proj_b", .shape = {3}}, "linear_attn.in_proj_b.weight has shape [3, 144], config.json makes it [4, 144]"},
        {"qwen3_5_moe", {.name = "dt_bias", .drop = 1}, "linear_attn.dt_bias is missing, expected 4 values"},
        {"qwen3_5_moe", {.name = "q_norm", .shape = {128}}, "self_attn.q_norm.weight has shape [128], config.json makes it 256 values"},
        {"qwen3_5_moe", {.name = "model.visual.patch_embed", .rename = "model.audio.proj.weight"}, "tensor model.audio.proj.weight is not part of"},
        {"qwen3_next", {.name = "in_proj_qkvz.weight", .shape = {1408}}, "in_proj_qkvz.weight has shape [1408, 144], config.json makes it [1536, 144]"},
        {"qwen3_next", {.name = "in_proj_ba", .shape = {4}}, "in_proj_ba.weight has shape [4, 144], config.json makes it [8, 144]"},
        {"qwen3_next", {.name = "experts.5.up_proj.weight", .drop = 1}, "mlp.experts.5.up_proj.weight is missing"},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        char from[128], *dir = mk_tmp_dir();
        mk_err err = {0};
        mk_model *m = NULL;
        mk_checkpoint *ck = NULL;
        change c = all[i].c;
        snprintf(from, sizeof from, "tests/oracle/%s", all[i].family);
        if (mk_edit_checkpoint(from, dir, MK_ST_BF16, apply, &c, &err)) fail_msg("%s", err.msg);
        int rc = resolve(dir, &m, &ck, &err);
        if (rc != MK_E_MODEL || !strstr(err.msg, all[i].what)) fail_msg("%s, %s: expected \"%s\", got %d \"%s\"", from, c.name, all[i].what, rc, err.msg);
        mk_checkpoint_close(&ck);
        mk_model_destroy(&m);
        mk_tmp_remove(&dir);
    }
}

/* Row by row, an expert out of the stacked tensors is the tensor's own row; out of an FP8 conversion, each expert has its own scales. */
static void stacked(void **state)
{
    (void)state;
    mk_err err = {0};
    mk_model *m = NULL;
    mk_checkpoint *ck = NULL;
    if (resolve("tests/oracle/qwen3_5_moe", &m, &ck, &err)) fail_msg("%s", err.msg);
    mk_moe *e = &m->layer[1].moe;
    const struct {
        mk_mat *mat;
        const char *tensor;
        uint32_t rows, off;
    } part[3] = {{&e->gate, "gate_up_proj", 64, 0}, {&e->up, "gate_up_proj", 64, 32}, {&e->down, "down_proj", 144, 0}};
    for (int p = 0; p < 3; p++) {
        char name[128];
        mk_mat *mat = part[p].mat;
        snprintf(name, sizeof name, "model.language_model.layers.1.mlp.experts.%s", part[p].tensor);
        const mk_tensor *t = mk_checkpoint_find(ck, name);
        assert_non_null(t);
        assert_true(mat->source == MK_SRC_STACKED && mat->wtype == MK_W_BF16);
        uint16_t *row = malloc(mat->k * sizeof *row);
        uint8_t *fp8 = malloc((size_t)mat->n * mat->k);
        float scale[2][8];
        assert_true(row && fp8);
        for (uint32_t x = 0; x < e->experts; x++)
            for (uint32_t i = 0; i < mat->n; i += 7) {
                if (mk_mat_fetch(ck, mat, x, i, 1, row, NULL, &err)) fail_msg("%s", err.msg);
                assert_memory_equal(row, (const uint16_t *)t->data + ((size_t)x * part[p].rows + part[p].off + i) * mat->k, mat->k * sizeof *row);
            }
        assert_int_equal(mk_mat_fetch(ck, mat, e->experts, 0, 1, row, NULL, &err), MK_E_MODEL); /* there is no such expert */
        mk_mat q = *mat;
        q.wtype = MK_W_FP8;
        for (uint32_t x = 0; x < 2; x++)
            if (mk_mat_fetch(ck, &q, x, 0, 32, fp8, scale[x], &err)) fail_msg("%s", err.msg);
        assert_memory_not_equal(scale[0], scale[1], sizeof(float));
        free(row);
        free(fp8);
    }
    mk_checkpoint_close(&ck);
    mk_model_destroy(&m);
}

/* The models that two configurations give are the same. */
static void same_files(const char *one, const char *other)
{
    mk_model *a = NULL, *b = NULL;
    mk_err err = {0};
    if (mk_model_read(one, &a, &err) || mk_model_read(other, &b, &err)) fail_msg("%s", err.msg);
    assert_true(a->layers == b->layers && a->vocab == b->vocab && a->max_context == b->max_context && a->tied == b->tied && a->n_stop == b->n_stop);
    for (uint32_t l = 0; l < a->layers; l++) {
        mk_layer x = a->layer[l], y = b->layer[l];
        if (x.mixer == MK_MIX_GQA) {
            assert_memory_equal(x.gqa.inv_freq, y.gqa.inv_freq, x.gqa.rope / 2 * sizeof(float));
            x.gqa.inv_freq = y.gqa.inv_freq = NULL;
        }
        assert_memory_equal(&x, &y, sizeof x);
    }
    mk_model_destroy(&a);
    mk_model_destroy(&b);
}

#define PUBLISHED(name) "tests/fixtures/configs/" name "/config.json"

/* Edits a published configuration; the model read from it must be the same. */
static void same_model(const char *from, const char *const set[][2], size_t n_set)
{
    char *dir = mk_tmp_dir(), *to = mk_tmp_path(dir, "config.json");
    size_t n;
    char *text = mk_tmp_read(from, &n);
    mk_tmp_write(to, text, n);
    for (size_t i = 0; i < n_set; i++) mk_edit_json(dir, "config.json", set[i][0], set[i][1]);
    same_files(from, to);
    free(text);
    free(to);
    mk_tmp_remove(&dir);
}

/* What transformers 5.17 writes for Qwen3-Next: lists instead of rules, rope_parameters. */
static void transformers_spelling(void **state)
{
    (void)state;
    char types[2048] = "[";
    for (int l = 0; l < 48; l++) {
        strcat(types, l % 4 == 3 ? "\"full_attention\"" : "\"linear_attention\"");
        strcat(types, l < 47 ? "," : "]");
    }
    const char *const set[][2] = {
        {"full_attention_interval", NULL}, {"layer_types", types}, {"rope_theta", NULL}, {"rope_scaling", NULL}, {"partial_rotary_factor", NULL},
        {"rope_parameters", "{\"partial_rotary_factor\":0.25,\"rope_theta\":10000000,\"rope_type\":\"default\"}"}, {"torch_dtype", NULL},
        {"dtype", "\"bfloat16\""}, {"use_sliding_window", NULL}, {"pad_token_id", "null"}, {"attention_bias", "false"},
    };
    same_model(PUBLISHED("qwen3-next-80b-a3b"), set, sizeof set / sizeof *set);
}

/* Later releases of one architecture spell it in other words. */
static void later_spelling(void **state)
{
    (void)state;
    same_files(PUBLISHED("qwen3.5-27b"), PUBLISHED("qwen3.6-27b"));
    same_files(PUBLISHED("qwen3.5-27b"), PUBLISHED("qwen3.8-27b"));
    same_files(PUBLISHED("qwen3.5-27b"), PUBLISHED("qwen3.8-27b-fp8"));
    same_files(PUBLISHED("qwen3.5-35b-a3b"), PUBLISHED("qwen3.6-35b-a3b"));
    static const char *const set[][2] = {{"vision_config.model_type", "\"qwen3_5_vision\""}}; /* as transformers 5 writes it */
    same_model(PUBLISHED("qwen3.6-27b"), set, sizeof set / sizeof *set);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refused),
        cmocka_unit_test(stacked),
        cmocka_unit_test(transformers_spelling),
        cmocka_unit_test(later_spelling),
    };
    return cmocka_run_group_tests_name("checkpoints of Llama and Qwen3.5", tests, NULL, NULL);
}
