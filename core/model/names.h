/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints of trainers that train transformers' own classes: the tensors have Hugging Face's
 * names already, below some prefix and mixed with others. The prefix is found by evidence only: the
 * names of the base's tensors, or the name of an embedding that transformers' models have. */
#pragma once

#include <stdbool.h>

#include "base/err.h"
#include "model/opening.h"
#include "recipe/library/recipe.h"
#include "recipe/library/types.h"
#include "tensor/catalog.h"

/* Leave in o->cat only the tensors of the model, without the prefix and in their order. If there is
 * no evidence of transformers' names, *ret_found is false, and only optimizer states and the like
 * are removed. Tied weights are left once, under the name of the input embedding. CONFLICT (with
 * allow_leftover a warning): the checkpoint stores a tied weight twice with different values. */
int ckpt_names_find_model(struct ckpt_opening *o, bool *ret_found, struct ckpt_err *err);

/* Check that the names of o->cat are those of the hub. transformers 5 stacks a layer's experts in
 * memory, and only a recipe for the model type can separate them; without one the error is
 * UNSUPPORTED. */
int ckpt_names_check_fused(const struct ckpt_opening *o, struct ckpt_err *err);

/* The names of the weights among all tensors, without the parts that wrappers add (copies are in
 * the arena); NULL for the state of an optimizer, a scheduler or a data loader, and for tensors
 * that a model of this type computes. The caller frees *ret, also after a failure. */
int ckpt_names_weights(const struct ckpt_catalog *cat, const struct ckpt_type *type,
                       struct ckpt_arena *arena, const char ***ret, struct ckpt_err *err);

/* Give a tied matrix of a model under the hub's names, which has it by its other name alone
 * ("lm_head.weight"; safetensors.torch.save_model leaves such files), the embedding's name. */
int ckpt_ties_name_embedding(struct ckpt_opening *o, struct ckpt_err *err);

/* Are tied weights (the type's ties) one tensor in this model? What its config says, else that of
 * its text model, else what is usual for the type. */
bool ckpt_names_tie(const struct ckpt_type *type, const json_t *config);

/* Convert the names and shapes that a model has in memory to those of the hub (opt->format
 * "transformers"), or back ("hub"), if there is a recipe for the model type of opt->base_config.
 * *cat is then replaced by another catalogue with the same config, and *ret_recipe (owned; may be
 * NULL) is the recipe's name. */
int ckpt_names_convert(struct ckpt_catalog **cat, const struct ckpt_recipes *recipes,
                       const struct ckpt_recipe_options *opt, bool *ret_done, char **ret_recipe,
                       struct ckpt_err *err);
