/* SPDX-License-Identifier: Apache-2.0 */
/* From a base's names of tensors (the hub's) to those that a run saves (the model's in memory), as
 * NeMo Automodel's key_mapping: patterns in order, the first that matches renames. */
#ifndef CKPT_RUN_RENAME_H
#define CKPT_RUN_RENAME_H

#include "base/err.h"
#include "base/json.h"
#include "recipe/types.h"

struct ckpt_renames;

/* A JSON object {pattern: replacement} at `path`. */
int ckpt_renames_load(const char *path, struct ckpt_renames **ret, struct ckpt_err *err);

/* What transformers does with a model type when it loads; *ret is NULL for those whose names are
 * the same. */
int ckpt_renames_of_type(const struct ckpt_type *type, struct ckpt_renames **ret,
                         struct ckpt_err *err);
void ckpt_renames_free(struct ckpt_renames *r);

/* *ret_name is malloc'ed; equal to name if no pattern matches. */
int ckpt_renames_apply(const struct ckpt_renames *r, const char *name, char **ret_name,
                       struct ckpt_err *err);

/* {new name: name} of every key of the object `names` that is renamed. *ret is new. */
int ckpt_renames_invert(const struct ckpt_renames *r, const json_t *names, json_t **ret,
                        struct ckpt_err *err);

#endif
