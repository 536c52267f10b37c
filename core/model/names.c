/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the prefix of the model's names, and checking the result. */
#include "model/names.h"

#include <stdlib.h>
#include <string.h>

#include "base/map.h"
#include "base/mem.h"
#include "base/str.h"
#include "model/experts.h"
#include "model/wrappers.h"
#include "recipe/apply/apply.h"
#include "recipe/language/field.h"
#include "tensor/read.h"

enum { MOST_NAMED = 3 };

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

/* ---- models without a head, as transformers' AutoModel makes them ---- */

/* Their tensors have the names of the model with a head, without its first word ("layers.0" for
 * "model.layers.0"). */

/* The model's class by its config; "": that does not say it. */
static const char *class_of(const json_t *config)
{
    const char *name = ckpt_config_class(config);

    return name ? name : "";
}

/* Is the class that the config names (NULL: none) one without a head? The classes have the names
 * XModel; with a head also XHeadModel and XHeadsModel. */
static bool is_bare(const json_t *config)
{
    const char *name = class_of(config);

    return ckpt_has_suffix(name, "Model") && !ckpt_has_suffix(name, "HeadModel") &&
           !ckpt_has_suffix(name, "HeadsModel");
}

/* The tensor by which a model without a head is recognised. NULL: the config's class has a head, or
 * it is not known how transformers saves this type without one. */
static const char *bare_anchor(const struct ckpt_type *type, const json_t *config)
{
    const char *model_type = ckpt_json_str(config, "model_type"), *class = class_of(config);

    if (!model_type || !is_bare(config) || ckpt_texts_have(&type->headed, class, strlen(class)))
        return NULL;
    for (size_t i = 0; i < type->bare.n; i++)
        if (strcmp(type->bare.pair[i].from, model_type) == 0)
            return type->bare.pair[i].to;
    return NULL;
}

/* The length of the first word, with its dot, that the model with a head puts before all names but
 * the head's. 0: it has none. */
static size_t word_len(const struct ckpt_type *type)
{
    const char *name = type->embedding.n ? type->embedding.text[0] : "";
    const char *dot = strchr(name, '.');

    return dot && strchr(dot + 1, '.') ? (size_t)(dot + 1 - name) : 0;
}

/* The name of a tensor of the model with a head, as it is without one: a part of `name`. */
static const char *bare_name(const struct ckpt_type *type, const char *name)
{
    const size_t len = word_len(type);

    return len && strncmp(name, type->embedding.text[0], len) == 0 ? name + len : name;
}

/* Give all tensors the names of the model with a head (or without), as recipes have them. */
static int set_word(struct ckpt_catalog *cat, const struct ckpt_type *type, bool with,
                    struct ckpt_err *err)
{
    const int len = (int)word_len(type);
    ckpt_cleanup(ckpt_freep) const char **name = ckpt_catalog_names(cat);

    if (!name)
        return ckpt_nomem(err);
    for (size_t i = 0; len && i < cat->tensors.len; i++)
        if (!(name[i] = with ? ckpt_field_text(&cat->arena, err, "%.*s%s", len,
                                               type->embedding.text[0], name[i])
                             : bare_name(type, name[i])))
            return -1;
    return ckpt_catalog_select(cat, name, err);
}

/* UNSUPPORTED: a model without a head, of an unknown type, in which a key of the saved dict (which
 * the reader knows) would become the first word of the model's names below `prefix`. */
static int check_bare(const struct ckpt_catalog *cat, const json_t *config, const char *prefix,
                      struct ckpt_err *err)
{
    const json_t *roots = json_object_get(cat->about, "roots"), *root;
    const char *model_type = ckpt_json_str(config, "model_type");
    size_t i;

    if (!is_bare(config))
        return 0;
    json_array_foreach(roots, i, root) {
        const char *key = json_string_value(root);
        for (size_t k = 0; k < cat->tensors.len; k++) {
            const char *name = cat->tensors.ptr[k].name;
            if (strncmp(name, prefix, strlen(prefix)) == 0 && strlen(prefix) <= strlen(key) &&
                ckpt_has_prefix(name, key) && name[strlen(key)] == '.')
                return ckpt_fail(err, CKPT_UNSUPPORTED,
                                 "config.json describes a '%s', a model without a head, and how "
                                 "transformers saves that of model type '%s' is not known ('%s' "
                                 "is a key of the saved dict, not a part of the names; view=raw "
                                 "shows the tensors)",
                                 class_of(config), model_type ? model_type : "?", key);
        }
    }
    return 0;
}

/* ---- the prefix ---- */

struct naming {
    struct ckpt_catalog *cat;
    const struct ckpt_base *base;
    const json_t *config;
    const struct ckpt_type *type;
    const struct ckpt_type *any; /* the facts about a type that no file lists */
    const char *bare; /* the tensor that shows a model without a head; NULL: it may have one */
    bool allow_leftover;
    bool fills;        /* tensors of the base stand in for missing ones */
    const char **name; /* name without wrappers; NULL: the tensor is not the model's */
    char *prefix;
    const char *anchor; /* the embedding; NULL: the base's names alone tell where the model is */
};

static void naming_release(struct naming *n)
{
    free(n->name);
    free(n->prefix);
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
static bool is_unsaved(const struct naming *n, const char *name)
{
    for (size_t i = 0; i < n->type->unsaved.n; i++) {
        const struct ckpt_text_pair *pair = &n->type->unsaved.pair[i];
        if (!ckpt_has_suffix(name, pair->to))
            continue;
        const char *class = class_of(n->config);
        if (!*class || strcmp(class, pair->from) == 0)
            return true;
    }
    return false;
}

static int collect(struct naming *n, struct ckpt_err *err)
{
    if (ckpt_names_weights(n->cat, n->type, &n->cat->arena, &n->name, err) < 0)
        return -1;
    for (size_t i = 0; i < n->cat->tensors.len; i++)
        if (n->name[i] && is_unsaved(n, n->cat->tensors.ptr[i].name))
            n->name[i] = NULL;
    return 0;
}

/* Does the name end with that of the type's embedding? */
static bool has_anchor(const struct naming *n, const char *name)
{
    for (size_t i = 0; i < n->type->embedding.n; i++)
        if (ckpt_name_before(name, n->type->embedding.text[i]) != SIZE_MAX)
            return true;
    return n->bare && ckpt_name_before(name, n->bare) != SIZE_MAX;
}

/* Remove the parts `module` inside names, if only then the type's embedding is there: a wrapper
 * around a part of the model adds them. */
static int drop_modules(struct naming *n, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) const char **name = ckpt_catalog_names(n->cat);
    size_t known = 0, then = 0;

    if (!name)
        return ckpt_nomem(err);
    for (size_t i = 0; i < n->cat->tensors.len; i++) {
        name[i] = n->name[i] ? ckpt_wrappers_strip_all(&n->cat->arena, n->name[i]) : NULL;
        if (n->name[i] && !name[i])
            return ckpt_nomem(err);
        known += n->name[i] && has_anchor(n, n->name[i]);
        then += name[i] && has_anchor(n, name[i]);
    }
    if (known == 0 && then)
        memcpy(n->name, name, n->cat->tensors.len * sizeof *name);
    return 0;
}

/* Take what precedes `anchor` in a name as the prefix. CONFLICT: there are two different ones. */
static int try_anchor(struct naming *n, const char *anchor, struct ckpt_err *err)
{
    for (size_t i = 0; i < n->cat->tensors.len; i++) {
        size_t len = n->name[i] ? ckpt_name_before(n->name[i], anchor) : SIZE_MAX;
        if (len == SIZE_MAX)
            continue;
        if (n->prefix && (strlen(n->prefix) != len || memcmp(n->prefix, n->name[i], len) != 0))
            return ckpt_fail(err, CKPT_CONFLICT,
                             "two models: '%s' is there below '%s' and below '%.*s'", anchor,
                             n->prefix, (int)len, n->name[i]);
        if (!n->prefix && !(n->prefix = strndup(n->name[i], len)))
            return ckpt_nomem(err);
        n->anchor = anchor;
    }
    return 0;
}

/* Does the name look like that of a token embedding (and not a position embedding)? */
static bool is_embedding(const char *name)
{
    return ckpt_has_suffix(name, ".weight") && strstr(name, "embed") && !strstr(name, "position");
}

static int try_words(struct naming *n, const struct ckpt_texts *anchors, struct ckpt_err *err)
{
    for (size_t i = 0; !n->prefix && i < anchors->n; i++)
        if (try_anchor(n, anchors->text[i], err) < 0)
            return -1;
    return 0;
}

/* So many of the base's names, and more, are below a prefix if the model is there; the checks of
 * names say later which are not. */
static size_t enough_names(const struct ckpt_catalog *base) { return base->tensors.len / 2 + 1; }

/* Are enough of the base's names below the first len bytes of `name`? */
static int has_base(const struct ckpt_catalog *base, const struct ckpt_map *ours, const char *name,
                    size_t len, bool *ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str whole = {0};
    size_t found = 0;
    uint32_t at;

    for (size_t i = 0; i < base->tensors.len; i++) {
        ckpt_str_clear(&whole);
        ckpt_str_printf(&whole, "%.*s%s", (int)len, name, base->tensors.ptr[i].name);
        if (whole.failed)
            return ckpt_nomem(err);
        found += ckpt_map_get(ours, ckpt_str_get(&whole), whole.len, &at);
    }
    *ret = found >= enough_names(base);
    return 0;
}

/* Find the prefix below which enough of the base's names are, where the base's tensor `anchor` is.
 * CONFLICT: there are two different ones. Each place that is tried is one less in *tries. */
static int try_name(struct naming *n, const struct ckpt_catalog *base, const struct ckpt_map *ours,
                    const char *anchor, unsigned *tries, struct ckpt_err *err)
{
    for (size_t i = 0; i < n->cat->tensors.len && *tries; i++) {
        const char *name = n->name[i];
        const size_t len = name ? ckpt_name_before(name, anchor) : SIZE_MAX;
        bool found = false;
        if (len == SIZE_MAX)
            continue;
        --*tries;
        if (has_base(base, ours, name, len, &found, err) < 0)
            return -1;
        if (found && n->prefix)
            return ckpt_fail(err, CKPT_CONFLICT,
                             "two models: '%s' is there below '%s' and below '%.*s'", anchor,
                             n->prefix, (int)len, name);
        if (found && !(n->prefix = strndup(name, len)))
            return ckpt_nomem(err);
    }
    return 0;
}

/* Find the prefix by all names of the base, for a model without a token embedding (of speech,
 * images and so on), whose type no file lists. */
static int try_base(struct naming *n, const struct ckpt_catalog *base, struct ckpt_err *err)
{
    /* At most MOST_NAMES names of the base are tried, as the first may be one that is not there,
     * and at most MOST_TRIES places, each of which costs as much as the base has names. */
    enum { MOST_NAMES = 16, MOST_TRIES = 64 };
    ckpt_cleanup(ckpt_map_release) struct ckpt_map ours = {0};
    unsigned tries = MOST_TRIES;

    for (size_t i = 0; i < n->cat->tensors.len; i++)
        if (n->name[i] && ckpt_map_add(&ours, n->name[i], (uint32_t)i) == CKPT_NONE)
            return ckpt_nomem(err);
    for (size_t b = 0; b < base->tensors.len && b < MOST_NAMES && !n->prefix; b++)
        if (try_name(n, base, &ours, base->tensors.ptr[b].name, &tries, err) < 0)
            return -1;
    return 0;
}

/* Find the prefix by the name of an embedding: the base's, else the type's, else that of any type;
 * else by all names of the base. */
static int find_prefix(struct naming *n, struct ckpt_err *err)
{
    const struct ckpt_catalog *model = n->base ? n->base->cat : NULL;

    if (n->bare)
        return try_anchor(n, n->bare, err);
    for (size_t i = 0; !n->prefix && model && i < model->tensors.len; i++)
        if (is_embedding(model->tensors.ptr[i].name) &&
            try_anchor(n, model->tensors.ptr[i].name, err) < 0)
            return -1;
    if (try_words(n, &n->type->embedding, err) < 0 || try_words(n, &n->any->embedding, err) < 0)
        return -1;
    if (!n->prefix && n->type->last_norm && n->type->embedding.n &&
        ckpt_json_bool(n->config, "tie_word_embeddings", false)) {
        if (try_anchor(n, n->type->last_norm, err) < 0)
            return -1;
        n->anchor = n->type->embedding.text[0];
    }
    if (!n->prefix && model)
        return try_base(n, model, err);
    return n->prefix ? check_bare(n->cat, n->config, n->prefix, err) : 0;
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
static int check_dropped(const struct naming *n, const char *first, struct ckpt_err *err)
{
    if (n->fills && !n->allow_leftover)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "missing=base: '%s' is not below '%s', where the model is, so the base's "
                         "tensors might stand in for what was only renamed (allow_leftover leaves "
                         "such tensors out)",
                         first, n->prefix);
    if (n->type != n->any || n->allow_leftover || !is_composite(n->config))
        return 0;
    return ckpt_fail(
        err, CKPT_UNSUPPORTED,
        "the model type '%s' is not known, and '%s' seems to be only a part of the "
        "model: '%s' is not below it (allow_leftover leaves such tensors out, view=raw "
        "shows all)",
        ckpt_json_str(n->config, "model_type"), n->prefix, first);
}

/* Keep the tensors below the prefix, without it. */
static int strip(struct naming *n, struct ckpt_err *err)
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

/* Say that names are shown without the parts that wrappers add, but not which prefix a trainer has.
 */
static void note_wrappers(const struct naming *n)
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
static int drop_state(const struct naming *n, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) const char **keep = ckpt_catalog_names(n->cat);

    if (!keep)
        return ckpt_nomem(err);
    for (size_t i = 0; i < n->cat->tensors.len; i++)
        keep[i] = n->name[i] ? keep[i] : NULL;
    return ckpt_catalog_select(n->cat, keep, err);
}

static size_t find(const struct naming *n, const char *name)
{
    for (size_t i = 0; i < n->cat->tensors.len; i++)
        if (n->name[i] && strcmp(n->name[i], name) == 0)
            return i;
    return SIZE_MAX;
}

/* The tensor that a type's fact names. */
static size_t find_known(const struct naming *n, const char *name)
{
    return find(n, n->bare ? bare_name(n->type, name) : name);
}

static int same_values(const struct naming *n, size_t a, size_t b, bool *ret, struct ckpt_err *err)
{
    const struct ckpt_tensor *t = n->cat->tensors.ptr;

    return ckpt_tensor_same(&t[a], &t[b], ret, err);
}

/* Check that a tied tensor, which is left out, has the same values as the one that it is tied to.
 */
static int check_copy(const struct naming *n, size_t copy, size_t of, struct ckpt_err *err)
{
    bool same;

    if (same_values(n, copy, of, &same, err) < 0)
        return -1;
    return same ? 0 : ckpt_copy_differs(n->cat, n->name[copy], n->name[of], n->allow_leftover, err);
}

/* Is the tensor `copy` one of the tied tensor `of`? If the config says so, other values are a
 * CONFLICT. */
static int is_copy(const struct naming *n, size_t copy, size_t of, bool said, bool *ret,
                   struct ckpt_err *err)
{
    *ret = said;
    if (of == SIZE_MAX)
        return 0;
    return said ? check_copy(n, copy, of, err) : same_values(n, copy, of, ret, err);
}

/* Drop the copy, or give it the embedding's name if that is not there. */
static int drop_copy(struct naming *n, size_t copy, size_t of, struct ckpt_err *err)
{
    n->name[copy] = of == SIZE_MAX ? ckpt_arena_strdup(&n->cat->arena, n->anchor) : NULL;
    return of == SIZE_MAX && !n->name[copy] ? ckpt_nomem(err) : 0;
}

bool ckpt_names_tie(const struct ckpt_type *type, const json_t *config)
{
    const json_t *text = json_object_get(config, "text_config");

    return ckpt_json_bool(config, "tie_word_embeddings",
                          ckpt_json_bool(text, "tie_word_embeddings", type->tied));
}

/* Drop tied tensors. transformers writes them once, under the name of the input embedding; a state
 * dict without duplicates may have the output embedding's name instead. A model of several parts
 * may leave it to the text model's config, which does not tell whether the class heeds it, and a
 * few types tie without saying so: then the values decide. */
static int drop_tied(struct naming *n, struct ckpt_err *err)
{
    const bool said = json_is_boolean(json_object_get(n->config, "tie_word_embeddings"));

    if (!ckpt_names_tie(n->type, n->config))
        return 0;
    for (size_t i = 0; i < n->type->ties.n; i++) {
        const struct ckpt_text_pair *tie = &n->type->ties.pair[i];
        const size_t copy = find_known(n, tie->from),
                     of = tie->to ? find_known(n, tie->to) : find(n, n->anchor);
        bool same;
        if (copy == SIZE_MAX || copy == of || (of == SIZE_MAX && tie->to))
            continue;
        if (is_copy(n, copy, of, said, &same, err) < 0 || (same && drop_copy(n, copy, of, err) < 0))
            return -1;
    }
    return 0;
}

/* ---- against the base ---- */

/* Check the embedding's shape against the config, which always states it; in a few families it is
 * narrower than the layers. */
static int check_config(const struct naming *n, struct ckpt_err *err)
{
    const size_t at = find(n, n->anchor);
    const struct ckpt_tensor *t = at == SIZE_MAX ? NULL : &n->cat->tensors.ptr[at];
    uint64_t dim[2];

    if (!t || !ckpt_json_u64(n->config, "vocab_size", &dim[0]) ||
        !ckpt_json_u64(n->config, "hidden_size", &dim[1]) || t->rank != 2)
        return 0;
    for (size_t i = 0; i < n->type->widths.n; i++)
        (void)ckpt_json_u64(n->config, n->type->widths.text[i], &dim[1]);
    if (memcmp(t->dim, dim, sizeof dim) == 0)
        return 0;
    return ckpt_fail(err, CKPT_CONFLICT, "'%s' has shape %s here, config.json says %s", n->anchor,
                     ckpt_shape_text(t->dim, t->rank).text, ckpt_shape_text(dim, 2).text);
}

int ckpt_names_find_model(struct ckpt_opening *o, bool *ret_found, struct ckpt_err *err)
{
    const struct ckpt_types *types = ckpt_recipes_types(o->shared->recipes);
    const json_t *config = ckpt_opening_model_config(o);
    ckpt_cleanup(naming_release) struct naming n = {
        .cat = o->cat,
        .base = o->shared->base,
        .config = config,
        .type = ckpt_types_find(types, ckpt_json_str(config, "model_type")),
        .any = ckpt_types_any(types),
        .allow_leftover = o->shared->opt->allow_leftover,
        .fills = o->shared->opt->missing == CKPT_LACKS_FROM_BASE,
    };

    *ret_found = false;
    n.bare = bare_anchor(n.type, config);
    if (collect(&n, err) < 0 || drop_modules(&n, err) < 0 || find_prefix(&n, err) < 0)
        return -1;
    if (!n.prefix)
        return drop_state(&n, err);
    if (strip(&n, err) < 0)
        return -1;
    note_wrappers(&n);
    if ((n.anchor && (drop_tied(&n, err) < 0 || check_config(&n, err) < 0)) ||
        ckpt_catalog_select(o->cat, n.name, err) < 0)
        return -1;
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

/* Convert a model without a head, as if it had one. Where the hub's names of the model with a head
 * have no first word in common, they are the same without a head: then the word is only in memory.
 */
static int convert_bare(struct ckpt_catalog *cat, const struct ckpt_recipes *recipes,
                        const struct ckpt_recipe_options *opt, const struct ckpt_type *type,
                        struct ckpt_model **ret, struct ckpt_err *err)
{
    const char *anchor = bare_anchor(type, opt->base_config);

    if (set_word(cat, type, true, err) < 0 || convert(cat, recipes, opt, ret, err) < 0 ||
        (*ret && set_word((*ret)->catalog, type, false, err) < 0) ||
        set_word(cat, type, false, err) < 0)
        return -1;
    if (!*ret || !opt->back || ckpt_catalog_find((*ret)->catalog, anchor))
        return 0;
    ckpt_model_freep(ret);
    return convert(cat, recipes, opt, ret, err) < 0 ||
                   (*ret && set_word((*ret)->catalog, type, false, err) < 0)
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
    if (!opt->base_config)
        return 0;
    if ((bare_anchor(type, opt->base_config) ? convert_bare(*cat, recipes, opt, type, &model, err)
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
