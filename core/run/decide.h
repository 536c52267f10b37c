/* SPDX-License-Identifier: Apache-2.0 */
/* How a checkpoint becomes a view: every choice that follows from what its reader says, the options
 * and the base, in one place. Deciding reads no file and changes nothing. */
#ifndef CKPT_RUN_DECIDE_H
#define CKPT_RUN_DECIDE_H

#include <stdbool.h>

#include "ckpt/reader.h"
#include "run/base.h"
#include "run/options.h"

/* All borrowed. */
struct ckpt_decide {
    const struct ckpt_facts *facts; /* `names` is what was found, where the reader could not say; of
                                       an adapter that is merged, the merged model's */
    const struct ckpt_options *opt;
    const struct ckpt_base *base; /* or NULL */
    bool merged;     /* the model is the base, into which the checkpoint's adapter is merged */
    bool has_config; /* the checkpoint has a config.json of its own */
};

/* How the tensors get the names of the view. */
enum ckpt_naming_way {
    CKPT_WAY_STORED, /* view=raw: they keep theirs */
    CKPT_WAY_HUB,    /* they have them already */
    CKPT_WAY_MEMORY, /* they have those of a model in memory, which transformers may convert */
    CKPT_WAY_RECIPE, /* a recipe maps the framework's tensors */
};

/* What happens to the hub's names afterwards. */
enum ckpt_convert {
    CKPT_CONVERT_NOT,
    CKPT_CONVERT_TO_MEMORY,      /* view=memory */
    CKPT_CONVERT_THERE_AND_BACK, /* a model directory that is split anew: transformers would split
                                    it after loading it, in the order, and the blocks, of what it
                                    has in memory */
};

/* What becomes of config.json, unless something changed what it says. */
enum ckpt_config_rule {
    CKPT_CONFIG_WRITE,            /* it is written from the view's config */
    CKPT_CONFIG_PASS,             /* the file passes through to the letter */
    CKPT_CONFIG_PASS_UNLESS_CAST, /* the same, if no tensor changes its dtype */
    CKPT_CONFIG_PASS_IF_DTYPE,    /* the base's, if the tensors have the dtype that it states */
};

enum ckpt_split_rule {
    CKPT_SPLIT_BY_SIZE,
    CKPT_SPLIT_OWN,       /* the checkpoint's own weight map, if it has one */
    CKPT_SPLIT_BASE,      /* the base's weight map */
    CKPT_SPLIT_LIKE_BASE, /* as NeMo Automodel's export follows the base */
};

/* The order in which tensors are split by size. */
enum ckpt_order {
    CKPT_ORDER_CATALOG, /* the catalogue's: of modules */
    CKPT_ORDER_NAMES,
    CKPT_ORDER_FRESH, /* a model that was made from a config alone is saved in the order of its
                         modules; if transformers converts its weights, in that of names */
};

struct ckpt_decision {
    enum ckpt_naming_way way;
    enum ckpt_convert convert;
    bool match_base; /* the base may have other names for the same tensors */
    bool check;      /* compare tensors with the base and the config: shards may be lost */

    bool dequantize;
    bool keep_quantization; /* config.json speaks of the quantisation that the tensors have */
    bool use_base_dtypes;

    enum ckpt_config_rule config;
    bool write_generation; /* generation_config.json follows from config.json */

    bool own_files, own_config, own_adapter_config; /* the checkpoint's: by its rule, and these */
    bool base_files, base_config; /* the base's, where the checkpoint has none of that name */
    bool merge_files; /* instead of all these: the adapter's tokenizer and the base's files */

    enum ckpt_split_rule split;
    enum ckpt_order order;
    bool bare_header; /* safetensors without __metadata__ */
};

struct ckpt_decision ckpt_decide(const struct ckpt_decide *in);

#endif
