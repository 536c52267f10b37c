/* SPDX-License-Identifier: Apache-2.0 */
/* Comparing a model's tensors with those that its config.json describes: are all of them there, and
 * have they the shapes that it gives them? */
#include <string.h>

#include "base/str.h"
#include "model/dequantize.h"
#include "model/opening.h"
#include "recipe/library/recipes.h"

enum { MOST_SHOWN = 3 };

/* ---- tensors without elements ---- */

/* Does a key of config.json count or measure something, so that 0 means that the model has none? */
static bool is_size(const char *key)
{
    static const char *const begins[] = {"num_", "n_"}, *const ends[] = {"_size",   "_dim",
                                                                         "_rank",   "_heads",
                                                                         "_layers", "_width",
                                                                         "_experts"};

    for (size_t i = 0; i < sizeof begins / sizeof *begins; i++)
        if (ckpt_has_prefix(key, begins[i]))
            return true;
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (ckpt_has_suffix(key, ends[i]))
            return true;
    return false;
}

static bool says_zero(const json_t *config)
{
    const char *key;
    json_t *v;

    json_object_foreach((json_t *)config, key, v)
        if ((json_is_integer(v) && json_integer_value(v) == 0 && is_size(key)) ||
            (json_is_object(v) && says_zero(v)))
            return true;
    return false;
}

/* Is it a parameter without elements, as a save that has only a part of each tensor leaves in the
 * place of the values? */
static bool is_empty(const struct ckpt_opening *o, const struct ckpt_tensor *t)
{
    const struct ckpt_type *type = ckpt_opening_type(o);

    return t->numel == 0 && ckpt_dtype_is_castable(t->dtype) &&
           !ckpt_texts_end(&type->buffers, t->name) && !ckpt_texts_end(&type->computed, t->name) &&
           !ckpt_texts_end(&type->absent, t->name);
}

/* Has the base the tensor without elements, too? Then a config says so in its own way. */
static bool is_empty_in_base(const struct ckpt_opening *o, const char *name)
{
    const struct ckpt_base *base = o->shared->base;
    const struct ckpt_tensor *t =
        base && base->cat
            ? ckpt_catalog_find(base->cat, ckpt_json_str_or(o->base_names, name, name))
            : NULL;

    return t && t->numel == 0;
}

static int check_empty(const struct ckpt_opening *o, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str text = {0};
    size_t n = 0;

    for (size_t i = 0; i < o->cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &o->cat->tensors.ptr[i];
        if (!is_empty(o, t) || is_empty_in_base(o, t->name) || n++ >= MOST_SHOWN)
            continue;
        ckpt_str_puts(&text, n > 1 ? ", " : "");
        if (ckpt_lacks_put_tensor(&text, t, err) < 0)
            return -1;
    }
    if (n == 0 || (o->config && says_zero(o->config)))
        return 0;
    if (!o->config) { /* whether these are parameters of a model is not known */
        ckpt_catalog_warn(o->cat, "%zu tensor%s no elements: %s%s", n, n == 1 ? " has" : "s have",
                          ckpt_str_get(&text), n > MOST_SHOWN ? ", ..." : "");
        return 0;
    }
    return ckpt_fail(err, CKPT_CONFLICT,
                     "'%s': %zu parameter%s of the model %s no elements: %s%s; a save of a sharded "
                     "model leaves such placeholders: the values are in the trainer's own "
                     "checkpoint, if it wrote one (view=raw shows the tensors as they are)",
                     ckpt_dir_path(o->dir), n, n == 1 ? "" : "s", n == 1 ? "has" : "have",
                     ckpt_str_get(&text), n > MOST_SHOWN ? ", ..." : "");
}

/* ---- shapes and names that are listed ---- */

/* A class that is none of transformers' may have other shapes under the names of a known type. */
static int tell_shapes(struct ckpt_opening *o, const struct ckpt_lacks *lacks, struct ckpt_err *err)
{
    const char *dir = ckpt_dir_path(o->dir), *names = ckpt_str_get(&lacks->shapes),
               *class = ckpt_config_class(o->config);
    const bool one = lacks->nshape == 1;

    if (lacks->nshape == 0)
        return 0;
    if (lacks->own_class || json_object_get(o->config, "auto_map")) {
        ckpt_catalog_warn(o->cat,
                          "%zu tensor%s of another shape than config.json gives %s, if the code "
                          "of the class '%s' does not say otherwise: %s",
                          lacks->nshape, one ? " is" : "s are", one ? "it" : "them",
                          class ? class : "?", names);
        return 0;
    }
    return ckpt_fail(err, CKPT_CONFLICT,
                     "'%s': %zu tensor%s of another shape than config.json gives %s: %s; is "
                     "config.json another model's, or are these parts or placeholders of a sharded "
                     "save? (view=raw shows the tensors as they are)",
                     dir, lacks->nshape, one ? " is" : "s are", one ? "it" : "them", names);
}

static int tell_lacks(struct ckpt_opening *o, const struct ckpt_lacks *lacks, struct ckpt_err *err)
{
    if (lacks->n && !o->shared->opt->allow_partial)
        return ckpt_fail(
            err, CKPT_MISSING,
            "'%s' lacks %zu tensor%s of the model that config.json describes: %s; is "
            "a file missing? (-o allow_partial shows it without them, missing=base takes "
            "them from base=)",
            ckpt_dir_path(o->dir), lacks->n, lacks->n == 1 ? "" : "s", ckpt_str_get(&lacks->names));
    if (lacks->n)
        ckpt_catalog_warn(o->cat, "tensors of the model are left out (%zu): %s", lacks->n,
                          ckpt_str_get(&lacks->names));
    return 0;
}

/* Does a name have this word between dots or, unless it is to be the whole of it, a longer one that
 * begins so? */
static bool has_word(const char *name, const char *word, size_t len, bool whole)
{
    for (const char *at = name; at; at = strchr(at, '.')) {
        at += *at == '.';
        if (strncmp(at, word, len) == 0 && (!whole || at[len] == '.' || at[len] == '\0'))
            return true;
    }
    return false;
}

/* Is the tensor of a part of which the config says that the model has several? Some classes of the
 * type have one of them alone: CLIPForImageClassification only what vision_config describes, and
 * WhisperForAudioClassification only the encoder. */
static bool is_of_part(const json_t *config, const char *name)
{
    static const char end[] = "_config", encoder[] = "encoder", decoder[] = "decoder";
    const char *key;
    json_t *v;

    json_object_foreach((json_t *)config, key, v)
        if (json_is_object(v) && ckpt_has_suffix(key, end) &&
            has_word(name, key, strlen(key) - strlen(end), false))
            return true;
    return ckpt_json_bool(config, "is_encoder_decoder", false) &&
           (has_word(name, encoder, strlen(encoder), false) ||
            has_word(name, decoder, strlen(decoder), false));
}

/* The tensor that shows a model of this type without a head, if it is a weight in a module: one of
 * a bare parameter may be left out by a config. NULL: it is not known. */
static const char *anchor_of(const struct ckpt_type *type, const char *model_type)
{
    for (size_t i = 0; model_type && i < type->bare.n; i++)
        if (strcmp(type->bare.pair[i].from, model_type) == 0)
            return ckpt_has_suffix(type->bare.pair[i].to, ".weight") ? type->bare.pair[i].to : NULL;
    return NULL;
}

/* Finds out whether the hub's names of this type are other ones than those of its modules, by the
 * recipes for models in memory. */
static int is_renamed(const struct ckpt_opening *o, const struct ckpt_type *type,
                      const char *model_type, bool *ret, struct ckpt_err *err)
{
    const struct ckpt_recipe_folder *folder;

    *ret = type->renames.n > 0;
    if (ckpt_recipes_of(o->shared->recipes, "transformers", &folder, err) < 0)
        return -1;
    for (size_t i = 0; i < folder->recipes.len; i++) {
        const struct ckpt_family *f = folder->recipes.ptr[i]->family;
        *ret |= f && ckpt_texts_have(&f->types, model_type, strlen(model_type));
    }
    return 0;
}

/* Finds out, for a type without a list, whether none of the names that every model of the type has
 * is among the tensors. What is known of it is the first module of its base model. */
static int has_none(const struct ckpt_opening *o, bool *ret, struct ckpt_err *err)
{
    const struct ckpt_type *type = ckpt_opening_type(o);
    const char *model_type = ckpt_json_str(o->config, "model_type"),
               *anchor = anchor_of(type, model_type);
    bool renamed;

    *ret = false;
    for (size_t i = 0; anchor && i < o->cat->tensors.len; i++) {
        const char *name = o->cat->tensors.ptr[i].name;
        if (has_word(name, anchor, strcspn(anchor, "."), true) ||
            ckpt_texts_end(&type->output, name) || ckpt_texts_end(&type->embedding, name) ||
            is_of_part(o->config, name))
            return 0;
    }
    if (anchor && is_renamed(o, type, model_type, &renamed, err) < 0)
        return -1;
    *ret = anchor && !renamed;
    return 0;
}

static int tell_none(struct ckpt_opening *o, struct ckpt_err *err)
{
    const char *type = ckpt_json_str(o->config, "model_type"), *dir = ckpt_dir_path(o->dir),
               *first = o->cat->tensors.ptr[0].name;

    if (!o->shared->opt->allow_partial)
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s' has none of the tensors of the model that config.json describes "
                         "(model_type '%s'); its first is '%s': is config.json another model's, or "
                         "have the names a prefix? (view=raw shows the tensors as they are)",
                         dir, type ? type : "?", first);
    ckpt_catalog_warn(o->cat,
                      "none of the tensors is one of the model that config.json describes "
                      "(model_type '%s'): the first is '%s'",
                      type ? type : "?", first);
    return 0;
}

/* ---- all of it ---- */

static int compare(struct ckpt_opening *o, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_lacks_release) struct ckpt_lacks lacks = {.quantized =
                                                                    ckpt_is_quantized(o->cat)};

    if (!o->config)
        lacks.unchecked = "there is no config.json";
    else if (ckpt_recipe_lacks(o->shared->recipes, o->cat, o->config, &lacks, err) < 0)
        return -1;
    /* where names were compared with a base's, they fit */
    const bool compared = o->decision.check && o->shared->base &&
                          ckpt_base_name_at(o->shared->base->cat, o->shared->base->weight_map, 0);
    bool none = lacks.none;
    if (!none && o->config && !lacks.listed && has_none(o, &none, err) < 0)
        return -1;
    if (!compared && none)
        return tell_none(o, err);
    if (!o->facts.is_hub_dir && o->decision.way == CKPT_WAY_HUB)
        return 0; /* NeMo Automodel's names may be mixed */
    if (lacks.unchecked && !(compared && o->as_base) &&
        json_object_set_new(o->cat->about, "completeness_not_checked",
                            json_string(lacks.unchecked)) < 0)
        return ckpt_nomem(err);
    return tell_shapes(o, &lacks, err) < 0 ? -1 : tell_lacks(o, &lacks, err);
}

int ckpt_opening_check_config(struct ckpt_opening *o, struct ckpt_err *err)
{
    const bool memory = ckpt_options_memory(o->shared->opt);

    if (o->facts.is_adapter)
        return 0;
    if (o->facts.is_hub_dir && o->config && o->cat->tensors.len == 0)
        return ckpt_fail(
            err, CKPT_MISSING,
            "the weight files of '%s' have no tensors, though config.json describes a "
            "model: a save of a sharded model that did not gather it leaves such files",
            ckpt_dir_path(o->dir));
    /* names in memory are not those of the lists */
    if (o->cat->tensors.len && !(memory && o->decision.way == CKPT_WAY_MEMORY) &&
        compare(o, err) < 0)
        return -1;
    return check_empty(o, err);
}
