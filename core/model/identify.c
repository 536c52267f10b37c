/* SPDX-License-Identifier: Apache-2.0 */
/* Whose names the tensors have, and which adapter there is. */
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "container/config.h"
#include "model/adapter.h"
#include "model/adapter_check.h"
#include "model/heads.h"
#include "model/lora.h"
#include "model/names.h"
#include "model/opening.h"
#include "model/wrappers.h"
#include "recipe/library/types.h"

/* The facts that hold for all types of models: an adapter does not say of which one it is. */
static const struct ckpt_type *any_type(const struct ckpt_opening *o)
{
    return ckpt_types_any(ckpt_recipes_types(o->shared->recipes));
}

static int find_names(struct ckpt_opening *o, struct ckpt_err *err)
{
    const struct ckpt_options *opt = o->shared->opt;
    bool found;

    if (opt->raw || ckpt_recipes_forced(o->shared->recipes))
        return 0;
    if (o->facts.names == CKPT_NAMES_HUB && !o->facts.is_adapter)
        return ckpt_wrappers_clean(o, err) < 0 || ckpt_heads_leave_out(o, err) < 0
                   ? -1
                   : ckpt_ties_name_embedding(o, err);
    if (o->facts.names != CKPT_NAMES_FRAMEWORK)
        return 0;
    if (ckpt_adapter_apply(o->cat, any_type(o), opt->lora == CKPT_LORA_ADAPTER, &o->facts, &found,
                           err) < 0)
        return -1;
    if (found || o->facts.own_names)
        return 0;
    if (ckpt_names_find_model(o, &found, err) < 0)
        return -1;
    if (found)
        o->facts.names = CKPT_NAMES_MEMORY;
    return 0;
}

/* Make the keys that a recipe of an adapter can ask for besides the framework's config: the
 * options, and the model's config under "_base", whose type an option may say. NULL: out of
 * memory. */
static json_t *keys_of_adapter(const struct ckpt_opening *o)
{
    const json_t *config = ckpt_opening_base_config(o);
    json_t *keys = json_deep_copy(o->shared->opt->overrides),
           *base = config ? json_deep_copy(config) : json_object();
    const char *type = ckpt_json_str(keys, "_model_type");

    if ((type && json_object_set_new(base, "model_type", json_string(type)) < 0) ||
        json_object_set_new(keys, "_base", base) < 0) {
        json_decref(keys);
        return NULL;
    }
    (void)json_object_del(keys, "_model_type"); /* the recipe's model is none of Hugging Face's */
    return keys;
}

/* Make PEFT's tensors and config of a framework's adapter. */
static int make_adapter(struct ckpt_opening *o, const struct ckpt_catalog *own,
                        struct ckpt_catalog **ret, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_model_freep) struct ckpt_model *model = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *keys = keys_of_adapter(o);
    const struct ckpt_recipe_options opt = {.overrides = keys};

    if (!keys)
        return ckpt_nomem(err);
    if (ckpt_recipe_apply(o->shared->recipes, own, &opt, &model, err) < 0)
        return -1;
    o->facts.adapter_config = json_incref(json_object_get(model->config, "adapter"));
    *ret = ckpt_steal(&model->catalog);
    return 0;
}

/* ---- merging an adapter into its base ---- */

/* The facts of the merged model: those of the adapter's checkpoint, but it has the base's split and
 * is not an adapter. */
static int describe(struct ckpt_opening *o, struct ckpt_err *err)
{
    const struct ckpt_weight_map *map = o->shared->base->facts.weight_map;
    struct ckpt_facts *f = &o->facts;

    json_decref(o->cat->about);
    json_decref(o->cat->warnings);
    o->cat->about = json_incref(o->adapter->about);
    o->cat->warnings = json_incref(o->adapter->warnings);
    f->is_adapter = f->bare_header = false;
    json_decref(ckpt_steal(&f->metadata)); /* the merged files are new, as save_pretrained's */
    ckpt_weight_map_unref(ckpt_steal(&f->weight_map));
    return map ? ckpt_weight_map_copy(map, &f->weight_map, err) : 0;
}

const char *ckpt_merge_folder(const struct ckpt_opening *o)
{
    return o->facts.files == CKPT_FILES_COMPLETE ? o->facts.files_at : "";
}

/* Read one of the adapter's configs, from the adapter or the base, or take the reader's; *ret is
 * NULL if there is none. */
static int read_config(const struct ckpt_opening *o, const char *name, json_t **ret,
                       struct ckpt_err *err)
{
    const char *below = ckpt_merge_folder(o);
    ckpt_cleanup(ckpt_freep) char *path = ckpt_asprintf("%s%s%s", below, *below ? "/" : "", name);

    *ret = NULL;
    if (!path)
        return ckpt_nomem(err);
    if (ckpt_config_read_if(o->dir, path, CKPT_CONFIG_MAX_BYTES, ret, err) < 0)
        return -1;
    if (!*ret && o->shared->base &&
        ckpt_config_read_if(o->shared->base->dir, name, CKPT_CONFIG_MAX_BYTES, ret, err) < 0)
        return -1;
    if (!*ret && strcmp(name, "adapter_config.json") == 0)
        *ret = json_incref(o->facts.adapter_config);
    return 0;
}

/* Say which base an adapter's config named where no option did, or could have named. USAGE: it is
 * not there. CONFLICT: this step's adapter names another than the first. */
static int tell_base(const struct ckpt_opening *o, struct ckpt_err *err)
{
    const struct ckpt_options *opt = o->shared->opt;
    ckpt_cleanup(ckpt_json_decrefp) json_t *config = NULL;

    if (opt->base && !opt->base_named)
        return 0;
    if (read_config(o, "adapter_config.json", &config, err) < 0)
        return -1;
    const char *name = ckpt_json_str_or(config, "base_model_name_or_path", "");
    if (!opt->base && *name)
        return ckpt_fail(
            err, CKPT_USAGE,
            "option lora=merge needs base=DIR: adapter_config.json of '%s' names '%s', "
            "which is neither a directory nor in the local hub cache",
            ckpt_dir_path(o->dir), name);
    if (opt->base && strcmp(name, opt->base_named) != 0)
        return ckpt_fail(err, CKPT_CONFLICT,
                         "adapter_config.json of '%s' names the base '%s', that of another step "
                         "'%s': open the step alone, or give base=DIR",
                         ckpt_dir_path(o->dir), name, opt->base_named);
    if (opt->base)
        ckpt_catalog_note(o->cat,
                          "the base is '%s', which adapter_config.json names; base=DIR gives "
                          "another",
                          ckpt_dir_path(o->shared->base->dir));
    return 0;
}

/* Move o->cat, the reader's catalogue of an adapter of any format, to o->adapter, and replace it by
 * a new catalogue of the base. o->facts become those of the merged model. */
static int merge_begin(struct ckpt_opening *o, struct ckpt_err *err)
{
    struct ckpt_catalog *model;
    bool found = o->facts.is_adapter;

    if (!found && ckpt_adapter_apply(o->cat, any_type(o), true, &o->facts, &found, err) < 0)
        return -1;
    if (!found)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "option lora=merge: '%s' has no adapter",
                         ckpt_dir_path(o->dir));
    if (tell_base(o, err) < 0)
        return -1;
    if (!o->shared->base || !o->shared->base->cat)
        return ckpt_fail(err, CKPT_USAGE,
                         "option lora=merge needs base=DIR, a model directory with weights");
    if (ckpt_base_catalog(o->shared->base, &model, err) < 0)
        return -1;
    o->adapter = ckpt_steal(&o->cat);
    o->cat = model;
    return describe(o, err);
}

/* Read what a trainer notes about the adapter in a file of its own; *ret points into *ret_file. */
static int read_notes(const struct ckpt_opening *o, json_t **ret_file,
                      struct ckpt_adapter_notes *ret, struct ckpt_err *err)
{
    for (const struct ckpt_trainer *const *t = ckpt_trainers; *t && !*ret_file; t++) {
        if ((*t)->adapter_file && read_config(o, (*t)->adapter_file, ret_file, err) < 0)
            return -1;
        if (*ret_file)
            (*t)->adapter(*ret_file, ret);
    }
    return 0;
}

int ckpt_merge_finish(struct ckpt_opening *o, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *adapter = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *file = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *before = NULL;
    struct ckpt_adapter_notes notes = {0};

    if (!o->adapter)
        return 0;
    if (read_config(o, "adapter_config.json", &adapter, err) < 0 ||
        read_notes(o, &file, &notes, err) < 0)
        return -1;
    json_t *alpha = json_object_get(o->shared->opt->overrides, "_lora_alpha");
    if (alpha && adapter && json_object_set_new(adapter, "lora_alpha", json_deep_copy(alpha)) < 0)
        return ckpt_nomem(err);
    const struct ckpt_lora_options opt = {.adapter = adapter,
                                          .notes = notes,
                                          .base_names = o->base_names,
                                          .type = ckpt_opening_type(o),
                                          .config = o->config};
    if (o->config && !(before = json_deep_copy(o->config)))
        return ckpt_nomem(err);
    if (ckpt_lora_merge(o->cat, o->adapter, &opt, err) < 0)
        return ckpt_err_in(err, "'%s'", ckpt_dir_path(o->dir));
    o->config_changed |= !json_equal(before, o->config);
    ckpt_catalog_freep(&o->adapter);
    json_decref(o->base_names); /* the view's names are the base's */
    o->base_names = NULL;
    return 0;
}

/* Divide a framework's checkpoint that has an adapter. With lora=merge and lora=base a model that
 * has its own base stays in o->cat, and *ret_done is true; else the adapter does. */
static int divide(struct ckpt_opening *o, bool joins, bool *ret_done, struct ckpt_err *err)
{
    const enum ckpt_lora_rule lora = o->shared->opt->lora;
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *own = NULL;
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *adapter = NULL;

    if (ckpt_adapter_divide(o->cat, &own, err) < 0)
        return -1;
    const size_t nbase = o->cat->tensors.len;
    *ret_done = joins && nbase;
    if (*ret_done && lora == CKPT_LORA_BASE)
        return 0;
    if (make_adapter(o, own, &adapter, err) < 0)
        return -1;
    if (*ret_done) {
        o->adapter = ckpt_steal(&adapter);
        return 0;
    }
    if (nbase && lora != CKPT_LORA_ADAPTER)
        ckpt_adapter_warn(adapter, nbase, o->cat->tensors.ptr[0].name);
    ckpt_catalog_free(o->cat);
    o->cat = ckpt_steal(&adapter);
    return 0;
}

/* Take the base that a whole PeftModel contains, a model under its own names. With lora=merge the
 * adapter is kept. */
static int take_peft_base(struct ckpt_opening *o, struct ckpt_catalog **base, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_facts_release) struct ckpt_facts unused = {
        0}; /* the view is not an adapter */
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *whole = ckpt_steal(&o->cat);
    bool found = false;

    o->cat = ckpt_steal(base);
    if (!ckpt_recipes_forced(o->shared->recipes) && ckpt_names_find_model(o, &found, err) < 0)
        return -1;
    if (!found)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "option lora: the tensors of the adapter's base in '%s' do not have "
                         "transformers' names (view=raw shows them)",
                         ckpt_dir_path(o->dir));
    o->facts.names = CKPT_NAMES_MEMORY;
    if (o->shared->opt->lora != CKPT_LORA_MERGE)
        return 0;
    if (ckpt_adapter_apply(whole, any_type(o), true, &unused, &found, err) < 0)
        return -1;
    o->adapter = ckpt_steal(&whole);
    return 0;
}

/* Handle lora=merge and lora=base. The base inside a whole PeftModel has priority over the option
 * `base`. */
static int find_lora(struct ckpt_opening *o, bool *ret_merged, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_catalog_freep) struct ckpt_catalog *base = NULL;

    if (!o->facts.is_adapter && ckpt_adapter_base(o->cat, any_type(o), &base, err) < 0)
        return -1;
    if (base)
        return take_peft_base(o, &base, err);
    if (o->shared->opt->lora == CKPT_LORA_BASE)
        return ckpt_fail(err, CKPT_UNSUPPORTED,
                         "option lora=base: '%s' is not a checkpoint of a whole PEFT model, base "
                         "and adapter together",
                         ckpt_dir_path(o->dir));
    *ret_merged = true;
    return merge_begin(o, err);
}

/* ---- does the adapter do something? ---- */

/* Make the text that an error about an adapter without values adds if a folder beside its file
 * holds a checkpoint, in which trainers keep them; "" if there is none. NULL: out of memory. */
static char *advice_of(const struct ckpt_opening *o)
{
    ckpt_cleanup(ckpt_entries_release) struct ckpt_entries entries = {0};
    struct ckpt_entry e;

    (void)ckpt_entries_read(o->dir, &entries, NULL);
    while (ckpt_entries_next(&entries, &e)) {
        ckpt_cleanup(ckpt_dir_unrefp) struct ckpt_dir *sub = NULL;
        if (e.kind != CKPT_ENTRY_DIR || ckpt_dir_open_below(o->dir, e.name, &sub, NULL) < 0)
            continue;
        const struct ckpt_reader *reader = ckpt_reader_probe(sub, NULL);
        if (reader)
            return ckpt_asprintf("; the folder '%s' beside it is a checkpoint of format %s, which "
                                 "may have them: give that",
                                 e.name, reader->name);
    }
    return strdup("");
}

/* Check the adapter that is shown or merged. One that a recipe makes of a framework's tensors has
 * the shapes that the recipe gives it. */
static int check_adapter(struct ckpt_opening *o, struct ckpt_err *err)
{
    struct ckpt_catalog *cat = o->adapter ? o->adapter : o->facts.is_adapter ? o->cat : NULL;
    const struct ckpt_base *base = o->shared->base;
    ckpt_cleanup(ckpt_json_decrefp) json_t *config = NULL;
    ckpt_cleanup(ckpt_freep) char *advice = NULL;
    struct ckpt_err own = {0};

    if (!cat || o->shared->opt->raw || o->facts.has_adapter)
        return 0;
    if (read_config(o, "adapter_config.json", &config, err) < 0)
        return -1;
    const struct ckpt_adapter_facts facts = {
        .config = config,
        .base = base,
        .type = ckpt_types_find(ckpt_recipes_types(o->shared->recipes),
                                base ? ckpt_json_str(base->config, "model_type") : NULL),
        .allow_partial = o->shared->opt->allow_partial};
    if (ckpt_adapter_check(cat, &facts, &own) == 0)
        return 0;
    if (!(advice = advice_of(o)))
        return ckpt_nomem(err);
    return ckpt_fail(err, own.code, "'%s': %s%s", ckpt_dir_path(o->dir), own.text, advice);
}

int ckpt_opening_identify(struct ckpt_opening *o, struct ckpt_err *err)
{
    const struct ckpt_options *opt = o->shared->opt;
    const bool joins = opt->lora == CKPT_LORA_MERGE || opt->lora == CKPT_LORA_BASE;
    struct ckpt_decide in = {.facts = &o->facts, .opt = opt, .base = o->shared->base};
    bool done = false;

    if (o->facts.is_adapter && !opt->raw &&
        ckpt_adapter_clean(o->cat, any_type(o), &o->facts, err) < 0)
        return ckpt_err_in(err, "'%s'", ckpt_dir_path(o->dir));
    if (o->facts.has_adapter && !opt->raw && !ckpt_recipes_forced(o->shared->recipes) &&
        divide(o, joins, &done, err) < 0)
        return -1;
    if (!done && (joins ? find_lora(o, &in.merged, err) : find_names(o, err)) < 0)
        return -1;
    if (opt->lora == CKPT_LORA_ADAPTER && !o->facts.is_adapter)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "option lora=adapter: '%s' has no adapter",
                         ckpt_dir_path(o->dir));
    if (check_adapter(o, err) < 0)
        return -1;
    in.has_config = o->cat->config != NULL;
    in.has_home = o->home.dir != NULL;
    in.as_base = o->as_base;
    in.is_foreign =
        ckpt_opening_base_config(o) && !ckpt_config_is_model(ckpt_opening_base_config(o));
    o->decision = ckpt_decide(&in);
    return 0;
}
