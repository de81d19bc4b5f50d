/* EXPERT_DOWN: h += sum over the chosen experts, in ascending id, of weight_e * (down_e u_e), for this worker's rows of h. Each expert is
 * fully reduced, then added.
 *   wait[0]  "u" (DYNAMIC): segment rank of a row = values [rank * inter, (rank + 1) * inter)
 *   wait[1]  LOCAL mk_routes
 *   wait[2]  what is added to: LOCAL f32[rows][n] (residual + shared expert), or the residual slice itself
 *   signal   slice of "h"
 *   experts  segment of slice t (all experts alike) */
#include "instructions/matvec.h"

#include <string.h>

void mk_expert_down_twin(mk_ctx *c)
{
    const mk_insn *in = c->in;
    const mk_expert *e = &in->expert;
    const mk_routes *routes = mk_local(c, in->wait[1].vec);
    const mk_vec *base = &c->prog->vec[in->wait[2].vec];
    uint32_t nrows = c->step->nrows, n = e->n, stride = mk_staged_stride(e->k);
    float *acc = c->scratch, *x = acc + (size_t)nrows * n, *y = x + (size_t)nrows * stride;

    for (uint32_t r = 0; r < nrows; r++) {
        if (base->scope == MK_LOCAL)
            memcpy(acc + (size_t)r * n, (float *)mk_local(c, in->wait[2].vec) + (size_t)r * n, n * sizeof *acc);
        else
            mk_read(c, 2, r, mk_vec_starts(c->prog, base)[in->wait[2].slice0], n, acc + (size_t)r * n);
    }
    for (uint32_t j = 0; j < routes->n_union; j++) {
        uint32_t m = 0, row[MK_MAX_ROWS];
        const float *xr[MK_MAX_ROWS];
        float *yr[MK_MAX_ROWS];
        for (uint32_t r = 0; r < nrows; r++) {
            uint32_t rank = routes->rank[r][j];
            if (rank == 255) continue;
            float *xm = x + (size_t)m * stride;
            mk_read(c, 0, r, rank * e->inter, e->k, xm);
            memset(xm + e->k, 0, (stride - e->k) * sizeof *xm);
            xr[m] = xm;
            yr[m] = y + (size_t)m * n;
            row[m++] = r;
        }
        mk_segment s = {.data = c->mem->expert + e->base + routes->expert[j] * e->expert_stride + (uint64_t)e->t * e->slice_stride,
                        .wtype = e->wtype,
                        .rows = n,
                        .k = e->k,
                        .halves = 1,
                        .nseg = e->nseg,
                        .phase = e->phase,
                        .scale_k = MK_SCALE_ROWS};
        mk_matvec(&s, xr, m, yr);
        c->bytes += mk_weight_bytes(&s);
        for (uint32_t q = 0; q < m; q++) {
            float w = routes->weight[row[q]][routes->rank[row[q]][j]], *a = acc + (size_t)row[q] * n;
            for (uint32_t i = 0; i < n; i++) a[i] += w * yr[q][i];
        }
    }
    for (uint32_t r = 0; r < nrows; r++) mk_publish(c, r, in->signal_slice, acc + (size_t)r * n, 0.0f);
}
