/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the prefix below which the model's tensors are. */
#include <stdlib.h>
#include <string.h>

#include "base/str.h"
#include "model/bare.h"
#include "model/names.h"
#include "model/search.h"
#include "model/wrappers.h"

/* Does the name end with that of the type's embedding? */
static bool has_anchor(const struct ckpt_search *n, const char *name)
{
    for (size_t i = 0; i < n->type->embedding.n; i++)
        if (ckpt_name_before(name, n->type->embedding.text[i]) != SIZE_MAX)
            return true;
    return n->bare && ckpt_name_before(name, n->bare) != SIZE_MAX;
}

/* ---- the prefix, by the base's names ---- */

/* Make the names that the base's tensors have in memory, if there is a recipe that makes them. */
static int names_in_memory(struct ckpt_search *n, struct ckpt_err *err)
{
    const struct ckpt_recipe_options back = {
        .format = "hub", .base_config = n->base->config, .back = true};
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *cat = NULL;
    struct ckpt_err own = {0};
    bool done = false;

    n->unsure = !n->base->cat;
    if (n->unsure || !n->base->config)
        return 0;
    if (ckpt_base_catalog(n->base, &cat, err) < 0)
        return -1;
    if (ckpt_names_convert(&cat, n->recipes, &back, &done, NULL, &own) < 0) {
        n->unsure = true;
        return own.code == CKPT_NOMEM ? ckpt_err_move(err, &own) : 0;
    }
    if (!done)
        return 0;
    n->in_memory = ckpt_steal(&cat);
    n->memory.cat = n->in_memory;
    return 0;
}

/* Find where most of the base's tensors are, with these names of the checkpoint's; if they have the
 * base's names and those in memory as well, they are in memory. all: where the names in memory are
 * not known, most are not enough, since one part of a model may have the same names there. */
static int fit_names(struct ckpt_search *n, const char *const *name, bool all, struct ckpt_fit *ret,
                     const struct ckpt_fit_model **ret_follow, struct ckpt_err *err)
{
    struct ckpt_fit fit[2];
    bool found[2] = {false};

    if (ckpt_fit_find(n->cat, name, &n->hub, &fit[0], &found[0], err) < 0 ||
        (n->in_memory && ckpt_fit_find(n->cat, name, &n->memory, &fit[1], &found[1], err) < 0))
        return -1;
    const bool memory = found[1] && !(found[0] && ckpt_fit_better(&fit[0], &fit[1]));
    *ret_follow = memory ? &n->memory : found[0] ? &n->hub : NULL;
    *ret = fit[memory];
    if (n->unsure && *ret_follow && all && fit[0].named < ckpt_fit_model_len(&n->hub))
        *ret_follow = NULL;
    return 0;
}

/* Copy the names without any parts `module`. */
static const char **names_without_modules(struct ckpt_search *n, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) const char **name = ckpt_catalog_names(n->cat);

    for (size_t i = 0; name && i < n->cat->tensors.len; i++) {
        name[i] = n->name[i] ? ckpt_wrappers_strip_all(&n->cat->arena, n->name[i]) : NULL;
        if (n->name[i] && !name[i]) {
            (void)ckpt_nomem(err);
            return NULL;
        }
    }
    if (!name)
        (void)ckpt_nomem(err);
    return ckpt_steal(&name);
}

/* Get the names of the base, if it has weights or an index of them. */
static int know_base(struct ckpt_search *n, struct ckpt_err *err)
{
    const struct ckpt_base *base = n->base;

    if (!base || !ckpt_base_name_at(base->cat, base->weight_map, 0))
        return 0;
    n->hub = (struct ckpt_fit_model){.cat = base->cat,
                                     .map = base->weight_map,
                                     .packed = ckpt_config_is_quantized(base->config)};
    return ckpt_fit_model_init(&n->hub, err) < 0 ? -1 : names_in_memory(n, err);
}

/* Where both sides have tensors that the other lacks, do not follow the base if a recipe fits: one
 * part of a model may have the same names in a framework's checkpoint (a vision tower). */
static int drop_if_recipe(struct ckpt_search *n, const struct ckpt_fit *fit, struct ckpt_err *err)
{
    const struct ckpt_recipe_options opt = {.base_config = n->config, .allow_partial = true};
    size_t own = 0;
    bool fits;

    for (size_t i = 0; i < n->cat->tensors.len; i++)
        own += n->name[i] != NULL;
    if (fit->named == own || fit->named >= ckpt_fit_model_len(n->follow))
        return 0;
    if (ckpt_recipe_fits(n->recipes, n->cat, &opt, &fits, err) < 0)
        return -1;
    if (fits)
        n->follow = NULL;
    return 0;
}

/* Find the prefix by the names of a base, where most of them are: whatever the class of the model,
 * as the checkpoint is then named as that is. CONFLICT: they are there twice. */
static int follow_base(struct ckpt_search *n, bool all, struct ckpt_err *err)
{
    const struct ckpt_base *base = n->base;
    ckpt_cleanup(ckpt_freep) const char **bare = NULL;
    struct ckpt_fit fit;

    if (!ckpt_fit_model_len(&n->hub))
        return 0;
    if (fit_names(n, n->name, all, &fit, &n->follow, err) < 0)
        return -1;
    if (!n->follow) { /* a wrapper around a part of the model adds a word that a class may have */
        if (!(bare = names_without_modules(n, err)) ||
            fit_names(n, bare, all, &fit, &n->follow, err) < 0)
            return -1;
        if (n->follow)
            memcpy(n->name, bare, n->cat->tensors.len * sizeof *bare);
    }
    if (n->follow && drop_if_recipe(n, &fit, err) < 0)
        return -1;
    if (!n->follow)
        return 0;
    if (fit.two)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "two models: the tensors of base '%s' are there below '%.*s' and below "
                         "'%.*s': choose one with -o part=",
                         ckpt_dir_path(base->dir), (int)fit.len, fit.at, (int)fit.two_len, fit.two);
    return (n->prefix = strndup(fit.at, fit.len)) ? 0 : ckpt_nomem(err);
}

/* ---- the prefix, by the facts about the type ---- */

/* Remove the parts `module` inside names, if only then the type's embedding is there: a wrapper
 * around a part of the model adds them. */
static int drop_modules(struct ckpt_search *n, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) const char **name = names_without_modules(n, err);
    size_t known = 0, then = 0;

    if (!name)
        return -1;
    for (size_t i = 0; i < n->cat->tensors.len; i++) {
        known += n->name[i] && has_anchor(n, n->name[i]);
        then += name[i] && has_anchor(n, name[i]);
    }
    if (known == 0 && then)
        memcpy(n->name, name, n->cat->tensors.len * sizeof *name);
    return 0;
}

/* Where a known tensor is. */
struct place {
    const char *anchor; /* NULL: it is nowhere */
    const char *at;     /* a name that begins with the prefix */
    size_t len;         /* of the prefix */
    size_t beside;      /* tensors that are not below it */
};

/* Find the place where `anchor` is. CONFLICT: there are two different ones. */
static int find_place(const struct ckpt_search *n, const char *anchor, struct place *ret,
                      struct ckpt_err *err)
{
    struct place p = {0};

    for (size_t i = 0; i < n->cat->tensors.len; i++) {
        const char *name = n->name[i];
        const size_t len = name ? ckpt_name_before(name, anchor) : SIZE_MAX;
        if (len == SIZE_MAX)
            continue;
        if (p.anchor && (p.len != len || memcmp(p.at, name, len) != 0))
            return ckpt_fail(err, CKPT_CONFLICT,
                             "two models: '%s' is there below '%.*s' and below '%.*s'", anchor,
                             (int)p.len, p.at, (int)len, name);
        p = (struct place){.anchor = anchor, .at = name, .len = len};
    }
    for (size_t i = 0; p.anchor && i < n->cat->tensors.len; i++)
        p.beside += n->name[i] && strncmp(n->name[i], p.at, p.len) != 0;
    *ret = p;
    return 0;
}

/* Find the place, by one of these tensors, that leaves the fewest beside it: some classes of a type
 * have a word before the names of the others. A CONFLICT is that of the first that is there. */
static int find_best(const struct ckpt_search *n, const struct ckpt_texts *anchors,
                     struct place *best, struct ckpt_err *err)
{
    for (size_t i = 0; i < anchors->n; i++) {
        struct place p;
        struct ckpt_err own = {0};
        if (find_place(n, anchors->text[i], &p, &own) < 0 && !best->anchor)
            return ckpt_err_move(err, &own);
        if (own.code == CKPT_OK && p.anchor && (!best->anchor || p.beside < best->beside))
            *best = p;
    }
    return 0;
}

/* Is the prefix a key of the saved dict, and so no part of the model's names? */
static bool is_key(const struct ckpt_search *n, const struct place *p)
{
    const json_t *root;
    size_t i;

    json_array_foreach(json_object_get(n->cat->about, "roots"), i, root) {
        const char *key = json_string_value(root);
        if (strlen(key) + 1 == p->len && strncmp(key, p->at, p->len - 1) == 0)
            return true;
    }
    return false;
}

/* Take the place, if one was found, as that of the model. */
static int take_place(struct ckpt_search *n, const struct place *p, const char *anchor,
                      struct ckpt_err *err)
{
    if (!p->anchor)
        return 0;
    n->anchor = anchor;
    if (!(n->prefix = strndup(p->at, p->len)))
        return ckpt_nomem(err);
    return n->bare ? 0 : ckpt_bare_check(n->cat, n->config, n->prefix, err);
}

/* Find a model without a head. A class that is called like one may have a head all the same, which
 * is then beside what would be the model: it is one with a head where less is beside that. */
static int find_bare(struct ckpt_search *n, struct place *best, struct ckpt_err *err)
{
    struct place headed = {0};

    if (find_place(n, n->bare, best, err) < 0)
        return -1;
    if (!best->anchor || !best->beside || !best->len || is_key(n, best))
        return 0;
    if (find_best(n, &n->type->embedding, &headed, err) < 0)
        return -1;
    if (headed.anchor && headed.beside < best->beside) {
        *best = headed;
        n->bare = NULL;
    }
    return 0;
}

/* Find the prefix by the name of an embedding: the type's, else that of any type. */
static int follow_facts(struct ckpt_search *n, struct ckpt_err *err)
{
    const struct ckpt_type *type = n->type;
    struct place best = {0};

    if (drop_modules(n, err) < 0)
        return -1;
    if (n->bare)
        return find_bare(n, &best, err) < 0 ? -1 : take_place(n, &best, best.anchor, err);
    if (find_best(n, &type->embedding, &best, err) < 0 ||
        (!best.anchor && find_best(n, &n->any->embedding, &best, err) < 0))
        return -1;
    if (best.anchor || !type->last_norm || !type->embedding.n ||
        !ckpt_json_bool(n->config, "tie_word_embeddings", false))
        return take_place(n, &best, best.anchor, err);
    return find_place(n, type->last_norm, &best, err) < 0
               ? -1
               : take_place(n, &best, type->embedding.text[0], err);
}

/* ---- the embedding ---- */

/* Find the embedding by the facts about the type, where the base has told the prefix. */
static void find_anchor(struct ckpt_search *n)
{
    const struct ckpt_texts *const words[] = {&n->type->embedding, &n->any->embedding};
    const size_t len = strlen(n->prefix);

    for (size_t w = 0; w < 2 && !n->anchor; w++)
        for (size_t i = 0; i < words[w]->n && !n->anchor; i++)
            for (size_t k = 0; k < n->cat->tensors.len && !n->anchor; k++)
                if (n->name[k] && strncmp(n->name[k], n->prefix, len) == 0 &&
                    strcmp(n->name[k] + len, words[w]->text[i]) == 0)
                    n->anchor = words[w]->text[i];
    if (n->anchor)
        n->bare = NULL;
    else
        n->anchor = n->bare;
}

/* ---- what follows from the base ---- */

/* Take back what is no weight by its name (a table that most classes compute, a part that is called
 * like an optimizer's) where the base has it: there it is one. */
static int take_back(struct ckpt_search *n, struct ckpt_err *err)
{
    const size_t len = strlen(n->prefix);

    for (size_t i = 0; i < n->cat->tensors.len; i++) {
        const char *name = NULL;
        if (n->name[i])
            continue;
        if (!(name = ckpt_wrappers_strip(&n->cat->arena, n->cat->tensors.ptr[i].name)))
            return ckpt_nomem(err);
        if (strncmp(name, n->prefix, len) == 0 && ckpt_fit_model_has(n->follow, name + len))
            n->name[i] = name;
    }
    return 0;
}

/* Are all tensors of the base there, in its shapes? */
static bool has_all(const struct ckpt_search *n)
{
    const size_t len = strlen(n->prefix);
    size_t found = 0;

    for (size_t i = 0; i < n->cat->tensors.len; i++) {
        const char *name = n->name[i];
        const struct ckpt_tensor *b = name && strncmp(name, n->prefix, len) == 0
                                          ? ckpt_catalog_find(n->hub.cat, name + len)
                                          : NULL;
        found += b && ckpt_fit_shape(&n->cat->tensors.ptr[i], b);
    }
    return found == n->hub.cat->tensors.len;
}

int ckpt_search_prefix(struct ckpt_search *n, struct ckpt_err *err)
{
    n->bare = ckpt_bare_anchor(n->type, n->config);
    if (know_base(n, err) < 0 || follow_base(n, true, err) < 0 ||
        (!n->follow && follow_facts(n, err) < 0) || (!n->prefix && follow_base(n, false, err) < 0))
        return -1;
    if (!n->follow)
        return 0;
    find_anchor(n);
    if (take_back(n, err) < 0)
        return -1;
    /* all of the base, in its own way; or what is not there in any other */
    n->as_base = !n->unsure && n->follow == &n->hub && (n->in_memory || has_all(n));
    return 0;
}
