/* Flags, the configuration file, the instance lock, readiness datagrams. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "host/lock.h"
#include "host/log.h"
#include "host/model.h"
#include "host/notify.h"
#include "host/options.h"
#include "host/version.h"

static mk_options o;
static mk_err err;
static char dir[] = "/tmp/mkd options XXXXXX"; /* with spaces */

static int make_dir(void **state)
{
    (void)state;
    return mkdtemp(dir) ? 0 : -1;
}

static int remove_dir(void **state)
{
    (void)state;
    char cmd[128];
    snprintf(cmd, sizeof cmd, "rm -rf '%s'", dir);
    return system(cmd);
}

static int parse(const char *const *flag)
{
    char *argv[32] = {(char *)(uintptr_t) "mkd"};
    int argc = 1;
    while (flag[argc - 1]) {
        argv[argc] = (char *)(uintptr_t)flag[argc - 1];
        argc++;
    }
    return mk_options_parse(&o, argc, argv, &err);
}
#define PARSE(...) parse((const char *const[]){__VA_ARGS__, NULL})

static const char *file(const char *text)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/mkd.conf", dir);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
    return path;
}

static void assert_refused(int rc, const char *part)
{
    assert_int_equal(rc, MK_E_USAGE);
    assert_int_equal(err.code, MK_E_USAGE);
    if (!strstr(err.msg, part)) fail_msg("message is \"%s\", expected \"%s\" in it", err.msg, part);
    assert_null(strchr(err.msg, '\n'));
}

static void test_defaults(void **state)
{
    (void)state;
    setenv("XDG_RUNTIME_DIR", "/run/user/7", 1);
    assert_int_equal(PARSE("--model", "/m"), MK_OK);
    assert_int_equal(o.mode, MK_MODE_RUN);
    assert_string_equal(o.model, "/m");
    assert_string_equal(o.socket_dir, "/run/user/7/mkd");
    assert_int_equal(o.streams, 8);
    assert_int_equal(o.workers, 0);
    assert_int_equal(o.weights, MK_WEIGHTS_AUTO);
    assert_int_equal(o.device, MK_DEVICE_AUTO);
    assert_int_equal(o.log_level, MK_LOG_INFO);
    assert_true(o.drain_seconds == 30.0);
    unsetenv("XDG_RUNTIME_DIR");
    assert_int_equal(PARSE("--model=/m"), MK_OK);
    assert_string_equal(o.socket_dir, "/run/mkd");
}

static void test_flags(void **state)
{
    (void)state;
    assert_int_equal(PARSE("--model", "/a b/c", "--streams=3", "--context", "4096", "--kv-tokens", "100000", "--memory", "12G", "--weights",
                           "fp8", "--act", "f32", "--device", "cpu", "--workers", "16", "--log-level", "debug", "--log-time", "yes",
                           "--drain-seconds", "2.5", "--socket-dir", "/tmp/x y", "--check"),
                     MK_OK);
    assert_string_equal(o.model, "/a b/c");
    assert_string_equal(o.socket_dir, "/tmp/x y");
    assert_int_equal(o.streams, 3);
    assert_int_equal(o.context, 4096);
    assert_int_equal(o.kv_tokens, 100000);
    assert_int_equal(o.memory, 12ull << 30);
    assert_int_equal(o.weights, MK_WEIGHTS_FP8);
    assert_int_equal(o.act, 1);
    assert_int_equal(o.device, MK_DEVICE_CPU);
    assert_int_equal(o.workers, 16);
    assert_int_equal(o.log_level, MK_LOG_DEBUG);
    assert_int_equal(o.log_time, 1);
    assert_true(o.drain_seconds == 2.5);
    assert_int_equal(o.mode, MK_MODE_CHECK);
    assert_int_equal(PARSE("--version"), MK_OK);
    assert_int_equal(o.mode, MK_MODE_VERSION);
    assert_int_equal(PARSE("--help"), MK_OK);
    assert_int_equal(o.mode, MK_MODE_HELP);
    static const struct {
        const char *text;
        uint64_t bytes;
    } size[] = {{"0", 0}, {"1000", 1000}, {"1k", 1024}, {"3MB", 3 << 20}, {"2t", 2ull << 40}};
    for (size_t i = 0; i < sizeof size / sizeof size[0]; i++) {
        assert_int_equal(PARSE("--model", "m", "--memory", size[i].text), MK_OK);
        assert_int_equal(o.memory, size[i].bytes);
    }
}

static void test_bad_flags(void **state)
{
    (void)state;
    assert_refused(PARSE("--check"), "no model");
    assert_refused(PARSE("--modle", "x"), "unknown flag \"--modle\"");
    assert_refused(PARSE("--mode", "x"), "unknown flag");
    assert_refused(PARSE("model"), "unexpected argument \"model\"");
    assert_refused(PARSE("-h"), "unexpected argument");
    assert_refused(PARSE("--"), "unexpected argument");
    assert_refused(PARSE("--model"), "--model: expected DIR");
    assert_refused(PARSE("--model", ""), "--model: expected a path");
    assert_refused(PARSE("--check=1", "--model", "m"), "--check takes no value");
    assert_refused(PARSE("--check", "--print-config", "--model", "m"), "another action");
    assert_refused(PARSE("--model", "m", "--device", "gpu", "--act", "f32"), "--act f32");
    assert_refused(PARSE("--model", "m", "--device", "gpu", "--workers", "8"), "--workers");
    assert_refused(PARSE("--model", "m", "--unloaded", "yes"), "--unloaded yes: expected --preset or --synthetic yes");
    static const char *const bad[][3] = {
        {"--streams", "0", "expected 1 to 1024, found 0"},
        {"--streams", "1025", "expected 1 to 1024"},
        {"--streams", "-1", "expected a number, found \"-1\""},
        {"--streams", "4x", "expected a number, found \"4x\""},
        {"--streams", "", "expected a number"},
        {"--streams", "99999999999999999999999", "expected a number"},
        {"--context", "1e3", "expected a number"},
        {"--memory", "4Q", "K, M, G or T"},
        {"--memory", "99999999T", "expected 0 to"},
        {"--weights", "int4", "expected one of auto, fp8, bf16, found \"int4\""},
        {"--act", "F32", "expected one of bf16, f32"},
        {"--device", "tpu", "expected one of auto, cpu, gpu"},
        {"--log-level", "loud", "error, warn, info, debug"},
        {"--drain-seconds", "soon", "expected seconds"},
        {"--drain-seconds", "nan", "expected seconds"},
        {"--drain-seconds", "-1", "expected seconds, 0 to 86400"},
        {"--config", "/does/not/exist", "cannot read the configuration file /does/not/exist"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) assert_refused(PARSE("--model", "m", bad[i][0], bad[i][1]), bad[i][2]);
}

static void test_config_file(void **state)
{
    (void)state;
    const char *path = file("# a comment\n\n  model = /data/some model  \nstreams=4\nlog-level = warn\ncontext\t=\t512");
    assert_int_equal(PARSE("--config", path, "--streams", "2"), MK_OK);
    assert_string_equal(o.model, "/data/some model");
    assert_int_equal(o.streams, 2); /* flags win, wherever they stand */
    assert_int_equal(PARSE("--streams", "2", "--config", path), MK_OK);
    assert_int_equal(o.streams, 2);
    assert_int_equal(o.context, 512);
    assert_int_equal(o.log_level, MK_LOG_WARN);

    assert_refused(PARSE("--config", file("model = m\nstream = 4\n")), "mkd.conf:2: unknown key \"stream\"");
    assert_refused(PARSE("--config", file("model = m\n\nstreams = many\n")), "mkd.conf:3: streams: expected a number, found \"many\"");
    assert_refused(PARSE("--config", file("model m\n")), "mkd.conf:1: expected `key = value`");
    assert_refused(PARSE("--config", file("model =\n")), "mkd.conf:1: model: expected a path");
    assert_refused(PARSE("--config", file("streams = 1\nstreams = 2\n")), "mkd.conf:2: streams was set in line 1 already");
    assert_refused(PARSE("--config", file("check = yes\n")), "mkd.conf:1: check is a flag");
    assert_refused(PARSE("--config", file("config = x\n")), "mkd.conf:1: config is a flag");
    assert_refused(PARSE("--config", dir), "cannot read the configuration file");
}

/* Nothing that is computed without weights is right: no self-test, and weights that are nobody's. */
static void test_unloaded(void **state)
{
    (void)state;
    assert_int_equal(PARSE("--preset", "kimi-linear-48b", "--unloaded", "yes"), MK_OK);
    assert_true(o.unloaded && o.synthetic && !o.self_test);
    assert_int_equal(PARSE("--preset", "kimi-linear-48b"), MK_OK);
    assert_true(!o.unloaded && o.self_test);
}

/* What --print-config says of o; the caller frees it. */
static char *printed(void)
{
    char *text = NULL;
    size_t n;
    FILE *f = open_memstream(&text, &n);
    mk_options_print(&o, f);
    fclose(f);
    return text;
}

/* What follows from another option says so, and is not to be contradicted. */
static void test_implied(void **state)
{
    (void)state;
    assert_int_equal(PARSE("--preset", "kimi-linear-48b", "--unloaded", "yes", "--synthetic", "yes", "--print-config"), MK_OK);
    char *text = printed();
    assert_non_null(strstr(text, "# --preset\nweights = fp8\n"));
    assert_non_null(strstr(text, "# flag\nsynthetic = yes\n"));
    assert_non_null(strstr(text, "# --preset\nbench = yes\n"));
    assert_non_null(strstr(text, "# --unloaded\nself-test = no\n"));
    free(text);
    assert_int_equal(PARSE("--preset", "kimi-linear-48b", "--weights", "bf16", "--self-test", "no"), MK_OK);
    assert_int_equal(o.weights, MK_WEIGHTS_BF16);
    assert_refused(PARSE("--preset", "kimi-linear-48b", "--bench", "no"), "bench (flag): --preset implies the other value");
    assert_refused(PARSE("--config", file("synthetic = no\n"), "--preset", "kimi-linear-48b"), "synthetic (mkd.conf:1): --preset implies the other value");
    assert_refused(PARSE("--preset", "kimi-linear-48b", "--unloaded", "yes", "--self-test", "yes"), "self-test (flag): --unloaded implies the other value");
}

/* What --print-config says, --config reads back to the same. */
static void test_print_round_trip(void **state)
{
    (void)state;
    assert_int_equal(PARSE("--model", "/a b", "--memory", "7G", "--weights", "bf16", "--drain-seconds", "0.25", "--log-time", "yes",
                           "--kv-tokens", "12345678901", "--print-config"),
                     MK_OK);
    mk_options first = o;
    char *text = printed();
    assert_non_null(strstr(text, "memory = 7516192768\n"));
    assert_non_null(strstr(text, "# flag\nweights = bf16\n"));
    assert_non_null(strstr(text, "# default\nstreams = 8\n"));
    assert_int_equal(PARSE("--config", file(text)), MK_OK);
    assert_string_equal(o.model, first.model);
    assert_int_equal(o.kv_tokens, first.kv_tokens);
    assert_true(o.drain_seconds == first.drain_seconds);
    char *again = printed();
    assert_non_null(strstr(again, "# mkd.conf:"));
    /* the values are the same; the comments say where they come from */
    char *a, *b, *la = strtok_r(text, "\n", &a), *lb = strtok_r(again, "\n", &b);
    for (; la && lb; la = strtok_r(NULL, "\n", &a), lb = strtok_r(NULL, "\n", &b))
        if (la[0] != '#') assert_string_equal(la, lb);
    assert_null(la);
    assert_null(lb);
    free(text);
    free(again);
}

static void test_help_names_everything(void **state)
{
    (void)state;
    static const char *const flag[] = {"model", "socket-dir", "workers", "streams", "context", "kv-tokens", "memory", "weights", "act",
                                       "device", "config", "print-config", "check", "log-level", "drain-seconds", "version", "help"};
    char *text = NULL;
    size_t n;
    FILE *f = open_memstream(&text, &n);
    mk_options_help(f);
    fclose(f);
    for (size_t i = 0; i < sizeof flag / sizeof flag[0]; i++) {
        char want[32];
        snprintf(want, sizeof want, "\n  --%s ", flag[i]);
        if (!strstr(text, want)) fail_msg("--help says nothing of --%s", flag[i]);
    }
    free(text);
    assert_true(strncmp(mk_build(), "mkd " MK_VERSION " (", 8) == 0);
}

static void test_lock(void **state)
{
    (void)state;
    char sub[64];
    snprintf(sub, sizeof sub, "%s/run", dir);
    mk_lock *a, *b;
    assert_int_equal(mk_lock_take(sub, &a, &err), MK_OK); /* makes the directory */
    struct stat st;
    assert_int_equal(stat(sub, &st), 0);
    assert_int_equal(st.st_mode & 0777 & ~0750u, 0);
    assert_int_equal(mk_lock_take(sub, &b, &err), MK_E_RUNNING);
    assert_null(b);
    char pid[32];
    snprintf(pid, sizeof pid, "(pid %ld)", (long)getpid());
    assert_non_null(strstr(err.msg, pid));
    mk_lock_release(&a);
    assert_null(a);
    mk_lock_release(&a);
    assert_int_equal(mk_lock_take(sub, &b, &err), MK_OK);
    mk_lock_release(&b);
    /* a holder that dies leaves nothing behind */
    pid_t child = fork();
    if (child == 0) _exit(mk_lock_take(sub, &a, NULL));
    int status;
    waitpid(child, &status, 0);
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_int_equal(mk_lock_take(sub, &a, &err), MK_OK);
    mk_lock_release(&a);
    snprintf(sub, sizeof sub, "%s/no/such", dir);
    assert_int_equal(mk_lock_take(sub, &a, &err), MK_E_SYSTEM);
    file("");
    snprintf(sub, sizeof sub, "%s/mkd.conf", dir);
    assert_int_equal(mk_lock_take(sub, &a, &err), MK_E_SYSTEM);
    assert_non_null(strstr(err.msg, "not a directory"));
}

static void receives(int fd, const char *want)
{
    char buf[64] = "";
    mk_notify(want);
    assert_int_equal(recv(fd, buf, sizeof buf - 1, MSG_DONTWAIT), strlen(want));
    assert_string_equal(buf, want);
}

static void test_notify(void **state)
{
    (void)state;
    unsetenv("NOTIFY_SOCKET");
    assert_int_equal(mk_notify_open(&err), MK_OK);
    mk_notify("READY=1"); /* nobody */
    for (int abstract = 0; abstract < 2; abstract++) {
        struct sockaddr_un a = {.sun_family = AF_UNIX};
        char name[90];
        if (abstract)
            snprintf(name, sizeof name, "@mkd-test-%ld", (long)getpid());
        else
            snprintf(name, sizeof name, "%s/notify", dir);
        strcpy(a.sun_path, name);
        if (abstract) a.sun_path[0] = 0;
        int fd = socket(AF_UNIX, SOCK_DGRAM, 0);
        socklen_t len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(name) + !abstract);
        assert_int_equal(bind(fd, (struct sockaddr *)&a, len), 0);
        setenv("NOTIFY_SOCKET", name, 1);
        assert_int_equal(mk_notify_open(&err), MK_OK);
        receives(fd, "READY=1");
        receives(fd, "STOPPING=1");
        close(fd);
        mk_notify("READY=1"); /* nobody listens any more */
        mk_notify_close();
    }
    char longer[300];
    memset(longer, 'x', sizeof longer - 1);
    longer[0] = '/';
    longer[sizeof longer - 1] = 0;
    setenv("NOTIFY_SOCKET", longer, 1);
    assert_int_equal(mk_notify_open(&err), MK_E_SYSTEM);
    setenv("NOTIFY_SOCKET", "relative", 1);
    assert_int_equal(mk_notify_open(&err), MK_E_SYSTEM);
    unsetenv("NOTIFY_SOCKET");
}

/* One line a message, whatever is in it. */
static void test_log(void **state)
{
    (void)state;
    int p[2], keep = dup(STDERR_FILENO);
    assert_int_equal(pipe(p), 0);
    dup2(p[1], STDERR_FILENO);
    char big[4000], buf[8192] = "";
    memset(big, 'b', sizeof big - 1);
    big[sizeof big - 1] = 0;
    mk_log_init(MK_LOG_WARN, 0);
    mk_log(MK_LOG_INFO, "not shown");
    mk_log(MK_LOG_WARN, "two\nlines and %s", "a\ttab");
    mk_log(MK_LOG_ERROR, "%s", big);
    mk_log_init(MK_LOG_INFO, 1);
    mk_log(MK_LOG_INFO, "stamped");
    dup2(keep, STDERR_FILENO);
    close(keep);
    close(p[1]);
    ssize_t n = read(p[0], buf, sizeof buf - 1);
    close(p[0]);
    assert_true(n > 0);
    mk_log_init(MK_LOG_INFO, 0);
    int lines = 0;
    for (ssize_t i = 0; i < n; i++) lines += buf[i] == '\n';
    assert_int_equal(lines, 3);
    assert_true(strncmp(buf, "mkd: warning: two lines and a tab\nmkd: error: bbb", 48) == 0);
    assert_non_null(strstr(buf, " mkd: info: stamped\n"));
    assert_true(n < 2200);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),    cmocka_unit_test(test_flags),
        cmocka_unit_test(test_bad_flags),   cmocka_unit_test(test_config_file),
        cmocka_unit_test(test_unloaded), cmocka_unit_test(test_implied), cmocka_unit_test(test_print_round_trip), cmocka_unit_test(test_help_names_everything),
        cmocka_unit_test(test_lock),        cmocka_unit_test(test_notify),
        cmocka_unit_test(test_log),
    };
    return cmocka_run_group_tests_name("options", tests, make_dir, remove_dir);
}
