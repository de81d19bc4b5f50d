/* A program: for every worker its queue of instructions for one step of one model, the table of vectors they exchange, and the
 * sizes of the regions that their offsets point into. Compiled once by the planner (host/planner.c), proved by the validator
 * (instructions/validate.h), then fixed. The same bytes run on the twin and on the GPU. */
#ifndef MK_PROGRAM_H
#define MK_PROGRAM_H

#include "host/err.h"
#include "instructions/isa.h"

#define MK_PROGRAM_MAGIC   0x31504b4du /* "MKP1" */
#define MK_PROGRAM_VERSION 5u

enum { MK_PROG_ACT_F32 = 1 /* vectors that would be bf16 are f32: the oracle's strict gate, twin only */ };

/* Per-model constants that SCHEDULE, SAMPLE and the host need, and the sizes of all regions in bytes. */
typedef struct mk_program_info {
    uint32_t magic, version;
    uint32_t flags; /* MK_PROG_* */
    uint32_t workers;
    uint32_t layers, hidden, vocab, max_context; /* max_context: tokens a stream may ever hold */
    uint32_t n_vec, n_start, n_insn, n_counter;
    uint64_t tape_bytes_max;   /* longest tape of a worker; worker w's tape lies at tape_base[w] of the tape region */
    uint64_t tape_bytes;       /* all tapes */
    uint64_t expert_bytes;     /* expert region */
    uint64_t embed_bytes;      /* embedding region */
    uint64_t param_floats;     /* parameter region, f32 */
    uint64_t exchange_bytes;   /* packets */
    uint64_t bulk_bytes;       /* partials, logits */
    uint64_t local_bytes;      /* local memory of one worker */
    uint64_t state_slot_bytes; /* recurrent and convolution state of one slot, all layers */
    uint64_t kv_page_bytes;    /* one page of one layer */
    uint32_t kv_layers;        /* layers with a KV cache; the pool of layer j starts at j * pages * kv_page_bytes */
    uint32_t kv_pages;         /* pages of the pool this program addresses (the same page id in every layer) */
    uint32_t state_slots;      /* slots of the pool */
    uint32_t smem_limit;       /* shared memory a worker may use at MK_MAX_ROWS rows; 0: no limit (twin-only program) */
    uint64_t expert_part_bytes; /* reserved for several GPUs: 0 */
} mk_program_info;

/* All arrays are owned by the program and contiguous; insn[queue[w] .. queue[w+1]) is worker w's queue. */
typedef struct mk_program {
    mk_program_info info;
    mk_vec *vec;         /* [n_vec] */
    uint32_t *start;     /* [n_start] slice starts of all vectors */
    uint32_t *queue;     /* [workers + 1] */
    uint64_t *tape_base; /* [workers + 1] bytes into the tape region */
    mk_insn *insn;       /* [n_insn] */
} mk_program;

void mk_program_destroy(mk_program **p);

/* Program files: the struct above, little endian, with a CRC-32 (IEEE) at the end. Load checks sizes, magic, version and CRC before
 * anything is used, and refuses trailing bytes; it does not validate (call mk_validate). */
int mk_program_save(const mk_program *p, const char *path, mk_err *err);
int mk_program_load(const char *path, mk_program **p, mk_err *err);

const char *mk_opcode_name(unsigned op); /* "GEMV"; "?" when out of range */

static inline const uint32_t *mk_vec_starts(const mk_program *p, const mk_vec *v)
{
    return p->start + v->start_index;
}
/* Which half publication `pub` of step `step` (counted from 0 at launch) lives in, and its epoch. */
MK_BOTH uint32_t mk_half(const mk_vec *v, uint32_t step, uint32_t pub)
{
    return (step * v->pubs + pub) & 1u;
}
MK_BOTH uint32_t mk_epoch(uint32_t epoch0, uint32_t step, uint32_t pub)
{
    return epoch0 + step * MK_EPOCH_STRIDE + pub + 1u;
}
/* n values of a slice as it is published: 4-byte words, the trailer included, and the packets that carry them. */
MK_BOTH uint64_t mk_slice_words(const mk_vec *v, uint64_t n)
{
    return (v->dtype == MK_F32 ? n : (n + 1) / 2) + v->trailer;
}
MK_BOTH uint64_t mk_slice_packets(const mk_vec *v, uint64_t n)
{
    return (mk_slice_words(v, n) + 2) / 3;
}
MK_BOTH uint64_t mk_packet_offset(const mk_vec *v, uint32_t half, uint32_t row, uint32_t slice)
{
    return v->offset + (((uint64_t)half * MK_MAX_ROWS + row) * v->nslice + slice) * v->slice_packets * 16u;
}
/* How the packets of a vector that is gathered are dealt to the warps of a worker: group by group, a group a warp, its values' places by arithmetic. A group is
 * `packets` packets one after the other with `values` values; its packet p is packet p mod `per` of a slice of `slice` values. Places count from the first slice of
 * the wait; packets that carry none of the values wanted, and no trailer, are nobody's business: they may never be published. */
typedef struct mk_deal {
    uint16_t packets, values; /* of a group */
    uint16_t slice, per;      /* of a slice: values, packets */
} mk_deal;
#define MK_DEAL_WARPS   8u  /* that gather a vector, */
#define MK_DEAL_PACKETS 32u /* a lane of theirs a packet at a time */
#define MK_DEAL_LOADS   16u /* so often at most */
#define MK_DEAL_VALUES  64u /* a group holds whole K blocks of any weights: a multiple of so many values */
#define MK_DEAL_ROW     192u /* values of a group of a row without gaps: the fewest that are whole K blocks and whole packets */
static_assert(MK_DEAL_ROW % MK_DEAL_VALUES == 0 && MK_DEAL_ROW == 6 * MK_DEAL_PACKETS, "mk_vec_deal");

/* Whether values [in_off, in_off + k) of a row of PACKET vector v (start: its v->nslice + 1 slice starts), carried by slices [slice0, slice0 + nslice), can be dealt,
 * and how. All these slices must have the same number of values, n, and the first must begin at slice0 * n, as if all before were like them; the
 * vector's last may have fewer. head: 0, or the values of a head that is normalised by its
 * slices' trailers: a group is a head then. Else slices without gaps between their packets are one row of packets, groups of 192 values from in_off on, which need not
 * be the first value of a slice but must be that of a packet; other slices are dealt whole, as many as a warp's lanes have packets for. */
int mk_vec_deal(const mk_vec *v, const uint32_t *start, uint32_t slice0, uint32_t nslice, uint32_t in_off, uint32_t k, uint32_t head, mk_deal *out);
/* The same of any vector of that type, trailers or none, with slices of n values; `first` counts from the first value of the first slice waited for. For the planner,
 * which has yet to cut it. */
int mk_slices_deal(uint32_t dtype, uint32_t trailer, uint32_t n, uint32_t first, uint32_t k, uint32_t head, mk_deal *out);

/* Value of a BULK counter when publication `pub` of step `step` is complete (wraps). */
MK_BOTH uint32_t mk_counter_target(const mk_vec *v, uint32_t step, uint32_t pub)
{
    return (step * v->pubs + pub + 1u) * v->signals;
}

#endif
