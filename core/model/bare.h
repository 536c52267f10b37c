/* SPDX-License-Identifier: Apache-2.0 */
/* Models without a head, as transformers' AutoModel makes them: their tensors have the names of the
 * model with a head, without its first word ("layers.0" for "model.layers.0"). */
#ifndef CKPT_MODEL_BARE_H
#define CKPT_MODEL_BARE_H

#include <stdbool.h>

#include "base/err.h"
#include "base/json.h"
#include "recipe/library/types.h"
#include "tensor/catalog.h"

/* The model's class by its config; "": that does not say it. */
const char *ckpt_bare_class(const json_t *config);

/* Is the class that the config names (NULL: none) one without a head? */
bool ckpt_bare_is(const json_t *config);

/* The tensor by which such a model is recognised. NULL: the config's class has a head, or it is not
 * known how transformers saves this type without one. */
const char *ckpt_bare_anchor(const struct ckpt_type *type, const json_t *config);

/* The name of a tensor of the model with a head, as it is without one: a part of `name`. */
const char *ckpt_bare_name(const struct ckpt_type *type, const char *name);

/* Give all tensors the names of the model with a head, for recipes, and take that back. */
int ckpt_bare_add_word(struct ckpt_catalog *cat, const struct ckpt_type *type,
                       struct ckpt_err *err);
int ckpt_bare_drop_word(struct ckpt_catalog *cat, const struct ckpt_type *type,
                        struct ckpt_err *err);

/* UNSUPPORTED: a model without a head, of an unknown type, in which a key of the saved dict (which
 * the reader knows) would become the first word of the model's names below `prefix`. */
int ckpt_bare_check(const struct ckpt_catalog *cat, const json_t *config, const char *prefix,
                    struct ckpt_err *err);

#endif
