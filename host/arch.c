/* Reading config.json: see host/arch.h. */
#include "host/arch.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_JSON (64u << 20)

static int read_all(const char *path, char **text, size_t *size, mk_err *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* O_NONBLOCK: a FIFO must not hang us */
    if (fd < 0) return mk_fail(err, MK_E_MODEL, "%s: cannot open: %s", path, strerror(errno));
    struct stat st;
    int rc = MK_OK;
    size_t n = 0;
    *text = NULL;
    if (fstat(fd, &st) || !S_ISREG(st.st_mode))
        rc = mk_fail(err, MK_E_MODEL, "%s: not a regular file", path);
    else if (st.st_size > (off_t)MAX_JSON)
        rc = mk_fail(err, MK_E_MODEL, "%s: %lld bytes, expected at most %u", path, (long long)st.st_size, MAX_JSON);
    else if (!(*text = malloc((size_t)st.st_size + 1)))
        rc = mk_fail(err, MK_E_SYSTEM, "%s: out of memory", path);
    while (!rc && n < (size_t)st.st_size) {
        ssize_t got = read(fd, *text + n, (size_t)st.st_size - n);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0)
            rc = mk_fail(err, MK_E_SYSTEM, "%s: read: %s", path, got < 0 ? strerror(errno) : "the file became shorter");
        else
            n += (size_t)got;
    }
    close(fd);
    *size = n;
    return rc;
}

int mk_json_read(const char *path, json_t **root, mk_err *err)
{
    char *text = NULL;
    size_t n = 0;
    json_error_t je;
    *root = NULL;
    int rc = read_all(path, &text, &n, err);
    if (!rc && !(*root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &je)))
        rc = mk_fail(err, MK_E_MODEL, "%s: not valid JSON at line %d, column %d: %s", path, je.line, je.column, je.text);
    if (!rc && !json_is_object(*root)) {
        json_decref(*root);
        *root = NULL;
        rc = mk_fail(err, MK_E_MODEL, "%s: expected a JSON object", path);
    }
    free(text);
    return rc;
}

/* ---- messages ------------------------------------------------------------------------------------------------------- */

/* Is `s` one of the spellings "a|b"? */
static int one_of(const char *names, const char *s)
{
    size_t n = strlen(s);
    for (const char *p = names; p; p = strchr(p, '|') ? strchr(p, '|') + 1 : NULL)
        if (!strncmp(p, s, n) && (p[n] == 0 || p[n] == '|')) return 1;
    return 0;
}

/* The spelling to name in a message: the one that was found, else the published one. */
static void spelling(const mk_cfg *c, const char *names, char out[64])
{
    if (c->found[0] && one_of(names, c->found))
        snprintf(out, 64, "%s", c->found);
    else
        snprintf(out, 64, "%.*s", (int)strcspn(names, "|"), names);
}

int mk_cfg_fail(mk_cfg *c, const char *names, const char *fmt, ...)
{
    if (c->rc) return c->rc;
    char name[64], text[300];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    spelling(c, names, name);
    return c->rc = mk_fail(c->err, MK_E_MODEL, "%s: %s%s %s", c->where, c->path, name, text);
}

/* One value, on one line, short, with control characters escaped. */
static void show(const json_t *v, char out[64])
{
    char *text = json_dumps(v, JSON_ENCODE_ANY | JSON_ENSURE_ASCII | JSON_COMPACT);
    snprintf(out, 64, "%.50s%s", text ? text : "?", text && strlen(text) > 50 ? "..." : "");
    free(text);
}

static void fail_value(mk_cfg *c, const char *names, const json_t *v, const char *expected)
{
    char text[64];
    show(v, text);
    mk_cfg_fail(c, names, "is %s, expected %s", text, expected);
}

/* ---- values --------------------------------------------------------------------------------------------------------- */

json_t *mk_cfg_take(mk_cfg *c, const char *names)
{
    json_t *got = NULL;
    char name[64];
    c->found[0] = 0;
    for (const char *p = names; p && *p;) {
        size_t n = strcspn(p, "|");
        snprintf(name, sizeof name, "%.*s", (int)n, p);
        p += n + (p[n] == '|');
        json_t *v = json_object_get(c->obj, name);
        if (!v) continue;
        if (json_is_null(v)) {
            json_object_del(c->obj, name);
            continue;
        }
        if (!got) {
            got = json_incref(v);
            snprintf(c->found, sizeof c->found, "%s", name);
        } else if (!json_equal(got, v)) {
            mk_cfg_fail(c, names, "and %s disagree", name);
        }
        json_object_del(c->obj, name);
    }
    return got;
}

static uint32_t to_int(mk_cfg *c, const char *names, const json_t *v, uint32_t lo, uint32_t hi)
{
    char want[64];
    snprintf(want, sizeof want, "an integer in %u..%u", lo, hi);
    if (json_is_integer(v) && json_integer_value(v) >= (json_int_t)lo && json_integer_value(v) <= (json_int_t)hi)
        return (uint32_t)json_integer_value(v);
    fail_value(c, names, v, want);
    return lo;
}

static void missing(mk_cfg *c, const char *names)
{
    mk_cfg_fail(c, names, "is missing");
}

uint32_t mk_cfg_int_or(mk_cfg *c, const char *names, uint32_t lo, uint32_t hi, uint32_t absent)
{
    json_t *v = mk_cfg_take(c, names);
    if (!v) return c->rc ? lo : absent;
    uint32_t x = to_int(c, names, v, lo, hi);
    json_decref(v);
    return c->rc ? lo : x;
}

uint32_t mk_cfg_int(mk_cfg *c, const char *names, uint32_t lo, uint32_t hi)
{
    json_t *v = mk_cfg_take(c, names);
    if (!v) missing(c, names);
    uint32_t x = v ? to_int(c, names, v, lo, hi) : lo;
    json_decref(v);
    return c->rc ? lo : x;
}

static double to_num(mk_cfg *c, const char *names, const json_t *v, double lo, double hi)
{
    char want[64];
    double x = json_number_value(v);
    if (json_is_number(v) && x >= lo && x <= hi) return x;
    snprintf(want, sizeof want, "a number in %g..%g", lo, hi);
    fail_value(c, names, v, want);
    return lo;
}

double mk_cfg_num_or(mk_cfg *c, const char *names, double lo, double hi, double absent)
{
    json_t *v = mk_cfg_take(c, names);
    double x = v ? to_num(c, names, v, lo, hi) : absent;
    json_decref(v);
    return c->rc ? lo : x;
}

double mk_cfg_num(mk_cfg *c, const char *names, double lo, double hi)
{
    json_t *v = mk_cfg_take(c, names);
    if (!v) missing(c, names);
    double x = v ? to_num(c, names, v, lo, hi) : lo;
    json_decref(v);
    return c->rc ? lo : x;
}

int mk_cfg_bool_or(mk_cfg *c, const char *names, int absent)
{
    json_t *v = mk_cfg_take(c, names);
    int x = absent;
    if (json_is_boolean(v))
        x = json_is_true(v);
    else if (v)
        fail_value(c, names, v, "true or false");
    json_decref(v);
    return c->rc ? 0 : x;
}

uint32_t mk_cfg_ints(mk_cfg *c, const char *names, uint32_t lo, uint32_t hi, uint32_t *out, uint32_t max)
{
    json_t *v = mk_cfg_take(c, names);
    uint32_t n = 0;
    if (v && (!json_is_array(v) || json_array_size(v) > max)) {
        char want[64];
        snprintf(want, sizeof want, "a list of at most %u integers", max);
        fail_value(c, names, v, want);
    }
    for (; !c->rc && v && n < json_array_size(v); n++) out[n] = to_int(c, names, json_array_get(v, n), lo, hi);
    json_decref(v);
    return c->rc ? 0 : n;
}

int mk_cfg_choices(mk_cfg *c, const char *names, const char *yes, const char *no, uint8_t *out, uint32_t n)
{
    json_t *v = mk_cfg_take(c, names);
    if (!v) return 0;
    char want[96];
    if (!json_is_array(v) || json_array_size(v) != n) {
        snprintf(want, sizeof want, "a list of %u strings, one a layer", n);
        fail_value(c, names, v, want);
    }
    for (uint32_t i = 0; !c->rc && i < n; i++) {
        const json_t *e = json_array_get(v, i);
        const char *s = json_is_string(e) ? json_string_value(e) : "";
        out[i] = !strcmp(s, yes);
        if (!out[i] && strcmp(s, no)) {
            char text[64];
            show(e, text);
            mk_cfg_fail(c, names, "[%u] is %s, supported: \"%s\" and \"%s\"", i, text, yes, no);
        }
    }
    json_decref(v);
    return !c->rc;
}

/* 1 and 1.0 are the same number. */
static int same(const json_t *a, const json_t *b)
{
    if (json_is_number(a) && json_is_number(b)) return !(json_number_value(a) < json_number_value(b) || json_number_value(a) > json_number_value(b));
    return json_equal(a, b);
}

void mk_cfg_expect(mk_cfg *c, const char *names, const char *values)
{
    json_t *v = mk_cfg_take(c, names);
    if (!v) return;
    int ok = 0;
    for (const char *p = values; *p && !ok;) {
        size_t n = strcspn(p, "|");
        json_t *w = json_loadb(p, n, JSON_DECODE_ANY, NULL);
        ok = w && same(v, w);
        json_decref(w);
        p += n + (p[n] == '|');
    }
    if (!ok) {
        char text[64];
        show(v, text);
        mk_cfg_fail(c, names, "is %s, supported: %s", text, values);
    }
    json_decref(v);
}

void mk_cfg_ignore(mk_cfg *c, const char *names)
{
    char name[64];
    for (const char *p = names; *p;) {
        size_t n = strcspn(p, "|");
        snprintf(name, sizeof name, "%.*s", (int)n, p);
        json_object_del(c->obj, name);
        p += n + (p[n] == '|');
    }
}

int mk_cfg_object(mk_cfg *c, const char *name, mk_cfg *sub)
{
    memset(sub, 0, sizeof *sub);
    memcpy(sub->where, c->where, sizeof sub->where);
    snprintf(sub->path, sizeof sub->path, "%s.", name);
    sub->err = c->err;
    sub->rc = c->rc;
    json_t *v = mk_cfg_take(c, name);
    if (v && !json_is_object(v)) {
        fail_value(c, name, v, "an object");
        sub->rc = c->rc;
    }
    int got = json_is_object(v);
    sub->obj = got ? json_copy(v) : NULL;
    json_decref(v);
    return got;
}

int mk_cfg_done(mk_cfg *c, mk_cfg *parent)
{
    const char *name = NULL;
    json_t *v;
    if (!c->rc && !(parent && parent->rc)) { /* else the error that there is stands */
        json_object_foreach(c->obj, name, v)
        {
            if (json_is_null(v)) continue;
            char value[64], key[64];
            json_t *k = json_string(name);
            show(k, key);
            show(v, value);
            json_decref(k);
            c->rc = mk_fail(c->err, MK_E_MODEL, "%s: %s%s: unknown field (value %s)", c->where, c->path, key, value);
            break;
        }
    }
    json_decref(c->obj);
    c->obj = NULL;
    if (parent && !parent->rc) parent->rc = c->rc;
    return c->rc;
}

/* ---- matrices and parameters ---------------------------------------------------------------------------------------- */

void mk_mat_plain(mk_mat *m, uint32_t n, uint32_t k, int keep_bf16, const char *fmt, ...)
{
    memset(m, 0, sizeof *m);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(m->tensor, sizeof m->tensor - sizeof ".weight", fmt, ap);
    va_end(ap);
    strcat(m->tensor, ".weight");
    m->source = MK_SRC_PLAIN;
    m->keep_bf16 = (uint8_t)keep_bf16;
    m->wtype = MK_W_BF16;
    m->n = n;
    m->k = k;
    m->scale_k = 128;
}

void mk_par_set(mk_par *p, uint32_t n, const char *fmt, ...)
{
    memset(p, 0, sizeof *p);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(p->tensor, sizeof p->tensor, fmt, ap);
    va_end(ap);
    p->n = n;
}
