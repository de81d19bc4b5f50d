#include "host/notify.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static int notify_fd = -1;
static struct sockaddr_un notify_to;
static socklen_t notify_len;

int mk_notify_open(mk_err *err)
{
    const char *path = getenv("NOTIFY_SOCKET");
    if (!path || !path[0]) return MK_OK;
    size_t n = strlen(path);
    if (n >= sizeof notify_to.sun_path || (path[0] != '/' && path[0] != '@'))
        return mk_fail(err, MK_E_SYSTEM, "NOTIFY_SOCKET is \"%.120s\", expected /path or @name of at most %zu bytes", path,
                       sizeof notify_to.sun_path - 1);
    memset(&notify_to, 0, sizeof notify_to);
    notify_to.sun_family = AF_UNIX;
    memcpy(notify_to.sun_path, path, n);
    if (path[0] == '@') notify_to.sun_path[0] = 0;
    notify_len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n + (path[0] == '/'));
    notify_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (notify_fd < 0) return mk_fail(err, MK_E_SYSTEM, "cannot open a socket for NOTIFY_SOCKET: %s", strerror(errno));
    return MK_OK;
}

void mk_notify(const char *state)
{
    if (notify_fd < 0) return;
    int e = errno;
    sendto(notify_fd, state, strlen(state), MSG_NOSIGNAL, (const struct sockaddr *)&notify_to, notify_len);
    errno = e;
}

void mk_notify_close(void)
{
    if (notify_fd >= 0) close(notify_fd);
    notify_fd = -1;
}
