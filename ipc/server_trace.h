/* The server's side of TRACE: one trace at a time, from the request to the last record sent. The server asks it what to send next. */
#ifndef MK_SERVER_TRACE_H
#define MK_SERVER_TRACE_H

#include "host/engine.h"
#include "ipc/wire.h"

enum mk_server_trace_state { MK_SERVER_TRACE_WAITS = 0, MK_SERVER_TRACE_READS, MK_SERVER_TRACE_SENDS };

/* Zero it before the first use. */
typedef struct mk_server_trace {
    uint64_t owner, request; /* whose it is; owner 0: nobody's, none is under way */
    enum mk_server_trace_state state;
    uint64_t deadline_ns;
    uint32_t step, at;       /* what to send next: records of step - 1 from `at` on; step 0: the map */
    mk_trace_record *record; /* [instructions] of step - 1 */
    mk_wire_traced about;
    union {
        mk_wire_trace_map map;
        mk_wire_trace_records records;
    } fixed;
    char names[MK_WIRE_MAX_NAMES];
    union {
        mk_wire_trace_insn insn[MK_WIRE_MAX_TRACE];
        mk_wire_trace_record record[MK_WIRE_MAX_TRACE];
    } items;
} mk_server_trace;

/* MK_E_WIRE: a field is out of range. MK_E_CAPACITY: another trace is under way, or there is no memory. */
int mk_server_trace_start(mk_server_trace *t, mk_engine *e, uint64_t owner, uint64_t request, const mk_wire_trace *m, uint64_t now, mk_err *err);
/* The next message: its type, with *fixed and *items for mk_wire_encode (valid until the next call). 0: nothing yet. MK_WIRE_ERR: it has failed, err
 * says why. After that, and after the last message, t->owner is 0. */
int mk_server_trace_next(mk_server_trace *t, mk_engine *e, uint64_t now, const void **fixed, const void **items, mk_err *err);
void mk_server_trace_end(mk_server_trace *t, mk_engine *e); /* also when none is under way */

#endif
