/* SPDX-License-Identifier: Apache-2.0 */
/* Does a model under the hub's names have all tensors that its config describes? The measure is
 * what transformers' from_pretrained reports as missing: model files list what it needs, and mark
 * as optional what it can do without. */
#ifndef CKPT_RECIPE_APPLY_LACKS_H
#define CKPT_RECIPE_APPLY_LACKS_H

#include <stddef.h>

#include "base/err.h"
#include "base/str.h"
#include "recipe/library/recipe.h"

struct ckpt_lacks {
    size_t n;              /* the number of missing tensors */
    struct ckpt_str names; /* the first of them: "'a', 'b', 'c', ..." */
    const char *unchecked; /* why nothing can be said, a static text; NULL: it was checked */
};

/* Release the names. */
void ckpt_lacks_release(struct ckpt_lacks *l);

/* Compare the tensors of cat with the model file of the config's model_type. *ret is all zero
 * before; the caller releases it, on failure too. -1: out of memory, or a model file is wrong. */
int ckpt_recipe_lacks(const struct ckpt_recipes *set, const struct ckpt_catalog *cat,
                      const json_t *config, struct ckpt_lacks *ret, struct ckpt_err *err);

#endif
