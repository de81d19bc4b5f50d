#include "ipc/wire.h"

#include <string.h>

#define X(NAME, number, fixed, item, most, flags, stream, from, reserved)                                                                  \
    [number] = {#NAME, number, fixed, item, most, flags, stream, from, (reserved) >> 4, (reserved)&15},
static const mk_wire_type types[] = {MK_WIRE_TYPES(X)};
#undef X

const mk_wire_type *mk_wire_type_of(uint16_t number)
{
    return number < sizeof types / sizeof types[0] && types[number].name ? &types[number] : NULL;
}

const char *mk_wire_type_name(uint16_t number)
{
    const mk_wire_type *t = mk_wire_type_of(number);
    return t ? t->name : "unknown type";
}

const char *mk_wire_error_name(uint16_t code)
{
    static const char *const name[] = {"OK",      "FRAME",    "VERSION",  "TYPE",    "UNSUPPORTED", "HELLO",
                                       "REFUSED", "CAPACITY", "DRAINING", "DROPPED", "INTERNAL"};
    return code < sizeof name / sizeof name[0] ? name[code] : "unknown error";
}

const char *mk_wire_reason_name(uint32_t reason)
{
    static const char *const name[] = {"complete", "length", "stop", "context", "cancelled", "error"};
    return reason < sizeof name / sizeof name[0] ? name[reason] : "unknown reason";
}

/* In every type that has items, their count is the last field of the fixed part. */
static uint32_t count_of(const mk_wire_type *t, const void *fixed)
{
    uint32_t n = 0;
    if (t->item) memcpy(&n, (const unsigned char *)fixed + t->fixed - 4, 4);
    return n;
}

static int refuse(mk_err *err, int code, const char *type, const char *what, unsigned long long found, unsigned long long expected)
{
    if (type)
        mk_fail(err, MK_E_WIRE, "%s: %s %llu, expected %llu", type, what, found, expected);
    else
        mk_fail(err, MK_E_WIRE, "%s %llu, expected %llu", what, found, expected);
    return code;
}

int mk_wire_decode(const void *frame, size_t size, int from, mk_wire_msg *m, mk_err *err)
{
    const unsigned char *p = frame;
    memset(m, 0, sizeof *m);
    if (size < sizeof m->h) return refuse(err, MK_WIRE_E_FRAME, NULL, "frame too short: bytes", size, sizeof m->h);
    memcpy(&m->h, p, sizeof m->h);
    const mk_wire_header *h = &m->h;
    if (h->magic != MK_WIRE_MAGIC) {
        uint32_t found = h->magic;
        memset(&m->h, 0, sizeof m->h); /* nothing in it can be believed */
        mk_fail(err, MK_E_WIRE, "wrong magic 0x%08x, expected 0x%08x", found, MK_WIRE_MAGIC);
        return MK_WIRE_E_FRAME;
    }
    if (h->version != MK_WIRE_VERSION) return refuse(err, MK_WIRE_E_VERSION, NULL, "protocol version", h->version, MK_WIRE_VERSION);
    const mk_wire_type *t = mk_wire_type_of(h->type);
    if (!t) {
        mk_fail(err, MK_E_WIRE, "unknown message type %u", h->type);
        return MK_WIRE_E_TYPE;
    }
    if (size > MK_WIRE_MAX_FRAME) {
        mk_fail(err, MK_E_WIRE, "%s: frame too long: %zu bytes, the limit is %u", t->name, size, MK_WIRE_MAX_FRAME);
        return MK_WIRE_E_FRAME;
    }
    if (!(t->from & from)) {
        mk_fail(err, MK_E_WIRE, "%s is sent by the %s only", t->name, t->from == MK_WIRE_DAEMON ? "daemon" : "client");
        return MK_WIRE_E_TYPE;
    }
    if (h->flags & ~t->flags) {
        mk_fail(err, MK_E_WIRE, "%s: unsupported flags 0x%x (supported: 0x%x)", t->name, h->flags & ~t->flags, t->flags);
        return MK_WIRE_E_UNSUPPORTED;
    }
    size_t left = size - sizeof m->h;
    if (h->length != left) return refuse(err, MK_WIRE_E_FRAME, t->name, "length in the header", h->length, left);
    if (left < t->fixed) return refuse(err, MK_WIRE_E_FRAME, t->name, "payload too short: bytes", left, t->fixed);
    p += sizeof m->h;
    uint32_t n = count_of(t, p);
    if (n > t->max_items) {
        mk_fail(err, MK_E_WIRE, "%s: %u items, the limit is %u", t->name, n, t->max_items);
        return MK_WIRE_E_FRAME;
    }
    left -= t->fixed;
    if ((size_t)n * t->item != left) /* both far below 2^32 by now */
        return refuse(err, MK_WIRE_E_FRAME, t->name, "bytes after the fixed part", left, (unsigned long long)n * t->item);
    for (uint32_t i = 0; i < t->reserved_size; i++)
        if (p[t->reserved_at + i]) {
            mk_fail(err, MK_E_WIRE, "%s: field reserved (payload offset %u) is not zero", t->name, t->reserved_at);
            return MK_WIRE_E_UNSUPPORTED;
        }
    if (t->stream == 0 && h->stream) {
        mk_fail(err, MK_E_WIRE, "%s: header field stream is %llu, expected 0", t->name, (unsigned long long)h->stream);
        return MK_WIRE_E_UNSUPPORTED;
    }
    if (t->stream == 1 && !h->stream) {
        mk_fail(err, MK_E_WIRE, "%s: header field stream is 0, expected a stream's number", t->name);
        return MK_WIRE_E_REFUSED;
    }
    memcpy(m->fixed, p, t->fixed);
    m->type = t;
    m->n = n;
    m->items = p + t->fixed;
    return 0;
}

size_t mk_wire_size(uint16_t type, uint32_t n)
{
    const mk_wire_type *t = mk_wire_type_of(type);
    return t ? sizeof(mk_wire_header) + t->fixed + (size_t)n * t->item : 0;
}

size_t mk_wire_encode(void *dst, size_t cap, uint16_t type, uint32_t flags, uint64_t stream, uint64_t request, const void *fixed,
                      const void *items)
{
    const mk_wire_type *t = mk_wire_type_of(type);
    if (!t || (flags & ~t->flags) || (t->fixed && !fixed)) return 0;
    uint32_t n = count_of(t, fixed);
    size_t size = mk_wire_size(type, n);
    if (n > t->max_items || (n && !items) || size > cap) return 0;
    mk_wire_header h = {.magic = MK_WIRE_MAGIC,
                        .version = MK_WIRE_VERSION,
                        .type = type,
                        .flags = flags,
                        .length = (uint32_t)(size - sizeof h),
                        .stream = stream,
                        .request = request};
    unsigned char *p = dst;
    memcpy(p, &h, sizeof h);
    if (t->fixed) memcpy(p + sizeof h, fixed, t->fixed);
    if (n) memcpy(p + sizeof h + t->fixed, items, (size_t)n * t->item);
    return size;
}

uint32_t mk_wire_items(const mk_wire_msg *m, void *dst, uint32_t most)
{
    uint32_t n = m->n < most ? m->n : most;
    if (n) memcpy(dst, m->items, (size_t)n * m->type->item);
    return n;
}

/* The bytes of the UTF-8 character at s, which has n: 0: it is malformed. */
static size_t character(const unsigned char *s, size_t n)
{
    const unsigned b = s[0], least = b == 0xe0 ? 0xa0 : b == 0xf0 ? 0x90 : 0x80, most = b == 0xed ? 0x9f : b == 0xf4 ? 0x8f : 0xbf;
    const size_t size = b < 0x80 ? 1 : b >= 0xc2 && b <= 0xdf ? 2 : b >= 0xe0 && b <= 0xef ? 3 : b >= 0xf0 && b <= 0xf4 ? 4 : 0;
    if (size > n || (size > 1 && (s[1] < least || s[1] > most))) return 0;
    for (size_t i = 2; i < size; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    return size;
}

void mk_wire_plain(char *text, size_t n, const char *other)
{
    for (size_t i = 0, size; i < n; i += size) {
        const unsigned char b = (unsigned char)text[i];
        size = character((const unsigned char *)text + i, n - i);
        if (!size || (b && b < 0x20) || b == 0x7f || (b && strchr(other, b))) text[i] = '?', size = 1;
    }
}

static void show(char *dst, size_t cap, const unsigned char *src, size_t n)
{
    if (!cap) return;
    if (n > cap - 1) n = cap - 1;
    for (size_t i = 0; i < n; i++) dst[i] = (char)(src[i] ? src[i] : '?');
    mk_wire_plain(dst, n, "");
    dst[n] = 0;
}

void mk_wire_text(const mk_wire_msg *m, char *dst, size_t cap)
{
    show(dst, cap, m->items, m->type && m->type->item == 1 ? m->n : 0);
}

void mk_wire_welcome_string(const mk_wire_msg *m, int i, char *dst, size_t cap)
{
    const unsigned char *p = m->items, *end = p + m->n;
    for (; i > 0 && p < end; i--) {
        const unsigned char *z = memchr(p, 0, (size_t)(end - p));
        p = z ? z + 1 : end;
    }
    const unsigned char *z = p < end ? memchr(p, 0, (size_t)(end - p)) : NULL;
    show(dst, cap, p, z ? (size_t)(z - p) : 0);
}
