/* SPDX-License-Identifier: Apache-2.0 */
/* Renaming a base's tensors from the hub's names to those that a run saves (the names in memory),
 * as NeMo Automodel's key_mapping does: a list of patterns, of which the first match renames. */
#pragma once

#include "base/err.h"
#include "base/json.h"
#include "recipe/library/types.h"

struct ckpt_renames;

/* Load the patterns from a JSON object {pattern: replacement} at `path`. */
int ckpt_renames_load(const char *path, struct ckpt_renames **ret, struct ckpt_err *err);

/* The patterns by which transformers renames a model type's tensors when it loads them; *ret is
 * NULL if the names are the same. */
int ckpt_renames_of_type(const struct ckpt_type *type, struct ckpt_renames **ret,
                         struct ckpt_err *err);
void ckpt_renames_free(struct ckpt_renames *r);

/* Rename one name. *ret_name is new; it equals name if no pattern matches. */
int ckpt_renames_apply(const struct ckpt_renames *r, const char *name, char **ret_name,
                       struct ckpt_err *err);

/* If a name is renamed, add it to the object {new name: name}. */
int ckpt_renames_note(const struct ckpt_renames *r, const char *name, json_t *map,
                      struct ckpt_err *err);
