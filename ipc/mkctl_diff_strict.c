/* mkctl diff --strict: the same program in act=f32 and in default precision on the twin, instruction by instruction. What an instruction publishes
 * is compared with the same publication of the strict run, relative to the RMS of the whole vector; the first one over the tolerance is
 * named: what bf16 vectors cost, without a GPU. */
#include "ipc/mkctl_diff.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define CHUNK MK_MAX_ROWS

/* Published values of one step: value i of row r of (vector, publication) at at[vec][pub] + r * width + i. */
typedef struct record {
    const mk_program *p;
    size_t *base;   /* [n_vec] */
    float *value, *ref; /* this run's, the strict run's */
    size_t n;
    int comparing;
    double tolerance;
    double worst[MK_OP_COUNT];
    uint64_t count[MK_OP_COUNT];
    char first[256];
} record;

static size_t at(const record *r, uint32_t vec, uint32_t pub, uint32_t row)
{
    const mk_vec *v = &r->p->vec[vec];
    return r->base[vec] + ((size_t)pub * MK_MAX_ROWS + row) * v->width;
}

static double rms(const float *v, uint32_t n)
{
    double s = 0;
    for (uint32_t i = 0; i < n; i++) s += (double)v[i] * v[i];
    return sqrt(s / n);
}

static void one_slice(record *r, const mk_ctx *c, uint32_t row, uint32_t slice)
{
    const mk_vec *v = &r->p->vec[c->in->signal_vec];
    const uint32_t *start = mk_vec_starts(r->p, v);
    uint32_t n = start[slice + 1] - start[slice];
    /* reads back what was just published: a wait for our own signal */
    mk_insn in = {.nwait = 1, .wait = {{c->in->signal_vec, c->in->signal_pub, (uint16_t)slice, 1}}};
    mk_ctx back = *c;
    back.in = &in;
    size_t k = at(r, c->in->signal_vec, c->in->signal_pub, row);
    mk_read(&back, 0, row, start[slice], n, r->value + k + start[slice]);
    if (!r->comparing || c->in->opcode == MK_OP_LM_HEAD) return; /* stats are not a vector of one kind */
    double scale = rms(r->ref + k, v->width), worst = 0;
    for (uint32_t i = start[slice]; i < start[slice] + n; i++) {
        double d = fabs((double)r->value[k + i] - r->ref[k + i]) / (scale > 0 ? scale : 1);
        if (!(d <= worst)) worst = d;
    }
    if (!(worst <= r->worst[c->in->opcode])) r->worst[c->in->opcode] = worst;
    r->count[c->in->opcode]++;
    if (!(worst <= r->tolerance) && !r->first[0])
        snprintf(r->first, sizeof r->first, "step %u row %u: worker %u #%u %s layer %d, vector %s publication %u slice %u: off by %.3e of its RMS",
                 c->step->seq, row, c->worker, c->in->seq, mk_opcode_name(c->in->opcode), c->in->layer == MK_NONE ? -1 : c->in->layer,
                 v->name, c->in->signal_pub, slice, worst);
}

static void on_insn(void *arg, const mk_ctx *c)
{
    record *r = arg;
    if (c->in->signal_vec == MK_NONE || r->p->vec[c->in->signal_vec].scope != MK_PACKET) return;
    for (uint32_t row = 0; row < c->step->nrows; row++) {
        if (c->in->opcode != MK_OP_EXPERT_UP) {
            one_slice(r, c, row, c->in->signal_slice);
            continue;
        }
        const mk_routes *m = mk_local(c, c->in->wait[1].vec);
        uint32_t T = c->in->expert.T, W = r->p->info.workers;
        for (uint32_t j = 0; j < m->n_union; j++)
            for (uint32_t t = 0; t < T && m->rank[row][j] != 255; t++)
                if ((j * T + t) % W == c->worker) one_slice(r, c, row, m->rank[row][j] * T + t);
    }
}

static int open_pair(const mk_session_config *base, mk_session **s, record *r, mk_err *err)
{
    for (int i = 0; i < 2; i++) {
        mk_session_config c = *base;
        c.act_f32 = i == 0;
        c.apart = 1;
        int rc = mk_session_open(&c, &s[i], err);
        if (rc) return rc;
        mk_session_stream(s[i], 0, NULL, 0);
        s[i]->on_insn = on_insn;
        s[i]->arg = r;
    }
    const mk_program *p = s[0]->plan->prog;
    r->p = p;
    r->base = calloc(p->info.n_vec, sizeof *r->base);
    for (uint32_t v = 0; r->base && v < p->info.n_vec; v++) {
        r->base[v] = r->n;
        if (p->vec[v].scope == MK_PACKET) r->n += (size_t)p->vec[v].pubs * MK_MAX_ROWS * p->vec[v].width;
    }
    r->value = calloc(r->n, sizeof *r->value);
    r->ref = calloc(r->n, sizeof *r->ref);
    if (!r->base || !r->value || !r->ref) return mk_fail(err, MK_E_CAPACITY, "out of memory");
    return MK_OK;
}

int mkctl_diff_strict(const mk_session_config *cfg, const uint32_t *ids, uint32_t n, double tolerance, mk_err *err)
{
    mk_session *s[2] = {NULL, NULL};
    record r = {.tolerance = tolerance};
    int rc = open_pair(cfg, s, &r, err);
    for (uint32_t i = 0; i < n && !rc; i++)
        if (ids[i] >= s[0]->model->vocab)
            rc = mk_fail(err, MK_E_USAGE, "token %u: id %u is outside the vocabulary of %u", i, ids[i], s[0]->model->vocab);
    /* one step at a time: strict first, its values kept, then the other */
    for (uint32_t i = 0; i < n && !rc; i += CHUNK) {
        uint32_t m = n - i < CHUNK ? n - i : CHUNK;
        for (int k = 0; k < 2 && !rc; k++) {
            r.comparing = k;
            r.p = s[k]->plan->prog;
            mk_session_append(s[k], 0, ids + i, m, MK_APPEND_LOGPROBS);
            if (i + m == n) mk_session_append(s[k], 0, ids + i, 1, 0); /* a stream's last token waits for another */
            rc = mk_session_run(s[k], err);
            if (k == 0) {
                float *t = r.value;
                r.value = r.ref;
                r.ref = t;
            }
        }
    }
    if (!rc) {
        printf("%u tokens, %llu steps, strict (act=f32) against default precision; error relative to the vector's RMS\n", n,
               (unsigned long long)s[0]->steps);
        for (unsigned op = 0; op < MK_OP_COUNT; op++)
            if (r.count[op]) printf("    %-12s %10llu slices  worst %.3e\n", mk_opcode_name(op), (unsigned long long)r.count[op], r.worst[op]);
        if (r.first[0]) {
            printf("first over %.1e: %s\n", tolerance, r.first);
            rc = mk_fail(err, MK_E_DEVICE, "the runs diverge");
        } else {
            printf("no instruction is off by more than %.1e\n", tolerance);
        }
    }
    free(r.base);
    free(r.value);
    free(r.ref);
    mk_session_close(&s[0]);
    mk_session_close(&s[1]);
    return rc;
}
