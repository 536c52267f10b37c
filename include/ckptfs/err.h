/* SPDX-License-Identifier: Apache-2.0 */
/* What went wrong, in words for a person and as one of twelve codes for a program. */
#ifndef CKPTFS_ERR_H
#define CKPTFS_ERR_H

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define CKPT_PUBLIC __attribute__((visibility("default")))
#define CKPT_PRINTF(f, a) __attribute__((format(printf, f, a)))
#else
#define CKPT_PUBLIC
#define CKPT_PRINTF(f, a)
#endif

enum ckpt_code {
    CKPT_OK = 0,
    CKPT_IO,          /* the operating system refused a read, an open, a listing */
    CKPT_FORMAT,      /* the bytes contradict the format's specification */
    CKPT_UNSUPPORTED, /* legal, but we do not do it */
    CKPT_MISSING,     /* a file, tensor, step or key is not there */
    CKPT_CONFLICT,    /* two sources disagree, or several answers fit */
    CKPT_STALE,       /* a file changed since it was opened */
    CKPT_LIMIT,       /* larger than a stated limit */
    CKPT_NOMEM,
    CKPT_USAGE, /* the caller's or the user's mistake */
    CKPT_TIMEOUT,
    CKPT_PEER, /* another rank failed */
    CKPT_CANCELLED,
};

#define CKPT_ERR_TEXT 1024

/* Owned by the caller, zero-initialised. The first error wins: a later failure does not replace it.
 * `text` is one line of UTF-8: which file, where, what was found, what was expected. */
struct ckpt_err {
    enum ckpt_code code;
    char text[CKPT_ERR_TEXT];
};

/* The code's name in lower case ("format", "missing", ...). Static storage. */
CKPT_PUBLIC const char *ckpt_code_name(enum ckpt_code code);

#ifdef __cplusplus
}
#endif

#endif
