/* Packing on a GPU: the tensors of the mapping, one piece after the other, through megakernel/pack.cu. */
#include "host/pack.h"

#include <stdlib.h>
#include <time.h>

#include "megakernel/pack.h"

#define PIECE (64ull << 20) /* of a tensor on the device at a time, two of them */

typedef struct gpu_pack {
    const mk_pack_list *list;
    const mk_plan *plan;
    const mk_checkpoint *ck;
    const mk_memory *device;
    mk_packer *packer;
    uint64_t raw, bytes;
    uint32_t blocks, puts;
    struct { /* of call i of mk_packer_put */
        const mk_pack_matrix *matrix;
        uint32_t expert;
    } *put;
    uint32_t cap;
} gpu_pack;

static int measure(void *arg, const mk_pack_unit *u, mk_err *err)
{
    gpu_pack *g = arg;
    uint64_t raw = ((u->data_bytes + 255) & ~255ull) + u->scale_bytes;
    (void)err;
    if (raw > g->raw) g->raw = raw;
    if (u->blocks > g->blocks) g->blocks = u->blocks;
    return MK_OK;
}

/* mk_pack's message about the weight that a kernel refused. */
static int refused(gpu_pack *g, uint32_t put, uint32_t seg, mk_err *err)
{
    const mk_pack_seg *s = &g->list->seg[seg];
    mk_mat mat = *g->put[put].matrix->mat;
    mat.wtype = g->put[put].matrix->wtype;
    uint32_t nkb = mk_scale_blocks(mat.k, mat.scale_k);
    int rc = MK_OK;
    for (uint32_t r = 0; r < s->rows && !rc; r += MK_SEGMENT_ROWS) { /* the embedding is one segment */
        uint32_t n = s->rows - r < MK_SEGMENT_ROWS ? s->rows - r : MK_SEGMENT_ROWS;
        void *rows = malloc((size_t)n * mat.k * 2);
        float *scales = malloc((uint64_t)mk_segments(MK_SCALE_ROWS, MK_SEGMENT_ROWS, mat.scale_k) * nkb * sizeof *scales);
        rc = rows && scales ? mk_mat_fetch(g->ck, &mat, g->put[put].expert, s->row0 + r, n, rows, scales, err)
                            : mk_fail(err, MK_E_CAPACITY, "packing: out of memory");
        free(rows);
        free(scales);
    }
    return rc ? rc : mk_fail(err, MK_E_BUG, "tensor %s, rows %u + %u: the GPU cannot pack them, the CPU can", mat.tensor, s->row0, s->rows);
}

static int put(void *arg, const mk_pack_unit *u, mk_err *err)
{
    gpu_pack *g = arg;
    const mk_memory *d = g->device;
    mk_pack_piece p = u->piece;
    uint32_t at, seg;
    if (g->puts == g->cap) {
        g->cap = g->cap ? 2 * g->cap : 1024;
        void *more = realloc(g->put, g->cap * sizeof *g->put);
        if (!more) return mk_fail(err, MK_E_CAPACITY, "packing: out of memory");
        g->put = more;
    }
    g->put[g->puts].matrix = u->matrix;
    g->put[g->puts++].expert = u->expert;
    p.dst = (u->matrix->kind == MK_PACK_TAPE ? d->tape : u->matrix->kind == MK_PACK_EXPERT ? d->expert : d->embed) + u->dst;
    g->bytes += u->data_bytes + u->scale_bytes;
    int rc = mk_packer_put(g->packer, &p, u->data_bytes, u->scale_bytes, u->first, u->n, err);
    if (!rc && mk_packer_refused(g->packer, &at, &seg)) rc = refused(g, at, seg, err); /* soon, not after a long load */
    return rc;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int mk_pack_gpu(const mk_plan *plan, const mk_checkpoint *ck, const mk_memory *device, double *seconds, uint64_t *bytes, mk_err *err)
{
    double begin = now();
    mk_pack_list list;
    gpu_pack g = {.list = &list, .plan = plan, .ck = ck, .device = device};
    uint32_t at, seg;
    int rc = mk_pack_list_make(plan, &list, err);
    if (!rc) rc = mk_pack_units(&list, ck, PIECE, measure, &g, err);
    if (!rc) rc = mk_packer_new(list.seg, list.n_seg, g.raw, g.blocks, &g.packer, err);
    if (!rc) rc = mk_pack_units(&list, ck, PIECE, put, &g, err);
    if (!rc) rc = mk_packer_finish(g.packer, err);
    if (!rc && mk_packer_refused(g.packer, &at, &seg)) rc = refused(&g, at, seg, err);
    mk_packer_destroy(&g.packer);
    mk_pack_list_free(&list);
    free(g.put);
    *seconds = now() - begin;
    *bytes = g.bytes;
    return rc;
}
