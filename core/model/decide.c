/* SPDX-License-Identifier: Apache-2.0 */
/* The choices that make a checkpoint a view. */
#include "model/decide.h"

static bool has_hub_names(const struct ckpt_decide *in)
{
    return in->facts->names == CKPT_NAMES_HUB;
}

/* Is it a model directory that is shown unchanged, and not an adapter merged into a base? */
static bool is_itself(const struct ckpt_decide *in)
{
    return in->facts->is_adapter || (in->facts->is_hub_dir && !in->merged);
}

static enum ckpt_naming_way choose_way(const struct ckpt_decide *in)
{
    static const enum ckpt_naming_way ways[] = {[CKPT_NAMES_FRAMEWORK] = CKPT_WAY_RECIPE,
                                                [CKPT_NAMES_MEMORY] = CKPT_WAY_MEMORY,
                                                [CKPT_NAMES_HUB] = CKPT_WAY_HUB};

    return in->opt->raw ? CKPT_WAY_STORED : ways[in->facts->names];
}

static enum ckpt_convert choose_convert(const struct ckpt_decide *in)
{
    const struct ckpt_options *opt = in->opt;

    if (in->facts->names == CKPT_NAMES_MEMORY && !in->as_base)
        return CKPT_CONVERT_NOT;
    if (ckpt_options_memory(opt))
        return CKPT_CONVERT_TO_MEMORY;
    return in->facts->is_hub_dir && opt->max_shard_size && !opt->raw ? CKPT_CONVERT_THERE_AND_BACK
                                                                     : CKPT_CONVERT_NOT;
}

/* The base's config is the model's, unchanged, if a recipe made the model in the base's form, if
 * the checkpoint has no config, or if it is another library's. The checkpoint's own config is not
 * the model's if it states the dtypes before a cast. The config of a trainer with an export of its
 * own is that of the export. */
static enum ckpt_config_rule choose_config(const struct ckpt_decide *in, enum ckpt_naming_way way)
{
    const struct ckpt_options *opt = in->opt;

    const bool given = (in->base && in->base->config) || in->has_home;

    if ((way == CKPT_WAY_RECIPE || (way == CKPT_WAY_MEMORY && in->is_foreign)) && given &&
        !ckpt_options_override(opt))
        return CKPT_CONFIG_PASS_IF_DTYPE;
    if (!has_hub_names(in) || json_object_size(opt->overrides))
        return CKPT_CONFIG_WRITE;
    if (!in->has_config)
        return CKPT_CONFIG_PASS_IF_DTYPE;
    return opt->dtype_rule == CKPT_DTYPE_AUTO && in->facts->split_as_base
               ? CKPT_CONFIG_PASS
               : CKPT_CONFIG_PASS_UNLESS_CAST;
}

/* The split is that which the checkpoint asks for, else the base's, else that of the model
 * directory itself; an explicit max_shard_size has priority over all of them. */
static enum ckpt_split_rule choose_split(const struct ckpt_decide *in)
{
    const struct ckpt_facts *facts = in->facts;

    if ((in->opt->max_shard_size && !facts->is_adapter) || in->opt->raw ||
        ckpt_options_memory(in->opt))
        return CKPT_SPLIT_BY_SIZE;
    if (in->base && !facts->weight_map && facts->split_as_base)
        return CKPT_SPLIT_LIKE_BASE;
    if (!in->base || !ckpt_base_map(in->base) || (facts->weight_map && !facts->is_hub_dir))
        return CKPT_SPLIT_OWN;
    return CKPT_SPLIT_BASE;
}

static enum ckpt_order choose_order(const struct ckpt_decide *in, enum ckpt_naming_way way)
{
    if (way == CKPT_WAY_MEMORY || way == CKPT_WAY_RECIPE)
        return CKPT_ORDER_CATALOG;
    return has_hub_names(in) && !in->facts->is_hub_dir && in->base && !in->base->cat &&
                   !in->base->weight_map
               ? CKPT_ORDER_FRESH
               : CKPT_ORDER_NAMES;
}

static void choose_files(const struct ckpt_decide *in, struct ckpt_decision *d)
{
    const struct ckpt_facts *facts = in->facts;

    d->merge_files = in->merged;
    if (in->opt->raw || d->merge_files)
        return;
    d->own_files = facts->files_at != NULL;
    d->own_config = d->own_files && facts->files == CKPT_FILES_CONFIG;
    d->own_adapter_config = d->own_files && facts->is_adapter;
    d->base_files = (in->base || in->has_home) && facts->files != CKPT_FILES_COMPLETE;
    d->base_config = d->base_files && has_hub_names(in);
}

struct ckpt_decision ckpt_decide(const struct ckpt_decide *in)
{
    const struct ckpt_options *opt = in->opt;
    const bool hub = has_hub_names(in), adapter = in->facts->is_adapter;
    const enum ckpt_naming_way way = choose_way(in);
    struct ckpt_decision d = {
        .way = way,
        .convert = choose_convert(in),
        .match_base = in->base && way == CKPT_WAY_HUB && !is_itself(in),
        .check = way == CKPT_WAY_HUB && !is_itself(in) && !in->merged,
        .dequantize = opt->dequantize && !adapter && !opt->raw,
        .keep_quantization = opt->raw || adapter || (hub && in->has_config && !opt->dequantize),
        .use_base_dtypes = !adapter,
        .config = choose_config(in, way),
        .write_generation = !hub && !in->is_foreign,
        .split = choose_split(in),
        .order = choose_order(in, way),
        .bare_header = in->facts->bare_header && !opt->raw,
    };

    choose_files(in, &d);
    return d;
}
