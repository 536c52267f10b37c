/* SPDX-License-Identifier: Apache-2.0 */
/* A view of an adapter merged into its base (lora=merge): what is composed before and after. */
#ifndef CKPT_RUN_MERGE_H
#define CKPT_RUN_MERGE_H

#include "base/err.h"
#include "run/checkpoint.h"
#include "run/side.h"

/* *src, the reader's catalogue of an adapter of any format, becomes v->adapter, and *src a new
 * catalogue of the base; v->facts are those of the merged model. */
int ckpt_merge_begin(struct ckpt_view *v, struct ckpt_catalog **src, struct ckpt_err *err);

/* v->adapter, if there is one, into v->cat and v->config. */
int ckpt_merge_finish(struct ckpt_view *v, struct ckpt_err *err);

/* The base's files, and the adapter's tokenizer instead of the base's. */
int ckpt_merge_sides(const struct ckpt_view *v, struct ckpt_sides *sides, struct ckpt_err *err);

#endif
