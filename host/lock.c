#include "host/lock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

struct mk_lock {
    int fd;
};

int mk_lock_take(const char *dir, mk_lock **lock, mk_err *err)
{
    *lock = NULL;
    struct stat st;
    const size_t most = sizeof((struct sockaddr_un *)0)->sun_path - sizeof "/stats.sock"; /* the longest name there that is a socket's */
    if (strlen(dir) > most) return mk_fail(err, MK_E_USAGE, "the socket directory's path has %zu bytes, expected at most %zu: %.300s", strlen(dir), most, dir);
    if (mkdir(dir, 0750) != 0 && errno != EEXIST)
        return mk_fail(err, MK_E_SYSTEM, "cannot make the socket directory %.300s: %s", dir, strerror(errno));
    if (stat(dir, &st) != 0) return mk_fail(err, MK_E_SYSTEM, "%.300s: %s", dir, strerror(errno));
    if (!S_ISDIR(st.st_mode)) return mk_fail(err, MK_E_SYSTEM, "%.300s is not a directory", dir);
    char path[sizeof((struct sockaddr_un *)0)->sun_path + sizeof "/mkd.lock"];
    snprintf(path, sizeof path, "%s/mkd.lock", dir);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0640);
    if (fd < 0) return mk_fail(err, MK_E_SYSTEM, "cannot open the lock file %.300s: %s", path, strerror(errno));
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        int e = errno;
        char pid[32] = "";
        ssize_t n = pread(fd, pid, sizeof pid - 1, 0);
        close(fd);
        if (e != EWOULDBLOCK) return mk_fail(err, MK_E_SYSTEM, "cannot lock %.300s: %s", path, strerror(e));
        pid[n > 0 ? strspn(pid, "0123456789") : 0] = 0;
        return mk_fail(err, MK_E_RUNNING, "another mkd (pid %s) holds %.300s", pid[0] ? pid : "unknown", path);
    }
    char pid[32];
    int n = snprintf(pid, sizeof pid, "%ld\n", (long)getpid());
    if (ftruncate(fd, 0) != 0 || pwrite(fd, pid, (size_t)n, 0) != n) {
        int e = errno;
        close(fd);
        return mk_fail(err, MK_E_SYSTEM, "cannot write %.300s: %s", path, strerror(e));
    }
    mk_lock *l = malloc(sizeof *l);
    if (!l) {
        close(fd);
        return mk_fail(err, MK_E_SYSTEM, "out of memory");
    }
    l->fd = fd;
    *lock = l;
    return MK_OK;
}

void mk_lock_release(mk_lock **lock)
{
    if (!*lock) return;
    close((*lock)->fd); /* which unlocks */
    free(*lock);
    *lock = NULL;
}
