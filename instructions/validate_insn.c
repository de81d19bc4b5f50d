/* Addresses and shapes of one instruction: the payload of every opcode against its vectors, its tape, and the regions; then what the
 * instructions of one publication have to agree on. */
#include "instructions/validate_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Bytes of each opcode's payload; what follows them must be zero. */
static const uint8_t payload_bytes[MK_OP_COUNT] = {
    [MK_OP_EMBED] = sizeof(mk_embed),         [MK_OP_GEMV] = sizeof(mk_gemv),          [MK_OP_DELTA_STEP] = sizeof(mk_delta),
    [MK_OP_KV_APPEND] = sizeof(mk_mla),       [MK_OP_MLA_PARTIAL] = sizeof(mk_mla),    [MK_OP_COMBINE] = sizeof(mk_mla),
    [MK_OP_ROUTE] = sizeof(mk_route),         [MK_OP_EXPERT_UP] = sizeof(mk_expert),   [MK_OP_EXPERT_DOWN] = sizeof(mk_expert),
    [MK_OP_LM_HEAD] = sizeof(mk_lm_head),     [MK_OP_SAMPLE] = sizeof(mk_sample),      [MK_OP_SCHEDULE] = sizeof(mk_schedule),
    [MK_OP_GQA_APPEND] = sizeof(mk_gqa),      [MK_OP_GQA_PARTIAL] = sizeof(mk_gqa),      [MK_OP_ROUTER] = sizeof(mk_router),
};
static const uint8_t waits[MK_OP_COUNT] = {
    [MK_OP_GEMV] = 1 /* ADD: 2, GATED: 3 */, [MK_OP_DELTA_STEP] = 3, [MK_OP_KV_APPEND] = 1,   [MK_OP_MLA_PARTIAL] = 3,
    [MK_OP_COMBINE] = 1 /* gate: 2 */,       [MK_OP_ROUTE] = 2, [MK_OP_EXPERT_UP] = 2, [MK_OP_EXPERT_DOWN] = 3, [MK_OP_LM_HEAD] = 1,
    [MK_OP_SAMPLE] = 2,                      [MK_OP_SCHEDULE] = 1,   [MK_OP_GQA_APPEND] = 1,  [MK_OP_GQA_PARTIAL] = 2, [MK_OP_ROUTER] = 1,
};

#define MAX_K (1u << 20) /* columns; keeps every product below 64 bits */

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        int rc_ = (call);                                                                                              \
        if (rc_) return rc_;                                                                                           \
    } while (0)

typedef unsigned long long ull;

static int nonzero(const void *p, size_t n)
{
    const uint8_t *b = p;
    int any = 0;
    for (size_t i = 0; i < n; i++) any |= b[i];
    return any;
}

int mk_check_reserved(mk_check *c, uint32_t x)
{
    const mk_insn *in = &c->p->insn[x];
    uint32_t used = payload_bytes[in->opcode];
    int pad = 0;
    if (!used) return mk_refuse(c, x, "opcode %u is unknown to the validator", in->opcode);
#define PAD(field) nonzero(&in->field, sizeof in->field)
    switch (in->opcode) {
    case MK_OP_EMBED: pad = PAD(embed.pad); break;
    case MK_OP_DELTA_STEP: pad = PAD(delta.pad) | PAD(delta.low[0].pad) | PAD(delta.low[1].pad) | (!in->delta.rank && PAD(delta.low)); break;
    case MK_OP_KV_APPEND: pad = PAD(mla.grain) | PAD(mla.most); break;
    case MK_OP_GQA_APPEND: pad = PAD(gqa.pad) | PAD(gqa.grain) | PAD(gqa.most); break;
    case MK_OP_GQA_PARTIAL: pad = PAD(gqa.pad); break;
    case MK_OP_ROUTE: pad = PAD(route.pad); break;
    case MK_OP_EXPERT_UP: pad = PAD(expert.pad) | PAD(expert.t) | PAD(expert.n) | PAD(expert.phase); break;
    case MK_OP_EXPERT_DOWN: pad = PAD(expert.pad); break;
    case MK_OP_LM_HEAD: pad = PAD(lm_head.pad); break;
    case MK_OP_SCHEDULE: pad = PAD(schedule.unused); break;
    default: break;
    }
#undef PAD
    if (pad) return mk_refuse(c, x, "reserved bytes in the payload are not zero");
    if (nonzero(in->payload + used, sizeof in->payload - used))
        return mk_refuse(c, x, "reserved bytes: the payload is %u bytes, what follows is not zero", used);
    return MK_OK;
}

/* ---- small proofs --------------------------------------------------------------------------------------------------- */

static int wait_is(mk_check *c, uint32_t x, uint32_t k, uint32_t scope)
{
    static const char *const what[3] = {"packet", "bulk", "local"};
    const mk_vec *v = mk_wait_vec(c, &c->p->insn[x], k);
    if (v->scope != scope)
        return mk_refuse(c, x, "wait %u: expected a %s vector, %s is %s", k, what[scope], v->name, what[v->scope]);
    return MK_OK;
}

/* Values [first, first + n) of packet wait k lie inside the slices waited for. */
static int reads(mk_check *c, uint32_t x, uint32_t k, uint64_t first, uint64_t n, const char *what)
{
    const mk_insn *in = &c->p->insn[x];
    const mk_vec *v = mk_wait_vec(c, in, k);
    TRY(wait_is(c, x, k, MK_PACKET));
    const uint32_t *start = mk_vec_starts(c->p, v);
    uint32_t lo = start[in->wait[k].slice0], hi = start[(uint32_t)in->wait[k].slice0 + in->wait[k].nslice];
    if (!n || first < lo || first + n > hi)
        return mk_refuse(c, x, "reads %s, values [%llu, %llu) of %s, but waits for slices [%u, %u), which are values [%u, %u)", what, (ull)first,
                         (ull)(first + n), v->name, in->wait[k].slice0, (uint32_t)in->wait[k].slice0 + in->wait[k].nslice, lo, hi);
    return MK_OK;
}

static int no_dynamic(mk_check *c, uint32_t x, uint32_t k)
{
    const mk_vec *v = mk_wait_vec(c, &c->p->insn[x], k);
    if (v->scope == MK_PACKET && v->flags & MK_VEC_DYNAMIC)
        return mk_refuse(c, x, "wait %u: %s is dynamic, only EXPERT_DOWN can read it", k, v->name);
    return MK_OK;
}

/* Whole vector of exactly `width` values. */
static int reads_all(mk_check *c, uint32_t x, uint32_t k, uint64_t width, const char *what)
{
    const mk_vec *v = mk_wait_vec(c, &c->p->insn[x], k);
    TRY(reads(c, x, k, 0, width, what));
    if (v->width != width) return mk_refuse(c, x, "expected %s to be %llu values, %s has %u", what, (ull)width, v->name, v->width);
    return MK_OK;
}

static int signals_scope(mk_check *c, uint32_t x, uint32_t scope)
{
    static const char *const what[3] = {"packet", "bulk", "local"};
    const mk_insn *in = &c->p->insn[x];
    if (in->signal_vec == MK_NONE) return mk_refuse(c, x, "publishes nothing, expected a %s vector", what[scope]);
    const mk_vec *v = &c->p->vec[in->signal_vec];
    if (v->scope != scope) return mk_refuse(c, x, "publishes %s vector %s, expected a %s vector", what[v->scope], v->name, what[scope]);
    return MK_OK;
}

/* The packet slice that x publishes has n values; trailers are DELTA_STEP's. */
static int signals_slice(mk_check *c, uint32_t x, uint64_t n)
{
    const mk_insn *in = &c->p->insn[x];
    TRY(signals_scope(c, x, MK_PACKET));
    const mk_vec *v = &c->p->vec[in->signal_vec];
    if (v->flags & MK_VEC_DYNAMIC) return mk_refuse(c, x, "publishes dynamic vector %s, only EXPERT_UP can", v->name);
    const uint32_t *start = mk_vec_starts(c->p, v);
    uint32_t have = start[in->signal_slice + 1] - start[in->signal_slice];
    if (n != have) return mk_refuse(c, x, "publishes %llu values, slice %u of %s has %u", (ull)n, in->signal_slice, v->name, have);
    int trailer = in->opcode == MK_OP_DELTA_STEP;
    if (v->trailer != trailer) return mk_refuse(c, x, "publishes %s trailer, %s has %s", trailer ? "a" : "no", v->name, v->trailer ? "one" : "none");
    return MK_OK;
}

static int signals_local(mk_check *c, uint32_t x, uint64_t bytes)
{
    TRY(signals_scope(c, x, MK_LOCAL));
    const mk_vec *v = &c->p->vec[c->p->insn[x].signal_vec];
    if (v->width < bytes) return mk_refuse(c, x, "writes %llu bytes, local vector %s has %u", (ull)bytes, v->name, v->width);
    return MK_OK;
}

/* The writer of local wait k has opcode op. */
static int written_by(mk_check *c, uint32_t x, uint32_t k, uint32_t op, const mk_insn **src)
{
    TRY(wait_is(c, x, k, MK_LOCAL));
    uint32_t s = c->source[3 * (size_t)x + k];
    *src = &c->p->insn[s];
    if ((*src)->opcode != op)
        return mk_refuse(c, x, "reads local vector %s, expected it from %s, #%u %s has written it", mk_wait_vec(c, &c->p->insn[x], k)->name,
                         mk_opcode_name(op), (*src)->seq, mk_opcode_name((*src)->opcode));
    return MK_OK;
}

static int is_f32(mk_check *c, uint32_t x, const mk_vec *v)
{
    if (v->dtype != MK_F32) return mk_refuse(c, x, "expected %s to be f32, its type is %u", v->name, v->dtype);
    return MK_OK;
}

static int params(mk_check *c, uint32_t x, uint32_t off, uint64_t n, const char *what)
{
    if (off + n > c->i->param_floats)
        return mk_refuse(c, x, "%s: parameters [%u, +%llu) are outside the region of %llu floats", what, off, (ull)n, (ull)c->i->param_floats);
    return MK_OK;
}

static int positive(mk_check *c, uint32_t x, float v, int zero, const char *what)
{
    if (!isfinite(v) || v < 0 || (!zero && v == 0)) return mk_refuse(c, x, "%s is %g, expected a positive number", what, (double)v);
    return MK_OK;
}

static int tape(mk_check *c, uint32_t x, uint64_t bytes)
{
    const mk_insn *in = &c->p->insn[x];
    if (in->tape_bytes != bytes || bytes % 128)
        return mk_refuse(c, x, "consumes %u bytes of tape, its segment has %llu", in->tape_bytes, (ull)bytes);
    return MK_OK;
}

/* A matrix segment: type, columns, rows (halves counted), and scale blocks that fit its first row. */
static int segment(mk_check *c, uint32_t x, uint32_t wtype, uint64_t n, uint32_t halves, uint32_t k, uint32_t row0, uint32_t phase, uint32_t nseg,
                   uint32_t scale_k)
{
    if (wtype != MK_W_BF16 && wtype != MK_W_FP8) return mk_refuse(c, x, "weights of type %u, expected bf16 (1) or fp8 (2)", wtype);
    if (!k || k > MAX_K) return mk_refuse(c, x, "k is %u, expected 1 to %u", k, MAX_K);
    if (!n || n * halves > MK_SEGMENT_ROWS)
        return mk_refuse(c, x, "%llu x %u matrix rows, expected 1 to %u in a segment", (ull)n, halves, MK_SEGMENT_ROWS);
    const int by_row = c->p->insn[x].opcode == MK_OP_LM_HEAD; /* may have a scale a row */
    if (wtype == MK_W_FP8 && scale_k != 64 && scale_k != 128 && !(by_row && !scale_k))
        return mk_refuse(c, x, "scales cover %u columns, expected 64 or 128%s", scale_k, by_row ? ", or 0 for a scale a row" : "");
    uint32_t want_phase = wtype == MK_W_FP8 ? row0 % mk_scale_rows(scale_k) : 0, want_seg = wtype == MK_W_FP8 ? mk_segments(want_phase, (uint32_t)n, scale_k) : 0;
    if (phase != want_phase || nseg != want_seg)
        return mk_refuse(c, x, "scales: phase %u and %u segments, rows [%u, %llu) have phase %u and %u", phase, nseg, row0, row0 + (ull)n, want_phase,
                         want_seg);
    return MK_OK;
}

static int add_state(mk_check *c, uint32_t x, uint64_t off, uint64_t bytes)
{
    if (off % 16 || off > c->i->state_slot_bytes || bytes > c->i->state_slot_bytes - off)
        return mk_refuse(c, x, "state [%llu, +%llu) is outside a slot of %llu bytes or not at a multiple of 16", (ull)off, (ull)bytes,
                         (ull)c->i->state_slot_bytes);
    c->state[c->n_state++] = (mk_range){off, bytes, x};
    return MK_OK;
}

/* ---- opcodes -------------------------------------------------------------------------------------------------------- */

static int check_embed(mk_check *c, uint32_t x, const mk_embed *e)
{
    uint64_t size = e->wtype == MK_F32 ? 4 : 2, bytes = (uint64_t)c->i->vocab * c->i->hidden * size;
    const mk_insn *in = &c->p->insn[x];
    if (e->wtype != MK_F32 && e->wtype != MK_BF16) return mk_refuse(c, x, "table of type %u, expected f32 (0) or bf16 (1)", e->wtype);
    if (e->hidden != c->i->hidden) return mk_refuse(c, x, "rows of %u values, hidden is %u", e->hidden, c->i->hidden);
    if (e->embed_off % 16 || e->embed_off > c->i->embed_bytes || bytes > c->i->embed_bytes - e->embed_off)
        return mk_refuse(c, x, "table [%llu, +%llu) is outside the embedding region of %llu bytes", (ull)e->embed_off, (ull)bytes,
                         (ull)c->i->embed_bytes);
    TRY(signals_slice(c, x, e->n));
    const mk_vec *v = &c->p->vec[in->signal_vec];
    TRY(is_f32(c, x, v));
    if (v->width != e->hidden || mk_vec_starts(c->p, v)[in->signal_slice] != e->first)
        return mk_refuse(c, x, "values [%u, %u) of %u, slice %u of %s (%u wide) starts at %u", e->first, e->first + e->n, e->hidden,
                         in->signal_slice, v->name, v->width, mk_vec_starts(c->p, v)[in->signal_slice]);
    return positive(c, x, e->scale, 0, "scale");
}

static int check_headnorm(mk_check *c, uint32_t x, const mk_gemv *g)
{
    const mk_insn *in = &c->p->insn[x];
    const mk_vec *v = mk_wait_vec(c, in, 0);
    const uint32_t *start = mk_vec_starts(c->p, v);
    if (!v->trailer) return mk_refuse(c, x, "head norm needs trailers, %s has none", v->name);
    if (!g->norm_group || g->k % g->norm_group || g->in_off % g->norm_group)
        return mk_refuse(c, x, "head norm over %u values does not divide input [%u, +%u)", g->norm_group, g->in_off, g->k);
    /* the trailers of a head are those of the slices that start in it, so no slice may reach over a head's end */
    for (uint32_t s = in->wait[0].slice0; s < (uint32_t)in->wait[0].slice0 + in->wait[0].nslice; s++)
        if (start[s] / g->norm_group != (start[s + 1] - 1) / g->norm_group)
            return mk_refuse(c, x, "head norm: slice %u of %s, [%u, %u), reaches over a head of %u values", s, v->name, start[s], start[s + 1],
                             g->norm_group);
    return MK_OK;
}

static int check_gemv(mk_check *c, uint32_t x, const mk_gemv *g)
{
    const mk_insn *in = &c->p->insn[x];
    if (g->prologue > MK_PRO_HEADNORM || g->epilogue > MK_EPI_GATED || g->flags & ~MK_GEMV_X_F32)
        return mk_refuse(c, x, "prologue %u, epilogue %u, flags 0x%x: not legal", g->prologue, g->epilogue, g->flags);
    uint32_t halves = g->epilogue == MK_EPI_SILU ? 2 : 1;
    TRY(segment(c, x, g->wtype, g->n, halves, g->k, g->row0, g->phase, g->nseg, g->scale_k));
    TRY(tape(c, x, mk_segment_bytes(g->wtype, g->n * halves, g->k, g->nseg * halves, g->scale_k)));
    TRY(no_dynamic(c, x, 0));
    TRY(reads(c, x, 0, g->in_off, g->k, "its input"));
    if (!g->k_chunk || g->k_chunk > g->k || (g->k_chunk < g->k && g->k_chunk % 128))
        return mk_refuse(c, x, "k_chunk %u, expected k = %u or a smaller multiple of 128", g->k_chunk, g->k);
    if (g->prologue == MK_PRO_RMS) TRY(params(c, x, g->param_off, g->k, "norm"));
    if (g->prologue == MK_PRO_HEADNORM) TRY(check_headnorm(c, x, g));
    TRY(positive(c, x, g->eps, g->prologue == MK_PRO_NONE, "eps"));
    if (!isfinite(g->scale)) return mk_refuse(c, x, "scale is %g", (double)g->scale);

    TRY(signals_scope(c, x, in->signal_vec != MK_NONE && c->p->vec[in->signal_vec].scope == MK_LOCAL ? MK_LOCAL : MK_PACKET));
    const mk_vec *out = &c->p->vec[in->signal_vec];
    if (out->scope == MK_LOCAL)
        TRY(signals_local(c, x, (uint64_t)MK_MAX_ROWS * g->n * 4));
    else
        TRY(signals_slice(c, x, g->n));
    if (g->epilogue != MK_EPI_GATED && g->gate_off) return mk_refuse(c, x, "gate_off is %u without a gate", g->gate_off);
    if (g->epilogue == MK_EPI_GATED) {
        TRY(no_dynamic(c, x, 2));
        TRY(reads(c, x, 2, g->gate_off, 1, "the gate"));
        TRY(is_f32(c, x, mk_wait_vec(c, in, 2)));
    }
    if (g->epilogue != MK_EPI_ADD && g->epilogue != MK_EPI_GATED) return MK_OK;

    const mk_vec *res = mk_wait_vec(c, in, 1);
    if (res->scope == MK_LOCAL) {
        const mk_insn *src;
        TRY(written_by(c, x, 1, MK_OP_GEMV, &src));
        if (src->gemv.n != g->n) return mk_refuse(c, x, "adds to local vector %s of %u values, it has %u", res->name, src->gemv.n, g->n);
        return MK_OK;
    }
    TRY(wait_is(c, x, 1, MK_PACKET));
    TRY(no_dynamic(c, x, 1));
    const uint32_t *rs = mk_vec_starts(c->p, res);
    uint32_t r0 = rs[in->wait[1].slice0];
    if (in->wait[1].nslice != 1 || rs[in->wait[1].slice0 + 1] - r0 != g->n)
        return mk_refuse(c, x, "the residual must be one slice of %u values, it is %u of %s from %u on", g->n, in->wait[1].nslice, res->name, r0);
    if (out->scope == MK_PACKET) {
        uint32_t o0 = mk_vec_starts(c->p, out)[in->signal_slice];
        if (o0 != r0) return mk_refuse(c, x, "adds values from %u of %s to values from %u of %s", r0, res->name, o0, out->name);
        TRY(is_f32(c, x, out));
    }
    return is_f32(c, x, res);
}

static int check_delta(mk_check *c, uint32_t x, const mk_delta *d)
{
    if (!d->dk || !d->dv || d->dk > 1024 || d->dv > 1024 || d->decay > MK_DECAY_HEAD || d->gate > MK_GATE_SILU || d->taps < 2 || d->taps > 16)
        return mk_refuse(c, x, "dk %u, dv %u, decay %u, gate %u, %u taps: expected 1 to 1024 channels, decay and gate 0 or 1, 2 to 16 taps", d->dk, d->dv,
                         d->decay, d->gate, d->taps);
    for (uint32_t k = 0; k < 3; k++) TRY(no_dynamic(c, x, k));
    TRY(reads(c, x, 0, d->q_off, d->dk, "q"));
    TRY(reads(c, x, 0, d->k_off, d->dk, "k"));
    TRY(reads(c, x, 0, d->v_off, d->dv, "v"));
    TRY(reads(c, x, 1, d->f_off, d->rank ? d->rank : mk_delta_decays(d), d->rank ? "f's inputs" : "f"));
    TRY(reads(c, x, 1, d->z_off, d->rank ? d->rank : d->dv, d->rank ? "z's inputs" : "z"));
    for (uint32_t k = 0; d->rank && k < 2; k++) /* the row that a segment begins with is not told: its phase says enough */
        TRY(segment(c, x, d->low[k].wtype, k ? d->dv : mk_delta_decays(d), 1, d->rank, d->low[k].phase, d->low[k].phase, d->low[k].nseg, d->low[k].scale_k));
    if (d->rank && d->decay != MK_DECAY_CHANNEL) return mk_refuse(c, x, "a product makes one f a head, expected one a channel");
    TRY(tape(c, x, mk_delta_segment_bytes(d, 0) + mk_delta_segment_bytes(d, 1)));
    TRY(reads(c, x, 2, d->b_off, 1, "b"));
    TRY(params(c, x, d->param_off, mk_delta_params(d), "convolution, A_log, dt_bias, o_norm"));
    TRY(signals_slice(c, x, d->dv));
    return add_state(c, x, d->state_off, mk_delta_state_bytes(d));
}

/* Slices of a packet vector that hold values [first, first + n). */
static mk_slices slices_of(const uint32_t *start, uint32_t slice0, uint32_t first, uint32_t n)
{
    mk_slices s = {slice0, 0};
    while (start[s.first + 1] <= first) s.first++;
    while (start[s.first + s.n] < first + n) s.n++;
    return s;
}

uint32_t mk_looks_at(const mk_check *c, uint32_t x, uint32_t k, mk_slices s[3])
{
    const mk_insn *in = &c->p->insn[x];
    const mk_delta *d = &in->delta;
    const uint32_t slice0 = in->wait[k].slice0, *start = mk_vec_starts(c->p, mk_wait_vec(c, in, k));
    s[0] = (mk_slices){slice0, in->wait[k].nslice};
    if (in->opcode != MK_OP_DELTA_STEP || k == 2) return 1;
    s[0] = slices_of(start, slice0, k ? d->f_off : d->q_off, k ? d->rank ? d->rank : mk_delta_decays(d) : d->dk);
    s[1] = slices_of(start, slice0, k ? d->z_off : d->k_off, k ? d->rank ? d->rank : d->dv : d->dk);
    if (k) return 2;
    s[2] = slices_of(start, slice0, d->v_off, d->dv);
    return 3;
}

/* A split has a bounded number of pages, and the splits of any row a place for their partials. */
static int splits(mk_check *c, uint32_t x, uint32_t grain, uint32_t most)
{
    if (grain > 4 || most > MK_MAX_SPLITS)
        return mk_refuse(c, x, "splits of 1 << %u pages and at most %u of them, expected at most 4 and %u", grain, most, MK_MAX_SPLITS);
    return MK_OK;
}

static int check_mla(mk_check *c, uint32_t x, const mk_mla *m)
{
    const mk_insn *in = &c->p->insn[x];
    uint64_t row = (uint64_t)m->latent + m->rope, pool = c->i->kv_page_bytes * c->i->kv_pages;
    uint32_t act = c->i->flags & MK_PROG_ACT_F32 ? 4 : 2;
    uint64_t page = (uint64_t)mk_latent_row_bytes(m->latent, m->rope, m->cache, act) * MK_PAGE;
    if (m->cache != MK_CACHE_ACT && (m->cache != MK_CACHE_FP8 || act != 2 || m->latent % 16))
        return mk_refuse(c, x, "cache of type %u with a latent of %u: expected %u (activations), or %u (fp8) with activations in bf16 and a multiple of 16", m->cache, m->latent,
                         MK_CACHE_ACT, MK_CACHE_FP8);
    if (!m->latent || m->latent % 8 || m->rope % 8 || m->rotary > 1 || (m->rotary && !m->rope))
        return mk_refuse(c, x, "latent %u, rope %u, rotary %u: expected multiples of 8 and rotary 0 or 1", m->latent, m->rope, m->rotary);
    if (!m->all_heads || m->all_heads > 4096 || !m->heads || (uint64_t)m->head0 + m->heads > m->all_heads)
        return mk_refuse(c, x, "heads [%u, +%u) of %u", m->head0, m->heads, m->all_heads);
    if (page > c->i->kv_page_bytes)
        return mk_refuse(c, x, "a page of %u tokens needs %llu bytes, kv_page_bytes is %llu", MK_PAGE, (ull)page, (ull)c->i->kv_page_bytes);
    if (!pool || m->kv_off % pool || m->kv_off / pool >= c->i->kv_layers)
        return mk_refuse(c, x, "cache pool at %llu, expected a multiple of %llu below %u pools", (ull)m->kv_off, (ull)pool, c->i->kv_layers);
    if (in->opcode != MK_OP_COMBINE && m->gate) return mk_refuse(c, x, "gate is %u, expected 0: only COMBINE has one", m->gate);
    if (in->opcode != MK_OP_COMBINE)
        TRY(params(c, x, m->param_off, (uint64_t)m->latent + (m->rotary ? m->rope / 2 : 0), "latent norm and rotation"));

    TRY(splits(c, x, m->grain, m->most));
    uint64_t partials = (uint64_t)MK_MAX_ROWS * MK_MAX_SPLITS * m->all_heads * mk_partial_floats(m->latent) * 4;
    switch (in->opcode) {
    case MK_OP_KV_APPEND:
        TRY(no_dynamic(c, x, 0));
        TRY(reads(c, x, 0, m->in_off, row, "latent and key"));
        TRY(positive(c, x, m->eps, 0, "eps"));
        TRY(signals_scope(c, x, MK_BULK));
        if (c->p->vec[in->signal_vec].signals != 1)
            return mk_refuse(c, x, "it is the one writer of its cache, %s takes %u signals", c->p->vec[in->signal_vec].name,
                             c->p->vec[in->signal_vec].signals);
        return MK_OK;
    case MK_OP_MLA_PARTIAL: {
        uint64_t last = m->in_off + (uint64_t)(m->all_heads - 1) * m->qk_stride;
        if (m->head0 || m->heads != m->all_heads) return mk_refuse(c, x, "heads [%u, +%u), expected all %u", m->head0, m->heads, m->all_heads);
        TRY(no_dynamic(c, x, 0));
        TRY(no_dynamic(c, x, 1));
        TRY(reads_all(c, x, 0, (uint64_t)m->all_heads * m->latent, "q~"));
        TRY(wait_is(c, x, 1, MK_PACKET));
        if (m->rope) {
            TRY(reads(c, x, 1, m->in_off, m->rope, "q_pe of the first head"));
            TRY(reads(c, x, 1, last, m->rope, "q_pe of the last head"));
        }
        TRY(wait_is(c, x, 2, MK_BULK));
        TRY(positive(c, x, m->scale, 0, "softmax scale"));
        TRY(signals_scope(c, x, MK_BULK));
        const mk_vec *v = &c->p->vec[in->signal_vec];
        if (v->width < partials) return mk_refuse(c, x, "partials need %llu bytes, %s has %u", (ull)partials, v->name, v->width);
        if (m->parts != v->signals || m->part >= m->parts)
            return mk_refuse(c, x, "part %u of %u, %s takes %u signals", m->part, m->parts, v->name, v->signals);
        return MK_OK;
    }
    default: {
        TRY(wait_is(c, x, 0, MK_BULK));
        if (m->heads != 1 && m->heads != m->all_heads) return mk_refuse(c, x, "combines one head, heads is %u", m->heads);
        if (m->gate > 1) return mk_refuse(c, x, "gate is %u, expected 0 or 1", m->gate);
        if (m->gate) {
            TRY(no_dynamic(c, x, 1));
            TRY(reads(c, x, 1, m->in_off + (uint64_t)m->head0 * m->qk_stride + m->first, m->n, "the gate"));
        }
        if (!m->n || (uint64_t)m->first + m->n > m->latent)
            return mk_refuse(c, x, "latent values [%u, +%u) of %u", m->first, m->n, m->latent);
        TRY(signals_slice(c, x, m->n));
        const mk_vec *v = &c->p->vec[in->signal_vec];
        uint64_t at = (uint64_t)m->head0 * m->latent + m->first;
        if (mk_vec_starts(c->p, v)[in->signal_slice] != at)
            return mk_refuse(c, x, "values from %llu of the heads' latents, slice %u of %s starts at %u", (ull)at, in->signal_slice, v->name,
                             mk_vec_starts(c->p, v)[in->signal_slice]);
        return MK_OK;
    }
    }
}

static int check_gqa(mk_check *c, uint32_t x, const mk_gqa *g)
{
    const mk_insn *in = &c->p->insn[x];
    uint64_t pool = c->i->kv_page_bytes * c->i->kv_pages;
    uint64_t page = mk_gqa_page_values(g->kv_heads, g->dim) * (c->i->flags & MK_PROG_ACT_F32 ? 4 : 2);
    if (!g->dim || g->dim % 8 || g->rope % 2 || g->rope > g->dim || g->norm > 1)
        return mk_refuse(c, x, "dim %u, rope %u, norm %u: expected a dim that is a multiple of 8, an even rope within it, norm 0 or 1", g->dim, g->rope,
                         g->norm);
    if (!g->kv_heads || !g->heads || g->heads > 4096 || g->heads % g->kv_heads)
        return mk_refuse(c, x, "%u heads on %u KV heads", g->heads, g->kv_heads);
    if (page > c->i->kv_page_bytes)
        return mk_refuse(c, x, "a page of %u tokens needs %llu bytes, kv_page_bytes is %llu", MK_PAGE, (ull)page, (ull)c->i->kv_page_bytes);
    if (!pool || g->kv_off % pool || g->kv_off / pool >= c->i->kv_layers)
        return mk_refuse(c, x, "cache pool at %llu, expected a multiple of %llu below %u pools", (ull)g->kv_off, (ull)pool, c->i->kv_layers);
    TRY(params(c, x, g->param_off, (uint64_t)(g->norm ? g->dim : 0) + g->rope / 2, "head norm and rotation"));
    if (g->norm) TRY(positive(c, x, g->eps, 0, "eps"));
    TRY(no_dynamic(c, x, 0));
    TRY(signals_scope(c, x, MK_BULK));
    const mk_vec *v = &c->p->vec[in->signal_vec];
    if (in->opcode == MK_OP_GQA_APPEND) {
        if (g->head >= g->kv_heads || v->signals != g->kv_heads)
            return mk_refuse(c, x, "KV head %u of %u, %s takes %u signals", g->head, g->kv_heads, v->name, v->signals);
        TRY(reads(c, x, 0, (uint64_t)g->k_off + g->head * g->dim, g->dim, "k"));
        return reads(c, x, 0, (uint64_t)g->v_off + g->head * g->dim, g->dim, "v");
    }
    TRY(splits(c, x, g->grain, g->most));
    uint64_t partials = (uint64_t)MK_MAX_ROWS * MK_MAX_SPLITS * g->heads * mk_partial_floats(g->dim) * 4;
    TRY(reads(c, x, 0, g->q_off, g->dim, "q of the first head"));
    TRY(reads(c, x, 0, g->q_off + (uint64_t)(g->heads - 1) * g->q_stride, g->dim, "q of the last head"));
    TRY(wait_is(c, x, 1, MK_BULK));
    TRY(positive(c, x, g->scale, 0, "softmax scale"));
    if (v->width < partials) return mk_refuse(c, x, "partials need %llu bytes, %s has %u", (ull)partials, v->name, v->width);
    if (g->parts != v->signals || g->part >= g->parts)
        return mk_refuse(c, x, "part %u of %u, %s takes %u signals", g->part, g->parts, v->name, v->signals);
    return MK_OK;
}

/* Vector `vec` is BULK sums of so many values. */
static int is_sums(mk_check *c, uint32_t x, uint32_t vec, uint32_t values)
{
    const mk_vec *v = &c->p->vec[vec];
    if (!mk_vec_sums(v)) return mk_refuse(c, x, "expected %s to be bulk sums", v->name);
    if (v->width != mk_sums_bytes(values)) return mk_refuse(c, x, "sums of %u values need %llu bytes, %s has %u", values, (ull)mk_sums_bytes(values), v->name, v->width);
    return MK_OK;
}

static int check_router(mk_check *c, uint32_t x, const mk_router *r)
{
    const mk_insn *in = &c->p->insn[x];
    if (!r->experts || r->experts > MK_MAX_EXPERT) return mk_refuse(c, x, "%u experts, expected 1 to %u", r->experts, MK_MAX_EXPERT);
    if (!r->n || r->n > MK_SEGMENT_ROWS) return mk_refuse(c, x, "%u values of h, expected 1 to %u", r->n, MK_SEGMENT_ROWS);
    TRY(tape(c, x, mk_segment_bytes(MK_W_BF16, r->n, r->experts, 0, 0)));
    TRY(no_dynamic(c, x, 0));
    TRY(reads(c, x, 0, r->first, r->n, "its slice"));
    const mk_vec *h = mk_wait_vec(c, in, 0);
    TRY(is_f32(c, x, h));
    const uint32_t *start = mk_vec_starts(c->p, h) + in->wait[0].slice0;
    if (in->wait[0].nslice != 1 || start[0] != r->first || start[1] != r->first + r->n)
        return mk_refuse(c, x, "values [%u, +%u) of %s, expected those of one slice", r->first, r->n, h->name);
    TRY(params(c, x, r->param_off, r->n, "norm"));
    if (in->signal_vec == MK_NONE) return mk_refuse(c, x, "publishes nothing, expected sums");
    return is_sums(c, x, in->signal_vec, r->experts);
}

static int check_route(mk_check *c, uint32_t x, const mk_route *r)
{
    if (!r->experts || r->experts > MK_MAX_EXPERT || !r->topk || r->topk > MK_MAX_TOPK || r->topk > r->experts)
        return mk_refuse(c, x, "top %u of %u experts, the limits are %u of %u", r->topk, r->experts, MK_MAX_TOPK, MK_MAX_EXPERT);
    uint32_t groups = r->groups ? r->groups : 1, size = r->experts / groups;
    if (r->experts % groups || (groups > 1 && (!r->topk_groups || r->topk_groups > groups || r->topk > r->topk_groups * size)))
        return mk_refuse(c, x, "%u experts in %u groups, %u of them kept, cannot give %u choices", r->experts, groups, r->topk_groups, r->topk);
    if (r->score > MK_SCORE_SOFTMAX || r->renorm > 1 || r->has_bias > 1)
        return mk_refuse(c, x, "score %u, renorm %u, has_bias %u: not legal", r->score, r->renorm, r->has_bias);
    TRY(positive(c, x, r->scale, 0, "scale"));
    const mk_insn *in = &c->p->insn[x];
    TRY(no_dynamic(c, x, 0));
    TRY(reads_all(c, x, 0, r->k, "h"));
    TRY(is_f32(c, x, mk_wait_vec(c, in, 0)));
    TRY(params(c, x, r->norm_off, r->k, "norm"));
    TRY(positive(c, x, r->eps, 0, "eps"));
    TRY(is_sums(c, x, in->wait[1].vec, r->experts));
    if (r->has_bias) TRY(params(c, x, r->param_off, r->experts, "router bias"));
    return signals_local(c, x, sizeof(mk_routes));
}

/* Everything both expert opcodes have in common; `rows` of the longest segment, scale segments it needs. */
static int check_expert_region(mk_check *c, uint32_t x, const mk_expert *e, const mk_insn *route, uint32_t rows, uint32_t halves, uint32_t nseg)
{
    uint64_t bytes = mk_segment_bytes(e->wtype, rows * halves, e->k, e->nseg * halves, MK_SCALE_ROWS);
    if (rows * halves > MK_SEGMENT_ROWS)
        return mk_refuse(c, x, "%u x %u matrix rows, expected at most %u in a segment", rows, halves, MK_SEGMENT_ROWS);
    if (e->nseg < nseg || (e->wtype == MK_W_BF16 && e->nseg))
        return mk_refuse(c, x, "scales: %u segments, its slices need %u", e->nseg, nseg);
    if (e->topk != route->route.topk) return mk_refuse(c, x, "top %u, but #%u ROUTE chooses %u", e->topk, route->seq, route->route.topk);
    if (e->base % 128 || e->slice_stride % 128 || e->expert_stride % 128)
        return mk_refuse(c, x, "expert slices at %llu + e * %llu + t * %u, expected multiples of 128", (ull)e->base, (ull)e->expert_stride,
                         e->slice_stride);
    if (e->slice_stride < bytes) return mk_refuse(c, x, "slices lie %u bytes apart, the longest has %llu", e->slice_stride, (ull)bytes);
    if (e->expert_stride < (uint64_t)e->slice_stride * e->T)
        return mk_refuse(c, x, "experts lie %llu bytes apart, %u slices of %u do not fit", (ull)e->expert_stride, e->T, e->slice_stride);
    uint64_t limit = c->i->expert_bytes;
    if (e->expert_stride > limit || e->base > limit || e->expert_stride * route->route.experts > limit - e->base)
        return mk_refuse(c, x, "%u experts of %llu bytes at %llu are outside the expert region of %llu bytes", route->route.experts,
                         (ull)e->expert_stride, (ull)e->base, (ull)limit);
    return MK_OK;
}

static int check_expert(mk_check *c, uint32_t x, const mk_expert *e)
{
    const mk_insn *in = &c->p->insn[x], *route;
    int up = in->opcode == MK_OP_EXPERT_UP;
    if (e->wtype != MK_W_BF16 && e->wtype != MK_W_FP8) return mk_refuse(c, x, "weights of type %u, expected bf16 (1) or fp8 (2)", e->wtype);
    if (!e->T || !e->inter || e->inter > MAX_K || !e->k || e->k > MAX_K)
        return mk_refuse(c, x, "%u slices, width %u, k %u: expected 1 to %u", e->T, e->inter, e->k, MAX_K);
    TRY(written_by(c, x, 1, MK_OP_ROUTE, &route));
    TRY(wait_is(c, x, 0, MK_PACKET));
    if (up) {
        if (e->T > e->inter) return mk_refuse(c, x, "%u rows cannot be cut into %u slices", e->inter, e->T);
        /* longest slice, and 128-row blocks that a slice may touch */
        uint32_t rows = 0, nseg = 0;
        for (uint32_t t = 0; t < e->T; t++) {
            uint32_t a = mk_expert_start(t, e->inter, e->T), n = mk_expert_start(t + 1, e->inter, e->T) - a, s = mk_segments(a % MK_SCALE_ROWS, n, MK_SCALE_ROWS);
            if (n > rows) rows = n;
            if (s > nseg) nseg = s;
        }
        TRY(check_expert_region(c, x, e, route, rows, 2, e->wtype == MK_W_FP8 ? nseg : 0));
        TRY(no_dynamic(c, x, 0));
        TRY(reads_all(c, x, 0, e->k, "its input"));
        TRY(params(c, x, e->param_off, e->k, "norm"));
        TRY(positive(c, x, e->eps, 0, "eps"));
        TRY(signals_scope(c, x, MK_PACKET));
        const mk_vec *v = &c->p->vec[in->signal_vec];
        if (!(v->flags & MK_VEC_DYNAMIC)) return mk_refuse(c, x, "publishes %s, expected a dynamic vector", v->name);
        if (v->nslice != (uint32_t)e->topk * e->T || v->trailer)
            return mk_refuse(c, x, "%u experts x %u slices, %s has %u slices", e->topk, e->T, v->name, v->nslice);
        if ((uint32_t)e->topk * e->T < c->i->workers)
            return mk_refuse(c, x, "dynamic coverage: %u experts x %u slices do not reach %u workers, so one of them may publish nothing of %s",
                             e->topk, e->T, c->i->workers, v->name);
        return MK_OK;
    }

    if (e->k != e->inter) return mk_refuse(c, x, "k is %u, expected the experts' width %u", e->k, e->inter);
    const mk_vec *u = mk_wait_vec(c, in, 0), *acc = mk_wait_vec(c, in, 2);
    if (!(u->flags & MK_VEC_DYNAMIC)) return mk_refuse(c, x, "reads %s, expected a dynamic vector", u->name);
    TRY(reads_all(c, x, 0, (uint64_t)e->topk * e->inter, "the experts' outputs"));
    TRY(signals_slice(c, x, e->n));
    const mk_vec *h = &c->p->vec[in->signal_vec];
    TRY(is_f32(c, x, h));
    uint32_t row0 = mk_vec_starts(c->p, h)[in->signal_slice];
    if (e->T != h->nslice || e->t != in->signal_slice)
        return mk_refuse(c, x, "slice %u of %u, but it publishes slice %u of %u of %s", e->t, e->T, in->signal_slice, h->nslice, h->name);
    uint32_t phase = e->wtype == MK_W_FP8 ? row0 % MK_SCALE_ROWS : 0;
    if (e->phase != phase) return mk_refuse(c, x, "scales: phase %u, row %u has phase %u", e->phase, row0, phase);
    TRY(check_expert_region(c, x, e, route, e->n, 1, e->wtype == MK_W_FP8 ? mk_segments(phase, e->n, MK_SCALE_ROWS) : 0));
    if (acc->scope == MK_LOCAL) {
        const mk_insn *src;
        TRY(written_by(c, x, 2, MK_OP_GEMV, &src));
        if (src->gemv.n != e->n) return mk_refuse(c, x, "adds to %u values of local vector %s, it has %u", src->gemv.n, acc->name, e->n);
        if ((src->gemv.epilogue != MK_EPI_ADD && src->gemv.epilogue != MK_EPI_GATED) || src->wait[1].vec != in->signal_vec || src->wait[1].slice0 != in->signal_slice)
            return mk_refuse(c, x, "adds to local vector %s, which is not slice %u of %s plus something", acc->name, in->signal_slice, h->name);
        return MK_OK;
    }
    if (acc != h || in->wait[2].slice0 != in->signal_slice || in->wait[2].nslice != 1)
        return mk_refuse(c, x, "adds to slices [%u, +%u) of %s, but publishes slice %u of %s", in->wait[2].slice0, in->wait[2].nslice, acc->name,
                         in->signal_slice, h->name);
    return MK_OK;
}

static int check_lm_head(mk_check *c, uint32_t x, const mk_lm_head *l)
{
    const mk_insn *in = &c->p->insn[x];
    TRY(segment(c, x, l->wtype, l->n, 1, l->k, l->row0, l->phase, l->nseg, l->scale_k));
    TRY(tape(c, x, mk_segment_bytes(l->wtype, l->n, l->k, l->nseg, l->scale_k)));
    if (l->vocab != c->i->vocab || l->row0 > l->vocab || l->n > l->vocab - l->row0)
        return mk_refuse(c, x, "vocabulary rows [%u, +%u) of %u, the program's vocabulary is %u", l->row0, l->n, l->vocab, c->i->vocab);
    TRY(no_dynamic(c, x, 0));
    TRY(reads_all(c, x, 0, l->k, "its input"));
    TRY(params(c, x, l->param_off, l->k, "norm"));
    TRY(positive(c, x, l->eps, 0, "eps"));
    TRY(signals_slice(c, x, 4));
    TRY(is_f32(c, x, &c->p->vec[in->signal_vec]));
    if (l->logits_vec >= c->i->n_vec || c->p->vec[l->logits_vec].scope != MK_BULK || l->logits_pub >= c->p->vec[l->logits_vec].pubs)
        return mk_refuse(c, x, "logits go to vector %u pub %u, expected a publication of a bulk vector", l->logits_vec, l->logits_pub);
    const mk_vec *v = &c->p->vec[l->logits_vec];
    uint64_t bytes = (uint64_t)MK_MAX_ROWS * l->vocab * 4;
    if (v->width < bytes) return mk_refuse(c, x, "logits need %llu bytes, %s has %u", (ull)bytes, v->name, v->width);
    return MK_OK;
}

static int check_sample(mk_check *c, uint32_t x, const mk_sample *s)
{
    TRY(no_dynamic(c, x, 0));
    TRY(reads_all(c, x, 0, 4ull * s->slices, "statistics"));
    TRY(wait_is(c, x, 1, MK_BULK));
    if (s->vocab != c->i->vocab) return mk_refuse(c, x, "vocabulary %u, the program's is %u", s->vocab, c->i->vocab);
    if (s->helper > s->helpers) return mk_refuse(c, x, "helper %u of %u", s->helper, s->helpers);
    if (s->helper) {
        if (c->p->insn[x].signal_vec != MK_NONE) return mk_refuse(c, x, "helps, but publishes %s", c->p->vec[c->p->insn[x].signal_vec].name);
        return MK_OK;
    }
    return signals_local(c, x, sizeof(mk_sampled));
}

/* The vector that the previous instruction staged serves this one as well. */
static int check_staged(mk_check *c, uint32_t x)
{
    const mk_insn *in = &c->p->insn[x], *prev = in - 1;
    if ((in->opcode != MK_OP_GEMV && in->opcode != MK_OP_LM_HEAD) || in->seq == 0 || prev->opcode != in->opcode)
        return mk_refuse(c, x, "staged: there is no %s before it that has staged its input", mk_opcode_name(in->opcode));
    int same = memcmp(&in->wait[0], &prev->wait[0], sizeof in->wait[0]) == 0;
    if (in->opcode == MK_OP_GEMV) {
        const mk_gemv *a = &in->gemv, *b = &prev->gemv;
        same = same && a->in_off == b->in_off && a->k == b->k && a->prologue == b->prologue && a->flags == b->flags &&
               a->norm_group == b->norm_group && a->param_off == b->param_off && !memcmp(&a->eps, &b->eps, sizeof a->eps) &&
               a->k_chunk == a->k && b->k_chunk == b->k;
    } else {
        const mk_lm_head *a = &in->lm_head, *b = &prev->lm_head;
        same = same && a->k == b->k && a->param_off == b->param_off && !memcmp(&a->eps, &b->eps, sizeof a->eps);
    }
    return same ? MK_OK : mk_refuse(c, x, "staged: #%u stages another input, or in chunks", prev->seq);
}

static int check_smem(mk_check *c, uint32_t x)
{
    uint32_t need = mk_insn_smem(c->p, &c->p->insn[x]), stage = mk_insn_staging(c->p, &c->p->insn[x]);
    mk_validation *v = c->out;
    if (stage > v->staging_max) v->staging_max = stage;
    if (need > v->smem_max) {
        v->smem_max = need;
        v->smem_worker = c->owner[x];
        v->smem_seq = c->p->insn[x].seq;
    }
    if (!c->i->smem_limit) return MK_OK;
    if (stage > MK_STAGING_BYTES)
        return mk_refuse(c, x, "shared memory: %u bytes of gathered vectors at %u rows, the staging area has %u", stage, MK_MAX_ROWS,
                         MK_STAGING_BYTES);
    if (need > c->i->smem_limit)
        return mk_refuse(c, x, "shared memory: %u bytes at %u rows, a worker has %u", need, MK_MAX_ROWS, c->i->smem_limit);
    return MK_OK;
}

int mk_check_insn(mk_check *c, uint32_t x)
{
    const mk_insn *in = &c->p->insn[x];
    uint32_t want = waits[in->opcode];
    if (in->opcode == MK_OP_GEMV) want += in->gemv.epilogue == MK_EPI_ADD ? 1 : in->gemv.epilogue == MK_EPI_GATED ? 2 : 0;
    if (in->opcode == MK_OP_COMBINE) want += in->mla.gate != 0;
    if (in->nwait != want) return mk_refuse(c, x, "%u waits, expected %u", in->nwait, want);
    if (in->opcode != MK_OP_GEMV && in->opcode != MK_OP_LM_HEAD && in->opcode != MK_OP_DELTA_STEP && in->opcode != MK_OP_ROUTER && in->tape_bytes)
        return mk_refuse(c, x, "consumes %u bytes of tape, expected none", in->tape_bytes);
    if (in->flags & MK_F_STAGED) TRY(check_staged(c, x));
    const mk_insn *src;
    switch (in->opcode) {
    case MK_OP_EMBED: TRY(check_embed(c, x, &in->embed)); break;
    case MK_OP_GEMV: TRY(check_gemv(c, x, &in->gemv)); break;
    case MK_OP_DELTA_STEP: TRY(check_delta(c, x, &in->delta)); break;
    case MK_OP_KV_APPEND:
    case MK_OP_MLA_PARTIAL:
    case MK_OP_COMBINE: TRY(check_mla(c, x, &in->mla)); break;
    case MK_OP_GQA_APPEND:
    case MK_OP_GQA_PARTIAL: TRY(check_gqa(c, x, &in->gqa)); break;
    case MK_OP_ROUTER: TRY(check_router(c, x, &in->router)); break;
    case MK_OP_ROUTE: TRY(check_route(c, x, &in->route)); break;
    case MK_OP_EXPERT_UP:
    case MK_OP_EXPERT_DOWN: TRY(check_expert(c, x, &in->expert)); break;
    case MK_OP_LM_HEAD: TRY(check_lm_head(c, x, &in->lm_head)); break;
    case MK_OP_SAMPLE: TRY(check_sample(c, x, &in->sample)); break;
    case MK_OP_SCHEDULE:
        TRY(written_by(c, x, 0, MK_OP_SAMPLE, &src));
        if (in->signal_vec != MK_NONE) return mk_refuse(c, x, "publishes %s, expected nothing but the next step", c->p->vec[in->signal_vec].name);
        break;
    default: break;
    }
    return check_smem(c, x);
}
