/* SPDX-License-Identifier: Apache-2.0 */
/* Making one view of an adapter and its base. */
#include "model/opening.h"

#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "container/config.h"
#include "model/adapter.h"
#include "model/lora.h"
#include "model/side.h"
#include "recipe/library/types.h"

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
    ckpt_weight_map_unref(ckpt_steal(&f->weight_map));
    return map ? ckpt_weight_map_copy(map, &f->weight_map, err) : 0;
}

int ckpt_merge_begin(struct ckpt_opening *o, struct ckpt_err *err)
{
    struct ckpt_catalog *model;
    bool found = o->facts.is_adapter;

    if (!found && ckpt_adapter_apply(o->cat, ckpt_types_any(ckpt_recipes_types(o->shared->recipes)),
                                     true, &o->facts, &found, err) < 0)
        return -1;
    if (!found)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "option lora=merge: '%s' has no adapter",
                         ckpt_dir_path(o->dir));
    if (ckpt_lora_base(o->shared->base, &model, err) < 0)
        return -1;
    o->adapter = ckpt_steal(&o->cat);
    o->cat = model;
    return describe(o, err);
}

/* The folder with the adapter's own files. */
static const char *own_folder(const struct ckpt_opening *o)
{
    return o->facts.files == CKPT_FILES_COMPLETE ? o->facts.files_at : "";
}

/* Read one of the adapter's configs, from the adapter or the base, or take the reader's; *ret is
 * NULL if there is none. */
static int read_config(const struct ckpt_opening *o, const char *name, json_t **ret,
                       struct ckpt_err *err)
{
    const char *below = own_folder(o);
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

int ckpt_merge_finish(struct ckpt_opening *o, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *adapter = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *automodel = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *before = NULL;

    if (!o->adapter)
        return 0;
    if (read_config(o, "adapter_config.json", &adapter, err) < 0 ||
        read_config(o, "automodel_peft_config.json", &automodel, err) < 0)
        return -1;
    json_t *alpha = json_object_get(o->shared->opt->overrides, "_lora_alpha");
    if (alpha && adapter && json_object_set_new(adapter, "lora_alpha", json_deep_copy(alpha)) < 0)
        return ckpt_nomem(err);
    const struct ckpt_lora_options opt = {.adapter = adapter,
                                          .automodel = automodel,
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

int ckpt_merge_sides(const struct ckpt_opening *o, struct ckpt_sides *sides, struct ckpt_err *err)
{
    const struct ckpt_shared *s = o->shared;

    return ckpt_sides_add(sides, o->dir, own_folder(o), CKPT_SIDE_TOKENIZER, s->pool, err) < 0 ||
                   ckpt_sides_add(sides, s->base->dir, "", CKPT_SIDE_ALL, s->pool, err) < 0
               ? -1
               : 0;
}
