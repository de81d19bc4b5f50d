/* Every opcode, alone: the resident kernel (its copies in turn, by the seed: megakernel/laid.h) against the twin on fresh random inputs with everything else poisoned. What an instruction writes must be within its
 * tolerance (instructions/tolerance.h), everything else as it was, and a row's bits the same with 8, 3 and 1 rows in the step. Then the negative controls: wrong
 * instructions on the twin's side and a stray write, each of which must be found.
 *   test_opcodes [-s SEED] [-v] [-t TIMES] [FILTER ...]   FILTER: runs cases whose "OPCODE name" contains one of them (GEMV, fp8, 2304 ...); -v: every first
 *                                                 divergence in full also for negative controls; -x: no GPU, the twin against itself (tests the test); -t: waits TIMES as long before it
 *                                                 calls a case hung (a sanitizer)
 * The cases are in tests/gpu/opcodes_*.c. A JSON report goes to $OUT/opcodes.json ($OUT unset: the working directory). */
#include "tests/gpu/opcodes.h"

#include "host/version.h"
#include "megakernel/gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int verbose, dry;
static FILE *report;
static uint32_t ran, failed, skipped;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

static int wanted(const char *name, char **filter, int n)
{
    if (!n) return 1;
    for (int i = 0; i < n; i++)
        if (strstr(name, filter[i])) return 1;
    return 0;
}

static void json(const char *op, const char *name, const case_result *r, uint32_t code, const char *verdict)
{
    fprintf(report, "%s  {\"opcode\": \"%s\", \"case\": \"%s\", \"rows\": [8, 3, 1], \"values\": %llu, \"max_error\": %.3e, \"tolerance\": %.1e, "
            "\"differing_words_between_row_counts\": %llu, \"result\": \"%s\"}", ran + skipped > 1 ? ",\n" : "", op, name,
            (unsigned long long)r->cmp.values[code], r->cmp.worst[code], r->cmp.tolerance[code], (unsigned long long)r->bits, verdict);
}

int main(int argc, char **argv)
{
    mk_gpu_info info = {.name = "none: the twin against itself"};
    mk_err err = {0};
    uint64_t seed = (uint64_t)time(NULL) & 0xffffff;
    int o;
    while ((o = getopt(argc, argv, "s:t:vx")) != -1)
        if (o == 's')
            seed = strtoull(optarg, NULL, 0);
        else if (o == 't')
            case_patience = (uint32_t)strtoul(optarg, NULL, 0);
        else if (o == 'v')
            verbose = 1;
        else if (o == 'x')
            dry = 1;
        else
            return 2;
    if (!case_patience) return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (!dry && mk_gpu_probe(0, &info, &err)) {
        fprintf(stderr, "test_opcodes: %s\n", err.msg);
        return 1;
    }
    char path[512], label[160];
    snprintf(path, sizeof path, "%s/opcodes.json", getenv("OUT") ? getenv("OUT") : ".");
    if (!(report = fopen(path, "w"))) {
        fprintf(stderr, "test_opcodes: cannot write %s\n", path);
        return 6;
    }
    printf("test_opcodes: %s, seed %llu\n", info.name, (unsigned long long)seed);
    fprintf(report, "{\"device\": \"%s\", \"build\": \"%s\", \"seed\": %llu, \"results\": [\n", info.name, mk_build(), (unsigned long long)seed);
    char **filter = argv + optind;
    int n_filter = argc - optind;
    double t0 = now();
    case_result *r = malloc(sizeof *r);
    for (const case_spec *s = case_next(NULL); s && r; s = case_next(s)) {
        snprintf(label, sizeof label, "%s %s", s->op, s->name);
        if (!wanted(label, filter, n_filter)) continue;
        uint32_t op = case_opcode(s);
        case_run(s, seed + (uint64_t)ran, dry, NULL, r);
        if (r->skip)
            skipped++;
        else
            ran++;
        if (r->bad) failed++;
        printf("%-58s rows 8/3/1  error %.1e of %.1e  %7llu values  row bits %s  %4.0f ms  %s\n", label, r->cmp.worst[op], r->cmp.tolerance[op],
               (unsigned long long)r->cmp.values[op], r->skip ? "-" : r->bits ? "DIFFER" : "same", r->ms, r->skip ? "skipped" : r->bad ? "FAIL" : "ok");
        if (r->text[0] && r->bad) printf("    %s\n", r->text);
        json(s->op, s->name, r, op, r->skip ? "twin only" : r->bad ? "failed" : "ok");
    }
    /* each must be found */
    uint32_t controls = 0, missed = 0;
    for (uint32_t i = 0; i < n_case_wrongs; i++) {
        const case_wrong *w = &case_wrongs[i];
        const case_spec *of = case_named(w->op, w->of);
        snprintf(label, sizeof label, "%s %s", w->op, w->name);
        if (!wanted(label, filter, n_filter)) continue;
        if (!of) {
            missed++;
            printf("negative control: %-40s NOT RUN: there is no case \"%s\"\n", label, w->of);
            continue;
        }
        case_run(of, seed + i, dry, w, r);
        if (r->skip) continue;
        controls++;
        if (!r->cmp.failed) missed++;
        printf("negative control: %-40s %s\n", label, r->cmp.failed ? "found" : "NOT FOUND");
        if (verbose || (!r->cmp.failed && r->text[0])) printf("    %s\n", r->text);
    }
    printf("%u cases, %u failed, %u skipped (opcode not on the GPU yet); %u negative controls, %u missed; %.1f s\n", ran, failed, skipped, controls, missed, (now() - t0) / 1e3);
    fprintf(report, "\n], \"cases\": %u, \"failed\": %u, \"skipped\": %u, \"negative_controls\": %u, \"missed\": %u}\n", ran, failed, skipped, controls, missed);
    fclose(report);
    free(r);
    return failed || missed || !ran;
}
