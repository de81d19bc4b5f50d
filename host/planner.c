#include "host/planner_internal.h"

#include "instructions/validate.h" /* MK_STAGING_BYTES */

#include <stdlib.h>
#include <string.h>
#include <stdio.h>

void mk_fail_memory(mk_builder *b)
{
    if (!b->failed) mk_fail(b->err, MK_E_CAPACITY, "planner: out of memory");
    b->failed = 1;
}

/* Grows a counted array to hold one more element; 0 on failure. */
static int grow(mk_builder *b, void **array, uint32_t n, uint32_t *cap, size_t size)
{
    if (n < *cap) return 1;
    uint32_t want = *cap ? *cap * 2 : 64;
    void *p = realloc(*array, want * size);
    if (!p) {
        mk_fail_memory(b);
        return 0;
    }
    *array = p;
    *cap = want;
    return 1;
}

/* ---- vectors -------------------------------------------------------------------------------------------------------- */

static mk_vec *new_vec(mk_builder *b, const char *name, uint32_t *id)
{
    static mk_vec nowhere;
    *id = 0;
    if (!grow(b, (void **)&b->vec, b->n_vec, &b->cap_vec, sizeof *b->vec)) return &nowhere;
    *id = b->n_vec++;
    mk_vec *v = &b->vec[*id];
    memset(v, 0, sizeof *v);
    snprintf(v->name, sizeof v->name, "%s", name);
    return v;
}

static void push_start(mk_builder *b, uint32_t value)
{
    if (grow(b, (void **)&b->start, b->n_start, &b->cap_start, sizeof *b->start)) b->start[b->n_start++] = value;
}

uint32_t mk_vec_packet(mk_builder *b, const char *name, uint32_t dtype, uint32_t trailer, uint32_t flags, const uint32_t *starts,
                       uint32_t nslice)
{
    uint32_t id, longest = 0;
    mk_vec *v = new_vec(b, name, &id);
    v->scope = MK_PACKET;
    v->dtype = (uint8_t)dtype;
    v->trailer = (uint8_t)trailer;
    v->flags = (uint8_t)flags;
    v->nslice = nslice;
    v->width = starts[nslice];
    v->start_index = b->n_start;
    for (uint32_t s = 0; s <= nslice; s++) {
        push_start(b, starts[s]);
        if (s && starts[s] - starts[s - 1] > longest) longest = starts[s] - starts[s - 1];
    }
    v->slice_packets = (uint32_t)mk_slice_packets(v, longest);
    v->offset = b->exchange;
    b->exchange += (uint64_t)2 * MK_MAX_ROWS * nslice * v->slice_packets * 16;
    return id;
}

uint32_t mk_vec_local(mk_builder *b, const char *name, uint32_t bytes)
{
    uint32_t id;
    mk_vec *v = new_vec(b, name, &id);
    v->scope = MK_LOCAL;
    v->width = (bytes + 15) & ~15u;
    v->offset = b->local;
    b->local += v->width;
    return id;
}

uint32_t mk_vec_bulk(mk_builder *b, const char *name, uint64_t bytes, uint32_t signals)
{
    uint32_t id;
    mk_vec *v = new_vec(b, name, &id);
    if (bytes > 0xffffff00u) {
        mk_fail(b->err, MK_E_CAPACITY, "planner: vector %s needs %llu bytes, the limit is 4 GiB", name, (unsigned long long)bytes);
        b->failed = 1;
        bytes = 0;
    }
    v->scope = MK_BULK;
    v->width = (uint32_t)((bytes + 127) & ~127u);
    v->signals = signals;
    v->counter = b->n_counter++;
    v->offset = b->bulk;
    b->bulk += v->width;
    return id;
}

uint32_t mk_pub(mk_builder *b, uint32_t vec)
{
    return b->vec ? b->vec[vec].pubs++ : 0; /* none: memory ran out */
}

/* ---- splitting ------------------------------------------------------------------------------------------------------ */

double mk_row_cost(const mk_part *p)
{
    const mk_mat *m = p->mat;
    double k = m->k, bytes = m->wtype == MK_W_FP8 ? k + k / mk_scale_columns(m->k, m->scale_k) * 4 / mk_scale_rows(m->scale_k) : 2 * k;
    return p->up ? 2 * bytes : bytes;
}

static double group_cost(const mk_part *parts, uint32_t n)
{
    double c = 0;
    for (uint32_t i = 0; i < n; i++) c += mk_row_cost(&parts[i]) * parts[i].rows;
    return c;
}

/* Row of the concatenated parts at which `cost` is reached, to the nearest row. */
static uint32_t row_at(const mk_part *parts, uint32_t n, double cost, double *reached)
{
    uint32_t row = 0;
    double at = 0;
    for (uint32_t i = 0; i < n; i++) {
        double c = mk_row_cost(&parts[i]), all = c * parts[i].rows;
        if (at + all <= cost + c * 1e-6) {
            at += all;
            row += parts[i].rows;
            continue;
        }
        double rows = (cost - at) / c;
        uint32_t whole = rows <= 0 ? 0 : (uint32_t)(rows + 1e-6);
        if (whole > parts[i].rows) whole = parts[i].rows;
        *reached = at + whole * c;
        return row + whole;
    }
    *reached = at;
    return row;
}

static uint32_t piece_limit(const mk_part *p)
{
    return p->up ? MK_SEGMENT_ROWS / 2 : MK_SEGMENT_ROWS;
}

/* Whether slices of n values can be dealt to those who read the part's vector. */
static int readable(const mk_part *p, uint32_t n)
{
    mk_deal d;
    return mk_slices_deal(p->read_dtype, 0, n, 0, p->read_k, 0, &d) && (!p->read_every || mk_slices_deal(p->read_dtype, 0, n, p->read_every % n, p->read_k, 0, &d));
}

uint32_t mk_even_rows(const mk_part *p, uint32_t workers)
{
    uint32_t limit = piece_limit(p), least = (p->rows + workers - 1) / workers;
    for (uint32_t r = least; p->read_k && r <= p->rows && r <= 2 * least + MK_SEGMENT_ROWS; r++) {
        uint32_t pieces = (r + limit - 1) / limit, n = r / pieces, rest = p->rows % r; /* mk_each_piece: the last worker's must be pieces of n, too */
        if (r % pieces == 0 && (rest <= n || rest == n * ((rest + limit - 1) / limit)) && readable(p, n)) return r;
    }
    return 0;
}

/* What the busiest worker may read more: 0.9 us of an H200's reading, or little of the phase. Looking each packet of a vector up costs every worker about as much. */
#define EVEN_BYTES 30e3
#define EVEN_PART  0.06
int mk_even_pays(double even, double best)
{
    return even <= best + EVEN_BYTES || even <= best * (1 + EVEN_PART);
}
const char mk_why_h[] = "rows of h are whole, its slices alike: ceil(hidden / workers) or a little more over the mean";
const char mk_why_even[] = "slices are alike, so that who gathers their packets knows where values belong";

/* Rows a worker of a group that is cut into slices that can be dealt; 0: it is not. */
static uint32_t group_even(const mk_part *parts, uint32_t n, uint32_t workers, int even)
{
    return even && n == 1 ? mk_even_rows(parts, workers) : 0;
}

/* Every worker has rows of all groups: evenly cut, whatever tensor a row belongs to. */
static void split_rows(uint32_t workers, const mk_part *const *parts, const uint32_t *n_parts, uint32_t groups, int even, uint32_t *cut)
{
    double total = 0;
    for (uint32_t g = 0; g < groups; g++) total += group_cost(parts[g], n_parts[g]);
    for (uint32_t w = 0; w <= workers; w++) {
        double used = 0;
        for (uint32_t g = 0; g < groups; g++) {
            uint32_t *c = cut + g * (workers + 1), rows = 0, alike = group_even(parts[g], n_parts[g], workers, even);
            for (uint32_t i = 0; i < n_parts[g]; i++) rows += parts[g][i].rows;
            double reached = 0, own = group_cost(parts[g], n_parts[g]);
            /* earlier groups evenly among themselves; the last one evens out the phase */
            double want = g + 1 < groups ? own * w / workers : total * w / workers - used;
            if (alike) {
                c[w] = w * alike < rows ? w * alike : rows;
                reached = c[w] * mk_row_cost(parts[g]);
            } else {
                c[w] = w == workers ? rows : row_at(parts[g], n_parts[g], want, &reached);
            }
            if (w && c[w] < c[w - 1]) c[w] = c[w - 1];
            if (w < workers) used += reached;
        }
    }
}

/* Rows of the busiest of a part's own workers. even: of the part's slices, if they are to be dealt. */
static uint32_t share(const mk_part *p, uint32_t workers, int even)
{
    uint32_t alike = even ? mk_even_rows(p, workers) : 0;
    return alike ? alike : (p->rows + workers - 1) / workers;
}

/* Gives `left` workers, one after the other, to the part whose busiest worker has most to do; slices that are to be dealt get shorter with several workers more, or
 * not at all. Returns how many are left. */
static uint32_t give_workers(const mk_part *const *list, const uint8_t *even, uint32_t n, uint32_t left, uint32_t *own, uint8_t *done)
{
    while (left) {
        double most = -1;
        uint32_t at = n, rows = 0, more = 1;
        for (uint32_t p = 0; p < n; p++) {
            uint32_t r = share(list[p], own[p], even[p]);
            if (!done[p] && r * mk_row_cost(list[p]) > most) most = r * mk_row_cost(list[p]), at = p, rows = r;
        }
        if (at == n) break;
        while (even[at] && more <= left && share(list[at], own[at] + more, 1) >= rows) more++;
        done[at] = more > left;
        if (done[at]) continue;
        own[at] += more;
        left -= more;
    }
    return left;
}

/* Every worker has rows of one part. own: workers of each part, all groups' in a row; more workers than parts. list, mark: scratch, as many, twice as many. */
static void split_workers(uint32_t workers, const mk_part *const *parts, const uint32_t *n_parts, uint32_t groups, int alike, uint32_t *own, const mk_part **list,
                          uint8_t *mark, uint32_t *cut)
{
    uint32_t n = 0, left;
    double most = 0;
    for (uint32_t g = 0; g < groups; g++)
        for (uint32_t i = 0; i < n_parts[g]; i++) own[n] = 1, list[n++] = &parts[g][i];
    uint8_t *even = mark, *done = mark + n;
    memset(done, 0, n);
    for (uint32_t g = 0, p = 0; g < groups; p += n_parts[g++])
        for (uint32_t i = 0; i < n_parts[g]; i++) even[p + i] = alike && n_parts[g] == 1 && list[p]->read_k;
    left = give_workers(list, even, n, workers - n, own, done);
    /* What does not shorten the longest share is left to parts of any slices: the router's logits, of which everybody waits for the last, come earlier. */
    for (uint32_t p = 0; p < n; p++)
        if (share(list[p], own[p], even[p]) * mk_row_cost(list[p]) > most) most = share(list[p], own[p], even[p]) * mk_row_cost(list[p]);
    for (uint32_t p = 0; p < n; p++)
        for (done[p] = even[p]; even[p] && own[p] > 1 && share(list[p], own[p] - 1, 1) * mk_row_cost(list[p]) <= 1.01 * most; own[p]--) left++;
    give_workers(list, even, n, left, own, done);
    uint32_t w0 = 0, p = 0;
    for (uint32_t g = 0; g < groups; g++) {
        uint32_t *c = cut + g * (workers + 1), row0 = 0;
        for (uint32_t w = 0; w <= w0; w++) c[w] = 0;
        for (uint32_t i = 0; i < n_parts[g]; i++, p++) {
            uint32_t rows = parts[g][i].rows, each = even[p] ? mk_even_rows(list[p], own[p]) : 0;
            for (uint32_t k = 1; k <= own[p]; k++) c[w0 + k] = row0 + (!each ? mk_start(k, rows, own[p]) : k * each < rows ? k * each : rows);
            w0 += own[p];
            row0 += rows;
        }
        for (uint32_t w = w0 + 1; w <= workers; w++) c[w] = row0;
    }
}

/* What the busiest worker of a split has to do, in bytes. An instruction costs about 2.5 us beside its weights (a measurement: profiles/NOTES.md), in which
 * a worker of an H200 could have read 90 KB. */
#define INSN_BYTES 90e3
static void add_cost(mk_builder *b, uint32_t w, const mk_part *part, uint32_t first, uint32_t rows, uint32_t slice, void *arg)
{
    double *load = arg;
    (void)b, (void)first, (void)slice;
    load[w] += rows * mk_row_cost(part) + INSN_BYTES;
}
/* load: [workers], scratch. */
static double busiest_worker(mk_builder *b, const mk_part *const *parts, const uint32_t *n_parts, uint32_t groups, const uint32_t *cut, double *load)
{
    uint32_t workers = b->cfg->workers;
    double most = 0;
    memset(load, 0, workers * sizeof *load);
    for (uint32_t g = 0; g < groups; g++) mk_each_piece(b, parts[g], n_parts[g], cut + g * (workers + 1), add_cost, load);
    for (uint32_t w = 0; w < workers; w++)
        if (load[w] > most) most = load[w];
    return most;
}

/* Where mk_split works. */
typedef struct splitting {
    uint32_t *own, *whole, *even; /* cuts: as `cut` */
    const mk_part **list;
    uint8_t *mark;
    double *load;
} splitting;

/* All rows evenly or whole workers, whichever is better; returns the busiest worker's bytes. */
static double split_best(mk_builder *b, const mk_part *const *parts, const uint32_t *n_parts, uint32_t groups, int even, splitting *s, uint32_t *cut, int *whole)
{
    uint32_t W = b->cfg->workers, n = 0;
    split_rows(W, parts, n_parts, groups, even, cut);
    double rows = busiest_worker(b, parts, n_parts, groups, cut, s->load);
    for (uint32_t g = 0; g < groups; g++) n += n_parts[g];
    *whole = 0;
    if (n == 1 || n > W) return rows;
    split_workers(W, parts, n_parts, groups, even, s->own, s->list, s->mark, s->whole);
    double workers = busiest_worker(b, parts, n_parts, groups, s->whole, s->load);
    *whole = workers < rows;
    if (*whole) memcpy(cut, s->whole, (size_t)groups * (W + 1) * sizeof *cut);
    return *whole ? workers : rows;
}

void mk_split(mk_builder *b, const mk_part *const *parts, const uint32_t *n_parts, uint32_t groups, uint32_t *cut)
{
    size_t cuts = (size_t)groups * (b->cfg->workers + 1);
    uint32_t n = 0, read = 0;
    for (uint32_t g = 0; g < groups; g++) {
        n += n_parts[g];
        read += n_parts[g] == 1 && parts[g]->read_k;
    }
    splitting s = {malloc(n * sizeof *s.own), malloc(cuts * sizeof *s.whole), malloc(cuts * sizeof *s.even), malloc(n * sizeof *s.list), malloc(2 * n),
                   malloc(b->cfg->workers * sizeof *s.load)};
    memset(cut, 0, cuts * sizeof *cut);
    b->why = NULL;
    if (!s.own || !s.whole || !s.even || !s.list || !s.mark || !s.load) {
        mk_fail_memory(b);
    } else {
        int whole, whole_even;
        double best = split_best(b, parts, n_parts, groups, 0, &s, cut, &whole);
        if (whole) b->why = "each worker has rows of one tensor: a second instruction costs more than an even cut saves";
        if (read && mk_even_pays(split_best(b, parts, n_parts, groups, 1, &s, s.even, &whole_even), best)) {
            memcpy(cut, s.even, cuts * sizeof *cut);
            b->why = mk_why_even;
        }
    }
    free(s.own);
    free(s.whole);
    free(s.even);
    free(s.list);
    free(s.mark);
    free(s.load);
}

uint32_t mk_each_piece(mk_builder *b, const mk_part *parts, uint32_t n_parts, const uint32_t *cut, mk_piece_fn f, void *arg)
{
    uint32_t slice = 0;
    for (uint32_t w = 0; w < b->cfg->workers; w++) {
        uint32_t at = 0;
        for (uint32_t i = 0; i < n_parts; at += parts[i].rows, i++) {
            uint32_t lo = cut[w] > at ? cut[w] : at, hi = cut[w + 1] < at + parts[i].rows ? cut[w + 1] : at + parts[i].rows;
            if (lo >= hi) continue;
            uint32_t limit = piece_limit(&parts[i]), pieces = (hi - lo + limit - 1) / limit;
            for (uint32_t k = 0; k < pieces; k++) {
                uint32_t a = lo + mk_start(k, hi - lo, pieces), e = lo + mk_start(k + 1, hi - lo, pieces);
                f(b, w, &parts[i], a - at, e - a, slice++, arg);
            }
        }
    }
    return slice;
}

struct starts {
    uint32_t *v, n;
};
static void add_start(mk_builder *b, uint32_t w, const mk_part *part, uint32_t first, uint32_t rows, uint32_t slice, void *arg)
{
    struct starts *s = arg;
    (void)b, (void)w, (void)part, (void)first;
    s->v[slice + 1] = s->v[slice] + rows;
    s->n = slice + 1;
}

uint32_t mk_vec_split(mk_builder *b, const char *name, uint32_t dtype, const mk_part *parts, uint32_t n_parts, const uint32_t *cut)
{
    uint32_t rows = 0;
    for (uint32_t i = 0; i < n_parts; i++) rows += parts[i].rows;
    /* pieces: one a worker and part boundary, and one more for every half limit of rows */
    struct starts s = {calloc(b->cfg->workers + n_parts + 2 + rows / (MK_SEGMENT_ROWS / 4), sizeof *s.v), 0};
    if (!s.v) {
        mk_fail_memory(b);
        return 0;
    }
    mk_each_piece(b, parts, n_parts, cut, add_start, &s);
    uint32_t id = mk_vec_packet(b, name, dtype, 0, 0, s.v, s.n);
    free(s.v);
    return id;
}

/* ---- instructions --------------------------------------------------------------------------------------------------- */

mk_insn *mk_emit(mk_builder *b, uint32_t worker, uint32_t op, uint32_t layer)
{
    static mk_insn nowhere;
    mk_queue *q = &b->queue[worker];
    if (!grow(b, (void **)&q->insn, q->n, &q->cap, sizeof *q->insn)) return &nowhere;
    mk_insn *in = &q->insn[q->n];
    memset(in, 0, sizeof *in);
    in->opcode = (uint8_t)op;
    in->layer = (uint16_t)layer;
    in->seq = q->n++;
    in->signal_vec = MK_NONE;
    in->tape_off = q->tape;
    for (int i = 0; i < 3; i++) in->wait[i].vec = MK_NONE;
    return in;
}

static void add_wait(mk_builder *b, mk_insn *in, uint32_t vec, uint32_t pub, uint32_t slice0, uint32_t nslice)
{
    if (in->nwait == 3 || slice0 + nslice > 0xffff || pub > 0xfffe) {
        mk_fail(b->err, MK_E_BUG, "planner: %s layer %u cannot wait for vector %s", mk_opcode_name(in->opcode), in->layer, b->vec[vec].name);
        b->failed = 1;
        return;
    }
    in->wait[in->nwait++] = (mk_wait){(uint16_t)vec, (uint16_t)pub, (uint16_t)slice0, (uint16_t)nslice};
}

void mk_wait_all(mk_builder *b, mk_insn *in, uint32_t vec, uint32_t pub)
{
    add_wait(b, in, vec, pub, 0, b->vec[vec].scope == MK_PACKET ? b->vec[vec].nslice : 0);
}

void mk_wait_values(mk_builder *b, mk_insn *in, uint32_t vec, uint32_t pub, uint32_t first, uint32_t n)
{
    const mk_vec *v = &b->vec[vec];
    const uint32_t *start = b->start + v->start_index;
    uint32_t lo = 0, hi;
    while (start[lo + 1] <= first) lo++;
    for (hi = lo + 1; start[hi] < first + n;) hi++;
    add_wait(b, in, vec, pub, lo, hi - lo);
}

void mk_wait_slice(mk_builder *b, mk_insn *in, uint32_t vec, uint32_t pub, uint32_t slice)
{
    add_wait(b, in, vec, pub, slice, 1);
}

void mk_signal(mk_insn *in, uint32_t vec, uint32_t pub, uint32_t slice)
{
    in->signal_vec = (uint16_t)vec;
    in->signal_pub = (uint16_t)pub;
    in->signal_slice = (uint16_t)slice;
}

void mk_pack_push(mk_builder *b, const mk_pack_item *it)
{
    mk_plan *p = b->plan;
    if ((p->n_item & (p->n_item + 1)) == 0 || p->n_item == 0) { /* sizes 2^n - 1: grow by doubling */
        mk_pack_item *a = realloc(p->item, (2 * p->n_item + 2) * sizeof *a);
        if (!a) {
            mk_fail_memory(b);
            return;
        }
        p->item = a;
    }
    p->item[p->n_item++] = *it;
}

void mk_emit_gemv_piece(mk_builder *b, uint32_t w, const mk_part *part, uint32_t first, uint32_t rows, uint32_t slice, void *arg)
{
    const mk_gemv_arg *a = arg;
    const mk_gemv_spec *s = a->spec;
    const mk_mat *mat = part->mat;
    mk_insn *in = mk_emit(b, w, MK_OP_GEMV, a->layer);
    mk_queue *q = &b->queue[w];
    mk_gemv *g = &in->gemv;
    uint32_t row0 = part->row0 + first, halves = part->up ? 2 : 1, esize = s->flags & MK_GEMV_X_F32 ? 4 : 2;
    g->n = rows;
    g->k = mat->k;
    g->in_off = part->in_off;
    g->wtype = mat->wtype;
    g->prologue = s->prologue;
    g->epilogue = s->epilogue;
    g->flags = s->flags;
    g->row0 = row0;
    g->scale_k = mat->scale_k;
    g->norm_group = s->norm_group;
    g->param_off = s->param_off;
    g->eps = s->eps;
    g->scale = part->scale > 0 ? part->scale : 1.0f;
    if (mat->wtype == MK_W_FP8) {
        g->row0 = mk_mat_scale_row(mat, row0);
        g->phase = (uint16_t)(g->row0 % MK_SCALE_ROWS);
        g->nseg = (uint16_t)mk_segments(g->phase, rows, g->scale_k);
    }
    uint32_t fit = MK_STAGING_BYTES / (MK_MAX_ROWS * esize) & ~127u;
    g->k_chunk = mat->k < fit ? mat->k : fit;
    mk_wait_values(b, in, s->in_vec, s->in_pub, part->in_off, mat->k);
    if (s->epilogue == MK_EPI_ADD || s->epilogue == MK_EPI_GATED) mk_wait_slice(b, in, s->res_vec, s->res_pub, slice);
    if (s->epilogue == MK_EPI_GATED) mk_wait_values(b, in, s->gate_vec, s->gate_pub, 0, 1);
    const mk_vec *out = &b->vec[s->out_vec];
    const uint32_t at = out->start_index + slice;
    if (!b->failed && out->scope == MK_PACKET && (slice >= out->nslice || b->start[at + 1] - b->start[at] != rows)) {
        mk_fail(b->err, MK_E_MODEL, "tensor %s: its layer's rows are cut otherwise than those of layers before, whose weights are of other types; pass --weights fp8 or bf16", mat->tensor);
        b->failed = 1;
    }
    mk_signal(in, s->out_vec, s->out_pub, out->scope == MK_PACKET ? slice : 0);
    in->tape_bytes = (uint32_t)mk_segment_bytes(g->wtype, rows * halves, g->k, (uint32_t)g->nseg * halves, g->scale_k);
    if (q->n > 1) {
        const mk_insn *prev = in - 1;
        if (prev->opcode == MK_OP_GEMV && prev->wait[0].vec == in->wait[0].vec && prev->wait[0].pub == in->wait[0].pub &&
            prev->wait[0].slice0 == in->wait[0].slice0 && prev->wait[0].nslice == in->wait[0].nslice &&
            prev->gemv.in_off == g->in_off && prev->gemv.k == g->k && prev->gemv.prologue == g->prologue &&
            prev->gemv.flags == g->flags && prev->gemv.param_off == g->param_off && g->k_chunk == g->k)
            in->flags |= MK_F_STAGED;
    }
    mk_pack_push(b, &(mk_pack_item){.kind = MK_PACK_TAPE,
                                    .wtype = mat->wtype,
                                    .halves = (uint8_t)halves,
                                    .mat = {mat, part->up},
                                    .worker = w,
                                    .row0 = row0,
                                    .rows = rows,
                                    .phase = g->phase,
                                    .nseg = g->nseg,
                                    .dst = in->tape_off});
    q->tape += in->tape_bytes;
    b->load[w] += (uint64_t)(mk_row_cost(part) * rows);
}

void mk_emit_low_rank(mk_builder *b, uint32_t w, mk_insn *in, uint32_t which, const mk_mat *mat, uint32_t row0, uint32_t rows)
{
    mk_low_rank *l = &in->delta.low[which];
    mk_queue *q = &b->queue[w];
    l->wtype = mat->wtype;
    l->scale_k = mat->scale_k;
    if (mat->wtype == MK_W_FP8) {
        l->phase = (uint16_t)(mk_mat_scale_row(mat, row0) % MK_SCALE_ROWS);
        l->nseg = (uint16_t)mk_segments(l->phase, rows, l->scale_k);
    }
    uint32_t bytes = (uint32_t)mk_delta_segment_bytes(&in->delta, which);
    mk_pack_push(b, &(mk_pack_item){.kind = MK_PACK_TAPE, .wtype = mat->wtype, .halves = 1, .mat = {mat, NULL}, .worker = w, .row0 = row0, .rows = rows,
                                    .phase = l->phase, .nseg = l->nseg, .dst = q->tape});
    in->tape_bytes += bytes;
    q->tape += bytes;
    b->load[w] += bytes;
}

void mk_emit_gemv(mk_builder *b, uint32_t layer, const mk_part *parts, uint32_t n_parts, const uint32_t *cut, const mk_gemv_spec *s)
{
    mk_gemv_arg a = {s, layer};
    mk_each_piece(b, parts, n_parts, cut, mk_emit_gemv_piece, &a);
}

uint32_t mk_param(mk_builder *b, const mk_par *par, uint32_t src, uint32_t n)
{
    uint32_t off = (uint32_t)b->param;
    mk_pack_push(b, &(mk_pack_item){.kind = MK_PACK_PARAM, .par = par, .src = src, .n = n, .dst = off});
    b->param += n;
    return off;
}

void mk_param_align(mk_builder *b, uint32_t floats)
{
    b->param = (b->param + floats - 1) / floats * floats;
}

uint32_t mk_param_values(mk_builder *b, const float *values, uint32_t n)
{
    uint32_t off = (uint32_t)b->param;
    mk_pack_push(b, &(mk_pack_item){.kind = MK_PACK_VALUES, .values = values, .n = n, .dst = off});
    b->param += n;
    return off;
}

/* ---- phases --------------------------------------------------------------------------------------------------------- */

void mk_phase_begin(mk_builder *b)
{
    memset(b->load, 0, b->cfg->workers * sizeof *b->load);
}

void mk_phase_end(mk_builder *b, const char *name, uint32_t layer, const char *reason)
{
    mk_plan *p = b->plan;
    mk_phase *a = realloc(p->phase, (p->n_phase + 1) * sizeof *a);
    if (!a) {
        mk_fail_memory(b);
        return;
    }
    p->phase = a;
    mk_phase *ph = &a[p->n_phase++];
    memset(ph, 0, sizeof *ph);
    snprintf(ph->name, sizeof ph->name, "%s", name);
    ph->layer = layer;
    for (uint32_t w = 0; w < b->cfg->workers; w++) {
        ph->total += b->load[w];
        if (b->load[w] > ph->max) ph->max = b->load[w];
    }
    ph->reason = b->why == mk_why_even || !reason ? b->why : reason;
    b->why = NULL;
}

uint32_t mk_item_slices(uint32_t items, uint32_t width, uint32_t workers)
{
    uint32_t s = 1;
    while (items * s * 10 < workers * 9 && width % (2 * s) == 0 && width / (2 * s) >= 16) s *= 2;
    return s;
}

/* ---- the whole ------------------------------------------------------------------------------------------------------ */

static int assemble(mk_builder *b)
{
    mk_plan *plan = b->plan;
    uint32_t workers = b->cfg->workers;
    mk_program *p = calloc(1, sizeof *p);
    plan->prog = p;
    if (!p) return 0;
    mk_program_info *i = &p->info;
    i->magic = MK_PROGRAM_MAGIC;
    i->version = MK_PROGRAM_VERSION;
    i->flags = b->cfg->act_f32 ? MK_PROG_ACT_F32 : 0;
    i->workers = workers;
    i->layers = b->m->layers;
    i->hidden = b->m->hidden;
    i->vocab = b->m->vocab;
    i->max_context = b->cfg->max_context;
    i->n_vec = b->n_vec;
    i->n_start = b->n_start;
    i->n_counter = b->n_counter;
    p->vec = b->vec;
    p->start = b->start;
    b->vec = NULL;
    b->start = NULL;
    p->queue = calloc(workers + 1, sizeof *p->queue);
    p->tape_base = calloc(workers + 1, sizeof *p->tape_base);
    if (!p->queue || !p->tape_base) return 0;
    for (uint32_t w = 0; w < workers; w++) {
        p->queue[w + 1] = p->queue[w] + b->queue[w].n;
        p->tape_base[w + 1] = p->tape_base[w] + b->queue[w].tape;
        if (b->queue[w].tape > i->tape_bytes_max) i->tape_bytes_max = b->queue[w].tape;
    }
    i->n_insn = p->queue[workers];
    p->insn = malloc((i->n_insn ? i->n_insn : 1) * sizeof *p->insn);
    if (!p->insn) return 0;
    for (uint32_t w = 0; w < workers; w++)
        if (b->queue[w].n) memcpy(p->insn + p->queue[w], b->queue[w].insn, b->queue[w].n * sizeof *p->insn);
    i->tape_bytes = p->tape_base[workers];
    i->expert_bytes = b->expert;
    i->embed_bytes = (uint64_t)b->m->vocab * b->m->hidden * 2;
    i->param_floats = b->param;
    i->exchange_bytes = b->exchange;
    i->bulk_bytes = b->bulk;
    i->local_bytes = b->local;
    i->state_slot_bytes = b->state;
    i->kv_pages = b->cfg->kv_pages;
    i->state_slots = b->cfg->state_slots;
    i->smem_limit = b->cfg->smem_limit;
    return 1;
}

int mk_plan_make(const mk_model *m, const mk_plan_config *cfg, mk_plan **out, mk_err *err)
{
    *out = NULL;
    if (cfg->workers < 1 || cfg->workers > 1024)
        return mk_fail(err, MK_E_USAGE, "workers: expected 1 to 1024, found %u", cfg->workers);
    if (m->kv_cache == MK_CACHE_FP8) {
        if (cfg->act_f32) return mk_fail(err, MK_E_USAGE, "kv-cache: expected bf16 with act f32, found fp8");
        for (uint32_t l = 0; l < m->layers; l++) {
            const mk_layer *y = &m->layer[l];
            if (y->mixer == MK_MIX_GQA)
                return mk_fail(err, MK_E_USAGE, "kv-cache fp8: expected latent attention in all layers with a cache, found grouped queries in layer %u of %s", l, m->arch);
            if (y->mixer == MK_MIX_MLA && y->mla.latent % 16)
                return mk_fail(err, MK_E_USAGE, "kv-cache fp8: expected a latent (kv_lora_rank) of a multiple of 16, found %u in layer %u", y->mla.latent, l);
        }
    }
    mk_plan *plan = calloc(1, sizeof *plan);
    mk_builder b = {.m = m, .cfg = cfg, .plan = plan, .err = err};
    b.queue = calloc(cfg->workers, sizeof *b.queue);
    b.load = calloc(cfg->workers, sizeof *b.load);
    if (!plan || !b.queue || !b.load)
        mk_fail_memory(&b);
    else
        mk_plan_layers(&b);
    if (!b.failed && !assemble(&b)) mk_fail_memory(&b);
    if (!b.failed) {
        mk_program_info *i = &plan->prog->info;
        uint32_t widest = 0, act = mk_act_bytes(&b);
        for (uint32_t l = 0; l < m->layers; l++) {
            const mk_layer *y = &m->layer[l];
            if (y->mixer == MK_MIX_DELTA) continue;
            uint32_t row = y->mixer == MK_MIX_MLA ? mk_latent_row_bytes(y->mla.latent, y->mla.rope, m->kv_cache, act) : 2 * y->gqa.kv_heads * y->gqa.dim * act;
            if (row > widest) widest = row;
            i->kv_layers++;
        }
        i->kv_page_bytes = (uint64_t)widest * MK_PAGE;
    }
    if (b.queue)
        for (uint32_t w = 0; w < cfg->workers; w++) free(b.queue[w].insn);
    free(b.queue);
    free(b.load);
    free(b.vec);
    free(b.start);
    if (b.failed) {
        mk_plan_destroy(&plan);
        return err ? err->code : MK_E_BUG;
    }
    *out = plan;
    return MK_OK;
}

void mk_plan_destroy(mk_plan **pp)
{
    mk_plan *p = *pp;
    if (!p) return;
    mk_program_destroy(&p->prog);
    free(p->item);
    free(p->phase);
    free(p);
    *pp = NULL;
}
