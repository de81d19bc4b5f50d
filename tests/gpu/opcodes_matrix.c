/* GEMV, LM_HEAD, EMBED. */
#include "tests/gpu/opcodes.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define FP8  MK_W_FP8
#define BF16 MK_W_BF16

/* ---- GEMV ------------------------------------------------------------------------------------------------------------ */

typedef struct gemv_arg {
    uint32_t wtype, prologue, epilogue, flags;
    uint32_t k, row0;    /* row0: of the matrix, of worker 0's slice */
    uint32_t n[3];       /* rows of the workers' slices */
    uint32_t scale_k, in_off, in_f32, in_slices, norm_group, per; /* per: slices of a head */
    uint32_t alike; /* values of the input's slices, all alike, as a planner cuts them: warps deal them among themselves; 0: in_slices of them, evenly cut */
    int local_res, local_out;
    int odd; /* gamma begins where the planner does not put it: not at a multiple of four */
    float scale;
} gemv_arg;

enum { X, RES, GATE, OUT, OUT2, LRES, LOUT }; /* vectors, in the order of making */

/* Every worker has two instructions on the same input, as a q|kv pair has; the second is a plain STORE of other rows. */
static void gemv_make(mk_case *c, const void *arg)
{
    const gemv_arg *a = arg;
    uint32_t headnorm = a->prologue == MK_PRO_HEADNORM, f32 = a->flags & MK_GEMV_X_F32, halves = a->epilogue == MK_EPI_SILU ? 2 : 1;
    uint32_t start[4] = {0}, start2[4] = {0}, widest = 0, width = a->k + a->in_off + (headnorm || f32 ? 0 : 5);
    for (int w = 0; w < 3; w++) {
        start[w + 1] = start[w] + a->n[w];
        start2[w + 1] = start2[w] + a->n[w] / 2 + 1;
        if (a->n[w] > widest) widest = a->n[w];
    }
    if (a->alike) width = (width + a->alike - 1) / a->alike * a->alike;
    uint32_t slices = headnorm ? width / a->norm_group * a->per : a->alike ? width / a->alike : a->in_slices ? a->in_slices : width < 7 ? 1 : 7;
    case_even(c, "x", a->in_f32 || f32 ? MK_F32 : MK_BF16, (int)headnorm, width, slices);
    case_packet(c, "res", MK_F32, 0, start, 3);
    case_even(c, "gate", MK_F32, 0, 7, 2);
    case_packet(c, "out", a->epilogue == MK_EPI_ADD || a->epilogue == MK_EPI_GATED || f32 ? MK_F32 : MK_BF16, 0, start, 3);
    case_packet(c, "out2", f32 ? MK_F32 : MK_BF16, 0, start2, 3);
    case_local(c, "lres", MK_MAX_ROWS * widest * 4);
    case_local(c, "lout", MK_MAX_ROWS * widest * 4);
    case_param(c, a->odd ? 3 : 4, 1, 0);
    uint32_t gamma = case_param(c, a->k, 1, 0.2);
    for (uint32_t w = 0; w < 3; w++)
        for (int second = 0; second < 2; second++) {
            mk_insn *in = case_add(c, w, MK_OP_GEMV);
            uint32_t n = second ? start2[w + 1] - start2[w] : a->n[w], row0 = a->row0 + (second ? 77 + start2[w] : start[w]), hv = second ? 1 : halves;
            uint32_t phase = a->wtype == FP8 ? row0 % 128 : 0, nseg = a->wtype == FP8 ? mk_segments(phase, n, 128) : 0;
            in->gemv = (mk_gemv){.n = n, .k = a->k, .in_off = a->in_off, .wtype = (uint8_t)a->wtype, .prologue = (uint8_t)a->prologue,
                                 .epilogue = (uint8_t)(second ? MK_EPI_STORE : a->epilogue), .flags = (uint8_t)a->flags, .phase = (uint16_t)phase,
                                 .nseg = (uint16_t)nseg, .scale_k = (uint16_t)(a->scale_k ? a->scale_k : 128), .norm_group = (uint16_t)a->norm_group,
                                 .k_chunk = a->k, .param_off = a->prologue == MK_PRO_RMS ? gamma : 0, .eps = a->prologue ? 1e-5f : 0,
                                 .scale = second || a->scale == 0 ? 1 : a->scale, .row0 = row0,
                                 .gate_off = !second && a->epilogue == MK_EPI_GATED ? 5 : 0};
            in->tape_bytes = (uint32_t)mk_segment_bytes(a->wtype, hv * n, a->k, hv * nseg, in->gemv.scale_k);
            if (headnorm)
                case_wait_slices(c, in, X, a->in_off / (a->norm_group / a->per), a->k / (a->norm_group / a->per));
            else
                case_wait(c, in, X);
            if (!second && (a->epilogue == MK_EPI_ADD || a->epilogue == MK_EPI_GATED)) {
                if (a->local_res)
                    case_wait(c, in, LRES);
                else
                    case_wait_slices(c, in, RES, w, 1);
                if (a->epilogue == MK_EPI_GATED) case_wait(c, in, GATE);
            }
            if (second)
                case_to(c, in, OUT2, w);
            else
                case_to(c, in, a->local_out ? LOUT : OUT, a->local_out ? 0 : w);
        }
    case_seal(c, &(case_sizes){0});
    for (uint32_t i = 0; i < c->n; i++) {
        const mk_gemv *g = &c->in[i]->gemv;
        uint32_t hv = g->epilogue == MK_EPI_SILU ? 2 : 1;
        case_segment(c, case_tape(c, i), g->wtype, hv * g->n, g->k, hv * g->nseg, g->scale_k, 1.5);
    }
}

static void gemv_feed(mk_case *c, const void *arg)
{
    const gemv_arg *a = arg;
    case_input(c, X, 1.1);
    case_input(c, RES, 1.5);
    case_input(c, GATE, 1);
    if (!a->local_res) return;
    for (uint32_t w = 0; w < 3; w++)
        for (uint32_t r = 0; r < c->step.nrows; r++)
            case_fill(c, 8000 + w, c->row_id[r], (float *)(c->mem.local + w * c->prog.info.local_bytes + c->prog.vec[LRES].offset) + r * a->n[w], a->n[w], 1.5);
}

#define G(...) gemv_make, gemv_feed, &(const gemv_arg){__VA_ARGS__}, 0
#define RMS  MK_PRO_RMS
#define HEAD MK_PRO_HEADNORM

/* ---- LM_HEAD --------------------------------------------------------------------------------------------------------- */

typedef struct head_arg {
    uint32_t wtype, k, n[3], row0;
    int by_row; /* a scale a row */
    int none; /* a step without rows that need logits */
} head_arg;

static void head_make(mk_case *c, const void *arg)
{
    const head_arg *a = arg;
    uint32_t vocab = a->row0 + 2 * (a->n[0] + a->n[1] + a->n[2]), row0 = a->row0;
    case_even(c, "h", MK_F32, 0, a->k, a->k < 7 ? 1 : 132 < a->k ? 132 : 7);
    case_even(c, "stats", MK_F32, 0, 4 * 6, 6);
    case_bulk(c, "logits", MK_MAX_ROWS * vocab * 4ull, 6);
    uint32_t gamma = case_param(c, a->k, 1, 0.2);
    for (uint32_t w = 0; w < 3; w++)
        for (uint32_t i = 0; i < 2; i++) {
            mk_insn *in = case_add(c, w, MK_OP_LM_HEAD);
            uint32_t scale_k = a->by_row ? 0 : 128;
            uint32_t phase = a->wtype == FP8 && scale_k ? row0 % 128 : 0, nseg = a->wtype == FP8 ? mk_segments(phase, a->n[w], scale_k) : 0;
            in->layer = MK_NONE;
            in->lm_head = (mk_lm_head){.n = a->n[w], .k = a->k, .row0 = row0, .vocab = vocab, .wtype = (uint8_t)a->wtype, .scale_k = (uint16_t)scale_k, .phase = (uint16_t)phase,
                                       .nseg = (uint16_t)nseg, .param_off = gamma, .eps = 1e-5f, .logits_vec = 2, .logits_pub = c->pub[2]};
            in->tape_bytes = (uint32_t)mk_segment_bytes(a->wtype, a->n[w], a->k, nseg, scale_k);
            case_wait(c, in, 0);
            case_to(c, in, 1, 2 * w + i);
            row0 += a->n[w];
        }
    case_seal(c, &(case_sizes){0});
    for (uint32_t i = 0; i < c->n; i++) {
        const mk_lm_head *l = &c->in[i]->lm_head;
        case_segment(c, case_tape(c, i), l->wtype, l->n, l->k, l->nseg, l->scale_k, 2);
    }
}

static void head_feed(mk_case *c, const void *arg)
{
    const head_arg *a = arg;
    case_input(c, 0, 1.3);
    for (uint32_t r = 0; r < c->step.nrows && !a->none; r++)
        if (c->row_id[r] % 3 != 1) c->step.row[r].flags |= MK_ROW_LOGITS | MK_ROW_SAMPLE, c->step.any_logits = 1;
}

#define H(...) head_make, head_feed, &(const head_arg){__VA_ARGS__}, 0

/* ---- EMBED ----------------------------------------------------------------------------------------------------------- */

typedef struct embed_arg {
    uint32_t hidden, type;
    float scale;
} embed_arg;

static void embed_make(mk_case *c, const void *arg)
{
    const embed_arg *a = arg;
    uint32_t bytes = a->type == MK_F32 ? 4 : 2, W = c->prog.info.workers;
    case_even(c, "h", MK_F32, 0, a->hidden, W);
    for (uint32_t w = 0; w < W; w++) {
        mk_insn *in = case_add(c, w, MK_OP_EMBED);
        uint32_t first = mk_start(w, a->hidden, W);
        in->embed = (mk_embed){.embed_off = 256, .first = first, .n = mk_start(w + 1, a->hidden, W) - first, .hidden = a->hidden, .wtype = (uint8_t)a->type,
                               .scale = a->scale};
        case_to(c, in, 0, w);
    }
    case_seal(c, &(case_sizes){.embed = 256 + 400ull * a->hidden * bytes});
    uint64_t s = case_rng(c, 1, 1);
    for (uint32_t i = 0; i < 400 * a->hidden; i++) {
        float f = case_normal(&s);
        uint16_t h = mk_f32_to_bf16(f);
        memcpy(c->mem.embed + 256 + (uint64_t)i * bytes, bytes == 4 ? (void *)&f : (void *)&h, bytes);
    }
}

static void embed_feed(mk_case *c, const void *arg)
{
    (void)c, (void)arg;
}

#define E(W, ...) embed_make, embed_feed, &(const embed_arg){__VA_ARGS__}, W

const case_spec matrix_cases[] = {
    {"GEMV", "fp8 k 256, 128|128|128 rows", G(.wtype = FP8, .k = 256, .n = {128, 128, 128})},
    {"GEMV", "fp8 k 2304, 17|18|17 rows, f32 in", G(.wtype = FP8, .k = 2304, .n = {17, 18, 17}, .in_f32 = 1, .in_slices = 132, .row0 = 120)},
    {"GEMV", "fp8 rms k 2304, 17|18|17 rows", G(.wtype = FP8, .prologue = RMS, .k = 2304, .n = {17, 18, 17}, .in_f32 = 1, .in_slices = 132, .row0 = 110)},
    {"GEMV", "fp8 rms k 2304, 17|18|17 rows, odd gamma", G(.odd = 1, .wtype = FP8, .prologue = RMS, .k = 2304, .n = {17, 18, 17}, .in_f32 = 1, .in_slices = 132, .row0 = 110)},
    {"GEMV", "gate: bf16, rms, f32 vector, k 2304, odd", G(.odd = 1, .wtype = BF16, .prologue = RMS, .flags = MK_GEMV_X_F32, .k = 2304, .n = {1, 1, 1}, .in_f32 = 1, .in_slices = 132)},
    {"GEMV", "fp8 rms k 2048, 100|63|1 rows", G(.wtype = FP8, .prologue = RMS, .k = 2048, .n = {100, 63, 1}, .in_f32 = 1, .in_slices = 132, .row0 = 60)},
    {"GEMV", "fp8 rms k 6144, 46|47|47 rows", G(.wtype = FP8, .prologue = RMS, .k = 6144, .n = {46, 47, 47}, .in_f32 = 1, .in_slices = 132, .row0 = 90)},
    {"GEMV", "fp8 k 4096, 17|18|2 rows, bf16 in, add", G(.wtype = FP8, .epilogue = MK_EPI_ADD, .k = 4096, .n = {17, 18, 2}, .in_slices = 128, .row0 = 1)},
    {"GEMV", "fp8 k 9216, 23|24|23 rows, bf16 in, add", G(.wtype = FP8, .epilogue = MK_EPI_ADD, .k = 9216, .n = {23, 24, 23}, .in_slices = 132, .row0 = 100)},
    {"GEMV", "fp8 rms silu k 2304, 60|35|64 pairs", G(.wtype = FP8, .prologue = RMS, .epilogue = MK_EPI_SILU, .k = 2304, .n = {60, 35, 64}, .in_f32 = 1, .in_slices = 132, .row0 = 100)},
    {"GEMV", "fp8 silu k 200, 1|2|31 pairs, to local", G(.wtype = FP8, .prologue = RMS, .epilogue = MK_EPI_SILU, .k = 200, .n = {1, 2, 31}, .local_out = 1, .row0 = 126)},
    {"GEMV", "fp8 add, local residual", G(.wtype = FP8, .epilogue = MK_EPI_ADD, .k = 1024, .n = {17, 18, 17}, .local_res = 1, .row0 = 120)},
    {"GEMV", "fp8 add, to local", G(.wtype = FP8, .epilogue = MK_EPI_ADD, .k = 1024, .n = {17, 18, 17}, .local_out = 1, .row0 = 120)},
    {"GEMV", "fp8 gated", G(.wtype = FP8, .epilogue = MK_EPI_GATED, .k = 512, .n = {15, 16, 17}, .row0 = 120)},
    {"GEMV", "fp8 gated, local residual, to local", G(.wtype = FP8, .epilogue = MK_EPI_GATED, .k = 512, .n = {15, 16, 17}, .local_res = 1, .local_out = 1)},
    {"GEMV", "fp8 headnorm 128 x 32, add", G(.wtype = FP8, .prologue = HEAD, .epilogue = MK_EPI_ADD, .k = 4096, .n = {17, 18, 17}, .norm_group = 128, .per = 1, .row0 = 120)},
    {"GEMV", "fp8 headnorm 128 x 32, 4 slices a head", G(.wtype = FP8, .prologue = HEAD, .epilogue = MK_EPI_ADD, .k = 4096, .n = {17, 18, 17}, .norm_group = 128, .per = 4, .row0 = 5)},
    {"GEMV", "fp8 headnorm 64 x 3 from the 2nd head", G(.wtype = FP8, .prologue = HEAD, .k = 192, .in_off = 64, .n = {17, 18, 1}, .norm_group = 64, .per = 2)},
    {"GEMV", "fp8 k 1, 1|1|2 rows", G(.wtype = FP8, .k = 1, .n = {1, 1, 2}, .in_f32 = 1)},
    {"GEMV", "fp8 k 200 from 3, 127|128|1 rows", G(.wtype = FP8, .k = 200, .n = {127, 128, 1}, .in_off = 3, .row0 = 127)},
    {"GEMV", "fp8 scale_k 64, k 300, 2|33|128 rows", G(.wtype = FP8, .k = 300, .n = {2, 33, 128}, .scale_k = 64, .row0 = 127)},
    {"GEMV", "fp8 scale_k 64, k 512 silu", G(.wtype = FP8, .epilogue = MK_EPI_SILU, .k = 512, .n = {33, 20, 64}, .scale_k = 64, .row0 = 100)},
    {"GEMV", "fp8 scaled by 0.25, add", G(.wtype = FP8, .epilogue = MK_EPI_ADD, .k = 128, .n = {5, 6, 7}, .scale = 0.25f)},
    {"GEMV", "gate: bf16, rms, f32 vector, k 2048", G(.wtype = BF16, .prologue = RMS, .flags = MK_GEMV_X_F32, .k = 2048, .n = {1, 1, 1}, .in_slices = 128)},
    {"GEMV", "gate: bf16, rms, f32 vector, k 6144", G(.wtype = BF16, .prologue = RMS, .flags = MK_GEMV_X_F32, .k = 6144, .n = {1, 1, 1}, .scale = 0.5f, .in_slices = 132)},
    {"GEMV", "bf16 k 256, 128|1|17 rows", G(.wtype = BF16, .k = 256, .n = {128, 1, 17})},
    {"GEMV", "bf16 rms k 2304, 17|18|128 rows", G(.wtype = BF16, .prologue = RMS, .k = 2304, .n = {17, 18, 128}, .in_f32 = 1, .in_slices = 132)},
    {"GEMV", "bf16 rms k 2048, 31|32|33 rows", G(.wtype = BF16, .prologue = RMS, .k = 2048, .n = {31, 32, 33}, .in_f32 = 1, .in_slices = 132)},
    {"GEMV", "bf16 rms k 6144, 46|47|47 rows", G(.wtype = BF16, .prologue = RMS, .k = 6144, .n = {46, 47, 47}, .in_f32 = 1, .in_slices = 132)},
    {"GEMV", "bf16 k 100 from 2, 31|1|2 rows", G(.wtype = BF16, .k = 100, .n = {31, 1, 2}, .in_off = 2)},
    {"GEMV", "bf16 rms k 17, 5|6|7 rows", G(.wtype = BF16, .prologue = RMS, .k = 17, .n = {5, 6, 7}, .in_f32 = 1)},
    {"GEMV", "bf16 rms, bf16 vector k 1536, silu", G(.wtype = BF16, .prologue = RMS, .epilogue = MK_EPI_SILU, .k = 1536, .n = {17, 18, 64}, .in_slices = 24)},
    {"GEMV", "bf16 k 512 (absorbed), 128|64|17, bf16 in", G(.wtype = BF16, .k = 512, .n = {128, 64, 17}, .in_slices = 4, .in_off = 512)},
    {"GEMV", "bf16 headnorm 128 x 16, add", G(.wtype = BF16, .prologue = HEAD, .epilogue = MK_EPI_ADD, .k = 2048, .n = {15, 16, 16}, .norm_group = 128, .per = 2)},
    {"GEMV", "bf16 k 9216, 17|18|17, add", G(.wtype = BF16, .epilogue = MK_EPI_ADD, .k = 9216, .n = {17, 18, 17}, .in_slices = 132)},
    {"LM_HEAD", "fp8 k 2304, 128|128|61 rows", H(.wtype = FP8, .k = 2304, .n = {128, 128, 61}, .row0 = 30)},
    {"LM_HEAD", "bf16 k 2304, 128|128|57 rows", H(.wtype = BF16, .k = 2304, .n = {128, 128, 57})},
    {"LM_HEAD", "bf16 k 2048, 128|1|2 rows", H(.wtype = BF16, .k = 2048, .n = {128, 1, 2})},
    {"LM_HEAD", "bf16 k 6144, 128|127|61 rows", H(.wtype = BF16, .k = 6144, .n = {128, 127, 61})},
    {"LM_HEAD", "fp8 k 100, 5|6|7 rows", H(.wtype = FP8, .k = 100, .n = {5, 6, 7}, .row0 = 125)},
    {"LM_HEAD", "fp8 by rows, k 2304, 128|88|61 rows", H(.wtype = FP8, .by_row = 1, .k = 2304, .n = {128, 88, 61}, .row0 = 30)},
    {"LM_HEAD", "fp8 by rows, k 100, 1|6|17 rows", H(.wtype = FP8, .by_row = 1, .k = 100, .n = {1, 6, 17}, .row0 = 125)},
    {"LM_HEAD", "no row needs logits", H(.wtype = BF16, .k = 256, .n = {5, 6, 7}, .none = 1)},
    {"EMBED", "bf16 hidden 2304, 132 workers", E(132, .hidden = 2304, .type = MK_BF16, .scale = 1)},
    {"EMBED", "bf16 hidden 6144 scaled", E(3, .hidden = 6144, .type = MK_BF16, .scale = 0.3f)},
    {"EMBED", "f32 hidden 50", E(3, .hidden = 50, .type = MK_F32, .scale = 1)},
    {"GEMV", "fp8 rms k 2304, f32 slices of 18", G(.wtype = FP8, .prologue = RMS, .k = 2304, .n = {17, 18, 17}, .in_f32 = 1, .alike = 18, .row0 = 110)},
    {"GEMV", "fp8 rms silu k 2048, f32 slices of 16", G(.wtype = FP8, .prologue = RMS, .epilogue = MK_EPI_SILU, .k = 2048, .n = {20, 35, 47}, .in_f32 = 1, .alike = 16, .row0 = 100)},
    {"GEMV", "bf16 rms k 2048, f32 slices of 16", G(.wtype = BF16, .prologue = RMS, .k = 2048, .n = {31, 96, 97}, .in_f32 = 1, .alike = 16)},
    {"GEMV", "fp8 rms k 768, bf16 slices of 12", G(.wtype = FP8, .prologue = RMS, .k = 768, .n = {17, 64, 18}, .alike = 12)},
    {"GEMV", "bf16 rms k 1536, bf16 slices of 64", G(.wtype = BF16, .prologue = RMS, .k = 1536, .n = {17, 18, 17}, .alike = 64)},
    {"GEMV", "fp8 k 1024, bf16 slices of 16, add", G(.wtype = FP8, .epilogue = MK_EPI_ADD, .k = 1024, .n = {17, 18, 17}, .alike = 16, .row0 = 120)},
    {"GEMV", "fp8 k 512 from 64, bf16 slices of 32", G(.wtype = FP8, .k = 512, .in_off = 64, .n = {64, 17, 1}, .alike = 32)},
    {"GEMV", "fp8 k 4096, bf16 slices of 30, add", G(.wtype = FP8, .epilogue = MK_EPI_ADD, .k = 4096, .n = {17, 18, 2}, .alike = 30)},
    {"GEMV", "fp8 k 9216, bf16 slices of 36, add", G(.wtype = FP8, .epilogue = MK_EPI_ADD, .k = 9216, .n = {17, 18, 17}, .alike = 36)},
    {"GEMV", "bf16 k 2048, bf16 slices of 16, add", G(.wtype = BF16, .epilogue = MK_EPI_ADD, .k = 2048, .n = {15, 16, 16}, .alike = 16)},
    {"GEMV", "bf16 k 8192, bf16 slices of 64, add", G(.wtype = BF16, .epilogue = MK_EPI_ADD, .k = 8192, .n = {15, 16, 16}, .alike = 64)},
    {"GEMV", "fp8 rms k 512, f32, ends within a packet", G(.wtype = FP8, .prologue = RMS, .k = 512, .n = {17, 18, 17}, .in_f32 = 1, .in_slices = 1)},
    {0},
};
