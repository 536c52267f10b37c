/* SPDX-License-Identifier: Apache-2.0 */
/* The parameters of all ranks of a pipeline, by name, as the model files of a universal checkpoint
 * list them: those of a stage are listed by each of its tensor-parallel ranks, and those of a tied
 * layer (tied_modules.KEY.NAME) by every stage that has the layer. */
#pragma once

#include "format/deepspeed/zero.h"

struct ckpt_ds_listed {
    const struct ckpt_ds_zero *z; /* the first rank that lists the parameter */
    const struct ckpt_ds_param *param;
    uint64_t nrank; /* number of ranks that list it */
    uint64_t numel; /* of all their parts */
};

struct ckpt_ds_pipe {
    CKPT_VEC(struct ckpt_ds_listed) listed;
    struct ckpt_map by_name;
    uint64_t ntp; /* number of tensor-parallel ranks */
    enum ckpt_dtype trained;
    bool has_trained; /* ds_config says in which dtype the model was trained */
};

/* Read the lists of the n ranks. Of a parameter that several stages list, ds_to_universal has kept
 * one copy, and a warning says so. UNSUPPORTED: the checkpoint has no rules for joining
 * tensor-parallel ranks, or there are experts. MISSING: buffers. */
int ckpt_ds_pipe_read(const struct ckpt_ds_zero *rank, uint64_t n, struct ckpt_ds_pipe *ret,
                      struct ckpt_err *err);
void ckpt_ds_pipe_release(struct ckpt_ds_pipe *p);

/* Has a tensor this parameter's elements, joined? `cut`: the rows of the padded vocabulary were
 * removed. */
bool ckpt_ds_pipe_fits(const struct ckpt_ds_pipe *p, const struct ckpt_ds_listed *listed,
                       const struct ckpt_torch_tensor *s, bool cut);
