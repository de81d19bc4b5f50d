/* COMBINE: the attention output of one head, latent values [first, first + n), out of its splits' partials.
 *   M = max over splits of max_s;  w_s = exp(max_s - M);  out = sum w_s acc_s / sum w_s sum_s,  splits ascending
 *   gate = 1: out <- out * sigmoid(g)
 *   wait[0]  BULK partials of all parts of MLA_PARTIAL or GQA_PARTIAL (layout: mk_partial_floats in isa.h; latent is GQA's dim)
 *   wait[1]  gate = 1: g, values [in_off + head0 * qk_stride + first, + n)
 *   signal   one slice of the latent output: n values
 * Source of the mathematics: models.md 3.3 (softmax over all tokens, merged from splits), 3.5 (gate). */
#include "instructions/mk_math.h"
#include "instructions/op.h"

#include <string.h>

void mk_combine_twin(mk_ctx *c)
{
    const mk_mla *m = &c->in->mla;
    uint32_t latent = m->latent, floats = mk_partial_floats(latent);
    const float *bulk = mk_bulk(c, c->in->wait[0].vec);
    float *out = c->scratch, *gate = out + m->n;
    for (uint32_t r = 0; r < c->step->nrows; r++) {
        const float *part = bulk + ((size_t)r * MK_MAX_SPLITS * m->all_heads + m->head0) * floats;
        size_t stride = (size_t)m->all_heads * floats;
        uint32_t splits = mk_splits(c->step->row[r].pos, m->grain, m->most);
        float max = part[latent], sum = 0;
        for (uint32_t s = 1; s < splits; s++)
            if (part[s * stride + latent] > max) max = part[s * stride + latent];
        memset(out, 0, m->n * sizeof *out);
        for (uint32_t s = 0; s < splits; s++) {
            const float *p = part + s * stride, *x = p + m->first;
            float w = mk_expf(p[latent] - max);
            sum += w * p[latent + 1];
            for (uint32_t i = 0; i < m->n; i++) out[i] += w * x[i];
        }
        for (uint32_t i = 0; i < m->n; i++) out[i] /= sum;
        if (m->gate) {
            mk_read(c, 1, r, m->in_off + m->head0 * m->qk_stride + m->first, m->n, gate);
            for (uint32_t i = 0; i < m->n; i++) out[i] *= mk_sigmoidf(gate[i]);
        }
        mk_publish(c, r, c->in->signal_slice, out, 0.0f);
    }
}
