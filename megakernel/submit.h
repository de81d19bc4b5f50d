/* The host's side of the rings (megakernel/rings.h): how an entry is completed and written, how an event is read. One source for the twin's machine, the GPU's and
 * whoever drives a scheduler by hand. One writer a ring. */
#ifndef MK_SUBMIT_H
#define MK_SUBMIT_H

#include "megakernel/rings.h"

#include <string.h>

/* An append's tokens ride along: token[e->arg0], as they will stand in the log. Optional; without them SCHEDULE looks into the log. */
static inline void mk_submit_tokens(mk_submit *e, const uint32_t *token)
{
    e->append.n = e->arg0 < MK_SUBMIT_TOKENS ? e->arg0 : MK_SUBMIT_TOKENS;
    memcpy(e->append.token, token, e->append.n * sizeof *token);
    if (e->arg0) e->append.last = token[e->arg0 - 1];
}

/* Adds what the entry has to say of its slot. slot[n_slots]. */
static inline void mk_submit_complete(mk_submit *e, const mk_slot *slot, uint32_t n_slots)
{
    const mk_slot *s = &slot[e->slot];
    if (e->slot >= n_slots) return;
    if (e->op == MK_SUB_OPEN) {
        e->open.credits = s->credits;
        e->open.seed = s->sampling.seed;
        e->open.context = s->context;
        e->open.state_slot = s->state_slot;
        e->open.pin = s->pin;
        e->open.pin_rows = s->pin_rows;
        e->open.pin_vocab = s->pin_vocab;
    } else if (e->op == MK_SUB_GENERATE) {
        e->generate.sampling = s->sampling;
        e->generate.credits = s->credits;
        e->generate.n_stop = s->n_stop < MK_MAX_STOP ? s->n_stop : MK_MAX_STOP;
        memcpy(e->generate.stop, s->stop, sizeof s->stop);
    }
}

/* Into a ring of entries as number seq (from 1): payload, then the number. */
static inline void mk_submit_put(mk_submit *ring, const mk_submit *e, uint32_t seq)
{
    mk_submit *to = &ring[(seq - 1) % MK_SUBMIT_RING];
    memcpy((uint8_t *)to + sizeof to->seq, (const uint8_t *)e + sizeof e->seq, sizeof *e - sizeof e->seq);
    __atomic_store_n(&to->seq, seq, __ATOMIC_RELEASE);
}

/* The same into a ring of packets. The reader takes a packet in one piece; that this finds its number only behind its payload, the order of stores promises. */
static inline void mk_submit_pack(mk_submit_packets *ring, const mk_submit *e, uint32_t seq)
{
    mk_submit_packets *to = &ring[(seq - 1) % MK_SUBMIT_RING];
    uint32_t word[sizeof *e / 4];
    memcpy(word, e, sizeof word);
    for (uint32_t p = 0; p < MK_SUBMIT_PACKETS; p++) {
        for (uint32_t k = 0; k < 3; k++) __atomic_store_n(&to->packet[p][k], word[1 + 3 * p + k], __ATOMIC_RELAXED);
        __atomic_store_n(&to->packet[p][3], seq, __ATOMIC_RELEASE);
    }
}

/* Whether all of event number seq (from 1) is there. */
static inline int mk_event_there(const mk_event *e, uint32_t seq)
{
    return __atomic_load_n(&e->seq3, __ATOMIC_ACQUIRE) == seq && __atomic_load_n(&e->seq0, __ATOMIC_ACQUIRE) == seq &&
           __atomic_load_n(&e->seq1, __ATOMIC_ACQUIRE) == seq && __atomic_load_n(&e->seq2, __ATOMIC_ACQUIRE) == seq;
}

#endif
