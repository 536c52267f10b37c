/* SPDX-License-Identifier: Apache-2.0 */
/* How NeMo Automodel's export distributes tensors over files, for checkpoints that do not say it
 * (its `_maybe_build_consolidated_index`). */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "format/reader.h"
#include "tensor/catalog.h"

/* The number in a name such as "...-00002-of-00003.safetensors"; 1 for "model.safetensors". For
 * other names false, and 1. */
bool ckpt_automodel_file_number(const char *name, uint64_t *ret_number);

/* Number n files, sorted by name: the numbers in their names if those are 1 to n, else their
 * positions. */
void ckpt_automodel_number_files(const char *const *name, size_t n, uint64_t *ret_number);

/* The file of key i of n when keys are divided evenly over nfile files; the first files get one key
 * more. */
uint64_t ckpt_automodel_equally(size_t i, size_t n, uint64_t nfile);

/* Fill files in order, up to max_len bytes each; a larger key gets a file of its own. */
void ckpt_automodel_by_size(const uint64_t *len, size_t n, uint64_t max_len, uint64_t *ret_number);

/* Make a new weight_map {tensor: model-0000I-of-0000N.safetensors} for cat that follows the base's
 * split. *ret is NULL if the base has neither weights nor an index. */
int ckpt_automodel_split(const struct ckpt_catalog *cat, const struct ckpt_split_base *base,
                         const struct ckpt_naming *naming, const json_t *config,
                         struct ckpt_weight_map **ret, struct ckpt_err *err);
