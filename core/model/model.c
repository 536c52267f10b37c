/* SPDX-License-Identifier: Apache-2.0 */
/* Making the model of a view from a reader's catalogue: names, values, dtypes, config. */
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "format/writer.h"
#include "model/dequantize.h"
#include "model/names.h"
#include "model/opening.h"
#include "model/state.h"
#include "tensor/value.h"

/* Remove the quantisation from the config if the tensors are not quantised: they were dequantised,
 * or training started from a quantised base. */
static void drop_quantization(struct ckpt_opening *o)
{
    static const char key[] = "quantization_config";
    json_t *text = json_object_get(o->config, "text_config");

    if (o->decision.keep_quantization || ckpt_is_packed(o->cat))
        return;
    /* o->config is the view's own, a deep copy */
    o->config_changed |= json_object_del(o->config, key) == 0;
    o->config_changed |= json_object_del(text, key) == 0;
}

/* The config of a model under the hub's names: its own, else the base's. */
static int config_of_hub(struct ckpt_opening *o, struct ckpt_err *err)
{
    const json_t *config = o->cat->config;
    const char *key = ckpt_options_override(o->shared->opt);

    if (!config && !o->facts.is_adapter)
        config = ckpt_opening_base_config(o);
    if (config)
        return ckpt_opening_correct(o, config, &o->config, err);
    return key ? ckpt_fail(err, CKPT_USAGE,
                           "option %s: '%s' has no config.json that it could change", key,
                           ckpt_dir_path(o->dir))
               : 0;
}

/* Rename the names of a model: those of its catalogue or, without one, those in its index. */
static int rename_base(struct ckpt_opening *o, const struct ckpt_renames *renames,
                       const struct ckpt_catalog *cat, struct ckpt_err *err)
{
    const struct ckpt_weight_map *map = cat ? NULL : o->shared->base->weight_map;
    const char *name;

    if (!(o->base_names = json_object()))
        return ckpt_nomem(err);
    for (size_t i = 0; (name = ckpt_base_name_at(cat, map, i)); i++)
        if (ckpt_renames_note(renames, name, o->base_names, err) < 0)
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

/* ---- missing=base: tensors of the base ---- */

enum { MOST_SHOWN = 5 };

struct taking {
    struct ckpt_opening *o;
    json_t *names;         /* {name in the base: name in the view} where they differ */
    json_t *taken;         /* names in the view */
    uint32_t first_source; /* number of the base's first source in o->cat */
};

static void taking_release(struct taking *t)
{
    json_decref(t->names);
    json_decref(t->taken);
}

/* The names of the base's tensors in the view, from o->base_names, which is the reverse. */
static json_t *reverse(const json_t *names)
{
    json_t *back = json_object(), *other;
    const char *name;

    json_object_foreach((json_t *)names, name, other)
        ckpt_json_set(&back, json_string_value(other), json_string(name));
    return back;
}

/* Does config.json say that the tensor is another one, which the model has? */
static bool is_tied(const struct ckpt_opening *o, const char *name)
{
    const struct ckpt_type *type = ckpt_opening_type(o);
    const bool tied = ckpt_names_tie(type, o->config);

    for (size_t i = 0; tied && i < type->ties.n; i++)
        if (strcmp(type->ties.pair[i].from, name) == 0)
            return true;
    return false;
}

static int take(struct taking *t, const struct ckpt_tensor *of, const char *name,
                struct ckpt_err *err)
{
    struct ckpt_tensor own = *of;

    own.name = name;
    if (json_array_append_new(t->taken, json_string(name)) < 0)
        return ckpt_nomem(err);
    return ckpt_catalog_copy(t->o->cat, &own, t->first_source, err);
}

/* Say which tensors these are: all in `about`, the first in a warning. */
static int tell(struct taking *t, struct ckpt_err *err)
{
    const size_t n = json_array_size(t->taken);
    ckpt_cleanup(ckpt_str_release) struct ckpt_str names = {0};

    for (size_t i = 0; i < n && i < MOST_SHOWN; i++)
        ckpt_str_printf(&names, "%s'%s'", i ? ", " : "",
                        json_string_value(json_array_get(t->taken, i)));
    if (n == 0)
        return 0;
    ckpt_catalog_warn(t->o->cat, "%zu tensor%s of base '%s': %s%s", n,
                      n == 1 ? " is that" : "s are those", ckpt_dir_path(t->o->shared->base->dir),
                      ckpt_str_get(&names), n > MOST_SHOWN ? " ..." : "");
    return json_object_set(t->o->cat->about, "from_base", t->taken) < 0 ? ckpt_nomem(err) : 0;
}

/* Add to o->cat, whose names are those of the view, the tensors that only the base has, as they are
 * stored there, and list them in o->cat->about under "from_base". A tensor that config.json ties to
 * another is not missing. USAGE: the base has no weights. UNSUPPORTED: they are quantised. */
static int take_missing(struct ckpt_opening *o, struct ckpt_err *err)
{
    const struct ckpt_base *base = o->shared->base;
    ckpt_cleanup(taking_release) struct taking t = {.o = o, .taken = json_array()};

    if (o->shared->opt->missing != CKPT_LACKS_FROM_BASE)
        return 0;
    if (!base || !base->cat)
        return ckpt_fail(err, CKPT_USAGE,
                         "option missing=base needs base=DIR, a model directory with weights");
    if (ckpt_is_quantized(base->cat) ||
        (ckpt_config_is_quantized(base->config) && ckpt_is_packed(base->cat)))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "option missing=base: the weights of base '%s' are quantised: export it "
                         "with the option dequantize, and give the result as base=",
                         ckpt_dir_path(base->dir));
    if (ckpt_opening_check_taking(o, err) < 0)
        return -1;
    t.first_source = (uint32_t)o->cat->sources.len;
    if (!t.taken || !(t.names = reverse(o->base_names)))
        return ckpt_nomem(err);
    if (ckpt_catalog_add_sources(o->cat, base->cat, err) < 0)
        return -1;
    for (size_t i = 0; i < base->cat->tensors.len; i++) {
        const struct ckpt_tensor *of = &base->cat->tensors.ptr[i];
        const char *name = ckpt_json_str_or(t.names, of->name, of->name);
        if (!ckpt_catalog_find(o->cat, name) && !is_tied(o, name) && take(&t, of, name, err) < 0)
            return -1;
    }
    return tell(&t, err);
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
    drop_quantization(o);
    return take_missing(o, err);
}

static int config_of_memory(struct ckpt_opening *o, struct ckpt_err *err)
{
    const json_t *config = ckpt_opening_model_config(o);

    if (config) {
        if (ckpt_opening_correct(o, config, &o->config, err) < 0)
            return -1;
        drop_quantization(o);
        return 0;
    }
    ckpt_catalog_note(o->cat,
                      "there is no config.json of the model, neither with the checkpoint nor in "
                      "the folder of the run; give one with base=DIR");
    return 0;
}

/* Does the hub have the experts of this type one by one, in any class? */
static bool is_stacked(const struct ckpt_opening *o)
{
    const struct ckpt_type *type =
        ckpt_types_find(ckpt_recipes_types(o->shared->recipes),
                        ckpt_json_str(ckpt_opening_model_config(o), "model_type"));

    return type->converted && type->experts_turned == CKPT_EXPERTS_STRAIGHT;
}

/* Convert to the hub's names. transformers 5 converts some families when it saves them (it
 * separates experts, which it stacks in memory), by rules that are recipes here. */
static int names_of_hub(struct ckpt_opening *o, struct ckpt_err *err)
{
    const struct ckpt_recipe_options opt = ckpt_opening_recipe_options(o);
    bool done;

    if (ckpt_options_memory(o->shared->opt) || o->as_base)
        return 0;
    if (ckpt_names_convert(&o->cat, o->shared->recipes, &opt, &done, &o->recipe, err) < 0)
        return -1;
    return done && !is_stacked(o) ? 0 : ckpt_names_check_fused(o, err);
}

/* ---- names ---- */

static int model_of_hub(struct ckpt_opening *o, struct ckpt_err *err)
{
    const struct ckpt_base *base = o->shared->base;

    if (config_of_hub(o, err) < 0)
        return -1;
    if (!o->decision.dequantize)
        drop_quantization(o);
    if ((o->decision.match_base && match_names(o, base->cat, err) < 0) || take_missing(o, err) < 0)
        return -1;
    if (o->decision.check && ckpt_opening_check(o, err) < 0)
        return -1;
    return ckpt_opening_check_config(o, err);
}

static int model_of_memory(struct ckpt_opening *o, struct ckpt_err *err)
{
    if (names_of_hub(o, err) < 0 || config_of_memory(o, err) < 0 || take_missing(o, err) < 0 ||
        ckpt_opening_check(o, err) < 0 || ckpt_opening_check_config(o, err) < 0)
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
    struct ckpt_recipe_options convert = {.format = "hub",
                                          .base_config = o->config,
                                          .back = true,
                                          .layout_only = ckpt_state_is_moment(o->state)};

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

static int dequantize(struct ckpt_opening *o, struct ckpt_err *err)
{
    if (o->decision.dequantize && ckpt_dequantize(o->cat, o->config, o->facts.weight_map, err) < 0)
        return ckpt_err_in(err, "'%s'", ckpt_dir_path(o->dir));
    drop_quantization(o);
    return 0;
}

/* ---- dtypes ---- */

const char *ckpt_config_dtype(const json_t *config)
{
    return ckpt_json_str_or(config, "dtype", ckpt_json_str(config, "torch_dtype"));
}

static bool config_dtype(const json_t *config, enum ckpt_dtype *ret)
{
    const char *name = ckpt_config_dtype(config);

    return name && ckpt_dtype_parse(name, strlen(name), ret) && ckpt_dtype_is_castable(*ret);
}

static const struct ckpt_base *base_of(const struct ckpt_opening *o)
{
    return o->decision.use_base_dtypes ? o->shared->base : NULL;
}

/* The tensor's name in the base. */
static const char *base_name(const struct ckpt_opening *o, const char *name)
{
    return ckpt_json_str_or(o->base_names, name, name);
}

static const struct ckpt_tensor *find_in_base(const struct ckpt_opening *o, const char *name)
{
    return base_of(o) && base_of(o)->cat ? ckpt_catalog_find(base_of(o)->cat, base_name(o, name))
                                         : NULL;
}

/* The dtype in the model from which training started. The checkpoint's own mapping has priority;
 * the base's headers follow, because the mapping may cover only one rank's tensors. */
static bool find_mapped(const struct ckpt_opening *o, const char *name, enum ckpt_dtype *ret)
{
    const char *text = ckpt_json_str(o->facts.dtypes, name);
    const struct ckpt_tensor *model;

    if (text && ckpt_dtype_parse(text, strlen(text), ret))
        return true;
    if (!(model = find_in_base(o, name)))
        return false;
    *ret = model->dtype;
    return true;
}

/* Does transformers load the tensor as F32 whatever the file says? Rounding it to the model's main
 * dtype would only lose bits. */
static bool keeps_dtype(const struct ckpt_opening *o, const char *name)
{
    return ckpt_texts_end(&ckpt_opening_type(o)->keeps_dtype, name);
}

/* Is it a weight of the model, which every save rounded to the config's dtype? Not a scalar or a
 * buffer, whose dtype is the module's own, and not a tensor that the base, if it lists its tensors,
 * does not have. */
static bool is_weight(const struct ckpt_opening *o, const struct ckpt_tensor *t)
{
    if (t->rank == 0 || ckpt_texts_end(&ckpt_opening_type(o)->buffers, t->name))
        return false;
    if (base_of(o)->cat)
        return find_in_base(o, t->name) != NULL;
    return !base_of(o)->weight_map ||
           ckpt_weight_map_find(base_of(o)->weight_map, base_name(o, t->name)) != UINT32_MAX;
}

/* Are these F32 weights of a 16-bit model, on which the optimizer works? A config alone never
 * widens. */
static bool is_narrowed(const struct ckpt_opening *o, const struct ckpt_tensor *t,
                        enum ckpt_dtype *ret)
{
    return base_of(o) && !o->facts.dtypes && t->dtype == CKPT_F32 && is_weight(o, t) &&
           config_dtype(base_of(o)->config, ret) && ckpt_dtype_size(*ret) == 2;
}

/* Has the checkpoint a mapping, but neither it nor the base names the floating-point tensor t? */
static bool is_unknown(const struct ckpt_opening *o, const struct ckpt_tensor *t)
{
    enum ckpt_dtype mapped;

    return o->facts.dtypes && !o->shared->opt->raw && !ckpt_state_is_asked(o->state) &&
           o->shared->opt->dtype_rule == CKPT_DTYPE_AUTO && ckpt_dtype_is_castable(t->dtype) &&
           !keeps_dtype(o, t->name) && !find_mapped(o, t->name, &mapped);
}

enum ckpt_dtype ckpt_dtype_as_base(enum ckpt_dtype stored, const enum ckpt_dtype *mapped,
                                   const enum ckpt_dtype *cast)
{
    if (cast && ckpt_dtype_is_castable(stored))
        return mapped && *mapped == CKPT_F32 ? CKPT_F32 : *cast;
    if (!cast && mapped && ckpt_dtype_is_castable(*mapped) && ckpt_dtype_is_float(stored))
        return *mapped;
    return stored;
}

/* The dtype of tensor t in the view. The first of these that names a dtype decides: the option
 * `dtype=`; the checkpoint's own mapping; the base's header for that tensor; the base's config, if
 * it states a 16-bit type and the tensor is a weight stored as F32 (a config alone never widens);
 * the stored dtype, also if there is no conversion to the other. */
static enum ckpt_dtype wanted_dtype(const struct ckpt_opening *o, const struct ckpt_tensor *t)
{
    const bool cast = o->shared->opt->dtype_rule == CKPT_DTYPE_CAST;
    enum ckpt_dtype mapped, dtype;

    if (ckpt_state_is_asked(o->state)) /* a state's dtype is its own */
        return cast && ckpt_dtype_is_castable(t->dtype) ? o->shared->opt->dtype
                                                        : (enum ckpt_dtype)t->dtype;
    if (!ckpt_dtype_is_castable(t->dtype) || o->shared->opt->dtype_rule == CKPT_DTYPE_STORED)
        return t->dtype;
    if (t->wanted && !cast)
        return (enum ckpt_dtype)(t->wanted - 1);
    if (o->shared->opt->raw && !cast)
        return t->dtype;
    if (cast && o->facts.names != CKPT_NAMES_HUB)
        return o->shared->opt->dtype;
    if (find_mapped(o, t->name, &mapped))
        return ckpt_dtype_as_base(t->dtype, &mapped, cast ? &o->shared->opt->dtype : NULL);
    if (keeps_dtype(o, t->name))
        return t->dtype;
    if (cast)
        return o->shared->opt->dtype;
    return is_narrowed(o, t, &dtype) ? dtype : t->dtype;
}

/* Warn about tensors that have no entry in the checkpoint's mapping, which may cover one rank's
 * tensors only. The trainer's own export leaves their dtypes unchanged. */
static void warn_unknown(struct ckpt_opening *o, const struct ckpt_tensor *t, size_t n)
{
    ckpt_catalog_warn(
        o->cat, "the dtypes of %zu tensors ('%s' ...) are not in %s%s: shown as stored, %s", n,
        t->name, o->facts.dtypes_file, o->shared->base ? " nor in the base" : "; base= may tell",
        ckpt_dtype_name(t->dtype));
}

/* Are the names those of the framework whose checkpoint the view is? */
static bool has_output_names(const struct ckpt_opening *o)
{
    const struct ckpt_writer *writer = o->shared->opt->output.writer;

    return writer && writer->recipes;
}

/* UNSUPPORTED: dtype= on quantised weights, whose scales and tables are floating tensors, too, in
 * the dtypes that whoever dequantises them expects. */
static int check_cast(const struct ckpt_opening *o, struct ckpt_err *err)
{
    bool packed = ckpt_is_quantized(o->cat);

    for (size_t i = 0; i < o->cat->tensors.len; i++)
        packed |= o->cat->tensors.ptr[i].dtype == CKPT_I32;
    if (o->shared->opt->dtype_rule != CKPT_DTYPE_CAST || o->shared->opt->raw ||
        o->facts.is_adapter || !packed || !ckpt_config_is_quantized(o->config))
        return 0;
    return ckpt_fail(err, CKPT_UNSUPPORTED,
                     "option dtype: the weights of '%s' are quantised, and it would cast their "
                     "scales: leave it away, or add the option dequantize where they have a kind "
                     "that it knows",
                     ckpt_dir_path(o->dir));
}

static int cast_tensors(struct ckpt_opening *o, struct ckpt_err *err)
{
    const bool known = has_output_names(o); /* then each tensor says it */
    const struct ckpt_tensor *unknown = NULL;
    size_t nunknown = 0;

    if (check_cast(o, err) < 0)
        return -1;
    for (size_t i = 0; i < o->cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &o->cat->tensors.ptr[i];
        if (o->read && t->state) /* an optimizer's, which keeps its dtype */
            continue;
        enum ckpt_dtype want =
            known ? (enum ckpt_dtype)(t->wanted ? t->wanted - 1 : t->dtype) : wanted_dtype(o, t);
        if (want == t->dtype) {
            if (known || !is_unknown(o, t))
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

    if (!o->config || !name || !ckpt_config_is_model(o->config))
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

/* ---- the names of the framework whose checkpoint the view is ---- */

/* Dtypes follow from the hub's names, which the tensors still have: note them. */
static void note_dtypes(struct ckpt_opening *o)
{
    for (size_t i = 0; i < o->cat->tensors.len; i++) {
        struct ckpt_tensor *t = &o->cat->tensors.ptr[i];
        t->wanted = (uint8_t)(wanted_dtype(o, t) + 1);
    }
}

static int no_recipe(const struct ckpt_opening *o, const struct ckpt_writer *writer,
                     struct ckpt_err *err)
{
    const char *type = ckpt_json_str(o->config, "model_type");

    if (!o->config)
        return ckpt_fail(
            err, CKPT_MISSING,
            "view=%s needs a config.json that says which model it is; give one with base=DIR",
            writer->name);
    return ckpt_fail(err, CKPT_UNSUPPORTED, "view=%s: no recipe makes a model of type '%s'",
                     writer->name, type ? type : "?");
}

/* Keep the config of the checkpoint's framework, if a checkpoint of the same framework is written.
 */
static void keep_framework(struct ckpt_opening *o)
{
    const struct ckpt_writer *writer = o->shared->opt->output.writer;
    const char *format = ckpt_json_str(o->cat->about, "format");

    if (writer && writer->recipes && format && strcmp(writer->recipes, format) == 0 &&
        o->cat->config)
        o->framework = json_incref(o->cat->config);
}

/* Warn of keys that whoever reads the view as a Hugging Face model will not find. A base has them.
 */
static int warn_of_lost_keys(struct ckpt_opening *o, const struct ckpt_writer *writer,
                             const struct ckpt_model *made, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_str_release) struct ckpt_str lost = {0};

    if (o->shared->base || writer->bare || writer->hub_files)
        return 0;
    if (ckpt_recipe_lost(o->shared->recipes, made, o->config, writer->recipes, &lost, err) < 0)
        return -1;
    if (lost.len)
        ckpt_catalog_warn(made->catalog,
                          "view=%s does not keep these keys of config.json: %s (base=DIR gives "
                          "them back when it is read as a Hugging Face model again)",
                          writer->name, ckpt_str_get(&lost));
    return 0;
}

static void note_no_config(struct ckpt_opening *o, const struct ckpt_writer *writer)
{
    if (writer->bare && o->config && !o->shared->base)
        ckpt_catalog_note(o->cat,
                          "view=%s has no place for config.json: to read it as a Hugging Face "
                          "model again, give base=DIR",
                          writer->name);
}

static int apply_backwards(struct ckpt_opening *o, const struct ckpt_writer *writer,
                           const struct ckpt_recipe_options *opt, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_model_freep) struct ckpt_model *model = NULL;
    bool done = false;

    if (o->config && ckpt_recipe_fits(o->shared->recipes, o->cat, opt, &done, err) < 0)
        return -1;
    if (!done)
        return no_recipe(o, writer, err);
    note_dtypes(o);
    if (ckpt_recipe_apply(o->shared->recipes, o->cat, opt, &model, err) < 0)
        return ckpt_err_in(err, "view=%s", writer->name);
    if (warn_of_lost_keys(o, writer, model, err) < 0)
        return -1;
    ckpt_catalog_free(o->cat);
    o->cat = ckpt_steal(&model->catalog);
    json_decref(o->framework);
    o->framework = ckpt_steal(&model->made);
    return 0;
}

/* Rows of the vocabulary on a rank (of all, where the format says so) are a multiple of this: as an
 * option says, else the checkpoint that is read, if it is the same framework's. */
static uint64_t vocab_multiple(const struct ckpt_opening *o)
{
    const struct ckpt_output *output = &o->shared->opt->output;
    uint64_t own;

    if (output->cut[CKPT_CUT_VOCAB])
        return output->cut[CKPT_CUT_VOCAB];
    if (ckpt_json_u64(o->framework, ckpt_output_keys[CKPT_CUT_VOCAB], &own) && own &&
        own <= CKPT_CUT_MOST)
        return own;
    return output->writer->vocab_multiple ? output->writer->vocab_multiple : 1;
}

/* Values that are computed have the hub's names: of the framework's tensors, which are parts of
 * several of them, they are not made. A mount of one view, and a view of that mount, is as good. */
static int check_values(const struct ckpt_opening *o, const char *view, struct ckpt_err *err)
{
    if (o->shared->opt->lora == CKPT_LORA_MERGE)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "view=%s is not made of a merged adapter in one step: mount or export "
                         "lora=merge, and give the result as the run for view=%s",
                         view, view);
    if (o->facts.is_adapter)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "'%s' is a LoRA adapter, which view=%s has no place for: mount or export "
                         "the merged model (lora=merge, with base=), and give that as the run",
                         ckpt_dir_path(o->dir), view);
    if (ckpt_config_is_quantized(o->config) && ckpt_is_quantized(o->cat))
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "the weights of '%s' are quantised, which view=%s has no place for: mount "
                         "or export it with the option dequantize, and give the result as the run",
                         ckpt_dir_path(o->dir), view);
    return 0;
}

/* Are the tensors an optimizer's states that become those of parameters which have q, k and v? As
 * an option says, else as the checkpoint that is read has them, if it is the same framework's. */
static bool fuses(const struct ckpt_opening *o, const struct ckpt_writer *writer)
{
    const enum ckpt_output_fused said = o->shared->opt->output.fuse_qkv;
    const size_t own = strlen(writer->recipes);

    if (!o->shared->opt->optimizer || !ckpt_state_is_moment(o->state) ||
        !(writer->keys & CKPT_WRITES_FUSED))
        return false;
    return said ? said == CKPT_OUTPUT_FUSED
                : o->other_form && o->recipe && strncmp(o->recipe, writer->recipes, own) == 0 &&
                      o->recipe[own] == '/';
}

/* Make the names of o->cat, which are the hub's, those of the framework; o->framework is its
 * config. Nothing to do for other views. UNSUPPORTED: no recipe makes such a model. */
static int to_output(struct ckpt_opening *o, struct ckpt_err *err)
{
    const struct ckpt_shared *s = o->shared;
    const struct ckpt_writer *writer = s->opt->output.writer;

    if (!writer)
        return 0;
    note_no_config(o, writer);
    if (!writer->recipes)
        return 0;
    const uint64_t tp = ckpt_output_parts(&s->opt->output, CKPT_CUT_TP),
                   multiple = vocab_multiple(o) * (writer->vocab_whole ? 1 : tp);
    o->fuses = fuses(o, writer);
    const struct ckpt_recipe_output output = {.view = writer->name,
                                              .tp = tp,
                                              .pp = ckpt_output_parts(&s->opt->output, CKPT_CUT_PP),
                                              .pad_to = multiple,
                                              .fuse_qkv = o->fuses,
                                              .config = o->framework};
    const struct ckpt_recipe_options convert = {.format = writer->recipes,
                                                .base_config = o->config,
                                                .back = true,
                                                .output = &output,
                                                .allow_missing = o->other_form,
                                                .allow_leftover = s->opt->allow_leftover,
                                                .layout_only = ckpt_state_is_moment(o->state)};

    if (ckpt_recipes_forced(s->recipes))
        return ckpt_fail(err, CKPT_USAGE,
                         "option recipe: view=%s needs the recipes of both directions: give a "
                         "directory of recipes instead of one file",
                         writer->name);
    return check_values(o, writer->name, err) < 0 ? -1 : apply_backwards(o, writer, &convert, err);
}

/* ---- states ---- */

/* Leave out the tensors of which the checkpoint has not the state that is shown. */
static int leave_out_states(struct ckpt_opening *o, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) const char **name = NULL;
    const struct ckpt_state_asked asked = ckpt_opening_asked(o);
    const bool renamed = o->renamed;

    if (ckpt_state_leave_out(&asked, o->cat, &name, err) < 0 ||
        (name && ckpt_opening_rename(o, name, err) < 0))
        return -1;
    o->renamed = renamed;
    return 0;
}

/* ---- all of it ---- */

int ckpt_opening_make_model(struct ckpt_opening *o, struct ckpt_err *err)
{
    keep_framework(o);
    if (name_tensors(o, err) < 0 || convert_names(o, err) < 0 || to_output(o, err) < 0 ||
        dequantize(o, err) < 0 || ckpt_merge_finish(o, err) < 0 || leave_out_states(o, err) < 0)
        return -1;
    ckpt_catalog_shrink(o->cat);
    return 0;
}

int ckpt_opening_cast_model(struct ckpt_opening *o, struct ckpt_err *err)
{
    return cast_tensors(o, err) < 0 || state_dtype(o, err) < 0 ? -1 : 0;
}
