#include "host/fold.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "host/numa.h"
#include "host/quant.h"
#include "instructions/vec8.h"

#define MOST_THREADS 64

typedef struct job {
    const mk_fold *f;
    const mk_tensor *kv, *kv_scale;
    float *to;
    uint32_t heads, latent;
    _Atomic uint32_t next; /* head that nobody has taken */
    _Atomic int rc;
} job;
typedef struct worker {
    job *j;
    mk_err err;
    uint32_t head; /* at which it failed */
    pthread_t thread;
    int started;
} worker;

/* to[c][i] = sum over n of kv[n][c] q[n][i], n ascending. k: a multiple of 8. */
MK_CLONES static void product(float *restrict to, const float *restrict kv, const float *restrict q, uint32_t nope, uint32_t latent, uint32_t k)
{
    for (uint32_t c = 0; c < latent; c++) {
        float *row = to + (size_t)c * k;
        memset(row, 0, k * sizeof *row);
        for (uint32_t n = 0; n < nope; n++) {
            const float a = kv[(size_t)n * latent + c];
            const float *x = q + (size_t)n * k;
            for (uint32_t i = 0; i < k; i += 8) mk_store8(row + i, mk_load8(row + i) + a * mk_load8(x + i));
        }
    }
}

static int head(job *j, uint32_t h, float *kv, float *q, mk_err *err)
{
    const mk_mat *m = j->f->mat, *by = m->by;
    int rc = mk_tensor_rows_f32(j->kv, j->kv_scale, (uint64_t)h * by->head_stride + by->head_off, m->head_n, kv, err);
    if (!rc) rc = mk_tensor_rows_f32(j->f->q, j->f->q_scale, (uint64_t)h * m->head_stride, m->head_n, q, err);
    if (!rc) product(j->to + (size_t)h * j->latent * m->k, kv, q, m->head_n, j->latent, m->k);
    return rc;
}

static void *run(void *arg)
{
    worker *w = arg;
    job *j = w->j;
    const mk_mat *m = j->f->mat;
    float *kv = malloc((size_t)m->head_n * (j->latent + m->k) * sizeof *kv);
    int rc = kv ? MK_OK : mk_fail(&w->err, MK_E_SYSTEM, "tensor %s: out of memory for its product", m->tensor);
    while (!rc && !atomic_load(&j->rc) && (w->head = atomic_fetch_add(&j->next, 1)) < j->heads) rc = head(j, w->head, kv, kv + (size_t)m->head_n * j->latent, &w->err);
    if (rc) atomic_store(&j->rc, rc);
    free(kv);
    return NULL;
}

int mk_fold_make(const void *arg, float *to, mk_err *err)
{
    const mk_fold *f = arg;
    job j = {.f = f, .to = to};
    int rc = mk_mat_source(f->ck, f->mat->by, 0, &j.kv, &j.kv_scale, err);
    if (rc) return rc;
    j.latent = (uint32_t)j.kv->shape[1];
    j.heads = f->mat->n / j.latent;
    if ((uint64_t)j.heads * f->mat->head_stride != f->q->shape[0])
        return mk_fail(err, MK_E_MODEL, "%s: tensor %s: its shape does not fit the matrix: %s has %u heads", f->q->file, f->q->name, j.kv->name, j.heads);
    worker w[MOST_THREADS];
    uint32_t n = mk_numa_cpus();
    if (n > MOST_THREADS) n = MOST_THREADS;
    if (n > j.heads) n = j.heads;
    for (uint32_t i = 0; i < n; i++) {
        w[i] = (worker){.j = &j};
        w[i].started = i + 1 < n && !pthread_create(&w[i].thread, NULL, run, &w[i]); /* the last one, and whoever cannot be started, is this thread */
        if (!w[i].started) run(&w[i]);
    }
    const worker *first = NULL; /* heads are taken in order: of those that fail the first is always among them */
    for (uint32_t i = 0; i < n; i++) {
        if (w[i].started) pthread_join(w[i].thread, NULL);
        if (w[i].err.code && (!first || w[i].head < first->head)) first = &w[i];
    }
    if (first && err) *err = first->err;
    return first ? first->err.code : MK_OK;
}
