/* SPDX-License-Identifier: Apache-2.0 */
/* The option `lora=merge`: an adapter and its base as the model that PEFT's merge_and_unload makes.
 */
#ifndef CKPT_RUN_LORA_H
#define CKPT_RUN_LORA_H

#include "base/err.h"
#include "base/json.h"
#include "recipe/types.h"
#include "run/base.h"
#include "tensor/catalog.h"

/* All borrowed. */
struct ckpt_lora_options {
    const json_t *adapter;    /* adapter_config.json */
    const json_t *automodel;  /* automodel_peft_config.json, or NULL */
    const json_t *base_names; /* {tensor in memory: its name in the base} where they differ; NULL */
    const struct ckpt_type *type; /* what is known of the base's model type */
    json_t *config; /* the merged model's config.json, changed where the adapter resizes the
                       vocabulary or unties the output embedding; or NULL */
};

/* The base's tensors as a new catalogue. They point into the base's, which must outlive it. */
int ckpt_lora_base(const struct ckpt_base *base, struct ckpt_catalog **ret, struct ckpt_err *err);

/* Merge the adapter (PEFT's names) into cat, which then has the adapter's sources too. MISSING: a
 * part of an adapter, or its tensor of the base; UNSUPPORTED: kinds of adapters that are not LoRA,
 * or do not merge; CONFLICT: shapes and ranks. On failure cat is only good for freeing. */
int ckpt_lora_merge(struct ckpt_catalog *cat, const struct ckpt_catalog *adapter,
                    const struct ckpt_lora_options *opt, struct ckpt_err *err);

#endif
