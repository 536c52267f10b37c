/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of names that wrappers of modules add: compilation, data parallelism, activation
 * checkpointing. A state dict that is saved without unwrapping the model has them, in a file of any
 * kind. One rule for all sources of names. */
#pragma once

#include "base/err.h"
#include "base/mem.h"
#include "model/opening.h"

/* The name without the parts that no class has but wrappers (`_orig_mod` and its like), wherever
 * they stand: itself, or a copy in the arena. NULL: out of memory. */
const char *ckpt_wrappers_strip(struct ckpt_arena *arena, const char *name);

/* Strip a name as ckpt_wrappers_strip does, and of the part `module` wherever it stands, which a
 * class may have too. */
const char *ckpt_wrappers_strip_all(struct ckpt_arena *arena, const char *name);

/* Do the first `len` bytes of the name have such a part, or `module`? */
bool ckpt_wrappers_in(const char *name, size_t len);

/* Note in cat that `n` names, `from` the first of them, are shown without what wrappers add. */
void ckpt_wrappers_note(struct ckpt_catalog *cat, size_t n, const char *from, const char *to);

/* Give the tensors of o->cat, a model under the hub's names, these names without the parts that
 * wrappers add, also in o->facts. A name that the base has as it is stays, and the part `module`
 * goes only where the result fits the base, or else config.json, better; a note says what was
 * removed. CONFLICT: two names become one. */
int ckpt_wrappers_clean(struct ckpt_opening *o, struct ckpt_err *err);
