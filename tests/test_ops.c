/* DELTA_STEP, ROUTER and ROUTE against references in double written from models.md 3.1, 3.2 and 3.6. */
#include "tests/support/onestep.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- a trace: tokens of several streams, cut into steps in different ways ---------------------------------------------- */

#define STREAMS 5
#define TOKENS  24 /* of a stream */

/* How the same tokens reach the machine. */
typedef enum cut {
    CUT_ALONE,    /* one row a step, stream after stream */
    CUT_CHUNKS,   /* eight rows of one stream */
    CUT_THREES,   /* three rows of one stream */
    CUT_MIXED,    /* up to 8 rows of up to 5 streams, in stream order, differing counts */
    CUT_PINGPONG, /* as MIXED, but every step reads one slot of the stream and writes the other */
    CUT_COUNT
} cut;

typedef struct tok {
    uint32_t stream, pos;
} tok;

/* Rows of the next step out of done[]; 0: all through. */
static uint32_t next_rows(cut how, uint32_t *done, uint64_t *seed, tok *out)
{
    uint32_t n = 0;
    if (how <= CUT_THREES) {
        uint32_t most = how == CUT_ALONE ? 1 : how == CUT_CHUNKS ? 8 : 3;
        for (uint32_t s = 0; s < STREAMS && n == 0; s++)
            while (n < most && done[s] < TOKENS) out[n++] = (tok){s, done[s]++};
        return n;
    }
    for (uint32_t s = 0; s < STREAMS; s++) {
        uint32_t take = (uint32_t)(one_random(seed) % 4);
        while (take-- && n < MK_MAX_ROWS && done[s] < TOKENS) out[n++] = (tok){s, done[s]++};
    }
    if (n == 0)
        for (uint32_t s = 0; s < STREAMS && n == 0; s++)
            if (done[s] < TOKENS) out[n++] = (tok){s, done[s]++};
    return n;
}

/* Rows of a step as mk_rows; *reads: slots that must stay as they are. parity[stream]: slot that holds its state. */
static void set_rows(onestep *o, cut how, const tok *t, uint32_t n, uint32_t *parity, uint32_t *untouched, uint32_t *n_untouched)
{
    *n_untouched = 0;
    for (uint32_t r = 0; r < n; r++) {
        mk_row *row = one_row(o, t[r].stream, t[r].pos);
        if (how != CUT_PINGPONG) continue;
        uint32_t a = 2 * t[r].stream;
        if (r == 0 || t[r - 1].stream != t[r].stream) {
            row->state_read = a + parity[t[r].stream];
            parity[t[r].stream] ^= 1;
            row->state_write = a + parity[t[r].stream];
            untouched[(*n_untouched)++] = row->state_read;
        } else {
            row->state_read = row->state_write = a + parity[t[r].stream];
        }
    }
}

static uint32_t state_begin, state_end; /* bytes of a slot that the opcode may write */

static float *run_trace(onestep *o, cut how, uint32_t width, void (*step)(onestep *, const tok *, uint32_t, float *))
{
    float *out = calloc((size_t)STREAMS * TOKENS * width, sizeof *out);
    uint32_t done[STREAMS] = {0}, parity[STREAMS] = {0}, n, keep[MK_MAX_ROWS], n_keep;
    uint64_t seed = 4, bytes = o->prog.info.state_slot_bytes;
    uint8_t *before = malloc(MK_MAX_ROWS * bytes);
    tok t[MK_MAX_ROWS];
    assert_non_null(out);
    assert_non_null(before);
    memset(o->mem.state, 0xff, o->prog.info.state_slots * bytes);
    while ((n = next_rows(how, done, &seed, t))) {
        one_begin(o);
        set_rows(o, how, t, n, parity, keep, &n_keep);
        for (uint32_t i = 0; i < n_keep; i++) memcpy(before + i * bytes, one_state(o, keep[i]), bytes);
        step(o, t, n, out);
        for (uint32_t i = 0; i < n_keep; i++) assert_memory_equal(before + i * bytes, one_state(o, keep[i]), bytes);
    }
    free(before);
    for (uint32_t i = 0; i < o->prog.info.state_slots; i++) /* what lies before and behind the item's state */
        for (uint32_t b = 0; b < bytes; b++)
            if (b < state_begin || b >= state_end) assert_int_equal(((uint8_t *)one_state(o, i))[b], 0xff);
    return out;
}

static const char *const cut_name[CUT_COUNT] = {"alone", "chunks of 8", "chunks of 3", "mixed", "read and write slots apart"};

static double silu(double x)
{
    return x / (1 + exp(-x));
}

static float as_bf16(float x, int act_f32)
{
    return act_f32 ? x : mk_round_bf16(x);
}

/* ---- DELTA_STEP ------------------------------------------------------------------------------------------------------ */

static struct {
    uint32_t dk, dv, taps, act_f32, qkv, fz, low, o, q_off, k_off, v_off, f_off, z_off, b_off, qkv_width, fz_width, low_width, rank;
    const float *weights[2]; /* with rank: [dk][rank], [dv][rank] */
} dl;

static void delta_input(uint32_t stream, uint32_t pos, float *qkv, float *fz, float *low)
{
    uint64_t id = 5000 + 1000 * stream + pos;
    one_fill(id * 3, qkv, dl.qkv_width, 1.5);
    one_fill(id * 3 + 1, fz, dl.fz_width, 1.5);
    one_fill(id * 3 + 2, low, dl.low_width, 1.0);
    if (pos % 5 == 3 && !dl.rank) fz[dl.f_off] = 30.0f; /* softplus above its linear bound */
    for (uint32_t i = 0; i < dl.qkv_width; i++) qkv[i] = as_bf16(qkv[i], (int)dl.act_f32);
    for (uint32_t i = 0; i < dl.fz_width; i++) fz[i] = as_bf16(fz[i], (int)dl.act_f32);
    for (uint32_t i = 0; i < dl.low_width; i++) low[i] = as_bf16(low[i], (int)dl.act_f32);
}

static void delta_run(onestep *o, const tok *t, uint32_t n, float *out)
{
    float qkv[2048], fz[1024], low[256];
    for (uint32_t r = 0; r < n; r++) {
        delta_input(t[r].stream, t[r].pos, qkv, fz, low);
        one_put(o, dl.qkv, r, qkv, NULL);
        one_put(o, dl.fz, r, fz, NULL);
        one_put(o, dl.low, r, low, NULL);
    }
    one_run(o, 0);
    for (uint32_t r = 0; r < n; r++) {
        float *y = out + (size_t)(t[r].stream * TOKENS + t[r].pos) * (dl.dv + 1);
        one_get(o, dl.o, r, dl.dv, dl.dv, y);
        y[dl.dv] = one_trailer(o, dl.o, r, 1);
    }
}

/* What the item has for q (part 0), k (1) or v (2) after convolution and silu: channel i of token `pos`, out of its last inputs. */
static double convolved(const float (*past)[2048], const float *w, uint32_t pos, uint32_t part, uint32_t i)
{
    uint32_t at = (part == 0 ? dl.q_off : part == 1 ? dl.k_off : dl.v_off) + i, channel = part * dl.dk + i;
    double y = 0;
    for (uint32_t j = 0; j < dl.taps; j++)
        if (pos + j + 1 >= dl.taps) y += (double)w[channel * dl.taps + j] * (double)past[(pos + j + 1 - dl.taps) % 16][at];
    return silu(y);
}

/* f (which = 0) or z of a token, value i. */
static double low_value(const float *fz, uint32_t which, uint32_t i)
{
    const float *x = fz + (which ? dl.z_off : dl.f_off);
    double y = 0;
    for (uint32_t j = 0; j < dl.rank; j++) y += (double)dl.weights[which][i * dl.rank + j] * (double)x[j];
    return dl.rank ? y : (double)x[i];
}

/* A BF16 segment of `rows` x dl.rank small weights at `to`; what they are, to `value`. */
static void low_segment(uint8_t *to, uint32_t which, uint32_t rows, float *value)
{
    one_fill(31 + which, value, (size_t)rows * dl.rank, 0.3);
    for (uint32_t i = 0; i < rows * dl.rank; i++) {
        uint32_t row = i / dl.rank, k = i % dl.rank;
        uint16_t h = mk_f32_to_bf16(value[i]);
        value[i] = mk_bf16_to_f32(h);
        memcpy(to + mk_quarter_at(rows, k / 32, k % 32 / 8, row) + k % 8 * 2, &h, 2);
    }
    dl.weights[which] = value;
}

static void delta_case(uint32_t dk, uint32_t dv, uint32_t taps, uint32_t decay, uint32_t gate, uint32_t rank, int act_f32)
{
    onestep *o = one_new(2, act_f32);
    uint32_t dtype = act_f32 ? MK_F32 : MK_BF16, nd = decay == MK_DECAY_HEAD ? 1 : dk, width = dv + 1, channels = 2 * dk + dv, heads = 3;
    dl.dk = dk, dl.dv = dv, dl.taps = taps, dl.act_f32 = (uint32_t)act_f32;
    dl.q_off = dk, dl.k_off = heads * dk + dk, dl.v_off = heads * 2 * dk + 2 * dv + 7, dl.qkv_width = heads * channels + 40;
    dl.rank = rank, dl.f_off = 3, dl.z_off = dl.f_off + (rank ? rank : nd) + 11, dl.fz_width = dl.z_off + (rank ? rank : dv) + 2, dl.b_off = 17, dl.low_width = 20;
    float param[384 * 8 + 1 + 128 + 128], *w = param, *rate = param + channels * taps;
    uint64_t seed = 21;
    one_fill(7, w, channels * taps, 0.5);
    rate[0] = (float)log(0.2 + 3.0 * one_uniform(&seed));
    one_fill(22, rate + 1, nd, 1.0);
    for (uint32_t i = 0; i < dv; i++) rate[1 + nd + i] = 1.0f + one_normal(&seed, 0.3);
    dl.qkv = one_even(o, dtype, 0, dl.qkv_width, 5);
    dl.fz = one_even(o, dtype, 0, dl.fz_width, 4);
    dl.low = one_even(o, dtype, 0, dl.low_width, 3);
    dl.o = one_even(o, dtype, 1, 3 * dv, 3);
    one_param(o, param, 3);
    uint32_t param_off = one_param(o, param, channels * taps + 1 + nd + dv), state_off = 384;
    one_insn(o, MK_OP_DELTA_STEP);
    one_wait(o, dl.qkv);
    one_wait(o, dl.fz);
    one_wait(o, dl.low);
    one_to(o, dl.o, 1);
    o->in.delta = (mk_delta){.dk = (uint16_t)dk, .dv = (uint16_t)dv, .taps = (uint16_t)taps, .decay = (uint8_t)decay, .gate = (uint8_t)gate, .q_off = dl.q_off,
                             .k_off = dl.k_off, .v_off = dl.v_off, .f_off = dl.f_off, .z_off = dl.z_off, .b_off = dl.b_off, .param_off = param_off,
                             .state_off = state_off, .rank = (uint16_t)rank};
    float *values = malloc((size_t)(dk + dv) * (rank + 1) * sizeof *values);
    assert_non_null(values);
    if (rank) {
        o->in.delta.low[0].wtype = o->in.delta.low[1].wtype = MK_W_BF16;
        uint64_t first = mk_delta_segment_bytes(&o->in.delta, 0), both = first + mk_delta_segment_bytes(&o->in.delta, 1);
        uint8_t *tape = one_tape(o, both + 128) + 128;
        o->in.tape_off = 128;
        o->in.tape_bytes = (uint32_t)both;
        low_segment(tape, 0, dk, values);
        low_segment(tape + first, 1, dv, values + (size_t)dk * rank);
    }
    uint32_t matrix = state_off + (uint32_t)mk_delta_matrix_at(&o->in.delta);
    state_begin = state_off, state_end = state_off + (uint32_t)mk_delta_state_bytes(&o->in.delta);
    one_alloc(o, 2 * STREAMS, state_end + 256, STREAMS, 64, 64);
    float *got[CUT_COUNT];
    for (int how = 0; how < CUT_COUNT; how++) {
        got[how] = run_trace(o, (cut)how, width, delta_run);
        if (how) one_same(cut_name[how], got[how], got[0], (size_t)STREAMS * TOKENS * width);
    }

    double *S = malloc(sizeof *S * dk * dv), *ref = malloc(sizeof *ref * STREAMS * TOKENS * width), x[384], q[128], k[128], m[128], raw[128];
    static float past[16][2048]; /* of the last positions */
    float fz[1024], low[256];
    assert_non_null(S);
    assert_non_null(ref);
    for (uint32_t s = 0; s < STREAMS; s++) {
        for (uint32_t i = 0; i < dk * dv; i++) S[i] = 0;
        for (uint32_t pos = 0; pos < TOKENS; pos++) {
            double *y = ref + (size_t)(s * TOKENS + pos) * width;
            delta_input(s, pos, past[pos % 16], fz, low);
            for (uint32_t i = 0; i < channels; i++) x[i] = convolved(past, w, pos, i < dk ? 0 : i < 2 * dk ? 1 : 2, i < dk ? i : i < 2 * dk ? i - dk : i - 2 * dk);
            double nq = 0, nk = 0, beta = 1 / (1 + exp(-(double)low[dl.b_off])), sq = 0;
            for (uint32_t i = 0; i < dk; i++) {
                nq += x[i] * x[i];
                nk += x[dk + i] * x[dk + i];
            }
            for (uint32_t i = 0; i < dk; i++) {
                q[i] = x[i] / sqrt(nq + 1e-6) / sqrt((double)dk);
                k[i] = x[dk + i] / sqrt(nk + 1e-6);
                double f = low_value(fz, 0, nd == 1 ? 0 : i) + (double)rate[1 + (nd == 1 ? 0 : i)];
                double g = -exp((double)rate[0]) * (f > 20 ? f : log1p(exp(f)));
                for (uint32_t j = 0; j < dv; j++) S[i * dv + j] *= exp(g);
            }
            for (uint32_t j = 0; j < dv; j++) {
                m[j] = 0;
                for (uint32_t i = 0; i < dk; i++) m[j] += k[i] * S[i * dv + j];
                double d = beta * (x[2 * dk + j] - m[j]);
                raw[j] = 0;
                for (uint32_t i = 0; i < dk; i++) {
                    S[i * dv + j] += k[i] * d;
                    raw[j] += q[i] * S[i * dv + j];
                }
                sq += raw[j] * raw[j];
                double z = low_value(fz, 1, j);
                y[j] = raw[j] * (double)rate[1 + nd + j] * (gate == MK_GATE_SILU ? z : 1) / (1 + exp(-z));
            }
            y[dv] = sq;
        }
        /* The state itself after the last token. */
        float *T = malloc(sizeof *T * dk * dv), *again = run_trace(o, CUT_CHUNKS, width, delta_run);
        assert_non_null(T);
        memcpy(T, (uint8_t *)one_state(o, s) + matrix, sizeof *T * dk * dv);
        one_close("state", T, S, dk * dv, one_rms(S, dk * dv), 1e-5);
        for (uint32_t i = 0; i < channels; i++) /* exact: inputs */
            for (uint32_t j = 0; j < taps; j++) {
                float u;
                memcpy(&u, (uint8_t *)one_state(o, s) + state_off + (i * taps + j) * 4, 4);
                assert_true(u == past[(TOKENS + j - taps) % 16][i < dk ? dl.q_off + i : i < 2 * dk ? dl.k_off + i - dk : dl.v_off + i - 2 * dk]);
            }
        free(again);
        free(T);
    }
    double rms = 0, rms_sq = 0, worst = 0, e; /* errors by the scale of all outputs: q.k may nearly cancel */
    for (uint32_t i = 0; i < STREAMS * TOKENS; i++) {
        rms = fmax(rms, one_rms(ref + (size_t)i * width, dv) / 3);
        rms_sq = fmax(rms_sq, ref[(size_t)i * width + dv] / 10);
    }
    for (uint32_t i = 0; i < STREAMS * TOKENS; i++) {
        e = (act_f32 ? one_close : one_close_bf16)("delta", got[0] + (size_t)i * width, ref + (size_t)i * width, dv, rms, 1e-5);
        if (e > worst) worst = e;
        one_close("trailer", got[0] + (size_t)i * width + dv, ref + (size_t)i * width + dv, 1, rms_sq, 1e-5);
    }
    print_message("delta dk %u dv %u taps %u decay %u gate %u rank %u act_f32 %d: max error %.2g of a typical output\n", dk, dv, taps, decay, gate, rank, act_f32, worst);
    for (int how = 0; how < CUT_COUNT; how++) free(got[how]);
    free(S);
    free(ref);
    free(values);
    one_free(o);
}

static void test_delta(void **state)
{
    (void)state;
    delta_case(16, 8, 4, MK_DECAY_CHANNEL, MK_GATE_SIGMOID, 0, 1);
    delta_case(24, 13, 2, MK_DECAY_CHANNEL, MK_GATE_SIGMOID, 0, 1);
    delta_case(16, 8, 4, MK_DECAY_CHANNEL, MK_GATE_SIGMOID, 0, 0);
    delta_case(16, 8, 4, MK_DECAY_CHANNEL, MK_GATE_SIGMOID, 40, 1);
    delta_case(16, 40, 4, MK_DECAY_CHANNEL, MK_GATE_SILU, 16, 0);
    delta_case(16, 40, 7, MK_DECAY_HEAD, MK_GATE_SIGMOID, 0, 1);
    delta_case(16, 40, 4, MK_DECAY_HEAD, MK_GATE_SILU, 0, 1);
    delta_case(16, 40, 4, MK_DECAY_HEAD, MK_GATE_SILU, 0, 0);
}

static void test_delta_real(void **state)
{
    (void)state;
    delta_case(128, 32, 4, MK_DECAY_CHANNEL, MK_GATE_SIGMOID, 0, 1);
    delta_case(128, 32, 4, MK_DECAY_CHANNEL, MK_GATE_SIGMOID, 0, 0);
    delta_case(128, 128, 4, MK_DECAY_CHANNEL, MK_GATE_SIGMOID, 0, 1);
    delta_case(128, 32, 4, MK_DECAY_CHANNEL, MK_GATE_SIGMOID, 128, 0);
    delta_case(128, 128, 4, MK_DECAY_HEAD, MK_GATE_SILU, 0, 1);
}

/* ---- sums and ROUTER --------------------------------------------------------------------------------------------------- */

static void test_sums(void **state)
{
    (void)state;
    uint64_t seed = 5;
    for (uint32_t n = 1; n <= 1024; n = n * 3 + 1) { /* in any order, and whatever the count wraps to */
        float x[1024];
        double sum = 0;
        uint64_t up = 0, down = 0;
        for (uint32_t i = 0; i < n; i++) x[i] = one_normal(&seed, 3.0), sum += (double)x[i];
        for (uint32_t i = 0; i < n; i++) up += mk_sum_word(x[i]), down += mk_sum_word(x[n - 1 - i]);
        assert_true(up == down);
        assert_int_equal(mk_sums_count(up), n & 255);
        assert_true(fabs((double)mk_sum_value(up, n) - sum) <= 3e-8 * n + 1e-7 * fabs(sum));
    }
    for (uint32_t n = 1; n <= 1024; n *= 2) { /* the ends of the range */
        uint64_t most = 0, least = 0;
        for (uint32_t i = 0; i < n; i++) most += mk_sum_word(4194303.0f / (float)n), least += mk_sum_word(-4194303.0f / (float)n);
        assert_true(fabsf(mk_sum_value(most, n) - 4194303.0f) < 1.0f && fabsf(mk_sum_value(least, n) + 4194303.0f) < 1.0f);
    }
    const float bad[] = {NAN, INFINITY, -INFINITY, 4194304.0f, -4194304.0f, 3e38f};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) assert_true(isnan(mk_sum_value(mk_sum_word(bad[i]) + mk_sum_word(1.0f) + mk_sum_word(-7.0f), 3)));
    uint64_t over = 0;
    for (uint32_t i = 0; i < 3; i++) over += mk_sum_word(4000000.0f);
    assert_true(isnan(mk_sum_value(over, 3))); /* each of them is in range */
    assert_true(mk_sum_value(mk_sum_word(0.0f), 1) == 0.0f && mk_sum_value(mk_sum_word(-0.5f), 1) == -0.5f);
}

/* All slices of h, each by a worker of its own: logits but for the norm; no bit of a row moved by its company or by who comes first. */
static void router_case(uint32_t width, uint32_t experts, uint32_t slices)
{
    onestep *o = one_new(1, 0);
    uint32_t h = one_even(o, MK_F32, 0, width, slices), sums = one_bulk(o, mk_sums_bytes(experts), slices);
    float *gamma = calloc(width, 4), *x = calloc(MK_MAX_ROWS * width, 4), *w = calloc((size_t)experts * width, 4);
    uint64_t *all = calloc(MK_MAX_ROWS * experts, 8), bytes = 0;
    one_fill(7, gamma, width, 1.0);
    one_fill(8, w, (size_t)experts * width, 0.3);
    const uint32_t param = one_param(o, gamma, width);
    for (uint32_t s = 0; s < slices; s++) bytes += mk_segment_bytes(MK_W_BF16, mk_start(s + 1, width, slices) - mk_start(s, width, slices), experts, 0, 0);
    uint8_t *tape = one_tape(o, bytes);
    for (uint32_t s = 0, at = 0; s < slices; s++) {
        uint32_t first = mk_start(s, width, slices), n = mk_start(s + 1, width, slices) - first;
        for (uint32_t e = 0; e < experts; e++)
            for (uint32_t i = 0; i < n; i++) {
                uint16_t b = mk_f32_to_bf16(w[(size_t)e * width + first + i]);
                w[(size_t)e * width + first + i] = mk_bf16_to_f32(b);
                memcpy(tape + at + mk_quarter_at(n, e / 32, e % 32 / 8, i) + e % 8 * 2, &b, 2);
            }
        at += (uint32_t)mk_segment_bytes(MK_W_BF16, n, experts, 0, 0);
    }
    one_alloc(o, 1, 64, 16, 64, 64);
    for (uint32_t rows = MK_MAX_ROWS, trial = 0; trial < 2; trial++, rows = 3) {
        one_begin(o);
        memset(one_bulk_at(o, sums), 0, mk_sums_bytes(experts));
        for (uint32_t r = 0; r < rows; r++) {
            one_row(o, r, 3 + r);
            one_fill(50 + r, x + (size_t)r * width, width, 2.0);
            one_put(o, h, r, x + (size_t)r * width, NULL);
        }
        for (uint32_t k = 0; k < slices; k++) {
            const uint32_t s = trial ? slices - 1 - k : k, first = mk_start(s, width, slices);
            one_insn(o, MK_OP_ROUTER);
            one_wait_slices(o, h, s, 1);
            one_to(o, sums, 0);
            for (uint32_t i = 0; i < s; i++) o->in.tape_off += mk_segment_bytes(MK_W_BF16, mk_start(i + 1, width, slices) - mk_start(i, width, slices), experts, 0, 0);
            o->in.router = (mk_router){.first = first, .n = mk_start(s + 1, width, slices) - first, .experts = experts, .param_off = param + first};
            one_run(o, 0);
        }
        const uint32_t half = mk_half(&o->prog.vec[sums], o->step.seq, 0);
        const uint64_t *word = one_bulk_at(o, sums);
        for (uint32_t r = 0; r < rows; r++)
            for (uint32_t e = 0; e < experts; e++) {
                double want = 0, scale = 0;
                for (uint32_t i = 0; i < width; i++) {
                    double term = (double)x[(size_t)r * width + i] * (double)gamma[i] * (double)w[(size_t)e * width + i];
                    want += term, scale += term * term;
                }
                const uint64_t sum = word[mk_sum_at(experts, half, r, e)];
                float got = mk_sum_value(sum, slices);
                assert_int_equal(mk_sums_count(sum), slices & 255);
                one_close("logit", &got, &want, 1, sqrt(scale), 2e-6);
                if (!trial) all[r * experts + e] = sum;
                assert_true(all[r * experts + e] == sum);
            }
        uint32_t written = 0;
        for (uint32_t i = 0; i < 2 * mk_sums_words(experts); i++) written += word[i] != 0;
        assert_int_equal(written, rows * experts); /* and nothing else */
    }
    free(gamma), free(x), free(w), free(all);
    one_free(o);
}

static void test_router(void **state)
{
    (void)state;
    router_case(288, 64, 16);
    router_case(131, 40, 7); /* slices of 18 and 19, experts that fill no K block */
    router_case(64, 512, 1);
}

/* ---- ROUTE ----------------------------------------------------------------------------------------------------------- */

typedef struct hook_log {
    uint32_t calls, layer, slot, pos, topk;
    const uint16_t *replace;
} hook_log;

static void hook(void *arg, uint32_t layer, uint32_t slot, uint32_t pos, uint32_t topk, uint16_t *ids)
{
    hook_log *h = arg;
    h->calls++;
    h->layer = layer, h->slot = slot, h->pos = pos, h->topk = topk;
    for (uint32_t i = 1; i < topk; i++) assert_true(ids[i] > ids[i - 1]);
    if (h->replace) memcpy(ids, h->replace, topk * sizeof *ids);
}

/* Chosen ids, ascending, by rank of (choice descending, id ascending), in double. */
static void route_reference(const mk_route *t, const float *logit, const float *bias, double *s, uint32_t *chosen)
{
    uint32_t n = t->experts, size = t->groups > 1 ? n / t->groups : n;
    double c[1024], best[1024], sum = 0, max = -1e300;
    for (uint32_t i = 0; i < n; i++) max = fmax(max, (double)logit[i]);
    for (uint32_t i = 0; i < n; i++) {
        s[i] = t->score == MK_SCORE_SIGMOID ? 1 / (1 + exp(-(double)logit[i])) : exp((double)logit[i] - max);
        sum += s[i];
    }
    for (uint32_t i = 0; i < n; i++) {
        if (t->score == MK_SCORE_SOFTMAX) s[i] /= sum;
        c[i] = (double)((float)s[i] + (t->has_bias ? bias[i] : 0.0f)); /* ties are those of f32 */
    }
    if (t->groups > 1) {
        for (uint32_t g = 0; g < t->groups; g++) {
            double a = -1e300, b = -1e300;
            for (uint32_t i = g * size; i < (g + 1) * size; i++) {
                if (c[i] > a) b = a, a = c[i];
                else if (c[i] > b) b = c[i];
            }
            best[g] = a + (size > 1 ? b : 0);
        }
        for (uint32_t g = 0; g < t->groups; g++) {
            uint32_t better = 0;
            for (uint32_t h = 0; h < t->groups; h++) better += best[h] > best[g] || (best[h] == best[g] && h < g);
            if (better >= t->topk_groups)
                for (uint32_t i = g * size; i < (g + 1) * size; i++) c[i] = -1e300;
        }
    }
    uint32_t k = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t better = 0;
        for (uint32_t j = 0; j < n; j++) better += c[j] > c[i] || (c[j] == c[i] && j < i);
        if (better < t->topk) chosen[k++] = i;
    }
    assert_int_equal(k, t->topk);
}

static void check_routes(const mk_route *t, const mk_routes *got, uint32_t row, const double *s, const uint32_t *chosen)
{
    double sum = 0;
    uint32_t found = 0;
    for (uint32_t k = 0; k < t->topk; k++) sum += s[chosen[k]];
    for (uint32_t j = 0; j < got->n_union; j++) {
        if (j) assert_true(got->expert[j] > got->expert[j - 1]);
        uint32_t rank = got->rank[row][j];
        if (rank == 255) {
            for (uint32_t k = 0; k < t->topk; k++) assert_int_not_equal(chosen[k], got->expert[j]);
            continue;
        }
        assert_int_equal(rank, found);
        assert_int_equal(got->expert[j], chosen[rank]);
        double want = s[chosen[rank]] / (t->renorm ? sum + 1e-20 : 1) * (double)t->scale;
        one_close("weight", &got->weight[row][rank], &want, 1, want, 2e-6);
        found++;
    }
    assert_int_equal(found, t->topk);
}

#define ROUTE_WIDTH 48u /* of h */
/* Makes logits, which are rounded so that all is exact, the sums that ROUTE reads: of h, whose rms is `rms`, a power of two. */
static void put_logits(onestep *o, uint32_t h, uint32_t sums, uint32_t row, float *logit, uint32_t n, float rms, uint64_t seed)
{
    const mk_vec *v = &o->prog.vec[sums];
    uint64_t *sum = one_bulk_at(o, sums);
    float x[ROUTE_WIDTH];
    for (uint32_t i = 0; i < ROUTE_WIDTH; i++) x[i] = i & 1 ? rms : -rms;
    one_put(o, h, row, x, NULL);
    for (uint32_t e = 0; e < n; e++) {
        float left = (logit[e] = roundf(logit[e] * 1024) / 1024) * rms;
        uint64_t *word = &sum[mk_sum_at(n, mk_half(v, o->step.seq, 0), row, e)];
        *word = 0;
        for (uint32_t i = 0; i + 1 < v->signals; i++) {
            float part = (float)((int)(one_random(&seed) % 64) - 32) / 8;
            *word += mk_sum_word(part);
            left -= part;
        }
        *word += mk_sum_word(left);
        assert_true(mk_sum_value(*word, v->signals) == logit[e] * rms);
    }
}
/* Before the step: what it is added to, and what it is to clear. */
static void prepare_sums(onestep *o, uint32_t sums, uint32_t n)
{
    const uint32_t half = mk_half(&o->prog.vec[sums], o->step.seq, 0);
    memset((uint64_t *)one_bulk_at(o, sums) + mk_sum_at(n, half ^ 1, 0, 0), 0x5a, mk_sums_bytes(n) / 2);
    one_signal(o, sums);
}
static int all_zero(const uint64_t *word, uint32_t first, uint32_t end)
{
    for (uint32_t i = first; i < end; i++)
        if (word[i]) return 0;
    return 1;
}

static void route_case(mk_route t, uint32_t slices, int ties)
{
    onestep *o = one_new(2, 0);
    uint32_t n = t.experts;
    t.k = ROUTE_WIDTH;
    float bias[1024], logit[MK_MAX_ROWS][1024];
    double s[1024];
    uint32_t chosen[MK_MAX_ROWS][16];
    one_fill(31, bias, n, 0.1);
    uint32_t h = one_even(o, MK_F32, 0, ROUTE_WIDTH, slices), sums = one_bulk(o, mk_sums_bytes(n), slices), routes = one_local(o, sizeof(mk_routes));
    t.param_off = one_param(o, bias, n);
    one_alloc(o, 1, 64, 16, 64, 64);
    for (int trial = 0; trial < 20; trial++) {
        uint32_t rows = 1 + (uint32_t)trial % MK_MAX_ROWS;
        one_begin(o);
        prepare_sums(o, sums, n);
        for (uint32_t r = 0; r < rows; r++) {
            one_row(o, r, 3 + r);
            one_fill(100 * (uint64_t)trial + r, logit[r], n, 1.5);
            if (ties)
                for (uint32_t i = 0; i < n; i++) logit[r][i] = roundf(logit[r][i]);
            put_logits(o, h, sums, r, logit[r], n, trial & 1 ? 4.0f : 1.0f, 9 + r);
        }
        one_insn(o, MK_OP_ROUTE);
        one_wait(o, h);
        one_wait(o, sums);
        one_to(o, routes, 0);
        o->in.route = t;
        one_run(o, 1);
        const uint64_t *cleared = (const uint64_t *)one_bulk_at(o, sums) + mk_sum_at(n, mk_half(&o->prog.vec[sums], o->step.seq, 0) ^ 1, 0, 0);
        const uint32_t words = mk_sums_words(n), share = mk_start(1, words, 2);
        assert_true(all_zero(cleared, share, words) && cleared[0] && cleared[share - 1]); /* worker 1's share, and no more */
        mk_routes all = *(mk_routes *)one_local_at(o, 1, routes);
        uint8_t used[1024] = {0};
        uint32_t distinct = 0;
        for (uint32_t r = 0; r < rows; r++) {
            route_reference(&t, logit[r], bias, s, chosen[r]);
            check_routes(&t, &all, r, s, chosen[r]);
            for (uint32_t k = 0; k < t.topk; k++) {
                distinct += !used[chosen[r][k]];
                used[chosen[r][k]] = 1;
            }
        }
        assert_int_equal(all.n_union, distinct);
        /* alone: the same weights bit for bit */
        for (uint32_t r = 0; r < rows; r++) {
            float again[1024];
            memcpy(again, logit[r], n * sizeof *again);
            one_begin(o);
            prepare_sums(o, sums, n);
            one_row(o, r, 3 + r);
            put_logits(o, h, sums, 0, again, n, trial & 1 ? 4.0f : 1.0f, 77);
            one_run(o, 0);
            mk_routes *one = one_local_at(o, 0, routes);
            assert_int_equal(one->n_union, t.topk);
            for (uint32_t k = 0; k < t.topk; k++) assert_int_equal(one->expert[k], chosen[r][k]);
            one_same("weights alone", one->weight[0], all.weight[r], t.topk);
        }
    }
    one_free(o);
}

static void test_route(void **state)
{
    (void)state;
    const mk_route kimi = {.experts = 256, .topk = 8, .groups = 1, .topk_groups = 1, .score = MK_SCORE_SIGMOID, .renorm = 1, .has_bias = 1, .scale = 2.446f};
    mk_route t = kimi;
    route_case(t, 5, 0);
    t.has_bias = 0;
    route_case(t, 5, 1);
    t = kimi, t.groups = 8, t.topk_groups = 4;
    route_case(t, 3, 0);
    t.has_bias = 0;
    route_case(t, 3, 1);
    t = kimi, t.experts = 64, t.topk = 6, t.score = MK_SCORE_SOFTMAX, t.renorm = 0, t.scale = 1, t.has_bias = 0;
    route_case(t, 1, 0);
    t.renorm = 1, t.groups = 1;
    route_case(t, 2, 1);
    t = kimi, t.experts = 1024, t.topk = 16, t.groups = 32, t.topk_groups = 1;
    route_case(t, 7, 0);
    t = kimi, t.experts = 8, t.topk = 8;
    route_case(t, 1, 0);
    t.topk = 1, t.groups = 8, t.topk_groups = 2; /* groups of one expert */
    route_case(t, 1, 0);
    t = kimi, t.experts = 17, t.topk = 3;
    route_case(t, 4, 0);
}

static void test_route_hook(void **state)
{
    (void)state;
    onestep *o = one_new(1, 0);
    mk_route t = {.experts = 16, .topk = 3, .groups = 1, .score = MK_SCORE_SIGMOID, .renorm = 1, .scale = 2, .k = ROUTE_WIDTH};
    float logit[16];
    one_fill(1, logit, 16, 1.0);
    uint32_t h = one_even(o, MK_F32, 0, ROUTE_WIDTH, 2), sums = one_bulk(o, mk_sums_bytes(16), 2), routes = one_local(o, sizeof(mk_routes));
    const uint16_t mine[3] = {0, 7, 15};
    hook_log log = {.replace = mine};
    o->route_hook = hook;
    o->route_arg = &log;
    one_alloc(o, 1, 64, 16, 64, 64);
    one_begin(o);
    prepare_sums(o, sums, 16);
    one_row(o, 5, 41);
    put_logits(o, h, sums, 0, logit, 16, 1.0f, 3);
    one_insn(o, MK_OP_ROUTE);
    one_wait(o, h);
    one_wait(o, sums);
    one_to(o, routes, 0);
    o->in.route = t;
    one_run(o, 0);
    assert_int_equal(log.calls, 1);
    assert_int_equal(log.layer, 3);
    assert_int_equal(log.slot, 5);
    assert_int_equal(log.pos, 41);
    assert_int_equal(log.topk, 3);
    double s[16];
    uint32_t unused[16], ids[3] = {0, 7, 15};
    route_reference(&t, logit, NULL, s, unused);
    check_routes(&t, one_local_at(o, 0, routes), 0, s, ids);
    one_free(o);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_delta), cmocka_unit_test(test_delta_real),
        cmocka_unit_test(test_sums), cmocka_unit_test(test_router), cmocka_unit_test(test_route), cmocka_unit_test(test_route_hook),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
