#include "host/numa.h"

#include <errno.h>
#include <numa.h>
#include <numaif.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int mk_numa_node_of(const char *pci)
{
    char path[128];
    int node = -1;
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%.32s/numa_node", pci);
    FILE *f = fopen(path, "r");
    if (!f) return -1;
    if (fscanf(f, "%d", &node) != 1) node = -1;
    fclose(f);
    return node;
}

unsigned mk_numa_cpus(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return (unsigned)CPU_COUNT(&set);
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (unsigned)n : 1;
}

void mk_numa_place(const char *pci, char *text, size_t size)
{
    int found = mk_numa_node_of(pci), node = found < 0 ? 0 : found;
    int n = snprintf(text, size, found < 0 ? "GPU %s: no NUMA node in sysfs, taking node %d" : "GPU %s is on NUMA node %d", pci, node);
    if (n < 0 || (size_t)n >= size) return;
    text += n;
    size -= (size_t)n;
    if (numa_available() < 0) {
        snprintf(text, size, "; this system has no NUMA interface, nothing is placed");
        return;
    }
    if (node > numa_max_node()) {
        snprintf(text, size, "; the system has nodes up to %d only, nothing is placed", numa_max_node());
        return;
    }
    /* set_mempolicy itself: libnuma's wrapper writes to stderr when a container forbids it. */
    unsigned long mask[16] = {0};
    if ((size_t)node < 8 * sizeof mask) mask[(size_t)node / (8 * sizeof *mask)] = 1ul << ((size_t)node % (8 * sizeof *mask));
    int memory = set_mempolicy(MPOL_PREFERRED, mask, 8 * sizeof mask) ? errno : 0;
    int run = numa_run_on_node(node) ? errno : 0;
    snprintf(text, size, ": pinned memory %s%s, threads %s%s (%u processors)", memory ? "anywhere: " : "there", memory ? strerror(memory) : "",
             run ? "anywhere: " : "there", run ? strerror(run) : "", mk_numa_cpus());
}
