/* mkd against Hugging Face transformers (tests/oracle): the gates of design.md section 11, their negative controls, and row invariance
 * on the same checkpoint. */
#include "tests/support/edit.h"
#include "tests/support/rig.h"
#include "tests/support/tmp.h"

#include "host/checkpoint.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#define DIR    "tests/oracle/kimi_linear"
#define PROMPT 300
#define GREEDY 64
#define LAYERS 3 /* MoE layers */
#define TOPK   3
#define VOCAB  515

typedef struct golden {
    mk_checkpoint *file;
    const int32_t *prompt, *greedy, *router, *greedy_router;
    const float *logits, *margin, *greedy_margin, *greedy_router_margin;
} golden;

static const void *tensor(golden *g, const char *name, uint64_t bytes)
{
    const mk_tensor *t = mk_checkpoint_find(g->file, name);
    if (!t || t->bytes != bytes) fail_msg("golden: tensor %s is missing or has the wrong size", name);
    return t->data;
}

static golden load(void)
{
    golden g = {0};
    mk_err err = {0};
    if (mk_checkpoint_open_file(DIR "/golden.safetensors", &g.file, &err)) fail_msg("%s", err.msg);
    g.prompt = tensor(&g, "prompt", PROMPT * 4);
    g.logits = tensor(&g, "logits", (uint64_t)PROMPT * VOCAB * 4);
    g.router = tensor(&g, "router_idx", LAYERS * PROMPT * TOPK * 4);
    g.margin = tensor(&g, "router_margin", LAYERS * PROMPT * 4);
    g.greedy = tensor(&g, "greedy", GREEDY * 4);
    g.greedy_margin = tensor(&g, "greedy_margin", GREEDY * 4);
    g.greedy_router = tensor(&g, "greedy_router_idx", LAYERS * GREEDY * TOPK * 4);
    g.greedy_router_margin = tensor(&g, "greedy_router_margin", LAYERS * GREEDY * 4);
    return g;
}

/* What a run is compared by. */
typedef struct result {
    const golden *g;
    float *logits; /* [PROMPT][VOCAB] as seen */
    uint32_t positions, router_wrong;
    double max_err, rms, max_kl, mean_kl;
} result;

static void on_logits(void *arg, const mk_row *row, const float *l)
{
    result *r = arg;
    if (row->pos >= PROMPT) return;
    const float *ref = r->g->logits + (size_t)row->pos * VOCAB;
    if (r->logits) memcpy(r->logits + (size_t)row->pos * VOCAB, l, VOCAB * sizeof *l);
    double ma = -1e30, mb = -1e30, sa = 0, sb = 0, kl = 0;
    for (int i = 0; i < VOCAB; i++) {
        double d = fabs((double)l[i] - ref[i]);
        if (!(d <= r->max_err)) r->max_err = d; /* NaN counts as the worst */
        r->rms += (double)ref[i] * ref[i];
        ma = fmax(ma, ref[i]);
        mb = fmax(mb, l[i]);
    }
    for (int i = 0; i < VOCAB; i++) sa += exp(ref[i] - ma), sb += exp(l[i] - mb);
    for (int i = 0; i < VOCAB; i++) {
        double p = (ref[i] - ma) - log(sa), q = (l[i] - mb) - log(sb);
        kl += exp(p) * (p - q);
    }
    if (!(kl <= r->max_kl)) r->max_kl = kl;
    r->mean_kl += kl / PROMPT;
    r->positions++;
}

static void on_route(void *arg, uint32_t layer, const mk_row *row, const uint16_t *ids, uint32_t n)
{
    result *r = arg;
    if (layer < 1 || layer > LAYERS || n != TOPK) fail_msg("MoE layer %u chose %u experts", layer, n);
    const int32_t *ref = row->pos < PROMPT ? r->g->router + ((layer - 1) * PROMPT + row->pos) * TOPK
                                           : r->g->greedy_router + ((layer - 1) * GREEDY + row->pos - PROMPT) * TOPK;
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] != (uint16_t)ref[i]) {
            r->router_wrong++;
            break;
        }
}

/* Teacher-forced over the whole prompt; every position has logits. */
static result forced(const golden *g, const mk_session_config *c, uint32_t chunk, float *keep)
{
    result res = {.g = g, .logits = keep};
    mk_session *r = rig_open(c);
    r->on_logits = on_logits;
    r->on_route = on_route;
    r->arg = &res;
    mk_session_stream(r, 0, NULL, 0);
    for (uint32_t i = 0; i < PROMPT; i += chunk) {
        mk_session_append(r, 0, (const uint32_t *)g->prompt + i, chunk < PROMPT - i ? chunk : PROMPT - i, MK_APPEND_LOGPROBS);
        if (chunk < 8) rig_run(r);
    }
    mk_session_generate(r, 0, 1);
    rig_run(r);
    assert_int_equal(res.positions, PROMPT);
    res.rms = sqrt(res.rms / ((double)PROMPT * VOCAB));
    mk_session_close(&r);
    return res;
}

static void strict_gate(void **state)
{
    (void)state;
    golden g = load();
    for (int m = MK_WEIGHTS_AUTO; m <= MK_WEIGHTS_BF16; m++) {
        result r = forced(&g, &(mk_session_config){.dir = DIR, .act_f32 = 1, .weights = (enum mk_weights_mode)m}, PROMPT, NULL);
        print_message("act=f32, weights mode %d: max error / RMS %.2e, KL %.1e, router choices wrong %u of %u\n", m, r.max_err / r.rms,
                      r.max_kl, r.router_wrong, PROMPT * LAYERS);
        assert_true(r.max_err / r.rms <= 1e-4);
        assert_int_equal(r.router_wrong, 0);
    }
    mk_checkpoint_close(&g.file);
}

static void default_gate(void **state)
{
    (void)state;
    golden g = load();
    /* the golden's margins make forcing the reference's choice unnecessary: the gate would force it below 2e-3 */
    for (int i = 0; i < LAYERS * PROMPT; i++) assert_true(g.margin[i] >= 2e-3f);
    for (int i = 0; i < LAYERS * GREEDY; i++) assert_true(g.greedy_router_margin[i] >= 2e-3f);
    result r = forced(&g, &(mk_session_config){.dir = DIR}, PROMPT, NULL);
    print_message("default precision: max error / RMS %.2e, max KL %.2e, router choices wrong %u\n", r.max_err / r.rms, r.max_kl, r.router_wrong);
    assert_true(r.max_kl <= 1e-3);
    assert_int_equal(r.router_wrong, 0);
    mk_checkpoint_close(&g.file);
}

static void greedy_tokens(void **state)
{
    (void)state;
    golden g = load();
    for (int f32 = 0; f32 < 2; f32++) {
        mk_session *r = rig_open(&(mk_session_config){.dir = DIR, .act_f32 = f32});
        mk_session_stream(r, 0, NULL, 0);
        mk_session_append(r, 0, (const uint32_t *)g.prompt, PROMPT, 0);
        mk_session_generate(r, 0, GREEDY);
        rig_run(r);
        const mk_event *done = mk_session_event(r, 0, MK_EV_DONE, 0);
        assert_non_null(done);
        assert_int_equal(done->reason, MK_DONE_LENGTH);
        for (uint32_t i = 0; i < GREEDY; i++) {
            const mk_event *t = mk_session_event(r, 0, MK_EV_TOKEN, i);
            assert_non_null(t);
            assert_int_equal(t->position, PROMPT + i);
            if (t->token != (uint32_t)g.greedy[i]) {
                assert_true(g.greedy_margin[i] < 0.02f);
                break; /* from here on another text */
            }
        }
        mk_session_close(&r);
    }
    mk_checkpoint_close(&g.file);
}

/* ---- row invariance: 0 differing bits ------------------------------------------------------------------------------- */

static void invariance_chunks(void **state)
{
    (void)state;
    golden g = load();
    size_t bytes = (size_t)PROMPT * VOCAB * sizeof(float);
    float *a = malloc(bytes), *b = malloc(bytes);
    forced(&g, &(mk_session_config){.dir = DIR}, PROMPT, a); /* rows of 8 */
    for (uint32_t chunk = 1; chunk <= 3; chunk += 2) {
        memset(b, 0xff, bytes);
        forced(&g, &(mk_session_config){.dir = DIR}, chunk, b);
        assert_memory_equal(a, b, bytes);
    }
    memset(b, 0xff, bytes);
    forced(&g, &(mk_session_config){.dir = DIR, .epoch0 = 0xfffffff0u}, PROMPT, b); /* epochs wrap */
    assert_memory_equal(a, b, bytes);
    free(a);
    free(b);
    mk_checkpoint_close(&g.file);
}

static void invariance_company(void **state)
{
    (void)state;
    golden g = load();
    enum { N = 40, NEW = 24 };
    uint32_t alone[NEW];
    float alone_lp[NEW];
    mk_sampling s = {.temperature = 0.8f, .top_p = 0.95f, .top_k = 50, .seed = 7};
    for (int company = 0; company < 2; company++) {
        mk_session *r = rig_open(&(mk_session_config){.dir = DIR, .slots = 8, .context = 256});
        mk_session_stream(r, 0, &s, 0);
        mk_session_append(r, 0, (const uint32_t *)g.prompt, N, 0);
        mk_session_generate(r, 0, NEW);
        for (uint32_t k = 1; company && k < 8; k++) { /* others of other lengths and lives */
            mk_sampling o = {.temperature = k & 1 ? 1.0f : 0.0f, .top_p = 1.0f, .seed = k};
            mk_session_stream(r, k, &o, 0);
            mk_session_append(r, k, (const uint32_t *)g.prompt + 13 * k, 5 + 9 * k, 0);
            mk_session_generate(r, k, 3 * k + 5);
        }
        rig_run(r);
        if (company) assert_int_equal(r->max_rows, 8);
        for (uint32_t i = 0; i < NEW; i++) {
            const mk_event *t = mk_session_event(r, 0, MK_EV_TOKEN, i);
            assert_non_null(t);
            if (company) {
                assert_int_equal(t->token, alone[i]);
                assert_memory_equal(&t->logprob, &alone_lp[i], 4);
            }
            alone[i] = t->token;
            alone_lp[i] = t->logprob;
        }
        for (uint32_t k = 0; k < (company ? 8u : 1u); k++) {
            assert_non_null(mk_session_event(r, k, MK_EV_DONE, 0));
            assert_null(mk_session_event(r, k, MK_EV_DONE, 1));
        }
        mk_session_close(&r);
    }
    mk_checkpoint_close(&g.file);
}

/* Any number of workers runs and agrees to rounding; the same number agrees to the bit (above). */
static void other_worker_counts(void **state)
{
    (void)state;
    golden g = load();
    for (uint32_t w = 1; w <= 33; w += w < 3 ? 1 : 30) {
        result r = forced(&g, &(mk_session_config){.dir = DIR, .workers = w, .act_f32 = 1}, PROMPT, NULL);
        print_message("%u workers: max error / RMS %.2e\n", w, r.max_err / r.rms);
        assert_true(r.max_err / r.rms <= 1e-4);
    }
    mk_checkpoint_close(&g.file);
}

/* ---- the same weights in other dtypes, and wrong ones --------------------------------------------------------------- */

/* FP8 with power-of-two scales is exact in every dtype: one golden serves them all. */
static void stored_otherwise(void **state)
{
    (void)state;
    golden g = load();
    const enum mk_st_dtype as[3] = {MK_ST_BF16, MK_ST_F32, MK_ST_F16};
    const char *name[3] = {"BF16", "F32", "F16"};
    for (int i = 0; i < 3; i++) {
        char *dir = mk_tmp_dir();
        mk_err err = {0};
        if (mk_edit_checkpoint(DIR, dir, as[i], NULL, NULL, &err)) fail_msg("%s", err.msg);
        result r = forced(&g, &(mk_session_config){.dir = dir, .act_f32 = 1}, PROMPT, NULL);
        print_message("stored as %s: max error / RMS %.2e\n", name[i], r.max_err / r.rms);
        assert_true(r.max_err / r.rms <= 1e-4);
        assert_int_equal(r.router_wrong, 0);
        /* converted to FP8 blocks with scales of its own: 3 bits of mantissa, and some routes flip */
        r = forced(&g, &(mk_session_config){.dir = dir, .weights = MK_WEIGHTS_FP8}, PROMPT, NULL);
        print_message("    converted to FP8 blocks: mean KL %.2e, max %.2e, router choices wrong %u\n", r.mean_kl, r.max_kl, r.router_wrong);
        assert_true(r.mean_kl <= 0.1);
        mk_tmp_remove(&dir);
    }
    mk_checkpoint_close(&g.file);
}

/* A kernel that makes the mistake computes what the right one computes from weights edited like this. */
static int has(const mk_edit_tensor *t, const char *part)
{
    return strstr(t->name, part) != NULL;
}
static uint64_t size(const mk_edit_tensor *t)
{
    uint64_t n = 1;
    for (uint32_t i = 0; i < t->ndim; i++) n *= t->shape[i];
    return n;
}
static void fill(mk_edit_tensor *t, uint64_t first, uint64_t n, float v)
{
    for (uint64_t i = 0; i < n; i++) t->v[first + i] = v;
    t->changed = 1;
}
static void no_edit(void *arg, mk_edit_tensor *t)
{
    (void)arg, (void)t;
}
static void drop_nope_slice(void *arg, mk_edit_tensor *t) /* k_pe out of the scores */
{
    (void)arg;
    if (has(t, "kv_a_proj_with_mqa.weight")) fill(t, 512 * t->shape[1], 64 * t->shape[1], 0);
}
static void drop_router_bias(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    if (has(t, "e_score_correction_bias")) fill(t, 0, size(t), 0);
}
static void skip_decay(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    if (has(t, "A_log")) fill(t, 0, size(t), -60);
}
static void reverse_conv(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    if (!has(t, "_conv1d")) return;
    for (uint64_t i = 0; i < size(t); i += 4)
        for (int k = 0; k < 2; k++) {
            float a = t->v[i + k];
            t->v[i + k] = t->v[i + 3 - k];
            t->v[i + 3 - k] = a;
        }
    t->changed = 1;
}
static void drop_shared_expert(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    if (has(t, "shared_experts.down_proj.weight")) fill(t, 0, size(t), 0);
}

static void negative_controls(void **state)
{
    (void)state;
    golden g = load();
    static const struct {
        const char *name, *field, *value;
        mk_edit_fn edit;
        int right;
    } control[] = {
        {"nothing wrong", NULL, NULL, no_edit, 1},
        {"NoPE slice dropped", NULL, NULL, drop_nope_slice, 0},
        {"router bias dropped", NULL, NULL, drop_router_bias, 0},
        {"decay skipped", NULL, NULL, skip_decay, 0},
        {"convolution taps reversed", NULL, NULL, reverse_conv, 0},
        {"wrong norm eps", "rms_norm_eps", "1e-5", no_edit, 0},
        {"shared expert dropped", NULL, NULL, drop_shared_expert, 0},
    };
    for (size_t i = 0; i < sizeof control / sizeof control[0]; i++) {
        char *dir = mk_tmp_dir();
        mk_err err = {0};
        if (mk_edit_checkpoint(DIR, dir, MK_ST_BF16, control[i].edit, NULL, &err)) fail_msg("%s", err.msg);
        if (control[i].field) mk_edit_json(dir, "config.json", control[i].field, control[i].value);
        result strict = forced(&g, &(mk_session_config){.dir = dir, .act_f32 = 1}, PROMPT, NULL);
        result plain = forced(&g, &(mk_session_config){.dir = dir}, PROMPT, NULL);
        print_message("%-26s strict: max error / RMS %.1e, default: max KL %.1e\n", control[i].name, strict.max_err / strict.rms, plain.max_kl);
        assert_int_equal(strict.max_err / strict.rms <= 1e-4, control[i].right);
        assert_int_equal(plain.max_kl <= 1e-3, control[i].right);
        mk_tmp_remove(&dir);
    }
    mk_checkpoint_close(&g.file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(strict_gate),       cmocka_unit_test(default_gate),       cmocka_unit_test(greedy_tokens),
        cmocka_unit_test(invariance_chunks), cmocka_unit_test(invariance_company), cmocka_unit_test(other_worker_counts),
        cmocka_unit_test(stored_otherwise),  cmocka_unit_test(negative_controls),
    };
    return cmocka_run_group_tests_name("oracle: kimi_linear", tests, NULL, NULL);
}
