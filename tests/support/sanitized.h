/* The sanitizers' build, ten times slower, looks for bad accesses: one of each kind is enough there. The figures are the plain build's. */
#ifndef MK_TEST_SANITIZED_H
#define MK_TEST_SANITIZED_H

#ifdef __SANITIZE_ADDRESS__
#define ONE_OF_EACH 1
#else
#define ONE_OF_EACH 0
#endif

#endif
