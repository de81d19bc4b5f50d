/* What a trace says: the tables that `mkctl trace` prints and the Chrome / Perfetto file that it writes. */
#ifndef MK_TRACE_REPORT_H
#define MK_TRACE_REPORT_H

#include "ipc/client.h"

#include <stdio.h>

/* Nanoseconds of all workers in one step or one class of instructions. compute + publish + weights + input is the time in instructions. aside: those beside the queues, which are no
 * part of a step's time. */
typedef struct mk_trace_share {
    uint64_t count, input, weights, compute, publish, bytes, aside;
} mk_trace_share;
void mk_trace_add(mk_trace_share *s, const mk_wire_trace_record *r);

/* One step, and its chain of instructions each of which waited for the one before. Times in nanoseconds of the device's clock. */
typedef struct mk_trace_step {
    uint64_t begin, end;  /* first instruction begins; SCHEDULE has the tokens out and is about to compose the next step */
    mk_trace_share all;   /* of all workers */
    uint32_t rows, n_path;
    uint32_t *path;       /* [n_path] instructions, first to last */
    mk_trace_share chain; /* input: exchange and gathering on the way from one to the next */
} mk_trace_step;

typedef struct mk_trace_report {
    const mk_client_trace *t;
    uint32_t schedule;      /* the last instruction */
    uint32_t n_class, *key; /* classes: opcode and published vector; key: [instructions] -> class */
    char (*name)[40];       /* [n_class] "GEMV qkv" */
    mk_trace_share *share, *chain; /* [n_class] all steps together; of the critical paths */
    mk_trace_step *step;    /* [steps] */
} mk_trace_report;

/* MK_E_WIRE when the trace names what it does not have; MK_E_SYSTEM. The trace must outlive the report. */
int mk_trace_report_new(const mk_client_trace *t, mk_trace_report **r, mk_err *err);
void mk_trace_report_free(mk_trace_report **r);

void mk_trace_print(const mk_trace_report *r, FILE *f);
/* JSON of the Chrome trace event format: a track a worker, one more for the critical path, and one for each worker that has had instructions beside its queue. `what`: model, device and build, for people. */
int mk_trace_write(const mk_trace_report *r, const mk_client_info *what, FILE *f);

#endif
