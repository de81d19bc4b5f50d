/* Which layout of the kernel a program gets (megakernel/laid.h). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "host/planner.h"
#include "host/preset.h"
#include "megakernel/laid.h"

#include <stdio.h>
#include <string.h>

/* Takes the model. */
static void expect(const char *what, mk_model *m, enum mk_weights_mode weights, uint32_t workers, const char *laid)
{
    mk_plan *plan = NULL;
    mk_err err = {0};
    const mk_plan_config c = {.workers = workers, .max_context = 2048, .kv_pages = 32, .state_slots = 1};
    if (mk_model_resolve(m, NULL, weights, &err) || mk_plan_make(m, &c, &plan, &err)) fail_msg("%s: %s", what, err.msg);
    const char *found = mk_laid_name(mk_laid_for(plan->prog));
    if (strcmp(found, laid)) fail_msg("%s, %u workers: expected the kernel laid for %s, found %s", what, workers, laid, found);
    mk_plan_destroy(&plan);
    mk_model_destroy(&m);
}

static void a_preset(const char *name, uint32_t workers, const char *laid)
{
    const mk_preset *p = mk_preset_find(name);
    mk_model *m = NULL;
    mk_err err = {0};
    assert_non_null(p);
    if (mk_preset_model(p, &m, &err)) fail_msg("%s: %s", name, err.msg);
    expect(name, m, p->weights, workers, laid);
}

static void a_config(const char *path, uint32_t workers, const char *laid)
{
    mk_model *m = NULL;
    mk_err err = {0};
    if (mk_model_read(path, &m, &err)) fail_msg("%s: %s", path, err.msg);
    expect(path, m, MK_WEIGHTS_AUTO, workers, laid);
}

static void presets_have_their_own(void **state)
{
    (void)state;
    char names[512], *save = NULL;
    snprintf(names, sizeof names, "%s", mk_preset_names());
    for (char *n = strtok_r(names, ", ", &save); n; n = strtok_r(NULL, ", ", &save)) a_preset(n, 132, strcmp(n, "glm52-mla-8") ? n : "glm52-mla"); /* its first layers */
    a_preset("kimi-linear-48b", 8, "kimi-linear-48b");
}

static void others_by_what_they_are(void **state)
{
    (void)state;
#define PUBLISHED(name) "tests/fixtures/configs/" name "/config.json"
    a_config(PUBLISHED("qwen3-next-80b-a3b"), 132, "qwen3-coder-next-80b");
    a_config(PUBLISHED("qwen3.5-35b-a3b"), 132, "qwen3.6-35b-a3b");
    a_config(PUBLISHED("llama-3.1-8b"), 132, "llama-3.2-1b");
    a_config(PUBLISHED("deepseek-v3"), 132, "all models");  /* as many experts as kimi, but no DELTA_STEP */
    a_config(PUBLISHED("qwen3.5-4b"), 132, "all models");   /* DELTA_STEP without experts */
#define TINY(name) "tests/oracle/" name "/config.json"
    a_config(TINY("llama"), 8, "llama-3.2-1b");
    static const char *const few_experts[] = {TINY("kimi_linear"), TINY("moonlight"), TINY("glm4_moe_lite"), TINY("deepseek_v3"), TINY("qwen3_next"), TINY("qwen3_5_moe")};
    for (size_t i = 0; i < sizeof few_experts / sizeof *few_experts; i++) a_config(few_experts[i], 8, "all models");
}

/* The build makes a kernel for each of its models: those that the table knows, by the same names. */
static void layout_txt_has_the_same_models(void **state)
{
    (void)state;
    static const char begin[] = "# Models, from bit 0 on:";
    char line[4096], models[1024];
    int n = snprintf(models, sizeof models, "%s", begin), lines = 0;
#define X(symbol, name, ...) n += snprintf(models + n, sizeof models - (size_t)n, " %s", name);
    MK_LAID(X)
#undef X
    FILE *f = fopen("megakernel/layout.txt", "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) {
        if (strncmp(line, begin, sizeof begin - 1)) continue;
        line[strcspn(line, "\n")] = 0;
        assert_string_equal(line, models);
        lines++;
    }
    fclose(f);
    assert_int_equal(lines, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(presets_have_their_own), cmocka_unit_test(others_by_what_they_are), cmocka_unit_test(layout_txt_has_the_same_models)};
    return cmocka_run_group_tests_name("laid", tests, NULL, NULL);
}
