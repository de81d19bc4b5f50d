/* The validator on planned programs of Llama and Qwen3-Next: accepted for any number of workers; broken on purpose, refused by one line. */
#include "host/planner.h"
#include "instructions/validate.h"
#include "tests/support/progbuild.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static mk_program *planned(const char *family, uint32_t workers, int act_f32, enum mk_weights_mode mode)
{
    char path[128];
    snprintf(path, sizeof path, "tests/oracle/%s/config.json", family);
    mk_model *m = NULL;
    mk_plan *plan = NULL;
    mk_err err = {0};
    mk_plan_config pc = {.workers = workers, .act_f32 = act_f32, .max_context = 512, .kv_pages = 8, .state_slots = 2, .smem_limit = act_f32 ? 0 : 232448};
    if (mk_model_read(path, &m, &err) || mk_model_resolve(m, NULL, mode, &err) || mk_plan_make(m, &pc, &plan, &err)) fail_msg("%s: %s", family, err.msg);
    mk_program *p = pb_copy(plan->prog);
    mk_plan_destroy(&plan);
    mk_model_destroy(&m);
    return p;
}

static void accepted(void **state)
{
    (void)state;
    static const char *const family[] = {"llama", "qwen3_next", "qwen3_5_moe", "qwen3_5"};
    static const uint32_t workers[] = {1, 2, 3, 7, 8, 13, 33, 132};
    for (size_t f = 0; f < sizeof family / sizeof *family; f++)
        for (size_t w = 0; w < sizeof workers / sizeof *workers; w++)
            for (int k = 0; k < 4 && (workers[w] <= 64 || f == 0 || f == 3); k++) { /* 2 experts of 32 rows: at most 64 */
                mk_program *p = planned(family[f], workers[w], k & 1, k & 2 ? MK_WEIGHTS_FP8 : MK_WEIGHTS_BF16);
                mk_err err = {0};
                if (mk_validate(p, NULL, &err)) fail_msg("%s at %u workers: %s", family[f], workers[w], err.msg);
                mk_program_destroy(&p);
            }
}

static int wrong;
static void refuses(mk_program *p, int line, const char *where, const char *why)
{
    mk_err err = {0};
    int rc = mk_validate(p, NULL, &err);
    if (rc != MK_E_PROGRAM || !strstr(err.msg, why) || !strstr(err.msg, where) || strchr(err.msg, '\n')) {
        print_error("line %d: code %d, expected \"%s\" at \"%s\", found: %s\n", line, rc, why, where, err.msg);
        wrong++;
    }
    mk_program_destroy(&p);
}

#define BREAK(family, edit, where, why)                                                                                \
    do {                                                                                                               \
        mk_program *p = planned(family, 4, 0, MK_WEIGHTS_FP8);                                                         \
        edit;                                                                                                          \
        refuses(p, __LINE__, where, why);                                                                              \
    } while (0)
#define IN(worker, OP, n) pb_find(p, worker, MK_OP_##OP, n)

/* The n-th GEMV of a worker with this epilogue. */
static mk_insn *gemv(mk_program *p, uint32_t worker, uint32_t epilogue)
{
    for (uint32_t n = 0;; n++) {
        mk_insn *in = IN(worker, GEMV, n);
        if (in->gemv.epilogue == epilogue) return in;
    }
}

static void refused(void **state)
{
    (void)state;
    BREAK("qwen3_next", IN(2, GQA_APPEND, 0)->gqa.head = 5, "GQA_APPEND", "KV head 5 of 2");
    BREAK("qwen3_next", (IN(2, GQA_APPEND, 0)->gqa.head = 1, IN(2, GQA_APPEND, 0)->wait[0] = IN(3, GQA_APPEND, 0)->wait[0]), "GQA_APPEND", "KV head 1 of 2 is another instruction's as well");
    BREAK("qwen3_next", IN(3, GQA_APPEND, 0)->gqa.k_off = 0, "GQA_APPEND", "reads k");
    BREAK("qwen3_next", IN(3, GQA_APPEND, 0)->gqa.v_off += 600, "GQA_APPEND", "reads v");
    BREAK("qwen3_next", IN(2, GQA_APPEND, 0)->gqa.kv_off = 64, "GQA_APPEND", "cache pool at 64");
    BREAK("qwen3_next", IN(2, GQA_APPEND, 0)->gqa.param_off = 0x7fffffff, "GQA_APPEND", "head norm and rotation");
    BREAK("qwen3_next", IN(2, GQA_APPEND, 0)->gqa.eps = 0, "GQA_APPEND", "eps");
    BREAK("qwen3_next", IN(2, GQA_APPEND, 0)->gqa.pad[0] = 1, "GQA_APPEND", "reserved");
    BREAK("qwen3_next", IN(2, GQA_APPEND, 0)->gqa.grain = 1, "GQA_APPEND", "reserved");
    BREAK("qwen3_next", IN(1, GQA_PARTIAL, 0)->gqa.grain = 5, "GQA_PARTIAL", "splits of 1 << 5 pages");
    BREAK("qwen3_next", IN(1, GQA_PARTIAL, 0)->gqa.most = MK_MAX_SPLITS + 1, "GQA_PARTIAL", "at most 67 of them");
    BREAK("qwen3_next", IN(1, GQA_PARTIAL, 0)->gqa.most -= 1, "GQA_PARTIAL", "another cache, shape, scale or input");
    BREAK("qwen3_next", IN(1, COMBINE, 0)->mla.grain ^= 1, "COMBINE", "for another cache or shape");
    BREAK("qwen3_next", IN(1, COMBINE, 0)->mla.most -= 1, "COMBINE", "for another cache or shape");
    BREAK("qwen3_next", IN(2, GQA_APPEND, 0)->signal_vec = MK_NONE, "GQA_APPEND", "publishes nothing");
    BREAK("qwen3_next", p->info.kv_page_bytes -= 64, "GQA", "a page of 64 tokens needs");
    BREAK("qwen3_next", IN(1, GQA_PARTIAL, 0)->gqa.heads = 3, "GQA_PARTIAL", "3 heads on 2 KV heads");
    BREAK("qwen3_next", IN(1, GQA_PARTIAL, 0)->gqa.kv_heads = 0, "GQA_PARTIAL", "on 0 KV heads");
    BREAK("qwen3_next", IN(1, GQA_PARTIAL, 0)->gqa.dim = 12, "GQA_PARTIAL", "dim 12");
    BREAK("qwen3_next", IN(1, GQA_PARTIAL, 0)->gqa.rope = 7, "GQA_PARTIAL", "rope 7");
    BREAK("qwen3_next", IN(1, GQA_PARTIAL, 0)->gqa.norm = 2, "GQA_PARTIAL", "norm 2");
    BREAK("qwen3_next", IN(1, GQA_PARTIAL, 0)->gqa.scale = 0, "GQA_PARTIAL", "softmax scale");
    BREAK("qwen3_next", IN(1, GQA_PARTIAL, 0)->gqa.part = 4, "GQA_PARTIAL", "part 4 of 4");
    BREAK("qwen3_next", IN(1, GQA_PARTIAL, 0)->gqa.part = 0, "GQA_PARTIAL", "part 0 of 4 is another instruction's as well");
    BREAK("qwen3_next", IN(1, GQA_PARTIAL, 0)->gqa.q_stride = 4096, "GQA_PARTIAL", "q of the last head");
    BREAK("qwen3_next", IN(1, GQA_PARTIAL, 0)->gqa.q_off += 8, "GQA_PARTIAL", "another cache, shape, scale or input");
    BREAK("qwen3_next", IN(1, GQA_PARTIAL, 0)->gqa.scale *= 2, "GQA_PARTIAL", "another cache, shape, scale or input");
    BREAK("qwen3_next", IN(0, GQA_PARTIAL, 0)->gqa.rope = 32, "GQA_PARTIAL", "does not append to the pool");
    BREAK("llama", IN(0, GQA_PARTIAL, 1)->wait[1].pub = 0, "GQA_PARTIAL", "does not append to the pool");
    BREAK("llama", IN(2, GQA_APPEND, 1)->gqa.kv_off = 0, "GQA_APPEND", "cache pool");
    BREAK("llama", IN(0, COMBINE, 1)->mla.kv_off = 0, "COMBINE", "for another cache or shape");
    BREAK("llama", IN(0, COMBINE, 0)->mla.latent = 32, "COMBINE", "latent values");
    BREAK("qwen3_next", IN(0, COMBINE, 0)->mla.gate = 2, "COMBINE", "gate is 2, expected 0 or 1");
    BREAK("qwen3_next", IN(0, COMBINE, 0)->mla.gate = 0, "COMBINE", "2 waits, expected 1");
    BREAK("qwen3_next", IN(0, COMBINE, 0)->mla.in_off += 4096, "COMBINE", "reads the gate");
    BREAK("qwen3_next", IN(0, DELTA_STEP, 0)->delta.gate = 2, "DELTA_STEP", "gate 2");
    BREAK("qwen3_next", gemv(p, 0, MK_EPI_STORE)->gemv.gate_off = 1, "GEMV", "gate_off is 1 without a gate");
    BREAK("qwen3_next", gemv(p, 0, MK_EPI_GATED)->gemv.gate_off = 1, "GEMV", "reads the gate");
    BREAK("qwen3_next", gemv(p, 0, MK_EPI_GATED)->gemv.epilogue = MK_EPI_ADD, "GEMV", "3 waits, expected 2");
    BREAK("qwen3_next", gemv(p, 0, MK_EPI_STORE)->gemv.epilogue = 4, "GEMV", "not legal");
    assert_int_equal(wrong, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(accepted),
        cmocka_unit_test(refused),
    };
    return cmocka_run_group_tests_name("validator: grouped-query attention", tests, NULL, NULL);
}
