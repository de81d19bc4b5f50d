/* Where the threads of DELTA_STEP find their values in a step of one row (megakernel/tables.cuh): of every preset that has any, of the opcode cases, and of vectors cut at random, against the
 * vectors' slices. */
#include "tests/lanes/cuda.h"

#include <setjmp.h>
#include <stdarg.h>
extern "C" {
#include "host/planner.h"
#include "host/preset.h"
#include "tests/gpu/opcodes.h"
#include <cmocka.h>
}
#include "megakernel/tables.cuh"

static void test_presets(void **state)
{
    (void)state;
    const char *const names[] = {"kimi-linear-48b", "qwen3-coder-next-80b", "qwen3.6-35b-a3b"};
    for (const char *name : names) {
        const mk_preset *preset = mk_preset_find(name);
        mk_model *model = NULL;
        mk_plan *plan = NULL;
        mk_err err = {};
        mk_plan_config config = {};
        config.workers = 132, config.max_context = 4096, config.kv_pages = 64, config.state_slots = 1, config.smem_limit = 155000;
        assert_int_equal(mk_preset_model(preset, &model, &err), MK_OK);
        assert_int_equal(mk_model_resolve(model, NULL, preset->weights, &err), MK_OK);
        assert_int_equal(mk_plan_make(model, &config, &plan, &err), MK_OK);
        mk_table *delta = NULL;
        uint32_t n = 0;
        assert_int_equal(deltas_wanted(plan->prog, &delta, &n, &err), MK_OK);
        assert_int_equal(n, 128); /* one a worker, for all layers */
        for (uint32_t k = 0; k < n; k++) {
            mk_delta_places places;
            assert_true(delta_table(plan->prog, &plan->prog->insn[delta[k].insn], &places));
        }
        free(delta);
        mk_plan_destroy(&plan);
        mk_model_destroy(&model);
    }
}

/* Those that are to go the way of several rows say so, and the others do not go it unawares. */
static void test_opcode_cases(void **state)
{
    (void)state;
    uint32_t words = 0, none = 0;
    for (const case_spec *s = state_cases; s->op; s++) {
        mk_case *c = case_new(s->workers ? s->workers : 3, 1);
        s->make(c, s->arg);
        uint32_t had = 0;
        for (uint32_t k = 0; k < c->prog.info.n_insn; k++) {
            mk_delta_places places;
            had += delta_table(&c->prog, &c->prog.insn[k], &places) != 0;
        }
        if (strstr(s->name, "wide slices"))
            none += had < c->prog.info.n_insn;
        else if (had != c->prog.info.n_insn)
            fail_msg("%s: %u of %u instructions can say where their values are", s->name, had, c->prog.info.n_insn);
        words += had;
        case_free(c);
    }
    assert_true(words > 20 && none == 2);
}

/* A vector of 700 values or a few more, in slices of `least` to `most`; its starts are behind the ones before. */
static uint32_t cut(mk_vec *v, uint32_t *starts, uint32_t *n, uint32_t least, uint32_t most)
{
    *v = mk_vec{};
    v->scope = MK_PACKET, v->dtype = MK_BF16, v->slice_packets = (uint16_t)((most + 5) / 6), v->start_index = *n;
    uint32_t at = 0;
    for (; at < 700; v->nslice++) {
        starts[(*n)++] = at;
        at += least + (uint32_t)rand() % (most - least + 1);
    }
    starts[(*n)++] = at;
    v->width = at;
    return at;
}
/* Every value of 64 in a row from `first` on, by the word of the first: as they lie, or the word does not say so. */
static uint32_t said(const mk_program *p, const mk_insn *in, uint32_t k, uint32_t first)
{
    uint32_t right = 0, found, word, none;
    assert_true(delta_find(p, in, k, first, &found, &word));
    if (word == 0xffffffffu) return 0;
    for (uint32_t i = 0; i < 64; i++) {
        uint32_t s = 0;
        const mk_vec *v = &p->vec[in->wait[k].vec];
        const uint32_t *start = mk_vec_starts(p, v);
        while (start[s + 1] <= first + i) s++;
        const uint32_t at = first + i - start[s], packet = (s - in->wait[k].slice0) * v->slice_packets + at / 6;
        assert_true(delta_find(p, in, k, first + i, &found, &none));
        assert_int_equal(found, packet * 8 + at % 6);
        right += mk_delta_found(word, i, v->slice_packets) == found;
    }
    return right;
}
static void test_cuts(void **state)
{
    (void)state;
    srand(1);
    for (uint32_t turn = 0; turn < 2000; turn++) {
        static uint32_t starts[2048];
        mk_vec v;
        mk_program p = {};
        mk_insn in = {};
        uint32_t n = 0;
        const uint32_t least = 1 + (uint32_t)rand() % 127, most = least + (uint32_t)rand() % (128 - least + 1), all = cut(&v, starts, &n, least, most);
        p.vec = &v, p.start = starts, p.info.n_vec = 1;
        in.wait[0].slice0 = (uint16_t)((uint32_t)rand() % 3 % v.nslice);
        in.wait[0].nslice = (uint16_t)(v.nslice - in.wait[0].slice0);
        const uint32_t from = starts[in.wait[0].slice0];
        if (all < from + 65) continue;
        const uint32_t right = said(&p, &in, 0, from + (uint32_t)rand() % (all - from - 64));
        if (least > 31) assert_int_equal(right, 64); /* three slices at most */
        uint32_t found, word;
        assert_false(delta_find(&p, &in, 0, all, &found, &word));
        if (from) assert_false(delta_find(&p, &in, 0, from - 1, &found, &word));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_presets), cmocka_unit_test(test_opcode_cases), cmocka_unit_test(test_cuts)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
