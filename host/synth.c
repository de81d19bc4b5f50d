#include "host/synth.h"

#ifdef MK_CUDA

#include "instructions/latent.h"
#include "megakernel/synth.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A parameter's synthetic values, by what its tensor is: norms 1, decays as at the start of a training, biases 0. */
static void synthetic_param(const mk_pack_item *it, float *v)
{
    const char *name = it->par->tensor;
    float value = strstr(name, "norm") ? 1.0f : strstr(name, "A_log") ? 1.4f : strstr(name, "dt_bias") ? -4.0f : 0.0f;
    int conv = strstr(name, "conv1d") != NULL;
    uint32_t x = it->src * 2654435761u + 12345;
    for (uint32_t i = 0; i < it->n; i++) {
        x = x * 1664525u + 1013904223u;
        v[i] = conv ? (float)(int32_t)x * 0x1p-31f : value;
    }
}

/* Matrices have an RMS of 1 / sqrt(k). ROUTER's is the other way round: its k are the experts, and logits are sums over its rows. */
static float gain_of(const mk_mat *mat)
{
    return mat->keep_bf16 == 2 ? sqrtf((float)mat->k / (float)mat->n) : 1.0f;
}

int mk_synthesize(const mk_plan *plan, mk_gpu *gpu, mk_err *err)
{
    const mk_program *p = plan->prog;
    mk_memory d = {0};
    mk_gpu_memory(gpu, &d);
    float *param = calloc(p->info.param_floats + 1, sizeof *param);
    int rc = param ? MK_OK : mk_fail(err, MK_E_CAPACITY, "out of memory");
    for (size_t i = 0; i < plan->n_item && !rc; i++) {
        const mk_pack_item *it = &plan->item[i];
        uint32_t scale_rows = it->wtype == MK_W_FP8 ? it->nseg * it->halves : 0;
        switch (it->kind) {
        case MK_PACK_TAPE:
            rc = mk_synth_segments(d.tape + p->tape_base[it->worker] + it->dst, 1, 0, it->wtype, it->rows * it->halves, it->mat[0]->k, scale_rows,
                                   it->mat[0]->scale_k, gain_of(it->mat[0]), i, err);
            break;
        case MK_PACK_EXPERT:
            rc = mk_synth_segments(d.expert + it->dst, it->experts, it->expert_stride, it->wtype, it->rows * it->halves, it->mat[0]->k, scale_rows,
                                   it->mat[0]->scale_k, 1.0f, i, err);
            break;
        case MK_PACK_EMBED: rc = mk_synth_bf16(d.embed, (uint64_t)it->rows * it->mat[0]->k, 1.0f, i, err); break;
        case MK_PACK_PARAM: synthetic_param(it, param + it->dst); break;
        case MK_PACK_VALUES: memcpy(param + it->dst, it->values, it->n * sizeof *param); break;
        }
    }
    if (!rc) rc = mk_gpu_upload_params(gpu, param, 0, p->info.param_floats, err);
    uint64_t kv = (uint64_t)p->info.kv_layers * p->info.kv_pages * p->info.kv_page_bytes;
    const mk_mla *fp8 = NULL; /* all of a program's caches are alike */
    for (uint32_t x = 0; x < p->info.n_insn && !fp8; x++)
        if (p->insn[x].opcode == MK_OP_KV_APPEND && p->insn[x].mla.cache == MK_CACHE_FP8) fp8 = &p->insn[x].mla;
    if (!rc && fp8)
        rc = mk_synth_latents(d.kv, kv / mk_latent_row_bytes(fp8->latent, fp8->rope, fp8->cache, 2), fp8->latent, fp8->rope, plan->n_item, err);
    else if (!rc && kv)
        rc = mk_synth_bf16(d.kv, kv / 2, 1.0f, plan->n_item, err);
    if (!rc) rc = mk_synth_finish(err);
    free(param);
    return rc;
}

#endif
