#include "tests/support/opcase.h"

#include "instructions/mk_math.h"
#include "megakernel/exchange.h"
#ifdef MK_CUDA
#include "megakernel/gpu.h"
#include "megakernel/laid.h"
#endif
#include "tests/support/progbuild.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *need(void *p, uint64_t bytes)
{
    void *q = realloc(p, bytes ? bytes : 64);
    if (q) return q;
    fprintf(stderr, "opcase: out of memory (%llu bytes)\n", (unsigned long long)bytes);
    exit(3);
}

static void *poisoned(uint64_t bytes)
{
    return memset(need(NULL, bytes + 64), 0xff, bytes + 64);
}

#define CHECK(x)                                                                                                       \
    do {                                                                                                               \
        if (!(x)) {                                                                                                    \
            fprintf(stderr, "opcase: line %d: %s does not hold\n", __LINE__, #x);                                      \
            exit(3);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* ---- numbers -------------------------------------------------------------------------------------------------------- */

uint64_t case_random(uint64_t *s) /* splitmix64 */
{
    uint64_t z = (*s += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

double case_uniform(uint64_t *s)
{
    return (double)(case_random(s) >> 11) * 0x1p-53;
}

float case_normal(uint64_t *s)
{
    double u = case_uniform(s), v = case_uniform(s);
    return (float)(sqrt(-2.0 * log(1.0 - u)) * cos(6.283185307179586 * v));
}

uint64_t case_rng(const mk_case *c, uint32_t what, uint32_t row)
{
    uint64_t s = c->seed * 0x100000001B3ull + what * 1000003ull + row * 7919ull + 1;
    case_random(&s);
    return s;
}

/* ---- building ------------------------------------------------------------------------------------------------------- */

mk_case *case_new(uint32_t workers, uint64_t seed)
{
    mk_case *c = memset(need(NULL, sizeof *c), 0, sizeof *c);
    c->prog.info = (mk_program_info){.magic = MK_PROGRAM_MAGIC, .version = MK_PROGRAM_VERSION, .workers = workers, .layers = 4, .max_context = 64};
    c->seed = seed;
    c->epoch0 = seed & 1 ? 0xfffff800u : (uint32_t)(seed * 77777u); /* odd: epochs wrap */
    c->step.seq = (uint32_t)(seed >> 1) % 5;
    for (uint32_t i = 0; i < CASE_INSNS; i++) c->in[i] = NULL;
    return c;
}

void case_free(mk_case *c)
{
    if (!c) return;
    if (!c->prog.insn)
        for (uint32_t i = 0; i < c->n; i++) free(c->in[i]);
    free(c->prog.vec), free(c->prog.start), free(c->prog.queue), free(c->prog.tape_base), free(c->prog.insn);
    free(c->mem.tape), free(c->mem.expert), free(c->mem.embed), free(c->mem.param), free(c->mem.slot), free(c->mem.page), free(c->mem.token);
    for (uint32_t i = 0; i < MK_REGIONS; i++) free(mk_region_at(&c->mem, i)), free(mk_region_at(&c->twin, i)), free(mk_region_at(&c->gpu, i));
    free(c);
}

static mk_vec *add_vec(mk_case *c, const char *name, uint32_t scope, uint32_t dtype)
{
    mk_program_info *i = &c->prog.info;
    uint64_t s = case_rng(c, 9000 + i->n_vec, 0);
    c->prog.vec = need(c->prog.vec, (i->n_vec + 1) * sizeof *c->prog.vec);
    mk_vec *v = memset(&c->prog.vec[i->n_vec], 0, sizeof *v);
    CHECK(i->n_vec < 48);
    snprintf(v->name, sizeof v->name, "%s", name);
    v->scope = (uint8_t)scope;
    v->dtype = (uint8_t)dtype;
    v->pubs = 1 + (uint32_t)(case_random(&s) % 3);
    c->pub[i->n_vec++] = (uint16_t)(case_random(&s) % v->pubs);
    return v;
}

uint32_t case_packet(mk_case *c, const char *name, uint32_t dtype, int trailer, const uint32_t *start, uint32_t nslice)
{
    mk_program_info *i = &c->prog.info;
    mk_vec *v = add_vec(c, name, MK_PACKET, dtype);
    v->trailer = (uint8_t)trailer;
    v->start_index = i->n_start;
    c->prog.start = need(c->prog.start, (i->n_start + nslice + 1) * sizeof *start);
    memcpy(c->prog.start + i->n_start, start, (nslice + 1) * sizeof *start);
    i->n_start += nslice + 1;
    pb_place(&c->prog, i->n_vec - 1, nslice);
    return i->n_vec - 1;
}

uint32_t case_even(mk_case *c, const char *name, uint32_t dtype, int trailer, uint32_t width, uint32_t nslice)
{
    uint32_t *start = need(NULL, (nslice + 1) * sizeof *start);
    for (uint32_t s = 0; s <= nslice; s++) start[s] = mk_start(s, width, nslice);
    uint32_t id = case_packet(c, name, dtype, trailer, start, nslice);
    free(start);
    return id;
}

uint32_t case_bulk(mk_case *c, const char *name, uint64_t bytes, uint32_t signals)
{
    mk_vec *v = add_vec(c, name, MK_BULK, MK_F32);
    v->width = (uint32_t)bytes;
    v->signals = signals;
    v->counter = c->prog.info.n_counter++;
    v->offset = c->prog.info.bulk_bytes;
    c->prog.info.bulk_bytes += (bytes + 127) & ~127ull;
    return c->prog.info.n_vec - 1;
}

uint32_t case_local(mk_case *c, const char *name, uint64_t bytes)
{
    mk_vec *v = add_vec(c, name, MK_LOCAL, MK_F32);
    v->width = (uint32_t)bytes;
    v->offset = c->prog.info.local_bytes;
    c->prog.info.local_bytes += (bytes + 127) & ~127ull;
    return c->prog.info.n_vec - 1;
}

uint32_t case_param(mk_case *c, uint32_t n, double mean, double dev)
{
    mk_program_info *i = &c->prog.info;
    uint32_t at = (uint32_t)i->param_floats;
    uint64_t s = case_rng(c, 5000, at);
    c->mem.param = need(c->mem.param, (at + n) * sizeof(float));
    for (uint32_t k = 0; k < n; k++) c->mem.param[at + k] = (float)(mean + dev * (double)case_normal(&s));
    i->param_floats += n;
    return at;
}

mk_insn *case_add(mk_case *c, uint32_t worker, uint32_t opcode)
{
    CHECK(c->n < CASE_INSNS && worker < c->prog.info.workers);
    mk_insn *in = memset(need(NULL, sizeof *in), 0, sizeof *in);
    in->opcode = (uint8_t)opcode;
    in->layer = 3;
    in->signal_vec = MK_NONE;
    for (int k = 0; k < 3; k++) in->wait[k].vec = MK_NONE;
    c->worker[c->n] = worker;
    return c->in[c->n++] = in;
}

void case_wait_slices(mk_case *c, mk_insn *in, uint32_t vec, uint32_t slice0, uint32_t nslice)
{
    in->wait[in->nwait++] = (mk_wait){.vec = (uint16_t)vec, .pub = c->pub[vec], .slice0 = (uint16_t)slice0, .nslice = (uint16_t)nslice};
}

void case_wait(mk_case *c, mk_insn *in, uint32_t vec)
{
    const mk_vec *v = &c->prog.vec[vec];
    case_wait_slices(c, in, vec, 0, v->scope == MK_PACKET ? v->nslice : 0);
}

void case_to(mk_case *c, mk_insn *in, uint32_t vec, uint32_t slice)
{
    in->signal_vec = (uint16_t)vec;
    in->signal_pub = c->pub[vec];
    in->signal_slice = (uint16_t)slice;
}

void case_seal(mk_case *c, const case_sizes *s)
{
    mk_program *p = &c->prog;
    mk_program_info *i = &p->info;
    uint32_t W = i->workers, n = 0;
    i->n_insn = c->n;
    p->queue = need(NULL, (W + 1) * sizeof *p->queue);
    p->tape_base = need(NULL, (W + 1) * sizeof *p->tape_base);
    p->insn = memset(need(NULL, (c->n + 1) * sizeof *p->insn), 0, (c->n + 1) * sizeof *p->insn);
    p->queue[0] = 0;
    p->tape_base[0] = 0;
    for (uint32_t w = 0; w < W; w++) {
        uint64_t tape = 0;
        for (uint32_t k = 0; k < c->n; k++) {
            if (c->worker[k] != w) continue;
            p->insn[n] = *c->in[k];
            free(c->in[k]);
            c->in[k] = &p->insn[n];
            c->in[k]->seq = n++ - p->queue[w];
            c->in[k]->tape_off = tape;
            tape += c->in[k]->tape_bytes;
        }
        p->queue[w + 1] = n;
        p->tape_base[w + 1] = p->tape_base[w] + tape;
        if (tape > i->tape_bytes_max) i->tape_bytes_max = tape;
    }
    uint32_t context = s->context ? s->context : 64, pages = (context + MK_PAGE - 1) / MK_PAGE;
    i->tape_bytes = p->tape_base[W];
    i->expert_bytes = s->expert;
    i->embed_bytes = s->embed;
    i->max_context = context;
    i->state_slots = CASE_STREAMS;
    i->state_slot_bytes = s->state_slot;
    i->kv_page_bytes = s->kv_page;
    i->kv_layers = s->kv_page ? 1 : 0;
    i->kv_pages = s->kv_page ? pages * CASE_STREAMS : 0;
    mk_memory *m = &c->mem;
    m->tape = poisoned(i->tape_bytes);
    m->expert = poisoned(i->expert_bytes);
    m->embed = poisoned(i->embed_bytes);
    if (!m->param) case_param(c, 1, 1, 0);
    m->n_slots = CASE_STREAMS;
    m->max_pages = pages;
    m->max_context = context;
    m->slot = memset(need(NULL, CASE_STREAMS * sizeof *m->slot), 0, CASE_STREAMS * sizeof *m->slot);
    m->page = need(NULL, 4ull * pages * CASE_STREAMS);
    m->token = memset(need(NULL, 4ull * context * CASE_STREAMS), 0, 4ull * context * CASE_STREAMS);
    for (uint32_t k = 0; k < pages * CASE_STREAMS; k++) m->page[k] = k;
    uint64_t seed = case_rng(c, 4000, 0);
    for (uint32_t k = pages * CASE_STREAMS; k > 1; k--) {
        uint32_t j = (uint32_t)(case_random(&seed) % k), t = m->page[k - 1];
        m->page[k - 1] = m->page[j];
        m->page[j] = t;
    }
    c->twin = c->gpu = *m;
    mk_memory *all[3] = {m, &c->twin, &c->gpu};
    for (int k = 0; k < 3; k++) {
        all[k]->exchange = poisoned(i->exchange_bytes);
        all[k]->bulk = poisoned(i->bulk_bytes);
        all[k]->counter = poisoned(i->n_counter * 4ull);
        all[k]->local = poisoned(W * i->local_bytes);
        all[k]->state = poisoned(i->state_slots * i->state_slot_bytes);
        all[k]->kv = poisoned((uint64_t)i->kv_pages * i->kv_page_bytes);
    }
}

uint8_t *case_tape(mk_case *c, uint32_t i)
{
    return c->mem.tape + c->prog.tape_base[c->worker[i]] + c->in[i]->tape_off;
}

void case_segment(mk_case *c, uint8_t *dst, uint32_t wtype, uint32_t rows, uint32_t k, uint32_t nsegs, uint32_t scale_k, double gain)
{
    const mk_memory *m = &c->mem;
    int expert = dst >= m->expert && dst < m->expert + c->prog.info.expert_bytes;
    uint64_t s = case_rng(c, 6000, (uint32_t)(rows * 31 + k)) + (uint64_t)(dst - (expert ? m->expert : m->tape)), at = mk_segment_scale_bytes(wtype, k, nsegs, scale_k);
    uint32_t values = mk_kblock_values(wtype), nkb = (k + values - 1) / values, scales = wtype == MK_W_FP8 ? mk_scale_blocks(k, scale_k) * nsegs : 0;
    double one = gain / sqrt((double)k);
    for (uint32_t i = 0; i < scales; i++) {
        float f = (float)(one / 110.0 * (0.25 + 1.5 * case_uniform(&s))); /* 110: RMS of a random e4m3 code */
        memcpy(dst + 4ull * i, &f, 4);
    }
    for (uint32_t kb = 0; kb < nkb; kb++) {
        uint32_t left = k - kb * values < values ? k - kb * values : values;
        for (uint32_t r = 0; r < rows; r++) {
            uint64_t w[8];
            uint8_t *b = (uint8_t *)w;
            for (int j = 0; j < 8; j++) w[j] = case_random(&s);
            if (wtype == MK_W_FP8) {
                for (int j = 0; j < 64; j++)
                    if ((b[j] & 0x7f) == 0x7f) b[j] ^= 1; /* no NaN */
                memset(b + left, 0, 64 - left);
            } else { /* the product of two uniforms: small and large ones */
                for (uint32_t j = 0; j < 32; j++) {
                    uint16_t h;
                    memcpy(&h, b + 2 * j, 2);
                    double u = ((h & 0xff) - 127.5) / 128, v = ((h >> 8) + 0.5) / 128;
                    h = j < left ? mk_f32_to_bf16((float)(one * u * v * 1.5)) : 0;
                    memcpy(b + 2 * j, &h, 2);
                }
            }
            for (uint32_t q = 0; q < 4; q++) memcpy(dst + at + mk_quarter_at(rows, kb, q, r), b + 16 * q, 16);
        }
    }
}

/* ---- inputs --------------------------------------------------------------------------------------------------------- */

static mk_ctx context(mk_case *c, const mk_insn *in, uint32_t worker)
{
    return (mk_ctx){.prog = &c->prog, .in = in, .mem = &c->mem, .step = &c->step, .worker = worker, .epoch0 = c->epoch0};
}

void case_rows(mk_case *c, const uint32_t *ids, uint32_t n, uint32_t flags)
{
    for (uint32_t i = 0; i < MK_REGIONS; i++) memset(mk_region_at(&c->mem, i), 0xff, mk_region_bytes(&c->prog, i));
    for (uint64_t b = 12; b < c->prog.info.exchange_bytes; b += 16) memcpy(c->mem.exchange + b, &c->epoch0, 4); /* nobody waits for that one */
    for (uint32_t v = 0; v < c->prog.info.n_vec; v++) {
        const mk_vec *x = &c->prog.vec[v];
        if (x->scope == MK_BULK) c->mem.counter[x->counter] = mk_counter_target(x, c->step.seq, c->pub[v]) - x->signals;
    }
    c->step.nrows = n;
    c->step.any_logits = 0;
    memset(c->step.row, 0xff, sizeof c->step.row);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t id = ids[i];
        c->row_id[i] = id;
        c->step.row[i] = (mk_row){.slot = id, .token = id * 37 + 5, .pos = c->pos[id], .flags = flags | (c->pos[id] ? 0 : MK_ROW_FIRST), .state_read = id,
                                  .state_write = id};
    }
}

void case_fill(mk_case *c, uint32_t what, uint32_t row, float *to, size_t n, double dev)
{
    uint64_t s = case_rng(c, what, row);
    for (size_t i = 0; i < n; i++) to[i] = (float)dev * case_normal(&s);
}

void case_input(mk_case *c, uint32_t vec, double dev)
{
    const mk_vec *v = &c->prog.vec[vec];
    const uint32_t *start = mk_vec_starts(&c->prog, v);
    mk_insn in = {.signal_vec = (uint16_t)vec, .signal_pub = c->pub[vec]};
    mk_ctx x = context(c, &in, 0);
    float *value = need(NULL, (v->width + 1) * sizeof *value);
    for (uint32_t r = 0; r < c->step.nrows; r++) {
        uint64_t s = case_rng(c, 2000 + vec, c->row_id[r]);
        case_fill(c, vec, c->row_id[r], value, v->width, dev);
        for (uint32_t k = 0; k < v->nslice; k++) mk_publish(&x, r, k, value + start[k], (float)(1 + 39 * case_uniform(&s)));
    }
    free(value);
}

void case_signalled(mk_case *c, uint32_t vec)
{
    const mk_vec *v = &c->prog.vec[vec];
    c->mem.counter[v->counter] = mk_counter_target(v, c->step.seq, c->pub[vec]);
}

/* ---- running -------------------------------------------------------------------------------------------------------- */

static void take(mk_case *c, mk_memory *to)
{
    for (uint32_t i = 0; i < MK_REGIONS; i++) memcpy(mk_region_at(to, i), mk_region_at(&c->mem, i), mk_region_bytes(&c->prog, i));
}

int case_run_twin(mk_case *c, mk_err *err)
{
    take(c, &c->twin);
    return mk_play_twin(&c->prog, &c->twin, &c->step, c->epoch0, err);
}

uint32_t case_patience = 1;

#ifdef MK_CUDA
int case_gpu_open(mk_case *c, struct mk_gpu **g, mk_err *err)
{
    const uint32_t copy = (uint32_t)(c->seed / 2 % MK_LAID_KERNELS); /* of the kernel: all of them in turn, epochs that wrap and others with each */
    mk_gpu_config gc = {.slots = c->mem.n_slots, .context = c->mem.max_context, .timeout_ms = 200 * case_patience, .laid = 1 + copy};
    int rc = mk_gpu_new(&c->prog, &gc, g, err);
    if (!rc && (rc = mk_gpu_upload(*g, &c->mem, err))) mk_gpu_destroy(g);
    return rc;
}

int case_run_gpu(mk_case *c, struct mk_gpu *g, mk_err *err)
{
    take(c, &c->gpu);
    mk_state_turn(&c->prog, &c->gpu, 1);
    int rc = mk_gpu_load(g, &c->gpu, MK_REGION_EXCHANGE | MK_REGION_BULK | MK_REGION_COUNTER | MK_REGION_LOCAL | MK_REGION_STATE | MK_REGION_KV | MK_REGION_PAGE, err);
    if (!rc) rc = mk_gpu_once(g, c->prog.insn, c->prog.queue, &c->step, c->epoch0, 1000 * case_patience, err);
    if (!rc) rc = mk_gpu_store(g, &c->gpu, MK_REGION_EXCHANGE | MK_REGION_BULK | MK_REGION_COUNTER | MK_REGION_LOCAL | MK_REGION_STATE | MK_REGION_KV, err);
    mk_state_turn(&c->prog, &c->gpu, 0);
    return rc;
}

void case_gpu_close(struct mk_gpu **g)
{
    mk_gpu_destroy(g);
}
#else
static int no_kernel(mk_err *err)
{
    return mk_fail(err, MK_E_DEVICE, "this build has no GPU kernel");
}
int case_gpu_open(mk_case *c, struct mk_gpu **g, mk_err *err)
{
    (void)c;
    *g = NULL;
    return no_kernel(err);
}
int case_run_gpu(mk_case *c, struct mk_gpu *g, mk_err *err)
{
    (void)c, (void)g;
    return no_kernel(err);
}
void case_gpu_close(struct mk_gpu **g)
{
    *g = NULL;
}
#endif
