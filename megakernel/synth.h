/* Synthetic weights, made on the device: what a full-size model costs can be measured without its checkpoint. Values are random with the
 * scale that keeps activations near unit RMS, so routes, gates and decays spread as in a real model; the text is noise. */
#ifndef MK_SYNTH_H
#define MK_SYNTH_H

#include "instructions/isa.h"

#ifdef __cplusplus
extern "C" {
#endif
#include "host/err.h"

/* Fills `count` segments (instructions/isa.h, mk_wtype), `stride` bytes apart, at device address dst. scale_rows: floats of a scale row
 * (0: BF16). A weight has an RMS of about gain / sqrt(k). */
int mk_synth_segments(void *dst, uint32_t count, uint64_t stride, uint32_t wtype, uint32_t rows, uint32_t k, uint32_t scale_rows,
                      uint32_t scale_k, float gain, uint64_t seed, mk_err *err);
/* n cache rows of latent attention in FP8 (instructions/latent.h), of RMS 1. */
int mk_synth_latents(void *dst, uint64_t n, uint32_t latent, uint32_t rope, uint64_t seed, mk_err *err);
/* n bf16 values of RMS `gain`. */
int mk_synth_bf16(void *dst, uint64_t n, float gain, uint64_t seed, mk_err *err);
/* Waits for all of it. */
int mk_synth_finish(mk_err *err);

#ifdef __cplusplus
}
#endif

#endif
