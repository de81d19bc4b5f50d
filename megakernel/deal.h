/* How the packets of a vector that an instruction gathers are shared among the warps, for its plan: what megakernel/plans.cuh makes on the host, and what gathering (instructions/gather_one.cuh,
 * gather_rows.cuh) goes by on the device. Behind device.cuh. */
#ifndef MK_DEAL_H
#define MK_DEAL_H

/* What takes a row of these, if anything does. */
static inline uint32_t mk_deal_one(uint32_t f32, uint32_t form, uint32_t pro)
{
#define X(a, b, c) if (f32 == a && form == b && pro == c) return MK_ONE(a, b, c);
    MK_ONES(X)
#undef X
    return 0;
}
static_assert(MK_DEAL_WARPS == MK_WARPS, "mk_vec_deal counts the warps that gather");

/* Hands, skip and by_per of a plan whose x, f32 and packets are there, for vector v (start: its slice starts), of which w is the wait. Returns what takes one row of it (MK_ONE); 0, and nothing is
 * written: slices are not alike, or a row does not fit. */
static inline uint32_t mk_deal_plan(const mk_vec *v, const uint32_t *start, const mk_wait *w, mk_plan *p)
{
    const uint32_t k = p->x.k, form = p->x.form;
    mk_deal d;
    if (k % 64 || (v->trailer && !p->x.norm_group) || (p->f32 && p->x.prologue != MK_PRO_RMS)) return 0;
    if (!mk_vec_deal(v, start, w->slice0, w->nslice, p->x.in_off, k, p->x.norm_group, &d)) {
        const int each = !p->f32 && p->x.prologue == MK_PRO_NONE && p->packets <= MK_COMPUTE && mk_row_stride(k) <= MK_STAGING;
        return each ? mk_deal_one(0, form, MK_ONE_FAR) : 0;
    }
    for (uint32_t s = w->slice0, end = p->x.in_off + k; p->f32; s++) /* who gathers f32 squares whole packets: the last one must not go on with values that nobody asked for */
        if (start[s + 1] >= end) {
            if (start[s + 1] > end && (end - start[s]) % 3) return 0;
            break;
        }
    const uint32_t groups = (k + d.values - 1) / d.values, turns = (groups + MK_WARPS - 1) / MK_WARPS * (d.packets > 32 ? 2 : 1);
    uint32_t pro = MK_ONE_FAR;
    if (p->x.norm_group)
        pro = MK_ONE_HEADS;
    else if (p->x.prologue == MK_PRO_RMS)
        pro = p->f32 && turns > MK_LOADS_OF(1, MK_ONE_RMS) ? MK_ONE_FAR : MK_ONE_RMS;
    else if (turns <= MK_LOADS_OF(0, MK_ONE_LONG))
        pro = turns == 1 ? MK_ONE_SHORT : turns <= MK_LOADS_OF(0, MK_ONE_PLAIN) ? MK_ONE_PLAIN : MK_ONE_LONG;
    const uint32_t one = mk_deal_one(p->f32, form, pro), trailers = p->x.norm_group ? 128 * groups : 0;
    if (!one || turns > MK_LOADS_OF(p->f32, pro) || mk_row_stride(k) + trailers > MK_STAGING) return 0;
    const mk_hands hands = {(uint8_t)d.packets, (uint8_t)d.values, (uint8_t)d.slice, (uint8_t)d.per};
    p->hands = hands;
    p->skip = (uint16_t)(d.per == 1 ? (p->x.in_off - start[w->slice0]) / d.slice : 0);
    p->by_per = MK_HAND_BY(d.per);
    return one;
}

#endif
