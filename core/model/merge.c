/* SPDX-License-Identifier: Apache-2.0 */
/* Making one view of an adapter and its base. */
#include "model/merge.h"

#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "container/config.h"
#include "model/adapter.h"
#include "model/lora.h"
#include "recipe/library/types.h"

/* The facts of the merged model: it has the base's split and is not an adapter. */
static int describe(struct ckpt_view *v, struct ckpt_err *err)
{
    const json_t *map = v->shared->base->facts.weight_map;
    struct ckpt_facts *f = &v->facts;

    f->is_adapter = f->bare_header = false;
    json_decref(f->weight_map);
    f->weight_map = json_deep_copy(map);
    return map && !f->weight_map ? ckpt_nomem(err) : 0;
}

int ckpt_merge_begin(struct ckpt_view *v, struct ckpt_catalog **src, struct ckpt_err *err)
{
    struct ckpt_catalog *model;
    bool found = v->facts.is_adapter;

    if (!found && ckpt_adapter_apply(*src, ckpt_types_any(ckpt_recipes_types(v->shared->recipes)),
                                     true, &v->facts, &found, err) < 0)
        return -1;
    if (!found)
        return ckpt_fail(err, CKPT_UNSUPPORTED, "option lora=merge: '%s' has no adapter",
                         ckpt_dir_path(v->dir));
    if (ckpt_lora_base(v->shared->base, &model, err) < 0)
        return -1;
    v->adapter = ckpt_steal(src);
    *src = model;
    return describe(v, err);
}

/* The folder with the adapter's own files. */
static const char *own_folder(const struct ckpt_view *v)
{
    return v->facts.files == CKPT_FILES_COMPLETE ? v->facts.files_at : "";
}

/* Read one of the adapter's configs, from the adapter or the base, or take the reader's; *ret is
 * NULL if there is none. */
static int read_config(const struct ckpt_view *v, const char *name, json_t **ret,
                       struct ckpt_err *err)
{
    const char *below = own_folder(v);
    ckpt_cleanup(ckpt_freep) char *path = ckpt_asprintf("%s%s%s", below, *below ? "/" : "", name);

    *ret = NULL;
    if (!path)
        return ckpt_nomem(err);
    if (ckpt_config_read_if(v->dir, path, CKPT_CONFIG_MAX_BYTES, ret, err) < 0)
        return -1;
    if (!*ret && v->shared->base &&
        ckpt_config_read_if(v->shared->base->dir, name, CKPT_CONFIG_MAX_BYTES, ret, err) < 0)
        return -1;
    if (!*ret && strcmp(name, "adapter_config.json") == 0)
        *ret = json_incref(v->facts.adapter_config);
    return 0;
}

int ckpt_merge_finish(struct ckpt_view *v, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_json_decrefp) json_t *adapter = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *automodel = NULL;
    ckpt_cleanup(ckpt_json_decrefp) json_t *before = NULL;

    if (!v->adapter)
        return 0;
    if (read_config(v, "adapter_config.json", &adapter, err) < 0 ||
        read_config(v, "automodel_peft_config.json", &automodel, err) < 0)
        return -1;
    const struct ckpt_lora_options opt = {
        .adapter = adapter,
        .automodel = automodel,
        .base_names = v->base_names,
        .type = ckpt_types_find(ckpt_recipes_types(v->shared->recipes),
                                ckpt_json_str(v->config, "model_type")),
        .config = v->config};
    if (v->config && !(before = json_deep_copy(v->config)))
        return ckpt_nomem(err);
    if (ckpt_lora_merge(v->cat, v->adapter, &opt, err) < 0)
        return ckpt_err_in(err, "'%s'", ckpt_dir_path(v->dir));
    v->config_changed |= !json_equal(before, v->config);
    ckpt_catalog_freep(&v->adapter);
    json_decref(v->base_names); /* the view's names are the base's */
    v->base_names = NULL;
    return 0;
}

int ckpt_merge_sides(const struct ckpt_view *v, struct ckpt_sides *sides, struct ckpt_err *err)
{
    const struct ckpt_shared *s = v->shared;

    return ckpt_sides_add(sides, v->dir, own_folder(v), CKPT_SIDE_TOKENIZER, s->pool, err) < 0 ||
                   ckpt_sides_add(sides, s->base->dir, "", CKPT_SIDE_ALL, s->pool, err) < 0
               ? -1
               : 0;
}
