/* SPDX-License-Identifier: Apache-2.0 */
/* What follows from a view's config, its base and its options. */
#ifndef CKPT_MODEL_FACTS_H
#define CKPT_MODEL_FACTS_H

#include "base/err.h"
#include "model/dtypes.h"
#include "model/view.h"
#include "recipe/library/types.h"

/* The facts about the model type that v->config names. */
const struct ckpt_type *ckpt_view_type(const struct ckpt_view *v);

/* By which rules the dtypes of the view's tensors are chosen. Borrows from the view. */
struct ckpt_dtypes ckpt_view_dtypes(const struct ckpt_view *v);

/* The config of the model that was trained: the base's, or one that the checkpoint lends; or NULL.
 */
const json_t *ckpt_view_base_config(const struct ckpt_view *v);

/* Add warnings to a list, without repeating any: one catalogue is made of another and may have its
 * warnings too. -1: out of memory. */
int ckpt_view_add_warnings(json_t *all, const json_t *more);

#endif
