/* ROUTER, ROUTE, EXPERT_UP, EXPERT_DOWN. The expert opcodes follow a ROUTE of their own in every queue, because the loader waits for it. */
#include "tests/gpu/opcodes.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define FP8  MK_W_FP8
#define BF16 MK_W_BF16

typedef struct expert_arg {
    uint32_t experts, topk, groups, topk_groups, score, renorm, bias;
    int ties;            /* logits with many equal ones */
    uint32_t wtype, k;   /* k: columns: hidden (UP) or inter (DOWN) */
    uint32_t inter, T;   /* UP: width of an expert and its slices */
    uint32_t n[3], row0; /* DOWN: rows of the workers' slices of h */
    uint32_t alias;      /* slices between two experts in memory; 0: all of them (many experts would need gigabytes) */
    int local;           /* DOWN: adds to a LOCAL sum */
} expert_arg;

enum { SUMS, ROUTES, NORMED, IN, OUT, BASE }; /* NORMED: h as ROUTE has it */
#define ADDENDS 5u

static void route(mk_case *c, const expert_arg *a, uint32_t w, uint32_t bias)
{
    mk_insn *in = case_add(c, w, MK_OP_ROUTE);
    in->route = (mk_route){.experts = (uint16_t)a->experts, .topk = (uint16_t)a->topk, .groups = (uint16_t)(a->groups ? a->groups : 1),
                           .topk_groups = (uint16_t)(a->topk_groups ? a->topk_groups : 1), .score = (uint8_t)a->score, .renorm = (uint8_t)a->renorm,
                           .has_bias = (uint8_t)a->bias, .scale = a->renorm ? 2.446f : 1, .param_off = bias};
    in->route.k = c->prog.vec[NORMED].width;
    in->route.norm_off = bias + a->experts;
    in->route.eps = 1e-5f;
    case_wait(c, in, NORMED);
    case_wait(c, in, SUMS);
    case_to(c, in, ROUTES, 0);
}

static uint32_t router(mk_case *c, const expert_arg *a)
{
    const uint32_t k = a->inter ? a->k : 320; /* EXPERT_UP's own input, as large as that */
    const uint32_t sums = case_bulk(c, "router", mk_sums_bytes(a->experts), ADDENDS);
    c->prog.vec[sums].flags = MK_VEC_SUMS;
    case_local(c, "route", sizeof(mk_routes));
    case_even(c, "normed", MK_F32, 0, k, k < 132 ? 5 : 132);
    const uint32_t bias = case_param(c, a->experts, 0, 0.02);
    case_param(c, k, 1, 0.2); /* gamma, behind them */
    return bias;
}

/* The vector u: of every chosen expert `width` values in T slices. */
static void chosen(mk_case *c, const expert_arg *a, uint32_t width)
{
    uint32_t T = a->T, *start = malloc((a->topk * T + 1) * sizeof *start);
    if (!start) exit(3);
    for (uint32_t s = 0; s <= a->topk * T; s++) start[s] = s / T * width + mk_expert_start(s % T, width, T);
    uint32_t u = case_packet(c, "u", MK_BF16, 0, start, a->topk * T);
    c->prog.vec[u].flags = MK_VEC_DYNAMIC;
    free(start);
}

static void feed_router(mk_case *c, const expert_arg *a)
{
    const mk_vec *v = &c->prog.vec[SUMS];
    float *logit = malloc(a->experts * sizeof *logit);
    if (!logit) exit(3);
    case_input(c, NORMED, 1.0);
    c->mem.counter[v->counter] += ADDENDS;
    for (uint32_t r = 0; r < c->step.nrows; r++) {
        uint64_t s = 5;
        case_fill(c, 7000, c->row_id[r], logit, a->experts, 1.5);
        for (uint32_t e = 0; e < a->experts; e++) {
            float left = a->ties ? roundf(2 * logit[e]) / 2 : logit[e];
            uint64_t *word = (uint64_t *)(c->mem.bulk + v->offset) + mk_sum_at(a->experts, mk_half(v, c->step.seq, c->pub[SUMS]), r, e);
            *word = 0;
            for (uint32_t k = 1; k < ADDENDS; k++) {
                const float part = (float)((int)(case_random(&s) % 64) - 32) / 8;
                *word += mk_sum_word(part);
                left -= part;
            }
            *word += mk_sum_word(left);
        }
    }
    free(logit);
}

/* Slices of h of so many values on as many workers. */
typedef struct router_arg {
    uint32_t experts, n[3];
} router_arg;
enum { R_H, R_SUMS };
/* n columns from `first` on, of slice `worker` of h. Its weights: router_weights, when the case is sealed. */
static void router_slice(mk_case *c, uint32_t worker, uint32_t experts, uint32_t first, uint32_t n, uint32_t gamma, uint32_t h, uint32_t sums)
{
    mk_insn *in = case_add(c, worker, MK_OP_ROUTER);
    in->router = (mk_router){.first = first, .n = n, .experts = experts, .param_off = gamma + first};
    in->tape_bytes = (uint32_t)mk_segment_bytes(MK_W_BF16, n, experts, 0, 0);
    case_wait_slices(c, in, h, worker, 1);
    case_to(c, in, sums, 0);
}
static void router_weights(mk_case *c)
{
    for (uint32_t i = 0; i < c->n; i++)
        if (c->in[i]->opcode == MK_OP_ROUTER) case_segment(c, case_tape(c, i), MK_W_BF16, c->in[i]->router.n, c->in[i]->router.experts, 0, 0, 1.5);
}
/* The half that is to be added to. */
static void router_clear(mk_case *c, uint32_t experts, uint32_t sums)
{
    const mk_vec *v = &c->prog.vec[sums];
    memset((uint64_t *)(c->mem.bulk + v->offset) + mk_sum_at(experts, mk_half(v, c->step.seq, c->pub[sums]), 0, 0), 0, mk_sums_bytes(experts) / 2);
}
static void router_make(mk_case *c, const void *arg)
{
    const router_arg *a = arg;
    uint32_t start[4] = {0};
    for (uint32_t w = 0; w < 3; w++) start[w + 1] = start[w] + a->n[w];
    case_packet(c, "h", MK_F32, 0, start, 3);
    const uint32_t sums = case_bulk(c, "router", mk_sums_bytes(a->experts), 3);
    c->prog.vec[sums].flags = MK_VEC_SUMS;
    const uint32_t gamma = case_param(c, start[3] + 1, 1, 0.2); /* one more, for the negative control that is one off */
    for (uint32_t w = 0; w < 3; w++) router_slice(c, w, a->experts, start[w], a->n[w], gamma, R_H, R_SUMS);
    case_seal(c, &(case_sizes){0});
    router_weights(c);
}
static void router_feed(mk_case *c, const void *arg)
{
    const router_arg *a = arg;
    case_input(c, R_H, 1.5);
    router_clear(c, a->experts, R_SUMS);
}

/* ROUTER as it stands in a program: behind the GEMV that makes its slice of h, before ROUTE and EXPERT_UP. In a step of one row the warps aside do it then. n: rows of the workers' slices of h. A row of the
 * GEMV's weights has one value that is not 0, so that h is the same to the bit on both machines: the choice hangs on it. */
static void beside_make(mk_case *c, const void *arg)
{
    const expert_arg *a = arg;
    uint32_t T = a->T, start[4] = {0};
    for (uint32_t w = 0; w < 3; w++) start[w + 1] = start[w] + a->n[w];
    const uint32_t k = start[3], rows = mk_expert_rows(a->inter, T), sums = case_bulk(c, "router", mk_sums_bytes(a->experts), 3);
    c->prog.vec[sums].flags = MK_VEC_SUMS;
    case_local(c, "route", sizeof(mk_routes));
    case_packet(c, "h", MK_F32, 0, start, 3);
    case_even(c, "y", MK_BF16, 0, 64, 4); /* IN */
    chosen(c, a, a->inter);
    const uint32_t bias = case_param(c, a->experts, 0, 0.02), gamma = case_param(c, k, 1, 0.2);
    const uint64_t slice = mk_segment_bytes(BF16, 2 * rows, k, 0, 128);
    for (uint32_t w = 0; w < 3; w++) {
        mk_insn *in = case_add(c, w, MK_OP_GEMV);
        in->gemv = (mk_gemv){.n = a->n[w], .k = 64, .wtype = BF16, .epilogue = MK_EPI_STORE, .scale_k = 128, .k_chunk = 64, .scale = 1, .row0 = start[w]};
        in->tape_bytes = (uint32_t)mk_segment_bytes(BF16, a->n[w], 64, 0, 128);
        case_wait(c, in, IN);
        case_to(c, in, NORMED, w);
        router_slice(c, w, a->experts, start[w], a->n[w], gamma, NORMED, SUMS);
        route(c, a, w, bias);
        in = case_add(c, w, MK_OP_EXPERT_UP);
        in->expert = (mk_expert){.base = 512, .expert_stride = slice * T, .slice_stride = (uint32_t)slice, .T = (uint16_t)T, .k = k, .inter = a->inter, .wtype = BF16, .topk = (uint8_t)a->topk,
                                 .param_off = gamma, .eps = 1e-5f};
        case_wait(c, in, NORMED);
        case_wait(c, in, ROUTES);
        case_to(c, in, OUT, 0);
    }
    case_seal(c, &(case_sizes){.expert = 512 + slice * T * a->experts});
    for (uint64_t s = 0; s < (uint64_t)T * a->experts; s++) {
        const uint32_t t = (uint32_t)(s % T);
        case_segment(c, c->mem.expert + 512 + s * slice, BF16, 2 * (mk_expert_start(t + 1, a->inter, T) - mk_expert_start(t, a->inter, T)), k, 0, 128, 1.5);
    }
    router_weights(c);
    for (uint32_t i = 0; i < c->n; i++) {
        const mk_insn *in = c->in[i];
        uint16_t *tape = (uint16_t *)case_tape(c, i);
        if (in->opcode != MK_OP_GEMV) continue;
        memset(tape, 0, in->tape_bytes);
        for (uint32_t r = 0; r < in->gemv.n; r++) { /* value (row0 + r) mod 64, as it is */
            const uint32_t v = (in->gemv.row0 + r) % 64, per = mk_kblock_values(BF16) / 4;
            tape[mk_quarter_at(in->gemv.n, v / (4 * per), v / per % 4, r) / 2 + v % per] = 0x3f80;
        }
    }
}
static void beside_feed(mk_case *c, const void *arg)
{
    const expert_arg *a = arg;
    case_input(c, IN, 1.5);
    router_clear(c, a->experts, SUMS);
}

static void route_make(mk_case *c, const void *arg)
{
    uint32_t bias = router(c, arg);
    for (uint32_t w = 0; w < c->prog.info.workers; w++) route(c, arg, w, bias);
    case_seal(c, &(case_sizes){0});
}

static void route_feed(mk_case *c, const void *arg)
{
    feed_router(c, arg);
}

static void up_make(mk_case *c, const void *arg)
{
    const expert_arg *a = arg;
    uint32_t bias = router(c, a), T = a->T, rows = mk_expert_rows(a->inter, T), nseg = 0;
    for (uint32_t t = 0; t < T && a->wtype == FP8; t++) {
        uint32_t at = mk_expert_start(t, a->inter, T), need = mk_segments(at % 128, mk_expert_start(t + 1, a->inter, T) - at, 128);
        if (need > nseg) nseg = need;
    }
    case_even(c, "h", MK_F32, 0, a->k, a->k < 132 ? 5 : 132);
    chosen(c, a, a->inter);
    uint32_t gamma = case_param(c, a->k, 1, 0.2);
    uint64_t slice = mk_segment_bytes(a->wtype, 2 * rows, a->k, 2 * nseg, 128), stride = slice * (a->alias ? a->alias : T);
    for (uint32_t w = 0; w < c->prog.info.workers; w++) {
        route(c, a, w, bias);
        mk_insn *in = case_add(c, w, MK_OP_EXPERT_UP);
        in->expert = (mk_expert){.base = 512, .expert_stride = stride, .slice_stride = (uint32_t)slice, .T = (uint16_t)T, .k = a->k, .inter = a->inter,
                                 .wtype = (uint8_t)a->wtype, .nseg = (uint8_t)nseg, .topk = (uint8_t)a->topk, .param_off = gamma, .eps = 1e-5f};
        case_wait(c, in, IN);
        case_wait(c, in, ROUTES);
        case_to(c, in, OUT, 0);
    }
    uint64_t slices = (stride * (a->experts - 1) + slice * T) / slice;
    case_seal(c, &(case_sizes){.expert = 512 + slices * slice});
    for (uint64_t s = 0; s < slices; s++) {
        uint32_t t = (uint32_t)(s % T), n = a->alias ? rows : mk_expert_start(t + 1, a->inter, T) - mk_expert_start(t, a->inter, T);
        case_segment(c, c->mem.expert + 512 + s * slice, a->wtype, 2 * n, a->k, 2 * nseg, 128, 1.5);
    }
}

static void up_feed(mk_case *c, const void *arg)
{
    feed_router(c, arg);
    case_input(c, IN, 1.2);
}

static void down_make(mk_case *c, const void *arg)
{
    const expert_arg *a = arg;
    uint32_t bias = router(c, a), h[4] = {0}, widest = 0, nseg = 0;
    for (uint32_t w = 0; w < 3; w++) {
        h[w + 1] = h[w] + a->n[w];
        if (a->n[w] > widest) widest = a->n[w];
        uint32_t need = mk_segments((a->row0 + h[w]) % 128, a->n[w], 128);
        if (a->wtype == FP8 && need > nseg) nseg = need;
    }
    chosen(c, a, a->k);
    case_packet(c, "h", MK_F32, 0, h, 3);
    if (a->local)
        case_local(c, "acc", MK_MAX_ROWS * widest * 4);
    else
        case_packet(c, "res", MK_F32, 0, h, 3);
    uint64_t slice = mk_segment_bytes(a->wtype, widest, a->k, nseg, 128), stride = slice * (a->alias ? a->alias : 3);
    for (uint32_t w = 0; w < 3; w++) {
        route(c, a, w, bias);
        mk_insn *in = case_add(c, w, MK_OP_EXPERT_DOWN);
        in->expert = (mk_expert){.base = 256, .expert_stride = stride, .slice_stride = (uint32_t)slice, .T = 3, .t = (uint16_t)w, .k = a->k, .inter = a->k,
                                 .n = (uint16_t)a->n[w], .phase = (uint16_t)(a->wtype == FP8 ? (a->row0 + h[w]) % 128 : 0), .wtype = (uint8_t)a->wtype,
                                 .nseg = (uint8_t)nseg, .topk = (uint8_t)a->topk};
        case_wait(c, in, IN);
        case_wait(c, in, ROUTES);
        if (a->local)
            case_wait(c, in, BASE);
        else
            case_wait_slices(c, in, BASE, w, 1);
        case_to(c, in, OUT, w);
    }
    uint64_t slices = (stride * (a->experts - 1) + slice * 3) / slice;
    case_seal(c, &(case_sizes){.expert = 256 + slices * slice});
    for (uint64_t s = 0; s < slices; s++)
        case_segment(c, c->mem.expert + 256 + s * slice, a->wtype, a->alias ? widest : a->n[s % 3], a->k, nseg, 128, 1.0);
}

static void down_feed(mk_case *c, const void *arg)
{
    const expert_arg *a = arg;
    feed_router(c, a);
    case_input(c, IN, 1.0);
    if (!a->local) {
        case_input(c, BASE, 1.5);
        return;
    }
    for (uint32_t w = 0; w < 3; w++)
        for (uint32_t r = 0; r < c->step.nrows; r++)
            case_fill(c, 8000 + w, c->row_id[r], (float *)(c->mem.local + w * c->prog.info.local_bytes + c->prog.vec[BASE].offset) + r * a->n[w], a->n[w], 1.5);
}

#define A(...) router_make, router_feed, &(const router_arg){__VA_ARGS__}, 0
#define B(...) beside_make, beside_feed, &(const expert_arg){__VA_ARGS__}, 0
#define R(...) route_make, route_feed, &(const expert_arg){__VA_ARGS__}, 0
#define U(...) up_make, up_feed, &(const expert_arg){__VA_ARGS__}, 0
#define UW(W, ...) up_make, up_feed, &(const expert_arg){__VA_ARGS__}, W
#define D(...) down_make, down_feed, &(const expert_arg){__VA_ARGS__}, 0
#define SIG  .score = MK_SCORE_SIGMOID, .renorm = 1, .bias = 1
#define SOFT .score = MK_SCORE_SOFTMAX, .renorm = 1

const case_spec expert_cases[] = {
    {"ROUTE", "64 experts, sigmoid, bias, top 6", R(.experts = 64, .topk = 6, SIG)},
    {"ROUTE", "256 experts, sigmoid, bias, top 8", R(.experts = 256, .topk = 8, SIG)},
    {"ROUTE", "256 experts, 8 groups of which 4, top 8", R(.experts = 256, .topk = 8, .groups = 8, .topk_groups = 4, SIG)},
    {"ROUTE", "384 experts, sigmoid, top 8", R(.experts = 384, .topk = 8, SIG)},
    {"ROUTE", "512 experts, softmax, top 10", R(.experts = 512, .topk = 10, SOFT)},
    {"ROUTE", "128 experts, softmax, no renorm, top 8", R(.experts = 128, .topk = 8, .score = MK_SCORE_SOFTMAX)},
    {"ROUTE", "7 experts, top 3", R(.experts = 7, .topk = 3, SIG)},
    {"ROUTE", "64 experts, many ties", R(.experts = 64, .topk = 6, .ties = 1, .score = MK_SCORE_SIGMOID, .renorm = 1)},
    {"ROUTE", "1024 experts, softmax, top 16", R(.experts = 1024, .topk = 16, SOFT)},
    {"EXPERT_UP", "fp8 7 experts, k 128, inter 40 in 4", U(.experts = 7, .topk = 3, SIG, .wtype = FP8, .k = 128, .inter = 40, .T = 4)},
    {"EXPERT_UP", "fp8 7 experts, k 128, inter 48 in 29", U(.experts = 7, .topk = 3, SIG, .wtype = FP8, .k = 128, .inter = 48, .T = 29)},
    {"EXPERT_UP", "fp8 12 experts, k 200, inter 300 in 5", U(.experts = 12, .topk = 4, SIG, .wtype = FP8, .k = 200, .inter = 300, .T = 5)},
    {"EXPERT_UP", "fp8 256 experts, k 2304, inter 1024 in 17", U(.experts = 256, .topk = 8, SIG, .wtype = FP8, .k = 2304, .inter = 1024, .T = 17, .alias = 1)},
    {"EXPERT_UP", "fp8 512 experts, k 2048, inter 512 in 14", U(.experts = 512, .topk = 10, SOFT, .wtype = FP8, .k = 2048, .inter = 512, .T = 14, .alias = 1)},
    {"EXPERT_UP", "fp8 64 experts, k 2048, inter 1408 in 22", U(.experts = 64, .topk = 6, SIG, .wtype = FP8, .k = 2048, .inter = 1408, .T = 22, .alias = 2)},
    {"EXPERT_UP", "bf16 16 experts, k 512, inter 96 in 22", U(.experts = 16, .topk = 6, SIG, .wtype = BF16, .k = 512, .inter = 96, .T = 22)},
    {"EXPERT_UP", "fp8 8 experts, top 1, one slice of 64", U(.experts = 8, .topk = 1, SOFT, .wtype = FP8, .k = 320, .inter = 64, .T = 1)},
    {"EXPERT_UP", "fp8 64 experts, inter 300 in 22, 132 workers", UW(132, .experts = 64, .topk = 6, SIG, .wtype = FP8, .k = 256, .inter = 300, .T = 22)},
    {"EXPERT_UP", "fp8 16 experts, inter 150 in 19, 7 workers", UW(7, .experts = 16, .topk = 4, SIG, .wtype = FP8, .k = 128, .inter = 150, .T = 19)},
    {"EXPERT_DOWN", "fp8 7 experts, inter 40, 5|6|7 rows", D(.experts = 7, .topk = 3, SIG, .wtype = FP8, .k = 40, .T = 4, .n = {5, 6, 7}, .row0 = 120)},
    {"EXPERT_DOWN", "fp8 7 experts, inter 48 in 29, 5|6|7 rows", D(.experts = 7, .topk = 3, SIG, .wtype = FP8, .k = 48, .T = 29, .n = {5, 6, 7}, .row0 = 120)},
    {"EXPERT_DOWN", "fp8 12 experts, inter 300, 1|2|127, local", D(.experts = 12, .topk = 4, SIG, .wtype = FP8, .k = 300, .T = 5, .n = {1, 2, 127}, .row0 = 126, .local = 1)},
    {"EXPERT_DOWN", "fp8 256 experts, inter 1024, 17|18|17, local", D(.experts = 256, .topk = 8, SIG, .wtype = FP8, .k = 1024, .T = 17, .n = {17, 18, 17}, .row0 = 115, .local = 1, .alias = 1)},
    {"EXPERT_DOWN", "fp8 512 experts, inter 512, 15|16|16", D(.experts = 512, .topk = 10, SOFT, .wtype = FP8, .k = 512, .T = 14, .n = {15, 16, 16}, .row0 = 120, .alias = 1)},
    {"EXPERT_DOWN", "fp8 64 experts, inter 1408, 46|47|47", D(.experts = 64, .topk = 6, SIG, .wtype = FP8, .k = 1408, .T = 22, .n = {46, 47, 47}, .row0 = 100, .alias = 2)},
    {"EXPERT_DOWN", "fp8 32 experts, inter 1024, 5|6|7, four to a stage", D(.experts = 32, .topk = 5, SIG, .wtype = FP8, .k = 1024, .T = 17, .n = {5, 6, 7}, .row0 = 125)},
    {"EXPERT_DOWN", "fp8 64 experts, inter 512, 16|15|16, nine a row", D(.experts = 64, .topk = 9, SIG, .wtype = FP8, .k = 512, .T = 14, .n = {16, 15, 16}, .row0 = 100, .local = 1)},
    {"EXPERT_DOWN", "bf16 24 experts, inter 256, 16|15|16, seven a row", D(.experts = 24, .topk = 7, SOFT, .wtype = BF16, .k = 256, .T = 9, .n = {16, 15, 16})},
    {"EXPERT_DOWN", "fp8 64 experts, inter 1408, 25|26|27, four stages", D(.experts = 64, .topk = 6, SIG, .wtype = FP8, .k = 1408, .T = 22, .n = {25, 26, 27}, .row0 = 110)},
    {"EXPERT_DOWN", "bf16 16 experts, inter 640, 30|31|32, four stages", D(.experts = 16, .topk = 5, SIG, .wtype = BF16, .k = 640, .T = 11, .n = {30, 31, 32}, .local = 1)},
    {"EXPERT_DOWN", "bf16 16 experts, inter 96, 17|18|17, local", D(.experts = 16, .topk = 6, SIG, .wtype = BF16, .k = 96, .T = 22, .n = {17, 18, 17}, .local = 1)},
    {"ROUTE", "512 experts, many ties, top 10", R(.experts = 512, .topk = 10, .ties = 1, .score = MK_SCORE_SIGMOID, .renorm = 1)},
    {"ROUTE", "300 experts, softmax, many ties, top 8", R(.experts = 300, .topk = 8, .ties = 1, .score = MK_SCORE_SOFTMAX, .renorm = 1)},
    {"ROUTE", "256 experts, softmax, bias, top 8", R(.experts = 256, .topk = 8, SOFT, .bias = 1)},
    {"ROUTER", "256 experts, slices of 18", A(256, {18, 18, 17})},
    {"ROUTER", "512 experts, slices of 16", A(512, {16, 16, 16})},
    {"ROUTER", "64 experts, slices of 48, 5 and 1", A(64, {48, 5, 1})},
    {"ROUTER", "7 experts, slices of 128", A(7, {128, 100, 128})},
    {"ROUTER", "1024 experts, slices of 31", A(1024, {31, 30, 31})},
    {"ROUTER", "64 experts, 16|15|16, in a program", B(.experts = 64, .topk = 6, SIG, .inter = 40, .T = 4, .n = {16, 15, 16})},
    {"ROUTER", "256 experts, 17|18|17, in a program", B(.experts = 256, .topk = 8, SIG, .inter = 24, .T = 3, .n = {17, 18, 17})},
    {"ROUTER", "300 experts, 40|3|9, in a program", B(.experts = 300, .topk = 8, SOFT, .inter = 24, .T = 2, .n = {40, 3, 9})},
    {"ROUTER", "512 experts, 16|16|15, in a program", B(.experts = 512, .topk = 10, SOFT, .inter = 24, .T = 3, .n = {16, 16, 15})},
    {0},
};
