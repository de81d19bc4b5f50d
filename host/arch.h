/* What the architecture files share: the table of architectures, and a reader of config.json that knows which fields it has seen.
 *
 * Errors stick: after the first one, every reader returns its lower limit (or 0) and leaves the message alone, so that an architecture
 * file reads all its fields and looks at cfg.rc once. A name may hold several spellings, "a|b": the first is the published one; two
 * that are present and disagree are refused. Reading a field takes it out of the object; mk_cfg_done refuses what is left. */
#ifndef MK_ARCH_H
#define MK_ARCH_H

#include <jansson.h>

#include "host/model.h"

typedef struct mk_cfg {
    json_t *obj;       /* our own copy: fields are taken out as they are read */
    char where[256];   /* "config.json", for messages; no ':' after it */
    char path[64];     /* "linear_attn_config." inside an object */
    char found[64];    /* the spelling of the field read last */
    mk_err *err;
    int rc;
} mk_cfg;

/* A regular file of at most 64 MB that holds one JSON object without duplicate keys. The caller owns *root. */
int mk_json_read(const char *path, json_t **root, mk_err *err);

int mk_cfg_fail(mk_cfg *c, const char *names, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Takes the field out; NULL when absent or null. Owned by the caller. */
json_t *mk_cfg_take(mk_cfg *c, const char *names);

uint32_t mk_cfg_int(mk_cfg *c, const char *names, uint32_t lo, uint32_t hi);
uint32_t mk_cfg_int_or(mk_cfg *c, const char *names, uint32_t lo, uint32_t hi, uint32_t absent);
double mk_cfg_num(mk_cfg *c, const char *names, double lo, double hi);
double mk_cfg_num_or(mk_cfg *c, const char *names, double lo, double hi, double absent);
int mk_cfg_bool_or(mk_cfg *c, const char *names, int absent);
/* A list of n integers in lo..hi into v[max]; 0 when absent. */
uint32_t mk_cfg_ints(mk_cfg *c, const char *names, uint32_t lo, uint32_t hi, uint32_t *v, uint32_t max);
/* A list of exactly n strings, each "yes" or "no": v[i] = 1 or 0. Returns 0 when absent. */
int mk_cfg_choices(mk_cfg *c, const char *names, const char *yes, const char *no, uint8_t *v, uint32_t n);
/* If present, the field must have one of these JSON values, "false" or "\"silu\"|\"swish\"": anything else is refused. */
void mk_cfg_expect(mk_cfg *c, const char *names, const char *values);
/* Fields that do not change the result. Every spelling is a field of its own here. */
void mk_cfg_ignore(mk_cfg *c, const char *names);
/* Takes an object out for reading with the same functions, then mk_cfg_done. Returns 0 when absent or null: there is then nothing
 * to read or to end. */
int mk_cfg_object(mk_cfg *c, const char *name, mk_cfg *sub);
/* Refuses fields that nobody read, frees the copy, hands an error on to `parent` (may be NULL). */
int mk_cfg_done(mk_cfg *c, mk_cfg *parent);

/* Fills a matrix that is a tensor of its own; the tensor's name is printed from fmt, which ends without ".weight". */
void mk_mat_plain(mk_mat *m, uint32_t n, uint32_t k, int keep_bf16, const char *fmt, ...) __attribute__((format(printf, 5, 6)));
void mk_par_set(mk_par *p, uint32_t n, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* ---- what several architectures read and fill alike (host/arch_parts.c, host/arch_rope.c) ---- */

#define MK_MAX_LAYERS 511u /* h is published twice a layer, and once before: below MK_EPOCH_STRIDE (isa.h) */
#define MK_MAX_WIDTH  65536u

/* v, refused when it is no multiple of 16. */
uint32_t mk_cfg_16(mk_cfg *c, const char *names, uint32_t v);
/* Every one of these fields must be there. */
void mk_cfg_require(mk_cfg *c, const char *names);
/* mlp_layer_types, or first_k_dense_replace (`absent` when neither is there, UINT32_MAX: refused); or both, if they agree. */
void mk_cfg_ffns(mk_cfg *c, uint32_t layers, uint32_t absent, uint8_t *sparse);

/* DeepSeek-V3's routing (models.md 3.6): dimensions into e; *shared: how many experts wide the shared one is. */
typedef struct mk_moe_names {
    const char *experts, *topk, *shared, *groups, *renorm;
} mk_moe_names;
void mk_cfg_sigmoid_moe(mk_cfg *c, const mk_moe_names *n, mk_moe *e, uint32_t *shared);

typedef struct mk_mla_shape {
    uint32_t heads, q_rank, latent, nope, rope, v; /* q_rank 0: no query compression */
} mk_mla_shape;
void mk_cfg_mla(mk_cfg *c, mk_mla_shape *k);

/* rope_parameters {rope_type, rope_theta, ...}, or rope_theta and rope_scaling {type, ...}. Types: default, yarn. */
typedef struct mk_rope {
    double theta;
    uint32_t dim;        /* dimensions that turn */
    double attention;    /* q and k are multiplied by it after turning (YaRN's attention factor), else 1 */
    double mscale;       /* the softmax scale is multiplied by its square (YaRN with mscale_all_dim, MLA only), else 1 */
    float inv_freq[128]; /* [dim / 2] */
} mk_rope;
void mk_cfg_rope(mk_cfg *c, uint32_t dim, mk_rope *r);
/* The same for attention with whole heads of `dim` values, of which partial_rotary_factor turn (`part` when absent). Types: default,
 * llama3. */
void mk_cfg_rope_head(mk_cfg *c, uint32_t dim, double part, mk_rope *r);

/* host/arch_gqa.c */
typedef struct mk_gqa_shape {
    uint32_t heads, kv_heads, dim;
    int gated;                     /* rows of q_proj are [q | gate] a head */
    int normed;                    /* q_norm and k_norm exist, weights stored as 1 less */
    float eps;                     /* theirs */
    mk_rope rope;
} mk_gqa_shape;
/* num_attention_heads, num_key_value_heads, head_dim (hidden / heads when absent), rope; `part`: see mk_cfg_rope_head. */
void mk_cfg_gqa(mk_cfg *c, uint32_t hidden, double part, mk_gqa_shape *k);
int mk_fill_gqa(const mk_gqa_shape *k, uint32_t layer, uint32_t hidden, mk_gqa_mixer *a);

void mk_norm_set(mk_norm *n, uint32_t width, float eps, uint32_t layer, const char *name);
/* rope NULL: nothing is rotated. MK_E_SYSTEM: out of memory. */
int mk_fill_mla(const mk_mla_shape *k, const mk_rope *rope, uint32_t layer, uint32_t hidden, mk_mla_mixer *a);
/* "model.layers.L.AT.gate_proj" and so on. */
void mk_fill_dense(mk_ffn_dense *f, uint32_t hidden, uint32_t inter, uint32_t layer, const char *at);
/* Matrices of e, whose dimensions are set; names: of an expert's gate, up and down. */
void mk_fill_moe(mk_moe *e, uint32_t hidden, uint32_t shared, uint32_t layer, const char *at, const char *const names[3]);
/* Embedding, final norm and head of a model whose hidden, vocab and tied are set. */
void mk_fill_ends(mk_model *m, float eps);

/* Spellings of tensor names: where a tensor is not there, `from` in its name is replaced by `to`. */
typedef struct mk_alias {
    const char *from, *to;
} mk_alias;

typedef struct mk_arch {
    const char *name;       /* architectures[0] */
    const char *model_type; /* must agree; "a|b": either */
    /* Fills hidden .. skipped of a zeroed model whose `arch` is set; reads the fields that mk_model_read has not taken. */
    int (*read)(mk_cfg *c, mk_model *m, mk_err *err);
    const mk_alias *alias; /* ends with {NULL, NULL} */
} mk_arch;

/* Every architecture. A new one is a file arch_<family>.c that defines it, and its name here. */
#define MK_ARCHS(X) X(kimi_linear) X(deepseek_v3) X(glm4_moe_lite) X(llama) X(qwen3_next) X(qwen3_5_moe) X(qwen3_5_moe_vl) X(qwen3_5) X(qwen3_5_vl)
#define X(name) extern const mk_arch mk_arch_##name;
MK_ARCHS(X)
#undef X

#endif
