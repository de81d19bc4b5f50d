/* mkctl score FILE: bits per byte of a text under a byte-level model, through the normal path (APPEND with logprobs).
 *
 * The text is cut into pieces of window - 1 bytes, each behind the begin token, no overlap, every piece a stream of its own: the rule of
 * tests/english/check.py. Bits per byte = -sum log2 p / bytes, every byte scored once. */
#include "ipc/client.h"
#include "ipc/mkctl.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BYTES 256u

static int read_file(const char *path, uint8_t **data, size_t *n, mk_err *err)
{
    FILE *f = fopen(path, "rb");
    long size = -1;
    *data = NULL;
    if (!f) return mk_fail(err, MK_E_SYSTEM, "%s: %s", path, strerror(errno));
    if (!fseek(f, 0, SEEK_END)) size = ftell(f);
    rewind(f);
    if (size >= 0) *data = malloc((size_t)size + 1);
    *n = *data ? fread(*data, 1, (size_t)size, f) : 0;
    int bad = !*data || *n != (size_t)size;
    fclose(f);
    if (bad) return mk_fail(err, MK_E_SYSTEM, "%s: cannot be read as a file of known size", path);
    return *n ? MK_OK : mk_fail(err, MK_E_USAGE, "%s: the file is empty", path);
}

/* Bits of one piece; stream opened and closed here. */
static int score_piece(mk_client *c, uint32_t bos, const uint8_t *text, uint32_t n, double *bits, mk_err *err)
{
    uint32_t *ids = malloc((n + 1) * sizeof *ids);
    float *lp = malloc((n + 1) * sizeof *lp);
    mk_client_options o = {.context = n + 1};
    mk_client_stream *s = NULL;
    int rc = ids && lp ? MK_OK : mk_fail(err, MK_E_SYSTEM, "out of memory");
    if (!rc && !(s = mk_client_open(c, &o, 10000, err))) rc = err->code;
    if (!rc) {
        ids[0] = bos;
        for (uint32_t i = 0; i < n; i++) ids[i + 1] = text[i];
        rc = mk_client_append(s, ids, n + 1, lp, 600000, err);
        *bits = 0;
        for (uint32_t i = 1; !rc && i <= n; i++) {
            if (!isfinite(lp[i]) || lp[i] > 1e-3f) rc = mk_fail(err, MK_E_WIRE, "token %u of a piece: its log probability is %g", i, (double)lp[i]);
            *bits -= (double)lp[i] / M_LN2;
        }
    }
    mk_err ignored;
    if (s) mk_client_close(&s, 10000, &ignored);
    free(ids);
    free(lp);
    return rc;
}

int mkctl_score(int argc, char **argv)
{
    const char *dir = mkctl_default_dir(), *path = NULL;
    uint32_t window = 1024, bos = BYTES, limit = 0;
    int verbose = 0;
    const mkctl_flag flag[] = {
        {"--socket-dir", MKCTL_TEXT, &dir, "the daemon's sockets"},
        {"--window", MKCTL_U32, &window, "tokens of a piece, the begin token included"},
        {"--bos", MKCTL_U32, &bos, "the begin token"},
        {"--limit", MKCTL_U32, &limit, "score only this many bytes; 0: all"},
        {"--verbose", MKCTL_SET, &verbose, "a line for every piece"},
    };
    size_t given = 0, n = 0;
    int rc = mkctl_flags(argc, argv, flag, sizeof flag / sizeof flag[0], &path, 1, &given);
    if (rc) return rc < 0 ? MK_OK : rc;
    if (!given) return mkctl_usage("score: name a text file");
    if (window < 2) return mkctl_usage("score: --window: expected at least 2, found %u", window);
    mk_err err = {0};
    uint8_t *text = NULL;
    double total = 0;
    mk_client *c = NULL;
    if ((rc = read_file(path, &text, &n, &err))) goto done;
    if (limit && limit < n) n = limit;
    if (!(c = mk_client_new(dir, "mkctl score", 5000, &err))) {
        rc = err.code;
        goto done;
    }
    const mk_wire_welcome *w = &mk_client_about(c)->welcome;
    if (w->vocab < BYTES || w->vocab > BYTES + 64 || bos >= w->vocab) {
        rc = mk_fail(&err, MK_E_USAGE, "expected a byte-level model (256 bytes and a few special ids, begin token %u); this one has %u ids", bos, w->vocab);
        goto done;
    }
    for (size_t at = 0, piece = 0; at < n; piece++) {
        uint32_t m = n - at < window - 1 ? (uint32_t)(n - at) : window - 1;
        double bits = 0;
        if ((rc = score_piece(c, bos, text + at, m, &bits, &err))) goto done;
        if (verbose) printf("piece %zu: %u bytes, %.3f bits\n", piece, m, bits);
        total += bits;
        at += m;
    }
    printf("%.6f bits per byte over %zu bytes of %s\n", total / (double)n, n, path);
done:
    if (rc) mkctl_failed("score", &err);
    mk_client_destroy(&c);
    free(text);
    return rc;
}
