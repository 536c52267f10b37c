/* SPDX-License-Identifier: Apache-2.0 */
/* Does a model under the hub's names have all tensors that its config describes? */
#ifndef CKPT_RECIPE_LACKS_H
#define CKPT_RECIPE_LACKS_H

#include <stddef.h>

#include "base/err.h"
#include "base/str.h"
#include "recipe/recipe.h"

/* Count the tensors that the model file of the config's model_type asks for and that cat lacks, and
 * append the first names to `out`. 0: none, or there is no model file, or cat is something else
 * than the whole model (most of it is missing; a config of another class). */
int ckpt_recipe_lacks(const struct ckpt_recipes *set, const struct ckpt_catalog *cat,
                      const json_t *config, struct ckpt_str *out, size_t *ret_n,
                      struct ckpt_err *err);

#endif
