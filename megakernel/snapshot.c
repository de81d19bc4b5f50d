#include "megakernel/snapshot.h"

#include "megakernel/exchange.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

void mk_snapshot_free(mk_snapshot *s)
{
    free(s->position);
    free(s->counter);
    free(s->exchange);
    s->position = s->counter = NULL;
    s->exchange = NULL;
}

static int ready(const mk_snapshot *s, uint32_t worker, const mk_insn *in, int w, uint32_t *slice)
{
    mk_memory mem = {.exchange = s->exchange, .counter = s->counter};
    mk_ctx c = {.prog = s->prog, .in = in, .mem = &mem, .step = &s->step, .worker = worker, .epoch0 = s->epoch0};
    const mk_wait *wt = &in->wait[w];
    const mk_vec *v = &s->prog->vec[wt->vec];
    /* of a vector that depends on the route, the reader's slices may have no publisher in this step */
    if (v->scope == MK_PACKET && v->flags & MK_VEC_DYNAMIC && !wt->nslice) return 1;
    return mk_wait_ready(&c, w, slice);
}

/* Whether the instruction has published, as far as that can be seen: its own slice, or a counter that is complete. */
static int published(const mk_snapshot *s, uint32_t worker, const mk_insn *in)
{
    if (in->signal_vec == MK_NONE) return 0;
    const mk_vec *v = &s->prog->vec[in->signal_vec];
    if (v->scope == MK_LOCAL || v->flags & MK_VEC_DYNAMIC) return 0;
    mk_insn look = {.nwait = 1, .wait = {{in->signal_vec, in->signal_pub, in->signal_slice, v->scope == MK_PACKET}}};
    return ready(s, worker, &look, 0, NULL);
}

/* Who publishes slice `slice` of what `w` waits for. */
static const mk_insn *publisher(const mk_program *p, const mk_wait *w, uint32_t slice, uint32_t *worker)
{
    const mk_vec *v = &p->vec[w->vec];
    if (v->scope != MK_PACKET || v->flags & MK_VEC_DYNAMIC) return NULL;
    for (uint32_t i = 0; i < p->info.workers; i++)
        for (uint32_t k = p->queue[i]; k < p->queue[i + 1]; k++) {
            const mk_insn *in = &p->insn[k];
            if (in->signal_vec != w->vec || in->signal_pub != w->pub || in->signal_slice != slice) continue;
            *worker = i;
            return in;
        }
    return NULL;
}

/* Between two steps only SCHEDULE has anything to do. */
static int between(const mk_snapshot *s) { return s->step.seq == s->steps && !s->step.nrows; }

void mk_snapshot_worker(const mk_snapshot *s, uint32_t worker, mk_worker_view *v)
{
    const mk_insn *queue = s->prog->insn + s->prog->queue[worker];
    uint32_t n = s->prog->queue[worker + 1] - s->prog->queue[worker], next = n, fed = s->position[worker];
    memset(v, 0, sizeof *v);
    if (between(s)) {
        if (!n || queue[n - 1].opcode != MK_OP_SCHEDULE) return;
        v->state = MK_WORKER_STUCK;
        v->insn = &queue[n - 1];
        return;
    }
    while (next > 0 && !published(s, worker, &queue[next - 1])) next--;
    /* Behind the last publication that can be seen: what shows no publication of its own may be over, up to the first wait that is not. The
     * position is of an earlier step if nothing of this one was fed. */
    if (next && fed + 1 < next) fed = next - 1;
    for (uint32_t k = next; k < n; k++) {
        const mk_insn *in = &queue[k];
        if (fed < k && (next || k)) {
            v->state = MK_WORKER_UNFED;
            v->insn = in;
            return;
        }
        for (int w = 0; w < in->nwait; w++)
            if (!ready(s, worker, in, w, &v->slice)) {
                v->state = MK_WORKER_WAITING;
                v->insn = in;
                v->wait = w;
                v->from = publisher(s->prog, &in->wait[w], v->slice, &v->from_worker);
                return;
            }
        int shows = in->signal_vec != MK_NONE && s->prog->vec[in->signal_vec].scope == MK_PACKET && !(s->prog->vec[in->signal_vec].flags & MK_VEC_DYNAMIC);
        if (shows || in->opcode == MK_OP_SCHEDULE) {
            v->state = MK_WORKER_STUCK;
            v->insn = in;
            return;
        }
    }
}

int mk_snapshot_culprit(const mk_snapshot *s)
{
    int stuck = -1;
    if (!s->device_read || !s->live || s->step.seq != s->steps) return -1;
    for (uint32_t w = 0; w < s->prog->info.workers; w++) {
        mk_worker_view v;
        mk_snapshot_worker(s, w, &v);
        if (v.state == MK_WORKER_UNFED) return (int)w;
        if (v.state == MK_WORKER_STUCK && stuck < 0) stuck = (int)w;
    }
    return stuck;
}

static int layer_of(const mk_insn *in) { return in->layer == MK_NONE ? -1 : (int)in->layer; }

void mk_snapshot_text(const mk_snapshot *s, char *text, size_t size)
{
    int w = mk_snapshot_culprit(s), waiting = 0, on = -1;
    mk_worker_view v, u;
    if (w < 0) {
        snprintf(text, size, "%s", s->kernel[0] ? s->kernel : "no worker can be named");
        return;
    }
    for (uint32_t i = 0; i < s->prog->info.workers; i++) {
        mk_snapshot_worker(s, i, &u);
        waiting += u.state == MK_WORKER_WAITING;
        if (u.state == MK_WORKER_WAITING && u.from && u.from_worker == (uint32_t)w && on < 0) on = (int)i;
    }
    mk_snapshot_worker(s, (uint32_t)w, &v);
    int n = snprintf(text, size, "step %u: worker %d hangs at instruction %u (%s, layer %d): %s; %d workers wait", s->step.seq, w, v.insn->seq,
                     mk_opcode_name(v.insn->opcode), layer_of(v.insn),
                     between(s) ? "it has stopped looking for work" : v.state == MK_WORKER_UNFED ? "its controller never handed it to the compute warps" : "it has its inputs and has not published", waiting);
    if (on < 0 || n < 0 || (size_t)n >= size) return;
    mk_snapshot_worker(s, (uint32_t)on, &u);
    const mk_wait *wt = &u.insn->wait[u.wait];
    snprintf(text + n, size - (size_t)n, ", worker %d (instruction %u, %s) for its %s publication %u slice %u", on, u.insn->seq,
             mk_opcode_name(u.insn->opcode), s->prog->vec[wt->vec].name, wt->pub, u.slice);
}

/* ---- the flight file ------------------------------------------------------------------------------------------------- */

static void string(FILE *f, const char *key, const char *text)
{
    fprintf(f, "  \"%s\": \"", key);
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') fputc('\\', f);
        fputc((unsigned char)*text < 0x20 ? ' ' : *text, f);
    }
    fputs("\",\n", f);
}

static void insn(FILE *f, const mk_insn *in)
{
    fprintf(f, "\"instruction\": %u, \"opcode\": \"%s\", \"layer\": %d", in->seq, mk_opcode_name(in->opcode), layer_of(in));
}

static void worker(FILE *f, const mk_snapshot *s, uint32_t w)
{
    static const char *const name[] = {"through", "waiting", "stuck", "unfed"};
    mk_worker_view v;
    mk_snapshot_worker(s, w, &v);
    fprintf(f, "{\"worker\": %u, \"fed\": %u, \"state\": \"%s\"", w, s->position[w], name[v.state]);
    if (v.insn) {
        fputs(", ", f);
        insn(f, v.insn);
    }
    if (v.state == MK_WORKER_WAITING) {
        const mk_wait *wt = &v.insn->wait[v.wait];
        const mk_vec *vec = &s->prog->vec[wt->vec];
        fprintf(f, ", \"waits_for\": {\"vector\": \"%s\", \"publication\": %u", vec->name, wt->pub);
        if (vec->scope == MK_PACKET)
            fprintf(f, ", \"slice\": %u, \"epoch\": %u", v.slice, mk_epoch(s->epoch0, s->step.seq, wt->pub));
        else
            fprintf(f, ", \"counter\": %u, \"expected\": %u", s->counter[vec->counter], mk_counter_target(vec, s->step.seq, wt->pub));
        if (v.from) {
            fprintf(f, ", \"from\": {\"worker\": %u, ", v.from_worker);
            insn(f, v.from);
            fputc('}', f);
        }
        fputc('}', f);
    }
    fputc('}', f);
}

int mk_flight_write(const mk_snapshot *s, const char *dir, const char *device, const char *error, char *path, size_t size, mk_err *err)
{
    struct timespec t;
    struct tm tm;
    char stamp[32];
    clock_gettime(CLOCK_REALTIME, &t);
    gmtime_r(&t.tv_sec, &tm);
    strftime(stamp, sizeof stamp, "%Y%m%dT%H%M%S", &tm);
    snprintf(path, size, "%s/mkd-flight-%s.%03ldZ.json", dir, stamp, t.tv_nsec / 1000000);
    FILE *f = fopen(path, "w");
    if (!f) return mk_fail(err, MK_E_SYSTEM, "cannot write %.400s: %s", path, strerror(errno));
    int culprit = mk_snapshot_culprit(s);
    fputs("{\n", f);
    string(f, "error", error);
    string(f, "device", device);
    string(f, "kernel", s->kernel);
    fprintf(f, "  \"live\": %s,\n  \"steps_finished\": %u,\n  \"epoch0\": %u,\n", s->live ? "true" : "false", s->steps, s->epoch0);
    fprintf(f, "  \"submit_ring\": {\"submitted\": %u, \"taken\": %u},\n", s->submitted, s->taken);
    fprintf(f, "  \"token_ring\": {\"published\": %u, \"read\": %u}", s->published, s->events_read);
    if (s->device_read) {
        fprintf(f, ",\n  \"streams_open\": %u,\n  \"step\": {\"number\": %u, \"rows\": [", s->streams, s->step.seq);
        for (uint32_t r = 0; r < s->step.nrows && r < MK_MAX_ROWS; r++)
            fprintf(f, "%s{\"slot\": %u, \"position\": %u, \"token\": %u, \"flags\": %u}", r ? ", " : "", s->step.row[r].slot, s->step.row[r].pos,
                    s->step.row[r].token, s->step.row[r].flags);
        fputs("]},\n  \"culprit\": ", f);
        if (culprit < 0)
            fputs("null", f);
        else
            worker(f, s, (uint32_t)culprit);
        fputs(",\n  \"workers\": [\n", f);
        for (uint32_t w = 0; w < s->prog->info.workers; w++) {
            fputs("    ", f);
            worker(f, s, w);
            fputs(w + 1 < s->prog->info.workers ? ",\n" : "\n  ]", f);
        }
    }
    fputs("\n}\n", f);
    if (fclose(f)) return mk_fail(err, MK_E_SYSTEM, "cannot write %.400s: %s", path, strerror(errno));
    return MK_OK;
}
