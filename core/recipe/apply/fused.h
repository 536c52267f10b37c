/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors that a framework stores as part of another module where a model has that module, and by
 * themselves where it has not: norms, which are part of the projection behind them ("fused"). */
#ifndef CKPT_RECIPE_APPLY_FUSED_H
#define CKPT_RECIPE_APPLY_FUSED_H

#include "recipe/library/file.h"
#include "tensor/catalog.h"

/* Rename such tensors of a catalogue that a recipe made. */
int ckpt_fused_rename(const struct ckpt_recipe *recipe, struct ckpt_catalog *cat,
                      struct ckpt_err *err);

#endif
