/* Packing 16 bytes of a segment at a time, straight from the bytes of a tensor: what one thread of the kernels in megakernel/pack.cu does. The same
 * source runs on the CPU in tests/test_pack.c. Results are those of mk_pack (host/pack.c) to the last bit. */
#ifndef MK_PACK_CORE_H
#define MK_PACK_CORE_H

#include "host/checkpoint.h"
#include "host/formats.h"

/* One half of one segment (instructions/isa.h), or the embedding table. */
typedef struct mk_pack_seg {
    uint64_t dst;         /* of the segment in its region, bytes; expert 0's */
    uint32_t row0, rows;  /* of the matrix */
    uint16_t phase, nseg; /* of FP8: see isa.h; nseg of one half */
    uint8_t half, halves;
    uint8_t table;        /* 1: no segment but rows of k values, one after the other (EMBED) */
    uint8_t pad;
    uint32_t item;        /* of the plan: for messages */
} mk_pack_seg;
static_assert(sizeof(mk_pack_seg) == 32, "two 16-byte loads");

/* Rows [p0, p1) of a matrix as their tensor stores them. */
typedef struct mk_pack_piece {
    mk_rows rows;
    uint32_t n;               /* rows of the matrix */
    uint32_t p0, p1;          /* p0 is a multiple of 128, p1 as well or n. HEAD_ROWS, HEAD_T: 0, n */
    uint8_t dtype, wtype;     /* enum mk_st_dtype; enum mk_wtype */
    uint8_t exact;            /* mk_mat.exact */
    uint8_t scale_dtype;      /* of an FP8 tensor's scales */
    uint32_t scale_cols;      /* columns of the tensor of scales */
    const unsigned char *data;   /* PLAIN: row p0 of the matrix. HEAD_*: the tensor */
    const unsigned char *scales; /* all of them; NULL: the tensor is not FP8 */
    float *block;             /* BF16, F16, F32 -> FP8: scales [block of 128 rows, or row, from p0 on][column block], which whoever has the piece fills first */
    uint8_t *dst;             /* the region, for this expert */
} mk_pack_piece;

MK_BOTH uint32_t mk_pack_size(uint32_t dtype)
{
    return dtype == MK_ST_F32 ? 4 : dtype == MK_ST_F16 || dtype == MK_ST_BF16 ? 2 : 1;
}
MK_BOTH uint32_t mk_pack_column_blocks(const mk_pack_piece *p)
{
    return mk_scale_blocks(p->rows.k, p->rows.scale_k);
}
MK_BOTH int mk_pack_quantises(const mk_pack_piece *p)
{
    return p->wtype == MK_W_FP8 && !p->scales;
}

/* One stored value as it is; *bad |= 1 for an infinity or a NaN. */
MK_BOTH float mk_pack_number(uint32_t dtype, const unsigned char *at, int *bad)
{
    uint32_t u;
    uint16_t h;
    switch (dtype) {
    case MK_ST_F32:
        memcpy(&u, at, 4);
        *bad |= (u & 0x7f800000u) == 0x7f800000u;
        return mk_bits_f32(u);
    case MK_ST_BF16:
        memcpy(&h, at, 2);
        *bad |= (h & 0x7f80u) == 0x7f80u;
        return mk_widen_bf16(h);
    case MK_ST_F16:
        memcpy(&h, at, 2);
        *bad |= (h & 0x7c00u) == 0x7c00u;
        return mk_f16_to_f32(h);
    case MK_ST_F8_E4M3:
        *bad |= (*at & 0x7f) == 0x7f;
        return mk_fp8_finite(*at);
    default: return mk_e8m0_to_f32(*at);
    }
}

/* Where value (i, 0) of the matrix lies, and how far it is to (i, 1), in values. */
MK_BOTH const unsigned char *mk_pack_row(const mk_pack_piece *p, uint64_t i, uint64_t *r, uint64_t *c, uint64_t *stride)
{
    uint64_t from = 0;
    if (p->rows.source == MK_SRC_PLAIN) from = p->p0;
    mk_rows_at(&p->rows, i, r, c);
    *stride = p->rows.source == MK_SRC_HEAD_T ? p->rows.cols : 1;
    return p->data + ((*r - from) * p->rows.cols + *c) * mk_pack_size(p->dtype);
}

MK_BOTH float mk_pack_stored_scale(const mk_pack_piece *p, uint64_t rb, uint64_t cb, int *bad)
{
    int nan = 0;
    float s = mk_pack_number(p->scale_dtype, p->scales + (rb * p->scale_cols + cb) * mk_pack_size(p->scale_dtype), &nan);
    *bad |= !mk_fp8_scale_good(s);
    return s;
}

/* |value (i, j)| as bits: largest of a block -> mk_fp8_block_scale. Values that are no numbers count as 0: mk_pack_group refuses them. */
MK_BOTH uint32_t mk_pack_magnitude(const mk_pack_piece *p, uint64_t i, uint32_t j)
{
    uint64_t r, c, stride;
    int bad = 0;
    const unsigned char *at = mk_pack_row(p, i, &r, &c, &stride);
    at += j * stride * mk_pack_size(p->dtype);
    uint32_t u = mk_f32_bits(mk_pack_number(p->dtype, at, &bad)) & 0x7fffffffu;
    return bad ? 0 : u;
}

/* The scale of column block cb and row block g of a half's rows. 0: not of this piece; 1: *scale, *at (floats from the segment's begin) are
 * set; -1: the checkpoint cannot be packed. */
MK_BOTH int mk_pack_scale(const mk_pack_piece *p, const mk_pack_seg *s, uint32_t cb, uint32_t g, uint32_t *at, float *scale)
{
    const uint32_t rows = mk_scale_rows(p->rows.scale_k);
    uint32_t first = g ? g * rows - s->phase : 0, end = (g + 1) * rows - s->phase, trb = 0, tcb = 0;
    int bad = 0;
    if (end > s->rows) end = s->rows;
    if (s->row0 + first < p->p0 || s->row0 + first >= p->p1) return 0;
    *at = (cb * s->halves + s->half) * s->nseg + g;
    if (mk_pack_quantises(p)) {
        *scale = p->block[((s->row0 + first) / rows - p->p0 / rows) * mk_pack_column_blocks(p) + cb];
        return 1;
    }
    if (!mk_rows_block(&p->rows, s->row0 + first, end - first, cb, &trb, &tcb)) return -1;
    *scale = mk_pack_stored_scale(p, trb, tcb, &bad);
    return bad ? -1 : 1;
}

/* Values [j0, j0 + 16 bytes' worth) of row i of the matrix, in the matrix's type; zeros beyond column k. Returns 0 when one of them cannot be packed. */
MK_BOTH int mk_pack_group(const mk_pack_piece *p, uint64_t i, uint32_t j0, uint32_t out[4])
{
    const uint32_t size = mk_pack_size(p->dtype), want = p->wtype == MK_W_FP8 ? 16 : 8, transposed = p->rows.source == MK_SRC_HEAD_T;
    const uint32_t n = j0 >= p->rows.k ? 0 : p->rows.k - j0 < want ? p->rows.k - j0 : want;
    uint64_t r, c, stride;
    const unsigned char *at = mk_pack_row(p, i, &r, &c, &stride);
    at += j0 * stride * size;
    uint64_t raw[8]; /* up to 16 values of 4 bytes */
    int bad = 0;
    out[0] = out[1] = out[2] = out[3] = 0;
    if (n == want && stride == 1 && (uintptr_t)at % 8 == 0) {
        const uint64_t *word = (const uint64_t *)__builtin_assume_aligned(at, 8);
        for (uint32_t k = 0; k < want * size / 8; k++) raw[k] = word[k];
    } else {
        for (uint32_t k = 0; k < n; k++) memcpy((unsigned char *)raw + k * size, at + k * stride * size, size);
    }
    if (p->wtype == MK_W_FP8 ? p->scales != 0 : p->dtype == MK_ST_BF16) { /* bytes move, nothing is computed */
        for (uint32_t k = 0; k < n; k++) mk_pack_number(p->dtype, (const unsigned char *)raw + k * size, &bad);
        memcpy(out, raw, n * size);
        return !bad;
    }
    uint64_t block = ~(uint64_t)0;
    float scale = 1;
    for (uint32_t k = 0; k < n; k++) {
        float x = mk_pack_number(p->dtype, (const unsigned char *)raw + k * size, &bad);
        if (p->scales) { /* blocks of the tensor */
            uint64_t rb = (transposed ? r + j0 + k : r) / MK_SCALE_ROWS, cb = (transposed ? c : c + j0 + k) / MK_SCALE_ROWS, b = rb * p->scale_cols + cb;
            if (b != block) scale = mk_pack_stored_scale(p, rb, cb, &bad);
            block = b;
            x *= scale;
        }
        if (p->wtype == MK_W_BF16) {
            uint32_t h = mk_narrow_bf16(x);
            bad |= (h & 0x7f80u) == 0x7f80u || (p->exact && (mk_f32_bits(x) & 0xffffu));
            out[k / 2] |= h << 16 * (k & 1);
        } else {
            const uint32_t rows = mk_scale_rows(p->rows.scale_k);
            uint64_t b = (i / rows - p->p0 / rows) * mk_pack_column_blocks(p) + (j0 + k) / mk_scale_columns(p->rows.k, p->rows.scale_k);
            if (b != block) scale = p->block[b];
            block = b;
            out[k / 4] |= (uint32_t)(bad ? 0 : mk_to_fp8_finite(x / scale)) << 8 * (k & 3);
        }
    }
    return !bad;
}

/* How the groups of a half are numbered: of rows [lo, hi), those of it that the piece holds; K block by K block, row by row, four a row. */
typedef struct mk_pack_range {
    uint32_t lo, hi, groups;
} mk_pack_range;
MK_BOTH mk_pack_range mk_pack_range_of(const mk_pack_piece *p, const mk_pack_seg *s)
{
    const uint32_t end = s->row0 + s->rows, per = mk_kblock_values(p->wtype);
    mk_pack_range x = {s->row0 < p->p0 ? p->p0 - s->row0 : 0, end <= p->p0 ? 0 : (end < p->p1 ? end : p->p1) - s->row0, 0};
    if (x.hi > s->rows || s->row0 >= p->p1 || x.lo >= x.hi) x.lo = x.hi = 0;
    x.groups = (p->rows.k + per - 1) / per * (x.hi - x.lo) * 4;
    return x;
}
/* Packs group g of them. */
MK_BOTH int mk_pack_put(const mk_pack_piece *p, const mk_pack_seg *s, mk_pack_range x, uint32_t g)
{
    const uint32_t per = mk_kblock_values(p->wtype), quarter = g % 4, row = g / 4 % (x.hi - x.lo) + x.lo, kb = g / 4 / (x.hi - x.lo);
    const uint32_t j0 = kb * per + quarter * (per / 4), esize = p->wtype == MK_W_FP8 ? 1 : 2;
    uint32_t out[4];
    int good = mk_pack_group(p, (uint64_t)s->row0 + row, j0, out);
    if (s->table) {
        uint32_t n = j0 >= p->rows.k ? 0 : (p->rows.k - j0) * esize < 16 ? (p->rows.k - j0) * esize : 16;
        uint8_t *to = p->dst + s->dst + ((uint64_t)(s->row0 + row) * p->rows.k + j0) * esize;
        if (n == 16 && (uintptr_t)to % 16 == 0)
            memcpy(__builtin_assume_aligned(to, 16), out, 16);
        else
            memcpy(to, out, n);
    } else {
        uint64_t scales = mk_segment_scale_bytes(p->wtype, p->rows.k, (uint32_t)s->nseg * s->halves, p->rows.scale_k);
        uint8_t *to = p->dst + s->dst + scales + mk_quarter_at((uint32_t)s->rows * s->halves, kb, quarter, (uint32_t)s->half * s->rows + row);
        memcpy(__builtin_assume_aligned(to, 16), out, 16);
    }
    return good;
}

#endif
