#include "megakernel/exchange.h"

#include <string.h>

typedef struct packet {
    uint32_t word[3], epoch;
} packet;

static const mk_vec *wait_vec(const mk_ctx *c, int w)
{
    return &c->prog->vec[c->in->wait[w].vec];
}

static uint32_t slice_words(const mk_vec *v, const uint32_t *start, uint32_t s)
{
    return (uint32_t)mk_slice_words(v, start[s + 1] - start[s]);
}

static const packet *wait_packets(const mk_ctx *c, int w, uint32_t row, uint32_t slice)
{
    const mk_vec *v = wait_vec(c, w);
    uint32_t half = mk_half(v, c->step->seq, c->in->wait[w].pub);
    return (const packet *)(c->mem->exchange + mk_packet_offset(v, half, row, slice));
}

int mk_wait_ready(const mk_ctx *c, int w, uint32_t *slice)
{
    const mk_wait *wt = &c->in->wait[w];
    const mk_vec *v = wait_vec(c, w);
    if (slice) *slice = 0;
    if (v->scope == MK_LOCAL) return 1;
    if (v->scope == MK_BULK) return c->mem->counter[v->counter] == mk_counter_target(v, c->step->seq, wt->pub);
    const uint32_t *start = mk_vec_starts(c->prog, v);
    uint32_t epoch = mk_epoch(c->epoch0, c->step->seq, wt->pub);
    for (uint32_t r = 0; r < c->step->nrows; r++)
        for (uint32_t s = wt->slice0; s < (uint32_t)wt->slice0 + wt->nslice; s++) {
            const packet *p = wait_packets(c, w, r, s);
            uint32_t packets = (uint32_t)mk_slice_packets(v, start[s + 1] - start[s]);
            for (uint32_t i = 0; i < packets; i++)
                if (p[i].epoch != epoch) {
                    if (slice) *slice = s;
                    return 0;
                }
        }
    return 1;
}

/* Slice that holds value `first`. */
static uint32_t find_slice(const uint32_t *start, uint32_t lo, uint32_t hi, uint32_t first)
{
    while (hi - lo > 1) {
        uint32_t mid = (lo + hi) / 2;
        if (start[mid] <= first)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

void mk_read(const mk_ctx *c, int w, uint32_t row, uint32_t first, uint32_t n, float *dst)
{
    const mk_wait *wt = &c->in->wait[w];
    const mk_vec *v = wait_vec(c, w);
    const uint32_t *start = mk_vec_starts(c->prog, v);
    uint32_t s = find_slice(start, wt->slice0, (uint32_t)wt->slice0 + wt->nslice, first);
    for (uint32_t done = 0; done < n; s++) {
        const packet *p = wait_packets(c, w, row, s);
        uint32_t i = first + done - start[s], end = start[s + 1] - start[s];
        if (end - i > n - done) end = i + n - done;
        if (v->dtype == MK_F32) {
            for (; i < end; i++) memcpy(&dst[done++], &p[i / 3].word[i % 3], 4);
        } else {
            for (; i < end && i % 6; i++) {
                uint32_t k = i / 2;
                dst[done++] = mk_bf16_to_f32((uint16_t)(p[k / 3].word[k % 3] >> (16 * (i & 1))));
            }
            for (; i + 6 <= end; i += 6, done += 6) {
                const uint32_t *word = p[i / 6].word;
                for (int k = 0; k < 3; k++) {
                    dst[done + 2 * k] = mk_bf16_to_f32((uint16_t)word[k]);
                    dst[done + 2 * k + 1] = mk_bf16_to_f32((uint16_t)(word[k] >> 16));
                }
            }
            for (; i < end; i++) {
                uint32_t k = i / 2;
                dst[done++] = mk_bf16_to_f32((uint16_t)(p[k / 3].word[k % 3] >> (16 * (i & 1))));
            }
        }
    }
}

void mk_read_words(const mk_ctx *c, int w, uint32_t row, uint32_t slice, uint32_t n, uint32_t *dst)
{
    const packet *p = wait_packets(c, w, row, slice);
    for (uint32_t i = 0; i < n; i++) dst[i] = p[i / 3].word[i % 3];
}

float mk_read_trailer(const mk_ctx *c, int w, uint32_t row, uint32_t slice)
{
    const mk_vec *v = wait_vec(c, w);
    uint32_t i = slice_words(v, mk_vec_starts(c->prog, v), slice) - 1;
    const packet *p = wait_packets(c, w, row, slice);
    float f;
    memcpy(&f, &p[i / 3].word[i % 3], 4);
    return f;
}

void mk_publish(const mk_ctx *c, uint32_t row, uint32_t slice, const float *values, float trailer)
{
    const mk_vec *v = &c->prog->vec[c->in->signal_vec];
    const uint32_t *start = mk_vec_starts(c->prog, v);
    uint32_t half = mk_half(v, c->step->seq, c->in->signal_pub);
    uint32_t epoch = mk_epoch(c->epoch0, c->step->seq, c->in->signal_pub);
    packet *p = (packet *)(c->mem->exchange + mk_packet_offset(v, half, row, slice));
    uint32_t n = start[slice + 1] - start[slice], words = slice_words(v, start, slice);
    for (uint32_t i = 0; i < words; i += 3, p++) {
        packet out = {{0, 0, 0}, epoch};
        for (uint32_t k = 0; k < 3 && i + k < words; k++) {
            uint32_t j = i + k;
            if (v->trailer && j == words - 1)
                memcpy(&out.word[k], &trailer, 4);
            else if (v->dtype == MK_F32)
                memcpy(&out.word[k], &values[j], 4);
            else
                out.word[k] = (uint32_t)mk_f32_to_bf16(values[2 * j]) |
                              (2 * j + 1 < n ? (uint32_t)mk_f32_to_bf16(values[2 * j + 1]) << 16 : 0);
        }
        *p = out;
    }
}

void *mk_local(const mk_ctx *c, uint32_t vec)
{
    return c->mem->local + (uint64_t)c->worker * c->prog->info.local_bytes + c->prog->vec[vec].offset;
}

void *mk_bulk(const mk_ctx *c, uint32_t vec)
{
    return c->mem->bulk + c->prog->vec[vec].offset;
}

void mk_signal_bulk(const mk_ctx *c, uint32_t vec)
{
    c->mem->counter[c->prog->vec[vec].counter]++;
}

uint8_t *mk_kv_row(const mk_ctx *c, uint64_t kv_off, uint32_t slot, uint32_t pos, uint32_t row_bytes)
{
    uint32_t page = c->mem->page[(size_t)slot * c->mem->max_pages + pos / MK_PAGE];
    return c->mem->kv + kv_off + page * c->prog->info.kv_page_bytes + (uint64_t)(pos % MK_PAGE) * row_bytes;
}

void mk_exchange_sweep(const mk_program *p, mk_memory *mem, uint32_t epoch0, uint32_t step)
{
    packet *q = (packet *)mem->exchange;
    uint32_t base = epoch0 + step * MK_EPOCH_STRIDE; /* the first publication of the step carries base + 1 */
    for (uint64_t i = 0; i < p->info.exchange_bytes / sizeof *q; i++) q[i] = (packet){{0, 0, 0}, base};
}

void mk_exchange_reset(const mk_program *p, mk_memory *mem, uint32_t epoch0)
{
    mk_exchange_sweep(p, mem, epoch0, 0);
    memset(mem->counter, 0, (size_t)p->info.n_counter * sizeof *mem->counter);
    for (uint32_t v = 0; v < p->info.n_vec; v++)
        if (mk_vec_sums(&p->vec[v])) memset(mem->bulk + p->vec[v].offset, 0, p->vec[v].width);
}
