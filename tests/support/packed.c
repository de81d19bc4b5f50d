#include "tests/support/packed.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/edit.h"
#include "tests/support/tmp.h"

void packed_memory(const mk_program *p, mk_memory *mem)
{
    memset(mem, 0, sizeof *mem);
    mem->tape = calloc(1, p->info.tape_bytes + 64);
    mem->expert = calloc(1, p->info.expert_bytes + 64);
    mem->embed = calloc(1, p->info.embed_bytes + 64);
    mem->param = calloc(1, p->info.param_floats * 4 + 64);
    if (!mem->tape || !mem->expert || !mem->embed || !mem->param) fail_msg("out of memory");
}

void packed_memory_free(mk_memory *mem)
{
    free(mem->tape);
    free(mem->expert);
    free(mem->embed);
    free(mem->param);
}

packed *packed_open(const char *dir, packed_as as, uint32_t workers)
{
    packed *p = calloc(1, sizeof *p);
    if (!p) fail_msg("out of memory");
    mk_plan_config c = {.workers = workers, .max_context = 256, .kv_pages = 8, .state_slots = 2};
    int rc = mk_model_read(dir, &p->model, &p->err);
    if (!rc) p->model->lm_head_mode = (uint8_t)as.head;
    if (rc || mk_checkpoint_open(dir, &p->ck, &p->err) || mk_model_resolve(p->model, p->ck, as.weights, &p->err) || mk_plan_make(p->model, &c, &p->plan, &p->err))
        fail_msg("%s: %s", dir, p->err.msg);
    packed_memory(p->plan->prog, &p->mem);
    if (mk_pack(p->plan, p->ck, &p->mem, &p->err)) fail_msg("%s: %s", dir, p->err.msg);
    return p;
}

void packed_close(packed **p)
{
    packed_memory_free(&(*p)->mem);
    mk_plan_destroy(&(*p)->plan);
    mk_checkpoint_close(&(*p)->ck);
    mk_model_destroy(&(*p)->model);
    free(*p);
    *p = NULL;
}

/* The item whose segment holds the byte; NULL: none begins before it. */
static const mk_pack_item *item_at(const mk_plan *plan, int expert, uint64_t at)
{
    const mk_pack_item *best = NULL;
    uint64_t nearest = 0;
    for (size_t i = 0; i < plan->n_item; i++) {
        const mk_pack_item *it = &plan->item[i];
        if (it->kind != (expert ? MK_PACK_EXPERT : MK_PACK_TAPE)) continue;
        uint64_t d = it->dst + (expert ? 0 : plan->prog->tape_base[it->worker]);
        if (d <= at && (!best || d >= nearest)) best = it, nearest = d;
    }
    return best;
}

static void region(const char *name, const char *what, const mk_plan *plan, int expert, const uint8_t *want, const uint8_t *got, uint64_t n)
{
    if (!memcmp(want, got, n)) return;
    uint64_t at = 0, differ = 0;
    for (uint64_t i = n; i--;)
        if (want[i] != got[i]) at = i, differ++;
    const mk_pack_item *it = expert < 0 ? NULL : item_at(plan, expert, at);
    fail_msg("%s: %llu of %llu bytes of %s differ, first byte %llu: expected %02x, found %02x (%s, rows %u + %u)", name, (unsigned long long)differ,
             (unsigned long long)n, what, (unsigned long long)at, want[at], got[at], it ? it->mat[0]->tensor : "?", it ? it->row0 : 0, it ? it->rows : 0);
}

void packed_same(const char *name, const mk_plan *plan, const mk_memory *want, const mk_memory *got)
{
    const mk_program_info *i = &plan->prog->info;
    region(name, "the tapes", plan, 0, want->tape, got->tape, i->tape_bytes);
    region(name, "the experts", plan, 1, want->expert, got->expert, i->expert_bytes);
    region(name, "the embedding", plan, -1, want->embed, got->embed, i->embed_bytes);
}

void packed_each(packed_fn f, void *arg)
{
    static const char *const dirs[] = {"tests/oracle/kimi_linear", "tests/oracle/deepseek_v3", "tests/oracle/moonlight", "tests/oracle/glm4_moe_lite",
                                       "tests/oracle/llama", "tests/oracle/qwen3_next", "tests/oracle/qwen3_5", "tests/oracle/qwen3_5_moe"};
    static const struct {
        const char *name;
        enum mk_st_dtype as; /* MK_ST_OTHER: as it is stored */
        packed_as keep;
    } how[] = {{"stored, auto", MK_ST_OTHER, {MK_WEIGHTS_AUTO, MK_LM_HEAD_AUTO}}, {"stored, fp8", MK_ST_OTHER, {MK_WEIGHTS_FP8, MK_LM_HEAD_AUTO}},
               {"stored, bf16", MK_ST_OTHER, {MK_WEIGHTS_BF16, MK_LM_HEAD_AUTO}}, {"BF16, fp8", MK_ST_BF16, {MK_WEIGHTS_FP8, MK_LM_HEAD_AUTO}},
               {"F16, fp8", MK_ST_F16, {MK_WEIGHTS_FP8, MK_LM_HEAD_AUTO}},        {"F32, fp8", MK_ST_F32, {MK_WEIGHTS_FP8, MK_LM_HEAD_AUTO}},
               {"F16, bf16", MK_ST_F16, {MK_WEIGHTS_BF16, MK_LM_HEAD_AUTO}},      {"F32, bf16", MK_ST_F32, {MK_WEIGHTS_BF16, MK_LM_HEAD_AUTO}},
               {"stored, fp8 head", MK_ST_OTHER, {MK_WEIGHTS_AUTO, MK_LM_HEAD_FP8}}, {"F32, fp8 head", MK_ST_F32, {MK_WEIGHTS_BF16, MK_LM_HEAD_FP8}}};
    for (size_t d = 0; d < sizeof dirs / sizeof *dirs; d++)
        for (size_t h = 0; h < sizeof how / sizeof *how; h++) {
            char name[128], *copy = NULL;
            mk_err err = {0};
            /* Copies of two families are enough of them: kv_b halves and stacked experts. */
            if (how[h].as != MK_ST_OTHER && d != 1 && d != 7) continue;
            snprintf(name, sizeof name, "%s, %s", dirs[d], how[h].name);
            if (how[h].as != MK_ST_OTHER) {
                copy = mk_tmp_dir();
                if (mk_edit_checkpoint(dirs[d], copy, how[h].as, NULL, NULL, &err)) fail_msg("%s: %s", name, err.msg);
            }
            f(name, copy ? copy : dirs[d], how[h].keep, arg);
            if (copy) mk_tmp_remove(&copy);
        }
}
