#include "ipc/server_internal.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

/* ---- tables --------------------------------------------------------------------------------------------------------- */

static uint32_t bucket_of_id(const uint8_t *id, size_t n)
{
    uint32_t x = 2166136261u;
    for (size_t i = 0; i < n; i++) x = (x ^ id[i]) * 16777619u;
    return x % MK_SERVER_BUCKETS;
}

static uint32_t bucket_of_stream(uint64_t id)
{
    return (uint32_t)((id * 0x9e3779b97f4a7c15u) >> 32) % MK_SERVER_BUCKETS;
}

mk_server_client *mk_server_client_by_id(mk_server *v, const uint8_t *id, size_t n)
{
    mk_server_client *c = v->client_head[bucket_of_id(id, n)];
    while (c && (c->id_size != n || memcmp(c->id, id, n))) c = c->hash_next;
    return c;
}

mk_server_client *mk_server_client_by_owner(mk_server *v, uint64_t owner)
{
    uint64_t i = owner & 0xffff;
    return owner && i < v->max_clients && v->clients[i].owner == owner ? &v->clients[i] : NULL;
}

mk_server_stream *mk_server_stream_by_id(mk_server *v, uint64_t id)
{
    mk_server_stream *t = v->stream_head[bucket_of_stream(id)];
    while (t && t->id != id) t = t->hash_next;
    return t;
}

void mk_server_stream_add(mk_server *v, mk_server_client *c, mk_server_stream *t)
{
    t->owner = c->owner;
    t->last = &t->first;
    mk_server_stream **head = &v->stream_head[bucket_of_stream(t->id)];
    t->hash_next = *head;
    *head = t;
    t->next = c->streams;
    c->streams = t;
    c->n_streams++;
}

void mk_server_append_pop(mk_server_stream *t)
{
    mk_server_append *a = t->first;
    t->first = a->next;
    if (!t->first) t->last = &t->first;
    free(a);
}

void mk_server_stream_forget(mk_server *v, mk_server_client *c, mk_server_stream *t)
{
    mk_server_stream **p = &v->stream_head[bucket_of_stream(t->id)];
    while (*p != t) p = &(*p)->hash_next;
    *p = t->hash_next;
    for (p = &c->streams; *p != t; p = &(*p)->next) {}
    *p = t->next;
    for (p = &v->dirty; *p && *p != t; p = &(*p)->dirty_next) {}
    if (*p) *p = t->dirty_next;
    while (t->first) mk_server_append_pop(t);
    c->n_streams--;
    free(t);
}

void mk_server_client_forget(mk_server *v, mk_server_client *c)
{
    while (c->streams) mk_server_stream_forget(v, c, c->streams);
    mk_server_client **p = &v->client_head[bucket_of_id(c->id, c->id_size)];
    while (*p != c) p = &(*p)->hash_next;
    *p = c->hash_next;
    v->n_clients--;
    v->n_gone -= (uint32_t)c->gone;
    memset(c, 0, sizeof *c);
}

mk_server_client *mk_server_client_new(mk_server *v, const uint8_t *id, size_t n)
{
    mk_server_client *c = NULL, *idle = NULL;
    for (uint32_t i = 0; i < v->max_clients && !c; i++) {
        mk_server_client *k = &v->clients[i];
        if (!k->owner)
            c = k;
        else if (!k->n_streams && (!idle || k->heard_ns < idle->heard_ns))
            idle = k;
    }
    if (!c) {
        if (!idle) return NULL;
        mk_server_client_forget(v, idle);
        c = idle;
    }
    c->owner = ++v->serial << 16 | (uint64_t)(c - v->clients);
    c->id_size = (uint8_t)n;
    memcpy(c->id, id, n);
    mk_server_client **head = &v->client_head[bucket_of_id(id, n)];
    c->hash_next = *head;
    *head = c;
    v->n_clients++;
    return c;
}

/* ---- sending -------------------------------------------------------------------------------------------------------- */

/* Sends the frame of `size` bytes in v->out; never blocks. 0, or the errno: EHOSTUNREACH (nobody there), EAGAIN (it does not read). */
static int put(mk_server *v, const uint8_t *id, size_t id_size, size_t size)
{
    while (zmq_send(v->router, id, id_size, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0)
        if (errno != EINTR) return errno;
    while (zmq_send(v->router, v->out, size, ZMQ_DONTWAIT) < 0)
        if (errno != EINTR) return errno;
    return 0;
}

void mk_server_send(mk_server *v, mk_server_client *c, uint16_t type, uint64_t stream_id, uint64_t request, const void *fixed, const void *items)
{
    if (c->gone) return;
    size_t size = mk_wire_encode(v->out, sizeof v->out, type, 0, stream_id, request, fixed, items);
    if (!size) {
        mk_server_say(v, MK_SERVER_WARN, "bug: %s could not be encoded", mk_wire_type_name(type));
        return;
    }
    int rc = put(v, c->id, c->id_size, size);
    if (!rc) return;
    c->gone = 1;
    v->n_gone++;
    if (rc == EAGAIN) v->overruns++;
    mk_server_say(v, MK_SERVER_DEBUG, "client \"%s\" %s", c->name, rc == EAGAIN ? "does not read its messages" : "is gone");
}

void mk_server_send_err(mk_server *v, const uint8_t *id, size_t id_size, const mk_wire_header *h, uint16_t code,
                        const char *fmt, ...)
{
    char text[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    mk_wire_err body = {.code = code, .about = h->type, .n = (uint32_t)strlen(text)};
    size_t size = mk_wire_encode(v->out, sizeof v->out, MK_WIRE_ERR, 0, h->stream, h->request, &body, text);
    v->errors++;
    if (size) put(v, id, id_size, size); /* a client that is gone is found by its streams' messages or by its silence */
}
