/* SPDX-License-Identifier: Apache-2.0 */
/* Which facts about a model are lost in a framework's checkpoint that was made of it. */
#ifndef CKPT_RECIPE_APPLY_LOST_H
#define CKPT_RECIPE_APPLY_LOST_H

#include "base/err.h"
#include "base/str.h"
#include "recipe/library/recipe.h"

/* Append to `out` the keys of config.json that would change, or be missing, if the checkpoint
 * `made` were read as a Hugging Face model again: "eos_token_id, use_cache". `format` is that of
 * the recipes. Keys that say nothing about the model (the version of transformers) do not count,
 * nor does the dtype, which the tensors have. */
int ckpt_recipe_lost(const struct ckpt_recipes *set, const struct ckpt_model *made,
                     const json_t *config, const char *format, struct ckpt_str *out,
                     struct ckpt_err *err);

#endif
