/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors that come from the base because the checkpoint lacks them (missing=base): frozen parts of
 * a model, and layers that a trainer does not save. */
#ifndef CKPT_MODEL_MISSING_H
#define CKPT_MODEL_MISSING_H

#include "base/err.h"
#include "model/opening.h"

/* With the option missing=base: add to o->cat, whose names are those of the view, the tensors that
 * only the base has, as they are stored there, and list them in o->about under "from_base". A
 * tensor that config.json ties to another is not missing. USAGE: the base has no weights.
 * UNSUPPORTED: they are quantised. */
int ckpt_opening_take_missing(struct ckpt_opening *o, struct ckpt_err *err);

#endif
