/* Counts what a process asks of the CUDA driver. Preloaded (LD_PRELOAD=libcount_api.so COUNT_API=FILE mkd ...): the runtime, linked statically or not, gets every
 * entry point of libcuda through dlsym and cuGetProcAddress; both are interposed, and what they return is replaced by a few bytes of code
 * that count and jump on. The counts lie in FILE, mapped, so that a copy of FILE taken at any moment is a reading (tests/gpu/count_api.py), and nothing is
 * lost when the process ends with _exit. Launches are recorded with their shape. x86-64.
 *
 * What does not pass here: calls of the runtime that never reach the driver (cudaGetLastError), and the driver's private tables. */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define NAMES    1024
#define LAUNCHES 1024 /* the last ones */
#define STUB     32 /* bytes of code */

typedef struct file_entry {
    char name[56];
    atomic_uint_least64_t count;
} file_entry;
typedef struct file_launch {
    uint64_t ns; /* CLOCK_MONOTONIC */
    uint32_t grid, block, shared, pad;
} file_launch;
/* The file. tests/gpu/count_api.py knows this layout. */
typedef struct file {
    char magic[8]; /* "mkcount1" */
    atomic_uint n, launches;
    file_entry entry[NAMES];
    file_launch launch[LAUNCHES];
} file;

typedef int (*launch_fn)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
typedef int (*launch_ex_fn)(const unsigned *, void *, void **, void **);
typedef int (*get_fn)(const char *, void **, int, uint64_t, void *);
typedef int (*get_v1_fn)(const char *, void **, int, uint64_t);

static file *f;
static uint8_t *code;
static void *real_of[NAMES]; /* by entry */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static launch_fn real_launch;
static launch_ex_fn real_launch_ex;
static get_fn real_get;
static get_v1_fn real_get_v1;

static void die(const char *what)
{
    fprintf(stderr, "count_api: %s\n", what);
    _exit(70);
}

/* Once, under the lock. */
static void begin(void)
{
    const char *path = getenv("COUNT_API");
    int fd = path ? open(path, O_RDWR | O_CREAT | O_TRUNC, 0600) : -1;
    if (fd < 0 || ftruncate(fd, sizeof *f)) die("COUNT_API names no file that can be written");
    f = mmap(NULL, sizeof *f, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    code = mmap(NULL, NAMES * STUB, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (f == MAP_FAILED || code == MAP_FAILED) die("no memory");
    close(fd);
    memcpy(f->magic, "mkcount1", 8);
}

static void note(unsigned grid, unsigned block, unsigned shared)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    unsigned i = atomic_fetch_add(&f->launches, 1);
    f->launch[i % LAUNCHES] = (file_launch){(uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec, grid, block, shared, 0};
}

static int launch(void *fn, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **args, void **more)
{
    note(gx * gy * gz, bx * by * bz, shared);
    return real_launch(fn, gx, gy, gz, bx, by, bz, shared, stream, args, more);
}

static int launch_ex(const unsigned *config, void *fn, void **args, void **more)
{
    note(config[0] * config[1] * config[2], config[3] * config[4] * config[5], config[6]);
    return real_launch_ex(config, fn, args, more);
}

static int get(const char *symbol, void **fn, int version, uint64_t flags, void *status);
static int get_v1(const char *symbol, void **fn, int version, uint64_t flags);

/* What to hand out instead of `real`. */
static void *counted(const char *name, void *real)
{
    if (!strcmp(name, "cuGetProcAddress_v2") || (!strcmp(name, "cuGetProcAddress") && real_get == (get_fn)real)) {
        real_get = (get_fn)real;
        return (void *)get;
    }
    if (!strcmp(name, "cuGetProcAddress")) {
        real_get_v1 = (get_v1_fn)real;
        return (void *)get_v1;
    }
    pthread_mutex_lock(&lock);
    if (!f) begin();
    unsigned i = 0, n = atomic_load(&f->n);
    while (i < n && (real_of[i] != real || strncmp(f->entry[i].name, name, sizeof f->entry[i].name - 1))) i++;
    if (i == n) {
        if (n == NAMES) die("more entry points than expected");
        void *to = real;
        if (!strcmp(name, "cuLaunchKernel")) {
            real_launch = (launch_fn)real;
            to = (void *)launch;
        } else if (!strcmp(name, "cuLaunchKernelEx")) {
            real_launch_ex = (launch_ex_fn)real;
            to = (void *)launch_ex;
        }
        real_of[i] = real;
        strncpy(f->entry[i].name, name, sizeof f->entry[i].name - 1);
        uint8_t *p = code + i * STUB;
        void *counter = &f->entry[i].count;
        memcpy(p, "\x49\xbb", 2); /* mov r11, counter */
        memcpy(p + 2, &counter, 8);
        memcpy(p + 10, "\xf0\x49\xff\x03", 4); /* lock inc qword [r11] */
        memcpy(p + 14, "\x49\xbb", 2);         /* mov r11, to */
        memcpy(p + 16, &to, 8);
        memcpy(p + 24, "\x41\xff\xe3", 3); /* jmp r11 */
        atomic_store(&f->n, n + 1);
    }
    pthread_mutex_unlock(&lock);
    return code + i * STUB;
}

static int get(const char *symbol, void **fn, int version, uint64_t flags, void *status)
{
    int rc = real_get(symbol, fn, version, flags, status);
    if (rc == 0 && *fn) {
        if (!strcmp(symbol, "cuGetProcAddress") && version >= 12000)
            *fn = (void *)get;
        else
            *fn = counted(symbol, *fn);
    }
    return rc;
}

static int get_v1(const char *symbol, void **fn, int version, uint64_t flags)
{
    int rc = real_get_v1(symbol, fn, version, flags);
    if (rc == 0 && *fn) *fn = counted(symbol, *fn);
    return rc;
}

/* An entry point of the driver: "cu" and a capital letter, in libcuda. */
static int of_driver(const char *name, void *p)
{
    Dl_info at;
    return name[0] == 'c' && name[1] == 'u' && name[2] >= 'A' && name[2] <= 'Z' && dladdr(p, &at) && at.dli_fname && strstr(at.dli_fname, "libcuda.so");
}

void *dlsym(void *restrict handle, const char *restrict name)
{
    static void *(*real)(void *, const char *);
    if (!real) real = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    void *p = real(handle, name);
    return p && of_driver(name, p) ? counted(name, p) : p;
}
