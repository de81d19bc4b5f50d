#include "host/engine.h"

#include "host/checkpoint.h"
#include "host/machine.h"
#include "host/planner.h"
#include "host/preset.h"
#include "instructions/validate.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct mk_engine {
    mk_model *model;
    mk_checkpoint *ck;
    mk_plan *plan;
    mk_machine *machine;
    uint32_t slots, context, pages;
    enum mk_trace_state trace;
    uint32_t trace_tag, trace_first;
};

/* Bytes the machine has free, with a tenth left for everybody else. */
static uint64_t free_memory(void)
{
    FILE *f = fopen("/proc/meminfo", "r");
    char line[128];
    unsigned long long kb = 0;
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %llu kB", &kb) == 1) break;
    if (f) fclose(f);
    return kb * 1024 / 10 * 9;
}

static uint64_t program_bytes(const mk_program_info *i)
{
    return i->tape_bytes + i->expert_bytes + i->embed_bytes + i->param_floats * 4 + i->exchange_bytes + i->bulk_bytes +
           i->workers * i->local_bytes;
}

/* Plans with a pool of one page to learn the sizes, then with the pool that the configuration asks for or memory allows. */
static int plan_to_fit(mk_engine *e, const mk_engine_config *cfg, const mk_machine_limits *gpu, mk_err *err)
{
    mk_plan_config pc = {.workers = gpu ? gpu->workers : cfg->workers ? cfg->workers : 8, .act_f32 = cfg->act_f32, .max_context = MK_PAGE,
                         .kv_pages = 1, .state_slots = e->slots, .smem_limit = gpu ? gpu->smem : 0};
    int rc = mk_plan_make(e->model, &pc, &e->plan, err);
    if (rc) return rc;
    mk_program_info i = e->plan->prog->info;
    uint64_t memory = cfg->memory ? cfg->memory : gpu ? gpu->memory : free_memory(), fixed = program_bytes(&i);
    uint64_t state = i.state_slot_bytes * e->slots, page = i.kv_page_bytes * i.kv_layers;
    if (fixed + state > memory)
        return mk_fail(err, MK_E_CAPACITY,
                       "does not fit: weights and buffers need %.2f GB, state of %u streams %.2f GB, %.2f GB of memory may be used",
                       (double)fixed / 1e9, e->slots, (double)state / 1e9, (double)memory / 1e9);
    uint64_t fit = page ? (memory - fixed - state) / page : UINT32_MAX / MK_PAGE;
    uint32_t limit = e->model->max_context;
    uint64_t context = cfg->context ? cfg->context : limit;
    if (cfg->context > limit)
        return mk_fail(err, MK_E_CAPACITY, "context %u is over the model's limit of %u tokens", cfg->context, limit);
    if (page && context < MK_PAGE)
        return mk_fail(err, MK_E_CAPACITY, "context %llu%s: expected at least a page of %u tokens", (unsigned long long)context, cfg->context ? "" : " (the model's limit)", MK_PAGE);
    if (!cfg->context && !cfg->kv_tokens && page) {
        uint64_t most = fit / e->slots * MK_PAGE;
        if (most < context) context = most;
    }
    uint64_t pages = cfg->kv_tokens ? (cfg->kv_tokens + MK_PAGE - 1) / MK_PAGE : (context + MK_PAGE - 1) / MK_PAGE * e->slots;
    if (!cfg->context && cfg->kv_tokens && pages * MK_PAGE < context) context = pages * MK_PAGE;
    if (page && cfg->kv_tokens && pages * MK_PAGE < context)
        return mk_fail(err, MK_E_CAPACITY, "kv-tokens %llu: expected at least the context's %llu, for a stream holds so many", (unsigned long long)cfg->kv_tokens, (unsigned long long)context);
    if (page && (pages > fit || context < MK_PAGE)) {
        char of[64] = "kv-tokens";
        if (!cfg->kv_tokens) snprintf(of, sizeof of, "%u streams x %llu context", e->slots, (unsigned long long)context);
        return mk_fail(err, MK_E_CAPACITY, "does not fit: a pool of %llu tokens (%s) needs %.2f GB beside %.2f GB of weights and state; %.2f GB may be used: at most %llu tokens",
                       (unsigned long long)(pages * MK_PAGE), of, (double)(pages * page) / 1e9, (double)(fixed + state) / 1e9, (double)memory / 1e9, (unsigned long long)(fit * MK_PAGE));
    }
    if (pages > UINT32_MAX / MK_PAGE) return mk_fail(err, MK_E_CAPACITY, "kv pool: %llu pages are too many", (unsigned long long)pages);
    e->context = (uint32_t)context;
    e->pages = (uint32_t)pages;
    mk_plan_destroy(&e->plan);
    pc.max_context = e->context;
    pc.kv_pages = e->pages;
    return mk_plan_make(e->model, &pc, &e->plan, err);
}

int mk_engine_open(const mk_engine_config *cfg, mk_engine **out, mk_err *err)
{
    *out = NULL;
    if (cfg->streams < 1 || cfg->streams > 1024)
        return mk_fail(err, MK_E_USAGE, "streams: expected 1 to 1024, found %u", cfg->streams);
    if (cfg->synthetic && !cfg->gpu) return mk_fail(err, MK_E_USAGE, "synthetic weights are made on a GPU: --device gpu");
    mk_engine *e = calloc(1, sizeof *e);
    if (!e) return mk_fail(err, MK_E_CAPACITY, "out of memory");
    e->slots = cfg->streams;
    mk_machine_limits limits;
    int rc = cfg->gpu ? mk_machine_gpu_limits(&limits, err) : MK_OK;
    if (!rc) rc = cfg->preset ? mk_preset_model(cfg->preset, &e->model, err) : mk_model_read(cfg->dir, &e->model, err);
    if (!rc && cfg->synthetic) e->model->n_media = 0; /* a benchmark's random ids are no pictures */
    if (!rc && !cfg->synthetic) rc = mk_checkpoint_open(cfg->dir, &e->ck, err);
    if (!rc) e->model->lm_head_mode = (uint8_t)cfg->lm_head, e->model->kv_cache = (uint8_t)cfg->kv_cache;
    if (!rc) rc = mk_model_resolve(e->model, e->ck, cfg->weights, err);
    if (!rc) rc = plan_to_fit(e, cfg, cfg->gpu ? &limits : NULL, err);
    if (!rc) rc = mk_validate(e->plan->prog, NULL, err);
    mk_machine_config mc = {.slots = e->slots, .context = e->context, .epoch0 = cfg->epoch0, .self_test = cfg->self_test, .unloaded = cfg->unloaded, .flight_dir = cfg->flight_dir};
    if (!rc) rc = (cfg->gpu ? mk_machine_gpu : mk_machine_twin)(e->plan, e->ck, &mc, &e->machine, err);
    mk_checkpoint_close(&e->ck);
    if (rc)
        mk_engine_close(&e);
    else
        *out = e;
    return rc;
}

int mk_engine_start(mk_engine *e, mk_err *err) { return e->machine->ops->start(e->machine, err); }

void mk_engine_close(mk_engine **pe)
{
    mk_engine *e = *pe;
    if (!e) return;
    if (e->machine) e->machine->ops->destroy(e->machine);
    mk_plan_destroy(&e->plan);
    mk_checkpoint_close(&e->ck);
    mk_model_destroy(&e->model);
    free(e);
    *pe = NULL;
}

const mk_model *mk_engine_model(const mk_engine *e) { return e->model; }
const struct mk_program *mk_engine_program(const mk_engine *e) { return e->plan->prog; }
const char *mk_engine_device(const mk_engine *e) { return e->machine->name; }
uint32_t mk_engine_slots(const mk_engine *e) { return e->slots; }
uint32_t mk_engine_context(const mk_engine *e) { return e->context; }
uint32_t mk_engine_pages(const mk_engine *e) { return e->pages; }
uint64_t mk_engine_steps(const mk_engine *e) { return e->machine->ops->steps(e->machine); }

static void note_fp8(void *arg, mk_mat *mat)
{
    const void **a = arg; /* the LM head, which is named by itself; then non-null when something else is FP8 */
    if (mat->source != MK_SRC_NONE && mat->wtype == MK_W_FP8 && mat != a[0]) a[1] = mat;
}

void mk_engine_get_figures(const mk_engine *e, mk_engine_figures *f)
{
    const void *note[2] = {&e->model->lm_head, NULL};
    memset(f, 0, sizeof *f);
    mk_model_mats(e->model, note_fp8, note);
    snprintf(f->dtype, sizeof f->dtype, "%s, lm_head %s%s", note[1] ? "fp8" : "bf16", e->model->lm_head.wtype == MK_W_FP8 ? "fp8" : "bf16",
             e->model->kv_cache == MK_CACHE_FP8 ? ", cache fp8" : "");
    f->bytes = e->plan->bytes;
    for (size_t i = 0; i < e->plan->n_phase; i++) f->program_bytes += e->plan->phase[i].total;
    f->ceiling_gb_s = e->machine->ceiling_gb_s;
    f->launches = e->machine->launches;
}

int mk_engine_event_fd(const mk_engine *e) { return e->machine->event_fd; }

mk_slot *mk_engine_slot(mk_engine *e, uint32_t slot) { return e->machine->slot + slot; }
uint32_t *mk_engine_page_table(mk_engine *e, uint32_t slot) { return e->machine->page + (size_t)slot * e->machine->max_pages; }
uint32_t *mk_engine_tokens(mk_engine *e, uint32_t slot) { return e->machine->token + (size_t)slot * e->machine->context; }

int mk_engine_submit(mk_engine *e, const mk_submit *s, mk_err *err) { return e->machine->ops->submit(e->machine, s, err); }
void mk_engine_doorbell(mk_engine *e) { e->machine->ops->doorbell(e->machine); }
uint32_t mk_engine_events(mk_engine *e, mk_event *ev, uint32_t n)
{
    uint32_t got = e->machine->ops->events(e->machine, ev, n);
    for (uint32_t i = 0; i < got && e->trace == MK_TRACE_WAITING; i++) {
        if (ev[i].kind == MK_EV_RESTARTED) e->trace = MK_TRACE_LOST;
        if (ev[i].kind != MK_EV_TRACED || ev[i].tag != e->trace_tag) continue;
        e->trace = MK_TRACE_RECORDED;
        e->trace_first = ev[i].step - ev[i].arg;
    }
    return got;
}

/* ---- trace ---------------------------------------------------------------------------------------------------------- */

int mk_engine_trace(mk_engine *e, uint32_t steps, mk_err *err)
{
    uint32_t limit = mk_trace_limit(e->plan->prog->info.n_insn);
    if (steps < 1 || steps > limit) return mk_fail(err, MK_E_USAGE, "steps: expected 1 to %u for this model, found %u", limit, steps);
    if (e->trace != MK_TRACE_NONE) return mk_fail(err, MK_E_CAPACITY, "a trace is under way");
    uint32_t tag = e->trace_tag % 0xffffu + 1;
    int rc = mk_engine_submit(e, &(mk_submit){.op = MK_SUB_TRACE, .arg0 = steps, .arg1 = tag}, err);
    if (rc) return rc;
    e->trace_tag = tag;
    e->trace = MK_TRACE_WAITING;
    return MK_OK;
}

void mk_engine_trace_end(mk_engine *e)
{
    /* A full submit ring: the steps are recorded for nobody, and the next trace takes over. */
    if (e->trace == MK_TRACE_WAITING) mk_engine_submit(e, &(mk_submit){.op = MK_SUB_TRACE}, NULL);
    e->trace = MK_TRACE_NONE;
}

enum mk_trace_state mk_engine_trace_state(const mk_engine *e, uint32_t *first_step)
{
    *first_step = e->trace_first;
    return e->trace;
}

int mk_engine_trace_read(mk_engine *e, uint32_t k, mk_trace_record *r, uint32_t *missing, mk_err *err)
{
    int rc = e->machine->ops->trace(e->machine, k, r, err);
    *missing = 0;
    for (uint32_t i = 0; i < e->plan->prog->info.n_insn && !rc; i++) *missing += !mk_trace_is(&r[i], e->trace_tag, k);
    return rc;
}
