#include "tests/support/mla_edits.h"
#include "tests/support/tmp.h"

#include <stdlib.h>
#include <string.h>

enum { LATENT = 512, ROPE = 64 };

static void to_halves(mk_edit_tensor *t, uint64_t first)
{
    uint64_t k = t->shape[1];
    float *was = malloc(ROPE * k * sizeof *was), *v = t->v + first * k;
    assert_non_null(was);
    memcpy(was, v, ROPE * k * sizeof *was);
    for (int i = 0; i < ROPE / 2; i++) {
        memcpy(v + (size_t)(2 * i) * k, was + (size_t)i * k, k * sizeof *v);
        memcpy(v + (size_t)(2 * i + 1) * k, was + (size_t)(i + ROPE / 2) * k, k * sizeof *v);
    }
    free(was);
    t->changed = 1;
}

void mk_rope_on_halves(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    if (mk_edit_has(t, "kv_a_proj_with_mqa.weight")) to_halves(t, LATENT);
    if (!mk_edit_has(t, ".q_proj.weight") && !mk_edit_has(t, ".q_b_proj.weight")) return;
    uint64_t head = t->shape[0] % 256 ? 192 : 256; /* 2 x 192 rows, or 2 x 256 */
    for (uint64_t h = 0; h < t->shape[0]; h += head) to_halves(t, h + head - ROPE);
}

void mk_drop_rope(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    if (mk_edit_has(t, "kv_a_proj_with_mqa.weight")) mk_edit_fill(t, LATENT * t->shape[1], ROPE * t->shape[1], 0);
}

void mk_q_norm_eps(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    if (mk_edit_has(t, ".q_a_proj.weight")) mk_edit_scale(t, 0, mk_edit_size(t), 0x1p-5f);
}

void mk_kv_norm_eps(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    if (mk_edit_has(t, "kv_a_proj_with_mqa.weight")) mk_edit_scale(t, 0, LATENT * t->shape[1], 0x1p-5f);
}

void mk_oracle_other_rope(const char *from, const char *rope_parameters)
{
    mk_err err = {0};
    char *dir = mk_tmp_dir();
    mk_model *a = NULL, *b = NULL;
    if (mk_edit_checkpoint(from, dir, MK_ST_F8_E4M3, NULL, NULL, &err)) fail_msg("%s", err.msg);
    mk_edit_json(dir, "config.json", "rope_theta", NULL);
    mk_edit_json(dir, "config.json", "rope_scaling", NULL);
    mk_edit_json(dir, "config.json", "rope_parameters", rope_parameters);
    if (mk_model_read(from, &a, &err) || mk_model_read(dir, &b, &err)) fail_msg("%s", err.msg);
    for (uint32_t l = 0; l < a->layers; l++) {
        const mk_mla_mixer *x = &a->layer[l].mla, *y = &b->layer[l].mla;
        assert_true(x->rotary == 1 && y->rotary == 1);
        assert_memory_equal(x->inv_freq, y->inv_freq, x->rope / 2 * sizeof(float));
        assert_memory_equal(&x->scale, &y->scale, sizeof x->scale);
        assert_memory_equal(&x->rope_scale, &y->rope_scale, sizeof x->rope_scale);
    }
    mk_model_destroy(&a);
    mk_model_destroy(&b);
    mk_tmp_remove(&dir);
}
