/* What the resident kernel is written with: its argument, a worker's shared memory, and what it rests on
 * (ptx.cuh: mbarriers, bulk copies, packets, counters; here: bounded waits, vectors). design.md sections 4-6, 9. */
#ifndef MK_DEVICE_CUH
#define MK_DEVICE_CUH

#include "instructions/delta_places.cuh"
#include "instructions/program.h"
#include "megakernel/rings.h"
#include "megakernel/schedule.h"
#include "megakernel/trace.h"

/* Roles. Compute warps come first; each of the other warps has one job. */
#define MK_WARPS          8
#define MK_COMPUTE        (MK_WARPS * 32)
#define MK_GROUP_WARPS    4u             /* a warpgroup */
#define MK_GROUPS         (MK_WARPS / 4) /* of them: matvec.cuh */
#define MK_WARP_CONTROL   MK_WARPS       /* reads step descriptors, feeds instructions */
#define MK_WARP_LOADER    (MK_WARPS + 1) /* streams weights, and pages of a cache */
#define MK_WARP_COURIER   (MK_WARPS + 2) /* goes to the host for SCHEDULE */
#define MK_WARP_SCOUT     (MK_WARPS + 3) /* brings weights into L2 for which the ring has no room yet */
#define MK_WARP_ASIDE     (MK_WARPS + 4) /* the first of those that do what is beside the queue: aside.cuh */
#define MK_ASIDES         4u
#define MK_THREADS        (MK_COMPUTE + (4 + MK_ASIDES) * 32)
/* Registers of a thread, together all that an SM has. ptxas ignores setmaxnreg, and says so in a line of information only, where a function
 * that a role calls needs more than that role keeps: mk_schedule_next and what it calls use 116, so that is for compute warps alone (tests/test_trim.sh). */
#define MK_REGS_COMPUTE   168
#define MK_REGS_HELPER    104
#define MK_REGS_ASIDE     72
static_assert(MK_COMPUTE * MK_REGS_COMPUTE + 4 * 32 * MK_REGS_HELPER + 32 * MK_ASIDES * MK_REGS_ASIDE == 65536, "else the compute warps wait for theirs for ever");

/* A stage: the scales of its whole segment, which are few, then its weights: whole K blocks of the segment. */
#define MK_MOST_SCALES    1024u
#define MK_MOST_GATE      8160u  /* values of an f32 input (MK_GEMV_X_F32), whose weights are one stage: a byte says how many K blocks a stage has */
#define MK_STAGE_LEAST    8192u  /* of weights: one K block of any segment */
#define MK_STAGES         8u     /* of the ring: an even number */
#define MK_PACE           2u     /* stages under way at once before an instruction's product has begun: kernel.cu, feed_begin */
#define MK_PACE_UP        3u     /* of EXPERT_UP */
#define MK_SCOUT_BYTES    147456u /* bytes that the scout brings into L2 behind a GQA_PARTIAL where there are no experts: kernel.cu */
#define MK_STAGED_VALUES  2304u  /* of a vector, at MK_MAX_ROWS rows in bf16 */
#define MK_STAGING        (MK_MAX_ROWS * (MK_STAGED_VALUES * 2 + 64)) /* 32 of them: mk_row_stride; attention needs the others */
#define MK_UPPER          19200u /* its upper part begins there: of those aside, in a step of one row */
#define MK_STAGED_BLOCKS  (MK_STAGING / 128)                          /* of 64 values */
#define MK_TILE_BYTES     1024u /* a chunk of 64 rows: ldmatrix may read as far, however few rows there are */
#define MK_INSN_RING      4u
#define MK_MAX_VEC        48u
#define MK_MAX_START      2864u /* slice starts of all vectors, in shared memory */
#define MK_MAX_NORM_HEADS 64u
#define MK_ANGLES         64u /* sine and cosine of the first pairs of a query that turn */
#define MK_MAX_PIECES     (8 * MK_COMPUTE) /* of the LM head */
#define MK_RED_FLOATS     4864u /* of partial sums */
#define MK_OP_LEAVE       0xffu /* the controller's word to the compute warps */
#define MK_ASIDE_ROWS     64u /* of weights, at most */
#define MK_LATE_ROWS      16u /* up to which the shared expert's gate|up may begin when ROUTE has chosen and be done in time: MK_END_LATE */
#define MK_ASIDE_STAGES   (MK_STAGES - MK_GROUPS) /* at most: mk_next_skip */
#define MK_DELTA_RANK     128u /* of f and z in DELTA_STEP, where they have one */
#define MK_STEP_RING      8u
#define MK_NEAR_SLOTS     8u /* streams that SCHEDULE keeps in shared memory */
#define MK_STEP_PACKETS   ((uint32_t)((sizeof(mk_step) + 11) / 12))

/* Packets of a step with so many rows: a short one is read sooner. One without rows has those of one row. */
#define MK_ROW_PACKETS(n) ((uint32_t)((offsetof(mk_step, row) / 4 + (n) * (sizeof(mk_row) / 4) + 2) / 3))
#ifdef __CUDACC__
/* Where step seq's lie. */
__host__ __device__ __forceinline__ static uint4 *mk_step_at(uint4 *ring, uint32_t seq)
{
    return ring + seq % MK_STEP_RING * MK_STEP_PACKETS;
}
/* The one with the first row's token, position and flags. */
#define MK_TOKEN_PACKET ((uint32_t)((offsetof(mk_step, row) + offsetof(mk_row, token)) / 12))
static_assert((offsetof(mk_step, row) + offsetof(mk_row, token)) % 12 == 0 && offsetof(mk_row, flags) == offsetof(mk_row, token) + 8, "in one packet");
__host__ __device__ __forceinline__ static uint32_t mk_step_packets(uint32_t nrows)
{
    return MK_ROW_PACKETS(nrows > 1 ? nrows : 1u);
}
#endif

/* What an instruction streams, as the loader sees it: a segment of the worker's static tape, or (T > 0) the chosen experts' slices. Scales come first, then weights. */
enum { MK_SEG_LOGITS = 1,  /* only in steps that need logits */
       MK_SEG_ROUTED = 2,  /* the first behind a ROUTE of this queue, which is to be waited for */
       MK_SEG_RELEASES = 4, /* the last that goes by it: the next one may be made */
       MK_SEG_CACHE = 8 /* none of these: pages of a cache, in a step of one row */ };
#define MK_CACHE_STAGES 4u  /* of a page */
#define MK_CACHE_SKEW   64u /* bytes between the halves of such a stage, so that what eight lanes read at once falls into different banks */
/* Of heads of so many blocks of 32 channels: pages that GQA_PARTIAL takes at a time; stages of a page. */
#define MK_GQA_TURN(blocks)   ((blocks) == 8 ? 1u : 2u)
#define MK_GQA_STAGES(blocks) ((blocks) / 2u)
MK_BOTH uint32_t mk_gqa_blocks(uint32_t dim)
{
    return dim > 128 ? 8 : dim > 64 ? 4 : 2;
}
/* Of a stage. */
MK_BOTH uint32_t mk_gqa_stage_bytes(uint32_t dim)
{
    return 4 * MK_PAGE * dim / MK_GQA_STAGES(mk_gqa_blocks(dim));
}
typedef struct mk_seg {
    uint64_t base;   /* in the tape region or the expert region; MK_SEG_CACHE: the number of the partial, and per_most, per_less are its grain and most */
    uint64_t stride; /* from expert to expert */
    uint32_t scales; /* bytes of scales, padded */
    union {
        uint32_t bytes;        /* of weights */
        uint32_t slice_stride; /* from slice to slice of an expert */
    };
    union {
        uint32_t stage; /* bytes of weights of a stage: the last one may have fewer */
        uint32_t magic; /* of a division by T */
    };
    uint16_t T, parts, nkb; /* parts: EXPERT_UP: what an expert's rows are cut into slices of */
    uint16_t rows, t; /* EXPERT_DOWN: the worker's slice. EXPERT_UP: 0, and the logarithm of matrix rows a part, gate and up */
    uint8_t per_most, per_less; /* K blocks a stage: of slices of `most` rows, of shorter ones */
    uint8_t most;
    uint8_t blank; /* EXPERT_DOWN: an empty stage after each segment makes their number even */
    uint8_t flags;
    uint8_t share; /* EXPERT_DOWN: mk_down_shared.log */
    uint32_t route; /* MK_SEG_ROUTED: where in the LOCAL vectors */
} mk_seg;
static_assert(sizeof(mk_seg) == 48 && offsetof(mk_seg, T) == 28, "three 16-byte loads");

/* K blocks a stage and stages of a segment. */
#define MK_STAGES_WORD(per, stages) ((per) | (stages) << 16)

/* Who waited in vain for what: written once, by the first, in pinned memory. */
enum mk_fault_kind { MK_FAULT_PACKET = 1, MK_FAULT_COUNTER, MK_FAULT_TAPE, MK_FAULT_EXPERT, MK_FAULT_ROUTE, MK_FAULT_DRAW, MK_FAULT_CACHE };
typedef struct mk_fault {
    uint32_t kind; /* 0: none. Written last */
    uint32_t worker, step, seq, opcode, layer;
    uint32_t vec, pub, row, packet; /* packet: counted from the first slice of the wait */
    uint32_t slice0, expected, found;
} mk_fault;

/* Words that SCHEDULE's worker writes and the host reads. */
enum mk_beat { MK_BEAT_STEPS = 0, /* finished */ MK_BEAT_TAKEN = 1, /* submit entries */ MK_BEAT_IDLE = 2, /* waits for work */
               MK_BEAT_EVENTS = 3, /* emitted */ MK_BEAT_STREAMS = 4 /* open */ };
#define MK_HEARTBEAT_BYTES 128u

/* Where the workers meet to draw a token (instructions/sample.cuh); of nobody else's interest. */
#define MK_DIGITS    2048u
#define MK_DRAW_SETS 3u
typedef struct mk_draw_part {
    unsigned long long sum, ties;
} mk_draw_part;
/* A row's draws before top-p is applied. Packets, the last word step + 1: a part's weight (two words); the token of a try, its logit, whether min-p leaves it; by part the weight before each of
 * those tokens in the order (two words); the try that is the choice. */
typedef struct mk_tried {
    uint4 part[MK_COMPUTE], token[MK_TRIES], before[MK_COMPUTE][MK_TRIES], choice;
} mk_tried;
/* What a row's top-k may leave, if it is not more than MK_FEW. Packets: how many tokens a part has of it; these, and their logits; whether they were too many. */
#define MK_FEW      64u
#define MK_FEW_PART 32u /* of a part at most */
typedef struct mk_few {
    uint4 count[MK_COMPUTE], token[MK_COMPUTE][MK_FEW_PART], over;
} mk_few;
typedef struct mk_draws {
    uint4 token[MK_MAX_ROWS]; /* packets: token, its logit, -, step + 1 */
    mk_tried tried[MK_MAX_ROWS];
    mk_few few[MK_MAX_ROWS];
    uint32_t arrived, pad[31]; /* meetings so far, times the parts */
    unsigned long long weight[MK_DRAW_SETS][MK_DIGITS]; /* by digit of the order key; meeting m uses set m mod MK_DRAW_SETS */
    uint32_t count[MK_DRAW_SETS][MK_DIGITS];
    mk_draw_part part[2][MK_COMPUTE];
} mk_draws;

/* The matrix segment of an instruction. */
typedef struct mk_tile {
    uint32_t wtype, rows, nkb, per, nst; /* K blocks, K blocks a stage, stages */
    uint32_t halves, nseg, phase;        /* scale segments: isa.h */
    uint32_t shift;                      /* K blocks a scale row: mk_scale_shift */
} mk_tile;
/* EXPERT_DOWN: 1 << log experts share a stage, whose halves lie there one after the other, each behind so many bytes of scales: from where the ring's scales begin. 0: each expert has stages of
 * its own, as all segments have. */
typedef struct mk_down_shared {
    uint16_t log, scales;
} mk_down_shared;
#define MK_SHARED_LOG    2u /* at most */
#define MK_SHARED_BLOCKS 4u /* a half has so many K blocks, or twice as many */
/* EXPERT_DOWN of one row, whose warps take two K blocks at once, A and B: from A's weights and scales to B's; to those of the next A, its values, its expert's staged pair; of the staged pair, from
 * the end of a stage to the next. */
typedef struct mk_down_steps {
    uint32_t w_b, f_b, next_w, next_f, next_x, next_row, stage_row;
} mk_down_steps;
/* The vector of wait 0 as an instruction wants it. */
typedef struct mk_input {
    uint32_t in_off, k; /* values [in_off, in_off + k) */
    uint32_t prologue, param_off, norm_group;
    uint32_t form; /* matvec.cuh */
    float eps;
} mk_input;
/* Attention of one row: where the newest keys and values are, which it takes from the packets of its wait 0 (gqa_partial.cuh). */
typedef struct mk_newest {
    uint32_t k_off, v_off; /* as in the instruction that appends them */
    uint32_t param_off;    /* its, too */
    float eps;
} mk_newest;
/* GQA_PARTIAL: what COMBINE publishes, should the row have one split. */
typedef struct mk_whole {
    uint16_t vec, pub; /* vec: MK_NONE: COMBINE does it in any case */
    uint16_t values;   /* of a slice */
    uint16_t slices;   /* of a head */
} mk_whole;
/* mk_deal (program.h) in four bytes; packets 0: slices are not alike, and what each packet carries is looked up. */
typedef struct mk_hands {
    uint8_t packets, values; /* of a group, which is a warp's: group g is that of warp g mod MK_WARPS */
    uint8_t slice, per;      /* of a slice: values, packets */
} mk_hands;
#define MK_HAND_BY(per) ((1024u + (per) - 1) / (per)) /* lane * this >> 10 is lane / per: per and lane are at most 32 */
/* What follows from an instruction of the matrix opcodes alone, worked out by the host: all that compute warps do is on the way of the token. */
typedef struct mk_plan {
    alignas(16) mk_tile tile; /* GEMV, LM_HEAD, ROUTER; EXPERT_UP: the longest slice; EXPERT_DOWN: an expert's, nst is even */
    union {
        mk_input x;           /* GEMV, LM_HEAD, EXPERT_UP, ROUTE */
        mk_down_steps steps;  /* EXPERT_DOWN */
        uint32_t queries;     /* MLA_PARTIAL: its table in mk_gpu_args.map (mk_queries_places), 0: none */
        struct {
            mk_newest newest; /* GQA_PARTIAL */
            mk_whole whole;
        };
    };
    uint32_t key;             /* the same for inputs that are staged alike; 0: none */
    uint32_t map, packets;    /* of wait 0: where its packets begin in mk_gpu_args.map, packets of a row; EXPERT_DOWN: the table of a pair's packets there (0: none), packets of a pair; DELTA_STEP: its table (0: none) */
    mk_hands hands;           /* how warps share wait 0's packets */
    uint16_t skip, by_per;    /* packets before the first that is wanted; of a division by hands.per: mk_hand_of */
    float inv_k;              /* 1 / the values of a norm: x.k, x.norm_group */
    uint8_t one;              /* what runs in a step of one row: MK_ONE, MK_ONE_*; 0: the opcode */
    uint8_t f32;              /* packets carry f32 */
    uint8_t head_shift;       /* K blocks of a head: 1 << head_shift; MK_NO_NORM */
    uint8_t dealt;            /* EXPERT_UP, LM_HEAD, ROUTE: 1, 2: one row is gathered as its packets are dealt, by MK_ONE_RMS, MK_ONE_FAR; EXPERT_DOWN: its pairs are gathered at once */
    uint32_t beside;          /* a GEMV of one row: bytes of the staging area before its own input that it leaves alone. MLA_PARTIAL: how many such GEMVs stand before it */
    uint32_t end;             /* MK_END_*; the gate's word in its packet << 8. ROUTER: MK_END_NEAR; it, EXPERT_UP, EXPERT_DOWN, MLA_PARTIAL: MK_END_ASIDE */
    uint32_t out_at, res_at;  /* result and residual in LOCAL memory */
    union {
        uint32_t gate_at;     /* the gate's packet, from the first of wait 2 */
        uint32_t pass;        /* EXPERT_UP, EXPERT_DOWN with MK_END_ASIDE: stages of what is done aside, which it goes past */
        uint32_t behind;      /* the shared expert's gate|up: stages of a ROUTER that lie before its own, both done aside */
    };
    uint32_t magic;           /* EXPERT_UP: of a division by T */
    union {
        uint32_t less;        /* EXPERT_UP: MK_STAGES_WORD of slices shorter than the tile */
        uint32_t near_gain;   /* GEMV with MK_END_NEAR: the gammas that its result is left with */
        mk_down_shared shared; /* EXPERT_DOWN */
    };
    union {
        uint64_t tape;        /* DELTA_STEP: its segments, in the tape region */
        uint32_t gain;        /* an RMS norm, packets dealt: in mk_gpu_args.map, the gammas of wait 0's packets: gains.cuh */
    };
} mk_plan;
static_assert(sizeof(mk_plan) == 128, "eight 16-byte loads");
enum { MK_END_SILU = 1, MK_END_ADDS = 2, MK_END_GATED = 4, MK_END_FROM_LOCAL = 8, MK_END_TO_LOCAL = 16, MK_END_F32 = 32,
       MK_END_ASIDE = 64, /* in a step of one row it is not the compute warps'; EXPERT_UP, EXPERT_DOWN: it waits for some that are not; MLA_PARTIAL: its queries are not */
       MK_END_NEAR = 128, /* in a step of one row: GEMV: leaves its result, times gammas, in mk_shared.near for the next instruction; ROUTER: takes it there */
       MK_END_LATE = 1024 /* the shared expert's gate|up, behind a ROUTER that is done aside: begins when ROUTE has chosen */ };
/* Never an opcode: a controller puts it in an instruction's place. */
#define MK_ONE(f32, form, pro) (0x40u | (f32) | (form) << 1 | (pro) << 3)
#define MK_IS_ONE(run) ((run) - 0x40u < 0x30u)
enum { MK_ONE_PLAIN = 0, MK_ONE_RMS = 1, MK_ONE_HEADS = 2, MK_ONE_LONG = 3, MK_ONE_SHORT = 4, MK_ONE_FAR = 5 }; /* prologues; LONG, SHORT, FAR: none, but more or fewer packets; FAR of f32: RMS; FAR of bf16 that are not dealt: a packet a thread */
#define MK_IS_FAR(one) ((one) >= MK_ONE(0u, 0u, MK_ONE_FAR))
/* Those that there are. */
#define MK_ONES_OFTEN(X) X(true, MK_X_F16, MK_ONE_RMS) X(false, MK_X_F16, MK_ONE_HEADS) X(false, MK_X_F16, MK_ONE_PLAIN) /* of a layer of FP8 */
#define MK_ONES_SELDOM(X) \
    X(true, MK_X_BF16, MK_ONE_RMS) X(true, MK_X_F16, MK_ONE_FAR) X(true, MK_X_BF16, MK_ONE_FAR) X(false, MK_X_F16, MK_ONE_RMS) X(false, MK_X_F16, MK_ONE_LONG) \
    X(false, MK_X_F16, MK_ONE_SHORT) X(false, MK_X_F16, MK_ONE_FAR) X(false, MK_X_BF16, MK_ONE_PLAIN) X(false, MK_X_BF16, MK_ONE_RMS) X(false, MK_X_BF16, MK_ONE_HEADS) \
    X(false, MK_X_BF16, MK_ONE_LONG) X(false, MK_X_BF16, MK_ONE_SHORT) X(false, MK_X_BF16, MK_ONE_FAR)
#define MK_ONES(X) MK_ONES_OFTEN(X) MK_ONES_SELDOM(X)
enum { MK_ONE_COUNT = 0x70, /* nothing but its increment: GQA_APPEND, KV_APPEND whose row the partials write */
       MK_ONE_GQA = 0x71, MK_ONE_MLA = 0x72,
       MK_ONE_NONE = 0x73, /* nothing at all: COMBINE of a row whose partials publish what it would */
       MK_ONE_UP = 0x74,    /* of BF16, of FP8 */
       MK_ONE_DOWN = 0x76,  /* of BF16 with up to 16, 24 and MK_DOWN_ONE_ROWS rows, of FP8 */
       MK_ONE_DELTA = 0x7c, /* without f and z, with them of BF16, of FP8 */
       MK_ONE_ROUTE = 0x7f /* a thread an expert, two */ };
/* In mk_places.run, with any of these. */
#define MK_TRACED      0x100u
#define MK_AWAITS      0x200u /* what is done aside: EXPERT_UP: ROUTER, gate|up; EXPERT_DOWN: the shared expert's way down; MK_ONE_MLA: its own first queries */
#define MK_LAP         0x400u /* and its parity */
enum { MK_AHEAD_WHOLE = 1, /* GQA: the items publish what COMBINE would */ MK_AHEAD_ALIKE = 2, /* GQA: the newest key turns as the queries do */
       MK_AHEAD_HALVES = 4 /* GQA: the last split's items have half of their heads each, and behind all others come those of the other halves */ };
#define MK_AHEAD_PAGES 2u /* of a worker's first items of MLA_PARTIAL, looked up by the controller */
#define MK_NO_NORM 15u

/* What follows from an instruction and a step, by the controller: row 0 of waits 0-2 and of the signal (PACKET vectors), and their epochs. */
typedef struct mk_places {
    alignas(16) const uint4 *in[3];
    uint4 *out;
    uint32_t epoch[3], out_epoch;
    uint32_t run; /* what the compute warps are to run: opcode, MK_ONE, MK_ONE_*; with MK_TRACED where the step is */
    uint32_t per, items, ahead; /* MK_ONE_GQA, MK_ONE_MLA: pages of a split, items of the row; MK_AHEAD_* */
    union {
        uint32_t page[MK_AHEAD_PAGES]; /* MLA: the first ones of the worker's first two items */
        uint32_t after;                /* of what is done aside: hand_over */
    };
} mk_places;
/* What thread 0 has noted of an instruction whose step is traced: low halves of the clock, 0: not seen. */
typedef struct mk_trace_note {
    alignas(16) uint32_t start;
    uint32_t input, publish, end;
    uint32_t weights; /* mk_trace_now.weights at its end */
    uint32_t bytes, pad[2];
} mk_trace_note;
/* An instruction as the controller feeds it. */
typedef struct mk_fed {
    alignas(16) mk_insn in;
    mk_plan plan;
    mk_places place;
    mk_delta_places delta; /* DELTA_STEP */
    mk_trace_note note;
} mk_fed;

/* One word of mk_gpu_args.map says what a packet carries: the vector's value that it begins with, how many, which word is its slice's trailer (3: none), the slice. */
#define MK_MAP_WORD(first, n, trailer, slice) ((first) | (n) << 16 | (trailer) << 20 | (slice) << 22)
#define MK_MAP_FIRST(m)   ((m) & 0xffffu)
#define MK_MAP_VALUES(m)  ((m) >> 16 & 15u)
#define MK_MAP_TRAILER(m) ((m) >> 20 & 3u)
#define MK_MAP_SLICE(m)   ((m) >> 22)
#define MK_MAP_NONE       MK_MAP_WORD(0u, 0u, 3u, 0u)

/* MLA_PARTIAL's queries as the warps aside and steps of several rows make them go by a table of words: of each head the first packet of wait 0, and of the end; of each head the packets of wait 1 that have values
 * of its q_pe, by words of zero as many as MK_TURN_SLOTS; of each packet of wait 0 two words, where its pairs of values go (mk_att_byte of heads modulo 16): halves of the first, lower
 * half of the second, 0xffff: nowhere. */
#define MK_TURN_SLOTS 16u
#define MK_TURN_WORD(packet, pair, pairs) ((packet) | (uint32_t)((pair) + 3) << 16 | (pairs) << 24) /* its first pair is q_pe's, which may be before the first, and has so many */
#define MK_TURN_PACKET(w) ((w) & 0xffffu)
#define MK_TURN_PAIR(w)   (((w) >> 16 & 0xffu) - 3u)
#define MK_TURN_PAIRS(w)  ((w) >> 24)
MK_BOTH uint32_t mk_queries_places(uint32_t heads)
{
    return (heads + 1 + MK_TURN_SLOTS * heads + 1) & ~1u;
}

/* The ring of weight stages: as long as the program's shared memory and its segments allow. */
typedef struct mk_ring {
    uint32_t at;             /* in shared memory, from its beginning */
    uint32_t stride, stages; /* bytes from stage to stage; how many there are */
    uint32_t scales;         /* bytes of a stage before its weights */
} mk_ring;

/* Everything the kernel is told, once. Pointers into device memory unless said otherwise. */
typedef struct mk_gpu_args {
    const mk_insn *insn;
    const mk_plan *plan;   /* of each */
    const uint32_t *queue; /* [workers + 1] */
    const uint32_t *map;   /* of the packets of the vectors that instructions gather */
    const mk_vec *vec;
    const uint16_t *start; /* of all vectors: mk_vec.start_index is an index into it here */
    const mk_seg *seg;
    const uint32_t *seg_first; /* [workers + 1] */
    const uint8_t *tape, *expert, *embed;
    const float *param;
    uint8_t *exchange, *bulk;
    uint32_t *counter;
    mk_draws *draw;
    uint8_t *state, *kv;
    uint8_t *local_image; /* [workers][local_bytes] LOCAL vectors, taken over at the start and given back at the end; NULL: neither */
    const mk_sampling *sampling; /* [slots] what SCHEDULE copied of the host's */
    const uint32_t *page; /* the device's copy of the page tables */
    mk_sched *sched;      /* as it is at the start; the resident kernel then has it in shared memory */
    const mk_submit_packets *submit; /* pinned [MK_SUBMIT_RING] */
    uint4 *step_ring;     /* [MK_STEP_RING + 1][MK_STEP_PACKETS] packets: mk_step_publish; nobody reads the last ones, nor the events behind them: rehearsals */
    uint32_t *abort;
    uint32_t *position;   /* [workers] the instruction last fed: for the flight recorder */
    mk_fault *fault;      /* pinned */
    uint32_t *heartbeat;  /* pinned; enum mk_beat */
    mk_ring ring;
    uint64_t state_slot_bytes, kv_page_bytes, timeout_ns;
    uint32_t packets, sweep; /* of the exchange; steps between two sweeps of them */
    uint32_t n_vec, n_start, workers, epoch0, max_pages, local_bytes;
    uint4 *trace;            /* records: megakernel/trace.h */
    uint32_t n_insn;
    uint32_t unloaded;       /* the loader says that a stage is full without filling it */
    uint32_t ahead;          /* bytes that the scout brings into L2 behind a GQA_PARTIAL; 0: none */
} mk_gpu_args;

/* ROUTE's result once more, by (expert, row): pair p is one row's choice of one expert; the pairs of union expert j are
 * [first[j], first[j + 1]). */
typedef struct mk_pairs {
    uint8_t row[MK_MAX_UNION], rank[MK_MAX_UNION], expert[MK_MAX_UNION]; /* expert: j */
    uint8_t first[MK_MAX_UNION + 4];
} mk_pairs;

/* A warp's place in the ring: the next stage of its group of warps (matvec.cuh). */
typedef struct mk_next {
    alignas(16) uint32_t bar; /* shared address of the full barrier; the empty one follows at MK_EMPTY */
    uint32_t stage, phase;    /* of the weights; parity of the barrier's phase */
    uint32_t at;              /* stages so far, of both groups */
} mk_next;
/* What such places go by. */
typedef struct mk_lap {
    alignas(16) uint32_t end; /* of the full barriers */
    uint32_t bars, bytes;     /* of a lap */
    uint32_t step;            /* bytes to the group's next stage */
    uint32_t scales;          /* mk_ring.scales */
    uint32_t none;            /* 0, which the compiler does not know: mk_stage_leave */
} mk_lap;
/* What a compute warp remembers from instruction to instruction. */
typedef struct mk_memo {
    mk_next next;
    uint32_t staged, step;  /* what the staging area holds: mk_plan.key of that step; 0: nothing that may be used again */
    uint32_t turn;          /* of the reduction area's halves */
    uint32_t chunk;         /* of a vector that does not fit the staging area */
    uint32_t parity;        /* of a gathered vector's sums of squares */
    uint32_t route_parity;  /* of mk_shared.route_empty */
    uint32_t batch;         /* of pairs that are staged aside, since the launch */
    uint32_t n;             /* the instruction under way, with MK_N_TRACED where its step is; MK_NO_INSN: none yet */
} mk_memo;
#define MK_NO_INSN  0xffffffffu
#define MK_N_TRACED 0x80000000u

/* Of the step that is traced. */
typedef struct mk_trace_now {
    uint32_t on;         /* mk_step.trace; 0: nothing is noted */
    uint32_t base, high; /* halves of the clock at the step's begin. These three by the controller */
    uint32_t weights;    /* how long thread 0 has waited for weights, in all traced steps: it wraps */
    uint32_t first;      /* the worker's first record of a step */
} mk_trace_now;

/* A worker's shared memory. The LOCAL vectors and the ring follow. */
typedef struct mk_shared {
    alignas(128) uint8_t staging[MK_STAGING]; /* gathered vectors; scratch of the opcodes that gather none */
    alignas(16) float red[MK_RED_FLOATS];     /* partial tiles of the compute warps */
    float near[MK_SEGMENT_ROWS];              /* what a GEMV has published, times a ROUTER's gammas, which stands behind it */
    alignas(16) float sumsq[2][MK_MAX_ROWS][MK_WARPS]; /* of a gathered vector's row: by warp */
    alignas(16) uint32_t top[MK_MAX_ROWS][MK_WARPS];   /* bits of its largest magnitude */
    alignas(16) float head_rstd[MK_MAX_ROWS][MK_MAX_NORM_HEADS];
    float factor[MK_STAGED_BLOCKS];                    /* what K blocks of staged FP8 inputs are multiplied by: [row][K blocks that are staged] */
    alignas(16) mk_vec vec[MK_MAX_VEC];
    uint16_t start[MK_MAX_START];
    mk_fed fed[MK_INSN_RING];
    mk_fed aside; /* a GEMV, a ROUTER, an MLA_PARTIAL's queries, or, of several rows, an EXPERT_DOWN's pairs */
    alignas(16) mk_step step;
    mk_gpu_args args; /* for functions that are not inlined */
    float2 angle[MK_ANGLES]; /* of the attention that is next, in a step of one row: by the controller */
    mk_pairs pairs;
    mk_memo memo[MK_WARPS];
    mk_lap lap;
    mk_trace_now trace;
    uint64_t insn_full[MK_INSN_RING], insn_empty[MK_INSN_RING];
    uint64_t full[MK_STAGES], empty[MK_STAGES];
    uint64_t route_full, route_empty;
    uint64_t route_staged; /* h, by ROUTE: what is done aside begins */
    uint64_t aside_full, aside_done;
    uint64_t pairs_full[2], pairs_empty[2]; /* batches of EXPERT_DOWN's pairs that are staged aside, in turn */
    volatile uint32_t logits[4]; /* of step s, in [s & 3]: (s + 1) * 2 + any_logits */
    uint32_t draw_met;           /* meetings so far */
    volatile uint32_t leave;     /* loader, courier, scout: stop */
    /* SCHEDULE's worker */
    volatile uint32_t submitted, taken; /* what has been seen of the host: entries, events taken */
    volatile uint32_t bus;              /* enum mk_bus: who looks */
    volatile uint32_t published;        /* steps; the last of them is sched.next */
    uint32_t idle;                      /* SCHEDULE's looks */
    uint32_t sweep_due;                 /* of the exchange (mk_schedule_sweep) */
    alignas(16) mk_sched sched;
    mk_sched_slot st[MK_NEAR_SLOTS]; /* where there are no more than that; else they are in device memory */
    uint32_t active[MK_NEAR_SLOTS];
    mk_submit near_entry;
    struct { /* of the step that SAMPLE has told of: what the scout concludes it with */
        uint32_t token;
        float logprob;
    } chosen;
    /* for the controller, who watches over the waits of hot loops */
    alignas(16) uint4 waiting[MK_THREADS / 32]; /* packet that a warp waits for: wait + 1 (0: none), row, packet, what is there */
    volatile uint32_t current;           /* instructions begun * 2, less 1 while one is under way */
    volatile uint32_t stage_kind;        /* enum mk_fault_kind of the last stage that was not there at once */
    volatile uint32_t aborted;
    volatile uint32_t streamed;          /* for the scout: where the loader is in the tapes, in units of 256 bytes */
    volatile uint32_t attended;          /* GQA_PARTIALs that this worker has signalled */
    volatile uint32_t told;              /* SCHEDULE's worker: what SAMPLE has told of, mk_step.seq + 1; as many are published: the newest step is still to be concluded. Where SCHEDULE has published, less than that */
    volatile uint32_t cached[4][3];      /* for the loader, of step s in [s & 3], when logits say so: position of its only row (MK_NO_CACHE: it has several), slot, mk_step.seq */
} mk_shared;
#define MK_NO_CACHE 0xffffffffu

#define MK_PAIR_PACKETS(rows) ((rows) > 16 ? 224u : 288u) /* EXPERT_DOWN: of a pair that is gathered at once, where there are so many rows of weights */
#define MK_PAIR_MOST    288u /* the greater of these: so many are asked for, behind the last pair, too */
#define MK_PAIR_HEAD    32u  /* bytes before a staged pair of one row, of which up to eight take what the last packet of the pair before has behind that one's end */
#define MK_PAIR_FACTOR  16u  /* so far before the pair is what its products are multiplied by */
#define MK_PAIR_NOWHERE 12u  /* and so far where the three words of a packet that is none go */
static_assert(MK_PAIR_HEAD >= MK_PAIR_FACTOR + 8 && MK_PAIR_FACTOR == MK_PAIR_NOWHERE + 4, "in a pair's head nothing is in the way");
#define MK_DOWN_ONE_ROWS 32u /* of weights, at most, for mk_down_one */
#define MK_PAIR_WORDS   12u  /* of a lane in a pair's table: word j is of packet 32 j + lane. A multiple of 4 */
/* What a packet of a pair of EXPERT_DOWN is, whose slices all begin with even values (mk_expert_log; else a pair has no table): where its values go, in bytes, and how many it has, 0: none. */
#define MK_PAIR_WORD(value, n) ((value) * 2 | (n) << 16)
#define MK_PAIR_TO(m)     ((m) & 0xffffu)
#define MK_PAIR_VALUES(m) ((m) >> 16)
/* The table of a pair of so many packets whose slices begin with values `start` of it: word[32 * MK_PAIR_WORDS], zeros before. */
MK_BOTH void mk_pair_table(uint32_t *word, const uint32_t *start, uint32_t packets, uint32_t slice_packets)
{
    for (uint32_t q = 0; q < packets; q++) {
        const uint32_t s = q / slice_packets, value = start[s] + q % slice_packets * 6, left = value < start[s + 1] ? start[s + 1] - value : 0;
        word[q % 32 * MK_PAIR_WORDS + q / 32] = left ? MK_PAIR_WORD(value, left < 6 ? left : 6) : 0;
    }
}
MK_BOTH uint32_t mk_chunk_kblocks(uint32_t wtype)
{
    return MK_STAGED_VALUES / (wtype == MK_W_FP8 ? 64u : 32u);
}
/* a / b for a, b below 2^16 without a division. */
MK_BOTH uint32_t mk_small_quot(uint32_t a, uint32_t b)
{
#ifdef __CUDA_ARCH__
    return (uint32_t)__fdividef((float)a + 0.5f, (float)b);
#else
    return a / b;
#endif
}
/* Forms of a staged vector: matvec.cuh. */
enum { MK_X_BF16 = 1, MK_X_F16 = 2, MK_X_F32 = 3 /* not staged: gate.cuh */ };
MK_BOTH uint32_t mk_form(uint32_t wtype, int f32)
{
    return wtype == MK_W_FP8 ? MK_X_F16 : f32 ? MK_X_F32 : MK_X_BF16;
}
/* How many warps of a group take a stage's K blocks in turn. */
MK_BOTH uint32_t mk_ways(uint32_t rows)
{
    return rows > MK_SIDE_ROWS ? MK_GROUP_WARPS / 2 : MK_GROUP_WARPS;
}
/* K blocks that a warp multiplies at once: a tile's products wait for each other, and with few tiles there is nothing else to do. tiles: of a warp. */
MK_BOTH constexpr uint32_t mk_blocks_at_once(uint32_t form, uint32_t tiles)
{
    return tiles > 2 ? 1 : tiles == 1 && form == MK_X_BF16 ? 4 : 2;
}
/* Softmax keeps the order, and its sum goes when the weights are normalised: then logits choose, and a weight is exp(logit - greatest) before it is normalised. */
MK_BOTH bool mk_route_plain(const mk_route *t)
{
    return t->renorm && !t->has_bias && t->groups <= 1;
}
/* Bytes from row to row: values come in K blocks, and rows fall into different banks. */
MK_BOTH uint32_t mk_row_stride(uint32_t k)
{
    return ((k + 63) & ~63u) * 2 + 32;
}
/* The steps of an expert of k values that lies so in stages; a scale for two K blocks. */
MK_BOTH mk_down_steps mk_down_steps_of(const mk_tile *t, mk_down_shared shared, uint32_t k)
{
    const uint32_t ways = MK_GROUP_WARPS, stride = mk_row_stride(k), half = shared.scales + t->per * t->rows * MK_KBLOCK_BYTES;
    const uint32_t w_b = ways * t->rows * MK_KBLOCK_BYTES, f_b = ways / 2 * 4 * t->nseg, x_b = ways * (t->wtype == MK_W_FP8 ? 128 : 64);
    const mk_down_steps alone = {w_b, f_b, 2 * w_b, 2 * f_b, 2 * x_b, 0, stride}, experts = {half, half, 2 * half, 2 * half, 2 * stride, 2 * stride, 0}, /* B is the next expert's */
                        blocks = {w_b, f_b, half, half, stride, stride, 0};
    return !shared.log ? alone : t->per == MK_SHARED_BLOCKS ? experts : blocks;
}
/* Packets of a thread, of one row whose packets are dealt. */
#define MK_LOADS_OF(f32, pro) ((pro) == MK_ONE_FAR ? (f32) ? 10u : 16u : (pro) == MK_ONE_LONG ? 8u : (pro) == MK_ONE_SHORT ? 1u : 4u)

#ifdef __CUDACC__

#include "megakernel/ptx.cuh"

/* A warp arrives, all of it. */
MK_DEV void mk_warp_arrive(uint32_t bar, uint32_t lane)
{
    __syncwarp();
    if (mk_arrives(lane)) mk_mbar_arrive(bar);
}
/* An instruction with MK_AWAITS waits for what is done aside. */
MK_DEV void mk_aside_await(const mk_shared *sh, const mk_fed *f)
{
    while (!mk_mbar_try(mk_smem(&sh->aside_done), f->place.run & MK_LAP ? 1 : 0)) {}
}
/* Waits for the instruction behind which the warps aside begin. */
MK_DEV void mk_aside_after(const mk_shared *sh, uint32_t n)
{
    while (!mk_mbar_try(mk_smem(&sh->insn_empty[n % MK_INSN_RING]), n / MK_INSN_RING & 1)) {}
}

/* ---- a worker ------------------------------------------------------------------------------------------------------- */

/* A compute thread. */
typedef struct mk_dev {
    const mk_gpu_args *a;
    mk_shared *sh;
    const mk_insn *in;
    const mk_step *step;
    mk_memo *memo; /* the warp's: read by all lanes, written by lane 0 between two __syncwarp */
    uint32_t worker, tid, warp, lane;
    uint32_t trace; /* thread 0 of a traced step: mk_step.trace; else 0 */
} mk_dev;

MK_DEV mk_dev mk_here_by(const mk_insn *in, uint32_t tid)
{
    mk_shared *sh = mk_sh();
    mk_dev d = {&sh->args, sh, in, &sh->step, &sh->memo[tid / 32], blockIdx.x, tid, tid / 32, tid % 32, tid ? 0 : sh->trace.on};
    return d;
}
/* For opcodes that are functions of their own: registers are then allocated for each alone. */
MK_DEV mk_dev mk_here(const mk_insn *in)
{
    return mk_here_by(in, threadIdx.x);
}
/* An instruction by its shared address: a pointer that comes out of a call might point anywhere, and every load through it would be a generic one. */
MK_DEV const mk_insn *mk_insn_at(uint32_t at)
{
    return (const mk_insn *)__cvta_shared_to_generic(at);
}
/* What all lanes of a warp have, in a way that the compiler knows it: a branch on it then needs no place where lanes meet again, which costs 40 clocks. Nobody else asks for the bits that all
 * lanes have: megakernel/trim.py makes a move of it, for which nobody waits 45. */
MK_DEV uint32_t mk_uniform(uint32_t x)
{
    return __reduce_and_sync(0xffffffffu, x);
}
#include "megakernel/trace.cuh"

MK_DEV uint8_t *mk_local_memory(const mk_gpu_args *)
{
    return (uint8_t *)(mk_sh() + 1);
}

#define MK_EMPTY ((uint32_t)(offsetof(mk_shared, empty) - offsetof(mk_shared, full)))
/* From stage `at` on, how many to the first of the warp's group. */
MK_DEV uint32_t mk_group_first(uint32_t warp, uint32_t at)
{
    return (warp / MK_GROUP_WARPS - at) & (MK_GROUPS - 1);
}
/* Stage i at the beginning. */
MK_DEV mk_next mk_next_of(uint32_t i)
{
    const mk_ring *r = &mk_sh()->args.ring;
    const mk_next s = {mk_smem(&mk_sh()->full[i]), mk_smem(mk_sh()) + r->at + i * r->stride + r->scales, 0, 0};
    return s;
}
/* Where every warp begins, by a thread for each. */
MK_DEV void mk_next_begin(mk_shared *sh, uint32_t warp)
{
    const mk_ring *r = &sh->args.ring;
    const mk_lap lap = {mk_smem(&sh->full[r->stages]), 8 * r->stages, r->stages * r->stride, MK_GROUPS * r->stride, r->scales, 0};
    if (warp == 0) sh->lap = lap;
    sh->memo[warp].next = mk_next_of(warp / MK_GROUP_WARPS);
}
/* To the group's next stage. */
MK_DEV void mk_next_move(mk_next *s, const mk_lap *lap)
{
    s->bar += 8 * MK_GROUPS;
    s->stage += lap->step;
    if (s->bar < lap->end) return;
    asm volatile(""); /* a branch: it is not often */
    s->bar -= lap->bars;
    s->stage -= lap->bytes;
    s->phase ^= 1;
}
/* Past n stages, an even number and at most MK_ASIDE_STAGES, which others take. */
MK_DEV void mk_next_skip(mk_next *s, const mk_lap *lap, uint32_t n)
{
    s->bar += 8 * n;
    s->stage += n / MK_GROUPS * lap->step;
    s->at += n;
    if (s->bar < lap->end) return;
    s->bar -= lap->bars;
    s->stage -= lap->bytes;
    s->phase ^= 1;
}
/* Stages by their number since the launch, of both groups: where one lies, its scales' place included; it is waited for. */
static_assert((MK_STAGES & MK_STAGES - 1) == 0, "numbers wrap");
MK_DEV uint32_t mk_stage_at(const mk_shared *sh, uint32_t i)
{
    return mk_smem(sh) + sh->args.ring.at + i % MK_STAGES * sh->args.ring.stride;
}
MK_DEV uint32_t mk_stage_bar(const mk_shared *sh, uint32_t i)
{
    return mk_smem(sh->full) + 8 * (i % MK_STAGES);
}
MK_DEV uint32_t mk_stage_parity(uint32_t i)
{
    return i / MK_STAGES & 1;
}
/* Past n stages that all warps took of, by all lanes of each. */
MK_DEV void mk_stages_pass(mk_shared *sh, uint32_t warp, uint32_t lane, uint32_t n)
{
    const uint32_t at = sh->memo[warp].next.at + n, i = at + mk_group_first(warp, at);
    const mk_next next = {mk_stage_bar(sh, i), mk_stage_at(sh, i) + sh->args.ring.scales, mk_stage_parity(i), at};
    __syncwarp();
    if (lane == 0) sh->memo[warp].next = next;
    __syncwarp();
}
/* The staging area is about to be overwritten. */
MK_DEV void mk_staged_drop(const mk_dev *d)
{
    __syncwarp();
    if (d->lane == 0) d->memo->staged = 0;
}

typedef struct mk_spin {
    uint32_t n;
    uint64_t since;
} mk_spin;

/* Writes the fault record, if nobody has yet, and tells everybody to leave. `in` is a slot of the instruction ring. */
MK_CALL void mk_fault_report(const mk_insn *in, uint32_t kind, const mk_wait *w, uint32_t row, uint32_t packet, uint32_t expected, uint32_t found)
{
    const mk_shared *sh = mk_sh();
    if (atomicCAS(sh->args.abort, 0u, 1u) != 0u) return;
    mk_fault *f = sh->args.fault;
    f->worker = blockIdx.x;
    f->step = sh->step.seq;
    f->seq = in->seq;
    f->opcode = in->opcode;
    f->layer = in->layer;
    f->vec = w ? w->vec : MK_NONE;
    f->pub = w ? w->pub : MK_NONE;
    f->slice0 = w ? w->slice0 : 0;
    f->row = row;
    f->packet = packet;
    f->expected = expected;
    f->found = found;
    __threadfence_system();
    *(volatile uint32_t *)&f->kind = kind;
}

/* Every 256th failed look: has somebody given up, is the time over? Returns when the waiting began, 0 for: give up (*late: because of the time). */
MK_DEV uint64_t mk_patience(uint64_t since, bool *late)
{
    const mk_gpu_args *a = &mk_sh()->args;
    *late = false;
    if (mk_load_relaxed(a->abort)) return 0;
    uint64_t now = mk_now();
    if (!since) return now;
    *late = now - since >= a->timeout_ns;
    return *late ? 0 : since;
}
MK_CALL uint64_t mk_wait_late(const mk_insn *in, uint32_t kind, const mk_wait *w, uint32_t expected, uint32_t found, uint64_t since)
{
    bool late;
    since = mk_patience(since, &late);
    if (late) mk_fault_report(in, kind, w, 0, 0, expected, found);
    return since;
}

/* Loops that are hot wait without a call, which would cost them their registers: they leave word and the controller looks at the clock. */
/* Lanes that have parted do not take turns (trim.py leaves YIELD out): what a lane waits for no other lane of its warp may have yet to do, and between what one of them does and a wait for what
 * comes of it the warp comes together. */

/* Waits for a phase of a stage's barrier; on abort it returns anyway. */
MK_DEV void mk_stage_await(uint32_t bar, uint32_t parity, uint32_t kind)
{
    mk_shared *sh = mk_sh();
    const bool traced = threadIdx.x == 0 && sh->trace.on;
    const uint32_t since = traced ? mk_now_low() : 0;
    mk_flag_set(&sh->stage_kind, kind);
    while (!mk_mbar_try(bar, parity))
        if (mk_flag_get(&sh->aborted)) return;
    if (__builtin_expect(traced, 0)) { /* a branch: its instructions stand between the stage and the product */
        asm volatile("");
        sh->trace.weights += mk_now_low() - since;
    }
}
/* The same, should it be there already. */
MK_DEV void mk_stage_wait(uint32_t bar, uint32_t parity, uint32_t kind)
{
    if (!mk_mbar_test(bar, parity)) mk_stage_await(bar, parity, kind);
}
/* What a warp waits for, for whoever looks: any lane's word will do, so that nothing orders them. racecheck is told so by atomics. */
MK_DEV void mk_waiting_set(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    uint4 *q = &mk_sh()->waiting[threadIdx.x / 32];
#ifdef MK_RACECHECK
    atomicExch(&q->x, x), atomicExch(&q->y, y), atomicExch(&q->z, z), atomicExch(&q->w, w);
#else
    *q = make_uint4(x, y, z, w);
#endif
}
/* The nth failed look at a packet of wait k; false: give up. */
MK_DEV bool mk_still_waiting(uint32_t n, uint32_t k, uint32_t row, uint32_t packet, uint32_t found)
{
    mk_shared *sh = mk_sh();
    if (n & 255u) return true;
    mk_waiting_set(k + 1, row, packet, found);
    return !mk_flag_get(&sh->aborted);
}
/* After a wait of n failed looks. */
MK_DEV void mk_waited(uint32_t n)
{
    if (n >= 256) mk_waiting_set(0, 0, 0, 0);
}

/* Packet `packet` of wait k at p, of which q is an earlier look, without a call. */
MK_DEV uint4 mk_packet_get(const uint4 *p, uint4 q, uint32_t epoch, uint32_t k, uint32_t row, uint32_t packet)
{
    uint32_t looks = 0;
    while (q.w != epoch) {
        q = mk_packet_load(p);
        if (!mk_still_waiting(++looks, k, row, packet, q.w)) break;
    }
    mk_waited(looks);
    return q;
}

/* Packets base + at[j] of wait k, those of bit j of `wanted`, of which q are earlier looks. first: number of the packet at base, for those who ask what is waited for.
 * TOGETHER: by all lanes of a warp, which leave together: those that part meet again by way of code that is far away. */
template <uint32_t N, bool TOGETHER = false>
MK_DEV void mk_packets_wait(const uint4 *base, const uint32_t (&at)[N], uint32_t wanted, uint32_t epoch, uint32_t k, uint32_t row, uint32_t first, uint4 (&q)[N])
{
    uint32_t looks = 0;
    for (;;) {
        uint32_t late = 0;
#pragma unroll
        for (uint32_t j = 0; j < N; j++) late |= q[j].w != epoch ? wanted & 1u << j : 0;
        if (TOGETHER ? !__any_sync(0xffffffffu, late) : !late) break;
#pragma unroll
        for (uint32_t j = 0; j < N; j++) mk_packet_again(&q[j], base + at[j], late & 1u << j);
        if (++looks & 255u) continue;
        uint32_t packet = 0, found = 0;
#pragma unroll
        for (uint32_t j = 0; j < N; j++)
            if (late & 1u << j) packet = first + at[j], found = q[j].w;
        const bool leave = late && !mk_still_waiting(looks, k, row, packet, found);
        if (TOGETHER ? __any_sync(0xffffffffu, leave) : leave) break;
    }
    mk_waited(looks);
}

/* The same of packets `stride` apart. */
template <uint32_t N, bool TOGETHER = false>
MK_DEV void mk_packets_wait_every(const uint4 *base, uint32_t stride, uint32_t wanted, uint32_t epoch, uint32_t k, uint32_t row, uint32_t first, uint4 (&q)[N])
{
    uint32_t at[N];
#pragma unroll
    for (uint32_t j = 0; j < N; j++) at[j] = j * stride;
    mk_packets_wait<N, TOGETHER>(base, at, wanted, epoch, k, row, first, q);
}

/* Waits for a BULK vector; all compute threads call it, and may then read the vector with loads that bypass L1. */
MK_DEV void mk_bulk_wait(const mk_dev *d, const mk_wait *w)
{
    if (d->tid == 0) {
        const mk_vec *v = &d->sh->vec[w->vec];
        uint32_t target = mk_counter_target(v, d->step->seq, w->pub), found;
        mk_spin s = {0, 0};
        while ((int32_t)((found = mk_load_acquire(d->a->counter + v->counter)) - target) < 0)
            if (!(++s.n & 255u) && !(s.since = mk_wait_late(d->in, MK_FAULT_COUNTER, w, target, found, s.since))) break;
    }
    mk_sync();
    mk_trace_input(d);
}

/* One increment of a BULK vector after everything this worker wrote to it; all compute threads call it. */
MK_DEV void mk_bulk_signal(const mk_dev *d, uint32_t vec)
{
    mk_sync();
    if (d->tid == 0) mk_red_release(d->a->counter + d->sh->vec[vec].counter); /* releases what the barrier made visible to this thread as well */
}
/* The same after what one warp wrote, which calls it. */
MK_DEV void mk_bulk_signal_own(const mk_dev *d, uint32_t vec)
{
    __syncwarp();
    if (d->lane == 0) mk_red_release(d->a->counter + d->sh->vec[vec].counter);
}

MK_DEV void *mk_local_at(const mk_dev *d, uint32_t vec)
{
    return mk_local_memory(d->a) + d->sh->vec[vec].offset;
}
MK_DEV void *mk_bulk_at(const mk_dev *d, uint32_t vec)
{
    return d->a->bulk + d->sh->vec[vec].offset;
}

MK_DEV uint8_t *mk_kv_at(const mk_dev *d, uint64_t kv_off, uint32_t slot, uint32_t pos, uint32_t row_bytes)
{
    uint32_t page = __ldcg(d->a->page + (size_t)slot * d->a->max_pages + pos / MK_PAGE);
    return d->a->kv + kv_off + page * d->a->kv_page_bytes + (uint64_t)(pos % MK_PAGE) * row_bytes;
}

/* ---- numbers -------------------------------------------------------------------------------------------------------- */

MK_DEV float mk_bf16_value(uint32_t bits)
{
    return __uint_as_float(bits << 16);
}
/* A step of a sum over the warp, whose order is 16, 8, 4, 2, 1. */
MK_DEV float mk_warp_add(float v, int m)
{
    return v + __shfl_xor_sync(0xffffffffu, v, m);
}
MK_DEV float mk_warp_sum(float v)
{
#pragma unroll
    for (int m = 16; m; m >>= 1) v = mk_warp_add(v, m);
    return v;
}

/* Eight sums over the warp in nine exchanges: lanes 4 i to 4 i + 3 have sum i at the end. The order of each is that of mk_warp_sum. */
MK_DEV float mk_warp_eight(const float *v, uint32_t lane)
{
    const bool b16 = lane & 16, b8 = lane & 8, b4 = lane & 4;
    float a[4], b[2];
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = (b16 ? v[i + 4] : v[i]) + __shfl_xor_sync(0xffffffffu, b16 ? v[i] : v[i + 4], 16);
#pragma unroll
    for (int i = 0; i < 2; i++) b[i] = (b8 ? a[i + 2] : a[i]) + __shfl_xor_sync(0xffffffffu, b8 ? a[i] : a[i + 2], 8);
    float s = (b4 ? b[1] : b[0]) + __shfl_xor_sync(0xffffffffu, b4 ? b[0] : b[1], 4);
#pragma unroll
    for (int w = 2; w; w >>= 1) s += __shfl_xor_sync(0xffffffffu, s, w);
    return s;
}

/* ---- reading and publishing packet vectors -------------------------------------------------------------------------- */

MK_DEV const uint4 *mk_wait_packets(const mk_dev *d, const mk_wait *w, const mk_vec *v, uint32_t row)
{
    return (const uint4 *)(d->a->exchange + mk_packet_offset(v, mk_half(v, d->step->seq, w->pub), row, w->slice0));
}
MK_DEV uint32_t mk_wait_epoch(const mk_dev *d, const mk_wait *w)
{
    return mk_epoch(d->a->epoch0, d->step->seq, w->pub);
}

/* i / n for i * n < 2^32 by one multiplication. */
typedef struct mk_divisor {
    uint32_t magic, n;
} mk_divisor;
MK_DEV mk_divisor mk_div_by(uint32_t n)
{
    mk_divisor v = {n > 1 ? 0xffffffffu / n + 1 : 0, n};
    return v;
}
/* By the packets of a slice: the kernel keeps the constant in its copy of the vector. */
MK_DEV mk_divisor mk_div_by_slice(const mk_vec *v)
{
    mk_divisor d = {(uint32_t)v->reserved, v->slice_packets};
    return d;
}
MK_DEV uint32_t mk_quot(uint32_t i, mk_divisor v)
{
    return v.magic ? __umulhi(i, v.magic) : i;
}

/* Slice of [0, n) that holds value `first`, by one warp: 32-ary search of the starts. */
MK_DEV uint32_t mk_find_slice(const uint16_t *start, uint32_t n, uint32_t first, uint32_t lane)
{
    uint32_t lo = 0;
    while (n > 1) {
        uint32_t step = (n + 31) / 32, at = lane * step;
        bool le = at < n && start[lo + at] <= first;
        uint32_t k = 31 - __clz((int)__ballot_sync(0xffffffffu, le)); /* lane 0 always holds */
        lo += k * step;
        n = n - k * step < step ? n - k * step : step;
    }
    return lo;
}

/* Where slice `slice` of the instruction's signal goes, for one row. */
MK_DEV uint4 *mk_signal_packets(const mk_dev *d, const mk_vec *v, uint32_t row, uint32_t slice)
{
    return (uint4 *)(d->a->exchange + mk_packet_offset(v, mk_half(v, d->step->seq, d->in->signal_pub), row, slice));
}
MK_DEV uint32_t mk_signal_epoch(const mk_dev *d)
{
    return mk_epoch(d->a->epoch0, d->step->seq, d->in->signal_pub);
}

/* A unit is 30 consecutive values of one row's slice, lane l < 30 holding value 30 * group + l: ten packets of f32 or five of bf16.
 * One warp publishes it; value is 0 beyond the slice's n values. */
#define MK_UNIT 30u
/* Whether a lane stores a packet, where the packets of a slice begin at `slice`: that of its own and the following two or five values. */
MK_DEV bool mk_publishes(bool f32, uint32_t lane)
{
    const uint32_t third = lane * 43 >> 7;
    return lane < MK_UNIT && (f32 ? 3 * third : 6 * (third >> 1)) == lane;
}
MK_DEV uint4 *mk_publish_where(uint4 *slice, bool f32, uint32_t group, uint32_t lane)
{
    const uint32_t third = lane * 43 >> 7;
    return slice + (f32 ? 10 * group + third : 5 * group + (third >> 1));
}
/* By a warp. to: where the lane's packet goes, if it stores one; value: 0 where there is none. */
MK_DEV void mk_publish_to(uint4 *to, bool f32, float value, uint32_t epoch)
{
    uint32_t x = f32 ? __float_as_uint(value) : mk_bf16_bits(value);
    if (!f32) x |= __shfl_down_sync(0xffffffffu, x, 1) << 16;
    const uint32_t y = __shfl_down_sync(0xffffffffu, x, f32 ? 1 : 2), z = __shfl_down_sync(0xffffffffu, x, f32 ? 2 : 4);
    if (to) mk_packet_store(to, x, y, z, epoch);
}
MK_DEV void mk_publish_at(uint4 *slice, bool f32, uint32_t n, uint32_t group, float value, uint32_t epoch, uint32_t lane)
{
    const bool mine = group * MK_UNIT + lane < n && lane < MK_UNIT;
    mk_publish_to(mine && mk_publishes(f32, lane) ? mk_publish_where(slice, f32, group, lane) : NULL, f32, mine ? value : 0, epoch);
}
MK_DEV void mk_publish_unit(const mk_vec *v, uint4 *slice, uint32_t n, uint32_t group, float value, uint32_t epoch, uint32_t lane)
{
    mk_publish_at(slice, v->dtype == MK_F32, n, group, value, epoch, lane);
}
MK_DEV uint32_t mk_units(uint32_t n)
{
    return (n + MK_UNIT - 1) / MK_UNIT;
}
/* Units of all rows, row by row, from a warp's first one on; the next is MK_WARPS further. */
typedef struct mk_unit_at {
    uint32_t row, group;
} mk_unit_at;
MK_DEV void mk_unit_settle(mk_unit_at *u, uint32_t units)
{
    if (units == 1) { /* as many turns of the loop as there are warps */
        u->row += u->group;
        u->group = 0;
    }
    while (u->group >= units) {
        u->group -= units;
        u->row++;
    }
}
MK_DEV mk_unit_at mk_unit_first(uint32_t first, uint32_t units)
{
    mk_unit_at u = {0, first};
    mk_unit_settle(&u, units);
    return u;
}
MK_DEV void mk_unit_next(mk_unit_at *u, uint32_t units)
{
    u->group += MK_WARPS;
    mk_unit_settle(u, units);
}

#endif
#endif
