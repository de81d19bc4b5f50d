#include "host/recover.h"

#include "host/log.h"

#include <stdio.h>
#include <time.h>
#include <unistd.h>

uint64_t mk_now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

void mk_recovery_init(mk_recovery *r, const char *flight_dir)
{
    *r = (mk_recovery){0};
    snprintf(r->flight_dir, sizeof r->flight_dir, "%s", flight_dir && flight_dir[0] ? flight_dir : ".");
}

void mk_recovery_note(mk_recovery *r, const mk_snapshot *s, const char *device, const char *gone)
{
    mk_err err = {0};
    char path[PATH_MAX + 64], found[512] = "", text[1024];
    if (s->live || s->kernel[0])
        mk_snapshot_text(s, found, sizeof found);
    else if (!gone)
        snprintf(found, sizeof found, "the kernel left without a word");
    snprintf(text, sizeof text, "%.400s%s%s", gone ? gone : "", gone && *found ? "; before that: " : "", found);
    if (mk_flight_write(s, r->flight_dir, device, text, path, sizeof path, &err)) snprintf(path, sizeof path, "(none: %.300s)", err.msg);
    uint64_t *oldest = &r->hang_ms[r->hangs++ % MK_RECOVER_MAX], t = mk_now_ms();
    int again = *oldest && t - *oldest < MK_RECOVER_MS; /* it is MK_RECOVER_MAX hangs ago */
    *oldest = t;
    if (gone || again) {
        mk_log(MK_LOG_ERROR, "%s lost: %s%s; flight record %s", device, again ? "it hangs again and again: " : "", text, path);
        _exit(MK_E_DEVICE);
    }
    mk_log(MK_LOG_ERROR, "%s: %s; flight record %s", device, text, path);
}

void mk_recovery_done(const char *device, uint64_t since_ms)
{
    mk_log(MK_LOG_WARN, "%s: launched again in %llu ms: running requests failed, streams are rebuilt from their tokens", device,
           (unsigned long long)(mk_now_ms() - since_ms));
}
