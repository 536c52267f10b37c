/* SPDX-License-Identifier: Apache-2.0 */
/* Ranked tensors, of which files only say "rank t of T", become ordinary ones: the sharding
 * annotations in the recipe say which part of a dimension rank t has.
 *
 *     (gate=f/tp + up=f/tp) h      rank t has the t-th part of gate, then the t-th part of up
 *     h f/tp                       rank t has the t-th part of the columns
 *     h                            every rank has all: the first one's serves
 *
 * A marked part whose local length is the known size of the whole is a copy too. */
#pragma once

#include "recipe/library/file.h"
#include "recipe/library/settings.h"
#include "tensor/catalog.h"

/* Does any tensor have parts of ranks to be joined? */
bool ckpt_join_needed(const struct ckpt_catalog *src);

/* Make a new catalogue over the same sources in which ranked tensors are joined. Those that no rule
 * uses stay as they are. CONFLICT: two rules join a tensor differently, or the parts do not match.
 */
int ckpt_join(const struct ckpt_recipe *recipe, const struct ckpt_catalog *src,
              struct ckpt_settings *set, struct ckpt_catalog **ret, struct ckpt_err *err);
