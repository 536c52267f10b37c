/* SPDX-License-Identifier: Apache-2.0 */
/* The model: o->cat, whose tensors have the view's names, values and dtypes, and o->config.
 * Building its files needs only these two. */
#ifndef CKPT_MODEL_MODEL_H
#define CKPT_MODEL_MODEL_H

#include <stdbool.h>

#include "base/err.h"
#include "model/opening.h"
#include "tensor/catalog.h"

/* Make the model of what was identified, as o->decision says. */
int ckpt_opening_make_model(struct ckpt_opening *o, struct ckpt_err *err);

/* The dtype of most floating-point elements, by its name in torch, which transformers would call
 * the model's dtype; NULL: there are none. stored: the dtype from which those are cast. */
const char *ckpt_main_dtype(const struct ckpt_catalog *cat, bool stored);

#endif
