/* SPDX-License-Identifier: Apache-2.0 */
/* A view as a checkpoint of a training framework (options.output): the model's tensors get the
 * framework's names, by its recipes read backwards. */
#ifndef CKPT_MODEL_OUTPUT_H
#define CKPT_MODEL_OUTPUT_H

#include "base/err.h"
#include "model/opening.h"

/* Are the names those of a framework whose checkpoint is written? */
bool ckpt_opening_has_output_names(const struct ckpt_opening *o);

/* Keep the config of the checkpoint's framework, if a checkpoint of the same framework is written.
 */
void ckpt_opening_keep_framework(struct ckpt_opening *o);

/* Make the names of o->cat, which are the hub's, those of the framework; o->framework is its
 * config. Nothing to do for other views. UNSUPPORTED: no recipe makes such a model. */
int ckpt_opening_to_output(struct ckpt_opening *o, struct ckpt_err *err);

#endif
