/* The kernel's gathering (instructions/gather.cuh), on the CPU: its own text, 256 lanes as coroutines (tests/lanes). Vectors that warps deal among themselves, of one row and of several, whole
 * and in parts, whose packets come late and in any order: what is staged against the values, and of several rows the same bits as of each alone. What nobody gathers is never published, and every
 * staged value is stored once. */
#include "tests/lanes/cuda.h"

extern "C" {
#include "instructions/program.h"
}
#include "instructions/gather.cuh"

#include <setjmp.h>
#include <stdarg.h>
extern "C" {
#include <cmocka.h>
}
#include "tests/lanes/packets.h"

typedef struct shape {
    bool f32, fp8;
    uint32_t pro, n, in_off, k, head; /* n: values of a slice, the last one perhaps fewer */
} shape;
typedef struct result {
    uint8_t staging[MK_STAGING];
    float factor[MK_STAGED_BLOCKS], head_rstd[MK_MAX_ROWS][MK_MAX_NORM_HEADS], sumsq[MK_MAX_ROWS][MK_WARPS];
} result;

static mk_vec vec;
static mk_plan plan;
static uint32_t start[1024], slice0, nslice; /* the slices waited for */
static uint32_t rows, part0, part;            /* part0, part: of the vector, in values */
static float *value;                            /* [row][width]: as packets carry them */
static float *gamma_of;                         /* of values in_off ... */
static uint4 *exchange;
static uint32_t words[65536];                   /* mk_gpu_args.map: gammas by packets */
#define EPOCH 0x1234u

static float f16_value(uint32_t h)
{
    const uint32_t e = h >> 10 & 31, m = h & 1023;
    const float x = e ? ldexpf((float)(m | 1024), (int)e - 25) : ldexpf((float)m, -24);
    return h >> 15 ? -x : x;
}

/* Slices, and the plan that the host makes of an instruction that gathers so. false: such a vector is not dealt. */
static bool plan_of(const shape *s, uint32_t width)
{
    const uint32_t slices = (width + s->n - 1) / s->n;
    if (slices >= sizeof start / sizeof *start) return false;
    for (uint32_t t = 0; t <= slices; t++) start[t] = min(t * s->n, width);
    memset(&vec, 0, sizeof vec);
    vec.scope = MK_PACKET, vec.dtype = (uint8_t)(s->f32 ? MK_F32 : MK_BF16), vec.trailer = s->head != 0, vec.nslice = (uint16_t)slices, vec.pubs = 1, vec.width = width;
    vec.slice_packets = (uint16_t)mk_slice_packets(&vec, s->n);
    slice0 = s->in_off / s->n, nslice = (s->in_off + s->k + s->n - 1) / s->n - slice0;
    const mk_wait w = {0, 0, (uint16_t)slice0, (uint16_t)nslice};
    memset(&plan, 0, sizeof plan);
    plan.x.k = s->k, plan.x.in_off = s->in_off, plan.x.prologue = s->pro, plan.x.norm_group = s->head, plan.x.eps = 1e-5f, plan.x.form = s->fp8 ? MK_X_F16 : MK_X_BF16;
    plan.f32 = s->f32, plan.packets = nslice * vec.slice_packets, plan.inv_k = 1.0f / (float)(s->head ? s->head : s->k), plan.key = 1;
    plan.one = (uint8_t)mk_deal_plan(&vec, start, &w, &plan);
    return plan.one && plan.hands.packets;
}

/* Publishes the values, as mk_publish_unit does: what is no value's is 0, a head's slice ends in its sum of squares. Packets are late at random; those that carry nothing that is asked for never come. */
static void publish(const shape *s)
{
    const uint32_t per = s->f32 ? 3 : 6, packets = vec.nslice * vec.slice_packets;
    exchange = lanes_exchange_open(rows * packets);
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t t = 0; t < vec.nslice; t++) {
            uint4 *to = exchange + r * packets + t * vec.slice_packets;
            const uint32_t n = start[t + 1] - start[t], all = (uint32_t)mk_slice_words(&vec, n);
            float squares = 0;
            for (uint32_t i = 0; i < n; i++) {
                const float x = value[r * vec.width + start[t] + i];
                lanes_put(to, i, x, s->f32);
                squares += x * x;
            }
            if (vec.trailer) (&to[(all - 1) / 3].x)[(all - 1) % 3] = __float_as_uint(squares);
            for (uint32_t p = 0; p < (all + 2) / 3; p++) {
                const uint32_t first = start[t] + p * per, end = min(first + per, start[t + 1]);
                const bool trailer = vec.trailer && p == (all - 1) / 3 && start[t] >= s->in_off && start[t] < s->in_off + s->k;
                to[p].w = EPOCH;
                if ((first < end && first < s->in_off + s->k && end > s->in_off) || trailer) lanes_late[r * packets + t * vec.slice_packets + p] = lanes_random(3) ? 0 : lanes_random(40);
            }
        }
}

static void gather_rows(void)
{
    mk_stage_input(mk_smem(&lanes_shared->fed[0].in), part == plan.x.k, part0, part);
}
static void gather_one(void)
{
    const mk_insn *in = &lanes_shared->fed[0].in;
    switch (plan.one) {
#define X(f32, form, pro) case MK_ONE(f32, form, pro): mk_gather_one<f32, form, pro>(mk_smem(in)); break;
        MK_ONES(X)
#undef X
    }
    mk_sync();
}
/* A step of `rows` rows, the first of which is row `first` of what is published. */
static void fill(uint32_t first)
{
    mk_shared *sh = lanes_shared;
    lanes_shared_draw();
    sh->vec[0] = vec;
    sh->vec[0].start_index = 0;
    for (uint32_t i = 0; i <= vec.nslice; i++) sh->start[i] = (uint16_t)start[i];
    sh->step.nrows = rows, sh->step.seq = 7;
    sh->trace.on = 0;
    sh->args.map = words;
    memset(sh->memo, 0, sizeof sh->memo);
    mk_fed *f = &sh->fed[0];
    memset(f, 0, sizeof *f);
    f->in.wait[0] = {0, 0, (uint16_t)slice0, (uint16_t)nslice};
    f->plan = plan;
    f->place.in[0] = exchange + (first * vec.nslice + slice0) * vec.slice_packets;
    f->place.epoch[0] = EPOCH;
}
static void keep(result *x)
{
    memcpy(x->staging, lanes_shared->staging, sizeof x->staging);
    memcpy(x->factor, lanes_shared->factor, sizeof x->factor);
    memcpy(x->head_rstd, lanes_shared->head_rstd, sizeof x->head_rstd);
    memcpy(x->sumsq, lanes_shared->sumsq[lanes_shared->memo[0].parity], sizeof x->sumsq);
}

static float rstd_of(const shape *s, uint32_t r, uint32_t head)
{
    float sum = 0;
    for (uint32_t v = head * s->head; v < (head + 1) * s->head; v += s->n) {
        float slice = 0;
        for (uint32_t i = 0; i < s->n; i++) slice += value[r * vec.width + s->in_off + v + i] * value[r * vec.width + s->in_off + v + i];
        sum += slice;
    }
    return mk_rsqrt(fmaf(sum, plan.inv_k, plan.x.eps));
}
/* What is wrong with the staged part of the step's rows, from row `first` on; 0: nothing. */
static uint32_t wrong(const shape *s, const result *x, uint32_t first)
{
    const uint32_t stride = mk_row_stride(part);
    uint32_t bad = 0;
    for (uint32_t r = 0; r < rows; r++) {
        float squares = 0, sum = 0;
        for (uint32_t i = 0; i < s->k; i++) squares += value[(first + r) * vec.width + s->in_off + i] * value[(first + r) * vec.width + s->in_off + i];
        for (uint32_t w = 0; w < MK_WARPS; w++) sum += x->sumsq[r][w];
        if (s->pro == MK_PRO_RMS) bad += !(fabsf(sum - squares) <= 1e-5f * squares);
        for (uint32_t i = 0; i < part; i++) {
            const float v = value[(first + r) * vec.width + s->in_off + part0 + i], want = s->pro == MK_PRO_RMS ? lanes_bf16(v * gamma_of[part0 + i]) : v;
            uint16_t h;
            memcpy(&h, x->staging + r * stride + 2 * i, 2);
            const uint32_t head = s->head ? (part0 + i) / s->head : 0;
            const float rstd = s->head ? rstd_of(s, first + r, head) : 1;
            if (!s->fp8) {
                bad += h != mk_bf16_bits(want);
                if (s->head) bad += x->head_rstd[r][head] != rstd;
            } else {
                bad += f16_value(h) * (x->factor[r * (stride >> 7) + i / 64] / rstd) != want;
            }
        }
    }
    return bad;
}

/* Rows of the shape: all of it or all parts of it, and each row alone. */
static uint32_t whole, in_parts;
static void check(const shape *s, uint32_t nrows, const char *what)
{
    const uint32_t width = s->in_off + s->k + lanes_random(2) * s->n / 2;
    if (!plan_of(s, width / s->n * s->n + (width % s->n ? s->head ? s->n : width % s->n : 0))) return;
    rows = nrows;
    value = (float *)malloc(rows * vec.width * sizeof *value);
    gamma_of = (float *)malloc(s->k * sizeof *gamma_of);
    for (uint32_t i = 0; i < rows * vec.width; i++) {
        const float x = ((float)lanes_random(2001) - 1000) * ldexpf(1, (int)lanes_random(12) - 12);
        value[i] = s->f32 ? x : lanes_bf16(x);
    }
    for (uint32_t i = 0; i < s->k; i++) gamma_of[i] = 0.5f + (float)lanes_random(1000) / 1000;
    memset(words, 0, sizeof words);
    plan.gain = 16;
    const uint32_t per = s->f32 ? 3 : 6, lies = s->f32 ? 4 : 8;
    for (uint32_t t = 0; t < vec.nslice; t++)
        for (uint32_t i = start[t]; i < start[t + 1]; i++)
            if (i >= s->in_off && i < s->in_off + s->k) words[plan.gain + ((t - slice0) * vec.slice_packets + (i - start[t]) / per) * lies + (i - start[t]) % per] = __float_as_uint(gamma_of[i - s->in_off]);
    publish(s);

    result *several = (result *)malloc(sizeof *several), *one = (result *)malloc(sizeof *one);
    uint8_t *staged = (uint8_t *)calloc(nrows, 2 * s->k);                /* of all parts: [row][value] */
    float *factor = (float *)calloc(nrows, s->k / 64 * sizeof *factor); /* [row][K block] */
    uint8_t stored[MK_STAGING];
    const uint32_t fit = MK_STAGING / nrows / 2 / 64 * 64 - 64, most = mk_row_stride(s->k) * nrows <= MK_STAGING ? s->k : fit - lanes_random(fit / 128) * 64;
    if (most < s->k && s->pro == MK_PRO_RMS) goto done; /* not dealt in parts */
    fill(0);
    for (part0 = 0; part0 < s->k; part0 += part) {
        part = min(most, s->k - part0);
        memset(stored, 0, sizeof stored);
        lanes_stored = stored;
        if (!lanes_run(gather_rows)) fail_msg("%s, %u rows, values %u to %u: %s", what, nrows, part0, part0 + part, lanes.error);
        lanes_stored = NULL;
        keep(several);
        if (wrong(s, several, 0)) fail_msg("%s, %u rows, values %u to %u: %u are wrong", what, nrows, part0, part0 + part, wrong(s, several, 0));
        for (uint32_t r = 0, stride = mk_row_stride(part); r < nrows; r++) {
            memcpy(staged + 2 * (r * s->k + part0), several->staging + r * stride, 2 * part);
            memcpy(factor + (r * s->k + part0) / 64, several->factor + r * (stride >> 7), part / 64 * sizeof *factor);
        }
        for (uint32_t r = 0; r < nrows; r++) /* once; the first part of several, which becomes f16 when all is looked at, twice */
            for (uint32_t i = 0; i < 2 * part; i++)
                if (stored[r * mk_row_stride(part) + i] != (s->fp8 && most < s->k && !part0 ? 2 : 1)) fail_msg("%s, %u rows: byte %u of row %u is stored %u times", what, nrows, i, r, stored[r * mk_row_stride(part) + i]);
    }
    for (uint32_t i = 0; i < lanes_packets; i++)
        if (lanes_asked[i] && lanes_late[i] == 0xffffffffu) fail_msg("%s, %u rows: packet %u is asked for, which nobody publishes", what, nrows, i);
    ++*(most < s->k ? &in_parts : &whole);
    part0 = 0, part = s->k;
    for (uint32_t r = 0; r < nrows; r++) {
        rows = 1;
        fill(r);
        if (!lanes_run(gather_one)) fail_msg("%s, row %u alone: %s", what, r, lanes.error);
        keep(one);
        if (wrong(s, one, r)) fail_msg("%s, row %u alone: %u values are wrong", what, r, wrong(s, one, r));
        assert_memory_equal(one->staging, staged + 2 * r * s->k, 2 * s->k);
        if (s->fp8) assert_memory_equal(one->factor, factor + r * s->k / 64, s->k / 64 * sizeof *factor);
        if (s->pro == MK_PRO_RMS) assert_memory_equal(one->sumsq[0], several->sumsq[r], sizeof one->sumsq[0]);
        if (s->head && !s->fp8 && most == s->k) assert_memory_equal(one->head_rstd[0], several->head_rstd[r], s->k / s->head * 4);
    }
done:
    free(several), free(one), free(staged), free(factor), free(value), free(gamma_of);
    lanes_exchange_close();
}

/* As the presets have them: h, latents, o, chosen experts' and dense down projections. */
static const shape shapes[] = {
    {true, true, MK_PRO_RMS, 18, 0, 2304, 0},    {true, false, MK_PRO_RMS, 16, 0, 2048, 0},    {true, true, MK_PRO_RMS, 12, 0, 1536, 0},   {false, true, MK_PRO_RMS, 12, 0, 768, 0},
    {false, false, MK_PRO_RMS, 64, 0, 512, 0},   {false, true, MK_PRO_NONE, 16, 0, 1024, 0},   {false, true, MK_PRO_NONE, 32, 64, 512, 0}, {false, false, MK_PRO_NONE, 16, 0, 2048, 0},
    {false, true, MK_PRO_NONE, 30, 0, 4096, 0},  {false, false, MK_PRO_NONE, 64, 0, 8192, 0},  {false, true, MK_PRO_NONE, 36, 0, 9216, 0}, {false, true, MK_PRO_HEADNORM, 128, 0, 4096, 128},
    {false, true, MK_PRO_HEADNORM, 32, 128, 2048, 128}, {false, false, MK_PRO_HEADNORM, 64, 0, 1024, 64},
    {false, true, MK_PRO_NONE, 128, 0, 16384, 0}, {false, true, MK_PRO_NONE, 128, 0, 14976, 0}, {false, false, MK_PRO_NONE, 128, 256, 8704, 0}, /* slice after slice */
};
static void test_presets(void **)
{
    for (uint32_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (uint32_t r = 0; r < 3; r++) {
            const uint32_t nrows[3] = {2 + i % 2, 4 + i % 3, 8};
            char what[40];
            snprintf(what, sizeof what, "shape %u", i);
            check(&shapes[i], nrows[r], what);
        }
    assert_int_equal(whole + in_parts, 3 * sizeof shapes / sizeof *shapes);
    whole = in_parts = 0;
}
static void test_random(void **)
{
    for (uint32_t i = 0; whole < 40 || in_parts < 10; i++) {
        assert_true(i < 2000); /* some are dealt */
        shape s;
        memset(&s, 0, sizeof s);
        s.f32 = !lanes_random(3), s.fp8 = lanes_random(2);
        const uint32_t kind = s.f32 ? 1 : lanes_random(3);
        s.pro = kind == 1 ? MK_PRO_RMS : kind == 2 ? MK_PRO_HEADNORM : MK_PRO_NONE;
        s.n = kind == 2 ? 64u >> lanes_random(4) : s.f32 ? 3 * (1 + lanes_random(20)) : 2 * (1 + lanes_random(60));
        s.head = kind == 2 ? 64 << lanes_random(2) : 0;
        s.k = (1 + lanes_random(s.f32 ? 36 : 128)) * (s.head ? s.head : 64u);
        if (s.head) s.k = min(s.k, 32 * s.head);
        s.in_off = s.head ? lanes_random(2) * s.head : s.n % (s.f32 ? 3 : 6) ? 0 : lanes_random(3) * (s.f32 ? 3 : 6);
        char what[160];
        snprintf(what, sizeof what, "%s, %s, prologue %u, k %u from %u, slices of %u, heads of %u", s.f32 ? "f32" : "bf16", s.fp8 ? "fp8" : "bf16", s.pro, s.k, s.in_off, s.n, s.head);
        check(&s, 1 + lanes_random(8), what);
    }
}

/* A packet that never comes: who waits for it leaves word which one, and all leave when somebody says so. */
static uint32_t named;
static void give_up(void)
{
    const uint4 w = lanes_shared->waiting[lanes.me / 32];
    named += w.x == 1 && w.y == 3 && w.z == 17;
    lanes_shared->aborted = 1;
}
static void test_gives_up(void **)
{
    const shape *s = &shapes[0];
    assert_true(plan_of(s, s->k));
    rows = 4;
    value = (float *)calloc(rows * vec.width, sizeof *value);
    publish(s);
    lanes_late[3 * vec.nslice * vec.slice_packets + 17] = 0xffffffffu; /* row 3's */
    fill(0);
    part0 = 0, part = s->k;
    lanes_flag_read = give_up;
    assert_true(lanes_run(gather_rows));
    lanes_flag_read = NULL;
    assert_int_equal(named, 1);
    free(value);
    lanes_exchange_close();
}

/* Not dealt: what gathering by arithmetic would do wrong. */
static void test_refused(void **)
{
    const shape no[] = {{true, true, MK_PRO_RMS, 120, 0, 512, 0}, /* the last packet has value 512 as well, which would be squared */
                        {true, true, MK_PRO_NONE, 18, 0, 2304, 0}, /* f32 is gathered with a norm alone */
                        {false, true, MK_PRO_NONE, 16, 0, 1000, 0}}; /* no whole K blocks */
    for (uint32_t i = 0; i < sizeof no / sizeof *no; i++) {
        assert_false(plan_of(&no[i], 2400));
        assert_int_equal(plan.hands.packets, 0);
    }
    const shape yes = {true, true, MK_PRO_RMS, 120, 0, 576, 0}; /* 576 = 192 * 3 */
    assert_true(plan_of(&yes, 2400));
}

/* Controls: each of these is told. */
static void test_is_told(void **)
{
    const shape *s = &shapes[0];
    assert_true(plan_of(s, s->k));
    rows = 3;
    value = (float *)calloc(rows * vec.width, sizeof *value);
    gamma_of = (float *)calloc(s->k, sizeof *gamma_of);
    for (uint32_t i = 0; i < rows * vec.width; i++) value[i] = 1 + (float)(i % 7);
    memset(words, 0, sizeof words);
    plan.gain = 16;
    publish(s);
    part0 = 0, part = s->k;
    result *x = (result *)malloc(sizeof *x);
    fill(0);
    assert_true(lanes_run(gather_rows));
    keep(x);
    assert_int_equal(wrong(s, x, 0), 0); /* all gammas are 0 */
    gamma_of[1000] = 1;
    assert_int_equal(wrong(s, x, 0), rows);
    gamma_of[1000] = 0, value[2 * vec.width + 5] += 100;
    assert_int_equal(wrong(s, x, 0), 1); /* a sum of squares */
    lanes_packets--; /* the last packet lies beyond */
    fill(0);
    assert_false(lanes_run(gather_rows));
    free(x), free(value), free(gamma_of);
    lanes_exchange_close();
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_presets), cmocka_unit_test(test_random), cmocka_unit_test(test_gives_up), cmocka_unit_test(test_refused), cmocka_unit_test(test_is_told)};
    lanes_shared_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
