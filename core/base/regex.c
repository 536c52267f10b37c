/* SPDX-License-Identifier: Apache-2.0 */
/* The only module that uses PCRE2. Its syntax is a superset of Python's except for \Z, which is
 * translated. */
#include "base/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "base/vec.h"

/* Limit of backtracking for one name: a pattern that needs more is a mistake or an attack. */
enum { MATCH_LIMIT = 100000, MAX_PATTERN = 65536 };

/* Text to copy, then the group to insert; -1: none. */
struct part {
    char *text;
    size_t len;
    int group;
};

struct ckpt_regex {
    pcre2_code *code;
    pcre2_match_context *limits;
    CKPT_VEC(struct part) parts;
};

void ckpt_regex_free(struct ckpt_regex *r)
{
    if (!r)
        return;
    for (size_t i = 0; i < r->parts.len; i++)
        free(r->parts.ptr[i].text);
    ckpt_vec_release(&r->parts);
    pcre2_match_context_free(r->limits);
    pcre2_code_free(r->code);
    free(r);
}

static void regex_freep(struct ckpt_regex **r) { ckpt_regex_free(*r); }

/* Python's \Z is the very end, PCRE2's may stand before a last newline. */
static int translate(const char *pattern, char **ret, struct ckpt_err *err)
{
    struct ckpt_str out = {0};

    for (const char *s = pattern; *s; s++) {
        ckpt_str_putc(&out, *s);
        if (*s == '\\' && s[1])
            ckpt_str_putc(&out, *++s == 'Z' ? 'z' : *s);
    }
    return ckpt_str_steal(&out, ret, err);
}

static int compile(struct ckpt_regex *r, const char *pattern, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    PCRE2_UCHAR why[128];
    PCRE2_SIZE at;
    int code;

    if (strlen(pattern) > MAX_PATTERN)
        return ckpt_fail(err, CKPT_LIMIT, "a pattern has more than %d bytes", MAX_PATTERN);
    if (translate(pattern, &text, err) < 0)
        return -1;
    r->code = pcre2_compile((PCRE2_SPTR)text, PCRE2_ZERO_TERMINATED,
                            PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &code, &at, NULL);
    if (!r->code && code == PCRE2_ERROR_HEAP_FAILED)
        return ckpt_nomem(err);
    if (!r->code) {
        (void)pcre2_get_error_message(code, why, sizeof why);
        return ckpt_fail(err, CKPT_USAGE, "pattern '%s': %s at %zu", pattern, (char *)why,
                         (size_t)at);
    }
    if (!(r->limits = pcre2_match_context_create(NULL)))
        return ckpt_nomem(err);
    (void)pcre2_set_match_limit(r->limits, MATCH_LIMIT);
    return 0;
}

/* ---- the template ---- */

static int flush(struct ckpt_regex *r, struct ckpt_str *text, int group, struct ckpt_err *err)
{
    struct part p = {.len = text->len, .group = group};

    if (ckpt_str_steal(text, &p.text, err) < 0)
        return -1;
    if (ckpt_vec_push(&r->parts, p) < 0) {
        free(p.text);
        return ckpt_nomem(err);
    }
    return 0;
}

static int find_group(const struct ckpt_regex *r, const char *name, size_t len, int *ret,
                      struct ckpt_err *err)
{
    char own[64];
    unsigned long long number;
    uint32_t count = 0;

    (void)pcre2_pattern_info(r->code, PCRE2_INFO_CAPTURECOUNT, &count);
    if (ckpt_parse_u64(name, len, &number)) {
        if (number > count)
            return ckpt_fail(err, CKPT_USAGE, "there is no group %llu", number);
        *ret = (int)number;
        return 0;
    }
    if (len >= sizeof own)
        return ckpt_fail(err, CKPT_USAGE, "the name of a group is too long");
    memcpy(own, name, len);
    own[len] = '\0';
    *ret = pcre2_substring_number_from_name(r->code, (PCRE2_SPTR)own);
    return *ret < 0 ? ckpt_fail(err, CKPT_USAGE, "there is no group '%s'", own) : 0;
}

/* What follows a backslash at *s; moves *s past it. */
static int take_escape(struct ckpt_regex *r, const char **s, struct ckpt_str *text,
                       struct ckpt_err *err)
{
    static const char from[] = "abfnrtv\\", to[] = "\a\b\f\n\r\t\v\\";
    const char c = **s, *known = c ? strchr(from, c) : NULL;
    int group;

    if (c == 'g') {
        const char *end = (*s)[1] == '<' ? strchr(*s, '>') : NULL;
        if (!end)
            return ckpt_fail(err, CKPT_USAGE, "\\g has no <group>");
        if (find_group(r, *s + 2, (size_t)(end - *s - 2), &group, err) < 0)
            return -1;
        *s = end + 1;
        return flush(r, text, group, err);
    }
    if (c >= '1' && c <= '9') {
        size_t n = (*s)[1] >= '0' && (*s)[1] <= '9' ? 2 : 1;
        if (find_group(r, *s, n, &group, err) < 0)
            return -1;
        *s += n;
        return flush(r, text, group, err);
    }
    if (!c || c == '0' || (!known && ((c | 0x20) >= 'a' && (c | 0x20) <= 'z')))
        return ckpt_fail(err, CKPT_USAGE, "bad escape \\%c", c ? c : ' ');
    if (!known)
        ckpt_str_putc(text, '\\');
    ckpt_str_putc(text, known ? to[known - from] : c);
    ++*s;
    return 0;
}

static int parse_template(struct ckpt_regex *r, const char *s, struct ckpt_err *err)
{
    struct ckpt_str text = {0};
    const char *whole = s;
    int result = 0;

    while (*s && result == 0) {
        if (*s == '\\') {
            s++;
            result = take_escape(r, &s, &text, err);
        } else {
            ckpt_str_putc(&text, *s++);
        }
    }
    if (result == 0)
        result = flush(r, &text, -1, err);
    ckpt_str_release(&text);
    return result < 0 ? ckpt_err_in(err, "replacement '%s'", whole) : 0;
}

int ckpt_regex_new(const char *pattern, const char *replacement, struct ckpt_regex **ret,
                   struct ckpt_err *err)
{
    ckpt_cleanup(regex_freep) struct ckpt_regex *r = calloc(1, sizeof *r);

    if (!r)
        return ckpt_nomem(err);
    if (compile(r, pattern, err) < 0 || parse_template(r, replacement, err) < 0)
        return -1;
    *ret = ckpt_steal(&r);
    return 0;
}

/* ---- matching ---- */

static void expand(const struct ckpt_regex *r, const char *text, const PCRE2_SIZE *at,
                   struct ckpt_str *out)
{
    for (size_t i = 0; i < r->parts.len; i++) {
        const struct part *p = &r->parts.ptr[i];
        ckpt_str_append(out, p->text, p->len);
        if (p->group >= 0 && at[2 * p->group] != PCRE2_UNSET)
            ckpt_str_append(out, text + at[2 * p->group], at[2 * p->group + 1] - at[2 * p->group]);
    }
}

/* An empty match is replaced too, but not twice at one place; what follows it there may match if it
 * is not empty. */
static int substitute(const struct ckpt_regex *r, pcre2_match_data *m, const char *text,
                      struct ckpt_str *out, bool *ret_any, struct ckpt_err *err)
{
    const size_t len = strlen(text);
    const PCRE2_SIZE *at = pcre2_get_ovector_pointer(m);
    uint32_t flags = 0;
    size_t done = 0;
    int rc;

    *ret_any = false;
    while ((rc = pcre2_match(r->code, (PCRE2_SPTR)text, len, done, flags, m, r->limits)) > 0) {
        if (at[0] < done || at[1] < at[0]) /* \K in a lookahead: no Python pattern has it */
            return ckpt_fail(err, CKPT_USAGE, "a match that ends before it begins");
        ckpt_str_append(out, text + done, at[0] - done);
        expand(r, text, at, out);
        *ret_any = true;
        flags = at[0] == at[1] ? PCRE2_NOTEMPTY_ATSTART : 0;
        done = at[1];
    }
    if (rc != PCRE2_ERROR_NOMATCH)
        return ckpt_fail(err, rc == PCRE2_ERROR_NOMEMORY ? CKPT_NOMEM : CKPT_LIMIT,
                         "matching '%s' failed or takes too long (PCRE2 error %d)", text, rc);
    ckpt_str_append(out, text + done, len - done);
    return 0;
}

int ckpt_regex_sub(const struct ckpt_regex *r, const char *text, char **ret_text,
                   struct ckpt_err *err)
{
    pcre2_match_data *m = pcre2_match_data_create_from_pattern(r->code, NULL);
    struct ckpt_str out = {0};
    char *result = NULL;
    bool any = false;
    int rc = -1;

    if (!m)
        return ckpt_nomem(err);
    if (substitute(r, m, text, &out, &any, err) == 0)
        rc = any ? ckpt_str_steal(&out, &result, err) : 0;
    ckpt_str_release(&out);
    pcre2_match_data_free(m);
    if (rc == 0)
        *ret_text = result;
    return rc;
}
