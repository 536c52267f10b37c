/* SPDX-License-Identifier: Apache-2.0 */
/* Errors and owning locals of the programs. */
#include "fail.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void ckptfs_freep(void *p)
{
    int saved = errno;
    void **pp = p;
    free(*pp);
    *pp = NULL;
    errno = saved;
}

void ckptfs_closep(int *fd)
{
    int saved = errno;
    if (*fd >= 0)
        (void)close(*fd);
    *fd = -1;
    errno = saved;
}

void ckptfs_viewp(struct ckpt_view **view)
{
    ckpt_view_release(*view);
    *view = NULL;
}

static void record(struct ckpt_err *err, enum ckpt_code code, const char *fmt, va_list ap)
{
    if (!err || err->code)
        return;
    err->code = code;
    (void)vsnprintf(err->text, sizeof err->text, fmt, ap);
}

int ckptfs_fail(struct ckpt_err *err, enum ckpt_code code, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    record(err, code, fmt, ap);
    va_end(ap);
    return -1;
}

int ckptfs_fail_errno(struct ckpt_err *err, int errnum, const char *fmt, ...)
{
    enum ckpt_code code = errnum == ENOENT || errnum == ENOTDIR ? CKPT_MISSING
                          : errnum == ENOMEM                    ? CKPT_NOMEM
                                                                : CKPT_IO;
    va_list ap;

    if (!err || err->code)
        return -1;
    va_start(ap, fmt);
    record(err, code, fmt, ap);
    va_end(ap);
    size_t len = strlen(err->text);
    (void)snprintf(err->text + len, sizeof err->text - len, ": %s", strerror(errnum));
    return -1;
}

int ckptfs_nomem(struct ckpt_err *err) { return ckptfs_fail(err, CKPT_NOMEM, "out of memory"); }

char *ckptfs_text(const char *fmt, ...)
{
    va_list ap;
    char *text = NULL;

    va_start(ap, fmt);
    int n = vasprintf(&text, fmt, ap);
    va_end(ap);
    return n < 0 ? NULL : text;
}
