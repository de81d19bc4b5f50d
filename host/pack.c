#include "host/pack.h"

#include "host/quant.h"

#include <stdlib.h>
#include <string.h>

/* Grows a scratch buffer. */
static void *scratch(void **p, size_t *have, size_t want)
{
    if (*have < want) {
        free(*p);
        *p = malloc(want);
        *have = *p ? want : 0;
    }
    return *p;
}

struct buffers {
    void *rows;
    size_t rows_bytes;
    void *scales;
    size_t scales_bytes;
};

/* One segment (instructions/isa.h, mk_wtype) at dst. */
static int pack_segment(const mk_pack_item *it, uint32_t expert, const mk_checkpoint *ck, uint8_t *dst, struct buffers *b, mk_err *err)
{
    const mk_mat *first = it->mat[0];
    uint32_t k = first->k, esize = it->wtype == MK_W_FP8 ? 1 : 2, total = it->rows * it->halves;
    uint32_t per = mk_kblock_values(it->wtype), nkb = (k + per - 1) / per, nsb = mk_scale_blocks(k, first->scale_k);
    uint32_t used = it->wtype == MK_W_FP8 ? mk_segments(it->phase, it->rows, first->scale_k) : 0;
    uint8_t *rows = scratch(&b->rows, &b->rows_bytes, (size_t)it->rows * k * esize);
    float *scales = scratch(&b->scales, &b->scales_bytes, ((size_t)nsb * used + 1) * sizeof *scales);
    if (!rows || !scales) return mk_fail(err, MK_E_CAPACITY, "packing %s: out of memory", first->tensor);
    float *out_scales = (float *)dst;
    uint8_t *out = dst + mk_segment_scale_bytes(it->wtype, k, it->nseg * it->halves, first->scale_k);
    for (uint32_t h = 0; h < it->halves; h++) {
        if (it->mat[h]->wtype != it->wtype) return mk_fail(err, MK_E_BUG, "packing %s: weights of type %u, expected %u", it->mat[h]->tensor, it->mat[h]->wtype, it->wtype);
        int rc = mk_mat_fetch(ck, it->mat[h], expert, it->row0, it->rows, rows, scales, err);
        if (rc) return rc;
        if (it->wtype == MK_W_FP8)
            for (uint32_t s = 0; s < nsb; s++)
                for (uint32_t g = 0; g < used; g++) out_scales[(s * it->halves + h) * it->nseg + g] = scales[s * used + g];
        for (uint32_t kb = 0; kb < nkb; kb++) {
            uint32_t n = k - kb * per < per ? k - kb * per : per;
            for (uint32_t q = 0; q * MK_QUARTER_BYTES < n * esize; q++) {
                uint32_t at = q * MK_QUARTER_BYTES, some = n * esize - at < MK_QUARTER_BYTES ? n * esize - at : MK_QUARTER_BYTES;
                const uint8_t *from = rows + (size_t)kb * per * esize + at;
                uint8_t *to = out + mk_quarter_at(total, kb, q, h * it->rows);
                for (uint32_t i = 0; i < it->rows; i++) memcpy(to + (size_t)i * MK_QUARTER_BYTES, from + (size_t)i * k * esize, some);
            }
        }
    }
    return MK_OK;
}

static int pack_item(const mk_plan *plan, const mk_pack_item *it, const mk_checkpoint *ck, mk_memory *mem, struct buffers *b, mk_err *err)
{
    switch (it->kind) {
    case MK_PACK_TAPE:
        return pack_segment(it, 0, ck, mem->tape + plan->prog->tape_base[it->worker] + it->dst, b, err);
    case MK_PACK_EXPERT:
        for (uint32_t e = 0; e < it->experts; e++) {
            int rc = pack_segment(it, e, ck, mem->expert + it->dst + e * it->expert_stride, b, err);
            if (rc) return rc;
        }
        return MK_OK;
    case MK_PACK_PARAM:
    case MK_PACK_VALUES: return MK_OK; /* mk_pack_params */
    case MK_PACK_EMBED: {
        mk_mat table = *it->mat[0];
        table.wtype = MK_W_BF16;
        for (uint32_t r = 0; r < it->rows; r += 1024) { /* bounded pieces: a table may be a gigabyte */
            uint32_t n = it->rows - r < 1024 ? it->rows - r : 1024;
            int rc = mk_mat_fetch(ck, &table, 0, r, n, mem->embed + (uint64_t)r * table.k * 2, NULL, err);
            if (rc) return rc;
        }
        return MK_OK;
    }
    }
    return mk_fail(err, MK_E_BUG, "pack: unknown item %d", it->kind);
}

int mk_pack(const mk_plan *plan, const mk_checkpoint *ck, mk_memory *mem, mk_err *err)
{
    struct buffers b = {0};
    int rc = mk_pack_params(plan, ck, mem->param, err);
    for (size_t i = 0; i < plan->n_item && !rc; i++) rc = pack_item(plan, &plan->item[i], ck, mem, &b, err);
    free(b.rows);
    free(b.scales);
    return rc;
}

/* ---- parameters ----------------------------------------------------------------------------------------------------- */

/* A layer's instructions take turns with a few tensors, a slice of each: those last fetched are kept. */
#define KEPT 8

int mk_pack_params(const mk_plan *plan, const mk_checkpoint *ck, float *param, mk_err *err)
{
    struct {
        const mk_par *par;
        void *values;
        size_t bytes;
    } kept[KEPT] = {0}, *k;
    uint32_t turn = 0;
    int rc = MK_OK;
    for (size_t i = 0; i < plan->n_item && !rc; i++) {
        const mk_pack_item *it = &plan->item[i];
        if (it->kind == MK_PACK_VALUES) memcpy(param + it->dst, it->values, it->n * sizeof(float));
        if (it->kind != MK_PACK_PARAM) continue;
        for (k = kept; k < kept + KEPT && k->par != it->par; k++) {}
        if (k == kept + KEPT) {
            k = &kept[turn++ % KEPT];
            k->par = NULL;
            if (!scratch(&k->values, &k->bytes, it->par->n * sizeof(float)))
                rc = mk_fail(err, MK_E_CAPACITY, "packing %s: out of memory", it->par->tensor);
            else if (!(rc = mk_par_fetch(ck, it->par, k->values, err)))
                k->par = it->par;
        }
        if (!rc) memcpy(param + it->dst, (float *)k->values + it->src, it->n * sizeof(float));
    }
    for (k = kept; k < kept + KEPT; k++) free(k->values);
    return rc;
}

/* ---- tensor by tensor ------------------------------------------------------------------------------------------------ */

typedef struct entry { /* a segment's half and its matrix */
    const mk_mat *mat;
    const mk_pack_item *it;
    mk_pack_seg seg;
} entry;

/* Matrices lie in the model as in the checkpoint: layer after layer. */
static int by_matrix(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    if (x->mat != y->mat) return x->mat < y->mat ? -1 : 1;
    if (x->seg.row0 != y->seg.row0) return x->seg.row0 < y->seg.row0 ? -1 : 1;
    return (x->seg.item > y->seg.item) - (x->seg.item < y->seg.item);
}

int mk_pack_list_make(const mk_plan *plan, mk_pack_list *l, mk_err *err)
{
    size_t n = 0;
    *l = (mk_pack_list){0};
    entry *e = malloc((2 * plan->n_item + 1) * sizeof *e);
    for (size_t i = 0; e && i < plan->n_item; i++) {
        const mk_pack_item *it = &plan->item[i];
        if (it->kind == MK_PACK_PARAM || it->kind == MK_PACK_VALUES) continue;
        uint64_t base = it->kind == MK_PACK_TAPE ? plan->prog->tape_base[it->worker] : 0;
        for (uint8_t h = 0; h < it->halves; h++)
            e[n++] = (entry){it->mat[h], it,
                             {.dst = base + it->dst, .row0 = it->row0, .rows = it->rows, .phase = (uint16_t)it->phase, .nseg = (uint16_t)it->nseg,
                              .half = h, .halves = it->halves, .table = it->kind == MK_PACK_EMBED, .item = (uint32_t)i}};
    }
    if (e) qsort(e, n, sizeof *e, by_matrix);
    l->seg = e ? malloc((n + 1) * sizeof *l->seg) : NULL;
    l->matrix = l->seg ? malloc((n + 1) * sizeof *l->matrix) : NULL;
    for (size_t i = 0; l->matrix && i < n; i++) {
        const mk_pack_item *it = e[i].it;
        if (!i || e[i].mat != e[i - 1].mat)
            l->matrix[l->n_matrix++] = (mk_pack_matrix){.mat = e[i].mat, .kind = it->kind, .wtype = it->wtype, .first = (uint32_t)i,
                                                        .experts = it->kind == MK_PACK_EXPERT ? it->experts : 1, .expert_stride = it->expert_stride};
        l->matrix[l->n_matrix - 1].n++;
        l->seg[l->n_seg++] = e[i].seg;
    }
    free(e);
    return l->matrix ? MK_OK : mk_fail(err, MK_E_CAPACITY, "packing: out of memory");
}

void mk_pack_list_free(mk_pack_list *l)
{
    free(l->seg);
    free(l->matrix);
    *l = (mk_pack_list){0};
}

/* The pieces of one tensor. */
static int tensor_units(const mk_pack_list *l, const mk_pack_matrix *m, uint32_t expert, const mk_checkpoint *ck, uint64_t limit, mk_pack_unit_fn f, void *arg,
                        mk_err *err)
{
    const mk_mat *mat = m->mat;
    const mk_tensor *t, *s;
    int rc = mk_mat_source(ck, mat, expert, &t, &s, err);
    if (rc) return rc;
    uint64_t size = mk_dtype_bytes(t->dtype), cols = t->shape[t->ndim - 1], row = cols * size, base = 0;
    mk_pack_unit u = {.matrix = m, .expert = expert, .dst = expert * m->expert_stride};
    mk_pack_piece *p = &u.piece;
    p->rows = mk_mat_rows(mat, cols);
    p->n = mat->n;
    p->dtype = (uint8_t)t->dtype;
    p->wtype = m->wtype;
    p->exact = mat->exact;
    if (s) {
        p->scales = s->data;
        p->scale_dtype = (uint8_t)s->dtype;
        p->scale_cols = (uint32_t)s->shape[1];
        u.scale_bytes = s->bytes;
    }
    if (mat->source == MK_SRC_STACKED) base = ((uint64_t)expert * t->shape[1] + mat->head_off) * row;
    if (mat->source == MK_SRC_STACKED || mat->source == MK_SRC_FOLDED) p->rows.source = MK_SRC_PLAIN;
    int whole = p->rows.source != MK_SRC_PLAIN;
    uint64_t step = limit / row / MK_SCALE_ROWS * MK_SCALE_ROWS;
    if (step < MK_SCALE_ROWS) step = MK_SCALE_ROWS;
    if (whole || step > mat->n) step = mat->n;
    uint32_t first = m->first, end = m->first + m->n;
    for (uint64_t p0 = 0; p0 < mat->n && !rc; p0 += step) {
        p->p0 = (uint32_t)p0;
        p->p1 = (uint32_t)(p0 + step < mat->n ? p0 + step : mat->n);
        p->data = (const unsigned char *)t->data + base + (whole ? 0 : p0 * row);
        u.data_bytes = whole ? t->bytes : (p->p1 - p0) * row;
        u.blocks = mk_pack_quantises(p) ? mk_segments(0, p->p1 - p->p0, mat->scale_k) * mk_pack_column_blocks(p) : 0;
        while (first < end && l->seg[first].row0 + l->seg[first].rows <= p0) first++;
        u.first = first;
        for (u.n = 0; first + u.n < end && l->seg[first + u.n].row0 < p->p1;) u.n++;
        if (u.n) rc = f(arg, &u, err);
    }
    return rc;
}

int mk_pack_units(const mk_pack_list *l, const mk_checkpoint *ck, uint64_t limit, mk_pack_unit_fn f, void *arg, mk_err *err)
{
    int rc = MK_OK;
    for (uint32_t i = 0; i < l->n_matrix && !rc; i++)
        for (uint32_t e = 0; e < l->matrix[i].experts && !rc; e++) rc = tensor_units(l, &l->matrix[i], e, ck, limit, f, arg, err);
    return rc;
}
