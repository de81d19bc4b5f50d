/* One value of a packet vector for one thread: for the opcodes that have a thread a channel, which then need no staging and no barrier between gathering and
 * computing. Threads with neighbouring values share packets, so a warp's loads fall together. */
#ifndef MK_VALUE_CUH
#define MK_VALUE_CUH

#include "megakernel/device.cuh"

/* Where a value of wait `k` is. */
typedef struct mk_spot {
    const uint4 *at;          /* its packet of row 0 */
    uint32_t k, packet, row;  /* packet: counted from the first slice of the wait; row: packets from row to row */
    uint32_t epoch;
    uint32_t word, shift;     /* shift: of a bf16 in its word; 32: f32 */
} mk_spot;

/* `index` counts the vector's values and lies in the slices of the wait. Slices are cut almost evenly, so that the search is a step or two. */
MK_DEV mk_spot mk_spot_of(const mk_dev *d, uint32_t k, uint32_t index)
{
    const mk_wait *w = &d->in->wait[k];
    const mk_vec *v = &d->sh->vec[w->vec];
    const uint16_t *start = d->sh->start + v->start_index;
    uint32_t s = (uint32_t)__fdividef((float)index * (float)v->nslice, (float)v->width);
    const uint32_t first = w->slice0, last = first + w->nslice - 1;
    s = s < first ? first : s > last ? last : s;
    while (s > first && start[s] > index) s--;
    while (s < last && start[s + 1] <= index) s++;
    const uint32_t i = index - start[s], f32 = v->dtype == MK_F32, at = f32 ? i : i / 2, p = at / 3, packet = (s - first) * v->slice_packets + p;
    const mk_places *place = &((const mk_fed *)d->in)->place;
    mk_spot q = {place->in[k] + packet, k, packet, v->nslice * v->slice_packets, place->epoch[k], at - 3 * p, f32 ? 32 : 16 * (i & 1)};
    return q;
}

/* A first look at its packet, well before it is needed. */
MK_DEV uint4 mk_spot_look(const mk_spot *s, uint32_t row)
{
    return mk_packet_load(s->at + row * s->row);
}
/* Waits for it, unless that look has found it. */
MK_DEV float mk_spot_value(const mk_spot *s, uint32_t row, uint4 q)
{
    uint32_t looks = 0;
    while (q.w != s->epoch && mk_still_waiting(++looks, s->k, row, s->packet, q.w)) q = mk_spot_look(s, row);
    mk_waited(looks);
    const uint32_t x = s->word == 0 ? q.x : s->word == 1 ? q.y : q.z;
    return s->shift == 32 ? __uint_as_float(x) : mk_bf16_value(x >> s->shift & 0xffffu);
}

/* Asks for 128 bytes at p to be brought into L2. */
MK_DEV void mk_prefetch(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

#endif
