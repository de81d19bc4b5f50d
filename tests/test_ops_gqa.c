/* GQA_APPEND, GQA_PARTIAL and COMBINE with its gate against attention in double, written from models.md 3.5: no splits, no pages, softmax
 * over all tokens at once. GEMV's gated sum against its plain product. */
#include "tests/support/onestep.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define STREAMS 4
#define JUNK    5 /* values in front of q, and behind v */

typedef struct shape {
    uint32_t heads, kv, dim, rope, parts, context, grain, most;
    int norm, gated, act_f32;
} shape;

typedef struct rig {
    shape s;
    onestep *o;
    uint32_t in, cache, partial, out, cs; /* cs: COMBINE slices a head */
    uint32_t width, stride, k_off, v_off;
    mk_gqa k, q;
    float *gamma[2], *freq; /* of q and of k */
    double *store[STREAMS]; /* [context][2][kv][dim]: keys and values in double from the same inputs */
} rig;

static void *need(void *p)
{
    assert_non_null(p);
    return p;
}

static rig *rig_new(shape s)
{
    rig *g = need(calloc(1, sizeof *g));
    uint32_t dtype = s.act_f32 ? MK_F32 : MK_BF16;
    onestep *o = g->o = one_new(2, s.act_f32);
    g->s = s;
    g->cs = 2;
    g->stride = s.dim * (s.gated ? 2 : 1);
    g->k_off = JUNK + s.heads * g->stride;
    g->v_off = g->k_off + s.kv * s.dim;
    g->width = g->v_off + s.kv * s.dim + JUNK;
    g->freq = need(malloc((s.rope / 2 + 1) * sizeof(float)));
    for (uint32_t i = 0; i < s.rope / 2; i++) g->freq[i] = (float)pow(10000.0, -2.0 * i / s.rope);
    g->in = one_even(o, dtype, 0, g->width, 7);
    g->cache = one_bulk(o, 0, s.kv);
    g->partial = one_bulk(o, (uint64_t)MK_MAX_ROWS * MK_MAX_SPLITS * s.heads * mk_partial_floats(s.dim) * 4, s.parts);
    g->out = one_even(o, dtype, 0, s.heads * s.dim, s.heads * g->cs);
    mk_gqa m = {.heads = (uint16_t)s.heads, .kv_heads = (uint16_t)s.kv, .dim = (uint16_t)s.dim, .rope = (uint16_t)s.rope, .norm = (uint8_t)s.norm,
                .eps = 1e-3f};
    g->k = g->q = m;
    mk_gqa *of[2] = {&g->q, &g->k};
    for (int i = 0; i < 2; i++) {
        g->gamma[i] = need(malloc(s.dim * sizeof(float)));
        one_fill(3 + (uint64_t)i, g->gamma[i], s.dim, 0.3);
        for (uint32_t j = 0; j < s.dim; j++) g->gamma[i][j] += 1.0f;
        of[i]->param_off = one_param(o, g->gamma[i], s.norm ? s.dim : 0);
        one_param(o, g->freq, s.rope / 2);
    }
    g->k.k_off = g->k_off;
    g->k.v_off = g->v_off;
    g->q.q_off = JUNK;
    g->q.q_stride = g->stride;
    g->q.scale = (float)(1 / sqrt((double)s.dim));
    g->q.parts = s.parts;
    g->q.grain = (uint8_t)s.grain;
    g->q.most = (uint8_t)s.most;
    one_alloc(o, 1, 64, STREAMS, s.context, 2 * s.kv * s.dim * (s.act_f32 ? 4 : 2));
    for (int i = 0; i < STREAMS; i++) g->store[i] = need(calloc((size_t)s.context * 2 * s.kv * s.dim, sizeof(double)));
    return g;
}

static void rig_free(rig *g)
{
    for (int i = 0; i < STREAMS; i++) free(g->store[i]);
    free(g->gamma[0]);
    free(g->gamma[1]);
    free(g->freq);
    one_free(g->o);
    free(g);
}

/* The projections of a token: the same however it is reached. */
static void input(const rig *g, uint32_t stream, uint32_t pos, float *x)
{
    one_fill(77000 * (uint64_t)stream + pos, x, g->width, 1.1);
    for (uint32_t i = 0; i < g->width && !g->s.act_f32; i++) x[i] = mk_round_bf16(x[i]);
}

/* Norm and rotation of one head in double. */
static void turn(const rig *g, int which, uint32_t pos, const float *x, double *y)
{
    double sq = 0;
    for (uint32_t i = 0; i < g->s.dim; i++) sq += (double)x[i] * (double)x[i];
    double r = g->s.norm ? 1 / sqrt(sq / g->s.dim + (double)g->q.eps) : 1;
    for (uint32_t i = 0; i < g->s.dim; i++) y[i] = (double)x[i] * r * (g->s.norm ? (double)g->gamma[which][i] : 1);
    for (uint32_t i = 0, h = g->s.rope / 2; i < h; i++) {
        double a = (double)((float)pos * g->freq[i]), u = y[i], v = y[i + h]; /* the angle is an f32 product in the reference too */
        y[i] = u * cos(a) - v * sin(a);
        y[i + h] = v * cos(a) + u * sin(a);
    }
}

/* GQA_APPEND on the rows of the step, KV heads in descending order; the expected values go to the store. */
static void append(rig *g)
{
    onestep *o = g->o;
    shape s = g->s;
    float *x = need(malloc(g->width * sizeof *x));
    for (uint32_t r = 0; r < o->step.nrows; r++) {
        const mk_row *row = &o->step.row[r];
        input(g, row->slot, row->pos, x);
        one_put(o, g->in, r, x, NULL);
        double *y = g->store[row->slot] + (size_t)row->pos * 2 * s.kv * s.dim;
        for (uint32_t h = 0; h < s.kv; h++) {
            turn(g, 1, row->pos, x + g->k_off + h * s.dim, y + h * s.dim);
            for (uint32_t i = 0; i < s.dim; i++) y[(s.kv + h) * s.dim + i] = (double)x[g->v_off + h * s.dim + i];
        }
    }
    for (uint32_t h = s.kv; h-- > 0;) {
        one_insn(o, MK_OP_GQA_APPEND);
        one_wait(o, g->in);
        one_to(o, g->cache, 0);
        o->in.gqa = g->k;
        o->in.gqa.head = (uint16_t)h;
        assert_false(one_ready(o, g->cache, 0, 0));
        one_run(o, h & 1);
    }
    assert_true(one_ready(o, g->cache, 0, 0));
    free(x);
}

/* Value i of the key (which 0) or value (1) of KV head h as the machine has it. */
static float cached(const rig *g, uint32_t slot, uint32_t pos, uint32_t h, uint32_t which, uint32_t i)
{
    const onestep *o = g->o;
    uint32_t page = o->mem.page[slot * o->mem.max_pages + pos / MK_PAGE];
    const uint8_t *p = o->mem.kv + page * o->prog.info.kv_page_bytes;
    uint64_t at = ((h * 2 + which) * (uint64_t)MK_PAGE + pos % MK_PAGE) * g->s.dim + i; /* isa.h: [kv_head][k, v][MK_PAGE][dim] */
    float f;
    uint16_t b;
    if (g->s.act_f32) {
        memcpy(&f, p + 4 * at, 4);
        return f;
    }
    memcpy(&b, p + 2 * at, 2);
    return mk_bf16_to_f32(b);
}

static void prefill(rig *g, uint32_t slot, uint32_t from, uint32_t to)
{
    for (uint32_t t = from; t < to;) {
        one_begin(g->o);
        for (int i = 0; i < 8 && t < to; i++) one_row(g->o, slot, t++);
        append(g);
    }
}

/* GQA_PARTIAL on all parts, then COMBINE for all heads. out[row][heads * dim]. */
static void attend(rig *g, float *out)
{
    onestep *o = g->o;
    uint32_t n = g->s.heads * g->s.dim;
    memset(one_bulk_at(o, g->partial), 0xff, o->prog.vec[g->partial].width);
    for (uint32_t part = 0; part < g->s.parts; part++) {
        one_insn(o, MK_OP_GQA_PARTIAL);
        one_wait(o, g->in);
        one_wait(o, g->cache);
        one_to(o, g->partial, 0);
        o->in.gqa = g->q;
        o->in.gqa.part = part;
        assert_false(one_ready(o, g->partial, 0, 0));
        one_run(o, part & 1);
    }
    assert_true(one_ready(o, g->partial, 0, 0));
    for (uint32_t i = 0; i < g->s.heads * g->cs; i++) {
        uint32_t cw = g->s.dim / g->cs;
        one_insn(o, MK_OP_COMBINE);
        one_wait(o, g->partial);
        if (g->s.gated) one_wait(o, g->in);
        one_to(o, g->out, i);
        o->in.mla = (mk_mla){.head0 = i / g->cs, .heads = 1, .latent = (uint16_t)g->s.dim, .all_heads = g->s.heads, .parts = g->s.parts,
                             .grain = (uint8_t)g->s.grain, .most = (uint8_t)g->s.most, .first = i % g->cs * cw, .n = cw, .gate = (uint8_t)g->s.gated, .in_off = g->s.gated ? JUNK + g->s.dim : 0,
                             .qk_stride = (uint16_t)(g->s.gated ? g->stride : 0)};
        one_run(o, i & 1);
    }
    for (uint32_t r = 0; r < o->step.nrows; r++) one_get(o, g->out, r, 0, n, out + (size_t)r * n);
}

/* The same in double. In default precision the cache holds bf16: the values that the machine has are taken. */
static void reference(const rig *g, uint32_t stream, uint32_t pos, double *out)
{
    shape s = g->s;
    float *x = need(malloc(g->width * sizeof *x));
    double *p = need(malloc((pos + 1) * sizeof *p)), q[512];
    input(g, stream, pos, x);
    for (uint32_t h = 0; h < s.heads; h++) {
        uint32_t kv = h / (s.heads / s.kv);
        double max = -1e300, sum = 0;
        turn(g, 0, pos, x + JUNK + h * g->stride, q);
        for (uint32_t pass = 0; pass < 2; pass++) {
            for (uint32_t i = 0; i < s.dim && pass; i++) out[h * s.dim + i] = 0;
            for (uint32_t t = 0; t <= pos; t++) {
                const double *row = g->store[stream] + (size_t)t * 2 * s.kv * s.dim + (pass * s.kv + kv) * s.dim;
                double dot = 0;
                for (uint32_t i = 0; i < s.dim; i++) {
                    double v = s.act_f32 ? row[i] : (double)cached(g, stream, t, kv, pass, i);
                    if (pass) out[h * s.dim + i] += p[t] * v;
                    else dot += q[i] * v;
                }
                if (!pass) {
                    p[t] = dot * (double)g->q.scale;
                    max = fmax(max, p[t]);
                }
            }
            for (uint32_t t = 0; t <= pos && !pass; t++) sum += p[t] = exp(p[t] - max);
        }
        for (uint32_t i = 0; i < s.dim; i++)
            out[h * s.dim + i] /= sum * (s.gated ? 1 + exp(-(double)x[JUNK + h * g->stride + s.dim + i]) : 1);
    }
    free(x);
    free(p);
}

/* Rows at the given positions (several of a stream stand in ascending order), together and alone, and with another number of parts. */
static void attention_case(const char *name, shape s, const uint32_t (*at)[2], uint32_t rows)
{
    uint32_t n = s.heads * s.dim;
    float *all = need(malloc((size_t)MK_MAX_ROWS * n * sizeof *all)), *one = need(malloc((size_t)MK_MAX_ROWS * n * sizeof *one));
    double *want = need(malloc(n * sizeof *want)), worst = 0, e;
    for (int again = 0; again < 2; again++, s.parts = 1) {
        rig *g = rig_new(s);
        for (uint32_t r = 0; r < rows; r++)
            if (r == 0 || at[r][0] != at[r - 1][0]) prefill(g, at[r][0], 0, at[r][1]);
        one_begin(g->o);
        for (uint32_t r = 0; r < rows; r++) one_row(g->o, at[r][0], at[r][1]);
        append(g);
        attend(g, again ? one : all);
        if (again) one_same("one part", one, all, (size_t)rows * n);
        for (uint32_t r = 0; r < rows && !again; r++) {
            for (uint32_t t = 0; t <= at[r][1]; t += t > 300 ? 97 : 1)
                for (uint32_t h = 0; h < s.kv; h++)
                    for (uint32_t which = 0; which < 2; which++)
                        for (uint32_t i = 0; i < s.dim; i++) {
                            float v = cached(g, at[r][0], t, h, which, i);
                            const double *y = g->store[at[r][0]] + (size_t)t * 2 * s.kv * s.dim + (which * s.kv + h) * s.dim + i;
                            (s.act_f32 ? one_close : one_close_bf16)("cache", &v, y, 1, 1.0, 4e-6);
                        }
            reference(g, at[r][0], at[r][1], want);
            e = (s.act_f32 ? one_close : one_close_bf16)(name, all + (size_t)r * n, want, n, one_rms(want, n), 1e-5);
            if (e > worst) worst = e;
        }
        for (uint32_t r = 0; r < rows && !again; r++) {
            one_begin(g->o);
            one_row(g->o, at[r][0], at[r][1]);
            append(g);
            attend(g, one);
            one_same("alone", one, all + (size_t)r * n, n);
        }
        /* nothing was written behind a stream's last token */
        for (uint32_t r = 0; r < rows; r++)
            if ((r + 1 == rows || at[r + 1][0] != at[r][0]) && at[r][1] + 1 < s.context) {
                float v = cached(g, at[r][0], at[r][1] + 1, s.kv - 1, 1, s.dim - 1);
                assert_true(isnan(v));
            }
        rig_free(g);
    }
    print_message("%s: max error %.2g of the rms\n", name, worst);
    free(all);
    free(one);
    free(want);
}

#define POS(...) (const uint32_t[][2]){__VA_ARGS__}, sizeof((const uint32_t[][2]){__VA_ARGS__}) / 8

static void test_small(void **state)
{
    (void)state;
    shape s = {.heads = 6, .kv = 2, .dim = 32, .rope = 32, .parts = 3, .context = 320, .act_f32 = 1};
    attention_case("first token", s, POS({0, 0}));
    attention_case("pages crossed", s, POS({0, 62}, {0, 63}, {0, 64}, {0, 65}, {1, 0}, {1, 1}, {2, 127}, {3, 300}));
    s.gated = s.norm = 1, s.rope = 8;
    attention_case("norm, part of a head turns, gate", s, POS({0, 0}, {0, 1}, {1, 64}, {2, 200}));
    s.act_f32 = 0, s.parts = 7, s.kv = 3, s.heads = 3;
    attention_case("the same, bf16, no groups", s, POS({0, 17}, {1, 64}, {1, 65}, {2, 250}));
    s.kv = 1, s.heads = 5, s.rope = 0;
    attention_case("one KV head, no rotation", s, POS({0, 17}, {2, 250}));
}

static void test_real(void **state)
{
    (void)state;
    attention_case("Llama 1B, bf16", (shape){.heads = 32, .kv = 8, .dim = 64, .rope = 64, .parts = 9, .context = 320}, POS({0, 0}, {1, 190}, {1, 191}));
    attention_case("Llama 1B, bf16, cut as it is planned", (shape){.heads = 32, .kv = 8, .dim = 64, .rope = 64, .parts = 9, .context = 320, .grain = 2, .most = 16},
                   POS({0, 0}, {1, 190}, {1, 191}, {1, 192}, {2, 255}, {2, 256}));
    attention_case("at most three splits", (shape){.heads = 8, .kv = 2, .dim = 64, .rope = 64, .parts = 5, .context = 320, .grain = 1, .most = 3}, POS({0, 127}, {0, 128}, {1, 319}));
    attention_case("Llama 8B, f32", (shape){.heads = 8, .kv = 2, .dim = 128, .rope = 128, .parts = 4, .context = 320, .act_f32 = 1}, POS({0, 40}, {1, 130}));
    attention_case("Qwen3-Next, bf16", (shape){.heads = 16, .kv = 2, .dim = 256, .rope = 64, .parts = 5, .context = 320, .norm = 1, .gated = 1},
                   POS({0, 40}, {1, 190}));
    attention_case("Qwen3-Next, f32", (shape){.heads = 16, .kv = 2, .dim = 256, .rope = 64, .parts = 5, .context = 320, .norm = 1, .gated = 1, .act_f32 = 1},
                   POS({0, 40}, {1, 190}));
}

static void test_long(void **state)
{
    (void)state;
    /* 66 pages are 66 splits of one page; position 4224 begins page 67: splits of two pages. */
    shape s = {.heads = 4, .kv = 2, .dim = 16, .rope = 16, .parts = 4, .context = 5120, .norm = 1, .act_f32 = 1};
    attention_case("position 5000", s, POS({0, 4223}, {0, 4224}, {1, 4222}, {2, 5000}));
}

/* GATED = residual + sigmoid(gate) * (what STORE gives). */
static void test_gated(void **state)
{
    (void)state;
    enum { N = 24, K = 96, ROWS = 5 };
    for (int local = 0; local < 2; local++) {
        onestep *o = one_new(1, 1);
        uint32_t in = one_even(o, MK_F32, 0, K, 3), plain = one_even(o, MK_F32, 0, N, 1), res = one_even(o, MK_F32, 0, N, 1);
        uint32_t gate = one_even(o, MK_F32, 0, 3, 2), out = local ? one_local(o, MK_MAX_ROWS * N * 4) : one_even(o, MK_F32, 0, N, 1);
        float x[K], r[ROWS][N], g[ROWS][3], y[N], got[N];
        one_alloc(o, 1, 64, ROWS, 64, 64);
        uint64_t bytes = mk_segment_bytes(MK_W_BF16, N, K, 0, 128), seed = 4;
        uint16_t *tape = (uint16_t *)(void *)one_tape(o, bytes);
        for (uint64_t i = 0; i < bytes / 2; i++) tape[i] = mk_f32_to_bf16(one_normal(&seed, 0.2));
        one_begin(o);
        for (uint32_t i = 0; i < ROWS; i++) {
            one_row(o, i, 3);
            one_fill(50 + i, x, K, 1);
            one_fill(60 + i, r[i], N, 1);
            one_fill(70 + i, g[i], 3, 3);
            one_put(o, in, i, x, NULL);
            one_put(o, res, i, r[i], NULL);
            one_put(o, gate, i, g[i], NULL);
        }
        for (int gated = 0; gated < 2; gated++) {
            one_insn(o, MK_OP_GEMV);
            one_wait(o, in);
            if (gated) one_wait(o, res), one_wait(o, gate);
            one_to(o, gated ? out : plain, 0);
            o->in.gemv = (mk_gemv){.n = N, .k = K, .wtype = MK_W_BF16, .epilogue = gated ? MK_EPI_GATED : MK_EPI_STORE, .scale_k = 128, .k_chunk = K,
                                   .scale = 1, .gate_off = gated ? 1 : 0};
            one_run(o, 0);
        }
        for (uint32_t i = 0; i < ROWS; i++) {
            double want[N];
            one_get(o, plain, i, 0, N, y);
            if (local) memcpy(got, (float *)one_local_at(o, 0, out) + (size_t)i * N, sizeof got);
            else one_get(o, out, i, 0, N, got);
            for (uint32_t k = 0; k < N; k++) want[k] = (double)r[i][k] + (double)y[k] / (1 + exp(-(double)g[i][1]));
            one_close("gated", got, want, N, 1.0, 2e-6);
        }
        one_free(o);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_small),
        cmocka_unit_test(test_real),
        cmocka_unit_test(test_long),
        cmocka_unit_test(test_gated),
    };
    return cmocka_run_group_tests_name("grouped-query attention", tests, NULL, NULL);
}
