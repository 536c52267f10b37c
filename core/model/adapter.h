/* SPDX-License-Identifier: Apache-2.0 */
/* LoRA adapters in checkpoints of any format: their tensors under the names that PEFT's
 * save_pretrained gives them. */
#pragma once

#include <stdbool.h>

#include "base/err.h"
#include "format/reader.h"
#include "recipe/library/types.h"
#include "tensor/catalog.h"

/* If cat is the checkpoint of a PeftModel, leave in it only the adapter: tensors whose names
 * contain `lora_`, and modules_to_save. They are renamed to base_model.model.X.lora_A.weight,
 * without wrappers, roots and the adapter's name ("default"). The weights of the base model, if cat
 * has them, are left out as PEFT does, with a warning unless `quiet`. *facts become those of an
 * adapter, whose config, if the reader made it, gets target_modules. If no tensor belongs to LoRA,
 * *ret_found is false and nothing is changed. CONFLICT: there are two adapters. UNSUPPORTED: LoRA
 * tensors are not below `base_model.model.`. */
int ckpt_adapter_apply(struct ckpt_catalog *cat, const struct ckpt_type *type, bool quiet,
                       struct ckpt_facts *facts, bool *ret_found, struct ckpt_err *err);

/* Give the tensors of an adapter's own file the names that PEFT's save_pretrained writes: without
 * wrappers, the adapter's name and copies of modules, below `base_model.model.` once. Weights of
 * the base are left out. Names that PEFT writes stay, as do those of other adapters than LoRA but
 * for wrappers; what is changed is a note or a warning. CONFLICT: two names become one. FORMAT:
 * some names are below `base_model.model.`, others not. */
int ckpt_adapter_clean(struct ckpt_catalog *cat, const struct ckpt_type *type,
                       struct ckpt_facts *facts, struct ckpt_err *err);

/* Make a new catalogue, over the same sources, of the base model's weights in a checkpoint of a
 * whole PeftModel. It has the names of the base without PEFT (no `base_model.model.`, `base_layer`,
 * `original_module`) and none of the adapter's tensors. *ret is NULL if the checkpoint has no LoRA
 * tensors, or only the adapter. */
int ckpt_adapter_base(const struct ckpt_catalog *cat, const struct ckpt_type *type,
                      struct ckpt_catalog **ret, struct ckpt_err *err);

/* Warn that n tensors of the base are not shown. */
void ckpt_adapter_warn(struct ckpt_catalog *cat, size_t n, const char *first);

/* Divide a framework's checkpoint: *ret gets the tensors of modules called `adapter`, and those
 * called `lora_A` and `lora_B`, over the same sources, and cat keeps the others. */
int ckpt_adapter_divide(struct ckpt_catalog *cat, struct ckpt_catalog **ret, struct ckpt_err *err);
