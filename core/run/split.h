/* SPDX-License-Identifier: Apache-2.0 */
/* Which file of the finished model a tensor belongs to, by the rules of NeMo Automodel (its
 * `_maybe_build_consolidated_index`), for checkpoints that do not say it themselves. */
#ifndef CKPT_RUN_SPLIT_H
#define CKPT_RUN_SPLIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/json.h"
#include "recipe/types.h"
#include "run/base.h"
#include "tensor/catalog.h"

/* The number in "...-00002-of-00003.safetensors", and 1 for "model.safetensors". False, and 1, for
 * other names. */
bool ckpt_split_file_number(const char *name, uint64_t *ret_number);

/* Numbers of n files, sorted by name: their own if these are 1 to n, else their places. */
void ckpt_split_number_files(const char *const *name, size_t n, uint64_t *ret_number);

/* The file of key i of n when they are divided equally over nfile files: the first ones get one
 * more. */
uint64_t ckpt_split_equally(size_t i, size_t n, uint64_t nfile);

/* Fill files in order up to max_len bytes; a larger key has a file of its own. */
void ckpt_split_by_size(const uint64_t *len, size_t n, uint64_t max_len, uint64_t *ret_number);

/* A new weight_map {tensor: model-0000I-of-0000N.safetensors} for cat by the base's split.
 * base_names as in struct ckpt_dtypes. *ret is NULL if the base has no weights and no index. */
int ckpt_split_by_base(const struct ckpt_catalog *cat, const struct ckpt_base *base,
                       const json_t *base_names, const struct ckpt_type *type, json_t **ret,
                       struct ckpt_err *err);

#endif
