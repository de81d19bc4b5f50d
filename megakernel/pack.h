/* Packing on the GPU: raw tensors in, segments in device memory out. One thread of the host at a time. */
#ifndef MK_GPU_PACK_H
#define MK_GPU_PACK_H

#include "host/err.h"
#include "megakernel/pack_core.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mk_packer mk_packer;

/* raw_bytes: of data and scales of the largest piece, blocks: floats of its block scales. Makes streams, pinned staging and two device buffers of that
 * size, and copies the segments. */
int mk_packer_new(const mk_pack_seg *seg, uint32_t n_seg, uint64_t raw_bytes, uint32_t blocks, mk_packer **p, mk_err *err);

/* Brings a piece over and packs segments [first, first + n) of it: piece->data and ->scales are memory of the host, piece->dst of the device. Returns
 * before it is done; the piece's memory may not change until mk_packer_finish. */
int mk_packer_put(mk_packer *p, const mk_pack_piece *piece, uint64_t data_bytes, uint64_t scale_bytes, uint32_t first, uint32_t n, mk_err *err);

/* A segment that holds a weight which cannot be packed, of those finished by now; 0: none. *put: which call, from 0. */
int mk_packer_refused(const mk_packer *p, uint32_t *put, uint32_t *seg);

/* Waits for everything. */
int mk_packer_finish(mk_packer *p, mk_err *err);
void mk_packer_destroy(mk_packer **p);

#ifdef __cplusplus
}
#endif

#endif
