/* Latent attention over one item (instructions/attention.cuh), on the CPU: the kernel's own text, 256 lanes as coroutines (tests/lanes). As a row of several does it, with pages from memory, and as a
 * step's only row does, with pages out of the ring, whose stages are filled when they like and are no numbers when they have been left: the same bits, and the item's sums in double. Nothing that
 * is no number before comes into them: queries of heads that there are not, what lies behind queries, scratch. */
#include "tests/lanes/cuda.h"

extern "C" {
#include "instructions/program.h"
}
#include "instructions/attention.cuh"
#include "tests/lanes/ring.h"

#include <setjmp.h>
#include <stdarg.h>
extern "C" {
#include <cmocka.h>
}

#define PAGES 6u     /* of the pool */
#define STAGE 18560u /* bytes: as kimi, moonlight and glm-4.7-flash have */
typedef struct shape {
    uint32_t latent, rope, heads, tokens;
    bool fp8, ringed;
} shape;
static shape of;
static mk_att item;
static uint8_t *pool;                 /* [PAGES][kv_page_bytes] */
static uint32_t page[PAGES], at0;     /* the item's; its first stage */
static float *query;                  /* [heads][nk] */
static float *found;                  /* [16][latent + 4] */

static uint32_t cache_of(void)
{
    return of.fp8 ? MK_CACHE_FP8 : MK_CACHE_ACT;
}
static const uint8_t *token_at(uint32_t t)
{
    return pool + page[t / MK_PAGE] * lanes_shared->args.kv_page_bytes + t % MK_PAGE * item.bytes;
}
static float key(uint32_t t, uint32_t c)
{
    if (of.fp8) return mk_latent_value(token_at(t), of.latent, c);
    uint16_t h;
    memcpy(&h, token_at(t) + 2 * c, 2);
    return mk_widen_bf16(h);
}

/* ---- the loader ------------------------------------------------------------------------------------------------------- */

static uint32_t stages(void)
{
    return (of.tokens + MK_PAGE - 1) / MK_PAGE * MK_CACHE_STAGES;
}
/* Behind the last token stands another one's, as feed_cache has it. */
static void fill(uint32_t stage, uint8_t *to)
{
    for (uint32_t i = 0; i < 16; i++) memcpy(to + i * item.bytes + (i < 8 ? 0 : MK_CACHE_SKEW), token_at(min(stage * 16 + i, of.tokens - 1)), item.bytes);
}

/* ---- an item ---------------------------------------------------------------------------------------------------------- */

static void prepare(void)
{
    mk_shared *sh = lanes_shared;
    lanes_ring_begin(at0, of.ringed ? stages() : 0, fill);
    item = {};
    item.nk = of.latent + of.rope, item.nv = of.latent, item.fine = of.latent / 32, item.bytes = mk_latent_row_bytes(of.latent, of.rope, cache_of(), 2);
    item.n = of.tokens, item.heads = of.heads, item.scale = 0.125f, item.rest_at = mk_latent_key_at(of.latent, cache_of(), 2) - 2 * of.latent;
    item.base = pool, item.pages = page, item.dst = found;
    sh->args.kv_page_bytes = MK_PAGE * item.bytes;
    const mk_att_queries q = {item.nk, item.fine, of.heads > 8};
    const uint32_t all = (item.nk + 31) & ~31u;
    for (uint32_t h = 0; h < of.heads; h++)
        for (uint32_t c = 0; c < all; c += 2) mk_att_put(sh->staging, &q, h, c, c < item.nk ? query[h * item.nk + c] : 0, c + 1 < item.nk ? query[h * item.nk + c + 1] : 0);
    /* block 0's other rows, which a warp without a block multiplies its zeros by, are heads' of other items: numbers */
    for (uint32_t h = of.heads; h < 16; h++)
        for (uint32_t c = 0; c < 32; c += 2) *(uint32_t *)mk_att_at(sh->staging, h, c) = 0;
    memset(found, 0xff, 16 * mk_partial_floats(of.latent) * sizeof *found);
}
template <uint32_t NH, bool FP8> static void of_one(void)
{
    const mk_dev here = mk_here(&lanes_shared->fed[0].in), *d = &here;
    const mk_att_share w = mk_att_deal(item.nv);
    mk_att_regs regs;
    mk_att_begin_one<NH, FP8>(d, &item, &w, page[0], of.ringed, &regs);
    mk_sync();
    mk_attend_one<NH, FP8>(d->sh, &regs);
}
template <uint32_t NH, bool FP8> static void of_several(void)
{
    const mk_dev here = mk_here(&lanes_shared->fed[0].in), *d = &here;
    const mk_att_share w = mk_att_deal(item.nv);
    mk_att_regs regs;
    mk_att_begin<NH, FP8>(d, &item, &w, NULL, &regs);
    mk_sync();
    mk_attend<NH, FP8>(d->sh, &regs, false);
}
/* The greatest difference of a head's normalised sums, by their RMS. */
static double error(void)
{
    double worst = 0;
    for (uint32_t h = 0; h < of.heads; h++) {
        double sum = 0, square = 0, off = 0, top = -1e30, *const p = (double *)malloc(of.tokens * sizeof *p);
        for (uint32_t t = 0; t < of.tokens; t++) {
            p[t] = 0;
            for (uint32_t c = 0; c < item.nk; c++) p[t] += (double)query[h * item.nk + c] * key(t, c);
            p[t] *= item.scale, top = fmax(top, p[t]);
        }
        for (uint32_t t = 0; t < of.tokens; t++) p[t] = exp(p[t] - top), sum += p[t];
        const float *y = found + h * mk_partial_floats(of.latent);
        for (uint32_t c = 0; c < of.latent; c++) {
            double want = 0;
            for (uint32_t t = 0; t < of.tokens; t++) want += p[t] * key(t, c);
            want /= sum;
            const double e = fabs(want - (double)y[c] / y[of.latent + 1]);
            square += want * want, off = e > off || e != e ? e : off;
        }
        worst = fmax(worst, off == off ? off / sqrt(square / of.latent) : 1e9);
        free(p);
    }
    return worst;
}
template <uint32_t NH, bool FP8> static void check(void)
{
    const uint32_t floats = mk_partial_floats(of.latent);
    query = (float *)malloc(of.heads * (of.latent + of.rope) * sizeof *query);
    /* what comes through the exchange is bf16; turned values are not */
    for (uint32_t i = 0; i < of.heads * (of.latent + of.rope); i++) query[i] = i % (of.latent + of.rope) < of.latent ? lanes_bf16_random(118) : lanes_bf16_random(118) * 1.001f;
    float *const one = (float *)malloc(16 * floats * sizeof *one);
    found = one;
    prepare();
    const bool first = lanes_run(of_one<NH, FP8>);
    if (!first) fail_msg("%u heads, %u + %u, %u tokens, one row: %s", of.heads, of.latent, of.rope, of.tokens, lanes.error);
    for (uint32_t w = 0; w < MK_WARPS; w++) assert_int_equal(lanes_shared->memo[w].next.at, at0 + (of.ringed ? stages() : 0)); /* where the next instruction's stages begin */
    const double off = error();
    found = (float *)malloc(16 * floats * sizeof *found);
    prepare();
    const bool second = lanes_run(of_several<NH, FP8>);
    if (!second) fail_msg("%u heads, %u + %u, %u tokens, several rows: %s", of.heads, of.latent, of.rope, of.tokens, lanes.error);
    uint32_t differ = 0;
    for (uint32_t h = 0; h < of.heads; h++) differ += memcmp(one + h * floats, found + h * floats, (of.latent + 2) * sizeof *one) != 0;
    if (differ || !(off < 2e-2)) fail_msg("%u heads, %u + %u%s, %u tokens%s: an error of %g; bits of %u heads are not those of several rows", of.heads, of.latent, of.rope, FP8 ? " in FP8" : "", of.tokens, of.ringed ? " through the ring" : "", off, differ);
    free(one), free(found), free(query);
}
static void check_shape(uint32_t latent, uint32_t rope, uint32_t heads, uint32_t tokens, bool fp8, bool ringed)
{
    of = {latent, rope, heads, tokens, fp8, ringed};
    at0 = 2 * lanes_random(20);
    const uint32_t bytes = mk_latent_row_bytes(latent, rope, cache_of(), 2);
    pool = (uint8_t *)malloc(PAGES * MK_PAGE * bytes);
    for (uint32_t i = 0; i < PAGES; i++) page[i] = (i * 5 + 2) % PAGES;
    for (uint32_t t = 0; t < PAGES * MK_PAGE; t++) {
        uint8_t *row = pool + t * bytes;
        for (uint32_t c = 0; c < latent + rope; c++) {
            const uint16_t h = (uint16_t)mk_bf16_bits(lanes_bf16_random(118));
            if (!fp8) memcpy(row + 2 * c, &h, 2);
            if (fp8 && c >= latent) memcpy(row + mk_latent_key_at(latent, MK_CACHE_FP8, 2) + (c - latent) * 2, &h, 2);
        }
        if (!fp8) continue;
        for (uint32_t c = 0; c < latent; c++) row[c] = (uint8_t)(lanes_random(2) << 7 | lanes_random(127));
        for (uint32_t g = 0; g < mk_latent_scale_bytes(latent) / 4; g++) {
            const float scale = ldexpf(1, -8 - (int)lanes_random(3));
            memcpy(row + latent + 4 * g, &scale, 4);
        }
    }
    if (fp8)
        heads > 8 ? check<2, true>() : check<1, true>();
    else
        heads > 8 ? check<2, false>() : check<1, false>();
    free(pool);
}

/* Latents of which some warps have no block or one, keys that one, two or none of the rest's blocks hold. */
static void test_shapes(void **)
{
    const uint32_t shapes[][2] = {{64, 32}, {32, 64}, {64, 16}, {256, 64}, {288, 32}, {128, 64}, {512, 64}, {512, 0}};
    for (uint32_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (uint32_t two = 0; two < 2; two++) {
            check_shape(shapes[i][0], shapes[i][1], two ? 12 : 4, 1 + lanes_random(MK_PAGE), false, false);
            check_shape(shapes[i][0], shapes[i][1], two ? 16 : 8, MK_PAGE + 1 + lanes_random(MK_PAGE), false, true);
        }
}
static void test_pages(void **)
{
    check_shape(512, 64, 16, 5 * MK_PAGE, false, true);
    check_shape(512, 64, 8, 4 * MK_PAGE + 17, false, true);
    check_shape(64, 32, 4, 6 * MK_PAGE - 1, false, true);
}
static void test_fp8(void **)
{
    check_shape(512, 64, 16, 3 * MK_PAGE + 5, true, true);
    check_shape(512, 64, 8, 37, true, false);
    check_shape(256, 64, 12, 2 * MK_PAGE, true, true);
    check_shape(128, 32, 4, 3 * MK_PAGE, true, true);
}

int main(void)
{
    lanes_ring_open(STAGE);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_shapes), cmocka_unit_test(test_pages), cmocka_unit_test(test_fp8)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
