/* A checkpoint on the twin, stepped by the caller: no threads, no sockets, no stream table. What `mkctl diff` and the oracle tests
 * drive; it plays the host's part in the rings. */
#ifndef MK_SESSION_H
#define MK_SESSION_H

#include "host/planner.h"
#include "host/preset.h"
#include "megakernel/twin.h"

typedef struct mk_session_config {
    const char *dir; /* checkpoint */
    const mk_preset *preset;         /* instead of dir: weights are left zero, for the caller to fill (mk_twin_memory) */
    uint32_t layers;                /* of the preset, the first so many; 0: all */
    enum mk_weights_mode weights;
    enum mk_lm_head_mode lm_head;
    enum mk_cache kv_cache;
    uint32_t workers, slots, context, epoch0; /* 0: 8, 1, 1024 and 0 */
    uint32_t sweep;                           /* see mk_twin_config */
    int act_f32;
    int apart; /* as a session with act_f32 has it (mk_plan_config), to be compared with one */
    uint32_t smem_limit; /* plan for a GPU with that much shared memory; 0: for the twin alone */
} mk_session_config;

/* Called for every row that had logits, before its token is chosen. */
typedef void (*mk_session_logits)(void *arg, const mk_row *row, const float *logits);
/* Called for every row and MoE layer: chosen ids, ascending. */
typedef void (*mk_session_route)(void *arg, uint32_t layer, const mk_row *row, const uint16_t *ids, uint32_t n);

typedef struct mk_session {
    mk_model *model;
    mk_plan *plan;
    mk_twin *twin;
    uint32_t submit_next, event_next, slots;
    mk_session_logits on_logits;
    mk_session_route on_route;
    mk_twin_hook on_insn; /* after every instruction */
    void *arg;
    uint64_t steps;
    uint32_t max_rows;
    mk_event *ev; /* everything that happened since the last mk_session_clear */
    uint32_t n_ev, cap_ev;
} mk_session;

int mk_session_open(const mk_session_config *c, mk_session **s, mk_err *err);
void mk_session_close(mk_session **s);

/* Opens a stream on slot `slot` (greedy when `sampling` is NULL; context 0: the session's), with pages in an order that is not the
 * identity. */
void mk_session_stream(mk_session *s, uint32_t slot, const mk_sampling *sampling, uint32_t context);
void mk_session_append(mk_session *s, uint32_t slot, const uint32_t *tokens, uint32_t n, uint32_t flags);
void mk_session_generate(mk_session *s, uint32_t slot, uint32_t n);
/* Steps until there is nothing to do. */
int mk_session_run(mk_session *s, mk_err *err);
void mk_session_clear(mk_session *s);
/* The i-th event of a kind for a slot; NULL when there is none. */
const mk_event *mk_session_event(const mk_session *s, uint32_t slot, uint32_t kind, uint32_t i);

#endif
