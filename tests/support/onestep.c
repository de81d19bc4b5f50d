#include "tests/support/onestep.h"

#include "instructions/mk_math.h"
#include "megakernel/exchange.h"
#include "tests/support/progbuild.h"

#include <stdlib.h>
#include <string.h>

#define EPOCH0 0xfffffff0u /* epochs wrap within the first steps */

static void (*const dispatch[MK_OP_COUNT])(mk_ctx *) = {
#define X(number, NAME, name, text) [MK_OP_##NAME] = mk_##name##_twin,
    MK_OPCODES(X)
#undef X
};

static void *grow(void *p, size_t bytes)
{
    void *q = realloc(p, bytes ? bytes : 1);
    if (!q) fail_msg("out of memory");
    return q;
}

static void *block(uint64_t bytes, int fill)
{
    void *p = grow(NULL, bytes + 64);
    memset(p, fill, bytes + 64);
    return p;
}

onestep *one_new(uint32_t workers, int act_f32)
{
    onestep *o = block(sizeof *o, 0);
    o->prog.info.workers = workers;
    o->prog.info.flags = act_f32 ? MK_PROG_ACT_F32 : 0;
    o->step.seq = ~0u; /* the first one_begin makes it 0 */
    return o;
}

void one_free(onestep *o)
{
    free(o->prog.vec);
    free(o->prog.start);
    free(o->prog.tape_base);
    free(o->mem.tape);
    free(o->mem.expert);
    free(o->mem.embed);
    free(o->mem.param);
    free(o->mem.exchange);
    free(o->mem.bulk);
    free(o->mem.counter);
    free(o->mem.local);
    free(o->mem.state);
    free(o->mem.kv);
    free(o->mem.slot);
    free(o->mem.page);
    free(o->mem.token);
    free(o->scratch);
    free(o);
}

static mk_vec *add_vec(onestep *o, uint32_t scope, uint32_t dtype)
{
    mk_program_info *i = &o->prog.info;
    o->prog.vec = grow(o->prog.vec, (i->n_vec + 1) * sizeof *o->prog.vec);
    mk_vec *v = &o->prog.vec[i->n_vec++];
    assert_true(i->n_vec <= 64);
    memset(v, 0, sizeof *v);
    v->scope = (uint8_t)scope;
    v->dtype = (uint8_t)dtype;
    v->pubs = 1;
    return v;
}

uint32_t one_packet(onestep *o, uint32_t dtype, int trailer, const uint32_t *start, uint32_t nslice)
{
    mk_program_info *i = &o->prog.info;
    mk_vec *v = add_vec(o, MK_PACKET, dtype);
    v->trailer = (uint8_t)trailer;
    v->start_index = i->n_start;
    o->prog.start = grow(o->prog.start, (i->n_start + nslice + 1) * sizeof *start);
    memcpy(o->prog.start + i->n_start, start, (nslice + 1) * sizeof *start);
    i->n_start += nslice + 1;
    pb_place(&o->prog, i->n_vec - 1, nslice);
    return i->n_vec - 1;
}

uint32_t one_even(onestep *o, uint32_t dtype, int trailer, uint32_t width, uint32_t nslice)
{
    uint32_t *start = grow(NULL, (nslice + 1) * sizeof *start);
    for (uint32_t s = 0; s <= nslice; s++) start[s] = mk_start(s, width, nslice);
    uint32_t id = one_packet(o, dtype, trailer, start, nslice);
    free(start);
    return id;
}

uint32_t one_bulk(onestep *o, uint64_t bytes, uint32_t signals)
{
    mk_vec *v = add_vec(o, MK_BULK, MK_F32);
    v->width = (uint32_t)bytes;
    v->signals = signals;
    v->counter = o->prog.info.n_counter++;
    v->offset = o->prog.info.bulk_bytes;
    o->prog.info.bulk_bytes += (bytes + 127) & ~127ull;
    return o->prog.info.n_vec - 1;
}

uint32_t one_local(onestep *o, uint64_t bytes)
{
    mk_vec *v = add_vec(o, MK_LOCAL, MK_F32);
    v->width = (uint32_t)bytes;
    v->offset = o->prog.info.local_bytes;
    o->prog.info.local_bytes += (bytes + 127) & ~127ull;
    return o->prog.info.n_vec - 1;
}

uint32_t one_param(onestep *o, const float *v, uint32_t n)
{
    mk_program_info *i = &o->prog.info;
    uint32_t at = (uint32_t)i->param_floats;
    o->mem.param = grow(o->mem.param, (at + n) * sizeof(float));
    memcpy(o->mem.param + at, v, n * sizeof(float));
    i->param_floats += n;
    return at;
}

uint8_t *one_tape(onestep *o, uint64_t bytes)
{
    free(o->mem.tape);
    o->prog.info.tape_bytes = bytes;
    return o->mem.tape = block(bytes, 0);
}

uint8_t *one_expert(onestep *o, uint64_t bytes)
{
    free(o->mem.expert);
    o->prog.info.expert_bytes = bytes;
    return o->mem.expert = block(bytes, 0);
}

void one_alloc(onestep *o, uint32_t state_slots, uint64_t slot_bytes, uint32_t streams, uint32_t context, uint32_t kv_row_bytes)
{
    mk_program_info *i = &o->prog.info;
    mk_memory *m = &o->mem;
    uint32_t pages = (context + MK_PAGE - 1) / MK_PAGE;
    i->state_slots = state_slots;
    i->state_slot_bytes = slot_bytes;
    i->kv_layers = 1;
    i->kv_pages = pages * streams;
    i->kv_page_bytes = (uint64_t)kv_row_bytes * MK_PAGE;
    o->prog.tape_base = block((i->workers + 1) * sizeof(uint64_t), 0);
    m->exchange = block(i->exchange_bytes, 0);
    m->bulk = block(i->bulk_bytes, 0xff);
    m->counter = block(i->n_counter * 4ull, 0);
    m->local = block(i->workers * i->local_bytes, 0xff);
    m->state = block(state_slots * slot_bytes, 0xff); /* NaN: a first row must not look at it */
    m->kv = block(i->kv_pages * i->kv_page_bytes, 0xff);
    m->slot = block(streams * sizeof *m->slot, 0);
    m->page = block(i->kv_pages * 4ull, 0);
    m->n_slots = streams;
    m->max_pages = pages;
    m->max_context = context;
    for (uint32_t k = 0; k < i->kv_pages; k++) m->page[k] = k;
    if (!o->scratch_floats) o->scratch_floats = 1u << 16;
    o->scratch = grow(NULL, o->scratch_floats * sizeof(float));
    uint64_t seed = 99;
    for (uint32_t k = i->kv_pages; k > 1; k--) {
        uint32_t j = (uint32_t)(one_random(&seed) % k), t = m->page[k - 1];
        m->page[k - 1] = m->page[j];
        m->page[j] = t;
    }
    mk_exchange_reset(&o->prog, m, EPOCH0);
}

static mk_ctx context(onestep *o, const mk_insn *in, uint32_t worker)
{
    return (mk_ctx){.prog = &o->prog,
                    .in = in,
                    .mem = &o->mem,
                    .step = &o->step,
                    .worker = worker,
                    .epoch0 = EPOCH0,
                    .route_hook = o->route_hook,
                    .route_arg = o->route_arg};
}

void one_begin(onestep *o)
{
    /* A BULK vector nobody signalled in the step before still counts a publication. */
    uint32_t seq = ++o->step.seq;
    for (uint32_t v = 0; v < o->prog.info.n_vec; v++)
        if (o->prog.vec[v].scope == MK_BULK) o->mem.counter[o->prog.vec[v].counter] = seq * o->prog.vec[v].signals;
    o->step.nrows = 0;
    o->step.any_logits = 0;
    memset(o->step.row, 0xff, sizeof o->step.row);
}

mk_row *one_row(onestep *o, uint32_t slot, uint32_t pos)
{
    assert_true(o->step.nrows < MK_MAX_ROWS);
    mk_row *row = &o->step.row[o->step.nrows++];
    *row = (mk_row){.slot = slot, .pos = pos, .flags = pos == 0 ? MK_ROW_FIRST : 0, .state_read = slot, .state_write = slot};
    return row;
}

void one_put(onestep *o, uint32_t vec, uint32_t row, const float *values, const float *trailers)
{
    const mk_vec *v = &o->prog.vec[vec];
    mk_insn in = {.signal_vec = (uint16_t)vec};
    mk_ctx c = context(o, &in, 0);
    for (uint32_t s = 0; s < v->nslice; s++) mk_publish(&c, row, s, values + mk_vec_starts(&o->prog, v)[s], trailers ? trailers[s] : 0);
}

void one_signal(onestep *o, uint32_t vec)
{
    mk_insn in = {.signal_vec = (uint16_t)vec};
    mk_ctx c = context(o, &in, 0);
    for (uint32_t i = 0; i < o->prog.vec[vec].signals; i++) mk_signal_bulk(&c, vec);
}

void *one_local_at(onestep *o, uint32_t worker, uint32_t vec)
{
    mk_ctx c = context(o, NULL, worker);
    return mk_local(&c, vec);
}

void *one_bulk_at(onestep *o, uint32_t vec)
{
    mk_ctx c = context(o, NULL, 0);
    return mk_bulk(&c, vec);
}

void *one_state(onestep *o, uint32_t slot)
{
    assert_true(slot < o->prog.info.state_slots);
    return o->mem.state + slot * o->prog.info.state_slot_bytes;
}

void one_insn(onestep *o, uint32_t opcode)
{
    memset(&o->in, 0, sizeof o->in);
    o->in.opcode = (uint8_t)opcode;
    o->in.layer = 3;
    o->in.signal_vec = MK_NONE;
}

void one_wait_slices(onestep *o, uint32_t vec, uint32_t slice0, uint32_t nslice)
{
    o->in.wait[o->in.nwait++] = (mk_wait){.vec = (uint16_t)vec, .slice0 = (uint16_t)slice0, .nslice = (uint16_t)nslice};
}

void one_wait(onestep *o, uint32_t vec)
{
    const mk_vec *v = &o->prog.vec[vec];
    one_wait_slices(o, vec, 0, v->scope == MK_PACKET ? v->nslice : 0);
}

void one_to(onestep *o, uint32_t vec, uint32_t slice)
{
    o->in.signal_vec = (uint16_t)vec;
    o->in.signal_slice = (uint16_t)slice;
}

int one_ready(onestep *o, uint32_t vec, uint32_t slice0, uint32_t nslice)
{
    mk_insn in = {.nwait = 1, .wait = {{.vec = (uint16_t)vec, .slice0 = (uint16_t)slice0, .nslice = (uint16_t)nslice}}};
    mk_ctx c = context(o, &in, 0);
    return mk_wait_ready(&c, 0, NULL);
}

void one_run(onestep *o, uint32_t worker)
{
    mk_ctx c = context(o, &o->in, worker);
    memset(o->scratch, 0xff, o->scratch_floats * sizeof(float));
    c.scratch = o->scratch;
    for (int k = 0; k < o->in.nwait; k++) {
        uint32_t slice = 0;
        if (!mk_wait_ready(&c, k, &slice)) fail_msg("wait %d is not satisfied: slice %u", k, slice);
    }
    dispatch[o->in.opcode](&c);
}

void one_get(onestep *o, uint32_t vec, uint32_t row, uint32_t first, uint32_t n, float *dst)
{
    uint32_t slices = o->prog.vec[vec].nslice;
    mk_insn in = {.nwait = 1, .wait = {{.vec = (uint16_t)vec, .nslice = (uint16_t)slices}}};
    mk_ctx c = context(o, &in, 0);
    mk_read(&c, 0, row, first, n, dst);
}

void one_words(onestep *o, uint32_t vec, uint32_t row, uint32_t slice, uint32_t n, uint32_t *dst)
{
    mk_insn in = {.nwait = 1, .wait = {{.vec = (uint16_t)vec, .nslice = (uint16_t)o->prog.vec[vec].nslice}}};
    mk_ctx c = context(o, &in, 0);
    mk_read_words(&c, 0, row, slice, n, dst);
}

float one_trailer(onestep *o, uint32_t vec, uint32_t row, uint32_t slice)
{
    mk_insn in = {.nwait = 1, .wait = {{.vec = (uint16_t)vec, .nslice = (uint16_t)o->prog.vec[vec].nslice}}};
    mk_ctx c = context(o, &in, 0);
    return mk_read_trailer(&c, 0, row, slice);
}

/* splitmix64 */
uint64_t one_random(uint64_t *seed)
{
    uint64_t z = (*seed += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

double one_uniform(uint64_t *seed)
{
    return (double)(one_random(seed) >> 11) * 0x1p-53;
}

float one_normal(uint64_t *seed, double dev)
{
    double u = one_uniform(seed), v = one_uniform(seed);
    return (float)(dev * sqrt(-2.0 * log(1.0 - u)) * cos(6.283185307179586 * v));
}

double one_e4m3(uint32_t code)
{
    int e = (int)(code >> 3 & 15), m = (int)(code & 7);
    double v = e ? ldexp(8 + m, e - 10) : ldexp(m, -9);
    return code & 128 ? -v : v;
}

void one_fill(uint64_t seed, float *v, size_t n, double dev)
{
    seed = seed * 0x100000001B3ull + 17;
    for (size_t i = 0; i < n; i++) v[i] = one_normal(&seed, dev);
}

static double compare(const char *what, const float *got, const double *want, size_t n, double scale, double limit, double relative)
{
    double worst = 0;
    for (size_t i = 0; i < n; i++) {
        double e = fmax(fabs((double)got[i] - want[i]) - relative * fabs(want[i]), 0) / scale;
        if (!(e <= limit) || isnan(got[i]))
            fail_msg("%s: value %zu is %.9g, want %.9g: error %.3g of the scale %.3g, limit %.3g", what, i, (double)got[i], want[i], e, scale,
                     limit);
        if (e > worst) worst = e;
    }
    return worst;
}

double one_close(const char *what, const float *got, const double *want, size_t n, double scale, double limit)
{
    return compare(what, got, want, n, scale, limit, 0);
}

double one_close_bf16(const char *what, const float *got, const double *want, size_t n, double scale, double limit)
{
    return compare(what, got, want, n, scale, limit, 1.0 / 256);
}

double one_rms(const double *v, size_t n)
{
    double s = 0;
    for (size_t i = 0; i < n; i++) s += v[i] * v[i];
    return sqrt(s / (double)n) + 1e-300;
}

void one_same(const char *what, const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (mk_bits_of(a[i]) != mk_bits_of(b[i]))
            fail_msg("%s: value %zu differs: %.9g and %.9g", what, i, (double)a[i], (double)b[i]);
}
