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
    uint32_t word, half;      /* half: how a bf16's half of its word becomes an f32 (prmt) */
} mk_spot;

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
/* `index` counts the vector's values, which are f32 or bf16, and lies in the slices of the wait. */
MK_DEV mk_spot mk_spot_of(const mk_dev *d, uint32_t k, uint32_t index, bool f32)
{
    const mk_wait *w = &d->in->wait[k];
    const mk_vec *v = &d->sh->vec[w->vec];
    const mk_places *place = &((const mk_fed *)d->in)->place;
    uint32_t begin;
    const uint32_t s = mk_spot_slice(d, w, v, index, &begin), first = w->slice0;
    const uint32_t at = f32 ? index - begin : (index - begin) / 2, p = at / 3, packet = (s - first) * v->slice_packets + p;
    mk_spot q = {place->in[k] + packet, k, packet, v->nslice * v->slice_packets, place->epoch[k], at - 3 * p, index - begin & 1 ? 0x3244u : 0x1044u};
    mk_keep(&q.word); /* or they are worked out behind the wait */
    if (!f32) mk_keep(&q.half);
    return q;
}

/* A first look at its packet, well before it is needed. */
MK_DEV uint4 mk_spot_look(const mk_spot *s, uint32_t row)
{
    return mk_packet_load(s->at + row * s->row);
}
/* Waits for it, unless that look has found it. */
MK_DEV void mk_spot_wait(const mk_spot *s, uint32_t row, uint4 *q)
{
    uint32_t looks = 0;
    while (q->w != s->epoch && mk_still_waiting(++looks, s->k, row, s->packet, q->w)) *q = mk_spot_look(s, row);
    mk_waited(looks);
}
/* What it then carries there. */
MK_DEV uint32_t mk_spot_word(const mk_spot *s, uint4 q)
{
    return s->word == 0 ? q.x : s->word == 1 ? q.y : q.z;
}
MK_DEV float mk_spot_bf16(const mk_spot *s, uint4 q)
{
    return __uint_as_float(__byte_perm(mk_spot_word(s, q), 0, s->half));
}

/* Of one row: eight times the packet of value `index`, of bf16, counted from the first slice of the wait, and which of its six values it is. */
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
