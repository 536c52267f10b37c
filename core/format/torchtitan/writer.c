/* SPDX-License-Identifier: Apache-2.0 */
/* torchtitan: a distributed checkpoint under its own names, in a folder of its step. */
#include <inttypes.h>
#include <string.h>

#include "base/str.h"
#include "format/dcp/out.h"

/* Say so if there are states that models with fuse_qkv have of other parameters: they divide the
 * weights of q, k and v when they are saved, but not what the optimizer has of them. */
static void tell_of_fused(const struct ckpt_writing *w)
{
    for (size_t i = 0; i < w->cat->tensors.len; i++) {
        const struct ckpt_state *s = w->cat->tensors.ptr[i].state;
        if (!s || !strstr(s->parameter, ".qkv_linear.wq."))
            continue;
        ckpt_catalog_warn(w->cat,
                          "optimizer: q, k and v have states of their own here ('%s'), as in "
                          "torchtitan's models with fuse_qkv=False: build the model so. With "
                          "fuse_qkv=True, which most of torchtitan 0.3's have, the optimizer looks "
                          "for those of one fused parameter, and does not load this view",
                          s->parameter);
        return;
    }
}

static int write_torchtitan(const struct ckpt_writing *w, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *folder = ckpt_asprintf("step-%" PRIu64 "/", w->step);

    tell_of_fused(w);
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
