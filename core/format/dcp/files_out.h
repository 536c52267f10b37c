/* SPDX-License-Identifier: Apache-2.0 */
/* A PyTorch distributed checkpoint of a catalogue's tensors under their names, cut by rows as FSDP2
 * does (format/dcp/out.h, format/dcp/rows.h). */
#ifndef CKPT_FORMAT_DCP_FILES_OUT_H
#define CKPT_FORMAT_DCP_FILES_OUT_H

#include "base/err.h"
#include "format/writer.h"

/* Add the files of w->cat's tensors below `folder` ("", or "step-5/"), for w->output's ranks. The
 * state dict is flat: {name: tensor}. */
int ckpt_dcp_files(const struct ckpt_writing *w, const char *folder, struct ckpt_err *err);

#endif
