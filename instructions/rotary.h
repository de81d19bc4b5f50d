/* Rotary position embedding. mk_rotate: interleaved pairs, (x[2i], x[2i+1]) turns by the angle pos * inv_freq[i], the product rounded to f32 as in
 * the reference. (Hugging Face de-interleaves first; that is a permutation, dot products are the same: models.md 3.3.) */
#ifndef MK_ROTARY_H
#define MK_ROTARY_H

#include "instructions/mk_math.h"

MK_FN void mk_rotate(float *x, const float *inv_freq, uint32_t rope, uint32_t pos)
{
    for (uint32_t i = 0; i < rope / 2; i++) {
        float s, co, a = x[2 * i], b = x[2 * i + 1];
        mk_sincosf(mk_mul((float)pos, inv_freq[i]), &s, &co);
        x[2 * i] = mk_add(mk_mul(a, co), -mk_mul(b, s));
        x[2 * i + 1] = mk_add(mk_mul(a, s), mk_mul(b, co));
    }
}

/* Half-split: (x[i], x[i + rope/2]) turns by pos * inv_freq[i]. */
MK_FN void mk_rotate_half(float *x, const float *inv_freq, uint32_t rope, uint32_t pos)
{
    for (uint32_t i = 0; i < rope / 2; i++) {
        float s, co, a = x[i], b = x[i + rope / 2];
        mk_sincosf(mk_mul((float)pos, inv_freq[i]), &s, &co);
        x[i] = mk_add(mk_mul(a, co), -mk_mul(b, s));
        x[i + rope / 2] = mk_add(mk_mul(b, co), mk_mul(a, s));
    }
}

#endif
