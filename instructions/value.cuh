/* One value of a packet vector for one thread: for the opcodes that have a thread a channel, which then need no staging and no barrier between gathering and
 * computing. Threads with neighbouring values share packets, so a warp's loads fall together. */
#ifndef MK_VALUE_CUH
#define MK_VALUE_CUH

#include "megakernel/device.cuh"

/* Where a value is: its packet, counted from the first slice of the wait, and its bits in it. */
typedef struct mk_spot {
    uint32_t packet;
    uint32_t word, shift; /* shift: of a bf16 in its word; 32: f32 */
} mk_spot;

/* `index` counts the vector's values and lies in the slices of the wait. Slices are cut almost evenly, so that the search is a step or two. */
MK_DEV mk_spot mk_spot_of(const mk_shared *sh, const mk_wait *w, uint32_t index)
{
    const mk_vec *v = &sh->vec[w->vec];
    const uint16_t *start = sh->start + v->start_index;
    uint32_t s = (uint32_t)__fdividef((float)index * (float)v->nslice, (float)v->width);
    const uint32_t last = w->slice0 + w->nslice - 1;
    s = s < w->slice0 ? w->slice0 : s > last ? last : s;
    while (s > w->slice0 && start[s] > index) s--;
    while (s < last && start[s + 1] <= index) s++;
    const uint32_t i = index - start[s], f32 = v->dtype == MK_F32, at = f32 ? i : i / 2, p = at / 3;
    mk_spot q = {(s - w->slice0) * v->slice_packets + p, at - 3 * p, f32 ? 32 : 16 * (i & 1)};
    return q;
}

/* A first look at its packet, well before it is needed. */
MK_DEV uint4 mk_spot_look(const mk_dev *d, const mk_wait *w, uint32_t row, mk_spot s)
{
    return mk_packet_load(mk_wait_packets(d, w, &d->sh->vec[w->vec], row) + s.packet);
}
/* Waits for it, unless that look has found it. */
MK_DEV float mk_spot_value(const mk_dev *d, const mk_wait *w, uint32_t row, mk_spot s, uint4 q)
{
    const uint32_t epoch = mk_wait_epoch(d, w);
    if (q.w != epoch) q = mk_packet_wait(mk_wait_packets(d, w, &d->sh->vec[w->vec], row) + s.packet, w, row, s.packet, epoch);
    const uint32_t x = s.word == 0 ? q.x : s.word == 1 ? q.y : q.z;
    return s.shift == 32 ? __uint_as_float(x) : mk_bf16_value(x >> s.shift & 0xffffu);
}

/* Asks for 128 bytes at p to be brought into L2. */
MK_DEV void mk_prefetch(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

#endif
