/* mkctl synth NAME: what a token of a full-size model costs, with synthetic weights: starts a daemon for the preset (or uses a running one), measures one pinned
 * stream, prints tokens, time and bytes a token, stops the daemon. */
#include "ipc/mkctl.h"
#include "ipc/mkctl_measure.h"

#include "host/preset.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* mkd stands beside this program, or in PATH. */
static void mkd_path(char *path, size_t size)
{
    ssize_t n = readlink("/proc/self/exe", path, size - 1);
    path[n > 0 ? n : 0] = 0;
    char *end = strrchr(path, '/');
    if (end) snprintf(end + 1, size - (size_t)(end + 1 - path), "mkd");
    if (!end || access(path, X_OK)) snprintf(path, size, "mkd");
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Starts mkd and waits for its ready line; *pid is to be stopped. What mkd has to say goes to stderr. */
static int start(const mk_preset *p, const char *dir, uint32_t context, const char *weights, uint32_t seconds, pid_t *pid, mk_err *err)
{
    char mkd[4096], ctx[16], line[512];
    int out[2];
    mkd_path(mkd, sizeof mkd);
    snprintf(ctx, sizeof ctx, "%u", context);
    if (pipe(out)) return mk_fail(err, MK_E_SYSTEM, "pipe: %s", strerror(errno));
    *pid = fork();
    if (*pid < 0) return mk_fail(err, MK_E_SYSTEM, "fork: %s", strerror(errno));
    if (*pid == 0) {
        dup2(out[1], 1);
        close(out[0]);
        close(out[1]);
        execlp(mkd, mkd, "--preset", p->name, "--socket-dir", dir, "--streams", "1", "--context", ctx, "--device", "gpu", "--log-level", "warn", "--weights", weights,
               (char *)NULL);
        fprintf(stderr, "mkctl synth: cannot run %s: %s\n", mkd, strerror(errno));
        _exit(127);
    }
    close(out[1]);
    size_t n = 0;
    double end = now() + seconds;
    int rc = MK_OK;
    for (;;) {
        struct pollfd f = {.fd = out[0], .events = POLLIN};
        double left = end - now();
        if (left <= 0) {
            rc = mk_fail(err, MK_E_TIMEOUT, "mkd was not ready after %u s", seconds);
            break;
        }
        if (poll(&f, 1, (int)(left * 1000) + 1) <= 0) continue;
        ssize_t got = read(out[0], line + n, sizeof line - 1 - n);
        if (got <= 0) { /* it has left, and has said why */
            int status = 0;
            waitpid(*pid, &status, 0);
            *pid = -1;
            rc = mk_fail(err, WIFEXITED(status) && WEXITSTATUS(status) != 127 && WEXITSTATUS(status) ? WEXITSTATUS(status) : MK_E_SYSTEM, "mkd did not start");
            break;
        }
        n += (size_t)got;
        line[n] = 0;
        if (strchr(line, '\n') || n == sizeof line - 1) break;
    }
    close(out[0]);
    return rc;
}

static void stop(pid_t pid)
{
    if (pid <= 0) return;
    kill(pid, SIGTERM);
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) {}
}

int mkctl_synth(int argc, char **argv)
{
    const char *dir = NULL, *name = NULL, *weights = "auto";
    uint32_t tokens = 1000, context = 2048, seconds = 120;
    uint64_t seed = 1;
    char help[256], own[] = "/tmp/mkctl synth XXXXXX";
    snprintf(help, sizeof help, "mkd's flag; auto: the preset's. NAME is one of %s", mk_preset_names());
    const mkctl_flag flag[] = {{"--tokens", MKCTL_U32, &tokens, "tokens to generate"},
                               {"--ctx", MKCTL_U32, &context, "context of each of them: the position is pinned"},
                               {"--weights", MKCTL_TEXT, &weights, help},
                               {"--seed", MKCTL_U64, &seed, "of the random token ids, and so of the experts' routes"},
                               {"--wait", MKCTL_U32, &seconds, "seconds that mkd may take to start"},
                               {"--socket-dir", MKCTL_TEXT, &dir, "use the daemon that runs there, whatever its model, instead of starting one"}};
    size_t n = 0;
    int rc = mkctl_flags(argc, argv, flag, sizeof flag / sizeof flag[0], &name, 1, &n);
    if (rc) return rc < 0 ? MK_OK : rc;
    const mk_preset *p = n ? mk_preset_find(name) : NULL;
    if (!n && !dir) return mkctl_usage("synth: expected a preset: %s", mk_preset_names());
    if (n && dir) return mkctl_usage("synth: a preset and --socket-dir exclude each other");
    if (n && !p) return mkctl_usage("synth: no preset \"%s\", there are %s", name, mk_preset_names());
    if (tokens < 2 || tokens > 10000000) return mkctl_usage("synth: --tokens: expected 2 to 10000000, found %u", tokens);
    if (!context || context > 1u << 27) return mkctl_usage("synth: --ctx: expected 1 to %u, found %u", 1u << 27, context);

    mk_err err = {0};
    mk_pinned q = {.context = context, .rows = 1, .steps = tokens, .seed = seed};
    mk_pinned_result r = {0};
    mk_measured m;
    mk_client *c = NULL;
    pid_t pid = -1;
    int made = 0;
    if (!dir) {
        dir = own;
        if (!(made = mkdtemp(own) != NULL)) rc = mk_fail(&err, MK_E_SYSTEM, "%s: %s", own, strerror(errno));
        if (!rc) rc = start(p, dir, mk_pinned_context(&q), weights, seconds, &pid, &err);
    }
    if (!rc && !(c = mk_client_new(dir, "mkctl synth", 5000, &err))) rc = err.code;
    if (!rc && !(rc = mk_measure_about(c, &m, &err)) && !(rc = mk_measure_pinned(c, &q, &r, &err))) {
        double sum = 0;
        for (uint32_t i = 0; i < tokens; i++) sum += r.step_ms[i];
        double p50 = mkctl_quantile(r.step_ms, tokens, 0.5), bytes = mk_bytes_step(&m.bytes, 1, context);
        printf("%s on %s, %s\n", mk_client_about(c)->model, mk_client_about(c)->device, m.dtype);
        printf("%u tokens at context %u: %.4f ms a token (p50; p99 %.4f, p99.9 %.4f), %.1f tok/s\n", tokens, context, p50, mkctl_quantile(r.step_ms, tokens, 0.99),
               mkctl_quantile(r.step_ms, tokens, 0.999), tokens / sum * 1e3);
        printf("%.1f MB a token (the program reads %.1f): %.0f GB/s", bytes / 1e6, ((double)m.program_bytes + (double)m.bytes.kv * context) / 1e6, bytes / p50 * 1e-6);
        if (m.ceiling_gb_s > 0) printf(", %.1f %% of the %.0f that this memory streams", bytes / p50 * 1e-4 / m.ceiling_gb_s, m.ceiling_gb_s);
        putchar('\n');
    }
    free(r.step_ms);
    mk_client_destroy(&c);
    stop(pid);
    if (made) rmdir(own);
    return rc ? mkctl_failed("synth", &err) : MK_OK;
}
