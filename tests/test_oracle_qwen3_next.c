/* mkd against Hugging Face transformers: qwen3_next, grouped projections and a tensor an expert (tests/oracle). */
#include "tests/support/gqa_edits.h"

int main(void)
{
    return mk_oracle_main("qwen3_next", mk_qwen_controls, mk_qwen_controls_n, NULL);
}
