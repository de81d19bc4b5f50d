/* MLA_PARTIAL: absorbed latent attention of a group of heads over one split of a row's cache.
 *   s_t = scale * (q~ . c_t + q_pe . k_pe_t);  max = max s_t;  p_t = exp(s_t - max);  partial = sum p_t c_t | max | sum p_t
 * Splits lie at absolute page positions that the row's own position chooses (mk_split_pages). Work items of row r: i = split * groups +
 * group, groups = ceil(heads / mk_head_group(pos, heads)); the items of all rows, one row after the other, go to the parts in turn; rows that share theirs (mk_mla_together) have them once.
 *   wait[0]  "qt": q~ of head h at h * latent
 *   wait[1]  "q": q_pe of head h at in_off + h * qk_stride; rotated here when rotary = 1 (instructions/rotary.h)
 *   wait[2]  KV_APPEND's counter: the rows of this step are in the cache
 *   signal   BULK: partials (layout: mk_partial_floats in isa.h), one increment after all rows
 *   params   gamma f32[latent] (KV_APPEND's), then inv_freq f32[rope/2] when rotary != 0
 * A dot product is summed in eight lanes, then pairwise; the accumulation over tokens is sequential, ascending; sum p_t in eight lanes by
 * t - first token of the split. All in f32. Source of the mathematics: models.md 3.3. */
#include "instructions/latent.h"
#include "instructions/op.h"
#include "instructions/rotary.h"
#include "instructions/vec8.h"

#include <string.h>

#define TILE 16 /* tokens decoded at a time: 36 KB of f32 at 512 + 64 */

/* score[h][t] = scale * (q[h] . row[t]) for four heads and two tokens at once; n a multiple of 8. */
MK_CLONES static void scores(const float *restrict q, uint32_t heads, const float *restrict row, uint32_t tokens, uint32_t n, float scale,
                             float *restrict score, size_t stride)
{
    for (uint32_t t = 0; t < tokens; t += 2) {
        const float *x0 = row + (size_t)t * n, *x1 = t + 1 < tokens ? x0 + n : x0;
        for (uint32_t h = 0; h < heads; h += 4) {
            mk_f8 a[4] = {{0}}, b[4] = {{0}};
            const float *qh[4];
            for (uint32_t k = 0; k < 4; k++) qh[k] = q + (size_t)(h + k < heads ? h + k : h) * n;
            for (uint32_t i = 0; i < n; i += 8) {
                mk_f8 u = mk_load8(x0 + i), v = mk_load8(x1 + i);
                for (uint32_t k = 0; k < 4; k++) {
                    mk_f8 w = mk_load8(qh[k] + i);
                    a[k] += w * u;
                    b[k] += w * v;
                }
            }
            for (uint32_t k = 0; k < 4 && h + k < heads; k++) {
                score[(h + k) * stride + t] = scale * mk_lanes(a[k]);
                if (t + 1 < tokens) score[(h + k) * stride + t + 1] = scale * mk_lanes(b[k]);
            }
        }
    }
}

/* acc[h] += p[h][t] * row[t][0..latent) for t ascending, two heads and four lane groups at once. */
MK_CLONES static void accumulate(float *restrict acc, uint32_t heads, const float *restrict row, uint32_t tokens, uint32_t n, uint32_t latent,
                                 const float *restrict p, size_t stride)
{
    for (uint32_t i = 0; i < latent; i += 16)
        for (uint32_t h = 0; h < heads; h += 4) {
            uint32_t m = heads - h < 4 ? heads - h : 4, two = i + 8 < latent ? 8 : 0;
            const float *ph[4];
            float *ah[4];
            mk_f8 a[4], b[4];
            for (uint32_t k = 0; k < 4; k++) {
                ph[k] = p + (h + (k < m ? k : 0)) * stride;
                ah[k] = acc + (size_t)(h + (k < m ? k : 0)) * latent + i;
                a[k] = mk_load8(ah[k]);
                b[k] = mk_load8(ah[k] + two);
            }
            const float *x = row + i;
            for (uint32_t t = 0; t < tokens; t++, x += n) {
                mk_f8 u = mk_load8(x), v = mk_load8(x + two);
                for (uint32_t k = 0; k < 4; k++) {
                    float w = ph[k][t];
                    a[k] += w * u;
                    b[k] += w * v;
                }
            }
            for (uint32_t k = 0; k < m; k++) {
                mk_store8(ah[k], a[k]);
                if (two) mk_store8(ah[k] + 8, b[k]);
            }
        }
}

MK_CLONES static void decode(float *restrict dst, const uint16_t *restrict src, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += 8) mk_store8(dst + i, mk_load8_bf16(src + i));
}

MK_CLONES static void decode_fp8(float *restrict dst, const uint8_t *restrict codes, uint32_t n, float scale)
{
    for (uint32_t i = 0; i < n; i++) dst[i] = mk_fp8_finite(codes[i]) * scale;
}

/* p <- exp(s - max); returns the maximum, *sum the sum. */
MK_CLONES static float softmax(float *restrict p, uint32_t tokens, float *sum)
{
    float max = p[0];
    for (uint32_t t = 1; t < tokens; t++) max = p[t] > max ? p[t] : max;
    for (uint32_t t = 0; t < tokens; t++) p[t] = mk_expf(p[t] - max);
    *sum = mk_sum8(p, tokens);
    return max;
}

/* Tokens [t, t + tokens) of the page that holds them, as f32 rows. */
static const float *cache_tile(const mk_ctx *c, const mk_mla *m, uint32_t slot, uint32_t t, uint32_t tokens, float *tile)
{
    uint32_t n = m->latent + m->rope;
    if (mk_act_f32(c)) return (const float *)mk_kv_row(c, m->kv_off, slot, t, n * 4);
    if (m->cache == MK_CACHE_FP8) {
        for (uint32_t k = 0; k < tokens; k++) {
            const uint8_t *row = mk_kv_row(c, m->kv_off, slot, t + k, mk_latent_row_bytes(m->latent, m->rope, m->cache, 2));
            float *to = tile + (size_t)k * n, scale;
            for (uint32_t g = 0; g < m->latent; g += MK_LATENT_GROUP) {
                memcpy(&scale, row + m->latent + g / MK_LATENT_GROUP * 4, 4);
                decode_fp8(to + g, row + g, m->latent - g < MK_LATENT_GROUP ? m->latent - g : MK_LATENT_GROUP, scale);
            }
            decode(to + m->latent, (const uint16_t *)(const void *)(row + mk_latent_key_at(m->latent, m->cache, 2)), m->rope);
        }
        return tile;
    }
    decode(tile, (const uint16_t *)mk_kv_row(c, m->kv_off, slot, t, n * 2), tokens * n);
    return tile;
}

void mk_mla_partial_twin(mk_ctx *c)
{
    const mk_mla *m = &c->in->mla;
    uint32_t latent = m->latent, n = latent + m->rope;
    uint32_t floats = mk_partial_floats(latent);
    float *bulk = mk_bulk(c, c->in->signal_vec);
    float *q = c->scratch, *tile = q + (size_t)MK_HEAD_GROUP * n, *acc = tile + (size_t)TILE * n, *p = acc + (size_t)MK_HEAD_GROUP * latent;

    for (uint32_t r = 0, base = 0, together = 0; r < c->step->nrows; r++) {
        const mk_row *row = &c->step->row[r];
        if (!together) together = mk_mla_together(m, c->step, r);
        uint32_t splits = mk_splits(row->pos, m->grain, m->most), per = mk_split_pages(row->pos, m->grain, m->most) * MK_PAGE, group = mk_head_group(row->pos, m->heads);
        uint32_t groups = (m->heads + group - 1) / group;
        for (uint32_t g = 0; g < groups; g++) {
            uint32_t h0 = m->head0 + g * group, heads = m->heads - g * group, have_q = 0;
            if (heads > group) heads = group;
            for (uint32_t s = 0; s < splits; s++) {
                if ((base + s * groups + g) % m->parts != m->part) continue;
                if (!have_q) {
                    for (uint32_t h = 0; h < heads; h++) {
                        float *qh = q + (size_t)h * n;
                        mk_read(c, 0, r, (h0 + h) * latent, latent, qh);
                        if (!m->rope) continue;
                        mk_read(c, 1, r, m->in_off + (h0 + h) * m->qk_stride, m->rope, qh + latent);
                        if (m->rotary) mk_rotate(qh + latent, c->mem->param + m->param_off + latent, m->rope, row->pos);
                    }
                    have_q = 1;
                }
                uint32_t first = s * per, tokens = row->pos + 1 - first < per ? row->pos + 1 - first : per;
                c->bytes += (uint64_t)tokens * mk_latent_row_bytes(latent, m->rope, m->cache, mk_act_f32(c) ? 4 : 2);
                for (uint32_t t = 0; t < tokens; t += TILE) {
                    uint32_t k = tokens - t < TILE ? tokens - t : TILE;
                    scores(q, heads, cache_tile(c, m, row->slot, first + t, k, tile), k, n, m->scale, p + t, per);
                }
                float max[MK_HEAD_GROUP], sum[MK_HEAD_GROUP];
                for (uint32_t h = 0; h < heads; h++) max[h] = softmax(p + (size_t)h * per, tokens, &sum[h]);
                memset(acc, 0, (size_t)heads * latent * sizeof *acc);
                for (uint32_t t = 0; t < tokens; t += TILE) {
                    uint32_t k = tokens - t < TILE ? tokens - t : TILE;
                    accumulate(acc, heads, cache_tile(c, m, row->slot, first + t, k, tile), k, n, latent, p + t, per);
                }
                for (uint32_t h = 0; h < heads; h++) {
                    float *dst = bulk + (((size_t)r * MK_MAX_SPLITS + s) * m->all_heads + h0 + h) * floats;
                    memcpy(dst, acc + (size_t)h * latent, latent * sizeof *dst);
                    dst[latent] = max[h];
                    dst[latent + 1] = sum[h];
                }
            }
        }
        if (--together == 0) base += splits * groups;
    }
    mk_signal_bulk(c, c->in->signal_vec);
}
