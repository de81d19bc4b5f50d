/* What the loader streams for an instruction, and by how many K blocks a stage. Part of gpu.cu. */
#ifndef MK_SEGMENTS_CUH
#define MK_SEGMENTS_CUH

/* Bytes of the scales of an instruction's segment. */
static uint32_t scales_of(const mk_insn *in)
{
    const mk_gemv *v = &in->gemv;
    const mk_lm_head *l = &in->lm_head;
    const mk_expert *e = &in->expert;
    switch (in->opcode) {
    case MK_OP_GEMV: return (uint32_t)mk_segment_scale_bytes(v->wtype, v->k, v->nseg * (v->epilogue == MK_EPI_SILU ? 2u : 1u), v->scale_k);
    case MK_OP_LM_HEAD: return (uint32_t)mk_segment_scale_bytes(l->wtype, l->k, l->nseg, l->scale_k);
    case MK_OP_EXPERT_UP: return (uint32_t)mk_segment_scale_bytes(e->wtype, e->k, 2u * e->nseg, MK_SCALE_ROWS);
    case MK_OP_EXPERT_DOWN: return (uint32_t)mk_segment_scale_bytes(e->wtype, e->k, e->nseg, MK_SCALE_ROWS);
    default: return 0;
    }
}
/* Its rows; EXPERT_UP: of the longest slice. */
static uint32_t rows_of(const mk_insn *in)
{
    switch (in->opcode) {
    case MK_OP_GEMV: return in->gemv.n * (in->gemv.epilogue == MK_EPI_SILU ? 2u : 1u);
    case MK_OP_LM_HEAD: return in->lm_head.n;
    case MK_OP_ROUTER: return in->router.n;
    case MK_OP_EXPERT_UP: return 2u * mk_expert_rows(in->expert.inter, in->expert.T);
    case MK_OP_EXPERT_DOWN: return in->expert.n;
    default: return 0;
    }
}

/* What the busiest warp has to do, in thirds of a product, where `per` K blocks are a stage, whose group's warps take them `ways` ways in turn, each `most` at once; a stage's barrier is one third. */
static uint32_t stage_work(uint32_t nkb, uint32_t per, uint32_t ways, uint32_t most)
{
    uint32_t busiest = 0;
    for (uint32_t group = 0; group < MK_GROUPS; group++)
        for (uint32_t way = 0; way < ways; way++) {
            uint32_t work = 0;
            for (uint32_t kb = group * per, turn = group ? per : 0; kb < nkb; kb += MK_GROUPS * per, turn += per) {
                const uint32_t n = nkb - kb < per ? nkb - kb : per, first = (way - turn) & (ways - 1), own = first < n ? (n - first + ways - 1) / ways : 0;
                work += 3 * ((own + most - 1) / most) + 1;
            }
            if (work > busiest) busiest = work;
        }
    return busiest;
}
/* K blocks of a stage, which never spans two chunks of the staged vector. r: the ring. nkb: of the segment. A multiple of as many stages as there are groups of warps is asked for, so that
 * each has its share; the last of them may turn out not to be needed. As many K blocks as the warps are done with soonest, or the most that are within `more` per cent of that: the fuller
 * a stage, the more is in the ring. */
static uint32_t stage_kblocks(const mk_ring *r, uint32_t wtype, uint32_t rows, uint32_t nkb, uint32_t more)
{
    const uint32_t most = mk_chunk_kblocks(wtype), room = mk_small_quot((r->stride - r->scales) / MK_KBLOCK_BYTES, rows), fit = room < most ? room : most;
    const uint32_t first = (mk_small_quot(nkb + fit - 1, fit) + MK_GROUPS - 1) & ~(MK_GROUPS - 1);
    const uint32_t ways = mk_ways(rows), at_once = mk_blocks_at_once(mk_form(wtype, 0), (rows < MK_SIDE_ROWS ? rows + 15 : MK_SIDE_ROWS) / 16);
    uint32_t best = 0, least = 0xffffffffu;
    for (uint32_t stages = 2 * first; stages >= first; stages -= MK_GROUPS) {
        uint32_t per = mk_small_quot(nkb + stages - 1, stages);
        per += rows & per & 1 && per < fit; /* whole lines */
        const uint32_t work = stage_work(nkb, per, ways, at_once);
        if (work < least) least = work;
        if (100 * work <= (100 + more) * least) best = per;
    }
    return best;
}
/* So much more work for fuller stages, in per cent (measurements: profiles/NOTES.md, thirty-seventh session). EXPERT_UP begins with an empty ring, of which few stages are under way; and
 * what leaves its result in LOCAL memory may be done aside, when its stages, filled long before, stand in the way of EXPERT_DOWN's. */
enum { MORE_WORK = 4, MORE_WORK_UP = 15, MORE_WORK_LOCAL = 30 };

/* K blocks of a stage of so many rows; *nkb: of a segment. */
static uint32_t kblocks_of(const mk_gpu *g, const mk_insn *in, uint32_t rows, uint32_t *nkb)
{
    const int gemv = in->opcode == MK_OP_GEMV, lm = in->opcode == MK_OP_LM_HEAD, router = in->opcode == MK_OP_ROUTER;
    const uint32_t wtype = gemv ? in->gemv.wtype : lm ? in->lm_head.wtype : router ? (uint32_t)MK_W_BF16 : in->expert.wtype;
    const uint32_t k = gemv ? in->gemv.k : lm ? in->lm_head.k : router ? in->router.experts : in->expert.k, values = mk_kblock_values(wtype);
    const int local = gemv && g->prog->vec[in->signal_vec].scope == MK_LOCAL;
    *nkb = (k + values - 1) / values;
    if (gemv && in->gemv.flags & MK_GEMV_X_F32) return *nkb; /* gate.cuh */
    return stage_kblocks(&g->args.ring, wtype, rows, *nkb, in->opcode == MK_OP_EXPERT_UP ? MORE_WORK_UP : local ? MORE_WORK_LOCAL : MORE_WORK);
}

/* GEMV, LM_HEAD, ROUTER: what it streams. tape: where the worker's tape begins. */
static mk_seg tape_seg(const mk_gpu *g, const mk_insn *in, uint64_t tape)
{
    const int lm = in->opcode == MK_OP_LM_HEAD;
    const uint32_t rows = rows_of(in);
    uint32_t nkb;
    mk_seg s;
    memset(&s, 0, sizeof s);
    s.base = tape + in->tape_off;
    s.scales = scales_of(in);
    s.per_most = (uint8_t)kblocks_of(g, in, rows, &nkb);
    s.nkb = (uint16_t)nkb;
    s.bytes = s.nkb * rows * MK_KBLOCK_BYTES;
    s.stage = s.per_most * rows * MK_KBLOCK_BYTES;
    s.flags = lm ? MK_SEG_LOGITS : 0;
    return s;
}

/* Pages of the cache of partial number k. */
static mk_seg cache_seg(const mk_insn *in, uint32_t k)
{
    const int mla = in->opcode == MK_OP_MLA_PARTIAL;
    mk_seg s;
    memset(&s, 0, sizeof s);
    s.base = k;
    s.flags = MK_SEG_CACHE;
    s.per_most = mla ? in->mla.grain : in->gqa.grain;
    s.per_less = mla ? in->mla.most : in->gqa.most;
    return s;
}

/* MLA_PARTIAL, GQA_PARTIAL: whether the ring can take pages in a step of one row. Else such steps go the way of several rows. */
static int ring_takes(const mk_gpu *g, const mk_insn *in)
{
    if (in->opcode == MK_OP_GQA_PARTIAL) return mk_gqa_stage_bytes(in->gqa.dim) <= g->args.ring.stride;
    const uint32_t stage = mk_latent_row_bytes(in->mla.latent, in->mla.rope, in->mla.cache, 2) * (MK_PAGE / MK_CACHE_STAGES) + MK_CACHE_SKEW;
    return in->mla.rope <= MK_ATT_RING_ROPE && stage <= g->args.ring.stride;
}
static_assert((232448 - sizeof(mk_shared) - MK_TILE_BYTES - 6144) / MK_STAGES / 128 * 128 >= MK_PAGE / MK_CACHE_STAGES * 2 * (512 + 64) + MK_CACHE_SKEW,
              "the ring takes 512 + 64 values of bf16 on an H200, beside the LOCAL vectors of kimi-linear-48b, which have 6,016 bytes");

/* Stages of a segment that has `per` K blocks in each. */
static uint32_t stages_of(const mk_seg *s, uint32_t per)
{
    return (s->nkb + per - 1) / per;
}

/* A description of nothing but the ROUTE that is to be waited for; NULL: of nothing. */
static mk_seg routed_seg(const mk_gpu *g, const mk_insn *route)
{
    mk_seg s;
    memset(&s, 0, sizeof s);
    if (!route) return s;
    s.flags = MK_SEG_ROUTED;
    s.route = (uint32_t)g->prog->vec[route->signal_vec].offset;
    return s;
}

/* How many experts share a stage of EXPERT_DOWN (binary logarithm): halves of a warp's one or two K blocks, and as many as there is room for in a stage and, with all rows, in the staging area. */
static uint8_t shared_by(const mk_gpu *g, const mk_expert *e, const mk_seg *s)
{
    const uint32_t per = s->per_most, half = s->scales + per * e->n * MK_KBLOCK_BYTES, pairs = MK_STAGING / mk_row_stride(e->k); /* half: of an expert, as feed_shared lays it */
    uint8_t log = 0;
    if ((per != MK_SHARED_BLOCKS && per != 2 * MK_SHARED_BLOCKS) || s->nkb != MK_GROUPS * per || e->n > MK_SIDE_ROWS) return 0;
    while (log < MK_SHARED_LOG && half << (log + 1) <= g->args.ring.stride && MK_MAX_ROWS << (log + 1) <= pairs) log++;
    return log;
}

/* EXPERT_UP, EXPERT_DOWN. route: the ROUTE of its queue that is to be waited for, NULL: none. */
static mk_seg expert_seg(const mk_gpu *g, const mk_insn *in, const mk_insn *route)
{
    const mk_expert *e = &in->expert;
    const uint32_t up = in->opcode == MK_OP_EXPERT_UP, most = rows_of(in), log = mk_expert_log(e->inter, e->T), less = up && e->inter >= e->T ? 2u * ((e->inter >> log) / e->T << log) : most;
    uint32_t nkb;
    mk_seg s = routed_seg(g, route);
    s.base = e->base;
    s.stride = e->expert_stride;
    s.slice_stride = e->slice_stride;
    s.scales = scales_of(in);
    s.magic = e->T > 1 ? 0xffffffffu / e->T + 1 : 0;
    s.T = (uint16_t)e->T;
    s.parts = (uint16_t)(e->inter >> log);
    s.rows = up ? 0 : (uint16_t)e->n;
    s.t = up ? (uint16_t)(1 + log) : (uint16_t)e->t;
    s.most = (uint8_t)most;
    s.per_most = (uint8_t)kblocks_of(g, in, most, &nkb);
    s.per_less = (uint8_t)kblocks_of(g, in, less, &nkb);
    s.nkb = (uint16_t)nkb;
    s.blank = !up && stages_of(&s, s.per_most) % MK_GROUPS;
    s.share = up ? 0 : shared_by(g, e, &s);
    return s;
}

#endif
