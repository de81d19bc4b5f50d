/* mkd against Hugging Face transformers: kimi_linear (tests/oracle, tests/support/oracle.h). */
#include "tests/support/oracle.h"

static void drop_nope_slice(void *arg, mk_edit_tensor *t) /* k_pe out of the scores */
{
    (void)arg;
    if (mk_edit_has(t, "kv_a_proj_with_mqa.weight")) mk_edit_fill(t, 512 * t->shape[1], 64 * t->shape[1], 0);
}
static void skip_decay(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    if (mk_edit_has(t, "A_log")) mk_edit_fill(t, 0, mk_edit_size(t), -60);
}
static void reverse_conv(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    if (!mk_edit_has(t, "_conv1d")) return;
    for (uint64_t i = 0; i < mk_edit_size(t); i += 4)
        for (int k = 0; k < 2; k++) {
            float a = t->v[i + k];
            t->v[i + k] = t->v[i + 3 - k];
            t->v[i + 3 - k] = a;
        }
    t->changed = 1;
}

int main(void)
{
    static const mk_oracle_control controls[] = {
        {.name = "nothing wrong", .right = 1, .as = MK_ST_BF16},
        {.name = "NoPE slice dropped", .edit = drop_nope_slice, .as = MK_ST_BF16},
        {.name = "router bias dropped", .edit = mk_drop_router_bias, .as = MK_ST_BF16},
        {.name = "decay skipped", .edit = skip_decay, .as = MK_ST_BF16},
        {.name = "convolution taps reversed", .edit = reverse_conv, .as = MK_ST_BF16},
        {.name = "wrong norm eps", .field = {{"rms_norm_eps", "1e-5"}}, .as = MK_ST_BF16},
        {.name = "shared expert dropped", .edit = mk_drop_shared_experts, .as = MK_ST_BF16},
    };
    return mk_oracle_main("kimi_linear", controls, sizeof controls / sizeof *controls, NULL);
}
