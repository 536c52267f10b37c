/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the model in a checkpoint, and the hub's names for those in memory. */
#include "model/names.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "model/bare.h"
#include "model/experts.h"
#include "model/heads.h"
#include "model/search.h"
#include "model/wrappers.h"
#include "recipe/library/settings.h"

/* First parts of names that do not belong to a model: optimizers, schedulers, data loaders. */
static const char *const other_roots[] = {"optimizer", "optimizers", "optim",      "lr_scheduler",
                                          "scheduler", "sched",      "dataloader", "train_state",
                                          "rng",       "ema"};

/* False for names of the state of an optimizer, a scheduler or a data loader, and of tensors that a
 * model of this type computes. */
static bool is_weight(const struct ckpt_type *type, const char *name)
{
    static const struct ckpt_texts roots = {other_roots, sizeof other_roots / sizeof *other_roots};

    return !ckpt_texts_have(&roots, name, strcspn(name, ".")) &&
           !ckpt_has_prefix(name, "optimizer_") && !ckpt_has_suffix(name, "._extra_state") &&
           !ckpt_texts_end(&type->computed, name);
}

void ckpt_search_release(struct ckpt_search *n)
{
    free(n->name);
    free(n->prefix);
    ckpt_fit_model_release(&n->hub);
    ckpt_fit_model_release(&n->memory);
    ckpt_catalog_free(n->in_memory);
}

int ckpt_names_weights(const struct ckpt_catalog *cat, const struct ckpt_type *type,
                       struct ckpt_arena *arena, const char ***ret, struct ckpt_err *err)
{
    const char **name = *ret = ckpt_catalog_names(cat);

    for (size_t i = 0; name && i < cat->tensors.len; i++)
        if (!is_weight(type, name[i]))
            name[i] = NULL;
        else if (!(name[i] = ckpt_wrappers_strip(arena, name[i])))
            return ckpt_nomem(err);
    return name ? 0 : ckpt_nomem(err);
}

/* Does the model's class, or any if the config does not say it, leave the tensor out? */
static bool is_unsaved(const struct ckpt_search *n, const char *name)
{
    for (size_t i = 0; i < n->type->unsaved.n; i++) {
        const struct ckpt_text_pair *pair = &n->type->unsaved.pair[i];
        if (!ckpt_has_suffix(name, pair->to))
            continue;
        const char *class = ckpt_config_class(n->config);
        if (!class || strcmp(class, pair->from) == 0)
            return true;
    }
    return false;
}

/* Tell of an average of the weights, which a trainer saves beside them, and which is no part of the
 * model. */
static void note_average(const struct ckpt_search *n)
{
    size_t count = 0, first = 0;

    for (size_t i = 0; i < n->cat->tensors.len; i++)
        if (!n->name[i] && ckpt_has_prefix(n->cat->tensors.ptr[i].name, "ema.") && count++ == 0)
            first = i;
    if (count)
        ckpt_catalog_note(n->cat,
                          "left out: %zu tensors of an average of the weights ('%s' first); -o "
                          "part=ema shows it",
                          count, n->cat->tensors.ptr[first].name);
}

static int collect(struct ckpt_search *n, struct ckpt_err *err)
{
    if (ckpt_names_weights(n->cat, n->type, &n->cat->arena, &n->name, err) < 0)
        return -1;
    note_average(n);
    for (size_t i = 0; i < n->cat->tensors.len; i++)
        if (n->name[i] && is_unsaved(n, n->cat->tensors.ptr[i].name))
            n->name[i] = NULL;
    return 0;
}

/* Is the model made of several (its config of several configs)? */
static bool is_composite(const json_t *config)
{
    const char *key;
    const json_t *value;

    json_object_foreach((json_t *)config, key, value)
        if (ckpt_has_suffix(key, "_config") && json_object_get(value, "model_type"))
            return true;
    return ckpt_json_str(json_object_get(config, "decoder"), "model_type");
}

/* The embedding of a model of several parts, whose type no file lists, may be that of one part
 * only.
 */
static int check_dropped(const struct ckpt_search *n, const char *first, struct ckpt_err *err)
{
    if (n->fills && !n->allow_leftover)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "missing=base: '%s' is not below '%s', where the model is, so the base's "
                         "tensors might stand in for what was only renamed (allow_leftover leaves "
                         "such tensors out)",
                         first, n->prefix);
    if (n->follow || n->type != n->any || n->allow_leftover || !is_composite(n->config))
        return 0;
    return ckpt_fail(
        err, CKPT_UNSUPPORTED,
        "'%s' seems to be only a part of the model, which is of several: '%s' is not below it, and "
        "no list says where the embedding of model type '%s' is (base=DIR with the weights of the "
        "model tells; allow_leftover leaves such tensors out, view=raw shows all)",
        n->prefix, first, ckpt_json_str_or(n->config, "model_type", "?"));
}

/* Keep the tensors below the prefix, without it. */
static int strip(struct ckpt_search *n, struct ckpt_err *err)
{
    size_t len = strlen(n->prefix), dropped = 0, first = 0;

    for (size_t i = 0; i < n->cat->tensors.len; i++) {
        if (!n->name[i])
            continue;
        if (strncmp(n->name[i], n->prefix, len) == 0) {
            n->name[i] += len;
            continue;
        }
        n->name[i] = NULL;
        if (dropped++ == 0)
            first = i;
    }
    if (dropped)
        ckpt_catalog_warn(n->cat,
                          "left out: %zu tensors that are not below '%s', where the model is "
                          "('%s' first)",
                          dropped, n->prefix, n->cat->tensors.ptr[first].name);
    return dropped ? check_dropped(n, n->cat->tensors.ptr[first].name, err) : 0;
}

/* Leave out heads that a trainer put beside the model, but what the base has. */
static void drop_heads(const struct ckpt_search *n)
{
    size_t count = 0, first = 0;

    for (size_t i = 0; i < n->cat->tensors.len; i++) {
        if (!n->name[i] || !ckpt_heads_is_added(n->type, n->config, n->name[i]) ||
            (n->follow && ckpt_fit_model_has(n->follow, n->name[i])))
            continue;
        n->name[i] = NULL;
        if (count++ == 0)
            first = i;
    }
    ckpt_heads_warn(n->cat, count, n->cat->tensors.ptr[first].name);
}

/* Say that names are shown without the parts that wrappers add, but not which prefix a trainer has.
 */
static void note_wrappers(const struct ckpt_search *n)
{
    size_t count = 0, first = 0;

    for (size_t i = 0; i < n->cat->tensors.len; i++) {
        const char *stored = n->cat->tensors.ptr[i].name, *name = n->name[i];
        const bool ends = name && ckpt_has_suffix(stored, name);
        if (name && (!ends || ckpt_wrappers_in(stored, strlen(stored) - strlen(name))) &&
            count++ == 0)
            first = i;
    }
    if (count)
        ckpt_wrappers_note(n->cat, count, n->cat->tensors.ptr[first].name, n->name[first]);
}

/* Drop states of optimizers and the like, which no recipe uses, whatever the framework's names are.
 */
static int drop_state(const struct ckpt_search *n, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) const char **keep = ckpt_catalog_names(n->cat);

    if (!keep)
        return ckpt_nomem(err);
    for (size_t i = 0; i < n->cat->tensors.len; i++)
        keep[i] = n->name[i] ? keep[i] : NULL;
    return ckpt_catalog_select(n->cat, keep, err);
}

/* ---- against the base ---- */

/* Get the sizes of the embedding that a config states. */
static bool stated_sizes(const struct ckpt_search *n, const json_t *config, uint64_t dim[2])
{
    if (!ckpt_json_u64(config, "vocab_size", &dim[0]) ||
        !ckpt_json_u64(config, "hidden_size", &dim[1]))
        return false;
    for (size_t w = 0; w < n->type->widths.n; w++)
        (void)ckpt_json_u64(config, n->type->widths.text[w], &dim[1]);
    return true;
}

/* Check the embedding's shape against the config, which most state; in a few families it is
 * narrower than the layers, and a model of several parts may state that of its text model, or of
 * another part. What the base has in the same shape is right. */
static int check_config(const struct ckpt_search *n, struct ckpt_err *err)
{
    const size_t at = n->anchor ? ckpt_search_find(n, n->anchor) : SIZE_MAX;
    const struct ckpt_tensor *t = at == SIZE_MAX ? NULL : &n->cat->tensors.ptr[at];
    const struct ckpt_tensor *b =
        t && n->follow && n->follow->cat ? ckpt_catalog_find(n->follow->cat, n->anchor) : NULL;
    uint64_t dim[2], text[2];

    if (!t || t->rank != 2 || (b && ckpt_fit_shape(t, b)) || !stated_sizes(n, n->config, dim) ||
        memcmp(t->dim, dim, sizeof dim) == 0 ||
        (n->type->more_rows && t->dim[0] > dim[0] && t->dim[1] == dim[1]) ||
        (stated_sizes(n, json_object_get(n->config, "text_config"), text) &&
         memcmp(t->dim, text, sizeof text) == 0))
        return 0;
    if (t->dim[1] == dim[1])
        return ckpt_fail(err, CKPT_CONFLICT,
                         "'%s' has shape %s here, config.json says %s: if the vocabulary was "
                         "resized, -o vocab_size=%" PRIu64 " says so",
                         n->anchor, ckpt_shape_text(t->dim, t->rank).text,
                         ckpt_shape_text(dim, 2).text, t->dim[0]);
    return ckpt_fail(err, CKPT_CONFLICT, "'%s' has shape %s here, config.json says %s", n->anchor,
                     ckpt_shape_text(t->dim, t->rank).text, ckpt_shape_text(dim, 2).text);
}

int ckpt_names_find_model(struct ckpt_opening *o, bool *ret_found, struct ckpt_err *err)
{
    const struct ckpt_types *types = ckpt_recipes_types(o->shared->recipes);
    const json_t *config = ckpt_opening_model_config(o);
    ckpt_cleanup(ckpt_search_release) struct ckpt_search n = {
        .cat = o->cat,
        .recipes = o->shared->recipes,
        .base = o->shared->base,
        .config = config,
        .type = ckpt_types_find(types, ckpt_json_str(config, "model_type")),
        .any = ckpt_types_any(types),
        .allow_leftover = o->shared->opt->allow_leftover,
        .fills = o->shared->opt->missing == CKPT_LACKS_FROM_BASE,
    };

    *ret_found = false;
    if (collect(&n, err) < 0 || ckpt_search_prefix(&n, err) < 0)
        return -1;
    if (!n.prefix)
        return drop_state(&n, err);
    if (strip(&n, err) < 0)
        return -1;
    drop_heads(&n);
    note_wrappers(&n);
    if (ckpt_search_drop_tied(&n, err) < 0 || ckpt_search_drop_copies(&n, err) < 0 ||
        check_config(&n, err) < 0 || ckpt_catalog_select(o->cat, n.name, err) < 0)
        return -1;
    o->as_base = n.as_base;
    *ret_found = true;
    return 0;
}

/* ---- afterwards ---- */

int ckpt_names_check_fused(const struct ckpt_opening *o, struct ckpt_err *err)
{
    const char *model_type = ckpt_json_str(ckpt_opening_model_config(o), "model_type");
    const struct ckpt_type *type =
        ckpt_types_find(ckpt_recipes_types(o->shared->recipes), model_type);

    for (size_t i = 0; !type->fused_on_hub && i < o->cat->tensors.len; i++) {
        const char *name = o->cat->tensors.ptr[i].name;
        if (ckpt_experts_is_fused(type, name))
            return ckpt_fail(
                err, CKPT_UNSUPPORTED,
                "'%s' holds fused experts, which a hub model has one by one: no "
                "recipe splits them for model type '%s' (%sview=raw shows the tensors)",
                name, model_type ? model_type : "?", model_type ? "" : "base=DIR may tell; ");
    }
    return 0;
}

/* Convert, if a recipe fits. */
static int convert(struct ckpt_catalog *cat, const struct ckpt_recipes *recipes,
                   const struct ckpt_recipe_options *opt, struct ckpt_model **ret,
                   struct ckpt_err *err)
{
    bool fits;

    if (ckpt_recipe_fits(recipes, cat, opt, &fits, err) < 0)
        return -1;
    return fits ? ckpt_recipe_apply(recipes, cat, opt, ret, err) : 0;
}

/* Is it a model without a head: by its class, and without the names of one with a head? */
static bool is_bare(const struct ckpt_catalog *cat, const struct ckpt_type *type,
                    const json_t *config)
{
    return ckpt_bare_anchor(type, config) && type->embedding.n &&
           !ckpt_catalog_find(cat, type->embedding.text[0]);
}

/* Convert a model without a head, as if it had one. Where the hub's names of the model with a head
 * have no first word in common, they are the same without a head: then the word is only in memory.
 */
static int convert_bare(struct ckpt_catalog *cat, const struct ckpt_recipes *recipes,
                        const struct ckpt_recipe_options *opt, const struct ckpt_type *type,
                        struct ckpt_model **ret, struct ckpt_err *err)
{
    const char *anchor = ckpt_bare_anchor(type, opt->base_config);

    if (ckpt_bare_set_word(cat, type, true, err) < 0 || convert(cat, recipes, opt, ret, err) < 0 ||
        (*ret && ckpt_bare_set_word((*ret)->catalog, type, false, err) < 0) ||
        ckpt_bare_set_word(cat, type, false, err) < 0)
        return -1;
    if (!*ret || !opt->back || ckpt_catalog_find((*ret)->catalog, anchor))
        return 0;
    ckpt_model_freep(ret);
    return convert(cat, recipes, opt, ret, err) < 0 ||
                   (*ret && ckpt_bare_set_word((*ret)->catalog, type, false, err) < 0)
               ? -1
               : 0;
}

int ckpt_names_convert(struct ckpt_catalog **cat, const struct ckpt_recipes *recipes,
                       const struct ckpt_recipe_options *opt, bool *ret_done, char **ret_recipe,
                       struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_model_freep) struct ckpt_model *model = NULL;
    const struct ckpt_type *type =
        ckpt_types_find(ckpt_recipes_types(recipes), ckpt_json_str(opt->base_config, "model_type"));

    *ret_done = false;
    if (!opt->base_config || !ckpt_settings_type(opt)) /* recipes are of types */
        return 0;
    if ((is_bare(*cat, type, opt->base_config) ? convert_bare(*cat, recipes, opt, type, &model, err)
                                               : convert(*cat, recipes, opt, &model, err)) < 0)
        return -1;
    if (!model)
        return 0;
    *ret_done = true;
    json_decref(model->catalog->config);
    model->catalog->config = ckpt_steal(&(*cat)->config);
    ckpt_catalog_free(*cat);
    *cat = ckpt_steal(&model->catalog);
    if (ret_recipe)
        *ret_recipe = ckpt_steal(&model->recipe);
    return 0;
}
