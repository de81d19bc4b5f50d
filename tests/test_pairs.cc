/* How EXPERT_DOWN of one row stages its pairs (instructions/expert_down.cuh), on the CPU: the kernel's own text, 256 lanes as coroutines (tests/lanes). Slices of any even lengths, down to less than a
 * packet, whose packets store words behind their values where others' values belong: pairs are laid side by side, each by its warp, and come out whole, with zeros behind them and factors before. */
#include "tests/lanes/cuda.h"

extern "C" {
#include "instructions/program.h"
}
#include "instructions/expert_down.cuh"

#include <setjmp.h>
#include <stdarg.h>
extern "C" {
#include <cmocka.h>
}

#define EPOCH 0x1234u
static uint32_t start[MK_PAIR_MOST + 1], slices, slice_packets, k, experts, packets; /* packets: of a pair */
static uint16_t *value;                                                              /* [pair][k] */
static float weight[MK_MAX_TOPK];
static uint4 *exchange;
alignas(16) static uint32_t words[32 * MK_PAIR_WORDS];
static uint32_t mixes; /* that were staged */

/* Pairs out of `slices` slices. Words of a packet behind its slice's end are 0 (mk_publish_unit); packets that nobody publishes hold anything, and the epoch perhaps. */
static void publish(void)
{
    slice_packets = 0;
    for (uint32_t s = 0; s < slices; s++) slice_packets = max(slice_packets, (start[s + 1] - start[s] + 5) / 6);
    k = start[slices], packets = slices * slice_packets;
    value = (uint16_t *)malloc(experts * k * sizeof *value);
    for (uint32_t i = 0; i < experts * k; i++) value[i] = (uint16_t)(lanes_random(2) << 15 | (100 + lanes_random(40)) << 7 | lanes_random(128));
    exchange = lanes_exchange_open(experts * packets + MK_PAIR_MOST); /* memory goes on */
    memset(lanes_late, 0, lanes_packets * sizeof *lanes_late);
    memset(words, 0, sizeof words);
    mk_pair_table(words, start, packets, slice_packets);
    for (uint32_t i = 0; i < lanes_packets; i++) {
        exchange[i] = make_uint4(lanes_random(~0u), lanes_random(~0u), lanes_random(~0u), EPOCH - lanes_random(2));
        if (i >= experts * packets) continue;
        const uint32_t pair = i / packets, q = i % packets, s = q / slice_packets, first = start[s] + q % slice_packets * 6, n = first < start[s + 1] ? min(start[s + 1] - first, 6u) : 0;
        if (!n) continue;
        uint16_t v[6] = {};
        memcpy(v, value + pair * k + first, n * sizeof *v);
        memcpy(&exchange[i], v, sizeof v);
        exchange[i].w = EPOCH;
        lanes_late[i] = lanes_random(3) ? 0 : lanes_random(40);
    }
}
static void unpublish(void)
{
    free(value), lanes_exchange_close();
}

/* As mk_down_one stages them. */
template <uint32_t FORM, uint32_t LOADS> static void stage(void)
{
    constexpr uint32_t PART = mk_pair_part(LOADS);
    const mk_dev here = mk_here(&lanes_shared->fed[0].in), *d = &here;
    const mk_fed *f = mk_fed_of(d->in);
    const uint32_t per = f->plan.packets, stride = mk_row_stride(k), staged = mk_smem(d->sh->staging) + MK_PAIR_HEAD;
    const bool both = per <= 32 * (LOADS - PART);
    const uint4 *from = exchange + d->warp * per + d->lane;
    for (uint32_t j = d->warp; j < experts; j += MK_WARPS) {
        uint4 q[LOADS];
        uint32_t map[mk_pair_words(LOADS)];
        mk_pair_ask(q, from, both ? (j + MK_WARPS < experts ? from + MK_WARPS * per : exchange) : per > 32 * PART ? from + 32 * PART : exchange);
        mk_pair_map(map, (const uint4 *)words + d->lane * (MK_PAIR_WORDS / 4));
        for (uint32_t pair = 0; pair < (both ? 2u : 1u) && j < experts; pair++) {
            if (pair) j += MK_WARPS, from += MK_WARPS * per;
            if (j < experts) mk_pair_take<FORM>(d, f, from, j * per + d->lane, weight[j], staged + j * stride, both, map, q);
        }
        from += MK_WARPS * per;
    }
}

static uint32_t wrong(bool fp8)
{
    const uint32_t stride = mk_row_stride(k), whole = (k + 63) & ~63u;
    uint32_t bad = 0;
    for (uint32_t j = 0; j < experts; j++) {
        const uint8_t *row = lanes_shared->staging + MK_PAIR_HEAD + j * stride;
        uint32_t top = 0;
        for (uint32_t i = 0; fp8 && i < k; i++) top = max(top, value[j * k + i] & 0x7fffu);
        const mk_f16_shift shift = mk_f16_shift_of(top);
        const float factor = fp8 ? weight[j] * shift.inverse : weight[j];
        bad += memcmp(row - MK_PAIR_FACTOR, &factor, 4) != 0;
        for (uint32_t i = 0; i < whole; i++) {
            const uint32_t v = i < k ? value[j * k + i] : 0;
            uint16_t found;
            memcpy(&found, row + 2 * i, 2);
            bad += found != (fp8 ? mk_f16_pair_shifted(v, shift.less) & 0xffffu : v);
        }
    }
    return bad;
}

template <uint32_t FORM, uint32_t LOADS> static void check(void)
{
    const uint32_t room = (MK_STAGING - MK_PAIR_HEAD) / mk_row_stride(start[slices]);
    experts = min(1 + lanes_random(MK_MAX_TOPK), room);
    for (uint32_t j = 0; j < experts; j++) weight[j] = (float)(1 + lanes_random(1000)) / 1024;
    publish();
    if (packets <= 32 * LOADS && experts) {
        mk_shared *sh = lanes_shared;
        lanes_shared_draw();
        mk_fed *f = &sh->fed[0];
        memset(f, 0, sizeof *f);
        f->plan.packets = packets, f->in.expert.k = k, f->place.epoch[0] = EPOCH;
        const bool done = lanes_run(stage<FORM, LOADS>);
        const uint32_t bad = done ? wrong(FORM == MK_X_F16) : 0;
        if (!done || bad) fail_msg("%u pairs of %u values in %u slices of up to %u packets, %u a lane: %u are wrong; %s", experts, k, slices, slice_packets, LOADS, bad, lanes.error);
        mixes++;
    }
    unpublish();
}
static void check_all(void)
{
    check<MK_X_F16, MK_PAIR_PACKETS(16) / 32>();
    check<MK_X_BF16, MK_PAIR_PACKETS(16) / 32>();
    check<MK_X_F16, MK_PAIR_PACKETS(32) / 32>();
    check<MK_X_BF16, MK_PAIR_PACKETS(32) / 32>();
}

/* Few slices and many, of up to seven packets. */
static void test_alike(void **)
{
    for (uint32_t n = 2; n <= 40; n += 2)
        for (slices = 1; slices <= MK_PAIR_MOST / ((n + 5) / 6); slices = slices * 3 + lanes_random(3)) {
            for (uint32_t s = 0; s <= slices; s++) start[s] = s * n;
            check_all();
        }
}
/* No two slices alike. */
static void test_random(void **)
{
    mixes = 0;
    for (uint32_t i = 0; i < 150; i++) {
        const uint32_t most = 1 + lanes_random(12), per = (2 * most + 5) / 6;
        slices = 1 + lanes_random(MK_PAIR_MOST / per);
        for (uint32_t s = 0; s < slices; s++) start[s + 1] = start[s] + 2 * (1 + lanes_random(most));
        check_all();
    }
    assert_true(mixes > 350);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_alike), cmocka_unit_test(test_random)};
    lanes_shared_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
