/* Weights as a segment has them, and what ROUTE leaves, for instructions on the CPU. Behind the device code that takes of them. */
#ifndef MK_LANES_EXPERTS_H
#define MK_LANES_EXPERTS_H

/* Where the weight of row i and column c lies, of so many rows, from the first weight of their segment on; and its value, without its scale. */
static uint8_t *lanes_weight_at(uint8_t *weights, uint32_t wtype, uint32_t rows, uint32_t i, uint32_t c)
{
    const uint32_t per = mk_kblock_values(wtype), byte = c % per * (MK_KBLOCK_BYTES / per);
    return weights + mk_quarter_at(rows, c / per, byte / MK_QUARTER_BYTES, i) + byte % MK_QUARTER_BYTES;
}
static double lanes_weight(const uint8_t *at, uint32_t wtype)
{
    if (wtype == MK_W_FP8) return (double)mk_fp8_finite(*at);
    uint16_t h;
    memcpy(&h, at, sizeof h);
    return mk_widen_bf16(h);
}

/* Union and pairs of n rows, whose choices, ascending, are of experts below `experts`. */
static inline void lanes_route(mk_routes *routes, const uint32_t (*chosen)[MK_MAX_TOPK], uint32_t n, uint32_t topk, uint32_t experts)
{
    mk_pairs *pairs = &lanes_shared->pairs;
    uint32_t p = 0;
    routes->n_union = 0;
    for (uint32_t e = 0; e < experts; e++) {
        const uint32_t first = p, j = routes->n_union;
        for (uint32_t r = 0; r < n; r++) {
            routes->rank[r][j] = 255;
            for (uint32_t rank = 0; rank < topk; rank++) {
                if (chosen[r][rank] != e) continue;
                routes->rank[r][j] = pairs->rank[p] = (uint8_t)rank, pairs->row[p] = (uint8_t)r, pairs->expert[p] = (uint8_t)j;
                p++;
            }
        }
        if (p == first) continue;
        pairs->first[j] = (uint8_t)first, pairs->first[j + 1] = (uint8_t)p;
        routes->expert[routes->n_union++] = (uint16_t)e;
    }
}

#endif
