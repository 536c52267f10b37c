/* SPDX-License-Identifier: Apache-2.0 */
/* jansson with limits; Python's number spelling. */
#include "base/json.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/ckd.h"
#include "base/mem.h"
#include "base/sort.h"
#include "base/str.h"
#include "base/utf8.h"

enum { MAX_DEPTH = 64 };

void ckpt_json_decrefp(json_t **j)
{
    json_decref(*j);
    *j = NULL;
}

/* jansson's own depth limit (2048) is deeper than a worker's stack should go, so look before
 * parsing. */
static bool too_deep(const char *text, size_t len)
{
    int depth = 0;
    bool in_string = false;

    for (size_t i = 0; i < len; i++) {
        char c = text[i];
        if (in_string) {
            if (c == '\\')
                i++;
            else if (c == '"')
                in_string = false;
        } else if (c == '"') {
            in_string = true;
        } else if (c == '{' || c == '[') {
            if (++depth > MAX_DEPTH)
                return true;
        } else if (c == '}' || c == ']') {
            depth--;
        }
    }
    return false;
}

/* ---- Python's JSON as that of RFC 8259 ---- */

/* A lone half of a surrogate pair, which UTF-8 can't hold, is kept as a private character of the
 * last plane that has its low 16 bits. */
enum { SURROGATES = 0xd800, SURROGATES_END = 0xe000, KEPT_SURROGATE = 0x100000 };

static int32_t hex4(const char *s);

/* The half of a surrogate pair that "\\uXXXX" at s is, or -1. */
static int32_t surrogate_at(const char *s, const char *end)
{
    const int32_t c = end - s >= 6 && s[0] == '\\' && s[1] == 'u' ? hex4(s + 2) : -1;

    return c >= SURROGATES && c < SURROGATES_END ? c : -1;
}

/* Copy the string at s, with its quotes. Returns where it ends. */
static const char *copy_string(const char *s, const char *end, struct ckpt_str *out)
{
    const char *from = s++;

    while (s < end && *s != '"') {
        const int32_t half = surrogate_at(s, end);
        if (half < 0) {
            s += *s == '\\' && end - s > 1 ? 2 : 1;
        } else if (half < 0xdc00 && surrogate_at(s + 6, end) >= 0xdc00) {
            s += 12;
        } else {
            ckpt_str_append(out, from, (size_t)(s - from));
            ckpt_str_printf(out, "\\u%04x\\u%04x",
                            0xd800 + ((KEPT_SURROGATE + half - 0x10000) >> 10),
                            0xdc00 + (half & 0x3ff));
            from = s += 6;
        }
    }
    s += s < end;
    ckpt_str_append(out, from, (size_t)(s - from));
    return s;
}

/* Copy the number or word at s: a number that is none of C's long long or double, and Python's
 * words for such numbers, become an object with one member. Returns where it ends. */
static const char *copy_word(const char *s, const char *end, struct ckpt_str *out)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    char word[512]; /* longer ones are copied as they are */
    size_t n = 0;

    while (s + n < end && s[n] && (strchr("+-.0123456789", s[n]) || strchr(letters, s[n])))
        n++;
    if (n == 0 || n >= sizeof word) {
        ckpt_str_append(out, s, n ? n : 1);
        return s + (n ? n : 1);
    }
    memcpy(word, s, n);
    word[n] = '\0';

    const bool is_integer = word[strspn(word, "-0123456789")] == '\0',
               is_number = word[strspn(word, "-+.eE0123456789")] == '\0';
    const double v = strtod(word, NULL);
    errno = 0;
    if (is_integer && strtoll(word, NULL, 10) && errno == ERANGE)
        ckpt_str_printf(out, "{\"" CKPT_JSON_BIG_INTEGER "\": \"%s\"}", word);
    else if (strcmp(word, "NaN") == 0)
        ckpt_str_puts(out, "{\"" CKPT_JSON_SPECIAL_FLOAT "\": \"NaN\"}");
    else if (strcmp(word, "Infinity") == 0 || strcmp(word, "-Infinity") == 0 ||
             (is_number && isinf(v)))
        ckpt_str_printf(out, "{\"" CKPT_JSON_SPECIAL_FLOAT "\": \"%sInfinity\"}", v < 0 ? "-" : "");
    else
        ckpt_str_puts(out, word);
    return s + n;
}

/* Write JSON with what Python's json reads beyond RFC 8259 in the form that json.h describes. */
static void copy_as_rfc8259(const char *text, size_t len, struct ckpt_str *out)
{
    for (const char *s = text, *end = text + len; s < end;)
        s = *s == '"' ? copy_string(s, end, out) : copy_word(s, end, out);
}

/* ---- parsing ---- */

static json_t *load(const char *text, size_t len, size_t flags, const char *what,
                    struct ckpt_err *err)
{
    json_error_t je;
    const char *nul = len ? memchr(text, 0, len) : NULL;

    if (nul) { /* which jansson takes for the end of a number, and passes over */
        (void)ckpt_fail(err, CKPT_FORMAT, "%s: not valid JSON: a NUL at byte %zu", what,
                        (size_t)(nul - text));
        return NULL;
    }
    if (too_deep(text, len)) {
        (void)ckpt_fail(err, CKPT_LIMIT, "%s: JSON nested deeper than %d", what, MAX_DEPTH);
        return NULL;
    }
    json_t *j = json_loadb(text, len, flags, &je);
    if (!j)
        (void)ckpt_fail(
            err, json_error_code(&je) == json_error_out_of_memory ? CKPT_NOMEM : CKPT_FORMAT,
            "%s: not valid JSON: %s (line %d, byte %d)", what, je.text, je.line, je.position);
    return j;
}

int ckpt_json_parse_strict(const char *text, size_t len, const char *what, json_t **ret,
                           struct ckpt_err *err)
{
    json_t *j = load(text, len, JSON_REJECT_DUPLICATES, what, err);

    if (!j)
        return -1;
    *ret = j;
    return 0;
}

int ckpt_json_parse(const char *text, size_t len, const char *what, json_t **ret,
                    struct ckpt_err *err)
{
    struct ckpt_err first = {0};
    json_t *j = load(text, len, 0, what, &first);

    if (!j && first.code == CKPT_FORMAT) { /* which is rare, so the text is not copied before */
        ckpt_cleanup(ckpt_freep) char *copy = NULL;
        struct ckpt_str out = {0};
        copy_as_rfc8259(text, len, &out);
        const size_t n = out.len;
        if (ckpt_str_steal(&out, &copy, err) < 0)
            return -1;
        if (!(j = load(copy, n, 0, what, err))) /* its lines are those of the text */
            return -1;
    }
    if (!j)
        return ckpt_err_move(err, &first);
    *ret = j;
    return 0;
}

void ckpt_json_append(json_t **list, json_t *value)
{
    if (!*list)
        json_decref(value);
    else if (json_array_append_new(*list, value) < 0) /* as for NULL */
        ckpt_json_decrefp(list);
}

void ckpt_json_set(json_t **obj, const char *key, json_t *value)
{
    if (!*obj)
        json_decref(value);
    else if (json_object_set_new(*obj, key, value) < 0)
        ckpt_json_decrefp(obj);
}

/* Python's repr of a finite float: the shortest digits that read back, exponent form below 1e-4 and
 * from 1e16 on. */
static void put_real(struct ckpt_str *s, double v)
{
    char digits[32];
    int prec = 1;

    do
        (void)snprintf(digits, sizeof digits, "%.*e", prec - 1, v);
    while (strtod(digits, NULL) != v && ++prec <= 17);

    char *e = strchr(digits, 'e');
    long exp10 = strtol(e + 1, NULL, 10);
    if (exp10 >= -4 && exp10 < 16) {
        int decimals = prec - 1 - (int)exp10;
        ckpt_str_printf(s, "%.*f", decimals > 0 ? decimals : 1, v);
    } else {
        ckpt_str_printf(s, "%.*se%c%02ld", (int)(e - digits), digits, exp10 < 0 ? '-' : '+',
                        exp10 < 0 ? -exp10 : exp10);
    }
}

static unsigned utf8_next(const unsigned char **p)
{
    const unsigned char *s = *p;
    int n = s[0] < 0x80 ? 0 : s[0] < 0xe0 ? 1 : s[0] < 0xf0 ? 2 : 3;
    unsigned c = n == 0 ? s[0] : s[0] & (0x3fU >> n);

    for (int i = 1; i <= n; i++)
        c = c << 6 | (s[i] & 0x3fU);
    *p = s + n + 1;
    return c;
}

static unsigned utf8_at(const unsigned char *p) { return utf8_next(&p); }

/* The lone half of a surrogate pair that a character stands for; 0: it stands for itself. */
static unsigned kept_surrogate(unsigned c)
{
    return c >= KEPT_SURROGATE + SURROGATES && c < KEPT_SURROGATE + SURROGATES_END
               ? c - KEPT_SURROGATE
               : 0;
}

/* json.dumps' default: ASCII only, \uxxxx in lower case. jansson strings are valid UTF-8. */
void ckpt_json_put_string(struct ckpt_str *s, const char *text)
{
    static const char short_escape[] = "\"\\\b\f\n\r\t", letter[] = "\"\\bfnrt";

    ckpt_str_putc(s, '"');
    for (const unsigned char *p = (const unsigned char *)text; *p;) {
        size_t plain = 0;
        while (p[plain] >= 0x20 && p[plain] < 0x7f && p[plain] != '"' && p[plain] != '\\')
            plain++;
        ckpt_str_append(s, (const char *)p, plain);
        p += plain;
        if (!*p)
            break;
        unsigned c = utf8_next(&p);
        const char *esc = c < 0x80 ? strchr(short_escape, (int)c) : NULL;
        const unsigned half = kept_surrogate(c);
        if (half && !(half < 0xdc00 && *p && kept_surrogate(utf8_at(p)) >= 0xdc00))
            c = half; /* two halves in this order were never alone */
        if (esc)
            ckpt_str_printf(s, "\\%c", letter[esc - short_escape]);
        else if (c < 0x10000)
            ckpt_str_printf(s, "\\u%04x", c);
        else
            ckpt_str_printf(s, "\\u%04x\\u%04x", 0xd800 + ((c - 0x10000) >> 10),
                            0xdc00 + ((c - 0x10000) & 0x3ff));
    }
    ckpt_str_putc(s, '"');
}

struct dump {
    struct ckpt_str out;
    bool pretty, line, sort;
};

static void newline(struct dump *d, int depth)
{
    if (d->pretty)
        ckpt_str_printf(&d->out, "\n%*s", 2 * depth, "");
}

static void put(struct dump *d, const json_t *j, int depth);

static void put_member(struct dump *d, const char *key, const json_t *value, bool first, int depth)
{
    if (!first)
        ckpt_str_puts(&d->out, d->line ? ", " : ",");
    newline(d, depth);
    ckpt_json_put_string(&d->out, key);
    ckpt_str_puts(&d->out, d->pretty || d->line ? ": " : ":");
    put(d, value, depth);
}

static void put_object(struct dump *d, const json_t *j, int depth)
{
    size_t n = json_object_size(j), i = 0;
    const char **keys = n ? malloc(n * sizeof *keys) : NULL;
    const char *key;
    json_t *value;

    if (n && !keys) {
        d->out.failed = true;
        return;
    }
    json_object_foreach((json_t *)j, key, value)
        keys[i++] = key;
    if (d->sort)
        ckpt_sort(keys, n, ckpt_strings_cmp);
    ckpt_str_putc(&d->out, '{');
    for (i = 0; i < n; i++)
        put_member(d, keys[i], json_object_get(j, keys[i]), i == 0, depth + 1);
    if (n)
        newline(d, depth);
    ckpt_str_putc(&d->out, '}');
    free(keys);
}

static void put_array(struct dump *d, const json_t *j, int depth)
{
    size_t n = json_array_size(j);

    ckpt_str_putc(&d->out, '[');
    for (size_t i = 0; i < n; i++) {
        if (i)
            ckpt_str_puts(&d->out, d->line ? ", " : ",");
        newline(d, depth + 1);
        put(d, json_array_get(j, i), depth + 1);
    }
    if (n)
        newline(d, depth);
    ckpt_str_putc(&d->out, ']');
}

static void put(struct dump *d, const json_t *j, int depth)
{
    switch (json_typeof(j)) {
    case JSON_OBJECT:
        if (json_object_size(j) == 1 && ckpt_json_str(j, CKPT_JSON_BIG_INTEGER))
            ckpt_str_puts(&d->out, ckpt_json_str(j, CKPT_JSON_BIG_INTEGER));
        else
            put_object(d, j, depth);
        break;
    case JSON_ARRAY:
        put_array(d, j, depth);
        break;
    case JSON_STRING:
        ckpt_json_put_string(&d->out, json_string_value(j));
        break;
    case JSON_INTEGER:
        ckpt_str_printf(&d->out, "%" JSON_INTEGER_FORMAT, json_integer_value(j));
        break;
    case JSON_REAL:
        put_real(&d->out, json_real_value(j));
        break;
    case JSON_TRUE:
    case JSON_FALSE:
    case JSON_NULL:
        ckpt_str_puts(&d->out, json_is_null(j) ? "null" : json_is_true(j) ? "true" : "false");
        break;
    }
}

int ckpt_json_dump(const json_t *j, enum ckpt_json_style style, bool sort_keys, char **ret_text,
                   size_t *ret_len, struct ckpt_err *err)
{
    struct dump d = {
        .pretty = style == CKPT_JSON_PYTHON, .line = style == CKPT_JSON_LINE, .sort = sort_keys};
    size_t len;

    put(&d, j, 0);
    if (d.pretty)
        ckpt_str_putc(&d.out, '\n');
    len = d.out.len;
    if (ckpt_str_steal(&d.out, ret_text, err) < 0)
        return -1;
    if (ret_len)
        *ret_len = len;
    return 0;
}

json_t *ckpt_json_at(const json_t *j, const char *path)
{
    while (j) {
        size_t n = strcspn(path, ".");
        j = json_object_getn(j, path, n);
        if (path[n] == '\0')
            break;
        path += n + 1;
    }
    return (json_t *)j;
}

bool ckpt_json_u64(const json_t *obj, const char *key, uint64_t *ret_value)
{
    const json_t *v = json_object_get(obj, key);
    if (!json_is_integer(v) || json_integer_value(v) < 0)
        return false;
    *ret_value = (uint64_t)json_integer_value(v);
    return true;
}

const char *ckpt_json_str(const json_t *obj, const char *key)
{
    return json_string_value(json_object_get(obj, key));
}

const char *ckpt_json_str_or(const json_t *obj, const char *key, const char *absent)
{
    const char *text = ckpt_json_str(obj, key);

    return text ? text : absent;
}

bool ckpt_json_bool(const json_t *obj, const char *key, bool absent)
{
    const json_t *v = json_object_get(obj, key);
    return json_is_boolean(v) ? json_is_true(v) : absent;
}

bool ckpt_json_same(const json_t *a, const json_t *b)
{
    if (json_is_number(a) && json_is_number(b) && json_typeof(a) != json_typeof(b))
        return json_number_value(a) == json_number_value(b);
    return json_equal(a, b);
}

/* ---- the grammar of JSON (RFC 8259), one value at a time ---- */

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
    const char c = ckpt_json_pull_peek(p);
    uint64_t ignored;

    switch (c) {
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
    case 'f':
    case 'n':
        skip_word(p, c == 't' ? "true" : c == 'f' ? "false" : "null");
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
