/* SPDX-License-Identifier: Apache-2.0 */
/* LoRA keys in checkpoints of any format, under the names that PEFT's save_pretrained gives them.
 */
#ifndef CKPT_RUN_ADAPTER_H
#define CKPT_RUN_ADAPTER_H

#include <stdbool.h>

#include "base/err.h"
#include "recipe/types.h"
#include "tensor/catalog.h"

/* A checkpoint of a PeftModel: leave in cat its adapter (what `lora_` stands in, and
 * modules_to_save), as base_model.model.X.lora_A.weight, without wrappers, roots and the adapter's
 * own name
 * ("default"). The base's weights, if they are there too, are left out, as PEFT does. Then
 * about.adapter is true. *ret_found is false, and nothing happened, if no key is LoRA's. CONFLICT:
 * two adapters. UNSUPPORTED: LoRA keys that are not below `base_model.model.`. */
int ckpt_adapter_apply(struct ckpt_catalog *cat, const struct ckpt_type *type, bool *ret_found,
                       struct ckpt_err *err);

#endif
