/* One value of a packet vector for one thread: for the opcodes that have a thread a channel, which then need no staging and no barrier between gathering and
 * computing. Threads with neighbouring values share packets, so a warp's loads fall together. */
#ifndef MK_VALUE_CUH
#define MK_VALUE_CUH

#include "megakernel/device.cuh"

/* The slice that holds value `index`, and which value that begins with. Slices are cut almost evenly, so that it is hardly ever another one than is guessed. */
MK_DEV uint32_t mk_spot_slice(const mk_dev *d, const mk_wait *w, const mk_vec *v, uint32_t index, uint32_t *begin)
{
    const uint16_t *start = d->sh->start + v->start_index;
    const uint32_t first = w->slice0, last = first + w->nslice - 1;
    float by_width;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(by_width) : "f"((float)v->width));
    uint32_t s = min(max((uint32_t)(((float)(index + 1) * (float)v->nslice - 0.5f) * by_width), first), last);
#pragma unroll 1
    for (;;) {
        *begin = start[s];
        if (index - *begin < start[s + 1] - *begin) return s;
        s += index < *begin ? 0xffffffffu : 1u;
    }
}
/* Of any row: eight times the packet of value `index`, of bf16, counted from the first slice of the wait, and which of its six values it is. */
MK_DEV uint32_t mk_spot_find(const mk_dev *d, uint32_t k, uint32_t index)
{
    const mk_wait *w = &d->in->wait[k];
    const mk_vec *v = &d->sh->vec[w->vec];
    uint32_t begin;
    const uint32_t s = mk_spot_slice(d, w, v, index, &begin), at = index - begin, p = at / 6;
    return ((s - w->slice0) * v->slice_packets + p) * 8 + (at - 6 * p);
}
MK_DEV float mk_found_bf16(uint32_t found, uint4 q)
{
    return __uint_as_float(__byte_perm(found & 4 ? q.z : found & 2 ? q.y : q.x, 0, found & 1 ? 0x3244u : 0x1044u));
}

/* Asks for 128 bytes at p to be brought into L2. */
MK_DEV void mk_prefetch(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

#endif
