#include "host/pack.h"

#include <stdlib.h>
#include <string.h>

/* Grows a scratch buffer. */
static void *scratch(void **p, size_t *have, size_t want)
{
    if (*have < want) {
        free(*p);
        *p = malloc(want);
        *have = *p ? want : 0;
    }
    return *p;
}

struct buffers {
    void *rows;
    size_t rows_bytes;
    void *scales;
    size_t scales_bytes;
};

/* One segment (instructions/isa.h, mk_wtype) at dst. */
static int pack_segment(const mk_pack_item *it, uint32_t expert, const mk_checkpoint *ck, uint8_t *dst, struct buffers *b, mk_err *err)
{
    const mk_mat *first = it->mat[0];
    uint32_t k = first->k, esize = it->wtype == MK_W_FP8 ? 1 : 2, total = it->rows * it->halves;
    uint32_t per = mk_kblock_values(it->wtype), nkb = (k + per - 1) / per, nsb = (k + first->scale_k - 1) / first->scale_k;
    uint32_t used = it->wtype == MK_W_FP8 ? mk_segments(it->phase, it->rows) : 0;
    uint8_t *rows = scratch(&b->rows, &b->rows_bytes, (size_t)it->rows * k * esize);
    float *scales = scratch(&b->scales, &b->scales_bytes, ((size_t)nsb * used + 1) * sizeof *scales);
    if (!rows || !scales) return mk_fail(err, MK_E_CAPACITY, "packing %s: out of memory", first->tensor);
    float *out_scales = (float *)dst;
    uint8_t *out = dst + mk_segment_scale_bytes(it->wtype, k, it->nseg * it->halves, first->scale_k);
    for (uint32_t h = 0; h < it->halves; h++) {
        int rc = mk_mat_fetch(ck, it->mat[h], expert, it->row0, it->rows, rows, scales, err);
        if (rc) return rc;
        if (it->wtype == MK_W_FP8)
            for (uint32_t s = 0; s < nsb; s++)
                for (uint32_t g = 0; g < used; g++) out_scales[(s * it->halves + h) * it->nseg + g] = scales[s * used + g];
        for (uint32_t kb = 0; kb < nkb; kb++) {
            uint32_t n = k - kb * per < per ? k - kb * per : per;
            for (uint32_t i = 0; i < it->rows; i++)
                memcpy(out + ((size_t)kb * total + h * it->rows + i) * MK_KBLOCK_BYTES, rows + ((size_t)i * k + kb * per) * esize,
                       (size_t)n * esize);
        }
    }
    return MK_OK;
}

static int pack_item(const mk_plan *plan, const mk_pack_item *it, const mk_checkpoint *ck, mk_memory *mem, struct buffers *b, mk_err *err)
{
    switch (it->kind) {
    case MK_PACK_TAPE:
        return pack_segment(it, 0, ck, mem->tape + plan->prog->tape_base[it->worker] + it->dst, b, err);
    case MK_PACK_EXPERT:
        for (uint32_t e = 0; e < it->experts; e++) {
            int rc = pack_segment(it, e, ck, mem->expert + it->dst + e * it->expert_stride, b, err);
            if (rc) return rc;
        }
        return MK_OK;
    case MK_PACK_PARAM: {
        if (!scratch(&b->rows, &b->rows_bytes, it->par->n * sizeof(float)))
            return mk_fail(err, MK_E_CAPACITY, "packing %s: out of memory", it->par->tensor);
        int rc = mk_par_fetch(ck, it->par, b->rows, err);
        if (!rc) memcpy(mem->param + it->dst, (float *)b->rows + it->src, it->n * sizeof(float));
        return rc;
    }
    case MK_PACK_VALUES:
        memcpy(mem->param + it->dst, it->values, it->n * sizeof(float));
        return MK_OK;
    case MK_PACK_EMBED: {
        mk_mat table = *it->mat[0];
        table.wtype = MK_W_BF16;
        for (uint32_t r = 0; r < it->rows; r += 1024) { /* bounded pieces: a table may be a gigabyte */
            uint32_t n = it->rows - r < 1024 ? it->rows - r : 1024;
            int rc = mk_mat_fetch(ck, &table, 0, r, n, mem->embed + (uint64_t)r * table.k * 2, NULL, err);
            if (rc) return rc;
        }
        return MK_OK;
    }
    }
    return mk_fail(err, MK_E_BUG, "pack: unknown item %d", it->kind);
}

int mk_pack(const mk_plan *plan, const mk_checkpoint *ck, mk_memory *mem, mk_err *err)
{
    struct buffers b = {0};
    int rc = MK_OK;
    for (size_t i = 0; i < plan->n_item && !rc; i++) rc = pack_item(plan, &plan->item[i], ck, mem, &b, err);
    free(b.rows);
    free(b.scales);
    return rc;
}
