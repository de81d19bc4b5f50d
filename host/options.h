/* Flags and the configuration file of mkd. One table (options.c) describes every option; --help, the file's parser and --print-config
 * are made from it. */
#ifndef MK_OPTIONS_H
#define MK_OPTIONS_H

#include <limits.h>
#include <stdint.h>
#include <stdio.h>

#include "host/err.h"

enum mk_device_choice { MK_DEVICE_AUTO = 0, MK_DEVICE_CPU, MK_DEVICE_GPU };
enum mk_options_mode { MK_MODE_RUN = 0, MK_MODE_CHECK, MK_MODE_PRINT_CONFIG, MK_MODE_VERSION, MK_MODE_HELP };

typedef struct mk_options {
    enum mk_options_mode mode;
    char config[PATH_MAX]; /* "" : none */
    char model[PATH_MAX];
    char socket_dir[PATH_MAX];
    char flight_dir[PATH_MAX]; /* "": socket_dir */
    uint32_t workers, streams, context;
    uint64_t kv_tokens, memory;
    uint32_t weights; /* enum mk_weights_mode */
    uint32_t lm_head; /* enum mk_lm_head_mode */
    uint32_t kv_cache; /* enum mk_cache */
    uint32_t act;     /* 1: f32 */
    uint32_t device;  /* enum mk_device_choice */
    uint32_t synthetic; /* 1: random weights */
    char preset[PATH_MAX]; /* "": none; else a name that mk_preset_find knows: synthetic, bench and weights follow from it */
    uint32_t bench;     /* 1: serve pinned streams */
    uint32_t unloaded;  /* 1: weights are not streamed */
    uint32_t self_test; /* 1: the GPU's opcodes before serving */
    uint32_t log_level;
    uint32_t log_time;
    double drain_seconds;
    char source[26][48]; /* where each option of the table was set: "default", "flag", "FILE:LINE", or "--OPTION" that implies it */
} mk_options;

/* Defaults, then the file that --config names, then the flags. MK_E_USAGE names the flag, or file and line, what was found and what is
 * expected. With --help or --version nothing after
 * them is looked at. */
int mk_options_parse(mk_options *o, int argc, char **argv, mk_err *err);

/* The effective configuration, in a form that --config reads back. */
void mk_options_print(const mk_options *o, FILE *f);
void mk_options_help(FILE *f);

#endif
