/* What runs the program: the twin's thread, or a GPU's resident kernel. The engine (host/engine.c) owns one; everything it does goes
 * through these few functions. */
#ifndef MK_MACHINE_H
#define MK_MACHINE_H

#include "host/checkpoint.h"
#include "host/planner.h"
#include "megakernel/rings.h"
#include "megakernel/trace.h"

typedef struct mk_machine mk_machine;

typedef struct mk_machine_ops {
    int (*start)(mk_machine *m, mk_err *err);
    int (*submit)(mk_machine *m, const mk_submit *s, mk_err *err); /* seq is filled in; MK_E_CAPACITY: ring full */
    uint32_t (*events)(mk_machine *m, mk_event *ev, uint32_t n); /* after MK_EV_RESTARTED, which is then the last: everything submitted before is void */
    void (*doorbell)(mk_machine *m); /* cancel or credits changed, or events were taken */
    uint64_t (*steps)(const mk_machine *m);
    int (*trace)(mk_machine *m, uint32_t k, mk_trace_record *r, mk_err *err); /* the records of traced step k: r[instructions] */
    void (*destroy)(mk_machine *m); /* stops after the current step */
} mk_machine_ops;

struct mk_machine {
    const mk_machine_ops *ops;
    mk_slot *slot;       /* [slots] */
    uint32_t *page;      /* [slots][max_pages] */
    uint32_t *token;     /* [slots][context] */
    uint32_t max_pages, context;
    int event_fd;        /* readable when there are events */
    uint64_t *seen_ns;   /* GPU: [MK_EVENT_RING] CLOCK_MONOTONIC of when the polling thread saw the event in that place of the ring; NULL on the twin */
    char name[160];      /* for people: "CPU twin, 8 workers, act bf16" */
    double ceiling_gb_s; /* memory as measured before the start (megakernel/ceiling.h); 0: not measured */
    uint64_t launches;   /* of a kernel; the thread of the operations writes it */
};

typedef struct mk_machine_config {
    uint32_t slots, context, epoch0;
    int self_test;          /* GPU: megakernel/selftest.h, before this returns */
    int unloaded;           /* GPU: mk_gpu_config */
    const char *flight_dir; /* GPU: where mkd-flight-<time>.json goes when the kernel hangs; NULL or "": the working directory */
} mk_machine_config;

/* Allocates, packs the weights of `ck`. A GPU makes random ones where ck is NULL (megakernel/synth.h). The plan must outlive the machine
 * and its program must have passed the validator. */
int mk_machine_twin(const mk_plan *plan, const mk_checkpoint *ck, const mk_machine_config *cfg, mk_machine **m, mk_err *err);
int mk_machine_gpu(const mk_plan *plan, const mk_checkpoint *ck, const mk_machine_config *cfg, mk_machine **m, mk_err *err);

/* What a GPU offers to the planner. MK_E_DEVICE with the reason when none can be used: "no NVIDIA driver on this machine", "this build
 * has no GPU kernel", or what the driver says. */
typedef struct mk_machine_limits {
    uint32_t workers, smem;
    uint64_t memory;
} mk_machine_limits;
int mk_machine_gpu_limits(mk_machine_limits *l, mk_err *err);

/* Writes one count to an eventfd. */
void mk_ring_fd(int fd);
/* The host's side of a token ring: takes up to n events from entry *next on, in order, and tells the device (*read). */
uint32_t mk_take_events(const mk_event *ring, uint32_t *next, uint32_t *read, mk_event *ev, uint32_t n);

#endif
