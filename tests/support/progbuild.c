#include "tests/support/progbuild.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    HIDDEN = 32, VOCAB = 40, HEADS = 4, DK = 8, DV = 8, TAPS = 4, LOW = 16 /* f_a */,
    LATENT = 16, ROPE = 8, NOPE = 8, VDIM = 8, EXPERTS = 8, TOPK = 2, INTER = 16, FFN = 48, SHARED = 16,
};

typedef struct builder {
    uint32_t W, A; /* workers, active ones */
    mk_program *p;
    mk_insn **queue;
    uint32_t *n;
    uint64_t *tape;
    uint32_t h_pub;
} builder;

static void *grown(void *a, size_t n, size_t size)
{
    a = realloc(a, (n ? n : 1) * size);
    if (!a) abort();
    return a;
}

static uint32_t new_vec(builder *b, const char *name, uint32_t scope, uint32_t dtype)
{
    mk_program *p = b->p;
    uint32_t id = p->info.n_vec++;
    p->vec = grown(p->vec, p->info.n_vec, sizeof *p->vec);
    memset(&p->vec[id], 0, sizeof p->vec[id]);
    snprintf(p->vec[id].name, sizeof p->vec[id].name, "%s", name);
    p->vec[id].scope = (uint8_t)scope;
    p->vec[id].dtype = (uint8_t)dtype;
    return id;
}

void pb_place(mk_program *p, uint32_t id, uint32_t nslice)
{
    mk_vec *v = &p->vec[id];
    const uint32_t *st = p->start + v->start_index;
    uint32_t longest = 0;
    for (uint32_t s = 0; s < nslice; s++)
        if (st[s + 1] - st[s] > longest) longest = st[s + 1] - st[s];
    v->nslice = nslice;
    v->width = st[nslice];
    v->slice_packets = (uint32_t)mk_slice_packets(v, longest);
    v->offset = p->info.exchange_bytes;
    p->info.exchange_bytes += 2ull * MK_MAX_ROWS * nslice * v->slice_packets * 16;
}

/* `width` values in `nslice` even slices. */
static uint32_t packet(builder *b, const char *name, uint32_t dtype, uint32_t width, uint32_t nslice)
{
    mk_program *p = b->p;
    uint32_t id = new_vec(b, name, MK_PACKET, dtype);
    p->vec[id].start_index = p->info.n_start;
    p->start = grown(p->start, p->info.n_start + nslice + 1, sizeof *p->start);
    for (uint32_t s = 0; s <= nslice; s++) p->start[p->info.n_start++] = mk_start(s, width, nslice);
    pb_place(p, id, nslice);
    return id;
}

static uint32_t local(builder *b, const char *name, uint32_t bytes)
{
    uint32_t id = new_vec(b, name, MK_LOCAL, 0);
    b->p->vec[id].width = (bytes + 15) & ~15u;
    b->p->vec[id].offset = b->p->info.local_bytes;
    b->p->info.local_bytes += b->p->vec[id].width;
    return id;
}

static uint32_t bulk(builder *b, const char *name, uint32_t bytes, uint32_t signals)
{
    uint32_t id = new_vec(b, name, MK_BULK, 0);
    mk_vec *v = &b->p->vec[id];
    v->width = bytes;
    v->signals = signals;
    v->counter = b->p->info.n_counter++;
    v->offset = b->p->info.bulk_bytes;
    b->p->info.bulk_bytes += (bytes + 127) & ~127u;
    return id;
}

static uint32_t publish(builder *b, uint32_t vec)
{
    return b->p->vec[vec].pubs++;
}

static mk_insn *emit(builder *b, uint32_t w, unsigned op, uint32_t layer)
{
    b->queue[w] = grown(b->queue[w], b->n[w] + 1, sizeof **b->queue);
    mk_insn *in = &b->queue[w][b->n[w]];
    memset(in, 0, sizeof *in);
    in->opcode = (uint8_t)op;
    in->layer = (uint16_t)layer;
    in->seq = b->n[w]++;
    in->signal_vec = MK_NONE;
    in->tape_off = b->tape[w];
    for (int k = 0; k < 3; k++) in->wait[k].vec = MK_NONE;
    return in;
}

static void wait_slices(mk_insn *in, uint32_t vec, uint32_t pub, uint32_t s0, uint32_t n)
{
    in->wait[in->nwait++] = (mk_wait){(uint16_t)vec, (uint16_t)pub, (uint16_t)s0, (uint16_t)n};
}

static void wait_all(builder *b, mk_insn *in, uint32_t vec, uint32_t pub)
{
    wait_slices(in, vec, pub, 0, b->p->vec[vec].scope == MK_PACKET ? b->p->vec[vec].nslice : 0);
}

static void wait_values(builder *b, mk_insn *in, uint32_t vec, uint32_t pub, uint32_t first, uint32_t n)
{
    const uint32_t *st = mk_vec_starts(b->p, &b->p->vec[vec]);
    uint32_t lo = 0, hi;
    while (st[lo + 1] <= first) lo++;
    for (hi = lo + 1; st[hi] < first + n;) hi++;
    wait_slices(in, vec, pub, lo, hi - lo);
}

static void signal_slice(mk_insn *in, uint32_t vec, uint32_t pub, uint32_t slice)
{
    in->signal_vec = (uint16_t)vec;
    in->signal_pub = (uint16_t)pub;
    in->signal_slice = (uint16_t)slice;
}

static uint32_t param(builder *b, uint32_t n)
{
    uint32_t off = (uint32_t)b->p->info.param_floats;
    b->p->info.param_floats += n;
    return off;
}

static void consume(builder *b, uint32_t w, mk_insn *in, uint64_t bytes)
{
    in->tape_bytes = (uint32_t)bytes;
    b->tape[w] += bytes;
}

/* One GEMV for the slice `s` of `out` (or a LOCAL out, rows of slice s of `like`). */
typedef struct gemv {
    uint32_t layer, in, in_pub, in_off, k, out, out_pub, like, res, res_pub;
    unsigned prologue, epilogue, wtype, flags, group;
    uint32_t param_off;
} gemv;

static mk_insn *emit_gemv(builder *b, uint32_t w, uint32_t s, const gemv *d)
{
    mk_insn *in = emit(b, w, MK_OP_GEMV, d->layer);
    mk_gemv *g = &in->gemv;
    int is_local = b->p->vec[d->out].scope == MK_LOCAL;
    const uint32_t *st = mk_vec_starts(b->p, &b->p->vec[is_local ? d->like : d->out]);
    uint32_t halves = d->epilogue == MK_EPI_SILU ? 2 : 1;
    *g = (mk_gemv){.n = st[s + 1] - st[s], .k = d->k, .in_off = d->in_off, .wtype = (uint8_t)d->wtype, .prologue = (uint8_t)d->prologue,
                   .epilogue = (uint8_t)d->epilogue, .flags = (uint8_t)d->flags, .scale_k = 128, .norm_group = (uint16_t)d->group,
                   .k_chunk = d->k, .param_off = d->param_off, .eps = 1e-5f, .scale = 1, .row0 = st[s]};
    if (d->wtype == MK_W_FP8) {
        g->phase = (uint16_t)(st[s] % MK_SCALE_ROWS);
        g->nseg = (uint16_t)mk_segments(g->phase, g->n, g->scale_k);
    }
    wait_values(b, in, d->in, d->in_pub, d->in_off, d->k);
    if (d->epilogue == MK_EPI_ADD) wait_slices(in, d->res, d->res_pub, s, 1);
    signal_slice(in, d->out, d->out_pub, is_local ? 0 : s);
    consume(b, w, in, mk_segment_bytes(g->wtype, g->n * halves, g->k, (uint32_t)g->nseg * halves, g->scale_k));
    return in;
}

/* One per slice, slice s on worker s. */
static void emit_gemvs(builder *b, const gemv *d)
{
    for (uint32_t s = 0; s < b->p->vec[d->out].nslice; s++) emit_gemv(b, mk_start(s, b->A, b->p->vec[d->out].nslice), s, d);
}

uint32_t pb_vec(const mk_program *p, const char *name)
{
    for (uint32_t v = 0; v < p->info.n_vec; v++)
        if (!strcmp(p->vec[v].name, name)) return v;
    fprintf(stderr, "progbuild: no vector %s\n", name);
    abort();
}

static uint32_t V(const builder *b, const char *name)
{
    return pb_vec(b->p, name);
}

/* rank: f and z are DELTA_STEP's own products. */
static void delta_layer(builder *b, uint32_t layer, uint32_t norm, uint32_t rank)
{
    uint32_t h = V(b, "h"), low = V(b, "low"), qkv = V(b, "qkv"), fz = rank ? low : V(b, "fz"), o = V(b, "o");
    uint32_t lp = publish(b, low), qp = publish(b, qkv), fp = rank ? lp : publish(b, fz), op = publish(b, o), D = HEADS * DK;
    gemv d = {.layer = layer, .in = h, .in_pub = b->h_pub, .k = HIDDEN, .prologue = MK_PRO_RMS, .param_off = norm, .wtype = MK_W_BF16, .out = low, .out_pub = lp};
    emit_gemvs(b, &d);
    d.out = qkv, d.out_pub = qp;
    for (uint32_t s = 0; s < b->A; s++) emit_gemv(b, s, s, &d)->flags = MK_F_STAGED;
    if (!rank) emit_gemvs(b, &(gemv){.layer = layer, .in = low, .in_pub = lp, .k = LOW, .wtype = MK_W_BF16, .out = fz, .out_pub = fp});
    for (uint32_t i = 0; i < HEADS; i++) {
        uint32_t w = mk_start(i, b->A, HEADS);
        mk_insn *in = emit(b, w, MK_OP_DELTA_STEP, layer);
        in->delta = (mk_delta){.dk = DK, .dv = DV, .taps = TAPS, .q_off = i * DK, .k_off = D + i * DK, .v_off = 2 * D + i * DV, .f_off = i * DK, .z_off = D + i * DV,
                               .b_off = LOW + i, .param_off = param(b, (2 * DK + DV) * TAPS + 1 + DK + DV), .state_off = b->p->info.state_slot_bytes};
        b->p->info.state_slot_bytes += mk_delta_state_bytes(&in->delta);
        wait_values(b, in, qkv, qp, i * DK, 2 * D + DV);
        if (rank) {
            mk_delta *e = &in->delta;
            e->rank = (uint16_t)rank;
            e->f_off = 0;
            e->z_off = LOW + HEADS - rank;
            e->low[0] = (mk_low_rank){.wtype = MK_W_BF16};
            e->low[1] = (mk_low_rank){.phase = (uint16_t)(i * DV), .nseg = 1, .scale_k = 128, .wtype = MK_W_FP8};
            consume(b, w, in, mk_delta_segment_bytes(e, 0) + mk_delta_segment_bytes(e, 1));
        }
        wait_values(b, in, fz, fp, in->delta.f_off, rank ? LOW + HEADS : D + DV);
        wait_values(b, in, low, lp, LOW + i, 1);
        signal_slice(in, o, op, i);
    }
    uint32_t pub = publish(b, h);
    emit_gemvs(b, &(gemv){.layer = layer, .in = o, .in_pub = op, .k = HEADS * DV, .prologue = MK_PRO_HEADNORM, .group = DV, .epilogue = MK_EPI_ADD,
                          .res = h, .res_pub = b->h_pub, .wtype = MK_W_FP8, .out = h, .out_pub = pub});
    b->h_pub = pub;
}

static void mla_layer(builder *b, uint32_t layer, uint32_t norm, uint32_t pool)
{
    uint32_t h = V(b, "h"), kv = V(b, "kv"), q = V(b, "q"), qt = V(b, "qt"), kvc = V(b, "kvcache"), part = V(b, "partial"), lat = V(b, "lat"), v = V(b, "v");
    uint32_t kp = publish(b, kv), qp = publish(b, q), tp = publish(b, qt), cp = publish(b, kvc), pp = publish(b, part), lp = publish(b, lat), vp = publish(b, v);
    gemv d = {.layer = layer, .in = h, .in_pub = b->h_pub, .k = HIDDEN, .prologue = MK_PRO_RMS, .param_off = norm, .wtype = MK_W_BF16, .out = kv, .out_pub = kp};
    emit_gemvs(b, &d);
    d.out = q, d.out_pub = qp;
    emit_gemvs(b, &d);
    mk_mla g = {.kv_off = pool * (uint64_t)b->p->info.kv_pages * b->p->info.kv_page_bytes, .heads = HEADS, .latent = LATENT, .rope = ROPE,
                .qk_stride = NOPE + ROPE, .all_heads = HEADS, .scale = 0.25f, .eps = 1e-6f, .param_off = param(b, LATENT + ROPE / 2), .rotary = 1,
                .parts = b->A};
    mk_insn *in = emit(b, b->A - 1, MK_OP_KV_APPEND, layer);
    in->mla = g;
    wait_all(b, in, kv, kp);
    signal_slice(in, kvc, cp, 0);
    for (uint32_t i = 0; i < HEADS; i++)
        emit_gemv(b, mk_start(i, b->A, HEADS), i, &(gemv){.layer = layer, .in = q, .in_pub = qp, .in_off = i * (NOPE + ROPE), .k = NOPE, .wtype = MK_W_BF16,
                                                          .out = qt, .out_pub = tp});
    for (uint32_t w = 0; w < b->A; w++) {
        in = emit(b, w, MK_OP_MLA_PARTIAL, layer);
        in->mla = g;
        in->mla.in_off = NOPE;
        in->mla.part = w;
        wait_all(b, in, qt, tp);
        wait_all(b, in, q, qp);
        wait_all(b, in, kvc, cp);
        signal_slice(in, part, pp, 0);
    }
    for (uint32_t i = 0; i < HEADS; i++) {
        in = emit(b, mk_start(i, b->A, HEADS), MK_OP_COMBINE, layer);
        in->mla = g;
        in->mla.heads = 1;
        in->mla.head0 = i;
        in->mla.n = LATENT;
        wait_all(b, in, part, pp);
        signal_slice(in, lat, lp, i);
        emit_gemv(b, mk_start(i, b->A, HEADS), i, &(gemv){.layer = layer, .in = lat, .in_pub = lp, .in_off = i * LATENT, .k = LATENT, .wtype = MK_W_BF16,
                                                          .out = v, .out_pub = vp});
    }
    uint32_t pub = publish(b, h);
    emit_gemvs(b, &(gemv){.layer = layer, .in = v, .in_pub = vp, .k = HEADS * VDIM, .epilogue = MK_EPI_ADD, .res = h, .res_pub = b->h_pub,
                          .wtype = MK_W_BF16, .out = h, .out_pub = pub});
    b->h_pub = pub;
}

static void dense_layer(builder *b, uint32_t layer, uint32_t norm)
{
    uint32_t h = V(b, "h"), ffn = V(b, "ffn"), fp = publish(b, ffn), pub = publish(b, h);
    emit_gemvs(b, &(gemv){.layer = layer, .in = h, .in_pub = b->h_pub, .k = HIDDEN, .prologue = MK_PRO_RMS, .epilogue = MK_EPI_SILU, .param_off = norm,
                          .wtype = MK_W_FP8, .out = ffn, .out_pub = fp});
    emit_gemvs(b, &(gemv){.layer = layer, .in = ffn, .in_pub = fp, .k = FFN, .epilogue = MK_EPI_ADD, .res = h, .res_pub = b->h_pub, .wtype = MK_W_FP8,
                          .out = h, .out_pub = pub});
    b->h_pub = pub;
}

static uint32_t expert_slices(const builder *b)
{
    uint32_t T = (b->W + TOPK - 1) / TOPK;
    return T < 4 ? 4 : T;
}

static void moe_layer(builder *b, uint32_t layer, uint32_t norm, int shared)
{
    uint32_t h = V(b, "h"), router = V(b, "router"), route = V(b, "route"), u = V(b, "u"), T = expert_slices(b), W = b->W, A = b->A;
    uint32_t rp = publish(b, router), tp = publish(b, route), up = publish(b, u), bias = param(b, EXPERTS), sp = 0, ap = 0;
    gemv d = {.layer = layer, .in = h, .in_pub = b->h_pub, .k = HIDDEN, .prologue = MK_PRO_RMS, .param_off = norm, .wtype = MK_W_BF16};
    for (uint32_t w = 0; w < A; w++) {
        const uint32_t *st = mk_vec_starts(b->p, &b->p->vec[h]), n = st[w + 1] - st[w];
        mk_insn *in = emit(b, w, MK_OP_ROUTER, layer);
        in->router = (mk_router){.first = st[w], .n = n, .experts = EXPERTS, .param_off = norm + st[w]};
        wait_slices(in, h, b->h_pub, w, 1);
        signal_slice(in, router, rp, 0);
        consume(b, w, in, mk_segment_bytes(MK_W_BF16, n, EXPERTS, 0, 0));
    }
    if (shared) {
        sp = publish(b, V(b, "shared"));
        ap = publish(b, V(b, "acc"));
        d.epilogue = MK_EPI_SILU, d.out = V(b, "shared"), d.out_pub = sp;
        emit_gemvs(b, &d);
    }
    uint32_t rows = mk_expert_rows(INTER, T), dn_rows = (HIDDEN + A - 1) / A;
    uint64_t us = mk_segment_bytes(MK_W_FP8, 2 * rows, HIDDEN, 2, 128), ds = mk_segment_bytes(MK_W_FP8, dn_rows, INTER, 1, 128);
    uint64_t ub = b->p->info.expert_bytes, db = ub + us * T * EXPERTS;
    b->p->info.expert_bytes = db + ds * A * EXPERTS;
    for (uint32_t w = 0; w < W; w++) {
        mk_insn *in = emit(b, w, MK_OP_ROUTE, layer);
        in->route = (mk_route){.experts = EXPERTS, .topk = TOPK, .groups = 2, .topk_groups = 1, .renorm = 1, .has_bias = 1, .scale = 2, .param_off = bias, .k = HIDDEN, .norm_off = norm, .eps = 1e-5f};
        wait_all(b, in, h, b->h_pub);
        wait_all(b, in, router, rp);
        signal_slice(in, route, tp, 0);
        in = emit(b, w, MK_OP_EXPERT_UP, layer);
        in->expert = (mk_expert){.base = ub, .expert_stride = us * T, .slice_stride = (uint32_t)us, .T = (uint16_t)T, .k = HIDDEN, .inter = INTER,
                                 .wtype = MK_W_FP8, .nseg = 1, .topk = TOPK, .param_off = norm, .eps = 1e-5f};
        wait_all(b, in, h, b->h_pub);
        wait_all(b, in, route, tp);
        signal_slice(in, u, up, 0);
    }
    uint32_t pub = publish(b, h);
    for (uint32_t w = 0; w < A; w++) {
        if (shared)
            emit_gemv(b, w, w, &(gemv){.layer = layer, .in = V(b, "shared"), .in_pub = sp, .k = SHARED, .epilogue = MK_EPI_ADD, .res = h, .res_pub = b->h_pub,
                                       .wtype = MK_W_BF16, .out = V(b, "acc"), .out_pub = ap, .like = h});
        const uint32_t *st = mk_vec_starts(b->p, &b->p->vec[h]);
        mk_insn *in = emit(b, w, MK_OP_EXPERT_DOWN, layer);
        in->expert = (mk_expert){.base = db, .expert_stride = ds * A, .slice_stride = (uint32_t)ds, .T = (uint16_t)A, .t = (uint16_t)w, .k = INTER,
                                 .inter = INTER, .n = (uint16_t)(st[w + 1] - st[w]), .phase = (uint16_t)st[w], .wtype = MK_W_FP8, .nseg = 1, .topk = TOPK};
        wait_all(b, in, u, up);
        wait_all(b, in, route, tp);
        if (shared)
            wait_all(b, in, V(b, "acc"), ap);
        else
            wait_slices(in, h, b->h_pub, w, 1);
        signal_slice(in, h, pub, w);
    }
    b->h_pub = pub;
}

static void vectors(builder *b, const pb_config *c, const char *layers)
{
    uint32_t A = b->A, T = expert_slices(b), act = c->act_f32 ? MK_F32 : MK_BF16, heads = A < HEADS ? A : HEADS;
    packet(b, "h", MK_F32, HIDDEN, A);
    if (strpbrk(layers, "DK")) {
        packet(b, "low", act, LOW + HEADS, A);
        packet(b, "qkv", act, 3 * HEADS * DK, A);
        if (strchr(layers, 'D')) packet(b, "fz", act, 2 * HEADS * DK, A);
        uint32_t o = packet(b, "o", act, HEADS * DV, HEADS);
        b->p->info.exchange_bytes = b->p->vec[o].offset;
        b->p->vec[o].trailer = 1;
        pb_place(b->p, o, HEADS);
    }
    if (strchr(layers, 'M')) {
        packet(b, "kv", act, LATENT + ROPE, A);
        packet(b, "q", act, HEADS * (NOPE + ROPE), heads);
        packet(b, "qt", act, HEADS * LATENT, HEADS);
        bulk(b, "kvcache", 0, 1);
        bulk(b, "partial", MK_MAX_ROWS * MK_MAX_SPLITS * HEADS * mk_partial_floats(LATENT) * 4, A);
        packet(b, "lat", act, HEADS * LATENT, HEADS);
        packet(b, "v", act, HEADS * VDIM, HEADS);
    }
    if (strchr(layers, 'f')) packet(b, "ffn", act, FFN, A);
    if (strpbrk(layers, "es")) {
        bulk(b, "router", mk_sums_bytes(EXPERTS), A);
        b->p->vec[V(b, "router")].flags = MK_VEC_SUMS;
        local(b, "route", sizeof(mk_routes));
        mk_program *p = b->p;
        uint32_t u = packet(b, "u", act, TOPK * INTER, TOPK * T);
        p->vec[u].flags = MK_VEC_DYNAMIC;
        for (uint32_t s = 0; s < TOPK * T; s++) p->start[p->vec[u].start_index + s] = s / T * INTER + mk_expert_start(s % T, INTER, T);
        p->info.exchange_bytes = p->vec[u].offset;
        pb_place(p, u, TOPK * T);
    }
    if (strchr(layers, 's')) {
        packet(b, "shared", act, SHARED, A < SHARED ? A : SHARED);
        local(b, "acc", MK_MAX_ROWS * 4 * HIDDEN);
    }
    packet(b, "stats", MK_F32, 4 * A, A);
    bulk(b, "logits", MK_MAX_ROWS * VOCAB * 4, A);
    local(b, "sampled", sizeof(mk_sampled));
}

mk_program *pb_make(const pb_config *c)
{
    const char *layers = c->layers ? c->layers : "DeMsMf";
    uint32_t W = c->workers, n_layers = (uint32_t)strlen(layers) / 2, pool = 0;
    builder b = {.W = W, .A = c->active ? c->active : W};
    mk_program *p = b.p = calloc(1, sizeof *p);
    if (!p) abort();
    b.queue = calloc(W, sizeof *b.queue);
    b.n = calloc(W, sizeof *b.n);
    b.tape = calloc(W, sizeof *b.tape);
    p->info = (mk_program_info){.magic = MK_PROGRAM_MAGIC, .version = MK_PROGRAM_VERSION, .flags = c->act_f32 ? MK_PROG_ACT_F32 : 0, .workers = W,
                                .layers = n_layers, .hidden = HIDDEN, .vocab = VOCAB, .max_context = 1024, .embed_bytes = VOCAB * HIDDEN * 2,
                                .kv_pages = 16, .state_slots = 2, .smem_limit = c->smem_limit};
    for (const char *l = layers; *l; l += 2) p->info.kv_layers += *l == 'M';
    if (p->info.kv_layers) p->info.kv_page_bytes = MK_PAGE * (LATENT + ROPE) * (c->act_f32 ? 4 : 2);
    vectors(&b, c, layers);

    uint32_t h = V(&b, "h");
    b.h_pub = publish(&b, h);
    for (uint32_t w = 0; w < b.A; w++) {
        const uint32_t *st = mk_vec_starts(p, &p->vec[h]);
        mk_insn *in = emit(&b, w, MK_OP_EMBED, MK_NONE);
        in->embed = (mk_embed){.first = st[w], .n = st[w + 1] - st[w], .hidden = HIDDEN, .wtype = MK_BF16, .scale = 1};
        signal_slice(in, h, b.h_pub, w);
    }
    for (uint32_t l = 0; l < n_layers; l++) {
        if (layers[2 * l] == 'D' || layers[2 * l] == 'K')
            delta_layer(&b, l, param(&b, HIDDEN), layers[2 * l] == 'K' ? LOW : 0);
        else
            mla_layer(&b, l, param(&b, HIDDEN), pool++);
        if (layers[2 * l + 1] == 'f')
            dense_layer(&b, l, param(&b, HIDDEN));
        else
            moe_layer(&b, l, param(&b, HIDDEN), layers[2 * l + 1] == 's');
    }
    uint32_t norm = param(&b, HIDDEN), stats = V(&b, "stats"), logits = V(&b, "logits"), sampled = V(&b, "sampled");
    uint32_t sp = publish(&b, stats), lp = publish(&b, logits), mp = publish(&b, sampled);
    for (uint32_t w = 0; w < b.A; w++) {
        uint32_t row0 = mk_start(w, VOCAB, b.A), n = mk_start(w + 1, VOCAB, b.A) - row0;
        mk_insn *in = emit(&b, w, MK_OP_LM_HEAD, MK_NONE);
        in->lm_head = (mk_lm_head){.n = n, .k = HIDDEN, .row0 = row0, .vocab = VOCAB, .wtype = MK_W_BF16, .param_off = norm, .eps = 1e-5f,
                                   .logits_vec = (uint16_t)logits, .logits_pub = (uint16_t)lp};
        wait_all(&b, in, h, b.h_pub);
        signal_slice(in, stats, sp, w);
        consume(&b, w, in, mk_segment_bytes(MK_W_BF16, n, HIDDEN, 0, 128));
    }
    mk_insn *in;
    for (uint32_t w = b.A; w-- > 0;) {
        in = emit(&b, w, MK_OP_SAMPLE, MK_NONE);
        in->sample = (mk_sample){.vocab = VOCAB, .slices = b.A, .helper = (uint16_t)w, .helpers = (uint16_t)(b.A - 1)};
        wait_all(&b, in, stats, sp);
        wait_all(&b, in, logits, lp);
        if (!w) signal_slice(in, sampled, mp, 0);
    }
    in = emit(&b, 0, MK_OP_SCHEDULE, MK_NONE);
    wait_all(&b, in, sampled, mp);

    p->queue = calloc(W + 1, sizeof *p->queue);
    p->tape_base = calloc(W + 1, sizeof *p->tape_base);
    for (uint32_t w = 0; w < W; w++) p->queue[w + 1] = p->queue[w] + b.n[w];
    p->info.n_insn = p->queue[W];
    p->insn = grown(NULL, p->info.n_insn, sizeof *p->insn);
    for (uint32_t w = 0; w < W; w++) {
        p->tape_base[w + 1] = p->tape_base[w] + b.tape[w];
        if (b.tape[w] > p->info.tape_bytes_max) p->info.tape_bytes_max = b.tape[w];
        if (b.n[w]) memcpy(p->insn + p->queue[w], b.queue[w], b.n[w] * sizeof *p->insn);
        free(b.queue[w]);
    }
    p->info.tape_bytes = p->tape_base[W];
    free(b.queue);
    free(b.n);
    free(b.tape);
    return p;
}

mk_program *pb_small(void)
{
    return pb_make(&(pb_config){.workers = 4});
}

static void *dup(const void *a, size_t bytes)
{
    void *p = malloc(bytes ? bytes : 1);
    if (!p) abort();
    if (bytes) memcpy(p, a, bytes);
    return p;
}

mk_program *pb_copy(const mk_program *p)
{
    mk_program *q = dup(p, sizeof *p);
    const mk_program_info *i = &p->info;
    q->vec = dup(p->vec, i->n_vec * sizeof *p->vec);
    q->start = dup(p->start, i->n_start * sizeof *p->start);
    q->queue = dup(p->queue, (i->workers + 1) * sizeof *p->queue);
    q->tape_base = dup(p->tape_base, (i->workers + 1) * sizeof *p->tape_base);
    q->insn = dup(p->insn, i->n_insn * sizeof *p->insn);
    return q;
}

mk_insn *pb_find(mk_program *p, uint32_t worker, unsigned op, uint32_t n)
{
    for (uint32_t x = p->queue[worker]; x < p->queue[worker + 1]; x++)
        if (p->insn[x].opcode == op && n-- == 0) return &p->insn[x];
    fprintf(stderr, "progbuild: no such %s\n", mk_opcode_name(op));
    abort();
}

mk_insn *pb_publisher(mk_program *p, const char *name, uint32_t pub, uint32_t slice)
{
    uint32_t v = pb_vec(p, name);
    for (uint32_t x = 0; x < p->info.n_insn; x++)
        if (p->insn[x].signal_vec == v && p->insn[x].signal_pub == pub && p->insn[x].signal_slice == slice) return &p->insn[x];
    fprintf(stderr, "progbuild: nobody publishes %s %u %u\n", name, pub, slice);
    abort();
}

uint32_t pb_worker(const mk_program *p, const mk_insn *in)
{
    uint32_t w = 0;
    while (p->queue[w + 1] <= (uint32_t)(in - p->insn)) w++;
    return w;
}

static void renumber(mk_program *p)
{
    p->info.n_insn = p->queue[p->info.workers];
    p->info.tape_bytes_max = 0;
    for (uint32_t w = 0; w < p->info.workers; w++) {
        uint64_t tape = 0;
        for (uint32_t x = p->queue[w]; x < p->queue[w + 1]; x++) {
            p->insn[x].seq = x - p->queue[w];
            p->insn[x].tape_off = tape;
            tape += p->insn[x].tape_bytes;
        }
        p->tape_base[w + 1] = p->tape_base[w] + tape;
        if (tape > p->info.tape_bytes_max) p->info.tape_bytes_max = tape;
    }
    p->info.tape_bytes = p->tape_base[p->info.workers];
}

void pb_insert(mk_program *p, uint32_t worker, uint32_t at, const mk_insn *in)
{
    mk_insn copy = *in;
    uint32_t x = p->queue[worker] + at;
    p->insn = grown(p->insn, p->info.n_insn + 1, sizeof *p->insn);
    memmove(p->insn + x + 1, p->insn + x, (p->info.n_insn - x) * sizeof *p->insn);
    p->insn[x] = copy;
    for (uint32_t w = worker; w < p->info.workers; w++) p->queue[w + 1]++;
    renumber(p);
}

void pb_remove(mk_program *p, uint32_t worker, uint32_t at)
{
    uint32_t x = p->queue[worker] + at;
    memmove(p->insn + x, p->insn + x + 1, (p->info.n_insn - x - 1) * sizeof *p->insn);
    for (uint32_t w = worker; w < p->info.workers; w++) p->queue[w + 1]--;
    renumber(p);
}

void pb_swap(mk_program *p, uint32_t worker, uint32_t a, uint32_t b)
{
    mk_insn *x = p->insn + p->queue[worker] + a, *y = p->insn + p->queue[worker] + b, t = *x;
    *x = *y;
    *y = t;
    renumber(p);
}

uint32_t pb_add_dump(mk_program *p, uint32_t n)
{
    builder b = {.p = p};
    uint32_t id = packet(&b, "dump", MK_F32, n, 1);
    p->vec[id].pubs = 1;
    return id;
}
