/* The packer of the GPU on the CPU: the units that mk_pack_units makes, packed 16 bytes at a time by megakernel/pack_core.h, against mk_pack. Byte by byte,
 * for every family and every way of storing weights, in whole tensors and in pieces of 128 rows. */
#include "host/pack.h"
#include "tests/support/edit.h"
#include "tests/support/packed.h"
#include "tests/support/sanitized.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

typedef struct target {
    const mk_pack_list *list;
    mk_memory *mem;
    uint32_t units, refused; /* refused: item + 1 of the first segment that could not be packed */
    uint64_t groups;
} target;

static int pack_unit(void *arg, const mk_pack_unit *u, mk_err *err)
{
    target *t = arg;
    mk_pack_piece p = u->piece;
    (void)err;
    t->units++;
    p.dst = (u->matrix->kind == MK_PACK_TAPE ? t->mem->tape : u->matrix->kind == MK_PACK_EXPERT ? t->mem->expert : t->mem->embed) + u->dst;
    uint32_t nkb = mk_pack_column_blocks(&p);
    p.block = malloc((u->blocks + 1) * sizeof *p.block);
    assert_non_null(p.block);
    for (uint32_t b = 0; b < u->blocks; b++) {
        uint32_t rows = mk_scale_rows(p.rows.scale_k), columns = p.rows.scale_k ? p.rows.scale_k : p.rows.k, r0 = p.p0 + b / nkb * rows, c0 = b % nkb * columns, top = 0;
        for (uint32_t i = r0; i < r0 + rows && i < p.p1; i++)
            for (uint32_t j = c0; j < c0 + columns && j < p.rows.k; j++) {
                uint32_t v = mk_pack_magnitude(&p, i, j);
                top = v > top ? v : top;
            }
        p.block[b] = mk_fp8_block_scale(mk_bits_f32(top));
    }
    for (uint32_t k = u->first; k < u->first + u->n; k++) {
        const mk_pack_seg *s = &t->list->seg[k];
        mk_pack_range x = mk_pack_range_of(&p, s);
        int good = 1;
        for (uint32_t g = 0; g < x.groups; g++) good &= mk_pack_put(&p, s, x, g);
        t->groups += x.groups;
        uint32_t used = p.wtype == MK_W_FP8 && !s->table ? mk_segments(s->phase, s->rows, p.rows.scale_k) : 0;
        for (uint32_t cb = 0; cb < nkb; cb++)
            for (uint32_t g = 0; g < used; g++) {
                uint32_t at;
                float scale;
                int is = mk_pack_scale(&p, s, cb, g, &at, &scale);
                if (is > 0) memcpy(p.dst + s->dst + 4 * at, &scale, 4);
                good &= is >= 0;
            }
        if (!good && !t->refused) t->refused = s->item + 1;
    }
    free(p.block);
    return MK_OK;
}

static void family(const char *name, const char *dir, packed_as as, void *arg)
{
    const uint32_t *workers = arg;
    static const uint64_t limits[] = {1, 40000, 1u << 26};
    uint32_t units[3];
    uint64_t groups = 0;
    for (int k = 0; k < 3; k++) {
        packed *c = packed_open(dir, as, *workers);
        mk_memory mine = {0};
        mk_pack_list list;
        packed_memory(c->plan->prog, &mine);
        target t = {.list = &list, .mem = &mine};
        if (mk_pack_list_make(c->plan, &list, &c->err) || mk_pack_units(&list, c->ck, limits[k], pack_unit, &t, &c->err)) fail_msg("%s: %s", name, c->err.msg);
        if (t.refused) fail_msg("%s: item %u was refused", name, t.refused - 1);
        packed_same(name, c->plan, &c->mem, &mine);
        if (k) assert_true(t.groups == groups);
        units[k] = t.units;
        groups = t.groups;
        mk_pack_list_free(&list);
        packed_memory_free(&mine);
        packed_close(&c);
    }
    print_message("%s, %u workers: %llu groups in %u, %u or %u units\n", name, *workers, (unsigned long long)groups, units[0], units[1], units[2]);
}

static void families(void **state)
{
    (void)state;
    uint32_t few = 3, many = 29;
    if (!ONE_OF_EACH) packed_each(family, &few);
    packed_each(family, &many);
}

/* What mk_pack refuses is refused here, and no weight that it takes. */
static void refused(void **state)
{
    (void)state;
    packed *c = packed_open("tests/oracle/kimi_linear", (packed_as){MK_WEIGHTS_AUTO, MK_LM_HEAD_AUTO}, 3);
    mk_pack_list list;
    mk_memory mine = {0};
    assert_int_equal(mk_pack_list_make(c->plan, &list, &c->err), MK_OK);
    packed_memory(c->plan->prog, &mine);
    static const struct {
        uint8_t dtype, wtype, exact, bits[4], good;
    } k[] = {
        {MK_ST_BF16, MK_W_BF16, 0, {0x80, 0x7f}, 0}, {MK_ST_BF16, MK_W_BF16, 0, {0x7f, 0x7f}, 1},  {MK_ST_BF16, MK_W_FP8, 0, {0xc0, 0xff}, 0},
        {MK_ST_F16, MK_W_BF16, 1, {0x01, 0x3c}, 0},  {MK_ST_F16, MK_W_BF16, 0, {0x01, 0x3c}, 1},   {MK_ST_F16, MK_W_BF16, 0, {0, 0x7c}, 0},
        {MK_ST_F32, MK_W_BF16, 0, {0xff, 0xff, 0x7f, 0x7f}, 0}, {MK_ST_F32, MK_W_BF16, 0, {0, 0, 0x7f, 0x7f}, 1}, {MK_ST_F32, MK_W_FP8, 0, {1, 0, 0x80, 0x7f}, 0},
        {MK_ST_F8_E4M3, MK_W_BF16, 0, {0x7f}, 0},    {MK_ST_F8_E4M3, MK_W_FP8, 0, {0xff}, 0},      {MK_ST_F8_E4M3, MK_W_FP8, 0, {0x7e}, 1},
    };
    float one = 1, block[1] = {1};
    for (size_t i = 0; i < sizeof k / sizeof *k; i++) {
        unsigned char data[16 * 4] = {0};
        uint8_t out[1024] = {0};
        memcpy(data + 7 * mk_pack_size(k[i].dtype), k[i].bits, mk_pack_size(k[i].dtype));
        mk_pack_piece p = {.rows = {.source = MK_SRC_PLAIN, .scale_k = 128, .k = 16, .cols = 16}, .n = 1, .p1 = 1, .dtype = k[i].dtype, .wtype = k[i].wtype,
                           .exact = k[i].exact, .scale_dtype = MK_ST_F32, .scale_cols = 1, .data = data, .block = block, .dst = out};
        if (k[i].dtype == MK_ST_F8_E4M3) p.scales = (const unsigned char *)&one;
        mk_pack_seg s = {.rows = 1, .nseg = 1, .halves = 1};
        mk_pack_range x = mk_pack_range_of(&p, &s);
        int good = 1;
        assert_int_equal(x.groups, 4);
        for (uint32_t g = 0; g < x.groups; g++) good &= mk_pack_put(&p, &s, x, g);
        if (good != k[i].good) fail_msg("case %zu: good %d", i, good);
        if (k[i].dtype != MK_ST_F8_E4M3) continue;
        for (int b = 0; b < 4; b++) { /* scales that cannot be used */
            static const float bad[] = {0, -1, 1e37f, (float)(0.0 / 0.0)};
            uint32_t at;
            float scale;
            p.scales = (const unsigned char *)&bad[b];
            p.wtype = MK_W_FP8;
            assert_int_equal(mk_pack_scale(&p, &s, 0, 0, &at, &scale), -1);
        }
    }
    mk_pack_list_free(&list);
    packed_memory_free(&mine);
    packed_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(families), cmocka_unit_test(refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
