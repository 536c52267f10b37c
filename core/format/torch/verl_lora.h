/* SPDX-License-Identifier: Apache-2.0 */
/* lora_train_meta.json of verl: the numbers of the LoRA adapter in a checkpoint of a PEFT model. */
#pragma once

#include "base/json.h"
#include "io/dir.h"

/* Make the adapter_config.json that verl's model_merger makes, less target_modules and the keys
 * that have PEFT's defaults: r, lora_alpha and task_type. *ret is NULL if there is no such file, or
 * the file has no numbers. */
int ckpt_verl_lora_config(const struct ckpt_dir *dir, json_t **ret, struct ckpt_err *err);
