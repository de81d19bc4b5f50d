/* Flags of mkctl's commands, and the small things that they share. */
#include "ipc/mkctl.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const struct mk_command *mkctl_running;

int mkctl_usage(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fputs("mkctl: ", stderr);
    vfprintf(stderr, fmt, ap);
    fputc('\n', stderr);
    va_end(ap);
    return MK_E_USAGE;
}

int mkctl_failed(const char *command, const mk_err *err)
{
    fprintf(stderr, "mkctl %s: %s\n", command, err->msg);
    return err->code;
}

const char *mkctl_default_dir(void)
{
    static char dir[4096];
    const char *run = getenv("XDG_RUNTIME_DIR");
    if (run && run[0] == '/' && strlen(run) < sizeof dir - 8)
        snprintf(dir, sizeof dir, "%.4087s/mkd", run);
    else
        strcpy(dir, "/run/mkd");
    return dir;
}

/* Decimal digits only: strtoull alone takes signs, blanks and wraps. */
static int number(const char *text, uint64_t most, uint64_t *value)
{
    char *end;
    if (text[0] < '0' || text[0] > '9') return 0;
    errno = 0;
    *value = strtoull(text, &end, 10);
    return !errno && !*end && *value <= most;
}

static void print_default(const mkctl_flag *f)
{
    switch (f->kind) {
    case MKCTL_SET: break;
    case MKCTL_TEXT:
        if (*(const char **)f->to) printf(" [%s]", *(const char **)f->to);
        break;
    case MKCTL_CHOICE: printf(" [%s]", ((const mkctl_choice *)f->to)->name[((const mkctl_choice *)f->to)->value]); break;
    case MKCTL_U32:
        if (*(uint32_t *)f->to != UINT32_MAX) printf(" [%u]", *(uint32_t *)f->to); /* nothing given */
        break;
    case MKCTL_U64: printf(" [%llu]", (unsigned long long)*(uint64_t *)f->to); break;
    case MKCTL_REAL: printf(" [%g]", *(double *)f->to); break;
    }
}

static void print_help(const char *command, const mkctl_flag *flag, size_t n)
{
    static const char *const value[] = {"", " TEXT", " TEXT", " N", " N", " X"};
    printf("mkctl %s%s%s\n", command, mkctl_running ? mkctl_running->args : "", n ? " [FLAGS]" : "");
    for (size_t i = 0; i < n; i++) {
        int used = printf("  %s%s", flag[i].name, value[flag[i].kind]);
        printf("%*s%s", used < 24 ? 24 - used : 1, "", flag[i].help);
        print_default(&flag[i]);
        putchar('\n');
    }
}

static int choose(const char *command, const char *flag, mkctl_choice *c, const char *value)
{
    char known[64] = "";
    for (uint32_t i = 0; i < 4 && c->name[i]; i++) {
        if (!strcmp(c->name[i], value)) {
            c->value = i;
            return 0;
        }
        const int last = i == 3 || !c->name[i + 1];
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", !i ? "" : last ? " or " : ", ", c->name[i]);
    }
    return mkctl_usage("%s: %s: expected %s, found \"%s\"", command, flag, known, value);
}

static int store(const char *command, const mkctl_flag *f, const char *value)
{
    uint64_t u = 0;
    char *end;
    switch (f->kind) {
    case MKCTL_SET: *(int *)f->to = 1; return 0;
    case MKCTL_TEXT: *(const char **)f->to = value; return 0;
    case MKCTL_CHOICE: return choose(command, f->name, f->to, value);
    case MKCTL_U32:
    case MKCTL_U64:
        if (!number(value, f->kind == MKCTL_U32 ? UINT32_MAX : UINT64_MAX, &u))
            return mkctl_usage("%s: %s: expected a whole number, at most %llu, found \"%s\"", command, f->name, f->kind == MKCTL_U32 ? UINT32_MAX + 0ull : UINT64_MAX + 0ull, value);
        if (f->kind == MKCTL_U32)
            *(uint32_t *)f->to = (uint32_t)u;
        else
            *(uint64_t *)f->to = u;
        return 0;
    case MKCTL_REAL: {
        double x = strtod(value, &end);
        if (end == value || *end || !isfinite(x)) return mkctl_usage("%s: %s: expected a number, found \"%s\"", command, f->name, value);
        *(double *)f->to = x;
        return 0;
    }
    }
    return MK_E_BUG;
}

int mkctl_flags(int argc, char **argv, const mkctl_flag *flag, size_t n_flag, const char **rest, size_t most, size_t *n)
{
    const char *command = argv[0];
    if (n) *n = 0;
    size_t count = 0;
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i];
        if (!strcmp(a, "--help") || !strcmp(a, "-h")) {
            print_help(command, flag, n_flag);
            return -1;
        }
        if (a[0] != '-') {
            if (count == most) return mkctl_usage("%s: unexpected argument \"%s\"", command, a);
            rest[count++] = a;
            continue;
        }
        const char *eq = strchr(a, '=');
        size_t len = eq ? (size_t)(eq - a) : strlen(a);
        const mkctl_flag *f = NULL;
        for (size_t k = 0; k < n_flag && !f; k++)
            if (strlen(flag[k].name) == len && !memcmp(flag[k].name, a, len)) f = &flag[k];
        if (!f) return mkctl_usage("%s: unknown flag %.*s (mkctl %s --help lists them)", command, (int)len, a, command);
        const char *value = eq ? eq + 1 : NULL;
        if (f->kind == MKCTL_SET && value) return mkctl_usage("%s: %s takes no value", command, f->name);
        if (f->kind != MKCTL_SET && !value) {
            if (++i == argc) return mkctl_usage("%s: %s needs a value", command, f->name);
            value = argv[i];
            if (!strncmp(value, "--", 2)) return mkctl_usage("%s: %s: expected a value, found the flag %s (%s=%s if it is meant)", command, f->name, value, f->name, value);
        }
        int rc = store(command, f, value);
        if (rc) return rc;
    }
    if (n) *n = count;
    return 0;
}

int mkctl_parse_ids(const char *text, uint32_t **ids, uint32_t *n, mk_err *err)
{
    size_t most = 1;
    for (const char *p = text; *p; p++) most += *p == ',' || *p == ' ';
    uint32_t *out = malloc(most * sizeof *out);
    char *copy = strdup(text), *save = NULL;
    int rc = MK_OK;
    uint32_t k = 0;
    if (!out || !copy) rc = mk_fail(err, MK_E_SYSTEM, "out of memory");
    for (char *p = copy ? strtok_r(copy, ", ", &save) : NULL; p && !rc; p = strtok_r(NULL, ", ", &save)) {
        uint64_t u;
        if (!number(p, UINT32_MAX, &u))
            rc = mk_fail(err, MK_E_USAGE, "expected whole numbers like 1,2,3, found \"%s\"", p);
        else
            out[k++] = (uint32_t)u;
    }
    free(copy);
    if (rc) {
        free(out);
        return rc;
    }
    *ids = out;
    *n = k;
    return MK_OK;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double mkctl_quantile(double *values, size_t n, double q)
{
    if (!n) return NAN;
    qsort(values, n, sizeof *values, ascending);
    size_t rank = (size_t)ceil(q * (double)n);
    return values[rank ? rank - 1 : 0];
}
