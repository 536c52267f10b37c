/* SPDX-License-Identifier: Apache-2.0 */
/* The model of a view: v->cat, whose tensors have the view's names, values and dtypes, and
 * v->config. Reading the model, or building its files, needs only these two. */
#ifndef CKPT_MODEL_MODEL_H
#define CKPT_MODEL_MODEL_H

#include "base/err.h"
#include "model/view.h"
#include "recipe/library/recipe.h"
#include "recipe/library/types.h"
#include "tensor/catalog.h"

/* Make the model from the reader's catalogue (*src may be taken) and v->facts, with the choices of
 * ckpt_decide. */
int ckpt_view_make_model(struct ckpt_view *v, struct ckpt_catalog **src, struct ckpt_err *err);

/* The dtype of most floating-point elements, by its name in torch, which transformers would call
 * the model's dtype; NULL: there are none. */
const char *ckpt_view_main_dtype(const struct ckpt_catalog *cat);

/* The options for recipes that rename the tensors of src: transformers' conversions for a model
 * with the names in memory, else the rules for the framework's names. */
struct ckpt_recipe_options ckpt_view_recipe_options(const struct ckpt_view *v,
                                                    const struct ckpt_catalog *src);

/* Bring the reader's catalogue, which was read again for an open view, to the names that recipes
 * map. */
int ckpt_view_find_names(const struct ckpt_view *v, struct ckpt_catalog *src, struct ckpt_err *err);

#endif
