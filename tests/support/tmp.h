/* Temporary directories and small files for tests. Failures here end the test program: nothing is being tested yet. */
#ifndef MK_TEST_TMP_H
#define MK_TEST_TMP_H

#include <stddef.h>

/* A new directory under $TMPDIR or /tmp, with a space in its path. The caller frees the string. */
char *mk_tmp_dir(void);
/* Removes the directory and everything in it, frees the string, nulls the pointer. */
void mk_tmp_remove(char **dir);

/* "dir/name", owned by the caller. */
char *mk_tmp_path(const char *dir, const char *name);
void mk_tmp_write(const char *path, const void *data, size_t n);
/* Whole file; owned by the caller, one NUL behind the end. */
char *mk_tmp_read(const char *path, size_t *n);

#endif
