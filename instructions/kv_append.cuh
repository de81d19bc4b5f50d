/* KV_APPEND on the device: one warp a row. Semantics: kv_append.c. */
#ifndef MK_KV_APPEND_CUH
#define MK_KV_APPEND_CUH

#include "instructions/mk_math.h"
#include "megakernel/device.cuh"

/* Pair i of x turned by the angle pos * inv_freq[i] (rotary.h). */
MK_DEV void mk_rotate_pair(float *a, float *b, float inv_freq, uint32_t pos)
{
    float s, c, x = *a, y = *b;
    mk_sincosf(mk_mul((float)pos, inv_freq), &s, &c);
    *a = mk_add(mk_mul(x, c), -mk_mul(y, s));
    *b = mk_add(mk_mul(x, s), mk_mul(y, c));
}

MK_CALL void mk_kv_append_run(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_mla *m = &d->in->mla;
    const uint32_t latent = m->latent, n = latent + m->rope, r = d->warp;
    mk_staged_drop(d);
    if (r < d->step->nrows) {
        const mk_row *row = &d->step->row[r];
        const float *gamma = d->a->param + m->param_off;
        float *x = (float *)d->sh->staging + r * n, sum = 0;
        mk_warp_read(&d->in->wait[0], r, m->in_off, n, x);
        mk_trace_input(d);
#pragma unroll 1
        for (uint32_t i = d->lane; i < latent; i += 32) sum = __fmaf_rn(x[i], x[i], sum);
        float rstd = mk_rsqrtf(mk_warp_sum(sum) / (float)latent + m->eps);
        uint32_t *dst = (uint32_t *)mk_kv_at(d, m->kv_off, row->slot, row->pos, n * 2);
#pragma unroll 1
        for (uint32_t i = d->lane; i < n / 2; i += 32) {
            float a = x[2 * i], b = x[2 * i + 1];
            if (2 * i < latent) {
                a *= rstd * __ldg(gamma + 2 * i);
                b *= rstd * __ldg(gamma + 2 * i + 1);
            } else if (m->rotary) {
                mk_rotate_pair(&a, &b, __ldg(gamma + latent + i - latent / 2), row->pos);
            }
            dst[i] = mk_bf16_bits(a) | mk_bf16_bits(b) << 16;
        }
    }
    mk_bulk_signal(d, d->in->signal_vec);
}

#endif
