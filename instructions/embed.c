/* EMBED: h[first .. first+n) of every row = scale * embedding[token], the first publication of the residual stream.
 *   wait     none: the token ids stand in the step descriptor
 *   signal   slice of "h" (f32) */
#include "instructions/op.h"

#include <string.h>

void mk_embed_twin(mk_ctx *c)
{
    const mk_embed *e = &c->in->embed;
    float *v = c->scratch;
    for (uint32_t r = 0; r < c->step->nrows; r++) {
        uint64_t at = (uint64_t)c->step->row[r].token * e->hidden + e->first;
        if (e->wtype == MK_F32) {
            memcpy(v, c->mem->embed + e->embed_off + at * 4, e->n * 4);
        } else {
            const uint16_t *p = (const uint16_t *)(c->mem->embed + e->embed_off) + at;
            for (uint32_t i = 0; i < e->n; i++) v[i] = mk_bf16_to_f32(p[i]);
        }
        if (e->scale != 1.0f)
            for (uint32_t i = 0; i < e->n; i++) v[i] *= e->scale;
        mk_publish(c, r, c->in->signal_slice, v, 0.0f);
    }
}
