/* mkctl trace: what every worker did with its time in the next steps. Prints tables; --out writes a file for ui.perfetto.dev or chrome://tracing. */
#include "ipc/client.h"
#include "ipc/mkctl.h"
#include "ipc/trace_report.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static int write_file(const char *path, const mk_trace_report *r, const mk_client_info *what, mk_err *err)
{
    FILE *f = fopen(path, "w");
    if (!f) return mk_fail(err, MK_E_SYSTEM, "%s: %s", path, strerror(errno));
    int bad = mk_trace_write(r, what, f);
    bad |= fclose(f);
    return bad ? mk_fail(err, MK_E_SYSTEM, "%s: cannot be written: %s", path, strerror(errno)) : MK_OK;
}

int mkctl_trace(int argc, char **argv)
{
    const char *dir = mkctl_default_dir(), *out = NULL;
    uint32_t steps = 3;
    double seconds = 10;
    const mkctl_flag flag[] = {{"--socket-dir", MKCTL_TEXT, &dir, "the daemon's sockets"},
                               {"--steps", MKCTL_U32, &steps, "how many; something has to be generating meanwhile"},
                               {"--timeout", MKCTL_REAL, &seconds, "seconds within which they have to be run, at most 60"},
                               {"--out", MKCTL_TEXT, &out, "write the trace event file"},
                               {"-o", MKCTL_TEXT, &out, "the same"}};
    int rc = mkctl_flags(argc, argv, flag, sizeof flag / sizeof flag[0], NULL, 0, NULL);
    if (rc) return rc < 0 ? MK_OK : rc;
    if (!(seconds >= 0.001 && seconds <= MK_WIRE_TRACE_MS / 1000)) return mkctl_usage("trace: --timeout: expected 0.001 to %u, found %g", MK_WIRE_TRACE_MS / 1000, seconds);
    mk_err err = {0};
    mk_client_trace *t = NULL;
    mk_trace_report *r = NULL;
    mk_client *c = mk_client_new(dir, "mkctl trace", 5000, &err);
    rc = c ? mk_client_traced(c, steps, (int)(seconds * 1000), &t, &err) : err.code;
    if (!rc) rc = mk_trace_report_new(t, &r, &err);
    if (!rc) {
        const mk_client_info *a = mk_client_about(c);
        printf("%s, %s on %s: steps %u to %u, %u instructions each, %u workers\n\n", a->build, a->model, a->device, t->about.first_step,
               t->about.first_step + t->about.steps - 1, t->about.instructions, t->about.workers);
        mk_trace_print(r, stdout);
        if (out && !(rc = write_file(out, r, a, &err))) printf("\nwritten to %s: open it in ui.perfetto.dev\n", out);
    }
    mk_trace_report_free(&r);
    mk_client_trace_free(&t);
    mk_client_destroy(&c);
    return rc ? mkctl_failed("trace", &err) : MK_OK;
}
