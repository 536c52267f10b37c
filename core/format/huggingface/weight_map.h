/* SPDX-License-Identifier: Apache-2.0 */
/* The index beside a Hugging Face model's files (model.safetensors.index.json): its weight_map says
 * which file has each tensor. */
#ifndef CKPT_FORMAT_HUGGINGFACE_WEIGHT_MAP_H
#define CKPT_FORMAT_HUGGINGFACE_WEIGHT_MAP_H

#include "base/err.h"
#include "base/json.h"
#include "format/reader.h"

/* Read the index `name` of the directory. FORMAT: it has no weight_map, or one with a value that is
 * not a file's name. */
int ckpt_weight_map_read(const struct ckpt_dir *dir, const char *name, json_t **ret,
                         struct ckpt_err *err);

/* Are all files that the index names there, and all its tensors in cat? MISSING: the first one that
 * is not; with opt->allow_partial a tensor that is not there is a warning of cat. */
int ckpt_weight_map_check(const json_t *index, const char *name, const struct ckpt_dir *dir,
                          const struct ckpt_reader_options *opt, struct ckpt_catalog *cat,
                          struct ckpt_err *err);

#endif
