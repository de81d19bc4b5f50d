/* Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
 * A pure function of (key, counter): a token's draw does not depend on what was drawn before. Host and device. */
#ifndef MK_PHILOX_H
#define MK_PHILOX_H

#include "instructions/mk_math.h"

/* ctr: four words in, four random words out. */
MK_FN void mk_philox(uint32_t k0, uint32_t k1, uint32_t ctr[4])
{
    for (int round = 0; round < 10; round++) {
        uint64_t a = 0xD2511F53ull * ctr[0], b = 0xCD9E8D57ull * ctr[2];
        uint32_t c1 = ctr[1], c3 = ctr[3];
        ctr[0] = (uint32_t)(b >> 32) ^ c1 ^ k0;
        ctr[1] = (uint32_t)b;
        ctr[2] = (uint32_t)(a >> 32) ^ c3 ^ k1;
        ctr[3] = (uint32_t)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

/* 64 random bits for the token at `position` of a stream seeded with `seed`: those of its n-th draw (sample.c). */
MK_FN uint64_t mk_draw(uint64_t seed, uint32_t position, uint32_t n)
{
    uint32_t c[4] = {position, n, 0, 0};
    mk_philox((uint32_t)seed, (uint32_t)(seed >> 32), c);
    return (uint64_t)c[1] << 32 | c[0];
}

#endif
