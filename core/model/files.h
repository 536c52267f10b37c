/* SPDX-License-Identifier: Apache-2.0 */
/* The files of a view: a Hugging Face model directory (view/vtree.c), or a training framework's
 * files, which a writer (format/writer.h) makes of the same tensors. */
#ifndef CKPT_MODEL_FILES_H
#define CKPT_MODEL_FILES_H

#include "base/err.h"
#include "model/opening.h"

/* Build o->tree from o->cat, o->config and the files that are shown unchanged, as o->decision says.
 */
int ckpt_opening_lay_out(struct ckpt_opening *o, struct ckpt_err *err);

#endif
