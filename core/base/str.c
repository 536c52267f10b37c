/* SPDX-License-Identifier: Apache-2.0 */
/* Growing strings, and small functions on strings. */
#include "base/str.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/mem.h"

void ckpt_str_release(struct ckpt_str *s)
{
    free(s->ptr);
    *s = (struct ckpt_str){0};
}

static bool reserve(struct ckpt_str *s, size_t more)
{
    size_t need, cap;

    if (s->failed || ckd_add(&need, s->len, more) || ckd_add(&need, need, (size_t)1)) {
        s->failed = true;
        return false;
    }
    if (need <= s->cap)
        return true;
    cap = s->cap < 64 ? 64 : s->cap;
    while (cap < need)
        cap = cap > SIZE_MAX / 2 ? need : cap * 2;
    char *p = realloc(s->ptr, cap);
    if (!p) {
        s->failed = true;
        return false;
    }
    s->ptr = p;
    s->cap = cap;
    return true;
}

void ckpt_str_append(struct ckpt_str *s, const char *ptr, size_t len)
{
    if (!reserve(s, len))
        return;
    if (len)
        memcpy(s->ptr + s->len, ptr, len);
    s->len += len;
    s->ptr[s->len] = '\0';
}

void ckpt_str_puts(struct ckpt_str *s, const char *text) { ckpt_str_append(s, text, strlen(text)); }

void ckpt_str_putc(struct ckpt_str *s, char c) { ckpt_str_append(s, &c, 1); }

void ckpt_str_printf(struct ckpt_str *s, const char *fmt, ...)
{
    va_list ap, again;
    int n;

    va_start(ap, fmt);
    va_copy(again, ap);
    n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (n < 0)
        s->failed = true;
    else if (reserve(s, (size_t)n)) {
        (void)vsnprintf(s->ptr + s->len, (size_t)n + 1, fmt, again);
        s->len += (size_t)n;
    }
    va_end(again);
}

void ckpt_str_clear(struct ckpt_str *s)
{
    s->len = 0;
    if (s->ptr)
        s->ptr[0] = '\0';
}

const char *ckpt_str_get(const struct ckpt_str *s) { return s->ptr ? s->ptr : ""; }

int ckpt_str_steal(struct ckpt_str *s, char **ret_text, struct ckpt_err *err)
{
    ckpt_str_append(s, "", 0);
    if (s->failed) {
        ckpt_str_release(s);
        return ckpt_nomem(err);
    }
    *ret_text = s->ptr;
    *s = (struct ckpt_str){0};
    return 0;
}

char *ckpt_asprintf(const char *fmt, ...)
{
    va_list ap;
    char *text = NULL;

    va_start(ap, fmt);
    int n = vasprintf(&text, fmt, ap);
    va_end(ap);
    return n < 0 ? NULL : text;
}

char *ckpt_printable(const char *bytes)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str out = {0};

    for (const char *s = bytes; *s;) {
        char shown[CKPT_UTF8_SHOWN];
        size_t n;
        s += ckpt_utf8_show(s, shown, &n);
        ckpt_str_append(&out, shown, n);
    }
    ckpt_str_putc(&out, '\0');
    return out.failed ? NULL : ckpt_steal(&out.ptr);
}

bool ckpt_has_prefix(const char *s, const char *prefix)
{
    return strncmp(s, prefix, strlen(prefix)) == 0;
}

bool ckpt_has_suffix(const char *s, const char *suffix)
{
    size_t n = strlen(s), m = strlen(suffix);
    return n >= m && memcmp(s + n - m, suffix, m) == 0;
}

bool ckpt_one_of(const char *s, const char *const *words)
{
    while (*words && strcmp(s, *words) != 0)
        words++;
    return *words;
}

void ckpt_remove_word(char *s, const char *word)
{
    const size_t len = strlen(word);

    for (char *at; (at = strstr(s, word));)
        memmove(at, at + len, strlen(at + len) + 1);
}

bool ckpt_parse_u64(const char *s, size_t len, unsigned long long *ret_value)
{
    unsigned long long v = 0;

    if (len == 0)
        return false;
    for (size_t i = 0; i < len; i++) {
        if (s[i] < '0' || s[i] > '9')
            return false;
        if (ckd_mul(&v, v, 10ULL) || ckd_add(&v, v, (unsigned long long)(s[i] - '0')))
            return false;
    }
    *ret_value = v;
    return true;
}

/* Not strspn, which makes a table for each call: lists of 10^5 names are sorted by this. */
static size_t digits_at(const char *s)
{
    size_t n = 0;

    while (s[n] >= '0' && s[n] <= '9')
        n++;
    return n;
}

static int digits_cmp(const char *a, size_t na, const char *b, size_t nb)
{
    while (na > 1 && *a == '0') {
        a++;
        na--;
    }
    while (nb > 1 && *b == '0') {
        b++;
        nb--;
    }
    if (na != nb)
        return na < nb ? -1 : 1;
    return memcmp(a, b, na);
}

int ckpt_natural_cmp(const char *a, const char *b)
{
    const char *p = a, *q = b;

    while (*p && *q) {
        size_t np = digits_at(p), nq = digits_at(q);
        if (np && nq) {
            int c = digits_cmp(p, np, q, nq);
            if (c)
                return c;
            p += np;
            q += nq;
        } else if (*p != *q) {
            break;
        } else {
            p++;
            q++;
        }
    }
    if (*p != *q)
        return (unsigned char)*p < (unsigned char)*q ? -1 : 1;
    return strcmp(a, b);
}

void ckpt_str_put_u64(struct ckpt_str *s, unsigned long long value)
{
    char digits[24];
    size_t at = sizeof digits;

    do
        digits[--at] = (char)('0' + value % 10);
    while (value /= 10);
    ckpt_str_append(s, digits + at, sizeof digits - at);
}

const char *ckpt_path_advice(const char *path)
{
    for (const char *p = path; *p; p += strcspn(p, "/"), p += *p == '/') {
        const size_t n = strspn(p, "abcdefghijklmnopqrstuvwxyz0123456789+.-S");
        if ((n > 1 && p[n] == ':' && p[n + 1] == '/') || ckpt_has_prefix(p, "arn:aws"))
            return " (expected s3://BUCKET/PREFIX, or a path of this machine: for other stores, "
                   "mount the bucket first, by gcsfuse or rclone)";
    }
    return "";
}
