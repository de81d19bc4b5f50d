#include "host/err.h"

#include <stdarg.h>
#include <stdio.h>

int mk_fail(mk_err *err, int code, const char *fmt, ...)
{
    if (err) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(err->msg, sizeof err->msg, fmt, ap);
        va_end(ap);
        err->code = code;
    }
    return code;
}

int mk_err_prefix(mk_err *err, const char *fmt, ...)
{
    if (!err) return MK_E_BUG;
    char old[sizeof err->msg], prefix[sizeof err->msg];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(prefix, sizeof prefix, fmt, ap);
    va_end(ap);
    snprintf(old, sizeof old, "%s", err->msg);
    snprintf(err->msg, sizeof err->msg, "%.200s: %.300s", prefix, old);
    return err->code;
}
