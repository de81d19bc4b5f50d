/* One daemon a socket directory: an flock on <dir>/mkd.lock, which holds the pid of the holder. The kernel drops the lock when the
 * process ends, however it ends; the file stays. ZeroMQ's bind takes over an existing socket path, so the lock comes first. */
#ifndef MK_LOCK_H
#define MK_LOCK_H

#include "host/err.h"

typedef struct mk_lock mk_lock;

/* Makes `dir` (mode 0750; its parent must exist) when it is missing and takes the lock. MK_E_RUNNING: another process holds it, the
 * message names its pid. MK_E_SYSTEM: no such directory, no permission. */
int mk_lock_take(const char *dir, mk_lock **lock, mk_err *err);
void mk_lock_release(mk_lock **lock);

#endif
