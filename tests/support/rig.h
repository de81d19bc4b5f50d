/* mk_session for tests: any error fails the test with its message. */
#ifndef MK_TEST_RIG_H
#define MK_TEST_RIG_H

#include "host/session.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

static inline mk_session *rig_open(const mk_session_config *c)
{
    mk_session *s = NULL;
    mk_err err = {0};
    if (mk_session_open(c, &s, &err)) fail_msg("%s", err.msg);
    return s;
}

static inline void rig_run(mk_session *s)
{
    mk_err err = {0};
    if (mk_session_run(s, &err)) fail_msg("%s", err.msg);
}

#endif
