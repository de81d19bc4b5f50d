/* Presets: published configurations that are built into mkd, for measuring full-size models with synthetic weights (mkd --preset NAME, mkctl synth NAME). The
 * files are those of tests/fixtures/configs. */
#ifndef MK_PRESET_H
#define MK_PRESET_H

#include <stddef.h>
#include <stdint.h>

#include "host/model.h"

typedef struct mk_preset {
    const char *name;                     /* "kimi-linear-48b" */
    const unsigned char *config, *end;    /* its config.json */
    uint32_t layers;                      /* only so many of them, the first; 0: all */
    int mixers_only;                      /* the layers' attention alone, without their FFNs */
    enum mk_weights_mode weights;         /* what is published or planned for one GPU: most FP8, small models BF16 */
} mk_preset;

/* NULL: unknown. */
const mk_preset *mk_preset_find(const char *name);
/* "a, b, c" of all names, for messages. */
const char *mk_preset_names(void);
/* Reads the model; err as mk_model_read. */
int mk_preset_model(const mk_preset *p, mk_model **m, mk_err *err);

#endif
