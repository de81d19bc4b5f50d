#include "profiles/synthetic.h"

#include "host/machine.h"
#include "host/synth.h"
#include "instructions/validate.h"

int mk_synthetic_plan(mk_synthetic *s, const mk_preset *p, enum mk_lm_head_mode lm_head, uint32_t context, mk_err *err)
{
    mk_machine_limits limits;
    int rc = mk_machine_gpu_limits(&limits, err);
    if (!rc) rc = mk_preset_model(p, &s->model, err);
    if (rc) return rc;
    s->model->lm_head_mode = (uint8_t)lm_head;
    s->pages = (context + MK_MAX_ROWS + MK_PAGE - 1) / MK_PAGE;
    mk_plan_config pc = {.workers = limits.workers, .max_context = s->pages * MK_PAGE, .kv_pages = s->pages, .state_slots = 1, .smem_limit = limits.smem};
    if (!rc) rc = mk_model_resolve(s->model, NULL, p->weights, err);
    if (!rc) rc = mk_plan_make(s->model, &pc, &s->plan, err);
    return rc ? rc : mk_validate(s->plan->prog, NULL, err);
}

int mk_synthetic_make(mk_synthetic *s, mk_err *err)
{
    const mk_gpu_config gc = {.slots = 1, .context = s->pages * MK_PAGE};
    int rc = mk_gpu_new(s->plan->prog, &gc, &s->gpu, err);
    return rc ? rc : mk_synthesize(s->plan, s->gpu, err);
}

void mk_synthetic_close(mk_synthetic *s)
{
    mk_gpu_destroy(&s->gpu);
    mk_plan_destroy(&s->plan);
    mk_model_destroy(&s->model);
}
