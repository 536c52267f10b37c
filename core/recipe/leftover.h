/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors of a checkpoint that a recipe did not use: none may vanish without a word. */
#ifndef CKPT_RECIPE_LEFTOVER_H
#define CKPT_RECIPE_LEFTOVER_H

#include <stdbool.h>

#include "base/err.h"
#include "recipe/file.h"
#include "tensor/catalog.h"

/* used[i] tells whether tensor i of src became part of the model. What one of the
 * recipe's `ignores` matches is left out with a warning of `model` that says why. Any other is
 * CONFLICT, with the first names, the likely causes and the way out, or, if `allow`, a warning. */
int ckpt_leftover_check(const struct ckpt_recipe *recipe, const struct ckpt_catalog *src,
                        const bool *used, bool allow, struct ckpt_catalog *model,
                        struct ckpt_err *err);

/* Tensors that the model's config ties to others, but that the checkpoint stores all the same. They
 * are left out as copies, which they must be. */
struct ckpt_copies {
    struct ckpt_catalog *cat;        /* the copies; the model's sources; NULL: there are none */
    CKPT_VEC(const char *) original; /* of each, the name in the model; borrowed */
};

/* Free the list and its catalogue. */
void ckpt_copies_release(struct ckpt_copies *c);

/* Tensor `copy`, which the config ties to `original`, holds other values: CONFLICT, or, if `allow`,
 * a warning of cat that it is left out. */
int ckpt_copy_differs(struct ckpt_catalog *cat, const char *copy, const char *original, bool allow,
                      struct ckpt_err *err);

/* Each copy must hold the same values as its original in `model` (ckpt_tensor_same); if one does
 * not, it is CONFLICT, or a warning of `model` if `allow`. An original that the model lacks makes
 * its copy a leftover, too. */
int ckpt_copies_check(const struct ckpt_copies *c, bool allow, struct ckpt_catalog *model,
                      struct ckpt_err *err);

#endif
