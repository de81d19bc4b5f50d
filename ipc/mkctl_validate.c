/* mkctl validate FILE: proves a program file (mkctl plan --out) or says why not. */
#include "ipc/mkctl.h"

#include "instructions/validate.h"

#include <stdio.h>

void mkctl_print_validation(const mk_program *p, const mk_validation *v)
{
    printf("proven     in %.2f s: %u publications, %u waits, %u exchanges on the longest chain of a step\n", v->seconds, v->publications,
           v->waits, v->exchanges);
    printf("shared     %.1f KB at %d rows, by worker %u #%u", v->smem_max / 1024.0, MK_MAX_ROWS, v->smem_worker, v->smem_seq);
    if (p->info.smem_limit)
        printf(" (limit %.1f KB)", p->info.smem_limit / 1024.0);
    else
        printf(" (no limit set: twin only)");
    printf("; gathered vectors take up to %.1f KB\n", v->staging_max / 1024.0);
}

int mkctl_validate(int argc, char **argv)
{
    const char *path = NULL;
    size_t n = 0;
    int rc = mkctl_flags(argc, argv, NULL, 0, &path, 1, &n);
    if (rc) return rc < 0 ? MK_OK : rc;
    if (!n) return mkctl_usage("validate: name a program file (mkctl plan MODEL --out FILE writes one)");
    mk_err err = {0};
    mk_program *p = NULL;
    mk_validation v;
    if (mk_program_load(path, &p, &err) || mk_validate(p, &v, &err)) {
        rc = mkctl_failed("validate", &err);
    } else {
        printf("%s: %u workers, %u layers, %u instructions\n", path, p->info.workers, p->info.layers, p->info.n_insn);
        mkctl_print_validation(p, &v);
    }
    mk_program_destroy(&p);
    return rc;
}
