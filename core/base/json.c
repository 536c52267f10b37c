/* SPDX-License-Identifier: Apache-2.0 */
/* jansson with limits; Python's number spelling. */
#include "base/json.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/sort.h"
#include "base/str.h"

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

static int check_depth(const char *text, size_t len, const char *what, struct ckpt_err *err)
{
    return too_deep(text, len)
               ? ckpt_fail(err, CKPT_LIMIT, "%s: JSON nested deeper than %d", what, MAX_DEPTH)
               : 0;
}

int ckpt_json_parse(const char *text, size_t len, const char *what, json_t **ret,
                    struct ckpt_err *err)
{
    json_error_t je;

    const char *nul = len ? memchr(text, 0, len) : NULL;

    if (nul) /* which jansson takes for the end of a number, and passes over */
        return ckpt_fail(err, CKPT_FORMAT, "%s: not valid JSON: a NUL at byte %zu", what,
                         (size_t)(nul - text));
    if (check_depth(text, len, what, err) < 0)
        return -1;
    json_t *j = json_loadb(text, len, JSON_REJECT_DUPLICATES, &je);
    if (!j)
        return ckpt_fail(
            err, json_error_code(&je) == json_error_out_of_memory ? CKPT_NOMEM : CKPT_FORMAT,
            "%s: not valid JSON: %s (line %d, byte %d)", what, je.text, je.line, je.position);
    *ret = j;
    return 0;
}

static void keep_if(json_t **j, bool good)
{
    if (good)
        return;
    json_decref(*j);
    *j = NULL;
}

void ckpt_json_append(json_t **list, json_t *value)
{
    if (!*list)
        json_decref(value);
    else
        keep_if(list, value && json_array_append_new(*list, value) == 0);
}

void ckpt_json_set(json_t **obj, const char *key, json_t *value)
{
    if (!*obj)
        json_decref(value);
    else
        keep_if(obj, value && json_object_set_new(*obj, key, value) == 0);
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
    if (d->sort && n)
        qsort(keys, n, sizeof *keys, ckpt_strings_cmp);
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
        ckpt_str_puts(&d->out, "true");
        break;
    case JSON_FALSE:
        ckpt_str_puts(&d->out, "false");
        break;
    case JSON_NULL:
        ckpt_str_puts(&d->out, "null");
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

bool ckpt_json_bool(const json_t *obj, const char *key, bool absent)
{
    const json_t *v = json_object_get(obj, key);
    return json_is_boolean(v) ? json_is_true(v) : absent;
}
