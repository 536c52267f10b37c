/* SPDX-License-Identifier: Apache-2.0 */
/* How the ranks of a job divide a tensor that a recipe makes, by the annotations of its side. */
#ifndef CKPT_RECIPE_APPLY_CUTS_H
#define CKPT_RECIPE_APPLY_CUTS_H

#include "base/mem.h"
#include "recipe/apply/lower.h"
#include "tensor/cut.h"

/* Get the cuts of t, the instance's target, into the arena. The instance's sizes are solved. */
int ckpt_cuts_of(struct ckpt_instance *in, const struct ckpt_tensor *t, uint32_t stage,
                 struct ckpt_arena *arena, const struct ckpt_cuts **ret, struct ckpt_err *err);

#endif
