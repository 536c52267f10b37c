/* SPDX-License-Identifier: Apache-2.0 */
/* The steps before and after opening a view whose adapter is merged into its base (lora=merge). */
#ifndef CKPT_MODEL_MERGE_H
#define CKPT_MODEL_MERGE_H

#include "base/err.h"
#include "model/side.h"
#include "model/view.h"

/* Move *src, the reader's catalogue of an adapter of any format, to v->adapter, and replace *src by
 * a new catalogue of the base. v->facts become those of the merged model. */
int ckpt_merge_begin(struct ckpt_view *v, struct ckpt_catalog **src, struct ckpt_err *err);

/* Merge v->adapter, if there is one, into v->cat and v->config. */
int ckpt_merge_finish(struct ckpt_view *v, struct ckpt_err *err);

/* Add the base's files, but the adapter's tokenizer instead of the base's. */
int ckpt_merge_sides(const struct ckpt_view *v, struct ckpt_sides *sides, struct ckpt_err *err);

#endif
