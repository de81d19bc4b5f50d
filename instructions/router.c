/* ROUTER: a slice of h times the columns of the router's matrix that belong to it, added to every expert's logit.
 *   wait[0]  h f32, one slice: values [first, first + n)
 *   signal   BULK sums (isa.h): row r, value e += sum_i h[first + i] gamma[i] W[e][first + i], in ascending i, rounded once
 *   tape     one segment: row i is column first + i of W
 *   params   gamma f32[n] at param_off
 * So the logits come from where h comes from, an exchange before anybody has all of h; the norm's 1/rms, which commutes with the sum, is ROUTE's. models.md 3.6. */
#include "instructions/matvec.h"

void mk_router_twin(mk_ctx *c)
{
    const mk_insn *in = c->in;
    const mk_router *g = &in->router;
    const uint8_t *weights = c->mem->tape + c->prog->tape_base[c->worker] + in->tape_off;
    const float *gamma = c->mem->param + g->param_off;
    const uint32_t half = mk_half(&c->prog->vec[in->signal_vec], c->step->seq, in->signal_pub), values = mk_kblock_values(MK_W_BF16), per = values / 4;
    uint64_t *out = mk_bulk(c, in->signal_vec);
    float *x = c->scratch;
    for (uint32_t r = 0; r < c->step->nrows; r++) {
        mk_read(c, 0, r, g->first, g->n, x);
        for (uint32_t i = 0; i < g->n; i++) x[i] *= gamma[i];
        for (uint32_t e = 0; e < g->experts; e++) {
            float sum = 0;
            for (uint32_t i = 0; i < g->n; i++) {
                const uint16_t *w = (const uint16_t *)(weights + mk_quarter_at(g->n, e / values, e % values / per, i));
                sum += x[i] * mk_bf16_to_f32(w[e % per]);
            }
            out[mk_sum_at(g->experts, half, r, e)] += mk_sum_word(sum);
        }
    }
    mk_signal_bulk(c, in->signal_vec);
}
