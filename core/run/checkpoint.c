/* SPDX-License-Identifier: Apache-2.0 */
/* Composing a view of one checkpoint. */
#include "run/checkpoint.h"

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/mem.h"
#include "base/str.h"
#include "ckpt/reader.h"
#include "recipe/types.h"
#include "run/adapter.h"
#include "run/check.h"
#include "run/dequantize.h"
#include "run/dtypes.h"
#include "run/merge.h"
#include "run/names.h"
#include "run/naming.h"
#include "run/rename.h"
#include "run/side.h"
#include "run/split.h"
#include "tensor/value.h"

enum { SLAB_BUDGET = 256 * 1024 * 1024 };

/* ---- shared ---- */

int ckpt_shared_new(const struct ckpt_options *opt, struct ckpt_shared **ret, struct ckpt_err *err)
{
    struct ckpt_shared *s;

    if (opt->raw && (opt->dequantize || opt->lora))
        return ckpt_fail(err, CKPT_USAGE, "option %s: view=raw shows tensors as they are stored",
                         opt->dequantize ? "dequantize" : "lora");
    if (!(s = calloc(1, sizeof *s)))
        return ckpt_nomem(err);
    atomic_init(&s->refs, 1);
    (void)pthread_mutex_init(&s->eval, NULL);
    if (ckpt_remarks_init(&s->remarks, err) < 0 || ckpt_options_copy(opt, &s->opt, err) < 0 ||
        ckpt_fdpool_new(0, &s->pool, err) < 0 || ckpt_slabs_new(SLAB_BUDGET, &s->slabs, err) < 0 ||
        ckpt_recipes_load(s->opt->recipe, &s->recipes, err) < 0 ||
        (s->opt->key_mapping && ckpt_renames_load(s->opt->key_mapping, &s->renames, err) < 0) ||
        (s->opt->base &&
         ckpt_base_open(s->opt->base, s->opt->follow_symlinks ? CKPT_LINKS_ANY : CKPT_LINKS_BENEATH,
                        s->pool, &s->base, err) < 0)) {
        ckpt_shared_unref(s);
        return -1;
    }
    *ret = s;
    return 0;
}

void ckpt_shared_unref(struct ckpt_shared *s)
{
    if (!s || atomic_fetch_sub(&s->refs, 1) != 1)
        return;
    ckpt_base_free(s->base);
    ckpt_recipes_free(s->recipes);
    ckpt_renames_free(s->renames);
    ckpt_slabs_free(s->slabs);
    ckpt_fdpool_unref(s->pool);
    ckpt_options_free(s->opt);
    ckpt_remarks_release(&s->remarks);
    (void)pthread_mutex_destroy(&s->eval);
    free(s);
}

struct ckpt_view *ckpt_view_hold(struct ckpt_view *view)
{
    atomic_fetch_add(&view->refs, 1);
    return view;
}

void ckpt_view_release(struct ckpt_view *view)
{
    if (!view || atomic_fetch_sub(&view->refs, 1) != 1)
        return;
    ckpt_slabs_forget(view->shared->slabs, &view->reading);
    ckpt_vtree_free(view->tree);
    ckpt_catalog_free(view->cat);
    ckpt_catalog_free(view->adapter);
    ckpt_save_unref(view->save);
    ckpt_dir_unref(view->dir);
    ckpt_facts_release(&view->facts);
    json_decref(view->about);
    json_decref(view->config);
    json_decref(view->warnings);
    json_decref(view->base_names);
    free(view->recipe);
    free(view->source);
    free(view->name);
    ckpt_shared_unref(view->shared);
    free(view);
}

/* ---- catalogue ---- */

/* The reader's names are the model's: no recipe is needed. */
static bool has_hf_names(const struct ckpt_view *v) { return v->facts.names == CKPT_NAMES_HUB; }

static const struct ckpt_types *types_of(const struct ckpt_view *v)
{
    return ckpt_recipes_types(v->shared->recipes);
}

/* Once the view's config is known. */
static const struct ckpt_type *type_of(const struct ckpt_view *v)
{
    return ckpt_types_find(types_of(v), ckpt_json_str(v->config, "model_type"));
}

/* Such a checkpoint is its own model: its config is what it says, or else what the base says, less
 * what options override. */
static int model_of_hf(struct ckpt_view *v, struct ckpt_catalog **src, struct ckpt_err *err)
{
    const json_t *overrides = v->shared->opt->overrides, *config;
    const char *key;
    json_t *value;

    v->cat = ckpt_steal(src);
    config = v->cat->config;
    if (!config && v->shared->base && !v->facts.is_adapter)
        config = v->shared->base->config;
    v->config = json_deep_copy(config);
    if (config && !v->config)
        return ckpt_nomem(err);
    json_object_foreach((json_t *)overrides, key, value)
    {
        if (key[0] == '_')
            continue;
        if (!v->config)
            return ckpt_fail(err, CKPT_USAGE,
                             "option %s: '%s' has no config.json that it could change", key,
                             ckpt_dir_path(v->dir));
        if (json_object_set_new(v->config, key, json_deep_copy(value)) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

/* The catalogue's names are the hub's, or, without a catalogue, the base's index's. */
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

static int match_names(struct ckpt_view *v, const struct ckpt_catalog *cat, struct ckpt_err *err)
{
    const struct ckpt_shared *s = v->shared;
    struct ckpt_renames *own = NULL;
    int result = 0;

    if (!s->renames && ckpt_renames_of_type(type_of(v), &own, err) < 0)
        return -1;
    if (s->renames || own)
        result = rename_base(v, own ? own : s->renames, cat, err);
    ckpt_renames_free(own);
    return result;
}

/* A run saves the names that the model has in memory; the base may have the hub's. */
static int match_base(struct ckpt_view *v, struct ckpt_err *err)
{
    const struct ckpt_base *base = v->shared->base;

    return base ? match_names(v, base->cat, err) : 0;
}

static int check_model(struct ckpt_view *v, struct ckpt_err *err)
{
    const struct ckpt_check c = {.type = type_of(v),
                                 .base = v->shared->base,
                                 .base_names = v->base_names,
                                 .config = v->config,
                                 .complete = v->own_names,
                                 .allow_partial = v->shared->opt->allow_partial};

    return ckpt_check_model(&c, v->cat, v->warnings, err);
}

/* The base's config, or the checkpoint's own. */
static const json_t *lent_config(const struct ckpt_view *v, const struct ckpt_catalog *cat)
{
    const struct ckpt_base *base = v->shared->base;
    return base && base->config ? base->config : cat->config;
}

/* For a model under its own names, transformers' conversions; else what the framework's names ask
 * for. */
static struct ckpt_recipe_options recipe_options(const struct ckpt_view *v,
                                                 const struct ckpt_catalog *src)
{
    const struct ckpt_shared *s = v->shared;

    return (struct ckpt_recipe_options){
        .format = v->own_names ? "transformers" : NULL,
        .base_config = v->own_names ? lent_config(v, src)
                       : s->base    ? s->base->config
                                    : NULL,
        .overrides = s->opt->overrides,
        .allow_partial = s->opt->allow_partial,
        .allow_leftover = s->opt->allow_leftover,
    };
}

static int model_of_recipe(struct ckpt_view *v, const struct ckpt_catalog *src,
                           struct ckpt_err *err)
{
    const struct ckpt_shared *s = v->shared;
    const struct ckpt_recipe_options opt = recipe_options(v, src);
    ckpt_cleanup(ckpt_model_freep) struct ckpt_model *model = NULL;

    if (ckpt_recipe_apply(s->recipes, src, &opt, &model, err) < 0)
        return -1;
    v->cat = ckpt_steal(&model->catalog);
    v->config = ckpt_steal(&model->config);
    v->recipe = ckpt_steal(&model->recipe);
    return 0;
}

/* The recipe's catalogue may repeat what the reader said. */
static int add_warnings(json_t *all, const json_t *more)
{
    size_t i, k;
    json_t *text, *old;

    json_array_foreach(more, i, text)
    {
        bool known = false;
        json_array_foreach(all, k, old) known |= json_equal(text, old);
        if (!known && json_array_append(all, text) < 0)
            return -1;
    }
    return 0;
}

/* That config, with what options override. */
static int config_of_base(struct ckpt_view *v, struct ckpt_err *err)
{
    const json_t *config = lent_config(v, v->cat);
    const json_t *overrides = v->shared->opt->overrides;
    const char *key;
    json_t *value;

    if (!config) {
        ckpt_catalog_warn(v->cat, "the checkpoint has no config.json; base=DIR lends one");
        return 0;
    }
    if (!(v->config = json_deep_copy(config)))
        return ckpt_nomem(err);
    json_object_foreach((json_t *)overrides, key, value)
    {
        if (key[0] != '_' && json_object_set_new(v->config, key, json_deep_copy(value)) < 0)
            return ckpt_nomem(err);
    }
    return 0;
}

/* transformers 5 converts some families when it saves them (experts, which it stacks in memory, are
 * taken apart): recipes of their own say how. */
static int names_of_hub(struct ckpt_view *v, struct ckpt_err *err)
{
    const struct ckpt_recipe_options opt = recipe_options(v, v->cat);
    bool done;

    if (v->shared->opt->memory)
        return 0;
    if (ckpt_names_convert(&v->cat, v->shared->recipes, &opt, &done, &v->recipe, err) < 0)
        return -1;
    return done ? 0 : ckpt_names_check_fused(v->cat, types_of(v), opt.base_config, err);
}

/* A checkpoint of any format that holds a transformers model under its own names. *src is taken if
 * it is one. */
static int model_of_names(struct ckpt_view *v, struct ckpt_catalog **src, struct ckpt_err *err)
{
    const struct ckpt_shared *s = v->shared;
    bool found;

    if (ckpt_recipes_forced(s->recipes))
        return 0;
    if (ckpt_names_apply(*src, types_of(v), s->base, lent_config(v, *src), s->opt->allow_leftover,
                         &found, err) < 0)
        return -1;
    if (!found)
        return 0;
    v->cat = ckpt_steal(src);
    v->own_names = true;
    return names_of_hub(v, err) < 0 || config_of_base(v, err) < 0 || check_model(v, err) < 0 ? -1
                                                                                             : 0;
}

/* A checkpoint of any format that holds LoRA keys. *src is taken if it is one. */
static int adapter_of_names(struct ckpt_view *v, struct ckpt_catalog **src, struct ckpt_err *err)
{
    bool found;

    if (ckpt_recipes_forced(v->shared->recipes))
        return 0;
    if (ckpt_adapter_apply(*src, ckpt_types_any(types_of(v)),
                           v->shared->opt->lora == CKPT_LORA_ADAPTER, &v->facts, &found, err) < 0)
        return -1;
    return found ? model_of_hf(v, src, err) : 0;
}

/* lora=merge: the base's model; the adapter waits until the base is dequantised. *src is taken. */
static int model_to_merge(struct ckpt_view *v, struct ckpt_catalog **src, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *model = NULL;

    return ckpt_merge_begin(v, src, &model, err) < 0 || model_of_hf(v, &model, err) < 0 ||
                   match_base(v, err) < 0
               ? -1
               : 0;
}

/* The base that a whole PeftModel holds, a model under its own names; with lora=merge its adapter
 * waits in v->adapter. *src and *base are taken. */
static int model_of_peft(struct ckpt_view *v, struct ckpt_catalog **src, struct ckpt_catalog **base,
                         struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_facts_release) struct ckpt_facts adapter = {0}; /* the view is no adapter */
    bool found;

    json_decref(v->about);
    json_decref(v->warnings);
    v->about = json_incref((*base)->about);
    v->warnings = json_incref((*base)->warnings);
    if (model_of_names(v, base, err) < 0)
        return -1;
    if (!v->cat)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "option lora: the tensors of the adapter's base in '%s' do not have "
                         "transformers' names (view=raw shows them)",
                         ckpt_dir_path(v->dir));
    if (v->shared->opt->lora == CKPT_LORA_BASE)
        return 0;
    if (ckpt_adapter_apply(*src, ckpt_types_any(types_of(v)), true, &adapter, &found, err) < 0 ||
        match_names(v, v->cat, err) < 0)
        return -1;
    v->adapter = ckpt_steal(src);
    return 0;
}

/* lora=merge, lora=base: a whole PeftModel's own base goes before one that is lent. */
static int model_of_lora(struct ckpt_view *v, struct ckpt_catalog **src, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *base = NULL;

    if (!v->facts.is_adapter &&
        ckpt_adapter_base(*src, ckpt_types_any(types_of(v)), &base, err) < 0)
        return -1;
    if (base)
        return model_of_peft(v, src, &base, err);
    if (v->shared->opt->lora == CKPT_LORA_BASE)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "option lora=base: '%s' is no checkpoint of a whole PEFT model, base and "
                         "adapter together",
                         ckpt_dir_path(v->dir));
    return model_to_merge(v, src, err);
}

static int require_adapter(const struct ckpt_view *v, struct ckpt_err *err)
{
    if (v->shared->opt->lora != CKPT_LORA_ADAPTER || v->facts.is_adapter)
        return 0;
    return ckpt_fail(err, CKPT_UNSUPPORTED, "option lora=adapter: '%s' holds no adapter",
                     ckpt_dir_path(v->dir));
}

static int make_hub_model(struct ckpt_view *v, struct ckpt_catalog **src, struct ckpt_err *err)
{
    const enum ckpt_lora_rule lora = v->shared->opt->lora;

    if (lora == CKPT_LORA_MERGE || lora == CKPT_LORA_BASE)
        return model_of_lora(v, src, err);
    if (v->shared->opt->raw) {
        v->cat = ckpt_steal(src);
        return 0;
    }
    if (v->facts.is_hub_dir || v->facts.is_adapter)
        return model_of_hf(v, src, err);
    if (has_hf_names(v))
        return model_of_hf(v, src, err) < 0 || match_base(v, err) < 0 ? -1 : check_model(v, err);
    if (adapter_of_names(v, src, err) < 0 || (!v->cat && model_of_names(v, src, err) < 0))
        return -1;
    if (v->cat)
        return 0;
    if (model_of_recipe(v, *src, err) < 0)
        return -1;
    return add_warnings(v->warnings, v->cat->warnings) < 0 ? ckpt_nomem(err) : 0;
}

/* What names_of_hub does, backwards: for models that are to be filled. A directory of the hub's
 * that is to be split anew goes there and back: transformers would split it after loading it, in
 * the order, and the blocks, of what it has in memory. */
static int names_of_memory(struct ckpt_view *v, struct ckpt_err *err)
{
    const struct ckpt_options *opt = v->shared->opt;
    struct ckpt_recipe_options convert = {.format = "hub", .base_config = v->config};
    bool resplit = v->facts.is_hub_dir && opt->max_shard_size && !opt->raw && !opt->memory;

    if ((!opt->memory && !resplit) || v->own_names)
        return 0;
    if (ckpt_names_convert(&v->cat, v->shared->recipes, &convert, &v->ordered, NULL, err) < 0)
        return ckpt_err_in(err, "in memory");
    if (!resplit || !v->ordered)
        return 0;
    convert.format = "transformers";
    return ckpt_names_convert(&v->cat, v->shared->recipes, &convert, &v->ordered, NULL, err);
}

static int make_model(struct ckpt_view *v, struct ckpt_catalog **src, struct ckpt_err *err)
{
    v->about = json_incref((*src)->about);
    v->warnings = json_incref((*src)->warnings);
    if (make_hub_model(v, src, err) < 0 || require_adapter(v, err) < 0)
        return -1;
    return names_of_memory(v, err);
}

/* ---- quantisation ---- */

/* Is config.json what the checkpoint itself says? */
static bool has_own_config(const struct ckpt_view *v) { return has_hf_names(v) && v->cat->config; }

/* A config that speaks of a quantisation although the tensors are ordinary: they have been made so,
 * or training started from a base that is quantised. */
static void drop_quantization(struct ckpt_view *v)
{
    static const char key[] = "quantization_config";
    json_t *text = json_object_get(v->config, "text_config");

    if ((has_own_config(v) && !v->shared->opt->dequantize) || ckpt_is_quantized(v->cat))
        return;
    /* v->config is the view's own, a deep copy */
    v->config_changed = json_object_del(v->config, key) == 0;
    v->config_changed |= json_object_del(text, key) == 0;
}

static int dequantize(struct ckpt_view *v, struct ckpt_err *err)
{
    if (v->shared->opt->raw || v->facts.is_adapter)
        return 0;
    if (v->shared->opt->dequantize &&
        ckpt_dequantize(v->cat, v->config, v->facts.weight_map, err) < 0)
        return ckpt_err_in(err, "'%s'", ckpt_dir_path(v->dir));
    drop_quantization(v);
    return 0;
}

/* ---- dtypes ---- */

/* Automodel's mapping may cover one rank's tensors only; its own export leaves the others as they
 * are. */
static int warn_unknown(struct ckpt_view *v, const struct ckpt_tensor *t, size_t n,
                        struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *line = ckpt_asprintf(
        "the dtypes of %zu tensors ('%s' ...) are not in fqn_to_dtype_mapping.json%s: shown as "
        "stored, %s",
        n, t->name, v->shared->base ? " nor in the base" : "; base= may know them",
        ckpt_dtype_name(t->dtype));

    return !line || json_array_append_new(v->warnings, json_string(line)) < 0 ? ckpt_nomem(err) : 0;
}

static int cast_tensors(struct ckpt_view *v, bool *ret_any, struct ckpt_err *err)
{
    const struct ckpt_dtypes dtypes = {.opt = v->shared->opt,
                                       .base = v->facts.is_adapter ? NULL : v->shared->base,
                                       .mapping = v->facts.dtypes,
                                       .base_names = v->base_names,
                                       .keeps = &type_of(v)->keeps_dtype,
                                       .buffers = &type_of(v)->buffers,
                                       .hf_names = has_hf_names(v)};

    const struct ckpt_tensor *unknown = NULL;
    size_t nunknown = 0;

    *ret_any = false;
    for (size_t i = 0; i < v->cat->tensors.len; i++) {
        const struct ckpt_tensor *t = &v->cat->tensors.ptr[i];
        enum ckpt_dtype want = ckpt_dtypes_wanted(&dtypes, t);
        if (want == t->dtype) {
            if (!ckpt_dtypes_unknown(&dtypes, t))
                continue;
            if (nunknown++ == 0)
                unknown = t;
            continue;
        }
        *ret_any = true;
        if (ckpt_value_cast(v->cat, i, (int)want, err) < 0)
            return -1;
    }
    return *ret_any && nunknown ? warn_unknown(v, unknown, nunknown, err) : 0;
}

/* The dtype of most floating elements: what transformers would call the model's. */
static const char *main_dtype(const struct ckpt_catalog *cat)
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

/* transformers 5 reads "dtype", 4.x "torch_dtype"; a base's config keeps the one that it has. */
static int state_dtype(struct ckpt_view *v, struct ckpt_err *err)
{
    const char *name = main_dtype(v->cat);

    if (!v->config || !name)
        return 0;
    if (v->own_names || v->config_changed || has_hf_names(v)) {
        /* a config without a dtype says float32 */
        bool old = json_object_get(v->config, "torch_dtype") != NULL;
        bool new =
            json_object_get(v->config, "dtype") != NULL || (!old && strcmp(name, "float32") != 0);
        if ((old && json_object_set_new(v->config, "torch_dtype", json_string(name)) < 0) ||
            (new &&json_object_set_new(v->config, "dtype", json_string(name)) < 0))
            return ckpt_nomem(err);
        return 0;
    }
    if (json_object_set_new(v->config, "dtype", json_string(name)) < 0 ||
        json_object_set_new(v->config, "torch_dtype", json_string(name)) < 0)
        return ckpt_nomem(err);
    return 0;
}

/* ---- the tree ---- */

static int64_t newest_shard(const struct ckpt_catalog *cat)
{
    int64_t newest = 0;

    for (size_t i = 0; i < cat->sources.len; i++) {
        struct ckpt_file_id id;
        if (ckpt_source_file_id(cat->sources.ptr[i], &id) && id.mtime_ns > newest)
            newest = id.mtime_ns;
    }
    return newest;
}

/* A config without a dtype means float32. */
static bool says_dtype_of(const json_t *config, const struct ckpt_catalog *cat)
{
    const char *says = ckpt_json_str(config, "dtype"), *is = main_dtype(cat);

    if (!says)
        says = ckpt_json_str(config, "torch_dtype");
    return is && strcmp(says ? says : "float32", is) == 0;
}

/* A base's config is the model's to the letter, if a recipe made the model in its image: no option
 * changed a number, and the dtype is the one it says. */
static bool lends_config(const struct ckpt_view *v)
{
    const struct ckpt_base *base = v->shared->base;
    const char *key;
    json_t *value;

    if (!v->recipe || v->own_names || !base || !base->config)
        return false;
    json_object_foreach(v->shared->opt->overrides, key, value)
    {
        if (key[0] != '_')
            return false;
    }
    return says_dtype_of(base->config, v->cat);
}

/* The checkpoint's own files; where it has no config.json, the base's too. */
static int collect_sides(struct ckpt_view *v, struct ckpt_sides *sides, struct ckpt_err *err)
{
    const struct ckpt_shared *s = v->shared;
    const struct ckpt_facts *f = &v->facts;
    const char *own = f->files_at, *config = f->is_adapter ? "adapter_config.json" : "config.json";
    const bool lend = s->base && f->files != CKPT_FILES_COMPLETE;

    if (s->opt->raw)
        return 0;
    if (v->merged)
        return ckpt_merge_sides(v, sides, err);
    if (own && ckpt_sides_add(sides, v->dir, own,
                              f->files >= CKPT_FILES_ALL ? CKPT_SIDE_ALL : CKPT_SIDE_TOKENIZER,
                              s->pool, err) < 0)
        return -1;
    if (own && f->files == CKPT_FILES_CONFIG &&
        ckpt_sides_add_one(sides, v->dir, own, "config.json", s->pool, err) < 0)
        return -1;
    if (lend && ckpt_sides_add(sides, s->base->dir, "", CKPT_SIDE_TOKENIZER, s->pool, err) < 0)
        return -1;
    if (own && f->is_adapter && ckpt_sides_add_one(sides, v->dir, own, config, s->pool, err) < 0)
        return -1;
    if (lend && (has_hf_names(v) || lends_config(v)) &&
        ckpt_sides_add_one(sides, s->base->dir, "", config, s->pool, err) < 0)
        return -1;
    if (f->is_adapter && !ckpt_sides_has(sides, config))
        ckpt_catalog_warn(v->cat, "the adapter has no %s; base=DIR lends one", config);
    return 0;
}

/* The split that the checkpoint asks for, else the base's, else that of the HF directory itself; an
 * explicit max_shard_size beats them all. *ret is new or NULL. */
static int choose_weight_map(const struct ckpt_view *v, json_t **ret, struct ckpt_err *err)
{
    json_t *own = v->facts.weight_map;
    const struct ckpt_base *base = v->shared->base;

    *ret = NULL;
    if ((v->shared->opt->max_shard_size && !v->facts.is_adapter) || v->shared->opt->raw ||
        v->shared->opt->memory)
        return 0;
    if (base && !own && v->facts.split_as_base)
        return ckpt_split_by_base(v->cat, base, v->base_names, type_of(v), ret, err);
    if (!base || !base->weight_map || (own && !v->facts.is_hub_dir)) {
        *ret = json_incref(own);
        return 0;
    }
    *ret =
        json_deep_copy(base->weight_map); /* other views may be opened now, and count references */
    return *ret ? 0 : ckpt_nomem(err);
}

/* Does config.json pass through to the letter? Not if an option changed what it says, nor if it
 * speaks of the dtypes before a cast: Automodel's is that of its export, and the base's that of
 * what we cast to. */
static bool keeps_config(const struct ckpt_view *v, bool cast)
{
    const struct ckpt_options *opt = v->shared->opt;

    if (v->config_changed)
        return false;
    if (lends_config(v))
        return true;
    if (!has_hf_names(v) || json_object_size(opt->overrides))
        return false;
    if (!v->cat->config)
        return says_dtype_of(v->config, v->cat);
    return !cast || (opt->dtype_rule == CKPT_DTYPE_AUTO && v->facts.split_as_base);
}

/* A model that was made from a config alone is saved in the order of its modules; after
 * from_pretrained, and if transformers converts its weights, in that of names. */
static bool is_fresh(const struct ckpt_view *v)
{
    const struct ckpt_base *base = v->shared->base;

    return has_hf_names(v) && !v->facts.is_hub_dir && base && !base->cat && !base->weight_map &&
           !type_of(v)->converted;
}

/* num_parameters() of transformers, and with it an index's total_parameters, counts no buffers. */
static uint64_t buffer_numel(const struct ckpt_view *v)
{
    const struct ckpt_texts *ends = &type_of(v)->buffers;
    uint64_t n = 0;

    for (size_t i = 0; i < v->cat->tensors.len; i++)
        if (ckpt_texts_end(ends, v->cat->tensors.ptr[i].name))
            n += v->cat->tensors.ptr[i].numel; /* the tree refuses more bytes than 2^63 */
    return n;
}

static int make_tree(struct ckpt_view *v, bool cast, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_sides_release) struct ckpt_sides sides = {0};
    ckpt_cleanup(ckpt_json_decrefp) json_t *generation = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *map = NULL;
    struct ckpt_vtree_options opt = {
        .index_name = v->facts.index_name,
        .bare = v->facts.bare_header && !v->shared->opt->raw,
        .max_shard_size = v->shared->opt->max_shard_size,
        .sort = !v->recipe && !v->own_names && !v->ordered && !is_fresh(v),
        .buffer_numel = buffer_numel(v),
        .mtime_ns = newest_shard(v->cat),
    };

    if (collect_sides(v, &sides, err) < 0 || choose_weight_map(v, &map, err) < 0)
        return -1;
    opt.weight_map = map;
    if (v->config && !keeps_config(v, cast)) {
        opt.config = v->config;
        ckpt_sides_remove(&sides, "config.json");
    }
    if (v->config && !has_hf_names(v) && !ckpt_sides_has(&sides, "generation_config.json")) {
        if (ckpt_generation_config(v->config, &generation, err) < 0)
            return -1;
        opt.generation = generation;
    }
    opt.side = sides.files.ptr;
    opt.nside = sides.files.len;
    if (sides.mtime_ns > opt.mtime_ns)
        opt.mtime_ns = sides.mtime_ns;
    if (ckpt_vtree_new(v->cat, &opt, &v->tree, err) < 0)
        return -1;
    ckpt_facts_release(&v->facts); /* large, and used up */
    json_decref(v->base_names);
    v->base_names = NULL;
    return 0;
}

/* ---- identity ---- */

/* Same checkpoint, same options: same number, on every mount. */
static uint64_t generation_of(const struct ckpt_view *v, const char *step)
{
    uint64_t h = XXH3_64bits_withSeed(step, strlen(step), ckpt_options_hash(v->shared->opt));

    for (size_t i = 0; i < v->cat->sources.len; i++) {
        struct ckpt_file_id id;
        if (ckpt_source_file_id(v->cat->sources.ptr[i], &id)) {
            uint64_t part[3] = {id.size, (uint64_t)id.mtime_ns, (uint64_t)id.ctime_ns};
            h = XXH3_64bits_withSeed(part, sizeof part, h);
        }
    }
    return h;
}

static char *source_text(const struct ckpt_view *v, const char *step)
{
    const char *format = ckpt_json_str(v->about, "format"),
               *version = ckpt_json_str(v->about, "version");
    uint64_t number;
    char digits[32] = "";

    if (ckpt_json_u64(v->about, "step", &number))
        (void)snprintf(digits, sizeof digits, "%llu", (unsigned long long)number);
    ckpt_cleanup(ckpt_freep) char *printable = ckpt_printable(step);
    const char *name = *digits ? digits : printable;
    if (!name)
        return NULL;
    return ckpt_asprintf("%s%s%s%s%s", format ? format : "?", version ? " " : "",
                         version ? version : "", *name ? ", step " : "", name);
}

/* ---- open ---- */

/* Opening reads many headers in several threads; what that leaves in malloc's pools is not needed
 * again. */
static void give_back_memory(void)
{
#ifdef __GLIBC__
    (void)malloc_trim(0);
#endif
}

/* The reader's catalogue, if it is of one save. */
static int read_save(struct ckpt_view *v, const struct ckpt_reader *reader,
                     const struct ckpt_reader_options *opt, const struct ckpt_save *before,
                     struct ckpt_catalog **ret, struct ckpt_err *err)
{
    const struct ckpt_save_marker marker = ckpt_save_marker_of(reader, v->dir);
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *cat = NULL;
    struct ckpt_err mixed = {0};

    if (reader->load(v->dir, opt, &v->facts, &cat, err) < 0 ||
        ckpt_save_new(cat, v->dir, reader, &marker, atomic_load(&v->shared->watched), &v->save,
                      err) < 0)
        return -1;
    if (ckpt_save_marker_of(reader, v->dir).hash != marker.hash)
        return ckpt_fail(err, CKPT_STALE, "'%s' was saved again while it was opened: try again",
                         ckpt_dir_path(v->dir));
    if (ckpt_save_accept(v->save, before, &mixed) < 0) {
        if (!v->shared->opt->allow_mixed || mixed.code != CKPT_CONFLICT)
            return ckpt_fail(err, mixed.code, "%s", mixed.text);
        ckpt_catalog_warn(cat, "%s", mixed.text);
    }
    if (!v->facts.files_at) {
        v->facts.files_at = reader->side_files;
        v->facts.files = CKPT_FILES_TOKENIZER;
    }
    *ret = ckpt_steal(&cat);
    return 0;
}

static bool wants_masters(const struct ckpt_options *opt)
{
    return opt->dtype_rule == CKPT_DTYPE_CAST && opt->dtype == CKPT_F32;
}

static int open_into(struct ckpt_view *v, const char *step, const struct ckpt_save *before,
                     struct ckpt_err *err)
{
    const struct ckpt_options *opt = v->shared->opt;
    const struct ckpt_naming naming = ckpt_naming_of(types_of(v));
    struct ckpt_reader_options ropt = {
        .pool = v->shared->pool,
        .log = &opt->log,
        .naming = &naming,
        .allow_partial = opt->allow_partial,
        .states = opt->raw,
        .masters = wants_masters(opt),
    };
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *src = NULL;
    const struct ckpt_reader *reader = ckpt_reader_probe(v->dir, err);
    bool cast;

    if (!reader || read_save(v, reader, &ropt, before, &src, err) < 0 ||
        make_model(v, &src, err) < 0 || dequantize(v, err) < 0 || ckpt_merge_finish(v, err) < 0)
        return -1;
    ckpt_catalog_shrink(v->cat);
    if (cast_tensors(v, &cast, err) < 0 || state_dtype(v, err) < 0 || make_tree(v, cast, err) < 0)
        return -1;
    v->generation = generation_of(v, step);
    v->source = source_text(v, step);
    v->name = strdup(*step ? step : ckpt_dir_real_name(v->dir));
    return v->source && v->name ? 0 : ckpt_nomem(err);
}

int ckpt_checkpoint_explain(struct ckpt_view *v, const char *tensor, json_t **ret,
                            struct ckpt_err *err)
{
    const struct ckpt_shared *s = v->shared;
    const struct ckpt_naming naming = ckpt_naming_of(types_of(v));
    const struct ckpt_reader_options ropt = {.pool = s->pool,
                                             .log = &s->opt->log,
                                             .naming = &naming,
                                             .allow_partial = s->opt->allow_partial,
                                             .masters = wants_masters(s->opt)};
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *src = NULL;
    ckpt_cleanup(ckpt_facts_release) struct ckpt_facts facts = {0};
    const struct ckpt_reader *reader = ckpt_reader_probe(v->dir, err);
    bool found;

    *ret = NULL;
    if (!v->recipe)
        return 0;
    if (!reader || reader->load(v->dir, &ropt, &facts, &src, err) < 0 ||
        (v->own_names && ckpt_names_apply(src, types_of(v), s->base, lent_config(v, src),
                                          s->opt->allow_leftover, &found, err) < 0))
        return -1;
    const struct ckpt_recipe_options opt = recipe_options(v, src);
    return ckpt_recipe_explain(s->recipes, src, &opt, tensor, ret, err);
}

int ckpt_checkpoint_check(const struct ckpt_view *view, struct ckpt_err *err)
{
    if (!atomic_load(&view->mixed))
        return 0;
    return ckpt_fail(err, CKPT_STALE,
                     "'%s' was opened while it was being saved again, so that its shards may be of "
                     "two saves: open it again",
                     ckpt_dir_path(view->dir));
}

int ckpt_checkpoint_marker(const struct ckpt_view *v, struct ckpt_marker **ret,
                           struct ckpt_err *err)
{
    struct ckpt_shared *s = v->shared;
    int rc;

    (void)pthread_mutex_lock(&s->eval);
    rc = ckpt_marker_new(s->recipes, v->cat, s->opt->raw ? NULL : v->config, ret, err);
    (void)pthread_mutex_unlock(&s->eval);
    return rc;
}

int ckpt_checkpoint_open(struct ckpt_shared *shared, struct ckpt_dir *dir, const char *step,
                         const struct ckpt_save *before, struct ckpt_view **ret,
                         struct ckpt_err *err)
{
    struct ckpt_view *v = calloc(1, sizeof *v);

    if (!v)
        return ckpt_nomem(err);
    atomic_init(&v->refs, 1);
    atomic_fetch_add(&shared->refs, 1);
    v->shared = shared;
    v->dir = ckpt_dir_ref(dir);
    v->reading = (struct ckpt_reading){.slabs = shared->slabs, .stats = &shared->stats};
    if (open_into(v, step, before, err) < 0) {
        ckpt_view_release(v);
        return -1;
    }
    give_back_memory();
    ckpt_remarks_add(&shared->remarks, &shared->opt->log, step, v->warnings);
    *ret = v;
    return 0;
}
