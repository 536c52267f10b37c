/* SPDX-License-Identifier: Apache-2.0 */
/* Checking for tensors of a checkpoint that a recipe did not use: none may be dropped silently. */
#pragma once

#include <stdbool.h>

#include "base/err.h"
#include "recipe/library/file.h"
#include "tensor/catalog.h"

/* used[i] says whether tensor i of src became a part of the model. A tensor that matches one of the
 * recipe's `ignores` is left out, with a warning in `model` that gives the reason. Any other unused
 * tensor is CONFLICT (with `allow` a warning); the text has the first names, likely causes and a
 * remedy. */
int ckpt_leftover_check(const struct ckpt_recipe *recipe, const struct ckpt_catalog *src,
                        const bool *used, bool allow, struct ckpt_catalog *model,
                        struct ckpt_err *err);

/* Tensors that the model's config ties to others but that the checkpoint stores too. They are left
 * out, but must be equal copies. */
struct ckpt_tied_copies {
    struct ckpt_catalog *cat; /* the copies, over the model's sources; NULL: there are none */
    CKPT_VEC(const char *)
    original; /* for each copy the name of the original in the model; borrowed */
};

/* Free the list and its catalogue. */
void ckpt_tied_copies_release(struct ckpt_tied_copies *c);

/* Report that tensor `copy`, which the config ties to `original`, has other values: CONFLICT, or
 * with `allow` a warning of cat that it is left out. */
int ckpt_copy_differs(struct ckpt_catalog *cat, const char *copy, const char *original, bool allow,
                      struct ckpt_err *err);

/* Check that each copy has the same values as its original in `model` (ckpt_tensor_same); if not,
 * it is CONFLICT, or with `allow` a warning of `model`. A copy whose original is not in the model
 * counts as unused. */
int ckpt_tied_copies_check(const struct ckpt_tied_copies *c, bool allow, struct ckpt_catalog *model,
                           struct ckpt_err *err);
