/* The supervisor's readiness protocol (sd_notify): one datagram to the socket that $NOTIFY_SOCKET names, without libsystemd. */
#ifndef MK_NOTIFY_H
#define MK_NOTIFY_H

#include "host/err.h"

/* Reads $NOTIFY_SOCKET (a path, or "@name" for an abstract socket) and opens the sending side. Unset: mk_notify does nothing. A socket
 * that cannot be used is MK_E_SYSTEM; the caller decides whether that matters. */
int mk_notify_open(mk_err *err);
/* Sends e.g. "READY=1". Async-signal-safe; a datagram that cannot be delivered is lost. */
void mk_notify(const char *state);
void mk_notify_close(void);

#endif
