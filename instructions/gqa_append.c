/* GQA_APPEND: key and value of one KV head of every row into the paged cache. One instruction handles all rows of its KV head.
 *   norm = 1: k <- k * rsqrt(mean(k^2) + eps) * gamma;  then the first `rope` values rotated, half-split (instructions/rotary.h)
 *   wait[0]  values [k_off + head * dim, + dim) and [v_off + head * dim, + dim)
 *   signal   BULK counter, one increment once all rows are written
 *   params   f32 gamma[dim] when norm, then inv_freq[rope/2]
 *   cache    page layout: mk_gqa in isa.h; bf16 (f32 in an act=f32 program)
 * Source of the mathematics: models.md 3.5. */
#include "instructions/op.h"
#include "instructions/rotary.h"
#include "instructions/vec8.h"

#include <string.h>

static void store(const mk_ctx *c, uint8_t *page, uint64_t at, const float *x, uint32_t n)
{
    if (mk_act_f32(c)) {
        memcpy((float *)page + at, x, n * sizeof *x);
        return;
    }
    uint16_t *dst = (uint16_t *)page + at;
    for (uint32_t i = 0; i < n; i++) dst[i] = mk_f32_to_bf16(x[i]);
}

void mk_gqa_append_twin(mk_ctx *c)
{
    const mk_gqa *g = &c->in->gqa;
    uint32_t dim = g->dim;
    const float *gamma = c->mem->param + g->param_off, *inv_freq = gamma + (g->norm ? dim : 0);
    float *k = c->scratch, *v = k + dim;
    for (uint32_t r = 0; r < c->step->nrows; r++) {
        const mk_row *row = &c->step->row[r];
        mk_read(c, 0, r, g->k_off + g->head * dim, dim, k);
        mk_read(c, 0, r, g->v_off + g->head * dim, dim, v);
        if (g->norm) mk_head_norm(k, gamma, dim, g->eps);
        mk_rotate_half(k, inv_freq, g->rope, row->pos);
        uint8_t *page = mk_kv_row(c, g->kv_off, row->slot, row->pos, 0);
        store(c, page, mk_gqa_at(dim, g->head, 0, row->pos % MK_PAGE), k, dim);
        store(c, page, mk_gqa_at(dim, g->head, 1, row->pos % MK_PAGE), v, dim);
    }
    mk_signal_bulk(c, c->in->signal_vec);
}
