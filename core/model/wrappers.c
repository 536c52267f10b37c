/* SPDX-License-Identifier: Apache-2.0 */
/* Removing from names what wrappers of modules add, by evidence where a class may have it too. */
#include "model/wrappers.h"

#include <stdlib.h>
#include <string.h>

#include "base/map.h"
#include "base/str.h"

/* Parts of names that only wrappers add. */
static const char *const wrappers[] = {"_orig_mod", "_checkpoint_wrapped_module",
                                       "_fsdp_wrapped_module", "_fpw_module", "_forward_module"};

/* The part of a name that wrappers add and that a class may have too. */
static const char module_part[] = "module";

static bool is_wrapper(const char *part, size_t len)
{
    static const struct ckpt_texts words = {wrappers, sizeof wrappers / sizeof *wrappers};

    return ckpt_texts_have(&words, part, len);
}

static bool is_module(const char *part, size_t len)
{
    return len == strlen(module_part) && memcmp(part, module_part, len) == 0;
}

/* Which of the parts `module` go. */
enum modules { MODULES_STAY, MODULES_LEADING_GO, MODULES_GO };

/* Does the part go, and is it not the name's last? `leads`: only such parts stand before it. */
static bool goes(const char *part, size_t len, enum modules rule, bool leads)
{
    if (part[len] != '.')
        return false;
    return is_wrapper(part, len) ||
           (is_module(part, len) && (rule == MODULES_GO || (rule == MODULES_LEADING_GO && leads)));
}

static const char *strip(struct ckpt_arena *arena, const char *name, enum modules rule)
{
    char *own = NULL, *to = NULL;
    bool leads = true;

    for (const char *p = name; *p;) {
        const size_t len = strcspn(p, "."), step = len + (p[len] == '.');
        const bool gone = goes(p, len, rule, leads);
        if (gone && !own) {
            if (!(own = ckpt_arena_strdup(arena, name)))
                return NULL;
            to = own + (p - name);
        } else if (!gone && own) {
            memmove(to, p, step);
            to += step;
        }
        leads &= gone;
        p += step;
    }
    if (own)
        *to = '\0';
    return own ? own : name;
}

const char *ckpt_wrappers_strip(struct ckpt_arena *arena, const char *name)
{
    return strip(arena, name, MODULES_STAY);
}

const char *ckpt_wrappers_strip_all(struct ckpt_arena *arena, const char *name)
{
    return strip(arena, name, MODULES_GO);
}

bool ckpt_wrappers_in(const char *name, size_t len)
{
    for (const char *p = name; *p && p < name + len; p += strcspn(p, "."), p += *p == '.')
        if (goes(p, strcspn(p, "."), MODULES_GO, false))
            return true;
    return false;
}

void ckpt_wrappers_note(struct ckpt_catalog *cat, size_t n, const char *from, const char *to)
{
    if (n)
        ckpt_catalog_note(cat,
                          "%zu name%s without the parts that wrappers of modules add: '%s' is "
                          "shown as '%s'",
                          n, n == 1 ? " is shown" : "s are shown", from, to);
}

/* ---- evidence ---- */

struct cleaning {
    struct ckpt_opening *o;
    const struct ckpt_type *type, *any;
    const json_t *config;
    struct ckpt_map base; /* the base's names */
    const char **name;    /* of the tensors, as they will be */
    const char **other;   /* a proposal */
};

static void cleaning_release(struct cleaning *c)
{
    ckpt_map_release(&c->base);
    free(c->name);
    free(c->other);
}

static int collect_base(struct cleaning *c, struct ckpt_err *err)
{
    const struct ckpt_base *base = c->o->shared->base;
    const char *name;

    for (size_t i = 0; base && (name = ckpt_base_name_at(base->cat, base->weight_map, i)); i++)
        if (ckpt_map_add(&c->base, name, (uint32_t)i) == CKPT_NONE)
            return ckpt_nomem(err);
    return 0;
}

static bool in_base(const struct cleaning *c, const char *name)
{
    return ckpt_map_find(&c->base, name) != CKPT_NONE;
}

/* Does the class that the config names, or any class, have a tensor of this name? Told by the first
 * word, which often is the model type, and by the tensors that show a type: with a head they are at
 * most below its first word. */
static bool is_known(const struct cleaning *c, const char *name)
{
    const char *model_type = ckpt_json_str(c->config, "model_type");

    if (ckpt_texts_have(&c->type->embedding, name, strlen(name)) ||
        ckpt_texts_have(&c->any->embedding, name, strlen(name)) ||
        (model_type && ckpt_has_prefix(name, model_type) && name[strlen(model_type)] == '.'))
        return true;
    for (size_t i = 0; model_type && i < c->type->bare.n; i++) {
        if (strcmp(c->type->bare.pair[i].from, model_type) != 0)
            continue;
        const size_t len = ckpt_name_before(name, c->type->bare.pair[i].to);
        if (len == 0 || (len != SIZE_MAX && strcspn(name, ".") + 1 == len &&
                         !is_module(name, strcspn(name, "."))))
            return true;
    }
    return false;
}

/* How well names fit: the number that the base has, else that the config implies, and the number of
 * tensors that the model then lacks. */
struct fit {
    size_t known, lacks;
};

static bool is_better(const struct fit *a, const struct fit *than)
{
    return a->known > than->known || (a->known == than->known && a->lacks < than->lacks);
}

/* The first name that two tensors have; *ret is the number of the second, or SIZE_MAX. */
static int find_twice(const struct cleaning *c, const char *const *name, size_t *ret_first,
                      size_t *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_map_release) struct ckpt_map seen = {0};

    *ret = SIZE_MAX;
    for (size_t i = 0; i < c->o->cat->tensors.len; i++) {
        const uint32_t at = ckpt_map_add(&seen, name[i], (uint32_t)i);
        if (at == CKPT_NONE)
            return ckpt_nomem(err);
        if (at != i) {
            *ret_first = at;
            *ret = i;
            return 0;
        }
    }
    return 0;
}

/* Count what the model of the config lacks with these names, of which no two are equal. */
static int count_lacks(struct cleaning *c, const char *const *name, size_t *ret,
                       struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_lacks_release) struct ckpt_lacks lacks = {0};
    ckpt_cleanup(ckpt_freep) const char **stored = ckpt_catalog_names(c->o->cat);

    if (!stored)
        return ckpt_nomem(err);
    if (ckpt_catalog_select(c->o->cat, name, err) < 0 ||
        ckpt_recipe_lacks(c->o->shared->recipes, c->o->cat, c->config, &lacks, err) < 0)
        return -1;
    *ret = lacks.n;
    return ckpt_catalog_select(c->o->cat, stored, err);
}

static int measure(struct cleaning *c, const char *const *name, struct fit *ret,
                   struct ckpt_err *err)
{
    size_t first, twice;

    *ret = (struct fit){0, SIZE_MAX};
    if (find_twice(c, name, &first, &twice, err) < 0)
        return -1;
    if (twice != SIZE_MAX)
        return 0;
    for (size_t i = 0; i < c->o->cat->tensors.len; i++)
        ret->known += c->base.len ? in_base(c, name[i]) : is_known(c, name[i]);
    return c->config ? count_lacks(c, name, &ret->lacks, err) : 0;
}

/* ---- the parts ---- */

/* Propose the names without parts `module`; *ret is false if that changes none. */
static int propose(struct cleaning *c, enum modules rule, bool *ret, struct ckpt_err *err)
{
    *ret = false;
    for (size_t i = 0; i < c->o->cat->tensors.len; i++) {
        c->other[i] =
            in_base(c, c->name[i]) ? c->name[i] : strip(&c->o->cat->arena, c->name[i], rule);
        if (!c->other[i])
            return ckpt_nomem(err);
        *ret |= c->other[i] != c->name[i];
    }
    return 0;
}

/* CONFLICT: two tensors have one of these names. */
static int check_twice(const struct cleaning *c, const char *const *name, struct ckpt_err *err)
{
    const struct ckpt_tensor *t = c->o->cat->tensors.ptr;
    size_t first, twice;

    if (find_twice(c, name, &first, &twice, err) < 0)
        return -1;
    return twice == SIZE_MAX
               ? 0
               : ckpt_fail(err, CKPT_CONFLICT,
                           "'%s': '%s' and '%s' are both '%s' without the parts that wrappers of "
                           "modules add: which of them is the model's? (view=raw shows both)",
                           ckpt_dir_path(c->o->dir), t[first].name, t[twice].name, name[twice]);
}

static bool all_lead(const struct cleaning *c)
{
    for (size_t i = 0; i < c->o->cat->tensors.len; i++)
        if (!ckpt_has_prefix(c->name[i], "module."))
            return false;
    return true;
}

static int choose_modules(struct cleaning *c, struct ckpt_err *err)
{
    static const enum modules rules[] = {MODULES_LEADING_GO, MODULES_GO};
    struct fit best, fit;
    bool changes, better = false;

    if (propose(c, MODULES_GO, &changes, err) < 0)
        return -1;
    if (!changes)
        return 0;
    if (propose(c, MODULES_LEADING_GO, &changes, err) < 0 || check_twice(c, c->other, err) < 0 ||
        measure(c, c->name, &best, err) < 0)
        return -1;
    for (size_t r = 0; r < sizeof rules / sizeof *rules; r++) {
        if (propose(c, rules[r], &changes, err) < 0 ||
            (changes && measure(c, c->other, &fit, err) < 0))
            return -1;
        if (!changes || !is_better(&fit, &best))
            continue;
        best = fit;
        better = true;
        memcpy(c->name, c->other, c->o->cat->tensors.len * sizeof *c->name);
    }
    if (!better && all_lead(c))
        ckpt_catalog_warn(c->o->cat,
                          "all names begin with 'module.' ('%s' first), as those of a wrapped "
                          "model do, and nothing tells whether the model's own do: base=DIR may",
                          c->name[0]);
    return 0;
}

/* ---- all of it ---- */

/* Give the tensors their names, if one of them has another one than it had. */
static int apply(struct cleaning *c, struct ckpt_err *err)
{
    struct ckpt_catalog *cat = c->o->cat;
    size_t n = 0, first = 0;

    for (size_t i = 0; i < cat->tensors.len; i++)
        if (c->name[i] != cat->tensors.ptr[i].name && n++ == 0)
            first = i;
    if (n == 0)
        return 0;
    ckpt_wrappers_note(cat, n, cat->tensors.ptr[first].name, c->name[first]);
    return check_twice(c, c->name, err) < 0 ? -1 : ckpt_opening_rename(c->o, c->name, err);
}

/* Has a name of the catalogue a part that wrappers add? Hardly any has. */
static bool has_parts(const struct ckpt_catalog *cat)
{
    for (size_t i = 0; i < cat->tensors.len; i++)
        if (ckpt_wrappers_in(cat->tensors.ptr[i].name, strlen(cat->tensors.ptr[i].name)))
            return true;
    return false;
}

static int clean(struct ckpt_opening *o, struct ckpt_err *err)
{
    const struct ckpt_types *types = ckpt_recipes_types(o->shared->recipes);
    const json_t *config;
    const struct ckpt_type *type = ckpt_opening_hub_type(o, &config);
    ckpt_cleanup(cleaning_release) struct cleaning c = {
        .o = o,
        .type = type,
        .any = ckpt_types_any(types),
        .config = config,
        .name = ckpt_catalog_names(o->cat),
        .other = ckpt_catalog_names(o->cat),
    };

    if (!c.name || !c.other)
        return ckpt_nomem(err);
    if (collect_base(&c, err) < 0)
        return -1;
    for (size_t i = 0; i < o->cat->tensors.len; i++)
        if (!in_base(&c, c.name[i]) &&
            !(c.name[i] = ckpt_wrappers_strip(&o->cat->arena, c.name[i])))
            return ckpt_nomem(err);
    return check_twice(&c, c.name, err) < 0 || choose_modules(&c, err) < 0 ? -1 : apply(&c, err);
}

int ckpt_wrappers_clean(struct ckpt_opening *o, struct ckpt_err *err)
{
    return has_parts(o->cat) ? clean(o, err) : 0;
}
