/* SPDX-License-Identifier: Apache-2.0 */
/* torchtitan: a distributed checkpoint under its own names, in a folder of its step. */
#include <inttypes.h>
#include <string.h>

#include "base/str.h"
#include "format/dcp/out.h"

/* Models with fuse_qkv divide the weights of q, k and v when they are saved, but not what the
 * optimizer has of them. Say so if the view has states for models without it, and no option says
 * that these are wanted, or if the option has changed nothing. */
static void tell_of_fused(const struct ckpt_writing *w)
{
    const enum ckpt_output_fused said = w->output->fuse_qkv;
    const char *apart = NULL;
    bool fused = false;

    for (size_t i = 0; i < w->cat->tensors.len; i++) {
        const struct ckpt_state *s = w->cat->tensors.ptr[i].state;
        fused |= s && !ckpt_catalog_find(w->cat, s->weight);
        if (s && !apart && strstr(s->parameter, ".qkv_linear.wq."))
            apart = s->parameter;
    }
    if (apart && said == CKPT_OUTPUT_FUSED_UNSAID)
        ckpt_catalog_warn(w->cat,
                          "optimizer: q, k and v have states of their own here ('%s'), as in "
                          "torchtitan's models with fuse_qkv=False: build the model so. For one "
                          "with fuse_qkv=True, as most of torchtitan 0.3's are, the option "
                          "fuse_qkv writes the states of the fused parameter, for which its "
                          "optimizer looks (fuse_qkv=no leaves them so, without this warning)",
                          apart);
    if (!fused && said == CKPT_OUTPUT_FUSED)
        ckpt_catalog_warn(w->cat, "option fuse_qkv: there are no states of q, k and v that "
                                  "torchtitan fuses: each is that of a weight");
}

static int write_torchtitan(const struct ckpt_writing *w, struct ckpt_err *err)
{
    ckpt_cleanup(ckpt_freep) char *folder = ckpt_asprintf("step-%" PRIu64 "/", w->step);

    tell_of_fused(w);
    return folder ? ckpt_dcp_files(w, folder, CKPT_DCP_FLATTENED, err) : ckpt_nomem(err);
}

const struct ckpt_writer ckpt_writer_torchtitan = {
    .name = "torchtitan",
    .keys = 1u << CKPT_CUT_RANKS | CKPT_WRITES_FUSED,
    .layout = "each tensor is cut along its first dimension, for ranks=N",
    .bare = true,
    .recipes = "torchtitan",
    .state_name = ckpt_dcp_flattened_name,
    .has_scheduler = true,
    .also = "to_torchtitan",
    .write = write_torchtitan,
};
