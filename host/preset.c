#include "host/preset.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* X(symbol, name, directory under tests/fixtures/configs, first layers, mixers only, weights) */
#define PRESETS(X)                                                                                                     \
    X(kimi_linear, "kimi-linear-48b", "kimi-linear-48b-a3b", 0, 0, MK_WEIGHTS_FP8)                                     \
    X(qwen3_coder_next, "qwen3-coder-next-80b", "qwen3-coder-next-fp8", 0, 0, MK_WEIGHTS_FP8)                          \
    X(qwen3_6, "qwen3.6-35b-a3b", "qwen3.6-35b-a3b-fp8", 0, 0, MK_WEIGHTS_FP8)                                         \
    X(glm_4_7, "glm-4.7-flash", "glm-4.7-flash", 0, 0, MK_WEIGHTS_FP8)                                                 \
    X(moonlight, "moonlight-16b", "moonlight-16b-a3b", 0, 0, MK_WEIGHTS_FP8)                                           \
    X(llama, "llama-3.2-1b", "llama-3.2-1b", 0, 0, MK_WEIGHTS_BF16)                                                    \
    X(glm52_mla, "glm52-mla", "glm-5.2-mla", 0, 1, MK_WEIGHTS_FP8)                                                     \
    X(glm52_mla_8, "glm52-mla-8", "glm-5.2-mla", 8, 1, MK_WEIGHTS_FP8)

/* The assembler reads the files; paths are relative to the repository root, where make runs. */
#define X(symbol, name, dir, layers, mixers, weights)                                                                                  \
    __asm__(".pushsection .rodata\n"                                                                                   \
            ".globl mk_preset_" #symbol "\nmk_preset_" #symbol ":\n.incbin \"tests/fixtures/configs/" dir "/config.json\"\n" \
            ".globl mk_preset_" #symbol "_end\nmk_preset_" #symbol "_end:\n.byte 0\n.popsection\n");                   \
    extern const unsigned char mk_preset_##symbol[], mk_preset_##symbol##_end[];
PRESETS(X)
#undef X

static const mk_preset presets[] = {
#define X(symbol, name, dir, layers, mixers, weights) {name, mk_preset_##symbol, mk_preset_##symbol##_end, layers, mixers, weights},
    PRESETS(X)
#undef X
};

const mk_preset *mk_preset_find(const char *name)
{
    for (size_t i = 0; i < sizeof presets / sizeof *presets; i++)
        if (strcmp(presets[i].name, name) == 0) return &presets[i];
    return NULL;
}

const char *mk_preset_names(void)
{
#define X(symbol, name, dir, layers, mixers, weights) name ", "
    static const char all[] = PRESETS(X);
#undef X
    static char names[sizeof all];
    snprintf(names, sizeof names, "%.*s", (int)sizeof all - 3, all); /* without the last comma */
    return names;
}

/* The reader of config.json takes a path: an anonymous file has one. */
int mk_preset_model(const mk_preset *p, mk_model **m, mk_err *err)
{
    char path[64];
    size_t size = (size_t)(p->end - p->config);
    *m = NULL;
    int fd = memfd_create(p->name, MFD_CLOEXEC);
    if (fd < 0) return mk_fail(err, MK_E_SYSTEM, "preset %s: %s", p->name, strerror(errno));
    int rc = write(fd, p->config, size) == (ssize_t)size ? MK_OK : mk_fail(err, MK_E_SYSTEM, "preset %s: %s", p->name, strerror(errno));
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (!rc) rc = mk_model_read(path, m, err);
    close(fd);
    if (!rc && p->layers) mk_model_keep(*m, p->layers);
    for (uint32_t l = 0; !rc && p->mixers_only && l < (*m)->layers; l++) (*m)->layer[l].ffn = MK_FFN_NONE;
    return rc;
}
