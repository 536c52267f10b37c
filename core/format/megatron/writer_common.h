/* SPDX-License-Identifier: Apache-2.0 */
/* What Megatron stores besides tensors: the arguments of the run, the tracker, metadata.json. */
#ifndef CKPT_FORMAT_MEGATRON_WRITER_COMMON_H
#define CKPT_FORMAT_MEGATRON_WRITER_COMMON_H

#include "base/str.h"
#include "format/megatron/writer_plan.h"

/* A new string: "iter_0000010/", or "release/" for a model without an iteration. NULL: no memory.
 */
char *ckpt_mg_folder(const struct ckpt_writing *w);

/* Append the items of the common state to an open dict: args (a Namespace), checkpoint_version,
 * iteration. */
struct ckpt_pickle_out;
int ckpt_mg_put_common(const struct ckpt_writing *w, const struct ckpt_mg_grid *g,
                       const char *format, struct ckpt_pickle_out *p, struct ckpt_err *err);

/* Add the tracker file, and for torch_dist common.pt and metadata.json in the folder. */
int ckpt_mg_common(const struct ckpt_writing *w, const char *folder, const struct ckpt_mg_grid *g,
                   const char *format, struct ckpt_err *err);

#endif
