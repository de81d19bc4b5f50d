/* safetensors: 8 bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, data. The format says that the data has
 * no holes and no overlaps; we hold every file to that, so that a header that lies is found before anything is read. */
#include "host/checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "host/arch.h"
#include "host/quant.h"

#define MAX_HEADER 100000000u /* the limit of the reference implementation */
#define MAX_SHARDS 4096u

typedef struct shard {
    char *path;
    void *map;
    size_t size;
    json_t *header; /* owns the tensors' names */
} shard;

typedef struct scratch { /* mk_checkpoint_scratch: a list for every tensor */
    struct scratch *next;
    uint64_t key;
    size_t n;
    _Atomic uint32_t words[];
} scratch;

typedef struct made { /* mk_checkpoint_made */
    struct made *next;
    const mk_tensor *of;
    mk_tensor t;
    scratch *scratch;
    float values[];
} made;

struct mk_checkpoint {
    mk_tensor *tensor; /* by name */
    size_t n, cap;
    shard *shard;
    size_t n_shards;
    json_t *metadata; /* borrowed; of a single file */
    scratch **scratch; /* [n] */
    made *made;
    pthread_mutex_t lock;
};

static const struct {
    const char *name;
    enum mk_st_dtype dtype;
    unsigned bits;
} dtypes[] = {
    {"F32", MK_ST_F32, 32},        {"F16", MK_ST_F16, 16},     {"BF16", MK_ST_BF16, 16},   {"F8_E4M3", MK_ST_F8_E4M3, 8},
    {"F8_E8M0", MK_ST_F8_E8M0, 8}, {"I32", MK_ST_I32, 32},     {"I64", MK_ST_I64, 64},     {"U8", MK_ST_U8, 8},
    {"F64", MK_ST_OTHER, 64},      {"BOOL", MK_ST_OTHER, 8},   {"I8", MK_ST_OTHER, 8},     {"I16", MK_ST_OTHER, 16},
    {"U16", MK_ST_OTHER, 16},      {"U32", MK_ST_OTHER, 32},   {"U64", MK_ST_OTHER, 64},   {"F8_E5M2", MK_ST_OTHER, 8},
    {"F4", MK_ST_OTHER, 4},        {"F6_E2M3", MK_ST_OTHER, 6}, {"F6_E3M2", MK_ST_OTHER, 6}, {"C64", MK_ST_OTHER, 64},
};

/* Names go into one-line messages and into fixed buffers. */
static int plain_name(const char *s)
{
    size_t n = 0;
    for (; s[n]; n++)
        if ((unsigned char)s[n] < 0x20 || s[n] == 0x7f) return 0;
    return n > 0 && n < MK_NAME;
}

/* ---- one tensor's entry --------------------------------------------------------------------------------------------- */

static int get_u64(const json_t *v, uint64_t *out)
{
    if (!json_is_integer(v) || json_integer_value(v) < 0) return 0;
    *out = (uint64_t)json_integer_value(v);
    return 1;
}

static int parse_tensor(const shard *sh, size_t data_off, const char *name, const json_t *entry, mk_tensor *t, mk_err *err)
{
    const char *file = sh->path;
    uint64_t data_size = sh->size - data_off;
    if (!json_is_object(entry)) return mk_fail(err, MK_E_MODEL, "%s: tensor %s: expected an object with dtype, shape, data_offsets", file, name);
    const json_t *dtype = json_object_get(entry, "dtype"), *shape = json_object_get(entry, "shape");
    const json_t *offs = json_object_get(entry, "data_offsets");
    if (!dtype || !shape || !offs || json_object_size(entry) != 3)
        return mk_fail(err, MK_E_MODEL, "%s: tensor %s: expected exactly dtype, shape and data_offsets", file, name);

    unsigned bits = 0;
    for (size_t i = 0; json_is_string(dtype) && i < sizeof dtypes / sizeof *dtypes; i++)
        if (!strcmp(json_string_value(dtype), dtypes[i].name)) {
            t->dtype = dtypes[i].dtype;
            bits = dtypes[i].bits;
        }
    if (!bits) {
        char *text = json_dumps(dtype, JSON_ENCODE_ANY | JSON_ENSURE_ASCII | JSON_COMPACT);
        mk_fail(err, MK_E_MODEL, "%s: tensor %s: unknown dtype %.40s", file, name, text ? text : "?");
        free(text);
        return MK_E_MODEL;
    }
    if (!json_is_array(shape) || json_array_size(shape) > 6)
        return mk_fail(err, MK_E_MODEL, "%s: tensor %s: shape: expected a list of at most 6 integers", file, name);
    t->ndim = (uint32_t)json_array_size(shape);
    uint64_t need = bits;
    int overflow = 0;
    for (uint32_t i = 0; i < t->ndim; i++) {
        if (!get_u64(json_array_get(shape, i), &t->shape[i]))
            return mk_fail(err, MK_E_MODEL, "%s: tensor %s: shape[%u] is not a non-negative integer", file, name, i);
        overflow |= __builtin_mul_overflow(need, t->shape[i], &need);
    }
    if (overflow || need % 8) return mk_fail(err, MK_E_MODEL, "%s: tensor %s: shape overflows or is no whole number of bytes", file, name);
    need /= 8;

    uint64_t begin, end;
    if (!json_is_array(offs) || json_array_size(offs) != 2 || !get_u64(json_array_get(offs, 0), &begin) ||
        !get_u64(json_array_get(offs, 1), &end) || begin > end)
        return mk_fail(err, MK_E_MODEL, "%s: tensor %s: data_offsets: expected [begin, end] with begin <= end", file, name);
    if (end - begin != need)
        return mk_fail(err, MK_E_MODEL, "%s: tensor %s: shape and dtype need %" PRIu64 " bytes, data_offsets give %" PRIu64, file, name, need,
                       end - begin);
    if (end > data_size)
        return mk_fail(err, MK_E_MODEL,
                       "%s: truncated, or the header lies: tensor %s ends at byte %" PRIu64 " of the data, the file has %" PRIu64, file, name, end,
                       data_size);
    t->name = name;
    t->data = (const char *)sh->map + data_off + begin;
    t->bytes = need;
    t->file = file;
    return MK_OK;
}

/* ---- one file ------------------------------------------------------------------------------------------------------- */

static int by_data(const void *a, const void *b)
{
    const mk_tensor *x = a, *y = b;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}
static int by_name(const void *a, const void *b)
{
    return strcmp(((const mk_tensor *)a)->name, ((const mk_tensor *)b)->name);
}

static int map_file(shard *sh, mk_err *err)
{
    int fd = open(sh->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* O_NONBLOCK: a FIFO must not hang us */
    if (fd < 0) return mk_fail(err, MK_E_MODEL, "%s: cannot open: %s", sh->path, strerror(errno));
    struct stat st;
    int rc = MK_OK;
    if (fstat(fd, &st) < 0)
        rc = mk_fail(err, MK_E_SYSTEM, "%s: fstat: %s", sh->path, strerror(errno));
    else if (!S_ISREG(st.st_mode))
        rc = mk_fail(err, MK_E_MODEL, "%s: not a regular file", sh->path);
    else if (st.st_size < 10)
        rc = mk_fail(err, MK_E_MODEL, "%s: truncated: %lld bytes, a safetensors file has at least 10", sh->path, (long long)st.st_size);
    else {
        sh->size = (size_t)st.st_size;
        void *p = mmap(NULL, sh->size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (p == MAP_FAILED)
            rc = mk_fail(err, MK_E_SYSTEM, "%s: mmap of %zu bytes: %s", sh->path, sh->size, strerror(errno));
        else
            sh->map = p;
    }
    close(fd);
    return rc;
}

static int reserve(mk_checkpoint *ck, size_t more, mk_err *err)
{
    if (ck->n + more <= ck->cap) return MK_OK;
    size_t cap = ck->n + more + ck->cap;
    mk_tensor *t = realloc(ck->tensor, cap * sizeof *t);
    if (!t) return mk_fail(err, MK_E_SYSTEM, "out of memory for %zu tensors", cap);
    ck->tensor = t;
    ck->cap = cap;
    return MK_OK;
}

/* Maps the file and appends its tensors to ck->tensor. */
static int read_shard(mk_checkpoint *ck, shard *sh, mk_err *err)
{
    int rc = map_file(sh, err);
    if (rc) return rc;
    const unsigned char *p = sh->map;
    uint64_t len = 0;
    for (int i = 7; i >= 0; i--) len = len << 8 | p[i];
    if (len < 2 || len > MAX_HEADER || len > sh->size - 8)
        return mk_fail(err, MK_E_MODEL, "%s: header of %" PRIu64 " bytes: expected 2..%" PRIu64 " (not a safetensors file, or truncated)", sh->path, len,
                       sh->size - 8 < MAX_HEADER ? (uint64_t)sh->size - 8 : (uint64_t)MAX_HEADER);
    json_error_t je;
    if (p[8] != '{') return mk_fail(err, MK_E_MODEL, "%s: header does not start with '{'", sh->path);
    sh->header = json_loadb((const char *)p + 8, (size_t)len, JSON_REJECT_DUPLICATES, &je);
    if (!json_is_object(sh->header)) return mk_fail(err, MK_E_MODEL, "%s: header is not valid JSON at byte %d: %s", sh->path, je.position, je.text);

    size_t data_off = 8 + (size_t)len, first = ck->n;
    rc = reserve(ck, json_object_size(sh->header), err);
    if (rc) return rc;
    const char *name;
    json_t *entry;
    json_object_foreach(sh->header, name, entry)
    {
        if (!strcmp(name, "__metadata__")) {
            const char *k;
            json_t *v;
            if (!json_is_object(entry)) return mk_fail(err, MK_E_MODEL, "%s: __metadata__ is not an object", sh->path);
            json_object_foreach(entry, k, v)
            {
                if (!json_is_string(v)) return mk_fail(err, MK_E_MODEL, "%s: __metadata__: every value must be a string", sh->path);
            }
            ck->metadata = entry;
            continue;
        }
        if (!plain_name(name))
            return mk_fail(err, MK_E_MODEL, "%s: tensor %zu has an unusable name (1..%d bytes, no control characters)", sh->path, ck->n - first,
                           MK_NAME - 1);
        mk_tensor t = {0};
        rc = parse_tensor(sh, data_off, name, entry, &t, err);
        if (rc) return rc;
        ck->tensor[ck->n++] = t;
    }

    qsort(ck->tensor + first, ck->n - first, sizeof *ck->tensor, by_data);
    const char *at = (const char *)sh->map + data_off;
    for (size_t i = first; i < ck->n; i++) {
        const mk_tensor *t = &ck->tensor[i];
        ptrdiff_t gap = (const char *)t->data - at;
        if (gap < 0) return mk_fail(err, MK_E_MODEL, "%s: tensor %s overlaps %s by %td bytes", sh->path, t->name, t[-1].name, -gap);
        if (gap > 0) return mk_fail(err, MK_E_MODEL, "%s: hole of %td bytes before tensor %s", sh->path, gap, t->name);
        at = (const char *)t->data + t->bytes;
    }
    ptrdiff_t rest = (const char *)sh->map + sh->size - at;
    if (rest) return mk_fail(err, MK_E_MODEL, "%s: %td bytes after the last tensor that no tensor owns", sh->path, rest);
    return MK_OK;
}

/* ---- the whole checkpoint ------------------------------------------------------------------------------------------- */

static char *join(const char *dir, const char *name)
{
    char *p = NULL;
    return asprintf(&p, "%s/%s", dir, name) < 0 ? NULL : p;
}

static mk_checkpoint *new_checkpoint(size_t n_shards)
{
    mk_checkpoint *ck = calloc(1, sizeof *ck);
    if (!ck) return NULL;
    ck->shard = calloc(n_shards, sizeof *ck->shard);
    if (!ck->shard) {
        free(ck);
        return NULL;
    }
    ck->n_shards = n_shards;
    pthread_mutex_init(&ck->lock, NULL);
    return ck;
}

/* Sorts by name; a name twice (in two shards) is refused. */
static int finish(mk_checkpoint *ck, mk_err *err)
{
    if (ck->n) qsort(ck->tensor, ck->n, sizeof *ck->tensor, by_name);
    for (size_t i = 1; i < ck->n; i++)
        if (!strcmp(ck->tensor[i - 1].name, ck->tensor[i].name))
            return mk_fail(err, MK_E_MODEL, "tensor %s is in %s and in %s", ck->tensor[i].name, ck->tensor[i - 1].file, ck->tensor[i].file);
    ck->scratch = calloc(ck->n ? ck->n : 1, sizeof *ck->scratch);
    return ck->scratch ? MK_OK : mk_fail(err, MK_E_SYSTEM, "out of memory");
}

int mk_checkpoint_open_file(const char *path, mk_checkpoint **out, mk_err *err)
{
    *out = NULL;
    mk_checkpoint *ck = new_checkpoint(1);
    if (!ck || !(ck->shard[0].path = strdup(path))) {
        mk_checkpoint_close(&ck);
        return mk_fail(err, MK_E_SYSTEM, "out of memory");
    }
    int rc = read_shard(ck, &ck->shard[0], err);
    if (!rc) rc = finish(ck, err);
    if (rc)
        mk_checkpoint_close(&ck);
    else
        *out = ck;
    return rc;
}

/* A shard is a plain name in the directory: nothing in a checkpoint may name files elsewhere. */
static int plain_file(const char *s)
{
    return plain_name(s) && !strchr(s, '/') && strcmp(s, ".") && strcmp(s, "..");
}

/* weight_map {tensor: file} -> the set of files, as the keys of *files with their tensor counts. */
static int index_files(const char *index, const json_t *map, json_t *files, mk_err *err)
{
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)map, name, v)
    {
        if (!plain_name(name)) return mk_fail(err, MK_E_MODEL, "%s: weight_map: a tensor has an unusable name", index);
        const char *file = json_string_value(v);
        if (!file || !plain_file(file))
            return mk_fail(err, MK_E_MODEL, "%s: weight_map: %s: expected the name of a file in the same directory", index, name);
        if (!json_object_get(files, file) && json_object_set_new(files, file, json_true()))
            return mk_fail(err, MK_E_SYSTEM, "out of memory");
    }
    size_t n = json_object_size(files);
    if (n == 0 || n > MAX_SHARDS) return mk_fail(err, MK_E_MODEL, "%s: weight_map names %zu files, expected 1..%u", index, n, MAX_SHARDS);
    return MK_OK;
}

static int check_index(const mk_checkpoint *ck, const char *index, const json_t *map, mk_err *err)
{
    for (size_t i = 0; i < ck->n; i++) {
        const mk_tensor *t = &ck->tensor[i];
        const char *file = json_string_value(json_object_get(map, t->name)), *base = strrchr(t->file, '/');
        if (!file) return mk_fail(err, MK_E_MODEL, "%s: tensor %s is in %s but not in the index", index, t->name, t->file);
        if (strcmp(file, base ? base + 1 : t->file))
            return mk_fail(err, MK_E_MODEL, "%s: tensor %s: the index says %s, found in %s", index, t->name, file, t->file);
    }
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)map, name, v)
    {
        if (!mk_checkpoint_find(ck, name)) return mk_fail(err, MK_E_MODEL, "%s: tensor %s is not in %s", index, name, json_string_value(v));
    }
    return MK_OK;
}

static int open_sharded(const char *dir, const char *index, mk_checkpoint **out, mk_err *err)
{
    json_t *root = NULL, *files = json_object();
    mk_checkpoint *ck = NULL;
    int rc = mk_json_read(index, &root, err);
    if (rc) goto done;
    const json_t *map = json_object_get(root, "weight_map");
    if (!json_is_object(map)) {
        rc = mk_fail(err, MK_E_MODEL, "%s: weight_map: expected an object {tensor: file}", index);
        goto done;
    }
    if ((rc = index_files(index, map, files, err))) goto done;
    if (!(ck = new_checkpoint(json_object_size(files)))) {
        rc = mk_fail(err, MK_E_SYSTEM, "out of memory");
        goto done;
    }
    size_t i = 0;
    const char *file;
    json_t *v;
    json_object_foreach(files, file, v)
    {
        shard *sh = &ck->shard[i++];
        if (!(sh->path = join(dir, file))) {
            rc = mk_fail(err, MK_E_SYSTEM, "out of memory");
            goto done;
        }
        if (access(sh->path, F_OK)) {
            rc = mk_fail(err, MK_E_MODEL, "%s: shard missing: %s names it, %s", sh->path, index, strerror(errno));
            goto done;
        }
        if ((rc = read_shard(ck, sh, err))) goto done;
    }
    if (ck->n_shards > 1) ck->metadata = NULL;
    rc = finish(ck, err);
    if (!rc) rc = check_index(ck, index, map, err);
done:
    json_decref(files);
    json_decref(root);
    if (rc)
        mk_checkpoint_close(&ck);
    else
        *out = ck;
    return rc;
}

int mk_checkpoint_open(const char *dir, mk_checkpoint **out, mk_err *err)
{
    *out = NULL;
    struct stat st;
    if (stat(dir, &st)) return mk_fail(err, MK_E_MODEL, "%s: %s", dir, strerror(errno));
    if (!S_ISDIR(st.st_mode)) return mk_fail(err, MK_E_MODEL, "%s: expected a checkpoint directory", dir);
    char *one = join(dir, "model.safetensors"), *index = join(dir, "model.safetensors.index.json");
    int rc;
    if (!one || !index)
        rc = mk_fail(err, MK_E_SYSTEM, "out of memory");
    else if (!lstat(one, &st)) /* lstat: a dangling link is an error of its own, not an absent file */
        rc = mk_checkpoint_open_file(one, out, err);
    else if (!lstat(index, &st))
        rc = open_sharded(dir, index, out, err);
    else
        rc = mk_fail(err, MK_E_MODEL, "%s: no weights: neither model.safetensors nor model.safetensors.index.json", dir);
    free(one);
    free(index);
    return rc;
}

static void free_scratch(scratch *s)
{
    for (scratch *next; s; s = next) {
        next = s->next;
        free(s);
    }
}

void mk_checkpoint_close(mk_checkpoint **p)
{
    mk_checkpoint *ck = *p;
    if (!ck) return;
    for (size_t i = 0; i < ck->n_shards; i++) {
        if (ck->shard[i].map) munmap(ck->shard[i].map, ck->shard[i].size);
        json_decref(ck->shard[i].header);
        free(ck->shard[i].path);
    }
    for (size_t i = 0; ck->scratch && i < ck->n; i++) free_scratch(ck->scratch[i]);
    for (made *m = ck->made, *next; m; m = next) {
        next = m->next;
        free_scratch(m->scratch);
        free(m);
    }
    pthread_mutex_destroy(&ck->lock);
    free(ck->scratch);
    free(ck->shard);
    free(ck->tensor);
    free(ck);
    *p = NULL;
}

const mk_tensor *mk_checkpoint_find(const mk_checkpoint *ck, const char *name)
{
    mk_tensor key = {.name = name};
    return ck->n ? bsearch(&key, ck->tensor, ck->n, sizeof key, by_name) : NULL;
}

size_t mk_checkpoint_count(const mk_checkpoint *ck)
{
    return ck->n;
}

const mk_tensor *mk_checkpoint_at(const mk_checkpoint *ck, size_t i)
{
    return &ck->tensor[i];
}

const char *mk_checkpoint_metadata(const mk_checkpoint *ck, const char *key)
{
    return ck->metadata ? json_string_value(json_object_get(ck->metadata, key)) : NULL;
}

_Atomic uint32_t *mk_checkpoint_scratch(const mk_checkpoint *ck, const mk_tensor *t, uint64_t key, size_t n)
{
    mk_checkpoint *w = (mk_checkpoint *)(uintptr_t)ck; /* a cache: the checkpoint stays the same to its callers */
    pthread_mutex_lock(&w->lock);
    made *m = w->made;
    while (m && &m->t != t) m = m->next;
    scratch **list = m ? &m->scratch : &w->scratch[t - ck->tensor], *s = *list;
    while (s && (s->key != key || s->n != n)) s = s->next;
    if (!s && (s = calloc(1, sizeof *s + n * sizeof *s->words))) {
        s->key = key;
        s->n = n;
        s->next = *list;
        *list = s;
    }
    pthread_mutex_unlock(&w->lock);
    return s ? s->words : NULL;
}

const mk_tensor *mk_checkpoint_made(const mk_checkpoint *ck, const mk_tensor *of, uint32_t rows, uint32_t cols, int (*make)(const void *arg, float *to, mk_err *err), const void *arg,
                                    mk_err *err)
{
    mk_checkpoint *w = (mk_checkpoint *)(uintptr_t)ck;
    pthread_mutex_lock(&w->lock);
    made *m = w->made;
    while (m && (m->of != of || m->t.shape[0] != rows || m->t.shape[1] != cols)) m = m->next;
    if (!m) {
        const size_t bytes = (size_t)rows * cols * sizeof *m->values;
        if (!(m = malloc(sizeof *m + bytes))) {
            mk_fail(err, MK_E_SYSTEM, "tensor %s: out of memory for its product, %zu bytes", of->name, bytes);
        } else if (make(arg, m->values, err)) {
            free(m);
            m = NULL;
        } else {
            *m = (made){.next = w->made, .of = of, .t = {.name = of->name, .dtype = MK_ST_F32, .ndim = 2, .shape = {rows, cols}, .data = m->values, .bytes = bytes, .file = of->file}};
            w->made = m;
        }
    }
    pthread_mutex_unlock(&w->lock);
    return m ? &m->t : NULL;
}
