/* Gammas in the order of packets: who gathers one row of a vector with an RMS norm asks for those of a packet with one 16-byte load (two of bf16) instead of one load a value. The tables
 * are the host's to lay out, in args.map, and a kernel's to fill before the resident one is launched: parameters may have changed since. Part of gpu.cu. */
#ifndef MK_GAINS_CUH
#define MK_GAINS_CUH

#define MK_GAIN_WORDS(per) ((per) == 3 ? 4u : 8u) /* of a packet, which has 3 values of f32 or 6 of bf16 */

/* The vector of wait 0 as an instruction wants it, but for the form, which is that of the weights; zero where it gathers none. */
static mk_input input_of(const mk_insn *in)
{
    const mk_gemv *v = &in->gemv;
    mk_input x;
    memset(&x, 0, sizeof x);
    switch (in->opcode) {
    case MK_OP_GEMV:
        x.in_off = v->in_off, x.k = v->k, x.prologue = v->prologue;
        if (v->prologue == MK_PRO_RMS) x.param_off = v->param_off;
        if (v->prologue == MK_PRO_HEADNORM) x.norm_group = v->norm_group;
        if (v->prologue != MK_PRO_NONE) x.eps = v->eps;
        break;
    case MK_OP_LM_HEAD: x.k = in->lm_head.k, x.prologue = MK_PRO_RMS, x.param_off = in->lm_head.param_off, x.eps = in->lm_head.eps; break;
    case MK_OP_EXPERT_UP: x.k = in->expert.k, x.prologue = MK_PRO_RMS, x.param_off = in->expert.param_off, x.eps = in->expert.eps; break;
    case MK_OP_ROUTE: x.k = in->route.k, x.prologue = MK_PRO_RMS, x.param_off = in->route.norm_off, x.eps = in->route.eps; break;
    default: break;
    }
    return x;
}

/* What an instruction with an RMS norm gathers, without its places. */
static mk_gain gain_key(const mk_program *p, const mk_insn *in, const mk_input *x)
{
    const mk_wait *w = &in->wait[0];
    const mk_vec *v = &p->vec[w->vec];
    const mk_gain key = {w->vec, w->slice0, w->nslice * v->slice_packets, v->dtype == MK_F32 ? 3u : 6u, x->in_off, x->k, x->param_off, 0, 0};
    return key;
}
static mk_gain *gain_of(const mk_gpu *g, const mk_gain *key)
{
    for (uint32_t i = 0; i < g->n_gain; i++) {
        mk_gain *t = &g->gain[i];
        if (t->vec == key->vec && t->slice0 == key->slice0 && t->packets == key->packets && t->in_off == key->in_off && t->k == key->k && t->param_off == key->param_off) return t;
    }
    return NULL;
}
/* All that the program's instructions want. *words: of args.map. */
static int gains_wanted(mk_gpu *g, uint32_t *words, mk_err *err)
{
    const mk_program *p = g->prog;
    *words = 0;
    for (uint32_t k = 0; k < p->info.n_insn; k++) {
        const mk_input x = input_of(&p->insn[k]);
        if (x.prologue != MK_PRO_RMS) continue;
        const mk_gain key = gain_key(p, &p->insn[k], &x);
        if (gain_of(g, &key)) continue;
        mk_gain *more = (mk_gain *)room_for_one(g->gain, g->n_gain, sizeof *more);
        if (!more) return mk_fail(err, MK_E_CAPACITY, "out of memory");
        g->gain = more;
        g->gain[g->n_gain++] = key;
        *words += key.packets * MK_GAIN_WORDS(key.per);
    }
    return MK_OK;
}

static __global__ void gains_fill(const mk_gain *gain, uint32_t *map, const float *param)
{
    const mk_gain t = gain[blockIdx.x];
    const uint32_t words = MK_GAIN_WORDS(t.per);
    for (uint32_t i = threadIdx.x; i < t.packets * words; i += blockDim.x) {
        const uint32_t m = map[t.map + i / words], e = i % words, v = MK_MAP_FIRST(m) - t.in_off + e; /* wraps */
        ((float *)map)[t.at + i] = e < MK_MAP_VALUES(m) && v < t.k ? param[t.param_off + v] : 0;
    }
}
/* On the legacy stream, behind uploads of what it reads; who launches the resident kernel next, on a stream that does not wait for that one, synchronises the device before. */
static cudaError_t gains_make(const mk_gpu *g)
{
    void *arg[3] = {(void *)&g->gain_there, (void *)&g->args.map, (void *)&g->args.param};
    return g->n_gain ? cudaLaunchKernel((const void *)gains_fill, dim3(g->n_gain), dim3(256), arg, 0, 0) : cudaSuccess;
}

#endif
