/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing and evaluation of the origins of config keys. */
#include "recipe/library/origin.h"

#include <string.h>

#include "recipe/language/field.h"

struct ckpt_origin {
    enum { ORIGIN_EXPR, ORIGIN_LITERAL, ORIGIN_FIRST, ORIGIN_WHEN, ORIGIN_OBJECT } kind;
    const struct ckpt_expr *expr; /* EXPR, and WHEN's condition */
    json_t *literal;
    const char **key; /* OBJECT */
    const struct ckpt_origin **part;
    size_t npart;
};

static int parse_parts(struct ckpt_arena *arena, const char *where, const json_t *j, json_t *keep,
                       struct ckpt_origin *o, struct ckpt_err *err)
{
    const bool list = json_is_array(j);
    const char *key;
    json_t *v;
    size_t i = 0;

    o->kind = list ? ORIGIN_FIRST : ORIGIN_OBJECT;
    o->npart = list ? json_array_size(j) : json_object_size(j);
    o->part = ckpt_arena_alloc(arena, (o->npart + 1) * sizeof *o->part);
    o->key = ckpt_arena_alloc(arena, (o->npart + 1) * sizeof *o->key);
    if (!o->part || !o->key)
        return ckpt_nomem(err);
    if (list) {
        json_array_foreach(j, i, v)
            if (ckpt_origin_parse(arena, where, v, keep, &o->part[i], err) < 0)
                return -1;
        return 0;
    }
    json_object_foreach((json_t *)j, key, v) {
        o->key[i] = ckpt_arena_strdup(arena, key);
        if (!o->key[i])
            return ckpt_nomem(err);
        if (ckpt_origin_parse(arena, where, v, keep, &o->part[i++], err) < 0)
            return -1;
    }
    return 0;
}

static int parse_when(struct ckpt_arena *arena, const char *where, const json_t *j, json_t *keep,
                      struct ckpt_origin *o, struct ckpt_err *err)
{
    static const char *const known[] = {"when", "is", NULL};
    const char *when;

    o->kind = ORIGIN_WHEN;
    o->npart = 1;
    o->part = ckpt_arena_alloc(arena, sizeof *o->part);
    if (!o->part)
        return ckpt_nomem(err);
    if (ckpt_field_object(j, where, known, err) < 0 ||
        ckpt_field_string(arena, j, "when", where, &when, err) < 0)
        return -1;
    if (!json_object_get(j, "is"))
        return ckpt_fail(err, CKPT_FORMAT, "%s: 'when' without 'is'", where);
    return ckpt_expr_parse(arena, where, when, &o->expr, err) < 0
               ? -1
               : ckpt_origin_parse(arena, where, json_object_get(j, "is"), keep, &o->part[0], err);
}

int ckpt_origin_parse(struct ckpt_arena *arena, const char *where, const json_t *j, json_t *keep,
                      const struct ckpt_origin **ret, struct ckpt_err *err)
{
    struct ckpt_origin *o = ckpt_arena_alloc(arena, sizeof *o);

    if (!o)
        return ckpt_nomem(err);
    *o = (struct ckpt_origin){.kind = ORIGIN_LITERAL};
    *ret = o;
    if (json_is_string(j)) {
        o->kind = ORIGIN_EXPR;
        return ckpt_expr_parse(arena, where, json_string_value(j), &o->expr, err);
    }
    if (json_is_object(j) && json_object_get(j, "when"))
        return parse_when(arena, where, j, keep, o, err);
    if (json_is_object(j) || json_is_array(j))
        return parse_parts(arena, where, j, keep, o, err);
    o->literal = (json_t *)j;
    return json_array_append(keep, o->literal) < 0 ? ckpt_nomem(err) : 0;
}

static json_t *eval_object(const struct ckpt_origin *o, const struct ckpt_expr_env *env)
{
    json_t *out = json_object();

    for (size_t i = 0; out && i < o->npart; i++) {
        json_t *v = ckpt_origin_eval(o->part[i], env);
        if (v)
            ckpt_json_set(&out, o->key[i], v);
    }
    if (json_object_size(out) > 0)
        return out;
    json_decref(out);
    return NULL;
}

json_t *ckpt_origin_eval(const struct ckpt_origin *o, const struct ckpt_expr_env *env)
{
    json_t *v = NULL;

    switch (o->kind) {
    case ORIGIN_EXPR:
        return ckpt_expr_eval(o->expr, env);
    case ORIGIN_LITERAL:
        return json_deep_copy(
            o->literal); /* a copy, because other threads may count references to the literal */
    case ORIGIN_FIRST:
        for (size_t i = 0; i < o->npart && !v; i++)
            v = ckpt_origin_eval(o->part[i], env);
        return v;
    case ORIGIN_WHEN:
        return ckpt_expr_truth(o->expr, env) == CKPT_TRUE ? ckpt_origin_eval(o->part[0], env)
                                                          : NULL;
    case ORIGIN_OBJECT:
        return eval_object(o, env);
    }
    return NULL;
}
