/* What a token leaves in the cache of latent attention (MLA): the one place for how its row lies and how it is quantised, for both machines, the planner, the validator
 * and the tests.
 *   MK_CACHE_ACT  latent and rotated key, latent + rope values of the program's activation type
 *   MK_CACHE_FP8  latent e4m3 codes | f32 scales, one for every 128 of them, padded to 16 bytes | rope bf16 values: 656 bytes for 512 + 64 (seeds.md A)
 * A scale is a power of two, the least with which the greatest of its values is at most 448: code * scale is exact in bf16, so that what attention multiplies is
 * the same value on every machine, and e4m3 loses no precision by it but at its smallest numbers. Scales are 2^-100 to 2^7: a normalised latent beyond 57,344 is cut to that
 * (a gamma of some 2,500 could make one); a value that is no number makes its scale NaN, and with it all that it touches. */
#ifndef MK_LATENT_H
#define MK_LATENT_H

#include "host/formats.h"

#define MK_LATENT_GROUP 128u /* values a scale */

MK_BOTH uint32_t mk_latent_scale_bytes(uint32_t latent)
{
    return ((latent + MK_LATENT_GROUP - 1) / MK_LATENT_GROUP * 4 + 15) & ~15u;
}
/* Where the rotated key begins in a row, and bytes of a row; act_bytes: of an activation. Scales lie at `latent`. */
MK_BOTH uint32_t mk_latent_key_at(uint32_t latent, uint32_t cache, uint32_t act_bytes)
{
    return cache == MK_CACHE_FP8 ? latent + mk_latent_scale_bytes(latent) : latent * act_bytes;
}
MK_BOTH uint32_t mk_latent_row_bytes(uint32_t latent, uint32_t rope, uint32_t cache, uint32_t act_bytes)
{
    return mk_latent_key_at(latent, cache, act_bytes) + rope * act_bytes;
}

/* Value i of a row in FP8: of the latent, then of the key. */
MK_BOTH float mk_latent_value(const uint8_t *row, uint32_t latent, uint32_t i)
{
    float scale;
    uint16_t h;
    if (i < latent) {
        memcpy(&scale, row + latent + i / MK_LATENT_GROUP * 4, 4);
        return mk_fp8_finite(row[i]) * scale;
    }
    memcpy(&h, row + mk_latent_key_at(latent, MK_CACHE_FP8, 2) + (i - latent) * 2, 2);
    return mk_widen_bf16(h);
}

/* The scale, as bits, of a group whose greatest magnitude has the bits `top`. 448 is 1.75 * 2^8. */
MK_BOTH uint32_t mk_latent_scale(uint32_t top)
{
    int32_t e = (int32_t)(top >> 23) - 127 - 8 + ((top & 0x7fffffu) > 0x600000u);
    if (top >= 0x7f800000u) return 0x7fc00000u;
    e = e < -100 ? -100 : e > 7 ? 7 : e;
    return (uint32_t)(e + 127) << 23;
}
/* x / scale in e4m3, nearest even. */
MK_BOTH uint8_t mk_latent_code(float x, uint32_t scale)
{
    return mk_to_fp8_finite(x * mk_bits_f32((254u << 23) - scale));
}

#endif
