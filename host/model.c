/* config.json -> mk_model; then, with a checkpoint, which dtype every matrix gets. */
#include "host/model.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "host/arch.h"
#include "host/checkpoint.h"
#include "host/quant.h"
#include "megakernel/rings.h"

static const mk_arch *const archs[] = {
#define X(name) &mk_arch_##name,
    MK_ARCHS(X)
#undef X
};
#define N_ARCHS (sizeof archs / sizeof *archs)

static const mk_arch *find_arch(const char *name)
{
    for (size_t i = 0; i < N_ARCHS; i++)
        if (!strcmp(archs[i]->name, name)) return archs[i];
    return NULL;
}

/* ---- config.json ---------------------------------------------------------------------------------------------------- */

static const mk_arch *read_arch(mk_cfg *c, mk_model *m)
{
    json_t *v = mk_cfg_take(c, "architectures");
    const char *name = json_is_array(v) && json_array_size(v) == 1 ? json_string_value(json_array_get(v, 0)) : NULL;
    const mk_arch *a = name ? find_arch(name) : NULL;
    if (!a) {
        char known[512] = "";
        for (size_t i = 0; i < N_ARCHS; i++)
            snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", i ? ", " : "", archs[i]->name);
        char *text = v ? json_dumps(v, JSON_ENSURE_ASCII | JSON_COMPACT | JSON_ENCODE_ANY) : NULL;
        mk_cfg_fail(c, "architectures", "is %.80s, supported: %s", text ? text : "missing", known);
        free(text);
    } else {
        snprintf(m->arch, sizeof m->arch, "%s", a->name);
        char want[80] = "\""; /* a|b -> "a"|"b" */
        for (const char *p = a->model_type; *p; p++) strcat(want, *p == '|' ? "\"|\"" : (char[2]){*p, 0});
        strcat(want, "\"");
        mk_cfg_expect(c, "model_type", want);
    }
    json_decref(v);
    return a;
}

/* FP8 as models.md section 4 describes it; everything else is refused. */
static void read_quantization(mk_cfg *c, mk_model *m)
{
    mk_cfg q;
    if (mk_cfg_object(c, "quantization_config", &q)) {
        json_t *method = json_object_get(q.obj, "quant_method");
        if (!method || json_is_null(method)) mk_cfg_fail(&q, "quant_method", "is missing, supported: \"fp8\"");
        mk_cfg_expect(&q, "quant_method", "\"fp8\"");
        mk_cfg_expect(&q, "fmt", "\"e4m3\"");
        mk_cfg_expect(&q, "activation_scheme", "\"dynamic\"");
        mk_cfg_expect(&q, "weight_per_tensor", "false"); /* Qwen3.5's and Coder-Next's FP8 say so */
        mk_cfg_expect(&q, "act_per_tensor", "false");
        mk_cfg_expect(&q, "scale_fmt", "\"ue8m0\"|\"float\"");
        uint32_t b[2] = {0, 0}, n = mk_cfg_ints(&q, "weight_block_size", 1, 1u << 20, b, 2);
        if (!q.rc && (n != 2 || b[0] != 128 || b[1] != 128))
            mk_cfg_fail(&q, "weight_block_size", n == 2 ? "is [%u, %u], supported: [128, 128]" : "is not [128, 128]", b[0], b[1]);
        /* Which modules are FP8 is read off the tensors themselves. */
        mk_cfg_ignore(&q, "modules_to_not_convert|ignored_layers|ignored_modules|dequantize");
        m->fp8_source = 1;
        mk_cfg_done(&q, c);
    }
}

static void read_stops(mk_cfg *c, mk_model *m)
{
    json_t *v = mk_cfg_take(c, "eos_token_id");
    if (!v) return;
    if (json_is_array(v))
        json_object_set(c->obj, "eos_token_id", v);
    else
        json_object_set_new(c->obj, "eos_token_id", json_pack("[O]", v));
    json_decref(v);
    m->n_stop = mk_cfg_ints(c, "eos_token_id", 0, m->vocab - 1, m->stop, MK_MAX_STOP);
}

static int read_config(const char *path, mk_model *m, mk_err *err)
{
    mk_cfg c = {.err = err};
    int rc = mk_json_read(path, &c.obj, err);
    if (rc) return rc;
    snprintf(c.where, sizeof c.where, "%s", path);
    const mk_arch *a = read_arch(&c, m);
    /* Training, bookkeeping, Python classes, labels: nothing that reaches a logit. */
    mk_cfg_ignore(&c, "auto_map|transformers_version|initializer_range|use_cache|_name_or_path|name_or_path|tokenizer_class|"
                      "output_attentions|output_hidden_states|output_router_logits|router_aux_loss_coef|return_dict|"
                      "return_dict_in_generate|chunk_size_feed_forward|id2label|label2id|problem_type|task_specific_params|"
                      "finetuning_task|_attn_implementation|_attn_implementation_autoset|attn_implementation|torchscript|"
                      "use_bfloat16|gradient_checkpointing");
    mk_cfg_expect(&c, "is_encoder_decoder", "false");
    mk_cfg_expect(&c, "add_cross_attention", "false");
    mk_cfg_expect(&c, "dtype|torch_dtype", "\"bfloat16\"|\"float16\"|\"float32\"");
    read_quantization(&c, m);
    if (!c.rc && a && a->read(&c, m, err) && !c.rc) c.rc = MK_E_SYSTEM;
    if (!c.rc) {
        m->bos = mk_cfg_int_or(&c, "bos_token_id", 0, m->vocab - 1, UINT32_MAX);
        m->pad = mk_cfg_int_or(&c, "pad_token_id", 0, m->vocab - 1, UINT32_MAX);
        read_stops(&c, m);
    }
    return mk_cfg_done(&c, NULL);
}

/* Defaults of requests. transformers samples only with do_sample; without it, temperature and the filters are not used. A missing
 * top_k is "off" (transformers would take 50 of its own accord). */
static int read_generation(const char *path, mk_model *m, mk_err *err)
{
    mk_cfg c = {.err = err};
    int rc = mk_json_read(path, &c.obj, err);
    if (rc) return rc;
    snprintf(c.where, sizeof c.where, "%s", path);
    read_stops(&c, m);
    m->bos = mk_cfg_int_or(&c, "bos_token_id", 0, m->vocab - 1, m->bos);
    m->pad = mk_cfg_int_or(&c, "pad_token_id", 0, m->vocab - 1, m->pad);
    int sample = mk_cfg_bool_or(&c, "do_sample", 0);
    double t = mk_cfg_num_or(&c, "temperature", 0, 100, 1), top_p = mk_cfg_num_or(&c, "top_p", 0, 1, 1);
    double min_p = mk_cfg_num_or(&c, "min_p", 0, 1, 0);
    uint32_t top_k = mk_cfg_int_or(&c, "top_k", 0, INT32_MAX, 0);
    if (!c.rc && (float)top_p <= 0) mk_cfg_fail(&c, "top_p", "is %g, expected more than 0", top_p);
    if (sample) {
        m->temperature = (float)t;
        m->top_p = (float)top_p;
        m->min_p = (float)min_p;
        m->top_k = top_k < m->vocab ? top_k : 0;
    }
    /* What would change the tokens: only the neutral value is supported. */
    static const char *const neutral[][2] = {
        {"num_beams", "1"},           {"num_beam_groups", "1"},      {"num_return_sequences", "1"}, {"repetition_penalty", "1"},
        {"encoder_repetition_penalty", "1"}, {"no_repeat_ngram_size", "0"}, {"encoder_no_repeat_ngram_size", "0"},
        {"typical_p", "1"},           {"epsilon_cutoff", "0"},       {"eta_cutoff", "0"},           {"diversity_penalty", "0"},
        {"penalty_alpha", "0"},       {"guidance_scale", "1"},       {"min_length", "0"},           {"min_new_tokens", "0"},
        {"top_h", "null"},            {"remove_invalid_values", "false"}, {"renormalize_logits", "false"}, {"token_healing", "false"},
        {"suppress_tokens", "[]"},    {"begin_suppress_tokens", "[]"}, {"bad_words_ids", "[]"},     {"sequence_bias", "{}"},
        {"stop_strings", "[]"},       {"forced_bos_token_id", "null"}, {"forced_eos_token_id", "null"}, {"force_words_ids", "null"},
        {"constraints", "null"},      {"exponential_decay_length_penalty", "null"}, {"watermarking_config", "null"},
        {"dola_layers", "null"},
    };
    for (size_t i = 0; i < sizeof neutral / sizeof *neutral; i++) mk_cfg_expect(&c, neutral[i][0], neutral[i][1]);
    /* Lengths are the client's to give; the rest is how transformers computes or what only beams and drafts use. */
    mk_cfg_ignore(&c, "_from_model_config|transformers_version|max_length|max_new_tokens|max_time|use_cache|cache_implementation|cache_config|"
                      "length_penalty|early_stopping|low_memory|decoder_start_token_id|return_dict_in_generate|output_attentions|"
                      "output_hidden_states|output_scores|output_logits|compile_config|disable_compile|is_assistant|num_assistant_tokens|"
                      "num_assistant_tokens_schedule|assistant_confidence_threshold|assistant_early_exit|assistant_ensemble_weight|"
                      "assistant_lookbehind|target_lookbehind|prompt_lookup_num_tokens|max_matching_ngram_size|max_cache_len|"
                      "prefill_chunk_size|continuous_batching_config|speculation_type|use_mtp");
    return mk_cfg_done(&c, NULL);
}

int mk_model_read(const char *path, mk_model **out, mk_err *err)
{
    *out = NULL;
    struct stat st;
    if (stat(path, &st)) return mk_fail(err, MK_E_MODEL, "%s: %s", path, strerror(errno));
    mk_model *m = calloc(1, sizeof *m);
    if (!m) return mk_fail(err, MK_E_SYSTEM, "out of memory");
    m->top_p = 1; /* greedy: temperature 0 */
    int rc;
    if (!S_ISDIR(st.st_mode)) {
        rc = read_config(path, m, err);
    } else {
        char *config = NULL, *gen = NULL;
        if (asprintf(&config, "%s/config.json", path) < 0) config = NULL;
        if (asprintf(&gen, "%s/generation_config.json", path) < 0) gen = NULL;
        rc = config && gen ? read_config(config, m, err) : mk_fail(err, MK_E_SYSTEM, "out of memory");
        if (!rc && !lstat(gen, &st)) rc = read_generation(gen, m, err); /* lstat: a dangling link is an error, not an absent file */
        free(config);
        free(gen);
    }
    if (rc)
        mk_model_destroy(&m);
    else
        *out = m;
    return rc;
}

void mk_model_keep(mk_model *m, uint32_t layers)
{
    while (m->layers > layers) {
        const mk_layer *l = &m->layer[--m->layers];
        if (l->mixer == MK_MIX_MLA) free(l->mla.inv_freq);
        if (l->mixer == MK_MIX_GQA) free(l->gqa.inv_freq);
    }
}

void mk_model_destroy(mk_model **p)
{
    mk_model *m = *p;
    if (!m) return;
    if (m->layer) mk_model_keep(m, 0);
    free(m->layer);
    free(m);
    *p = NULL;
}

/* ---- every matrix, every parameter ---------------------------------------------------------------------------------- */

/* cols: columns of the tensor; experts: how many tensors the name stands for (1 without %u). */
typedef void (*walk_mat)(void *arg, mk_mat *mat, uint32_t cols, uint32_t experts);
/* inner: last dimension of the tensor, n of them in all. */
typedef void (*walk_par)(void *arg, mk_par *par, uint32_t inner);

typedef struct walker {
    walk_mat mat;
    walk_par par;
    void *arg;
} walker;

static void visit(const walker *w, mk_mat *mat, uint32_t cols, uint32_t experts)
{
    if (w->mat && mat->source != MK_SRC_NONE) w->mat(w->arg, mat, cols ? cols : mat->k, experts ? experts : 1);
}

static void visit_par(const walker *w, mk_par *par, uint32_t inner)
{
    if (w->par && par->tensor[0]) w->par(w->arg, par, inner ? inner : par->n);
}

static void walk_dense(const walker *w, mk_ffn_dense *f)
{
    if (!f->inter) return;
    visit(w, &f->gate, 0, 0);
    visit(w, &f->up, 0, 0);
    visit(w, &f->down, 0, 0);
}

static void walk_layer(const walker *w, mk_layer *y)
{
    visit_par(w, &y->in_norm.gamma, 0);
    visit_par(w, &y->post_norm.gamma, 0);
    if (y->mixer == MK_MIX_DELTA) {
        mk_delta_mixer *d = &y->delta;
        mk_mat *mats[] = {&d->q, &d->k, &d->v, &d->f_a, &d->f_b, &d->g_a, &d->g_b, &d->b, &d->z, &d->a, &d->o};
        for (size_t i = 0; i < sizeof mats / sizeof *mats; i++) visit(w, mats[i], 0, 0);
        visit_par(w, &d->conv_q, d->taps);
        visit_par(w, &d->conv_k, d->taps);
        visit_par(w, &d->conv_v, d->taps);
        visit_par(w, &d->a_log, 0);
        visit_par(w, &d->dt_bias, 0);
        visit_par(w, &d->o_norm, 0);
    } else if (y->mixer == MK_MIX_GQA) {
        mk_gqa_mixer *a = &y->gqa;
        visit(w, &a->q, 0, 0);
        visit(w, &a->k, 0, 0);
        visit(w, &a->v, 0, 0);
        visit(w, &a->o, 0, 0);
        visit_par(w, &a->q_norm.gamma, 0);
        visit_par(w, &a->k_norm.gamma, 0);
    } else {
        mk_mla_mixer *a = &y->mla;
        visit(w, &a->q_a, 0, 0);
        visit_par(w, &a->q_a_norm.gamma, 0);
        visit(w, &a->q, 0, 0);
        visit(w, &a->kv_a, 0, 0);
        visit_par(w, &a->kv_norm.gamma, 0);
        visit(w, &a->uk, a->latent, 0);
        visit(w, &a->uv, 0, 0);
        visit(w, &a->o, 0, 0);
    }
    if (y->ffn == MK_FFN_DENSE) {
        walk_dense(w, &y->dense);
    } else if (y->ffn == MK_FFN_MOE) {
        mk_moe *e = &y->moe;
        visit(w, &e->router, e->router.n, 0);
        visit_par(w, &e->bias, 0);
        visit(w, &e->gate, 0, e->experts);
        visit(w, &e->up, 0, e->experts);
        visit(w, &e->down, 0, e->experts);
        walk_dense(w, &e->shared);
        visit(w, &e->shared_gate, 0, 0);
    }
}

static void walk(mk_model *m, const walker *w)
{
    visit(w, &m->embed, 0, 0);
    for (uint32_t i = 0; i < m->layers; i++) walk_layer(w, &m->layer[i]);
    visit_par(w, &m->final_norm.gamma, 0);
    visit(w, &m->lm_head, 0, 0);
}

typedef struct each {
    mk_mat_fn f;
    void *arg;
} each;
static void call_each(void *arg, mk_mat *mat, uint32_t cols, uint32_t experts)
{
    const each *e = arg;
    (void)cols;
    (void)experts;
    e->f(e->arg, mat);
}

void mk_model_mats(mk_model *m, mk_mat_fn f, void *arg)
{
    each e = {f, arg};
    walker w = {.mat = call_each, .arg = &e};
    walk(m, &w);
}

/* ---- resolve -------------------------------------------------------------------------------------------------------- */

typedef struct resolver {
    mk_model *m;
    const mk_checkpoint *ck;
    enum mk_weights_mode mode;
    const mk_alias *alias;
    int bare; /* names lack the leading "model." */
    int nested; /* "model.language_model." stands for "model." */
    uint8_t *used;
    mk_err *err;
    int rc;
} resolver;

static const mk_tensor *lookup(const resolver *r, const char *pattern, uint32_t expert)
{
    char name[MK_NAME + 16];
    mk_expert_name(name, pattern, expert);
    return mk_checkpoint_find(r->ck, name);
}

/* Changes `name` to the spelling that the checkpoint uses. NULL: none is there. */
static const mk_tensor *find_spelling(const resolver *r, char name[MK_NAME])
{
    if (r->bare && !strncmp(name, "model.", 6)) memmove(name, name + 6, strlen(name + 6) + 1);
    if (r->nested && !strncmp(name, "model.", 6)) {
        char other[MK_NAME];
        if (snprintf(other, sizeof other, "model.language_model.%s", name + 6) < MK_NAME) memcpy(name, other, sizeof other);
    }
    const mk_tensor *t = lookup(r, name, 0);
    for (const mk_alias *a = r->alias; !t && a && a->from; a++) {
        const char *at = strstr(name, a->from);
        if (!at) continue;
        char other[MK_NAME];
        int n = snprintf(other, sizeof other, "%.*s%s%s", (int)(at - name), name, a->to, at + strlen(a->from));
        if (n > 0 && n < MK_NAME && (t = lookup(r, other, 0))) memcpy(name, other, sizeof other);
    }
    return t;
}

static void mark(resolver *r, const mk_tensor *t)
{
    r->used[t - mk_checkpoint_at(r->ck, 0)] = 1;
}

static void shape_text(const mk_tensor *t, char out[96])
{
    int n = snprintf(out, 96, "[");
    for (uint32_t i = 0; i < t->ndim && n < 80; i++) n += snprintf(out + n, 96 - (size_t)n, "%s%llu", i ? ", " : "", (unsigned long long)t->shape[i]);
    snprintf(out + n, 96 - (size_t)n, "]");
}

static int is_float(enum mk_st_dtype d)
{
    return d == MK_ST_F32 || d == MK_ST_F16 || d == MK_ST_BF16;
}

/* One tensor of a matrix: shape, dtype, scales. */
static int check_mat(resolver *r, const mk_mat *mat, const mk_tensor *t, uint64_t rows, uint64_t cols)
{
    char shape[96];
    (void)mat;
    if (t->ndim != 2 || t->shape[0] != rows || t->shape[1] != cols) {
        shape_text(t, shape);
        return mk_fail(r->err, MK_E_MODEL, "%s: tensor %s has shape %s, config.json makes it [%llu, %llu]", t->file, t->name, shape,
                       (unsigned long long)rows, (unsigned long long)cols);
    }
    if (t->dtype == MK_ST_F8_E4M3) {
        const mk_tensor *s = mk_scale_tensor(r->ck, t, r->err);
        if (!s) return r->err ? r->err->code : MK_E_MODEL;
        mark(r, s);
    } else if (!is_float(t->dtype)) {
        return mk_fail(r->err, MK_E_MODEL, "%s: tensor %s has an unsupported dtype, expected BF16, F16, F32 or F8_E4M3", t->file, t->name);
    }
    mark(r, t);
    return MK_OK;
}

/* One tensor of all experts of a matrix; what the matrix's head fields say of it was set by the architecture. */
static int check_stacked(resolver *r, mk_mat *mat, const mk_tensor *t, uint32_t experts)
{
    char shape[96];
    if (t->ndim != 3 || t->shape[0] != experts || t->shape[1] != mat->head_stride || t->shape[2] != mat->k) {
        shape_text(t, shape);
        return mk_fail(r->err, MK_E_MODEL, "%s: tensor %s has shape %s, config.json makes it [%u, %u, %u]", t->file, t->name, shape, experts,
                       mat->head_stride, mat->k);
    }
    if (!is_float(t->dtype))
        return mk_fail(r->err, MK_E_MODEL, "%s: tensor %s holds all experts in an unsupported dtype, expected BF16, F16 or F32", t->file, t->name);
    mat->source = MK_SRC_STACKED;
    mark(r, t);
    return MK_OK;
}

static int blocks_map(mk_mat *mat, uint64_t cols)
{
    for (uint32_t sk = 128; sk >= 64; sk /= 2) {
        mat->scale_k = (uint16_t)sk;
        int ok = 1;
        for (uint32_t r = 0; ok && r < mat->n; r += 128)
            for (uint32_t cb = 0; ok && cb * sk < mat->k; cb++) {
                uint32_t a, b;
                ok = mk_mat_block(mat, cols, r, mat->n - r < 128 ? mat->n - r : 128, cb, &a, &b);
            }
        if (ok) return 1;
    }
    mat->scale_k = 128;
    mat->tensor_rows = mat->source == MK_SRC_HEAD_ROWS;
    return mat->tensor_rows;
}

/* dtype: of the tensor, or what quantization_config promises. */
static int decide(resolver *r, mk_mat *mat, enum mk_st_dtype dtype, uint32_t cols)
{
    mat->wtype = MK_W_BF16;
    mat->exact = 0;
    mat->scale_k = 128;
    mat->tensor_rows = 0;
    if (mat == &r->m->lm_head && r->m->lm_head_mode == MK_LM_HEAD_FP8) {
        mat->wtype = MK_W_FP8;
        if (dtype != MK_ST_F8_E4M3) mat->scale_k = 0;
        return MK_OK;
    }
    if (r->mode == MK_WEIGHTS_BF16 || (mat == &r->m->lm_head && r->m->lm_head_mode == MK_LM_HEAD_BF16)) return MK_OK;
    if (dtype == MK_ST_F8_E4M3 && mat->keep_bf16 != 2) {
        mat->wtype = MK_W_FP8;
        if (mat->source == MK_SRC_PLAIN || mat->source == MK_SRC_STACKED || blocks_map(mat, cols)) return MK_OK;
        return mk_fail(r->err, MK_E_MODEL,
                       "tensor %s: its 128x128 FP8 blocks straddle the heads (%u of %u rows from row %u), pass --weights bf16", mat->tensor,
                       mat->head_n, mat->head_stride, mat->head_off);
    }
    if (r->mode == MK_WEIGHTS_FP8 && !mat->keep_bf16)
        mat->wtype = MK_W_FP8;
    else
        mat->exact = dtype == MK_ST_F8_E4M3 || (dtype != MK_ST_BF16 && r->mode == MK_WEIGHTS_AUTO);
    return MK_OK;
}

static void resolve_mat(void *arg, mk_mat *mat, uint32_t cols, uint32_t experts)
{
    resolver *r = arg;
    if (r->rc) return;
    if (!r->ck) {
        r->rc = decide(r, mat, r->m->fp8_source && !mat->keep_bf16 ? MK_ST_F8_E4M3 : MK_ST_BF16, cols);
        return;
    }
    uint64_t rows = mat->n;
    if (mat->source == MK_SRC_HEAD_ROWS) rows = (uint64_t)mat->n / mat->head_n * mat->head_stride;
    if (mat->source == MK_SRC_HEAD_T) rows = (uint64_t)mat->n / cols * mat->head_stride;
    const mk_tensor *first = find_spelling(r, mat->tensor);
    if (experts > 1 && first && !strstr(mat->tensor, "%u")) { /* one tensor for all of them */
        if (!(r->rc = check_stacked(r, mat, first, experts))) r->rc = decide(r, mat, first->dtype, cols);
        return;
    }
    for (uint32_t e = 0; !r->rc && e < experts; e++) {
        const mk_tensor *t = e ? lookup(r, mat->tensor, e) : first;
        if (!t) {
            char name[MK_NAME + 16];
            mk_expert_name(name, mat->tensor, e);
            r->rc = mk_fail(r->err, MK_E_MODEL, "tensor %s is missing, expected [%llu, %u]", name, (unsigned long long)rows, cols);
        } else if (!(r->rc = check_mat(r, mat, t, rows, cols)) && t->dtype != first->dtype) {
            r->rc = mk_fail(r->err, MK_E_MODEL, "%s: tensor %s has another dtype than %s: experts must agree", t->file, t->name, first->name);
        }
    }
    if (!r->rc) r->rc = decide(r, mat, first->dtype, cols);
}

static void resolve_par(void *arg, mk_par *par, uint32_t inner)
{
    resolver *r = arg;
    if (r->rc) return;
    const mk_tensor *t = find_spelling(r, par->tensor);
    if (!t) {
        r->rc = mk_fail(r->err, MK_E_MODEL, "tensor %s is missing, expected %u values", par->tensor, par->n);
        return;
    }
    /* Dimensions of 1 come and go between publishers ([1, 1, heads, 1]); the others must be [n] or [n / inner, inner]. */
    uint64_t want[2] = {par->n / inner, inner}, have[2] = {1, 1};
    uint32_t n = 0;
    for (uint32_t i = 0; i < t->ndim; i++)
        if (t->shape[i] != 1 && n++ < 2) {
            have[0] = have[1];
            have[1] = t->shape[i];
        }
    if (n > 2 || have[0] != want[0] || have[1] != want[1]) {
        char shape[96], expected[64];
        shape_text(t, shape);
        if (inner == par->n)
            snprintf(expected, sizeof expected, "%u values", par->n);
        else
            snprintf(expected, sizeof expected, "[%u, 1, %u]", par->n / inner, inner);
        r->rc = mk_fail(r->err, MK_E_MODEL, "%s: tensor %s has shape %s, config.json makes it %s", t->file, t->name, shape, expected);
    } else if (!is_float(t->dtype)) {
        r->rc = mk_fail(r->err, MK_E_MODEL, "%s: tensor %s has an unsupported dtype, expected BF16, F16 or F32", t->file, t->name);
    } else {
        mark(r, t);
    }
}

/* Whether the checkpoint has a matrix quantised already. */
static int is_quantised(const resolver *r, const mk_mat *mat)
{
    return r->ck ? lookup(r, mat->tensor, 0)->dtype == MK_ST_F8_E4M3 : r->m->fp8_source;
}

/* Where the queries come out of a low rank, W_UK times its second matrix is one matrix, and saves a step the exchange between the two. Its bytes are more: as many as memory brings during an
 * exchange are worth it (2 us; profiles/NOTES.md, fiftieth session). Quantised once more, weights that are quantised already would lose by it. */
#define FOLD_BYTES (8u << 20)
static int fold_pays(const resolver *r, const mk_mla_mixer *a)
{
    const uint64_t folded = (uint64_t)a->uk.n * a->q.k, apart = (uint64_t)a->heads * a->nope * (a->q.k + a->latent), bytes = a->q.wtype == MK_W_FP8 ? 1 : 2;
    if (a->q_a.source == MK_SRC_NONE || !a->rope || a->q.wtype != a->uk.wtype || folded * bytes > apart * bytes + FOLD_BYTES) return 0;
    return !a->q.exact && !a->uk.exact && (a->q.wtype == MK_W_BF16 || (!is_quantised(r, &a->q) && !is_quantised(r, &a->uk)));
}
static void fold_queries(mk_mla_mixer *a, int fold)
{
    a->qt = a->q_pe = a->q;
    a->qt.source = a->q_pe.source = MK_SRC_NONE;
    if (!fold) return;
    a->qt.source = MK_SRC_FOLDED;
    a->qt.by = &a->uk;
    a->qt.n = a->uk.n;
    a->qt.head_n = a->nope;
    a->q_pe.source = MK_SRC_HEAD_ROWS;
    a->q_pe.n = a->heads * a->rope;
    a->q_pe.head_n = a->rope;
    a->q_pe.head_off = a->nope;
    a->qt.head_stride = a->q_pe.head_stride = a->nope + a->rope;
}

/* gate and up are one instruction with one weight type; all of an expert's matrices have the same. */
static int check_pair(resolver *r, const mk_mat *a, const mk_mat *b)
{
    if (a->source == MK_SRC_NONE || (a->wtype == b->wtype && a->scale_k == b->scale_k)) return MK_OK;
    return mk_fail(r->err, MK_E_MODEL, "tensors %s and %s: one is FP8, the other is not; pass --weights fp8 or bf16", a->tensor, b->tensor);
}

static int is_skipped(const resolver *r, const char *name)
{
    static const char suffix[] = ".rotary_emb.inv_freq"; /* computed, stored by old versions of transformers */
    size_t n = strlen(name), k = sizeof suffix - 1;
    if (n >= k && !strcmp(name + n - k, suffix)) return 1;
    for (uint32_t i = 0; i < r->m->n_skipped; i++) {
        const char *p = r->m->skipped[i];
        if (r->bare && !strncmp(p, "model.", 6)) p += 6;
        if (strncmp(name, p, strlen(p))) continue;
        r->m->skipped_tensors[i]++;
        return 1;
    }
    return 0;
}

static int check_leftovers(const resolver *r)
{
    const mk_tensor *first = NULL;
    size_t n = 0;
    memset(r->m->skipped_tensors, 0, sizeof r->m->skipped_tensors);
    for (size_t i = 0; i < mk_checkpoint_count(r->ck); i++) {
        const mk_tensor *t = mk_checkpoint_at(r->ck, i);
        if (r->used[i] || is_skipped(r, t->name)) continue;
        if (!n++) first = t;
    }
    if (!n) return MK_OK;
    if (n == 1) return mk_fail(r->err, MK_E_MODEL, "%s: tensor %s is not part of %s as config.json describes it", first->file, first->name, r->m->arch);
    return mk_fail(r->err, MK_E_MODEL, "%s: tensor %s and %zu more are not part of %s as config.json describes it", first->file, first->name, n - 1,
                   r->m->arch);
}

int mk_model_resolve(mk_model *m, const mk_checkpoint *ck, enum mk_weights_mode mode, mk_err *err)
{
    const mk_arch *a = find_arch(m->arch);
    resolver r = {.m = m, .ck = ck, .mode = mode, .alias = a ? a->alias : NULL, .err = err};
    walker w = {.mat = resolve_mat, .par = ck ? resolve_par : NULL, .arg = &r};
    if (ck) {
        if (!mk_checkpoint_count(ck)) return mk_fail(err, MK_E_MODEL, "the checkpoint holds no tensors");
        if (!(r.used = calloc(mk_checkpoint_count(ck), 1))) return mk_fail(err, MK_E_SYSTEM, "out of memory");
        const char *e = m->embed.tensor;
        r.bare = !strncmp(e, "model.", 6) && !mk_checkpoint_find(ck, e) && mk_checkpoint_find(ck, e + 6);
        r.nested = !r.bare && !mk_checkpoint_find(ck, e) && mk_checkpoint_find(ck, "model.language_model.embed_tokens.weight");
    }
    walk(m, &w);
    int fold = 1;
    for (uint32_t i = 0; !r.rc && i < m->layers; i++) {
        mk_layer *y = &m->layer[i];
        if (y->mixer == MK_MIX_MLA) fold &= fold_pays(&r, &y->mla);
        if (y->ffn == MK_FFN_DENSE) {
            r.rc = check_pair(&r, &y->dense.gate, &y->dense.up);
        } else if (y->ffn == MK_FFN_MOE) {
            r.rc = check_pair(&r, &y->moe.gate, &y->moe.up);
            if (!r.rc) r.rc = check_pair(&r, &y->moe.gate, &y->moe.down);
            if (!r.rc) r.rc = check_pair(&r, &y->moe.shared.gate, &y->moe.shared.up);
        }
    }
    for (uint32_t i = 0; !r.rc && i < m->layers; i++) /* all or none: they share their vectors */
        if (m->layer[i].mixer == MK_MIX_MLA) fold_queries(&m->layer[i].mla, fold);
    if (!r.rc && ck) r.rc = check_leftovers(&r);
    free(r.used);
    return r.rc;
}
