/* mkd against Hugging Face transformers: qwen3_5, dense and tied (tests/oracle). */
#include "tests/support/gqa_edits.h"

int main(void)
{
    return mk_oracle_main("qwen3_5", mk_qwen_controls, mk_qwen_controls_dense, NULL);
}
