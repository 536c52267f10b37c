/* SPDX-License-Identifier: Apache-2.0 */
/* The model that a view shows: v->cat, whose tensors have the view's names, values and dtypes, and
 * v->config. What reads or lays out a model needs no more than these two. */
#ifndef CKPT_RUN_VIEW_MODEL_H
#define CKPT_RUN_VIEW_MODEL_H

#include "base/err.h"
#include "recipe/recipe.h"
#include "recipe/types.h"
#include "run/checkpoint.h"
#include "tensor/catalog.h"

/* Make it of the reader's catalogue (*src may be taken) and v->facts, by ckpt_decide. */
int ckpt_view_make_model(struct ckpt_view *v, struct ckpt_catalog **src, struct ckpt_err *err);

/* What is known of the type that v->config names. */
const struct ckpt_type *ckpt_view_type(const struct ckpt_view *v);

/* The torch name of the dtype of most floating elements, which transformers would call the model's;
 * NULL: there are none. */
const char *ckpt_view_main_dtype(const struct ckpt_catalog *cat);

/* By which rules the tensors of src were named: for a model that has the names in memory,
 * transformers' conversions; else what the framework's names ask for. */
struct ckpt_recipe_options ckpt_view_recipe_options(const struct ckpt_view *v,
                                                    const struct ckpt_catalog *src);

/* The reader's catalogue, read again for a view that is open, in the names that recipes map. */
int ckpt_view_find_names(const struct ckpt_view *v, struct ckpt_catalog *src, struct ckpt_err *err);

#endif
