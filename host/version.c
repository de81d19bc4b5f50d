#include "host/version.h"

#ifndef MK_COMMIT
#define MK_COMMIT "unknown" /* the Makefile says which */
#endif

const char *mk_build(void)
{
    return "mkd " MK_VERSION " (" MK_COMMIT ")";
}
