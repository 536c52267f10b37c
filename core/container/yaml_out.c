/* SPDX-License-Identifier: Apache-2.0 */
/* Writing YAML. */
#include "container/yaml_out.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/mem.h"
#include "base/sort.h"

static void put_value(const json_t *j, int depth, bool in_list, struct ckpt_str *out);

/* Would PyYAML read the word as a string, and write it without quotes? */
static bool is_plain(const char *s)
{
    static const char *const words[] = {"null", "true", "false", "yes", "no",
                                        "on",   "off",  "y",     "n"};
    static const char letters[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-./";

    if (!strchr("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_/", *s) || !*s ||
        s[strspn(s, letters)])
        return false;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strcasecmp(words[i], s) == 0)
            return false;
    return true;
}

/* PyYAML writes 1.0e-05, since YAML 1.1 has no number 1e-05. */
static void put_real(const json_t *j, struct ckpt_str *out)
{
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    size_t len;

    if (ckpt_json_dump(j, CKPT_JSON_COMPACT, false, &text, &len, NULL) < 0) {
        out->failed = true;
        return;
    }
    const char *e = strchr(text, 'e');
    if (e && !strchr(text, '.'))
        ckpt_str_printf(out, "%.*s.0%s", (int)(e - text), text, e);
    else
        ckpt_str_puts(out, text);
}

static void put_scalar(const json_t *j, struct ckpt_str *out)
{
    const char *s = json_string_value(j);

    if (s && is_plain(s))
        ckpt_str_puts(out, s);
    else if (s)
        ckpt_json_put_string(out, s);
    else if (json_is_real(j))
        put_real(j, out);
    else if (json_is_integer(j))
        ckpt_str_printf(out, "%" JSON_INTEGER_FORMAT, json_integer_value(j));
    else
        ckpt_str_puts(out, json_is_true(j) ? "true" : json_is_false(j) ? "false" : "null");
}

/* The first key of an object in a list stands behind the dash. */
static void put_object(const json_t *j, int depth, bool in_list, struct ckpt_str *out)
{
    const size_t n = json_object_size(j);
    const char **key = malloc((n + 1) * sizeof *key), *k;
    size_t i = 0;
    json_t *value;

    if (!key) {
        out->failed = true;
        return;
    }
    json_object_foreach((json_t *)j, k, value)
        key[i++] = k;
    qsort(key, n, sizeof *key, ckpt_strings_cmp);
    for (i = 0; i < n; i++) {
        ckpt_str_printf(out, "%*s%s:", in_list && i == 0 ? 0 : 2 * depth, "", key[i]);
        put_value(json_object_get(j, key[i]), depth, false, out);
    }
    free(key);
}

/* What follows "key:" or "-", with the end of the line. */
static void put_value(const json_t *j, int depth, bool in_list, struct ckpt_str *out)
{
    const bool object = json_is_object(j) && json_object_size(j),
               list = json_is_array(j) && json_array_size(j);

    if (object) {
        ckpt_str_puts(out, in_list ? " " : "\n");
        put_object(j, depth + 1, in_list, out);
        return;
    }
    if (!list) {
        ckpt_str_putc(out, ' ');
        if (json_is_object(j) || json_is_array(j))
            ckpt_str_puts(out, json_is_object(j) ? "{}" : "[]");
        else
            put_scalar(j, out);
        ckpt_str_putc(out, '\n');
        return;
    }
    ckpt_str_puts(out, in_list ? " " : "\n");
    for (size_t i = 0; i < json_array_size(j); i++) {
        ckpt_str_printf(out, "%*s-", in_list && i == 0 ? 0 : 2 * (depth + in_list), "");
        put_value(json_array_get(j, i), depth + in_list, true, out);
    }
}

void ckpt_yaml_out(const json_t *j, struct ckpt_str *out) { put_object(j, 0, false, out); }
