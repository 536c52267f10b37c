/* SPDX-License-Identifier: Apache-2.0 */
/* A PyTorch distributed checkpoint, as torch writes it by default: `.metadata`, and for each rank
 * `__R_0.distcp`, which holds its parts of tensors as torch.save writes them, one after the other.
 *
 * What torch's FileSystemWriter writes with CRCs switched off (container/torch_out.h), but for
 * storage_meta: save_id is a random number there, and checkpoint_id a path; both are None here. */
#ifndef CKPT_WRITE_DCP_FILES_H
#define CKPT_WRITE_DCP_FILES_H

#include "base/err.h"
#include "write/writer.h"

/* Add the files of w->cat's tensors below `folder` ("", or "step-5/"), for w->output's ranks. The
 * state dict is flat: {name: tensor}. */
int ckpt_dcp_files(const struct ckpt_writing *w, const char *folder, struct ckpt_err *err);

#endif
