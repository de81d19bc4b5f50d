/* Shared memory that an instruction needs at MK_MAX_ROWS rows.
 *
 *   opcode        staging (gathered vectors)                  working memory
 *   GEMV          rows x k_chunk                              k_chunk < k: f32 sums of all its matrix rows, rows x n
 *   LM_HEAD       rows x chunk(k)                             chunked: rows x n f32
 *   EXPERT_UP     rows x chunk(k)                             chunked: rows x 2 x longest slice f32
 *   EXPERT_DOWN   rows x chunk(k) of one expert               rows x n f32
 *   DELTA_STEP    rows x (3 dk + 2 dv + 2 rank + 1) f32       the state, dk x dv f32
 *   KV_APPEND     rows x (latent + rope) f32                  -
 *   MLA_PARTIAL   MK_HEAD_GROUP heads x (latent + rope)       the same heads x 128 tokens (sums are in registers)
 *   COMBINE       gate: rows x n f32                          rows x n f32, two f32 a split
 *   GQA_APPEND    rows x 2 dim f32                            -
 *   GQA_PARTIAL   heads of one KV head x dim                  the same heads x (dim + 4) f32
 *   ROUTER        rows x n f32                                -
 *   ROUTE         rows x chunk(k)                             -
 *   SAMPLE        one row's statistics, 16 bytes a slice      -
 *   EMBED, SCHEDULE: nothing beyond the fixed part.
 *
 * Gathered vectors are in the program's activation type (bf16; f32 with MK_GEMV_X_F32 or act=f32), k rounded up to 64. Opcodes
 * without a k_chunk field use the largest multiple of 128 columns that fits MK_STAGING_BYTES. */
#include "instructions/validate.h"

#define ROWS ((uint64_t)MK_MAX_ROWS)

static uint64_t act_bytes(const mk_program *p)
{
    return p->info.flags & MK_PROG_ACT_F32 ? 4 : 2;
}

static uint64_t pad64(uint64_t k)
{
    return (k + 63) & ~63ull;
}

/* Columns staged at a time where the instruction does not say. */
static uint64_t chunk(uint64_t k, uint64_t esize)
{
    uint64_t fit = (MK_STAGING_BYTES / (ROWS * esize)) & ~127ull;
    return k < fit ? k : fit;
}

static uint64_t mla_group(const mk_mla *m)
{
    return m->all_heads < MK_HEAD_GROUP ? m->all_heads : MK_HEAD_GROUP;
}

static uint64_t gqa_group(const mk_gqa *g)
{
    return g->kv_heads ? g->heads / g->kv_heads : 0;
}

static uint64_t staging(const mk_program *p, const mk_insn *in)
{
    uint64_t ae = act_bytes(p);
    switch (in->opcode) {
    case MK_OP_GEMV:
        return ROWS * pad64(in->gemv.k_chunk) * (in->gemv.flags & MK_GEMV_X_F32 ? 4 : ae);
    case MK_OP_LM_HEAD:
        return ROWS * pad64(chunk(in->lm_head.k, ae)) * ae;
    case MK_OP_EXPERT_UP:
    case MK_OP_EXPERT_DOWN:
        return ROWS * pad64(chunk(in->expert.k, ae)) * ae;
    case MK_OP_DELTA_STEP:
        return ROWS * (3ull * in->delta.dk + 2ull * in->delta.dv + 2ull * in->delta.rank + 1) * 4;
    case MK_OP_KV_APPEND:
        return ROWS * ((uint64_t)in->mla.latent + in->mla.rope) * 4;
    case MK_OP_MLA_PARTIAL:
        return mla_group(&in->mla) * ((uint64_t)in->mla.latent + in->mla.rope) * ae;
    case MK_OP_COMBINE:
        return in->mla.gate ? ROWS * in->mla.n * 4 : 0;
    case MK_OP_GQA_APPEND:
        return ROWS * 2 * in->gqa.dim * 4;
    case MK_OP_GQA_PARTIAL:
        return gqa_group(&in->gqa) * in->gqa.dim * ae;
    case MK_OP_ROUTER:
        return ROWS * in->router.n * 4;
    case MK_OP_ROUTE:
        return ROWS * pad64(chunk(in->route.k, ae)) * ae;
    case MK_OP_SAMPLE:
        return 16ull * in->sample.slices;
    default:
        return 0;
    }
}

static uint64_t working(const mk_program *p, const mk_insn *in)
{
    uint64_t ae = act_bytes(p);
    const mk_expert *e = &in->expert;
    switch (in->opcode) {
    case MK_OP_GEMV:
        if (in->gemv.k_chunk >= in->gemv.k) return 0;
        return ROWS * in->gemv.n * (in->gemv.epilogue == MK_EPI_SILU ? 2 : 1) * 4;
    case MK_OP_LM_HEAD:
        return chunk(in->lm_head.k, ae) < in->lm_head.k ? ROWS * in->lm_head.n * 4 : 0;
    case MK_OP_EXPERT_UP:
        return chunk(e->k, ae) < e->k && e->T ? (uint64_t)ROWS * 2 * mk_expert_rows(e->inter, e->T) * 4 : 0;
    case MK_OP_EXPERT_DOWN:
        return ROWS * e->n * 4;
    case MK_OP_DELTA_STEP:
        return (uint64_t)in->delta.dk * in->delta.dv * 4;
    case MK_OP_MLA_PARTIAL:
        return mla_group(&in->mla) * 128 * ae;
    case MK_OP_GQA_PARTIAL:
        return gqa_group(&in->gqa) * mk_partial_floats(in->gqa.dim) * 4;
    case MK_OP_COMBINE:
        return ROWS * in->mla.n * 4 + 2ull * MK_MAX_SPLITS * 4;
    default:
        return 0;
    }
}

static uint32_t saturate(uint64_t b)
{
    return b > UINT32_MAX ? UINT32_MAX : (uint32_t)b;
}

uint32_t mk_insn_staging(const mk_program *p, const mk_insn *in)
{
    return saturate(staging(p, in));
}

uint32_t mk_insn_smem(const mk_program *p, const mk_insn *in)
{
    uint64_t local = p->info.local_bytes > UINT32_MAX ? UINT32_MAX : p->info.local_bytes;
    return saturate(MK_SMEM_FIXED_BYTES + MK_RING_MIN_BYTES + local + ((staging(p, in) + 15) & ~15ull) + working(p, in));
}
