#include "megakernel/phases.h"

#include <stdlib.h>
#include <string.h>

/* Level of the last publisher of each publication: level[vec * pubs + pub]. */
typedef struct levels {
    const mk_program *p;
    uint32_t pubs;
    uint32_t *of_pub;  /* [n_vec][pubs] highest level of who publishes it; UINT32_MAX: nobody */
    uint32_t *of_insn; /* [n_insn] */
    uint64_t gqa;      /* vectors (by bit) that a GQA_PARTIAL publishes, if steps have one row; else 0 */
    uint32_t pos;
} levels;

static uint32_t *published(const levels *l, uint32_t vec, uint32_t pub)
{
    return &l->of_pub[vec * l->pubs + pub];
}

/* It stands in the phase of what it waits for: it does not wait. Should a machine let it do something all the same, its waits hold in that phase, too. */
static int idle(const levels *l, const mk_insn *in)
{
    if (in->opcode == MK_OP_GQA_APPEND) return l->gqa != 0;
    return in->opcode == MK_OP_COMBINE && l->gqa >> in->wait[0].vec & 1 && mk_splits(l->pos, in->mla.grain, in->mla.most) == 1;
}

/* The first phase in which instruction x, of worker w, may stand, given what is known of the others. */
static uint32_t first_level(const levels *l, uint32_t w, uint32_t x)
{
    const mk_program *p = l->p;
    const mk_insn *in = &p->insn[x];
    uint32_t level = x > p->queue[w] ? l->of_insn[x - 1] : 0;
    for (int k = 0; k < in->nwait; k++) {
        const mk_wait *wt = &in->wait[k];
        uint32_t at = 0;
        if (p->vec[wt->vec].scope == MK_LOCAL) { /* this worker's own; its queue's order does the rest */
            for (uint32_t y = x; y-- > p->queue[w];)
                if (p->insn[y].signal_vec == wt->vec && p->insn[y].signal_pub == wt->pub) {
                    at = l->of_insn[y];
                    break;
                }
        } else {
            at = *published(l, wt->vec, wt->pub) + !idle(l, &p->insn[x]);
        }
        if (at > level) level = at;
    }
    return level;
}

static void note(const levels *l, uint32_t vec, uint32_t pub, uint32_t level)
{
    if (vec == MK_NONE) return;
    uint32_t *at = published(l, vec, pub);
    if (*at == UINT32_MAX || *at < level) *at = level;
}

/* Levels only grow, until none does. */
static int settle(const levels *l, mk_err *err)
{
    const mk_program *p = l->p;
    for (uint32_t w = 0; w < p->info.workers; w++)
        for (uint32_t x = p->queue[w]; x < p->queue[w + 1]; x++) {
            note(l, p->insn[x].signal_vec, p->insn[x].signal_pub, 0);
            if (p->insn[x].opcode == MK_OP_LM_HEAD) note(l, p->insn[x].lm_head.logits_vec, p->insn[x].lm_head.logits_pub, 0);
        }
    for (uint32_t x = 0; x < p->info.n_insn; x++)
        for (int k = 0; k < p->insn[x].nwait; k++) {
            const mk_wait *wt = &p->insn[x].wait[k];
            if (*published(l, wt->vec, wt->pub) == UINT32_MAX)
                return mk_fail(err, MK_E_BUG, "phases: nobody publishes %s publication %u", p->vec[wt->vec].name, wt->pub);
        }
    for (uint32_t round = 0, more = 1; more; round++) {
        if (round > p->info.n_insn) return mk_fail(err, MK_E_BUG, "phases: the program's waits go in a circle");
        more = 0;
        for (uint32_t w = 0; w < p->info.workers; w++)
            for (uint32_t x = p->queue[w]; x < p->queue[w + 1]; x++) {
                uint32_t level = first_level(l, w, x);
                if (level == l->of_insn[x]) continue;
                more = 1;
                l->of_insn[x] = level;
                note(l, p->insn[x].signal_vec, p->insn[x].signal_pub, level);
                if (p->insn[x].opcode == MK_OP_LM_HEAD) note(l, p->insn[x].lm_head.logits_vec, p->insn[x].lm_head.logits_pub, level);
            }
    }
    return MK_OK;
}

/* Which LOCAL vectors cross a boundary: by worker, what was written in which phase last. */
static void carries(const mk_program *p, const uint32_t *level, mk_phases *ph)
{
    for (uint32_t w = 0; w < p->info.workers; w++) {
        uint32_t written[64];
        memset(written, 0xff, sizeof written);
        for (uint32_t x = p->queue[w]; x < p->queue[w + 1]; x++) {
            const mk_insn *in = &p->insn[x];
            for (int k = 0; k < in->nwait; k++) {
                uint32_t v = in->wait[k].vec;
                if (p->vec[v].scope != MK_LOCAL || written[v] == UINT32_MAX || written[v] == level[x]) continue;
                ph->load[level[x]] |= 1ull << v;
                ph->save[written[v]] |= 1ull << v;
            }
            if (in->signal_vec != MK_NONE && p->vec[in->signal_vec].scope == MK_LOCAL) written[in->signal_vec] = level[x];
            if (in->opcode == MK_OP_ROUTE) ph->routes = in->signal_vec;
        }
    }
}

int mk_phases_of(const mk_program *p, uint32_t rows, uint32_t pos, mk_phases *ph, mk_err *err)
{
    const mk_program_info *i = &p->info;
    levels l = {.p = p, .pubs = 1, .pos = pos};
    memset(ph, 0, sizeof *ph);
    ph->routes = MK_NONE;
    if (i->n_vec > 64) return mk_fail(err, MK_E_BUG, "phases: %u vectors, expected at most 64", i->n_vec);
    for (uint32_t v = 0; v < i->n_vec; v++)
        if (p->vec[v].pubs > l.pubs) l.pubs = p->vec[v].pubs;
    for (uint32_t x = 0; x < i->n_insn && rows == 1; x++)
        if (p->insn[x].opcode == MK_OP_GQA_PARTIAL) l.gqa |= 1ull << p->insn[x].signal_vec;
    l.of_pub = malloc((size_t)i->n_vec * l.pubs * sizeof *l.of_pub);
    l.of_insn = calloc(i->n_insn + 1, sizeof *l.of_insn);
    int rc = l.of_pub && l.of_insn ? MK_OK : mk_fail(err, MK_E_CAPACITY, "out of memory");
    if (!rc) {
        memset(l.of_pub, 0xff, (size_t)i->n_vec * l.pubs * sizeof *l.of_pub);
        rc = settle(&l, err);
    }
    for (uint32_t x = 0; x < i->n_insn && !rc; x++)
        if (l.of_insn[x] >= ph->n) ph->n = l.of_insn[x] + 1;
    if (!rc) {
        ph->insn = malloc((size_t)i->n_insn * sizeof *ph->insn);
        ph->queue = calloc((size_t)ph->n * i->workers + 2, sizeof *ph->queue);
        ph->load = calloc(ph->n, sizeof *ph->load);
        ph->save = calloc(ph->n, sizeof *ph->save);
        if (!ph->insn || !ph->queue || !ph->load || !ph->save) rc = mk_fail(err, MK_E_CAPACITY, "out of memory");
    }
    if (!rc) { /* counting sort; a queue's levels ascend, so its order is kept */
        uint32_t W = i->workers, *at = ph->queue + 1;
        for (uint32_t w = 0; w < W; w++)
            for (uint32_t x = p->queue[w]; x < p->queue[w + 1]; x++) at[l.of_insn[x] * W + w]++;
        for (uint32_t k = 0, sum = 0; k <= ph->n * W; k++) {
            uint32_t n = k < ph->n * W ? at[k] : 0;
            at[k] = sum;
            sum += n;
        }
        for (uint32_t w = 0; w < W; w++)
            for (uint32_t x = p->queue[w]; x < p->queue[w + 1]; x++) ph->insn[at[l.of_insn[x] * W + w]++] = p->insn[x];
        carries(p, l.of_insn, ph);
    }
    free(l.of_pub);
    free(l.of_insn);
    if (rc) mk_phases_free(ph);
    return rc;
}

void mk_phases_free(mk_phases *ph)
{
    free(ph->insn);
    free(ph->queue);
    free(ph->load);
    free(ph->save);
    memset(ph, 0, sizeof *ph);
}
