/* What the daemon does about a machine that hangs, whatever machine it is: the flight file, the line in the log, and whether to launch again. */
#ifndef MK_RECOVER_H
#define MK_RECOVER_H

#include "megakernel/snapshot.h"

#include <limits.h>

#define MK_RECOVER_MAX 5     /* hangs survived within MK_RECOVER_MS; at the next, launching again does not help (rebuilding a stream may be what hangs) */
#define MK_RECOVER_MS  60000

typedef struct mk_recovery {
    uint32_t hangs;
    uint64_t hang_ms[MK_RECOVER_MAX]; /* when the last ones were */
    char flight_dir[PATH_MAX];
} mk_recovery;

void mk_recovery_init(mk_recovery *r, const char *flight_dir); /* NULL or "": the working directory */
/* Writes the flight file and logs one line: what `gone` says, and what the snapshot does. Returns when the machine may be launched again. Otherwise
 * (`gone` is not NULL, or it hangs again and again) the process ends with MK_E_DEVICE and its supervisor starts a new one; by _exit, because a
 * broken CUDA context does not always let go. */
void mk_recovery_note(mk_recovery *r, const mk_snapshot *s, const char *device, const char *gone);
/* The line after the new launch. */
void mk_recovery_done(const char *device, uint64_t since_ms);

uint64_t mk_now_ms(void); /* CLOCK_MONOTONIC */

#endif
