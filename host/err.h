/* One error type for the whole project: a code, and one line that says what was expected, what was found and where. */
#ifndef MK_ERR_H
#define MK_ERR_H

/* The codes double as exit codes of mkd and mkctl (README, "Exit codes"). */
enum mk_code {
    MK_OK = 0,
    MK_E_USAGE = 2,     /* bad flag, bad configuration file */
    MK_E_MODEL = 3,     /* checkpoint refused: missing, truncated, wrong shape, unsupported field */
    MK_E_PROGRAM = 4,   /* program refused by the validator */
    MK_E_CAPACITY = 5,  /* does not fit: memory, pools, pages, context */
    MK_E_SYSTEM = 6,    /* the operating system said no: files, sockets, memory */
    MK_E_RUNNING = 7,   /* another daemon holds the lock */
    MK_E_WIRE = 8,      /* malformed or refused message */
    MK_E_DEVICE = 9,    /* GPU or driver failed */
    MK_E_TIMEOUT = 10,  /* drain or wait limit reached */
    MK_E_CLOSED = 11,   /* the other side is gone */
    MK_E_BUG = 70       /* an internal promise was broken */
};

typedef struct mk_err {
    int code;
    char msg[512];
} mk_err;

/* Fills *err (may be NULL) and returns code, so that callers write `return mk_fail(...)`. */
int mk_fail(mk_err *err, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Puts "<prefix>: " in front of the message; keeps the code and returns it. */
int mk_err_prefix(mk_err *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif
