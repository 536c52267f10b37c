/* SPDX-License-Identifier: Apache-2.0 */
/* A PyTorch distributed checkpoint of the model, under the hub's names or those in memory. */
#include "format/dcp/out.h"

static int write_dcp(const struct ckpt_writing *w, struct ckpt_err *err)
{
    return ckpt_dcp_files(w, "", err);
}

const struct ckpt_writer ckpt_writer_dcp = {
    .name = "dcp",
    .keys = 1u << CKPT_CUT_RANKS | CKPT_WRITES_NAMES,
    .layout = "each tensor is cut along its first dimension, for ranks=N",
    .bare = true,
    .write = write_dcp,
};
