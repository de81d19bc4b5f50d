/* Where threads and pinned memory go: the NUMA node of the GPU. */
#ifndef MK_NUMA_H
#define MK_NUMA_H

#include <stddef.h>

/* The node that a PCI device ("0000:1b:00.0") hangs on, as sysfs says it; -1: it does not say (a virtual machine often does not). */
int mk_numa_node_of(const char *pci);

/* From now on the calling thread, and threads that it starts, run on the GPU's node, and what they allocate lies there. Without a node in sysfs: node 0.
 * Writes one line for the log into text: what was done, or why not. Never fails: it is placement. */
void mk_numa_place(const char *pci, char *text, size_t size);

/* Processors that the calling thread may run on. */
unsigned mk_numa_cpus(void);

#endif
