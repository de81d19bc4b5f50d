/* The kernel is there several times: laid for all models that megakernel/layout.txt knows, and for each of them alone (megakernel/layout.py, Makefile). Which one suits a program. What it
 * computes does not depend on it: layout.py proves that they differ in nothing but places. */
#ifndef MK_LAID_H
#define MK_LAID_H

#ifdef __cplusplus
extern "C" {
#endif
#include "instructions/program.h"

/* X(symbol, model, MLA_PARTIAL, GQA_PARTIAL, DELTA_STEP, its low rank, experts, experts of a token): layout.txt's models, in its order, and what their programs are made of. The last two
 * are ROUTE's, 0 without one. */
#define MK_LAID(X)                                                                                                     \
    X(kimi_linear_48b, "kimi-linear-48b", 1, 0, 1, 1, 256, 8)                                                          \
    X(moonlight_16b, "moonlight-16b", 1, 0, 0, 0, 64, 6)                                                               \
    X(glm_4_7_flash, "glm-4.7-flash", 1, 0, 0, 0, 64, 4)                                                               \
    X(qwen3_coder_next_80b, "qwen3-coder-next-80b", 0, 1, 1, 0, 512, 10)                                               \
    X(qwen3_6_35b_a3b, "qwen3.6-35b-a3b", 0, 1, 1, 0, 256, 8)                                                          \
    X(llama_3_2_1b, "llama-3.2-1b", 0, 1, 0, 0, 0, 0)                                                                  \
    X(glm52_mla, "glm52-mla", 1, 0, 0, 0, 0, 0)

enum mk_laid {
    MK_LAID_FOR_ALL = 0,
#define X(symbol, ...) MK_LAID_FOR_##symbol,
    MK_LAID(X)
#undef X
    MK_LAID_KERNELS /* so many there are */
};

/* By what the program is made of, not by a name: a model of the same kinds of layers and experts gets the same kernel, one that is like none gets that for all. */
enum mk_laid mk_laid_for(const mk_program *p);
const char *mk_laid_name(enum mk_laid laid); /* "kimi-linear-48b", "all models" */

#ifdef __cplusplus
}
#endif

#endif
