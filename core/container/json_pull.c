/* SPDX-License-Identifier: Apache-2.0 */
/* The grammar of JSON (RFC 8259), one value at a time. */
#include "container/json_pull.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/utf8.h"

enum { MAX_DEPTH = 64 };

void ckpt_json_pull_init(struct ckpt_json_pull *p, char *text, size_t len, const char *what)
{
    *p = (struct ckpt_json_pull){.begin = text, .at = text, .end = text + len, .what = what};
}

/* Always false. Nothing is left to read. */
static bool fail_at(struct ckpt_json_pull *p, const char *at, const char *expected)
{
    if (!p->failed) {
        p->failed = true;
        p->failed_at = (size_t)(at - p->begin);
        p->found = (unsigned char)*at;
        p->expected = expected;
    }
    p->at = p->end;
    return false;
}

char ckpt_json_pull_peek(struct ckpt_json_pull *p)
{
    while (p->at < p->end && (*p->at == ' ' || *p->at == '\t' || *p->at == '\n' || *p->at == '\r'))
        p->at++;
    return p->failed ? '\0' : *p->at;
}

static bool take(struct ckpt_json_pull *p, char c, const char *expected)
{
    if (ckpt_json_pull_peek(p) != c)
        return fail_at(p, p->at, expected);
    p->at++;
    return true;
}

static bool begin(struct ckpt_json_pull *p, char c, const char *expected)
{
    if (!take(p, c, expected))
        return false;
    if (++p->depth > MAX_DEPTH) {
        p->too_deep = !p->failed;
        return fail_at(p, p->at, "");
    }
    p->first = true;
    return true;
}

/* False: the object or array ends here. */
static bool next(struct ckpt_json_pull *p, char close, const char *expected)
{
    const bool first = p->first;
    const char c = ckpt_json_pull_peek(p);

    p->first = false;
    if (c == close) {
        p->at++;
        p->depth--;
        return false;
    }
    return first ? !p->failed : take(p, ',', expected);
}

bool ckpt_json_pull_object(struct ckpt_json_pull *p) { return begin(p, '{', "an object"); }

bool ckpt_json_pull_array(struct ckpt_json_pull *p) { return begin(p, '[', "an array"); }

bool ckpt_json_pull_element(struct ckpt_json_pull *p) { return next(p, ']', "',' or ']'"); }

const char *ckpt_json_pull_member(struct ckpt_json_pull *p)
{
    if (!next(p, '}', "',' or '}'"))
        return NULL;
    const char *key = ckpt_json_pull_string(p);
    return key && take(p, ':', "':'") ? key : NULL;
}

/* ---- strings ---- */

/* Four hexadecimal digits at s; -1: there are none. */
static int32_t hex4(const char *s)
{
    int32_t v = 0;

    for (int i = 0; i < 4; i++) {
        const char c = s[i];
        const int32_t digit = c >= '0' && c <= '9'   ? c - '0'
                              : c >= 'a' && c <= 'f' ? c - 'a' + 10
                              : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                                     : -1;
        if (digit < 0)
            return -1;
        v = v << 4 | digit;
    }
    return v;
}

static char *put_utf8(char *out, uint32_t c)
{
    if (c < 0x80) {
        *out++ = (char)c;
    } else if (c < 0x800) {
        *out++ = (char)(0xc0 | c >> 6);
        *out++ = (char)(0x80 | (c & 0x3f));
    } else {
        if (c < 0x10000) {
            *out++ = (char)(0xe0 | c >> 12);
        } else {
            *out++ = (char)(0xf0 | c >> 18);
            *out++ = (char)(0x80 | (c >> 12 & 0x3f));
        }
        *out++ = (char)(0x80 | (c >> 6 & 0x3f));
        *out++ = (char)(0x80 | (c & 0x3f));
    }
    return out;
}

/* Write the character of the escape at p->at, which is never longer than the escape, to out.
 * Returns where it ends. NULL: not an escape of JSON. */
static char *unescape(struct ckpt_json_pull *p, char *out)
{
    static const char letter[] = "\"\\/bfnrt", meaning[] = "\"\\/\b\f\n\r\t";
    const char *s = p->at + 1, *found = *s ? strchr(letter, *s) : NULL;

    if (found) {
        p->at += 2;
        *out = meaning[found - letter];
        return out + 1;
    }
    int32_t c = *s == 'u' ? hex4(s + 1) : -1;
    if (c <= 0 || (c >= 0xdc00 && c < 0xe000)) /* not \u0000, either */
        return NULL;
    p->at += 6;
    if (c >= 0xd800 && c < 0xdc00) {
        const int32_t low = p->at[0] == '\\' && p->at[1] == 'u' ? hex4(p->at + 2) : -1;
        if (low < 0xdc00 || low >= 0xe000)
            return NULL;
        p->at += 6;
        c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
    }
    return put_utf8(out, (uint32_t)c);
}

const char *ckpt_json_pull_string(struct ckpt_json_pull *p)
{
    if (!take(p, '"', "string"))
        return NULL;
    char *text = p->at, *out = text;
    while (*p->at != '"') {
        const unsigned char c = (unsigned char)*p->at;
        const size_t n = c < 0x20 ? 0 : c < 0x80 ? 1 : ckpt_utf8_len(p->at);
        if (c == '\\') {
            if (!(out = unescape(p, out))) {
                (void)fail_at(p, p->at, "an escape");
                return NULL;
            }
            continue;
        }
        if (n == 0) { /* so is the end of the text */
            (void)fail_at(p, p->at, "a UTF-8 character or '\"'");
            return NULL;
        }
        if (out != p->at)
            memmove(out, p->at, n);
        out += n;
        p->at += n;
    }
    p->at++;
    *out = '\0';
    return text;
}

/* ---- numbers, and what is skipped ---- */

static size_t digits(const char *s) { return strspn(s, "0123456789"); }

/* The length of the number at s; 0: there is none. */
static size_t number_len(const char *s, bool *ret_real)
{
    size_t at = *s == '-', n = digits(s + at);

    if (n == 0 || (n > 1 && s[at] == '0'))
        return 0;
    at += n;
    *ret_real = false;
    if (s[at] == '.') {
        if ((n = digits(s + at + 1)) == 0)
            return 0;
        at += 1 + n;
        *ret_real = true;
    }
    if (s[at] == 'e' || s[at] == 'E') {
        const size_t sign = s[at + 1] == '-' || s[at + 1] == '+';
        if ((n = digits(s + at + 1 + sign)) == 0)
            return 0;
        at += 1 + sign + n;
        *ret_real = true;
    }
    return at;
}

/* A number of 64 bits (with a sign), or a finite one. True: an integer that is not negative. */
static bool number(struct ckpt_json_pull *p, uint64_t *ret)
{
    const char *s = p->at;
    const bool minus = *s == '-';
    uint64_t v = 0;
    bool real, over = false;
    const size_t n = number_len(s, &real);

    if (n == 0)
        return fail_at(p, s, "a value");
    for (size_t i = minus; i < n && !real; i++)
        over |= ckd_mul(&v, v, (uint64_t)10) || ckd_add(&v, v, (uint64_t)(s[i] - '0'));
    if (real ? isinf(strtod(s, NULL)) : over || v > (uint64_t)INT64_MAX + minus)
        return fail_at(p, s, "a smaller number");
    p->at += n;
    *ret = v;
    return !real && !minus;
}

bool ckpt_json_pull_u64(struct ckpt_json_pull *p, uint64_t *ret)
{
    const char c = ckpt_json_pull_peek(p);

    if (c == '-' || (c >= '0' && c <= '9'))
        return number(p, ret);
    ckpt_json_pull_skip(p);
    return false;
}

static void skip_word(struct ckpt_json_pull *p, const char *word)
{
    const size_t n = strlen(word);

    if (strncmp(p->at, word, n) == 0)
        p->at += n;
    else
        (void)fail_at(p, p->at, "a value");
}

void ckpt_json_pull_skip(struct ckpt_json_pull *p)
{
    uint64_t ignored;

    switch (ckpt_json_pull_peek(p)) {
    case '{':
        (void)ckpt_json_pull_object(p);
        while (ckpt_json_pull_member(p))
            ckpt_json_pull_skip(p);
        break;
    case '[':
        (void)ckpt_json_pull_array(p);
        while (ckpt_json_pull_element(p))
            ckpt_json_pull_skip(p);
        break;
    case '"':
        (void)ckpt_json_pull_string(p);
        break;
    case 't':
        skip_word(p, "true");
        break;
    case 'f':
        skip_word(p, "false");
        break;
    case 'n':
        skip_word(p, "null");
        break;
    default:
        (void)number(p, &ignored);
    }
}

int ckpt_json_pull_end(struct ckpt_json_pull *p, struct ckpt_err *err)
{
    (void)ckpt_json_pull_peek(p);
    if (p->at < p->end)
        (void)fail_at(p, p->at, "the end");
    if (!p->failed)
        return 0;
    if (p->too_deep)
        return ckpt_fail(err, CKPT_LIMIT, "%s: JSON nested deeper than %d", p->what, MAX_DEPTH);
    if (p->failed_at == (size_t)(p->end - p->begin))
        return ckpt_fail(err, CKPT_FORMAT,
                         "%s: not valid JSON: it ends at byte %zu, %s is expected", p->what,
                         p->failed_at, p->expected);
    return ckpt_fail(err, CKPT_FORMAT,
                     "%s: not valid JSON: %s is expected at offset %zu, not byte 0x%02x", p->what,
                     p->expected, p->failed_at, p->found);
}
