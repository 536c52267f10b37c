/* SPDX-License-Identifier: Apache-2.0 */
/* Error texts: formatting, prefixing, and making hostile names printable. */
#include "base/err.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"

static const char *const code_names[] = {
    [CKPT_OK] = "ok",
    [CKPT_IO] = "io",
    [CKPT_FORMAT] = "format",
    [CKPT_UNSUPPORTED] = "unsupported",
    [CKPT_MISSING] = "missing",
    [CKPT_CONFLICT] = "conflict",
    [CKPT_STALE] = "stale",
    [CKPT_LIMIT] = "limit",
    [CKPT_NOMEM] = "nomem",
    [CKPT_USAGE] = "usage",
    [CKPT_TIMEOUT] = "timeout",
    [CKPT_PEER] = "peer",
    [CKPT_CANCELLED] = "cancelled",
};

const char *ckpt_code_name(enum ckpt_code code)
{
    if ((unsigned)code >= sizeof code_names / sizeof code_names[0])
        return "unknown";
    return code_names[code];
}

/* Copy src into dst so that the result is one printable line; an end that does not fit becomes
 * "...". */
static void copy_printable(char *dst, size_t cap, const char *src)
{
    size_t len = 0, n;

    for (const char *s = src; *s; len += n) {
        char shown[CKPT_UTF8_SHOWN];
        s += ckpt_utf8_show(s, shown, &n);
        if (len + n + 4 > cap) {
            memcpy(dst + len, "...", 3);
            len += 3;
            break;
        }
        memcpy(dst + len, shown, n);
    }
    dst[len] = '\0';
}

static void record(struct ckpt_err *err, enum ckpt_code code, int errnum, const char *fmt,
                   va_list ap)
{
    char raw[4 * CKPT_ERR_TEXT];
    int n = vsnprintf(raw, sizeof raw, fmt, ap);
    size_t len = n < 0 ? 0 : (size_t)n < sizeof raw ? (size_t)n : sizeof raw - 1;

    raw[len] = '\0';
    if (errnum)
        (void)snprintf(raw + len, sizeof raw - len, ": %s", strerror(errnum));
    err->code = code;
    copy_printable(err->text, sizeof err->text, raw);
}

int ckpt_fail(struct ckpt_err *err, enum ckpt_code code, const char *fmt, ...)
{
    if (err && !err->code) {
        va_list ap;
        va_start(ap, fmt);
        record(err, code, 0, fmt, ap);
        va_end(ap);
    }
    return -1;
}

static enum ckpt_code code_of_errno(int errnum)
{
    return errnum == ENOENT || errnum == ENOTDIR ? CKPT_MISSING
           : errnum == ENOMEM                    ? CKPT_NOMEM
           : errnum == ESTALE                    ? CKPT_STALE
                                                 : CKPT_IO;
}

int ckpt_fail_errno(struct ckpt_err *err, int errnum, const char *fmt, ...)
{
    if (err && !err->code) {
        va_list ap;
        va_start(ap, fmt);
        record(err, code_of_errno(errnum), errnum, fmt, ap);
        va_end(ap);
    }
    return -1;
}

int ckpt_err_move(struct ckpt_err *err, const struct ckpt_err *own)
{
    if (err && !err->code)
        *err = *own;
    return -1;
}

int ckpt_nomem(struct ckpt_err *err) { return ckpt_fail(err, CKPT_NOMEM, "out of memory"); }

int ckpt_err_in(struct ckpt_err *err, const char *fmt, ...)
{
    char raw[2 * CKPT_ERR_TEXT];
    va_list ap;

    if (!err || !err->code)
        return -1;
    va_start(ap, fmt);
    const int n = vsnprintf(raw, CKPT_ERR_TEXT, fmt, ap);
    va_end(ap);
    const size_t len = n < 0 ? 0 : n < CKPT_ERR_TEXT ? (size_t)n : CKPT_ERR_TEXT - 1;
    (void)snprintf(raw + len, sizeof raw - len, ": %s", err->text);
    copy_printable(err->text, sizeof err->text, raw);
    return -1;
}
