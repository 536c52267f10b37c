/* SPDX-License-Identifier: Apache-2.0 */
/* Texts from outside: XML of the store, credentials files, times, keys in URLs. */
#include <ctype.h>
#include <expat.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "base/mem.h"
#include "io/bucket/helper/helper.h"

/* ---- profiles ---- */

/* Is the text, without the blanks around it, this word? Names of sections have upper and lower
 * case. */
static bool is_word(const char *at, size_t len, const char *word, bool any_case)
{
    for (; len && isblank((unsigned char)*at); at++)
        len--;
    while (len && isspace((unsigned char)at[len - 1]))
        len--;
    return len == strlen(word) && (any_case ? strncasecmp : strncmp)(at, word, len) == 0;
}

char *ckpt_ini_get(const char *text, const char *section, const char *key, bool *ret_found)
{
    char *value = NULL;
    bool inside = false;

    for (size_t len; *text; text += len + (text[len] != '\0')) {
        len = strcspn(text, "\r\n");
        size_t n = len;
        while (n && isspace((unsigned char)text[n - 1]))
            n--;
        const char *at = memchr(text, '=', n), *end = text + n;
        if (*text == '[') {
            inside = end[-1] == ']' && n > 1 && is_word(text + 1, n - 2, section, false);
            if (inside && ret_found)
                *ret_found = true;
        } else if (inside && at && !isspace((unsigned char)*text) &&
                   is_word(text, (size_t)(at - text), key, true)) {
            for (at++; at < end && isblank((unsigned char)*at);)
                at++;
            free(value); /* the last one counts */
            value = strndup(at, (size_t)(end - at));
        }
    }
    return value;
}

/* ---- times and URLs ---- */

int64_t ckpt_time_parse(const char *text)
{
    struct tm tm = {0};
    const char *end = strptime(text, "%Y-%m-%dT%H:%M:%S", &tm);

    if (!end)
        return -1;
    if (*end == '.')
        end += 1 + strspn(end + 1, "0123456789");
    if (strcmp(end, "Z") != 0 && strcmp(end, "+00:00") != 0 && *end)
        return -1;
    return (int64_t)timegm(&tm);
}

void ckpt_url_encode(struct ckpt_str *out, const char *text, bool path)
{
    static const char hex[] = "0123456789ABCDEF";

    for (; *text; text++) {
        const unsigned char c = (unsigned char)*text;
        if ((c < 128 && isalnum(c)) || strchr("-._~", c) || (path && c == '/')) {
            ckpt_str_putc(out, (char)c);
        } else {
            const char code[] = {'%', hex[c >> 4], hex[c & 15]};
            ckpt_str_append(out, code, sizeof code);
        }
    }
}

/* ---- XML ---- */

enum { MOST_TEXT = 8192 };

/* The elements that are open, "/ListBucketResult/Contents/Key", and the text of the last one. */
struct xml {
    XML_Parser parser;
    char path[256], text[MOST_TEXT];
    size_t len;
    struct list *list; /* to be filled; NULL: the first element `name` is looked for */
    const char *name;
    char *ret;
    size_t cap;
};

static bool list_end(struct list *l, const struct xml *x);

/* The end of an element. False: stop. */
static bool element_end(const struct xml *x)
{
    if (x->list)
        return list_end(x->list, x);
    if (strcmp(strrchr(x->path, '/') + 1, x->name) != 0)
        return true;
    (void)snprintf(x->ret, x->cap, "%s", x->text);
    return false;
}

static void XMLCALL xml_start(void *ctx, const char *name, const char **attributes)
{
    struct xml *x = ctx;
    const size_t len = strlen(x->path), cap = sizeof x->path - len;
    const char *colon = strrchr(name, ':'); /* of a namespace */

    (void)attributes;
    x->len = 0;
    if ((size_t)snprintf(x->path + len, cap, "/%s", colon ? colon + 1 : name) >= cap)
        (void)XML_StopParser(x->parser, XML_FALSE);
}

static void XMLCALL xml_end(void *ctx, const char *name)
{
    struct xml *x = ctx;

    (void)name;
    x->text[x->len] = '\0';
    if (!element_end(x))
        (void)XML_StopParser(x->parser, XML_FALSE);
    *strrchr(x->path, '/') = '\0';
    x->len = 0;
}

static void XMLCALL xml_text(void *ctx, const char *text, int len)
{
    struct xml *x = ctx;

    if ((size_t)len >= MOST_TEXT - x->len) {
        (void)XML_StopParser(x->parser, XML_FALSE);
        return;
    }
    memcpy(x->text + x->len, text, (size_t)len);
    x->len += (size_t)len;
}

/* S3 has no DTD, and entities are a way to make much of little. */
static void XMLCALL xml_doctype(void *ctx, const char *name, const char *sysid, const char *pubid,
                                int has_internal)
{
    struct xml *x = ctx;

    (void)name, (void)sysid, (void)pubid, (void)has_internal;
    (void)XML_StopParser(x->parser, XML_FALSE);
}

static bool xml_parse(struct xml *x, const char *xml, size_t len)
{
    if (len > INT32_MAX || !(x->parser = XML_ParserCreate(NULL)))
        return false;
    XML_SetUserData(x->parser, x);
    XML_SetElementHandler(x->parser, xml_start, xml_end);
    XML_SetCharacterDataHandler(x->parser, xml_text);
    XML_SetStartDoctypeDeclHandler(x->parser, xml_doctype);
    const bool good = XML_Parse(x->parser, xml, (int)len, 1) == XML_STATUS_OK;
    XML_ParserFree(x->parser);
    return good;
}

void ckpt_xml_text(const char *xml, size_t len, const char *name, char *ret, size_t cap)
{
    ckpt_cleanup(ckpt_freep) struct xml *x = calloc(1, sizeof *x);

    *ret = '\0';
    if (!x)
        return;
    x->name = name;
    x->ret = ret;
    x->cap = cap;
    (void)xml_parse(x, xml, len);
    explicit_bzero(x->text, sizeof x->text);
}

struct list {
    char *out;
    size_t cap, len;
    char *more;
    size_t more_cap;
    bool is_list, truncated, encoded, has_size;
    char key[4096], tag[512];
    struct ckpt_wire_entry e;
    const char *why; /* not NULL: it is no list */
};

/* Undo encoding-type=url. */
static bool decode(char *s)
{
    char *to = s;

    for (; *s; s++) {
        char c = *s == '+' ? ' ' : *s;
        if (*s == '%') {
            const char code[3] = {s[1], s[1] ? s[2] : '\0'};
            if (!isxdigit((unsigned char)code[0]) || !isxdigit((unsigned char)code[1]) ||
                !(c = (char)strtoul(code, NULL, 16)))
                return false;
            s += 2;
        }
        *to++ = c;
    }
    *to = '\0';
    return true;
}

static bool list_fail(struct list *l, const char *why)
{
    l->why = why;
    return false;
}

static bool put_entry(struct list *l, bool is_folder)
{
    if (!*l->key || (!is_folder && !l->has_size) || (l->encoded && !decode(l->key)))
        return list_fail(l, "an entry without key or size");
    if (is_folder)
        l->tag[0] = '\0';
    else if (!l->tag[0])
        return list_fail(l, "an entry without an ETag");
    l->e.tag_len = (uint16_t)(strlen(l->tag) + 1);
    l->e.key_len = (uint16_t)(strlen(l->key) + 1);
    if (l->cap - l->len < sizeof l->e + l->e.tag_len + l->e.key_len)
        return list_fail(l, "a page that is too large");
    memcpy(l->out + l->len, &l->e, sizeof l->e);
    memcpy(l->out + l->len + sizeof l->e, l->tag, l->e.tag_len);
    memcpy(l->out + l->len + sizeof l->e + l->e.tag_len, l->key, l->e.key_len);
    l->len += sizeof l->e + l->e.tag_len + l->e.key_len;
    memset(&l->e, 0, sizeof l->e);
    l->key[0] = l->tag[0] = '\0';
    l->has_size = false;
    return true;
}

static bool copy_text(struct list *l, const struct xml *x, char *to, size_t cap)
{
    if (x->len >= cap)
        return list_fail(l, "a text that is too long");
    memcpy(to, x->text, x->len + 1);
    return true;
}

static bool take_size(struct list *l, const struct xml *x)
{
    unsigned long long n;

    if (!ckpt_parse_u64(x->text, x->len, &n) || n > INT64_MAX)
        return list_fail(l, "a size that is no number");
    l->e.size = n;
    return l->has_size = true;
}

static bool take_time(struct list *l, const struct xml *x)
{
    const int64_t t = ckpt_time_parse(x->text);
    const char *dot = strchr(x->text, '.');

    if (t < 0 || t > INT64_MAX / 1000000000 - 1)
        return list_fail(l, "a time that is none");
    l->e.mtime_ns = t * 1000000000 + (dot ? (int64_t)(strtod(dot, NULL) * 1e9 + 0.5) : 0);
    return true;
}

static bool list_end(struct list *l, const struct xml *x)
{
    static const char top[] = "/ListBucketResult";
    const char *part = x->path + strlen(top);

    if (!ckpt_has_prefix(x->path, top))
        return list_fail(l, "another document");
    if (strcmp(part, "/Contents/Key") == 0 || strcmp(part, "/CommonPrefixes/Prefix") == 0)
        return copy_text(l, x, l->key, sizeof l->key);
    if (strcmp(part, "/Contents/ETag") == 0)
        return copy_text(l, x, l->tag, sizeof l->tag);
    if (strcmp(part, "/Contents/Size") == 0)
        return take_size(l, x);
    if (strcmp(part, "/Contents/LastModified") == 0)
        return take_time(l, x);
    if (strcmp(part, "/Contents") == 0 || strcmp(part, "/CommonPrefixes") == 0)
        return put_entry(l, strcmp(part, "/Contents") != 0);
    if (strcmp(part, "/NextContinuationToken") == 0)
        return copy_text(l, x, l->more, l->more_cap);
    if (strcmp(part, "/IsTruncated") == 0)
        l->truncated = strcmp(x->text, "true") == 0;
    l->is_list |= *part == '\0';
    return true;
}

int ckpt_xml_list(const char *xml, size_t len, void *out, size_t cap, uint64_t *ret_len, char *more,
                  size_t more_cap, struct ckpt_err *err)
{
    static const char url[] = "EncodingType>url<"; /* must be known before the first key */
    ckpt_cleanup(ckpt_freep) struct xml *x = calloc(1, sizeof *x);
    ckpt_cleanup(ckpt_freep) struct list *l = calloc(1, sizeof *l);

    if (!x || !l)
        return ckpt_nomem(err);
    *more = '\0';
    *l = (struct list){.out = out,
                       .cap = cap,
                       .more = more,
                       .more_cap = more_cap,
                       .encoded = memmem(xml, len, url, strlen(url)) != NULL};
    x->list = l;
    if (!xml_parse(x, xml, len) || !l->is_list)
        return ckpt_fail(err, CKPT_FORMAT, "the answer to ListObjectsV2 is not one: %s",
                         l->why ? l->why : "malformed XML");
    if (!l->truncated)
        *more = '\0';
    else if (!*more)
        return ckpt_fail(err, CKPT_FORMAT,
                         "the answer to ListObjectsV2 is truncated, and says not where it goes on");
    *ret_len = l->len;
    return 0;
}
