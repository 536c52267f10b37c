/* SPDX-License-Identifier: Apache-2.0 */
/* torchtitan: a distributed checkpoint under its own names, in a folder of its step. */
#include <inttypes.h>

#include "base/str.h"
#include "format/dcp/out.h"

static int write_torchtitan(const struct ckpt_writing *w, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *folder = ckpt_asprintf("step-%" PRIu64 "/", w->step);

    return folder ? ckpt_dcp_files(w, folder, CKPT_DCP_FLATTENED, err) : ckpt_nomem(err);
}

const struct ckpt_writer ckpt_writer_torchtitan = {
    .name = "torchtitan",
    .keys = 1u << CKPT_CUT_RANKS,
    .layout = "each tensor is cut along its first dimension, for ranks=N",
    .bare = true,
    .recipes = "torchtitan",
    .state_name = ckpt_dcp_flattened_name,
    .has_scheduler = true,
    .also = "to_torchtitan",
    .write = write_torchtitan,
};
