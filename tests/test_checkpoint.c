/* safetensors: what is right is read, what lies is refused with one line that says where. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "host/checkpoint.h"
#include "tests/support/stwrite.h"
#include "tests/support/tmp.h"

static char *dir, *file;

static int setup(void **s)
{
    (void)s;
    dir = mk_tmp_dir();
    file = mk_tmp_path(dir, "model.safetensors");
    return 0;
}
static int teardown(void **s)
{
    (void)s;
    free(file);
    mk_tmp_remove(&dir);
    return 0;
}

static mk_stw *three(void)
{
    mk_stw *w = mk_stw_new();
    mk_stw_random(w, "b.weight", MK_ST_F8_E4M3, 2, (uint64_t[]){130, 200}, 1, MK_ST_BF16);
    mk_stw_random(w, "a.weight", MK_ST_BF16, 2, (uint64_t[]){3, 5}, 1, MK_ST_F32);
    mk_stw_random(w, "c", MK_ST_F32, 1, (uint64_t[]){7}, 1, MK_ST_F32);
    mk_stw_raw(w, "empty", MK_ST_I64, 2, (uint64_t[]){0, 4}, NULL);
    mk_stw_meta(w, "format", "pt");
    return w;
}

static void check_three(const mk_checkpoint *ck)
{
    static const char *const names[] = {"a.weight", "b.weight", "b.weight_scale_inv", "c", "empty"};
    assert_int_equal(mk_checkpoint_count(ck), 5);
    for (size_t i = 0; i < 5; i++) {
        assert_string_equal(mk_checkpoint_at(ck, i)->name, names[i]);
        assert_ptr_equal(mk_checkpoint_find(ck, names[i]), mk_checkpoint_at(ck, i));
    }
    const mk_tensor *t = mk_checkpoint_find(ck, "b.weight");
    assert_int_equal(t->dtype, MK_ST_F8_E4M3);
    assert_int_equal(t->ndim, 2);
    assert_int_equal(t->shape[0], 130);
    assert_int_equal(t->bytes, 130 * 200);
    assert_null(mk_checkpoint_find(ck, "b"));
    assert_null(mk_checkpoint_find(ck, ""));
}

static void one_file(void **s)
{
    (void)s;
    mk_err e = {0};
    mk_checkpoint *ck;
    mk_stw *w = three();
    mk_stw_save_dir(w, dir, 1);
    assert_int_equal(mk_checkpoint_open(dir, &ck, &e), MK_OK);
    check_three(ck);
    assert_string_equal(mk_checkpoint_metadata(ck, "format"), "pt");
    assert_null(mk_checkpoint_metadata(ck, "other"));
    float v[7];
    assert_int_equal(mk_par_fetch(ck, &(mk_par){.tensor = "c", .n = 7, .add = 1}, v, &e), MK_OK);
    for (int i = 0; i < 7; i++) assert_true(v[i] > 0 && v[i] < 2);
    mk_checkpoint_close(&ck);
    assert_null(ck);
    mk_checkpoint_close(&ck);
    assert_int_equal(mk_checkpoint_open_file(file, &ck, &e), MK_OK);
    check_three(ck);
    mk_checkpoint_close(&ck);
    mk_stw_destroy(&w);
}

static void shards(void **s)
{
    (void)s;
    mk_err e = {0};
    mk_checkpoint *ck;
    mk_stw *w = three();
    mk_stw_save_dir(w, dir, 3);
    assert_int_equal(mk_checkpoint_open(dir, &ck, &e), MK_OK);
    check_three(ck);
    assert_null(mk_checkpoint_metadata(ck, "format"));
    mk_checkpoint_close(&ck);
    mk_stw_destroy(&w);
}

/* ---- refusals ------------------------------------------------------------------------------------------------------- */

/* One line, says the file, contains `what`. */
static void refused(const char *what)
{
    mk_err e = {0};
    mk_checkpoint *ck = (void *)1;
    int rc = mk_checkpoint_open(dir, &ck, &e);
    if (rc == MK_OK || !strstr(e.msg, what)) fail_msg("expected \"%s\", got %d \"%s\"", what, rc, e.msg);
    assert_int_equal(rc, MK_E_MODEL);
    assert_int_equal(e.code, rc);
    assert_null(ck);
    assert_null(strchr(e.msg, '\n'));
    assert_non_null(strstr(e.msg, dir));
    assert_int_equal(mk_checkpoint_open(dir, &ck, NULL), rc);
}

static void lying_headers(void **s)
{
    (void)s;
    static const char data[64];
    static const struct {
        const char *header;
        size_t n;
        const char *what;
    } bad[] = {
        {"", 20, "header of 0 bytes"},
        {"[]", 0, "does not start with '{'"},
        {"{\"a\":", 0, "not valid JSON"},
        {"{} x", 0, "not valid JSON"},
        {"{\"a\":{},\"a\":{}}", 0, "duplicate object key"},
        {"{\"a\":3}", 0, "tensor a: expected an object"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "tensor a: expected exactly dtype, shape and data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"more\":1}}", 4, "expected exactly"},
        {"{\"a\":{\"dtype\":\"F33\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "tensor a: unknown dtype \"F33\""},
        {"{\"a\":{\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "unknown dtype 7"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":4,\"data_offsets\":[0,4]}}", 4, "tensor a: shape: expected a list"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}", 4, "at most 6"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4, "shape[0] is not a non-negative integer"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1.0],\"data_offsets\":[0,4]}}", 4, "shape[0]"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,4]}}", 4, "overflows"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[9223372036854775807,2],\"data_offsets\":[0,4]}}", 4, "overflows"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[99999999999999999999],\"data_offsets\":[0,4]}}", 4, "not valid JSON"},
        {"{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,2]}}", 2, "no whole number of bytes"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4, "need 8 bytes, data_offsets give 4"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4, "begin <= end"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", 4, "expected [begin, end]"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", 4, "expected [begin, end]"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 3, "tensor a ends at byte 4 of the data, the file has 3"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[9223372036854775803,9223372036854775807]}}", 4, "truncated"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 9, "5 bytes after the last tensor"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", 8, "hole of 4 bytes before tensor a"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}", 12,
         "tensor b overlaps a by 4 bytes"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8,
         "overlaps"},
        {"{\"a\\nb\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "unusable name"},
        {"{\"\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "unusable name"},
        {"{\"a\\u0000b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "not valid JSON"},
        {"{\"__metadata__\":[]}", 0, "__metadata__ is not an object"},
        {"{\"__metadata__\":{\"a\":1}}", 0, "every value must be a string"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        mk_stw_save_text(file, bad[i].header, data, bad[i].n);
        refused(bad[i].what);
    }
    char *deep = malloc(100001);
    memset(deep, '[', 100000);
    memcpy(deep, "{\"a\":", 5);
    deep[100000] = 0;
    mk_stw_save_text(file, deep, data, 0);
    refused("not valid JSON");
    free(deep);
    mk_tmp_write(file, "\xff\xff\xff\xff\xff\xff\xff\x7f{}", 10);
    refused("header of 9223372036854775807 bytes");
    mk_tmp_write(file, "{}", 2);
    refused("truncated: 2 bytes");
    mk_tmp_write(file, "", 0);
    refused("truncated: 0 bytes");
}

static void truncated_anywhere(void **s)
{
    (void)s;
    mk_stw *w = three();
    mk_stw_save_dir(w, dir, 1);
    mk_stw_destroy(&w);
    size_t n;
    char *text = mk_tmp_read(file, &n);
    for (size_t k = 0; k < n; k += k < 600 ? 1 : 997) {
        mk_tmp_write(file, text, k);
        refused("");
    }
    mk_tmp_write(file, text, n - 1);
    refused("truncated");
    free(text);
}

static void not_a_file(void **s)
{
    (void)s;
    mk_checkpoint *ck;
    mk_err e = {0};
    refused("no weights: neither model.safetensors nor model.safetensors.index.json");
    assert_int_equal(mkdir(file, 0700), 0);
    refused("not a regular file");
    rmdir(file);
    assert_int_equal(mkfifo(file, 0600), 0);
    refused("not a regular file");
    unlink(file);
    assert_int_equal(symlink("/dev/zero", file), 0);
    refused("not a regular file");
    unlink(file);
    assert_int_equal(symlink("nowhere", file), 0);
    refused("cannot open: No such file");
    assert_int_equal(mk_checkpoint_open("/nonexistent/x", &ck, &e), MK_E_MODEL);
    assert_int_equal(mk_checkpoint_open("/dev/null", &ck, &e), MK_E_MODEL);
    assert_non_null(strstr(e.msg, "expected a checkpoint directory"));
}

static void bad_index(void **s)
{
    (void)s;
    char *index = mk_tmp_path(dir, "model.safetensors.index.json"), *one = mk_tmp_path(dir, "one.safetensors");
    char *two = mk_tmp_path(dir, "two.safetensors");
    static const char a[] = "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}";
    static const char ab[] = "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}";
    static const struct {
        const char *index, *what;
    } bad[] = {
        {"", "not valid JSON"},
        {"[]", "expected a JSON object"},
        {"{}", "weight_map: expected an object"},
        {"{\"weight_map\":{}}", "names 0 files"},
        {"{\"weight_map\":{\"a\":1}}", "weight_map: a: expected the name of a file"},
        {"{\"weight_map\":{\"a\":\"../one.safetensors\"}}", "in the same directory"},
        {"{\"weight_map\":{\"a\":\"/etc/passwd\"}}", "in the same directory"},
        {"{\"weight_map\":{\"a\":\"..\"}}", "in the same directory"},
        {"{\"weight_map\":{\"a\\n\":\"one.safetensors\"}}", "unusable name"},
        {"{\"weight_map\":{\"a\":\"one.safetensors\",\"a\":\"two.safetensors\"}}", "duplicate object key"},
        {"{\"weight_map\":{\"a\":\"none.safetensors\"}}", "none.safetensors: shard missing"},
        {"{\"weight_map\":{\"a\":\"one.safetensors\",\"b\":\"one.safetensors\"}}", "tensor b is not in one.safetensors"},
        {"{\"weight_map\":{\"a\":\"two.safetensors\"}}", "tensor b is in "},
        {"{\"weight_map\":{\"a\":\"one.safetensors\",\"b\":\"two.safetensors\"}}", "tensor a is in "},
    };
    float v[2] = {1, 2};
    mk_stw_save_text(one, a, v, 4);
    mk_stw_save_text(two, ab, v, 8);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        mk_tmp_write(index, bad[i].index, strlen(bad[i].index));
        refused(bad[i].what);
    }
    mk_stw_save_text(two, "{\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", v, 4);
    static const char swapped[] = "{\"weight_map\":{\"b\":\"one.safetensors\",\"a\":\"two.safetensors\"}}";
    mk_tmp_write(index, swapped, strlen(swapped));
    refused("tensor a: the index says two.safetensors, found in ");
    mk_stw_save_text(two, a, v, 3);
    refused("truncated");
    free(index);
    free(one);
    free(two);
}

/* ---- mutations ------------------------------------------------------------------------------------------------------ */

/* Valid files with a few bytes changed, inserted or removed: an error or a checkpoint whose every byte can be read. */
static void mutations(void **s)
{
    (void)s;
    mk_stw *w = three();
    mk_stw_save_dir(w, dir, 1);
    mk_stw_destroy(&w);
    size_t n;
    char *text = mk_tmp_read(file, &n), *copy = malloc(n + 16);
    static const char alphabet[] = "{}[]\",:0123456789-.eEF8_BU \\n\x01\xff";
    uint64_t seed = 20261121, opened = 0, header = 0;
    for (int i = 7; i >= 0; i--) header = header << 8 | (unsigned char)text[i];
    for (int round = 0; round < 6000; round++) {
        size_t len = n;
        memcpy(copy, text, n);
        for (uint64_t k = mk_test_random(&seed) % 4 + 1; k; k--) {
            size_t at = mk_test_random(&seed) % (mk_test_random(&seed) % 8 ? 8 + header : len);
            char c = mk_test_random(&seed) % 4 ? alphabet[mk_test_random(&seed) % (sizeof alphabet - 1)] : (char)mk_test_random(&seed);
            switch (mk_test_random(&seed) % 8) {
            case 0: /* insert */
                if (len < n + 8) memmove(copy + at + 1, copy + at, len - at), len++;
                copy[at] = c;
                break;
            case 1: /* remove */
                memmove(copy + at, copy + at + 1, len - at - 1);
                len--;
                break;
            case 2: /* the length in front */
                copy[mk_test_random(&seed) % 8] = (char)mk_test_random(&seed);
                break;
            case 3: /* a digit for a digit: the interesting lies */
                while (at < len && (copy[at] < '0' || copy[at] > '9')) at++;
                if (at < len) copy[at] = (char)('0' + mk_test_random(&seed) % 10);
                break;
            default: copy[at] = c;
            }
        }
        mk_tmp_write(file, copy, len);
        mk_err e = {0};
        mk_checkpoint *ck;
        if (mk_checkpoint_open_file(file, &ck, &e)) {
            assert_true(e.msg[0] && !strchr(e.msg, '\n'));
            continue;
        }
        opened++;
        unsigned sum = 0;
        for (size_t i = 0; i < mk_checkpoint_count(ck); i++) {
            const mk_tensor *t = mk_checkpoint_at(ck, i);
            for (uint64_t b = 0; b < t->bytes; b++) sum += ((const unsigned char *)t->data)[b];
            float v[7];
            mk_mat mat = {.source = MK_SRC_PLAIN, .wtype = i % 2 ? MK_W_FP8 : MK_W_BF16, .n = 130, .k = 200, .scale_k = 128};
            memcpy(mat.tensor, t->name, strlen(t->name) + 1);
            mk_par p = {.n = 7};
            memcpy(p.tensor, t->name, strlen(t->name) + 1);
            mk_par_fetch(ck, &p, v, &e);
            uint16_t *dst = malloc(130 * 200 * 2);
            float scales[4];
            mk_mat_fetch(ck, &mat, 0, 0, 130, dst, scales, &e);
            free(dst);
        }
        mk_checkpoint_close(&ck);
        assert_true(sum > 0);
    }
    assert_true(opened > 10); /* the mutations are not all trivial */
    free(copy);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(one_file, setup, teardown),       cmocka_unit_test_setup_teardown(shards, setup, teardown),
        cmocka_unit_test_setup_teardown(lying_headers, setup, teardown),  cmocka_unit_test_setup_teardown(truncated_anywhere, setup, teardown),
        cmocka_unit_test_setup_teardown(not_a_file, setup, teardown),     cmocka_unit_test_setup_teardown(bad_index, setup, teardown),
        cmocka_unit_test_setup_teardown(mutations, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
