/* KV_APPEND, MLA_PARTIAL and COMBINE against attention in double, written from models.md 3.3: no splits, no pages, softmax over all
 * tokens at once. */
#include "instructions/latent.h"
#include "tests/support/onestep.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define STREAMS 4

typedef struct shape {
    uint32_t heads, latent, rope, nope, parts, context;
    int rotary, act_f32, fp8; /* fp8: the cache */
} shape;

typedef struct rig {
    shape s;
    onestep *o;
    uint32_t kv, qt, q, cache, partial, lat, cs; /* cs: COMBINE slices a head */
    uint32_t workers;
    mk_mla m;
    float *gamma, *freq;
    double *store[STREAMS]; /* [context][latent + rope]: what the cache should hold, in double from the same inputs */
} rig;

#define PAD 16 /* the kv values start here in their vector */

static void *need(void *p)
{
    assert_non_null(p);
    return p;
}

/* ---- FP8 cache rows: codes, a scale for every 128 of them in 16 bytes for every four, keys in bf16 ------------------ */

static uint32_t row_bytes(const shape *s)
{
    uint32_t groups = (s->latent + 127) / 128;
    return s->fp8 ? s->latent + (groups + 3) / 4 * 16 + 2 * s->rope : (s->latent + s->rope) * (s->act_f32 ? 4 : 2);
}
/* The least power of two with which no value of the group that holds value i is above 448. */
static double group_scale(const double *x, uint32_t latent, uint32_t i)
{
    double top = 0, scale = ldexp(1, -100);
    for (uint32_t k = i / 128 * 128; k < latent && k < i / 128 * 128 + 128; k++) top = fmax(top, fabs(x[k]));
    while (top / scale > 448) scale *= 2;
    return scale;
}

static rig *rig_new(shape s)
{
    rig *g = need(calloc(1, sizeof *g));
    uint32_t n = s.latent + s.rope, dtype = s.act_f32 ? MK_F32 : MK_BF16;
    onestep *o = g->o = one_new(2, s.act_f32);
    g->s = s;
    g->cs = 2;
    g->gamma = need(malloc((s.latent + s.rope) * sizeof(float)));
    one_fill(3, g->gamma, s.latent, 0.3);
    for (uint32_t i = 0; i < s.latent; i++) g->gamma[i] += 1.0f;
    g->freq = g->gamma + s.latent;
    for (uint32_t i = 0; i < s.rope / 2; i++) g->freq[i] = (float)pow(10000.0, -2.0 * i / s.rope);
    g->kv = one_even(o, dtype, 0, PAD + n + 3, 3);
    g->qt = one_even(o, dtype, 0, s.heads * s.latent, 5);
    g->q = one_even(o, dtype, 0, s.heads * (s.nope + s.rope), 3);
    g->cache = one_bulk(o, 0, 1);
    g->partial = one_bulk(o, (uint64_t)MK_MAX_ROWS * MK_MAX_SPLITS * s.heads * mk_partial_floats(s.latent) * 4, s.parts);
    g->lat = one_even(o, dtype, 0, s.heads * s.latent, s.heads * g->cs);
    g->m = (mk_mla){.heads = (uint16_t)s.heads, .latent = (uint16_t)s.latent, .rope = (uint16_t)s.rope, .qk_stride = (uint16_t)(s.nope + s.rope),
                    .all_heads = s.heads, .scale = (float)(1 / sqrt((double)s.nope + s.rope)), .eps = 1e-6f, .rotary = (uint8_t)s.rotary,
                    .parts = s.parts, .cache = s.fp8 ? MK_CACHE_FP8 : MK_CACHE_ACT};
    g->m.param_off = one_param(o, g->gamma, s.latent);
    if (s.rotary) one_param(o, g->freq, s.rope / 2);
    one_alloc(o, 1, 64, STREAMS, s.context, row_bytes(&s));
    for (int i = 0; i < STREAMS; i++) g->store[i] = need(calloc((size_t)s.context * n, sizeof(double)));
    return g;
}

static void rig_free(rig *g)
{
    for (int i = 0; i < STREAMS; i++) free(g->store[i]);
    free(g->gamma);
    one_free(g->o);
    free(g);
}

static float as_act(const rig *g, float x)
{
    return g->s.act_f32 ? x : mk_round_bf16(x);
}

/* Inputs of a token: the same however it is reached. */
static void kv_input(const rig *g, uint32_t stream, uint32_t pos, float *kv)
{
    uint32_t n = PAD + g->s.latent + g->s.rope + 3;
    one_fill(77000 * (uint64_t)stream + pos, kv, n, 1.3);
    for (uint32_t i = 0; i < n; i++) kv[i] = as_act(g, kv[i]);
}
static void q_input(const rig *g, uint32_t stream, uint32_t pos, float *qt, float *q)
{
    uint32_t a = g->s.heads * g->s.latent, b = g->s.heads * (g->s.nope + g->s.rope);
    one_fill(99 + 77000 * (uint64_t)stream + pos, qt, a, 0.8);
    one_fill(55 + 79000 * (uint64_t)stream + pos, q, b, 0.8);
    for (uint32_t i = 0; i < a; i++) qt[i] = as_act(g, qt[i]);
    for (uint32_t i = 0; i < b; i++) q[i] = as_act(g, q[i]);
}

static void rotate(const rig *g, double *x, uint32_t pos)
{
    for (uint32_t i = 0; g->s.rotary && i < g->s.rope / 2; i++) {
        double a = (double)((float)pos * g->freq[i]), x0 = x[2 * i], x1 = x[2 * i + 1]; /* the angle is an f32 product in the reference too */
        x[2 * i] = x0 * cos(a) - x1 * sin(a);
        x[2 * i + 1] = x0 * sin(a) + x1 * cos(a);
    }
}

static void publish_kv(rig *g, uint32_t r)
{
    float *kv = need(malloc((PAD + g->s.latent + g->s.rope + 3) * sizeof *kv));
    kv_input(g, g->o->step.row[r].slot, g->o->step.row[r].pos, kv);
    one_put(g->o, g->kv, r, kv, NULL);
    free(kv);
}

/* KV_APPEND on the rows of the step; the expected cache rows go to the store. */
static void append(rig *g)
{
    onestep *o = g->o;
    uint32_t n = g->s.latent + g->s.rope;
    float *kv = need(malloc((PAD + n + 3) * sizeof *kv));
    for (uint32_t r = 0; r < o->step.nrows; r++) {
        publish_kv(g, r);
        const mk_row *row = &o->step.row[r];
        kv_input(g, row->slot, row->pos, kv);
        double *x = g->store[row->slot] + (size_t)row->pos * n, sq = 0;
        for (uint32_t i = 0; i < n; i++) x[i] = (double)kv[PAD + i];
        for (uint32_t i = 0; i < g->s.latent; i++) sq += x[i] * x[i];
        for (uint32_t i = 0; i < g->s.latent; i++) x[i] *= (double)g->gamma[i] / sqrt(sq / g->s.latent + (double)g->m.eps);
        rotate(g, x + g->s.latent, row->pos);
    }
    one_insn(o, MK_OP_KV_APPEND);
    one_wait(o, g->kv);
    one_to(o, g->cache, 0);
    o->in.mla = g->m;
    o->in.mla.in_off = PAD;
    assert_false(one_ready(o, g->cache, 0, 0));
    one_run(o, 0);
    assert_true(one_ready(o, g->cache, 0, 0));
    free(kv);
}

/* The cache row as the machine has it, and its address. */
static const uint8_t *cache_row(const rig *g, uint32_t slot, uint32_t pos)
{
    const onestep *o = g->o;
    uint32_t page = o->mem.page[slot * o->mem.max_pages + pos / MK_PAGE];
    return o->mem.kv + page * o->prog.info.kv_page_bytes + pos % MK_PAGE * (o->prog.info.kv_page_bytes / MK_PAGE);
}
static float cache_value(const rig *g, uint32_t slot, uint32_t pos, uint32_t i)
{
    const uint8_t *p = cache_row(g, slot, pos);
    float f;
    uint16_t h;
    if (g->s.fp8 && i < g->s.latent) {
        memcpy(&f, p + g->s.latent + i / 128 * 4, 4);
        return (float)(one_e4m3(p[i]) * (double)f);
    }
    if (g->s.fp8) p = p + row_bytes(&g->s) - 2 * (g->s.latent + g->s.rope); /* where value 0 would be, had all of them two bytes */
    if (g->s.act_f32) {
        memcpy(&f, p + 4 * i, 4);
        return f;
    }
    memcpy(&h, p + 2 * i, 2);
    return mk_bf16_to_f32(h);
}

/* Fills the cache of a stream up to, without, pos by writing rows directly (fast), store alike. */
static void prefill(rig *g, uint32_t slot, uint32_t pos)
{
    uint32_t n = g->s.latent + g->s.rope;
    float *v = need(malloc(n * sizeof *v));
    for (uint32_t t = 0; t < pos; t++) {
        uint8_t *p = (uint8_t *)cache_row(g, slot, t);
        one_fill(123000 * (uint64_t)slot + t, v, n, 1.0);
        for (uint32_t i = 0; g->s.fp8 && i < g->s.latent; i++) {
            uint32_t scale = mk_latent_scale(mk_f32_bits(i / 128 % 2 ? 3.0f : 0.75f));
            p[i] = mk_latent_code(i % 5 ? v[i] : v[i] / 512, scale);
            memcpy(p + g->s.latent + i / 128 * 4, &scale, 4);
        }
        if (g->s.fp8) p = p + row_bytes(&g->s) - 2 * n;
        for (uint32_t i = g->s.fp8 ? g->s.latent : 0; i < n; i++) {
            v[i] = as_act(g, v[i]);
            uint16_t h = mk_f32_to_bf16(v[i]);
            if (g->s.act_f32)
                memcpy(p + 4 * i, &v[i], 4);
            else
                memcpy(p + 2 * i, &h, 2);
            g->store[slot][(size_t)t * n + i] = (double)v[i];
        }
    }
    free(v);
}

/* One part of MLA_PARTIAL. */
static void run_part(rig *g, uint32_t part)
{
    onestep *o = g->o;
    one_insn(o, MK_OP_MLA_PARTIAL);
    one_wait(o, g->qt);
    one_wait(o, g->q);
    one_wait(o, g->cache);
    one_to(o, g->partial, 0);
    o->in.mla = g->m;
    o->in.mla.in_off = g->s.nope;
    o->in.mla.part = part;
    one_run(o, part & 1);
}

static void publish_q(rig *g)
{
    onestep *o = g->o;
    float *qt = need(malloc(g->s.heads * g->s.latent * sizeof *qt)), *q = need(malloc(g->s.heads * (g->s.nope + g->s.rope) * sizeof *q));
    for (uint32_t r = 0; r < o->step.nrows; r++) {
        q_input(g, o->step.row[r].slot, o->step.row[r].pos, qt, q);
        one_put(o, g->qt, r, qt, NULL);
        one_put(o, g->q, r, q, NULL);
    }
    free(qt);
    free(q);
    memset(one_bulk_at(o, g->partial), 0xff, o->prog.vec[g->partial].width);
}

/* MLA_PARTIAL on all parts (alternating workers), then COMBINE for all heads. out[row][heads * latent]. */
static void attend(rig *g, float *out)
{
    onestep *o = g->o;
    uint32_t width = g->s.heads * g->s.latent;
    publish_q(g);
    for (uint32_t part = 0; part < g->s.parts; part++) {
        assert_false(one_ready(o, g->partial, 0, 0));
        run_part(g, part);
    }
    assert_true(one_ready(o, g->partial, 0, 0));
    for (uint32_t i = 0; i < g->s.heads * g->cs; i++) {
        uint32_t cw = g->s.latent / g->cs;
        one_insn(o, MK_OP_COMBINE);
        one_wait(o, g->partial);
        one_to(o, g->lat, i);
        o->in.mla = g->m;
        o->in.mla.head0 = i / g->cs;
        o->in.mla.heads = 1;
        o->in.mla.first = i % g->cs * cw;
        o->in.mla.n = cw;
        one_run(o, i & 1);
    }
    for (uint32_t r = 0; r < o->step.nrows; r++) one_get(o, g->lat, r, 0, width, out + (size_t)r * width);
}

/* The same in double. In default precision the cache holds bf16: `rounded` takes the values that the machine has. */
static void reference(const rig *g, uint32_t stream, uint32_t pos, int rounded, double *out)
{
    uint32_t L = g->s.latent, R = g->s.rope, n = L + R, width = g->s.heads * L, qk = g->s.nope + R;
    float *qt = need(malloc(width * sizeof *qt)), *q = need(malloc(g->s.heads * qk * sizeof *q));
    double *p = need(malloc((pos + 1) * sizeof *p)), *c = need(malloc((size_t)(pos + 1) * n * sizeof *c)), pe[256];
    for (uint32_t t = 0; t <= pos; t++)
        for (uint32_t i = 0; i < n; i++)
            c[(size_t)t * n + i] = rounded ? (double)cache_value(g, stream, t, i) : g->store[stream][(size_t)t * n + i];
    q_input(g, stream, pos, qt, q);
    for (uint32_t h = 0; h < g->s.heads; h++) {
        double max = -1e300, sum = 0;
        for (uint32_t i = 0; i < R; i++) pe[i] = (double)q[h * qk + g->s.nope + i];
        rotate(g, pe, pos);
        for (uint32_t t = 0; t <= pos; t++) {
            const double *x = c + (size_t)t * n;
            double s = 0;
            for (uint32_t i = 0; i < L; i++) s += (double)qt[h * L + i] * x[i];
            for (uint32_t i = 0; i < R; i++) s += pe[i] * x[L + i];
            p[t] = s * (double)g->m.scale;
            max = fmax(max, p[t]);
        }
        for (uint32_t t = 0; t <= pos; t++) sum += p[t] = exp(p[t] - max);
        for (uint32_t i = 0; i < L; i++) out[h * L + i] = 0;
        for (uint32_t t = 0; t <= pos; t++)
            for (uint32_t i = 0; i < L; i++) out[h * L + i] += p[t] / sum * c[(size_t)t * n + i];
    }
    free(qt);
    free(q);
    free(p);
    free(c);
}

/* ---- KV_APPEND ------------------------------------------------------------------------------------------------------- */

static void append_case(shape s)
{
    rig *g = rig_new(s);
    uint32_t n = s.latent + s.rope, pos[STREAMS] = {0, 61, 130, 5};
    float *first = need(malloc(STREAMS * 40 * n * sizeof *first));
    double worst = 0;
    for (int round = 0; round < 5; round++) {
        one_begin(g->o);
        for (uint32_t i = 0; i < STREAMS; i++)
            for (uint32_t k = 0; k < (i == 1 ? 4 : 1); k++) one_row(g->o, i, pos[i]++); /* 7 rows; stream 1 crosses a page */
        append(g);
        for (uint32_t r = 0; r < g->o->step.nrows; r++) {
            const mk_row *row = &g->o->step.row[r];
            for (uint32_t i = 0; i < n; i++) {
                float v = cache_value(g, row->slot, row->pos, i);
                const double *x = g->store[row->slot] + (size_t)row->pos * n;
                if (s.fp8 && i < s.latent) { /* the nearest that there is, give or take what f32 does */
                    double scale = group_scale(x, s.latent, i), step = fmax(ldexp(1, -9), exp2(floor(log2(fabs(x[i]) / scale + 1e-30)) - 3));
                    float stored;
                    memcpy(&stored, cache_row(g, row->slot, row->pos) + s.latent + i / 128 * 4, 4);
                    assert_true((double)stored == scale);
                    if (!(fabs((double)v - x[i]) <= scale * step * 0.5001)) fail_msg("cached value %u is %g, expected %g to half a step of %g", i, (double)v, x[i], scale * step);
                    first[(r + 8 * (uint32_t)round) * n + i] = v;
                    continue;
                }
                double e = (s.act_f32 ? one_close : one_close_bf16)("cache", &v, &x[i], 1, 1.0, 2e-6);
                if (e > worst) worst = e;
                first[(r + 8 * (uint32_t)round) * n + i] = v;
            }
        }
        /* each alone: the same bits */
        mk_step together = g->o->step;
        for (uint32_t r = 0; r < together.nrows; r++) {
            one_begin(g->o);
            one_row(g->o, together.row[r].slot, together.row[r].pos);
            append(g);
            for (uint32_t i = 0; i < n; i++) {
                float v = cache_value(g, together.row[r].slot, together.row[r].pos, i);
                one_same("cache row alone", &v, &first[(r + 8 * (uint32_t)round) * n + i], 1);
            }
        }
    }
    /* nothing else was written: rows behind the last, and every page that no stream reached */
    for (uint32_t i = 0; i < STREAMS; i++)
        for (uint32_t t = pos[i]; t < s.context; t++)
            for (uint32_t b = 0; b < row_bytes(&s); b++) assert_int_equal(cache_row(g, i, t)[b], 0xff);
    print_message("kv_append latent %u rope %u rotary %d act_f32 %d fp8 %d: max error %.2g\n", s.latent, s.rope, s.rotary, s.act_f32, s.fp8, worst);
    free(first);
    rig_free(g);
}

static void test_append(void **state)
{
    (void)state;
    append_case((shape){.heads = 1, .latent = 512, .rope = 64, .nope = 128, .parts = 1, .context = 200, .rotary = 0, .act_f32 = 0});
    append_case((shape){.heads = 1, .latent = 512, .rope = 64, .nope = 128, .parts = 1, .context = 200, .rotary = 1, .act_f32 = 1});
    append_case((shape){.heads = 1, .latent = 64, .rope = 16, .nope = 16, .parts = 1, .context = 200, .rotary = 1, .act_f32 = 0});
    append_case((shape){.heads = 1, .latent = 64, .rope = 0, .nope = 16, .parts = 1, .context = 200, .rotary = 0, .act_f32 = 1});
    append_case((shape){.heads = 1, .latent = 512, .rope = 64, .nope = 128, .parts = 1, .context = 200, .rotary = 1, .fp8 = 1});
    append_case((shape){.heads = 1, .latent = 208, .rope = 16, .nope = 16, .parts = 1, .context = 200, .rotary = 0, .fp8 = 1});
}

/* mk_latent_scale and mk_latent_code at their edges and at random. */
static void test_latent_scale(void **state)
{
    (void)state;
    static const struct {
        float top, scale;
    } edge[] = {{448, 1}, {448.0001f, 2}, {224, 0.5f}, {447.9f, 1}, {1.75f, 0x1p-8f}, {0, 0x1p-100f}, {0x1p-120f, 0x1p-100f}, {57344, 128}, {57345, 128}, {3e38f, 128}};
    for (size_t i = 0; i < sizeof edge / sizeof *edge; i++) assert_true(mk_bits_f32(mk_latent_scale(mk_f32_bits(edge[i].top))) == edge[i].scale);
    assert_true(isnan(mk_bits_f32(mk_latent_scale(mk_f32_bits(INFINITY)))) && isnan(mk_bits_f32(mk_latent_scale(0x7fc00000u))));
    assert_int_equal(mk_latent_code(1e9f, mk_latent_scale(mk_f32_bits(1e9f))), 0x7e); /* 448 */
    uint64_t s = 17;
    for (int i = 0; i < 20000; i++) {
        float x = (float)ldexp(one_normal(&s, 1.0), (int)(one_random(&s) % 34) - 30), top = fabsf(x) * (1 + 100 * (float)one_uniform(&s));
        uint32_t scale = mk_latent_scale(mk_f32_bits(top));
        double by = (double)mk_bits_f32(scale), got = one_e4m3(mk_latent_code(x, scale)) * by, best = 1e300;
        for (uint32_t b = 0; b < 256; b++)
            if ((b & 0x7f) != 0x7f) best = fmin(best, fabs(one_e4m3(b) * by - (double)x));
        assert_true((double)top / by <= 448 && (double)top / by > 224);
        assert_true(fabs(got - (double)x) == best);
        assert_true((float)got == mk_round_bf16((float)got)); /* what attention multiplies is exact */
    }
}

/* ---- attention ------------------------------------------------------------------------------------------------------- */

/* Rows at the given positions (several of a stream stand in ascending order), together and alone. */
static void attention_case(const char *name, shape s, const uint32_t (*at)[2], uint32_t rows)
{
    rig *g = rig_new(s);
    uint32_t width = s.heads * s.latent;
    float *all = need(malloc((size_t)MK_MAX_ROWS * width * sizeof *all)), *one = need(malloc((size_t)MK_MAX_ROWS * width * sizeof *one));
    double *want = need(malloc(width * sizeof *want)), worst = 0;
    for (uint32_t r = 0; r < rows; r++)
        if (r == 0 || at[r][0] != at[r - 1][0]) prefill(g, at[r][0], at[r][1]);
    one_begin(g->o);
    for (uint32_t r = 0; r < rows; r++) one_row(g->o, at[r][0], at[r][1]);
    append(g);
    attend(g, all);
    for (uint32_t r = 0; r < rows; r++) {
        reference(g, at[r][0], at[r][1], !s.act_f32, want);
        double e = (s.act_f32 ? one_close : one_close_bf16)(name, all + (size_t)r * width, want, width, one_rms(want, width), 1e-5);
        if (e > worst) worst = e;
    }
    for (uint32_t r = 0; r < rows; r++) {
        one_begin(g->o);
        one_row(g->o, at[r][0], at[r][1]);
        append(g);
        attend(g, one);
        one_same("attention alone", one, all + (size_t)r * width, width);
    }
    if (s.parts > 1) { /* who computes an item does not matter */
        shape t = s;
        t.parts = 1;
        rig *k = rig_new(t);
        for (uint32_t r = 0; r < rows; r++)
            if (r == 0 || at[r][0] != at[r - 1][0]) prefill(k, at[r][0], at[r][1]);
        one_begin(k->o);
        for (uint32_t r = 0; r < rows; r++) one_row(k->o, at[r][0], at[r][1]);
        append(k);
        attend(k, one);
        one_same("one part", one, all, (size_t)rows * width);
        rig_free(k);
    }
    print_message("%s: max error %.2g of the rms\n", name, worst);
    free(all);
    free(one);
    free(want);
    rig_free(g);
}

#define POS(...) (const uint32_t[][2]){__VA_ARGS__}, sizeof((const uint32_t[][2]){__VA_ARGS__}) / 8

static void test_attention_small(void **state)
{
    (void)state;
    shape s = {.heads = 3, .latent = 32, .rope = 16, .nope = 16, .parts = 3, .context = 320, .rotary = 0, .act_f32 = 1};
    attention_case("first token", s, POS({0, 0}));
    attention_case("pages crossed", s, POS({0, 62}, {0, 63}, {0, 64}, {0, 65}, {1, 0}, {1, 1}, {2, 127}, {3, 300}));
    s.rotary = 1;
    attention_case("rotary", s, POS({0, 0}, {0, 1}, {1, 64}, {2, 200}));
    s.heads = 11, s.latent = 40, s.parts = 7, s.act_f32 = 0; /* last group of 3 heads, an odd number of lane groups */
    attention_case("bf16, 11 heads", s, POS({0, 17}, {1, 64}, {1, 65}, {2, 250}));
    s.rope = 0, s.rotary = 0, s.act_f32 = 1;
    attention_case("no positional part", s, POS({0, 17}, {2, 250}));
}

static void test_attention_real(void **state)
{
    (void)state;
    shape s = {.heads = 32, .latent = 512, .rope = 64, .nope = 128, .parts = 8, .context = 320, .rotary = 0, .act_f32 = 0};
    attention_case("32 heads x 512, bf16", s, POS({0, 0}, {1, 190}, {1, 191}, {1, 192}));
    s.fp8 = 1;
    attention_case("32 heads x 512, FP8 cache", s, POS({0, 0}, {1, 190}, {1, 191}, {1, 192}));
    s.latent = 208;
    attention_case("32 heads x 208, FP8 cache", s, POS({0, 70}, {1, 191}));
    s.latent = 512, s.fp8 = 0;
    s.heads = 12, s.rotary = 1, s.act_f32 = 1, s.parts = 5;
    attention_case("12 heads x 512, f32, rotary", s, POS({0, 40}, {1, 190}));
}

static void test_attention_long(void **state)
{
    (void)state;
    /* 66 pages are 66 splits of one page; position 4224 begins page 67: splits of two pages. 33 pages are the last with groups of eight heads. */
    shape s = {.heads = 9, .latent = 64, .rope = 16, .nope = 16, .parts = 4, .context = 5120, .rotary = 1, .act_f32 = 1};
    assert_int_equal(mk_splits(4223, 0, 0), 66);
    assert_int_equal(mk_split_pages(4224, 0, 0), 2);
    assert_int_equal(mk_splits(4224, 0, 0), 34);
    assert_true(mk_head_group(2111, 32) == 8 && mk_head_group(2112, 32) == 16 && mk_head_group(2048, 64) == 16 && mk_head_group(2048, 20) == 8);
    attention_case("position 5000", s, POS({0, 4223}, {0, 4224}, {1, 2112}, {2, 5000}));
    s.act_f32 = 0;
    attention_case("position 5000, bf16", s, POS({0, 4223}, {0, 4224}, {2, 5000}));
}

/* Scores of +-1000 and more: only max-subtracted exponentials survive; whole splits underflow to weight 0. */
static void test_attention_extreme(void **state)
{
    (void)state;
    shape s = {.heads = 4, .latent = 32, .rope = 16, .nope = 16, .parts = 2, .context = 320, .rotary = 0, .act_f32 = 1};
    rig *g = rig_new(s);
    uint32_t width = s.heads * s.latent;
    float *out = need(malloc(width * sizeof *out));
    double *want = need(malloc(width * sizeof *want));
    g->m.scale = 100.0f;
    prefill(g, 0, 260);
    one_begin(g->o);
    one_row(g->o, 0, 260);
    append(g);
    attend(g, out);
    reference(g, 0, 260, 0, want);
    one_close("scale 100", out, want, width, one_rms(want, width), 1e-3);
    free(out);
    free(want);
    rig_free(g);
}

/* Who has which partials: the items of all rows go to the parts in turn, those that rows share once, and to more parts if there are enough. */
static void parts_case(shape s, const uint32_t at[][2], uint32_t rows, const uint32_t *base)
{
    rig *g = rig_new(s);
    const uint32_t groups = 3, floats = mk_partial_floats(s.latent);
    for (uint32_t r = 0; r < rows; r++)
        if (!r || at[r][0] != at[r - 1][0]) prefill(g, at[r][0], at[r][1]);
    for (uint32_t part = 0; part < s.parts; part++) {
        one_begin(g->o);
        for (uint32_t r = 0; r < rows; r++) one_row(g->o, at[r][0], at[r][1]);
        append(g);
        publish_q(g);
        run_part(g, part);
        const float *p = one_bulk_at(g->o, g->partial);
        for (uint32_t r = 0; r < MK_MAX_ROWS; r++)
            for (uint32_t split = 0; split < MK_MAX_SPLITS; split++)
                for (uint32_t h = 0; h < s.heads; h++, p += floats) {
                    const uint32_t pos = at[r % rows][1], item = split * groups + h / mk_head_group(pos, s.heads);
                    const int ours = r < rows && split <= pos / MK_PAGE && (item + base[r]) % s.parts == part;
                    for (uint32_t i = 0; i < s.latent + 2; i++) assert_int_equal(!isnan(p[i]), ours);
                }
    }
    rig_free(g);
}
static void test_parts(void **state)
{
    (void)state;
    const shape s = {.heads = 19, .latent = 32, .rope = 16, .nope = 16, .parts = 4, .context = 320, .rotary = 0, .act_f32 = 1};
    shape many = s;
    many.parts = 13;
    const uint32_t streams[][2] = {{0, 300}, {1, 10}, {2, 130}}, one[][2] = {{0, 62}, {0, 63}, {0, 64}, {1, 5}};
    parts_case(s, streams, 3, (const uint32_t[]){0, 5 * 3, 5 * 3 + 3});
    parts_case(s, one, 4, (const uint32_t[]){0, 0, 0, 2 * 3});         /* three have the items of the last one */
    parts_case(many, one, 4, (const uint32_t[]){0, 3, 3 + 3, 3 + 3 + 2 * 3}); /* four rows, and parts for four times 3 items */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_append), cmocka_unit_test(test_latent_scale),         cmocka_unit_test(test_attention_small),   cmocka_unit_test(test_attention_real),
        cmocka_unit_test(test_attention_long), cmocka_unit_test(test_attention_extreme), cmocka_unit_test(test_parts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
