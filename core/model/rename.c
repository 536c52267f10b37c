/* SPDX-License-Identifier: Apache-2.0 */
/* Renaming by tables. */
#include "model/rename.h"

#include <string.h>

#include "base/mem.h"
#include "base/regex.h"
#include "base/str.h"
#include "base/vec.h"
#include "io/dir.h"
#include "recipe/library/files.h"

struct ckpt_renames {
    CKPT_VEC(struct ckpt_regex *) rules;
};

static void renames_freep(struct ckpt_renames **r) { ckpt_renames_free(*r); }

void ckpt_renames_free(struct ckpt_renames *r)
{
    if (!r)
        return;
    for (size_t i = 0; i < r->rules.len; i++)
        ckpt_regex_free(r->rules.ptr[i]);
    ckpt_vec_release(&r->rules);
    free(r);
}

static int add_rule(struct ckpt_renames *r, const char *pattern, const char *replacement,
                    struct ckpt_err *err)
{
    struct ckpt_regex *rule;

    if (ckpt_regex_new(pattern, replacement, &rule, err) < 0)
        return -1;
    if (ckpt_vec_push(&r->rules, rule) < 0) {
        ckpt_regex_free(rule);
        return ckpt_nomem(err);
    }
    return 0;
}

static int add_object(struct ckpt_renames *r, const json_t *j, struct ckpt_err *err)
{
    const char *pattern;
    json_t *v;

    json_object_foreach((json_t *)j, pattern, v) {
        if (!json_is_string(v))
            return ckpt_fail(err, CKPT_USAGE, "the replacement of '%s' is not a string", pattern);
        if (add_rule(r, pattern, json_string_value(v), err) < 0)
            return -1;
    }
    return 0;
}

int ckpt_renames_load(const char *path, struct ckpt_renames **ret, struct ckpt_err *err)
{
    ckpt_cleanup(renames_freep) struct ckpt_renames *r = calloc(1, sizeof *r);
    ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *dir = NULL;
    ckpt_cleanup(ckpt_freep) char *text = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = NULL;
    size_t len;

    if (!r)
        return ckpt_nomem(err);
    if (ckpt_file_read(path, &dir, &text, &len, err) < 0 ||
        ckpt_json_parse(text, len, path, &j, err) < 0)
        return ckpt_err_in(err, "key_mapping");
    if (!json_is_object(j))
        return ckpt_fail(err, CKPT_USAGE, "key_mapping '%s' is not a JSON object", path);
    if (add_object(r, j, err) < 0)
        return ckpt_err_in(err, "key_mapping '%s'", path);
    *ret = ckpt_steal(&r);
    return 0;
}

/* ---- what transformers knows ---- */

int ckpt_renames_of_type(const struct ckpt_type *type, struct ckpt_renames **ret,
                         struct ckpt_err *err)
{
    ckpt_cleanup(renames_freep) struct ckpt_renames *r = NULL;

    if (type->renames.n && !(r = calloc(1, sizeof *r)))
        return ckpt_nomem(err);
    for (size_t i = 0; i < type->renames.n; i++)
        if (add_rule(r, type->renames.pair[i].from, type->renames.pair[i].to, err) < 0)
            return ckpt_err_in(err, "%s: renames", type->name);
    *ret = ckpt_steal(&r);
    return 0;
}

/* ---- renaming ---- */

int ckpt_renames_apply(const struct ckpt_renames *r, const char *name, char **ret_name,
                       struct ckpt_err *err)
{
    char *result = NULL;

    for (size_t i = 0; i < r->rules.len && !result; i++)
        if (ckpt_regex_sub(r->rules.ptr[i], name, &result, err) < 0)
            return -1;
    if (!result && !(result = strdup(name)))
        return ckpt_nomem(err);
    *ret_name = result;
    return 0;
}

int ckpt_renames_note(const struct ckpt_renames *r, const char *name, json_t *map,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *other = NULL;

    if (ckpt_renames_apply(r, name, &other, err) < 0)
        return -1;
    if (strcmp(other, name) != 0 && json_object_set_new(map, other, json_string(name)) < 0)
        return ckpt_fail(err, CKPT_USAGE, "'%s' is renamed to a name that is not UTF-8", name);
    return 0;
}
