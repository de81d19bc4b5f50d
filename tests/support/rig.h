/* A checkpoint on the twin, stepped by the test itself: no threads, no sockets. */
#ifndef MK_TEST_RIG_H
#define MK_TEST_RIG_H

#include "host/checkpoint.h"
#include "host/planner.h"
#include "megakernel/twin.h"

typedef struct rig_config {
    const char *dir;
    enum mk_weights_mode weights;
    uint32_t workers, slots, context, epoch0;
    int act_f32;
} rig_config;

/* Called for every row that had logits, before its token is chosen. */
typedef void (*rig_logits_fn)(void *arg, const mk_row *row, const float *logits);
/* Called for every row and MoE layer: chosen ids, ascending. */
typedef void (*rig_route_fn)(void *arg, uint32_t layer, const mk_row *row, const uint16_t *ids, uint32_t n);

typedef struct rig {
    mk_model *model;
    mk_plan *plan;
    mk_twin *twin;
    uint32_t submit_next, event_next, pages_used, slots;
    rig_logits_fn on_logits;
    rig_route_fn on_route;
    void *arg;
    uint64_t steps;
    uint32_t max_rows;
    mk_event *ev; /* everything that happened since the last rig_clear */
    uint32_t n_ev, cap_ev;
} rig;

/* Fails the test with the message on any error. */
rig *rig_open(const rig_config *c);
void rig_close(rig **r);
/* Like rig_open, but returns the error. */
int rig_try(const rig_config *c, rig **r, mk_err *err);

void rig_stream(rig *r, uint32_t slot, const mk_sampling *s, uint32_t context);
void rig_append(rig *r, uint32_t slot, const uint32_t *tokens, uint32_t n, uint32_t flags);
void rig_generate(rig *r, uint32_t slot, uint32_t n);
/* Steps until there is nothing to do. */
void rig_run(rig *r);
void rig_clear(rig *r);
/* The i-th event of a kind for a slot; NULL when there is none. */
const mk_event *rig_event(const rig *r, uint32_t slot, uint32_t kind, uint32_t i);

#endif
