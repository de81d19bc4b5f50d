/* The engine: a checkpoint that decodes. Owns model, program, memory and the machine that runs it (the twin's thread, or a GPU's
 * resident kernel). Callers see stream slots, a submit ring and events; nothing here knows about clients. */
#ifndef MK_ENGINE_H
#define MK_ENGINE_H

#include "host/bytes.h"
#include "host/err.h"
#include "host/model.h"
#include "megakernel/rings.h"
#include "megakernel/trace.h"

typedef struct mk_engine mk_engine;

typedef struct mk_engine_config {
    const char *dir;          /* checkpoint directory */
    const struct mk_preset *preset; /* or a built-in configuration; NULL: none */
    int synthetic;            /* random weights made on the GPU: `dir` may be a config.json alone */
    int gpu;                  /* run on the GPU; otherwise on the twin */
    uint32_t workers;         /* twin: virtual workers (0: 8); a GPU has as many as it has SMs */
    uint32_t streams;         /* stream slots, 1..1024 */
    uint32_t context;         /* most tokens a stream may hold; 0: the model's limit or what fits */
    uint64_t kv_tokens;       /* size of the page pool in tokens; 0: streams * context */
    uint64_t memory;          /* bytes the engine may use; 0: what the machine has free */
    enum mk_weights_mode weights;
    enum mk_lm_head_mode lm_head;
    enum mk_cache kv_cache;
    int act_f32;              /* twin only */
    int self_test;            /* a GPU's opcodes are tested before it serves */
    int unloaded;             /* synthetic: weights are not streamed (mk_gpu_config) */
    const char *flight_dir;   /* where a hang of the GPU is recorded; NULL or "": the working directory */
    uint32_t epoch0;          /* first epoch (tests: 0xFFFFFFF0) */
} mk_engine_config;

/* Reads, plans, validates, packs; does not start. What cannot fit is refused before anything is loaded. */
int mk_engine_open(const mk_engine_config *cfg, mk_engine **e, mk_err *err);
int mk_engine_start(mk_engine *e, mk_err *err);
/* Stops after the current step and frees everything. */
void mk_engine_close(mk_engine **e);

const mk_model *mk_engine_model(const mk_engine *e);
const struct mk_program *mk_engine_program(const mk_engine *e);
const char *mk_engine_device(const mk_engine *e); /* "CPU twin, 8 workers, act bf16" */
uint32_t mk_engine_slots(const mk_engine *e);
uint32_t mk_engine_context(const mk_engine *e);  /* limit of one stream */
uint32_t mk_engine_pages(const mk_engine *e);    /* pool */
uint64_t mk_engine_steps(const mk_engine *e);    /* steps run since start */

/* For benchmarks. */
typedef struct mk_engine_figures {
    mk_bytes bytes;         /* what the model needs to read */
    uint64_t program_bytes; /* what this program reads in a step of one row, the cache aside */
    char dtype[48];         /* "fp8, lm_head bf16", and ", cache fp8" */
    double ceiling_gb_s;    /* memory as it was measured before the start; 0: not measured */
    uint64_t launches;      /* of a kernel since the start */
} mk_engine_figures;
void mk_engine_get_figures(const mk_engine *e, mk_engine_figures *f);

/* Arena of a slot; written only while no entry that refers to it is outstanding, except cancel and credits. */
mk_slot *mk_engine_slot(mk_engine *e, uint32_t slot);
uint32_t *mk_engine_page_table(mk_engine *e, uint32_t slot);
uint32_t *mk_engine_tokens(mk_engine *e, uint32_t slot); /* the slot's token log, [context] */

/* Puts one entry into the submit ring (seq is filled in). MK_E_CAPACITY when the ring is full. One caller at a time. */
int mk_engine_submit(mk_engine *e, const mk_submit *s, mk_err *err);
/* After changing cancel or credits. */
void mk_engine_doorbell(mk_engine *e);
/* Takes up to n events out of the token ring, in order. event_fd becomes readable when there are some (level: read it, then drain). */
uint32_t mk_engine_events(mk_engine *e, mk_event *ev, uint32_t n);
int mk_engine_event_fd(const mk_engine *e);

/* Has the next `steps` steps traced (megakernel/trace.h). MK_E_USAGE: steps out of range; MK_E_CAPACITY: a trace is under way, or the submit
 * ring is full. */
int mk_engine_trace(mk_engine *e, uint32_t steps, mk_err *err);
void mk_engine_trace_end(mk_engine *e); /* forgets it, recorded or not */
enum mk_trace_state { MK_TRACE_NONE = 0, MK_TRACE_WAITING, MK_TRACE_RECORDED, MK_TRACE_LOST /* the kernel was launched anew */ };
enum mk_trace_state mk_engine_trace_state(const mk_engine *e, uint32_t *first_step);
/* Once recorded: the records of its step k, in the order of the program's instructions; *missing: how many are not there (the last ones are
 * written after the step's tokens are out: ask again). */
int mk_engine_trace_read(mk_engine *e, uint32_t k, mk_trace_record *r, uint32_t *missing, mk_err *err);

#endif
