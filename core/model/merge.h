/* SPDX-License-Identifier: Apache-2.0 */
/* Merging an adapter into its base (lora=merge). */
#ifndef CKPT_MODEL_MERGE_H
#define CKPT_MODEL_MERGE_H

#include "base/err.h"
#include "model/opening.h"
#include "model/side.h"

/* Move o->cat, the reader's catalogue of an adapter of any format, to o->adapter, and replace it by
 * a new catalogue of the base. o->facts become those of the merged model. */
int ckpt_merge_begin(struct ckpt_opening *o, struct ckpt_err *err);

/* Merge o->adapter, if there is one, into o->cat and o->config. */
int ckpt_merge_finish(struct ckpt_opening *o, struct ckpt_err *err);

/* Add the base's files, but the adapter's tokenizer instead of the base's. */
int ckpt_merge_sides(const struct ckpt_opening *o, struct ckpt_sides *sides, struct ckpt_err *err);

#endif
