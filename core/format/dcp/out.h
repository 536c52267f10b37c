/* SPDX-License-Identifier: Apache-2.0 */
/* A PyTorch distributed checkpoint, as torch writes it by default: `.metadata`, and for each rank
 * `__R_0.distcp`, which holds its parts of tensors as torch.save writes them, one after the other.
 *
 * What torch's FileSystemWriter writes with CRCs switched off (container/torch_out.h), but for
 * storage_meta: save_id is a random number there, and checkpoint_id a path; both are None here. */
#pragma once

#include "format/dcp/metadata_out.h"
#include "format/writer.h"

/* Add the files of a state below `folder` ("", or "step-5/"): of ranks 0..ranks, which are those of
 * its parts. A rank without parts has an empty file if `empty` is true, else none. The state is the
 * files' arena's. Objects are lists of None. */
int ckpt_dcp_out(const struct ckpt_writing *w, const char *folder, struct ckpt_dcp_state *s,
                 uint32_t ranks, bool empty, struct ckpt_err *err);

/* Add a checkpoint of w->cat's tensors under their names, cut by rows as FSDP2 does (dcp/rows.h),
 * below `folder` ("", or "step-5/"), for w->output's ranks. The state dict is flat:
 * {name: tensor}. */
int ckpt_dcp_files(const struct ckpt_writing *w, const char *folder, struct ckpt_err *err);
