/* The comparison behind mkctl diff and test_opcodes, without a GPU: the twin against itself on the cases of tests/gpu/opcodes_*.c agrees, and every negative control is
 * found. The sanitizers' build of this walks all opcodes over poisoned memory. */
#include "tests/gpu/opcodes.h"
#include "tests/support/sanitized.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <cmocka.h>

static int named(const case_spec *s, const char *const *name)
{
    while (*name && !strstr(s->name, *name)) name++;
    return *name != NULL;
}
static int big(const case_spec *s) /* too much here, and for the sanitizers */
{
    static const char *const here[] = {"256 experts, k", "512 experts, k", "64 experts, k", "to 5000", "to 4096", "to 4095", "to 1100", "163,840", NULL};
    static const char *const sanitized[] = {"32 heads, 512 + 64, to 9000", "to 8000", "few splits, to 9000", "a run of rows to 9000", "to 4200", "129,280", NULL};
    return named(s, here) || (ONE_OF_EACH && named(s, sanitized));
}

static void test_agrees(void **state)
{
    (void)state;
    uint32_t n = 0;
    for (const case_spec *s = case_next(NULL); s; s = case_next(s)) {
        static case_result r;
        if (big(s)) continue;
        case_run(s, 1 + n++, 1, NULL, &r);
        if (r.bad || r.skip || !r.cmp.values[case_opcode(s)]) fail_msg("%s %s: %s", s->op, s->name, r.text);
    }
    print_message("%u cases\n", n);
    assert_true(n > 60);
}

static void test_found(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < n_case_wrongs; i++) {
        static case_result r;
        const case_wrong *w = &case_wrongs[i];
        const case_spec *of = case_named(w->op, w->of);
        if (!of) fail_msg("%s, %s: there is no case \"%s\"", w->op, w->name, w->of);
        if (big(of)) continue;
        case_run(of, i, 1, w, &r);
        if (!r.cmp.failed || !r.cmp.first.found) fail_msg("%s, %s: not found", w->op, w->name);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_agrees), cmocka_unit_test(test_found)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
