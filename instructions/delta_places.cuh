/* Where the threads of DELTA_STEP find their values: the host says it by the warps of a step of one row, in words that host and device read alike. */
#ifndef MK_DELTA_PLACES_CUH
#define MK_DELTA_PLACES_CUH

#include "instructions/isa.h"

#define MK_DELTA_DK    128u
#define MK_DELTA_WARPS 8u

/* A low rank's input, which lane `lane` of the warp that takes block w has: fp8: eight lanes those of one quarter of a K block. */
MK_BOTH uint32_t mk_delta_input(bool fp8, uint32_t w, uint32_t lane)
{
    return fp8 ? (w >> 1) * 64 + (lane >> 3) * 16 + (w & 1) * 8 + (lane & 7) : w * 32 + lane;
}
/* The channel of q or k that thread tid has. */
MK_BOTH uint32_t mk_delta_channel(const mk_delta *e, uint32_t tid)
{
    return tid < MK_DELTA_DK ? e->q_off + tid : e->k_off + (tid - MK_DELTA_DK);
}

/* What a thread has besides its channel of q or k, by units of 32 values: f (no low rank), b, v, z (no low rank); with a low rank there are fewer units than warps. */
typedef struct mk_delta_unit {
    bool is_f, is_b, is_v, has;
    uint32_t i, k, index; /* the value, and where: of wait k; without one: `idle` of wait 0 */
} mk_delta_unit;
MK_BOTH uint32_t mk_delta_units(const mk_delta *e, bool low, bool head)
{
    const uint32_t nv = (e->dv + 31u) / 32;
    return low ? 1 + nv : (head ? 1 : MK_DELTA_DK / 32) + 1 + 2 * nv;
}
MK_BOTH mk_delta_unit mk_delta_unit_of(const mk_delta *e, bool low, bool head, uint32_t u, uint32_t units, uint32_t lane, uint32_t idle)
{
    const uint32_t nv = (e->dv + 31u) / 32, nf = low ? 0 : head ? 1 : MK_DELTA_DK / 32;
    mk_delta_unit t;
    t.is_f = !low && u < nf, t.is_b = u == nf, t.is_v = u - nf - 1 < nv;
    t.i = (t.is_f ? u : t.is_b ? 0 : t.is_v ? u - nf - 1 : u - nf - 1 - nv) * 32 + lane;
    t.has = u < units && t.i < (t.is_f ? head ? 1 : MK_DELTA_DK : t.is_b ? 1 : e->dv);
    t.k = !t.has || t.is_v ? 0 : low || t.is_b ? 2 : 1;
    t.index = t.has ? (t.is_f ? e->f_off : t.is_v ? e->v_off : low || t.is_b ? e->b_off : e->z_off) + t.i : idle;
    return t;
}

/* A warp's values are up to 64 of a vector, of three slices at most: the first one's slice begins with packet `packet` of the wait, where that value is number `at`; those from `cut` on are of the
 * next slice, those from `cut2` on of the one behind; 0: of none. */
#define MK_DELTA_WORD(packet, at, cut, cut2) ((packet) | (at) << 13 | (cut) << 20 | (cut2) << 26)
#define MK_DELTA_MOST(bits)                  ((1u << (bits)) - 1)
/* Eight times the packet of value i, counted from the first slice of the wait, and which of the packet's six values it is. packets: of a slice. */
MK_BOTH uint32_t mk_delta_found(uint32_t word, uint32_t i, uint32_t packets)
{
    const uint32_t cut = word >> 20 & 63, cut2 = word >> 26;
    const bool next = cut && i >= cut, third = cut2 && i >= cut2;
    const uint32_t at = third ? i - cut2 : next ? i - cut : i + (word >> 13 & 127), p = at * 43 >> 8; /* at / 6, up to 130; the host looks whether a word is right for all of its warp */
    return ((word & 0x1fff) + (next ? packets : 0) + (third ? packets : 0) + p) * 8 + (at - 6 * p);
}
/* What a DELTA_STEP has of them: of channels of q and k, of first units, of a low rank's inputs. */
enum { MK_DELTA_OWN, MK_DELTA_UNIT, MK_DELTA_LOW };
typedef struct mk_delta_places {
    alignas(16) uint32_t word[3][MK_DELTA_WARPS];
} mk_delta_places;

#endif
