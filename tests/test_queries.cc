/* The queries of an item of MLA_PARTIAL by the host's table (megakernel/queries.cuh), on the CPU: the kernel's own text, as the warps aside make them in a step of one row and the compute warps in one of
 * several (tests/lanes). Heads in slices of any even lengths, packets late and in any order; what is staged is every head's q~ and turned q_pe, each where attention looks for it, and nothing else. */
#include "tests/lanes/cuda.h"

extern "C" {
#include "instructions/program.h"
}
#include "instructions/mla_partial.cuh"
#include "megakernel/queries.cuh"

#include <setjmp.h>
#include <stdarg.h>
extern "C" {
#include <cmocka.h>
}
#include "tests/lanes/packets.h"

#define SEQ    7u
#define EPOCH0 0x1234u
#define TABLE  16u /* where it begins */
typedef struct shape {
    uint32_t heads, latent, nope, rope, pos, rows;
    bool rotary;
} shape;
static shape of;
static mk_program program;
static mk_insn insn;
static mk_vec vec[2];
static uint32_t starts[4096], words[65536], row; /* row: of the step, whose queries are made */
static float *value[2], param[1024];             /* [row][width]; frequencies behind `latent` gammas */
static uint4 *exchange;
static uint64_t exchange_bytes;
static mk_mla_share item;
static bool two; /* its group may have more than eight heads */

static uint4 *packets(uint32_t v, uint32_t r)
{
    return exchange + mk_packet_offset(&vec[v], mk_half(&vec[v], SEQ, 0), r, 0) / 16;
}
/* Vector v: pieces of `each` values, cut at even places so that no slice has part in two. */
static void cut(uint32_t v, uint32_t pieces, uint32_t each, uint32_t *n)
{
    const uint32_t first = *n, least = each / 8 + lanes_random(each / 2); /* of a slice, or one less */
    uint32_t widest = 0;
    for (uint32_t p = 0; p < pieces; p++)
        for (uint32_t at = 0; at < each;) {
            const uint32_t take = min((least + lanes_random(least + 1)) / 2 * 2 + 2, each - at);
            starts[(*n)++] = p * each + at;
            widest = max(widest, take);
            at += take;
        }
    starts[(*n)++] = pieces * each;
    vec[v] = lanes_vec(MK_BF16, *n - 1 - first, widest, pieces * each, &exchange_bytes);
    vec[v].start_index = first;
}
/* A shape's vectors, instruction and table. False: it has none, for a head's q_pe lies in too many packets. */
static bool prepare(void)
{
    const uint32_t qk = of.nope + of.rope, heads_a_slice = 1 + lanes_random(3);
    uint32_t n = 0;
    exchange_bytes = 0;
    cut(0, of.heads, of.latent, &n);
    if (of.heads % heads_a_slice || lanes_random(2))
        cut(1, of.heads, qk, &n);
    else
        cut(1, of.heads / heads_a_slice, heads_a_slice * qk, &n);
    program = {};
    program.vec = vec, program.start = starts, program.info.n_vec = 2;
    insn = {};
    insn.opcode = MK_OP_MLA_PARTIAL, insn.signal_vec = MK_NONE;
    insn.wait[0] = {0, 0, 0, (uint16_t)vec[0].nslice}, insn.wait[1] = {1, 0, 0, (uint16_t)vec[1].nslice};
    mk_mla *m = &insn.mla;
    m->heads = (uint16_t)of.heads, m->all_heads = of.heads, m->latent = (uint16_t)of.latent, m->rope = (uint16_t)of.rope, m->in_off = of.nope, m->qk_stride = (uint16_t)qk, m->rotary = of.rotary;
    mk_row last = {};
    last.pos = of.pos;
    two = mk_mla_eights(m, &last) > 1;
    const uint32_t group = mk_head_group(of.pos, of.heads);
    m->parts = 1000, m->part = lanes_random(mk_splits(of.pos, 0, 0) * ((of.heads + group - 1) / group));
    item = mk_mla_share_of(m, of.pos, m->part);
    for (uint32_t i = 0; i < of.rope / 2; i++) param[of.latent + i] = powf(10000, -2.0f * (float)i / (float)of.rope);
    return queries_table(&program, &insn, words + TABLE, sizeof words / sizeof *words - TABLE) != 0;
}
/* Only what the item's heads are made of ever comes. */
static void publish(void)
{
    const uint32_t rows = of.rows, first[2] = {0, of.nope}, stride[2] = {of.latent, of.nope + of.rope}, n[2] = {of.latent, of.rope};
    exchange = lanes_exchange_open((uint32_t)(exchange_bytes / 16));
    for (uint32_t v = 0; v < 2; v++) {
        const uint32_t *start = starts + vec[v].start_index;
        value[v] = (float *)malloc(rows * vec[v].width * sizeof(float));
        for (uint32_t i = 0; i < rows * vec[v].width; i++) value[v][i] = lanes_bf16_random(118);
        for (uint32_t r = 0; r < rows; r++) {
            lanes_publish(packets(v, r), &vec[v], start, value[v] + r * vec[v].width, mk_epoch(EPOCH0, SEQ, 0));
            for (uint32_t s = 0; s < vec[v].nslice; s++)
                for (uint32_t p = 0; start[s] + 6 * p < start[s + 1]; p++)
                    for (uint32_t i = start[s] + 6 * p; i < min(start[s] + 6 * p + 6, start[s + 1]); i++) {
                        const uint32_t h = i / stride[v], c = i % stride[v];
                        if (h - item.h0 < item.heads && c - first[v] < n[v]) lanes_late[packets(v, r) - exchange + s * vec[v].slice_packets + p] = lanes_random(3) ? 0 : lanes_random(40);
                    }
        }
    }
}
static float2 angle_of(uint32_t r, uint32_t p)
{
    float s = 0, c = 1;
    if (of.rotary) mk_sincosf(mk_mul((float)(of.pos - of.rows + 1 + r), param[of.latent + p]), &s, &c);
    return make_float2(s, c);
}
/* What is to be staged of row r, on top of what lay there. */
static void want(uint8_t *staging, uint32_t r)
{
    const mk_att_queries q = {of.latent + of.rope, of.latent / 32, two};
    for (uint32_t h = 0; h < item.heads; h++) {
        const float *latent = value[0] + r * vec[0].width + (item.h0 + h) * of.latent, *pe = value[1] + r * vec[1].width + (item.h0 + h) * (of.nope + of.rope) + of.nope;
        for (uint32_t c = 0; c < of.latent; c += 2) *(uint32_t *)mk_att_at(staging, h, c) = mk_bf16_pair(latent[c], latent[c + 1]);
        for (uint32_t p = 0; p < of.rope / 2; p++) {
            const float2 a = angle_of(r, p), y = of.rotary ? mk_rotated(pe[2 * p], pe[2 * p + 1], a) : make_float2(pe[2 * p], pe[2 * p + 1]);
            mk_att_put(staging, &q, h, of.latent + 2 * p, y.x, y.y);
        }
    }
}

static void by_asides(void)
{
    const uint32_t tid = mk_tid_now();
    if (tid < 32 * MK_ASIDES) mk_mla_aside(lanes_shared, &lanes_shared->fed[0], tid / 32, tid % 32);
}
template <uint32_t NH> static void by_compute(void)
{
    const mk_dev here = mk_here(&lanes_shared->fed[0].in), *d = &here;
    mk_mla_angles_make(d, &d->in->mla);
    mk_sync();
    mk_mla_queries<NH>(d, &d->in->mla, TABLE, row, item.h0, item.heads);
}
static void check(uint32_t r, void (*body)(void), const char *who)
{
    mk_shared *sh = lanes_shared;
    lanes_shared_draw();
    sh->trace.on = 0;
    sh->vec[0] = vec[0], sh->vec[1] = vec[1];
    sh->step.nrows = of.rows, sh->step.seq = SEQ;
    for (uint32_t k = 0; k < of.rows; k++) sh->step.row[k].pos = of.pos - of.rows + 1 + k;
    sh->args.map = words, sh->args.exchange = (uint8_t *)exchange, sh->args.epoch0 = EPOCH0, sh->args.param = param;
    mk_fed *f = &sh->fed[0];
    memset(f, 0, sizeof *f);
    f->in = insn, f->plan.queries = TABLE;
    for (uint32_t v = 0; v < 2; v++) f->place.in[v] = packets(v, 0), f->place.epoch[v] = mk_epoch(EPOCH0, SEQ, 0);
    for (uint32_t p = 0; p < of.rope / 2; p++) sh->angle[p] = of.rotary ? angle_of(0, p) : make_float2(NAN, NAN);
    static uint8_t staging[MK_STAGING];
    memcpy(staging, sh->staging, MK_STAGING);
    want(staging, r);
    row = r;
    if (!lanes_run(body)) fail_msg("%s, %u heads of %u + %u: %s", who, of.heads, of.latent, of.rope, lanes.error);
    for (uint32_t i = 0; i < MK_STAGING; i++)
        if (sh->staging[i] != staging[i]) fail_msg("%s, %u heads of %u + %u, rotated %u, row %u at %u, heads %u to %u: byte %u of what is staged differs", who, of.heads, of.latent, of.rope, of.rotary, r, of.pos, item.h0, item.h0 + item.heads, i);
}
static bool check_shape(void)
{
    if (!prepare()) return false;
    publish();
    if (of.rows == 1) check(0, by_asides, "aside");
    for (uint32_t r = 0; r < of.rows; r++) check(r, two ? by_compute<2> : by_compute<1>, "several rows");
    free(value[0]), free(value[1]), lanes_exchange_close();
    return true;
}

/* As published models have them, in groups of eight heads and of more. */
static void test_models(void **)
{
    const uint32_t heads[] = {16, 20, 32, 64};
    for (uint32_t h : heads)
        for (uint32_t pos = 700; pos <= 9100; pos += 8400)
            for (uint32_t rows = 1; rows <= 2; rows++) {
                of = {h, 512, h == 20 ? 0u : 128u, 64, pos, rows, h != 32};
                assert_true(check_shape());
            }
}
static void test_random(void **)
{
    uint32_t had = 0;
    for (uint32_t i = 0; i < 150; i++) {
        of = {1 + lanes_random(40), 32 * (1 + lanes_random(8)), 2 * lanes_random(20), 32 * lanes_random(MK_ATT_RING_ROPE / 32 + 1), 10 + lanes_random(2) * lanes_random(12000), 1, lanes_random(2) != 0};
        if (!of.rope && !of.nope) of.nope = 2;
        of.rows = 1 + lanes_random(2) * lanes_random(3);
        had += check_shape();
    }
    assert_true(had > 60);
}

/* Slices that lie otherwise have no table: cut at an odd value, or not at a head. */
static void test_refused(void **)
{
    for (uint32_t v = 0; v < 2; v++) {
        of = {4, 64, 64, 64, 100, 1, true};
        uint32_t *inner, *end;
        do { /* until there is a cut amidst a head, of q in its q_pe */
            assert_true(prepare());
            inner = starts + vec[v].start_index, end = inner + vec[v].nslice;
            while (inner < end && (*inner % 64 == 0 || *inner % 128 < 70)) inner++;
        } while (inner == end);
        ++*inner;
        assert_int_equal(queries_table(&program, &insn, words + TABLE, 4096), 0);
        --*inner;
        assert_true(queries_table(&program, &insn, words + TABLE, 4096));
        assert_int_equal(queries_table(&program, &insn, words + TABLE, 60), 0); /* nor where there is no room */
    }
    of = {4, 64, 64, 64, 100, 1, true};
    assert_true(prepare());
    insn.mla.latent = 60;
    assert_int_equal(queries_table(&program, &insn, words + TABLE, 4096), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_models), cmocka_unit_test(test_random), cmocka_unit_test(test_refused)};
    lanes_shared_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
