#include "host/compare.h"

#include "instructions/latent.h"
#include "instructions/mk_math.h"
#include "instructions/tolerance.h"
#include "megakernel/exchange.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- regions -------------------------------------------------------------------------------------------------------- */

uint8_t *mk_region_at(const mk_memory *m, uint32_t i)
{
    uint8_t *const at[MK_REGIONS] = {m->exchange, m->bulk, (uint8_t *)m->counter, m->local, m->state, m->kv};
    return at[i];
}

uint64_t mk_region_bytes(const mk_program *p, uint32_t i)
{
    const mk_program_info *f = &p->info;
    const uint64_t bytes[MK_REGIONS] = {f->exchange_bytes, f->bulk_bytes, (uint64_t)f->n_counter * 4, (uint64_t)f->workers * f->local_bytes,
                                        f->state_slots * f->state_slot_bytes, (uint64_t)f->kv_layers * f->kv_pages * f->kv_page_bytes};
    return bytes[i];
}

const char *mk_region_name(uint32_t i)
{
    static const char *const name[MK_REGIONS] = {"exchange", "bulk vectors", "counters", "local memory", "recurrent state", "KV cache"};
    return name[i];
}

/* ---- pieces --------------------------------------------------------------------------------------------------------- */

enum { EXCHANGE, BULK, COUNTER, LOCAL, STATE, KV };

static uint32_t act_bytes(const mk_program *p)
{
    return p->info.flags & MK_PROG_ACT_F32 ? 4 : 2;
}

static uint64_t kv_offset(const mk_memory *m, const mk_program *p, uint64_t kv_off, const mk_row *row, uint32_t row_bytes)
{
    uint32_t page = m->page[(size_t)row->slot * m->max_pages + row->pos / MK_PAGE];
    return kv_off + (uint64_t)page * p->info.kv_page_bytes + (uint64_t)(row->pos % MK_PAGE) * row_bytes;
}

static void slice_piece(const mk_program *p, const mk_step *step, const mk_insn *in, uint32_t row, uint32_t slice, mk_piece_fn f, void *arg)
{
    const mk_vec *v = &p->vec[in->signal_vec];
    const uint32_t *start = mk_vec_starts(p, v);
    mk_piece pc = {.kind = in->opcode == MK_OP_LM_HEAD ? MK_PC_STATS : MK_PC_PACKETS, .region = EXCHANGE, .n = start[slice + 1] - start[slice],
                   .off = mk_packet_offset(v, mk_half(v, step->seq, in->signal_pub), row, slice), .slice = slice, .first = start[slice],
                   .what = "published"};
    pc.bytes = mk_slice_packets(v, pc.n) * 16u;
    f(arg, &pc);
}

static void partials(const mk_program *p, const mk_step *step, const mk_insn *in, uint32_t row, mk_piece_fn f, void *arg)
{
    const mk_mla *m = &in->mla;
    const mk_gqa *g = &in->gqa;
    int mla = in->opcode == MK_OP_MLA_PARTIAL;
    uint32_t all = mla ? m->all_heads : g->heads, n = mla ? m->latent : g->dim, floats = mk_partial_floats(n), per = mla ? mk_head_group(step->row[row].pos, m->heads) : g->heads / g->kv_heads;
    uint32_t heads = mla ? m->heads : g->heads, head0 = mla ? m->head0 : 0, groups = (heads + per - 1) / per;
    uint32_t part = mla ? m->part : g->part, parts = mla ? m->parts : g->parts, base = 0;
    uint32_t grain = mla ? m->grain : g->grain, most = mla ? m->most : g->most, splits = mk_splits(step->row[row].pos, grain, most);
    for (uint32_t r = 0, k; r < row; r += k) { /* items before those of the row's own set */
        k = mla ? mk_mla_together(m, step, r) : mk_gqa_together(g, step->row + r, step->nrows - r);
        const uint32_t pos = step->row[r + k - 1].pos, of = mla ? mk_head_group(pos, heads) : per;
        if (r + k <= row) base += mk_splits(pos, grain, most) * ((heads + of - 1) / of);
    }
    for (uint32_t s = 0; s < splits; s++)
        for (uint32_t h = 0; h < heads; h++) {
            if ((s * groups + h / per + base) % parts != part) continue;
            uint64_t at = (((uint64_t)row * MK_MAX_SPLITS + s) * all + head0 + h) * floats;
            f(arg, &(mk_piece){.kind = MK_PC_PARTIAL, .region = BULK, .off = p->vec[in->signal_vec].offset + at * 4, .bytes = floats * 4ull, .n = n,
                               .slice = s, .first = (head0 + h) * n, .what = "partial (slice: split)"});
        }
}

void mk_pieces(const mk_program *p, const mk_memory *m, const mk_step *step, const mk_insn *in, uint32_t worker, uint32_t row, mk_piece_fn f, void *arg)
{
    const mk_row *r = &step->row[row];
    const mk_vec *v = in->signal_vec == MK_NONE ? NULL : &p->vec[in->signal_vec];
    uint64_t local = v ? worker * p->info.local_bytes + v->offset : 0, state = r->state_write * p->info.state_slot_bytes;
    mk_piece pc = {.kind = MK_PC_F32, .region = LOCAL, .what = "local result"};
    switch (in->opcode) {
    case MK_OP_DELTA_STEP: {
        const mk_delta *d = &in->delta;
        uint32_t n = mk_delta_channels(d) * d->taps;
        state += d->state_off;
        f(arg, &(mk_piece){.kind = MK_PC_F32, .region = STATE, .off = state, .bytes = n * 4ull, .n = n, .what = "convolution state"});
        f(arg, &(mk_piece){.kind = MK_PC_F32, .region = STATE, .off = state + mk_delta_matrix_at(d), .bytes = (uint64_t)d->dk * d->dv * 4,
                           .n = (uint32_t)d->dk * d->dv, .what = "state"});
        break;
    }
    case MK_OP_KV_APPEND: {
        uint32_t n = (uint32_t)in->mla.latent + in->mla.rope, b = act_bytes(p);
        uint32_t bytes = mk_latent_row_bytes(in->mla.latent, in->mla.rope, in->mla.cache, b);
        f(arg, &(mk_piece){.kind = in->mla.cache == MK_CACHE_FP8 ? MK_PC_LATENT : b == 2 ? MK_PC_BF16 : MK_PC_F32, .region = KV,
                           .off = kv_offset(m, p, in->mla.kv_off, r, bytes), .bytes = bytes, .n = n, .what = "cache row"});
        return;
    }
    case MK_OP_GQA_APPEND: {
        uint32_t n = in->gqa.dim, b = act_bytes(p);
        for (uint32_t which = 0; which < 2; which++)
            f(arg, &(mk_piece){.kind = b == 2 ? MK_PC_BF16 : MK_PC_F32, .region = KV, .bytes = (uint64_t)n * b, .n = n, .what = which ? "cached value" : "cached key",
                               .off = kv_offset(m, p, in->gqa.kv_off, r, 0) + mk_gqa_at(n, in->gqa.head, which, r->pos % MK_PAGE) * b});
        return;
    }
    case MK_OP_MLA_PARTIAL:
    case MK_OP_GQA_PARTIAL:
        partials(p, step, in, row, f, arg);
        return;
    case MK_OP_ROUTE:
        if (row == 0) { /* what it clears has no row */
            const mk_vec *sums = &p->vec[in->wait[1].vec];
            const uint32_t all = mk_sums_words(in->route.experts), first = mk_start(worker, all, p->info.workers), n = mk_start(worker + 1, all, p->info.workers) - first;
            const uint32_t half = mk_half(sums, step->seq, in->wait[1].pub) ^ 1;
            f(arg, &(mk_piece){.kind = MK_PC_CLEARED, .region = BULK, .off = sums->offset + 8ull * (half * all + first), .bytes = 8ull * n, .n = 2 * n, .first = 2 * first,
                               .what = "half of a cleared sum"});
        }
        f(arg, &(mk_piece){.kind = MK_PC_ROUTES, .region = LOCAL, .off = local, .bytes = sizeof(mk_routes), .n = in->route.topk, .what = "routes"});
        return;
    case MK_OP_ROUTER:
        for (uint32_t i = 0; i < in->router.experts; i += MK_SUM_GROUP) {
            const uint32_t left = in->router.experts - i, n = left < MK_SUM_GROUP ? left : MK_SUM_GROUP;
            f(arg, &(mk_piece){.kind = MK_PC_SUMS, .region = BULK, .off = v->offset + 8ull * mk_sum_at(in->router.experts, mk_half(v, step->seq, in->signal_pub), row, i),
                               .bytes = 8ull * n, .n = n, .first = i, .what = "sum"});
        }
        return;
    case MK_OP_SAMPLE:
        if (in->sample.helper) return;
        f(arg, &(mk_piece){.kind = MK_PC_SAMPLED, .region = LOCAL, .off = local, .bytes = sizeof(mk_sampled), .n = 1, .what = "sampled"});
        return;
    case MK_OP_EXPERT_UP: {
        const mk_routes *t = (const mk_routes *)(m->local + worker * p->info.local_bytes + p->vec[in->wait[1].vec].offset);
        uint32_t T = in->expert.T, W = p->info.workers;
        for (uint32_t j = 0; j < t->n_union && j < MK_MAX_UNION; j++)
            for (uint32_t s = 0; s < T && t->rank[row][j] != 255; s++)
                if ((j * T + s) % W == worker) slice_piece(p, step, in, row, t->rank[row][j] * T + s, f, arg);
        return;
    }
    case MK_OP_LM_HEAD:
        if (r->flags & MK_ROW_LOGITS)
            f(arg, &(mk_piece){.kind = MK_PC_F32, .region = BULK, .bytes = in->lm_head.n * 4ull, .n = in->lm_head.n, .first = in->lm_head.row0,
                               .off = p->vec[in->lm_head.logits_vec].offset + ((uint64_t)row * in->lm_head.vocab + in->lm_head.row0) * 4, .what = "logits"});
        break;
    default:
        break;
    }
    if (!v) return;
    if (v->scope == MK_PACKET) {
        slice_piece(p, step, in, row, in->signal_slice, f, arg);
    } else if (v->scope == MK_LOCAL && in->opcode == MK_OP_GEMV) {
        pc.off = local + (uint64_t)row * in->gemv.n * 4, pc.n = in->gemv.n, pc.bytes = in->gemv.n * 4ull;
        f(arg, &pc);
    }
}

uint32_t mk_piece_values(const mk_program *p, const mk_piece *pc, const mk_insn *in)
{
    switch (pc->kind) {
    case MK_PC_PACKETS:
        return pc->n + p->vec[in->signal_vec].trailer;
    case MK_PC_STATS:
        return 3;
    case MK_PC_PARTIAL:
        return pc->n + 1;
    case MK_PC_ROUTES:
        return 2 * pc->n + 1;
    case MK_PC_SAMPLED:
        return 2;
    default:
        return pc->n;
    }
}

static uint32_t packet_word(const uint8_t *at, uint32_t i)
{
    uint32_t w;
    memcpy(&w, at + i / 3 * 16 + i % 3 * 4, 4);
    return w;
}

void mk_piece_read(const mk_program *p, const mk_piece *pc, const mk_memory *m, const mk_insn *in, uint32_t row, double *v, uint32_t *bits)
{
    const uint8_t *at = mk_region_at(m, pc->region) + pc->off;
    const float *x = (const float *)at;
    uint32_t n = mk_piece_values(p, pc, in);
    switch (pc->kind) {
    case MK_PC_PACKETS: {
        const mk_vec *vec = &p->vec[in->signal_vec];
        for (uint32_t i = 0; i < pc->n; i++) {
            bits[i] = vec->dtype == MK_F32 ? packet_word(at, i) : (packet_word(at, i / 2) >> (16 * (i & 1)) & 0xffffu) << 16;
            v[i] = (double)mk_float_of(bits[i]);
        }
        if (n > pc->n) {
            bits[pc->n] = packet_word(at, vec->dtype == MK_F32 ? pc->n : (pc->n + 1) / 2);
            v[pc->n] = (double)mk_float_of(bits[pc->n]);
        }
        return;
    }
    case MK_PC_STATS:
        for (uint32_t i = 0; i < 3; i++) bits[i] = packet_word(at, i);
        v[0] = (double)mk_float_of(bits[0]), v[1] = bits[1], v[2] = (double)mk_float_of(bits[2]);
        return;
    case MK_PC_PARTIAL:
        memcpy(bits, at, n * 4ull);
        for (uint32_t i = 0; i < pc->n; i++) v[i] = (double)x[i] / (double)x[pc->n + 1];
        v[pc->n] = (double)x[pc->n] + log((double)x[pc->n + 1]);
        return;
    case MK_PC_ROUTES: {
        const mk_routes *t = (const mk_routes *)at;
        for (uint32_t k = 0; k < pc->n; k++) {
            bits[k] = ~0u;
            for (uint32_t j = 0; j < t->n_union && j < MK_MAX_UNION; j++)
                if (t->rank[row][j] == k) bits[k] = t->expert[j];
            v[k] = bits[k];
            bits[pc->n + k] = mk_bits_of(t->weight[row][k]);
            v[pc->n + k] = (double)t->weight[row][k];
        }
        bits[2 * pc->n] = t->n_union;
        v[2 * pc->n] = t->n_union;
        return;
    }
    case MK_PC_SAMPLED: {
        const mk_sampled *s = (const mk_sampled *)at;
        bits[0] = s->token[row], bits[1] = mk_bits_of(s->logprob[row]);
        v[0] = bits[0], v[1] = (double)s->logprob[row];
        return;
    }
    case MK_PC_SUMS:
        for (uint32_t i = 0; i < n; i++) {
            uint64_t word;
            memcpy(&word, at + 8ull * i, 8);
            const float f = mk_sum_value(word, p->vec[in->signal_vec].signals);
            bits[i] = mk_sums_count(word) == (p->vec[in->signal_vec].signals & 255) ? mk_bits_of(f) : ~0u;
            v[i] = (double)f;
        }
        return;
    case MK_PC_CLEARED: /* integers: as f32, what is left of a few addends would be all but zero */
        memcpy(bits, at, n * 4ull);
        for (uint32_t i = 0; i < n; i++) v[i] = bits[i];
        return;
    case MK_PC_LATENT:
        for (uint32_t i = 0; i < n; i++) {
            const float f = mk_latent_value(at, in->mla.latent, i);
            bits[i] = mk_bits_of(f);
            v[i] = (double)f;
        }
        return;
    case MK_PC_BF16:
        for (uint32_t i = 0; i < n; i++) {
            uint16_t h;
            memcpy(&h, at + 2 * i, 2);
            bits[i] = h;
            v[i] = (double)mk_bf16_to_f32(h);
        }
        return;
    default:
        memcpy(bits, at, n * 4ull);
        for (uint32_t i = 0; i < n; i++) v[i] = (double)x[i];
    }
}

/* ---- comparison ----------------------------------------------------------------------------------------------------- */

typedef struct job {
    const mk_program *p;
    const mk_step *step;
    const mk_memory *want, *got;
    mk_comparison *c;
    uint8_t *mark[MK_REGIONS]; /* a byte for every 4 bytes that may be written; NULL: not looked at */
    double *v, *w;
    uint32_t *bits;
    uint32_t cap, epoch0;
    int lost;
    /* the instruction at hand */
    const mk_insn *in;
    uint32_t worker, row;
    const uint32_t *list; /* NULL: all instructions */
    uint32_t n;
    /* RMS of a published vector's row; of a row's logits */
    struct {
        uint32_t vec, pub;
        double rms, logits;
    } scale[MK_MAX_ROWS];
} job;

static int room(job *j, uint32_t n)
{
    if (n <= j->cap) return 1;
    free(j->v), free(j->w), free(j->bits);
    j->cap = n + 1024;
    j->v = malloc(j->cap * sizeof *j->v);
    j->w = malloc(j->cap * sizeof *j->w);
    j->bits = malloc(j->cap * sizeof *j->bits);
    if (j->v && j->w && j->bits) return 1;
    j->lost = 1;
    j->cap = 0;
    return 0;
}

static double root(double squares, uint64_t n)
{
    return n ? sqrt(squares / (double)n) : 0;
}

static uint32_t worker_of(const mk_program *p, uint32_t x)
{
    uint32_t lo = 0, hi = p->info.workers;
    while (hi - lo > 1) {
        uint32_t mid = (lo + hi) / 2;
        if (p->queue[mid] <= x)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

/* Squares of the row of what the instruction publishes, and how many values there are. A LOCAL sum is a slice of a vector that is spread over the workers: over all instructions looked at
 * that make it. */
static uint64_t local_squares(job *j, double *squares)
{
    const mk_insn *in = j->in;
    uint64_t n = 0;
    for (uint32_t k = 0; k < j->n; k++) {
        uint32_t x = j->list ? j->list[k] : k;
        const mk_insn *o = &j->p->insn[x];
        if (o->opcode != in->opcode || o->signal_vec != in->signal_vec || o->signal_pub != in->signal_pub) continue;
        const float *v = (const float *)(j->want->local + worker_of(j->p, x) * j->p->info.local_bytes + j->p->vec[o->signal_vec].offset) + (size_t)j->row * o->gemv.n;
        for (uint32_t i = 0; i < o->gemv.n; i++) *squares += (double)v[i] * (double)v[i];
        n += o->gemv.n;
    }
    return n;
}

/* Over the slices of the publication that `want` has. */
static uint64_t vector_squares(job *j, double *squares)
{
    const mk_insn *in = j->in;
    const mk_vec *v = &j->p->vec[in->signal_vec];
    const uint32_t *start = mk_vec_starts(j->p, v);
    uint32_t half = mk_half(v, j->step->seq, in->signal_pub), epoch = mk_epoch(j->epoch0, j->step->seq, in->signal_pub);
    uint64_t n = 0;
    for (uint32_t s = 0; s < v->nslice; s++) {
        mk_piece pc = {.kind = MK_PC_PACKETS, .n = start[s + 1] - start[s], .off = mk_packet_offset(v, half, j->row, s)};
        uint32_t found;
        memcpy(&found, j->want->exchange + pc.off + 12, 4);
        if (found != epoch || !room(j, pc.n + 1)) continue;
        mk_piece_read(j->p, &pc, j->want, in, j->row, j->v, j->bits);
        for (uint32_t i = 0; i < pc.n; i++) *squares += j->v[i] * j->v[i];
        n += pc.n;
    }
    return n;
}

/* Over the row's sums. */
static uint64_t sums_squares(job *j, double *squares)
{
    const mk_insn *in = j->in;
    const mk_vec *v = &j->p->vec[in->signal_vec];
    const uint64_t *word = (const uint64_t *)(j->want->bulk + v->offset);
    const uint32_t n = in->router.experts, half = mk_half(v, j->step->seq, in->signal_pub);
    for (uint32_t i = 0; i < n; i++) {
        const double x = (double)mk_sum_value(word[mk_sum_at(n, half, j->row, i)], v->signals);
        *squares += x * x;
    }
    return n;
}

/* Of the publication that the instruction is a part of: its squares are added up once. */
static double published_rms(job *j, uint64_t (*squares_of)(job *, double *))
{
    const mk_insn *in = j->in;
    if (j->scale[j->row].vec == in->signal_vec && j->scale[j->row].pub == in->signal_pub) return j->scale[j->row].rms;
    double squares = 0;
    const uint64_t n = squares_of(j, &squares);
    j->scale[j->row].vec = in->signal_vec;
    j->scale[j->row].pub = in->signal_pub;
    return j->scale[j->row].rms = root(squares, n);
}

/* Over all logits of the row that are numbers. */
static double logits_rms(job *j)
{
    const mk_lm_head *l = &j->in->lm_head;
    double *rms = &j->scale[j->row].logits, squares = 0;
    const float *y = (const float *)(j->want->bulk + j->p->vec[l->logits_vec].offset) + (size_t)j->row * l->vocab;
    uint64_t n = 0;
    if (*rms > 0) return *rms;
    for (uint32_t i = 0; i < l->vocab; i++)
        if (isfinite(y[i])) squares += (double)y[i] * (double)y[i], n++;
    return *rms = root(squares, n);
}

static double bf16_step(double x)
{
    int e;
    if (x == 0) return 0x1p-133;
    frexp(x, &e);
    return ldexp(1, e - 8);
}

/* From one e4m3 value to the next near x, whose group has a value of up to 23 times the row's RMS (512 values have no greater one): the smallest step is 2^-9 of a
 * scale, which is at most 2^-7.8 of that. */
static double fp8_step(double x, double rms)
{
    int e;
    frexp(fmax(fabs(x), rms * 0x1p-8), &e);
    return ldexp(1, e - 4);
}

static void diverged(job *j, const mk_piece *pc, uint32_t i, double want, double got, double rms, double error, double tol)
{
    mk_divergence *d = &j->c->first;
    const mk_insn *in = j->in;
    j->c->failed++;
    if (d->found) return;
    char where[96] = "";
    if (in->signal_vec != MK_NONE && pc->region != STATE && pc->region != KV)
        snprintf(where, sizeof where, ", vector %.16s publication %u", j->p->vec[in->signal_vec].name, in->signal_pub);
    *d = (mk_divergence){.found = 1, .worker = j->worker, .row = j->row, .slice = pc->slice, .element = pc->first + i, .in = *in, .what = pc->what, .want = want,
                         .got = got, .rms = rms, .error = error, .tolerance = tol};
    snprintf(d->text, sizeof d->text, "worker %u #%u %s layer %d%s slice %u, row %u (slot %u, position %u): %s element %u is %.9g, expected %.9g (RMS %.3g): "
             "error %.3e, tolerance %.1e", j->worker, in->seq, mk_opcode_name(in->opcode), in->layer == MK_NONE ? -1 : (int)in->layer, where, pc->slice,
             j->row, j->step->row[j->row].slot, j->step->row[j->row].pos, pc->what, pc->first + i, got, want, rms, error, tol);
}

/* LM_HEAD's statistics against the logits that the same machine wrote: exact but for the order of a sum. */
static void stats_of(const job *j, double *want)
{
    const mk_lm_head *l = &j->in->lm_head;
    const float *y = (const float *)(j->got->bulk + j->p->vec[l->logits_vec].offset) + (size_t)j->row * l->vocab + l->row0;
    uint32_t best = 0;
    want[0] = -(double)INFINITY, want[1] = 0xffffffffu, want[2] = 0;
    if (!(j->step->row[j->row].flags & MK_ROW_LOGITS)) return;
    for (uint32_t i = 1; i < l->n; i++)
        if (y[i] > y[best]) best = i;
    want[0] = (double)y[best];
    want[1] = l->row0 + best;
    for (uint32_t i = 0; i < l->n; i++) want[2] += exp((double)y[i] - (double)y[best]);
}

static void one_piece(void *arg, const mk_piece *pc)
{
    job *j = arg;
    const mk_insn *in = j->in;
    uint32_t n = mk_piece_values(j->p, pc, in);
    if (!room(j, n + 1)) return;
    double rms = pc->kind == MK_PC_PACKETS ? published_rms(j, vector_squares) : pc->kind == MK_PC_SUMS ? published_rms(j, sums_squares) : 0, tol = pc->kind == MK_PC_STATS ? 1e-5 : mk_tolerance(in);
    if (j->lost) return;
    if (tol < j->c->floor) tol = j->c->floor;
    if (j->c->last && (pc->kind == MK_PC_PACKETS || pc->kind == MK_PC_STATS)) {
        uint32_t found;
        memcpy(&found, j->want->exchange + pc->off + 12, 4);
        if (found != mk_epoch(j->epoch0, j->step->seq, in->signal_pub)) return;
    }
    if (j->mark[pc->region])
        for (uint64_t b = pc->off; b < pc->off + pc->bytes; b += 4) j->mark[pc->region][b / 4] = 1;
    mk_piece_read(j->p, pc, j->got, in, j->row, j->w, j->bits);
    if (pc->kind == MK_PC_STATS)
        stats_of(j, j->v);
    else
        mk_piece_read(j->p, pc, j->want, in, j->row, j->v, j->bits);
    if (pc->kind == MK_PC_F32 || pc->kind == MK_PC_BF16 || pc->kind == MK_PC_LATENT || pc->kind == MK_PC_PARTIAL) {
        double squares = 0;
        for (uint32_t i = 0; i < pc->n; i++) squares += j->v[i] * j->v[i];
        rms = in->opcode == MK_OP_LM_HEAD ? logits_rms(j) : in->opcode == MK_OP_GEMV ? published_rms(j, local_squares) : root(squares, pc->n);
    }
    if (pc->kind == MK_PC_PACKETS || pc->kind == MK_PC_STATS) { /* every packet carries the epoch */
        uint32_t epoch = mk_epoch(j->epoch0, j->step->seq, in->signal_pub), found;
        for (uint64_t b = 0; b < pc->bytes; b += 16) {
            memcpy(&found, j->got->exchange + pc->off + b + 12, 4);
            if (found == epoch) continue;
            mk_piece e = *pc;
            e.what = "epoch of a packet:";
            diverged(j, &e, 0, epoch, found, 0, 1, 0);
            return;
        }
    }
    int bf16 = pc->kind == MK_PC_BF16 || pc->kind == MK_PC_LATENT || (pc->kind == MK_PC_PACKETS && j->p->vec[in->signal_vec].dtype == MK_BF16);
    uint32_t op = in->opcode;
    if (tol > j->c->tolerance[op]) j->c->tolerance[op] = tol;
    j->c->values[op] += n;
    for (uint32_t i = 0; i < n; i++) {
        double want = j->v[i], got = j->w[i], scale = rms, d = fabs(got - want);
        if (want == got) continue;
        int exact = pc->kind == MK_PC_CLEARED || (pc->kind == MK_PC_STATS && i == 1) || (pc->kind == MK_PC_SAMPLED && i == 0) || (pc->kind == MK_PC_ROUTES && (i < pc->n || i == 2 * pc->n));
        if ((pc->kind == MK_PC_PARTIAL && i == pc->n) || pc->kind == MK_PC_SAMPLED || pc->kind == MK_PC_ROUTES) scale = 1;
        const double step = pc->kind == MK_PC_LATENT && i < in->mla.latent ? fp8_step(want, rms) : bf16 && i < pc->n ? bf16_step(want) : 0;
        double error = exact ? 1 : fmax(0, d - step) / (scale + fabs(want) + 1e-30), limit = exact ? 0 : tol;
        if (isnan(d) || isinf(d)) error = INFINITY; /* not after fmax, which takes NaN for 0 */
        if (error > j->c->worst[op]) j->c->worst[op] = error;
        if (!(error <= limit)) diverged(j, pc, i, want, got, scale, error, limit);
    }
}

/* Bytes that nobody may write. */
static void others(job *j, const mk_memory *before, uint32_t region)
{
    const uint8_t *a = mk_region_at(region == COUNTER ? j->want : before, region), *b = mk_region_at(j->got, region), *mark = j->mark[region];
    uint64_t bytes = mk_region_bytes(j->p, region);
    mk_divergence *d = &j->c->first;
    for (uint64_t at = 0; at < bytes; at += 4096) {
        uint64_t n = bytes - at < 4096 ? bytes - at : 4096;
        if (!memcmp(a + at, b + at, n)) continue;
        for (uint64_t i = at; i < at + n; i++) {
            if (a[i] == b[i] || mark[i / 4]) continue;
            j->c->failed++;
            if (d->found) return;
            uint32_t x, y;
            memcpy(&x, a + (i & ~3ull), 4), memcpy(&y, b + (i & ~3ull), 4);
            *d = (mk_divergence){.found = 1, .in.opcode = 0xff, .what = mk_region_name(region), .want = x, .got = y, .error = 1};
            if (region == COUNTER)
                snprintf(d->text, sizeof d->text, "counter %llu is %u, expected %u", (unsigned long long)i / 4, y, x);
            else
                snprintf(d->text, sizeof d->text, "%s, byte %llu of %llu: %08x where no instruction may write (before: %08x)", mk_region_name(region),
                         (unsigned long long)i, (unsigned long long)bytes, y, x);
            return;
        }
    }
}

int mk_compare(const mk_program *p, const uint32_t *list, uint32_t n, const mk_step *step, uint32_t epoch0, const mk_memory *before, const mk_memory *want,
               const mk_memory *got, uint32_t regions, mk_comparison *c, mk_err *err)
{
    job j = {.p = p, .step = step, .want = want, .got = got, .c = c, .epoch0 = epoch0, .list = list, .n = list ? n : p->info.n_insn};
    for (uint32_t r = 0; r < MK_MAX_ROWS; r++) j.scale[r].vec = MK_NONE;
    for (uint32_t i = 0; before && i < MK_REGIONS; i++)
        if (regions >> i & 1 && !(j.mark[i] = calloc(mk_region_bytes(p, i) / 4 + 1, 1))) j.lost = 1;
    for (uint32_t k = 0; k < j.n && !j.lost; k++) {
        uint32_t x = list ? list[k] : k;
        j.in = &p->insn[x];
        j.worker = worker_of(p, x);
        for (j.row = 0; j.row < step->nrows; j.row++) mk_pieces(p, want, step, j.in, j.worker, j.row, one_piece, &j);
    }
    for (uint32_t i = 0; before && i < MK_REGIONS && !j.lost; i++)
        if (regions >> i & 1) others(&j, before, i);
    for (uint32_t i = 0; i < MK_REGIONS; i++) free(j.mark[i]);
    free(j.v), free(j.w), free(j.bits);
    return j.lost ? mk_fail(err, MK_E_CAPACITY, "out of memory") : MK_OK;
}

void mk_state_turn(const mk_program *p, mk_memory *m, int to_kernel)
{
    float tmp[256 * 256];
    for (uint32_t k = 0; k < p->info.n_insn; k++) {
        const mk_delta *d = &p->insn[k].delta;
        if (p->insn[k].opcode != MK_OP_DELTA_STEP || d->dk > 256 || d->dv > 256) continue;
        uint32_t rows = to_kernel ? d->dk : d->dv, cols = to_kernel ? d->dv : d->dk;
        for (uint32_t s = 0; s < p->info.state_slots; s++) {
            float *x = (float *)(m->state + s * p->info.state_slot_bytes + d->state_off + mk_delta_matrix_at(d));
            for (uint32_t i = 0; i < rows; i++)
                for (uint32_t j = 0; j < cols; j++) tmp[j * rows + i] = x[i * cols + j];
            memcpy(x, tmp, (size_t)rows * cols * sizeof *x);
        }
    }
}

/* ---- the twin, driven by hand --------------------------------------------------------------------------------------- */

static void (*const dispatch[MK_OP_COUNT])(mk_ctx *) = {
#define X(number, NAME, name, text) [MK_OP_##NAME] = mk_##name##_twin,
    MK_OPCODES(X)
#undef X
};

int mk_play_twin(const mk_program *p, mk_memory *m, const mk_step *step, uint32_t epoch0, mk_err *err)
{
    uint32_t W = p->info.workers, left = p->queue[W] - p->queue[0];
    size_t floats = (size_t)64 * 1024 + (size_t)MK_MAX_ROWS * 4 * (p->info.hidden + 65536);
    uint32_t *pc = malloc(W * sizeof *pc);
    mk_ctx c = {.prog = p, .mem = m, .step = step, .epoch0 = epoch0, .scratch = malloc(floats * sizeof(float))};
    int rc = pc && c.scratch ? MK_OK : mk_fail(err, MK_E_CAPACITY, "out of memory");
    if (!rc) memset(c.scratch, 0xff, floats * sizeof(float));
    for (uint32_t w = 0; w < W && !rc; w++) pc[w] = p->queue[w];
    while (left && !rc) {
        int progress = 0;
        for (c.worker = 0; c.worker < W; c.worker++)
            while (pc[c.worker] < p->queue[c.worker + 1]) {
                int k = 0;
                c.in = &p->insn[pc[c.worker]];
                while (k < c.in->nwait && mk_wait_ready(&c, k, NULL)) k++;
                if (k < c.in->nwait) break;
                dispatch[c.in->opcode](&c);
                pc[c.worker]++, left--;
                progress = 1;
            }
        if (progress) continue;
        for (c.worker = 0; c.worker < W && pc[c.worker] == p->queue[c.worker + 1]; c.worker++) {}
        c.in = &p->insn[pc[c.worker]];
        rc = mk_fail(err, MK_E_BUG, "twin: worker %u waits for ever at #%u %s", c.worker, c.in->seq, mk_opcode_name(c.in->opcode));
    }
    free(pc);
    free(c.scratch);
    return rc;
}
