/* The ring of weights of a worker on the CPU, behind the device code that takes of it: the loader's place. Stages from number `at` on are filled when they like, by whatever a test says, and are no
 * numbers when the group of warps whose they are has left them. */
#ifndef MK_LANES_RING_H
#define MK_LANES_RING_H

typedef struct lanes_slot {
    uint32_t stage; /* that is there, or that comes next; counted from `at` on */
    uint32_t due;   /* looks at any slot until it comes, 0: it does not */
    uint32_t left;  /* warps that have left it */
    bool there;
} lanes_slot;
static struct {
    uint32_t at, stages, stride, late; /* late: looks, at most, until a stage comes */
    void (*fill)(uint32_t stage, uint8_t *to);
    lanes_slot slot[MK_STAGES];
} lanes_loader;

/* Barriers beside the stages': of how many arrivals, of which so many are there; phases so far. */
typedef struct lanes_bar {
    const uint64_t *at;
    uint32_t count, arrived, phase;
} lanes_bar;
static lanes_bar lanes_bars[8];

static lanes_bar *lanes_bar_of(uint32_t bar)
{
    for (lanes_bar &b : lanes_bars)
        if (b.at && mk_smem(b.at) == bar) return &b;
    return NULL;
}
static uint8_t *lanes_slot_at(uint32_t i)
{
    return (uint8_t *)lanes_shared + lanes_ring[0] + i * lanes_loader.stride;
}
static void lanes_slot_next(uint32_t i, uint32_t stage)
{
    lanes_loader.slot[i] = {stage, stage < lanes_loader.stages ? 1 + (lanes_random(2) ? 0 : lanes_random(lanes_loader.late)) : 0, 0, false};
}
static bool lanes_ring_test(uint32_t bar, uint32_t parity)
{
    if (const lanes_bar *b = lanes_bar_of(bar)) return (b->phase & 1) != parity;
    const lanes_slot *s = &lanes_loader.slot[(bar - mk_smem(lanes_shared->full)) / 8];
    for (uint32_t i = 0; i < MK_STAGES; i++) {
        lanes_slot *p = &lanes_loader.slot[i];
        if (!p->due) continue;
        lanes.moved++;
        if (--p->due) continue;
        lanes_loader.fill(p->stage, lanes_slot_at(i));
        p->there = true;
    }
    return s->there && mk_stage_parity(lanes_loader.at + s->stage) == parity;
}
static void lanes_ring_arrive(uint32_t bar)
{
    if (lanes_bar *b = lanes_bar_of(bar)) {
        lanes.moved++;
        if (++b->arrived == b->count) b->arrived = 0, b->phase++;
        return;
    }
    if (bar < mk_smem(lanes_shared->empty) || bar >= mk_smem(lanes_shared->empty + MK_STAGES)) return;
    const uint32_t i = (bar - mk_smem(lanes_shared->empty)) / 8;
    lanes_slot *s = &lanes_loader.slot[i];
    if (lanes.me / 32 / MK_GROUP_WARPS != i % MK_GROUPS) lanes_wrong("a stage is left by the other group", i, lanes.me / 32);
    if (!s->there) lanes_wrong("a stage is left that is not there", i, lanes.me / 32);
    if (++s->left < MK_GROUP_WARPS) return;
    memset(lanes_slot_at(i), 0xff, lanes_loader.stride);
    lanes_slot_next(i, s->stage + MK_STAGES);
}

/* Shared memory with such a ring behind it, of stages of so many bytes, and before that so many of LOCAL vectors: once. */
static void lanes_ring_open(uint32_t stride, uint32_t local = 0)
{
    const uint32_t ring = (sizeof(mk_shared) + local + 127) / 128 * 128;
    lanes_shared = (mk_shared *)aligned_alloc(128, ring + MK_STAGES * stride + 128);
    lanes_ring[0] = ring, lanes_ring[1] = ring + MK_STAGES * stride;
    lanes_loader.stride = stride, lanes_loader.late = 6000;
    lanes_mbar_test = lanes_ring_test, lanes_mbar_arrive = lanes_ring_arrive;
}
/* So many stages come. */
static void lanes_ring_stages(uint32_t stages)
{
    lanes_loader.stages = stages;
    for (uint32_t i = 0; i < MK_STAGES; i++) lanes_slot_next((lanes_loader.at + i) % MK_STAGES, i);
}
/* An instruction's beginning: shared memory holds anything but what the kernel has made zero, or has in it by then, and `stages` stages come from number `at` on, which are the warps' next. */
static void lanes_ring_begin(uint32_t at, uint32_t stages, void (*fill)(uint32_t stage, uint8_t *to))
{
    mk_shared *sh = lanes_shared;
    memset(sh, 0xff, lanes_ring[1]);
    memset(&sh->args, 0, sizeof sh->args), memset(sh->fed, 0, sizeof sh->fed), memset(&sh->trace, 0, sizeof sh->trace), memset(&sh->step, 0, sizeof sh->step), memset(sh->memo, 0, sizeof sh->memo);
    sh->aborted = sh->lap.none = 0;
    sh->args.ring.at = lanes_ring[0], sh->args.ring.stride = lanes_loader.stride, sh->args.ring.stages = MK_STAGES;
    for (uint32_t w = 0; w < MK_WARPS; w++) sh->memo[w].next.at = at;
    lanes_loader.at = at, lanes_loader.fill = fill;
    lanes_ring_stages(stages);
}
/* The warps stand before stage `at`, whose weights come `scales` bytes behind its beginning. */
static inline void lanes_ring_places(uint32_t at, uint32_t scales)
{
    mk_shared *sh = lanes_shared;
    sh->args.ring.scales = scales;
    for (uint32_t w = 0; w < MK_WARPS; w++) {
        mk_next_begin(sh, w);
        const uint32_t i = at + mk_group_first(w, at);
        sh->memo[w].next = {mk_stage_bar(sh, i), mk_stage_at(sh, i) + scales, mk_stage_parity(i), at};
    }
}

#endif
