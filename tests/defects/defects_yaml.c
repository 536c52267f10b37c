/* SPDX-License-Identifier: Apache-2.0 */
/* Lies of a YAML text. */
#include "defects.h"

#include <stdlib.h>

#include "base/str.h"
#include "container/config.h"

static char *laughs(void)
{
    struct ckpt_str s = {0};
    ckpt_str_puts(&s, "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n");
    for (int i = 1; i < 20; i++) {
        ckpt_str_printf(&s, "a%d: &a%d [", i, i);
        for (int k = 0; k < 10; k++)
            ckpt_str_printf(&s, "%s*a%d", k ? "," : "", i - 1);
        ckpt_str_puts(&s, "]\n");
    }
    return s.ptr;
}

/* Each alias is one level deeper than the last. */
static char *tower(void)
{
    struct ckpt_str s = {0};
    ckpt_str_puts(&s, "a0: &a0 [x]\n");
    for (int i = 1; i < 1400; i++)
        ckpt_str_printf(&s, "a%d: &a%d [*a%d]\n", i, i, i - 1);
    return s.ptr;
}

static char *repeated(const char *unit, int n)
{
    struct ckpt_str s = {0};
    for (int i = 0; i < n; i++)
        ckpt_str_puts(&s, unit);
    return s.ptr;
}

static char *deep(void) { return repeated("[", 5000); }

static char *many(void) { return repeated("- 1\n", 1000 * 1000 + 10); }

static char *indented(void)
{
    struct ckpt_str s = {0};
    for (int i = 0; i < 2000; i++)
        ckpt_str_printf(&s, "%*sa:\n", i, "");
    return s.ptr;
}

static const struct lie {
    const char *name, *text;
    char *(*make)(void);
    enum ckpt_code code;
    const char *needle;
} lies[] = {
    {"sound", "a: {b: [1, 2]}\n", NULL, CKPT_OK, NULL},
    {"sound_alias", "a: &x {b: 1}\nc: *x\n", NULL, CKPT_OK, NULL},
    {"empty", "", NULL, CKPT_FORMAT, "empty"},
    {"only_comment", "# nothing\n", NULL, CKPT_FORMAT, "empty"},
    {"open_list", "a: [1, 2\n", NULL, CKPT_FORMAT, "not valid YAML"},
    {"open_quote", "a: \"text\n", NULL, CKPT_FORMAT, "not valid YAML"},
    {"tab", "a:\n\tb: 1\n", NULL, CKPT_FORMAT, "not valid YAML"},
    {"trailing", "{a: 1} }\n", NULL, CKPT_FORMAT, "not valid YAML"},
    {"two_documents", "a: 1\n---\nb: 2\n", NULL, CKPT_FORMAT, "more than one document"},
    {"duplicate_key", "a: 1\nb: 2\na: 3\n", NULL, CKPT_FORMAT, "duplicate key 'a' (line 3)"},
    {"key_is_a_list", "? [a, b]\n: 1\n", NULL, CKPT_UNSUPPORTED, "not a scalar"},
    {"alias_unknown", "a: *nobody\n", NULL, CKPT_FORMAT, "'nobody' has no anchor"},
    {"alias_cycle", "a: &x [*x]\n", NULL, CKPT_FORMAT, "'x' has no anchor"},
    {"alias_laughs", NULL, laughs, CKPT_LIMIT, "more than 1000000 nodes"},
    {"alias_tower", NULL, tower, CKPT_LIMIT, "deeper than 64"},
    {"nul_in_text", "a: \"x\\0y\"\n", NULL, CKPT_FORMAT, "NUL in a string"},
    {"nul_in_key", "\"x\\0y\": 1\n", NULL, CKPT_FORMAT, "NUL in a key"},
    {"not_utf8", "a: \xff\xfe\xfd\n", NULL, CKPT_FORMAT, "not valid YAML"},
    {"deep", NULL, deep, CKPT_LIMIT, "deeper than 64"},
    {"deep_by_indent", NULL, indented, CKPT_LIMIT, "deeper than 64"},
    {"many_nodes", NULL, many, CKPT_LIMIT, "more than 1000000 nodes"},
};

int main(int argc, char **argv)
{
    struct judge j = {.filter = argc > 1 ? argv[1] : NULL};

    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
        const struct lie *lie = &lies[i];
        char *own = lie->make ? lie->make() : NULL;
        const char *text = own ? own : lie->text;
        struct ckpt_err err = {0};
        json_t *value = NULL;
        clock_t begin = clock();
        if (wanted(&j, lie->name))
            judge(&j, lie->name, ckpt_yaml_parse(text, strlen(text), "config.yaml", &value, &err),
                  &err, lie->code, "config.yaml", lie->needle, begin);
        json_decref(value);
        free(own);
    }
    return verdict(&j);
}
