#include "megakernel/selftest.cuh"

/* ---- one kind ------------------------------------------------------------------------------------------------------- */

static int same_kind(const mk_insn *a, const mk_insn *b)
{
    if (a->opcode != b->opcode || a->signal_vec != b->signal_vec) return 0;
    if (a->opcode == MK_OP_GEMV)
        return a->wait[0].vec == b->wait[0].vec && a->gemv.k == b->gemv.k && a->gemv.wtype == b->gemv.wtype && a->gemv.prologue == b->gemv.prologue &&
               a->gemv.epilogue == b->gemv.epilogue && a->gemv.flags == b->gemv.flags;
    if (a->opcode == MK_OP_EXPERT_UP || a->opcode == MK_OP_EXPERT_DOWN) return a->expert.wtype == b->expert.wtype && a->expert.k == b->expert.k;
    return 1;
}

/* Which kinds there are; of each, how many publications, counted where their first instruction stands. */
static uint32_t find_kinds(const mk_program *p, kind *k)
{
    uint32_t n = 0;
    uint8_t(*seen)[MK_EPOCH_STRIDE / 8] = (uint8_t(*)[MK_EPOCH_STRIDE / 8])calloc(MAX_KINDS, MK_EPOCH_STRIDE / 8);
    for (uint32_t i = 0; seen && i < p->info.n_insn; i++) {
        const mk_insn *in = &p->insn[i];
        uint32_t j = 0, pub = in->signal_pub;
        if (in->opcode == MK_OP_SCHEDULE || pub >= MK_EPOCH_STRIDE) continue;
        if (in->opcode == MK_OP_SAMPLE && in->sample.helper) continue; /* no output of its own: gather */
        while (j < n && !same_kind(&k[j].like, in)) j++;
        if (j == MAX_KINDS) continue;
        if (j == n) k[n++].like = *in;
        if (seen[j][pub / 8] >> pub % 8 & 1) continue;
        seen[j][pub / 8] |= (uint8_t)(1u << pub % 8);
        k[j].pubs++;
    }
    /* the chosen one, counted in ascending publications */
    for (uint32_t j = 0; seen && j < n; j++) {
        uint32_t want = k[j].chosen % k[j].pubs;
        for (uint32_t pub = 0; pub < MK_EPOCH_STRIDE; pub++)
            if (seen[j][pub / 8] >> pub % 8 & 1 && !want--) k[j].chosen = pub;
    }
    free(seen);
    return n;
}

static void describe(test *t)
{
    const mk_insn *in = t->insn;
    char shape[96] = "";
    const char *pro[] = {"", ", RMS", ", head norm"}, *epi[] = {"", ", + residual", ", silu", ", gated"};
    uint64_t rows = 0;
    for (uint32_t i = 0; i < t->n; i++) rows += t->insn[i].gemv.n;
    if (in->opcode == MK_OP_GEMV)
        snprintf(shape, sizeof shape, "%llu x %u %s%s%s", (unsigned long long)rows, in->gemv.k, in->gemv.wtype == MK_W_FP8 ? "FP8" : "BF16", pro[in->gemv.prologue % 3],
                 epi[in->gemv.epilogue % 4]);
    else if (in->opcode == MK_OP_EXPERT_UP || in->opcode == MK_OP_EXPERT_DOWN)
        snprintf(shape, sizeof shape, "%u of width %u x %u %s", in->expert.topk, in->expert.inter, in->expert.k, in->expert.wtype == MK_W_FP8 ? "FP8" : "BF16");
    else if (in->opcode == MK_OP_LM_HEAD)
        snprintf(shape, sizeof shape, "%u x %u %s", in->lm_head.vocab, in->lm_head.k, in->lm_head.wtype == MK_W_FP8 ? "FP8" : "BF16");
    else if (in->opcode == MK_OP_MLA_PARTIAL || in->opcode == MK_OP_KV_APPEND || in->opcode == MK_OP_COMBINE)
        snprintf(shape, sizeof shape, "%u heads, %u + %u", in->mla.all_heads, in->mla.latent, in->mla.rope);
    else if (in->opcode == MK_OP_GQA_PARTIAL || in->opcode == MK_OP_GQA_APPEND)
        snprintf(shape, sizeof shape, "%u heads over %u of %u", in->gqa.heads, in->gqa.kv_heads, in->gqa.dim);
    else if (in->opcode == MK_OP_DELTA_STEP)
        snprintf(shape, sizeof shape, "%u x %u", in->delta.dk, in->delta.dv);
    else if (in->opcode == MK_OP_ROUTER)
        snprintf(shape, sizeof shape, "%u x %u", in->router.experts, t->p->vec[in->wait[0].vec].width);
    else if (in->opcode == MK_OP_ROUTE)
        snprintf(shape, sizeof shape, "%u of %u experts", in->route.topk, in->route.experts);
    snprintf(t->name, sizeof t->name, "%s%s%s -> %.16s, layer %d, %u rows", mk_opcode_name(in->opcode), *shape ? " " : "", shape,
             in->signal_vec == MK_NONE ? "-" : t->p->vec[in->signal_vec].name, in->layer == MK_NONE ? -1 : (int)in->layer, t->step.nrows);
}

/* The instructions of a kind's chosen publication, by worker; before each worker's first, the ROUTE that experts need. */
static void gather(test *t)
{
    const mk_program *p = t->p;
    int experts = t->kind->like.opcode == MK_OP_EXPERT_UP || t->kind->like.opcode == MK_OP_EXPERT_DOWN;
    uint32_t n = 0;
    t->n = 0;
    for (uint32_t w = 0; w < p->info.workers; w++) {
        const mk_insn *route = NULL;
        uint32_t last = 0; /* the one taken before, + 1 */
        t->queue[w] = n;
        for (uint32_t i = p->queue[w]; i < p->queue[w + 1]; i++) {
            const mk_insn *in = &p->insn[i];
            if (in->opcode == MK_OP_ROUTE) route = in;
            if (in->opcode == MK_OP_SAMPLE && in->sample.helper) { /* runs with the SAMPLE that it helps; it has no output of its own */
                if (t->kind->like.opcode == MK_OP_SAMPLE) t->all[n++] = *in;
                continue;
            }
            if (in->signal_pub != t->kind->chosen || !same_kind(in, &t->kind->like)) continue;
            if (experts && !last && route) t->all[n++] = *route;
            t->all[n] = *in;
            if (last != i) t->all[n].flags &= (uint16_t)~MK_F_STAGED; /* who staged it is not here */
            n++;
            last = i + 1;
            t->worker[t->n] = w;
            t->insn[t->n++] = *in;
        }
    }
    t->queue[p->info.workers] = n;
}

static void stage(test *t)
{
    const mk_insn *in = t->insn;
    ref *a = &t->ref;
    uint32_t off = 0, k = a->in[0].width, pro = MK_PRO_NONE, param = 0, group = 0, f32 = 0;
    float eps = 0;
    if (in->opcode == MK_OP_GEMV) {
        const mk_gemv *g = &in->gemv;
        pro = g->prologue, param = g->param_off, eps = g->eps, group = g->norm_group, f32 = g->flags & MK_GEMV_X_F32;
        if (pro != MK_PRO_NONE) off = g->in_off, k = g->k;
    } else if (in->opcode == MK_OP_LM_HEAD) {
        pro = MK_PRO_RMS, param = in->lm_head.param_off, eps = in->lm_head.eps, k = in->lm_head.k;
    } else {
        pro = MK_PRO_RMS, param = in->expert.param_off, eps = in->expert.eps, k = in->expert.k;
    }
    float *staged = (float *)on_device(t, (uint64_t)MK_MAX_ROWS * a->in[0].width * 4, NULL);
    if (t->rc) return;
    ref_stage<<<t->step.nrows, 256>>>(*a, staged, off, k, pro, param, eps, group, f32 != 0);
    a->staged = staged;
}

static uint32_t most_rows(const test *t)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < t->n; i++) {
        const mk_insn *in = &t->insn[i];
        uint32_t n = in->opcode == MK_OP_GEMV ? in->gemv.n : in->opcode == MK_OP_EMBED ? in->embed.n : in->opcode == MK_OP_COMBINE ? in->mla.n :
                     in->opcode == MK_OP_LM_HEAD ? in->lm_head.n : in->opcode == MK_OP_EXPERT_DOWN ? in->expert.n : 0;
        if (n > most) most = n;
    }
    return most;
}

/* Random cache pages of a layer for every stream; or random state for its instructions, and a copy of it. */
static void make_cache(test *t, uint64_t kv_off, float amplitude)
{
    const mk_program_info *i = &t->p->info;
    uint32_t pages = 0;
    for (uint32_t r = 0; r < t->step.nrows; r++) pages += t->step.row[r].pos / MK_PAGE + 1;
    if (pages > i->kv_pages) pages = i->kv_pages;
    uint8_t *at = t->mem.kv + kv_off + (uint64_t)(i->kv_pages - pages) * i->kv_page_bytes;
    keep(t, at, pages * i->kv_page_bytes);
    if (t->rc) return;
    const mk_mla *m = &t->insn->mla;
    if (t->insn->opcode == MK_OP_MLA_PARTIAL && m->cache == MK_CACHE_FP8)
        ref_fill_latents<<<1024, 256>>>(at, (uint64_t)pages * MK_PAGE, m->latent, m->rope, amplitude, t->seed);
    else
        ref_fill<<<1024, 256>>>(at, pages * i->kv_page_bytes / 2, 1, amplitude, t->seed);
}

static void make_state(test *t)
{
    const mk_program_info *f = &t->p->info;
    uint64_t lo = ~0ull, hi = 0;
    uint32_t slots = 0;
    for (uint32_t i = 0; i < t->n; i++) {
        const mk_insn *in = &t->insn[i];
        uint64_t at = in->delta.state_off, end = at + mk_delta_state_bytes(&in->delta);
        if (at < lo) lo = at;
        if (end > hi) hi = end;
    }
    for (uint32_t r = 0; r < t->step.nrows; r++)
        if (t->step.row[r].state_write >= slots) slots = t->step.row[r].state_write + 1;
    t->ref.state_lo = lo;
    t->ref.state_words = (hi - lo) / 4;
    t->ref.state = (float *)on_device(t, slots * (hi - lo), NULL);
    for (uint32_t s = 0; s < slots && !t->rc; s++) {
        uint8_t *at = t->mem.state + s * f->state_slot_bytes + lo;
        keep(t, at, hi - lo);
        ref_fill<<<256, 256>>>(at, (hi - lo) / 4, 0, 1.0f, t->seed + s);
        cudaError_t e = cudaMemcpy(t->ref.state + s * t->ref.state_words, at, hi - lo, cudaMemcpyDeviceToDevice);
        if (e) fail_cuda(t, e, "state");
    }
}

static void local_image(test *t)
{
    uint64_t n = t->p->info.workers * t->p->info.local_bytes;
    for (uint64_t i = 0; i < n / 4; i++) ((float *)t->local)[i] = spread(t, 1.7f);
    t->ref.local = (float *)on_device(t, n, t->local);
}

/* Poisons what the instructions signal, runs them, reads the LOCAL vectors back. */
static void run(test *t)
{
    const mk_insn *in = t->insn;
    if (t->rc) return;
    if (in->signal_vec != MK_NONE && t->p->vec[in->signal_vec].scope == MK_PACKET) {
        const mk_vec *v = &t->p->vec[in->signal_vec];
        cudaError_t e = cudaMemset(half_at(t, v, in->signal_pub), 0xff, half_bytes(v));
        if (e) fail_cuda(t, e, "outputs");
    }
    mk_memory image;
    memset(&image, 0, sizeof image);
    image.local = t->local;
    if (!t->rc) t->rc = mk_gpu_load(t->g, &image, MK_REGION_LOCAL, t->err);
    if (!t->rc) t->rc = mk_gpu_once(t->g, t->all, t->queue, &t->step, EPOCH0, 5000, t->err);
    if (t->rc) {
        mk_err_prefix(t->err, "self-test: %s", t->name);
        return;
    }
    t->rc = mk_gpu_store(t->g, &image, MK_REGION_LOCAL, t->err);
}

static void poison(test *t, const mk_vec *v, uint64_t bytes)
{
    cudaError_t e = t->rc ? cudaSuccess : cudaMemset(t->mem.bulk + v->offset, 0xff, bytes);
    if (e) fail_cuda(t, e, "outputs");
}

static uint32_t splits_of(const mk_insn *in, uint32_t pos)
{
    return in->opcode == MK_OP_GQA_PARTIAL ? mk_splits(pos, in->gqa.grain, in->gqa.most) : mk_splits(pos, in->mla.grain, in->mla.most);
}

static void attention(test *t)
{
    ref *a = &t->ref;
    const mk_insn *in = t->insn;
    const int mla = in->opcode == MK_OP_MLA_PARTIAL;
    const uint32_t heads = mla ? in->mla.all_heads : in->gqa.heads, n = mla ? in->mla.latent : in->gqa.dim, floats = mk_partial_floats(n), R = t->step.nrows;
    const mk_vec *v = &t->p->vec[in->signal_vec];
    const uint64_t bytes = (uint64_t)R * MK_MAX_SPLITS * heads * floats * 4;
    const double tol = 2 * mk_tolerance(in); /* of machines that round q and p to bf16: the plain kernel rounds neither */
    uint32_t splits = 1;
    a->tokens = 1;
    for (uint32_t r = 0; r < R; r++) {
        uint32_t s = splits_of(in, t->step.row[r].pos);
        if (s > splits) splits = s;
        if (t->step.row[r].pos + 1 > a->tokens) a->tokens = t->step.row[r].pos + 1;
    }
    const uint32_t width = mla ? n + in->mla.rope : n;
    float *q = (float *)on_device(t, (uint64_t)R * heads * width * 4, NULL);
    a->score = (float *)on_device(t, (uint64_t)R * heads * a->tokens * 4, NULL);
    a->want = (float *)on_device(t, bytes, NULL);
    poison(t, v, bytes);
    if (t->rc) return;
    ref_query<<<dim3((heads + 31) / 32, R), 32>>>(*a, q);
    a->q = q;
    /* Keys such that scores spread by 2 at most: where they spread by dozens (norms of q with large weights), what bf16 does to q moves them by percents. */
    const float *host = (const float *)fetched(t, q, (uint64_t)R * heads * width * 4);
    double longest = 0;
    for (uint32_t k = 0; host && k < R * heads; k++) {
        double square = 0;
        for (uint32_t i = 0; i < width; i++) square += (double)host[(uint64_t)k * width + i] * host[(uint64_t)k * width + i];
        longest = fmax(longest, sqrt(square));
    }
    make_cache(t, mla ? in->mla.kv_off : in->gqa.kv_off, (float)fmin(1.7, 2 * 1.7 / (longest * (mla ? in->mla.scale : in->gqa.scale) + 1e-30)));
    if (t->rc) return;
    ref_scores<<<dim3((a->tokens + THREADS - 1) / THREADS, heads, R), THREADS>>>(*a);
    ref_partials<<<dim3(splits, heads, R), THREADS>>>(*a);
    run(t);
    for (uint32_t r = 0; r < R && !t->rc; r++) {
        const uint64_t at = (uint64_t)r * MK_MAX_SPLITS * heads * floats, count = (uint64_t)splits_of(in, t->step.row[r].pos) * heads * floats;
        const float *got = (const float *)fetched(t, t->mem.bulk + v->offset + at * 4, count * 4), *want = (const float *)fetched(t, a->want + at, count * 4);
        float *last = (float *)on_host(t, 4 * (count / floats) * 4), *of[4]; /* maxima found and expected, sums found and expected: of all heads and splits */
        for (int k = 0; k < 4 && last; k++) of[k] = last + k * (count / floats);
        for (uint64_t k = 0; got && want && last && k < count; k += floats) {
            compare(t, "partial", r, k, got + k, want + k, n, 0, tol);
            for (int x = 0; x < 4; x++) of[x][k / floats] = (x & 1 ? want : got)[k + n + x / 2];
        }
        if (t->rc) break;
        compare(t, "maximum", r, 0, of[0], of[1], count / floats, 0, tol);
        compare(t, "sum", r, 0, of[2], of[3], count / floats, 0, tol);
    }
}

/* The cache rows that an append wrote. */
static void appended(test *t)
{
    ref *a = &t->ref;
    const mk_insn *in = t->insn;
    const int mla = in->opcode == MK_OP_KV_APPEND;
    const mk_program_info *f = &t->p->info;
    const uint32_t n = mla ? in->mla.latent + in->mla.rope : in->gqa.dim * 2 * in->gqa.kv_heads, R = t->step.nrows;
    const uint64_t kv_off = mla ? in->mla.kv_off : in->gqa.kv_off;
    a->cap = n;
    a->want = (float *)on_device(t, (uint64_t)R * n * 4, NULL);
    uint32_t *page = (uint32_t *)fetched(t, t->mem.page, 4ull * t->mem.n_slots * t->mem.max_pages);
    float *got = (float *)on_host(t, n * 4ull);
    if (t->rc) return;
    for (uint32_t r = 0; r < R; r++) {
        const mk_row *row = &t->step.row[r];
        uint8_t *at = t->mem.kv + kv_off + page[row->slot * t->mem.max_pages + row->pos / MK_PAGE] * f->kv_page_bytes;
        keep(t, at, f->kv_page_bytes);
    }
    for (uint32_t k = 0; k < t->n_kept && !t->rc; k++) {
        cudaError_t e = cudaMemset(t->kept[k].at, 0xff, t->kept[k].bytes);
        if (e) fail_cuda(t, e, "outputs");
    }
    if (mla)
        ref_kv_append<<<1, MK_MAX_ROWS>>>(*a);
    else
        ref_gqa_append<<<t->n, MK_MAX_ROWS>>>(*a);
    run(t);
    const float *want = (const float *)fetched(t, a->want, (uint64_t)R * n * 4);
    for (uint32_t r = 0; r < R && !t->rc; r++) {
        const mk_row *row = &t->step.row[r];
        const uint8_t *at = t->mem.kv + kv_off + page[row->slot * t->mem.max_pages + row->pos / MK_PAGE] * f->kv_page_bytes;
        const uint16_t *h = (const uint16_t *)fetched(t, at, f->kv_page_bytes);
        if (h && mla && in->mla.cache == MK_CACHE_FP8) { /* half a step of e4m3 is a sixteenth of a value, or 2^-10 of the scale */
            const uint32_t latent = in->mla.latent;
            const uint8_t *token = (const uint8_t *)h + (uint64_t)(row->pos % MK_PAGE) * mk_latent_row_bytes(latent, in->mla.rope, MK_CACHE_FP8, 2);
            for (uint32_t i = 0; i < n; i++) got[i] = mk_latent_value(token, latent, i);
            compare(t, "cached latent", r, 0, got, want + (uint64_t)r * n, latent, 1.0 / 16, mk_tolerance(in) + 0x1p-12);
            compare(t, "cached key", r, latent, got + latent, want + (uint64_t)r * n + latent, n - latent, BF16_STEP, mk_tolerance(in));
            continue;
        }
        for (uint32_t i = 0; h && i < n; i++) {
            uint64_t k = (uint64_t)(row->pos % MK_PAGE) * n + i; /* MLA: [token][n]; GQA: [KV head][k, v][token][dim] */
            if (!mla) k = ((uint64_t)(i / in->gqa.dim) * MK_PAGE + row->pos % MK_PAGE) * in->gqa.dim + i % in->gqa.dim;
            got[i] = widen(h[k]);
        }
        if (h) compare(t, "cache row", r, 0, got, want + (uint64_t)r * n, n, BF16_STEP, mk_tolerance(in));
    }
}

static void combined(test *t)
{
    ref *a = &t->ref;
    const mk_insn *in = t->insn;
    const uint32_t heads = in->mla.all_heads, floats = mk_partial_floats(in->mla.latent), R = t->step.nrows;
    const uint64_t n = (uint64_t)R * MK_MAX_SPLITS * heads * floats;
    const mk_vec *v = &t->p->vec[in->wait[0].vec];
    float *partial = (float *)(t->mem.bulk + v->offset);
    /* sums of weights of at least one token: the largest weight is 1 */
    ref_fill<<<1024, 256>>>(partial, n, 0, 1.7f, t->seed);
    float *host = (float *)fetched(t, partial, n * 4);
    if (!host) return;
    for (uint64_t k = 0; k < n; k += floats) host[k + in->mla.latent + 1] = 1 + 60 * (float)fabs((double)host[k + in->mla.latent + 1]);
    put(t, partial, host, n * 4);
    ref_combine<<<dim3((most_rows(t) * R + THREADS - 1) / THREADS, t->n), THREADS>>>(*a, partial);
}

static void lm_head(test *t)
{
    ref *a = &t->ref;
    const mk_insn *in = t->insn;
    const uint32_t vocab = in->lm_head.vocab, R = t->step.nrows;
    const mk_vec *lv = &t->p->vec[in->lm_head.logits_vec], *sv = &t->p->vec[in->signal_vec];
    a->want = (float *)on_device(t, (uint64_t)R * vocab * 4, NULL);
    poison(t, lv, (uint64_t)R * vocab * 4);
    stage(t);
    if (t->rc) return;
    ref_lm_head<<<dim3((most_rows(t) * R + THREADS - 1) / THREADS, t->n), THREADS>>>(*a);
    run(t);
    const float *got = (const float *)fetched(t, t->mem.bulk + lv->offset, (uint64_t)R * vocab * 4), *want = (const float *)fetched(t, a->want, (uint64_t)R * vocab * 4);
    float *stats = (float *)on_host(t, (uint64_t)R * sv->width * 4);
    if (t->rc) return;
    for (uint32_t r = 0; r < R; r++) {
        int asked = t->step.row[r].flags & MK_ROW_LOGITS;
        if (asked) compare(t, "logits", r, 0, got + (uint64_t)r * vocab, want + (uint64_t)r * vocab, vocab, 0, mk_tolerance(in));
        for (uint32_t i = 0; i < t->n && asked; i++) { /* the statistics of what it computed itself */
            const mk_lm_head *l = &t->insn[i].lm_head;
            const float *x = got + (uint64_t)r * vocab + l->row0;
            uint32_t best = 0, id;
            double sum = 0;
            for (uint32_t k = 1; k < l->n; k++)
                if (x[k] > x[best]) best = k;
            for (uint32_t k = 0; k < l->n; k++) sum += exp((double)x[k] - x[best]);
            id = l->row0 + best;
            float *q = stats + (uint64_t)r * sv->width + mk_vec_starts(t->p, sv)[t->insn[i].signal_slice];
            q[0] = x[best];
            memcpy(&q[1], &id, 4);
            q[2] = (float)sum;
        }
    }
    const uint32_t *half = (const uint32_t *)fetched(t, half_at(t, sv, in->signal_pub), half_bytes(sv)), *start = mk_vec_starts(t->p, sv);
    for (uint32_t r = 0; half && r < R && !t->rc; r++)
        for (uint32_t i = 0; i < t->n; i++) {
            uint32_t s = t->insn[i].signal_slice;
            const uint32_t *q = half + ((uint64_t)r * sv->nslice + s) * sv->slice_packets * 4;
            const float *x = stats + (uint64_t)r * sv->width + start[s];
            float max, sum;
            uint32_t id;
            memcpy(&max, &q[0], 4);
            memcpy(&sum, &q[2], 4);
            memcpy(&id, &x[1], 4);
            if (q[3] != mk_epoch(EPOCH0, t->step.seq, in->signal_pub) && !t->rc)
                t->rc = mk_fail(t->err, MK_E_DEVICE, "self-test: %s: row %u, slice %u was not published", t->name, r, s);
            if (!(t->step.row[r].flags & MK_ROW_LOGITS)) {
                if (!(max < -3e38f) && !t->rc) t->rc = mk_fail(t->err, MK_E_DEVICE, "self-test: %s: row %u, slice %u: expected a maximum of -inf, found %g", t->name, r, s, max);
                continue;
            }
            if ((q[1] != id || max != x[0]) && !t->rc)
                t->rc = mk_fail(t->err, MK_E_DEVICE, "self-test: %s: row %u, slice %u: expected its greatest logit %g at %u, found %g at %u", t->name, r, s, x[0], id, max, q[1]);
            compare(t, "sum of exponentials", r, s, &sum, &x[2], 1, 0, 1e-4);
        }
}

/* What was published against C[h] = A[h] B[h] of the checkpoint's own tensor, over all heads at once: neither the tape nor how it was packed is in it. */
static void absorbed(test *t)
{
    const mk_insn *in = t->insn;
    const mk_vec *v = &t->p->vec[in->signal_vec];
    const uint32_t R = t->step.nrows, *start = mk_vec_starts(t->p, v), width = t->ref.in[0].width;
    mk_heads h;
    memset(&h, 0, sizeof h);
    int is = t->rc ? 0 : t->cfg->heads(t->cfg->arg, in, t->worker[0], &h, t->err);
    if (is < 0) t->rc = t->err ? t->err->code : MK_E_DEVICE;
    if (is <= 0) return;
    h.n = R;
    h.group = 1;
    h.b_bf16 = h.a_bf16;
    h.b_row = h.c_row = R;
    h.b_head = (uint64_t)h.k * R;
    h.c_head = (uint64_t)h.m * R;
    uint16_t *b = (uint16_t *)on_host(t, h.heads * h.b_head * 2);
    float *want = (float *)on_host(t, (uint64_t)MK_MAX_ROWS * v->width * 4);
    if (!b || !want) return;
    if (!h.a_bf16 || (uint64_t)h.heads * h.m != v->width) {
        t->rc = mk_fail(t->err, MK_E_BUG, "self-test: %s: %u heads of %u in a vector of %u", t->name, h.heads, h.m, v->width);
        return;
    }
    for (uint32_t i = 0; i < t->n; i++) { /* a slice lies in one head: its input is the head's */
        uint32_t head = start[t->insn[i].signal_slice] / h.m;
        for (uint32_t k = 0; k < h.k; k++)
            for (uint32_t r = 0; r < R; r++) b[head * h.b_head + (uint64_t)k * R + r] = narrow(t->value[0][(uint64_t)r * width + t->insn[i].gemv.in_off + k]);
    }
    h.b = on_device(t, h.heads * h.b_head * 2, b);
    h.c = (float *)on_device(t, h.heads * h.c_head * 4, NULL);
    if (!t->rc) t->rc = mk_blas_heads(t->cfg->blas, &h, t->err);
    const float *c = (const float *)fetched(t, h.c, h.heads * h.c_head * 4);
    for (uint32_t r = 0; c && r < R; r++)
        for (uint32_t i = 0; i < v->width; i++) want[(uint64_t)r * v->width + i] = c[(uint64_t)i * R + r] * in->gemv.scale;
    t->report->absorbed++;
    /* FP8 tapes: the tensor may be quantised on its way (2^-4 of a value) or was rounded to bf16 here. */
    if (!t->rc) compare_published(t, want, NULL, "against the checkpoint's heads", in->gemv.wtype == MK_W_FP8 ? 0.15 : 1e-3);
}

/* Everything that publishes one vector or writes one LOCAL vector. */
static void published(test *t)
{
    ref *a = &t->ref;
    const mk_insn *in = t->insn;
    const mk_vec *v = &t->p->vec[in->signal_vec];
    const uint32_t R = t->step.nrows, blocks = (most_rows(t) * R + THREADS - 1) / THREADS;
    const int local = v->scope == MK_LOCAL;
    a->cap = MK_SEGMENT_ROWS;
    a->out_width = v->width;
    uint64_t n = local ? (uint64_t)t->n * MK_MAX_ROWS * a->cap : (uint64_t)MK_MAX_ROWS * v->width;
    a->want = (float *)on_device(t, n * 4, NULL);
    if (!local) a->out_start = (uint32_t *)on_device(t, (v->nslice + 1) * 4ull, mk_vec_starts(t->p, v));
    if (in->opcode == MK_OP_DELTA_STEP) a->aux = (float *)on_device(t, n * 4, NULL);
    if (in->opcode == MK_OP_DELTA_STEP) make_state(t);
    if (in->opcode == MK_OP_GEMV || in->opcode == MK_OP_EXPERT_UP) stage(t);
    if (t->rc) return;
    switch (in->opcode) {
    case MK_OP_EMBED: ref_embed<<<dim3(blocks, t->n), THREADS>>>(*a); break;
    case MK_OP_GEMV: ref_gemv<<<dim3(blocks, t->n), THREADS>>>(*a); break;
    case MK_OP_DELTA_STEP: ref_delta<<<t->n, in->delta.dv>>>(*a); break;
    case MK_OP_COMBINE: combined(t); break;
    case MK_OP_EXPERT_UP: ref_expert_up<<<dim3((in->expert.inter + THREADS - 1) / THREADS, in->expert.topk, R), THREADS>>>(*a); break;
    case MK_OP_EXPERT_DOWN: ref_expert_down<<<dim3(blocks, t->n), THREADS>>>(*a); break;
    default: break;
    }
    run(t);
    const float *want = (const float *)fetched(t, a->want, n * 4), *o = NULL;
    float *trailer = NULL;
    if (in->opcode == MK_OP_DELTA_STEP) {
        o = (const float *)fetched(t, a->aux, n * 4);
        trailer = (float *)on_host(t, (uint64_t)MK_MAX_ROWS * v->nslice * 4);
        for (uint32_t r = 0; r < R && o && trailer; r++)
            for (uint32_t s = 0; s < v->nslice; s++)
                for (uint32_t i = mk_vec_starts(t->p, v)[s]; i < mk_vec_starts(t->p, v)[s + 1]; i++)
                    trailer[r * v->nslice + s] += o[(uint64_t)r * v->width + i] * o[(uint64_t)r * v->width + i];
    }
    if (t->rc) return;
    /* LOCAL: all workers' values of a row together, since one worker may have a single one, near zero */
    float *found = local ? (float *)on_host(t, (uint64_t)t->n * a->cap * 4) : NULL, *expected = local ? (float *)on_host(t, (uint64_t)t->n * a->cap * 4) : NULL;
    for (uint32_t r = 0; found && expected && r < R; r++) {
        uint64_t have = 0;
        for (uint32_t i = 0; i < t->n; i++) {
            const float *got = local_after(t, i);
            const uint32_t m = t->insn[i].gemv.n;
            if (!got) continue;
            memcpy(found + have, got + r * m, m * 4);
            memcpy(expected + have, want + ((uint64_t)i * MK_MAX_ROWS + r) * a->cap, m * 4);
            have += m;
        }
        compare(t, v->name, r, 0, found, expected, have, 0, mk_tolerance(in));
    }
    if (!local) compare_published(t, want, trailer, v->name, mk_tolerance(in));
    if (!local && in->opcode == MK_OP_GEMV && in->gemv.prologue == MK_PRO_NONE && t->cfg->heads) absorbed(t);
    if (a->state) {
        float *after = (float *)a->state;
        uint32_t slots = 0;
        for (uint32_t r = 0; r < R; r++)
            if (t->step.row[r].state_write >= slots) slots = t->step.row[r].state_write + 1;
        const float *expected = (const float *)fetched(t, after, slots * a->state_words * 4);
        if (expected) compare_state(t, expected);
    }
}

static void one_kind(test *t)
{
    const mk_program *p = t->p;
    gather(t);
    if (!t->n) return;
    const mk_insn *in = t->insn;
    describe(t);
    t->worst = 0;
    memset(&t->ref, 0, sizeof t->ref);
    t->ref = (ref){.n = t->n, .step = t->step, .tape = t->mem.tape, .expert = t->mem.expert, .embed = t->mem.embed, .kv = t->mem.kv, .param = t->mem.param,
                   .local_words = p->info.local_bytes / 4, .kv_page_bytes = p->info.kv_page_bytes, .page = t->mem.page, .max_pages = t->mem.max_pages};
    t->ref.insn = (mk_insn *)on_device(t, t->n * sizeof *in, in);
    t->ref.worker = (uint32_t *)on_device(t, t->n * 4ull, t->worker);
    t->ref.vec = (mk_vec *)on_device(t, p->info.n_vec * sizeof(mk_vec), p->vec);
    t->ref.tape_base = (uint64_t *)on_device(t, (p->info.workers + 1) * 8ull, p->tape_base);
    local_image(t);
    float *logits = NULL;
    if (in->opcode == MK_OP_SAMPLE) {
        logits = make_logits(t);
        make_input(t, in, 1);
    } else if (in->opcode == MK_OP_ROUTE) {
        make_routes(t, in, in);
    } else {
        for (uint32_t w = 0; w < in->nwait; w++) make_input(t, in, w);
        if (in->opcode == MK_OP_EXPERT_UP || in->opcode == MK_OP_EXPERT_DOWN) make_routes(t, t->all, in);
    }
    if (!t->rc) switch (in->opcode) {
        case MK_OP_MLA_PARTIAL:
        case MK_OP_GQA_PARTIAL: attention(t); break;
        case MK_OP_KV_APPEND:
        case MK_OP_GQA_APPEND: appended(t); break;
        case MK_OP_LM_HEAD: lm_head(t); break;
        case MK_OP_ROUTER: {
            const mk_vec *v = &p->vec[in->signal_vec];
            cudaError_t cleared = cudaMemset(t->mem.bulk + v->offset, 0, v->width);
            if (cleared) fail_cuda(t, cleared, t->name);
            run(t);
            if (!t->rc) compare_sums(t);
            break;
        }
        case MK_OP_ROUTE:
            run(t);
            if (!t->rc) compare_routes(t);
            break;
        case MK_OP_SAMPLE:
            run(t);
            if (!t->rc) compare_samples(t, logits);
            break;
        default: published(t);
        }
    cudaError_t e = cudaDeviceSynchronize();
    if (e) fail_cuda(t, e, t->name);
    release(t);
}

/* ---- all of them ---------------------------------------------------------------------------------------------------- */

/* Up to eight rows: streams at positions that begin a page, end one, or have splits of several pages; the last stream has the rows that are over. */
static void make_rows(test *t)
{
    static const uint32_t want[MK_MAX_ROWS] = {0, FAR, 63, 64, 127, 700, 1, 300};
    const mk_program_info *f = &t->p->info;
    uint32_t S = t->mem.n_slots < MK_MAX_ROWS ? t->mem.n_slots : MK_MAX_ROWS, left = f->kv_layers ? f->kv_pages : 0xffffff;
    if (f->state_slot_bytes && f->state_slots < S) S = (uint32_t)f->state_slots;
    uint32_t *table = (uint32_t *)on_host(t, 4ull * t->mem.n_slots * t->mem.max_pages), next = 0;
    if (!table) return;
    t->step.any_logits = 1;
    while (S > 1 && left < S) S--;
    for (uint32_t r = 0; r < MK_MAX_ROWS; r++) {
        mk_row *row = &t->step.row[r];
        uint32_t slot = r < S ? r : S - 1, pos = r < S ? want[S == 1 ? 1 : r] : t->step.row[r - 1].pos + 1, limit = t->mem.max_context < f->max_context ? t->mem.max_context : f->max_context;
        if (r < S) { /* a page of every stream after this one is kept for it */
            uint32_t may = left - (S - 1 - r);
            if (may > t->mem.max_pages) may = t->mem.max_pages;
            if (pos / MK_PAGE >= may) pos = may * MK_PAGE - 1;
            if (pos >= limit) pos = limit - 1;
            if (slot == S - 1 && pos >= 8) pos -= 8; /* room for the rows that are over */
            for (uint32_t k = 0; k <= (pos + (slot == S - 1 ? 8 : 0)) / MK_PAGE && k < may; k++, left--)
                table[slot * t->mem.max_pages + k] = f->kv_layers ? f->kv_pages - 1 - next++ : 0;
        } else if (pos >= limit) {
            break;
        }
        *row = (mk_row){.slot = slot, .token = (uint32_t)(uniform(t) * f->vocab), .pos = pos, .flags = MK_ROW_SAMPLE, .state_read = slot, .state_write = slot};
        if (r != 1) row->flags |= MK_ROW_LOGITS;
        if (pos == 0) row->flags |= MK_ROW_FIRST;
        t->step.nrows = r + 1;
    }
    put(t, t->mem.page, table, 4ull * t->mem.n_slots * t->mem.max_pages);
}

static double now(void)
{
    struct timespec x;
    clock_gettime(CLOCK_MONOTONIC, &x);
    return (double)x.tv_sec + 1e-9 * (double)x.tv_nsec;
}

extern "C" int mk_selftest(mk_gpu *g, const mk_program *p, const mk_selftest_config *c, mk_selftest_report *report, mk_err *err)
{
    const double begin = now();
    static const mk_memory none = {};
    mk_selftest_report scrap;
    test *t = (test *)calloc(1, sizeof *t);
    kind *kinds = (kind *)calloc(MAX_KINDS, sizeof *kinds);
    if (!report) report = &scrap;
    memset(report, 0, sizeof *report);
    if (!t || !kinds) {
        free(t), free(kinds);
        return mk_fail(err, MK_E_CAPACITY, "self-test: out of memory");
    }
    t->g = g;
    t->p = p;
    t->cfg = c;
    t->seed = c->seed * 2862933555777941757ull + 3037000493ull;
    t->report = report;
    t->err = err;
    t->rc = mk_gpu_load(g, &none, 0, err); /* makes the image of the LOCAL vectors */
    mk_gpu_memory(g, &t->mem);
    t->insn = (mk_insn *)malloc((p->info.n_insn + 1ull) * sizeof *t->insn);
    t->all = (mk_insn *)malloc((2ull * p->info.n_insn + 1) * sizeof *t->all);
    t->worker = (uint32_t *)malloc((p->info.n_insn + 1ull) * 4);
    t->queue = (uint32_t *)malloc((p->info.workers + 1ull) * 4);
    t->local = (uint8_t *)calloc(1, p->info.workers * p->info.local_bytes + 64);
    if (!t->rc && (!t->insn || !t->all || !t->worker || !t->queue || !t->local)) t->rc = mk_fail(err, MK_E_CAPACITY, "self-test: out of memory");
    if (!t->rc) make_rows(t);
    release(t);
    for (uint32_t j = 0; j < MAX_KINDS; j++) kinds[j].chosen = (uint32_t)(uniform(t) * 4096);
    uint32_t n = t->rc ? 0 : find_kinds(p, kinds);
    int first = t->rc;
    mk_err one = {};
    t->err = &one;
    for (uint32_t j = 0; j < n && !cudaDeviceSynchronize(); j++) {
        if (first && now() - begin > PATIENCE) break; /* after a failure the other kinds are tested as well, a line each in the log, unless they hang */
        const double at = now();
        char line[640];
        t->kind = &kinds[j];
        t->rc = 0;
        one_kind(t);
        report->kinds++;
        report->opcodes |= 1u << kinds[j].like.opcode;
        if (!(t->worst <= report->worst)) {
            report->worst = t->worst;
            snprintf(report->worst_at, sizeof report->worst_at, "%s", t->name);
        }
        if (t->rc)
            snprintf(line, sizeof line, "%s", one.msg);
        else
            snprintf(line, sizeof line, "self-test: %s: error %.2g of its tolerance, %.0f ms", t->name, t->worst, 1e3 * (now() - at));
        if (c->log) c->log(line);
        if (!t->rc || first) continue;
        first = t->rc;
        if (err) *err = one;
    }
    t->rc = first;
    t->err = first ? NULL : err;
    cudaError_t e = cudaMemset(t->mem.bulk, 0, p->info.bulk_bytes);
    if (!e) e = cudaMemset(t->mem.page, 0, 4ull * t->mem.n_slots * t->mem.max_pages);
    if (!e) e = cudaDeviceSynchronize();
    if (e) fail_cuda(t, e, "cleaning up");
    for (uint32_t s = 0; s < t->mem.n_slots; s++) memset(&t->mem.slot[s].sampling, 0, sizeof t->mem.slot[s].sampling);
    int rc = t->rc;
    release(t);
    free(t->insn), free(t->all), free(t->worker), free(t->queue), free(t->local), free(t), free(kinds);
    report->seconds = now() - begin;
    return rc;
}
