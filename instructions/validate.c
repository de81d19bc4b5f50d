/* Structure of a program: header, vectors, queues, waits and signals, publications. */
#include "instructions/validate_internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define REGION_MAX (1ull << 48)

mk_text mk_insn_text(const mk_check *c, uint32_t x)
{
    const mk_insn *in = &c->p->insn[x];
    uint32_t w = c->owner[x];
    mk_text t;
    int n = snprintf(t.s, sizeof t.s, "worker %u #%u %s", w, x - c->p->queue[w], mk_opcode_name(in->opcode));
    if (in->layer != MK_NONE) snprintf(t.s + n, sizeof t.s - (size_t)n, " layer %u", in->layer);
    return t;
}

int mk_refuse(mk_check *c, uint32_t x, const char *fmt, ...)
{
    char why[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(why, sizeof why, fmt, ap);
    va_end(ap);
    return mk_fail(c->err, MK_E_PROGRAM, "%s: %s", mk_insn_text(c, x).s, why);
}

static int by_offset(const void *a, const void *b)
{
    const mk_range *x = a, *y = b;
    return x->off < y->off ? -1 : x->off > y->off;
}

int mk_overlap(mk_range *r, uint32_t n, uint32_t *a, uint32_t *b)
{
    if (n < 2) return 0;
    qsort(r, n, sizeof *r, by_offset);
    for (uint32_t i = 0; i + 1 < n; i++)
        if (r[i].bytes > r[i + 1].off - r[i].off) {
            *a = r[i].who;
            *b = r[i + 1].who;
            return 1;
        }
    return 0;
}

/* ---- header --------------------------------------------------------------------------------------------------------- */

static int check_info(mk_check *c)
{
    const mk_program_info *i = c->i;
    if (i->magic != MK_PROGRAM_MAGIC)
        return mk_fail(c->err, MK_E_PROGRAM, "program: magic is 0x%08x, expected 0x%08x", i->magic, MK_PROGRAM_MAGIC);
    if (i->version != MK_PROGRAM_VERSION)
        return mk_fail(c->err, MK_E_PROGRAM, "program: version %u, expected %u", i->version, MK_PROGRAM_VERSION);
    if (i->flags & ~(uint32_t)MK_PROG_ACT_F32) return mk_fail(c->err, MK_E_PROGRAM, "program: unknown flags 0x%x", i->flags);
    if (i->flags & MK_PROG_ACT_F32 && i->smem_limit)
        return mk_fail(c->err, MK_E_PROGRAM, "program: act=f32 is for the twin only, but a shared memory limit of %u bytes is set", i->smem_limit);
    const struct {
        const char *what;
        uint64_t n, least, most;
    } r[] = {
        {"workers", i->workers, 1, MK_MAX_WORKERS},
        {"layers", i->layers, 1, 4096},
        {"hidden", i->hidden, 1, 1u << 20},
        {"vocab", i->vocab, 1, 1u << 24},
        {"max_context", i->max_context, 1, 1u << 30},
        {"n_vec", i->n_vec, 1, 65534},
        {"n_start", i->n_start, 0, 1u << 26},
        {"n_insn", i->n_insn, 1, 1u << 24},
        {"n_counter", i->n_counter, 0, 65534},
        {"tape_bytes", i->tape_bytes, 0, REGION_MAX},
        {"expert_bytes", i->expert_bytes, 0, REGION_MAX},
        {"embed_bytes", i->embed_bytes, 0, REGION_MAX},
        {"param_floats", i->param_floats, 0, UINT32_MAX},
        {"exchange_bytes", i->exchange_bytes, 0, REGION_MAX},
        {"bulk_bytes", i->bulk_bytes, 0, REGION_MAX},
        {"local_bytes", i->local_bytes, 0, UINT32_MAX},
        {"state_slot_bytes", i->state_slot_bytes, 0, REGION_MAX},
        {"kv_page_bytes", i->kv_page_bytes, 0, 1u << 30},
        {"kv_layers", i->kv_layers, 0, i->layers},
        {"kv_pages", i->kv_pages, 0, 1u << 28},
        {"state_slots", i->state_slots, 0, 1u << 24},
        {"expert_part_bytes", i->expert_part_bytes, 0, 0},
    };
    for (size_t k = 0; k < sizeof r / sizeof r[0]; k++)
        if (r[k].n < r[k].least || r[k].n > r[k].most)
            return mk_fail(c->err, MK_E_PROGRAM, "program: %s is %llu, expected %llu to %llu", r[k].what, (unsigned long long)r[k].n,
                           (unsigned long long)r[k].least, (unsigned long long)r[k].most);
    if (i->local_bytes % 16) return mk_fail(c->err, MK_E_PROGRAM, "program: local_bytes is %llu, expected a multiple of 16", (unsigned long long)i->local_bytes);
    return MK_OK;
}

static int check_queues(mk_check *c)
{
    const mk_program *p = c->p;
    const mk_program_info *i = c->i;
    if (p->queue[0] != 0) return mk_fail(c->err, MK_E_PROGRAM, "queue offsets: the first is %u, expected 0", p->queue[0]);
    for (uint32_t w = 0; w < i->workers; w++)
        if (p->queue[w + 1] < p->queue[w] || p->queue[w + 1] > i->n_insn)
            return mk_fail(c->err, MK_E_PROGRAM, "queue offsets: worker %u has [%u, %u) of %u instructions", w, p->queue[w], p->queue[w + 1],
                           i->n_insn);
    if (p->queue[i->workers] != i->n_insn)
        return mk_fail(c->err, MK_E_PROGRAM, "queue offsets: the last is %u, expected %u (all instructions)", p->queue[i->workers], i->n_insn);
    for (uint32_t w = 0; w < i->workers; w++)
        for (uint32_t x = p->queue[w]; x < p->queue[w + 1]; x++) c->owner[x] = w;
    return MK_OK;
}

/* The instructions' tapes are checked one by one; here, that workers' tapes lie behind each other. */
static int check_tapes(mk_check *c)
{
    const mk_program *p = c->p;
    const mk_program_info *i = c->i;
    uint64_t at = 0, longest = 0;
    for (uint32_t w = 0; w <= i->workers; w++) {
        if (p->tape_base[w] != at)
            return mk_fail(c->err, MK_E_PROGRAM, "tape of worker %u begins at %llu, expected %llu (what those before it consume)", w,
                           (unsigned long long)p->tape_base[w], (unsigned long long)at);
        if (w == i->workers) break;
        uint64_t sum = 0;
        for (uint32_t x = p->queue[w]; x < p->queue[w + 1]; x++) sum += p->insn[x].tape_bytes;
        if (sum > longest) longest = sum;
        at += sum;
    }
    if (at != i->tape_bytes || longest != i->tape_bytes_max)
        return mk_fail(c->err, MK_E_PROGRAM, "tape_bytes is %llu and tape_bytes_max %llu, the instructions consume %llu, on one worker at most %llu",
                       (unsigned long long)i->tape_bytes, (unsigned long long)i->tape_bytes_max, (unsigned long long)at,
                       (unsigned long long)longest);
    return MK_OK;
}

/* ---- vectors -------------------------------------------------------------------------------------------------------- */

static int vec_refuse(mk_check *c, uint32_t v, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static int vec_refuse(mk_check *c, uint32_t v, const char *fmt, ...)
{
    char why[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(why, sizeof why, fmt, ap);
    va_end(ap);
    return mk_fail(c->err, MK_E_PROGRAM, "vector %u \"%.15s\": %s", v, c->p->vec[v].name, why);
}

static int check_packet_vec(mk_check *c, uint32_t id)
{
    const mk_vec *v = &c->p->vec[id];
    uint32_t longest = 0;
    if (v->dtype != MK_F32 && (v->dtype != MK_BF16 || c->i->flags & MK_PROG_ACT_F32))
        return vec_refuse(c, id, "type %u, expected f32%s", v->dtype, c->i->flags & MK_PROG_ACT_F32 ? " (the program is act=f32)" : " or bf16");
    if (v->trailer > 1 || v->flags & ~MK_VEC_DYNAMIC || v->signals || v->counter)
        return vec_refuse(c, id, "trailer %u, flags 0x%x, signals %u, counter %u: not those of a packet vector", v->trailer, v->flags, v->signals,
                          v->counter);
    if (v->nslice < 1 || v->nslice > 65535) return vec_refuse(c, id, "%u slices, expected 1 to 65535", v->nslice);
    if (v->start_index > c->i->n_start || c->i->n_start - v->start_index < v->nslice + 1)
        return vec_refuse(c, id, "slice starts [%u, +%u) are outside the table of %u", v->start_index, v->nslice + 1, c->i->n_start);
    const uint32_t *start = mk_vec_starts(c->p, v);
    if (start[0] != 0) return vec_refuse(c, id, "the first slice starts at %u, expected 0", start[0]);
    for (uint32_t s = 0; s < v->nslice; s++) {
        if (start[s + 1] <= start[s])
            return vec_refuse(c, id, "slice %u is [%u, %u), expected ascending starts", s, start[s], start[s + 1]);
        if (start[s + 1] - start[s] > longest) longest = start[s + 1] - start[s];
    }
    if (start[v->nslice] != v->width) return vec_refuse(c, id, "the slices end at %u, the width is %u", start[v->nslice], v->width);
    uint64_t packets = mk_slice_packets(v, longest);
    if (v->slice_packets < packets)
        return vec_refuse(c, id, "slice_packets is %u, the longest slice needs %llu", v->slice_packets, (unsigned long long)packets);
    return MK_OK;
}

static int check_plain_vec(mk_check *c, uint32_t id, uint8_t *counter_used)
{
    const mk_vec *v = &c->p->vec[id];
    int bulk = v->scope == MK_BULK;
    if (v->dtype || v->trailer || (v->flags && !(bulk && v->flags == MK_VEC_SUMS)) || v->nslice || v->slice_packets || v->start_index || (!bulk && (v->signals || v->counter)))
        return vec_refuse(c, id, "reserved bytes: fields that belong to packet vectors must be 0");
    if (!bulk) return v->width ? MK_OK : vec_refuse(c, id, "0 bytes wide");
    if (v->signals < 1 || v->signals > c->i->n_insn)
        return vec_refuse(c, id, "%u signals a publication, expected 1 to %u (instructions)", v->signals, c->i->n_insn);
    if (v->counter >= c->i->n_counter) return vec_refuse(c, id, "counter %u is out of range, there are %u", v->counter, c->i->n_counter);
    if (counter_used[v->counter]) return vec_refuse(c, id, "counter %u belongs to another vector as well", v->counter);
    counter_used[v->counter] = 1;
    return MK_OK;
}

static int check_vecs(mk_check *c)
{
    static const char *const region_name[3] = {"exchange", "bulk", "local"};
    const uint64_t region[3] = {c->i->exchange_bytes, c->i->bulk_bytes, c->i->local_bytes};
    uint32_t n_vec = c->i->n_vec, count[3] = {0}, a, b;
    uint8_t *used = calloc(c->i->n_counter + 1, 1);
    mk_range *r = malloc(3 * (size_t)n_vec * sizeof *r);
    int rc = MK_OK;
    if (!used || !r) rc = mk_fail(c->err, MK_E_SYSTEM, "validator: out of memory");
    for (uint32_t id = 0; id < n_vec && !rc; id++) {
        const mk_vec *v = &c->p->vec[id];
        if (!memchr(v->name, 0, sizeof v->name) || !v->name[0])
            rc = mk_fail(c->err, MK_E_PROGRAM, "vector %u: its name is empty or has no end", id);
        else if (v->scope > MK_LOCAL)
            rc = vec_refuse(c, id, "scope %u, expected 0 to 2", v->scope);
        else if (v->reserved)
            rc = vec_refuse(c, id, "reserved bytes are 0x%llx, expected 0", (unsigned long long)v->reserved);
        else if (v->pubs < 1 || v->pubs > MK_EPOCH_STRIDE - 1)
            rc = vec_refuse(c, id, "%u publications a step, expected 1 to %u", v->pubs, MK_EPOCH_STRIDE - 1);
        else if (v->offset % 16)
            rc = vec_refuse(c, id, "offset %llu, expected a multiple of 16", (unsigned long long)v->offset);
        else
            rc = v->scope == MK_PACKET ? check_packet_vec(c, id) : check_plain_vec(c, id, used);
        if (rc) break;
        uint64_t bytes = v->scope == MK_PACKET ? 2ull * MK_MAX_ROWS * v->nslice * v->slice_packets * 16 : v->width;
        if (v->offset > region[v->scope] || bytes > region[v->scope] - v->offset)
            rc = vec_refuse(c, id, "[%llu, +%llu) is outside the %s region of %llu bytes", (unsigned long long)v->offset,
                            (unsigned long long)bytes, region_name[v->scope], (unsigned long long)region[v->scope]);
        else if (bytes)
            r[(size_t)v->scope * n_vec + count[v->scope]++] = (mk_range){v->offset, bytes, id};
    }
    for (int s = 0; s < 3 && !rc; s++)
        if (mk_overlap(r + (size_t)s * n_vec, count[s], &a, &b))
            rc = vec_refuse(c, b, "overlaps vector %u \"%.15s\" in the %s region", a, c->p->vec[a].name, region_name[s]);
    free(used);
    free(r);
    return rc;
}

/* ---- publications --------------------------------------------------------------------------------------------------- */

static int alloc_publications(mk_check *c)
{
    const mk_program *p = c->p;
    uint64_t pubs = 0, members = 0, most = 4ull * c->i->n_insn + 4096;
    c->pub_first = malloc(((size_t)c->i->n_vec + 1) * sizeof *c->pub_first);
    if (!c->pub_first) return mk_fail(c->err, MK_E_SYSTEM, "validator: out of memory");
    for (uint32_t v = 0; v < c->i->n_vec; v++) {
        const mk_vec *q = &p->vec[v];
        uint64_t each = q->scope == MK_LOCAL ? 0 : q->scope == MK_BULK ? q->signals : q->flags & MK_VEC_DYNAMIC ? c->i->workers : q->nslice;
        c->pub_first[v] = (uint32_t)pubs;
        pubs += q->pubs;
        members += each * q->pubs;
        /* every slice of every publication is an instruction, LM_HEAD makes two: far more than that cannot be published */
        if (pubs > most || members > most)
            return vec_refuse(c, v, "missing publication: %u publications of %llu slices or signals, the whole program has %u instructions",
                              q->pubs, (unsigned long long)each, c->i->n_insn);
    }
    c->pub_first[c->i->n_vec] = c->n_pub = (uint32_t)pubs;
    c->member_off = malloc((pubs + 1) * sizeof *c->member_off);
    c->member = malloc((members + 1) * sizeof *c->member);
    c->filled = calloc(pubs + 1, sizeof *c->filled);
    c->read_off = calloc(pubs + 2, sizeof *c->read_off);
    c->read = malloc((3 * (size_t)c->i->n_insn + 1) * sizeof *c->read);
    if (!c->member_off || !c->member || !c->filled || !c->read_off || !c->read)
        return mk_fail(c->err, MK_E_SYSTEM, "validator: out of memory");
    uint32_t off = 0, id = 0;
    for (uint32_t v = 0; v < c->i->n_vec; v++) {
        const mk_vec *q = &p->vec[v];
        uint32_t each = q->scope == MK_LOCAL ? 0 : q->scope == MK_BULK ? q->signals : q->flags & MK_VEC_DYNAMIC ? c->i->workers : q->nslice;
        for (uint32_t k = 0; k < q->pubs; k++, off += each) c->member_off[id++] = off;
        if (q->scope != MK_LOCAL) c->out->publications += q->pubs;
    }
    c->member_off[pubs] = off;
    memset(c->member, 0xff, ((size_t)off + 1) * sizeof *c->member);
    return MK_OK;
}

/* Waits and signal name what exists; LOCAL waits have their writer. */
static int check_header(mk_check *c, uint32_t x)
{
    const mk_insn *in = &c->p->insn[x];
    uint32_t w = c->owner[x];
    if (in->opcode >= MK_OP_COUNT) return mk_refuse(c, x, "opcode %u is not legal, expected 0 to %u", in->opcode, MK_OP_COUNT - 1);
    if (in->seq != x - c->p->queue[w]) return mk_refuse(c, x, "sequence number %u, expected %u", in->seq, x - c->p->queue[w]);
    int outside = in->opcode == MK_OP_EMBED || in->opcode == MK_OP_LM_HEAD || in->opcode == MK_OP_SAMPLE || in->opcode == MK_OP_SCHEDULE;
    if (outside ? in->layer != MK_NONE : in->layer >= c->i->layers)
        return mk_refuse(c, x, "layer %u, expected %s", in->layer, outside ? "none" : "one of the program's layers");
    if (in->flags & ~MK_F_STAGED) return mk_refuse(c, x, "unknown flags 0x%x", in->flags);
    if (in->pad) return mk_refuse(c, x, "reserved bytes in the header are 0x%x, expected 0", in->pad);
    if (in->nwait > 3) return mk_refuse(c, x, "%u waits, expected at most 3", in->nwait);

    for (uint32_t k = 0; k < in->nwait; k++) {
        const mk_wait *wt = &in->wait[k];
        if (wt->vec >= c->i->n_vec) return mk_refuse(c, x, "wait %u names vector %u, there are %u", k, wt->vec, c->i->n_vec);
        const mk_vec *v = &c->p->vec[wt->vec];
        if (wt->pub >= v->pubs) return mk_refuse(c, x, "waits for %s pub %u, it has %u publications a step", v->name, wt->pub, v->pubs);
        if (v->scope != MK_PACKET) {
            if (wt->slice0 || wt->nslice)
                return mk_refuse(c, x, "waits for slices [%u, +%u) of %s, which is waited for as a whole", wt->slice0, wt->nslice, v->name);
            if (v->scope == MK_BULK) continue;
            uint32_t src = c->local_worker[wt->vec] == w ? c->local_writer[wt->vec] : MK_NOBODY;
            if (src == MK_NOBODY) return mk_refuse(c, x, "reads local vector %s before its queue has written it", v->name);
            if (c->p->insn[src].signal_pub != wt->pub)
                return mk_refuse(c, x, "reads local vector %s pub %u, but #%u has left pub %u there", v->name, wt->pub, c->p->insn[src].seq,
                                 c->p->insn[src].signal_pub);
            c->source[3 * (size_t)x + k] = src;
            continue;
        }
        if (!wt->nslice || (uint32_t)wt->slice0 + wt->nslice > v->nslice)
            return mk_refuse(c, x, "waits for slices [%u, %u) of %s, which has %u", wt->slice0, (uint32_t)wt->slice0 + wt->nslice, v->name,
                             v->nslice);
        if (v->flags & MK_VEC_DYNAMIC && wt->nslice != v->nslice)
            return mk_refuse(c, x, "waits for %u of %u slices of %s, which is dynamic and waited for as a whole", wt->nslice, v->nslice, v->name);
    }
    for (uint32_t k = in->nwait; k < 3; k++)
        if (in->wait[k].vec != MK_NONE || in->wait[k].pub || in->wait[k].slice0 || in->wait[k].nslice)
            return mk_refuse(c, x, "reserved bytes: wait %u is not used, expected vector 0x%x and zeros", k, MK_NONE);

    if (in->signal_vec == MK_NONE) {
        if (in->signal_pub || in->signal_slice) return mk_refuse(c, x, "reserved bytes: it signals nothing, but names pub %u slice %u", in->signal_pub, in->signal_slice);
        return MK_OK;
    }
    if (in->signal_vec >= c->i->n_vec) return mk_refuse(c, x, "signals vector %u, there are %u", in->signal_vec, c->i->n_vec);
    const mk_vec *v = &c->p->vec[in->signal_vec];
    if (in->signal_pub >= v->pubs)
        return mk_refuse(c, x, "publishes %s pub %u, it has %u publications a step", v->name, in->signal_pub, v->pubs);
    int sliced = v->scope == MK_PACKET && !(v->flags & MK_VEC_DYNAMIC);
    if (sliced ? in->signal_slice >= v->nslice : in->signal_slice != 0)
        return mk_refuse(c, x, "publishes slice %u of %s, which has %u", in->signal_slice, v->name, v->nslice);
    return MK_OK;
}

static int add_publication(mk_check *c, uint32_t x, uint32_t vec, uint32_t pub, uint32_t slice)
{
    const mk_vec *v = &c->p->vec[vec];
    uint32_t id = mk_pub_id(c, vec, pub), *m = c->member + c->member_off[id];
    if (v->scope == MK_BULK) {
        if (c->filled[id] == v->signals)
            return mk_refuse(c, x, "double publication: %s pub %u takes %u signals a step, this is one more (the first is %s)", v->name, pub,
                             v->signals, mk_insn_text(c, m[0]).s);
        m[c->filled[id]++] = x;
        return MK_OK;
    }
    m += v->flags & MK_VEC_DYNAMIC ? c->owner[x] : slice;
    if (*m != MK_NOBODY)
        return mk_refuse(c, x, "double publication: %s pub %u slice %u is already published by %s", v->name, pub, slice,
                         mk_insn_text(c, *m).s);
    *m = x;
    c->filled[id]++;
    return MK_OK;
}

static int walk_queues(mk_check *c)
{
    const mk_program *p = c->p;
    for (uint32_t w = 0; w < c->i->workers; w++) {
        uint64_t tape = 0;
        for (uint32_t x = p->queue[w]; x < p->queue[w + 1]; x++) {
            const mk_insn *in = &p->insn[x];
            int rc = check_header(c, x);
            if (!rc) rc = mk_check_reserved(c, x);
            if (!rc && in->tape_off != tape)
                rc = mk_refuse(c, x, "tape offset %llu, expected %llu (the sum before it)", (unsigned long long)in->tape_off,
                               (unsigned long long)tape);
            if (!rc) rc = mk_check_insn(c, x);
            if (rc) return rc;
            tape += in->tape_bytes;
            c->out->insns[in->opcode]++;
            uint32_t vec[2], pub[2], n = mk_signals_of(c, in, vec, pub);
            for (uint32_t k = 0; k < n && !rc; k++) rc = add_publication(c, x, vec[k], pub[k], k ? 0 : in->signal_slice);
            if (rc) return rc;
            if (in->signal_vec != MK_NONE && p->vec[in->signal_vec].scope == MK_LOCAL) {
                c->local_writer[in->signal_vec] = x;
                c->local_worker[in->signal_vec] = w;
            }
        }
    }
    return MK_OK;
}

static void index_reads(mk_check *c)
{
    const mk_program *p = c->p;
    uint32_t *end = c->read_off; /* counted one up, so that the fill leaves the beginnings in place */
    for (int fill = 0; fill < 2; fill++) {
        for (uint32_t x = 0; x < c->i->n_insn; x++)
            for (uint32_t k = 0; k < p->insn[x].nwait; k++) {
                const mk_wait *wt = &p->insn[x].wait[k];
                const mk_vec *v = &p->vec[wt->vec];
                if (v->scope == MK_LOCAL) continue;
                uint32_t id = mk_pub_id(c, wt->vec, wt->pub);
                if (!fill) {
                    end[id + 2]++;
                    continue;
                }
                int whole = v->scope == MK_BULK || v->flags & MK_VEC_DYNAMIC;
                c->read[end[id + 1]++] = whole ? (mk_read_of){x, 0, mk_members(c, id)} : (mk_read_of){x, wt->slice0, wt->nslice};
                c->out->waits++;
            }
        if (!fill)
            for (uint32_t id = 0; id < c->n_pub; id++) end[id + 2] += end[id + 1];
    }
}

static int check_missing(mk_check *c)
{
    for (uint32_t v = 0; v < c->i->n_vec; v++) {
        const mk_vec *q = &c->p->vec[v];
        for (uint32_t k = 0; k < q->pubs; k++) {
            uint32_t id = mk_pub_id(c, v, k), n = mk_members(c, id), s = 0;
            if (c->filled[id] == n) continue;
            while (c->member[c->member_off[id] + s] != MK_NOBODY) s++;
            char who[96] = "";
            for (uint32_t r = c->read_off[id]; r < c->read_off[id + 1]; r++)
                if (q->scope == MK_BULK || (s >= c->read[r].slice0 && s - c->read[r].slice0 < c->read[r].nslice)) {
                    snprintf(who, sizeof who, " (%s waits for it)", mk_insn_text(c, c->read[r].insn).s);
                    break;
                }
            if (q->scope == MK_BULK)
                return vec_refuse(c, v, "missing publication: pub %u is signalled %u times a step, expected %u%s", k, c->filled[id], q->signals,
                                  who);
            if (q->flags & MK_VEC_DYNAMIC)
                return vec_refuse(c, v, "missing publication: it is dynamic, but worker %u has no EXPERT_UP for pub %u%s", s, k, who);
            return vec_refuse(c, v, "missing publication: no instruction publishes slice %u of pub %u%s", s, k, who);
        }
    }
    return MK_OK;
}

/* Those who help SAMPLE: each number once, each on a worker of its own, all waiting for what SAMPLE waits for; and nothing comes after them, because they meet. */
static int check_helpers(mk_check *c)
{
    const mk_insn *s = &c->p->insn[c->sample];
    uint32_t found = 0;
    for (uint32_t x = 0; x < c->i->n_insn; x++) {
        const mk_insn *in = &c->p->insn[x];
        if (in->opcode != MK_OP_SAMPLE || x == c->sample) continue;
        if (in->sample.helpers != s->sample.helpers)
            return mk_refuse(c, x, "one of %u helpers, SAMPLE expects %u", in->sample.helpers, s->sample.helpers);
        if (memcmp(in->wait, s->wait, sizeof in->wait)) return mk_refuse(c, x, "waits for something else than the SAMPLE that it helps");
        if (x + 1 != c->p->queue[c->owner[x] + 1] || c->owner[x] == c->owner[c->sample])
            return mk_refuse(c, x, "expected to be the last of its queue, and on another worker than SAMPLE");
        for (uint32_t y = 0; y < x; y++)
            if (y != c->sample && c->p->insn[y].opcode == MK_OP_SAMPLE && c->p->insn[y].sample.helper == in->sample.helper)
                return mk_refuse(c, x, "helper %u is %s already", in->sample.helper, mk_insn_text(c, y).s);
        found++;
    }
    if (found != s->sample.helpers) return mk_refuse(c, c->sample, "%u helpers, the program has %u", s->sample.helpers, found);
    return MK_OK;
}

/* SAMPLE (but for those that help it) and SCHEDULE, once each; the step ends with SCHEDULE, right behind SAMPLE: a machine may begin the next step when the token is chosen. */
static int check_ends(mk_check *c)
{
    uint32_t *one[2] = {&c->sample, &c->schedule}, op[2] = {MK_OP_SAMPLE, MK_OP_SCHEDULE};
    c->sample = c->schedule = MK_NOBODY;
    for (int k = 0; k < 2; k++) {
        for (uint32_t x = 0; x < c->i->n_insn; x++) {
            if (c->p->insn[x].opcode != op[k] || (k == 0 && c->p->insn[x].sample.helper)) continue;
            if (*one[k] != MK_NOBODY) return mk_refuse(c, x, "expected one %s in the program, %s is another", mk_opcode_name(op[k]), mk_insn_text(c, *one[k]).s);
            *one[k] = x;
        }
        if (*one[k] == MK_NOBODY) return mk_fail(c->err, MK_E_PROGRAM, "expected one %s in the program, found none", mk_opcode_name(op[k]));
    }
    uint32_t w = c->owner[c->schedule], last = c->p->queue[w + 1] - 1;
    if (c->schedule != last)
        return mk_refuse(c, c->schedule, "expected to be the last of its queue, but #%u %s follows", c->p->insn[last].seq,
                         mk_opcode_name(c->p->insn[last].opcode));
    if (c->sample + 1 != c->schedule) return mk_refuse(c, c->schedule, "expected right behind %s, whose choice begins the next step", mk_insn_text(c, c->sample).s);
    return check_helpers(c);
}

int mk_validate(const mk_program *p, mk_validation *out, mk_err *err)
{
    struct timespec t0, t1;
    mk_validation own;
    clock_gettime(CLOCK_MONOTONIC, &t0);
    if (!out) out = &own;
    memset(out, 0, sizeof *out);
    mk_check c = {.p = p, .i = &p->info, .out = out, .err = err};
    int rc = check_info(&c);
    if (rc) return rc;
    size_t n = p->info.n_insn, n_vec = p->info.n_vec;
    c.owner = calloc(n, sizeof *c.owner);
    c.source = malloc(3 * n * sizeof *c.source);
    c.local_writer = malloc(n_vec * sizeof *c.local_writer);
    c.local_worker = malloc(n_vec * sizeof *c.local_worker);
    c.state = malloc(n * sizeof *c.state);
    if (!c.owner || !c.source || !c.local_writer || !c.local_worker || !c.state) {
        rc = mk_fail(err, MK_E_SYSTEM, "validator: out of memory");
        goto out;
    }
    memset(c.source, 0xff, 3 * n * sizeof *c.source);
    memset(c.local_worker, 0xff, n_vec * sizeof *c.local_worker);
    if ((rc = check_queues(&c)) || (rc = check_vecs(&c)) || (rc = alloc_publications(&c)) || (rc = walk_queues(&c)) || (rc = check_tapes(&c)))
        goto out;
    index_reads(&c);
    if ((rc = check_missing(&c)) || (rc = check_ends(&c)) || (rc = mk_check_groups(&c))) goto out;
    rc = mk_check_order(&c);
out:
    free(c.owner);
    free(c.source);
    free(c.local_writer);
    free(c.local_worker);
    free(c.pub_first);
    free(c.member_off);
    free(c.member);
    free(c.filled);
    free(c.read_off);
    free(c.read);
    free(c.state);
    clock_gettime(CLOCK_MONOTONIC, &t1);
    out->seconds = (double)(t1.tv_sec - t0.tv_sec) + 1e-9 * (double)(t1.tv_nsec - t0.tv_nsec);
    return rc;
}
