/* The two comparisons of mkctl diff. */
#ifndef MK_MKCTL_DIFF_H
#define MK_MKCTL_DIFF_H

#include "host/session.h"
#include "ipc/mkctl.h"

/* Twin in act=f32 against twin in default precision, tokens ids[n]; tolerance in RMS of a vector. MK_E_DEVICE when they diverge. */
int mkctl_diff_strict(const mk_session_config *cfg, const uint32_t *ids, uint32_t n, double tolerance, mk_err *err);

typedef struct mkctl_diff_config {
    const uint32_t *ids; /* prompt */
    uint32_t n, max_new; /* its length; tokens to generate after it */
    double tolerance;    /* of the free run, in RMS */
    const char *json;    /* report; NULL: none */
    const char *spoil;   /* "worker:index": the twin runs that GEMV 5 % too strong; NULL: not */
} mkctl_diff_config;
/* GPU against twin. MK_E_DEVICE when they diverge. */
int mkctl_diff_gpu(const mk_session_config *cfg, const mkctl_diff_config *d, mk_err *err);

#endif
