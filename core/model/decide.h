/* SPDX-License-Identifier: Apache-2.0 */
/* How a checkpoint becomes a view: every choice that follows from the reader's facts, the options
 * and the base, in one place. A decision reads no file and changes nothing. */
#pragma once

#include <stdbool.h>

#include "format/reader.h"
#include "model/base.h"
#include "model/options.h"

/* The facts to decide by. All are borrowed. */
struct ckpt_decide {
    /* the reader's facts, in which `names` is set even if the reader did not know; if an adapter is
     * merged, those of the merged model */
    const struct ckpt_facts *facts;
    const struct ckpt_options *opt;
    const struct ckpt_base *base; /* or NULL */
    bool merged;     /* the view is the base model, with the checkpoint's adapter merged into it */
    bool has_config; /* the checkpoint has a config.json of its own */
    bool has_home;   /* there is a config.json with it, or in the folder of its run */
    bool as_base;    /* the tensors have the names that the base's files have */
    bool is_foreign; /* the model's config is none of transformers' */
};

/* How the tensors get the names of the view. */
enum ckpt_naming_way {
    CKPT_WAY_STORED, /* view=raw: tensors keep their stored names */
    CKPT_WAY_HUB,    /* the stored names are the hub's already */
    CKPT_WAY_MEMORY, /* the stored names are those of a transformers model in memory, which a recipe
                        may convert */
    CKPT_WAY_RECIPE, /* a recipe maps the framework's tensors */
};

/* Conversions after the tensors have the hub's names. */
enum ckpt_convert {
    CKPT_CONVERT_NOT,
    CKPT_CONVERT_TO_MEMORY,      /* view=memory */
    CKPT_CONVERT_THERE_AND_BACK, /* a model directory whose tensors are distributed anew over files:
                                    transformers would load it, and then split it in the order, and
                                    in the blocks, that the model has in memory */
};

/* Where the view's config.json comes from, unless a change requires that it is written. */
enum ckpt_config_rule {
    CKPT_CONFIG_WRITE,            /* written from the view's config */
    CKPT_CONFIG_PASS,             /* an unchanged copy of the file */
    CKPT_CONFIG_PASS_UNLESS_CAST, /* an unchanged copy, if no tensor is cast to another dtype */
    CKPT_CONFIG_PASS_IF_DTYPE, /* the base's file, if the tensors have the dtype that it states */
};

enum ckpt_split_rule {
    CKPT_SPLIT_BY_SIZE,
    CKPT_SPLIT_OWN,       /* the checkpoint's own weight map, if it has one */
    CKPT_SPLIT_BASE,      /* the base's weight map */
    CKPT_SPLIT_LIKE_BASE, /* the way in which the trainer's own export follows the base */
};

/* The order of tensors when they are split by size. */
enum ckpt_order {
    CKPT_ORDER_CATALOG, /* the catalogue's order, which is that of the modules */
    CKPT_ORDER_NAMES,
    CKPT_ORDER_FRESH, /* the order in which transformers saves a model that was made from a config
                         alone: that of its modules, or, if transformers converts its weights, that
                         of their names */
};

struct ckpt_decision {
    enum ckpt_naming_way way;
    enum ckpt_convert convert;
    bool match_base; /* the base may have other names for the same tensors, which must be matched */
    bool check; /* compare tensors with the base and the config, because shards may be missing */

    bool dequantize;
    bool keep_quantization; /* config.json describes the quantisation that the tensors do have */
    bool use_base_dtypes;

    enum ckpt_config_rule config;
    bool write_generation; /* derive generation_config.json from config.json */

    bool own_files, own_config, own_adapter_config; /* files of the checkpoint that the view shows:
                                                       those of its rule, and these two */
    bool base_files, base_config; /* files of the base, or of the model's home, that the view
                                     shows, if the checkpoint has none of that name */
    bool merge_files; /* instead of all of these: the adapter's tokenizer and the base's files */

    enum ckpt_split_rule split;
    enum ckpt_order order;
    bool bare_header; /* write safetensors headers without __metadata__ */
};

/* Make the choices. Always succeeds. */
struct ckpt_decision ckpt_decide(const struct ckpt_decide *in);
