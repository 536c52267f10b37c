/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints whose tensors have their Hugging Face names already, below a prefix, among other
 * things: what trainers save that train transformers' own classes.
 *
 * What is the model is told by evidence only: where the base's tensors are, or where an embedding
 * that transformers' models have is, there is the prefix of all others. */
#ifndef CKPT_RUN_NAMES_H
#define CKPT_RUN_NAMES_H

#include <stdbool.h>

#include "base/err.h"
#include "recipe/recipe.h"
#include "recipe/types.h"
#include "run/base.h"
#include "tensor/catalog.h"

/* Leave in cat the tensors of the model, below no prefix and in the order that they have.
 * *ret_found is false, and only optimizers and the like are gone, if there is no evidence of
 * transformers' names. Tied weights are left once, under the name of the input embedding; if
 * the checkpoint stores them twice, with other values, it is CONFLICT, or a warning if
 * allow_leftover. base and config (the model's) may be NULL. */
int ckpt_names_apply(struct ckpt_catalog *cat, const struct ckpt_types *types,
                     const struct ckpt_base *base, const json_t *config, bool allow_leftover,
                     bool *ret_found, struct ckpt_err *err);

/* Are the names those of the hub? transformers 5 stacks a layer's experts in memory, and only a
 * recipe for config's model type can take them apart. UNSUPPORTED. */
int ckpt_names_check_fused(const struct ckpt_catalog *cat, const struct ckpt_types *types,
                           const json_t *config, struct ckpt_err *err);

/* Not the name of an optimizer's, a scheduler's, a data loader's state, nor of what a model of the
 * type computes. */
bool ckpt_names_is_weight(const struct ckpt_type *type, const char *name);

/* The name without the parts that wrappers add (torch.compile, FSDP ...); new, or NULL. */
char *ckpt_names_unwrap(const char *name);

/* Convert the names and shapes that a model has in memory to the hub's (opt->format
 * "transformers"), or back ("hub"), if a recipe does that for the model type of opt->base_config:
 * *cat is another catalogue then, with the config of the first, and *ret_recipe (owned; it may be
 * NULL) names the recipe. */
int ckpt_names_convert(struct ckpt_catalog **cat, const struct ckpt_recipes *recipes,
                       const struct ckpt_recipe_options *opt, bool *ret_done, char **ret_recipe,
                       struct ckpt_err *err);

#endif
