/* The instruction set: what the planner writes, the validator proves and both machines (twin and resident kernel) execute.
 *
 * Everything here is fixed-size, little endian and free of pointers: a program is position-independent, its addresses are
 * offsets in named regions. Shared by host C and device code, so only plain types.
 */
#ifndef MK_ISA_H
#define MK_ISA_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define MK_BOTH static inline __host__ __device__ /* functions that host and device share */
#else
#define MK_BOTH static inline
#endif

#define MK_MAX_ROWS   8      /* rows a step: the 8 columns of a tensor-core tile */
#define MK_PAGE       64     /* tokens in a page of the KV cache */
#define MK_NONE       0xffffu
#define MK_MAX_TOPK   16     /* experts a token may choose */
#define MK_MAX_UNION  (MK_MAX_ROWS * MK_MAX_TOPK)
#define MK_MAX_EXPERT 1024

/* X(number, NAME, name, what it does). A number is never used again: 2 was CONV_STEP, which DELTA_STEP does itself. */
#define MK_OPCODES(X)                                                                                                  \
    X(0, EMBED, embed, "rows of the embedding table -> slice of the residual stream")                                  \
    X(1, GEMV, gemv, "matrix slice times gathered vector, with prologue and epilogue")                                 \
    X(3, DELTA_STEP, delta_step, "convolution, then gated delta rule: one head, one slice of its value channels")         \
    X(4, KV_APPEND, kv_append, "latent norm, rotation, one row a token into the MLA cache")                            \
    X(5, MLA_PARTIAL, mla_partial, "attention of all heads over one split of the latent cache")                        \
    X(6, COMBINE, combine, "partials of one head in ascending split order -> latent output")                           \
    X(7, ROUTE, route, "router logits -> chosen experts and weights, local to the worker")                             \
    X(8, EXPERT_UP, expert_up, "silu(gate) * up of this worker's slices of the chosen experts")                        \
    X(9, EXPERT_DOWN, expert_down, "down projections of the chosen experts, added in ascending id")                    \
    X(10, LM_HEAD, lm_head, "logits of a vocabulary slice, their maximum and log-sum-exp")                             \
    X(11, SAMPLE, sample, "next token and logprob of every row that asked")                                            \
    X(12, SCHEDULE, schedule, "stop ids, budgets, events; composes the next step")                                     \
    X(13, GQA_APPEND, gqa_append, "key and value of one KV head, a token each, into the paged cache")                  \
    X(14, GQA_PARTIAL, gqa_partial, "attention of the heads that share a KV head over one split of its cache")           \
    X(15, ROUTER, router, "a slice of h times its columns of the router, added to the logits")

enum mk_opcode {
#define X(number, NAME, name, text) MK_OP_##NAME = number,
    MK_OPCODES(X)
#undef X
    MK_OP_COUNT
};

/* ---- vectors -------------------------------------------------------------------------------------------------------- */

/* How an activation travels from the workers that make it to those that need it.
 *  PACKET  data as flag: 16-byte packets, 12 bytes of values + the 4-byte epoch; two halves that alternate by publication.
 *  BULK    ordinary memory behind a counter: every publication is `signals` increments; one buffer. With MK_VEC_SUMS its publishers add to it (mk_sum_word).
 *  LOCAL   memory of one worker; program order is the only synchronisation. */
enum mk_scope { MK_PACKET = 0, MK_BULK = 1, MK_LOCAL = 2 };

enum mk_dtype { MK_F32 = 0, MK_BF16 = 1, MK_FP8 = 2 };

/* A vector is published `pubs` times a step. Publication i of step s carries epoch  epoch0 + s * MK_EPOCH_STRIDE + i + 1  and
 * lives in half  (s * pubs + i) & 1.  Epochs are compared by equality and wrap. */
#define MK_EPOCH_STRIDE 1024u

/* A PACKET vector of `width` values a row is cut into `nslice` slices, one publishing instruction each. Slice s holds values
 * [start[s], start[s+1]) and owns `slice_packets` packets of its own, so that no packet has two writers: a packet carries 3 f32
 * or 6 bf16. With `trailer`, one f32 (a partial sum) follows the slice's values in the packet stream: it occupies the next
 * 4-byte word. Packet p of slice s of row r lies at
 *     offset + (((half * MK_MAX_ROWS + r) * nslice + s) * slice_packets + p) * 16.
 * DYNAMIC: which worker publishes slice (j, t) depends on the route: worker (j' * T + t) mod W, see mk_expert. */
enum { MK_VEC_DYNAMIC = 1, MK_VEC_SUMS = 2 };

typedef struct mk_vec {
    char name[16];          /* for people: "h", "qkv", "u"; NUL-terminated */
    uint8_t scope;          /* enum mk_scope */
    uint8_t dtype;          /* PACKET: MK_F32 or MK_BF16 */
    uint8_t trailer;        /* PACKET: 0 or 1 f32 after each slice */
    uint8_t flags;          /* MK_VEC_DYNAMIC: PACKET; MK_VEC_SUMS: BULK */
    uint32_t width;         /* PACKET: values a row. LOCAL, BULK: bytes in all */
    uint32_t nslice;        /* PACKET: slices. LOCAL: 0 */
    uint32_t slice_packets; /* PACKET: packets a slice owns */
    uint32_t pubs;          /* publications a step, >= 1 */
    uint32_t signals;       /* BULK: increments that make one publication */
    uint32_t start_index;   /* PACKET: index of start[0] in the program's start table (nslice + 1 entries) */
    uint32_t counter;       /* BULK: index of its counter */
    uint64_t offset;        /* PACKET: in the exchange region; BULK: in the bulk region; LOCAL: in the worker's local memory */
    uint64_t reserved;
} mk_vec;
static_assert(sizeof(mk_vec) == 64, "mk_vec is 64 bytes");
MK_BOTH int mk_vec_sums(const mk_vec *v)
{
    return v->scope == MK_BULK && v->flags & MK_VEC_SUMS;
}

/* ---- instruction ---------------------------------------------------------------------------------------------------- */

/* Wait for slices [slice0, slice0 + nslice) of publication `pub` (0-based within the step) of vector `vec`. BULK and LOCAL
 * vectors are waited for as a whole (slice0 = nslice = 0). */
typedef struct mk_wait {
    uint16_t vec, pub, slice0, nslice;
} mk_wait;

enum mk_wtype { MK_W_BF16 = 1, MK_W_FP8 = 2 }; /* = enum mk_dtype */

/* A matrix segment in memory, the unit a tape is made of. Rows [row0, row0 + rows) of a matrix with k columns:
 *   scales  f32[nkb][nseg], FP8 only: nkb = ceil(k / scale_k) column blocks, nseg = 128-row blocks that the rows touch:
 *           segment of row i = (phase + i) / 128 with phase = row0 mod 128; padded to a multiple of 128 bytes. Or, LM_HEAD only and said by scale_k = 0, f32[rows]: a
 *           scale a row, of all columns (nseg = rows, phase = 0)
 *   weights [kb][quarter][row][16 bytes]: K blocks of 64 bytes a row (64 FP8 or 32 BF16 values), the last one padded with zeros. Quarter q holds bytes
 *           [16 q, 16 q + 16) of every row's 64; rows are contiguous and unpadded
 * and the whole is padded to a multiple of 128 bytes. Scales are, too, because a bulk copy from one place in a line to another takes a fifth longer (profiles/NOTES.md, forty-first session).
 * Eight rows of a quarter are a core matrix (8 x 16 bytes, contiguous) of wgmma's K-major layout without swizzle: the next eight rows lie 128 bytes on, the next quarter 16 * rows. */
#define MK_LINE_BYTES   128u
#define MK_KBLOCK_BYTES  64u
#define MK_QUARTER_BYTES 16u /* of a row */
#define MK_SEGMENT_ROWS 128u /* rows of a segment at most (gate|up: of both together): eight tensor-core tiles, two K blocks a 16 KB stage */
#define MK_SIDE_ROWS    64u  /* matrix rows that a warp has tiles for; of more, half of a group's warps have those behind */
#define MK_SCALE_ROWS   128u

enum mk_prologue {
    MK_PRO_NONE = 0,
    MK_PRO_RMS = 1,      /* x <- x * rsqrt(mean(x^2) + eps) * gamma over the k inputs; gamma f32[k] at param_off */
    MK_PRO_HEADNORM = 2, /* x_head <- x_head * rsqrt(sum of the head's slice trailers / norm_group + eps); gamma and gate were
                            applied by the publisher (they commute with a scalar) */
};
enum mk_epilogue {
    MK_EPI_STORE = 0, /* publish y */
    MK_EPI_ADD = 1,   /* publish residual + y: residual is wait[1], the same slice */
    MK_EPI_SILU = 2,  /* rows are [gate | up]: publish silu(gate) * up; n counts pairs */
    MK_EPI_GATED = 3, /* ADD with a gate: publish residual + sigmoid(gate) * y; gate is value gate_off of wait[2] (f32) */
};
enum { MK_GEMV_X_F32 = 1 /* the vector stays f32 (the shared expert's gate: one row, or a GPU refuses it); else it is rounded to bf16, unless the program is act=f32 */ };

/* y[i] = sum_k W[i,k] x[k].   wait[0] = input, wait[1] = residual for ADD and GATED, wait[2] = gate for GATED. Tape: one segment of n
 * (SILU: 2n) rows. */
typedef struct mk_gemv {
    uint32_t n;          /* output values of this slice */
    uint32_t k;          /* columns */
    uint32_t in_off;     /* first input value in wait[0]'s vector */
    uint8_t wtype;       /* enum mk_wtype */
    uint8_t prologue;    /* enum mk_prologue */
    uint8_t epilogue;    /* enum mk_epilogue */
    uint8_t flags;       /* MK_GEMV_* */
    uint16_t phase;      /* row0 mod 128: see segment. SILU: of the gate rows and of the up rows alike */
    uint16_t nseg;       /* scale segments (SILU: of each of the two halves; gate's first) */
    uint16_t scale_k;    /* columns a scale covers: 128 or 64 */
    uint16_t norm_group; /* HEADNORM: values a head */
    uint32_t k_chunk;    /* columns staged at a time; k if it fits */
    uint32_t param_off;  /* gamma, in floats */
    float eps;
    float scale;         /* epilogue: y is multiplied by this before anything else; 1 for none */
    uint32_t row0;       /* first row that phase counts from (of the matrix, or of its tensor: mk_mat_scale_row); for people */
    uint32_t gate_off;   /* GATED: the gate's value in wait[2]'s vector; else 0 */
} mk_gemv;

/* wait: none (the step descriptor). signal: slice [first, first+n) of h. */
typedef struct mk_embed {
    uint64_t embed_off; /* in the embedding region */
    uint32_t first, n, hidden;
    uint8_t wtype; /* MK_BF16 or MK_F32 (enum mk_dtype) */
    uint8_t pad[3];
    float scale;
} mk_embed;

enum mk_gate { MK_GATE_SIGMOID = 0, MK_GATE_SILU = 1 };
enum mk_decay { MK_DECAY_CHANNEL = 0 /* KDA: one g a key channel */, MK_DECAY_HEAD = 1 /* GDN: one g a head */ };

/* One item: one head, value channels [v0, v0+dv) of it; models.md 3.2. First a causal depthwise convolution of `taps` inputs, then silu, on the item's q, k
 * and v channels; then
 *   x = f + dt_bias; g = -exp(A_log) softplus(x) (linear above 20); q,k <- l2norm (eps 1e-6 inside the root), q *= dk^-1/2
 *   S <- diag(e^g) S; m = k'S; d = sigmoid(b) (v - m); S += k d'; o = q'S;  publish o * o_norm * gate(z), trailer sum(o^2)
 * wait[0]: "qkv": a range that holds the item's q, k and v. wait[1]: "fz": one that holds f (of the head's dk channels, or one) and z (of the dv channels); with
 * `rank` it is "low": one that holds the `rank` inputs of f and those of z, and f (dk values) and z (dv values) are products with two matrix segments, the
 * instruction's tape, f's first. wait[2]: "low" (b). Of a range it looks at those slices alone that hold its values: nothing is known of the others (validate_order.c).
 * Parameters f32 at param_off: the convolution's weights [2*dk+dv][taps], tap order of the checkpoint (tap taps-1 is the current token); A_log[1];
 * dt_bias[dk] ([1] for MK_DECAY_HEAD); o_norm[dv].
 * State f32 at state_off of the row's slot: the last `taps` raw inputs of every channel, oldest first, [2*dk+dv][taps]; from the next multiple of 128 bytes on
 * the delta rule's [dk][dv]. */
typedef struct mk_low_rank {
    uint16_t phase, nseg, scale_k; /* as in mk_gemv */
    uint8_t wtype;                 /* enum mk_wtype */
    uint8_t pad;
} mk_low_rank;
typedef struct mk_delta {
    uint16_t dk, dv, taps;
    uint8_t decay; /* enum mk_decay */
    uint8_t gate;  /* enum mk_gate: what z goes through (KDA: sigmoid, GDN: silu) */
    uint32_t q_off, k_off, v_off; /* values in wait[0]'s vector */
    uint32_t f_off, z_off;        /* values in wait[1]'s vector; with rank: first input of each */
    uint32_t b_off;               /* value in wait[2]'s vector */
    uint32_t param_off;
    uint16_t rank; /* 0: f and z are in "fz" */
    uint16_t pad;
    uint64_t state_off; /* in the slot's state, bytes */
    mk_low_rank low[2]; /* segments of f and of z; zero without rank */
} mk_delta;
MK_BOTH uint32_t mk_delta_channels(const mk_delta *d)
{
    return 2u * d->dk + d->dv;
}
/* Of the parameters: where A_log is, from param_off on. */
MK_BOTH uint32_t mk_delta_rate_at(const mk_delta *d)
{
    return mk_delta_channels(d) * d->taps;
}
MK_BOTH uint32_t mk_delta_decays(const mk_delta *d)
{
    return d->decay == MK_DECAY_HEAD ? 1u : d->dk;
}
/* And how many parameters there are. */
MK_BOTH uint32_t mk_delta_params(const mk_delta *d)
{
    return mk_delta_rate_at(d) + 1 + mk_delta_decays(d) + d->dv;
}
/* Of the state: where the delta rule's is, bytes from state_off on; and bytes of both. */
MK_BOTH uint64_t mk_delta_matrix_at(const mk_delta *d)
{
    return ((uint64_t)mk_delta_channels(d) * d->taps * 4 + 127) & ~127ull;
}
MK_BOTH uint64_t mk_delta_state_bytes(const mk_delta *d)
{
    return mk_delta_matrix_at(d) + (uint64_t)d->dk * d->dv * 4;
}

/* What an MLA cache holds: instructions/latent.h. */
enum mk_cache { MK_CACHE_ACT = 0, MK_CACHE_FP8 = 1 };

/* MLA geometry, shared by the three attention opcodes. Cache row of a token: [c (latent, normalised) | k_pe], as instructions/latent.h
 * draws it; page p of layer's pool at kv_off + p * MK_PAGE * row bytes. */
typedef struct mk_mla {
    uint64_t kv_off;    /* in the KV region: this layer's pool */
    uint32_t in_off;    /* KV_APPEND: c | k_pe in wait[0]. MLA_PARTIAL: q_pe of head 0 in wait[1] */
    uint32_t head0;     /* first head of this instruction */
    uint16_t heads;     /* heads of this instruction */
    uint16_t latent, rope;
    uint16_t qk_stride; /* MLA_PARTIAL: values between two heads in wait[1]'s vector (nope + rope) */
    uint32_t all_heads; /* heads of the layer */
    float scale;        /* softmax scale */
    float eps;          /* KV_APPEND: latent norm */
    uint32_t param_off; /* KV_APPEND: gamma f32[latent]; then, if rotary != 0, inv_freq f32[rope/2] */
    uint8_t rotary;     /* 0 none, 1 interleaved pairs */
    uint8_t gate;       /* COMBINE: 1: values are multiplied by sigmoid of wait[1]'s [in_off + head0 * qk_stride + first, + n) */
    uint8_t grain, most; /* of its splits: mk_split_pages */
    uint32_t part;      /* MLA_PARTIAL: this instruction is part `part` of `parts`, to which the work items of all rows, splits x head groups of each, go in turn; */
    uint32_t parts;     /*              rows that share theirs (mk_mla_together, megakernel/rings.h) have them once */
    uint32_t first, n;  /* COMBINE: latent values [first, first+n) of head head0 */
    uint32_t cache;     /* enum mk_cache */
} mk_mla;

/* Attention splits of a row at position pos lie at absolute page positions: split s covers pages
 * [s*P, (s+1)*P) with P = mk_split_pages(pos): a function of the row's own position alone (row invariance). Up to 1 << grain pages are one split; more are at most
 * `most` splits, 0 means MK_MAX_SPLITS. */
#define MK_MAX_SPLITS 66 /* with two groups of heads: an item for each SM of an H200 */
MK_BOTH uint32_t mk_page_quot(uint32_t a, uint32_t b) /* a / b, a below 2^18 */
{
#ifdef __CUDA_ARCH__
    float q; /* b is no denormal number: __fdividef would ask */
    asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(q) : "f"((float)a + 0.5f), "f"((float)b));
    return (uint32_t)q;
#else
    return a / b;
#endif
}
MK_BOTH uint32_t mk_split_pages(uint32_t pos, uint32_t grain, uint32_t most)
{
    uint32_t n = most ? most : MK_MAX_SPLITS, last = pos / MK_PAGE;
    return last >> grain ? mk_page_quot(last + n, n) : 1u << grain;
}
MK_BOTH uint32_t mk_splits(uint32_t pos, uint32_t grain, uint32_t most)
{
    return mk_page_quot(pos / MK_PAGE, mk_split_pages(pos, grain, most)) + 1;
}
/* Heads of `heads` that one work item of MLA_PARTIAL takes (the last group may be smaller): few as long as that makes no more items than an H200 has SMs, for every item
 * reads its whole split and gathers its queries. */
#define MK_HEAD_GROUP 16u /* at most: rows of a tensor-core tile */
MK_BOTH uint32_t mk_head_group(uint32_t pos, uint32_t heads)
{
    return (pos / MK_PAGE + 1) * ((heads + MK_HEAD_GROUP / 2 - 1) / (MK_HEAD_GROUP / 2)) <= 2 * MK_MAX_SPLITS ? MK_HEAD_GROUP / 2 : MK_HEAD_GROUP;
}
/* A partial in the bulk region: f32[latent] unnormalised sum of p*c with p = exp(s - max), then max, then sum(p), then 2 unused
 * floats: (latent + 4) floats, at ((row * MK_MAX_SPLITS + split) * all_heads + head). */
MK_BOTH uint32_t mk_partial_floats(uint32_t latent)
{
    return latent + 4;
}

/* Grouped-query attention; query head h uses KV head h / (heads / kv_heads). Rotation is half-split (instructions/rotary.h) over the first
 * `rope` of a head's values. Page p of a layer's pool lies at kv_off + p * kv_page_bytes:
 *   [kv_head][k, v][MK_PAGE][dim] values of the program's activation type, so that what a work item reads of a page is contiguous.
 * GQA_APPEND: wait[0] = k and v of KV head `head` of every row; signal = BULK counter, one increment for each KV head.
 * GQA_PARTIAL: wait[0] = q of all heads, wait[1] = that counter; signal = BULK partials as MLA_PARTIAL's (latent := dim), combined by
 * COMBINE. Work items of row r: i = split * kv_heads + KV head; the items of all rows, one row after the other, go to the parts in turn, but rows that share their items (mk_gqa_together,
 * megakernel/rings.h) have them once. */
typedef struct mk_gqa {
    uint64_t kv_off;       /* in the KV region: this layer's pool */
    uint32_t q_off;        /* PARTIAL: q of head 0 in wait[0] */
    uint32_t q_stride;     /* PARTIAL: values between two heads */
    uint32_t k_off, v_off; /* APPEND: k and v of KV head 0 in wait[0], dim values a head */
    uint16_t heads, kv_heads, dim, rope;
    uint16_t head;         /* APPEND: KV head */
    uint8_t norm;          /* 1: x <- x * rsqrt(mean(x^2) + eps) * gamma over the head's dim values before the rotation (q or k) */
    uint8_t grain;         /* PARTIAL: of its splits, with `most`: mk_split_pages */
    float scale;           /* softmax scale */
    float eps;
    uint32_t param_off;    /* gamma f32[dim] when norm, then inv_freq f32[rope/2] */
    uint32_t part, parts;
    uint8_t most, pad[7];
} mk_gqa;
MK_BOTH uint64_t mk_gqa_page_values(uint32_t kv_heads, uint32_t dim)
{
    return (uint64_t)2 * kv_heads * MK_PAGE * dim;
}
/* First value of KV head g's keys (which = 0) or values (1) of the token at offset t of a page. */
MK_BOTH uint64_t mk_gqa_at(uint32_t dim, uint32_t g, uint32_t which, uint32_t t)
{
    return (((uint64_t)g * 2 + which) * MK_PAGE + t) * dim;
}

enum mk_score { MK_SCORE_SIGMOID = 0, MK_SCORE_SOFTMAX = 1 };

/* Sums that have the same bits in whatever order they are added: 64-bit words, value * MK_SUM_ONE as an integer, plus MK_SUM_BIAS so that no addend is negative, in the lower
 * 56 bits; in the upper ones each addend counts 1 (modulo 256), so that a word says when it is complete. An addend that is no number, or 2^22 and more, makes the sum NaN unless
 * others, as far beyond what logits are, make up for it; a sum of 2^22 and more is NaN. A vector of them (BULK, MK_VEC_SUMS) is
 * [2 halves][values / MK_SUM_GROUP, rounded up][MK_MAX_ROWS][MK_SUM_GROUP]: publication i of step s is added to half (s * pubs + i) & 1, which is zero
 * before, and whoever reads that publication then clears his share of the other half. Who reads it, reads all: every reader of a publication is done before the next is begun
 * (as with all BULK vectors), and a publication that is complete has none left who reads the one before. */
#define MK_SUM_ONE  16777216.0f /* 2^24 */
#define MK_SUM_BIAS (1ull << 47)
/* Words of a row that lie together, a sector of L2. Additions to one line of 128 bytes go one after the other, as many times as there are sectors in it that somebody adds to: with a row's
 * sectors 256 bytes apart 132 SMs are done with 256 sums in 1.1 us, side by side in 2.5 (profiles/NOTES.md). */
#define MK_SUM_GROUP 4u
MK_BOTH uint64_t mk_sum_word(float x)
{
    const float most = 4194304.0f; /* 2^22 */
#ifdef __CUDA_ARCH__
    return (1ull << 56) + (x > -most && x < most ? (uint64_t)__float2ll_rn(x * MK_SUM_ONE) + MK_SUM_BIAS : 0);
#else
    return (1ull << 56) + (x > -most && x < most ? (uint64_t)__builtin_llrintf(x * MK_SUM_ONE) + MK_SUM_BIAS : 0);
#endif
}
/* The sum of n addends. */
MK_BOTH float mk_sum_value(uint64_t word, uint32_t n)
{
    const int64_t t = (int64_t)((word - n * MK_SUM_BIAS) << 8) >> 8, most = 1ll << 46;
    return t > -most && t < most ? (float)t * (1.0f / MK_SUM_ONE) : __builtin_nanf("");
}
MK_BOTH uint32_t mk_sums_count(uint64_t word)
{
    return (uint32_t)(word >> 56);
}
/* Words of a half of such a vector; bytes of the vector; which word of it a value is. */
MK_BOTH uint32_t mk_sums_words(uint32_t values)
{
    return (values + MK_SUM_GROUP - 1) / MK_SUM_GROUP * (MK_MAX_ROWS * MK_SUM_GROUP);
}
MK_BOTH uint32_t mk_sums_bytes(uint32_t values)
{
    return 2 * 8 * mk_sums_words(values);
}
MK_BOTH uint32_t mk_sum_at(uint32_t values, uint32_t half, uint32_t row, uint32_t i)
{
    return half * mk_sums_words(values) + (i / MK_SUM_GROUP * MK_MAX_ROWS + row) * MK_SUM_GROUP + i % MK_SUM_GROUP;
}

/* wait[0]: slice of h (f32), values [first, first + n). signal: BULK sums, `experts` values: logits but for h's 1/rms:
 *   logit[e] += sum_i h[first + i] gamma[i] W[e][first + i]
 * Tape: one segment of n rows, the columns of W that belong to them, `experts` long, BF16. */
typedef struct mk_router {
    uint32_t first, n, experts;
    uint32_t param_off; /* gamma f32[n] */
} mk_router;

/* wait[0]: h (f32[k]); wait[1]: BULK sums, logits once they are multiplied by h's 1/rms. signal: LOCAL mk_routes. Worker w of W clears words [start(w), start(w + 1)) of the
 * other half's mk_sums_words(experts). models.md 3.6; ties go to the lower expert id. */
typedef struct mk_route {
    uint16_t experts, topk, groups, topk_groups;
    uint8_t score; /* enum mk_score */
    uint8_t renorm;
    uint8_t has_bias;
    uint8_t pad;
    float scale;
    uint32_t param_off; /* bias f32[experts] */
    uint32_t k;         /* values of h */
    uint32_t norm_off;  /* gamma f32[k]: of no consequence here, but those who come next stage h with it */
    float eps;
} mk_route;

/* What ROUTE leaves in local memory. */
typedef struct mk_routes {
    uint32_t n_union;                             /* distinct experts of all rows */
    uint16_t expert[MK_MAX_UNION];                /* ascending ids */
    uint8_t rank[MK_MAX_ROWS][MK_MAX_UNION];      /* j-th union expert is the row's rank-th choice (ascending id); 255: not chosen */
    float weight[MK_MAX_ROWS][MK_MAX_TOPK];       /* by rank */
} mk_routes;

/* EXPERT_UP: wait[0] = h (RMS prologue), wait[1] = LOCAL routes; signal = "u" (DYNAMIC): slice rank * T + t of the row.
 * EXPERT_DOWN: wait[0] = "u", wait[1] = LOCAL routes, wait[2] = LOCAL accumulator f32[rows][n] (residual + shared expert) or, when
 * the layer has no shared expert, the residual vector itself; signal = h slice.
 * Expert e's slice t lies in the expert region at base + e * expert_stride + t * slice_stride: a segment as in mk_gemv. Up slices
 * are rows [start(t), start(t+1)) of gate and of up (gate rows first), start(t) = mk_expert_start(t, inter, T).
 * The j-th union expert's slice t of EXPERT_UP runs on worker (j * T + t) mod W; EXPERT_DOWN's slice is the worker's own rows of h
 * (T = number of h slices, t = h slice), so the sum over experts is even by construction. */
typedef struct mk_expert {
    uint64_t base, expert_stride;
    uint32_t slice_stride;
    uint16_t T;       /* slices an expert */
    uint16_t t;       /* EXPERT_DOWN: this instruction's slice */
    uint32_t k;       /* columns: hidden (UP) or inter (DOWN) */
    uint32_t inter;   /* expert width */
    uint16_t n;       /* DOWN: rows of the slice */
    uint16_t phase;   /* DOWN: row0 mod 128 */
    uint8_t wtype, nseg, topk, pad; /* nseg: scale segments of a slice (UP: of each half; allocated for every slice) */
    uint32_t param_off; /* UP: gamma */
    float eps;
} mk_expert;
/* EXPERT_UP: phase of slice t = start(t) mod 128. */

/* wait[0] = h with RMS prologue; signal = "stats" slice: 4 f32 a row: max logit, id of it (as u32 bits), sum exp(l - max), unused.
 * Logits f32[row][vocab] go to the bulk vector `logits` (signal2). Rows without MK_ROW_LOGITS publish stats of -inf. */
typedef struct mk_lm_head {
    uint32_t n, k, row0, vocab;
    uint8_t wtype, pad;
    uint16_t scale_k;    /* columns a scale covers: 128, or 0 for a scale a row */
    uint16_t phase, nseg;
    uint32_t param_off;
    float eps;
    uint16_t logits_vec, logits_pub; /* the bulk vector that it also signals */
} mk_lm_head;

/* wait[0] = stats (all slices), wait[1] = logits (BULK). signal = LOCAL mk_sampled.
 * One SAMPLE has helper 0 and does the opcode's work. The `helpers` others, 1 to `helpers`, each on a worker of its own, wait for the same and signal
 * nothing: a machine may let them take part in what a draw costs; the twin does not. */
typedef struct mk_sample {
    uint32_t vocab;
    uint32_t slices;
    uint16_t helper, helpers;
} mk_sample;
#define MK_TRIES 4u /* draws without top-p that are looked at before it is applied: sample.c */

typedef struct mk_sampled {
    uint32_t token[MK_MAX_ROWS];
    float logprob[MK_MAX_ROWS];
} mk_sampled;

/* wait[0] = LOCAL mk_sampled. The last instruction of a step, on one worker. */
typedef struct mk_schedule {
    uint32_t unused;
} mk_schedule;

enum {
    MK_F_STAGED = 1, /* wait[0]'s vector, with the same prologue, was staged by the previous instruction of this queue: reuse it */
};

typedef struct mk_insn {
    uint8_t opcode;
    uint8_t nwait;
    uint16_t flags;       /* MK_F_* */
    uint16_t layer;       /* MK_NONE outside the layers */
    uint16_t signal_vec;  /* MK_NONE: none */
    uint16_t signal_pub;
    uint16_t signal_slice;
    uint32_t seq;         /* index in its queue */
    mk_wait wait[3];      /* nwait of them; the others are {MK_NONE, 0, 0, 0}. No signal: signal_vec MK_NONE, pub and slice 0 */
    uint32_t tape_bytes;  /* static tape this instruction consumes, a multiple of 128 */
    uint32_t pad;
    uint64_t tape_off;    /* where in the worker's tape: the sum of the tape_bytes before it */
    union {
        mk_gemv gemv;
        mk_embed embed;
        mk_delta delta;
        mk_mla mla;
        mk_gqa gqa;
        mk_router router;
        mk_route route;
        mk_expert expert;
        mk_lm_head lm_head;
        mk_sample sample;
        mk_schedule schedule;
        uint8_t payload[72];
    };
} mk_insn;
static_assert(sizeof(mk_wait) == 8, "mk_wait is 8 bytes");
static_assert(sizeof(mk_insn) == 128, "an instruction is 128 bytes");
static_assert(offsetof(mk_insn, seq) == 12, "header offsets are fixed");
static_assert(offsetof(mk_insn, wait) == 16, "header offsets are fixed");
static_assert(offsetof(mk_insn, tape_bytes) == 40, "header offsets are fixed");
static_assert(offsetof(mk_insn, tape_off) == 48, "header offsets are fixed");
static_assert(offsetof(mk_insn, payload) == 56, "header offsets are fixed");

/* Values of start(t) for evenly cut ranges, everywhere in the project. */
MK_BOTH uint32_t mk_start(uint32_t t, uint32_t n, uint32_t parts)
{
    return (uint32_t)((uint64_t)t * n / parts);
}
/* An expert's rows are cut into T slices of whole pairs, so that packets of its values are whole words where they are staged; of single rows, if there are not as many pairs. The logarithm of the rows
 * that stay together; where slice t begins; and the most rows that one has. */
MK_BOTH uint32_t mk_expert_log(uint32_t inter, uint32_t T)
{
    return inter % 2 == 0 && T <= inter / 2;
}
MK_BOTH uint32_t mk_expert_start(uint32_t t, uint32_t inter, uint32_t T)
{
    return mk_start(t, inter >> mk_expert_log(inter, T), T) << mk_expert_log(inter, T);
}
MK_BOTH uint32_t mk_expert_rows(uint32_t inter, uint32_t T)
{
    return ((inter >> mk_expert_log(inter, T)) + T - 1) / T << mk_expert_log(inter, T);
}
/* What a scale of FP8 weights covers: rows; columns of k; K blocks, 1 << of them. And how many column blocks there are. */
MK_BOTH uint32_t mk_scale_rows(uint32_t scale_k)
{
    return scale_k ? MK_SCALE_ROWS : 1;
}
MK_BOTH uint32_t mk_scale_columns(uint32_t k, uint32_t scale_k)
{
    return scale_k ? scale_k : k;
}
#define MK_SHIFT_ALL 31u /* all of them: a scale a row */
MK_BOTH uint32_t mk_scale_shift(uint32_t scale_k)
{
    return scale_k == 128 ? 1 : scale_k ? 0 : MK_SHIFT_ALL;
}
MK_BOTH uint32_t mk_scale_blocks(uint32_t k, uint32_t scale_k)
{
    return (k + mk_scale_columns(k, scale_k) - 1) / mk_scale_columns(k, scale_k);
}
/* Scales that rows [phase, phase + rows) have in a column block. */
MK_BOTH uint32_t mk_segments(uint32_t phase, uint32_t rows, uint32_t scale_k)
{
    return (phase + rows + mk_scale_rows(scale_k) - 1) / mk_scale_rows(scale_k);
}
/* Bytes of a segment: rows x k of type wtype with nseg scale rows per column block (both halves of a SILU pair counted in
 * rows and nseg). */
MK_BOTH uint64_t mk_segment_scale_bytes(uint32_t wtype, uint32_t k, uint32_t nseg, uint32_t scale_k)
{
    if (wtype != MK_W_FP8) return 0;
    uint64_t b = (uint64_t)mk_scale_blocks(k, scale_k) * nseg * 4;
    return (b + MK_LINE_BYTES - 1) & ~(uint64_t)(MK_LINE_BYTES - 1);
}
MK_BOTH uint32_t mk_kblock_values(uint32_t wtype)
{
    return wtype == MK_W_FP8 ? 64u : 32u;
}
/* Where a quarter of a row lies: bytes from the first weight of the segment. */
MK_BOTH uint64_t mk_quarter_at(uint32_t rows, uint32_t kb, uint32_t quarter, uint32_t row)
{
    return (((uint64_t)kb * 4 + quarter) * rows + row) * MK_QUARTER_BYTES;
}
MK_BOTH uint64_t mk_segment_bytes(uint32_t wtype, uint32_t rows, uint32_t k, uint32_t nseg, uint32_t scale_k)
{
    uint32_t v = mk_kblock_values(wtype);
    uint64_t b = mk_segment_scale_bytes(wtype, k, nseg, scale_k) + (uint64_t)((k + v - 1) / v) * rows * MK_KBLOCK_BYTES;
    return (b + MK_LINE_BYTES - 1) & ~(uint64_t)(MK_LINE_BYTES - 1);
}

/* Bytes of DELTA_STEP's segment of f (which = 0) or z. */
MK_BOTH uint64_t mk_delta_segment_bytes(const mk_delta *d, uint32_t which)
{
    const mk_low_rank *l = &d->low[which];
    return d->rank ? mk_segment_bytes(l->wtype, which ? d->dv : d->dk, d->rank, l->nseg, l->scale_k) : 0;
}

#endif
