/* What the instructions of one publication have to agree on, once all are known: recurrent state, latent cache and partials, experts and
 * their route, vocabulary. */
#include "instructions/validate_internal.h"

#include <stdlib.h>
#include <string.h>

static const mk_insn *insn(const mk_check *c, uint32_t x)
{
    return &c->p->insn[x];
}

static int check_state(mk_check *c)
{
    uint32_t a, b;
    if (!mk_overlap(c->state, c->n_state, &a, &b)) return MK_OK;
    return mk_refuse(c, b, "state overlap: its part of a slot overlaps that of %s", mk_insn_text(c, a).s);
}

/* Two instructions of one layer's attention see the same cache and the same heads. */
static int same_cache(const mk_mla *a, const mk_mla *b)
{
    return a->kv_off == b->kv_off && a->latent == b->latent && a->rope == b->rope && a->cache == b->cache && a->all_heads == b->all_heads;
}

static int check_pools(mk_check *c)
{
    uint32_t n = 0, a, b;
    mk_range *r = malloc(c->i->n_insn * sizeof *r);
    if (!r) return mk_fail(c->err, MK_E_SYSTEM, "validator: out of memory");
    for (uint32_t x = 0; x < c->i->n_insn; x++)
        if (insn(c, x)->opcode == MK_OP_KV_APPEND || (insn(c, x)->opcode == MK_OP_GQA_APPEND && insn(c, x)->gqa.head == 0))
            r[n++] = (mk_range){insn(c, x)->opcode == MK_OP_KV_APPEND ? insn(c, x)->mla.kv_off : insn(c, x)->gqa.kv_off,
                                c->i->kv_page_bytes * c->i->kv_pages, x};
    int bad = mk_overlap(r, n, &a, &b);
    free(r);
    return bad ? mk_refuse(c, b, "writes the cache pool that %s writes", mk_insn_text(c, a).s) : MK_OK;
}

/* The one member of the cache's publication appends to the pool that x reads. */
static int check_cache_reader(mk_check *c, uint32_t x)
{
    const mk_wait *wt = &insn(c, x)->wait[2];
    uint32_t id = mk_pub_id(c, wt->vec, wt->pub), m = c->member[c->member_off[id]];
    const mk_insn *app = insn(c, m);
    if (app->opcode != MK_OP_KV_APPEND || !same_cache(&app->mla, &insn(c, x)->mla))
        return mk_refuse(c, x, "waits for %s pub %u of %s, which does not append to the pool at %llu that it reads", c->p->vec[wt->vec].name, wt->pub,
                         mk_insn_text(c, m).s, (unsigned long long)insn(c, x)->mla.kv_off);
    const mk_mla *a = &app->mla, *b = &insn(c, x)->mla;
    if (a->rotary != b->rotary || (a->rotary && a->param_off != b->param_off))
        return mk_refuse(c, x, "rotates otherwise than %s, whose keys it reads", mk_insn_text(c, m).s);
    return MK_OK;
}

/* All members of a publication of partials: one layer, every part once. */
static int check_partials(mk_check *c, uint32_t id, uint8_t *seen)
{
    const uint32_t *m = c->member + c->member_off[id], n = mk_members(c, id);
    memset(seen, 0, n);
    for (uint32_t k = 0; k < n; k++) {
        const mk_insn *in = insn(c, m[k]);
        if (in->opcode != MK_OP_MLA_PARTIAL)
            return mk_refuse(c, m[k], "signals %s, which %s uses for partials", c->p->vec[in->signal_vec].name, mk_insn_text(c, m[0]).s);
        if (!same_cache(&in->mla, &insn(c, m[0])->mla) || in->mla.scale != insn(c, m[0])->mla.scale)
            return mk_refuse(c, m[k], "another cache, shape or scale than %s, which makes the same partials", mk_insn_text(c, m[0]).s);
        if (seen[in->mla.part]++) return mk_refuse(c, m[k], "part %u of %u is another instruction's as well", in->mla.part, in->mla.parts);
    }
    return MK_OK;
}

static int same_gqa(const mk_gqa *a, const mk_gqa *b)
{
    return a->kv_off == b->kv_off && a->heads == b->heads && a->kv_heads == b->kv_heads && a->dim == b->dim && a->rope == b->rope &&
           a->norm == b->norm;
}

/* The members of the cache's publication append each KV head of the pool that x reads once. */
static int check_gqa_reader(mk_check *c, uint32_t x, uint8_t *seen)
{
    const mk_wait *wt = &insn(c, x)->wait[1];
    uint32_t id = mk_pub_id(c, wt->vec, wt->pub), n = mk_members(c, id);
    const uint32_t *m = c->member + c->member_off[id];
    memset(seen, 0, n);
    for (uint32_t k = 0; k < n; k++) {
        const mk_insn *app = insn(c, m[k]);
        if (app->opcode != MK_OP_GQA_APPEND || !same_gqa(&app->gqa, &insn(c, x)->gqa))
            return mk_refuse(c, x, "waits for %s pub %u of %s, which does not append to the pool at %llu that it reads", c->p->vec[wt->vec].name,
                             wt->pub, mk_insn_text(c, m[k]).s, (unsigned long long)insn(c, x)->gqa.kv_off);
        if (seen[app->gqa.head]++)
            return mk_refuse(c, m[k], "KV head %u of %u is another instruction's as well", app->gqa.head, app->gqa.kv_heads);
    }
    return MK_OK;
}

static int check_gqa_partials(mk_check *c, uint32_t id, uint8_t *seen)
{
    const uint32_t *m = c->member + c->member_off[id], n = mk_members(c, id);
    memset(seen, 0, n);
    for (uint32_t k = 0; k < n; k++) {
        const mk_insn *in = insn(c, m[k]), *first = insn(c, m[0]);
        mk_gqa g = in->gqa;
        g.part = first->gqa.part;
        if (in->opcode != MK_OP_GQA_PARTIAL || memcmp(&g, &first->gqa, sizeof g) || memcmp(in->wait, first->wait, 2 * sizeof in->wait[0]))
            return mk_refuse(c, m[k], "another cache, shape, scale or input than %s, which makes the same partials", mk_insn_text(c, m[0]).s);
        if (seen[in->gqa.part]++) return mk_refuse(c, m[k], "part %u of %u is another instruction's as well", in->gqa.part, in->gqa.parts);
    }
    return MK_OK;
}

/* Does x make the partials that COMBINE m reads? */
static int makes_partials(const mk_insn *x, const mk_mla *m)
{
    if (x->opcode == MK_OP_MLA_PARTIAL) return same_cache(&x->mla, m) && x->mla.grain == m->grain && x->mla.most == m->most;
    return x->opcode == MK_OP_GQA_PARTIAL && x->gqa.kv_off == m->kv_off && x->gqa.dim == m->latent && x->gqa.heads == m->all_heads && x->gqa.grain == m->grain &&
           x->gqa.most == m->most;
}

static int check_attention(mk_check *c)
{
    uint8_t *seen = malloc((size_t)c->i->n_insn + 1);
    if (!seen) return mk_fail(c->err, MK_E_SYSTEM, "validator: out of memory");
    int rc = check_pools(c);
    for (uint32_t x = 0; x < c->i->n_insn && !rc; x++) {
        const mk_insn *in = insn(c, x);
        if (in->opcode == MK_OP_MLA_PARTIAL) {
            uint32_t id = mk_pub_id(c, in->signal_vec, in->signal_pub);
            rc = check_cache_reader(c, x);
            if (!rc && c->member[c->member_off[id]] == x) rc = check_partials(c, id, seen);
        } else if (in->opcode == MK_OP_GQA_PARTIAL) {
            uint32_t id = mk_pub_id(c, in->signal_vec, in->signal_pub);
            rc = check_gqa_reader(c, x, seen);
            if (!rc && c->member[c->member_off[id]] == x) rc = check_gqa_partials(c, id, seen);
        } else if (in->opcode == MK_OP_COMBINE) {
            uint32_t id = mk_pub_id(c, in->wait[0].vec, in->wait[0].pub), m = c->member[c->member_off[id]];
            if (!makes_partials(insn(c, m), &in->mla))
                rc = mk_refuse(c, x, "combines %s pub %u, which %s makes for another cache or shape", c->p->vec[in->wait[0].vec].name, in->wait[0].pub,
                               mk_insn_text(c, m).s);
        }
    }
    free(seen);
    return rc;
}

/* a's and b's experts come from the same logits by the same rule, so that they hold the same table. */
static int same_route(const mk_check *c, uint32_t a, uint32_t b)
{
    const mk_insn *p = insn(c, a), *q = insn(c, b);
    return !memcmp(&p->route, &q->route, sizeof p->route) && !memcmp(p->wait, q->wait, 2 * sizeof p->wait[0]);
}

/* One publication of a dynamic vector: every worker computes slices of the same experts, chosen alike, and so do the readers. With
 * topk * T >= workers (checked per instruction) every worker then publishes at least one slice whatever the route: the first topk
 * experts of the union are chosen by some row each, and their topk * T consecutive slices fall on all residues mod W. So who has
 * gathered the vector has heard from every worker. */
static int check_dynamic(mk_check *c, uint32_t vec, uint32_t pub)
{
    const mk_vec *v = &c->p->vec[vec];
    uint32_t id = mk_pub_id(c, vec, pub), first = c->member[c->member_off[id]], route = c->source[3 * (size_t)first + 1];
    const mk_insn *f = insn(c, first);
    const mk_expert *e = &f->expert;
    for (uint32_t k = 0; k < mk_members(c, id); k++) {
        uint32_t x = c->member[c->member_off[id] + k];
        if (memcmp(&insn(c, x)->expert, e, sizeof *e) || memcmp(&insn(c, x)->wait[0], &f->wait[0], sizeof f->wait[0]))
            return mk_refuse(c, x, "dynamic: expected the same experts and input as %s", mk_insn_text(c, first).s);
        if (!same_route(c, c->source[3 * (size_t)x + 1], route))
            return mk_refuse(c, x, "dynamic: its ROUTE differs from that of %s, they may choose differently", mk_insn_text(c, first).s);
    }
    const uint32_t *start = mk_vec_starts(c->p, v);
    for (uint32_t s = 0; s < v->nslice; s++)
        if (start[s] != s / e->T * e->inter + mk_expert_start(s % e->T, e->inter, e->T))
            return mk_refuse(c, first, "slice %u of %s starts at %u, slice %u of choice %u is at %u", s, v->name, start[s], s % e->T, s / e->T,
                             s / e->T * e->inter + mk_expert_start(s % e->T, e->inter, e->T));
    for (uint32_t r = c->read_off[id]; r < c->read_off[id + 1]; r++) {
        uint32_t x = c->read[r].insn;
        if (insn(c, x)->expert.inter != e->inter || insn(c, x)->expert.topk != e->topk || insn(c, x)->expert.wtype != e->wtype)
            return mk_refuse(c, x, "%u experts of width %u, but %s computes %u of %u", insn(c, x)->expert.topk, insn(c, x)->expert.inter,
                             mk_insn_text(c, first).s, e->topk, e->inter);
        if (!same_route(c, c->source[3 * (size_t)x + 1], route))
            return mk_refuse(c, x, "its ROUTE differs from that of %s, whose slices it reads", mk_insn_text(c, first).s);
    }
    return MK_OK;
}

/* A publication of sums: each slice of one h once, and every worker has a ROUTE of it, whose norm is of that h: together they clear it. seen: by slice, by worker. */
static int check_sums(mk_check *c, uint32_t vec, uint32_t pub, uint8_t *seen)
{
    uint32_t id = mk_pub_id(c, vec, pub), n = mk_members(c, id), *m = c->member + c->member_off[id];
    const mk_wait *h = &insn(c, m[0])->wait[0];
    const mk_vec *v = &c->p->vec[vec];
    memset(seen, 0, n);
    for (uint32_t k = 0; k < n; k++) {
        const mk_insn *in = insn(c, m[k]);
        if (in->opcode != MK_OP_ROUTER) return mk_refuse(c, m[k], "signals %s, expected only ROUTER to add to sums", v->name);
        if (in->wait[0].vec != h->vec || in->wait[0].pub != h->pub || n != c->p->vec[h->vec].nslice)
            return mk_refuse(c, m[k], "%u instructions add to %s, expected one for each slice of one publication", n, v->name);
        if (seen[in->wait[0].slice0]++) return mk_refuse(c, m[k], "slice %u of %s is added to %s by another instruction as well", in->wait[0].slice0, c->p->vec[h->vec].name, v->name);
    }
    memset(seen, 0, c->i->workers);
    for (uint32_t r = c->read_off[id]; r < c->read_off[id + 1]; r++) {
        const uint32_t x = c->read[r].insn;
        const mk_insn *in = insn(c, x);
        if (in->opcode != MK_OP_ROUTE) return mk_refuse(c, x, "reads %s, expected only ROUTE to read sums", v->name);
        for (uint32_t k = 0; k < n; k++)
            if (insn(c, m[k])->router.param_off - insn(c, m[k])->router.first != in->route.norm_off)
                return mk_refuse(c, m[k], "gamma at %u, that of %s is at %u", insn(c, m[k])->router.param_off, mk_insn_text(c, x).s, in->route.norm_off + insn(c, m[k])->router.first);
        if (in->wait[0].vec != h->vec || in->wait[0].pub != h->pub) return mk_refuse(c, x, "norm of %s pub %u, its logits are of pub %u", c->p->vec[in->wait[0].vec].name, in->wait[0].pub, h->pub);
        if (seen[c->owner[x]]++) return mk_refuse(c, x, "clears what another ROUTE of its worker clears");
    }
    for (uint32_t w = 0; w < c->i->workers; w++)
        if (!seen[w]) return mk_refuse(c, m[0], "%s pub %u: worker %u has no ROUTE that clears its share", v->name, pub, w);
    return MK_OK;
}

static int check_all_sums(mk_check *c)
{
    uint8_t *seen = malloc((size_t)c->i->n_insn + c->i->workers + 1);
    int rc = seen ? MK_OK : mk_fail(c->err, MK_E_SYSTEM, "validator: out of memory");
    for (uint32_t v = 0; v < c->i->n_vec && !rc; v++)
        for (uint32_t k = 0; mk_vec_sums(&c->p->vec[v]) && k < c->p->vec[v].pubs && !rc; k++) rc = check_sums(c, v, k, seen);
    free(seen);
    return rc;
}

/* Slices of the statistics SAMPLE reads, in order, are LM_HEADs whose rows are 0 .. vocab, each once; they all write the logits it reads. */
static int check_vocabulary(mk_check *c)
{
    const mk_insn *s = insn(c, c->sample);
    uint32_t stats = mk_pub_id(c, s->wait[0].vec, s->wait[0].pub), logits = mk_pub_id(c, s->wait[1].vec, s->wait[1].pub), at = 0;
    uint32_t n = mk_members(c, stats);
    for (uint32_t k = 0; k < n; k++) {
        uint32_t x = c->member[c->member_off[stats] + k];
        const mk_insn *in = insn(c, x);
        if (in->opcode != MK_OP_LM_HEAD) return mk_refuse(c, x, "publishes the statistics that SAMPLE reads, expected only LM_HEAD to");
        if (in->lm_head.row0 != at)
            return mk_refuse(c, x, "LM head coverage: slice %u has vocabulary rows from %u on, expected from %u", k, in->lm_head.row0, at);
        if (in->lm_head.logits_vec != s->wait[1].vec || in->lm_head.logits_pub != s->wait[1].pub)
            return mk_refuse(c, x, "its logits go to %s pub %u, SAMPLE reads %s pub %u", c->p->vec[in->lm_head.logits_vec].name,
                             in->lm_head.logits_pub, c->p->vec[s->wait[1].vec].name, s->wait[1].pub);
        at += in->lm_head.n;
    }
    if (at != c->i->vocab)
        return mk_refuse(c, c->sample, "LM head coverage: the slices end at %u, the vocabulary has %u", at, c->i->vocab);
    if (mk_members(c, logits) != n || c->out->insns[MK_OP_LM_HEAD] != n)
        return mk_refuse(c, c->sample, "LM head coverage: %u LM_HEADs and %u signals of the logits, but %u slices of statistics",
                         c->out->insns[MK_OP_LM_HEAD], mk_members(c, logits), n);
    return MK_OK;
}

int mk_check_groups(mk_check *c)
{
    int rc = check_state(c);
    if (!rc) rc = check_attention(c);
    if (!rc) rc = check_all_sums(c);
    for (uint32_t v = 0; v < c->i->n_vec && !rc; v++)
        if (c->p->vec[v].scope == MK_PACKET && c->p->vec[v].flags & MK_VEC_DYNAMIC)
            for (uint32_t k = 0; k < c->p->vec[v].pubs && !rc; k++) rc = check_dynamic(c, v, k);
    return rc ? rc : check_vocabulary(c);
}
