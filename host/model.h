/* A model as the planner sees it: dimensions, mathematics constants and, for every matrix, where its rows come from. Nothing here
 * names an architecture: host/arch_<family>.c fills it from a config.json (one file a family), host/planner.c compiles it,
 * host/pack.c fills the tapes. Needs no weights: `mkctl plan config.json` stops here. */
#ifndef MK_MODEL_H
#define MK_MODEL_H

#include "host/err.h"
#include "host/formats.h"
#include "instructions/isa.h"

#define MK_NAME 160

enum mk_weights_mode {
    MK_WEIGHTS_AUTO = 0, /* as stored: FP8 stays FP8, BF16 stays BF16; F16 and F32 become BF16 only where that is exact */
    MK_WEIGHTS_FP8,      /* everything models.md section 4 does not keep in BF16 becomes FP8 blocks */
    MK_WEIGHTS_BF16,     /* everything becomes BF16 (FP8 is dequantised, F32 rounded: said once in the log) */
};

/* The LM head alone; what it is stored as, or the weights mode, decides by default. */
enum mk_lm_head_mode {
    MK_LM_HEAD_AUTO = 0, /* BF16, unless the checkpoint has it quantised */
    MK_LM_HEAD_FP8,      /* e4m3 with a scale a row (stored as FP8: with the blocks that it has), whatever the other weights are: half the bytes of what is up to a fifth of a
                          * token's */
    MK_LM_HEAD_BF16,
};

/* An n x k matrix used as y = W x. */
typedef struct mk_mat {
    char tensor[MK_NAME]; /* checkpoint name with ".weight"; may hold one %u for the expert */
    uint8_t source;       /* enum mk_source */
    uint8_t keep_bf16;    /* models.md section 4 keeps it BF16 (router, lm_head, b_proj, ...). 2: even if it is stored as FP8 (EMBED, ROUTER) */
    uint8_t wtype;        /* enum mk_wtype, decided by mk_model_resolve */
    uint8_t exact;        /* MK_W_BF16 out of another dtype: refuse values that BF16 does not hold (mk_model_resolve) */
    uint32_t n, k;
    uint32_t head_n, head_off, head_stride;
    uint16_t scale_k; /* columns a scale of 128 rows covers: 128, or 64 where heads straddle blocks. 0: a scale a row (LM head) */
    const struct mk_mat *by; /* MK_SRC_FOLDED: W_UK, a MK_SRC_HEAD_T of head_n columns; outlives this one */
    uint8_t tensor_rows; /* MK_SRC_HEAD_ROWS: its 128-row scale blocks are the tensor's, since heads straddle them; pieces of it (GEMV,
                            mk_mat_fetch) then lie in one head. Else they are those of the matrix */
} mk_mat;

/* The row that scale blocks are counted by: of the tensor with tensor_rows, else of the matrix. */
uint32_t mk_mat_scale_row(const mk_mat *mat, uint32_t row);

/* A small f32 parameter: the tensor's values in row-major order, plus `add` (1 for zero-centred norms). */
typedef struct mk_par {
    char tensor[MK_NAME]; /* "" : absent */
    uint32_t n;
    float add;
} mk_par;

typedef struct mk_norm {
    mk_par gamma;
    float eps;
} mk_norm;

enum mk_mixer { MK_MIX_DELTA = 1 /* KDA, GDN */, MK_MIX_MLA = 2, MK_MIX_GQA = 3 };
enum mk_ffn { MK_FFN_NONE = 0 /* benchmarks of mixers alone */, MK_FFN_DENSE = 1, MK_FFN_MOE = 2 };

/* Gated delta rule with short convolution (models.md 3.2). */
typedef struct mk_delta_mixer {
    uint32_t heads, k_heads, dk, dv, taps; /* k_heads divides heads (KDA: equal) */
    uint8_t decay;                         /* enum mk_decay */
    uint8_t gate;                          /* enum mk_gate */
    mk_mat q, k, v, o;
    mk_mat f_a, f_b, g_a, g_b, b; /* KDA: low-rank decay and gate, beta */
    mk_mat z, a;                  /* GDN: gate and decay, straight from the input; f_a .. g_b do not exist */
    mk_par conv_q, conv_k, conv_v; /* [channels, 1, taps] */
    uint32_t conv_at[3];           /* first channel of q, k and v in their tensor (GDN: one tensor for the three) */
    mk_par a_log, dt_bias, o_norm;
    float o_eps;
} mk_delta_mixer;

/* Multi-head latent attention, absorbed (models.md 3.3). */
typedef struct mk_mla_mixer {
    uint32_t heads, nope, rope, v, latent;
    mk_mat q;        /* [heads*(nope+rope), hidden] or, with q_a, [.., q_a.n] */
    mk_mat q_a;      /* MK_SRC_NONE: no query compression */
    mk_norm q_a_norm;
    mk_mat kv_a;     /* [latent + rope, hidden] */
    mk_norm kv_norm;
    mk_mat uk, uv;   /* [heads*latent, nope] and [heads*v, latent], both out of kv_b_proj */
    mk_mat qt, q_pe; /* in place of q and uk, where mk_model_resolve finds that to pay: [heads*latent, q_a.n], which makes q~ of q_a, and [heads*rope, q_a.n], q's other rows; else
                        MK_SRC_NONE. Not among mk_model_mats */
    mk_mat o;
    float scale;     /* softmax */
    uint8_t rotary;  /* 0 none, 1 interleaved */
    float rope_scale; /* the rotated part of a score is multiplied by it (YaRN's attention factor squared); else 1 */
    float *inv_freq; /* [rope/2], owned; NULL without rotation */
} mk_mla_mixer;

/* Grouped-query attention (models.md 3.5). */
typedef struct mk_gqa_mixer {
    uint32_t heads, kv_heads, dim;
    uint32_t rope;         /* leading values of a head that are rotated, half-split */
    uint8_t gated;         /* rows of q are [q | gate] a head; the output is multiplied by sigmoid(gate) */
    mk_mat q, k, v, o;     /* q: [heads * dim * (1 + gated), hidden] */
    mk_norm q_norm, k_norm; /* over a head; "" when absent */
    float scale;           /* softmax */
    float *inv_freq;       /* [rope/2], owned */
} mk_gqa_mixer;

typedef struct mk_ffn_dense {
    uint32_t inter; /* 0: absent */
    mk_mat gate, up, down;
} mk_ffn_dense;

typedef struct mk_moe {
    uint32_t experts, topk, groups, topk_groups, inter;
    uint8_t score, renorm; /* enum mk_score */
    float scale;
    mk_mat router;
    mk_par bias;           /* "" when absent */
    mk_mat gate, up, down; /* of one expert: tensor names hold %u */
    mk_ffn_dense shared;   /* inter 0: none */
    mk_mat shared_gate;    /* [1, hidden]: the shared expert's output times sigmoid of it; MK_SRC_NONE: not gated */
} mk_moe;

typedef struct mk_layer {
    uint8_t mixer, ffn; /* enum mk_mixer, enum mk_ffn */
    mk_norm in_norm, post_norm;
    union {
        mk_delta_mixer delta;
        mk_mla_mixer mla;
        mk_gqa_mixer gqa;
    };
    union {
        mk_ffn_dense dense;
        mk_moe moe;
    };
} mk_layer;

typedef struct mk_model {
    char arch[64]; /* "KimiLinearForCausalLM" */
    uint32_t hidden, layers, vocab, max_context;
    mk_mat embed, lm_head; /* tied: the same tensor */
    uint8_t tied;
    uint8_t lm_head_mode; /* enum mk_lm_head_mode; set between mk_model_read and mk_model_resolve */
    uint8_t kv_cache;     /* enum mk_cache; set before mk_plan_make */
    mk_norm final_norm;
    float embed_scale;
    mk_layer *layer; /* [layers], owned */
    uint32_t n_skipped; /* tensors of the checkpoint that this path does not use, by prefix */
    char skipped[4][MK_NAME];
    uint32_t skipped_tensors[4]; /* how many there were: mk_model_resolve */
    /* defaults of requests, from generation_config.json over config.json; n_stop <= MK_MAX_STOP */
    uint32_t bos, pad;
    uint32_t n_media, media[2]; /* ids that stand for an image or a video: refused in a prompt, only text is read */
    uint32_t n_stop, stop[16];
    float temperature, top_p, min_p;
    uint32_t top_k;
    uint8_t fp8_source; /* quantization_config says fp8 with 128x128 blocks */
} mk_model;

/* Reads `path`: a Hugging Face directory, or a config.json. Every field that changes the result and is not supported is refused by
 * name ("config.json: rope_scaling.type is \"longrope\", supported: ..."). */
int mk_model_read(const char *path, mk_model **m, mk_err *err);
/* Keeps the first `layers` of them. */
void mk_model_keep(mk_model *m, uint32_t layers);
void mk_model_destroy(mk_model **m);

struct mk_checkpoint;
/* Decides every matrix's wtype. With a checkpoint: by the stored dtype, after checking that every tensor the model names exists with
 * the right shape; without (ck NULL): by quantization_config. */
int mk_model_resolve(mk_model *m, const struct mk_checkpoint *ck, enum mk_weights_mode mode, mk_err *err);

/* Calls f for every matrix of the model (experts once, with their %u names). */
typedef void (*mk_mat_fn)(void *arg, mk_mat *mat);
void mk_model_mats(mk_model *m, mk_mat_fn f, void *arg);

#endif
