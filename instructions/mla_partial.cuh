/* MLA_PARTIAL on the device: an item is a group of heads over one split (attention.cuh). Semantics: mla_partial.c. */
#ifndef MK_MLA_PARTIAL_CUH
#define MK_MLA_PARTIAL_CUH

#include "instructions/attention.cuh"
#include "instructions/kv_append.cuh"

/* q~ of heads [h0, h0 + heads), whose values follow each other in wait 0. */
MK_DEV void mk_mla_latents(const mk_dev *d, const mk_mla *m, uint32_t r, uint32_t h0, uint32_t heads)
{
    constexpr uint32_t NP = 3; /* packets in flight: eight heads of 512 are 683 */
    const mk_wait *w = &d->in->wait[0];
    const mk_vec *v = &d->sh->vec[w->vec];
    const uint16_t *start = d->sh->start + v->start_index + w->slice0;
    const uint4 *base = mk_wait_packets(d, w, v, r);
    const uint32_t latent = m->latent, first = h0 * latent, end = first + heads * latent, sp = v->slice_packets, epoch = mk_wait_epoch(d, w);
    const uint32_t s0 = mk_find_slice(start, w->nslice, first, d->lane);
    const mk_divisor by = mk_div_by_slice(v), by_head = mk_div_by(latent);
    uint8_t *q = d->sh->staging;
#pragma unroll 1
    for (uint32_t i0 = d->tid;; i0 += NP * MK_COMPUTE) {
        uint4 x[NP];
        int at[NP], to[NP]; /* the packet's first value and the end of its values, from head h0's first on */
        uint32_t from[NP], more = 0;
#pragma unroll
        for (uint32_t k = 0; k < NP; k++) {
            const uint32_t i = i0 + k * MK_COMPUTE, s = s0 + mk_quot(i, by), p = i - (s - s0) * sp;
            at[k] = to[k] = 0;
            from[k] = s * sp + p;
            x[k] = make_uint4(0, 0, 0, epoch);
            if (s >= w->nslice || start[s] >= end) continue;
            more = 1;
            at[k] = (int)(start[s] + 6 * p) - (int)first;
            to[k] = (int)(start[s + 1] < end ? start[s + 1] : end) - (int)first;
            if (at[k] < to[k]) x[k] = mk_packet_load(base + from[k]);
        }
        if (!more) break;
        mk_packets_wait(base, from, (1u << NP) - 1, epoch, 0, r, 0, x);
#pragma unroll
        for (uint32_t k = 0; k < NP; k++) {
            if (at[k] >= to[k]) continue;
            const uint32_t word[3] = {x[k].x, x[k].y, x[k].z}, h = at[k] < 0 ? 0 : mk_quot((uint32_t)at[k], by_head), c = (uint32_t)at[k] - h * latent;
            const int left = to[k] - at[k], n = left < 6 ? left : 6;
            if (at[k] >= 0 && !((at[k] | n) & 1) && c + (uint32_t)n <= latent) { /* pairs of one head */
                uint8_t *row = mk_att_at(q, h, 0);
#pragma unroll
                for (uint32_t j = 0; j < 3; j++)
                    if (2 * (int)j < n) *(uint32_t *)mk_att_at(row, 0, c + 2 * j) = word[j];
            } else {
#pragma unroll 1
                for (int e = at[k] < 0 ? -at[k] : 0; e < n; e++) {
                    const uint32_t v = (uint32_t)(at[k] + e), h = mk_quot(v, by_head), w = e < 2 ? word[0] : e < 4 ? word[1] : word[2];
                    *(uint16_t *)mk_att_at(q, h, v - h * latent) = (uint16_t)(w >> (16 * (e & 1)));
                }
            }
        }
    }
}

/* q_pe of head h0 + h, by one warp; with it whatever of the last block it does not cover, as zeros. */
MK_DEV void mk_mla_positional(const mk_dev *d, const mk_mla *m, uint32_t r, uint32_t h0, uint32_t h, uint32_t two)
{
    const uint32_t latent = m->latent, rope = m->rope, pad = (rope + 31) & ~31u;
    const mk_att_queries of = {latent + rope, latent / 32, two};
    float *x = (float *)(d->sh->staging + mk_att_query_bytes(of.nk, of.fine)) + d->warp * pad;
    float freq = 0;
    if (m->rotary && d->lane < rope / 2) freq = __ldg(d->a->param + m->param_off + latent + d->lane);
    __syncwarp(); /* the head before is read */
    if (rope + d->lane < pad) x[rope + d->lane] = 0;
    if (rope) mk_read_together(d, 1, r, m->in_off + (h0 + h) * m->qk_stride, rope, x, d->lane, 32);
    if (m->rotary) {
#pragma unroll 1
        for (uint32_t i = d->lane; i < rope / 2; i += 32) {
            if (i >= 32) freq = __ldg(d->a->param + m->param_off + latent + i);
            mk_rotate_pair(x + 2 * i, x + 2 * i + 1, freq, d->step->row[r].pos);
        }
        __syncwarp();
    }
#pragma unroll 1
    for (uint32_t c = 2 * d->lane; c < pad; c += 64) mk_att_put(d->sh->staging, &of, h, latent + c, x[c], x[c + 1]);
}

/* Heads of an item of a row, by eight. */
MK_DEV uint32_t mk_mla_eights(const mk_mla *m, const mk_row *row)
{
    return min(mk_head_group(row->pos, m->heads), m->heads) > 8 ? 2 : 1;
}
/* So many heads over split `split` of a row, of `per` pages; dst is still to be said. */
template <bool FP8> MK_DEV mk_att mk_mla_item(const mk_dev *d, const mk_mla *m, const mk_row *row, uint32_t split, uint32_t per, uint32_t heads)
{
    const uint32_t n = m->latent + m->rope, cache = FP8 ? MK_CACHE_FP8 : MK_CACHE_ACT, bytes = mk_latent_row_bytes(m->latent, m->rope, cache, 2);
    mk_att x;
    x.pages = d->a->page + (size_t)row->slot * d->a->max_pages + split * per;
    x.base = d->a->kv + m->kv_off;
    x.bytes = bytes;
    x.rest_at = mk_latent_key_at(m->latent, cache, 2) - 2 * m->latent;
    x.nk = n;
    x.nv = m->latent;
    x.fine = m->latent / 32;
    x.heads = heads;
    x.first = split * per * MK_PAGE;
    x.n = min(row->pos + 1 - x.first, per * MK_PAGE);
    x.scale = m->scale;
    x.ask_at = x.ask = 0;
    return x;
}
/* Of its pages it asks for as much as its heads are of all: others' items read the same pages. */
MK_DEV void mk_mla_ask(mk_att *x, const mk_mla *m, uint32_t h0, uint32_t heads)
{
    if (x->n <= MK_PAGE) return;
    const uint32_t each = mk_page_quot(x->bytes * MK_PAGE / 16, m->heads);
    x->ask_at = 16 * each * h0;
    x->ask = h0 + heads < m->heads ? 16 * each * heads : x->bytes * MK_PAGE - x->ask_at;
}
/* Sine and cosine of the pairs of q_pe of every row, rope / 2 a row: of heads without norms, which need the room. */
MK_DEV float2 *mk_mla_angles(mk_shared *sh)
{
    static_assert(sizeof sh->head_rstd >= MK_MAX_ROWS * MK_ATT_RING_ROPE / 2 * sizeof(float2), "of each row");
    return (float2 *)sh->head_rstd;
}
MK_DEV void mk_mla_angles_make(const mk_dev *d, const mk_mla *m)
{
    const uint32_t half = m->rope / 2;
#pragma unroll 1
    for (uint32_t i = d->tid; i < d->step->nrows * half; i += MK_COMPUTE) {
        const uint32_t r = mk_small_quot(i, half);
        float s = 0, c = 1;
        if (m->rotary) mk_sincosf(mk_mul((float)d->step->row[r].pos, __ldg(d->a->param + m->param_off + m->latent + i - r * half)), &s, &c);
        mk_mla_angles(d->sh)[i] = make_float2(s, c);
    }
}
/* By the host's table (mk_queries_places): the pairs of head h's q_pe that packet x carries, `turn` being its word; angle: of a pair. */
template <typename A> MK_DEV void mk_mla_put_turned(mk_shared *sh, const mk_mla *m, const mk_att_queries *of, uint32_t h, uint32_t turn, uint4 x, A angle)
{
#pragma unroll 1
    for (uint32_t j = 0; j < MK_TURN_PAIRS(turn); j++) {
        const uint32_t p = MK_TURN_PAIR(turn) + j, word = j == 0 ? x.x : j == 1 ? x.y : x.z;
        if (p >= m->rope / 2u) continue;
        float2 y = make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
        if (m->rotary) y = mk_rotated(y.x, y.y, angle(p));
        mk_att_put(sh->staging, of, h, m->latent + 2 * p, y.x, y.y);
    }
}
/* And the words of a packet of q~, whose places `to` says; keep: what counts of a place, whose bit for heads above seven (mk_att_byte) does only where an item may have as many. */
MK_DEV uint32_t mk_mla_keep(bool two)
{
    return two ? 0xffffffffu : ~0x00040004u;
}
MK_DEV void mk_mla_put_placed(uint32_t q, uint2 to, uint32_t keep, uint4 x)
{
    const uint32_t lo = to.x & keep, hi = to.y & keep;
    if (~lo & 0x8000u) mk_sts32(q + (lo & 0xffffu), x.x);
    if (~lo & 0x80000000u) mk_sts32(q + (lo >> 16), x.y);
    if (~hi & 0x8000u) mk_sts32(q + (hi & 0xffffu), x.z);
}
/* The queries of heads [h0, h0 + heads) of row r by that table: a thread a packet of q_pe, then q~. */
template <uint32_t NH> MK_DEV void mk_mla_queries(const mk_dev *d, const mk_mla *m, uint32_t table, uint32_t r, uint32_t h0, uint32_t heads)
{
    constexpr uint32_t NP = 3; /* packets in flight: eight heads of 512 are 683 */
    static_assert(MK_ATT_HEADS * MK_TURN_SLOTS <= MK_COMPUTE, "a thread a packet");
    const uint32_t *const map = d->a->map + table;
    const mk_wait *w = &d->in->wait[0], *v = &d->in->wait[1];
    const uint32_t h = d->tid / MK_TURN_SLOTS, end = __ldg(map + h0 + heads), keep = mk_mla_keep(NH > 1);
    const uint32_t turn = m->rope && h < heads ? __ldg(map + m->heads + 1 + h0 * MK_TURN_SLOTS + d->tid) : 0;
    const uint4 *pe = mk_wait_packets(d, v, &d->sh->vec[v->vec], r), *packets = mk_wait_packets(d, w, &d->sh->vec[w->vec], r);
    const uint32_t epoch = mk_wait_epoch(d, w), pe_epoch = mk_wait_epoch(d, v), q = mk_smem(d->sh->staging), at[1] = {MK_TURN_PACKET(turn)};
    const mk_att_queries of = {(uint32_t)m->latent + m->rope, m->latent / 32u, NH > 1};
    const uint2 *const places = (const uint2 *)(map + mk_queries_places(m->heads));
    uint4 y[1] = {{0, 0, 0, pe_epoch}};
    if (turn) y[0] = mk_packet_load(pe + at[0]);
    bool turned = false;
#pragma unroll 1
    for (uint32_t i = __ldg(map + h0) + d->tid; !turned || __any_sync(0xffffffffu, i < end); i += NP * MK_COMPUTE) { /* a warp may have q_pe alone */
        uint2 to[NP];
        uint4 x[NP];
        uint32_t wanted = 0;
#pragma unroll
        for (uint32_t k = 0; k < NP; k++) {
            to[k] = make_uint2(0xffffffffu, 0xffffffffu);
            x[k] = make_uint4(0, 0, 0, epoch);
            if (i + k * MK_COMPUTE >= end) continue;
            to[k] = __ldg(places + i + k * MK_COMPUTE);
            x[k] = mk_packet_load(packets + i + k * MK_COMPUTE);
        }
#pragma unroll
        for (uint32_t k = 0; k < NP; k++) wanted |= to[k].x & 0x8000u ? 0 : 1u << k;
        if (!turned) {
            turned = true;
            mk_packets_wait(pe, at, turn != 0, pe_epoch, 1, r, 0, y);
            mk_mla_put_turned(d->sh, m, &of, h, turn, y[0], [&](uint32_t p) { return mk_mla_angles(d->sh)[r * m->rope / 2 + p]; });
        }
        mk_packets_wait_every(packets + i, MK_COMPUTE, wanted, epoch, 0, r, i, x);
#pragma unroll
        for (uint32_t k = 0; k < NP; k++) mk_mla_put_placed(q, to[k], keep, x[k]);
    }
}

/* The items of rows with NH times eight heads an item: a function each, for the registers are tight. Rows that share theirs (mk_mla_together) follow each other over a page that stays in
 * registers, if the split has no more; only a split with tokens of this step waits for KV_APPEND. */
template <uint32_t NH, bool FP8> MK_CALL void mk_mla_items(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    const mk_mla *m = &d->in->mla;
    const uint32_t floats = mk_partial_floats(m->latent), rows = d->step->nrows, table = m->rope <= MK_ATT_RING_ROPE ? mk_fed_of(in)->plan.queries : 0;
    const mk_att_share w = mk_att_deal(m->latent);
    const mk_wait *cache = &d->in->wait[2];
    bool begun = false;
    uint32_t base = 0; /* items of the rows before, modulo the parts */
    if (table) mk_mla_angles_make(d, m);
#pragma unroll 1
    for (uint32_t r = 0, together; r < rows; r += together) {
        const mk_row *row = &d->step->row[r];
        together = mk_mla_together(m, d->step, r);
        const uint32_t pos = row[together - 1].pos, per = mk_split_pages(pos, m->grain, m->most), group = mk_head_group(pos, m->heads);
        const mk_divisor groups = mk_div_by((m->heads + group - 1) / group);
        const uint32_t items = (mk_page_quot(pos / MK_PAGE, per) + 1) * groups.n;
        uint32_t i = mk_first_item(m->part, m->parts, base);
        base = (base + items) % m->parts;
        if (mk_mla_eights(m, row) != NH) continue;
#pragma unroll 1
        for (; i < items; i += m->parts) {
            const uint32_t split = mk_quot(i, groups), h0 = (i - split * groups.n) * group, left = m->heads - h0, heads = left < group ? left : group;
            mk_att_regs regs;
            mk_att x = mk_mla_item<FP8>(d, m, row + together - 1, split, per, heads);
            const uint32_t n = x.n;
            mk_mla_ask(&x, m, h0, heads);
            x.dst = (float *)mk_bulk_at(d, d->in->signal_vec) + ((size_t)split * m->all_heads + h0) * floats;
            const bool fresh = cache && mk_has_fresh(row, r, x.first + n);
            mk_att_begin<NH, FP8>(d, &x, &w, fresh ? cache : (const mk_wait *)0, &regs);
            if (fresh) cache = 0;
            begun = true;
            bool again = false;
#pragma unroll 1
            for (uint32_t k = 0; k < together; k++) {
                if (row[k].pos < x.first) continue; /* it ends before the split */
                if (again) mk_sync(); /* the row before is through with shared memory */
                if (again && n > MK_PAGE) {
                    const uint8_t *page = mk_att_page(d->a, x.base, mk_att_sh(d->sh)->page[0]);
                    mk_att_load<FP8>(&regs, page, &x, &w, MK_PAGE, d->lane);
                    if (NH == 1) mk_att_fetch_rest<FP8>(d->sh, page, &x, &w, MK_PAGE);
                }
                if (d->tid == 0) {
                    mk_att own = x;
                    own.n = min(row[k].pos + 1 - x.first, n);
                    own.dst = x.dst + (size_t)(r + k) * MK_MAX_SPLITS * m->all_heads * floats;
                    mk_att_keep(d->sh, &own);
                }
                if (table) {
                    mk_mla_queries<NH>(d, m, table, r + k, h0, heads);
                } else {
#pragma unroll 1
                    for (uint32_t h = d->warp; h < heads; h += MK_WARPS) mk_mla_positional(d, m, r + k, h0, h, NH > 1);
                    mk_mla_latents(d, m, r + k, h0, heads);
                }
                mk_sync();
                mk_trace_input(d);
                mk_attend<NH, FP8>(d->sh, &regs, again && n <= MK_PAGE);
                again = true;
            }
        }
    }
    if (begun && cache) mk_counter_wait(d, 2); /* as the program says */
}

/* q_pe of a head in a step of one row, asked for before, turned by the controller's angles. */
MK_DEV void mk_mla_positional_one(const mk_dev *d, const mk_mla *m, const mk_fed *f, mk_asked *asked, uint32_t h0, uint32_t h, uint32_t two)
{
    const uint32_t latent = m->latent, rope = m->rope, pad = (rope + 31) & ~31u;
    const mk_att_queries of = {latent + rope, latent / 32, two};
    float *x = (float *)(d->sh->staging + mk_att_query_bytes(of.nk, of.fine)) + d->warp * pad;
    __syncwarp(); /* the head before is read */
    if (rope + d->lane < pad) x[rope + d->lane] = 0;
    mk_asked_take(asked, d, &d->in->wait[1], 1, 0, f->place.in[1], f->place.epoch[1], m->in_off + (h0 + h) * m->qk_stride, rope, x);
#pragma unroll 1
    for (uint32_t i = d->lane; i < pad / 2; i += 32) {
        float2 y = ((const float2 *)x)[i];
        if (m->rotary && i < rope / 2) y = mk_rotated(y.x, y.y, d->sh->angle[i]);
        mk_att_put(d->sh->staging, &of, h, latent + 2 * i, y.x, y.y);
    }
}

/* Both parts of the queries: q~ is asked for, then q_pe is dealt with. The host's map says what a packet carries; where its words go is noted in shared memory while they are
 * on their way, by a loop, for code that runs once comes from L2, so that nothing but their stores is left when they are there. */
MK_DEV void mk_mla_queries_one(const mk_dev *d, const mk_mla *m, const mk_fed *f, mk_asked *asked, uint32_t h0, uint32_t heads, uint32_t two)
{
    constexpr uint32_t NP = 4; /* packets in flight: eight heads of 512 are 683, and what slices that are not alike leave free */
    const mk_wait *wait = &d->in->wait[0];
    const mk_vec *v = &d->sh->vec[wait->vec];
    const uint16_t *start = d->sh->start + v->start_index + wait->slice0;
    const uint32_t latent = m->latent, first = h0 * latent, n = heads * latent, sp = v->slice_packets, epoch = f->place.epoch[0];
    const uint32_t *map = d->a->map + f->plan.map;
    const mk_divisor by_head = mk_div_by(latent);
    uint8_t *q = d->sh->staging;
    uint4 *mine = (uint4 *)(q + mk_att_query_bytes(latent + m->rope, latent / 32) + 8192) + d->tid; /* behind what the rest of an item's set-up uses */
    static_assert(8192 + NP * MK_COMPUTE * 16 <= MK_ATT_SCORES - MK_ATT_REST && 8192 >= 4 * (MK_WARPS * 128 + 640), "where the scores will be");
    uint32_t h = m->rope ? d->warp : heads;
    uint32_t i0 = mk_find_slice(start, wait->nslice, first, d->lane) * sp;
    const uint32_t end = (mk_find_slice(start, wait->nslice, first + n - 1, d->lane) + 1) * sp;
#pragma unroll 1
    for (; i0 < end; i0 += NP * MK_COMPUTE) {
        const uint4 *base = f->place.in[0] + i0 + d->tid;
        uint4 x[NP];
        uint32_t word[NP], wanted = 0, odd = 0; /* packets; those with words of two heads, or half of them */
#pragma unroll
        for (uint32_t k = 0; k < NP; k++) {
            const uint32_t i = min(i0 + d->tid + k * MK_COMPUTE, end - 1);
            x[k] = mk_packet_load(f->place.in[0] + i);
            word[k] = __ldg(map + i);
        }
#pragma unroll 1
        for (; h < heads; h += MK_WARPS) {
            if (h >= MK_WARPS) mk_asked_for(asked, d, &d->in->wait[1], f->place.in[1], f->place.epoch[1], m->in_off + (h0 + h) * m->qk_stride, m->rope);
            mk_mla_positional_one(d, m, f, asked, h0, h, two);
        }
#pragma unroll
        for (uint32_t k = 0; k < NP; k++) mine[k * MK_COMPUTE].w = i0 + d->tid + k * MK_COMPUTE < end ? word[k] : MK_MAP_NONE;
#pragma unroll 1
        for (uint32_t k = 0; k < NP; k++) {
            uint4 *to = mine + k * MK_COMPUTE;
            const uint32_t now = to->w, from = MK_MAP_FIRST(now), at = from - first, count = MK_MAP_VALUES(now), has = min(count, n - at); /* at: huge if some are a head's before */
            const bool some = count && from < first + n && from + count > first;
            const uint32_t g = mk_quot(at, by_head), c = at - g * latent;
            const bool plain = some && from >= first && !((at | has) & 1) && c + has <= latent;
            const uint32_t nowhere = mk_smem(&to->w);
            uint32_t a[3];
#pragma unroll
            for (uint32_t j = 0; j < 3; j++) a[j] = plain && 2 * j < has ? mk_smem(mk_att_at(q, g, c + 2 * j)) : nowhere;
            to->x = a[0], to->y = a[1], to->z = a[2];
            wanted |= some ? 1u << k : 0;
            odd |= some && !plain ? 1u << k : 0;
        }
        mk_packets_wait_every(base, MK_COMPUTE, wanted, epoch, 0, 0, i0 + d->tid, x);
        uint4 to[NP];
#pragma unroll
        for (uint32_t k = 0; k < NP; k++) to[k] = mine[k * MK_COMPUTE];
#pragma unroll
        for (uint32_t k = 0; k < NP; k++) {
            mk_sts32(to[k].x, x[k].x);
            mk_sts32(to[k].y, x[k].y);
            mk_sts32(to[k].z, x[k].z);
        }
        if (odd)
#pragma unroll
            for (uint32_t k = 0; k < NP; k++) mine[k * MK_COMPUTE] = make_uint4(x[k].x, x[k].y, x[k].z, to[k].w);
#pragma unroll 1
        for (uint32_t k = 0; odd >> k; k++) {
            if (!(odd >> k & 1)) continue;
            const uint4 y = mine[k * MK_COMPUTE];
            const int at = (int)(MK_MAP_FIRST(y.w) - first);
#pragma unroll 1
            for (uint32_t e = 0; e < MK_MAP_VALUES(y.w); e++) {
                const uint32_t b = (uint32_t)at + e, g = mk_quot(b, by_head), pair = e < 2 ? y.x : e < 4 ? y.y : y.z;
                if (b < n) *(uint16_t *)mk_att_at(q, g, b - g * latent) = (uint16_t)(pair >> (16 * (e & 1)));
            }
        }
    }
}

/* What an item's queries are made of and for. */
typedef struct mk_mla_share {
    uint32_t split, h0, heads;
} mk_mla_share;
MK_DEV mk_mla_share mk_mla_share_of(const mk_mla *m, uint32_t pos, uint32_t item)
{
    const uint32_t group = mk_head_group(pos, m->heads), groups = (m->heads + group - 1) / group;
    const uint32_t split = mk_page_quot(item, groups), h0 = (item - split * groups) * group, left = m->heads - h0;
    const mk_mla_share s = {split, h0, left < group ? left : group};
    return s;
}

/* Whether an item's first page comes through the ring: not if it has the newest token. */
MK_DEV bool mk_mla_ringed(uint32_t split, uint32_t per, uint32_t pos)
{
    return split * per < pos / MK_PAGE;
}

/* Packets `every` apart, of which those that nobody wants have the epoch in q already and the others another. By all lanes of a warp, as mk_packets_wait<N, true>. */
template <uint32_t N> MK_DEV void mk_aside_wait(const uint4 *base, uint32_t every, uint32_t epoch, uint32_t k, uint32_t first, uint4 (&q)[N])
{
    uint32_t looks = 0;
    for (;;) {
        uint32_t late = 0;
#pragma unroll
        for (uint32_t j = 0; j < N; j++) late |= q[j].w ^ epoch;
        if (!__any_sync(0xffffffffu, late)) break;
#pragma unroll
        for (uint32_t j = 0; j < N; j++) mk_packet_again(&q[j], base + j * every, q[j].w != epoch);
        if (__builtin_expect((++looks & 255u) != 0, 1)) continue;
        uint32_t packet = 0, found = epoch;
#pragma unroll
        for (uint32_t j = 0; j < N; j++)
            if (q[j].w != epoch) packet = first + j * every, found = q[j].w;
        if (__any_sync(0xffffffffu, found != epoch && !mk_still_waiting(looks, k, 0, packet, found))) break;
    }
    mk_waited(looks);
}

/* The queries of the worker's first item by the warps aside (aside.cuh), while compute warps make others' q~ and then take keys: what comes before the packets, which are then
 * in the host's table (mk_queries_places), would else be on the way of the token. Bits as above. */
MK_DEV void mk_mla_aside(mk_shared *sh, const mk_fed *f, uint32_t warp, uint32_t lane)
{
    constexpr uint32_t NP = 6, EVERY = MK_ASIDES * 32; /* packets in flight of a thread: eight heads of 512 are some 700 */
    static_assert(MK_ATT_HEADS * MK_TURN_SLOTS == 2 * EVERY, "a thread has two packets of q_pe at most");
    const mk_mla *m = &f->in.mla;
    const mk_mla_share item = mk_mla_share_of(m, sh->step.row[0].pos, m->part);
    const uint32_t two = mk_mla_eights(m, &sh->step.row[0]) > 1; /* of the row: its last item may have fewer heads, and is dealt with alike */
    const uint32_t tid = warp * 32 + lane, table = f->plan.queries, keep = mk_mla_keep(two);
    const uint32_t *const map = sh->args.map, end = __ldg(map + (table + item.h0 + item.heads));
    uint32_t i = __ldg(map + (table + item.h0)) + tid;
    const uint32_t h = tid / MK_TURN_SLOTS, further = EVERY / MK_TURN_SLOTS, *const turns = map + (table + m->heads + 1 + item.h0 * MK_TURN_SLOTS + tid);
    const uint32_t turn[2] = {m->rope && h < item.heads ? __ldg(turns) : 0, m->rope && h + further < item.heads ? __ldg(turns + EVERY) : 0};
    const uint2 *const places = (const uint2 *)(map + (table + mk_queries_places(m->heads)));
    uint2 to[NP]; /* of the next packets of q~ */
    const auto ask = [&] {
        const uint2 *const from = mk_keep_at(places + i); /* else the address is worked out under each condition */
#pragma unroll
        for (uint32_t k = 0; k < NP; k++) to[k] = i + k * EVERY < end ? __ldg(from + k * EVERY) : make_uint2(0xffffffffu, 0xffffffffu);
    };
    ask();
    mk_aside_after(sh, f->place.after);
    const mk_att_queries of = {(uint32_t)m->latent + m->rope, m->latent / 32u, two};
    { /* q_pe, and only then q~, which comes with it or later: what is looked at is in the way of what is waited for */
        const uint32_t packet = MK_TURN_PACKET(turn[0]), epoch = f->place.epoch[1];
        uint4 x[2] = {{0, 0, 0, turn[0] ? ~epoch : epoch}, {0, 0, 0, turn[1] ? ~epoch : epoch}};
        mk_aside_wait<2>(f->place.in[1] + packet, turn[1] ? MK_TURN_PACKET(turn[1]) - packet : 0, epoch, 1, packet, x);
#pragma unroll 1
        for (uint32_t k = 0; k < 2; k++)
            if (__any_sync(0xffffffffu, k ? turn[1] : turn[0])) mk_mla_put_turned(sh, m, &of, h + k * further, k ? turn[1] : turn[0], k ? x[1] : x[0], [&](uint32_t p) { return sh->angle[p]; });
    }

    const uint32_t q = mk_smem(sh->staging), epoch = f->place.epoch[0];
#pragma unroll 1
    while (__any_sync(0xffffffffu, i < end)) {
        uint4 x[NP] = {};
#pragma unroll
        for (uint32_t k = 0; k < NP; k++) x[k].w = to[k].x & 0x8000u ? epoch : ~epoch;
        mk_aside_wait<NP>(f->place.in[0] + i, EVERY, epoch, 0, i, x);
#pragma unroll
        for (uint32_t k = 0; k < NP; k++) mk_mla_put_placed(q, to[k], keep, x[k]);
        i += NP * EVERY;
        if (__any_sync(0xffffffffu, i < end)) ask();
    }
}

/* A step of one row: only who has the item that ends with it waits for the cache, be it the loader, if the item has pages before; what is in it of earlier steps was written before the signal of the
 * partials of its own step, which this step's descriptor is a consequence of. Bits as above. Returns the vector to be signalled: the caller has no register to keep it in. */
template <uint32_t NH, bool FP8> MK_CALL uint32_t mk_mla_one(uint32_t insn)
{
    const mk_insn *in = mk_insn_at(insn);
    const mk_dev here = mk_here(in), *d = &here;
    const mk_fed *f = mk_fed_of(in);
    const mk_mla *m = &d->in->mla;
    const uint32_t floats = mk_partial_floats(m->latent), per = f->place.per, items = f->place.items, pos = d->step->row[0].pos;
    uint32_t number = 0;
#pragma unroll 1
    for (uint32_t i = m->part; i < items; i += m->parts, number++) {
        const mk_mla_share item = mk_mla_share_of(m, pos, i);
        const bool aside = !number && f->place.run & MK_AWAITS;
        mk_att_regs regs;
        mk_att x = mk_mla_item<FP8>(d, m, &d->step->row[0], item.split, per, item.heads);
        x.dst = (float *)mk_bulk_at(d, d->in->signal_vec) + ((size_t)item.split * m->all_heads + item.h0) * floats;
        mk_asked asked = {};
        if (!aside)
            mk_asked_for(&asked, d, &d->in->wait[1], f->place.in[1], f->place.epoch[1], m->in_off + (item.h0 + d->warp) * m->qk_stride, d->warp < item.heads ? m->rope : 0);
        const bool ringed = mk_mla_ringed(item.split, per, pos);
        if (!ringed) mk_counter_wait(d, 2);
        const mk_att_share w = mk_att_deal(m->latent);
        mk_att_begin_one<NH, FP8>(d, &x, &w, number < 2 ? f->place.page[number] : __ldcg(x.pages), ringed, &regs);
        if (aside)
            mk_aside_await(d->sh, f);
        else
            mk_mla_queries_one(d, m, f, &asked, item.h0, item.heads, NH > 1);
        mk_sync();
        if (!number) mk_trace_input(d);
        mk_attend_one<NH, FP8>(d->sh, &regs);
    }
    return in->signal_vec;
}
MK_CALL void mk_mla_one_run(uint32_t insn)
{
    const mk_insn *in = mk_insn_at(insn);
    const mk_dev here = mk_here(in), *d = &here;
    mk_staged_drop(d);
    const bool eight = mk_mla_eights(&in->mla, &d->step->row[0]) == 1;
    uint32_t vec;
    if (in->mla.cache == MK_CACHE_FP8)
        vec = eight ? mk_mla_one<1, true>(insn) : mk_mla_one<2, true>(insn);
    else
        vec = eight ? mk_mla_one<1, false>(insn) : mk_mla_one<2, false>(insn);
    mk_bulk_signal(d, vec);
}

MK_DEV void mk_mla_partial_run(const mk_insn *in)
{
    const mk_dev here = mk_here(in), *d = &here;
    uint32_t eights = 0; /* bit n: rows with n */
    for (uint32_t r = 0; r < d->step->nrows; r++) eights |= 1u << mk_mla_eights(&in->mla, &d->step->row[r]);
    mk_staged_drop(d);
    const bool fp8 = in->mla.cache == MK_CACHE_FP8;
    if (eights & 2) fp8 ? mk_mla_items<1, true>(in) : mk_mla_items<1, false>(in);
    if (eights & 4) fp8 ? mk_mla_items<2, true>(in) : mk_mla_items<2, false>(in);
    mk_bulk_signal(d, in->signal_vec);
}

#endif
