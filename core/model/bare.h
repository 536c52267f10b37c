/* SPDX-License-Identifier: Apache-2.0 */
/* Models without a head, as transformers' AutoModel makes them. Their tensors have the names of the
 * model with a head, without its first word ("layers.0" for "model.layers.0"). */
#pragma once

#include <stdbool.h>

#include "base/err.h"
#include "base/json.h"
#include "recipe/library/types.h"
#include "tensor/catalog.h"

/* Return the tensor by which a model without a head is recognised. NULL: the config's class has a
 * head, or it is not known how transformers saves this type without one. */
const char *ckpt_bare_anchor(const struct ckpt_type *type, const json_t *config);

/* Return the name of a tensor of the model with a head as it is without one: a part of `name`. */
const char *ckpt_bare_name(const struct ckpt_type *type, const char *name);

/* Give all tensors the names of the model with a head (or without), as recipes have them. */
int ckpt_bare_set_word(struct ckpt_catalog *cat, const struct ckpt_type *type, bool with,
                       struct ckpt_err *err);

/* UNSUPPORTED: a model without a head, of an unknown type, in which a key of the saved dict (which
 * the reader knows) would become the first word of the model's names below `prefix`. */
int ckpt_bare_check(const struct ckpt_catalog *cat, const json_t *config, const char *prefix,
                    struct ckpt_err *err);
