#include "tests/support/edit.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "host/quant.h"
#include "tests/support/tmp.h"

static int ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), k = strlen(end);
    return n >= k && !strcmp(s + n - k, end);
}

static float value(enum mk_st_dtype d, const unsigned char *p, size_t i)
{
    uint16_t h;
    float f;
    switch (d) {
    case MK_ST_F32: memcpy(&f, p + 4 * i, 4); return f;
    case MK_ST_F16: memcpy(&h, p + 2 * i, 2); return mk_f16_to_f32(h);
    case MK_ST_BF16: memcpy(&h, p + 2 * i, 2); return mk_widen_bf16(h);
    case MK_ST_F8_E4M3: return mk_fp8_to_f32(p[i]);
    default: return mk_e8m0_to_f32(p[i]);
    }
}

static float scale_of(const mk_tensor *s, const mk_tensor *t, size_t i)
{
    if (!s) return 1;
    size_t r = i / t->shape[1], c = i % t->shape[1];
    return value(s->dtype, s->data, r / 128 * s->shape[1] + c / 128);
}

static void copy_tensor(const mk_checkpoint *ck, const mk_tensor *t, mk_stw *w, enum mk_st_dtype as, mk_edit_fn f, void *arg)
{
    int convert = as != MK_ST_F8_E4M3, fp8 = t->dtype == MK_ST_F8_E4M3;
    if (convert && ends_with(t->name, "_scale_inv")) return;
    if (t->dtype > MK_ST_F8_E8M0) {
        mk_stw_raw(w, t->name, t->dtype, t->ndim, t->shape, t->data);
        return;
    }
    const mk_tensor *s = NULL;
    if (fp8) {
        char name[MK_NAME + 16];
        snprintf(name, sizeof name, "%s_scale_inv", t->name);
        s = mk_checkpoint_find(ck, name);
    }
    mk_edit_tensor e = {.dtype = t->dtype, .ndim = t->ndim};
    if (convert && (fp8 || (t->ndim == 2 && t->dtype != MK_ST_F8_E8M0))) e.dtype = as;
    snprintf(e.name, sizeof e.name, "%s", t->name);
    memcpy(e.shape, t->shape, sizeof e.shape);
    enum mk_st_dtype dtype = e.dtype;
    size_t n = (size_t)t->bytes / mk_test_dtype_bytes(t->dtype);
    if (!(e.v = malloc((n + 1) * sizeof *e.v))) exit(99);
    for (size_t i = 0; i < n; i++) e.v[i] = value(t->dtype, t->data, i) * scale_of(s, t, i);
    if (f) f(arg, &e);
    if (!e.drop && !e.changed && e.dtype == t->dtype) {
        mk_stw_raw(w, e.name, e.dtype, e.ndim, e.shape, t->data);
    } else if (!e.drop) {
        if (fp8 && dtype == MK_ST_F8_E4M3)
            for (size_t i = 0; i < n; i++) e.v[i] /= scale_of(s, t, i);
        mk_stw_f32(w, e.name, e.dtype, e.ndim, e.shape, e.v);
    }
    free(e.v);
}

static void copy_file(const char *src, const char *dst, const char *name, int must_exist)
{
    char *from = mk_tmp_path(src, name), *to = mk_tmp_path(dst, name);
    struct stat st;
    if (must_exist || !stat(from, &st)) {
        size_t n;
        char *text = mk_tmp_read(from, &n);
        mk_tmp_write(to, text, n);
        free(text);
    }
    free(from);
    free(to);
}

int mk_edit_checkpoint(const char *src, const char *dst, enum mk_st_dtype as, mk_edit_fn f, void *arg, mk_err *err)
{
    mk_checkpoint *ck;
    int rc = mk_checkpoint_open(src, &ck, err);
    if (rc) return rc;
    mk_stw *w = mk_stw_new();
    for (size_t i = 0; i < mk_checkpoint_count(ck); i++) copy_tensor(ck, mk_checkpoint_at(ck, i), w, as, f, arg);
    mk_stw_save_dir(w, dst, 1);
    mk_stw_destroy(&w);
    mk_checkpoint_close(&ck);
    copy_file(src, dst, "config.json", 1);
    copy_file(src, dst, "generation_config.json", 0);
    if (as != MK_ST_F8_E4M3) {
        mk_edit_json(dst, "config.json", "quantization_config", NULL);
        mk_edit_json(dst, "config.json", "torch_dtype", NULL);
        mk_edit_json(dst, "config.json", "dtype", as == MK_ST_BF16 ? "\"bfloat16\"" : as == MK_ST_F16 ? "\"float16\"" : "\"float32\"");
    }
    return MK_OK;
}

void mk_edit_json(const char *dir, const char *file, const char *field, const char *text)
{
    char *path = mk_tmp_path(dir, file), name[128];
    json_error_t je;
    json_t *root = json_load_file(path, 0, &je), *obj = root, *v = text ? json_loads(text, JSON_DECODE_ANY, &je) : NULL;
    if (!root || (text && !v)) {
        fprintf(stderr, "tests: %s, field %s: %s\n", path, field, je.text);
        exit(99);
    }
    for (const char *dot; (dot = strchr(field, '.')); field = dot + 1) {
        snprintf(name, sizeof name, "%.*s", (int)(dot - field), field);
        obj = json_object_get(obj, name);
    }
    if (v)
        json_object_set_new(obj, field, v);
    else
        json_object_del(obj, field);
    json_dump_file(root, path, JSON_INDENT(2) | JSON_SORT_KEYS);
    json_decref(root);
    free(path);
}
