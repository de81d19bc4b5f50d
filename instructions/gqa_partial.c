/* GQA_PARTIAL: attention of the query heads that share a KV head over one split of a row's cache.
 *   q <- norm and rotation as in GQA_APPEND;  s_t = scale * (q . k_t);  max = max s_t;  p_t = exp(s_t - max)
 *   partial = sum p_t v_t | max | sum p_t
 * Splits lie at absolute page positions that the row's own position chooses (mk_split_pages). Work items of row r: i = split * kv_heads +
 * KV head; the items of all rows, one row after the other, go to the parts in turn; rows that share theirs (mk_gqa_together) have them once.
 *   wait[0]  q of head h at q_off + h * q_stride, dim values
 *   wait[1]  GQA_APPEND's counter: the rows of this step are in the cache
 *   signal   BULK: partials (layout: mk_partial_floats in isa.h with latent = dim), one increment after all rows
 *   params   f32 gamma[dim] when norm, then inv_freq[rope/2]
 * A dot product is summed in eight lanes, then pairwise; the accumulation over tokens is sequential, ascending; sum p_t in eight lanes by
 * t - first token of the split. All in f32. Source of the mathematics: models.md 3.5. */
#include "instructions/op.h"
#include "instructions/rotary.h"
#include "instructions/vec8.h"

#include <string.h>

#define TILE 16 /* tokens decoded at a time; divides MK_PAGE */

/* s[t] = scale * (q . k_t); n a multiple of 8. */
MK_CLONES static void scores(const float *restrict q, const float *restrict k, uint32_t tokens, uint32_t n, float scale, float *restrict s)
{
    for (uint32_t t = 0; t < tokens; t++, k += n) {
        mk_f8 a = {0};
        for (uint32_t i = 0; i < n; i += 8) a += mk_load8(q + i) * mk_load8(k + i);
        s[t] = scale * mk_lanes(a);
    }
}

/* acc += p[t] * v_t for t ascending. */
MK_CLONES static void accumulate(float *restrict acc, const float *restrict v, uint32_t tokens, uint32_t n, const float *restrict p)
{
    for (uint32_t i = 0; i < n; i += 8) {
        mk_f8 a = mk_load8(acc + i);
        const float *x = v + i;
        for (uint32_t t = 0; t < tokens; t++, x += n) a += p[t] * mk_load8(x);
        mk_store8(acc + i, a);
    }
}

MK_CLONES static float softmax(float *restrict p, uint32_t tokens, float *sum)
{
    float max = p[0];
    for (uint32_t t = 1; t < tokens; t++) max = p[t] > max ? p[t] : max;
    for (uint32_t t = 0; t < tokens; t++) p[t] = mk_expf(p[t] - max);
    *sum = mk_sum8(p, tokens);
    return max;
}

MK_CLONES static void decode(float *restrict dst, const uint16_t *restrict src, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += 8) mk_store8(dst + i, mk_load8_bf16(src + i));
}

/* Keys (which = 0) or values (1) of tokens [t, t + tokens) of the page that holds them, as f32 rows. */
static const float *cache_tile(const mk_ctx *c, const mk_gqa *g, uint32_t slot, uint32_t head, uint32_t which, uint32_t t, uint32_t tokens,
                               float *tile)
{
    const uint8_t *page = mk_kv_row(c, g->kv_off, slot, t, 0);
    uint64_t at = mk_gqa_at(g->dim, head, which, t % MK_PAGE);
    if (mk_act_f32(c)) return (const float *)page + at;
    decode(tile, (const uint16_t *)page + at, tokens * g->dim);
    return tile;
}

void mk_gqa_partial_twin(mk_ctx *c)
{
    const mk_gqa *g = &c->in->gqa;
    uint32_t dim = g->dim, group = g->heads / g->kv_heads, floats = mk_partial_floats(dim);
    const float *gamma = c->mem->param + g->param_off, *inv_freq = gamma + (g->norm ? dim : 0);
    float *bulk = mk_bulk(c, c->in->signal_vec);
    float *q = c->scratch, *tile = q + (size_t)group * dim, *p = tile + (size_t)TILE * dim;

    for (uint32_t r = 0, base = 0, together = 0; r < c->step->nrows; r++) {
        const mk_row *row = &c->step->row[r];
        if (!together) together = mk_gqa_together(g, row, c->step->nrows - r);
        uint32_t splits = mk_splits(row->pos, g->grain, g->most), per = mk_split_pages(row->pos, g->grain, g->most) * MK_PAGE;
        for (uint32_t kv = 0; kv < g->kv_heads; kv++) {
            uint32_t have_q = 0;
            for (uint32_t s = 0; s < splits; s++) {
                if ((base + s * g->kv_heads + kv) % g->parts != g->part) continue;
                for (uint32_t h = 0; h < group && !have_q; h++) {
                    float *qh = q + (size_t)h * dim;
                    mk_read(c, 0, r, g->q_off + (kv * group + h) * g->q_stride, dim, qh);
                    if (g->norm) mk_head_norm(qh, gamma, dim, g->eps);
                    mk_rotate_half(qh, inv_freq, g->rope, row->pos);
                }
                have_q = 1;
                uint32_t first = s * per, tokens = row->pos + 1 - first < per ? row->pos + 1 - first : per;
                c->bytes += (uint64_t)tokens * dim * 2 * (mk_act_f32(c) ? 4 : 2);
                for (uint32_t t = 0; t < tokens; t += TILE) {
                    uint32_t n = tokens - t < TILE ? tokens - t : TILE;
                    const float *k = cache_tile(c, g, row->slot, kv, 0, first + t, n, tile);
                    for (uint32_t h = 0; h < group; h++) scores(q + (size_t)h * dim, k, n, dim, g->scale, p + (size_t)h * per + t);
                }
                float *dst = bulk + (((size_t)r * MK_MAX_SPLITS + s) * g->heads + kv * group) * floats;
                for (uint32_t h = 0; h < group; h++) {
                    float *d = dst + (size_t)h * floats;
                    memset(d, 0, dim * sizeof *d);
                    d[dim] = softmax(p + (size_t)h * per, tokens, &d[dim + 1]);
                }
                for (uint32_t t = 0; t < tokens; t += TILE) {
                    uint32_t n = tokens - t < TILE ? tokens - t : TILE;
                    const float *v = cache_tile(c, g, row->slot, kv, 1, first + t, n, tile);
                    for (uint32_t h = 0; h < group; h++) accumulate(dst + (size_t)h * floats, v, n, dim, p + (size_t)h * per + t);
                }
            }
        }
        if (--together == 0) base += splits * g->kv_heads;
    }
    mk_signal_bulk(c, c->in->signal_vec);
}
