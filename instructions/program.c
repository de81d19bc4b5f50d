/* Program files, and what a program owns. */
#include "instructions/program.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static_assert(sizeof(mk_program_info) == 152, "the header of a program file has no holes");

/* Most of what a file may claim. Workers and vectors have 16-bit names; the others bound what load allocates. */
#define MAX_WORKERS 65534u
#define MAX_VECS    65534u
#define MAX_STARTS  (1u << 26)
#define MAX_INSNS   (1u << 24)

const char *mk_opcode_name(unsigned op)
{
    static const char *const name[MK_OP_COUNT] = {
#define X(number, NAME, lower, text) [number] = #NAME,
        MK_OPCODES(X)
#undef X
    };
    return op < MK_OP_COUNT && name[op] ? name[op] : "?";
}

int mk_slices_deal(uint32_t dtype, uint32_t trailer, uint32_t n, uint32_t first, uint32_t k, uint32_t head, mk_deal *out)
{
    const mk_vec v = {.scope = MK_PACKET, .dtype = (uint8_t)dtype, .trailer = (uint8_t)trailer};
    const uint32_t packet = dtype == MK_F32 ? 3 : 6;
    if (!n || n > 0xffff || !k) return 0;
    mk_deal d = {.slice = (uint16_t)n, .per = (uint16_t)mk_slice_packets(&v, n)};
    if (!head && !trailer && n % packet == 0) {
        if (first % packet) return 0;
        d = (mk_deal){.packets = (uint16_t)(MK_DEAL_ROW / packet), .values = MK_DEAL_ROW, .slice = (uint16_t)packet, .per = 1};
    } else {
        uint32_t slices = head ? head / n : 1;
        if (first || d.per > MK_DEAL_PACKETS || (head && (!trailer || head % n || k % head))) return 0;
        while (!head && 2 * slices * d.per <= MK_DEAL_PACKETS) slices *= 2;
        if (!slices || slices * d.per > MK_DEAL_PACKETS || slices * n % MK_DEAL_VALUES) return 0;
        d.packets = (uint16_t)(slices * d.per);
        d.values = (uint16_t)(slices * n);
    }
    uint32_t groups = (k + d.values - 1) / d.values, loads = (d.packets + MK_DEAL_PACKETS - 1) / MK_DEAL_PACKETS;
    if ((groups + MK_DEAL_WARPS - 1) / MK_DEAL_WARPS * loads > MK_DEAL_LOADS) return 0;
    *out = d;
    return 1;
}

int mk_vec_deal(const mk_vec *v, const uint32_t *start, uint32_t slice0, uint32_t nslice, uint32_t in_off, uint32_t k, uint32_t head, mk_deal *out)
{
    if (v->scope != MK_PACKET || !nslice || slice0 >= v->nslice || nslice > v->nslice - slice0) return 0;
    const uint32_t *own = start + slice0, n = own[1] - own[0], end = slice0 + nslice == v->nslice;
    if (in_off < own[0] || in_off >= own[nslice] || k > own[nslice] - in_off) return 0;
    for (uint32_t s = 1; s < nslice; s++) {
        uint32_t more = own[s + 1] - own[s];
        if (!more || more > n || (more < n && (head || !end || s + 1 < nslice))) return 0;
    }
    if (mk_slice_packets(v, n) != v->slice_packets) return 0; /* a longer slice elsewhere: these have packets that nobody publishes */
    if (own[0] != slice0 * n || (head && in_off % head)) return 0;
    return mk_slices_deal(v->dtype, v->trailer, n, in_off - own[0], k, head, out);
}

void mk_program_destroy(mk_program **pp)
{
    if (!pp || !*pp) return;
    mk_program *p = *pp;
    free(p->vec);
    free(p->start);
    free(p->queue);
    free(p->tape_base);
    free(p->insn);
    free(p);
    *pp = NULL;
}

/* CRC-32 (IEEE 802.3, reflected polynomial 0xedb88320), continued from `crc` (0 to begin). */
static uint32_t crc32_more(uint32_t crc, const void *data, size_t n)
{
    uint32_t table[256];
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int b = 0; b < 8; b++) c = (c >> 1) ^ ((c & 1u) ? 0xedb88320u : 0u);
        table[i] = c;
    }
    const uint8_t *b = data;
    crc = ~crc;
    for (size_t i = 0; i < n; i++) crc = (crc >> 8) ^ table[(crc ^ b[i]) & 0xffu];
    return ~crc;
}

/* The five arrays of a file, in file order. */
typedef struct part {
    const char *what;
    void *data;
    size_t bytes;
} part;

static void parts_of(const mk_program *p, part out[5])
{
    const mk_program_info *i = &p->info;
    out[0] = (part){"vector table", p->vec, (size_t)i->n_vec * sizeof *p->vec};
    out[1] = (part){"slice starts", p->start, (size_t)i->n_start * sizeof *p->start};
    out[2] = (part){"queue offsets", p->queue, ((size_t)i->workers + 1) * sizeof *p->queue};
    out[3] = (part){"tape offsets", p->tape_base, ((size_t)i->workers + 1) * sizeof *p->tape_base};
    out[4] = (part){"instructions", p->insn, (size_t)i->n_insn * sizeof *p->insn};
}

int mk_program_save(const mk_program *p, const char *path, mk_err *err)
{
    struct stat st;
    if (!lstat(path, &st) && !S_ISREG(st.st_mode)) return mk_fail(err, MK_E_SYSTEM, "%s: expected a regular file, or none: it would be replaced", path);
    size_t len = strlen(path) + 5;
    char *tmp = malloc(len);
    if (!tmp) return mk_fail(err, MK_E_SYSTEM, "%s: out of memory", path);
    snprintf(tmp, len, "%s.tmp", path);

    int rc = MK_OK;
    FILE *f = fopen(tmp, "wb");
    if (!f) {
        rc = mk_fail(err, MK_E_SYSTEM, "cannot create %s: %s", tmp, strerror(errno));
        goto out;
    }
    part a[5];
    parts_of(p, a);
    uint32_t crc = crc32_more(0, &p->info, sizeof p->info);
    int ok = fwrite(&p->info, sizeof p->info, 1, f) == 1;
    for (int i = 0; i < 5 && ok; i++) {
        crc = crc32_more(crc, a[i].data, a[i].bytes);
        ok = fwrite(a[i].data, 1, a[i].bytes, f) == a[i].bytes;
    }
    ok = ok && fwrite(&crc, sizeof crc, 1, f) == 1;
    ok = fclose(f) == 0 && ok;
    if (!ok) rc = mk_fail(err, MK_E_SYSTEM, "writing %s: %s", tmp, strerror(errno));
    if (!rc && rename(tmp, path) != 0) rc = mk_fail(err, MK_E_SYSTEM, "renaming %s to %s: %s", tmp, path, strerror(errno));
    if (rc) unlink(tmp);
out:
    free(tmp);
    return rc;
}

static int check_header(const mk_program_info *i, const char *path, mk_err *err)
{
    if (i->magic != MK_PROGRAM_MAGIC)
        return mk_fail(err, MK_E_PROGRAM, "%s: not a program file: magic is 0x%08x, expected 0x%08x", path, i->magic,
                       MK_PROGRAM_MAGIC);
    if (i->version != MK_PROGRAM_VERSION)
        return mk_fail(err, MK_E_PROGRAM, "%s: program version %u, expected %u", path, i->version, MK_PROGRAM_VERSION);
    const struct {
        const char *what;
        uint32_t n, least, most;
    } count[] = {
        {"workers", i->workers, 1, MAX_WORKERS},
        {"vectors", i->n_vec, 1, MAX_VECS},
        {"slice starts", i->n_start, 0, MAX_STARTS},
        {"instructions", i->n_insn, 1, MAX_INSNS},
    };
    for (size_t k = 0; k < sizeof count / sizeof count[0]; k++)
        if (count[k].n < count[k].least || count[k].n > count[k].most)
            return mk_fail(err, MK_E_PROGRAM, "%s: header says %u %s, expected %u to %u", path, count[k].n, count[k].what,
                           count[k].least, count[k].most);
    return MK_OK;
}

int mk_program_load(const char *path, mk_program **out, mk_err *err)
{
    *out = NULL;
    FILE *f = fopen(path, "rb");
    if (!f) return mk_fail(err, MK_E_SYSTEM, "cannot open %s: %s", path, strerror(errno));

    int rc;
    mk_program *p = calloc(1, sizeof *p);
    struct stat st;
    if (!p) {
        rc = mk_fail(err, MK_E_SYSTEM, "%s: out of memory", path);
        goto out;
    }
    if (fstat(fileno(f), &st) != 0 || !S_ISREG(st.st_mode)) {
        rc = mk_fail(err, MK_E_SYSTEM, "%s: not a regular file", path);
        goto out;
    }
    if (fread(&p->info, sizeof p->info, 1, f) != 1) {
        rc = mk_fail(err, MK_E_PROGRAM, "%s: truncated: %lld bytes, a program's header alone is %zu", path, (long long)st.st_size,
                     sizeof p->info);
        goto out;
    }
    rc = check_header(&p->info, path, err);
    if (rc) goto out;

    part a[5];
    parts_of(p, a);
    uint64_t want = sizeof p->info + sizeof(uint32_t);
    for (int i = 0; i < 5; i++) want += a[i].bytes;
    if ((uint64_t)st.st_size != want) {
        rc = mk_fail(err, MK_E_PROGRAM, "%s: %s: %lld bytes, the header's counts make %llu", path,
                     (uint64_t)st.st_size < want ? "truncated" : "trailing bytes", (long long)st.st_size,
                     (unsigned long long)want);
        goto out;
    }
    p->vec = malloc(a[0].bytes);
    p->start = malloc(a[1].bytes + 1); /* there may be none */
    p->queue = malloc(a[2].bytes);
    p->tape_base = malloc(a[3].bytes);
    p->insn = malloc(a[4].bytes);
    if (!p->vec || !p->start || !p->queue || !p->tape_base || !p->insn) {
        rc = mk_fail(err, MK_E_SYSTEM, "%s: out of memory for a program of %llu bytes", path, (unsigned long long)want);
        goto out;
    }
    parts_of(p, a);
    uint32_t crc = crc32_more(0, &p->info, sizeof p->info), stored = 0;
    for (int i = 0; i < 5; i++) {
        if (fread(a[i].data, 1, a[i].bytes, f) != a[i].bytes) {
            rc = mk_fail(err, MK_E_PROGRAM, "%s: truncated in the %s", path, a[i].what);
            goto out;
        }
        crc = crc32_more(crc, a[i].data, a[i].bytes);
    }
    if (fread(&stored, sizeof stored, 1, f) != 1) {
        rc = mk_fail(err, MK_E_PROGRAM, "%s: truncated before the checksum", path);
        goto out;
    }
    if (stored != crc) {
        rc = mk_fail(err, MK_E_PROGRAM, "%s: corrupted: CRC-32 is 0x%08x, the file says 0x%08x", path, crc, stored);
        goto out;
    }
out:
    fclose(f);
    if (rc) mk_program_destroy(&p);
    *out = p;
    return rc;
}
