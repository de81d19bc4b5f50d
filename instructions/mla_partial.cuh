/* MLA_PARTIAL on the device, on CUDA cores: an item is eight heads over one split, a page at a time with a running maximum. For the scores a warp has
 * two tokens and its lanes the channels; for the sums a thread has one latent channel of all heads. Semantics: mla_partial.c. */
#ifndef MK_MLA_PARTIAL_CUH
#define MK_MLA_PARTIAL_CUH

#include "instructions/kv_append.cuh"

#define MK_MLA_LATENT 512u /* at most: one thread a channel */
#define MK_MLA_ROW    640u /* latent + rope at most */

typedef struct mk_mla_scratch {
    float q[MK_HEAD_GROUP][MK_MLA_ROW];
    float p[MK_HEAD_GROUP][MK_PAGE];
    float max[MK_HEAD_GROUP], sum[MK_HEAD_GROUP], shrink[MK_HEAD_GROUP];
} mk_mla_scratch;
static_assert(sizeof(mk_mla_scratch) <= MK_STAGING, "scratch fits the staging area");

/* q~ and q_pe of the item's heads: a warp a head. */
MK_DEV void mk_mla_queries(const mk_dev *d, const mk_mla *m, uint32_t r, uint32_t h0, uint32_t heads, mk_mla_scratch *x)
{
    uint32_t h = d->warp >> 1;
    if (h >= heads) return;
    const uint32_t pe = d->warp & 1, latent = m->latent;
    float *to = x->q[h] + (pe ? latent : 0);
    if (pe && !m->rope) return;
    mk_warp_read(&d->in->wait[pe], r, pe ? m->in_off + (h0 + h) * m->qk_stride : (h0 + h) * latent, pe ? m->rope : latent, to);
    if (pe && m->rotary)
        for (uint32_t i = d->lane; i < m->rope / 2; i += 32)
            mk_rotate_pair(to + 2 * i, to + 2 * i + 1, __ldg(d->a->param + m->param_off + latent + i), d->step->row[r].pos);
}

/* Lanes that differ in bit M exchange halves of 2 M values and add. */
template <int M> MK_DEV void mk_fold(float *v, uint32_t lane)
{
#pragma unroll
    for (int i = 0; i < M; i++) {
        const float lo = v[i], hi = v[i + M];
        v[i] = __fadd_rn(lane & M ? hi : lo, __shfl_xor_sync(0xffffffffu, lane & M ? lo : hi, M));
    }
}
/* The totals over the warp of 16 values a lane: lane l gets that of value l mod 16. */
MK_DEV float mk_warp_totals(float *v, uint32_t lane)
{
    mk_fold<8>(v, lane);
    mk_fold<4>(v, lane);
    mk_fold<2>(v, lane);
    mk_fold<1>(v, lane);
    return __fadd_rn(v[0], __shfl_xor_sync(0xffffffffu, v[0], 16));
}

/* Scores of the page's tokens [0, tokens): two at a time and warp. */
MK_DEV void mk_mla_scores(const mk_dev *d, const mk_mla *m, const uint8_t *page, uint32_t tokens, uint32_t heads, mk_mla_scratch *x)
{
    constexpr int TOK = 2;
    const uint32_t n = m->latent + m->rope;
#pragma unroll 1
    for (uint32_t t0 = d->warp * TOK; t0 < tokens; t0 += MK_WARPS * TOK) {
        const uint8_t *c0 = page + (size_t)t0 * n * 2, *c1 = t0 + 1 < tokens ? c0 + n * 2 : c0;
        float acc[TOK * MK_HEAD_GROUP]; /* [token][head] */
#pragma unroll
        for (int i = 0; i < TOK * MK_HEAD_GROUP; i++) acc[i] = 0;
#pragma unroll 1
        for (uint32_t i = 8 * d->lane; i < n; i += 256) {
            const uint4 a = __ldcg((const uint4 *)(c0 + i * 2)), b = __ldcg((const uint4 *)(c1 + i * 2));
            const uint32_t u[TOK][4] = {{a.x, a.y, a.z, a.w}, {b.x, b.y, b.z, b.w}};
#pragma unroll
            for (int k = 0; k < 4; k++) /* pairs of channels */
#pragma unroll
                for (int h = 0; h < MK_HEAD_GROUP; h++) {
                    const float2 q = *(const float2 *)(x->q[h] + i + 2 * k);
#pragma unroll
                    for (int t = 0; t < TOK; t++) {
                        float *sum = &acc[t * MK_HEAD_GROUP + h];
                        *sum = __fmaf_rn(q.x, __uint_as_float(u[t][k] << 16), *sum);
                        *sum = __fmaf_rn(q.y, __uint_as_float(u[t][k] & 0xffff0000u), *sum);
                    }
                }
        }
        const float s = mk_warp_totals(acc, d->lane);
        const uint32_t t = t0 + (d->lane / MK_HEAD_GROUP & 1), h = d->lane % MK_HEAD_GROUP;
        if (d->lane < TOK * MK_HEAD_GROUP && t < tokens && h < heads) x->p[h][t] = m->scale * s;
    }
}
static_assert(MK_HEAD_GROUP == 8, "16 totals: two tokens of a group of heads");

/* Scores -> exp(s - running maximum), by a warp a head; what was summed before shrinks by x->shrink. */
MK_DEV void mk_mla_softmax(const mk_dev *d, uint32_t tokens, uint32_t heads, bool first, mk_mla_scratch *x)
{
    const uint32_t h = d->warp;
    if (h >= heads) return;
    float s[2], old = first ? -INFINITY : x->max[h], max = old, sum = 0;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        s[k] = d->lane + 32 * k < tokens ? x->p[h][d->lane + 32 * k] : -INFINITY;
        max = fmaxf(max, s[k]);
    }
#pragma unroll
    for (int k = 16; k; k >>= 1) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, k));
#pragma unroll
    for (int k = 0; k < 2; k++) {
        float p = d->lane + 32 * k < tokens ? mk_expf(s[k] - max) : 0.0f;
        x->p[h][d->lane + 32 * k] = p;
        sum += p;
    }
    sum = mk_warp_sum(sum);
    __syncwarp();
    if (d->lane == 0) {
        float shrink = first ? 0.0f : mk_expf(old - max);
        x->shrink[h] = shrink;
        x->max[h] = max;
        x->sum[h] = first ? sum : __fmaf_rn(x->sum[h], shrink, sum);
    }
}

MK_DEV void mk_mla_item(const mk_dev *d, const mk_mla *m, uint32_t r, uint32_t split, uint32_t group, float *bulk, mk_mla_scratch *x)
{
    const mk_row *row = &d->step->row[r];
    const uint32_t latent = m->latent, n = latent + m->rope, h0 = m->head0 + group * MK_HEAD_GROUP, left = m->heads - group * MK_HEAD_GROUP;
    const uint32_t heads = left < MK_HEAD_GROUP ? left : MK_HEAD_GROUP, per = mk_split_pages(row->pos) * MK_PAGE, first = split * per;
    const uint32_t end = row->pos + 1 < first + per ? row->pos + 1 : first + per, ch = d->tid;
    float acc[MK_HEAD_GROUP];
    mk_mla_queries(d, m, r, h0, heads, x);
    mk_sync();
    if (!r && !group) mk_trace_input(d);
    mk_trace_bytes(d, (end - first) * n * 2);
    for (uint32_t t0 = first; t0 < end; t0 += MK_PAGE) {
        uint32_t tokens = end - t0 < MK_PAGE ? end - t0 : MK_PAGE;
        const uint8_t *page = mk_kv_at(d, m->kv_off, row->slot, t0, n * 2);
        mk_mla_scores(d, m, page, tokens, heads, x);
        mk_sync();
        mk_mla_softmax(d, tokens, heads, t0 == first, x);
        mk_sync();
        if (ch < latent) {
            const uint16_t *c = (const uint16_t *)page + ch;
#pragma unroll
            for (int h = 0; h < MK_HEAD_GROUP; h++) acc[h] = t0 == first ? 0.0f : __fmul_rn(acc[h], x->shrink[h]);
            for (uint32_t t = 0; t < tokens; t += 4) { /* p is zero beyond the last token */
                float v[4];
#pragma unroll
                for (int k = 0; k < 4; k++) v[k] = mk_bf16_value(__ldcg(c + (size_t)(t + k < tokens ? t + k : t) * n));
#pragma unroll
                for (int h = 0; h < MK_HEAD_GROUP; h++) {
                    if (h >= heads) break;
                    const float4 p = *(const float4 *)(x->p[h] + t);
                    acc[h] = __fmaf_rn(p.w, v[3], __fmaf_rn(p.z, v[2], __fmaf_rn(p.y, v[1], __fmaf_rn(p.x, v[0], acc[h]))));
                }
            }
        }
        mk_sync();
    }
    float *dst = bulk + (((size_t)r * MK_MAX_SPLITS + split) * m->all_heads + h0) * mk_partial_floats(latent);
#pragma unroll
    for (int h = 0; h < MK_HEAD_GROUP; h++) {
        if (h >= heads) break;
        if (ch < latent) __stcg(dst + (size_t)h * mk_partial_floats(latent) + ch, acc[h]);
    }
    if (ch < heads) {
        __stcg(dst + (size_t)ch * mk_partial_floats(latent) + latent, x->max[ch]);
        __stcg(dst + (size_t)ch * mk_partial_floats(latent) + latent + 1, x->sum[ch]);
    }
    mk_sync();
}

MK_DEV void mk_mla_partial_run(const mk_dev *d)
{
    const mk_mla *m = &d->in->mla;
    const uint32_t groups = (m->heads + MK_HEAD_GROUP - 1) / MK_HEAD_GROUP;
    mk_mla_scratch *x = (mk_mla_scratch *)d->sh->staging;
    float *bulk = (float *)mk_bulk_at(d, d->in->signal_vec);
    mk_staged_drop(d);
    mk_bulk_wait(d, &d->in->wait[2]);
    for (uint32_t r = 0; r < d->step->nrows; r++) {
        uint32_t items = mk_splits(d->step->row[r].pos) * groups, skip = r % m->parts;
        for (uint32_t i = m->part >= skip ? m->part - skip : m->part + m->parts - skip; i < items; i += m->parts)
            mk_mla_item(d, m, r, i / groups, i % groups, bulk, x);
    }
    mk_bulk_signal(d, d->in->signal_vec);
}

#endif
