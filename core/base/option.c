/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing the values of options. */
#include "base/option.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/str.h"

static int refuse(const struct ckpt_option *o, const char *value, const char *expected,
                  struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_USAGE, "option %s: '%s' is not %s", o->word, value, expected);
}

static int set_flag(const struct ckpt_option *o, bool *slot, const char *value,
                    struct ckpt_err *err)
{
    static const char *const yes[] = {"1", "true", "yes", "on"}, *const no[] = {"0", "false", "no",
                                                                                "off"};

    for (size_t i = 0; i < sizeof yes / sizeof *yes; i++)
        if (strcmp(value, yes[i]) == 0 || strcmp(value, no[i]) == 0) {
            *slot = strcmp(value, yes[i]) == 0;
            return 0;
        }
    return refuse(o, value, "yes or no", err);
}

static int set_text(const struct ckpt_option *o, char **slot, const char *value,
                    struct ckpt_err *err)
{
    const bool is_relative = o->kind == CKPT_OPTION_PATH && value[0] != '/';
    ckpt_cleanup(ckpt_freep) char *here = NULL;

    if (!*value)
        return ckpt_fail(err, CKPT_USAGE, "option %s needs a value", o->word);
    if (is_relative && !(here = getcwd(NULL, 0)))
        return ckpt_fail_errno(err, errno, "the current directory");
    char *text = here ? ckpt_asprintf("%s/%s", here, value) : strdup(value);
    if (!text)
        return ckpt_nomem(err);
    free(*slot);
    *slot = text;
    return 0;
}

int ckpt_option_choice(const struct ckpt_option *o, const char *value, uint32_t *ret,
                       struct ckpt_err *err)
{
    const size_t len = value ? strlen(value) : 0;
    uint32_t n = 0;

    for (const char *word = o->value; value; word++, n++) {
        const size_t end = strcspn(word, "|");
        if (len == end && memcmp(word, value, len) == 0) {
            *ret = n;
            return 0;
        }
        word += end;
        if (!*word)
            break;
    }
    return ckpt_fail(err, CKPT_USAGE, "option %s: '%s' is not one of %s", o->word,
                     value ? value : "", o->value);
}

static int set_number(const struct ckpt_option *o, uint32_t *slot, const char *value,
                      struct ckpt_err *err)
{
    const bool octal = o->kind == CKPT_OPTION_OCTAL;
    char *end;

    errno = 0;
    const unsigned long long n = strtoull(value, &end, octal ? 8 : 10);
    if (*value < '0' || *value > '9' || *end || errno || n < o->least || n > o->most)
        return ckpt_fail(err, CKPT_USAGE,
                         octal ? "option %s: '%s' is not an octal number from %o to %o"
                               : "option %s: '%s' is not a number from %u to %u",
                         o->word, value, o->least, o->most);
    *slot = (uint32_t)n;
    return 0;
}

static int set_bytes(const struct ckpt_option *o, uint64_t *slot, const char *value,
                     struct ckpt_err *err)
{
    static const char unit[] = "KMGT";
    char *end;

    errno = 0;
    const unsigned long long n = strtoull(value, &end, 10);
    const char *u = *end ? strchr(unit, *end) : NULL;
    const int shift = u ? 10 * (int)(u - unit + 1) : 0;
    if (*value < '0' || *value > '9' || (*end && (!u || end[1])) || errno ||
        n > UINT64_MAX >> shift)
        return refuse(o, value, "a number of bytes such as 256M", err);
    *slot = (uint64_t)n << shift;
    return 0;
}

static int set_seconds(const struct ckpt_option *o, uint32_t *slot, const char *value,
                       struct ckpt_err *err)
{
    char *end;
    const double s = strtod(value, &end);

    if (end == value || *end || !(s >= 0.001 && s <= 1e6))
        return refuse(o, value, "a number of seconds from 0.001 to 1000000", err);
    *slot = (uint32_t)(s * 1000);
    return 0;
}

int ckpt_option_set(const struct ckpt_option *o, void *into, const char *value,
                    struct ckpt_err *err)
{
    void *slot = (char *)into + o->at;
    uint32_t word;

    if (o->set)
        return o->set(into, o, value, err);
    if (!value)
        value = o->kind == CKPT_OPTION_FLAG ? "yes" : "";
    switch (o->kind) {
    case CKPT_OPTION_FLAG:
        return set_flag(o, slot, value, err);
    case CKPT_OPTION_CHOICE:
        if (ckpt_option_choice(o, value, &word, err) < 0)
            return -1;
        *(uint32_t *)slot = o->least + word;
        return 0;
    case CKPT_OPTION_NUMBER:
    case CKPT_OPTION_OCTAL:
        return set_number(o, slot, value, err);
    case CKPT_OPTION_BYTES:
        return set_bytes(o, slot, value, err);
    case CKPT_OPTION_SECONDS:
        return set_seconds(o, slot, value, err);
    case CKPT_OPTION_TEXT:
    case CKPT_OPTION_PATH:
        break;
    }
    return set_text(o, slot, value, err);
}

/* ---- words of other programs ---- */

const char *ckpt_words_find(const char *list, const char *word)
{
    for (const char *at = list; at && *at; at += strcspn(at, " "), at += strspn(at, " ")) {
        const char *w = word;
        while (*w && ckpt_option_same_letter(*at, *w))
            at++, w++;
        if (!*w && strchr(": ", *at)) /* finds the end of the list, too */
            return at;
    }
    return NULL;
}

char *ckpt_option_meant(const struct ckpt_option *o, const char *word)
{
    const char *rest = ckpt_words_find(o->also, word);

    if (!rest)
        return NULL;
    if (*rest == ':')
        return ckpt_asprintf("%s=%.*s", o->word, (int)strcspn(rest + 1, " "), rest + 1);
    return ckpt_asprintf("%s%s%s", o->word, o->value ? "=" : "", o->value ? o->value : "");
}

enum { NEAR = 2 /* letters that a misspelt word may differ in */ };

static unsigned distance(const char *a, const char *b)
{
    unsigned row[64]; /* row[k]: from the letters of `a` so far to the first k letters of `b` */
    const size_t n = strnlen(b, 63);

    for (unsigned k = 0; k <= n; k++)
        row[k] = k;
    for (size_t i = 0; a[i] && i < 63; i++) {
        unsigned before = row[0]++; /* of the row above, one column to the left */
        for (size_t k = 1; k <= n; k++) {
            const unsigned replaced = before + (a[i] != b[k - 1]);
            const unsigned other = (row[k - 1] < row[k] ? row[k - 1] : row[k]) + 1;
            before = row[k];
            row[k] = replaced < other ? replaced : other;
        }
    }
    return row[n];
}

void ckpt_near_consider(struct ckpt_near *near, const char *written, const char *word)
{
    const char *a = written, *b = word;

    while (*a && *a == *b)
        a++, b++;
    const unsigned d = distance(a, b);
    if (d <= NEAR && d < strlen(word) && (!near->word || d < near->distance)) {
        near->distance = d;
        near->word = word;
    }
}
