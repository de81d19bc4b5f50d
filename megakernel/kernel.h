/* The resident kernel as its host side sees it. */
#ifndef MK_KERNEL_H
#define MK_KERNEL_H

/* For cudaLaunchKernel: a grid of one block a worker, MK_THREADS threads, one argument (mk_gpu_args). */
const void *mk_kernel_entry(void);

#endif
