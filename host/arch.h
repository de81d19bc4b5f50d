/* What the architecture files share: the table of architectures, and a reader of config.json that knows which fields it has seen.
 *
 * Errors stick: after the first one, every reader returns its lower limit (or 0) and leaves the message alone, so that an architecture
 * file reads all its fields and looks at cfg.rc once. A name may hold several spellings, "a|b": the first is the published one; two
 * that are present and disagree are refused. Reading a field takes it out of the object; mk_cfg_done refuses what is left. */
#ifndef MK_ARCH_H
#define MK_ARCH_H

#include <jansson.h>

#include "host/model.h"

typedef struct mk_cfg {
    json_t *obj;       /* our own copy: fields are taken out as they are read */
    char where[256];   /* "config.json", for messages; no ':' after it */
    char path[64];     /* "linear_attn_config." inside an object */
    char found[64];    /* the spelling of the field read last */
    mk_err *err;
    int rc;
} mk_cfg;

/* A regular file of at most 64 MB that holds one JSON object without duplicate keys. The caller owns *root. */
int mk_json_read(const char *path, json_t **root, mk_err *err);

int mk_cfg_fail(mk_cfg *c, const char *names, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Takes the field out; NULL when absent or null. Owned by the caller. */
json_t *mk_cfg_take(mk_cfg *c, const char *names);

uint32_t mk_cfg_int(mk_cfg *c, const char *names, uint32_t lo, uint32_t hi);
uint32_t mk_cfg_int_or(mk_cfg *c, const char *names, uint32_t lo, uint32_t hi, uint32_t absent);
double mk_cfg_num(mk_cfg *c, const char *names, double lo, double hi);
double mk_cfg_num_or(mk_cfg *c, const char *names, double lo, double hi, double absent);
int mk_cfg_bool_or(mk_cfg *c, const char *names, int absent);
/* A list of n integers in lo..hi into v[max]; 0 when absent. */
uint32_t mk_cfg_ints(mk_cfg *c, const char *names, uint32_t lo, uint32_t hi, uint32_t *v, uint32_t max);
/* A list of exactly n strings, each "yes" or "no": v[i] = 1 or 0. Returns 0 when absent. */
int mk_cfg_choices(mk_cfg *c, const char *names, const char *yes, const char *no, uint8_t *v, uint32_t n);
/* If present, the field must have one of these JSON values, "false" or "\"silu\"|\"swish\"": anything else is refused. */
void mk_cfg_expect(mk_cfg *c, const char *names, const char *values);
/* Fields that do not change the result. Every spelling is a field of its own here. */
void mk_cfg_ignore(mk_cfg *c, const char *names);
/* Takes an object out for reading with the same functions, then mk_cfg_done. Returns 0 when absent or null: there is then nothing
 * to read or to end. */
int mk_cfg_object(mk_cfg *c, const char *name, mk_cfg *sub);
/* Refuses fields that nobody read, frees the copy, hands an error on to `parent` (may be NULL). */
int mk_cfg_done(mk_cfg *c, mk_cfg *parent);

/* Fills a matrix that is a tensor of its own; the tensor's name is printed from fmt, which ends without ".weight". */
void mk_mat_plain(mk_mat *m, uint32_t n, uint32_t k, int keep_bf16, const char *fmt, ...) __attribute__((format(printf, 5, 6)));
void mk_par_set(mk_par *p, uint32_t n, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Spellings of tensor names: where a tensor is not there, `from` in its name is replaced by `to`. */
typedef struct mk_alias {
    const char *from, *to;
} mk_alias;

typedef struct mk_arch {
    const char *name;       /* architectures[0] */
    const char *model_type; /* must agree */
    /* Fills hidden .. skipped of a zeroed model whose `arch` is set; reads the fields that mk_model_read has not taken. */
    int (*read)(mk_cfg *c, mk_model *m, mk_err *err);
    const mk_alias *alias; /* ends with {NULL, NULL} */
} mk_arch;

extern const mk_arch mk_arch_kimi_linear;

#endif
