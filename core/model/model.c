/* SPDX-License-Identifier: Apache-2.0 */
/* Making the model of a view from a reader's catalogue: names, values, dtypes, config. */
#include "model/model.h"

#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "model/adapter.h"
#include "model/check.h"
#include "model/dequantize.h"
#include "model/dtypes.h"
#include "model/facts.h"
#include "model/merge.h"
#include "model/names.h"
#include "model/output.h"
#include "recipe/apply/lacks.h"
#include "tensor/value.h"

static const struct ckpt_types *types_of(const struct ckpt_view *v)
{
    return ckpt_recipes_types(v->shared->recipes);
}

/* Set the view's config to this one (not NULL), with the options' overrides. */
static int take_config(struct ckpt_view *v, const json_t *config, struct ckpt_err *err)
{
    const char *key;
    json_t *value;

    if (!(v->config = json_deep_copy(config)))
        return ckpt_nomem(err);
    json_object_foreach(v->shared->opt->overrides, key, value) {
        if (key[0] != '_' && json_object_set_new(v->config, key, json_deep_copy(value)) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

/* The config of a model under the hub's names: its own, else the base's. */
static int config_of_hub(struct ckpt_view *v, struct ckpt_err *err)
{
    const struct ckpt_base *base = v->shared->base;
    const json_t *config = v->cat->config;
    const char *key = ckpt_options_override(v->shared->opt);

    if (!config && base && !v->facts.is_adapter)
        config = base->config;
    if (config)
        return take_config(v, config, err);
    return key ? ckpt_fail(err, CKPT_USAGE,
                           "option %s: '%s' has no config.json that it could change", key,
                           ckpt_dir_path(v->dir))
               : 0;
}

/* Rename the base's names, which are the catalogue's or, without a catalogue, those in its index.
 */
static int rename_base(struct ckpt_view *v, const struct ckpt_renames *renames,
                       const struct ckpt_catalog *cat, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *names = json_object();

    if (!names)
        return ckpt_nomem(err);
    for (size_t i = 0; cat && i < cat->tensors.len; i++)
        if (json_object_set_new(names, cat->tensors.ptr[i].name, json_null()) < 0)
            return ckpt_nomem(err);
    return ckpt_renames_invert(renames, cat ? names : v->shared->base->weight_map, &v->base_names,
                               err);
}

/* Match names: a run saves the names in memory, while the base may have the hub's. */
static int match_names(struct ckpt_view *v, const struct ckpt_catalog *base, struct ckpt_err *err)
{
    const struct ckpt_shared *s = v->shared;
    struct ckpt_renames *own = NULL;
    int result = 0;

    if (!s->renames && ckpt_renames_of_type(ckpt_view_type(v), &own, err) < 0)
        return -1;
    if (s->renames || own)
        result = rename_base(v, own ? own : s->renames, base, err);
    ckpt_renames_free(own);
    return result;
}

static int check_model(struct ckpt_view *v, struct ckpt_err *err)
{
    const struct ckpt_check c = {.type = ckpt_view_type(v),
                                 .base = v->shared->base,
                                 .base_names = v->base_names,
                                 .config = v->config,
                                 .complete = v->decision.way == CKPT_WAY_MEMORY,
                                 .allow_partial = v->shared->opt->allow_partial};

    return ckpt_check_model(&c, v->cat, v->warnings, err);
}

/* The base's config, or else the checkpoint's own. */
static const json_t *lent_config(const struct ckpt_view *v, const struct ckpt_catalog *cat)
{
    const struct ckpt_base *base = v->shared->base;
    return base && base->config ? base->config : cat->config;
}

struct ckpt_recipe_options ckpt_view_recipe_options(const struct ckpt_view *v,
                                                    const struct ckpt_catalog *src)
{
    const struct ckpt_shared *s = v->shared;
    const bool own_names = v->decision.way == CKPT_WAY_MEMORY;

    return (struct ckpt_recipe_options){
        .format = own_names ? "transformers" : NULL,
        .base_config = own_names ? lent_config(v, src) : ckpt_view_base_config(v),
        .overrides = s->opt->overrides,
        .allow_partial = s->opt->allow_partial,
        .allow_leftover = s->opt->allow_leftover,
    };
}

static int model_of_recipe(struct ckpt_view *v, const struct ckpt_catalog *src,
                           struct ckpt_err *err)
{
    const struct ckpt_shared *s = v->shared;
    const struct ckpt_recipe_options opt = ckpt_view_recipe_options(v, src);
    ckpt_cleanup(ckpt_model_freep) struct ckpt_model *model = NULL;

    struct ckpt_err own = {0};

    if (ckpt_recipe_apply(s->recipes, src, &opt, &model, &own) < 0)
        return opt.base_config && s->opt->base && own.code == CKPT_CONFLICT
                   ? ckpt_fail(err, own.code, "%.700s; is base '%s' another model's?", own.text,
                               s->opt->base)
                   : ckpt_err_move(err, &own);
    v->cat = ckpt_steal(&model->catalog);
    v->config = ckpt_steal(&model->config);
    v->recipe = ckpt_steal(&model->recipe);
    return ckpt_view_add_warnings(v->warnings, v->cat->warnings) < 0 ? ckpt_nomem(err) : 0;
}

static int config_of_memory(struct ckpt_view *v, struct ckpt_err *err)
{
    const json_t *config = lent_config(v, v->cat);

    if (config)
        return take_config(v, config, err);
    ckpt_catalog_warn(v->cat, "the checkpoint has no config.json; give one with base=DIR");
    return 0;
}

/* Convert to the hub's names. transformers 5 converts some families when it saves them (it
 * separates experts, which it stacks in memory), by rules that are recipes here. */
static int names_of_hub(struct ckpt_view *v, struct ckpt_err *err)
{
    const struct ckpt_recipe_options opt = ckpt_view_recipe_options(v, v->cat);
    bool done;

    if (ckpt_options_memory(v->shared->opt))
        return 0;
    if (ckpt_names_convert(&v->cat, v->shared->recipes, &opt, &done, &v->recipe, err) < 0)
        return -1;
    return done ? 0 : ckpt_names_check_fused(v->cat, types_of(v), opt.base_config, err);
}

/* ---- whose names? ---- */

static int find_model(const struct ckpt_view *v, struct ckpt_catalog *src, bool *ret_found,
                      struct ckpt_err *err)
{
    const struct ckpt_shared *s = v->shared;

    return ckpt_names_apply(src, types_of(v), s->base, lent_config(v, src), s->opt->allow_leftover,
                            ret_found, err);
}

int ckpt_view_find_names(const struct ckpt_view *v, struct ckpt_catalog *src, struct ckpt_err *err)
{
    bool found;

    return v->decision.way == CKPT_WAY_MEMORY ? find_model(v, src, &found, err) : 0;
}

/* Find out whose names the tensors have, if the reader could not say it: LoRA tensors, and a
 * transformers model below a prefix, occur in checkpoints of any format. */
static int find_names(struct ckpt_view *v, struct ckpt_catalog *src, struct ckpt_err *err)
{
    bool found;

    if (v->shared->opt->raw || v->facts.names != CKPT_NAMES_FRAMEWORK ||
        ckpt_recipes_forced(v->shared->recipes))
        return 0;
    if (ckpt_adapter_apply(src, ckpt_types_any(types_of(v)),
                           v->shared->opt->lora == CKPT_LORA_ADAPTER, &v->facts, &found, err) < 0)
        return -1;
    if (found)
        return 0;
    if (find_model(v, src, &found, err) < 0)
        return -1;
    if (found)
        v->facts.names = CKPT_NAMES_MEMORY;
    return 0;
}

/* Replace *src by the base that a whole PeftModel contains, a model under its own names; with
 * lora=merge the adapter is kept in v->adapter. */
static int split_peft(struct ckpt_view *v, struct ckpt_catalog **src, struct ckpt_catalog **base,
                      struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_facts_release) struct ckpt_facts adapter = {
        0}; /* the view is not an adapter */
    bool found = false;

    json_decref(v->about);
    json_decref(v->warnings);
    v->about = json_incref((*base)->about);
    v->warnings = json_incref((*base)->warnings);
    if (!ckpt_recipes_forced(v->shared->recipes) && find_model(v, *base, &found, err) < 0)
        return -1;
    if (!found)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "option lora: the tensors of the adapter's base in '%s' do not have "
                         "transformers' names (view=raw shows them)",
                         ckpt_dir_path(v->dir));
    v->facts.names = CKPT_NAMES_MEMORY;
    if (v->shared->opt->lora == CKPT_LORA_MERGE) {
        if (ckpt_adapter_apply(*src, ckpt_types_any(types_of(v)), true, &adapter, &found, err) < 0)
            return -1;
        v->adapter = ckpt_steal(src);
    }
    ckpt_catalog_free(*src);
    *src = ckpt_steal(base);
    return 0;
}

/* Handle lora=merge and lora=base. The base inside a whole PeftModel has priority over the option
 * `base`. */
static int find_lora(struct ckpt_view *v, struct ckpt_catalog **src, bool *ret_merged,
                     struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *base = NULL;

    if (!v->facts.is_adapter &&
        ckpt_adapter_base(*src, ckpt_types_any(types_of(v)), &base, err) < 0)
        return -1;
    if (base)
        return split_peft(v, src, &base, err);
    if (v->shared->opt->lora == CKPT_LORA_BASE)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "option lora=base: '%s' is not a checkpoint of a whole PEFT model, base "
                         "and adapter together",
                         ckpt_dir_path(v->dir));
    *ret_merged = true;
    return ckpt_merge_begin(v, src, err);
}

static int decide(struct ckpt_view *v, struct ckpt_catalog **src, struct ckpt_err *err)
{
    const struct ckpt_shared *s = v->shared;
    const enum ckpt_lora_rule lora = s->opt->lora;
    struct ckpt_decide in = {.facts = &v->facts, .opt = s->opt, .base = s->base};
    const bool joins = lora == CKPT_LORA_MERGE || lora == CKPT_LORA_BASE;

    if ((joins ? find_lora(v, src, &in.merged, err) : find_names(v, *src, err)) < 0)
        return -1;
    if (lora == CKPT_LORA_ADAPTER && !v->facts.is_adapter)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "option lora=adapter: '%s' has no adapter",
                         ckpt_dir_path(v->dir));
    in.has_config = (*src)->config != NULL;
    v->decision = ckpt_decide(&in);
    return 0;
}

/* ---- names ---- */

/* Are all tensors there that config.json describes? A directory without an index says nothing of a
 * file that is not there. */
static int check_complete(struct ckpt_view *v, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_lacks_release) struct ckpt_lacks lacks = {0};

    if (v->facts.is_adapter || ckpt_options_memory(v->shared->opt))
        return 0;
    if (!v->config)
        lacks.unchecked = "there is no config.json";
    else if (ckpt_is_quantized(v->cat))
        lacks.unchecked = "the model is quantised";
    else if (ckpt_recipe_lacks(v->shared->recipes, v->cat, v->config, &lacks, err) < 0)
        return -1;
    if (lacks.unchecked &&
        json_object_set_new(v->about, "completeness_not_checked", json_string(lacks.unchecked)) < 0)
        return ckpt_nomem(err);
    if (lacks.n && !v->shared->opt->allow_partial)
        return ckpt_fail(err, CKPT_MISSING,
                         "'%s' lacks %zu tensor%s of the model that config.json describes: %s; is "
                         "a file missing? (-o allow_partial shows it without them)",
                         ckpt_dir_path(v->dir), lacks.n, lacks.n == 1 ? "" : "s",
                         ckpt_str_get(&lacks.names));
    if (lacks.n)
        ckpt_catalog_warn(v->cat, "tensors of the model are left out (%zu): %s", lacks.n,
                          ckpt_str_get(&lacks.names));
    return 0;
}

static int model_of_hub(struct ckpt_view *v, struct ckpt_err *err)
{
    const struct ckpt_base *base = v->shared->base;

    if (config_of_hub(v, err) < 0 || (v->decision.match_base && match_names(v, base->cat, err) < 0))
        return -1;
    if (v->decision.check && check_model(v, err) < 0)
        return -1;
    return v->facts.is_hub_dir ? check_complete(v, err)
                               : 0; /* NeMo Automodel's names may be mixed */
}

static int model_of_memory(struct ckpt_view *v, struct ckpt_err *err)
{
    if (names_of_hub(v, err) < 0 || config_of_memory(v, err) < 0 || check_model(v, err) < 0 ||
        check_complete(v, err) < 0)
        return -1;
    return v->adapter ? match_names(v, v->cat, err)
                      : 0; /* the checkpoint has the names in memory */
}

static int name_tensors(struct ckpt_view *v, struct ckpt_catalog **src, struct ckpt_err *err)
{
    if (v->decision.way == CKPT_WAY_RECIPE)
        return model_of_recipe(v, *src, err);
    v->cat = ckpt_steal(src);
    switch (v->decision.way) {
    case CKPT_WAY_HUB:
        return model_of_hub(v, err);
    case CKPT_WAY_MEMORY:
        return model_of_memory(v, err);
    default:
        return 0;
    }
}

/* Convert between the hub's names and those in memory. */
static int convert_names(struct ckpt_view *v, struct ckpt_err *err)
{
    struct ckpt_recipe_options convert = {.format = "hub", .base_config = v->config, .back = true};

    if (v->decision.convert == CKPT_CONVERT_NOT)
        return 0;
    if (ckpt_names_convert(&v->cat, v->shared->recipes, &convert, &v->ordered, NULL, err) < 0)
        return ckpt_err_in(err, "in memory");
    if (v->decision.convert != CKPT_CONVERT_THERE_AND_BACK || !v->ordered)
        return 0;
    convert.format = "transformers";
    convert.back = false;
    return ckpt_names_convert(&v->cat, v->shared->recipes, &convert, &v->ordered, NULL, err);
}

/* ---- quantisation ---- */

/* Remove the quantisation from the config if the tensors are not quantised: they were dequantised,
 * or training started from a quantised base. */
static void drop_quantization(struct ckpt_view *v)
{
    static const char key[] = "quantization_config";
    json_t *text = json_object_get(v->config, "text_config");

    if (v->decision.keep_quantization || ckpt_is_quantized(v->cat))
        return;
    /* v->config is the view's own, a deep copy */
    v->config_changed = json_object_del(v->config, key) == 0;
    v->config_changed |= json_object_del(text, key) == 0;
}

static int dequantize(struct ckpt_view *v, struct ckpt_err *err)
{
    if (v->decision.dequantize && ckpt_dequantize(v->cat, v->config, v->facts.weight_map, err) < 0)
        return ckpt_err_in(err, "'%s'", ckpt_dir_path(v->dir));
    drop_quantization(v);
    return 0;
}

/* ---- dtypes ---- */

/* Warn about tensors that have no entry in Automodel's mapping, which may cover one rank's tensors
 * only. Its own export leaves their dtypes unchanged. */
static int warn_unknown(struct ckpt_view *v, const struct ckpt_tensor *t, size_t n,
                        struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *line = ckpt_asprintf(
        "the dtypes of %zu tensors ('%s' ...) are not in fqn_to_dtype_mapping.json%s: shown as "
        "stored, %s",
        n, t->name, v->shared->base ? " nor in the base" : "; base= may tell",
        ckpt_dtype_name(t->dtype));

    return !line || json_array_append_new(v->warnings, json_string(line)) < 0 ? ckpt_nomem(err) : 0;
}

static int cast_tensors(struct ckpt_view *v, struct ckpt_err *err)
{
    const struct ckpt_dtypes dtypes = ckpt_view_dtypes(v);
    const bool known = ckpt_view_has_output_names(v); /* then each tensor says it */
    const struct ckpt_tensor *unknown = NULL;
    size_t nunknown = 0;

    for (size_t i = 0; i < v->cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &v->cat->tensors.ptr[i];
        enum ckpt_dtype want = known ? (enum ckpt_dtype)(t->wanted ? t->wanted - 1 : t->dtype)
                                     : ckpt_dtypes_wanted(&dtypes, t);
        if (want == t->dtype) {
            if (known || !ckpt_dtypes_unknown(&dtypes, t))
                continue;
            if (nunknown++ == 0)
                unknown = t;
            continue;
        }
        v->cast = true;
        if (ckpt_value_cast(v->cat, i, (int)want, err) < 0)
            return -1;
    }
    return v->cast && nunknown ? warn_unknown(v, unknown, nunknown, err) : 0;
}

const char *ckpt_view_main_dtype(const struct ckpt_catalog *cat)
{
    uint64_t n[CKPT_NDTYPE] = {0};
    int best = -1;

    for (size_t i = 0; i < cat->tensors.len; i++)
        if (ckpt_dtype_is_castable(cat->tensors.ptr[i].dtype))
            n[cat->tensors.ptr[i].dtype] += cat->tensors.ptr[i].numel;
    for (int t = 0; t < CKPT_NDTYPE; t++)
        if (n[t] && (best < 0 || n[t] > n[best]))
            best = t;
    return best < 0 ? NULL : ckpt_dtype_torch_name((enum ckpt_dtype)best);
}

/* State the dtype in the config: transformers 5 reads "dtype", 4.x "torch_dtype"; a base's config
 * keeps the key that it has. */
static int state_dtype(struct ckpt_view *v, struct ckpt_err *err)
{
    const char *name = ckpt_view_main_dtype(v->cat);

    if (!v->config || !name)
        return 0;
    if (v->decision.way != CKPT_WAY_RECIPE || v->config_changed) {
        /* a config without a dtype says float32 */
        bool old = json_object_get(v->config, "torch_dtype") != NULL;
        bool now =
            json_object_get(v->config, "dtype") != NULL || (!old && strcmp(name, "float32") != 0);
        if ((old && json_object_set_new(v->config, "torch_dtype", json_string(name)) < 0) ||
            (now && json_object_set_new(v->config, "dtype", json_string(name)) < 0))
            return ckpt_nomem(err);
        return 0;
    }
    if (json_object_set_new(v->config, "dtype", json_string(name)) < 0 ||
        json_object_set_new(v->config, "torch_dtype", json_string(name)) < 0)
        return ckpt_nomem(err);
    return 0;
}

/* ---- all of it ---- */

int ckpt_view_make_model(struct ckpt_view *v, struct ckpt_catalog **src, struct ckpt_err *err)
{
    v->about = json_incref((*src)->about);
    v->warnings = json_incref((*src)->warnings);
    ckpt_view_keep_framework(v, *src);
    if (decide(v, src, err) < 0 || name_tensors(v, src, err) < 0 || convert_names(v, err) < 0 ||
        ckpt_view_convert_to_output(v, err) < 0 || dequantize(v, err) < 0 ||
        ckpt_merge_finish(v, err) < 0)
        return -1;
    ckpt_catalog_shrink(v->cat);
    return cast_tensors(v, err) < 0 || state_dtype(v, err) < 0 ? -1 : 0;
}
