/* What the kernel can run, said before it runs: shapes that the validator lets pass and for which it has no place. Part of gpu.cu. */
#ifndef MK_REFUSE_CUH
#define MK_REFUSE_CUH

static int refuse(mk_err *err, uint32_t worker, const mk_insn *in, const char *what, uint64_t limit, uint64_t found)
{
    return mk_fail(err, MK_E_PROGRAM, "worker %u, instruction %u (%s): the kernel's limit for %s is %llu, found %llu", worker, in->seq,
                   mk_opcode_name(in->opcode), what, (unsigned long long)limit, (unsigned long long)found);
}

#define AT_MOST(what, limit, found)                                                                                    \
    if ((uint64_t)(found) > (uint64_t)(limit)) return refuse(err, worker, in, what, limit, found)
#define EXPECT(what, want, found)                                                                                      \
    if ((uint64_t)(found) != (uint64_t)(want)) return refuse(err, worker, in, what " (exactly)", want, found)

/* A segment as stages hold it. */
static int check_segment(uint32_t worker, const mk_insn *in, mk_err *err)
{
    AT_MOST("rows of a segment", MK_SEGMENT_ROWS, rows_of(in));
    AT_MOST("bytes of scales of a segment", MK_MOST_SCALES, scales_of(in));
    return MK_OK;
}

static int check_gemv(const mk_program *p, uint32_t worker, const mk_insn *in, mk_err *err)
{
    const mk_gemv *g = &in->gemv;
    const mk_vec *x = &p->vec[in->wait[0].vec];
    if (g->flags & MK_GEMV_X_F32) { /* gate.cuh */
        EXPECT("the type of an f32 input", MK_F32, x->dtype);
        EXPECT("the type of weights for an f32 input", MK_W_BF16, g->wtype);
        EXPECT("rows for an f32 input", 1, g->n);
        AT_MOST("values of an f32 input", MK_MOST_GATE, g->k);
        EXPECT("a trailer of an f32 input", 0, x->trailer);
        EXPECT("the prologue of an f32 input", MK_PRO_RMS, g->prologue);
        EXPECT("the epilogue of an f32 input", MK_EPI_STORE, g->epilogue);
        EXPECT("the scope of what is made of an f32 input", MK_PACKET, p->vec[in->signal_vec].scope);
        const uint32_t *start = mk_vec_starts(p, x) + in->wait[0].slice0;
        EXPECT("the first value of an f32 input", start[0], g->in_off);
        EXPECT("the end of an f32 input", start[in->wait[0].nslice], g->in_off + g->k);
    }
    if (g->prologue == MK_PRO_HEADNORM) {
        uint32_t group = g->norm_group, heads = group ? g->k / group : 0, per = heads ? in->wait[0].nslice / heads : 0;
        AT_MOST("heads under one norm", MK_MAX_NORM_HEADS, heads);
        EXPECT("values a head (a power of two of 64 or more)", 0, group < 64 || (group & (group - 1)) || heads * group != g->k);
        EXPECT("slices of whole heads", in->wait[0].nslice, per * heads);
        EXPECT("slices a head (a power of two up to 32)", 0, per > 32 || (per & (per - 1)));
        const uint32_t *start = mk_vec_starts(p, x) + in->wait[0].slice0;
        for (uint32_t s = 0; s <= in->wait[0].nslice; s++) EXPECT("start of a slice", g->in_off + s * (group / per), start[s]);
    }
    return check_segment(worker, in, err);
}

static int check_insn(const mk_program *p, uint32_t worker, const mk_insn *in, mk_err *err)
{
    const mk_mla *m = &in->mla;
    const mk_gqa *g = &in->gqa;
    const mk_expert *e = &in->expert;
    uint32_t heads;
    switch (in->opcode) {
    case MK_OP_GEMV:
        return check_gemv(p, worker, in, err);
    case MK_OP_LM_HEAD:
        return check_segment(worker, in, err);
    case MK_OP_EXPERT_UP:
        AT_MOST("columns of an expert", MK_STAGED_VALUES, e->k);
        AT_MOST("scale segments of half a slice", 2, e->nseg); /* mk_scale_places */
        AT_MOST("width of an expert times the square of its slices", 0xffffffffu, (uint64_t)e->inter * (e->T + 1) * e->T);
        return check_segment(worker, in, err);
    case MK_OP_EXPERT_DOWN:
        AT_MOST("columns of an expert", MK_STAGED_VALUES, e->k);
        EXPECT("the type of the experts' activations", MK_BF16, p->vec[in->wait[0].vec].dtype);
        return check_segment(worker, in, err);
    case MK_OP_DELTA_STEP:
        EXPECT("taps", 4, in->delta.taps);
        EXPECT("key channels", 128, in->delta.dk);
        AT_MOST("value channels", 128, in->delta.dv);
        EXPECT("value channels modulo 4", 0, in->delta.dv % 4);
        EXPECT("the convolution's parameters modulo 4", 0, in->delta.param_off % 4);
        for (uint32_t k = 0; k < 3; k++) EXPECT("type of the vectors that it reads", MK_BF16, p->vec[in->wait[k].vec].dtype);
        if (!in->delta.rank) return MK_OK;
        EXPECT("rank of f and z", MK_DELTA_RANK, in->delta.rank);
        EXPECT("type of z's weights", in->delta.low[0].wtype, in->delta.low[1].wtype);
        for (uint32_t k = 0; k < 2 && in->delta.low[k].wtype == MK_W_FP8; k++) EXPECT("scale blocks of a low-rank segment", 1, in->delta.low[k].nseg);
        return MK_OK;
    case MK_OP_KV_APPEND:
        AT_MOST("channels of a cache row", 640, m->latent + m->rope);
        EXPECT("latent and rotary channels modulo 8", 0, m->latent % 8 + m->rope % 8);
        return MK_OK;
    case MK_OP_MLA_PARTIAL:
        AT_MOST("latent channels", MK_ATT_LATENT, m->latent);
        AT_MOST("rotary channels", 128, m->rope);
        AT_MOST("pages of a split", MK_ATT_PAGES, mk_split_pages(p->info.max_context - 1, m->grain, m->most));
        EXPECT("latent channels modulo 32", 0, m->latent % 32);
        EXPECT("rotary channels modulo 8", 0, m->rope % 8);
        EXPECT("the type of the absorbed queries", MK_BF16, p->vec[in->wait[0].vec].dtype);
        EXPECT("the type of the queries", MK_BF16, p->vec[in->wait[1].vec].dtype);
        AT_MOST("bytes of queries", MK_ATT_ROOM - MK_ATT_SCORES, mk_att_query_bytes(m->latent + m->rope, m->latent / 32));
        return MK_OK;
    case MK_OP_COMBINE:
        EXPECT("channels of a slice modulo 4", 0, m->n % 4 + m->first % 4 + m->latent % 4);
        AT_MOST("channels of a slice", MK_COMBINE_MOST, m->n);
        EXPECT("the type of the output", MK_BF16, p->vec[in->signal_vec].dtype);
        if (m->gate) EXPECT("the type of the gates", MK_BF16, p->vec[in->wait[1].vec].dtype);
        return MK_OK;
    case MK_OP_GQA_APPEND:
        AT_MOST("channels of a head", MK_GQA_DIM, g->dim);
        EXPECT("channels of a head modulo 8", 0, g->dim % 8);
        return MK_OK;
    case MK_OP_GQA_PARTIAL:
        AT_MOST("rotary channels", g->dim, g->rope);
        heads = g->heads / g->kv_heads;
        AT_MOST("heads on a KV head", 64, heads);
        EXPECT("the type of the queries", MK_BF16, p->vec[in->wait[0].vec].dtype);
        AT_MOST("channels of a head", MK_GQA_DIM, g->dim);
        EXPECT("channels of a head modulo 8", 0, g->dim % 8);
        return MK_OK;
    case MK_OP_ROUTER:
        AT_MOST("instructions that add to one sum", 255, p->vec[in->signal_vec].signals);
        return check_segment(worker, in, err);
    case MK_OP_ROUTE:
        AT_MOST("experts", MK_MAX_EXPERT, in->route.experts);
        AT_MOST("values of h", MK_STAGED_VALUES, in->route.k);
        AT_MOST("expert groups", 32, in->route.groups);
        return MK_OK;
    case MK_OP_SAMPLE:
        AT_MOST("pieces of the LM head", MK_MAX_PIECES, in->sample.slices);
        AT_MOST("helpers of SAMPLE", MK_COMPUTE - 1, in->sample.helpers);
        return MK_OK;
    case MK_OP_EMBED:
    case MK_OP_SCHEDULE:
        return MK_OK;
    default:
        return mk_fail(err, MK_E_PROGRAM, "worker %u, instruction %u: the kernel has no opcode %s", worker, in->seq, mk_opcode_name(in->opcode));
    }
}

static int check_program(const mk_program *p, uint32_t sms, mk_err *err)
{
    const mk_program_info *i = &p->info;
    if (i->flags & MK_PROG_ACT_F32) return mk_fail(err, MK_E_PROGRAM, "a program with act=f32 runs on the CPU twin only");
    if (i->workers > sms) return mk_fail(err, MK_E_PROGRAM, "the program is for %u workers, the GPU has %u SMs", i->workers, sms);
    if (i->max_context && mk_split_pages(i->max_context - 1, 0, 0) > MK_ATT_PAGES)
        return mk_fail(err, MK_E_PROGRAM, "the kernel's limit is a context of %u tokens, the program allows %u", MK_ATT_PAGES * MK_MAX_SPLITS * MK_PAGE, i->max_context);
    if (i->n_vec > MK_MAX_VEC) return mk_fail(err, MK_E_PROGRAM, "the kernel's limit is %u vectors, the program has %u", MK_MAX_VEC, i->n_vec);
    for (uint32_t w = 0; w < i->workers; w++)
        for (uint32_t k = p->queue[w]; k < p->queue[w + 1]; k++) {
            int rc = check_insn(p, w, &p->insn[k], err);
            if (rc) return rc;
        }
    return MK_OK;
}

#endif
