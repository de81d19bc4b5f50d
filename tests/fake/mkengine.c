/* A test double of host/engine.h around the real scheduler (megakernel/schedule.h): rings, slots, log and page tables are ordinary
 * memory, a step is fake_run(), and the "model" answers with tokens that follow from the position. Included by the one source file of
 * a test, so that its definitions keep the real engine out of the link.
 *
 * What a real device could not know is checked here on every step: pages of open slots are in the pool and belong to one slot. */
#include "host/engine.h"
#include "megakernel/schedule.h"
#include "megakernel/submit.h"

#include <stdlib.h>
#include <string.h>

struct mk_engine {
    mk_model model;
    mk_sched sched;
    uint32_t slots, context, pages, max_pages;
    uint32_t submit_next, event_read, submit_limit;
    uint64_t steps, doorbells;
    uint32_t *token, *page, *page_owner;
    mk_slot *slot;
    mk_submit submit[MK_SUBMIT_RING];
    mk_event event[MK_EVENT_RING];
    mk_event extra; /* kind != 0: delivered before the ring's next event */
    int hung;       /* no steps, no entries taken; what is in the event ring is delivered, then RESTARTED */
};

static mk_engine *fake_engine_new(uint32_t slots, uint32_t context, uint32_t pages, uint32_t vocab)
{
    mk_engine *e = calloc(1, sizeof *e);
    e->model.vocab = vocab;
    e->slots = slots;
    e->context = context;
    e->pages = pages;
    e->max_pages = (context + MK_PAGE - 1) / MK_PAGE;
    e->submit_limit = MK_SUBMIT_RING;
    e->token = calloc((size_t)slots * context, sizeof *e->token);
    e->page = calloc((size_t)slots * e->max_pages, sizeof *e->page);
    e->page_owner = calloc(pages, sizeof *e->page_owner);
    e->slot = calloc(slots, sizeof *e->slot);
    mk_sched *s = &e->sched;
    s->submit = e->submit;
    s->event = e->event;
    s->event_read = &e->event_read;
    s->slot = e->slot;
    s->token = e->token;
    s->max_context = context;
    s->n_slots = slots;
    s->st = calloc(slots, sizeof *s->st);
    s->rest = calloc(slots, sizeof *s->rest);
    s->active = calloc(slots, sizeof *s->active);
    return e;
}

static uint32_t fake_token(uint32_t position, uint32_t vocab)
{
    return (7 * position + 3) % vocab;
}

/* One step; 0 when there was nothing to do. */
static uint32_t fake_run(mk_engine *e)
{
    mk_sched *s = &e->sched;
    if (e->hung) return 0;
    mk_sched_compose(s, s->step);
    const mk_step *d = &s->next;
    if (!d->nrows) return 0;
    memset(e->page_owner, 0, e->pages * sizeof *e->page_owner);
    for (uint32_t i = 0; i < e->slots; i++)
        for (uint32_t k = 0; s->st[i].open && k * MK_PAGE < e->slot[i].context; k++) {
            uint32_t p = e->page[i * e->max_pages + k];
            if (p >= e->pages || e->page_owner[p]) abort(); /* outside the pool, or shared */
            e->page_owner[p] = i + 1;
        }
    uint32_t token[MK_MAX_ROWS];
    float logprob[MK_MAX_ROWS];
    for (uint32_t r = 0; r < d->nrows; r++) {
        const mk_row *row = &d->row[r];
        if (row->pos >= e->slot[row->slot].context || row->token >= e->model.vocab) abort();
        token[r] = fake_token(row->pos + 1, e->model.vocab);
        logprob[r] = -(float)(row->pos % 16) / 16;
    }
    mk_sched_finish(s, d, token, logprob, s->step);
    s->step++;
    e->steps++;
    return d->nrows;
}

/* Empty rings, a scheduler that knows nothing; the arena stays. */
static void fake_relaunch(mk_engine *e)
{
    mk_sched *s = &e->sched;
    mk_sched fresh = {.submit = s->submit, .event = s->event, .event_read = s->event_read, .slot = s->slot, .token = s->token,
                      .max_context = s->max_context, .n_slots = s->n_slots, .st = s->st, .rest = s->rest, .active = s->active};
    memset(s->st, 0, s->n_slots * sizeof *s->st);
    memset(e->submit, 0, sizeof e->submit);
    memset(e->event, 0, sizeof e->event);
    e->submit_next = e->event_read = 0;
    e->hung = 0;
    *s = fresh;
}

void mk_engine_close(mk_engine **e)
{
    if (!*e) return;
    free((*e)->token);
    free((*e)->page);
    free((*e)->page_owner);
    free((*e)->slot);
    free((*e)->sched.st);
    free((*e)->sched.rest);
    free((*e)->sched.active);
    free(*e);
    *e = NULL;
}

const mk_model *mk_engine_model(const mk_engine *e)
{
    return &e->model;
}

uint32_t mk_engine_slots(const mk_engine *e)
{
    return e->slots;
}

uint32_t mk_engine_context(const mk_engine *e)
{
    return e->context;
}

uint32_t mk_engine_pages(const mk_engine *e)
{
    return e->pages;
}

mk_slot *mk_engine_slot(mk_engine *e, uint32_t slot)
{
    return &e->slot[slot];
}

uint32_t *mk_engine_page_table(mk_engine *e, uint32_t slot)
{
    return e->page + (size_t)slot * e->max_pages;
}

uint32_t *mk_engine_tokens(mk_engine *e, uint32_t slot)
{
    return e->token + (size_t)slot * e->context;
}

int mk_engine_submit(mk_engine *e, const mk_submit *s, mk_err *err)
{
    if (e->submit_next - e->sched.submit_next >= e->submit_limit) return mk_fail(err, MK_E_CAPACITY, "the submit ring is full");
    mk_submit d = *s;
    mk_submit_complete(&d, e->slot, e->slots);
    mk_submit_put(e->submit, &d, ++e->submit_next);
    return MK_OK;
}

void mk_engine_doorbell(mk_engine *e)
{
    e->doorbells++;
}

uint32_t mk_engine_events(mk_engine *e, mk_event *ev, uint32_t n)
{
    uint32_t k = 0;
    if (n && e->extra.kind) {
        ev[k++] = e->extra;
        e->extra.kind = 0;
    }
    for (; k < n && mk_event_there(&e->event[e->event_read % MK_EVENT_RING], e->event_read + 1); k++)
        ev[k] = e->event[e->event_read++ % MK_EVENT_RING];
    if (k < n && e->hung) {
        fake_relaunch(e);
        ev[k++] = (mk_event){.kind = MK_EV_RESTARTED};
    }
    return k;
}
