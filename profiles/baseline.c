/* profiles/baseline: a preset with synthetic weights, measured three ways in one process: the resident kernel, the same step launched anew for every token, and
 * one kernel a phase in a CUDA graph with programmatic dependent launch (megakernel/baseline.h). Prints one JSON. All three must choose the same tokens. Where there are any, a graph of kernels
 * written for the model is a fourth (profiles/dense_graph.h); its sums are others, so that four of five tokens must be the same. */
#include "host/version.h"
#include "ipc/mkctl.h"
#include "ipc/mkctl_measure.h"
#include "megakernel/baseline.h"
#include "megakernel/ceiling.h"
#include "profiles/dense_graph.h"
#include "profiles/synthetic.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct job {
    mk_gpu *gpu;
    const mk_program *prog;
    mk_baseline_config cfg;
    uint32_t *tokens; /* of the first run: the others must agree */
    double same;      /* share of the last run's tokens that do */
} job;

static double median(const double *v, uint32_t n, double q)
{
    double *copy = malloc(n * sizeof *copy);
    if (!copy) return 0;
    memcpy(copy, v, n * sizeof *copy);
    double m = mkctl_quantile(copy, n, q);
    free(copy);
    return m;
}

/* One run; *ms its median. own: of the kernels written for that model, whatever else is said. The first run's tokens are kept; of another's, the share j->same must be the first one's: all, and of
 * `own`, whose sums are others, four of five. */
static int measure(job *j, const char *name, const mk_synthetic *own, enum mk_baseline_kind kind, uint32_t prefetch, int no_overlap, double *ms, uint32_t *kernels, mk_err *err)
{
    mk_baseline_result r;
    mk_baseline_config c = j->cfg;
    c.kind = kind;
    c.prefetch = prefetch;
    c.no_overlap = no_overlap;
    int rc = own ? mk_dense_graph_run(own->model, own->plan, j->gpu, &c, &r, err) : mk_baseline_run(j->gpu, j->prog, &c, &r, err);
    if (!rc) {
        *ms = median(r.step_ms, c.steps, 0.5);
        *kernels = r.kernels;
        fprintf(stderr, "%-28s p50 %.4f  p99 %.4f ms a step", name, *ms, median(r.step_ms, c.steps, 0.99));
        if (!j->tokens) {
            j->tokens = r.token;
            r.token = NULL;
        } else {
            uint32_t n = 0, other = 0; /* the first that is another */
            for (uint32_t i = c.steps; i--;)
                if (j->tokens[i] == r.token[i])
                    n++;
                else
                    other = i;
            j->same = (double)n / c.steps;
            if (own) fprintf(stderr, ", %.0f %% of its tokens are those of the others", 100 * j->same);
            if (j->same < (own ? 0.8 : 1))
                rc = mk_fail(err, MK_E_BUG, "%s: %u of %u tokens are those of the first run: step %u chose token %u, that one %u", name, n, c.steps, other, r.token[other], j->tokens[other]);
        }
        fputc('\n', stderr);
    }
    free(r.step_ms);
    free(r.token);
    return rc;
}

static int run(const mk_preset *p, const char *lm_head, uint32_t steps, mk_baseline_config cfg, const char *out, mk_err *err)
{
    static const uint32_t depth[] = {0, 32768, 65536, 131072}; /* of the prefetch: the best counts */
    mk_synthetic s = {0};
    job j = {.cfg = cfg};
    double ceiling = 0, resident = 0, launch = 0, plain = 0, graph[4] = {0}, own = 0;
    uint32_t kernels = 0, own_kernels = 0, none;
    mk_gpu_info info;
    int rc = mk_synthetic_plan(&s, p, strcmp(lm_head, "fp8") ? MK_LM_HEAD_AUTO : MK_LM_HEAD_FP8, cfg.context, err);
    if (!rc) rc = mk_gpu_probe(0, &info, err);
    if (!rc) rc = mk_ceiling_measure(0, &ceiling, err);
    if (!rc) rc = mk_synthetic_make(&s, err);
    if (!rc) {
        j.gpu = s.gpu;
        j.prog = s.plan->prog;
        j.cfg.steps = steps;
        j.cfg.vocab = s.model->vocab;
        rc = measure(&j, "resident", NULL, MK_BASELINE_RESIDENT, 0, 0, &resident, &none, err);
    }
    if (!rc) rc = measure(&j, "one launch a step", NULL, MK_BASELINE_LAUNCH, 0, 0, &launch, &none, err);
    if (!rc) rc = measure(&j, "graph, plain edges", NULL, MK_BASELINE_GRAPH, 0, 1, &plain, &kernels, err);
    uint32_t best = 0;
    for (uint32_t i = 0; i < 4 && !rc; i++) {
        char name[48];
        snprintf(name, sizeof name, "graph, prefetch %u KB", depth[i] / 1024);
        rc = measure(&j, name, NULL, MK_BASELINE_GRAPH, depth[i], 0, &graph[i], &kernels, err);
        if (graph[i] < graph[best]) best = i;
    }
    if (!rc && mk_dense_graph_fits(s.model, cfg.rows)) rc = measure(&j, "graph, kernels of its own", &s, MK_BASELINE_GRAPH, 0, 0, &own, &own_kernels, err);
    if (!rc) {
        char date[32];
        mk_measure_date(date);
        double bytes = mk_bytes_step(&s.plan->bytes, cfg.rows, cfg.context), phases_ms = graph[best] < plain ? graph[best] : plain, best_ms = own && own < phases_ms ? own : phases_ms;
        json_t *js = json_pack("{s:s,s:s,s:i,s:i,s:i,s:f,s:f,s:f,s:f,s:f,s:i,s:[f,f,f,f],s:i,s:f,s:f,s:f,s:f,s:f,s:b,s:s,s:s}", "preset", p->name, "device", info.name, "ctx",
                               (int)cfg.context, "rows", (int)cfg.rows, "steps", (int)steps, "bytes_per_step", bytes, "ceiling_gb_s", ceiling, "resident_ms", resident,
                               "launch_ms", launch, "graph_plain_ms", plain, "graph_kernels", (int)kernels, "graph_by_prefetch_ms", graph[0], graph[1], graph[2],
                               graph[3], "graph_prefetch_kb", (int)(depth[best] / 1024), "graph_phases_ms", phases_ms, "graph_ms", best_ms, "floor_ms", bytes / ceiling * 1e-6, "graph_over_resident",
                               best_ms / resident, "launch_over_resident", launch / resident, "same_tokens", 1, "commit", mk_build(), "date", date);
        if (!js) rc = mk_fail(err, MK_E_BUG, "JSON");
        if (js && own) rc = json_object_update_new(js, json_pack("{s:f,s:i,s:f}", "graph_own_ms", own, "graph_own_kernels", (int)own_kernels, "graph_own_same_tokens", j.same)) ? mk_fail(err, MK_E_BUG, "JSON") : MK_OK;
        if (js) json_dumpf(js, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
        if (js) putchar('\n');
        if (js && out && json_dump_file(js, out, JSON_INDENT(2) | JSON_REAL_PRECISION(9))) rc = mk_fail(err, MK_E_SYSTEM, "%s: %s", out, strerror(errno));
        json_decref(js);
    }
    free(j.tokens);
    mk_synthetic_close(&s);
    return rc;
}

int main(int argc, char **argv)
{
    const char *preset = "kimi-linear-48b", *out = NULL, *lm_head = "auto";
    uint32_t context = 2048, rows = 1, steps = 400, chain = 8;
    uint64_t seed = 1;
    const mkctl_flag flag[] = {{"--preset", MKCTL_TEXT, &preset, "which"},
                               {"--lm-head", MKCTL_TEXT, &lm_head, "auto or fp8"},
                               {"--ctx", MKCTL_U32, &context, "pinned context"},
                               {"--rows", MKCTL_U32, &rows, "rows of a step"},
                               {"--steps", MKCTL_U32, &steps, "steps of each variant"},
                               {"--chain", MKCTL_U32, &chain, "steps of one graph launch"},
                               {"--seed", MKCTL_U64, &seed, "of the random token ids"},
                               {"--out", MKCTL_TEXT, &out, "write the JSON to this file too"}};
    argv[0] = (char *)"baseline";
    int rc = mkctl_flags(argc, argv, flag, sizeof flag / sizeof flag[0], NULL, 0, NULL);
    if (rc) return rc < 0 ? 0 : rc;
    const mk_preset *p = mk_preset_find(preset);
    if (!p) return mkctl_usage("baseline: no preset \"%s\", there are %s", preset, mk_preset_names());
    if (!context || context > 1u << 24 || !rows || rows > 8 || steps < 2 || steps > 1000000 || !chain || chain > 64)
        return mkctl_usage("baseline: expected --ctx 1 to 16777216, --rows 1 to 8, --steps 2 to 1000000, --chain 1 to 64");
    mk_err err = {0};
    mk_baseline_config cfg = {.context = context, .rows = rows, .seed = seed, .chain = chain};
    rc = run(p, lm_head, steps, cfg, out, &err);
    return rc ? mkctl_failed("baseline", &err) : MK_OK;
}
