#include "host/bytes.h"
#include "instructions/latent.h"

#include <math.h>
#include <string.h>

static uint64_t of(const mk_mat *m)
{
    return m->source == MK_SRC_NONE ? 0 : (uint64_t)m->n * m->k * (m->wtype == MK_W_FP8 ? 1 : 2);
}

static uint64_t of_all(const mk_mat *const *m, size_t n)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) sum += of(m[i]);
    return sum;
}
#define SUM(...) of_all((const mk_mat *const[]){__VA_ARGS__}, sizeof((const mk_mat *const[]){__VA_ARGS__}) / sizeof(mk_mat *))

void mk_bytes_of(const mk_model *m, mk_bytes *b)
{
    memset(b, 0, sizeof *b);
    b->weights = of(&m->lm_head) + 2ull * m->hidden;
    for (uint32_t l = 0; l < m->layers; l++) {
        const mk_layer *y = &m->layer[l];
        if (y->mixer == MK_MIX_DELTA) {
            const mk_delta_mixer *d = &y->delta;
            b->weights += SUM(&d->q, &d->k, &d->v, &d->o, &d->f_a, &d->f_b, &d->g_a, &d->g_b, &d->b, &d->z, &d->a);
            b->state += 2ull * d->heads * d->dk * d->dv * 4;
            b->state += 4ull * d->taps * (2 * d->k_heads * d->dk + d->heads * d->dv); /* the convolution reads taps - 1 inputs a channel and writes one */
        } else if (y->mixer == MK_MIX_GQA) {
            const mk_gqa_mixer *a = &y->gqa;
            b->weights += SUM(&a->q, &a->k, &a->v, &a->o);
            b->kv += 2ull * 2 * a->kv_heads * a->dim;
        } else {
            const mk_mla_mixer *a = &y->mla;
            b->weights += SUM(&a->q, &a->q_a, &a->kv_a, &a->uk, &a->uv, &a->o);
            b->kv += mk_latent_row_bytes(a->latent, a->rope, m->kv_cache, 2);
        }
        if (y->ffn == MK_FFN_DENSE) {
            b->weights += SUM(&y->dense.gate, &y->dense.up, &y->dense.down);
        } else if (y->ffn == MK_FFN_MOE) {
            const mk_moe *e = &y->moe;
            b->weights += of(&e->router);
            if (e->shared.inter) b->weights += SUM(&e->shared.gate, &e->shared.up, &e->shared.down, &e->shared_gate);
            b->experts += e->topk * SUM(&e->gate, &e->up, &e->down);
            b->topk = e->topk;
            b->n_experts = e->experts;
        }
    }
}

double mk_bytes_step(const mk_bytes *b, uint32_t rows, uint32_t context)
{
    double experts = (double)b->experts;
    if (b->topk && rows > 1) {
        double chosen = (double)b->topk / b->n_experts;
        experts *= (1 - pow(1 - chosen, rows)) / chosen;
    }
    return (double)b->weights + experts + (double)b->state + (double)b->kv * context;
}
