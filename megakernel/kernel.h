/* The resident kernel as its host side sees it. */
#ifndef MK_KERNEL_H
#define MK_KERNEL_H

#include "megakernel/laid.h"

#ifdef __cplusplus
extern "C" {
#endif

/* For cudaLaunchKernel: a grid of one block a worker, MK_THREADS threads, one argument (mk_gpu_args). In a program that has one kernel only (profiles/onestep and mkd-plain, race_gpu:
 * MK_ONE_KERNEL) that one, whatever `laid` is. */
const void *mk_kernel_entry(enum mk_laid laid);

const void *mk_kernel_all(void); /* kernel.cu's own; of its copies that are laid for one model, the Makefile makes it mk_kernel_<symbol> */

#ifdef __cplusplus
}
#endif

#endif
