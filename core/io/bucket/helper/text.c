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

/* The next line of a text, without blanks around it; false at the end. */
static bool next_line(const char **at, const char **ret, size_t *ret_len)
{
    if (!**at)
        return false;
    const size_t n = strcspn(*at, "\r\n");
    const char *a = *at, *b = *at + n;
    *at = b + (*b != '\0');
    while (b > a && isspace((unsigned char)b[-1]))
        b--;
    *ret = a;
    *ret_len = (size_t)(b - a);
    return true;
}

static bool is_section(const char *line, size_t len, const char *section)
{
    const size_t n = strlen(section);

    if (len < 2 || line[len - 1] != ']')
        return false;
    for (line++, len -= 2; len && isspace((unsigned char)*line); line++, len--)
        continue;
    while (len && isspace((unsigned char)line[len - 1]))
        len--;
    return len == n && memcmp(line, section, n) == 0;
}

char *ckpt_ini_get(const char *text, const char *section, const char *key, bool *ret_found)
{
    const size_t n = strlen(key);
    const char *line;
    char *value = NULL;
    bool inside = false;
    size_t len;

    while (next_line(&text, &line, &len)) {
        if (len && *line == '[') {
            inside = is_section(line, len, section);
            if (inside && ret_found)
                *ret_found = true;
        } else if (inside && len > n && !isspace((unsigned char)*line) && *line != '#' &&
                   *line != ';' && strncasecmp(line, key, n) == 0) {
            const char *at = line + n, *end = line + len;
            while (at < end && (*at == ' ' || *at == '\t'))
                at++;
            if (at == end || *at++ != '=')
                continue;
            while (at < end && (*at == ' ' || *at == '\t'))
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

enum { MOST_DEPTH = 16, MOST_TEXT = 8192 };

/* The element whose text is collected, and what to do at its end. */
struct xml {
    XML_Parser parser;
    int depth;
    char name[MOST_DEPTH][32];
    char text[MOST_TEXT];
    size_t len;
    void *ctx;
    bool (*end)(void *ctx, const struct xml *x); /* false: stop */
};

/* The name behind a prefix of a namespace. */
static const char *local(const char *name)
{
    const char *colon = strrchr(name, ':');

    return colon ? colon + 1 : name;
}

static void XMLCALL xml_start(void *ctx, const char *name, const char **attributes)
{
    struct xml *x = ctx;

    (void)attributes;
    if (x->depth >= MOST_DEPTH) {
        (void)XML_StopParser(x->parser, XML_FALSE);
        return;
    }
    (void)snprintf(x->name[x->depth++], sizeof x->name[0], "%s", local(name));
    x->len = 0;
}

static void XMLCALL xml_end(void *ctx, const char *name)
{
    struct xml *x = ctx;

    (void)name;
    x->text[x->len] = '\0';
    if (!x->end(x->ctx, x))
        (void)XML_StopParser(x->parser, XML_FALSE);
    x->depth--;
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

struct wanted {
    const char *name;
    char *ret;
    size_t cap;
};

static bool text_end(void *ctx, const struct xml *x)
{
    struct wanted *w = ctx;

    if (strcmp(x->name[x->depth - 1], w->name) != 0)
        return true;
    (void)snprintf(w->ret, w->cap, "%s", x->text);
    return false;
}

void ckpt_xml_text(const char *xml, size_t len, const char *name, char *ret, size_t cap)
{
    struct wanted w = {name, ret, cap};
    ckpt_cleanup(ckpt_freep) struct xml *x = calloc(1, sizeof *x);

    *ret = '\0';
    if (!x)
        return;
    x->ctx = &w;
    x->end = text_end;
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

static int hex_digit(char c)
{
    return c >= '0' && c <= '9'                 ? c - '0'
           : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10
                                                : -1;
}

/* Undo encoding-type=url. */
static bool decode(char *s)
{
    char *to = s;

    for (; *s; s++) {
        if (*s == '%') {
            const int a = hex_digit(s[1]), b = a < 0 ? -1 : hex_digit(s[2]);
            if (b < 0 || a * 16 + b == 0)
                return false;
            *to++ = (char)(a * 16 + b);
            s += 2;
        } else {
            *to++ = *s == '+' ? ' ' : *s;
        }
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
    if (x->len >= cap || memchr(x->text, 0, x->len))
        return list_fail(l, "a text that is too long");
    memcpy(to, x->text, x->len + 1);
    return true;
}

static bool entry_part(struct list *l, const struct xml *x, const char *name)
{
    unsigned long long n;
    int64_t t;

    if (strcmp(name, "Key") == 0)
        return copy_text(l, x, l->key, sizeof l->key);
    if (strcmp(name, "ETag") == 0)
        return copy_text(l, x, l->tag, sizeof l->tag);
    if (strcmp(name, "Size") == 0) {
        if (!ckpt_parse_u64(x->text, x->len, &n) || n > INT64_MAX)
            return list_fail(l, "a size that is no number");
        l->e.size = n;
        l->has_size = true;
    } else if (strcmp(name, "LastModified") == 0) {
        if ((t = ckpt_time_parse(x->text)) < 0 || t > INT64_MAX / 1000000000 - 1)
            return list_fail(l, "a time that is none");
        const char *dot = strchr(x->text, '.');
        l->e.mtime_ns = t * 1000000000;
        for (int64_t unit = 100000000; dot && isdigit((unsigned char)*++dot) && unit; unit /= 10)
            l->e.mtime_ns += (*dot - '0') * unit;
    }
    return true;
}

static bool list_end(void *ctx, const struct xml *x)
{
    struct list *l = ctx;
    const char *name = x->name[x->depth - 1], *above = x->depth > 1 ? x->name[x->depth - 2] : "";

    if (x->depth == 1)
        return (l->is_list = strcmp(name, "ListBucketResult") == 0) ||
               list_fail(l, "another document");
    if (x->depth == 2 && strcmp(name, "IsTruncated") == 0)
        l->truncated = strcmp(x->text, "true") == 0;
    else if (x->depth == 2 && strcmp(name, "EncodingType") == 0)
        l->encoded = strcmp(x->text, "url") == 0;
    else if (x->depth == 2 && strcmp(name, "NextContinuationToken") == 0)
        return copy_text(l, x, l->more, l->more_cap);
    else if (x->depth == 2 && strcmp(name, "Contents") == 0)
        return put_entry(l, false);
    else if (x->depth == 2 && strcmp(name, "CommonPrefixes") == 0)
        return put_entry(l, true);
    else if (x->depth == 3 && strcmp(above, "Contents") == 0)
        return entry_part(l, x, name);
    else if (x->depth == 3 && strcmp(above, "CommonPrefixes") == 0 && strcmp(name, "Prefix") == 0)
        return copy_text(l, x, l->key, sizeof l->key);
    return true;
}

/* Whether keys are encoded must be known before the first. */
static bool says_encoded(const char *xml, size_t len)
{
    static const char word[] = "EncodingType>url<";

    return memmem(xml, len, word, strlen(word)) != NULL;
}

int ckpt_xml_list(const char *xml, size_t len, void *out, size_t cap, uint64_t *ret_len, char *more,
                  size_t more_cap, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) struct xml *x = calloc(1, sizeof *x);
    ckpt_cleanup(ckpt_freep) struct list *l = calloc(1, sizeof *l);

    if (!x || !l)
        return ckpt_nomem(err);
    *more = '\0';
    *l = (struct list){.out = out,
                       .cap = cap,
                       .more = more,
                       .more_cap = more_cap,
                       .encoded = says_encoded(xml, len)};
    x->ctx = l;
    x->end = list_end;
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
