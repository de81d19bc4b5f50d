/* mkd against Hugging Face transformers: glm4_moe_lite, whose heads straddle the FP8 blocks of kv_b_proj (tests/oracle). */
#include "tests/support/mla_edits.h"

static void swap_scale_rows(void *arg, mk_edit_tensor *t) /* blocks 1 and 2 of kv_b: value rows of head 0 */
{
    (void)arg;
    if (!mk_edit_has(t, "kv_b_proj.weight_scale_inv")) return;
    for (uint64_t j = 0, n = t->shape[1]; j < n; j++) {
        float a = t->v[n + j];
        t->v[n + j] = t->v[2 * n + j];
        t->v[2 * n + j] = a;
    }
    t->changed = 1;
}

static void other_spelling(void **state)
{
    (void)state;
    mk_oracle_other_rope("tests/oracle/glm4_moe_lite", "{\"type\":\"default\",\"rope_theta\":1000000,\"partial_rotary_factor\":1.0}");
}

int main(void)
{
    static const mk_oracle_control controls[] = {
        {.name = "nothing wrong", .right = 1, .as = MK_ST_BF16},
        {.name = "nothing wrong, FP8 kept", .right = 1, .as = MK_ST_F8_E4M3},
        {.name = "scales of the next block", .edit = swap_scale_rows, .as = MK_ST_F8_E4M3},
        {.name = "rope on halves", .edit = mk_rope_on_halves, .as = MK_ST_BF16},
        {.name = "rotated part dropped", .edit = mk_drop_rope, .as = MK_ST_BF16},
        {.name = "q_a norm with eps 1e-3", .edit = mk_q_norm_eps, .as = MK_ST_BF16},
        {.name = "kv_a norm with eps 1e-3", .edit = mk_kv_norm_eps, .as = MK_ST_BF16},
        {.name = "layer norms with eps 1e-6", .field = {{"rms_norm_eps", "1e-6"}}, .as = MK_ST_BF16},
        {.name = "router bias dropped", .edit = mk_drop_router_bias, .as = MK_ST_BF16},
        {.name = "shared expert dropped", .edit = mk_drop_shared_experts, .as = MK_ST_BF16},
    };
    return mk_oracle_main("glm4_moe_lite", controls, sizeof controls / sizeof *controls, other_spelling);
}
