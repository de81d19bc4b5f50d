/* DELTA_STEP: short causal depthwise convolution of q, k and v, then the gated delta rule on one head and dv of its value channels (columns of the state).
 *   y_c(t) = silu(sum over j of w[c][j] * u_c(t - (taps-1) + j)),  j ascending; tap taps-1 is the current token; y = q | k | v
 *   g_i = -exp(A_log) * softplus(f_i + dt_bias_i)      MK_DECAY_CHANNEL: one f and dt_bias a key channel; MK_DECAY_HEAD: one a head
 *   q <- q / sqrt(sum q^2 + 1e-6) * dk^-1/2,  k <- k / sqrt(sum k^2 + 1e-6)
 *   S <- diag(e^g) S;  m = k'S;  d = sigmoid(b) (v - m);  S <- S + k d';  o = q'S
 *   published: o * o_norm * gate(z), gate = sigmoid or silu; the trailer is sum o^2 over the slice (the reader divides by the head's norm)
 *   wait[0]  "qkv": values [q_off, q_off+dk), [k_off, k_off+dk), [v_off, v_off+dv): u
 *   wait[1]  "fz": values [f_off, f_off+dk) ([f_off] for MK_DECAY_HEAD) and [z_off, z_off+dv)
 *            with rank: "low": values [f_off, f_off+rank) and [z_off, z_off+rank), of which f = W_f x_f and z = W_z x_z
 *   wait[2]  "low": value b_off
 *   signal   one slice of "o": dv values and the trailer
 *   tape     with rank: the segments of W_f (dk rows) and W_z (dv rows)
 *   params   f32 w[2*dk + dv][taps], A_log[1], dt_bias[dk] ([1] for MK_DECAY_HEAD), o_norm[dv] at param_off
 *   state    at state_off of the row's slot: f32[2*dk + dv][taps], u of the last `taps` positions, oldest first (zeros before the first token); then, at
 *            mk_delta_matrix_at, f32[dk][dv]
 * Rows in order: a row reads its state_read slot, which may be what the row before it wrote, and leaves the state in state_write.
 * Sums over key channels are sequential, ascending. With a = e^g the twin computes m = sum_i (k_i a_i) S_i and
 * o = sum_i (q_i a_i) S_i + (q.k) d from the old state in one pass, then S_i <- a_i S_i + k_i d in a second over the same cache lines.
 * Source of the mathematics: models.md 3.1 step 1, 3.2 (3.1 for the head decay). */
#include "instructions/matvec.h"
#include "instructions/mk_math.h"
#include "instructions/op.h"
#include "instructions/vec8.h"

#include <string.h>

/* n channels: takes u into the state and convolves. `from` may be `to`. */
MK_CLONES static void convolve(const float *from, float *to, const float *restrict w, uint32_t taps, const float *restrict u, float *restrict y, uint32_t n)
{
    if (taps == 4) { /* every checkpoint's */
        for (uint32_t i = 0; i < n; i++, w += 4, from += 4, to += 4) {
            const float a = from[1], b = from[2], c = from[3];
            to[0] = a, to[1] = b, to[2] = c, to[3] = u[i];
            y[i] = 0.0f + w[0] * a + w[1] * b + w[2] * c + w[3] * u[i];
        }
    } else {
        for (uint32_t i = 0; i < n; i++, w += taps, from += taps, to += taps) {
            float sum = 0;
            for (uint32_t j = 0; j < taps; j++) {
                to[j] = j + 1 < taps ? from[j + 1] : u[i];
                sum += w[j] * to[j];
            }
            y[i] = sum;
        }
    }
    for (uint32_t i = 0; i < n; i++) y[i] = mk_siluf(y[i]);
}

/* `width` columns (a multiple of 8, at most 32) of one state step. s and t may be the same. */
MK_INLINE void columns(const float *s, float *t, uint32_t dk, uint32_t dv, uint32_t width, const float *a, const float *k, const float *ka,
                       const float *qa, float qk, float beta, const float *v, float *o)
{
    mk_f8 m[4], p[4];
    for (uint32_t j = 0; j < width / 8; j++) m[j] = p[j] = (mk_f8){0};
    for (uint32_t i = 0; i < dk; i++)
        for (uint32_t j = 0; j < width / 8; j++) {
            mk_f8 x = mk_load8(s + (size_t)i * dv + 8 * j);
            m[j] += ka[i] * x;
            p[j] += qa[i] * x;
        }
    for (uint32_t j = 0; j < width / 8; j++) {
        m[j] = beta * (mk_load8(v + 8 * j) - m[j]);
        mk_store8(o + 8 * j, p[j] + qk * m[j]);
    }
    for (uint32_t i = 0; i < dk; i++)
        for (uint32_t j = 0; j < width / 8; j++) {
            size_t at = (size_t)i * dv + 8 * j;
            mk_store8(t + at, a[i] * mk_load8(s + at) + k[i] * m[j]);
        }
}

MK_CLONES static void state_step(const float *s, float *t, uint32_t dk, uint32_t dv, const float *a, const float *k, const float *ka,
                                 const float *qa, float qk, float beta, const float *v, float *o)
{
    uint32_t j = 0;
    for (; j + 32 <= dv; j += 32) columns(s + j, t + j, dk, dv, 32, a, k, ka, qa, qk, beta, v + j, o + j);
    for (; j + 8 <= dv; j += 8) columns(s + j, t + j, dk, dv, 8, a, k, ka, qa, qk, beta, v + j, o + j);
    for (; j < dv; j++) {
        float m = 0, p = 0;
        for (uint32_t i = 0; i < dk; i++) {
            float x = s[(size_t)i * dv + j];
            m += ka[i] * x;
            p += qa[i] * x;
        }
        float d = beta * (v[j] - m);
        o[j] = p + qk * d;
        for (uint32_t i = 0; i < dk; i++) t[(size_t)i * dv + j] = a[i] * s[(size_t)i * dv + j] + k[i] * d;
    }
}

/* From the raw q, k and decay input f: a = e^g; k and q normalised; ka = k a, qa = q a; returns q.k. */
MK_CLONES static float gates(uint32_t dk, uint32_t decays, const float *param, const float *q, const float *k0, float *restrict a,
                             float *restrict k, float *restrict ka, float *restrict qa, float *restrict qn)
{
    float rate = -mk_expf(param[0]);
    for (uint32_t i = 0; i < decays; i++) a[i] = mk_expf(rate * mk_softplusf(a[i] + param[1 + i]));
    for (uint32_t i = decays; i < dk; i++) a[i] = a[0];
    float rq = mk_rsqrtf(mk_sumsq8(q, dk) + 1e-6f), rk = mk_rsqrtf(mk_sumsq8(k0, dk) + 1e-6f), scale = mk_rsqrtf((float)dk);
    for (uint32_t i = 0; i < dk; i++) {
        k[i] = k0[i] * rk;
        float x = q[i] * rq * scale;
        ka[i] = k[i] * a[i];
        qa[i] = x * a[i];
        qn[i] = x * k[i];
    }
    return mk_sum8(qn, dk);
}

MK_CLONES static float gate_output(float *restrict o, const float *restrict norm, const float *restrict z, uint32_t dv, uint32_t gate)
{
    float sum = mk_sumsq8(o, dv);
    if (gate == MK_GATE_SILU) {
        for (uint32_t j = 0; j < dv; j++) o[j] = o[j] * norm[j] * mk_siluf(z[j]);
    } else {
        for (uint32_t j = 0; j < dv; j++) o[j] = o[j] * norm[j] * mk_sigmoidf(z[j]);
    }
    return sum;
}

/* f (which = 0) or z of all rows out of their low-rank inputs: y[r * stride ...]. */
static void low_rank(mk_ctx *c, uint32_t which, float *x, float *y, uint32_t stride)
{
    const mk_delta *d = &c->in->delta;
    const mk_low_rank *l = &d->low[which];
    uint32_t nrows = c->step->nrows, padded = mk_staged_stride(d->rank);
    const float *xr[MK_MAX_ROWS];
    float *yr[MK_MAX_ROWS];
    mk_segment s = {.data = c->mem->tape + c->prog->tape_base[c->worker] + c->in->tape_off + (which ? mk_delta_segment_bytes(d, 0) : 0), .wtype = l->wtype,
                    .rows = which ? d->dv : d->dk, .k = d->rank, .halves = 1, .nseg = l->nseg, .phase = l->phase, .scale_k = l->scale_k};
    memset(x, 0, (size_t)nrows * padded * sizeof *x);
    for (uint32_t r = 0; r < nrows; r++) {
        xr[r] = x + (size_t)r * padded;
        yr[r] = y + (size_t)r * stride;
        mk_read(c, 1, r, which ? d->z_off : d->f_off, d->rank, x + (size_t)r * padded);
    }
    mk_matvec(&s, xr, nrows, yr);
}

void mk_delta_step_twin(mk_ctx *c)
{
    const mk_delta *d = &c->in->delta;
    uint32_t dk = d->dk, dv = d->dv, n = mk_delta_channels(d), decays = mk_delta_decays(d);
    const float *w = c->mem->param + d->param_off, *param = w + mk_delta_rate_at(d);
    float *u = c->scratch, *y = u + n, *k = y + n, *ka = k + dk, *qa = ka + dk, *qn = qa + dk, *o = qn + dk, *fz = o + dv, *x = fz + (size_t)MK_MAX_ROWS * (dk + dv);
    uint64_t slot_bytes = c->prog->info.state_slot_bytes, matrix = mk_delta_matrix_at(d);

    for (uint32_t which = 0; d->rank && which < 2; which++) low_rank(c, which, x, fz + which * dk, dk + dv);
    for (uint32_t r = 0; r < c->step->nrows; r++) {
        const mk_row *row = &c->step->row[r];
        float *a = fz + (size_t)r * (dk + dv), *z = a + dk;
        uint8_t *to = c->mem->state + row->state_write * slot_bytes + d->state_off;
        const uint8_t *from = c->mem->state + row->state_read * slot_bytes + d->state_off;
        float b;
        if (row->flags & MK_ROW_FIRST) {
            memset(to, 0, (size_t)n * d->taps * 4);
            memset(to + matrix, 0, (size_t)dk * dv * 4);
            from = to;
        }
        mk_read(c, 0, r, d->q_off, dk, u);
        mk_read(c, 0, r, d->k_off, dk, u + dk);
        mk_read(c, 0, r, d->v_off, dv, u + 2 * dk);
        if (!d->rank) {
            mk_read(c, 1, r, d->f_off, decays, a);
            mk_read(c, 1, r, d->z_off, dv, z);
        }
        mk_read(c, 2, r, d->b_off, 1, &b);
        convolve((const float *)from, (float *)to, w, d->taps, u, y, n);
        float qk = gates(dk, decays, param, y, y + dk, a, k, ka, qa, qn);
        state_step((const float *)(from + matrix), (float *)(to + matrix), dk, dv, a, k, ka, qa, qk, mk_sigmoidf(b), y + 2 * dk, o);
        float sum = gate_output(o, param + 1 + decays, z, dv, d->gate);
        mk_publish(c, r, c->in->signal_slice, o, sum);
        c->bytes += (uint64_t)dk * dv * sizeof *o;
    }
}
