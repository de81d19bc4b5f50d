#include "tests/support/stwrite.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/tmp.h"

typedef struct entry {
    char *name;
    enum mk_st_dtype dtype;
    uint32_t ndim;
    uint64_t shape[6];
    size_t bytes;
    unsigned char *data;
} entry;

struct mk_stw {
    entry *e;
    size_t n;
    json_t *meta;
};

static void *must(void *p)
{
    if (p) return p;
    fprintf(stderr, "tests: out of memory\n");
    exit(99);
}

static const char *dtype_name(enum mk_st_dtype d)
{
    static const char *const names[] = {"F32", "F16", "BF16", "F8_E4M3", "F8_E8M0", "I32", "I64", "U8", "F64"};
    return names[d];
}

size_t mk_test_dtype_bytes(enum mk_st_dtype d)
{
    static const size_t bytes[] = {4, 2, 2, 1, 1, 4, 8, 1, 8};
    return bytes[d];
}

uint64_t mk_test_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

uint16_t mk_test_f32_to_bf16(float v)
{
    uint32_t u;
    memcpy(&u, &v, 4);
    if (v != v) return (uint16_t)(u >> 16 | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

/* By arithmetic, not by bits: an independent second way next to the loader's. */
uint16_t mk_test_f32_to_f16(float v)
{
    uint16_t sign = signbit(v) ? 0x8000u : 0;
    double a = fabs((double)v);
    if (v != v) return 0x7e00u;
    if (a >= 65520) return (uint16_t)(sign | 0x7c00u);
    if (a < ldexp(1, -14)) return (uint16_t)(sign + (uint16_t)nearbyint(ldexp(a, 24)));
    int e;
    double m = frexp(a, &e); /* m in [0.5, 1) */
    return (uint16_t)(sign + (uint16_t)((e + 13) << 10) + (uint16_t)nearbyint(ldexp(m, 11)));
}

mk_stw *mk_stw_new(void)
{
    return must(calloc(1, sizeof(mk_stw)));
}

void mk_stw_destroy(mk_stw **p)
{
    mk_stw *w = *p;
    if (!w) return;
    for (size_t i = 0; i < w->n; i++) {
        free(w->e[i].name);
        free(w->e[i].data);
    }
    json_decref(w->meta);
    free(w->e);
    free(w);
    *p = NULL;
}

void mk_stw_meta(mk_stw *w, const char *key, const char *value)
{
    if (!w->meta) w->meta = must(json_object());
    json_object_set_new(w->meta, key, json_string(value));
}

static size_t count(uint32_t ndim, const uint64_t *shape)
{
    size_t n = 1;
    for (uint32_t i = 0; i < ndim; i++) n *= shape[i];
    return n;
}

void mk_stw_raw(mk_stw *w, const char *name, enum mk_st_dtype dtype, uint32_t ndim, const uint64_t *shape, const void *data)
{
    w->e = must(realloc(w->e, (w->n + 1) * sizeof *w->e));
    entry *e = &w->e[w->n++];
    memset(e, 0, sizeof *e);
    e->name = must(strdup(name));
    e->dtype = dtype;
    e->ndim = ndim;
    memcpy(e->shape, shape, ndim * sizeof *shape);
    e->bytes = count(ndim, shape) * mk_test_dtype_bytes(dtype);
    e->data = must(calloc(1, e->bytes + 1));
    if (data) memcpy(e->data, data, e->bytes);
}

void mk_stw_f32(mk_stw *w, const char *name, enum mk_st_dtype dtype, uint32_t ndim, const uint64_t *shape, const float *v)
{
    mk_stw_raw(w, name, dtype, ndim, shape, NULL);
    unsigned char *d = w->e[w->n - 1].data;
    size_t n = count(ndim, shape);
    if (dtype == MK_ST_F32) memcpy(d, v, n * 4);
    for (size_t i = 0; i < n; i++) {
        uint16_t h = dtype == MK_ST_F16 ? mk_test_f32_to_f16(v[i]) : mk_test_f32_to_bf16(v[i]);
        if (dtype == MK_ST_F16 || dtype == MK_ST_BF16) memcpy(d + 2 * i, &h, 2);
        if (dtype == MK_ST_F8_E4M3) d[i] = mk_f32_to_fp8(v[i]);
        if (dtype == MK_ST_F8_E8M0) d[i] = (unsigned char)(127 + (int)lrintf(log2f(v[i])));
    }
}

void mk_stw_random(mk_stw *w, const char *name, enum mk_st_dtype dtype, uint32_t ndim, const uint64_t *shape, float amp, enum mk_st_dtype scales)
{
    uint64_t s = 1;
    for (const char *p = name; *p; p++) s = s * 1099511628211ull + (unsigned char)*p;
    size_t n = count(ndim, shape);
    if (dtype == MK_ST_F8_E4M3) {
        char scale_name[256];
        uint64_t b[2] = {(shape[0] + 127) / 128, (shape[1] + 127) / 128};
        float *v = must(malloc(b[0] * b[1] * sizeof *v));
        for (size_t i = 0; i < b[0] * b[1]; i++) v[i] = ldexpf(1, (int)floorf(log2f(amp / 448)) - (int)(mk_test_random(&s) % 4));
        mk_stw_raw(w, name, dtype, ndim, shape, NULL);
        for (size_t i = 0; i < n; i++) {
            uint8_t x = (uint8_t)mk_test_random(&s);
            w->e[w->n - 1].data[i] = (x & 0x7f) == 0x7f ? 0x3a : x ? x : 1;
        }
        snprintf(scale_name, sizeof scale_name, "%s_scale_inv", name);
        mk_stw_f32(w, scale_name, scales, 2, b, v);
        free(v);
        return;
    }
    float *v = must(malloc((n + 1) * sizeof *v));
    for (size_t i = 0; i < n; i++) {
        v[i] = amp * ((float)(mk_test_random(&s) >> 40) + 0.5f) * 0x1p-23f - amp; /* (-amp, amp) */
        if (v[i] == 0) v[i] = amp / 2;
    }
    mk_stw_f32(w, name, dtype, ndim, shape, v);
    free(v);
}

/* Entries first, first + step, ... */
static void save(const mk_stw *w, const char *path, size_t first, size_t step)
{
    json_t *h = must(json_object());
    size_t at = 0;
    if (w->meta) json_object_set(h, "__metadata__", w->meta);
    for (size_t i = first; i < w->n; i += step) {
        const entry *e = &w->e[i];
        json_t *shape = json_array();
        for (uint32_t d = 0; d < e->ndim; d++) json_array_append_new(shape, json_integer((json_int_t)e->shape[d]));
        json_object_set_new(h, e->name, json_pack("{s:s, s:o, s:[I, I]}", "dtype", dtype_name(e->dtype), "shape", shape, "data_offsets",
                                                  (json_int_t)at, (json_int_t)(at + e->bytes)));
        at += e->bytes;
    }
    char *text = must(json_dumps(h, JSON_COMPACT));
    unsigned char *data = must(malloc(at + 1));
    at = 0;
    for (size_t i = first; i < w->n; i += step) {
        memcpy(data + at, w->e[i].data, w->e[i].bytes);
        at += w->e[i].bytes;
    }
    mk_stw_save_text(path, text, data, at);
    free(data);
    free(text);
    json_decref(h);
}

void mk_stw_save(const mk_stw *w, const char *path)
{
    save(w, path, 0, 1);
}

void mk_stw_save_dir(const mk_stw *w, const char *dir, unsigned shards)
{
    char name[64];
    if (shards <= 1) {
        char *path = mk_tmp_path(dir, "model.safetensors");
        save(w, path, 0, 1);
        free(path);
        return;
    }
    json_t *map = must(json_object());
    for (unsigned s = 0; s < shards; s++) {
        snprintf(name, sizeof name, "model-%05u-of-%05u.safetensors", s + 1, shards);
        char *path = mk_tmp_path(dir, name);
        save(w, path, s, shards);
        free(path);
        for (size_t i = s; i < w->n; i += shards) json_object_set_new(map, w->e[i].name, json_string(name));
    }
    json_t *index = json_pack("{s:{}, s:o}", "metadata", "weight_map", map);
    char *text = must(json_dumps(index, JSON_INDENT(1))), *path = mk_tmp_path(dir, "model.safetensors.index.json");
    mk_tmp_write(path, text, strlen(text));
    free(path);
    free(text);
    json_decref(index);
}

void mk_stw_save_text(const char *path, const char *header, const void *data, size_t n)
{
    size_t len = strlen(header);
    unsigned char *p = must(malloc(8 + len + n));
    for (int i = 0; i < 8; i++) p[i] = (unsigned char)((uint64_t)len >> (8 * i));
    memcpy(p + 8, header, len);
    if (n) memcpy(p + 8 + len, data, n);
    mk_tmp_write(path, p, 8 + len + n);
    free(p);
}
