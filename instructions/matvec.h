/* What the matrix opcodes (GEMV, EXPERT_UP, EXPERT_DOWN, LM_HEAD) share on the twin: staging of the gathered vector, and the product of
 * one tape segment with it. */
#ifndef MK_MATVEC_H
#define MK_MATVEC_H

#include "instructions/op.h"

/* One segment (layout: instructions/isa.h, mk_wtype) of `rows` rows in `halves` blocks of scale segments (2 for gate|up). */
typedef struct mk_segment {
    const uint8_t *data;
    uint32_t wtype, rows, k;
    uint32_t halves;      /* rows are `halves` equal parts, each with its own nseg scale rows */
    uint32_t nseg, phase; /* of each part */
    uint32_t scale_k;     /* 0: a scale a row */
    uint32_t kb0, kb1;    /* K blocks [kb0, kb1) alone; kb1 0: all */
} mk_segment;

static inline uint64_t mk_weight_bytes(const mk_segment *s) /* without scales */
{
    uint32_t v = mk_kblock_values(s->wtype);
    return (uint64_t)((s->k + v - 1) / v) * s->rows * MK_KBLOCK_BYTES;
}

/* Floats a staged row of k values occupies: k rounded up to whole K blocks, the rest zero. */
static inline uint32_t mk_staged_stride(uint32_t k)
{
    return (k + 63) & ~63u;
}

/* Factors that a row's products still lack after mk_stage: 1, or a head's each. */
uint32_t mk_stage_norms(const mk_ctx *c, uint32_t k, uint32_t prologue, uint32_t norm_group);
/* In eight lanes. */
float mk_sum_squares(const float *x, uint32_t n);
/* Gathers values [in_off, in_off + k) of wait 0 for every row of the step into x[nrows][mk_staged_stride(k)] and applies the prologue: RMS (gamma at
 * param_off, eps) or HEADNORM (norm_group, eps). Values are rounded to bf16 where the kernel does it, before the division by the root mean square, which
 * commutes with the product: RMS leaves x * gamma and the product of row r is to be multiplied by norm[r]; HEADNORM leaves x, and the product of head h's
 * columns by norm[r * heads + h], heads = mk_stage_norms. Without rounding (act=f32, keep_f32), and where a head is not whole K blocks, x is complete and norm 1. */
void mk_stage(const mk_ctx *c, uint32_t in_off, uint32_t k, uint32_t prologue, uint32_t param_off, float eps, uint32_t norm_group,
              int keep_f32, float *x, float *norm);

/* y[r][i] = sum_k W[i][k] x[r][k] for the n given staged rows (pointers), in f32. The order of the sum depends on k only: eight
 * lanes, K blocks ascending, then the lanes pairwise. */
void mk_matvec(const mk_segment *s, const float *const *x, uint32_t n, float *const *y);

#endif
