/* The daemon: options -> lock -> engine -> streams -> server. Everything that can be refused is refused before the ready line. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "host/engine.h"
#include "host/lock.h"
#include "host/log.h"
#include "host/machine.h"
#include "host/notify.h"
#include "host/options.h"
#include "host/preset.h"
#include "host/streams.h"
#include "host/version.h"
#include "ipc/server.h"

static mk_server *server; /* set before the handlers are installed, cleared after they are gone */
static double drain_seconds;
static volatile sig_atomic_t stops;

/* First: drain. Second: cancel what runs. Third: the engine does not answer, leave. */
static void on_stop(int sig)
{
    (void)sig;
    int e = errno;
    stops++;
    if (stops == 1) {
        mk_notify("STOPPING=1");
        mk_server_drain(server, drain_seconds);
    } else if (stops == 2) {
        mk_server_abort(server);
    } else {
        _exit(MK_E_TIMEOUT);
    }
    errno = e;
}

static void set_handlers(void (*f)(int))
{
    struct sigaction a = {.sa_handler = f, .sa_flags = SA_RESTART};
    sigemptyset(&a.sa_mask);
    sigaddset(&a.sa_mask, SIGTERM);
    sigaddset(&a.sa_mask, SIGINT);
    sigaction(SIGTERM, &a, NULL);
    sigaction(SIGINT, &a, NULL);
}

static void server_log(void *arg, enum mk_server_level level, const char *line)
{
    (void)arg;
    mk_log(level == MK_SERVER_WARN ? MK_LOG_WARN : level == MK_SERVER_INFO ? MK_LOG_INFO : MK_LOG_DEBUG, "%s", line);
}

/* 1: GPU, 0: twin. auto takes the twin where no GPU can be used and says why. */
static int choose_device(const mk_options *o, int *gpu, mk_err *err)
{
    mk_machine_limits l;
    mk_err why = {0};
    *gpu = 0;
    if (o->device == MK_DEVICE_CPU || (o->device == MK_DEVICE_AUTO && (o->act || o->workers))) return MK_OK;
    *gpu = mk_machine_gpu_limits(&l, &why) == MK_OK;
    if (*gpu) return MK_OK;
    if (o->device == MK_DEVICE_GPU) return mk_fail(err, MK_E_DEVICE, "%s; --device cpu uses the CPU twin", why.msg);
    mk_log(MK_LOG_INFO, "%s: using the CPU twin", why.msg);
    return MK_OK;
}

/* "/a/kimi/" -> "kimi" */
static void model_name(const char *path, char *name, size_t size)
{
    size_t end = strlen(path);
    while (end > 1 && path[end - 1] == '/') end--;
    size_t begin = end;
    while (begin > 0 && path[begin - 1] != '/') begin--;
    snprintf(name, size, "%.*s", (int)(end - begin), path + begin);
}

static int serve(const mk_options *o, mk_engine *e, const char *name, mk_err *err)
{
    mk_streams *s = mk_streams_new(e);
    if (!s) return mk_fail(err, MK_E_SYSTEM, "out of memory");
    mk_server_config cfg = {.dir = o->socket_dir, .build = mk_build(), .model = name, .pin = (int)o->bench, .log = server_log};
    mk_server *v = mk_server_new(&cfg, e, s, err);
    int rc = v ? mk_engine_start(e, err) : err->code;
    if (rc == MK_OK) {
        drain_seconds = o->drain_seconds;
        server = v;
        set_handlers(on_stop);
        printf("mkd ready: %s/req.sock model %s device %s streams %u context %u\n", o->socket_dir, name, mk_engine_device(e),
               mk_engine_slots(e), mk_engine_context(e));
        fflush(stdout);
        mk_notify("READY=1");
        rc = mk_server_run(v, err);
        if (stops) mk_log(MK_LOG_INFO, "stopped %s", rc == MK_OK ? "in order" : "with requests running");
        set_handlers(SIG_IGN); /* what is left takes a second at most */
        server = NULL;
    }
    mk_server_destroy(&v);
    mk_streams_destroy(&s);
    return rc;
}

static int run(const mk_options *o, mk_err *err)
{
    int gpu, rc = choose_device(o, &gpu, err);
    if (rc) return rc;
    if (o->flight_dir[0] && access(o->flight_dir, W_OK | X_OK))
        return mk_fail(err, MK_E_SYSTEM, "--flight-dir: cannot write to %.300s: %s", o->flight_dir, strerror(errno));
    mk_lock *lock = NULL;
    if (o->mode == MK_MODE_RUN) {
        mk_err notify;
        if (mk_notify_open(&notify)) mk_log(MK_LOG_WARN, "%s", notify.msg);
        rc = mk_lock_take(o->socket_dir, &lock, err);
        if (rc) return rc;
    }
    mk_engine_config cfg = {.dir = o->model,
                            .preset = o->preset[0] ? mk_preset_find(o->preset) : NULL,
                            .gpu = gpu,
                            .synthetic = (int)o->synthetic,
                            .self_test = (int)o->self_test,
                            .unloaded = (int)o->unloaded,
                            .workers = o->workers,
                            .streams = o->streams,
                            .context = o->context,
                            .kv_tokens = o->kv_tokens,
                            .memory = o->memory,
                            .weights = (enum mk_weights_mode)o->weights,
                            .lm_head = (enum mk_lm_head_mode)o->lm_head,
                            .kv_cache = (enum mk_cache)o->kv_cache,
                            .act_f32 = (int)o->act,
                            .flight_dir = o->flight_dir[0] ? o->flight_dir : o->socket_dir};
    mk_engine *e = NULL;
    rc = mk_engine_open(&cfg, &e, err);
    if (rc == MK_OK) {
        char base[256], name[sizeof base + 64];
        model_name(o->preset[0] ? o->preset : o->model, base, sizeof base);
        snprintf(name, sizeof name, "%s%s%s%s", base, o->preset[0] && o->lm_head == MK_LM_HEAD_FP8 ? "-lm_head-fp8" : "", /* benchmarks name their files after it */
                 o->preset[0] && o->kv_cache == MK_CACHE_FP8 ? "-cache-fp8" : "", o->unloaded ? "-unloaded" : "");
        const mk_model *m = mk_engine_model(e);
        for (uint32_t i = 0; i < m->n_skipped; i++)
            if (m->skipped_tensors[i]) mk_log(MK_LOG_INFO, "not used: %u tensors %s*", m->skipped_tensors[i], m->skipped[i]);
        if (o->mode == MK_MODE_CHECK)
            printf("mkd check: ok: model %s device %s streams %u context %u pages %u\n", name, mk_engine_device(e), mk_engine_slots(e),
                   mk_engine_context(e), mk_engine_pages(e));
        else
            rc = serve(o, e, name, err);
    }
    mk_engine_close(&e);
    mk_lock_release(&lock);
    mk_notify_close();
    return rc;
}

int main(int argc, char **argv)
{
    static mk_options o;
    mk_err err = {0};
    int rc = mk_options_parse(&o, argc, argv, &err);
    if (rc) {
        mk_log(MK_LOG_ERROR, "%s", err.msg);
        return rc;
    }
    mk_log_init((enum mk_log_level)o.log_level, (int)o.log_time);
    switch (o.mode) {
    case MK_MODE_HELP: mk_options_help(stdout); return 0;
    case MK_MODE_VERSION: puts(mk_build()); return 0;
    case MK_MODE_PRINT_CONFIG: mk_options_print(&o, stdout); return 0;
    default: break;
    }
    signal(SIGPIPE, SIG_IGN);
    struct rlimit files; /* a connection takes one, and libzmq ends the process when there are none left */
    if (!getrlimit(RLIMIT_NOFILE, &files) && files.rlim_cur < files.rlim_max) {
        files.rlim_cur = files.rlim_max;
        if (setrlimit(RLIMIT_NOFILE, &files)) mk_log(MK_LOG_WARN, "open files: the limit stays as it is: %s", strerror(errno));
    }
    rc = run(&o, &err);
    if (rc) mk_log(MK_LOG_ERROR, "%s", err.msg);
    return rc;
}
