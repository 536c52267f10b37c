/* SPDX-License-Identifier: Apache-2.0 */
/* A view as a checkpoint of a training framework (options.output): the model's tensors get the
 * framework's names, by its recipes read backwards. */
#ifndef CKPT_MODEL_OUTPUT_H
#define CKPT_MODEL_OUTPUT_H

#include "base/err.h"
#include "model/view.h"
#include "tensor/catalog.h"

/* Are the names those of a framework whose checkpoint is written? */
bool ckpt_view_has_output_names(const struct ckpt_view *v);

/* Keep the config of the checkpoint's framework, if a checkpoint of the same framework is written.
 */
void ckpt_view_keep_framework(struct ckpt_view *v, const struct ckpt_catalog *src);

/* Make the names of v->cat, which are the hub's, those of the framework; v->framework is its
 * config. Nothing to do for other views. UNSUPPORTED: no recipe makes such a model. */
int ckpt_view_convert_to_output(struct ckpt_view *v, struct ckpt_err *err);

#endif
