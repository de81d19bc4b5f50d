/* The small checkpoint that writes English, against its float32 reference (tests/english/reference.json, made by check.py): bits per byte
 * of held-out text window by window, and 64 greedy bytes. */
#include "tests/support/rig.h"
#include "tests/support/sanitized.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DIR     "tests/english"
#define BEGIN   256u
#define WINDOW  1024u
#define WINDOWS (ONE_OF_EACH ? 1 : 5) /* of 91: `mkctl score` does the whole text */
#define HEADS   (ONE_OF_EACH ? 1 : 2) /* the oracles have the other one as well */

static json_t *reference(void)
{
    json_error_t e;
    json_t *r = json_load_file(DIR "/reference.json", 0, &e);
    if (!r) fail_msg("reference.json:%d: %s", e.line, e.text);
    return r;
}

static void score_with(enum mk_lm_head_mode head)
{
    json_t *ref = reference(), *per = json_object_get(ref, "bits_per_window");
    static uint8_t text[WINDOWS * (WINDOW - 1)];
    FILE *f = fopen(DIR "/heldout.txt", "rb");
    assert_non_null(f);
    assert_int_equal(fread(text, 1, sizeof text, f), sizeof text);
    fclose(f);
    mk_session *s = rig_open(&(mk_session_config){.dir = DIR "/checkpoint", .lm_head = head});
    double bits = 0, want = 0;
    for (uint32_t w = 0; w < WINDOWS; w++) {
        uint32_t ids[WINDOW] = {BEGIN};
        for (uint32_t i = 1; i < WINDOW; i++) ids[i] = text[w * (WINDOW - 1) + i - 1];
        double one = 0;
        mk_session_clear(s);
        mk_session_stream(s, 0, NULL, 0);
        mk_session_append(s, 0, ids, WINDOW, MK_APPEND_LOGPROBS);
        rig_run(s);
        for (uint32_t i = 0; i < WINDOW - 1; i++) {
            const mk_event *e = mk_session_event(s, 0, MK_EV_LOGPROB, i);
            assert_non_null(e);
            assert_int_equal(e->position, i + 1);
            one -= (double)e->logprob / log(2);
        }
        double r = json_real_value(json_array_get(per, w));
        print_message("window %u: %.1f bits, reference %.1f\n", w, one, r);
        assert_true(fabs(one - r) / (WINDOW - 1) <= 0.02);
        bits += one;
        want += r;
    }
    double n = WINDOWS * (WINDOW - 1);
    print_message("%.4f bits per byte%s, reference %.4f\n", bits / n, head == MK_LM_HEAD_FP8 ? " with the LM head in FP8" : "", want / n);
    assert_int_equal(s->model->lm_head.wtype == MK_W_FP8, head == MK_LM_HEAD_FP8);
    assert_true(fabs(bits - want) / n <= 0.005); /* errors of windows do not add up */
    assert_true(json_real_value(json_object_get(ref, "bits_per_byte")) <= 2.2);
    mk_session_close(&s);
    json_decref(ref);
}

static void score(void **state)
{
    (void)state;
    score_with(MK_LM_HEAD_AUTO);
}

static void score_fp8_head(void **state)
{
    (void)state;
    score_with(MK_LM_HEAD_FP8);
}

static void golden(void **state)
{
    (void)state;
    json_t *ref = reference(), *g = json_object_get(ref, "golden");
    json_t *prompt = json_object_get(g, "prompt_tokens"), *greedy = json_object_get(g, "greedy"), *margin = json_object_get(g, "margin");
    uint32_t ids[256], n = (uint32_t)json_array_size(prompt), m = (uint32_t)json_array_size(greedy);
    assert_true(n > 0 && n <= 256);
    assert_int_equal(m, 64);
    for (uint32_t i = 0; i < n; i++) ids[i] = (uint32_t)json_integer_value(json_array_get(prompt, i));
    for (int f32 = 0; f32 < 2; f32++) {
        mk_session *s = rig_open(&(mk_session_config){.dir = DIR "/checkpoint", .act_f32 = f32});
        mk_session_stream(s, 0, NULL, 0);
        mk_session_append(s, 0, ids, n, 0);
        mk_session_generate(s, 0, m);
        rig_run(s);
        uint32_t equal = 0;
        while (equal < m) {
            const mk_event *e = mk_session_event(s, 0, MK_EV_TOKEN, equal);
            assert_non_null(e);
            if (e->token != (uint32_t)json_integer_value(json_array_get(greedy, equal))) break;
            equal++;
        }
        print_message("%s: %u of %u greedy bytes equal\n", f32 ? "act=f32" : "default precision", equal, m);
        if (equal < m) assert_true(!f32 && json_real_value(json_array_get(margin, equal)) < 0.02);
        mk_session_close(&s);
    }
    json_decref(ref);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(golden), cmocka_unit_test(score), cmocka_unit_test(score_fp8_head)};
    return _cmocka_run_group_tests("english", tests, 1 + HEADS, NULL, NULL);
}
