/* SPDX-License-Identifier: Apache-2.0 */
/* What a framework's checkpoint that was made of a model does not say about the model. */
#ifndef CKPT_RECIPE_APPLY_LOST_H
#define CKPT_RECIPE_APPLY_LOST_H

#include "base/err.h"
#include "base/str.h"
#include "recipe/library/recipe.h"

/* Append to `out` the keys of config.json that are not the same, or not there, if the checkpoint
 * `made` is read as a Hugging Face model again: "eos_token_id, use_cache". `format` is that of the
 * recipes. Keys that say nothing of the model (the version of transformers) do not count, nor does
 * the dtype, which the tensors have. */
int ckpt_recipe_lost(const struct ckpt_recipes *set, const struct ckpt_model *made,
                     const json_t *config, const char *format, struct ckpt_str *out,
                     struct ckpt_err *err);

#endif
