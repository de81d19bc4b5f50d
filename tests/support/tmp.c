#include "tests/support/tmp.h"

#include <errno.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void die(const char *what, const char *path)
{
    fprintf(stderr, "tests: %s %s: %s\n", what, path, strerror(errno));
    exit(99);
}

char *mk_tmp_dir(void)
{
    const char *base = getenv("TMPDIR");
    char *p = NULL;
    if (asprintf(&p, "%s/mkd test XXXXXX", base && *base ? base : "/tmp") < 0 || !mkdtemp(p)) die("mkdtemp", p ? p : "?");
    return p;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *f)
{
    (void)st;
    (void)type;
    (void)f;
    return remove(path);
}

void mk_tmp_remove(char **dir)
{
    if (*dir) nftw(*dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    free(*dir);
    *dir = NULL;
}

char *mk_tmp_path(const char *dir, const char *name)
{
    char *p = NULL;
    if (asprintf(&p, "%s/%s", dir, name) < 0) die("path", name);
    return p;
}

void mk_tmp_write(const char *path, const void *data, size_t n)
{
    FILE *f = fopen(path, "wb");
    if (!f || (n && fwrite(data, 1, n, f) != n) || fclose(f)) die("write", path);
}

char *mk_tmp_read(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    long size;
    if (!f || fseek(f, 0, SEEK_END) || (size = ftell(f)) < 0 || fseek(f, 0, SEEK_SET)) die("read", path);
    char *p = malloc((size_t)size + 1);
    if (!p || fread(p, 1, (size_t)size, f) != (size_t)size) die("read", path);
    p[size] = 0;
    fclose(f);
    if (n) *n = (size_t)size;
    return p;
}
