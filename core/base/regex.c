/* SPDX-License-Identifier: Apache-2.0 */
/* The only module that uses PCRE2. Its syntax is a superset of Python's except for \Z, which is
 * translated. */
#include "base/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"

/* Limit of backtracking for one name: a pattern that needs more is a mistake or an attack. */
enum { MATCH_LIMIT = 100000, MAX_PATTERN = 65536 };

struct ckpt_regex {
    pcre2_code *code;
    pcre2_match_context *limits;
    char *replacement; /* in the syntax of PCRE2: "${1}" is a group, and "$$" a dollar */
};

void ckpt_regex_free(struct ckpt_regex *r)
{
    if (!r)
        return;
    free(r->replacement);
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

/* Put the group with this name or number. */
static int put_group(const struct ckpt_regex *r, const char *name, size_t len, struct ckpt_str *out,
                     struct ckpt_err *err)
{
    char own[64];
    unsigned long long number;
    uint32_t count = 0;

    (void)pcre2_pattern_info(r->code, PCRE2_INFO_CAPTURECOUNT, &count);
    if (ckpt_parse_u64(name, len, &number)) {
        if (number > count)
            return ckpt_fail(err, CKPT_USAGE, "there is no group %llu", number);
        ckpt_str_printf(out, "${%llu}", number);
        return 0;
    }
    if (len >= sizeof own)
        return ckpt_fail(err, CKPT_USAGE, "the name of a group is too long");
    memcpy(own, name, len);
    own[len] = '\0';
    const int named = pcre2_substring_number_from_name(r->code, (PCRE2_SPTR)own);
    if (named < 0)
        return ckpt_fail(err, CKPT_USAGE, "there is no group '%s'", own);
    ckpt_str_printf(out, "${%d}", named);
    return 0;
}

/* Put a character that stands for itself; only a dollar means something to PCRE2. */
static void put_literal(struct ckpt_str *out, char c)
{
    ckpt_str_puts(out, c == '$' ? "$$" : (const char[]){c, '\0'});
}

/* Put what follows a backslash at *s, and move *s past it. */
static int take_escape(const struct ckpt_regex *r, const char **s, struct ckpt_str *out,
                       struct ckpt_err *err)
{
    static const char from[] = "abfnrtv\\", to[] = "\a\b\f\n\r\t\v\\";
    const char c = **s, *known = c ? strchr(from, c) : NULL;

    if (c == 'g') {
        const char *name = *s + 2, *end = (*s)[1] == '<' ? strchr(*s, '>') : NULL;
        if (!end)
            return ckpt_fail(err, CKPT_USAGE, "\\g has no <group>");
        *s = end + 1;
        return put_group(r, name, (size_t)(end - name), out, err);
    }
    if (c >= '1' && c <= '9') {
        const char *name = *s;
        *s += name[1] >= '0' && name[1] <= '9' ? 2 : 1;
        return put_group(r, name, (size_t)(*s - name), out, err);
    }
    if (!c || c == '0' || (!known && ((c | 0x20) >= 'a' && (c | 0x20) <= 'z')))
        return ckpt_fail(err, CKPT_USAGE, "bad escape \\%c", c ? c : ' ');
    if (!known)
        ckpt_str_putc(out, '\\');
    put_literal(out, known ? to[known - from] : c);
    ++*s;
    return 0;
}

static int translate_template(struct ckpt_regex *r, const char *s, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str out = {0};
    const char *whole = s;

    while (*s) {
        const char c = *s++;
        if (c == '\\' && take_escape(r, &s, &out, err) < 0)
            return ckpt_err_in(err, "replacement '%s'", whole);
        if (c != '\\')
            put_literal(&out, c);
    }
    return ckpt_str_steal(&out, &r->replacement, err);
}

int ckpt_regex_new(const char *pattern, const char *replacement, struct ckpt_regex **ret,
                   struct ckpt_err *err)
{
    ckpt_cleanup(regex_freep) struct ckpt_regex *r = calloc(1, sizeof *r);

    if (!r)
        return ckpt_nomem(err);
    if (compile(r, pattern, err) < 0 || translate_template(r, replacement, err) < 0)
        return -1;
    *ret = ckpt_steal(&r);
    return 0;
}

/* ---- matching ---- */

int ckpt_regex_sub(const struct ckpt_regex *r, const char *text, char **ret_text,
                   struct ckpt_err *err)
{
    const uint32_t flags =
        PCRE2_SUBSTITUTE_GLOBAL | PCRE2_SUBSTITUTE_UNSET_EMPTY | PCRE2_SUBSTITUTE_OVERFLOW_LENGTH;
    ckpt_cleanup(ckpt_freep) char *out = NULL;
    PCRE2_SIZE need = strlen(text) + 1, len;
    int rc;

    /* the first call may find that the result is longer, and how long it is */
    do {
        char *longer = realloc(out, need);
        if (!longer)
            return ckpt_nomem(err);
        out = longer;
        len = need;
        rc = pcre2_substitute(r->code, (PCRE2_SPTR)text, PCRE2_ZERO_TERMINATED, 0, flags, NULL,
                              r->limits, (PCRE2_SPTR)r->replacement, PCRE2_ZERO_TERMINATED,
                              (PCRE2_UCHAR *)out, &need);
    } while (rc == PCRE2_ERROR_NOMEMORY && need != PCRE2_UNSET && need > len);
    if (rc == PCRE2_ERROR_BADSUBSPATTERN) /* \K in a lookahead: no Python pattern has it */
        return ckpt_fail(err, CKPT_USAGE, "a match that ends before it begins");
    if (rc < 0)
        return ckpt_fail(err, rc == PCRE2_ERROR_NOMEMORY ? CKPT_NOMEM : CKPT_LIMIT,
                         "matching '%s' failed or takes too long (PCRE2 error %d)", text, rc);
    *ret_text = rc ? ckpt_steal(&out) : NULL;
    return 0;
}
