/* KV_APPEND: every row's latent, normalised, and its positional key into the MLA cache. One instruction handles all rows.
 *   (c | k_pe) = kv;  c <- c * rsqrt(mean(c^2) + eps) * gamma;  k_pe rotated when rotary = 1 (instructions/rotary.h)
 *   wait[0]  "kv": values [in_off, in_off + latent + rope)
 *   signal   BULK counter, one increment once all rows are written
 *   params   f32 gamma[latent], then inv_freq[rope/2] when rotary != 0
 *   cache    row of position pos of the row's stream, mk_kv_row, as instructions/latent.h draws it
 * Source of the mathematics: models.md 3.3. */
#include "instructions/latent.h"
#include "instructions/op.h"
#include "instructions/rotary.h"
#include "instructions/vec8.h"

#include <string.h>

MK_CLONES static void norm(float *restrict x, const float *restrict gamma, uint32_t n, float eps)
{
    float rstd = mk_rsqrtf(mk_sumsq8(x, n) / (float)n + eps);
    for (uint32_t i = 0; i < n; i++) x[i] = x[i] * rstd * gamma[i];
}

/* x as codes and scales. */
static void quantise(uint8_t *dst, const float *x, uint32_t latent)
{
    float *scale = (float *)(void *)(dst + latent);
    for (uint32_t g = 0; g < latent; g += MK_LATENT_GROUP) {
        uint32_t end = latent - g < MK_LATENT_GROUP ? latent : g + MK_LATENT_GROUP, top = 0;
        for (uint32_t i = g; i < end; i++) {
            uint32_t u = mk_f32_bits(x[i]) & 0x7fffffffu;
            top = u > top ? u : top;
        }
        top = mk_latent_scale(top);
        for (uint32_t i = g; i < end; i++) dst[i] = mk_latent_code(x[i], top);
        *scale++ = mk_bits_f32(top);
    }
}

void mk_kv_append_twin(mk_ctx *c)
{
    const mk_mla *m = &c->in->mla;
    uint32_t latent = m->latent, n = latent + m->rope, bytes = mk_act_f32(c) ? 4 : 2, first = m->cache == MK_CACHE_FP8 ? latent : 0; /* that stays an activation */
    const float *gamma = c->mem->param + m->param_off;
    float *x = c->scratch;
    for (uint32_t r = 0; r < c->step->nrows; r++) {
        const mk_row *row = &c->step->row[r];
        mk_read(c, 0, r, m->in_off, n, x);
        norm(x, gamma, latent, m->eps);
        if (m->rotary) mk_rotate(x + latent, gamma + latent, m->rope, row->pos);
        uint8_t *dst = mk_kv_row(c, m->kv_off, row->slot, row->pos, mk_latent_row_bytes(latent, m->rope, m->cache, bytes));
        if (first) {
            quantise(dst, x, latent);
            dst += mk_latent_key_at(latent, m->cache, bytes);
        }
        if (bytes == 4)
            memcpy(dst, x, (size_t)n * 4);
        else
            for (uint32_t i = first; i < n; i++) ((uint16_t *)dst)[i - first] = mk_f32_to_bf16(x[i]);
    }
    mk_signal_bulk(c, c->in->signal_vec);
}
