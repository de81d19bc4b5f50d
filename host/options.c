#include "host/options.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "host/log.h"
#include "host/model.h"
#include "host/preset.h"

enum opt_type { OPT_PATH, OPT_U32, OPT_COUNT64, OPT_BYTES, OPT_CHOICE, OPT_SECONDS, OPT_MODE, OPT_FILE };

typedef struct opt_choice {
    const char *name;
    uint32_t value;
} opt_choice;

typedef struct opt {
    const char *name, *arg;
    enum opt_type type;
    size_t offset;
    const char *dflt; /* as it would stand in the file; NULL: computed, see defaults() */
    double min, max;
    opt_choice choice[5];
    const char *help;
} opt;

#define AT(field) offsetof(mk_options, field)

/* Every option there is. OPT_MODE and OPT_FILE are flags only; the others are also keys of the file. At most 24 of those. */
static const opt table[] = {
    {"model", "DIR", OPT_PATH, AT(model), "", 0, 0, {{0}}, "checkpoint directory (config.json, *.safetensors); required"},
    {"socket-dir", "DIR", OPT_PATH, AT(socket_dir), NULL, 0, 0, {{0}},
     "directory of req.sock and stats.sock; default $XDG_RUNTIME_DIR/mkd, or /run/mkd"},
    {"workers", "N", OPT_U32, AT(workers), "0", 0, 1024, {{0}}, "virtual workers of the CPU twin; 0: 8 (a GPU has as many as it has SMs)"},
    {"streams", "N", OPT_U32, AT(streams), "8", 1, 1024, {{0}}, "stream slots"},
    {"context", "N", OPT_U32, AT(context), "0", 0, 1u << 30, {{0}},
     "most tokens a stream may hold; 0: the model's limit or what fits"},
    {"kv-tokens", "N", OPT_COUNT64, AT(kv_tokens), "0", 0, 1e15, {{0}},
     "tokens that the cache pages of all streams hold together; 0: streams x context"},
    {"memory", "BYTES", OPT_BYTES, AT(memory), "0", 0, 1e18, {{0}}, "most memory to use, e.g. 8G; 0: what the machine has free"},
    {"weights", "KIND", OPT_CHOICE, AT(weights), "auto", 0, 0,
     {{"auto", MK_WEIGHTS_AUTO}, {"fp8", MK_WEIGHTS_FP8}, {"bf16", MK_WEIGHTS_BF16}},
     "weights in memory: auto (as stored), fp8 (BF16 becomes FP8 blocks), bf16"},
    {"lm-head", "KIND", OPT_CHOICE, AT(lm_head), "auto", 0, 0,
     {{"auto", MK_LM_HEAD_AUTO}, {"fp8", MK_LM_HEAD_FP8}, {"bf16", MK_LM_HEAD_BF16}},
     "the LM head in memory: auto (bf16, unless stored quantised), fp8, bf16"},
    {"kv-cache", "KIND", OPT_CHOICE, AT(kv_cache), "bf16", 0, 0, {{"bf16", MK_CACHE_ACT}, {"fp8", MK_CACHE_FP8}},
     "the cache of latent attention: bf16 (f32 with --act f32), or fp8 with a scale for every 128 values: 656 bytes a token and layer for 1,152"},
    {"act", "KIND", OPT_CHOICE, AT(act), "bf16", 0, 0, {{"bf16", 0}, {"f32", 1}},
     "activations between instructions: bf16, or f32 (CPU twin only: to compare with a reference)"},
    {"device", "KIND", OPT_CHOICE, AT(device), "auto", 0, 0,
     {{"auto", MK_DEVICE_AUTO}, {"cpu", MK_DEVICE_CPU}, {"gpu", MK_DEVICE_GPU}}, "auto (a GPU if one can be used, else the CPU twin), cpu, gpu"},
    {"synthetic", "yes|no", OPT_CHOICE, AT(synthetic), "no", 0, 0, {{"no", 0}, {"yes", 1}},
     "random weights made on the GPU, to measure a full-size model: --model may then be a config.json alone"},
    {"preset", "NAME", OPT_PATH, AT(preset), "", 0, 0, {{0}},
     "instead of --model: a published configuration with synthetic weights, e.g. kimi-linear-48b (mkctl synth --help lists them); implies --bench yes"},
    {"bench", "yes|no", OPT_CHOICE, AT(bench), "no", 0, 0, {{"no", 0}, {"yes", 1}},
     "serve pinned streams (mkctl bench --ctx), which read cache pages that they never wrote"},
    {"unloaded", "yes|no", OPT_CHOICE, AT(unloaded), "no", 0, 0, {{"no", 0}, {"yes", 1}},
     "with synthetic weights: what goes through the ring is not read from memory but stays small random values, to measure what a step takes beside that; implies --self-test no"},
    {"self-test", "yes|no", OPT_CHOICE, AT(self_test), "yes", 0, 0, {{"no", 0}, {"yes", 1}},
     "GPU: run every opcode at the model's shapes against a plain kernel before clients can connect; a difference is fatal"},
    {"flight-dir", "DIR", OPT_PATH, AT(flight_dir), "", 0, 0, {{0}},
     "where mkd-flight-<time>.json is written when the GPU's kernel hangs; default: the socket directory"},
    {"log-level", "LEVEL", OPT_CHOICE, AT(log_level), "info", 0, 0,
     {{"error", MK_LOG_ERROR}, {"warn", MK_LOG_WARN}, {"info", MK_LOG_INFO}, {"debug", MK_LOG_DEBUG}}, "error, warn, info, debug"},
    {"log-time", "yes|no", OPT_CHOICE, AT(log_time), "no", 0, 0, {{"no", 0}, {"yes", 1}}, "put the local time in front of log lines"},
    {"drain-seconds", "S", OPT_SECONDS, AT(drain_seconds), "30", 0, 86400, {{0}},
     "after SIGTERM or SIGINT, let running requests finish for so long"},
    {"config", "FILE", OPT_FILE, AT(config), "", 0, 0, {{0}}, "read `key = value` lines, keys as the flags above; flags win"},
    {"print-config", NULL, OPT_MODE, MK_MODE_PRINT_CONFIG, NULL, 0, 0, {{0}}, "print the effective configuration and exit"},
    {"check", NULL, OPT_MODE, MK_MODE_CHECK, NULL, 0, 0, {{0}}, "read, plan, validate and load the model, then exit"},
    {"version", NULL, OPT_MODE, MK_MODE_VERSION, NULL, 0, 0, {{0}}, "print version and commit"},
    {"help", NULL, OPT_MODE, MK_MODE_HELP, NULL, 0, 0, {{0}}, "this text"},
};
enum { N_OPT = sizeof table / sizeof table[0] };
_Static_assert(N_OPT <= 5 + sizeof((mk_options *)0)->source / sizeof((mk_options *)0)->source[0], "source[] covers the keys");

static const opt *find(const char *name, size_t n)
{
    for (int i = 0; i < N_OPT; i++)
        if (strlen(table[i].name) == n && memcmp(table[i].name, name, n) == 0) return &table[i];
    return NULL;
}

static void expected_choices(const opt *d, char *buf, size_t size)
{
    size_t n = 0;
    buf[0] = 0;
    for (int i = 0; i < 5 && d->choice[i].name; i++)
        n += (size_t)snprintf(buf + n, size - n, "%s%s", i ? ", " : "", d->choice[i].name);
}

/* Digits only: strtoull would take signs and blanks. */
static int parse_u64(const char *v, const char **end, uint64_t *x)
{
    if (!isdigit((unsigned char)*v)) return 0;
    char *e;
    errno = 0;
    *x = strtoull(v, &e, 10);
    *end = e;
    return errno == 0;
}

/* Sets one option from text. `where` goes in front of the message: "--streams" or "FILE:LINE: streams". */
static int set(mk_options *o, const opt *d, const char *v, const char *where, mk_err *err)
{
    char *base = (char *)o + d->offset;
    const char *end;
    uint64_t x;
    char list[128];
    switch (d->type) {
    case OPT_PATH:
    case OPT_FILE:
        if (!v[0]) return mk_fail(err, MK_E_USAGE, "%s: expected a path, found nothing", where);
        if (strlen(v) >= PATH_MAX) return mk_fail(err, MK_E_USAGE, "%s: the path is longer than %d bytes", where, PATH_MAX - 1);
        strcpy(base, v);
        return MK_OK;
    case OPT_U32:
    case OPT_COUNT64:
    case OPT_BYTES:
        if (!parse_u64(v, &end, &x))
            return mk_fail(err, MK_E_USAGE, "%s: expected a number, found \"%.80s\"", where, v);
        if (d->type == OPT_BYTES && *end) {
            static const char unit[] = "KMGT";
            const char *u = strchr(unit, toupper((unsigned char)*end));
            int shift = u ? 10 * (int)(u - unit + 1) : 0;
            end += u != NULL;
            if (u && (*end == 'B' || *end == 'b')) end++;
            if (x > UINT64_MAX >> shift) x = UINT64_MAX >> shift;
            x <<= shift;
        }
        if (*end)
            return mk_fail(err, MK_E_USAGE, "%s: expected a number%s, found \"%.80s\"", where,
                           d->type == OPT_BYTES ? " with K, M, G or T behind it" : "", v);
        if ((double)x < d->min || (double)x > d->max)
            return mk_fail(err, MK_E_USAGE, "%s: expected %.0f to %.0f, found %.80s", where, d->min, d->max, v);
        if (d->type == OPT_U32)
            *(uint32_t *)(void *)base = (uint32_t)x;
        else
            *(uint64_t *)(void *)base = x;
        return MK_OK;
    case OPT_SECONDS: {
        char *e;
        double s = strtod(v, &e);
        if (e == v || *e || !isfinite(s) || s < d->min || s > d->max)
            return mk_fail(err, MK_E_USAGE, "%s: expected seconds, %.0f to %.0f, found \"%.80s\"", where, d->min, d->max, v);
        *(double *)(void *)base = s;
        return MK_OK;
    }
    case OPT_CHOICE:
        for (int i = 0; i < 5 && d->choice[i].name; i++)
            if (strcmp(d->choice[i].name, v) == 0) {
                *(uint32_t *)(void *)base = d->choice[i].value;
                return MK_OK;
            }
        expected_choices(d, list, sizeof list);
        return mk_fail(err, MK_E_USAGE, "%s: expected one of %s, found \"%.80s\"", where, list, v);
    case OPT_MODE:
        o->mode = (enum mk_options_mode)d->offset;
        return MK_OK;
    }
    return MK_E_BUG;
}

static int defaults(mk_options *o, mk_err *err)
{
    memset(o, 0, sizeof *o);
    const char *run = getenv("XDG_RUNTIME_DIR");
    if (run && run[0] == '/' && strlen(run) < sizeof o->socket_dir - 8)
        snprintf(o->socket_dir, sizeof o->socket_dir, "%.*s/mkd", (int)sizeof o->socket_dir - 8, run);
    else
        strcpy(o->socket_dir, "/run/mkd");
    for (int i = 0; i < N_OPT; i++) {
        if (table[i].type == OPT_MODE || table[i].type == OPT_FILE) continue;
        strcpy(o->source[i], "default");
        if (table[i].dflt && table[i].dflt[0] && set(o, &table[i], table[i].dflt, table[i].name, err)) return MK_E_BUG;
    }
    return MK_OK;
}

static char *trim(char *s)
{
    while (isspace((unsigned char)*s)) s++;
    char *e = s + strlen(s);
    while (e > s && isspace((unsigned char)e[-1])) e--;
    *e = 0;
    return s;
}

static int read_file(mk_options *o, const char *path, mk_err *err)
{
    FILE *f = fopen(path, "r");
    if (!f) return mk_fail(err, MK_E_USAGE, "cannot read the configuration file %.300s: %s", path, strerror(errno));
    char *line = NULL;
    size_t cap = 0;
    ssize_t len;
    int number = 0, rc = MK_OK;
    int set_at[N_OPT] = {0};
    while (rc == MK_OK && (len = getline(&line, &cap, f)) >= 0) {
        number++;
        char at[320], where[400];
        snprintf(at, sizeof at, "%.300s:%d", path, number);
        if (strlen(line) != (size_t)len) {
            rc = mk_fail(err, MK_E_USAGE, "%s: a NUL byte: is this a text file?", at);
            break;
        }
        char *key = trim(line);
        if (!key[0] || key[0] == '#') continue;
        char *eq = strchr(key, '=');
        if (!eq) {
            rc = mk_fail(err, MK_E_USAGE, "%s: expected `key = value`, found \"%.80s\"", at, key);
            break;
        }
        *eq = 0;
        char *value = trim(eq + 1);
        key = trim(key);
        const opt *d = find(key, strlen(key));
        if (!d) {
            rc = mk_fail(err, MK_E_USAGE, "%s: unknown key \"%.80s\" (mkd --help lists them)", at, key);
        } else if (d->type == OPT_MODE || d->type == OPT_FILE) {
            rc = mk_fail(err, MK_E_USAGE, "%s: %s is a flag, not a key of the file", at, d->name);
        } else if (set_at[d - table]) {
            rc = mk_fail(err, MK_E_USAGE, "%s: %s was set in line %d already", at, d->name, set_at[d - table]);
        } else {
            snprintf(where, sizeof where, "%s: %s", at, d->name);
            rc = set(o, d, value, where, err);
            set_at[d - table] = number;
            const char *base = strrchr(path, '/');
            snprintf(o->source[d - table], sizeof o->source[0], "%.32s:%d", base ? base + 1 : path, number);
        }
    }
    if (rc == MK_OK && ferror(f)) rc = mk_fail(err, MK_E_USAGE, "cannot read the configuration file %.300s: %s", path, strerror(errno));
    free(line);
    fclose(f);
    return rc;
}

/* One pass over the flags. The first takes the actions and --config, the second (after the file was read) everything else. */
static int read_flags(mk_options *o, int argc, char **argv, bool first, mk_err *err)
{
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i];
        if (strncmp(a, "--", 2) != 0 || !a[2])
            return mk_fail(err, MK_E_USAGE, "unexpected argument \"%.120s\" (mkd --help lists the flags)", a);
        const char *name = a + 2, *eq = strchr(name, '=');
        const opt *d = find(name, eq ? (size_t)(eq - name) : strlen(name));
        if (!d) return mk_fail(err, MK_E_USAGE, "unknown flag \"%.120s\" (mkd --help lists them)", a);
        char where[64];
        snprintf(where, sizeof where, "--%s", d->name);
        const char *value = NULL;
        if (d->type == OPT_MODE) {
            if (eq) return mk_fail(err, MK_E_USAGE, "%s takes no value", where);
        } else if (eq) {
            value = eq + 1;
        } else if (i + 1 < argc) {
            value = argv[++i];
        } else {
            return mk_fail(err, MK_E_USAGE, "%s: expected %s behind it, found nothing", where, d->arg);
        }
        bool early = d->type == OPT_FILE || d->type == OPT_MODE;
        if (early != first) continue;
        if (d->type == OPT_MODE && o->mode != MK_MODE_RUN && o->mode != (enum mk_options_mode)d->offset &&
            d->offset != MK_MODE_HELP && d->offset != MK_MODE_VERSION)
            return mk_fail(err, MK_E_USAGE, "%s cannot be used together with another action", where);
        int rc = set(o, d, value, where, err);
        if (rc) return rc;
        if (o->mode == MK_MODE_HELP || o->mode == MK_MODE_VERSION) return MK_OK;
        if (!early) strcpy(o->source[d - table], "flag");
    }
    return MK_OK;
}

/* Option `by` makes `is` of option `name`, which must not have been given another value, unless any is the same to it. */
static int implied(mk_options *o, const char *name, const char *by, uint32_t *value, uint32_t is, bool any, mk_err *err)
{
    char *source = o->source[find(name, strlen(name)) - table];
    if (*value == is) return MK_OK;
    if (!any && strcmp(source, "default")) return mk_fail(err, MK_E_USAGE, "%s (%s): --%s implies the other value", name, source, by);
    *value = is;
    snprintf(source, sizeof o->source[0], "--%s", by);
    return MK_OK;
}

int mk_options_parse(mk_options *o, int argc, char **argv, mk_err *err)
{
    int rc = defaults(o, err);
    if (rc == MK_OK) rc = read_flags(o, argc, argv, true, err);
    if (rc || o->mode == MK_MODE_HELP || o->mode == MK_MODE_VERSION) return rc;
    if (o->config[0]) rc = read_file(o, o->config, err);
    if (rc == MK_OK) rc = read_flags(o, argc, argv, false, err);
    if (rc) return rc;
    const mk_preset *preset = o->preset[0] ? mk_preset_find(o->preset) : NULL;
    if (o->preset[0]) {
        if (!preset) return mk_fail(err, MK_E_USAGE, "--preset: no preset \"%.80s\", there are %s", o->preset, mk_preset_names());
        if (o->model[0]) return mk_fail(err, MK_E_USAGE, "--preset and --model exclude each other");
        if (o->weights == MK_WEIGHTS_AUTO) implied(o, "weights", "preset", &o->weights, preset->weights, true, err);
        if ((rc = implied(o, "synthetic", "preset", &o->synthetic, 1, false, err)) || (rc = implied(o, "bench", "preset", &o->bench, 1, false, err))) return rc;
    }
    if (o->unloaded && !o->synthetic) return mk_fail(err, MK_E_USAGE, "--unloaded yes: expected --preset or --synthetic yes, for what it computes means nothing");
    if (o->unloaded && (rc = implied(o, "self-test", "unloaded", &o->self_test, 0, false, err))) return rc;
    if (!o->model[0] && !preset && o->mode != MK_MODE_PRINT_CONFIG)
        return mk_fail(err, MK_E_USAGE, "no model: --model DIR names a checkpoint directory (mkd --help)");
    if (o->device == MK_DEVICE_GPU && o->act)
        return mk_fail(err, MK_E_USAGE, "--act f32 is for the CPU twin: it does not go with --device gpu");
    if (o->device == MK_DEVICE_GPU && o->workers)
        return mk_fail(err, MK_E_USAGE, "--workers is for the CPU twin: it does not go with --device gpu");
    return MK_OK;
}

static void value_text(const mk_options *o, const opt *d, char *buf, size_t size)
{
    const char *base = (const char *)o + d->offset;
    switch (d->type) {
    case OPT_U32: snprintf(buf, size, "%u", *(const uint32_t *)(const void *)base); break;
    case OPT_COUNT64:
    case OPT_BYTES: snprintf(buf, size, "%llu", (unsigned long long)*(const uint64_t *)(const void *)base); break;
    case OPT_SECONDS: snprintf(buf, size, "%.15g", *(const double *)(const void *)base); break;
    case OPT_CHOICE:
        for (int i = 0; i < 5 && d->choice[i].name; i++)
            if (d->choice[i].value == *(const uint32_t *)(const void *)base) snprintf(buf, size, "%s", d->choice[i].name);
        break;
    default: snprintf(buf, size, "%s", base);
    }
}

void mk_options_print(const mk_options *o, FILE *f)
{
    for (int i = 0; i < N_OPT; i++) {
        const opt *d = &table[i];
        if (d->type == OPT_MODE || d->type == OPT_FILE) continue;
        char v[PATH_MAX] = "";
        value_text(o, d, v, sizeof v);
        if (v[0])
            fprintf(f, "# %s\n%s = %s\n", o->source[i], d->name, v);
        else
            fprintf(f, "# not set\n# %s =\n", d->name);
    }
}

void mk_options_help(FILE *f)
{
    fprintf(f, "mkd --model DIR [flags]: a daemon that decodes one language model; clients reach it over ZeroMQ (mkctl, ipc/client.h)\n\n");
    for (int i = 0; i < N_OPT; i++) {
        const opt *d = &table[i];
        char flag[64];
        snprintf(flag, sizeof flag, "--%s%s%s", d->name, d->arg ? " " : "", d->arg ? d->arg : "");
        fprintf(f, "  %-22s %s", flag, d->help);
        if (d->dflt && d->dflt[0]) fprintf(f, " (%s)", d->dflt);
        fputc('\n', f);
    }
    fprintf(f, "\nSIGTERM or SIGINT drains; a second one cancels what still runs; a third exits at once.\n"
               "Exit codes: 0 stopped in order, 2 bad flag or configuration, 3 checkpoint refused, 4 program refused, 5 does not fit,\n"
               "6 the operating system said no, 7 another daemon runs here, 9 device, 10 drain limit reached, 70 a bug in mkd.\n");
}
