/* What is seen of a kernel that hangs: its exchange, counters and positions as the copy engine found them, and what follows from them for every
 * worker. Plain host code, so that it can be tested without a GPU. */
#ifndef MK_SNAPSHOT_H
#define MK_SNAPSHOT_H

#include "instructions/program.h"
#include "megakernel/rings.h"

typedef struct mk_snapshot {
    const mk_program *prog;
    int live;           /* taken while the workers stood still. Otherwise the kernel had left before: its workers then ran through what they were fed,
                           so that only `kernel` says what happened */
    uint32_t epoch0;
    uint32_t steps;     /* finished; the step under way has this number */
    uint32_t submitted, taken;         /* submit entries: by the host, by SCHEDULE */
    uint32_t published, events_read;   /* events: by SCHEDULE (device_read), taken by the host */
    uint32_t streams;   /* open on the device (device_read) */
    int device_read;    /* the rest could be read from the device */
    mk_step step;       /* under way, if step.seq == steps; of no rows: none is, SCHEDULE should be looking for work */
    uint32_t *position; /* [workers] the instruction last fed */
    uint32_t *counter;  /* [n_counter] */
    uint8_t *exchange;  /* [exchange_bytes] */
    char kernel[512];   /* the kernel's own account of the wait that ran out; "": none */
} mk_snapshot;

void mk_snapshot_free(mk_snapshot *s); /* the arrays */

enum mk_worker_state {
    MK_WORKER_THROUGH = 0, /* with this step: nothing of it is left to publish */
    MK_WORKER_WAITING,     /* at `insn`, for `wait`, whose slice `slice` is missing */
    MK_WORKER_STUCK,       /* at `insn`: has all it needs and has not published */
    MK_WORKER_UNFED,       /* `insn` is next and was never handed to the compute warps */
};
typedef struct mk_worker_view {
    enum mk_worker_state state;
    const mk_insn *insn; /* not THROUGH */
    int wait;
    uint32_t slice;
    const mk_insn *from; /* who publishes that slice; NULL: it depends on the route, or several do */
    uint32_t from_worker;
} mk_worker_view;

void mk_snapshot_worker(const mk_snapshot *s, uint32_t worker, mk_worker_view *v);
/* The worker that everybody else waits for; -1: none can be named. */
int mk_snapshot_culprit(const mk_snapshot *s);
/* One line for people. */
void mk_snapshot_text(const mk_snapshot *s, char *text, size_t size);

/* Writes mkd-flight-<UTC time>.json into `dir`; its path into path[size]. `error` is what the daemon says of it. MK_E_SYSTEM. */
int mk_flight_write(const mk_snapshot *s, const char *dir, const char *device, const char *error, char *path, size_t size, mk_err *err);

#endif
