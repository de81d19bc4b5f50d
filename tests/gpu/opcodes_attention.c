/* KV_APPEND, MLA_PARTIAL, COMBINE, GQA_APPEND, GQA_PARTIAL. Logical rows 0, 1, 2 are three tokens of one stream that cross a page edge; the others stand at
 * positions that exercise page and split edges, the last two far away, of which each is the only row of a step as well. A run of GQA_PARTIAL: all rows are one stream's. Whatever of the cache no token has is NaN. */
#include "instructions/latent.h"
#include "tests/gpu/opcodes.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct mla_arg {
    uint32_t latent, rope, rotary, heads, far; /* far: the greatest position */
    uint32_t slices, gate;                     /* COMBINE: slices of a head */
    uint32_t cache;                            /* enum mk_cache */
    uint32_t made;                             /* GEMVs make the absorbed queries, two a worker, behind another: in a step of one row the warps aside have the first item's queries */
} mla_arg;

static void positions(mk_case *c, uint32_t far)
{
    const uint32_t pos[CASE_STREAMS] = {62, 0, 0, 0, 63, 64, far / 2 + 1, far, 5};
    memcpy(c->pos, pos, sizeof pos);
}

/* The first n logical rows are consecutive tokens of stream 0, from position `first` on. */
static void rows_of_one_stream(mk_case *c, uint32_t n, uint32_t first)
{
    for (uint32_t r = 0; r < c->step.nrows; r++) {
        mk_row *row = &c->step.row[r];
        if (c->row_id[r] >= n) continue;
        row->slot = row->state_read = row->state_write = 0;
        row->pos = first + c->row_id[r];
        row->flags &= ~(uint32_t)MK_ROW_FIRST;
    }
}
static void rows_of_streams(mk_case *c)
{
    rows_of_one_stream(c, 3, c->pos[0]);
}

/* bf16 values between -2 and 2 for all tokens that a row of the step looks at. */
static void fill_cache(mk_case *c, uint32_t row_bytes, uint32_t values, uint32_t strips)
{
    for (uint32_t r = 0; r < c->step.nrows; r++) {
        const mk_row *row = &c->step.row[r];
        uint64_t s = case_rng(c, 7100, row->slot);
        for (uint32_t t = 0; t <= row->pos; t++) {
            uint8_t *page = c->mem.kv + (uint64_t)c->mem.page[row->slot * c->mem.max_pages + t / MK_PAGE] * c->prog.info.kv_page_bytes;
            for (uint32_t k = 0; k < strips; k++) {
                uint16_t *to = (uint16_t *)(strips == 1 ? page + (uint64_t)(t % MK_PAGE) * row_bytes : page + (((uint64_t)k * MK_PAGE + t % MK_PAGE) * values) * 2);
                for (uint32_t i = 0; i < values; i += 4) {
                    uint64_t x = case_random(&s);
                    for (uint32_t j = 0; j < 4 && i + j < values; j++) to[i + j] = mk_f32_to_bf16((float)((int)(x >> (16 * j) & 0xff) - 128) / 64 + 0.0078f);
                }
            }
        }
    }
}

/* Groups of three sizes, of which one is coded as e4m3's subnormals alone, under a scale 2^15 as large; bf16 keys. */
static void fill_latents(mk_case *c, const mla_arg *a)
{
    const uint32_t bytes = mk_latent_row_bytes(a->latent, a->rope, a->cache, 2), key = mk_latent_key_at(a->latent, a->cache, 2);
    for (uint32_t r = 0; r < c->step.nrows; r++) {
        const mk_row *row = &c->step.row[r];
        uint64_t s = case_rng(c, 7200, row->slot);
        for (uint32_t t = 0; t <= row->pos; t++) {
            uint8_t *to = c->mem.kv + (uint64_t)c->mem.page[row->slot * c->mem.max_pages + t / MK_PAGE] * c->prog.info.kv_page_bytes + (uint64_t)(t % MK_PAGE) * bytes;
            for (uint32_t g = 0; g < a->latent; g += MK_LATENT_GROUP) {
                uint32_t kind = (uint32_t)(case_random(&s) % 3);
                float top = kind ? 1 : 0.25f, *scale = (float *)(void *)(to + a->latent) + g / MK_LATENT_GROUP;
                uint32_t bits = mk_latent_scale(mk_f32_bits(top)) + (kind == 2 ? 15u << 23 : 0);
                *scale = mk_bits_f32(bits);
                for (uint32_t i = g; i < a->latent && i < g + MK_LATENT_GROUP; i++) to[i] = mk_latent_code(top * (float)(2 * case_uniform(&s) - 1), bits);
            }
            for (uint32_t i = 0; i < a->rope; i++) ((uint16_t *)(void *)(to + key))[i] = mk_f32_to_bf16(2 * (float)case_uniform(&s) - 1);
        }
    }
}

/* ---- MLA ------------------------------------------------------------------------------------------------------------- */

static uint32_t mla_params(mk_case *c, const mla_arg *a)
{
    case_param(c, 5, 0, 1);
    uint32_t at = case_param(c, a->latent, 1, 0.2);
    for (uint32_t i = 0; i < a->rope / 2; i++) case_param(c, 1, pow(10000, -2.0 * i / a->rope), 0);
    return at;
}

static void append_make(mk_case *c, const void *arg)
{
    const mla_arg *a = arg;
    uint32_t n = a->latent + a->rope;
    case_even(c, "kv", MK_BF16, 0, n + 5, 9);
    case_bulk(c, "kvcache", 0, 1);
    mk_insn *in = case_add(c, 1, MK_OP_KV_APPEND);
    in->mla = (mk_mla){.in_off = 3, .latent = (uint16_t)a->latent, .rope = (uint16_t)a->rope, .all_heads = 1, .eps = 1e-6f, .param_off = mla_params(c, a),
                       .rotary = (uint8_t)a->rotary, .cache = a->cache};
    case_wait(c, in, 0);
    case_to(c, in, 1, 0);
    case_seal(c, &(case_sizes){.kv_page = (uint64_t)mk_latent_row_bytes(a->latent, a->rope, a->cache, 2) * MK_PAGE, .context = a->far + 4});
    positions(c, a->far);
}

static void append_feed(mk_case *c, const void *arg)
{
    (void)arg;
    case_input(c, 0, 1.3);
    rows_of_streams(c);
}

/* n rows of BF16, the `slice`th so many, times values [in_off, in_off + k) of a vector. */
static void gemv(mk_case *c, uint32_t worker, uint32_t n, uint32_t k, uint32_t in_off, uint32_t from, uint32_t to, uint32_t slice)
{
    mk_insn *in = case_add(c, worker, MK_OP_GEMV);
    in->gemv = (mk_gemv){.n = n, .k = k, .in_off = in_off, .wtype = MK_W_BF16, .epilogue = MK_EPI_STORE, .scale_k = 128, .k_chunk = k, .scale = 1, .row0 = n * slice};
    in->tape_bytes = (uint32_t)mk_segment_bytes(MK_W_BF16, n, k, 0, 128);
    case_wait(c, in, from);
    case_to(c, in, to, slice);
}

/* W_UK of a head: its nope values of q times 128 rows a GEMV. And one on other values before them, for what is done aside stands behind an instruction. */
static void made_queries(mk_case *c, const mla_arg *a, uint32_t nope)
{
    const uint32_t W = c->prog.info.workers, cut = a->latent / 128, y = case_even(c, "y", MK_BF16, 0, 64, 4), z = case_even(c, "z", MK_BF16, 0, 8 * W, W);
    for (uint32_t w = 0; w < W; w++) gemv(c, w, 8, 64, 0, y, z, w);
    for (uint32_t s = 0; s < a->heads * cut; s++) gemv(c, s % W, 128, nope, s / cut * (nope + a->rope), 1, 0, s);
}

static void mla_make(mk_case *c, const void *arg)
{
    const mla_arg *a = arg;
    uint32_t W = c->prog.info.workers, nope = 64;
    case_even(c, "qt", MK_BF16, 0, a->heads * a->latent, a->made ? a->heads * a->latent / 128 : a->heads);
    case_even(c, "q", MK_BF16, 0, a->heads * (nope + a->rope), a->made ? a->heads : a->heads < 11 ? 1 : 11);
    case_bulk(c, "kvcache", 0, 1);
    case_bulk(c, "partial", (uint64_t)MK_MAX_ROWS * MK_MAX_SPLITS * a->heads * mk_partial_floats(a->latent) * 4, W);
    uint32_t param = mla_params(c, a);
    if (a->made) made_queries(c, a, nope);
    for (uint32_t w = 0; w < W; w++) {
        mk_insn *in = case_add(c, w, MK_OP_MLA_PARTIAL);
        in->mla = (mk_mla){.in_off = nope, .heads = (uint16_t)a->heads, .latent = (uint16_t)a->latent, .rope = (uint16_t)a->rope,
                           .qk_stride = (uint16_t)(nope + a->rope), .all_heads = a->heads, .scale = 1 / sqrtf((float)(128 + a->rope)), .param_off = param,
                           .rotary = (uint8_t)a->rotary, .part = w, .parts = W, .cache = a->cache};
        for (uint32_t v = 0; v < 3; v++) case_wait(c, in, v);
        case_to(c, in, 3, 0);
    }
    case_seal(c, &(case_sizes){.kv_page = (uint64_t)mk_latent_row_bytes(a->latent, a->rope, a->cache, 2) * MK_PAGE, .context = a->far + 4});
    for (uint32_t i = 0; a->made && i < c->n; i++)
        if (c->in[i]->opcode == MK_OP_GEMV) case_segment(c, case_tape(c, i), MK_W_BF16, c->in[i]->gemv.n, c->in[i]->gemv.k, 0, 128, 1);
    positions(c, a->far);
}

static void mla_feed(mk_case *c, const void *arg)
{
    const mla_arg *a = arg;
    case_input(c, a->made ? 4 : 0, 1); /* made_queries' y */
    case_input(c, 1, 1);
    case_signalled(c, 2);
    rows_of_streams(c);
    if (a->cache == MK_CACHE_FP8)
        fill_latents(c, a);
    else
        fill_cache(c, (a->latent + a->rope) * 2, a->latent + a->rope, 1);
}

static void combine_make(mk_case *c, const void *arg)
{
    const mla_arg *a = arg;
    uint32_t W = c->prog.info.workers;
    case_bulk(c, "partial", (uint64_t)MK_MAX_ROWS * MK_MAX_SPLITS * a->heads * mk_partial_floats(a->latent) * 4, 2);
    case_even(c, "gate", MK_BF16, 0, a->heads * a->latent + 7, 9);
    case_even(c, "lat", MK_BF16, 0, a->heads * a->latent, a->heads * a->slices);
    for (uint32_t i = 0; i < a->heads * a->slices; i++) {
        mk_insn *in = case_add(c, i % W, MK_OP_COMBINE);
        uint32_t first = mk_start(i % a->slices, a->latent, a->slices);
        in->mla = (mk_mla){.in_off = a->gate ? 7 : 0, .head0 = i / a->slices, .heads = 1, .latent = (uint16_t)a->latent, .qk_stride = (uint16_t)(a->gate ? a->latent : 0),
                           .all_heads = a->heads, .gate = (uint8_t)a->gate, .first = first, .n = mk_start(i % a->slices + 1, a->latent, a->slices) - first};
        case_wait(c, in, 0);
        if (a->gate) case_wait(c, in, 1);
        case_to(c, in, 2, i);
    }
    case_seal(c, &(case_sizes){.context = a->far + 4});
    positions(c, a->far);
}

static void combine_feed(mk_case *c, const void *arg)
{
    const mla_arg *a = arg;
    uint32_t floats = mk_partial_floats(a->latent);
    case_input(c, 1, 1.5);
    case_signalled(c, 0);
    rows_of_streams(c);
    for (uint32_t r = 0; r < c->step.nrows; r++) {
        uint64_t s = case_rng(c, 7300, c->row_id[r]);
        for (uint32_t i = 0; i < mk_splits(c->step.row[r].pos, 0, 0) * a->heads; i++) {
            float *p = (float *)c->mem.bulk + ((uint64_t)r * MK_MAX_SPLITS * a->heads + i) * floats;
            for (uint32_t k = 0; k < a->latent; k++) p[k] = 8 * (float)case_uniform(&s) - 4;
            p[a->latent] = 3 * case_normal(&s);
            p[a->latent + 1] = (float)(1 + 63 * case_uniform(&s));
        }
    }
}

/* ---- GQA ------------------------------------------------------------------------------------------------------------- */

typedef struct gqa_arg {
    uint32_t heads, kv_heads, dim, rope, norm, far, grain, most;
    uint32_t gap; /* values between two heads' queries */
    uint32_t run; /* 1: all rows are one stream's, logical row CASE_STREAMS - 1 at `far` */
    uint32_t fresh; /* the program appends the newest keys and values: in a step of one row the partials make them themselves */
} gqa_arg;

static uint32_t gqa_params(mk_case *c, const gqa_arg *a)
{
    uint32_t at = case_param(c, a->norm ? a->dim : 0, 1, 0.2);
    for (uint32_t i = 0; i < a->rope / 2; i++) case_param(c, 1, pow(500000, -2.0 * i / a->rope), 0);
    return at;
}

/* Of vector 0, where keys and then values begin at k_off, to the counter 1. */
static void gqa_appends(mk_case *c, const gqa_arg *a, uint32_t k_off, uint32_t param)
{
    for (uint32_t h = 0; h < a->kv_heads; h++) {
        mk_insn *in = case_add(c, h % c->prog.info.workers, MK_OP_GQA_APPEND);
        in->gqa = (mk_gqa){.k_off = k_off, .v_off = k_off + a->kv_heads * a->dim, .heads = (uint16_t)a->heads, .kv_heads = (uint16_t)a->kv_heads, .dim = (uint16_t)a->dim,
                           .rope = (uint16_t)a->rope, .head = (uint16_t)h, .norm = (uint8_t)a->norm, .scale = 1, .eps = a->norm ? 1e-6f : 0, .param_off = param, .parts = 1};
        case_wait(c, in, 0);
        case_to(c, in, 1, 0);
    }
}

static void gappend_make(mk_case *c, const void *arg)
{
    const gqa_arg *a = arg;
    case_even(c, "qkv", MK_BF16, 0, 3 + 2 * a->kv_heads * a->dim, 7);
    case_bulk(c, "kvcache", 0, a->kv_heads);
    gqa_appends(c, a, 3, gqa_params(c, a));
    case_seal(c, &(case_sizes){.kv_page = mk_gqa_page_values(a->kv_heads, a->dim) * 2, .context = a->far + 4});
    positions(c, a->far);
}

static void gqa_make(mk_case *c, const void *arg)
{
    const gqa_arg *a = arg;
    const uint32_t W = c->prog.info.workers, stride = a->dim + a->gap, k_off = 5 + a->heads * stride;
    case_even(c, "q", MK_BF16, 0, k_off + (a->fresh ? 2 * a->kv_heads * a->dim : 0), a->heads);
    case_bulk(c, "kvcache", 0, a->kv_heads);
    case_bulk(c, "partial", (uint64_t)MK_MAX_ROWS * MK_MAX_SPLITS * a->heads * mk_partial_floats(a->dim) * 4, W);
    uint32_t param = gqa_params(c, a);
    if (a->fresh) gqa_appends(c, a, k_off, param);
    for (uint32_t w = 0; w < W; w++) {
        mk_insn *in = case_add(c, w, MK_OP_GQA_PARTIAL);
        in->gqa = (mk_gqa){.q_off = 5, .q_stride = stride, .heads = (uint16_t)a->heads, .kv_heads = (uint16_t)a->kv_heads, .dim = (uint16_t)a->dim,
                           .rope = (uint16_t)a->rope, .norm = (uint8_t)a->norm, .scale = 1 / sqrtf((float)a->dim), .eps = a->norm ? 1e-6f : 0, .param_off = param,
                           .part = w, .parts = W, .grain = (uint8_t)a->grain, .most = (uint8_t)a->most};
        case_wait(c, in, 0);
        case_wait(c, in, 1);
        case_to(c, in, 2, 0);
    }
    case_seal(c, &(case_sizes){.kv_page = mk_gqa_page_values(a->kv_heads, a->dim) * 2, .context = a->far + 4});
    positions(c, a->far);
}

static void gqa_feed(mk_case *c, const void *arg)
{
    const gqa_arg *a = arg;
    case_input(c, 0, 1);
    if (!a->fresh) case_signalled(c, 1);
    if (a->run)
        rows_of_one_stream(c, CASE_STREAMS, a->far + 1 - CASE_STREAMS);
    else
        rows_of_streams(c);
    fill_cache(c, 0, a->dim, 2 * a->kv_heads);
}

#define A(...) append_make, append_feed, &(const mla_arg){__VA_ARGS__}, 0
#define P(...) mla_make, mla_feed, &(const mla_arg){__VA_ARGS__}
#define C(...) combine_make, combine_feed, &(const mla_arg){__VA_ARGS__}, 0
#define K(...) gappend_make, append_feed, &(const gqa_arg){__VA_ARGS__}, 0
#define Q(...) gqa_make, gqa_feed, &(const gqa_arg){__VA_ARGS__}

const case_spec attention_cases[] = {
    {"KV_APPEND", "latent 512, rope 64, rotated", A(.latent = 512, .rope = 64, .rotary = 1, .far = 5000)},
    {"KV_APPEND", "latent 512, rope 64, no positions", A(.latent = 512, .rope = 64, .far = 300)},
    {"KV_APPEND", "latent 64, rope 16", A(.latent = 64, .rope = 16, .rotary = 1, .far = 130)},
    {"MLA_PARTIAL", "32 heads, 512 + 64, to 9000", P(.latent = 512, .rope = 64, .heads = 32, .far = 9000), 7},
    {"MLA_PARTIAL", "20 heads, 512 + 64 rotated, to 4095", P(.latent = 512, .rope = 64, .rotary = 1, .heads = 20, .far = 4095), 7},
    {"MLA_PARTIAL", "64 heads, 512 + 64 rotated, to 1100", P(.latent = 512, .rope = 64, .rotary = 1, .heads = 64, .far = 1100), 5},
    {"MLA_PARTIAL", "16 heads, 512 + 64 rotated, to 4096", P(.latent = 512, .rope = 64, .rotary = 1, .heads = 16, .far = 4096), 132},
    {"MLA_PARTIAL", "3 heads, 64 + 16, to 200", P(.latent = 64, .rope = 16, .rotary = 1, .heads = 3, .far = 200), 3},
    {"COMBINE", "8 heads of 512 in 4 slices, to 9000", C(.latent = 512, .heads = 8, .slices = 4, .far = 9000)},
    {"COMBINE", "3 heads of 64 in 1 slice", C(.latent = 64, .heads = 3, .slices = 1, .far = 200)},
    {"COMBINE", "4 heads of 256 in 2 slices, gated", C(.latent = 256, .heads = 4, .slices = 2, .gate = 1, .far = 4095)},
    {"COMBINE", "8 heads of 128 in 1 slice, gated", C(.latent = 128, .heads = 8, .slices = 1, .gate = 1, .far = 700)},
    {"COMBINE", "3 heads of 512 in 1 slice, gated, to 4096", C(.latent = 512, .heads = 3, .slices = 1, .gate = 1, .far = 4096)},
    {"COMBINE", "5 heads of 192 in 1 slice, gated, to 3000", C(.latent = 192, .heads = 5, .slices = 1, .gate = 1, .far = 3000)},
    {"GQA_APPEND", "8 KV heads of 128", K(.heads = 32, .kv_heads = 8, .dim = 128, .rope = 128, .far = 300)},
    {"GQA_APPEND", "2 KV heads of 256, rope 64, norm", K(.heads = 16, .kv_heads = 2, .dim = 256, .rope = 64, .norm = 1, .far = 300)},
    {"GQA_PARTIAL", "32 heads, 8 KV heads of 128, to 1100", Q(.heads = 32, .kv_heads = 8, .dim = 128, .rope = 128, .far = 1100), 7},
    {"GQA_PARTIAL", "16 heads, 2 KV heads of 256, rope 64, norm, to 9000", Q(.heads = 16, .kv_heads = 2, .dim = 256, .rope = 64, .norm = 1, .far = 9000), 7},
    {"GQA_PARTIAL", "8 heads, 2 KV heads of 64, to 4096", Q(.heads = 8, .kv_heads = 2, .dim = 64, .rope = 64, .far = 4096), 132},
    {"GQA_PARTIAL", "32 heads, 8 KV heads of 64, few splits, to 9000", Q(.heads = 32, .kv_heads = 8, .dim = 64, .rope = 64, .far = 9000, .grain = 2, .most = 16), 7},
    {"GQA_PARTIAL", "32 heads, 8 KV heads of 64, few splits, to 300", Q(.heads = 32, .kv_heads = 8, .dim = 64, .rope = 64, .far = 300, .grain = 2, .most = 16), 7},
    {"GQA_PARTIAL", "12 heads, 1 KV head of 128, three splits, to 5000", Q(.heads = 12, .kv_heads = 1, .dim = 128, .rope = 128, .far = 5000, .grain = 1, .most = 3), 5},
    {"GQA_PARTIAL", "10 heads, 1 KV head of 200, rope 40, norm, three splits, to 9000", Q(.heads = 10, .kv_heads = 1, .dim = 200, .rope = 40, .norm = 1, .far = 9000, .most = 3), 5},
    {"GQA_PARTIAL", "6 heads, 2 KV heads of 256, rope 256, to 130", Q(.heads = 6, .kv_heads = 2, .dim = 256, .rope = 256, .far = 130, .most = 16), 5},
    {"GQA_PARTIAL", "4 heads, 2 KV heads of 40, rope 24, to 700", Q(.heads = 4, .kv_heads = 2, .dim = 40, .rope = 24, .far = 700, .grain = 2, .most = 16), 5},
    {"GQA_PARTIAL", "32 heads, 8 KV heads of 64, a run of rows to 2047", Q(.heads = 32, .kv_heads = 8, .dim = 64, .rope = 64, .far = 2047, .grain = 2, .most = 16, .run = 1), 66},
    {"GQA_PARTIAL", "32 heads, 8 KV heads of 64, a run of rows to 9000", Q(.heads = 32, .kv_heads = 8, .dim = 64, .rope = 64, .far = 9000, .grain = 2, .most = 16, .run = 1), 132},
    {"GQA_PARTIAL", "6 heads, 2 KV heads of 128, a run of rows to 260", Q(.heads = 6, .kv_heads = 2, .dim = 128, .rope = 128, .far = 260, .grain = 1, .run = 1), 3},
    {"GQA_PARTIAL", "16 heads, 2 KV heads of 256, rope 64, norm, a run of rows to 2047", Q(.heads = 16, .kv_heads = 2, .dim = 256, .rope = 64, .norm = 1, .far = 2047, .run = 1), 132},
    {"GQA_PARTIAL", "20 heads, 2 KV heads of 96, a run of rows to 5000", Q(.heads = 20, .kv_heads = 2, .dim = 96, .rope = 96, .far = 5000, .grain = 1, .most = 3, .run = 1), 5},
    {"KV_APPEND", "FP8, latent 512, rope 64, rotated", A(.latent = 512, .rope = 64, .rotary = 1, .far = 5000, .cache = MK_CACHE_FP8)},
    {"KV_APPEND", "FP8, latent 96, rope 16", A(.latent = 96, .rope = 16, .rotary = 1, .far = 130, .cache = MK_CACHE_FP8)},
    {"MLA_PARTIAL", "FP8, 32 heads, 512 + 64, to 9000", P(.latent = 512, .rope = 64, .heads = 32, .far = 9000, .cache = MK_CACHE_FP8), 7},
    {"MLA_PARTIAL", "FP8, 20 heads, 512 + 64 rotated, to 4095", P(.latent = 512, .rope = 64, .rotary = 1, .heads = 20, .far = 4095, .cache = MK_CACHE_FP8), 7},
    {"MLA_PARTIAL", "FP8, 64 heads, 512 + 64 rotated, to 1100", P(.latent = 512, .rope = 64, .rotary = 1, .heads = 64, .far = 1100, .cache = MK_CACHE_FP8), 5},
    {"MLA_PARTIAL", "FP8, 16 heads, 256 + 128 rotated, to 4096", P(.latent = 256, .rope = 128, .rotary = 1, .heads = 16, .far = 4096, .cache = MK_CACHE_FP8), 132},
    {"MLA_PARTIAL", "FP8, 3 heads, 96 + 16, to 200", P(.latent = 96, .rope = 16, .rotary = 1, .heads = 3, .far = 200, .cache = MK_CACHE_FP8), 3},
    {"MLA_PARTIAL", "8 heads, 512 + 64 rotated, to 8000", P(.latent = 512, .rope = 64, .rotary = 1, .heads = 8, .far = 8000), 132},
    {"MLA_PARTIAL", "FP8, 8 heads, 512 + 64 rotated, to 8000", P(.latent = 512, .rope = 64, .rotary = 1, .heads = 8, .far = 8000, .cache = MK_CACHE_FP8), 132},
    {"MLA_PARTIAL", "16 heads, 256 + 128 rotated, to 9000", P(.latent = 256, .rope = 128, .rotary = 1, .heads = 16, .far = 9000), 5},
    {"MLA_PARTIAL", "20 heads behind GEMVs, 512 + 64 rotated, to 4095", P(.latent = 512, .rope = 64, .rotary = 1, .heads = 20, .far = 4095, .made = 1), 40},
    {"MLA_PARTIAL", "FP8, 24 heads behind GEMVs, 512 + 64 rotated, to 9000", P(.latent = 512, .rope = 64, .rotary = 1, .heads = 24, .far = 9000, .made = 1, .cache = MK_CACHE_FP8), 48},
    {"MLA_PARTIAL", "3 heads, 96 + 16, to 8300", P(.latent = 96, .rope = 16, .rotary = 1, .heads = 3, .far = 8300), 7},
    {"GQA_PARTIAL", "behind its appends, 32 heads, 8 KV heads of 64, few splits, to 2047", Q(.heads = 32, .kv_heads = 8, .dim = 64, .rope = 64, .far = 2047, .grain = 2, .most = 16, .fresh = 1), 132},
    {"GQA_PARTIAL", "behind its appends, 16 heads, 2 KV heads of 256, rope 64, norm, to 9000", Q(.heads = 16, .kv_heads = 2, .dim = 256, .rope = 64, .norm = 1, .far = 9000, .fresh = 1), 132},
    {"GQA_PARTIAL", "behind its appends, 32 heads, 8 KV heads of 128, to 4200", Q(.heads = 32, .kv_heads = 8, .dim = 128, .rope = 128, .far = 4200, .grain = 1, .most = 16, .fresh = 1), 7},
    {"GQA_PARTIAL", "behind its appends, 32 heads, 8 KV heads of 64, few splits, to 9000", Q(.heads = 32, .kv_heads = 8, .dim = 64, .rope = 64, .far = 9000, .grain = 2, .most = 16, .fresh = 1), 132},
    {"GQA_PARTIAL", "behind its appends, 12 heads, 1 KV head of 128, three splits, to 5000", Q(.heads = 12, .kv_heads = 1, .dim = 128, .rope = 128, .far = 5000, .grain = 1, .most = 3, .fresh = 1), 3},
    {"GQA_PARTIAL", "behind its appends, 10 heads, 1 KV head of 200, rope 40, norm, three splits, to 9000", Q(.heads = 10, .kv_heads = 1, .dim = 200, .rope = 40, .norm = 1, .far = 9000, .most = 3, .fresh = 1), 2},
    {"GQA_PARTIAL", "behind its appends, 6 heads, 3 KV heads of 40, rope 24, few splits, to 4500", Q(.heads = 6, .kv_heads = 3, .dim = 40, .rope = 24, .far = 4500, .most = 5, .fresh = 1), 5},
    {"GQA_PARTIAL", "40 heads, 1 KV head of 64, a run of rows to 700", Q(.heads = 40, .kv_heads = 1, .dim = 64, .rope = 32, .far = 700, .grain = 2, .most = 16, .run = 1), 5},
    {"GQA_PARTIAL", "36 heads, 3 KV heads of 128, norm, apart, a run of rows to 1100", Q(.heads = 36, .kv_heads = 3, .dim = 128, .rope = 96, .norm = 1, .far = 1100, .gap = 128, .grain = 1, .most = 16, .run = 1), 7},
    {"GQA_PARTIAL", "16 heads, 2 KV heads of 256, rope 64, norm, apart, three splits, a run of rows to 1100", Q(.heads = 16, .kv_heads = 2, .dim = 256, .rope = 64, .norm = 1, .far = 1100, .gap = 256, .most = 3, .run = 1), 5},
    {"GQA_PARTIAL", "behind its appends, 6 heads, 3 KV heads of 40, rope 24, to 515", Q(.heads = 6, .kv_heads = 3, .dim = 40, .rope = 24, .far = 515, .grain = 1, .most = 16, .fresh = 1), 7},
    {"GQA_PARTIAL", "behind its appends, 16 heads, 2 KV heads of 256, rope 64, norm, the last split's in halves, to 2100", Q(.heads = 16, .kv_heads = 2, .dim = 256, .rope = 64, .norm = 1, .far = 2100, .fresh = 1), 132},
    {"GQA_PARTIAL", "behind its appends, 21 heads, 3 KV heads of 64, apart, the last split's in halves, to 700", Q(.heads = 21, .kv_heads = 3, .dim = 64, .rope = 32, .gap = 8, .far = 700, .grain = 1, .most = 16, .fresh = 1), 40},
    {"MLA_PARTIAL", "8 heads, 64 + 32 rotated, to 200", P(.latent = 64, .rope = 32, .rotary = 1, .heads = 8, .far = 200), 3},
    {"MLA_PARTIAL", "12 heads, 32 + 64 rotated, to 5000", P(.latent = 32, .rope = 64, .rotary = 1, .heads = 12, .far = 5000), 7},
    {0},
};
