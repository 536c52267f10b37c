/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing and checking of model files. */
#include "recipe/library/family.h"

#include <string.h>

#include "base/vec.h"

enum { MAX_DEPTH = 12 };

struct reader {
    struct ckpt_arena *arena;
    struct ckpt_family *f;
    const char *loop[CKPT_FAMILY_LOOPS];
    size_t nloop;
    struct ckpt_err *err;
};

typedef CKPT_VEC(struct ckpt_model_item) item_vec;

bool ckpt_family_has_dim(const struct ckpt_family *f, const char *name)
{
    for (size_t i = 0; i < f->ndim; i++)
        if (strcmp(f->dim[i].name, name) == 0)
            return true;
    return false;
}

bool ckpt_family_has_key(const struct ckpt_family *f, const char *key)
{
    return ckpt_map_find(&f->keys, key) != CKPT_NONE;
}

bool ckpt_family_has_type(const struct ckpt_family *f, const char *model_type)
{
    return ckpt_texts_have(&f->types, model_type, strlen(model_type));
}

/* ---- keys and dims ---- */

static int add_key(void *ctx, const char *key)
{
    struct reader *r = ctx;
    const char *copy = ckpt_arena_strdup(r->arena, key);

    if (!copy || ckpt_map_add(&r->f->keys, copy, 1) == CKPT_NONE)
        return ckpt_nomem(r->err);
    return 0;
}

static int add_key_of_dim(void *ctx, const char *key)
{
    struct reader *r = ctx;

    return ckpt_family_has_dim(r->f, key) ? 0 : add_key(r, key);
}

static int read_dim(struct reader *r, const char *name, const json_t *j)
{
    struct ckpt_dim *d = &r->f->dim[r->f->ndim];
    const char *where;
    struct ckpt_texts text;

    if (!(where = ckpt_field_text(r->arena, r->err, "%s: dims.%s", r->f->name, name)) ||
        !(d->name = ckpt_arena_strdup(r->arena, name)))
        return ckpt_nomem(r->err);
    if (strlen(name) < 2 || name[0] == '_')
        return ckpt_fail(r->err, CKPT_FORMAT, "%s: a dim's name has two letters or more", where);
    if (r->f->ndim == CKPT_FAMILY_DIMS)
        return ckpt_fail(r->err, CKPT_LIMIT, "%s: more than %d dims", where, CKPT_FAMILY_DIMS);
    if (ckpt_field_strings(r->arena, j, NULL, where, &text, r->err) < 0)
        return -1;
    d->nexpr = text.n;
    d->expr = ckpt_arena_alloc(r->arena, (d->nexpr + 1) * sizeof *d->expr);
    if (!d->expr)
        return ckpt_nomem(r->err);
    d->option = NULL;
    for (size_t i = 0; i < d->nexpr; i++) {
        if (ckpt_expr_parse(r->arena, where, text.text[i], &d->expr[i], r->err) < 0)
            return -1;
        const char *key = ckpt_expr_key(d->expr[i]);
        if (key && !d->option && !ckpt_family_has_dim(r->f, key))
            d->option = key;
        if (ckpt_expr_keys(d->expr[i], add_key_of_dim, r) < 0)
            return -1;
    }
    r->f->ndim++;
    return 0;
}

/* ---- tensors ---- */

static int loop_of(const struct reader *r, const char *axis)
{
    for (size_t i = 0; i < r->nloop; i++)
        if (strcmp(r->loop[i], axis) == 0)
            return (int)i;
    return -1;
}

static int check_tensor(struct reader *r, const char *where, const struct ckpt_model_item *it)
{
    for (uint32_t a = 0; a < it->scope->naxis; a++)
        if ((it->name->axes >> a & 1) && loop_of(r, it->scope->axis[a].name) < 0)
            return ckpt_fail(r->err, CKPT_FORMAT, "%s: '%.200s': no 'each' runs over {%s}", where,
                             it->text, it->scope->axis[a].name);
    for (uint32_t v = 0; v < it->scope->nvar; v++)
        if (it->scope->var[v].name[1] && !ckpt_family_has_dim(r->f, it->scope->var[v].name))
            return ckpt_fail(r->err, CKPT_FORMAT, "%s: '%.200s': '%s' is not one of the dims",
                             where, it->text, it->scope->var[v].name);
    if (it->shape.rest_at >= 0)
        return ckpt_fail(r->err, CKPT_FORMAT, "%s: '%.200s': a model's shape is spelt out", where,
                         it->text);
    return 0;
}

static int add_tensor(struct reader *r, const char *where, const char *whole,
                      const struct ckpt_words *words, uint32_t k, item_vec *out)
{
    struct ckpt_model_item *it;
    struct ckpt_name *name;
    uint32_t nname;
    uint16_t *pos;
    char *text;
    struct ckpt_scope *sc = ckpt_arena_alloc(r->arena, sizeof *sc);

    if (!sc || ckpt_vec_add(out, &it) < 0)
        return ckpt_nomem(r->err);
    if (ckpt_name_choose(r->arena, whole, words, k, &text, &pos, r->err) < 0)
        return -1;
    *sc = (struct ckpt_scope){.arena = r->arena};
    struct ckpt_pattern_text t = {where, whole, text, pos};
    size_t len = ckpt_name_extent(text), name_len = len;
    it->optional = len > 0 && text[len - 1] == '?';
    if (it->optional)
        name_len--;
    if (ckpt_name_parse(sc, &t, name_len, &name, &nname, r->err) < 0 ||
        ckpt_pattern_parse(sc, &t, len, &it->shape, r->err) < 0 || ckpt_scope_close(sc, r->err) < 0)
        return -1;
    if (nname > 1)
        return ckpt_fail(r->err, CKPT_FORMAT, "%s: '%.200s': a model's tensor has one spelling",
                         where, whole);
    it->scope = sc;
    it->name = name;
    it->text = name->text;
    return check_tensor(r, where, it);
}

static int read_tensor(struct reader *r, const char *where, const char *at, const char *side,
                       item_vec *out)
{
    struct ckpt_words w;
    char *whole = ckpt_field_text(r->arena, r->err, "%s%s", at, side);

    if (!whole || ckpt_name_words(where, whole, &w, r->err) < 0)
        return -1;
    if (strlen(whole) > CKPT_NAME_LEN)
        return ckpt_fail(r->err, CKPT_LIMIT, "%s: a name has %zu bytes, which is too many", where,
                         strlen(whole));
    for (uint32_t k = 0; k < w.total; k++)
        if (add_tensor(r, where, whole, &w, k, out) < 0)
            return -1;
    return 0;
}

static int read_items(struct reader *r, const char *where, const char *at, const json_t *list,
                      int depth, struct ckpt_model_items *ret);

/* "tensors" or "either" of a group. */
static int read_group_lists(struct reader *r, const char *where, const char *at, const json_t *j,
                            int depth, struct ckpt_model_item *it)
{
    const json_t *tensors = json_object_get(j, "tensors"), *either = json_object_get(j, "either");
    size_t n = either ? json_array_size(either) : 1;

    if (!tensors == !either || (either && n == 0))
        return ckpt_fail(r->err, CKPT_FORMAT, "%s: a group has 'tensors', or lists in 'either'",
                         where);
    struct ckpt_model_items *list = ckpt_arena_alloc(r->arena, n * sizeof *list);
    if (!list)
        return ckpt_nomem(r->err);
    for (size_t i = 0; i < n; i++)
        if (read_items(r, where, at, either ? json_array_get(either, i) : tensors, depth,
                       &list[i]) < 0)
            return -1;
    it->list = list;
    it->nlist = n;
    return 0;
}

/* Read {"each", "when", "at", "block", "tied", "tensors" | "either"}: `each` encloses `when`, which
 * encloses the list. */
static int read_group(struct reader *r, const char *where, const char *at, const json_t *j,
                      int depth, item_vec *out)
{
    static const char *const known[] = {"each", "when",    "at",     "block",
                                        "tied", "tensors", "either", NULL};
    const char *when, *more;
    struct ckpt_model_item it = {.block = json_is_true(json_object_get(j, "block"))};

    if (ckpt_field_object(j, where, known, r->err) < 0 ||
        ckpt_field_string(r->arena, j, "each", where, &it.loop, r->err) < 0 ||
        ckpt_field_string(r->arena, j, "when", where, &when, r->err) < 0 ||
        ckpt_field_string(r->arena, j, "at", where, &more, r->err) < 0 ||
        ckpt_field_string(r->arena, j, "tied", where, &it.tied, r->err) < 0)
        return -1;
    if (it.tied && !when)
        return ckpt_fail(r->err, CKPT_FORMAT, "%s: 'tied' stands beside 'when'", where);
    if (more && !(at = ckpt_field_text(r->arena, r->err, "%s%s", at, more)))
        return -1;
    if (when && ckpt_expr_parse(r->arena, where, when, &it.when, r->err) < 0)
        return -1;
    if (it.loop) {
        if (!ckpt_family_has_dim(r->f, it.loop))
            return ckpt_fail(r->err, CKPT_FORMAT, "%s: 'each': '%.100s' is not one of the dims",
                             where, it.loop);
        if (r->nloop == CKPT_FAMILY_LOOPS || loop_of(r, it.loop) >= 0)
            return ckpt_fail(r->err, CKPT_LIMIT, "%s: 'each' nested too deep or twice", where);
        r->loop[r->nloop++] = it.loop;
    }
    int rc = read_group_lists(r, where, at, j, depth + 1, &it);
    r->nloop -= it.loop != NULL;
    return rc < 0 ? -1 : ckpt_vec_push(out, it) < 0 ? ckpt_nomem(r->err) : 0;
}

static int read_items(struct reader *r, const char *where, const char *at, const json_t *list,
                      int depth, struct ckpt_model_items *ret)
{
    ckpt_cleanup(ckpt_vec_cleanup) item_vec v = {0};
    size_t i;
    json_t *j;

    if (!json_is_array(list))
        return ckpt_fail(r->err, CKPT_FORMAT, "%s: a list of tensors is expected here", where);
    if (depth > MAX_DEPTH)
        return ckpt_fail(r->err, CKPT_LIMIT, "%s: groups nested deeper than %d", where, MAX_DEPTH);
    json_array_foreach(list, i, j) {
        const char *here = ckpt_field_text(r->arena, r->err, "%s[%zu]", where, i);
        if (!here || (json_is_string(j) ? read_tensor(r, here, at, json_string_value(j), &v)
                                        : read_group(r, here, at, j, depth, &v)) < 0)
            return -1;
    }
    ret->n = v.len;
    ret->item = ckpt_arena_dup(r->arena, v.ptr, v.len * sizeof *v.ptr);
    return ret->item ? 0 : ckpt_nomem(r->err);
}

/* ---- the file ---- */

static int read_family(struct reader *r, const json_t *j)
{
    static const char *const known[] = {"note",  "model_types", "config",  "needs",
                                        "takes", "dims",        "tensors", NULL};
    struct ckpt_family *f = r->f;
    const json_t *config = json_object_get(j, "config"), *tensors = json_object_get(j, "tensors");
    json_t *dims = json_object_get(j, "dims"), *v;
    const char *key, *where;
    struct ckpt_texts takes;

    if (ckpt_field_object(j, f->name, known, r->err) < 0 ||
        ckpt_field_strings(r->arena, j, "model_types", f->name, &f->types, r->err) < 0 ||
        ckpt_field_strings(r->arena, j, "needs", f->name, &f->needs, r->err) < 0 ||
        ckpt_field_strings(r->arena, j, "takes", f->name, &takes, r->err) < 0)
        return -1;
    if (config && !json_is_object(config))
        return ckpt_fail(r->err, CKPT_FORMAT, "%s: 'config' must be an object", f->name);
    f->config = config ? json_deep_copy(config) : json_object();
    if (!f->config)
        return ckpt_nomem(r->err);
    json_object_foreach(f->config, key, v)
        if (add_key(r, key) < 0)
            return -1;
    for (size_t i = 0; i < f->needs.n; i++)
        if (add_key(r, f->needs.text[i]) < 0)
            return -1;
    for (size_t i = 0; i < takes.n; i++)
        if (add_key(r, takes.text[i]) < 0)
            return -1;
    if (!(where = ckpt_field_text(r->arena, r->err, "%s: tensors", f->name)))
        return -1;
    if (dims && !json_is_object(dims))
        return ckpt_fail(r->err, CKPT_FORMAT, "%s: 'dims' must be an object", f->name);
    json_object_foreach(dims, key, v)
        if (read_dim(r, key, v) < 0)
            return -1;
    f->open = tensors == NULL;
    return f->open ? 0 : read_items(r, where, "", tensors, 0, &f->tensors);
}

int ckpt_family_from_json(struct ckpt_arena *arena, const char *name, const json_t *j,
                          struct ckpt_family **ret, struct ckpt_err *err)
{
    struct ckpt_family *f = ckpt_arena_alloc(arena, sizeof *f);
    struct reader r = {.arena = arena, .f = f, .err = err};

    if (!f)
        return ckpt_nomem(err);
    memset(f, 0, sizeof *f);
    if (!(f->name = ckpt_arena_strdup(arena, name)))
        return ckpt_nomem(err);
    if (read_family(&r, j) < 0) {
        ckpt_family_release(f);
        return -1;
    }
    *ret = f;
    return 0;
}

int ckpt_family_parse(struct ckpt_arena *arena, const char *name, const char *text, size_t len,
                      struct ckpt_family **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *j = NULL;

    if (ckpt_json_parse_strict(text, len, name, &j, err) < 0)
        return -1;
    return ckpt_family_from_json(arena, name, j, ret, err);
}

void ckpt_family_release(struct ckpt_family *f)
{
    if (!f)
        return;
    json_decref(f->config);
    f->config = NULL;
    ckpt_map_release(&f->keys);
}
