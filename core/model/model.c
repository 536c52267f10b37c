/* SPDX-License-Identifier: Apache-2.0 */
/* Making the model of a view from a reader's catalogue: names, values, dtypes, config. */
#include "model/opening.h"

#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "model/dequantize.h"
#include "model/names.h"
#include "tensor/value.h"

/* Set the view's config to this one (not NULL), with the options' overrides. */
static int take_config(struct ckpt_opening *o, const json_t *config, struct ckpt_err *err)
{
    const char *key;
    json_t *value;

    if (!(o->config = json_deep_copy(config)))
        return ckpt_nomem(err);
    json_object_foreach(o->shared->opt->overrides, key, value) {
        if (key[0] != '_' && json_object_set_new(o->config, key, json_deep_copy(value)) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

/* The config of a model under the hub's names: its own, else the base's. */
static int config_of_hub(struct ckpt_opening *o, struct ckpt_err *err)
{
    const json_t *config = o->cat->config;
    const char *key = ckpt_options_override(o->shared->opt);

    if (!config && !o->facts.is_adapter)
        config = ckpt_opening_base_config(o);
    if (config)
        return take_config(o, config, err);
    return key ? ckpt_fail(err, CKPT_USAGE,
                           "option %s: '%s' has no config.json that it could change", key,
                           ckpt_dir_path(o->dir))
               : 0;
}

/* Rename the base's names, which are the catalogue's or, without a catalogue, those in its index.
 */
static int rename_base(struct ckpt_opening *o, const struct ckpt_renames *renames,
                       const struct ckpt_catalog *cat, struct ckpt_err *err)
{
    const struct ckpt_weight_map *map = cat ? NULL : o->shared->base->weight_map;

    if (!(o->base_names = json_object()))
        return ckpt_nomem(err);
    for (size_t i = 0; cat && i < cat->tensors.len; i++)
        if (ckpt_renames_note(renames, cat->tensors.ptr[i].name, o->base_names, err) < 0)
            return -1;
    for (size_t i = 0; map && i < map->tensors.len; i++)
        if (ckpt_renames_note(renames, map->tensors.ptr[i].tensor, o->base_names, err) < 0)
            return -1;
    return 0;
}

/* Match names: a run saves the names in memory, while the base may have the hub's. */
static int match_names(struct ckpt_opening *o, const struct ckpt_catalog *base,
                       struct ckpt_err *err)
{
    const struct ckpt_shared *s = o->shared;
    struct ckpt_renames *own = NULL;
    int result = 0;

    if (!s->renames && ckpt_renames_of_type(ckpt_opening_type(o), &own, err) < 0)
        return -1;
    if (s->renames || own)
        result = rename_base(o, own ? own : s->renames, base, err);
    ckpt_renames_free(own);
    return result;
}

static int model_of_recipe(struct ckpt_opening *o, struct ckpt_err *err)
{
    const struct ckpt_shared *s = o->shared;
    const struct ckpt_recipe_options opt = ckpt_opening_recipe_options(o);
    ckpt_cleanup(ckpt_model_freep) struct ckpt_model *model = NULL;
    struct ckpt_err own = {0};

    if (ckpt_recipe_apply(s->recipes, o->cat, &opt, &model, &own) < 0)
        return opt.base_config && own.code == CKPT_CONFLICT
                   ? ckpt_fail(err, own.code, "%.700s; is %s '%s' another model's?", own.text,
                               o->home.dir ? "config.json in" : "base",
                               o->home.dir ? ckpt_dir_path(o->home.dir) : s->opt->base)
                   : ckpt_err_move(err, &own);
    ckpt_catalog_free(o->cat);
    o->cat = ckpt_steal(&model->catalog);
    o->config = ckpt_steal(&model->config);
    o->recipe = ckpt_steal(&model->recipe);
    return ckpt_opening_take_missing(o, err);
}

static int config_of_memory(struct ckpt_opening *o, struct ckpt_err *err)
{
    const json_t *config = ckpt_opening_model_config(o);

    if (config)
        return take_config(o, config, err);
    ckpt_catalog_note(o->cat,
                      "there is no config.json of the model, neither with the checkpoint nor in "
                      "the folder of the run; give one with base=DIR");
    return 0;
}

/* Convert to the hub's names. transformers 5 converts some families when it saves them (it
 * separates experts, which it stacks in memory), by rules that are recipes here. */
static int names_of_hub(struct ckpt_opening *o, struct ckpt_err *err)
{
    const struct ckpt_recipe_options opt = ckpt_opening_recipe_options(o);
    bool done;

    if (ckpt_options_memory(o->shared->opt))
        return 0;
    if (ckpt_names_convert(&o->cat, o->shared->recipes, &opt, &done, &o->recipe, err) < 0)
        return -1;
    return done ? 0 : ckpt_names_check_fused(o, err);
}

/* ---- names ---- */

/* Are all tensors there that config.json describes? A directory without an index says nothing of a
 * file that is not there. */
static int check_complete(struct ckpt_opening *o, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_lacks_release) struct ckpt_lacks lacks = {0};

    if (o->facts.is_adapter || ckpt_options_memory(o->shared->opt))
        return 0;
    if (!o->config)
        lacks.unchecked = "there is no config.json";
    else if (ckpt_is_quantized(o->cat))
        lacks.unchecked = "the model is quantised";
    else if (ckpt_recipe_lacks(o->shared->recipes, o->cat, o->config, &lacks, err) < 0)
        return -1;
    if (lacks.unchecked && json_object_set_new(o->cat->about, "completeness_not_checked",
                                               json_string(lacks.unchecked)) < 0)
        return ckpt_nomem(err);
    if (lacks.n && !o->shared->opt->allow_partial)
        return ckpt_fail(
            err, CKPT_MISSING,
            "'%s' lacks %zu tensor%s of the model that config.json describes: %s; is "
            "a file missing? (-o allow_partial shows it without them, missing=base takes "
            "them from base=)",
            ckpt_dir_path(o->dir), lacks.n, lacks.n == 1 ? "" : "s", ckpt_str_get(&lacks.names));
    if (lacks.n)
        ckpt_catalog_warn(o->cat, "tensors of the model are left out (%zu): %s", lacks.n,
                          ckpt_str_get(&lacks.names));
    return 0;
}

static int model_of_hub(struct ckpt_opening *o, struct ckpt_err *err)
{
    const struct ckpt_base *base = o->shared->base;

    if (config_of_hub(o, err) < 0 ||
        (o->decision.match_base && match_names(o, base->cat, err) < 0) ||
        ckpt_opening_take_missing(o, err) < 0)
        return -1;
    if (o->decision.check && ckpt_opening_check(o, err) < 0)
        return -1;
    return o->facts.is_hub_dir ? check_complete(o, err)
                               : 0; /* NeMo Automodel's names may be mixed */
}

static int model_of_memory(struct ckpt_opening *o, struct ckpt_err *err)
{
    if (names_of_hub(o, err) < 0 || config_of_memory(o, err) < 0 ||
        ckpt_opening_take_missing(o, err) < 0 || ckpt_opening_check(o, err) < 0 ||
        check_complete(o, err) < 0)
        return -1;
    return o->adapter ? match_names(o, o->cat, err)
                      : 0; /* the checkpoint has the names in memory */
}

static int name_tensors(struct ckpt_opening *o, struct ckpt_err *err)
{
    switch (o->decision.way) {
    case CKPT_WAY_RECIPE:
        return model_of_recipe(o, err);
    case CKPT_WAY_HUB:
        return model_of_hub(o, err);
    case CKPT_WAY_MEMORY:
        return model_of_memory(o, err);
    default:
        return 0;
    }
}

/* Convert between the hub's names and those in memory. */
static int convert_names(struct ckpt_opening *o, struct ckpt_err *err)
{
    struct ckpt_recipe_options convert = {.format = "hub", .base_config = o->config, .back = true};

    if (o->decision.convert == CKPT_CONVERT_NOT)
        return 0;
    if (ckpt_names_convert(&o->cat, o->shared->recipes, &convert, &o->ordered, NULL, err) < 0)
        return ckpt_err_in(err, "in memory");
    if (o->decision.convert != CKPT_CONVERT_THERE_AND_BACK || !o->ordered)
        return 0;
    convert.format = "transformers";
    convert.back = false;
    return ckpt_names_convert(&o->cat, o->shared->recipes, &convert, &o->ordered, NULL, err);
}

/* ---- quantisation ---- */

/* Remove the quantisation from the config if the tensors are not quantised: they were dequantised,
 * or training started from a quantised base. */
static void drop_quantization(struct ckpt_opening *o)
{
    static const char key[] = "quantization_config";
    json_t *text = json_object_get(o->config, "text_config");

    if (o->decision.keep_quantization || ckpt_is_quantized(o->cat))
        return;
    /* o->config is the view's own, a deep copy */
    o->config_changed = json_object_del(o->config, key) == 0;
    o->config_changed |= json_object_del(text, key) == 0;
}

static int dequantize(struct ckpt_opening *o, struct ckpt_err *err)
{
    if (o->decision.dequantize && ckpt_dequantize(o->cat, o->config, o->facts.weight_map, err) < 0)
        return ckpt_err_in(err, "'%s'", ckpt_dir_path(o->dir));
    drop_quantization(o);
    return 0;
}

/* ---- dtypes ---- */

/* Warn about tensors that have no entry in Automodel's mapping, which may cover one rank's tensors
 * only. Its own export leaves their dtypes unchanged. */
static void warn_unknown(struct ckpt_opening *o, const struct ckpt_tensor *t, size_t n)
{
    ckpt_catalog_warn(
        o->cat,
        "the dtypes of %zu tensors ('%s' ...) are not in fqn_to_dtype_mapping.json%s: "
        "shown as stored, %s",
        n, t->name, o->shared->base ? " nor in the base" : "; base= may tell",
        ckpt_dtype_name(t->dtype));
}

static int cast_tensors(struct ckpt_opening *o, struct ckpt_err *err)
{
    const bool known = ckpt_opening_has_output_names(o); /* then each tensor says it */
    const struct ckpt_tensor *unknown = NULL;
    size_t nunknown = 0;

    for (size_t i = 0; i < o->cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &o->cat->tensors.ptr[i];
        enum ckpt_dtype want = known ? (enum ckpt_dtype)(t->wanted ? t->wanted - 1 : t->dtype)
                                     : ckpt_dtypes_wanted(o, t);
        if (want == t->dtype) {
            if (known || !ckpt_dtypes_unknown(o, t))
                continue;
            if (nunknown++ == 0)
                unknown = t;
            continue;
        }
        o->cast = true;
        if (ckpt_value_cast(o->cat, i, (int)want, err) < 0)
            return -1;
    }
    if (o->cast && nunknown)
        warn_unknown(o, unknown, nunknown);
    return 0;
}

const char *ckpt_main_dtype(const struct ckpt_catalog *cat, bool stored)
{
    uint64_t n[CKPT_NDTYPE] = {0};
    int best = -1;

    for (size_t i = 0; i < cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &cat->tensors.ptr[i];
        if (stored)
            t = ckpt_tensor_stored(t);
        if (ckpt_dtype_is_castable(t->dtype))
            n[t->dtype] += t->numel;
    }
    for (int t = 0; t < CKPT_NDTYPE; t++)
        if (n[t] && (best < 0 || n[t] > n[best]))
            best = t;
    return best < 0 ? NULL : ckpt_dtype_torch_name((enum ckpt_dtype)best);
}

/* State the dtype in the config: transformers 5 reads "dtype", 4.x "torch_dtype"; a base's config
 * keeps the key that it has. */
static int state_dtype(struct ckpt_opening *o, struct ckpt_err *err)
{
    const char *name = ckpt_main_dtype(o->cat, false);

    if (!o->config || !name)
        return 0;
    const bool made = o->decision.way == CKPT_WAY_RECIPE && !o->config_changed;
    const bool old = made || json_object_get(o->config, "torch_dtype");
    /* a config without a dtype says float32 */
    const bool now =
        made || json_object_get(o->config, "dtype") || (!old && strcmp(name, "float32") != 0);
    return (old && json_object_set_new(o->config, "torch_dtype", json_string(name)) < 0) ||
                   (now && json_object_set_new(o->config, "dtype", json_string(name)) < 0)
               ? ckpt_nomem(err)
               : 0;
}

/* ---- all of it ---- */

int ckpt_opening_make_model(struct ckpt_opening *o, struct ckpt_err *err)
{
    ckpt_opening_keep_framework(o);
    if (name_tensors(o, err) < 0 || convert_names(o, err) < 0 ||
        ckpt_opening_to_output(o, err) < 0 || dequantize(o, err) < 0 ||
        ckpt_merge_finish(o, err) < 0)
        return -1;
    ckpt_catalog_shrink(o->cat);
    return cast_tensors(o, err) < 0 || state_dtype(o, err) < 0 ? -1 : 0;
}
