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
    WITH(i.version = 3, "program version 3, expected 5");
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
    assert_int_equal(mk_program_save(p, "/tmp", &err), MK_E_SYSTEM);
    assert_string_equal(err.msg, "/tmp: expected a regular file, or none: it would be replaced");
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

/* A vector of `nslice` slices of n values, the last of `last`. */
static mk_vec dealt_vec(unsigned dtype, unsigned trailer, uint32_t n, uint32_t nslice, uint32_t last, uint32_t *start)
{
    mk_vec v = {.scope = MK_PACKET, .dtype = (uint8_t)dtype, .trailer = (uint8_t)trailer, .nslice = nslice};
    for (uint32_t s = 0; s < nslice; s++) start[s] = s * n;
    start[nslice] = (nslice - 1) * n + last;
    v.width = start[nslice];
    v.slice_packets = (uint32_t)mk_slice_packets(&v, n);
    return v;
}

static void deals(void **state)
{
    (void)state;
    uint32_t start[520];
    /* vector; wait; values wanted; what comes of it, packets 0: refused */
    const struct {
        unsigned dtype, trailer, n, nslice, last, slice0, wait, in_off, k, head, packets, values, slice, per;
    } c[] = {
        /* one row of packets */
        {MK_F32, 0, 18, 128, 18, 0, 128, 0, 2304, 0, 64, 192, 3, 1},
        {MK_F32, 0, 18, 128, 11, 0, 128, 0, 2297, 0, 64, 192, 3, 1},     /* a short last slice */
        {MK_BF16, 0, 72, 128, 72, 0, 128, 0, 9216, 0, 32, 192, 6, 1},
        {MK_BF16, 0, 48, 128, 48, 40, 4, 1920, 192, 0, 32, 192, 6, 1},
        {MK_BF16, 0, 48, 128, 48, 40, 4, 1938, 128, 0, 32, 192, 6, 1},   /* from the middle of a slice on */
        {MK_BF16, 0, 48, 128, 48, 40, 4, 1940, 128, 0, 0, 0, 0, 0},      /* but not of a packet */
        {MK_BF16, 0, 96, 256, 96, 0, 256, 0, 24576, 0, 32, 192, 6, 1},   /* 128 groups, the most */
        {MK_BF16, 0, 96, 257, 96, 0, 257, 0, 24577, 0, 0, 0, 0, 0},
        {MK_F32, 0, 48, 256, 48, 0, 256, 0, 12288, 0, 64, 192, 3, 1},    /* two loads a group */
        {MK_F32, 0, 48, 257, 48, 0, 257, 0, 12289, 0, 0, 0, 0, 0},
        /* slices dealt whole */
        {MK_F32, 0, 16, 128, 16, 0, 128, 0, 2048, 0, 24, 64, 16, 6},
        {MK_F32, 0, 16, 128, 16, 0, 128, 16, 2032, 0, 0, 0, 0, 0},       /* not from the first value on */
        {MK_F32, 0, 16, 128, 16, 1, 127, 16, 2032, 0, 24, 64, 16, 6},
        {MK_F32, 0, 64, 20, 5, 0, 20, 0, 1221, 0, 22, 64, 64, 22},
        {MK_F32, 0, 32, 257, 32, 0, 257, 0, 8193, 0, 0, 0, 0, 0},        /* 129 groups */
        {MK_F32, 0, 2, 512, 2, 0, 512, 0, 1024, 0, 32, 64, 2, 1},
        {MK_F32, 0, 20, 64, 20, 0, 64, 0, 1280, 0, 0, 0, 0, 0},          /* four slices of 20 are no multiple of 64 */
        {MK_F32, 0, 128, 8, 128, 0, 8, 0, 1024, 0, 0, 0, 0, 0},          /* 43 packets */
        {MK_BF16, 0, 64, 128, 64, 0, 128, 0, 8192, 0, 22, 128, 64, 11},
        {MK_BF16, 0, 128, 32, 128, 3, 4, 384, 512, 0, 22, 128, 128, 22},
        {MK_BF16, 0, 8, 512, 8, 128, 64, 1024, 512, 0, 32, 128, 8, 2},
        {MK_BF16, 0, 4, 512, 3, 0, 512, 0, 2047, 0, 32, 128, 4, 1},
        {MK_BF16, 1, 24, 128, 24, 0, 128, 0, 3072, 0, 0, 0, 0, 0},       /* a trailer: no row without gaps, and four slices are 96 values */
        {MK_BF16, 1, 32, 128, 32, 0, 128, 0, 4096, 0, 24, 128, 32, 6},
        /* a head a group */
        {MK_BF16, 1, 32, 128, 32, 0, 128, 0, 4096, 128, 24, 128, 32, 6},
        {MK_BF16, 1, 128, 32, 128, 2, 30, 256, 3840, 128, 22, 128, 128, 22},
        {MK_BF16, 1, 16, 128, 16, 0, 128, 0, 2048, 128, 24, 128, 16, 3},
        {MK_F32, 1, 32, 128, 32, 0, 128, 0, 4096, 64, 22, 64, 32, 11},
        {MK_F32, 1, 32, 128, 32, 0, 128, 0, 4096, 128, 0, 0, 0, 0},      /* 44 packets */
        {MK_BF16, 1, 32, 128, 32, 1, 127, 32, 3968, 128, 0, 0, 0, 0},    /* begins within a head */
        {MK_BF16, 1, 32, 128, 32, 0, 128, 0, 4000, 128, 0, 0, 0, 0},     /* ends within one */
        {MK_BF16, 1, 32, 128, 30, 0, 128, 0, 3968, 128, 0, 0, 0, 0},     /* a slice of other length */
        {MK_BF16, 1, 48, 128, 48, 0, 128, 0, 6144, 128, 0, 0, 0, 0},     /* no whole slices a head */
        {MK_BF16, 1, 32, 128, 32, 0, 128, 0, 4096, 96, 0, 0, 0, 0},      /* no whole K blocks */
        {MK_BF16, 0, 32, 128, 32, 0, 128, 0, 4096, 128, 0, 0, 0, 0},     /* no trailers */
        /* waits that are none */
        {MK_F32, 0, 18, 128, 18, 0, 0, 0, 18, 0, 0, 0, 0, 0},
        {MK_F32, 0, 18, 128, 18, 120, 9, 2160, 18, 0, 0, 0, 0, 0},
        {MK_F32, 0, 18, 128, 18, 0, 127, 0, 2304, 0, 0, 0, 0, 0},        /* values of another slice */
        {MK_F32, 0, 18, 128, 18, 1, 127, 0, 18, 0, 0, 0, 0, 0},
    };
    for (size_t i = 0; i < sizeof c / sizeof c[0]; i++) {
        mk_vec v = dealt_vec(c[i].dtype, c[i].trailer, c[i].n, c[i].nslice, c[i].last, start);
        mk_deal d = {0};
        int got = mk_vec_deal(&v, start, c[i].slice0, c[i].wait, c[i].in_off, c[i].k, c[i].head, &d);
        if (got != (c[i].packets != 0) || d.packets != c[i].packets || d.values != c[i].values || d.slice != c[i].slice || d.per != c[i].per)
            fail_msg("case %zu: expected %u packets, %u values, slices of %u in %u, found %d: %u, %u, %u, %u", i, c[i].packets, c[i].values, c[i].slice, c[i].per,
                     got, d.packets, d.values, d.slice, d.per);
    }
    mk_deal d;
    mk_vec v = dealt_vec(MK_F32, 0, 18, 128, 18, start);
    start[64]++; /* 19 values, then 17 */
    assert_false(mk_vec_deal(&v, start, 0, 128, 0, 2304, 0, &d));
    assert_true(mk_vec_deal(&v, start, 0, 63, 0, 1134, 0, &d));
    assert_true(mk_vec_deal(&v, start, 65, 63, 1170, 1134, 0, &d));
    for (uint32_t s = 65; s <= 128; s++) start[s] += 3; /* alike, but not as those before */
    assert_false(mk_vec_deal(&v, start, 65, 63, 1173, 1134, 0, &d));
    v.slice_packets++; /* that of a longer slice elsewhere */
    assert_false(mk_vec_deal(&v, start, 0, 63, 0, 1134, 0, &d));
    v = dealt_vec(MK_F32, 0, 18, 128, 0, start); /* an empty one */
    assert_false(mk_vec_deal(&v, start, 0, 128, 0, 2286, 0, &d));
    v.scope = MK_LOCAL;
    assert_false(mk_vec_deal(&v, start, 0, 64, 0, 1152, 0, &d));
}

int main(void)
{
    int fd = mkstemp(path);
    if (fd < 0) return 1;
    close(fd);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trip),     cmocka_unit_test(crc_is_ieee),  cmocka_unit_test(every_flipped_bit), cmocka_unit_test(truncated_anywhere),
        cmocka_unit_test(trailing_bytes), cmocka_unit_test(wrong_header), cmocka_unit_test(no_such_file),      cmocka_unit_test(names),
        cmocka_unit_test(deals),
    };
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return rc;
}
