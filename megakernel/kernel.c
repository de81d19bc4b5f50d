#include "megakernel/kernel.h"

#ifdef MK_ONE_KERNEL
const void *mk_kernel_entry(enum mk_laid laid)
{
    (void)laid;
    return mk_kernel_all();
}
#else
#define X(symbol, ...) extern const void *mk_kernel_##symbol(void);
MK_LAID(X)
#undef X

const void *mk_kernel_entry(enum mk_laid laid)
{
    static const void *(*const entry[])(void) = {
        mk_kernel_all,
#define X(symbol, ...) mk_kernel_##symbol,
        MK_LAID(X)
#undef X
    };
    return entry[laid]();
}
#endif
