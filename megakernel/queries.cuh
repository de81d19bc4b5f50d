/* MLA_PARTIAL's queries by a table (mk_queries_places), which the host makes once for all instructions whose queries lie alike. Part of gpu.cu. */
#ifndef MK_QUERIES_CUH
#define MK_QUERIES_CUH

#include "instructions/attention.cuh"
#include "instructions/program.h"

/* Packet q of slice s of a wait: its first value; how many it has. */
static uint32_t packet_values(const uint32_t *start, uint32_t s, uint32_t q, uint32_t *value)
{
    *value = start[s] + 6 * q;
    return *value >= start[s + 1] ? 0 : start[s + 1] - *value < 6 ? start[s + 1] - *value : 6;
}
/* Writes the table of an MLA_PARTIAL's queries, at most `room` words; returns how many, 0: they do not lie as it can say, pairs in words, heads in slices of their own. */
static uint32_t queries_table(const mk_program *p, const mk_insn *in, uint32_t *out, uint32_t room)
{
    const mk_mla *m = &in->mla;
    const mk_vec *qt = &p->vec[in->wait[0].vec], *q = &p->vec[in->wait[1].vec];
    const uint32_t *latent = mk_vec_starts(p, qt) + in->wait[0].slice0, *turned = mk_vec_starts(p, q) + in->wait[1].slice0, places = mk_queries_places(m->heads);
    const uint32_t packets = in->wait[0].nslice * qt->slice_packets, all = places + 2 * packets;
    uint32_t value, n;
    if (all > room || m->rope % 32 || q->dtype != MK_BF16 || qt->dtype != MK_BF16) return 0;
    memset(out, 0, all * sizeof *out);
    for (uint32_t h = 0, s = 0; h <= m->heads; h++) {
        while (s < in->wait[0].nslice && latent[s] < h * m->latent) s++;
        if (latent[s] != h * m->latent) return 0;
        out[h] = s * qt->slice_packets;
    }
    for (uint32_t h = 0; m->rope && h < m->heads; h++) {
        const uint32_t first = m->in_off + h * m->qk_stride;
        uint32_t *slot = out + m->heads + 1 + h * MK_TURN_SLOTS, found = 0, had = 0;
        for (uint32_t s = 0; s < in->wait[1].nslice; s++)
            for (uint32_t k = 0; turned[s] < first + m->rope && turned[s + 1] > first && k < q->slice_packets; k++) {
                if (!(n = packet_values(turned, s, k, &value)) || value >= first + m->rope || value + n <= first) continue;
                const uint32_t at = s * q->slice_packets + k, lo = value < first ? first : value, hi = value + n < first + m->rope ? value + n : first + m->rope;
                if ((value - first) % 2 || n % 2 || found == MK_TURN_SLOTS || at > 0xffff) return 0;
                slot[found++] = MK_TURN_WORD(at, (int)(value - first) / 2, n / 2);
                had += hi - lo;
            }
        if (had != m->rope) return 0;
    }
    for (uint32_t s = 0; s < in->wait[0].nslice; s++)
        for (uint32_t k = 0; k < qt->slice_packets; k++) {
            uint32_t *to = out + places + 2 * (s * qt->slice_packets + k), at[3] = {0xffff, 0xffff, 0xffff};
            n = packet_values(latent, s, k, &value);
            const uint32_t h = value / m->latent, c = value % m->latent;
            if (n % 2 || (n && (value % 2 || c + n > m->latent))) return 0;
            for (uint32_t j = 0; 2 * j < n; j++) at[j] = mk_att_byte(h % 16, c + 2 * j);
            to[0] = at[0] | at[1] << 16;
            to[1] = at[2] | 0xffff0000u;
        }
    return all;
}

#endif
