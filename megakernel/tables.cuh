/* Tables in args.map that instructions go by, looked up by the host once for all layers whose values lie alike; and those of DELTA_STEP: where its threads find their values in a step of one
 * row (mk_delta_places). Part of gpu.cu. */
#ifndef MK_TABLES_CUH
#define MK_TABLES_CUH

#include "instructions/delta_places.cuh"
#include "instructions/program.h"

/* An instruction and where the table that it and those like it go by is: an MLA_PARTIAL's queries (mk_queries_places), a DELTA_STEP's values. at 0: it has none. */
typedef struct mk_table {
    uint32_t insn, at;
} mk_table;

/* Whether the first n waits are for the same slices, of whatever publication. */
static int waits_alike(const mk_insn *a, const mk_insn *b, uint32_t n)
{
    for (uint32_t k = 0; k < n; k++)
        if (a->wait[k].vec != b->wait[k].vec || a->wait[k].slice0 != b->wait[k].slice0 || a->wait[k].nslice != b->wait[k].nslice) return 0;
    return 1;
}
static const mk_table *table_of(const mk_program *p, const mk_table *table, uint32_t n, int (*alike)(const mk_insn *, const mk_insn *), const mk_insn *in)
{
    for (uint32_t i = 0; i < n; i++)
        if (alike(&p->insn[table[i].insn], in)) return &table[i];
    return NULL;
}
/* A list of n entries with room for one more, perhaps moved: it grows at powers of two. NULL: out of memory. */
static void *room_for_one(void *list, uint32_t n, size_t size)
{
    return n & n - 1 ? list : realloc(list, (n ? 2 * n : 1) * size);
}

#define MK_DELTA_TABLE_WORDS ((uint32_t)sizeof(mk_delta_places) / 4)

static int deltas_alike(const mk_insn *a, const mk_insn *b)
{
    const mk_delta *x = &a->delta, *y = &b->delta;
    return waits_alike(a, b, 3) && x->q_off == y->q_off && x->k_off == y->k_off && x->v_off == y->v_off && x->f_off == y->f_off && x->z_off == y->z_off && x->b_off == y->b_off && x->dv == y->dv &&
           x->decay == y->decay && x->rank == y->rank && (!x->rank || x->low[0].wtype == y->low[0].wtype);
}
/* All that the program's instructions want, without their places: *n of them, in a list that is the caller's, also after a failure. */
static int deltas_wanted(const mk_program *p, mk_table **delta, uint32_t *n, mk_err *err)
{
    for (uint32_t k = 0; k < p->info.n_insn; k++) {
        if (p->insn[k].opcode != MK_OP_DELTA_STEP || table_of(p, *delta, *n, deltas_alike, &p->insn[k])) continue;
        mk_table *more = (mk_table *)room_for_one(*delta, *n, sizeof *more);
        if (!more) return mk_fail(err, MK_E_CAPACITY, "out of memory");
        *delta = more;
        more[(*n)++] = (mk_table){k, 0};
    }
    return MK_OK;
}

/* Where value `index` of wait k is, as mk_delta_found says it; *word: what would say it of a warp whose first value it is. 0: not among the wait's. */
static int delta_find(const mk_program *p, const mk_insn *in, uint32_t k, uint32_t index, uint32_t *found, uint32_t *word)
{
    const mk_wait *w = &in->wait[k];
    const mk_vec *v = &p->vec[w->vec];
    const uint32_t *start = mk_vec_starts(p, v) + w->slice0;
    uint32_t s = 0;
    while (s < w->nslice && start[s + 1] <= index) s++;
    if (s == w->nslice || index < start[s]) return 0;
    const uint32_t packet = s * v->slice_packets, at = index - start[s];
    const uint32_t cut = s + 1 < w->nslice ? start[s + 1] - index : 64, cut2 = s + 2 < w->nslice ? start[s + 2] - index : 64;
    *found = (packet + at / 6) * 8 + at % 6;
    *word = packet > MK_DELTA_MOST(13) || at > MK_DELTA_MOST(7) ? 0xffffffffu : MK_DELTA_WORD(packet, at, cut < 64 ? cut : 0, cut2 < 64 ? cut2 : 0);
    return 1;
}
/* Writes the table of a DELTA_STEP. 0: there is none, for words cannot say where all values lie, and steps of one row go the way of several. */
static int delta_table(const mk_program *p, const mk_insn *in, mk_delta_places *out)
{
    const mk_delta *e = &in->delta;
    const bool low = e->rank != 0, head = !low && e->decay == MK_DECAY_HEAD, fp8 = low && e->low[0].wtype == MK_W_FP8;
    const uint32_t units = mk_delta_units(e, low, head);
    for (uint32_t t = 0; t < MK_DELTA_WARPS * 32; t++) {
        const uint32_t warp = t / 32, lane = t % 32, mine = mk_delta_channel(e, t);
        const mk_delta_unit unit = mk_delta_unit_of(e, low, head, warp, units, lane, mine);
        const uint32_t first = mk_delta_input(fp8, warp % 4, 0), input = mk_delta_input(fp8, warp % 4, lane);
        const uint32_t k[3] = {0, unit.k, 1}, index[3] = {mine, unit.index, (warp < 4 ? e->f_off : e->z_off) + input}, i[3] = {lane, lane, input - first};
        for (uint32_t j = 0; j < (low ? 3u : 2u); j++) {
            uint32_t found, word;
            if (!delta_find(p, in, k[j], index[j], &found, &word)) return 0;
            if (!lane) out->word[j][warp] = word;
            if (j == MK_DELTA_UNIT && !unit.has) continue; /* nobody asks */
            if (out->word[j][warp] == 0xffffffffu || mk_delta_found(out->word[j][warp], i[j], p->vec[in->wait[k[j]].vec].slice_packets) != found) return 0;
        }
    }
    return 1;
}

#endif
