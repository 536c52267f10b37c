/* SPDX-License-Identifier: Apache-2.0 */
/* LoRA keys in checkpoints of any format, under the names that PEFT's save_pretrained gives them.
 */
#ifndef CKPT_RUN_ADAPTER_H
#define CKPT_RUN_ADAPTER_H

#include <stdbool.h>

#include "base/err.h"
#include "ckpt/reader.h"
#include "recipe/types.h"
#include "tensor/catalog.h"

/* A checkpoint of a PeftModel: leave in cat its adapter (what `lora_` stands in, and
 * modules_to_save), as base_model.model.X.lora_A.weight, without wrappers, roots and the adapter's
 * own name
 * ("default"). The base's weights, if they are there too, are left out, as PEFT does, with a
 * warning unless `quiet`. Then *facts are an adapter's. *ret_found is false, and nothing happened,
 * if no key is LoRA's. CONFLICT: two adapters. UNSUPPORTED: LoRA keys that are not below
 * `base_model.model.`. */
int ckpt_adapter_apply(struct ckpt_catalog *cat, const struct ckpt_type *type, bool quiet,
                       struct ckpt_facts *facts, bool *ret_found, struct ckpt_err *err);

/* The base's weights in a checkpoint of a whole PeftModel, as a new catalogue over the same
 * sources: under the names that the base has without PEFT (no `base_model.model.`, `base_layer`,
 * `original_module`), without the adapter. *ret is NULL if the checkpoint holds no LoRA keys, or
 * the adapter only. */
int ckpt_adapter_base(const struct ckpt_catalog *cat, const struct ckpt_type *type,
                      struct ckpt_catalog **ret, struct ckpt_err *err);

#endif
