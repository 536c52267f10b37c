/* SPDX-License-Identifier: Apache-2.0 */
/* The files of a view. The only layout is that of a Hugging Face model directory; another one (a
 * training framework's files) would make its own v->tree of the same v->cat and v->config. */
#ifndef CKPT_RUN_VIEW_FILES_H
#define CKPT_RUN_VIEW_FILES_H

#include "base/err.h"
#include "run/checkpoint.h"

/* Lay v->cat, v->config and the files that pass through out as v->tree, by v->decision. */
int ckpt_view_lay_out(struct ckpt_view *v, struct ckpt_err *err);

#endif
