/* The validator on programs broken on purpose: each is refused, by one line, for its own reason. */
#include "instructions/validate.h"
#include "tests/support/progbuild.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static void accepts(mk_program *p)
{
    mk_err err = {0};
    if (mk_validate(p, NULL, &err)) fail_msg("refused: %s", err.msg);
    mk_program_destroy(&p);
}

/* `where`: the instruction or vector that must be named; `why`: the reason. Destroys p. All of a test's cases are run. */
static int wrong;
static void refuses(mk_program *p, int line, const char *where, const char *why)
{
    mk_err err = {0};
    int rc = mk_validate(p, NULL, &err);
    if (rc == MK_OK)
        print_error("line %d: accepted, expected \"%s\"\n", line, why);
    else if (rc != MK_E_PROGRAM || err.code != MK_E_PROGRAM || !strstr(err.msg, why) || !strstr(err.msg, where) || strchr(err.msg, '\n') ||
             strlen(err.msg) >= sizeof err.msg - 1)
        print_error("line %d: code %d, expected \"%s\" at \"%s\", found: %s\n", line, rc, why, where, err.msg);
    else
        wrong--;
    wrong++;
    if (getenv("MK_TEST_SHOW")) print_message("    %s\n", err.msg);
    mk_program_destroy(&p);
}

static int none_wrong(void **state)
{
    (void)state;
    int n = wrong;
    wrong = 0;
    return n;
}

/* BREAK({ edits of p }, where, why): from the four-worker "DeMsMf" program. */
#define BREAK_OF(make, edit, where, why)                                                                               \
    do {                                                                                                               \
        mk_program *p = make;                                                                                          \
        edit;                                                                                                          \
        refuses(p, __LINE__, where, why);                                                                                        \
    } while (0)
#define BREAK(edit, where, why) BREAK_OF(pb_small(), edit, where, why)
#define VEC(name)               (&p->vec[pb_vec(p, name)])
#define IN(worker, OP, n)       pb_find(p, worker, MK_OP_##OP, n)
#define AT(in)                  ((uint32_t)((in)-p->insn) - p->queue[pb_worker(p, in)])

static void valid_programs(void **state)
{
    (void)state;
    static const char *const layers[] = {NULL, "Df", "Mf", "De", "Ds", "Me", "DeDeDe", "MfMfMfMs", "DfMf", "Kf", "KeDfKs"};
    for (size_t l = 0; l < sizeof layers / sizeof layers[0]; l++)
        for (uint32_t w = 1; w <= 16; w += w < 9 ? 1 : 7) {
            accepts(pb_make(&(pb_config){.workers = w, .layers = layers[l], .smem_limit = 200000}));
            accepts(pb_make(&(pb_config){.workers = w, .layers = layers[l], .act_f32 = 1}));
        }
    accepts(pb_make(&(pb_config){.workers = 7, .active = 4, .layers = "DfMf"})); /* three without work */
}

static void report(void **state)
{
    (void)state;
    mk_program *p = pb_make(&(pb_config){.workers = 4, .layers = "Df"});
    mk_validation v;
    mk_err err;
    assert_int_equal(mk_validate(p, &v, &err), MK_OK);
    assert_int_equal(v.insns[MK_OP_EMBED], 4);
    assert_int_equal(v.insns[MK_OP_DELTA_STEP], 4);
    assert_int_equal(v.insns[MK_OP_SCHEDULE], 1);
    assert_int_equal(v.publications, 10);
    /* h -> low -> fz -> o -> h -> ffn -> h -> stats, logits */
    assert_int_equal(v.exchanges, 8);
    uint32_t total = 0, most = 0;
    for (unsigned op = 0; op < MK_OP_COUNT; op++) total += v.insns[op];
    assert_int_equal(total, p->info.n_insn);
    for (uint32_t x = 0; x < p->info.n_insn; x++)
        if (mk_insn_smem(p, &p->insn[x]) > most) most = mk_insn_smem(p, &p->insn[x]);
    assert_int_equal(v.smem_max, most);
    assert_true(v.seconds > 0 && v.seconds < 5);
    mk_program_destroy(&p);
    p = pb_make(&(pb_config){.workers = 1, .layers = "Df"});
    assert_int_equal(mk_validate(p, &v, &err), MK_OK);
    assert_int_equal(v.exchanges, 0);
    mk_program_destroy(&p);
}

static void header(void **state)
{
    (void)state;
    BREAK(p->info.magic = 0, "program", "magic is 0x00000000");
    BREAK(p->info.version = 9, "program", "version 9, expected 5");
    BREAK(p->info.flags = 4, "program", "unknown flags 0x4");
    BREAK(p->info.smem_limit = 200000; p->info.flags = MK_PROG_ACT_F32, "program", "act=f32 is for the twin only");
    BREAK(p->info.workers = 0, "program", "workers is 0, expected 1 to 4096");
    BREAK(p->info.exchange_bytes = ~0ull, "program", "exchange_bytes");
    BREAK(p->info.hidden = 0, "program", "hidden is 0");
    BREAK(p->info.kv_layers = 9, "program", "kv_layers is 9, expected 0 to 3");
    BREAK(p->info.expert_part_bytes = 1, "program", "expert_part_bytes");
    BREAK(p->info.local_bytes += 8, "program", "expected a multiple of 16");
    BREAK(p->queue[0] = 1, "queue offsets", "the first is 1");
    BREAK(p->queue[2] = p->queue[1] - 1, "queue offsets", "worker 1 has");
    BREAK(p->queue[3] = 1u << 30, "queue offsets", "worker 2 has");
    BREAK(p->queue[4]--, "queue offsets", "expected");
    BREAK(p->tape_base[2] += 128, "tape of worker 2", "begins at");
    BREAK(p->info.tape_bytes_max += 128, "tape_bytes_max", "on one worker at most");
    BREAK(p->info.tape_bytes += 128, "tape_bytes", "the instructions consume");
}

static void vectors(void **state)
{
    (void)state;
    BREAK(memset(VEC("q")->name, 'x', 16), "vector", "its name is empty or has no end");
    BREAK(VEC("q")->scope = 3, "\"q\"", "scope 3");
    BREAK(VEC("q")->dtype = MK_FP8, "\"q\"", "type 2, expected f32 or bf16");
    BREAK_OF(pb_make(&(pb_config){.workers = 4, .act_f32 = 1}), VEC("q")->dtype = MK_BF16, "\"q\"", "expected f32 (the program is act=f32)");
    BREAK(VEC("q")->reserved = 1, "\"q\"", "reserved bytes");
    BREAK(VEC("route")->nslice = 1, "\"route\"", "reserved bytes");
    BREAK(VEC("h")->pubs = 0, "\"h\"", "0 publications a step, expected 1 to 1023");
    BREAK(VEC("h")->pubs = 1024, "\"h\"", "1024 publications a step, expected 1 to 1023");
    BREAK(VEC("h")->pubs = 1000, "\"h\"", "missing publication");
    BREAK(p->start[VEC("fz")->start_index] = 1, "\"fz\"", "the first slice starts at 1");
    BREAK(p->start[VEC("fz")->start_index + 2] = 0, "\"fz\"", "expected ascending starts");
    BREAK(VEC("fz")->width++, "\"fz\"", "the slices end at");
    BREAK(VEC("fz")->slice_packets--, "\"fz\"", "the longest slice needs");
    BREAK(VEC("o")->trailer = 1; VEC("o")->slice_packets = 1, "\"o\"", "the longest slice needs 2");
    BREAK(VEC("fz")->start_index = p->info.n_start - 2, "\"fz\"", "are outside the table");
    BREAK(VEC("fz")->start_index = 0xfffffff0u, "\"fz\"", "are outside the table");
    BREAK(VEC("fz")->nslice = 65536, "\"fz\"", "65536 slices");
    BREAK(VEC("stats")->offset += 1 << 20, "\"stats\"", "is outside the exchange region");
    BREAK(VEC("stats")->offset = ~0ull << 4, "\"stats\"", "is outside the exchange region");
    BREAK(VEC("stats")->offset += 8, "\"stats\"", "expected a multiple of 16");
    BREAK(VEC("stats")->offset -= 16, "\"stats\"", "overlaps vector");
    BREAK(VEC("stats")->slice_packets = 0x10000000u, "\"stats\"", "is outside the exchange region");
    BREAK(VEC("logits")->offset = 0, "\"", "in the bulk region");
    BREAK(VEC("logits")->width += 128, "\"logits\"", "is outside the bulk region");
    BREAK(VEC("acc")->offset = VEC("route")->offset, "\"", "in the local region");
    BREAK(VEC("route")->width += 1 << 20, "\"route\"", "is outside the local region");
    BREAK(VEC("logits")->counter = 7, "\"logits\"", "counter 7 is out of range");
    BREAK(VEC("logits")->counter = 0, "\"logits\"", "counter 0 belongs to another vector");
    BREAK(VEC("logits")->signals = 0, "\"logits\"", "0 signals a publication");
}

static void instruction_headers(void **state)
{
    (void)state;
    BREAK(IN(1, GEMV, 0)->opcode = MK_OP_COUNT, "worker 1 #1 ?", "is not legal, expected 0 to");
    BREAK(IN(1, GEMV, 0)->opcode = 2, "worker 1 #1 ?", "opcode 2 is unknown");
    BREAK(IN(1, GEMV, 0)->opcode = 255, "worker 1 #1 ?", "opcode 255 is not legal");
    BREAK(IN(1, GEMV, 0)->seq = 5, "worker 1 #1 GEMV layer 0", "sequence number 5, expected 1");
    BREAK(IN(1, GEMV, 0)->layer = 3, "worker 1 #1 GEMV layer 3", "expected one of the program's layers");
    BREAK(IN(1, EMBED, 0)->layer = 0, "worker 1 #0 EMBED", "layer 0, expected none");
    BREAK(IN(1, GEMV, 0)->flags = 2, "worker 1 #1 GEMV", "unknown flags 0x2");
    BREAK(IN(1, GEMV, 0)->pad = 7, "worker 1 #1 GEMV", "reserved bytes");
    BREAK(IN(1, EMBED, 0)->embed.pad[1] = 7, "worker 1 #0 EMBED", "reserved bytes");
    BREAK(IN(1, EMBED, 0)->payload[71] = 7, "worker 1 #0 EMBED", "what follows is not zero");
    BREAK(IN(1, EXPERT_UP, 0)->expert.t = 1, "EXPERT_UP", "reserved bytes");
    BREAK(IN(0, SCHEDULE, 0)->schedule.unused = 1, "SCHEDULE", "reserved bytes");
    BREAK(IN(1, GEMV, 0)->nwait = 4, "GEMV", "4 waits, expected at most 3");
    BREAK(memset(IN(1, GEMV, 0)->wait, 0, 8); IN(1, GEMV, 0)->wait[0].vec = MK_NONE; IN(1, GEMV, 0)->nwait = 0, "GEMV", "0 waits, expected 1");
    BREAK(IN(1, GEMV, 0)->wait[2].vec = 0, "GEMV", "wait 2 is not used");
    BREAK(IN(1, GEMV, 0)->wait[0].vec = 99, "GEMV", "names vector 99");
    BREAK(IN(1, GEMV, 0)->wait[0].pub = 900, "GEMV", "waits for h pub 900, it has");
    BREAK(IN(1, GEMV, 0)->wait[0].slice0 = 1, "GEMV", "waits for slices [1, 5) of h, which has 4");
    BREAK(IN(1, GEMV, 0)->wait[0].nslice = 0, "GEMV", "waits for slices [0, 0) of h");
    BREAK(IN(1, ROUTE, 0)->signal_vec = 99, "ROUTE", "signals vector 99");
    BREAK(IN(1, GEMV, 0)->signal_pub = 9, "GEMV", "publishes low pub 9, it has 1");
    BREAK(IN(1, GEMV, 0)->signal_slice = 4, "GEMV", "publishes slice 4 of low, which has 4");
    BREAK(IN(1, EXPERT_UP, 0)->signal_slice = 1, "EXPERT_UP", "publishes slice 1 of u");
    BREAK(IN(1, COMBINE, 0)->wait[0].nslice = 1, "COMBINE", "waited for as a whole");
    BREAK(IN(1, EXPERT_DOWN, 0)->wait[0].nslice--, "EXPERT_DOWN", "which is dynamic and waited for as a whole");
}

static void addresses(void **state)
{
    (void)state;
    BREAK(IN(2, GEMV, 1)->tape_off += 128, "worker 2 #2 GEMV layer 0", "tape offset");
    BREAK(IN(2, GEMV, 1)->tape_bytes -= 128, "worker 2 #2 GEMV layer 0", "bytes of tape, its segment has");
    BREAK(IN(2, ROUTE, 0)->tape_bytes = 128, "ROUTE", "consumes 128 bytes of tape, expected none");
    BREAK(IN(2, LM_HEAD, 0)->tape_bytes += 128, "LM_HEAD", "bytes of tape, its segment has");
    BREAK(IN(2, EMBED, 0)->embed.embed_off = 16, "EMBED", "is outside the embedding region");
    BREAK(IN(2, EMBED, 0)->embed.wtype = MK_F32, "EMBED", "is outside the embedding region");
    BREAK(IN(2, EMBED, 0)->embed.embed_off = ~15ull, "EMBED", "is outside the embedding region");
    BREAK(IN(2, GEMV, 0)->gemv.param_off = (uint32_t)p->info.param_floats - 31, "GEMV", "norm: parameters");
    BREAK(IN(2, GEMV, 0)->gemv.param_off = 0xffffffffu, "GEMV", "norm: parameters");
    BREAK(IN(2, DELTA_STEP, 0)->delta.param_off = (uint32_t)p->info.param_floats - 112, "DELTA_STEP", "convolution, A_log, dt_bias, o_norm: parameters");
    BREAK(IN(3, KV_APPEND, 0)->mla.param_off = (uint32_t)p->info.param_floats - 19, "KV_APPEND", "latent norm and rotation: parameters");
    BREAK(IN(3, ROUTE, 0)->route.param_off = (uint32_t)p->info.param_floats - 7, "ROUTE", "router bias: parameters");
    BREAK(IN(3, EXPERT_UP, 0)->expert.param_off = (uint32_t)p->info.param_floats - 31, "EXPERT_UP", "norm: parameters");
    BREAK(IN(3, LM_HEAD, 0)->lm_head.param_off = (uint32_t)p->info.param_floats - 31, "LM_HEAD", "norm: parameters");
    BREAK(IN(3, EXPERT_UP, 0)->expert.base = p->info.expert_bytes, "EXPERT_UP", "outside the expert region");
    BREAK(IN(3, EXPERT_UP, 0)->expert.base += 64, "EXPERT_UP", "expected multiples of 128");
    BREAK(IN(3, EXPERT_UP, 0)->expert.expert_stride -= 128, "EXPERT_UP", "do not fit");
    BREAK(IN(3, EXPERT_UP, 0)->expert.expert_stride = 1ull << 60, "EXPERT_UP", "outside the expert region");
    BREAK(IN(3, EXPERT_UP, 0)->expert.slice_stride -= 128, "EXPERT_UP", "the longest has");
    BREAK(IN(3, EXPERT_DOWN, 1)->expert.base += 1 << 20, "EXPERT_DOWN", "outside the expert region");
    BREAK(p->info.expert_bytes -= 128, "EXPERT_DOWN", "outside the expert region");
    BREAK(IN(1, DELTA_STEP, 0)->delta.state_off = p->info.state_slot_bytes, "DELTA_STEP", "outside a slot");
    BREAK(IN(1, DELTA_STEP, 0)->delta.state_off = ~15ull, "DELTA_STEP", "outside a slot");
    BREAK(IN(1, DELTA_STEP, 0)->delta.state_off = 4, "DELTA_STEP", "multiple of 16");
    BREAK(IN(1, DELTA_STEP, 0)->delta.state_off += 16, "worker", "state overlap");
    BREAK(IN(1, DELTA_STEP, 0)->delta.state_off = IN(3, DELTA_STEP, 0)->delta.state_off, "DELTA_STEP layer 0: state overlap", "DELTA_STEP layer 0");
    BREAK(IN(1, DELTA_STEP, 0)->delta.state_off -= 16, "worker", "state overlap");
    BREAK(IN(1, MLA_PARTIAL, 0)->mla.kv_off += 64, "MLA_PARTIAL", "cache pool at 64");
    BREAK(IN(1, MLA_PARTIAL, 0)->mla.kv_off = 2 * p->info.kv_pages * p->info.kv_page_bytes, "MLA_PARTIAL", "below 2 pools");
    BREAK(p->info.kv_page_bytes -= 64, "MLA", "a page of 64 tokens needs");
    BREAK_OF(pb_small(), VEC("partial")->width -= 128, "MLA_PARTIAL", "partials need");
    BREAK(VEC("logits")->width -= 128, "LM_HEAD", "logits need");
}

static void shapes(void **state)
{
    (void)state;
    BREAK(IN(1, GEMV, 0)->wait[0].nslice = 3, "worker 1 #1 GEMV", "reads its input, values [0, 32) of h, but waits for slices [0, 3)");
    BREAK(IN(1, GEMV, 2)->gemv.in_off = 8, "GEMV", "reads its input, values [8, 24) of low");
    BREAK(IN(1, GEMV, 0)->gemv.k = 31; IN(1, GEMV, 0)->gemv.k_chunk = 32, "GEMV", "k_chunk 32, expected k = 31");
    BREAK(IN(1, GEMV, 0)->gemv.k_chunk = 16, "GEMV", "k_chunk 16, expected k = 32 or a smaller multiple of 128");
    BREAK(IN(1, GEMV, 0)->gemv.n = 0, "GEMV", "0 x 1 matrix rows");
    BREAK(IN(1, GEMV, 0)->gemv.n = 129, "GEMV", "129 x 1 matrix rows, expected 1 to 128");
    BREAK(IN(1, GEMV, 0)->gemv.n = 0xffffffffu, "GEMV", "matrix rows, expected 1 to 128");
    BREAK(IN(1, GEMV, 0)->gemv.wtype = 0, "GEMV", "weights of type 0");
    BREAK(IN(1, GEMV, 0)->gemv.prologue = 3, "GEMV", "prologue 3");
    BREAK(IN(1, GEMV, 0)->gemv.eps = -1, "GEMV", "eps is -1");
    BREAK(IN(1, GEMV, 0)->gemv.n = 7; IN(1, GEMV, 0)->tape_bytes = 512, "GEMV", "publishes 7 values, slice 1 of low has 5");
    mk_program *p8 = pb_small();
    mk_insn *o = pb_publisher(p8, "h", 1, 2);
    assert_int_equal(o->gemv.wtype, MK_W_FP8);
    o->gemv.phase++;
    refuses(p8, __LINE__, "worker 2", "scales: phase 17 and 1 segments");
    BREAK(pb_publisher(p, "h", 1, 2)->gemv.nseg = 2, "worker 2", "scales: phase 16 and 2 segments");
    BREAK(pb_publisher(p, "h", 1, 2)->gemv.scale_k = 32, "worker 2", "scales cover 32 columns");
    BREAK(pb_publisher(p, "h", 1, 2)->wait[1].slice0 = 1, "worker 2", "adds values from 8 of h to values from 16 of h");
    BREAK(pb_publisher(p, "h", 1, 2)->wait[1].nslice = 2, "worker 2", "the residual must be one slice");
    BREAK(pb_publisher(p, "h", 1, 2)->gemv.norm_group = 5, "worker 2", "head norm over 5 values");
    BREAK(pb_publisher(p, "h", 1, 2)->gemv.norm_group = 4, "worker 2", "reaches over a head of 4 values");
    BREAK(IN(1, GEMV, 2)->gemv.prologue = MK_PRO_HEADNORM, "GEMV", "head norm needs trailers, low has none");
    BREAK(IN(1, GEMV, 1)->wait[0].pub = 1, "GEMV", "staged: #1 stages another input");
    BREAK(IN(1, GEMV, 0)->flags = MK_F_STAGED, "worker 1 #1 GEMV", "staged: there is no GEMV before it");
    BREAK(IN(3, DELTA_STEP, 0)->delta.q_off = 0, "DELTA_STEP", "reads q, values [0, 8) of qkv");
    BREAK(IN(3, DELTA_STEP, 0)->delta.k_off = 16, "DELTA_STEP", "reads k, values [16, 24) of qkv");
    BREAK(IN(3, DELTA_STEP, 0)->delta.v_off = 90, "DELTA_STEP", "reads v, values [90, 98) of qkv");
    BREAK(IN(1, DELTA_STEP, 0)->wait[0].nslice--, "DELTA_STEP", "reads v, values [72, 80) of qkv, but waits for slices");
    BREAK(IN(1, DELTA_STEP, 0)->delta.taps = 1, "DELTA_STEP", "1 taps");
    BREAK(IN(1, DELTA_STEP, 0)->delta.pad = 1, "DELTA_STEP", "reserved bytes");
    BREAK(IN(1, DELTA_STEP, 0)->delta.dv = 4, "DELTA_STEP", "publishes 4 values, slice 1 of o has 8");
    BREAK(IN(3, DELTA_STEP, 0)->delta.z_off = 0, "DELTA_STEP", "reads z, values [0, 8) of fz");
    BREAK(IN(1, DELTA_STEP, 0)->delta.b_off = 0, "DELTA_STEP", "reads b, values [0, 1) of low");
#define BREAK_LOW(how, where, why) BREAK_OF(pb_make(&(pb_config){.workers = 4, .layers = "Kf"}), how, where, why)
    BREAK_LOW(IN(1, DELTA_STEP, 0)->delta.rank = 0, "DELTA_STEP", "reserved bytes");
    BREAK_LOW(IN(1, DELTA_STEP, 0)->delta.rank = 24, "DELTA_STEP", "reads f's inputs, values [0, 24) of low");
    BREAK_LOW(IN(1, DELTA_STEP, 0)->delta.z_off = 5, "DELTA_STEP", "reads z's inputs, values [5, 21) of low");
    BREAK_LOW(IN(1, DELTA_STEP, 0)->delta.decay = MK_DECAY_HEAD, "DELTA_STEP", "expected one a channel");
    BREAK_LOW(IN(1, DELTA_STEP, 0)->delta.low[0].wtype = 0, "DELTA_STEP", "weights of type 0");
    BREAK_LOW(IN(1, DELTA_STEP, 0)->delta.low[0].pad = 1, "DELTA_STEP", "reserved bytes");
    BREAK_LOW(IN(1, DELTA_STEP, 0)->delta.low[1].phase = 125, "DELTA_STEP", "scales: phase 125 and 1 segments, rows [125, 133) have phase 125 and 2");
    BREAK_LOW(IN(1, DELTA_STEP, 0)->delta.low[1].scale_k = 32, "DELTA_STEP", "scales cover 32 columns");
    BREAK_LOW(IN(1, DELTA_STEP, 0)->tape_bytes += 128, "DELTA_STEP", "bytes of tape, its segment has");
    BREAK(VEC("o")->trailer = 0, "DELTA_STEP", "publishes a trailer, o has none");
    BREAK(VEC("fz")->trailer = 1, "GEMV", "publishes no trailer, fz has one");
    BREAK(IN(1, MLA_PARTIAL, 0)->mla.in_off = 12, "MLA_PARTIAL", "q_pe of the last head");
    BREAK(IN(1, MLA_PARTIAL, 0)->mla.heads = 3, "MLA_PARTIAL", "expected all 4");
    BREAK(IN(1, MLA_PARTIAL, 0)->mla.parts = 5, "MLA_PARTIAL", "part 1 of 5, partial takes 4 signals");
    BREAK(IN(1, MLA_PARTIAL, 0)->mla.part = 2, "MLA_PARTIAL", "part 2 of 4 is another instruction's");
    BREAK(IN(1, MLA_PARTIAL, 1)->mla.kv_off = 0, "worker 1", "another cache, shape or scale than worker 0");
    BREAK(for (uint32_t w = 0; w < 4; w++) IN(w, MLA_PARTIAL, 1)->mla.kv_off = 0, "worker 0", "which does not append to the pool at 0 that it reads");
    BREAK(for (uint32_t w = 0; w < 4; w++) IN(w, MLA_PARTIAL, 1)->wait[2].pub = 0, "worker 0", "which does not append to the pool at");
    BREAK(IN(3, KV_APPEND, 1)->mla.kv_off = 0, "KV_APPEND", "writes the cache pool that worker 3");
    BREAK(IN(3, KV_APPEND, 1)->mla.cache = 2, "KV_APPEND", "cache of type 2 with a latent of 16: expected 0 (activations), or 1 (fp8)");
    BREAK(IN(3, KV_APPEND, 1)->mla.cache = MK_CACHE_FP8, "MLA_PARTIAL", "which does not append to the pool at");
    BREAK(IN(3, KV_APPEND, 1)->mla.rotary = 0, "MLA_PARTIAL", "rotates otherwise");
    BREAK(IN(1, COMBINE, 0)->mla.head0 = 2, "COMBINE", "slice 1 of lat starts at 16");
    BREAK(IN(1, COMBINE, 0)->mla.first = 1, "COMBINE", "latent values [1, +16) of 16");
    BREAK(IN(1, COMBINE, 1)->mla.kv_off = 0, "COMBINE", "for another cache or shape");
    BREAK(IN(1, ROUTE, 0)->route.topk = 17, "ROUTE", "top 17 of 8 experts");
    BREAK(IN(1, ROUTE, 0)->route.topk = 5, "ROUTE", "cannot give 5 choices");
    BREAK(IN(1, ROUTE, 0)->route.groups = 3, "ROUTE", "8 experts in 3 groups");
    BREAK(IN(1, ROUTE, 0)->route.experts = 16, "ROUTE", "sums of 16 values need 2048 bytes, router has 1024");
    BREAK(IN(1, ROUTE, 0)->route.k = 16, "ROUTE", "expected h to be 16 values, h has 32");
    BREAK(IN(1, ROUTE, 0)->route.eps = -1, "ROUTE", "eps");
    BREAK(IN(1, ROUTE, 0)->route.norm_off = (uint32_t)p->info.param_floats - 31, "ROUTE", "norm: parameters");
    BREAK(IN(1, ROUTER, 0)->router.experts = 16, "ROUTER", "sums of 16 values need 2048 bytes, router has 1024");
    BREAK(IN(1, ROUTER, 0)->router.experts = 64, "ROUTER", "bytes of tape, its segment has");
    BREAK(IN(1, ROUTER, 0)->router.experts = 0, "ROUTER", "0 experts, expected 1 to 1024");
    BREAK(IN(1, ROUTER, 0)->router.n--, "ROUTER", "expected those of one slice");
    BREAK(IN(1, ROUTER, 0)->router.first--, "ROUTER", "reads its slice");
    BREAK(IN(1, ROUTER, 0)->router.param_off = (uint32_t)p->info.param_floats - 7, "ROUTER", "norm: parameters");
    BREAK(IN(1, ROUTER, 0)->signal_vec = (uint16_t)pb_vec(p, "logits"), "ROUTER", "expected logits to be bulk sums");
    BREAK(IN(1, ROUTE, 0)->route.score = 2, "ROUTE", "score 2");
    BREAK(VEC("route")->width -= 16, "ROUTE", "local vector route has");
    BREAK(VEC("router")->dtype = MK_BF16, "router", "fields that belong to packet vectors must be 0");
    BREAK(VEC("router")->flags = MK_VEC_DYNAMIC, "router", "fields that belong to packet vectors must be 0");
    BREAK(VEC("router")->flags = 0, "ROUTER", "expected router to be bulk sums");
    BREAK(VEC("logits")->flags = MK_VEC_SUMS, "LM_HEAD", "expected only ROUTER to add to sums");
    BREAK(VEC("h")->dtype = MK_BF16, "", "expected h to be f32");
    BREAK(IN(1, EXPERT_UP, 0)->expert.k = 16, "EXPERT_UP", "h has 32");
    BREAK(IN(1, EXPERT_UP, 0)->expert.topk = 3, "EXPERT_UP", "top 3, but #7 ROUTE chooses 2");
    BREAK(IN(1, EXPERT_UP, 0)->expert.nseg = 0, "EXPERT_UP", "its slices need 1");
    BREAK(IN(1, EXPERT_DOWN, 0)->expert.t = 0, "EXPERT_DOWN", "slice 0 of 4, but it publishes slice 1 of 4 of h");
    BREAK(IN(1, EXPERT_DOWN, 0)->expert.phase = 0, "EXPERT_DOWN", "phase 0, row 8 has phase 8");
    BREAK(IN(1, EXPERT_DOWN, 0)->expert.inter = 8, "EXPERT_DOWN", "expected the experts' width 8");
    BREAK(IN(1, EXPERT_DOWN, 0)->wait[2].slice0 = 0, "EXPERT_DOWN", "adds to slices [0, +1) of h");
    BREAK(IN(1, EXPERT_DOWN, 1)->expert.n = 7, "EXPERT_DOWN", "publishes 7 values, slice 1 of h has 8");
    BREAK((IN(1, EXPERT_DOWN, 1) - 1)->wait[1].slice0 = 2, "EXPERT_DOWN", "adds to local vector acc, which is not slice 1 of h");
    BREAK(IN(1, LM_HEAD, 0)->lm_head.vocab = 41, "LM_HEAD", "the program's vocabulary is 40");
    BREAK(IN(1, LM_HEAD, 0)->lm_head.wtype = MK_W_FP8; IN(1, LM_HEAD, 0)->lm_head.scale_k = 32, "LM_HEAD", "scales cover 32 columns, expected 64 or 128, or 0 for a scale a row");
    BREAK(IN(1, LM_HEAD, 0)->lm_head.wtype = MK_W_FP8; IN(1, LM_HEAD, 0)->lm_head.nseg = 1, "LM_HEAD", "scales: phase 0 and 1 segments, rows [10, 20) have phase 0 and 10");
    BREAK(pb_publisher(p, "h", 1, 2)->gemv.scale_k = 0, "worker 2", "scales cover 0 columns, expected 64 or 128");
    BREAK(IN(1, LM_HEAD, 0)->lm_head.logits_vec = (uint16_t)pb_vec(p, "h"), "LM_HEAD", "expected a publication of a bulk vector");
    BREAK(IN(1, LM_HEAD, 0)->lm_head.logits_vec = 77, "LM_HEAD", "logits go to vector 77");
    BREAK(IN(0, SAMPLE, 0)->sample.vocab = 39, "SAMPLE", "vocabulary 39");
    BREAK(IN(0, SAMPLE, 0)->sample.slices = 3, "SAMPLE", "stats has 16");
    BREAK(IN(2, SAMPLE, 0)->sample.helper = 4, "worker 2", "helper 4 of 3");
    BREAK(IN(2, SAMPLE, 0)->sample.helper = 3, "SAMPLE", "helper 3 is worker 2");
    BREAK(IN(2, SAMPLE, 0)->sample.helpers = 4, "worker 2", "one of 4 helpers, SAMPLE expects 3");
    BREAK(pb_remove(p, 2, AT(IN(2, SAMPLE, 0))), "worker 0", "3 helpers, the program has 2");
    BREAK(IN(2, SAMPLE, 0)->signal_vec = IN(0, SAMPLE, 0)->signal_vec, "worker 2", "helps, but publishes sampled");
    BREAK(mk_insn s = *IN(2, SAMPLE, 0); pb_remove(p, 2, s.seq); pb_insert(p, 2, 1, &s), "worker 2", "expected to be the last of its queue");
    BREAK(VEC("sampled")->width = 48, "SAMPLE", "local vector sampled has 48");
}

static void lm_head_coverage(void **state)
{
    (void)state;
    BREAK(IN(2, LM_HEAD, 0)->lm_head.row0 = 19, "worker 2", "LM head coverage: slice 2 has vocabulary rows from 19 on, expected from 20");
    BREAK(IN(3, LM_HEAD, 0)->lm_head.n = 9; IN(3, LM_HEAD, 0)->tape_bytes = 640, "SAMPLE", "LM head coverage: the slices end at 39");
    BREAK(p->info.vocab = 41; p->info.embed_bytes += 64; for (uint32_t x = 0; x < p->info.n_insn; x++) {
        if (p->insn[x].opcode == MK_OP_LM_HEAD) p->insn[x].lm_head.vocab = 41;
        if (p->insn[x].opcode == MK_OP_SAMPLE) p->insn[x].sample.vocab = 41;
    } VEC("logits")->width += 32; p->info.bulk_bytes += 128, "SAMPLE", "LM head coverage: the slices end at 40, the vocabulary has 41");
    BREAK(IN(2, LM_HEAD, 0)->signal_slice = 3; IN(3, LM_HEAD, 0)->signal_slice = 2, "LM_HEAD", "LM head coverage: slice 2");
}

static void publications(void **state)
{
    (void)state;
    BREAK(pb_remove(p, 2, AT(pb_publisher(p, "fz", 0, 2))), "\"fz\"", "missing publication: no instruction publishes slice 2 of pub 0 (worker");
    BREAK(pb_remove(p, 2, AT(pb_publisher(p, "stats", 0, 2))), "\"stats\"", "missing publication");
    BREAK(pb_insert(p, 2, AT(pb_publisher(p, "fz", 0, 2)), pb_publisher(p, "fz", 0, 2)), "worker 2",
          "double publication: fz pub 0 slice 2 is already published by worker 2");
    BREAK(pb_insert(p, 1, AT(pb_publisher(p, "fz", 0, 1)), pb_publisher(p, "fz", 0, 2)), "worker 2",
          "double publication: fz pub 0 slice 2 is already published by worker 1");
    BREAK(pb_publisher(p, "h", 3, 1)->signal_pub = 4, "", "publication");
    BREAK(VEC("partial")->signals = 5; for (uint32_t x = 0; x < p->info.n_insn; x++) if (p->insn[x].opcode == MK_OP_MLA_PARTIAL) p->insn[x].mla.parts = 5,
          "\"partial\"", "missing publication: pub 0 is signalled 4 times a step, expected 5");
    BREAK(VEC("logits")->signals = 3, "LM_HEAD", "double publication: logits pub 0 takes 3 signals a step");
    BREAK(VEC("logits")->signals = 5, "\"logits\"", "missing publication: pub 0 is signalled 4 times a step, expected 5");
    BREAK(IN(0, MLA_PARTIAL, 0)->signal_pub = 1, "", "publication");
    BREAK(VEC("kvcache")->signals = 2, "KV_APPEND", "it is the one writer of its cache");
    BREAK(pb_remove(p, 0, AT(IN(0, SAMPLE, 0))), "SCHEDULE", "reads local vector sampled before its queue has written it");
    BREAK(IN(1, EXPERT_DOWN, 1)->wait[1].pub = 0, "EXPERT_DOWN", "reads local vector route pub 0, but");
    BREAK(IN(1, DELTA_STEP, 0)->wait[0].vec = (uint16_t)pb_vec(p, "route"); IN(1, DELTA_STEP, 0)->wait[0].slice0 = IN(1, DELTA_STEP, 0)->wait[0].nslice = 0,
          "DELTA_STEP", "reads local vector route before");
    BREAK(pb_remove(p, 0, AT(IN(0, SCHEDULE, 0))), "SCHEDULE", "expected one SCHEDULE in the program, found none");
    BREAK(mk_insn s = *IN(0, SCHEDULE, 0); pb_insert(p, 0, s.seq, &s), "SCHEDULE", "expected one SCHEDULE in the program");
    BREAK(mk_insn s = *IN(0, SAMPLE, 0); pb_insert(p, 0, s.seq, &s), "SAMPLE", "expected one SAMPLE in the program");
    BREAK(IN(0, SCHEDULE, 0)->wait[0].vec = (uint16_t)pb_vec(p, "route"), "SCHEDULE", "reads local vector route pub 0, but");
}

/* A GEMV like the one that publishes slice 0 of low, from h pub `pub`, into a vector that nobody reads. */
static mk_insn dumper(mk_program *p, uint32_t pub)
{
    mk_insn in = *pb_publisher(p, "low", 0, 0);
    uint32_t n = in.gemv.n;
    in.signal_vec = (uint16_t)pb_add_dump(p, n);
    in.signal_pub = in.signal_slice = 0;
    in.wait[0].pub = (uint16_t)pub;
    return in;
}

static void dynamic_vectors(void **state)
{
    (void)state;
    BREAK(pb_remove(p, 2, AT(IN(2, EXPERT_UP, 0))), "\"u\"", "missing publication: it is dynamic, but worker 2 has no EXPERT_UP for pub 0");
    BREAK(mk_insn s = *IN(2, EXPERT_UP, 0); pb_insert(p, 2, s.seq + 1, &s), "worker 2", "double publication: u pub 0");
    BREAK(IN(2, ROUTE, 1)->route.scale = 3, "worker 2", "dynamic: its ROUTE differs from that of worker 0");
    BREAK(IN(2, ROUTE, 1)->route.param_off++, "worker 2", "dynamic: its ROUTE differs");
    BREAK(IN(2, ROUTE, 1)->wait[0].pub = 0, "worker 2", "norm of h pub 0, its logits are of pub");
    BREAK(IN(2, EXPERT_UP, 1)->wait[0].pub = 0, "worker 2", "dynamic: expected the same experts and input as worker 0");
    BREAK(IN(2, EXPERT_UP, 1)->expert.base -= 128, "worker 2", "dynamic: expected the same experts");
    BREAK(mk_insn r = *IN(2, ROUTE, 1); r.route.renorm = 0; pb_insert(p, 2, AT(IN(2, EXPERT_UP, 1)) + 1, &r), "worker 2", "clears what another ROUTE of its worker clears");
    /* sums: every slice of one h once, every worker clears its share */
    BREAK(IN(2, ROUTER, 1)->wait[0].slice0 = 1; IN(2, ROUTER, 1)->router.first = IN(1, ROUTER, 1)->router.first, "worker 2", "slice 1 of h is added to router by another instruction as well");
    BREAK(IN(2, ROUTER, 1)->wait[0].pub--, "ROUTER layer 1", "expected one for each slice of one publication");
    BREAK(IN(2, ROUTE, 1)->wait[1].pub = 0, "ROUTER layer 0", "gamma at");
    BREAK(IN(2, ROUTER, 1)->router.param_off++, "worker 2", "gamma at");
    BREAK(pb_remove(p, 2, AT(IN(2, ROUTER, 1))), "\"router\"", "missing publication: pub 1 is signalled 3 times a step, expected 4");
    BREAK(p->start[VEC("u")->start_index + 1] = 5, "EXPERT_UP", "slice 1 of u starts at 5");
    BREAK(IN(2, GEMV, 0)->wait[0].vec = (uint16_t)pb_vec(p, "u"); IN(2, GEMV, 0)->wait[0].nslice = 8, "GEMV", "u is dynamic, only EXPERT_DOWN can read it");
    BREAK(IN(2, GEMV, 0)->signal_vec = (uint16_t)pb_vec(p, "u"); IN(2, GEMV, 0)->signal_slice = 0, "GEMV", "publishes dynamic vector u");
    /* one slice an expert: two experts cannot reach four workers */
    BREAK(VEC("u")->nslice = 2; p->start[VEC("u")->start_index + 1] = 16; p->start[VEC("u")->start_index + 2] = 32; VEC("u")->slice_packets = 3;
          p->info.exchange_bytes += 1 << 16; VEC("u")->offset = p->info.exchange_bytes - (1 << 16);
          for (uint32_t x = 0; x < p->info.n_insn; x++) if (p->insn[x].opcode == MK_OP_EXPERT_UP) {
              mk_expert *e = &p->insn[x].expert;
              e->T = 1;
              e->slice_stride *= 4;
          },
          "EXPERT_UP", "dynamic coverage: 2 experts x 1 slices do not reach 4 workers");
}

static void cycles(void **state)
{
    (void)state;
    mk_program *q;
    /* fz before the low that it needs, on one worker */
    BREAK(pb_swap(p, 1, AT(pb_publisher(p, "qkv", 0, 1)), AT(pb_publisher(p, "fz", 0, 1))); pb_publisher(p, "qkv", 0, 1)->flags = 0;
          pb_swap(p, 1, AT(pb_publisher(p, "low", 0, 1)), AT(pb_publisher(p, "fz", 0, 1))),
          "cycle: worker 1 #1 GEMV layer 0 waits for low pub 0", "which worker 1 #2 GEMV layer 0 publishes after #1");
    /* two workers, each with its share of o behind something that waits for h */
    BREAK(pb_swap(p, 1, AT(pb_publisher(p, "h", 1, 1)), AT(IN(1, ROUTER, 0))), "cycle: worker", "waits for h pub 1");
    /* a chain over four workers: 0 -> 1 -> 2 -> 3 -> 0 */
    q = pb_make(&(pb_config){.workers = 4, .layers = "Mf"});
    uint32_t lat = pb_vec(q, "lat");
    for (uint32_t x = 0; x < q->info.n_insn; x++) /* uv of head i waits for the latent of head i + 1 */
        if (q->insn[x].opcode == MK_OP_GEMV && q->insn[x].wait[0].vec == lat) {
            q->insn[x].wait[0].slice0 = (uint16_t)((q->insn[x].wait[0].slice0 + 1) % 4);
            q->insn[x].gemv.in_off = q->insn[x].wait[0].slice0 * 16u;
        }
    mk_err err = {0};
    assert_int_equal(mk_validate(q, NULL, &err), MK_OK); /* combines come first: no cycle yet */
    for (uint32_t w = 0; w < 4; w++) {
        uint32_t c = pb_find(q, w, MK_OP_COMBINE, 0)->seq;
        pb_swap(q, w, c, c + 1);
    }
    refuses(q, __LINE__, "cycle: worker", "waits for lat pub 0, which worker");
}

/* Slice 2 of layer 0's qkv is made by worker 4, which makes nothing else of that layer. */
static mk_program *far_qkv(void)
{
    mk_program *q = pb_make(&(pb_config){.workers = 5, .active = 4, .layers = "DfMf"});
    mk_insn in = *pb_publisher(q, "qkv", 0, 2);
    pb_remove(q, 2, pb_publisher(q, "qkv", 0, 2)->seq);
    in.flags = 0;
    pb_insert(q, 4, 0, &in);
    return q;
}

static void reuse(void **state)
{
    (void)state;
    /* reading h pub 0 where pub 2 already is */
    BREAK(mk_insn *in = pb_publisher(p, "kv", 0, 1); in->wait[0].pub = 0, "worker", "reuse of h: publishing pub 2 ends pub 0, but nothing makes it wait for worker 1");
    /* worker 3's last act reads the last but one h: overwritten by the next step's EMBED, which only waits for SCHEDULE */
    mk_program *q = pb_small();
    uint32_t last = q->vec[pb_vec(q, "h")].pubs - 1;
    assert_int_equal(last % 2, 0);
    mk_program_destroy(&q);
    BREAK(mk_insn d = dumper(p, last - 1); pb_insert(p, 3, AT(IN(3, LM_HEAD, 0)) + 1, &d), "EMBED",
          "reuse of h: publishing pub 0 ends pub 5 of the step before, but nothing makes it wait for worker 3 #35 GEMV layer 0, which reads that");
    /* nothing stands between the choice and SCHEDULE: the next step may begin there */
    BREAK(mk_insn d = dumper(p, last); pb_insert(p, 0, IN(0, SCHEDULE, 0)->seq, &d), "SCHEDULE", "expected right behind worker 0 #");
    /* the last h itself is safe there: its half is next written after EMBED's h has come from worker 3 as well */
    q = pb_small();
    mk_insn after = dumper(q, last);
    pb_insert(q, 3, pb_find(q, 3, MK_OP_LM_HEAD, 0)->seq + 1, &after);
    accepts(q);
    /* and so is the last but one before LM_HEAD, which SCHEDULE waits for */
    q = pb_small();
    after = dumper(q, last - 1);
    pb_insert(q, 3, pb_find(q, 3, MK_OP_LM_HEAD, 0)->seq, &after);
    accepts(q);
    /* a DELTA_STEP's wait is a range, but it knows only of the slices that hold its q, k and v: [0, 24), [24, 48), [72, 96) and not [48, 72) here */
    accepts(far_qkv());
    BREAK_OF(far_qkv(), for (uint32_t w = 0; w < 4; w++) {
        mk_insn *in = IN(w, DELTA_STEP, 0);
        in->wait[0].slice0 = 0;
        in->wait[0].nslice = 4;
        in->delta.q_off = 0;
        in->delta.k_off = 24;
        in->delta.v_off = 72;
    }, "worker", "nothing makes it wait for worker 4 #0 GEMV layer 0");
    /* bulk: layer 1's partials combined once more after layer 2's are there */
    BREAK(mk_insn in = *IN(2, COMBINE, 0); in.signal_vec = (uint16_t)pb_add_dump(p, 16); in.signal_pub = in.signal_slice = 0; in.mla.head0 = 0;
          pb_insert(p, 2, AT(IN(2, LM_HEAD, 0)), &in),
          "MLA_PARTIAL layer 2", "reuse of partial: publishing pub 1 ends pub 0, but nothing makes it wait for worker 2");
    /* bulk across steps: the logits of the step before, read by a worker that SCHEDULE does not wait for, are safe only until LM_HEAD */
    BREAK(mk_insn in = *IN(2, COMBINE, 1); in.signal_vec = (uint16_t)pb_add_dump(p, 16); in.signal_pub = in.signal_slice = 0; in.mla.head0 = 0;
          in.wait[0].pub = 1; in.wait[0].vec = (uint16_t)pb_vec(p, "kvcache"); pb_insert(p, 2, AT(IN(2, LM_HEAD, 0)) + 1, &in),
          "COMBINE", "for another cache or shape");
    /* a reader that waits for one slice orders after that publisher only */
    BREAK_OF(pb_make(&(pb_config){.workers = 4, .layers = "DfDfDf"}),
             for (uint32_t x = 0; x < p->info.n_insn; x++) if (p->insn[x].opcode == MK_OP_LM_HEAD && p->insn[x].signal_slice == 3) p->insn[x].wait[0].nslice = 3,
             "LM_HEAD", "but waits for slices [0, 3)");
    /* a worker that nobody listens to: EMBED into a vector of its own, nothing else */
    BREAK_OF(pb_make(&(pb_config){.workers = 5, .active = 4, .layers = "DfMf"}), mk_insn in = *IN(0, EMBED, 0); in.embed.n = 32;
             in.signal_vec = (uint16_t)pb_add_dump(p, 32); pb_insert(p, 4, 0, &in), "SCHEDULE",
             "reuse of the step descriptor: nothing makes it wait for worker 4");
    /* sums: worker 4 has experts only, so that in the second layer nothing but its ROUTE's own wait for h says that others have cleared, and it may look before that is over */
    refuses(pb_make(&(pb_config){.workers = 5, .active = 4, .layers = "DeMs"}), __LINE__, "worker 4 #2 ROUTE layer 1",
            "looks at router pub 1, but nothing it has waited for before says that worker 0 #7 ROUTE layer 0 is through");
    accepts(pb_make(&(pb_config){.workers = 5, .active = 4, .layers = "DeMf"}));
    /* the same worker reading h: h's halves come round before it is heard of */
    BREAK_OF(pb_make(&(pb_config){.workers = 5, .active = 4, .layers = "DfMf"}), mk_insn in = dumper(p, 0); pb_insert(p, 4, 0, &in), "worker",
             "reuse of h: publishing pub 2 ends pub 0, but nothing makes it wait for worker 4 #0 GEMV");
}

static void shared_memory(void **state)
{
    (void)state;
    mk_program *q = pb_make(&(pb_config){.workers = 4, .smem_limit = 232448});
    mk_validation v;
    mk_err err;
    assert_int_equal(mk_validate(q, &v, &err), MK_OK);
    assert_true(v.smem_max > MK_RING_MIN_BYTES + MK_SMEM_FIXED_BYTES + q->info.local_bytes);
    q->info.smem_limit = v.smem_max;
    accepts(q);
    BREAK_OF(pb_make(&(pb_config){.workers = 4, .smem_limit = v.smem_max - 1}), (void)p, "worker", "shared memory: ");
    /* 2688 columns of eight bf16 rows are 43008 bytes */
    mk_insn in = {.opcode = MK_OP_GEMV, .gemv = {.k = 9216, .k_chunk = 2688, .n = 18}};
    mk_program empty = {.info = {.local_bytes = 1000}};
    assert_int_equal(mk_insn_staging(&empty, &in), 43008);
    in.gemv.k_chunk = 2560;
    assert_int_equal(mk_insn_staging(&empty, &in), MK_STAGING_BYTES);
    assert_int_equal(mk_insn_smem(&empty, &in), MK_SMEM_FIXED_BYTES + MK_RING_MIN_BYTES + 1000 + MK_STAGING_BYTES + 8 * 18 * 4);
    in.gemv.flags = MK_GEMV_X_F32;
    assert_int_equal(mk_insn_staging(&empty, &in), 2 * MK_STAGING_BYTES);
}

#define TEST(f) cmocka_unit_test_teardown(f, none_wrong)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(valid_programs), TEST(report),           TEST(header),       TEST(vectors),
        TEST(instruction_headers), TEST(addresses),   TEST(shapes),       TEST(lm_head_coverage),
        TEST(publications),   TEST(dynamic_vectors),  TEST(cycles),       TEST(reuse),
        TEST(shared_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
