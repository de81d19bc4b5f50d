/* Wire: every message there and back, PROTOCOL.md and mkd_client.py against wire.h, and frames that lie. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/wire.h"

/* Every field of every fixed part: X(TYPE, struct, field, kind, count). */
#define FIELDS(X)                                                                                                                          \
    X(HELLO, hello, newest, "u16", 1) X(HELLO, hello, reserved, "u16", 1) X(HELLO, hello, n, "u32", 1)                                     \
    X(WELCOME, welcome, vocab, "u32", 1) X(WELCOME, welcome, context, "u32", 1) X(WELCOME, welcome, streams, "u32", 1)                     \
    X(WELCOME, welcome, max_ids, "u32", 1) X(WELCOME, welcome, beat_ms, "u32", 1) X(WELCOME, welcome, beats, "u32", 1)                     \
    X(WELCOME, welcome, max_frame, "u32", 1) X(WELCOME, welcome, features, "u32", 1) X(WELCOME, welcome, layers, "u32", 1)                 \
    X(WELCOME, welcome, bos, "u32", 1) X(WELCOME, welcome, pool_tokens, "u32", 1) X(WELCOME, welcome, n_stop, "u32", 1)                    \
    X(WELCOME, welcome, mixer, "u32", 8) X(WELCOME, welcome, ffn, "u32", 4) X(WELCOME, welcome, stop, "u32", 16)                           \
    X(WELCOME, welcome, temperature, "f32", 1) X(WELCOME, welcome, top_p, "f32", 1) X(WELCOME, welcome, min_p, "f32", 1)                   \
    X(WELCOME, welcome, top_k, "u32", 1) X(WELCOME, welcome, reserved, "u32", 1) X(WELCOME, welcome, n, "u32", 1)                          \
    X(OPEN, open, context, "u32", 1) X(OPEN, open, window, "u32", 1) X(OPEN, open, seed, "u64", 1)                                         \
    X(OPEN, open, temperature, "f32", 1) X(OPEN, open, top_p, "f32", 1) X(OPEN, open, min_p, "f32", 1)                                     \
    X(OPEN, open, top_k, "u32", 1) X(OPEN, open, pin, "u32", 1) X(OPEN, open, n, "u32", 1)                                                 \
    X(OPENED, opened, context, "u32", 1) X(OPENED, opened, window, "u32", 1)                                                               \
    X(APPEND, append, reserved, "u32", 1) X(APPEND, append, n, "u32", 1)                                                                   \
    X(APPENDED, appended, position, "u32", 1) X(APPENDED, appended, appended, "u32", 1) X(APPENDED, appended, reason, "u32", 1)            \
    X(APPENDED, appended, n, "u32", 1)                                                                                                     \
    X(GENERATE, generate, max_new, "u32", 1) X(GENERATE, generate, n, "u32", 1)                                                            \
    X(TOKENS, tokens, position, "u32", 1) X(TOKENS, tokens, n, "u32", 1)                                                                   \
    X(DONE, done, reason, "u32", 1) X(DONE, done, position, "u32", 1) X(DONE, done, prompt_tokens, "u32", 1)                               \
    X(DONE, done, generated, "u32", 1) X(DONE, done, queue_ns, "u64", 1) X(DONE, done, prompt_ns, "u64", 1)                                \
    X(DONE, done, first_ns, "u64", 1) X(DONE, done, total_ns, "u64", 1)                                                                    \
    X(CREDIT, credit, tokens, "u32", 1) X(CREDIT, credit, reserved, "u32", 1)                                                              \
    X(STATISTICS, statistics, reserved, "u32", 1) X(STATISTICS, statistics, n, "u32", 1)                                                   \
    X(PING, ping, cookie, "u64", 1) X(PONG, ping, cookie, "u64", 1)                                                                        \
    X(ERR, err, code, "u16", 1) X(ERR, err, about, "u16", 1) X(ERR, err, n, "u32", 1)                                                      \
    X(FORK, fork, at, "u32", 1) X(FORK, fork, reserved, "u32", 1)                                                                          \
    X(FORKED, forked, fork, "u64", 1) X(FORKED, forked, position, "u32", 1) X(FORKED, forked, how, "u32", 1)                               \
    X(FORKED, forked, replayed, "u32", 1) X(FORKED, forked, reserved, "u32", 1)                                                            \
    X(ROLLBACK, rollback, to, "u32", 1) X(ROLLBACK, rollback, reserved, "u32", 1)                                                          \
    X(ROLLED_BACK, rolled_back, position, "u32", 1) X(ROLLED_BACK, rolled_back, how, "u32", 1)                                             \
    X(ROLLED_BACK, rolled_back, replayed, "u32", 1) X(ROLLED_BACK, rolled_back, reserved, "u32", 1)                                        \
    X(CHECKPOINTED, rolled_back, position, "u32", 1) X(CHECKPOINTED, rolled_back, how, "u32", 1)                                           \
    X(CHECKPOINTED, rolled_back, replayed, "u32", 1) X(CHECKPOINTED, rolled_back, reserved, "u32", 1)                                      \
    X(VERIFY, verify, reserved, "u32", 1) X(VERIFY, verify, n, "u32", 1)                                                                   \
    X(VERIFIED, verified, position, "u32", 1) X(VERIFIED, verified, accepted, "u32", 1) X(VERIFIED, verified, next, "u32", 1)              \
    X(VERIFIED, verified, logprob, "f32", 1) X(VERIFIED, verified, device_ns, "u64", 1)                                                     \
    X(TRACE, trace, steps, "u32", 1) X(TRACE, trace, timeout_ms, "u32", 1)                                                                 \
    X(TRACED, traced, first_step, "u32", 1) X(TRACED, traced, steps, "u32", 1) X(TRACED, traced, workers, "u32", 1)                        \
    X(TRACED, traced, instructions, "u32", 1) X(TRACED, traced, vectors, "u32", 1) X(TRACED, traced, n, "u32", 1)                          \
    X(TRACE_MAP, trace_map, first, "u32", 1) X(TRACE_MAP, trace_map, n, "u32", 1)                                                          \
    X(TRACE_RECORDS, trace_records, step, "u32", 1) X(TRACE_RECORDS, trace_records, first, "u32", 1)                                       \
    X(TRACE_RECORDS, trace_records, n, "u32", 1)\
    X(INJECT, inject, what, "u32", 1) X(INJECT, inject, worker, "u32", 1) X(INJECT, inject, instruction, "u32", 1)                        \
    X(INJECT, inject, after, "u32", 1) X(INJECTED, injected, steps, "u32", 1) X(INJECTED, injected, reserved, "u32", 1)

static const struct field {
    uint16_t type;
    const char *name, *kind;
    unsigned at, count;
} fields[] = {
    {0, "magic", "u32", offsetof(mk_wire_header, magic), 1},     {0, "version", "u16", offsetof(mk_wire_header, version), 1},
    {0, "type", "u16", offsetof(mk_wire_header, type), 1},       {0, "flags", "u32", offsetof(mk_wire_header, flags), 1},
    {0, "length", "u32", offsetof(mk_wire_header, length), 1},   {0, "stream", "u64", offsetof(mk_wire_header, stream), 1},
    {0, "request", "u64", offsetof(mk_wire_header, request), 1},
#define X(TYPE, st, field, kind, count) {MK_WIRE_##TYPE, #field, kind, offsetof(mk_wire_##st, field), count},
    FIELDS(X)
#undef X
};
#define N_FIELDS (sizeof fields / sizeof fields[0])

static const uint16_t numbers[] = {
#define X(NAME, number, ...) number,
    MK_WIRE_TYPES(X)
#undef X
};
#define N_TYPES (sizeof numbers / sizeof numbers[0])

static unsigned size_of(const char *kind)
{
    return (unsigned)atoi(kind + 1) / 8;
}

static uint64_t seed = 1;
static uint32_t rnd(void)
{
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(seed >> 33);
}

/* A valid frame of type t with n items of random content; malloc()ed at its exact size, so that sanitizers see every step past it. */
static unsigned char *make(const mk_wire_type *t, uint32_t n, size_t *size)
{
    unsigned char fixed[184], *items = malloc((size_t)n * t->item + 1);
    for (unsigned i = 0; i < t->fixed; i++) fixed[i] = (unsigned char)rnd();
    for (size_t i = 0; i < (size_t)n * t->item; i++) items[i] = (unsigned char)rnd();
    if (t->reserved_size) memset(fixed + t->reserved_at, 0, t->reserved_size);
    if (t->item) memcpy(fixed + t->fixed - 4, &n, 4);
    *size = mk_wire_size(t->number, n);
    unsigned char *f = malloc(*size);
    uint64_t stream = t->stream ? 1 + rnd() : 0;
    assert_int_equal(mk_wire_encode(f, *size, t->number, t->flags & rnd(), stream, rnd(), fixed, items), *size);
    assert_int_equal(mk_wire_encode(f, *size - 1, t->number, 0, stream, 1, fixed, items), 0); /* no room */
    assert_int_equal(mk_wire_encode(f, *size, t->number, t->flags & rnd(), stream, rnd(), fixed, items), *size);
    free(items);
    return f;
}

static int sender(const mk_wire_type *t)
{
    return t->from & MK_WIRE_CLIENT ? MK_WIRE_CLIENT : MK_WIRE_DAEMON;
}

static void test_round_trip(void **state)
{
    (void)state;
    for (size_t k = 0; k < N_TYPES; k++) {
        const mk_wire_type *t = mk_wire_type_of(numbers[k]);
        assert_non_null(t);
        assert_int_equal(t->number, numbers[k]);
        const uint32_t counts[] = {0, 1, 3, t->max_items / 2, t->max_items};
        for (int c = 0; c < 5; c++) {
            if (counts[c] > t->max_items) continue;
            size_t size;
            unsigned char *f = make(t, counts[c], &size);
            mk_wire_msg m;
            mk_err err = {0};
            assert_int_equal(mk_wire_decode(f, size, sender(t), &m, &err), 0);
            assert_int_equal(m.h.type, t->number);
            assert_ptr_equal(m.type, t);
            assert_int_equal(m.n, counts[c]);
            void *items = malloc((size_t)m.n * t->item + 1);
            assert_int_equal(mk_wire_items(&m, items, m.n), m.n);
            unsigned char *again = malloc(size);
            assert_int_equal(mk_wire_encode(again, size, m.h.type, m.h.flags, m.h.stream, m.h.request, m.fixed, items), size);
            assert_memory_equal(again, f, size);
            free(again);
            free(items);
            free(f);
        }
        unsigned char buf[4096], fixed[184] = {0}, item[64] = {0};
        uint32_t over = t->max_items + 1;
        if (t->item) {
            memcpy(fixed + t->fixed - 4, &over, 4);
            assert_int_equal(mk_wire_encode(buf, sizeof buf, t->number, 0, 1, 1, fixed, item), 0); /* too many items */
        }
        assert_int_equal(mk_wire_encode(buf, sizeof buf, t->number, ~t->flags, 1, 1, fixed, item), 0); /* flags it has not */
    }
}

/* Every shorter and some longer versions of every frame are refused, and nothing past their end is read. */
static void test_truncated_and_overlong(void **state)
{
    (void)state;
    for (size_t k = 0; k < N_TYPES; k++) {
        const mk_wire_type *t = mk_wire_type_of(numbers[k]);
        size_t size;
        unsigned char *f = make(t, t->max_items < 5 ? t->max_items : 5, &size);
        for (size_t n = 0; n < size; n++) {
            unsigned char *cut = malloc(n ? n : 1);
            memcpy(cut, f, n);
            mk_wire_msg m;
            mk_err err = {0};
            assert_int_equal(mk_wire_decode(cut, n, sender(t), &m, &err), MK_WIRE_E_FRAME);
            assert_int_equal(err.code, MK_E_WIRE);
            assert_true(strlen(err.msg) > 10);
            if (n >= 32) { /* the header made to agree with the size: the counts do not */
                uint32_t length = (uint32_t)(n - 32);
                memcpy(cut + 12, &length, 4);
                assert_int_equal(mk_wire_decode(cut, n, sender(t), &m, &err), MK_WIRE_E_FRAME);
            }
            free(cut);
        }
        for (size_t more = 1; more < 40; more++) {
            unsigned char *big = calloc(1, size + more);
            memcpy(big, f, size);
            mk_wire_msg m;
            assert_int_equal(mk_wire_decode(big, size + more, sender(t), &m, NULL), MK_WIRE_E_FRAME);
            uint32_t length = (uint32_t)(size + more - 32);
            memcpy(big + 12, &length, 4);
            assert_int_equal(mk_wire_decode(big, size + more, sender(t), &m, NULL), MK_WIRE_E_FRAME);
            free(big);
        }
        free(f);
    }
}

static int verdict(void *frame, size_t size, int from, char *text)
{
    mk_wire_msg m;
    mk_err err = {0};
    int rc = mk_wire_decode(frame, size, from, &m, &err);
    snprintf(text, 512, "%s", err.msg);
    return rc;
}

static void test_refusals_say_what(void **state)
{
    (void)state;
    char text[512];
    size_t size;
    unsigned char *f = make(mk_wire_type_of(MK_WIRE_OPEN), 2, &size), keep[256];
    memcpy(keep, f, size);
#define BREAK(at, type, value) (memcpy(f, keep, size), memcpy(f + (at), &(type){value}, sizeof(type)))
    BREAK(0, uint32_t, 0xdeadbeef);
    assert_int_equal(verdict(f, size, MK_WIRE_CLIENT, text), MK_WIRE_E_FRAME);
    assert_string_equal(text, "wrong magic 0xdeadbeef, expected 0x57444b4d");
    BREAK(4, uint16_t, 2);
    assert_int_equal(verdict(f, size, MK_WIRE_CLIENT, text), MK_WIRE_E_VERSION);
    assert_string_equal(text, "protocol version 2, expected 1");
    BREAK(6, uint16_t, 4242);
    assert_int_equal(verdict(f, size, MK_WIRE_CLIENT, text), MK_WIRE_E_TYPE);
    assert_string_equal(text, "unknown message type 4242");
    BREAK(8, uint32_t, 0x80000001u);
    assert_int_equal(verdict(f, size, MK_WIRE_CLIENT, text), MK_WIRE_E_UNSUPPORTED);
    assert_string_equal(text, "OPEN: unsupported flags 0x80000000 (supported: 0x7)");
    BREAK(12, uint32_t, 0xffffffffu);
    assert_int_equal(verdict(f, size, MK_WIRE_CLIENT, text), MK_WIRE_E_FRAME);
    assert_string_equal(text, "OPEN: length in the header 4294967295, expected 48");
    BREAK(16, uint64_t, 9);
    assert_int_equal(verdict(f, size, MK_WIRE_CLIENT, text), MK_WIRE_E_UNSUPPORTED);
    assert_string_equal(text, "OPEN: header field stream is 9, expected 0");
    BREAK(32 + 36, uint32_t, 0xffffffffu);
    assert_int_equal(verdict(f, size, MK_WIRE_CLIENT, text), MK_WIRE_E_FRAME);
    assert_string_equal(text, "OPEN: 4294967295 items, the limit is 16");
    BREAK(32 + 36, uint32_t, 3);
    assert_int_equal(verdict(f, size, MK_WIRE_CLIENT, text), MK_WIRE_E_FRAME);
    assert_string_equal(text, "OPEN: bytes after the fixed part 8, expected 12");
    memcpy(f, keep, size);
    assert_int_equal(verdict(f, size, MK_WIRE_DAEMON, text), MK_WIRE_E_TYPE);
    assert_string_equal(text, "OPEN is sent by the client only");
    assert_int_equal(verdict(f, size, MK_WIRE_CLIENT, text), 0);
    free(f);
    f = make(mk_wire_type_of(MK_WIRE_CREDIT), 0, &size);
    memcpy(keep, f, size);
    BREAK(32 + 4, uint32_t, 1);
    assert_int_equal(verdict(f, size, MK_WIRE_CLIENT, text), MK_WIRE_E_UNSUPPORTED);
    assert_string_equal(text, "CREDIT: field reserved (payload offset 4) is not zero");
    free(f);
    f = make(mk_wire_type_of(MK_WIRE_CANCEL), 0, &size);
    memset(f + 16, 0, 8);
    assert_int_equal(verdict(f, size, MK_WIRE_CLIENT, text), MK_WIRE_E_REFUSED);
    assert_string_equal(text, "CANCEL: header field stream is 0, expected a stream's number");
    free(f);
    f = calloc(1, MK_WIRE_MAX_FRAME + 1);
    mk_wire_append a = {.n = 1};
    mk_wire_encode(f, MK_WIRE_MAX_FRAME, MK_WIRE_APPEND, 0, 1, 1, &a, &(uint32_t){7});
    assert_int_equal(verdict(f, MK_WIRE_MAX_FRAME + 1, MK_WIRE_CLIENT, text), MK_WIRE_E_FRAME);
    assert_string_equal(text, "APPEND: frame too long: 524289 bytes, the limit is 524288");
    free(f);
}

/* Valid frames with some bytes changed, and plain noise. Whatever decodes encodes to the same bytes. */
static void test_fuzz(void **state)
{
    (void)state;
    seed = 42;
    unsigned accepted = 0;
    for (int i = 0; i < 200000; i++) {
        const mk_wire_type *t = mk_wire_type_of(numbers[rnd() % N_TYPES]);
        size_t size;
        unsigned char *f = make(t, rnd() % (t->max_items < 8 ? t->max_items + 1 : 8), &size);
        uint32_t changes = rnd() % 4;
        if (i % 8 == 7) { /* noise behind a valid magic and version */
            for (size_t k = 6; k < size; k++) f[k] = (unsigned char)rnd();
            if (rnd() % 2) f[7] = 0;
            if (rnd() % 2) f[6] = (unsigned char)(rnd() % 34);
        }
        for (uint32_t k = 0; k < changes; k++) f[rnd() % (rnd() % 2 ? size : 32)] = (unsigned char)rnd();
        size_t n = rnd() % 4 ? size : rnd() % (size + 1);
        unsigned char *exact = malloc(n ? n : 1);
        memcpy(exact, f, n);
        mk_wire_msg m;
        mk_err err = {0};
        int from = rnd() % 2 ? MK_WIRE_CLIENT : MK_WIRE_DAEMON;
        int rc = mk_wire_decode(exact, n, from, &m, &err);
        if (rc) {
            assert_in_range(rc, 1, MK_WIRE_E_INTERNAL);
            assert_true(err.msg[0] != 0);
        } else {
            char text[64];
            unsigned char *again = malloc(n);
            mk_wire_text(&m, text, sizeof text);
            for (int s = 0; s < 5 && m.h.type == MK_WIRE_WELCOME; s++) mk_wire_welcome_string(&m, s, text, sizeof text);
            assert_int_equal(mk_wire_encode(again, n, m.h.type, m.h.flags, m.h.stream, m.h.request, m.fixed, m.items), n);
            assert_memory_equal(again, exact, n);
            free(again);
            accepted++;
        }
        free(exact);
        free(f);
    }
    assert_in_range(accepted, 10000, 190000);
}

static void test_text(void **state)
{
    (void)state;
    unsigned char f[256];
    mk_wire_err e = {.code = MK_WIRE_E_REFUSED, .n = 6};
    size_t n = mk_wire_encode(f, sizeof f, MK_WIRE_ERR, 0, 0, 0, &e, "a\nb\033[c");
    mk_wire_msg m;
    char text[8];
    assert_int_equal(mk_wire_decode(f, n, MK_WIRE_DAEMON, &m, NULL), 0);
    mk_wire_text(&m, text, sizeof text);
    assert_string_equal(text, "a?b?[c");
    mk_wire_text(&m, text, 3);
    assert_string_equal(text, "a?");
    char names[] = "a\n\0\"\xc3\xa9\0\xc3\xc0\xaf\xed\xa0\x80z\xe2\x82"; /* a letter, then an overlong one, a surrogate and one cut off */
    mk_wire_plain(names, sizeof names - 1, "\"\\");
    assert_memory_equal(names, "a?\0?\xc3\xa9\0??????z??", sizeof names);
    mk_wire_welcome w = {.n = 9};
    n = mk_wire_encode(f, sizeof f, MK_WIRE_WELCOME, 0, 0, 0, &w, "ab\0\0cde\0x"); /* the fourth lacks its zero byte */
    assert_int_equal(mk_wire_decode(f, n, MK_WIRE_DAEMON, &m, NULL), 0);
    const char *expected[] = {"ab", "", "cde", "", ""};
    for (int i = 0; i < 5; i++) {
        mk_wire_welcome_string(&m, i, text, sizeof text);
        assert_string_equal(text, expected[i]);
    }
    assert_string_equal(mk_wire_type_name(9), "DONE");
    assert_string_equal(mk_wire_type_name(0), "unknown type");
    assert_string_equal(mk_wire_type_name(65535), "unknown type");
    assert_string_equal(mk_wire_error_name(7), "CAPACITY");
    assert_string_equal(mk_wire_error_name(99), "unknown error");
    assert_string_equal(mk_wire_reason_name(2), "stop");
    assert_string_equal(mk_wire_reason_name(77), "unknown reason");
}

/* ---- PROTOCOL.md ---------------------------------------------------------------------------------------------------- */

static void check_row(uint16_t type, const char *line, unsigned *rows)
{
    unsigned at, count = 1;
    char kind[16], name[32];
    if (sscanf(line, "| %u | %15[^ |] | %31[a-z_] |", &at, kind, name) != 3) return;
    if (strcmp(kind, "u16") && strcmp(kind, "u32") && strcmp(kind, "u64") && strcmp(kind, "f32") && !strchr(kind, '[')) return;
    if (strchr(kind, '[')) {
        count = (unsigned)atoi(strchr(kind, '[') + 1);
        *strchr(kind, '[') = 0;
    }
    for (size_t i = 0; i < N_FIELDS; i++)
        if (fields[i].type == type && !strcmp(fields[i].name, name)) {
            assert_int_equal(fields[i].at, at);
            assert_int_equal(fields[i].count, count);
            assert_string_equal(fields[i].kind, kind);
            ++*rows;
            return;
        }
    fail_msg("PROTOCOL.md: %s has a field %s that wire.h has not", mk_wire_type_name(type), name);
}

static void check_example(const char *hex, unsigned *examples)
{
    unsigned char f[512];
    size_t n = 0;
    for (const char *p = hex; *p && n < sizeof f;) {
        unsigned byte;
        if (isspace((unsigned char)*p)) {
            p++;
            continue;
        }
        assert_int_equal(sscanf(p, "%2x", &byte), 1);
        f[n++] = (unsigned char)byte;
        p += 2;
    }
    mk_wire_msg m;
    mk_err err = {0};
    if (mk_wire_decode(f, n, MK_WIRE_CLIENT | MK_WIRE_DAEMON, &m, &err)) fail_msg("PROTOCOL.md: example: %s", err.msg);
    switch (++*examples) { /* what the page says about each */
    case 1: assert_true(m.h.type == MK_WIRE_HELLO && m.h.request == 1 && m.n == 2 && !memcmp(m.items, "hi", 2)); break;
    case 2:
        assert_true(m.h.type == MK_WIRE_OPEN && m.h.flags == MK_OPEN_SAMPLING && m.open.context == 100 && m.open.window == 16 &&
                    m.open.seed == 7 && m.open.temperature == 0.5f && m.open.top_p == 1.0f && m.n == 0);
        break;
    case 3: assert_true(m.h.type == MK_WIRE_APPEND && m.h.stream == 5 && m.n == 3 && m.items[8] == 3); break;
    case 4: assert_true(m.h.type == MK_WIRE_GENERATE && m.generate.max_new == 64); break;
    case 5: {
        mk_wire_token t;
        assert_int_equal(mk_wire_items(&m, &t, 1), 1);
        assert_true(m.tokens.position == 3 && t.id == 42 && t.logprob == -0.25f && t.device_ns == 1000);
        break;
    }
    case 6: assert_true(m.err.code == MK_WIRE_E_REFUSED && m.err.about == MK_WIRE_GENERATE && !memcmp(m.items, "busy", 4)); break;
    default: fail_msg("an example that this test does not know");
    }
}

static void test_protocol_page(void **state)
{
    (void)state;
    FILE *f = fopen("ipc/PROTOCOL.md", "r");
    if (!f) fail_msg("ipc/PROTOCOL.md: run the tests in the repository's root");
    char line[512], hex[2048];
    unsigned types = 0, rows = 0, examples = 0, codes = 0;
    int type = -1, inside = 0;
    while (fgets(line, sizeof line, f)) {
        unsigned number, fixed;
        char name[32], who[16], rest[256];
        if (!strncmp(line, "## ", 3)) type = -1;
        if (!strncmp(line, "### ", 4)) type = -1;
        if (sscanf(line, "### %u %31[A-Z_] (%15[a-z], %u", &number, name, who, &fixed) == 4) {
            const mk_wire_type *t = mk_wire_type_of((uint16_t)number);
            assert_non_null(t);
            assert_string_equal(t->name, name);
            assert_int_equal(t->fixed, fixed);
            assert_string_equal(who, t->from == 3 ? "both" : t->from == 2 ? "daemon" : "client");
            int has_items = strstr(line, "+") != NULL;
            assert_int_equal(has_items, t->item != 0);
            types++;
            type = (int)number;
        } else if (!strncmp(line, "### 0 header (32 bytes)", 23)) {
            type = 0;
        } else if (type == MK_WIRE_ERR && sscanf(line, "| %u | %31[A-Z] |%255[^\n]", &number, name, rest) == 3) {
            assert_string_equal(mk_wire_error_name((uint16_t)number), name);
            codes++;
        }
        if (type >= 0) check_row((uint16_t)type, line, &rows);
        if (!strncmp(line, "```", 3)) {
            if (inside) check_example(hex, &examples);
            inside = !inside;
            hex[0] = 0;
        } else if (inside) {
            strncat(hex, line, sizeof hex - strlen(hex) - 1);
        }
    }
    fclose(f);
    assert_int_equal(types, N_TYPES);
    assert_int_equal(rows, N_FIELDS);
    assert_int_equal(examples, 6);
    assert_int_equal(codes, MK_WIRE_E_INTERNAL);
}

/* ---- mkd_client.py -------------------------------------------------------------------------------------------------- */

/* One line a frame: name, header fields, each field of the fixed part, then the frame in hex. */
static void write_vector(FILE *f, const mk_wire_type *t, const unsigned char *frame, size_t size)
{
    mk_wire_header h;
    memcpy(&h, frame, sizeof h);
    fprintf(f, "%s %u %llu %llu", t->name, h.flags, (unsigned long long)h.stream, (unsigned long long)h.request);
    for (size_t i = 0; i < N_FIELDS; i++) {
        if (fields[i].type != t->number) continue;
        fprintf(f, " %s=", fields[i].name);
        for (unsigned k = 0; k < fields[i].count; k++) {
            const unsigned char *p = frame + 32 + fields[i].at + k * size_of(fields[i].kind);
            uint64_t u = 0;
            memcpy(&u, p, size_of(fields[i].kind));
            float x;
            memcpy(&x, p, 4);
            if (fields[i].kind[0] == 'f')
                fprintf(f, "%s%.9g", k ? "," : "", (double)x);
            else
                fprintf(f, "%s%llu", k ? "," : "", (unsigned long long)u);
        }
    }
    fputs(" : ", f);
    for (size_t i = 0; i < size; i++) fprintf(f, "%02x", frame[i]);
    fputc('\n', f);
}

static void test_python(void **state)
{
    (void)state;
    char path[] = "/tmp/mkd_wire_XXXXXX", command[256];
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    FILE *f = fdopen(fd, "w");
    seed = 7;
    for (size_t k = 0; k < N_TYPES; k++) {
        const mk_wire_type *t = mk_wire_type_of(numbers[k]);
        for (uint32_t n = 0; n <= (t->max_items < 4 ? t->max_items : 4); n++) {
            size_t size;
            unsigned char *frame = make(t, n, &size);
            for (unsigned i = 0; i < N_FIELDS; i++) /* a float that text carries */
                if (fields[i].type == t->number && fields[i].kind[0] == 'f')
                    memcpy(frame + 32 + fields[i].at, &(float){0.125f * (float)(rnd() % 64)}, 4);
            write_vector(f, t, frame, size);
            free(frame);
        }
    }
    assert_int_equal(fclose(f), 0);
    if (system("python3 -c pass >/dev/null 2>&1")) {
        unlink(path);
        print_message("no python3 here\n");
        skip();
    }
    snprintf(command, sizeof command, "python3 -B tests/test_client_py.py %s", path);
    int rc = system(command);
    unlink(path);
    assert_true(WIFEXITED(rc));
    assert_int_equal(WEXITSTATUS(rc), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip), cmocka_unit_test(test_truncated_and_overlong), cmocka_unit_test(test_refusals_say_what),
        cmocka_unit_test(test_fuzz),       cmocka_unit_test(test_text),                   cmocka_unit_test(test_protocol_page),
        cmocka_unit_test(test_python),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
