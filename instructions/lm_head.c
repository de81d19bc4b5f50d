/* LM_HEAD: logits of vocabulary rows [row0, row0 + n) for the rows that need them, with their maximum and log-sum-exp.
 *   wait[0]  "h", RMS prologue (the model's final norm)
 *   signal   slice of "stats": 4 words a row: max logit (f32), its lowest id (u32), sum exp(l - max) (f32), 0. Rows that need no logits
 *            publish -inf, ~0, 0.
 *   also     logits_vec (BULK): f32[MK_MAX_ROWS][vocab], one increment
 *   tape     one segment */
#include "instructions/matvec.h"
#include "instructions/mk_math.h"

#include <math.h>
#include <string.h>

/* Sum of exp(l - max) in eight lanes, then pairwise: the order depends on n only. */
static float sum_exp(const float *l, uint32_t n, float max)
{
    float a[8] = {0};
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int k = 0; k < 8; k++) a[k] += mk_expf(l[i + k] - max);
    for (int k = 0; i < n; i++, k++) a[k] += mk_expf(l[i] - max);
    return ((a[0] + a[4]) + (a[1] + a[5])) + ((a[2] + a[6]) + (a[3] + a[7]));
}

void mk_lm_head_twin(mk_ctx *c)
{
    const mk_insn *in = c->in;
    const mk_lm_head *l = &in->lm_head;
    uint32_t nrows = c->step->nrows, stride = mk_staged_stride(l->k), m = 0;
    float *logits = mk_bulk(c, l->logits_vec);
    const float *xr[MK_MAX_ROWS];
    float *yr[MK_MAX_ROWS];
    if (c->step->any_logits) {
        float *x = c->scratch, norm[MK_MAX_ROWS], factor[MK_MAX_ROWS];
        mk_stage(c, 0, l->k, MK_PRO_RMS, l->param_off, l->eps, 0, 0, x, norm);
        for (uint32_t r = 0; r < nrows; r++) {
            if (!(c->step->row[r].flags & MK_ROW_LOGITS)) continue;
            xr[m] = x + (size_t)r * stride;
            factor[m] = norm[r];
            yr[m++] = logits + (size_t)r * l->vocab + l->row0;
        }
        mk_segment s = {.data = c->mem->tape + c->prog->tape_base[c->worker] + in->tape_off,
                        .wtype = l->wtype,
                        .rows = l->n,
                        .k = l->k,
                        .halves = 1,
                        .nseg = l->nseg,
                        .phase = l->phase,
                        .scale_k = l->scale_k};
        mk_matvec(&s, xr, m, yr);
        for (uint32_t q = 0; q < m; q++)
            for (uint32_t i = 0; i < l->n; i++) yr[q][i] *= factor[q];
    }
    for (uint32_t r = 0; r < nrows; r++) {
        float stats[4] = {-INFINITY, 0, 0, 0};
        uint32_t id = 0xffffffffu;
        if (c->step->row[r].flags & MK_ROW_LOGITS) {
            const float *y = logits + (size_t)r * l->vocab + l->row0;
            uint32_t best = 0;
            for (uint32_t i = 1; i < l->n; i++)
                if (y[i] > y[best]) best = i;
            id = l->row0 + best;
            stats[0] = y[best];
            stats[2] = sum_exp(y, l->n, y[best]);
        }
        memcpy(&stats[1], &id, 4);
        mk_publish(c, r, in->signal_slice, stats, 0.0f);
    }
    mk_signal_bulk(c, l->logits_vec);
}
