/* What follows from instructions alone, worked out by the host once so that compute warps need not (mk_plan). Part of gpu.cu. */
#ifndef MK_PLANS_CUH
#define MK_PLANS_CUH

#include "megakernel/deal.h"
#include "megakernel/queries.cuh"

/* EXPERT_DOWN: an expert's segment, and how it lies in stages. */
static void down_plan(const mk_insn *in, const mk_seg *s, mk_plan *p)
{
    const mk_expert *e = &in->expert;
    const uint32_t per = s->per_most;
    p->tile = {e->wtype, e->n, s->nkb, per, stages_of(s, per) + s->blank, 1, e->nseg, e->phase, 1};
    p->shared = {s->share, (uint16_t)s->scales};
    p->steps = mk_down_steps_of(&p->tile, p->shared, e->k);
}

/* Bytes of the staging area that EXPERT_DOWN's pairs of one row take. */
static uint32_t pairs_bytes(const mk_expert *e)
{
    return e->topk * mk_row_stride(e->k) + MK_PAIR_HEAD;
}
/* Packets of a pair of EXPERT_DOWN. */
static uint32_t pair_packets(const mk_gpu *g, const mk_insn *in)
{
    const mk_vec *u = &g->prog->vec[in->wait[0].vec];
    return u->nslice / in->expert.topk * u->slice_packets;
}
/* EXPERT_DOWN: the packets of a pair and their table; of one row, whether a warp gathers a pair at once and there is room for all of them. */
static void pairs_plan(const mk_gpu *g, const mk_insn *in, mk_plan *p)
{
    p->packets = pair_packets(g, in);
    p->map = g->pair_at[in->wait[0].vec];
    p->dealt = p->map && p->packets <= MK_PAIR_PACKETS(in->expert.n) && in->expert.n <= MK_DOWN_ONE_ROWS && pairs_bytes(&in->expert) <= MK_STAGING;
}

/* MLA_PARTIALs whose queries lie alike in their packets. */
static int queries_alike(const mk_insn *a, const mk_insn *b)
{
    const mk_mla *x = &a->mla, *y = &b->mla;
    return waits_alike(a, b, 2) && x->in_off == y->in_off && x->heads == y->heads && x->latent == y->latent && x->rope == y->rope && x->qk_stride == y->qk_stride;
}
static const mk_table *queries_of(const mk_gpu *g, const mk_insn *in)
{
    return table_of(g->prog, g->queries, g->n_queries, queries_alike, in);
}
/* Inputs that are staged alike have the same number, from 1 on. */
typedef struct input_key {
    uint32_t vec, pub;
    mk_input x;
} input_key;
typedef struct input_keys {
    input_key *key;
    uint32_t n, room, last; /* last: the one found last; the workers' queues are much alike */
} input_keys;
static uint32_t input_number(input_keys *t, const mk_insn *in, const mk_input *x, mk_err *err)
{
    input_key k;
    memset(&k, 0, sizeof k);
    k.vec = in->wait[0].vec;
    k.pub = in->wait[0].pub;
    k.x = *x;
    for (uint32_t i = 0; i < t->n; i++) {
        const uint32_t at = (t->last + i) % t->n;
        if (memcmp(&t->key[at], &k, sizeof k)) continue;
        t->last = at;
        return at + 1;
    }
    if (t->n == t->room) {
        const uint32_t room = t->room ? 2 * t->room : 256;
        input_key *more = (input_key *)realloc(t->key, room * sizeof *more);
        if (!more) return mk_fail(err, MK_E_CAPACITY, "out of memory"), 0;
        t->key = more;
        t->room = room;
    }
    t->last = t->n;
    t->key[t->n++] = k;
    return t->n;
}

/* ROUTER, n instructions after its queue's first. In a step of one row the GEMV before it, if it makes the slice that is wanted, leaves it behind. plan: of the ROUTER. */
static void router_plan(const mk_insn *in, const mk_seg *s, mk_plan *plan, uint32_t n)
{
    const mk_insn *v = in - 1;
    const mk_wait *w = &in->wait[0];
    plan->tile = (mk_tile){MK_W_BF16, in->router.n, s->nkb, s->per_most, stages_of(s, s->per_most), 1, 0, 0, MK_SHIFT_ALL};
    if (!n || v->opcode != MK_OP_GEMV || !MK_IS_ONE(plan[-1].one) || v->signal_vec != w->vec || v->signal_pub != w->pub || v->signal_slice != w->slice0) return;
    plan[-1].end |= MK_END_NEAR;
    plan[-1].near_gain = in->router.param_off;
    plan->end |= MK_END_NEAR;
}

/* How warps share the packets of one row of wait 0, and what takes them, into the plan; 0: not at all (deal.h), or there are no gammas for it. */
static uint32_t deal(const mk_gpu *g, const mk_insn *in, mk_plan *p)
{
    const mk_vec *v = &g->prog->vec[in->wait[0].vec];
    mk_plan dealt = *p;
    const uint32_t one = mk_deal_plan(v, mk_vec_starts(g->prog, v), &in->wait[0], &dealt);
    if (one && p->x.prologue == MK_PRO_RMS) {
        const mk_gain key = gain_key(g->prog, in, &p->x), *t = gain_of(g, &key);
        if (!t) return 0; /* of another program */
        dealt.gain = t->at;
    }
    *p = dealt;
    return one;
}

/* The plan of GEMV, LM_HEAD, EXPERT_UP and ROUTE, which stages h as EXPERT_UP does that comes behind it. experts: ROUTE: type of that one's weights. */
static int plan_of(const mk_gpu *g, const mk_insn *in, const mk_seg *s, uint32_t experts, input_keys *keys, mk_plan *out, mk_err *err)
{
    const int lm = in->opcode == MK_OP_LM_HEAD, up = in->opcode == MK_OP_EXPERT_UP, route = in->opcode == MK_OP_ROUTE;
    const mk_gemv *v = &in->gemv;
    const mk_lm_head *l = &in->lm_head;
    const mk_expert *e = &in->expert;
    const mk_vec *vec = &g->prog->vec[in->wait[0].vec];
    const uint32_t wtype = lm ? l->wtype : up ? e->wtype : route ? experts : v->wtype;
    mk_plan p;
    memset(&p, 0, sizeof p);
    p.x = input_of(in);
    p.x.form = mk_form(wtype, in->opcode == MK_OP_GEMV && v->flags & MK_GEMV_X_F32);
    p.inv_k = 1.0f / (float)(p.x.norm_group ? p.x.norm_group : p.x.k);
    p.head_shift = MK_NO_NORM;
    if (up) {
        const mk_tile t = {wtype, s->most, s->nkb, s->per_most, stages_of(s, s->per_most), 2, e->nseg, 0, 1};
        p.tile = t;
        p.less = MK_STAGES_WORD(s->per_less, stages_of(s, s->per_less));
        p.magic = s->magic;
    } else if (!route) {
        mk_tile *t = &p.tile;
        t->wtype = wtype;
        t->halves = !lm && v->epilogue == MK_EPI_SILU ? 2 : 1;
        t->rows = rows_of(in);
        t->nkb = s->nkb;
        t->per = s->per_most;
        t->nst = stages_of(s, t->per);
        t->nseg = lm ? l->nseg : v->nseg;
        t->phase = lm ? l->phase : v->phase;
        t->shift = mk_scale_shift(lm ? l->scale_k : v->scale_k);
        for (uint32_t n = p.x.norm_group / mk_kblock_values(wtype); n; n /= 2) p.head_shift = p.head_shift == MK_NO_NORM ? 0 : p.head_shift + 1;
    }
    if (p.x.prologue == MK_PRO_HEADNORM && in->wait[0].nslice > MK_RED_FLOATS / MK_MAX_ROWS)
        return mk_fail(err, MK_E_CAPACITY, "vector %s: norms of heads out of %u slices, at most %u", vec->name, in->wait[0].nslice, MK_RED_FLOATS / MK_MAX_ROWS);
    p.f32 = vec->dtype == MK_F32;
    p.packets = in->wait[0].nslice * vec->slice_packets;
    p.map = g->map_at[in->wait[0].vec] + in->wait[0].slice0 * vec->slice_packets;
    const uint32_t one = p.x.form == MK_X_F32 ? 0 : deal(g, in, &p);
    p.dealt = !one || in->opcode == MK_OP_GEMV ? 0 : MK_IS_FAR(one) ? 2 : 1;
    if (in->opcode == MK_OP_GEMV && one) {
        const mk_vec *to = &g->prog->vec[in->signal_vec];
        const int gated = v->epilogue == MK_EPI_GATED, adds = gated || v->epilogue == MK_EPI_ADD;
        p.one = (uint8_t)one;
        p.end = (v->epilogue == MK_EPI_SILU ? MK_END_SILU : 0u) | (adds ? MK_END_ADDS : 0u) | (gated ? MK_END_GATED : 0u) | (to->scope == MK_LOCAL ? MK_END_TO_LOCAL : 0u) |
                (to->dtype == MK_F32 ? MK_END_F32 : 0u);
        p.out_at = (uint32_t)to->offset;
        if (adds && g->prog->vec[in->wait[1].vec].scope == MK_LOCAL) {
            p.end |= MK_END_FROM_LOCAL;
            p.res_at = (uint32_t)g->prog->vec[in->wait[1].vec].offset;
        }
        if (gated) {
            const mk_wait *w = &in->wait[2];
            const mk_vec *gate = &g->prog->vec[w->vec];
            const uint32_t *start = mk_vec_starts(g->prog, gate);
            uint32_t s = w->slice0;
            while (s + 1u < (uint32_t)w->slice0 + w->nslice && start[s + 1] <= v->gate_off) s++;
            p.gate_at = (s - w->slice0) * gate->slice_packets + (v->gate_off - start[s]) / 3;
            p.end |= (v->gate_off - start[s]) % 3 << 8;
        }
    }
    if (!(p.key = input_number(keys, in, &p.x, err))) return MK_E_CAPACITY;
    *out = p;
    return MK_OK;
}

/* Where a row has one split, GQA_PARTIAL can publish in COMBINE's place: if the COMBINEs of its partials are all there, cut every head alike and have no gate. */
static int whole_plans(const mk_program *p, const mk_insn *insn, uint32_t n, mk_plan *plan, mk_err *err)
{
    typedef struct merger {
        uint32_t n, insn, parts, told; /* COMBINEs, the first one; partials, those that could publish */
        int not_alike;
    } merger;
    merger *all = (merger *)calloc((size_t)p->info.n_vec * MK_EPOCH_STRIDE, sizeof *all);
    if (!all) return mk_fail(err, MK_E_CAPACITY, "out of memory");
    for (uint32_t k = 0; k < n; k++) {
        const mk_insn *in = &insn[k];
        if (in->opcode != MK_OP_COMBINE || in->wait[0].pub >= MK_EPOCH_STRIDE) continue;
        merger *m = &all[(size_t)in->wait[0].vec * MK_EPOCH_STRIDE + in->wait[0].pub];
        if (!m->n++) m->insn = k;
        const mk_insn *first = &insn[m->insn];
        m->not_alike |= in->mla.gate || in->mla.n != first->mla.n || in->signal_vec != first->signal_vec || in->signal_pub != first->signal_pub ||
                        in->mla.latent % in->mla.n || in->signal_slice != (in->mla.head0 * in->mla.latent + in->mla.first) / in->mla.n;
    }
    for (uint32_t pass = 0; pass < 2; pass++)
        for (uint32_t k = 0; k < n; k++) {
            const mk_insn *in = &insn[k];
            if (in->opcode != MK_OP_GQA_PARTIAL || in->signal_pub >= MK_EPOCH_STRIDE) continue;
            merger *m = &all[(size_t)in->signal_vec * MK_EPOCH_STRIDE + in->signal_pub];
            if (!pass) {
                const mk_mla *c = &insn[m->insn].mla;
                m->parts++;
                m->told += plan[k].one == MK_ONE_GQA && m->n && !m->not_alike && (uint64_t)m->n * c->n == (uint64_t)in->gqa.heads * in->gqa.dim &&
                           p->vec[insn[m->insn].signal_vec].nslice == m->n && p->vec[insn[m->insn].signal_vec].dtype == MK_BF16 && c->grain == in->gqa.grain && c->most == in->gqa.most;
            } else if (m->parts == in->gqa.parts && m->told == m->parts) {
                const mk_insn *c = &insn[m->insn];
                plan[k].whole = (mk_whole){c->signal_vec, c->signal_pub, (uint16_t)c->mla.n, (uint16_t)(c->mla.latent / c->mla.n)};
            }
        }
    for (uint32_t k = 0; k < n; k++) {
        const mk_insn *in = &insn[k];
        if (in->opcode != MK_OP_COMBINE || in->wait[0].pub >= MK_EPOCH_STRIDE) continue;
        const merger *m = &all[(size_t)in->wait[0].vec * MK_EPOCH_STRIDE + in->wait[0].pub];
        if (m->parts && m->told == m->parts && m->parts == insn[k].mla.parts) plan[k].one = MK_ONE_NONE;
    }
    free(all);
    return MK_OK;
}

/* Whether enough others come between partial k and the one before it in its queue, which begins with instruction `first`. With one less than a controller is ahead at most, that one is done when this one is
 * looked at, and what the controller left for it is not needed any more. With as many, the first of them is done, too, and it waited, if not itself, for somebody who did, for
 * all partials of its layer: a worker without an item may count at once, no counter will thereby say that a publication is complete which is not. */
static int spaced(const mk_insn *insn, const mk_plan *plan, uint32_t first, uint32_t k)
{
    const int always = insn[k].opcode == MK_OP_GQA_PARTIAL && insn[k].gqa.part < insn[k].gqa.kv_heads; /* it has an item in any case */
    for (uint32_t since = always ? 1 : 0; k > first && since < MK_INSN_RING; k--)
        switch (insn[k - 1].opcode) {
        case MK_OP_MLA_PARTIAL:
        case MK_OP_GQA_PARTIAL: return 0;
        case MK_OP_KV_APPEND:
        case MK_OP_GQA_APPEND:
        case MK_OP_COMBINE: break;
        case MK_OP_ROUTER:
        case MK_OP_GEMV: since += !(plan[k - 1].end & MK_END_ASIDE); break;
        default: since++; break;
        }
    return 1;
}
/* Whether an instruction publishes what a wait is for, or a slice of it. */
static int publishes(const mk_insn *in, const mk_wait *w)
{
    return in->signal_vec == w->vec && in->signal_pub == w->pub;
}
/* Whether a GEMV is one of those right before an MLA_PARTIAL that make what it waits for: q~, out of what it waits for too; or either of them, if neither is made of the other. */
static int makes_queries(const mk_insn *in, const mk_insn *v)
{
    const int folded = in->mla.qk_stride == in->mla.rope;
    if (!folded) return v->wait[0].vec == in->wait[1].vec && v->wait[0].pub == in->wait[1].pub;
    return publishes(v, &in->wait[0]) || publishes(v, &in->wait[1]);
}
/* An MLA_PARTIAL, instruction k of its queue, which begins with instruction `first`: in a step of one row the queries of the worker's first item are made aside while GEMVs right before it
 * make what it waits for; they leave the queries' place alone. */
static void queries_aside(const mk_insn *insn, mk_plan *plan, uint32_t first, uint32_t k)
{
    const mk_insn *in = &insn[k];
    const uint32_t place = mk_att_query_bytes(in->mla.latent + in->mla.rope, in->mla.latent / 32);
    uint32_t n = 0;
    for (; n < 2 && k - n > first; n++) {
        const mk_insn *v = in - n - 1;
        const mk_plan *p = &plan[k - n - 1];
        if (v->opcode != MK_OP_GEMV || !MK_IS_ONE(p->one) || p->x.prologue == MK_PRO_HEADNORM || place + mk_row_stride(p->x.k) > MK_STAGING || !makes_queries(in, v)) break;
    }
    const uint32_t aside = n;
    for (uint32_t i = aside + 1; i <= aside + 2 && k >= first + i; i++) /* they would look for what it has staged at another place */
        for (uint32_t j = 1; j <= aside; j++)
            if (plan[k - i].key == plan[k - j].key) n = 0;
    if (k - n == first || !plan[k].queries) return;
    for (uint32_t i = 1; i <= n; i++) plan[k - i].beside = place;
    plan[k].beside = n;
    plan[k].end |= MK_END_ASIDE;
}

/* In a step of one row GQA's partials make the newest keys and values themselves, and those who append them only count: where both are in one program, and fit. */
static int attention_plans(const mk_gpu *g, const mk_insn *insn, const uint32_t *queue, uint32_t queues, mk_plan *plan, mk_err *err)
{
    const mk_program *p = g->prog;
    const uint32_t n = queue[queues];
    typedef struct writer {
        uint32_t n, insn, parts, told; /* who append, one of them; partials that could read what they append from the packets, that do */
    } writer;
    writer *all = (writer *)calloc((size_t)p->info.n_vec * MK_EPOCH_STRIDE, sizeof *all);
    if (!all) return mk_fail(err, MK_E_CAPACITY, "out of memory");
    for (uint32_t k = 0; k < n; k++) {
        const mk_insn *in = &insn[k];
        if (in->opcode != MK_OP_GQA_APPEND || in->signal_pub >= MK_EPOCH_STRIDE) continue;
        writer *w = &all[(size_t)in->signal_vec * MK_EPOCH_STRIDE + in->signal_pub];
        w->n++;
        w->insn = k;
    }
    for (uint32_t pass = 0; pass < 2; pass++) /* count the partials, then tell them: all or none, for each item must be somebody's */
        for (uint32_t k = 0, q = 0; k < n; k++) {
            const mk_insn *in = &insn[k];
            while (queue[q + 1] <= k) q++;
            const mk_table *table = in->opcode == MK_OP_MLA_PARTIAL ? queries_of(g, in) : NULL;
            if (table) plan[k].queries = table->at;
            if (in->opcode == MK_OP_MLA_PARTIAL && ring_takes(g, in) && spaced(insn, plan, queue[q], k)) {
                plan[k].one = MK_ONE_MLA;
                plan[k].whole.vec = MK_NONE;
                plan[k].map = g->map_at[in->wait[0].vec] + in->wait[0].slice0 * p->vec[in->wait[0].vec].slice_packets;
                if (!pass) queries_aside(insn, plan, queue[q], k);
                continue;
            }
            if (in->opcode != MK_OP_GQA_PARTIAL || in->wait[1].pub >= MK_EPOCH_STRIDE || !ring_takes(g, in) || !spaced(insn, plan, queue[q], k)) continue;
            writer *w = &all[(size_t)in->wait[1].vec * MK_EPOCH_STRIDE + in->wait[1].pub];
            const mk_insn *app = &insn[w->insn];
            if (w->n != p->vec[in->wait[1].vec].signals) continue;
            if (in->wait[0].vec != app->wait[0].vec || in->wait[0].pub != app->wait[0].pub || in->wait[0].nslice != p->vec[in->wait[0].vec].nslice) continue;
            if (!pass) {
                w->parts++;
                continue;
            }
            if (w->parts != in->gqa.parts) continue;
            plan[k].newest = (mk_newest){app->gqa.k_off, app->gqa.v_off, app->gqa.param_off, app->gqa.eps};
            plan[k].one = MK_ONE_GQA;
            plan[k].whole.vec = MK_NONE;
            w->told++;
        }
    for (uint32_t k = 0; k < n; k++) {
        const mk_insn *in = &insn[k];
        if (in->opcode != MK_OP_GQA_APPEND || in->signal_pub >= MK_EPOCH_STRIDE) continue;
        const writer *w = &all[(size_t)in->signal_vec * MK_EPOCH_STRIDE + in->signal_pub];
        if (w->n == p->vec[in->signal_vec].signals && w->parts && w->parts == w->told) plan[k].one = MK_ONE_COUNT;
    }
    free(all);
    return whole_plans(p, insn, n, plan, err);
}

/* What takes one row, where functions differ by it: mk_plan.one. */
static uint8_t one_row(const mk_insn *in, const mk_plan *p)
{
    const int fp8 = (in->opcode == MK_OP_EXPERT_UP || in->opcode == MK_OP_EXPERT_DOWN) && in->expert.wtype == MK_W_FP8;
    const mk_route *t = &in->route;
    switch (in->opcode) {
    case MK_OP_EXPERT_UP: return (uint8_t)(MK_ONE_UP + fp8);
    case MK_OP_EXPERT_DOWN: return !p->dealt ? 0 : (uint8_t)(MK_ONE_DOWN + 3 * fp8 + (p->tile.rows <= 16 ? 0 : p->tile.rows <= 24 ? 1 : 2));
    case MK_OP_DELTA_STEP: return !p->map ? 0 : (uint8_t)(MK_ONE_DELTA + (!in->delta.rank ? 0 : in->delta.low[0].wtype == MK_W_FP8 ? 2 : 1));
    case MK_OP_ROUTE: /* all warps choose together then */
        if (t->experts > 2 * MK_COMPUTE || t->groups > 1 || (t->score != MK_SCORE_SIGMOID && !mk_route_plain(t))) return 0;
        return (uint8_t)(MK_ONE_ROUTE + (t->experts > MK_COMPUTE));
    default: return p->one;
    }
}

/* The DOWN of the same layer that adds what a GEMV leaves in LOCAL memory, if that can be done aside in steps of one row: it is the shared expert's way down, stands behind
 * EXPERT_UP, and what compute warps stage meanwhile leaves the upper part of the staging area alone. 0: it is theirs. k: the GEMV; [first, end): its queue. */
static uint32_t aside_of(const mk_insn *insn, const mk_plan *plan, uint32_t first, uint32_t k, uint32_t end)
{
    const mk_insn *in = &insn[k];
    const mk_plan *p = &plan[k];
    if (in->opcode != MK_OP_GEMV || !MK_IS_ONE(p->one) || !p->hands.packets || p->f32 || p->x.prologue != MK_PRO_NONE || k < first + 2 || k + 1 >= end) return 0; /* dealt: mk_aside_stage */
    if (!(p->end & MK_END_TO_LOCAL) || p->end & (MK_END_SILU | MK_END_FROM_LOCAL) || p->tile.rows > MK_ASIDE_ROWS || p->tile.nst % MK_GROUPS || p->tile.nst > MK_ASIDE_STAGES) return 0;
    if (mk_row_stride(p->x.k) + 128 + 4 * MK_WARPS * MK_ASIDE_ROWS > MK_STAGING - MK_UPPER || in->gemv.n > 32) return 0; /* a lane a row at the end */
    const uint32_t up = k - 1, down = k + 1;
    if (insn[up].opcode != MK_OP_EXPERT_UP || insn[down].opcode != MK_OP_EXPERT_DOWN || mk_row_stride(plan[up].x.k) > MK_UPPER) return 0;
    const mk_wait *base = &insn[down].wait[2];
    if (plan[down].tile.nkb == 1) return 0; /* every second stage would be a blank one, which is not paced: mk_next_skip */
    return plan[down].dealt && pairs_bytes(&insn[down].expert) <= MK_UPPER && publishes(in, base) ? down : 0;
}

/* The shared expert's gate and up between ROUTE, which stages its input, and EXPERT_UP, which waits for it. */
static int shared_aside(const mk_insn *insn, const mk_plan *plan, uint32_t first, uint32_t k, uint32_t end)
{
    const mk_plan *p = &plan[k];
    if (insn[k].opcode != MK_OP_GEMV || k < first + 1 || k + 1 >= end || insn[k - 1].opcode != MK_OP_ROUTE || insn[k + 1].opcode != MK_OP_EXPERT_UP) return 0;
    if (!MK_IS_ONE(p->one) || !(p->end & MK_END_SILU) || p->end & MK_END_TO_LOCAL || p->key != plan[k - 1].key || p->key != plan[k + 1].key) return 0;
    return p->tile.rows <= MK_ASIDE_ROWS && insn[k].gemv.n <= MK_UNIT && p->tile.nst % MK_GROUPS == 0 && p->tile.nst <= MK_ASIDE_STAGES && mk_row_stride(p->x.k) <= MK_UPPER;
}

/* The EXPERT_UP that goes past the stages of a ROUTER behind the GEMV that leaves h's slice near; 0: compute warps multiply it. Nothing but ROUTE, which has no stages, and what is done aside stands
 * between. */
static uint32_t router_aside(const mk_insn *insn, const mk_plan *plan, uint32_t first, uint32_t k, uint32_t end)
{
    if (insn[k].opcode != MK_OP_ROUTER || !(plan[k].end & MK_END_NEAR) || plan[k].tile.nst != MK_GROUPS || k + 2 >= end || insn[k + 1].opcode != MK_OP_ROUTE) return 0;
    const uint32_t shared = shared_aside(insn, plan, first, k + 2, end) ? plan[k + 2].tile.nst : 0, up = k + 2 + (shared != 0);
    return insn[up].opcode == MK_OP_EXPERT_UP && plan[k].tile.nst + shared <= MK_ASIDE_STAGES ? up : 0;
}

/* What is done aside in the queue [first, end), and who waits for it. */
static void asides(const mk_insn *insn, mk_plan *plan, uint32_t first, uint32_t end)
{
    for (uint32_t k = first; k < end; k++) {
        const uint32_t up = router_aside(insn, plan, first, k, end);
        if (up) {
            plan[k].end |= MK_END_ASIDE;
            plan[up].end |= MK_END_ASIDE;
            plan[up].pass = plan[k].tile.nst;
        }
        if (shared_aside(insn, plan, first, k, end)) {
            plan[k].end |= MK_END_ASIDE;
            plan[k + 1].end |= MK_END_ASIDE;
            plan[k].behind = plan[k + 1].pass; /* a ROUTER's, if that is aside */
            if (plan[k].behind && plan[k].tile.rows <= MK_LATE_ROWS) plan[k].end |= MK_END_LATE;
            plan[k + 1].pass += plan[k].tile.nst;
        }
        const uint32_t down = aside_of(insn, plan, first, k, end);
        if (!down) continue;
        plan[k].end |= MK_END_ASIDE;
        plan[down].end |= MK_END_ASIDE;
        plan[down].pass = plan[k].tile.nst;
    }
}

#endif
