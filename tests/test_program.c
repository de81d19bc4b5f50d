/* Program files: round trip, and every way in which a file can be wrong. */
#include "tests/support/progbuild.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

static char path[] = "/tmp/mk program XXXXXX"; /* with spaces, as paths are */

static long read_all(uint8_t **data)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    long n = ftell(f);
    rewind(f);
    *data = malloc((size_t)n + 64);
    assert_int_equal(fread(*data, 1, (size_t)n, f), n);
    fclose(f);
    return n;
}

static void write_all(const uint8_t *data, long n)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, (size_t)n, f), n);
    fclose(f);
}

static void refused(int code, const char *why)
{
    mk_err err = {0};
    mk_program *p = (mk_program *)path;
    assert_int_equal(mk_program_load(path, &p, &err), code);
    assert_int_equal(err.code, code);
    assert_null(p);
    if (!strstr(err.msg, why) || !strstr(err.msg, path) || strchr(err.msg, '\n')) fail_msg("expected \"%s\" and the path in: %s", why, err.msg);
}

static long saved(uint8_t **data)
{
    mk_program *p = pb_small();
    mk_err err = {0};
    if (mk_program_save(p, path, &err)) fail_msg("%s", err.msg);
    mk_program_destroy(&p);
    assert_null(p);
    return read_all(data);
}

static void round_trip(void **state)
{
    (void)state;
    mk_program *p = pb_small(), *q = NULL;
    mk_err err = {0};
    if (mk_program_save(p, path, &err) || mk_program_load(path, &q, &err)) fail_msg("%s", err.msg);
    const mk_program_info *i = &p->info;
    assert_memory_equal(i, &q->info, sizeof *i);
    assert_memory_equal(p->vec, q->vec, i->n_vec * sizeof *p->vec);
    assert_memory_equal(p->start, q->start, i->n_start * sizeof *p->start);
    assert_memory_equal(p->queue, q->queue, (i->workers + 1) * sizeof *p->queue);
    assert_memory_equal(p->tape_base, q->tape_base, (i->workers + 1) * sizeof *p->tape_base);
    assert_memory_equal(p->insn, q->insn, i->n_insn * sizeof *p->insn);
    mk_program_destroy(&p);
    mk_program_destroy(&q);
    mk_program_destroy(&q);
    mk_program_destroy(NULL);
}

static void crc_is_ieee(void **state)
{
    (void)state;
    uint8_t *d;
    long n = saved(&d);
    uint32_t crc = 0xffffffffu, stored; /* bit by bit, not by table */
    for (long k = 0; k < n - 4; k++) {
        crc ^= d[k];
        for (int b = 0; b < 8; b++) crc = crc & 1 ? (crc >> 1) ^ 0xedb88320u : crc >> 1;
    }
    memcpy(&stored, d + n - 4, 4);
    assert_int_equal(~crc, stored);
    free(d);
}

static void every_flipped_bit(void **state)
{
    (void)state;
    uint8_t *d;
    long n = saved(&d);
    mk_program *p;
    mk_err err;
    for (long k = 0; k < n; k += k < 160 || k > n - 8 ? 1 : 97) {
        d[k] ^= 0x10;
        write_all(d, n);
        assert_int_equal(mk_program_load(path, &p, &err), MK_E_PROGRAM);
        assert_null(p);
        d[k] ^= 0x10;
    }
    d[n / 2] ^= 1;
    write_all(d, n);
    refused(MK_E_PROGRAM, "corrupted: CRC-32");
    free(d);
}

static void truncated_anywhere(void **state)
{
    (void)state;
    uint8_t *d;
    long n = saved(&d);
    for (long k = 0; k < n; k += k < 200 ? 7 : 501) {
        write_all(d, k);
        refused(MK_E_PROGRAM, "truncated");
    }
    write_all(d, n - 1);
    refused(MK_E_PROGRAM, "truncated");
    free(d);
}

static void trailing_bytes(void **state)
{
    (void)state;
    uint8_t *d;
    long n = saved(&d);
    d[n] = 0;
    write_all(d, n + 1);
    refused(MK_E_PROGRAM, "trailing bytes");
    free(d);
}

static void wrong_header(void **state)
{
    (void)state;
    uint8_t *d;
    long n = saved(&d);
    mk_program_info i, good;
    memcpy(&good, d, sizeof good);
#define WITH(change, why)                                                                                              \
    i = good;                                                                                                          \
    change;                                                                                                            \
    memcpy(d, &i, sizeof i);                                                                                           \
    write_all(d, n);                                                                                                   \
    refused(MK_E_PROGRAM, why)
    WITH(i.magic ^= 1, "not a program file");
    WITH(i.version = 4, "program version 4, expected 3");
    WITH(i.workers = 0, "0 workers");
    WITH(i.workers = 0xffffffffu, "4294967295 workers");
    WITH(i.n_vec = 0, "0 vectors");
    WITH(i.n_insn = 0xffffffffu, "4294967295 instructions");
    WITH(i.n_start = 0xffffffffu, "4294967295 slice starts");
    WITH(i.n_insn = 1u << 24, "truncated"); /* the size is checked before anything is allocated */
    WITH(i.n_insn--, "trailing bytes");
#undef WITH
    free(d);
}

static void no_such_file(void **state)
{
    (void)state;
    unlink(path);
    refused(MK_E_SYSTEM, "No such file");
    mk_program *p = pb_small();
    mk_err err = {0};
    assert_int_equal(mk_program_save(p, "/nonexistent/dir/x.mkp", &err), MK_E_SYSTEM);
    assert_non_null(strstr(err.msg, "/nonexistent/dir/x.mkp"));
    mk_program_destroy(&p);
    assert_int_equal(mk_program_load("/tmp", &p, NULL), MK_E_SYSTEM);
    assert_null(p);
}

static void names(void **state)
{
    (void)state;
    assert_string_equal(mk_opcode_name(MK_OP_EMBED), "EMBED");
    assert_string_equal(mk_opcode_name(MK_OP_SCHEDULE), "SCHEDULE");
    assert_string_equal(mk_opcode_name(MK_OP_COUNT), "?");
    assert_string_equal(mk_opcode_name(~0u), "?");
}

int main(void)
{
    int fd = mkstemp(path);
    if (fd < 0) return 1;
    close(fd);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trip),     cmocka_unit_test(crc_is_ieee),  cmocka_unit_test(every_flipped_bit), cmocka_unit_test(truncated_anywhere),
        cmocka_unit_test(trailing_bytes), cmocka_unit_test(wrong_header), cmocka_unit_test(no_such_file),      cmocka_unit_test(names),
    };
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return rc;
}
