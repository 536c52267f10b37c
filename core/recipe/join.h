/* SPDX-License-Identifier: Apache-2.0 */
/* Ranked tensors, of which files only say "rank t of T", become ordinary ones: the recipe's marks
 * say which part of a dimension rank t holds.
 *
 *     (gate=f/tp + up=f/tp) h      rank t has the t-th part of gate, then the t-th part of up
 *     h f/tp                       rank t has the t-th part of the columns
 *     h                            every rank has all: the first one's serves
 *
 * A marked part whose local length is the known size of the whole is a copy too. */
#ifndef CKPT_RECIPE_JOIN_H
#define CKPT_RECIPE_JOIN_H

#include "recipe/file.h"
#include "recipe/settings.h"
#include "tensor/catalog.h"

/* Is any tensor ranked? */
bool ckpt_join_needed(const struct ckpt_catalog *src);

/* A new catalogue over the same sources. Ranked tensors that no rule speaks of stay as they are.
 * CONFLICT: two rules join a tensor otherwise, or parts do not fit. */
int ckpt_join(const struct ckpt_recipe *recipe, const struct ckpt_catalog *src,
              struct ckpt_settings *set, struct ckpt_catalog **ret, struct ckpt_err *err);

#endif
