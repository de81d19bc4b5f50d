#include "ipc/server_trace.h"

#include "instructions/program.h"

#include <stdlib.h>
#include <string.h>

#define READ_NS 1000000000ull /* for the last records to come in after the trace is said to be recorded */

static_assert(MK_WIRE_MAX_TRACE * sizeof(mk_wire_trace_insn) < MK_WIRE_MAX_FRAME, "a message of the map fits");

int mk_server_trace_start(mk_server_trace *t, mk_engine *e, uint64_t owner, uint64_t request, const mk_wire_trace *m, uint64_t now, mk_err *err)
{
    const mk_program *p = mk_engine_program(e);
    if (m->timeout_ms < 1 || m->timeout_ms > MK_WIRE_TRACE_MS)
        return mk_fail(err, MK_E_WIRE, "timeout_ms: expected 1 to %u, found %u", MK_WIRE_TRACE_MS, m->timeout_ms);
    if (t->owner) return mk_fail(err, MK_E_CAPACITY, "a trace is under way already: one at a time");
    mk_err why = {0};
    if (mk_engine_trace(e, m->steps, &why)) return mk_fail(err, why.code == MK_E_USAGE ? MK_E_WIRE : why.code, "%s", why.msg);
    t->record = malloc(p->info.n_insn * sizeof *t->record);
    if (!t->record) {
        mk_engine_trace_end(e);
        return mk_fail(err, MK_E_CAPACITY, "out of memory");
    }
    t->owner = owner;
    t->request = request;
    t->state = MK_SERVER_TRACE_WAITS;
    t->deadline_ns = now + (uint64_t)m->timeout_ms * 1000000;
    t->step = t->at = 0;
    t->about = (mk_wire_traced){.steps = m->steps, .workers = p->info.workers, .instructions = p->info.n_insn, .vectors = p->info.n_vec};
    return MK_OK;
}

void mk_server_trace_end(mk_server_trace *t, mk_engine *e)
{
    if (!t->owner) return;
    mk_engine_trace_end(e);
    free(t->record);
    t->record = NULL;
    t->owner = 0;
}

static void add_name(mk_server_trace *t, const char *name)
{
    size_t n = strlen(name) + 1;
    if (t->about.n + n > sizeof t->names) return; /* the reader gets fewer names than it has numbers for */
    memcpy(t->names + t->about.n, name, n);
    t->about.n += (uint32_t)n;
}

static void fill_map(mk_server_trace *t, const mk_program *p)
{
    uint32_t w = 0;
    for (uint32_t i = 0; i < t->fixed.map.n; i++) {
        const mk_insn *in = &p->insn[t->at + i];
        mk_wire_trace_insn *x = &t->items.insn[i];
        while (t->at + i >= p->queue[w + 1]) w++;
        *x = (mk_wire_trace_insn){.worker = (uint16_t)w, .opcode = in->opcode, .n_wait = in->nwait, .layer = in->layer, .vector = in->signal_vec,
                                  .publication = in->signal_pub, .slice = in->signal_slice, .tape_bytes = in->tape_bytes};
        for (int k = 0; k < 3; k++) {
            x->wait[k].vector = in->wait[k].vec;
            x->wait[k].publication = in->wait[k].pub;
            x->wait[k].slice = in->wait[k].slice0;
            x->wait[k].slices = k < in->nwait && p->vec[in->wait[k].vec].scope == MK_LOCAL ? 0xffff : in->wait[k].nslice;
        }
    }
}

static void fill_records(mk_server_trace *t)
{
    for (uint32_t i = 0; i < t->fixed.records.n; i++) {
        const mk_trace_record *r = &t->record[t->at + i];
        t->items.record[i] = (mk_wire_trace_record){.start = mk_trace_start(r), .input = r->input, .weights = r->weights, .publish = r->publish,
                                                    .end = r->end, .bytes = r->bytes, .rows = r->mark & 0xff};
    }
}

/* Reads the next step's records; 0: they are not all there yet. */
static int read_step(mk_server_trace *t, mk_engine *e, uint64_t now, mk_err *err)
{
    uint32_t missing;
    if (mk_engine_trace_read(e, t->step - 1, t->record, &missing, err)) return MK_WIRE_ERR;
    if (!missing) return 1;
    if (now < t->deadline_ns) return 0;
    mk_fail(err, MK_E_BUG, "%u of %u records of step %u are missing", missing, t->about.instructions, t->about.first_step + t->step - 1);
    return MK_WIRE_ERR;
}

static int next(mk_server_trace *t, mk_engine *e, uint64_t now, const void **fixed, const void **items, mk_err *err)
{
    const mk_program *p = mk_engine_program(e);
    const uint32_t total = t->about.instructions;
    if (t->state == MK_SERVER_TRACE_WAITS) {
        enum mk_trace_state s = mk_engine_trace_state(e, &t->about.first_step);
        if (s == MK_TRACE_LOST) return mk_fail(err, MK_E_WIRE, "the device hung and was started again: the trace is lost"), MK_WIRE_ERR;
        if (s != MK_TRACE_RECORDED && now < t->deadline_ns) return 0;
        if (s != MK_TRACE_RECORDED)
            return mk_fail(err, MK_E_WIRE, "fewer than %u steps were run in time: trace while something is generated", t->about.steps), MK_WIRE_ERR;
        for (uint32_t i = 0; i < p->info.n_vec; i++) add_name(t, p->vec[i].name);
        for (unsigned i = 0; i < MK_OP_COUNT; i++) add_name(t, mk_opcode_name(i));
        t->state = MK_SERVER_TRACE_SENDS;
        *fixed = &t->about;
        *items = t->names;
        return MK_WIRE_TRACED;
    }
    if (t->state == MK_SERVER_TRACE_READS) {
        int rc = read_step(t, e, now, err);
        if (rc != 1) return rc;
        t->state = MK_SERVER_TRACE_SENDS;
    }
    uint32_t n = total - t->at < MK_WIRE_MAX_TRACE ? total - t->at : MK_WIRE_MAX_TRACE;
    int type = t->step ? MK_WIRE_TRACE_RECORDS : MK_WIRE_TRACE_MAP;
    if (t->step) {
        t->fixed.records = (mk_wire_trace_records){.step = t->step - 1, .first = t->at, .n = n};
        fill_records(t);
    } else {
        t->fixed.map = (mk_wire_trace_map){.first = t->at, .n = n};
        fill_map(t, p);
    }
    *fixed = &t->fixed;
    *items = &t->items;
    t->at += n;
    if (t->at == total) {
        t->at = 0;
        if (t->step++ == t->about.steps) {
            mk_server_trace_end(t, e);
        } else {
            t->state = MK_SERVER_TRACE_READS;
            t->deadline_ns = now + READ_NS;
        }
    }
    return type;
}

int mk_server_trace_next(mk_server_trace *t, mk_engine *e, uint64_t now, const void **fixed, const void **items, mk_err *err)
{
    int type = next(t, e, now, fixed, items, err);
    if (type == MK_WIRE_ERR) mk_server_trace_end(t, e);
    return type;
}
