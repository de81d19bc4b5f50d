#include "tests/support/gqa_edits.h"

#include <stdlib.h>
#include <string.h>

static uint64_t width(const mk_edit_tensor *t)
{
    return mk_edit_size(t) / t->shape[0];
}

static float *copy(const mk_edit_tensor *t)
{
    float *was = malloc(mk_edit_size(t) * sizeof *was);
    assert_non_null(was);
    memcpy(was, t->v, mk_edit_size(t) * sizeof *was);
    return was;
}

void mk_edit_interleave(mk_edit_tensor *t, uint32_t stride, uint32_t rope)
{
    uint64_t k = width(t);
    float *was = copy(t);
    for (uint64_t h = 0; h < t->shape[0]; h += stride)
        for (uint32_t i = 0; i < rope / 2; i++) {
            memcpy(t->v + (h + i) * k, was + (h + 2 * i) * k, k * sizeof *was);
            memcpy(t->v + (h + i + rope / 2) * k, was + (h + 2 * i + 1) * k, k * sizeof *was);
        }
    free(was);
    t->changed = 1;
}

void mk_edit_roll(mk_edit_tensor *t, uint64_t n)
{
    uint64_t k = width(t), rows = t->shape[0];
    float *was = copy(t);
    for (uint64_t i = 0; i < rows; i++) memcpy(t->v + (i + n) % rows * k, was + i * k, k * sizeof *was);
    free(was);
    t->changed = 1;
}

void mk_edit_swap(mk_edit_tensor *t, uint64_t stride, uint64_t off, uint64_t off2, uint64_t n)
{
    uint64_t k = width(t);
    float *was = copy(t);
    for (uint64_t h = 0; h < t->shape[0]; h += stride) {
        memcpy(t->v + (h + off) * k, was + (h + off2) * k, n * k * sizeof *was);
        memcpy(t->v + (h + off2) * k, was + (h + off) * k, n * k * sizeof *was);
    }
    free(was);
    t->changed = 1;
}

/* ---- Qwen3-Next ----------------------------------------------------------------------------------------------------- */

enum { DIM = 256, ROPE = 64, D = 128, K_HEADS = 2 };

static void plain_norm(void *arg, mk_edit_tensor *t) /* w instead of 1 + w */
{
    (void)arg;
    if (!mk_edit_has(t, "norm.weight") || mk_edit_has(t, "linear_attn.norm") || mk_edit_has(t, "visual")) return;
    for (uint64_t i = 0; i < mk_edit_size(t); i++) t->v[i] -= 1;
    t->changed = 1;
}
static void interleave(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    if (mk_edit_has(t, ".q_proj.weight")) mk_edit_interleave(t, 2 * DIM, ROPE);
    if (mk_edit_has(t, ".k_proj.weight") || mk_edit_has(t, "q_norm.weight") || mk_edit_has(t, "k_norm.weight")) mk_edit_interleave(t, DIM, ROPE);
}
static void swap_gate(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    if (mk_edit_has(t, ".q_proj.weight")) mk_edit_swap(t, 2 * DIM, 0, DIM, DIM);
}
static void drop_gate(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    for (uint64_t h = 0; mk_edit_has(t, ".q_proj.weight") && h < t->shape[0]; h += 2 * DIM)
        mk_edit_fill(t, (h + DIM) * t->shape[1], DIM * t->shape[1], 0);
}
static void swap_kv(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    if (mk_edit_has(t, ".k_proj.weight") || mk_edit_has(t, ".v_proj.weight")) mk_edit_roll(t, DIM);
}
static void swap_k_heads(void *arg, mk_edit_tensor *t) /* value heads with the other key head */
{
    (void)arg;
    if (mk_edit_has(t, "in_proj_qkvz.weight")) {
        uint64_t half = t->shape[0] / 2, n = 2 * D;
        mk_edit_swap(t, t->shape[0], 0, half, n);
    }
    if (mk_edit_has(t, "in_proj_qkv.weight") || mk_edit_has(t, "conv1d.weight")) {
        mk_edit_swap(t, t->shape[0], 0, D, D);
        mk_edit_swap(t, t->shape[0], K_HEADS * D, (K_HEADS + 1) * D, D);
    }
}
static void skip_decay(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    if (mk_edit_has(t, "A_log")) mk_edit_fill(t, 0, mk_edit_size(t), -60);
}
static void drop_dt_bias(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    if (mk_edit_has(t, "dt_bias")) mk_edit_fill(t, 0, mk_edit_size(t), 0);
}
static void reverse_conv(void *arg, mk_edit_tensor *t)
{
    (void)arg;
    for (uint64_t i = 0; mk_edit_has(t, "conv1d.weight") && i < mk_edit_size(t); i += 4)
        for (int k = 0; k < 2; k++) {
            float a = t->v[i + k];
            t->v[i + k] = t->v[i + 3 - k];
            t->v[i + 3 - k] = a;
            t->changed = 1;
        }
}
static void drop_shared_gate(void *arg, mk_edit_tensor *t) /* 1/2 instead of sigmoid(gate) */
{
    (void)arg;
    if (mk_edit_has(t, "shared_expert_gate.weight")) mk_edit_fill(t, 0, mk_edit_size(t), 0);
}

const mk_oracle_control mk_qwen_controls[] = {
    {.name = "nothing wrong", .right = 1, .as = MK_ST_BF16},
    {.name = "nothing wrong, FP8 kept", .right = 1, .as = MK_ST_F8_E4M3},
    {.name = "norms with w instead of 1 + w", .edit = plain_norm, .as = MK_ST_BF16},
    {.name = "rope interleaved", .edit = interleave, .as = MK_ST_BF16},
    {.name = "q and gate swapped", .edit = swap_gate, .as = MK_ST_BF16},
    {.name = "output gate dropped", .edit = drop_gate, .as = MK_ST_BF16},
    {.name = "GDN key heads swapped", .edit = swap_k_heads, .as = MK_ST_BF16},
    {.name = "decay skipped", .edit = skip_decay, .as = MK_ST_BF16},
    {.name = "dt_bias dropped", .edit = drop_dt_bias, .as = MK_ST_BF16},
    {.name = "convolution taps reversed", .edit = reverse_conv, .as = MK_ST_BF16},
    {.name = "KV heads swapped", .edit = swap_kv, .as = MK_ST_BF16},
    {.name = "shared gate dropped", .edit = drop_shared_gate, .as = MK_ST_BF16},
    {.name = "shared expert dropped", .edit = mk_drop_shared_experts, .as = MK_ST_BF16},
};
const size_t mk_qwen_controls_n = sizeof mk_qwen_controls / sizeof *mk_qwen_controls;
const size_t mk_qwen_controls_dense = sizeof mk_qwen_controls / sizeof *mk_qwen_controls - 3;
