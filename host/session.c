#include "host/session.h"

#include "host/pack.h"
#include "instructions/validate.h"
#include "megakernel/submit.h"

#include <stdlib.h>
#include <string.h>

static void hook(void *arg, const mk_ctx *c)
{
    mk_session *r = arg;
    if (r->on_insn) r->on_insn(r->arg, c);
    if (c->in->opcode == MK_OP_SAMPLE && !c->in->sample.helper && r->on_logits) {
        const float *l = mk_bulk(c, c->in->wait[1].vec);
        for (uint32_t i = 0; i < c->step->nrows; i++)
            if (c->step->row[i].flags & MK_ROW_LOGITS)
                r->on_logits(r->arg, &c->step->row[i], l + (size_t)i * c->prog->info.vocab);
    }
    if (c->in->opcode == MK_OP_ROUTE && r->on_route && c->worker == 0) {
        const mk_routes *m = mk_local(c, c->in->signal_vec);
        for (uint32_t i = 0; i < c->step->nrows; i++) {
            uint16_t ids[MK_MAX_TOPK];
            for (uint32_t j = 0; j < m->n_union; j++)
                if (m->rank[i][j] != 255) ids[m->rank[i][j]] = m->expert[j];
            r->on_route(r->arg, c->in->layer, &c->step->row[i], ids, c->in->route.topk);
        }
    }
}

int mk_session_open(const mk_session_config *c, mk_session **out, mk_err *err)
{
    mk_session *r = calloc(1, sizeof *r);
    mk_checkpoint *ck = NULL;
    int rc;
    *out = NULL;
    if (!r) return mk_fail(err, MK_E_CAPACITY, "out of memory");
    uint32_t context = c->context ? c->context : 1024, slots = c->slots ? c->slots : 1;
    mk_plan_config pc = {.workers = c->workers ? c->workers : 8, .act_f32 = c->act_f32, .apart = c->apart, .max_context = context,
                         .kv_pages = (context + MK_PAGE - 1) / MK_PAGE * slots, .state_slots = slots, .smem_limit = c->smem_limit};
    mk_twin_config tc = {.slots = slots, .context = context, .epoch0 = c->epoch0, .sweep = c->sweep};
    r->slots = slots;
    rc = c->preset ? mk_preset_model(c->preset, &r->model, err) : mk_model_read(c->dir, &r->model, err);
    if (!rc && c->layers) mk_model_keep(r->model, c->layers);
    if (!rc) r->model->lm_head_mode = (uint8_t)c->lm_head, r->model->kv_cache = (uint8_t)c->kv_cache;
    if (rc || (!c->preset && (rc = mk_checkpoint_open(c->dir, &ck, err))) ||
        (rc = mk_model_resolve(r->model, ck, c->preset ? c->preset->weights : c->weights, err)) || (rc = mk_plan_make(r->model, &pc, &r->plan, err)) ||
        (rc = mk_validate(r->plan->prog, NULL, err)) || (rc = mk_twin_new(r->plan->prog, &tc, &r->twin, err)) ||
        (ck && (rc = mk_pack(r->plan, ck, mk_twin_memory(r->twin), err)))) {
        mk_checkpoint_close(&ck);
        mk_session_close(&r);
        return rc;
    }
    mk_checkpoint_close(&ck);
    mk_twin_set_hook(r->twin, hook, r);
    *out = r;
    return MK_OK;
}

void mk_session_close(mk_session **pr)
{
    mk_session *r = *pr;
    if (!r) return;
    mk_twin_destroy(&r->twin);
    mk_plan_destroy(&r->plan);
    mk_model_destroy(&r->model);
    free(r->ev);
    free(r);
    *pr = NULL;
}

static void submit(mk_session *r, mk_submit s)
{
    mk_sched *sc = mk_twin_sched(r->twin);
    mk_submit_complete(&s, sc->slot, sc->n_slots);
    mk_submit_put(sc->submit, &s, ++r->submit_next);
}

void mk_session_stream(mk_session *r, uint32_t slot, const mk_sampling *s, uint32_t context)
{
    mk_memory *m = mk_twin_memory(r->twin);
    mk_slot *sl = &m->slot[slot];
    uint32_t gen = sl->generation + 1;
    memset(sl, 0, sizeof *sl);
    sl->generation = gen;
    sl->credits = ~0ull;
    sl->context = context ? context : m->max_context;
    sl->state_slot = slot;
    if (s) sl->sampling = *s;
    /* pages in an order that is not the identity, so that the table is used */
    for (uint32_t i = 0; i < m->max_pages; i++) m->page[slot * m->max_pages + i] = (m->max_pages - 1 - i) * r->slots + slot;
    submit(r, (mk_submit){.op = MK_SUB_OPEN, .slot = (uint16_t)slot, .generation = gen});
}

static uint32_t known(mk_session *r, uint32_t slot)
{
    return mk_twin_sched(r->twin)->st[slot].len;
}

static void drain(mk_session *r)
{
    mk_sched *s = mk_twin_sched(r->twin);
    for (; mk_event_there(&s->event[r->event_next % MK_EVENT_RING], r->event_next + 1); r->event_next++) {
        if (r->n_ev == r->cap_ev) {
            uint32_t cap = r->cap_ev ? 2 * r->cap_ev : 256;
            mk_event *ev = realloc(r->ev, cap * sizeof *ev);
            if (!ev) return; /* stays in the ring */
            r->ev = ev;
            r->cap_ev = cap;
        }
        r->ev[r->n_ev++] = s->event[r->event_next % MK_EVENT_RING];
    }
    *s->event_read = r->event_next;
}

void mk_session_append(mk_session *r, uint32_t slot, const uint32_t *tokens, uint32_t n, uint32_t flags)
{
    mk_memory *m = mk_twin_memory(r->twin);
    mk_sched *s = mk_twin_sched(r->twin);
    mk_sched_compose(s, 0); /* take what is in the ring, so that the stream's length is known here */
    memcpy(m->token + (size_t)slot * m->max_context + known(r, slot), tokens, n * sizeof *tokens);
    submit(r, (mk_submit){.op = MK_SUB_APPEND, .slot = (uint16_t)slot, .generation = m->slot[slot].generation, .arg0 = n, .arg1 = flags});
    mk_sched_compose(s, 0);
    drain(r);
}

void mk_session_generate(mk_session *r, uint32_t slot, uint32_t n)
{
    submit(r, (mk_submit){.op = MK_SUB_GENERATE, .slot = (uint16_t)slot, .generation = mk_twin_memory(r->twin)->slot[slot].generation, .arg0 = n});
}

int mk_session_run(mk_session *r, mk_err *err)
{
    mk_sched_compose(mk_twin_sched(r->twin), 0); /* what was submitted since the last step may join the next */
    for (;;) {
        uint32_t ran;
        int rc = mk_twin_step(r->twin, &ran, err);
        if (rc) return rc;
        drain(r);
        if (!ran) return MK_OK;
        r->steps++;
        if (ran > r->max_rows) r->max_rows = ran;
    }
}

void mk_session_clear(mk_session *r)
{
    r->n_ev = 0;
}

const mk_event *mk_session_event(const mk_session *r, uint32_t slot, uint32_t kind, uint32_t i)
{
    for (uint32_t k = 0; k < r->n_ev; k++)
        if (r->ev[k].slot == slot && r->ev[k].kind == kind && i-- == 0) return &r->ev[k];
    return NULL;
}
