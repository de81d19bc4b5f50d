/* Between the validator's files: validate.c (structure, publications), validate_insn.c (addresses and shapes of one instruction),
 * validate_order.c (progress and reuse of buffers). */
#ifndef MK_VALIDATE_INTERNAL_H
#define MK_VALIDATE_INTERNAL_H

#include "instructions/latent.h"
#include "instructions/validate.h"

/* Bytes [off, off + bytes) that belong to `who` (an instruction or a vector). */
typedef struct mk_range {
    uint64_t off, bytes;
    uint32_t who;
} mk_range;

/* An instruction that waits for slices [slice0, slice0 + nslice) of a publication; whole publication: nslice = members. */
typedef struct mk_read_of {
    uint32_t insn, slice0, nslice;
} mk_read_of;

typedef struct mk_check {
    const mk_program *p;
    const mk_program_info *i;
    mk_validation *out;
    mk_err *err;
    uint32_t *owner;  /* [n_insn] worker of an instruction */
    uint32_t *source; /* [n_insn * 3] instruction that wrote the LOCAL vector of a wait */
    /* LOCAL vectors of the queue that is being walked */
    uint32_t *local_writer, *local_worker; /* [n_vec] */
    /* Publications: (v, pub) is number pub_first[v] + pub. Its members are the instructions that make it: one a slice (PACKET), one a
     * worker (DYNAMIC), `signals` (BULK), none (LOCAL). */
    uint32_t *pub_first;  /* [n_vec + 1] */
    uint32_t n_pub;
    uint32_t *member_off; /* [n_pub + 1] */
    uint32_t *member;     /* instruction, MK_NOBODY until it is known */
    uint32_t *filled;     /* [n_pub] members known (BULK) */
    uint32_t *read_off;   /* [n_pub + 1] */
    mk_read_of *read;
    mk_range *state;      /* [n_insn] at most */
    uint32_t n_state;
    uint32_t sample, schedule; /* instructions */
} mk_check;

#define MK_NOBODY 0xffffffffu

/* Slices [first, first + n) of a publication. */
typedef struct mk_slices {
    uint32_t first, n;
} mk_slices;

/* "worker 3 #17 GEMV layer 2: <message>"; returns MK_E_PROGRAM. */
int mk_refuse(mk_check *c, uint32_t insn, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* "worker 3 #17 GEMV layer 2" */
typedef struct mk_text {
    char s[64];
} mk_text;
mk_text mk_insn_text(const mk_check *c, uint32_t insn);

static inline uint32_t mk_pub_id(const mk_check *c, uint32_t vec, uint32_t pub)
{
    return c->pub_first[vec] + pub;
}
static inline uint32_t mk_members(const mk_check *c, uint32_t pub_id)
{
    return c->member_off[pub_id + 1] - c->member_off[pub_id];
}
static inline const mk_vec *mk_wait_vec(const mk_check *c, const mk_insn *in, uint32_t k)
{
    return &c->p->vec[in->wait[k].vec];
}

/* Calls f for each publication that an instruction takes part in (LM_HEAD: two). LOCAL ones are not reported. */
static inline uint32_t mk_signals_of(const mk_check *c, const mk_insn *in, uint32_t vec[2], uint32_t pub[2])
{
    uint32_t n = 0;
    if (in->signal_vec != MK_NONE && c->p->vec[in->signal_vec].scope != MK_LOCAL) {
        vec[n] = in->signal_vec;
        pub[n++] = in->signal_pub;
    }
    if (in->opcode == MK_OP_LM_HEAD) {
        vec[n] = in->lm_head.logits_vec;
        pub[n++] = in->lm_head.logits_pub;
    }
    return n;
}

/* Header and payload of instruction x, its wait and signal already known to name existing slices. */
int mk_check_insn(mk_check *c, uint32_t x);
/* No instruction may name bytes outside opcode's own payload. */
int mk_check_reserved(mk_check *c, uint32_t x);
/* What instruction x, which has been checked, looks at of PACKET wait k that is not dynamic: 1 to 3 parts of it. Who has published those has done so before x ends;
 * of the others in the wait's range nothing is known. */
uint32_t mk_looks_at(const mk_check *c, uint32_t x, uint32_t k, mk_slices s[3]);
/* What has to agree between the instructions of one publication, once all are known. */
int mk_check_groups(mk_check *c);
/* First overlap among n ranges (sorted in place): 1 and the two owners, or 0. */
int mk_overlap(mk_range *r, uint32_t n, uint32_t *a, uint32_t *b);

int mk_check_order(mk_check *c);

#endif
