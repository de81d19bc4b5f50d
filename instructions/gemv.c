/* GEMV: y[i] = scale * sum_k W[i,k] x[k] for the slice of rows that this worker owns.
 *   wait[0]  input vector, values [in_off, in_off + k); prologue NONE, RMS or HEADNORM (mk_prologue in isa.h)
 *   wait[1]  ADD, GATED: the residual, this instruction's own n values: the slice of a PACKET vector, or LOCAL f32[rows][n]
 *   wait[2]  GATED: value gate_off is the gate; publishes residual + sigmoid(gate) * y
 *   signal   STORE, ADD, GATED: n values; SILU: n values silu(gate_i) * up_i out of 2n matrix rows (gate first). A PACKET slice, or LOCAL
 *            f32[rows][n]
 *   tape     one segment
 * One row and eight rows read the same bytes. Source of the mathematics: models.md 3. */
#include "instructions/matvec.h"
#include "instructions/mk_math.h"

#include <string.h>

void mk_gemv_twin(mk_ctx *c)
{
    const mk_insn *in = c->in;
    const mk_gemv *g = &in->gemv;
    const mk_vec *out = &c->prog->vec[in->signal_vec];
    uint32_t nrows = c->step->nrows, halves = g->epilogue == MK_EPI_SILU ? 2 : 1, stride = mk_staged_stride(g->k);
    uint32_t rows = g->n * halves, norms = mk_stage_norms(c, g->k, g->prologue, g->norm_group);
    float *x = c->scratch, *y = x + (size_t)nrows * stride, *part = y + (size_t)nrows * rows, *norm = part + (size_t)nrows * rows, *res = norm + nrows * norms;
    const float *xr[MK_MAX_ROWS];
    float *yr[MK_MAX_ROWS], *pr[MK_MAX_ROWS];

    mk_stage(c, g->in_off, g->k, g->prologue, g->param_off, g->eps, g->norm_group, g->flags & MK_GEMV_X_F32, x, norm);
    for (uint32_t r = 0; r < nrows; r++) {
        xr[r] = x + (size_t)r * stride;
        yr[r] = y + (size_t)r * rows;
        pr[r] = part + (size_t)r * rows;
    }
    mk_segment s = {.data = c->mem->tape + c->prog->tape_base[c->worker] + in->tape_off,
                    .wtype = g->wtype,
                    .rows = rows,
                    .k = g->k,
                    .halves = halves,
                    .nseg = g->nseg,
                    .phase = g->phase,
                    .scale_k = g->scale_k};
    if (norms == 1) mk_matvec(&s, xr, nrows, yr);
    for (uint32_t h = 0; norms > 1 && h < norms; h++) { /* heads ascending, each with its norm */
        s.kb0 = h * (g->norm_group / mk_kblock_values(g->wtype));
        s.kb1 = (h + 1) * (g->norm_group / mk_kblock_values(g->wtype));
        mk_matvec(&s, xr, nrows, pr);
        for (uint32_t r = 0; r < nrows; r++)
            for (uint32_t i = 0; i < rows; i++) yr[r][i] = (h ? yr[r][i] : 0.0f) + norm[r * norms + h] * pr[r][i];
    }

    for (uint32_t r = 0; r < nrows; r++) {
        float *v = yr[r], scale = (norms == 1 ? norm[r] : 1.0f) * g->scale;
        if (scale != 1.0f)
            for (uint32_t i = 0; i < rows; i++) v[i] *= scale;
        if (g->epilogue == MK_EPI_SILU) {
            for (uint32_t i = 0; i < g->n; i++) v[i] = mk_siluf(v[i]) * v[g->n + i];
        } else if (g->epilogue == MK_EPI_ADD || g->epilogue == MK_EPI_GATED) {
            if (g->epilogue == MK_EPI_GATED) {
                float gate;
                mk_read(c, 2, r, g->gate_off, 1, &gate);
                gate = mk_sigmoidf(gate);
                for (uint32_t i = 0; i < g->n; i++) v[i] *= gate;
            }
            const mk_vec *rv = &c->prog->vec[in->wait[1].vec];
            if (rv->scope == MK_LOCAL)
                memcpy(res, (float *)mk_local(c, in->wait[1].vec) + (size_t)r * g->n, g->n * sizeof *res);
            else
                mk_read(c, 1, r, mk_vec_starts(c->prog, rv)[in->wait[1].slice0], g->n, res);
            for (uint32_t i = 0; i < g->n; i++) v[i] = res[i] + v[i];
        }
        if (out->scope == MK_LOCAL)
            memcpy((float *)mk_local(c, in->signal_vec) + (size_t)r * g->n, v, g->n * sizeof *v);
        else
            mk_publish(c, r, in->signal_slice, v, 0.0f);
    }
}
