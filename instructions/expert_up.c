/* EXPERT_UP: u = silu(gate_e x) * (up_e x) for the slices of the chosen experts that fall to this worker.
 *   wait[0]  "h", RMS prologue (gamma at param_off)
 *   wait[1]  LOCAL mk_routes
 *   signal   "u", DYNAMIC: slice rank * T + t of every row that chose the expert
 *   experts  segment of slice t: gate rows [start(t), start(t+1)), then the same rows of up
 * The j-th expert of the union, slice t, runs on worker (j * T + t) mod W. A row that did not choose an expert is skipped. */
#include "instructions/matvec.h"
#include "instructions/mk_math.h"

void mk_expert_up_twin(mk_ctx *c)
{
    const mk_insn *in = c->in;
    const mk_expert *e = &in->expert;
    const mk_routes *routes = mk_local(c, in->wait[1].vec);
    uint32_t nrows = c->step->nrows, workers = c->prog->info.workers, stride = mk_staged_stride(e->k);
    uint32_t widest = mk_expert_rows(e->inter, e->T);
    float *x = c->scratch, *y = x + (size_t)nrows * stride, norm[MK_MAX_ROWS];
    mk_stage(c, 0, e->k, MK_PRO_RMS, e->param_off, e->eps, 0, 0, x, norm);

    for (uint32_t j = 0; j < routes->n_union; j++) {
        uint32_t first = (c->worker + workers - (uint32_t)((uint64_t)j * e->T % workers)) % workers;
        for (uint32_t t = first; t < e->T; t += workers) {
            uint32_t row0 = mk_expert_start(t, e->inter, e->T), n = mk_expert_start(t + 1, e->inter, e->T) - row0, m = 0;
            uint32_t row[MK_MAX_ROWS];
            const float *xr[MK_MAX_ROWS];
            float *yr[MK_MAX_ROWS];
            for (uint32_t r = 0; r < nrows; r++) {
                if (routes->rank[r][j] == 255) continue;
                xr[m] = x + (size_t)r * stride;
                yr[m] = y + (size_t)m * 2 * widest;
                row[m++] = r;
            }
            mk_segment s = {.data = c->mem->expert + e->base + routes->expert[j] * e->expert_stride +
                                    (uint64_t)t * e->slice_stride,
                            .wtype = e->wtype,
                            .rows = 2 * n,
                            .k = e->k,
                            .halves = 2,
                            .nseg = e->nseg,
                            .phase = row0 % MK_SCALE_ROWS,
                            .scale_k = MK_SCALE_ROWS};
            mk_matvec(&s, xr, m, yr);
            c->bytes += mk_weight_bytes(&s);
            for (uint32_t q = 0; q < m; q++) {
                float *v = yr[q], f = norm[row[q]];
                for (uint32_t i = 0; i < n; i++) v[i] = mk_siluf(v[i] * f) * (v[n + i] * f);
                mk_publish(c, row[q], routes->rank[row[q]][j] * (uint32_t)e->T + t, v, 0.0f);
            }
        }
    }
}
