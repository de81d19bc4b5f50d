/* The GPU's clock against the host's. */
#ifndef MK_TEST_CLOCK_H
#define MK_TEST_CLOCK_H

#include <stdint.h>

typedef struct mk_clock_pair {
    int64_t offset;   /* device clock + offset = CLOCK_MONOTONIC, at `at` */
    uint64_t at;      /* CLOCK_MONOTONIC */
    uint64_t trip_ns; /* the shortest round trip, from which it is: the offset is right within half of it */
    uint64_t tick_ns; /* smallest step of the device clock that was seen */
} mk_clock_pair;

/* n round trips between host and one thread of a kernel through mapped pinned memory; the shortest one's middle is the device's time stamp. Launches a kernel and
 * waits for it. 0, or a CUDA error. */
#ifdef __cplusplus
extern "C"
#endif
int mk_clock_measure(uint32_t n, mk_clock_pair *p);

#endif
