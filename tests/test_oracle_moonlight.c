/* mkd against Hugging Face transformers: deepseek_v3 as in Moonlight, without q_lora, YaRN and groups (tests/oracle). The tiny checkpoint
 * does not renormalise. */
#include "tests/support/mla_edits.h"

static void other_spelling(void **state)
{
    (void)state;
    mk_oracle_other_rope("tests/oracle/moonlight", "{\"rope_type\":\"default\",\"rope_theta\":50000.0}");
}

int main(void)
{
    static const mk_oracle_control controls[] = {
        {.name = "nothing wrong", .right = 1, .as = MK_ST_BF16},
        {.name = "rope on halves", .edit = mk_rope_on_halves, .as = MK_ST_BF16},
        {.name = "rope theta 10000", .field = {{"rope_theta", "10000.0"}}, .as = MK_ST_BF16},
        {.name = "kv_a norm with eps 1e-3", .edit = mk_kv_norm_eps, .as = MK_ST_BF16},
        {.name = "renormalised", .field = {{"norm_topk_prob", "true"}}, .as = MK_ST_BF16},
        {.name = "router bias dropped", .edit = mk_drop_router_bias, .as = MK_ST_BF16},
        {.name = "shared experts dropped", .edit = mk_drop_shared_experts, .as = MK_ST_BF16},
    };
    return mk_oracle_main("moonlight", controls, sizeof controls / sizeof *controls, other_spelling);
}
