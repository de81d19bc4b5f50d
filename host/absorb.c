#include "host/absorb.h"

#include <stdlib.h>
#include <string.h>

#include "host/quant.h"

struct mk_absorb {
    const mk_plan *plan;
    const mk_checkpoint *ck;
    void *device; /* the tensor brought last */
};

int mk_absorb_new(const mk_plan *plan, const mk_checkpoint *ck, mk_absorb **out, mk_err *err)
{
    mk_absorb *a = calloc(1, sizeof *a);
    *out = a;
    if (!a) return mk_fail(err, MK_E_CAPACITY, "out of memory");
    a->plan = plan;
    a->ck = ck;
    return MK_OK;
}

void mk_absorb_destroy(mk_absorb **p)
{
    if (!*p) return;
    mk_device_free((*p)->device);
    free(*p);
    *p = NULL;
}

int mk_absorb_heads(void *arg, const mk_insn *in, uint32_t worker, mk_heads *h, mk_err *err)
{
    mk_absorb *a = arg;
    const mk_mat *mat = NULL;
    const mk_tensor *t, *s;
    for (size_t i = 0; i < a->plan->n_item && !mat; i++) {
        const mk_pack_item *it = &a->plan->item[i];
        if (it->kind == MK_PACK_TAPE && it->worker == worker && it->dst == in->tape_off) mat = it->mat[0];
    }
    if (!mat || (mat->source != MK_SRC_HEAD_T && mat->source != MK_SRC_HEAD_ROWS)) return 0;
    int rc = mk_mat_source(a->ck, mat, 0, &t, &s, err);
    if (rc) return -1;
    uint32_t rows = (uint32_t)t->shape[0], cols = (uint32_t)t->shape[1];
    mk_mat whole = {.source = MK_SRC_PLAIN, .wtype = MK_W_BF16, .n = rows, .k = cols, .scale_k = 128};
    memcpy(whole.tensor, mat->tensor, sizeof whole.tensor);
    uint16_t *host = malloc((size_t)rows * cols * sizeof *host);
    if (!host) return mk_fail(err, MK_E_CAPACITY, "out of memory"), -1;
    rc = mk_mat_fetch(a->ck, &whole, 0, 0, rows, host, NULL, err);
    mk_device_free(a->device);
    a->device = NULL;
    if (!rc) rc = mk_device_copy(host, (uint64_t)rows * cols * sizeof *host, &a->device, err);
    free(host);
    if (rc) return -1;
    int turned = mat->source == MK_SRC_HEAD_T;
    h->a = (const uint16_t *)a->device + (size_t)mat->head_off * cols;
    h->a_bf16 = 1;
    h->a_transposed = turned;
    h->a_row = cols;
    h->a_head = (uint64_t)mat->head_stride * cols;
    h->m = turned ? cols : mat->head_n;
    h->k = mat->k;
    h->heads = mat->n / h->m;
    return 1;
}
