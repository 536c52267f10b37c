/* SPDX-License-Identifier: Apache-2.0 */
/* Errors: a text for a person and one of twelve codes for a program. */
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
    CKPT_IO,          /* the operating system failed an open, a read or a listing */
    CKPT_FORMAT,      /* the bytes contradict the format's specification */
    CKPT_UNSUPPORTED, /* valid input that the library does not support */
    CKPT_MISSING,     /* a file, tensor, step or key does not exist */
    CKPT_CONFLICT,    /* two sources disagree, or several answers are possible */
    CKPT_STALE,       /* a file changed since it was opened */
    CKPT_LIMIT,       /* a documented limit was exceeded */
    CKPT_NOMEM,
    CKPT_USAGE, /* a mistake of the caller or the user */
    CKPT_TIMEOUT,
    CKPT_PEER, /* another rank of the job failed */
    CKPT_CANCELLED,
};

#define CKPT_ERR_TEXT 1024

/* An error, owned by the caller, who sets it to all zero before the first call. The first error is
 * kept: a later failure does not replace it. `text` is one line of UTF-8 that says which file,
 * where in the file, what was found and what was expected. */
struct ckpt_err {
    enum ckpt_code code;
    char text[CKPT_ERR_TEXT];
};

/* The name of a code in lower case ("format", "missing", ...). Static storage. */
CKPT_PUBLIC const char *ckpt_code_name(enum ckpt_code code);

#ifdef __cplusplus
}
#endif

#endif
