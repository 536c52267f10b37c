/* SPDX-License-Identifier: Apache-2.0 */
/* The layout of a view's files: a Hugging Face model directory, or what a writer makes. */
#include "model/opening.h"

#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "format/automodel/export.h"
#include "format/writer.h"
#include "model/naming.h"
#include "model/side.h"
#include "recipe/library/types.h"

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

/* ---- config.json ---- */

/* Do the tensors have the dtype that the base's config states? A config without a dtype means
 * float32. */
static bool has_base_dtype(const struct ckpt_opening *o)
{
    const char *says = ckpt_config_dtype(ckpt_opening_base_config(o)),
               *is = ckpt_main_dtype(o->cat, false);

    return is && strcmp(says ? says : "float32", is) == 0;
}

/* Does the base's config describe the model that a recipe made? */
static bool fits_base_config(const struct ckpt_opening *o)
{
    return o->decision.config == CKPT_CONFIG_PASS_IF_DTYPE && has_base_dtype(o);
}

static bool passes_config(const struct ckpt_opening *o)
{
    if (o->config_changed)
        return false;
    switch (o->decision.config) {
    case CKPT_CONFIG_PASS:
        return true;
    case CKPT_CONFIG_PASS_UNLESS_CAST:
        return !o->cast;
    case CKPT_CONFIG_PASS_IF_DTYPE:
        return has_base_dtype(o);
    default:
        return false;
    }
}

/* ---- files beside the weights ---- */

/* Add one of the checkpoint's own files, or the base's. */
static int add_own(struct ckpt_opening *o, struct ckpt_sides *sides, const char *name,
                   struct ckpt_err *err)
{
    return ckpt_sides_add_one(sides, o->dir, o->facts.files_at, name, o->shared->pool, err);
}

/* Add the model's config from where it was taken. */
static int add_of_base(struct ckpt_opening *o, struct ckpt_sides *sides, const char *name,
                       struct ckpt_err *err)
{
    struct ckpt_dir *dir = o->home.dir ? o->home.dir : o->shared->base->dir;

    return ckpt_sides_add_one(sides, dir, "", name, o->shared->pool, err);
}

/* Add the tokenizer of the base and of the model's home. */
static int add_tokenizer(struct ckpt_opening *o, struct ckpt_sides *sides, struct ckpt_err *err)
{
    struct ckpt_dir *const dirs[] = {o->shared->base ? o->shared->base->dir : NULL, o->home.dir};

    for (size_t i = 0; i < 2; i++)
        if (dirs[i] &&
            ckpt_sides_add(sides, dirs[i], "", CKPT_SIDE_TOKENIZER, o->shared->pool, err) < 0)
            return -1;
    return 0;
}

static void warn_links(struct ckpt_opening *o, const struct ckpt_sides *sides)
{
    if (sides->leaving.code != CKPT_OK)
        ckpt_catalog_warn(o->cat, "left out: %zu side files that are links: %s", sides->nlink,
                          sides->leaving.text);
    else if (sides->nlink)
        ckpt_catalog_warn(o->cat,
                          "left out: %zu side files that are links to files that are not there "
                          "('%s' first)",
                          sides->nlink, sides->dangling);
}

static int collect_sides(struct ckpt_opening *o, struct ckpt_sides *sides, struct ckpt_err *err)
{
    const struct ckpt_shared *s = o->shared;
    const struct ckpt_decision *d = &o->decision;
    const enum ckpt_side_rule rule =
        o->facts.files >= CKPT_FILES_ALL ? CKPT_SIDE_ALL : CKPT_SIDE_TOKENIZER;
    const bool adapter = o->facts.is_adapter && !s->opt->raw;
    const char *config = adapter ? "adapter_config.json" : "config.json";

    if (d->merge_files)
        return ckpt_merge_sides(o, sides, err);
    if (d->own_files && ckpt_sides_add(sides, o->dir, o->facts.files_at, rule, s->pool, err) < 0)
        return -1;
    for (const char *const *tool = o->reader->tools; tool && *tool; tool++)
        ckpt_sides_remove(sides, *tool);
    if (d->own_config && add_own(o, sides, "config.json", err) < 0)
        return -1;
    if (d->base_files && add_tokenizer(o, sides, err) < 0)
        return -1;
    if (d->own_adapter_config && add_own(o, sides, config, err) < 0)
        return -1;
    if (d->base_files && (d->base_config || fits_base_config(o)) &&
        add_of_base(o, sides, config, err) < 0)
        return -1;
    if (adapter && !ckpt_sides_has(sides, config) && !o->facts.adapter_config)
        ckpt_catalog_warn(o->cat, "the adapter has no %s; give one with base=DIR", config);
    return 0;
}

/* ---- weights ---- */

/* Choose the weight map; *ret is a reference, or NULL. */
static int choose_weight_map(const struct ckpt_opening *o, struct ckpt_weight_map **ret,
                             struct ckpt_err *err)
{
    const struct ckpt_naming naming = ckpt_naming_of(ckpt_recipes_types(o->shared->recipes));
    const struct ckpt_base *base = o->shared->base;

    *ret = NULL;
    switch (o->decision.split) {
    case CKPT_SPLIT_BY_SIZE:
        return 0;
    case CKPT_SPLIT_OWN:
        *ret = ckpt_weight_map_ref(o->facts.weight_map);
        return 0;
    case CKPT_SPLIT_LIKE_BASE:
        return ckpt_automodel_split(
            o->cat, &(struct ckpt_automodel_base){base->cat, base->weight_map, o->base_names},
            &naming, o->config, ret, err);
    case CKPT_SPLIT_BASE:
        *ret = ckpt_weight_map_ref(base->weight_map);
        break;
    }
    return 0;
}

static bool sorts_names(const struct ckpt_opening *o)
{
    const enum ckpt_order order = o->decision.order;

    return !o->ordered && (order == CKPT_ORDER_NAMES ||
                           (order == CKPT_ORDER_FRESH && ckpt_opening_type(o)->converted));
}

/* The number of elements in buffers, which num_parameters() of transformers does not count, and so
 * the total_parameters of an index does not either. */
static uint64_t buffer_numel(const struct ckpt_opening *o)
{
    const struct ckpt_texts *ends = &ckpt_opening_type(o)->buffers;
    uint64_t n = 0;

    for (size_t i = 0; i < o->cat->tensors.len; i++)
        if (ckpt_texts_end(ends, o->cat->tensors.ptr[i].name))
            n += o->cat->tensors.ptr[i]
                     .numel; /* cannot overflow: the tree refuses more than 2^63 bytes */
    return n;
}

/* ---- other formats ---- */

/* What the checkpoint says, or the number in which its folder's name ends: "step-20". */
static uint64_t step_of(const struct ckpt_opening *o)
{
    const size_t len = strlen(o->name);
    unsigned long long n;
    uint64_t step;
    size_t at = len;

    if (ckpt_json_u64(o->cat->about, "step", &step))
        return step;
    while (at > 0 && o->name[at - 1] >= '0' && o->name[at - 1] <= '9')
        at--;
    if (o->facts.is_hub_dir || (at > 0 && !strchr("-_", o->name[at - 1])) ||
        !ckpt_parse_u64(o->name + at, len - at, &n))
        return 0;
    return n;
}

static int write_files(struct ckpt_opening *o, const struct ckpt_vtree_options *model,
                       struct ckpt_err *err)
{
    const struct ckpt_output *output = &o->shared->opt->output;
    const size_t bytes = (o->cat->tensors.len + 1) * sizeof(struct ckpt_vplace);
    ckpt_cleanup(ckpt_vfiles_release) struct ckpt_vfiles files = {0};
    struct ckpt_writing w = {.cat = o->cat,
                             .output = output,
                             .config = o->framework,
                             .about = o->cat->about,
                             .model = model,
                             .files = &files};

    w.step = step_of(o);
    if (!(w.place = ckpt_arena_alloc(&files.arena, bytes)))
        return ckpt_nomem(err);
    memset(w.place, 0, bytes);
    if (output->writer->write(&w, err) < 0)
        return ckpt_err_in(err, "view=%s", output->writer->name);
    return ckpt_vtree_of_files(o->cat, &files, w.place, model->mtime_ns, &o->tree, err);
}

/* ---- all of it ---- */

int ckpt_opening_lay_out(struct ckpt_opening *o, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_sides_release) struct ckpt_sides sides = {0};
    ckpt_cleanup(ckpt_json_decrefp) json_t *generation = NULL;
    ckpt_cleanup(ckpt_weight_map_unrefp) struct ckpt_weight_map *map = NULL;
    struct ckpt_vtree_options opt = {
        .index_name = o->facts.index_name,
        .bare = o->decision.bare_header,
        .max_shard_size = o->shared->opt->max_shard_size,
        .sort = sorts_names(o),
        .buffer_numel = buffer_numel(o),
        .mtime_ns = newest_shard(o->cat),
    };

    if (collect_sides(o, &sides, err) < 0 || choose_weight_map(o, &map, err) < 0)
        return -1;
    warn_links(o, &sides);
    opt.weight_map = map;
    if (o->config && !passes_config(o)) {
        opt.config = o->config;
        ckpt_sides_remove(&sides, "config.json");
    }
    if (o->config && o->decision.write_generation &&
        !ckpt_sides_has(&sides, "generation_config.json")) {
        const struct ckpt_type *type = ckpt_opening_type(o);
        if (ckpt_generation_config(o->config, type->decoder_config, type->no_use_cache, &generation,
                                   err) < 0)
            return -1;
        opt.generation = generation;
    }
    if (o->facts.is_adapter && !o->shared->opt->raw &&
        !ckpt_sides_has(&sides, "adapter_config.json"))
        opt.adapter = o->facts.adapter_config;
    opt.side = sides.files.ptr;
    opt.nside = sides.files.len;
    if (sides.mtime_ns > opt.mtime_ns)
        opt.mtime_ns = sides.mtime_ns;
    return o->shared->opt->output.writer ? write_files(o, &opt, err)
                                         : ckpt_vtree_new(o->cat, &opt, &o->tree, err);
}
