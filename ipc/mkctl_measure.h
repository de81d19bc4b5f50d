/* What `mkctl bench` and `mkctl synth` measure and how they say it: steps of a pinned stream (PROTOCOL.md, OPEN), by the device's clock. */
#ifndef MK_MKCTL_MEASURE_H
#define MK_MKCTL_MEASURE_H

#include "host/bytes.h"
#include "ipc/client.h"

#include <jansson.h>

typedef struct mk_pinned {
    uint32_t context; /* tokens that the first row's stream holds, itself included */
    uint32_t rows;    /* tokens of one stream in each step, 1..8 */
    uint32_t steps;   /* that count; a few before them do not */
    uint32_t prompt;  /* tokens of a prompt at that position, for its speed; 0: none */
    uint64_t seed;    /* of the random token ids, and so of the routes */
    float temperature, top_p; /* 0: greedy */
    uint32_t top_k;
} mk_pinned;

typedef struct mk_pinned_result {
    double *step_ms;        /* [steps], device clock; free() it */
    double prompt_tok_s;    /* client clock; 0: not measured */
} mk_pinned_result;

/* One stream, alone on the daemon. The stream needs a context of mk_pinned_context(q). */
int mk_measure_pinned(mk_client *c, const mk_pinned *q, mk_pinned_result *r, mk_err *err);
uint32_t mk_pinned_context(const mk_pinned *q);

/* What the daemon says of model and machine. */
typedef struct mk_measured {
    mk_bytes bytes;
    uint64_t program_bytes, launches;
    double ceiling_gb_s;
    char dtype[64];
} mk_measured;
int mk_measure_about(mk_client *c, mk_measured *m, mk_err *err);

/* SM and memory clock in MHz as nvidia-smi has them now: {"sm_mhz", "mem_mhz"}; null where there is none. */
json_t *mk_measure_clocks(void);
/* "2026-11-21T07:20:49Z" */
void mk_measure_date(char date[32]);

#endif
