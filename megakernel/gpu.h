/* The resident kernel's host side: one GPU, one program, one launch. C on the outside; needs no driver until mk_gpu_new is called.
 *
 *   mk_gpu_probe -> mk_gpu_new -> mk_gpu_upload -> mk_gpu_start -> (rings) -> mk_gpu_stop -> [mk_gpu_start ...] -> mk_gpu_destroy
 *
 * Between start and stop nothing here calls CUDA but for copy-engine transfers on a stream made beforehand, from and to pinned memory, and recording and
 * asking events made beforehand (tests/gpu/test_residency.sh counts). One caller at a time. */
#ifndef MK_GPU_H
#define MK_GPU_H

#include "instructions/op.h"
#include "megakernel/rings.h"
#include "megakernel/snapshot.h"
#include "megakernel/trace.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mk_gpu mk_gpu;

typedef struct mk_gpu_info {
    char name[256];
    char pci[16];    /* "0000:1b:00.0", as in /sys/bus/pci/devices */
    uint32_t sms;
    uint32_t smem;   /* bytes of shared memory a block may have */
    uint64_t memory; /* bytes of device memory */
} mk_gpu_info;

typedef struct mk_gpu_config {
    int device;
    uint32_t slots;      /* stream slots */
    uint32_t context;    /* tokens of a slot's log */
    uint32_t timeout_ms; /* of every wait but the idle ones; 0: 2000 */
    uint32_t sweep;      /* steps between two sweeps of the exchange, a power of two; 0: 2^20 (megakernel/exchange.h) */
    uint32_t laid;       /* for tests: one more than the enum mk_laid whose kernel is to run; 0: the one that suits the program */
    int unloaded;        /* what goes through the ring is not read (weights; pages of a cache but for the first ones of each split): it keeps small random values. To measure what a step takes beside that */
} mk_gpu_config;

/* What host and device share; all pinned. A submit entry goes through mk_gpu_submit. */
typedef struct mk_gpu_rings {
    mk_event *event;      /* [MK_EVENT_RING] */
    uint32_t *event_read; /* events the host has taken; release */
    mk_slot *slot;        /* [slots] */
    uint32_t *page;       /* [slots * max_pages] */
    uint32_t *token;      /* [slots * context] */
    uint32_t max_pages;
} mk_gpu_rings;

/* MK_E_DEVICE, with what the driver says, when there is no usable GPU. */
int mk_gpu_probe(int device, mk_gpu_info *info, mk_err *err);

/* Checks that the kernel can run the program (shapes, shared memory, workers at most the SMs), allocates everything. The program must outlive it
 * and must have passed the validator. */
int mk_gpu_new(const mk_program *p, const mk_gpu_config *cfg, mk_gpu **g, mk_err *err);
/* Copies tape, expert, embed and param of a packed host memory to the device. */
int mk_gpu_upload(mk_gpu *g, const mk_memory *host, mk_err *err);
/* The other way, for weights that were made on the device; before the start. */
int mk_gpu_download(mk_gpu *g, mk_memory *host, mk_err *err);
/* Where these four regions are on the device; the other fields of *device are not touched. For kernels that make weights in place. */
void mk_gpu_weights(const mk_gpu *g, mk_memory *device);
/* Where every region is: device memory, but for slot and token (pinned). `local` is the image that mk_gpu_once works on, NULL before the first load. */
void mk_gpu_memory(const mk_gpu *g, mk_memory *device);
/* Copies n floats to the parameter region, from float `at` on; before the start, which makes tables of gammas out of them (gains.cuh). */
int mk_gpu_upload_params(mk_gpu *g, const float *values, uint64_t at, uint64_t n, mk_err *err);
/* Resets rings, exchange and schedule and launches the kernel. Publications carry epochs above epoch0: after an earlier run, above all that it used. */
int mk_gpu_start(mk_gpu *g, uint32_t epoch0, mk_err *err);
/* The same, but for the launch: somebody else's kernels will run (megakernel/baseline.cu). `sets` times the workers' queues, one set after the other, are
 * uploaded (they stay until mk_gpu_destroy); *args is for the first set, of the next ones queue and seg_first stand `workers` entries further. */
struct mk_gpu_args;
int mk_gpu_prepare(mk_gpu *g, uint32_t epoch0, const mk_insn *insn, const uint32_t *queue, uint32_t sets, struct mk_gpu_args *args, uint32_t *smem, mk_err *err);

/* Set-up and tests, while the kernel is not resident. Copy regions of the program's sizes between a host's memory and the device; PAGE: page tables
 * [slots][max_pages] and slots. */
enum {
    MK_REGION_EXCHANGE = 1,
    MK_REGION_BULK = 2,
    MK_REGION_COUNTER = 4,
    MK_REGION_LOCAL = 8,
    MK_REGION_STATE = 16,
    MK_REGION_KV = 32,
    MK_REGION_PAGE = 64,
};
int mk_gpu_load(mk_gpu *g, const mk_memory *host, uint32_t regions, mk_err *err);
int mk_gpu_store(mk_gpu *g, mk_memory *host, uint32_t regions, mk_err *err);
/* Runs one step of the given instructions (insn[queue[w] .. queue[w + 1]) are worker w's: any of the program's, or others over the same vectors and
 * regions) and returns when the kernel has left. Nothing is reset: what they wait for must lie there, packets with mk_epoch(epoch0, step->seq, pub),
 * counters with mk_counter_target, LOCAL vectors in the image. No SCHEDULE among them: it would compose a step. MK_E_DEVICE: a wait ran out (who waited
 * for what), or the kernel did not leave within `ms`. */
int mk_gpu_once(mk_gpu *g, const mk_insn *insn, const uint32_t *queue, const mk_step *step, uint32_t epoch0, uint32_t ms, mk_err *err);

mk_gpu_rings mk_gpu_sched_rings(mk_gpu *g);
/* Puts one entry into the submit ring (seq is filled in). OPEN also hands the slot's page table to the device, so it must be complete.
 * MK_E_CAPACITY when the ring is full. */
int mk_gpu_submit(mk_gpu *g, const mk_submit *s, mk_err *err);
uint32_t mk_gpu_steps(const mk_gpu *g); /* finished since the start */

/* 1: the kernel has left; 0: it runs. Asks an event; any thread. */
int mk_gpu_left(mk_gpu *g);
/* Copies from the bulk region by copy engine, whatever the kernel is doing. */
int mk_gpu_read_bulk(mk_gpu *g, uint64_t offset, void *dst, uint64_t bytes, mk_err *err);
/* Copies the records of traced step k by copy engine: r[instructions of the program]. Whatever is there: mk_trace_is says whether it is the record meant. */
int mk_gpu_trace(mk_gpu *g, uint32_t k, mk_trace_record *r, mk_err *err);
/* One line about the wait that ran out: worker, instruction, what it waited for and who should have published it. Returns 0 when there was none. */
int mk_gpu_fault(const mk_gpu *g, char *text, size_t size);

/* Changes as long as SCHEDULE lives: with every finished step, and with every look for work when there is none. Pinned memory, no call; any thread. */
uint32_t mk_gpu_pulse(const mk_gpu *g);
/* Fills *s by copy engine, whatever the kernel is doing. What the host knows by itself is filled in even when the device cannot be read. */
int mk_gpu_snapshot(mk_gpu *g, mk_snapshot *s, mk_err *err);
/* An epoch0 above every epoch of the run before. */
uint32_t mk_gpu_next_epoch(const mk_gpu *g);
/* Makes the kernel leave without finishing its step; events keep their place in the ring. Then mk_gpu_start may launch it anew. MK_E_DEVICE when it does not
 * leave within `ms`, or when CUDA reports an error: this process has no GPU any more. */
int mk_gpu_abort(mk_gpu *g, uint32_t ms, mk_err *err);

/* Asks SCHEDULE to stop and waits for the kernel to leave, `ms` at most; then aborts it. Events keep their place in the ring. MK_E_DEVICE when the
 * kernel had to be aborted or died. */
int mk_gpu_stop(mk_gpu *g, uint32_t ms, mk_err *err);
void mk_gpu_destroy(mk_gpu **g);

#ifdef __cplusplus
}
#endif

#endif
