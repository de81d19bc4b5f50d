#include "tests/support/oracle.h"
#include "tests/support/sanitized.h"
#include "tests/support/tmp.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FP8_HEAD_MEAN 4e-3 /* nats */
#define FP8_HEAD_MAX  2e-2
#define FP8_CACHE_MEAN 1e-3
#define FP8_CACHE_MAX  1e-2

static struct {
    const char *dir;
    const mk_oracle_control *control;
    size_t n_control;
} family;

static const mk_tensor *find(const mk_oracle *g, const char *name, uint32_t ndim)
{
    const mk_tensor *t = mk_checkpoint_find(g->file, name);
    if (t && t->ndim != ndim) fail_msg("golden: tensor %s has %u dimensions, expected %u", name, t->ndim, ndim);
    return t;
}

static const void *data(const mk_oracle *g, const char *name, uint64_t bytes)
{
    const mk_tensor *t = mk_checkpoint_find(g->file, name);
    if (!t || t->bytes != bytes) fail_msg("golden: tensor %s is missing or has the wrong size", name);
    return t->data;
}

static mk_oracle load(void)
{
    mk_oracle g = {.dir = family.dir};
    mk_err err = {0};
    char *path = mk_tmp_path(g.dir, "golden.safetensors");
    if (mk_checkpoint_open_file(path, &g.file, &err)) fail_msg("%s", err.msg);
    free(path);
    const mk_tensor *logits = find(&g, "logits", 2), *greedy = find(&g, "greedy", 1), *router = find(&g, "router_idx", 3);
    assert_non_null(logits);
    assert_non_null(greedy);
    g.prompt_n = (uint32_t)logits->shape[0];
    g.vocab = (uint32_t)logits->shape[1];
    g.greedy_n = (uint32_t)greedy->shape[0];
    g.prompt = data(&g, "prompt", g.prompt_n * 4ull);
    g.logits = logits->data;
    g.greedy = greedy->data;
    g.greedy_margin = data(&g, "greedy_margin", g.greedy_n * 4ull);
    if (!router) return g;
    g.moe_layers = (uint32_t)router->shape[0];
    g.topk = (uint32_t)router->shape[2];
    g.router = data(&g, "router_idx", 4ull * g.moe_layers * g.prompt_n * g.topk);
    g.margin = data(&g, "router_margin", 4ull * g.moe_layers * g.prompt_n);
    g.greedy_router = data(&g, "greedy_router_idx", 4ull * g.moe_layers * g.greedy_n * g.topk);
    g.greedy_router_margin = data(&g, "greedy_router_margin", 4ull * g.moe_layers * g.greedy_n);
    return g;
}

static void on_logits(void *arg, const mk_row *row, const float *l)
{
    mk_oracle_result *r = arg;
    const mk_oracle *g = r->g;
    uint32_t n = g->vocab;
    if (row->pos >= g->prompt_n) return;
    const float *ref = g->logits + (size_t)row->pos * n;
    if (r->logits) memcpy(r->logits + (size_t)row->pos * n, l, n * sizeof *l);
    double ma = -1e30, mb = -1e30, sa = 0, sb = 0, kl = 0;
    for (uint32_t i = 0; i < n; i++) {
        double d = fabs((double)l[i] - ref[i]);
        if (!(d <= r->max_err)) r->max_err = d; /* NaN counts as the worst */
        r->rms += (double)ref[i] * ref[i];
        ma = fmax(ma, ref[i]);
        mb = fmax(mb, l[i]);
    }
    for (uint32_t i = 0; i < n; i++) sa += exp(ref[i] - ma), sb += exp(l[i] - mb);
    for (uint32_t i = 0; i < n; i++) {
        double p = (ref[i] - ma) - log(sa), q = (l[i] - mb) - log(sb);
        kl += exp(p) * (p - q);
    }
    if (!(kl <= r->max_kl)) r->max_kl = kl;
    r->mean_kl += kl / g->prompt_n;
    r->positions++;
}

static void on_route(void *arg, uint32_t layer, const mk_row *row, const uint16_t *ids, uint32_t n)
{
    mk_oracle_result *r = arg;
    const mk_oracle *g = r->g;
    uint32_t index = layer < 1024 ? r->moe_index[layer] : UINT32_MAX;
    if (index >= g->moe_layers || n != g->topk) fail_msg("layer %u chose %u experts", layer, n);
    if (row->pos >= g->prompt_n) return;
    const int32_t *ref = g->router + ((size_t)index * g->prompt_n + row->pos) * g->topk;
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] != (uint16_t)ref[i]) {
            r->router_wrong++;
            break;
        }
}

mk_oracle_result mk_oracle_forced(const mk_oracle *g, const mk_session_config *c, uint32_t chunk, float *keep)
{
    mk_oracle_result res = {.g = g, .logits = keep};
    mk_session *r = rig_open(c);
    for (uint32_t l = 0, moe = 0; l < r->model->layers && l < 1024; l++)
        res.moe_index[l] = r->model->layer[l].ffn == MK_FFN_MOE ? moe++ : UINT32_MAX;
    r->on_logits = on_logits;
    r->on_route = on_route;
    r->arg = &res;
    mk_session_stream(r, 0, NULL, 0);
    for (uint32_t i = 0; i < g->prompt_n; i += chunk) {
        mk_session_append(r, 0, (const uint32_t *)g->prompt + i, chunk < g->prompt_n - i ? chunk : g->prompt_n - i, MK_APPEND_LOGPROBS);
        if (chunk < 8) rig_run(r);
    }
    mk_session_generate(r, 0, 1);
    rig_run(r);
    assert_int_equal(res.positions, g->prompt_n);
    res.rms = sqrt(res.rms / ((double)g->prompt_n * g->vocab));
    mk_session_close(&r);
    return res;
}

/* What the golden yields at default precision, eight rows a step: for all tests that compare with it, run once. keep: where its logits go. */
static mk_oracle_result by_default(const mk_oracle *g, float *keep)
{
    static mk_oracle_result once;
    static float *logits;
    const size_t bytes = (size_t)g->prompt_n * g->vocab * sizeof *logits;
    if (!logits) {
        assert_non_null(logits = malloc(bytes));
        memset(logits, 0xff, bytes);
        once = mk_oracle_forced(g, &(mk_session_config){.dir = g->dir}, g->prompt_n, logits);
        once.g = NULL, once.logits = NULL; /* they last no longer than their test */
    }
    if (keep) memcpy(keep, logits, bytes);
    return once;
}

/* ---- gates ---------------------------------------------------------------------------------------------------------- */

static void count_not_fp8(void *arg, mk_mat *mat)
{
    *(uint32_t *)arg += !mat->keep_bf16 && mat->wtype != MK_W_FP8;
}

/* Conversion to FP8 changes nothing: every matrix that it would touch is stored in FP8. */
static int all_fp8(const char *dir)
{
    mk_model *m = NULL;
    mk_checkpoint *ck = NULL;
    mk_err err = {0};
    uint32_t n = 0;
    if (mk_model_read(dir, &m, &err) || mk_checkpoint_open(dir, &ck, &err) || mk_model_resolve(m, ck, MK_WEIGHTS_AUTO, &err)) fail_msg("%s", err.msg);
    mk_model_mats(m, count_not_fp8, &n);
    mk_checkpoint_close(&ck);
    mk_model_destroy(&m);
    return n == 0;
}

static void strict_gate(void **state)
{
    (void)state;
    mk_oracle g = load();
    int fp8 = all_fp8(g.dir);
    for (int m = MK_WEIGHTS_AUTO; m <= MK_WEIGHTS_BF16; m++) {
        if (m == MK_WEIGHTS_FP8 && !fp8) continue;
        if (ONE_OF_EACH && m == MK_WEIGHTS_FP8) continue;
        mk_oracle_result r = mk_oracle_forced(&g, &(mk_session_config){.dir = g.dir, .act_f32 = 1, .weights = (enum mk_weights_mode)m}, g.prompt_n, NULL);
        print_message("act=f32, weights mode %d: max error / RMS %.2e, KL %.1e, router choices wrong %u of %u\n", m, r.max_err / r.rms,
                      r.max_kl, r.router_wrong, g.prompt_n * g.moe_layers);
        assert_true(r.max_err / r.rms <= 1e-4);
        assert_int_equal(r.router_wrong, 0);
    }
    mk_checkpoint_close(&g.file);
}

static void default_gate(void **state)
{
    (void)state;
    mk_oracle g = load();
    /* the golden's margins make forcing the reference's choice unnecessary: the gate would force it below 2e-3 */
    for (uint32_t i = 0; i < g.moe_layers * g.prompt_n; i++) assert_true(g.margin[i] >= 2e-3f);
    for (uint32_t i = 0; i < g.moe_layers * g.greedy_n; i++) assert_true(g.greedy_router_margin[i] >= 2e-3f);
    mk_oracle_result r = by_default(&g, NULL);
    print_message("default precision: max error / RMS %.2e, max KL %.2e, router choices wrong %u\n", r.max_err / r.rms, r.max_kl, r.router_wrong);
    assert_true(r.max_kl <= 1e-3);
    assert_int_equal(r.router_wrong, 0);
    mk_checkpoint_close(&g.file);
}

static void greedy_tokens(void **state)
{
    (void)state;
    mk_oracle g = load();
    for (int f32 = 0; f32 < 2; f32++) {
        mk_session *r = rig_open(&(mk_session_config){.dir = g.dir, .act_f32 = f32});
        mk_session_stream(r, 0, NULL, 0);
        mk_session_append(r, 0, (const uint32_t *)g.prompt, g.prompt_n, 0);
        mk_session_generate(r, 0, g.greedy_n);
        rig_run(r);
        const mk_event *done = mk_session_event(r, 0, MK_EV_DONE, 0);
        assert_non_null(done);
        assert_int_equal(done->reason, MK_DONE_LENGTH);
        for (uint32_t i = 0; i < g.greedy_n; i++) {
            const mk_event *t = mk_session_event(r, 0, MK_EV_TOKEN, i);
            assert_non_null(t);
            assert_int_equal(t->position, g.prompt_n + i);
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
    mk_oracle g = load();
    size_t bytes = (size_t)g.prompt_n * g.vocab * sizeof(float);
    float *a = malloc(bytes), *b = malloc(bytes);
    by_default(&g, a);
    for (uint32_t chunk = ONE_OF_EACH ? 3 : 1; chunk <= 3; chunk += 2) {
        memset(b, 0xff, bytes);
        mk_oracle_forced(&g, &(mk_session_config){.dir = g.dir}, chunk, b);
        assert_memory_equal(a, b, bytes);
    }
    memset(b, 0xff, bytes);
    mk_oracle_forced(&g, &(mk_session_config){.dir = g.dir, .epoch0 = 0xfffffff0u}, g.prompt_n, b); /* epochs wrap */
    assert_memory_equal(a, b, bytes);
    free(a);
    free(b);
    mk_checkpoint_close(&g.file);
}

static void invariance_company(void **state)
{
    (void)state;
    mk_oracle g = load();
    enum { N = 40, NEW = 24 };
    uint32_t alone[NEW];
    float alone_lp[NEW];
    mk_sampling s = {.temperature = 0.8f, .top_p = 0.95f, .top_k = 50, .seed = 7};
    assert_true(g.prompt_n >= 150);
    for (int company = 0; company < 2; company++) {
        mk_session *r = rig_open(&(mk_session_config){.dir = g.dir, .slots = 8, .context = 256});
        mk_session_stream(r, 0, &s, 0);
        mk_session_append(r, 0, (const uint32_t *)g.prompt, N, 0);
        mk_session_generate(r, 0, NEW);
        for (uint32_t k = 1; company && k < 8; k++) { /* others of other lengths and lives */
            mk_sampling o = {.temperature = k & 1 ? 1.0f : 0.0f, .top_p = 1.0f, .seed = k};
            mk_session_stream(r, k, &o, 0);
            mk_session_append(r, k, (const uint32_t *)g.prompt + 11 * k, 5 + 9 * k, 0);
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
    mk_oracle g = load();
    for (uint32_t w = ONE_OF_EACH ? 132 : 1; w <= 132; w += w < 3 ? 1 : w < 33 ? 30 : 99) { /* 132: an H200's */
        mk_session *s = NULL;
        mk_err err = {0};
        int rc = mk_session_open(&(mk_session_config){.dir = g.dir, .workers = w}, &s, &err);
        mk_session_close(&s);
        if (w > 33 && rc == MK_E_CAPACITY) {
            print_message("%s\n", err.msg); /* experts that small do not reach every worker */
            continue;
        }
        mk_oracle_result r = mk_oracle_forced(&g, &(mk_session_config){.dir = g.dir, .workers = w, .act_f32 = 1}, g.prompt_n, NULL);
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
    mk_oracle g = load();
    const enum mk_st_dtype as[3] = {MK_ST_BF16, MK_ST_F32, MK_ST_F16};
    const char *name[3] = {"BF16", "F32", "F16"};
    for (int i = 0; i < (ONE_OF_EACH ? 1 : 3); i++) {
        char *dir = mk_tmp_dir();
        mk_err err = {0};
        if (mk_edit_checkpoint(g.dir, dir, as[i], NULL, NULL, &err)) fail_msg("%s", err.msg);
        mk_oracle_result r = mk_oracle_forced(&g, &(mk_session_config){.dir = dir, .act_f32 = 1}, g.prompt_n, NULL);
        print_message("stored as %s: max error / RMS %.2e\n", name[i], r.max_err / r.rms);
        assert_true(r.max_err / r.rms <= 1e-4);
        assert_int_equal(r.router_wrong, 0);
        /* converted to FP8 blocks with scales of its own: 3 bits of mantissa, and some routes flip */
        r = mk_oracle_forced(&g, &(mk_session_config){.dir = dir, .weights = MK_WEIGHTS_FP8}, g.prompt_n, NULL);
        print_message("    converted to FP8 blocks: mean KL %.2e, max %.2e, router choices wrong %u\n", r.mean_kl, r.max_kl, r.router_wrong);
        assert_true(r.mean_kl <= 0.1);
        mk_tmp_remove(&dir);
    }
    mk_checkpoint_close(&g.file);
}

/* --lm-head fp8: what it costs, and that it is what was asked for. The golden's head is not on e4m3's lattice. */
static void fp8_lm_head(void **state)
{
    (void)state;
    mk_oracle g = load();
    mk_session_config c = {.dir = g.dir, .lm_head = MK_LM_HEAD_FP8};
    mk_session *s = rig_open(&c);
    assert_true(s->model->lm_head.wtype == MK_W_FP8 && s->model->lm_head.scale_k == 0);
    mk_session_close(&s);
    mk_oracle_result r = mk_oracle_forced(&g, &c, g.prompt_n, NULL), plain = by_default(&g, NULL);
    print_message("LM head in FP8: mean KL %.2e, max %.2e (BF16: %.2e, %.2e)\n", r.mean_kl, r.max_kl, plain.mean_kl, plain.max_kl);
    assert_true(r.mean_kl <= FP8_HEAD_MEAN && r.max_kl <= FP8_HEAD_MAX && r.mean_kl > plain.mean_kl);
    mk_checkpoint_close(&g.file);
}

/* --kv-cache fp8 (latent attention): what it costs, and that a token's bits do not depend on how many are appended at once. */
static void fp8_cache(void **state)
{
    (void)state;
    mk_oracle g = load();
    mk_session_config c = {.dir = g.dir, .kv_cache = MK_CACHE_FP8};
    mk_session *s = rig_open(&(mk_session_config){.dir = g.dir});
    uint32_t gqa = 0;
    for (uint32_t l = 0; l < s->model->layers; l++) gqa |= s->model->layer[l].mixer == MK_MIX_GQA;
    mk_session_close(&s);
    if (gqa) {
        mk_err err = {0};
        assert_int_equal(mk_session_open(&c, &s, &err), MK_E_USAGE);
        assert_non_null(strstr(err.msg, "kv-cache fp8: expected latent attention"));
        mk_checkpoint_close(&g.file);
        return;
    }
    size_t n = (size_t)g.prompt_n * g.vocab;
    float *all = calloc(n, sizeof *all), *one = calloc(n, sizeof *one);
    assert_true(all && one);
    mk_oracle_result r = mk_oracle_forced(&g, &c, g.prompt_n, all), plain = by_default(&g, NULL);
    print_message("cache in FP8: mean KL %.2e, max %.2e (BF16: %.2e, %.2e)\n", r.mean_kl, r.max_kl, plain.mean_kl, plain.max_kl);
    assert_true(r.mean_kl <= FP8_CACHE_MEAN && r.max_kl <= FP8_CACHE_MAX && r.mean_kl > plain.mean_kl);
    mk_oracle_forced(&g, &c, ONE_OF_EACH ? 3 : 1, one);
    assert_memory_equal(all, one, n * sizeof *all);
    free(all), free(one);
    mk_checkpoint_close(&g.file);
}

static void no_edit(void *arg, mk_edit_tensor *t)
{
    (void)arg, (void)t;
}

static void negative_controls(void **state)
{
    (void)state;
    mk_oracle g = load();
    const size_t first = ONE_OF_EACH ? 1 : 0, end = ONE_OF_EACH ? 2 : family.n_control; /* the first of all has nothing wrong */
    for (size_t i = first; i < end; i++) {
        const mk_oracle_control *c = &family.control[i];
        char *dir = mk_tmp_dir();
        mk_err err = {0};
        if (mk_edit_checkpoint(g.dir, dir, c->as, c->edit ? c->edit : no_edit, NULL, &err)) fail_msg("%s", err.msg);
        for (int k = 0; k < 4 && c->field[k][0]; k++) mk_edit_json(dir, "config.json", c->field[k][0], c->field[k][1]);
        mk_oracle_result strict = mk_oracle_forced(&g, &(mk_session_config){.dir = dir, .act_f32 = 1}, g.prompt_n, NULL);
        mk_oracle_result plain = mk_oracle_forced(&g, &(mk_session_config){.dir = dir}, g.prompt_n, NULL);
        print_message("%-34s strict: max error / RMS %.1e, default: max KL %.1e\n", c->name, strict.max_err / strict.rms, plain.max_kl);
        assert_int_equal(strict.max_err / strict.rms <= 1e-4, c->right);
        assert_int_equal(plain.max_kl <= 1e-3, c->right);
        mk_tmp_remove(&dir);
    }
    mk_checkpoint_close(&g.file);
}

int mk_edit_has(const mk_edit_tensor *t, const char *part)
{
    return strstr(t->name, part) != NULL;
}

uint64_t mk_edit_size(const mk_edit_tensor *t)
{
    uint64_t n = 1;
    for (uint32_t i = 0; i < t->ndim; i++) n *= t->shape[i];
    return n;
}

void mk_edit_fill(mk_edit_tensor *t, uint64_t first, uint64_t n, float v)
{
    for (uint64_t i = 0; i < n; i++) t->v[first + i] = v;
    t->changed = 1;
}

void mk_edit_scale(mk_edit_tensor *t, uint64_t first, uint64_t n, float factor)
{
    for (uint64_t i = 0; i < n; i++) t->v[first + i] *= factor;
    t->changed = 1;
}

void mk_drop_router_bias(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    if (mk_edit_has(t, "e_score_correction_bias")) mk_edit_fill(t, 0, mk_edit_size(t), 0);
}

void mk_drop_shared_experts(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    if (mk_edit_has(t, "shared_expert") && mk_edit_has(t, ".down_proj.weight") && !mk_edit_has(t, "_scale_inv"))
        mk_edit_fill(t, 0, mk_edit_size(t), 0);
}

static void nothing_more(void **state)
{
    (void)state;
}

int mk_oracle_main(const char *name, const mk_oracle_control *control, size_t n_control, void (*extra)(void **state))
{
    char dir[128], group[128];
    snprintf(dir, sizeof dir, "tests/oracle/%s", name);
    snprintf(group, sizeof group, "oracle: %s", name);
    family.dir = dir;
    family.control = control;
    family.n_control = n_control;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(strict_gate),       cmocka_unit_test(default_gate),       cmocka_unit_test(greedy_tokens),
        cmocka_unit_test(invariance_chunks), cmocka_unit_test(invariance_company), cmocka_unit_test(other_worker_counts),
        cmocka_unit_test(stored_otherwise),  cmocka_unit_test(fp8_lm_head), cmocka_unit_test(fp8_cache),        cmocka_unit_test(negative_controls),  {"extra", extra ? extra : nothing_more, NULL, NULL, NULL},
    };
    return _cmocka_run_group_tests(group, tests, sizeof tests / sizeof *tests - !extra, NULL, NULL);
}
