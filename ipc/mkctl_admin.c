/* mkctl stats, mkctl ping, mkctl inject. */
#include "ipc/client.h"
#include "ipc/mkctl.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <zmq.h>

/* Prints the next n statistics that the daemon publishes, a line each. */
static int follow(const char *dir, uint32_t n, mk_err *err)
{
    char url[256];
    if (snprintf(url, sizeof url, "ipc://%s/stats.sock", dir) >= (int)sizeof url)
        return mk_fail(err, MK_E_USAGE, "%s: too long for a socket", dir);
    void *z = zmq_ctx_new(), *sub = z ? zmq_socket(z, ZMQ_SUB) : NULL;
    int64_t cut = MK_WIRE_CUT;
    int linger = 0, wait = 5000, rc = MK_OK;
    if (!sub || zmq_setsockopt(sub, ZMQ_LINGER, &linger, sizeof linger) || zmq_setsockopt(sub, ZMQ_RCVTIMEO, &wait, sizeof wait) ||
        zmq_setsockopt(sub, ZMQ_MAXMSGSIZE, &cut, sizeof cut) || zmq_setsockopt(sub, ZMQ_SUBSCRIBE, "", 0) || zmq_connect(sub, url))
        rc = mk_fail(err, MK_E_SYSTEM, "%s: %s", url, zmq_strerror(errno));
    for (uint32_t i = 0; i < n && !rc; i++) {
        zmq_msg_t m;
        zmq_msg_init(&m);
        int got = zmq_msg_recv(&m, sub, 0);
        if (got >= 0) {
            json_t *j = json_loadb(zmq_msg_data(&m), (size_t)got, 0, NULL);
            if (j)
                printf("%.*s\n", got, (const char *)zmq_msg_data(&m));
            else
                rc = mk_fail(err, MK_E_WIRE, "%s: expected JSON, found something else", url);
            json_decref(j);
            fflush(stdout);
        } else {
            rc = mk_fail(err, errno == EAGAIN ? MK_E_TIMEOUT : MK_E_SYSTEM, "%s: nothing published within 5 s", url);
        }
        zmq_msg_close(&m);
    }
    if (sub) zmq_close(sub);
    if (z) zmq_ctx_term(z);
    return rc;
}

int mkctl_stats(int argc, char **argv)
{
    const char *dir = mkctl_default_dir();
    uint32_t n = 0;
    const mkctl_flag flag[] = {{"--socket-dir", MKCTL_TEXT, &dir, "the daemon's sockets"},
                               {"--follow", MKCTL_U32, &n, "print N published statistics, one a second, instead"}};
    int rc = mkctl_flags(argc, argv, flag, 2, NULL, 0, NULL);
    if (rc) return rc < 0 ? MK_OK : rc;
    mk_err err = {0};
    mk_client *c = mk_client_new(dir, "mkctl stats", 5000, &err);
    if (!c) return mkctl_failed("stats", &err);
    char *text = NULL;
    if (n) {
        rc = follow(dir, n, &err);
    } else if (!(rc = mk_client_stats(c, &text, 5000, &err))) {
        json_t *j = json_loads(text, 0, NULL);
        if (j) {
            json_dumpf(j, stdout, JSON_INDENT(2) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(9));
            putchar('\n');
            json_decref(j);
        } else {
            rc = mk_fail(&err, MK_E_WIRE, "STATISTICS: expected JSON, found something else");
        }
    }
    free(text);
    mk_client_destroy(&c);
    return rc ? mkctl_failed("stats", &err) : MK_OK;
}

int mkctl_ping(int argc, char **argv)
{
    const char *dir = mkctl_default_dir();
    uint32_t n = 1;
    const mkctl_flag flag[] = {{"--socket-dir", MKCTL_TEXT, &dir, "the daemon's sockets"}, {"--count", MKCTL_U32, &n, "round trips"}};
    int rc = mkctl_flags(argc, argv, flag, 2, NULL, 0, NULL);
    if (rc) return rc < 0 ? MK_OK : rc;
    if (!n || n > 1000000) return mkctl_usage("ping: --count: expected 1 to 1000000, found %u", n);
    mk_err err = {0};
    double *us = calloc(n, sizeof *us);
    mk_client *c = us ? mk_client_new(dir, "mkctl ping", 5000, &err) : NULL;
    if (!us) rc = mk_fail(&err, MK_E_SYSTEM, "out of memory");
    if (us && !c) rc = err.code;
    for (uint32_t i = 0; i < n && !rc; i++) {
        uint64_t ns = 0;
        rc = mk_client_ping(c, &ns, 5000, &err);
        us[i] = (double)ns * 1e-3;
    }
    if (!rc) {
        const mk_client_info *a = mk_client_about(c);
        double p50 = mkctl_quantile(us, n, 0.5);
        printf("%s, %s on %s: %u round trips, p50 %.1f us, p99 %.1f us, longest %.1f us\n", a->build, a->model, a->device, n, p50,
               mkctl_quantile(us, n, 0.99), us[n - 1]);
    }
    mk_client_destroy(&c);
    free(us);
    return rc ? mkctl_failed("ping", &err) : MK_OK;
}

int mkctl_inject(int argc, char **argv)
{
    const char *dir = mkctl_default_dir(), *what = NULL;
    size_t n = 0;
    mk_wire_inject body = {.what = MK_WIRE_INJECT_HANG};
    const mkctl_flag flag[] = {{"--socket-dir", MKCTL_TEXT, &dir, "the daemon's sockets"},
                               {"--worker", MKCTL_U32, &body.worker, "hang: who stops"},
                               {"--instruction", MKCTL_U32, &body.instruction, "hang: before which instruction of its queue"},
                               {"--after", MKCTL_U32, &body.after, "hang: in which step, counted from the next one"}};
    int rc = mkctl_flags(argc, argv, flag, 4, &what, 1, &n);
    if (rc) return rc < 0 ? MK_OK : rc;
    if (n && !strcmp(what, "idle"))
        body.what = MK_WIRE_INJECT_IDLE;
    else if (n && !strcmp(what, "error"))
        body.what = MK_WIRE_INJECT_ERROR;
    else if (!n || strcmp(what, "hang"))
        return mkctl_usage("inject: expected \"hang\" (a worker stops), \"idle\" (SCHEDULE stops looking for work) or \"error\" (the GPU is lost), found \"%s\"", n ? what : "");
    mk_err err = {0};
    uint32_t steps = 0;
    mk_client *c = mk_client_new(dir, "mkctl inject", 5000, &err);
    if (!c) return mkctl_failed("inject", &err);
    rc = mk_client_inject(c, &body, &steps, 5000, &err);
    if (!rc) printf("injected after %u steps\n", steps);
    mk_client_destroy(&c);
    return rc ? mkctl_failed("inject", &err) : MK_OK;
}
