/* SPDX-License-Identifier: Apache-2.0 */
/* Heads that trainers of reinforcement learning put beside a model, whose class has them not: value
 * heads, and the word before all names of a model that a wrapper with such a head holds. The facts
 * are `added_heads` and `held_as` of types/common.json. */
#pragma once

#include <stdbool.h>

#include "base/err.h"
#include "base/json.h"
#include "model/opening.h"
#include "recipe/library/types.h"

/* Is the tensor one of a head that a trainer added, as far as names tell? Never where the config
 * names a class that is none of transformers', or code of its own, which may have the head. */
bool ckpt_heads_is_added(const struct ckpt_type *type, const json_t *config, const char *name);

/* Warn that n tensors, `first` the first of them, are left out as those of such a head. */
void ckpt_heads_warn(struct ckpt_catalog *cat, size_t n, const char *first);

/* Leave such heads out of o->cat, a model under the hub's names, with a warning, and give the
 * model's tensors their names without the wrapper's word. What the base has under its name stays.
 */
int ckpt_heads_leave_out(struct ckpt_opening *o, struct ckpt_err *err);
