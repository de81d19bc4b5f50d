/* mkctl: one binary, one file a command (mkctl_<command>.c), one line each in the table of mkctl.c. */
#ifndef MK_MKCTL_H
#define MK_MKCTL_H

#include "host/err.h"

#include <stddef.h>
#include <stdint.h>

struct mk_program;
struct mk_validation;

/* fn gets the arguments from the command's name on (argv[0] is the name) and returns the exit code: enum mk_code. */
struct mk_command {
    const char *name, *args, *help; /* args: what it takes besides flags, "" or with a blank in front */
    int (*fn)(int argc, char **argv);
};
extern const struct mk_command *mkctl_running; /* set by main; --help prints its args. NULL: a test calls the command itself */

int mkctl_generate(int argc, char **argv);
int mkctl_bench(int argc, char **argv);
int mkctl_synth(int argc, char **argv);
int mkctl_score(int argc, char **argv);
int mkctl_stats(int argc, char **argv);
int mkctl_ping(int argc, char **argv);
int mkctl_trace(int argc, char **argv);
int mkctl_inject(int argc, char **argv);
int mkctl_plan(int argc, char **argv);
int mkctl_validate(int argc, char **argv);
int mkctl_diff(int argc, char **argv);

/* ---- flags (mkctl_flags.c) ------------------------------------------------------------------------------------------- */

enum mkctl_kind {
    MKCTL_SET,  /* no value; *(int *)to = 1 */
    MKCTL_TEXT, /* *(const char **)to */
    MKCTL_CHOICE, /* *(mkctl_choice *)to */
    MKCTL_U32,  /* *(uint32_t *)to, decimal */
    MKCTL_U64,  /* *(uint64_t *)to, decimal */
    MKCTL_REAL, /* *(double *)to, finite */
};

/* One of up to four names, in the order of an enum's values from 0 on. */
typedef struct mkctl_choice {
    const char *name[4]; /* NULL: no more */
    uint32_t value;      /* the default, then what was chosen */
} mkctl_choice;

/* --weights, --lm-head and --kv-cache as mkd takes them (host/model.h, instructions/isa.h). */
#define MKCTL_WEIGHTS  {{[MK_WEIGHTS_AUTO] = "auto", [MK_WEIGHTS_FP8] = "fp8", [MK_WEIGHTS_BF16] = "bf16"}, MK_WEIGHTS_AUTO}
#define MKCTL_LM_HEAD  {{[MK_LM_HEAD_AUTO] = "auto", [MK_LM_HEAD_FP8] = "fp8", [MK_LM_HEAD_BF16] = "bf16"}, MK_LM_HEAD_AUTO}
#define MKCTL_KV_CACHE {{[MK_CACHE_ACT] = "bf16", [MK_CACHE_FP8] = "fp8"}, MK_CACHE_ACT}

typedef struct mkctl_flag {
    const char *name; /* "--max-new" */
    enum mkctl_kind kind;
    void *to; /* holds the default, which --help prints */
    const char *help;
} mkctl_flag;

/* Reads `--flag value`, `--flag=value` and up to `most` other arguments into rest[] (*n of them). Returns 0; -1 when --help was asked for
 * and printed (exit with 0); or MK_E_USAGE after a line on stderr that names the flag, what was found and what is expected. */
int mkctl_flags(int argc, char **argv, const mkctl_flag *flag, size_t n_flag, const char **rest, size_t most, size_t *n);

/* "1,2,3" -> a malloc()ed array. MK_E_USAGE names what is no number. */
int mkctl_parse_ids(const char *text, uint32_t **ids, uint32_t *n, mk_err *err);

/* How long a prompt of n tokens is waited for, in milliseconds: ten minutes, and as long as it takes at ten tokens a second. */
static inline int mkctl_prompt_ms(uint32_t n)
{
    return 600000 + 100 * (int)(n < 10000000 ? n : 10000000);
}

/* What `plan` and `validate` both say of a program that was proven (mkctl_validate.c). */
void mkctl_print_validation(const struct mk_program *p, const struct mk_validation *v);

/* Prints "mkctl: <message>" to stderr and returns MK_E_USAGE. */
int mkctl_usage(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Prints "mkctl <command>: <err's message>" to stderr and returns err's code. */
int mkctl_failed(const char *command, const mk_err *err);

/* $XDG_RUNTIME_DIR/mkd, or /run/mkd: where mkd is when nobody says otherwise. */
const char *mkctl_default_dir(void);

/* ---- figures (mkctl_flags.c) ----------------------------------------------------------------------------------------- */

/* The q-quantile (0..1) of n values, nearest rank; sorts them. NaN when n is 0. */
double mkctl_quantile(double *values, size_t n, double q);

#endif
