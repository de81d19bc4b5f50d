/* The ceiling that every figure is held against: how fast this GPU streams memory right now. */
#ifndef MK_CEILING_H
#define MK_CEILING_H

#ifdef __cplusplus
extern "C" {
#endif
#include "host/err.h"

/* Streams random bytes out of a buffer of its own with every SM (bulk copies into shared memory, nothing done with them) for some 20 ms and frees it. *gb_s: the
 * best of several passes, in 10^9 bytes a second; 0 when there is no memory for the buffer. Before the resident kernel is launched. */
int mk_ceiling_measure(int device, double *gb_s, mk_err *err);

#ifdef __cplusplus
}
#endif

#endif
