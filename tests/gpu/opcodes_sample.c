/* SAMPLE; the list of all cases and the negative controls. */
#include "tests/gpu/opcodes.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Logits as drawn; many equal ones; multiples of 1/32 and their neighbours; all close together; about 0; far apart, with some infinite ones and some that are no number. Where most weigh the same, one token
 * too many or too few in a prefix is another choice. */
enum shape { AS_DRAWN, FLAT, ON_A_GRID, CLOSE, ABOUT_0, FAR_APART };
/* How rows draw: all ways by turns; by top-p alone, which draws without it often miss; by top-k of few. */
enum ways { ALL_WAYS, BY_TOP_P, BY_FEW };
typedef struct sample_arg {
    uint32_t vocab, slices;
    enum shape shape;
    uint32_t helpers;
    enum ways ways;
} sample_arg;

static float shaped(enum shape shape, float l, uint32_t i)
{
    const float on = roundf(4 * l) / 32;
    switch (shape) {
    case FLAT: return roundf(l / 2);
    case ON_A_GRID: return i % 3 ? nextafterf(on, i % 3 == 1 ? INFINITY : -INFINITY) : on;
    case CLOSE: return 1 + l * 0x1p-12f;
    case ABOUT_0: return i % 50 ? l * 0x1p-10f : i % 100 ? -0.0f : 0.0f;
    case FAR_APART: return i % 89 == 3 ? -INFINITY : i % 97 == 5 ? NAN : 400 * l;
    default: return l;
    }
}

static void sample_make(mk_case *c, const void *arg)
{
    const sample_arg *a = arg;
    case_even(c, "stats", MK_F32, 0, 4 * a->slices, a->slices);
    case_bulk(c, "logits", (uint64_t)MK_MAX_ROWS * a->vocab * 4, a->slices);
    case_local(c, "sampled", sizeof(mk_sampled));
    for (uint32_t w = 0; w <= a->helpers; w++) {
        mk_insn *in = case_add(c, w, MK_OP_SAMPLE);
        in->layer = MK_NONE;
        in->sample = (mk_sample){.vocab = a->vocab, .slices = a->slices, .helper = (uint16_t)w, .helpers = (uint16_t)a->helpers};
        case_wait(c, in, 0);
        case_wait(c, in, 1);
        if (!w) case_to(c, in, 2, 0);
    }
    case_seal(c, &(case_sizes){0});
    static const mk_sampling s[][CASE_STREAMS] = {[ALL_WAYS] = {{.temperature = 0, .top_p = 1},
                                                                {.temperature = 1, .top_p = 1, .seed = 3},
                                                                {.temperature = 0.7f, .top_p = 1, .top_k = 50, .seed = 4},
                                                                {.temperature = 1.3f, .top_p = 0.9f, .seed = 5},
                                                                {.temperature = 1, .top_p = 1, .min_p = 0.1f, .seed = 6},
                                                                {.temperature = 0.9f, .top_p = 0.8f, .min_p = 0.01f, .top_k = 200, .seed = 7}},
                                                  [BY_TOP_P] = {{.temperature = 1, .top_p = 0.9f, .seed = 3},
                                                                {.temperature = 1, .top_p = 0.5f, .seed = 4},
                                                                {.temperature = 0.7f, .top_p = 0.3f, .seed = 5},
                                                                {.temperature = 1.3f, .top_p = 0.01f, .seed = 6},
                                                                {.temperature = 1, .top_p = 0.95f, .min_p = 0.1f, .seed = 7},
                                                                {.temperature = 3, .top_p = 0.7f, .seed = 8}},
                                                  [BY_FEW] = {{.temperature = 1, .top_p = 1, .top_k = 20, .seed = 3},
                                                              {.temperature = 1, .top_p = 1, .top_k = 20, .min_p = 0.5f, .seed = 4},
                                                              {.temperature = 0.7f, .top_p = 0.8f, .top_k = 20, .seed = 5},
                                                              {.temperature = 2, .top_p = 1, .top_k = 1, .seed = 6},
                                                              {.temperature = 2, .top_p = 0.9f, .top_k = 64, .seed = 7},
                                                              {.temperature = 1, .top_p = 0.95f, .top_k = 10, .min_p = 0.3f, .seed = 8}}}; /* rows of the streams behind these draw nothing */
    for (uint32_t i = 0; i < CASE_STREAMS; i++) c->mem.slot[i].sampling = s[a->ways][i];
}

static void sample_feed(mk_case *c, const void *arg)
{
    const sample_arg *a = arg;
    mk_vec *v = &c->prog.vec[0];
    case_signalled(c, 1);
    for (uint32_t r = 0; r < c->step.nrows; r++) {
        float *l = (float *)c->mem.bulk + (uint64_t)r * a->vocab;
        uint32_t id = c->row_id[r];
        c->step.row[r].flags |= id == 6 ? 0 : MK_ROW_LOGITS | (id == 7 ? MK_ROW_SCORE : MK_ROW_SAMPLE);
        c->step.row[r].target = id * 31 % a->vocab;
        c->step.any_logits = 1;
        case_fill(c, 7400, id, l, a->vocab, 3);
        for (uint32_t i = 0; i < a->vocab; i++) l[i] = shaped(a->shape, l[i], i);
        for (uint32_t s = 0; s < a->slices; s++) {
            uint32_t lo = mk_start(s, a->vocab, a->slices), hi = mk_start(s + 1, a->vocab, a->slices), best = lo;
            double sum = 0;
            for (uint32_t i = lo; i < hi; i++)
                if (l[i] > l[best] || isnan(l[best])) best = i;
            for (uint32_t i = lo; i < hi; i++) sum += isnan(l[i]) ? 0 : exp((double)(l[i] - l[best]));
            float stats[4] = {l[best], 0, (float)sum, 0};
            memcpy(&stats[1], &best, 4);
            if (id == 6) stats[0] = -INFINITY, memset(&stats[1], 0xff, 4), stats[2] = 0;
            mk_insn in = {.signal_vec = 0, .signal_pub = c->pub[0]};
            mk_ctx x = {.prog = &c->prog, .in = &in, .mem = &c->mem, .step = &c->step, .epoch0 = c->epoch0};
            mk_publish(&x, r, s, stats, 0);
        }
    }
    (void)v;
}

#define S(...) sample_make, sample_feed, &(const sample_arg){__VA_ARGS__}, 0
/* The same, with so many helpers, each on a worker of its own. */
#define HELPED(n, ...) sample_make, sample_feed, &(const sample_arg){.helpers = n, __VA_ARGS__}, n + 1

const case_spec sample_cases[] = {
    {"SAMPLE", "vocabulary 515 in 8 slices", S(.vocab = 515, .slices = 8)},
    {"SAMPLE", "vocabulary 32,000 in 264 slices, many ties", S(.vocab = 32000, .slices = 264, .shape = FLAT)},
    {"SAMPLE", "vocabulary 163,840 in 1,320 slices", S(.vocab = 163840, .slices = 1320)},
    {"SAMPLE", "vocabulary 163,840, 131 helpers", HELPED(131, .vocab = 163840, .slices = 1320)},
    {"SAMPLE", "vocabulary 163,840, 131 helpers, by top-p", HELPED(131, .vocab = 163840, .slices = 1320, .ways = BY_TOP_P)},
    {"SAMPLE", "vocabulary 32,000, 5 helpers, many ties, by top-p", HELPED(5, .vocab = 32000, .slices = 264, .shape = FLAT, .ways = BY_TOP_P)},
    {"SAMPLE", "vocabulary 50,304, 39 helpers, far apart, by top-p", HELPED(39, .vocab = 50304, .slices = 400, .shape = FAR_APART, .ways = BY_TOP_P)},
    {"SAMPLE", "vocabulary 163,840, 131 helpers, few", HELPED(131, .vocab = 163840, .slices = 1320, .ways = BY_FEW)},
    {"SAMPLE", "vocabulary 32,000 in 264 slices, few", S(.vocab = 32000, .slices = 264, .ways = BY_FEW)},
    {"SAMPLE", "vocabulary 32,000, 5 helpers, on a grid and beside it, few", HELPED(5, .vocab = 32000, .slices = 264, .shape = ON_A_GRID, .ways = BY_FEW)},
    {"SAMPLE", "vocabulary 151,936, 7 helpers, many ties", HELPED(7, .vocab = 151936, .slices = 1200, .shape = FLAT)},
    {"SAMPLE", "vocabulary 163,840, 131 helpers, on a grid and beside it", HELPED(131, .vocab = 163840, .slices = 1320, .shape = ON_A_GRID)},
    {"SAMPLE", "vocabulary 20,011, 12 helpers, on a grid and beside it", HELPED(12, .vocab = 20011, .slices = 160, .shape = ON_A_GRID)},
    {"SAMPLE", "vocabulary 129,280, 131 helpers, close together", HELPED(131, .vocab = 129280, .slices = 1056, .shape = CLOSE)},
    {"SAMPLE", "vocabulary 32,000, 15 helpers, about 0", HELPED(15, .vocab = 32000, .slices = 264, .shape = ABOUT_0)},
    {"SAMPLE", "vocabulary 50,304, 39 helpers, far apart", HELPED(39, .vocab = 50304, .slices = 400, .shape = FAR_APART)},
    {"SAMPLE", "vocabulary 37, 63 helpers", HELPED(63, .vocab = 37, .slices = 30)},
    {0},
};

static const case_spec *const all[] = {matrix_cases, expert_cases, state_cases, attention_cases, sample_cases};

const case_spec *case_next(const case_spec *s)
{
    if (!s) return all[0];
    if (s[1].op) return s + 1;
    for (uint32_t i = 0; i + 1 < sizeof all / sizeof *all; i++)
        for (const case_spec *x = all[i]; x->op; x++)
            if (x == s) return all[i + 1];
    return NULL;
}

const case_spec *case_named(const char *op, const char *name)
{
    const case_spec *s = case_next(NULL);
    while (s && (strcmp(s->op, op) || strcmp(s->name, name))) s = case_next(s);
    return s;
}

/* ---- what must be found ---------------------------------------------------------------------------------------------- */

static void shift_scales(mk_insn *in)
{
    in->gemv.phase = (uint16_t)(in->gemv.phase - (in->gemv.phase >= 4 ? 4 : 0));
}
static void input_off_by_one(mk_insn *in) { in->gemv.in_off++; }
static void forget_residual_scale(mk_insn *in) { in->gemv.scale = 1.02f; }
static void drop_bias(mk_insn *in) { in->route.has_bias = 0; }
static void other_gamma(mk_insn *in) { in->router.param_off ^= 1; }
static void up_other_slice(mk_insn *in) { in->expert.base -= 128; }
static void down_phase(mk_insn *in) { in->expert.phase = (uint16_t)(in->expert.phase > 2 ? in->expert.phase - 3 : in->expert.phase + 3); }
static void head_eps(mk_insn *in) { in->lm_head.eps = 0.1f; }
static void delta_keys(mk_insn *in) { in->delta.k_off++; }
static void delta_gate(mk_insn *in) { in->delta.b_off++; }
static void no_rotation(mk_insn *in) { in->mla.rotary = 0; }
static void softmax_scale(mk_insn *in) { in->mla.scale *= 1.01f; }
static void combine_head(mk_insn *in) { in->mla.head0 ^= 1; }

/* The half of the first vector that the case does not use. */
static void stray_write(mk_case *c)
{
    const mk_vec *v = &c->prog.vec[0];
    c->gpu.exchange[mk_packet_offset(v, !mk_half(v, c->step.seq, c->pub[0]), 0, 0)] ^= 1;
}
/* The first value that the first instruction publishes, in bf16. */
static void no_number(mk_case *c)
{
    const mk_insn *in = c->in[0];
    const mk_vec *v = &c->prog.vec[in->signal_vec];
    const uint16_t nan = 0x7fc0;
    memcpy(c->gpu.exchange + mk_packet_offset(v, mk_half(v, c->step.seq, in->signal_pub), 0, in->signal_slice), &nan, 2);
}

/* An addend of nothing in a sum that the first ROUTE clears. */
static void addend_left(mk_case *c)
{
    const mk_insn *in = c->in[0];
    const mk_vec *v = &c->prog.vec[in->wait[1].vec];
    *((uint64_t *)(c->gpu.bulk + v->offset) + mk_sum_at(in->route.experts, mk_half(v, c->step.seq, in->wait[1].pub) ^ 1, 0, 0)) = mk_sum_word(0);
}

const case_wrong case_wrongs[] = {
    {"scale segment shifted by 4 rows", "GEMV", "fp8 k 2304, 17|18|17 rows, f32 in", shift_scales, NULL},
    {"input off by one value", "GEMV", "fp8 k 200 from 3, 127|128|1 rows", input_off_by_one, NULL},
    {"2 % too much", "GEMV", "fp8 rms k 2304, 17|18|17 rows", forget_residual_scale, NULL},
    {"another epsilon", "LM_HEAD", "bf16 k 2304, 128|128|57 rows", head_eps, NULL},
    {"bias dropped", "ROUTE", "256 experts, sigmoid, bias, top 8", drop_bias, NULL},
    {"gamma of a neighbour", "ROUTER", "256 experts, slices of 18", other_gamma, NULL},
    {"an addend of nothing not cleared", "ROUTE", "256 experts, sigmoid, bias, top 8", NULL, addend_left},
    {"expert memory off by 128 bytes", "EXPERT_UP", "fp8 512 experts, k 2048, inter 512 in 14", up_other_slice, NULL},
    {"scale segment shifted by 3 rows", "EXPERT_DOWN", "fp8 256 experts, inter 1024, 17|18|17, local", down_phase, NULL},
    {"keys off by one channel", "DELTA_STEP", "decay by channel, dv 128, sigmoid", delta_keys, NULL},
    {"beta of the next head", "DELTA_STEP", "decay by channel, dv 128, sigmoid", delta_gate, NULL},
    {"keys not rotated", "KV_APPEND", "latent 512, rope 64, rotated", no_rotation, NULL},
    {"softmax scale off by 1 %", "MLA_PARTIAL", "32 heads, 512 + 64, to 9000", softmax_scale, NULL},
    {"another head's partials", "COMBINE", "8 heads of 512 in 4 slices, to 9000", combine_head, NULL},
    {"a stray write into the exchange", "GEMV", "fp8 k 256, 128|128|128 rows", NULL, stray_write},
    {"a bf16 that is no number", "GEMV", "fp8 k 256, 128|128|128 rows", NULL, no_number},
};
const uint32_t n_case_wrongs = sizeof case_wrongs / sizeof *case_wrongs;
