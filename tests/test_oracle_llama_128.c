/* mkd against Hugging Face transformers: llama with heads of 128 and a head of its own, as in Llama-3.1-8B (tests/oracle). */
#include "tests/support/gqa_edits.h"

enum { DIM = 128 };

static void interleave(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    if (mk_edit_has(t, ".q_proj.weight") || mk_edit_has(t, ".k_proj.weight")) mk_edit_interleave(t, DIM, DIM);
}
static void swap_kv(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    if (mk_edit_has(t, ".k_proj.weight") || mk_edit_has(t, ".v_proj.weight")) mk_edit_roll(t, DIM);
}
static void roll_head(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    if (mk_edit_has(t, "lm_head.weight")) mk_edit_roll(t, 1);
}

int main(void)
{
    static const mk_oracle_control controls[] = {
        {.name = "nothing wrong", .right = 1, .as = MK_ST_BF16},
        {.name = "llama3 scaling missing", .field = {{"rope_scaling", NULL}}, .as = MK_ST_BF16},
        {.name = "the factor of Llama-3.2", .field = {{"rope_scaling.factor", "32"}}, .as = MK_ST_BF16},
        {.name = "rope interleaved", .edit = interleave, .as = MK_ST_BF16},
        {.name = "KV heads swapped", .edit = swap_kv, .as = MK_ST_BF16},
        {.name = "rows of the head shifted", .edit = roll_head, .as = MK_ST_BF16},
        {.name = "norms with eps 1e-5", .field = {{"rms_norm_eps", "1e-5"}}, .as = MK_ST_BF16},
    };
    return mk_oracle_main("llama_128", controls, sizeof controls / sizeof *controls, NULL);
}
