#include "host/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static enum mk_log_level log_level = MK_LOG_INFO;
static int log_time;

void mk_log_init(enum mk_log_level level, int time)
{
    log_level = level;
    log_time = time;
}

enum mk_log_level mk_log_level_now(void)
{
    return log_level;
}

void mk_log(enum mk_log_level level, const char *fmt, ...)
{
    static const char *const name[] = {"error", "warning", "info", "debug"};
    if (level > log_level) return;
    char line[2048];
    size_t n = 0;
    if (log_time) {
        struct timespec now;
        struct tm tm;
        clock_gettime(CLOCK_REALTIME, &now);
        localtime_r(&now.tv_sec, &tm);
        n = strftime(line, sizeof line, "%Y-%m-%dT%H:%M:%S", &tm);
        n += (size_t)snprintf(line + n, sizeof line - n, ".%03d ", (int)(now.tv_nsec / 1000000));
    }
    n += (size_t)snprintf(line + n, sizeof line - n, "mkd: %s: ", name[level]);
    va_list ap;
    va_start(ap, fmt);
    int m = vsnprintf(line + n, 2000 - n, fmt, ap);
    va_end(ap);
    if (m < 0) return;
    n += strnlen(line + n, 2000 - n);
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f) line[i] = ' ';
    line[n++] = '\n';
    for (size_t done = 0; done < n;) {
        ssize_t w = write(STDERR_FILENO, line + done, n - done);
        if (w <= 0) return; /* nobody reads stderr: nothing better to do */
        done += (size_t)w;
    }
}
