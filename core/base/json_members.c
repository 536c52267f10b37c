/* SPDX-License-Identifier: Apache-2.0 */
/* Cutting an object's text into its members. */
#include "base/json_members.h"

#include <string.h>

static bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

static size_t skip_space(const struct ckpt_json_members *m, size_t at)
{
    while (at < m->len && is_space(m->text[at]))
        at++;
    return at;
}

/* Where the member that begins at `at` ends: at the first comma or closing bracket that is outside
 * of strings and of brackets opened since; m->len if there is none. Brackets of the wrong kind are
 * left for jansson to find. */
static size_t end_of_member(const struct ckpt_json_members *m, size_t at)
{
    size_t depth = 0;

    for (; at < m->len; at++) {
        const char c = m->text[at];
        if (c == '"') {
            for (at++; at < m->len && m->text[at] != '"'; at++)
                at += m->text[at] == '\\';
        } else if (c == '{' || c == '[') {
            depth++;
        } else if (depth == 0 && (c == ',' || c == '}' || c == ']')) {
            break;
        } else if (c == '}' || c == ']') {
            depth--;
        }
    }
    return at < m->len ? at : m->len;
}

static int fail_at(const struct ckpt_json_members *m, size_t at, const char *expected,
                   struct ckpt_err *err)
{
    return ckpt_fail(err, CKPT_FORMAT, "%s: not valid JSON: %s expected (byte %zu)", m->what,
                     expected, at);
}

int ckpt_json_members_begin(struct ckpt_json_members *m, char *text, size_t len, const char *what,
                            struct ckpt_err *err)
{
    *m = (struct ckpt_json_members){.text = text, .len = len, .what = what, .first = true};
    if (ckpt_json_check_depth(text, len, what, err) < 0)
        return -1;
    m->at = skip_space(m, 0);
    if (m->at == len || !strchr("{[\"", text[m->at]))
        return fail_at(m, m->at, "'{'", err);
    if (text[m->at] != '{')
        return ckpt_fail(err, CKPT_FORMAT, "%s is not a JSON object", what);
    m->at++;
    return 0;
}

void ckpt_json_members_release(struct ckpt_json_members *m)
{
    json_decref(m->now);
    m->now = NULL;
}

/* Parse text[begin..end) as the only member of an object: its brackets take the places of the two
 * characters around it. */
static int parse_member(struct ckpt_json_members *m, size_t begin, size_t end, struct ckpt_err *err)
{
    const char before = m->text[begin - 1], after = m->text[end];

    m->text[begin - 1] = '{';
    m->text[end] = '}';
    int rc = ckpt_json_parse(m->text + begin - 1, end - begin + 2, m->what, &m->now, err);
    m->text[begin - 1] = before;
    m->text[end] = after;
    return rc < 0 ? ckpt_err_in(err, "byte %zu", begin) : 0;
}

static int finish(struct ckpt_json_members *m, struct ckpt_err *err)
{
    const size_t at = skip_space(m, m->at);

    m->at = m->len + 1; /* a further call finds nothing */
    return at == m->len ? 0 : fail_at(m, at, "end of file", err);
}

int ckpt_json_members_next(struct ckpt_json_members *m, const char **ret_name, json_t **ret_value,
                           struct ckpt_err *err)
{
    ckpt_json_members_release(m);
    if (m->at > m->len)
        return 0;
    size_t begin = skip_space(m, m->at);
    if (m->first && begin < m->len && m->text[begin] == '}') {
        m->at = begin + 1;
        return finish(m, err);
    }
    const size_t end = end_of_member(m, begin);
    if (end == m->len || m->text[end] == ']')
        return fail_at(m, end, "',' or '}'", err);
    if (begin == end)
        return fail_at(m, end, "string", err);
    if (parse_member(m, begin, end, err) < 0)
        return -1;
    void *iter = json_object_iter(m->now);
    *ret_name = json_object_iter_key(iter);
    *ret_value = json_object_iter_value(iter);
    m->first = false;
    m->at = end + 1;
    if (m->text[end] == '}') { /* the last one: what follows is checked before it is given */
        if (finish(m, err) < 0)
            return -1;
    }
    return 1;
}

size_t ckpt_json_members_count(const struct ckpt_json_members *m)
{
    size_t n = 0, at = m->at;

    while (at < m->len) {
        n++;
        at = end_of_member(m, at);
        if (at == m->len || m->text[at] != ',')
            break;
        at++;
    }
    return n;
}
