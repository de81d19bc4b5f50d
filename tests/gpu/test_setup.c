/* Set-up on the GPU: tapes packed by kernels against those that the CPU packs, byte by byte, for every family and way of storing weights; what is
 * refused; products over heads; the self-test; how fast a model of real size is packed. A JSON report goes to $OUT/setup.json ($OUT unset: the working directory).
 *   test_setup [-q] [-t PATTERN]      -q: nothing large (under compute-sanitizer); -t: only the tests of these names */
#include "host/absorb.h"
#include "host/pack.h"
#include "host/synth.h"
#include "megakernel/derive.h"
#include "megakernel/gpu.h"
#include "megakernel/selftest.h"
#include "tests/support/edit.h"
#include "tests/support/packed.h"
#include "tests/support/tmp.h"

#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cuda_runtime_api.h>

#include <cmocka.h>

static int quick;
static uint32_t sms;
static FILE *report;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The weight regions on the device, zeros. */
static void device_memory(const mk_program_info *i, mk_memory *d)
{
    memset(d, 0, sizeof *d);
    uint64_t n[3] = {i->tape_bytes + 256, i->expert_bytes + 256, i->embed_bytes + 256};
    uint8_t **p[3] = {&d->tape, &d->expert, &d->embed};
    for (int k = 0; k < 3; k++)
        if (cudaMalloc((void **)p[k], n[k]) || cudaMemset(*p[k], 0, n[k])) fail_msg("%llu bytes of GPU memory", (unsigned long long)n[k]);
}
static void device_free(mk_memory *d)
{
    cudaFree(d->tape);
    cudaFree(d->expert);
    cudaFree(d->embed);
}

static void family(const char *name, const char *dir, packed_as as, void *arg)
{
    uint32_t *total = arg;
    const uint32_t workers[2] = {3, 29};
    for (int k = 0; k < 2; k++) {
        packed *c = packed_open(dir, as, workers[k]);
        const mk_program_info *i = &c->plan->prog->info;
        mk_memory d, back;
        double seconds;
        uint64_t bytes;
        device_memory(i, &d);
        packed_memory(c->plan->prog, &back);
        if (mk_pack_gpu(c->plan, c->ck, &d, &seconds, &bytes, &c->err)) fail_msg("%s: %s", name, c->err.msg);
        if (cudaMemcpy(back.tape, d.tape, i->tape_bytes, cudaMemcpyDeviceToHost) || cudaMemcpy(back.expert, d.expert, i->expert_bytes, cudaMemcpyDeviceToHost) ||
            cudaMemcpy(back.embed, d.embed, i->embed_bytes, cudaMemcpyDeviceToHost))
            fail_msg("%s: cannot read it back", name);
        packed_same(name, c->plan, &c->mem, &back);
        device_free(&d);
        packed_memory_free(&back);
        packed_close(&c);
        ++*total;
    }
}

static void same_bytes(void **state)
{
    (void)state;
    uint32_t total = 0;
    packed_each(family, &total);
    print_message("%u tapes are the CPU's, byte for byte\n", total);
    fprintf(report, "  \"tapes_identical\": %u,\n", total);
}

/* One weight that is no number, in the tensor that `arg` names. */
static void poison(void *arg, mk_edit_tensor *t)
{
    if (!strstr(t->name, arg)) return;
    t->v[t->shape[1] + 3] = (float)(0.0 / 0.0);
    t->changed = 1;
}

static void refused(void **state)
{
    (void)state;
    const char *const names[] = {"layers.1.mlp.experts.3.up_proj", "embed_tokens", "kv_b_proj"};
    for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
        char *dir = mk_tmp_dir();
        mk_err err = {0}, want = {0};
        mk_model *m;
        mk_checkpoint *ck;
        mk_plan *plan;
        mk_memory d, host;
        double seconds;
        uint64_t bytes;
        mk_plan_config pc = {.workers = 7, .max_context = 256, .kv_pages = 8, .state_slots = 2};
        if (mk_edit_checkpoint("tests/oracle/deepseek_v3", dir, MK_ST_BF16, poison, (void *)(uintptr_t)names[k], &err) || mk_model_read(dir, &m, &err) ||
            mk_checkpoint_open(dir, &ck, &err) || mk_model_resolve(m, ck, MK_WEIGHTS_FP8, &err) || mk_plan_make(m, &pc, &plan, &err))
            fail_msg("%s", err.msg);
        device_memory(&plan->prog->info, &d);
        packed_memory(plan->prog, &host);
        int rc = mk_pack_gpu(plan, ck, &d, &seconds, &bytes, &err);
        print_message("%s\n", err.msg);
        assert_int_equal(rc, MK_E_MODEL);
        assert_non_null(strstr(err.msg, names[k]));
        assert_non_null(strstr(err.msg, "row 1, column 3: the weight is not finite"));
        assert_int_equal(mk_pack(plan, ck, &host, &want), MK_E_MODEL);
        device_free(&d);
        packed_memory_free(&host);
        mk_plan_destroy(&plan);
        mk_checkpoint_close(&ck);
        mk_model_destroy(&m);
        mk_tmp_remove(&dir);
    }
}

/* ---- products over heads --------------------------------------------------------------------------------------------- */

static uint64_t seed = 1;
static float uniform(void)
{
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (float)(int32_t)(seed >> 32) * 0x1p-31f;
}

/* n random values on the device, and as floats on the host. */
static void *operand(uint64_t n, int bf16, float **host)
{
    void *d, *raw = malloc(n * 4);
    *host = malloc(n * sizeof **host);
    if (!raw || !*host || cudaMalloc(&d, n * 4)) fail_msg("out of memory");
    for (uint64_t i = 0; i < n; i++) {
        uint16_t h = mk_narrow_bf16(uniform());
        (*host)[i] = bf16 ? mk_widen_bf16(h) : uniform();
        if (bf16)
            ((uint16_t *)raw)[i] = h;
        else
            ((float *)raw)[i] = (*host)[i];
    }
    cudaMemcpy(d, raw, n * (bf16 ? 2 : 4), cudaMemcpyHostToDevice);
    free(raw);
    return d;
}

typedef struct product {
    const char *name;
    uint32_t heads, group, m, n, k;
    int bf16, transposed;
    uint64_t a_head, a_off; /* a_head 0: m * k */
    int plain;              /* A and B of two types: what cuBLAS does not take, as where there is none */
} product;

static void heads(void **state)
{
    (void)state;
    static const product all[] = {
        {"32 query heads over 4 KV heads of 128, 130 tokens", 32, 8, 130, 1, 128, 1, 0, 0, 0, 0},
        {"16 query heads over 2 KV heads of 256, 77 tokens", 16, 8, 77, 8, 256, 0, 0, 0, 0, 0},
        {"W_UK of kimi-linear: 32 heads, 128 -> 512, as kv_b stores it", 32, 1, 512, 8, 128, 1, 1, 256 * 512, 0, 0},
        {"W_UV of kimi-linear: 32 heads, 512 -> 128, as kv_b stores it", 32, 1, 128, 8, 512, 1, 0, 256 * 512, 128 * 512, 0},
        {"W_UK of GLM-5.2: 64 heads, 192 -> 512", 64, 1, 512, 1, 192, 0, 1, 448 * 512, 0, 0},
        {"7 heads of their own, odd sizes", 7, 1, 33, 3, 19, 0, 0, 0, 0, 0},
        {"plain kernel: 32 query heads over 4 KV heads of 128", 32, 8, 130, 1, 128, 1, 0, 0, 0, 1},
        {"plain kernel: W_UK of kimi-linear", 32, 1, 512, 8, 128, 1, 1, 256 * 512, 0, 1},
    };
    mk_err err = {0};
    mk_blas *b[2];
    size_t free0, free1, total;
    cudaMemGetInfo(&free0, &total);
    if (mk_blas_open(NULL, &b[0], &err)) fail_msg("%s", err.msg);
    print_message("%s\n", mk_blas_name(b[0]));
    fprintf(report, "  \"heads_by\": \"%s\",\n", mk_blas_name(b[0]));
    /* A library that is not there is an error when it is named, with the name. */
    assert_int_equal(mk_blas_open("/nowhere/libcublas.so.13", &b[1], &err), MK_E_DEVICE);
    assert_non_null(strstr(err.msg, "/nowhere/libcublas.so.13"));
    mk_blas_close(&b[1]);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const product *p = &all[i];
        uint64_t a_head = p->a_head ? p->a_head : (uint64_t)p->m * p->k, groups = p->heads / p->group, bn = (uint64_t)p->k * p->n, cn = (uint64_t)p->m * p->n;
        float *A, *B, *C = malloc(p->heads * cn * 4);
        void *c, *ptr, *back[3 * 64];
        uint8_t *a = operand(groups * a_head, p->bf16, &A);
        const int b_bf16 = p->bf16 && !p->plain;
        mk_heads h = {p->heads, p->group, p->m, p->n, p->k, p->bf16, b_bf16, p->transposed, a + p->a_off * (p->bf16 ? 2 : 4), operand(p->heads * bn, b_bf16, &B), NULL,
                      p->transposed ? p->m : p->k, p->n, p->n, a_head, bn, cn};
        double worst = 0, scale = 0;
        if (cudaMalloc(&c, p->heads * cn * 4) || cudaMemset(c, 0xff, p->heads * cn * 4) || cudaMalloc(&ptr, sizeof back)) fail_msg("GPU memory");
        h.c = c;
        if (mk_blas_pointers(&h, ptr, &err)) fail_msg("%s", err.msg);
        cudaMemcpy(back, ptr, 3 * p->heads * sizeof *back, cudaMemcpyDeviceToHost);
        for (uint32_t k = 0; k < p->heads; k++) {
            assert_ptr_equal(back[k], (const uint8_t *)h.a + k / p->group * a_head * (p->bf16 ? 2 : 4));
            assert_ptr_equal(back[p->heads + k], (const uint8_t *)h.b + k * bn * (b_bf16 ? 2 : 4));
            assert_ptr_equal(back[2 * p->heads + k], h.c + k * cn);
        }
        if (mk_blas_heads(b[0], &h, &err)) fail_msg("%s: %s", p->name, err.msg);
        cudaMemcpy(C, c, p->heads * cn * 4, cudaMemcpyDeviceToHost);
        for (uint32_t k = 0; k < p->heads; k++)
            for (uint32_t x = 0; x < p->m; x++)
                for (uint32_t y = 0; y < p->n; y++) {
                    double sum = 0;
                    const float *w = A + k / p->group * a_head + p->a_off, *v = B + k * bn;
                    for (uint32_t j = 0; j < p->k; j++) sum += (double)w[p->transposed ? (uint64_t)j * p->m + x : (uint64_t)x * p->k + j] * (double)v[j * p->n + y];
                    double e = fabs((double)C[k * cn + x * p->n + y] - sum);
                    worst = e > worst || e != e ? e : worst;
                    scale += sum * sum;
                }
        scale = sqrt(scale / (double)(p->heads * cn));
        print_message("%s: error %.1e of the rms %.1f\n", p->name, worst / scale, scale);
        if (!(worst / scale < 1e-5)) fail_msg("%s: error %.3g of the rms, limit 1e-5 (FP32 sums; TF32 would be 1e-3)", p->name, worst / scale);
        cudaFree((void *)(uintptr_t)a), cudaFree((void *)(uintptr_t)h.b), cudaFree(c), cudaFree(ptr);
        free(A), free(B), free(C);
    }
    mk_blas_close(&b[0]);
    cudaMemGetInfo(&free1, &total);
    print_message("GPU memory that cuBLAS keeps after it is closed: %.1f MB\n", ((double)free0 - (double)free1) * 1e-6);
}

/* ---- self-test ------------------------------------------------------------------------------------------------------- */

static void say(const char *line)
{
    print_message("  %s\n", line);
}

/* A program on the GPU: of a checkpoint, or with random weights when dir is a config.json. NULL: the kernel does not run it (yet). */
typedef struct loaded {
    mk_checkpoint *ck;
    mk_model *model;
    mk_plan *plan;
    mk_gpu *gpu;
    mk_err err;
} loaded;
static int load(loaded *m, const char *dir, uint32_t workers, enum mk_weights_mode mode, uint32_t slots, uint32_t context)
{
    mk_memory d;
    double seconds;
    uint64_t bytes;
    memset(m, 0, sizeof *m);
    mk_plan_config pc = {.workers = workers, .max_context = context, .kv_pages = (context + MK_PAGE - 1) / MK_PAGE * slots, .state_slots = slots, .smem_limit = 227 * 1024};
    mk_gpu_config gc = {.slots = slots, .context = context};
    if (mk_model_read(dir, &m->model, &m->err) || (!strstr(dir, "config.json") && mk_checkpoint_open(dir, &m->ck, &m->err)) ||
        mk_model_resolve(m->model, m->ck, mode, &m->err) || mk_plan_make(m->model, &pc, &m->plan, &m->err))
        fail_msg("%s: %s", dir, m->err.msg);
    int rc = mk_gpu_new(m->plan->prog, &gc, &m->gpu, &m->err);
    if (rc == MK_E_PROGRAM) {
        print_message("  %s: %s\n", dir, m->err.msg);
    } else if (rc) {
        fail_msg("%s: %s", dir, m->err.msg);
    } else if (!m->ck) {
        if (mk_synthesize(m->plan, m->gpu, &m->err)) fail_msg("%s", m->err.msg);
    } else {
        float *param = calloc(m->plan->prog->info.param_floats + 1, 4);
        mk_gpu_memory(m->gpu, &d);
        if (!param || mk_pack_params(m->plan, m->ck, param, &m->err) || mk_gpu_upload_params(m->gpu, param, 0, m->plan->prog->info.param_floats, &m->err) ||
            mk_pack_gpu(m->plan, m->ck, &d, &seconds, &bytes, &m->err))
            fail_msg("%s", m->err.msg);
        free(param);
    }
    return rc;
}
static void unload(loaded *m)
{
    mk_gpu_destroy(&m->gpu);
    mk_checkpoint_close(&m->ck);
    mk_plan_destroy(&m->plan);
    mk_model_destroy(&m->model);
}

static uint32_t failures; /* every model is tried before the test fails */

static void self_test_of(const char *name, const char *dir, uint32_t workers, enum mk_weights_mode mode, uint32_t slots, uint32_t context, uint32_t seeds)
{
    loaded m;
    if (!load(&m, dir, workers, mode, slots, context))
        for (uint64_t s = 1; s <= seeds; s++) {
            mk_selftest_report r;
            mk_absorb *a = NULL;
            mk_selftest_config c = {.seed = s, .log = s == 1 ? say : NULL};
            if (m.ck) {
                if (mk_blas_open(NULL, &c.blas, &m.err) || mk_absorb_new(m.plan, m.ck, &a, &m.err)) fail_msg("%s", m.err.msg);
                c.heads = mk_absorb_heads;
                c.arg = a;
            }
            if (mk_selftest(m.gpu, m.plan->prog, &c, &r, &m.err)) {
                print_error("%s, seed %llu: %s\n", name, (unsigned long long)s, m.err.msg);
                failures++;
                mk_absorb_destroy(&a);
                mk_blas_close(&c.blas);
                break;
            }
            for (uint32_t l = 0, latent = 0; l < m.model->layers && m.ck; l++) {
                if (m.model->layer[l].mixer == MK_MIX_MLA) latent = m.model->layer[l].mla.qt.source ? 1 : 2; /* W_UK, where it is a matrix of its own, and W_UV */
                if (l + 1 == m.model->layers) assert_int_equal(r.absorbed, latent);
            }
            mk_absorb_destroy(&a);
            mk_blas_close(&c.blas);
            print_message("%s, seed %llu: %u kinds of instructions, %llu values, %u against the checkpoint, %.2f s, worst %.2f of its tolerance: %s\n", name, (unsigned long long)s, r.kinds,
                          (unsigned long long)r.values, r.absorbed, r.seconds, r.worst, r.worst_at);
            if (s == 1)
                fprintf(report, "  \"selftest_%s\": {\"kinds\": %u, \"values\": %llu, \"seconds\": %.3f, \"worst_of_tolerance\": %.3f},\n", name, r.kinds,
                        (unsigned long long)r.values, r.seconds, r.worst);
        }
    unload(&m);
}

static void self_test(void **state)
{
    (void)state;
    self_test_of("kimi_linear-tiny", "tests/oracle/kimi_linear", sms, MK_WEIGHTS_AUTO, 8, 1024, 8);
    self_test_of("kimi_linear-tiny-2-streams", "tests/oracle/kimi_linear", sms, MK_WEIGHTS_FP8, 2, 256, 1);
    self_test_of("deepseek_v3-tiny", "tests/oracle/deepseek_v3", sms, MK_WEIGHTS_AUTO, 8, 1024, 8);
    self_test_of("moonlight-tiny", "tests/oracle/moonlight", sms, MK_WEIGHTS_AUTO, 1, 512, 8);
    self_test_of("glm4_moe_lite-tiny", "tests/oracle/glm4_moe_lite", sms, MK_WEIGHTS_BF16, 8, 1024, 8);
    self_test_of("qwen3_next-tiny", "tests/oracle/qwen3_next", 60, MK_WEIGHTS_AUTO, 8, 1024, 8);
    self_test_of("llama-tiny", "tests/oracle/llama", sms, MK_WEIGHTS_AUTO, 8, 1024, 8);
    assert_int_equal(failures, 0);
}

static void self_test_real(void **state)
{
    (void)state;
    if (quick) skip();
    failures = 0;
    self_test_of("kimi-linear-48b", "tests/fixtures/configs/kimi-linear-48b-a3b/config.json", sms, MK_WEIGHTS_FP8, 8, 8192, 1);
    self_test_of("moonlight-16b", "tests/fixtures/configs/moonlight-16b-a3b/config.json", sms, MK_WEIGHTS_FP8, 8, 8192, 1);
    self_test_of("qwen3-coder-next-80b", "tests/fixtures/configs/qwen3-coder-next-fp8/config.json", sms, MK_WEIGHTS_AUTO, 8, 8192, 1);
    self_test_of("llama-3.1-8b", "tests/fixtures/configs/llama-3.1-8b/config.json", sms, MK_WEIGHTS_AUTO, 8, 8192, 60); /* one in twelve found a stage that was left too soon */
    assert_int_equal(failures, 0);
}

/* The test must be able to fail: the plain kernels are told another truth than the resident kernel was. */
static void self_test_fails(void **state)
{
    (void)state;
    loaded m;
    if (load(&m, "tests/oracle/kimi_linear", sms, MK_WEIGHTS_AUTO, 8, 1024)) fail_msg("%s", m.err.msg);
    const mk_program *p = m.plan->prog;
    mk_program other = *p;
    uint64_t *base = malloc((p->info.workers + 1) * sizeof *base);
    uint32_t *start = malloc((p->info.n_start + 1) * sizeof *start), vec = 0;
    mk_selftest_report r;
    const mk_selftest_config c = {.seed = 1};
    memcpy(base, p->tape_base, (p->info.workers + 1) * sizeof *base);
    memcpy(start, p->start, p->info.n_start * sizeof *start);
    base[5] += 128; /* weights of one worker are elsewhere */
    other.tape_base = base;
    assert_int_equal(mk_selftest(m.gpu, &other, &c, &r, &m.err), MK_E_DEVICE);
    print_message("weights of worker 5 moved by 128 bytes: %s\n", m.err.msg);
    assert_non_null(strstr(m.err.msg, "self-test: GEMV"));
    other.tape_base = p->tape_base;
    while (strcmp(p->vec[vec].name, "h")) vec++;
    other.start = start;
    start[p->vec[vec].start_index + 7]++; /* a slice of h begins one value later */
    assert_int_equal(mk_selftest(m.gpu, &other, &c, &r, &m.err), MK_E_DEVICE);
    print_message("slice 7 of h moved by a value: %s\n", m.err.msg);
    other = *p;
    other.info.kv_page_bytes -= 128; /* cache pages */
    assert_int_equal(mk_selftest(m.gpu, &other, &c, &r, &m.err), MK_E_DEVICE);
    print_message("cache pages shorter by 128 bytes: %s\n", m.err.msg);
    if (mk_selftest(m.gpu, p, &c, &r, &m.err)) fail_msg("%s", m.err.msg);
    free(base);
    free(start);
    unload(&m);
}

/* ---- real size ------------------------------------------------------------------------------------------------------- */

typedef struct header {
    FILE *f;
    uint64_t at;
    uint32_t n;
    const mk_model *m;
} header;

static void describe(void *arg, mk_mat *mat)
{
    header *h = arg;
    uint32_t experts = strstr(mat->tensor, "%u") ? 0 : 1;
    uint64_t rows = mat->n, cols = mat->k;
    if (mat->source == MK_SRC_HEAD_T) {
        if (mat->head_n != mat->head_stride) return; /* the tensor of its HEAD_ROWS half */
        rows = mat->k, cols = mat->n;                /* a router */
    }
    if (mat->source == MK_SRC_HEAD_ROWS) rows = rows / mat->head_n * mat->head_stride;
    if (!experts)
        for (uint32_t l = 0; l < h->m->layers; l++)
            if (h->m->layer[l].ffn == MK_FFN_MOE) experts = h->m->layer[l].moe.experts;
    for (uint32_t e = 0; e < experts; e++) {
        const char *at = strstr(mat->tensor, "%u");
        fprintf(h->f, "%s\"", h->n++ ? "," : "");
        if (at)
            fprintf(h->f, "%.*s%u%s", (int)(at - mat->tensor), mat->tensor, e, at + 2);
        else
            fprintf(h->f, "%s", mat->tensor);
        fprintf(h->f, "\":{\"dtype\":\"BF16\",\"shape\":[%llu,%llu],\"data_offsets\":[%llu,%llu]}", (unsigned long long)rows, (unsigned long long)cols,
                (unsigned long long)h->at, (unsigned long long)(h->at + rows * cols * 2));
        h->at += rows * cols * 2;
    }
}

/* Matrices of a published model in BF16, a file of zeros in memory (/dev/shm): what is measured is the way of the bytes, not their values. */
static void real_size(void **state)
{
    (void)state;
    const char *path = "/dev/shm/mkd-test-setup.safetensors", *config = "tests/fixtures/configs/moonlight-16b-a3b/config.json";
    mk_err err = {0};
    mk_model *m;
    mk_checkpoint *ck;
    char *text = NULL;
    size_t n = 0;
    header h = {0};
    size_t room = 0, memory = 0;
    if (quick) skip();
    cudaMemGetInfo(&room, &memory);
    if (room < 60ull << 30) {
        print_message("%zu bytes of GPU memory are free, 60 GB are needed\n", room);
        skip();
    }
    if (mk_model_read(config, &m, &err)) fail_msg("%s", err.msg);
    h.m = m;
    h.f = open_memstream(&text, &n);
    fputc('{', h.f);
    mk_model_mats(m, describe, &h);
    fputc('}', h.f);
    while (ftell(h.f) % 8) fputc(' ', h.f);
    fclose(h.f);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    uint64_t length = n;
    if (fd < 0 || write(fd, &length, 8) != 8 || write(fd, text, n) != (ssize_t)n || posix_fallocate(fd, 0, (off_t)(8 + n + h.at))) {
        unlink(path);
        print_message("/dev/shm has no room for %.1f GB\n", (double)h.at * 1e-9);
        skip();
    }
    close(fd);
    free(text);
    int rc = mk_checkpoint_open_file(path, &ck, &err);
    unlink(path);
    if (rc) fail_msg("%s", err.msg);
    const struct {
        const char *name;
        enum mk_weights_mode mode;
    } how[] = {{"bf16", MK_WEIGHTS_AUTO}, {"fp8", MK_WEIGHTS_FP8}, {"fp8, again", MK_WEIGHTS_FP8}};
    for (int k = 0; k < 3; k++) {
        mk_plan *plan;
        mk_memory d;
        double seconds, begin;
        uint64_t bytes;
        mk_plan_config pc = {.workers = sms, .max_context = 2048, .kv_pages = 32, .state_slots = 1};
        if (mk_model_resolve(m, NULL, how[k].mode, &err) || mk_plan_make(m, &pc, &plan, &err)) fail_msg("%s", err.msg);
        device_memory(&plan->prog->info, &d);
        cudaDeviceSynchronize();
        begin = now();
        if (mk_pack_gpu(plan, ck, &d, &seconds, &bytes, &err)) fail_msg("%s", err.msg);
        double all = now() - begin;
        print_message("moonlight-16b, BF16 -> %s: %.1f GB in %.2f s (%.2f with what is around it), %.1f GB/s\n", how[k].name, (double)bytes * 1e-9, seconds, all,
                      (double)bytes * 1e-9 / seconds);
        fprintf(report, "  \"moonlight_16b_bf16_to_%s\": {\"bytes\": %llu, \"seconds\": %.3f, \"gb_s\": %.1f},\n", k == 2 ? "fp8_again" : how[k].name,
                (unsigned long long)bytes, seconds, (double)bytes * 1e-9 / seconds);
        device_free(&d);
        mk_plan_destroy(&plan);
    }
    mk_checkpoint_close(&ck);
    mk_model_destroy(&m);
}

int main(int argc, char **argv)
{
    mk_gpu_info info;
    mk_err err = {0};
    const char *out = getenv("OUT");
    char path[4096];
    int c;
    while ((c = getopt(argc, argv, "qt:")) != -1) {
        if (c == 'q')
            quick = 1;
        else if (c == 't')
            cmocka_set_test_filter(optarg);
        else
            return 2;
    }
    if (mk_gpu_probe(0, &info, &err)) {
        fprintf(stderr, "test_setup: %s\n", err.msg);
        return 1;
    }
    sms = info.sms;
    snprintf(path, sizeof path, "%s/setup.json", out ? out : ".");
    if (!(report = fopen(path, "w"))) {
        fprintf(stderr, "test_setup: cannot write %s\n", path);
        return 1;
    }
    fprintf(report, "{\n");
    const struct CMUnitTest tests[] = {cmocka_unit_test(same_bytes), cmocka_unit_test(refused), cmocka_unit_test(heads), cmocka_unit_test(self_test),
                                       cmocka_unit_test(self_test_fails), cmocka_unit_test(self_test_real), cmocka_unit_test(real_size)};
    int bad = cmocka_run_group_tests(tests, NULL, NULL);
    fprintf(report, "  \"device\": \"%s\",\n  \"failed\": %d\n}\n", info.name, bad);
    fclose(report);
    return bad != 0;
}
