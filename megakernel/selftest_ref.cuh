/* The plain kernels that the self-test holds the resident kernel to: one thread an output (or a channel), sums in double and in the order of the
 * formula, every index worked out anew. Written from instructions/isa.h and the comments of the opcodes, not from their code. */
#ifndef MK_SELFTEST_REF_CUH
#define MK_SELFTEST_REF_CUH

#include "instructions/latent.h"
#include "instructions/program.h"
#include "megakernel/rings.h"

#include <cuda_bf16.h>

/* A vector that an instruction waits for, without packets: values [row][width], trailers [row][nslice]. */
typedef struct ref_in {
    const float *value, *trailer;
    const uint32_t *start; /* [nslice + 1] */
    uint32_t width, nslice;
} ref_in;

/* What the routing reference on the host found. */
typedef struct ref_route {
    uint16_t id[MK_MAX_ROWS][MK_MAX_TOPK]; /* ascending */
    float weight[MK_MAX_ROWS][MK_MAX_TOPK];
} ref_route;

typedef struct ref {
    const mk_insn *insn;    /* the instructions under test */
    const uint32_t *worker; /* of each */
    uint32_t n;
    mk_step step;
    ref_in in[3];
    const uint32_t *out_start;
    uint32_t out_width;
    const mk_vec *vec;
    const uint64_t *tape_base;
    const uint8_t *tape, *expert, *embed, *kv;
    const float *param;
    const float *local;     /* before the step: [worker][local_words] */
    uint64_t local_words, kv_page_bytes;
    const uint32_t *page;
    uint32_t max_pages;
    float *state;           /* copy of bytes [lo, lo + 4 * words) of each state slot: changed in place */
    uint64_t state_lo, state_words;
    const float *staged;    /* input after the prologue: [row][in[0].width] */
    const ref_route *route;
    const float *q;         /* attention: [row][head][channels] after norm and rotation */
    float *score;           /* [row][head][tokens] */
    uint32_t tokens;        /* capacity */
    float *want;            /* by opcode: vectors [row][out_width]; LOCAL [instruction][row][cap]; logits; partials; cache rows */
    float *aux;             /* DELTA: o before norm and gate, [row][out_width] */
    uint32_t cap;
} ref;

static __device__ float ref_fp8(uint32_t b)
{
    uint32_t e = b >> 3 & 15, m = b & 7;
    float v = e ? __uint_as_float((e + 120) << 23 | m << 20) : m * 0.001953125f; /* (1 + m/8) 2^(e-7), m 2^-9 */
    return b & 0x80 ? -v : v;
}
static __device__ float ref_bf16(const void *p)
{
    return __uint_as_float((uint32_t)*(const uint16_t *)p << 16);
}

/* A segment as isa.h draws it. */
typedef struct ref_segment {
    const uint8_t *at;
    uint32_t wtype, rows, k, halves, nseg, phase, scale_k;
} ref_segment;
static __device__ double ref_weight(const ref_segment *s, uint32_t row, uint32_t k)
{
    if (s->wtype == MK_W_BF16) return ref_bf16(s->at + ((size_t)(k / 8) * s->rows + row) * 16 + k % 8 * 2);
    uint32_t blocks = s->scale_k ? (s->k + s->scale_k - 1) / s->scale_k : 1, part = s->rows / s->halves, all = s->nseg * s->halves;
    uint32_t bytes = (blocks * all * 4 + 127) / 128 * 128, half = row / part, i = row % part;
    float scale = ((const float *)s->at)[s->scale_k ? k / s->scale_k * all + half * s->nseg + (s->phase + i) / 128 : i]; /* 0: a scale a row */
    return (double)ref_fp8(s->at[bytes + ((size_t)(k / 16) * s->rows + row) * 16 + k % 16]) * scale;
}
static __device__ double ref_dot(const ref_segment *s, uint32_t row, const float *x)
{
    double sum = 0;
    for (uint32_t k = 0; k < s->k; k++) sum += ref_weight(s, row, k) * x[k];
    return sum;
}
static __device__ double ref_sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}
static __device__ float ref_round(double x)
{
    return __bfloat162float(__float2bfloat16_rn((float)x));
}

/* A block a row: the prologue on values [off, off + k). */
static __global__ void ref_stage(ref a, float *staged, uint32_t off, uint32_t k, uint32_t prologue, uint32_t param_off, float eps, uint32_t group, int f32)
{
    const uint32_t r = blockIdx.x, width = a.in[0].width;
    const float *x = a.in[0].value + (size_t)r * width + off;
    for (uint32_t i = threadIdx.x; i < k; i += blockDim.x) {
        double y = x[i], sum = 0, rstd = 1; /* instructions/tolerance.h: bf16(x * gamma), then 1/rms */
        if (prologue == MK_PRO_RMS) {
            for (uint32_t j = 0; j < k; j++) sum += (double)x[j] * x[j];
            rstd = 1 / sqrt(sum / k + eps);
            y *= a.param[param_off + i];
        } else if (prologue == MK_PRO_HEADNORM) {
            uint32_t first = off + i / group * group;
            for (uint32_t s = 0; s < a.in[0].nslice; s++)
                if (a.in[0].start[s] >= first && a.in[0].start[s] < first + group) sum += a.in[0].trailer[r * a.in[0].nslice + s];
            rstd = 1 / sqrt(sum / group + eps);
        }
        staged[(size_t)r * width + off + i] = (float)((f32 ? y : ref_round(y)) * rstd);
    }
}

/* blockIdx.y: instruction; a thread an output of one row. */
static __global__ void ref_gemv(ref a)
{
    const mk_insn *in = &a.insn[blockIdx.y];
    const mk_gemv *g = &in->gemv;
    const uint32_t at = blockIdx.x * blockDim.x + threadIdx.x, i = at % g->n, r = at / g->n, silu = g->epilogue == MK_EPI_SILU;
    if (r >= a.step.nrows) return;
    ref_segment s = {a.tape + a.tape_base[a.worker[blockIdx.y]] + in->tape_off, g->wtype, g->n * (silu ? 2 : 1), g->k, silu ? 2u : 1u, g->nseg, g->phase, g->scale_k};
    const float *x = a.staged + (size_t)r * a.in[0].width + g->in_off;
    double y = ref_dot(&s, i, x) * g->scale;
    const bool local = a.vec[in->signal_vec].scope == MK_LOCAL;
    if (silu) y = y * ref_sigmoid(y) * (ref_dot(&s, g->n + i, x) * g->scale);
    if (g->epilogue == MK_EPI_GATED) y *= ref_sigmoid(a.in[2].value[(size_t)r * a.in[2].width + g->gate_off]);
    if (g->epilogue == MK_EPI_ADD || g->epilogue == MK_EPI_GATED) {
        const mk_wait *w = &in->wait[1];
        if (a.vec[w->vec].scope == MK_LOCAL)
            y += (a.local + a.worker[blockIdx.y] * a.local_words + a.vec[w->vec].offset / 4)[r * g->n + i];
        else
            y += a.in[1].value[(size_t)r * a.in[1].width + a.in[1].start[w->slice0] + i];
    }
    if (local)
        a.want[((size_t)blockIdx.y * MK_MAX_ROWS + r) * a.cap + i] = (float)y;
    else
        a.want[(size_t)r * a.out_width + a.out_start[in->signal_slice] + i] = (float)y;
}

static __global__ void ref_embed(ref a)
{
    const mk_insn *in = &a.insn[blockIdx.y];
    const mk_embed *e = &in->embed;
    const uint32_t at = blockIdx.x * blockDim.x + threadIdx.x, i = at % e->n, r = at / e->n;
    if (r >= a.step.nrows) return;
    size_t k = (size_t)a.step.row[r].token * e->hidden + e->first + i;
    float v = e->wtype == MK_F32 ? ((const float *)(a.embed + e->embed_off))[k] : ref_bf16(a.embed + e->embed_off + k * 2);
    a.want[(size_t)r * a.out_width + a.out_start[in->signal_slice] + i] = v * e->scale;
}

/* A block an item, a thread a value channel; rows in order. The delta rule's state is [dv][dk]. */
static __global__ void ref_delta(ref a)
{
    __shared__ float x[3 * 1024], decay[1024]; /* of the row: q, k, v; f */
    const mk_insn *in = &a.insn[blockIdx.x];
    const mk_delta *d = &in->delta;
    const uint32_t v = threadIdx.x, dk = d->dk, n = mk_delta_channels(d), head = d->decay == MK_DECAY_HEAD, taps = d->taps;
    const float *w = a.param + d->param_off, *par = w + mk_delta_rate_at(d), *o_norm = par + 1 + mk_delta_decays(d);
    const uint8_t *tape = a.tape + a.tape_base[a.worker[blockIdx.x]] + in->tape_off;
    const ref_segment W_f = {tape, d->low[0].wtype, dk, d->rank, 1, d->low[0].nseg, d->low[0].phase, d->low[0].scale_k};
    const ref_segment W_z = {tape + mk_delta_segment_bytes(d, 0), d->low[1].wtype, d->dv, d->rank, 1, d->low[1].nseg, d->low[1].phase, d->low[1].scale_k};
    for (uint32_t r = 0; r < a.step.nrows; r++) {
        const mk_row *row = &a.step.row[r];
        const float *qkv = a.in[0].value + (size_t)r * a.in[0].width, *f = a.in[1].value + (size_t)r * a.in[1].width + d->f_off, *g = f - d->f_off + d->z_off;
        float *at = a.state + row->state_write * a.state_words + (d->state_off - a.state_lo) / 4, *s = at + mk_delta_matrix_at(d) / 4 + v * dk;
        for (uint32_t c = v; c < n; c += blockDim.x) {
            float *u = at + (size_t)c * taps;
            double y = 0;
            for (uint32_t j = 0; j < taps; j++) {
                const float before = row->flags & MK_ROW_FIRST ? 0 : u[j + 1 < taps ? j + 1 : j];
                u[j] = j + 1 < taps ? before : qkv[c < dk ? d->q_off + c : c < 2 * dk ? d->k_off + c - dk : d->v_off + c - 2 * dk];
                y += (double)w[c * taps + j] * u[j];
            }
            x[c] = (float)(y * ref_sigmoid(y));
        }
        for (uint32_t i = v; i < mk_delta_decays(d); i += blockDim.x) decay[i] = d->rank ? (float)ref_dot(&W_f, i, f) : f[i];
        __syncthreads();
        double qq = 0, kk = 0, m = 0, o = 0, beta = ref_sigmoid(a.in[2].value[(size_t)r * a.in[2].width + d->b_off]);
        for (uint32_t i = 0; i < dk; i++) {
            qq += (double)x[i] * x[i];
            kk += (double)x[dk + i] * x[dk + i];
            if (row->flags & MK_ROW_FIRST) s[i] = 0;
        }
        const double rq = 1 / sqrt(qq + 1e-6) / sqrt((double)dk), rk = 1 / sqrt(kk + 1e-6);
        for (uint32_t i = 0; i < dk; i++) {
            double t = (double)decay[head ? 0 : i] + par[1 + (head ? 0 : i)], g = -exp((double)par[0]) * (t > 20 ? t : log1p(exp(t)));
            s[i] = (float)(s[i] * exp(g));
            m += s[i] * (x[dk + i] * rk);
        }
        const double delta = beta * (x[2 * dk + v] - m);
        for (uint32_t i = 0; i < dk; i++) {
            s[i] = (float)(s[i] + x[dk + i] * rk * delta);
            o += s[i] * (x[i] * rq);
        }
        const double z = d->rank ? ref_dot(&W_z, v, g) : g[v], gate = d->gate == MK_GATE_SILU ? z * ref_sigmoid(z) : ref_sigmoid(z);
        const size_t to = (size_t)r * a.out_width + a.out_start[in->signal_slice] + v;
        a.aux[to] = (float)o;
        a.want[to] = (float)(o * o_norm[v] * gate);
        __syncthreads();
    }
}

/* ---- attention ------------------------------------------------------------------------------------------------------ */

/* Value i of a token's key (what 0) or value (1) as head h of the layer sees it. */
static __device__ float ref_cache(const ref *a, uint32_t slot, uint32_t t, uint32_t h, int what, uint32_t i)
{
    const mk_insn *in = a->insn;
    const uint8_t *page = a->kv + a->page[(size_t)slot * a->max_pages + t / MK_PAGE] * a->kv_page_bytes;
    if (in->opcode == MK_OP_MLA_PARTIAL && in->mla.cache == MK_CACHE_FP8) { /* as latent.h draws it */
        const uint32_t latent = in->mla.latent;
        const uint8_t *row = page + in->mla.kv_off + (size_t)(t % MK_PAGE) * mk_latent_row_bytes(latent, in->mla.rope, MK_CACHE_FP8, 2);
        if (i < latent) return ref_fp8(row[i]) * ((const float *)(row + latent))[i / 128];
        return ref_bf16(row + mk_latent_key_at(latent, MK_CACHE_FP8, 2) + (i - latent) * 2);
    }
    if (in->opcode == MK_OP_MLA_PARTIAL) return ref_bf16(page + in->mla.kv_off + ((size_t)(t % MK_PAGE) * (in->mla.latent + in->mla.rope) + i) * 2);
    const mk_gqa *g = &in->gqa;
    uint32_t kv = h / (g->heads / g->kv_heads);
    return ref_bf16(page + g->kv_off + ((((size_t)kv * 2 + what) * MK_PAGE + t % MK_PAGE) * g->dim + i) * 2);
}
static __device__ void ref_turn(double *x, double *y, float pos, float freq)
{
    const double angle = pos * freq, c = cos(angle), s = sin(angle), u = *x, v = *y; /* the product is rounded to f32, as in the reference */
    *x = u * c - v * s;
    *y = v * c + u * s;
}

/* A thread a head of a row. */
static __global__ void ref_query(ref a, float *q)
{
    const mk_insn *in = a.insn;
    const int mla = in->opcode == MK_OP_MLA_PARTIAL;
    const uint32_t heads = mla ? in->mla.all_heads : in->gqa.heads, h = blockIdx.x * blockDim.x + threadIdx.x, r = blockIdx.y;
    if (h >= heads) return;
    const float pos = (float)a.step.row[r].pos;
    if (mla) {
        const mk_mla *m = &in->mla;
        const uint32_t n = m->latent + m->rope;
        float *to = q + ((size_t)r * heads + h) * n;
        for (uint32_t i = 0; i < m->latent; i++) to[i] = a.in[0].value[(size_t)r * a.in[0].width + h * m->latent + i];
        for (uint32_t i = 0; i < m->rope; i += 2) {
            const float *x = a.in[1].value + (size_t)r * a.in[1].width + m->in_off + h * m->qk_stride + i;
            double u = x[0], v = x[1];
            if (m->rotary) ref_turn(&u, &v, pos, a.param[m->param_off + m->latent + i / 2]);
            to[m->latent + i] = (float)u;
            to[m->latent + i + 1] = (float)v;
        }
    } else {
        const mk_gqa *g = &in->gqa;
        const float *x = a.in[0].value + (size_t)r * a.in[0].width + g->q_off + h * g->q_stride, *gamma = a.param + g->param_off;
        float *to = q + ((size_t)r * heads + h) * g->dim;
        double sum = 0;
        for (uint32_t i = 0; i < g->dim; i++) sum += (double)x[i] * x[i];
        const double rstd = 1 / sqrt(sum / g->dim + g->eps);
        for (uint32_t i = 0; i < g->dim; i++) to[i] = g->norm ? (float)(x[i] * rstd * gamma[i]) : x[i];
        for (uint32_t i = 0; i < g->rope / 2; i++) {
            double u = to[i], v = to[i + g->rope / 2];
            ref_turn(&u, &v, pos, gamma[(g->norm ? g->dim : 0) + i]);
            to[i] = (float)u;
            to[i + g->rope / 2] = (float)v;
        }
    }
}

/* A thread a token; blockIdx.y: head, .z: row. */
static __global__ void ref_scores(ref a)
{
    const mk_insn *in = a.insn;
    const int mla = in->opcode == MK_OP_MLA_PARTIAL;
    const uint32_t heads = mla ? in->mla.all_heads : in->gqa.heads, n = mla ? in->mla.latent + in->mla.rope : in->gqa.dim;
    const uint32_t t = blockIdx.x * blockDim.x + threadIdx.x, h = blockIdx.y, r = blockIdx.z;
    if (t > a.step.row[r].pos) return;
    double s = 0;
    for (uint32_t i = 0; i < n; i++) s += (double)a.q[((size_t)r * heads + h) * n + i] * ref_cache(&a, a.step.row[r].slot, t, h, 0, i);
    a.score[((size_t)r * heads + h) * a.tokens + t] = (float)(s * (mla ? in->mla.scale : in->gqa.scale));
}

/* A thread a channel; blockIdx.x: split, .y: head, .z: row. */
static __global__ void ref_partials(ref a)
{
    const mk_insn *in = a.insn;
    const int mla = in->opcode == MK_OP_MLA_PARTIAL;
    const uint32_t heads = mla ? in->mla.all_heads : in->gqa.heads, n = mla ? in->mla.latent : in->gqa.dim;
    const uint32_t s = blockIdx.x, h = blockIdx.y, r = blockIdx.z, pos = a.step.row[r].pos, grain = mla ? in->mla.grain : in->gqa.grain, most = mla ? in->mla.most : in->gqa.most;
    const uint32_t per = mk_split_pages(pos, grain, most) * MK_PAGE, first = s * per;
    const uint32_t end = pos + 1 < first + per ? pos + 1 : first + per;
    const float *score = a.score + ((size_t)r * heads + h) * a.tokens;
    float *to = a.want + (((size_t)r * MK_MAX_SPLITS + s) * heads + h) * (n + 4);
    if (first > pos) return;
    float max = -INFINITY;
    for (uint32_t t = first; t < end; t++) max = fmaxf(max, score[t]);
    for (uint32_t i = threadIdx.x; i < n + 2; i += blockDim.x) {
        double sum = 0;
        for (uint32_t t = first; t < end; t++) sum += exp((double)score[t] - max) * (i < n ? ref_cache(&a, a.step.row[r].slot, t, h, 1, i) : 1);
        to[i] = i == n ? max : (float)sum;
    }
}

/* partial: [row][split][head][n + 4], as the step reads them. */
static __global__ void ref_combine(ref a, const float *partial)
{
    const mk_insn *in = &a.insn[blockIdx.y];
    const mk_mla *m = &in->mla;
    const uint32_t at = blockIdx.x * blockDim.x + threadIdx.x, i = at % m->n, r = at / m->n, floats = m->latent + 4;
    if (r >= a.step.nrows) return;
    const uint32_t splits = mk_splits(a.step.row[r].pos, m->grain, m->most);
    double top = 0, sum = 0;
    float max = -INFINITY;
    for (int pass = 0; pass < 2; pass++)
        for (uint32_t s = 0; s < splits; s++) {
            const float *p = partial + (((size_t)r * MK_MAX_SPLITS + s) * m->all_heads + m->head0) * floats;
            if (!pass) max = fmaxf(max, p[m->latent]);
            double w = exp((double)p[m->latent] - max);
            if (pass) top += w * p[m->first + i], sum += w * p[m->latent + 1];
        }
    double y = top / sum;
    if (m->gate) y *= ref_sigmoid(a.in[1].value[(size_t)r * a.in[1].width + m->in_off + m->head0 * m->qk_stride + m->first + i]);
    a.want[(size_t)r * a.out_width + a.out_start[in->signal_slice] + i] = (float)y;
}

/* A thread a row: the cache row [latent | k_pe], cap values apart. */
static __global__ void ref_kv_append(ref a)
{
    const mk_mla *m = &a.insn[0].mla;
    const uint32_t r = threadIdx.x;
    const float *x = a.in[0].value + (size_t)r * a.in[0].width + m->in_off, *gamma = a.param + m->param_off;
    float *to = a.want + (size_t)r * a.cap;
    if (r >= a.step.nrows) return;
    double sum = 0;
    for (uint32_t i = 0; i < m->latent; i++) sum += (double)x[i] * x[i];
    for (uint32_t i = 0; i < m->latent; i++) to[i] = (float)(x[i] / sqrt(sum / m->latent + m->eps) * gamma[i]);
    for (uint32_t i = 0; i < m->rope; i += 2) {
        double u = x[m->latent + i], v = x[m->latent + i + 1];
        if (m->rotary) ref_turn(&u, &v, (float)a.step.row[r].pos, gamma[m->latent + i / 2]);
        to[m->latent + i] = (float)u;
        to[m->latent + i + 1] = (float)v;
    }
}

/* A thread a row, a block a KV head: [row][KV head][k, v][dim]. */
static __global__ void ref_gqa_append(ref a)
{
    const mk_gqa *g = &a.insn[blockIdx.x].gqa;
    const uint32_t r = threadIdx.x, dim = g->dim;
    if (r >= a.step.nrows) return;
    const float *in = a.in[0].value + (size_t)r * a.in[0].width, *k = in + g->k_off + g->head * dim, *v = in + g->v_off + g->head * dim;
    const float *gamma = a.param + g->param_off;
    float *to = a.want + ((size_t)r * g->kv_heads + g->head) * 2 * dim;
    double sum = 0;
    for (uint32_t i = 0; i < dim; i++) sum += (double)k[i] * k[i];
    for (uint32_t i = 0; i < dim; i++) {
        to[i] = g->norm ? (float)(k[i] / sqrt(sum / dim + g->eps) * gamma[i]) : k[i];
        to[dim + i] = v[i];
    }
    for (uint32_t i = 0; i < g->rope / 2; i++) {
        double x = to[i], y = to[i + g->rope / 2];
        ref_turn(&x, &y, (float)a.step.row[r].pos, gamma[(g->norm ? dim : 0) + i]);
        to[i] = (float)x;
        to[i + g->rope / 2] = (float)y;
    }
}

/* ---- experts, head --------------------------------------------------------------------------------------------------- */

/* A thread an activation of a row's rank-th expert; blockIdx.y: rank, .z: row. */
static __global__ void ref_expert_up(ref a)
{
    const mk_expert *e = &a.insn[0].expert;
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, rank = blockIdx.y, r = blockIdx.z;
    if (i >= e->inter) return;
    uint32_t t = 0;
    while (mk_expert_start(t + 1, e->inter, e->T) <= i) t++;
    const uint32_t first = mk_expert_start(t, e->inter, e->T), n = mk_expert_start(t + 1, e->inter, e->T) - first;
    ref_segment s = {a.expert + e->base + a.route->id[r][rank] * e->expert_stride + (uint64_t)t * e->slice_stride, e->wtype, 2 * n, e->k, 2, e->nseg, first % 128, 128};
    const float *x = a.staged + (size_t)r * a.in[0].width;
    const double gate = ref_dot(&s, i - first, x), up = ref_dot(&s, n + i - first, x);
    a.want[(size_t)r * a.out_width + rank * e->inter + i] = (float)(gate * ref_sigmoid(gate) * up);
}

static __global__ void ref_expert_down(ref a)
{
    const mk_insn *in = &a.insn[blockIdx.y];
    const mk_expert *e = &in->expert;
    const uint32_t at = blockIdx.x * blockDim.x + threadIdx.x, i = at % e->n, r = at / e->n;
    if (r >= a.step.nrows) return;
    const mk_wait *w = &in->wait[2];
    double y = a.vec[w->vec].scope == MK_LOCAL ? (a.local + a.worker[blockIdx.y] * a.local_words + a.vec[w->vec].offset / 4)[r * e->n + i]
                                               : a.in[2].value[(size_t)r * a.in[2].width + a.in[2].start[w->slice0] + i];
    for (uint32_t k = 0; k < e->topk; k++) {
        ref_segment s = {a.expert + e->base + a.route->id[r][k] * e->expert_stride + (uint64_t)e->t * e->slice_stride, e->wtype, e->n, e->k, 1, e->nseg, e->phase, 128};
        y += a.route->weight[r][k] * ref_dot(&s, i, a.in[0].value + (size_t)r * a.in[0].width + k * e->inter);
    }
    a.want[(size_t)r * a.out_width + a.out_start[in->signal_slice] + i] = (float)y;
}

static __global__ void ref_lm_head(ref a)
{
    const mk_insn *in = &a.insn[blockIdx.y];
    const mk_lm_head *l = &in->lm_head;
    const uint32_t at = blockIdx.x * blockDim.x + threadIdx.x, i = at % l->n, r = at / l->n;
    if (r >= a.step.nrows) return;
    ref_segment s = {a.tape + a.tape_base[a.worker[blockIdx.y]] + in->tape_off, l->wtype, l->n, l->k, 1, l->nseg, l->phase, l->scale_k};
    a.want[(size_t)r * l->vocab + l->row0 + i] = (float)ref_dot(&s, i, a.staged + (size_t)r * a.in[0].width);
}

/* ---- random memory --------------------------------------------------------------------------------------------------- */

static __device__ uint64_t ref_random(uint64_t seed, uint64_t i)
{
    uint64_t x = seed + (i + 1) * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}
/* Uniform in +-scale: f32, or bf16. */
static __global__ void ref_fill(void *p, uint64_t n, int bf16, float scale, uint64_t seed)
{
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (uint64_t)blockDim.x) {
        float v = (float)(int32_t)(ref_random(seed, i) >> 32) * 0x1p-31f * scale;
        if (bf16)
            ((__nv_bfloat16 *)p)[i] = __float2bfloat16_rn(v);
        else
            ((float *)p)[i] = v;
    }
}
/* n cache rows in FP8 of such values, scale at most 1.75: a thread a value. Groups are at random whole, a quarter, or coded as e4m3's subnormals alone (under a scale 2^15 as
 * large): so a wrong scale is seen, and a subnormal that is taken for 0. */
static __global__ void ref_fill_latents(uint8_t *p, uint64_t n, uint32_t latent, uint32_t rope, float scale, uint64_t seed)
{
    const uint32_t width = latent + rope, bytes = mk_latent_row_bytes(latent, rope, MK_CACHE_FP8, 2), key = mk_latent_key_at(latent, MK_CACHE_FP8, 2);
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < n * width; i += gridDim.x * (uint64_t)blockDim.x) {
        const uint32_t c = (uint32_t)(i % width);
        uint8_t *row = p + i / width * bytes;
        float v = (float)(int32_t)(ref_random(seed, i) >> 32) * 0x1p-31f * scale;
        if (c >= latent) {
            ((__nv_bfloat16 *)(row + key))[c - latent] = __float2bfloat16_rn(v);
            continue;
        }
        const uint32_t kind = (uint32_t)(ref_random(seed ^ 1, i / width * 8 + c / MK_LATENT_GROUP) >> 32) % 3;
        const float part = kind == 1 ? 0.25f : 1;
        const uint32_t by = mk_latent_scale(__float_as_uint(scale * part)) + (kind == 2 ? 15u << 23 : 0);
        row[c] = mk_latent_code(v * part, by);
        ((uint32_t *)(row + latent))[c / MK_LATENT_GROUP] = by;
    }
}

#endif
