/* SPDX-License-Identifier: Apache-2.0 */
/* The option `lora=merge`: the model that PEFT's merge_and_unload makes of an adapter and its base.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "format/trainer.h"
#include "model/base.h"
#include "recipe/library/types.h"
#include "tensor/catalog.h"

/* The configs that a merge needs. All are borrowed. */
struct ckpt_lora_options {
    const json_t *adapter;           /* adapter_config.json */
    struct ckpt_adapter_notes notes; /* what the trainer's own file says; all zero: nothing */
    const json_t *base_names; /* {tensor in memory: its name in the base} where they differ; NULL */
    const struct ckpt_type *type; /* facts about the base's model type */
    json_t *config; /* config.json of the merged model, which is changed if the adapter resizes the
                       vocabulary or unties the output embedding; or NULL */
};

/* The rank of LoRA of a module by adapter_config.json; *ret is 0 if it does not say it. */
int ckpt_lora_rank(const json_t *config, const char *module, uint64_t *ret, struct ckpt_err *err);

/* Does the config say a variant whose matrices may have other shapes than those of LoRA? */
bool ckpt_lora_is_variant(const json_t *config);

/* Merge the adapter (under PEFT's names) into cat, to which the adapter's sources are added.
 * MISSING: a part of the adapter, or the base's tensor that it changes, does not exist.
 * UNSUPPORTED: the adapter is not LoRA, or of a kind that cannot be merged. CONFLICT: shapes or
 * ranks do not match. After a failure cat can only be freed. */
int ckpt_lora_merge(struct ckpt_catalog *cat, const struct ckpt_catalog *adapter,
                    const struct ckpt_lora_options *opt, struct ckpt_err *err);
